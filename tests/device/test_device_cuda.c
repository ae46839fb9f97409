/* test_device_cuda.c: what opening a GPU says where it cannot, and the streams of the CPU. */
#include <sidepath/device.h>

#include "base/alloc.h"
#include "support/test.h"

#include <string.h>

static void a_missing_library_is_no_device(void **state)
{
    size_t blocks = sp_alloc_blocks();
    sp_device_options options;
    sp_device *device = NULL;
    sp_error error = {0};

    (void)state;
    sp_device_options_default(&options, sizeof options);
    options.library = "/nowhere/libnone.so";
    assert_int_equal(sp_device_open("cuda", &options, &device, &error), SP_ERR_NO_DEVICE);
    assert_string_equal(error.code, "no-cuda-library");
    assert_string_equal(error.subject, "/nowhere/libnone.so");
    assert_null(device);
    assert_int_equal(sp_alloc_blocks(), blocks);
}

static void another_library_is_named(void **state)
{
    sp_device_options options;
    sp_device *device = NULL;
    sp_error error = {0};

    (void)state;
    sp_device_options_default(&options, sizeof options);
    options.library = "libc.so.6";
    assert_int_equal(sp_device_open("cuda:3", &options, &device, &error), SP_ERR_UNSUPPORTED);
    assert_string_equal(error.code, "missing-kernel");
    assert_string_equal(error.subject, "sp_cuda_object");
}

static void names_that_are_no_device_are_refused(void **state)
{
    static const char *const names[] = {"",        "gpu",   "cuda:",   "cuda:x",  "cuda:-1",
                                        "cuda:1x", "cudas", "cuda: 1", "cuda:+1", "cuda:1024"};
    sp_device *device = NULL;
    sp_error error = {0};

    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        assert_int_equal(sp_device_open(names[i], NULL, &device, &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_device_open(NULL, NULL, &device, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "name");
    assert_null(device);
    assert_ok(sp_device_open("cpu", NULL, &device, &error), &error);
    assert_int_equal(sp_device_get_kind(device), SP_DEVICE_CPU);
    sp_device_close(device);
}

static void a_stream_of_the_cpu_does_everything_at_once(void **state)
{
    sp_device *device = NULL;
    sp_stream *stream = NULL;
    sp_event *event = NULL;
    const char from[4] = "abc";
    char to[4] = "";
    double seconds = -1.0;

    (void)state;
    assert_ok(sp_device_open("cpu", NULL, &device, NULL), NULL);
    assert_int_equal(sp_stream_create(device, &stream, NULL), SP_OK);
    assert_int_equal(sp_event_create(device, &event, NULL), SP_OK);
    assert_int_equal(sp_stream_copy(stream, to, from, 4, NULL), SP_OK);
    assert_string_equal(to, "abc");
    assert_int_equal(sp_event_record(event, stream, NULL), SP_OK);
    assert_int_equal(sp_event_query(event, NULL), SP_OK);
    assert_int_equal(sp_event_seconds(event, event, &seconds, NULL), SP_OK);
    assert_true(seconds == 0.0);
    assert_int_equal(sp_graph_begin(stream, NULL), SP_ERR_UNSUPPORTED);
    sp_event_destroy(event);
    sp_stream_destroy(stream);
    sp_device_close(device);
}

static void a_column_is_written_between_others(void **state)
{
    const uint8_t column[3] = {7, 8, 9}, want[6] = {0, 7, 0, 8, 0, 9};
    const uint8_t copied[6] = {8, 7, 9, 8, 0, 9};
    sp_device *device = NULL;
    sp_stream *stream;
    void *table = NULL;
    uint8_t got[6];

    (void)state;
    assert_ok(sp_device_open("cpu", NULL, &device, NULL), NULL);
    assert_ok(sp_device_alloc(device, 6, &table, NULL), NULL);
    assert_int_equal(sp_device_write_column(device, (uint8_t *)table + 1, 2, column, 1, 1, 3, NULL),
                     SP_OK);
    assert_int_equal(sp_device_read(device, got, table, 6, NULL), SP_OK);
    assert_memory_equal(got, want, 6);
    assert_int_equal(sp_device_write_column(device, table, 1, column, 1, 2, 3, NULL),
                     SP_ERR_STRIDE);
    stream = sp_device_main_stream(device);
    assert_int_equal(sp_stream_copy_column(stream, table, 2, column + 1, 1, 1, 2, NULL), SP_OK);
    assert_int_equal(sp_stream_copy_column(stream, table, 0, column, 1, 1, 2, NULL), SP_ERR_STRIDE);
    assert_int_equal(sp_device_read(device, got, table, 6, NULL), SP_OK);
    assert_memory_equal(got, copied, 6);
    sp_device_close(device);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_missing_library_is_no_device),
        cmocka_unit_test(another_library_is_named),
        cmocka_unit_test(names_that_are_no_device_are_refused),
        cmocka_unit_test(a_stream_of_the_cpu_does_everything_at_once),
        cmocka_unit_test(a_column_is_written_between_others),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
