/* test_exec.c: every task runs exactly once, whatever the threads, and nothing is lost or late. */
#include <sidepath/device.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "support/test.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define TASKS_MAX 5000

typedef struct count_job {
    atomic_int runs[TASKS_MAX];
    atomic_int busy[64]; /* a task is running under this thread number */
    atomic_int violations;
    int32_t threads;
    int32_t sleep_us;
} count_job;

static void count_task(void *user, int32_t task, int32_t thread)
{
    count_job *job = user;

    if (thread < 0 || thread >= job->threads) {
        atomic_fetch_add(&job->violations, 1);
        return;
    }
    if (atomic_exchange(&job->busy[thread], 1) != 0)
        atomic_fetch_add(&job->violations, 1);
    atomic_fetch_add(&job->runs[task], 1);
    if (job->sleep_us > 0)
        usleep((useconds_t)job->sleep_us);
    atomic_store(&job->busy[thread], 0);
}

static void check_counts(count_job *job, int32_t n_tasks, int expected)
{
    assert_int_equal(atomic_load(&job->violations), 0);
    for (int32_t t = 0; t < TASKS_MAX; t++)
        assert_int_equal(atomic_load(&job->runs[t]), t < n_tasks ? expected : 0);
}

static sp_exec *exec_of(int32_t threads, int32_t spin_us)
{
    sp_exec_options options;
    sp_exec *exec = NULL;

    sp_exec_options_default(&options, sizeof options);
    options.threads = threads;
    options.spin_us = spin_us;
    assert_int_equal(sp_exec_create(&options, &exec, NULL), SP_OK);
    assert_non_null(exec);
    assert_int_equal(sp_exec_threads(exec), threads);
    return exec;
}

/* Counts of tasks below, at and above the number of threads; more threads than processors. */
static void every_task_runs_once(void **state)
{
    static const int32_t threads[] = {1, 2, 3, 8, 33};
    static const int32_t counts[] = {0, 1, 2, 3, 7, 64, 1000, TASKS_MAX};
    static count_job job;

    (void)state;
    for (size_t i = 0; i < sizeof threads / sizeof *threads; i++) {
        sp_exec *exec = exec_of(threads[i], 20);

        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
            memset(&job, 0, sizeof job);
            job.threads = threads[i];
            sp_exec_run(exec, count_task, &job, counts[c]);
            check_counts(&job, counts[c], 1);
        }
        sp_exec_destroy(exec);
    }
}

/* Without an executor the caller does them all. */
static void no_executor(void **state)
{
    static count_job job;

    (void)state;
    job.threads = 1;
    assert_int_equal(sp_exec_threads(NULL), 1);
    for (int32_t n = -1; n < 5; n++) {
        memset(job.runs, 0, sizeof job.runs);
        sp_exec_run(NULL, count_task, &job, n);
        check_counts(&job, n, 1);
    }
}

/* Jobs back to back: a worker that is late for one job must not disturb the next. */
static void jobs_in_quick_succession(void **state)
{
    static const int32_t spins_us[] = {0, 50};
    static count_job job;

    (void)state;
    for (size_t s = 0; s < 2; s++) {
        sp_exec *exec = exec_of(4, spins_us[s]);

        memset(&job, 0, sizeof job);
        job.threads = 4;
        for (int round = 0; round < 2000; round++)
            sp_exec_run(exec, count_task, &job, 2 + round % 2);
        assert_int_equal(atomic_load(&job.violations), 0);
        assert_int_equal(atomic_load(&job.runs[0]), 2000);
        assert_int_equal(atomic_load(&job.runs[1]), 2000);
        assert_int_equal(atomic_load(&job.runs[2]), 1000);
        sp_exec_destroy(exec);
    }
}

/* Workers that went to sleep wake up again, and a caller that outwaits its spin does, too. */
static void sleeping_threads_wake_up(void **state)
{
    static count_job job;
    sp_exec *exec = exec_of(3, 0);

    (void)state;
    memset(&job, 0, sizeof job);
    job.threads = 3;
    job.sleep_us = 2000;
    for (int round = 0; round < 20; round++) {
        usleep(3000);
        sp_exec_run(exec, count_task, &job, 5);
    }
    check_counts(&job, 5, 20);
    sp_exec_destroy(exec);
}

/* Tasks really run beside each other: two that wait for one another both finish. */
typedef struct meeting {
    pthread_barrier_t barrier;
    atomic_int met;
} meeting;

static void meet(void *user, int32_t task, int32_t thread)
{
    meeting *m = user;

    (void)task;
    (void)thread;
    (void)pthread_barrier_wait(&m->barrier);
    atomic_fetch_add(&m->met, 1);
}

static void tasks_run_at_the_same_time(void **state)
{
    meeting m = {.met = 0};
    sp_exec *exec = exec_of(4, 0);

    (void)state;
    assert_int_equal(pthread_barrier_init(&m.barrier, NULL, 4), 0);
    for (int round = 0; round < 50; round++)
        sp_exec_run(exec, meet, &m, 4);
    assert_int_equal(atomic_load(&m.met), 200);
    sp_exec_destroy(exec);
    (void)pthread_barrier_destroy(&m.barrier);
}

