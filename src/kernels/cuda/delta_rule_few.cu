/*
 * delta_rule_few.cu: the gated delta rule of spans of few rows, after delta_rule_prepare.cu: the
 * same sums as delta_rule.cu, in its order.
 *
 * A block takes pairs of a span and a value head, as many blocks apart as there are. S of a pair is
 * in shared memory: bulk copies bring it, a warp's 16 columns each, and those of the next pair are
 * started as soon as the warp has multiplied with what they replace. So S is in flight all the time
 * but for the products. Its values are in a thread's own order there, and what a fold writes no
 * other thread reads. r of the chunk's rows is in registers.
 *
 * The rows are copied a tile of 8 at a time, of which a decoding sequence has one row. A fold takes
 * k of the whole chunk in the place of a tile's rows, and T from global memory. Two blocks of 8
 * warps fit a multiprocessor. Bound by the bytes of S.
 */
#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/delta_rule_chunk.cuh"
#include "kernels/cuda/launch.cuh"

#define BLOCKS 2 /* of a multiprocessor */
#define PLACES 3 /* this pair, the next one, and the one after it, which is being found */

/* The rows of a tile, or of a chunk that is folded. Sizes are the largest, so that offsets are
 * constants. KT: k_width / 16. */
template <int KT> struct few_stage {
    static const int K_STRIDE = KT * 16 + PAD, V_STRIDE = SP_CUDA_RULE_DIM_MAX + PAD;

    union {
        struct {
            uint16_t k[8][K_STRIDE], q[8][K_STRIDE], v[8][V_STRIDE], z[8][V_STRIDE];
        } tile;
        uint16_t chunk[CHUNK][K_STRIDE]; /* k, in a fold */
    } rows;
    uint16_t m[2][8][T_STRIDE]; /* upper, lower parts */
    float2 gates[CHUNK];        /* G, beta: 8, and in a fold G of the chunk */
};

/* Shared memory. */
template <int KT> struct few_shared {
    float4 state[WARPS_MAX][2 * KT][SP_WARP];
    few_stage<KT> stage[2];                    /* of this pair and of the next one */
    float sums[2][WARPS_MAX][8];               /* of squares: of this tile, of the one before */
    alignas(8) uint64_t barrier[WARPS_MAX][2]; /* S of a warp, k in two halves */
    rule_place place[PLACES];                  /* an index of -1: no pair */
};

#if __CUDA_ARCH__ >= 900

/* ---- pairs --------------------------------------------------------------------------------- */

/* A pair of a span, which has rows. */
static __device__ __forceinline__ rule_place make_place(const rule_args &a,
                                                        const sp_cuda_rule_span &span, int pair)
{
    rule_place p;

    p.span = span;
    p.index = pair / a.d.shape.v_heads;
    p.head = pair - p.index * a.d.shape.v_heads;
    p.k_head = p.head / a.l.per_key;
    p.end = span.position + span.n_rows;
    p.keep = border_to_keep(span);
    p.changes = span.load >= 0 || p.keep > span.folded;
    p.column = 0;
    p.width = a.l.v_width;
    return p;
}

/* The first pair from `pair` on, in the block's steps, that has rows. */
static __device__ __forceinline__ rule_place find_pair(const rule_args &a, int pair)
{
    int heads = a.d.shape.v_heads, all = heads * a.d.spans;
    rule_place none;

    for (; pair < all; pair += gridDim.x)
        if (a.d.span[pair / heads].n_rows > 0)
            return make_place(a, a.d.span[pair / heads], pair);
    none.index = -1;
    return none;
}

/* The block's pair after p. */
static __device__ __forceinline__ int pair_after(const rule_args &a, const rule_place &p)
{
    return p.index * a.d.shape.v_heads + p.head + (int)gridDim.x;
}

static __device__ __forceinline__ int first_border(const rule_place &p)
{
    return p.span.load >= 0 ? p.span.position : p.span.folded;
}

/* S is zeros, which nobody has written. */
static __device__ __forceinline__ bool is_new(const rule_place &p)
{
    return p.span.load < 0 && p.span.folded == 0;
}

/* ---- the state ----------------------------------------------------------------------------- */

/* Of a warp: its columns of S in shared memory, of this lane, and their barriers. */
typedef struct warp_state {
    float4 *own; /* tile t of 8 rows of k is at own[t * SP_WARP] */
    uint32_t barrier;
    int parity;
} warp_state;

/* Starts the copy of a half of S of a pair, or writes its zeros. `written`: threads have written
 * what is replaced. All lanes have read it. */
