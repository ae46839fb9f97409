/* test_device_cpu.c: blocks are zeroed, aligned, counted and come back. */
#include <sidepath/device.h>

#include "base/alloc.h"
#include "support/test.h"

#include <stdlib.h>
#include <string.h>

static void blocks_are_zeroed_aligned_and_counted(void **state)
{
    sp_device *device = NULL;
    sp_error error;
    void *a = NULL, *b = NULL;
    static const uint8_t zero[1000];

    (void)state;
    assert_int_equal(sp_device_open("cpu", NULL, &device, NULL), SP_OK);
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
    assert_int_equal(sp_device_open("cpu", NULL, &device, NULL), SP_OK);
    assert_int_equal(sp_device_alloc(device, 5, &memory, NULL), SP_OK);
    assert_int_equal(sp_device_write(device, memory, in, 5, NULL), SP_OK);
    assert_int_equal(sp_device_read(device, out, memory, 5, NULL), SP_OK);
    assert_memory_equal(out, in, 5);
    assert_int_equal(sp_device_zero(device, (uint8_t *)memory + 1, 3, NULL), SP_OK);
    assert_int_equal(sp_device_read(device, out, memory, 5, NULL), SP_OK);
    assert_memory_equal(out, half_zeroed, 5);
    assert_int_equal(sp_device_write(device, memory, NULL, 0, NULL), SP_OK);
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
    assert_int_equal(sp_device_open("cpu", NULL, &device, NULL), SP_ERR_MEMORY);
    assert_int_equal(sp_device_open("cpu", NULL, &device, NULL), SP_OK);
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
    assert_ok(sp_device_open("cpu", NULL, &device, &error), &error);
    assert_ok(sp_device_alloc(device, 4, &memory, &error), &error);
    assert_ok(sp_stream_create(device, &stream, NULL), NULL);
    assert_ok(sp_event_create(device, &event, NULL), NULL);
    assert_null(sp_stream_native(stream));
    assert_ok(sp_stream_copy(stream, memory, in, 4, NULL), NULL);
    assert_ok(sp_event_record(event, stream, NULL), NULL);
    assert_ok(sp_event_wait(event, NULL), NULL);
    assert_ok(sp_stream_wait_event(sp_device_main_stream(device), event, NULL), NULL);
    assert_ok(sp_device_read(device, out, memory, 4, NULL), NULL);
    assert_memory_equal(out, in, 4);
    assert_ok(sp_stream_zero(stream, memory, 4, NULL), NULL);
    assert_ok(sp_stream_wait(stream, NULL), NULL);
    assert_ok(sp_device_read(device, out, memory, 4, NULL), NULL);
    assert_memory_equal(out, zero, 4);
    assert_int_equal(sp_graph_begin(stream, NULL), SP_ERR_UNSUPPORTED);
    assert_int_equal(sp_graph_end(stream, &graph, NULL), SP_ERR_UNSUPPORTED);
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
    assert_ok(sp_device_open("cpu", NULL, &device, &error), &error);
    assert_string_equal(sp_device_error_text(device), "");
    assert_ok(sp_device_alloc_pinned(device, 100, &memory, &error), &error);
    assert_memory_equal(memory, zero, 100);
    sp_device_free_pinned(device, memory);
    sp_device_free_pinned(device, NULL);
    assert_ok(sp_device_pin(device, own, sizeof own, NULL), NULL);
    sp_device_unpin(device, own);
    assert_ok(sp_device_memory(device, &n_free, &n_total, NULL), NULL);
    assert_true(n_free > 0 && n_free <= n_total);
    sp_device_close(device);
    assert_int_equal(sp_alloc_blocks(), blocks);
}

/* ---- the host's memory --------------------------------------------------------------------- */

typedef struct host_memory {
    size_t blocks[2], bytes[2]; /* device, pinned: given now */
    int64_t left;               /* allocations before one fails */
    size_t shift;               /* off the boundary */
} host_memory;

/* Poisoned, with room to shift, so that what must be zeroed or aligned is seen. */
static void *give(host_memory *host, int kind, size_t bytes)
{
    char *memory;

    if (host->left-- <= 0)
        return NULL;
    memory = aligned_alloc(256, (bytes + 256 + 255) / 256 * 256);
    assert_non_null(memory);
    memset(memory, 0xa5, bytes + 256);
    host->blocks[kind]++;
    host->bytes[kind] += bytes;
    return memory + host->shift;
}

static void take_back(host_memory *host, int kind, void *memory, size_t bytes)
{
    assert_true(host->blocks[kind] > 0 && host->bytes[kind] >= bytes);
    host->blocks[kind]--;
    host->bytes[kind] -= bytes;
    free((char *)memory - host->shift);
}

