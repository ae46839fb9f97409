/*
 * shrink_windows.cu: xa = x · Aᵀ for a group of sites in one launch, for many rows; with the bits
 * of shrink.cu.
 *
 *     partials[p][row, site * R + c] = sum over the chunks of partial p of x[row, :] · A[slot][c,
 * :]
 *
 * Grid (sets of 16 * GROUPS * WARPS ranks of all sites, runs of partials, windows). A block
 * multiplies a window of up to WINDOW tiles that share a slot by a set of that slot's own ranks, so
 * x is read once for all of them. x and A pass through a ring of stages in shared memory, one
 * quarter (128 k) each. A warp takes pairs of tiles, the M sides of the mma, whose operands are so
 * arranged once for all ranks, and GROUPS groups of 16 ranks, its N sides. Rows of a stage are 256
 * bytes, swizzled: adjacent 64-byte blocks are swapped in odd rows, which avoids bank conflicts.
 * Bound by the bytes of x from memory, and of x and A from L2.
 */
#include "kernels/cuda/shrink_windows.cuh"

#define PIECES    16 /* 16-byte vectors in a row of a stage */
#define ROW_BYTES (STAGE_K * 2)

template <int WINDOW, int WARPS, int GROUPS> struct block {
    enum {
        tiles = WINDOW,
        row_warps = tiles < 8 ? 2 : 4,
        warp_tiles = tiles / row_warps, /* two are the M side of one mma */
        x_rows = tiles * ROWS,
        groups = GROUPS * WARPS,
        a_rows = groups * RANKS,
        rows = x_rows + a_rows, /* of a stage: of x, then of A */
        threads = SP_WARP * row_warps * WARPS,
        pass_rows = threads / PIECES, /* rows that all threads together copy one vector of */
        stage_bytes = rows * ROW_BYTES,
        sum_pitch = a_rows + 8, /* floats of a row of sums: no bank conflicts */
        resident = groups <= 4 && tiles <= 8 ? 2 : 1, /* blocks per multiprocessor */
        stages = 4 * stage_bytes * resident <= 190 * 1024 ? 4 : 3,
        unroll = GROUPS * warp_tiles < 8                 ? 4
                 : GROUPS * warp_tiles < 16 && WARPS < 3 ? 2
                                                         : 1, /* more would spill */
    };
};

/* ---- the ring ------------------------------------------------------------------------------ */

/* Byte offset in a stage of 16-byte vector `piece` of a row (the swizzle). */
static __device__ __forceinline__ int swizzled(int row, int piece)
{
    return row * ROW_BYTES + (piece ^ ((row & 1) << 2)) * 16;
}

/*
 * Copies this thread's vectors of N rows of a stage that starts at k, one per pass; rows from `end`
 * on are skipped (N: no check). `to` and `source` are at this thread's first row, row0.
 */
template <int N, int PASS_ROWS>
static __device__ __forceinline__ void load_rows(uint32_t to, const uint16_t *const *source,
                                                 int row0, int end, int k, int k_end)
{
    bool exact = N % PASS_ROWS == 0 && end == N;
    int64_t at = k + (int)(threadIdx.x % PIECES) * 8;

    if (k + STAGE_K <= k_end) {
#pragma unroll
        for (int i = 0; i < (N + PASS_ROWS - 1) / PASS_ROWS; i++)
            if (exact || row0 + i * PASS_ROWS < end)
                copy_async(to + i * PASS_ROWS * ROW_BYTES, source[i * PASS_ROWS] + at);
        return;
    }
#pragma unroll 1
    for (int i = 0; row0 + i * PASS_ROWS < end; i++) /* the end of k */
        copy_async_if(to + i * PASS_ROWS * ROW_BYTES, source[i * PASS_ROWS] + (at < k_end ? at : 0),
                      at < k_end);
}

/* ---- the product --------------------------------------------------------------------------- */

/* A thread's accumulators of GROUPS groups of 16 ranks by TILES tiles of 8 rows. Of two tiles [j]
 * has the lower eight ranks and [j + 1] the upper: ranks 2 t and 2 t + 1 of row g of the one tile,
 * then of the other. */
template <int TILES, int GROUPS> struct sums {
    float of[GROUPS][TILES][4];
};

/* One stage, a quarter, from +0. x, a: this warp's first rows in it. An mma that adds to another's
 * sums waits for it, so AT_ONCE groups take turns. */
