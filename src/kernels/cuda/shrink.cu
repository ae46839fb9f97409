/*
 * shrink.cu: xa = x · Aᵀ for a group of sites in one launch, for few rows.
 *
 *     partials[p][row, site * R + c] = sum over the chunks of partial p of x[row, :] · A[slot][c,
 * :]
 *
 * Grid (partials, tiles, sites * ceil(R / 16)), 128 threads. A block takes 16 ranks of one site,
 * the M side of the mma, and a tile of up to 8 rows of one adapter, its N side, over the one chunk
 * (few blocks) or the group of chunks of a partial; its four warps take the four quarters of each
 * chunk. Weights are loaded from global memory into registers in 16-byte vectors: thread t of a
 * group of four holds k = 8t .. 8t + 7 of each 32, on both sides of the mma alike, so neither
 * shared memory nor a shuffle is needed. Bound by the bytes of A; at few rows by latency, so the
 * loads of weights are issued before the wait for the predecessor, and ranks are loaded together
 * with the tile's record, not after it. A block above the slot's own rank exits at once.
 *
 * The launcher chooses between this form and that of shrink_windows.cu, and rounds the sums where
 * the expand reads them so.
 */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/shrink.cuh"

#define L1_CARVEOUT 25 /* per cent of L1 for shared memory */
#define THREADS     128

/* The slot's own rank. `mine` is slot threadIdx.x's, loaded together with the tile's record, if
 * there are at most THREADS slots. */
static __device__ __forceinline__ int own_rank(const sp_cuda_site &site, int slot, int n_slots,
                                               int mine, int *shared)
{
    if (site.rank == NULL)
        return site.one_rank;
    if (n_slots > THREADS)
        return site.rank[slot];
    if ((int)threadIdx.x == slot)
        *shared = mine;
    __syncthreads();
    return *shared;
}

template <int F16, int VEC, int CHUNKS>
__global__ void __launch_bounds__(THREADS)
    shrink_kernel(const __grid_constant__ sp_cuda_group group, int rank_groups, int chunks)
{
    int index = blockIdx.z / rank_groups, rank0 = blockIdx.z % rank_groups * RANKS;
    const sp_cuda_site &site = group.sites[index];
    const sp_cuda_tile *tile = &group.plan.tiles[blockIdx.y];
    int g = (threadIdx.x & 31) >> 2, row = threadIdx.x >> 4, c = threadIdx.x & 15;
    int mine = site.rank != NULL && (int)threadIdx.x < group.n_slots && group.n_slots <= THREADS
                   ? site.rank[threadIdx.x]
                   : 0;
    int slot = tile->slot, count = tile->count, x_row = tile->row[g], out_row = tile->row[row];
    int chunk0 = blockIdx.x * CHUNKS, n_chunks = min(CHUNKS, chunks - chunk0), rank = 0, k, k_end;
    const uint16_t *a = (const uint16_t *)site.a + slot * site.a_slot_stride, *x;
    operands w[CHUNKS > 1 ? 2 : 1];
    float sum;
    __shared__ quarters q[CHUNKS];
    __shared__ int shared_rank;

    if (group.folds == 0)
        release_successor();
    if (count > 0)
        rank = own_rank(site, slot, group.n_slots, mine, &shared_rank);
    if (rank0 >= rank) {
        /* A kernel's completion implies that of all kernels before it, so one block always
         * waits. */
        if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0)
            wait_predecessor();
        return;
    }
    k = chunk0 * SP_CUDA_CHUNK_K + (threadIdx.x >> 5) * QUARTER_K;
    k_end = g < count ? group.k_in : 0;
    load_a<VEC>(&w[0], a, site.a_stride, rank0, rank, k, group.k_in);
    x = (const uint16_t *)group.x + (g < count ? x_row : 0) * group.x_stride;
    if (g < count && VEC)
        prefetch_l2(x + min(k + (int)(threadIdx.x & 3) * 32, group.k_in - 1));
    wait_predecessor();
    if (group.folds != 0)
        release_successor();
    load_x<VEC>(&w[0], x, k, k_end);
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        int next = k + (i + 1) * SP_CUDA_CHUNK_K;

        if (i >= n_chunks)
            break;
        if (i + 1 < CHUNKS && i + 1 < n_chunks) {
            load_a<VEC>(&w[(i + 1) & 1], a, site.a_stride, rank0, rank, next, group.k_in);
            load_x<VEC>(&w[(i + 1) & 1], x, next, k_end);
        }
        multiply<F16>(acc, w[i & 1]);
        keep_quarter(q[i], acc);
    }
    __syncthreads();
    sum = sum_quarters(q[0], row, c);
    for (int i = 1; i < n_chunks; i++)
        sum = sum + sum_quarters(q[i], row, c);
    if (row < count && rank0 + c < ((rank + 3) & ~3))
        group.partials[((int64_t)blockIdx.x * group.n_rows + out_row) *
                           (group.rank_stride * group.n_sites) +
                       index * group.rank_stride + rank0 + c] = sum;
}

