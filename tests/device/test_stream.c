/*
 * test_stream.c: in which order the streams of a device wait for each other, on a device that notes
 * what it is told; and which calls are refused.
 */
#include "device/device_ops.h"
#include "device/step_streams.h"

#include "base/alloc.h"
#include "support/test.h"

#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* One word for each order: "r7" an event was recorded on stream 7, "w7" stream 7 waits for it, "s7"
 * the host waits for stream 7. Stream 0 is the main one. */
static char notes[256];
static sp_device_ops noting;

static void note(char what, const void *stream)
{
    size_t at = strlen(notes);

    assert_true(at + 8 < sizeof notes);
    (void)snprintf(notes + at, sizeof notes - at, "%c%d ", what, (int)(intptr_t)stream);
}

static sp_status note_record(sp_device *device, void *event, void *stream)
{
    (void)device;
    assert_non_null(event);
    note('r', stream);
    return SP_OK;
}

static sp_status note_wait_event(sp_device *device, void *stream, void *event)
{
    (void)device;
    assert_non_null(event);
    note('w', stream);
    return SP_OK;
}

static sp_status note_wait(sp_device *device, void *stream)
{
    (void)device;
    note('s', stream);
    return SP_OK;
}

static sp_status fail_record(sp_device *device, void *event, void *stream)
{
    (void)event;
    (void)stream;
    (void)snprintf(device->error_text, sizeof device->error_text, "recording: it is broken");
    return SP_ERR_DEVICE;
}

static sp_device *open_noting(void)
{
    sp_device *device = NULL;

    assert_ok(sp_device_open("cpu", NULL, &device, NULL), NULL);
    noting = *device->ops;
    noting.kind = SP_DEVICE_CUDA;
    noting.event_record = note_record;
    noting.stream_wait_event = note_wait_event;
    noting.stream_wait = note_wait;
    device->ops = &noting;
    notes[0] = '\0';
    return device;
}

static void expect_notes(const char *want)
{
    assert_string_equal(notes, want);
    notes[0] = '\0';
}

static void wrapped_streams_are_ordered_with_the_main_one(void **state)
{
    size_t blocks = sp_alloc_blocks();
    sp_device *device = open_noting();
    sp_stream *seven = NULL, *nine = NULL, *apart = NULL;
    sp_error error;

    (void)state;
    assert_ok(sp_device_main_follows(device, &error), &error);
    assert_ok(sp_device_others_follow(device, &error), &error);
    expect_notes("");
    assert_ok(sp_stream_wrap(device, (void *)7, &seven, &error), &error);
    expect_notes("r0 w7 "); /* it sees what was switched before */
    assert_ptr_equal(sp_stream_native(seven), (void *)7);
    assert_ok(sp_stream_wrap(device, (void *)9, &nine, &error), &error);
    assert_ok(sp_stream_create_apart(device, &apart, &error), &error);
    expect_notes("r0 w9 ");
    assert_ok(sp_device_main_follows(device, &error), &error);
    expect_notes("r9 w0 r7 w0 ");
    assert_ok(sp_device_others_follow(device, &error), &error);
    expect_notes("r0 w9 r0 w7 ");
    assert_ok(sp_device_wait_all(device, &error), &error);
    expect_notes("s0 s9 s7 ");
    sp_stream_destroy(nine);
    assert_ok(sp_device_main_follows(device, &error), &error);
    expect_notes("r7 w0 ");
    sp_stream_destroy(seven);
    sp_stream_destroy(apart);
    assert_ok(sp_device_main_follows(device, &error), &error);
    expect_notes("");
    sp_device_close(device);
    expect_notes("s0 ");
    assert_int_equal(sp_alloc_blocks(), blocks);
}

/* The host's stream is not destroyed with its wrapping; one of the library's own is. */
static int destroyed;

static void count_destroy(sp_device *device, void *handle)
{
    (void)device;
    (void)handle;
    destroyed++;
}

