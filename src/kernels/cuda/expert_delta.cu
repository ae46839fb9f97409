/*
 * expert_delta.cu: y += scale · xa · Bᵀ, xa = x · Aᵀ, for items of up to 32 rows of one expert and
 * one slot, in one launch, by the order of kernels_cuda.h.
 *
 * A unit is an item, one site and a part of its columns; blocks of 16 warps take units in turn. A
 * warp takes a quarter (128 k) of one of four chunks (a group of 2,048 k) of 16 ranks, as in
 * shrink.cu; the quarters are added through shared memory, and xa stays there. Then each warp takes
 * 32 columns at a time, as in expand.cu. Parts of a site compute its xa anew: that is for few
 * items, whose blocks would leave the GPU idle. A, and B of the first columns, are loaded before
 * the wait for the predecessor. Bound by the bytes of A, B and y; with few items by the chain item,
 * cell, A, xa, y.
 */
#include "kernels/cuda/expand.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/shrink.cuh"

#define THREADS 512
#define WARPS   (THREADS / SP_WARP)
#define GROUP_K (SP_CUDA_GROUP_CHUNKS * SP_CUDA_CHUNK_K)
#define COLUMNS 32 /* of a warp at a time */
#define ROWS    SP_CUDA_TILE_ROWS

static_assert(WARPS * QUARTER_K == GROUP_K, "a warp for each quarter of a group");

typedef struct delta_shape {
    int parts; /* of a site's columns */
    int xa_pitch;
} delta_shape;

/* A unit's item, in shared memory. */
template <int TILES> struct delta_rows {
    int slot, expert, count, pad;
    int x[TILES * ROWS], y[TILES * ROWS];
    float request[TILES * ROWS], scale[TILES * ROWS]; /* scale 0: no row */
    char *to[TILES * ROWS];                           /* the row's output 0 */
};

/* A unit: what it adds to, and its factors. rank 0: nothing. */
typedef struct delta_unit {
    const uint16_t *a;
    work to;
    float scale;
} delta_unit;

/* ---- the item ------------------------------------------------------------------------------ */

template <int TILES>
static __device__ __forceinline__ void read_item(delta_rows<TILES> *rows,
                                                 const sp_cuda_expert_delta &d, int item)
{
    int j = (int)threadIdx.x;

    if (d.tiles != NULL) {
        const sp_cuda_tile *tile = &d.tiles[item];

        if (j < ROWS) {
            rows->x[j] = rows->y[j] = tile->row[j];
            rows->request[j] = tile->scale[j];
        }
        if (j == 0) {
            rows->slot = tile->slot;
            rows->expert = 0;
            rows->count = tile->count;
        }
    } else {
        if (j < TILES * ROWS) {
            int64_t at = (int64_t)item * (TILES * ROWS) + j;

            rows->y[j] = d.items.row[at];
            rows->x[j] = d.x_by_token ? d.items.token[at] : rows->y[j];
            rows->request[j] = d.items.scale[at];
        }
        if (j == 0) {
            sp_cuda_item head = d.items.item[item];

            rows->slot = head.slot;
            rows->expert = head.expert;
            rows->count = head.count;
        }
    }
    __syncthreads();
}

static __device__ __forceinline__ delta_unit unit_of(const sp_cuda_expert_site &site, int slot,
                                                     int expert)
{
    delta_unit unit = {};
    const char *factors;
    sp_cuda_expert_cell cell;

    unit.to.n_out = site.n_out;
    unit.to.y_is_f32 = site.y_is_f32 != 0;
    if (site.cells == NULL) {
        unit.to.rank = site.rank[slot];
        unit.a = (const uint16_t *)site.a[slot];
        unit.to.b = (const uint16_t *)site.b[slot];
        unit.scale = site.scale[slot];
    } else {
        const sp_cuda_expert_cell *cells = site.cells[slot];

        if (cells == NULL)
            return unit;
        factors = (const char *)site.factors[slot];
        *(uint4 *)&cell = *(const uint4 *)&cells[expert];
        unit.to.rank = cell.rank;
        unit.a = (const uint16_t *)(factors + (uint64_t)cell.a * 256);
        unit.to.b = (const uint16_t *)(factors + (uint64_t)cell.b * 256);
        unit.scale = cell.scale;
    }
    unit.to.b_stride = (unit.to.rank + 7) & ~7;
    return unit;
}

