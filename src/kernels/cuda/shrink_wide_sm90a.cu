/*
 * shrink_wide_sm90a.cu: xa = x · Aᵀ for a group of sites in one launch, for many rows at large
 * ranks, through wgmma in bf16; with the bits of shrink.cu. It ends with the rounded xa.
 *
 * Grid (sets of 16 * GROUPS ranks of all sites, parts of k, windows of up to 64 * WARPGROUPS rows
 * of one slot). A block has up to CHUNKS chunks of k; a cluster has all parts, and its blocks
 * exchange their sums through distributed shared memory. A warpgroup multiplies 64 rows, the M
 * side, by all ranks, the N side. Its x goes from memory to registers, a quarter ahead, in 16-byte
 * vectors, as mma takes them. A passes through a ring of stages of 64 k in shared memory, in rows
 * of 128 bytes, swizzled. Four more warps, of which each has every fourth stage, copy it, and put
 * each 64 bytes that have arrived, 32 k, in the order of the two mma that read them: word 0 of the
 * four vectors, then their words 1, 2 and 3. Bound by shared memory, and by x and A from L2.
 */
#include "kernels/cuda/shrink_windows.cuh"
#include "kernels/cuda/wgmma.cuh"

#define WARPGROUP   128
#define ATOM_K      64 /* of a stage: a row of 128 bytes, as the swizzle has it */
#define ATOM_BYTES  (ATOM_K * 2)
#define UNIT_BYTES  (ROWS * ATOM_BYTES) /* eight rows of a stage */
#define FILL_WARPS  4
#define QUARTER_K   128
#define CHUNK_STEPS (SP_CUDA_CHUNK_K / QUARTER_K)
#define SHARED_MOST 232448 /* of a block, on the GPU that this file is for */

template <int WARPGROUPS, int GROUPS, int CHUNKS> struct wide_block {
    enum {
        warpgroups = WARPGROUPS,
        x_rows = 64 * warpgroups,
        tiles = x_rows / ROWS,
        groups = GROUPS,
        a_rows = groups * RANKS,
        rows = x_rows + a_rows, /* whose addresses a window has */
        units = a_rows / ROWS,  /* of a stage */
        threads = (1 + warpgroups) * WARPGROUP,
        stage_bytes = a_rows * ATOM_BYTES,
        chunks = CHUNKS,
        each = CHUNKS < SP_CUDA_GROUP_CHUNKS ? CHUNKS : 1, /* partials of a block */
        sums = a_rows / 2,                                 /* of a thread */
        sum_pitch = a_rows + 8, /* floats of a row of sums: no bank conflicts */
        sum_bytes = x_rows * sum_pitch * 4,
        other_bytes = 3584 + 8 * (rows - 256), /* the window and the barriers */
        /* Sums before the last chunk have a place of their own; a last partial takes the ring's. */
        sums_apart = CHUNKS > 1 ? sum_bytes : 0,
        stages_fit = (SHARED_MOST - other_bytes - sums_apart) / stage_bytes,
        stages = stages_fit < 12 ? stages_fit : 12,
        ahead = stages > 2 * FILL_WARPS ? 2 : 1, /* stages that a warp copies ahead */
        sums_at = CHUNKS > 1 ? stages *stage_bytes : 0,
        barriers_at = stages * stage_bytes + sums_apart,
        window_at = barriers_at + 2 * stages * 8,
        shared_bytes = barriers_at + other_bytes
    };
    static_assert(sum_bytes <= stages * stage_bytes, "a partial takes the ring's place");
    static_assert(units % 2 == 0 && stages > FILL_WARPS * ahead,
                  "pairs of units, and a free stage");
    static_assert(shared_bytes <= SHARED_MOST, "a block's shared memory");
};

