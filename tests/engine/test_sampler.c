/*
 * The sampler: kept sets worked out by hand, frequencies by chi-square with fixed seeds, and the
 * promise that a token depends on its row, parameters, seed and position only.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "engine/sampling/sampler.h"

#include <sidepath/engine.h>

#include <math.h>
#include <stdbool.h>
#include <string.h>

static const sp_kernels *kernels(void)
{
    const sp_kernels *best;

    assert_ok(sp_kernels_get(NULL, &best, NULL), NULL);
    return best;
}

static int32_t sample(const float *logits, int32_t vocab, sp_sample_params params,
                      uint64_t position)
{
    void *scratch = sp_malloc(sp_sample_scratch_bytes(vocab)); /* exact: a sanitizer sees more */
    int32_t token = -1;
    sp_error error;

    assert_ok(sp_sample(kernels(), logits, vocab, &params, position, scratch, &token, &error),
              &error);
    assert_true(token >= 0 && token < vocab);
    sp_free(scratch);
    return token;
}

/* A double near another. */
static void assert_near(double found, double want, double most)
{
    if (!(fabs(found - want) <= most))
        fail_msg("%.9g, not %.9g", found, want);
}

/* --- Logprobs ---------------------------------------------------------------------------- */

static double logprob(const float *logits, int32_t vocab, sp_sample_params params, int32_t token)
{
    void *scratch = sp_malloc(sp_sample_scratch_bytes(vocab));
    float found = 1;
    sp_error error;

    assert_ok(sp_sample_logprob(kernels(), logits, vocab, &params, scratch, token, &found, &error),
              &error);
    sp_free(scratch);
    return (double)found;
}

/* Of one half, three tenths and two tenths: what is left of them after each filter. */
static void test_logprobs(void **state)
{
    const float logits[] = {logf(0.5f), logf(0.3f), logf(0.2f), -INFINITY};
    const sp_sample_params plain = {.temperature = 1, .top_p = 1};
    sp_sample_params params = plain;
    double roots = sqrt(0.5) + sqrt(0.3) + sqrt(0.2);

    (void)state;
    assert_near(logprob(logits, 4, plain, 0), log(0.5), 2e-6);
    assert_near(logprob(logits, 4, plain, 2), log(0.2), 2e-6);
    assert_near(logprob(logits, 4, plain, 3), SP_LOGPROB_MIN, 0);
    params.temperature = 2;
    assert_near(logprob(logits, 4, params, 1), log(sqrt(0.3) / roots), 2e-6);
    params = plain;
    params.temperature = 0; /* greedy: as it would be at 1 */
    params.top_k = 1;
    assert_near(logprob(logits, 4, params, 1), log(0.3), 2e-6);
    params = plain;
    params.top_k = 2;
    assert_near(logprob(logits, 4, params, 0), log(0.625), 2e-6);
    assert_near(logprob(logits, 4, params, 2), SP_LOGPROB_MIN, 0);
    params = plain;
    params.top_p = 0.6;
    assert_near(logprob(logits, 4, params, 1), log(0.375), 2e-6);
    assert_near(logprob(logits, 4, params, 2), SP_LOGPROB_MIN, 0);
    params = plain;
    params.min_p = 0.5;
    assert_near(logprob(logits, 4, params, 1), log(0.375), 2e-6);
    assert_near(logprob(logits, 4, params, 2), SP_LOGPROB_MIN, 0);
}

/* --- Random numbers ---------------------------------------------------------------------- */

/* The known answers that the authors of Philox publish for ten rounds. */
static void test_philox(void **state)
{
    static const struct {
        uint32_t counter[4], key[2], want[4];
    } known[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };

    (void)state;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        uint32_t words[4];

        sp_philox4x32(known[i].counter, known[i].key, words);
        assert_memory_equal(words, known[i].want, sizeof words);
    }
    /* 0xe169c58d6627e8d5 >> 11 of the first known answer, times 2^-53. */
    assert_true(sp_sample_uniform(0, 0) == 0x1c2d38b1acc4fdp0 * 0x1p-53);
}

