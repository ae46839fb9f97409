/*
 * stage.h: where adapters come from, and which of them are in slots now.
 *
 * This room owns: the registry (name → version: content digest and generation), the host cache of
 * packed images with its byte budget, loader threads, the sources that images come from, and the
 * order in which adapters get slots of a pool. It must not know: steps, tokens, HTTP.
 *
 * A name maps to one version at a time. A version is a content (identified by its digest) under a
 * generation; names with equal content share one image and one slot. A request holds the version
 * that its name meant when it was resolved, until it lets go; what happens to the name meanwhile
 * (replaced, unloaded) does not concern it. A content is on disk only, on the host (packed image),
 * on its way to a slot, or in a slot.
 *
 * Threads. All functions are called by one thread, the engine's, between two steps; none of them
 * waits for a load, but sp_stage_wait. With threads > 0 the stage starts loader threads, which
 * fetch, check and pack, each source's own, and one more, which copies images into slots that no
 * step reads. With
 * threads = 0 it starts none, and sp_stage_poll does one piece of that work on the caller.
 *
 * Nothing that fails leaves a trace: until a load is whole, checked and in place, the name means
 * what it meant before.
 *
 * Stability: experimental.
 */
#ifndef SIDEPATH_STAGE_H
#define SIDEPATH_STAGE_H

#include <sidepath/pool.h>
#include <sidepath/source.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sp_stage sp_stage;
typedef struct sp_stage_version sp_stage_version;

/* ---- set-up -------------------------------------------------------------------------------- */

typedef struct sp_stage_options {
    size_t struct_bytes;
    sp_pool *pool;                  /* borrowed until sp_stage_destroy; all its slots EMPTY */
    const sp_stage_source *sources; /* [n_sources], copied; asked in this order */
    int32_t n_sources;              /* 0 .. 64 */
    size_t host_bytes_max;          /* budget of packed images on the host; 0: no limit */
    int32_t threads;                /* loader threads of each source, 0 .. 64 */
    sp_exec *exec;                  /* helps sp_stage_add, and nothing else; borrowed; NULL: none */
    const sp_adapter_options *audit; /* how adapters of the sources are judged (the name is the
                                        load's): copied, the geometry retained, served tables
                                        borrowed. NULL: the defaults, with the geometry and the
                                        served tables of the pool's layout */
    sp_module_set supported;         /* modules that the host can apply: others are refused as
                                        `engine-unsupported`; the default: all */
    const char *base_name; /* the base model's own, copied; NULL: none. No adapter may have it; as a
                              request's name it means the base */
    int32_t call_ms_max;   /* a call of a source that takes longer is cancelled and fails
                              as `source-timeout`; 0: no limit */
} sp_stage_options;

SP_API void sp_stage_options_default(sp_stage_options *out_options, size_t struct_bytes);

/*
 * With threads > 0 it starts that many for each source, one that packs what comes from memory, and
 * one that copies. SP_ERR_ARGUMENT: options out of range. SP_ERR_BUDGET: a budget below one image,
 * with the number and the setting. SP_ERR_MEMORY, SP_ERR_THREAD. *out_stage is owned by the caller.
 */
SP_API sp_status sp_stage_create(const sp_stage_options *options, sp_stage **out_stage,
                                 sp_error *error);

/*
 * Cancels the fetches in hand and waits for them and for the other pieces of work, drops everything
 * and empties the slots. All holds must be released. NULL is allowed. In the child of a fork() it
 * waits for nothing, as the threads are the parent's; no other call may be made there.
 */
SP_API void sp_stage_destroy(sp_stage *stage);

/* ---- names ---------------------------------------------------------------------------------- */

/*
 * The rule for adapter names: no control characters, no ':', not "." or "..", no blank at either
 * end, not `base_name` (may be NULL). SP_ERR_INPUT says what is wrong.
 */
SP_API sp_status sp_stage_name_check(const char *name, const char *base_name, sp_error *error);

/* ---- loading and unloading ----------------------------------------------------------------- */

#define SP_SOURCE_ANY (-1)