/* 1 where this object has the kernel for the GPU at hand. */
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__device__ int shrink_wide_is_built = 1;
#else
__device__ int shrink_wide_is_built = 0;
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* A thread's position in the ring. */
template <class S> struct wide_ring {
    uint32_t base;
    int stage, parity;

    __device__ uint32_t full(void) const
    {
        return base + S::barriers_at + stage * 8;
    }
    __device__ uint32_t empty(void) const
    {
        return full() + S::stages * 8;
    }
    __device__ uint32_t data(void) const
    {
        return base + stage * S::stage_bytes;
    }
    __device__ void advance(int by)
    {
        stage += by;
        if (stage >= S::stages) {
            stage -= S::stages;
            parity ^= 1;
        }
    }
};

template <class S> static __device__ __forceinline__ void init_barriers(wide_ring<S> at)
{
    for (; at.parity == 0; at.advance(1)) {
        barrier_init(at.full(), 1);
        barrier_init(at.empty(), S::warpgroups * WARPGROUP / SP_WARP);
    }
}

/* The k of a block, and how much of A it has. */
typedef struct wide_work {
    int k0, k1;
    int quarters; /* the last may end beyond k1 */
    int units;    /* of eight ranks */
} wide_work;

/* ---- what the block works on --------------------------------------------------------------- */

/* find_window where a lane has one segment: none of the loads waits for another. */
template <class S>
static __device__ __forceinline__ tile_run find_run(const sp_cuda_plan &plan, int n_slots,
                                                    int number, int *out_slot)
{
    int lane = threadIdx.x & 31, at = min(lane, n_slots - 1);
    int begin = plan.segment_begin[at], end = plan.segment_begin[at + 1];
    int slot = plan.segment_slot[at], n = plan.head->n_segments;
    int tiles = lane < n ? parts(end - begin, ROWS) : 0, windows = parts(tiles, S::tiles);
    int tile0 = sum_below(tiles), window = number - sum_below(windows);
    unsigned has = __ballot_sync(~0u, window >= 0 && window < windows);
    int from = __ffs((int)has) - 1;
    tile_run found = {tile0 + window * S::tiles, min((int)S::tiles, tiles - window * S::tiles)};

    if (has == 0)
        return {0, 0};
    found.first = __shfl_sync(~0u, found.first, from);
    found.n = __shfl_sync(~0u, found.n, from);
    *out_slot = __shfl_sync(~0u, slot, from);
    return found;
}

/* read_window and list_groups together, whose loads do not wait for each other. */
template <class S>
static __device__ __forceinline__ void read_both(window<S> *win, const sp_cuda_group &group,
                                                 tile_run run, int slot)
{
    int i = threadIdx.x / ROWS, j = threadIdx.x % ROWS, rank[SP_CUDA_SITES_MAX];
    const sp_cuda_tile *tile = &group.plan.tiles[run.first + min(i, run.n - 1)];
    int count = tile->count, row = tile->row[j];

    load_ranks(rank, group, slot);
    if (i < S::tiles)
        win->out_row[threadIdx.x] = i < run.n && j < count ? row : -1;
    if (threadIdx.x == 0)
        win->slot = slot;
    put_groups(win, rank);
}

/* Which rows and ranks the block has; n 0: no rows. */
template <class S>
static __device__ __forceinline__ tile_run find_work(window<S> *win, const sp_cuda_group &group,
                                                     int tiles_bound)
{
    int slot = 0;
    tile_run run;

    if (group.n_slots <= SP_WARP) {
        run = find_run<S>(group.plan, group.n_slots, blockIdx.z, &slot);
        if (run.n > 0)
            read_both(win, group, run, slot);
        return run;
    }
    run = find_window<S::tiles>(group.plan, group.n_slots, tiles_bound, blockIdx.z);
    if (run.n > 0) {
        read_window(win, group, run);
        list_groups(win, group, win->slot);
    }
    return run;
}

/* ---- copies of A --------------------------------------------------------------------------- */

/* Copies the first `units` units of a stage, an even number of at most N, from k on. `source` is at
 * this lane's first row. Beyond k_end there are zeros. */
