/*
 * parts.cu: xa of a group of sites between shrink and expand: rounded there for an expand of many
 * rows at large ranks, or exported in FP32 and imported.
 *
 *     round: rounded[row, site * R + c] = T(the partials summed in the order of kernels_cuda.h),
 * for c below the own rank of the row's slot; zeros up to a multiple of 8
 *
 *     take:  xa[row, c] = the partials summed in the order of kernels_cuda.h, for c below the own
 *            rank of the row's slot; else, and in rows without a delta, 0
 *     give:  partials[0][row, site * R + c] = xa[row, c] for c below that rank, for an expand of
 *            one partial; zeros up to a multiple of 4; then round, where that expand needs it
 *
 * take and give: grid (rows, sites), one warp, four adjacent elements per thread. Bound by latency:
 * a row of a part has one element per rank. Launched without overlap, so all earlier kernels are
 * complete. round: a thread for eight adjacent elements, whose rank is looked up before the wait
 * for the shrink; bound by the bytes of the partials, from L2.
 */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/partials.cuh"

#define FOUR    4 /* elements that a thread handles at a time */
#define EIGHT   8
#define THREADS 256

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

/* Eight sums as elements, zeros from `left` on. */
template <int F16>
static __device__ __forceinline__ uint4 round_eight(const float4 (&v)[2], int left)
{
    return make_uint4(narrow_two<F16>(v[0].x, left > 1 ? v[0].y : 0.0f),
                      narrow_two<F16>(left > 2 ? v[0].z : 0.0f, left > 3 ? v[0].w : 0.0f),
                      narrow_two<F16>(left > 4 ? v[1].x : 0.0f, left > 5 ? v[1].y : 0.0f),
                      narrow_two<F16>(left > 6 ? v[1].z : 0.0f, left > 7 ? v[1].w : 0.0f));
}

template <int F16>
__global__ void __launch_bounds__(THREADS)
    round_kernel(const __grid_constant__ sp_cuda_group group, partials_shape shape, uint16_t *xa)
{
    int eights = group.rank_stride / EIGHT, row_eights = eights * group.n_sites;
    int item = (int)(blockIdx.x * THREADS + threadIdx.x);
    int row = item / row_eights, at = item - row * row_eights, c = at % eights * EIGHT, left = 0;
    int64_t partial_floats = (int64_t)group.n_rows * row_eights * EIGHT;
    const float *partial = group.partials + (int64_t)item * EIGHT;

    release_successor();
    if (row < group.n_rows)
        left = rank_of(group.sites[at / eights], group.plan.seq_slot[row]) - c;
    wait_predecessor();
    if (left > 0) {
        const float *const halves[2] = {partial, left > FOUR ? partial + FOUR : NULL};
        float4 v[2];

        sum_several<2, FOUR>(v, halves, partial_floats, shape);
        *(uint4 *)(xa + (int64_t)item * EIGHT) = round_eight<F16>(v, left);
    }
}

cudaError_t sp_cuda_round_xa(const sp_cuda_group *group, cudaStream_t stream)
{
    int64_t items = (int64_t)group->n_rows * (group->rank_stride / EIGHT) * group->n_sites;
    dim3 grid((unsigned)((items + THREADS - 1) / THREADS));
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config = sp_cuda_overlapping(grid, THREADS, 0, &overlap, false, stream);

    return cudaLaunchKernelEx(&config,
                              group->type == SP_DTYPE_F16 ? round_kernel<1> : round_kernel<0>,
                              *group, partials_of(group), rounded_of(group));
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
    if (sp_cuda_rounds_xa(group->n_rows, group->rank_stride))
        current.code = sp_cuda_round_xa(group, (cudaStream_t)stream);
    return (int)(current.code != cudaSuccess ? current.code : cudaGetLastError());
}
