/*
 * base_gemm_tile.cu: y[row, n] = x[row, :] · w[n, :] for any number of rows, by the order of
 * sp_cuda_gemm, on every GPU.
 *
 * A block takes a tile of SIDE rows by SIDE columns, eight warps in two rows of four, over all of
 * k in stages of 64: a ring filled by cp.async, read by ldmatrix, 16-byte pieces in the order
 * piece ^ (row % 8). x is the M side of the mma, w its N side: the products are the same. Grid: one
 * block per tile, in bands of 16 tiles of rows, so that the blocks which run together share rows
 * and columns in L2. Tiles of 64 where those of 128 would leave multiprocessors idle.
 */
#include "kernels/cuda/base_gemm.cuh"

#define STAGE_K   64
#define PIECES    (STAGE_K / 8)
#define ROW_BYTES (STAGE_K * 2)
#define STAGES    3
#define THREADS   256
#define BAND      16 /* tiles of rows */

typedef struct tile_shape {
    gemm_columns columns;
    int row_tiles, k_stages;
} tile_shape;

/* A block's place: its rows, and columns of one output. */
typedef struct tile_place {
    int row0, output, n0;
} tile_place;

template <int SIDE> static __device__ __forceinline__ tile_place find_tile(const tile_shape &s)
{
    int block = (int)blockIdx.x, in_band = BAND * s.columns.tiles, band = block / in_band;
    int rows = min(BAND, s.row_tiles - band * BAND), at = block - band * in_band;
    gemm_place place = place_of(s.columns, at / rows);

    return {(band * BAND + at % rows) * SIDE, place.output, place.tile * SIDE};
}

/* Rows `first` and up of a matrix with `rows` rows; elements beyond k are zeros, rows beyond the
 * last stay what they are. */
template <int SIDE>
static __device__ __forceinline__ void copy_rows(uint32_t to, const uint16_t *from, int64_t stride,
                                                 int first, int rows, int k0, int k)
{
#pragma unroll
    for (int p = (int)threadIdx.x; p < SIDE * PIECES; p += THREADS) {
        int row = p / PIECES, piece = p % PIECES;

        if (first + row < rows)
            copy_async_if(to + row * ROW_BYTES + ((piece ^ (row & 7)) << 4),
                          from + (first + row) * stride + k0 + piece * 8, k0 + piece * 8 < k);
    }
}

template <int SIDE>
static __device__ __forceinline__ void copy_stage(uint32_t to, const sp_cuda_gemm &g,
                                                  const tile_place &at, int k0)
{
    const sp_cuda_gemm_output &out = g.outputs[at.output];

    copy_rows<SIDE>(to, (const uint16_t *)g.x, g.x_stride, at.row0, g.rows, k0, g.k);
    copy_rows<SIDE>(to + SIDE * ROW_BYTES, (const uint16_t *)out.w, g.k, at.n0, out.n, k0, g.k);
}

/* One stage for a warp's SIDE / 2 rows by SIDE / 4 columns. */
template <int SIDE>
static __device__ __forceinline__ void multiply(float (*sum)[SIDE / 32][4], uint32_t stage)
{
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, in = lane & 7, matrix = lane >> 3;
    uint32_t x = stage + (warp / 4 * (SIDE / 2) + (matrix & 1) * 8 + in) * ROW_BYTES;
    uint32_t w = stage + (SIDE + warp % 4 * (SIDE / 4) + (matrix >> 1) * 8 + in) * ROW_BYTES;

#pragma unroll
    for (int step = 0; step < STAGE_K / 16; step++) {
        uint4 b[SIDE / 64];

#pragma unroll
        for (int j = 0; j < SIDE / 64; j++)
            b[j] = load_matrices(w + j * 16 * ROW_BYTES + (((2 * step + (matrix & 1)) ^ in) << 4));
#pragma unroll
        for (int i = 0; i < SIDE / 32; i++) {
            uint4 a =
                load_matrices(x + i * 16 * ROW_BYTES + (((2 * step + (matrix >> 1)) ^ in) << 4));

#pragma unroll
            for (int j = 0; j < SIDE / 64; j++) {
                mma<0>(sum[i][2 * j], a.x, a.y, a.z, a.w, b[j].x, b[j].y);
                mma<0>(sum[i][2 * j + 1], a.x, a.y, a.z, a.w, b[j].z, b[j].w);
            }
        }
    }
}