template <int KT>
static __device__ __forceinline__ void start_half(const rule_args &a, const rule_place &p,
                                                  const warp_state &w, int half, bool written)
{
    uint32_t barrier = w.barrier + half * 8;

    if (p.index < 0)
        return;
    if (is_new(p)) {
#pragma unroll
        for (int t = 0; t < KT; t++)
            w.own[(half * KT + t) * SP_WARP] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        return;
    }
    if (written)
        copies_before_bulk();
    __syncwarp();
    if ((threadIdx.x & 31) == 0) {
        const char *from =
            p.span.load >= 0 ? snapshot_of(a.d, p.span.load) : slot_of(a.d, p.span.slot);

        barrier_expect(barrier, KT * 512);
        bulk_load(shared_address(w.own + half * KT * SP_WARP),
                  (const float *)from + warp_offset(a, p) + half * KT * 128, KT * 512, barrier);
    }
    barrier_arrive(barrier);
}

static __device__ __forceinline__ void wait_half(const rule_place &p, const warp_state &w, int half)
{
    if (!is_new(p))
        barrier_wait(w.barrier + half * 8, w.parity);
}

template <int KT>
static __device__ __forceinline__ void write_state(const rule_args &a, const rule_place &p,
                                                   const warp_state &w, char *to)
{
    float *s = (float *)to + warp_offset(a, p);

    wait_half(p, w, 0);
    wait_half(p, w, 1);
#pragma unroll 4
    for (int t = 0; t < 2 * KT; t++)
        *(float4 *)(s + t * 128) = w.own[t * SP_WARP];
}

/* ---- staging ------------------------------------------------------------------------------- */

/* The new rows [first, end) of a tile, counted from the border: a warp copies k and q, v and z, or
 * M and the gates of one. */
template <int KT>
static __device__ __forceinline__ void copy_tile(const rule_args &a, const rule_place &p,
                                                 few_stage<KT> &s, int border, chunk_rows rows)
{
    const sp_cuda_rule_shape &shape = a.d.shape;
    int lane = threadIdx.x & 31, piece = (lane & 15) * 8, n = rows.end - rows.first;
    bool second = lane >= 16;

    for (int unit = threadIdx.x >> 5; unit < 3 * n; unit += blockDim.x >> 5) {
        int what = unit % 3, i = rows.first + unit / 3, at = i & 7;
        int64_t row = p.span.row + border + i - p.span.position;

        if (what == 0 && piece < KT * 16) {
            copy_async(shared_address(&(second ? s.rows.tile.q : s.rows.tile.k)[at][piece]),
                       (second ? a.q : a.k) + (row * shape.k_heads + p.k_head) * KT * 16 + piece);
        } else if (what == 1 && piece < p.width) {
            bool there = piece < shape.v_dim;
            const uint16_t *from = second ? (const uint16_t *)a.d.z : a.v;
            int64_t offset = row * shape.v_heads * shape.v_dim + p.head * shape.v_dim;

            if (second && shape.fused) {
                from = (const uint16_t *)a.d.qkv;
                offset = row * a.l.qkv_width + v_offset(a, p.head) + a.l.per_key * shape.v_dim;
            }
            copy_async_if(shared_address(&(second ? s.rows.tile.z : s.rows.tile.v)[at][piece]),
                          from + offset + (there ? piece : 0), there);
        } else if (what == 2 && lane < 8) {
            copy_async(shared_address(&s.m[lane / 4][at][lane % 4 * 8]),
                       a.matrices + (row * shape.v_heads + p.head) * 4 * CHUNK + 2 * CHUNK +
                           lane * 8);
        } else if (what == 2 && lane == 8) {
            copy_gates(s.gates + at, a.gates + row * shape.v_heads + p.head);
        }
    }
    copy_commit();
}

/* Whether the pair's first chunk has new rows, so that its first tile is copied a pair ahead. */
static __device__ __forceinline__ bool is_ahead(const rule_place &p)
{
    return rows_of_chunk(p.span, first_border(p)).first < CHUNK;
}

static __device__ __forceinline__ chunk_rows rows_of_tile(chunk_rows rows, int tile)
{
    return {max(rows.first, 8 * tile), min(rows.end, 8 * tile + 8)};
}

template <int KT>
static __device__ __forceinline__ void copy_ahead(const rule_args &a, const rule_place &p,
                                                  few_stage<KT> &s)
{
    const chunk_rows rows = rows_of_chunk(p.span, first_border(p));

    if (rows.first < CHUNK)
        copy_tile(a, p, s, first_border(p), rows_of_tile(rows, rows.first / 8));
}

