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

template <int F16>
static __device__ __forceinline__ uint4 fold_eight(uint4 old, uint4 delta, float scale)
{
    eight d = {delta}, v = {old};

#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 change = widen_two<F16>(d.two[i]), before = widen_two<F16>(v.two[i]);

        v.two[i] = narrow_two<F16>(__fmaf_rn(scale, change.x, before.x),
                                   __fmaf_rn(scale, change.y, before.y));
    }
    return v.all;
}

#endif
