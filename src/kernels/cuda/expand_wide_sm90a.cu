/*
 * expand_wide_sm90a.cu: y += scale · xa · Bᵀ for a group of sites in one launch through wgmma, for
 * many rows at large ranks; with the bits of expand.cu: wgmma has the chain of mma. xa is the
 * rounded one, in bf16.
 *
 * Grid: one block per multiprocessor. Units are triples (window of one or two passes of 128 rows of
 * one slot, 64 columns of one site, pass), those of a window adjacent, then those of its columns;
 * each block takes an equal contiguous range of them. What it takes of a window and site is a run.
 * xa of a run is put into shared memory once, by all threads, in the order of k that wgmma's
 * operand takes. Then the warpgroups divide the run and do not meet before its end. Each has B of
 * its 64 columns, the M side, in registers, straight from memory in 16-byte vectors, 128 ranks at a
 * time; the rows of a pass are the N side. Deltas pass through shared memory, so that y is read and
 * written in whole lines of 128 bytes. B is loaded a stage ahead, y copied a unit ahead to places
 * of its thread's own in shared memory: a warp that waits for some of its loads into registers may
 * wait for all of them, so one kind alone is in flight over the products. Bound by the bytes of y.
 */
#include "kernels/cuda/expand.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/partials.cuh"
#include "kernels/cuda/segments.cuh"
#include "kernels/cuda/wgmma.cuh"

#define ROWS         SP_CUDA_TILE_ROWS
#define PASS_TILES   16
#define PASS_ROWS    (PASS_TILES * ROWS)
#define COLUMNS      64 /* of a unit */
#define WARPGROUP    128
#define WARPGROUPS   3
#define THREADS      (WARPGROUPS * WARPGROUP)
#define QUADS        (THREADS / 4)
#define PIECES       8 /* 16-byte vectors of a unit's columns */
#define ROW_STEP     (WARPGROUP / PIECES)
#define STAGE_RANKS  128 /* of B in registers */
#define STAGE_GROUPS (STAGE_RANKS / 32)
#define BLOCK_RANKS  64 /* of xa, side by side in a row of shared memory */
#define ROW_BYTES    128
#define UNIT_BYTES   (PASS_ROWS * ROW_BYTES)       /* of y or deltas */
#define XA_AT        (2 * WARPGROUPS * UNIT_BYTES) /* after the y and the deltas of each */
#define UNITS_EACH   16 /* of a block: from so many on windows have two passes */

static_assert(PASS_ROWS == SP_CUDA_WGMMA_ROWS, "the choice counts by its windows");
static_assert(ROW_BYTES == BLOCK_RANKS * 2 && ROW_BYTES == COLUMNS * 2, "rows of one swizzle");

typedef struct large_shape {
    int first_chunk[SP_CUDA_SITES_MAX + 1]; /* of 64 columns, of each site */
    int tiles_bound;
    int xa_pitch; /* elements from a row of xa to the next */
    const uint16_t *xa;
} large_shape;

/* 1 where this object has the kernel for the GPU at hand. */
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__device__ int expand_wide_is_built = 1;
#else
__device__ int expand_wide_is_built = 0;
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* A row of a run: its index, or -1, and where it is in y, in bytes. The scale of a row that has no
 * delta is 0. */
typedef struct alignas(16) run_row {
    int64_t at;
    int row;
    float scale;
} run_row;

/* What a block takes of a window and site. Its units are numbered from the site's first one. */
typedef struct run {
    int site, slot, rank;
    float stored;
    tile_run tiles;
    int begin, end; /* units of the run */
    int passes;     /* of each of its chunks */
    int next;       /* unit of the launch after it */
} run;

/* The same in all lanes, which the compiler does not know: wgmma may not be in a branch of some. */
static __device__ __forceinline__ int uniform(int value)
{
    return __shfl_sync(~0u, value, 0);
}

/* ---- runs ---------------------------------------------------------------------------------- */

/* Passes of a window: two halve the bytes of B, but windows of few rows are then unequal. */
template <int MOST>
static __device__ __forceinline__ int passes_of(const sp_cuda_group &group,
                                                const large_shape &shape)
{
    int rows = group.plan.head->n_routed, chunks = shape.first_chunk[group.n_sites];

    return MOST > 1 && rows / MOST >= group.plan.head->n_segments * PASS_ROWS &&
                   parts(rows, PASS_ROWS) * chunks >= UNITS_EACH * (int)gridDim.x
               ? MOST
               : 1;
}

