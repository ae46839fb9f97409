/*
 * base_gemm_few.cu: y[row, n] = x[row, :] · w[n, :] for up to 64 rows, by the order of
 * sp_cuda_gemm. Bound by the bytes of w.
 *
 * A warp takes 16 rows of w, the M side of the mma, and all rows of x, its N side, over all of k:
 * nothing is split, so nothing has to be added up. A block is one warp or several with adjacent
 * rows of w, which share x; its items (16 rows for each warp) follow each other through one ring in
 * shared memory, so the stream of weights never pauses. A stage is 128 k of the item's rows of w
 * and of x, 16-byte pieces in the order piece ^ (row % 8), without bank conflicts. Grid: at most
 * one block per multiprocessor. The first stages of w are loaded before the wait for the
 * predecessor: weights do not change.
 */
#include "kernels/cuda/base_gemm.cuh"

#define STAGE_K      128
#define PIECES       (STAGE_K / 8) /* of 16 bytes, in a row of a stage */
#define ROW_BYTES    (STAGE_K * 2)
#define GROUP        16 /* rows of w of a warp */
#define GROUP_BYTES  (GROUP * ROW_BYTES)
#define TILE         8 /* rows of x of one mma */
#define WARPS_MAX    12
#define STAGES_MAX   12
#define FLIGHT_BYTES (48 << 10) /* of w in flight, at least, for full bandwidth */

static_assert(2 * PIECES == SP_WARP, "a warp copies two rows of a stage at once");

typedef struct few_shape {
    gemm_columns groups;
    int items, k_stages, stages, stage_bytes;
} few_shape;

/* Where a lane copies the weights of its warp's group from: row lane / 16, piece lane % 16. */
typedef struct few_source {
    const uint16_t *w;
    int rows; /* that the group has from this one on; not positive: none */
} few_source;

static __device__ __forceinline__ few_source source_of(const sp_cuda_gemm &g, const few_shape &s,
                                                       int item)
{
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int group = item * (int)(blockDim.x >> 5) + warp;
    gemm_place place = place_of(s.groups, group);
    int n = place.tile * GROUP + lane / PIECES;

    if (group >= s.groups.tiles)
        return {NULL, 0};
    return {(const uint16_t *)g.outputs[place.output].w + (int64_t)n * g.k + lane % PIECES * 8,
            g.outputs[place.output].n - n};
}

/* Elements beyond k are zeros; rows beyond n stay what they are, as nothing of them is stored. */
static __device__ __forceinline__ void copy_w(uint32_t to, const few_source &from, int k, int k0)
{
    int lane = threadIdx.x & 31, row = lane / PIECES, piece = lane % PIECES;
    bool valid = k0 + piece * 8 < k;

#pragma unroll
    for (int i = 0; i < GROUP; i += 2)
        if (i < from.rows)
            copy_async_if(to + (row + i) * ROW_BYTES + ((piece ^ ((row + i) & 7)) << 4),
                          from.w + (int64_t)i * k + k0, valid);
}

static __device__ __forceinline__ void copy_x(uint32_t to, const sp_cuda_gemm &g, int k0)
{
    for (int p = (int)threadIdx.x; p < g.rows * PIECES; p += (int)blockDim.x) {
        int row = p / PIECES, piece = p % PIECES;

        copy_async_if(to + row * ROW_BYTES + ((piece ^ (row & 7)) << 4),
                      (const uint16_t *)g.x + row * g.x_stride + k0 + piece * 8,
                      k0 + piece * 8 < g.k);
    }
}

/* Waits until this thread's oldest group of `stages` - 1 is complete. */
static __device__ __forceinline__ void wait_oldest(int stages)
{
    switch (stages) {
    case 2:
        copy_wait<0>();
        break;
    case 3:
        copy_wait<1>();
        break;
    case 4:
        copy_wait<2>();
        break;
    case 5:
        copy_wait<3>();
        break;
    case 6:
        copy_wait<4>();
        break;
    case 7:
        copy_wait<5>();
        break;
    case 8:
        copy_wait<6>();
        break;
    case 9:
        copy_wait<7>();
        break;
    case 10:
        copy_wait<8>();
        break;
    case 11:
        copy_wait<9>();
        break;
    default:
        copy_wait<10>();
        break;
    }
}

/* One stage: eight steps of 16 k, in order. `w` is the group's, `x` the rows'. */
template <int TILES>
static __device__ __forceinline__ void multiply(float (*sum)[4], uint32_t w, uint32_t x)
{
    int lane = threadIdx.x & 31, in = lane & 7, matrix = lane >> 3;
    uint32_t w_row = w + ((matrix & 1) * 8 + in) * ROW_BYTES;
    uint32_t x_row = x + (TILES == 1 ? in : (matrix >> 1) * 8 + in) * ROW_BYTES;
    uint4 b = {};

#pragma unroll
    for (int step = 0; step < STAGE_K / 16; step++) {
        uint4 a = load_matrices(w_row + (((2 * step + (matrix >> 1)) ^ in) << 4));

        if (TILES == 1) {
            if (step % 2 == 0)
                b = load_matrices(x_row + (((2 * step + matrix) ^ in) << 4));
            mma<0>(sum[0], a.x, a.y, a.z, a.w, step % 2 ? b.z : b.x, step % 2 ? b.w : b.y);
            continue;
        }
#pragma unroll
        for (int tile = 0; tile < TILES; tile += 2) {
            b = load_matrices(x_row + tile * TILE * ROW_BYTES +
                              (((2 * step + (matrix & 1)) ^ in) << 4));
            mma<0>(sum[tile], a.x, a.y, a.z, a.w, b.x, b.y);
            mma<0>(sum[tile + 1], a.x, a.y, a.z, a.w, b.z, b.w);
        }
    }
}