template <int F16, int TILES, int GROUPS, int UNROLL>
static __device__ __forceinline__ sums<TILES, GROUPS> multiply(const char *x, const char *a,
                                                               uint32_t zero)
{
    int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    /* Offsets of row g for even and odd s, with an odd row's swap: no address arithmetic is left in
     * the loop. */
    enum { AT_ONCE = 8 / TILES < GROUPS ? 8 / TILES : GROUPS };
    int even = g * ROW_BYTES + t * 16 + (g & 1) * 64, odd = even - (g & 1) * 128;
    sums<TILES, GROUPS> acc = {};

#pragma unroll UNROLL
    for (int s = 0; s < STAGE_K / 32; s++) {
        int here = (s & 1 ? odd : even) + s * 64;
        uint4 v[TILES];

#pragma unroll
        for (int j = 0; j < TILES; j++)
            v[j] = *(const uint4 *)(x + here + j * ROWS * ROW_BYTES);
        pair_rows(v, zero);
#pragma unroll
        for (int i0 = 0; i0 < GROUPS; i0 += AT_ONCE) {
            const int n = GROUPS - i0 < AT_ONCE ? GROUPS - i0 : AT_ONCE;
            uint4 low[AT_ONCE], high[AT_ONCE];

#pragma unroll
            for (int i = 0; i < n; i++) {
                low[i] = *(const uint4 *)(a + here + (i0 + i) * RANKS * ROW_BYTES);
                high[i] = *(const uint4 *)(a + here + ((i0 + i) * RANKS + 8) * ROW_BYTES);
            }
#pragma unroll
            for (int i = 0; i < n; i++)
#pragma unroll
                for (int j = 0; j < TILES; j += 2) {
                    const uint4 &m = v[j];

                    mma<F16>(acc.of[i0 + i][j], m.x, m.y, m.z, m.w, low[i].x, low[i].y);
                    mma<F16>(acc.of[i0 + i][j + 1], m.x, m.y, m.z, m.w, high[i].x, high[i].y);
                }
#pragma unroll
            for (int i = 0; i < n; i++)
#pragma unroll
                for (int j = 0; j < TILES; j += 2) {
                    const uint4 &m = v[j + 1];

                    mma<F16>(acc.of[i0 + i][j], m.x, m.y, m.z, m.w, low[i].z, low[i].w);
                    mma<F16>(acc.of[i0 + i][j + 1], m.x, m.y, m.z, m.w, high[i].z, high[i].w);
                }
        }
    }
    return acc;
}

/* Adds to a sum that starts at +0: that leaves the first term as it is, since no term is -0. */
template <int TILES, int GROUPS>
static __device__ __forceinline__ void add_into(sums<TILES, GROUPS> *sum,
                                                const sums<TILES, GROUPS> &v)
{
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
#pragma unroll
        for (int j = 0; j < TILES; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                sum->of[i][j][e] = sum->of[i][j][e] + v.of[i][j][e];
}

template <int WINDOW, int WARPS, int GROUPS>
static __device__ __forceinline__ void store(
    const window<block<WINDOW, WARPS, GROUPS>> &win, const sp_cuda_group &group,
    const sums<block<WINDOW, WARPS, GROUPS>::warp_tiles, GROUPS> &partial, int number, int x_row,
    int group0)
{
    typedef block<WINDOW, WARPS, GROUPS> shape;
    int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    int64_t row_floats = group.rank_stride * group.n_sites;
    float *to_partial = group.partials + (int64_t)number * group.n_rows * row_floats + 2 * t;

#pragma unroll
    for (int j = 0; j < shape::warp_tiles; j++) {
        int out = win.out_row[x_row + j * ROWS + g];

        if (out < 0)
            continue;
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
            if (group0 + i >= win.n_groups)
                break;
            rank_group at = win.group[group0 + i];
            float *to = to_partial + out * row_floats + at.site * group.rank_stride + at.rank0;
            int end = ((at.rank + 3) & ~3) - at.rank0;

#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float *pair = &partial.of[i][(j & ~1) + h][(j & 1) * 2];

                if (h * 8 + 2 * t < end)
                    *(float2 *)(to + h * 8) = make_float2(pair[0], pair[1]);
            }
        }
    }
}

/* ---- kernel -------------------------------------------------------------------------------- */

