/*
 * pool.h: adapters in memory at fixed addresses.
 *
 * This room owns: the layout of a slot, packing an adapter into an image, the device tables
 * (a, b, scale, rank per site and slot), the states of slots, references, pins, and the choice of
 * a victim. It must not know: names, files, threads.
 *
 * One pool belongs to one engine thread. sp_layout is immutable and may be shared; sp_layout_pack
 * is thread-safe on distinct images, so loader threads pack while the engine steps.
 *
 * A slot is one contiguous block: sites in the order of the geometry's rows, A then B;
 * A [R, k_in] and B [n_out, R] row-major, R = the pool's rank rounded up to 8; every matrix starts
 * on a 256-byte boundary; rows of A and columns of B beyond the adapter's own rank, and sites that
 * it does not adapt, are zero. A host image has exactly the device's bytes.
 *
 * Pairs of routers and experts differ much in size from adapter to adapter, and so do replaced rows
 * of tables: each of the two kinds lives in a second memory of the pool with a byte budget, where
 * an adapter takes one extent of what it needs.
 *
 * Stability: stable, except where a block says experimental.
 */
#ifndef SIDEPATH_POOL_H
#define SIDEPATH_POOL_H

#include <sidepath/adapter.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SP_POOL_ALIGN_BYTES 256
#define SP_POOL_RANK_STEP   8
#define SP_POOL_RANK_MAX    4096

/* ---- layout -------------------------------------------------------------------------------- */

typedef struct sp_layout sp_layout;

/*
 * A part of a site: a range of its rows (of B, its outputs) and of its columns (of A, its inputs),
 * in an order of the host's. docs/SLICES.md says what for.
 */
typedef struct sp_site_slice {
    size_t struct_bytes;
    int32_t site;               /* of the geometry; linear */
    int32_t row_begin, row_end; /* [begin, end) of n_out; an end of 0: all of them */
    int32_t col_begin, col_end; /* [begin, end) of k_in; an end of 0: all of them */
    const int32_t *row_map;     /* [rows of the slice] which row of the site each one is, any of
                                   them; NULL: row_begin and on */
} sp_site_slice;

typedef struct sp_layout_options {
    size_t struct_bytes;
    sp_geometry *geometry; /* retained */
    sp_module_set modules; /* of the geometry, that slots hold; those of routers and experts, which
                              slots never hold, are passed over. None left: every module of linear
                              sites, also where that is the union of adapters without pairs */
    int32_t rank;          /* the pool's rank, 1 .. SP_POOL_RANK_MAX */
    sp_dtype dtype;        /* BF16; F32 in the checking mode; F16 where a host wants it */
    /* What replaced rows are compared with; their data is borrowed as long as the layout lives.
     * NULL: not served, and such adapters are refused. With a tied head both are of one memory, and
     * only then. */
    const sp_served_table *served_embed, *served_head;
    sp_device *images_for;       /* host images are in memory that this device copies from at full
                                    speed; borrowed as long as the layout and its images live. NULL:
                                    in plain memory */
    const sp_site_slice *slices; /* [n_slices] ascending by site, each with the struct_bytes of the
                                    first; borrowed until return. Other sites are held whole */
    size_t n_slices;
    int32_t expert_rank; /* largest rank of router and expert pairs, up to SP_POOL_RANK_MAX; 0: such
                            pairs are refused, `experts-disabled` */
} sp_layout_options;

SP_API void sp_layout_options_default(sp_layout_options *out_options, size_t struct_bytes);

/*
 * SP_ERR_ARGUMENT: a rank out of range, a module that the geometry lacks everywhere, one table for
 * both sides where the geometry's head is not tied. SP_ERR_UNSUPPORTED: experts of one module and
 * layer whose dimensions differ. Of slices, with the slice's index as position: SP_ERR_ARGUMENT
 * with `bad-slice` or `module-not-in-pool`, SP_ERR_UNSUPPORTED with `slice-unsupported`: an
 * embedding or a head.
 */
SP_API sp_status sp_layout_create(const sp_layout_options *options, sp_layout **out_layout,
                                  sp_error *error);
SP_API sp_layout *sp_layout_retain(sp_layout *layout);
SP_API void sp_layout_release(sp_layout *layout);

