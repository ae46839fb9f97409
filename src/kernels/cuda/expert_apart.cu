/*
 * expert_apart.cu: deltas of experts by themselves, y = T(xa · Bᵀ), xa = x · Aᵀ, and the scale of
 * each row, by the order of kernels_cuda.h: what follows the base's product folds them, so that
 * nothing here waits for it.
 *
 * A unit is an item, one site and a part of its columns; blocks of four warps take units in turn.
 * A warp takes a quarter of each chunk, of 16 ranks, then 32 columns at a time, as in
 * expert_delta.cu; the sums of a chunk's quarters are added chunk by chunk, through two buffers, so
 * that a block has little shared memory. It is meant to run beside a GEMM that leaves a
 * multiprocessor little memory and is bound by bandwidth: latency is hidden by that, so there are
 * few blocks. Launches have the highest priority; without it blocks would wait until all of the
 * GEMM's have begun.
 */
#include "kernels/cuda/expert_item.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/shrink.cuh"

#define WARPS         4
#define THREADS       (WARPS * SP_WARP)
#define COLUMNS       32 /* of a warp at a time */
#define RESIDENT      3
#define BLOCKS        2 /* on a multiprocessor: more would take the GEMM's place */
#define PARTS_MAX     4
#define CLEAR_THREADS 256

/* TILES of rows in an item; VEC as in ptx.cuh. */
template <int F16_, int VEC_, int TILES_> struct apart_kind {
    static constexpr int F16 = F16_, VEC = VEC_, TILES = TILES_, ITEM_ROWS = TILES * ROWS;
    /* Elements of 16 ranks of xa that a thread sums. */
    static constexpr int SUMS = ITEM_ROWS * RANKS / THREADS;

    static_assert(ITEM_ROWS <= THREADS, "a thread for each of an item's rows");
    static_assert(SUMS * THREADS == ITEM_ROWS * RANKS, "each thread sums as many");
};

typedef struct apart_shape {
    int parts; /* of a site's columns */
    int xa_pitch;
} apart_shape;

template <class K> struct alignas(16) apart_shared {
    quarters q[2][K::TILES]; /* of a chunk, in turn */
    delta_rows<K::TILES> rows;
};

/* ---- xa ------------------------------------------------------------------------------------ */

/* This warp's quarter of the chunk at k for all tiles; w has its part of A. */
template <class K>
static __device__ __forceinline__ void shrink_tiles(quarters *q, operands *w,
                                                    const sp_cuda_expert_delta &d,
                                                    const delta_rows<K::TILES> &rows, int k)
{
    int g = (threadIdx.x & 31) >> 2;

#pragma unroll 1
    for (int tile = 0; tile * ROWS < rows.count; tile++) {
        int row = tile * ROWS + g;
        bool valid = row < rows.count;
        float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};

        load_x<K::VEC>(w, (const uint16_t *)d.x + (valid ? rows.x[row] : 0) * d.x_stride, k,
                       valid ? d.k_in : 0);
        multiply<K::F16>(acc, *w);
        keep_quarter(q[tile], acc);
    }
}

/* One thread's sums of 16 ranks: of all groups that are complete, and of the current one. */
template <class K> struct apart_sums {
    float all[K::SUMS], group[K::SUMS];
};

/* Adds a chunk, whose quarters are in q. */
template <class K>
static __device__ __forceinline__ void add_chunk(apart_sums<K> *sums, const quarters *q, int count,
                                                 int chunk)
{
#pragma unroll
    for (int i = 0; i < K::SUMS; i++) {
        int at = (int)threadIdx.x + i * THREADS, row = at / RANKS;
        float own;

        if (row >= count)
            break;
        own = sum_quarters(q[row / ROWS], row % ROWS, at % RANKS);
        if (chunk % SP_CUDA_GROUP_CHUNKS != 0) {
            sums->group[i] = sums->group[i] + own;
            continue;
        }
        if (chunk > 0)
            sums->all[i] =
                chunk == SP_CUDA_GROUP_CHUNKS ? sums->group[i] : sums->all[i] + sums->group[i];
        sums->group[i] = own;
    }
}

