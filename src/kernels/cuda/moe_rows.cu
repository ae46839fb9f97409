/*
 * moe_rows.cu: what the base does to whole rows around its experts.
 *
 *     route: the top_k experts of a row and their weights
 *     sum:   y[row] = T(Σ weight[k] · x[row, k]), one fused step for each k, ascending; deltas of x
 *            added first
 *     gated: y = T(fma(1 / (1 + e^-gate), x, y))
 *
 * Route: a warp for each row; lane l has experts l, l + 32 and so on in registers, and a step finds
 * the best of those that are left, by a butterfly. The sum over all experts is a lane's own in
 * ascending order, then a butterfly; that over the chosen ones is in their order. Sum and gated:
 * pieces of 8 elements, 16 bytes.
 */
#include "kernels/cuda/fold.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ops_cuda.h"
#include "kernels/cuda/ptx.cuh"

#define PIECE         8 /* elements */
#define ROUTE_THREADS 128
#define ROW_THREADS   256

/* ---- route --------------------------------------------------------------------------------- */

/* An order of all floats, NaN above the others; equal ones (+0 and -0 too) have equal keys. */
static __device__ __forceinline__ uint32_t key_of(float v)
{
    uint32_t bits = __float_as_uint(v == 0.0f ? 0.0f : v);

    if (v != v)
        return 0xffffffffu;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* The largest key of the warp, the lower expert of equal ones. */
static __device__ __forceinline__ uint64_t best_of_warp(uint64_t best)
{
#pragma unroll
    for (int by = SP_WARP / 2; by > 0; by /= 2) {
        uint64_t other = __shfl_xor_sync(~0u, best, by);

        best = other > best ? other : best;
    }
    return best;
}

/* EACH: experts of a lane. A taken one has the key 0, which no number has: that of -inf is above
 * it. */
template <int EACH> static __device__ __forceinline__ uint64_t take_best(uint32_t (&key)[EACH])
{
    int lane = threadIdx.x & 31, expert;
    uint64_t best = 0;

#pragma unroll
    for (int i = 0; i < EACH; i++) {
        uint64_t own = (uint64_t)key[i] << 32 | (uint32_t) ~(lane + i * SP_WARP);

        best = own > best ? own : best;
    }
    best = best_of_warp(best);
    expert = (int)~(uint32_t)best;
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (lane + i * SP_WARP == expert)
            key[i] = 0;
    return best;
}

static __device__ __forceinline__ float sum_warp(float sum)
{
#pragma unroll
    for (int by = SP_WARP / 2; by > 0; by /= 2)
        sum += __shfl_xor_sync(~0u, sum, by);
    return sum;
}

template <int EACH>
static __device__ __forceinline__ void route_row(const sp_cuda_route &r, int row)
{
    int lane = threadIdx.x & 31;
    const float *logits = r.logits + row * r.stride;
    float own[EACH], best = 0.0f, total = 0.0f, mine = 0.0f;
    int chosen = 0;
    uint32_t key[EACH];

#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int expert = lane + i * SP_WARP;

        own[i] = expert < r.experts ? logits[expert] : 0.0f;
        key[i] = expert < r.experts ? key_of(own[i]) : 0;
    }
    for (int k = 0; k < r.top_k; k++) {
        int expert = (int)~(uint32_t)take_best<EACH>(key);
        float weight = logits[expert];

        if (k == 0)
            best = weight;
        weight = expf(weight - best);
        total += weight;
        if (lane == k) {
            mine = weight;
            chosen = expert;
        }
    }
    if (!r.normalised) {
        total = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            total += lane + i * SP_WARP < r.experts ? expf(own[i] - best) : 0.0f;
        total = sum_warp(total);
    }
    if (lane < r.top_k) {
        r.expert[(int64_t)row * r.top_k + lane] = chosen;
        r.weight[(int64_t)row * r.top_k + lane] = mine / total;
    }
}

