/*
 * The engine's thread: a reader that wants every token is woken after each step that has one for
 * it, however fast the steps are.
 */
#include "support/test.h"

#include "base/clock.h"
#include "server/driver/driver.h"
#include "support/engine_run.h"

#include <stdatomic.h>
#include <time.h>

#define N_TOKENS 60

static sp_engine *open_demo(void)
{
    sp_engine_options options;

    sp_engine_options_default(&options, sizeof options);
    options.model_dir = SP_TEST_DEMO "/base";
    options.threads = 1;
    options.kv_tokens = 1024;
    return engine_run_open(&options, NULL, 0);
}

static void count_wake(void *user)
{
    atomic_int *n_wakes = user;

    atomic_fetch_add(n_wakes, 1);
}

static void wait_for(sp_task *task)
{
    const struct timespec pause = {0, 1000000};
    double until = sp_clock_seconds() + 120;

    while (!sp_task_is_done(task) && sp_clock_seconds() < until)
        nanosleep(&pause, NULL);
    assert_true(sp_task_is_done(task));
    assert_int_equal(task->status, SP_OK);
}

/* How often a reader of N_TOKENS tokens is woken. */
static int count_wakes(sp_driver *driver, bool wake_each)
{
    static const int32_t prompt[] = {413, 781};
    engine_run run = engine_run_init(NULL, prompt, 2, N_TOKENS);
    sp_generation *generation = sp_generation_create(1, NULL);
    atomic_int n_wakes = 0;
    sp_error error;

    assert_non_null(generation);
    generation->wake_each = wake_each;
    generation->received_ns = sp_clock_ns();
    generation->choices[0].request = run.request;
    generation->choices[0].request.ignore_eos = true;
    sp_task_listen(&generation->task, count_wake, &n_wakes);
    assert_ok(sp_driver_generate(driver, generation, &error), &error);
    wait_for(&generation->task);
    sp_task_release(&generation->task);
    engine_run_free(&run);
    return n_wakes;
}

static void test_wakes(void **state)
{
    sp_engine *engine = open_demo();
    sp_lora_chats *chats = sp_lora_chats_create("base");
    sp_driver_options options = {.engine = engine, .in_flight_max = 4, .chats = chats};
    sp_driver *driver;
    sp_error error;

    (void)state;
    assert_ok(sp_driver_start(&options, &driver, &error), &error);
    assert_int_equal(count_wakes(driver, true), N_TOKENS);
    assert_int_equal(count_wakes(driver, false), 1);
    sp_driver_stop(driver);
    sp_driver_destroy(driver);
    sp_lora_chats_destroy(chats);
    sp_engine_close(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_wakes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
