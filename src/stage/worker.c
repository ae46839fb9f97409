/*
 * worker.c: the loader threads, the packer and the copier. A task moves queue → thread → done list;
 * its current holder owns it, except for the two atomics by which the engine's thread cancels it.
 * Every source has a queue and threads of its own, so that one that hangs delays no other. The
 * mutex is held to move a pointer, never for work.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fork_epoch.h"
#include "pool/image.h"
#include "stage/stage_state.h"

#include <errno.h>
#include <time.h>

static void push(stage_queue *queue, stage_task *task)
{
    task->next = NULL;
    if (queue->last != NULL)
        queue->last->next = task;
    else
        queue->first = task;
    queue->last = task;
}

static stage_task *pop(stage_queue *queue)
{
    stage_task *task = queue->first;

    if (task == NULL)
        return NULL;
    queue->first = task->next;
    if (queue->first == NULL)
        queue->last = NULL;
    return task;
}

static stage_queue *queue_of(sp_stage *stage, const stage_task *task)
{
    if (task->kind == TASK_COPY || task->kind == TASK_KEEP)
        return &stage->copy_queue;
    return task->adapter != NULL ? &stage->pack_queue : &stage->fetch_queues[task->source];
}

/* Returns false for a fetch that passes to the next source. */
static bool run_task(sp_stage *stage, stage_task *task)
{
    double began = sp_clock_seconds();
    bool finished = true;

    if (task->kind == TASK_COPY)
        task->status = sp_pool_load_write(stage->pool, task->slot, task->image, &task->error);
    else if (task->kind == TASK_KEEP)
        task->status = sp_image_copy(stage->layout, task->landing, &task->image, &task->error);
    else
        finished = sp_stage_fetch(stage, task);
    task->seconds += sp_clock_seconds() - began;
    return finished;
}

/* To the done list, or to the next source's queue. */
static void pass_on(sp_stage *stage, stage_task *task, bool finished)
{
    if (finished) {
        push(&stage->done, task);
        pthread_cond_signal(&stage->done_signal);
        return;
    }
    task->source++;
    push(queue_of(stage, task), task);
    pthread_cond_broadcast(&stage->work);
}

static void *run_worker(void *user)
{
    const stage_worker *worker = user;
    sp_stage *stage = worker->stage;

    pthread_mutex_lock(&stage->mutex);
    while (!stage->stop) {
        stage_task *task = pop(worker->queue);
        bool finished;

        if (task == NULL) {
            pthread_cond_wait(&stage->work, &stage->mutex);
            continue;
        }
        pthread_mutex_unlock(&stage->mutex);
        finished = run_task(stage, task);
        pthread_mutex_lock(&stage->mutex);
        pass_on(stage, task, finished);
    }
    pthread_mutex_unlock(&stage->mutex);
    return NULL;
}

static sp_status init_sync(sp_stage *stage)
{
    pthread_condattr_t attributes;
    int failed = pthread_condattr_init(&attributes);

    if (failed != 0)
        return SP_ERR_THREAD;
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&stage->mutex, NULL);
    pthread_cond_init(&stage->work, NULL);
    pthread_cond_init(&stage->done_signal, &attributes);
    pthread_condattr_destroy(&attributes);
    return SP_OK;
}

/* The number of one source's loader threads. */
static int32_t n_loaders(const sp_stage *stage, int32_t source, int32_t threads)
{
    return stage->sources[source].threads > 0 ? stage->sources[source].threads : threads;
}

/* Which queue each worker takes from; returns their number. `workers` may be NULL. */
static int32_t assign_queues(sp_stage *stage, int32_t threads, stage_worker *workers)
{
    stage_queue *const own[] = {&stage->pack_queue, &stage->copy_queue};
    int32_t n = 0;

    for (int32_t source = 0; source < stage->n_sources; source++) {
        for (int32_t i = 0; i < n_loaders(stage, source, threads); i++, n++)
            if (workers != NULL)
                workers[n].queue = &stage->fetch_queues[source];
    }
    for (size_t i = 0; i < sizeof own / sizeof own[0]; i++, n++)
        if (workers != NULL)
            workers[n].queue = own[i];
    return n;
}

