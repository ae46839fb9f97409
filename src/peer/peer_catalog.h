/*
 * peer_catalog.h: what a directory offers, kept up to date by a thread of its own. Each folder in
 * it with an adapter is an entry of the folder's name. The thread looks at names, sizes and times
 * of the files again and again, reads and hashes what has changed, and keeps as many adapters in
 * memory as its budget allows, the ones that were used last. An adapter whose digest is known from
 * an earlier run is offered from its headers, and read and hashed when its bytes are first
 * requested.
 *
 * Names come out of the directory's own list, so no name leads out of it; links are followed as
 * base/confine.h lets them.
 *
 * Any thread, unless said so; nothing blocks on files but the catalogue's own thread. Pointers may
 * not be NULL unless said so.
 */
#ifndef SP_PEER_PEER_CATALOG_H
#define SP_PEER_PEER_CATALOG_H

#include "peer/peer_content.h"

typedef struct sp_peer_catalog sp_peer_catalog;

/* One version of one adapter. Content and block never change. */
typedef struct sp_peer_entry sp_peer_entry;

/* Functions that are called on the catalogue's thread. */
typedef struct sp_peer_catalog_events {
    void *user;
    void (*changed)(void *user); /* something can be answered now that could not before */
    void (*log)(void *user, const char *line); /* what is offered and what is not, and why */
    /* Memory that pieces will be sent from; both may be NULL. */
    void *(*register_memory)(void *user, void *memory, size_t bytes);
    void (*unregister_memory)(void *user, void *handle);
} sp_peer_catalog_events;

typedef struct sp_peer_catalog_options {
    const char *directory;
    const sp_adapter_options *audit; /* copied; the geometry is retained */
    const sp_peer_packer *packer;    /* copied; NULL: tensors alone */
    /* Borrowed, and the catalogue's thread alone uses it; NULL: everything is hashed. With a packer
     * it is not read: an image needs the data. */
    struct sp_peer_digests *digests;
    uint64_t memory_bytes; /* the budget */
    uint64_t rescan_ms;    /* from one look at the directory to the next */
    sp_peer_catalog_events events;
} sp_peer_catalog_options;

/* Starts the thread. Owned by the caller. SP_ERR_NOT_FOUND, SP_ERR_INPUT: no such directory.
 * SP_ERR_MEMORY, SP_ERR_THREAD. */
sp_status sp_peer_catalog_create(const sp_peer_catalog_options *options,
                                 sp_peer_catalog **out_catalog, sp_error *error);
/* Every entry must have been released. NULL is allowed. Waits for the thread. */
void sp_peer_catalog_destroy(sp_peer_catalog *catalog);

/*
 * The entry of a name, or of a digest. SP_OK with one reference; SP_PENDING: the catalogue is
 * reading it, or (by digest) is still reading others: `changed` will be called;
 * SP_ERR_NOT_FOUND. A refused adapter is SP_ERR_REFUSED, and error says why.
 */
sp_status sp_peer_catalog_find(sp_peer_catalog *catalog, const char *name, const sp_digest *digest,
                               sp_peer_entry **out_entry, sp_error *error);
sp_peer_entry *sp_peer_entry_retain(sp_peer_catalog *catalog, sp_peer_entry *entry);
void sp_peer_entry_release(sp_peer_catalog *catalog, sp_peer_entry *entry);
const sp_peer_content *sp_peer_entry_content(const sp_peer_entry *entry);

/*
 * The bytes of an entry, which stay until they are unpinned. SP_OK: *out_block and what it was
 * registered as. SP_PENDING: they are being read, or wait for memory; `changed` will be called.
 * SP_ERR_PEER_LOST: the files have changed. SP_ERR_BUDGET: it is larger than the budget.
 */
sp_status sp_peer_entry_pin(sp_peer_catalog *catalog, sp_peer_entry *entry, const char **out_block,
                            void **out_registered);
void sp_peer_entry_unpin(sp_peer_catalog *catalog, sp_peer_entry *entry);

/* What is offered now, as JSON for LISTING; *out_complete (may be NULL): nothing is being read. */
sp_status sp_peer_catalog_list(sp_peer_catalog *catalog, sp_text *out_text, bool *out_complete);

typedef struct sp_peer_catalog_counts {
    uint64_t offered, refused, reading; /* adapters */
    uint64_t memory_bytes, pinned_bytes;
    uint64_t reads, read_bytes, evictions;
    uint64_t known_digests; /* adapters that were offered without reading them */
} sp_peer_catalog_counts;
void sp_peer_catalog_count(sp_peer_catalog *catalog, sp_peer_catalog_counts *out_counts);

#endif