/* Puts the block's partial in place of the ring. */
template <int WINDOW, int WARPS, int GROUPS>
static __device__ __forceinline__ void keep(
    float *to, const window<block<WINDOW, WARPS, GROUPS>> &win,
    const sums<block<WINDOW, WARPS, GROUPS>::warp_tiles, GROUPS> &partial, int x_row, int group0)
{
    typedef block<WINDOW, WARPS, GROUPS> shape;
    int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;

    to += (x_row + g) * shape::sum_pitch + group0 * RANKS + 2 * t;
    copy_wait<0>();
    __syncthreads();
    if (group0 < win.n_groups)
#pragma unroll
        for (int i = 0; i < GROUPS; i++)
#pragma unroll
            for (int j = 0; j < shape::warp_tiles; j++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float *pair = &partial.of[i][(j & ~1) + h][(j & 1) * 2];

                    *(float2 *)(to + j * ROWS * shape::sum_pitch + i * RANKS + h * 8) =
                        make_float2(pair[0], pair[1]);
                }
}

/* k [k0, k1), in partials of partial_k each; k0 is where one begins. */
template <int F16, int WINDOW, int WARPS, int GROUPS, bool ROUNDS>
static __device__ __forceinline__ void run(const window<block<WINDOW, WARPS, GROUPS>> &win,
                                           const sp_cuda_group &group, char *ring, int k0, int k1,
                                           int partial_k, const rounding &how)
{
    typedef block<WINDOW, WARPS, GROUPS> shape;
    const int ring_bytes = shape::stages * shape::stage_bytes;
    int warp = threadIdx.x >> 5;
    int x_row = warp % shape::row_warps * shape::warp_tiles * ROWS,
        group0 = warp / shape::row_warps * GROUPS;
    int x_at = x_row * ROW_BYTES, a_at = (shape::x_rows + group0 * RANKS) * ROW_BYTES;
    int a_end = win.n_groups * RANKS, mine = threadIdx.x / PIECES;
    uint32_t to_x = shared_address(ring) + swizzled(mine, threadIdx.x % PIECES);
    uint32_t to_a = to_x + shape::x_rows * ROW_BYTES;
    const uint16_t *const *from_x = win.source + mine, *const *from_a = from_x + shape::x_rows;
    sums<shape::warp_tiles, GROUPS> chunk = {}, partial = {};

    static_assert(shape::pass_rows % 2 == 0 && shape::x_rows % 2 == 0, "one parity, one place");
    for (int i = 0; i < shape::stages - 1 && k0 + i * STAGE_K < k1; i++)
        load_rows<shape::a_rows, shape::pass_rows>(to_a + i * shape::stage_bytes, from_a, mine,
                                                   a_end, k0 + i * STAGE_K, k1);
    prefetch_x(win, k0, k1);
    wait_predecessor();
    if (group.folds != 0)
        release_successor();
    for (int i = 0; i < shape::stages - 1; i++) {
        if (k0 + i * STAGE_K < k1)
            load_rows<shape::x_rows, shape::pass_rows>(to_x + i * shape::stage_bytes, from_x, mine,
                                                       shape::x_rows, k0 + i * STAGE_K, k1);
        copy_commit();
    }
    for (int k = k0, at = 0; k < k1;) {
        int ahead = k + (shape::stages - 1) * STAGE_K;
        int fill = (at > 0 ? at : ring_bytes) - shape::stage_bytes;

        copy_wait<shape::stages - 2>();
        __syncthreads();
        if (ahead < k1) {
            load_rows<shape::x_rows, shape::pass_rows>(to_x + fill, from_x, mine, shape::x_rows,
                                                       ahead, k1);
            load_rows<shape::a_rows, shape::pass_rows>(to_a + fill, from_a, mine, a_end, ahead, k1);
        }
        copy_commit();
        if (group0 < win.n_groups)
            add_into(&chunk, multiply<F16, shape::warp_tiles, GROUPS, shape::unroll>(
                                 ring + at + x_at, ring + at + a_at, unknown_zero(group)));
        k += STAGE_K;
        if (k % SP_CUDA_CHUNK_K == 0 || k >= k1) {
            add_into(&partial, chunk);
            chunk = {};
        }
        if (!ROUNDS && (k % partial_k == 0 || k >= k1)) {
            store(win, group, partial, (k - 1) / partial_k, x_row, group0);
            partial = {};
        }
        at = at + shape::stage_bytes < ring_bytes ? at + shape::stage_bytes : 0;
    }
    if (ROUNDS) {
        keep((float *)ring, win, partial, x_row, group0);
        round_sums<F16, 1>((const float *)ring, 0, win, group, how, threadIdx.x, shape::threads);
    }
}

