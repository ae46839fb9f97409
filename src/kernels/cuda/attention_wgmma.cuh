/*
 * attention_wgmma.cuh: wgmma with A in registers, from sm_90a on: 64 rows of a warpgroup by 16 of
 * a ring's slot (attention_ring.cuh). Thread t holds, in a fragment of D, row 16 (t / 32) + t % 32
 * / 4 + i / 2 * 8 and column 8 n + t % 4 * 2 + i % 2 in d[4 n + i]; A is as in mma m16n8k16.
 */
#ifndef SP_KERNELS_CUDA_ATTENTION_WGMMA_CUH
#define SP_KERNELS_CUDA_ATTENTION_WGMMA_CUH

#include "kernels/cuda/wgmma.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* Operand in the 128-byte swizzle. block: bytes between blocks of 64 of the contiguous dimension;
 * rows: between groups of 8 of the other one. */
static __device__ __forceinline__ uint64_t operand_of(uint32_t at, uint32_t block, uint32_t rows)
{
    return (uint64_t)((at & 0x3ffff) >> 4) | (uint64_t)(block >> 4) << 16 |
           (uint64_t)(rows >> 4) << 32 | 1ull << 62;
}

#define D4(d, i)  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(d, i) D4(d, i), D4(d, i + 4), D4(d, i + 8), D4(d, i + 12)
#define A4(a)     "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

/* d (+)= a · b of N columns. TRANSPOSED: b's contiguous dimension is N, not the 16 of k. */
template <int N, int TRANSPOSED> struct wgmma_registers;

template <int TRANSPOSED> struct wgmma_registers<64, TRANSPOSED> {
    static __device__ __forceinline__ void multiply(float *d, const uint32_t *a, uint64_t b,
                                                    int accumulate)
    {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                     "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
                     "{%32,%33,%34,%35}, %36, p, 1, 1, %38;\n}"
                     : D16(d, 0), D16(d, 16)
                     : A4(a), "l"(b), "r"(accumulate), "n"(TRANSPOSED));
    }
};

template <int TRANSPOSED> struct wgmma_registers<128, TRANSPOSED> {
    static __device__ __forceinline__ void multiply(float *d, const uint32_t *a, uint64_t b,
                                                    int accumulate)
    {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                     "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                     "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
                     "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
                     "{%64,%65,%66,%67}, %68, p, 1, 1, %70;\n}"
                     : D16(d, 0), D16(d, 16), D16(d, 32), D16(d, 48)
                     : A4(a), "l"(b), "r"(accumulate), "n"(TRANSPOSED));
    }
};

#undef D4
#undef D16
#undef A4

/* After the wait: the compiler must not have read or moved these registers before. */
template <int N> static __device__ __forceinline__ void wgmma_arrived(float *d)
{
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+f"(d[i])::"memory");
}

#endif
#endif
