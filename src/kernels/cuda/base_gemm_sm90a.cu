/*
 * base_gemm_sm90a.cu: y[row, n] = x[row, :] · w[n, :] by the order of sp_cuda_gemm, through wgmma.
 * Bound by the tensor cores with many rows, by the bytes of w with few.
 *
 * A block takes a tile of 64 or 128 rows by up to 256 columns, over all of k in stages of 64 or,
 * where the tile is small, a multiple of that: a stage costs a few hundred cycles at least. The
 * blocks of a cluster share a part of what they read, since what L2 delivers would be the bound
 * otherwise: blocks with adjacent rows share w (many rows), or those with adjacent columns share x
 * (few rows, whose columns are spread over the multiprocessors). Each block loads its share of the
 * common operand to all of them. In a block one thread fills a ring of stages by tensor copies
 * (TMA) and each warpgroup multiplies 64 rows. Blocks are persistent: the ring runs on into the
 * next tile while the sums of the last one are stored. The first stages of w are loaded before the
 * wait for the predecessor. Tiles are in bands of 32 tiles of rows, so that those which run
 * together share rows and columns in L2.
 */
#include "kernels/cuda/base_gemm.cuh"
#include "kernels/cuda/wgmma.cuh"

#define ATOM_K        64 /* k of a row of 128 bytes, as the swizzle has it */
#define ROW_BYTES     (ATOM_K * 2)
#define WARPGROUP     128
#define BAND          32 /* tiles of rows */
#define RING_BYTES    (192 << 10)
#define STAGES_MAX    16
#define BARRIER_BYTES (2 * STAGES_MAX * 8)

typedef struct wide_maps {
    CUtensorMap x, w[SP_CUDA_OUTPUTS_MAX];
} wide_maps;

typedef struct wide_shape {
    gemm_columns columns;
    int row_clusters, column_clusters; /* of tiles */
    int items, k_stages;
    int x_box; /* rows of x that a block loads at once; no more than there are */
} wide_shape;

/* A block's tile, its cluster (ROW_BLOCKS or COLUMN_BLOCKS is 1), and the atoms of a stage. */
template <int ROWS_, int COLUMNS_, int ROW_BLOCKS_, int COLUMN_BLOCKS_, int ATOMS_> struct wide {
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, ATOMS = ATOMS_;
    static constexpr int ROW_BLOCKS = ROW_BLOCKS_, COLUMN_BLOCKS = COLUMN_BLOCKS_;
    static constexpr int BLOCKS = ROW_BLOCKS * COLUMN_BLOCKS;
    static constexpr int CONSUMERS = ROWS / 64; /* warpgroups */
    static constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP;
    static constexpr int X_BOX = ROWS / COLUMN_BLOCKS, W_BOX = COLUMNS / ROW_BLOCKS; /* rows */
    static constexpr int X_BYTES = ROWS * ROW_BYTES, W_BYTES = COLUMNS * ROW_BYTES;  /* an atom */
    static constexpr int STAGE_K = ATOMS * ATOM_K;
    static constexpr int STAGE_BYTES = ATOMS * (X_BYTES + W_BYTES); /* x, then w */
    static constexpr int STAGES =
        RING_BYTES / STAGE_BYTES < STAGES_MAX ? RING_BYTES / STAGE_BYTES : STAGES_MAX;
    static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES + BARRIER_BYTES;

    static_assert(ROW_BLOCKS == 1 || COLUMN_BLOCKS == 1, "all blocks share one operand");
    static_assert(X_BOX % 8 == 0 && W_BOX % 8 == 0, "a box is whole atoms of the swizzle");
    static_assert(X_BYTES % 1024 == 0 && W_BYTES % 1024 == 0, "and so is an operand");
};

/* 1 where this object has the kernels for the GPU at hand. */
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__device__ int wide_is_built = 1;
#else
__device__ int wide_is_built = 0;
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* The tile of this block in an item of its cluster. */
typedef struct wide_place {
    int row0, output, n0;
} wide_place;

