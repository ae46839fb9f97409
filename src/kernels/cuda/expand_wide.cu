/*
 * expand_wide.cu: y += scale · xa · Bᵀ for a group of sites in one launch, for many rows at large
 * ranks, where the delta is a GEMM; with the bits of expand.cu. xa is the rounded one.
 *
 * Grid: one block per multiprocessor. Work items are pairs (window of up to 16 tiles of one slot,
 * 128 columns of one site), those of a window adjacent, and each block takes an equal contiguous
 * range of them. xa of a window and site is copied to shared memory once; B of an item passes
 * through a ring of stages of 128 ranks each, so it is read once for 128 rows. A warp takes 32
 * rows, the M sides of the mma, and 64 columns, its N sides, which are assigned so that a thread
 * has eight adjacent columns of a row: y never passes through shared memory, it is loaded one item
 * ahead and stored in 16-byte vectors. Rows of xa and B are a multiple of 128 bytes; adjacent
 * 64-byte blocks are swapped in odd rows, which avoids bank conflicts. Bound by the bytes of y;
 * from rank 256 on by shared memory.
 */
#include "kernels/cuda/expand.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/partials.cuh"
#include "kernels/cuda/segments.cuh"

#define ROWS         SP_CUDA_TILE_ROWS
#define WINDOW_TILES 16
#define WINDOW_ROWS  (WINDOW_TILES * ROWS)
#define COLUMNS      128 /* of an item */
#define ROW_WARPS    4
#define COLUMN_WARPS 2
#define WARP_ROWS    (WINDOW_ROWS / ROW_WARPS)
#define WARP_COLUMNS (COLUMNS / COLUMN_WARPS)
#define THREADS      (ROW_WARPS * COLUMN_WARPS * SP_WARP)
#define PART_RANKS   128 /* of a stage */
#define PIECES       16  /* 16-byte vectors in a row of a stage */
#define B_PITCH      (PART_RANKS * 2)
#define STAGE_BYTES  (COLUMNS * B_PITCH)
#define STAGES       3

static_assert(WARP_ROWS == 32 && WARP_COLUMNS == 64, "a thread has four rows, twice eight columns");
static_assert(WINDOW_ROWS <= THREADS, "a thread for each row of a window");

typedef struct wide_shape {
    int first_chunk[SP_CUDA_SITES_MAX + 1]; /* of 128 columns, of each site */
    int tiles_bound;
    int parts;    /* stages of an item */
    int xa_pitch; /* bytes */
    const uint16_t *xa;
} wide_shape;

/* Buffers of xa. Where an item is one stage, three runs may be in flight; where it is two, two. One
 * buffer: xa is copied when the run begins. */
static constexpr int buffers_for(int parts)
{
    return parts == 1 ? 3 : parts == 2 ? 2 : 1;
}

/* What a stage holds. */
typedef struct stage_desc {
    int columns; /* 0: no more stages */
    int site, column0, part, rank;
    int window, buffer;
    int fresh; /* the first stage of its run */
    float stored;
} stage_desc;

typedef struct window_rows {
    int n_rows;
    int row[WINDOW_ROWS]; /* -1: none */
    float request[WINDOW_ROWS];
} window_rows;

template <int BUFFERS> struct block_shared {
    /* That stages of the ring may belong to, and one more where that is not one of them. */
    enum { windows = BUFFERS < 3 ? 2 : 4 };
    stage_desc stage[STAGES];
    window_rows window[windows];
};

/* Where the block fills: the item of the next stage, the same in all threads. */
typedef struct cursor {
    int unit, end; /* items */
    int part;
    int window; /* of the plan; -1: none yet */
    int at;     /* its place in block_shared */
    bool used;  /* a stage belongs to it */
    int site, slot, rank;
    float stored;
    int runs; /* so far, with this one */
    bool fresh, waited;
} cursor;

/* ---- items --------------------------------------------------------------------------------- */

