/*
 * base_rows.cu: what the base does to whole rows of bf16 between its linears.
 *
 *     gather: y[row] = table[token[row]], zeros where there is no row
 *     pick:   to[i] = x[index[i]], zeros where the index is -1
 *     norm:   x = T(x + add); y = T(x · (1 / sqrt(mean(x²) + eps)) · (weight + offset))
 *     silu:   gate = T(gate / (1 + e^-gate) · up), deltas of both added first
 *     gate:   y = T(y / (1 + e^-gate)), of heads; gates come after the heads of q
 *
 * A piece is 8 elements, 16 bytes. Gather, pick and norm: one block per row; thread t has the
 * pieces t, t + threads and so on, and where a row is short enough it stays in registers. The sum
 * of norm: the squares of a piece in pairs, a thread's pieces in order, the lanes of a warp by a
 * butterfly, 16 warps in pairs, the missing ones as +0; threads depend on the width alone. Silu:
 * one piece per thread, or four where there are many. Gate: one piece per thread. Bound by the
 * bytes, or, for few rows, by the latency of one load and one reduction.
 */
#include "kernels/cuda/fold.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ops_cuda.h"
#include "kernels/cuda/ptx.cuh"

#define PIECE           8   /* elements */
#define COPY_THREADS    256 /* at most */
#define NORM_THREADS    512 /* at most */
#define NORM_WARPS      (NORM_THREADS / SP_WARP)
#define SILU_THREADS    256
#define SILU_FEW        (1 << 17) /* pieces up to which a thread has one */
#define SILU_EACH       4
#define NEGATIVE_LOG2_E (-1.442695041f)

static_assert(NORM_WARPS == 16, "the warps are added in pairs");

/* The first k_end - k of 8 elements. With VEC all are in the row and the address is aligned. */
template <int VEC>
static __device__ __forceinline__ void store_eight(uint16_t *to, int k, int k_end, uint4 v)
{
    union {
        uint4 all;
        uint16_t one[PIECE];
    } u;

    if (VEC) {
        *(uint4 *)(to + k) = v;
        return;
    }
    u.all = v;
#pragma unroll
    for (int i = 0; i < PIECE; i++)
        if (k + i < k_end)
            to[k + i] = u.one[i];
}

static bool aligned(const void *at)
{
    return (uintptr_t)at % 16 == 0;
}

static int whole_warps(int threads)
{
    return (threads + SP_WARP - 1) / SP_WARP * SP_WARP;
}

/* ---- gather, pick -------------------------------------------------------------------------- */

typedef struct copy_rows {
    const int32_t *index;    /* [rows] row of `from`; negative: zeros */
    const int32_t *position; /* [rows], or NULL; negative: zeros */
    const uint16_t *from;    /* stride from_stride */
    uint16_t *to;            /* [rows, width] dense */
    int64_t from_stride;
    int32_t width;
} copy_rows;

template <int VEC>
__global__ void __launch_bounds__(COPY_THREADS) copy_rows_kernel(const copy_rows c)
{
    int row = (int)blockIdx.x, index;
    uint16_t *to = c.to + (int64_t)row * c.width;
    const uint16_t *from;

    release_successor();
    wait_predecessor();
    index = c.index[row];
    if (c.position != NULL && c.position[row] < 0)
        index = -1;
    from = c.from + max(index, 0) * c.from_stride;
#pragma unroll 4
    for (int k = (int)threadIdx.x * PIECE; k < c.width; k += (int)blockDim.x * PIECE)
        store_eight<VEC>(to, k, c.width, load_eight_of_row<VEC>(from, k, index < 0 ? 0 : c.width));
}

static int launch_copy(int gpu, const copy_rows *copy, int32_t rows, cudaStream_t stream)
{
    int threads = min(COPY_THREADS, whole_warps((copy->width + PIECE - 1) / PIECE));
    bool vec = aligned(copy->from) && aligned(copy->to) && copy->from_stride % PIECE == 0 &&
               copy->width % PIECE == 0;
    sp_cuda_current current(gpu);
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config;

    if (current.code != cudaSuccess || rows == 0)
        return (int)current.code;
    config = sp_cuda_overlapping(dim3((unsigned)rows), threads, 0, &overlap, false, stream);
    return (int)(vec ? cudaLaunchKernelEx(&config, copy_rows_kernel<1>, *copy)
                     : cudaLaunchKernelEx(&config, copy_rows_kernel<0>, *copy));
}

extern "C" int sp_cuda_gather_rows(int gpu, const sp_cuda_gather *gather, void *stream)
{
    copy_rows copy = {gather->step.token,    gather->step.position, (const uint16_t *)gather->table,
                      (uint16_t *)gather->y, gather->width,         gather->width};

    return launch_copy(gpu, &copy, gather->step.rows, (cudaStream_t)stream);
}

