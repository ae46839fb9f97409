/*
 * moe_gemm.cu: y[row, n] = x[row, :] · w[expert of the row][n, :] for up to two maps that share x,
 * by the order of sp_cuda_gemm.
 *
 * A block takes ROWS rows of an item, those of one expert, by COLUMNS columns of one map, over all
 * of k in stages of 64: a ring filled by cp.async, read by ldmatrix, 16-byte pieces in the order
 * piece ^ (row % 8). x is the M side of the mma, w its N side; warps without rows multiply nothing.
 * Grid (columns of all maps, the most items that the rows can need): blocks beyond the items exit.
 * Rows are gathered from x and scattered to y, so nothing is permuted before or after. With few
 * rows for each expert bound by the bytes of w: items of 16 rows have narrow tiles, of which
 * several are resident on a multiprocessor and keep enough of w in flight. With many rows bound by
 * what L2 delivers: items of 192 rows have the largest tiles, and w is read once for each expert
 * that has no more rows.
 */
#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ops_cuda.h"

#define STAGE_K   64
#define PIECES    (STAGE_K / 8)
#define ROW_BYTES (STAGE_K * 2)

/* A tile of ROWS by COLUMNS, its warps WARP_ROWS by WARP_COLUMNS of them. */
template <int ROWS_, int COLUMNS_, int WARP_ROWS_, int WARP_COLUMNS_, int STAGES_, int RESIDENT_>
struct expert_tile {
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, STAGES = STAGES_, RESIDENT = RESIDENT_;
    static constexpr int WARP_ROWS = WARP_ROWS_, WARP_COLUMNS = WARP_COLUMNS_;
    static constexpr int WARPS_WIDE = COLUMNS / WARP_COLUMNS;
    static constexpr int WARPS = ROWS / WARP_ROWS * WARPS_WIDE;
    static constexpr int THREADS = WARPS * SP_WARP;
    static constexpr int STAGE_BYTES = (ROWS + COLUMNS) * ROW_BYTES;
    static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES;
    static constexpr int M = WARP_ROWS / 16, N = WARP_COLUMNS / 8;
    static constexpr int X_COPIES = ROWS * PIECES / THREADS, W_COPIES = COLUMNS * PIECES / THREADS;

    static_assert(N % 2 == 0, "ldmatrix loads 16 columns");
    static_assert(X_COPIES >= 1 && W_COPIES >= 1, "each thread copies whole pieces");
};

typedef struct gemm_shape {
    int end;   /* tiles of columns of the first map */
    int tiles; /* of rows, in an item */
    int k_stages;
} gemm_shape;

/* Where this thread copies from: rows THREADS / PIECES apart, one piece of each. */
template <class T> struct gemm_source {
    const uint16_t *x[T::X_COPIES], *w[T::W_COPIES]; /* NULL: no such row */
};

template <class T>
static __device__ __forceinline__ gemm_source<T> source_of(const sp_cuda_expert_gemm &g,
                                                           const sp_cuda_expert_output &out,
                                                           const sp_cuda_item &item, int64_t first,
                                                           int n0)
{
    const int step = T::THREADS / PIECES;
    int row = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
    const uint16_t *w = (const uint16_t *)out.w[item.expert] + piece * 8;
    const int32_t *rows = (g.x_by_token ? g.items.token : g.items.row) + first;
    gemm_source<T> from;

#pragma unroll
    for (int i = 0; i < T::X_COPIES; i++)
        from.x[i] = row + i * step < item.count
                        ? (const uint16_t *)g.x + rows[row + i * step] * g.x_stride + piece * 8
                        : NULL;
#pragma unroll
    for (int i = 0; i < T::W_COPIES; i++)
        from.w[i] = n0 + row + i * step < out.n ? w + (int64_t)(n0 + row + i * step) * g.k : NULL;
    return from;
}

/* A stage; elements beyond k are zeros, rows that are not there stay what they are. */
template <class T>
static __device__ __forceinline__ void copy_stage(uint32_t to, const gemm_source<T> &from, int k0,
                                                  int k)
{
    const int step = T::THREADS / PIECES;
    int row = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
    bool valid = k0 + piece * 8 < k;

#pragma unroll
    for (int i = 0; i < T::X_COPIES; i++)
        if (from.x[i] != NULL)
            copy_async_if(to + (row + i * step) * ROW_BYTES +
                              ((piece ^ ((row + i * step) & 7)) << 4),
                          from.x[i] + k0, valid);
#pragma unroll
    for (int i = 0; i < T::W_COPIES; i++)
        if (from.w[i] != NULL)
            copy_async_if(to + (T::ROWS + row + i * step) * ROW_BYTES +
                              ((piece ^ ((row + i * step) & 7)) << 4),
                          from.w[i] + k0, valid);
}

