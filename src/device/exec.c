/*
 * exec.c: the executor. A job is n_tasks task numbers that threads claim one by one from a single
 * atomic counter. Two decisions a reader might question:
 *
 * The counter holds what *remains*. A worker that is late for one job can only claim a task that is
 * really unclaimed, whichever job it belongs to, so jobs need no generation number; and since a job
 * cannot end before its claimed tasks do, fn, user and n_tasks may be plain fields that are read
 * after the claim.
 *
 * Idle workers spin for a short while, because the next job of a forward pass is microseconds
 * away, and then sleep on a condition, because a server may be idle for hours. Whoever makes
 * others wait stores first and then looks for sleepers; a sleeper counts itself first and then
 * looks at the store (both sequentially consistent), so no wake-up is lost.
 */
#include <sidepath/device.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/fork_epoch.h"
#include "base/grow.h"
#include "base/spin.h"
#include "device/cpus.h"

#include <pthread.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>

#define THREADS_MAX       1024
#define CACHE_LINE_BYTES  64
#define SPINS_PER_READING 64 /* clock readings */

typedef struct exec_worker {
    sp_exec *exec;
    pthread_t handle;
    int32_t thread;
} exec_worker;

struct sp_exec {
    int32_t threads;
    uint64_t spin_ns;
    uint32_t epoch; /* of the process whose threads these are */

    /* The host's executor; run is NULL for the built-in one. */
    sp_exec_run_fn host_run;
    void *host_user;

    /* The job. Written between jobs, read after a task is claimed. */
    sp_task_fn fn;
    void *user;
    int32_t n_tasks;

    alignas(CACHE_LINE_BYTES) atomic_int remaining; /* tasks not yet claimed */
    alignas(CACHE_LINE_BYTES) atomic_int finished;  /* tasks that have returned */
    alignas(CACHE_LINE_BYTES) atomic_int sleepers;  /* workers that wait on work */
    atomic_int caller_sleeps;
    atomic_bool stop;

    pthread_mutex_t mutex;
    pthread_cond_t work; /* something remains, or stop */
    pthread_cond_t done; /* finished = n_tasks */
    int32_t n_workers;
    exec_worker *workers;
};

/* ---- step path ----------------------------------------------------------------------------- */

/* n_tasks was read before the task is counted as finished: after that the job may be over. */
static void finish_task(sp_exec *exec, int32_t n_tasks)
{
    if (atomic_fetch_add(&exec->finished, 1) + 1 != n_tasks)
        return;
    if (atomic_load(&exec->caller_sleeps)) {
        (void)pthread_mutex_lock(&exec->mutex);
        (void)pthread_cond_signal(&exec->done);
        (void)pthread_mutex_unlock(&exec->mutex);
    }
}

/* Claims and runs tasks until none remains. */
static void take_tasks(sp_exec *exec, int32_t thread)
{
    int remaining = atomic_load_explicit(&exec->remaining, memory_order_acquire);

    while (remaining > 0) {
        int32_t n_tasks;

        if (!atomic_compare_exchange_weak_explicit(&exec->remaining, &remaining, remaining - 1,
                                                   memory_order_acq_rel, memory_order_acquire))
            continue;
        n_tasks = exec->n_tasks;
        exec->fn(exec->user, n_tasks - remaining, thread);
        finish_task(exec, n_tasks);
        remaining = atomic_load_explicit(&exec->remaining, memory_order_acquire);
    }
}

static void wait_finished(sp_exec *exec, int32_t n_tasks)
{
    uint64_t until_ns = sp_clock_ns() + exec->spin_ns;

    do {
        for (int i = 0; i < SPINS_PER_READING; i++) {
            if (atomic_load_explicit(&exec->finished, memory_order_acquire) == n_tasks)
                return;
            sp_spin_pause();
        }
    } while (sp_clock_ns() < until_ns);

    (void)pthread_mutex_lock(&exec->mutex);
    atomic_store(&exec->caller_sleeps, 1);
    while (atomic_load(&exec->finished) != n_tasks)
        (void)pthread_cond_wait(&exec->done, &exec->mutex);
    atomic_store(&exec->caller_sleeps, 0);
    (void)pthread_mutex_unlock(&exec->mutex);
}

