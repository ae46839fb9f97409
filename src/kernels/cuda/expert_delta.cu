/*
 * expert_delta.cu: y += scale · xa · Bᵀ, xa = x · Aᵀ, for items of up to 48 rows of one expert and
 * one slot, in one launch, by the order of kernels_cuda.h.
 *
 * A unit is an item, one site and a part of its columns; blocks of 8 or 16 warps take units in
 * turn. A warp takes quarters (128 k) of the four chunks of a group (2,048 k), of 16 ranks, as in
 * shrink.cu; the quarters are added through shared memory, and xa stays there. Then each warp takes
 * 32 columns at a time, as in expand.cu. Bound by the bytes of A, B and y, and by the chain item,
 * cell, A, xa, y: of blocks of 8 warps two are resident on a multiprocessor, so that one computes
 * while the other waits; few items take 16 warps, whose chain is shorter, as A, and B of the first
 * columns, are loaded before the wait for the predecessor; a site's columns are split then, and
 * each part computes xa anew.
 */
#include "kernels/cuda/expert_item.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/shrink.cuh"

#define GROUP_K     (SP_CUDA_GROUP_CHUNKS * SP_CUDA_CHUNK_K)
#define QUARTERS    (GROUP_K / QUARTER_K) /* of a group */
#define COLUMNS     32                    /* of a warp at a time */
#define TILES_MANY  (SP_CUDA_ITEM_MANY / ROWS)
#define RANKS_AHEAD 32 /* of B that are in registers before they are needed */

/* TILES of rows in an item; VEC as in ptx.cuh. */
template <int F16_, int VEC_, int TILES_, int WARPS_> struct delta_kind {
    static constexpr int F16 = F16_, VEC = VEC_, TILES = TILES_, WARPS = WARPS_;
    static constexpr int THREADS = WARPS * SP_WARP, ITEM_ROWS = TILES * ROWS;
    static constexpr int PASSES = QUARTERS / WARPS; /* of a group */
    /* Elements of 16 ranks of xa that a thread sums. */
    static constexpr int SUMS = (ITEM_ROWS * RANKS + THREADS - 1) / THREADS;
    static constexpr int RESIDENT = QUARTERS / WARPS; /* blocks on a multiprocessor */

    static_assert(WARPS % 4 == 0 && QUARTERS % WARPS == 0, "a pass has whole chunks");
    static_assert(ITEM_ROWS <= THREADS, "a thread for each of an item's rows");
};

typedef struct delta_shape {
    int parts; /* of a site's columns */
    int xa_pitch;
} delta_shape;

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

/* A quarter of this warp for all tiles; w has its part of A. */
template <class K>
static __device__ __forceinline__ void shrink_quarter(delta_sums<K::TILES> *sums, operands *w,
                                                      const sp_cuda_expert_delta &d,
                                                      const delta_rows<K::TILES> *rows, int k,
                                                      int chunk)
{
    int g = (threadIdx.x & 31) >> 2;

#pragma unroll 1
    for (int tile = 0; tile * ROWS < rows->count; tile++) {
        int row = tile * ROWS + g;
        bool valid = row < rows->count;
        float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};

        load_x<K::VEC>(w, (const uint16_t *)d.x + (valid ? rows->x[row] : 0) * d.x_stride, k,
                       valid ? d.k_in : 0);
        multiply<K::F16>(acc, *w);
        keep_quarter(sums->q[chunk][tile], acc);
    }
}

/* This warp's quarters of the group from k on. A of the first one is in w already if `loaded`. */
template <class K>
static __device__ __forceinline__ void shrink_group(delta_sums<K::TILES> *sums, operands *w,
                                                    const sp_cuda_expert_delta &d,
                                                    const delta_rows<K::TILES> *rows,
                                                    const delta_unit &unit, int rank0, int k,
                                                    bool loaded)
{
    int warp = threadIdx.x >> 5;

#pragma unroll 1
    for (int pass = 0; pass < K::PASSES && k + pass * K::WARPS * QUARTER_K < d.k_in; pass++) {
        int quarter = pass * K::WARPS + warp;

        if (pass > 0 || !loaded)
            load_a<K::VEC>(w, unit.a, d.k_in, rank0, unit.to.rank, k + quarter * QUARTER_K, d.k_in);
        shrink_quarter<K>(sums, w, d, rows, k + quarter * QUARTER_K, quarter / 4);
    }
}