template <int BUFFERS>
static __device__ __forceinline__ void enter_window(cursor *c, block_shared<BUFFERS> *shared,
                                                    const sp_cuda_group &group, int tiles_bound,
                                                    int number)
{
    tile_run run = find_window<WINDOW_TILES>(group.plan, group.n_slots, tiles_bound, number);
    const sp_cuda_tile *tiles = &group.plan.tiles[run.first];
    int i = threadIdx.x / ROWS, j = threadIdx.x % ROWS;

    c->at = c->used ? (c->at + 1) % block_shared<BUFFERS>::windows : c->at;
    c->window = number;
    c->used = false;
    c->site = -1;
    c->slot = tiles->slot;
    if (i < WINDOW_TILES) {
        window_rows *rows = &shared->window[c->at];
        bool valid = i < run.n && j < tiles[min(i, run.n - 1)].count;

        rows->row[threadIdx.x] = valid ? tiles[i].row[j] : -1;
        rows->request[threadIdx.x] = valid ? tiles[i].scale[j] : 0.0f;
        if (threadIdx.x == 0)
            rows->n_rows = run.n * ROWS;
    }
    __syncthreads();
}

static __device__ __forceinline__ void enter_site(cursor *c, const sp_cuda_group &group, int index)
{
    const sp_cuda_site &site = group.sites[index];

    c->site = index;
    c->rank = site.rank != NULL ? site.rank[c->slot] : site.one_rank;
    c->stored = site.scale != NULL ? site.scale[c->slot] : site.one_scale;
    c->fresh = true;
}

/* Moves on to the next item that has a delta, if it is not at one. False: there is none. */
template <int BUFFERS>
static __device__ __forceinline__ bool find_item(cursor *c, block_shared<BUFFERS> *shared,
                                                 const sp_cuda_group &group,
                                                 const wide_shape &shape)
{
    int chunks = shape.first_chunk[group.n_sites];

    while (c->unit < c->end) {
        int window = c->unit / chunks, chunk = c->unit % chunks, index = 0;

        if (c->part > 0)
            return true;
        if (window != c->window)
            enter_window(c, shared, group, shape.tiles_bound, window);
        while (chunk >= shape.first_chunk[index + 1])
            index++;
        if (index != c->site)
            enter_site(c, group, index);
        if (c->rank > 0 && c->stored != 0.0f)
            return true;
        c->unit += shape.first_chunk[index + 1] - chunk;
    }
    return false;
}

/* ---- copies -------------------------------------------------------------------------------- */

/* 16-byte vector `piece` of a row whose pitch is a multiple of 128 bytes (the swizzle). */
static __device__ __forceinline__ int place_of(int row, int piece)
{
    return (piece ^ ((row & 1) << 2)) * 16;
}

/* Ranks [part * 128, part * 128 + 128) of an item's columns, zeros beyond the rank up to a multiple
 * of 32. A column beyond the site's end may be any column: its product is not stored. */
static __device__ __forceinline__ void copy_b(uint32_t to, const uint16_t *b, int64_t stride,
                                              int column0, int n_out, int part, int rank)
{
    int piece = threadIdx.x % PIECES, k = part * PART_RANKS + piece * 8;
    const uint16_t *from = b + (k < rank ? k : 0);

    if (k >= ((rank + 31) & ~31))
        return;
#pragma unroll
    for (int i = 0; i < COLUMNS * PIECES / THREADS; i++) {
        int column = threadIdx.x / PIECES + i * (THREADS / PIECES);

        copy_async_if(to + column * B_PITCH + place_of(column, piece),
                      from + min(column0 + column, n_out - 1) * stride, k < rank);
    }
}

static __device__ __forceinline__ void copy_xa(uint32_t to, const window_rows &rows,
                                               const sp_cuda_group &group, const wide_shape &shape,
                                               int site, int rank)
{
    int n = rows.n_rows;

    for (int piece = threadIdx.x % PIECES; piece * 8 < ((rank + 31) & ~31); piece += PIECES) {
        bool valid = piece * 8 < rank;
        const uint16_t *from = shape.xa + site * group.rank_stride + (valid ? piece * 8 : 0);

#pragma unroll 4
        for (int i = threadIdx.x / PIECES; i < n; i += THREADS / PIECES)
            copy_async_if(to + i * shape.xa_pitch + place_of(i, piece),
                          from + (int64_t)max(rows.row[i], 0) * (group.rank_stride * group.n_sites),
                          valid);
    }
}

/* Shared memory: the buffers of xa, then the stages. */
template <int BUFFERS> struct places {
    uint32_t base;
    int xa_bytes;

    __device__ uint32_t xa(int buffer) const
    {
        return base + buffer * xa_bytes;
    }
    __device__ uint32_t stage(int number) const
    {
        return base + BUFFERS * xa_bytes + number * STAGE_BYTES;
    }
};

