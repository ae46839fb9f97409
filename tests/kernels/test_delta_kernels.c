/*
 * test_delta_kernels.c: the entries of the gated delta rule of every level against double
 * precision, at sizes around every tile, with guard zones; and that the sums of a row or column are
 * the same bits whatever is computed with them.
 */
#include "kernel_test.h"

#include "kernels/scalar_math.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

static const int64_t lengths[] = {1, 5, 7, 8, 9, 16, 24, 31, 33, 64, 128, 193};
static const sp_dtype dtypes[] = {SP_DTYPE_BF16, SP_DTYPE_F32};

static guarded vector_new(sp_test_random *random, sp_dtype type, int64_t n, float size)
{
    guarded v = guarded_new((size_t)n * type_bytes(type), type_bytes(type));

    fill_matrix(random, type, v.data, 1, n, n, size);
    return v;
}

/* FP32 on a 64-byte boundary. */
static guarded matrix_new(sp_test_random *random, int64_t rows, int64_t n)
{
    guarded m = guarded_new((size_t)(rows * n) * sizeof(float), 0);

    fill_matrix(random, SP_DTYPE_F32, m.data, rows, n, n, 1.0f);
    return m;
}

static float *floats(const guarded *g)
{
    return (float *)(void *)g->data;
}

static double value_at(sp_dtype type, const guarded *v, int64_t i)
{
    return sp_element_load(type, v->data, i);
}

static double silu(double x)
{
    return x / (1.0 + exp(-x));
}

/* ---- gates, norms, the convolution ---------------------------------------------------------- */

static void sigmoid_mul_matches_double(void **state)
{
    const sp_kernels *kernels = kernels_or_skip(state);
    sp_test_random random = {31};

    for (size_t l = 0; l < 2 * COUNT(lengths); l++) {
        sp_dtype type = dtypes[l % 2];
        int64_t n = lengths[l / 2];
        guarded y = vector_new(&random, type, n, 4.0f), gate = vector_new(&random, type, n, 30.0f);
        guarded before = guarded_new(y.bytes, 0);

        memcpy(before.data, y.data, y.bytes);
        kernels->sigmoid_mul(type, y.data, gate.data, n);
        for (int64_t i = 0; i < n; i++) {
            double expected = value_at(type, &before, i) / (1.0 + exp(-value_at(type, &gate, i)));

            check_close(value_at(type, &y, i), expected,
                        fabs(expected) * 8 * 0x1p-24 + half_ulp(type, expected), "sigmoid_mul", n,
                        i);
        }
        guarded_free(&before);
        guarded_free(&gate);
        guarded_free(&y);
    }
}

static void check_conv(const sp_kernels *kernels, sp_test_random *random, sp_dtype type,
                       int64_t width, int64_t n)
{
    guarded rows[8], y = guarded_new((size_t)n * type_bytes(type), type_bytes(type));
    guarded w = vector_new(random, SP_DTYPE_BF16, n * width, 1.0f);
    const void *x[8];

    for (int64_t t = 0; t < width; t++) {
        rows[t] = vector_new(random, type, n, 3.0f);
        x[t] = rows[t].data;
    }
    kernels->conv_silu(type, y.data, x, (const uint16_t *)(void *)w.data, width, n);
    for (int64_t i = 0; i < n; i++) {
        double sum = 0, size = 0, expected;

        for (int64_t t = 0; t < width; t++) {
            double term = value_at(SP_DTYPE_BF16, &w, i * width + t) * value_at(type, &rows[t], i);

            sum += term;
            size += fabs(term);
        }
        expected = silu(sum);
        check_close(value_at(type, &y, i), expected,
                    (size * 12 + fabs(expected) * 8) * 0x1p-24 + half_ulp(type, expected), "conv",
                    n, i);
    }
    for (int64_t t = 0; t < width; t++)
        guarded_free(&rows[t]);
    guarded_free(&w);
    guarded_free(&y);
}

static void conv_matches_double(void **state)
{
    const sp_kernels *kernels = kernels_or_skip(state);
    sp_test_random random = {32};

    for (size_t l = 0; l < COUNT(lengths); l++)
        for (int64_t width = 2; width <= 8; width++)
            for (size_t t = 0; t < COUNT(dtypes); t++)
                check_conv(kernels, &random, dtypes[t], width, lengths[l]);
}

