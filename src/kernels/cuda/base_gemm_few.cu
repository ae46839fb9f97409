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
#define STEPS        (STAGE_K / 16)
#define GROUP        16 /* rows of w of a warp */
#define GROUP_BYTES  (GROUP * ROW_BYTES)
#define TILE         8 /* rows of x of one mma */
#define WARPS_MAX    12
#define STAGES_MAX   16
#define STAGES_MIN   4
#define FLIGHT_BYTES (48 << 10) /* of w in flight, at least, for full bandwidth */

static_assert(2 * PIECES == SP_WARP, "a warp copies two rows of a stage at once");
static_assert(GROUP / 2 == STEPS, "and two rows with each step");

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

/* Two rows of the group, from row 2 * pair on. Elements beyond k are zeros; rows beyond n stay what
 * they are, as nothing of them is stored. */
static __device__ __forceinline__ void copy_pair(uint32_t to, const few_source &from, int pair,
                                                 int k, int k0)
{
    int lane = threadIdx.x & 31, row = lane / PIECES + 2 * pair, piece = lane % PIECES;

    if (2 * pair < from.rows)
        copy_async_if(to + row * ROW_BYTES + ((piece ^ (row & 7)) << 4),
                      from.w + (int64_t)(2 * pair) * k + k0, k0 + piece * 8 < k);
}

static __device__ __forceinline__ void copy_w(uint32_t to, const few_source &from, int k, int k0)
{
#pragma unroll
    for (int pair = 0; pair < GROUP / 2; pair++)
        copy_pair(to, from, pair, k, k0);
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

/* Waits until at most n of this thread's groups are in flight, or a few less. */
static __device__ __forceinline__ void wait_for(int n)
{
    if (n >= 12)
        copy_wait<12>();
    else if (n >= 8)
        copy_wait<8>();
    else if (n >= 6)
        copy_wait<6>();
    else if (n >= 4)
        copy_wait<4>();
    else if (n >= 2)
        copy_wait<2>();
    else if (n == 1)
        copy_wait<1>();
    else
        copy_wait<0>();
}

/* The operands of the next steps, as the mma takes them, so many as registers allow. Each is
 * loaded, possibly from the next stage, when the one in its place has been multiplied: a chain of
 * mma never waits for shared memory. */
template <int TILES> struct few_operands {
    static constexpr int HELD = TILES <= 4 ? STEPS : 2; /* steps */
    static constexpr int PARTS = (TILES + 1) / 2;

    uint4 w[HELD], x[HELD][PARTS]; /* one tile: x of an even step is that of the next one too */

    /* Step `step` of a stage of the group's w and the rows' x, in the place of `step` % HELD. */
    __device__ __forceinline__ void load(uint32_t w_stage, uint32_t x_stage, int step)
    {
        int lane = threadIdx.x & 31, in = lane & 7, matrix = lane >> 3, half = matrix >> 1;
        int own = matrix & 1, place = step % HELD;

        w[place] =
            load_matrices(w_stage + (own * 8 + in) * ROW_BYTES + (((2 * step + half) ^ in) << 4));
        if (TILES == 1) {
            if (step % 2 == 1)
                x[place - 1][0] =
                    load_matrices(x_stage + in * ROW_BYTES + (((2 * step - 2 + matrix) ^ in) << 4));
            return;
        }
#pragma unroll
        for (int i = 0; i < PARTS; i++)
            x[place][i] = load_matrices(x_stage + ((2 * i + half) * TILE + in) * ROW_BYTES +
                                        (((2 * step + own) ^ in) << 4));
    }
    __device__ __forceinline__ void multiply(float (*sum)[4], int step) const
    {
        int place = step % HELD;
        const uint4 &a = w[place];

        if (TILES == 1) {
            const uint4 &b = x[place / 2 * 2][0];

            mma<0>(sum[0], a.x, a.y, a.z, a.w, step % 2 ? b.z : b.x, step % 2 ? b.w : b.y);
            return;
        }
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            const uint4 &b = x[place][i];

            mma<0>(sum[2 * i], a.x, a.y, a.z, a.w, b.x, b.y);
            mma<0>(sum[2 * i + 1], a.x, a.y, a.z, a.w, b.z, b.w);
        }
    }
};

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