template <int F16, int WINDOW, int WARPS, int GROUPS, bool ROUNDS>
__global__ void __launch_bounds__(block<WINDOW, WARPS, GROUPS>::threads,
                                  block<WINDOW, WARPS, GROUPS>::resident)
    windows_kernel(const __grid_constant__ sp_cuda_group group, int tiles_bound, int partial_k,
                   int block_partials, const __grid_constant__ rounding how)
{
    typedef block<WINDOW, WARPS, GROUPS> shape;
    int block_k = partial_k * block_partials, k0 = blockIdx.y * block_k;
    int k1 = min(k0 + block_k, group.k_in);
    tile_run run_of;
    extern __shared__ __align__(128) char ring[];
    __shared__ window<block<WINDOW, WARPS, GROUPS>> win;

    static_assert(shape::x_rows <= shape::threads && shape::groups <= shape::threads,
                  "one thread for each");
    if (group.folds == 0)
        release_successor();
    if ((int)threadIdx.x < group.n_sites && group.sites[threadIdx.x].rank != NULL)
        prefetch_l2(group.sites[threadIdx.x].rank);
    run_of = find_window<shape::tiles>(group.plan, group.n_slots, tiles_bound, blockIdx.z);
    if (run_of.n > 0) {
        read_window(&win, group, run_of);
        list_groups(&win, group, win.slot);
    }
    if (run_of.n > 0 && win.n_groups > 0) {
        list_sources(&win, group, win.slot);
        run<F16, WINDOW, WARPS, GROUPS, ROUNDS>(win, group, ring, k0, k1, partial_k, how);
    } else if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0) {
        /* A kernel's completion implies that of all kernels before it, so one block always
         * waits. */
        wait_predecessor();
    }
}

/* ---- launch -------------------------------------------------------------------------------- */

/* Besides the ring a block has its window, which takes less than 4 KB. */
static bool has_shared(int gpu, int ring_bytes)
{
    int most = 0;

    return cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, gpu) ==
               cudaSuccess &&
           ring_bytes + 4096 <= most;
}

/* Adds a cluster of so many blocks, of one window's partials, to a launch. */
static void add_cluster(cudaLaunchConfig_t *config, cudaLaunchAttribute (&attributes)[2],
                        int blocks)
{
    attributes[config->numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config->numAttrs].val.clusterDim = {1, (unsigned)blocks, 1};
    config->attrs = attributes;
    config->numAttrs++;
}

template <int F16, int WINDOW, int WARPS, int GROUPS, bool ROUNDS = false>
static cudaError_t launch(int gpu, const sp_cuda_group *group, sp_cuda_shrink_choice choice,
                          cudaStream_t stream)
{
    typedef block<WINDOW, WARPS, GROUPS> shape;
    int rank_groups = group->n_sites * sp_cuda_ceil(group->rank_stride, RANKS);
    int tiles = sp_cuda_tiles_bound(group->n_rows, group->n_slots);
    cudaLaunchAttribute attributes[2];
    dim3 grid((unsigned)sp_cuda_ceil(rank_groups, shape::groups),
              (unsigned)sp_cuda_ceil(choice.n_partials, choice.block_partials),
              (unsigned)sp_cuda_windows_bound(group->n_rows, group->n_slots, shape::tiles));
    cudaLaunchConfig_t config =
        sp_cuda_overlapping(grid, shape::threads, shape::stages * shape::stage_bytes,
                            &attributes[0], group->after_plan != 0, stream);
    rounding how = {ROUNDS ? rounded_of(group) : NULL, choice.n_partials,
                    SP_CUDA_GROUP_CHUNKS / choice.partial_chunks};
    static_assert(shape::stages * shape::stage_bytes <= 224 * 1024, "a block's shared memory");
    static_assert(sizeof(window<block<WINDOW, WARPS, GROUPS>>) < 4096, "as has_shared says");

    if (!has_shared(gpu, shape::stages * shape::stage_bytes))
        return cudaErrorNotSupported;
    if (ROUNDS)
        add_cluster(&config, attributes, choice.n_partials);
    return cudaLaunchKernelEx(&config, windows_kernel<F16, WINDOW, WARPS, GROUPS, ROUNDS>, *group,
                              tiles, choice.partial_chunks * SP_CUDA_CHUNK_K, choice.block_partials,
                              how);
}