typedef struct sp_stage_load_options {
    size_t struct_bytes;
    const char *name;
    const char *location; /* a directory for the disk source; also used to load it again later;
                             NULL: none */
    int32_t source;       /* index of the source; SP_SOURCE_ANY, the default: the first that has it,
                             in their order */
    bool replace;         /* false: a name that is taken is refused as `name-taken` */
    uint64_t expected_generation; /* not 0: replace only while the name is at this generation */
    bool pinned;                  /* keep it in its slot, whatever others need */
    double spent_seconds;         /* on it already, by the caller of sp_stage_add */
    const sp_digest *digest; /* not NULL: this content, under whatever name its source has it; what
                                is there or on its way already is not fetched again. Copied; for
                                sp_stage_load alone */
} sp_stage_load_options;

SP_API void sp_stage_load_options_default(sp_stage_load_options *out_options, size_t struct_bytes);

/*
 * Starts a load and returns SP_PENDING with a ticket; sp_stage_result tells how it went. Strings
 * are copied. The name becomes visible, or changes its meaning, at the end of a load that
 * succeeded; until then its old version serves.
 * SP_ERR_INPUT: a name that sp_stage_name_check refuses. SP_BUSY: a load under this name is going
 * on. SP_POOL_FULL with `host-cache-full`: the budget is taken by adapters in use; try again.
 * SP_ERR_STATE with `name-taken` or `generation-changed`. SP_ERR_ARGUMENT, SP_ERR_MEMORY.
 */
SP_API sp_status sp_stage_load(sp_stage *stage, const sp_stage_load_options *options,
                               int64_t *out_ticket, sp_error *error);

/*
 * The same from an adapter that is open already, from memory as from files; the options' source is
 * not looked at. It is packed on a loader thread and retained until then. With options->location,
 * where its content is too, it is loaded again from there. Without one, or without sources, such a
 * version cannot be had again, so its image stays in the host cache, within the budget, as long as
 * the version lives: it is never evicted, and what does not fit is refused at once as
 * `host-cache-full`. SP_ERR_UNSUPPORTED with `engine-unsupported`: modules outside the stage's
 * `supported`. SP_ERR_ARGUMENT with `other-geometry`: the adapter was opened against another
 * geometry than the one of the pool's layout.
 */
SP_API sp_status sp_stage_put(sp_stage *stage, const sp_stage_load_options *options,
                              sp_adapter *adapter, int64_t *out_ticket, sp_error *error);

/*
 * At start: a load in one call, from an adapter that is open already. It takes a slot while one is
 * EMPTY; the rest wait in the host cache. It is loaded again from options->location; without one,
 * or without sources, its image stays on the host as that of sp_stage_put does.
 */
SP_API sp_status sp_stage_add(sp_stage *stage, const sp_stage_load_options *options,
                              const sp_adapter *adapter, sp_error *error);

/*
 * The outcome of a load; a final one is reported once and then forgotten. SP_PENDING: not yet.
 * SP_OK: *out_generation (may be NULL) is the new version's; it is in a slot, or, where a new name
 * found no free slot, on the host. SP_POOL_FULL: a replacement found no slot beside the version
 * that serves; try again. SP_ERR_SLOTS_PINNED: it never will. SP_ERR_STATE with `load-cancelled`:
 * the name was unloaded meanwhile; `name-taken`, `generation-changed` as above. SP_ERR_NOT_FOUND:
 * no such ticket. SP_ERR_IO with `source-timeout`. SP_ERR_MISMATCH with `content-changed`: the
 * source has another content than the one that is wanted. SP_ERR_PEER_CONTENT with `peer-content`:
 * other bytes than the source has promised. Of packed images SP_ERR_REFUSED with
 * `image-not-trusted`, `other-layout` (packed for another layout) or `bad-image` (ranks, scales or
 * checksum). Else what the source returned.
 */
SP_API sp_status sp_stage_result(sp_stage *stage, int64_t ticket, uint64_t *out_generation,
                                 sp_error *error);

/* Forgets this ticket: its outcome will not be queried; the load continues. */
SP_API void sp_stage_forget(sp_stage *stage, int64_t ticket);

/*
 * Removes the name at once, and cancels a load under it. SP_OK: nothing of it is left. SP_BUSY:
 * requests still hold the version and finish on it; it is freed when the last one releases it. If
 * it was the active adapter, none is. SP_ERR_NOT_FOUND. SP_ERR_STATE with `pinned`: unpin it first.
 */
SP_API sp_status sp_stage_unload(sp_stage *stage, const char *name, sp_error *error);