template <int EACH>
__global__ void __launch_bounds__(ROUTE_THREADS) route_kernel(const sp_cuda_route r)
{
    int row = (int)(blockIdx.x * (ROUTE_THREADS / SP_WARP) + threadIdx.x / SP_WARP);
    int lane = threadIdx.x & 31;

    release_successor();
    wait_predecessor();
    if (row >= r.rows)
        return;
    if (r.position == NULL || r.position[row] >= 0) {
        route_row<EACH>(r, row);
    } else if (lane < r.top_k) {
        r.expert[(int64_t)row * r.top_k + lane] = -1;
        r.weight[(int64_t)row * r.top_k + lane] = 0.0f;
    }
}

extern "C" int sp_cuda_route_rows(int gpu, const sp_cuda_route *route, void *stream)
{
    int each = sp_cuda_ceil(route->experts, SP_WARP);
    sp_cuda_current current(gpu);
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config;

    if (current.code != cudaSuccess || route->rows == 0)
        return (int)current.code;
    if (route->experts > SP_CUDA_EXPERTS_MAX || route->top_k < 1 || route->top_k > route->experts ||
        route->top_k > SP_CUDA_TOP_MAX)
        return (int)cudaErrorInvalidValue;
    config = sp_cuda_overlapping(dim3((unsigned)sp_cuda_ceil(route->rows, ROUTE_THREADS / SP_WARP)),
                                 ROUTE_THREADS, 0, &overlap, false, (cudaStream_t)stream);
    return (int)cudaLaunchKernelEx(&config,
                                   each <= 4    ? route_kernel<4>
                                   : each <= 8  ? route_kernel<8>
                                   : each <= 16 ? route_kernel<16>
                                                : route_kernel<32>,
                                   *route);
}

/* ---- sum ----------------------------------------------------------------------------------- */

union piece {
    uint4 all;
    uint32_t two[4];
    uint16_t one[PIECE];
};

/* The first k_end - k of 8 elements. With VEC all are in the row and the address is aligned. */
template <int VEC>
static __device__ __forceinline__ void store_piece(uint16_t *to, int k, int k_end, piece v)
{
    if (VEC) {
        *(uint4 *)(to + k) = v.all;
        return;
    }
#pragma unroll
    for (int i = 0; i < PIECE; i++)
        if (k + i < k_end)
            to[k + i] = v.one[i];
}

/* sum = fma(weight, x, sum) for each of 8 elements. */
static __device__ __forceinline__ void add_piece(float (&sum)[PIECE], float weight, piece x)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 v = widen_two<0>(x.two[i]);

        sum[2 * i] = __fmaf_rn(weight, v.x, sum[2 * i]);
        sum[2 * i + 1] = __fmaf_rn(weight, v.y, sum[2 * i + 1]);
    }
}

static __device__ __forceinline__ piece narrow_piece(const float (&sum)[PIECE])
{
    piece out;

#pragma unroll
    for (int i = 0; i < 4; i++)
        out.two[i] = narrow_two<0>(sum[2 * i], sum[2 * i + 1]);
    return out;
}

template <int VEC>
__global__ void __launch_bounds__(ROW_THREADS) sum_kernel(const sp_cuda_expert_sum s)
{
    int64_t first = (int64_t)blockIdx.y * s.top_k;
    int k = (int)(blockIdx.x * ROW_THREADS + threadIdx.x) * PIECE;
    const uint16_t *x = (const uint16_t *)s.x + first * s.width;
    float sum[PIECE] = {};

    release_successor();
    wait_predecessor();
    if (k >= s.width)
        return;
#pragma unroll 4
    for (int i = 0; i < s.top_k; i++)
        if (s.expert[first + i] >= 0)
            add_piece(sum, s.weight[first + i],
                      {load_eight_of_row<VEC>(x + (int64_t)i * s.width, k, s.width)});
    store_piece<VEC>((uint16_t *)s.y + (int64_t)blockIdx.y * s.width, k, s.width,
                     narrow_piece(sum));
}

