/*
 * base_gemm_wide.cuh: the parts of a GEMM through wgmma that its kernels share: a block's tile and
 * its place, the ring of stages that tensor copies (TMA) fill, the sums and how they are stored,
 * the shape and maps of a launch, and the choice of a tile. base_gemm_sm90a.cu says how they work
 * together.
 */
#ifndef SP_KERNELS_CUDA_BASE_GEMM_WIDE_CUH
#define SP_KERNELS_CUDA_BASE_GEMM_WIDE_CUH

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

/* A stage of k, once it is empty. */
template <class W>
static __device__ __forceinline__ void load_stage(const wide_ring<W> &at, const wide_maps &maps,
                                                  const wide_item &item, int k_stage, int rank)
{
    barrier_wait(at.empty(), at.parity ^ 1);
    expect_stage(at.full(), item);
    load_w<W>(at, item.w, k_stage, item.place.n0, rank);
    if (item.loads_x)
        load_x<W>(at, maps, k_stage, item.place.row0 + item.first, item.first);
}

/* Stages [from, to) of k; returns the place after them. */
template <class W>
static __device__ __forceinline__ wide_ring<W> load_stages(wide_ring<W> at, const wide_maps &maps,
                                                           const wide_item &item, int from, int to,
                                                           int rank)
{
    for (int i = from; i < to; i++, at.advance())
        load_stage<W>(at, maps, item, i, rank);
    return at;
}

/* The stages that the ring takes at once, w before the wait for the predecessor, x after it, if
 * x is not there before. */
template <class W>
static __device__ __forceinline__ void load_ahead(wide_ring<W> at, const wide_maps &maps,
                                                  const sp_cuda_gemm &g, const wide_shape &s,
                                                  int rank, bool waits)
{
    wide_item item = item_of<W>(g, maps, s, (int)blockIdx.x / W::BLOCKS, rank);
    int ahead = min(W::STAGES, s.k_stages);
    wide_ring<W> w_at = at;

    for (int i = 0; i < ahead; i++, w_at.advance()) {
        expect_stage(w_at.full(), item);
        load_w<W>(w_at, item.w, i, item.place.n0, rank);
    }
    if (waits)
        wait_predecessor();
    for (int i = 0; i < ahead; i++, at.advance())
        if (item.loads_x)
            load_x<W>(at, maps, i, item.place.row0 + item.first, item.first);
}

/* One thread of the block. */
template <class W>
static __device__ __forceinline__ void load_all(wide_ring<W> at, const wide_maps &maps,
                                                const sp_cuda_gemm &g, const wide_shape &s,
                                                int rank)
{
    const int clusters = (int)gridDim.x / W::BLOCKS;
    int number = (int)blockIdx.x / W::BLOCKS, ahead = min(W::STAGES, s.k_stages);

    load_ahead<W>(at, maps, g, s, rank, true);
    for (int i = 0; i < ahead; i++)
        at.advance();
    for (int from = ahead; number < s.items; number += clusters, from = 0) {
        wide_item item = item_of<W>(g, maps, s, number, rank);

        at = load_stages<W>(at, maps, item, from, s.k_stages, rank);
    }
}

/* x and w: the first atoms of this warpgroup's operands. */
template <class W>
static __device__ __forceinline__ void multiply_stage(float *sum, uint64_t x, uint64_t w)
{
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < W::ATOMS; i++)
#pragma unroll
        for (int step = 0; step < ATOM_K / 16; step++)
            wgmma<W::COLUMNS>(sum, wgmma_operand_after(x, i * W::X_BYTES + step * 32),
                              wgmma_operand_after(w, i * W::W_BYTES + step * 32));
    wgmma_commit();
}

/* Each warp tells the loaders of all blocks that it has read the stage. */
template <class W> static __device__ __forceinline__ void release_stage(uint32_t empty)
{
    int lane = threadIdx.x & 31;

    if (lane < W::BLOCKS)
        barrier_arrive_at(empty, lane);
}

/* A row's 16 columns from y on, of which a lane has two adjacent ones of each eight: neighbours
 * swap, so that each lane stores four adjacent outputs and a quad whole sectors. */
static __device__ __forceinline__ void store_sixteen(uint16_t *y, uint32_t low, uint32_t high)
{
    int lane = threadIdx.x & 31;
    uint32_t other = __shfl_xor_sync(~0u, lane & 1 ? low : high, 1);

    if (y != NULL)
        *(uint2 *)(y + (lane & 1) * 8 + (lane & 2) * 2) =
            lane & 1 ? make_uint2(other, high) : make_uint2(low, other);
}

