/*
 * delta_rule_prepare.cu: what the gated delta rule takes beside the state: q, k and v of each row
 * of the step after the convolution, the sums G of its gates, and its row of T and of M
 * (delta_rule.cuh).
 *
 * Grid: (key heads, items); a block has a key head, its value heads and the rows of one item, and
 * takes further items where there are more than blocks. It convolves the rows, which depend on
 * nothing that another block computes; divides q and k by their norms; multiplies the chunk's k
 * with all its k and q, once for the key head; and a warp for each value head then finds its rows
 * of T and M, of which a lane has a column. Rows of earlier steps come from the ring. Bound by the
 * arithmetic of the convolution, or for few rows by latency.
 *
 * Where the second kernel leaves multiprocessors idle, it runs beside the first one: apart_kernel
 * has TEAMS of such blocks as the teams of one block, which has a multiprocessor for itself. All
 * teams take items for some rounds; then most blocks end, and the second kernel takes their
 * multiprocessors, while the others go on, in the order of the chunks. A team sets `ready` of its
 * item when that is in memory. The second kernel cannot start before all blocks of the first one
 * have cleared it (release_successor), so its blocks may wait for it.
 *
 * The sum of squares of q and of k: a lane's elements l, l + 32 and so on, in order, then a
 * butterfly. The convolution: one fused step for each row in ascending order, from +0.
 */
#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/delta_rule.cuh"
#include "kernels/cuda/launch.cuh"

#include <limits.h>

#define WARPS   8
#define THREADS (WARPS * SP_WARP)
#define GROUP   8           /* rows that a thread convolves in a row */
#define ROWS    4           /* that a warp divides at a time */
#define STRIDE  (CHUNK + 4) /* floats; of a row of a product */
#define PRODUCT (CHUNK * STRIDE)
#define PAD     8 /* elements; of a row of k and q */
#define TEAMS   4 /* of THREADS in a block of apart_kernel */
#define CLUSTER 2 /* blocks of apart_kernel that end together, as the second kernel's start */

typedef struct prepare_shared {
    uint16_t *k, *q; /* [CHUNK, k_width + PAD] */
    float *kk, *qk;  /* [CHUNK, STRIDE] */
    float *scaled;   /* [min(value heads, WARPS), 2, CHUNK, STRIDE]: A, P */
} prepare_shared;

/* What a block works on. */
typedef struct prepare_item {
    sp_cuda_rule_span span;
    chunk_rows rows;
    int border, k_head;
    int row; /* of the step: that of the border, even where it has none */
} prepare_item;

static __device__ __forceinline__ prepare_shared share(const rule_args &a, char *memory)
{
    size_t row = (size_t)(a.l.k_width + PAD);
    prepare_shared s;

    s.k = (uint16_t *)memory;
    s.q = s.k + CHUNK * row;
    s.kk = (float *)(s.q + CHUNK * row);
    s.qk = s.kk + PRODUCT;
    s.scaled = s.qk + PRODUCT;
    return s;
}

/* A multiple of 16. */
static __host__ __device__ __forceinline__ int shared_bytes(const rule_args &a)
{
    int heads = a.l.per_key < WARPS ? a.l.per_key : WARPS;

    return 2 * CHUNK * (a.l.k_width + PAD) * 2 + (2 + 2 * heads) * PRODUCT * 4;
}

/* Of the block, or of the team. */
static __device__ __forceinline__ int own_thread(void)
{
    return (int)threadIdx.x % THREADS;
}

static __device__ __forceinline__ int own_warp(void)
{
    return own_thread() / SP_WARP;
}

static __device__ __forceinline__ int own_team(void)
{
    return (int)threadIdx.x / THREADS;
}

template <int T> static __device__ __forceinline__ void team_wait(void)
{
    if (T == 1)
        __syncthreads();
    else
        meet(1 + own_team(), THREADS);
}

/* ---- the convolution ----------------------------------------------------------------------- */

/* Two adjacent channels: of the convolution, and where they are in a row of qkv. */
typedef struct channel_pair {
    int channel, offset;
    uint16_t *to; /* of the row at the border */
    int stride;   /* elements from row to row */
} channel_pair;

/* Pair p of the item: those of q, of k, then of its value heads, whose channels follow each other.
 */