static void check_norms(const sp_kernels *kernels, sp_test_random *random, sp_dtype type, int64_t n)
{
    guarded x = vector_new(random, type, n, 2.0f), y = guarded_new(x.bytes, type_bytes(type));
    guarded o = vector_new(random, SP_DTYPE_F32, n, 2.0f), gate = vector_new(random, type, n, 3.0f);
    guarded w = vector_new(random, SP_DTYPE_F32, n, 1.0f), z = guarded_new(x.bytes, 0);
    double bound = ((double)n / 8.0 + 24.0) * 0x1p-24, of_x = 0, of_o = 0;

    for (int64_t i = 0; i < n; i++) {
        of_x += value_at(type, &x, i) * value_at(type, &x, i);
        of_o += value_at(SP_DTYPE_F32, &o, i) * value_at(SP_DTYPE_F32, &o, i);
    }
    kernels->unit_norm(type, y.data, x.data, n, 1e-6f);
    kernels->rmsnorm_gated(type, z.data, floats(&o), floats(&w), gate.data, n, 1e-5f);
    for (int64_t i = 0; i < n; i++) {
        double expected = value_at(type, &x, i) / sqrt(of_x + 1e-6);

        check_close(value_at(type, &y, i), expected,
                    fabs(expected) * bound + half_ulp(type, expected), "unit_norm", n, i);
        expected = value_at(SP_DTYPE_F32, &o, i) / sqrt(of_o / (double)n + 1e-5) *
                   value_at(SP_DTYPE_F32, &w, i) * silu(value_at(type, &gate, i));
        check_close(value_at(type, &z, i), expected,
                    fabs(expected) * bound + half_ulp(type, expected), "rmsnorm_gated", n, i);
    }
    kernels->unit_norm(type, x.data, x.data, n, 1e-6f);
    assert_memory_equal(x.data, y.data, x.bytes);
    guarded_free(&z);
    guarded_free(&w);
    guarded_free(&gate);
    guarded_free(&o);
    guarded_free(&y);
    guarded_free(&x);
}

static void norms_match_double(void **state)
{
    const sp_kernels *kernels = kernels_or_skip(state);
    sp_test_random random = {33};

    for (size_t l = 0; l < COUNT(lengths); l++)
        for (size_t t = 0; t < COUNT(dtypes); t++)
            check_norms(kernels, &random, dtypes[t], lengths[l]);
}

/* Not a matter of levels. Far below 0 it is e^x, far above x. */
/* What is wider than AVX2 only computes more of the same values. */
static void wide_levels_have_the_bits_of_avx2(void **state)
{
    const sp_kernels *kernels = kernels_or_skip(state), *narrow;
    sp_test_random random = {34};

    if (sp_kernels_get("avx2", &narrow, NULL) != SP_OK || strcmp(kernels->level, "scalar") == 0)
        skip();
    for (size_t l = 0; l < 3 * COUNT(lengths); l++) {
        static const sp_dtype all[] = {SP_DTYPE_BF16, SP_DTYPE_F32, SP_DTYPE_F16};
        sp_dtype type = all[l % 3];
        int64_t n = lengths[l / 3];
        guarded x[4], w = vector_new(&random, SP_DTYPE_BF16, 4 * n, 1.0f);
        guarded hidden = vector_new(&random, SP_DTYPE_F32, n, 4.0f);
        guarded norm = vector_new(&random, SP_DTYPE_F32, n, 2.0f);
        guarded y = vector_new(&random, type, n, 1.0f), expected = vector_new(&random, type, n, 1);
        const void *rows[4];

        for (int t = 0; t < 4; t++) {
            x[t] = vector_new(&random, type, n, 9.0f);
            rows[t] = x[t].data;
        }
        for (int64_t width = 3; width <= 4; width++) {
            kernels->conv_silu(type, y.data, rows, (const void *)w.data, width, n);
            narrow->conv_silu(type, expected.data, rows, (const void *)w.data, width, n);
            assert_memory_equal(y.data, expected.data, y.bytes);
        }
        kernels->unit_norm(type, y.data, rows[0], n, 1e-6f);
        narrow->unit_norm(type, expected.data, rows[0], n, 1e-6f);
        assert_memory_equal(y.data, expected.data, y.bytes);
        kernels->rmsnorm_gated(type, y.data, floats(&hidden), floats(&norm), rows[1], n, 1e-6f);
        narrow->rmsnorm_gated(type, expected.data, floats(&hidden), floats(&norm), rows[1], n,
                              1e-6f);
        assert_memory_equal(y.data, expected.data, y.bytes);
        for (int t = 0; t < 4; t++)
            guarded_free(&x[t]);
        guarded_free(&expected);
        guarded_free(&y);
        guarded_free(&norm);
        guarded_free(&hidden);
        guarded_free(&w);
    }
}

