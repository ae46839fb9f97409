/* clock: it never runs back, and both units tell the same time. */
#include "base/clock.h"

#include "support/test.h"

#include <time.h>

static void never_runs_back(void **state)
{
    uint64_t last = sp_clock_ns();

    (void)state;
    for (int i = 0; i < 10000; i++) {
        uint64_t now = sp_clock_ns();

        assert_true(now >= last);
        last = now;
    }
}

static void measures_a_sleep(void **state)
{
    static const struct timespec pause = {0, 20000000};
    uint64_t start = sp_clock_ns();
    double start_seconds = sp_clock_seconds();
    double seconds;

    (void)state;
    assert_int_equal(nanosleep(&pause, NULL), 0);
    seconds = sp_clock_seconds() - start_seconds;
    assert_in_range(sp_clock_ns() - start, 20000000, 20000000000);
    assert_true(seconds >= 0.0199 && seconds < 20);
    assert_true(start_seconds * 1e9 - (double)start >= -1e3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(never_runs_back),
        cmocka_unit_test(measures_a_sleep),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
