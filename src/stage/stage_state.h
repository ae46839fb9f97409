/*
 * stage_state.h: the parts of a stage. Everything but the queues belongs to the engine's thread; a
 * worker sees only its current task. Pointers may not be NULL unless said so.
 *
 *   sp_stage_version   what a name refers to: content + generation. Current, or detached and held
 *   content            bytes identified by their digest: with an image on the host, a slot, or both
 *   stage_load         a load in progress, with all that its success needs allocated in advance
 *   stage_task         work of one thread: a fetch from a source or a copy into a slot
 *
 * Invariants. A content has at least one version or load, or a task in progress. slot_content[s] =
 * c exactly while c->slot = s or c is being copied to s. host_bytes counts the image of every
 * content with one, of every fetch in progress and of every image that is being kept, and never
 * exceeds the budget. A slot that a load has opened has no content yet.
 */
#ifndef SP_STAGE_STAGE_STATE_H
#define SP_STAGE_STAGE_STATE_H

#include "base/error.h"

#include <sidepath/stage.h>

#include <pthread.h>
#include <stdatomic.h>

/* TASK_KEEP: an image on the host of what came straight into a slot. */
typedef enum stage_task_kind { TASK_LOAD, TASK_REFETCH, TASK_COPY, TASK_KEEP } stage_task_kind;

typedef struct stage_task {
    struct stage_task *next;
    stage_task_kind kind;
    void *owner; /* stage_load or content */
    /* fetch, or the packing of an adapter that is open */
    uint64_t id;
    sp_adapter *adapter;         /* to be packed; shared; NULL: fetch */
    int32_t source, source_last; /* the current source and the last one to ask */
    const char *name, *location;
    const sp_digest *digest; /* not NULL: exactly this content */
    sp_status first_status;  /* the answer of the first source that did not have it */
    sp_error first_error;
    atomic_bool cancelled;     /* not wanted any more */
    atomic_ullong deadline_ns; /* of the source's current call; 0: none */
    bool overdue;              /* the source was told */
    sp_image *image;           /* fetched: owned until taken; copy: borrowed from the content */
    sp_stage_facts facts;
    double seconds;
    /* A packed image may come into a slot's own memory: the fetch stops once it is described, the
     * engine's thread opens a slot, or not, and the fetch goes on. */
    bool may_land;            /* there was a slot for it when it began */
    bool landed;              /* all is in the slot, sealed, and there is no other image */
    struct stage_fetch *open; /* described, and not yet fetched; owned */
    sp_image *landing;        /* of the open slot, or of TASK_KEEP the one that is read; owned */
    int32_t slot;             /* copy, and where landing is not NULL */

    sp_status status;
    sp_error error;
} stage_task;

typedef struct stage_content {
    struct stage_content *next;
    struct stage_content *want_next; /* next in the queue for a slot */
    bool wanted;
    sp_digest digest;
    sp_stage_facts facts;
    sp_image *image;          /* NULL: not on the host */
    size_t image_bytes;       /* of its image, when it has one */
    int32_t slot;             /* -1: in none */
    uint64_t slot_generation; /* the pool's, of that slot */
    bool copying, fetching;
    bool keeping;        /* its slot is read for an image on the host, which is counted already */
    bool fresh;          /* in a slot, and not yet used by those that waited for it */
    bool prefetch;       /* wanted in a slot without a waiting request */
    bool budget_blocked; /* its fetch waits for room in the host cache */
    int32_t n_versions, n_landing, n_pins;
    int32_t n_kept;    /* versions that no source could provide again: the image stays */
    int32_t n_waiting; /* holds that wait for its slot */
    int32_t n_begun;   /* holds that must not lose it */
    uint64_t last_use;
    stage_task task;      /* the copy or fetch in progress; at most one */
    char *fetch_name;     /* strings of a fetch in progress */
    char *fetch_location; /* likewise */
    sp_status failed;     /* why it is not available, for those that wait; else SP_OK */
    sp_error failure;
} stage_content;

struct sp_stage_version {
    sp_stage_version *next;
    char *name, *location;
    uint64_t name_hash;
    int32_t source;
    stage_content *content;
    uint64_t generation;
    int32_t references, n_in_slot; /* holds, and those of them that hold the slot */
    bool detached, pinned;
    bool kept; /* no source could provide it again */
    uint64_t last_use, uses;
    double load_seconds;
};

/* FOLLOWING: of a content that another load or a refetch is bringing. */
typedef enum stage_load_state {
    LOAD_FETCHING,
    LOAD_FOLLOWING,
    LOAD_LANDING,
    LOAD_DONE
} stage_load_state;

typedef struct stage_load {
    struct stage_load *next;
    int64_t ticket;
    stage_load_state state;
    bool replace, pinned, cancelled, forgotten;
    uint64_t expected_generation;
    bool by_digest;
    sp_digest wanted;          /* with by_digest: the content */
    sp_stage_version *version; /* what the name will refer to */
    stage_content *spare;      /* becomes its content, if no other has the digest */
    stage_content *content;    /* once LANDING */
    stage_task task;
    sp_status status; /* once DONE */
    sp_error error;
    uint64_t generation;
} stage_load;