static __device__ __forceinline__ channel_pair find_pair(const rule_args &a,
                                                         const prepare_shared &shared,
                                                         const prepare_item &item, int p)
{
    int k_dim = a.d.shape.k_dim, at = 2 * p - 2 * k_dim, head = item.k_head * a.l.per_key;
    channel_pair c;

    if (at < 0) {
        bool is_k = at >= -k_dim;

        at += is_k ? k_dim : 2 * k_dim;
        c.channel = at + (is_k ? k_channel(a, item.k_head) : q_channel(a, item.k_head));
        c.offset = at + (is_k ? k_offset(a, item.k_head) : q_offset(a, item.k_head));
        c.to = (is_k ? shared.k : shared.q) + at;
        c.stride = a.l.k_width + PAD;
        return c;
    }
    c.channel = v_channel(a, head) + at;
    c.offset = v_offset(a, head) + at;
    c.stride = a.d.shape.v_heads * a.d.shape.v_dim;
    c.to = a.v + (int64_t)item.row * c.stride + head * a.d.shape.v_dim + at;
    return c;
}

/* What the convolution reads of a position. */
static __device__ __forceinline__ uint32_t read_input(const rule_args &a, const prepare_item &item,
                                                      const channel_pair &c, int position)
{
    const sp_cuda_rule_span &span = item.span;
    const uint16_t *from;

    if (position < 0)
        return 0;
    if (position >= span.position) {
        int64_t row = span.row + position - span.position;

        from = (const uint16_t *)a.d.qkv + row * a.l.qkv_width + c.offset;
    } else if (span.load >= 0) {
        int back = span.position - position; /* 1 .. conv_width - 1 */

        from = (const uint16_t *)(snapshot_of(a.d, span.load) + a.l.conv) + c.channel +
               (int64_t)(a.d.shape.conv_width - 1 - back) * a.l.channels;
    } else {
        from = (const uint16_t *)(slot_of(a.d, span.slot) + a.l.ring_conv) + c.channel +
               (int64_t)place_of(position) * a.l.channels;
    }
    return *(const uint32_t *)from;
}

/* W: the most rows that the convolution reads; those that it lacks have a weight of 0. */
template <int W>
static __device__ __forceinline__ void load_weights_of(const rule_args &a, const channel_pair &c,
                                                       float2 (&weight)[W])
{
    int width = a.d.shape.conv_width;
    const uint16_t *weights = (const uint16_t *)a.d.conv + (int64_t)c.channel * width;

    if (W == 4 && width == 4) {
        uint4 x = *(const uint4 *)weights;
        float2 low = widen_two<0>(x.x), high = widen_two<0>(x.y);
        float2 of_low = widen_two<0>(x.z), of_high = widen_two<0>(x.w);

        weight[0] = {low.x, of_low.x}, weight[1] = {low.y, of_low.y};
        weight[2] = {high.x, of_high.x}, weight[3] = {high.y, of_high.y};
        return;
    }
#pragma unroll
    for (int t = 0; t < W; t++) {
        int at = t - (W - width);

        weight[t].x = at >= 0 ? widen<0>(weights[at]) : 0.0f;
        weight[t].y = at >= 0 ? widen<0>(weights[width + at]) : 0.0f;
    }
}

/* Two inputs, as in a row of qkv, of a row of this step. */
static __device__ __forceinline__ uint32_t load_inputs(const rule_args &a, const prepare_item &item,
                                                       const channel_pair &c, int row)
{
    return *(const uint32_t *)((const uint16_t *)a.d.qkv + c.offset +
                               (int64_t)(item.row + row) * a.l.qkv_width);
}

/* The sum over the rows x[0 .. W) of a pair. */
template <int W>
static __device__ __forceinline__ uint32_t sum_rows(const float2 (&weight)[W], const float2 *x)
{
    float2 sum = {0.0f, 0.0f};

#pragma unroll
    for (int t = 0; t < W; t++) {
        sum.x = fmaf(weight[t].x, x[t].x, sum.x);
        sum.y = fmaf(weight[t].y, x[t].y, sum.y);
    }
    return narrow_two<0>(silu(sum.x), silu(sum.y));
}

/* The rows of a pair in groups [group, end) of a chunk that is whole, as all of its inputs are of
 * this step; the next group's inputs are loaded ahead. */
template <int W>
static __device__ __forceinline__ void convolve_groups(const rule_args &a, const prepare_item &item,
                                                       const channel_pair &c, int group, int end)
{
    float2 weight[W], x[GROUP + W - 1];
    uint32_t next[GROUP];

#pragma unroll
    for (int i = 0; i < GROUP; i++)
        next[i] = load_inputs(a, item, c, group * GROUP + i);
#pragma unroll
    for (int i = 0; i < W - 1; i++)
        x[i] = widen_two<0>(load_inputs(a, item, c, group * GROUP + i - (W - 1)));
    load_weights_of<W>(a, c, weight);
    for (; group < end; group++) {
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            x[W - 1 + i] = widen_two<0>(next[i]);
            if (group + 1 < end)
                next[i] = load_inputs(a, item, c, (group + 1) * GROUP + i);
        }
#pragma unroll
        for (int i = 0; i < GROUP; i++)
            *(uint32_t *)(c.to + (int64_t)(group * GROUP + i) * c.stride) =
                sum_rows<W>(weight, x + i);
#pragma unroll
        for (int i = 0; i < W - 1; i++)
            x[i] = x[GROUP + i];
    }
}

