/*
 * expert_ring.cu: y += scale · xa · Bᵀ, xa = x · Aᵀ, for many items of experts in one launch, with
 * the bits of expert_delta.cu.
 *
 * A persistent, warp-specialised pipeline, one block on a multiprocessor; blocks take items in
 * turn, all sites of one at once, so that x is read once for sites that share it. An item is a
 * sequence of stages of a ring in shared memory. A stage of the shrink has 64 k of each of the four
 * chunks of a group, or more of each where k_in has fewer, of the rows of x and of up to 32 ranks,
 * which are two blocks of 16, of any sites; a stage of the expand has 256 columns of one site (128
 * with more than 32 ranks), y and B. The scout reads items ahead, the loaders fill stages by
 * cp.async, the consumers multiply. In the shrink a consumer has a chunk, whose quarters it adds in
 * registers, and the chunks of a group are added through shared memory; in the expand it has 32
 * columns. Bound by memory: what the ring has in flight hides its latency, and runs on into the
 * next item.
 */
#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/expand.cuh"
#include "kernels/cuda/launch.cuh"

#define ROWS        SP_CUDA_TILE_ROWS
#define SITES       2 /* that share a launch */
#define RANKS       16
#define RANKS_MAX   64
#define CHUNKS      SP_CUDA_GROUP_CHUNKS
#define GROUP_K     (CHUNKS * SP_CUDA_CHUNK_K)
#define ROW_BYTES   512
#define ROW_K       (ROW_BYTES / 2) /* of all chunks, in a stage */
#define STEP_K      64              /* that a consumer multiplies at a time */
#define COLUMNS     (ROW_BYTES / 2) /* of y in a stage, with up to 32 ranks */
#define CONSUMERS   8               /* warps */
#define LOADERS     3               /* twelve warps in all: more would have fewer registers each */
#define LOADER_0    CONSUMERS
#define SCOUT       (LOADER_0 + LOADERS)
#define THREADS     ((SCOUT + 1) * SP_WARP)
#define STAGES_MAX  8
#define ITEMS       4  /* that the scout may be ahead */
#define SUM_PITCH   36 /* floats of a row's sums of 32 ranks: no bank conflicts in a warp */
#define ALIGN_BYTES 128

static_assert(CONSUMERS == 2 * CHUNKS, "two warps at least share a chunk");
static_assert(ROW_K == CHUNKS * STEP_K, "a stage has a step of each chunk at least");
static_assert(ROW_BYTES == SP_WARP * 16, "a warp copies a row of a stage at once");

/* TILES: of rows, in an item at most. */
template <int F16_, int TILES_> struct ring_kind {
    static constexpr int F16 = F16_, TILES = TILES_, ITEM_ROWS = TILES * ROWS;
    static constexpr int MINE = TILES / 2; /* tiles of a consumer, at most */
    static constexpr int EACH = (ITEM_ROWS + LOADERS - 1) / LOADERS; /* rows of a loader */
    static constexpr int A_AT = ITEM_ROWS * ROW_BYTES, STAGE_BYTES = A_AT + 2 * RANKS * ROW_BYTES;
    static constexpr int SUM_FLOATS = CHUNKS * ITEM_ROWS * SUM_PITCH;
    /* Elements of 32 ranks of xa that a thread sums. */
    static constexpr int SUMS = ITEM_ROWS * 2 * RANKS / (CONSUMERS * SP_WARP);

    static_assert(TILES % 2 == 0, "two warps share the tiles of a chunk");
    static_assert(ITEM_ROWS <= 2 * SP_WARP, "the scout reads two rows a lane");
};

typedef struct ring_shape {
    int stages;
    int chunks;   /* that share a stage: 1, 2 or 4 */
    int xa_pitch; /* elements; an odd multiple of 32: no bank conflicts */
} ring_shape;

typedef struct ring_site {
    const uint16_t *a, *b;
    int rank; /* 0: nothing */
    int pad;
} ring_site;

/* An item, in shared memory. */
template <int ITEM_ROWS> struct ring_item {
    int count; /* rows; 0: no more items */
    int pad;
    ring_site site[SITES];
    const uint16_t *x[ITEM_ROWS];
    char *y[SITES][ITEM_ROWS]; /* the row's output 0 */
    float scale[SITES][ITEM_ROWS];
};

