/* fold.cuh: a delta into the outputs that it belongs to, by one fused step and one rounding. */
#ifndef SP_KERNELS_CUDA_FOLD_CUH
#define SP_KERNELS_CUDA_FOLD_CUH

#include "kernels/cuda/ptx.cuh"

/* Eight adjacent 16-bit elements. */
union eight {
    uint4 all;
    uint32_t two[4];
    uint16_t one[8];
};

/* Two of them. */
template <int F16>
static __device__ __forceinline__ uint32_t fold_two(uint32_t old, uint32_t delta, float scale)
{
    float2 change = widen_two<F16>(delta), before = widen_two<F16>(old);

    return narrow_two<F16>(__fmaf_rn(scale, change.x, before.x),
                           __fmaf_rn(scale, change.y, before.y));
}

template <int F16>
static __device__ __forceinline__ uint4 fold_eight(uint4 old, uint4 delta, float scale)
{
    eight d = {delta}, v = {old};

#pragma unroll
    for (int i = 0; i < 4; i++)
        v.two[i] = fold_two<F16>(v.two[i], d.two[i], scale);
    return v.all;
}

#endif
