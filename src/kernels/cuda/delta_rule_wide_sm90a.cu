/*
 * delta_rule_wide_sm90a.cu: the gated delta rule of spans of many rows through wgmma, for heads of
 * 128, after delta_rule_prepare.cu. The bits are those of delta_rule.cu: wgmma has the chain of
 * mma, and the columns and rows of a product that a chain lacks there are zeros here.
 *
 * Grid: (value heads * SPLIT, spans). A cluster of SPLIT blocks has a value head, a block 64 of its
 * columns of v. One warpgroup keeps S, as the sum [v, k] of an mma, and goes from border to border;
 * a second one takes o from it through shared memory and has the norm and y; a warp fills a ring of
 * chunks by tensor copies, some chunks ahead. Nobody waits for the second warpgroup as long as it
 * is fast enough: it has two chunks of o, and finishes one after it has sent the next one's sums of
 * squares to the other block of the cluster.
 *
 * Of a chunk the first warpgroup's products follow each other like this, where each line waits for
 * what it needs of the lines before, and the tensor cores are busy with one while another's
 * operands are computed:
 *
 *     Sᵀk, two halves of k_dim     S is split
 *     Sᵀq
 *     u = T r                      r from Sᵀk
 *     o = e^G Sᵀq + M r
 *     S += k uᵀ, two halves        u · e^(G_last - G) from u, and S · e^(G_last)
 *
 * All rows of a chunk are computed, those that it lacks too: nothing of them is stored. Bound by
 * the latency of this chain. Where the first kernel still runs beside this one (ready), the warp
 * that fills the ring waits for its chunks.
 */
#include "kernels/cuda/delta_rule_chunk.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/wgmma.cuh"

#define SPLIT      2
#define DIM        128 /* of k and v */
#define COLUMNS    (DIM / SPLIT)
#define KT         (DIM / 16)
#define GROUP      128 /* threads of a warpgroup */
#define THREADS    (3 * GROUP)
#define STAGES     4
#define OUTPUTS    2                   /* chunks of o */
#define SUMS       4                   /* chunks of sums of squares */
#define ROW_BYTES  128                 /* of 64 elements, in the 128-byte swizzle */
#define TILE_BYTES (CHUNK * ROW_BYTES) /* the chunk's rows of 64 elements */
#define ATOM       (8 * ROW_BYTES)

/* Of a stage, as tiles. A row of T and of M has 32 upper and 32 lower parts. */
enum { TILE_K = 0, TILE_Q = 2, TILE_V = 4, TILE_Z, TILE_T, TILE_M, STAGE_TILES };

#define STAGE_BYTES  (STAGE_TILES * TILE_BYTES)
#define SHARED_BYTES (STAGES * STAGE_BYTES + OUTPUTS * 2 * TILES * GROUP * 16 + ATOM)

typedef struct walk_maps {
    CUtensorMap k, q, v, z, matrices;
} walk_maps;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

typedef struct walk_shared {
    uint64_t full[STAGES], empty[STAGES];
    uint64_t o_full[OUTPUTS], o_empty[OUTPUTS];
    uint64_t sums_full[SUMS];
    float2 gates[STAGES][CHUNK];
    float sums[SUMS][WARPS_MAX][CHUNK];
    rule_place p;
} walk_shared;

/* A place in a ring of N, and the parity of the phase in which it is filled. */
template <int N> struct ring_place {
    int index, parity;

    __device__ __forceinline__ void advance(void)
    {
        index = index + 1 == N ? 0 : index + 1;
        parity ^= index == 0;
    }
};

static __device__ __forceinline__ int first_border(const rule_place &p)
{
    return p.span.load >= 0 ? p.span.position : p.span.folded;
}

/* ---- the warp that fills the ring ---------------------------------------------------------- */

/* 16 bytes of a row into a tile. */
static __device__ __forceinline__ void put_piece(uint32_t tile, int row, int piece,
                                                 const uint16_t *from)
{
    copy_async(tile + row * ROW_BYTES + ((piece ^ (row & 7)) << 4), from);
}

/* A row of k, q, v, z, T and M of this step: lane i takes pieces of 16 bytes. */
static __device__ __forceinline__ void put_new_row(const rule_args &a, const rule_place &p,
                                                   uint32_t stage, int i, int64_t row)
{
    const sp_cuda_rule_shape &s = a.d.shape;
    int lane = threadIdx.x & 31, piece = lane & 7, column = p.column + piece * 8;
    const uint16_t *z = (const uint16_t *)a.d.z + (row * s.v_heads + p.head) * DIM;
    int64_t key = (row * s.k_heads + p.k_head) * DIM + (lane & 15) * 8;
    int64_t value = row * s.v_heads + p.head;

    if (s.fused)
        z = (const uint16_t *)a.d.qkv + row * a.l.qkv_width + v_offset(a, p.head) +
            a.l.per_key * DIM;
    put_piece(stage + (TILE_K + lane / 8) * TILE_BYTES, i, piece,
              lane < 16 ? a.k + key : a.q + key);
    put_piece(stage + (TILE_V + lane / 8) * TILE_BYTES, i, piece,
              lane < 8    ? a.v + value * DIM + column
              : lane < 16 ? z + column
                          : a.matrices + value * 4 * CHUNK + (lane - 16) * 8);
}