SP_API size_t sp_layout_slot_bytes(const sp_layout *layout);
SP_API int32_t sp_layout_rank_stride(const sp_layout *layout); /* R */
SP_API sp_dtype sp_layout_dtype(const sp_layout *layout);
SP_API sp_module_set sp_layout_modules(const sp_layout *layout); /* of the slots */
SP_API int32_t sp_layout_expert_rank(const sp_layout *layout);   /* options.expert_rank */
SP_API sp_geometry *sp_layout_geometry(const sp_layout *layout); /* borrowed */
/* kind: SP_SITE_EMBEDDING or SP_SITE_HEAD; NULL where it is not served. The layout's. */
SP_API const sp_served_table *sp_layout_served(const sp_layout *layout, sp_site_kind kind);
SP_API sp_device *sp_layout_images_for(const sp_layout *layout); /* borrowed, or NULL */

/*
 * SHA-256 over all that decides the bytes of an image beside the adapter: every site's path with
 * its dimensions, place and slice, rank stride, element type, and type and shape of the served
 * tables. Two layouts with one fingerprint give one image for one adapter, where the tables'
 * content is the same, too, of which the fingerprint says nothing.
 */
SP_API sp_digest sp_layout_fingerprint(const sp_layout *layout);

/* Sites in slot order: those rows of the geometry that the pool holds; after them the routers,
 * whose factors are in the expert memory. The layout's, as long as it lives. */
typedef struct sp_layout_site {
    size_t struct_bytes;
    int32_t site; /* in the geometry */
    int32_t layer;
    sp_site_kind kind;
    int32_t module;                        /* number of its name in the geometry */
    int32_t k_in, n_out;                   /* of the slice */
    size_t a_offset_bytes, b_offset_bytes; /* inside a slot */
    int32_t row_begin, col_begin;          /* of the slice; 0 where it is the whole */
    const int32_t *row_map;                /* [n_out] row of the whole; NULL: row_begin and on */
    bool apart; /* in the expert memory: no offsets, and rows of B are as far apart as the pair's
                   own rank rounded up to 8, not R */
} sp_layout_site;

SP_API int32_t sp_layout_n_sites(const sp_layout *layout);
SP_API const sp_layout_site *sp_layout_site_at(const sp_layout *layout, int32_t index);

/* Index here of a site of the geometry, or -1 where the pool does not hold it. Constant time. */
SP_API int32_t sp_layout_find(const sp_layout *layout, int32_t site);

/* ---- experts, experimental ----------------------------------------------------------------- */

/* One expert module of one layer, for all of its experts. The layout's, as long as it lives. */
typedef struct sp_expert_place {
    size_t struct_bytes;
    int32_t layer, module; /* module: number of its name in the geometry */
    int32_t k_in, n_out;   /* of each expert */
} sp_expert_place;

/* By layer and module in the geometry's order; none where expert_rank is 0. */
SP_API int32_t sp_layout_n_expert_places(const sp_layout *layout);
SP_API const sp_expert_place *sp_layout_expert_place_at(const sp_layout *layout, int32_t index);

/* Index of the place of an expert's site in the geometry, or -1. Constant time. */
SP_API int32_t sp_layout_find_expert_place(const sp_layout *layout, int32_t site);

/* The most device bytes that the tables of experts take for so many slots, beside the budget. */
SP_API size_t sp_layout_expert_table_bytes(const sp_layout *layout, int32_t slots);

/*
 * The bytes of one slot for these options, without allocating; what a preflight prints.
 * The check values of docs and tests are sums without alignment: *out_matrix_bytes.
 */
SP_API sp_status sp_layout_measure(const sp_layout_options *options, size_t *out_slot_bytes,
                                   size_t *out_matrix_bytes, sp_error *error);

/* ---- images -------------------------------------------------------------------------------- */

/*
 * An adapter's packed bytes, and what the tables need beside them: rank and scale of every site.
 * Made by packing only, immutable, and bound to its layout: a pool of another fingerprint refuses
 * it, and one with replaced rows also a pool that serves other tables.
 */
typedef struct sp_image sp_image;

SP_API sp_digest sp_image_digest(const sp_image *image); /* the adapter's */

/* sp_layout_fingerprint of the layout that it was packed for. */
SP_API sp_digest sp_image_fingerprint(const sp_image *image);

/* Host bytes that the image takes, its arrays and its replaced rows included. */
SP_API size_t sp_image_bytes(const sp_image *image);

/* Those of them that its replaced rows take of a pool's overlay_bytes; 0: it replaces none. */
SP_API size_t sp_image_overlay_bytes(const sp_image *image);

/* Those of them that its router and expert pairs take of a pool's expert_bytes; 0: it has none. */
SP_API size_t sp_image_expert_bytes(const sp_image *image);

