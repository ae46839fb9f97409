/*
 * plan.cu: seq_slot and row_scale → segments, row order and tiles, the same bytes as the host's
 * sp_plan_build_rows. A stable counting sort by slot. Few rows take one block; more take a cluster
 * of 8 or 16 blocks, each with a part of the rows. In a part the rows are cut into strips, one for
 * each warp: a strip counts its rows of each slot, the counts of the strips and parts before it
 * give the place of its first row of the slot, and each warp then writes its own rows directly into
 * the tiles, without further synchronisation. The parts exchange one number per slot, through
 * distributed shared memory. GPUs before sm_90 have no clusters: there one block takes all rows. A
 * slot or scale out of range refuses the whole plan: no tile, every row the base's, and
 * head->refused_row says which row.
 *
 * Bound by latency: one chain of loads, counts and stores. So the tiles are zeroed while the loads
 * of the rows are in flight, and nothing is written to global memory between that and the cluster
 * barrier, which would wait for it.
 */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"

#define THREADS      512
#define WARPS        (THREADS / SP_WARP)
#define ROWS         SP_CUDA_TILE_ROWS
#define PARTS_FEW    8  /* the portable cluster size */
#define PARTS_MANY   16 /* supported by some GPUs */
#define FEW_ROWS     8192
#define ALONE_ROWS   512
#define AT_ONCE      2           /* rows of a thread whose loads are in flight together */
#define SHARED_BYTES (98 * 1024) /* available to a block from sm_80 on */
#define SCALE_MAX    16.0f

static_assert(SP_CUDA_ROWS_MAX < 1 << 17 && SP_CUDA_SLOTS_MAX < 1 << 15, "see pack");
static_assert(sizeof(sp_cuda_tile) == 80 && ROWS == 8, "five pieces of 16 bytes, two of them rows");

/* Where a slot's rows go. */
typedef struct slot_place {
    int row, tile;    /* index of the first in row_order, first tile */
    int rows, before; /* of all parts, of the parts before this one */
} slot_place;

typedef struct plan_shared {
    unsigned long long warp_sum[WARPS], total;
    int refused, refused_of_all; /* the part's first, the plan's; n_rows: none */
} plan_shared;

/* The kernel's sizes. In shared memory, plan_shared is followed by place [n_slots], mine [n_slots]
 * and cell [n_strips, n_slots]. */
typedef struct sizes {
    int n_rows, n_slots, slot_bits, tiles_bound;
    int parts, part_rows;
    int n_strips, strip_rows; /* of a part; rows a multiple of 32 */
} sizes;

typedef struct block_memory {
    plan_shared *shared;
    slot_place *place;
    int *mine; /* the part's rows of each slot */
    int *cell; /* rows of the strip; then how many of the slot come before the strip's next */
} block_memory;

/* ---- prefix sums --------------------------------------------------------------------------- */

/* Packs tiles into the upper half, segments and rows (17 bits) into the lower one. */
static __device__ __forceinline__ unsigned long long pack(int rows)
{
    return (unsigned long long)(unsigned)((rows + ROWS - 1) / ROWS) << 32 |
           (unsigned)(rows > 0) << 17 | (unsigned)rows;
}

typedef struct totals {
    int rows, segments, tiles;
} totals;

static __device__ __forceinline__ totals unpack(unsigned long long sum)
{
    return {(int)sum & 0x1ffff, (int)((unsigned)sum >> 17), (int)(sum >> 32)};
}

static __device__ __forceinline__ unsigned long long scan_warp(unsigned long long sum)
{
#pragma unroll
    for (int d = 1; d < SP_WARP; d *= 2) {
        unsigned long long other = __shfl_up_sync(~0u, sum, d);

        sum += (int)(threadIdx.x & 31) >= d ? other : 0;
    }
    return sum;
}

/* ---- rows ---------------------------------------------------------------------------------- */