/* One stage for this warp. */
template <class T>
static __device__ __forceinline__ void multiply_stage(float (&sum)[T::M][T::N][4], uint32_t stage)
{
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, in = lane & 7, matrix = lane >> 3;
    uint32_t x = stage + (warp / T::WARPS_WIDE * T::WARP_ROWS + (matrix & 1) * 8 + in) * ROW_BYTES;
    uint32_t w =
        stage +
        (T::ROWS + warp % T::WARPS_WIDE * T::WARP_COLUMNS + (matrix >> 1) * 8 + in) * ROW_BYTES;

#pragma unroll
    for (int step = 0; step < STAGE_K / 16; step++) {
        uint4 b[T::N / 2];

#pragma unroll
        for (int j = 0; j < T::N / 2; j++)
            b[j] = load_matrices(w + j * 16 * ROW_BYTES + (((2 * step + (matrix & 1)) ^ in) << 4));
#pragma unroll
        for (int i = 0; i < T::M; i++) {
            uint4 a =
                load_matrices(x + i * 16 * ROW_BYTES + (((2 * step + (matrix >> 1)) ^ in) << 4));

#pragma unroll
            for (int j = 0; j < T::N / 2; j++) {
                mma<0>(sum[i][2 * j], a.x, a.y, a.z, a.w, b[j].x, b[j].y);
                mma<0>(sum[i][2 * j + 1], a.x, a.y, a.z, a.w, b[j].z, b[j].w);
            }
        }
    }
}

static __device__ __forceinline__ void store_pair(uint16_t *y, int n, int end, bool pairs,
                                                  float low, float high)
{
    if (pairs && n + 1 < end) {
        *(uint32_t *)(y + n) = narrow_two<0>(low, high);
        return;
    }
    if (n < end)
        y[n] = narrow<0>(low);
    if (n + 1 < end)
        y[n + 1] = narrow<0>(high);
}

template <class T>
static __device__ __forceinline__ void store_sums(const float (&sum)[T::M][T::N][4],
                                                  const sp_cuda_expert_gemm &g,
                                                  const sp_cuda_expert_output &out, int count,
                                                  int64_t first, int n0)
{
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int row0 = warp / T::WARPS_WIDE * T::WARP_ROWS + lane / 4;
    int column0 = n0 + warp % T::WARPS_WIDE * T::WARP_COLUMNS + lane % 4 * 2;
    bool pairs = out.y_stride % 2 == 0 && (uintptr_t)out.y % 4 == 0;

#pragma unroll
    for (int i = 0; i < T::M; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = row0 + i * 16 + half * 8;
            uint16_t *y;

            if (row >= count)
                continue;
            y = (uint16_t *)out.y + g.items.row[first + row] * out.y_stride;
#pragma unroll
            for (int j = 0; j < T::N; j++)
                store_pair(y, column0 + j * 8, out.n, pairs, sum[i][j][2 * half],
                           sum[i][j][2 * half + 1]);
        }
}

template <class T>
__global__ void __launch_bounds__(T::THREADS, T::RESIDENT)
    gemm_kernel(const __grid_constant__ sp_cuda_expert_gemm g, const __grid_constant__ gemm_shape s)
{
    extern __shared__ __align__(128) char memory[];
    uint32_t ring = shared_address(memory);
    int second = (int)blockIdx.x >= s.end, n0 = ((int)blockIdx.x - second * s.end) * T::COLUMNS;
    const sp_cuda_expert_output &out = g.outputs[second];
    int number = (int)blockIdx.y / s.tiles, row0 = (int)blockIdx.y % s.tiles * T::ROWS;
    int64_t first = (int64_t)number * g.items.item_rows + row0;
    int warp_row = (int)(threadIdx.x >> 5) / T::WARPS_WIDE * T::WARP_ROWS;
    float sum[T::M][T::N][4] = {};
    gemm_source<T> from;
    sp_cuda_item item;

    release_successor();
    wait_predecessor();
    if (number >= g.items.counts[0])
        return;
    item = g.items.item[number];
    item.count -= row0;
    if (item.count <= 0)
        return;
    from = source_of<T>(g, out, item, first, n0);
#pragma unroll
    for (int i = 0; i < T::STAGES - 1; i++) {
        if (i < s.k_stages)
            copy_stage<T>(ring + i * T::STAGE_BYTES, from, i * STAGE_K, g.k);
        copy_commit();
    }
    for (int i = 0; i < s.k_stages; i++) {
        int next = i + T::STAGES - 1;

        copy_wait<T::STAGES - 2>();
        __syncthreads();
        if (next < s.k_stages)
            copy_stage<T>(ring + next % T::STAGES * T::STAGE_BYTES, from, next * STAGE_K, g.k);
        copy_commit();
        if (warp_row < item.count)
            multiply_stage<T>(sum, ring + i % T::STAGES * T::STAGE_BYTES);
    }
    store_sums<T>(sum, g, out, item.count, first, n0);
}