/* Ranks rank0 .. rank0 + 15 of xa of all rows; a rank that is not there is 0, and so is what is
 * left of 32 after the last ones. */
template <class K>
static __device__ __forceinline__ void make_xa(uint16_t *xa, int xa_pitch, apart_shared<K> *shared,
                                               const sp_cuda_expert_delta &d,
                                               const delta_unit &unit, int rank0)
{
    int at0 = (int)(threadIdx.x >> 5) * QUARTER_K, chunk = 0;
    apart_sums<K> sums = {};
    operands w;

    load_a<K::VEC>(&w, unit.a, d.k_in, rank0, unit.to.rank, at0, d.k_in);
#pragma unroll 1
    for (int k = 0; k < d.k_in; k += SP_CUDA_CHUNK_K, chunk++) {
        quarters *q = shared->q[chunk & 1];

        shrink_tiles<K>(q, &w, d, shared->rows, k + at0);
        if (k + SP_CUDA_CHUNK_K < d.k_in)
            load_a<K::VEC>(&w, unit.a, d.k_in, rank0, unit.to.rank, k + SP_CUDA_CHUNK_K + at0,
                           d.k_in);
        __syncthreads();
        add_chunk<K>(&sums, q, shared->rows.count, chunk);
    }
#pragma unroll
    for (int i = 0; i < K::SUMS; i++) {
        int at = (int)threadIdx.x + i * THREADS, row = at / RANKS, c = rank0 + at % RANKS;
        float sum = chunk > SP_CUDA_GROUP_CHUNKS ? sums.all[i] + sums.group[i] : sums.group[i];

        xa[row * xa_pitch + c] = row < shared->rows.count ? narrow<K::F16>(sum) : (uint16_t)0;
        if (rank0 % 32 == 0 && rank0 + RANKS >= unit.to.rank)
            xa[row * xa_pitch + c + RANKS] = 0;
    }
    __syncthreads();
}

/* ---- y ------------------------------------------------------------------------------------- */

