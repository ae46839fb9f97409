/*
 * test_elementwise.c: norms, RoPE, SiLU·mul, addition and conversion of every level against double
 * precision, at lengths around every vector width, in place and out of place, with guard zones.
 */
#include "kernel_test.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

static const int64_t lengths[] = {1,  2,  3,  7,  8,  9,   15,  16,   17,   31,
                                  32, 33, 48, 64, 65, 128, 257, 1024, 1031, 4096};
static const sp_dtype dtypes[] = {SP_DTYPE_BF16, SP_DTYPE_F32};

/* A vector of `type` one element off alignment, with random values. */
static guarded vector_new(sp_test_random *random, sp_dtype type, int64_t n, float size)
{
    guarded v = guarded_new((size_t)n * type_bytes(type), type_bytes(type));

    fill_matrix(random, type, v.data, 1, n, n, size);
    return v;
}

static guarded copy_of(const guarded *v, size_t offset)
{
    guarded copy = guarded_new(v->bytes, offset);

    memcpy(copy.data, v->data, v->bytes);
    return copy;
}

static double value_at(sp_dtype type, const guarded *v, int64_t i)
{
    return sp_element_load(type, v->data, i);
}

/* ---- norms --------------------------------------------------------------------------------- */

static double inverse_rms(sp_dtype type, const guarded *x, int64_t n, double eps)
{
    double sum = 0.0;

    for (int64_t i = 0; i < n; i++)
        sum += value_at(type, x, i) * value_at(type, x, i);
    return 1.0 / sqrt(sum / (double)n + eps);
}

/* Relative error of one normed element before its rounding: the sum, its root, two products. */
static double norm_error(int64_t n)
{
    return ((double)n / 8.0 + 16.0) * 0x1p-24;
}

static void check_norm(const sp_kernels *kernels, sp_test_random *random, sp_dtype type, int64_t n,
                       float offset, int in_place)
{
    guarded x = vector_new(random, type, n, 4.0f), w = vector_new(random, SP_DTYPE_BF16, n, 1.0f);
    guarded y =
        in_place ? copy_of(&x, type_bytes(type)) : guarded_new(x.bytes, 3 * type_bytes(type));
    double inverse = inverse_rms(type, &x, n, 1e-6);

    kernels->rmsnorm(type, y.data, in_place ? y.data : x.data, (const uint16_t *)(void *)w.data,
                     offset, n, 1e-6f);
    for (int64_t i = 0; i < n; i++) {
        double weight = (double)(float)(value_at(SP_DTYPE_BF16, &w, i) + (double)offset);
        double expected = value_at(type, &x, i) * inverse * weight;

        check_close(value_at(type, &y, i), expected,
                    fabs(expected) * norm_error(n) + half_ulp(type, expected), "rmsnorm", n, i);
    }
    guarded_free(&y);
    guarded_free(&w);
    guarded_free(&x);
}

static void rmsnorm_matches_double(void **state)
{
    const sp_kernels *kernels = kernels_or_skip(state);
    sp_test_random random = {21};

    for (size_t t = 0; t < COUNT(dtypes); t++)
        for (size_t l = 0; l < COUNT(lengths); l++)
            for (int variant = 0; variant < 4; variant++)
                check_norm(kernels, &random, dtypes[t], lengths[l], (float)(variant / 2),
                           variant % 2);
}

static void check_rope(const sp_kernels *kernels, sp_test_random *random, sp_dtype type, int64_t n,
                       int64_t n_rot, float offset)
{
    guarded x = vector_new(random, type, n, 4.0f), w = vector_new(random, SP_DTYPE_BF16, n, 1.0f);
    guarded y = copy_of(&x, type_bytes(type));
    guarded cosine = guarded_new((size_t)n_rot * 4, 4), sine = guarded_new((size_t)n_rot * 4, 4);
    double inverse = inverse_rms(type, &x, n, 1e-5), *normed = malloc((size_t)n * sizeof *normed);

    assert_non_null(normed);
    for (int64_t i = 0; i < n_rot; i++) {
        double angle = 100.0 * (double)sp_test_float(random);

        sp_element_store(SP_DTYPE_F32, cosine.data, i, (float)cos(angle));
        sp_element_store(SP_DTYPE_F32, sine.data, i, (float)sin(angle));
    }
    for (int64_t i = 0; i < n; i++)
        normed[i] = value_at(type, &x, i) * inverse *
                    (double)(float)(value_at(SP_DTYPE_BF16, &w, i) + (double)offset);
    kernels->rmsnorm_rope(type, y.data, (const uint16_t *)(void *)w.data, offset, n, 1e-5f,
                          (const float *)(void *)cosine.data, (const float *)(void *)sine.data,
                          n_rot);
    for (int64_t i = 0; i < n; i++) {
        double expected = normed[i], size = fabs(normed[i]);

        if (i < 2 * n_rot) {
            int64_t low = i % n_rot;
            double c = value_at(SP_DTYPE_F32, &cosine, low), s = value_at(SP_DTYPE_F32, &sine, low);
            double a = normed[low], b = normed[low + n_rot];

            expected = i < n_rot ? a * c - b * s : b * c + a * s;
            size = fabs(a) + fabs(b);
        }
        check_close(value_at(type, &y, i), expected,
                    size * norm_error(n) + half_ulp(type, expected), "rope", n, i);
    }
    free(normed);
    guarded_free(&sine);
    guarded_free(&cosine);
    guarded_free(&y);
    guarded_free(&w);
    guarded_free(&x);
}

