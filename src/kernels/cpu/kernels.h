/*
 * kernels: numbers only. Pointers and strides in, numbers out. This room owns the arithmetic of
 * every backend level and its order of summation. It must not know adapters or models.
 *
 * kernels.h: the table of functions. It is filled with the scalar reference first and then
 * overwritten by each higher level that the machine has (avx2, avx512, amx), so an entry that a
 * level does not improve keeps the form below it.
 *
 * The promise: an output element depends on its own row of x, its own row of w, k and the level,
 * and on nothing else: not on rows, n, the split over threads, strides, alignment, packing
 * position or neighbours. Every function here keeps it. Sums start from +0 in FP32.
 *
 * gemm_nt and x_pack keep their blocks on the stack: a thread that calls them needs 512 KiB of it.
 */
#ifndef SP_KERNELS_CPU_KERNELS_H
#define SP_KERNELS_CPU_KERNELS_H

#include "base/private.h"

#include <sidepath/device.h>
#include <sidepath/status.h>

#include <stdbool.h>

/* Keys of one attention block; blocks start at multiples of it from absolute position 0. On tiles
 * four of them are one (attention_amx.c). */
#define SP_ATTENTION_BLOCK 32

/* What happens to a finished sum s of row i and output j. Ty(v) rounds to y_type. */
typedef enum sp_epilogue {
    SP_EPILOGUE_STORE = 0, /* y = Ty(s), or Ty(s + bias[j]) */
    SP_EPILOGUE_FOLD = 1   /* y = Ty(fmaf(scale[i], Td(s), y)): Td rounds to delta_type */
} sp_epilogue;

/*
 * y[i, j] (rows × n) from x · wᵀ. Supported (x_type, w_type): equal types, and F32 × BF16.
 * y_type: any. bias only with STORE. Rows of w are stored verbatim, row-major.
 */
typedef struct sp_gemm_args {
    const void *packed_x; /* from x_pack with the same rows, k, x_type, w_type */
    sp_dtype x_type, w_type, y_type, delta_type;
    sp_epilogue epilogue;
    int64_t rows, n, k;
    const void *w; /* [n, k], stride w_stride elements, any alignment of its type */
    int64_t w_stride;
    const void *bias; /* [n] of w_type, or NULL */
    void *y;          /* row i at y + (row_index ? row_index[i] : i) * y_stride elements */
    int64_t y_stride;
    const int32_t *row_index;    /* [rows] or NULL */
    const int32_t *column_index; /* [n] or NULL: output j goes to column column_index[j] of y, so
                                    that rows of w that replace a few rows of a larger matrix give
                                    the same bits as in that matrix */
    const float *scale;          /* [rows], FOLD only; a row of scale 0 is not touched */
} sp_gemm_args;

/*
 * Rows of a token table that each slot replaces. Slot s has them as rows[s] [n, width] of
 * row_type[s]; map[s] [vocab] holds the row number of each token, or -1. map[s] is NULL where the
 * slot replaces nothing. All tables are [slots], at addresses that never change.
 */
typedef struct sp_override_args {
    const void *const *rows;
    const int32_t *const *map;
    const int32_t *row_type; /* an sp_dtype */
    const int32_t *row_slot; /* [rows of y] slot, or -1 */
    const int32_t *token;    /* [rows of y] */
    int64_t width;
    sp_dtype type; /* of y */
    void *y;       /* [rows, width], stride y_stride elements */
    int64_t y_stride;
} sp_override_args;

/* K and V of one layer in pages: element (token t, head h) of page p starts at
 * base + ((p * kv_heads + h) * page_tokens + t) * head_dim. */
typedef struct sp_attention_args {
    sp_dtype type;          /* of q, out and the cache: BF16 or F32 */
    int32_t n_rows;         /* consecutive positions of one sequence */
    int32_t first_position; /* of row 0; row i sees keys 0 .. first_position + i */
    int32_t group;          /* q heads that share one kv head */
    int32_t head_dim, kv_heads, kv_head, page_tokens;
    float scale;      /* 1 / sqrt(head_dim) */
    const void *q;    /* [n_rows, ..]: this kv head's first q head; heads head_dim apart */
    int64_t q_stride; /* elements between rows */
    void *out;        /* laid out like q */
    int64_t out_stride;
    const void *k_cache, *v_cache;
    const int32_t *pages; /* page numbers of the sequence in order */
    float *scratch;       /* attention_scratch_floats(group, head_dim) floats, this thread's */
} sp_attention_args;

