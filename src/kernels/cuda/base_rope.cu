/*
 * base_rope.cu: the heads of q, k and v between their linear and attention.
 *
 *     head:   x · (1 / sqrt(mean(x²) + eps)) · (weight + offset), where q or k has a norm; then
 *             a' = a · cos - b · sin, b' = b · cos + a · sin of the elements i and i + n_rot; one
 *             rounding at the end; v is only copied
 *     from:   q, or the first half of each head of q_gate; k; v
 *     to:     q, k and v to the cache (cache_layout.h), zeros up to its width of a token
 *
 * A unit is what one thread has in registers: two runs of EACH elements that rotate together, or
 * that follow each other beyond the rotated part. EACH is 8 (16 bytes) where head_dim and n_rot are
 * multiples of 8: 1 to 16 lanes of a warp have a head then, one unit each; otherwise it is 1, and a
 * warp has a head. Where there are many rows, lanes take four heads of a row, so that what they
 * share (angles, weights, the page) is found once. The sum of the norm: a unit's squares in pairs,
 * a lane's units in order, the lanes by a butterfly; fixed by head_dim and n_rot. The table of
 * angles stays in L1, as a block has the heads of a row or two. Bound by the bytes of q, k and v,
 * or for few rows by latency.
 */
#include "kernels/cuda/cache_layout.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"

#define ROPE_THREADS 128
#define HEAD_MAX     256
#define PIECE        8
#define MANY_HEADS   4
#define MANY_LANES   (1 << 18) /* from here on, four heads at once */

/* How a head is divided; fixed by head_dim and n_rot. */
typedef struct rope_shape {
    int32_t n_rot;   /* 0 without angles */
    int32_t rotated; /* units that rotate */
    int32_t units;
    int32_t shift; /* 1 << shift lanes */
    int32_t page_dim;
    int32_t q_groups, kv_groups; /* of the heads that lanes take at once */
} rope_shape;

/* The heads of one row that lanes take at once. */
typedef struct rope_heads {
    const uint16_t *from;   /* [n, head_dim], stride `stride` */
    const uint16_t *weight; /* NULL: no norm */
    float eps, offset;
    int32_t kv_head; /* the first one, of k or v; -1: q */
    int32_t n;       /* 0: none */
    int32_t stride;  /* of `from`, from head to head */
    bool is_v;
} rope_heads;

/* What depends on the row's position. */
typedef struct rope_place {
    uint16_t *to;               /* of the first head; q: in q, k, v: its place in the page */
    const float *cosine, *sine; /* [n_rot] */
    int32_t token;              /* in the page; -1: q */
    int32_t page_dim;
    int32_t stride; /* elements from head to head */
} rope_place;

template <int EACH> struct rope_unit {
    float low[EACH], high[EACH];
};

/* EACH elements as they are stored. */
template <int EACH> struct rope_run;
template <> struct rope_run<PIECE> {
    uint4 v;
};
template <> struct rope_run<1> {
    uint16_t v;
};

template <int EACH> struct rope_runs {
    rope_run<EACH> low, high;
};

static __device__ __forceinline__ int low_of(const rope_shape &s, int unit, int each)
{
    return unit < s.rotated ? unit * each : 2 * s.n_rot + 2 * (unit - s.rotated) * each;
}

static __device__ __forceinline__ int high_of(const rope_shape &s, int unit, int each)
{
    return low_of(s, unit, each) + (unit < s.rotated ? s.n_rot : each);
}

/* ---- one head ------------------------------------------------------------------------------ */

/* Group `group` of row `row`; groups have `each` heads, the last one of q, k and v what is left. */
static __device__ __forceinline__ rope_heads find_heads(const sp_cuda_rope &r, const rope_shape &s,
                                                        int row, int group, int each)
{
    rope_heads h = {};
    int first = group * each;

    h.stride = r.head_dim;
    if (group < s.q_groups) {
        h.stride = (r.q_gate != NULL ? 2 : 1) * r.head_dim;
        h.from = (const uint16_t *)(r.q_gate != NULL ? r.q_gate : r.q);
        h.from += ((int64_t)row * r.q_heads + first) * h.stride;
        h.weight = (const uint16_t *)r.q_norm;
        h.eps = r.q_eps, h.offset = r.q_offset;
        h.kv_head = -1;
        h.n = min(each, r.q_heads - first);
        return h;
    }
    group -= s.q_groups;
    h.is_v = group >= s.kv_groups;
    h.kv_head = (group - (h.is_v ? s.kv_groups : 0)) * each;
    h.from = (const uint16_t *)(h.is_v ? r.v : r.k);
    h.from += ((int64_t)row * r.kv_heads + h.kv_head) * r.head_dim;
    h.weight = h.is_v ? NULL : (const uint16_t *)r.k_norm;
    h.eps = r.k_eps, h.offset = r.k_offset;
    h.n = min(each, r.kv_heads - h.kv_head);
    return h;
}