template <class K> struct alignas(16) ring_shared {
    uint64_t full[STAGES_MAX], empty[STAGES_MAX];
    uint64_t item_full[ITEMS], item_empty[ITEMS];
    float sums[K::SUM_FLOATS];
    ring_item<K::ITEM_ROWS> items[ITEMS];
};

/* A position in the stages or the items: number and parity of the phase. */
typedef struct position {
    int at, parity;
} position;

static __device__ __forceinline__ void advance(position *p, int end)
{
    if (++p->at == end) {
        p->at = 0;
        p->parity ^= 1;
    }
}

static __device__ __forceinline__ uint32_t barrier_of(const uint64_t *barriers, const position &p)
{
    return shared_address(&barriers[p.at]);
}

/* Orders the warp's work so far before what others do after the barrier; as in expand_ring.cu. */
static __device__ __forceinline__ void warp_arrive(uint32_t barrier)
{
    __syncwarp();
    barrier_arrive(barrier);
}

/* The place of 16-byte piece `piece` of a row in a stage: the other half of 128 bytes in odd rows,
 * so that eight lanes of two rows have no bank conflicts. */
static __device__ __forceinline__ uint32_t piece_at(int row, int piece)
{
    return (uint32_t)(row * ROW_BYTES + ((piece ^ ((row & 1) << 2)) << 4));
}

/* ---- the stages of an item ----------------------------------------------------------------- */

/* Blocks of 16 ranks, those of site 0 first. */
static __device__ __forceinline__ int blocks_of(int rank)
{
    return (rank + RANKS - 1) / RANKS;
}

/* A block's site and first rank; rank 0: no such block. */
typedef struct rank_block {
    int site, rank0;
    bool valid;
} rank_block;

static __device__ __forceinline__ rank_block block_at(const ring_site *sites, int block)
{
    int first = blocks_of(sites[0].rank), site = block >= first, number = block - site * first;

    return {site, number * RANKS, number * RANKS < sites[site].rank};
}

/* The end of the first chunk of the group that begins at k0: where its last stage is. */
static __device__ __forceinline__ int end_of(int k_in, int k0)
{
    return min(k_in, k0 + SP_CUDA_CHUNK_K);
}

/* Elements between rows of B. */
static __device__ __forceinline__ int stride_of(int rank)
{
    return (rank + 7) & ~7;
}

static __device__ __forceinline__ int columns_of(int rank)
{
    return rank <= 32 ? COLUMNS : COLUMNS / 2;
}

/* ---- scout --------------------------------------------------------------------------------- */

/* Rank, factors and stored scale of a site; rank 0: none. */
typedef struct scout_site {
    ring_site site;
    float scale;
} scout_site;

static __device__ __forceinline__ scout_site read_site(const sp_cuda_expert_site &from, int slot,
                                                       int expert)
{
    const sp_cuda_expert_cell *cells = from.cells[slot];
    const char *factors = (const char *)from.factors[slot];
    scout_site out = {};
    sp_cuda_expert_cell cell;

    if (cells == NULL)
        return out;
    *(uint4 *)&cell = *(const uint4 *)&cells[expert];
    out.site.rank = cell.rank;
    out.site.a = (const uint16_t *)(factors + (uint64_t)cell.a * 256);
    out.site.b = (const uint16_t *)(factors + (uint64_t)cell.b * 256);
    out.scale = cell.scale;
    return out;
}

/* A lane's row of an item. */
typedef struct scout_row {
    int x, y;
    float request;
} scout_row;

static __device__ __forceinline__ scout_row read_row(const sp_cuda_expert_delta &d, int item, int j)
{
    int64_t at = (int64_t)item * d.items.item_rows + j;
    scout_row row = {0, 0, 0.0f};

    if (j < d.items.item_rows) {
        row.y = d.items.row[at];
        row.x = d.x_by_token ? d.items.token[at] : row.y;
        row.request = d.items.scale[at];
    }
    return row;
}

template <class K>
static __device__ __forceinline__ void write_row(ring_item<K::ITEM_ROWS> *to,
                                                 const sp_cuda_expert_delta &d, int j, int count,
                                                 const scout_row &row,
                                                 const scout_site (&sites)[SITES])
{
    if (j >= K::ITEM_ROWS)
        return;
    to->x[j] = (const uint16_t *)d.x + (j < count ? row.x : 0) * d.x_stride;
#pragma unroll
    for (int s = 0; s < SITES; s++)
        if (s < d.n_sites) {
            to->y[s][j] = (char *)d.sites[s].y + (j < count ? row.y : 0) * d.sites[s].y_stride * 2;
            to->scale[s][j] = j < count ? sp_scale_of_row(sites[s].scale, row.request) : 0.0f;
        }
}

