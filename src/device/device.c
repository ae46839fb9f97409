/*
 * device.c: what all devices share. It keeps the blocks in a list, so that the number of bytes is
 * known and a device that is closed takes what was left with it; all else goes to the backend.
 */
#include "device/device_ops.h"

#include "base/alloc.h"
#include "base/error.h"

#include <stdlib.h>
#include <string.h>

struct sp_device_block {
    void *memory;
    size_t bytes;
    sp_device_block *next;
};

/* ---- life ---------------------------------------------------------------------------------- */

void sp_device_init(sp_device *device, const sp_device_ops *ops, const char *name)
{
    size_t bytes = strlen(name);

    if (bytes >= sizeof device->name)
        bytes = sizeof device->name - 1;
    memcpy(device->name, name, bytes);
    device->ops = ops;
    device->main_stream.device = device;
    (void)pthread_mutex_init(&device->mutex, NULL);
}

void sp_device_release(sp_device *device)
{
    while (device->blocks) {
        sp_device_block *block = device->blocks;

        device->blocks = block->next;
        device->ops->free(device, block->memory);
        sp_free(block);
    }
    (void)pthread_mutex_destroy(&device->mutex);
}

sp_status sp_device_open(const char *name, sp_device **out_device, sp_error *error)
{
    char *end = NULL;
    long index = 0;

    if (name && strcmp(name, "cpu") == 0) {
        sp_status status = sp_device_open_cpu(out_device);

        return status == SP_OK ? SP_OK : sp_fail_memory(error, sizeof(sp_device), "a device");
    }
    if (name && strncmp(name, "cuda", 4) == 0 && (name[4] == '\0' || name[4] == ':')) {
        if (name[4] == ':')
            index = strtol(name + 5, &end, 10);
        if (!end || (end != name + 5 && *end == '\0' && index >= 0 && index < 1024))
            return sp_device_open_cuda((int32_t)index, NULL, out_device, error);
    }
    return sp_fail(error, SP_ERR_ARGUMENT, NULL, name ? name : "device", -1,
                   "a device is cpu, cuda, or cuda:N with the number of a GPU");
}

void sp_device_close(sp_device *device)
{
    if (device)
        device->ops->close(device);
}

const char *sp_device_name(const sp_device *device)
{
    return device->name;
}

sp_device_kind sp_device_get_kind(const sp_device *device)
{
    return device->ops->kind;
}

const char *sp_device_error_text(const sp_device *device)
{
    return device->error_text;
}

sp_status sp_device_memory(const sp_device *device, size_t *out_free, size_t *out_total)
{
    return device->ops->memory(device, out_free, out_total);
}

/* ---- memory -------------------------------------------------------------------------------- */

sp_status sp_device_alloc(sp_device *device, size_t bytes, void **out_memory, sp_error *error)
{
    sp_device_block *block;
    sp_status status;

    if (bytes == 0)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "bytes", -1,
                       "a device allocation of 0 bytes was asked for");
    block = sp_calloc(1, sizeof *block);
    if (!block)
        return sp_fail_memory(error, sizeof *block, "a device block's record");
    status = device->ops->alloc(device, bytes, &block->memory, error);
    if (status != SP_OK) {
        sp_free(block);
        return status;
    }
    block->bytes = bytes;
    (void)pthread_mutex_lock(&device->mutex);
    block->next = device->blocks;
    device->blocks = block;
    device->bytes += bytes;
    (void)pthread_mutex_unlock(&device->mutex);
    *out_memory = block->memory;
    return SP_OK;
}

void sp_device_free(sp_device *device, void *memory)
{
    sp_device_block **link, *block;

    if (!memory)
        return;
    (void)pthread_mutex_lock(&device->mutex);
    for (link = &device->blocks; *link && (*link)->memory != memory; link = &(*link)->next)
        ;
    block = *link;
    if (block) {
        *link = block->next;
        device->bytes -= block->bytes;
    }
    (void)pthread_mutex_unlock(&device->mutex);
    if (block)
        device->ops->free(device, block->memory);
    sp_free(block);
}

size_t sp_device_allocated_bytes(const sp_device *device)
{
    sp_device *locked = (sp_device *)device;
    size_t bytes;

    (void)pthread_mutex_lock(&locked->mutex);
    bytes = device->bytes;
    (void)pthread_mutex_unlock(&locked->mutex);
    return bytes;
}

sp_status sp_device_alloc_pinned(sp_device *device, size_t bytes, void **out_memory,
                                 sp_error *error)
{
    if (bytes == 0)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "bytes", -1,
                       "a pinned allocation of 0 bytes was asked for");
    return device->ops->alloc_pinned(device, bytes, out_memory, error);
}

void sp_device_free_pinned(sp_device *device, void *memory)
{
    if (memory)
        device->ops->free_pinned(device, memory);
}

sp_status sp_device_pin(sp_device *device, void *memory, size_t bytes)
{
    return memory && bytes > 0 ? device->ops->pin(device, memory, bytes) : SP_ERR_ARGUMENT;
}

void sp_device_unpin(sp_device *device, void *memory)
{
    if (memory)
        device->ops->unpin(device, memory);
}