static __device__ __forceinline__ rope_place find_place(const sp_cuda_rope &r, const rope_shape &s,
                                                        const rope_heads &h, int row, int first,
                                                        int position, int span)
{
    rope_place p = {(uint16_t *)r.q, NULL, NULL, -1, s.page_dim, r.head_dim};
    int64_t page;

    p.to += ((int64_t)row * r.q_heads + first) * r.head_dim;
    if (s.n_rot > 0) {
        p.cosine = r.cosine + (int64_t)position * s.n_rot;
        p.sine = r.sine + (int64_t)position * s.n_rot;
    }
    if (h.kv_head < 0)
        return p;
    page = r.step.pages[r.step.span_page[span] + position / SP_CUDA_PAGE];
    p.stride = SP_CUDA_PAGE * s.page_dim;
    p.to = (uint16_t *)(h.is_v ? r.values : r.keys) + (page * r.kv_heads + h.kv_head) * p.stride;
    p.token = position % SP_CUDA_PAGE;
    return p;
}

static __device__ __forceinline__ rope_run<PIECE> load_run(const uint16_t *from, rope_run<PIECE>)
{
    return {*(const uint4 *)from};
}

static __device__ __forceinline__ rope_run<1> load_run(const uint16_t *from, rope_run<1>)
{
    return {*from};
}

static __device__ __forceinline__ void widen_run(float *to, const rope_run<PIECE> &run)
{
    const uint32_t two[4] = {run.v.x, run.v.y, run.v.z, run.v.w};

#pragma unroll
    for (int i = 0; i < PIECE / 2; i++) {
        float2 a = widen_two<0>(two[i]);

        to[2 * i] = a.x, to[2 * i + 1] = a.y;
    }
}

static __device__ __forceinline__ void widen_run(float *to, const rope_run<1> &run)
{
    to[0] = widen<0>(run.v);
}

/* Where element d of a head is, from p.to on. */
static __device__ __forceinline__ int place_of(const rope_place &p, int d)
{
    return p.token < 0 ? d : sp_cuda_cache_offset(p.page_dim, p.token, d);
}

/* Rounds and stores a run; `largest` becomes the largest magnitude so far, of each half of a word,
 * as bits. */
template <int EACH>
static __device__ __forceinline__ void store_run(uint16_t *to, const float *v, uint32_t *largest)
{
    uint32_t two[4] = {0, 0, 0, 0};

#pragma unroll
    for (int i = 0; i < (EACH + 1) / 2; i++) {
        two[i] = narrow_two<0>(v[2 * i], EACH > 1 ? v[2 * i + 1] : 0.0f);
        *largest = __vmaxu2(*largest, two[i] & 0x7fff7fffu);
    }
    if (EACH == PIECE)
        *(uint4 *)to = make_uint4(two[0], two[1], two[2], two[3]);
    else
        to[0] = (uint16_t)two[0];
}

static __device__ __forceinline__ bool is_finite(uint32_t largest)
{
    return (largest & 0xffffu) < 0x7f80u && largest >> 16 < 0x7f80u;
}

template <int EACH> static __device__ __forceinline__ float square_run(const float *v)
{
    float sum[EACH];

#pragma unroll
    for (int i = 0; i < EACH; i++)
        sum[i] = v[i] * v[i];
#pragma unroll
    for (int by = 1; by < EACH; by *= 2)
#pragma unroll
        for (int i = 0; i < EACH; i += 2 * by)
            sum[i] += sum[i + by];
    return sum[0];
}

template <int EACH>
static __device__ __forceinline__ void scale_run(const rope_heads &h, float inverse,
                                                 const rope_run<EACH> &weights, float *v)
{
    float weight[EACH];

    widen_run(weight, weights);
#pragma unroll
    for (int i = 0; i < EACH; i++)
        v[i] = v[i] * inverse * (weight[i] + h.offset);
}