/* A row of an earlier step: of k and T. */
static __device__ __forceinline__ void put_old_row(const rule_args &a, const rule_place &p,
                                                   uint32_t stage, int i, int place)
{
    const char *slot = slot_of(a.d, p.span.slot);
    const uint16_t *k = (const uint16_t *)(slot + a.l.ring_k) + (p.k_head * RING + place) * DIM;
    const uint16_t *t = (const uint16_t *)(slot + a.l.ring_t) + (p.head * RING + place) * 2 * CHUNK;
    int lane = threadIdx.x & 31, piece = lane & 7;

    if (lane < 16)
        put_piece(stage + (TILE_K + lane / 8) * TILE_BYTES, i, piece, k + lane * 8);
    else if (lane < 24)
        put_piece(stage + TILE_T * TILE_BYTES, i, piece, t + piece * 8);
}

/* A chunk of which an earlier step had rows. */
static __device__ __forceinline__ void put_rows(const rule_args &a, const rule_place &p,
                                                uint32_t stage, float2 *gates, int border,
                                                chunk_rows rows)
{
    int64_t row = p.span.row + border - p.span.position;
    const float *g =
        (const float *)(slot_of(a.d, p.span.slot) + a.l.ring_g) + p.head * RING + place_of(border);
    int lane = threadIdx.x & 31;

    for (int i = 0; i < rows.first; i++)
        put_old_row(a, p, stage, i, place_of(border + i));
    for (int i = rows.first; i < rows.end; i++)
        put_new_row(a, p, stage, i, row + i);
    if (lane < rows.first)
        gates[lane] = {g[lane], 0.0f};
    else if (lane < rows.end)
        gates[lane] = a.gates[(row + lane) * a.d.shape.v_heads + p.head];
    copy_commit();
    copy_wait<0>();
    copies_before_bulk(); /* wgmma reads as they do */
}

static __device__ __forceinline__ void load_rows(const rule_args &a, const walk_maps &maps,
                                                 const rule_place &p, uint32_t stage, int row,
                                                 uint32_t full)
{
    int key = p.k_head * DIM, value = p.head * DIM;
    int z = a.d.shape.fused ? v_offset(a, p.head) + a.l.per_key * DIM : value;

    barrier_expect(full, STAGE_BYTES);
    tensor_load(stage + TILE_K * TILE_BYTES, &maps.k, key, row, full);
    tensor_load(stage + (TILE_K + 1) * TILE_BYTES, &maps.k, key + 64, row, full);
    tensor_load(stage + TILE_V * TILE_BYTES, &maps.v, value + p.column, row, full);
    tensor_load(stage + TILE_Q * TILE_BYTES, &maps.q, key, row, full);
    tensor_load(stage + (TILE_Q + 1) * TILE_BYTES, &maps.q, key + 64, row, full);
    tensor_load(stage + TILE_T * TILE_BYTES, &maps.matrices, value, row, full);
    tensor_load(stage + TILE_M * TILE_BYTES, &maps.matrices, value + 64, row, full);
    tensor_load(stage + TILE_Z * TILE_BYTES, &maps.z, z + p.column, row, full);
}

/* Waits until the first kernel is done with the chunk at `border`, which has rows of this step;
 * returns the border up to which it is: a lane looks at a chunk. */
static __device__ __forceinline__ int wait_ready(const rule_args &a, const rule_place &p,
                                                 int border)
{
    int own = border + (int)(threadIdx.x & 31) * CHUNK;
    int row = p.span.row + max(0, own - p.span.position);
    const int *ready = a.ready + ready_index(a, row, p.k_head);
    uint32_t missing;

    for (;;) {
        missing = __ballot_sync(~0u, own < p.end && load_ready(ready) == 0);
        if ((missing & 1) == 0)
            break;
        __nanosleep(200);
    }
    before_tensor_copies();
    __syncwarp();
    return border + (missing == 0 ? SP_WARP : __ffs((int)missing) - 1) * CHUNK;
}

static __device__ __forceinline__ void fill_ring(const rule_args &a, const walk_maps &maps,
                                                 const rule_place &p, uint32_t stages,
                                                 walk_shared *shared)
{
    ring_place<STAGES> at = {0, 0};
    int lane = threadIdx.x & 31, ready = a.ready == NULL ? p.end : 0;

    for (int border = first_border(p); border < p.end; border += CHUNK, at.advance()) {
        const chunk_rows rows = rows_of_chunk(p.span, border);
        uint32_t stage = stages + at.index * STAGE_BYTES;
        uint32_t full = shared_address(&shared->full[at.index]);
        float2 *gates = shared->gates[at.index];
        int row = p.span.row + border - p.span.position;

        barrier_wait(shared_address(&shared->empty[at.index]), at.parity ^ 1);
        if (border >= ready && rows.end > rows.first)
            ready = wait_ready(a, p, border);
        if (rows.first > 0) {
            put_rows(a, p, stage, gates, border, rows);
            barrier_arrive(full);
        } else {
            if (lane == 0)
                load_rows(a, maps, p, stage, row, full);
            if (lane < rows.end)
                copy_gates(gates + lane,
                           a.gates + (int64_t)(row + lane) * a.d.shape.v_heads + p.head);
            barrier_arrive_after_copies(full);
        }
        if (lane == 0)
            barrier_arrive(full);
    }
}

/* ---- the warpgroup that keeps S ------------------------------------------------------------ */

