/*
 * moe_rig.h: rows of a mixture-of-experts layer on the GPU, for its tests and its bench: random
 * numbers, device memory that is freed together, and the room for items.
 */
#ifndef SP_TESTS_CUDA_MOE_RIG_H
#define SP_TESTS_CUDA_MOE_RIG_H

#include "base/half.h"
#include "device/device_cuda.h"
#include "kernels/cuda/cuda_choose.h"
#include "kernels/cuda/ops_cuda.h"

#include <stdlib.h>
#include <string.h>

#define MOE_BLOCKS_MAX 4096

typedef struct moe_rig {
    sp_device *device;
    int gpu;
    void *stream; /* native, the main one */
    sp_cuda_kernels kernels;
    sp_cuda_ops_kernels ops;
    void *blocks[MOE_BLOCKS_MAX];
    int n_blocks;
    int failed; /* any call */
} moe_rig;

static inline sp_status moe_start(moe_rig *r, sp_device *device, sp_error *error)
{
    sp_status status;

    r->device = device;
    r->gpu = sp_device_cuda_index(device);
    r->stream = sp_stream_native(sp_device_main_stream(device));
    status = sp_kernels_cuda_get(device, &r->kernels, error);
    return status == SP_OK ? sp_ops_cuda_get(device, &r->ops, error) : status;
}

static inline uint32_t moe_hash(uint32_t v)
{
    v = (v ^ 61u) ^ (v >> 16);
    v *= 9u;
    v ^= v >> 4;
    v *= 0x27d4eb2du;
    return v ^ (v >> 15);
}

/* About -size .. size, never 0; or an integer of -4 .. 4. */
static inline float moe_number(uint32_t seed, float size)
{
    uint32_t h = moe_hash(seed);

    return size == 0.0f ? (float)(int)(h % 9u) - 4.0f
                        : ((float)(h & 0xffffu) / 32768.0f - 1.0f + 1.0f / 65536.0f) * size;
}

static inline uint16_t moe_half(sp_dtype type, float value)
{
    return type == SP_DTYPE_F16 ? sp_f32_to_f16(value) : sp_f32_to_bf16(value);
}

static inline double moe_value(sp_dtype type, uint16_t bits)
{
    return (double)(type == SP_DTYPE_F16 ? sp_f16_to_f32(bits) : sp_bf16_to_f32(bits));
}

/* Of n elements; to be freed. */
static inline uint16_t *moe_numbers(sp_dtype type, size_t n, uint32_t seed, float size)
{
    uint16_t *out = malloc(n * sizeof *out + 1);

    if (out == NULL)
        abort();
    for (size_t i = 0; i < n; i++)
        out[i] = moe_half(type, moe_number(seed * 7919u + (uint32_t)i, size));
    return out;
}

/* Device memory with this content, or with `data` NULL zeros, until moe_free. */
static inline void *moe_put(moe_rig *r, const void *data, size_t bytes)
{
    void *memory = NULL;

    if (r->n_blocks == MOE_BLOCKS_MAX)
        abort();
    r->failed |= sp_device_alloc(r->device, bytes + 1, &memory, NULL) != SP_OK;
    if (r->failed)
        return NULL;
    r->blocks[r->n_blocks++] = memory;
    if (data != NULL)
        r->failed |= sp_device_write(r->device, memory, data, bytes, NULL) != SP_OK;
    else
        r->failed |= sp_device_zero(r->device, memory, bytes, NULL) != SP_OK;
    return memory;
}

static inline void moe_write(moe_rig *r, const void *at, const void *data, size_t bytes)
{
    r->failed |= sp_device_write(r->device, (void *)(uintptr_t)at, data, bytes, NULL) != SP_OK;
}

/* What is there after all launches; to be freed. */
static inline void *moe_get(moe_rig *r, const void *at, size_t bytes)
{
    void *out = malloc(bytes + 1);

    if (out == NULL)
        abort();
    r->failed |= sp_device_read(r->device, out, at, bytes, NULL) != SP_OK;
    return out;
}

/* Frees what was put since there were `keep` blocks. */
static inline void moe_free(moe_rig *r, int keep)
{
    while (r->n_blocks > keep)
        sp_device_free(r->device, r->blocks[--r->n_blocks]);
}

/* Room for the items of up to n_rows rows. */
static inline sp_cuda_items moe_items(moe_rig *r, int32_t n_rows, int32_t n_experts,
                                      int32_t n_slots, int32_t item_rows)
{
    int32_t bound = sp_cuda_items_bound(n_rows, n_experts, n_slots, item_rows);
    size_t rows = (size_t)bound * (size_t)item_rows * 4;

    return (sp_cuda_items){.counts = moe_put(r, NULL, 16),
                           .item = moe_put(r, NULL, (size_t)bound * sizeof(sp_cuda_item)),
                           .row = moe_put(r, NULL, rows),
                           .token = moe_put(r, NULL, rows),
                           .scale = moe_put(r, NULL, rows),
                           .item_rows = item_rows,
                           .bound = bound};
}

#endif
