/*
 * delta_cuda.h: the GPU's half of an sp_delta: plan and split-K partials at fixed addresses on the
 * device, and the launches. Callers have checked all arguments; none may be NULL but those named
 * here. `stream` NULL is the device's main one. Nothing here blocks but create, destroy and an
 * upload that finds SP_CUDA_UPLOADS plans in flight. All calls are the engine thread's.
 */
#ifndef SP_DELTA_DELTA_CUDA_H
#define SP_DELTA_DELTA_CUDA_H

#include "kernels/cuda/kernels_cuda.h"

#include <sidepath/delta_pieces.h>
#include <sidepath/experts.h>

#include <assert.h>

#define SP_CUDA_UPLOADS 4 /* plans that may be in flight before another one waits */

/* Plan (seq_slot_in and row_scale_in included), partials and the delta's other device memory,
 * carved out of one block. */
typedef struct sp_cuda_scratch {
    sp_cuda_plan plan;
    float *partials;
    void *rounded; /* rows of an FP32 x, rounded to the factors' type; NULL: x is never FP32 */
    size_t bytes;
} sp_cuda_scratch;

typedef struct sp_cuda_scratch_sizes {
    int32_t rows_max, n_slots;
    size_t partials_bytes, rounded_bytes;
} sp_cuda_scratch_sizes;

/* Carves `block` up; with NULL only .bytes of the result is valid. */
sp_cuda_scratch sp_cuda_scratch_cut(char *block, const sp_cuda_scratch_sizes *sizes);

typedef struct sp_delta_gpu sp_delta_gpu;

/* Device bytes that create allocates. */
size_t sp_delta_gpu_bytes(const sp_pool *pool, int32_t rows_max, bool x_f32);

/*
 * SP_ERR_UNSUPPORTED with `engine-unsupported` names what the kernels do not support: f32, ranks
 * above SP_CUDA_RANK_MAX, more rows than SP_CUDA_ROWS_MAX.
 */
sp_status sp_delta_gpu_create(sp_pool *pool, int32_t rows_max, bool x_f32, sp_delta_gpu **out_gpu,
                              sp_error *error);
void sp_delta_gpu_destroy(sp_delta_gpu *gpu); /* NULL is allowed */

/* ---- a step -------------------------------------------------------------------------------- */

/* Copies the plan's rows through pinned memory to seq_slot_in and row_scale_in. Enqueues; blocks
 * only while SP_CUDA_UPLOADS uploads are in flight. Not inside a capture. */
sp_status sp_delta_gpu_upload(sp_delta_gpu *gpu, const sp_plan_view *view, sp_stream *stream,
                              sp_error *error);
/* Enqueues the kernel that makes tiles of the uploaded rows. May be captured. */
sp_status sp_delta_gpu_start(sp_delta_gpu *gpu, const sp_plan_view *view, sp_stream *stream,
                             sp_error *error);
/* Enqueues the check of rows in device memory, which replace an upload, and the kernel that makes
 * tiles of them. The arrays of `rows` are read when the stream gets there. May be captured. */
sp_status sp_delta_gpu_rows_from_device(sp_delta_gpu *gpu, const sp_device_rows *rows,
                                        sp_stream *stream, sp_error *error);
/* The last report that has reached the host; the host orders it after its step. */
void sp_delta_gpu_report(const sp_delta_gpu *gpu, sp_row_report *out_report);

/* Rows of the plan that was enqueued last; -1: none. */
int32_t sp_delta_gpu_rows_started(const sp_delta_gpu *gpu);
/* Whether its rows came from device memory. */
bool sp_delta_gpu_has_device_rows(const sp_delta_gpu *gpu);

/* SP_ERR_STATE: start was not called for this build of this plan, or, where view is NULL, for rows
 * chosen on the device. */
sp_status sp_delta_gpu_check_step(const sp_delta_gpu *gpu, const sp_plan_view *view,
                                  sp_error *error);

/* ---- groups -------------------------------------------------------------------------------- */

/* Sites that share x and are in the pool, at most SP_CUDA_SITES_MAX, by their layout index. */
typedef struct sp_delta_gpu_call {
    int32_t n_rows, k_in;
    const void *x; /* read by an expand for routers alone */
    int64_t x_stride;
    sp_dtype x_type;
    sp_stream *stream;
    int32_t n;
    int32_t sites[SP_CUDA_SITES_MAX];
    sp_delta_output outputs[SP_CUDA_SITES_MAX];
} sp_delta_gpu_call;

