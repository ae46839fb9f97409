/*
 * device_cpu.c: the host's memory as a device. It keeps its blocks in a list, so that the number
 * of bytes is known and a device that is closed takes what was left with it.
 */
#include <sidepath/device.h>

#include "base/alloc.h"
#include "base/error.h"

#include <pthread.h>
#include <string.h>

#define BLOCK_ALIGN_BYTES 256

typedef struct device_block {
    void *memory;
    size_t bytes;
    struct device_block *next;
} device_block;

struct sp_device {
    pthread_mutex_t mutex; /* loader threads allocate beside the engine's */
    device_block *blocks;
    size_t bytes;
};

sp_status sp_device_open_cpu(sp_device **out_device)
{
    sp_device *device = sp_calloc(1, sizeof *device);

    if (!device)
        return SP_ERR_MEMORY;
    (void)pthread_mutex_init(&device->mutex, NULL);
    *out_device = device;
    return SP_OK;
}

void sp_device_close(sp_device *device)
{
    if (!device)
        return;
    while (device->blocks) {
        device_block *block = device->blocks;

        device->blocks = block->next;
        sp_aligned_free(block->memory);
        sp_free(block);
    }
    (void)pthread_mutex_destroy(&device->mutex);
    sp_free(device);
}

const char *sp_device_name(const sp_device *device)
{
    (void)device;
    return "cpu";
}

sp_status sp_device_alloc(sp_device *device, size_t bytes, void **out_memory, sp_error *error)
{
    device_block *block;

    if (bytes == 0)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "bytes", -1,
                       "a device allocation of 0 bytes was asked for");
    block = sp_calloc(1, sizeof *block);
    if (!block)
        return sp_fail_memory(error, sizeof *block, "a device block's record");
    block->memory = sp_aligned_calloc(bytes, BLOCK_ALIGN_BYTES);
    if (!block->memory) {
        sp_free(block);
        return sp_fail_memory(error, bytes, "device memory on the cpu");
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
    device_block **link, *block;

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
        sp_aligned_free(block->memory);
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

sp_status sp_device_write(sp_device *device, void *device_memory, const void *host_memory,
                          size_t bytes)
{
    (void)device;
    if (bytes > 0)
        memcpy(device_memory, host_memory, bytes);
    return SP_OK;
}

sp_status sp_device_read(sp_device *device, void *host_memory, const void *device_memory,
                         size_t bytes)
{
    (void)device;
    if (bytes > 0)
        memcpy(host_memory, device_memory, bytes);
    return SP_OK;
}

sp_status sp_device_zero(sp_device *device, void *device_memory, size_t bytes)
{
    (void)device;
    if (bytes > 0)
        memset(device_memory, 0, bytes);
    return SP_OK;
}