template <int EACH> static __device__ __forceinline__ void load_angles(float *to, const float *from)
{
#pragma unroll
    for (int i = 0; i + 4 <= EACH; i += 4) {
        float4 v = *(const float4 *)(from + i);

        to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
    }
    if (EACH == 1)
        to[0] = from[0];
}

/* The angles are cosines and sines. */
template <int EACH>
static __device__ __forceinline__ void rotate(const rope_unit<EACH> &angle, rope_unit<EACH> *u)
{
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        float a = u->low[i], b = u->high[i];

        u->low[i] = a * angle.low[i] - b * angle.high[i];
        u->high[i] = b * angle.low[i] + a * angle.high[i];
    }
}

/* ---- kernel -------------------------------------------------------------------------------- */

/* The unit's elements of a head, or of its weights; zeros beyond the head. */
template <int EACH>
static __device__ __forceinline__ rope_runs<EACH> load_runs(const rope_shape &s,
                                                            const uint16_t *from, int unit,
                                                            int head_dim)
{
    int low = low_of(s, unit, EACH), high = high_of(s, unit, EACH);
    rope_runs<EACH> runs = {};

    if (unit < s.units)
        runs.low = load_run(from + low, runs.low);
    if (unit < s.units && high < head_dim)
        runs.high = load_run(from + high, runs.high);
    return runs;
}

template <int EACH>
static __device__ __forceinline__ rope_unit<EACH> widen_runs(const rope_runs<EACH> &runs)
{
    rope_unit<EACH> unit;

    widen_run(unit.low, runs.low);
    widen_run(unit.high, runs.high);
    return unit;
}

/* One head from its runs to its place. Every thread of the warp takes part in the sum. */
template <int EACH, int UNITS>
static __device__ __forceinline__ void finish_head(const sp_cuda_rope &r, const rope_shape &s,
                                                   const rope_heads &h, const rope_place &p,
                                                   const rope_runs<EACH> *runs,
                                                   const rope_runs<EACH> *weights,
                                                   const rope_unit<EACH> *angles, int lane,
                                                   int head, bool stores, uint32_t *largest)
{
    rope_unit<EACH> units[UNITS];
    float sum = 0.0f, inverse;
    uint16_t *to = p.to + (int64_t)head * p.stride;

#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        units[i] = widen_runs<EACH>(runs[i]);
        sum += square_run<EACH>(units[i].low) + square_run<EACH>(units[i].high);
    }
    for (int by = (1 << s.shift) / 2; by > 0; by /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, by);
    inverse = 1.0f / sqrtf(sum / (float)r.head_dim + h.eps);
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        int unit = lane + (i << s.shift), high = high_of(s, unit, EACH);

        if (h.weight != NULL) {
            scale_run<EACH>(h, inverse, weights[i].low, units[i].low);
            scale_run<EACH>(h, inverse, weights[i].high, units[i].high);
        }
        if (!h.is_v && unit < s.rotated)
            rotate<EACH>(angles[i], &units[i]);
        if (!stores || unit >= s.units)
            continue;
        store_run<EACH>(to + place_of(p, low_of(s, unit, EACH)), units[i].low, largest);
        if (high < r.head_dim)
            store_run<EACH>(to + place_of(p, high), units[i].high, largest);
    }
}

/* Zeros of a head from head_dim to the width of a page. */
template <int EACH>
static __device__ __forceinline__ void pad_head(const rope_place &p, int head_dim, int lane,
                                                int lanes, int head)
{
    uint16_t *to = p.to + (int64_t)head * p.stride;
    const float zeros[EACH] = {};
    uint32_t largest = 0;

    for (int d = head_dim + lane * EACH; d < p.page_dim; d += lanes * EACH)
        store_run<EACH>(to + place_of(p, d), zeros, &largest);
}

/* HEADS: at once; UNITS: of one lane. What does not depend on something else is loaded first: the
 * weights, then the heads and their position, then the angles and the page. */
