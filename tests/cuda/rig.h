/*
 * rig.h: one site of random weights on the GPU and the three launches of a step over it, for the
 * tests and the bench. The host keeps what it wrote, to compute the same in double.
 */
#ifndef SP_TESTS_CUDA_RIG_H
#define SP_TESTS_CUDA_RIG_H

#include "base/half.h"
#include "device/device_cuda.h"
#include "kernels/cuda/cuda_choose.h"
#include "kernels/cuda/kernels_cuda.h"

#include <sidepath/route.h>

#include <stdlib.h>
#include <string.h>

typedef struct rig_shape {
    int32_t rows, slots, k, n, rank_stride, sites, y_f32, type; /* sites of equal n */
} rig_shape;

typedef struct rig {
    sp_device *device;
    sp_cuda_kernels kernels;
    int gpu;
    int32_t multiprocessors; /* that launches are chosen for; 0: the GPU's own */
    void *stream;
    rig_shape shape;
    sp_cuda_group group;
    uint16_t *x, *y, *a, *b; /* host copies; y as it was before the step, bf16 or f16 */
    float *row_scale, *scales;
    int32_t *seq_slot, *ranks;
    void *blocks[40];
    int n_blocks;
    int failed; /* any call */
} rig;

static inline uint32_t rig_hash(uint32_t v)
{
    v = (v ^ 61u) ^ (v >> 16);
    v *= 9u;
    v ^= v >> 4;
    v *= 0x27d4eb2du;
    return v ^ (v >> 15);
}

static inline uint16_t rig_number(const rig *r, uint32_t seed, float size)
{
    float f = ((float)(rig_hash(seed) & 0xffffu) / 32768.0f - 1.0f + 1.0f / 65536.0f) * size;

    return r->shape.type == SP_DTYPE_F16 ? sp_f32_to_f16(f) : sp_f32_to_bf16(f);
}

static inline double rig_value(const rig *r, uint16_t bits)
{
    return (double)(r->shape.type == SP_DTYPE_F16 ? sp_f16_to_f32(bits) : sp_bf16_to_f32(bits));
}

static inline void *rig_put(rig *r, const void *data, size_t bytes)
{
    void *memory = NULL;

    r->failed |= sp_device_alloc(r->device, bytes ? bytes : 1, &memory, NULL) != SP_OK;
    if (r->failed)
        return NULL;
    if (data)
        r->failed |= sp_device_write(r->device, memory, data, bytes, NULL) != SP_OK;
    r->blocks[r->n_blocks++] = memory;
    return memory;
}

static inline void rig_plan(rig *r)
{
    size_t rows = (size_t)r->shape.rows * 4 + 4, slots = (size_t)r->shape.slots * 4 + 8;
    sp_cuda_plan *p = &r->group.plan;

    p->seq_slot_in = rig_put(r, r->seq_slot, rows - 4);
    p->row_scale_in = rig_put(r, r->row_scale, rows - 4);
    p->head = rig_put(r, NULL, sizeof *p->head);
    p->seq_slot = rig_put(r, NULL, rows);
    p->row_order = rig_put(r, NULL, rows);
    p->row_scale = rig_put(r, NULL, rows);
    p->segment_begin = rig_put(r, NULL, slots);
    p->segment_slot = rig_put(r, NULL, slots);
    p->tile_begin = rig_put(r, NULL, rows);
    p->tile_rows = rig_put(r, NULL, rows);
    p->tile_slot = rig_put(r, NULL, rows);
    p->tiles = rig_put(r, NULL, (size_t)r->shape.rows * sizeof(sp_cuda_tile));
}

/* Weights of slot s depend on s and position only, so any pool rank and batch has the same. */
static inline void rig_weights(rig *r)
{
    const rig_shape *s = &r->shape;
    size_t rs = (size_t)s->rank_stride, k = (size_t)s->k, n = (size_t)s->n;

    r->a = calloc((size_t)s->slots * rs * k, 2);
    r->b = calloc((size_t)s->slots * rs * n, 2);
    for (size_t slot = 0; slot < (size_t)s->slots; slot++)
        for (size_t c = 0; c < (size_t)r->ranks[slot]; c++) {
            uint32_t seed = (uint32_t)(slot * 7919u + c * 104729u);

            for (size_t i = 0; i < k; i++)
                r->a[(slot * rs + c) * k + i] = rig_number(r, seed + (uint32_t)i * 31u, 0.05f);
            for (size_t j = 0; j < n; j++)
                r->b[(slot * n + j) * rs + c] = rig_number(r, ~seed - (uint32_t)j * 37u, 0.2f);
        }
}