template <int MOST>
static __device__ __forceinline__ int64_t count_units(const sp_cuda_group &group,
                                                      const large_shape &shape, int passes)
{
    int windows = passes == 1 ? count_windows<PASS_TILES>(group.plan)
                              : count_windows<MOST * PASS_TILES>(group.plan);

    return (int64_t)windows * shape.first_chunk[group.n_sites] * passes;
}

/* Units [from, to) of so many passes each, as units of the passes that the window has. */
static __device__ __forceinline__ void set_units(run *r, int from, int to, int passes)
{
    r->passes = parts(r->tiles.n, PASS_TILES);
    r->begin = from / passes * r->passes + min(from % passes, r->passes);
    r->end = to / passes * r->passes + min(to % passes, r->passes);
}

/* The run that `unit` begins, of a block that ends with unit `end`. */
template <int MOST>
static __device__ __forceinline__ run find_run(const sp_cuda_group &group, const large_shape &shape,
                                               int passes, int unit, int end)
{
    int units = shape.first_chunk[group.n_sites] * passes, window = unit / units, at = unit % units;
    int first;
    run r = {};

    while (at >= shape.first_chunk[r.site + 1] * passes)
        r.site++;
    first = window * units + shape.first_chunk[r.site] * passes;
    r.next = min(end, window * units + shape.first_chunk[r.site + 1] * passes);
    r.tiles =
        passes == 1
            ? find_window<PASS_TILES>(group.plan, group.n_slots, shape.tiles_bound, window)
            : find_window<MOST * PASS_TILES>(group.plan, group.n_slots, shape.tiles_bound, window);
    r.slot = uniform(group.plan.tiles[r.tiles.first].slot);
    r.rank = uniform(group.sites[r.site].rank != NULL ? group.sites[r.site].rank[r.slot]
                                                      : group.sites[r.site].one_rank);
    r.stored = group.sites[r.site].scale != NULL ? group.sites[r.site].scale[r.slot]
                                                 : group.sites[r.site].one_scale;
    set_units(&r, unit - first, r.next - first, passes);
    return r;
}

template <int MOST>
static __device__ __forceinline__ void put_rows(run_row *rows, const sp_cuda_group &group,
                                                const run &r)
{
    int i = threadIdx.x / ROWS, j = threadIdx.x % ROWS;
    run_row row = {0, -1, 0.0f};

    static_assert(MOST * PASS_ROWS <= THREADS, "a thread for each row of a run");
    if (i >= MOST * PASS_TILES)
        return;
    if (i < r.tiles.n) {
        const sp_cuda_tile *tile = &group.plan.tiles[r.tiles.first + i];

        if (j < tile->count)
            row = {tile->row[j] * group.sites[r.site].y_stride * 2, tile->row[j],
                   sp_scale_of_row(r.stored, tile->scale[j])};
    }
    rows[threadIdx.x] = row;
}

/* ---- xa ------------------------------------------------------------------------------------ */

/* Word i of lane t of a quad becomes word t of its lane i. */
static __device__ __forceinline__ uint4 transpose_quad(uint4 v)
{
    bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    uint32_t first = __shfl_xor_sync(~0u, odd ? v.x : v.y, 1);
    uint32_t second = __shfl_xor_sync(~0u, odd ? v.z : v.w, 1);

    v = odd ? make_uint4(first, v.y, second, v.w) : make_uint4(v.x, first, v.z, second);
    first = __shfl_xor_sync(~0u, high ? v.x : v.z, 2);
    second = __shfl_xor_sync(~0u, high ? v.y : v.w, 2);
    return high ? make_uint4(first, second, v.z, v.w) : make_uint4(v.x, v.y, first, second);
}

/*
 * A run's xa, zeros beyond the rank up to a multiple of 32: K-major rows in the 128-byte swizzle,
 * 64 ranks of all rows and then the next 64. Of 32 ranks, which a quad has in four vectors, word i
 * of the four vectors is together: the k of the mma of expand.cu.
 */
