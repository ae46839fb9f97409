/*
 * driver_state.h: the driver's own state, shared by driver.c (thread, batch) and loads.c
 * (adapters). Everything is the engine's thread's alone, but the queue and the atomics.
 */
#ifndef SP_SERVER_DRIVER_DRIVER_STATE_H
#define SP_SERVER_DRIVER_DRIVER_STATE_H

#include "server/driver/driver.h"

/* One choice in the batch. */
typedef struct sp_running {
    int64_t id;
    sp_generation *generation; /* a reference for every choice */
    int32_t choice;
} sp_running;

/* One load in progress: a task's, or for the generations that wait for it, or both. */
typedef struct sp_pending_load {
    struct sp_pending_load *next;
    char *name;
    int64_t ticket;
    bool looking;         /* for its folder: there is no ticket yet */
    sp_error unknown;     /* what to say where there is no folder */
    sp_lora_task *task;   /* NULL: the load itself was not requested; else a reference */
    sp_lora_entry *entry; /* for the table, when it has succeeded; NULL while it looks */
    sp_task *later;       /* loads of the same name that come after it, by `next`, likewise */
    sp_task *waiters;     /* generations, by `next`, with their references */
    uint64_t began_ns;
} sp_pending_load;

struct sp_driver {
    sp_engine *engine;
    sp_driver_options options;
    sp_task_queue queue;
    pthread_t thread;
    atomic_int n_in_flight;
    atomic_bool device_failed; /* it does not recover */
    atomic_bool has_cancelled; /* some generation in the batch may be cancelled */
    sp_running *running;       /* [n_running], ids ascend */
    int32_t n_running, running_capacity;
    sp_generation **touched; /* [n_touched], room for twice as many as can run: to be woken */
    int32_t n_touched;
    int32_t n_step_failures;
    bool weights_checked; /* in this step */
    uint64_t next_deadline_check_ns;
    sp_pending_load *loads;
    int32_t n_loads, n_looking; /* the second: of the first, those that look for a folder */
    char **hidden;
    size_t n_hidden;
    char **held; /* [n_held] adapters whose requests are paused */
    size_t n_held;
    bool all_paused;       /* the last step found nothing to run */
    bool adapters_changed; /* since the state was given to options.state_file */
    sp_driver_counts counts;
    sp_metrics metrics;
};

/* driver.c: puts every choice into the batch, or ends the generation with the reason. */
void sp_driver_admit(sp_driver *driver, sp_generation *generation);
/* driver.c: ends one that never ran; takes the caller's reference. */
void sp_driver_refuse(sp_driver *driver, sp_generation *generation, sp_status status,
                      const sp_error *error);

/* driver.c: ends the choices of an adapter, in whatever version, and returns how many there were:
 * their finish is an abort, what they have produced stays. */
int32_t sp_driver_abort(sp_driver *driver, const char *adapter);
/* driver.c: ends one that never ran in the same way; takes the caller's reference. */
void sp_driver_abort_unbegun(sp_driver *driver, sp_generation *generation);
/* driver.c: pauses them or lets them go on; those that come later are not touched. */
int32_t sp_driver_set_paused(sp_driver *driver, const char *adapter, bool paused);

/* holds.c */
bool sp_driver_is_held(const sp_driver *driver, const char *adapter); /* NULL, the base: no */
void sp_driver_run_hold_task(sp_driver *driver, sp_lora_task *task);
/* A name that means nothing any more holds nobody. */
void sp_driver_end_hold(sp_driver *driver, const char *adapter);
void sp_driver_free_holds(sp_driver *driver);

/* loads.c: ends those that wait for the adapter to come, as above. */
int32_t sp_driver_abort_waiters(sp_driver *driver, const char *adapter);

/* loads.c. The first takes the generation's reference when it returns true; `unknown` is
 * what to say where there is no folder of that name. */
bool sp_driver_load_for(sp_driver *driver, sp_generation *generation, const sp_error *unknown);
void sp_driver_run_lora_task(sp_driver *driver, sp_lora_task *task);
void sp_driver_poll_loads(sp_driver *driver);
void sp_driver_drop_cancelled_waiters(sp_driver *driver);
/* Those that were received before `before_ns` have waited for too long. */
void sp_driver_drop_late_waiters(sp_driver *driver, uint64_t before_ns, const sp_error *error);
void sp_driver_end_loads(sp_driver *driver);
/* False: out of memory. */
bool sp_driver_hide(sp_driver *driver, const char *name);

#endif