extern "C" int sp_cuda_pick_rows(int gpu, const sp_cuda_pick *pick, void *stream)
{
    copy_rows copy = {pick->index,          NULL,           (const uint16_t *)pick->x,
                      (uint16_t *)pick->to, pick->x_stride, pick->width};

    return launch_copy(gpu, &copy, pick->rows, (cudaStream_t)stream);
}

/* ---- norm ---------------------------------------------------------------------------------- */

static __device__ __forceinline__ uint32_t add_two(uint32_t x, uint32_t y)
{
    float2 a = widen_two<0>(x), b = widen_two<0>(y);

    return narrow_two<0>(a.x + b.x, a.y + b.y);
}

static __device__ __forceinline__ float square_two(uint32_t x)
{
    float2 a = widen_two<0>(x);

    return a.x * a.x + a.y * a.y;
}

static __device__ __forceinline__ float square_eight(uint4 x)
{
    return (square_two(x.x) + square_two(x.y)) + (square_two(x.z) + square_two(x.w));
}

static __device__ __forceinline__ uint32_t scale_two(uint32_t x, float inverse, uint32_t weight,
                                                     float offset)
{
    float2 a = widen_two<0>(x), w = widen_two<0>(weight);

    return narrow_two<0>(a.x * inverse * (w.x + offset), a.y * inverse * (w.y + offset));
}

/* The piece of x from element k on, with what is added, stored where that changed it. */
template <int VEC>
static __device__ __forceinline__ uint4 take_piece(const sp_cuda_norm &n, int64_t row, int k)
{
    uint16_t *x = (uint16_t *)n.x + row * n.width;
    uint4 v = load_eight_of_row<VEC>(x, k, n.width), more;

    if (n.add == NULL || k >= n.width)
        return v;
    more = load_eight_of_row<VEC>((const uint16_t *)n.add + row * n.width, k, n.width);
    v = make_uint4(add_two(v.x, more.x), add_two(v.y, more.y), add_two(v.z, more.z),
                   add_two(v.w, more.w));
    store_eight<VEC>(x, k, n.width, v);
    return v;
}

template <int VEC>
static __device__ __forceinline__ void give_piece(const sp_cuda_norm &n, int64_t row, int k,
                                                  uint4 x, float inverse, uint4 weight)
{
    uint4 y = make_uint4(
        scale_two(x.x, inverse, weight.x, n.offset), scale_two(x.y, inverse, weight.y, n.offset),
        scale_two(x.z, inverse, weight.z, n.offset), scale_two(x.w, inverse, weight.w, n.offset));

    if (k < n.width)
        store_eight<VEC>((uint16_t *)n.y + row * n.width, k, n.width, y);
}

/* The sum over the block, in every thread. */
static __device__ __forceinline__ float sum_block(float sum)
{
    __shared__ float4 warps[NORM_WARPS / 4];
    int warp = (int)threadIdx.x / SP_WARP, lane = (int)threadIdx.x % SP_WARP;
    float4 a, b, c, d;

#pragma unroll
    for (int by = SP_WARP / 2; by > 0; by /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, by);
    if (lane == 0)
        ((float *)warps)[warp] = sum;
    if (warp == 0 && lane >= (int)blockDim.x / SP_WARP && lane < NORM_WARPS)
        ((float *)warps)[lane] = 0.0f;
    __syncthreads();
    a = warps[0], b = warps[1], c = warps[2], d = warps[3];
    return (((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w))) +
           (((c.x + c.y) + (c.z + c.w)) + ((d.x + d.y) + (d.z + d.w)));
}

static __device__ __forceinline__ float inverse_of(float sum, const sp_cuda_norm &n)
{
    return 1.0f / sqrtf(sum / (float)n.width + n.eps);
}

/* PIECES: of each thread, in registers. */
template <int PIECES, int VEC>
__global__ void __launch_bounds__(NORM_THREADS) norm_kernel(const sp_cuda_norm n)
{
    const uint16_t *weights = (const uint16_t *)n.weight;
    uint4 x[PIECES], weight[PIECES];
    float sum = 0.0f, inverse;

    release_successor();
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        int k = (int)(threadIdx.x + i * blockDim.x) * PIECE;

        weight[i] = load_eight_of_row<VEC>(weights, k, n.width);
    }
    wait_predecessor();
#pragma unroll
    for (int i = 0; i < PIECES; i++)
        x[i] = take_piece<VEC>(n, blockIdx.x, (int)(threadIdx.x + i * blockDim.x) * PIECE);
#pragma unroll
    for (int i = 0; i < PIECES; i++)
        sum += square_eight(x[i]);
    inverse = inverse_of(sum_block(sum), n);
