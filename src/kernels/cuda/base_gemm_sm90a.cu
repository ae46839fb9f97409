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
#include "kernels/cuda/base_gemm_wide.cuh"

/* 1 where this object has the kernels for the GPU at hand. */
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__device__ int wide_is_built = 1;
#else
__device__ int wide_is_built = 0;
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <class W>
static __device__ __forceinline__ void multiply_all(wide_ring<W> at, const sp_cuda_gemm &g,
                                                    const wide_shape &s, int rank)
{
    const int clusters = (int)gridDim.x / W::BLOCKS;
    float sum[W::COLUMNS / 2];

    for (int item = (int)blockIdx.x / W::BLOCKS; item < s.items; item += clusters) {
        multiply_item<W>(sum, &at, s.k_stages);
        store_sums<W>(sum, g, find_place<W>(s, item, rank));
    }
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

template <class W>
static cudaError_t launch_wide(const base_gemm *state, int clusters, const sp_cuda_gemm *gemm,
                               cudaStream_t stream)
{
    wide_shape shape = shape_of<W>(gemm);
    wide_maps maps = {};
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = config_of<W>(min(shape.items, clusters), attributes, stream);

    if (!make_maps<W>(state, &maps, gemm, shape.x_box))
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

/* `ns`: nanoseconds of 64 k of a tile, as WIDE_128_NS. */
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

static constexpr wide_kind kinds[SP_CUDA_GEMM_SHAPES] = {
    kind_of<wide<64, 64, 1, 4, 2>>(230), kind_of<wide<64, 64, 1, 2, 2>>(230),
    kind_of<wide<64, 32, 1, 2, 4>>(165), kind_of<wide<128, 64, 1, 2, 2>>(310),
    kind_of<wide_128>(WIDE_128_NS),      kind_of<wide_256>(WIDE_256_NS),
};

static_assert(kinds[SP_CUDA_GEMM_SHAPES - 2].shape == shape_of<wide_128> &&
                  kinds[SP_CUDA_GEMM_SHAPES - 1].shape == shape_of<wide_256>,
              "the last forms fold deltas in");

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

cudaError_t sp_cuda_gemm_wide(const base_gemm *state, int kind, const sp_cuda_gemm *gemm,
                              cudaStream_t stream)
{
    if (state->encode == NULL)
        return cudaErrorNotSupported;
    if (kind < 0)
        kind = choose_kind(kinds, state->clusters, gemm);
    return kind < 0 ? cudaErrorNotSupported
                    : kinds[kind].launch(state, state->clusters[kind], gemm, stream);
}