/* Whether a tile whose columns begin at n0 is stored by store_sixteen. */
template <class W>
static __device__ __forceinline__ bool stores_fours(const sp_cuda_gemm_output &out, int n0)
{
    return !out.y_is_f32 && out.bias == NULL && n0 + W::COLUMNS <= out.n && out.y_stride % 4 == 0 &&
           (uintptr_t)out.y % 8 == 0;
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
    bool fours = stores_fours<W>(out, at.n0);

#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = row0 + half * 8;
        bool mine = row < g.rows;
        uint16_t *y = (uint16_t *)out.y + row * out.y_stride + at.n0;

#pragma unroll
        for (int j = 0; j < W::COLUMNS / 8; j += 2) {
            const float *low = sum + 4 * j + 2 * half, *high = low + 4;

            if (fours) {
                store_sixteen(mine ? y + j * 8 : NULL, narrow_two<0>(low[0], low[1]),
                              narrow_two<0>(high[0], high[1]));
            } else if (mine) {
                int n = at.n0 + j * 8 + lane % 4 * 2;

                store_two(out, pairs, row, n, low[0], low[1]);
                store_two(out, pairs, row, n + 8, high[0], high[1]);
            }
        }
    }
}

/* The sums of an item, over all of k. What a stage's products need is known before the wait for it.
 */
template <class W>
static __device__ __forceinline__ void multiply_item(float (&sum)[W::COLUMNS / 2], wide_ring<W> *at,
                                                     int k_stages)
{
    uint32_t read = 0; /* empty barrier of the stage that the wgmma in flight reads */
    uint64_t x = wgmma_operand(at->base + (threadIdx.x / WARPGROUP - 1) * 64 * ROW_BYTES);
    uint64_t w = wgmma_operand(at->base + W::ATOMS * W::X_BYTES);

#pragma unroll
    for (int i = 0; i < W::COLUMNS / 2; i++)
        sum[i] = 0.0f;
    for (int i = 0; i < k_stages; i++, at->advance()) {
        uint64_t stage_x = wgmma_operand_after(x, at->stage * W::STAGE_BYTES);
        uint64_t stage_w = wgmma_operand_after(w, at->stage * W::STAGE_BYTES);

        asm volatile("" : "+l"(stage_x), "+l"(stage_w)); /* the compiler would put it off */
        barrier_wait(at->full(), at->parity);
        multiply_stage<W>(sum, stage_x, stage_w);
        wgmma_wait<1>();
        if (i > 0)
            release_stage<W>(read);
        read = at->empty();
    }
    wgmma_wait<0>();
    release_stage<W>(read);
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

template <class W>
static bool make_maps(const base_gemm *state, wide_maps *maps, const sp_cuda_gemm *gemm, int x_box)
{
    encode_fn encode = (encode_fn)state->encode;
    bool made = make_map(encode, &maps->x, gemm->x, gemm->x_stride, gemm->rows, gemm->k, x_box);

    for (int i = 0; made && i < gemm->n_outputs; i++)
        made = make_map(encode, &maps->w[i], gemm->outputs[i].w, gemm->k, gemm->outputs[i].n,
                        gemm->k, W::W_BOX);
    return made;
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

/* ---- the choice of a tile ------------------------------------------------------------------ */

/* The tiles of the last forms, from FIRST_FOLD on, which also fold deltas in. NS: nanoseconds of
 * 64 k of a tile, measured on an H200 in steps of 5. */
typedef wide<128, 128, 2, 1, 1> wide_128;
typedef wide<128, 256, 2, 1, 1> wide_256;

#define WIDE_128_NS 400
#define WIDE_256_NS 700
#define FIRST_FOLD  (SP_CUDA_GEMM_FORMS - GEMM_FOLDS)

static_assert(GEMM_FOLDS == 2, "wide_128 and wide_256");

/* The kind whose waves of clusters take the least time, of several the last; -1: the GPU runs none.
 * `clusters`: that run at once, of each. */
template <class KIND, int N>
static int choose_kind(const KIND (&kinds)[N], const int (&clusters)[N], const sp_cuda_gemm *gemm)
{
    int best = -1;
    int64_t least = INT64_MAX;

    for (int i = 0; i < N; i++) {
        int64_t ns;

        if (clusters[i] == 0)
            continue;
        ns = (int64_t)sp_cuda_ceil(kinds[i].shape(gemm).items, clusters[i]) * kinds[i].ns;
        if (ns <= least) {
            least = ns;
            best = i;
        }
    }
    return best;
}

#endif