/* The rotation alone: what is beyond the rotated elements stays as it is. */
static void check_plain_rope(const sp_kernels *kernels, sp_test_random *random, sp_dtype type,
                             int64_t n, int64_t n_rot)
{
    guarded x = vector_new(random, type, n, 4.0f), y = copy_of(&x, type_bytes(type));
    guarded cosine = guarded_new((size_t)n_rot * 4, 4), sine = guarded_new((size_t)n_rot * 4, 4);

    for (int64_t i = 0; i < n_rot; i++) {
        double angle = 100.0 * (double)sp_test_float(random);

        sp_element_store(SP_DTYPE_F32, cosine.data, i, (float)cos(angle));
        sp_element_store(SP_DTYPE_F32, sine.data, i, (float)sin(angle));
    }
    kernels->rope(type, y.data, (const float *)(void *)cosine.data,
                  (const float *)(void *)sine.data, n_rot);
    for (int64_t i = 0; i < n; i++) {
        double expected = value_at(type, &x, i), size = 0;

        if (i < 2 * n_rot) {
            int64_t low = i % n_rot;
            double c = value_at(SP_DTYPE_F32, &cosine, low), s = value_at(SP_DTYPE_F32, &sine, low);
            double a = value_at(type, &x, low), b = value_at(type, &x, low + n_rot);

            expected = i < n_rot ? a * c - b * s : b * c + a * s;
            size = fabs(a) + fabs(b);
        }
        check_close(value_at(type, &y, i), expected,
                    size * 0x1p-22 + (size > 0 ? half_ulp(type, expected) : 0), "plain rope", n, i);
    }
    guarded_free(&sine);
    guarded_free(&cosine);
    guarded_free(&y);
    guarded_free(&x);
}

static void rope_matches_double(void **state)
{
    const sp_kernels *kernels = kernels_or_skip(state);
    static const int64_t shapes[][2] = {/* n, n_rot */
                                        {2, 1},   {5, 2},   {16, 8},    {32, 16},
                                        {64, 32}, {64, 8},  {128, 64},  {256, 32},
                                        {80, 40}, {26, 13}, {256, 128}, {17, 0}};
    sp_test_random random = {22};

    for (size_t t = 0; t < COUNT(dtypes); t++)
        for (size_t c = 0; c < COUNT(shapes); c++) {
            for (int offset = 0; offset < 2; offset++)
                check_rope(kernels, &random, dtypes[t], shapes[c][0], shapes[c][1], (float)offset);
            check_plain_rope(kernels, &random, dtypes[t], shapes[c][0], shapes[c][1]);
        }
}

/* ---- SiLU·mul and addition ------------------------------------------------------------------ */

/*
 * Where e^-gate overflows FP32 the result is 0, which is off by |gate up| sigmoid(gate) with
 * sigmoid below 2^-128. in_place: 0 = a buffer of its own, 1 = out is gate, 2 = out is up.
 */
static void check_silu(const sp_kernels *kernels, sp_test_random *random, sp_dtype type, int64_t n,
                       float size, int in_place)
{
    guarded gate = vector_new(random, type, n, size), up = vector_new(random, type, n, 2.0f);
    guarded gate_copy = copy_of(&gate, type_bytes(type)), up_copy = copy_of(&up, 0);
    guarded own = guarded_new(gate.bytes, type_bytes(type));
    guarded *out = in_place == 0 ? &own : in_place == 1 ? &gate_copy : &up_copy;

    kernels->silu_mul(type, out->data, gate_copy.data, up_copy.data, n);
    for (int64_t i = 0; i < n; i++) {
        double g = value_at(type, &gate, i);
        double u = value_at(type, &up, i), expected = g / (1.0 + exp(-g)) * u;
        double bound = fabs(expected) * 8.0 * 0x1p-24 + half_ulp(type, expected);

        check_close(value_at(type, out, i), expected, bound + fabs(g * u) * 0x1p-128, "silu_mul", n,
                    i);
    }
    guarded_free(&own);
    guarded_free(&up_copy);
    guarded_free(&gate_copy);
    guarded_free(&up);
    guarded_free(&gate);
}

