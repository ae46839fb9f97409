/*
 * attention_avx512.c: attention_tile.h with AVX-512, bit for bit the form of AVX2. A vector of
 * scores holds eight lanes of two keys, a block's weights fill two vectors; the weighted sums are
 * elementwise and sixteen wide.
 */
#define QUERIES   4
#define KEYS      8
#define D_VECTORS 4
#define D_LANES   16

#include "kernels/cpu/attention_tile.h"
#include "kernels/cpu/vector_avx512.h"

#define KEY_PAIRS (KEYS / 2)

/* [BLOCK / KEYS][d / 8][KEY_PAIRS][two keys, KEY_PAIRS apart][8] */
SP_INLINE float *place_key(const attention_tile *tile, int32_t token, int32_t i)
{
    return tile->keys + token / KEYS * KEYS * tile->d + i * KEYS + token % KEY_PAIRS * 16 +
           token % KEYS / KEY_PAIRS * 8;
}

/* What sp_v8_reduce4 does, for both halves: eight sums in the order of the keys. */
SP_INLINE __m256 add_pairs_8(__m512 a, __m512 b, __m512 c, __m512 d)
{
    __m512 ab = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
    __m512 cd = _mm512_add_ps(_mm512_shuffle_ps(c, d, 0x88), _mm512_shuffle_ps(c, d, 0xdd));
    __m512 halves = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x88), _mm512_shuffle_ps(ab, cd, 0xdd));
    __m512 low = _mm512_shuffle_f32x4(halves, halves, 0x08), high;

    high = _mm512_shuffle_f32x4(halves, halves, 0x0d);
    return _mm256_add_ps(_mm512_castps512_ps256(low), _mm512_castps512_ps256(high));
}

SP_INLINE void score(int queries, const float *q, const float *keys, int32_t d, float *out_scores)
{
    __m512 acc[QUERIES][KEY_PAIRS];

    SP_UNROLL
    for (int r = 0; r < queries; r++) {
        SP_UNROLL
        for (int c = 0; c < KEY_PAIRS; c++)
            acc[r][c] = _mm512_setzero_ps();
    }
    for (int32_t i = 0; i < d; i += 8) {
        __m512 v[QUERIES];

        SP_UNROLL
        for (int r = 0; r < queries; r++)
            v[r] = _mm512_broadcast_f32x8(_mm256_loadu_ps(q + r * d + i));
        SP_UNROLL
        for (int c = 0; c < KEY_PAIRS; c++) {
            __m512 pair = _mm512_loadu_ps(keys + i * KEYS + c * 16);

            SP_UNROLL
            for (int r = 0; r < queries; r++)
                acc[r][c] = _mm512_fmadd_ps(pair, v[r], acc[r][c]);
        }
    }
    SP_UNROLL
    for (int r = 0; r < queries; r++)
        _mm256_storeu_ps(out_scores + r * BLOCK,
                         add_pairs_8(acc[r][0], acc[r][1], acc[r][2], acc[r][3]));
}

/* Its four eights are added in order from 0, lane by lane, then the lanes as sp_v8_reduce. */
SP_INLINE float total_of(const __m512 *weights)
{
    __m256 total = _mm256_setzero_ps();

    SP_UNROLL
    for (int s = 0; s < BLOCK / 16; s++) {
        total = _mm256_add_ps(total, _mm512_castps512_ps256(weights[s]));
        total = _mm256_add_ps(total, _mm512_extractf32x8_ps(weights[s], 1));
    }
    return sp_v8_reduce(total);
}

static void softmax_step(attention_tile *tile, int32_t query, int32_t count, float scale)
{
    float *weights = tile->weights + query * BLOCK;
    __m512 scores[BLOCK / 16], largest = _mm512_set1_ps(tile->largest[query]);
    uint32_t seen = count == BLOCK ? 0xffffffffu : (1u << count) - 1u;
    float maximum;

    SP_UNROLL
    for (int s = 0; s < BLOCK / 16; s++) {
        scores[s] = _mm512_mask_mul_ps(_mm512_set1_ps(-INFINITY), (__mmask16)(seen >> 16 * s),
                                       _mm512_loadu_ps(weights + 16 * s), _mm512_set1_ps(scale));
        largest = _mm512_max_ps(scores[s], largest); /* NaNs are skipped */
    }
    maximum = _mm512_reduce_max_ps(largest);
    SP_UNROLL
    for (int s = 0; s < BLOCK / 16; s++) {
        scores[s] = sp_wide_exp(_mm512_sub_ps(scores[s], _mm512_set1_ps(maximum)));
        _mm512_storeu_ps(weights + 16 * s, scores[s]);
    }
    tile->rescale[query] =
        _mm256_cvtss_f32(sp_v8_exp(_mm256_set1_ps(tile->largest[query] - maximum)));
    tile->total[query] = tile->total[query] * tile->rescale[query] + total_of(scores);
    tile->largest[query] = maximum;
}

SP_INLINE void weighted_sum(int queries, int vectors, const attention_tile *tile, int32_t query,
                            int32_t i, int32_t count)
{
    __m512 acc[QUERIES][D_VECTORS];
    float *sum = tile->sum + query * tile->d + i;

    SP_UNROLL
    for (int r = 0; r < queries; r++) {
        __m512 rescale = _mm512_set1_ps(tile->rescale[query + r]);

        SP_UNROLL
        for (int c = 0; c < vectors; c++)
            acc[r][c] = _mm512_mul_ps(_mm512_loadu_ps(sum + r * tile->d + 16 * c), rescale);
    }
    for (int32_t t = 0; t < count; t++) {
        const float *value = tile->values + t * tile->d + i;
        const float *weight = tile->weights + query * BLOCK + t;
        __m512 w[QUERIES];

        SP_UNROLL
        for (int r = 0; r < queries; r++)
            w[r] = _mm512_set1_ps(weight[r * BLOCK]);
        SP_UNROLL
        for (int c = 0; c < vectors; c++) {
            __m512 v = _mm512_loadu_ps(value + 16 * c);

            SP_UNROLL
            for (int r = 0; r < queries; r++)
                acc[r][c] = _mm512_fmadd_ps(w[r], v, acc[r][c]);
        }
    }
    SP_UNROLL
    for (int r = 0; r < queries; r++) {
        SP_UNROLL
        for (int c = 0; c < vectors; c++)
            _mm512_storeu_ps(sum + r * tile->d + 16 * c, acc[r][c]);
    }
}

void sp_kernels_fill_attention_avx512(sp_kernels *kernels)
{
    kernels->attention = attention;
    kernels->attention_scratch_floats = attention_scratch_floats;
}