/* Eight outputs of one row from `column` on. */
template <int VEC>
static __device__ __forceinline__ void store_row(char *to, int column, int n_out, uint4 delta)
{
    eight v = {delta};

    if (VEC) {
        store_global(to + column * 2, delta);
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (column + i < n_out)
            ((uint16_t *)to)[column + i] = v.one[i];
}

/* All columns of this warp, a step of `step` columns from column0 on; w is that of the first. */
template <class K>
static __device__ __forceinline__ void store_all(const delta_rows<K::TILES> &rows, const work &to,
                                                 uint4 (&w)[1][4], const uint16_t *xa, int xa_pitch,
                                                 int column0, int step)
{
    int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;

#pragma unroll 1
    for (int next; column0 < to.n_out; column0 = next) {
        int column = column0 + 8 * t;
        uint4 a[1][4];

        next = column0 + step;
        interleave<1>(a, w, true);
        if (next < to.n_out)
            load_b<K::VEC, 1>(w, to, next, 0);
#pragma unroll 1
        for (int row = g; row - g < rows.count; row += ROWS) {
            uint4 delta =
                make_delta<K::F16, K::VEC, 1, true>(to, a, xa + row * xa_pitch + 8 * t, column0);

            if (rows.scale[row] != 0.0f && column < to.n_out)
                store_row<K::VEC>(rows.to[row], column, to.n_out, delta);
            __syncwarp();
        }
    }
}

/* ---- kernel -------------------------------------------------------------------------------- */

template <class K>
__global__ void __launch_bounds__(THREADS, RESIDENT)
    apart_kernel(const __grid_constant__ sp_cuda_expert_delta d,
                 const __grid_constant__ apart_shape shape)
{
    extern __shared__ __align__(16) char memory[];
    apart_shared<K> *shared = (apart_shared<K> *)memory;
    delta_rows<K::TILES> *rows = &shared->rows;
    uint16_t *xa = (uint16_t *)(shared + 1);
    int each = d.n_sites * shape.parts, units;

    release_successor();
    wait_predecessor();
    units = d.items.counts[0] * each;
#pragma unroll 1
    for (int number = (int)blockIdx.x; number < units; number += (int)gridDim.x) {
        const sp_cuda_expert_site &site = d.sites[number % each / shape.parts];
        int part = number % shape.parts, j = (int)threadIdx.x;
        int column0 = (part * WARPS + (j >> 5)) * COLUMNS;
        delta_unit unit;
        uint4 b[1][4];

        read_item<K::TILES>(rows, d, number / each);
        unit = unit_of(site, rows->slot, rows->expert);
        if (unit.to.rank > 0) {
            aim_rows<K::TILES>(rows, unit, site);
            if (part == 0 && j < rows->count && rows->scale[j] != 0.0f)
                site.scales[rows->y[j]] = rows->scale[j];
#pragma unroll 1
            for (int rank0 = 0; rank0 < unit.to.rank; rank0 += RANKS)
                make_xa<K>(xa, shape.xa_pitch, shared, d, unit, rank0);
            load_b<K::VEC, 1>(b, unit.to, column0, 0);
            store_all<K>(*rows, unit.to, b, xa, shape.xa_pitch, column0,
                         shape.parts * WARPS * COLUMNS);
        }
        __syncthreads();
    }
}

/* ---- launch -------------------------------------------------------------------------------- */

/* Of launches, the highest there is; per process, as it is the same on all GPUs. */
static int highest_priority;

/* An overlapping launch of that priority. */
static cudaLaunchConfig_t urgent(dim3 grid, int threads, size_t shared_bytes,
                                 cudaLaunchAttribute (&attributes)[2], cudaStream_t stream)
{
    cudaLaunchConfig_t config =
        sp_cuda_overlapping(grid, threads, shared_bytes, attributes, false, stream);

    attributes[config.numAttrs].id = cudaLaunchAttributePriority;
    attributes[config.numAttrs++].val.priority = highest_priority;
    return config;
}

/* An odd multiple of 32: no bank conflicts. */
static int pitch_of(int rank_max)
{
    return (sp_cuda_ceil(rank_max, 32) | 1) * 32;
}

template <class K> static size_t shared_of(int xa_pitch)
{
    return sizeof(apart_shared<K>) + (size_t)K::ITEM_ROWS * xa_pitch * sizeof(uint16_t);
}

/* Parts of each site's columns, so that few items do not leave multiprocessors idle. */
static int parts_of(const sp_cuda_expert_delta *d)
{
    int parts = 1, widest = 0;

    for (int i = 0; i < d->n_sites; i++)
        widest = widest > d->sites[i].n_out ? widest : d->sites[i].n_out;
    while (parts < PARTS_MAX && 2 * parts * d->items.bound * d->n_sites <= d->multiprocessors &&
           parts * WARPS * COLUMNS < widest)
        parts *= 2;
    return parts;
}

template <class K> static cudaError_t launch(const sp_cuda_expert_delta *d, cudaStream_t stream)
{
    apart_shape shape = {parts_of(d), pitch_of(d->rank_max)};
    int64_t units = (int64_t)d->items.bound * d->n_sites * shape.parts;
    int64_t most = (int64_t)BLOCKS * d->multiprocessors;
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = urgent(dim3((unsigned)(units < most ? units : most)), THREADS,
                                       shared_of<K>(shape.xa_pitch), attributes, stream);

    return cudaLaunchKernelEx(&config, apart_kernel<K>, *d, shape);
}

static bool is_aligned(const void *memory, int64_t stride)
{
    return (uintptr_t)memory % 16 == 0 && stride % 8 == 0;
}

static bool has_vectors(const sp_cuda_expert_delta *d)
{
    bool all = d->k_in % 8 == 0 && is_aligned(d->x, d->x_stride);

    for (int i = 0; i < d->n_sites; i++)
        all = all && is_aligned(d->sites[i].y, d->sites[i].y_stride) && d->sites[i].n_out % 8 == 0;
    return all;
}

template <int F16, int VEC>
static cudaError_t launch_of(const sp_cuda_expert_delta *d, cudaStream_t stream)
{
    switch (d->items.item_rows) {
    case SP_CUDA_ITEM_FEW:
        return launch<apart_kind<F16, VEC, SP_CUDA_ITEM_FEW / ROWS>>(d, stream);
    case SP_CUDA_ITEM_SOME:
        return launch<apart_kind<F16, VEC, SP_CUDA_ITEM_SOME / ROWS>>(d, stream);
    default:
        return launch<apart_kind<F16, VEC, SP_CUDA_ITEM_MANY / ROWS>>(d, stream);
    }
}

cudaError_t sp_cuda_expert_apart(const sp_cuda_expert_delta *delta, cudaStream_t stream)
{
    bool valid = delta->tiles == NULL, vectors = has_vectors(delta);

    for (int i = 0; i < delta->n_sites; i++)
        valid = valid && delta->sites[i].scales != NULL && !delta->sites[i].y_is_f32;
    if (!valid)
        return cudaErrorInvalidValue;
    if (delta->type == SP_DTYPE_F16)
        return vectors ? launch_of<1, 1>(delta, stream) : launch_of<1, 0>(delta, stream);
    return vectors ? launch_of<0, 1>(delta, stream) : launch_of<0, 0>(delta, stream);
}

/* The carve-out of the GEMM that it runs beside: a multiprocessor changes it only while idle. */
template <class K> static cudaError_t prepare(cudaError_t before)
{
    if (before == cudaSuccess)
        before = cudaFuncSetAttribute(apart_kernel<K>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      (int)shared_of<K>(pitch_of(SP_CUDA_RANK_MAX)));
    if (before == cudaSuccess)
        before =
            cudaFuncSetAttribute(apart_kernel<K>, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);
    return before;
}

template <int F16, int VEC> static cudaError_t prepare_of(cudaError_t before)
{
    before = prepare<apart_kind<F16, VEC, SP_CUDA_ITEM_FEW / ROWS>>(before);
    before = prepare<apart_kind<F16, VEC, SP_CUDA_ITEM_SOME / ROWS>>(before);
    return prepare<apart_kind<F16, VEC, SP_CUDA_ITEM_MANY / ROWS>>(before);
}

cudaError_t sp_cuda_expert_apart_init(void)
{
    int lowest = 0;
    cudaError_t code = cudaDeviceGetStreamPriorityRange(&lowest, &highest_priority);

    return prepare_of<0, 0>(prepare_of<0, 1>(prepare_of<1, 0>(prepare_of<1, 1>(code))));
}

/* ---- scales -------------------------------------------------------------------------------- */

__global__ void __launch_bounds__(CLEAR_THREADS)
    clear_kernel(const __grid_constant__ sp_cuda_clear clear)
{
    int64_t i = (int64_t)blockIdx.x * CLEAR_THREADS + threadIdx.x;

    release_successor();
    wait_predecessor();
    if (i < clear.n)
        clear.array[blockIdx.y][i] = 0.0f;
}

extern "C" int sp_cuda_clear_scales(int gpu, const sp_cuda_clear *clear, void *stream)
{
    int64_t blocks = (clear->n + CLEAR_THREADS - 1) / CLEAR_THREADS;
    sp_cuda_current current(gpu);
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config;

    if (current.code != cudaSuccess || blocks == 0 || clear->n_arrays == 0)
        return (int)current.code;
    config = urgent(dim3((unsigned)blocks, (unsigned)clear->n_arrays), CLEAR_THREADS, 0, attributes,
                    (cudaStream_t)stream);
    return (int)cudaLaunchKernelEx(&config, clear_kernel, *clear);
}