sp_status sp_device_write(sp_device *device, void *device_memory, const void *host_memory,
                          size_t bytes)
{
    return bytes == 0 ? SP_OK : device->ops->write(device, device_memory, host_memory, bytes);
}

sp_status sp_device_read(sp_device *device, void *host_memory, const void *device_memory,
                         size_t bytes)
{
    return bytes == 0 ? SP_OK : device->ops->read(device, host_memory, device_memory, bytes);
}

sp_status sp_device_zero(sp_device *device, void *device_memory, size_t bytes)
{
    return bytes == 0 ? SP_OK : device->ops->zero(device, device_memory, bytes);
}

sp_status sp_device_write_column(sp_device *device, void *device_memory, size_t device_stride,
                                 const void *host_memory, size_t host_stride, size_t width,
                                 size_t height)
{
    sp_stream *stream = &device->main_stream;
    sp_status status = sp_stream_copy_column(stream, device_memory, device_stride, host_memory,
                                             host_stride, width, height);

    return status == SP_OK ? sp_stream_wait(stream) : status;
}

/* ---- streams, events, graphs --------------------------------------------------------------- */

sp_stream *sp_device_main_stream(sp_device *device)
{
    return &device->main_stream;
}

void *sp_stream_native(const sp_stream *stream)
{
    return stream->handle;
}

sp_status sp_stream_create(sp_device *device, sp_stream **out_stream)
{
    sp_stream *stream = sp_calloc(1, sizeof *stream);
    sp_status status;

    if (!stream)
        return SP_ERR_MEMORY;
    stream->device = device;
    status = device->ops->stream_create(device, &stream->handle);
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
    stream->device->ops->stream_destroy(stream->device, stream->handle);
    sp_free(stream);
}

sp_status sp_stream_wait(sp_stream *stream)
{
    return stream->device->ops->stream_wait(stream->device, stream->handle);
}

sp_status sp_stream_copy(sp_stream *stream, void *to, const void *from, size_t bytes)
{
    if (bytes == 0)
        return SP_OK;
    return stream->device->ops->stream_copy(stream->device, stream->handle, to, from, bytes);
}

sp_status sp_stream_copy_column(sp_stream *stream, void *to, size_t to_stride, const void *from,
                                size_t from_stride, size_t width, size_t height)
{
    if (to_stride < width || from_stride < width)
        return SP_ERR_STRIDE;
    if (width == 0 || height == 0)
        return SP_OK;
    return stream->device->ops->stream_copy_column(stream->device, stream->handle, to, to_stride,
                                                   from, from_stride, width, height);
}

sp_status sp_stream_zero(sp_stream *stream, void *to, size_t bytes)
{
    if (bytes == 0)
        return SP_OK;
    return stream->device->ops->stream_zero(stream->device, stream->handle, to, bytes);
}

sp_status sp_stream_wait_event(sp_stream *stream, const sp_event *event)
{
    return stream->device->ops->stream_wait_event(stream->device, stream->handle, event->handle);
}

sp_status sp_event_create(sp_device *device, sp_event **out_event)
{
    sp_event *event = sp_calloc(1, sizeof *event);
    sp_status status;

    if (!event)
        return SP_ERR_MEMORY;
    event->device = device;
    status = device->ops->event_create(device, &event->handle);
    if (status != SP_OK) {
        sp_free(event);
        return status;
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

sp_status sp_event_record(sp_event *event, sp_stream *stream)
{
    return event->device->ops->event_record(event->device, event->handle, stream->handle);
}

sp_status sp_event_query(const sp_event *event)
{
    return event->device->ops->event_query(event->device, event->handle);
}

sp_status sp_event_wait(const sp_event *event)
{
    return event->device->ops->event_wait(event->device, event->handle);
}

sp_status sp_event_seconds(const sp_event *from, const sp_event *to, double *out_seconds)
{
    return from->device->ops->event_seconds(from->device, from->handle, to->handle, out_seconds);
}

sp_status sp_graph_begin(sp_stream *stream)
{
    return stream->device->ops->graph_begin(stream->device, stream->handle);
}

sp_status sp_graph_end(sp_stream *stream, sp_graph **out_graph)
{
    sp_graph *graph = sp_calloc(1, sizeof *graph);
    void *handle = NULL;
    sp_status status = stream->device->ops->graph_end(stream->device, stream->handle, &handle);

    if (status == SP_OK && !graph) {
        stream->device->ops->graph_destroy(stream->device, handle);
        return SP_ERR_MEMORY;
    }
    if (status != SP_OK) {
        sp_free(graph);
        return status;
    }
    graph->device = stream->device;
    graph->handle = handle;
    *out_graph = graph;
    return SP_OK;
}

sp_status sp_graph_launch(sp_graph *graph, sp_stream *stream)
{
    return graph->device->ops->graph_launch(graph->device, graph->handle, stream->handle);
}

void sp_graph_destroy(sp_graph *graph)
{
    if (!graph)
        return;
    graph->device->ops->graph_destroy(graph->device, graph->handle);
    sp_free(graph);
}