/* Where each row goes, and its scale. */
template <int TILES>
static __device__ __forceinline__ void aim_rows(delta_rows<TILES> *rows, const delta_unit &unit,
                                                const sp_cuda_expert_site &site)
{
    int j = (int)threadIdx.x, row;

    if (j >= TILES * ROWS)
        return;
    row = j < rows->count ? rows->y[j] : 0;
    rows->scale[j] = j < rows->count ? sp_scale_of_row(unit.scale, rows->request[j]) : 0.0f;
    rows->to[j] = (char *)site.y + row * site.y_stride * (site.y_is_f32 ? 4 : 2);
}

/* ---- xa ------------------------------------------------------------------------------------ */

template <int TILES> struct delta_sums {
    quarters q[SP_CUDA_GROUP_CHUNKS][TILES];
};

/* The sum of element (row, c) over the chunks of a group. */
template <int TILES>
static __device__ __forceinline__ float sum_group(const delta_sums<TILES> *sums, int row, int c,
                                                  int chunks)
{
    float sum = sum_quarters(sums->q[0][row / ROWS], row % ROWS, c);

    for (int i = 1; i < min(chunks, SP_CUDA_GROUP_CHUNKS); i++)
        sum = sum + sum_quarters(sums->q[i][row / ROWS], row % ROWS, c);
    return sum;
}

/* The quarters of this warp's k for all tiles; w has its part of A. */
template <int F16, int VEC, int TILES>
static __device__ __forceinline__ void shrink_quarter(delta_sums<TILES> *sums, operands *w,
                                                      const sp_cuda_expert_delta &d,
                                                      const delta_rows<TILES> *rows, int k)
{
    int g = (threadIdx.x & 31) >> 2, chunk = threadIdx.x >> 7;

#pragma unroll 1
    for (int tile = 0; tile * ROWS < rows->count; tile++) {
        int row = tile * ROWS + g;
        bool valid = row < rows->count;
        float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};

        load_x<VEC>(w, (const uint16_t *)d.x + (valid ? rows->x[row] : 0) * d.x_stride, k,
                    valid ? d.k_in : 0);
        multiply<F16>(acc, *w);
        keep_quarter(sums->q[chunk][tile], acc);
    }
}

/* Ranks rank0 .. rank0 + 15 of xa of all rows; `w` has A of the first group. */
template <int F16, int VEC, int TILES>
static __device__ __forceinline__ void make_xa(uint16_t *xa, const delta_shape &shape,
                                               delta_sums<TILES> *sums, operands *w,
                                               const sp_cuda_expert_delta &d,
                                               const delta_rows<TILES> *rows,
                                               const delta_unit &unit, int rank0)
{
    int k = (int)(threadIdx.x >> 5) * QUARTER_K, row = threadIdx.x >> 4, c = threadIdx.x & 15;
    int chunks = (d.k_in + SP_CUDA_CHUNK_K - 1) / SP_CUDA_CHUNK_K;
    float sum = 0.0f;

#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk += SP_CUDA_GROUP_CHUNKS, k += GROUP_K) {
        if (chunk > 0)
            load_a<VEC>(w, unit.a, d.k_in, rank0, unit.to.rank, k, d.k_in);
        shrink_quarter<F16, VEC, TILES>(sums, w, d, rows, k);
        __syncthreads();
        if (row < rows->count) {
            float group = sum_group(sums, row, c, chunks - chunk);

            sum = chunk == 0 ? group : sum + group;
        }
        __syncthreads();
    }
    if (row >= TILES * ROWS)
        return;
    xa[row * shape.xa_pitch + rank0 + c] = row < rows->count ? narrow<F16>(sum) : (uint16_t)0;
    if (rank0 % 32 == 0 && rank0 + 16 >= unit.to.rank)
        xa[row * shape.xa_pitch + rank0 + 16 + c] = 0;
}

