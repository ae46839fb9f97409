/*
 * expand_ring.cu: y += scale · xa · Bᵀ for a group of sites in one launch, for steps that move much
 * data; from sm_90 on, with the bits of expand.cu.
 *
 * A persistent, warp-specialised pipeline. Grid: one block per multiprocessor. Work items are pairs
 * (window of tiles, chunk of columns of one site), the chunks of a window adjacent, and each block
 * takes an equal contiguous range of them. Within a window the block iterates over sites, runs of
 * tiles that share a slot, and chunks; each of these fills one stage of a ring in shared memory:
 * the run's rows of y and the slot's rows of B. Each warp has one role, since a single producer
 * warp would be the bottleneck: the producer writes the stage descriptor and issues the copies of
 * B, loaders issue those of y, gatherers sum the split-K partials to xa when a run starts,
 * consumers multiply and fold into y in place, storers write y back. They synchronise by mbarriers.
 * The producer fills all stages with B before the other warps' wait for the shrink. Bound by
 * memory: the bytes in flight, not the threads, hide its latency.
 */
#include "base/integer.h"
#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/expand.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/partials.cuh"

#define ROWS         SP_CUDA_TILE_ROWS
#define CONSUMERS    8 /* warps that compute */
#define GATHERERS    3 /* warps that sum partials */
#define LOADERS      2 /* warps that load y */
#define STORERS      2 /* warps that store y */
#define GATHER_0     CONSUMERS
#define LOAD_0       (GATHER_0 + GATHERERS)
#define STORE_0      (LOAD_0 + LOADERS)
#define PRODUCER     (STORE_0 + STORERS) /* the warp that writes stage descriptors and loads B */
#define THREADS      ((PRODUCER + 1) * SP_WARP)
#define WARP_COLUMNS 32 /* that a warp computes at a time */
#define STAGES_MAX   10
#define WINDOW_ROWS  (SP_CUDA_WINDOW_TILES * ROWS)
#define FEW_SLOTS    128 /* up to so many, a block loads all ranks and scales at its start */

/* read_window: each lane holds one tile's slot and two rows, `lane` and `lane` + 32, of the tiles
 * lane / ROWS and 4 + lane / ROWS. */
static_assert(SP_WARP / ROWS == 4 && SP_WARP % ROWS == 0, "a warp reads four tiles at a time");
static_assert(SP_CUDA_WINDOW_TILES == 2 * (SP_WARP / ROWS), "two rows a lane are a whole window");
static_assert(SP_CUDA_WINDOW_TILES <= SP_WARP, "a lane for each tile of a window");
static_assert(WINDOW_ROWS == 2 * SP_WARP, "two rows a lane are the rows of a window");

typedef struct ring_shape {
    int first_chunk[SP_CUDA_SITES_MAX + 1]; /* of each site */
    int columns, window_tiles;              /* of a stage */
    int stages, stage_bytes;
    int y_pitch;  /* bytes; 16 more than a multiple of 128: no bank conflicts */
    int b_at;     /* byte offset of B in a stage */
    int xa_pitch; /* elements; an odd multiple of 32, likewise */
    int xa_bytes; /* of one of the two buffers */
    int tiles_bound;
    partials_shape partials;
} ring_shape;

/* Stage descriptor: what a stage holds. */
typedef struct alignas(16) stage_desc {
    int site, columns; /* columns 0: no more stages */
    int rank, b_pitch; /* bytes */
    int tiles, rows;
    int fresh; /* the first stage of its run and site: xa is gathered for it */
    int pad;
    char *y[WINDOW_ROWS]; /* at the stage's first column; NULL: neither read nor written */
    int row[WINDOW_ROWS]; /* of xa; -1: none */
    float scale[WINDOW_ROWS];
} stage_desc;

/* Rank and stored scale of a slot. */
typedef struct slot_cell {
    int rank;
    float scale;
} slot_cell;

typedef struct block_shared {
    uint64_t described[STAGES_MAX], full[STAGES_MAX], done[STAGES_MAX], empty[STAGES_MAX];
    uint64_t xa_full[2], xa_empty[2];
    stage_desc descs[STAGES_MAX];
    slot_cell cell[SP_CUDA_SITES_MAX][FEW_SLOTS];
} block_shared;

#if __CUDA_ARCH__ >= 900