/* The warp's 16 columns of v or z, as an mma has its sum. */
static __device__ __forceinline__ void load_tiles(uint32_t tile, float (&to)[TILES][4])
{
    int lane = threadIdx.x & 31, row = (lane >> 4) * 8 + (lane & 7);
    int piece = (int)(threadIdx.x >> 5 & 3) * 2 + (lane >> 3 & 1);
    uint32_t at = tile + row * ROW_BYTES + ((piece ^ (row & 7)) << 4);

#pragma unroll
    for (int t = 0; t < TILES; t += 2) {
        uint4 x = load_transposed(at + t * 8 * ROW_BYTES);
        float2 a = widen_two<0>(x.x), b = widen_two<0>(x.y);
        float2 c = widen_two<0>(x.z), d = widen_two<0>(x.w);

        to[t][0] = a.x, to[t][1] = a.y, to[t][2] = b.x, to[t][3] = b.y;
        to[t + 1][0] = c.x, to[t + 1][1] = c.y, to[t + 1][2] = d.x, to[t + 1][3] = d.y;
    }
}

/* A fragment of 64 by 32, split as left operands of 16 of the 32 each. */
typedef struct walk_parts {
    uint32_t upper[2][4], lower[2][4];
} walk_parts;

static __device__ __forceinline__ void split_tiles(const float (&x)[TILES][4], walk_parts *to)
{
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            split_two two = split(x[t][2 * e], x[t][2 * e + 1]);

            to->upper[t / 2][t % 2 * 2 + e] = two.upper;
            to->lower[t / 2][t % 2 * 2 + e] = two.lower;
        }
}

/* The operand so many bytes on: their sixteenths are in the lowest bits. */
static __device__ __forceinline__ uint64_t operand_at(uint64_t operand, int bytes)
{
    return operand + (uint64_t)(bytes >> 4);
}

/* d = x · Tᵀ. */
static __device__ __forceinline__ void multiply_parts(float (&d)[TILES][4], const walk_parts &x,
                                                      uint64_t matrix)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint64_t upper = operand_at(matrix, half * 32);
        uint64_t lower = operand_at(matrix, CHUNK * 2 + half * 32);

        wgmma_registers<CHUNK, 0>::multiply(&d[0][0], x.upper[half], upper, half > 0);
        wgmma_registers<CHUNK, 0>::multiply(&d[0][0], x.lower[half], upper, 1);
        wgmma_registers<CHUNK, 0>::multiply(&d[0][0], x.upper[half], lower, 1);
    }
    wgmma_commit();
}

/* S as left operands of 16 k each. */
typedef struct walk_split {
    uint32_t upper[KT][4], lower[KT][4];
} walk_split;

static __device__ __forceinline__ void split_step(const rule_state<KT> &state, int i,
                                                  walk_split *to)
{
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const float *c = state.s[2 * i + e / 2] + e % 2 * 2;
        split_two two = split(c[0], c[1]);

        to->upper[i][e] = two.upper;
        to->lower[i][e] = two.lower;
    }
}

static __device__ __forceinline__ void split_first_half(const rule_state<KT> &state, walk_split *to)
{
#pragma unroll
    for (int i = 0; i < KT / 2; i++)
        split_step(state, i, to);
}

/* d (+)= Sᵀ · rowsᵀ of 16 k. */
static __device__ __forceinline__ void multiply_step(float (&d)[TILES][4], const walk_split &s,
                                                     uint64_t rows, int i)
{
    uint64_t b = operand_at(rows, i / 4 * TILE_BYTES + i % 4 * 32);

    wgmma_registers<CHUNK, 0>::multiply(&d[0][0], s.upper[i], b, i > 0);
    wgmma_registers<CHUNK, 0>::multiply(&d[0][0], s.lower[i], b, 1);
}

/* Half `half` of Sᵀq. */
static __device__ __forceinline__ void multiply_queries(float (&d)[TILES][4], const walk_split &s,
                                                        uint64_t stage, int half)
{
#pragma unroll
    for (int i = 0; i < KT / 2; i++)
        multiply_step(d, s, operand_at(stage, TILE_Q * TILE_BYTES), half * KT / 2 + i);
    wgmma_commit();
}

/* Sᵀk, whose second half of S is split here. */
static __device__ __forceinline__ void multiply_keys(const rule_state<KT> &state,
                                                     float (&d)[TILES][4], walk_split *s,
                                                     uint64_t stage)
{
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < KT; i++) {
        if (i >= KT / 2) {
            split_step(state, i, s);
            wgmma_fence();
        }
        multiply_step(d, *s, operand_at(stage, TILE_K * TILE_BYTES), i);
        if (i == KT / 2 - 1 || i == KT - 1)
            wgmma_commit();
    }
}

/* 64 of k_dim, from 64 * part on, of S += u kᵀ. */
static __device__ __forceinline__ void add_rows(rule_state<KT> *state, const walk_parts &u,
                                                uint64_t k, int part)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint64_t b = operand_at(k, part * TILE_BYTES + half * 2 * ATOM);

        wgmma_registers<64, 1>::multiply(&state->s[8 * part][0], u.upper[half], b, 1);
        wgmma_registers<64, 1>::multiply(&state->s[8 * part][0], u.lower[half], b, 1);
    }
    wgmma_commit();
}

