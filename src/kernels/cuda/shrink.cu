/*
 * shrink.cu: xa = x · Aᵀ for a group of sites in one launch.
 *
 *     planes[p][row, site * R + c] = sum over the chunks of plane p of x[row, :] · A[slot][c, :]
 *
 * Grid (tiles / tiles_per_block, sites * ceil(R / 16), chunks / chunks_per_block), 128 threads. A
 * block takes 16 ranks of one site, the M side of the mma, against a tile of up to 8 rows of one
 * adapter, its N side; its four warps take the four quarters of each chunk. Weights go from global
 * memory to registers in 16-byte pieces: thread t of a group of four holds k = 8t .. 8t + 7 of each
 * 32, on both sides of the mma alike, so neither shared memory nor a shuffle is needed. Bound by
 * the bytes of A; at few rows by latency, so weights are asked for before the predecessor is
 * waited for, and ranks are looked up beside the tile's record, not after it.
 *
 * Own ranks above the row's end the block at once. Two forms of the same sum: one chunk a block,
 * one plane a chunk (few blocks; ONE: no registers for a next chunk), or all chunks a block and one
 * finished plane.
 */
#include "kernels/cuda/ptx.cuh"

#define THREADS      128
#define ROUND_CHUNKS 8 /* chunks whose quarters wait in shared memory together */
#define QUARTER_K    128
#define RANKS        16
#define RED_PITCH    20 /* floats of one row of quarters: no two of a warp in one bank */

typedef struct weights {
    uint4 low[4], high[4]; /* ranks g and g + 8 */
} weights;

typedef struct quarters {
    float sum[ROUND_CHUNKS][4][SP_CUDA_TILE_ROWS][RED_PITCH];
} quarters;

template <int VEC>
static __device__ __forceinline__ void load_a(weights *w, const uint16_t *a, int64_t stride,
                                              int rank0, int rank, int k, int k_in)
{
    int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;

#pragma unroll
    for (int s = 0; s < 4; s++) {
        int at = k + 32 * s + 8 * t;

        w->low[s] = load_eight<VEC>(a, stride, rank0 + g, at, rank0 + g < rank ? k_in : 0);
        w->high[s] = load_eight<VEC>(a, stride, rank0 + g + 8, at, rank0 + g + 8 < rank ? k_in : 0);
    }
}

template <int F16, int VEC>
static __device__ __forceinline__ void multiply(float *acc, const weights *w, const uint16_t *x,
                                                int k, int k_end)
{
    int t = threadIdx.x & 3;
    uint4 v[4];

#pragma unroll
    for (int s = 0; s < 4; s++)
        v[s] = load_eight_of_row<VEC>(x, k + 32 * s + 8 * t, k_end);
#pragma unroll
    for (int s = 0; s < 4; s++) {
        mma<F16>(acc, w->low[s].x, w->high[s].x, w->low[s].y, w->high[s].y, v[s].x, v[s].y);
        mma<F16>(acc, w->low[s].z, w->high[s].z, w->low[s].w, w->high[s].w, v[s].z, v[s].w);
    }
}

static __device__ __forceinline__ void keep_quarter(quarters *q, int chunk, const float *acc)
{
    int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;

    q->sum[chunk][warp][2 * t][g] = acc[0];
    q->sum[chunk][warp][2 * t + 1][g] = acc[1];
    q->sum[chunk][warp][2 * t][g + 8] = acc[2];
    q->sum[chunk][warp][2 * t + 1][g + 8] = acc[3];
}

/* The own rank of the slot. All ranks are asked for beside the tile's record where they fit. */
static __device__ __forceinline__ int own_rank(const sp_cuda_site *site, int slot, int n_slots,
                                               int mine, int *shared)
{
    if (site->rank == NULL)
        return site->one_rank;
    if (n_slots > THREADS)
        return site->rank[slot];
    if ((int)threadIdx.x == slot)
        *shared = mine;
    __syncthreads();
    return *shared;
}

/* Chunks [chunk0, chunk1) of one tile; afterwards this thread's sum is of (row tid / 16, rank
 * tid % 16). */
template <int F16, int VEC, int ONE>
static __device__ float sum_chunks(const sp_cuda_group &group, const uint16_t *a, int64_t a_stride,
                                   int rank0, int rank, const uint16_t *x, int k_end, int chunk0,
                                   int chunk1, weights *w, quarters *q)
{
    int quarter_k = (threadIdx.x >> 5) * QUARTER_K, row = threadIdx.x >> 4, c = threadIdx.x & 15;
    float sum = 0.0f;

    for (int chunk = chunk0; chunk < chunk1; chunk++) {
        float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        int k = chunk * SP_CUDA_CHUNK_K + quarter_k, in_round = (chunk - chunk0) % ROUND_CHUNKS;
        weights now = *w;

        if (!ONE && chunk + 1 < chunk1)
            load_a<VEC>(w, a, a_stride, rank0, rank, k + SP_CUDA_CHUNK_K, group.k_in);
        multiply<F16, VEC>(acc, &now, x, k, k_end);
        keep_quarter(q, in_round, acc);
        if (!ONE && in_round != ROUND_CHUNKS - 1 && chunk + 1 < chunk1)
            continue;
        __syncthreads();
        for (int i = 0; i <= in_round; i++)
            sum = sum + (((q->sum[i][0][row][c] + q->sum[i][1][row][c]) + q->sum[i][2][row][c]) +
                         q->sum[i][3][row][c]);
        __syncthreads();
    }
    return sum;
}