/* A warp's position in the ring: stage, phase parity, stages so far. */
typedef struct pipeline_state {
    int stage, parity, count;
} pipeline_state;

static __device__ __forceinline__ void advance(pipeline_state *at, int stages)
{
    at->count++;
    if (++at->stage == stages) {
        at->stage = 0;
        at->parity ^= 1;
    }
}

static __device__ __forceinline__ uint32_t barrier_of(const uint64_t *barriers, int stage)
{
    return shared_address(&barriers[stage]);
}

/* Orders the warp's work so far before what others do after the barrier. Every lane arrives: a
 * single arrival for the warp would suffice and is no faster, but race checkers track lanes one by
 * one. */
static __device__ __forceinline__ void warp_arrive(uint32_t barrier)
{
    __syncwarp();
    barrier_arrive(barrier);
}

/* ---- producer ------------------------------------------------------------------------------ */

/* A lane's part of a window: tile `lane`, and rows `lane` and `lane` + 32. */
typedef struct lane_window {
    int slot; /* -1: no tile */
    int row[2];
    float request[2];
} lane_window;

typedef struct producer {
    block_shared *shared;
    const ring_shape *shape;
    uint32_t ring; /* shared address */
    pipeline_state at;
} producer;

static __device__ __forceinline__ lane_window read_window(const sp_cuda_group &group, int first,
                                                          int tiles)
{
    int lane = threadIdx.x & 31, j = lane % ROWS;
    lane_window win = {-1, {-1, -1}, {0.0f, 0.0f}};

    if (lane < tiles)
        win.slot = group.plan.tiles[first + lane].slot;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int tile = h * 4 + lane / ROWS;

        if (tile < tiles) {
            const sp_cuda_tile *from = &group.plan.tiles[first + tile];
            int count = from->count, row = from->row[j];
            float request = from->scale[j];

            win.row[h] = j < count ? row : -1;
            win.request[h] = j < count ? request : 0.0f;
        }
    }
    return win;
}

/* Issues the copies of `columns` rows of B, each of the adapter's own rank, contiguous in shared
 * memory. */
static __device__ __forceinline__ void copy_b(uint32_t to, const uint16_t *from, int64_t stride,
                                              int columns, int rank, uint32_t full)
{
    int lane = threadIdx.x & 31, pieces = (rank + 7) / 8;

    if (stride == pieces * 8) {
        if (lane == 0) {
            copies_before_bulk();
            barrier_expect(full, columns * pieces * 16);
            bulk_load(to, from, columns * pieces * 16, full);
        }
    } else {
        int column = lane / pieces, piece = lane % pieces;
        int columns_on = 32 / pieces, pieces_on = 32 % pieces;

        for (uint32_t at = to + lane * 16; column < columns; at += 32 * 16) {
            copy_async(at, from + column * stride + piece * 8);
            column += columns_on;
            piece += pieces_on;
            if (piece >= pieces) {
                piece -= pieces;
                column++;
            }
        }
    }
}

/* A run of tiles [from, to) of the window, at one site. */
typedef struct site_run {
    int site, slot, from, to;
    slot_cell cell;
} site_run;

static __device__ __forceinline__ void write_desc(stage_desc *desc, const sp_cuda_site &site,
                                                  const site_run &run, const lane_window &win,
                                                  int column0, int columns, bool fresh)
{
    int lane = threadIdx.x & 31, rows = 0;

#pragma unroll
    for (int h = 0; h < 2; h++) {
        int at = lane + 32 * h - run.from * ROWS;
        float scale = sp_scale_of_row(run.cell.scale, win.request[h]);
        bool mine = at >= 0 && at < (run.to - run.from) * ROWS;

        rows += __popc(__ballot_sync(~0u, mine && win.row[h] >= 0));
        if (mine) {
            desc->row[at] = scale != 0.0f ? win.row[h] : -1;
            desc->y[at] =
                scale != 0.0f ? (char *)site.y + (win.row[h] * site.y_stride + column0) * 2 : NULL;
            desc->scale[at] = scale;
        }
    }
    if (lane == 0) {
        desc->site = run.site;
        desc->columns = columns;
        desc->rank = run.cell.rank;
        desc->b_pitch = (run.cell.rank + 7) / 8 * 16;
        desc->tiles = run.to - run.from;
        desc->rows = rows;
        desc->fresh = fresh;
    }
}

