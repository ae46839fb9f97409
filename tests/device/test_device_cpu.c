/* test_device_cpu.c: blocks are zeroed, aligned, counted and come back. */
#include <sidepath/device.h>

#include "base/alloc.h"
#include "support/test.h"

#include <string.h>

static void blocks_are_zeroed_aligned_and_counted(void **state)
{
    sp_device *device = NULL;
    sp_error error;
    void *a = NULL, *b = NULL;
    static const uint8_t zero[1000];

    (void)state;
    assert_int_equal(sp_device_open_cpu(&device), SP_OK);
    assert_string_equal(sp_device_name(device), "cpu");
    assert_int_equal(sp_device_allocated_bytes(device), 0);
    assert_ok(sp_device_alloc(device, 1000, &a, &error), &error);
    assert_ok(sp_device_alloc(device, 1, &b, &error), &error);
    assert_int_equal((uintptr_t)a % 256, 0);
    assert_int_equal((uintptr_t)b % 256, 0);
    assert_memory_equal(a, zero, 1000);
    assert_int_equal(sp_device_allocated_bytes(device), 1001);
    sp_device_free(device, a);
    assert_int_equal(sp_device_allocated_bytes(device), 1);
    sp_device_free(device, NULL);
    sp_device_free(device, b);
    assert_int_equal(sp_device_allocated_bytes(device), 0);
    sp_device_close(device);
}

static void bytes_move_both_ways(void **state)
{
    sp_device *device = NULL;
    void *memory = NULL;
    const uint8_t in[5] = {1, 2, 3, 4, 5};
    const uint8_t half_zeroed[5] = {1, 0, 0, 0, 5};
    uint8_t out[5] = {0};

    (void)state;
    assert_int_equal(sp_device_open_cpu(&device), SP_OK);
    assert_int_equal(sp_device_alloc(device, 5, &memory, NULL), SP_OK);
    assert_int_equal(sp_device_write(device, memory, in, 5), SP_OK);
    assert_int_equal(sp_device_read(device, out, memory, 5), SP_OK);
    assert_memory_equal(out, in, 5);
    assert_int_equal(sp_device_zero(device, (uint8_t *)memory + 1, 3), SP_OK);
    assert_int_equal(sp_device_read(device, out, memory, 5), SP_OK);
    assert_memory_equal(out, half_zeroed, 5);
    assert_int_equal(sp_device_write(device, memory, NULL, 0), SP_OK);
    sp_device_close(device); /* takes the block with it */
}

static void failures_are_named_and_leave_nothing(void **state)
{
    size_t blocks = sp_alloc_blocks();
    sp_device *device = NULL;
    sp_error error = {0};
    void *memory = NULL;

    (void)state;
    sp_alloc_fail_after(0);
    assert_int_equal(sp_device_open_cpu(&device), SP_ERR_MEMORY);
    assert_int_equal(sp_device_open_cpu(&device), SP_OK);
    assert_int_equal(sp_device_alloc(device, 0, &memory, &error), SP_ERR_ARGUMENT);
    assert_int_equal(error.status, SP_ERR_ARGUMENT);
    for (int64_t n = 0; n < 2; n++) {
        sp_alloc_fail_after(n);
        assert_int_equal(sp_device_alloc(device, 77777, &memory, &error), SP_ERR_MEMORY);
        assert_true(sp_alloc_failed());
        assert_null(memory);
        assert_int_equal(sp_device_allocated_bytes(device), 0);
    }
    assert_non_null(strstr(error.text, "77777"));
    sp_device_close(device);
    sp_device_close(NULL);
    assert_int_equal(sp_alloc_blocks(), blocks);
}

/* On the CPU a stream does everything at once, so what was asked for is there on return. */
static void streams_and_events_are_done_at_once(void **state)
{
    const uint8_t in[4] = {9, 8, 7, 6};
    const uint8_t zero[4] = {0};
    sp_device *device = NULL;
    sp_stream *stream = NULL;
    sp_event *event = NULL;
    sp_graph *graph = NULL;
    void *memory = NULL;
    uint8_t out[4] = {0};
    sp_error error;

    (void)state;
    assert_ok(sp_device_open("cpu", &device, &error), &error);
    assert_ok(sp_device_alloc(device, 4, &memory, &error), &error);
    assert_ok(sp_stream_create(device, &stream), NULL);
    assert_ok(sp_event_create(device, &event), NULL);
    assert_null(sp_stream_native(stream));
    assert_ok(sp_stream_copy(stream, memory, in, 4), NULL);
    assert_ok(sp_event_record(event, stream), NULL);
    assert_ok(sp_event_wait(event), NULL);
    assert_ok(sp_stream_wait_event(sp_device_main_stream(device), event), NULL);
    assert_ok(sp_device_read(device, out, memory, 4), NULL);
    assert_memory_equal(out, in, 4);
    assert_ok(sp_stream_zero(stream, memory, 4), NULL);
    assert_ok(sp_stream_wait(stream), NULL);
    assert_ok(sp_device_read(device, out, memory, 4), NULL);
    assert_memory_equal(out, zero, 4);
    assert_int_equal(sp_graph_begin(stream), SP_ERR_UNSUPPORTED);
    assert_int_equal(sp_graph_end(stream, &graph), SP_ERR_UNSUPPORTED);
    assert_null(graph);
    sp_event_destroy(event);
    sp_stream_destroy(stream);
    sp_device_free(device, memory);
    sp_device_close(device);
}

static void host_memory_is_pinned_and_let_go(void **state)
{
    static const uint8_t zero[100];
    size_t blocks = sp_alloc_blocks(), n_free = 0, n_total = 0;
    sp_device *device = NULL;
    void *memory = NULL;
    uint8_t own[64];
    sp_error error;

    (void)state;
    assert_ok(sp_device_open("cpu", &device, &error), &error);
    assert_string_equal(sp_device_error_text(device), "");
    assert_ok(sp_device_alloc_pinned(device, 100, &memory, &error), &error);
    assert_memory_equal(memory, zero, 100);
    sp_device_free_pinned(device, memory);
    sp_device_free_pinned(device, NULL);
    assert_ok(sp_device_pin(device, own, sizeof own), NULL);
    sp_device_unpin(device, own);
    assert_ok(sp_device_memory(device, &n_free, &n_total), NULL);
    assert_true(n_free > 0 && n_free <= n_total);
    sp_device_close(device);
    assert_int_equal(sp_alloc_blocks(), blocks);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(streams_and_events_are_done_at_once),
        cmocka_unit_test(host_memory_is_pinned_and_let_go),
        cmocka_unit_test(blocks_are_zeroed_aligned_and_counted),
        cmocka_unit_test(bytes_move_both_ways),
        cmocka_unit_test(failures_are_named_and_leave_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
