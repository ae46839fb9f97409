/*
 * tokens.cu: token tables (embed_tokens, lm_head) whose rows an adapter changes.
 *
 *     embed:  y[row] = the slot's own row of the token, where it replaces it; then
 *             y[row, n] = T(fmaf(scale, (float)T(Σ_j A[j, token] · B[n, j]), y[row, n])),
 *             j ascending, one fmaf each from +0
 *     head:   logits[row, ids[i]] = x[row, :] · rows[i, :] for the slot's n replaced tokens, by the
 *             order of sp_cuda_gemm (ops_cuda.h), so that a row which equals the base's has its
 *             bits; rounded once where the logits are not FP32
 *
 * Embed: one block per row. Head: grid (blocks, tiles); a block is one warp, which takes 16
 * replaced rows at a time, the M side of the mma, and a tile of up to 8 rows, its N side, and
 * strides by the grid's width, because their number is known only on the device. Both come through
 * a ring of stages of 64 k in shared memory. Bound by the bytes of y, and of the rows.
 */
#include "device/cuda/current.cuh"
#include "kernels/cuda/bulk.cuh"

#define EMBED_THREADS 256
#define HEAD_BLOCKS   1024 /* over all tiles */
#define HEAD_K        64   /* of a stage */
#define HEAD_PIECES   (HEAD_K / 8)
#define HEAD_STAGES   12
#define GROUP         16
#define STAGE_ROWS    (GROUP + SP_CUDA_TILE_ROWS)          /* replaced rows, then rows of x */
#define LANE_ROWS     (STAGE_ROWS * HEAD_PIECES / SP_WARP) /* that a lane copies a piece of */

static_assert(SP_WARP / HEAD_PIECES == 4 && GROUP % 4 == 0, "a warp copies four rows at a time");

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
    uint4 stage[HEAD_STAGES][STAGE_ROWS][HEAD_PIECES]; /* pieces in the order piece ^ (row % 8) */
} head_shared;

/* Where a lane copies from: row 4 i + lane / 8 of a stage, piece lane % 8; NULL: no such row, which
 * stays what it is, as nothing of it is stored. */
typedef struct head_source {
    const uint16_t *from[LANE_ROWS];
} head_source;

static __device__ __forceinline__ head_source find_source(const sp_cuda_head &h,
                                                          const sp_cuda_tile *tile, int slot,
                                                          int first, int n)
{
    int in_four = (int)threadIdx.x / HEAD_PIECES;
    const uint16_t *rows = (const uint16_t *)h.rows[slot], *x = (const uint16_t *)h.x;
    head_source source;

#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) {
        int row = 4 * i + in_four, of_x = row - GROUP;

        if (4 * i < GROUP)
            source.from[i] = first + row < n ? rows + (int64_t)(first + row) * h.hidden : NULL;
        else
            source.from[i] = of_x < tile->count ? x + tile->row[of_x] * h.x_stride : NULL;
    }
    return source;
}

/* Elements k0 .. k0 + 63 of each row; those beyond the hidden size are zeros. */
template <int VEC>
static __device__ __forceinline__ void copy_stage(uint4 (*stage)[HEAD_PIECES],
                                                  const head_source &source, int k0, int hidden)
{
    int piece = threadIdx.x % HEAD_PIECES, k = k0 + piece * 8;

#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) {
        int row = 4 * i + (int)threadIdx.x / HEAD_PIECES;
        uint4 *to = &stage[row][piece ^ (row & 7)];

        if (source.from[i] == NULL)
            continue;
        if (VEC)
            copy_async_if(shared_address(to), source.from[i] + k, k < hidden);
        else
            *to = load_eight_of_row<0>(source.from[i], k, hidden);
    }
}

/* Four steps of 16 k, in order. */
template <int F16>
static __device__ __forceinline__ void multiply_stage(float *sum, uint4 (*stage)[HEAD_PIECES])
{
    int lane = threadIdx.x, in = lane & 7, matrix = lane >> 3;
    uint32_t row = shared_address(stage[(matrix & 1) * 8 + in]);
    uint32_t x = shared_address(stage[GROUP + in]);

#pragma unroll
    for (int step = 0; step < HEAD_K / 16; step += 2) {
        uint4 b = load_matrices(x + (((2 * step + matrix) ^ in) << 4));
        uint4 a = load_matrices(row + (((2 * step + (matrix >> 1)) ^ in) << 4));

        mma<F16>(sum, a.x, a.y, a.z, a.w, b.x, b.y);
        a = load_matrices(row + (((2 * step + 2 + (matrix >> 1)) ^ in) << 4));
        mma<F16>(sum, a.x, a.y, a.z, a.w, b.z, b.w);
    }
}

/* The sums of 16 replaced rows and the tile's rows over all of k, as an mma leaves them. */
template <int F16, int VEC>
static __device__ __forceinline__ void sum_group(float *sum, head_shared *s, const sp_cuda_head &h,
                                                 const head_source &source)
{
    int stages = (h.hidden + HEAD_K - 1) / HEAD_K;

#pragma unroll
    for (int i = 0; i < HEAD_STAGES - 1; i++) {
        if (i < stages)
            copy_stage<VEC>(s->stage[i], source, i * HEAD_K, h.hidden);
        copy_commit();
    }
    for (int i = 0, slot = 0; i < stages; i++) {
        int next = i + HEAD_STAGES - 1;

        copy_wait<HEAD_STAGES - 2>();
        __syncwarp();
        if (next < stages)
            copy_stage<VEC>(s->stage[slot > 0 ? slot - 1 : HEAD_STAGES - 1], source, next * HEAD_K,
                            h.hidden);
        copy_commit();
        multiply_stage<F16>(sum, s->stage[slot]);
        slot = slot + 1 == HEAD_STAGES ? 0 : slot + 1;
    }
    __syncwarp();
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
__global__ void __launch_bounds__(SP_WARP) head_kernel(const sp_cuda_head h)
{
    const sp_cuda_tile *tile = &h.tiles[blockIdx.y];
    int slot = tile->slot, count = tile->count, n = count > 0 ? h.n[slot] : 0, lane = threadIdx.x;
    __shared__ head_shared s;

    for (int first = (int)blockIdx.x * GROUP; first < n; first += (int)gridDim.x * GROUP) {
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};

        sum_group<F16, VEC>(sum, &s, h, find_source(h, tile, slot, first, n));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = lane % 4 * 2 + (i & 1), own = first + lane / 4 + (i >> 1) * 8;

            if (row < count && own < n)
                store_logit<F16>(h, tile->row[row] * h.logits_stride + h.ids[slot][own], sum[i]);
        }
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
        head_kernel<1, 1><<<grid, SP_WARP, 0, on>>>(*head);
    else if (head->type == SP_DTYPE_F16)
        head_kernel<1, 0><<<grid, SP_WARP, 0, on>>>(*head);
    else if (vec)
        head_kernel<0, 1><<<grid, SP_WARP, 0, on>>>(*head);
    else
        head_kernel<0, 0><<<grid, SP_WARP, 0, on>>>(*head);
    return (int)cudaGetLastError();
}