typedef struct row_cell {
    int slot; /* -1: without adapter; -2: refused */
    float scale;
    int number; /* index among the strip's rows of the slot */
} row_cell;

static __device__ __forceinline__ row_cell check_row(int slot, float scale, int n_slots)
{
    if (slot < -1 || slot >= n_slots || !(scale >= 0.0f && scale <= SCALE_MAX))
        slot = -2;
    else if (scale == 0.0f)
        slot = -1;
    return {slot, scale, 0};
}

/* AT_ONCE rows of this thread, 32 apart; slot -1 beyond the end. All loads are issued before the
 * first value is used. */
static __device__ __forceinline__ void read_rows(row_cell (&cells)[AT_ONCE],
                                                 const sp_cuda_plan &plan, int row0, int end,
                                                 int n_slots)
{
    int slot[AT_ONCE];
    float scale[AT_ONCE];

#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        bool valid = row0 + i * SP_WARP < end;

        slot[i] = !valid ? -1 : plan.seq_slot_in != NULL ? plan.seq_slot_in[row0 + i * SP_WARP] : 0;
        scale[i] =
            valid && plan.row_scale_in != NULL ? plan.row_scale_in[row0 + i * SP_WARP] : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
        cells[i] = check_row(slot[i], scale[i], n_slots);
}

/* The lanes with this lane's slot; slots have `bits` bits. Lanes with slot < 0 belong to no set.
 */
static __device__ __forceinline__ unsigned find_peers(int slot, int bits)
{
    unsigned peers = __ballot_sync(~0u, slot >= 0);

#pragma unroll 1 /* the code runs once, and instruction fetches cost more */
    for (int bit = 0; bit < bits; bit++) {
        unsigned mine = slot >> bit & 1;

        peers &= __ballot_sync(~0u, mine) ^ (mine - 1);
    }
    return peers;
}

/* Of 32 rows, one per lane: the index of this lane's row among the strip's rows of its slot. The
 * strip's cells then count these rows too. Slot < 0: no effect, any result. */
static __device__ __forceinline__ int number_row(int *cells, int slot, int bits)
{
    unsigned peers = find_peers(slot, bits);
    int lane = threadIdx.x & 31, *next = cells + max(slot, 0);
    int number = *next + __popc(peers & ((1u << lane) - 1));

    __syncwarp();
    if (slot >= 0 && lane == __ffs(peers) - 1)
        *next += __popc(peers);
    __syncwarp();
    return number;
}

/* Counts the rows that a warp has read. */
static __device__ __forceinline__ void count_rows(const block_memory &m, row_cell (&cells)[AT_ONCE],
                                                  int row0, int end, const sizes &n)
{
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        if (row0 + i * SP_WARP >= end)
            break;
        cells[i].number =
            number_row(&m.cell[(threadIdx.x >> 5) * n.n_slots], cells[i].slot, n.slot_bits);
        if (cells[i].slot == -2)
            atomicMin(&m.shared->refused, row0 + i * SP_WARP + (int)(threadIdx.x & 31));
    }
}

/* ---- segments ------------------------------------------------------------------------------ */

/* The part's number of rows of the slot; its cells become exclusive sums over the strips. */
static __device__ __forceinline__ int add_strips(const block_memory &m, int slot, const sizes &n)
{
    int rows = 0;

#pragma unroll 8
    for (int strip = 0; strip < n.n_strips; strip++) {
        int here = m.cell[strip * n.n_slots + slot];

        m.cell[strip * n.n_slots + slot] = rows;
        rows += here;
    }
    return rows;
}

/* Barrier over all parts: after it each can read the others' `mine` and `refused`. */
static __device__ __forceinline__ void join_parts(const sizes &n)
{
    if (n.parts > 1) {
        cluster_arrive();
        cluster_wait();
    } else
        __syncthreads();
}

