/*
 * parts.cu: xa of a group of sites in the host's hands, FP32, between the shrink and the expand.
 *
 *     take:  xa[row, c] = the planes added in the order of kernels_cuda.h, for c below the own rank
 *            of the row's slot; else, and in rows without a delta, 0
 *     give:  planes[0][row, site * R + c] = xa[row, c] for c below that rank: an expand of one
 *            plane, which then has nothing to add, goes on from it; zeros up to a multiple of 4
 *
 * Grid (rows, sites), one warp, four neighbours for each thread. Bound by latency: a part has as
 * many elements as ranks. Launched in full order, so whatever stands before is done.
 */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/planes.cuh"

#define FOUR 4 /* elements of a thread at a time */

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

static __device__ __forceinline__ float *plane_of(const sp_cuda_group &group)
{
    return group.planes + (int64_t)blockIdx.x * (group.rank_stride * group.n_sites) +
           (int)blockIdx.y * group.rank_stride;
}

__global__ void __launch_bounds__(SP_WARP)
    take_kernel(const __grid_constant__ sp_cuda_group group,
                const __grid_constant__ sp_cuda_parts parts, planes_shape shape)
{
    int row = blockIdx.x, site = blockIdx.y;
    int rank = rank_of(group.sites[site], group.plan.seq_slot[row]);
    int64_t plane_floats = (int64_t)group.n_rows * (group.rank_stride * group.n_sites);
    float *xa = parts.xa[site] + row * parts.xa_stride[site];

    for (int c = threadIdx.x * FOUR; c < group.rank_stride; c += SP_WARP * FOUR) {
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

        if (c < rank)
            v = sum_alone(plane_of(group) + c, plane_floats, shape);
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
        *(float4 *)(plane_of(group) + c) =
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
    take_kernel<<<grid, SP_WARP, 0, (cudaStream_t)stream>>>(*group, *parts, planes_of(group));
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
