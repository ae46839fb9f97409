/*
 * rows.cu: prepares a host's rows for the other kernels.
 *
 *     round:  to[row, k] = T(x[row, k]), FP32 to bf16 or f16, nearest even; grid (rows, pieces
 *             of a row); bound by the bytes read
 *     check:  slot, generation and scale of each row, compared with what the pool's slots show now:
 *             valid rows go to the plan's input, the others become rows of the base; one block,
 *             bound by the latency of two dependent loads
 */
#include "device/cuda/current.cuh"
#include "kernels/cuda/ptx.cuh"

#define ROUND_THREADS 128
#define ROUND_EACH    4 /* elements per thread */
#define CHECK_THREADS 1024
#define REASONS       8 /* a report's key is row * REASONS + reason */
#define SCALE_MAX     16.0f

static_assert(SP_CUDA_ROWS_MAX < INT32_MAX / REASONS, "keys fit an int");

/* ---- round --------------------------------------------------------------------------------- */

template <int F16, int VEC>
__global__ void __launch_bounds__(ROUND_THREADS) round_kernel(const sp_cuda_round r)
{
    int k = (int)(blockIdx.y * ROUND_THREADS + threadIdx.x) * ROUND_EACH;
    const float *x = r.x + (int64_t)blockIdx.x * r.x_stride + k;
    uint16_t *to = (uint16_t *)r.to + (int64_t)blockIdx.x * r.k + k;

    if (k >= r.k)
        return;
    if (VEC) {
        float4 v = *(const float4 *)x;

        *(ushort4 *)to =
            make_ushort4(narrow<F16>(v.x), narrow<F16>(v.y), narrow<F16>(v.z), narrow<F16>(v.w));
        return;
    }
    for (int i = 0; i < ROUND_EACH && k + i < r.k; i++)
        to[i] = narrow<F16>(x[i]);
}

template <int F16> static void launch_round(const sp_cuda_round &r, cudaStream_t stream)
{
    const int piece = ROUND_THREADS * ROUND_EACH;
    bool vec = (uintptr_t)r.x % 16 == 0 && r.x_stride % 4 == 0 && r.k % 4 == 0;
    dim3 grid((unsigned)r.n_rows, (unsigned)((r.k + piece - 1) / piece));

    if (vec)
        round_kernel<F16, 1><<<grid, ROUND_THREADS, 0, stream>>>(r);
    else
        round_kernel<F16, 0><<<grid, ROUND_THREADS, 0, stream>>>(r);
}

extern "C" int sp_cuda_round_rows(int gpu, const sp_cuda_round *round, void *stream)
{
    sp_cuda_current current(gpu);

    if (current.code != cudaSuccess || round->n_rows == 0)
        return (int)current.code;
    if (round->type == SP_DTYPE_F16)
        launch_round<1>(*round, (cudaStream_t)stream);
    else
        launch_round<0>(*round, (cudaStream_t)stream);
    return (int)cudaGetLastError();
}

/* ---- check --------------------------------------------------------------------------------- */

static __device__ __forceinline__ int check_row(const sp_cuda_rows &r, int row, int slot,
                                                float scale)
{
    uint64_t shown;

    if (slot < -1 || slot >= r.n_slots)
        return SP_CUDA_ROW_SLOT;
    if (!(scale >= 0.0f && scale <= SCALE_MAX))
        return SP_CUDA_ROW_SCALE;
    if (slot == -1)
        return SP_CUDA_ROW_FINE;
    shown = r.shown[slot];
    if (shown == 0)
        return SP_CUDA_ROW_EMPTY;
    return shown == r.generation[row] ? SP_CUDA_ROW_FINE : SP_CUDA_ROW_STALE;
}

__global__ void __launch_bounds__(CHECK_THREADS) check_kernel(const sp_cuda_rows r)
{
    __shared__ int n_refused, first;

    if (threadIdx.x == 0) {
        n_refused = 0;
        first = INT32_MAX;
    }
    __syncthreads();
    for (int row = (int)threadIdx.x; row < r.n_rows; row += CHECK_THREADS) {
        int slot = r.slot[row];
        float scale = r.scale != NULL ? r.scale[row] : 1.0f;
        int reason = check_row(r, row, slot, scale);

        r.seq_slot[row] = reason == SP_CUDA_ROW_FINE ? slot : -1;
        r.row_scale[row] = reason == SP_CUDA_ROW_FINE ? scale : 1.0f;
        if (reason == SP_CUDA_ROW_FINE)
            continue;
        atomicAdd(&n_refused, 1);
        atomicMin(&first, row * REASONS + reason);
    }
    __syncthreads();
    if (threadIdx.x == 0)
        *r.report = {r.report->step + 1, r.n_rows, n_refused, n_refused > 0 ? first / REASONS : -1,
                     n_refused > 0 ? first % REASONS : SP_CUDA_ROW_FINE};
}

extern "C" int sp_cuda_check_rows(int gpu, const sp_cuda_rows *rows, void *stream)
{
    sp_cuda_current current(gpu);

    if (current.code != cudaSuccess)
        return (int)current.code;
    check_kernel<<<1, CHECK_THREADS, 0, (cudaStream_t)stream>>>(*rows);
    return (int)cudaGetLastError();
}