/* Stores the slot's rows of all parts and of the parts before this one; returns the former. */
static __device__ __forceinline__ int add_parts(const block_memory &m, int slot, const sizes &n)
{
    int rows = 0, before = 0;

    if (n.parts == 1)
        rows = m.mine[slot];
    else
#pragma unroll 1
        for (int first = 0; first < n.parts; first += PARTS_FEW) {
#pragma unroll
            for (int i = 0; i < PARTS_FEW; i++) {
                int there = load_of_block(&m.mine[slot], first + i);

                rows += there;
                before += first + i < (int)blockIdx.x ? there : 0;
            }
        }
    m.place[slot].rows = rows;
    m.place[slot].before = before;
    return rows;
}

/* Done by the last warp; visible after the next barrier. */
static __device__ __forceinline__ void keep_refused(const block_memory &m, const sizes &n)
{
    int lane = threadIdx.x & 31, refused = m.shared->refused;

    if (threadIdx.x / SP_WARP != WARPS - 1)
        return;
    if (n.parts > 1)
        refused = __reduce_min_sync(~0u, load_of_block(&m.shared->refused, lane % n.parts));
    if (lane == 0)
        m.shared->refused_of_all = refused;
}

/* The sum over the warps before this one. */
static __device__ __forceinline__ unsigned long long sum_of_warps_before(const plan_shared *s)
{
    int lane = threadIdx.x & 31;
    unsigned long long sum = lane < (int)threadIdx.x / SP_WARP ? s->warp_sum[lane] : 0;

    return (unsigned long long)__reduce_add_sync(~0u, (unsigned)(sum >> 32)) << 32 |
           __reduce_add_sync(~0u, (unsigned)sum);
}

static __device__ __forceinline__ void write_segment(const block_memory &m,
                                                     const sp_cuda_plan &plan, int slot,
                                                     const totals &before)
{
    m.place[slot].row = before.rows;
    m.place[slot].tile = before.tiles;
    if (blockIdx.x == 0) {
        plan.segment_slot[before.segments] = slot;
        plan.segment_begin[before.segments] = before.rows;
    }
}

/* Computes each slot's place. Only warps that have a slot take part in the sums. */
static __device__ __forceinline__ void make_segments(const block_memory &m,
                                                     const sp_cuda_plan &plan, const sizes &n)
{
    unsigned long long carry = 0, value = 0, sum = 0;
    int warp = threadIdx.x >> 5;

    keep_refused(m, n);
#pragma unroll 1
    for (int base = 0; base < n.n_slots; base += THREADS) {
        int slot = base + (int)threadIdx.x;
        bool takes_part = base + warp * SP_WARP < n.n_slots;

        if (takes_part) {
            value = slot < n.n_slots ? pack(add_parts(m, slot, n)) : 0;
            sum = scan_warp(value);
            if ((threadIdx.x & 31) == 31)
                m.shared->warp_sum[warp] = sum;
        }
        __syncthreads();
        if (takes_part) {
            unsigned long long before = carry + sum_of_warps_before(m.shared) + sum - value;

            if (value != 0)
                write_segment(m, plan, slot, unpack(before));
            if (slot == min(base + THREADS, n.n_slots) - 1)
                m.shared->total = before + value;
        }
        __syncthreads();
        carry = m.shared->total;
    }
    if (threadIdx.x == 0 && blockIdx.x == 0)
        plan.segment_begin[unpack(carry).segments] = unpack(carry).rows;
}

/* ---- order and tiles ----------------------------------------------------------------------- */

/* Row `row` is number `number` of the part's rows of its slot. The first row of a tile writes its
 * head; entries without a row stay zeros. */
static __device__ __forceinline__ void place_row(const block_memory &m, const sp_cuda_plan &plan,
                                                 row_cell cell, int row, int number)
{
    slot_place to = m.place[cell.slot];
    unsigned index = (unsigned)(to.before + number), j = index % ROWS;
    unsigned tile = (unsigned)to.tile + index / ROWS, count = min(to.rows - index, ROWS);
    sp_cuda_tile *into = &plan.tiles[tile];

    plan.row_order[to.row + index] = row;
    into->row[j] = row;
    into->scale[j] = cell.scale;
    if (j == 0) {
        *(int2 *)into = make_int2(cell.slot, (int)count);
        plan.tile_begin[tile] = to.row + (int)index;
        plan.tile_rows[tile] = (int)count;
        plan.tile_slot[tile] = cell.slot;
    }
}