/* Ranks rank0 .. rank0 + 15 of xa of all rows. */
template <class K>
static __device__ __forceinline__ void make_xa(uint16_t *xa, int xa_pitch,
                                               delta_sums<K::TILES> *sums, operands *w,
                                               const sp_cuda_expert_delta &d,
                                               const delta_rows<K::TILES> *rows,
                                               const delta_unit &unit, int rank0)
{
    int chunks = (d.k_in + SP_CUDA_CHUNK_K - 1) / SP_CUDA_CHUNK_K;
    float sum[K::SUMS] = {};

#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk += SP_CUDA_GROUP_CHUNKS) {
        shrink_group<K>(sums, w, d, rows, unit, rank0, chunk * SP_CUDA_CHUNK_K,
                        K::RESIDENT == 1 && rank0 == 0 && chunk == 0);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < K::SUMS; i++) {
            int at = (int)threadIdx.x + i * K::THREADS, row = at / RANKS;

            if (row < rows->count) {
                float group = sum_group(sums, row, at % RANKS, chunks - chunk);

                sum[i] = chunk == 0 ? group : sum[i] + group;
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < K::SUMS; i++) {
        int at = (int)threadIdx.x + i * K::THREADS, row = at / RANKS, c = rank0 + at % RANKS;

        if (row >= K::ITEM_ROWS)
            break;
        xa[row * xa_pitch + c] = row < rows->count ? narrow<K::F16>(sum[i]) : (uint16_t)0;
        if (rank0 % 32 == 0 && rank0 + RANKS >= unit.to.rank)
            xa[row * xa_pitch + c + RANKS] = 0;
    }
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

/* One step of 32 columns for all rows, whose y is there; ranks up to RANKS_AHEAD. */
template <class K>
static __device__ __forceinline__ void fold_columns(const delta_rows<K::TILES> *rows,
                                                    const delta_unit &unit, const uint4 (&a)[1][4],
                                                    uint4 (&y)[K::TILES], const uint16_t *xa,
                                                    int xa_pitch, int column0)
{
    int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;

#pragma unroll
    for (int i = 0; i < K::TILES; i++)
        if (i * ROWS < rows->count) {
            int row = i * ROWS + g;
            uint4 delta = make_delta<K::F16, K::VEC, 1, false>(
                unit.to, a, xa + row * xa_pitch + 8 * t, column0);

            fold_row<K::F16, K::VEC>(rows->to[row], unit.to, column0 + 8 * t, delta, y[i],
                                     rows->scale[row]);
            __syncwarp();
        }
}

/* The same for any rank and y: the tiles one after the other, and all of B loaded here. Not
 * inlined: its registers would be taken from the other form. */
template <class K>
static __device__ __forceinline__ void fold_ranks(const delta_rows<K::TILES> *rows, const work &to,
                                                  const uint16_t *xa, int xa_pitch, int column0)
{
    int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3, column = column0 + 8 * t;
    work at = to;

#pragma unroll 1
    for (int row = g; row - g < rows->count; row += ROWS) {
        bool loads = K::VEC && !at.y_is_f32 && rows->scale[row] != 0.0f && column < at.n_out;
        uint4 a[1][4], w[1][4], delta, y = make_uint4(0, 0, 0, 0);

        load_b<K::VEC, 1>(w, at, column0, 0);
        if (loads)
            y = load_global(rows->to[row] + column * 2);
        interleave<1>(a, w, false);
        __syncwarp();
        delta = make_delta<K::F16, K::VEC, 1, true>(at, a, xa + row * xa_pitch + 8 * t, column0);
        fold_row<K::F16, K::VEC>(rows->to[row], at, column, delta, y, rows->scale[row]);
        __syncwarp();
    }
}

/* All columns of this warp, a step of `step` columns from column0 on; w is that of the first. */
template <class K>
static __device__ __forceinline__ void expand_all(const delta_rows<K::TILES> *rows,
                                                  const delta_unit &unit, uint4 (&w)[1][4],
                                                  const uint16_t *xa, int xa_pitch, int column0,
                                                  int step)
{
    /* y of more rows would not fit into registers; expert_ring.cu takes most of those items. */
    bool ahead = K::TILES == 1 && K::VEC && !unit.to.y_is_f32 && unit.to.rank <= RANKS_AHEAD;
    uint4 y[K::TILES] = {};

    if (ahead)
        load_y<K::TILES>(y, rows, unit, column0);
    __syncthreads(); /* xa is there */
#pragma unroll 1
    while (column0 < unit.to.n_out) {
        int next = column0 + step;

        if (ahead) {
            uint4 a[1][4];

            interleave<1>(a, w, K::TILES > 1);
            if (next < unit.to.n_out)
                load_b<K::VEC, 1>(w, unit.to, next, 0);
            fold_columns<K>(rows, unit, a, y, xa, xa_pitch, column0);
            load_y<K::TILES>(y, rows, unit, next);
        } else {
            fold_ranks<K>(rows, unit.to, xa, xa_pitch, column0);
        }
        column0 = next;
    }
}

/* ---- kernel -------------------------------------------------------------------------------- */

template <class K>
__global__ void __launch_bounds__(K::THREADS, K::RESIDENT)
    expert_kernel(const __grid_constant__ sp_cuda_expert_delta d,
                  const __grid_constant__ delta_shape shape)
{
    extern __shared__ __align__(16) char memory[];
    delta_sums<K::TILES> *sums = (delta_sums<K::TILES> *)memory;
    delta_rows<K::TILES> *rows = (delta_rows<K::TILES> *)(sums + 1);
    uint16_t *xa = (uint16_t *)(rows + 1);
    int each = d.n_sites * shape.parts, warp = threadIdx.x >> 5;
    int units;
    bool waited = d.after_group != 0;

    release_successor();
    if (waited)
        wait_predecessor();
    units = (d.tiles != NULL ? d.head->n_tiles : d.items.counts[0]) * each;
#pragma unroll 1
    for (int number = (int)blockIdx.x; number < units; number += (int)gridDim.x) {
        const sp_cuda_expert_site &site = d.sites[number % each / shape.parts];
        int column0 = (number % shape.parts * K::WARPS + warp) * COLUMNS;
        operands w;
        uint4 b[1][4];
        delta_unit unit;

        read_item<K::TILES>(rows, d, number / each);
        unit = unit_of(site, rows->slot, rows->expert);
        if (unit.to.rank > 0) {
            if (K::RESIDENT == 1) { /* else there are too few registers */
                load_a<K::VEC>(&w, unit.a, d.k_in, 0, unit.to.rank, warp * QUARTER_K, d.k_in);
                load_b<K::VEC, 1>(b, unit.to, column0, 0);
            }
            aim_rows<K::TILES>(rows, unit, site);
            if (!waited)
                wait_predecessor();
            waited = true;
#pragma unroll 1
            for (int rank0 = 0; rank0 < unit.to.rank; rank0 += RANKS)
                make_xa<K>(xa, shape.xa_pitch, sums, &w, d, rows, unit, rank0);
            if (K::RESIDENT > 1)
                load_b<K::VEC, 1>(b, unit.to, column0, 0);
            expand_all<K>(rows, unit, b, xa, shape.xa_pitch, column0,
                          shape.parts * K::WARPS * COLUMNS);
        }
        __syncthreads();
    }
    if (!waited)
        wait_predecessor(); /* a kernel's completion implies that of all kernels before it */
}

/* ---- launch -------------------------------------------------------------------------------- */

template <class K> static size_t shared_of(int xa_pitch)
{
    return sizeof(delta_sums<K::TILES>) + sizeof(delta_rows<K::TILES>) +
           (size_t)K::ITEM_ROWS * xa_pitch * sizeof(uint16_t);
}

/* An odd multiple of 32: no bank conflicts. */
static int pitch_of(int rank_max)
{
    return (sp_cuda_ceil(rank_max, 32) | 1) * 32;
}

/* Parts of each site's columns, so that few items do not leave multiprocessors idle. */
template <class K> static int parts_of(const sp_cuda_expert_delta *d)
{
    int parts = 1, widest = 0;

    for (int i = 0; i < d->n_sites; i++)
        widest = widest > d->sites[i].n_out ? widest : d->sites[i].n_out;
    while (parts < 4 && 2 * parts * d->items.bound * d->n_sites <= d->multiprocessors &&
           parts * K::WARPS * COLUMNS < widest)
        parts *= 2;
    return parts;
}

template <class K> static cudaError_t launch(const sp_cuda_expert_delta *d, cudaStream_t stream)
{
    delta_shape shape = {parts_of<K>(d), pitch_of(d->rank_max)};
    int64_t units = (int64_t)d->items.bound * d->n_sites * shape.parts;
    int64_t most = (int64_t)d->multiprocessors * K::RESIDENT;
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config =
        sp_cuda_overlapping(dim3((unsigned)(units < most ? units : most)), K::THREADS,
                            shared_of<K>(shape.xa_pitch), &overlap, false, stream);

    return cudaLaunchKernelEx(&config, expert_kernel<K>, *d, shape);
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

template <int F16> static cudaError_t launch_of(const sp_cuda_expert_delta *d, cudaStream_t stream)
{
    bool few = d->tiles != NULL || d->items.item_rows == SP_CUDA_ITEM_FEW;

    if (!few)
        return vectors(d) ? launch<delta_kind<F16, 1, TILES_MANY, 8>>(d, stream)
                          : launch<delta_kind<F16, 0, TILES_MANY, 8>>(d, stream);
    if (!vectors(d))
        return launch<delta_kind<F16, 0, 1, 16>>(d, stream);
    return d->items.bound * d->n_sites <= d->multiprocessors
               ? launch<delta_kind<F16, 1, 1, 16>>(d, stream)
               : launch<delta_kind<F16, 1, 1, 8>>(d, stream);
}

extern "C" int sp_cuda_add_experts(int gpu, const sp_cuda_expert_delta *delta, void *stream)
{
    cudaStream_t on = (cudaStream_t)stream;
    sp_cuda_current current(gpu);
    cudaError_t code;

    if (current.code != cudaSuccess || delta->items.bound == 0)
        return (int)current.code;
    if (delta->tiles == NULL && delta->items.item_rows != SP_CUDA_ITEM_FEW &&
        delta->items.item_rows != SP_CUDA_ITEM_SOME && delta->items.item_rows != SP_CUDA_ITEM_MANY)
        return (int)cudaErrorInvalidValue;
    if (delta->n_sites > 0 && delta->sites[0].scales != NULL)
        return (int)sp_cuda_expert_apart(delta, on);
    code = sp_cuda_expert_ring(gpu, delta, on);
    if (code != cudaErrorNotSupported)
        return (int)code;
    return (int)(delta->type == SP_DTYPE_F16 ? launch_of<1>(delta, on) : launch_of<0>(delta, on));
}

template <class K> static cudaError_t allow(cudaError_t before)
{
    return before != cudaSuccess
               ? before
               : cudaFuncSetAttribute(expert_kernel<K>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      (int)shared_of<K>(pitch_of(SP_CUDA_RANK_MAX)));
}

template <int F16> static cudaError_t allow_all(cudaError_t before)
{
    before = allow<delta_kind<F16, 1, TILES_MANY, 8>>(before);
    before = allow<delta_kind<F16, 0, TILES_MANY, 8>>(before);
    before = allow<delta_kind<F16, 0, 1, 16>>(before);
    before = allow<delta_kind<F16, 1, 1, 16>>(before);
    return allow<delta_kind<F16, 1, 1, 8>>(before);
}

cudaError_t sp_cuda_expert_init(void)
{
    return allow_all<0>(allow_all<1>(cudaSuccess));
}