static __device__ __forceinline__ void fill_stage(producer *fill, const sp_cuda_site &site,
                                                  const site_run &run, const lane_window &win,
                                                  int column0, bool fresh)
{
    int lane = threadIdx.x & 31, stage = fill->at.stage;
    uint32_t full = barrier_of(fill->shared->full, stage);
    int columns = min(fill->shape->columns, site.n_out - column0);

    if (fill->at.count >= fill->shape->stages)
        barrier_wait(barrier_of(fill->shared->empty, stage), fill->at.parity ^ 1);
    write_desc(&fill->shared->descs[stage], site, run, win, column0, columns, fresh);
    warp_arrive(barrier_of(fill->shared->described, stage));
    copy_b(fill->ring + stage * fill->shape->stage_bytes + fill->shape->b_at,
           (const uint16_t *)site.b + run.slot * site.b_slot_stride + column0 * site.b_stride,
           site.b_stride, columns, run.cell.rank, full);
    barrier_arrive_after_copies(full);
    __syncwarp();
    if (lane == 0)
        barrier_arrive(full);
    advance(&fill->at, fill->shape->stages);
}

/* Fills stages with chunks [from, to) of one site, for all runs of the window. */
static __device__ __forceinline__ void fill_site(producer *fill, const sp_cuda_group &group,
                                                 const lane_window &win, int index, int tiles,
                                                 int from, int to)
{
    const sp_cuda_site &site = group.sites[index];
    site_run run = {index, 0, 0, 0, {0, 0.0f}};

    for (; run.from < tiles; run.from = run.to) {
        run.slot = __shfl_sync(~0u, win.slot, run.from);
        run.to = run.from + __popc(__ballot_sync(~0u, win.slot == run.slot));
        if (group.n_slots <= FEW_SLOTS)
            run.cell = fill->shared->cell[index][run.slot];
        else
            run.cell = {site.rank != NULL ? site.rank[run.slot] : site.one_rank,
                        site.scale != NULL ? site.scale[run.slot] : site.one_scale};
        if (run.cell.rank == 0 || run.cell.scale == 0.0f)
            continue;
        for (int chunk = from; chunk < to; chunk++)
            fill_stage(fill, site, run, win, chunk * fill->shape->columns, chunk == from);
    }
}

/* Fills stages with chunks [chunk, chunk_end) of a window, those of site 0 first. */
static __device__ __forceinline__ void fill_window(producer *fill, const sp_cuda_group &group,
                                                   int n_tiles, int window, int chunk,
                                                   int chunk_end)
{
    const ring_shape &shape = *fill->shape;
    int first = window * shape.window_tiles, tiles = min(shape.window_tiles, n_tiles - first);
    lane_window win = read_window(group, first, tiles);

    for (int i = 0; i < group.n_sites; i++) {
        int from = max(chunk, shape.first_chunk[i]), to = min(chunk_end, shape.first_chunk[i + 1]);

        if (from < to)
            fill_site(fill, group, win, i, tiles, from - shape.first_chunk[i],
                      to - shape.first_chunk[i]);
    }
}

static __device__ __forceinline__ void fill_all(producer *fill, const sp_cuda_group &group,
                                                int n_tiles)
{
    const ring_shape &shape = *fill->shape;
    int windows = (n_tiles + shape.window_tiles - 1) / shape.window_tiles;
    int chunks = shape.first_chunk[group.n_sites];
    int64_t all = (int64_t)windows * chunks;
    int64_t unit = all * blockIdx.x / gridDim.x, end = all * (blockIdx.x + 1) / gridDim.x;

    while (unit < end) {
        int window = (int)(unit / chunks), chunk = (int)(unit % chunks);
        int chunk_end = (int)min((int64_t)chunks, chunk + (end - unit));

        fill_window(fill, group, n_tiles, window, chunk, chunk_end);
        unit += chunk_end - chunk;
    }
    /* The descriptor that ends the stages. */
    if (fill->at.count >= shape.stages)
        barrier_wait(barrier_of(fill->shared->empty, fill->at.stage), fill->at.parity ^ 1);
    if ((threadIdx.x & 31) == 0)
        fill->shared->descs[fill->at.stage].columns = 0;
    warp_arrive(barrier_of(fill->shared->described, fill->at.stage));
}

/* ---- loaders ------------------------------------------------------------------------------- */