/* Writes rows that a warp has read, 32 at a time, to seq_slot and row_scale and into their tiles;
 * `numbered`: their numbers are known from counting. */
static __device__ __forceinline__ void place_rows(const block_memory &m, const sp_cuda_plan &plan,
                                                  const row_cell (&cells)[AT_ONCE], int row0,
                                                  int end, const sizes &n, bool numbered,
                                                  bool refused)
{
    int *strip = &m.cell[(threadIdx.x >> 5) * n.n_slots];

#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        int row = row0 + i * SP_WARP + (int)(threadIdx.x & 31), slot = cells[i].slot, number;

        if (row0 + i * SP_WARP >= end)
            break;
        if (numbered)
            number = strip[max(slot, 0)] + cells[i].number;
        else
            number = number_row(strip, slot, n.slot_bits);
        if (row < end) {
            plan.seq_slot[row] = refused ? -1 : slot;
            plan.row_scale[row] = cells[i].scale;
        }
        if (slot >= 0 && !refused)
            place_row(m, plan, cells[i], row, number);
    }
}

/* Each part zeroes its share of the tiles. */
static __device__ __forceinline__ void zero_tiles(const sp_cuda_plan &plan, const sizes &n)
{
    int4 *to = (int4 *)plan.tiles;

#pragma unroll 1
    for (int i = (int)(blockIdx.x * THREADS + threadIdx.x); i < n.tiles_bound * 5;
         i += n.parts * THREADS)
        to[i] = make_int4(0, 0, 0, 0);
}

/* ---- kernel -------------------------------------------------------------------------------- */

static __device__ __forceinline__ block_memory cut(char *memory, const sizes &n)
{
    block_memory m;

    m.shared = (plan_shared *)memory;
    m.place = (slot_place *)(m.shared + 1);
    m.mine = (int *)(m.place + n.n_slots);
    m.cell = m.mine + n.n_slots;
    return m;
}

static __device__ __forceinline__ void clear(const block_memory &m, const sizes &n)
{
#pragma unroll 1
    for (int i = threadIdx.x; i < n.n_strips * n.n_slots; i += THREADS)
        m.cell[i] = 0;
    if (threadIdx.x == 0)
        m.shared->refused = n.n_rows;
    __syncthreads();
}

/* Called by one thread of one part. */
static __device__ __forceinline__ void write_head(const block_memory &m, const sp_cuda_plan &plan,
                                                  const sizes &n)
{
    bool refused = m.shared->refused_of_all < n.n_rows;
    totals all = unpack(refused ? 0 : m.shared->total);

    *plan.head = {
        n.n_rows, all.rows, all.segments, all.tiles, refused ? m.shared->refused_of_all : -1,
        {0, 0, 0}};
}

