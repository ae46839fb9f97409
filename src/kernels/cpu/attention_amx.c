/*
 * attention_amx.c: causal attention over a paged BF16 cache on AMX tiles; FP32
 * keeps the form of the level below.
 *
 * Queries fill the columns of a tile, 16 of them: all heads of a group and as
 * many rows as the scratch holds. Scores are K · Qᵀ, outputs Vᵀ · Pᵀ, so a
 * query is a lane of every vector between the two products: maxima, totals and
 * rescaling need no sum across lanes, and a pair of weights is in the order in
 * which the second product reads it. Up to 16 queries in all, as in decode, are
 * the rows of a tile in the second product; up to VECTOR_QUERIES, sums have the
 * same order in vectors without tiles (attention_few_avx512.h).
 *
 * Order of one query: spans of 128 keys from absolute position 0. In a span the
 * scores, 32 elements of head_dim a step (see tile_dot); the new maximum; the
 * weights 2^(score - maximum), each as a BF16 cut off from it and a BF16 of the
 * rest; their total, even and odd keys in a chain each; then 32 keys a step the
 * first halves' product and that of the second halves, added to the rescaled
 * sum. Keys after the query's own have the weight +0, which changes no sum but
 * in the sign of a zero, and that is lost in a last addition of +0. Subnormals
 * count as zero throughout, in vectors as in tiles.
 *
 * A product with 0 is no longer zero where a value is not finite. So rows share
 * a tile only if the values that some of them see and others do not are finite.
 * A weight is multiplied as two BF16 parts: where the second is 0, as that of the
 * largest weight, 1, is, a value of +-inf gives NaN. The level below gives +-inf.
 */
#include "kernels/cpu/levels.h"
#include "kernels/cpu/tiles_amx.h"

#include <math.h>
#include <stdalign.h>
#include <stdbool.h>

#ifndef PACK_TILES
#define PACK_TILES sp_pack_tiles_avx512
#endif
#ifndef SPAN
#define SPAN 128 /* keys between two maxima */
#endif
#define STEP         32   /* elements of head_dim, or keys, of one product */
#define QUERIES      16   /* of a tile */
#define TILE         1024 /* bytes */
#define BLOCKS       (SPAN / STEP)
#define TILE_QUERIES 128 /* that share keys and values in tile order; or one row's */
#define HALVES       2   /* of a weight */
#define LOG2_E       0x1.715476p0f
#define FETCHES      4 /* positions prefetched at a time where there is one group of queries */
#ifndef VECTOR_QUERIES
#define VECTOR_QUERIES 4 /* of a KV head; with 5 most cases are faster on tiles */
#endif

#include "kernels/cpu/attention_few_avx512.h"

_Static_assert(SPAN % SP_ATTENTION_BLOCK == 0, "spans end where blocks of other levels end");
_Static_assert(VECTOR_QUERIES <= FEW_QUERIES, "their scratch is that of one group of queries");

static const sp_kernels *below;                 /* for the other types */
static int32_t vector_queries = VECTOR_QUERIES; /* tests set it, to compare both forms */

static int32_t round_up(int32_t n, int32_t step)
{
    return (n + step - 1) / step * step;
}

/* Whether so many queries of a tile are computed without tiles. */
static bool in_vectors(int32_t queries)
{
    return queries <= vector_queries;
}

static int32_t rows_at_once(int32_t group)
{
    return group < TILE_QUERIES ? TILE_QUERIES / group : 1;
}

/* ---- scratch --------------------------------------------------------------------------------- */

/* The scratch of one thread; d = head_dim rounded up to STEP. All parts are
 * whole cache lines. */
typedef struct attention_tiles {
    int32_t d, groups;      /* groups of QUERIES */
    uint16_t *keys;         /* [BLOCKS][d / STEP][STEP keys][STEP] */
    uint16_t *values;       /* [BLOCKS][d][STEP keys] */
    uint16_t *lines;        /* [STEP, d], rows whose length is no multiple of STEP */
    uint16_t *zeros;        /* [d] */
    uint16_t *q;            /* [groups][d / STEP][STEP / 2][QUERIES][2] */
    uint32_t *weights;      /* [4 groups][BLOCKS][HALVES][STEP / 2][QUERIES], pairs of
                               BF16 */
    float *scores;          /* [4 groups][SPAN][QUERIES] */
    float *sums;            /* [groups][d][QUERIES] */
    float *largest, *total; /* [groups][QUERIES] */
    int32_t *position;      /* [groups][QUERIES] */
} attention_tiles;

/* Sets the parts of `tiles` from address `at` on, and returns where they end.
 */
