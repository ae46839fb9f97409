/*
 * attention_rows.cuh: what a thread of a core of attention does with its two packed rows of q, o
 * and y. Its fragment of o is o[n][4]: rows a (0, 1) and b (2, 3), columns `column` + 8 n and the
 * next, where `column` is the first of the fragment plus 2 * (lane % 4).
 */
#ifndef SP_KERNELS_CUDA_ATTENTION_ROWS_CUH
#define SP_KERNELS_CUDA_ATTENTION_ROWS_CUH

#include "kernels/cuda/attention.cuh"

/* A thread's packed rows, a and b = a + 8, of the tile's n; those from n on are none. */
typedef struct row_pair {
    int a, b, n;
    int position_a, position_b;
} row_pair;

/* Of a warp whose 16 rows begin at `first`. */
static __device__ __forceinline__ row_pair rows_of(const attention_piece &piece, int group,
                                                   int first)
{
    row_pair rows;

    rows.a = first + ((int)(threadIdx.x & 31) >> 2);
    rows.b = rows.a + 8;
    rows.n = piece.rows * group;
    rows.position_a = piece.position + min(rows.a / group, piece.rows - 1);
    rows.position_b = piece.position + min(rows.b / group, piece.rows - 1);
    return rows;
}

/* Element of q and y at dimension 0 of packed row `row`. */
static __device__ __forceinline__ int64_t offset_of(const attention_args &args,
                                                    const attention_piece &piece, int head, int row)
{
    int64_t at = (int64_t)(piece.row + row / args.group) * args.a.shape.q_heads +
                 head * args.group + row % args.group;

    return at * args.a.shape.head_dim;
}

template <int D>
static __device__ __forceinline__ void load_queries(uint32_t (&q)[D / 16][4],
                                                    const attention_args &args,
                                                    const attention_piece &piece, int head,
                                                    const row_pair &rows)
{
    int dims = args.a.shape.head_dim, d0 = 2 * (int)(threadIdx.x & 3);
    const uint16_t *a = (const uint16_t *)args.a.q + offset_of(args, piece, head, rows.a);
    const uint16_t *b = (const uint16_t *)args.a.q + offset_of(args, piece, head, rows.b);

#pragma unroll
    for (int k = 0; k < D / 16; k++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int d = d0 + 16 * k + 8 * half;

            q[k][2 * half] = rows.a < rows.n && d < dims ? *(const uint32_t *)(a + d) : 0;
            q[k][2 * half + 1] = rows.b < rows.n && d < dims ? *(const uint32_t *)(b + d) : 0;
        }
}

template <int GROUPS> static __device__ __forceinline__ void zero_rows(float (&o)[GROUPS][4])
{
#pragma unroll
    for (int n = 0; n < GROUPS; n++)
        o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
}

/* x * 1 is x, so to skip it changes no bit. */
template <int GROUPS>
static __device__ __forceinline__ void scale_rows(float (&o)[GROUPS][4], float2 by)
{
    if (!__any_sync(~0u, by.x != 1.0f || by.y != 1.0f))
        return;
#pragma unroll
    for (int n = 0; n < GROUPS; n++) {
        o[n][0] = __fmul_rn(o[n][0], by.x);
        o[n][1] = __fmul_rn(o[n][1], by.x);
        o[n][2] = __fmul_rn(o[n][2], by.y);
        o[n][3] = __fmul_rn(o[n][3], by.y);
    }
}

/* ---- results ------------------------------------------------------------------------------- */

/* Row `row` of the partial results; `half` 0 is row a, 1 is row b. */
template <int D, int GROUPS>
static __device__ __forceinline__ void store_partial_row(const attention_core &core, int64_t row,
                                                         const float (&o)[GROUPS][4], int half,
                                                         row_sum sum, int column)
{
    float *to = core.partial_o + row * D + column;

    if (column == 0)
        core.partial_m[row] = make_float2(sum.m, sum.l);
#pragma unroll
    for (int n = 0; n < GROUPS; n++)
        *(float2 *)(to + 8 * n) = make_float2(o[n][2 * half], o[n][2 * half + 1]);
}

/* `first`: of the tile's rows among the partial results. */
template <int D, int GROUPS>
static __device__ __forceinline__ void store_partial(const attention_core &core, int64_t first,
                                                     const float (&o)[GROUPS][4], row_sum a,
                                                     row_sum b, const row_pair &rows, int column)
{
    if (rows.a < rows.n)
        store_partial_row<D>(core, first + rows.a, o, 0, a, column);
    if (rows.b < rows.n)
        store_partial_row<D>(core, first + rows.b, o, 1, b, column);
}

template <int GROUPS>
static __device__ __forceinline__ void store_row(const attention_args &args, int64_t at,
                                                 const float (&o)[GROUPS][4], int half, float l,
                                                 int column)
{
    uint16_t *y = (uint16_t *)args.a.y + at + column;
    float by = reciprocal(l);

#pragma unroll
    for (int n = 0; n < GROUPS; n++)
        if (column + 8 * n < args.a.shape.head_dim)
            *(uint32_t *)(y + 8 * n) =
                narrow_two<0>(__fmul_rn(o[n][2 * half], by), __fmul_rn(o[n][2 * half + 1], by));
}

template <int GROUPS>
static __device__ __forceinline__ void store_rows(const attention_args &args,
                                                  const attention_piece &piece, int head,
                                                  const float (&o)[GROUPS][4], row_sum a, row_sum b,
                                                  const row_pair &rows, int column)
{
    if (rows.a < rows.n)
        store_row(args, offset_of(args, piece, head, rows.a), o, 0, a.l, column);
    if (rows.b < rows.n)
        store_row(args, offset_of(args, piece, head, rows.b), o, 1, b.l, column);
}

#endif