/* What a thread needs of the gates of its rows 8 t + 2 (lane % 4) + e. */
typedef struct walk_gates {
    float2 power[TILES]; /* e^G */
    float2 beta[TILES];
    float2 rest[TILES]; /* e^(G_last - G) */
    float whole;        /* e^G_last */
} walk_gates;

static __device__ __forceinline__ void load_gates(const float2 *gates, walk_gates *g)
{
    float last = gates[CHUNK - 1].x;

    g->whole = power_of_e(last);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        float4 two = *(const float4 *)(gates + 8 * t + 2 * (threadIdx.x & 3));

        g->power[t] = {power_of_e(two.x), power_of_e(two.z)};
        g->beta[t] = {two.y, two.w};
        g->rest[t] = {power_of_e(last - two.x), power_of_e(last - two.z)};
    }
}

/* r of the rows of a chunk: of this step those of `rows`, from Sᵀk and v; before them those of the
 * ring, after them zeros. */
static __device__ __forceinline__ void find_r_of_some(const rule_args &a, const rule_place &p,
                                                      int border, chunk_rows rows,
                                                      float (&r)[TILES][4])
{
    const float *ring = ring_of(a, p, border);

#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int row = 8 * t + 2 * (int)(threadIdx.x & 3) + e % 2;

            if (row < rows.first)
                r[t][e] = ring[(8 * t + e % 2) * a.l.v_width + e / 2 * 8];
            else if (row >= rows.end)
                r[t][e] = 0.0f;
        }
}

static __device__ __forceinline__ void keep_r(const rule_args &a, const rule_place &p, int border,
                                              chunk_rows rows, const float (&r)[TILES][4])
{
    float *ring = ring_of(a, p, border);

#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int row = 8 * t + 2 * (int)(threadIdx.x & 3) + e % 2;

            if (row >= rows.first && row < rows.end)
                ring[(8 * t + e % 2) * a.l.v_width + e / 2 * 8] = r[t][e];
        }
}

static __device__ __forceinline__ void find_all_r(const walk_gates &g, const float (&v)[TILES][4],
                                                  const float (&of_k)[TILES][4],
                                                  float (&r)[TILES][4])
{
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        r[t][0] = g.beta[t].x * fmaf(-g.power[t].x, of_k[t][0], v[t][0]);
        r[t][1] = g.beta[t].y * fmaf(-g.power[t].y, of_k[t][1], v[t][1]);
        r[t][2] = g.beta[t].x * fmaf(-g.power[t].x, of_k[t][2], v[t][2]);
        r[t][3] = g.beta[t].y * fmaf(-g.power[t].y, of_k[t][3], v[t][3]);
    }
}

static __device__ __forceinline__ void scale_tiles(const float (&x)[TILES][4],
                                                   const float2 (&by)[TILES], float (&to)[TILES][4])
{
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        to[t][0] = x[t][0] * by[t].x, to[t][1] = x[t][1] * by[t].y;
        to[t][2] = x[t][2] * by[t].x, to[t][3] = x[t][3] * by[t].y;
    }
}

static __device__ __forceinline__ bool are_finite(const float (&r)[TILES][4])
{
    float sum = 0.0f; /* of zeros, or NaN */

#pragma unroll
    for (int t = 0; t < TILES; t++)
        sum =
            fmaf(r[t][0], 0.0f, fmaf(r[t][1], 0.0f, fmaf(r[t][2], 0.0f, fmaf(r[t][3], 0.0f, sum))));
    return sum == 0.0f;
}

static __device__ __forceinline__ uint4 four_of(const uint32_t (&x)[4])
{
    return make_uint4(x[0], x[1], x[2], x[3]);
}

/* What is kept of S at a border; all products are complete. */
static __device__ __forceinline__ void keep_state(const rule_args &a, const rule_place &p,
                                                  const rule_state<KT> &state, int border)
{
    if (border == p.keep && p.changes)
        store_state<KT>(a, p, state, slot_of(a.d, p.span.slot));
    if (border == p.span.position && p.span.save >= 0)
        store_state<KT>(a, p, state, snapshot_of(a.d, p.span.save));
}

/* What the warpgroup has of a chunk. */
typedef struct walk_chunk {
    chunk_rows rows;
    int border;
    uint64_t stage;     /* as an operand */
    bool is_new, folds; /* has rows of this step; S changes */
} walk_chunk;

static __device__ __forceinline__ walk_chunk find_chunk(int border, int position, int end, int keep)
{
    walk_chunk c;

    c.rows = {max(0, min(CHUNK, position - border)), min(CHUNK, end - border)};
    c.border = border;
    c.is_new = c.rows.end > c.rows.first;
    c.folds = c.rows.end == CHUNK && (border + CHUNK < end || border + CHUNK <= keep);
    return c;
}

/* r, from Sᵀk; and the product u = T r begins. Sᵀq is in flight. */
static __device__ __forceinline__ void begin_u(const rule_args &a, const rule_place &p,
                                               const walk_chunk &c, const walk_gates &gates,
                                               const float (&of_k)[TILES][4], float (&r)[TILES][4],
                                               walk_parts *parts, float (&u)[TILES][4])
{
    find_all_r(gates, r, of_k, r);
    if (c.rows.first > 0 || c.rows.end < CHUNK)
        find_r_of_some(a, p, c.border, c.rows, r);
    split_tiles(r, parts);
    wgmma_fence();
    multiply_parts(u, *parts, operand_at(c.stage, TILE_T * TILE_BYTES));
    if (!are_finite(r))
        a.d.fault[p.index] = 1;
    if (c.border >= p.keep)
        keep_r(a, p, c.border, c.rows, r);
}

