/*
 * grouped.cu: output += scale · (input · A) · B for rows in segments, FP16, A [in, S], B [S, out].
 *
 *     xa[row, c] = f16(sum of 16 warps in order), c below the adapter's own rank
 *     y[row, j]  = f16(fmaf(scale, (float)f16(xa[row, :] · B[:, j]), y[row, j]))
 *
 * A tile is at most 8 consecutive rows of one segment: tile t of segment g has the number
 * offset[g] / 8 + g + t, so a block finds its segment by a search in the offsets and no list of
 * tiles is needed; numbers between two segments' have no rows. Weights are the M side of the mma,
 * rows its N side. Both factors have the summed index outside, so they pass through shared memory
 * once and are transposed by ldmatrix.trans. Shrink: grid (tiles, ceil(S / 16)), the 16 warps of a
 * block split k. Expand: grid (ceil(out / 128), tiles / tiles_per_block), 8 warps of 16 columns.
 * Bound by the bytes of A and B (decode) or y (prefill). Elements outside the adapter's own rank
 * may be NaN: they are replaced by zeros before they reach an mma.
 */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"

#define ROWS            SP_CUDA_TILE_ROWS
#define SHRINK_WARPS    16
#define SLICE_K         32
#define STEP_K          (SHRINK_WARPS * SLICE_K)
#define SLICES_NOW      1  /* of a warp that are loaded ahead; 4 measured slower everywhere */
#define SLICE_PITCH     24 /* halves: eight rows of 48 bytes fall into different banks */
#define EXPAND_THREADS  256
#define COLUMNS         128
#define B_RANKS         64 /* ranks of B in shared memory at a time */
#define B_PITCH         (COLUMNS + 8)
#define XA_PITCH        (B_RANKS + 8)
#define PREFILL_ROWS    256
#define TILES_PER_BLOCK 8 /* of the expand, above PREFILL_ROWS */

typedef struct group_tile {
    int row, count, adapter, rank;
    float scale;
} group_tile;

/* A tile without rows has count 0, also where the metadata is invalid. */
static __device__ group_tile find_tile(const sp_cuda_grouped &g, int number)
{
    int low = 0, high = g.n_segments - 1, begin, end, adapter, row;
    group_tile none = {0, 0, 0, 0, 0.0f};

    while (low < high) {
        int middle = (low + high + 1) / 2;

        if (g.segment_offsets[middle] / ROWS + middle <= number)
            low = middle;
        else
            high = middle - 1;
    }
    begin = g.segment_offsets[low];
    end = g.segment_offsets[low + 1];
    adapter = g.segment_adapters[low];
    row = begin + (number - begin / ROWS - low) * ROWS;
    if (begin < 0 || end > g.total_rows || row < begin || row >= end || adapter < 0 ||
        adapter >= g.n_adapters)
        return none;
    return {row, min(ROWS, end - row), adapter, min(g.ranks[adapter], g.max_rank),
            g.scales[adapter]};
}

/* The M operand of one mma from [k, m] storage: four 8 x 8 matrices, transposed on load. */
static __device__ __forceinline__ void load_transposed(uint32_t *a, const uint16_t *row)
{
    uint32_t at = (uint32_t)__cvta_generic_to_shared(row);

    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(at)
                 : "memory");
}

/* Eight elements of one row; those at and beyond `keep` are zeros. */
template <int VEC> static __device__ __forceinline__ uint4 load_kept(const uint16_t *from, int keep)
{
    union {
        uint4 all;
        uint16_t one[8];
    } v;

    v.all = make_uint4(0, 0, 0, 0);
    if (keep <= 0)
        return v.all;
    if (VEC)
        v.all = load_weights(from);
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (!VEC && i < keep)
            v.one[i] = from[i];
        else if (i >= keep)
            v.one[i] = 0;
    return v.all;
}

/* ---- shrink -------------------------------------------------------------------------------- */