static __device__ __forceinline__ void load_tile(const stage_desc &desc, int tile, uint32_t to,
                                                 int pitch, int bytes)
{
    int lane = threadIdx.x & 31;

#pragma unroll 1
    for (int c = lane * 16; c < bytes; c += 512) {
        char *from[ROWS];

#pragma unroll
        for (int i = 0; i < ROWS; i++)
            from[i] = desc.y[tile * ROWS + i];
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            if (from[i] != NULL)
                copy_async(to + (tile * ROWS + i) * pitch + c, from[i] + c);
    }
}

/* This warp's share of y in all stages: tiles round-robin, or the rows of a single tile. */
static __device__ __forceinline__ void load_all(block_shared *shared, uint32_t ring,
                                                const ring_shape &shape)
{
    int lane = threadIdx.x & 31, self = (threadIdx.x >> 5) - LOAD_0;
    pipeline_state at = {0, 0, 0};

    wait_predecessor();
    for (;; advance(&at, shape.stages)) {
        const stage_desc &desc = shared->descs[at.stage];
        uint32_t to = ring + at.stage * shape.stage_bytes;
        int bytes, tiles;

        barrier_wait(barrier_of(shared->described, at.stage), at.parity);
        bytes = desc.columns * 2;
        tiles = desc.tiles;
        if (bytes == 0)
            break;
        if (tiles == 1) {
#pragma unroll 1
            for (int i = self; i < desc.rows; i += LOADERS) {
                const char *from = desc.y[i];

                if (from != NULL)
#pragma unroll 4
                    for (int c = lane * 16; c < bytes; c += 512)
                        copy_async(to + i * shape.y_pitch + c, from + c);
            }
        } else {
            for (int tile = self; tile < tiles; tile += LOADERS)
                load_tile(desc, tile, to, shape.y_pitch, bytes);
        }
        barrier_arrive_after_copies(barrier_of(shared->full, at.stage));
    }
}

/* ---- gatherers ----------------------------------------------------------------------------- */

/* xa of a run, T, zero beyond the rank up to a multiple of 32. Absent rows keep their old content:
 * no other row's product reads it. */
template <int F16, int N, int AHEAD>
static __device__ __forceinline__ void gather_xa(uint16_t *xa, int pitch, const stage_desc &desc,
                                                 const sp_cuda_group &group,
                                                 partials_shape partials)
{
    int self = threadIdx.x - GATHER_0 * SP_WARP, rank = desc.rank, rows = desc.rows;
    int fours = (rank + 3) / 4, items = rows * fours, end = (rank + 31) / 32 * 8;
    int partial_row = group.rank_stride * group.n_sites;
    int64_t partial_floats = (int64_t)group.n_rows * partial_row;
    const float *first = group.partials + desc.site * group.rank_stride;

    for (int item0 = self; item0 < items; item0 += N * GATHERERS * SP_WARP) {
        const float *partial[N];
        float4 v[N];
        int to[N], left[N];

#pragma unroll
        for (int i = 0; i < N; i++) {
            int item = item0 + i * GATHERERS * SP_WARP, at = item / fours;
            int c = (item - at * fours) * 4, row = item < items ? desc.row[at] : -1;

            partial[i] = row < 0 ? NULL : first + (int64_t)row * partial_row + c;
            to[i] = at * pitch + c;
            left[i] = rank - c;
        }
        sum_several<N, AHEAD>(v, partial, partial_floats, partials);
#pragma unroll
        for (int i = 0; i < N; i++)
            if (partial[i] != NULL)
                *(uint2 *)&xa[to[i]] = make_uint2(
                    narrow_two<F16>(v[i].x, left[i] > 1 ? v[i].y : 0.0f),
                    narrow_two<F16>(left[i] > 2 ? v[i].z : 0.0f, left[i] > 3 ? v[i].w : 0.0f));
    }
    for (int i = self; i < rows * (end - fours); i += GATHERERS * SP_WARP)
        *(uint2 *)&xa[i / (end - fours) * pitch + (fours + i % (end - fours)) * 4] =
            make_uint2(0, 0);
}

