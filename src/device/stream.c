/*
 * stream.c: streams, events and graphs of any device, and the order between the main stream and the
 * others on which steps may run.
 */
#include "device/device_ops.h"
#include "device/step_streams.h"

#include "base/alloc.h"
#include "base/error.h"

/* ---- streams ------------------------------------------------------------------------------- */

sp_stream *sp_device_main_stream(sp_device *device)
{
    return &device->main_stream;
}

void *sp_stream_native(const sp_stream *stream)
{
    return stream->handle;
}

sp_status sp_stream_wait(sp_stream *stream, sp_error *error)
{
    if (!stream)
        return sp_device_missing("stream", error);
    return sp_device_told(stream->device,
                          stream->device->ops->stream_wait(stream->device, stream->handle), error);
}

static sp_status check_copy(const sp_stream *stream, const void *to, const void *from,
                            bool is_empty, sp_error *error)
{
    if (!stream)
        return sp_device_missing("stream", error);
    if (!is_empty && (!to || !from))
        return sp_device_missing(to ? "from" : "to", error);
    return SP_OK;
}

sp_status sp_stream_copy(sp_stream *stream, void *to, const void *from, size_t bytes,
                         sp_error *error)
{
    sp_status status = check_copy(stream, to, from, bytes == 0, error);
    sp_device *device;

    if (status != SP_OK || bytes == 0)
        return status;
    device = stream->device;
    return sp_device_told(device, device->ops->stream_copy(device, stream->handle, to, from, bytes),
                          error);
}

sp_status sp_stream_copy_column(sp_stream *stream, void *to, size_t to_stride, const void *from,
                                size_t from_stride, size_t width, size_t height, sp_error *error)
{
    sp_status status = check_copy(stream, to, from, width == 0 || height == 0, error);
    sp_device *device;

    if (status == SP_OK && (to_stride < width || from_stride < width))
        return sp_fail(error, SP_ERR_STRIDE, "bad-stride",
                       to_stride < width ? "to_stride" : "from_stride", -1,
                       "pieces of %zu bytes cannot begin %zu bytes apart", width,
                       to_stride < width ? to_stride : from_stride);
    if (status != SP_OK || width == 0 || height == 0)
        return status;
    device = stream->device;
    return sp_device_told(device,
                          device->ops->stream_copy_column(device, stream->handle, to, to_stride,
                                                          from, from_stride, width, height),
                          error);
}

sp_status sp_stream_zero(sp_stream *stream, void *to, size_t bytes, sp_error *error)
{
    sp_device *device;

    if (!stream)
        return sp_device_missing("stream", error);
    if (bytes == 0)
        return SP_OK;
    if (!to)
        return sp_device_missing("to", error);
    device = stream->device;
    return sp_device_told(device, device->ops->stream_zero(device, stream->handle, to, bytes),
                          error);
}

sp_status sp_stream_wait_event(sp_stream *stream, const sp_event *event, sp_error *error)
{
    sp_device *device;

    if (!stream || !event)
        return sp_device_missing(stream ? "event" : "stream", error);
    device = stream->device;
    return sp_device_told(
        device, device->ops->stream_wait_event(device, stream->handle, event->handle), error);
}

static void lock(sp_device *device)
{
    if (!sp_device_is_parents(device))
        (void)pthread_mutex_lock(&device->order_mutex);
}

static void unlock(sp_device *device)
{
    if (!sp_device_is_parents(device))
        (void)pthread_mutex_unlock(&device->order_mutex);
}

static sp_status new_stream(sp_device *device, sp_stream **out_stream, sp_error *error)
{
    sp_stream *stream;

    if (!device || !out_stream)
        return sp_device_missing(device ? "out_stream" : "device", error);
    stream = sp_calloc(1, sizeof *stream);
    if (!stream)
        return sp_fail_memory(error, sizeof *stream, "a stream");
    stream->device = device;
    *out_stream = stream;
    return SP_OK;
}