/* A pair for each thread, then the groups of those that are left. */
template <int W>
static __device__ __forceinline__ void convolve_chunk(const rule_args &a,
                                                      const prepare_shared &shared,
                                                      const prepare_item &item)
{
    int left = (2 * a.d.shape.k_dim + a.l.per_key * a.d.shape.v_dim) / 2, base = 0, group = 0;

    for (; left >= THREADS; left -= THREADS, base += THREADS)
        convolve_groups<W>(a, item, find_pair(a, shared, item, base + own_thread()), 0,
                           CHUNK / GROUP);
    for (int pair = own_thread(); left > 0; pair += THREADS) {
        for (; pair >= left && group < CHUNK / GROUP; group++)
            pair -= left;
        if (group >= CHUNK / GROUP)
            break;
        convolve_groups<W>(a, item, find_pair(a, shared, item, base + pair), group, group + 1);
    }
}

/* The new rows of [GROUP * group, ..) of a pair. */
template <int W>
static __device__ __forceinline__ void convolve_some(const rule_args &a, const prepare_item &item,
                                                     const channel_pair &c, int group)
{
    int first = max(group * GROUP, item.rows.first), from = group * GROUP - (W - 1);
    int end = min(group * GROUP + GROUP, item.rows.end);
    float2 weight[W], x[GROUP + W - 1];

    if (item.border + from >= item.span.position) { /* all inputs are of this step */
#pragma unroll
        for (int i = 0; i < GROUP + W - 1; i++)
            x[i] = widen_two<0>(from + i < end ? load_inputs(a, item, c, from + i) : 0u);
    } else {
#pragma unroll
        for (int i = 0; i < GROUP + W - 1; i++) {
            bool there = from + i > first - a.d.shape.conv_width && from + i < end;

            x[i] = widen_two<0>(there ? read_input(a, item, c, item.border + from + i) : 0u);
        }
    }
    load_weights_of<W>(a, c, weight);
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
        int row = group * GROUP + i;

        if (row >= first && row < end)
            *(uint32_t *)(c.to + (int64_t)row * c.stride) = sum_rows<W>(weight, x + i);
    }
}

template <int W>
static __device__ __forceinline__ void convolve_item(const rule_args &a,
                                                     const prepare_shared &shared,
                                                     const prepare_item &item)
{
    int pairs = (2 * a.d.shape.k_dim + a.l.per_key * a.d.shape.v_dim) / 2;
    int group = item.rows.first / GROUP, groups = (item.rows.end - 1) / GROUP + 1;

    if (item.rows.first == 0 && item.rows.end == CHUNK &&
        item.border - (W - 1) >= item.span.position) {
        convolve_chunk<W>(a, shared, item);
        return;
    }
    for (int pair = own_thread();; pair += THREADS) {
        for (; pair >= pairs && group < groups; group++)
            pair -= pairs;
        if (group >= groups)
            break;
        convolve_some<W>(a, item, find_pair(a, shared, item, pair), group);
    }
}

/* k of the chunk's earlier rows. */
static __device__ __forceinline__ void read_ring(const rule_args &a, const prepare_shared &shared,
                                                 const prepare_item &item)
{
    int pieces = a.l.k_width / 8;
    const uint16_t *ring = (const uint16_t *)(slot_of(a.d, item.span.slot) + a.l.ring_k) +
                           (int64_t)item.k_head * RING * a.l.k_width;

    for (int i = own_thread(); i < item.rows.first * pieces; i += THREADS) {
        int row = i / pieces, piece = i - row * pieces;
        int64_t from = (int64_t)place_of(item.border + row) * a.l.k_width;

        copy_async(shared_address(shared.k + row * (a.l.k_width + PAD) + piece * 8),
                   ring + from + piece * 8);
    }
}

/* T of a head's earlier rows in the chunk, by a warp, into the places of A, which has none there.
 */
static __device__ __forceinline__ void read_matrix(const rule_args &a, const prepare_item &item,
                                                   int head, float *scaled)
{
    const uint16_t *ring = (const uint16_t *)(slot_of(a.d, item.span.slot) + a.l.ring_t) +
                           (head * RING + place_of(item.border)) * 2 * CHUNK;

    for (int i = threadIdx.x & 31; i < item.rows.first * 8; i += SP_WARP)
        copy_async(shared_address(scaled + i / 8 * STRIDE + i % 8 * 4), ring + i * 8);
    copy_commit();
}