static void test_uniform_is_uniform(void **state)
{
    enum { BINS = 64, N = 64000 };
    int bin[BINS] = {0};
    double chi = 0;

    (void)state;
    for (uint64_t i = 0; i < N; i++) {
        double u = sp_sample_uniform(i / 40, i % 40);

        assert_true(u >= 0 && u < 1);
        bin[(int)(u * BINS)]++;
    }
    for (int i = 0; i < BINS; i++)
        chi += (bin[i] - N / BINS) * (double)(bin[i] - N / BINS) / (N / BINS);
    assert_true(chi < 103.4); /* 63 degrees of freedom: exceeded once in a thousand */
    assert_true(sp_sample_uniform(1, 0) != sp_sample_uniform(0, 1));
    assert_true(sp_sample_uniform(UINT64_C(1) << 32, 0) != sp_sample_uniform(1, 0));
    assert_true(sp_sample_uniform(0, UINT64_C(1) << 32) != sp_sample_uniform(0, 1));
}

/* --- Greedy ------------------------------------------------------------------------------ */

static int32_t greedy(const float *logits, int32_t vocab)
{
    int32_t token = -1;
    sp_error error;

    assert_ok(sp_sample_greedy(logits, vocab, &token, &error), &error);
    return token;
}

static void test_greedy(void **state)
{
    sp_sample_params params = sp_sample_params_default();
    float logits[100];
    int32_t token;

    (void)state;
    for (int32_t vocab = 1; vocab <= 100; vocab++)
        for (int32_t best = 0; best < vocab; best += 7) {
            for (int32_t i = 0; i < vocab; i++)
                logits[i] = (float)(i % 5) - 9.0f;
            logits[best] = -1.0f;
            logits[vocab - 1] = -1.0f; /* a tie behind it, or itself */
            assert_int_equal(greedy(logits, vocab), best);
            assert_ok(sp_sample(kernels(), logits, vocab, &params, 3, NULL, &token, NULL), NULL);
            assert_int_equal(token, best);
        }
    assert_int_equal(greedy((float[]){-INFINITY, -5, -INFINITY}, 3), 1);
    assert_int_equal(greedy((float[]){-0.0f, 0.0f}, 2), 0);
    assert_int_equal(greedy((float[]){-3.4e38f, -3.3e38f}, 2), 1);
}

static void test_temperature_near_zero_is_greedy(void **state)
{
    const float logits[] = {1.0f, 1.5f, 1.5f, 0.5f};

    (void)state;
    for (uint64_t position = 0; position < 50; position++) {
        sp_sample_params params = {.temperature = 1e-7, .top_p = 1, .seed = 9};

        assert_int_equal(sample(logits, 4, params, position), 1);
        params.temperature = 2;
        params.top_k = 1;
        assert_int_equal(sample(logits, 4, params, position), 1);
        params.top_k = 0;
        params.top_p = 0;
        assert_int_equal(sample(logits, 4, params, position), 1);
    }
}

/* --- Kept sets --------------------------------------------------------------------------- */

/* Draws many positions; `want` marks the tokens that must come, and no other may. */
static void check_kept(const float *logits, int32_t vocab, sp_sample_params params,
                       const char *want)
{
    bool seen[32] = {false};

    for (uint64_t position = 0; position < 600; position++)
        seen[sample(logits, vocab, params, position)] = true;
    for (int32_t i = 0; i < vocab; i++)
        if (seen[i] != (want[i] == '1'))
            fail_msg("token %d is %s", i, seen[i] ? "kept" : "not kept");
}

static sp_sample_params filters(int32_t top_k, double top_p, double min_p)
{
    return (sp_sample_params){1.0, top_k, top_p, min_p, 77};
}