sp_status sp_stage_workers_start(sp_stage *stage, int32_t threads, sp_error *error)
{
    int32_t wanted = threads > 0 ? assign_queues(stage, threads, NULL) : 0;

    stage->epoch = sp_fork_epoch();
    if (init_sync(stage) != SP_OK)
        return sp_fail(error, SP_ERR_THREAD, NULL, NULL, -1, "a condition could not be made");
    if (wanted == 0)
        return SP_OK;
    stage->workers = sp_calloc((size_t)wanted, sizeof *stage->workers);
    if (stage->workers == NULL) {
        sp_stage_workers_stop(stage);
        return sp_fail_memory(error, (size_t)wanted * sizeof *stage->workers, "loader threads");
    }
    assign_queues(stage, threads, stage->workers);
    for (int32_t i = 0; i < wanted; i++) {
        stage->workers[i].stage = stage;
        if (pthread_create(&stage->workers[i].thread, NULL, run_worker, &stage->workers[i]) != 0) {
            sp_stage_workers_stop(stage);
            return sp_fail(error, SP_ERR_THREAD, NULL, NULL, i, "loader thread %d did not start",
                           (int)i);
        }
        stage->n_workers++;
    }
    return SP_OK;
}

bool sp_stage_is_parents(const sp_stage *stage)
{
    return stage->n_workers > 0 && stage->epoch != sp_fork_epoch();
}

static void forget_workers(sp_stage *stage)
{
    sp_free(stage->workers);
    stage->workers = NULL;
    stage->n_workers = 0;
}

void sp_stage_workers_stop(sp_stage *stage)
{
    /* A fork's child has none of the threads, and a mutex that one of them held stays locked. */
    if (sp_stage_is_parents(stage)) {
        forget_workers(stage);
        return;
    }
    pthread_mutex_lock(&stage->mutex);
    stage->stop = true;
    pthread_cond_broadcast(&stage->work);
    pthread_mutex_unlock(&stage->mutex);
    sp_stage_cancel_all(stage);
    for (int32_t i = 0; i < stage->n_workers; i++)
        pthread_join(stage->workers[i].thread, NULL);
    forget_workers(stage);
    pthread_cond_destroy(&stage->done_signal);
    pthread_cond_destroy(&stage->work);
    pthread_mutex_destroy(&stage->mutex);
}

void sp_stage_submit(sp_stage *stage, stage_task *task)
{
    stage->n_in_flight++;
    pthread_mutex_lock(&stage->mutex);
    push(queue_of(stage, task), task);
    pthread_cond_broadcast(&stage->work);
    pthread_mutex_unlock(&stage->mutex);
}

stage_task *sp_stage_take_done(sp_stage *stage)
{
    stage_task *first;

    if (stage->n_in_flight == 0)
        return NULL;
    pthread_mutex_lock(&stage->mutex);
    first = stage->done.first;
    stage->done = (stage_queue){NULL, NULL};
    pthread_mutex_unlock(&stage->mutex);
    return first;
}

void sp_stage_run_one(sp_stage *stage)
{
    stage_task *task;

    if (stage->n_workers > 0)
        return;
    task = pop(&stage->copy_queue);
    if (task == NULL)
        task = pop(&stage->pack_queue);
    for (int32_t i = 0; i < stage->n_sources && task == NULL; i++)
        task = pop(&stage->fetch_queues[i]);
    if (task != NULL)
        pass_on(stage, task, run_task(stage, task));
}

void sp_stage_wait(sp_stage *stage, int32_t timeout_ms)
{
    struct timespec until;

    if (stage->n_workers == 0 || stage->n_in_flight == 0)
        return;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += timeout_ms / 1000;
    until.tv_nsec += (long)(timeout_ms % 1000) * 1000000L;
    if (until.tv_nsec >= 1000000000L) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000L;
    }
    pthread_mutex_lock(&stage->mutex);
    while (stage->done.first == NULL)
        if (pthread_cond_timedwait(&stage->done_signal, &stage->mutex, &until) == ETIMEDOUT)
            break;
    pthread_mutex_unlock(&stage->mutex);
}
