/*
 * attention_avx2.c: causal attention over a paged cache with AVX2 and FMA.
 *
 * For every query (row, head): blocks of 32 keys in order from position 0; in each block the
 * scores, the new maximum, the weights exp(score - maximum), and then sum and total rescaled and
 * added to. A query takes exactly the keys up to its own position, so neither later rows of a
 * prefill nor what an unfinished page holds can reach it.
 *
 * Keys and values of a block are widened once, in pair order, and shared by a tile of queries:
 * all heads of the group and as many rows as the tile holds. Scores: lanes along head_dim, three
 * queries × four keys in registers. Values: lanes along head_dim, one broadcast weight a step.
 */
#include "kernels/levels.h"
#include "kernels/vector_avx2.h"

#include <math.h>

#define BLOCK        SP_ATTENTION_BLOCK
#define TILE_QUERIES 48 /* or one row, where the group is larger */
#define QUERIES      3  /* × KEYS sums in registers */
#define KEYS         4
#define D_STEP       16
#define D_VECTORS    4 /* of the weighted sum that stay in registers */

static int32_t padded(int32_t head_dim)
{
    return (head_dim + D_STEP - 1) / D_STEP * D_STEP;
}

static int32_t min32(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

static int32_t tile_rows(int32_t group)
{
    return group < TILE_QUERIES ? TILE_QUERIES / group : 1;
}

/* The scratch of one thread; d = padded head_dim. */
typedef struct attention_tile {
    int32_t d, group;
    float *keys, *values;             /* [BLOCK, d], pair order */
    float *q, *sum;                   /* [queries, d], pair order */
    float *weights;                   /* [queries, BLOCK] */
    float *largest, *total, *rescale; /* [queries] */
} attention_tile;

static size_t attention_scratch_floats(int32_t group, int32_t head_dim)
{
    size_t queries = (size_t)(group * tile_rows(group)), d = (size_t)padded(head_dim);

    return 2 * BLOCK * d + queries * (2 * d + BLOCK + 3);
}

static attention_tile tile_in_scratch(const sp_attention_args *args)
{
    attention_tile tile = {.d = padded(args->head_dim), .group = args->group};
    int64_t queries = (int64_t)args->group * tile_rows(args->group);

    tile.keys = args->scratch;
    tile.values = tile.keys + BLOCK * tile.d;
    tile.q = tile.values + BLOCK * tile.d;
    tile.sum = tile.q + queries * tile.d;
    tile.weights = tile.sum + queries * tile.d;
    tile.largest = tile.weights + queries * BLOCK;
    tile.total = tile.largest + queries;
    tile.rescale = tile.total + queries;
    return tile;
}

/* n elements as FP32 in the pair order of `type`, zeroes up to a multiple of 16. */
SP_INLINE void widen(float *to, sp_dtype type, const void *from, int32_t n)
{
    int32_t i = 0;

    for (; i + D_STEP <= n; i += D_STEP) {
        sp_v16 v = sp_v16_load(type, sp_element_at(type, from, i));

        _mm256_storeu_ps(to + i, v.first);
        _mm256_storeu_ps(to + i + 8, v.second);
    }
    if (i < n) {
        sp_v16 v = sp_v16_load_tail(type, sp_element_at(type, from, i), n - i);

        _mm256_storeu_ps(to + i, v.first);
        _mm256_storeu_ps(to + i + 8, v.second);
    }
}

/* The block's keys and values [begin, begin + count), page by page. */
SP_INLINE void widen_block(const sp_attention_args *args, sp_dtype type, attention_tile *tile,
                           int32_t begin, int32_t count)
{
    for (int32_t t = 0; t < count; t++) {
        int32_t token = begin + t;
        int64_t page = args->pages[token / args->page_tokens];
        int64_t slot = (page * args->kv_heads + args->kv_head) * args->page_tokens;
        int64_t at = (slot + token % args->page_tokens) * args->head_dim;

        widen(tile->keys + t * tile->d, type, sp_element_at(type, args->k_cache, at),
              args->head_dim);
        widen(tile->values + t * tile->d, type, sp_element_at(type, args->v_cache, at),
              args->head_dim);
    }
}

/* Scores of `queries` queries with KEYS keys; scaled later. */
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

/* Scores of all queries of the tile with the first `count` keys; up to 3 more may be written. */
static void score_tile(attention_tile *tile, int32_t queries, int32_t count)
{
    for (int32_t i = 0; i < queries; i += QUERIES) {
        const float *q = tile->q + i * tile->d;
        float *scores = tile->weights + i * BLOCK;

        for (int32_t t = 0; t < count; t += KEYS) {
            const float *keys = tile->keys + t * tile->d;

            if (queries - i >= QUERIES)
                score(QUERIES, q, keys, tile->d, scores + t);
            else if (queries - i == 2)
                score(2, q, keys, tile->d, scores + t);
            else
                score(1, q, keys, tile->d, scores + t);
        }
    }
}

/* The largest lane; a NaN is passed over, its weight is one anyway. */
SP_INLINE float largest_lane(__m256 v)
{
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));

    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