/* S · e^(G_last) + u kᵀ begins; beside its operands the second half of Sᵀq is computed. */
static __device__ __forceinline__ void begin_fold(rule_state<KT> *state, const walk_chunk &c,
                                                  const walk_gates &gates, const walk_split &split,
                                                  const float (&u)[TILES][4],
                                                  float (&of_q)[TILES][4])
{
    float scaled[TILES][4];
    walk_parts of_u;

#pragma unroll
    for (int q = 0; q < 2 * KT; q++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            state->s[q][e] *= gates.whole;
    wgmma_arrived<4 * 2 * KT>(&state->s[0][0]);
    wgmma_fence();
    multiply_queries(of_q, split, c.stage, 1);
    scale_tiles(u, gates.rest, scaled);
    split_tiles(scaled, &of_u);
    wgmma_fence();
    add_rows(state, of_u, operand_at(c.stage, TILE_K * TILE_BYTES), 0);
    add_rows(state, of_u, operand_at(c.stage, TILE_K * TILE_BYTES), 1);
}

static __device__ __forceinline__ void give_r(const walk_parts &parts, uint4 *to)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        to[(TILES + 2 * half) * GROUP] = four_of(parts.upper[half]);
        to[(TILES + 2 * half + 1) * GROUP] = four_of(parts.lower[half]);
    }
}

static __device__ __forceinline__ void give_q(const float (&of_q)[TILES][4], uint4 *to)
{
#pragma unroll
    for (int t = 0; t < TILES; t++)
        *(float4 *)(to + t * GROUP) = make_float4(of_q[t][0], of_q[t][1], of_q[t][2], of_q[t][3]);
}

/*
 * What keeps ptxas from waiting after each product: the accumulators are declared outside of the
 * loop, and no product is in flight from one turn to the next, which the wait before keep_state
 * says once more. The wait for the next chunk's copies is where it is because ptxas moves no
 * arithmetic over a loop: so the first half of S is split while the second is computed.
 */
static __device__ __forceinline__ void walk(const rule_args &a, const rule_place &p,
                                            rule_state<KT> &state, uint32_t stages,
                                            walk_shared *shared, uint4 *outputs)
{
    ring_place<STAGES> at = {0, 0};
    ring_place<OUTPUTS> out = {0, 0};
    const int end = p.end, keep = p.keep, position = p.span.position;
    float of_k[TILES][4] = {}, of_q[TILES][4] = {}, u[TILES][4] = {};
    walk_split split;

    split_first_half(state, &split);
    barrier_wait(shared_address(&shared->full[at.index]), at.parity);
    for (int border = first_border(p);; border += CHUNK) {
        walk_chunk c = find_chunk(border, position, end, keep);
        uint4 *to = outputs + out.index * 2 * TILES * GROUP + threadIdx.x;
        uint32_t empty = shared_address(&shared->empty[at.index]);
        float r[TILES][4];
        walk_gates gates;
        walk_parts parts;

        if (border == keep || border == position || border >= end) {
            wgmma_wait<0>();
            wgmma_arrived<4 * 2 * KT>(&state.s[0][0]);
            keep_state(a, p, state, border);
            if (border >= end)
                break;
        }
        c.stage = operand_of(stages + at.index * STAGE_BYTES, TILE_BYTES, ATOM);
        multiply_keys(state, of_k, &split, c.stage);
        multiply_queries(of_q, split, c.stage, 0);
        load_gates(shared->gates[at.index], &gates);
        load_tiles(stages + at.index * STAGE_BYTES + TILE_V * TILE_BYTES, r);
        wgmma_wait<1>();
        wgmma_arrived<4 * TILES>(&of_k[0][0]);
        begin_u(a, p, c, gates, of_k, r, &parts, u);
        if (c.is_new) {
            barrier_wait(shared_address(&shared->o_empty[out.index]), out.parity ^ 1);
            give_r(parts, to);
        }
        wgmma_wait<0>();
        wgmma_arrived<4 * TILES>(&of_q[0][0]);
        wgmma_arrived<4 * TILES>(&u[0][0]);
        begin_fold(&state, c, gates, split, u, of_q);
        wgmma_wait<2>();
        wgmma_arrived<4 * TILES>(&of_q[0][0]);
        if (c.is_new) {
            give_q(of_q, to);
            barrier_arrive(shared_address(&shared->o_full[out.index]));
            out.advance();
        }
        wgmma_wait<1>();
        wgmma_arrived<4 * KT>(&state.s[0][0]);
        split_first_half(state, &split);
        at.advance();
        if (border + CHUNK < end)
            barrier_wait(shared_address(&shared->full[at.index]), at.parity);
        wgmma_wait<0>();
        wgmma_arrived<4 * KT>(&state.s[KT][0]);
        barrier_arrive(empty);
        if (!c.folds)
            break;
    }
}

/* ---- the warpgroup of the output ----------------------------------------------------------- */

/* A chunk whose y waits for the sums of the other block. */
typedef struct walk_open {
    float o[TILES][4], gate[TILES][4]; /* silu of z */
    chunk_rows rows;                   /* none: rows.end is 0 */
    int border;
    ring_place<SUMS> sums;
} walk_open;

