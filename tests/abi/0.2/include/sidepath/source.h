/*
 * source.h: where a stage gets adapters from.
 *
 * Part of the stage room. A source is a table of functions: it describes an adapter before any of
 * its bytes move, and then gives its bytes in pieces into memory that the stage brings. What comes
 * is judged by the stage, the same way from every source: the description by the audit of headers,
 * the bytes as they come, the whole by its digest. A source need not be trusted for anything but an
 * image that it has packed itself.
 *
 * Sources work on loader threads of their own, so that one that is slow or hangs keeps none of the
 * others waiting.
 *
 * Stability: experimental.
 */
#ifndef SIDEPATH_SOURCE_H
#define SIDEPATH_SOURCE_H

#include <sidepath/intake.h>
#include <sidepath/pool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- what a stage requests ------------------------------------------------------------------ */

/* One fetch, from describe to release. Filled by the stage; valid until release has returned. */
typedef struct sp_source_request {
    size_t struct_bytes;
    uint64_t id;             /* above 0, never twice in one stage */
    const char *name;        /* the adapter's, as sp_stage_load was given it */
    const char *location;    /* likewise; "" where none was given */
    const sp_digest *digest; /* not NULL: this content, which was loaded before */
    sp_digest fingerprint;   /* of the stage's layout: an image must have been packed for it */
    const void *token;       /* for sp_source_is_cancelled */
} sp_source_request;

/* A piece of one part. Filled by the stage; valid until fetch returns. */
typedef struct sp_source_piece {
    size_t struct_bytes;
    size_t part;     /* index of the tensor in the description; 0 of an image */
    uint64_t offset; /* bytes from the part's first */
    void *memory;    /* [bytes] on the host */
    size_t bytes;
    uint64_t deadline_ns; /* on CLOCK_MONOTONIC; 0: none */
} sp_source_piece;

/*
 * Whether the fetch is no longer wanted, or its current call is past its deadline: a call that
 * waits asks this before it waits and whenever it is woken. Any thread, until release.
 */
SP_API bool sp_source_is_cancelled(const sp_source_request *request);

/* ---- what a source answers ----------------------------------------------------------------- */

/*
 * Zeroed by the stage, struct_bytes set: a source writes no field beyond it. What the
 * pointers lead to belongs to the source and stays until release.
 */
typedef struct sp_source_description {
    size_t struct_bytes;
    void *handle;       /* the source's own, for fetch and release */
    const char *config; /* the text of adapter_config.json */
    size_t config_bytes;
    const char *config_name;       /* what errors call it; NULL: "adapter_config.json" */
    const char *note;              /* for the receipt, one a line; NULL: none */
    const sp_tensor_desc *tensors; /* [n_tensors] */
    size_t n_tensors;
    /* Not NULL: packed already, and nothing else is fetched. Where config and tensors are given
     * too, they are audited before it moves, as if they were fetched. */
    const sp_packed_image *image;
    /* Not NULL: the digest that the source promises. Where a fetch is of another one nothing is
     * fetched; bytes that have another one are refused. */
    const sp_digest *digest;
} sp_source_description;

typedef struct sp_stage_source {
    size_t struct_bytes;
    void *user;
    /*
     * What the adapter is. SP_ERR_NOT_FOUND: this source does not have it, and the next one is
     * asked; as it is after SP_ERR_PEER_UNREACHABLE and the others of -300 to -399, whichever call
     * returns them. May block; on a loader thread, several at a time.
     */
    sp_status (*describe)(void *user, const sp_source_request *request,
                          sp_source_description *out_description, sp_error *error);
    /*
     * All bytes of the piece, or a failure. The calls of one fetch come one after the other, parts
     * in ascending order, each from its first byte on; only wanted parts are fetched.
     */
    sp_status (*fetch)(void *user, const sp_source_request *request, void *handle,
                       const sp_source_piece *piece, sp_error *error);
    /*
     * Makes a call of this fetch that waits return soon, with any failure: sp_source_is_cancelled
     * is true of it from before this call on. On the engine's thread; it must not block. Ids that
     * the source has not heard of are to be ignored. NULL: its calls never wait for long.
     */
    void (*cancel)(void *user, uint64_t id);
    /* After the last call of a fetch whose describe succeeded, once. NULL: nothing to do. */
    void (*release)(void *user, const sp_source_request *request, void *handle);
    int32_t threads;     /* its loader threads; 0: as many as the stage's options say */
    size_t piece_bytes;  /* the largest piece; 0: 256 KiB. At least one element of a tensor */
    bool images_trusted; /* packed images are taken: their bytes are not covered by the digest */
} sp_stage_source;

/* ---- the disk ------------------------------------------------------------------------------ */

/*
 * Adapters in directories: the location is a path as sp_adapter_open takes it. out_source has its
 * struct_bytes set; it is valid until sp_disk_source_destroy. SP_ERR_ARGUMENT, SP_ERR_MEMORY.
 */
SP_API sp_status sp_disk_source_create(sp_stage_source *out_source, sp_error *error);
SP_API void sp_disk_source_destroy(sp_stage_source *source); /* twice is harmless */

#ifdef __cplusplus
}
#endif
#endif
