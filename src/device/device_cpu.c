/*
 * device_cpu.c: the host's memory as a device. Its streams are synchronous, so every event is
 * already complete; a graph would save nothing, so capture is not supported.
 */
#include "device/device_ops.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"

#include <string.h>
#include <unistd.h>

static void cpu_close(sp_device *device)
{
    sp_device_release(device);
    sp_free(device);
}

static sp_status cpu_memory(const sp_device *device, size_t *out_free, size_t *out_total)
{
    long page = sysconf(_SC_PAGESIZE), free_pages = sysconf(_SC_AVPHYS_PAGES);
    long pages = sysconf(_SC_PHYS_PAGES);

    (void)device;
    if (page < 1 || free_pages < 0 || pages < 0)
        return SP_ERR_UNSUPPORTED;
    *out_free = (size_t)free_pages * (size_t)page;
    *out_total = (size_t)pages * (size_t)page;
    return SP_OK;
}

static sp_status cpu_alloc(sp_device *device, size_t bytes, void **out_memory, sp_error *error)
{
    void *memory = sp_aligned_calloc(bytes, SP_DEVICE_ALIGN_BYTES);

    (void)device;
    if (!memory)
        return sp_fail_memory(error, bytes, "device memory on the cpu");
    *out_memory = memory;
    return SP_OK;
}

static void cpu_free(sp_device *device, void *memory)
{
    (void)device;
    sp_aligned_free(memory);
}

static sp_status cpu_pin(sp_device *device, void *memory, size_t bytes)
{
    (void)device;
    (void)memory;
    (void)bytes;
    return SP_OK;
}

static void cpu_unpin(sp_device *device, void *memory)
{
    (void)device;
    (void)memory;
}

static sp_status cpu_copy(sp_device *device, void *to, const void *from, size_t bytes)
{
    (void)device;
    memcpy(to, from, bytes);
    return SP_OK;
}

static sp_status cpu_zero(sp_device *device, void *to, size_t bytes)
{
    (void)device;
    memset(to, 0, bytes);
    return SP_OK;
}

static sp_status cpu_copy_column(sp_device *device, void *handle, void *to, size_t to_stride,
                                 const void *from, size_t from_stride, size_t width, size_t height)
{
    (void)device;
    (void)handle;
    for (size_t i = 0; i < height; i++)
        memcpy((char *)to + i * to_stride, (const char *)from + i * from_stride, width);
    return SP_OK;
}

static sp_status cpu_stream_create(sp_device *device, void **out_handle)
{
    (void)device;
    *out_handle = NULL;
    return SP_OK;
}

static void cpu_destroy(sp_device *device, void *handle)
{
    (void)device;
    (void)handle;
}

static sp_status cpu_done(sp_device *device, void *handle)
{
    (void)device;
    (void)handle;
    return SP_OK;
}

static sp_status cpu_ordered(sp_device *device, void *stream, void *event)
{
    (void)device;
    (void)stream;
    (void)event;
    return SP_OK;
}

static sp_status cpu_stream_copy(sp_device *device, void *handle, void *to, const void *from,
                                 size_t bytes)
{
    (void)handle;
    return cpu_copy(device, to, from, bytes);
}

static sp_status cpu_stream_zero(sp_device *device, void *handle, void *to, size_t bytes)
{
    (void)handle;
    return cpu_zero(device, to, bytes);
}

/* An event of the CPU is the time at which it was recorded. */
static sp_status cpu_event_create(sp_device *device, void **out_handle)
{
    (void)device;
    *out_handle = sp_calloc(1, sizeof(double));
    return *out_handle ? SP_OK : SP_ERR_MEMORY;
}

static void cpu_event_destroy(sp_device *device, void *handle)
{
    (void)device;
    sp_free(handle);
}

static sp_status cpu_event_record(sp_device *device, void *event, void *stream)
{
    (void)device;
    (void)stream;
    *(double *)event = sp_clock_seconds();
    return SP_OK;
}

static sp_status cpu_event_seconds(sp_device *device, void *from, void *to, double *out_seconds)
{
    (void)device;
    *out_seconds = *(double *)to - *(double *)from;
    return SP_OK;
}

static sp_status cpu_graph_begin(sp_device *device, void *stream)
{
    (void)device;
    (void)stream;
    return SP_ERR_UNSUPPORTED;
}

static sp_status cpu_graph_end(sp_device *device, void *stream, void **out_graph)
{
    (void)device;
    (void)stream;
    (void)out_graph;
    return SP_ERR_UNSUPPORTED;
}

static const sp_device_ops cpu_ops = {
    .kind = SP_DEVICE_CPU,
    .close = cpu_close,
    .memory = cpu_memory,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .alloc_pinned = cpu_alloc,
    .free_pinned = cpu_free,
    .pin = cpu_pin,
    .unpin = cpu_unpin,
    .write = cpu_copy,
    .read = cpu_copy,
    .zero = cpu_zero,
    .stream_create = cpu_stream_create,
    .stream_destroy = cpu_destroy,
    .stream_wait = cpu_done,
    .stream_copy = cpu_stream_copy,
    .stream_zero = cpu_stream_zero,
    .stream_copy_column = cpu_copy_column,
    .event_create = cpu_event_create,
    .event_destroy = cpu_event_destroy,
    .event_record = cpu_event_record,
    .event_query = cpu_done,
    .event_wait = cpu_done,
    .event_seconds = cpu_event_seconds,
    .stream_wait_event = cpu_ordered,
    .graph_begin = cpu_graph_begin,
    .graph_end = cpu_graph_end,
    .graph_launch = cpu_ordered,
    .graph_destroy = cpu_destroy,
};

sp_status sp_device_open_cpu(const sp_device_options *options, sp_device **out_device,
                             sp_error *error)
{
    sp_device *device = sp_calloc(1, sizeof *device);

    if (!device)
        return sp_fail_memory(error, sizeof *device, "a device");
    sp_device_init(device, &cpu_ops, "cpu", options);
    *out_device = device;
    return SP_OK;
}