/* A float, and four bytes on the barrier, to the same places of block `rank` of the cluster. */
static __device__ __forceinline__ void send_to_block(const float *at, uint32_t barrier, int rank,
                                                     float value)
{
    asm volatile("{\n\t.reg .u32 there, full;\n\t"
                 "mapa.shared::cluster.u32 there, %0, %2;\n\t"
                 "mapa.shared::cluster.u32 full, %1, %2;\n\t"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %3, [full];"
                 "\n\t}" ::"r"(shared_address(at)),
                 "r"(barrier), "r"(rank), "r"(__float_as_uint(value))
                 : "memory");
}

static __device__ __forceinline__ rule_parts parts_of(uint4 x, uint4 y)
{
    return {{x.x, x.y, x.z, x.w}, {y.x, y.y, y.z, y.w}};
}

/* The chain of one half of j. */
static __device__ __forceinline__ void mma_parts(const rule_parts &r, uint32_t u0, uint32_t u1,
                                                 uint32_t l0, uint32_t l1, float (&c)[4])
{
    const uint32_t *x = r.upper, *y = r.lower;

    mma<0>(c, x[0], x[1], x[2], x[3], u0, u1);
    mma<0>(c, y[0], y[1], y[2], y[3], u0, u1);
    mma<0>(c, x[0], x[1], x[2], x[3], l0, l1);
}

/* The sums of squares of the warp's columns, to both blocks. */
static __device__ __forceinline__ void send_sums(const rule_place &p, const walk_open &open,
                                                 walk_shared *shared)
{
    int lane = threadIdx.x & 31;
    float *own = shared->sums[open.sums.index][(p.column + own_columns(p)) / 16];
    uint32_t full = shared_address(&shared->sums_full[open.sums.index]);

#pragma unroll
    for (int t = 0; t < TILES; t++) {
        const float(&o)[4] = open.o[t];
        float sum0 = fmaf(o[2], o[2], o[0] * o[0]), sum1 = fmaf(o[3], o[3], o[1] * o[1]);

#pragma unroll
        for (int by = 4; by < SP_WARP; by *= 2) {
            sum0 += __shfl_xor_sync(~0u, sum0, by);
            sum1 += __shfl_xor_sync(~0u, sum1, by);
        }
        if (lane < 4)
            *(float2 *)(own + 8 * t + 2 * lane) = {sum0, sum1};
    }
    __syncwarp();
    if (threadIdx.x == GROUP)
        barrier_expect(full, GROUP * 4);
    send_to_block(own + lane, full, p.column == 0 ? 1 : 0, own[lane]);
    barrier_arrive(full);
}

/* The thread's columns of v and of y. */
typedef struct walk_columns {
    float low, high; /* weights of the norm */
    uint2 *y;        /* the row of the first chunk, the four columns that the thread stores */
    int64_t stride;  /* of y, in fours */
} walk_columns;

static __device__ __forceinline__ walk_columns find_columns(const rule_args &a, const rule_place &p)
{
    int lane = threadIdx.x & 31, v = p.column + own_columns(p), odd = lane & 1;
    const float *weights = a.d.norm + v + (lane >> 2);
    int64_t stride = (int64_t)a.d.shape.v_heads * DIM / 4;
    int row = p.span.row + first_border(p) - p.span.position + (lane >> 2);

    return {weights[0], weights[8],
            (uint2 *)a.d.y + (p.head * DIM + v + 8 * odd + (lane & 2) * 2) / 4 + row * stride,
            stride};
}

/* As store_y. An even lane stores of the lower columns, an odd one of the upper ones. */
static __device__ __forceinline__ void store_rows(const walk_columns &c, int row,
                                                  const walk_open &open, float inverse)
{
    int lane = threadIdx.x & 31, own = lane >> 2;
    bool odd = lane & 1;
    uint2 y[TILES], *to = c.y + row * c.stride;

#pragma unroll
    for (int t = 0; t < TILES; t++) {
        const float(&o)[4] = open.o[t], (&gate)[4] = open.gate[t];
        float inverse0 = __shfl_sync(~0u, inverse, 8 * t + 2 * (lane & 3));
        float inverse1 = __shfl_sync(~0u, inverse, 8 * t + 2 * (lane & 3) + 1);
        uint32_t low = transpose(
            narrow_two<0>(o[0] * inverse0 * c.low * gate[0], o[1] * inverse1 * c.low * gate[1]));
        uint32_t high = transpose(
            narrow_two<0>(o[2] * inverse0 * c.high * gate[2], o[3] * inverse1 * c.high * gate[3]));
        uint32_t other = __shfl_xor_sync(~0u, odd ? low : high, 1);

        y[t] = odd ? make_uint2(other, high) : make_uint2(low, other);
    }
#pragma unroll
    for (int t = 0; t < TILES; t++)
        if (8 * t + own >= open.rows.first && 8 * t + own < open.rows.end)
            to[8 * t * c.stride] = y[t];
}

static __device__ __forceinline__ void finish_open(const rule_args &a, const rule_place &p,
                                                   walk_shared *shared, const walk_columns &columns,
                                                   const walk_open &open)
{
    const float(*sums)[CHUNK] = shared->sums[open.sums.index];
    float sum = 0.0f;

    if (open.rows.end == 0)
        return;
    barrier_wait(shared_address(&shared->sums_full[open.sums.index]), open.sums.parity);
#pragma unroll
    for (int w = 0; w < WARPS_MAX; w++)
        sum += sums[w][threadIdx.x & 31];
    store_rows(columns, open.border - first_border(p), open, rsqrtf(sum / (float)DIM + a.d.eps));
}