static void silu_mul_matches_double(void **state)
{
    const sp_kernels *kernels = kernels_or_skip(state);
    static const float sizes[] = {1.0f, 20.0f, 120.0f};
    sp_test_random random = {23};

    for (size_t t = 0; t < COUNT(dtypes); t++)
        for (size_t l = 0; l < COUNT(lengths); l++)
            for (size_t s = 0; s < COUNT(sizes); s++)
                for (int in_place = 0; in_place < 3; in_place++)
                    check_silu(kernels, &random, dtypes[t], lengths[l], sizes[s], in_place);
}

/* Each weight against double, and alone against among others. */
static void exp_weights_match_double(void **state)
{
    const sp_kernels *kernels = kernels_or_skip(state);
    static const int64_t counts[] = {1, 7, 8, 9, 16, 100, 1023};
    sp_test_random random = {21};
    float logits[1023], weights[1024], alone;

    for (size_t l = 0; l < sizeof counts / sizeof *counts; l++) {
        int64_t n = counts[l];

        for (int64_t i = 0; i < n; i++)
            logits[i] = sp_test_float(&random) * 40.0f;
        logits[n / 2] = -INFINITY;
        weights[n] = 7.0f;
        kernels->exp_weights(weights, logits, 40.0f, 1.25f, n);
        for (int64_t i = 0; i < n; i++) {
            /* The exponent is rounded twice, by half an ulp of up to 128 each time. */
            double expected = exp(((double)logits[i] - 40.0) * 1.25);

            check_close(weights[i], expected, expected * 0x1p-16 + 0x1p-149, "exp_weights", n, i);
            kernels->exp_weights(&alone, &logits[i], 40.0f, 1.25f, 1);
            assert_memory_equal(&alone, &weights[i], sizeof alone);
        }
        assert_true(weights[n / 2] == 0.0f && weights[n] == 7.0f);
    }
}

static void silu_has_its_limits(void **state)
{
    const sp_kernels *kernels = kernels_or_skip(state);
    float gate[5] = {-INFINITY, -1000.0f, 0.0f, 1000.0f, NAN};
    float up[5] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f};

    kernels->silu_mul(SP_DTYPE_F32, gate, gate, up, 5);
    assert_true(isnan(gate[0])); /* -inf / inf */
    assert_true(gate[1] == 0.0f);
    assert_true(gate[2] == 0.0f);
    assert_true(gate[3] == 1000.0f);
    assert_true(isnan(gate[4]));
}

/* One rounding only, so addition is exact to the bit. */
static void add_is_exact(void **state)
{
    const sp_kernels *kernels = kernels_or_skip(state);
    sp_test_random random = {24};

    for (size_t t = 0; t < COUNT(dtypes); t++)
        for (size_t l = 0; l < COUNT(lengths); l++) {
            sp_dtype type = dtypes[t];
            int64_t n = lengths[l];
            guarded y = vector_new(&random, type, n, 2.0f), x = vector_new(&random, type, n, 2.0f);
            guarded expected = copy_of(&y, 0);

            for (int64_t i = 0; i < n; i++)
                sp_element_store(type, expected.data, i,
                                 sp_element_load(type, y.data, i) +
                                     sp_element_load(type, x.data, i));
            kernels->add(type, y.data, x.data, n);
            assert_memory_equal(y.data, expected.data, y.bytes);
            guarded_free(&expected);
            guarded_free(&x);
            guarded_free(&y);
        }
}

/* ---- sums with weights --------------------------------------------------------------------- */

