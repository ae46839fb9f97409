/*
 * shrink.cuh: a quarter of a chunk of 16 ranks by a tile of rows, in registers, and the sum of four
 * of them, shared by the kernels that shrink few rows.
 */
#ifndef SP_KERNELS_CUDA_SHRINK_CUH
#define SP_KERNELS_CUDA_SHRINK_CUH

#include "kernels/cuda/ptx.cuh"

#define QUARTER_K 128
#define RANKS     16
#define RED_PITCH 20 /* floats of one row of quarters: no bank conflicts in a warp */

/* One thread's mma operands for a quarter of a chunk. */
typedef struct operands {
    uint4 low[4], high[4]; /* ranks g and g + 8 */
    uint4 x[4];
} operands;

template <int VEC>
static __device__ __forceinline__ void load_a(operands *w, const uint16_t *a, int64_t stride,
                                              int rank0, int rank, int k, int k_in)
{
    int low = rank0 + (int)((threadIdx.x & 31) >> 2), at = k + (int)(threadIdx.x & 3) * 8;
    const uint16_t *row = a + low * stride;

#pragma unroll
    for (int s = 0; s < 4; s++) {
        w->low[s] = load_eight<VEC>(row, at + 32 * s, low < rank ? k_in : 0);
        w->high[s] = load_eight<VEC>(row + 8 * stride, at + 32 * s, low + 8 < rank ? k_in : 0);
    }
}

template <int VEC>
static __device__ __forceinline__ void load_x(operands *w, const uint16_t *x, int k, int k_end)
{
    int t = threadIdx.x & 3;

#pragma unroll
    for (int s = 0; s < 4; s++)
        w->x[s] = load_eight_of_row<VEC>(x, k + 32 * s + 8 * t, k_end);
}

template <int F16>
static __device__ __forceinline__ void multiply(float (&acc)[4], const operands &w)
{
#pragma unroll
    for (int s = 0; s < 4; s++) {
        mma<F16>(acc, w.low[s].x, w.high[s].x, w.low[s].y, w.high[s].y, w.x[s].x, w.x[s].y);
        mma<F16>(acc, w.low[s].z, w.high[s].z, w.low[s].w, w.high[s].w, w.x[s].z, w.x[s].w);
    }
}

/* The sums of a chunk's four quarters, one of four adjacent warps each, exchanged through shared
 * memory. */
typedef float quarters[4][SP_CUDA_TILE_ROWS][RED_PITCH];

static __device__ __forceinline__ void keep_quarter(quarters &q, const float (&acc)[4])
{
    int warp = threadIdx.x >> 5 & 3, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;

    q[warp][2 * t][g] = acc[0];
    q[warp][2 * t + 1][g] = acc[1];
    q[warp][2 * t][g + 8] = acc[2];
    q[warp][2 * t + 1][g + 8] = acc[3];
}

static __device__ __forceinline__ float sum_quarters(const quarters &q, int row, int c)
{
    return ((q[0][row][c] + q[1][row][c]) + q[2][row][c]) + q[3][row][c];
}

#endif
