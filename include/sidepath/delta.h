/*
 * delta.h: y += scale * (x · Aᵀ) · Bᵀ, every row with its own adapter.
 *
 * This room owns: applying a plan at a group of sites that share x, its scratch, and the
 * single-adapter form. It must not know: models, files, requests.
 *
 * Rounding points, everywhere the same (T is the pool's type, bf16 in serving):
 *     xa    = T(Σ x·A)          FP32 accumulation from +0, the backend's fixed order
 *     delta = T(Σ xa·B)
 *     y     = Ty(fmaf(scale, (float)delta, (float)y))
 * An FP32 y takes the fma without the last rounding; with T = F32 nothing is rounded before it.
 * Rows with slot -1, rank 0 or an effective scale of 0 are neither read nor written.
 *
 * Every call that takes a plan refuses, with SP_ERR_STATE and nothing written, one that was built
 * over another pool than the delta's, and one whose versions were released or replaced since it was
 * built (sp_plan_check).
 *
 * Stability: stable.
 */
#ifndef SIDEPATH_DELTA_H
#define SIDEPATH_DELTA_H

#include <sidepath/route.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sp_delta sp_delta;

typedef struct sp_delta_options {
    size_t struct_bytes;
    sp_pool *pool;              /* borrowed until sp_delta_destroy */
    sp_exec *exec;              /* borrowed until sp_delta_destroy; NULL is allowed where the pool's
                                   device is a GPU */
    int32_t rows_max;           /* the largest plan */
    const char *cpu_isa;        /* NULL or "auto": the best level; else scalar, avx2, avx512, amx */
    bool no_apply;              /* measuring lever: every delta is skipped */
    sp_module_set skip_modules; /* measuring lever: the deltas of these are skipped */
} sp_delta_options;

SP_API void sp_delta_options_default(sp_delta_options *out_options, size_t struct_bytes);

/* Scratch bytes that sp_delta_create will take; fixed for its whole life. */
SP_API size_t sp_delta_workspace_bytes(const sp_layout *layout, int32_t rows_max);

/* The same on the pool's device, where that is a GPU: plan and scratch, at fixed addresses. 0 for a
 * pool in host memory and for rows_max out of range. */
SP_API size_t sp_delta_device_bytes(const sp_pool *pool, int32_t rows_max);

/*
 * Runs where the pool's memory is. SP_ERR_ARGUMENT: options out of range. SP_ERR_MEMORY. On a GPU
 * SP_ERR_UNSUPPORTED with `engine-unsupported`, naming what has no kernels there: an f32 pool,
 * ranks above 512, more than 65536 rows.
 */
SP_API sp_status sp_delta_create(const sp_delta_options *options, sp_delta **out_delta,
                                 sp_error *error);
SP_API void sp_delta_destroy(sp_delta *delta);

/* One output of a group. */
typedef struct sp_delta_output {
    int32_t site;     /* in the geometry */
    void *y;          /* [n_rows, n_out], row stride y_stride elements, accumulated in place */
    int64_t y_stride; /* >= n_out */
    sp_dtype y_type;  /* the pool's dtype, or F32 */
} sp_delta_output;

/*
 * Applies the plan's deltas at sites that share x (q,k,v; gate,up; a single one).
 * x is [n_rows, k_in] of the pool's dtype with row stride x_stride elements. Sites that the pool
 * does not hold, or that no row's adapter has, cost nothing. Does not allocate, lock or log.
 * SP_ERR_STRIDE: x_stride < k_in or y_stride < n_out. SP_ERR_ARGUMENT: a y type that is neither
 * the pool's nor F32, a site that is not there or takes tokens, outputs whose k_in differ, a plan
 * larger than rows_max. Nothing is written then. On a GPU x and y are device memory and the work is
 * only enqueued, on the device's main stream, two launches for each four sites that the pool holds;
 * it may be captured. What it routes was uploaded and started before (below); SP_ERR_STATE: with
 * another number of rows.
 */
SP_API sp_status sp_delta_apply(sp_delta *delta, const sp_plan *plan, const void *x,
                                int64_t x_stride, const sp_delta_output *outputs,
                                int32_t n_outputs);

