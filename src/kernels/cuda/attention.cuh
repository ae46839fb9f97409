/*
 * attention.cuh: what the kernels of paged attention share: the order of summation, the plan's
 * records, and the arithmetic that every core calls.
 *
 * The order of summation of one row at position p and one of its heads, fixed by p alone:
 *     tile   ATTENTION_TILE keys at absolute positions. s is one chain of mma m16n8k16 from +0,
 *            dimensions ascending; s of a key beyond p is -inf. P = 2^((s - m) * scale * log2 e)
 *            with the largest s so far as m; P is rounded to bf16, and o is one chain of mma over
 *            the keys, ascending, that continues the chunk's o, scaled to the new m. Each thread
 *            of a quad adds the FP32 P of its two columns of every 8 keys, in four chains of key
 *            groups n mod 4, joined pairwise; the quad's four sums are joined pairwise when the
 *            chunk ends.
 *     chunk  ATTENTION_CHUNK keys, begins with m = -inf, l = 0, o = 0, so it can be computed
 *            anywhere. 512: half the partial sums of 256, and as fast or faster from 8k keys on.
 *     fold   over the chunks in ascending order, from m = -inf and zeros, by one formula:
 *            M' = max(M, m), a = 2^(M - M'), b = 2^(m - M'), L = fma(L, a, l * b), O likewise.
 *     y = bf16(O * (1 / L)).
 * A masked key adds +0, and a tile or chunk of masked keys is an exact identity, so rows of several
 * positions can share a block that visits the last one's keys. Blocks, splits, pages and the core
 * never change a bit. The one condition: keys and values of the visited positions are finite.
 *
 * Rows are packed: packed row r of a query tile is row r / group of the step, q head r % group of
 * the kv head's group. In an mma fragment a thread has two packed rows, a = lane / 4 and b = a + 8.
 */
#ifndef SP_KERNELS_CUDA_ATTENTION_CUH
#define SP_KERNELS_CUDA_ATTENTION_CUH

#include "kernels/cuda/ops_cuda.h"
#include "kernels/cuda/ptx.cuh"

#include <math.h>

#define ATTENTION_TILE      128 /* keys */
#define ATTENTION_CHUNK     512
#define CHUNK_TILES         (ATTENTION_CHUNK / ATTENTION_TILE)
#define KEY_GROUPS          (ATTENTION_TILE / 8) /* n of mma */
#define ATTENTION_WIDE_ROWS 128                  /* packed, of a query tile of the wide core */
#define TILE_PAGES          (ATTENTION_TILE / SP_CUDA_PAGE)

static_assert(ATTENTION_CHUNK % ATTENTION_TILE == 0, "a chunk is whole tiles");
static_assert(ATTENTION_TILE % SP_CUDA_PAGE == 0 && SP_CUDA_PAGE == 16, "a page is k of one mma");

/* One query tile and a run of key tiles, for every kv head: an item of work for each. */
typedef struct alignas(16) attention_piece {
    int row, rows; /* of the step */
    int position;  /* of the first row */
    int page;      /* index of the sequence's first page */
    int tile, tile_end;
    int partial; /* its first packed row among the partial results; -1: writes y itself */
    int stride;  /* packed rows from one kv head's partial results to the next one's */
} attention_piece;

/* A query tile that was split. Its first partial result is the fold of the chunks before `prefix`,
 * each further one is a chunk. */
typedef struct alignas(16) attention_split {
    int row, rows, position, partial, stride, prefix;
    int pad[2];
} attention_split;

typedef struct alignas(16) attention_counts {
    int pieces, split_rows; /* rows of the step in split tiles */
    int taken;              /* from the queue by the blocks; zero between launches */
    int pad;
} attention_counts;

/* The part of the plan for one core, and its partial results. */
typedef struct attention_core {
    int tile_rows;          /* packed rows of a query tile */
    int rows;               /* of the step: tile_rows / group */
    int span_min, span_max; /* rows of the spans that are this core's */
    int processors, blocks; /* of the GPU; that run at the same time */
    float speed;            /* of a block that runs alone, relative to one of many */
    int pieces_max;         /* of a launch */
    int partial_rows;       /* capacity, packed rows */
    attention_counts *counts;
    attention_piece *pieces; /* longest first */
    attention_split *splits;
    int2 *split_rows;  /* split, row of it */
    float2 *partial_m; /* [partial_rows] m and l */
    float *partial_o;  /* [partial_rows, D] */
} attention_core;

