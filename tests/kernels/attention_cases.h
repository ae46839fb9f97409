/*
 * attention_cases.h: attention of one table of kernels against double precision with a bound made
 * from the errors of its steps, and its promise: a row's bits depend neither on the chunk that it
 * comes in nor on the pages' size and place, nor on what follows its position.
 *
 * ATTENTION_KERNELS(state) gives the table of a test, or ends it as skipped.
 */
#ifndef SP_TESTS_ATTENTION_CASES_H
#define SP_TESTS_ATTENTION_CASES_H

#include "kernel_test.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

typedef struct layout {
    int32_t page_tokens, kv_heads, kv_head;
} layout;

/* One sequence of `tokens` positions: q for every position, k and v, all in one head's terms. */
typedef struct sequence {
    sp_dtype type;
    int32_t tokens, group, head_dim;
    float scale;
    float *q, *k, *v; /* [tokens, group, head_dim], [tokens, head_dim] twice; exact in `type` */
} sequence;

static float *random_values(sp_test_random *random, sp_dtype type, size_t n, float size)
{
    float *values = malloc(n * sizeof *values);

    assert_non_null(values);
    for (size_t i = 0; i < n; i++)
        values[i] = sp_element_round(type, sp_test_float(random) * size);
    return values;
}

static sequence sequence_new(sp_test_random *random, sp_dtype type, int32_t tokens, int32_t group,
                             int32_t head_dim)
{
    sequence s = {.type = type, .tokens = tokens, .group = group, .head_dim = head_dim};
    size_t n = (size_t)tokens * (size_t)head_dim;

    s.scale = 1.0f / sqrtf((float)head_dim);
    s.q = random_values(random, type, n * (size_t)group, 3.0f);
    s.k = random_values(random, type, n, 3.0f);
    s.v = random_values(random, type, n, 1.0f);
    return s;
}

static void sequence_free(sequence *s)
{
    free(s->q);
    free(s->k);
    free(s->v);
}

/* A cache of one layer that holds the first `tokens` positions; everything else in it is NaN. */
typedef struct cache {
    guarded k, v;
    int32_t *pages;
} cache;

static cache cache_new(const sequence *s, layout at, int32_t tokens)
{
    int32_t n_pages = (tokens + at.page_tokens - 1) / at.page_tokens, spare = 3;
    size_t page = (size_t)(at.kv_heads * at.page_tokens * s->head_dim) * type_bytes(s->type);
    cache c = {guarded_new(page * (size_t)(n_pages + spare), 0),
               guarded_new(page * (size_t)(n_pages + spare), 0),
               malloc((size_t)n_pages * sizeof(int32_t))};

    assert_non_null(c.pages);
    for (int32_t i = 0; i < n_pages; i++) /* backwards with a gap: no order to rely on */
        c.pages[i] = n_pages + spare - 1 - i - (i > 1);
    for (int32_t t = 0; t < tokens; t++)
        for (int32_t i = 0; i < s->head_dim; i++) {
            int64_t slot =
                ((int64_t)c.pages[t / at.page_tokens] * at.kv_heads + at.kv_head) * at.page_tokens +
                t % at.page_tokens;

            sp_element_store(s->type, c.k.data, slot * s->head_dim + i, s->k[t * s->head_dim + i]);
            sp_element_store(s->type, c.v.data, slot * s->head_dim + i, s->v[t * s->head_dim + i]);
        }
    return c;
}

static void cache_free(cache *c)
{
    guarded_free(&c->k);
    guarded_free(&c->v);
    free(c->pages);
}

/* Rows [first, first + rows) into out [rows, group, head_dim], strides padded on both sides. */
static void attend(const sp_kernels *kernels, const sequence *s, const cache *c, layout at,
                   int32_t first, int32_t rows, void *out)
{
    int64_t width = (int64_t)s->group * s->head_dim, q_stride = width + 3, out_stride = width + 5;
    size_t bytes = type_bytes(s->type);
    size_t scratch_floats = kernels->attention_scratch_floats(s->group, s->head_dim);
    guarded q = guarded_new((size_t)((rows - 1) * q_stride + width) * bytes, bytes);
    guarded y = guarded_new((size_t)((rows - 1) * out_stride + width) * bytes, bytes);
    guarded scratch = guarded_new(scratch_floats * sizeof(float), 0);
    sp_attention_args args = {
        .type = s->type,
        .n_rows = rows,
        .first_position = first,
        .group = s->group,
        .head_dim = s->head_dim,
        .kv_heads = at.kv_heads,
        .kv_head = at.kv_head,
        .page_tokens = at.page_tokens,
        .scale = s->scale,
        .q = q.data,
        .q_stride = q_stride,
        .out = y.data,
        .out_stride = out_stride,
        .k_cache = c->k.data,
        .v_cache = c->v.data,
        .pages = c->pages,
        .scratch = (float *)(void *)scratch.data,
    };

    for (int32_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < width; j++)
            sp_element_store(s->type, q.data, i * q_stride + j, s->q[(first + i) * width + j]);
    kernels->attention(&args);
    for (int32_t i = 0; i < rows; i++) {
        memcpy((char *)out + (size_t)(i * width) * bytes, y.data + (size_t)(i * out_stride) * bytes,
               (size_t)width * bytes);
        if (i + 1 < rows)
            for (size_t b = (size_t)width * bytes; b < (size_t)out_stride * bytes; b++)
                assert_int_equal(y.data[(size_t)(i * out_stride) * bytes + b], GUARD_BYTE);
    }
    guarded_free(&scratch);
    guarded_free(&y);
    guarded_free(&q);
}