/* ---- y ------------------------------------------------------------------------------------- */

template <int TILES>
static __device__ __forceinline__ void load_y(uint4 (&y)[TILES], const delta_rows<TILES> *rows,
                                              const delta_unit &unit, int column0)
{
    int g = (threadIdx.x & 31) >> 2, column = column0 + (int)(threadIdx.x & 3) * 8;

#pragma unroll
    for (int i = 0; i < TILES; i++)
        if (column < unit.to.n_out && rows->scale[i * ROWS + g] != 0.0f)
            y[i] = load_global(rows->to[i * ROWS + g] + column * 2);
}

/* Eight outputs of one row from `column` on; y: what is there, with VEC and 16-bit y. */
template <int F16, int VEC>
static __device__ __forceinline__ void fold_row(char *to, const work &at, int column, uint4 delta,
                                                uint4 y, float scale)
{
    if (scale == 0.0f || column >= at.n_out)
        return;
    if (!VEC)
        fold_each<F16>(to + column * (int64_t)(at.y_is_f32 ? 4 : 2), at.y_is_f32, at.n_out - column,
                       delta, scale);
    else if (at.y_is_f32)
        fold_floats<F16>((float *)to + column, delta, scale);
    else
        store_global(to + column * 2, fold_eight<F16>(y, delta, scale));
}

/* One step of 32 columns for all rows, whose y is there. */
template <int F16, int VEC, int TILES>
static __device__ __forceinline__ void fold_columns(const delta_rows<TILES> *rows,
                                                    const delta_unit &unit, const uint4 (&a)[1][4],
                                                    const uint4 (&y)[TILES], const uint16_t *xa,
                                                    int xa_pitch, int column0)
{
    int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;

#pragma unroll
    for (int i = 0; i < TILES; i++) {
        int row = i * ROWS + g;
        uint4 delta =
            make_delta<F16, VEC, 1, false>(unit.to, a, xa + row * xa_pitch + 8 * t, column0);

        fold_row<F16, VEC>(rows->to[row], unit.to, column0 + 8 * t, delta, y[i], rows->scale[row]);
        __syncwarp();
    }
}

/* The same for any rank: the tiles one after the other, each with all of B but its first ranks. */
template <int F16, int VEC, int TILES>
static __device__ __forceinline__ void fold_ranks(const delta_rows<TILES> *rows,
                                                  const delta_unit &unit, const uint4 (&a)[1][4],
                                                  const uint16_t *xa, int xa_pitch, int column0)
{
    int g = (threadIdx.x & 31) >> 2, column = column0 + (int)(threadIdx.x & 3) * 8;

#pragma unroll 1
    for (int row = g; row < TILES * ROWS; row += ROWS) {
        bool loads = VEC && !unit.to.y_is_f32 && rows->scale[row] != 0.0f && column < unit.to.n_out;
        uint4 delta, y = make_uint4(0, 0, 0, 0);

        if (loads)
            y = load_global(rows->to[row] + column * 2);
        __syncwarp();
        delta = make_delta<F16, VEC, 1, true>(
            unit.to, a, xa + row * xa_pitch + 8 * (int)(threadIdx.x & 3), column0);
        fold_row<F16, VEC>(rows->to[row], unit.to, column, delta, y, rows->scale[row]);
        __syncwarp();
    }
}