__global__ void __launch_bounds__(THREADS)
    plan_kernel(const __grid_constant__ sp_cuda_plan plan, const __grid_constant__ sizes n)
{
    extern __shared__ __align__(16) char memory[];
    block_memory m = cut(memory, n);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, first = (int)blockIdx.x * n.part_rows;
    int row0 = first + warp * n.strip_rows, end = min(first + n.part_rows, n.n_rows);
    bool once = n.strip_rows <= AT_ONCE * SP_WARP; /* a strip's rows fit in registers */
    row_cell cells[AT_ONCE];

    end = warp < n.n_strips ? min(row0 + n.strip_rows, end) : 0;
    read_rows(cells, plan, row0 + lane, end, n.n_slots);
    zero_tiles(plan, n);
    clear(m, n);
    count_rows(m, cells, row0, end, n);
    for (int row = row0 + AT_ONCE * SP_WARP; row < end; row += AT_ONCE * SP_WARP) {
        read_rows(cells, plan, row + lane, end, n.n_slots);
        count_rows(m, cells, row, end, n);
    }
    __syncthreads();
    for (int slot = threadIdx.x; slot < n.n_slots; slot += THREADS)
        m.mine[slot] = add_strips(m, slot, n);
    join_parts(n);
    make_segments(m, plan, n);
    if (n.parts > 1)
        cluster_arrive(); /* this block has finished reading the others' memory */
    for (int row = row0; row < end; row += AT_ONCE * SP_WARP) {
        if (!once)
            read_rows(cells, plan, row + lane, end, n.n_slots);
        place_rows(m, plan, cells, row, end, n, once, m.shared->refused_of_all < n.n_rows);
    }
    if (threadIdx.x == 0 && blockIdx.x == 0)
        write_head(m, plan, n);
    if (n.parts > 1)
        cluster_wait();
}

/* ---- launch -------------------------------------------------------------------------------- */

/* Each GPU's largest cluster of this kernel, or 1. Written at init, before any launch. */
static int parts_max[SP_CUDA_GPUS_MAX];

static size_t shared_bytes(const sizes &n)
{
    return sizeof(plan_shared) + (size_t)n.n_slots * (sizeof(slot_place) + sizeof(int)) +
           (size_t)n.n_strips * (size_t)n.n_slots * sizeof(int);
}

static int parts_of(int gpu, int n_rows)
{
    int most = gpu < SP_CUDA_GPUS_MAX ? parts_max[gpu] : 1;

    if (n_rows <= ALONE_ROWS || most < PARTS_FEW)
        return 1;
    return n_rows <= FEW_ROWS || most < PARTS_MANY ? PARTS_FEW : PARTS_MANY;
}

/* As many strips per part as fit into shared memory, up to one per warp. */
static sizes sizes_of(int n_rows, int n_slots, int parts)
{
    sizes n = {};
    int most;

    n.n_rows = n_rows;
    n.n_slots = n_slots;
    n.parts = parts;
    if (n_rows == 0)
        return n;
    n.tiles_bound = sp_cuda_tiles_bound(n_rows, n_slots);
    while (1 << n.slot_bits < n_slots)
        n.slot_bits++;
    n.part_rows = sp_cuda_ceil(sp_cuda_ceil(n_rows, parts), SP_WARP) * SP_WARP;
    most = ((int)SHARED_BYTES - (int)shared_bytes(n)) / (n_slots * (int)sizeof(int));
    most = most < WARPS ? most : WARPS;
    n.strip_rows = sp_cuda_ceil(sp_cuda_ceil(n.part_rows, most), SP_WARP) * SP_WARP;
    n.n_strips = sp_cuda_ceil(n.part_rows, n.strip_rows);
    return n;
}

static cudaLaunchConfig_t config_of(const sizes &n, cudaLaunchAttribute *cluster,
                                    cudaStream_t stream)
{
    cudaLaunchConfig_t config = {};

    cluster->id = cudaLaunchAttributeClusterDimension;
    cluster->val.clusterDim.x = (unsigned)n.parts;
    cluster->val.clusterDim.y = 1;
    cluster->val.clusterDim.z = 1;
    config.gridDim = dim3((unsigned)n.parts);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = shared_bytes(n);
    config.stream = stream;
    config.attrs = cluster;
    config.numAttrs = n.parts > 1 ? 1 : 0;
    return config;
}

extern "C" int sp_cuda_plan_rows(int gpu, const sp_cuda_plan *plan, int32_t n_rows, int32_t n_slots,
                                 void *stream)
{
    sp_cuda_current current(gpu);
    cudaError_t code = current.code;
    cudaLaunchAttribute cluster;
    cudaLaunchConfig_t config;
    sizes n;

    if (code != cudaSuccess)
        return (int)code;
    if (n_rows < 0 || n_rows > SP_CUDA_ROWS_MAX || n_slots < 1 || n_slots > SP_CUDA_SLOTS_MAX)
        return (int)cudaErrorInvalidValue;
    n = sizes_of(n_rows, n_slots, parts_of(gpu, n_rows));
    config = config_of(n, &cluster, (cudaStream_t)stream);
    return (int)cudaLaunchKernelEx(&config, plan_kernel, *plan, n);
}

