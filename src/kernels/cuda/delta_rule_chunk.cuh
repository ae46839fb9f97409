/*
 * delta_rule_chunk.cuh: one chunk of the gated delta rule in a block: its rows in shared memory, S
 * and r of 16 columns of v in a warp, the fold, and what is kept of the rows for later steps. Both
 * kernels that go through chunks (delta_rule.cu, delta_rule_prefill.cu) compute with these alone
 * what has bits. The formula and the order of the sums are in delta_rule.cuh.
 *
 * Each warp has 16 columns of v, for which nothing of the other warps' is needed but the sum of the
 * norm. S of its columns is in registers as the tiles [v, k] of an mma's sum, which are its left
 * operand too. Rows of the chunk are columns of an mma.
 *
 * The sum of the norm: columns l and l + 8 of a warp's 16, a butterfly, then the warps in order.
 */
#ifndef SP_KERNELS_CUDA_DELTA_RULE_CHUNK_CUH
#define SP_KERNELS_CUDA_DELTA_RULE_CHUNK_CUH

#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/delta_rule.cuh"

#define WARPS_MAX (SP_CUDA_RULE_DIM_MAX / 16)
#define PAD       8 /* elements; of a row in shared memory */
#define T_STRIDE  (CHUNK + PAD)
#define MATRIX    (CHUNK * T_STRIDE)

/* Of one chunk, in shared memory. */
typedef struct chunk_stage {
    uint16_t *k, *q;    /* [CHUNK, k_width + PAD] */
    uint16_t *v, *z;    /* [CHUNK, width + PAD] the block's columns */
    uint16_t *matrices; /* [4, CHUNK, T_STRIDE] T upper, T lower, M upper, M lower */
    float2 *gates;      /* [CHUNK] G, beta */
} chunk_stage;

/* What a block works on. */
typedef struct rule_place {
    sp_cuda_rule_span span;
    int head, k_head, index; /* of the span */
    int end;                 /* position after the last row */
    int keep;                /* the border at which S is kept in the slot */
    bool changes;            /* S is written there */
    int column, width;       /* the block's columns of v: width / 16 warps have them */
} rule_place;

static __device__ __forceinline__ int border_to_keep(const sp_cuda_rule_span &span)
{
    return (span.position + span.n_final) / CHUNK * CHUNK;
}

static __device__ __forceinline__ rule_place find_place(const rule_args &a, int head, int column,
                                                        int width)
{
    rule_place p;

    p.index = blockIdx.y;
    p.head = head;
    p.k_head = head / a.l.per_key;
    p.span = a.d.span[p.index];
    p.end = p.span.position + p.span.n_rows;
    p.keep = border_to_keep(p.span);
    p.changes = p.span.load >= 0 || p.keep > p.span.folded;
    p.column = column;
    p.width = width;
    return p;
}

/* The warp's 16 columns, from the block's first. */
static __device__ __forceinline__ int own_columns(const rule_place &p)
{
    int column = (threadIdx.x >> 5) * 16;

    return column < p.width ? column : column - p.width;
}

static __host__ __device__ __forceinline__ int stage_bytes(int k_width, int width)
{
    return 2 * CHUNK * (k_width + PAD) * 2 + 2 * CHUNK * (width + PAD) * 2 + 4 * MATRIX * 2 +
           CHUNK * 8;
}

static __device__ __forceinline__ chunk_stage find_stage(const rule_args &a, int width,
                                                         char *memory, int border)
{
    int k = CHUNK * (a.l.k_width + PAD), v = CHUNK * (width + PAD);
    int odd = border / CHUNK & 1;
    chunk_stage s;

    s.k = (uint16_t *)(memory + odd * stage_bytes(a.l.k_width, width));
    s.q = s.k + k;
    s.v = s.q + k;
    s.z = s.v + v;
    s.matrices = s.z + v;
    s.gates = (float2 *)(s.matrices + 4 * MATRIX);
    return s;
}

/* ---- staging ------------------------------------------------------------------------------- */

static __device__ __forceinline__ void copy_gates(float2 *to, const float2 *from)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(to)), "l"(from)
                 : "memory");
}

/* Copies 16 bytes of row r from `from` + r * from_stride to `to` + r * to_stride, strides in
 * elements, for the warp's rows of [first, end): a lane copies a column. Zeros where !there. */