/* Turns one query's `count` scores into weights; those behind them become 0. */
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

/* sum = sum * rescale + Σ weight[t] value[t] over `vectors` vectors of d. */
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

/* Queries [query, query + n), n <= QUERIES, that all see `count` keys of the block. */
static void add_values(const attention_tile *tile, int32_t query, int32_t n, int32_t count)
{
    int32_t i = 0;

    for (; i + 8 * D_VECTORS <= tile->d; i += 8 * D_VECTORS) {
        if (n == QUERIES)
            weighted_sum(QUERIES, D_VECTORS, tile, query, i, count);
        else if (n == 2)
            weighted_sum(2, D_VECTORS, tile, query, i, count);
        else
            weighted_sum(1, D_VECTORS, tile, query, i, count);
    }
    for (; i < tile->d; i += D_STEP)
        for (int32_t r = 0; r < n; r++)
            weighted_sum(1, 2, tile, query + r, i, count);
}

/* Keys of the block at `begin` that the tile's query sees; first_row is the tile's. */
static int32_t keys_seen(const sp_attention_args *args, int32_t first_row, int32_t query,
                         int32_t begin)
{
    int32_t position = args->first_position + first_row + query / args->group;

    return position < begin ? 0 : min32(position - begin + 1, BLOCK);
}

static void add_block(const sp_attention_args *args, attention_tile *tile, int32_t first_row,
                      int32_t queries, int32_t begin)
{
    int32_t first = 0; /* rows before this query lie wholly before the block */

    while (keys_seen(args, first_row, first, begin) == 0)
        first++;
    for (int32_t query = first; query < queries; query++)
        softmax_step(tile, query, keys_seen(args, first_row, query, begin), args->scale);
    for (int32_t query = first; query < queries;) {
        int32_t count = keys_seen(args, first_row, query, begin), n = 1;

        while (n < QUERIES && query + n < queries &&
               keys_seen(args, first_row, query + n, begin) == count)
            n++;
        add_values(tile, query, n, count);
        query += n;
    }
}

SP_INLINE void start_tile(const sp_attention_args *args, sp_dtype type, attention_tile *tile,
                          int32_t first_row, int32_t queries)
{
    for (int32_t query = 0; query < queries; query++) {
        int64_t at = (first_row + query / args->group) * args->q_stride +
                     (int64_t)(query % args->group) * args->head_dim;

        widen(tile->q + query * tile->d, type, sp_element_at(type, args->q, at), args->head_dim);
        memset(tile->sum + query * tile->d, 0, (size_t)tile->d * sizeof(float));
        tile->largest[query] = -INFINITY;
        tile->total[query] = 0.0f;
    }
}

SP_INLINE void finish_tile(const sp_attention_args *args, sp_dtype type, const attention_tile *tile,
                           int32_t first_row, int32_t queries)
{
    for (int32_t query = 0; query < queries; query++) {
        const __m256 total = _mm256_set1_ps(tile->total[query]);
        const float *sum = tile->sum + query * tile->d;
        int64_t at = (first_row + query / args->group) * args->out_stride +
                     (int64_t)(query % args->group) * args->head_dim;

        for (int32_t i = 0; i < args->head_dim; i += D_STEP) {
            sp_v16 v = {_mm256_div_ps(_mm256_loadu_ps(sum + i), total),
                        _mm256_div_ps(_mm256_loadu_ps(sum + i + 8), total)};
            int32_t left = args->head_dim - i;
            __m256 low, high;

            sp_v16_restore(type, v, &low, &high);
            if (left >= D_STEP) {
                sp_v8_store(type, args->out, at + i, low);
                sp_v8_store(type, args->out, at + i + 8, high);
            } else {
                sp_v8_store_tail(type, args->out, at + i, min32(left, 8), low);
                if (left > 8)
                    sp_v8_store_tail(type, args->out, at + i + 8, left - 8, high);
            }
        }
    }
}

SP_INLINE void attention_typed(const sp_attention_args *args, sp_dtype type)
{
    attention_tile tile = tile_in_scratch(args);
    int32_t rows_per_tile = tile_rows(args->group);

    for (int32_t row = 0; row < args->n_rows; row += rows_per_tile) {
        int32_t rows = min32(rows_per_tile, args->n_rows - row), queries = rows * args->group;
        int32_t keys = args->first_position + row + rows; /* that the last row sees */

        start_tile(args, type, &tile, row, queries);
        for (int32_t begin = 0; begin < keys; begin += BLOCK) {
            int32_t count = min32(keys - begin, BLOCK);

            widen_block(args, type, &tile, begin, count);
            score_tile(&tile, queries, count);
            add_block(args, &tile, row, queries, begin);
        }
        finish_tile(args, type, &tile, row, queries);
    }
}

static void attention(const sp_attention_args *args)
{
    if (args->type == SP_DTYPE_BF16)
        attention_typed(args, SP_DTYPE_BF16);
    else
        attention_typed(args, SP_DTYPE_F32);
}

void sp_kernels_fill_attention_avx2(sp_kernels *kernels)
{
    kernels->attention = attention;
    kernels->attention_scratch_floats = attention_scratch_floats;
}