/* k and G of a whole chunk, of which rows [0, first) are of earlier steps. */
template <int KT>
static __device__ __forceinline__ void copy_chunk_keys(const rule_args &a, const rule_place &p,
                                                       few_stage<KT> &s, int border, int first)
{
    const char *slot = slot_of(a.d, p.span.slot);
    const int width = KT * 16, pieces = width / 8;
    int place = place_of(border);
    int64_t row = p.span.row + border - p.span.position;

    for (int i = threadIdx.x; i < CHUNK * pieces; i += blockDim.x) {
        int at = i / pieces, piece = i % pieces * 8;
        const uint16_t *old =
            (const uint16_t *)(slot + a.l.ring_k) + ((int64_t)p.k_head * RING + place + at) * width;
        const uint16_t *own = a.k + ((row + at) * a.d.shape.k_heads + p.k_head) * width;

        copy_async(shared_address(&s.rows.chunk[at][piece]), (at < first ? old : own) + piece);
    }
    for (int i = threadIdx.x; i < CHUNK; i += blockDim.x)
        s.gates[i].x = i < first ? ((const float *)(slot + a.l.ring_g))[p.head * RING + place + i]
                                 : a.gates[(row + i) * a.d.shape.v_heads + p.head].x;
    copy_commit();
}

/* r of the rows of earlier steps in the chunk at `border`, zeros of the others. */
static __device__ __forceinline__ void load_old_r(const rule_args &a, const rule_place &p,
                                                  int border, float4 (&r)[TILES])
{
    int first = rows_of_chunk(p.span, border).first, row = 2 * (int)(threadIdx.x & 3);
    const float *ring = ring_of(a, p, border);

#pragma unroll
    for (int t = 0; t < TILES; t++) {
        const float *from = ring + 8 * t * a.l.v_width;

        r[t] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (8 * t + row < first)
            r[t].x = from[0], r[t].z = from[8];
        if (8 * t + row + 1 < first)
            r[t].y = from[a.l.v_width], r[t].w = from[a.l.v_width + 8];
    }
}

/* ---- the rows of a tile -------------------------------------------------------------------- */

/* Sᵀk and Sᵀq of the tile. `final`: S is not read again, and that of `next` takes its place. */
template <int KT>
static __device__ __forceinline__ void multiply_state(const rule_args &a, const rule_place &p,
                                                      const rule_place &next, few_stage<KT> &s,
                                                      const warp_state &w, bool final, bool written,
                                                      float (&of_k)[4], float (&of_q)[4])
{
    int lane = threadIdx.x & 31;
    uint32_t from =
        shared_address(&(lane < 16 ? s.rows.tile.k : s.rows.tile.q)[lane & 7][(lane >> 3 & 1) * 8]);

#pragma unroll
    for (int e = 0; e < 4; e++)
        of_k[e] = of_q[e] = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        wait_half(p, w, half);
#pragma unroll
        for (int i = half * KT / 2; i < (half + 1) * KT / 2; i++) {
            float4 x = w.own[2 * i * SP_WARP], y = w.own[(2 * i + 1) * SP_WARP];
            split_two two[4] = {split(x.x, x.y), split(x.z, x.w), split(y.x, y.y), split(y.z, y.w)};
            uint4 right = load_matrices(from + i * 32);

            mma<0>(of_k, two[0].upper, two[1].upper, two[2].upper, two[3].upper, right.x, right.y);
            mma<0>(of_q, two[0].upper, two[1].upper, two[2].upper, two[3].upper, right.z, right.w);
            mma<0>(of_k, two[0].lower, two[1].lower, two[2].lower, two[3].lower, right.x, right.y);
            mma<0>(of_q, two[0].lower, two[1].lower, two[2].lower, two[3].lower, right.z, right.w);
        }
        if (final)
            start_half<KT>(a, next, w, half, written);
    }
}

/* The rows j of r from 16 * half on, split as a left operand. */
static __device__ __forceinline__ rule_parts split_tiles(float4 low, float4 high)
{
    split_two a0 = split(low.x, low.y), a1 = split(low.z, low.w);
    split_two a2 = split(high.x, high.y), a3 = split(high.z, high.w);

    return {{a0.upper, a1.upper, a2.upper, a3.upper}, {a0.lower, a1.lower, a2.lower, a3.lower}};
}

/* c += r · (8 rows of T or M)ᵀ, of which u and l are the upper and lower parts. */
template <int TILE>
static __device__ __forceinline__ void multiply_parts(const rule_parts *r, uint4 u, uint4 l,
                                                      float (&c)[4])
{
    const uint32_t right[2][4] = {{u.x, u.y, l.x, l.y}, {u.z, u.w, l.z, l.w}};

#pragma unroll
    for (int half = 0; half <= TILE / 2; half++) {
        const uint32_t *b = right[half], *x = r[half].upper, *y = r[half].lower;

        mma<0>(c, x[0], x[1], x[2], x[3], b[0], b[1]);
        mma<0>(c, y[0], y[1], y[2], y[3], b[0], b[1]);
        mma<0>(c, x[0], x[1], x[2], x[3], b[2], b[3]);
    }
}

