/*
 * forward.h: one step of the dense Qwen3 forward pass over the rows of a batch. Owns the
 * activation buffers, which are allocated once for step_rows rows; a step allocates nothing.
 *
 * Every phase treats each row by itself, or splits work in a way that changes no bit, so a row's
 * hidden state depends on its own sequence, adapter and position alone.
 *
 * With precision BF16 (T below) the residual and every site's output are bf16; norms, RoPE,
 * softmax and SiLU are FP32 inside with one rounding at the end; logits are FP32. With F32 nothing
 * is rounded but to FP32; weights stay bf16 as stored.
 */
#ifndef SP_ENGINE_MODEL_FORWARD_H
#define SP_ENGINE_MODEL_FORWARD_H

#include "engine/model/model.h"
#include "engine/ops/kv_cache.h"
#include "engine/ops/rope.h"
#include "engine/schedule/scheduler.h"
#include "kernels/cpu/kernels.h"

#include <sidepath/delta.h>

#include <stdatomic.h>

/* Rows whose logits are computed at a time: bounds the logits buffer. */
#define SP_LOGIT_ROWS 32

/* A run of at most SP_ATTENTION_ROWS consecutive rows of one sequence: the unit of attention. */
#define SP_ATTENTION_ROWS 32
typedef struct sp_attention_item {
    int32_t row, n_rows, first_position;
    const int32_t *pages;
} sp_attention_item;

typedef struct sp_forward {
    /* borrowed for its whole life */
    const sp_model *model;
    const sp_kernels *kernels;
    sp_exec *exec;
    sp_kv_cache *cache;
    const sp_rope *rope;
    sp_delta *delta; /* NULL: the base alone */

    int32_t slots;
    sp_plan *head_plan; /* of the rows whose logits are under way; NULL without delta */
    sp_dtype type;      /* T */
    int32_t rows_max;
    /* activations of T, row-major without padding; R = rows_max */
    void *residual;    /* [R, H] */
    void *hidden;      /* [R, H] normed input of the next projections */
    void *q, *k, *v;   /* [R, Q] [R, K] [R, K] */
    void *attended;    /* [R, Q] */
    void *gate, *up;   /* [R, I] */
    void *site_output; /* [R, H] output of o_proj and down_proj before the residual */
    void *packed;      /* x of the GEMM under way, packed */
    float *logits;     /* [SP_LOGIT_ROWS, vocab] */
    float *attention_scratch;
    size_t attention_scratch_floats; /* per thread */
    size_t scratch_bytes;
    double delta_seconds;   /* sum over the deltas that ran apart from the base's GEMMs */
    int32_t *waiting;       /* [sp_project_pieces_max] of linear_group.c, as is the next */
    atomic_int *strip_done; /* pieces of each strip of columns that have been computed */

    /* of the step under way */
    const sp_plan *plan;
    int32_t n_rows;
    int32_t *row_position;    /* [R] */
    int32_t *row_token;       /* [R] */
    int32_t *row_entry;       /* [R] index of the batch entry */
    sp_attention_item *items; /* [R] */
    int32_t n_items;
} sp_forward;

typedef struct sp_forward_options {
    const sp_model *model;
    const sp_kernels *kernels;
    sp_exec *exec;
    sp_kv_cache *cache;
    const sp_rope *rope;
    sp_delta *delta;
    int32_t slots; /* of the delta's pool */
    sp_dtype type;
    int32_t rows_max;
} sp_forward_options;

/* Bytes of the activations that sp_forward_create allocates; cache and delta may be NULL yet. */
size_t sp_forward_scratch_bytes(const sp_forward_options *options);

sp_status sp_forward_create(const sp_forward_options *options, sp_forward *out_forward,
                            sp_error *error);
void sp_forward_destroy(sp_forward *forward);

/*
 * Computes all rows of the batch: writes their K and V into the cache and leaves their final
 * hidden states (after the last norm) in forward->hidden, row by row in batch order. `plan` routes
 * the same rows. SP_ERR_*: what sp_delta_apply returns, which a checked plan rules out.
 */
sp_status sp_forward_run(sp_forward *forward, const sp_batch *batch, const sp_plan *plan);

/* Logits of `n_rows` (at most SP_LOGIT_ROWS) rows of the last run, named by their row numbers:
 * forward->logits [n_rows, vocab]. Fails like sp_forward_run. */
sp_status sp_forward_logits(sp_forward *forward, const int32_t *rows, int32_t n_rows);

#endif
