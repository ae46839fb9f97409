/*
 * partial.h: a delta whose sum over k is spread over several ranks.
 *
 * Part of the delta room. Where the base model's row-parallel layers give each rank a range of the
 * columns of x (o_proj, down_proj under tensor parallelism), each rank's layout holds the same
 * range of A (sp_site_slice) and all of B. A rank then has only a part of xa = x · Aᵀ. It takes
 * that part out in FP32, the host adds the parts of all ranks in rank order, and every rank that
 * needs y continues from the sum:
 *
 *     part of rank p   FP32 sum of x · A over its columns, from +0, in the order that the backend
 *                      has, and on the CPU its level, for so many columns
 *
 *     xa               T(((part 0 + part 1) + part 2) + ...): FP32 additions, then one rounding
 *
 *     delta, y         as in sp_delta_apply
 *
 * These are the bits of a row whatever else is in the step, as everywhere, for one number of ranks:
 * other cuts of the columns may give others. A sum in another order, such as an all-reduce that
 * does not fix one, does not keep the promise; gather the parts and add them.
 * On a GPU all pointers are device memory, the step began with sp_delta_upload and sp_delta_start
 * or with sp_plan_from_device, and a call only enqueues and may be captured, as in delta.h.
 * docs/SLICES.md has the whole picture.
 */
#ifndef SIDEPATH_PARTIAL_H
#define SIDEPATH_PARTIAL_H

#include <sidepath/delta.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One site. y is for sp_delta_expand_from alone. */
typedef struct sp_delta_partial {
    size_t struct_bytes;
    int32_t site;      /* of the geometry */
    float *xa;         /* [n_rows, R], row stride xa_stride elements; R = sp_layout_rank_stride */
    int64_t xa_stride; /* >= R */
    void *y;           /* [n_rows, n_out], row stride y_stride elements, accumulated in place */
    int64_t y_stride;  /* >= n_out */
    sp_dtype y_type;   /* the pool's dtype, or F32 */
} sp_delta_partial;

/* Sites that share x. */
typedef struct sp_delta_partial_call {
    size_t struct_bytes;
    const sp_plan *plan; /* NULL: the rows of the last sp_plan_from_device */
    const void *x;       /* [n_rows, k_in of the slice]; x is for sp_delta_shrink_partial alone */
    int64_t x_stride;    /* elements between rows, >= k_in */
    sp_dtype x_type;     /* the pool's dtype, or F32 (options.x_f32): rounded first */
    const sp_delta_partial *sites; /* [n_sites], each with the struct_bytes of the first */
    int32_t n_sites;
    sp_stream *stream; /* GPU: NULL is the main one. Not used on the CPU */
} sp_delta_partial_call;

/*
 * This rank's part of xa, for every row of the plan: the row's own rank of sums, then zeros up to
 * R; zeros for rows without a delta here, and everywhere for a site that the pool does not hold.
 * So parts can be added without a look at the plan. Writes nothing but xa. Does not allocate, lock
 * or log.
 * SP_ERR_STATE: what sp_plan_check says of the plan. SP_ERR_STRIDE: x_stride < k_in, xa_stride < R.
 * SP_ERR_ARGUMENT: no such site, sites whose k_in differ, an embedding or a head, something
 * missing, an x of another type, a plan of more than rows_max rows. SP_ERR_UNSUPPORTED: an FP32 x
 * without x_f32. SP_ERR_STATE, GPU: another plan than was started, or one that was
 * built anew since. SP_ERR_DEVICE.
 */
SP_API sp_status sp_delta_shrink_partial(sp_delta *delta, const sp_delta_partial_call *call,
                                         sp_error *error);

/*
 * Continues from the sum of all parts: rounds each row's own rank of xa to the pool's type, once,
 * and folds B's product into y. x is not looked at. Rows without a delta here are neither read nor
 * written. With one rank the two calls have the bits of sp_delta_apply. Fails as above;
 * SP_ERR_STRIDE: y_stride < n_out. SP_ERR_ARGUMENT: a y type that is neither the pool's nor F32.
 */
SP_API sp_status sp_delta_expand_from(sp_delta *delta, const sp_delta_partial_call *call,
                                      sp_error *error);

#ifdef __cplusplus
}
#endif
#endif