/* Writes item number `number`, unless it has nothing to add; one warp. */
template <class K>
static __device__ __forceinline__ void scout_item(ring_shared<K> *shared, position *at,
                                                  const sp_cuda_expert_delta &d, int number)
{
    int lane = threadIdx.x & 31;
    sp_cuda_item head;
    scout_row low = read_row(d, number, lane), high = {0, 0, 0.0f};
    scout_site sites[SITES] = {};
    ring_item<K::ITEM_ROWS> *to = &shared->items[at->at];

    if (K::ITEM_ROWS > SP_WARP)
        high = read_row(d, number, lane + SP_WARP);
    *(uint4 *)&head = *(const uint4 *)&d.items.item[number];
#pragma unroll
    for (int s = 0; s < SITES; s++)
        if (s < d.n_sites)
            sites[s] = read_site(d.sites[s], head.slot, head.expert);
    if (sites[0].site.rank == 0 && sites[1].site.rank == 0)
        return;
    barrier_wait(barrier_of(shared->item_empty, *at), at->parity ^ 1);
    if (lane == 0)
        to->count = head.count;
#pragma unroll
    for (int s = 0; s < SITES; s++)
        if (lane == s)
            to->site[s] = sites[s].site;
    write_row<K>(to, d, lane, head.count, low, sites);
    write_row<K>(to, d, lane + SP_WARP, head.count, high, sites);
    warp_arrive(barrier_of(shared->item_full, *at));
    advance(at, ITEMS);
}

template <class K>
static __device__ __forceinline__ void scout_all(ring_shared<K> *shared,
                                                 const sp_cuda_expert_delta &d)
{
    position at = {0, 0};
    int items;

    if (d.after_group)
        wait_predecessor();
    items = d.items.counts[0];
#pragma unroll 1
    for (int number = (int)blockIdx.x; number < items; number += (int)gridDim.x)
        scout_item<K>(shared, &at, d, number);
    barrier_wait(barrier_of(shared->item_empty, at), at.parity ^ 1);
    if ((threadIdx.x & 31) == 0)
        shared->items[at.at].count = 0;
    warp_arrive(barrier_of(shared->item_full, at));
    /* A kernel's completion implies that of all kernels before it. */
    if (!d.after_group)
        wait_predecessor();
}

/* ---- loaders ------------------------------------------------------------------------------- */

typedef struct ring_loader {
    uint32_t ring; /* shared address */
    int stages;
    position at;
} ring_loader;

/* The next stage, once it is empty. */
template <class K>
static __device__ __forceinline__ uint32_t next_stage(const ring_shared<K> *shared,
                                                      const ring_loader &load)
{
    barrier_wait(barrier_of(shared->empty, load.at), load.at.parity ^ 1);
    return load.ring + load.at.at * K::STAGE_BYTES;
}

template <class K>
static __device__ __forceinline__ void fill_stage(ring_shared<K> *shared, ring_loader *load)
{
    barrier_arrive_after_copies(barrier_of(shared->full, load->at));
    advance(&load->at, load->stages);
}

static __device__ __forceinline__ int loader_of_thread(void)
{
    return (int)(threadIdx.x >> 5) - LOADER_0;
}

/* Copies the 16 bytes at `at` of N rows, LOADERS apart, of which the first is `first`; row i is
 * there if has(i), and at from(i). */
template <int N, class HAS, class FROM>
static __device__ __forceinline__ void copy_rows(uint32_t to, int first, bool valid, HAS has,
                                                 FROM from)
{
    int lane = threadIdx.x & 31;
    uint32_t even = to + piece_at(first, lane), odd = to + piece_at(first + LOADERS, lane);

#pragma unroll
    for (int i = 0; i < N; i++)
        if (has(i))
            copy_async_if(i % 2 == 0 ? even + i * LOADERS * ROW_BYTES
                                     : odd + (i - 1) * LOADERS * ROW_BYTES,
                          from(i), valid);
}

/* A block of ranks: this thread's first row of A, and how many of the block's it has. */
typedef struct loader_ranks {
    const uint16_t *a;
    int left;
} loader_ranks;

