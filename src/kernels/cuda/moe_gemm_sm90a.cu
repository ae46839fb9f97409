/*
 * moe_gemm_sm90a.cu: the GEMMs of experts with many rows each, through wgmma, with the bits of
 * moe_gemm.cu.
 *
 * A tile is an item, up to 192 rows of one expert, by 192 columns of one map, over all of k in
 * stages of 64. Bound by what L2 delivers and by the bytes of w: the tile is as large as the
 * registers allow, and w is read once for each expert that has no more rows. Blocks are persistent,
 * one on a multiprocessor. One warpgroup gathers x and copies w by cp.async into a ring, in the
 * 128-byte swizzle; three multiply 64 rows each, or none where the item has fewer. The ring runs on
 * into the next tile while the sums of the last one are stored.
 */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ops_cuda.h"
#include "kernels/cuda/wgmma.cuh"

#define STAGE_K     64
#define PIECES      (STAGE_K / 8) /* of 16 bytes in a row of a stage */
#define ROW_BYTES   (STAGE_K * 2)
#define WARPGROUP   128
#define CONSUMERS   3 /* warpgroups */
#define ROWS        SP_CUDA_EXPERT_ROWS_MAX
#define COLUMNS     192
#define STAGES      4
#define THREADS     ((1 + CONSUMERS) * WARPGROUP)
#define X_BYTES     (ROWS * ROW_BYTES)
#define STAGE_BYTES (X_BYTES + COLUMNS * ROW_BYTES) /* x, then w */
#define SHARED      (STAGES * STAGE_BYTES + 2 * STAGES * 8)
#define ROW_STEP    (WARPGROUP / PIECES) /* rows between two that a loader copies */
#define X_COPIES    (ROWS / ROW_STEP)
#define W_COPIES    (COLUMNS / ROW_STEP)

static_assert(ROWS == CONSUMERS * 64, "a warpgroup multiplies 64 rows");
static_assert(ROW_STEP % 8 == 0, "the rows of a loader have one swizzle");

/* Tiles of columns, those of the first map up to `end`. */
typedef struct wide_shape {
    int end, columns, k_stages;
} wide_shape;

/* 1 where this object has the kernel for the GPU at hand. */
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__device__ int expert_wide_is_built = 1;
#else
__device__ int expert_wide_is_built = 0;
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* A thread's position in the ring. */
struct wide_ring {
    uint32_t base;
    int stage, parity;

