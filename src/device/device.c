/*
 * device.c: what all devices share: opening, the host's allocators, and the list of blocks, so that
 * bytes are counted and closing a device frees what is left. stream.c has streams, events and
 * graphs. Everything else is up to the backend.
 */
#include "device/device_ops.h"
#include "device/step_streams.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/fork_epoch.h"
#include "base/grow.h"

#include <stdlib.h>
#include <string.h>

struct sp_device_block {
    void *memory;
    size_t bytes;
    bool pinned;
    sp_device_block *next;
};

/* ---- errors -------------------------------------------------------------------------------- */

sp_status sp_device_missing(const char *name, sp_error *error)
{
    return sp_fail(error, SP_ERR_ARGUMENT, NULL, name, -1, "%s is NULL", name);
}

sp_status sp_device_told(const sp_device *device, sp_status status, sp_error *error)
{
    char words[SP_ERROR_TEXT_BYTES];

    if (status >= 0)
        return status;
    sp_device_lock((sp_device *)device);
    memcpy(words, device->error_text, sizeof words);
    sp_device_unlock((sp_device *)device);
    return sp_fail(error, status, NULL, device->name, -1, "%.400s",
                   status == SP_ERR_UNSUPPORTED || words[0] == '\0' ? sp_status_text(status)
                                                                    : words);
}

/* ---- life ---------------------------------------------------------------------------------- */

void sp_device_options_default(sp_device_options *out_options, size_t struct_bytes)
{
    const sp_device_options defaults = {.struct_bytes = sizeof defaults};

    sp_struct_default(out_options, struct_bytes, &defaults, sizeof defaults);
}

void sp_device_init(sp_device *device, const sp_device_ops *ops, const char *name,
                    const sp_device_options *options)
{
    size_t bytes = strlen(name);

    if (bytes >= sizeof device->name)
        bytes = sizeof device->name - 1;
    memcpy(device->name, name, bytes);
    device->ops = ops;
    device->options = *options;
    device->options.library = NULL;
    device->epoch = sp_fork_epoch();
    device->main_stream.device = device;
    (void)pthread_mutex_init(&device->mutex, NULL);
    (void)pthread_mutex_init(&device->order_mutex, NULL);
}

bool sp_device_is_parents(const sp_device *device)
{
    return device->epoch != sp_fork_epoch();
}

void sp_device_lock(sp_device *device)
{
    if (!sp_device_is_parents(device))
        (void)pthread_mutex_lock(&device->mutex);
}

void sp_device_unlock(sp_device *device)
{
    if (!sp_device_is_parents(device))
        (void)pthread_mutex_unlock(&device->mutex);
}

static sp_status check_options(const sp_device_options *options, sp_error *error)
{
    if (!options->alloc != !options->free)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, options->alloc ? "free" : "alloc", -1,
                       "alloc and free of the host's device memory belong together");
    if (!options->alloc_pinned != !options->free_pinned)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL,
                       options->alloc_pinned ? "free_pinned" : "alloc_pinned", -1,
                       "alloc_pinned and free_pinned of the host's memory belong together");
    return SP_OK;
}

/* The number after "cuda:", or -1. */
static int32_t gpu_number(const char *name)
{
    char *end;
    long index;

    if (strcmp(name, "cuda") == 0)
        return 0;
    if (strncmp(name, "cuda:", 5) != 0 || name[5] < '0' || name[5] > '9')
        return -1;
    index = strtol(name + 5, &end, 10);
    return *end == '\0' && index < 1024 ? (int32_t)index : -1;
}

sp_status sp_device_open(const char *name, const sp_device_options *options, sp_device **out_device,
                         sp_error *error)
{
    sp_device_options own;
    sp_status status = SP_OK;
    int32_t gpu;

    if (!name || !out_device)
        return sp_device_missing(name ? "out_device" : "name", error);
    sp_device_options_default(&own, sizeof own);
    if (options)
        status = sp_struct_read(&own, sizeof own, options, "sp_device_options", error);
    if (status == SP_OK)
        status = check_options(&own, error);
    if (status != SP_OK)
        return status;
    if (strcmp(name, "cpu") == 0)
        return sp_device_open_cpu(&own, out_device, error);
    gpu = gpu_number(name);
    if (gpu >= 0)
        return sp_device_open_cuda(gpu, &own, out_device, error);
    return sp_fail(error, SP_ERR_ARGUMENT, NULL, name, -1,
                   "a device is cpu, cuda, or cuda:N with the number of a GPU");
}

