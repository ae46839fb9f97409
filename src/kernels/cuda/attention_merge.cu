/*
 * attention_merge.cu: folds the partial results of query tiles that were split, writes zeros to the
 * launched rows that the step does not have, and sets the cores' queues back.
 *
 * Grid: any number of blocks of D threads, one thread per dimension; a block takes rows and q heads
 * in turn. The running maximum of the chunks is exact, so a scan gives what the serial fold has,
 * and the fold itself is a chain in ascending order. Bound by latency where it matters, in a step
 * of few rows: many loads are in flight before the first is folded.
 */
#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/launch.cuh"

#define ENTRIES 256 /* that are scanned at a time */
#define AHEAD   32  /* loads in flight */

typedef struct merge_shared {
    fold_scale by[ENTRIES];
    float l[ENTRIES];
    float carry; /* maximum of the entries before */
} merge_shared;

/* A row and head: where its partial results are, and where y is. */
typedef struct merge_row {
    const float2 *m; /* of entry 0; entries are `stride` rows apart */
    const float *o;
    int64_t stride;
    int entries;
    uint16_t *y;
} merge_row;

/* Task `task` of a core: row of a split tile, q head. */
static __device__ __forceinline__ merge_row find_row(const attention_args &args,
                                                     const attention_core &core, int task,
                                                     int page_dim)
{
    const sp_cuda_attention_shape &shape = args.a.shape;
    int2 at = core.split_rows[task / shape.q_heads];
    attention_split split = core.splits[at.x];
    int head = task % shape.q_heads, chunks = (split.position + at.y) / ATTENTION_CHUNK + 1;
    int64_t row = split.partial + (int64_t)(head / args.group) * split.stride + at.y * args.group +
                  head % args.group;
    merge_row to;

    to.m = core.partial_m + row;
    to.o = core.partial_o + row * page_dim;
    to.stride = (int64_t)split.rows * args.group;
    to.entries = 1 + max(0, chunks - split.prefix);
    to.y = (uint16_t *)args.a.y +
           ((int64_t)(split.row + at.y) * shape.q_heads + head) * shape.head_dim;
    return to;
}

/* By one warp: how entries first .. first + n - 1 are folded. The fold begins with entry 0 itself,
 * which is the same as its fold with nothing. */
static __device__ __forceinline__ void scan_maxima(const merge_row &row, int first, int n,
                                                   float scale, merge_shared *shared)
{
    int lane = threadIdx.x;
    float carry = first == 0 ? -INFINITY : shared->carry;

    for (int e0 = 0; e0 < n; e0 += SP_WARP) {
        int e = e0 + lane;
        float2 own = e < n ? row.m[(first + e) * row.stride] : make_float2(-INFINITY, 0.0f);
        float most = own.x, before;

#pragma unroll
        for (int d = 1; d < SP_WARP; d *= 2) {
            float other = __shfl_up_sync(~0u, most, d);

            most = lane >= d ? fmaxf(most, other) : most;
        }
        most = fmaxf(most, carry);
        before = __shfl_up_sync(~0u, most, 1);
        before = lane == 0 ? carry : before;
        carry = __shfl_sync(~0u, most, SP_WARP - 1);
        if (e < n) {
            shared->by[e] = {rescale(before, most, scale), rescale(own.x, most, scale)};
            shared->l[e] = own.y;
        }
    }
    if (lane == 0)
        shared->carry = carry;
}

/* Entries from `begin` on, of which `n` are scanned; AHEAD of them are loaded while as many are
 * folded. */
template <int D>
static __device__ __forceinline__ void fold_entries(const float *o, int64_t stride, int begin,
                                                    int n, const merge_shared *shared, float *sum,
                                                    float *l)
{
    float now[AHEAD], next[AHEAD];

#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        now[i] = begin + i < n ? o[(begin + i) * stride * D] : 0.0f;
    for (int e = begin; e < n; e += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            next[i] = e + AHEAD + i < n ? o[(e + AHEAD + i) * stride * D] : 0.0f;
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (e + i < n) {
                fold_scale by = shared->by[e + i];

                *sum = fold(*sum, by.sum, now[i], by.chunk);
                *l = fold(*l, by.sum, shared->l[e + i], by.chunk);
            }
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            now[i] = next[i];
    }
}

template <int D>
static __device__ __forceinline__ void merge(const attention_args &args, const merge_row &row,
                                             merge_shared *shared)
{
    const float *o = row.o + threadIdx.x;
    float sum = 0.0f, l = 0.0f;

    for (int first = 0; first < row.entries; first += ENTRIES) {
        int n = min(row.entries - first, ENTRIES);

        __syncthreads();
        if (threadIdx.x < SP_WARP)
            scan_maxima(row, first, n, args.scale, shared);
        __syncthreads();
        if (first == 0) {
            sum = o[0];
            l = shared->l[0];
        }
        fold_entries<D>(o + first * row.stride * D, row.stride, first == 0 ? 1 : 0, n, shared, &sum,
                        &l);
    }
    if ((int)threadIdx.x < args.a.shape.head_dim)
        row.y[threadIdx.x] = narrow<0>(__fmul_rn(sum, reciprocal(l)));
}

static __device__ __forceinline__ void zero_rows(const attention_args &args)
{
    const sp_cuda_attention &a = args.a;
    int64_t pieces = (int64_t)a.shape.q_heads * a.shape.head_dim / 8; /* of 16 bytes, of a row */
    uint4 *y = (uint4 *)a.y + min(a.step.counts[0], a.step.rows) * pieces;
    uint4 *end = (uint4 *)a.y + a.step.rows * pieces;

    for (y += blockIdx.x * blockDim.x + threadIdx.x; y < end; y += gridDim.x * blockDim.x)
        *y = make_uint4(0, 0, 0, 0);
}

/* The plan is complete when the predecessor runs, so it is read before the wait. */
template <int D>
__global__ void __launch_bounds__(D)
    attention_merge_kernel(const __grid_constant__ attention_args args)
{
    __shared__ merge_shared shared;
    int q_heads = args.a.shape.q_heads, narrow_tasks = args.core[0].counts->split_rows * q_heads;
    int tasks = narrow_tasks, task = (int)blockIdx.x;

    if (args.n_cores > 1)
        tasks += args.core[1].counts->split_rows * q_heads;
    wait_predecessor();
    release_successor();
    if (blockIdx.x == 0 && (int)threadIdx.x < args.n_cores)
        args.core[threadIdx.x].counts->taken = 0;
    zero_rows(args);
    for (; task < tasks; task += (int)gridDim.x) {
        bool wide = task >= narrow_tasks;

        merge<D>(args, find_row(args, args.core[wide], wide ? task - narrow_tasks : task, D),
                 &shared);
    }
}

typedef void merge_fn(const attention_args args);

cudaError_t sp_cuda_attention_merge(const attention_args *args, int blocks, cudaStream_t stream)
{
    int dim = sp_cuda_page_dim(args->a.shape.head_dim);
    merge_fn *kernel = dim == 64    ? attention_merge_kernel<64>
                       : dim == 128 ? attention_merge_kernel<128>
                                    : attention_merge_kernel<256>;
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config =
        sp_cuda_overlapping(dim3((unsigned)blocks), dim, 0, &overlap, false, stream);

    return cudaLaunchKernelEx(&config, kernel, *args);
}
