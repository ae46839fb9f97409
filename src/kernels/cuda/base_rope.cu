/*
 * base_rope.cu: the heads of q, k and v between their linear and attention.
 *
 *     head:   x · (1 / sqrt(mean(x²) + eps)) · (weight + offset), where q or k has a norm; then
 *             a' = a · cos - b · sin, b' = b · cos + a · sin of the elements i and i + n_rot; one
 *             rounding at the end; v is only copied
 *     to:     q in place, k and v to the cache (cache_layout.h), zeros up to its width of a token
 *
 * A unit is what one thread has in registers: two runs of EACH elements that rotate together, or
 * that follow each other beyond the rotated part. EACH is 8 (16 bytes) where head_dim and n_rot are
 * multiples of 8: 1 to 16 lanes of a warp have a head then, one unit each; otherwise it is 1, and a
 * warp has a head. The sum of the norm: a unit's squares in pairs, a lane's units in order, the
 * lanes by a butterfly; fixed by head_dim and n_rot. The table of angles stays in L1, as a block
 * has the heads of a row or two. Bound by the bytes of q, k and v, or for few rows by latency.
 */
#include "kernels/cuda/cache_layout.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"

#define ROPE_THREADS 128
#define HEAD_MAX     256
#define PIECE        8

/* How a head is divided; fixed by head_dim and n_rot. */
typedef struct rope_shape {
    int32_t n_rot;   /* 0 without angles */
    int32_t rotated; /* units that rotate */
    int32_t units;
    int32_t lanes; /* a power of two */
    int32_t page_dim;
} rope_shape;

/* One head of one row. */
typedef struct rope_head {
    const uint16_t *from;
    const uint16_t *weight; /* NULL: no norm */
    float eps, offset;
    int32_t kv_head; /* of k or v; -1: q */
    bool is_v;
} rope_head;