static void *give_device(void *user, size_t bytes)
{
    return give(user, 0, bytes);
}

static void *give_pinned(void *user, size_t bytes)
{
    return give(user, 1, bytes);
}

static void take_device(void *user, void *memory, size_t bytes)
{
    take_back(user, 0, memory, bytes);
}

static void take_pinned(void *user, void *memory, size_t bytes)
{
    take_back(user, 1, memory, bytes);
}

static sp_device *open_on(host_memory *host)
{
    sp_device_options options;
    sp_device *device = NULL;
    sp_error error;

    sp_device_options_default(&options, sizeof options);
    options.user = host;
    options.alloc = give_device;
    options.free = take_device;
    options.alloc_pinned = give_pinned;
    options.free_pinned = take_pinned;
    assert_ok(sp_device_open("cpu", &options, &device, &error), &error);
    return device;
}

static void the_hosts_functions_give_all_memory(void **state)
{
    host_memory host = {.left = 100};
    static const uint8_t zero[3000];
    sp_device *device = open_on(&host);
    void *a = NULL, *b = NULL, *pinned = NULL;
    sp_error error;

    (void)state;
    assert_ok(sp_device_alloc(device, 3000, &a, &error), &error);
    assert_ok(sp_device_alloc(device, 7, &b, &error), &error);
    assert_ok(sp_device_alloc_pinned(device, 50, &pinned, &error), &error);
    assert_memory_equal(a, zero, 3000);
    assert_int_equal(host.bytes[0], 3007);
    assert_int_equal(host.bytes[1], 50);
    assert_int_equal(sp_device_allocated_bytes(device), 3007);
    sp_device_free(device, a);
    sp_device_free_pinned(device, pinned);
    assert_int_equal(host.bytes[0], 7);
    assert_int_equal(host.bytes[1], 0);
    sp_device_close(device); /* takes b with it */
    assert_int_equal(host.blocks[0] + host.blocks[1], 0);
    assert_int_equal(host.bytes[0] + host.bytes[1], 0);
}

static void what_the_host_cannot_give_is_named(void **state)
{
    host_memory host = {.left = 0};
    sp_device *device = open_on(&host);
    void *memory = NULL;
    sp_error error;

    (void)state;
    assert_int_equal(sp_device_alloc(device, 4321, &memory, &error), SP_ERR_MEMORY);
    assert_non_null(strstr(error.text, "4321"));
    host.left = 2;
    host.shift = 8;
    assert_int_equal(sp_device_alloc(device, 10, &memory, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "alloc");
    assert_int_equal(sp_device_alloc_pinned(device, 10, &memory, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "alloc_pinned");
    assert_null(memory);
    assert_int_equal(host.blocks[0] + host.blocks[1], 0);
    sp_device_close(device);
}

static void half_a_pair_of_functions_is_refused(void **state)
{
    sp_device_options options;
    sp_device *device = NULL;
    sp_error error;

    (void)state;
    sp_device_options_default(&options, sizeof options);
    options.alloc = give_device;
    assert_int_equal(sp_device_open("cpu", &options, &device, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "free");
    options.free = take_device;
    options.free_pinned = take_pinned;
    assert_int_equal(sp_device_open("cpu", &options, &device, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "alloc_pinned");
    options.struct_bytes = 3;
    assert_int_equal(sp_device_open("cpu", &options, &device, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "sp_device_options");
    assert_null(device);
}

static void null_arguments_are_named(void **state)
{
    sp_device *device = NULL;
    void *memory = NULL;
    sp_error error;
    char byte = 0;

    (void)state;
    assert_ok(sp_device_open("cpu", NULL, &device, &error), &error);
    assert_int_equal(sp_device_alloc(NULL, 1, &memory, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "device");
    assert_int_equal(sp_device_alloc(device, 1, NULL, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "out_memory");
    assert_int_equal(sp_device_write(device, NULL, &byte, 1, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "device_memory");
    assert_int_equal(sp_device_read(device, &byte, NULL, 1, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "device_memory");
    assert_int_equal(sp_device_pin(device, &byte, 0, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "bytes");
    assert_int_equal(sp_device_memory(device, NULL, NULL, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "out_free");
    sp_device_close(device);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(streams_and_events_are_done_at_once),
        cmocka_unit_test(host_memory_is_pinned_and_let_go),
        cmocka_unit_test(blocks_are_zeroed_aligned_and_counted),
        cmocka_unit_test(bytes_move_both_ways),
        cmocka_unit_test(failures_are_named_and_leave_nothing),
        cmocka_unit_test(the_hosts_functions_give_all_memory),
        cmocka_unit_test(what_the_host_cannot_give_is_named),
        cmocka_unit_test(half_a_pair_of_functions_is_refused),
        cmocka_unit_test(null_arguments_are_named),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