typedef struct stage_queue {
    stage_task *first, *last;
} stage_queue;

typedef struct stage_worker {
    sp_stage *stage;
    stage_queue *queue;
    pthread_t thread;
} stage_worker;

struct sp_stage {
    sp_pool *pool;
    const sp_layout *layout;
    sp_exec *exec;            /* borrowed; NULL: single-threaded */
    size_t image_bytes;       /* of an image without an overlay: reserved until its size is known */
    sp_stage_source *sources; /* [n_sources] */
    int32_t n_sources;
    sp_adapter_options audit;
    sp_geometry *geometry; /* the audit's, retained */
    char *base_dir;        /* the audit's */
    char *base_name;       /* NULL: none */
    sp_module_set supported;
    uint64_t call_ns_max; /* 0: no limit */
    size_t host_bytes, host_bytes_max;

    sp_stage_version *versions; /* in the order of loading */
    stage_content *contents;
    stage_load *loads;            /* by ticket */
    stage_content *wants;         /* first come, first served */
    stage_content **slot_content; /* [slots] */
    sp_slot_info *slot_infos;     /* [slots] scratch */
    int32_t n_slots;
    sp_stage_version *active;
    uint64_t generation, clock;
    int64_t next_ticket;
    uint64_t next_fetch;
    int32_t n_in_flight; /* tasks queued or running, or done and not taken */
    uint64_t fetches, copies, handovers, evictions, landed;

    /* shared with the workers, under the mutex */
    pthread_mutex_t mutex;
    pthread_cond_t work, done_signal;
    stage_queue *fetch_queues; /* [n_sources] */
    stage_queue pack_queue, copy_queue, done;
    bool stop;

    stage_worker *workers; /* [n_workers]: the sources' round-robin, the packer, the copier */
    int32_t n_workers;
    uint32_t epoch; /* of the process that started them */
};

/* ---- worker.c: queues and threads ---------------------------------------------------------- */

/* Starts each source's loader threads (`threads` unless the source says), the packer and the
 * copier. threads 0: none, and sp_stage_run_one does the work. On failure none is left.
 * SP_ERR_THREAD, SP_ERR_MEMORY. */
sp_status sp_stage_workers_start(sp_stage *stage, int32_t threads, sp_error *error);
/* Whether its threads are those of a process of which this one is a fork's child. */
bool sp_stage_is_parents(const sp_stage *stage);
void sp_stage_workers_stop(sp_stage *stage); /* tasks not yet started stay undone */
/* Queues a task, which the workers own until sp_stage_take_done returns it. */
void sp_stage_submit(sp_stage *stage, stage_task *task);
stage_task *sp_stage_take_done(sp_stage *stage); /* the list, oldest first; NULL: none */
void sp_stage_run_one(sp_stage *stage);          /* without threads: one task on the caller */

/* ---- facts.c ------------------------------------------------------------------------------- */

/* Collects an adapter's facts; the caller owns what they own (sp_stage_facts_clear).
 * SP_ERR_MEMORY. */
sp_status sp_stage_facts_of(const sp_layout *layout, const sp_adapter *adapter,
                            sp_stage_facts *out_facts, sp_error *error);
/* Frees what the facts own and empties them. */
void sp_stage_facts_clear(sp_stage_facts *facts);

/* ---- fetch.c: one adapter from one source -------------------------------------------------- */

/*
 * Runs a fetch on a loader thread. Fills the task's image and facts, or its status and error;
 * false: this source does not have it, and the task passes to the next one. task->open is not NULL
 * afterwards: the task will be resubmitted, with a slot or without one.
 */
bool sp_stage_fetch(const sp_stage *stage, stage_task *task);
/* Ends a fetch that is described and will not be fetched; no effect without one. */
void sp_stage_fetch_end(stage_task *task);
/* Cancels a fetch, on the engine's thread. */
void sp_stage_cancel(const sp_stage *stage, stage_task *task);
/* Tells sources of calls that are past their deadlines. */
void sp_stage_check_deadlines(const sp_stage *stage);
/* Cancels every fetch in progress. */
void sp_stage_cancel_all(const sp_stage *stage);

/* ---- cache.c: contents, images, slots ------------------------------------------------------ */

/* The content with this digest; NULL: none. */
stage_content *sp_stage_find_content(const sp_stage *stage, const sp_digest *digest);
/* Makes room for `bytes` more of images by evicting others; false: not possible now. */
bool sp_stage_reserve_image(sp_stage *stage, size_t bytes);
/* Gives back what sp_stage_reserve_image has counted. */
void sp_stage_unreserve_image(sp_stage *stage, size_t bytes);
/* Takes contents out of slots that are no longer READY in the pool: after a failure there, or when
 * idle adapters had to make room for another's replaced rows. */
