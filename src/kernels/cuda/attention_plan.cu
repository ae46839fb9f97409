/*
 * attention_plan.cu: the step's spans → the pieces that the blocks of attention take. It decides
 * who computes what and never what comes out, so its order may differ from run to run.
 *
 * A span is cut into query tiles of `rows` rows. Where the tiles alone do not fill the GPU, or not
 * evenly, each is split into pieces of at most `target` chunks of keys; of a few targets the one
 * with the least estimated time is taken. Pieces are sorted by length, the longest first: blocks
 * take them in order, and the short ones then fill what is left.
 *
 * One block per core, once a step. Bound by latency: two passes over the rows, three barriers
 * between.
 */
#include "device/cuda/current.cuh"
#include "kernels/cuda/attention.cuh"

#define THREADS    1024
#define LENGTHS    4096 /* chunks of a sequence, at most */
#define CANDIDATES 8

/* Estimated time, in chunks of a block while all blocks run: the beginning and end of a piece;
 * writing, reading and folding a packed row of a partial result; a fold, and each of its steps. */
#define PIECE_COST   0.2f
#define PARTIAL_COST 0.008f
#define MERGE_COST   0.15f
#define FOLD_COST    0.003f

static_assert(CANDIDATES <= THREADS / SP_WARP, "a warp estimates one candidate");

typedef struct plan_shared {
    int tiles_of[LENGTHS + 1]; /* query tiles that see so many chunks */
    int next_of[LENGTHS + 1];  /* pieces of this length; then the index of the next one */
    int most;                  /* chunks of the longest */
    int target, pieces;
    int partials, splits, split_rows; /* handed out */
    float cost[CANDIDATES];
    int targets[CANDIDATES];
} plan_shared;

/* A query tile: rows of one span. */
typedef struct query_tile {
    int rows, position, page, chunks;
} query_tile;

static __device__ __forceinline__ int divide_up(int n, int by)
{
    return (n + by - 1) / by;
}

/* ---- tiles --------------------------------------------------------------------------------- */

/* Whether a tile of this core begins at the row. */
static __device__ __forceinline__ bool read_tile(const sp_cuda_step &step,
                                                 const attention_core &core, int row,
                                                 query_tile *out)
{
    int span = step.row_span[row], first, n;

    if (span < 0)
        return false;
    first = step.span_row[span];
    n = step.span_row[span + 1] - first;
    if (n < core.span_min || n > core.span_max || (row - first) % core.rows != 0)
        return false;
    out->rows = min(core.rows, n - (row - first));
    out->position = step.position[row];
    out->page = step.span_page[span];
    out->chunks = (out->position + out->rows - 1) / ATTENTION_CHUNK + 1;
    return out->position >= 0 && out->chunks <= LENGTHS;
}

static __device__ __forceinline__ void count_tiles(const sp_cuda_step &step,
                                                   const attention_core &core, int n_rows,
                                                   plan_shared *shared)
{
    for (int row = threadIdx.x; row < n_rows; row += THREADS) {
        query_tile tile;

        if (!read_tile(step, core, row, &tile))
            continue;
        atomicAdd(&shared->tiles_of[tile.chunks], 1);
        atomicMax(&shared->most, tile.chunks);
    }
}

/* ---- target -------------------------------------------------------------------------------- */

/* Length of the pieces of a tile, of which only the last may be shorter. */
static __device__ __forceinline__ int length_of(int chunks, int target)
{
    return divide_up(chunks, divide_up(chunks, target));
}

/* What pieces of at most `target` chunks amount to, for one kv head. */
typedef struct totals {
    int pieces, chunks, longest;
    int entries, raw; /* partial results; those of single chunks */
} totals;

/* By a whole warp. */
static __device__ __forceinline__ totals add_up(const plan_shared *shared, int target)
{
    totals sum = {0, 0, 0, 0, 0};

    for (int c = 1 + (int)(threadIdx.x & 31); c <= shared->most; c += SP_WARP) {
        int tiles = shared->tiles_of[c], length = length_of(c, target);
        int split = length < c ? tiles : 0;

        sum.pieces += tiles * divide_up(c, length);
        sum.chunks += tiles * c;
        sum.longest = max(sum.longest, tiles > 0 ? length : 0);
        sum.entries += split * (1 + c - length);
        sum.raw += split * (c - length);
    }
    sum.pieces = __reduce_add_sync(~0u, sum.pieces);
    sum.chunks = __reduce_add_sync(~0u, sum.chunks);
    sum.longest = __reduce_max_sync(~0u, sum.longest);
    sum.entries = __reduce_add_sync(~0u, sum.entries);
    sum.raw = __reduce_add_sync(~0u, sum.raw);
    return sum;
}

/* INFINITY: the pieces or their partial results do not fit. Where the memory is the bound, a last
 * wave that does not fill the GPU is faster for it; else it takes the time of a full one. */
static __device__ __forceinline__ float estimate(const totals &sum, const attention_core &core,
                                                 int kv_heads, int most)
{
    float heads = (float)kv_heads, pieces = (float)sum.pieces * heads;
    float rows = (float)core.tile_rows * heads, waves = pieces / (float)core.blocks;
    float mean = (float)sum.chunks / fmaxf((float)sum.pieces, 1.0f);
    float cost = ((float)sum.longest + PIECE_COST) / core.speed;

    if (pieces > (float)core.pieces_max * heads ||
        (float)sum.entries * rows > (float)core.partial_rows)
        return INFINITY;
    cost = fmaxf(cost, (core.speed > 1.0f ? waves : ceilf(waves)) * (mean + PIECE_COST));
    if (sum.raw > 0)
        cost += MERGE_COST + FOLD_COST * (float)most;
    return cost + PARTIAL_COST * (float)sum.raw * rows / (float)core.blocks;
}

