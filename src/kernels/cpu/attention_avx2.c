/*
 * attention_avx2.c: attention_tile.h with AVX2 and FMA. Scores: lanes along head_dim, three queries
 * × four keys in registers. Values: lanes along head_dim, one broadcast weight per step.
 */
#define QUERIES   3
#define KEYS      4
#define D_VECTORS 4
#define D_LANES   8

#include "kernels/cpu/attention_tile.h"

/* [BLOCK, d] */
SP_INLINE float *place_key(const attention_tile *tile, int32_t token, int32_t i)
{
    return tile->keys + token * tile->d + i;
}

SP_INLINE void score(int queries, const float *q, const float *keys, int32_t d, float *out_scores)
{
    __m256 acc[QUERIES][KEYS];

    SP_UNROLL
    for (int r = 0; r < queries; r++) {
        SP_UNROLL
        for (int c = 0; c < KEYS; c++)
            acc[r][c] = _mm256_setzero_ps();
    }
    for (int32_t i = 0; i < d; i += 8) {
        __m256 v[QUERIES];

        SP_UNROLL
        for (int r = 0; r < queries; r++)
            v[r] = _mm256_loadu_ps(q + r * d + i);
        SP_UNROLL
        for (int c = 0; c < KEYS; c++) {
            __m256 key = _mm256_loadu_ps(keys + c * d + i);

            SP_UNROLL
            for (int r = 0; r < queries; r++)
                acc[r][c] = _mm256_fmadd_ps(key, v[r], acc[r][c]);
        }
    }
    SP_UNROLL
    for (int r = 0; r < queries; r++)
        _mm_storeu_ps(out_scores + r * BLOCK,
                      sp_v8_reduce4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]));
}

/* The largest lane; NaNs are skipped, their weights are NaN anyway. */
SP_INLINE float largest_lane(__m256 v)
{
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));

    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

static void softmax_step(attention_tile *tile, int32_t query, int32_t count, float scale)
{
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    float *weights = tile->weights + query * BLOCK;
    __m256 scores[BLOCK / 8], largest = _mm256_set1_ps(tile->largest[query]);
    __m256 total = _mm256_setzero_ps();
    float maximum;

    SP_UNROLL
    for (int s = 0; s < BLOCK / 8; s++) {
        __m256i inside = _mm256_cmpgt_epi32(_mm256_set1_epi32(count - 8 * s), lane);

        scores[s] = _mm256_mul_ps(_mm256_loadu_ps(weights + 8 * s), _mm256_set1_ps(scale));
        scores[s] =
            _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), scores[s], _mm256_castsi256_ps(inside));
        largest = _mm256_max_ps(scores[s], largest);
    }
    maximum = largest_lane(largest);
    SP_UNROLL
    for (int s = 0; s < BLOCK / 8; s++) {
        scores[s] = sp_v8_exp(_mm256_sub_ps(scores[s], _mm256_set1_ps(maximum)));
        total = _mm256_add_ps(total, scores[s]);
        _mm256_storeu_ps(weights + 8 * s, scores[s]);
    }
    tile->rescale[query] =
        _mm256_cvtss_f32(sp_v8_exp(_mm256_set1_ps(tile->largest[query] - maximum)));
    tile->total[query] = tile->total[query] * tile->rescale[query] + sp_v8_reduce(total);
    tile->largest[query] = maximum;
}

SP_INLINE void weighted_sum(int queries, int vectors, const attention_tile *tile, int32_t query,
                            int32_t i, int32_t count)
{
    __m256 acc[QUERIES][D_VECTORS];
    float *sum = tile->sum + query * tile->d + i;

    SP_UNROLL
    for (int r = 0; r < queries; r++) {
        __m256 rescale = _mm256_set1_ps(tile->rescale[query + r]);

        SP_UNROLL
        for (int c = 0; c < vectors; c++)
            acc[r][c] = _mm256_mul_ps(_mm256_loadu_ps(sum + r * tile->d + 8 * c), rescale);
    }
    for (int32_t t = 0; t < count; t++) {
        const float *value = tile->values + t * tile->d + i;
        const float *weight = tile->weights + query * BLOCK + t;
        __m256 w[QUERIES];

        SP_UNROLL
        for (int r = 0; r < queries; r++)
            w[r] = _mm256_set1_ps(weight[r * BLOCK]);
        SP_UNROLL
        for (int c = 0; c < vectors; c++) {
            __m256 v = _mm256_loadu_ps(value + 8 * c);

            SP_UNROLL
            for (int r = 0; r < queries; r++)
                acc[r][c] = _mm256_fmadd_ps(w[r], v, acc[r][c]);
        }
    }
    SP_UNROLL
    for (int r = 0; r < queries; r++) {
        SP_UNROLL
        for (int c = 0; c < vectors; c++)
            _mm256_storeu_ps(sum + r * tile->d + 8 * c, acc[r][c]);
    }
}

void sp_kernels_fill_attention_avx2(sp_kernels *kernels)
{
    kernels->attention = attention;
    kernels->attention_scratch_floats = attention_scratch_floats;
}