template <int N>
static __device__ __forceinline__ void load_units(uint32_t to, const uint16_t *const *source,
                                                  int units, int k, int k_end)
{
    int lane = threadIdx.x & 31, row = lane >> 3, at = k + (lane & 7) * 8;
    uint32_t low = to + row * ATOM_BYTES + ((lane & 7) ^ row) * 16;
    uint32_t high = (low ^ 64) + 4 * ATOM_BYTES; /* of the row four further on */

    if (k + ATOM_K <= k_end) {
#pragma unroll
        for (int i = 0; i < N; i += 2)
            if (i < units)
#pragma unroll
                for (int j = i; j < i + 2; j++) {
                    copy_async(low + j * UNIT_BYTES, source[j * ROWS] + at);
                    copy_async(high + j * UNIT_BYTES, source[j * ROWS + 4] + at);
                }
        return;
    }
#pragma unroll 1
    for (int i = 0; i < units; i++) { /* the end of k */
        const uint16_t *const *of = source + i * ROWS;
        int from = at < k_end ? at : 0;

        copy_async_if(low + i * UNIT_BYTES, of[0] + from, at < k_end);
        copy_async_if(high + i * UNIT_BYTES, of[4] + from, at < k_end);
    }
}

/* Puts two units in the order of the mma, each in its own place. Lane l reads row l % 8 and the
 * vectors l / 8 and 4 + l / 8; it has then words l % 4 of row l / 4, which are vectors l % 4 and
 * 4 + l % 4 of the new order. Odd rows store these in turn: no bank conflicts. */
static __device__ __forceinline__ void order_units(uint32_t first, uint32_t second)
{
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, r = lane & 7;
    uint32_t from = r * ATOM_BYTES + ((lane >> 3) ^ r) * 16;
    uint32_t to = (g * ATOM_BYTES + (t ^ g) * 16) ^ (g & 1) * 64;
    uint4 v[4];

    v[0] = load_matrices(first + from);
    v[1] = load_matrices(first + (from ^ 64));
    v[2] = load_matrices(second + from);
    v[3] = load_matrices(second + (from ^ 64));
    __syncwarp();
    store_shared(first + to, g & 1 ? v[1] : v[0]);
    store_shared(first + (to ^ 64), g & 1 ? v[0] : v[1]);
    store_shared(second + to, g & 1 ? v[3] : v[2]);
    store_shared(second + (to ^ 64), g & 1 ? v[2] : v[3]);
}

/* The warps that copy. */
template <class S>
static __device__ __forceinline__ void fill(wide_ring<S> at, const window<S> &win, wide_work work)
{
    const int step = S::ahead * FILL_WARPS;
    int first = threadIdx.x >> 5, stages = work.quarters * (QUARTER_K / ATOM_K);
    const uint16_t *const *from = win.source + S::x_rows + ((threadIdx.x & 31) >> 3);
    wide_ring<S> next;

    at.advance(first);
    next = at;
    for (int i = first; i < first + step; i += FILL_WARPS, next.advance(FILL_WARPS)) {
        if (i < stages)
            load_units<S::units>(next.data(), from, work.units, work.k0 + i * ATOM_K, work.k1);
        copy_commit();
    }
    for (int i = first; i < stages; i += FILL_WARPS) {
        copy_wait<S::ahead - 1>();
        __syncwarp();
#pragma unroll
        for (int j = 0; j < S::units; j += 2)
            order_units(at.data() + j * UNIT_BYTES, at.data() + (j + 1) * UNIT_BYTES);
        copies_before_bulk(); /* as bulk copies, wgmma reads through the async proxy */
        __syncwarp();
        if ((threadIdx.x & 31) == 0)
            barrier_arrive(at.full());
        if (i + step < stages) {
            barrier_wait(next.empty(), next.parity ^ 1);
            load_units<S::units>(next.data(), from, work.units, work.k0 + (i + step) * ATOM_K,
                                 work.k1);
        }
        copy_commit();
        at.advance(FILL_WARPS);
        next.advance(FILL_WARPS);
    }
}

/* ---- the product --------------------------------------------------------------------------- */

