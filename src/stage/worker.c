/*
 * worker.c: the loader threads and the copier. A task moves queue → thread → done list; whoever
 * has it owns it, so nothing else is shared. The mutex is held to move a pointer, never for work.
 */
#include "base/alloc.h"
#include "base/clock.h"
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

static void run_task(sp_stage *stage, stage_task *task)
{
    double began = sp_clock_seconds();

    if (task->kind == TASK_COPY)
        task->status = sp_pool_load_write(stage->pool, task->slot, task->image, &task->error);
    else
        task->status = task->source->fetch(task->source->user, task->name, task->location,
                                           stage->layout, &task->image, &task->facts, &task->error);
    task->seconds = sp_clock_seconds() - began;
}

static void work_on(sp_stage *stage, stage_queue *queue)
{
    pthread_mutex_lock(&stage->mutex);
    while (!stage->stop) {
        stage_task *task = pop(queue);

        if (task == NULL) {
            pthread_cond_wait(&stage->work, &stage->mutex);
            continue;
        }
        pthread_mutex_unlock(&stage->mutex);
        run_task(stage, task);
        pthread_mutex_lock(&stage->mutex);
        push(&stage->done, task);
        pthread_cond_signal(&stage->done_signal);
    }
    pthread_mutex_unlock(&stage->mutex);
}

static void *run_loader(void *user)
{
    sp_stage *stage = user;

    work_on(stage, &stage->fetch_queue);
    return NULL;
}

static void *run_copier(void *user)
{
    sp_stage *stage = user;

    work_on(stage, &stage->copy_queue);
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

sp_status sp_stage_workers_start(sp_stage *stage, int32_t loaders, sp_error *error)
{
    int32_t wanted = loaders > 0 ? loaders + 1 : 0;

    if (init_sync(stage) != SP_OK)
        return sp_fail(error, SP_ERR_THREAD, NULL, NULL, -1, "a condition could not be made");
    if (wanted == 0)
        return SP_OK;
    stage->threads = sp_calloc((size_t)wanted, sizeof *stage->threads);
    if (stage->threads == NULL) {
        sp_stage_workers_stop(stage);
        return sp_fail_memory(error, (size_t)wanted * sizeof *stage->threads, "loader threads");
    }
    for (int32_t i = 0; i < wanted; i++) {
        if (pthread_create(&stage->threads[i], NULL, i < loaders ? run_loader : run_copier,
                           stage) != 0) {
            sp_stage_workers_stop(stage);
            return sp_fail(error, SP_ERR_THREAD, NULL, NULL, i, "loader thread %d did not start",
                           (int)i);
        }
        stage->n_threads++;
    }
    return SP_OK;
}

void sp_stage_workers_stop(sp_stage *stage)
{
    pthread_mutex_lock(&stage->mutex);
    stage->stop = true;
    pthread_cond_broadcast(&stage->work);
    pthread_mutex_unlock(&stage->mutex);
    for (int32_t i = 0; i < stage->n_threads; i++)
        pthread_join(stage->threads[i], NULL);
    sp_free(stage->threads);
    stage->threads = NULL;
    stage->n_threads = 0;
    pthread_cond_destroy(&stage->done_signal);
    pthread_cond_destroy(&stage->work);
    pthread_mutex_destroy(&stage->mutex);
}

void sp_stage_submit(sp_stage *stage, stage_task *task)
{
    stage->n_in_flight++;
    pthread_mutex_lock(&stage->mutex);
    push(task->kind == TASK_COPY ? &stage->copy_queue : &stage->fetch_queue, task);
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

    if (stage->n_threads > 0)
        return;
    task = pop(&stage->copy_queue);
    if (task == NULL)
        task = pop(&stage->fetch_queue);
    if (task == NULL)
        return;
    run_task(stage, task);
    push(&stage->done, task);
}

void sp_stage_wait(sp_stage *stage, int32_t timeout_ms)
{
    struct timespec until;

    if (stage->n_threads == 0 || stage->n_in_flight == 0)
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
