/*
 * peer_digests.h: digests of adapters that were hashed in an earlier run, so that a large directory
 * is offered again without reading all of it. An adapter's key is SHA-256 over the folder's path
 * and name, size, device, inode and both times of change (in nanoseconds) of each of its files and
 * of the base's, and over the settings of its audit; where any of it differs the folder is read and
 * hashed as if it were new.
 *
 * Nothing depends on the file: bytes are hashed before they are sent, and a digest that is not
 * theirs ends the offer that was made with it. A file that is damaged, or of another version, is
 * passed over as a whole.
 *
 * One thread at a time. Pointers may not be NULL unless said so.
 */
#ifndef SP_PEER_PEER_DIGESTS_H
#define SP_PEER_PEER_DIGESTS_H

#include <sidepath/adapter.h>

#define SP_PEER_DIGESTS_NOTE_BYTES 256

typedef struct sp_peer_digests sp_peer_digests;

/*
 * Reads the file, if there is one. `audit_settings`: what decides, beside the files, which adapters
 * are taken and with which digest, as text; `base`: the directory (or the config.json) of the model
 * that they are audited against, as it is now, or NULL; one that cannot be listed, or has changed
 * so recently that it may change again without a trace, gives no adapter a key. out_note
 * [SP_PEER_DIGESTS_NOTE_BYTES] says why nothing of the file is used, or is "". Owned by the caller.
 * SP_ERR_MEMORY.
 */
sp_status sp_peer_digests_open(const char *path, const char *audit_settings, const char *base,
                               sp_peer_digests **out_digests,
                               char out_note[SP_PEER_DIGESTS_NOTE_BYTES], sp_error *error);
void sp_peer_digests_close(sp_peer_digests *digests); /* NULL is allowed; saves nothing */

/*
 * Called when the base has been read: where it is not the one that it was when the file was opened,
 * no adapter gets a key. NULL digests are allowed.
 */
void sp_peer_digests_check_base(sp_peer_digests *digests, const char *base);

/*
 * The key of a folder as it is now. False: it cannot be listed, one of its files changed so
 * recently that another change might leave no trace in its times, or the base gives none.
 */
bool sp_peer_digests_key(const sp_peer_digests *digests, const char *folder, sp_digest *out_key);

/* False: not known. */
bool sp_peer_digests_find(sp_peer_digests *digests, const sp_digest *key, sp_digest *out_digest);
/* Replaces what is known under the key. Out of memory: it is forgotten. */
void sp_peer_digests_put(sp_peer_digests *digests, const sp_digest *key, const sp_digest *digest);

/* Whether saving would change the file's content. */
bool sp_peer_digests_is_changed(const sp_peer_digests *digests);
/* Writes those that were found or put since the file was opened, in place of the file in one step.
 * SP_ERR_IO, SP_ERR_INPUT, SP_ERR_MEMORY; it counts as saved all the same. */
sp_status sp_peer_digests_save(sp_peer_digests *digests, sp_error *error);

#endif
