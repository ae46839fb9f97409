/*
 * base_gemm_sm90a.cu: y[row, n] = x[row, :] · w[n, :] for many rows, by the order of sp_cuda_gemm,
 * through wgmma. Bound by the tensor cores.
 *
 * A cluster of two blocks takes two tiles of 128 rows by the same 256 or 128 columns, over all of k
 * in stages of 64. Each block loads its rows of x and half of the rows of w, the latter to both
 * blocks: what L2 delivers would be the bound otherwise. In a block one thread fills a ring of
 * stages by tensor copies (TMA) and two warpgroups multiply 64 rows each. Blocks are persistent:
 * the ring runs on into the next tile while the sums of the last one are stored. Tiles are in bands
 * of 16 pairs of tiles of rows, so that those which run together share rows and columns in L2.
 */
#include "kernels/cuda/base_gemm.cuh"
#include "kernels/cuda/wgmma.cuh"

#define STAGE_K       64
#define ROW_BYTES     (STAGE_K * 2)
#define ROWS          128 /* of x, of one block */
#define BLOCKS        2   /* of a cluster */
#define CONSUMERS     2   /* warpgroups */
#define WARPGROUP     128
#define THREADS       ((1 + CONSUMERS) * WARPGROUP)
#define BAND          16 /* pairs of tiles of rows */
#define X_BYTES       (ROWS * ROW_BYTES)
#define RING_BYTES    (192 << 10)
#define BARRIER_BYTES 256

static_assert(CONSUMERS * 64 == ROWS, "a warpgroup multiplies 64 rows");

typedef struct wide_maps {
    CUtensorMap x, w[SP_CUDA_OUTPUTS_MAX];
} wide_maps;

typedef struct wide_shape {
    gemm_columns columns;
    int row_pairs, items, k_stages;
} wide_shape;