static __device__ __forceinline__ void copy_column(uint16_t *to, int to_stride,
                                                   const uint16_t *from, int64_t from_stride,
                                                   chunk_rows rows, bool there)
{
    for (int row = rows.first + (int)(threadIdx.x >> 5); row < rows.end; row += blockDim.x >> 5)
        copy_async_if(shared_address(to + row * to_stride), from + row * from_stride, there);
}

/* The rows of this step in the chunk at `border`: lanes 0 .. 15 of a warp copy k, lanes 16 .. 31 q
 * of a row; then v and z; then T and M, and G and beta. */
static __device__ __forceinline__ void copy_new(const rule_args &a, const rule_place &p,
                                                const chunk_stage &s, int border, chunk_rows rows)
{
    const sp_cuda_rule_shape &shape = a.d.shape;
    int lane = threadIdx.x & 31, piece = lane & 15, stride = a.l.k_width + PAD;
    int64_t row = p.span.row + border - p.span.position, v_stride = shape.v_heads * shape.v_dim;
    bool second = lane >= 16, there = p.column + piece * 8 < shape.v_dim;

    if (piece * 8 < a.l.k_width)
        copy_column((second ? s.q : s.k) + piece * 8, stride,
                    (second ? a.q : a.k) + (row * shape.k_heads + p.k_head) * a.l.k_width +
                        piece * 8,
                    shape.k_heads * a.l.k_width, rows, true);
    if (piece * 8 < p.width) {
        const uint16_t *from = second ? (const uint16_t *)a.d.z : a.v;
        int column = there ? p.column + piece * 8 : 0, offset = p.head * shape.v_dim + column;

        if (second && shape.fused) {
            from = (const uint16_t *)a.d.qkv;
            v_stride = a.l.qkv_width;
            offset = v_offset(a, p.head) + a.l.per_key * shape.v_dim + column;
        }
        copy_column((second ? s.z : s.v) + piece * 8, p.width + PAD, from + row * v_stride + offset,
                    v_stride, rows, there);
    }
    row = row * shape.v_heads + p.head;
    if (!second)
        copy_column(s.matrices + piece / 4 * MATRIX + piece % 4 * 8, T_STRIDE,
                    a.matrices + row * 4 * CHUNK + piece * 8, shape.v_heads * 4 * CHUNK, rows,
                    true);
    for (int i = rows.first + (int)threadIdx.x; i < rows.end; i += blockDim.x)
        copy_gates(s.gates + i, a.gates + row + (int64_t)i * shape.v_heads);
}

/* The earlier rows of a chunk that will be folded, [0, end): lanes 0 .. 15 copy k, the others T. */
static __device__ __forceinline__ void copy_old(const rule_args &a, const rule_place &p,
                                                const chunk_stage &s, int border, int end)
{
    const char *slot = slot_of(a.d, p.span.slot);
    int lane = threadIdx.x & 31, piece = lane & 15, place = place_of(border);
    const float *g = (const float *)(slot + a.l.ring_g) + p.head * RING + place;

    if (lane < 16 && piece * 8 < a.l.k_width)
        copy_column(s.k + piece * 8, a.l.k_width + PAD,
                    (const uint16_t *)(slot + a.l.ring_k) +
                        (p.k_head * RING + place) * a.l.k_width + piece * 8,
                    a.l.k_width, {0, end}, true);
    if (lane >= 16 && piece < 8)
        copy_column(s.matrices + piece / 4 * MATRIX + piece % 4 * 8, T_STRIDE,
                    (const uint16_t *)(slot + a.l.ring_t) + (p.head * RING + place) * 2 * CHUNK +
                        piece * 8,
                    2 * CHUNK, {0, end}, true);
    for (int i = threadIdx.x; i < end; i += blockDim.x)
        s.gates[i] = {g[i], 0.0f};
}

static __device__ __forceinline__ void copy_chunk(const rule_args &a, const rule_place &p,
                                                  char *memory, int border)
{
    const chunk_rows rows = rows_of_chunk(p.span, border);
    const chunk_stage s = find_stage(a, p.width, memory, border);

    if (border >= p.end)
        return;
    if (rows.end > rows.first)
        copy_new(a, p, s, border, rows);
    if (rows.first > 0 && rows.end == CHUNK)
        copy_old(a, p, s, border, rows.first);
    copy_commit();
}

