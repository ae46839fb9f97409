/*
 * parts.cu: exports xa of a group of sites in FP32 after the shrink, and imports it before the
 * expand.
 *
 *     take:  xa[row, c] = the partials summed in the order of kernels_cuda.h, for c below the own
 *            rank of the row's slot; else, and in rows without a delta, 0
 *     give:  partials[0][row, site * R + c] = xa[row, c] for c below that rank, for an expand of
 *            one partial; zeros up to a multiple of 4
 *
 * Grid (rows, sites), one warp, four adjacent elements per thread. Bound by latency: a row of a
 * part has one element per rank. Launched without overlap, so all earlier kernels are complete.
 */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/partials.cuh"

#define FOUR 4 /* elements that a thread handles at a time */

/* The row's rank at the site; 0: it has no delta there. */
static __device__ __forceinline__ int rank_of(const sp_cuda_site &site, int slot)
{
    float scale;

    if (slot < 0)
        return 0;
    scale = site.scale != NULL ? site.scale[slot] : site.one_scale;
    if (scale == 0.0f)
        return 0;
    return site.rank != NULL ? site.rank[slot] : site.one_rank;
}

static __device__ __forceinline__ float *partial_of(const sp_cuda_group &group)
{
    return group.partials + (int64_t)blockIdx.x * (group.rank_stride * group.n_sites) +
           (int)blockIdx.y * group.rank_stride;
}

__global__ void __launch_bounds__(SP_WARP)
    take_kernel(const __grid_constant__ sp_cuda_group group,
                const __grid_constant__ sp_cuda_parts parts, partials_shape shape)
{
    int row = blockIdx.x, site = blockIdx.y;
    int rank = rank_of(group.sites[site], group.plan.seq_slot[row]);
    int64_t partial_floats = (int64_t)group.n_rows * (group.rank_stride * group.n_sites);
    float *xa = parts.xa[site] + row * parts.xa_stride[site];

    for (int c = threadIdx.x * FOUR; c < group.rank_stride; c += SP_WARP * FOUR) {
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

        if (c < rank)
            v = sum_alone(partial_of(group) + c, partial_floats, shape);
        xa[c] = v.x;
        xa[c + 1] = c + 1 < rank ? v.y : 0.0f;
        xa[c + 2] = c + 2 < rank ? v.z : 0.0f;
        xa[c + 3] = c + 3 < rank ? v.w : 0.0f;
    }
}

__global__ void __launch_bounds__(SP_WARP) give_kernel(const __grid_constant__ sp_cuda_group group,
                                                       const __grid_constant__ sp_cuda_parts parts)
{
    int row = blockIdx.x, site = blockIdx.y;
    int rank = rank_of(group.sites[site], group.plan.seq_slot[row]);
    const float *xa = parts.xa[site] + row * parts.xa_stride[site];

    for (int c = threadIdx.x * FOUR; c < rank; c += SP_WARP * FOUR)
        *(float4 *)(partial_of(group) + c) =
            make_float4(xa[c], c + 1 < rank ? xa[c + 1] : 0.0f, c + 2 < rank ? xa[c + 2] : 0.0f,
                        c + 3 < rank ? xa[c + 3] : 0.0f);
}

extern "C" int sp_cuda_take_parts(int gpu, const sp_cuda_group *group, const sp_cuda_parts *parts,
                                  void *stream)
{
    dim3 grid((unsigned)group->n_rows, (unsigned)group->n_sites);
    sp_cuda_current current(gpu);

    if (current.code != cudaSuccess || group->n_rows == 0)
        return (int)current.code;
    take_kernel<<<grid, SP_WARP, 0, (cudaStream_t)stream>>>(*group, *parts, partials_of(group));
    return (int)cudaGetLastError();
}

extern "C" int sp_cuda_give_parts(int gpu, const sp_cuda_group *group, const sp_cuda_parts *parts,
                                  void *stream)
{
    dim3 grid((unsigned)group->n_rows, (unsigned)group->n_sites);
    sp_cuda_current current(gpu);

    if (current.code != cudaSuccess || group->n_rows == 0)
        return (int)current.code;
    give_kernel<<<grid, SP_WARP, 0, (cudaStream_t)stream>>>(*group, *parts);
    return (int)cudaGetLastError();
}
