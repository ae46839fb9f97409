/*
 * shrink_windows.cuh: what the shrinks of many rows share: the rows and ranks that a block has, and
 * the sum over a cluster's blocks, in the order of kernels_cuda.h, as a rounded xa. S, the shape of
 * a block, has tiles, x_rows, groups (of 16 ranks), a_rows, rows, threads, stages and sum_pitch.
 */
#ifndef SP_KERNELS_CUDA_SHRINK_WINDOWS_CUH
#define SP_KERNELS_CUDA_SHRINK_WINDOWS_CUH

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/partials.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/segments.cuh"

#define ROWS        SP_CUDA_TILE_ROWS
#define RANKS       16
#define STAGE_K     128
#define CLUSTER_MAX 8 /* the portable size */

/* sp_cuda_shrink_windows at large ranks through wgmma, which leaves the rounded xa.
 * cudaErrorNotSupported: other ranks or rows, sums that are kept, no bf16, or the GPU or the build
 * has none. gpu is the current one. */
cudaError_t sp_cuda_shrink_wide_sm90a(int gpu, const sp_cuda_group *group, cudaStream_t stream);

/* As the inits of launch.cuh. */
cudaError_t sp_cuda_shrink_wide_sm90a_init(int gpu);

/* 16 ranks of one site. */
typedef struct rank_group {
    int site, rank0, rank; /* rank: the slot's own in that site */
} rank_group;

template <class S> struct window {
    int slot;
    int out_row[S::x_rows]; /* -1: none */
    int n_groups;
    rank_group group[S::groups];
    const uint16_t *source[S::rows]; /* address of a row's k 0 */
};

/* ---- what the block works on --------------------------------------------------------------- */

template <class S>
static __device__ __forceinline__ void read_window(window<S> *win, const sp_cuda_group &group,
                                                   tile_run run)
{
    int i = threadIdx.x / ROWS, j = threadIdx.x % ROWS;

    if (i < S::tiles) {
        const sp_cuda_tile *tile = &group.plan.tiles[run.first + min(i, run.n - 1)];
        int count = tile->count, row = tile->row[j];

        win->out_row[threadIdx.x] = i < run.n && j < count ? row : -1;
        if (threadIdx.x == 0)
            win->slot = tile->slot;
    }
    __syncthreads();
}

/* The slot's own ranks; 0 beyond the last site. */
static __device__ __forceinline__ void load_ranks(int (&rank)[SP_CUDA_SITES_MAX],
                                                  const sp_cuda_group &group, int slot)
{
#pragma unroll
    for (int i = 0; i < SP_CUDA_SITES_MAX; i++) /* independent loads */
        rank[i] = i >= group.n_sites            ? 0
                  : group.sites[i].rank != NULL ? group.sites[i].rank[slot]
                                                : group.sites[i].one_rank;
}

/* This block's share of groups of 16 of these ranks, those of site 0 first. */
template <class S>
static __device__ __forceinline__ void put_groups(window<S> *win,
                                                  const int (&rank)[SP_CUDA_SITES_MAX])
{
    int first = blockIdx.x * S::groups, index = first + (int)threadIdx.x, total = 0;

#pragma unroll
    for (int i = 0; i < SP_CUDA_SITES_MAX; i++) {
        int groups = (rank[i] + RANKS - 1) / RANKS;

        if (threadIdx.x < S::groups && index >= total && index < total + groups)
            win->group[threadIdx.x] = {i, (index - total) * RANKS, rank[i]};
        total += groups;
    }
    if (threadIdx.x == 0)
        win->n_groups = min(max(total - first, 0), (int)S::groups);
    __syncthreads();
}

template <class S>
static __device__ __forceinline__ void list_groups(window<S> *win, const sp_cuda_group &group,
                                                   int slot)
{
    int rank[SP_CUDA_SITES_MAX];

    load_ranks(rank, group, slot);
    put_groups(win, rank);
}

template <class S>
static __device__ __forceinline__ void list_sources(window<S> *win, const sp_cuda_group &group,
                                                    int slot)
{
    for (int i = threadIdx.x; i < S::rows; i += S::threads) {
        /* A row whose product is not stored may be any row. */
        const uint16_t *source = (const uint16_t *)group.x;
        int rank = i - S::x_rows;

        if (rank < 0) {
            source += win->out_row[win->out_row[i] >= 0 ? i : 0] * group.x_stride;
        } else if (rank / RANKS < win->n_groups) {
            rank_group at = win->group[rank / RANKS];
            const sp_cuda_site &site = group.sites[at.site];

            source = (const uint16_t *)site.a + slot * site.a_slot_stride +
                     min(at.rank0 + rank % RANKS, at.rank - 1) * site.a_stride;
        }
        win->source[i] = source;
    }
    __syncthreads();
}