static __device__ __forceinline__ loader_ranks ranks_of(const ring_site *sites, int block, int k_in)
{
    rank_block b = block_at(sites, block);
    int self = loader_of_thread();

    return {sites[b.site].a + (int64_t)(b.rank0 + self) * k_in,
            b.valid ? min(RANKS, sites[b.site].rank - b.rank0) - self : 0};
}

/* The stages of two blocks of ranks: rows of x and of A, zeros beyond k_in; a warp copies a row at
 * once. Chunks beyond k_in, and rows that are not there, stay what they are. */
template <class K>
static __device__ __forceinline__ void load_ranks(ring_shared<K> *shared, ring_loader *load,
                                                  const uint16_t *const (&x)[K::EACH],
                                                  const ring_site *sites, int block, int k_in,
                                                  int chunks)
{
    loader_ranks low = ranks_of(sites, block, k_in), high = ranks_of(sites, block + 1, k_in);
    int pieces = SP_WARP / chunks, lane = threadIdx.x & 31, self = loader_of_thread();
    int chunk = lane / pieces * SP_CUDA_CHUNK_K, in_chunk = lane % pieces * 8;
    int64_t step = (int64_t)LOADERS * k_in;

#pragma unroll 1
    for (int k0 = 0; k0 < k_in; k0 += GROUP_K)
#pragma unroll 1
        for (int k = k0; k < end_of(k_in, k0); k += ROW_K / chunks) {
            uint32_t to = next_stage(shared, *load), a = to + K::A_AT;
            int at = k + chunk + in_chunk;
            bool valid = at < k_in;

            if (k + chunk < k_in) {
                copy_rows<K::EACH>(
                    to, self, valid, [&](int i) { return x[i] != NULL; },
                    [&](int i) { return x[i] + at; });
                copy_rows<(RANKS + LOADERS - 1) / LOADERS>(
                    a, self, valid, [&](int i) { return i * LOADERS < low.left; },
                    [&](int i) { return low.a + i * step + at; });
                copy_rows<(RANKS + LOADERS - 1) / LOADERS>(
                    a + RANKS * ROW_BYTES, self, valid,
                    [&](int i) { return i * LOADERS < high.left; },
                    [&](int i) { return high.a + i * step + at; });
            }
            fill_stage(shared, load);
        }
}

/* The stages of a site's columns: y of all rows, and their rows of B, which are contiguous. */
template <class K>
static __device__ __forceinline__ void load_columns(ring_shared<K> *shared, ring_loader *load,
                                                    const ring_item<K::ITEM_ROWS> &item, int site,
                                                    int n_out)
{
    int lane = threadIdx.x & 31, self = loader_of_thread(), rank = item.site[site].rank;
    int stride = stride_of(rank), columns = columns_of(rank);
    const uint16_t *b = item.site[site].b;
    const char *y[K::EACH];

#pragma unroll
    for (int i = 0; i < K::EACH; i++)
        y[i] = self + i * LOADERS < item.count ? item.y[site][self + i * LOADERS] : NULL;
#pragma unroll 1
    for (int column = 0; column < n_out; column += columns) {
        uint32_t to = next_stage(shared, *load);
        int here = min(columns, n_out - column), pieces = here * stride / 8;
        const uint16_t *from = b + (int64_t)column * stride;

        if (lane * 8 < here)
            copy_rows<K::EACH>(
                to, self, true, [&](int i) { return y[i] != NULL; },
                [&](int i) { return y[i] + (column + lane * 8) * 2; });
#pragma unroll 4
        for (int i = self * SP_WARP + lane; i < pieces; i += LOADERS * SP_WARP)
            copy_async(to + K::A_AT + i * 16, from + i * 8);
        fill_stage(shared, load);
    }
}

template <class K>
static __device__ __forceinline__ void load_item(ring_shared<K> *shared, ring_loader *load,
                                                 const ring_item<K::ITEM_ROWS> &item,
                                                 const sp_cuda_expert_delta &d, int chunks)
{
    int blocks = blocks_of(item.site[0].rank) + blocks_of(item.site[1].rank);
    int self = loader_of_thread();
    const uint16_t *x[K::EACH];

#pragma unroll
    for (int i = 0; i < K::EACH; i++)
        x[i] = self + i * LOADERS < item.count ? item.x[self + i * LOADERS] : NULL;
#pragma unroll 1
    for (int block = 0; block < blocks; block += 2)
        load_ranks<K>(shared, load, x, item.site, block, d.k_in, chunks);
#pragma unroll 1
    for (int s = 0; s < d.n_sites; s++)
        if (item.site[s].rank > 0)
            load_columns<K>(shared, load, item, s, d.sites[s].n_out);
}