/* ---- launch -------------------------------------------------------------------------------- */

typedef expert_tile<16, 64, 16, 16, 5, 4> tile_16;
typedef expert_tile<32, 64, 32, 16, 4, 4> tile_32;
typedef expert_tile<64, 128, 32, 32, 3, 2> tile_64;
typedef expert_tile<192, 192, 64, 48, 4, 1> tile_192;

template <class T> static cudaError_t launch(const sp_cuda_expert_gemm *gemm, cudaStream_t stream)
{
    gemm_shape shape = {sp_cuda_ceil(gemm->outputs[0].n, T::COLUMNS),
                        sp_cuda_ceil(gemm->items.item_rows, T::ROWS),
                        sp_cuda_ceil(gemm->k, STAGE_K)};
    int columns =
        shape.end + (gemm->n_outputs > 1 ? sp_cuda_ceil(gemm->outputs[1].n, T::COLUMNS) : 0);
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config =
        sp_cuda_overlapping(dim3((unsigned)columns, (unsigned)(gemm->items.bound * shape.tiles)),
                            T::THREADS, T::SHARED_BYTES, &overlap, false, stream);

    return cudaLaunchKernelEx(&config, gemm_kernel<T>, *gemm, shape);
}

template <class T> static cudaError_t allow(cudaError_t before)
{
    return before != cudaSuccess
               ? before
               : cudaFuncSetAttribute(gemm_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      T::SHARED_BYTES);
}

/* The largest tile has more shared memory than some GPUs. */
static bool has_largest(int gpu)
{
    int bytes = 0;

    return cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, gpu) ==
               cudaSuccess &&
           bytes >= tile_192::SHARED_BYTES;
}

cudaError_t sp_cuda_expert_gemm_init(int gpu)
{
    cudaError_t code = allow<tile_16>(allow<tile_32>(allow<tile_64>(cudaSuccess)));

    if (has_largest(gpu))
        code = allow<tile_192>(code);
    return code == cudaSuccess ? sp_cuda_expert_gemm_wide_init(gpu) : code;
}

static bool is_aligned(const sp_cuda_expert_gemm *gemm)
{
    return gemm->k % 8 == 0 && gemm->x_stride % 8 == 0 && (uintptr_t)gemm->x % 16 == 0;
}

extern "C" int sp_cuda_multiply_experts(int gpu, const sp_cuda_expert_gemm *gemm, void *stream)
{
    cudaStream_t on = (cudaStream_t)stream;
    sp_cuda_current current(gpu);
    cudaError_t code;

    if (current.code != cudaSuccess || gemm->items.bound == 0)
        return (int)current.code;
    if (!is_aligned(gemm) || gemm->n_outputs < 1 || gemm->n_outputs > SP_CUDA_EXPERT_OUTPUTS_MAX ||
        (int64_t)gemm->items.bound * sp_cuda_ceil(gemm->items.item_rows, 64) > SP_CUDA_ROWS_MAX - 1)
        return (int)cudaErrorInvalidValue;
    switch (gemm->items.item_rows) {
    case 16:
        return (int)launch<tile_16>(gemm, on);
    case 32:
        return (int)launch<tile_32>(gemm, on);
    case 64:
    case 128:
        return (int)launch<tile_64>(gemm, on);
    case SP_CUDA_EXPERT_ROWS_MAX:
        code = sp_cuda_expert_gemm_wide(gpu, gemm, on);
        if (code != cudaErrorNotSupported)
            return (int)code;
        return (int)(has_largest(gpu) ? launch<tile_192>(gemm, on) : launch<tile_64>(gemm, on));
    default:
        return (int)cudaErrorInvalidValue;
    }
}