static inline void rig_sites(rig *r)
{
    const rig_shape *s = &r->shape;
    size_t rs = (size_t)s->rank_stride, slots = (size_t)s->slots;
    void *a = rig_put(r, r->a, slots * rs * (size_t)s->k * 2);
    void *b = rig_put(r, r->b, slots * rs * (size_t)s->n * 2);
    int32_t *rank = rig_put(r, r->ranks, slots * 4);
    float *scale = rig_put(r, r->scales, slots * 4);

    for (int i = 0; i < s->sites; i++)
        r->group.sites[i] = (sp_cuda_site){
            .a = a,
            .b = b,
            .a_slot_stride = (int64_t)s->rank_stride * s->k,
            .b_slot_stride = (int64_t)s->rank_stride * s->n,
            .a_stride = s->k,
            .b_stride = s->rank_stride,
            .rank = rank,
            .scale = scale,
            .y = rig_put(r, r->y, (size_t)s->rows * (size_t)s->n * 2),
            .y_stride = s->n,
            .n_out = s->n,
        };
}

/* seq_slot, ranks (by slot) and x_seed (by row, NULL: the row's number) are copied. */
static inline void rig_make(rig *r, const rig_shape *shape, const int32_t *seq_slot,
                            const int32_t *ranks, const uint32_t *x_seed)
{
    size_t rows = (size_t)shape->rows, slots = (size_t)shape->slots;

    r->shape = *shape;
    r->n_blocks = 0;
    r->seq_slot = calloc(rows, 4);
    r->row_scale = calloc(rows, 4);
    r->ranks = calloc(slots, 4);
    r->scales = calloc(slots, 4);
    memcpy(r->seq_slot, seq_slot, rows * 4);
    memcpy(r->ranks, ranks, slots * 4);
    for (size_t s = 0; s < slots; s++)
        r->scales[s] = s % 16 == 15 ? 0.0f : 0.5f + 0.25f * (float)(s % 5);
    r->x = calloc(rows * (size_t)shape->k, 2);
    r->y = calloc(rows * (size_t)shape->n, 2);
    for (size_t i = 0; i < rows; i++) {
        uint32_t seed = (x_seed ? x_seed[i] : (uint32_t)i) * 65537u + 99u;

        r->row_scale[i] = 1.0f + 0.5f * (float)(seed % 3u);
        for (size_t k = 0; k < (size_t)shape->k; k++)
            r->x[i * (size_t)shape->k + k] = rig_number(r, seed + (uint32_t)k * 13u, 1.0f);
        for (size_t j = 0; j < (size_t)shape->n; j++)
            r->y[i * (size_t)shape->n + j] = rig_number(r, seed - (uint32_t)j * 17u, 1.0f);
    }
    rig_weights(r);
    r->group = (sp_cuda_group){.type = shape->type,
                               .n_rows = shape->rows,
                               .n_slots = shape->slots,
                               .n_sites = shape->sites,
                               .k_in = shape->k,
                               .rank_stride = shape->rank_stride,
                               .multiprocessors = r->multiprocessors
                                                      ? r->multiprocessors
                                                      : sp_device_cuda_multiprocessors(r->device),
                               .x_stride = shape->k};
    rig_plan(r);
    rig_sites(r);
    r->group.x = rig_put(r, r->x, rows * (size_t)shape->k * 2);
    r->group.partials =
        rig_put(r, NULL,
                sp_cuda_partials_bytes(r->group.multiprocessors, shape->rows, shape->slots,
                                       shape->k, shape->rank_stride, shape->sites));
}

static inline void rig_free(rig *r)
{
    while (r->n_blocks > 0)
        sp_device_free(r->device, r->blocks[--r->n_blocks]);
    free(r->x), free(r->y), free(r->a), free(r->b);
    free(r->row_scale), free(r->scales), free(r->seq_slot), free(r->ranks);
}

static inline void rig_enqueue(rig *r)
{
    r->group.after_plan = 1;
    r->failed |=
        r->kernels.plan_rows(r->gpu, &r->group.plan, r->shape.rows, r->shape.slots, r->stream);
    r->failed |= r->kernels.shrink(r->gpu, &r->group, r->stream);
    r->failed |= r->kernels.expand(r->gpu, &r->group, r->stream);
}

/* On this device, borrowed. */
static inline sp_status rig_start(rig *r, sp_device *device, sp_error *error)
{
    r->device = device;
    r->gpu = sp_device_cuda_index(device);
    r->stream = sp_stream_native(sp_device_main_stream(device));
    return sp_kernels_cuda_get(device, &r->kernels, error);
}

#endif