static void a_wrapped_stream_stays_the_hosts(void **state)
{
    sp_device *device = open_noting();
    sp_stream *wrapped = NULL, *own = NULL;

    (void)state;
    noting.stream_destroy = count_destroy;
    assert_ok(sp_stream_wrap(device, (void *)5, &wrapped, NULL), NULL);
    assert_ok(sp_stream_create(device, &own, NULL), NULL);
    sp_stream_destroy(wrapped);
    assert_int_equal(destroyed, 0);
    sp_stream_destroy(own);
    assert_int_equal(destroyed, 1);
    sp_device_close(device);
}

static void a_failure_has_the_backends_words(void **state)
{
    size_t blocks = sp_alloc_blocks();
    sp_device *device = open_noting();
    sp_stream *stream = NULL;
    sp_error error = {0};

    (void)state;
    noting.event_record = fail_record;
    assert_int_equal(sp_stream_wrap(device, (void *)3, &stream, &error), SP_ERR_DEVICE);
    assert_string_equal(error.text, "recording: it is broken");
    assert_string_equal(error.subject, "cpu");
    assert_null(stream);
    noting.event_record = note_record;
    assert_ok(sp_device_main_follows(device, &error), &error); /* it is not one of them */
    expect_notes("");
    sp_device_close(device);
    assert_int_equal(sp_alloc_blocks(), blocks);
}

static void missing_objects_are_named(void **state)
{
    sp_device *device = NULL;
    sp_stream *stream = NULL;
    sp_event *event = NULL;
    sp_error error;
    char byte = 0;

    (void)state;
    assert_ok(sp_device_open("cpu", NULL, &device, &error), &error);
    assert_int_equal(sp_stream_wrap(device, &byte, &stream, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "native");
    assert_int_equal(sp_stream_wrap(NULL, NULL, &stream, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "device");
    assert_int_equal(sp_stream_create(device, NULL, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "out_stream");
    assert_ok(sp_stream_wrap(device, NULL, &stream, &error), &error);
    assert_int_equal(sp_stream_copy(NULL, &byte, &byte, 1, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "stream");
    assert_int_equal(sp_stream_copy(stream, &byte, NULL, 1, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "from");
    assert_int_equal(sp_stream_copy_column(stream, &byte, 1, &byte, 1, 2, 1, &error),
                     SP_ERR_STRIDE);
    assert_string_equal(error.subject, "to_stride");
    assert_int_equal(sp_event_record(event, stream, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "event");
    assert_int_equal(sp_graph_begin(stream, &error), SP_ERR_UNSUPPORTED);
    assert_int_equal(sp_graph_begin(NULL, &error), SP_ERR_ARGUMENT);
    sp_stream_destroy(stream);
    sp_device_close(device);
}

/* A lock that a thread of the parent held at the fork must not stop the child. */
static void a_child_closes_the_parents_device(void **state)
{
    sp_device *device = NULL;
    sp_stream *stream = NULL;
    void *memory = NULL;
    int status = -1;
    pid_t child;

    (void)state;
    assert_ok(sp_device_open("cpu", NULL, &device, NULL), NULL);
    assert_ok(sp_device_alloc(device, 100, &memory, NULL), NULL);
    assert_ok(sp_stream_create(device, &stream, NULL), NULL);
    (void)pthread_mutex_lock(&device->mutex);
    (void)pthread_mutex_lock(&device->order_mutex);
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        alarm(10);
        sp_stream_destroy(stream);
        sp_device_free(device, memory);
        sp_device_close(device);
        _exit(0);
    }
    (void)pthread_mutex_unlock(&device->mutex);
    (void)pthread_mutex_unlock(&device->order_mutex);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    sp_stream_destroy(stream);
    sp_device_close(device);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(wrapped_streams_are_ordered_with_the_main_one),
        cmocka_unit_test(a_wrapped_stream_stays_the_hosts),
        cmocka_unit_test(a_failure_has_the_backends_words),
        cmocka_unit_test(missing_objects_are_named),
        cmocka_unit_test(a_child_closes_the_parents_device),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