/* ---- the state ----------------------------------------------------------------------------- */

/* Of 16 columns v, k_dim in tiles of 8, as an mma has its sum. */
template <int KT> struct rule_state {
    float s[2 * KT][4];
};

static __device__ __forceinline__ int64_t warp_offset(const rule_args &a, const rule_place &p)
{
    int64_t column = (int64_t)p.head * a.l.v_width + p.column + own_columns(p);

    return column * a.l.k_width + (threadIdx.x & 31) * 4;
}

template <int KT>
static __device__ __forceinline__ void load_state(const rule_args &a, const rule_place &p,
                                                  rule_state<KT> *state)
{
    const sp_cuda_rule_span &span = p.span;
    const char *from = span.load >= 0 ? snapshot_of(a.d, span.load) : slot_of(a.d, span.slot);
    const float *s = (const float *)from + warp_offset(a, p);
    bool zero = span.load < 0 && span.folded == 0;

#pragma unroll
    for (int q = 0; q < 2 * KT; q++) {
        float4 v = zero ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : *(const float4 *)(s + q * 128);

        state->s[q][0] = v.x, state->s[q][1] = v.y;
        state->s[q][2] = v.z, state->s[q][3] = v.w;
    }
}

template <int KT>
static __device__ __forceinline__ void store_state(const rule_args &a, const rule_place &p,
                                                   const rule_state<KT> &state, char *to)
{
    float *s = (float *)to + warp_offset(a, p);

#pragma unroll
    for (int q = 0; q < 2 * KT; q++)
        *(float4 *)(s + q * 128) =
            make_float4(state.s[q][0], state.s[q][1], state.s[q][2], state.s[q][3]);
}

/* Split as by `split`, but anew at each call: the compiler must not keep the parts of a whole S. */
static __device__ __forceinline__ split_two split_again(float x, float y)
{
    split_two s;
    float2 upper;

    asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(s.upper) : "f"(y), "f"(x));
    upper = widen_two<0>(s.upper);
    s.lower = narrow_two<0>(x - upper.x, y - upper.y);
    return s;
}

/* The tiles of k 16 * i .. as the left operand. */
template <int KT>
static __device__ __forceinline__ void split_state(const rule_state<KT> &state, int i,
                                                   uint32_t (&upper)[4], uint32_t (&lower)[4])
{
#pragma unroll
    for (int half = 0; half < 4; half++) {
        const float *c = state.s[2 * i + half / 2] + half % 2 * 2;
        split_two two = split_again(c[0], c[1]);

        upper[half] = two.upper;
        lower[half] = two.lower;
    }
}

/* ---- products ------------------------------------------------------------------------------ */

/* The thread's values of r, in shared memory: those of tile t, as an mma has its sum, are at
 * at[t * stride]. No other thread reads them. */
typedef struct rule_r {
    float4 *at;
    int stride;
} rule_r;

/* The rows j of r from 16 * half on, split as a left operand. */
typedef struct rule_parts {
    uint32_t upper[4], lower[4];
} rule_parts;

static __device__ __forceinline__ rule_parts split_r(const rule_r &r, int half)
{
    float4 low = r.at[2 * half * r.stride], high = r.at[(2 * half + 1) * r.stride];
    split_two a0 = split(low.x, low.y), a1 = split(low.z, low.w);
    split_two a2 = split(high.x, high.y), a3 = split(high.z, high.w);

    return {{a0.upper, a1.upper, a2.upper, a3.upper}, {a0.lower, a1.lower, a2.lower, a3.lower}};
}