/* y += scale * x by one fused step: the same bits on every level. */
static void scaled_addition_is_exact(void **state)
{
    const sp_kernels *kernels = kernels_or_skip(state);
    sp_test_random random = {26};

    for (size_t t = 0; t < COUNT(dtypes); t++)
        for (size_t l = 0; l < COUNT(lengths); l++) {
            sp_dtype type = dtypes[t];
            int64_t n = lengths[l];
            float scale = sp_test_float(&random) * 3.0f;
            guarded y = vector_new(&random, type, n, 3.0f), x = vector_new(&random, type, n, 3.0f);
            guarded expected = copy_of(&y, 0);

            for (int64_t i = 0; i < n; i++)
                sp_element_store(type, expected.data, i,
                                 fmaf(scale, sp_element_load(type, x.data, i),
                                      sp_element_load(type, y.data, i)));
            kernels->add_scaled(type, y.data, x.data, scale, n);
            assert_memory_equal(y.data, expected.data, y.bytes);
            guarded_free(&expected);
            guarded_free(&x);
            guarded_free(&y);
        }
}

enum { SUM_ROWS = 9 };

static void check_weighted_sum(const sp_kernels *kernels, sp_test_random *random, sp_dtype type,
                               int64_t n, int64_t rows)
{
    static const int32_t index[SUM_ROWS] = {4, 0, 8, 2, 7, 1, 3, 6, 5};
    int64_t stride = n + 3;
    guarded x = vector_new(random, type, SUM_ROWS * stride, 3.0f);
    guarded y = vector_new(random, type, n, 3.0f), expected = copy_of(&y, 0);
    float weights[SUM_ROWS];

    for (int64_t i = 0; i < rows; i++)
        weights[i] = sp_test_float(random);
    for (int64_t j = 0; j < n; j++) {
        float sum = 0.0f;

        for (int64_t i = 0; i < rows; i++)
            sum = fmaf(weights[i], sp_element_load(type, x.data, index[i] * stride + j), sum);
        sp_element_store(type, expected.data, j, sum);
    }
    kernels->weighted_sum(type, y.data, x.data, stride, index, weights, rows, n);
    assert_memory_equal(y.data, expected.data, y.bytes);
    guarded_free(&expected);
    guarded_free(&y);
    guarded_free(&x);
}

static void weighted_sums_are_exact(void **state)
{
    const sp_kernels *kernels = kernels_or_skip(state);
    sp_test_random random = {27};

    for (size_t t = 0; t < COUNT(dtypes); t++)
        for (size_t l = 0; l < COUNT(lengths); l++)
            for (int64_t rows = 0; rows <= SUM_ROWS; rows++)
                check_weighted_sum(kernels, &random, dtypes[t], lengths[l], rows);
}

/* ---- conversion ---------------------------------------------------------------------------- */

#define SAMPLES 200000

/* Bit patterns of all kinds: every half, and FP32 of every exponent, NaN and ties included. */
static uint32_t pattern(sp_test_random *random, int64_t i)
{
    static const uint32_t special[] = {0x00000000, 0x80000000, 0x7f800000, 0xff800000, 0x7f800001,
                                       0x7fc00000, 0xffffffff, 0x3f808000, 0x3f818000, 0x477fefff,
                                       0x477ff000, 0x33000000, 0x33000001, 0x38800000, 0x387fffff,
                                       0x7f7fffff, 0x00000001, 0x007fffff};

    return i < (int64_t)COUNT(special) ? special[i] : (uint32_t)sp_test_next(random);
}

static void check_conversion(const sp_kernels *kernels, sp_dtype to, sp_dtype from,
                             const guarded *source, int64_t n)
{
    guarded got = guarded_new((size_t)n * type_bytes(to), type_bytes(to));
    guarded expected = guarded_new(got.bytes, 0);

    for (int64_t i = 0; i < n; i++)
        sp_element_store(to, expected.data, i, sp_element_load(from, source->data, i));
    if (to == from)
        memcpy(expected.data, source->data, got.bytes);
    kernels->convert(to, got.data, from, source->data, n);
    assert_memory_equal(got.data, expected.data, got.bytes);
    guarded_free(&expected);
    guarded_free(&got);
}

static void conversion_is_exact(void **state)
{
    const sp_kernels *kernels = kernels_or_skip(state);
    static const sp_dtype all[] = {SP_DTYPE_F32, SP_DTYPE_BF16, SP_DTYPE_F16};
    sp_test_random random = {25};
    guarded halves = guarded_new(65536 * 2, 2), floats = guarded_new(SAMPLES * 4, 4);

    for (int64_t i = 0; i < 65536; i++)
        ((uint16_t *)(void *)halves.data)[i] = (uint16_t)i;
    for (int64_t i = 0; i < SAMPLES; i++) {
        uint32_t bits = pattern(&random, i);

        memcpy(floats.data + i * 4, &bits, 4);
    }
    for (size_t to = 0; to < 3; to++)
        for (size_t from = 0; from < 3; from++) {
            const guarded *source = all[from] == SP_DTYPE_F32 ? &floats : &halves;

            check_conversion(kernels, all[to], all[from], source,
                             all[from] == SP_DTYPE_F32 ? SAMPLES : 65536);
            for (int64_t n = 1; n < 40; n++)
                check_conversion(kernels, all[to], all[from], source, n);
        }
    guarded_free(&floats);
    guarded_free(&halves);
}