static void softplus_matches_double(void **state)
{
    (void)state;
    for (double x = -100; x < 100; x += 0.0137) {
        float at = (float)x;
        double expected = log1p(exp((double)at));

        if ((double)at > 40)
            expected = (double)at;
        check_close((double)sp_softplus_scalar(at), expected,
                    expected * 4e-7 + 0x1p-147, /* 4 of the smallest */
                    "softplus", 0, 0);
    }
    assert_true(isnan(sp_softplus_scalar(NAN)));
    assert_true(sp_softplus_scalar(INFINITY) > 3e38f);
    assert_true(sp_softplus_scalar(-INFINITY) < 1e-37f);
}

/* ---- the rule ------------------------------------------------------------------------------- */

static const int64_t row_counts[] = {1, 2, 3, 4, 5, 6, 7, 13, 32, 64};
static const int64_t widths[] = {16, 32, 48, 64, 80, 128, 144};
static const int64_t depths[] = {1, 7, 16, 24, 128};

/* All rows against double, and each alone against among the others. */
static void check_read(const sp_kernels *kernels, sp_test_random *random, int64_t rows, int64_t k,
                       int64_t n)
{
    guarded x = matrix_new(random, rows, k), s = matrix_new(random, k, n);
    guarded y = guarded_new((size_t)(rows * n) * sizeof(float), 0);
    guarded alone = guarded_new((size_t)n * sizeof(float), 0);

    kernels->state_read(floats(&y), floats(&x), floats(&s), rows, k, n);
    for (int64_t r = 0; r < rows; r++) {
        kernels->state_read(floats(&alone), floats(&x) + r * k, floats(&s), 1, k, n);
        assert_memory_equal(alone.data, floats(&y) + r * n, alone.bytes);
        for (int64_t j = 0; j < n; j++) {
            double sum = 0, size = 0;

            for (int64_t d = 0; d < k; d++) {
                double term = (double)floats(&x)[r * k + d] * (double)floats(&s)[d * n + j];

                sum += term;
                size += fabs(term);
            }
            check_close(floats(&y)[r * n + j], sum, size * (double)(k + 1) * 0x1p-24, "state_read",
                        r, j);
        }
    }
    guarded_free(&alone);
    guarded_free(&y);
    guarded_free(&s);
    guarded_free(&x);
}

/* Against double, and in two halves against at once: with a decay of 1 between them. */
static void check_fold(const sp_kernels *kernels, sp_test_random *random, int64_t rows, int64_t k,
                       int64_t n)
{
    guarded x = matrix_new(random, rows, k), u = matrix_new(random, rows, n);
    guarded s = matrix_new(random, k, n), before = guarded_new(s.bytes, 0);
    guarded halves = guarded_new(s.bytes, 0), weights = matrix_new(random, 1, rows);
    int64_t half = rows / 2;

    memcpy(before.data, s.data, s.bytes);
    memcpy(halves.data, s.data, s.bytes);
    kernels->state_fold(floats(&s), 0.75f, floats(&x), floats(&weights), floats(&u), rows, k, n);
    kernels->state_fold(floats(&halves), 0.75f, floats(&x), floats(&weights), floats(&u), half, k,
                        n);
    kernels->state_fold(floats(&halves), 1.0f, floats(&x) + half * k, floats(&weights) + half,
                        floats(&u) + half * n, rows - half, k, n);
    assert_memory_equal(s.data, halves.data, s.bytes);
    for (int64_t d = 0; d < k; d++)
        for (int64_t j = 0; j < n; j++) {
            double sum = 0.75 * (double)floats(&before)[d * n + j], size = fabs(sum);

            for (int64_t r = 0; r < rows; r++) {
                double term = (double)floats(&x)[r * k + d] * (double)floats(&weights)[r] *
                              (double)floats(&u)[r * n + j];

                sum += term;
                size += fabs(term);
            }
            check_close(floats(&s)[d * n + j], sum, size * (double)(rows + 3) * 0x1p-24,
                        "state_fold", d, j);
        }
    guarded_free(&weights);
    guarded_free(&halves);
    guarded_free(&before);
    guarded_free(&s);
    guarded_free(&u);
    guarded_free(&x);
}

static void states_match_double(void **state)
{
    const sp_kernels *kernels = kernels_or_skip(state);
    sp_test_random random = {34};

    for (size_t w = 0; w < COUNT(widths); w++)
        for (size_t d = 0; d < COUNT(depths); d++)
            for (size_t r = 0; r < COUNT(row_counts); r += 1 + d % 2) {
                check_read(kernels, &random, row_counts[r], depths[d], widths[w]);
                check_fold(kernels, &random, row_counts[r], depths[d], widths[w]);
            }
}