static void test_kept_sets(void **state)
{
    /* Probabilities 8, 1, 4, 2, 1 of 16, in this order. */
    const float logits[] = {logf(8), logf(1), logf(4), logf(2), logf(1)};
    const float equal[] = {2, 2, 2, 2};

    (void)state;
    check_kept(logits, 5, filters(0, 1, 0), "11111");
    check_kept(logits, 5, filters(2, 1, 0), "10100");
    check_kept(logits, 5, filters(4, 1, 0), "11110"); /* tokens 1 and 4 tie: the lower id */
    check_kept(logits, 5, filters(5, 1, 0), "11111");
    check_kept(logits, 5, filters(99, 1, 0), "11111"); /* more than the vocabulary */
    check_kept(logits, 5, filters(0, 0.49, 0), "10000");
    check_kept(logits, 5, filters(0, 0.51, 0), "10100");
    check_kept(logits, 5, filters(0, 0.74, 0), "10100");
    check_kept(logits, 5, filters(0, 0.76, 0), "10110");
    check_kept(logits, 5, filters(0, 0.93, 0), "11110"); /* 15 of 16 are enough */
    check_kept(logits, 5, filters(0, 0.94, 0), "11111");
    check_kept(logits, 5, filters(0, 0, 0), "10000");
    check_kept(logits, 5, filters(0, 1, 0.12), "11111"); /* 1 of 8 is 0.125 */
    check_kept(logits, 5, filters(0, 1, 0.13), "10110");
    check_kept(logits, 5, filters(0, 1, 0.26), "10100");
    check_kept(logits, 5, filters(0, 1, 1), "10000");
    check_kept(equal, 4, filters(0, 1, 1), "1111"); /* all as good as the best */
    check_kept(equal, 4, filters(3, 1, 0), "1110");
    check_kept(equal, 4, filters(0, 0.5, 0), "1100"); /* exactly half is enough, exactly */
    check_kept(equal, 4, filters(0, 0.51, 0), "1110");
}

static void test_filters_together(void **state)
{
    const float logits[] = {logf(8), logf(1), logf(4), logf(2), logf(1)};

    (void)state;
    /* Top-p looks at the mass that top-k left: 12 of 16. 8 of 12 is 0.667. */
    check_kept(logits, 5, filters(2, 0.66, 0), "10000");
    check_kept(logits, 5, filters(2, 0.67, 0), "10100");
    check_kept(logits, 5, filters(3, 0.85, 0), "10100"); /* 12 of 14 is 0.857 */
    check_kept(logits, 5, filters(3, 0.86, 0), "10110");
    /* Min-p comes last: top-p still counts what min-p takes away. 0.8 of 16 needs 8, 4, 2. */
    check_kept(logits, 5, filters(0, 0.8, 0.3), "10100");
    check_kept(logits, 5, filters(0, 0.6, 0.1), "10100");
    check_kept(logits, 5, filters(4, 0.99, 0.2), "10110");
}

static void test_ruled_out_tokens(void **state)
{
    const float logits[] = {-INFINITY, 1, -INFINITY, 1, -INFINITY};

    (void)state;
    check_kept(logits, 5, filters(0, 1, 0), "01010");
    check_kept(logits, 5, filters(4, 1, 0), "01010");
    check_kept(logits, 5, filters(0, 0.99, 0), "01010");
    check_kept(logits, 5, filters(4, 0.99, 0.5), "01010");
}

/* --- Which token ------------------------------------------------------------------------- */

