/*
 * expand.cu: y += scale · xa · Bᵀ for a group of sites in one launch, or two where many rows have
 * y of both types.
 *
 *     xa[row, c]  = T(partials summed in the order of kernels_cuda.h)
 *     y[row, j]   = Ty(fmaf(scale, (float)T(xa[row, :] · B[slot][j, :]), y[row, j]))
 *
 * Grid (sum over sites of ceil(n_out / (128 · steps)), tiles / TILES), 128 threads. A block takes
 * `steps` steps of 128 outputs of one site for a window of TILES tiles, one run of tiles that share
 * a slot after another. A warp takes 32 outputs of a step, as the M sides of two mma: outputs are
 * assigned to the M rows so that, after the products are transposed in registers, each thread holds
 * eight adjacent outputs of one row and moves y in 16-byte vectors. B and y of AHEAD steps are in
 * flight together; the loads of B are issued before the wait for the shrink. Bound by the bytes of
 * B (decode) or y (prefill).
 */
#include "kernels/cuda/expand.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/partials.cuh"

#define THREADS      128
#define STEP         128 /* outputs of a block's step */
#define WARP_COLUMNS 32
#define ROWS         SP_CUDA_TILE_ROWS

typedef struct launch_shape {
    int first_block[SP_CUDA_SITES_MAX + 1]; /* of each site */
    int tiles_bound, steps;
    partials_shape partials;
    const uint16_t *rounded; /* xa; NULL: the partials' sums */
    int lanes;               /* threads that sum one element's groups together: 1, 2, 4 or 8 */
    int xa_pitch;            /* elements; an odd multiple of 32: no bank conflicts */
} launch_shape;

/* Rank and stored scale of a slot. */
typedef struct slot_cell {
    int rank;
    float scale;
} slot_cell;

template <int TILES> struct window {
    slot_cell cell[THREADS]; /* of all slots, if there are at most THREADS */
    int slot[TILES];         /* -1: no tile */
    int count;               /* rows of the first tile */
    int row[TILES * ROWS];   /* -1: none */
    float request[TILES * ROWS], scale[TILES * ROWS]; /* scale 0: not of this run, or no row */
    char *y[TILES * ROWS]; /* the row's output 0; valid where scale is not 0 */
};

/* ---- the window ---------------------------------------------------------------------------- */

template <int TILES>
static __device__ __forceinline__ void read_window(window<TILES> *win, const sp_cuda_group &group,
                                                   const sp_cuda_site &site, int tiles_bound)
{
    int i = threadIdx.x / ROWS, j = threadIdx.x % ROWS, at = blockIdx.y * TILES + i;
    bool few = group.n_slots <= THREADS && (int)threadIdx.x < group.n_slots;
    slot_cell mine = {few && site.rank != NULL ? site.rank[threadIdx.x] : site.one_rank,
                      few && site.scale != NULL ? site.scale[threadIdx.x] : site.one_scale};

    if (i < TILES) {
        const sp_cuda_tile *tile = &group.plan.tiles[min(at, tiles_bound - 1)];
        int count = tile->count, slot = tile->slot, row = tile->row[j];

        win->request[threadIdx.x] = tile->scale[j];
        count = at < tiles_bound ? count : 0;
        win->row[threadIdx.x] = j < count ? row : -1;
        if (j == 0)
            win->slot[i] = count > 0 ? slot : -1;
        if (threadIdx.x == 0)
            win->count = count;
    }
    win->cell[threadIdx.x] = mine;
    __syncthreads();
}

template <int TILES>
static __device__ __forceinline__ slot_cell cell_of(const window<TILES> *win,
                                                    const sp_cuda_site &site, int slot, int n_slots)
{
    if (n_slots <= THREADS)
        return win->cell[slot];
    return {site.rank != NULL ? site.rank[slot] : site.one_rank,
            site.scale != NULL ? site.scale[slot] : site.one_scale};
}

/* Rows of scale 0 are treated as absent: neither read nor written. */
template <int TILES>
static __device__ __forceinline__ void scale_run(window<TILES> *win, const sp_cuda_site &site,
                                                 int from, int to, float stored)
{
    int i = threadIdx.x / ROWS;

    if (TILES > 1)
        __syncthreads(); /* the previous run is done with them */
    if (i < TILES) {
        int row = i >= from && i < to ? win->row[threadIdx.x] : -1;

        win->scale[threadIdx.x] =
            row >= 0 ? sp_scale_of_row(stored, win->request[threadIdx.x]) : 0.0f;
        win->y[threadIdx.x] =
            (char *)site.y + max(row, 0) * site.y_stride * (site.y_is_f32 ? 4 : 2);
    }
    __syncthreads();
}