/* ---- norms --------------------------------------------------------------------------------- */

/* Of q, then of k: row i of the item's 2 n. */
typedef struct prepare_row {
    uint16_t *from, *to; /* in shared memory, in the scratch */
} prepare_row;

static __device__ __forceinline__ prepare_row find_row(const rule_args &a,
                                                       const prepare_shared &shared,
                                                       const prepare_item &item, int i)
{
    int n = item.rows.end - item.rows.first;
    bool is_k = i >= n;
    int row = item.rows.first + (is_k ? i - n : i);
    int64_t to = ((int64_t)(item.row + row) * a.d.shape.k_heads + item.k_head) * a.l.k_width;

    return {(is_k ? shared.k : shared.q) + row * (a.l.k_width + PAD), (is_k ? a.k : a.q) + to};
}

/* The warp's rows of q and k: divides them in shared memory and writes them to the scratch, with
 * zeros from k_dim on. A lane finds the factor of one of up to ROWS rows. EACH: elements of a
 * lane. */
template <int EACH>
static __device__ __forceinline__ void divide_item(const rule_args &a, const prepare_shared &shared,
                                                   const prepare_item &item)
{
    int lane = threadIdx.x & 31, rows = 2 * (item.rows.end - item.rows.first);

    for (int i = own_warp(); i < rows; i += WARPS * ROWS) {
        float x[ROWS][EACH], own = 0.0f;

#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const uint16_t *from =
                find_row(a, shared, item, i + r * WARPS < rows ? i + r * WARPS : i).from;
            float sum = 0.0f;

#pragma unroll
            for (int e = 0; e < EACH; e++) {
                x[r][e] = lane + 32 * e < a.d.shape.k_dim ? widen<0>(from[lane + 32 * e]) : 0.0f;
                sum = fmaf(x[r][e], x[r][e], sum);
            }
#pragma unroll
            for (int by = SP_WARP / 2; by > 0; by /= 2)
                sum += __shfl_xor_sync(~0u, sum, by);
            own = lane == r ? sum : own;
        }
        own = 1.0f / sqrtf(own + 1e-6f);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float inverse = __shfl_sync(~0u, own, r);
            const prepare_row row = find_row(a, shared, item, i + r * WARPS);

            if (i + r * WARPS < rows)
#pragma unroll
                for (int e = 0; e < EACH; e++) {
                    uint16_t rounded = (uint16_t)narrow_two<0>(x[r][e] * inverse, 0.0f);

                    row.from[lane + 32 * e] = rounded;
                    row.to[lane + 32 * e] = rounded;
                }
        }
    }
}

/* ---- products ------------------------------------------------------------------------------ */

/* 16 rows j by 8 rows i of k · k and of q · k, by a warp. */
static __device__ __forceinline__ void multiply_tile(const rule_args &a,
                                                     const prepare_shared &shared, int of_q, int j,
                                                     int i)
{
    int lane = threadIdx.x & 31, stride = (a.l.k_width + PAD) * 2;
    uint32_t rows_j = shared_address(shared.k) + (j + (lane & 15)) * stride + (lane >> 4) * 16;
    uint32_t rows_i =
        shared_address(of_q ? shared.q : shared.k) + (i + (lane & 7)) * stride + (lane >> 3) * 16;
    float *to = (of_q ? shared.qk : shared.kk) + (i + 2 * (lane & 3)) * STRIDE + j + (lane >> 2);
    float c[4] = {};

    for (int k = 0; k < a.l.k_width; k += 32) {
        uint4 left = load_matrices(rows_j + k * 2), more = load_matrices(rows_j + k * 2 + 32);
        uint4 right = load_matrices(rows_i + k * 2);

        mma<0>(c, left.x, left.y, left.z, left.w, right.x, right.y);
        mma<0>(c, more.x, more.y, more.z, more.w, right.z, right.w);
    }
    to[0] = c[0], to[STRIDE] = c[1];
    to[8] = c[2], to[STRIDE + 8] = c[3];
}

static __device__ __forceinline__ void multiply_item(const rule_args &a,
                                                     const prepare_shared &shared,
                                                     const prepare_item &item)
{
    for (int tile = own_warp(); tile < 4 * TILES; tile += WARPS) {
        int i = tile % TILES * 8, j = tile / TILES % 2 * 16;

        if (i + 8 > item.rows.first && i < item.rows.end && j < i + 8)
            multiply_tile(a, shared, tile / TILES / 2, j, i);
    }
}