/* What depends on the row's position. */
typedef struct rope_place {
    uint16_t *to;               /* q: the head; k, v: the page and head */
    const float *cosine, *sine; /* [n_rot] */
    int32_t token;              /* in the page; -1: q */
    int32_t page_dim;
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

static __device__ __forceinline__ rope_head find_head(const sp_cuda_rope &r, int row, int head)
{
    rope_head h = {};
    int kv = head - r.q_heads;

    if (kv < 0) {
        h.from = (const uint16_t *)r.q + ((int64_t)row * r.q_heads + head) * r.head_dim;
        h.weight = (const uint16_t *)r.q_norm;
        h.eps = r.q_eps, h.offset = r.q_offset;
        h.kv_head = -1;
        return h;
    }
    h.is_v = kv >= r.kv_heads;
    h.kv_head = kv - (h.is_v ? r.kv_heads : 0);
    h.from = (const uint16_t *)(h.is_v ? r.v : r.k);
    h.from += ((int64_t)row * r.kv_heads + h.kv_head) * r.head_dim;
    h.weight = h.is_v ? NULL : (const uint16_t *)r.k_norm;
    h.eps = r.k_eps, h.offset = r.k_offset;
    return h;
}

static __device__ __forceinline__ rope_place find_place(const sp_cuda_rope &r, const rope_shape &s,
                                                        const rope_head &h, int position, int span)
{
    rope_place p = {(uint16_t *)h.from, NULL, NULL, -1, s.page_dim};
    int64_t page;

    if (s.n_rot > 0) {
        p.cosine = r.cosine + (int64_t)position * s.n_rot;
        p.sine = r.sine + (int64_t)position * s.n_rot;
    }
    if (h.kv_head < 0)
        return p;
    page = r.step.pages[r.step.span_page[span] + position / SP_CUDA_PAGE];
    p.to = (uint16_t *)(h.is_v ? r.values : r.keys) +
           (page * r.kv_heads + h.kv_head) * SP_CUDA_PAGE * s.page_dim;
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

/* Rounds and stores a run from element d on; false: a value is not finite. */
template <int EACH>
static __device__ __forceinline__ bool store_run(const rope_place &p, int d, const float *v)
{
    uint16_t *to = p.to + (p.token < 0 ? d : sp_cuda_cache_offset(p.page_dim, p.token, d));
    uint32_t two[4] = {0, 0, 0, 0};
    bool finite = true;

#pragma unroll
    for (int i = 0; i < (EACH + 1) / 2; i++) {
        two[i] = narrow_two<0>(v[2 * i], EACH > 1 ? v[2 * i + 1] : 0.0f);
        finite &= (two[i] & 0x7f80u) != 0x7f80u && (two[i] & 0x7f800000u) != 0x7f800000u;
    }
    if (EACH == PIECE)
        *(uint4 *)to = make_uint4(two[0], two[1], two[2], two[3]);
    else
        to[0] = (uint16_t)two[0];
    return finite;
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
static __device__ __forceinline__ void scale_run(const rope_head &h, float inverse,
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

/* False: a value is not finite. */
template <int EACH>
static __device__ __forceinline__ bool store_unit(const rope_unit<EACH> &u, const rope_shape &s,
                                                  const rope_place &p, int unit, int head_dim)
{
    int high = high_of(s, unit, EACH);
    bool finite = true;

    if (unit < s.units)
        finite = store_run<EACH>(p, low_of(s, unit, EACH), u.low);
    if (unit < s.units && high < head_dim)
        finite &= store_run<EACH>(p, high, u.high);
    return finite;
}

/* UNITS: of one lane. Every thread of the warp stays for the sum. What does not depend on something
 * else is loaded first: the weights, then the head and its position, then the angles and page. */
template <int EACH, int UNITS>
__global__ void __launch_bounds__(ROPE_THREADS, 7) rope_kernel(const sp_cuda_rope r, rope_shape s)
{
    int item = (int)(blockIdx.x * ROPE_THREADS + threadIdx.x) / s.lanes;
    int lane = (int)threadIdx.x & (s.lanes - 1), heads = r.q_heads + 2 * r.kv_heads;
    int row = item / heads, position = -1, span = -1;
    rope_runs<EACH> runs[UNITS] = {}, weights[UNITS] = {};
    rope_unit<EACH> units[UNITS], angles[UNITS] = {}, zeros = {};
    rope_head h = find_head(r, row, item % heads);
    rope_place p = {};
    float sum = 0.0f, inverse;
    bool finite = true;

    release_successor();
    if (h.weight != NULL)
#pragma unroll
        for (int i = 0; i < UNITS; i++)
            weights[i] = load_runs<EACH>(s, h.weight, lane + i * s.lanes, r.head_dim);
    wait_predecessor();
    if (row < r.step.rows) {
        position = r.step.position[row];
        span = r.step.row_span[row];
#pragma unroll
        for (int i = 0; i < UNITS; i++)
            runs[i] = load_runs<EACH>(s, h.from, lane + i * s.lanes, r.head_dim);
    }
    if (position >= 0) {
        p = find_place(r, s, h, position, span);
#pragma unroll
        for (int i = 0; i < UNITS; i++)
            if (!h.is_v && lane + i * s.lanes < s.rotated) {
                load_angles<EACH>(angles[i].low, p.cosine + (lane + i * s.lanes) * EACH);
                load_angles<EACH>(angles[i].high, p.sine + (lane + i * s.lanes) * EACH);
            }
    }
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        units[i] = widen_runs<EACH>(runs[i]);
        sum += square_run<EACH>(units[i].low) + square_run<EACH>(units[i].high);
    }
    for (int by = s.lanes / 2; by > 0; by /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, by);
    if (position < 0)
        return;
    inverse = 1.0f / sqrtf(sum / (float)r.head_dim + h.eps);
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        if (h.weight != NULL) {
            scale_run<EACH>(h, inverse, weights[i].low, units[i].low);
            scale_run<EACH>(h, inverse, weights[i].high, units[i].high);
        }
        if (!h.is_v && lane + i * s.lanes < s.rotated)
            rotate<EACH>(angles[i], &units[i]);
        finite &= store_unit<EACH>(units[i], s, p, lane + i * s.lanes, r.head_dim);
    }
    if (p.token < 0)
        return;
    for (int d = r.head_dim + lane * EACH; d < s.page_dim; d += s.lanes * EACH)
        store_run<EACH>(p, d, zeros.low);
    if (!finite)
        r.fault[span] = 1;
}

/* ---- launch -------------------------------------------------------------------------------- */

static rope_shape shape_of(const sp_cuda_rope &r, int each)
{
    rope_shape s = {r.cosine != NULL ? r.n_rot : 0, 0, 0, 1, sp_cuda_page_dim(r.head_dim)};
    int rest = (r.head_dim - 2 * s.n_rot) / each;

    s.rotated = s.n_rot / each;
    s.units = s.rotated + (rest + 1) / 2;
    while (s.lanes < s.units && s.lanes < SP_WARP)
        s.lanes *= 2;
    return s;
}

extern "C" int sp_cuda_rope_rows(int gpu, const sp_cuda_rope *rope, void *stream)
{
    bool pieces = rope->head_dim % PIECE == 0 && rope->n_rot % PIECE == 0;
    rope_shape s = shape_of(*rope, pieces ? PIECE : 1);
    int64_t heads = (int64_t)rope->step.rows * (rope->q_heads + 2 * rope->kv_heads);
    int64_t blocks = (heads * s.lanes + ROPE_THREADS - 1) / ROPE_THREADS;
    sp_cuda_current current(gpu);
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config;

    if (current.code != cudaSuccess || blocks == 0)
        return (int)current.code;
    if (rope->head_dim > HEAD_MAX || rope->head_dim < 2 * s.n_rot)
        return (int)cudaErrorInvalidValue;
    config = sp_cuda_overlapping(dim3((unsigned)blocks), ROPE_THREADS, 0, &overlap, false,
                                 (cudaStream_t)stream);
    return (int)(pieces ? cudaLaunchKernelEx(&config, rope_kernel<PIECE, 1>, *rope, s)
                        : cudaLaunchKernelEx(&config, rope_kernel<1, HEAD_MAX / 2 / SP_WARP>, *rope,
                                             s));
}