/* ---- xa ------------------------------------------------------------------------------------ */

/* Sums four adjacent elements of one row over all partials. For few elements: each of `lanes`
 * adjacent lanes loads one group of partials, and all of them add the groups in index order. */
static __device__ __forceinline__ float4 sum_shared(const float *partial, int64_t partial_floats,
                                                    const launch_shape &shape, int lanes,
                                                    bool valid)
{
    int mine = threadIdx.x % lanes, lane0 = (threadIdx.x & 31) - mine;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

    for (int base = 0; base * shape.partials.group_partials < shape.partials.n_partials;
         base += lanes) {
        int first = (base + mine) * shape.partials.group_partials;
        int n = valid ? min(shape.partials.group_partials, shape.partials.n_partials - first) : 0;
        float4 v[SP_CUDA_GROUP_CHUNKS];

#pragma unroll
        for (int i = 0; i < SP_CUDA_GROUP_CHUNKS; i++)
            if (i < n)
                v[i] = *(const float4 *)(partial + (first + i) * partial_floats);
#pragma unroll
        for (int i = 1; i < SP_CUDA_GROUP_CHUNKS; i++)
            if (i < n)
                add(&v[0], v[i]);
        for (int i = 0; i < lanes; i++) {
            float4 u = {__shfl_sync(~0u, v[0].x, lane0 + i), __shfl_sync(~0u, v[0].y, lane0 + i),
                        __shfl_sync(~0u, v[0].z, lane0 + i), __shfl_sync(~0u, v[0].w, lane0 + i)};

            if (base + i == 0)
                sum = u;
            else if ((base + i) * shape.partials.group_partials < shape.partials.n_partials)
                add(&sum, u);
        }
    }
    return sum;
}

static __device__ __forceinline__ int lanes_for(int items, int lanes)
{
    while (lanes > 1 && items * lanes > THREADS)
        lanes /= 2;
    return lanes;
}

/* xa of tiles [from, to), T, zero beyond the rank up to a multiple of 32. Absent rows keep their
 * old content: no other row's product reads it. */
template <int F16, int TILES>
static __device__ __forceinline__ void sum_xa(uint16_t *xa, const window<TILES> *win,
                                              const sp_cuda_group &group, const launch_shape &shape,
                                              int site, int rank, int from, int to)
{
    int fours = ((rank + 31) / 32) * 8, rows = TILES > 1 ? (to - from) * ROWS : win->count;
    int items = rows * fours, lanes = TILES > 1 ? 1 : lanes_for(items, shape.lanes);
    int partial_row = group.rank_stride * group.n_sites;
    int64_t partial_floats = (int64_t)group.n_rows * partial_row;

    for (int warp0 = threadIdx.x & ~31; warp0 < items * lanes; warp0 += THREADS) {
        int item = (warp0 + (int)(threadIdx.x & 31)) / lanes;
        int at = from * ROWS + item / fours, c = item % fours * 4;
        int row = item < items ? win->row[at] : -1;
        bool valid = row >= 0 && c < rank;
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const float *partial =
            group.partials + (int64_t)row * partial_row + site * group.rank_stride + c;

        if (lanes > 1)
            v = sum_shared(partial, partial_floats, shape, lanes, valid);
        else if (valid)
            v = sum_alone(partial, partial_floats, shape.partials);
        if (row >= 0 && threadIdx.x % lanes == 0)
            *(uint2 *)&xa[at * shape.xa_pitch + c] =
                make_uint2(narrow_two<F16>(c < rank ? v.x : 0.0f, c + 1 < rank ? v.y : 0.0f),
                           narrow_two<F16>(c + 2 < rank ? v.z : 0.0f, c + 3 < rank ? v.w : 0.0f));
    }
}