/* ---- T and M ------------------------------------------------------------------------------- */

/* G and beta of row `lane` of the chunk. */
static __device__ __forceinline__ float2 find_gates(const rule_args &a, const prepare_item &item,
                                                    int head)
{
    const sp_cuda_rule_shape &s = a.d.shape;
    int lane = threadIdx.x & 31, first = item.rows.first;
    int64_t row = item.row + lane, width = a.l.b_width;
    const float *ring = (const float *)(slot_of(a.d, item.span.slot) + a.l.ring_g) + head * RING;
    float g = 0.0f, beta = 0.0f, sum = 0.0f;

    if (lane >= first && lane < item.rows.end) {
        int n = a.l.per_key, own = head - item.k_head * n;
        int at = s.fused ? item.k_head * 2 * n + own : head;
        float x =
            (s.fused ? a.d.b[row * width + at + n] : a.d.a[row * width + at]) + a.d.dt_bias[head];

        beta = 1.0f / (1.0f + expf(-a.d.b[row * width + at]));
        g = -expf(a.d.a_log[head]) * (x > 20.0f ? x : log1pf(expf(x)));
    } else if (lane < first) {
        sum = ring[place_of(item.border + lane)];
    }
    if (first > 0) {
        float before = __shfl_sync(~0u, sum, first - 1);

        sum = lane < first ? sum : before;
    }
#pragma unroll
    for (int j = 0; j < CHUNK; j++) {
        float next = __shfl_sync(~0u, g, j);

        if (j >= first && j <= lane)
            sum += next;
    }
    return {sum, beta};
}

/* The scaled products of a new row: A into scaled[row][j], P after it. */
static __device__ __forceinline__ void scale_row(const prepare_shared &shared, float *scaled,
                                                 float2 gates, int i)
{
    int lane = threadIdx.x & 31;
    float g = __shfl_sync(~0u, gates.x, i), beta = __shfl_sync(~0u, gates.y, i);
    float decay = lane <= i ? power_of_e(g - gates.x) : 0.0f;
    float kk = shared.kk[i * STRIDE + lane], qk = shared.qk[i * STRIDE + lane];

    scaled[i * STRIDE + lane] = lane < i ? beta * (decay * kk) : 0.0f;
    scaled[PRODUCT + i * STRIDE + lane] = lane <= i ? decay * qk : 0.0f;
}

static __device__ __forceinline__ void scale_products(const prepare_shared &shared,
                                                      const prepare_item &item, float *scaled,
                                                      float2 gates)
{
    if (item.rows.first == 0 && item.rows.end == CHUNK) {
#pragma unroll 8
        for (int i = 0; i < CHUNK; i++)
            scale_row(shared, scaled, gates, i);
    } else {
        for (int i = item.rows.first; i < item.rows.end; i++)
            scale_row(shared, scaled, gates, i);
    }
    __syncwarp();
}

/* Writes upper and lower part; returns their sum. */
static __device__ __forceinline__ float store_split(uint16_t *to, float x)
{
    uint16_t upper = narrow<0>(x), lower = narrow<0>(x - widen<0>(upper));

    to[0] = upper;
    to[CHUNK] = lower;
    return widen<0>(upper) + widen<0>(lower);
}

/* Column `lane` of the rows of T and M of some rows of a chunk. */
static __device__ __forceinline__ void solve_some(const rule_args &a, const prepare_item &item,
                                                  int head, const float *scaled)
{
    int lane = threadIdx.x & 31;
    uint16_t *to = a.matrices + ((int64_t)item.row * a.d.shape.v_heads + head) * 4 * CHUNK + lane;
    float t[CHUNK];

#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
        const uint16_t *from = (const uint16_t *)(scaled + i * STRIDE) + lane;

        t[i] = i < item.rows.first ? widen<0>(from[0]) + widen<0>(from[CHUNK]) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
        float sum = lane == i ? 1.0f : 0.0f, m = 0.0f;
        uint16_t *row = to + (int64_t)i * a.d.shape.v_heads * 4 * CHUNK;

        if (i < item.rows.first || i >= item.rows.end)
            continue;
#pragma unroll
        for (int j = 0; j < i; j++) {
            sum = fmaf(-scaled[i * STRIDE + j], t[j], sum);
            m = fmaf(scaled[PRODUCT + i * STRIDE + j], t[j], m);
        }
        t[i] = store_split(row, sum);
        m = fmaf(scaled[PRODUCT + i * STRIDE + i], t[i], m);
        store_split(row + 2 * CHUNK, m);
    }
}

