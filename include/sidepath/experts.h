/*
 * experts.h: the deltas of a mixture-of-experts layer's experts, every (token, k) row with its own
 * adapter and expert:
 *
 *     y[row] += scale * (x · A[slot, expert]ᵀ) · B[slot, expert]ᵀ
 *
 * Part of the delta room. The router is no matter of this header: it is a site of sp_delta_apply
 * like any other, in one call with the sites that share its x (the shared expert's gate and up, and
 * its gate), and takes an FP32 y.
 *
 * Rounding points, types and streams are those of delta.h, and so is the promise: the bits of a row
 * are those of its own x, y, adapter and expert, whatever the form (sorted or gather), the order of
 * the rows, the window, the number of rows that the expert got and the other adapters. Experts
 * without rows, and those that a row's adapter does not adapt, cost nothing; their y is neither
 * read nor written.
 *
 * A layer runs:
 *
 *     router GEMM (FP32 logits), sp_delta_apply at the router, top-k
 *     sp_delta_experts_begin   which rows there are: once for a layer
 *     gate and up GEMMs, sp_delta_experts_apply (x by token, outputs gate and up), SiLU·mul
 *     down GEMM, sp_delta_experts_apply (x by row, output down), weighted sum
 *
 * Factors live in the pool's expert memory (sp_pool_options.expert_bytes), sparse: an adapter takes
 * room for the experts that it adapts. Scratch is bounded by sp_delta_options.expert_rows_max: more
 * rows run in windows. On a GPU all arrays are device memory, calls only enqueue, none waits for
 * the device, and all may be captured.
 *
 * Stability: experimental.
 */
#ifndef SIDEPATH_EXPERTS_H
#define SIDEPATH_EXPERTS_H

#include <sidepath/delta.h>
#include <sidepath/moe_rows.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Scratch bytes that sp_delta_create will take on the host over a pool of this layout and so many
 * slots with a budget for experts, beside sp_delta_workspace_bytes. 0 where the layout takes no
 * experts, and for counts out of range. */
SP_API size_t sp_delta_experts_workspace_bytes(const sp_layout *layout, int32_t slots,
                                               int32_t expert_rows_max, bool x_f32);

/* The same on the pool's device, where that is a GPU, beside sp_delta_device_bytes: the lists of
 * grouped rows. 0 for a pool in host memory or without a budget for experts, and for counts out of
 * range. */
SP_API size_t sp_delta_experts_device_bytes(const sp_pool *pool, int32_t rows_max,
                                            int32_t expert_rows_max, bool x_f32);

/*
 * Says which rows the applies that follow are about, until the next begin. Checks the rows (on the
 * CPU) and groups them by (expert, slot). plan: of the step's tokens, rows->n_tokens of them; NULL:
 * the rows of the last sp_plan_from_device. plan and the arrays of `rows` are borrowed until the
 * last apply and must not change. Writes no y. Does not allocate, lock or log.
 * SP_ERR_STATE: what sp_plan_check says of the plan. SP_ERR_ARGUMENT: counts out of range or other
 * than the plan's or the geometry's, more than 2^30 pairs, both forms or none. SP_ERR_INPUT with
 * `bad-expert-rows`, CPU: prefix sums that sp_moe_prefix_check refuses, or a row that is no pair;
 * on a GPU such rows have no work. SP_ERR_UNSUPPORTED with `engine-unsupported`: a GPU whose
 * library has no kernels for experts.
 */
SP_API sp_status sp_delta_experts_begin(sp_delta *delta, const sp_plan *plan,
                                        const sp_moe_rows *rows, sp_stream *stream,
                                        sp_error *error);

/* Which row of x a row reads. */
typedef enum sp_expert_x {
    SP_EXPERT_X_TOKEN = 0, /* x [n_tokens, k_in]: that of its token (gate, up) */
    SP_EXPERT_X_ROW = 1    /* x [n_rows, k_in]: its own, in the form's order (down) */
} sp_expert_x;

typedef struct sp_delta_experts_call {
    size_t struct_bytes;
    const void *x;
    int64_t x_stride; /* elements between rows, >= k_in */
    sp_dtype x_type;  /* the pool's dtype, or F32 (sp_delta_options.x_f32) */
    sp_expert_x x_rows;
    /* [n_outputs] modules of one layer that share x, each with the struct_bytes of the first. site:
     * the geometry's number of the module in that layer, of any of its experts; y: [n_rows, n_out]
     * in the form's order (gather: n_tokens * top_k rows), accumulated in place. */
    const sp_delta_output *outputs;
    int32_t n_outputs; /* up to SP_DELTA_GROUP_MAX */
    sp_stream *stream; /* GPU: NULL is the main one. Not used on the CPU */
    /* GPU: deltas by themselves. [n_outputs] arrays of a float for each row; NULL: deltas are added
     * to y. Where a row has a delta its y, of the pool's dtype, becomes that, before the scale, and
     * its float the scale; the other rows' floats become 0 and their y is not written. One fused
     * step y + scale * delta in FP32, rounded once, has the bits of a call without this, so a host
     * folds deltas in the kernel that reads the base's product, and needs no product before. */
    float *const *scales;
} sp_delta_experts_call;

/*
 * Applies the deltas of the modules to the rows of the last begin. Modules that no adapter in the
 * pool has cost nothing. Does not allocate, lock or log.
 * SP_ERR_STATE: no rows were begun, or their plan was built anew since or is refused by
 * sp_plan_check. SP_ERR_STRIDE: x_stride < k_in or y_stride < n_out. SP_ERR_ARGUMENT: a site that
 * is no expert's, outputs of two layers or of different k_in, something missing, types and counts
 * out of range; with scales a y_type other than the pool's. SP_ERR_UNSUPPORTED: an FP32 x without
 * x_f32; with `engine-unsupported`, scales on the CPU. SP_ERR_DEVICE.
 */
SP_API sp_status sp_delta_experts_apply(sp_delta *delta, const sp_delta_experts_call *call,
                                        sp_error *error);

#ifdef __cplusplus
}
#endif
#endif