template <int F16, int VEC>
static cudaError_t launch(const sp_cuda_group *group, sp_cuda_shrink_choice choice,
                          cudaStream_t stream)
{
    int rank_groups = sp_cuda_ceil(group->rank_stride, RANKS);
    dim3 grid((unsigned)choice.n_partials,
              (unsigned)sp_cuda_tiles_bound(group->n_rows, group->n_slots),
              (unsigned)(group->n_sites * rank_groups));
    cudaLaunchAttribute overlap;
    /* Tiles are read before the wait, so the plan's kernel must be complete. */
    cudaLaunchConfig_t config =
        sp_cuda_overlapping(grid, THREADS, 0, &overlap, group->after_plan != 0, stream);

    return cudaLaunchKernelEx(&config,
                              choice.partial_chunks == 1
                                  ? shrink_kernel<F16, VEC, 1>
                                  : shrink_kernel<F16, VEC, SP_CUDA_GROUP_CHUNKS>,
                              *group, rank_groups, sp_cuda_chunks(group->k_in));
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

static cudaError_t launch_chosen(int gpu, const sp_cuda_group *group, cudaStream_t on,
                                 bool *out_rounded)
{
    bool vec = vectors(group);
    sp_cuda_shrink_choice choice =
        sp_cuda_choose_shrink(group->multiprocessors, group->n_rows, group->n_slots, group->k_in,
                              group->rank_stride, group->n_sites);

    if (vec && choice.window_tiles > 1) {
        cudaError_t code = sp_cuda_shrink_windows(gpu, group, on, out_rounded);

        if (code != cudaErrorNotSupported)
            return code;
    }
    if (group->type == SP_DTYPE_F16)
        return vec ? launch<1, 1>(group, choice, on) : launch<1, 0>(group, choice, on);
    return vec ? launch<0, 1>(group, choice, on) : launch<0, 0>(group, choice, on);
}

extern "C" int sp_cuda_shrink(int gpu, const sp_cuda_group *group, void *stream)
{
    cudaStream_t on = (cudaStream_t)stream;
    sp_cuda_current current(gpu);
    cudaError_t code = current.code;
    bool rounded = false;

    if (code != cudaSuccess || group->n_rows == 0)
        return (int)code;
    code = launch_chosen(gpu, group, on, &rounded);
    if (code == cudaSuccess && !rounded && sp_cuda_rounds_xa(group->n_rows, group->rank_stride))
        code = sp_cuda_round_xa(group, on);
    return (int)code;
}

/* x is read through L1, which the expand ring's carveout would otherwise leave small. */
template <int F16, int VEC, int CHUNKS> static cudaError_t keep_l1(cudaError_t before)
{
    return before != cudaSuccess
               ? before
               : cudaFuncSetAttribute(shrink_kernel<F16, VEC, CHUNKS>,
                                      cudaFuncAttributePreferredSharedMemoryCarveout, L1_CARVEOUT);
}

template <int F16, int VEC> static cudaError_t keep_l1_of(cudaError_t before)
{
    return keep_l1<F16, VEC, 1>(keep_l1<F16, VEC, SP_CUDA_GROUP_CHUNKS>(before));
}

cudaError_t sp_cuda_shrink_init(void)
{
    return keep_l1_of<0, 0>(keep_l1_of<0, 1>(keep_l1_of<1, 0>(keep_l1_of<1, 1>(cudaSuccess))));
}
