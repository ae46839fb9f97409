/*
 * attention_tile.h: causal attention over a paged cache, for any vector width. A level's file
 * defines the sizes below, includes this, once, and defines the four functions declared here.
 *
 * For every query (row, head): blocks of 32 keys in order from position 0; in each block the
 * scores, the new maximum, the weights exp(score - maximum), and then sum and total rescaled and
 * added to. A query reads exactly the keys up to its own position, so neither later rows of a
 * prefill nor the unused part of a page can affect it.
 *
 * Keys and values of a block are widened once, in pair order, and shared by a tile of queries:
 * all heads of the group and as many rows as the tile holds.
 *
 * Every level has the same bits: a score is eight lanes along head_dim and the tree of
 * sp_v8_reduce4, a total is eight lanes along the block's keys and the same tree; wider vectors
 * only hold more of them.
 *
 * To be defined:
 *   QUERIES     queries whose sums stay in registers
 *   KEYS        keys that they are multiplied by at a time, a divisor of the block
 *   D_VECTORS   vectors of the weighted sum that stay in registers
 *   D_LANES     FP32 values in such a vector
 *
 * Without them this file is empty.
 */
#include "kernels/cpu/levels.h"

#if defined(QUERIES) && !defined(SP_KERNELS_CPU_ATTENTION_TILE_H)
#define SP_KERNELS_CPU_ATTENTION_TILE_H

#include "kernels/cpu/vector_avx2.h"

#include <math.h>

#define BLOCK        SP_ATTENTION_BLOCK
#define TILE_QUERIES 64 /* or one row, where the group is larger */
#define D_STEP       16

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
    float *keys;                      /* BLOCK × d, pair order, see place_key */
    float *values;                    /* [BLOCK, d], pair order */
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

/* Where eight values of key `token` of the block, from its element i on, are stored. */
SP_INLINE float *place_key(const attention_tile *tile, int32_t token, int32_t i);

/* Scores of `queries` (at most QUERIES) queries with KEYS keys; scaled later. */
SP_INLINE void score(int queries, const float *q, const float *keys, int32_t d, float *out_scores);

/* Replaces one query's first `count` scores by weights; the rest of the block become 0. */
static void softmax_step(attention_tile *tile, int32_t query, int32_t count, float scale);

/* sum = sum * rescale + Σ weight[t] value[t] over `vectors` vectors of d. */
SP_INLINE void weighted_sum(int queries, int vectors, const attention_tile *tile, int32_t query,
                            int32_t i, int32_t count);

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

SP_INLINE void widen_key(const attention_tile *tile, int32_t token, sp_dtype type, const void *from,
                         int32_t n)
{
    for (int32_t i = 0; i < n; i += D_STEP) {
        const void *at = sp_element_at(type, from, i);
        sp_v16 v = n - i >= D_STEP ? sp_v16_load(type, at) : sp_v16_load_tail(type, at, n - i);

        _mm256_storeu_ps(place_key(tile, token, i), v.first);
        _mm256_storeu_ps(place_key(tile, token, i + 8), v.second);
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

        widen_key(tile, t, type, sp_element_at(type, args->k_cache, at), args->head_dim);
        widen(tile->values + t * tile->d, type, sp_element_at(type, args->v_cache, at),
              args->head_dim);
    }
}

/* Scores of all queries of the tile with the first `count` keys; up to KEYS - 1 more may be
 * written. */
static void score_tile(attention_tile *tile, int32_t queries, int32_t count)
{
    for (int32_t i = 0; i < queries; i += QUERIES) {
        const float *q = tile->q + i * tile->d;
        float *scores = tile->weights + i * BLOCK;

        for (int32_t t = 0; t < count; t += KEYS) {
            const float *keys = tile->keys + t * tile->d;

            if (queries - i >= QUERIES)
                score(QUERIES, q, keys, tile->d, scores + t);
            else if (queries - i == 3)
                score(3, q, keys, tile->d, scores + t);
            else if (queries - i == 2)
                score(2, q, keys, tile->d, scores + t);
            else
                score(1, q, keys, tile->d, scores + t);
        }
    }
}

/* Queries [query, query + n), n <= QUERIES, that all see `count` keys of the block. */
static void add_values(const attention_tile *tile, int32_t query, int32_t n, int32_t count)
{
    int32_t i = 0;

    for (; i + D_LANES * D_VECTORS <= tile->d; i += D_LANES * D_VECTORS) {
        if (n == QUERIES)
            weighted_sum(QUERIES, D_VECTORS, tile, query, i, count);
        else if (n == 3)
            weighted_sum(3, D_VECTORS, tile, query, i, count);
        else if (n == 2)
            weighted_sum(2, D_VECTORS, tile, query, i, count);
        else
            weighted_sum(1, D_VECTORS, tile, query, i, count);
    }
    for (; i < tile->d; i += D_STEP)
        for (int32_t r = 0; r < n; r++)
            weighted_sum(1, D_STEP / D_LANES, tile, query + r, i, count);
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
    int32_t first = 0; /* rows whose position is before the block see none of it */

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

#endif
