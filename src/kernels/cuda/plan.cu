/*
 * plan.cu: seq_slot and row_scale → segments, row order and tiles, the same bytes as the host's
 * sp_plan_build_rows. A counting sort by slot that keeps the rows' order inside a slot. Grid: one
 * block of 1,024 threads for each 128 tiles; every block sorts all rows, which costs less than to
 * wait for another, and writes its own tiles. The rows are cut into strips, one for each warp;
 * every strip counts its rows of each slot, the counts become the places where the strip's first
 * rows go, and each warp then places its own rows without a word to the others. A slot or scale out
 * of range refuses the whole plan: no tile, and head->refused_row says which row. Bound by latency.
 */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"

#define THREADS   1024
#define WARPS     (THREADS / SP_WARP)
#define ROWS      SP_CUDA_TILE_ROWS
#define TILES     128  /* of a block */
#define CELLS     8192 /* counts of all strips: at most 32 strips, and at least 2 */
#define AT_ONCE   8    /* rows of a thread whose loads are in flight together */
#define SCALE_MAX 16.0f

static_assert(CELLS >= 2 * SP_CUDA_SLOTS_MAX, "room for two strips");
static_assert(sizeof(sp_cuda_tile) == 80 && ROWS == 8, "five pieces of 16 bytes, two of them rows");

/* Where a slot's rows go. */
typedef struct slot_place {
    int row, tile, rows; /* place of the first in row_order, first tile, how many */
} slot_place;

typedef struct plan_shared {
    int4 head[TILES]; /* slot, count, 0, 0: as in sp_cuda_tile */
    int row[TILES * ROWS];
    float scale[TILES * ROWS];
    int begin[TILES];
    int carry[3], refused, warp_sum[3][WARPS];
    int cell[CELLS];     /* [strips, slots]: rows; then how many of the slot come before the strip's
                            next */
    slot_place place[1]; /* [slots] */
} plan_shared;

/* What every thread knows. */
typedef struct sizes {
    int n_rows, n_slots, tiles_bound;
    int n_strips, strip_rows; /* rows a multiple of 32 */
} sizes;

/* ---- prefix sums --------------------------------------------------------------------------- */

static __device__ __forceinline__ int scan_warp(int sum)
{
#pragma unroll
    for (int d = 1; d < SP_WARP; d *= 2) {
        int other = __shfl_up_sync(~0u, sum, d);

        sum += (int)(threadIdx.x & 31) >= d ? other : 0;
    }
    return sum;
}

/* Exclusive sums over the block's threads of three numbers at once, after what `carry` holds. */
static __device__ __forceinline__ void scan(plan_shared *s, const int *value, int *out_before)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, sum[3];

#pragma unroll
    for (int j = 0; j < 3; j++) {
        sum[j] = scan_warp(value[j]);
        if (lane == 31)
            s->warp_sum[j][warp] = sum[j];
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 3; j++) {
        int of_warps = scan_warp(s->warp_sum[j][lane]); /* of all up to `lane` */
        int before = __shfl_sync(~0u, of_warps, max(warp - 1, 0));

        out_before[j] = s->carry[j] + (warp > 0 ? before : 0) + sum[j] - value[j];
    }
    __syncthreads();
    if (threadIdx.x == THREADS - 1)
#pragma unroll
        for (int j = 0; j < 3; j++)
            s->carry[j] = out_before[j] + value[j];
    __syncthreads();
}

/* ---- rows ---------------------------------------------------------------------------------- */

typedef struct row_cell {
    int slot; /* -1: without adapter; -2: refused */
    float scale;
    int number; /* among the strip's rows of the slot */
} row_cell;

static __device__ __forceinline__ row_cell read_row(const sp_cuda_plan &plan, int row, int n_slots)
{
    row_cell cell = {plan.seq_slot_in != NULL ? plan.seq_slot_in[row] : 0,
                     plan.row_scale_in != NULL ? plan.row_scale_in[row] : 1.0f, 0};

    if (cell.slot < -1 || cell.slot >= n_slots || !(cell.scale >= 0.0f && cell.scale <= SCALE_MAX))
        cell.slot = -2;
    else if (cell.scale == 0.0f)
        cell.slot = -1;
    return cell;
}

/* AT_ONCE rows of this thread, 32 apart; slot -1 beyond the end. */
static __device__ __forceinline__ void read_rows(row_cell (&cells)[AT_ONCE],
                                                 const sp_cuda_plan &plan, int row0, int end,
                                                 int n_slots)
{
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        cells[i] = {-1, 1.0f, 0};
        if (row0 + i * SP_WARP < end)
            cells[i] = read_row(plan, row0 + i * SP_WARP, n_slots);
    }
}

/* Of 32 rows that a warp holds, one each: how many of this row's slot come before it, by the cells
 * of the warp's strip, which then count these too. Slot < 0: nothing. */