/* c += r · Mᵀ of the 8 rows from 8 * TILE on, as in multiply_matrix. */
template <int TILE>
static __device__ __forceinline__ void add_matrix(const rule_parts *r, uint32_t matrix,
                                                  float (&c)[4])
{
    int lane = threadIdx.x & 31, row = lane & 7, piece = lane >> 3;
    uint32_t at = matrix + (8 * TILE + row) * ROW_BYTES;
    uint4 u = load_matrices(at + ((piece ^ row) << 4));
    uint4 l = load_matrices(at + (((piece + 4) ^ row) << 4));

    mma_parts(r[0], u.x, u.y, l.x, l.y, c);
    if (TILE >= 2)
        mma_parts(r[1], u.z, u.w, l.z, l.w, c);
}

/* o of a chunk, from Sᵀq and r. */
static __device__ __forceinline__ void find_outputs(const float2 *gates, uint32_t matrix,
                                                    float factor, const uint4 *from,
                                                    float (&o)[TILES][4])
{
    const rule_parts r[2] = {parts_of(from[TILES * GROUP], from[(TILES + 1) * GROUP]),
                             parts_of(from[(TILES + 2) * GROUP], from[(TILES + 3) * GROUP])};

#pragma unroll
    for (int t = 0; t < TILES; t++) {
        float4 x = *(const float4 *)(from + t * GROUP);
        float4 two = *(const float4 *)(gates + 8 * t + 2 * (threadIdx.x & 3));
        float g0 = power_of_e(two.x), g1 = power_of_e(two.z);

        o[t][0] = x.x * g0, o[t][1] = x.y * g1, o[t][2] = x.z * g0, o[t][3] = x.w * g1;
    }
    add_matrix<0>(r, matrix, o[0]);
    add_matrix<1>(r, matrix, o[1]);
    add_matrix<2>(r, matrix, o[2]);
    add_matrix<3>(r, matrix, o[3]);
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            o[t][e] *= factor;
}

static __device__ __forceinline__ void finish_chunks(const rule_args &a, const rule_place &p,
                                                     uint32_t stages, walk_shared *shared,
                                                     const uint4 *outputs)
{
    const float factor = 1.0f / sqrtf((float)a.d.shape.k_dim);
    ring_place<STAGES> at = {0, 0};
    ring_place<OUTPUTS> in = {0, 0};
    ring_place<SUMS> sums = {0, 0};
    const walk_columns columns = find_columns(a, p);
    walk_open before, open;

    before.rows.end = 0;
    for (int border = first_border(p); border < p.end; border += CHUNK, at.advance()) {
        const chunk_rows rows = rows_of_chunk(p.span, border);

        if (rows.end > rows.first) {
            uint32_t stage = stages + at.index * STAGE_BYTES;

            barrier_wait(shared_address(&shared->full[at.index]), at.parity);
            barrier_wait(shared_address(&shared->o_full[in.index]), in.parity);
            find_outputs(shared->gates[at.index], stage + TILE_M * TILE_BYTES, factor,
                         outputs + in.index * 2 * TILES * GROUP + threadIdx.x - GROUP, open.o);
            load_tiles(stage + TILE_Z * TILE_BYTES, open.gate);
            barrier_arrive(shared_address(&shared->o_empty[in.index]));
            barrier_arrive(shared_address(&shared->empty[at.index]));
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    open.gate[t][e] = silu(open.gate[t][e]);
            in.advance();
            open.rows = rows;
            open.border = border;
            open.sums = sums;
            sums.advance();
            send_sums(p, open, shared);
            finish_open(a, p, shared, columns, before);
            before = open;
        } else {
            barrier_arrive(shared_address(&shared->empty[at.index]));
        }
    }
    finish_open(a, p, shared, columns, before);
}

/* ---- kernel -------------------------------------------------------------------------------- */

static __device__ __forceinline__ void init_walk(const rule_args &a, walk_shared *shared)
{
    shared->p = find_place(a, blockIdx.x / SPLIT, (int)(blockIdx.x % SPLIT) * COLUMNS, COLUMNS);
    for (int i = 0; i < STAGES; i++) {
        barrier_init(shared_address(&shared->full[i]), SP_WARP + 1);
        barrier_init(shared_address(&shared->empty[i]), 2 * GROUP);
    }
    for (int i = 0; i < OUTPUTS; i++) {
        barrier_init(shared_address(&shared->o_full[i]), GROUP);
        barrier_init(shared_address(&shared->o_empty[i]), GROUP);
    }
    for (int i = 0; i < SUMS; i++)
        barrier_init(shared_address(&shared->sums_full[i]), GROUP);
    barrier_init_done();
}

/* The first kernel ends, unless its chunks are waited for one by one. */
static __device__ __forceinline__ void wait_first_kernel(const rule_args &a)
{
    if (a.ready == NULL)
        wait_predecessor();
}

#endif

