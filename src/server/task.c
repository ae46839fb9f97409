#include "server/task.h"

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
    *queue = (sp_task_queue){.first = NULL};
    pthread_mutex_init(&queue->lock, NULL);
    pthread_cond_init(&queue->filled, NULL);
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

sp_task *sp_task_queue_take(sp_task_queue *queue, bool wait, bool *out_closed)
{
    sp_task *all;

    pthread_mutex_lock(&queue->lock);
    while (wait && !queue->first && !queue->closed && !queue->knocked)
        pthread_cond_wait(&queue->filled, &queue->lock);
    all = queue->first;
    queue->first = NULL;
    queue->last = NULL;
    queue->knocked = false;
    *out_closed = queue->closed;
    pthread_mutex_unlock(&queue->lock);
    return all;
}