/* A call that has no sites yet. */
sp_delta_gpu_call sp_delta_gpu_call_of(int32_t n_rows, int32_t k_in, const sp_delta_call *call);
/* Adds a site by its layout index, with its output; there must be room for it. */
void sp_delta_gpu_call_add(sp_delta_gpu_call *call, int32_t site, const sp_delta_output *output);

/* xa of the call's sites into the partials; expand folds them into the outputs; apply does both.
 * All enqueue and may be captured. The step must have been started. */
sp_status sp_delta_gpu_shrink(sp_delta_gpu *gpu, const sp_delta_gpu_call *call, sp_error *error);
sp_status sp_delta_gpu_expand(sp_delta_gpu *gpu, const sp_delta_gpu_call *call, sp_error *error);
sp_status sp_delta_gpu_apply(sp_delta_gpu *gpu, const sp_delta_gpu_call *call, sp_error *error);

/* An apply with the product inside, as sp_delta_apply_around. */
sp_status sp_delta_gpu_around(sp_delta_gpu *gpu, const sp_delta_gpu_call *call,
                              sp_delta_product_fn product, void *user, sp_error *error);

/*
 * Shrink and expand with xa in the caller's device memory between them: the shrink writes its sums
 * to parts, and the expand starts from them; parts are those of the call's sites. clear_part zeroes
 * the first of parts, for a site that is not in the pool.
 */
sp_status sp_delta_gpu_shrink_parts(sp_delta_gpu *gpu, const sp_delta_gpu_call *call,
                                    const sp_cuda_parts *parts, sp_error *error);
sp_status sp_delta_gpu_expand_parts(sp_delta_gpu *gpu, const sp_delta_gpu_call *call,
                                    const sp_cuda_parts *parts, sp_error *error);
sp_status sp_delta_gpu_clear_part(sp_delta_gpu *gpu, int32_t n_rows, const sp_cuda_parts *parts,
                                  sp_stream *stream, sp_error *error);

/* ---- experts ------------------------------------------------------------------------------- */

/* Memory for windows of so many rows; none where the pool has no experts. _bytes: of the device. */
size_t sp_delta_gpu_experts_bytes(const sp_pool *pool, int32_t tokens_max, int32_t rows_max,
                                  bool x_f32);
sp_status sp_delta_gpu_experts_create(sp_delta_gpu *gpu, int32_t rows_max, bool x_f32,
                                      sp_error *error);

/* Groups the rows; their arrays are device memory. Enqueues; may be captured. */
sp_status sp_delta_gpu_experts_begin(sp_delta_gpu *gpu, const sp_moe_rows *rows, sp_stream *stream,
                                     sp_error *error);

/* Modules that share x; a NULL in `experts` has no delta. */
typedef struct sp_delta_gpu_experts {
    sp_delta_experts_call call;
    int32_t k_in, n;
    const sp_pool_experts *experts[SP_CUDA_SITES_MAX];
    sp_delta_output outputs[SP_CUDA_SITES_MAX];
    int32_t n_out[SP_CUDA_SITES_MAX];
} sp_delta_gpu_experts;

/* To the rows of the last begin. Enqueues; may be captured. */
sp_status sp_delta_gpu_experts_apply(sp_delta_gpu *gpu, const sp_delta_gpu_experts *call,
                                     sp_error *error);

/* ---- tokens -------------------------------------------------------------------------------- */

/* A site that is a table of tokens. */
typedef struct sp_token_table {
    int32_t site;  /* in the geometry, -1: it has none */
    int32_t index; /* in the layout, -1: the pool has no pairs there */
    int32_t vocab, hidden;
} sp_token_table;

/* The replaced rows of the pool's overlays, and the pairs of embed_tokens. Dimensions and strides
 * have been checked; tokens, y, x and logits are device memory. */
sp_status sp_delta_gpu_embed(sp_delta_gpu *gpu, int32_t n_rows, const sp_token_table *table,
                             const sp_delta_embed_call *call, sp_error *error);

/* The replaced logits. An FP32 x is rounded first, and *io_call then refers to the rounded one. */
sp_status sp_delta_gpu_head(sp_delta_gpu *gpu, int32_t n_rows, const sp_token_table *table,
                            sp_delta_head_call *io_call, sp_error *error);

#endif