template <int EACH, int UNITS, int HEADS>
__global__ void __launch_bounds__(ROPE_THREADS, HEADS > 1 ? 5 : 7)
    rope_kernel(const sp_cuda_rope r, rope_shape s)
{
    int item = (int)(blockIdx.x * ROPE_THREADS + threadIdx.x) >> s.shift;
    int lane = (int)threadIdx.x & ((1 << s.shift) - 1), groups = s.q_groups + 2 * s.kv_groups;
    int row = item / groups, position = -1, span = -1;
    rope_runs<EACH> runs[HEADS][UNITS] = {}, weights[UNITS] = {};
    rope_unit<EACH> angles[UNITS] = {};
    rope_heads h = find_heads(r, s, row, item - row * groups, HEADS);
    rope_place p = {};
    uint32_t largest = 0;

    release_successor();
    if (h.weight != NULL)
#pragma unroll
        for (int i = 0; i < UNITS; i++)
            weights[i] = load_runs<EACH>(s, h.weight, lane + (i << s.shift), r.head_dim);
    wait_predecessor();
    if (row < r.step.rows) {
        position = r.step.position[row];
        span = r.step.row_span[row];
#pragma unroll
        for (int j = 0; j < HEADS; j++)
#pragma unroll
            for (int i = 0; i < UNITS; i++)
                if (j < h.n)
                    runs[j][i] = load_runs<EACH>(s, h.from + j * h.stride, lane + (i << s.shift),
                                                 r.head_dim);
    }
    if (position >= 0) {
        p = find_place(r, s, h, row, (item - row * groups) * HEADS, position, span);
#pragma unroll
        for (int i = 0; i < UNITS; i++)
            if (!h.is_v && lane + (i << s.shift) < s.rotated) {
                load_angles<EACH>(angles[i].low, p.cosine + (lane + (i << s.shift)) * EACH);
                load_angles<EACH>(angles[i].high, p.sine + (lane + (i << s.shift)) * EACH);
            }
    }
#pragma unroll
    for (int j = 0; j < HEADS; j++)
        finish_head<EACH, UNITS>(r, s, h, p, runs[j], weights, angles, lane, j,
                                 position >= 0 && j < h.n, &largest);
    if (position < 0 || p.token < 0)
        return;
    for (int j = 0; j < h.n; j++)
        pad_head<EACH>(p, r.head_dim, lane, 1 << s.shift, j);
    if (!is_finite(largest))
        r.fault[span] = 1;
}

/* ---- launch -------------------------------------------------------------------------------- */

static rope_shape shape_of(const sp_cuda_rope &r, int each)
{
    rope_shape s = {};
    int rest;

    s.n_rot = r.cosine != NULL ? r.n_rot : 0;
    s.rotated = s.n_rot / each;
    rest = (r.head_dim - 2 * s.n_rot) / each;
    s.units = s.rotated + (rest + 1) / 2;
    while (1 << s.shift < s.units && 1 << s.shift < SP_WARP)
        s.shift++;
    s.page_dim = sp_cuda_page_dim(r.head_dim);
    return s;
}

template <int EACH, int UNITS, int HEADS>
static cudaError_t launch(const sp_cuda_rope &r, rope_shape s, cudaStream_t stream)
{
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config;
    int64_t lanes;

    s.q_groups = (r.q_heads + HEADS - 1) / HEADS;
    s.kv_groups = (r.kv_heads + HEADS - 1) / HEADS;
    lanes = (int64_t)r.step.rows * (s.q_groups + 2 * s.kv_groups) << s.shift;
    config = sp_cuda_overlapping(dim3((unsigned)((lanes + ROPE_THREADS - 1) / ROPE_THREADS)),
                                 ROPE_THREADS, 0, &overlap, false, stream);
    return cudaLaunchKernelEx(&config, rope_kernel<EACH, UNITS, HEADS>, r, s);
}

extern "C" int sp_cuda_rope_rows(int gpu, const sp_cuda_rope *rope, void *stream)
{
    bool pieces = rope->head_dim % PIECE == 0 && rope->n_rot % PIECE == 0;
    rope_shape s = shape_of(*rope, pieces ? PIECE : 1);
    int64_t lanes = (int64_t)rope->step.rows * (rope->q_heads + 2 * rope->kv_heads) << s.shift;
    sp_cuda_current current(gpu);

    if (current.code != cudaSuccess || rope->step.rows == 0)
        return (int)current.code;
    if (rope->head_dim > HEAD_MAX || rope->head_dim < 2 * s.n_rot)
        return (int)cudaErrorInvalidValue;
    if (!pieces)
        return (int)launch<1, HEAD_MAX / 2 / SP_WARP, 1>(*rope, s, (cudaStream_t)stream);
    if (lanes > MANY_LANES)
        return (int)launch<PIECE, 1, MANY_HEADS>(*rope, s, (cudaStream_t)stream);
    return (int)launch<PIECE, 1, 1>(*rope, s, (cudaStream_t)stream);
}
