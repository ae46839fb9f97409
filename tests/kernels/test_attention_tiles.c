/*
 * test_attention_tiles.c: the amx level's attention over emulated tiles: the cases of
 * attention_cases.h, its documented order written out once more, and where the machine has tiles,
 * the hardware's bits against the emulation's.
 */
#include "kernel_test.h"

#if defined(__AVX512F__) && defined(__AVX512BW__)

#define SP_TILES_EMULATED
#define sp_kernels_fill_attention_amx fill_attention_emulated
void fill_attention_emulated(sp_kernels *kernels, const sp_kernels *below);
#include "kernels/cpu/attention_amx.c"

static sp_kernels emulated_table;

static const sp_kernels *emulated_or_skip(void)
{
    const sp_kernels *base = NULL;

    if (sp_kernels_get("avx512", &base, NULL) != SP_OK) {
        print_message("skipped: this machine lacks avx512, which surrounds the emulated tiles\n");
        skip();
    }
    emulated_table = *base;
    fill_attention_emulated(&emulated_table, base);
    emulated_table.level = "amx over emulated tiles";
    return &emulated_table;
}

#define ATTENTION_KERNELS(state) ((void)(state), emulated_or_skip())
#include "attention_cases.h"

/* ---- the order, once more ------------------------------------------------------------------- */

static float flushed(float value)
{
    return fabsf(value) < 0x1p-126f ? copysignf(0.0f, value) : value;
}

/* One step of 32: even and odd terms in a chain each. */
static float ordered_step(float sum, const float *a, const float *b, int64_t b_stride)
{
    float chain[2] = {0.0f, 0.0f};

    for (int i = 0; i < 32; i++)
        chain[i % 2] = flushed(fmaf(flushed(a[i]), flushed(b[i * b_stride]), chain[i % 2]));
    return flushed(sum + flushed(chain[0] + chain[1]));
}

static float ordered_exp2(float x)
{
    static const float factors[] = {0x1.5bba14p-10f, 0x1.3cea88p-7f, 0x1.c6b752p-5f,
                                    0x1.ebf9bcp-3f,  0x1.62e42ap-1f, 1.0f};
    float y = x < -125.0f ? -125.0f : x, n = nearbyintf(y), sum = factors[0];

    for (size_t i = 1; i < COUNT(factors); i++)
        sum = flushed(fmaf(sum, flushed(y - n), factors[i]));
    return ldexpf(sum, (int)n);
}

/* The state of one query; what is padded is zero. */
typedef struct ordered {
    float q[256], k[128][256], v[128][256], weights[2][128];
    float sums[256], largest, total;
} ordered;

static void ordered_span(ordered *o, int32_t count, int32_t d, float scale)
{
    float scores[128], next = -INFINITY, totals[2] = {0.0f, 0.0f}, rescale;

    for (int32_t t = 0; t < count; t++) {
        scores[t] = 0.0f;
        for (int32_t i = 0; i < d; i += 32)
            scores[t] = ordered_step(scores[t], o->k[t] + i, o->q + i, 1);
        next = fmaxf(next, scores[t]);
    }
    next = fmaxf(flushed(next * scale), o->largest);
    rescale = ordered_exp2(flushed(o->largest - next));
    memset(o->weights, 0, sizeof o->weights);
    for (int32_t t = 0; t < count; t++) {
        float weight = ordered_exp2(flushed(fmaf(scores[t], scale, -next)));
        float first = sp_f32_from_bits(sp_f32_bits(weight) & 0xffff0000u);

        totals[t % 2] += weight;
        o->weights[0][t] = first;
        o->weights[1][t] =
            sp_f32_from_bits((sp_f32_bits(flushed(weight - first)) + 0x8000u) & 0xffff0000u);
    }
    o->total = flushed(fmaf(o->total, rescale, totals[0] + totals[1]));
    o->largest = next;
    for (int32_t i = 0; i < d; i++) {
        o->sums[i] = flushed(o->sums[i] * rescale);
        for (int32_t t = 0; t < count; t += 32)
            for (int half = 0; half < 2; half++)
                o->sums[i] = ordered_step(o->sums[i], o->weights[half] + t, &o->v[t][i], 256);
    }
}

static void ordered_query(const sequence *s, int32_t position, int32_t head, uint16_t *out)
{
    static ordered o;
    int32_t d = s->head_dim;

    memset(&o, 0, sizeof o);
    o.largest = -INFINITY;
    memcpy(o.q, s->q + ((int64_t)position * s->group + head) * d, (size_t)d * sizeof(float));
    for (int32_t begin = 0; begin <= position; begin += 128) {
        int32_t count = position - begin < 128 ? position - begin + 1 : 128;

        memset(o.k, 0, sizeof o.k);
        memset(o.v, 0, sizeof o.v);
        for (int32_t t = 0; t < count; t++) {
            memcpy(o.k[t], s->k + (begin + t) * d, (size_t)d * sizeof(float));
            memcpy(o.v[t], s->v + (begin + t) * d, (size_t)d * sizeof(float));
        }
        ordered_span(&o, count, (d + 31) / 32 * 32, s->scale * 0x1.715476p0f);
    }
    for (int32_t i = 0; i < d; i++)
        out[i] = sp_f32_to_bf16(flushed((o.sums[i] + 0.0f) / o.total));
}