template <int F16, int WINDOW>
static cudaError_t launch_ranks(int gpu, const sp_cuda_group *group, sp_cuda_shrink_choice choice,
                                cudaStream_t on)
{
    /* A small window has two row warps, so each of its groups of ranks gets warps of its own. */
    enum { apart = WINDOW < SP_CUDA_WINDOW_TILES };

    if (choice.rank_warps == 3)
        return launch<F16, WINDOW, 3, 4>(gpu, group, choice, on);
    if (choice.rank_warps == 2)
        return launch<F16, WINDOW, 2, 4>(gpu, group, choice, on);
    switch (group->n_sites * sp_cuda_ceil(group->rank_stride, RANKS)) {
    case 1:
        return launch<F16, WINDOW, 1, 1>(gpu, group, choice, on);
    case 2:
        return launch < F16, WINDOW, apart ? 2 : 1, apart ? 1 : 2 > (gpu, group, choice, on);
    case 3:
        return launch < F16, WINDOW, apart ? 3 : 1, apart ? 1 : 3 > (gpu, group, choice, on);
    default:
        return launch<F16, WINDOW, 2, 2>(gpu, group, choice, on);
    }
}

/* Whether clusters of CLUSTER_MAX blocks of every form run; per GPU, written at its init. */
static bool has_clusters[SP_CUDA_GPUS_MAX];

/* Clusters of eight, with a partial for each chunk, are slower than a round of their own. */
static bool rounds_in_clusters(int gpu, const sp_cuda_group *group, sp_cuda_shrink_choice choice)
{
    return sp_cuda_rounds_xa(group->n_rows, group->rank_stride) && group->keep_sums == 0 &&
           choice.partial_chunks > 1 && choice.n_partials <= CLUSTER_MAX &&
           gpu < SP_CUDA_GPUS_MAX && has_clusters[gpu];
}

/* The forms of sp_cuda_choose_wide, whose clusters round. */
template <int F16>
static cudaError_t launch_rounding(int gpu, const sp_cuda_group *group,
                                   sp_cuda_shrink_choice choice, cudaStream_t on)
{
    if (choice.window_tiles == 2 * SP_CUDA_WINDOW_TILES)
        return choice.rank_warps == 2
                   ? launch<F16, 2 * SP_CUDA_WINDOW_TILES, 2, 4, true>(gpu, group, choice, on)
                   : launch<F16, 2 * SP_CUDA_WINDOW_TILES, 2, 2, true>(gpu, group, choice, on);
    return choice.rank_warps == 2
               ? launch<F16, SP_CUDA_WINDOW_TILES, 2, 4, true>(gpu, group, choice, on)
               : launch<F16, SP_CUDA_WINDOW_TILES, 2, 2, true>(gpu, group, choice, on);
}

template <int F16>
static cudaError_t launch_windows(int gpu, const sp_cuda_group *group, cudaStream_t on,
                                  bool *out_rounded)
{
    sp_cuda_shrink_choice choice =
        sp_cuda_choose_shrink(group->multiprocessors, group->n_rows, group->n_slots, group->k_in,
                              group->rank_stride, group->n_sites);

    *out_rounded = rounds_in_clusters(gpu, group, choice);
    if (*out_rounded)
        return launch_rounding<F16>(gpu, group, choice, on);

    if (choice.window_tiles == 2 * SP_CUDA_WINDOW_TILES)
        return choice.rank_warps == 2
                   ? launch<F16, 2 * SP_CUDA_WINDOW_TILES, 2, 4>(gpu, group, choice, on)
                   : launch<F16, 2 * SP_CUDA_WINDOW_TILES, 2, 2>(gpu, group, choice, on);
    if (choice.window_tiles == SP_CUDA_WINDOW_TILES)
        return launch_ranks<F16, SP_CUDA_WINDOW_TILES>(gpu, group, choice, on);
    return launch_ranks<F16, SP_CUDA_WINDOW_TILES / 2>(gpu, group, choice, on);
}

