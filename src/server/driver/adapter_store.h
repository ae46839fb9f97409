/*
 * adapter_store.h: published adapters in a directory of their own, so that they outlive the server.
 *
 *     DIR/names.json          which name means which content
 *     DIR/sha256-DIGEST/      one content: adapter_config.json, adapter_model.safetensors
 *     DIR/new-N/              one on its way in
 *
 * A content is written aside, synced, renamed and the directory synced; then the names are replaced
 * whole, in the same way. So there is never half of a version: a content that no name means, or
 * that was not finished, is removed when the store is opened. One server at a time has a store.
 * Every call may wait for the file system; one thread at a time makes them. It must not know:
 * engines, tasks.
 */
#ifndef SP_SERVER_DRIVER_ADAPTER_STORE_H
#define SP_SERVER_DRIVER_ADAPTER_STORE_H

#include <sidepath/adapter.h>

typedef struct sp_adapter_store sp_adapter_store;

/* The codes of a directory that is no store of this version, of one that another server has, and of
 * a version that could not be kept. */
#define SP_CODE_STORE_INVALID "store-invalid"
#define SP_CODE_STORE_IN_USE  "store-in-use"
#define SP_CODE_STORE_FAILED  "store-failed"
/* And of a content whose files are not those that were stored. */
#define SP_CODE_STORE_DIGEST "store-digest"

typedef struct sp_stored_adapter {
    char *name, *folder; /* the folder's path */
    sp_digest digest;
    bool pinned;
} sp_stored_adapter;

/*
 * SP_ERR_NOT_FOUND: there is no such directory. SP_ERR_STATE with `store-in-use`, SP_ERR_INPUT with
 * `store-invalid`: names.json is another program's, or broken; nothing was removed. SP_ERR_IO,
 * SP_ERR_MEMORY. *out_store is owned by the caller.
 */
sp_status sp_adapter_store_open(const char *directory, sp_adapter_store **out_store,
                                sp_error *error);
void sp_adapter_store_close(sp_adapter_store *store); /* NULL is allowed */

/* What names mean, in the order in which they were first recorded. */
size_t sp_adapter_store_n(const sp_adapter_store *store);
const sp_stored_adapter *sp_adapter_store_at(const sp_adapter_store *store, size_t index);

/*
 * Writes a content and keeps it until sp_adapter_store_settle. *out_folder, its path, is owned by
 * the caller (sp_free). SP_ERR_IO with `store-failed`, SP_ERR_MEMORY.
 */
sp_status sp_adapter_store_put(sp_adapter_store *store, const sp_digest *digest, const char *config,
                               size_t config_bytes, const char *weights, size_t weights_bytes,
                               char **out_folder, sp_error *error);
/* A put is over, whatever came of it; each needs one. */
void sp_adapter_store_settle(sp_adapter_store *store, const sp_digest *digest);

/*
 * From now on the name means the content with this digest, or nothing that is stored (NULL), over a
 * power failure too. SP_ERR_IO with `store-failed`, SP_ERR_MEMORY: it means what it did.
 */
sp_status sp_adapter_store_record(sp_adapter_store *store, const char *name,
                                  const sp_digest *digest, bool pinned, sp_error *error);
/* Whether the name is recorded. */
bool sp_adapter_store_has(const sp_adapter_store *store, const char *name);
/* Removes each content that no name means, no put holds, and that is not among in_use [n]. */
void sp_adapter_store_tidy(sp_adapter_store *store, const sp_digest *in_use, size_t n);

#endif