template <int COLUMNS> struct wide {
    static constexpr int stage_bytes = X_BYTES + COLUMNS * ROW_BYTES;
    static constexpr int stages = RING_BYTES / stage_bytes;
    static constexpr int shared_bytes = stages * stage_bytes + BARRIER_BYTES;
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

template <int COLUMNS>
static __device__ __forceinline__ wide_place find_place(const wide_shape &s, int item, int rank)
{
    int in_band = BAND * s.columns.tiles, band = item / in_band;
    int pairs = min(BAND, s.row_pairs - band * BAND), at = item - band * in_band;
    gemm_place place = place_of(s.columns, at / pairs);

    return {((band * BAND + at % pairs) * BLOCKS + rank) * ROWS, place.output,
            place.tile * COLUMNS};
}

/* A thread's position in the ring. */
template <int COLUMNS> struct wide_ring {
    uint32_t base;
    int stage, parity;

    __device__ uint32_t full(void) const
    {
        return base + wide<COLUMNS>::stages * wide<COLUMNS>::stage_bytes + stage * 8;
    }
    __device__ uint32_t empty(void) const
    {
        return full() + wide<COLUMNS>::stages * 8;
    }
    __device__ uint32_t data(void) const
    {
        return base + stage * wide<COLUMNS>::stage_bytes;
    }
    __device__ void advance(void)
    {
        if (++stage == wide<COLUMNS>::stages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

/* One thread of the block. */
template <int COLUMNS>
static __device__ __forceinline__ void load_all(wide_ring<COLUMNS> at, const wide_maps &maps,
                                                const wide_shape &s, int rank)
{
    const uint16_t both = (1 << BLOCKS) - 1;
    const int half = COLUMNS / BLOCKS;

    for (int item = (int)blockIdx.x / BLOCKS; item < s.items; item += (int)gridDim.x / BLOCKS) {
        wide_place place = find_place<COLUMNS>(s, item, rank);
        const CUtensorMap *w = &maps.w[place.output];

        for (int i = 0; i < s.k_stages; i++, at.advance()) {
            barrier_wait(at.empty(), at.parity ^ 1);
            barrier_expect(at.full(), wide<COLUMNS>::stage_bytes);
            barrier_arrive(at.full());
            tensor_load(at.data(), &maps.x, i * STAGE_K, place.row0, at.full());
            tensor_load_to(both, at.data() + X_BYTES + rank * half * ROW_BYTES, w, i * STAGE_K,
                           place.n0 + rank * half, at.full());
        }
    }
}

template <int COLUMNS>
static __device__ __forceinline__ void multiply_stage(float *sum, uint32_t x, uint32_t w)
{
    uint64_t a = wgmma_operand(x), b = wgmma_operand(w);

    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STAGE_K / 16; step++) {
        if (COLUMNS == 256)
            wgmma_256(sum, a + 2 * step, b + 2 * step);
        else
            wgmma_128(sum, a + 2 * step, b + 2 * step);
    }
    wgmma_commit();
}

/* Each warp tells both blocks' loaders that it has read the stage. */
static __device__ __forceinline__ void release_stage(uint32_t empty)
{
    int lane = threadIdx.x & 31;

    if (lane < BLOCKS)
        barrier_arrive_at(empty, lane);
}

/* Two rows' 16 columns from column j * 8: neighbours swap halves, so that each lane stores four
 * adjacent outputs and a quad whole sectors. */
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
template <int COLUMNS>
static __device__ __forceinline__ void store_sums(const float *sum, const sp_cuda_gemm &g,
                                                  const wide_place &at)
{
    const sp_cuda_gemm_output &out = g.outputs[at.output];
    int lane = threadIdx.x & 31, in_group = (int)threadIdx.x - WARPGROUP;
    int row0 = at.row0 + in_group / 32 * 16 + lane / 4;
    bool pairs = stores_pairs(out);
    bool fours = !out.y_is_f32 && out.bias == NULL && at.n0 + COLUMNS <= out.n &&
                 out.y_stride % 4 == 0 && (uintptr_t)out.y % 8 == 0;

#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = row0 + half * 8;
        bool mine = row < g.rows;
        uint16_t *y = (uint16_t *)out.y + row * out.y_stride + at.n0;

#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j += 2) {
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

template <int COLUMNS>
static __device__ __forceinline__ void multiply_all(wide_ring<COLUMNS> at, const sp_cuda_gemm &g,
                                                    const wide_shape &s, int rank)
{
    int group = threadIdx.x / WARPGROUP - 1;
    uint32_t x = group * 64 * ROW_BYTES;
    float sum[COLUMNS / 2];

    for (int item = (int)blockIdx.x / BLOCKS; item < s.items; item += (int)gridDim.x / BLOCKS) {
        uint32_t read = 0; /* the stage that the wgmma in flight reads */

#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++)
            sum[i] = 0.0f;
        for (int i = 0; i < s.k_stages; i++, at.advance()) {
            barrier_wait(at.full(), at.parity);
            multiply_stage<COLUMNS>(sum, at.data() + x, at.data() + X_BYTES);
            wgmma_wait<1>();
            if (i > 0)
                release_stage(read);
            read = at.empty();
        }
        wgmma_wait<0>();
        release_stage(read);
        store_sums<COLUMNS>(sum, g, find_place<COLUMNS>(s, item, rank));
    }
}

template <int COLUMNS> static __device__ __forceinline__ void init_barriers(wide_ring<COLUMNS> at)
{
    for (; at.parity == 0; at.advance()) {
        barrier_init(at.full(), 1);
        barrier_init(at.empty(), BLOCKS * CONSUMERS * WARPGROUP / SP_WARP);
    }
    barrier_init_done();
}

#endif

template <int COLUMNS>
__global__ void __launch_bounds__(THREADS, 1)
    wide_kernel(const __grid_constant__ wide_maps maps, const __grid_constant__ sp_cuda_gemm g,
                const __grid_constant__ wide_shape s)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) char memory[];
    wide_ring<COLUMNS> ring = {shared_address(memory), 0, 0};
    int rank = cluster_rank();

    if (threadIdx.x == 0)
        init_barriers<COLUMNS>(ring);
    __syncwarp();
    cluster_arrive();
    cluster_wait();
    release_successor();
    if (threadIdx.x < WARPGROUP) {
        registers_down_to<40>();
        if (threadIdx.x == 0) {
            wait_predecessor();
            load_all<COLUMNS>(ring, maps, s, rank);
        }
        __syncwarp();
    } else {
        registers_up_to<232>();
        wait_predecessor();
        multiply_all<COLUMNS>(ring, g, s, rank);
    }
    /* No block may end while the other one still writes to it. */
    cluster_arrive();
    cluster_wait();
#endif
}

/* ---- launch -------------------------------------------------------------------------------- */

typedef decltype(&cuTensorMapEncodeTiled) encode_fn;

/* Boxes of `box` rows by a stage's k, of a matrix [rows, k]. */
static bool make_map(encode_fn encode, CUtensorMap *map, const void *data, int64_t stride, int rows,
                     int k, int box)
{
    cuuint64_t sizes[2] = {(cuuint64_t)k, (cuuint64_t)rows};
    cuuint64_t strides[1] = {(cuuint64_t)stride * 2};
    cuuint32_t boxes[2] = {STAGE_K, (cuuint32_t)box}, steps[2] = {1, 1};

    return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void *)data, sizes, strides, boxes,
                  steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <int COLUMNS> static cudaError_t set_shared(void)
{
    return cudaFuncSetAttribute(wide_kernel<COLUMNS>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                wide<COLUMNS>::shared_bytes);
}

cudaError_t sp_cuda_gemm_wide_init(int gpu, base_gemm *state)
{
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    int major = 0, minor = 0, built = 0;
    cudaError_t code = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, gpu);

    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, gpu);
    if (code != cudaSuccess || major != 9 || minor != 0)
        return code;
    code = cudaMemcpyFromSymbol(&built, wide_is_built, sizeof built);
    if (code != cudaSuccess || !built || state->shared_bytes < wide<256>::shared_bytes)
        return code;
    code = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &state->encode, 12000,
                                            cudaEnableDefault, &found);
    if (code == cudaSuccess)
        code = set_shared<256>();
    if (code == cudaSuccess)
        code = set_shared<128>();
    if (code != cudaSuccess || found != cudaDriverEntryPointSuccess)
        state->encode = NULL;
    return code;
}