/* The warp's columns of v or z of a tile, as an mma has its sum. */
template <int KT>
static __device__ __forceinline__ void load_tile(const uint16_t (&from)[8][few_stage<KT>::V_STRIDE],
                                                 float (&to)[4])
{
    int lane = threadIdx.x & 31, column = (threadIdx.x >> 5) * 16 + (lane >> 3 & 1) * 8;
    uint4 v = load_transposed(shared_address(&from[lane & 7][column]));
    float2 low = widen_two<0>(v.x), high = widen_two<0>(v.y);

    to[0] = low.x, to[1] = low.y;
    to[2] = high.x, to[3] = high.y;
}

/* r of the tile's new rows beside those of earlier ones: to the ring where they stay open. Returns
 * whether all are finite. */
template <int KT>
static __device__ __forceinline__ bool find_new_r(const rule_args &a, const rule_place &p,
                                                  const few_stage<KT> &s, int tile, int border,
                                                  chunk_rows rows, const float (&of_k)[4],
                                                  float4 *r)
{
    int row = 8 * tile + 2 * (int)(threadIdx.x & 3);
    bool first = row >= rows.first && row < rows.end;
    bool second = row + 1 >= rows.first && row + 1 < rows.end;
    float *ring = ring_of(a, p, border) + 8 * tile * a.l.v_width;
    float4 all = *r;
    float v[4];

    load_tile<KT>(s.rows.tile.v, v);
    if (first) {
        float2 gates = s.gates[row & 7];
        float power = -power_of_e(gates.x);

        all.x = gates.y * fmaf(power, of_k[0], v[0]);
        all.z = gates.y * fmaf(power, of_k[2], v[2]);
    }
    if (second) {
        float2 gates = s.gates[(row + 1) & 7];
        float power = -power_of_e(gates.x);

        all.y = gates.y * fmaf(power, of_k[1], v[1]);
        all.w = gates.y * fmaf(power, of_k[3], v[3]);
    }
    if (first && border >= p.keep)
        ring[0] = all.x, ring[8] = all.z;
    if (second && border >= p.keep)
        ring[a.l.v_width] = all.y, ring[a.l.v_width + 8] = all.w;
    *r = all;
    return is_finite(all.x) && is_finite(all.y) && is_finite(all.z) && is_finite(all.w);
}

/* o of a tile, which is of_q at first; the sums of its squares over the warp's columns. */
template <int TILE, int KT>
static __device__ __forceinline__ void find_rows_o(const rule_args &a, const few_stage<KT> &s,
                                                   const float4 (&r)[TILES], float (&o)[4],
                                                   float *sums)
{
    int lane = threadIdx.x & 31;
    const uint16_t *m = &s.m[0][lane & 7][(lane >> 3) * 8];
    const float2 *gates = s.gates + 2 * (lane & 3);
    float g0 = power_of_e(gates[0].x), g1 = power_of_e(gates[1].x), sum0, sum1;
    float factor = 1.0f / sqrtf((float)a.d.shape.k_dim);
    rule_parts parts[2];

    parts[0] = split_tiles(r[0], r[1]);
    if (TILE >= 2)
        parts[1] = split_tiles(r[2], r[3]);
    o[0] *= g0, o[1] *= g1;
    o[2] *= g0, o[3] *= g1;
    multiply_parts<TILE>(parts, load_matrices(shared_address(m)),
                         load_matrices(shared_address(m + 8 * T_STRIDE)), o);
#pragma unroll
    for (int e = 0; e < 4; e++)
        o[e] *= factor;
    sum0 = fmaf(o[2], o[2], o[0] * o[0]);
    sum1 = fmaf(o[3], o[3], o[1] * o[1]);
#pragma unroll
    for (int by = 4; by < SP_WARP; by *= 2) {
        sum0 += __shfl_xor_sync(~0u, sum0, by);
        sum1 += __shfl_xor_sync(~0u, sum1, by);
    }
    if (lane < 4) {
        sums[2 * lane] = sum0;
        sums[2 * lane + 1] = sum1;
    }
}

/* The factor of the norm of row lane % 8 of the tile. */
static __device__ __forceinline__ float find_inverse(const rule_args &a,
                                                     const float (&sums)[WARPS_MAX][8])
{
    float sum = 0.0f;

#pragma unroll
    for (int w = 0; w < WARPS_MAX; w++)
        if (w < a.l.v_width / 16)
            sum += sums[w][threadIdx.x & 7];
    return rsqrtf(sum / (float)a.d.shape.v_dim + a.d.eps);
}

