/* expand.cuh: the product of B and xa, shared by all variants of the expand. */
#ifndef SP_KERNELS_CUDA_EXPAND_CUH
#define SP_KERNELS_CUDA_EXPAND_CUH

#include "kernels/cuda/ptx.cuh"

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

#endif