/* xa of each fresh stage, double-buffered, ahead of the consumers. */
template <int F16>
static __device__ __forceinline__ void gather_all(block_shared *shared, char *memory,
                                                  const sp_cuda_group &group,
                                                  const ring_shape &shape)
{
    int runs = 0;
    pipeline_state at = {0, 0, 0};

    wait_predecessor();
    for (;; advance(&at, shape.stages)) {
        const stage_desc &desc = shared->descs[at.stage];

        barrier_wait(barrier_of(shared->described, at.stage), at.parity);
        if (desc.columns == 0)
            break;
        if (desc.fresh) {
            int buffer = runs & 1;
            uint16_t *xa = (uint16_t *)(memory + buffer * shape.xa_bytes);

            if (runs >= 2)
                barrier_wait(barrier_of(shared->xa_empty, buffer), ((runs >> 1) - 1) & 1);
            if (shape.partials.n_partials > 2) /* about as many loads in flight either way */
                gather_xa<F16, 2, 8>(xa, shape.xa_pitch, desc, group, shape.partials);
            else
                gather_xa<F16, 4, 2>(xa, shape.xa_pitch, desc, group, shape.partials);
            runs++;
            warp_arrive(barrier_of(shared->xa_full, buffer));
        }
        warp_arrive(barrier_of(shared->empty, at.stage));
    }
}

/* ---- consumers ----------------------------------------------------------------------------- */

/* y of a column and two adjacent rows. */
template <int F16>
static __device__ __forceinline__ uint32_t fold_rows(uint32_t old, float low, float high,
                                                     float2 scale)
{
    float2 change = widen_two<F16>(narrow_two<F16>(low, high)), before = widen_two<F16>(old);

    return narrow_two<F16>(__fmaf_rn(scale.x, change.x, before.x),
                           __fmaf_rn(scale.y, change.y, before.y));
}

/* This thread's row and quarter of B, ranks [32 s, 32 s + 32), for this warp's columns. */
static __device__ __forceinline__ void read_b(uint4 (&w)[4], const char *b, int pitch, int rank,
                                              int s)
{
#pragma unroll
    for (int j = 0; j < 4; j++) {
        w[j] = make_uint4(0, 0, 0, 0);
        if (32 * s + (int)(threadIdx.x & 3) * 8 < rank)
            w[j] = *(const uint4 *)(b + j * 8 * pitch + s * 64);
    }
}

/* A thread's pointers into a stage. */
typedef struct share {
    const char *b;      /* of its row and quarter */
    const uint16_t *xa; /* likewise */
    uint32_t y;         /* of its row and matrix */
    const float *scale; /* of its two rows */
    int rank, b_pitch, xa_pitch, y_pitch;
} share;

/* G times 32 columns, 256 apart, of N tiles from `tile` on. */
template <int F16, int S, int G, int N>
static __device__ __forceinline__ void fold_tiles(const share &at, const uint4 (&a)[G][S][4],
                                                  int tile)
{
    const uint16_t *xa = at.xa + tile * ROWS * at.xa_pitch;
    uint32_t y = at.y + tile * ROWS * at.y_pitch;
    float acc[G][N][2][4] = {};
    uint4 old[G][N];
    float2 by[N];

#pragma unroll
    for (int i = 0; i < N; i++)
        by[i] = *(const float2 *)(at.scale + (tile + i) * ROWS);
#pragma unroll
    for (int s = 0; s < S; s++)
        if (s == 0 || 32 * s < at.rank) {
            uint4 v[N];

#pragma unroll
            for (int i = 0; i < N; i++)
                v[i] = *(const uint4 *)(xa + i * ROWS * at.xa_pitch + 32 * s);
#pragma unroll
            for (int g = 0; g < G; g++)
#pragma unroll
                for (int i = 0; i < N; i++)
                    multiply<F16>(acc[g][i], a[g][s], v[i]);
        }
#pragma unroll
    for (int g = 0; g < G; g++)
#pragma unroll
        for (int i = 0; i < N; i++)
            old[g][i] =
                load_transposed(y + i * ROWS * at.y_pitch + g * CONSUMERS * WARP_COLUMNS * 2);
#pragma unroll
    for (int g = 0; g < G; g++)
#pragma unroll
        for (int i = 0; i < N; i++) {
            uint4 *v = &old[g][i];

            v->x = fold_rows<F16>(v->x, acc[g][i][0][0], acc[g][i][0][1], by[i]);
            v->y = fold_rows<F16>(v->y, acc[g][i][0][2], acc[g][i][0][3], by[i]);
            v->z = fold_rows<F16>(v->z, acc[g][i][1][0], acc[g][i][1][1], by[i]);
            v->w = fold_rows<F16>(v->w, acc[g][i][1][2], acc[g][i][1][3], by[i]);
            store_transposed(y + i * ROWS * at.y_pitch + g * CONSUMERS * WARP_COLUMNS * 2, *v);
        }
}