/* A quarter of two rows of x, g and g + 8 of the warp's: a vector of each 32 k; or, in order, the
 * operands of the first and of the second mma. */
typedef struct wide_x {
    uint4 low[QUARTER_K / 32], high[QUARTER_K / 32];
} wide_x;

static __device__ __forceinline__ uint4 load_or_zero(const uint16_t *from, bool valid)
{
    return valid ? load_global(from) : make_uint4(0, 0, 0, 0);
}

static __device__ __forceinline__ void load_x(wide_x *x, const uint16_t *low, const uint16_t *high,
                                              int k, int k_end)
{
#pragma unroll
    for (int i = 0; i < QUARTER_K / 32; i++) {
        x->low[i] = load_or_zero(low + k + 32 * i, k + 32 * i < k_end);
        x->high[i] = load_or_zero(high + k + 32 * i, k + 32 * i < k_end);
    }
}

static __device__ __forceinline__ void order_x(wide_x *x)
{
#pragma unroll
    for (int i = 0; i < QUARTER_K / 32; i++) {
        uint4 u = x->low[i], w = x->high[i];

        x->low[i] = make_uint4(u.x, w.x, u.y, w.y);
        x->high[i] = make_uint4(u.z, w.z, u.w, w.w);
    }
}

/* Begins the products of a stage, half a quarter. a: shared address of its ranks. */
template <class S, int HALF>
static __device__ __forceinline__ void multiply(float (&quarter)[S::sums], const wide_x &x,
                                                uint32_t a)
{
    const int half = ATOM_K / 32;
    uint64_t n = wgmma_operand(a);

    wgmma_fence();
#pragma unroll
    for (int i = 0; i < half; i++) {
        const uint4 &u = x.low[HALF * half + i], &w = x.high[HALF * half + i];
        const uint32_t first[4] = {u.x, u.y, u.z, u.w}, second[4] = {w.x, w.y, w.z, w.w};

        wgmma_registers<S::a_rows, 0>::multiply(quarter, first, n + 4 * i, HALF + i > 0);
        wgmma_registers<S::a_rows, 0>::multiply(quarter, second, n + 4 * i + 2, 1);
    }
    wgmma_commit();
}

static __device__ __forceinline__ void release(uint32_t empty)
{
    if ((threadIdx.x & 31) == 0)
        barrier_arrive(empty);
}

/* One quarter of a chunk of this warpgroup's rows, from +0. */
template <class S>
static __device__ __forceinline__ void multiply_quarter(float (&quarter)[S::sums], const wide_x &x,
                                                        wide_ring<S> *at)
{
    uint32_t first = at->empty(), second;

    barrier_wait(at->full(), at->parity);
    multiply<S, 0>(quarter, x, at->data());
    at->advance(1);
    second = at->empty();
    barrier_wait(at->full(), at->parity);
    multiply<S, 1>(quarter, x, at->data());
    at->advance(1);
    wgmma_wait<1>();
    release(first);
    wgmma_wait<0>();
    release(second);
    wgmma_arrived<S::sums>(quarter);
}

/* Adds to a sum that starts at +0: that leaves the first term as it is, since no term is -0. */
template <int N>
static __device__ __forceinline__ void add_into(float (&sum)[N], const float (&v)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        sum[i] = sum[i] + v[i];
}

/* Adds this thread's sums to those at `to`, or, if `first`, writes them. */
template <class S>
static __device__ __forceinline__ void keep(float *to, const float (&sum)[S::sums], bool first)
{
    int warp = (threadIdx.x - WARPGROUP) >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;

    to += (warp * 16 + g) * S::sum_pitch + 2 * t;
    if (first) {
#pragma unroll
        for (int i = 0; i < S::sums; i += 2)
            *(float2 *)(to + i % 4 / 2 * 8 * S::sum_pitch + i / 4 * 8) =
                make_float2(sum[i], sum[i + 1]);
        return;
    }
#pragma unroll
    for (int i = 0; i < S::sums; i += 2) {
        float2 *at = (float2 *)(to + i % 4 / 2 * 8 * S::sum_pitch + i / 4 * 8), v = *at;

        *at = make_float2(v.x + sum[i], v.y + sum[i + 1]);
    }
}