/*
 * One row of a chunk of the gated delta rule and one value head, FP32. `i` rows of the chunk come
 * before it. For each column j:
 *
 *     u_i[j] = beta * (v[j] - decay * sk[j] - Σ_{r<i} wk[r] * u[r, j])
 *     o[j]   = scale * (decay * sq[j] + Σ_{r<=i} wq[r] * u[r, j])
 *
 * The sums are chains of fused steps in ascending r.
 */
typedef struct sp_delta_row_args {
    int64_t i, n;         /* n is a multiple of 16 */
    float *u;             /* [i + 1, n]: row i is written */
    float *o;             /* [n] */
    const float *v;       /* [n] */
    const float *sk, *sq; /* [n] of the state at the chunk's border: Sᵀk and Sᵀq */
    const float *wk, *wq; /* [i] and [i + 1] */
    float beta, decay, scale;
} sp_delta_row_args;

typedef struct sp_kernels {
    const char *level; /* "scalar", "avx2", "avx512", "amx" */

    /* Bytes of the packed form of `rows` rows of length k (a multiple of 64). */
    size_t (*x_pack_bytes)(sp_dtype x_type, sp_dtype w_type, int64_t rows, int64_t k);

    /*
     * Packs rows [row_begin, row_end) of the `rows` rows of x into `packed` (64-byte aligned).
     * Row i is read at x + (row_index ? row_index[i] : i) * x_stride elements, k elements; nothing
     * beyond them is read. row_begin is a multiple of x_pack_rows.
     */
    void (*x_pack)(void *packed, sp_dtype x_type, sp_dtype w_type, const void *x, int64_t x_stride,
                   const int32_t *row_index, int64_t rows, int64_t k, int64_t row_begin,
                   int64_t row_end);
    int64_t x_pack_rows; /* granularity of a split of x_pack over threads */

    /*
     * Outputs j in [n_begin, n_end) of rows [row_begin, row_end). n_begin is a multiple of
     * gemm_columns, row_begin of gemm_rows.
     */
    void (*gemm_nt)(const sp_gemm_args *args, int64_t row_begin, int64_t row_end, int64_t n_begin,
                    int64_t n_end);
    int64_t gemm_rows, gemm_columns; /* granularity of a split over rows and over n */

    /*
     * Outputs j in [n_begin, n_end) of `count` GEMMs of one row each, with the bits of gemm_nt one
     * by one: expands of a decode step whose rows have adapters of their own. Each has n >= n_end,
     * n_begin is a multiple of gemm_columns, no two write the same memory. Weights are prefetched.
     */
    void (*gemm_nt_lone)(const sp_gemm_args *const *gemms, int32_t count, int64_t n_begin,
                         int64_t n_end);

    /* y = T(x * rsqrt(mean(x²) + eps) * (w + w_offset)), one row of n; y may be x. T BF16 or F32.
     * w is BF16. w_offset is 0, or 1 for zero-centred weights. */
    void (*rmsnorm)(sp_dtype type, void *y, const void *x, const uint16_t *w, float w_offset,
                    int64_t n, float eps);

    /* The same over one head, then RoPE (rotate-half over the first 2 * n_rot elements) before the
     * one rounding. cosine, sine: [n_rot] FP32 of this position. In place. */
    void (*rmsnorm_rope)(sp_dtype type, void *x, const uint16_t *w, float w_offset, int64_t n,
                         float eps, const float *cosine, const float *sine, int64_t n_rot);

    /* RoPE alone, as there: the first 2 * n_rot elements of one head, in place. */
    void (*rope)(sp_dtype type, void *x, const float *cosine, const float *sine, int64_t n_rot);

    /* out = T(silu(gate) * up), n elements; out may be gate or up. */
    void (*silu_mul)(sp_dtype type, void *out, const void *gate, const void *up, int64_t n);

    /* weights[i] = e^((logits[i] - best) * inverse), n elements; 0 for a logit of -inf. */
    void (*exp_weights)(float *weights, const float *logits, float best, float inverse, int64_t n);

    /* y = T(y + x), n elements. */
    void (*add)(sp_dtype type, void *y, const void *x, int64_t n);

    /* y = T(fmaf(scale, x, y)), n elements. */
    void (*add_scaled)(sp_dtype type, void *y, const void *x, float scale, int64_t n);

    /* y = T(Σ weights[i] * x row row_index[i]), n elements: `rows` fused steps from +0 in order.
     * Row r is at x + r * x_stride elements. y overlaps none of them. */
    void (*weighted_sum)(sp_dtype type, void *y, const void *x, int64_t x_stride,
                         const int32_t *row_index, const float *weights, int64_t rows, int64_t n);

    /* Causal attention of n_rows rows and one kv head; blocks of keys from position 0, of
     * SP_ATTENTION_BLOCK or a multiple that the level fixes, combined in index order, FP32 inside,
     * one rounding at the end. scale is above 0. */
    void (*attention)(const sp_attention_args *args);
    size_t (*attention_scratch_floats)(int32_t group, int32_t head_dim);

    /* y = T(y * sigmoid(gate)), n elements. */
    void (*sigmoid_mul)(sp_dtype type, void *y, const void *gate, int64_t n);

    /* y = T(silu(Σ_t w[i, t] * x[t][i])), n channels: `width` fused steps from +0 in ascending t. w
     * is BF16 [n, width]. */
    void (*conv_silu)(sp_dtype type, void *y, const void *const *x, const uint16_t *w,
                      int64_t width, int64_t n);

    /* y = T(x / sqrt(Σ x² + eps)), one row of n; y may be x. */
    void (*unit_norm)(sp_dtype type, void *y, const void *x, int64_t n, float eps);

    /* y = T(x * rsqrt(mean(x²) + eps) * w * silu(gate)), one row of n; x and w are FP32. */
    void (*rmsnorm_gated)(sp_dtype type, void *y, const float *x, const float *w, const void *gate,
                          int64_t n, float eps);

    /*
     * The products of the gated delta rule, FP32, without padding between rows. n is a multiple of
     * 16, and s, u and y start on 64-byte boundaries.
     */
    /* y[r, j] = Σ_d x[r, d] * s[d, j]: a chain of fused steps from +0 in ascending d. */
    void (*state_read)(float *y, const float *x, const float *s, int64_t rows, int64_t k,
                       int64_t n);
    /* s[d, j] = decay * s[d, j], then for each r in ascending order a fused step of x[r, d] times
     * weights[r] * u[r, j]. */
    void (*state_fold)(float *s, float decay, const float *x, const float *weights, const float *u,
                       int64_t rows, int64_t k, int64_t n);
    /* y[r, j] = Σ_d x[r, d] * z[j, d] with y's rows y_stride floats apart. */
    void (*dots)(float *y, int64_t y_stride, const float *x, const float *z, int64_t rows,
                 int64_t columns, int64_t k);
    void (*delta_row)(const sp_delta_row_args *args);

    /* Conversions between types, n elements, nearest even. */
    void (*convert)(sp_dtype to_type, void *to, sp_dtype from_type, const void *from, int64_t n);

    /* Rows [row_begin, row_end) of y whose token their slot replaces become the replacement; no
     * other byte of y is touched. */
    void (*override_rows)(const sp_override_args *args, int64_t row_begin, int64_t row_end);

    /* to[i, j] = a[j, column[row_index[i]]]: `rows` rows of `rank` elements out of a [rank, ..].
     * What A gives for a one-hot x, exactly. */
    void (*gather_columns)(sp_dtype type, void *to, int64_t to_stride, const void *a,
                           int64_t a_stride, int64_t rank, const int32_t *column,
                           const int32_t *row_index, int64_t rows);
} sp_kernels;

/*
 * The table of a level: "auto" or NULL is the best that this machine, its OS and the build have.
 * Static storage. SP_ERR_UNSUPPORTED names a level that this machine lacks, SP_ERR_ARGUMENT an
 * unknown name. Any thread.
 */
SP_PRIVATE sp_status sp_kernels_get(const char *level, const sp_kernels **out_kernels,
                                    sp_error *error);

/* Names of the levels that this machine can run, ascending, NULL-terminated. Static storage; any
 * thread. */
const char *const *sp_kernels_levels(void);

#endif