__global__ void __launch_bounds__(THREADS, 1)
    walk_kernel(const __grid_constant__ rule_args a, const __grid_constant__ walk_maps maps)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(16) char memory[];
    __shared__ __align__(16) walk_shared shared;
    const rule_place &p = shared.p;
    int warp = __shfl_sync(~0u, (int)threadIdx.x >> 5, 0);
    uint32_t start = (shared_address(memory) + ATOM - 1) & ~(uint32_t)(ATOM - 1);
    uint4 *outputs = (uint4 *)(memory + (start - shared_address(memory)) + STAGES * STAGE_BYTES);

    release_successor();
    if (threadIdx.x == 0)
        init_walk(a, &shared);
    __syncwarp();
    cluster_arrive();
    cluster_wait();
    if (p.span.n_rows > 0) {
        if (warp < GROUP / SP_WARP) {
            rule_state<KT> state;

            registers_up_to<240>();
            load_state<KT>(a, p, &state);
            wait_first_kernel(a);
            walk(a, p, state, start, &shared, outputs);
        } else if (warp < 2 * GROUP / SP_WARP) {
            wait_first_kernel(a);
            finish_chunks(a, p, start, &shared, outputs);
        } else {
            registers_down_to<96>();
            wait_first_kernel(a);
            if (warp == 2 * GROUP / SP_WARP)
                fill_ring(a, maps, p, start, &shared);
        }
        __syncwarp();
        wait_predecessor();
        if (p.column == 0) {
            if (p.span.save >= 0)
                save_inputs(a, p);
            keep_inputs(a, p);
            keep_matrices(a, p);
        }
        __syncwarp();
    } else {
        wait_predecessor();
    }
    /* No block may end while another one still writes to it. */
    cluster_arrive();
    cluster_wait();
#endif
}

/* ---- launch -------------------------------------------------------------------------------- */

/* Whether this object has the kernel for the GPU at hand. */
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__device__ int walk_is_built = 1;
#else
__device__ int walk_is_built = 0;
#endif

typedef decltype(&cuTensorMapEncodeTiled) encode_fn;

/* Of each GPU, NULL where it has no such kernel; written at its init, before any launch on it. */
static encode_fn encoders[SP_CUDA_GPUS_MAX];

/* Boxes of a chunk's rows by 64 elements, of a matrix [rows, width]. */
static bool make_map(encode_fn encode, CUtensorMap *map, const void *data, int64_t width,
                     int64_t rows)
{
    cuuint64_t sizes[2] = {(cuuint64_t)width, (cuuint64_t)rows};
    cuuint64_t strides[1] = {(cuuint64_t)width * 2};
    cuuint32_t boxes[2] = {ROW_BYTES / 2, CHUNK}, steps[2] = {1, 1};

    return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void *)data, sizes, strides, boxes,
                  steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

static bool make_maps(encode_fn encode, const rule_args *a, walk_maps *maps)
{
    const sp_cuda_rule_shape &s = a->d.shape;
    int64_t keys = (int64_t)s.k_heads * DIM, values = (int64_t)s.v_heads * DIM, rows = a->d.rows;

    return make_map(encode, &maps->k, a->k, keys, rows) &&
           make_map(encode, &maps->q, a->q, keys, rows) &&
           make_map(encode, &maps->v, a->v, values, rows) &&
           make_map(encode, &maps->matrices, a->matrices, values, rows) &&
           make_map(encode, &maps->z, s.fused ? a->d.qkv : a->d.z,
                    s.fused ? a->l.qkv_width : values, rows);
}

int sp_cuda_rule_walk_blocks(int gpu, const rule_args *a)
{
    const sp_cuda_rule_shape &s = a->d.shape;
    bool has = gpu < SP_CUDA_GPUS_MAX && encoders[gpu] != NULL && s.k_dim == DIM && s.v_dim == DIM;

    return has ? s.v_heads * SPLIT * a->d.spans : 0;
}

cudaError_t sp_cuda_rule_walk(int gpu, const rule_args *a, cudaStream_t stream)
{
    const sp_cuda_rule_shape &s = a->d.shape;
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config =
        sp_cuda_overlapping(dim3((unsigned)(s.v_heads * SPLIT), (unsigned)a->d.spans), THREADS,
                            SHARED_BYTES, &attributes[0], false, stream);
    walk_maps maps = {};

    static_assert(4 * CHUNK == DIM, "a head's row of T and M is as wide as its row of v");
    if (sp_cuda_rule_walk_blocks(gpu, a) == 0)
        return cudaErrorNotSupported;
    if (!make_maps(encoders[gpu], a, &maps))
        return cudaErrorInvalidValue;
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim = {SPLIT, 1, 1};
    config.attrs = attributes;
    config.numAttrs++;
    return cudaLaunchKernelEx(&config, walk_kernel, *a, maps);
}

cudaError_t sp_cuda_rule_walk_init(int gpu)
{
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    int major = 0, minor = 0, built = 0;
    void *encode = NULL;
    cudaError_t code = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, gpu);

    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, gpu);
    if (code != cudaSuccess || gpu >= SP_CUDA_GPUS_MAX || major != 9 || minor != 0)
        return code;
    code = cudaMemcpyFromSymbol(&built, walk_is_built, sizeof built);
    if (code != cudaSuccess || built == 0)
        return code;
    code = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000,
                                            cudaEnableDefault, &found);
    if (code != cudaSuccess || found != cudaDriverEntryPointSuccess)
        return code;
    encoders[gpu] = (encode_fn)encode;
    return cudaFuncSetAttribute(walk_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                SHARED_BYTES);
}