/* Fills stage `number`, and commits its copies. All threads call it together. */
template <int BUFFERS>
static __device__ __forceinline__ void fill_stage(cursor *c, block_shared<BUFFERS> *shared,
                                                  const sp_cuda_group &group,
                                                  const wide_shape &shape,
                                                  const places<BUFFERS> &memory, int number)
{
    bool found = find_item(c, shared, group, shape);
    stage_desc desc = {};

    if (found) {
        const sp_cuda_site &site = group.sites[c->site];
        int chunk = c->unit % shape.first_chunk[group.n_sites] - shape.first_chunk[c->site];

        c->runs += c->fresh;
        c->used = true;
        desc = {min(COLUMNS, site.n_out - chunk * COLUMNS),
                c->site,
                chunk * COLUMNS,
                c->part,
                c->rank,
                c->at,
                c->runs % BUFFERS,
                c->fresh,
                c->stored};
        copy_b(memory.stage(number), (const uint16_t *)site.b + c->slot * site.b_slot_stride,
               site.b_stride, desc.column0, site.n_out, c->part, c->rank);
    }
    if (!c->waited) {
        wait_predecessor();
        c->waited = true;
    }
    if (found && c->fresh && BUFFERS > 1)
        copy_xa(memory.xa(desc.buffer), shared->window[c->at], group, shape, c->site, c->rank);
    copy_commit();
    if (threadIdx.x == 0)
        shared->stage[number] = desc;
    if (found) {
        c->fresh = false;
        c->part++;
        if (c->part == shape.parts) {
            c->part = 0;
            c->unit++;
        }
    }
}

/* ---- y ------------------------------------------------------------------------------------- */

/* A thread's y of an item: rows g, g + 8, g + 16 and g + 24 of its warp, eight columns and eight
 * more. */
typedef struct y_part {
    uint4 of[4][2];
} y_part;

static __device__ __forceinline__ int first_row(void)
{
    return (int)(threadIdx.x >> 5) % ROW_WARPS * WARP_ROWS + (int)((threadIdx.x & 31) >> 2);
}

static __device__ __forceinline__ int first_of_columns(void)
{
    return (int)(threadIdx.x >> 5) / ROW_WARPS * WARP_COLUMNS + (int)(threadIdx.x & 3) * 8;
}

/* Columns 0 .. 7 of this thread in row i of its four. */
static __device__ __forceinline__ char *y_of(const sp_cuda_site &site, const stage_desc &desc,
                                             int row)
{
    return (char *)site.y + (row * site.y_stride + desc.column0 + first_of_columns()) * 2;
}

static __device__ __forceinline__ float scale_of(const window_rows &rows, const stage_desc &desc,
                                                 int i)
{
    int at = first_row() + i * ROWS;

    return rows.row[at] >= 0 ? sp_scale_of_row(desc.stored, rows.request[at]) : 0.0f;
}

template <int BUFFERS>
static __device__ __forceinline__ void load_y(y_part *y, const block_shared<BUFFERS> *shared,
                                              const sp_cuda_group &group, const stage_desc &desc)
{
    const window_rows &rows = shared->window[desc.window];
    const sp_cuda_site &site = group.sites[desc.site];

#pragma unroll
    for (int i = 0; i < 4; i++) {
        char *from = y_of(site, desc, rows.row[first_row() + i * ROWS]);

        if (scale_of(rows, desc, i) == 0.0f)
            continue;
#pragma unroll
        for (int c = 0; c < 2; c++)
            if (first_of_columns() + c * 32 < desc.columns)
                y->of[i][c] = load_global(from + c * 64);
    }
}

/* ---- the product --------------------------------------------------------------------------- */

/* [m][n]: rows 16 m .. 16 m + 15, N side n % 4 of the columns 32 (n / 4) .. 32 (n / 4) + 31. */
typedef struct sums {
    float of[2][8][4];
} sums;

/* `steps` times 32 ranks. xa, b: at this thread's first row of each, without its piece. */
template <int F16>
static __device__ __forceinline__ void multiply_part(sums *acc, const char *xa, int xa_pitch,
                                                     const char *b, int steps, uint32_t zero)
{
    int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;

#pragma unroll 1
    for (int s = 0; s < steps; s++) {
        int here = (s * 64 + t * 16) ^ ((g & 1) * 64);
        uint4 x[4];

#pragma unroll
        for (int i = 0; i < 4; i++)
            x[i] = *(const uint4 *)(xa + i * ROWS * xa_pitch + here);
        pair_rows(x, zero);
#pragma unroll
        for (int c = 0; c < 2; c++) { /* an mma that adds to another's sums waits for it */
            uint4 w[4];

#pragma unroll
            for (int n = 0; n < 4; n++)
                w[n] = *(const uint4 *)(b + (c * 32 + n * 2) * B_PITCH + here);
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int n = 0; n < 8; n++) {
                    const uint4 &m = x[n % 2 * 2 + h];

                    mma<F16>(acc->of[n % 2][c * 4 + n / 2], m.x, m.y, m.z, m.w,
                             h == 0 ? w[n / 2].x : w[n / 2].z, h == 0 ? w[n / 2].y : w[n / 2].w);
                }
        }
    }
}