static __device__ __forceinline__ int number_row(int *cells, int slot)
{
    unsigned peers = __match_any_sync(~0u, slot);
    int lane = threadIdx.x & 31, *next = cells + max(slot, 0);
    int number = *next + __popc(peers & ((1u << lane) - 1));

    __syncwarp();
    if (slot >= 0 && lane == __ffs(peers) - 1)
        *next += __popc(peers);
    __syncwarp();
    return number;
}

/* Counts rows that a warp has read; this block's share of them is written as the view shows it. */
static __device__ __forceinline__ void count_rows(plan_shared *s, const sp_cuda_plan &plan,
                                                  row_cell (&cells)[AT_ONCE], int row0, int end,
                                                  int n_slots)
{
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        int at = row0 + i * SP_WARP + (int)(threadIdx.x & 31);

        if (row0 + i * SP_WARP >= end)
            break;
        cells[i].number = number_row(&s->cell[(threadIdx.x >> 5) * n_slots], cells[i].slot);
        if (cells[i].slot == -2)
            atomicMin(&s->refused, at);
        else if (at < end && at / (TILES * ROWS) == (int)blockIdx.x) {
            plan.seq_slot[at] = cells[i].slot;
            plan.row_scale[at] = cells[i].scale;
        }
    }
}

/* ---- segments ------------------------------------------------------------------------------ */

/* The slot's rows; its cells become sums over the strips before. */
static __device__ __forceinline__ int add_strips(plan_shared *s, int slot, const sizes &n)
{
    int rows = 0;

#pragma unroll 8
    for (int strip = 0; strip < n.n_strips; strip++) {
        int here = s->cell[strip * n.n_slots + slot];

        s->cell[strip * n.n_slots + slot] = rows;
        rows += here;
    }
    return rows;
}

/* Where each slot's rows go; carry ends as (rows, segments, tiles). */
static __device__ __forceinline__ void make_segments(plan_shared *s, const sp_cuda_plan &plan,
                                                     const sizes &n)
{
    for (int base = 0; base < n.n_slots; base += THREADS) {
        int slot = base + threadIdx.x, rows = slot < n.n_slots ? add_strips(s, slot, n) : 0;
        int value[3] = {rows, rows > 0, (rows + ROWS - 1) / ROWS}, before[3];

        scan(s, value, before);
        if (rows == 0)
            continue;
        s->place[slot] = {before[0], before[2], rows};
        if (blockIdx.x == 0) {
            plan.segment_slot[before[1]] = slot;
            plan.segment_begin[before[1]] = before[0];
        }
    }
    if (threadIdx.x == 0 && blockIdx.x == 0)
        plan.segment_begin[s->carry[1]] = s->carry[0];
    __syncthreads();
}

/* ---- order and tiles ----------------------------------------------------------------------- */

/* Row `row` is number `index` of its slot: noted if its tile is of this block. */
static __device__ __forceinline__ void place_row(plan_shared *s, const sp_cuda_plan &plan,
                                                 row_cell cell, int row, int index)
{
    slot_place to = s->place[cell.slot];
    int tile = to.tile + index / ROWS - (int)blockIdx.x * TILES, j = index % ROWS;

    if (tile < 0 || tile >= TILES)
        return;
    plan.row_order[to.row + index] = row;
    s->row[tile * ROWS + j] = row;
    s->scale[tile * ROWS + j] = cell.scale;
    if (j == 0) {
        s->head[tile] = make_int4(cell.slot, min(to.rows - index, ROWS), 0, 0);
        s->begin[tile] = to.row + index;
    }
}

/* Rows that a warp has read, 32 at a time; `numbered`: and numbered when they were counted. */
static __device__ __forceinline__ void place_rows(plan_shared *s, const sp_cuda_plan &plan,
                                                  const row_cell (&cells)[AT_ONCE], int row0,
                                                  int end, int n_slots, bool numbered)
{
    int *mine = &s->cell[(threadIdx.x >> 5) * n_slots];

#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        int slot = cells[i].slot, index;

        if (row0 + i * SP_WARP >= end)
            break;
        if (numbered)
            index = mine[max(slot, 0)] + cells[i].number;
        else
            index = number_row(mine, slot);
        if (slot >= 0)
            place_row(s, plan, cells[i], row0 + i * SP_WARP + (int)(threadIdx.x & 31), index);
    }
}

/* This block's tiles; those beyond the last are zeros. */
static __device__ __forceinline__ void write_tiles(const plan_shared *s, const sp_cuda_plan &plan,
                                                   int n_tiles, int tiles_bound)
{
    int first = blockIdx.x * TILES, n = min(TILES, tiles_bound - first);
    int4 *to = (int4 *)(plan.tiles + first);

    for (int i = threadIdx.x; i < n * 5; i += THREADS) {
        int tile = i / 5, piece = i % 5;

        to[i] = piece == 0   ? s->head[tile]
                : piece <= 2 ? ((const int4 *)s->row)[tile * 2 + piece - 1]
                             : ((const int4 *)s->scale)[tile * 2 + piece - 3];
    }
    for (int i = threadIdx.x; i < min(n, n_tiles - first); i += THREADS) {
        plan.tile_begin[first + i] = s->begin[i];
        plan.tile_rows[first + i] = s->head[i].y;
        plan.tile_slot[first + i] = s->head[i].x;
    }
}