template <class K>
static __device__ __forceinline__ void load_all(ring_shared<K> *shared, uint32_t ring,
                                                const ring_shape &shape,
                                                const sp_cuda_expert_delta &d)
{
    ring_loader load = {ring, shape.stages, {0, 0}};

    wait_predecessor();
    for (position at = {0, 0};; advance(&at, ITEMS)) {
        const ring_item<K::ITEM_ROWS> &item = shared->items[at.at];

        barrier_wait(barrier_of(shared->item_full, at), at.parity);
        if (item.count == 0)
            break;
        load_item<K>(shared, &load, item, d, shape.chunks);
        warp_arrive(barrier_of(shared->item_empty, at));
    }
}

/* ---- consumers ----------------------------------------------------------------------------- */

/* All consumers, and what they wrote to shared memory. */
static __device__ __forceinline__ void consumers_meet(void)
{
    __syncwarp();
    meet(1, CONSUMERS * SP_WARP);
}

/* What a consumer adds up in a group: a quarter, and the chunk so far, of its tiles and two blocks
 * of ranks. */
template <class K> struct ring_sums {
    float quarter[K::MINE][2][4], chunk[K::MINE][2][4];
};

/* One block of a stage: A of 32 k, twice. */
typedef struct ring_ranks {
    uint4 low[2], high[2];
} ring_ranks;

template <class K> struct ring_consumer {
    ring_shared<K> *shared;
    uint32_t ring; /* shared address */
    uint16_t *xa;  /* [sites][rows], xa_pitch apart */
    ring_shape shape;
    position at;

    /* In the shrink: this warp's chunk of the group, and its first tile of rows and how far it is
     * to the next. */
    int chunk, tile0, tiles_on;
};

/* 64 k, whose first piece in the rows of the stage is `piece`. */
template <class K>
static __device__ __forceinline__ void multiply_step(const ring_consumer<K> &c, ring_sums<K> *sums,
                                                     uint32_t stage, int piece, int count,
                                                     int n_blocks)
{
    int lane = threadIdx.x & 31, g = lane >> 2;
    uint32_t from = stage + K::A_AT;
    ring_ranks a[2];

    piece += lane & 3;
#pragma unroll
    for (int b = 0; b < 2; b++)
        if (b < n_blocks)
#pragma unroll
            for (int s = 0; s < 2; s++) {
                a[b].low[s] = load_shared(from + piece_at(b * RANKS + g, piece + 4 * s));
                a[b].high[s] = load_shared(from + piece_at(b * RANKS + g + 8, piece + 4 * s));
            }
#pragma unroll
    for (int i = 0; i < K::MINE; i++) {
        int row0 = (c.tile0 + i * c.tiles_on) * ROWS;
        uint4 x[2];

        if (row0 >= count)
            break;
#pragma unroll
        for (int s = 0; s < 2; s++)
            x[s] = load_shared(stage + piece_at(row0 + g, piece + 4 * s));
#pragma unroll
        for (int s = 0; s < 2; s++)
#pragma unroll
            for (int b = 0; b < 2; b++)
                if (b < n_blocks) {
                    const uint4 &low = a[b].low[s], &high = a[b].high[s];

                    mma<K::F16>(sums->quarter[i][b], low.x, high.x, low.y, high.y, x[s].x, x[s].y);
                    mma<K::F16>(sums->quarter[i][b], low.z, high.z, low.w, high.w, x[s].z, x[s].w);
                }
    }
}

/* Adds the quarter to the chunk, of which it may be the first, and begins another one. */
template <class K>
static __device__ __forceinline__ void end_quarter(ring_sums<K> *sums, bool first)
{
#pragma unroll
    for (int i = 0; i < K::MINE; i++)
#pragma unroll
        for (int b = 0; b < 2; b++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float quarter = sums->quarter[i][b][j];

                sums->chunk[i][b][j] = first ? quarter : sums->chunk[i][b][j] + quarter;
                sums->quarter[i][b][j] = 0.0f;
            }
}