    __device__ uint32_t data(void) const
    {
        return base + stage * STAGE_BYTES;
    }
    __device__ uint32_t full(void) const
    {
        return base + STAGES * STAGE_BYTES + stage * 8;
    }
    __device__ uint32_t empty(void) const
    {
        return full() + STAGES * 8;
    }
    __device__ void advance(void)
    {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

typedef struct wide_tile {
    int64_t first; /* place of the item's first row */
    int count, expert, output, n0;
} wide_tile;

static __device__ __forceinline__ wide_tile tile_of(const sp_cuda_expert_gemm &g,
                                                    const wide_shape &s, int number)
{
    int item = number / s.columns, column = number % s.columns, output = column >= s.end;
    sp_cuda_item head = g.items.item[item];

    return {(int64_t)item * ROWS, head.count, head.expert, output,
            (column - output * s.end) * COLUMNS};
}

/* ---- loaders ------------------------------------------------------------------------------- */

/* This thread's rows of x, one in ROW_STEP: 16-byte pieces from x; -1: no such row. */
static __device__ __forceinline__ void find_rows(int (&from)[X_COPIES],
                                                 const sp_cuda_expert_gemm &g,
                                                 const wide_tile &tile)
{
    const int32_t *rows = (g.x_by_token ? g.items.token : g.items.row) + tile.first;
    int row = threadIdx.x / PIECES, stride = (int)(g.x_stride / 8);

#pragma unroll
    for (int i = 0; i < X_COPIES; i++)
        from[i] = row + i * ROW_STEP < tile.count ? rows[row + i * ROW_STEP] * stride : -1;
}

/* A stage; elements beyond k are zeros, rows that are not there stay what they are. */
static __device__ __forceinline__ void copy_stage(uint32_t to, const int (&from)[X_COPIES],
                                                  const uint16_t *x, const uint16_t *w, int w_rows,
                                                  int k_left, int64_t k)
{
    int row = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
    bool valid = piece * 8 < k_left;

    to += row * ROW_BYTES + ((piece ^ (row & 7)) << 4);
#pragma unroll
    for (int i = 0; i < X_COPIES; i++)
        if (from[i] >= 0)
            copy_async_if(to + i * ROW_STEP * ROW_BYTES, x + (int64_t)from[i] * 8, valid);
#pragma unroll
    for (int i = 0; i < W_COPIES; i++)
        if (row + i * ROW_STEP < w_rows)
            copy_async_if(to + X_BYTES + i * ROW_STEP * ROW_BYTES, w + i * ROW_STEP * k, valid);
}

static __device__ __forceinline__ void load_all(wide_ring at, const sp_cuda_expert_gemm &g,
                                                const wide_shape &s, int tiles)
{
    int row = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;

#pragma unroll 1
    for (int number = (int)blockIdx.x; number < tiles; number += (int)gridDim.x) {
        wide_tile tile = tile_of(g, s, number);
        const sp_cuda_expert_output &out = g.outputs[tile.output];
        const uint16_t *x = (const uint16_t *)g.x + piece * 8;
        const uint16_t *w =
            (const uint16_t *)out.w[tile.expert] + (int64_t)(tile.n0 + row) * g.k + piece * 8;
        int from[X_COPIES];

        find_rows(from, g, tile);
#pragma unroll 1
        for (int k = 0; k < g.k; k += STAGE_K, at.advance()) {
            barrier_wait(at.empty(), at.parity ^ 1);
            copy_stage(at.data(), from, x + k, w + k, out.n - tile.n0, g.k - k, g.k);
            barrier_arrive_after_copies(at.full());
        }
    }
}

/* ---- consumers ----------------------------------------------------------------------------- */

/* x and w: this warpgroup's operands of a stage, which copies of other threads filled. */
static __device__ __forceinline__ void multiply_stage(float *sum, uint32_t x, uint32_t w)
{
    uint64_t a = wgmma_operand(x), b = wgmma_operand(w);

    copies_before_bulk();
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STAGE_K / 16; step++)
        wgmma<COLUMNS>(sum, a + 2 * step, b + 2 * step);
    wgmma_commit();
}

static __device__ __forceinline__ void release_stage(uint32_t empty)
{
    if ((threadIdx.x & 31) == 0)
        barrier_arrive(empty);
}

/* A row's 16 columns from y on: neighbours swap halves, so that each lane stores four adjacent
 * outputs and a quad whole sectors. */
static __device__ __forceinline__ void store_sixteen(uint16_t *y, const float *sum, int half)
{
    int lane = threadIdx.x & 31;
    uint32_t low = narrow_two<0>(sum[2 * half], sum[2 * half + 1]);
    uint32_t high = narrow_two<0>(sum[4 + 2 * half], sum[4 + 2 * half + 1]);
    uint32_t other = __shfl_xor_sync(~0u, lane & 1 ? low : high, 1);

    if (y != NULL)
        *(uint2 *)(y + (lane & 1) * 8 + (lane & 2) * 2) =
            lane & 1 ? make_uint2(other, high) : make_uint2(low, other);
}

/* Two adjacent columns of a row, as far as there are any. */
static __device__ __forceinline__ void store_each(uint16_t *y, int n, int end, float low,
                                                  float high)
{
    if (n < end)
        y[n] = narrow<0>(low);
    if (n + 1 < end)
        y[n + 1] = narrow<0>(high);
}

static __device__ __forceinline__ void store_sums(const float *sum, const sp_cuda_expert_gemm &g,
                                                  const wide_tile &tile)
{
    const sp_cuda_expert_output &out = g.outputs[tile.output];
    int lane = threadIdx.x & 31, in_group = (int)threadIdx.x - WARPGROUP;
    bool whole = tile.n0 + COLUMNS <= out.n && out.y_stride % 4 == 0 && (uintptr_t)out.y % 8 == 0;

#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = in_group / 32 * 16 + lane / 4 + half * 8;
        bool mine = row < tile.count;
        int64_t to = mine ? g.items.row[tile.first + row] : 0;
        uint16_t *y = (uint16_t *)out.y + to * out.y_stride;

#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j += 2) {
            const float *v = sum + 4 * j;
            int n = tile.n0 + j * 8;

            if (whole) {
                store_sixteen(mine ? y + n : NULL, v, half);
            } else if (mine) {
                n += lane % 4 * 2;
                store_each(y, n, out.n, v[2 * half], v[2 * half + 1]);
                store_each(y, n + 8, out.n, v[4 + 2 * half], v[5 + 2 * half]);
            }
        }
    }
}