/* All tiles of a stage, G times 32 columns. */
template <int F16, int S, int G>
static __device__ __forceinline__ void fold_columns(const share &at, int tiles)
{
    uint4 a[G][S][4];
    int tile = 0;

#pragma unroll
    for (int g = 0; g < G; g++) {
        uint4 w[S][4];

#pragma unroll
        for (int s = 0; s < S; s++)
            read_b(w[s], at.b + g * CONSUMERS * WARP_COLUMNS * at.b_pitch, at.b_pitch, at.rank, s);
        interleave<S>(a[g], w, true);
    }
    if (G == 1)
#pragma unroll 1
        for (; tile + 2 <= tiles; tile += 2)
            fold_tiles<F16, S, G, 2>(at, a, tile);
#pragma unroll 1
    for (; tile < tiles; tile++)
        fold_tiles<F16, S, G, 1>(at, a, tile);
}

/* Waits for the next run's xa and releases the buffer of the previous run. */
static __device__ __forceinline__ const uint16_t *next_xa(block_shared *shared, const char *memory,
                                                          int xa_bytes, int runs)
{
    if (runs > 0)
        warp_arrive(barrier_of(shared->xa_empty, (runs - 1) & 1));
    barrier_wait(barrier_of(shared->xa_full, runs & 1), (runs >> 1) & 1);
    return (const uint16_t *)(memory + (runs & 1) * xa_bytes);
}

static __device__ __forceinline__ share share_of(const stage_desc &desc, const ring_shape &shape,
                                                 const char *stage, const uint16_t *xa)
{
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    int column = (int)(threadIdx.x >> 5) * WARP_COLUMNS;
    share mine;

    mine.rank = desc.rank;
    mine.b_pitch = desc.b_pitch;
    mine.xa_pitch = shape.xa_pitch;
    mine.y_pitch = shape.y_pitch;
    mine.xa = xa + g * shape.xa_pitch + 8 * t;
    mine.b = stage + shape.b_at + (column + g) * mine.b_pitch + t * 16;
    mine.y = shared_address(stage) + (lane & 7) * shape.y_pitch + (column + (lane & 24)) * 2;
    mine.scale = desc.scale + 2 * t;
    return mine;
}

static __device__ __forceinline__ void advance_columns(share *mine, int columns)
{
    mine->b += columns * mine->b_pitch;
    mine->y += columns * 2;
}

/* S: groups of 32 ranks that cover the pool's rank. */
template <int F16, int S>
static __device__ __forceinline__ void compute(block_shared *shared, char *memory,
                                               const ring_shape &shape)
{
    const int all = CONSUMERS * WARP_COLUMNS;
    const uint16_t *xa = NULL;
    int runs = 0;
    pipeline_state at = {0, 0, 0};

    for (;; advance(&at, shape.stages)) {
        const stage_desc &desc = shared->descs[at.stage];
        char *stage = memory + 2 * shape.xa_bytes + at.stage * shape.stage_bytes;
        int left, tiles;
        share mine;

        barrier_wait(barrier_of(shared->described, at.stage), at.parity);
        if (desc.columns == 0)
            break;
        if (desc.fresh)
            xa = next_xa(shared, memory, shape.xa_bytes, runs++);
        mine = share_of(desc, shape, stage, xa);
        tiles = desc.tiles;
        left = desc.columns - (int)(threadIdx.x >> 5) * WARP_COLUMNS;
        barrier_wait(barrier_of(shared->full, at.stage), at.parity);
        for (; tiles == 1 && left > all; left -= 2 * all) {
            fold_columns<F16, S, 2>(mine, tiles);
            advance_columns(&mine, 2 * all);
        }
        for (; left > 0; left -= all) {
            fold_columns<F16, S, 1>(mine, tiles);
            advance_columns(&mine, all);
        }
        warp_arrive(barrier_of(shared->done, at.stage));
    }
}

/* ---- storers ------------------------------------------------------------------------------- */