#pragma unroll
    for (int i = 0; i < PIECES; i++)
        give_piece<VEC>(n, blockIdx.x, (int)(threadIdx.x + i * blockDim.x) * PIECE, x[i], inverse,
                        weight[i]);
}

/* Rows of any width, read twice. */
template <int VEC>
__global__ void __launch_bounds__(NORM_THREADS) norm_wide_kernel(const sp_cuda_norm n)
{
    const uint16_t *x = (const uint16_t *)n.x + (int64_t)blockIdx.x * n.width;
    float sum = 0.0f, inverse;

    release_successor();
    wait_predecessor();
    for (int k = (int)threadIdx.x * PIECE; k < n.width; k += (int)blockDim.x * PIECE)
        sum += square_eight(take_piece<VEC>(n, blockIdx.x, k));
    inverse = inverse_of(sum_block(sum), n);
    for (int k = (int)threadIdx.x * PIECE; k < n.width; k += (int)blockDim.x * PIECE)
        give_piece<VEC>(n, blockIdx.x, k, load_eight_of_row<VEC>(x, k, n.width), inverse,
                        load_eight_of_row<VEC>((const uint16_t *)n.weight, k, n.width));
}

/* Pieces of a thread: 1, 2 or 4; 0: more. The threads of a block follow. */
static int norm_pieces(int pieces)
{
    if (pieces <= NORM_THREADS / 2)
        return 1;
    if (pieces <= 2 * NORM_THREADS)
        return 2;
    return pieces <= 4 * NORM_THREADS ? 4 : 0;
}

template <int VEC>
static cudaError_t launch_norm(const cudaLaunchConfig_t *config, int each, const sp_cuda_norm &norm)
{
    switch (each) {
    case 1:
        return cudaLaunchKernelEx(config, norm_kernel<1, VEC>, norm);
    case 2:
        return cudaLaunchKernelEx(config, norm_kernel<2, VEC>, norm);
    case 4:
        return cudaLaunchKernelEx(config, norm_kernel<4, VEC>, norm);
    default:
        return cudaLaunchKernelEx(config, norm_wide_kernel<VEC>, norm);
    }
}

extern "C" int sp_cuda_norm_rows(int gpu, const sp_cuda_norm *norm, void *stream)
{
    int pieces = (norm->width + PIECE - 1) / PIECE, each = norm_pieces(pieces);
    int threads = each > 0 ? whole_warps((pieces + each - 1) / each) : NORM_THREADS;
    bool vec = norm->width % PIECE == 0 && aligned(norm->x) && aligned(norm->add) &&
               aligned(norm->weight) && aligned(norm->y);
    sp_cuda_current current(gpu);
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config;

    if (current.code != cudaSuccess || norm->rows == 0)
        return (int)current.code;
    config = sp_cuda_overlapping(dim3((unsigned)norm->rows), threads, 0, &overlap, false,
                                 (cudaStream_t)stream);
    return (int)(vec ? launch_norm<1>(&config, each, *norm) : launch_norm<0>(&config, each, *norm));
}

/* ---- silu ---------------------------------------------------------------------------------- */

/* The two approximations are of the hardware, within 2 ulp of FP32 each. */
static __device__ __forceinline__ float sigmoid_of(float g)
{
    float power, inverse;

    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(g * NEGATIVE_LOG2_E));
    asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
    return inverse;
}

static __device__ __forceinline__ float silu_of(float g)
{
    return g * sigmoid_of(g);
}

static __device__ __forceinline__ uint32_t silu_two(uint32_t gate, uint32_t up)
{
    float2 g = widen_two<0>(gate), u = widen_two<0>(up);

    return narrow_two<0>(silu_of(g.x) * u.x, silu_of(g.y) * u.y);
}

template <int EACH>
__global__ void __launch_bounds__(SILU_THREADS) silu_kernel(const sp_cuda_silu s, int64_t pieces)
{
    int64_t first = (int64_t)blockIdx.x * (SILU_THREADS * EACH) + threadIdx.x;
    uint4 *gate = (uint4 *)s.gate, g[EACH], u[EACH];
    const uint4 *up = (const uint4 *)s.up;

    release_successor();
    wait_predecessor();
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (first + i * SILU_THREADS < pieces) {
            g[i] = gate[first + i * SILU_THREADS];
            u[i] = up[first + i * SILU_THREADS];
        }
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (first + i * SILU_THREADS < pieces)
            gate[first + i * SILU_THREADS] =
                make_uint4(silu_two(g[i].x, u[i].x), silu_two(g[i].y, u[i].y),
                           silu_two(g[i].z, u[i].z), silu_two(g[i].w, u[i].w));
}

/* The same of gate and up with their deltas. All loads are in flight together: a delta that a row
 * does not have is read too. */
