/* test_cuda_choose_rules.c: the numbers of a choice on the device, on the host: against the CPU's
 * sampler, penalties and logprobs on random logits. */
#include "engine/sampling/logprobs.h"
#include "engine/sampling/penalties.h"
#include "support/choose_twin.h"

#include <string.h>

static float *random_logits(sp_test_random *random, int32_t vocab, float size)
{
    float *logits = malloc((size_t)vocab * sizeof *logits);

    assert_non_null(logits);
    for (int32_t i = 0; i < vocab; i++)
        logits[i] = (sp_test_float(random) + sp_test_float(random) + sp_test_float(random)) * size;
    return logits;
}

static void keys_rank_as_logits_and_ids_do(void **state)
{
    static const float logits[] = {-INFINITY, -FLT_MAX, -2, -1e-40f, 0, 1e-40f, 1, 1.5f, FLT_MAX};
    enum { N = sizeof logits / sizeof logits[0] };

    (void)state;
    for (int32_t i = 0; i + 1 < N; i++) {
        assert_true(sp_choose_key(logits[i], 0) < sp_choose_key(logits[i + 1], 9));
        assert_true(sp_choose_key(logits[i], 4) > sp_choose_key(logits[i], 5));
    }
    for (int32_t i = 0; i < N; i++) {
        assert_true(sp_choose_key_logit(sp_choose_key(logits[i], 7)) <= logits[i]);
        assert_true(sp_choose_key_logit(sp_choose_key(logits[i], 7)) >= logits[i]);
        assert_int_equal(sp_choose_key_id(sp_choose_key(logits[i], 262143)), 262143);
        assert_false(sp_choose_is_bad(logits[i]));
    }
    assert_true(sp_choose_key(-0.0f, 3) == sp_choose_key(0.0f, 3));
    assert_true(sp_choose_is_bad(INFINITY) && sp_choose_is_bad(NAN) && sp_choose_is_bad(-NAN));
}

static void parts_are_rounded_once(void **state)
{
    sp_test_random random = {1};

    (void)state;
    assert_true(sp_choose_part(1) == 1ull << 45);
    assert_true(sp_choose_part(0x1p-45f) == 1);
    assert_true(sp_choose_part(0x1p-46f) == 0);
    assert_true(sp_choose_part(0x1.8p-45f) == 2);
    assert_true(sp_choose_part(0) == 0);
    for (int i = 0; i < 100000; i++) {
        float weight = (float)exp(30 * (double)sp_test_float(&random) - 30);
        double exact = (double)weight * 0x1p45, part = (double)sp_choose_part(weight);

        assert_true(fabs(part - exact) <= 0.5);
    }
}

static void points_are_products(void **state)
{
    (void)state;
    assert_true(sp_choose_point(UINT64_MAX, UINT64_MAX) == UINT64_MAX - 1);
    assert_true(sp_choose_point(3, UINT64_MAX) == 2);
    assert_true(sp_choose_point(1, UINT64_MAX) == 0);
    assert_true(sp_choose_point(10, 1ull << 63) == 5);
    assert_true(sp_choose_point(0x123456789abcdef0ull, 0xfedcba9876543210ull) ==
                0x121fa00ad77d7422ull);
    assert_true(sp_choose_target(0.5, 10) == 5 && sp_choose_target(0.51, 10) == 6);
    assert_true(sp_choose_target(0, 10) == 1);
    assert_true(sp_choose_target(1 - 0x1p-53, 1ull << 53) == (1ull << 53) - 1);
    assert_true(sp_choose_target(1 - 0x1p-53, (1ull << 60) + 1) <= 1ull << 60);
}

/* ---- against the CPU ----------------------------------------------------------------------- */

static sp_sample_params random_params(sp_test_random *random)
{
    static const double temperatures[] = {0, 0.1, 0.6, 0.7, 1, 1.5, 20, 1000};
    static const int32_t tops[] = {0, -1, 1, 2, 20, 50, 1000, 1 << 30};
    static const double masses[] = {1, 1, 0.95, 0.8, 0.5, 0.1, 0.999, 0};
    static const double shares[] = {0, 0, 0, 0.05, 0.2, 1, 1e-6, 0.01};

    return (sp_sample_params){.temperature = temperatures[sp_test_below(random, 8)],
                              .top_k = tops[sp_test_below(random, 8)],
                              .top_p = masses[sp_test_below(random, 8)],
                              .min_p = shares[sp_test_below(random, 8)],
                              .seed = sp_test_next(random)};
}