/* c += r · (T or M)ᵀ of the 8 rows from 8 * TILE on; the lower parts of a matrix follow it. */
template <int TILE>
static __device__ __forceinline__ void multiply_matrix(const rule_parts *r, const uint16_t *matrix,
                                                       float (&c)[4])
{
    int lane = threadIdx.x & 31, at = (8 * TILE + (lane & 7)) * T_STRIDE * 2 + (lane >> 3) * 16;
    uint4 u = load_matrices(shared_address(matrix) + at);
    uint4 l = load_matrices(shared_address(matrix + MATRIX) + at);
    const uint32_t right[2][4] = {{u.x, u.y, l.x, l.y}, {u.z, u.w, l.z, l.w}};

#pragma unroll
    for (int half = 0; half <= TILE / 2; half++) {
        const uint32_t *b = right[half];
        const uint32_t *x = r[half].upper, *y = r[half].lower;

        mma<0>(c, x[0], x[1], x[2], x[3], b[0], b[1]);
        mma<0>(c, y[0], y[1], y[2], y[3], b[0], b[1]);
        mma<0>(c, x[0], x[1], x[2], x[3], b[2], b[3]);
    }
}

/* u · exp(G_last - G_j) of a tile's rows j: upper parts, then lower parts of a left operand. */
template <int TILE>
static __device__ __forceinline__ float4 find_u(const chunk_stage &s, const rule_parts *r)
{
    const float2 *gates = s.gates + 8 * TILE + 2 * (threadIdx.x & 3);
    float u[4] = {}, last = s.gates[CHUNK - 1].x;
    float g0 = power_of_e(last - gates[0].x), g1 = power_of_e(last - gates[1].x);
    split_two a, b;

    multiply_matrix<TILE>(r, s.matrices, u);
    a = split(u[0] * g0, u[1] * g1), b = split(u[2] * g0, u[3] * g1);
    return make_float4(__uint_as_float(a.upper), __uint_as_float(b.upper), __uint_as_float(a.lower),
                       __uint_as_float(b.lower));
}

static __device__ __forceinline__ uint4 bits_of(float4 x)
{
    return make_uint4(__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z),
                      __float_as_uint(x.w));
}

/* The rows j from 16 * half on of S = exp(G_last) S + u kᵀ; u has this thread's. */
template <int KT>
static __device__ __forceinline__ void add_half(const chunk_stage &s, const rule_r &u, int half,
                                                float decay, rule_state<KT> *state)
{
    const int stride = (KT * 16 + PAD) * 2;
    int lane = threadIdx.x & 31;
    uint32_t k = shared_address(s.k) + (16 * half + (lane & 15)) * stride + (lane >> 4) * 16;
    uint4 low = bits_of(u.at[2 * half * u.stride]);
    uint4 high = bits_of(u.at[(2 * half + 1) * u.stride]);

#pragma unroll
    for (int q = 0; q < 2 * KT; q += 2) {
        uint4 right = load_transposed(k + q * 16);
        float(&c)[4] = state->s[q], (&d)[4] = state->s[q + 1];

#pragma unroll
        for (int e = 0; e < 4 && half == 0; e++)
            c[e] *= decay, d[e] *= decay;
        mma<0>(c, low.x, low.y, high.x, high.y, right.x, right.y);
        mma<0>(d, low.x, low.y, high.x, high.y, right.z, right.w);
        mma<0>(c, low.z, low.w, high.z, high.w, right.x, right.y);
        mma<0>(d, low.z, low.w, high.z, high.w, right.z, right.w);
    }
}

/* S at the next border. What r has is used up. */
template <int KT>
static __device__ __forceinline__ void fold(const chunk_stage &s, const rule_r &r,
                                            rule_state<KT> *state)
{
    const rule_parts parts[2] = {split_r(r, 0), split_r(r, 1)};
    float decay = power_of_e(s.gates[CHUNK - 1].x);

    /* u takes the place of r: S takes half of the registers. */
    r.at[0] = find_u<0>(s, parts);
    r.at[r.stride] = find_u<1>(s, parts);
    r.at[2 * r.stride] = find_u<2>(s, parts);
    r.at[3 * r.stride] = find_u<3>(s, parts);
    add_half<KT>(s, r, 0, decay, state);
    add_half<KT>(s, r, 1, decay, state);
}

/* ---- rows ---------------------------------------------------------------------------------- */

/* Where the ring has the thread's values of r from row 0 of the chunk on. */
static __device__ __forceinline__ float *ring_of(const rule_args &a, const rule_place &p,
                                                 int border)
{
    int lane = threadIdx.x & 31;

    return (float *)(slot_of(a.d, p.span.slot) + a.l.ring_r) +
           (p.head * RING + place_of(border) + 2 * (lane & 3)) * a.l.v_width + p.column +
           own_columns(p) + (lane >> 2);
}