/* All columns of this warp, a step of `step` columns from column0 on; w is that of the first. */
template <int F16, int VEC, int TILES, bool MORE>
static __device__ __forceinline__ void expand_all(const delta_rows<TILES> *rows,
                                                  const delta_unit &unit, uint4 (&w)[1][4],
                                                  const uint16_t *xa, int xa_pitch, int column0,
                                                  int step)
{
    uint4 y[TILES] = {};

    if (!MORE && VEC && !unit.to.y_is_f32)
        load_y<TILES>(y, rows, unit, column0);
    __syncthreads(); /* xa is there */
#pragma unroll 1
    while (column0 < unit.to.n_out) {
        int next = column0 + step;
        uint4 a[1][4];

        interleave<1>(a, w, TILES > 1);
        if (!MORE && next < unit.to.n_out)
            load_b<VEC, 1>(w, unit.to, next, 0);
        if constexpr (MORE)
            fold_ranks<F16, VEC, TILES>(rows, unit, a, xa, xa_pitch, column0);
        else
            fold_columns<F16, VEC, TILES>(rows, unit, a, y, xa, xa_pitch, column0);
        if (!MORE && VEC && !unit.to.y_is_f32)
            load_y<TILES>(y, rows, unit, next);
        if (MORE && next < unit.to.n_out) /* there are too few registers for it before */
            load_b<VEC, 1>(w, unit.to, next, 0);
        column0 = next;
    }
}

/* ---- kernel -------------------------------------------------------------------------------- */

/* MORE: ranks above 32. */
template <int F16, int VEC, int TILES, bool MORE>
__global__ void __launch_bounds__(THREADS, 1)
    expert_kernel(const __grid_constant__ sp_cuda_expert_delta d,
                  const __grid_constant__ delta_shape shape)
{
    extern __shared__ __align__(16) char memory[];
    delta_sums<TILES> *sums = (delta_sums<TILES> *)memory;
    delta_rows<TILES> *rows = (delta_rows<TILES> *)(sums + 1);
    uint16_t *xa = (uint16_t *)(rows + 1);
    int each = d.n_sites * shape.parts, warp = threadIdx.x >> 5;
    int units;
    bool waited = d.after_group != 0;

    release_successor();
    if (waited)
        wait_predecessor();
    units = (d.tiles != NULL ? d.head->n_tiles : d.items.counts[0]) * each;
    for (int number = (int)blockIdx.x; number < units; number += (int)gridDim.x) {
        const sp_cuda_expert_site &site = d.sites[number % each / shape.parts];
        int column0 = (number % shape.parts * WARPS + warp) * COLUMNS;
        operands w;
        uint4 b[1][4];
        delta_unit unit;

        read_item<TILES>(rows, d, number / each);
        unit = unit_of(site, rows->slot, rows->expert);
        if (unit.to.rank > 0) {
            load_a<VEC>(&w, unit.a, d.k_in, 0, unit.to.rank, warp * QUARTER_K, d.k_in);
            if (TILES == 1) /* else there are too few registers */
                load_b<VEC, 1>(b, unit.to, column0, 0);
            aim_rows<TILES>(rows, unit, site);
            if (!waited)
                wait_predecessor();
            waited = true;
#pragma unroll 1
            for (int rank0 = 0; rank0 < unit.to.rank; rank0 += RANKS) {
                if (rank0 > 0)
                    load_a<VEC>(&w, unit.a, d.k_in, rank0, unit.to.rank, warp * QUARTER_K, d.k_in);
                make_xa<F16, VEC, TILES>(xa, shape, sums, &w, d, rows, unit, rank0);
            }
            if (TILES > 1)
                load_b<VEC, 1>(b, unit.to, column0, 0);
            expand_all<F16, VEC, TILES, MORE>(rows, unit, b, xa, shape.xa_pitch, column0,
                                              shape.parts * WARPS * COLUMNS);
        }
        __syncthreads();
    }
    if (!waited)
        wait_predecessor(); /* a kernel's completion implies that of all kernels before it */
}

/* ---- launch -------------------------------------------------------------------------------- */

template <int TILES> static size_t shared_of(int xa_pitch)
{
    return sizeof(delta_sums<TILES>) + sizeof(delta_rows<TILES>) +
           (size_t)(TILES * ROWS) * xa_pitch * sizeof(uint16_t);
}

/* An odd multiple of 32: no bank conflicts. */
static int pitch_of(int rank_max)
{
    return (sp_cuda_ceil(rank_max, 32) | 1) * 32;
}