template <int F16, int BUFFERS>
static __device__ __forceinline__ void fold(const y_part &y, const sums &acc,
                                            const block_shared<BUFFERS> *shared,
                                            const sp_cuda_group &group, const stage_desc &desc)
{
    const window_rows &rows = shared->window[desc.window];
    const sp_cuda_site &site = group.sites[desc.site];

#pragma unroll
    for (int i = 0; i < 4; i++) {
        char *to = y_of(site, desc, rows.row[first_row() + i * ROWS]);
        float scale = scale_of(rows, desc, i);

        if (scale == 0.0f)
            continue;
#pragma unroll
        for (int c = 0; c < 2; c++) {
            uint4 delta;

            if (first_of_columns() + c * 32 >= desc.columns)
                break;
            delta.x = narrow_two<F16>(acc.of[i / 2][c * 4][i % 2 * 2],
                                      acc.of[i / 2][c * 4][i % 2 * 2 + 1]);
            delta.y = narrow_two<F16>(acc.of[i / 2][c * 4 + 1][i % 2 * 2],
                                      acc.of[i / 2][c * 4 + 1][i % 2 * 2 + 1]);
            delta.z = narrow_two<F16>(acc.of[i / 2][c * 4 + 2][i % 2 * 2],
                                      acc.of[i / 2][c * 4 + 2][i % 2 * 2 + 1]);
            delta.w = narrow_two<F16>(acc.of[i / 2][c * 4 + 3][i % 2 * 2],
                                      acc.of[i / 2][c * 4 + 3][i % 2 * 2 + 1]);
            store_global(to + c * 64, fold_eight<F16>(y.of[i][c], delta, scale));
        }
    }
}

/* ---- kernel -------------------------------------------------------------------------------- */

/* The range of items of this block. */
static __device__ __forceinline__ cursor start(const sp_cuda_group &group, const wide_shape &shape)
{
    int64_t all =
        (int64_t)count_windows<WINDOW_TILES>(group.plan) * shape.first_chunk[group.n_sites];
    cursor c = {};

    c.unit = (int)(all * blockIdx.x / gridDim.x);
    c.end = (int)(all * (blockIdx.x + 1) / gridDim.x);
    c.window = -1;
    c.site = -1;
    return c;
}

template <int F16, int BUFFERS>
__global__ void __launch_bounds__(THREADS, 1)
    wide_kernel(const __grid_constant__ sp_cuda_group group,
                const __grid_constant__ wide_shape shape)
{
    extern __shared__ __align__(128) char memory[];
    __shared__ block_shared<BUFFERS> shared;
    const places<BUFFERS> at = {shared_address(memory), WINDOW_ROWS * shape.xa_pitch};
    int g = (threadIdx.x & 31) >> 2, warp_column = (int)(threadIdx.x >> 5) / ROW_WARPS;
    int b_at = (warp_column * WARP_COLUMNS + (g >> 1) * 8 + (g & 1)) * B_PITCH;
    cursor c;
    y_part y = {}, next_y = {};
    sums acc = {};

    release_successor();
    c = start(group, shape);
    for (int i = 0; i < STAGES - 1; i++)
        fill_stage<BUFFERS>(&c, &shared, group, shape, at, i);
    __syncthreads();
    if (shared.stage[0].columns > 0)
        load_y(&next_y, &shared, group, shared.stage[0]);
    for (int s = 0, fill = STAGES - 1;;
         s = s + 1 < STAGES ? s + 1 : 0, fill = fill + 1 < STAGES ? fill + 1 : 0) {
        stage_desc desc, next;

        copy_wait<STAGES - 2>();
        __syncthreads();
        desc = shared.stage[s];
        next = shared.stage[s + 1 < STAGES ? s + 1 : 0];
        if (desc.columns == 0)
            break;
        if (BUFFERS == 1 && desc.fresh) {
            copy_xa(at.xa(0), shared.window[desc.window], group, shape, desc.site, desc.rank);
            copy_commit();
            copy_wait<0>();
            __syncthreads();
        }
        fill_stage<BUFFERS>(&c, &shared, group, shape, at, fill);
        if (desc.part == 0) {
            y = next_y;
            acc = {};
        }
        if (next.columns > 0 && next.part == 0)
            load_y(&next_y, &shared, group, next);
        if (first_row() - g < shared.window[desc.window].n_rows) {
            int left = (desc.rank - desc.part * PART_RANKS + 31) / 32;
            const char *xa = memory + desc.buffer * at.xa_bytes + first_row() * shape.xa_pitch +
                             desc.part * B_PITCH;

            multiply_part<F16>(&acc, xa, shape.xa_pitch,
                               memory + BUFFERS * at.xa_bytes + s * STAGE_BYTES + b_at,
                               min(left, PART_RANKS / 32), unknown_zero(group));
            if (desc.part == shape.parts - 1)
                fold<F16, BUFFERS>(y, acc, &shared, group, desc);
        }
    }
}

