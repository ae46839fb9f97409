/* expand.cuh: the product of B and xa and the fold into y, shared by the variants of the expand. */
#ifndef SP_KERNELS_CUDA_EXPAND_CUH
#define SP_KERNELS_CUDA_EXPAND_CUH

#include "kernels/cuda/fold.cuh"

/* From 16-byte vectors of rows to mma operands; `keep`: in registers of their own, for reuse over
 * several tiles.
 */
template <int S>
static __device__ __forceinline__ void interleave(uint4 (&a)[S][4], const uint4 (&w)[S][4],
                                                  bool keep)
{
#pragma unroll
    for (int s = 0; s < S; s++)
#pragma unroll
        for (int p = 0; p < 4; p += 2) {
            a[s][p] = make_uint4(w[s][p].x, w[s][p + 1].x, w[s][p].y, w[s][p + 1].y);
            a[s][p + 1] = make_uint4(w[s][p].z, w[s][p + 1].z, w[s][p].w, w[s][p + 1].w);
            if (keep)
#pragma unroll
                for (int i = p; i < p + 2; i++)
                    asm volatile(""
                                 : "+r"(a[s][i].x), "+r"(a[s][i].y), "+r"(a[s][i].z),
                                   "+r"(a[s][i].w));
        }
}

/* Adds 32 ranks of two M operands by one N operand, of which v is this thread's row and quarter. */
template <int F16>
static __device__ __forceinline__ void multiply(float (&acc)[2][4], const uint4 (&a)[4], uint4 v)
{
#pragma unroll
    for (int p = 0; p < 2; p++) {
        const uint4 &first = a[2 * p], &second = a[2 * p + 1];

        mma<F16>(acc[p], first.x, first.y, first.z, first.w, v.x, v.y);
        mma<F16>(acc[p], second.x, second.y, second.z, second.w, v.z, v.w);
    }
}

/* A block's site and the adapter of its current rows. */
typedef struct work {
    const uint16_t *b;
    int b_stride, n_out, rank;
    bool y_is_f32;
} work;

/* The output, among a warp's 32, that M row g of 8 x 8 matrix 0 computes; matrix j: 2 j further. */
static __device__ __forceinline__ int first_column(void)
{
    int g = (threadIdx.x & 31) >> 2;

    return (g >> 1) * 8 + (g & 1);
}

/* Ranks [rank0, rank0 + 32 * S) of this warp's columns. */
template <int VEC, int S>
static __device__ __forceinline__ void load_b(uint4 (&w)[S][4], const work &at, int column0,
                                              int rank0)
{
    int k = rank0 + (int)(threadIdx.x & 3) * 8;

    column0 += first_column();
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int column = column0 + 2 * j, end = column < at.n_out ? at.rank : 0;
        const uint16_t *row = at.b + (int64_t)column * at.b_stride;

#pragma unroll
        for (int s = 0; s < S; s++)
            w[s][j] = load_eight<VEC>(row, k + 32 * s, end);
    }
}

/* Eight adjacent outputs of row g, from column0 + 8 t on. xa: at this thread's row and t. MORE: the
 * rank may be above 32 S. */
template <int F16, int VEC, int S, bool MORE = (S == 4 || !VEC)>
static __device__ __forceinline__ uint4 make_delta(const work &at, const uint4 (&a)[S][4],
                                                   const uint16_t *xa, int column0)
{
    float acc[2][4] = {};

#pragma unroll
    for (int s = 0; s < S; s++)
        if (s == 0 || 32 * s < at.rank)
            multiply<F16>(acc, a[s], *(const uint4 *)(xa + 32 * s));
    if (MORE)
        for (int rank0 = 32 * S; rank0 < at.rank; rank0 += 32) {
            uint4 w[1][4], more[1][4];

            load_b<VEC, 1>(w, at, column0, rank0);
            interleave<1>(more, w, false);
            multiply<F16>(acc, more[0], *(const uint4 *)(xa + rank0));
        }
    return make_uint4(transpose(narrow_two<F16>(acc[0][0], acc[0][1])),
                      transpose(narrow_two<F16>(acc[0][2], acc[0][3])),
                      transpose(narrow_two<F16>(acc[1][0], acc[1][1])),
                      transpose(narrow_two<F16>(acc[1][2], acc[1][3])));
}

template <int F16>
static __device__ __forceinline__ void fold_floats(float *y, uint4 delta, float scale)
{
    eight d = {delta};

#pragma unroll
    for (int i = 0; i < 8; i += 4) {
        float2 low = widen_two<F16>(d.two[i / 2]), high = widen_two<F16>(d.two[i / 2 + 1]);
        float4 v = *(float4 *)(y + i);

        v.x = __fmaf_rn(scale, low.x, v.x);
        v.y = __fmaf_rn(scale, low.y, v.y);
        v.z = __fmaf_rn(scale, high.x, v.z);
        v.w = __fmaf_rn(scale, high.y, v.w);
        *(float4 *)(y + i) = v;
    }
}

/* Any address and any number of columns. */
template <int F16>
static __device__ __forceinline__ void fold_each(char *y, bool is_f32, int columns, uint4 delta,
                                                 float scale)
{
    eight d = {delta};

#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint16_t *half = (uint16_t *)y + i;

        if (i >= columns)
            break;
        if (is_f32)
            ((float *)y)[i] = __fmaf_rn(scale, widen<F16>(d.one[i]), ((float *)y)[i]);
        else
            *half = narrow<F16>(__fmaf_rn(scale, widen<F16>(d.one[i]), widen<F16>(*half)));
    }
}

#endif