/* Blocks where the items would leave multiprocessors idle. */
static int parts_of(const sp_cuda_expert_delta *d, int bound)
{
    int parts = 1, widest = 0;

    for (int i = 0; i < d->n_sites; i++)
        widest = widest > d->sites[i].n_out ? widest : d->sites[i].n_out;
    while (parts < 4 && 2 * parts * bound * d->n_sites <= d->multiprocessors &&
           parts * WARPS * COLUMNS < widest)
        parts *= 2;
    return parts;
}

template <int F16, int VEC, int TILES, bool MORE>
static cudaError_t launch(const sp_cuda_expert_delta *d, int bound, cudaStream_t stream)
{
    delta_shape shape = {parts_of(d, bound), pitch_of(d->rank_max)};
    int64_t units = (int64_t)bound * d->n_sites * shape.parts;
    int64_t most = (int64_t)d->multiprocessors * (TILES == 1 ? 2 : 1);
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config =
        sp_cuda_overlapping(dim3((unsigned)(units < most ? units : most)), THREADS,
                            shared_of<TILES>(shape.xa_pitch), &overlap, false, stream);

    return cudaLaunchKernelEx(&config, expert_kernel<F16, VEC, TILES, MORE>, *d, shape);
}

static bool aligned(const void *memory, int64_t stride)
{
    return (uintptr_t)memory % 16 == 0 && stride % 8 == 0;
}

static bool vectors(const sp_cuda_expert_delta *d)
{
    bool all = d->k_in % 8 == 0 && aligned(d->x, d->x_stride);

    for (int i = 0; i < d->n_sites; i++)
        all = all && aligned(d->sites[i].y, d->sites[i].y_stride) && d->sites[i].n_out % 8 == 0;
    return all;
}

template <int F16, int VEC, bool MORE>
static cudaError_t launch_for(const sp_cuda_expert_delta *d, cudaStream_t stream)
{
    if (d->tiles == NULL && d->items.item_rows == SP_CUDA_ITEM_MANY)
        return launch<F16, VEC, SP_CUDA_ITEM_MANY / ROWS, MORE>(d, d->items.bound, stream);
    return launch<F16, VEC, 1, MORE>(d, d->items.bound, stream);
}

template <int F16> static cudaError_t launch_of(const sp_cuda_expert_delta *d, cudaStream_t stream)
{
    if (!vectors(d))
        return launch_for<F16, 0, true>(d, stream);
    return d->rank_max > 32 ? launch_for<F16, 1, true>(d, stream)
                            : launch_for<F16, 1, false>(d, stream);
}

extern "C" int sp_cuda_add_experts(int gpu, const sp_cuda_expert_delta *delta, void *stream)
{
    cudaStream_t on = (cudaStream_t)stream;
    sp_cuda_current current(gpu);

    if (current.code != cudaSuccess || delta->items.bound == 0)
        return (int)current.code;
    if (delta->tiles == NULL && delta->items.item_rows != SP_CUDA_ITEM_MANY &&
        delta->items.item_rows != SP_CUDA_ITEM_FEW)
        return (int)cudaErrorInvalidValue;
    return (int)(delta->type == SP_DTYPE_F16 ? launch_of<1>(delta, on) : launch_of<0>(delta, on));
}

template <int F16, int VEC, int TILES, bool MORE> static cudaError_t allow(cudaError_t before)
{
    return before != cudaSuccess
               ? before
               : cudaFuncSetAttribute(expert_kernel<F16, VEC, TILES, MORE>,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      (int)shared_of<TILES>(pitch_of(SP_CUDA_RANK_MAX)));
}

template <int F16, int VEC, bool MORE> static cudaError_t allow_both(cudaError_t before)
{
    return allow<F16, VEC, 1, MORE>(allow<F16, VEC, SP_CUDA_ITEM_MANY / ROWS, MORE>(before));
}

template <int F16> static cudaError_t allow_all(cudaError_t before)
{
    return allow_both<F16, 0, true>(allow_both<F16, 1, true>(allow_both<F16, 1, false>(before)));
}

cudaError_t sp_cuda_expert_init(void)
{
    return allow_all<0>(allow_all<1>(cudaSuccess));
}