static const int32_t order_shapes[][3] = {/* tokens, group, head_dim */
                                          {1, 1, 1},    {33, 2, 128}, {70, 3, 40},  {129, 1, 256},
                                          {140, 2, 64}, {300, 1, 32}, {40, 130, 16}};

/* Sizes of k and v: usual; weights of all sizes; subnormal products; subnormal values. */
static const float sizes[][2] = {{3.0f, 1.0f}, {60.0f, 1e30f}, {1e-38f, 1e-36f}, {3.0f, 1e-38f}};

static sequence sized_sequence(sp_test_random *random, const int32_t *shape, const float *size)
{
    sequence s = sequence_new(random, SP_DTYPE_BF16, shape[0], shape[1], shape[2]);

    for (int32_t i = 0; i < s.tokens * s.head_dim; i++) {
        s.k[i] = sp_element_round(SP_DTYPE_BF16, s.k[i] / 3.0f * size[0]);
        s.v[i] = sp_element_round(SP_DTYPE_BF16, s.v[i] * size[1]);
    }
    return s;
}

static uint16_t *attend_all(const sp_kernels *kernels, const sequence *s)
{
    layout at = {16, 2, 1};
    cache kv = cache_new(s, at, s->tokens);
    uint16_t *out = malloc((size_t)(s->tokens * s->group * s->head_dim) * sizeof *out);

    assert_non_null(out);
    attend(kernels, s, &kv, at, 0, s->tokens, out);
    cache_free(&kv);
    return out;
}

static void sums_follow_the_documented_order(void **state)
{
    const sp_kernels *kernels = ATTENTION_KERNELS(state);
    sp_test_random random = {21};
    uint16_t expected[256];

    for (size_t c = 0; c < COUNT(order_shapes); c++)
        for (size_t z = 0; z < COUNT(sizes); z++) {
            sequence s = sized_sequence(&random, order_shapes[c], sizes[z]);
            uint16_t *out = attend_all(kernels, &s);

            for (int32_t query = 0; query < s.tokens * s.group; query += 1 + query / 64) {
                ordered_query(&s, query / s.group, query % s.group, expected);
                if (memcmp(expected, out + query * s.head_dim, (size_t)s.head_dim * 2) != 0)
                    fail_msg("%d tokens, %d heads of %d, sizes %zu: query %d differs", s.tokens,
                             s.group, s.head_dim, z, query);
            }
            free(out);
            sequence_free(&s);
        }
}

/* A sequence that crosses spans: rows alone, in chunks and all at once. */
static void spans_do_not_depend_on_chunks(void **state)
{
    const sp_kernels *kernels = ATTENTION_KERNELS(state);
    sp_test_random random = {22};
    sequence s = sequence_new(&random, SP_DTYPE_BF16, 300, 2, 64);
    uint16_t *whole = attend_all(kernels, &s);

    check_chunks(kernels, &s, (layout){16, 2, 1}, 1, (const unsigned char *)whole);
    check_chunks(kernels, &s, (layout){7, 1, 0}, 37, (const unsigned char *)whole);
    check_chunks(kernels, &s, (layout){64, 4, 3}, 128, (const unsigned char *)whole);
    free(whole);
    sequence_free(&s);
}

/* ---- few queries --------------------------------------------------------------------------- */

/* Rows from `first` on, `chunk` at a time, with up to `vectors` queries in vectors, against those
 * that a prefill of them has. */
static void check_few(const sp_kernels *kernels, const sequence *s, int32_t first, int32_t chunk,
                      int32_t vectors, const uint16_t *whole)
{
    int32_t usual = vector_queries, width = s->group * s->head_dim;
    layout at = {16, 2, 1};
    uint16_t *out = malloc((size_t)(chunk * width) * sizeof *out);

    assert_non_null(out);
    vector_queries = vectors;
    for (int32_t row = first; row < s->tokens; row += chunk) {
        int32_t rows = row + chunk < s->tokens ? chunk : s->tokens - row;
        cache kv = cache_new(s, at, row + rows);

        attend(kernels, s, &kv, at, row, rows, out);
        if (memcmp(out, whole + (row - first) * width, (size_t)(rows * width) * 2) != 0)
            fail_msg("%d heads of %d, %d rows from %d, vectors up to %d: differ", s->group,
                     s->head_dim, rows, row, vectors);
        cache_free(&kv);
    }
    vector_queries = usual;
    free(out);
}