static uintptr_t place_parts(attention_tiles *tiles, uintptr_t at, int32_t queries,
                             int32_t head_dim)
{
    size_t d = (size_t)round_up(head_dim, STEP);
    size_t groups = (size_t)round_up(queries, QUERIES) / QUERIES, lanes = groups * QUERIES;

    tiles->d = (int32_t)d;
    tiles->groups = (int32_t)groups;
    tiles->keys = (uint16_t *)at;
    tiles->values = (uint16_t *)(at += SPAN * d * sizeof(uint16_t));
    tiles->lines = (uint16_t *)(at += SPAN * d * sizeof(uint16_t));
    tiles->zeros = (uint16_t *)(at += STEP * d * sizeof(uint16_t));
    tiles->q = (uint16_t *)(at += d * sizeof(uint16_t));
    tiles->weights = (uint32_t *)(at += lanes * d * sizeof(uint16_t));
    tiles->scores = (float *)(at += 4 * BLOCKS * HALVES * TILE);
    tiles->sums = (float *)(at += 4 * SPAN * QUERIES * sizeof(float));
    tiles->largest = (float *)(at += lanes * d * sizeof(float));
    tiles->total = (float *)(at += lanes * sizeof(float));
    tiles->position = (int32_t *)(at += lanes * sizeof(float));
    return at + lanes * sizeof(int32_t);
}

static size_t attention_scratch_floats(int32_t group, int32_t head_dim)
{
    attention_tiles tiles;
    size_t bytes = place_parts(&tiles, 0, group * rows_at_once(group), head_dim);
    size_t floats = (bytes + TILE_BYTES) / sizeof(float); /* its start is rounded up */
    size_t other = below->attention_scratch_floats(group, head_dim);

    return floats > other ? floats : other;
}

static attention_tiles tiles_in_scratch(const sp_attention_args *args, int32_t queries)
{
    attention_tiles tiles;
    uintptr_t at = ((uintptr_t)args->scratch + TILE_BYTES - 1) / TILE_BYTES * TILE_BYTES;

    (void)place_parts(&tiles, at, queries, args->head_dim);
    return tiles;
}

/* ---- keys, values and queries in tile order -------------------------------------------------- */

/* Offset of position `token` in k_cache and v_cache, in elements. */
static int64_t cache_offset(const sp_attention_args *args, int32_t token)
{
    int64_t page = args->pages[token / args->page_tokens];
    int64_t slot = (page * args->kv_heads + args->kv_head) * args->page_tokens;

    return (slot + token % args->page_tokens) * args->head_dim;
}

/* `row` itself where its length is d, else a copy with zeros after it in line
 * `i`. */
static const uint16_t *full_line(const attention_tiles *tiles, const uint16_t *row,
                                 int32_t head_dim, int32_t i)
{
    uint16_t *line = tiles->lines + i * tiles->d;

    if (head_dim == tiles->d)
        return row;
    memcpy(line, row, (size_t)head_dim * sizeof *line);
    memset(line + head_dim, 0, (size_t)(tiles->d - head_dim) * sizeof *line);
    return line;
}

/* Where the positions [begin, begin + count) are in k_cache and v_cache, page
 * by page. */
static void find_span(const sp_attention_args *args, int32_t begin, int32_t count,
                      int64_t *out_offsets)
{
    for (int32_t t = 0; t < count;) {
        int32_t left = args->page_tokens - (begin + t) % args->page_tokens;
        int32_t end = min32(count, t + left);
        int64_t at = cache_offset(args, begin + t);

        for (; t < end; t++, at += args->head_dim)
            out_offsets[t] = at;
    }
}

/* The lines of `count` positions of a cache; zeros up to STEP. */
static void find_lines(const attention_tiles *tiles, const uint16_t *cache, const int64_t *offsets,
                       int32_t head_dim, int32_t count, const uint16_t **lines)
{
    for (int32_t t = 0; t < count; t++)
        lines[t] = full_line(tiles, cache + offsets[t], head_dim, t);
    for (int32_t t = count; t < STEP; t++)
        lines[t] = tiles->zeros;
}

static void copy_keys(const attention_tiles *tiles, const uint16_t *const *lines, uint16_t *to)
{
    for (int32_t t = 0; t < STEP; t++)
        for (int32_t i = 0; i < tiles->d; i += STEP)
            _mm512_store_si512((void *)(to + i * STEP + t * STEP),
                               _mm512_loadu_si512((const void *)(lines[t] + i)));
}

/* Eight elements of keys i, 8 + i, 16 + i and 24 + i. */
SP_INLINE __m512i load_four(const uint16_t *const *lines, int i, int32_t at)
{
    __m512i four = _mm512_castsi128_si512(_mm_loadu_si128((const void *)(lines[i] + at)));

    four = _mm512_inserti32x4(four, _mm_loadu_si128((const void *)(lines[8 + i] + at)), 1);
    four = _mm512_inserti32x4(four, _mm_loadu_si128((const void *)(lines[16 + i] + at)), 2);
    return _mm512_inserti32x4(four, _mm_loadu_si128((const void *)(lines[24 + i] + at)), 3);
}