/* y of a tile's new rows; lane l has the inverse of row l % 8. weights: the norm's of the lane. */
static __device__ __forceinline__ void store_rows(const rule_args &a, const rule_place &p, int tile,
                                                  int border, chunk_rows rows, float inverse,
                                                  float2 weights, const float (&z)[4],
                                                  const float (&o)[4])
{
    const sp_cuda_rule_shape &shape = a.d.shape;
    int lane = threadIdx.x & 31, v = (int)(threadIdx.x >> 5) * 16 + 2 * (lane & 3);
    float inverse0 = __shfl_sync(~0u, inverse, 2 * (lane & 3));
    float inverse1 = __shfl_sync(~0u, inverse, 2 * (lane & 3) + 1);
    uint32_t two = transpose(narrow_two<0>(o[0] * inverse0 * weights.x * silu(z[0]),
                                           o[1] * inverse1 * weights.x * silu(z[1])));
    uint32_t more = transpose(narrow_two<0>(o[2] * inverse0 * weights.y * silu(z[2]),
                                            o[3] * inverse1 * weights.y * silu(z[3])));
    int row = 8 * tile + (lane >> 2);
    uint16_t *to = (uint16_t *)a.d.y;

    if (row < rows.first || row >= rows.end)
        return;
    to += ((int64_t)(p.span.row + border + row - p.span.position) * shape.v_heads + p.head) *
              shape.v_dim +
          v;
    if (v < shape.v_dim)
        *(uint32_t *)to = two;
    if (v + 8 < shape.v_dim)
        *(uint32_t *)(to + 8) = more;
}

/* From Sᵀk and Sᵀq (o) to o. */
template <int TILE, int KT>
static __device__ __forceinline__ void finish_rows(const rule_args &a, const rule_place &p,
                                                   const few_stage<KT> &s, int border,
                                                   chunk_rows rows, const float (&of_k)[4],
                                                   float (&o)[4], float4 (&r)[TILES], float *sums)
{
    if (!find_new_r(a, p, s, TILE, border, rows, of_k, &r[TILE]))
        a.d.fault[p.index] = 1;
    find_rows_o<TILE, KT>(a, s, r, o, sums);
}

template <int KT>
static __device__ __forceinline__ void finish_tile(const rule_args &a, const rule_place &p,
                                                   const few_stage<KT> &s, int tile, int border,
                                                   chunk_rows rows, const float (&of_k)[4],
                                                   float (&o)[4], float4 (&r)[TILES], float *sums)
{
    switch (tile) {
    case 0:
        return finish_rows<0, KT>(a, p, s, border, rows, of_k, o, r, sums);
    case 1:
        return finish_rows<1, KT>(a, p, s, border, rows, of_k, o, r, sums);
    case 2:
        return finish_rows<2, KT>(a, p, s, border, rows, of_k, o, r, sums);
    default:
        return finish_rows<3, KT>(a, p, s, border, rows, of_k, o, r, sums);
    }
}

/* ---- the fold ------------------------------------------------------------------------------ */

/* 8 rows of the upper or lower parts of T as load_matrices has them. */
static __device__ __forceinline__ uint4 load_four(const uint16_t *row)
{
    const uint16_t *at = row + 2 * (threadIdx.x & 3);

    return make_uint4(*(const uint32_t *)at, *(const uint32_t *)(at + 8),
                      *(const uint32_t *)(at + 16), *(const uint32_t *)(at + 24));
}

/* u · exp(G_last - G_j) of a tile's rows j: upper parts, then lower parts of a left operand. */
template <int TILE, int KT>
static __device__ __forceinline__ uint4 find_tile_u(const rule_args &a, const rule_place &p,
                                                    const few_stage<KT> &s, int border, int first,
                                                    const rule_parts *r)
{
    int lane = threadIdx.x & 31, row = 8 * TILE + (lane >> 2);
    const uint16_t *old = (const uint16_t *)(slot_of(a.d, p.span.slot) + a.l.ring_t) +
                          ((int64_t)p.head * RING + place_of(border) + row) * 2 * CHUNK;
    const uint16_t *own =
        a.matrices +
        ((int64_t)(p.span.row + border + row - p.span.position) * a.d.shape.v_heads + p.head) * 4 *
            CHUNK;
    const uint16_t *t = row < first ? old : own;
    const float2 *gates = s.gates + 8 * TILE + 2 * (lane & 3);
    float u[4] = {}, last = s.gates[CHUNK - 1].x;
    float g0 = power_of_e(last - gates[0].x), g1 = power_of_e(last - gates[1].x);
    split_two x, y;

    multiply_parts<TILE>(r, load_four(t), load_four(t + CHUNK), u);
    x = split(u[0] * g0, u[1] * g1), y = split(u[2] * g0, u[3] * g1);
    return make_uint4(x.upper, y.upper, x.lower, y.lower);
}