void sp_stage_forget_lost_slots(sp_stage *stage);
/* Grows the reservation made for an image of unknown size to its real size; false: no room. */
bool sp_stage_grow_image(sp_stage *stage, const sp_image *image);
/* Starts the copy into an EMPTY or idle slot. SP_POOL_FULL, SP_ERR_SLOTS_PINNED: none. */
sp_status sp_stage_start_copy(sp_stage *stage, stage_content *content);
/* What sp_stage_start_copy would say now, without doing it. */
sp_status sp_stage_slot_status(const sp_stage *stage);
/* The copy of a content is done: shows it in its slot, or records the failure. */
void sp_stage_copied(sp_stage *stage, stage_content *content);
/* Tells the pool whether the slot's content must be kept. */
void sp_stage_refresh_slot(sp_stage *stage, stage_content *content);
/* The version of the slot that the content is in. It is held by requests, not by the stage. */
sp_slot_handle sp_stage_handle_of(const stage_content *content);
/* Records that the content has been copied into this slot; releases the load's reference. */
void sp_stage_take_slot(sp_stage *stage, stage_content *content, sp_slot_handle handle);
int32_t sp_stage_count_empty(const sp_stage *stage); /* slots of the pool */
/* Whether a packed image may come straight into a slot: on the CPU, where one is EMPTY and another
 * stays so for those that need one sooner. */
bool sp_stage_may_land(const sp_stage *stage);
/* Opens a slot for the task, if one may be opened now. */
void sp_stage_open_slot(sp_stage *stage, stage_task *task);
/* Gives up the slot that the task has opened; no effect if it has none. */
void sp_stage_close_slot(sp_stage *stage, stage_task *task);
/* Shows what has landed in the task's slot, for this content, and has an image of it kept on the
 * host, in the room that the task has reserved. The slot is closed after a failure. */
sp_status sp_stage_show_landed(sp_stage *stage, stage_content *content, stage_task *task,
                               sp_error *error);
/* The image that was to be kept is here, or could not be made. */
void sp_stage_kept(sp_stage *stage, stage_content *content);
/* Whether no request holds the content's slot; it must be in one. */
bool sp_stage_slot_idle(const sp_stage *stage, const stage_content *content);
/* Frees a content that nothing needs any more. */
void sp_stage_drop_unused(sp_stage *stage, stage_content *content);

/* ---- registry.c: names and versions -------------------------------------------------------- */

/* The version that the name refers to; NULL: none. */
sp_stage_version *sp_stage_current(const sp_stage *stage, const char *name);
bool sp_stage_is_base_name(const sp_stage *stage, const char *name); /* NULL: no */
/* A version without content; the strings are copied. NULL: out of memory. */
sp_stage_version *sp_stage_version_create(const sp_stage_load_options *options);
/* NULL is allowed. Its content is not touched. */
void sp_stage_version_destroy(sp_stage_version *version);
/* Adds the version to the stage's list, which owns it from then on. */
void sp_stage_append_version(sp_stage *stage, sp_stage_version *version);
/* Detaches the version from its name; frees it at once if nobody holds it. */
void sp_stage_detach(sp_stage *stage, sp_stage_version *version);
/* Pins or unpins; no effect if it already is so. */
void sp_stage_pin_version(sp_stage *stage, sp_stage_version *version, bool pinned);

/* ---- load.c: loads in progress ------------------------------------------------------------- */

/* The unsettled load of this name; NULL: none. */
stage_load *sp_stage_find_load(const sp_stage *stage, const char *name);
/* The fetch of a load is done: takes its image, or settles the load with its status. */
void sp_stage_load_fetched(sp_stage *stage, stage_load *load);
/* The copy of a content has ended; settles the loads that wait for it. */
void sp_stage_settle_landings(sp_stage *stage, stage_content *content, sp_status status,
                              const sp_error *error);
/* Tries to land each load that waits for a slot or for another load; true if something changed. */
bool sp_stage_step_landings(sp_stage *stage);
/* NULL is allowed. */
void sp_stage_load_destroy(stage_load *load);

/* ---- admission.c: who waits for a slot --------------------------------------------------------
 */

/* The sources that a fetch may ask: one, or all in their order (SP_SOURCE_ANY). */
void sp_stage_ask_sources(const sp_stage *stage, stage_task *task, int32_t source);
/* Queues the content for a slot; no effect if it is queued or in one. */
void sp_stage_want(sp_stage *stage, stage_content *content);
/* Takes the content out of the queue, if it is there. */
void sp_stage_unwant(sp_stage *stage, stage_content *content);
/* Marks the content as unavailable: those that wait get the status when they ask. */
void sp_stage_fail_content(sp_stage *stage, stage_content *content, sp_status status,
                           const sp_error *error);

#endif