static void wake_workers(sp_exec *exec, int32_t wanted)
{
    int asleep = atomic_load(&exec->sleepers);

    if (asleep == 0)
        return;
    (void)pthread_mutex_lock(&exec->mutex);
    if (wanted >= asleep)
        (void)pthread_cond_broadcast(&exec->work);
    else
        for (int32_t i = 0; i < wanted; i++)
            (void)pthread_cond_signal(&exec->work);
    (void)pthread_mutex_unlock(&exec->mutex);
}

void sp_exec_run(sp_exec *exec, sp_task_fn fn, void *user, int32_t n_tasks)
{
    if (n_tasks <= 0)
        return;
    if (exec && exec->host_run) {
        exec->host_run(exec->host_user, fn, user, n_tasks);
        return;
    }
    if (!exec || exec->n_workers == 0 || n_tasks == 1 || exec->epoch != sp_fork_epoch()) {
        for (int32_t task = 0; task < n_tasks; task++)
            fn(user, task, 0);
        return;
    }
    exec->fn = fn;
    exec->user = user;
    exec->n_tasks = n_tasks;
    atomic_store_explicit(&exec->finished, 0, memory_order_relaxed);
    atomic_store(&exec->remaining, n_tasks);
    wake_workers(exec, n_tasks - 1);
    take_tasks(exec, 0);
    wait_finished(exec, n_tasks);
}

/* ---- workers ------------------------------------------------------------------------------- */

static bool has_reason_to_wake(sp_exec *exec)
{
    return atomic_load(&exec->remaining) > 0 || atomic_load(&exec->stop);
}

static bool spin_for_work(sp_exec *exec)
{
    uint64_t until_ns = sp_clock_ns() + exec->spin_ns;

    do {
        for (int i = 0; i < SPINS_PER_READING; i++) {
            if (atomic_load_explicit(&exec->remaining, memory_order_relaxed) > 0)
                return true;
            sp_spin_pause();
        }
    } while (sp_clock_ns() < until_ns && !atomic_load(&exec->stop));
    return false;
}

static void sleep_for_work(sp_exec *exec)
{
    (void)pthread_mutex_lock(&exec->mutex);
    (void)atomic_fetch_add(&exec->sleepers, 1);
    while (!has_reason_to_wake(exec))
        (void)pthread_cond_wait(&exec->work, &exec->mutex);
    (void)atomic_fetch_sub(&exec->sleepers, 1);
    (void)pthread_mutex_unlock(&exec->mutex);
}

static void *worker_main(void *argument)
{
    exec_worker *worker = argument;
    sp_exec *exec = worker->exec;

    while (!atomic_load(&exec->stop)) {
        if (!spin_for_work(exec))
            sleep_for_work(exec);
        take_tasks(exec, worker->thread);
    }
    return NULL;
}

/* ---- set-up path --------------------------------------------------------------------------- */

void sp_exec_options_default(sp_exec_options *out_options, size_t struct_bytes)
{
    const sp_exec_options defaults = {
        .struct_bytes = sizeof defaults,
        .threads = 0,
        .spin_us = 50,
    };

    sp_struct_default(out_options, struct_bytes, &defaults, sizeof defaults);
}

static void stop_workers(sp_exec *exec)
{
    (void)pthread_mutex_lock(&exec->mutex);
    atomic_store(&exec->stop, true);
    (void)pthread_cond_broadcast(&exec->work);
    (void)pthread_mutex_unlock(&exec->mutex);
    for (int32_t i = 0; i < exec->n_workers; i++)
        (void)pthread_join(exec->workers[i].handle, NULL);
    exec->n_workers = 0;
}