sp_status sp_stream_create_apart(sp_device *device, sp_stream **out_stream, sp_error *error)
{
    sp_stream *stream = NULL;
    sp_status status = new_stream(device, &stream, error);

    if (status == SP_OK)
        status = sp_device_told(device, device->ops->stream_create(device, &stream->handle), error);
    if (status == SP_OK)
        *out_stream = stream;
    else
        sp_free(stream);
    return status;
}

/* Makes `stream` wait for the work now on the main stream. The caller holds the lock. */
static sp_status follow_main(sp_device *device, sp_stream *stream)
{
    sp_status status = device->ops->event_record(device, device->order, device->main_stream.handle);

    if (status != SP_OK)
        return status;
    return device->ops->stream_wait_event(device, stream->handle, device->order);
}

/* Adds the stream to those on which steps may run: it sees the tables as the main stream has left
 * them. */
static sp_status add_stream(sp_stream *stream, sp_error *error)
{
    sp_device *device = stream->device;
    sp_status status = SP_OK;

    lock(device);
    if (!device->order)
        status = device->ops->event_create(device, &device->order);
    if (status == SP_OK)
        status = follow_main(device, stream);
    if (status == SP_OK) {
        stream->next = device->streams;
        device->streams = stream;
    }
    unlock(device);
    return sp_device_told(device, status, error);
}

static void remove_stream(sp_stream *stream)
{
    sp_device *device = stream->device;
    sp_stream **link;

    lock(device);
    for (link = &device->streams; *link && *link != stream; link = &(*link)->next)
        ;
    if (*link)
        *link = stream->next;
    unlock(device);
}

sp_status sp_stream_create(sp_device *device, sp_stream **out_stream, sp_error *error)
{
    sp_stream *stream = NULL;
    sp_status status;

    if (!out_stream)
        return sp_device_missing("out_stream", error);
    status = sp_stream_create_apart(device, &stream, error);
    if (status != SP_OK)
        return status;
    status = add_stream(stream, error);
    if (status != SP_OK) {
        sp_stream_destroy(stream);
        return status;
    }
    *out_stream = stream;
    return SP_OK;
}

sp_status sp_stream_wrap(sp_device *device, void *native, sp_stream **out_stream, sp_error *error)
{
    sp_stream *stream = NULL;
    sp_status status;

    if (device && native && device->ops->kind == SP_DEVICE_CPU)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "native", -1,
                       "the cpu has no streams of its own: native must be NULL");
    if (!out_stream)
        return sp_device_missing("out_stream", error);
    status = new_stream(device, &stream, error);
    if (status != SP_OK)
        return status;
    stream->handle = native;
    stream->borrowed = true;
    status = add_stream(stream, error);
    if (status != SP_OK) {
        sp_free(stream);
        return status;
    }
    *out_stream = stream;
    return SP_OK;
}

void sp_stream_destroy(sp_stream *stream)
{
    if (!stream)
        return;
    remove_stream(stream);
    if (!stream->borrowed)
        stream->device->ops->stream_destroy(stream->device, stream->handle);
    sp_free(stream);
}

/* ---- the order of steps and switches ------------------------------------------------------- */

sp_status sp_device_main_follows(sp_device *device, sp_error *error)
{
    void *main_stream = device->main_stream.handle;
    sp_status status = SP_OK;

    lock(device);
    for (sp_stream *s = device->streams; s && status == SP_OK; s = s->next) {
        status = device->ops->event_record(device, device->order, s->handle);
        if (status == SP_OK)
            status = device->ops->stream_wait_event(device, main_stream, device->order);
    }
    unlock(device);
    return sp_device_told(device, status, error);
}

sp_status sp_device_others_follow(sp_device *device, sp_error *error)
{
    sp_status status = SP_OK;

    lock(device);
    for (sp_stream *s = device->streams; s && status == SP_OK; s = s->next)
        status = follow_main(device, s);
    unlock(device);
    return sp_device_told(device, status, error);
}