/* ---- against double precision -------------------------------------------------------------- */

/* One query; *out_bound is the error that the level's steps may add up to. */
static void attend_double(const sequence *s, int32_t position, int32_t head, double *out,
                          double *out_bound)
{
    const float *q = s->q + ((int64_t)position * s->group + head) * s->head_dim;
    double *score = malloc((size_t)(position + 1) * sizeof *score);
    double largest = -INFINITY, total = 0.0, score_error = 0.0, v_largest = 0.0;

    assert_non_null(score);
    for (int32_t t = 0; t <= position; t++) {
        double sum = 0.0, absolute = 0.0;

        for (int32_t i = 0; i < s->head_dim; i++) {
            double product = (double)q[i] * (double)s->k[t * s->head_dim + i];

            sum += product;
            absolute += fabs(product);
        }
        score[t] = sum * (double)s->scale;
        largest = fmax(largest, score[t]);
        score_error = fmax(score_error, ((double)s->head_dim / 8.0 + 10.0) * 0x1p-24 * absolute *
                                            (double)s->scale);
    }
    for (int32_t i = 0; i < s->head_dim; i++)
        out[i] = 0.0;
    for (int32_t t = 0; t <= position; t++) {
        double weight = exp(score[t] - largest);

        total += weight;
        for (int32_t i = 0; i < s->head_dim; i++) {
            out[i] += weight * (double)s->v[t * s->head_dim + i];
            v_largest = fmax(v_largest, fabs((double)s->v[t * s->head_dim + i]));
        }
    }
    for (int32_t i = 0; i < s->head_dim; i++)
        out[i] /= total;
    /* Twice the scores' error, and half a unit for each addition, rescaling and exp. */
    *out_bound = (2.0 * score_error + (2.0 * position + 32.0) * 0x1p-24) * v_largest;
    free(score);
}

static void check_rows(const sequence *s, int32_t first, int32_t rows, const void *out)
{
    double *expected = malloc((size_t)s->head_dim * sizeof *expected), bound;

    assert_non_null(expected);
    for (int32_t i = 0; i < rows; i++)
        for (int32_t h = 0; h < s->group; h++) {
            attend_double(s, first + i, h, expected, &bound);
            for (int32_t d = 0; d < s->head_dim; d++) {
                int64_t at = ((int64_t)i * s->group + h) * s->head_dim + d;

                check_close(sp_element_load(s->type, out, at), expected[d],
                            bound + half_ulp(s->type, fabs(expected[d]) + bound), "attention",
                            first + i, h * s->head_dim + d);
            }
        }
    free(expected);
}

static void matches_double(void **state)
{
    const sp_kernels *kernels = ATTENTION_KERNELS(state);
    static const sp_dtype dtypes[] = {SP_DTYPE_BF16, SP_DTYPE_F32};
    static const int32_t head_dims[] = {1, 13, 16, 40, 64, 128, 256};
    static const int32_t shapes[][4] = {/* group, page tokens, first, rows */
                                        {1, 16, 0, 1},  {2, 16, 0, 33}, {4, 5, 31, 1},
                                        {3, 32, 30, 5}, {7, 64, 63, 2}, {8, 16, 200, 3},
                                        {60, 1, 40, 2}, {1, 16, 95, 70}};
    sp_test_random random = {11};

    for (size_t t = 0; t < COUNT(dtypes); t++)
        for (size_t d = 0; d < COUNT(head_dims); d++)
            for (size_t c = 0; c < COUNT(shapes); c++) {
                const int32_t *shape = shapes[c];
                layout at = {shape[1], 3, 1};
                sequence s =
                    sequence_new(&random, dtypes[t], shape[2] + shape[3], shape[0], head_dims[d]);
                cache kv = cache_new(&s, at, s.tokens);
                void *out = malloc((size_t)(shape[3] * s.group * s.head_dim) * 4);

                attend(kernels, &s, &kv, at, shape[2], shape[3], out);
                check_rows(&s, shape[2], shape[3], out);
                free(out);
                cache_free(&kv);
                sequence_free(&s);
            }
}

/* ---- the promise --------------------------------------------------------------------------- */

