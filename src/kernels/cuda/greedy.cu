/*
 * greedy.cu: the best token of each row of logits.
 *
 *     token[row] = the lowest id of those with the largest logit
 *
 * Grid (parts of a row, rows). A block finds the largest key of its part, whose high half orders
 * logits and whose low half is ~id, so that the lower of equal ids wins; then one atomic maximum
 * per block, and the last block of a row writes the answer and leaves the scratch as it found it.
 * Maxima do not depend on their order. Bound by the bytes of the logits, or for few rows by the
 * latency of a load, a reduction and two atomics.
 */
#include "kernels/cuda/choose_rules.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"

#define GREEDY_THREADS 256
#define GREEDY_WARPS   (GREEDY_THREADS / SP_WARP)
#define GREEDY_BLOCKS  1056                 /* about so many; the bits do not depend on it */
#define PIECE          4                    /* logits of one load */
#define LEAST_PIECES   (2 * GREEDY_THREADS) /* of a block */

/* Of one row; zeros between launches. */
typedef struct greedy_row {
    unsigned long long best; /* the largest key so far */
    uint32_t bad;            /* ~id of the first bad logit; 0: none */
    uint32_t done;           /* blocks */
} greedy_row;

typedef struct greedy_part {
    unsigned long long best;
    uint32_t bad;
} greedy_part;

static_assert(sizeof(greedy_row) == SP_CUDA_GREEDY_ROW_BYTES, "as the header promises");

static __device__ __forceinline__ void offer(greedy_part *p, float logit, int id)
{
    if (sp_choose_is_bad(logit))
        p->bad = max(p->bad, ~(uint32_t)id);
    else
        p->best = max(p->best, (unsigned long long)sp_choose_key(logit, id));
}

template <int VEC>
static __device__ __forceinline__ void offer_piece(greedy_part *p, const float *row, int id, int n)
{
    if (VEC && id + PIECE <= n) {
        float4 v = *(const float4 *)(row + id);

        offer(p, v.x, id);
        offer(p, v.y, id + 1);
        offer(p, v.z, id + 2);
        offer(p, v.w, id + 3);
        return;
    }
    for (int i = id; i < min(id + PIECE, n); i++)
        offer(p, row[i], i);
}

static __device__ __forceinline__ void join(greedy_part *p, greedy_part other)
{
    p->best = max(p->best, other.best);
    p->bad = max(p->bad, other.bad);
}

static __device__ __forceinline__ greedy_part join_warp(greedy_part p)
{
#pragma unroll
    for (int by = SP_WARP / 2; by > 0; by /= 2) {
        greedy_part other = {__shfl_xor_sync(0xffffffffu, p.best, by),
                             __shfl_xor_sync(0xffffffffu, p.bad, by)};

        join(&p, other);
    }
    return p;
}

/* The block's, in the first warp. */
static __device__ __forceinline__ greedy_part join_block(greedy_part p)
{
    __shared__ greedy_part warps[GREEDY_WARPS];
    int warp = (int)threadIdx.x / SP_WARP, lane = (int)threadIdx.x % SP_WARP;
    greedy_part none = {0, 0};

    p = join_warp(p);
    if (lane == 0)
        warps[warp] = p;
    __syncthreads();
    return join_warp(lane < GREEDY_WARPS ? warps[lane] : none);
}

/* By the last block of the row. */
static __device__ void finish_row(const sp_cuda_greedy &g, int row, greedy_row *all)
{
    unsigned long long best = atomicExch(&all->best, 0ull);
    uint32_t bad = atomicExch(&all->bad, 0u);
    int why = -1;

    if (bad != 0)
        why = (int)~bad;
    else if (sp_choose_key_logit(best) == -INFINITY)
        why = -2;
    g.bad[row] = why;
    g.token[row] = why == -1 ? sp_choose_key_id(best) : -1;
    atomicExch(&all->done, 0u);
}

template <int VEC>
__global__ void __launch_bounds__(GREEDY_THREADS) greedy_kernel(const sp_cuda_greedy g)
{
    int row = (int)blockIdx.y, step = (int)(gridDim.x * GREEDY_THREADS) * PIECE;
    const float *logits = g.logits + row * g.stride;
    greedy_row *all = (greedy_row *)g.scratch + row;
    greedy_part p = {0, 0};

    release_successor();
    wait_predecessor();
#pragma unroll 4
    for (int id = (int)(blockIdx.x * GREEDY_THREADS + threadIdx.x) * PIECE; id < g.vocab;
         id += step)
        offer_piece<VEC>(&p, logits, id, g.vocab);
    p = join_block(p);
    if (threadIdx.x != 0)
        return;
    if (p.best != 0)
        atomicMax(&all->best, p.best);
    if (p.bad != 0)
        atomicMax(&all->bad, p.bad);
    __threadfence();
    if (atomicAdd(&all->done, 1u) + 1 < gridDim.x)
        return;
    __threadfence();
    finish_row(g, row, all);
}

extern "C" int sp_cuda_greedy_rows(int gpu, const sp_cuda_greedy *greedy, void *stream)
{
    bool vec = (uintptr_t)greedy->logits % 16 == 0 && greedy->stride % PIECE == 0;
    int most = max(1, greedy->vocab / (PIECE * LEAST_PIECES));
    int parts = greedy->rows > 0 ? min(most, max(1, GREEDY_BLOCKS / greedy->rows)) : 0;
    sp_cuda_current current(gpu);
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config;

    if (current.code != cudaSuccess || parts == 0)
        return (int)current.code;
    config = sp_cuda_overlapping(dim3((unsigned)parts, (unsigned)greedy->rows), GREEDY_THREADS, 0,
                                 &overlap, false, (cudaStream_t)stream);
    return (int)(vec ? cudaLaunchKernelEx(&config, greedy_kernel<1>, *greedy)
                     : cudaLaunchKernelEx(&config, greedy_kernel<0>, *greedy));
}
