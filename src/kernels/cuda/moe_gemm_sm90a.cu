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

/* What a loader needs of a tile. from: its rows of x, one in ROW_STEP, in 16-byte pieces from x;
 * -1: no such row. */
typedef struct wide_source {
    const uint16_t *w; /* its first row and piece of w */
    int w_rows;        /* from there on */
    int from[X_COPIES];
} wide_source;

static __device__ __forceinline__ wide_source source_of(const sp_cuda_expert_gemm &g,
                                                        const wide_shape &s, int number, int tiles)
{
    int row = threadIdx.x / PIECES, piece = threadIdx.x % PIECES, stride = (int)(g.x_stride / 8);
    wide_source source = {};

    if (number < tiles) {
        wide_tile tile = tile_of(g, s, number);
        const sp_cuda_expert_output &out = g.outputs[tile.output];
        const int32_t *rows = (g.x_by_token ? g.items.token : g.items.row) + tile.first + row;

#pragma unroll
        for (int i = 0; i < X_COPIES; i++)
            source.from[i] = row + i * ROW_STEP < tile.count ? rows[i * ROW_STEP] * stride : -1;
        source.w =
            (const uint16_t *)out.w[tile.expert] + (int64_t)(tile.n0 + row) * g.k + piece * 8;
        source.w_rows = out.n - tile.n0 - row;
    }
    return source;
}

/* A stage; elements beyond k are zeros, rows that are not there stay what they are. */
static __device__ __forceinline__ void copy_stage(uint32_t to, const wide_source &source,
                                                  const uint16_t *x, int k, int k_end)
{
    int row = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
    bool valid = k + piece * 8 < k_end;

    to += row * ROW_BYTES + ((piece ^ (row & 7)) << 4);
#pragma unroll
    for (int i = 0; i < X_COPIES; i++)
        if (source.from[i] >= 0)
            copy_async_if(to + i * ROW_STEP * ROW_BYTES, x + (int64_t)source.from[i] * 8 + k,
                          valid);
#pragma unroll
    for (int i = 0; i < W_COPIES; i++)
        if (i * ROW_STEP < source.w_rows)
            copy_async_if(to + X_BYTES + i * ROW_STEP * ROW_BYTES,
                          source.w + i * ROW_STEP * (int64_t)k_end + k, valid);
}

/* The next tile's rows are read while this one's are copied. */
static __device__ __forceinline__ void load_all(wide_ring at, const sp_cuda_expert_gemm &g,
                                                const wide_shape &s, int tiles)
{
    const uint16_t *x = (const uint16_t *)g.x + threadIdx.x % PIECES * 8;
    int number = (int)blockIdx.x;
    wide_source source = source_of(g, s, number, tiles);

#pragma unroll 1
    while (number < tiles) {
        wide_source next;

        number += (int)gridDim.x;
        next = source_of(g, s, number, tiles);
#pragma unroll 1
        for (int k = 0; k < g.k; k += STAGE_K, at.advance()) {
            barrier_wait(at.empty(), at.parity ^ 1);
            copy_stage(at.data(), source, x, k, g.k);
            barrier_arrive_after_copies(at.full());
        }
        source = next;
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

/* A row's 32 columns from y on, of which lane t of four has the columns 8 q + 2 t and the next in
 * sum[4 q], half 0 or 1: the lanes transpose them, and each stores eight adjacent outputs. All four
 * call it; y NULL: nothing is stored. */
static __device__ __forceinline__ void store_columns(uint16_t *y, const float *sum, int half)
{
    int t = threadIdx.x & 3;
    bool odd = t & 1, upper = t & 2;
    uint32_t two[4], low[2], high[2], other[2];

#pragma unroll
    for (int q = 0; q < 4; q++)
        two[q] = narrow_two<0>(sum[4 * q + 2 * half], sum[4 * q + 2 * half + 1]);
    other[0] = __shfl_xor_sync(~0u, odd ? two[0] : two[1], 1);
    other[1] = __shfl_xor_sync(~0u, odd ? two[2] : two[3], 1);
    low[0] = odd ? other[0] : two[0];
    low[1] = odd ? two[1] : other[0];
    high[0] = odd ? other[1] : two[2];
    high[1] = odd ? two[3] : other[1];
#pragma unroll
    for (int i = 0; i < 2; i++)
        other[i] = __shfl_xor_sync(~0u, upper ? low[i] : high[i], 2);
    if (y != NULL)
        *(uint4 *)(y + 8 * t) = upper ? make_uint4(other[0], other[1], high[0], high[1])
                                      : make_uint4(low[0], low[1], other[0], other[1]);
}

/* The same columns where they are not aligned, or end before the 32nd. */
static __device__ __forceinline__ void store_each(uint16_t *y, const float *sum, int half,
                                                  int columns)
{
    int t = threadIdx.x & 3;

#pragma unroll
    for (int q = 0; q < 4; q++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (y != NULL && 8 * q + 2 * t + i < columns)
                y[8 * q + 2 * t + i] = narrow<0>(sum[4 * q + 2 * half + i]);
}

/* This thread's two rows of a tile in y; -1: no such row. */
typedef struct wide_rows {
    int row[2];
} wide_rows;

static __device__ __forceinline__ wide_rows rows_of(const sp_cuda_expert_gemm &g,
                                                    const wide_tile &tile)
{
    int in_group = (int)threadIdx.x - WARPGROUP, lane = threadIdx.x & 31;
    wide_rows rows;

#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = in_group / 32 * 16 + lane / 4 + half * 8;

        rows.row[half] = row < tile.count ? g.items.row[tile.first + row] : -1;
    }
    return rows;
}

static __device__ __forceinline__ void store_sums(const float *sum, const sp_cuda_expert_gemm &g,
                                                  const wide_tile &tile, const wide_rows &rows)
{
    const sp_cuda_expert_output &out = g.outputs[tile.output];
    bool aligned = out.y_stride % 8 == 0 && (uintptr_t)out.y % 16 == 0;

#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint16_t *y = rows.row[half] < 0 ? NULL : (uint16_t *)out.y + rows.row[half] * out.y_stride;

#pragma unroll
        for (int j = 0; j < COLUMNS / 32; j++) {
            int n = tile.n0 + j * 32;
            uint16_t *to = y == NULL ? NULL : y + n;

            if (aligned && n + 32 <= out.n)
                store_columns(to, sum + 16 * j, half);
            else
                store_each(to, sum + 16 * j, half, out.n - n);
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

/* Where a tile goes is read before it is multiplied, so that nothing waits for it. */
static __device__ __forceinline__ void multiply_all(wide_ring at, const sp_cuda_expert_gemm &g,
                                                    const wide_shape &s, int tiles)
{
    int row0 = ((int)threadIdx.x / WARPGROUP - 1) * 64;
    float sum[COLUMNS / 2];

#pragma unroll 1
    for (int number = (int)blockIdx.x; number < tiles; number += (int)gridDim.x) {
        wide_tile tile = tile_of(g, s, number);
        wide_rows rows = rows_of(g, tile);
        bool any = row0 < tile.count;

        multiply_tile(sum, &at, s.k_stages, any);
        if (any)
            store_sums(sum, g, tile, rows);
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
        registers_down_to<64>();
        load_all(ring, g, s, tiles);
    } else {
        registers_up_to<144>();
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