/* All rows in chunks of `chunk` rows over another layout; only keys up to a chunk exist then. */
static void check_chunks(const sp_kernels *kernels, const sequence *s, layout at, int32_t chunk,
                         const unsigned char *whole)
{
    size_t row_bytes = (size_t)(s->group * s->head_dim) * type_bytes(s->type);
    unsigned char *out = malloc(row_bytes * (size_t)chunk);

    assert_non_null(out);
    for (int32_t first = 0; first < s->tokens; first += chunk) {
        int32_t rows = first + chunk < s->tokens ? chunk : s->tokens - first;
        cache kv = cache_new(s, at, first + rows);

        attend(kernels, s, &kv, at, first, rows, out);
        if (memcmp(out, whole + (size_t)first * row_bytes, row_bytes * (size_t)rows) != 0)
            fail_msg("rows from %d in chunks of %d differ", first, chunk);
        cache_free(&kv);
    }
    free(out);
}

static void a_row_depends_on_its_keys_alone(void **state)
{
    const sp_kernels *kernels = ATTENTION_KERNELS(state);
    static const sp_dtype dtypes[] = {SP_DTYPE_BF16, SP_DTYPE_F32};
    static const int32_t head_dims[] = {13, 64, 128};
    static const int32_t groups[] = {1, 2, 5};
    sp_test_random random = {12};

    for (size_t t = 0; t < COUNT(dtypes); t++)
        for (size_t d = 0; d < COUNT(head_dims); d++)
            for (size_t g = 0; g < COUNT(groups); g++) {
                sequence s = sequence_new(&random, dtypes[t], 101, groups[g], head_dims[d]);
                layout at = {16, 2, 0};
                cache kv = cache_new(&s, at, s.tokens);
                unsigned char *whole = malloc((size_t)(s.tokens * s.group * s.head_dim) * 4);

                assert_non_null(whole);
                attend(kernels, &s, &kv, at, 0, s.tokens, whole);
                check_chunks(kernels, &s, (layout){16, 2, 1}, 1, whole);
                check_chunks(kernels, &s, (layout){7, 1, 0}, 3, whole);
                check_chunks(kernels, &s, (layout){64, 4, 3}, 50, whole);
                free(whole);
                cache_free(&kv);
                sequence_free(&s);
            }
}

/* One head of the group alone gives the bits that it has among the others. */
static void a_head_depends_on_nothing_around_it(void **state)
{
    const sp_kernels *kernels = ATTENTION_KERNELS(state);
    sp_test_random random = {13};
    layout at = {16, 1, 0};
    sequence s = sequence_new(&random, SP_DTYPE_BF16, 70, 7, 64), one;
    cache kv = cache_new(&s, at, s.tokens);
    uint16_t *whole = malloc((size_t)(s.tokens * s.group * s.head_dim) * 2);
    uint16_t *alone = malloc((size_t)(s.tokens * s.head_dim) * 2);

    assert_true(whole && alone);
    attend(kernels, &s, &kv, at, 0, s.tokens, whole);
    for (int32_t h = 0; h < s.group; h++) {
        one = s;
        one.group = 1;
        one.q = malloc((size_t)(s.tokens * s.head_dim) * sizeof(float));
        assert_non_null(one.q);
        for (int32_t t = 0; t < s.tokens; t++)
            memcpy(one.q + t * s.head_dim, s.q + (t * s.group + h) * s.head_dim,
                   (size_t)s.head_dim * sizeof(float));
        attend(kernels, &one, &kv, at, 0, s.tokens, alone);
        for (int32_t t = 0; t < s.tokens; t++)
            assert_memory_equal(alone + t * s.head_dim, whole + (t * s.group + h) * s.head_dim,
                                (size_t)s.head_dim * 2);
        free(one.q);
    }
    free(alone);
    free(whole);
    cache_free(&kv);
    sequence_free(&s);
}

/* A NaN in q of one row, or in k and v of the last position, leaves the other rows as they are. */
static void non_finite_stays_in_its_row(void **state)
{
    const sp_kernels *kernels = ATTENTION_KERNELS(state);
    sp_test_random random = {14};
    layout at = {16, 1, 0};
    sequence s = sequence_new(&random, SP_DTYPE_BF16, 45, 2, 32);
    size_t row = (size_t)(s.group * s.head_dim);
    uint16_t *clean = malloc((size_t)s.tokens * row * 2),
             *dirty = malloc((size_t)s.tokens * row * 2);
    cache kv = cache_new(&s, at, s.tokens);

    assert_true(clean && dirty);
    attend(kernels, &s, &kv, at, 0, s.tokens, clean);
    cache_free(&kv);
    s.q[20 * row + 5] = NAN;
    s.k[44 * s.head_dim] = INFINITY;
    s.v[44 * s.head_dim + 1] = NAN;
    kv = cache_new(&s, at, s.tokens);
    attend(kernels, &s, &kv, at, 0, s.tokens, dirty);
    for (int32_t t = 0; t < 44; t++)
        if (t != 20)
            assert_memory_equal(dirty + (size_t)t * row, clean + (size_t)t * row, row * 2);
    assert_true(isnan(sp_bf16_to_f32(dirty[20 * row])));
    assert_true(isnan(sp_bf16_to_f32(dirty[44 * row + 1])));
    free(dirty);
    free(clean);
    cache_free(&kv);
    sequence_free(&s);
}

#endif