/* XXH3 of the slot's bytes: finds accidents, proves nothing. */
SP_API uint64_t sp_image_checksum(const sp_image *image);

/*
 * The modules that the adapter adapts by pairs, as a set of its geometry's: what a slot must have a
 * place for. Rows that it replaces need none.
 */
SP_API sp_module_set sp_layout_pair_modules(const sp_adapter *adapter);

/*
 * Experimental. Bytes that an adapter's router and expert pairs take of a pool's expert_bytes,
 * exactly: A [S, k_in] and B [n_out, S], S = the pair's rank rounded up to 8, each matrix on a
 * boundary of 256 bytes; a fused gate and up of one expert share their A. 0: it has none.
 */
SP_API size_t sp_layout_expert_bytes(const sp_adapter *adapter, sp_dtype dtype);

/* The bytes that the rows which it replaces take beside the slot; 0: it replaces none. Fails as
 * sp_layout_pack does for such rows. */
SP_API sp_status sp_layout_measure_overlay(const sp_layout *layout, const sp_adapter *adapter,
                                           size_t *out_bytes, sp_error *error);

/*
 * Packs the adapter: converts to the pool's dtype (nearest even), A's rows at the head of its
 * region, B's rows re-strided from r to R, all else zero. *out_image is owned by the caller
 * (sp_image_destroy). Does not read files. Thread-safe where `exec` is NULL: then the caller does
 * all of it; else the executor's threads help, with the same bytes.
 * SP_ERR_TOO_LARGE with `rank-exceeds-pool`; SP_ERR_REFUSED with `module-not-in-pool` (the text
 * names the module and lora-modules); SP_ERR_TOO_LARGE with `expert-rank-exceeds-cap`;
 * SP_ERR_REFUSED with `experts-disabled`; SP_ERR_UNSUPPORTED with `engine-unsupported` where the
 * adapter replaces rows of a table that is not served; SP_ERR_MISMATCH with `shape-mismatch` and
 * SP_ERR_REFUSED with `bad-token-index`: rows that do not fit the served table; SP_ERR_MEMORY.
 */
SP_API sp_status sp_layout_pack(const sp_layout *layout, const sp_adapter *adapter, sp_exec *exec,
                                sp_image **out_image, sp_error *error);
SP_API void sp_image_destroy(sp_image *image); /* NULL is allowed */

/* ---- pool ---------------------------------------------------------------------------------- */

typedef struct sp_pool sp_pool;

typedef enum sp_slot_state {
    SP_SLOT_EMPTY = 0,
    SP_SLOT_LOADING = 1,
    SP_SLOT_READY = 2,
    SP_SLOT_DRAINING = 3
} sp_slot_state;

/*
 * A version in a slot: what a caller holds instead of a slot number. Generations are never given
 * twice, in no pool of the process, so a handle whose slot was loaded anew, or one of another pool,
 * is refused as `handle-stale` and never means another adapter. Frozen: it will not grow.
 */
typedef struct sp_slot_handle {
    int32_t slot;
    uint64_t generation; /* 0: no version has it */
} sp_slot_handle;

typedef struct sp_slot_info {
    size_t struct_bytes;
    sp_slot_state state;
    bool pinned;
    bool awaited;        /* loaded for a request that still waits: never a victim */
    int32_t references;  /* holders of this version */
    uint64_t generation; /* of the newest load; 0 = never loaded */
    uint64_t last_use;   /* the pool's own use counter, for LRU */
    sp_digest digest;
} sp_slot_info;

typedef struct sp_pool_options {
    size_t struct_bytes;
    sp_layout *layout;    /* retained */
    sp_device *device;    /* borrowed until sp_pool_destroy */
    int32_t slots;        /* 1 .. 4096 */
    size_t overlay_bytes; /* budget of replaced rows, of all slots together; 0: none are taken */
    size_t expert_bytes;  /* the same of router and expert pairs */
} sp_pool_options;

SP_API void sp_pool_options_default(sp_pool_options *out_options, size_t struct_bytes);

/*
 * Allocates slots × slot bytes at one fixed address, and the tables. Everything starts EMPTY and
 * zero. SP_ERR_MEMORY says how much was needed and which setting to lower.
 */
SP_API sp_status sp_pool_create(const sp_pool_options *options, sp_pool **out_pool,
                                sp_error *error);
SP_API void sp_pool_destroy(sp_pool *pool); /* NULL is allowed */