/* S at the next border. r is used up. */
template <int KT>
static __device__ __forceinline__ void fold_state(const rule_args &a, const rule_place &p,
                                                  const few_stage<KT> &s, const warp_state &w,
                                                  int border, int first, const float4 (&r)[TILES])
{
    const int stride = few_stage<KT>::K_STRIDE * 2;
    const rule_parts parts[2] = {split_tiles(r[0], r[1]), split_tiles(r[2], r[3])};
    const uint4 u[TILES] = {find_tile_u<0, KT>(a, p, s, border, first, parts),
                            find_tile_u<1, KT>(a, p, s, border, first, parts),
                            find_tile_u<2, KT>(a, p, s, border, first, parts),
                            find_tile_u<3, KT>(a, p, s, border, first, parts)};
    float decay = power_of_e(s.gates[CHUNK - 1].x);
    int lane = threadIdx.x & 31;
    uint32_t k = shared_address(&s.rows.chunk[lane & 15][(lane >> 4) * 8]);

#pragma unroll 2
    for (int t = 0; t < 2 * KT; t += 2) {
        float4 x = w.own[t * SP_WARP], y = w.own[(t + 1) * SP_WARP];
        float c[4] = {x.x * decay, x.y * decay, x.z * decay, x.w * decay};
        float d[4] = {y.x * decay, y.y * decay, y.z * decay, y.w * decay};

#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 right = load_transposed(k + 16 * half * stride + t * 16);
            uint4 low = u[2 * half], high = u[2 * half + 1];

            mma<0>(c, low.x, low.y, high.x, high.y, right.x, right.y);
            mma<0>(d, low.x, low.y, high.x, high.y, right.z, right.w);
            mma<0>(c, low.z, low.w, high.z, high.w, right.x, right.y);
            mma<0>(d, low.z, low.w, high.z, high.w, right.z, right.w);
        }
        w.own[t * SP_WARP] = make_float4(c[0], c[1], c[2], c[3]);
        w.own[(t + 1) * SP_WARP] = make_float4(d[0], d[1], d[2], d[3]);
    }
}

/* ---- what later steps read ----------------------------------------------------------------- */

/* 16 bytes that a thread copies to the ring, between which other work is done. NULL: none. */
typedef struct kept_piece {
    uint4 value;
    uint4 *to;
} kept_piece;

/* Whether a thread keeps a piece at most: a row that decodes, and enough warps. */
static __device__ __forceinline__ bool keeps_one(const rule_place &p)
{
    return p.span.n_rows == 1 && p.span.load < 0 && blockDim.x == WARPS_MAX * SP_WARP;
}

/* The warps 3 and 4 have the inputs of the convolution, the next two T and k where they stay open.
 */
static __device__ __forceinline__ kept_piece load_kept(const rule_args &a, const rule_place &p)
{
    const sp_cuda_rule_shape &shape = a.d.shape;
    int warp = threadIdx.x >> 5, piece = threadIdx.x & 31, place = place_of(p.span.position);
    bool first = p.head == p.k_head * a.l.per_key, open = p.span.position >= p.keep;
    char *slot = slot_of(a.d, p.span.slot);
    uint16_t *to = (uint16_t *)(slot + a.l.ring_conv) + (int64_t)place * a.l.channels;
    const uint16_t *from = (const uint16_t *)a.d.qkv + (int64_t)p.span.row * a.l.qkv_width;
    kept_piece kept;
    bool mine = false;

    if (warp == 3) {
        mine = piece < shape.v_dim / 8;
        to += v_channel(a, p.head), from += v_offset(a, p.head);
    } else if (warp == 4) {
        bool second = piece >= 16;

        piece &= 15;
        mine = first && piece < shape.k_dim / 8;
        to += second ? k_channel(a, p.k_head) : q_channel(a, p.k_head);
        from += second ? k_offset(a, p.k_head) : q_offset(a, p.k_head);
    } else if (warp == 5) {
        mine = open && piece < 2 * CHUNK / 8;
        to = (uint16_t *)(slot + a.l.ring_t) + ((int64_t)p.head * RING + place) * 2 * CHUNK;
        from = a.matrices + ((int64_t)p.span.row * shape.v_heads + p.head) * 4 * CHUNK;
    } else if (warp == 6) {
        mine = open && first && piece < a.l.k_width / 8;
        to = (uint16_t *)(slot + a.l.ring_k) + ((int64_t)p.k_head * RING + place) * a.l.k_width;
        from = a.k + ((int64_t)p.span.row * shape.k_heads + p.k_head) * a.l.k_width;
    }
    kept.to = mine ? (uint4 *)(to + piece * 8) : NULL;
    if (mine)
        kept.value = *(const uint4 *)(from + piece * 8);
    return kept;
}

static __device__ __forceinline__ void keep_rows(const rule_args &a, const rule_place &p)
{
    keep_inputs(a, p);
    keep_matrices(a, p);
    if (p.head == p.k_head * a.l.per_key)
        keep_keys(a, p.span, p.keep, p.k_head);
}