/* Stores this warp's sums of an item, and starts the next item's from +0. */
template <int TILES>
static __device__ __forceinline__ void finish(float (*sum)[4], const sp_cuda_gemm &g,
                                              const few_shape &s, int item)
{
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int group = item * (int)(blockDim.x >> 5) + warp;
    gemm_place place = place_of(s.groups, group);
    const sp_cuda_gemm_output &out = g.outputs[place.output];
    int n = place.tile * GROUP + lane / 4;

#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = tile * TILE + lane % 4 * 2 + (i & 1), column = n + (i >> 1) * 8;

            if (group < s.groups.tiles && row < g.rows && column < out.n)
                store_output(out, row, column, sum[tile][i]);
            sum[tile][i] = 0.0f;
        }
}

/* The next stage of the ring and the part of the block's work that goes there. */
typedef struct few_cursor {
    int item, k_stage, slot;
} few_cursor;

static __device__ __forceinline__ bool advance(few_cursor *at, const few_shape &s)
{
    at->slot = at->slot + 1 == s.stages ? 0 : at->slot + 1;
    if (++at->k_stage < s.k_stages)
        return false;
    at->k_stage = 0;
    at->item += (int)gridDim.x;
    return true;
}

template <int TILES>
__global__ void __launch_bounds__(WARPS_MAX *SP_WARP, 1)
    few_kernel(const __grid_constant__ sp_cuda_gemm g, const __grid_constant__ few_shape s)
{
    extern __shared__ __align__(128) char memory[];
    int warps = (int)(blockDim.x >> 5), warp = threadIdx.x >> 5;
    uint32_t ring = shared_address(memory), own = ring + warp * GROUP_BYTES;
    uint32_t x_at = ring + warps * GROUP_BYTES;
    few_cursor load = {(int)blockIdx.x, 0, 0}, use = load, x_load = load;
    few_source from = source_of(g, s, load.item);
    float sum[TILES][4] = {};

    release_successor();
    for (int i = 1; i < s.stages; i++)
        if (load.item < s.items) {
            copy_w(own + load.slot * s.stage_bytes, from, g.k, load.k_stage * STAGE_K);
            if (advance(&load, s))
                from = source_of(g, s, load.item);
        }
    wait_predecessor();
    for (int i = 1; i < s.stages; i++) {
        if (x_load.item < s.items) {
            copy_x(x_at + x_load.slot * s.stage_bytes, g, x_load.k_stage * STAGE_K);
            advance(&x_load, s);
        }
        copy_commit();
    }
    while (use.item < s.items) {
        few_cursor now = use;

        wait_oldest(s.stages);
        __syncthreads();
        if (load.item < s.items) {
            copy_w(own + load.slot * s.stage_bytes, from, g.k, load.k_stage * STAGE_K);
            copy_x(x_at + load.slot * s.stage_bytes, g, load.k_stage * STAGE_K);
            if (advance(&load, s))
                from = source_of(g, s, load.item);
        }
        copy_commit();
        multiply<TILES>(sum, own + now.slot * s.stage_bytes, x_at + now.slot * s.stage_bytes);
        if (advance(&use, s))
            finish<TILES>(sum, g, s, now.item);
    }
}

/* ---- launch -------------------------------------------------------------------------------- */

typedef void (*few_fn)(const sp_cuda_gemm, const few_shape);

/* 1, 2, 4 or 8 tiles of rows. */
static const few_fn kernels[] = {few_kernel<1>, few_kernel<2>, few_kernel<4>, few_kernel<8>};

/* The most warps among those counts that leave the busiest multiprocessor least to read. */
static int warps_of(const base_gemm *state, int groups, int tiles)
{
    int best = 1, least = INT32_MAX;

    for (int warps = 1; warps <= WARPS_MAX; warps++) {
        int items = sp_cuda_ceil(groups, warps);
        int load = sp_cuda_ceil(items, state->multiprocessors) * warps;

        if (load <= least &&
            3 * (warps * GROUP_BYTES + tiles * TILE * ROW_BYTES) <= state->shared_bytes) {
            least = load;
            best = warps;
        }
    }
    return best;
}

cudaError_t sp_cuda_gemm_few_init(int shared_bytes)
{
    cudaError_t code = cudaSuccess;

    for (few_fn kernel : kernels)
        if (code == cudaSuccess)
            code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        shared_bytes);
    return code;
}

cudaError_t sp_cuda_gemm_few(const base_gemm *state, const sp_cuda_gemm *gemm, cudaStream_t stream)
{
    int kind = gemm->rows > 32 ? 3 : gemm->rows > 16 ? 2 : gemm->rows > 8 ? 1 : 0;
    few_shape shape = {columns_of(gemm, GROUP), 0, sp_cuda_ceil(gemm->k, STAGE_K), 0, 0};
    int warps = warps_of(state, shape.groups.tiles, 1 << kind);
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config;

    shape.items = sp_cuda_ceil(shape.groups.tiles, warps);
    shape.stage_bytes = warps * GROUP_BYTES + (TILE << kind) * ROW_BYTES;
    shape.stages = min(min(STAGES_MAX, state->shared_bytes / shape.stage_bytes),
                       max(3, 2 + FLIGHT_BYTES / (warps * GROUP_BYTES)));
    config = sp_cuda_overlapping(dim3((unsigned)min(shape.items, state->multiprocessors)),
                                 warps * SP_WARP, (size_t)shape.stages * shape.stage_bytes,
                                 &overlap, false, stream);
    return cudaLaunchKernelEx(&config, kernels[kind], *gemm, shape);
}