template <int SIDE>
static __device__ __forceinline__ void store_tile(float (*sum)[SIDE / 32][4], const sp_cuda_gemm &g,
                                                  const tile_place &at)
{
    const sp_cuda_gemm_output &out = g.outputs[at.output];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int row0 = at.row0 + warp / 4 * (SIDE / 2) + lane / 4;
    int n0 = at.n0 + warp % 4 * (SIDE / 4) + lane % 4 * 2;
    bool pairs = stores_pairs(out);

#pragma unroll
    for (int i = 0; i < SIDE / 32; i++)
#pragma unroll
        for (int j = 0; j < SIDE / 32; j++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                if (row0 + i * 16 + half * 8 < g.rows)
                    store_two(out, pairs, row0 + i * 16 + half * 8, n0 + j * 8, sum[i][j][2 * half],
                              sum[i][j][2 * half + 1]);
}

template <int SIDE>
__global__ void __launch_bounds__(THREADS, 2)
    tile_kernel(const __grid_constant__ sp_cuda_gemm g, const __grid_constant__ tile_shape s)
{
    extern __shared__ __align__(128) char memory[];
    const int stage_bytes = 2 * SIDE * ROW_BYTES;
    uint32_t ring = shared_address(memory);
    tile_place at = find_tile<SIDE>(s);
    float sum[SIDE / 32][SIDE / 32][4] = {};

    release_successor();
    wait_predecessor();
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < s.k_stages)
            copy_stage<SIDE>(ring + i * stage_bytes, g, at, i * STAGE_K);
        copy_commit();
    }
    for (int i = 0; i < s.k_stages; i++) {
        int next = i + STAGES - 1;

        copy_wait<STAGES - 2>();
        __syncthreads();
        if (next < s.k_stages)
            copy_stage<SIDE>(ring + next % STAGES * stage_bytes, g, at, next * STAGE_K);
        copy_commit();
        multiply<SIDE>(sum, ring + i % STAGES * stage_bytes);
    }
    store_tile<SIDE>(sum, g, at);
}

/* ---- launch -------------------------------------------------------------------------------- */

template <int SIDE> static constexpr int shared_of(void)
{
    return STAGES * 2 * SIDE * ROW_BYTES;
}

cudaError_t sp_cuda_gemm_tiles_init(int shared_bytes)
{
    cudaError_t code = cudaFuncSetAttribute(
        tile_kernel<64>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_of<64>());

    if (code != cudaSuccess || shared_bytes < shared_of<128>())
        return code;
    return cudaFuncSetAttribute(tile_kernel<128>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                shared_of<128>());
}

template <int SIDE> static cudaError_t launch_tiles(const sp_cuda_gemm *gemm, cudaStream_t stream)
{
    tile_shape shape = {columns_of(gemm, SIDE), sp_cuda_ceil(gemm->rows, SIDE),
                        sp_cuda_ceil(gemm->k, STAGE_K)};
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config =
        sp_cuda_overlapping(dim3((unsigned)(shape.columns.tiles * shape.row_tiles)), THREADS,
                            shared_of<SIDE>(), &overlap, false, stream);

    return cudaLaunchKernelEx(&config, tile_kernel<SIDE>, *gemm, shape);
}

cudaError_t sp_cuda_gemm_tiles(const base_gemm *state, const sp_cuda_gemm *gemm,
                               cudaStream_t stream)
{
    int64_t tiles = (int64_t)columns_of(gemm, 128).tiles * sp_cuda_ceil(gemm->rows, 128);

    if (tiles < state->multiprocessors || state->shared_bytes < shared_of<128>())
        return launch_tiles<64>(gemm, stream);
    return launch_tiles<128>(gemm, stream);
}