/* The stages of the group that begins at k0. */
template <class K>
static __device__ __forceinline__ void multiply_group(ring_consumer<K> *c, ring_sums<K> *sums,
                                                      int count, int n_blocks, int k0, int k_in)
{
    int each = ROW_K / c->shape.chunks, first = k0 + c->chunk * SP_CUDA_CHUNK_K;
    int end = c->tile0 * ROWS < count ? k_in : 0;

#pragma unroll 1
    for (int at = 0; k0 + at < end_of(k_in, k0); at += each) {
        uint32_t stage = c->ring + c->at.at * K::STAGE_BYTES;
        int piece = c->chunk * each / 8;

        barrier_wait(barrier_of(c->shared->full, c->at), c->at.parity);
#pragma unroll 1
        for (int k = first + at; k < min(first + at + each, end); k += STEP_K, piece += 8) {
            multiply_step<K>(*c, sums, stage, piece, count, n_blocks);
            if ((k - first) / STEP_K % 2 == 1 || k + STEP_K >= k_in)
                end_quarter<K>(sums, k - first < 2 * STEP_K);
        }
        warp_arrive(barrier_of(c->shared->empty, c->at));
        advance(&c->at, c->shape.stages);
    }
}

/* This warp's chunk, for the others. */
template <class K>
static __device__ __forceinline__ void give_chunk(const ring_consumer<K> &c,
                                                  const ring_sums<K> &sums, int count)
{
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    float *to = c.shared->sums + c.chunk * K::ITEM_ROWS * SUM_PITCH + g;

#pragma unroll
    for (int i = 0; i < K::MINE; i++) {
        int row = (c.tile0 + i * c.tiles_on) * ROWS;

        if (row >= count)
            break;
        row += 2 * t;
#pragma unroll
        for (int b = 0; b < 2; b++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                to[(row + j % 2) * SUM_PITCH + b * RANKS + j / 2 * 8] = sums.chunk[i][b][j];
    }
}

/* Element `at` of 32 ranks of xa; a rank that the block does not have is 0, and so is what is left
 * of 32 after the last block of a site. */
template <class K>
static __device__ __forceinline__ void store_xa(const ring_consumer<K> &c, const ring_site *sites,
                                                int block, int at, float sum)
{
    int row = at / (2 * RANKS);
    rank_block b = block_at(sites, block + at / RANKS % 2);
    int rank = sites[b.site].rank;
    uint16_t *to = c.xa + (b.site * K::ITEM_ROWS + row) * c.shape.xa_pitch + b.rank0 + at % RANKS;

    if (!b.valid)
        return;
    *to = b.rank0 + at % RANKS < rank ? narrow<K::F16>(sum) : (uint16_t)0;
    if (b.rank0 % 32 == 0 && b.rank0 + RANKS >= rank)
        to[RANKS] = 0;
}

/* xa of two blocks of ranks. */
template <class K>
static __device__ __forceinline__ void make_xa(ring_consumer<K> *c,
                                               const ring_item<K::ITEM_ROWS> &item, int block,
                                               int n_blocks, int k_in)
{
    float all[K::SUMS] = {};

#pragma unroll 1
    for (int k0 = 0; k0 < k_in; k0 += GROUP_K) {
        int chunks = min(CHUNKS, (k_in - k0 + SP_CUDA_CHUNK_K - 1) / SP_CUDA_CHUNK_K);
        ring_sums<K> sums = {};

        multiply_group<K>(c, &sums, item.count, n_blocks, k0, k_in);
        give_chunk<K>(*c, sums, item.count);
        consumers_meet();
#pragma unroll
        for (int i = 0; i < K::SUMS; i++) {
            int at = (int)threadIdx.x + i * CONSUMERS * SP_WARP, row = at / (2 * RANKS);
            const float *from = c->shared->sums + row * SUM_PITCH + at % (2 * RANKS);
            float group;

            if (row >= item.count)
                break;
            group = from[0];
            for (int q = 1; q < chunks; q++)
                group = group + from[q * K::ITEM_ROWS * SUM_PITCH];
            all[i] = k0 == 0 ? group : all[i] + group;
            if (k0 + GROUP_K >= k_in)
                store_xa<K>(*c, item.site, block, at, all[i]);
        }
        consumers_meet();
    }
}

/* This warp's columns of a stage; S: ranks are up to 32 S. */
template <class K, int S>
static __device__ __forceinline__ void fold_stage(const ring_consumer<K> &c,
                                                  const ring_item<K::ITEM_ROWS> &item, int site,
                                                  int column0, int n_out)
{
    const int groups = COLUMNS / S / 32, halves = CONSUMERS / groups;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    int in_stage = warp % groups * 32, column = column0 + in_stage + 8 * t;
    uint32_t stage = c.ring + c.at.at * K::STAGE_BYTES;
    work of = {NULL, stride_of(item.site[site].rank), n_out, item.site[site].rank, false};
    uint4 w[S][4], a[S][4];

    if (column0 + in_stage >= n_out)
        return;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t row = stage + K::A_AT + (in_stage + first_column() + 2 * j) * of.b_stride * 2;

#pragma unroll
        for (int s = 0; s < S; s++)
            w[s][j] = 8 * t + 32 * s < of.rank ? load_shared(row + (8 * t + 32 * s) * 2)
                                               : make_uint4(0, 0, 0, 0);
    }
    interleave<S>(a, w, true);
#pragma unroll 2
    for (int row = warp / groups * ROWS + g; row - g < item.count; row += halves * ROWS) {
        const uint16_t *xa = c.xa + (site * K::ITEM_ROWS + row) * c.shape.xa_pitch + 8 * t;
        uint4 y = load_shared(stage + piece_at(row, in_stage / 8 + t));
        uint4 delta = make_delta<K::F16, 1, S, false>(of, a, xa, column0 + in_stage);
        float scale = item.scale[site][row];

        if (scale != 0.0f && column < n_out)
            store_global(item.y[site][row] + column * 2, fold_eight<K::F16>(y, delta, scale));
        __syncwarp();
    }
}