/* The definition in double: filters by full sorting, then the unit interval in order of ids. */
static int32_t reference(const float *logits, int32_t vocab, sp_sample_params params,
                         uint64_t position, double *out_gap)
{
    static double p[4096];
    static int32_t order[4096];
    int32_t n = vocab;
    double mass = 0, sum = 0, u = sp_sample_uniform(params.seed, position);

    for (int32_t i = 0; i < vocab; i++) {
        int32_t at = i;

        for (; at > 0 && logits[order[at - 1]] < logits[i]; at--)
            order[at] = order[at - 1];
        order[at] = i;
    }
    if (params.top_k > 0 && params.top_k < n)
        n = params.top_k;
    for (int32_t i = 0; i < n; i++) {
        p[order[i]] =
            exp(((double)logits[order[i]] - (double)logits[order[0]]) / params.temperature);
        mass += p[order[i]];
    }
    *out_gap = 1;
    for (int32_t i = 0; i < n; i++) {
        sum += p[order[i]];
        if (params.top_p < 1)
            *out_gap = fmin(*out_gap, fabs(sum / mass - params.top_p));
        if (params.min_p > 0)
            *out_gap = fmin(*out_gap, fabs(p[order[i]] - params.min_p));
        if (params.top_p < 1 && sum >= params.top_p * mass)
            n = i + 1;
    }
    while (p[order[n - 1]] < params.min_p)
        n--;
    for (int32_t i = n; i < vocab; i++)
        p[order[i]] = 0;
    mass = sum = 0;
    for (int32_t i = 0; i < vocab; i++)
        mass += p[i];
    for (int32_t i = 0; i < vocab; i++) {
        sum += p[i];
        *out_gap = fmin(*out_gap, fabs(sum / mass - u));
        if (sum > u * mass)
            return i;
    }
    return vocab - 1;
}

static void test_against_definition(void **state)
{
    static float logits[1500];
    sp_test_random random = {31};
    int n_compared = 0;

    (void)state;
    for (int round = 0; round < 3000; round++) {
        int32_t vocab = 1 + (int32_t)sp_test_below(&random, round % 50 ? 90 : 1500);
        sp_sample_params params = {
            .temperature = 0.2 + 0.1 * sp_test_below(&random, 20),
            .top_k = round % 2 ? (int32_t)sp_test_below(&random, 40) : 0,
            .top_p = round % 3 ? 0.05 + 0.09 * sp_test_below(&random, 11) : 1,
            .min_p = round % 5 ? 0 : 0.02 * sp_test_below(&random, 20),
            .seed = sp_test_next(&random),
        };
        double gap;
        int32_t want;

        for (int32_t i = 0; i < vocab; i++) /* rounded, so that there are ties */
            logits[i] = roundf(sp_test_float(&random) * 40) / 8;
        want = reference(logits, vocab, params, (uint64_t)round, &gap);
        if (gap < 1e-5) /* a border within the rounding of FP32 weights */
            continue;
        assert_int_equal(sample(logits, vocab, params, (uint64_t)round), want);
        n_compared++;
    }
    assert_true(n_compared > 2900);
}

/* Frequencies at temperature 0.5 and 2: the probabilities of 8 : 4 : 2 : 1 : 1 squared and
 * rooted. */
static void check_frequencies(double temperature, double exponent, uint64_t seed)
{
    enum { N = 40000 };
    const double weights[] = {8, 4, 2, 1, 1};
    float logits[5];
    int count[5] = {0};
    double mass = 0, chi = 0;
    sp_sample_params params = {.temperature = temperature, .top_p = 1, .seed = seed};

    for (int i = 0; i < 5; i++) {
        logits[i] = (float)log(weights[i]);
        mass += pow(weights[i], exponent);
    }
    for (uint64_t position = 0; position < N; position++)
        count[sample(logits, 5, params, position)]++;
    for (int i = 0; i < 5; i++) {
        double want = N * pow(weights[i], exponent) / mass;

        chi += (count[i] - want) * (count[i] - want) / want;
    }
    assert_true(chi < 18.47); /* 4 degrees of freedom: exceeded once in a thousand */
}

static void test_frequencies(void **state)
{
    (void)state;
    check_frequencies(1, 1, 1);
    check_frequencies(0.5, 2, 2);
    check_frequencies(2, 0.5, 3);
    check_frequencies(1000, 0.001, 4);
}

/* --- Depends on nothing else ------------------------------------------------------------- */