/* r of the chunk's earlier rows, zeros of the others. */
static __device__ __forceinline__ void load_r(const rule_args &a, const rule_place &p, int border,
                                              const rule_r &r)
{
    int first = rows_of_chunk(p.span, border).first, row = 2 * (int)(threadIdx.x & 3);
    const float *ring = ring_of(a, p, border);

#pragma unroll
    for (int t = 0; t < TILES; t++) {
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const float *from = ring + 8 * t * a.l.v_width;

        if (8 * t + row < first)
            v.x = from[0], v.z = from[8];
        if (8 * t + row + 1 < first)
            v.y = from[a.l.v_width], v.w = from[a.l.v_width + 8];
        r.at[t * r.stride] = v;
    }
}

static __device__ __forceinline__ void store_r(const rule_args &a, const rule_place &p, int border,
                                               chunk_rows rows, const rule_r &r)
{
    int row = 2 * (int)(threadIdx.x & 3);
    float *ring = ring_of(a, p, border);

#pragma unroll
    for (int t = 0; t < TILES; t++) {
        float4 v = r.at[t * r.stride];
        float *to = ring + 8 * t * a.l.v_width;

        if (8 * t + row >= rows.first && 8 * t + row < rows.end)
            to[0] = v.x, to[8] = v.z;
        if (8 * t + row + 1 >= rows.first && 8 * t + row + 1 < rows.end)
            to[a.l.v_width] = v.y, to[a.l.v_width + 8] = v.w;
    }
}

/* The warp's columns of v or z, for the 8 rows of a tile, as an mma has its sum. */
static __device__ __forceinline__ void load_columns(const rule_place &p, const uint16_t *from,
                                                    int tile, float (&to)[4])
{
    int lane = threadIdx.x & 31, stride = p.width + PAD;
    uint32_t at = shared_address(from + (8 * tile + (lane & 7)) * stride + own_columns(p) +
                                 (lane >> 3 & 1) * 8);
    uint4 v = load_transposed(at); /* the matrices of lanes 16 .. 31 are those of 0 .. 15 */
    float2 low = widen_two<0>(v.x), high = widen_two<0>(v.y);

    to[0] = low.x, to[1] = low.y;
    to[2] = high.x, to[3] = high.y;
}

static __device__ __forceinline__ bool is_finite(float x)
{
    return (__float_as_uint(x) & 0x7fffffffu) < 0x7f800000u;
}

/* r of a tile's new rows, beside those of earlier ones; returns whether all are finite. */
static __device__ __forceinline__ bool find_r(const rule_place &p, const chunk_stage &s, int tile,
                                              chunk_rows rows, const float (&of_k)[4],
                                              const rule_r &r)
{
    int row = 8 * tile + 2 * (int)(threadIdx.x & 3);
    float4 all = r.at[tile * r.stride];
    float v[4];

    load_columns(p, s.v, tile, v);
    if (row >= rows.first && row < rows.end) {
        float2 gates = s.gates[row];
        float power = -power_of_e(gates.x);

        all.x = gates.y * fmaf(power, of_k[0], v[0]);
        all.z = gates.y * fmaf(power, of_k[2], v[2]);
    }
    if (row + 1 >= rows.first && row + 1 < rows.end) {
        float2 gates = s.gates[row + 1];
        float power = -power_of_e(gates.x);

        all.y = gates.y * fmaf(power, of_k[1], v[1]);
        all.w = gates.y * fmaf(power, of_k[3], v[3]);
    }
    r.at[tile * r.stride] = all;
    return is_finite(all.x) && is_finite(all.y) && is_finite(all.z) && is_finite(all.w);
}

/* o of a tile, which may be of_q; the sum of its squares over the warp's columns goes to `sums`. */
template <int TILE>
static __device__ __forceinline__ void find_o(const rule_args &a, const chunk_stage &s,
                                              const rule_parts *r, const float (&of_q)[4],
                                              float (&o)[4], float *sums)
{
    int lane = threadIdx.x & 31;
    const float2 *gates = s.gates + 8 * TILE + 2 * (lane & 3);
    float g0 = power_of_e(gates[0].x), g1 = power_of_e(gates[1].x), sum0, sum1;
    float factor = 1.0f / sqrtf((float)a.d.shape.k_dim);

    o[0] = of_q[0] * g0, o[1] = of_q[1] * g1;
    o[2] = of_q[2] * g0, o[3] = of_q[3] * g1;
    multiply_matrix<TILE>(r, s.matrices + 2 * MATRIX, o);
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
        sums[8 * TILE + 2 * lane] = sum0;
        sums[8 * TILE + 2 * lane + 1] = sum1;
    }
}