/* c + x · t of four j, in their order. */
static __device__ __forceinline__ float add_four(float4 x, const float *t, float c)
{
    c = fmaf(x.x, t[0], c);
    c = fmaf(x.y, t[1], c);
    c = fmaf(x.z, t[2], c);
    return fmaf(x.w, t[3], c);
}

static __device__ __forceinline__ float4 minus(float4 x)
{
    return make_float4(-x.x, -x.y, -x.z, -x.w);
}

/* Stores the upper and lower part of each lane's x as a row [upper: 32][lower: 32], to which `to`
 * is the lane's pair; returns their sum. An even lane has the upper parts of two columns. */
static __device__ __forceinline__ float store_pair(uint32_t *to, float x)
{
    uint32_t upper = narrow_two<0>(x, 0.0f); /* converts faster than one alone */
    float wide = __uint_as_float(upper << 16);
    uint32_t lower = narrow_two<0>(x - wide, 0.0f);
    bool odd = threadIdx.x & 1;
    uint32_t other = __shfl_xor_sync(~0u, odd ? upper : lower, 1);

    *to = odd ? other | lower << 16 : upper | other << 16;
    return wide + __uint_as_float(lower << 16);
}

/* The same of all rows of a chunk, four at a time. */
static __device__ __forceinline__ void solve_all(const rule_args &a, const prepare_item &item,
                                                 int head, const float *scaled)
{
    int lane = threadIdx.x & 31;
    int64_t stride = (int64_t)a.d.shape.v_heads * 2 * CHUNK;
    uint32_t *to = (uint32_t *)a.matrices +
                   ((int64_t)item.row * a.d.shape.v_heads + head) * 2 * CHUNK +
                   (lane & 1) * CHUNK / 2 + lane / 2;
    float t[CHUNK];

#pragma unroll
    for (int i = 0; i < CHUNK; i += 4) {
        float sum[4], m[4];

#pragma unroll
        for (int r = 0; r < 4; r++)
            sum[r] = lane == i + r ? 1.0f : 0.0f, m[r] = 0.0f;
#pragma unroll
        for (int j = 0; j < i; j += 4)
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const float *row = scaled + (i + r) * STRIDE + j;

                sum[r] = add_four(minus(*(const float4 *)row), t + j, sum[r]);
                m[r] = add_four(*(const float4 *)(row + PRODUCT), t + j, m[r]);
            }
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const float *row = scaled + (i + r) * STRIDE + i;
            float4 x = *(const float4 *)row, y = *(const float4 *)(row + PRODUCT);
            const float of_t[4] = {x.x, x.y, x.z, x.w}, of_m[4] = {y.x, y.y, y.z, y.w};

#pragma unroll
            for (int j = 0; j < r; j++) {
                sum[r] = fmaf(-of_t[j], t[i + j], sum[r]);
                m[r] = fmaf(of_m[j], t[i + j], m[r]);
            }
            t[i + r] = store_pair(to, sum[r]);
            store_pair(to + CHUNK, fmaf(of_m[r], t[i + r], m[r]));
            to += stride;
        }
    }
}

/* The value heads of a warp, of which the first's gates were found before the convolution. */
static __device__ __forceinline__ void finish_heads(const rule_args &a,
                                                    const prepare_shared &shared,
                                                    const prepare_item &item, float2 gates)
{
    int warp = own_warp(), lane = threadIdx.x & 31;
    float *scaled = shared.scaled + warp * 2 * PRODUCT;

    for (int own = warp; own < a.l.per_key; own += WARPS) {
        int head = item.k_head * a.l.per_key + own;

        if (own != warp) {
            read_matrix(a, item, head, scaled);
            gates = find_gates(a, item, head);
            copy_wait<0>();
        }
        if (lane >= item.rows.first && lane < item.rows.end)
            a.gates[(int64_t)(item.row + lane) * a.d.shape.v_heads + head] = gates;
        scale_products(shared, item, scaled, gates);
        if (item.rows.first == 0 && item.rows.end == CHUNK)
            solve_all(a, item, head, scaled);
        else
            solve_some(a, item, head, scaled);
        __syncwarp();
    }
}

/* ---- kernel -------------------------------------------------------------------------------- */

static __device__ __forceinline__ prepare_item find_item(const rule_args &a, int index, int k_head)
{
    const sp_cuda_rule_item own = a.d.item[index];
    prepare_item item;

    item.span = a.d.span[own.span];
    item.border = own.border;
    item.k_head = k_head;
    item.rows = rows_of_chunk(item.span, own.border);
    item.row = item.span.row + own.border - item.span.position;
    return item;
}