/* ---- token tables -------------------------------------------------------------------------- */

#define VOCAB  11
#define WIDTH  19
#define TOKENS 9
#define SLOTS  3

/* Slot 0 replaces tokens 3 and 10 with BF16 rows, slot 1 nothing, slot 2 token 0 with F32 rows. */
static void override_rows_touches_only_what_is_replaced(void **state)
{
    const sp_kernels *kernels = kernels_or_skip(state);
    static const int32_t row_slot[TOKENS] = {0, -1, 0, 1, 2, 2, 0, -1, 2};
    static const int32_t token[TOKENS] = {3, 3, 10, 3, 3, 0, 0, 0, 10};
    static const int replaced_by[TOKENS] = {0, -1, 1, -1, -1, 0, -1, -1, -1};
    int32_t map0[VOCAB], map2[VOCAB];
    uint16_t rows0[2 * WIDTH];
    float rows2[WIDTH];
    const void *const rows[SLOTS] = {rows0, NULL, rows2};
    const int32_t *const map[SLOTS] = {map0, NULL, map2};
    const int32_t row_type[SLOTS] = {SP_DTYPE_BF16, SP_DTYPE_F32, SP_DTYPE_F32};
    guarded y = guarded_new(TOKENS * (WIDTH + 2) * sizeof(float), 0);
    float *values = (float *)y.data;
    sp_override_args args = {rows,  map,          row_type, row_slot, token,
                             WIDTH, SP_DTYPE_F32, values,   WIDTH + 2};

    for (int32_t i = 0; i < VOCAB; i++)
        map0[i] = map2[i] = -1;
    map0[3] = 0;
    map0[10] = 1;
    map2[0] = 0;
    for (int32_t i = 0; i < 2 * WIDTH; i++)
        rows0[i] = sp_f32_to_bf16(1.0f + (float)i);
    for (int32_t i = 0; i < WIDTH; i++)
        rows2[i] = 1000.1f + (float)i;
    for (int32_t i = 0; i < TOKENS * (WIDTH + 2); i++)
        values[i] = -7.5f;
    kernels->override_rows(&args, 0, 4);
    kernels->override_rows(&args, 4, TOKENS);
    for (int32_t i = 0; i < TOKENS; i++)
        for (int32_t j = 0; j < WIDTH + 2; j++) {
            float expected = -7.5f;

            if (j < WIDTH && replaced_by[i] >= 0)
                expected = row_slot[i] == 0 ? 1.0f + (float)(replaced_by[i] * WIDTH + j)
                                            : 1000.1f + (float)j;
            assert_memory_equal(&values[i * (WIDTH + 2) + j], &expected, sizeof expected);
        }
    guarded_free(&y);
}

static void gather_columns_is_exact(void **state)
{
    const sp_kernels *kernels = kernels_or_skip(state);
    static const int32_t column[4] = {6, 0, 3, 3}, row_index[3] = {2, 0, 1};
    uint16_t a[5 * 7], to[3 * 6];

    for (int i = 0; i < 5 * 7; i++)
        a[i] = (uint16_t)(100 + i);
    memset(to, 0xff, sizeof to);
    kernels->gather_columns(SP_DTYPE_BF16, to, 6, a, 7, 5, column, row_index, 3);
    for (int i = 0; i < 3; i++)
        for (int j = 0; j < 6; j++)
            assert_int_equal(to[i * 6 + j], j < 5 ? 100 + 7 * j + column[row_index[i]] : 0xffff);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FOR_EACH_LEVEL(rmsnorm_matches_double),
        FOR_EACH_LEVEL(rope_matches_double),
        FOR_EACH_LEVEL(silu_mul_matches_double),
        FOR_EACH_LEVEL(silu_has_its_limits),
        FOR_EACH_LEVEL(exp_weights_match_double),
        FOR_EACH_LEVEL(scaled_addition_is_exact),
        FOR_EACH_LEVEL(weighted_sums_are_exact),
        FOR_EACH_LEVEL(add_is_exact),
        FOR_EACH_LEVEL(conversion_is_exact),
        FOR_EACH_LEVEL(override_rows_touches_only_what_is_replaced),
        FOR_EACH_LEVEL(gather_columns_is_exact),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