/* The same of x with its deltas. */
__global__ void __launch_bounds__(ROW_THREADS)
    sum_apart_kernel(const __grid_constant__ sp_cuda_expert_sum s)
{
    int64_t first = (int64_t)blockIdx.y * s.top_k;
    int k = (int)(blockIdx.x * ROW_THREADS + threadIdx.x) * PIECE;
    const uint16_t *x = (const uint16_t *)s.x + first * s.width + k;
    const uint16_t *delta = (const uint16_t *)s.delta.delta + first * s.width + k;
    float sum[PIECE] = {};

    release_successor();
    wait_predecessor();
    if (k >= s.width)
        return;
#pragma unroll 4
    for (int i = 0; i < s.top_k; i++) {
        piece own = {*(const uint4 *)(x + (int64_t)i * s.width)};
        uint4 change = *(const uint4 *)(delta + (int64_t)i * s.width);
        float scale = s.delta.scale[first + i];

        if (scale != 0.0f)
            own.all = fold_eight<0>(own.all, change, scale);
        if (s.expert[first + i] >= 0)
            add_piece(sum, s.weight[first + i], own);
    }
    store_piece<1>((uint16_t *)s.y + (int64_t)blockIdx.y * s.width, k, s.width, narrow_piece(sum));
}

static bool aligned(const void *at)
{
    return (uintptr_t)at % 16 == 0;
}

/* A thread for each piece of each row. */
static dim3 grid_of(int32_t rows, int32_t width)
{
    return dim3((unsigned)sp_cuda_ceil(sp_cuda_ceil(width, PIECE), ROW_THREADS), (unsigned)rows);
}

extern "C" int sp_cuda_sum_experts(int gpu, const sp_cuda_expert_sum *sum, void *stream)
{
    bool vec = sum->width % PIECE == 0 && aligned(sum->x) && aligned(sum->y);
    sp_cuda_current current(gpu);
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config;

    if (current.code != cudaSuccess || sum->rows == 0)
        return (int)current.code;
    if (sum->rows >= SP_CUDA_ROWS_MAX || (sum->delta.delta != NULL && !vec))
        return (int)cudaErrorInvalidValue;
    config = sp_cuda_overlapping(grid_of(sum->rows, sum->width), ROW_THREADS, 0, &overlap, false,
                                 (cudaStream_t)stream);
    if (sum->delta.delta != NULL)
        return (int)cudaLaunchKernelEx(&config, sum_apart_kernel, *sum);
    return (int)cudaLaunchKernelEx(&config, vec ? sum_kernel<1> : sum_kernel<0>, *sum);
}

/* ---- gated --------------------------------------------------------------------------------- */

template <int VEC>
__global__ void __launch_bounds__(ROW_THREADS) gated_kernel(const sp_cuda_add_gated g)
{
    int64_t row = blockIdx.y;
    int k = (int)(blockIdx.x * ROW_THREADS + threadIdx.x) * PIECE;
    uint16_t *y = (uint16_t *)g.y + row * g.width;
    float sum[PIECE];
    piece before;

    release_successor();
    wait_predecessor();
    if (k >= g.width)
        return;
    before.all = load_eight_of_row<VEC>(y, k, g.width);
#pragma unroll
    for (int i = 0; i < PIECE; i++)
        sum[i] = widen<0>(before.one[i]);
    add_piece(sum, 1.0f / (1.0f + expf(-g.gate[row * g.gate_stride])),
              {load_eight_of_row<VEC>((const uint16_t *)g.x + row * g.width, k, g.width)});
    store_piece<VEC>(y, k, g.width, narrow_piece(sum));
}

extern "C" int sp_cuda_add_gated_rows(int gpu, const sp_cuda_add_gated *gated, void *stream)
{
    bool vec = gated->width % PIECE == 0 && aligned(gated->x) && aligned(gated->y);
    sp_cuda_current current(gpu);
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config;

    if (current.code != cudaSuccess || gated->rows == 0)
        return (int)current.code;
    if (gated->rows >= SP_CUDA_ROWS_MAX)
        return (int)cudaErrorInvalidValue;
    config = sp_cuda_overlapping(grid_of(gated->rows, gated->width), ROW_THREADS, 0, &overlap,
                                 false, (cudaStream_t)stream);
    return (int)cudaLaunchKernelEx(&config, vec ? gated_kernel<1> : gated_kernel<0>, *gated);
}