/* Eight elements of all keys, transposed: [8][STEP keys]. */
SP_INLINE void transpose_eight(const uint16_t *const *lines, int32_t at, uint16_t *to)
{
    __m512i a[8], b[8];

    SP_UNROLL
    for (int i = 0; i < 8; i++)
        a[i] = load_four(lines, i, at);
    SP_UNROLL
    for (int i = 0; i < 8; i += 2) { /* pairs of keys: elements 0 to 3, 4 to 7 */
        b[i] = _mm512_unpacklo_epi16(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi16(a[i], a[i + 1]);
    }
    SP_UNROLL
    for (int i = 0; i < 8; i += 4) { /* four keys: elements 0 and 1, 2 and 3, 4 and 5, 6 and 7 */
        a[i] = _mm512_unpacklo_epi32(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi32(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi32(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi32(b[i + 1], b[i + 3]);
    }
    SP_UNROLL
    for (int i = 0; i < 4; i++) {
        _mm512_store_si512((void *)(to + 2 * i * STEP), _mm512_unpacklo_epi64(a[i], a[i + 4]));
        _mm512_store_si512((void *)(to + (2 * i + 1) * STEP),
                           _mm512_unpackhi_epi64(a[i], a[i + 4]));
    }
}

/* The values of 32 keys in pairs, for few queries: [d / STEP][2][16 pairs][16
 * elements][2]. Of each eight elements the first tile has the first four, the
 * second one the others. */
static void pair_values(const attention_tiles *tiles, const uint16_t *const *lines, uint16_t *to)
{
    for (int32_t i = 0; i < tiles->d; i += STEP)
        for (int32_t pair = 0; pair < STEP / 2; pair++) {
            __m512i even = _mm512_loadu_si512((const void *)(lines[2 * pair] + i));
            __m512i odd = _mm512_loadu_si512((const void *)(lines[2 * pair + 1] + i));
            uint16_t *at = to + i * STEP + pair * STEP;

            _mm512_store_si512((void *)at, _mm512_unpacklo_epi16(even, odd));
            _mm512_store_si512((void *)(at + TILE / 2), _mm512_unpackhi_epi16(even, odd));
        }
}

/* Keys and values of `count` positions, at most SPAN. */
static void load_span(const sp_attention_args *args, const attention_tiles *tiles,
                      const int64_t *offsets, int32_t count)
{
    const uint16_t *lines[STEP];

    for (int32_t t = 0; t < count; t += STEP) {
        int32_t n = min32(count - t, STEP);
        uint16_t *values = tiles->values + t * tiles->d;

        find_lines(tiles, args->k_cache, offsets + t, args->head_dim, n, lines);
        copy_keys(tiles, lines, tiles->keys + t * tiles->d);
        find_lines(tiles, args->v_cache, offsets + t, args->head_dim, n, lines);
        if (tiles->groups == 1)
            pair_values(tiles, lines, values);
        for (int32_t i = 0; tiles->groups > 1 && i < tiles->d; i += 8)
            transpose_eight(lines, i, values + i * STEP);
    }
}

static void load_queries(const sp_attention_args *args, const attention_tiles *tiles, int32_t row,
                         int32_t queries)
{
    const uint16_t *lines[QUERIES];

    for (int32_t first = 0; first < queries; first += QUERIES) {
        for (int32_t i = 0; i < QUERIES; i++) {
            int32_t query = first + i;
            int64_t at = (row + query / args->group) * args->q_stride +
                         (int64_t)(query % args->group) * args->head_dim;

            lines[i] = query < queries
                           ? full_line(tiles, (const uint16_t *)args->q + at, args->head_dim, i)
                           : tiles->zeros;
        }
        PACK_TILES(tiles->q + first * tiles->d, lines, 0, tiles->d / STEP);
    }
}

/* ---- products -------------------------------------------------------------------------------- */

/*
 * A product of one pair of groups, run step by step between the vectors of
 * another pair's softmax: tiles and vectors are units apart. A step is two
 * tiles of keys or values times the queries of the pair, whose sums stay in
 * tiles until its last step.
 */
typedef struct tile_product {
    bool values;            /* weights · values, or scores */
    bool two;               /* groups */
    int32_t group, blocks;  /* the first group of the pair */
    int32_t outer, inner;   /* the step that is next */
    int32_t outers, inners; /* blocks and STEPs of d; STEPs of d and halves of blocks */
} tile_product;

static float *scores_of(const attention_tiles *tiles, int32_t group)
{
    return tiles->scores + group % 4 * SPAN * QUERIES;
}

static uint32_t *weights_of(const attention_tiles *tiles, int32_t group)
{
    return tiles->weights + group % 4 * BLOCKS * HALVES * (TILE / 4);
}

SP_INLINE void score_step(const attention_tiles *tiles, const tile_product *p)
{
    const char *q = (const char *)(tiles->q + p->group * QUERIES * tiles->d) + p->inner * TILE;
    const char *keys =
        (const char *)(tiles->keys + p->outer * STEP * tiles->d) + p->inner * 2 * TILE;

    if (p->inner == 0) {
        tile_zero(0);
        tile_zero(1);
        tile_zero(2);
        tile_zero(3);
    }
    tile_load(4, keys, TILE_BYTES);
    tile_load(6, q, TILE_BYTES);
    tile_load(5, keys + TILE, TILE_BYTES);
    tile_dot(0, 4, 6);
    tile_dot(1, 5, 6);
    if (p->two) {
        tile_load(7, q + (int64_t)tiles->d * QUERIES * 2, TILE_BYTES);
        tile_dot(2, 4, 7);
        tile_dot(3, 5, 7);
    }
    if (p->inner + 1 == p->inners) {
        float *scores = scores_of(tiles, p->group) + p->outer * STEP * QUERIES;

        tile_store(0, scores, TILE_BYTES);
        tile_store(1, scores + QUERIES * QUERIES, TILE_BYTES);
        if (p->two) {
            scores = scores_of(tiles, p->group + 1) + p->outer * STEP * QUERIES;
            tile_store(2, scores, TILE_BYTES);
            tile_store(3, scores + QUERIES * QUERIES, TILE_BYTES);
        }
    }
}

SP_INLINE void value_step(const attention_tiles *tiles, const tile_product *p)
{
    const char *weights = (const char *)weights_of(tiles, p->group) + p->inner * TILE;
    const char *values =
        (const char *)(tiles->values + (p->inner / HALVES * tiles->d + p->outer * STEP) * STEP);
    float *sums0 = tiles->sums + (p->group * tiles->d + p->outer * STEP) * QUERIES;
    float *sums1 = sums0 + tiles->d * QUERIES;

    if (p->inner == 0) {
        tile_load(0, sums0, TILE_BYTES);
        tile_load(1, sums0 + QUERIES * QUERIES, TILE_BYTES);
        if (p->two) {
            tile_load(2, sums1, TILE_BYTES);
            tile_load(3, sums1 + QUERIES * QUERIES, TILE_BYTES);
        }
    }
    if (p->inner % HALVES == 0) {
        tile_load(4, values, TILE_BYTES);
        tile_load(5, values + TILE, TILE_BYTES);
    }
    tile_load(6, weights, TILE_BYTES);
    tile_dot(0, 4, 6);
    tile_dot(1, 5, 6);
    if (p->two) {
        tile_load(7, weights + BLOCKS * HALVES * TILE, TILE_BYTES);
        tile_dot(2, 4, 7);
        tile_dot(3, 5, 7);
    }
    if (p->inner + 1 == p->inners) {
        tile_store(0, sums0, TILE_BYTES);
        tile_store(1, sums0 + QUERIES * QUERIES, TILE_BYTES);
        if (p->two) {
            tile_store(2, sums1, TILE_BYTES);
            tile_store(3, sums1 + QUERIES * QUERIES, TILE_BYTES);
        }
    }
}

/* Runs the next step; false: none was left. */
SP_INLINE bool run_step(const attention_tiles *tiles, tile_product *p)
{
    if (p->outer == p->outers)
        return false;
    if (p->values)
        value_step(tiles, p);
    else
        score_step(tiles, p);
    if (++p->inner == p->inners) {
        p->inner = 0;
        p->outer++;
    }
    return true;
}

/* What runs beside a softmax: the products of the pair before it, then those of
 * the next. */
typedef struct products_beside {
    const attention_tiles *tiles;
    tile_product before, after;
    span_fetch fetch;
} products_beside;

SP_INLINE void run_beside(products_beside *beside)
{
    fetch_some(&beside->fetch);
    if (!run_step(beside->tiles, &beside->before))
        (void)run_step(beside->tiles, &beside->after);
}

static void finish_product(const attention_tiles *tiles, tile_product *p)
{
    while (run_step(tiles, p))
        continue;
}

/* ---- softmax --------------------------------------------------------------------------------- */

/* Lanes that see key `token`. */
SP_INLINE __mmask16 lanes_seeing(bool all, __m512i position, int32_t token)
{
    return all ? 0xffff : _mm512_cmpge_epi32_mask(position, _mm512_set1_epi32(token));
}

/* The largest of `keys` scores of each lane; NaNs are skipped, their weights
 * are NaN anyway. */
SP_INLINE __m512 largest_score(bool all, const float *scores, int32_t keys, __m512i position,
                               int32_t begin)
{
    __m512 largest[4];

    SP_UNROLL
    for (int c = 0; c < 4; c++)
        largest[c] = _mm512_set1_ps(-INFINITY);
    for (int32_t t = 0; t < keys; t += 4) {
        SP_UNROLL
        for (int c = 0; c < 4; c++)
            largest[c] = _mm512_mask_max_ps(largest[c], lanes_seeing(all, position, begin + t + c),
                                            _mm512_load_ps(scores + (t + c) * QUERIES), largest[c]);
    }
    return _mm512_max_ps(_mm512_max_ps(largest[0], largest[1]),
                         _mm512_max_ps(largest[2], largest[3]));
}

/* Two FP32 vectors, of an even key and the next, as pairs of what their upper
 * halves hold. */
SP_INLINE __m512i pair_of(__m512 even, __m512 odd)
{
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);

    return _mm512_ternarylogic_epi32(_mm512_srli_epi32(_mm512_castps_si512(even), 16),
                                     _mm512_castps_si512(odd), upper, 0xf8); /* a | (b & c) */
}

/* Turns `keys` scores of each lane into weights and returns their totals;
 * exponents are score * scale - largest. */
SP_INLINE __m512 weigh(bool all, const float *scores, int32_t keys, __m512i position, int32_t begin,
                       __m512 scale, __m512 largest, uint32_t *weights, products_beside *beside)
{
    __m512 even_total = _mm512_setzero_ps(), odd_total = _mm512_setzero_ps();

    for (int32_t t = 0; t < keys; t += 2) {
        uint32_t *to = weights + (t / STEP * HALVES * STEP / 2 + t % STEP / 2) * QUERIES;
        __m512 even =
            exp2_16(_mm512_fmsub_ps(_mm512_load_ps(scores + t * QUERIES), scale, largest));
        __m512 odd =
            exp2_16(_mm512_fmsub_ps(_mm512_load_ps(scores + (t + 1) * QUERIES), scale, largest));

        if (!all) {
            even = _mm512_maskz_mov_ps(lanes_seeing(all, position, begin + t), even);
            odd = _mm512_maskz_mov_ps(lanes_seeing(all, position, begin + t + 1), odd);
        }
        even_total = _mm512_add_ps(even_total, even);
        odd_total = _mm512_add_ps(odd_total, odd);
        _mm512_store_si512((void *)to, pair_of(even, odd));
        if (HALVES == 2)
            _mm512_store_si512((void *)(to + TILE / sizeof *to),
                               pair_of(rest_of(even), rest_of(odd)));
        if (t % 4 == 0)
            run_beside(beside);
    }
    return _mm512_add_ps(even_total, odd_total);
}

static void rescale_sums(const attention_tiles *tiles, int32_t group, __m512 by)
{
    float *sums = tiles->sums + group * tiles->d * QUERIES;
    alignas(64) float factors[QUERIES];

    _mm512_store_ps(factors, by);
    for (int32_t i = 0; i < tiles->d; i++) /* lanes are queries; of few, elements: see few_values */
        _mm512_store_ps(sums + i * QUERIES,
                        _mm512_mul_ps(_mm512_load_ps(sums + i * QUERIES),
                                      tiles->groups > 1
                                          ? by
                                          : _mm512_set1_ps(factors[i * QUERIES / tiles->d])));
}

/* The scores of a group become weights; its sums are rescaled. */
SP_INLINE void softmax_typed(bool all, const attention_tiles *tiles, int32_t group, int32_t begin,
                             int32_t keys, float scale, products_beside *beside)
{
    const float *scores = scores_of(tiles, group);
    uint32_t *weights = weights_of(tiles, group);
    float *largest = tiles->largest + group * QUERIES, *total = tiles->total + group * QUERIES;
    const __m512i position = _mm512_load_si512((const void *)(tiles->position + group * QUERIES));
    const __m512 old = _mm512_load_ps(largest), by_scale = _mm512_set1_ps(scale);
    __m512 next, rescale, sum;

    next = _mm512_mul_ps(largest_score(all, scores, keys, position, begin), by_scale);
    next = _mm512_max_ps(next, old);
    rescale = exp2_16(_mm512_sub_ps(old, next));
    sum = weigh(all, scores, keys, position, begin, by_scale, next, weights, beside);
    _mm512_store_ps(total, _mm512_fmadd_ps(_mm512_load_ps(total), rescale, sum));
    _mm512_store_ps(largest, next);
    /* A product with 1 changes nothing. */
    if (_mm512_cmpneq_ps_mask(rescale, _mm512_set1_ps(1.0f)) != 0)
        rescale_sums(tiles, group, rescale);
}

static void softmax(const attention_tiles *tiles, int32_t group, int32_t begin, int32_t keys,
                    float scale, products_beside *beside)
{
    if (tiles->position[group * QUERIES] >= begin + keys - 1)
        softmax_typed(true, tiles, group, begin, keys, scale, beside);
    else
        softmax_typed(false, tiles, group, begin, keys, scale, beside);
}

/* The last group of the pair of `group`. */
static int32_t pair_end(const attention_tiles *tiles, int32_t group)
{
    return min32(group + 1, tiles->groups - 1);
}

/* Blocks of the span that some query of the pair sees. */
static int32_t blocks_seen(const attention_tiles *tiles, int32_t group, int32_t begin)
{
    int32_t last = tiles->position[pair_end(tiles, group) * QUERIES + QUERIES - 1];

    return last < begin ? 0 : (min32(last - begin + 1, SPAN) + STEP - 1) / STEP;
}

/* ---- few queries ----------------------------------------------------------------------------- */

/*
 * Up to QUERIES queries, as in decode of large groups: weights are the rows of a tile, as many
 * as there are queries, and values its columns, so that values need no
 * transpose and products take less time. The sums are [queries][d], in the
 * order of pair_values. A product's factors may be exchanged, so each sum has
 * the order of the other form.
 */

/* Tiles 0 and 1 are scores, 2 and 3 sums of values, 5 weights; 4, 6 and 7 have
 * all rows. */
static tile_config few_config(int32_t queries)
{
    tile_config config = tile_config_of(QUERIES);

    config.rows[2] = config.rows[3] = config.rows[5] = (uint8_t)queries;
    return config;
}

static void tile_few_scores(const attention_tiles *tiles, int32_t blocks)
{
    for (int32_t b = 0; b < blocks; b++) {
        const char *keys = (const char *)(tiles->keys + b * STEP * tiles->d);
        float *scores = scores_of(tiles, 0) + b * STEP * QUERIES;

        tile_zero(0);
        tile_zero(1);
        for (int32_t i = 0; i < tiles->d / STEP; i++) {
            tile_load(4, keys + i * 2 * TILE, TILE_BYTES);
            tile_load(6, (const char *)tiles->q + i * TILE, TILE_BYTES);
            tile_load(7, keys + (i * 2 + 1) * TILE, TILE_BYTES);
            tile_dot(0, 4, 6);
            tile_dot(1, 7, 6);
        }
        tile_store(0, scores, TILE_BYTES);
        tile_store(1, scores + QUERIES * QUERIES, TILE_BYTES);
    }
}

/* The weights of each block and half, transposed: [queries][16 pairs]. */
static void transpose_weights(const attention_tiles *tiles, int32_t queries, int32_t blocks)
{
    for (int32_t tile = 0; tile < blocks * HALVES; tile++) {
        const float *lines[STEP / 2];
        float *to = (float *)(void *)weights_of(tiles, 1) + tile * (TILE / 4);

        for (int32_t pair = 0; pair < STEP / 2; pair++)
            lines[pair] = (const float *)(const void *)weights_of(tiles, 0) + tile * (TILE / 4) +
                          pair * QUERIES;
        for (int32_t query = 0; query < queries; query += 4) {
            __m512 values[4];

            sp_transpose_16x4(lines, query, values);
            SP_UNROLL
            for (int c = 0; c < 4; c++)
                _mm512_store_ps(to + (query + c) * QUERIES, values[c]);
        }
    }
}

static void tile_few_values(const attention_tiles *tiles, int32_t blocks)
{
    const char *weights = (const char *)weights_of(tiles, 1);
    int64_t stride = (int64_t)tiles->d * (int64_t)sizeof(float);

    for (int32_t i = 0; i < tiles->d; i += STEP) {
        tile_load(2, tiles->sums + i, stride);
        tile_load(3, tiles->sums + i + QUERIES, stride);
        for (int32_t b = 0; b < blocks; b++) {
            const char *values = (const char *)(tiles->values + (b * tiles->d + i) * STEP);

            tile_load(6, values, TILE_BYTES);
            tile_load(7, values + TILE, TILE_BYTES);
            SP_UNROLL
            for (int h = 0; h < HALVES; h++) {
                tile_load(5, weights + (b * HALVES + h) * TILE, TILE_BYTES);
                tile_dot(2, 5, 6);
                tile_dot(3, 5, 7);
            }
        }
        tile_store(2, tiles->sums + i, stride);
        tile_store(3, tiles->sums + i + QUERIES, stride);
    }
}

static void tile_few_span(const attention_tiles *tiles, int32_t queries, int32_t begin, float scale,
                          const span_fetch *fetch)
{
    products_beside beside = {.tiles = tiles, .fetch = *fetch};
    int32_t blocks = blocks_seen(tiles, 0, begin);

    tile_few_scores(tiles, blocks);
    softmax(tiles, 0, begin, blocks * STEP, scale, &beside);
    transpose_weights(tiles, queries, blocks);
    tile_few_values(tiles, blocks);
}

/* ---- few queries in vectors ------------------------------------------------------------------ */

static attention_few start_few(const sp_attention_args *args, const attention_tiles *tiles,
                               int32_t row, int32_t queries)
{
    attention_few few = {.queries = queries,
                         .d = tiles->d,
                         .q = (float *)(void *)tiles->q,
                         .scores = tiles->scores,
                         .weights = (float *)(void *)tiles->weights,
                         .sums = tiles->sums,
                         .largest = tiles->largest,
                         .total = tiles->total,
                         .position = tiles->position};

    memset(few.q, 0, (size_t)(FEW_QUERIES * few.d) * sizeof(float));
    for (int32_t query = 0; query < queries; query++) {
        const uint16_t *from = (const uint16_t *)args->q +
                               (row + query / args->group) * args->q_stride +
                               (int64_t)(query % args->group) * args->head_dim;

        for (int32_t i = 0; i < args->head_dim; i++)
            few.q[query * few.d + i] = sp_bf16_to_f32(from[i]);
    }
    return few;
}

static void vector_span(const sp_attention_args *args, const attention_tiles *tiles,
                        const attention_few *few, const int64_t *offsets, int32_t begin,
                        int32_t count, span_fetch *fetch)
{
    const uint16_t *lines[STEP];

    for (int32_t t = 0; t < count; t += STEP) {
        int32_t n = min32(count - t, STEP);

        find_lines(tiles, args->k_cache, offsets + t, args->head_dim, n, lines);
        few_scores(few, lines, t, n, fetch);
    }
    few_softmax(few, begin, count, args->scale * LOG2_E);
    for (int32_t t = 0; t < count; t += STEP) {
        int32_t n = min32(count - t, STEP);

        find_lines(tiles, args->v_cache, offsets + t, args->head_dim, n, lines);
        few_values(few, lines, t, n, fetch);
    }
}

/* ---- one tile of rows ------------------------------------------------------------------------ */

static void start(const sp_attention_args *args, const attention_tiles *tiles, int32_t row,
                  int32_t queries)
{
    memset(tiles->zeros, 0, (size_t)tiles->d * sizeof *tiles->zeros);
    memset(tiles->sums, 0, (size_t)(tiles->groups * QUERIES * tiles->d) * sizeof(float));
    for (int32_t i = 0; i < tiles->groups * QUERIES; i++) {
        int32_t query = min32(i, queries - 1); /* what has no query sees what the last one does */

        tiles->largest[i] = -INFINITY;
        tiles->total[i] = 0.0f;
        tiles->position[i] = args->first_position + row + query / args->group;
    }
}

static void start_tiles(const sp_attention_args *args, const attention_tiles *tiles, int32_t row,
                        int32_t queries)
{
    tile_config config = tiles->groups == 1 ? few_config(queries) : tile_config_of(QUERIES);

    tile_configure(&config);
    load_queries(args, tiles, row, queries);
}

/* A product of the pair of groups at `group`; no steps where there is none. */
static tile_product product_of(const attention_tiles *tiles, int32_t group, int32_t begin,
                               bool values)
{
    tile_product p = {.values = values, .group = group};

    if (group < 0 || group >= tiles->groups)
        return p;
    p.two = pair_end(tiles, group) > group;
    p.blocks = blocks_seen(tiles, group, begin);
    p.outers = values ? tiles->d / STEP : p.blocks;
    p.inners = values ? p.blocks * HALVES : tiles->d / STEP;
    if (p.blocks == 0)
        p.outers = 0;
    return p;
}

/* The span at `begin`: while the weights of a pair of groups are computed, the
 * products of the pairs before and after it run. */
static void add_span(const attention_tiles *tiles, int32_t begin, float scale,
                     const span_fetch *fetch)
{
    products_beside beside = {tiles, {0}, product_of(tiles, 0, begin, false), *fetch};

    finish_product(tiles, &beside.after);
    for (int32_t group = 0; group < tiles->groups; group += 2) {
        int32_t keys = blocks_seen(tiles, group, begin) * STEP;

        beside.before = product_of(tiles, group - 2, begin, true);
        beside.after = product_of(tiles, group + 2, begin, false);
        for (int32_t g = group; keys > 0 && g <= pair_end(tiles, group); g++)
            softmax(tiles, g, begin, keys, scale, &beside);
        finish_product(tiles, &beside.before);
        finish_product(tiles, &beside.after);
    }
    beside.before = product_of(tiles, (tiles->groups - 1) / 2 * 2, begin, true);
    finish_product(tiles, &beside.before);
}

/* Sixteen elements of a query from `at` on. */
SP_INLINE void store_out(const sp_attention_args *args, int64_t at, __m512 value, int32_t left)
{
    __m256 low = _mm512_castps512_ps256(value), high = _mm512_extractf32x8_ps(value, 1);

    if (left >= QUERIES) {
        sp_v8_store(SP_DTYPE_BF16, args->out, at, low);
        sp_v8_store(SP_DTYPE_BF16, args->out, at + 8, high);
        return;
    }
    sp_v8_store_tail(SP_DTYPE_BF16, args->out, at, min32(left, 8), low);
    if (left > 8)
        sp_v8_store_tail(SP_DTYPE_BF16, args->out, at + 8, left - 8, high);
}

/* Sixteen elements from i on of all queries of a group, `n` of which are there.
 */
static void finish_sixteen(const sp_attention_args *args, float *sums, const float *total,
                           int32_t row, int32_t query, int32_t n, int32_t i)
{
    const float *lines[16];

    for (int32_t j = 0; j < 16; j++) {
        __m512 sum = _mm512_add_ps(_mm512_load_ps(sums + j * QUERIES), _mm512_setzero_ps());

        _mm512_store_ps(sums + j * QUERIES, _mm512_div_ps(sum, _mm512_load_ps(total)));
        lines[j] = sums + j * QUERIES;
    }
    for (int32_t four = 0; four < n; four += 4) {
        __m512 values[4];

        sp_transpose_16x4(lines, four, values);
        for (int32_t c = 0; c < min32(4, n - four); c++) {
            int32_t q = query + four + c;

            store_out(args,
                      (row + q / args->group) * args->out_stride +
                          (int64_t)(q % args->group) * args->head_dim + i,
                      values[c], args->head_dim - i);
        }
    }
}

/* Of few queries; the elements in their order again: that of pair_values or of few_values. */
static void finish_few(const sp_attention_args *args, const attention_tiles *tiles, int32_t row,
                       int32_t queries)
{
    const __m512i fours = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i ones = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i first = in_vectors(queries) ? ones : fours;
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));

    for (int32_t query = 0; query < queries; query++)
        for (int32_t i = 0; i < args->head_dim; i += STEP) {
            const __m512 total = _mm512_set1_ps(tiles->total[query]);
            const float *sums = tiles->sums + query * tiles->d + i;
            int64_t at = (row + query / args->group) * args->out_stride +
                         (int64_t)(query % args->group) * args->head_dim + i;
            __m512 v[2];

            for (int c = 0; c < 2; c++)
                v[c] = _mm512_div_ps(
                    _mm512_add_ps(_mm512_load_ps(sums + c * QUERIES), _mm512_setzero_ps()), total);
            store_out(args, at, _mm512_permutex2var_ps(v[0], first, v[1]), args->head_dim - i);
            if (args->head_dim - i > QUERIES)
                store_out(args, at + QUERIES, _mm512_permutex2var_ps(v[0], second, v[1]),
                          args->head_dim - i - QUERIES);
        }
}

static void finish(const sp_attention_args *args, const attention_tiles *tiles, int32_t row,
                   int32_t queries)
{
    if (tiles->groups == 1) {
        finish_few(args, tiles, row, queries);
        return;
    }
    for (int32_t query = 0; query < queries; query += QUERIES)
        for (int32_t i = 0; i < args->head_dim; i += 16)
            finish_sixteen(args, tiles->sums + query * tiles->d + i * QUERIES, tiles->total + query,
                           row, query, min32(QUERIES, queries - query), i);
}

/* Positions that one call of fetch_some prefetches: a span's calls prefetch about the next span. */
static int32_t fetched_at_once(const attention_tiles *tiles, int32_t queries)
{
    int32_t calls = (SPAN / 16 + BLOCKS) * (tiles->d / STEP); /* in vectors */

    return in_vectors(queries) ? (SPAN + calls - 1) / calls : FETCHES / tiles->groups + 1;
}

static void attend_span(const sp_attention_args *args, const attention_tiles *tiles,
                        const attention_few *few, int32_t queries, const int64_t *offsets,
                        int32_t begin, int32_t count, span_fetch *fetch)
{
    if (in_vectors(queries)) {
        vector_span(args, tiles, few, offsets, begin, count, fetch);
        return;
    }
    load_span(args, tiles, offsets, count);
    if (tiles->groups == 1)
        tile_few_span(tiles, queries, begin, args->scale * LOG2_E, fetch);
    else
        add_span(tiles, begin, args->scale * LOG2_E, fetch);
}

static void attend_rows(const sp_attention_args *args, int32_t row, int32_t rows)
{
    int32_t queries = rows * args->group, keys = args->first_position + row + rows;
    attention_tiles tiles = tiles_in_scratch(args, queries);
    int32_t at_once = fetched_at_once(&tiles, queries), count = min32(keys, SPAN);
    attention_few few = {0};
    int64_t offsets[2][SPAN];

    start(args, &tiles, row, queries);
    if (in_vectors(queries))
        few = start_few(args, &tiles, row, queries);
    else
        start_tiles(args, &tiles, row, queries);
    find_span(args, 0, count, offsets[0]);
    for (int32_t begin = 0, turn = 0; begin < keys; begin += SPAN, turn ^= 1) {
        span_fetch fetch = {.k = args->k_cache,
                            .v = args->v_cache,
                            .offsets = offsets[turn ^ 1],
                            .count = min32(keys - begin - count, SPAN),
                            .at_once = at_once,
                            .head_dim = args->head_dim};

        find_span(args, begin + count, fetch.count, offsets[turn ^ 1]);
        attend_span(args, &tiles, &few, queries, offsets[turn], begin, count, &fetch);
        count = fetch.count;
    }
    finish(args, &tiles, row, queries);
}

/* ---- entry ----------------------------------------------------------------------------------- */

static bool is_finite(const uint16_t *values, int32_t n)
{
    const __m512i exponent = _mm512_set1_epi16(0x7f80);

    for (int32_t i = 0; i < n; i += 32) {
        __mmask32 some = n - i < 32 ? (1u << (n - i)) - 1u : 0xffffffffu;
        __m512i bits = _mm512_maskz_loadu_epi16(some, values + i);

        if (_mm512_cmpeq_epi16_mask(_mm512_and_si512(bits, exponent), exponent) != 0)
            return false;
    }
    return true;
}

/* Rows from `row` on that share a tile: some see the values of each other's
 * positions. */
static int32_t rows_together(const sp_attention_args *args, int32_t row)
{
    int32_t rows = min32(rows_at_once(args->group), args->n_rows - row), first;

    first = args->first_position + row;
    for (int32_t i = 1; i < rows; i++)
        if (!is_finite((const uint16_t *)args->v_cache + cache_offset(args, first + i),
                       args->head_dim))
            return i;
    return rows;
}

/* Not inlined, so that no arithmetic is moved to where subnormals are not
 * flushed. */
static __attribute__((noinline)) void attend_flushed(const sp_attention_args *args)
{
    for (int32_t row = 0, rows; row < args->n_rows; row += rows) {
        rows = rows_together(args, row);
        attend_rows(args, row, rows);
    }
}

static void attention(const sp_attention_args *args)
{
    unsigned mode = _mm_getcsr();

    if (args->type != SP_DTYPE_BF16) {
        below->attention(args);
        return;
    }
    _mm_setcsr(mode | FLUSH_SUBNORMALS);
    attend_flushed(args);
    _mm_setcsr(mode);
    tile_release();
}

void sp_kernels_fill_attention_amx(sp_kernels *kernels, const sp_kernels *level_below)
{
    below = level_below;
    kernels->attention = attention;
    kernels->attention_scratch_floats = attention_scratch_floats;
}
