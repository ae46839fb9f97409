/*
 * test_pool_streams.c: in which order a pool switches its tables and the streams on which steps may
 * run wait for each other, on a device that notes what it is told.
 */
#include "device/device_ops.h"
#include "support/hand.h"
#include "support/test.h"

#include <stdio.h>
#include <string.h>

/* "r7" an event was recorded on stream 7, "w7" stream 7 waits for it, "c" cells go out on the main
 * stream, which is 0. */
static char notes[512];
static sp_device_ops noting;
static const sp_device_ops *real;

static void note(char what, const void *stream)
{
    size_t at = strlen(notes);

    assert_true(at + 8 < sizeof notes);
    (void)snprintf(notes + at, sizeof notes - at, "%c%d ", what, (int)(intptr_t)stream);
}

static sp_status note_record(sp_device *device, void *event, void *stream)
{
    note('r', stream);
    return real->event_record(device, event, NULL);
}

static sp_status note_wait_event(sp_device *device, void *stream, void *event)
{
    (void)device;
    (void)event;
    note('w', stream);
    return SP_OK;
}

static sp_status note_column(sp_device *device, void *handle, void *to, size_t to_stride,
                             const void *from, size_t from_stride, size_t width, size_t height)
{
    note('c', handle);
    return real->stream_copy_column(device, handle, to, to_stride, from, from_stride, width,
                                    height);
}

static sp_status no_wait(sp_device *device, void *stream)
{
    (void)device;
    (void)stream;
    return SP_OK;
}

static void a_slot_is_hidden_after_the_steps_of_every_stream(void **state)
{
    static const site_dims q = {0, SP_MODULE_Q_PROJ, 6, 5};
    sp_test_random random = {3};
    sp_device *device = NULL;
    sp_stream *stream = NULL;
    hand_adapter *adapter;
    sp_slot_handle handle;
    hand_pool pool;

    (void)state;
    assert_ok(sp_device_open("cpu", NULL, &device, NULL), NULL);
    real = device->ops;
    noting = *real;
    noting.event_record = note_record;
    noting.stream_wait_event = note_wait_event;
    noting.stream_copy_column = note_column;
    noting.stream_wait = no_wait;
    device->ops = &noting;
    noting.kind = SP_DEVICE_CUDA; /* the CPU has no streams to wrap */
    assert_ok(sp_stream_wrap(device, (void *)7, &stream, NULL), NULL);
    noting.kind = SP_DEVICE_CPU;
    pool = hand_pool_create_on(device, &q, 1, 8, SP_DTYPE_BF16, 2);
    adapter = hand_adapter_create(1);
    hand_adapter_add(adapter, &q, 4, 1.0f, SP_DTYPE_BF16, &random);
    handle = hand_load_adapter(&pool, adapter);
    /* Shown in five tables, and the other stream goes on after that. */
    assert_non_null(strstr(notes, "c0 c0 c0 c0 c0 r0 r0 w7 "));
    notes[0] = '\0';
    hand_unload(pool.pool, handle);
    /* Hidden after what the other stream holds; that it was hidden is recorded twice, for the
     * column and for the load that comes; then the other stream goes on. */
    assert_string_equal(notes, "r7 w0 c0 c0 c0 c0 c0 r0 r0 r0 w7 ");
    hand_adapter_destroy(adapter);
    sp_stream_destroy(stream);
    hand_pool_destroy(&pool);
    sp_device_close(device);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_slot_is_hidden_after_the_steps_of_every_stream),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