/* A column tile after the last one begins at or after the end of the last output. */
template <class W>
static __device__ __forceinline__ wide_place find_place(const wide_shape &s, int item, int rank)
{
    const int band_rows = BAND / W::ROW_BLOCKS;
    int in_band = band_rows * s.column_clusters, band = item / in_band;
    int rows = min(band_rows, s.row_clusters - band * band_rows), at = item - band * in_band;
    int row = (band * band_rows + at % rows) * W::ROW_BLOCKS + rank / W::COLUMN_BLOCKS;
    int column = at / rows * W::COLUMN_BLOCKS + rank % W::COLUMN_BLOCKS;
    int last = min(column, s.columns.tiles - 1);
    gemm_place place = place_of(s.columns, last);

    return {row * W::ROWS, place.output, (place.tile + column - last) * W::COLUMNS};
}

/* A thread's position in the ring. */
template <class W> struct wide_ring {
    uint32_t base;
    int stage, parity;

    __device__ uint32_t full(void) const
    {
        return base + W::STAGES * W::STAGE_BYTES + stage * 8;
    }
    __device__ uint32_t empty(void) const
    {
        return full() + W::STAGES * 8;
    }
    __device__ uint32_t data(void) const
    {
        return base + stage * W::STAGE_BYTES;
    }
    __device__ void advance(void)
    {
        if (++stage == W::STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

/* How many blocks load a box of x for the tile: those whose box has a row. A box without one would
 * be zeros, and slow. */
template <class W>
static __device__ __forceinline__ int boxes_of(const sp_cuda_gemm &g, const wide_shape &s, int row0)
{
    return max(0, min(W::COLUMN_BLOCKS, (g.rows - row0 + s.x_box - 1) / s.x_box));
}

/* This block's share of a stage of x. */
template <class W>
static __device__ __forceinline__ void load_x(const wide_ring<W> &at, const wide_maps &maps,
                                              int k_stage, int row, int first)
{
#pragma unroll
    for (int i = 0; i < W::ATOMS; i++) {
        uint32_t to = at.data() + i * W::X_BYTES + first * ROW_BYTES;
        int k = (k_stage * W::ATOMS + i) * ATOM_K;

        if (W::COLUMN_BLOCKS > 1)
            tensor_load_to((1 << W::BLOCKS) - 1, to, &maps.x, k, row, at.full());
        else
            tensor_load(to, &maps.x, k, row, at.full());
    }
}

/* This block's share of a stage of w. */
template <class W>
static __device__ __forceinline__ void load_w(const wide_ring<W> &at, const CUtensorMap *map,
                                              int k_stage, int n0, int rank)
{
    int first = W::ROW_BLOCKS > 1 ? rank * W::W_BOX : 0;

#pragma unroll
    for (int i = 0; i < W::ATOMS; i++) {
        uint32_t to = at.data() + W::ATOMS * W::X_BYTES + i * W::W_BYTES + first * ROW_BYTES;
        int k = (k_stage * W::ATOMS + i) * ATOM_K;

        if (W::ROW_BLOCKS > 1)
            tensor_load_to((1 << W::BLOCKS) - 1, to, map, k, n0 + first, at.full());
        else
            tensor_load(to, map, k, n0, at.full());
    }
}

/* What a loader needs of an item: its tile, and this block's box of x. */
typedef struct wide_item {
    wide_place place;
    const CUtensorMap *w;
    int stage_bytes; /* that arrive in each stage */
    int first;       /* row of the tile where the box begins */
    bool loads_x;
} wide_item;

template <class W>
static __device__ __forceinline__ wide_item item_of(const sp_cuda_gemm &g, const wide_maps &maps,
                                                    const wide_shape &s, int number, int rank)
{
    wide_item item;
    int boxes, self = W::COLUMN_BLOCKS > 1 ? rank : 0;

    item.place = find_place<W>(s, number, rank);
    boxes = boxes_of<W>(g, s, item.place.row0);
    item.w = &maps.w[item.place.output];
    item.stage_bytes = W::ATOMS * (boxes * s.x_box * ROW_BYTES + W::W_BYTES);
    item.first = self * s.x_box;
    item.loads_x = self < boxes;
    return item;
}

/* The bytes of a stage are expected from here on. */
static __device__ __forceinline__ void expect_stage(uint32_t full, const wide_item &item)
{
    barrier_expect(full, item.stage_bytes);
    barrier_arrive(full);
}

/* One thread of the block. */
template <class W>
static __device__ __forceinline__ void load_all(wide_ring<W> at, const wide_maps &maps,
                                                const sp_cuda_gemm &g, const wide_shape &s,
                                                int rank)
{
    const int clusters = (int)gridDim.x / W::BLOCKS;
    int number = (int)blockIdx.x / W::BLOCKS, ahead = min(W::STAGES, s.k_stages);
    wide_item item = item_of<W>(g, maps, s, number, rank);
    wide_ring<W> w_at = at;

    for (int i = 0; i < ahead; i++, w_at.advance()) {
        expect_stage(w_at.full(), item);
        load_w<W>(w_at, item.w, i, item.place.n0, rank);
    }
    wait_predecessor();
    for (int i = 0; i < ahead; i++, at.advance())
        if (item.loads_x)
            load_x<W>(at, maps, i, item.place.row0 + item.first, item.first);
    for (int from = ahead; number < s.items; number += clusters, from = 0) {
        item = item_of<W>(g, maps, s, number, rank);
        for (int i = from; i < s.k_stages; i++, at.advance()) {
            barrier_wait(at.empty(), at.parity ^ 1);
            expect_stage(at.full(), item);
            load_w<W>(at, item.w, i, item.place.n0, rank);
            if (item.loads_x)
                load_x<W>(at, maps, i, item.place.row0 + item.first, item.first);
        }
    }
}

/* x and w: the first atoms of this warpgroup's operands. */
template <class W>
static __device__ __forceinline__ void multiply_stage(float *sum, uint32_t x, uint32_t w)
{
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < W::ATOMS; i++) {
        uint64_t a = wgmma_operand(x + i * W::X_BYTES), b = wgmma_operand(w + i * W::W_BYTES);

#pragma unroll
        for (int step = 0; step < ATOM_K / 16; step++)
            wgmma<W::COLUMNS>(sum, a + 2 * step, b + 2 * step);
    }
    wgmma_commit();
}

/* Each warp tells the loaders of all blocks that it has read the stage. */
template <class W> static __device__ __forceinline__ void release_stage(uint32_t empty)
{
    int lane = threadIdx.x & 31;

    if (lane < W::BLOCKS)
        barrier_arrive_at(empty, lane);
}

/* A row's 16 columns from y on: neighbours swap halves, so that each lane stores four adjacent
 * outputs and a quad whole sectors. */
static __device__ __forceinline__ void store_sixteen(uint16_t *y, const float *sum, int half)
{
    int lane = threadIdx.x & 31;
    uint32_t low = narrow_two<0>(sum[2 * half], sum[2 * half + 1]);
    uint32_t high = narrow_two<0>(sum[4 + 2 * half], sum[4 + 2 * half + 1]);
    uint32_t other = __shfl_xor_sync(~0u, lane & 1 ? low : high, 1);

    if (y != NULL)
        *(uint2 *)(y + (lane & 1) * 8 + (lane & 2) * 2) =
            lane & 1 ? make_uint2(other, high) : make_uint2(low, other);
}

/* The sums of this thread's warpgroup. */
template <class W>
static __device__ __forceinline__ void store_sums(const float *sum, const sp_cuda_gemm &g,
                                                  const wide_place &at)
{
    const sp_cuda_gemm_output &out = g.outputs[at.output];
    int lane = threadIdx.x & 31, in_group = (int)threadIdx.x - WARPGROUP;
    int row0 = at.row0 + in_group / 32 * 16 + lane / 4;
    bool pairs = stores_pairs(out);
    bool fours = !out.y_is_f32 && out.bias == NULL && at.n0 + W::COLUMNS <= out.n &&
                 out.y_stride % 4 == 0 && (uintptr_t)out.y % 8 == 0;

#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = row0 + half * 8;
        bool mine = row < g.rows;
        uint16_t *y = (uint16_t *)out.y + row * out.y_stride + at.n0;

#pragma unroll
        for (int j = 0; j < W::COLUMNS / 8; j += 2) {
            if (fours) {
                store_sixteen(mine ? y + j * 8 : NULL, sum + 4 * j, half);
            } else if (mine) {
                int n = at.n0 + j * 8 + lane % 4 * 2;

                store_two(out, pairs, row, n, sum[4 * j + 2 * half], sum[4 * j + 2 * half + 1]);
                store_two(out, pairs, row, n + 8, sum[4 * j + 4 + 2 * half],
                          sum[4 * j + 5 + 2 * half]);
            }
        }
    }
}

template <class W>
static __device__ __forceinline__ void multiply_all(wide_ring<W> at, const sp_cuda_gemm &g,
                                                    const wide_shape &s, int rank)
{
    const int clusters = (int)gridDim.x / W::BLOCKS;
    int group = threadIdx.x / WARPGROUP - 1;
    uint32_t x = group * 64 * ROW_BYTES;
    float sum[W::COLUMNS / 2];

    for (int item = (int)blockIdx.x / W::BLOCKS; item < s.items; item += clusters) {
        uint32_t read = 0; /* empty barrier of the stage that the wgmma in flight reads */

#pragma unroll
        for (int i = 0; i < W::COLUMNS / 2; i++)
            sum[i] = 0.0f;
        for (int i = 0; i < s.k_stages; i++, at.advance()) {
            barrier_wait(at.full(), at.parity);
            multiply_stage<W>(sum, at.data() + x, at.data() + W::ATOMS * W::X_BYTES);
            wgmma_wait<1>();
            if (i > 0)
                release_stage<W>(read);
            read = at.empty();
        }
        wgmma_wait<0>();
        release_stage<W>(read);
        store_sums<W>(sum, g, find_place<W>(s, item, rank));
    }
}

template <class W> static __device__ __forceinline__ void init_barriers(wide_ring<W> at)
{
    for (; at.parity == 0; at.advance()) {
        barrier_init(at.full(), 1);
        barrier_init(at.empty(), W::BLOCKS * W::CONSUMERS * WARPGROUP / SP_WARP);
    }
    barrier_init_done();
}

#endif

template <class W>
__global__ void __launch_bounds__(W::THREADS, 1)
    wide_kernel(const __grid_constant__ wide_maps maps, const __grid_constant__ sp_cuda_gemm g,
                const __grid_constant__ wide_shape s)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) char memory[];
    wide_ring<W> ring = {shared_address(memory), 0, 0};
    int rank = cluster_rank();

    if (threadIdx.x == 0)
        init_barriers<W>(ring);
    __syncwarp();
    cluster_arrive();
    cluster_wait();
    release_successor();
    if (threadIdx.x < WARPGROUP) {
        if (W::COLUMNS == 256)
            registers_down_to<40>();
        if (threadIdx.x == 0)
            load_all<W>(ring, maps, g, s, rank);
        __syncwarp();
    } else {
        if (W::COLUMNS == 256)
            registers_up_to<232>();
        wait_predecessor();
        multiply_all<W>(ring, g, s, rank);
    }
    /* No block may end while another one still writes to it. */
    cluster_arrive();
    cluster_wait();