/* The same from sums that are rounded already. */
template <int TILES>
static __device__ __forceinline__ void copy_xa(uint16_t *xa, const window<TILES> *win,
                                               const sp_cuda_group &group,
                                               const launch_shape &shape, int site, int rank,
                                               int from, int to)
{
    int eights = ((rank + 31) / 32) * 4, rows = TILES > 1 ? (to - from) * ROWS : win->count;

#pragma unroll 1
    for (int item = threadIdx.x; item < rows * eights; item += THREADS) {
        int at = from * ROWS + item / eights, c = item % eights * 8, row = win->row[at];
        const uint16_t *source = shape.rounded +
                                 (int64_t)row * (group.rank_stride * group.n_sites) +
                                 site * group.rank_stride + c;

        if (row >= 0)
            *(uint4 *)&xa[at * shape.xa_pitch + c] =
                c < rank ? *(const uint4 *)source : make_uint4(0, 0, 0, 0);
    }
}

template <int F16, int VEC, int TILES>
static __device__ __forceinline__ void gather_xa(uint16_t *xa, const window<TILES> *win,
                                                 const sp_cuda_group &group,
                                                 const launch_shape &shape, int site, int rank,
                                                 int from, int to)
{
    if ((TILES > 1 || VEC != 1) && shape.rounded != NULL) /* not in decode */
        copy_xa<TILES>(xa, win, group, shape, site, rank, from, to);
    else
        sum_xa<F16, TILES>(xa, win, group, shape, site, rank, from, to);
}

/* ---- y ------------------------------------------------------------------------------------- */

/* Prefetches to L2 what load_y will load. */
template <int TILES>
static __device__ __forceinline__ void prefetch_y(const window<TILES> *win, const work &at,
                                                  int column0)
{
    int g = (threadIdx.x & 31) >> 2, column = column0 + (int)(threadIdx.x & 3) * 8;

#pragma unroll 1
    for (int i = 0; i < TILES; i++)
        if (column < at.n_out && win->scale[i * ROWS + g] != 0.0f)
            prefetch_l2(win->y[i * ROWS + g] + column * 2);
}

/* y of this thread's row of a tile, for 16-bit y. */
template <int TILES>
static __device__ __forceinline__ void load_y(uint4 *y, const window<TILES> *win, const work &at,
                                              int tile, int column0)
{
    int row = tile * ROWS + (int)((threadIdx.x & 31) >> 2);
    int column = column0 + (int)(threadIdx.x & 3) * 8;

    if (column < at.n_out && win->scale[row] != 0.0f)
        *y = load_global(win->y[row] + column * 2);
}

/* ---- kernel -------------------------------------------------------------------------------- */

/* 16-bit y: branch-free, so that the tiles' dependency chains overlap. A tile's y of the step at
 * next_column0 (n_out: none) is loaded as soon as its registers are free. */
template <int F16, int TILES, int S>
static __device__ __forceinline__ void fold_halves(const work &at, const window<TILES> *win,
                                                   const uint4 (&a)[S][4], uint4 (&y)[TILES],
                                                   const uint16_t *xa, int xa_pitch, int column0,
                                                   int next_column0)
{
    int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3, column = column0 + 8 * t;

#pragma unroll
    for (int i = 0; i < TILES; i++) {
        int row = i * ROWS + g;
        float scale = win->scale[row];
        uint4 delta = make_delta<F16, 1, S>(at, a, xa + row * xa_pitch + 8 * t, column0);
        uint4 out = fold_eight<F16>(y[i], delta, scale);
        char *to = win->y[row];

        if (scale != 0.0f && column < at.n_out)
            store_global(to + column * 2, out);
        if (TILES > 1 && scale != 0.0f && next_column0 + 8 * t < at.n_out)
            y[i] = load_global(to + (next_column0 + 8 * t) * 2);
    }
}

/* y in FP32 at some site, or odd sizes or addresses. */
template <int F16, int VEC, int S>
static __device__ __forceinline__ void fold_others(const work &at, const window<1> *win,
                                                   const uint4 (&a)[S][4], const uint16_t *xa,
                                                   int xa_pitch, int column0)
{
    int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3, column = column0 + 8 * t;
    float scale = win->scale[g];
    char *y = win->y[g] + column * (int64_t)(at.y_is_f32 ? 4 : 2);
    uint4 delta = make_delta<F16, VEC, S>(at, a, xa + g * xa_pitch + 8 * t, column0);

    if (scale == 0.0f || column >= at.n_out)
        return;
    if (!VEC)
        fold_each<F16>(y, at.y_is_f32, at.n_out - column, delta, scale);
    else if (at.y_is_f32)
        fold_floats<F16>((float *)y, delta, scale);
    else
        store_global(y, fold_eight<F16>(load_global(y), delta, scale));
}