/* The stages of a tile; a warpgroup without rows only lets them pass. */
static __device__ __forceinline__ void multiply_tile(float *sum, wide_ring *at, int k_stages,
                                                     bool any)
{
    uint32_t x = ((int)threadIdx.x / WARPGROUP - 1) * 64 * ROW_BYTES;
    uint32_t read = 0; /* empty barrier of the stage that the wgmma in flight reads */

    if (!any) {
        for (int i = 0; i < k_stages; i++, at->advance()) {
            barrier_wait(at->full(), at->parity);
            release_stage(at->empty());
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++)
        sum[i] = 0.0f;
    for (int i = 0; i < k_stages; i++, at->advance()) {
        barrier_wait(at->full(), at->parity);
        multiply_stage(sum, at->data() + x, at->data() + X_BYTES);
        wgmma_wait<1>();
        if (i > 0)
            release_stage(read);
        read = at->empty();
    }
    wgmma_wait<0>();
    release_stage(read);
}

static __device__ __forceinline__ void multiply_all(wide_ring at, const sp_cuda_expert_gemm &g,
                                                    const wide_shape &s, int tiles)
{
    int row0 = ((int)threadIdx.x / WARPGROUP - 1) * 64;
    float sum[COLUMNS / 2];

#pragma unroll 1
    for (int number = (int)blockIdx.x; number < tiles; number += (int)gridDim.x) {
        wide_tile tile = tile_of(g, s, number);
        bool any = row0 < tile.count;

        multiply_tile(sum, &at, s.k_stages, any);
        if (any)
            store_sums(sum, g, tile);
    }
}

static __device__ __forceinline__ void init_barriers(wide_ring at)
{
    for (; at.parity == 0; at.advance()) {
        barrier_init(at.full(), WARPGROUP);
        barrier_init(at.empty(), CONSUMERS * WARPGROUP / SP_WARP);
    }
}

#endif

__global__ void __launch_bounds__(THREADS, 1)
    expert_wide_kernel(const __grid_constant__ sp_cuda_expert_gemm g,
                       const __grid_constant__ wide_shape s)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) char memory[];
    wide_ring ring = {shared_address(memory), 0, 0};
    int tiles;

    release_successor();
    if (threadIdx.x == 0)
        init_barriers(ring);
    __syncthreads();
    wait_predecessor();
    tiles = g.items.counts[0] * s.columns;
    if (threadIdx.x < WARPGROUP) {
        registers_down_to<40>();
        load_all(ring, g, s, tiles);
    } else {
        registers_up_to<152>();
        multiply_all(ring, g, s, tiles);
    }
#endif
}

/* ---- launch -------------------------------------------------------------------------------- */

static bool taken_on[SP_CUDA_GPUS_MAX]; /* GPUs whose object has the kernel */
static int blocks_on[SP_CUDA_GPUS_MAX];

cudaError_t sp_cuda_expert_gemm_wide(int gpu, const sp_cuda_expert_gemm *gemm, cudaStream_t stream)
{
    wide_shape shape = {sp_cuda_ceil(gemm->outputs[0].n, COLUMNS), 0,
                        sp_cuda_ceil(gemm->k, STAGE_K)};
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config;
    int64_t most;

    if (!taken_on[gpu] || gemm->items.item_rows != ROWS)
        return cudaErrorNotSupported;
    shape.columns =
        shape.end + (gemm->n_outputs > 1 ? sp_cuda_ceil(gemm->outputs[1].n, COLUMNS) : 0);
    most = (int64_t)gemm->items.bound * shape.columns;
    config = sp_cuda_overlapping(dim3((unsigned)(most < blocks_on[gpu] ? most : blocks_on[gpu])),
                                 THREADS, SHARED, &overlap, false, stream);
    return cudaLaunchKernelEx(&config, expert_wide_kernel, *gemm, shape);
}

cudaError_t sp_cuda_expert_gemm_wide_init(int gpu)
{
    int major = 0, minor = 0, built = 0, bytes = 0;
    cudaError_t code = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, gpu);

    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, gpu);
    if (code != cudaSuccess || major != 9 || minor != 0)
        return code;
    code = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, gpu);
    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&blocks_on[gpu], cudaDevAttrMultiProcessorCount, gpu);
    if (code == cudaSuccess)
        code = cudaMemcpyFromSymbol(&built, expert_wide_is_built, sizeof built);
    if (code != cudaSuccess || !built || bytes < SHARED)
        return code;
    code = cudaFuncSetAttribute(expert_wide_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                SHARED);
    taken_on[gpu] = code == cudaSuccess;
    return code;
}