static __device__ __forceinline__ void store_tile(const stage_desc &desc, int tile, uint32_t from,
                                                  int pitch, int bytes)
{
    int lane = threadIdx.x & 31;

#pragma unroll 1
    for (int c = lane * 16; c < bytes; c += 512) {
        uint4 v[ROWS];
        char *to[ROWS];

#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            to[i] = desc.y[tile * ROWS + i];
            v[i] = load_shared(from + (tile * ROWS + i) * pitch + c);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            if (to[i] != NULL)
                store_global(to[i] + c, v[i]);
    }
}

static __device__ __forceinline__ void store_all(block_shared *shared, uint32_t ring,
                                                 const ring_shape &shape)
{
    int lane = threadIdx.x & 31, self = (threadIdx.x >> 5) - STORE_0;
    pipeline_state at = {0, 0, 0};

    for (;; advance(&at, shape.stages)) {
        const stage_desc &desc = shared->descs[at.stage];
        uint32_t from = ring + at.stage * shape.stage_bytes;
        int bytes, tiles;

        barrier_wait(barrier_of(shared->described, at.stage), at.parity);
        bytes = desc.columns * 2;
        tiles = desc.tiles;
        if (bytes == 0)
            break;
        barrier_wait(barrier_of(shared->done, at.stage), at.parity);
        if (tiles == 1) {
#pragma unroll 1
            for (int i = self; i < desc.rows; i += STORERS) {
                char *to = desc.y[i];

                if (to != NULL)
#pragma unroll 4
                    for (int c = lane * 16; c < bytes; c += 512)
                        store_global(to + c, load_shared(from + i * shape.y_pitch + c));
            }
        } else {
            for (int tile = self; tile < tiles; tile += STORERS)
                store_tile(desc, tile, from, shape.y_pitch, bytes);
        }
        warp_arrive(barrier_of(shared->empty, at.stage));
    }
}

/* ---- kernel -------------------------------------------------------------------------------- */

static __device__ __forceinline__ void init(block_shared *shared, const sp_cuda_group &group,
                                            int stages)
{
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; i++) {
            barrier_init(barrier_of(shared->described, i), SP_WARP);
            barrier_init(barrier_of(shared->full, i), (LOADERS + 1) * SP_WARP + 1);
            barrier_init(barrier_of(shared->done, i), CONSUMERS * SP_WARP);
            barrier_init(barrier_of(shared->empty, i), (STORERS + GATHERERS) * SP_WARP);
        }
        for (int i = 0; i < 2; i++) {
            barrier_init(barrier_of(shared->xa_full, i), GATHERERS * SP_WARP);
            barrier_init(barrier_of(shared->xa_empty, i), CONSUMERS * SP_WARP);
        }
        barrier_init_done();
    }
    for (int i = 0; i < group.n_sites; i++) {
        const sp_cuda_site &site = group.sites[i];

        if (group.n_slots <= FEW_SLOTS && (int)threadIdx.x < group.n_slots)
            shared->cell[i][threadIdx.x] = {
                site.rank != NULL ? site.rank[threadIdx.x] : site.one_rank,
                site.scale != NULL ? site.scale[threadIdx.x] : site.one_scale};
    }
}

#endif

template <int F16, int S>
__global__ void __launch_bounds__(THREADS, 1)
    ring_kernel(const __grid_constant__ sp_cuda_group group,
                const __grid_constant__ ring_shape shape)
{
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    __shared__ block_shared shared;
    uint32_t ring = shared_address(memory) + 2 * shape.xa_bytes;
    int warp = threadIdx.x >> 5, n_tiles = 0;

    release_successor();
    if (warp == PRODUCER)
        n_tiles = min(group.plan.head->n_tiles, shape.tiles_bound);
    init(&shared, group, shape.stages);
    __syncthreads();
    if (warp < GATHER_0) {
        compute<F16, S>(&shared, memory, shape);
    } else if (warp < LOAD_0) {
        gather_all<F16>(&shared, memory, group, shape);
    } else if (warp < STORE_0) {
        load_all(&shared, ring, shape);
    } else if (warp < PRODUCER) {
        store_all(&shared, ring, shape);
    } else {
        producer fill = {&shared, &shape, ring, {0, 0, 0}};

        fill_all(&fill, group, n_tiles);
    }
#endif
}