/* The factor of the norm of row `lane`, where it is one of `rows`. */
static __device__ __forceinline__ float inverse_of(const rule_args &a, chunk_rows rows,
                                                   const float (*sums)[CHUNK])
{
    int lane = threadIdx.x & 31;
    float sum = 0.0f;

    if (lane < rows.first || lane >= rows.end)
        return 0.0f;

#pragma unroll
    for (int w = 0; w < WARPS_MAX; w++)
        if (w < a.l.v_width / 16)
            sum += sums[w][lane];
    return rsqrtf(sum / (float)a.d.shape.v_dim + a.d.eps);
}

/* y of a tile's new rows; a lane has the inverse of its own row. z: load_columns. */
static __device__ __forceinline__ void store_y(const rule_args &a, const rule_place &p, int tile,
                                               int border, chunk_rows rows, float inverse,
                                               const float (&z)[4], const float (&o)[4])
{
    const sp_cuda_rule_shape &shape = a.d.shape;
    int lane = threadIdx.x & 31, v = p.column + own_columns(p), row = 8 * tile + 2 * (lane & 3);
    const float *weights = a.d.norm + v + (lane >> 2);
    bool low = v + (lane >> 2) < shape.v_dim, high = v + 8 + (lane >> 2) < shape.v_dim;
    float w0 = low ? weights[0] : 0.0f, w1 = high ? weights[8] : 0.0f;
    float inverse0 = __shfl_sync(~0u, inverse, row);
    float inverse1 = __shfl_sync(~0u, inverse, row + 1);
    uint32_t two, more;
    int64_t to;

    two = transpose(
        narrow_two<0>(o[0] * inverse0 * w0 * silu(z[0]), o[1] * inverse1 * w0 * silu(z[1])));
    more = transpose(
        narrow_two<0>(o[2] * inverse0 * w1 * silu(z[2]), o[3] * inverse1 * w1 * silu(z[3])));
    row = 8 * tile + (lane >> 2);
    if (row < rows.first || row >= rows.end)
        return;
    to = (int64_t)(p.span.row + border + row - p.span.position) * shape.v_heads + p.head;
    to = to * shape.v_dim + v + 2 * (lane & 3);
    if (v + 2 * (lane & 3) < shape.v_dim)
        *(uint32_t *)((uint16_t *)a.d.y + to) = two;
    if (v + 8 + 2 * (lane & 3) < shape.v_dim)
        *(uint32_t *)((uint16_t *)a.d.y + to + 8) = more;
}

/* ---- snapshots and the ring ---------------------------------------------------------------- */

/* The block's threads from warp `warp` on, so that what follows is done by other warps. */
static __device__ __forceinline__ int thread_from(int warp)
{
    int thread = (int)threadIdx.x - warp * SP_WARP % (int)blockDim.x;

    return thread < 0 ? thread + (int)blockDim.x : thread;
}

/* Copies 16-byte pieces of a row's channels that this block has: v of its head, and q and k with
 * the first head of a key head. */
static __device__ __forceinline__ void copy_channels(const rule_args &a, const rule_place &p,
                                                     uint16_t *to, const uint16_t *from,
                                                     bool of_qkv)
{
    int v_pieces = a.d.shape.v_dim / 8, k_pieces = a.d.shape.k_dim / 8;
    bool first = p.head == p.k_head * a.l.per_key;

    for (int i = thread_from(3); i < v_pieces + (first ? 2 * k_pieces : 0); i += blockDim.x) {
        int channel, offset, piece = i;

        if (i < v_pieces) {
            channel = v_channel(a, p.head), offset = v_offset(a, p.head);
        } else if (i < v_pieces + k_pieces) {
            channel = q_channel(a, p.k_head), offset = q_offset(a, p.k_head);
            piece = i - v_pieces;
        } else {
            channel = k_channel(a, p.k_head), offset = k_offset(a, p.k_head);
            piece = i - v_pieces - k_pieces;
        }
        channel += 8 * piece, offset += 8 * piece;
        *(uint4 *)(to + channel) =
            from ? *(const uint4 *)(from + (of_qkv ? offset : channel)) : make_uint4(0, 0, 0, 0);
    }
}