template <int MOST>
static __device__ __forceinline__ void put_xa(uint32_t to, const run_row *rows,
                                              const sp_cuda_group &group, const large_shape &shape,
                                              const run &r)
{
    enum { rows_most = MOST * PASS_ROWS, batch = (rows_most + QUADS - 1) / QUADS };
    int t = threadIdx.x & 3, quad = threadIdx.x >> 2;
    const uint16_t *xa = shape.xa + r.site * group.rank_stride + t * 8;

    for (int k0 = 0; k0 < r.rank; k0 += 4 * 32) {
        uint4 v[batch][4];

#pragma unroll
        for (int i = 0; i < batch; i++) {
            int at = quad + i * QUADS, row = at < rows_most ? rows[at].row : -1;

#pragma unroll
            for (int s = 0; s < 4; s++) {
                int k = k0 + s * 32;
                bool valid = row >= 0 && k + t * 8 < r.rank;

                v[i][s] =
                    load_global_if(valid ? xa + (int64_t)row * shape.xa_pitch + k : xa, valid);
            }
        }
#pragma unroll
        for (int i = 0; i < batch; i++) {
            int at = quad + i * QUADS;

#pragma unroll
            for (int s = 0; s < 4; s++) {
                int k = k0 + s * 32, piece = s % 2 * 4 + t;

                store_shared_if(to + k / BLOCK_RANKS * (rows_most * ROW_BYTES) + at * ROW_BYTES +
                                    ((piece ^ (at & 7)) << 4),
                                transpose_quad(v[i][s]), at < r.tiles.n * ROWS && k < r.rank);
            }
        }
    }
}

/* ---- B ------------------------------------------------------------------------------------- */

/* A thread's rows of the M side, g and g + 8 of its warp's 16, of each 32 ranks: 16-byte vectors of
 * the two, or, in order, the operands of two products. */
typedef struct weights {
    uint4 of[STAGE_GROUPS][2];
} weights;

/* A run's B, at this thread's quarter of 32 ranks, and y, at its piece of chunk 0. */
typedef struct large_work {
    const uint16_t *b;
    int64_t b_stride;
    int n_out, rank, stages;
    int b_column; /* of M row g; row g + 8 is eight columns on */
    int y_column;
    uint32_t block; /* bytes from 64 ranks of xa to the next */
    char *y;
} large_work;

template <int MOST>
static __device__ __forceinline__ large_work work_of(const sp_cuda_group &group, const run &r)
{
    const sp_cuda_site &site = group.sites[r.site];
    large_work w;

    w.b = (const uint16_t *)site.b + r.slot * site.b_slot_stride + (threadIdx.x & 3) * 8;
    w.b_stride = site.b_stride;
    w.n_out = site.n_out;
    w.rank = r.rank;
    w.stages = parts(r.rank, STAGE_RANKS);
    w.b_column = (int)(threadIdx.x % WARPGROUP >> 5) * 16 + (int)((threadIdx.x & 31) >> 2);
    w.y_column = (int)(threadIdx.x % PIECES) * 8;
    w.block = MOST * PASS_ROWS * ROW_BYTES;
    w.y = (char *)site.y + w.y_column * 2;
    return w;
}

/* A column beyond the end may be any: its product is not stored. */
static __device__ __forceinline__ void load_stage(weights *w, const large_work &at, int chunk,
                                                  int stage)
{
    int low = chunk * COLUMNS + at.b_column, k0 = stage * STAGE_RANKS;
    const uint16_t *row = at.b + min(low, at.n_out - 1) * at.b_stride + k0;
    const uint16_t *other = at.b + min(low + 8, at.n_out - 1) * at.b_stride + k0;

#pragma unroll
    for (int s = 0; s < STAGE_GROUPS; s++) {
        bool valid = k0 + s * 32 + (int)(threadIdx.x & 3) * 8 < at.rank;

        w->of[s][0] = load_weights_if(row + s * 32, valid);
        w->of[s][1] = load_weights_if(other + s * 32, valid);
    }
}

/* ---- the product --------------------------------------------------------------------------- */

/* Before the products, which must not wait for copies of registers. */
static __device__ __forceinline__ void order(weights *w, const weights &loaded)
{
#pragma unroll
    for (int s = 0; s < STAGE_GROUPS; s++) {
        uint4 u = loaded.of[s][0], v = loaded.of[s][1];

        w->of[s][0] = make_uint4(u.x, v.x, u.y, v.y);
        w->of[s][1] = make_uint4(u.z, v.z, u.w, v.w);
#pragma unroll
        for (int i = 0; i < 2; i++)
            asm volatile(""
                         : "+r"(w->of[s][i].x), "+r"(w->of[s][i].y), "+r"(w->of[s][i].z),
                           "+r"(w->of[s][i].w));
    }
}

/* Adds the first G groups of a stage to a pass of N rows. from: their operand of the rows; block:
 * bytes from 64 ranks to the next. */