/* One step; then w and y are those of the step at next_column0. */
template <int F16, int VEC, int TILES, int S>
static __device__ __forceinline__ void fold_step(const work &at, const window<TILES> *win,
                                                 uint4 (&w)[S][4], uint4 (&y)[TILES],
                                                 const uint16_t *xa, int xa_pitch, int column0,
                                                 int next_column0)
{
    uint4 a[S][4];

    const bool early = S < 4; /* else w needs a's registers */

    interleave<S>(a, w, TILES > 1);
    if (TILES > 1 && early && next_column0 < at.n_out)
        load_b<VEC, S>(w, at, next_column0, 0);
    if constexpr (VEC == 1)
        fold_halves<F16, TILES, S>(at, win, a, y, xa, xa_pitch, column0, next_column0);
    else
        fold_others<F16, VEC, S>(at, win, a, xa, xa_pitch, column0);
    if (TILES > 1 && !early && next_column0 < at.n_out)
        load_b<VEC, S>(w, at, next_column0, 0);
}

/* Resident blocks per multiprocessor: as many as registers allow without spills. */
static constexpr int resident(int tiles, int s, int ahead)
{
    return tiles > 1 && s == 4 ? 2 : s == 4 || s * ahead > 2 || (tiles > 1 && s == 2) ? 3 : 4;
}

template <int F16, int VEC, int TILES, int S, int AHEAD>
__global__ void __launch_bounds__(THREADS, resident(TILES, S, AHEAD))
    expand_kernel(const __grid_constant__ sp_cuda_group group,
                  const __grid_constant__ launch_shape shape)
{
    int index = 0, column0;
    bool waited = false;
    work at = {};
    uint4 w[AHEAD][S][4], y[AHEAD][TILES];
    extern __shared__ __align__(16) uint16_t xa[];
    __shared__ window<TILES> win;

    release_successor();
    while (index + 1 < group.n_sites && (int)blockIdx.x >= shape.first_block[index + 1])
        index++;
    const sp_cuda_site &site = group.sites[index];
    column0 = ((int)blockIdx.x - shape.first_block[index]) * shape.steps * STEP +
              (int)(threadIdx.x >> 5) * WARP_COLUMNS;
    at.b_stride = (int)site.b_stride;
    at.n_out = site.n_out;
    at.y_is_f32 = site.y_is_f32 != 0;
    read_window(&win, group, site, shape.tiles_bound);
    for (int from = 0, to; from < TILES && win.slot[from] >= 0; from = to) {
        int slot = win.slot[from];
        slot_cell cell = cell_of(&win, site, slot, group.n_slots);

        for (to = from + 1; to < TILES && win.slot[to] == slot; to++)
            continue;
        if (cell.rank == 0 || cell.scale == 0.0f)
            continue;
        at.rank = cell.rank;
        at.b = (const uint16_t *)site.b + slot * site.b_slot_stride;
#pragma unroll
        for (int d = 0; d < AHEAD; d++)
            load_b<VEC, S>(w[d], at, column0 + d * STEP, 0);
        scale_run(&win, site, from, to, cell.scale);
        if (!waited)
            wait_predecessor();
        waited = true;
        if (TILES > 1)
            prefetch_y(&win, at, column0);
#pragma unroll
        for (int d = 0; d < AHEAD && TILES == 1 && VEC == 1; d++)
            load_y(&y[d][0], &win, at, 0, column0 + d * STEP);
        gather_xa<F16, VEC, TILES>(xa, &win, group, shape, index, at.rank, from, to);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < TILES && TILES > 1; i++) /* after the gather, which needs registers */
            load_y(&y[0][i], &win, at, i, column0);
        for (int step = 0; step < shape.steps; step += AHEAD)
#pragma unroll
            for (int d = 0; d < AHEAD; d++) {
                int column = column0 + (step + d) * STEP;

                if (column < at.n_out)
                    fold_step<F16, VEC, TILES, S>(at, &win, w[d], y[d], xa, shape.xa_pitch, column,
                                                  step + AHEAD < shape.steps ? column + AHEAD * STEP
                                                                             : at.n_out);
                if (TILES == 1 && step + AHEAD < shape.steps) {
                    load_b<VEC, S>(w[d], at, column + AHEAD * STEP, 0);
                    if (VEC == 1)
                        load_y(&y[d][0], &win, at, 0, column + AHEAD * STEP);
                }
            }
    }
    /* A kernel's completion implies that of all kernels before it, so one block always waits. */
    if (!waited && blockIdx.x == 0 && blockIdx.y == 0)
        wait_predecessor();
}