/* The sums of this warpgroup's rows: of the last chunk in `chunk`, of those before in `sums`, added
 * up or, where the block has a partial for each chunk, alone. */
template <class S>
static __device__ __forceinline__ void multiply_rows(float (&chunk)[S::sums], float *sums,
                                                     wide_ring<S> at, const window<S> &win,
                                                     wide_work work, bool folds)
{
    int thread = (int)threadIdx.x - WARPGROUP, warp = thread >> 5, lane = thread & 31;
    int vector = (lane & 3) * 8, k = work.k0;
    const uint16_t *const *row = win.source + warp * 16 + (lane >> 2);
    const uint16_t *low = row[0] + vector, *high = row[8] + vector;
    const uint16_t *line = win.source[thread / 2] + thread % 2 * (QUARTER_K / 2);
    float quarter[S::sums];
    wide_x x, now;

    for (int i = 0; i < CHUNK_STEPS; i++)
        if (k + (i + 1) * QUARTER_K <= work.k1)
            prefetch_l2(line + k + i * QUARTER_K);
    wait_predecessor();
    if (folds)
        release_successor();
    load_x(&x, low, high, k, work.k1 - vector);
    for (int q = 1; q <= work.quarters; q++) {
        now = x;
        order_x(&now);
        k += QUARTER_K;
        load_x(&x, low, high, k, work.k1 - vector);
        if (k + CHUNK_STEPS * QUARTER_K <= work.k1)
            prefetch_l2(line + k + (CHUNK_STEPS - 1) * QUARTER_K);
        multiply_quarter<S>(quarter, now, &at);
        add_into(chunk, quarter);
        if (S::chunks > 1 && q % CHUNK_STEPS == 0 && q < work.quarters) {
            keep<S>(sums, chunk, S::each > 1 || q == CHUNK_STEPS);
#pragma unroll
            for (int i = 0; i < S::sums; i++)
                chunk[i] = 0.0f;
        }
    }
}

/* The warpgroups that multiply. */
template <class S>
static __device__ __forceinline__ void multiply_all(wide_ring<S> at, const window<S> &win,
                                                    const sp_cuda_group &group, char *memory,
                                                    wide_work work, const rounding &how)
{
    float *sums = (float *)(memory + S::sums_at), *ring = (float *)memory;
    float chunk[S::sums] = {};

    multiply_rows<S>(chunk, sums, at, win, work, group.folds != 0);
    meet(1, S::warpgroups * WARPGROUP); /* nothing reads the ring any more */
    if (S::each > 1 && work.quarters > CHUNK_STEPS)
        keep<S>(ring, chunk, true);
    else
        keep<S>(sums, chunk, work.quarters <= CHUNK_STEPS);
    round_sums<0, S::each>(sums, (int)(ring - sums), win, group, how, (int)threadIdx.x - WARPGROUP,
                           S::warpgroups * WARPGROUP);
}

#endif

template <class S>
__global__ void __launch_bounds__(S::threads, 1)
    wide_kernel(const __grid_constant__ sp_cuda_group group, int tiles_bound,
                const __grid_constant__ rounding how)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) char memory[];
    window<S> &win = *(window<S> *)(memory + S::window_at);
    wide_ring<S> ring = {shared_address(memory), 0, 0};
    wide_work work = {(int)blockIdx.y * (S::chunks * SP_CUDA_CHUNK_K)};

    static_assert(S::window_at + sizeof(window<S>) <= S::shared_bytes, "as other_bytes says");
    if (group.folds == 0)
        release_successor();
    if (threadIdx.x == 0)
        init_barriers<S>(ring);
    if (find_work<S>(&win, group, tiles_bound).n == 0 || win.n_groups == 0) {
        /* A kernel's completion implies that of all kernels before it, so one block always
         * waits. */
        if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0)
            wait_predecessor();
        return;
    }
    list_sources(&win, group, win.slot);
    work.k1 = min(work.k0 + S::chunks * SP_CUDA_CHUNK_K, group.k_in);
    work.quarters = (work.k1 - work.k0 + QUARTER_K - 1) / QUARTER_K;
    work.units = win.n_groups * (RANKS / ROWS);
    if (threadIdx.x < WARPGROUP) {
        registers_down_to<56>();
        fill<S>(ring, win, work);
        for (int i = 0; i < 2; i++) { /* those of round_sums */
            cluster_arrive_relaxed();
            cluster_wait();
        }
    } else {
        registers_up_to<S::warpgroups == 2 ? 224 : 152>();
        multiply_all<S>(ring, win, group, memory, work, how);
    }