/* ---- a pair -------------------------------------------------------------------------------- */

/* What a block carries from pair to pair. */
template <int KT> struct few_block {
    const rule_args &a;
    few_shared<KT> &s;
    warp_state w;
    float2 weights;  /* of the norm, for the lane's two columns */
    float4 r[TILES]; /* of the chunk */
    int turn;        /* place of the pair */
    int stage;       /* of the pair */
    int tiles;       /* of 8 rows that were computed */
};

static __device__ __forceinline__ int turn_after(int turn)
{
    return turn + 1 < PLACES ? turn + 1 : 0;
}

/* The rows of a tile from their copies to y, but for what is `ahead`. `final`: the pair's last
 * ones, and S was not changed by them. */
template <int KT>
static __device__ __forceinline__ void run_tile(few_block<KT> &b, const rule_place &p, int tile,
                                                int border, chunk_rows rows, bool final,
                                                bool written)
{
    const rule_place &next = b.s.place[turn_after(b.turn)];
    const chunk_rows own = rows_of_tile(rows, tile);
    few_stage<KT> &s = b.s.stage[b.stage];
    float(&sums)[WARPS_MAX][8] = b.s.sums[b.tiles++ & 1];
    float of_k[4], o[4], z[4];

    multiply_state<KT>(b.a, p, next, s, b.w, final, written, of_k, o);
    finish_tile(b.a, p, s, tile, border, own, of_k, o, b.r, sums[threadIdx.x >> 5]);
    load_tile<KT>(s.rows.tile.z, z);
    __syncthreads();
    store_rows(b.a, p, tile, border, own, find_inverse(b.a, sums), b.weights, z, o);
}

/* The first tile with new rows, beside which the next pair's rows are copied, the pair after it is
 * found, and what later steps read is kept. */
template <int KT>
static __device__ __forceinline__ void run_first_tile(few_block<KT> &b, const rule_place &p,
                                                      int tile, int border, chunk_rows rows,
                                                      bool final, bool written)
{
    int next = turn_after(b.turn), pair;
    bool finds = threadIdx.x >= blockDim.x - SP_WARP, one = keeps_one(p);
    sp_cuda_rule_span span = {};
    kept_piece kept = {};

    pair = b.s.place[next].index >= 0 ? pair_after(b.a, b.s.place[next]) : 1 << 30;
    if (finds && pair < b.a.d.shape.v_heads * b.a.d.spans)
        span = b.a.d.span[pair / b.a.d.shape.v_heads];
    if (one)
        kept = load_kept(b.a, p);
    if (b.s.place[next].index >= 0)
        copy_ahead(b.a, b.s.place[next], b.s.stage[b.stage ^ 1]);
    run_tile<KT>(b, p, tile, border, rows, final, written);
    if (finds && (threadIdx.x & 31) == 0)
        b.s.place[turn_after(next)] =
            span.n_rows > 0 ? make_place(b.a, span, pair) : find_pair(b.a, pair);
    if (kept.to)
        *kept.to = kept.value;
    if (one && threadIdx.x == 7 * SP_WARP && p.span.position >= p.keep)
        ((float *)(slot_of(b.a.d, p.span.slot) +
                   b.a.l.ring_g))[p.head * RING + place_of(p.span.position)] =
            b.s.stage[b.stage].gates[p.span.position & 7].x;
    if (!one)
        keep_rows(b.a, p);
}

template <int KT>
static __device__ __forceinline__ void run_fold(few_block<KT> &b, const rule_place &p, int border,
                                                int first)
{
    few_stage<KT> &s = b.s.stage[b.stage];

    copy_chunk_keys(b.a, p, s, border, first);
    if (first == CHUNK)
        load_old_r(b.a, p, border, b.r);
    wait_half(p, b.w, 0);
    wait_half(p, b.w, 1);
    copy_wait<0>();
    __syncthreads();
    fold_state<KT>(b.a, p, s, b.w, border, first, b.r);
    __syncthreads(); /* k is overwritten next */
}