template <int F16, int VEC, int ONE>
__global__ void __launch_bounds__(THREADS)
    shrink_kernel(const __grid_constant__ sp_cuda_group group, int rank_groups, int tiles_bound,
                  int tiles_per_block, int chunks_per_block, int chunks)
{
    const sp_cuda_site &site = group.sites[blockIdx.y / rank_groups];
    int rank0 = blockIdx.y % rank_groups * RANKS, g = (threadIdx.x & 31) >> 2;
    int chunk0 = blockIdx.z * chunks_per_block, chunk1 = min(chunk0 + chunks_per_block, chunks);
    int first = blockIdx.x * tiles_per_block, last = min(first + tiles_per_block, tiles_bound);
    int mine = site.rank != NULL && (int)threadIdx.x < group.n_slots && group.n_slots <= THREADS
                   ? site.rank[threadIdx.x]
                   : 0;
    int k0 = chunk0 * SP_CUDA_CHUNK_K + (threadIdx.x >> 5) * QUARTER_K;
    bool waited = false;
    __shared__ quarters q;
    __shared__ int shared_rank;

    release_successor();
    for (int i = first; i < last; i++) {
        const sp_cuda_tile *tile = &group.plan.tiles[i];
        int slot = tile->slot, count = tile->count, row = tile->row[g];
        int out_row = tile->row[threadIdx.x >> 4];
        const uint16_t *a = (const uint16_t *)site.a + slot * site.a_slot_stride, *x;
        int rank;
        float sum;
        weights w;

        if (count == 0)
            break;
        __syncthreads(); /* shared_rank is of the tile before until here */
        rank = own_rank(&site, slot, group.n_slots, mine, &shared_rank);
        if (rank0 >= rank)
            continue;
        load_a<VEC>(&w, a, site.a_stride, rank0, rank, k0, group.k_in);
        x = (const uint16_t *)group.x + (g < count ? row : 0) * group.x_stride;
        if (!waited && g < count && VEC)
            prefetch_l2(x + min(k0 + (int)(threadIdx.x & 3) * 32, group.k_in - 1));
        if (!waited)
            wait_predecessor();
        waited = true;
        sum = sum_chunks<F16, VEC, ONE>(group, a, site.a_stride, rank0, rank, x,
                                        g < count ? group.k_in : 0, chunk0, chunk1, &w, &q);
        if ((int)(threadIdx.x >> 4) < count && rank0 + (int)(threadIdx.x & 15) < ((rank + 3) & ~3))
            group
                .planes[((int64_t)blockIdx.z * group.n_rows + out_row) *
                            (group.rank_stride * group.n_sites) +
                        blockIdx.y / rank_groups * group.rank_stride + rank0 + (threadIdx.x & 15)] =
                sum;
    }
    /* A kernel that is done means that all before it are: so one block waits in any case. */
    if (!waited && blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0)
        wait_predecessor();
}

template <int F16, int VEC>
static cudaError_t launch(const sp_cuda_group *group, cudaStream_t stream)
{
    int rank_groups = (group->rank_stride + RANKS - 1) / RANKS,
        chunks = sp_cuda_chunks(group->k_in);
    int tiles = sp_cuda_tiles_bound(group->n_rows, group->n_slots);
    sp_cuda_shrink_choice choice = sp_cuda_choose_shrink(group->n_rows, group->n_slots, group->k_in,
                                                         group->rank_stride, group->n_sites);
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config = {};

    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim =
        dim3((unsigned)((tiles + choice.tiles_per_block - 1) / choice.tiles_per_block),
             (unsigned)(group->n_sites * rank_groups),
             (unsigned)((chunks + choice.chunks_per_block - 1) / choice.chunks_per_block));
    config.blockDim = dim3(THREADS);
    config.stream = stream;
    config.attrs = &overlap;
    /* Tiles are read before the wait, so the plan's own kernel must be over. */
    config.numAttrs = group->after_plan ? 0 : 1;
    return cudaLaunchKernelEx(
        &config,
        choice.chunks_per_block == 1 ? shrink_kernel<F16, VEC, 1> : shrink_kernel<F16, VEC, 0>,
        *group, rank_groups, tiles, choice.tiles_per_block, choice.chunks_per_block, chunks);
}

static bool aligned(const void *memory, int64_t stride)
{
    return (uintptr_t)memory % 16 == 0 && stride % 8 == 0;
}

static bool vectors(const sp_cuda_group *group)
{
    bool all = group->k_in % 8 == 0 && aligned(group->x, group->x_stride);

    for (int i = 0; i < group->n_sites; i++)
        all = all && aligned(group->sites[i].a, group->sites[i].a_stride) &&
              group->sites[i].a_slot_stride % 8 == 0;
    return all;
}

extern "C" int sp_cuda_shrink(int gpu, const sp_cuda_group *group, void *stream)
{
    cudaStream_t on = (cudaStream_t)stream;
    bool vec = vectors(group);
    cudaError_t code = cudaSetDevice(gpu);

    if (code != cudaSuccess || group->n_rows == 0)
        return (int)code;
    if (group->type == SP_DTYPE_F16)
        return (int)(vec ? launch<1, 1>(group, on) : launch<1, 0>(group, on));
    return (int)(vec ? launch<0, 1>(group, on) : launch<0, 0>(group, on));
}