/* ---- launch -------------------------------------------------------------------------------- */

/* With as many stages as fit into a block's shared memory. */
static ring_shape shape_of(const sp_cuda_group *group, sp_cuda_expand_choice choice, int capacity)
{
    ring_shape shape = {};
    int ranks = group->rank_stride, rows = choice.ring_tiles * ROWS;

    shape.columns = choice.ring_columns;
    shape.window_tiles = choice.ring_tiles;
    for (int i = 0; i < group->n_sites; i++)
        shape.first_chunk[i + 1] =
            shape.first_chunk[i] + sp_cuda_ceil(group->sites[i].n_out, shape.columns);
    shape.y_pitch = shape.columns * 2 + 16;
    shape.b_at = (int)round_up(rows * shape.y_pitch, 128);
    shape.stage_bytes = (int)round_up(shape.b_at + shape.columns * ranks * 2, 128);
    shape.xa_pitch = 32 * (sp_cuda_ceil(ranks, 32) | 1);
    shape.xa_bytes = (int)round_up(rows * shape.xa_pitch * 2, 128);
    shape.stages = (capacity - 2 * shape.xa_bytes) / shape.stage_bytes;
    shape.stages = shape.stages > STAGES_MAX ? STAGES_MAX : shape.stages;
    shape.tiles_bound = sp_cuda_tiles_bound(group->n_rows, group->n_slots);
    shape.partials = partials_of(group);
    return shape;
}

/* Dynamic shared memory available beside block_shared and its alignment. */
static cudaError_t capacity_of(int gpu, int *out_bytes)
{
    cudaError_t code =
        cudaDeviceGetAttribute(out_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, gpu);

    *out_bytes -= (int)sizeof(block_shared) + 512;
    return code;
}

/* The kernel is empty where it was built from PTX of an architecture before sm_90. */
template <int F16, int S> static bool is_empty(void)
{
    cudaFuncAttributes made;

    return cudaFuncGetAttributes(&made, ring_kernel<F16, S>) != cudaSuccess || made.ptxVersion < 90;
}

template <int F16, int S>
static cudaError_t launch(const sp_cuda_group *group, const ring_shape &shape, int blocks,
                          cudaStream_t stream)
{
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config = sp_cuda_overlapping(
        dim3((unsigned)blocks), THREADS,
        (size_t)(2 * shape.xa_bytes + shape.stages * shape.stage_bytes), &overlap, false, stream);

    if (is_empty<F16, S>())
        return cudaErrorNotSupported;
    return cudaLaunchKernelEx(&config, ring_kernel<F16, S>, *group, shape);
}

template <int F16>
static cudaError_t launch_ranks(const sp_cuda_group *group, const ring_shape &shape, int blocks,
                                cudaStream_t on)
{
    return group->rank_stride <= 32 ? launch<F16, 1>(group, shape, blocks, on)
                                    : launch<F16, 2>(group, shape, blocks, on);
}

cudaError_t sp_cuda_expand_ring(int gpu, const sp_cuda_group *group, sp_cuda_expand_choice choice,
                                cudaStream_t stream)
{
    int capacity = 0, blocks = group->multiprocessors;
    cudaError_t code = capacity_of(gpu, &capacity);
    ring_shape shape;

    if (code != cudaSuccess)
        return code;
    shape = shape_of(group, choice, capacity);
    if (shape.stages < 3) /* too few bytes in flight */
        return cudaErrorNotSupported;
    return group->type == SP_DTYPE_F16 ? launch_ranks<1>(group, shape, blocks, stream)
                                       : launch_ranks<0>(group, shape, blocks, stream);
}

template <int F16, int S> static cudaError_t allow(int gpu, cudaError_t before)
{
    int bytes = 0;

    if (before != cudaSuccess || is_empty<F16, S>())
        return before;
    before = capacity_of(gpu, &bytes);
    return before != cudaSuccess
               ? before
               : cudaFuncSetAttribute(ring_kernel<F16, S>,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

template <int F16> static cudaError_t allow_ranks(int gpu, cudaError_t code)
{
    code = allow<F16, 1>(gpu, code);
    return allow<F16, 2>(gpu, code);
}

cudaError_t sp_cuda_expand_ring_init(int gpu)
{
    return allow_ranks<1>(gpu, allow_ranks<0>(gpu, cudaSuccess));
}