void sp_device_close(sp_device *device)
{
    if (!device)
        return;
    if (!sp_device_is_parents(device))
        (void)sp_device_wait_all(device, NULL);
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

sp_status sp_device_memory(const sp_device *device, size_t *out_free, size_t *out_total,
                           sp_error *error)
{
    if (!device || !out_free || !out_total)
        return sp_device_missing(!device ? "device" : !out_free ? "out_free" : "out_total", error);
    return sp_device_told(device, device->ops->memory(device, out_free, out_total), error);
}

/* ---- blocks -------------------------------------------------------------------------------- */

static sp_status from_host(sp_device *device, bool pinned, size_t bytes, void **out_memory,
                           sp_error *error)
{
    const sp_device_options *host = &device->options;
    void *memory = (pinned ? host->alloc_pinned : host->alloc)(host->user, bytes);
    sp_status status = SP_OK;

    if (!memory)
        return sp_fail(error, SP_ERR_MEMORY, NULL, device->name, -1,
                       "the host's function gave no %zu bytes of %s memory", bytes,
                       pinned ? "pinned" : "device");
    if ((uintptr_t)memory % SP_DEVICE_ALIGN_BYTES != 0)
        status = sp_fail(error, SP_ERR_ARGUMENT, NULL, pinned ? "alloc_pinned" : "alloc", -1,
                         "the host's function gave memory at %p, which is not on a %d-byte "
                         "boundary",
                         memory, SP_DEVICE_ALIGN_BYTES);
    else if (!pinned)
        status = sp_device_told(device, device->ops->zero(device, memory, bytes), error);
    else
        memset(memory, 0, bytes);
    if (status != SP_OK)
        (pinned ? host->free_pinned : host->free)(host->user, memory, bytes);
    else
        *out_memory = memory;
    return status;
}

static sp_status take(sp_device *device, bool pinned, size_t bytes, void **out_memory,
                      sp_error *error)
{
    if (pinned ? device->options.alloc_pinned != NULL : device->options.alloc != NULL)
        return from_host(device, pinned, bytes, out_memory, error);
    if (pinned)
        return device->ops->alloc_pinned(device, bytes, out_memory, error);
    return device->ops->alloc(device, bytes, out_memory, error);
}

static void give_back(sp_device *device, const sp_device_block *block)
{
    const sp_device_options *host = &device->options;

    if (block->pinned && host->free_pinned)
        host->free_pinned(host->user, block->memory, block->bytes);
    else if (block->pinned)
        device->ops->free_pinned(device, block->memory);
    else if (host->free)
        host->free(host->user, block->memory, block->bytes);
    else
        device->ops->free(device, block->memory);
}

void sp_device_release(sp_device *device)
{
    if (device->order)
        device->ops->event_destroy(device, device->order);
    while (device->blocks) {
        sp_device_block *block = device->blocks;

        device->blocks = block->next;
        give_back(device, block);
        sp_free(block);
    }
    if (sp_device_is_parents(device))
        return;
    (void)pthread_mutex_destroy(&device->mutex);
    (void)pthread_mutex_destroy(&device->order_mutex);
}

static sp_status add_block(sp_device *device, bool pinned, size_t bytes, void **out_memory,
                           sp_error *error)
{
    sp_device_block *block;
    sp_status status;

    if (!device || !out_memory)
        return sp_device_missing(device ? "out_memory" : "device", error);
    if (bytes == 0)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "bytes", -1,
                       "an allocation has at least one byte, not 0");
    block = sp_calloc(1, sizeof *block);
    if (!block)
        return sp_fail_memory(error, sizeof *block, "a device block's record");
    status = take(device, pinned, bytes, &block->memory, error);
    if (status != SP_OK) {
        sp_free(block);
        return status;
    }
    block->bytes = bytes;
    block->pinned = pinned;
    sp_device_lock(device);
    block->next = device->blocks;
    device->blocks = block;
    device->bytes += pinned ? 0 : bytes;
    sp_device_unlock(device);
    *out_memory = block->memory;
    return SP_OK;
}