/*
 * sp_delta_apply in pieces, for a host that runs them inside parallel jobs of its own, beside its
 * base GEMM: a side path then costs no barrier, and y is folded while it is in a cache. Its bits
 * are those of sp_delta_apply.
 *
 * sp_delta_begin checks and plans like sp_delta_apply and writes nothing. Where it says `fits`, the
 * host runs sp_delta_pack for every pack piece, then, after a barrier, sp_delta_shrink for every
 * shrink piece, and sp_delta_expand once for every column of every output, when the base has
 * written that column in all rows. Pieces run on any thread and in any order; shrink pieces do not
 * wait for anything, so expands that come behind them find them done, sooner or later. Where it
 * does not fit (more rows or outputs than one round of scratch takes; a GPU), or fails, nothing is
 * begun.
 * One group is under way at a time; the next begin, or any other call, ends it. x, outputs and plan
 * are borrowed until then. These four calls and their struct are experimental, whatever the file
 * says: the struct grew before the first release, and a host is built anew with it.
 */
typedef struct sp_delta_pieces {
    bool fits;
    int32_t pack, shrink; /* how many; both 0: no row has a delta here */
    /* x as the kernels of the delta's level pack it, after the pack pieces, where one adapter has
     * all rows: a host whose base GEMM is of that level, over all these rows, need not pack x
     * again. The delta's, until the next begin. Else NULL. */
    const void *packed_x;
} sp_delta_pieces;

SP_API sp_status sp_delta_begin(sp_delta *delta, const sp_plan *plan, const void *x,
                                int64_t x_stride, const sp_delta_output *outputs, int32_t n_outputs,
                                sp_delta_pieces *out_pieces);
SP_API void sp_delta_pack(sp_delta *delta, int32_t piece);
SP_API void sp_delta_shrink(sp_delta *delta, int32_t piece);

/* The columns of a piece begin at a multiple of this. */
#define SP_DELTA_COLUMN_STEP 16

/* Columns [column_begin, column_end) of outputs[output], all rows. False: a shrink that it needs
 * has not returned, nothing was done, call again. */
SP_API bool sp_delta_expand(sp_delta *delta, int32_t output, int64_t column_begin,
                            int64_t column_end);

/*
 * A step on a GPU begins with these two; on the CPU they only check. upload sends the plan's rows
 * to the device, behind the steps that were enqueued before, and is not to be captured; start
 * enqueues the node that makes segments and tiles of what is there, and may be. So a captured graph
 * holds start and the applies; before each replay the host builds its plan and uploads it. A plan
 * of fewer rows than were captured leaves the others to the base.
 * SP_ERR_ARGUMENT: a plan larger than rows_max.
 */
SP_API sp_status sp_delta_upload(sp_delta *delta, const sp_plan *plan);
SP_API sp_status sp_delta_start(sp_delta *delta, const sp_plan *plan);

/*
 * The halves of an apply on a GPU, with the same bits, for a host that runs the shrink beside the
 * base GEMM: same plan and outputs (at most four that the pool holds, else SP_ERR_ARGUMENT)
 * in both. No other shrink of this delta may begin before the expand is done: the host orders the
 * streams with events. stream NULL: the main one. SP_ERR_UNSUPPORTED on the CPU, which has the
 * pieces above; else as sp_delta_apply.
 */
SP_API sp_status sp_delta_enqueue_shrink(sp_delta *delta, const sp_plan *plan, const void *x,
                                         int64_t x_stride, const sp_delta_output *outputs,
                                         int32_t n_outputs, sp_stream *stream);
SP_API sp_status sp_delta_enqueue_expand(sp_delta *delta, const sp_plan *plan,
                                         const sp_delta_output *outputs, int32_t n_outputs,
                                         sp_stream *stream);

/*
 * Whether sp_delta_embed (SP_SITE_EMBEDDING) or sp_delta_head (SP_SITE_HEAD) has anything
 * to do now: an adapter in some slot replaces rows of the table, or the pool holds the module's
 * pairs. A host may leave the call out otherwise.
 * On a GPU: whether it may ever have, so that a captured graph holds the call.
 */