/* An item that the threads of a block, or one of T teams, share. */
template <int EACH, int W, int T>
static __device__ __forceinline__ void prepare(const rule_args &a, const prepare_shared &shared,
                                               const prepare_item &item)
{
    int warp = own_warp();
    float2 gates = {0.0f, 0.0f};

    if (warp < a.l.per_key)
        read_matrix(a, item, item.k_head * a.l.per_key + warp, shared.scaled + warp * 2 * PRODUCT);
    read_ring(a, shared, item);
    copy_commit();
    convolve_item<W>(a, shared, item);
    if (warp < a.l.per_key)
        gates = find_gates(a, item, item.k_head * a.l.per_key + warp);
    copy_wait<0>();
    team_wait<T>();
    divide_item<EACH>(a, shared, item);
    team_wait<T>();
    multiply_item(a, shared, item);
    team_wait<T>();
    finish_heads(a, shared, item, gates);
}

template <int EACH, int W>
__global__ void __launch_bounds__(THREADS, W == 4 ? 4 : 2)
    prepare_kernel(const __grid_constant__ rule_args a)
{
    extern __shared__ __align__(16) char memory[];
    __shared__ prepare_item item; /* not in registers, of which the solution takes all */
    const prepare_shared shared = share(a, memory);
    int n_items = *a.d.n_items;

    release_successor();
    if (threadIdx.x == 0 && (int)blockIdx.y < n_items)
        item = find_item(a, blockIdx.y, blockIdx.x);
    wait_predecessor();
    for (int index = blockIdx.y; index < n_items; index += gridDim.y) {
        if (threadIdx.x == 0 && index != (int)blockIdx.y)
            item = find_item(a, index, blockIdx.x);
        __syncthreads();
        prepare<EACH, W, 1>(a, shared, item);
        __syncthreads();
    }
}

/* ---- beside the second kernel -------------------------------------------------------------- */

/* The order of the items, each of a chunk and a key head, chunks first. */
typedef struct team_items {
    int n;
    int rounds, team, teams; /* that all teams take part in */
    int later, later_teams;  /* the same after them; -1 where the team ends */
} team_items;

/* Rounds of all teams so that both kernels end early: the second one takes as long for n_items
 * chunks as a team for n_items / each items. */
static __device__ __forceinline__ int choose_rounds(const rule_args &a, int n_items, int n,
                                                    int teams, int later_teams)
{
    int each = 8 + 4 * a.l.per_key, best = 1, least = INT_MAX;

    for (int rounds = 1; rounds == 1 || (rounds - 1) * teams < n; rounds++) {
        int rest = max(0, n - rounds * teams);
        int later = (rest + later_teams - 1) / later_teams;
        int cost = rounds * each + max(n_items, later * each);

        if (cost < least)
            best = rounds;
        least = min(least, cost);
    }
    return best;
}

static __device__ __forceinline__ team_items find_items(const rule_args &a, int n_items, int stays)
{
    int blocks = gridDim.x, block = blockIdx.x, team = own_team();
    team_items t;

    t.n = n_items * a.d.shape.k_heads;
    t.teams = blocks * TEAMS;
    t.team = team * blocks + block;
    t.later_teams = stays * TEAMS;
    t.later = block < stays ? team * stays + block : -1;
    t.rounds = choose_rounds(a, n_items, t.n, t.teams, t.later_teams);
    return t;
}

/* The team's item of a round, -1 after its last one. */
static __device__ __forceinline__ int item_of_round(const team_items &t, int round)
{
    int index = round * t.teams + t.team;

    if (round >= t.rounds)
        index =
            t.later < 0 ? t.n : t.rounds * t.teams + (round - t.rounds) * t.later_teams + t.later;
    return index < t.n ? index : -1;
}

static __device__ __forceinline__ prepare_item find_team_item(const rule_args &a, int index)
{
    int item = index / a.d.shape.k_heads;

    return find_item(a, item, index - item * a.d.shape.k_heads);
}

static __device__ __forceinline__ int *ready_of(const rule_args &a, const prepare_item &item)
{
    return a.ready + ready_index(a, item.row + item.rows.first, item.k_head);
}

/* A team's items are not ready; then the second kernel may start. */
static __device__ __forceinline__ void clear_ready(const rule_args &a, const team_items &t)
{
    for (int round = own_thread();; round += THREADS) {
        int index = item_of_round(t, round);

        if (index < 0)
            break;
        *ready_of(a, find_team_item(a, index)) = 0;
    }
    __threadfence();
    __syncthreads();
    release_successor();
}