/* ---- launch -------------------------------------------------------------------------------- */

static launch_shape shape_of(const sp_cuda_group *group, int steps)
{
    launch_shape shape = {};
    int groups;

    for (int i = 0; i < group->n_sites; i++)
        shape.first_block[i + 1] =
            shape.first_block[i] + sp_cuda_ceil(group->sites[i].n_out, STEP * steps);
    shape.tiles_bound = sp_cuda_tiles_bound(group->n_rows, group->n_slots);
    shape.steps = steps;
    shape.partials = partials_of(group);
    shape.rounded = rounded_of(group);
    groups = sp_cuda_ceil(shape.partials.n_partials, shape.partials.group_partials);
    shape.lanes = groups > 4 ? 8 : groups > 2 ? 4 : groups;
    shape.xa_pitch = 32 * (sp_cuda_ceil(group->rank_stride, 32) | 1);
    return shape;
}

template <int F16, int VEC, int TILES, int S, int AHEAD>
static cudaError_t launch(const sp_cuda_group *group, int steps, cudaStream_t stream)
{
    launch_shape shape = shape_of(group, steps);
    cudaLaunchAttribute overlap;
    dim3 grid((unsigned)shape.first_block[group->n_sites],
              (unsigned)sp_cuda_ceil(shape.tiles_bound, TILES));
    cudaLaunchConfig_t config = sp_cuda_overlapping(
        grid, THREADS, (size_t)(TILES * ROWS * shape.xa_pitch) * 2, &overlap, false, stream);

    return cudaLaunchKernelEx(&config, expand_kernel<F16, VEC, TILES, S, AHEAD>, *group, shape);
}

template <int F16>
static cudaError_t launch_vectors(const sp_cuda_group *group, sp_cuda_expand_choice choice,
                                  cudaStream_t on)
{
    int steps = choice.steps;

    if (choice.window_tiles > 1)
        return choice.ranks == 32   ? launch<F16, 1, SP_CUDA_WINDOW_TILES, 1, 1>(group, steps, on)
               : choice.ranks == 64 ? launch<F16, 1, SP_CUDA_WINDOW_TILES, 2, 1>(group, steps, on)
                                    : launch<F16, 1, SP_CUDA_WINDOW_TILES, 4, 1>(group, steps, on);
    if (choice.ranks == 128)
        return launch<F16, 1, 1, 4, 1>(group, steps, on);
    if (choice.ranks == 64)
        return choice.steps_ahead == 2 ? launch<F16, 1, 1, 2, 2>(group, steps, on)
                                       : launch<F16, 1, 1, 2, 1>(group, steps, on);
    return choice.steps_ahead == 2 ? launch<F16, 1, 1, 1, 2>(group, steps, on)
                                   : launch<F16, 1, 1, 1, 1>(group, steps, on);
}

/* Whether the launch goes through wgmma, where there is one. */
static bool goes_by_wgmma(const sp_cuda_group *group)
{
    int n_chunks = 0, n_sites = 0;

    for (int i = 0; i < group->n_sites; i++) {
        n_chunks += sp_cuda_ceil(group->sites[i].n_out, 64);
        n_sites += group->sites[i].n_out > 0;
    }
    return sp_cuda_expands_by_wgmma(group->multiprocessors, group->n_rows, group->n_slots, n_sites,
                                    n_chunks, group->rank_stride);
}

/* How y and B may be accessed. */
typedef enum access {
    ACCESS_ELEMENTS, /* element by element: odd sizes or addresses */
    ACCESS_VECTORS,  /* in 16-byte vectors, 16-bit y */
    ACCESS_FLOATS,   /* in 16-byte vectors, y in FP32 at some site */
    ACCESS_BOTH      /* y of both kinds and many rows: a launch for each kind */
} access;

static bool aligned(const void *memory, int64_t stride, int elements)
{
    return (uintptr_t)memory % 16 == 0 && stride % elements == 0;
}