SP_API bool sp_delta_has_tokens(const sp_delta *delta, sp_site_kind kind);

/*
 * Behind the gather of the embeddings, before any scale of theirs: rows whose token their adapter
 * replaces become the adapter's row, whatever the request's scale (but 0, which is the base); then
 * scale * B · A[:, token] is added where the adapter has a pair, with the rounding points above.
 * tokens is [n_rows] of the plan; y is [n_rows, hidden] of the pool's dtype, row stride y_stride
 * elements. Does not allocate, lock or log.
 * SP_ERR_STRIDE: y_stride < hidden. SP_ERR_ARGUMENT: a token outside the vocabulary in a routed
 * row, a plan larger than rows_max. Nothing is written then.
 * On a GPU tokens and y are device memory and the call only enqueues, behind sp_delta_start, as
 * sp_delta_apply; a token outside the vocabulary leaves its row as it is.
 */
SP_API sp_status sp_delta_embed(sp_delta *delta, const sp_plan *plan, const int32_t *tokens,
                                void *y, int64_t y_stride);

/*
 * Behind the head's GEMM, before any soft-cap: the logits of tokens that the row's adapter replaces
 * are computed again, as products with its rows in the order of the GEMM; then the delta of lm_head
 * is added. x is [n_rows, hidden] of the pool's dtype, what the head read; logits [n_rows, vocab].
 * The plan is of these rows, which need not be those of the step: sp_plan_select makes it.
 * SP_ERR_STRIDE and SP_ERR_ARGUMENT as above. Does not allocate, lock or log.
 * On a GPU what was uploaded and started must be the plan of these rows: where they are not those
 * of the step, a second sp_delta over the same pool has a second plan.
 */
SP_API sp_status sp_delta_head(sp_delta *delta, const sp_plan *plan, const void *x,
                               int64_t x_stride, float *logits, int64_t logits_stride);

/*
 * The single-adapter form on plain pointers, for hosts without a pool:
 * x [rows, k_in], a [rank, k_in] stride a_stride, b [n_out, rank] stride b_stride, all of `dtype`;
 * y [rows, n_out] of `dtype` or F32. Allocates its scratch. Bits equal the routed form's.
 */
typedef struct sp_delta_single {
    int32_t rows, k_in, n_out, rank;
    sp_dtype dtype, y_type;
    const void *x, *a, *b;
    void *y;
    int64_t x_stride, a_stride, b_stride, y_stride; /* elements */
    float scale;
} sp_delta_single;

SP_API sp_status sp_delta_apply_single(const sp_delta_single *args, sp_exec *exec,
                                       const char *cpu_isa, sp_error *error);

/*
 * The same on a GPU: kernels and scratch for calls of up to these sizes (65536 rows, 2^20 inputs,
 * rank 512 at most). *out_solo is owned by the caller; borrows the device until
 * sp_delta_solo_destroy. SP_ERR_ARGUMENT: a size out of range. SP_ERR_UNSUPPORTED: a device that is
 * no GPU. SP_ERR_MEMORY, SP_ERR_DEVICE.
 */
typedef struct sp_delta_solo sp_delta_solo;

SP_API sp_status sp_delta_solo_create(sp_device *device, int32_t rows_max, int32_t k_in_max,
                                      int32_t rank_max, sp_delta_solo **out_solo, sp_error *error);
SP_API void sp_delta_solo_destroy(sp_delta_solo *solo); /* NULL is allowed */

/*
 * All pointers of args are the device's. Only enqueues, on the stream (NULL: the main one); may be
 * captured. Calls of one solo share its scratch: run them on one stream. Refuses what
 * sp_delta_apply_single does; SP_ERR_ARGUMENT: more than was prepared for; SP_ERR_UNSUPPORTED: f32.
 */
SP_API sp_status sp_delta_solo_apply(sp_delta_solo *solo, const sp_delta_single *args,
                                     sp_stream *stream, sp_error *error);

#ifdef __cplusplus
}
#endif
#endif