/* Where the CPU's sums in double round otherwise than the exact ones, another token may follow. */
static int count_other_tokens(int32_t vocab, int times, float size, bool ties)
{
    sp_test_random random = {(uint64_t)vocab + (uint64_t)times};
    const sp_kernels *kernels;
    void *scratch = malloc(sp_sample_scratch_bytes(vocab));
    int others = 0;

    assert_non_null(scratch);
    assert_ok(sp_kernels_get("scalar", &kernels, NULL), NULL);
    for (int i = 0; i < times; i++) {
        sp_sample_params params = random_params(&random);
        sp_cuda_sample_row row = twin_row(&params, (uint64_t)i);
        float *logits = random_logits(&random, vocab, size);
        int32_t token = -1;

        for (int32_t id = 0; id < vocab; id++) {
            logits[id] = ties ? floorf(logits[id]) : logits[id];
            if (i % 3 == 1 && id % 7 != 0)
                logits[id] = -INFINITY;
        }
        assert_ok(sp_sample(kernels, logits, vocab, &params, (uint64_t)i, scratch, &token, NULL),
                  NULL);
        others += twin_choose(&row, logits, vocab) != token;
        free(logits);
    }
    free(scratch);
    return others;
}

static void tokens_are_those_of_the_cpu(void **state)
{
    (void)state;
    assert_int_equal(count_other_tokens(1, 20, 3, false), 0);
    assert_int_equal(count_other_tokens(5, 500, 3, false), 0);
    assert_int_equal(count_other_tokens(1000, 2000, 4, false), 0);
    assert_int_equal(count_other_tokens(1000, 500, 4, true), 0);
    assert_int_equal(count_other_tokens(151936, 60, 5, false), 0);
}

static void changes_are_those_of_the_cpu(void **state)
{
    enum { VOCAB = 64, TOKENS = 60, PROMPT = 25 };
    sp_test_random random = {8};

    (void)state;
    for (int again = 0; again < 200; again++) {
        sp_logit_bias bias[2] = {{3, 2.5f}, {40, -100}};
        sp_penalties penalties = {sp_test_float(&random), sp_test_float(&random),
                                  1.1 + 0.9 * (double)sp_test_float(&random), bias, 2};
        sp_cuda_sample_row row = {.repetition = (float)penalties.repetition,
                                  .frequency = (float)penalties.frequency,
                                  .presence = (float)penalties.presence};
        int32_t tokens[TOKENS], counts[VOCAB], seen[VOCAB];
        float *logits = random_logits(&random, VOCAB, 3), want[VOCAB];

        for (int i = 0; i < VOCAB; i++)
            seen[i] = SP_CUDA_CHANGE_BIAS;
        for (int i = 0; i < TOKENS; i++) {
            tokens[i] = (int32_t)sp_test_below(&random, VOCAB);
            seen[tokens[i]] = i < PROMPT || seen[tokens[i]] >= 0 ? seen[tokens[i]] : 0;
            seen[tokens[i]] = i < PROMPT ? 0 : seen[tokens[i]] + 1;
        }
        memcpy(want, logits, sizeof want);
        sp_penalties_apply(&penalties, tokens, PROMPT, TOKENS, counts, want);
        for (int32_t i = 0; i < VOCAB; i++) {
            sp_cuda_sample_change change = {i, seen[i], i == 3 ? 2.5f : i == 40 ? -100.0f : 0.0f};
            float got = sp_choose_change(&row, &change, logits[i]);

            assert_memory_equal(&got, &want[i], sizeof got);
            change.count = SP_CUDA_CHANGE_FORBIDS;
            assert_true(sp_choose_change(&row, &change, logits[i]) <= -INFINITY);
        }
        free(logits);
    }
}

/* The sum is exact here and in double there: one place of a float apart, at most. */
static void logprobs_are_those_of_the_cpu(void **state)
{
    static const int32_t vocabs[] = {1, 17, 1000, 151936};
    sp_test_random random = {12};

    (void)state;
    for (int again = 0; again < 24; again++) {
        int32_t vocab = vocabs[again % 4], chosen;
        float *logits = random_logits(&random, vocab, 1 + (float)again), want, got;
        sp_logprob none;
        int32_t best;

        chosen = (int32_t)sp_test_below(&random, (uint32_t)vocab);
        assert_ok(sp_sample_greedy(logits, vocab, &best, NULL), NULL);
        assert_ok(sp_logprobs(logits, vocab, chosen, 0, &want, &none, NULL), NULL);
        got = sp_logprob_of(logits[chosen], logits[best], sp_choose_sum(twin_mass(logits, vocab)));
        assert_true(got >= nextafterf(want, -INFINITY) && got <= nextafterf(want, INFINITY));
        assert_true(got <= 0);
        free(logits);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keys_rank_as_logits_and_ids_do),
        cmocka_unit_test(parts_are_rounded_once),
        cmocka_unit_test(points_are_products),
        cmocka_unit_test(tokens_are_those_of_the_cpu),
        cmocka_unit_test(changes_are_those_of_the_cpu),
        cmocka_unit_test(logprobs_are_those_of_the_cpu),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
