#include "server/driver/task.h"

#include <time.h>

#define NS_PER_MS 1000000L
#define NS_PER_S  1000000000L

void sp_task_start(sp_task *task, sp_task_kind kind, void (*destroy)(sp_task *task))
{
    task->kind = kind;
    task->destroy = destroy;
    atomic_init(&task->references, 1);
    atomic_init(&task->cancelled, false);
    pthread_mutex_init(&task->lock, NULL);
}

void sp_task_retain(sp_task *task)
{
    atomic_fetch_add(&task->references, 1);
}

void sp_task_release(sp_task *task)
{
    if (!task || atomic_fetch_sub(&task->references, 1) != 1)
        return;
    pthread_mutex_destroy(&task->lock);
    task->destroy(task);
}

void sp_task_listen(sp_task *task, void (*wake)(void *user), void *user)
{
    task->wake = wake;
    task->user = user;
}

void sp_task_detach(sp_task *task, bool cancel)
{
    if (cancel)
        atomic_store(&task->cancelled, true);
    pthread_mutex_lock(&task->lock);
    task->wake = NULL;
    pthread_mutex_unlock(&task->lock);
}

void sp_task_wake(sp_task *task)
{
    pthread_mutex_lock(&task->lock);
    if (task->wake)
        task->wake(task->user);
    pthread_mutex_unlock(&task->lock);
}

void sp_task_finish(sp_task *task, sp_status status, const sp_error *error)
{
    pthread_mutex_lock(&task->lock);
    task->status = status;
    if (error)
        task->error = *error;
    task->done = true;
    if (task->wake)
        task->wake(task->user);
    pthread_mutex_unlock(&task->lock);
}

bool sp_task_is_done(sp_task *task)
{
    bool done;

    pthread_mutex_lock(&task->lock);
    done = task->done;
    pthread_mutex_unlock(&task->lock);
    return done;
}

/* ---- the queue ----------------------------------------------------------------------------- */

void sp_task_queue_open(sp_task_queue *queue)
{
    pthread_condattr_t monotonic;

    *queue = (sp_task_queue){.first = NULL};
    pthread_mutex_init(&queue->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&queue->filled, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

void sp_task_queue_destroy(sp_task_queue *queue)
{
    while (queue->first) {
        sp_task *task = queue->first;

        queue->first = task->next;
        sp_task_release(task);
    }
    pthread_cond_destroy(&queue->filled);
    pthread_mutex_destroy(&queue->lock);
}

bool sp_task_queue_push(sp_task_queue *queue, sp_task *task)
{
    bool taken;

    pthread_mutex_lock(&queue->lock);
    taken = !queue->closed;
    if (taken) {
        sp_task_retain(task);
        task->next = NULL;
        if (queue->last)
            queue->last->next = task;
        else
            queue->first = task;
        queue->last = task;
        pthread_cond_signal(&queue->filled);
    }
    pthread_mutex_unlock(&queue->lock);
    return taken;
}

void sp_task_queue_knock(sp_task_queue *queue)
{
    pthread_mutex_lock(&queue->lock);
    queue->knocked = true;
    pthread_cond_signal(&queue->filled);
    pthread_mutex_unlock(&queue->lock);
}

void sp_task_queue_close(sp_task_queue *queue)
{
    pthread_mutex_lock(&queue->lock);
    queue->closed = true;
    pthread_cond_signal(&queue->filled);
    pthread_mutex_unlock(&queue->lock);
}

/* Under the lock. False: the time is up. */
static bool wait_until(sp_task_queue *queue, const struct timespec *until)
{
    if (!until)
        return pthread_cond_wait(&queue->filled, &queue->lock) == 0;
    return pthread_cond_timedwait(&queue->filled, &queue->lock, until) == 0;
}

sp_task *sp_task_queue_take(sp_task_queue *queue, int32_t wait_ms, bool *out_closed)
{
    struct timespec until;
    sp_task *all;
    bool waits = wait_ms != 0;

    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += wait_ms > 0 ? wait_ms / 1000 : 0;
    until.tv_nsec += wait_ms > 0 ? wait_ms % 1000 * NS_PER_MS : 0;
    if (until.tv_nsec >= NS_PER_S) {
        until.tv_nsec -= NS_PER_S;
        until.tv_sec++;
    }
    pthread_mutex_lock(&queue->lock);
    while (waits && !queue->first && !queue->closed && !queue->knocked)
        waits = wait_until(queue, wait_ms > 0 ? &until : NULL);
    all = queue->first;
    queue->first = NULL;
    queue->last = NULL;
    queue->knocked = false;
    *out_closed = queue->closed;
    pthread_mutex_unlock(&queue->lock);
    return all;
}