/* ---- launch -------------------------------------------------------------------------------- */

static wide_shape shape_of(const sp_cuda_group *group)
{
    wide_shape shape = {};

    for (int i = 0; i < group->n_sites; i++)
        shape.first_chunk[i + 1] =
            shape.first_chunk[i] + sp_cuda_ceil(group->sites[i].n_out, COLUMNS);
    shape.tiles_bound = sp_cuda_tiles_bound(group->n_rows, group->n_slots);
    shape.parts = sp_cuda_ceil(group->rank_stride, PART_RANKS);
    shape.xa_pitch = sp_cuda_ceil(group->rank_stride, 64) * 128;
    shape.xa = rounded_of(group);
    return shape;
}

static int shared_bytes(int parts, int xa_pitch)
{
    return buffers_for(parts) * WINDOW_ROWS * xa_pitch + STAGES * STAGE_BYTES;
}

/* Dynamic shared memory of a block beside block_shared. */
template <int BUFFERS> static cudaError_t capacity_of(int gpu, int *out_bytes)
{
    cudaError_t code =
        cudaDeviceGetAttribute(out_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, gpu);

    *out_bytes -= (int)sizeof(block_shared<BUFFERS>) + 128;
    return code;
}

template <int F16, int BUFFERS>
static cudaError_t launch(int gpu, const sp_cuda_group *group, const wide_shape &shape,
                          cudaStream_t stream)
{
    int bytes = shared_bytes(shape.parts, shape.xa_pitch), capacity = 0;
    cudaError_t code = capacity_of<BUFFERS>(gpu, &capacity);
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config = sp_cuda_overlapping(dim3((unsigned)group->multiprocessors), THREADS,
                                                    (size_t)bytes, &overlap, false, stream);

    if (code != cudaSuccess || bytes > capacity)
        return code != cudaSuccess ? code : cudaErrorNotSupported;
    return cudaLaunchKernelEx(&config, wide_kernel<F16, BUFFERS>, *group, shape);
}

template <int F16>
static cudaError_t launch_parts(int gpu, const sp_cuda_group *group, const wide_shape &shape,
                                cudaStream_t on)
{
    return shape.parts == 1   ? launch<F16, 3>(gpu, group, shape, on)
           : shape.parts == 2 ? launch<F16, 2>(gpu, group, shape, on)
                              : launch<F16, 1>(gpu, group, shape, on);
}

cudaError_t sp_cuda_expand_wide(int gpu, const sp_cuda_group *group, cudaStream_t stream)
{
    wide_shape shape = shape_of(group);

    return group->type == SP_DTYPE_F16 ? launch_parts<1>(gpu, group, shape, stream)
                                       : launch_parts<0>(gpu, group, shape, stream);
}

template <int F16, int BUFFERS> static cudaError_t allow(int gpu, cudaError_t before)
{
    int bytes = 0;

    if (before == cudaSuccess)
        before = capacity_of<BUFFERS>(gpu, &bytes);
    return before != cudaSuccess
               ? before
               : cudaFuncSetAttribute(wide_kernel<F16, BUFFERS>,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

template <int F16> static cudaError_t allow_all(int gpu, cudaError_t code)
{
    return allow<F16, 1>(gpu, allow<F16, 2>(gpu, allow<F16, 3>(gpu, code)));
}

cudaError_t sp_cuda_expand_wide_init(int gpu)
{
    return allow_all<1>(gpu, allow_all<0>(gpu, cudaSuccess));
}