/* Candidates are whole tiles, and so many pieces per block on average. */
static __device__ __forceinline__ int target_of(int candidate, const totals &whole,
                                                const attention_core &core, int kv_heads)
{
    const float per_block[CANDIDATES] = {0.0f, 0.5f, 1.0f, 1.34f, 1.5f, 2.0f, 3.0f, 4.0f};
    float all = (float)whole.chunks * (float)kv_heads / (float)core.blocks;

    if (candidate == 0)
        return max(whole.longest, 1);
    return max((int)ceilf(all / per_block[candidate]), 1);
}

static __device__ __forceinline__ void choose_target(const attention_core &core, int kv_heads,
                                                     plan_shared *shared)
{
    int candidate = threadIdx.x >> 5;

    if (candidate < CANDIDATES) {
        int target = target_of(candidate, add_up(shared, max(shared->most, 1)), core, kv_heads);
        float cost = estimate(add_up(shared, target), core, kv_heads, shared->most);

        if ((threadIdx.x & 31) == 0) {
            shared->targets[candidate] = target;
            shared->cost[candidate] = cost;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        int best = 0;

        for (int i = 1; i < CANDIDATES; i++)
            best = shared->cost[i] < shared->cost[best] ? i : best;
        shared->target = shared->targets[best];
    }
    __syncthreads();
}

/* ---- order --------------------------------------------------------------------------------- */

/* next_of[length] becomes the number of pieces that are longer. */
static __device__ __forceinline__ void order_lengths(plan_shared *shared)
{
    for (int c = 1 + (int)threadIdx.x; c <= shared->most; c += THREADS) {
        int tiles = shared->tiles_of[c], length = length_of(c, shared->target);

        if (tiles > 0)
            atomicAdd(&shared->next_of[length], tiles * divide_up(c, length));
    }
    __syncthreads();
    if (threadIdx.x < SP_WARP) {
        int lane = threadIdx.x, before = 0;

        for (int high = shared->most; high > 0; high -= SP_WARP) {
            int own = high - lane > 0 ? shared->next_of[high - lane] : 0, sum = own;

            for (int d = 1; d < SP_WARP; d *= 2) {
                int other = __shfl_up_sync(~0u, sum, d);

                sum += lane >= d ? other : 0;
            }
            if (high - lane > 0)
                shared->next_of[high - lane] = before + sum - own;
            before += __shfl_sync(~0u, sum, SP_WARP - 1);
        }
        if (lane == 0)
            shared->pieces = before;
    }
    __syncthreads();
}

/* ---- pieces -------------------------------------------------------------------------------- */

/* Reserves the partial results of a tile that is split; returns the first. */
static __device__ __forceinline__ int write_split(const attention_core &core, int row,
                                                  const query_tile &tile, int length, int packed,
                                                  int kv_heads, plan_shared *shared)
{
    int stride = (1 + tile.chunks - length) * packed;
    int partial = atomicAdd(&shared->partials, stride * kv_heads);
    int split = atomicAdd(&shared->splits, 1), at = atomicAdd(&shared->split_rows, tile.rows);

    core.splits[split] = {row, tile.rows, tile.position, partial, stride, length, {0, 0}};
    for (int i = 0; i < tile.rows; i++)
        core.split_rows[at + i] = make_int2(split, i);
    return partial;
}

static __device__ __forceinline__ void write_pieces(const attention_core &core, int row,
                                                    const query_tile &tile, int group, int kv_heads,
                                                    plan_shared *shared)
{
    int length = length_of(tile.chunks, shared->target), packed = tile.rows * group;
    int n = divide_up(tile.chunks, length), at = atomicAdd(&shared->next_of[length], n);
    int tiles = (tile.position + tile.rows - 1) / ATTENTION_TILE + 1, partial = -1;

    if (n > 1)
        partial = write_split(core, row, tile, length, packed, kv_heads, shared);
    for (int i = 0; i < n; i++) {
        int first = i * length;

        core.pieces[at + i] = {row,
                               tile.rows,
                               tile.position,
                               tile.page,
                               first * CHUNK_TILES,
                               min((first + length) * CHUNK_TILES, tiles),
                               i == 0 ? partial : partial + (1 + first - length) * packed,
                               (1 + tile.chunks - length) * packed};
    }
}

__global__ void __launch_bounds__(THREADS)
    attention_plan_kernel(const __grid_constant__ attention_args args)
{
    __shared__ plan_shared shared;
    const attention_core &core = args.core[blockIdx.x];
    const sp_cuda_step &step = args.a.step;
    int kv_heads = args.a.shape.kv_heads, n_rows;

    for (int c = threadIdx.x; c <= LENGTHS; c += THREADS)
        shared.tiles_of[c] = shared.next_of[c] = 0;
    if (threadIdx.x == 0)
        shared.most = shared.partials = shared.splits = shared.split_rows = 0;
    n_rows = min(step.counts[0], step.rows);
    __syncthreads();
    count_tiles(step, core, n_rows, &shared);
    __syncthreads();
    choose_target(core, kv_heads, &shared);
    order_lengths(&shared);
    for (int row = threadIdx.x; row < n_rows; row += THREADS) {
        query_tile tile;

        if (read_tile(step, core, row, &tile))
            write_pieces(core, row, tile, args.group, kv_heads, &shared);
    }
    __syncthreads();
    if (threadIdx.x == 0)
        *core.counts = {shared.pieces, shared.split_rows, 0, 0};
}

cudaError_t sp_cuda_attention_make_plan(const attention_args *args, cudaStream_t stream)
{
    attention_plan_kernel<<<(unsigned)args->n_cores, THREADS, 0, stream>>>(*args);
    return cudaGetLastError();
}