template <int N, int G>
static __device__ __forceinline__ void multiply_groups(float *acc, const weights &w, uint32_t from,
                                                       uint32_t block)
{
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < G; s++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint4 v = w.of[s][i];
            uint32_t a[4] = {v.x, v.y, v.z, v.w};

            wgmma_registers<N, 0>::multiply(
                acc, a, wgmma_operand(from + s / 2 * block + s % 2 * 64 + i * 32), 1);
        }
    wgmma_commit();
    wgmma_wait<0>();
}

/* Adds a stage of `ranks` ranks, or of all of it where that is more. */
template <int N>
static __device__ __forceinline__ void multiply_stage(float *acc, const weights &w, uint32_t from,
                                                      uint32_t block, int ranks)
{
    if (ranks > 96)
        multiply_groups<N, 4>(acc, w, from, block);
    else if (ranks > 64)
        multiply_groups<N, 3>(acc, w, from, block);
    else if (ranks > 32)
        multiply_groups<N, 2>(acc, w, from, block);
    else
        multiply_groups<N, 1>(acc, w, from, block);
    wgmma_arrived<N / 2>(acc);
}

/* B of a warpgroup: the stage that is multiplied, and the one that is loaded. */
typedef struct b_stages {
    weights now, loaded;
} b_stages;

/* Takes the stage that was loaded, and loads the one after it; chunk -1: none. */
static __device__ __forceinline__ void next_stage(b_stages *b, const large_work &at, int chunk,
                                                  int stage)
{
    order(&b->now, b->loaded);
    if (chunk >= 0)
        load_stage(&b->loaded, at, chunk, stage);
}

/* One unit. first: of its chunk; then: the chunk whose first stage comes after its last one. */
template <int N>
static __device__ __forceinline__ void multiply_unit(float *acc, b_stages *b, const large_work &at,
                                                     uint32_t from, int chunk, bool first, int then)
{
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        acc[i] = 0.0f;
    for (int stage = 0; stage < at.stages; stage++) {
        bool last = stage + 1 == at.stages;

        if (first || at.stages > 1)
            next_stage(b, at, last ? then : chunk, last ? 0 : stage + 1);
        multiply_stage<N>(acc, b->now, from + stage * 2 * at.block, at.block,
                          at.rank - stage * STAGE_RANKS);
    }
}

/* The deltas of N rows as elements, a row's 64 columns in 128 bytes, pieces swapped by the row's
 * last three bits, which avoids bank conflicts. */
template <int N> static __device__ __forceinline__ void put_deltas(uint32_t to, const float *acc)
{
    int lane = threadIdx.x & 31, row = (lane >> 4) * 8 + (lane & 7);
    int piece = (int)(threadIdx.x % WARPGROUP >> 5) * 2 + (lane >> 3 & 1);

    to += row * ROW_BYTES + ((piece ^ (lane & 7)) << 4);
#pragma unroll
    for (int j = 0; j < N / 8; j += 2)
        store_transposed(to + j * (ROWS * ROW_BYTES),
                         make_uint4(narrow_two<0>(acc[4 * j], acc[4 * j + 1]),
                                    narrow_two<0>(acc[4 * j + 2], acc[4 * j + 3]),
                                    narrow_two<0>(acc[4 * j + 4], acc[4 * j + 5]),
                                    narrow_two<0>(acc[4 * j + 6], acc[4 * j + 7])));
}

/* ---- y ------------------------------------------------------------------------------------- */

/* A unit's y: its rows, from this thread's first one on, and this thread's piece of its columns. */
typedef struct y_place {
    const run_row *rows;
    char *y;
    bool inside;
} y_place;

static __device__ __forceinline__ y_place place_of(const large_work &at, const run &r,
                                                   const run_row *rows, int unit)
{
    int chunk = unit / r.passes, row0 = unit % r.passes * PASS_ROWS;

    return {rows + row0 + threadIdx.x % WARPGROUP / PIECES, at.y + chunk * ROW_BYTES,
            chunk * COLUMNS + at.y_column < at.n_out};
}