__global__ void __launch_bounds__(SILU_THREADS)
    silu_apart_kernel(const __grid_constant__ sp_cuda_silu s, int32_t pieces, int32_t row_pieces)
{
    int at = (int)(blockIdx.x * SILU_THREADS + threadIdx.x), row = at / row_pieces;
    uint4 g, u, gate_delta, up_delta;
    float gate_scale, up_scale;

    release_successor();
    wait_predecessor();
    if (at >= pieces)
        return;
    g = ((const uint4 *)s.gate)[at];
    u = ((const uint4 *)s.up)[at];
    gate_delta = ((const uint4 *)s.gate_delta.delta)[at];
    up_delta = ((const uint4 *)s.up_delta.delta)[at];
    gate_scale = s.gate_delta.scale[row];
    up_scale = s.up_delta.scale[row];
    if (gate_scale != 0.0f)
        g = fold_eight<0>(g, gate_delta, gate_scale);
    if (up_scale != 0.0f)
        u = fold_eight<0>(u, up_delta, up_scale);
    ((uint4 *)s.gate)[at] =
        make_uint4(silu_two(g.x, u.x), silu_two(g.y, u.y), silu_two(g.z, u.z), silu_two(g.w, u.w));
}

static cudaError_t launch_silu_apart(const sp_cuda_silu *silu, cudaStream_t stream)
{
    int64_t pieces = silu->n / PIECE;
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config =
        sp_cuda_overlapping(dim3((unsigned)((pieces + SILU_THREADS - 1) / SILU_THREADS)),
                            SILU_THREADS, 0, &overlap, false, stream);

    if (silu->width < PIECE || silu->width % PIECE != 0 || pieces > INT32_MAX - SILU_THREADS)
        return cudaErrorInvalidValue;
    return cudaLaunchKernelEx(&config, silu_apart_kernel, *silu, (int32_t)pieces,
                              silu->width / PIECE);
}

extern "C" int sp_cuda_silu_mul(int gpu, const sp_cuda_silu *silu, void *stream)
{
    int64_t pieces = silu->n / PIECE, each = pieces > SILU_FEW ? SILU_EACH : 1;
    int64_t blocks = (pieces + SILU_THREADS * each - 1) / (SILU_THREADS * each);
    sp_cuda_current current(gpu);
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config;

    if (current.code != cudaSuccess || blocks == 0)
        return (int)current.code;
    if (silu->gate_delta.delta != NULL)
        return (int)launch_silu_apart(silu, (cudaStream_t)stream);
    config = sp_cuda_overlapping(dim3((unsigned)blocks), SILU_THREADS, 0, &overlap, false,
                                 (cudaStream_t)stream);
    return (int)(each == 1 ? cudaLaunchKernelEx(&config, silu_kernel<1>, *silu, pieces)
                           : cudaLaunchKernelEx(&config, silu_kernel<SILU_EACH>, *silu, pieces));
}

/* ---- gate ---------------------------------------------------------------------------------- */

static __device__ __forceinline__ uint32_t gate_two(uint32_t y, uint32_t gate)
{
    float2 a = widen_two<0>(y), g = widen_two<0>(gate);

    return narrow_two<0>(a.x * sigmoid_of(g.x), a.y * sigmoid_of(g.y));
}

__global__ void __launch_bounds__(SILU_THREADS) gate_kernel(const sp_cuda_gate_heads g)
{
    int each = g.head_dim / PIECE;
    int64_t piece = (int64_t)blockIdx.x * SILU_THREADS + threadIdx.x, head = piece / each;
    uint4 *at = (uint4 *)g.y + piece, y, gate;

    release_successor();
    wait_predecessor();
    if (head >= (int64_t)g.rows * g.heads)
        return;
    y = *at;
    gate = ((const uint4 *)g.q_gate)[(2 * head + 1) * each + piece - head * each];
    *at = make_uint4(gate_two(y.x, gate.x), gate_two(y.y, gate.y), gate_two(y.z, gate.z),
                     gate_two(y.w, gate.w));
}

extern "C" int sp_cuda_gate_head_rows(int gpu, const sp_cuda_gate_heads *gate, void *stream)
{
    int64_t pieces = (int64_t)gate->rows * gate->heads * (gate->head_dim / PIECE);
    sp_cuda_current current(gpu);
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config;

    if (current.code != cudaSuccess || pieces == 0)
        return (int)current.code;
    if (gate->head_dim % PIECE != 0)
        return (int)cudaErrorInvalidValue;
    config = sp_cuda_overlapping(dim3((unsigned)((pieces + SILU_THREADS - 1) / SILU_THREADS)),
                                 SILU_THREADS, 0, &overlap, false, (cudaStream_t)stream);
    return (int)cudaLaunchKernelEx(&config, gate_kernel, *gate);
}