/*
 * Pins the name's version into its slot, or lets it go. Pinning one that is in no slot starts to
 * bring it in: SP_PENDING; SP_POOL_FULL or SP_ERR_SLOTS_PINNED and not pinned where it could not
 * come in now. SP_ERR_NOT_FOUND.
 */
SP_API sp_status sp_stage_set_pinned(sp_stage *stage, const char *name, bool pinned,
                                     sp_error *error);

/* What DEFAULT means from now on: this name, or the base (NULL, or its name). SP_ERR_NOT_FOUND. */
SP_API sp_status sp_stage_set_active(sp_stage *stage, const char *name, sp_error *error);

/* ---- requests ------------------------------------------------------------------------------ */

typedef enum sp_hold_kind {
    SP_HOLD_BASE = 0,   /* no adapter */
    SP_HOLD_NAMED = 1,  /* the adapter of this name; an unknown name is an error */
    SP_HOLD_DEFAULT = 2 /* the active adapter, else the base */
} sp_hold_kind;

/*
 * One request's hold on a version; kept by the caller, who sets struct_bytes, and changed by the
 * functions below only.
 */
typedef struct sp_hold {
    size_t struct_bytes;
    sp_stage_version *version; /* NULL: the base */
    int32_t slot;              /* -1: in no slot now */
    uint64_t generation;       /* the pool's, of the slot */
    bool waiting;              /* counted among those that wait for a slot */
    bool begun;                /* has been in a slot: its version must not get lost any more */
} sp_hold;

/*
 * What a request means, decided once, at admission. Works at once, wherever the content is.
 * SP_ERR_NOT_FOUND with the name.
 */
SP_API sp_status sp_stage_hold(sp_stage *stage, sp_hold_kind kind, const char *name,
                               sp_hold *out_hold, sp_error *error);

/*
 * Requests the version's slot. SP_OK: hold->slot and hold->generation are a reference to it (-1 for
 * the base), until sp_stage_yield or sp_stage_release. Else it waits, in the order of first asking,
 * and the caller asks again later:
 *   SP_PENDING    it is on its way from disk or into a slot
 *   SP_POOL_FULL  its image is ready, all slots are taken by others now
 *   SP_BUSY       the host cache is full of adapters in use
 *   SP_AGAIN      only with `give_way`: it is in a slot, but that slot is to fall free for others
 * `give_way` refuses a version whose slot others wait for, unless it was loaded for a request that
 * has not had it yet, is pinned, or cannot give it up without loss. SP_ERR_SLOTS_PINNED: no slot
 * will ever fall free. Another negative status: it cannot be had any more (`content-changed`: its
 * files are no longer those that were loaded); the caller ends the request with this error.
 */
SP_API sp_status sp_stage_request(sp_stage *stage, sp_hold *hold, bool give_way, sp_error *error);

/* The same without taking the slot: SP_OK means that sp_stage_request would. */
SP_API sp_status sp_stage_ask(sp_stage *stage, sp_hold *hold, bool give_way, sp_error *error);

/* Gives the slot back, or stops waiting; the version stays held. */
SP_API void sp_stage_yield(sp_stage *stage, sp_hold *hold);

/* Whether the slot would fall free without loss if all who hold it yielded. */
SP_API bool sp_stage_can_yield(const sp_stage *stage, const sp_hold *hold);

/* The end of a request: gives up slot, place in the queue and version. Twice is harmless. */
SP_API void sp_stage_release(sp_stage *stage, sp_hold *hold);

/* Counts a use of a version in a slot, for LRU and for statistics. */
SP_API void sp_stage_use(sp_stage *stage, const sp_hold *hold, uint64_t amount);

/* The digest and facts of a held version; borrowed as long as it is held. */
SP_API const sp_digest *sp_stage_version_digest(const sp_stage_version *version);
SP_API const char *sp_stage_version_name(const sp_stage_version *version);
SP_API uint64_t sp_stage_version_generation(const sp_stage_version *version);

/* ---- progress ------------------------------------------------------------------------------ */

/*
 * Between two steps: takes what the threads have finished, switches tables, starts what can be
 * started. SP_OK: something changed. SP_PENDING: nothing changed, work is going on. SP_AGAIN:
 * there is nothing to do.
 */
SP_API sp_status sp_stage_poll(sp_stage *stage);