static sp_status start_workers(sp_exec *exec, sp_error *error)
{
    for (int32_t i = 0; i + 1 < exec->threads; i++) {
        exec_worker *worker = &exec->workers[i];

        *worker = (exec_worker){.exec = exec, .thread = i + 1};
        if (pthread_create(&worker->handle, NULL, worker_main, worker) != 0) {
            return sp_fail(error, SP_ERR_THREAD, NULL, "threads", i + 1,
                           "thread %d of %d could not be started", (int)(i + 1),
                           (int)(exec->threads - 1));
        }
        exec->n_workers++;
    }
    return SP_OK;
}

static sp_exec *exec_new(int32_t threads, sp_error *error)
{
    sp_exec *exec = sp_aligned_calloc(sizeof *exec, CACHE_LINE_BYTES);

    if (!exec) {
        (void)sp_fail_memory(error, sizeof *exec, "an executor");
        return NULL;
    }
    exec->threads = threads;
    exec->epoch = sp_fork_epoch();
    (void)pthread_mutex_init(&exec->mutex, NULL);
    (void)pthread_cond_init(&exec->work, NULL);
    (void)pthread_cond_init(&exec->done, NULL);
    return exec;
}

static sp_status check_options(const sp_exec_options *options, sp_error *error)
{
    if (options->threads < 0 || options->threads > THREADS_MAX)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "threads", -1,
                       "threads must be from 1 to %d, or 0 for as many as there are, not %d",
                       THREADS_MAX, (int)options->threads);
    if (options->spin_us < 0)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "spin_us", -1,
                       "spin_us cannot be negative (%d)", (int)options->spin_us);
    return SP_OK;
}

sp_status sp_exec_create(const sp_exec_options *options, sp_exec **out_exec, sp_error *error)
{
    sp_exec_options own;
    sp_status status;
    sp_exec *exec;
    int32_t threads;

    if (!out_exec)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "out_exec", -1, "out_exec is NULL");
    sp_exec_options_default(&own, sizeof own);
    status = sp_struct_read(&own, sizeof own, options, "sp_exec_options", error);
    if (status == SP_OK)
        status = check_options(&own, error);
    if (status != SP_OK)
        return status;
    threads = own.threads > 0 ? own.threads : sp_cpus_usable();
    if (threads > THREADS_MAX)
        threads = THREADS_MAX;
    exec = exec_new(threads, error);
    if (!exec)
        return SP_ERR_MEMORY;
    exec->spin_ns = (uint64_t)own.spin_us * 1000u;
    if (threads > 1) {
        exec->workers = sp_calloc((size_t)threads - 1, sizeof *exec->workers);
        status = exec->workers ? start_workers(exec, error)
                               : sp_fail_memory(error, (size_t)threads * sizeof *exec->workers,
                                                "the executor's threads");
    }
    if (status != SP_OK) {
        sp_exec_destroy(exec);
        return status;
    }
    *out_exec = exec;
    return SP_OK;
}

sp_status sp_exec_create_host(int32_t threads, sp_exec_run_fn run, void *user, sp_exec **out_exec,
                              sp_error *error)
{
    sp_exec *exec;

    if (threads < 1)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "threads", -1,
                       "an executor has at least one thread, not %d", (int)threads);
    if (!run || !out_exec)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, run ? "out_exec" : "run", -1, "%s is NULL",
                       run ? "out_exec" : "run");
    exec = exec_new(threads, error);
    if (!exec)
        return SP_ERR_MEMORY;
    exec->host_run = run;
    exec->host_user = user;
    *out_exec = exec;
    return SP_OK;
}

/* A fork's child has none of the threads, and its copy of the mutex may stay locked by one of
 * them. */
void sp_exec_destroy(sp_exec *exec)
{
    if (!exec)
        return;
    if (exec->epoch == sp_fork_epoch()) {
        stop_workers(exec);
        (void)pthread_cond_destroy(&exec->done);
        (void)pthread_cond_destroy(&exec->work);
        (void)pthread_mutex_destroy(&exec->mutex);
    }
    sp_free(exec->workers);
    sp_aligned_free(exec);
}

int32_t sp_exec_threads(const sp_exec *exec)
{
    return exec ? exec->threads : 1;
}