SP_API int32_t sp_pool_slots(const sp_pool *pool);
SP_API sp_layout *sp_pool_layout(const sp_pool *pool); /* borrowed */
SP_API sp_device *sp_pool_device(const sp_pool *pool); /* borrowed */
SP_API size_t sp_pool_device_bytes(const sp_pool *pool);

/* SP_ERR_ARGUMENT: no such slot, or out_info's struct_bytes is not set. */
SP_API sp_status sp_pool_slot_info(const sp_pool *pool, int32_t slot, sp_slot_info *out_info,
                                   sp_error *error);

/*
 * The victim policy, pure: the first EMPTY slot, else the idle READY slot least recently used
 * (ties: the lowest). Idle: not pinned, not awaited, no references. slots [n_slots], each with the
 * struct_bytes of the first. SP_POOL_FULL: none now, try again later. SP_ERR_SLOTS_PINNED: every
 * slot is pinned, for good.
 */
SP_API sp_status sp_pool_pick_victim(const sp_slot_info *slots, int32_t n_slots, int32_t *out_slot,
                                     sp_error *error);

/*
 * Loads an image into a slot: victim, copy, tables. *out_handle is the version, with one reference
 * that is the caller's until sp_pool_release; no load takes the slot away before. On failure
 * nothing is left and *out_handle is as it was.
 * SP_POOL_FULL: every slot has a holder, is on its way or pinned, or the room for replaced rows or
 * for experts is taken; release a handle and try again. SP_ERR_SLOTS_PINNED: every slot is pinned.
 * SP_ERR_TOO_LARGE with `overlay-too-large` or `experts-too-large`. SP_ERR_ARGUMENT with
 * `other-layout`: an image that was not packed for the pool's layout. SP_ERR_DEVICE.
 */
SP_API sp_status sp_pool_load(sp_pool *pool, const sp_image *image, sp_slot_handle *out_handle,
                              sp_error *error);

/*
 * One reference more to a READY version, and one less. The last release leaves the version in its
 * slot, where sp_pool_acquire finds it again until a load needs the slot; a DRAINING slot becomes
 * EMPTY. Every handle must be released before the pool is destroyed by whoever took it.
 * SP_ERR_ARGUMENT with `slot-out-of-range`. SP_ERR_STATE with `slot-empty`, `slot-loading`,
 * `handle-stale`; acquire: `slot-draining`; release: `handle-released` where nobody holds it.
 */
SP_API sp_status sp_pool_acquire(sp_pool *pool, sp_slot_handle handle, sp_error *error);
SP_API sp_status sp_pool_release(sp_pool *pool, sp_slot_handle handle, sp_error *error);

/*
 * Whether rows may be routed to the version: SP_OK while its slot is READY or DRAINING, has this
 * generation and is held. Else as sp_pool_release says. Changes nothing.
 */
SP_API sp_status sp_pool_check_handle(const sp_pool *pool, sp_slot_handle handle, sp_error *error);

/* Another number after every event that may have ended a handle: a last release, a slot emptied or
 * chosen as a victim. While it stays, what sp_pool_check_handle allowed is still so. */
SP_API uint64_t sp_pool_changes(const sp_pool *pool);

/* The READY version with this content. It is not acquired. SP_ERR_NOT_FOUND. */
SP_API sp_status sp_pool_find(const sp_pool *pool, const sp_digest *digest,
                              sp_slot_handle *out_handle, sp_error *error);

/* Used by a step: renews last_use. A handle that is stale does nothing. */
SP_API void sp_pool_touch(sp_pool *pool, sp_slot_handle handle);

/*
 * READY → DRAINING (references left, SP_BUSY: the last release empties it) or EMPTY (SP_OK).
 * SP_BUSY for a DRAINING one. SP_ERR_STATE with `pinned`; else as sp_pool_acquire.
 */
SP_API sp_status sp_pool_drain(sp_pool *pool, sp_slot_handle handle, sp_error *error);

/* Of READY versions only; refuses like sp_pool_acquire. */
SP_API sp_status sp_pool_set_pinned(sp_pool *pool, sp_slot_handle handle, bool pinned,
                                    sp_error *error);
SP_API sp_status sp_pool_set_awaited(sp_pool *pool, sp_slot_handle handle, bool awaited,
                                     sp_error *error);

/* ---- loading in pieces --------------------------------------------------------------------- */