/*
 * Blocks until a thread has finished something that sp_stage_poll has not taken yet, or for
 * timeout_ms. For an engine that has nothing else to do. Returns at once with threads = 0.
 */
SP_API void sp_stage_wait(sp_stage *stage, int32_t timeout_ms);

/* ---- list ---------------------------------------------------------------------------------- */

/*
 * sp_stage_poll, and where that says SP_PENDING, sp_stage_wait and sp_stage_poll again: for an
 * engine that has no requests. NULL: SP_AGAIN.
 */
SP_API sp_status sp_stage_poll_wait(sp_stage *stage, int32_t timeout_ms);

typedef enum sp_stage_version_state {
    SP_STAGE_VERSION_DISK = 0,    /* neither image nor slot; loaded again when a request needs it */
    SP_STAGE_VERSION_HOST = 1,    /* packed image in the host cache */
    SP_STAGE_VERSION_LOADING = 2, /* on its way */
    SP_STAGE_VERSION_READY = 3,   /* in a slot */
    SP_STAGE_VERSION_DRAINING =
        4 /* its name was removed or means another; requests still hold it */
} sp_stage_version_state;

SP_API const char *sp_stage_version_state_name(sp_stage_version_state state); /* "ready" */

/* The facts about an adapter that are kept after its tensors are packed and freed. */
typedef struct sp_stage_facts {
    size_t struct_bytes;
    int32_t rank;        /* the largest, experts and router included */
    int32_t sites;       /* pairs that are applied */
    size_t file_bytes;   /* stored bytes of its tensors */
    double row_macs;     /* sp_adapter_row_macs */
    const char *receipt; /* its receipt in JSON; NULL: the source gave none */
} sp_stage_facts;

typedef struct sp_stage_version_info {
    size_t struct_bytes;
    const char *name; /* strings live until the version goes */
    const char *location;
    sp_stage_version_state state;
    int32_t slot; /* -1: none */
    bool pinned, active;
    int32_t references;  /* requests that hold it, */
    int32_t in_slot;     /* and those of them that hold its slot; the others wait */
    uint64_t generation; /* rises with every load of the stage; never 0 */
    uint64_t id_hash;    /* sp_stage_id_hash of both */
    uint64_t last_use;   /* the stage's own clock: larger is later */
    uint64_t uses;
    sp_digest digest;
    const sp_stage_facts *facts; /* the stage's, until the version goes or is loaded again */
    size_t image_bytes; /* that its image takes in the host cache now; 0 when it has none */
    size_t slot_bytes;  /* what a slot takes, whatever is in it */
    double load_seconds;
} sp_stage_version_info;

/* Versions in the order of loading, draining ones among them. NULL: a stage without any. */
SP_API size_t sp_stage_n_versions(const sp_stage *stage);
/* SP_ERR_ARGUMENT: past the last, or no struct. */
SP_API sp_status sp_stage_version_at(const sp_stage *stage, size_t index,
                                     sp_stage_version_info *out_info, sp_error *error);
/* The version that a name means now. SP_ERR_NOT_FOUND, SP_ERR_ARGUMENT. */
SP_API sp_status sp_stage_find(const sp_stage *stage, const char *name,
                               sp_stage_version_info *out_info, sp_error *error);

typedef struct sp_stage_stats {
    size_t struct_bytes;
    size_t host_bytes, host_bytes_max;   /* images, those being made included; the budget */
    uint64_t handovers;                  /* copies into slots that a request waited for */
    uint64_t fetches, copies, evictions; /* fetches from sources, copies into slots, images dropped
                                            for want of budget */
    int32_t n_images, n_in_flight;
    uint64_t landed; /* loads whose bytes were fetched directly into the slot */
} sp_stage_stats;

SP_API sp_status sp_stage_get_stats(const sp_stage *stage, sp_stage_stats *out_stats,
                                    sp_error *error); /* SP_ERR_ARGUMENT */

/*
 * The id of a version in events and logs: FNV-1a (64 bit) over the name, then, if generation is
 * not 0, over its 8 little-endian bytes; never 0, which means no adapter. Caches of keys and
 * values are keyed by the digest, not by this.
 */
SP_API uint64_t sp_stage_id_hash(const char *name, uint64_t generation);

#ifdef __cplusplus
}
#endif
#endif