static access access_of(const sp_cuda_group *group)
{
    int floats = 0;

    for (int i = 0; i < group->n_sites; i++) {
        const sp_cuda_site *site = &group->sites[i];

        floats += site->n_out > 0 && site->y_is_f32;
        if (site->n_out % 8 != 0 || !aligned(site->y, site->y_stride, site->y_is_f32 ? 4 : 8) ||
            !aligned(site->b, site->b_stride, 8) || site->b_slot_stride % 8 != 0 ||
            (site->rank == NULL && site->one_rank % 8 != 0))
            return ACCESS_ELEMENTS;
    }
    if (floats == 0)
        return ACCESS_VECTORS;
    return floats == group->n_sites || group->n_rows <= SP_CUDA_DECODE_ROWS ? ACCESS_FLOATS
                                                                            : ACCESS_BOTH;
}

template <int F16>
static cudaError_t launch_halves(int gpu, const sp_cuda_group *group, cudaStream_t on)
{
    sp_cuda_expand_choice choice;
    cudaError_t code;
    int total_steps = 0;

    for (int i = 0; i < group->n_sites; i++)
        total_steps += sp_cuda_ceil(group->sites[i].n_out, STEP);
    choice = sp_cuda_choose_expand(group->multiprocessors, group->n_rows, group->n_slots,
                                   total_steps, group->rank_stride);
    if (sp_cuda_rounds_xa(group->n_rows, group->rank_stride)) {
        code = goes_by_wgmma(group) ? sp_cuda_expand_wide_sm90a(gpu, group, on)
                                    : cudaErrorNotSupported;
        if (code == cudaErrorNotSupported)
            code = sp_cuda_expand_wide(gpu, group, on);
        if (code != cudaErrorNotSupported)
            return code;
    }
    code = choice.ring_columns > 0 ? sp_cuda_expand_ring(gpu, group, choice, on)
                                   : cudaErrorNotSupported;
    return code == cudaErrorNotSupported ? launch_vectors<F16>(group, choice, on) : code;
}

/* The group with those sites alone whose y is in FP32, or not; the others have no columns, but keep
 * their place in xa. */
static sp_cuda_group part_of(const sp_cuda_group *group, bool floats)
{
    sp_cuda_group part = *group;

    for (int i = 0; i < part.n_sites; i++)
        if ((part.sites[i].y_is_f32 != 0) != floats)
            part.sites[i].n_out = 0;
    return part;
}

template <int F16>
static cudaError_t launch_chosen(int gpu, const sp_cuda_group *group, cudaStream_t on)
{
    sp_cuda_group halves, floats;
    cudaError_t code;

    switch (access_of(group)) {
    case ACCESS_ELEMENTS:
        return launch<F16, ACCESS_ELEMENTS, 1, 1, 1>(group, 1, on);
    case ACCESS_VECTORS:
        return launch_halves<F16>(gpu, group, on);
    case ACCESS_FLOATS:
        return launch<F16, ACCESS_FLOATS, 1, 4, 1>(group, 1, on);
    case ACCESS_BOTH:
        break;
    }
    halves = part_of(group, false);
    floats = part_of(group, true);
    code = launch_halves<F16>(gpu, &halves, on);
    return code == cudaSuccess ? launch<F16, ACCESS_FLOATS, 1, 4, 1>(&floats, 1, on) : code;
}

extern "C" int sp_cuda_expand(int gpu, const sp_cuda_group *group, void *stream)
{
    cudaStream_t on = (cudaStream_t)stream;
    sp_cuda_current current(gpu);
    cudaError_t code = current.code;

    if (code != cudaSuccess || group->n_rows == 0)
        return (int)code;
    return (int)(group->type == SP_DTYPE_F16 ? launch_chosen<1>(gpu, group, on)
                                             : launch_chosen<0>(gpu, group, on));
}

template <int F16> static cudaError_t allow_memory(void)
{
    int most = SP_CUDA_WINDOW_TILES * ROWS * (SP_CUDA_RANK_MAX + 32) * 2;

    return cudaFuncSetAttribute(expand_kernel<F16, 1, SP_CUDA_WINDOW_TILES, 4, 1>,
                                cudaFuncAttributeMaxDynamicSharedMemorySize, most);
}

cudaError_t sp_cuda_expand_init(void)
{
    cudaError_t code = allow_memory<0>();

    return code == cudaSuccess ? allow_memory<1>() : code;
}