/* One thread: tasks run in ascending order on the caller. */
typedef struct order_job {
    pthread_t caller;
    int32_t next;
    int wrong;
} order_job;

static void in_order(void *user, int32_t task, int32_t thread)
{
    order_job *job = user;

    if (task != job->next++ || thread != 0 || !pthread_equal(pthread_self(), job->caller))
        job->wrong++;
}

static void one_thread_is_the_caller(void **state)
{
    order_job job = {pthread_self(), 0, 0};
    sp_exec *exec = exec_of(1, 0);

    (void)state;
    sp_exec_run(exec, in_order, &job, 100);
    assert_int_equal(job.next, 100);
    assert_int_equal(job.wrong, 0);
    sp_exec_destroy(exec);
}

static void idle_threads_use_no_time(void **state)
{
    static count_job job;
    sp_exec *exec = exec_of(8, 1000);
    clock_t before, after;

    (void)state;
    memset(&job, 0, sizeof job);
    job.threads = 8;
    sp_exec_run(exec, count_task, &job, 100);
    usleep(50000); /* past every spin */
    before = clock();
    usleep(200000);
    after = clock();
    assert_true((double)(after - before) / CLOCKS_PER_SEC < 0.1);
    sp_exec_destroy(exec);
}

/* ---- a host's executor --------------------------------------------------------------------- */

typedef struct host_pool {
    int calls;
    int32_t threads;
} host_pool;

/* Runs the tasks backwards and under changing thread numbers: the contract allows it. */
static void host_run(void *user, sp_task_fn fn, void *fn_user, int32_t n_tasks)
{
    host_pool *pool = user;

    pool->calls++;
    for (int32_t t = n_tasks - 1; t >= 0; t--)
        fn(fn_user, t, t % pool->threads);
}

static void host_executor_is_used(void **state)
{
    static count_job job;
    host_pool pool = {0, 5};
    sp_exec *exec = NULL;

    (void)state;
    assert_int_equal(sp_exec_create_host(5, host_run, &pool, &exec, NULL), SP_OK);
    assert_int_equal(sp_exec_threads(exec), 5);
    memset(&job, 0, sizeof job);
    job.threads = 5;
    sp_exec_run(exec, count_task, &job, 17);
    check_counts(&job, 17, 1);
    assert_int_equal(pool.calls, 1);
    sp_exec_run(exec, count_task, &job, 0);
    assert_int_equal(pool.calls, 1);
    sp_exec_destroy(exec);
}