static void remove_block(sp_device *device, bool pinned, void *memory)
{
    sp_device_block **link, *block;

    sp_device_lock(device);
    for (link = &device->blocks; *link; link = &(*link)->next)
        if ((*link)->memory == memory && (*link)->pinned == pinned)
            break;
    block = *link;
    if (block) {
        *link = block->next;
        device->bytes -= pinned ? 0 : block->bytes;
    }
    sp_device_unlock(device);
    if (block)
        give_back(device, block);
    sp_free(block);
}

sp_status sp_device_alloc(sp_device *device, size_t bytes, void **out_memory, sp_error *error)
{
    return add_block(device, false, bytes, out_memory, error);
}

void sp_device_free(sp_device *device, void *memory)
{
    if (memory)
        remove_block(device, false, memory);
}

size_t sp_device_allocated_bytes(const sp_device *device)
{
    sp_device *locked = (sp_device *)device;
    size_t bytes;

    sp_device_lock(locked);
    bytes = device->bytes;
    sp_device_unlock(locked);
    return bytes;
}

sp_status sp_device_alloc_pinned(sp_device *device, size_t bytes, void **out_memory,
                                 sp_error *error)
{
    return add_block(device, true, bytes, out_memory, error);
}

void sp_device_free_pinned(sp_device *device, void *memory)
{
    if (memory)
        remove_block(device, true, memory);
}

/* ---- copies -------------------------------------------------------------------------------- */

/* Checks the device and host memory of a copy. */
static sp_status check_copy(const sp_device *device, const void *device_memory,
                            const void *host_memory, sp_error *error)
{
    if (!device)
        return sp_device_missing("device", error);
    if (!device_memory || !host_memory)
        return sp_device_missing(device_memory ? "host_memory" : "device_memory", error);
    return SP_OK;
}

sp_status sp_device_pin(sp_device *device, void *memory, size_t bytes, sp_error *error)
{
    if (!device || !memory)
        return sp_device_missing(device ? "memory" : "device", error);
    if (bytes == 0)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "bytes", -1, "0 bytes cannot be pinned");
    return sp_device_told(device, device->ops->pin(device, memory, bytes), error);
}

void sp_device_unpin(sp_device *device, void *memory)
{
    if (memory)
        device->ops->unpin(device, memory);
}

sp_status sp_device_write(sp_device *device, void *device_memory, const void *host_memory,
                          size_t bytes, sp_error *error)
{
    sp_status status;

    if (bytes == 0)
        return SP_OK;
    status = check_copy(device, device_memory, host_memory, error);
    if (status != SP_OK)
        return status;
    return sp_device_told(device, device->ops->write(device, device_memory, host_memory, bytes),
                          error);
}

sp_status sp_device_read(sp_device *device, void *host_memory, const void *device_memory,
                         size_t bytes, sp_error *error)
{
    sp_status status;

    if (bytes == 0)
        return SP_OK;
    status = check_copy(device, device_memory, host_memory, error);
    if (status != SP_OK)
        return status;
    return sp_device_told(device, device->ops->read(device, host_memory, device_memory, bytes),
                          error);
}

sp_status sp_device_zero(sp_device *device, void *device_memory, size_t bytes, sp_error *error)
{
    if (bytes == 0)
        return SP_OK;
    if (!device || !device_memory)
        return sp_device_missing(device ? "device_memory" : "device", error);
    return sp_device_told(device, device->ops->zero(device, device_memory, bytes), error);
}

sp_status sp_device_write_column(sp_device *device, void *device_memory, size_t device_stride,
                                 const void *host_memory, size_t host_stride, size_t width,
                                 size_t height, sp_error *error)
{
    sp_status status;

    if (width == 0 || height == 0)
        return SP_OK;
    status = check_copy(device, device_memory, host_memory, error);
    if (status == SP_OK)
        status = sp_stream_copy_column(&device->main_stream, device_memory, device_stride,
                                       host_memory, host_stride, width, height, error);
    return status == SP_OK ? sp_stream_wait(&device->main_stream, error) : status;
}