/* stays: blocks that go on beside the second kernel. */
template <int EACH, int W>
__global__ void __launch_bounds__(TEAMS *THREADS, 1)
    apart_kernel(const __grid_constant__ rule_args a, int stays)
{
    extern __shared__ __align__(16) char memory[];
    __shared__ prepare_item items[TEAMS];
    prepare_item &item = items[own_team()];
    const prepare_shared shared = share(a, memory + own_team() * shared_bytes(a));
    const team_items t = find_items(a, *a.d.n_items, stays);

    wait_predecessor();
    clear_ready(a, t);
    for (int round = 0;; round++) {
        int index = item_of_round(t, round);

        if (index < 0)
            break;
        if (own_thread() == 0)
            item = find_team_item(a, index);
        team_wait<TEAMS>();
        prepare<EACH, W, TEAMS>(a, shared, item);
        before_tensor_copies();
        team_wait<TEAMS>();
        if (own_thread() == 0)
            store_ready(ready_of(a, item));
    }
}

/* ---- launch -------------------------------------------------------------------------------- */

template <int EACH, int W> static cudaError_t launch(const rule_args *a, cudaStream_t stream)
{
    int blocks = a->d.rows / CHUNK + a->d.spans;
    dim3 grid((unsigned)a->d.shape.k_heads, (unsigned)min(blocks, 65535));
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config =
        sp_cuda_overlapping(grid, THREADS, (size_t)shared_bytes(*a), &overlap, false, stream);

    return cudaLaunchKernelEx(&config, prepare_kernel<EACH, W>, *a);
}

template <int W> static cudaError_t launch_width(const rule_args *a, cudaStream_t stream)
{
    switch (a->l.k_width) {
    case 32:
        return launch<1, W>(a, stream);
    case 64:
        return launch<2, W>(a, stream);
    default:
        return launch<4, W>(a, stream);
    }
}

/* Of each GPU; 0 where it has no apart_kernel. Written at its init, before any launch on it. */
static int multiprocessors[SP_CUDA_GPUS_MAX], shared_most[SP_CUDA_GPUS_MAX];

int sp_cuda_rule_stays(int gpu, const rule_args *a, int blocks)
{
    int stays = gpu < SP_CUDA_GPUS_MAX ? multiprocessors[gpu] - blocks : 0;

    if (a->l.k_width != 128 || a->d.shape.conv_width > 4 || !sp_cuda_overlaps() ||
        TEAMS * shared_bytes(*a) > shared_most[gpu])
        return 0;
    return max(0, stays / CLUSTER * CLUSTER);
}

cudaError_t sp_cuda_rule_prepare_apart(int gpu, const rule_args *a, int stays, cudaStream_t stream)
{
    int blocks = multiprocessors[gpu] / CLUSTER * CLUSTER;
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config =
        sp_cuda_overlapping(dim3((unsigned)blocks), TEAMS * THREADS,
                            (size_t)(TEAMS * shared_bytes(*a)), &attributes[0], false, stream);

    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim = {CLUSTER, 1, 1};
    config.attrs = attributes;
    config.numAttrs++;
    return cudaLaunchKernelEx(&config, apart_kernel<4, 4>, *a, stays);
}

cudaError_t sp_cuda_rule_prepare(const rule_args *args, cudaStream_t stream)
{
    return args->d.shape.conv_width <= 4 ? launch_width<4>(args, stream)
                                         : launch_width<SP_CUDA_RULE_CONV_MAX>(args, stream);
}

template <int EACH, int W> static cudaError_t allow(cudaError_t before)
{
    const int most = 2 * CHUNK * (EACH * 32 + PAD) * 2 + (2 + 2 * WARPS) * PRODUCT * 4;

    return before != cudaSuccess
               ? before
               : cudaFuncSetAttribute(prepare_kernel<EACH, W>,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, most);
}

static cudaError_t allow_apart(int gpu)
{
    cudaFuncAttributes own;
    int major = 0, most = 0, count = 0;
    cudaError_t code = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, gpu);

    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, gpu);
    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, gpu);
    if (code == cudaSuccess)
        code = cudaFuncGetAttributes(&own, apart_kernel<4, 4>);
    if (code != cudaSuccess || gpu >= SP_CUDA_GPUS_MAX || major < 9)
        return code;
    shared_most[gpu] = most - (int)own.sharedSizeBytes;
    multiprocessors[gpu] = count;
    return cudaFuncSetAttribute(apart_kernel<4, 4>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                shared_most[gpu]);
}

cudaError_t sp_cuda_rule_prepare_init(int gpu)
{
    return allow<1, 4>(
        allow<2, 4>(allow<4, 4>(allow<1, 8>(allow<2, 8>(allow<4, 8>(allow_apart(gpu)))))));
}