/*
 * For a host that copies on a thread of its own: begin, reserve, write (on that thread), commit, or
 * abort. A LOADING slot has no version yet, so these calls take its number.
 *
 * EMPTY or idle READY → LOADING. Takes the victim's tables out of service first, so that no step
 * from now on can read a slot that is being written; on a GPU a step that was enqueued before still
 * may, and whatever is written to the slot later waits on the device until that step is over. The
 * same holds where a slot becomes EMPTY. SP_POOL_FULL and SP_ERR_SLOTS_PINNED as sp_pool_load.
 */
SP_API sp_status sp_pool_load_begin(sp_pool *pool, int32_t *out_slot, sp_error *error);

/*
 * Whether sp_pool_load_reserve would find room, once a slot is LOADING: SP_OK, or what it returns.
 * Changes nothing.
 */
SP_API sp_status sp_pool_check_room(sp_pool *pool, const sp_image *image, sp_error *error);

/*
 * Takes the room in the second memories that the image needs, if any, for a LOADING slot: in both,
 * or in none. Idle slots that hold the room lose their adapters (READY → EMPTY), least recently
 * used first, as few as possible and only where that makes room. Twice is harmless.
 * SP_ERR_TOO_LARGE with `overlay-too-large` or `experts-too-large`: more than the whole budget.
 * SP_POOL_FULL: no room now, retryable; nothing was changed.
 */
SP_API sp_status sp_pool_load_reserve(sp_pool *pool, int32_t slot, const sp_image *image,
                                      sp_error *error);

/*
 * Copies the image into a LOADING slot. The tables still say "absent". Reserves first, unless that
 * is done; a host that copies on another thread reserves on the pool's own before, and this call
 * then touches nothing but the slot and its extent.
 */
SP_API sp_status sp_pool_load_write(sp_pool *pool, int32_t slot, const sp_image *image,
                                    sp_error *error);

/*
 * LOADING → READY: writes the slot's cells of every table, between two steps. *out_handle has one
 * reference, the caller's. SP_ERR_STATE: not LOADING, or nothing written. SP_ERR_ARGUMENT: another
 * image than the one that was written. SP_ERR_DEVICE: it is LOADING still, abort it.
 */
SP_API sp_status sp_pool_load_commit(sp_pool *pool, int32_t slot, const sp_image *image,
                                     sp_slot_handle *out_handle, sp_error *error);

/* LOADING → EMPTY, after a failure; the slot is zeroed. */
SP_API sp_status sp_pool_load_abort(sp_pool *pool, int32_t slot, sp_error *error);

/* ---- bytes that were packed elsewhere, experimental ---------------------------------------- */

/*
 * What is said of an image as sp_layout_pack makes it, of an adapter without replaced rows: those
 * depend on the served tables. Its bytes are those of the slot; where it has router or expert pairs
 * their part of the expert memory follows: `expert_bytes` of factors, then an sp_expert_cell for
 * each expert of each place, then one for each router, in the layout's order.
 */
typedef struct sp_packed_image {
    size_t struct_bytes;
    sp_digest digest;      /* the adapter's */
    sp_digest fingerprint; /* of the layout that it was packed for */
    uint64_t checksum;     /* XXH3 of its bytes */
    const int32_t *ranks;  /* [n_sites] in the layout's order; 0: the site is not adapted */
    const float *scales;   /* [n_sites] */
    int32_t n_sites;
    /* shown in lists of adapters */
    int32_t rank, pairs; /* all of its pairs: an image with fewer is refused with `bad-image` */
    size_t file_bytes;
    double row_macs;
    const char *receipt; /* NULL: none */
    /* Not NULL: SHA-256 over all of the above that the pool reads and the image's bytes, which
     * binds them to the digest and the fingerprint; other bytes are refused. */
    const sp_digest *seal;
    size_t expert_bytes; /* of factors of routers and experts, as sp_layout_expert_bytes; 0: none */
} sp_packed_image;

/*
 * For bytes that need no memory of their own on the way: begin, open, what writes the bytes, seal,
 * commit, or abort. Nothing sees the slot before commit, and abort leaves it EMPTY.
 *
 * *out_memory [sp_layout_slot_bytes] is the LOADING slot's own, on the host and on a boundary of
 * SP_POOL_ALIGN_BYTES. Any thread may write it until the slot is sealed, committed or aborted, and
 * nobody later. *out_image is owned by the caller (sp_image_destroy, before or after the slot stops
 * being LOADING) and belongs to this opening: other slots refuse it with `image-elsewhere`, as does
 * this one once it is loaded or opened anew. SP_ERR_STATE: not LOADING. SP_ERR_UNSUPPORTED: the
 * slots are on a GPU, where an image is written with sp_pool_load_write. SP_ERR_MEMORY.
 */