static void dots_match_double(void **state)
{
    const sp_kernels *kernels = kernels_or_skip(state);
    sp_test_random random = {35};

    for (size_t i = 0; i < COUNT(row_counts) * COUNT(depths); i++) {
        int64_t rows = row_counts[i % COUNT(row_counts)], k = depths[i / COUNT(row_counts)];
        int64_t columns = row_counts[(i + 3) % COUNT(row_counts)], stride = columns + 3;
        guarded x = matrix_new(&random, rows, k), z = matrix_new(&random, columns, k);
        guarded y = guarded_new((size_t)(rows * stride - 3) * sizeof(float), 0);

        kernels->dots(floats(&y), stride, floats(&x), floats(&z), rows, columns, k);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < columns; j++) {
                double sum = 0, size = 0;
                float alone;

                for (int64_t d = 0; d < k; d++) {
                    double term = (double)floats(&x)[r * k + d] * (double)floats(&z)[j * k + d];

                    sum += term;
                    size += fabs(term);
                }
                check_close(floats(&y)[r * stride + j], sum, size * (double)(k + 4) * 0x1p-24,
                            "dots", r, j);
                kernels->dots(&alone, 1, floats(&x) + r * k, floats(&z) + j * k, 1, 1, k);
                assert_memory_equal(&alone, floats(&y) + r * stride + j, sizeof alone);
            }
        guarded_free(&y);
        guarded_free(&z);
        guarded_free(&x);
    }
}

/* Row i of a chunk: u and o against double, the earlier rows untouched. */
static void check_row(const sp_kernels *kernels, sp_test_random *random, int64_t i, int64_t n)
{
    guarded u = matrix_new(random, i + 1, n), before = guarded_new(u.bytes, 0);
    guarded rows = matrix_new(random, 3, n), weights = matrix_new(random, 2, i + 1);
    guarded o = guarded_new((size_t)n * sizeof(float), 0);
    const float *v = floats(&rows), *sk = v + n, *sq = sk + n;
    const float *wk = floats(&weights), *wq = wk + i + 1;
    const sp_delta_row_args args = {.i = i,
                                    .n = n,
                                    .u = floats(&u),
                                    .o = floats(&o),
                                    .v = v,
                                    .sk = sk,
                                    .sq = sq,
                                    .wk = wk,
                                    .wq = wq,
                                    .beta = 0.6f,
                                    .decay = 0.9f,
                                    .scale = 0.25f};
    double bound = (double)(i + 6) * 0x1p-24;

    memcpy(before.data, u.data, u.bytes);
    kernels->delta_row(&args);
    assert_memory_equal(u.data, before.data, (size_t)(i * n) * sizeof(float));
    for (int64_t j = 0; j < n; j++) {
        double rest = (double)v[j] - (double)args.decay * (double)sk[j];
        double out = (double)args.decay * (double)sq[j];
        double size = fabs((double)v[j]) + fabs((double)sk[j]), out_size = fabs(out), new_u;

        for (int64_t r = 0; r < i; r++) {
            double earlier = (double)floats(&before)[r * n + j];

            rest -= (double)wk[r] * earlier;
            out += (double)wq[r] * earlier;
            size += fabs((double)wk[r] * earlier);
            out_size += fabs((double)wq[r] * earlier);
        }
        new_u = (double)args.beta * rest;
        check_close(floats(&u)[i * n + j], new_u, size * bound, "u", i, j);
        out += (double)wq[i] * new_u;
        out_size += fabs((double)wq[i]) * size;
        check_close(floats(&o)[j], 0.25 * out, 0.25 * out_size * 2 * bound, "o", i, j);
    }
    guarded_free(&o);
    guarded_free(&weights);
    guarded_free(&rows);
    guarded_free(&before);
    guarded_free(&u);
}

static void delta_rows_match_double(void **state)
{
    const sp_kernels *kernels = kernels_or_skip(state);
    sp_test_random random = {36};

    for (size_t w = 0; w < COUNT(widths); w++)
        for (int64_t i = 0; i < 32; i++)
            check_row(kernels, &random, i, widths[w]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FOR_EACH_LEVEL(sigmoid_mul_matches_double),
        FOR_EACH_LEVEL(conv_matches_double),
        FOR_EACH_LEVEL(norms_match_double),
        FOR_EACH_LEVEL(wide_levels_have_the_bits_of_avx2),
        cmocka_unit_test(softplus_matches_double),
        FOR_EACH_LEVEL(states_match_double),
        FOR_EACH_LEVEL(dots_match_double),
        FOR_EACH_LEVEL(delta_rows_match_double),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
