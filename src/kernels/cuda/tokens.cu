/*
 * tokens.cu: token tables (embed_tokens, lm_head) whose rows an adapter changes.
 *
 *     embed:  y[row] = the slot's own row of the token, where it replaces it; then
 *             y[row, n] = T(fmaf(scale, (float)T(Σ_j A[j, token] · B[n, j]), y[row, n])),
 *             j ascending, one fmaf each from +0
 *     head:   logits[row, ids[i]] = x[row, :] · rows[i, :] for the slot's n replaced tokens, by the
 *             quarters and chunks of the shrink's xa (kernels_cuda.h), all chunks in index order,
 *             rounded once where the logits are not FP32
 *
 * Embed: one block per row. Head: grid (blocks, tiles); a block takes 16 replaced rows at a time,
 * the M side of the mma, and a tile of up to 8 rows, its N side, and strides by the grid's width,
 * because their number is known only on the device. Bound by the bytes of y, and of the rows.
 */
#include "device/cuda/current.cuh"
#include "kernels/cuda/ptx.cuh"

#define EMBED_THREADS 256
#define HEAD_THREADS  128
#define HEAD_BLOCKS   4096 /* over all tiles */
#define QUARTER_K     128
#define GROUP         16

/* ---- embed --------------------------------------------------------------------------------- */

/* What one row reads from its slot. */
typedef struct embed_row {
    const uint16_t *own; /* [hidden], or NULL */
    const uint16_t *b;   /* [hidden, rank] */
    int rank;            /* 0: no pair */
    float scale;
} embed_row;

static __device__ embed_row find_embed_row(const sp_cuda_embed &e, int row)
{
    int slot = e.seq_slot[row], token = e.tokens[row], own;
    embed_row out = {NULL, NULL, 0, 0.0f};

    if (slot < 0 || token < 0 || token >= e.vocab)
        return out;
    if (e.map != NULL && e.map[slot] != NULL) {
        own = e.map[slot][token];
        if (own >= 0)
            out.own = (const uint16_t *)e.rows[slot] + (int64_t)own * e.hidden;
    }
    if (e.rank == NULL)
        return out;
    out.scale = sp_scale_of_row(e.scale[slot], e.row_scale[row]);
    out.rank = out.scale == 0.0f ? 0 : e.rank[slot];
    out.b = (const uint16_t *)e.b + slot * e.slot_stride;
    return out;
}

template <int F16>
static __device__ __forceinline__ float embed_delta(const sp_cuda_embed &e, const embed_row &r,
                                                    const float *xa, int n)
{
    const uint16_t *b = r.b + (int64_t)n * e.rank_stride;
    float sum = 0.0f;

    for (int j = 0; j < r.rank; j++)
        sum = __fmaf_rn(xa[j], widen<F16>(b[j]), sum);
    return widen<F16>(narrow<F16>(sum));
}

template <int F16>
__global__ void __launch_bounds__(EMBED_THREADS) embed_kernel(const sp_cuda_embed e)
{
    int row = (int)blockIdx.x;
    embed_row r = find_embed_row(e, row);
    uint16_t *y = (uint16_t *)e.y + row * e.y_stride;
    __shared__ float xa[SP_CUDA_RANK_MAX];

    if (r.own == NULL && r.rank == 0)
        return;
    for (int j = threadIdx.x; j < r.rank; j += EMBED_THREADS)
        xa[j] = widen<F16>(
            ((const uint16_t *)
                 e.a)[e.seq_slot[row] * e.slot_stride + (int64_t)j * e.vocab + e.tokens[row]]);
    __syncthreads();
    for (int n = threadIdx.x; n < e.hidden; n += EMBED_THREADS) {
        uint16_t value = r.own != NULL ? r.own[n] : y[n];

        if (r.rank > 0)
            value =
                narrow<F16>(__fmaf_rn(r.scale, embed_delta<F16>(e, r, xa, n), widen<F16>(value)));
        y[n] = value;
    }
}

/* ---- head ---------------------------------------------------------------------------------- */

typedef struct head_shared {
    float quarter[4][SP_CUDA_TILE_ROWS][GROUP + 1];
} head_shared;

/* Elements at .. at + 7 of replaced row `row`, zeros beyond the rows and their end. */
template <int VEC>
static __device__ __forceinline__ uint4 row_part(const uint16_t *rows, int hidden, int row, int n,
                                                 int at)
{
    union {
        uint4 all;
        uint16_t one[8];
    } v;

    v.all = make_uint4(0, 0, 0, 0);
    if (row >= n || at >= hidden)
        return v.all;
    rows += (int64_t)row * hidden + at;
    if (VEC)
        return load_weights(rows);
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (at + i < hidden)
            v.one[i] = rows[i];
    return v.all;
}

