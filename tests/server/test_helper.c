/*
 * A thread that the file system may hold up: a close waits for one that ends, abandons one that
 * does not, which frees its state when it does, and waits for as long as it takes where it uses
 * what its owner frees.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "server/driver/helper.h"

#include <stdatomic.h>
#include <time.h>

#define MS_NS 1000000u

static atomic_bool held, entered, freed; /* by the test; by the thread; by `destroy` */
static bool engages;

static void pause_ms(long ms)
{
    const struct timespec wanted = {ms / 1000, ms % 1000 * 1000000L};

    nanosleep(&wanted, NULL);
}

typedef struct owner {
    sp_helper helper;
} owner;

static void run(void *state)
{
    owner *o = state;
    bool inside = engages && sp_helper_enter(&o->helper);

    atomic_store(&entered, true);
    while (atomic_load(&held))
        pause_ms(5);
    if (inside)
        sp_helper_leave(&o->helper);
    pthread_mutex_lock(&o->helper.lock);
    while (!o->helper.closed)
        sp_helper_wait(&o->helper, 0);
    pthread_mutex_unlock(&o->helper.lock);
}

static void destroy(void *state)
{
    owner *o = state;

    sp_helper_destroy(&o->helper);
    sp_free(o);
    atomic_store(&freed, true);
}

static owner *start(bool holds, bool with_engaging)
{
    owner *o = sp_calloc(1, sizeof *o);
    sp_error error;

    assert_non_null(o);
    atomic_store(&held, holds);
    atomic_store(&entered, false);
    atomic_store(&freed, false);
    engages = with_engaging;
    sp_helper_init(&o->helper);
    assert_ok(sp_helper_start(&o->helper, "a test", run, destroy, o, &error), &error);
    while (!atomic_load(&entered))
        pause_ms(1);
    return o;
}

static uint64_t close_ms(owner *o)
{
    uint64_t began_ns = sp_clock_ns();

    sp_helper_close(&o->helper);
    return (sp_clock_ns() - began_ns) / MS_NS;
}

static void test_ends(void **state)
{
    (void)state;
    assert_true(close_ms(start(false, false)) < 900);
    assert_true(atomic_load(&freed));
}

static void test_abandoned(void **state)
{
    owner *o = start(true, false);
    uint64_t took = close_ms(o);

    (void)state;
    assert_true(took >= 900);
    assert_false(atomic_load(&freed));
    atomic_store(&held, false);
    for (int i = 0; i < 2000 && !atomic_load(&freed); i++)
        pause_ms(5);
    assert_true(atomic_load(&freed));
}

static void *release_later(void *user)
{
    (void)user;
    pause_ms(1500);
    atomic_store(&held, false);
    return NULL;
}

static void test_engaged(void **state)
{
    owner *o = start(true, true);
    pthread_t thread;

    (void)state;
    assert_int_equal(pthread_create(&thread, NULL, release_later, NULL), 0);
    assert_true(close_ms(o) >= 1400);
    assert_true(atomic_load(&freed));
    pthread_join(thread, NULL);
}

static void test_enter_after_close(void **state)
{
    owner o;

    (void)state;
    sp_helper_init(&o.helper);
    assert_true(sp_helper_enter(&o.helper));
    sp_helper_leave(&o.helper);
    o.helper.closed = true;
    assert_false(sp_helper_enter(&o.helper));
    sp_helper_destroy(&o.helper);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ends),
        cmocka_unit_test(test_abandoned),
        cmocka_unit_test(test_engaged),
        cmocka_unit_test(test_enter_after_close),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