/* The row where k of a slice is stored, so that lane t gets k = 8t .. 8t + 7, as in its x. */
static __device__ __forceinline__ int slice_row(int k)
{
    return (k >> 2 & 1) * 16 + (k >> 1 & 1) * 8 + (k >> 3) * 2 + (k & 1);
}

/* One slice of a warp: 16 ranks of row k0 + lane, and lane t's part of row g of x. */
typedef struct slice_part {
    uint4 low, high, x;
} slice_part;

template <int A_VEC, int X_VEC>
static __device__ __forceinline__ slice_part load_slice(const sp_cuda_grouped &g, const uint16_t *a,
                                                        const uint16_t *x, bool has_row, int keep,
                                                        int k0)
{
    int lane = threadIdx.x & 31, k = k0 + lane;
    const uint16_t *from = a + (int64_t)k * g.rank_stride;

    keep = k < g.input_size ? keep : 0;
    return {load_kept<A_VEC>(from, keep), load_kept<A_VEC>(from + 8, keep - 8),
            load_eight_of_row<X_VEC>(x, k0 + 8 * (lane & 3), has_row ? g.input_size : 0)};
}

static __device__ __forceinline__ void add_slice(float *acc, uint16_t *slice,
                                                 const slice_part &part)
{
    int lane = threadIdx.x & 31;
    /* Lanes 0-7 address the rows of matrix 0 (m 0-7, k 0-7), then m 8-15, then k 8-15. */
    const uint16_t *lane_row = slice + ((lane & 7) + (lane >> 4) * 8) * SLICE_PITCH + (lane & 8);
    uint32_t a[4];

    *(uint4 *)&slice[slice_row(lane) * SLICE_PITCH] = part.low;
    *(uint4 *)&slice[slice_row(lane) * SLICE_PITCH + 8] = part.high;
    __syncwarp();
    load_transposed(a, lane_row);
    mma<1>(acc, a[0], a[1], a[2], a[3], part.x.x, part.x.y);
    load_transposed(a, lane_row + 16 * SLICE_PITCH);
    mma<1>(acc, a[0], a[1], a[2], a[3], part.x.z, part.x.w);
    __syncwarp();
}

template <int A_VEC, int X_VEC>
__global__ void __launch_bounds__(SHRINK_WARPS *SP_WARP) shrink_kernel(const sp_cuda_grouped g)
{
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, rank0 = (int)blockIdx.y * 16;
    group_tile tile = find_tile(g, (int)blockIdx.x);
    int row = lane >> 2, keep = tile.rank - rank0;
    const uint16_t *a, *x;
    slice_part next[SLICES_NOW];
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f}, sum = 0.0f;
    __shared__ __align__(16) uint16_t slices[SHRINK_WARPS][SLICE_K * SLICE_PITCH];
    __shared__ float sums[SHRINK_WARPS][ROWS][17];

    release_successor();
    if (tile.count == 0 || keep <= 0 || tile.scale == 0.0f)
        return;
    a = (const uint16_t *)g.lora_a + ((int64_t)tile.adapter * g.input_size) * g.rank_stride + rank0;
    x = (const uint16_t *)g.input + (int64_t)(tile.row + min(row, tile.count - 1)) * g.input_size;