sp_status sp_device_wait_all(sp_device *device, sp_error *error)
{
    sp_status status = sp_stream_wait(&device->main_stream, error);

    lock(device);
    for (sp_stream *s = device->streams; s; s = s->next) {
        sp_status own = sp_stream_wait(s, error);

        status = status != SP_OK ? status : own;
    }
    unlock(device);
    return status;
}

/* ---- events, graphs ------------------------------------------------------------------------ */

sp_status sp_event_create(sp_device *device, sp_event **out_event, sp_error *error)
{
    sp_event *event;
    sp_status status;

    if (!device || !out_event)
        return sp_device_missing(device ? "out_event" : "device", error);
    event = sp_calloc(1, sizeof *event);
    if (!event)
        return sp_fail_memory(error, sizeof *event, "an event");
    event->device = device;
    status = device->ops->event_create(device, &event->handle);
    if (status != SP_OK) {
        sp_free(event);
        return sp_device_told(device, status, error);
    }
    *out_event = event;
    return SP_OK;
}

void sp_event_destroy(sp_event *event)
{
    if (!event)
        return;
    event->device->ops->event_destroy(event->device, event->handle);
    sp_free(event);
}

sp_status sp_event_record(sp_event *event, sp_stream *stream, sp_error *error)
{
    if (!event || !stream)
        return sp_device_missing(event ? "stream" : "event", error);
    return sp_device_told(
        event->device,
        event->device->ops->event_record(event->device, event->handle, stream->handle), error);
}

sp_status sp_event_query(const sp_event *event, sp_error *error)
{
    if (!event)
        return sp_device_missing("event", error);
    return sp_device_told(event->device,
                          event->device->ops->event_query(event->device, event->handle), error);
}

sp_status sp_event_wait(const sp_event *event, sp_error *error)
{
    if (!event)
        return sp_device_missing("event", error);
    return sp_device_told(event->device,
                          event->device->ops->event_wait(event->device, event->handle), error);
}

sp_status sp_event_seconds(const sp_event *from, const sp_event *to, double *out_seconds,
                           sp_error *error)
{
    if (!from || !to || !out_seconds)
        return sp_device_missing(!from ? "from" : !to ? "to" : "out_seconds", error);
    return sp_device_told(
        from->device,
        from->device->ops->event_seconds(from->device, from->handle, to->handle, out_seconds),
        error);
}

sp_status sp_graph_begin(sp_stream *stream, sp_error *error)
{
    if (!stream)
        return sp_device_missing("stream", error);
    return sp_device_told(stream->device,
                          stream->device->ops->graph_begin(stream->device, stream->handle), error);
}

sp_status sp_graph_end(sp_stream *stream, sp_graph **out_graph, sp_error *error)
{
    sp_graph *graph;
    void *handle = NULL;
    sp_status status;

    if (!stream || !out_graph)
        return sp_device_missing(stream ? "out_graph" : "stream", error);
    graph = sp_calloc(1, sizeof *graph);
    status = stream->device->ops->graph_end(stream->device, stream->handle, &handle);
    if (status == SP_OK && !graph) {
        stream->device->ops->graph_destroy(stream->device, handle);
        return sp_fail_memory(error, sizeof *graph, "a graph");
    }
    if (status != SP_OK) {
        sp_free(graph);
        return sp_device_told(stream->device, status, error);
    }
    graph->device = stream->device;
    graph->handle = handle;
    *out_graph = graph;
    return SP_OK;
}

sp_status sp_graph_launch(sp_graph *graph, sp_stream *stream, sp_error *error)
{
    if (!graph || !stream)
        return sp_device_missing(graph ? "stream" : "graph", error);
    return sp_device_told(
        graph->device,
        graph->device->ops->graph_launch(graph->device, graph->handle, stream->handle), error);
}

void sp_graph_destroy(sp_graph *graph)
{
    if (!graph)
        return;
    graph->device->ops->graph_destroy(graph->device, graph->handle);
    sp_free(graph);
}