#endif
}

/* ---- launch -------------------------------------------------------------------------------- */

typedef decltype(&cuTensorMapEncodeTiled) encode_fn;

/* Boxes of `box` rows by an atom's k, of a matrix [rows, k]. */
static bool make_map(encode_fn encode, CUtensorMap *map, const void *data, int64_t stride, int rows,
                     int k, int box)
{
    cuuint64_t sizes[2] = {(cuuint64_t)k, (cuuint64_t)rows};
    cuuint64_t strides[1] = {(cuuint64_t)stride * 2};
    cuuint32_t boxes[2] = {ATOM_K, (cuuint32_t)box}, steps[2] = {1, 1};

    return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void *)data, sizes, strides, boxes,
                  steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class W> static wide_shape shape_of(const sp_cuda_gemm *gemm)
{
    wide_shape shape = {
        columns_of(gemm, W::COLUMNS),
        sp_cuda_ceil(gemm->rows, W::ROWS * W::ROW_BLOCKS),
        0,
        0,
        sp_cuda_ceil(gemm->k, W::STAGE_K),
        min(W::X_BOX, sp_cuda_ceil(sp_cuda_ceil(gemm->rows, W::COLUMN_BLOCKS), 8) * 8)};

    shape.column_clusters = sp_cuda_ceil(shape.columns.tiles, W::COLUMN_BLOCKS);
    shape.items = shape.row_clusters * shape.column_clusters;
    return shape;
}