#pragma unroll
    for (int i = 0; i < SLICES_NOW; i++)
        next[i] =
            load_slice<A_VEC, X_VEC>(g, a, x, row < tile.count, keep, warp * SLICE_K + i * STEP_K);
    for (int k0 = warp * SLICE_K; k0 < g.input_size; k0 += SLICES_NOW * STEP_K) {
#pragma unroll
        for (int i = 0; i < SLICES_NOW; i++) {
            slice_part now = next[i];

            next[i] = load_slice<A_VEC, X_VEC>(g, a, x, row < tile.count, keep,
                                               k0 + (SLICES_NOW + i) * STEP_K);
            add_slice(acc, slices[warp], now);
        }
    }
    sums[warp][2 * (lane & 3)][row] = acc[0];
    sums[warp][2 * (lane & 3) + 1][row] = acc[1];
    sums[warp][2 * (lane & 3)][row + 8] = acc[2];
    sums[warp][2 * (lane & 3) + 1][row + 8] = acc[3];
    __syncthreads();
    row = threadIdx.x >> 4;
    if (row >= tile.count || (int)(threadIdx.x & 15) >= keep)
        return;
    for (int w = 0; w < SHRINK_WARPS; w++)
        sum += sums[w][row][threadIdx.x & 15];
    ((uint16_t *)g.xa)[(int64_t)(tile.row + row) * g.rank_stride + rank0 + (threadIdx.x & 15)] =
        narrow<1>(sum);
}

/* ---- expand -------------------------------------------------------------------------------- */

typedef struct expand_shared {
    uint16_t b[B_RANKS][B_PITCH];
    uint16_t xa[ROWS][XA_PITCH];
    uint16_t delta[ROWS][B_PITCH];
} expand_shared;

template <int VEC>
static __device__ void fill_b(expand_shared *s, const sp_cuda_grouped &g, const group_tile &tile,
                              int rank0, int column0)
{
    const uint16_t *b =
        (const uint16_t *)g.lora_b + (int64_t)tile.adapter * g.rank_stride * g.output_size;
    int ranks = min(B_RANKS, (tile.rank - rank0 + 15) & ~15);

    for (int i = threadIdx.x; i < ranks * (COLUMNS / 8); i += EXPAND_THREADS) {
        int rank = rank0 + i / (COLUMNS / 8), c = i % (COLUMNS / 8) * 8;
        int keep = rank < tile.rank ? g.output_size - column0 - c : 0;

        *(uint4 *)&s->b[rank - rank0][c] =
            load_kept<VEC>(b + (int64_t)rank * g.output_size + column0 + c, keep);
    }
}

static __device__ void fill_xa(expand_shared *s, const sp_cuda_grouped &g, const group_tile &tile,
                               int rank0)
{
    for (int i = threadIdx.x; i < ROWS * B_RANKS; i += EXPAND_THREADS) {
        int row = i / B_RANKS, rank = rank0 + i % B_RANKS;

        s->xa[row][i % B_RANKS] =
            row < tile.count && rank < tile.rank
                ? ((const uint16_t *)g.xa)[(int64_t)(tile.row + row) * g.rank_stride + rank]
                : (uint16_t)0;
    }
}

static __device__ __forceinline__ void add_ranks(float *acc, const expand_shared *s, int ranks)
{
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const uint16_t *lane_row =
        &s->b[(lane & 7) + (lane >> 4) * 8][warp * 16 + (lane & 8)]; /* as in add_slice */

    for (int rank = 0; rank < ranks; rank += 16) {
        const uint32_t *xa = (const uint32_t *)&s->xa[lane >> 2][rank + 2 * (lane & 3)];
        uint32_t a[4];

        load_transposed(a, lane_row + rank * B_PITCH);
        mma<1>(acc, a[0], a[1], a[2], a[3], xa[0], xa[4]);
    }
}

static __device__ __forceinline__ void keep_deltas(expand_shared *s, const float *acc)
{
    int lane = threadIdx.x & 31, column = (threadIdx.x >> 5) * 16 + (lane >> 2), row = lane & 3;

    s->delta[2 * row][column] = narrow<1>(acc[0]);
    s->delta[2 * row + 1][column] = narrow<1>(acc[1]);
    s->delta[2 * row][column + 8] = narrow<1>(acc[2]);
    s->delta[2 * row + 1][column + 8] = narrow<1>(acc[3]);
}