/* All columns of a site. */
template <class K>
static __device__ __forceinline__ void expand_site(ring_consumer<K> *c,
                                                   const ring_item<K::ITEM_ROWS> &item, int site,
                                                   int n_out)
{
    int rank = item.site[site].rank, columns = columns_of(rank);

#pragma unroll 1
    for (int column = 0; rank > 0 && column < n_out; column += columns) {
        barrier_wait(barrier_of(c->shared->full, c->at), c->at.parity);
        if (rank <= 32)
            fold_stage<K, 1>(*c, item, site, column, n_out);
        else
            fold_stage<K, 2>(*c, item, site, column, n_out);
        warp_arrive(barrier_of(c->shared->empty, c->at));
        advance(&c->at, c->shape.stages);
    }
}

template <class K>
static __device__ __forceinline__ void consume_all(ring_consumer<K> c,
                                                   const sp_cuda_expert_delta &d)
{
    wait_predecessor();
    for (position at = {0, 0};; advance(&at, ITEMS)) {
        const ring_item<K::ITEM_ROWS> &item = c.shared->items[at.at];
        int blocks;

        barrier_wait(barrier_of(c.shared->item_full, at), at.parity);
        if (item.count == 0)
            break;
        blocks = blocks_of(item.site[0].rank) + blocks_of(item.site[1].rank);
#pragma unroll 1
        for (int block = 0; block < blocks; block += 2)
            make_xa<K>(&c, item, block, min(2, blocks - block), d.k_in);
#pragma unroll 1
        for (int s = 0; s < d.n_sites; s++)
            expand_site<K>(&c, item, s, d.sites[s].n_out);
        warp_arrive(barrier_of(c.shared->item_empty, at));
    }
}

/* ---- kernel -------------------------------------------------------------------------------- */

template <class K>
static __device__ __forceinline__ void init_barriers(ring_shared<K> *shared, int stages)
{
    for (int i = 0; i < stages; i++) {
        barrier_init(shared_address(&shared->full[i]), LOADERS * SP_WARP);
        barrier_init(shared_address(&shared->empty[i]), CONSUMERS * SP_WARP);
    }
    for (int i = 0; i < ITEMS; i++) {
        barrier_init(shared_address(&shared->item_full[i]), SP_WARP);
        barrier_init(shared_address(&shared->item_empty[i]), (LOADERS + CONSUMERS) * SP_WARP);
    }
}

template <class K>
__global__ void __launch_bounds__(THREADS, 1)
    expert_ring_kernel(const __grid_constant__ sp_cuda_expert_delta d,
                       const __grid_constant__ ring_shape shape)
{
    extern __shared__ __align__(ALIGN_BYTES) char memory[];
    ring_shared<K> *shared = (ring_shared<K> *)(memory + shape.stages * K::STAGE_BYTES);
    int warp = threadIdx.x >> 5;

    release_successor();
    if (threadIdx.x == 0)
        init_barriers<K>(shared, shape.stages);
    __syncthreads();
    if (warp < LOADER_0) {
        uint16_t *xa = (uint16_t *)(shared + 1);

        consume_all<K>({shared,
                        shared_address(memory),
                        xa,
                        shape,
                        {0, 0},
                        warp % shape.chunks,
                        warp / shape.chunks,
                        CONSUMERS / shape.chunks},
                       d);
    } else if (warp < SCOUT) {
        load_all<K>(shared, shared_address(memory), shape, d);
    } else {
        scout_all<K>(shared, d);
    }
}