/* ---- kernel -------------------------------------------------------------------------------- */

static __device__ __forceinline__ void clear(plan_shared *s, const sizes &n)
{
    for (int i = threadIdx.x; i < n.n_strips * n.n_slots; i += THREADS)
        s->cell[i] = 0;
    if (threadIdx.x < TILES)
        s->head[threadIdx.x] = make_int4(0, 0, 0, 0);
    for (int i = threadIdx.x; i < TILES * ROWS; i += THREADS) {
        s->row[i] = 0;
        s->scale[i] = 0.0f;
    }
    if (threadIdx.x < 3)
        s->carry[threadIdx.x] = 0;
    if (threadIdx.x == 0)
        s->refused = n.n_rows;
    __syncthreads();
}

__global__ void __launch_bounds__(THREADS)
    plan_kernel(const __grid_constant__ sp_cuda_plan plan, const sizes n)
{
    extern __shared__ __align__(16) char memory[];
    plan_shared *s = (plan_shared *)memory;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row0 = warp * n.strip_rows;
    int end = warp < n.n_strips ? min(row0 + n.strip_rows, n.n_rows) : 0;
    bool once = n.strip_rows <= AT_ONCE * SP_WARP; /* a strip's rows stay in registers */
    row_cell cells[AT_ONCE];

    read_rows(cells, plan, row0 + lane, end, n.n_slots);
    clear(s, n);
    count_rows(s, plan, cells, row0, end, n.n_slots);
    for (int row = row0 + AT_ONCE * SP_WARP; row < end; row += AT_ONCE * SP_WARP) {
        read_rows(cells, plan, row + lane, end, n.n_slots);
        count_rows(s, plan, cells, row, end, n.n_slots);
    }
    __syncthreads();
    if (s->refused == n.n_rows) {
        make_segments(s, plan, n);
        for (int row = row0; row < end; row += AT_ONCE * SP_WARP) {
            if (!once)
                read_rows(cells, plan, row + lane, end, n.n_slots);
            place_rows(s, plan, cells, row, end, n.n_slots, once);
        }
        __syncthreads();
    }
    write_tiles(s, plan, s->carry[2], n.tiles_bound);
    if (threadIdx.x == 0 && blockIdx.x == 0)
        *plan.head = {n.n_rows,
                      s->carry[0],
                      s->carry[1],
                      s->carry[2],
                      s->refused < n.n_rows ? s->refused : -1,
                      {0, 0, 0}};
}

/* As many strips as there is room for, up to one for each warp. */
static sizes sizes_of(int n_rows, int n_slots)
{
    int most = CELLS / n_slots < WARPS ? CELLS / n_slots : WARPS;
    int rows = sp_cuda_ceil(sp_cuda_ceil(n_rows, most), SP_WARP) * SP_WARP;

    if (n_rows == 0)
        return {0, n_slots, 0, 0, 0};
    return {n_rows, n_slots, sp_cuda_tiles_bound(n_rows, n_slots), sp_cuda_ceil(n_rows, rows),
            rows};
}

static size_t shared_bytes(int n_slots)
{
    return sizeof(plan_shared) + (size_t)n_slots * sizeof(slot_place);
}

extern "C" int sp_cuda_plan_rows(int gpu, const sp_cuda_plan *plan, int32_t n_rows, int32_t n_slots,
                                 void *stream)
{
    cudaError_t code = cudaSetDevice(gpu);
    int blocks;
    sizes n;

    if (code != cudaSuccess)
        return (int)code;
    if (n_rows < 0 || n_rows > SP_CUDA_ROWS_MAX || n_slots < 1 || n_slots > SP_CUDA_SLOTS_MAX)
        return (int)cudaErrorInvalidValue;
    n = sizes_of(n_rows, n_slots);
    blocks = n.tiles_bound > TILES ? sp_cuda_ceil(n.tiles_bound, TILES) : 1;
    plan_kernel<<<blocks, THREADS, shared_bytes(n_slots), (cudaStream_t)stream>>>(*plan, n);
    return (int)cudaGetLastError();
}

/* Loads this object's code, too: a GPU that the build has none for fails here, not in a step. */
extern "C" int sp_cuda_kernels_init(int gpu)
{
    cudaError_t code = cudaSetDevice(gpu);

    if (code == cudaSuccess)
        code = cudaFuncSetAttribute(plan_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    (int)shared_bytes(SP_CUDA_SLOTS_MAX));
    code = code == cudaSuccess ? sp_cuda_shrink_windows_init(gpu) : code;
    return (int)(code == cudaSuccess ? sp_cuda_expand_init() : code);
}