template <int VEC>
static __device__ void fold_tile(const expand_shared *s, const sp_cuda_grouped &g,
                                 const group_tile &tile, int column0)
{
    for (int i = threadIdx.x; i < tile.count * (COLUMNS / 8); i += EXPAND_THREADS) {
        int row = i / (COLUMNS / 8), c = i % (COLUMNS / 8) * 8, n = g.output_size - column0 - c;
        uint16_t *y =
            (uint16_t *)g.output + (int64_t)(tile.row + row) * g.output_size + column0 + c;
        union {
            uint4 all;
            uint16_t one[8];
        } v;

        if (VEC && n > 0)
            v.all = *(const uint4 *)y;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (!VEC && j < n)
                v.one[j] = y[j];
            v.one[j] = narrow<1>(
                __fmaf_rn(tile.scale, widen<1>(s->delta[row][c + j]), widen<1>(v.one[j])));
            if (!VEC && j < n)
                y[j] = v.one[j];
        }
        if (VEC && n > 0)
            *(uint4 *)y = v.all;
    }
}

template <int VEC>
__global__ void __launch_bounds__(EXPAND_THREADS)
    expand_kernel(const sp_cuda_grouped g, int n_tiles, int tiles_per_block)
{
    int column0 = (int)blockIdx.x * COLUMNS, first = (int)blockIdx.y * tiles_per_block;
    int held = -1; /* the adapter whose whole B is in shared memory */
    bool waited = false;
    __shared__ __align__(16) expand_shared s;

    for (int number = first; number < min(first + tiles_per_block, n_tiles); number++) {
        group_tile tile = find_tile(g, number);
        float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};

        if (tile.count == 0 || tile.rank <= 0 || tile.scale == 0.0f)
            continue;
        for (int rank0 = 0; rank0 < tile.rank; rank0 += B_RANKS) {
            if (held != tile.adapter)
                fill_b<VEC>(&s, g, tile, rank0, column0);
            if (!waited)
                wait_predecessor();
            waited = true;
            fill_xa(&s, g, tile, rank0);
            __syncthreads();
            add_ranks(acc, &s, min(B_RANKS, tile.rank - rank0));
            __syncthreads();
        }
        held = tile.rank <= B_RANKS ? tile.adapter : -1;
        keep_deltas(&s, acc);
        __syncthreads();
        fold_tile<VEC>(&s, g, tile, column0);
    }
    /* A kernel's completion implies that of all kernels before it, so one block always waits. */
    if (!waited && blockIdx.x == 0 && blockIdx.y == 0)
        wait_predecessor();
}

/* ---- check --------------------------------------------------------------------------------- */

/* Keeps the first fault in the order of the host's check: offsets and adapters by segment, the end,
 * then ranks and scales by adapter. */
static __device__ void keep_fault(unsigned long long *first, int64_t place, int fault, int index)
{
    atomicMin(first, (unsigned long long)place << 32 | (unsigned long long)fault << 28 |
                         (unsigned long long)index);
}

__global__ void __launch_bounds__(1024)
    check_kernel(const sp_cuda_grouped g, sp_cuda_grouped_report *report)
{
    __shared__ unsigned long long first;

    if (threadIdx.x == 0)
        first = ~0ull;
    __syncthreads();
    if (threadIdx.x == 0 && g.segment_offsets[0] != 0)
        keep_fault(&first, 0, SP_CUDA_GROUPED_OFFSETS, 0);
    for (int i = threadIdx.x; i < g.n_segments; i += 1024) {
        int adapter = g.segment_adapters[i];

        if (g.segment_offsets[i + 1] <= g.segment_offsets[i])
            keep_fault(&first, 2 * i + 1, SP_CUDA_GROUPED_OFFSETS, i + 1);
        if (adapter < 0 || adapter >= g.n_adapters)
            keep_fault(&first, 2 * i + 2, SP_CUDA_GROUPED_ADAPTERS, i);
    }
    if (threadIdx.x == 0 && g.segment_offsets[g.n_segments] != g.total_rows)
        keep_fault(&first, 2 * g.n_segments + 1, SP_CUDA_GROUPED_OFFSETS, g.n_segments);
    for (int i = threadIdx.x; i < g.n_adapters; i += 1024) {
        int64_t place = 2 * ((int64_t)g.n_segments + 1 + i);

        if (g.ranks[i] < 0 || g.ranks[i] > g.max_rank)
            keep_fault(&first, place, SP_CUDA_GROUPED_RANKS, i);
        if (!isfinite(g.scales[i]))
            keep_fault(&first, place + 1, SP_CUDA_GROUPED_SCALES, i);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        report->fault = first == ~0ull ? SP_CUDA_GROUPED_FINE : (int)(first >> 28 & 15);
        report->index = first == ~0ull ? -1 : (int)(first & 0xfffffff);
    }
}