#endif
}

/* ---- launch -------------------------------------------------------------------------------- */

/* Adds a cluster of so many blocks, of one window's partials, to a launch. */
static void add_cluster(cudaLaunchConfig_t *config, cudaLaunchAttribute (&attributes)[2],
                        int blocks)
{
    attributes[config->numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config->numAttrs].val.clusterDim = {1, (unsigned)blocks, 1};
    config->attrs = attributes;
    config->numAttrs++;
}

template <class S> static cudaError_t launch(const sp_cuda_group *group, cudaStream_t stream)
{
    int rank_groups = group->n_sites * sp_cuda_ceil(group->rank_stride, RANKS);
    int chunks = sp_cuda_chunks(group->k_in), parts = sp_cuda_ceil(chunks, S::chunks);
    cudaLaunchAttribute attributes[2];
    dim3 grid((unsigned)sp_cuda_ceil(rank_groups, S::groups), (unsigned)parts,
              (unsigned)sp_cuda_windows_bound(group->n_rows, group->n_slots, S::tiles));
    cudaLaunchConfig_t config = sp_cuda_overlapping(grid, S::threads, S::shared_bytes,
                                                    &attributes[0], group->after_plan != 0, stream);
    bool alone = S::chunks < SP_CUDA_GROUP_CHUNKS; /* each chunk is a partial */
    rounding how = {rounded_of(group), alone ? chunks : parts, alone ? SP_CUDA_GROUP_CHUNKS : 1};

    add_cluster(&config, attributes, parts);
    return cudaLaunchKernelEx(&config, wide_kernel<S>, *group,
                              sp_cuda_tiles_bound(group->n_rows, group->n_slots), how);
}

/* Allows the shared memory, and asks how many clusters of each size run at once. */
template <class S> static cudaError_t init(int (&clusters)[CLUSTER_MAX + 1])
{
    cudaError_t code = cudaFuncSetAttribute(
        wide_kernel<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::shared_bytes);

    for (int n = 1; code == cudaSuccess && n <= CLUSTER_MAX; n++) {
        cudaLaunchAttribute attributes[2];
        cudaLaunchConfig_t config = sp_cuda_overlapping(
            dim3(1, (unsigned)n), S::threads, S::shared_bytes, &attributes[0], true, NULL);

        add_cluster(&config, attributes, n);
        code = cudaOccupancyMaxActiveClusters(&clusters[n], wide_kernel<S>, &config);
        if (code == cudaSuccess && clusters[n] == 0)
            code = cudaErrorNotSupported;
    }
    return code;
}

/* A form: the tiles, the groups of 16 ranks and the chunks of k of a block, and the nanoseconds of
 * a chunk, as measured on an H200. */
typedef struct wide_form {
    cudaError_t (*launch)(const sp_cuda_group *group, cudaStream_t stream);
    cudaError_t (*init)(int (&clusters)[CLUSTER_MAX + 1]);
    int tiles, groups, chunks, chunk_ns;
} wide_form;

template <int WARPGROUPS, int GROUPS, int CHUNKS> static constexpr wide_form form_of(int chunk_ns)
{
    typedef wide_block<WARPGROUPS, GROUPS, CHUNKS> S;

    return {launch<S>, init<S>, S::tiles, GROUPS, CHUNKS, chunk_ns};
}

