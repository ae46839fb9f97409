/*
 * delta_cuda.h: the GPU's half of an sp_delta: plan and planes at fixed addresses on the device,
 * and the launches. delta.c has checked what comes here.
 */
#ifndef SP_DELTA_DELTA_CUDA_H
#define SP_DELTA_DELTA_CUDA_H

#include "kernels/kernels_cuda.h"

#include <sidepath/delta.h>

#define SP_CUDA_UPLOADS 4 /* plans that may be on their way before a further one waits */

/* Plan, seq_slot_in and row_scale_in included, and planes, cut out of one block of the device. */
typedef struct sp_cuda_scratch {
    sp_cuda_plan plan;
    float *planes;
    size_t bytes;
} sp_cuda_scratch;

/* Cuts `block`; with NULL only .bytes means anything. */
sp_cuda_scratch sp_cuda_scratch_cut(char *block, int32_t rows_max, int32_t n_slots,
                                    size_t planes_bytes);

typedef struct sp_delta_gpu sp_delta_gpu;

/* Device bytes that create takes. */
size_t sp_delta_gpu_bytes(const sp_pool *pool, int32_t rows_max);

/*
 * SP_ERR_UNSUPPORTED with `engine-unsupported`: what the kernels do not know, by name: f32, ranks
 * above SP_CUDA_RANK_MAX, more rows than SP_CUDA_ROWS_MAX.
 */
sp_status sp_delta_gpu_create(sp_pool *pool, int32_t rows_max, sp_delta_gpu **out_gpu,
                              sp_error *error);
void sp_delta_gpu_destroy(sp_delta_gpu *gpu); /* NULL is allowed */

sp_status sp_delta_gpu_upload(sp_delta_gpu *gpu, const sp_plan_view *view);
sp_status sp_delta_gpu_start(sp_delta_gpu *gpu, int32_t n_rows);

/* Sites of one layer that the pool holds, at most SP_CUDA_SITES_MAX, with a site's number each. */
typedef struct sp_delta_gpu_call {
    int32_t n_rows, k_in;
    const void *x; /* NULL for an expand */
    int64_t x_stride;
    int32_t n;
    int32_t sites[SP_CUDA_SITES_MAX];
    const sp_delta_output *outputs[SP_CUDA_SITES_MAX];
} sp_delta_gpu_call;

/* SP_ERR_STATE: start was not called for this many rows. stream NULL: the main one. */
sp_status sp_delta_gpu_shrink(sp_delta_gpu *gpu, const sp_delta_gpu_call *call, sp_stream *stream);
sp_status sp_delta_gpu_expand(sp_delta_gpu *gpu, const sp_delta_gpu_call *call, sp_stream *stream);
sp_status sp_delta_gpu_apply(sp_delta_gpu *gpu, const sp_delta_gpu_call *call);

/* The replaced rows of the pool's overlays, and the pairs of embed_tokens. Dimensions and strides
 * have been checked; tokens, y, x and logits are device memory. */
sp_status sp_delta_gpu_embed(sp_delta_gpu *gpu, int32_t n_rows, const int32_t *tokens,
                             int32_t vocab, int32_t hidden, void *y, int64_t y_stride);
sp_status sp_delta_gpu_head(sp_delta_gpu *gpu, int32_t n_rows, const void *x, int64_t x_stride,
                            int32_t vocab, int32_t hidden, float *logits, int64_t logits_stride);

#endif