typedef struct attention_args {
    sp_cuda_attention a;
    int group;         /* q heads of a kv head */
    float scale;       /* times log2 e */
    const void *zeros; /* a page of zeros */
    int n_cores;       /* 1: the narrow core takes every span */
    attention_core core[2];
} attention_args;

/* ---- arithmetic ---------------------------------------------------------------------------- */

static __device__ __forceinline__ float exp2_of(float x)
{
    float y;

    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* 2^((from - to) * scale); from = -inf: 0. `to` is finite. */
static __device__ __forceinline__ float rescale(float from, float to, float scale)
{
    return exp2_of(__fmul_rn(__fsub_rn(from, to), scale));
}

static __device__ __forceinline__ float fold(float sum, float a, float x, float b)
{
    return __fmaf_rn(sum, a, __fmul_rn(x, b));
}

static __device__ __forceinline__ float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

static __device__ __forceinline__ float quad_sum(float x)
{
    x = __fadd_rn(x, __shfl_xor_sync(~0u, x, 1));
    return __fadd_rn(x, __shfl_xor_sync(~0u, x, 2));
}

/* A row's chunk so far, or the fold of its chunks. While a chunk is open, l is the thread's own
 * columns. */
typedef struct row_sum {
    float m, l;
} row_sum;

/* What a row's tile needs: how the sums so far are scaled, and -m * scale. */
typedef struct row_scale {
    float sums, offset;
} row_scale;

/* m becomes `most` if that is more. A row may have seen no key of the chunk yet: m = -inf. */
static __device__ __forceinline__ row_scale raise_max(row_sum *row, float most, float scale)
{
    float m = fmaxf(row->m, most), finite = m == -INFINITY ? 0.0f : m;
    row_scale to = {rescale(row->m, finite, scale), -__fmul_rn(finite, scale)};

    row->m = m;
    return to;
}

static __device__ __forceinline__ float probability(float score, float scale, float offset)
{
    return exp2_of(__fmaf_rn(score, scale, offset));
}

/* The sums of the four chains of key groups. */
static __device__ __forceinline__ float join_chains(float c0, float c1, float c2, float c3)
{
    return __fadd_rn(__fadd_rn(c0, c1), __fadd_rn(c2, c3));
}

/* Masks the four scores of key `key` and the next, rows a and b, of an mma tile. */
static __device__ __forceinline__ void mask(float *s, int key, int position_a, int position_b)
{
    s[0] = key <= position_a ? s[0] : -INFINITY;
    s[1] = key + 1 <= position_a ? s[1] : -INFINITY;
    s[2] = key <= position_b ? s[2] : -INFINITY;
    s[3] = key + 1 <= position_b ? s[3] : -INFINITY;
}

/* How a fold scales what it has and what it adds. */
typedef struct fold_scale {
    float sum, chunk;
} fold_scale;

static __device__ __forceinline__ fold_scale fold_rows(row_sum *sum, row_sum chunk, float scale)
{
    float m = fmaxf(sum->m, chunk.m);
    fold_scale by = {rescale(sum->m, m, scale), rescale(chunk.m, m, scale)};

    sum->m = m;
    sum->l = fold(sum->l, by.sum, chunk.l, by.chunk);
    return by;
}

static __device__ __forceinline__ float reciprocal(float l)
{
    return __frcp_rn(l);
}

/* ---- launches ------------------------------------------------------------------------------ */

/* How a core runs on the current GPU. slots 0: it has no code for it. */
typedef struct attention_shape {
    int slots, processors, blocks; /* of the ring; of the GPU; that run at the same time */
    size_t shared_bytes;
} attention_shape;

/* Each is valid after its init. */
attention_shape sp_cuda_attention_narrow_shape(int gpu, int page_dim, int per_processor);
attention_shape sp_cuda_attention_wide_shape(int gpu, int page_dim);

/* The kernels' attributes, and which of them the GPU has; gpu is the current one. */
cudaError_t sp_cuda_attention_narrow_init(int gpu);
cudaError_t sp_cuda_attention_wide_init(int gpu);

cudaError_t sp_cuda_attention_make_plan(const attention_args *args, cudaStream_t stream);
cudaError_t sp_cuda_attention_narrow(const attention_args *args, const attention_shape *shape,
                                     cudaStream_t stream);
cudaError_t sp_cuda_attention_wide(const attention_args *args, const attention_shape *shape,
                                   cudaStream_t stream);
cudaError_t sp_cuda_attention_merge(const attention_args *args, int blocks, cudaStream_t stream);

#endif