/* ---- launch -------------------------------------------------------------------------------- */

template <class K> static size_t shared_of(const ring_shape &shape)
{
    return (size_t)shape.stages * K::STAGE_BYTES + sizeof(ring_shared<K>) +
           (size_t)SITES * K::ITEM_ROWS * shape.xa_pitch * sizeof(uint16_t);
}

/* With as many stages as a block of so many bytes has. */
template <class K> static ring_shape shape_of(int rank_max, int k_in, int bytes)
{
    ring_shape shape = {0, 1, 32 * (sp_cuda_ceil(rank_max, 32) | 1)};

    while (shape.chunks < CHUNKS && shape.chunks * SP_CUDA_CHUNK_K < k_in)
        shape.chunks *= 2;
    shape.stages = (bytes - (int)shared_of<K>(shape)) / K::STAGE_BYTES;
    shape.stages = shape.stages < STAGES_MAX ? shape.stages : STAGES_MAX;
    return shape;
}

static cudaError_t bytes_of(int gpu, int *out_bytes)
{
    return cudaDeviceGetAttribute(out_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, gpu);
}

template <class K>
static cudaError_t launch(int gpu, const sp_cuda_expert_delta *d, cudaStream_t stream)
{
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config;
    ring_shape shape;
    int bytes = 0, blocks = min(d->items.bound, d->multiprocessors);
    cudaError_t code = bytes_of(gpu, &bytes);

    if (code != cudaSuccess)
        return code;
    shape = shape_of<K>(d->rank_max, d->k_in, bytes);
    if (shape.stages < 3) /* too few bytes in flight */
        return cudaErrorNotSupported;
    config = sp_cuda_overlapping(dim3((unsigned)blocks), THREADS, shared_of<K>(shape), &overlap,
                                 false, stream);
    return cudaLaunchKernelEx(&config, expert_ring_kernel<K>, *d, shape);
}

static bool is_aligned(const void *memory, int64_t stride)
{
    return (uintptr_t)memory % 16 == 0 && stride % 8 == 0;
}

static bool is_taken(const sp_cuda_expert_delta *d)
{
    bool taken = d->tiles == NULL && d->n_sites <= SITES && d->rank_max <= RANKS_MAX &&
                 d->k_in % 8 == 0 && is_aligned(d->x, d->x_stride);

    for (int i = 0; i < d->n_sites; i++)
        taken = taken && d->sites[i].cells != NULL && !d->sites[i].y_is_f32 &&
                d->sites[i].n_out % 8 == 0 && is_aligned(d->sites[i].y, d->sites[i].y_stride);
    return taken;
}

cudaError_t sp_cuda_expert_ring(int gpu, const sp_cuda_expert_delta *delta, cudaStream_t stream)
{
    bool f16 = delta->type == SP_DTYPE_F16;

    if (!is_taken(delta))
        return cudaErrorNotSupported;
    if (delta->items.item_rows == SP_CUDA_ITEM_SOME)
        return f16 ? launch<ring_kind<1, 2>>(gpu, delta, stream)
                   : launch<ring_kind<0, 2>>(gpu, delta, stream);
    if (delta->items.item_rows == SP_CUDA_ITEM_MANY)
        return f16 ? launch<ring_kind<1, 6>>(gpu, delta, stream)
                   : launch<ring_kind<0, 6>>(gpu, delta, stream);
    return cudaErrorNotSupported;
}

template <class K> static cudaError_t allow(int bytes, cudaError_t before)
{
    return before != cudaSuccess
               ? before
               : cudaFuncSetAttribute(expert_ring_kernel<K>,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

cudaError_t sp_cuda_expert_ring_init(int gpu)
{
    int bytes = 0;
    cudaError_t code = bytes_of(gpu, &bytes);

    code = allow<ring_kind<0, 2>>(bytes, allow<ring_kind<1, 2>>(bytes, code));
    return allow<ring_kind<0, 6>>(bytes, allow<ring_kind<1, 6>>(bytes, code));
}