/* The copies that fill the ring, ahead of the sums. */
typedef struct few_loader {
    few_cursor at;
    few_source from;
} few_loader;

static __device__ __forceinline__ void load_next(few_loader *load, const sp_cuda_gemm &g,
                                                 const few_shape &s)
{
    if (advance(&load->at, s))
        load->from = source_of(g, s, load->at.item);
}

/* Fills all stages but one, w before the wait for the predecessor and x after it. */
static __device__ __forceinline__ void load_ahead(few_loader *load, const sp_cuda_gemm &g,
                                                  const few_shape &s, uint32_t own, uint32_t x_at)
{
    few_cursor x_load = load->at;

    for (int i = 1; i < s.stages; i++)
        if (load->at.item < s.items) {
            copy_w(own + load->at.slot * s.stage_bytes, load->from, g.k,
                   load->at.k_stage * STAGE_K);
            load_next(load, g, s);
        }
    wait_predecessor();
    for (int i = 1; i < s.stages; i++) {
        if (x_load.item < s.items) {
            copy_x(x_at + x_load.slot * s.stage_bytes, g, x_load.k_stage * STAGE_K);
            advance(&x_load, s);
        }
        copy_commit();
    }
}

template <int TILES>
__global__ void __launch_bounds__(WARPS_MAX *SP_WARP, 1)
    few_kernel(const __grid_constant__ sp_cuda_gemm g, const __grid_constant__ few_shape s)
{
    extern __shared__ __align__(128) char memory[];
    const int held = few_operands<TILES>::HELD;
    uint32_t own = shared_address(memory) + (threadIdx.x >> 5) * GROUP_BYTES;
    uint32_t x_at = shared_address(memory) + (blockDim.x >> 5) * GROUP_BYTES;
    few_cursor use = {(int)blockIdx.x, 0, 0};
    few_loader load = {use, source_of(g, s, use.item)};
    few_operands<TILES> operands = {};
    float sum[TILES][4] = {};

    release_successor();
    load_ahead(&load, g, s, own, x_at);
    wait_for(s.stages - 2);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < held; i++)
        operands.load(own, x_at, i);
    while (use.item < s.items) {
        few_cursor now = use;
        bool last = advance(&use, s), more = load.at.item < s.items;
        uint32_t to = load.at.slot * s.stage_bytes, this_one = now.slot * s.stage_bytes;
        uint32_t next = use.slot * s.stage_bytes;

        /* The next stage is here, and no warp reads the one before this one any more. */
        wait_for(s.stages - 3);
        __syncthreads();
        if (more)
            copy_x(x_at + to, g, load.at.k_stage * STAGE_K);
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            uint32_t of = i + held < STEPS ? this_one : next;

            operands.multiply(sum, i);
            operands.load(own + of, x_at + of, (i + held) % STEPS);
            if (more)
                copy_pair(own + to, load.from, i, g.k, load.at.k_stage * STAGE_K);
        }
        if (more)
            load_next(&load, g, s);
        copy_commit();
        if (last)
            finish<TILES>(sum, g, s, now.item);
    }
    copy_wait<0>();
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
            STAGES_MIN * (warps * GROUP_BYTES + tiles * TILE * ROW_BYTES) <= state->shared_bytes) {
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
                       max(STAGES_MIN, 3 + FLIGHT_BYTES / (warps * GROUP_BYTES)));
    config = sp_cuda_overlapping(dim3((unsigned)min(shape.items, state->multiprocessors)),
                                 warps * SP_WARP, (size_t)shape.stages * shape.stage_bytes,
                                 &overlap, false, stream);
    return cudaLaunchKernelEx(&config, kernels[kind], *gemm, shape);
}