cudaError_t sp_cuda_shrink_windows(int gpu, const sp_cuda_group *group, cudaStream_t stream,
                                   bool *out_rounded)
{
    cudaError_t code = sp_cuda_shrink_wide_sm90a(gpu, group, stream);

    *out_rounded = code == cudaSuccess;
    if (code != cudaErrorNotSupported)
        return code;
    return group->type == SP_DTYPE_F16 ? launch_windows<1>(gpu, group, stream, out_rounded)
                                       : launch_windows<0>(gpu, group, stream, out_rounded);
}

template <int F16, int WINDOW, int WARPS, int GROUPS, bool ROUNDS = false>
static cudaError_t allow(int gpu, cudaError_t before)
{
    typedef block<WINDOW, WARPS, GROUPS> shape;

    if (before != cudaSuccess || !has_shared(gpu, shape::stages * shape::stage_bytes))
        return before;
    return cudaFuncSetAttribute(windows_kernel<F16, WINDOW, WARPS, GROUPS, ROUNDS>,
                                cudaFuncAttributeMaxDynamicSharedMemorySize,
                                shape::stages * shape::stage_bytes);
}

template <int F16, int WINDOW> static cudaError_t allow_ranks(int gpu, cudaError_t code)
{
    enum { apart = WINDOW < SP_CUDA_WINDOW_TILES };

    code = allow<F16, WINDOW, 1, 1>(gpu, code);
    code = allow < F16, WINDOW, apart ? 2 : 1, apart ? 1 : 2 > (gpu, code);
    code = allow < F16, WINDOW, apart ? 3 : 1, apart ? 1 : 3 > (gpu, code);
    code = allow<F16, WINDOW, 2, 2>(gpu, code);
    code = allow<F16, WINDOW, 2, 4>(gpu, code);
    return allow<F16, WINDOW, 3, 4>(gpu, code);
}

/* A form of large ranks, without clusters and with them. *io_clusters stays set if those run. */
template <int F16, int WINDOW, int GROUPS>
static cudaError_t allow_rounding(int gpu, cudaError_t code, bool *io_clusters)
{
    typedef block<WINDOW, 2, GROUPS> shape;
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config =
        sp_cuda_overlapping(dim3(1, CLUSTER_MAX), shape::threads,
                            shape::stages * shape::stage_bytes, &attributes[0], true, NULL);
    int active = 0;

    code = allow<F16, WINDOW, 2, GROUPS>(gpu, code);
    if (!sp_cuda_overlaps()) /* code without clusters */
        *io_clusters = false;
    if (code != cudaSuccess || !*io_clusters)
        return code;
    code = allow<F16, WINDOW, 2, GROUPS, true>(gpu, code);
    add_cluster(&config, attributes, CLUSTER_MAX);
    if (code == cudaSuccess &&
        cudaOccupancyMaxActiveClusters(&active, windows_kernel<F16, WINDOW, 2, GROUPS, true>,
                                       &config) != cudaSuccess)
        (void)cudaGetLastError();
    *io_clusters = active > 0;
    return code;
}

template <int F16> static cudaError_t allow_forms(int gpu, cudaError_t code, bool *io_clusters)
{
    code = allow_ranks<F16, SP_CUDA_WINDOW_TILES / 2>(gpu, code);
    code = allow_ranks<F16, SP_CUDA_WINDOW_TILES>(gpu, code);
    code = allow_rounding<F16, SP_CUDA_WINDOW_TILES, 2>(gpu, code, io_clusters);
    code = allow_rounding<F16, SP_CUDA_WINDOW_TILES, 4>(gpu, code, io_clusters);
    code = allow_rounding<F16, 2 * SP_CUDA_WINDOW_TILES, 2>(gpu, code, io_clusters);
    return allow_rounding<F16, 2 * SP_CUDA_WINDOW_TILES, 4>(gpu, code, io_clusters);
}

cudaError_t sp_cuda_shrink_windows_init(int gpu)
{
    bool clusters = true;
    cudaError_t code = allow_forms<1>(gpu, allow_forms<0>(gpu, cudaSuccess, &clusters), &clusters);

    if (gpu < SP_CUDA_GPUS_MAX)
        has_clusters[gpu] = clusters && code == cudaSuccess;
    return code == cudaSuccess ? sp_cuda_shrink_wide_sm90a_init(gpu) : code;
}