/* Copies a unit's y, of its first N rows, to this thread's places, if it is before `end`. */
template <int N>
static __device__ __forceinline__ void copy_y(uint32_t to, const large_work &at, const run &r,
                                              const run_row *rows, int unit, int end)
{
    y_place from = place_of(at, r, rows, unit);

    if (unit >= end)
        return;
    to += threadIdx.x % WARPGROUP * 16;
#pragma unroll
    for (int i = 0; i < N / ROW_STEP; i++) {
        run_row row = from.rows[i * ROW_STEP];

        copy_async_if(to + i * (WARPGROUP * 16), from.inside ? from.y + row.at : at.y,
                      from.inside && row.scale != 0.0f);
    }
    copy_commit();
}

/* Stores y, which has arrived, with the deltas of N rows. */
template <int N>
static __device__ __forceinline__ void fold_y(uint32_t y, uint32_t deltas, const y_place &here)
{
    int row = threadIdx.x % WARPGROUP / PIECES, piece = threadIdx.x % PIECES;

    deltas += row * ROW_BYTES + ((piece ^ (row & 7)) << 4);
    y += threadIdx.x % WARPGROUP * 16;
#pragma unroll
    for (int i = 0; i < N / ROW_STEP; i++) {
        run_row own = here.rows[i * ROW_STEP];
        uint4 delta = load_shared(deltas + i * (ROW_STEP * ROW_BYTES));
        uint4 old = load_shared(y + i * (WARPGROUP * 16));

        store_global_if(here.y + own.at, fold_eight<0>(old, delta, own.scale),
                        here.inside && own.scale != 0.0f);
    }
}

/* ---- kernel -------------------------------------------------------------------------------- */

/* A warpgroup's shared memory, for the y and the deltas of a unit, its named barrier, and units
 * [begin, end) of a run. */
typedef struct share {
    uint32_t y, deltas;
    int barrier, begin, end;
} share;

static __device__ __forceinline__ share share_of(uint32_t memory, const run &r, int warpgroup)
{
    int n = r.end - r.begin;

    memory += warpgroup * (2 * UNIT_BYTES);
    return {memory, memory + UNIT_BYTES, warpgroup + 1, r.begin + n * warpgroup / WARPGROUPS,
            r.begin + n * (warpgroup + 1) / WARPGROUPS};
}

/* The deltas of a unit of N rows at most, and then the first weights of the chunk `then`. */
template <int N>
static __device__ __forceinline__ void make_deltas(b_stages *b, const share &s,
                                                   const large_work &at, uint32_t from, int chunk,
                                                   bool first, int then)
{
    float acc[N / 2];

    multiply_unit<N>(acc, b, at, from, chunk, first, then);
    meet(s.barrier, WARPGROUP); /* the deltas before are read */
    put_deltas<N>(s.deltas, acc);
    meet(s.barrier, WARPGROUP);
}

/* Folds `unit` of N rows at most, whose y is on its way, and copies the next one's. */
template <int N>
static __device__ __forceinline__ void fold_unit(const share &s, const large_work &at, const run &r,
                                                 const run_row *rows, int unit)
{
    copy_wait<0>();
    fold_y<N>(s.y, s.deltas, place_of(at, r, rows, unit));
    copy_y<N>(s.y, at, r, rows, unit + 1, s.end);
}

/* The chunk whose first weights are loaded over the last stage of `unit`; -1: none. */
static __device__ __forceinline__ int chunk_after(const share &s, const large_work &at,
                                                  const run &r, int unit)
{
    int next = at.stages == 1 ? (unit / r.passes + 1) * r.passes : unit + 1;

    return next < s.end ? next / r.passes : -1;
}

/* The warpgroup's units, of which B has the first stage loaded, and y of the first is on its way.
 */
static __device__ __forceinline__ void fold_units(b_stages *b, const share &s, const large_work &at,
                                                  const run &r, const run_row *rows, uint32_t xa)
{
    for (int unit = s.begin; unit < s.end; unit++) {
        int chunk = unit / r.passes, tile0 = unit % r.passes * PASS_TILES;
        int n_tiles = r.tiles.n - tile0, then = chunk_after(s, at, r, unit);
        bool first = unit == s.begin || tile0 == 0;
        uint32_t from = xa + tile0 * (ROWS * ROW_BYTES);

        if (n_tiles <= 4)
            make_deltas<32>(b, s, at, from, chunk, first, then);
        else if (n_tiles <= 8)
            make_deltas<64>(b, s, at, from, chunk, first, then);
        else
            make_deltas<PASS_ROWS>(b, s, at, from, chunk, first, then);
        if (r.tiles.n <= 4)
            fold_unit<32>(s, at, r, rows, unit);
        else
            fold_unit<PASS_ROWS>(s, at, r, rows, unit);
    }
}