/* Prefetches to L2 the x of the first stages, which may not be read yet. */
template <class S>
static __device__ __forceinline__ void prefetch_x(const window<S> &win, int k0, int k1)
{
    const int line_k = 64;

    for (int i = threadIdx.x; i < S::x_rows * (S::stages - 1) * STAGE_K / line_k; i += S::threads) {
        int k = k0 + i / S::x_rows * line_k;

        if (k < k1)
            prefetch_l2(win.source[i % S::x_rows] + k);
    }
}

/* Without an order of memory: this block has read what others wrote. */
static __device__ __forceinline__ void cluster_arrive_relaxed(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

/* Where a cluster's blocks have the partials of a window: the sums, in their order, become the
 * rounded xa. */
typedef struct rounding {
    uint16_t *xa;       /* NULL: partials go to memory */
    int partials;       /* of the cluster */
    int group_partials; /* to a group of chunks */
} rounding;

/* Four adjacent sums over n partials, in the order of kernels_cuda.h. */
template <int MOST>
static __device__ __forceinline__ float4 sum_of_partials(const float4 (&v)[MOST], int n,
                                                         int group_partials)
{
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f}, group = sum;

#pragma unroll
    for (int p = 0; p < MOST; p++) {
        if (p >= n)
            break;
        if ((p & (group_partials - 1)) != 0) {
            add(&group, v[p]);
            continue;
        }
        if (p == group_partials)
            sum = group;
        else if (p > 0)
            add(&sum, group);
        group = v[p];
    }
    if (n <= group_partials)
        return group;
    add(&sum, group);
    return sum;
}

/* Rounds `items` fours of sums of the window from row `first` on. The cluster has at most MOST
 * partials, each block EACH of them; a thread loads NOW fours together. */
template <int F16, int EACH, int MOST, int NOW, class S>
static __device__ __forceinline__ void round_items(const float *from, int apart,
                                                   const window<S> &win, const sp_cuda_group &group,
                                                   const rounding &how, int first, int items,
                                                   int thread, int threads)
{
    const int fours = S::a_rows / 4;

    for (int item0 = thread; item0 < items; item0 += threads * NOW) {
        float4 v[NOW][MOST];

#pragma unroll
        for (int j = 0; j < NOW; j++) {
            int item = min(item0 + j * threads, items - 1);
            const float *at = from + (first + item / fours) * S::sum_pitch + item % fours * 4;

#pragma unroll
            for (int p = 0; p < MOST; p++)
                v[j][p] =
                    load_floats_of_block(at + p % EACH * apart, min(p, how.partials - 1) / EACH);
        }
#pragma unroll
        for (int j = 0; j < NOW; j++) {
            int item = item0 + j * threads, row = first + item / fours, rank = item % fours * 4;
            int out = item < items ? win.out_row[row] : -1;
            rank_group at = win.group[min(rank / RANKS, win.n_groups - 1)];
            int c = at.rank0 + rank % RANKS, left = at.rank - c;
            float4 sum = sum_of_partials<MOST>(v[j], how.partials, how.group_partials);

            if (out >= 0 && rank / RANKS < win.n_groups && c < ((at.rank + 7) & ~7))
                *(uint2 *)(how.xa + (int64_t)out * (group.rank_stride * group.n_sites) +
                           at.site * group.rank_stride + c) =
                    make_uint2(narrow_two<F16>(left > 0 ? sum.x : 0.0f, left > 1 ? sum.y : 0.0f),
                               narrow_two<F16>(left > 2 ? sum.z : 0.0f, left > 3 ? sum.w : 0.0f));
        }
    }
}

/* Each block of the cluster rounds a part of the window's rows, by so many of its threads; the
 * others only take part in the two barriers. */
template <int F16, int EACH, class S>
static __device__ __forceinline__ void round_sums(const float *from, int apart,
                                                  const window<S> &win, const sp_cuda_group &group,
                                                  const rounding &how, int thread, int threads)
{
    const int fours = S::a_rows / 4;
    int n = gridDim.y, first = S::x_rows * blockIdx.y / n;
    int items = (S::x_rows * ((int)blockIdx.y + 1) / n - first) * fours;

    cluster_arrive();
    cluster_wait();
    if (how.partials <= 2)
        round_items<F16, EACH, 2, 4>(from, apart, win, group, how, first, items, thread, threads);
    else if (how.partials <= 4)
        round_items<F16, EACH, 4, 2>(from, apart, win, group, how, first, items, thread, threads);
    else
        round_items<F16, EACH, CLUSTER_MAX, 2>(from, apart, win, group, how, first, items, thread,
                                               threads);
    __syncwarp();
    cluster_arrive_relaxed(); /* the others may read this block's */
    cluster_wait();
}

#endif
