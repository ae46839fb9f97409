/*
 * task.h: what the HTTP thread asks of the engine's thread, and the queue between them.
 *
 * A task is shared by the two sides (reference counts are atomic). The asking side fills it,
 * pushes it and sleeps; the engine's side works on it and calls `wake`. An exchange that ends early
 * detaches: from then on nothing is woken, and `cancelled` tells the engine's side to stop.
 *
 * `lock` guards the listener and everything that both sides touch; fields filled before the push
 * and never changed again need no lock. No lock is held while an engine step runs.
 */
#ifndef SP_SERVER_DRIVER_TASK_H
#define SP_SERVER_DRIVER_TASK_H

#include "base/error.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

typedef enum sp_task_kind {
    SP_TASK_GENERATE, /* an sp_generation */
    SP_TASK_LOAD,     /* the others: an sp_lora_task */
    SP_TASK_UNLOAD,
    SP_TASK_ACTIVATE,
    SP_TASK_LIST,
    SP_TASK_ABORT, /* the requests of one adapter: end them, */
    SP_TASK_HOLD,  /* pause them, and those that come, */
    SP_TASK_RESUME,
    SP_TASK_FOLDER /* whether a name has a folder: the driver's own question */
} sp_task_kind;

typedef struct sp_task sp_task;
struct sp_task {
    sp_task_kind kind;
    atomic_int references;
    atomic_bool cancelled;
    void (*destroy)(sp_task *task); /* frees what the kind owns, and the task */
    sp_task *next;                  /* the queue's */
    pthread_mutex_t lock;
    void (*wake)(void *user); /* under the lock; NULL: no listener */
    void *user;
    bool done; /* status and error are final */
    sp_status status;
    sp_error error;
};

/* One reference, the caller's. */
void sp_task_start(sp_task *task, sp_task_kind kind, void (*destroy)(sp_task *task));
/* Any thread. The last release frees the task; NULL is allowed there. */
/* Any thread. The last release frees the task; NULL is allowed there. */
void sp_task_retain(sp_task *task);
void sp_task_release(sp_task *task);

/* Before the push. */
void sp_task_listen(sp_task *task, void (*wake)(void *user), void *user);
/* Nothing is woken after this. `cancel`: the outcome is not wanted either. */
void sp_task_detach(sp_task *task, bool cancel);
/* Wakes the listener, if there is one. Any thread. */
void sp_task_wake(sp_task *task);
/* The engine's side: the outcome (error may be NULL with SP_OK), and a wake. */
void sp_task_finish(sp_task *task, sp_status status, const sp_error *error);
/* The asking side. */
bool sp_task_is_done(sp_task *task);

typedef struct sp_task_queue {
    pthread_mutex_t lock;
    pthread_cond_t filled;
    sp_task *first, *last;
    bool closed;  /* no task is accepted any more */
    bool knocked; /* the engine's thread is to wake up without a task */
} sp_task_queue;

void sp_task_queue_open(sp_task_queue *queue);
void sp_task_queue_destroy(sp_task_queue *queue); /* releases what is left */
/* Takes a reference of its own. False: the queue is closed. */
bool sp_task_queue_push(sp_task_queue *queue, sp_task *task);
/* Wakes the engine's thread without a task. Any thread. */
void sp_task_queue_knock(sp_task_queue *queue);
/* No task is accepted from here on; the taker is woken. Any thread. */
/* No task is accepted from here on; the taker is woken. Any thread. */
void sp_task_queue_close(sp_task_queue *queue);
/* All that is there, as a list by `next`, with the queue's references. Waits while there is
 * nothing, wait_ms at most (-1: for ever), until a push, a knock or the close. */
sp_task *sp_task_queue_take(sp_task_queue *queue, int32_t wait_ms, bool *out_closed);

#endif