/* A launch of so many clusters; `attributes` must outlive it. */
template <class W>
static cudaLaunchConfig_t config_of(int clusters, cudaLaunchAttribute *attributes,
                                    cudaStream_t stream)
{
    cudaLaunchConfig_t config =
        sp_cuda_overlapping(dim3((unsigned)(clusters * W::BLOCKS)), W::THREADS, W::SHARED_BYTES,
                            &attributes[0], false, stream);

    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim = {W::BLOCKS, 1, 1};
    config.attrs = attributes;
    config.numAttrs++;
    return config;
}

template <class W>
static cudaError_t launch_wide(const base_gemm *state, int clusters, const sp_cuda_gemm *gemm,
                               cudaStream_t stream)
{
    wide_shape shape = shape_of<W>(gemm);
    encode_fn encode = (encode_fn)state->encode;
    wide_maps maps = {};
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = config_of<W>(min(shape.items, clusters), attributes, stream);

    if (!make_map(encode, &maps.x, gemm->x, gemm->x_stride, gemm->rows, gemm->k, shape.x_box))
        return cudaErrorInvalidValue;
    for (int i = 0; i < gemm->n_outputs; i++)
        if (!make_map(encode, &maps.w[i], gemm->outputs[i].w, gemm->k, gemm->outputs[i].n, gemm->k,
                      W::W_BOX))
            return cudaErrorInvalidValue;
    return cudaLaunchKernelEx(&config, wide_kernel<W>, maps, *gemm, shape);
}