/* One quarter of one chunk: 16 replaced rows from `first` on against the tile's rows of x. */
template <int F16, int VEC>
static __device__ __forceinline__ void add_quarter(float *acc, const sp_cuda_head &h,
                                                   const uint16_t *rows, int first, int n,
                                                   const uint16_t *x, int k, int x_end)
{
    int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;

#pragma unroll
    for (int s = 0; s < 4; s++) {
        int at = k + 32 * s + 8 * t;
        uint4 low = row_part<VEC>(rows, h.hidden, first + g, n, at);
        uint4 high = row_part<VEC>(rows, h.hidden, first + g + 8, n, at);
        uint4 v = load_eight_of_row<VEC>(x, at, x_end);

        mma<F16>(acc, low.x, high.x, low.y, high.y, v.x, v.y);
        mma<F16>(acc, low.z, high.z, low.w, high.w, v.z, v.w);
    }
}

/* The sums of this thread's (row tid / 16, replaced row first + tid % 16) over all of k. */
template <int F16, int VEC>
static __device__ float sum_group(head_shared *s, const sp_cuda_head &h, const uint16_t *rows,
                                  int first, int n, const uint16_t *x, int x_end)
{
    int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    int row = threadIdx.x >> 4, c = threadIdx.x & 15;
    float sum = 0.0f;

    for (int k0 = 0; k0 < h.hidden; k0 += SP_CUDA_CHUNK_K) {
        float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};

        add_quarter<F16, VEC>(acc, h, rows, first, n, x, k0 + warp * QUARTER_K, x_end);
        s->quarter[warp][2 * t][g] = acc[0];
        s->quarter[warp][2 * t + 1][g] = acc[1];
        s->quarter[warp][2 * t][g + 8] = acc[2];
        s->quarter[warp][2 * t + 1][g + 8] = acc[3];
        __syncthreads();
        sum = sum + (((s->quarter[0][row][c] + s->quarter[1][row][c]) + s->quarter[2][row][c]) +
                     s->quarter[3][row][c]);
        __syncthreads();
    }
    return sum;
}

template <int F16>
static __device__ __forceinline__ void store_logit(const sp_cuda_head &h, int64_t at, float sum)
{
    if (h.logits_is_f32)
        ((float *)h.logits)[at] = sum;
    else
        ((uint16_t *)h.logits)[at] = narrow<F16>(sum);
}

template <int F16, int VEC>
__global__ void __launch_bounds__(HEAD_THREADS) head_kernel(const sp_cuda_head h)
{
    const sp_cuda_tile *tile = &h.tiles[blockIdx.y];
    int slot = tile->slot, count = tile->count, g = (threadIdx.x & 31) >> 2;
    int row = threadIdx.x >> 4, c = threadIdx.x & 15, n = count > 0 ? h.n[slot] : 0;
    const uint16_t *rows, *x;
    __shared__ head_shared s;

    if (n == 0)
        return;
    rows = (const uint16_t *)h.rows[slot];
    x = (const uint16_t *)h.x + tile->row[g < count ? g : 0] * h.x_stride;
    for (int first = (int)blockIdx.x * GROUP; first < n; first += (int)gridDim.x * GROUP) {
        float sum = sum_group<F16, VEC>(&s, h, rows, first, n, x, g < count ? h.hidden : 0);

        if (row < count && first + c < n)
            store_logit<F16>(h, tile->row[row] * h.logits_stride + h.ids[slot][first + c], sum);
    }
}

/* ---- launch -------------------------------------------------------------------------------- */

extern "C" int sp_cuda_embed_rows(int gpu, const sp_cuda_embed *embed, void *stream)
{
    sp_cuda_current current(gpu);
    cudaError_t code = current.code;

    if (code != cudaSuccess || embed->n_rows == 0)
        return (int)code;
    if (embed->type == SP_DTYPE_F16)
        embed_kernel<1><<<embed->n_rows, EMBED_THREADS, 0, (cudaStream_t)stream>>>(*embed);
    else
        embed_kernel<0><<<embed->n_rows, EMBED_THREADS, 0, (cudaStream_t)stream>>>(*embed);
    return (int)cudaGetLastError();
}

extern "C" int sp_cuda_head_rows(int gpu, const sp_cuda_head *head, void *stream)
{
    int tiles = sp_cuda_tiles_bound(head->n_rows, head->n_slots);
    int blocks =
        tiles > 0 ? max(1, min((head->vocab + GROUP - 1) / GROUP, HEAD_BLOCKS / tiles)) : 0;
    bool vec = (uintptr_t)head->x % 16 == 0 && head->x_stride % 8 == 0 && head->hidden % 8 == 0;
    dim3 grid((unsigned)blocks, (unsigned)tiles);
    cudaStream_t on = (cudaStream_t)stream;
    sp_cuda_current current(gpu);
    cudaError_t code = current.code;

    if (code != cudaSuccess || tiles == 0)
        return (int)code;
    if (head->type == SP_DTYPE_F16 && vec)
        head_kernel<1, 1><<<grid, HEAD_THREADS, 0, on>>>(*head);
    else if (head->type == SP_DTYPE_F16)
        head_kernel<1, 0><<<grid, HEAD_THREADS, 0, on>>>(*head);
    else if (vec)
        head_kernel<0, 1><<<grid, HEAD_THREADS, 0, on>>>(*head);
    else
        head_kernel<0, 0><<<grid, HEAD_THREADS, 0, on>>>(*head);
    return (int)cudaGetLastError();
}