SP_API sp_status sp_pool_load_open(sp_pool *pool, int32_t slot, sp_image **out_image,
                                   void **out_memory, sp_error *error);

/*
 * Completes the image of an open slot, unless its bytes are not those of `packed`: reads all of
 * them. Any thread, as sp_pool_load_write. SP_ERR_REFUSED with `other-layout`, and with
 * `bad-image`: a rank beyond the pool's, a scale that is not finite, another checksum, fewer pairs
 * than there are, or pairs of routers and experts, which are not in a slot. SP_ERR_PEER_CONTENT
 * with `peer-content`: bytes that the seal was not made of. After a failure the bytes may be
 * written and sealed again. SP_ERR_ARGUMENT with `image-elsewhere`. SP_ERR_MEMORY.
 */
SP_API sp_status sp_pool_load_seal(sp_pool *pool, int32_t slot, sp_image *image,
                                   const sp_packed_image *packed, sp_error *error);

/* ---- tables -------------------------------------------------------------------------------- */

/*
 * The tables of one site, on the device: [slots] each, at addresses that never change. A cell of
 * `a` or `b` is NULL and its rank 0 where the slot does not adapt the site. The pool's: it lives
 * as long as the pool.
 */
typedef struct sp_pool_tables {
    size_t struct_bytes;
    const void *const *a; /* [slots] → [R, k_in] of the pool's dtype */
    const void *const *b; /* [slots] → [n_out, R] */
    const float *scale;   /* [slots] */
    const int32_t *rank;  /* [slots] */
    /* Where slot 0 has its factors, whatever its cells say; those of slot s are s slots further.
     * NULL for a router, whose factors are in the expert memory; its R is the own rank of each slot
     * rounded up to 8. */
    const void *first_a, *first_b;
} sp_pool_tables;

/* site: an index of the layout's; NULL where it has none. */
SP_API const sp_pool_tables *sp_pool_tables_at(const sp_pool *pool, int32_t site);

/* [slots] on the device, at an address that never changes: the generation of the version that each
 * slot shows to the steps, 0: none. It changes with the tables, in the order of the steps. */
SP_API const uint64_t *sp_pool_generations(const sp_pool *pool);

/*
 * Rows of one table that the slots replace, on the device: [slots] each, at addresses that never
 * change. A cell's n is 0 and its pointers NULL where the slot replaces none. The pool's: it lives
 * as long as the pool.
 */
typedef struct sp_pool_overlays {
    size_t struct_bytes;
    const void *const *rows;   /* [slots] → [n, hidden] of row_type */
    const int32_t *const *map; /* [slots] → [vocab] row number of each token, or -1 */
    const int32_t *const *ids; /* [slots] → [n] tokens, ascending */
    const int32_t *n;          /* [slots] */
    const int32_t *row_type;   /* [slots] an sp_dtype */
    int32_t n_slots;           /* slots that replace any row now, on the host */
} sp_pool_overlays;

/* kind: SP_SITE_EMBEDDING or SP_SITE_HEAD. All NULL in a pool without a budget. */
SP_API const sp_pool_overlays *sp_pool_overlays_of(const sp_pool *pool, sp_site_kind kind);

/*
 * Experimental. One expert of one place in one slot: where its factors begin, in units of
 * SP_POOL_ALIGN_BYTES from the slot's factors. A [S, k_in], B [n_out, S], S = rank rounded up to 8.
 * Rank 0: not adapted, and then all is 0. Gate and up may name one A. Frozen: it will not grow.
 */
typedef struct sp_expert_cell {
    uint32_t a, b;
    int32_t rank;
    float scale;
} sp_expert_cell;

/*
 * Experimental. The experts of one place, on the device: [slots] each, at addresses that never
 * change. A cell of `cells` is NULL where the slot adapts no expert of the place. The pool's: it
 * lives as long as the pool.
 */
typedef struct sp_pool_experts {
    size_t struct_bytes;
    const sp_expert_cell *const *cells; /* [slots] → [experts of the geometry] */
    const void *const *factors; /* [slots] → the slot's factors; the same for all places */
} sp_pool_experts;

/* place: an index of sp_layout_expert_place_at; NULL: no such place, or a pool without a budget. */
SP_API const sp_pool_experts *sp_pool_experts_at(const sp_pool *pool, int32_t place);

/* Slots that adapt any expert now, on the host. */
SP_API int32_t sp_pool_expert_slots(const sp_pool *pool);

#ifdef __cplusplus
}
#endif
#endif
