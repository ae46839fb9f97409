/*
 * source_peer.h: a peer as a source of a stage. A manifest becomes a description, which the stage
 * audits as it audits one from disk; bytes are requested in long runs, so that many small tensors
 * cost few messages. A peer is not trusted: the digest that it promises is handed to the stage,
 * which compares it with that of the bytes.
 *
 * An image that the peer has packed is not covered by that digest. It is offered to the stage only
 * where the operator trusts this peer with images, the peer has proved that it has the shared key,
 * and the image was packed for the stage's layout; in every other case the tensors are.
 *
 * A peer that did not answer in time is left alone for a second: loads that wait for it one after
 * the other would each wait as long, and the next source would be asked that much later.
 *
 * Pointers may not be NULL unless said so.
 */
#ifndef SP_STAGE_SOURCE_PEER_H
#define SP_STAGE_SOURCE_PEER_H

#include "peer/peer_client.h"

#include <sidepath/source.h>

typedef struct sp_peer_source sp_peer_source;

typedef struct sp_peer_source_options {
    const char *address; /* for texts; copied */
    sp_peer_calls calls; /* borrowed: they outlive the source */
    bool trust_images;
    uint64_t call_ms_max; /* of each call, a piece's too; 0: the client's own limit */
    int32_t threads;      /* loader threads; 0: as many as the stage's options say */
} sp_peer_source_options;

/* *out_source is owned by the caller, and outlives the stages that have its table. SP_ERR_MEMORY.
 */
sp_status sp_peer_source_create(const sp_peer_source_options *options, sp_peer_source **out_source,
                                sp_error *error);
void sp_peer_source_destroy(sp_peer_source *source); /* NULL is allowed */

sp_stage_source sp_peer_source_table(sp_peer_source *source);

/* Since the source was created. Any thread. */
typedef struct sp_peer_source_counts {
    uint64_t described;     /* manifests that were given to the stage */
    uint64_t images;        /* those of them with an image that was taken */
    uint64_t images_passed; /* offered and not taken: not trusted, or for another layout */
    uint64_t failures;      /* calls that failed for another reason than that it lacks something */
    uint64_t bytes;         /* that came, of tensors and images */
} sp_peer_source_counts;
void sp_peer_source_count(const sp_peer_source *source, sp_peer_source_counts *out_counts);

#endif