/* Whether a cluster of so many blocks, with the most memory that a plan can need, can run. */
static bool takes_parts(int parts)
{
    sizes n = sizes_of(SP_CUDA_ROWS_MAX, SP_CUDA_SLOTS_MAX, parts);
    cudaLaunchAttribute cluster;
    cudaLaunchConfig_t config = config_of(n, &cluster, NULL);
    int active = 0;

    if (cudaOccupancyMaxActiveClusters(&active, plan_kernel, &config) == cudaSuccess)
        return active > 0;
    (void)cudaGetLastError();
    return false;
}

/* See sp_cuda_overlaps. Per GPU; written at its init, before any launch on it. */
static bool waits[SP_CUDA_GPUS_MAX];

bool sp_cuda_overlaps(void)
{
    int gpu = SP_CUDA_GPUS_MAX;

    return cudaGetDevice(&gpu) == cudaSuccess && gpu < SP_CUDA_GPUS_MAX && waits[gpu];
}

/* The code may have been built for an older architecture than the GPU's: then it has neither
 * clusters nor the wait for a predecessor. */
static cudaError_t find_clusters(int gpu)
{
    cudaFuncAttributes kernel;
    cudaError_t code = cudaFuncGetAttributes(&kernel, plan_kernel);

    if (code != cudaSuccess || gpu >= SP_CUDA_GPUS_MAX)
        return code;
    waits[gpu] = kernel.ptxVersion >= 90;
    parts_max[gpu] = 1;
    if (kernel.ptxVersion < 90)
        return cudaSuccess;
    code = cudaFuncSetAttribute(plan_kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (code != cudaSuccess)
        (void)cudaGetLastError();
    if (takes_parts(PARTS_FEW))
        parts_max[gpu] = code == cudaSuccess && takes_parts(PARTS_MANY) ? PARTS_MANY : PARTS_FEW;
    return cudaSuccess;
}

/* Also loads this object's code: a GPU that the build has no code for fails here, not in a step. */
extern "C" int sp_cuda_kernels_init(int gpu)
{
    sp_cuda_current current(gpu);
    cudaError_t code = current.code;

    if (code == cudaSuccess)
        code = cudaFuncSetAttribute(plan_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    SHARED_BYTES);
    code = code == cudaSuccess ? find_clusters(gpu) : code;
    code = code == cudaSuccess ? sp_cuda_shrink_init() : code;
    code = code == cudaSuccess ? sp_cuda_shrink_windows_init(gpu) : code;
    code = code == cudaSuccess ? sp_cuda_expand_init() : code;
    code = code == cudaSuccess ? sp_cuda_expand_wide_init(gpu) : code;
    code = code == cudaSuccess ? sp_cuda_expand_wide_sm90a_init(gpu) : code;
    code = code == cudaSuccess ? sp_cuda_expand_ring_init(gpu) : code;
    code = code == cudaSuccess ? sp_cuda_attention_init(gpu) : code;
    code = code == cudaSuccess ? sp_cuda_group_init() : code;
    code = code == cudaSuccess ? sp_cuda_expert_init() : code;
    code = code == cudaSuccess ? sp_cuda_expert_ring_init(gpu) : code;
    code = code == cudaSuccess ? sp_cuda_expert_apart_init() : code;
    code = code == cudaSuccess ? sp_cuda_expert_gemm_init(gpu) : code;
    code = code == cudaSuccess ? sp_cuda_rule_init(gpu) : code;
    return (int)(code == cudaSuccess ? sp_cuda_choose_init(gpu) : code);
}