/* Allows the shared memory, and asks how many clusters run at once. */
template <class W> static cudaError_t init_wide(int *out_clusters)
{
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = config_of<W>(1, attributes, NULL);
    cudaError_t code = cudaFuncSetAttribute(
        wide_kernel<W>, cudaFuncAttributeMaxDynamicSharedMemorySize, W::SHARED_BYTES);

    return code == cudaSuccess
               ? cudaOccupancyMaxActiveClusters(out_clusters, wide_kernel<W>, &config)
               : code;
}

/* ---- the choice of a tile ------------------------------------------------------------------ */

/* `ns`: nanoseconds of 64 k of a tile, measured on an H200 in steps of 5. */
typedef struct wide_kind {
    cudaError_t (*init)(int *out_clusters);
    cudaError_t (*launch)(const base_gemm *state, int clusters, const sp_cuda_gemm *gemm,
                          cudaStream_t stream);
    wide_shape (*shape)(const sp_cuda_gemm *gemm);
    int ns;
} wide_kind;

template <class W> static constexpr wide_kind kind_of(int ns)
{
    return {init_wide<W>, launch_wide<W>, shape_of<W>, ns};
}

static const wide_kind kinds[SP_CUDA_GEMM_SHAPES] = {
    kind_of<wide<64, 64, 1, 4, 2>>(230),   kind_of<wide<64, 64, 1, 2, 2>>(230),
    kind_of<wide<64, 32, 1, 2, 4>>(165),   kind_of<wide<128, 64, 1, 2, 2>>(310),
    kind_of<wide<128, 128, 2, 1, 1>>(400), kind_of<wide<128, 256, 2, 1, 1>>(700),
};

cudaError_t sp_cuda_gemm_wide_init(int gpu, base_gemm *state)
{
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    int major = 0, minor = 0, built = 0;
    void *encode = NULL;
    cudaError_t code = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, gpu);

    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, gpu);
    if (code != cudaSuccess || major != 9 || minor != 0)
        return code;
    code = cudaMemcpyFromSymbol(&built, wide_is_built, sizeof built);
    if (code != cudaSuccess || !built || state->shared_bytes < RING_BYTES + BARRIER_BYTES)
        return code;
    code = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000,
                                            cudaEnableDefault, &found);
    for (int i = 0; i < SP_CUDA_GEMM_SHAPES && code == cudaSuccess; i++)
        code = kinds[i].init(&state->clusters[i]);
    if (code == cudaSuccess && found == cudaDriverEntryPointSuccess)
        state->encode = encode;
    return code;
}

/* The tile whose waves of clusters take the least time. */
static int choose_kind(const base_gemm *state, const sp_cuda_gemm *gemm)
{
    int best = 0;
    int64_t least = INT64_MAX;

    for (int i = 0; i < SP_CUDA_GEMM_SHAPES; i++) {
        int items = kinds[i].shape(gemm).items;
        int64_t ns = state->clusters[i] > 0
                         ? (int64_t)sp_cuda_ceil(items, state->clusters[i]) * kinds[i].ns
                         : INT64_MAX;

        if (ns <= least) {
            least = ns;
            best = i;
        }
    }
    return best;
}

cudaError_t sp_cuda_gemm_wide(const base_gemm *state, int kind, const sp_cuda_gemm *gemm,
                              cudaStream_t stream)
{
    if (state->encode == NULL)
        return cudaErrorNotSupported;
    if (kind < 0)
        kind = choose_kind(state, gemm);
    return kinds[kind].launch(state, state->clusters[kind], gemm, stream);
}