static void test_depends_on_nothing_else(void **state)
{
    static float logits[997], padded[1500];
    sp_test_random random = {8};

    (void)state;
    for (int32_t i = 0; i < 997; i++)
        logits[i] = 5 * sp_test_float(&random);
    memcpy(padded + 1, logits, sizeof logits); /* another alignment, ruled-out tokens behind */
    for (int32_t i = 998; i < 1500; i++)
        padded[i] = -INFINITY;
    for (uint64_t position = 0; position < 200; position++) {
        sp_sample_params params = {.temperature = 0.8, .top_p = 0.9, .seed = 5};
        int32_t token = sample(logits, 997, params, position);

        assert_int_equal(sample(logits, 997, params, position), token);
        assert_int_equal(sample(padded + 1, 1499, params, position), token);
        params.top_k = 997; /* a filter that takes nothing away */
        assert_int_equal(sample(logits, 997, params, position), token);
    }
}

static void test_scratch_stays_inside(void **state)
{
    const int32_t vocab = 333;
    size_t bytes = sp_sample_scratch_bytes(vocab);
    unsigned char *scratch = sp_malloc(bytes + 64);
    float logits[333];
    sp_test_random random = {2};

    (void)state;
    assert_int_equal(bytes, 8 * 333);
    memset(scratch, 0xa5, bytes + 64);
    for (int32_t i = 0; i < vocab; i++)
        logits[i] = sp_test_float(&random);
    for (int32_t k = 0; k <= vocab; k += 37) {
        sp_sample_params params = {1, k, k % 2 ? 1 : 0.95, 0.01, 1};
        int32_t token;

        assert_ok(sp_sample(kernels(), logits, vocab, &params, 0, scratch, &token, NULL), NULL);
        for (size_t i = bytes; i < bytes + 64; i++)
            assert_int_equal(scratch[i], 0xa5);
    }
    sp_free(scratch);
}

/* --- Refused ----------------------------------------------------------------------------- */

static void check_bad_logits(float bad, int32_t at, const char *code)
{
    float logits[40], scratch[80];
    sp_sample_params params = {1, 0, 1, 0, 0};
    int32_t token = -7;
    sp_error error;

    for (int i = 0; i < 40; i++)
        logits[i] = 1;
    logits[at] = bad;
    assert_int_equal(sp_sample(kernels(), logits, 40, &params, 0, scratch, &token, &error),
                     SP_ERR_INPUT);
    assert_string_equal(error.code, code);
    assert_int_equal(error.position, at);
    assert_int_equal(sp_sample_greedy(logits, 40, &token, &error), SP_ERR_INPUT);
    assert_int_equal(token, -7);
}

static void test_bad_logits(void **state)
{
    float none[20];
    int32_t token = -7;
    sp_error error;

    (void)state;
    for (int32_t at = 0; at < 40; at += 13) {
        check_bad_logits(NAN, at, "bad-logits");
        check_bad_logits(-NAN, at, "bad-logits");
        check_bad_logits(INFINITY, at, "bad-logits");
    }
    for (int i = 0; i < 20; i++)
        none[i] = -INFINITY;
    assert_int_equal(sp_sample_greedy(none, 20, &token, &error), SP_ERR_INPUT);
    assert_string_equal(error.code, "no-token");
    assert_int_equal(sp_sample_greedy(none, 0, &token, &error), SP_ERR_ARGUMENT);
    assert_int_equal(token, -7);
}

static void test_scratch_of_nothing(void **state)
{
    (void)state;
    assert_int_equal(sp_sample_scratch_bytes(0), 0);
    assert_int_equal(sp_sample_scratch_bytes(-5), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_philox),
        cmocka_unit_test(test_logprobs),
        cmocka_unit_test(test_uniform_is_uniform),
        cmocka_unit_test(test_greedy),
        cmocka_unit_test(test_temperature_near_zero_is_greedy),
        cmocka_unit_test(test_kept_sets),
        cmocka_unit_test(test_filters_together),
        cmocka_unit_test(test_ruled_out_tokens),
        cmocka_unit_test(test_against_definition),
        cmocka_unit_test(test_frequencies),
        cmocka_unit_test(test_depends_on_nothing_else),
        cmocka_unit_test(test_scratch_stays_inside),
        cmocka_unit_test(test_bad_logits),
        cmocka_unit_test(test_scratch_of_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