static void bad_options_are_refused(void **state)
{
    sp_exec_options options;
    host_pool pool = {0, 1};
    sp_exec *exec = (sp_exec *)&pool;

    (void)state;
    sp_exec_options_default(&options, sizeof options);
    options.threads = -1;
    assert_int_equal(sp_exec_create(&options, &exec, NULL), SP_ERR_ARGUMENT);
    options.threads = 1025;
    assert_int_equal(sp_exec_create(&options, &exec, NULL), SP_ERR_ARGUMENT);
    options.threads = 1;
    options.spin_us = -1;
    assert_int_equal(sp_exec_create(&options, &exec, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_exec_create_host(0, host_run, &pool, &exec, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_exec_create_host(1, NULL, &pool, &exec, NULL), SP_ERR_ARGUMENT);
    assert_ptr_equal(exec, &pool); /* outputs are set on success only */
    sp_exec_destroy(NULL);
}

/* What was wrong, what it was, what would be right. */
static void refusals_name_the_argument(void **state)
{
    sp_exec_options options;
    sp_exec *exec = NULL;
    sp_error error;

    (void)state;
    sp_exec_options_default(&options, sizeof options);
    options.threads = 1025;
    assert_int_equal(sp_exec_create(&options, &exec, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "threads");
    assert_non_null(strstr(error.text, "1024"));
    assert_non_null(strstr(error.text, "1025"));
    assert_int_equal(sp_exec_create(NULL, &exec, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "sp_exec_options");
    assert_int_equal(sp_exec_create(&options, NULL, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "out_exec");
    options.struct_bytes = 0;
    assert_int_equal(sp_exec_create(&options, &exec, &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_exec_create_host(1, NULL, NULL, &exec, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "run");
    assert_null(exec);
}

/* An older host's options end after threads: spin_us has its default. */
static void shorter_options_have_defaults_beyond(void **state)
{
    const sp_exec_options known = {.struct_bytes = offsetof(sp_exec_options, spin_us),
                                   .threads = 3};
    void *options = malloc(known.struct_bytes);
    sp_exec *exec = NULL;
    sp_error error;

    (void)state;
    assert_non_null(options);
    memcpy(options, &known, known.struct_bytes);
    assert_ok(sp_exec_create(options, &exec, &error), &error);
    assert_int_equal(sp_exec_threads(exec), 3);
    sp_exec_destroy(exec);
    free(options);
}

/* ---- fork ---------------------------------------------------------------------------------- */

static void note_thread(void *user, int32_t task, int32_t thread)
{
    int *counts = user;

    counts[task] += thread == 0 ? 1 : 100;
}

/* What the child does with the parent's executor; its exit status. */
static int use_in_child(sp_exec *exec)
{
    int counts[4] = {0};

    alarm(10); /* a hang ends the child with a signal */
    sp_exec_run(exec, note_thread, counts, 4);
    for (int i = 0; i < 4; i++)
        if (counts[i] != 1)
            return 1;
    sp_exec_destroy(exec);
    return 0;
}

/* Asleep and awake threads of the parent; the parent goes on with them. */
static void a_child_runs_alone_and_destroys(void **state)
{
    static const int32_t spins_us[] = {0, 1000000};

    (void)state;
    for (size_t i = 0; i < 2; i++) {
        sp_exec *exec = exec_of(4, spins_us[i]);
        static count_job job;
        int status = -1;
        pid_t child;

        memset(&job, 0, sizeof job);
        job.threads = 4;
        sp_exec_run(exec, count_task, &job, 64);
        child = fork();
        assert_true(child >= 0);
        if (child == 0)
            _exit(use_in_child(exec));
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), 0);
        sp_exec_run(exec, count_task, &job, 64);
        check_counts(&job, 64, 2);
        sp_exec_destroy(exec);
    }
}

/* An executor that the child makes itself has threads. */
static void a_childs_own_executor_has_threads(void **state)
{
    sp_exec *parents = exec_of(2, 0);
    int status = -1;
    pid_t child;

    (void)state;
#if defined(__SANITIZE_THREAD__)
    skip(); /* ThreadSanitizer has no threads after a fork */
#endif
    if (getenv("SP_EMULATED")) { /* qemu-user ends where a fork's child starts a thread */
        sp_exec_destroy(parents);
        skip();
    }
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        sp_exec_options options;
        sp_exec *own = NULL;
        static count_job job;

        alarm(10);
        sp_exec_options_default(&options, sizeof options);
        options.threads = 3;
        if (sp_exec_create(&options, &own, NULL) != SP_OK)
            _exit(2);
        job.threads = 3;
        sp_exec_run(own, count_task, &job, 100);
        sp_exec_destroy(own);
        sp_exec_destroy(parents);
        _exit(atomic_load(&job.runs[99]) == 1 ? 0 : 3);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    sp_exec_destroy(parents);
}

static void default_threads_fit_the_machine(void **state)
{
    sp_exec_options options;
    sp_exec *exec = NULL;

    (void)state;
    sp_exec_options_default(&options, sizeof options);
    assert_int_equal(options.struct_bytes, sizeof options);
    assert_int_equal(options.threads, 0);
    assert_int_equal(sp_exec_create(&options, &exec, NULL), SP_OK);
    assert_true(sp_exec_threads(exec) >= 1);
    assert_true(sp_exec_threads(exec) <= sysconf(_SC_NPROCESSORS_CONF));
    sp_exec_destroy(exec);
}

static void failed_allocation_leaves_nothing(void **state)
{
    size_t blocks = sp_alloc_blocks();
    sp_exec_options options;
    sp_exec *exec = NULL;

    (void)state;
    sp_exec_options_default(&options, sizeof options);
    options.threads = 3;
    for (int64_t n = 0;; n++) {
        sp_status status;

        sp_alloc_fail_after(n);
        status = sp_exec_create(&options, &exec, NULL);
        if (!sp_alloc_failed()) {
            sp_alloc_fail_after(-1);
            assert_int_equal(status, SP_OK);
            assert_true(n >= 2);
            break;
        }
        assert_int_equal(status, SP_ERR_MEMORY);
        assert_null(exec);
        assert_int_equal(sp_alloc_blocks(), blocks);
    }
    sp_exec_destroy(exec);
    assert_int_equal(sp_alloc_blocks(), blocks);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_task_runs_once),
        cmocka_unit_test(no_executor),
        cmocka_unit_test(jobs_in_quick_succession),
        cmocka_unit_test(sleeping_threads_wake_up),
        cmocka_unit_test(tasks_run_at_the_same_time),
        cmocka_unit_test(one_thread_is_the_caller),
        cmocka_unit_test(idle_threads_use_no_time),
        cmocka_unit_test(host_executor_is_used),
        cmocka_unit_test(bad_options_are_refused),
        cmocka_unit_test(refusals_name_the_argument),
        cmocka_unit_test(shorter_options_have_defaults_beyond),
        cmocka_unit_test(a_child_runs_alone_and_destroys),
        cmocka_unit_test(a_childs_own_executor_has_threads),
        cmocka_unit_test(default_threads_fit_the_machine),
        cmocka_unit_test(failed_allocation_leaves_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
