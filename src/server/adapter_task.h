/*
 * adapter_task.h: loading, unloading, activating and listing adapters, as tasks; and the snapshot
 * that a listing brings back: a copy, so that answers are written without the engine.
 */
#ifndef SP_SERVER_ADAPTER_TASK_H
#define SP_SERVER_ADAPTER_TASK_H

#include "server/task.h"

#include <sidepath/engine.h>

/* Counters of the engine's thread since it began. */
typedef struct sp_driver_counts {
    uint64_t accepted, refused, finished_stop, finished_length, cancelled, failed, slow_readers;
    uint64_t prompt_tokens, generated_tokens;
    uint64_t loads, load_failures, unloads;
    double load_seconds;                   /* from the wish to the outcome, summed */
    double first_token_seconds;            /* from the request to its first token, summed */
    uint64_t first_tokens;                 /* how many that sum has */
    double step_seconds_max_while_loading; /* the longest step beside a load */
    int32_t waiting_for_load;              /* generations whose adapter is on its way from disk */
} sp_driver_counts;

typedef struct sp_snapshot {
    sp_engine_stats stats;
    sp_driver_counts counts;
    sp_engine_adapter_info *adapters; /* [n_adapters]; their strings are the snapshot's own */
    size_t n_adapters;
    char **hidden; /* [n_hidden] names that were unloaded, though their folder is there */
    size_t n_hidden;
} sp_snapshot;

typedef struct sp_adapter_task {
    sp_task task;
    /* Filled before the push. */
    char *name; /* ACTIVATE: NULL is the base */
    char *path;
    bool replace, pinned;
    uint64_t expected_generation;
    /* Filled before the task is done, read after it. */
    uint64_t generation;
    sp_digest digest;
    sp_snapshot snapshot; /* LIST */
    /* The engine's thread only. */
    int64_t ticket;
    uint64_t began_ns;
} sp_adapter_task;

/* NULL: out of memory. */
sp_adapter_task *sp_adapter_task_create(sp_task_kind kind, const char *name, const char *path);

/* The engine's thread: copies what it says now. */
sp_status sp_snapshot_take(const sp_engine *engine, const sp_driver_counts *counts,
                           char *const *hidden, size_t n_hidden, sp_snapshot *out_snapshot);
void sp_snapshot_free(sp_snapshot *snapshot);
/* The version that a name means; NULL: none. */
const sp_engine_adapter_info *sp_snapshot_find(const sp_snapshot *snapshot, const char *name);
bool sp_snapshot_is_hidden(const sp_snapshot *snapshot, const char *name);

#endif