/* ---- launch -------------------------------------------------------------------------------- */

static bool aligned(const void *memory)
{
    return (uintptr_t)memory % 16 == 0;
}

static void launch_shrink(const sp_cuda_grouped &g, int n_tiles, cudaStream_t stream)
{
    dim3 grid((unsigned)n_tiles, (unsigned)((g.rank_stride + 15) / 16));
    int threads = SHRINK_WARPS * SP_WARP;
    bool x_vec = aligned(g.input) && g.input_size % 8 == 0;

    if (aligned(g.lora_a) && x_vec)
        shrink_kernel<1, 1><<<grid, threads, 0, stream>>>(g);
    else if (aligned(g.lora_a))
        shrink_kernel<1, 0><<<grid, threads, 0, stream>>>(g);
    else
        shrink_kernel<0, 0><<<grid, threads, 0, stream>>>(g);
}

/* Launched to overlap the shrink: reads tiles and B, which the shrink does not write, before it
 * waits. */
template <int VEC>
static cudaError_t launch_expand(const sp_cuda_grouped &g, int n_tiles, cudaStream_t stream)
{
    int tiles_per_block = g.total_rows > PREFILL_ROWS ? TILES_PER_BLOCK : 1;
    cudaLaunchAttribute overlap;
    dim3 grid((unsigned)((g.output_size + COLUMNS - 1) / COLUMNS),
              (unsigned)((n_tiles + tiles_per_block - 1) / tiles_per_block));
    cudaLaunchConfig_t config =
        sp_cuda_overlapping(grid, EXPAND_THREADS, 0, &overlap, false, stream);

    return cudaLaunchKernelEx(&config, expand_kernel<VEC>, g, n_tiles, tiles_per_block);
}

extern "C" int sp_cuda_grouped_gemm(int gpu, const sp_cuda_grouped *grouped, void *stream)
{
    const sp_cuda_grouped &g = *grouped;
    int n_tiles = g.total_rows / ROWS + g.n_segments;
    bool vec = aligned(g.lora_b) && aligned(g.output) && g.output_size % 8 == 0;
    sp_cuda_current current(gpu);
    cudaError_t code = current.code;

    if (code != cudaSuccess)
        return (int)code;
    launch_shrink(g, n_tiles, (cudaStream_t)stream);
    code = cudaGetLastError();
    if (code != cudaSuccess)
        return (int)code;
    return (int)(vec ? launch_expand<1>(g, n_tiles, (cudaStream_t)stream)
                     : launch_expand<0>(g, n_tiles, (cudaStream_t)stream));
}

extern "C" int sp_cuda_grouped_check(int gpu, const sp_cuda_grouped *grouped,
                                     sp_cuda_grouped_report *report, void *stream)
{
    sp_cuda_current current(gpu);
    cudaError_t code = current.code;

    if (code != cudaSuccess)
        return (int)code;
    check_kernel<<<1, 1024, 0, (cudaStream_t)stream>>>(*grouped, report);
    return (int)cudaGetLastError();
}