#endif

template <int MOST>
__global__ void __launch_bounds__(THREADS, 1)
    expand_wide_kernel(const __grid_constant__ sp_cuda_group group,
                       const __grid_constant__ large_shape shape)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) char memory[];
    __shared__ run_row rows[MOST * PASS_ROWS];
    int64_t all;
    int unit, end, passes, warpgroup;
    uint32_t at_memory = shared_address(memory), xa = at_memory + XA_AT;
    bool waited = false;
    b_stages b = {};

    release_successor();
    warpgroup = uniform(threadIdx.x / WARPGROUP);
    passes = uniform(passes_of<MOST>(group, shape));
    all = count_units<MOST>(group, shape, passes);
    unit = (int)(all * blockIdx.x / gridDim.x);
    end = (int)(all * (blockIdx.x + 1) / gridDim.x);
    while (unit < end) {
        run r = find_run<MOST>(group, shape, passes, unit, end);
        share s = share_of(at_memory, r, warpgroup);
        large_work at = work_of<MOST>(group, r);

        unit = r.next;
        if (r.rank <= 0 || r.stored == 0.0f || r.begin >= r.end)
            continue;
        if (s.begin < s.end)
            load_stage(&b.loaded, at, s.begin / r.passes, 0);
        __syncthreads(); /* the rows and xa of the run before are read */
        put_rows<MOST>(rows, group, r);
        __syncthreads();
        if (!waited)
            wait_predecessor();
        waited = true;
        copy_y<PASS_ROWS>(s.y, at, r, rows, s.begin, s.end);
        put_xa<MOST>(xa, rows, group, shape, r);
        copies_before_bulk(); /* wgmma reads through the async proxy too */
        __syncthreads();
        fold_units(&b, s, at, r, rows, xa);
    }
    if (!waited)
        wait_predecessor();
#endif
}

/* ---- launch -------------------------------------------------------------------------------- */

static bool taken_on[SP_CUDA_GPUS_MAX]; /* GPUs whose object has the kernel */

static large_shape shape_of(const sp_cuda_group *group)
{
    large_shape shape = {};

    for (int i = 0; i < group->n_sites; i++)
        shape.first_chunk[i + 1] =
            shape.first_chunk[i] + sp_cuda_ceil(group->sites[i].n_out, COLUMNS);
    shape.tiles_bound = sp_cuda_tiles_bound(group->n_rows, group->n_slots);
    shape.xa_pitch = group->rank_stride * group->n_sites;
    shape.xa = rounded_of(group);
    return shape;
}

static int bytes_for(int most, int rank_stride)
{
    return XA_AT + sp_cuda_ceil(rank_stride, BLOCK_RANKS) * most * PASS_ROWS * ROW_BYTES;
}

template <int MOST> static cudaError_t launch(const sp_cuda_group *group, cudaStream_t stream)
{
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config =
        sp_cuda_overlapping(dim3((unsigned)group->multiprocessors), THREADS,
                            (size_t)bytes_for(MOST, group->rank_stride), &overlap, false, stream);

    return cudaLaunchKernelEx(&config, expand_wide_kernel<MOST>, *group, shape_of(group));
}

cudaError_t sp_cuda_expand_wide_sm90a(int gpu, const sp_cuda_group *group, cudaStream_t stream)
{
    if (!taken_on[gpu] || group->type != SP_DTYPE_BF16)
        return cudaErrorNotSupported;
    return group->rank_stride <= STAGE_RANKS ? launch<2>(group, stream) : launch<1>(group, stream);
}

template <int MOST> static cudaError_t allow(int rank_stride)
{
    return cudaFuncSetAttribute(expand_wide_kernel<MOST>,
                                cudaFuncAttributeMaxDynamicSharedMemorySize,
                                bytes_for(MOST, rank_stride));
}

cudaError_t sp_cuda_expand_wide_sm90a_init(int gpu)
{
    int major = 0, minor = 0, built = 0;
    cudaError_t code = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, gpu);

    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, gpu);
    if (code != cudaSuccess || major != 9 || minor != 0)
        return code;
    code = cudaMemcpyFromSymbol(&built, expand_wide_is_built, sizeof built);
    if (code != cudaSuccess || !built)
        return code;
    code = allow<1>(SP_CUDA_RANK_MAX);
    if (code == cudaSuccess)
        code = allow<2>(STAGE_RANKS);
    taken_on[gpu] = code == cudaSuccess;
    return code;
}