template <int COLUMNS> static wide_shape shape_of(const sp_cuda_gemm *gemm)
{
    wide_shape shape = {columns_of(gemm, COLUMNS), sp_cuda_ceil(gemm->rows, BLOCKS * ROWS), 0,
                        sp_cuda_ceil(gemm->k, STAGE_K)};

    shape.items = shape.row_pairs * shape.columns.tiles;
    return shape;
}

template <int COLUMNS>
static cudaError_t launch_wide(const base_gemm *state, const sp_cuda_gemm *gemm,
                               cudaStream_t stream)
{
    wide_shape shape = shape_of<COLUMNS>(gemm);
    encode_fn encode = (encode_fn)state->encode;
    int clusters = min(shape.items, state->multiprocessors / BLOCKS);
    wide_maps maps = {};
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config =
        sp_cuda_overlapping(dim3((unsigned)(clusters * BLOCKS)), THREADS,
                            wide<COLUMNS>::shared_bytes, &attributes[0], false, stream);

    if (!make_map(encode, &maps.x, gemm->x, gemm->x_stride, gemm->rows, gemm->k, ROWS))
        return cudaErrorInvalidValue;
    for (int i = 0; i < gemm->n_outputs; i++)
        if (!make_map(encode, &maps.w[i], gemm->outputs[i].w, gemm->k, gemm->outputs[i].n, gemm->k,
                      COLUMNS / BLOCKS))
            return cudaErrorInvalidValue;
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim = {BLOCKS, 1, 1};
    config.attrs = attributes;
    config.numAttrs++;
    return cudaLaunchKernelEx(&config, wide_kernel<COLUMNS>, maps, *gemm, shape);
}

cudaError_t sp_cuda_gemm_wide(const base_gemm *state, const sp_cuda_gemm *gemm, cudaStream_t stream)
{
    int clusters = state->multiprocessors / BLOCKS;
    int wide_waves = sp_cuda_ceil(shape_of<256>(gemm).items, clusters);
    int narrow_waves = sp_cuda_ceil(shape_of<128>(gemm).items, clusters);

    if (state->encode == NULL)
        return cudaErrorNotSupported;
    if (narrow_waves < 2 * wide_waves)
        return launch_wide<128>(state, gemm, stream);
    return launch_wide<256>(state, gemm, stream);
}