#define BLOCK_NS 8000 /* of a block, whatever its chunks */

static const wide_form forms[] = {form_of<2, 8, 4>(6200), form_of<2, 4, 4>(2900),
                                  form_of<3, 4, 4>(3700), form_of<2, 4, 2>(2900),
                                  form_of<3, 4, 2>(3700), form_of<2, 4, 1>(2900)};

enum { FORMS = sizeof forms / sizeof forms[0] };

/* Clusters of so many blocks that a GPU runs at once, of each form; 0: the kernels are not built
 * for it. Written at its init. */
static int clusters_on[SP_CUDA_GPUS_MAX][FORMS][CLUSTER_MAX + 1];

/* Windows of so many tiles where all slots have as many rows, and one more. */
static int64_t windows_of(const sp_cuda_group *group, int tiles)
{
    int slots = min(group->n_slots, group->n_rows);

    return 1 + (int64_t)slots * sp_cuda_ceil(sp_cuda_ceil(group->n_rows, slots), tiles * ROWS);
}

/*
 * The time of a form in nanoseconds; INT64_MAX: it takes no such k, or has so few blocks that the
 * smaller ones of shrink_windows.cu are faster. Of the last wave of clusters a half counts as
 * whole, since those before do not end together.
 */
static int64_t time_of(int gpu, int form, const sp_cuda_group *group)
{
    const wide_form *f = &forms[form];
    int rank_groups = group->n_sites * sp_cuda_ceil(group->rank_stride, RANKS);
    int chunks = sp_cuda_chunks(group->k_in), parts = sp_cuda_ceil(chunks, f->chunks);
    int64_t clusters = windows_of(group, f->tiles) * sp_cuda_ceil(rank_groups, f->groups), at_once;
    int64_t block_ns = BLOCK_NS + (int64_t)min(f->chunks, chunks) * f->chunk_ns, waves;

    if ((f->chunks < SP_CUDA_GROUP_CHUNKS ? chunks : parts) > CLUSTER_MAX ||
        clusters * parts * 4 < group->multiprocessors)
        return INT64_MAX;
    at_once = clusters_on[gpu][form][parts];
    waves = (clusters + at_once - 1) / at_once;
    return clusters <= at_once ? block_ns : block_ns * (waves * at_once + clusters) / (2 * at_once);
}

cudaError_t sp_cuda_shrink_wide_sm90a(int gpu, const sp_cuda_group *group, cudaStream_t stream)
{
    int best = -1;
    int64_t least = INT64_MAX;

    if (gpu >= SP_CUDA_GPUS_MAX || clusters_on[gpu][0][1] == 0 || group->type != SP_DTYPE_BF16 ||
        group->keep_sums != 0 || !sp_cuda_rounds_xa(group->n_rows, group->rank_stride))
        return cudaErrorNotSupported;
    for (int i = 0; i < FORMS; i++) {
        int64_t ns = time_of(gpu, i, group);

        if (ns < least) {
            least = ns;
            best = i;
        }
    }
    return best >= 0 ? forms[best].launch(group, stream) : cudaErrorNotSupported;
}

cudaError_t sp_cuda_shrink_wide_sm90a_init(int gpu)
{
    int major = 0, minor = 0, built = 0, clusters[FORMS][CLUSTER_MAX + 1] = {};
    cudaError_t code = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, gpu);

    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, gpu);
    if (code != cudaSuccess || major != 9 || minor != 0 || gpu >= SP_CUDA_GPUS_MAX ||
        !sp_cuda_overlaps())
        return code;
    code = cudaMemcpyFromSymbol(&built, shrink_wide_is_built, sizeof built);
    if (code != cudaSuccess || !built)
        return code;
    for (int i = 0; i < FORMS && code == cudaSuccess; i++)
        code = forms[i].init(clusters[i]);
    if (code == cudaSuccess)
        memcpy(clusters_on[gpu], clusters, sizeof clusters);
    return code == cudaErrorNotSupported ? cudaSuccess : code;
}
