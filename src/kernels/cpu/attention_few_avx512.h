/*
 * attention_few_avx512.h: attention of few queries, as in decode, in vectors and in the order of
 * the tiles (see attention_amx.c), so that a row has the same bits in both.
 *
 * For few queries tiles are mostly empty, while keys and values still have to be brought in their
 * order. Here each is read once, where it is in the cache. Lanes of scores are 16 keys, which are
 * transposed in registers four pairs of elements at a time. Lanes of sums are elements, even ones
 * and odd ones of 32 apart: a value's pairs become FP32 by a shift and a mask.
 *
 * SPAN, STEP, HALVES and QUERIES are those of the includer.
 */
#ifndef SP_KERNELS_CPU_ATTENTION_FEW_AVX512_H
#define SP_KERNELS_CPU_ATTENTION_FEW_AVX512_H

#include "kernels/cpu/transpose_avx512.h"

#include <math.h>
#include <stdalign.h>

#define FEW_QUERIES 8 /* at most */

static inline int32_t min32(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

/* ---- what other forms use too ---------------------------------------------------------------- */

/* What the next span reads, prefetched a few positions at a time while this one
 * is computed: a page is too short for the hardware's prefetcher. */
typedef struct span_fetch {
    const uint16_t *k, *v;
    const int64_t *offsets;
    int32_t next, count, at_once; /* positions */
    int32_t head_dim;
} span_fetch;

SP_INLINE void fetch_some(span_fetch *fetch)
{
    int32_t end = min32(fetch->count, fetch->next + fetch->at_once);

    for (; fetch->next < end; fetch->next++) {
        const uint16_t *k = fetch->k + fetch->offsets[fetch->next];
        const uint16_t *v = fetch->v + fetch->offsets[fetch->next];

        for (int32_t i = 0; i < fetch->head_dim; i += STEP) {
            _mm_prefetch((const char *)(k + i), _MM_HINT_T1);
            _mm_prefetch((const char *)(v + i), _MM_HINT_T1);
        }
    }
}

/* 2^x for x up to about 0, at least 2^-125; 1 for 0. The polynomial is within
 * 2^-23 of 2^r for r in [-1/2, 1/2]. */
SP_INLINE __m512 exp2_16(__m512 x)
{
    __m512 n, r, p;

    x = _mm512_max_ps(_mm512_set1_ps(-125.0f), x); /* a NaN stays one */
    n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    r = _mm512_sub_ps(x, n);
    p = _mm512_set1_ps(0x1.5bba14p-10f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.3cea88p-7f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.c6b752p-5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.ebf9bcp-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.62e42ap-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

/* The rest of a weight after its first half, rounded to BF16 in the upper half.
 */
SP_INLINE __m512 rest_of(__m512 weight)
{
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
    __m512i first = _mm512_and_si512(_mm512_castps_si512(weight), upper);
    __m512 rest = _mm512_sub_ps(weight, _mm512_castsi512_ps(first)); /* exact */

    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_castps_si512(rest), _mm512_set1_epi32(0x8000)));
}

/* ---- few queries ----------------------------------------------------------------------------- */

/* Parts of the scratch of a thread; d = head_dim rounded up to STEP. */
typedef struct attention_few {
    int32_t queries, d;
    float *q;               /* [FEW_QUERIES][d] */
    float *scores;          /* [FEW_QUERIES][SPAN] */
    float *weights;         /* [HALVES][FEW_QUERIES][SPAN] */
    float *sums;            /* [FEW_QUERIES][d / STEP][even and odd elements][STEP / 2] */
    float *largest, *total; /* [QUERIES] */
    int32_t *position;      /* [QUERIES] */
} attention_few;

/* Queries whose sums are computed at once, those that are missing among them. */
SP_INLINE int32_t few_rounded(int32_t queries)
{
    return queries <= 2 ? queries : queries <= 4 ? 4 : FEW_QUERIES;
}

/* Eight elements of 16 keys, `at` pairs along their lines, times those of queries. */
SP_INLINE void score_eight(int queries, const float *const *lines, int64_t at, const float *q,
                           int32_t d, __m512 *even, __m512 *odd)
{
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
    __m512 pairs[4];

    sp_transpose_16x4(lines, at, pairs);
    SP_UNROLL
    for (int p = 0; p < 4; p++) {
        __m512i pair = _mm512_castps_si512(pairs[p]);
        __m512 low = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
        __m512 high = _mm512_castsi512_ps(_mm512_and_si512(pair, upper));

        SP_UNROLL
        for (int r = 0; r < queries; r++) {
            const float *x = q + r * d + 2 * (at + p);

            even[r] = _mm512_fmadd_ps(low, _mm512_set1_ps(x[0]), even[r]);
            odd[r] = _mm512_fmadd_ps(high, _mm512_set1_ps(x[1]), odd[r]);
        }
    }
}

/* Scores of 16 keys. */
SP_INLINE void score_sixteen(int queries, const attention_few *few, const uint16_t *const *keys,
                             float *scores, span_fetch *fetch)
{
    const float *lines[16];
    __m512 sums[FEW_QUERIES];

    SP_UNROLL
    for (int i = 0; i < 16; i++)
        lines[i] = (const float *)(const void *)keys[i];
    SP_UNROLL
    for (int r = 0; r < queries; r++)
        sums[r] = _mm512_setzero_ps();
    for (int32_t i = 0; i < few->d; i += STEP) {
        __m512 even[FEW_QUERIES], odd[FEW_QUERIES];

        fetch_some(fetch);
        SP_UNROLL
        for (int r = 0; r < queries; r++)
            even[r] = odd[r] = _mm512_setzero_ps();
        for (int32_t at = i / 2; at < (i + STEP) / 2; at += 4)
            score_eight(queries, lines, at, few->q, few->d, even, odd);
        SP_UNROLL
        for (int r = 0; r < queries; r++)
            sums[r] = _mm512_add_ps(sums[r], _mm512_add_ps(even[r], odd[r]));
    }
    SP_UNROLL
    for (int r = 0; r < queries; r++)
        _mm512_store_ps(scores + r * SPAN, sums[r]);
}

/* Scores of STEP keys, the first `n` of which count. */
static void few_scores(const attention_few *few, const uint16_t *const *keys, int32_t t, int32_t n,
                       span_fetch *fetch)
{
    for (int32_t i = 0; i < n; i += 16) {
        float *scores = few->scores + t + i;

        switch (few_rounded(few->queries)) {
        case 1:
            score_sixteen(1, few, keys + i, scores, fetch);
            break;
        case 2:
            score_sixteen(2, few, keys + i, scores, fetch);
            break;
        case 4:
            score_sixteen(4, few, keys + i, scores, fetch);
            break;
        default:
            score_sixteen(FEW_QUERIES, few, keys + i, scores, fetch);
        }
    }
}

/* The lanes of the 16 keys from t on that a query at `position` sees; t counts from `begin`. */
SP_INLINE __mmask16 keys_seen(int32_t position, int32_t begin, int32_t t)
{
    int32_t seen = position - begin - t + 1;

    if (seen <= 0)
        return 0;
    return (__mmask16)(seen >= 16 ? 0xffffu : (1u << seen) - 1u);
}

/* The largest score of `count` keys of a query; NaNs are skipped, their weights are NaN anyway. */
static float few_largest(const attention_few *few, int32_t query, int32_t begin, int32_t count)
{
    const float *scores = few->scores + query * SPAN;
    __m512 largest = _mm512_set1_ps(-INFINITY);

    for (int32_t t = 0; t < count; t += 16)
        largest = _mm512_mask_max_ps(largest, keys_seen(few->position[query], begin, t),
                                     _mm512_load_ps(scores + t), largest);
    return _mm512_reduce_max_ps(largest);
}

/* Scores of a query become weights; those of its total are left in its scores. */
static void few_weigh(const attention_few *few, int32_t query, int32_t begin, int32_t count,
                      float scale)
{
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
    const __m512 largest = _mm512_set1_ps(few->largest[query]);
    float *scores = few->scores + query * SPAN, *weights = few->weights + query * SPAN;

    for (int32_t t = 0; t < count; t += 16) {
        __m512 weight =
            exp2_16(_mm512_fmsub_ps(_mm512_load_ps(scores + t), _mm512_set1_ps(scale), largest));
        __m512i first;

        weight = _mm512_maskz_mov_ps(keys_seen(few->position[query], begin, t), weight);
        first = _mm512_and_si512(_mm512_castps_si512(weight), upper);
        _mm512_store_ps(scores + t, weight);
        _mm512_store_si512((void *)(weights + t), first);
        if (HALVES == 2)
            _mm512_store_si512((void *)(weights + FEW_QUERIES * SPAN + t),
                               _mm512_and_si512(_mm512_castps_si512(rest_of(weight)), upper));
    }
}

/* Totals of weights, of even and of odd keys in a chain each, of all queries that there may be. */
static __m512 few_totals(const attention_few *few, int32_t count)
{
    alignas(64) float totals[QUERIES] = {0};

    for (int32_t query = 0; query < few->queries; query += 2) {
        const float *one = few->scores + query * SPAN, *two = one + SPAN;
        __m128 sum = _mm_setzero_ps(), both;

        for (int32_t t = 0; t < count; t += 2) {
            both = _mm_castpd_ps(_mm_load_sd((const double *)(const void *)(one + t)));
            sum = _mm_add_ps(sum, _mm_loadh_pi(both, (const __m64 *)(const void *)(two + t)));
        }
        sum = _mm_add_ps(sum, _mm_movehdup_ps(sum));
        totals[query] = _mm_cvtss_f32(sum);
        totals[query + 1] = _mm_cvtss_f32(_mm_movehl_ps(sum, sum));
    }
    return _mm512_load_ps(totals);
}

/* The scores of `count` positions from `begin` on become weights; the sums are rescaled. */
static void few_softmax(const attention_few *few, int32_t begin, int32_t count, float scale)
{
    const __m512 old = _mm512_load_ps(few->largest);
    alignas(64) float factors[QUERIES] = {0};
    __m512 next, rescale;

    for (int32_t query = 0; query < few->queries; query++)
        factors[query] = few_largest(few, query, begin, count);
    next = _mm512_mul_ps(_mm512_load_ps(factors), _mm512_set1_ps(scale));
    next = _mm512_max_ps(next, old);
    rescale = exp2_16(_mm512_sub_ps(old, next));
    _mm512_store_ps(few->largest, next);
    _mm512_store_ps(factors, rescale);
    for (int32_t query = 0; query < few->queries; query++) {
        const __m512 by = _mm512_set1_ps(factors[query]);
        float *sums = few->sums + query * few->d;

        few_weigh(few, query, begin, count, scale);
        for (int32_t i = 0; i < few->d; i += 16)
            _mm512_store_ps(sums + i, _mm512_mul_ps(_mm512_load_ps(sums + i), by));
    }
    next = _mm512_fmadd_ps(_mm512_load_ps(few->total), rescale, few_totals(few, count));
    _mm512_store_ps(few->total, next);
}

/* One value's STEP elements times its weights, added to the chains of its parity. */
SP_INLINE void add_value(int queries, const uint16_t *value, const float *weights,
                         __m512 (*chains)[HALVES][2])
{
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
    __m512i pairs = _mm512_loadu_si512((const void *)value);
    __m512 low = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    __m512 high = _mm512_castsi512_ps(_mm512_and_si512(pairs, upper));

    SP_UNROLL
    for (int r = 0; r < queries; r++) {
        SP_UNROLL
        for (int h = 0; h < HALVES; h++) {
            __m512 weight = _mm512_set1_ps(weights[(h * FEW_QUERIES + r) * SPAN]);

            chains[r][h][0] = _mm512_fmadd_ps(weight, low, chains[r][h][0]);
            chains[r][h][1] = _mm512_fmadd_ps(weight, high, chains[r][h][1]);
        }
    }
}

/* STEP elements from i on of `n` values, at most STEP, times the weights of one or two queries. */
SP_INLINE void add_values(int queries, const uint16_t *const *values, int32_t n, int32_t i,
                          const float *weights, float *sums, int32_t d)
{
    __m512 even[2][HALVES][2], odd[2][HALVES][2];

    SP_UNROLL
    for (int c = 0; c < queries * HALVES * 2; c++)
        even[c / (2 * HALVES)][c / 2 % HALVES][c % 2] =
            odd[c / (2 * HALVES)][c / 2 % HALVES][c % 2] = _mm512_setzero_ps();
    for (int32_t t = 0; t < n; t += 2) {
        add_value(queries, values[t] + i, weights + t, even);
        add_value(queries, values[t + 1] + i, weights + t + 1, odd);
    }
    SP_UNROLL
    for (int r = 0; r < queries; r++) {
        SP_UNROLL
        for (int c = 0; c < 2; c++) {
            float *at = sums + r * d + i + c * (STEP / 2);
            __m512 sum = _mm512_load_ps(at);

            SP_UNROLL
            for (int h = 0; h < HALVES; h++)
                sum = _mm512_add_ps(sum, _mm512_add_ps(even[r][h][c], odd[r][h][c]));
            _mm512_store_ps(at, sum);
        }
    }
}

/* The values of `n` positions from t on of a span; after an odd number there is a line more. */
static void few_values(const attention_few *few, const uint16_t *const *values, int32_t t,
                       int32_t n, span_fetch *fetch)
{
    for (int32_t i = 0; i < few->d; i += STEP) {
        fetch_some(fetch);
        for (int32_t query = 0; query < few->queries; query += 2) {
            const float *weights = few->weights + query * SPAN + t;
            float *sums = few->sums + query * few->d;

            if (query + 1 < few->queries)
                add_values(2, values, n, i, weights, sums, few->d);
            else
                add_values(1, values, n, i, weights, sums, few->d);
        }
    }
}

#endif