/* Some values, keys and queries are zeros of both signs. */
static sequence sequence_with_zeros(sp_test_random *random, const int32_t *shape, const float *size)
{
    sequence s = sized_sequence(random, shape, size);

    for (int32_t t = 0; t < s.tokens; t += 3)
        for (int32_t i = 0; i < s.head_dim; i++) {
            s.k[t * s.head_dim + i] = i % 2 ? -0.0f : 0.0f;
            s.v[t * s.head_dim + i] = -0.0f;
        }
    for (int32_t t = 0; t < s.tokens; t++)
        s.v[t * s.head_dim] = t % 2 ? -0.0f : 0.0f;
    memset(s.q + s.group * s.head_dim * (s.tokens - 2), 0, (size_t)s.head_dim * sizeof *s.q);
    return s;
}

static void decode_has_the_bits_of_a_prefill(void **state)
{
    enum { FIRST = 118, TOKENS = 136 }; /* more queries than a tile has, across a span's end */
    const sp_kernels *kernels = ATTENTION_KERNELS(state);
    static const int32_t head_dims[] = {1, 40, 64, 128, 256};
    sp_test_random random = {24};
    layout at = {16, 2, 1};

    for (size_t d = 0; d < COUNT(head_dims); d++)
        for (int32_t group = 1; group <= 16; group += 1 + (head_dims[d] > 64 && group > 4) * 2) {
            int32_t shape[] = {TOKENS, group, head_dims[d]};
            sequence s = sequence_with_zeros(&random, shape, sizes[group % 4]);
            cache kv = cache_new(&s, at, s.tokens);
            size_t n = (size_t)((TOKENS - FIRST) * group * s.head_dim);
            uint16_t *whole = malloc(n * sizeof *whole);

            assert_non_null(whole);
            attend(kernels, &s, &kv, at, FIRST, TOKENS - FIRST, whole);
            for (int32_t vectors = 0; vectors <= FEW_QUERIES; vectors += FEW_QUERIES) {
                check_few(kernels, &s, FIRST, 1, vectors, whole);
                check_few(kernels, &s, FIRST, group < 5 ? FEW_QUERIES / group : 2, vectors, whole);
            }
            free(whole);
            cache_free(&kv);
            sequence_free(&s);
        }
}

/* A key's only row has the weight 1, whose rest is 0. */
static void an_infinite_value_gives_nan(void **state)
{
    const sp_kernels *kernels = ATTENTION_KERNELS(state);
    int32_t usual = vector_queries;

    for (int32_t vectors = 0; vectors <= FEW_QUERIES; vectors += FEW_QUERIES) {
        sp_test_random random = {25};
        sequence s = sequence_new(&random, SP_DTYPE_BF16, 1, 1, 32);
        uint16_t *out, *below_out;

        s.v[3] = INFINITY;
        vector_queries = vectors;
        out = attend_all(kernels, &s);
        vector_queries = usual;
        below_out = attend_all(below, &s);
        for (int32_t i = 0; i < s.head_dim; i++)
            assert_int_equal(isnan(sp_bf16_to_f32(out[i])), i == 3);
        assert_true(isinf(sp_bf16_to_f32(below_out[3])));
        free(below_out);
        free(out);
        sequence_free(&s);
    }
}

/* The instruction itself against the emulation, where there is one. */
static void hardware_has_the_same_bits(void **state)
{
    const sp_kernels *emulation = ATTENTION_KERNELS(state), *hardware = NULL;
    sp_test_random random = {23};

    if (sp_kernels_get("amx", &hardware, NULL) != SP_OK) {
        print_message("skipped: this machine or build lacks level amx\n");
        skip();
    }
    for (size_t c = 0; c < COUNT(order_shapes); c++)
        for (size_t z = 0; z < COUNT(sizes); z++) {
            sequence s = sized_sequence(&random, order_shapes[c], sizes[z]);
            uint16_t *out = attend_all(hardware, &s), *expected = attend_all(emulation, &s);

            assert_memory_equal(out, expected, (size_t)(s.tokens * s.group * s.head_dim) * 2);
            check_chunks(hardware, &s, (layout){16, 2, 1}, 1, (const unsigned char *)expected);
            free(expected);
            free(out);
            sequence_free(&s);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(matches_double),
        cmocka_unit_test(a_row_depends_on_its_keys_alone),
        cmocka_unit_test(a_head_depends_on_nothing_around_it),
        cmocka_unit_test(non_finite_stays_in_its_row),
        cmocka_unit_test(sums_follow_the_documented_order),
        cmocka_unit_test(spans_do_not_depend_on_chunks),
        cmocka_unit_test(decode_has_the_bits_of_a_prefill),
        cmocka_unit_test(an_infinite_value_gives_nan),
        cmocka_unit_test(hardware_has_the_same_bits),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

#else

int main(void)
{
    print_message("skipped: test_attention_tiles needs AVX-512, which surrounds the tiles\n");
    return 77;
}

#endif