template <int KT> static __device__ __forceinline__ void run_pair(few_block<KT> &b)
{
    const rule_place &p = b.s.place[b.turn], &next = b.s.place[turn_after(b.turn)];
    bool written = is_new(p), ahead = is_ahead(p), begins = true, final = false;

    for (int border = first_border(p);; border += CHUNK) {
        const chunk_rows rows = rows_of_chunk(p.span, border);
        bool folds = rows.end == CHUNK && (border + CHUNK < p.end || border + CHUNK <= p.keep);

        if (border == p.keep && p.changes)
            write_state<KT>(b.a, p, b.w, slot_of(b.a.d, p.span.slot));
        if (border == p.span.position && p.span.save >= 0) {
            write_state<KT>(b.a, p, b.w, snapshot_of(b.a.d, p.span.save));
            save_inputs(b.a, p);
        }
        if (border >= p.end)
            break;
        for (int tile = rows.first / 8; 8 * tile < rows.end; tile++) {
            final = !folds && border + CHUNK >= p.end && 8 * tile + 8 >= rows.end;
            if (!ahead)
                copy_tile(b.a, p, b.s.stage[b.stage], border, rows_of_tile(rows, tile));
            if (8 * tile <= rows.first)
                load_old_r(b.a, p, border, b.r);
            copy_wait<0>();
            __syncthreads();
            if (begins)
                run_first_tile<KT>(b, p, tile, border, rows, final, written);
            else
                run_tile<KT>(b, p, tile, border, rows, final, written);
            ahead = begins = false;
        }
        if (folds) {
            run_fold<KT>(b, p, border, rows.first);
            written = true;
        }
    }
    if (!is_new(p))
        b.w.parity ^= 1;
    if (!final && next.index >= 0) {
        start_half<KT>(b.a, next, b.w, 0, written);
        start_half<KT>(b.a, next, b.w, 1, written);
    }
    b.turn = turn_after(b.turn);
    b.stage ^= 1;
}

#endif

/* ---- kernel -------------------------------------------------------------------------------- */

/* KT: k_width / 16. */
template <int KT>
__global__ void __launch_bounds__(WARPS_MAX *SP_WARP, BLOCKS)
    rule_few_kernel(const __grid_constant__ rule_args a)
{
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    few_shared<KT> &s = *(few_shared<KT> *)memory;
    few_block<KT> b = {
        a, s, {&s.state[warp][0][lane], shared_address(s.barrier[warp]), 0}, {}, {}, 0, 0, 0};
    int column = warp * 16 + (lane >> 2);

    release_successor();
    if (threadIdx.x == 0) {
        rule_place first = find_pair(a, (int)blockIdx.x);

        s.place[0] = first;
        s.place[1] = first.index < 0 ? first : find_pair(a, pair_after(a, first));
    }
    if (lane == 0) {
        barrier_init(b.w.barrier, SP_WARP);
        barrier_init(b.w.barrier + 8, SP_WARP);
        barrier_init_done();
    }
    b.weights.x = column < a.d.shape.v_dim ? a.d.norm[column] : 0.0f;
    b.weights.y = column + 8 < a.d.shape.v_dim ? a.d.norm[column + 8] : 0.0f;
    __syncthreads();
    if (s.place[0].index >= 0) {
        start_half<KT>(a, s.place[0], b.w, 0, false);
        start_half<KT>(a, s.place[0], b.w, 1, false);
    }
    wait_predecessor();
    if (s.place[0].index >= 0)
        copy_ahead(a, s.place[0], s.stage[0]);
    while (s.place[b.turn].index >= 0)
        run_pair<KT>(b);
#endif
}

/* ---- launch -------------------------------------------------------------------------------- */

template <int KT> static cudaError_t launch(const rule_args *a, int processors, cudaStream_t stream)
{
    int pairs = a->d.shape.v_heads * a->d.spans;
    dim3 grid((unsigned)min(pairs, BLOCKS * processors));
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config = sp_cuda_overlapping(
        grid, a->l.v_width / 16 * SP_WARP, sizeof(few_shared<KT>), &overlap, false, stream);

    return cudaLaunchKernelEx(&config, rule_few_kernel<KT>, *a);
}

cudaError_t sp_cuda_rule_few(int gpu, const rule_args *a, cudaStream_t stream)
{
    int processors = 0;
    cudaError_t code;

    if (!sp_cuda_overlaps()) /* code without bulk copies */
        return cudaErrorNotSupported;
    code = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, gpu);
    if (code != cudaSuccess)
        return code;
    switch (a->l.k_width) {
    case 32:
        return launch<2>(a, processors, stream);
    case 64:
        return launch<4>(a, processors, stream);
    default:
        return launch<8>(a, processors, stream);
    }
}

template <int KT> static cudaError_t allow(cudaError_t before)
{
    cudaError_t code = before;

    if (code == cudaSuccess)
        code =
            cudaFuncSetAttribute(rule_few_kernel<KT>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 (int)sizeof(few_shared<KT>));
    if (code == cudaSuccess)
        code = cudaFuncSetAttribute(rule_few_kernel<KT>,
                                    cudaFuncAttributePreferredSharedMemoryCarveout,
                                    cudaSharedmemCarveoutMaxShared);
    return code;
}

cudaError_t sp_cuda_rule_few_init(void)
{
    return allow<2>(allow<4>(allow<8>(cudaSuccess)));
}
