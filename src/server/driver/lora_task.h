/*
 * lora_task.h: loading, unloading, activating and listing adapters, as tasks; and the snapshot
 * that a listing brings back: a copy, so that answers are written without the engine.
 */
#ifndef SP_SERVER_DRIVER_LORA_TASK_H
#define SP_SERVER_DRIVER_LORA_TASK_H

#include "server/driver/lora_chat.h"
#include "server/driver/published.h"
#include "server/driver/task.h"
#include "server/metrics/metrics.h"

#include <sidepath/engine.h>

typedef struct sp_snapshot {
    sp_engine_stats stats;
    sp_driver_counts counts;
    sp_listed_adapter *adapters; /* [n_adapters]; their strings are the snapshot's own */
    size_t n_adapters;
    sp_metrics *metrics; /* NULL where they were not requested */
    char **hidden;       /* [n_hidden] names that were unloaded, though their folder is there */
    size_t n_hidden;
    char **awaited; /* [n_awaited] names that requests wait for, read for the first time */
    size_t n_awaited;
} sp_snapshot;

/* What a task wants to know of the file system; see lora_dir.h. */
typedef enum sp_look_up {
    SP_LOOK_UP_NONE,
    SP_LOOK_UP_PATH,
    SP_LOOK_UP_NAME,
    SP_LOOK_UP_LIST
} sp_look_up;

typedef struct sp_lora_task {
    sp_task task;
    /* Filled before the push. */
    char *name; /* ACTIVATE: NULL is the base */
    char *path; /* LOAD: where it is; after a SP_LOOK_UP_NAME its folder, or NULL */
    sp_look_up look_up;
    bool looked_up; /* the answer is there */
    /* With the path that was looked up: a reference, until the load takes it. */
    sp_lora_chat *chat;
    sp_error look_up_error; /* SP_OK, or why that could not be read (SP_ERR_MEMORY) */
    uint64_t asked_ns;      /* the look-up's own */
    bool replace, pinned;
    bool unpinned;                    /* explicitly not pinned: what it replaces may be pinned */
    bool with_metrics, with_receipts; /* LIST */
    uint64_t expected_generation;
    bool by_digest;
    sp_digest wanted;        /* LOAD with by_digest: this content, under whatever name peers have */
    sp_published *published; /* LOAD: what is loaded, owned; NULL: what is at `path` */
    /* Filled before the task is done, read after it. */
    uint64_t generation;
    sp_digest digest;
    int32_t n_requests;   /* ABORT, HOLD, RESUME: that it concerns now, by choices */
    sp_snapshot snapshot; /* LIST */
    /* The engine's thread only. */
    int64_t ticket;
    uint64_t began_ns;
    /* Filled by the engine's thread for the keeper of adapters, which finishes the task. */
    sp_status outcome;
    sp_error outcome_error;
    bool is_decided;   /* it comes back with its outcome */
    sp_digest *in_use; /* [n_in_use] contents of the stage's versions, owned */
    size_t n_in_use;
} sp_lora_task;

/* NULL: out of memory. */
sp_lora_task *sp_lora_task_create(sp_task_kind kind, const char *name, const char *path);

/* A list after the look-up of a name's folder, or of all folders (name NULL). NULL: out of memory.
 */
sp_lora_task *sp_lora_task_create_list(const char *name);

/* The engine's thread: copies what it says now. `metrics` may be NULL. */
sp_status sp_snapshot_take(const sp_engine *engine, const sp_driver_counts *counts,
                           const sp_metrics *metrics, bool with_receipts, char *const *hidden,
                           size_t n_hidden, sp_snapshot *out_snapshot);
/* Notes one more awaited name. False: out of memory. */
bool sp_snapshot_add_awaited(sp_snapshot *snapshot, const char *name);
/* Frees what the snapshot owns. Zeros are allowed. */
void sp_snapshot_free(sp_snapshot *snapshot);
/* The version that a name means; NULL: none. */
const sp_listed_adapter *sp_snapshot_find(const sp_snapshot *snapshot, const char *name);
bool sp_snapshot_is_hidden(const sp_snapshot *snapshot, const char *name);

#endif