/* Where the convolution's inputs of a position before the span's are; NULL: zeros. */
static __device__ __forceinline__ const uint16_t *find_input(const rule_args &a,
                                                             const rule_place &p, int position)
{
    int back = p.span.position - position;

    if (position < 0)
        return NULL;
    if (p.span.load >= 0)
        return (const uint16_t *)(snapshot_of(a.d, p.span.load) + a.l.conv) +
               (int64_t)(a.d.shape.conv_width - 1 - back) * a.l.channels;
    return (const uint16_t *)(slot_of(a.d, p.span.slot) + a.l.ring_conv) +
           (int64_t)place_of(position) * a.l.channels;
}

/* The inputs before the span's first row. */
static __device__ __forceinline__ void save_inputs(const rule_args &a, const rule_place &p)
{
    char *to = snapshot_of(a.d, p.span.save);
    int width = a.d.shape.conv_width;

    for (int back = width - 1; back > 0; back--)
        copy_channels(a, p,
                      (uint16_t *)(to + a.l.conv) + (int64_t)(width - 1 - back) * a.l.channels,
                      find_input(a, p, p.span.position - back), false);
}

/* The inputs that a convolution of a later step may read. */
static __device__ __forceinline__ void keep_inputs(const rule_args &a, const rule_place &p)
{
    const sp_cuda_rule_span &span = p.span;
    uint16_t *ring = (uint16_t *)(slot_of(a.d, span.slot) + a.l.ring_conv);
    int first = max(0, span.position + span.n_final - (a.d.shape.conv_width - 1));

    for (int position = first; position < p.end; position++) {
        uint16_t *to = ring + (int64_t)place_of(position) * a.l.channels;
        int64_t row = span.row + position - span.position;

        if (position >= span.position)
            copy_channels(a, p, to, (const uint16_t *)a.d.qkv + row * a.l.qkv_width, true);
        else if (span.load >= 0)
            copy_channels(a, p, to, find_input(a, p, position), false);
    }
}

/* k of the rows that are still open. */
static __device__ __forceinline__ void keep_keys(const rule_args &a, const sp_cuda_rule_span &span,
                                                 int keep, int k_head)
{
    int first = max(span.position, keep), n = span.position + span.n_rows - first;
    int pieces = a.l.k_width / 8;
    uint16_t *ring =
        (uint16_t *)(slot_of(a.d, span.slot) + a.l.ring_k) + (int64_t)k_head * RING * a.l.k_width;

    for (int i = thread_from(1); i < n * pieces; i += blockDim.x) {
        int position = first + i / pieces, piece = i % pieces * 8;
        int64_t row = span.row + position - span.position;

        *(uint4 *)(ring + (int64_t)place_of(position) * a.l.k_width + piece) =
            *(const uint4 *)(a.k + (row * a.d.shape.k_heads + k_head) * a.l.k_width + piece);
    }
}

/* T and G of the rows that are still open. */
static __device__ __forceinline__ void keep_matrices(const rule_args &a, const rule_place &p)
{
    int first = max(p.span.position, p.keep), pieces = 2 * CHUNK / 8;
    char *slot = slot_of(a.d, p.span.slot);
    uint16_t *t = (uint16_t *)(slot + a.l.ring_t) + (int64_t)p.head * RING * 2 * CHUNK;
    float *g = (float *)(slot + a.l.ring_g) + p.head * RING;

    for (int i = thread_from(0); i < (p.end - first) * pieces; i += blockDim.x) {
        int position = first + i / pieces, piece = i % pieces * 8;
        int64_t at =
            (int64_t)(p.span.row + position - p.span.position) * a.d.shape.v_heads + p.head;

        *(uint4 *)(t + place_of(position) * 2 * CHUNK + piece) =
            *(const uint4 *)(a.matrices + at * 4 * CHUNK + piece);
        if (piece == 0)
            g[place_of(position)] = a.gates[at].x;
    }
}

#endif
