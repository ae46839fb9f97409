/* Where an engine runs: the device's name in its options, and what is refused on a GPU. */
#include "support/test.h"

#include <sidepath/engine.h>

#include <string.h>

static sp_status open_on(const char *device, sp_engine_options *options, sp_engine **out_engine,
                         sp_error *error)
{
    options->model_dir = SP_TEST_FIXTURES "/qwen3-tied";
    options->threads = 1;
    options->kv_tokens = 64;
    options->device = device;
    return sp_engine_open(options, NULL, 0, out_engine, error);
}

static bool has_gpu(void)
{
    sp_device *device;
    bool there = sp_device_open("cuda", NULL, &device, NULL) == SP_OK;

    if (there)
        sp_device_close(device);
    return there;
}

static void check_runs_on(const char *asked, const char *wanted)
{
    sp_engine_options options;
    sp_engine *engine;
    sp_error error;

    sp_engine_options_default(&options, sizeof options);
    assert_ok(open_on(asked, &options, &engine, &error), &error);
    assert_string_equal(sp_engine_device(engine), wanted);
    sp_engine_close(engine);
}

static void test_the_cpu_and_auto(void **state)
{
    (void)state;
    check_runs_on(NULL, "cpu");
    check_runs_on("cpu", "cpu");
    check_runs_on("auto", has_gpu() ? "cuda:0" : "cpu");
}

static void test_auto_in_f32_is_the_cpu(void **state)
{
    sp_engine_options options;
    sp_engine *engine;
    sp_error error;

    (void)state;
    sp_engine_options_default(&options, sizeof options);
    options.precision = SP_DTYPE_F32;
    assert_ok(open_on("auto", &options, &engine, &error), &error);
    assert_string_equal(sp_engine_device(engine), "cpu");
    sp_engine_close(engine);
}

static void test_names_that_are_none(void **state)
{
    sp_engine_options options;
    sp_engine *engine;
    sp_error error;

    (void)state;
    sp_engine_options_default(&options, sizeof options);
    assert_int_equal(open_on("tpu", &options, &engine, &error), SP_ERR_ARGUMENT);
    assert_int_equal(open_on("cuda:-1", &options, &engine, &error), SP_ERR_ARGUMENT);
    if (!has_gpu())
        assert_int_equal(open_on("cuda", &options, &engine, &error), SP_ERR_NO_DEVICE);
    assert_int_equal(open_on("cuda:63", &options, &engine, &error), SP_ERR_NO_DEVICE);
}

static void test_what_a_gpu_refuses(void **state)
{
    sp_engine_options options;
    sp_engine *engine;
    sp_error error;

    (void)state;
    if (!has_gpu())
        skip();
    sp_engine_options_default(&options, sizeof options);
    options.precision = SP_DTYPE_F32;
    assert_int_equal(open_on("cuda", &options, &engine, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "precision");
    options.precision = SP_DTYPE_BF16;
    options.page_tokens = 8;
    assert_int_equal(open_on("cuda", &options, &engine, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "page-tokens");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_cpu_and_auto),
        cmocka_unit_test(test_auto_in_f32_is_the_cpu),
        cmocka_unit_test(test_names_that_are_none),
        cmocka_unit_test(test_what_a_gpu_refuses),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
