/* effective_scale.h: the scale that a row's delta is folded with, for the host and the device. */
#ifndef SP_KERNELS_EFFECTIVE_SCALE_H
#define SP_KERNELS_EFFECTIVE_SCALE_H

#ifdef __CUDACC__
#define SP_HOST_AND_DEVICE static __host__ __device__ __forceinline__
#else
#define SP_HOST_AND_DEVICE static inline
#endif

/* The adapter's stored scale times the request's, rounded once. */
SP_HOST_AND_DEVICE float sp_scale_of_row(float stored, float request)
{
    return (float)((double)stored * (double)request);
}

#endif
