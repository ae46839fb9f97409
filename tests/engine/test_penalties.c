/*
 * Bias and penalties: small rows worked out by hand, and random rows against the formulas in
 * double.
 */
#include "support/test.h"

#include "engine/sampling/penalties.h"

#include <math.h>
#include <string.h>

static sp_penalties off(void)
{
    return (sp_penalties){.repetition = 1};
}

/* Prompt 0 1 1, output 1 2 2: id 0 is in the prompt only, 1 in both, 2 twice in the output. */
static void apply(sp_penalties penalties, const float *logits, const float *want)
{
    const int32_t tokens[] = {0, 1, 1, 1, 2, 2};
    int32_t counts[6];
    float row[6];

    memset(counts, 0xa5, sizeof counts);
    memcpy(row, logits, sizeof row);
    sp_penalties_apply(&penalties, tokens, 3, 6, counts, row);
    for (int i = 0; i < 6; i++)
        if (memcmp(&row[i], &want[i], sizeof row[i]) != 0)
            fail_msg("id %d: %g, expected %g", i, (double)row[i], (double)want[i]);
}

static void test_by_hand(void **state)
{
    const float logits[6] = {4, -4, 8, 2, -2, 0};
    const sp_logit_bias bias[2] = {{3, 5}, {2, -16}};
    sp_penalties penalties = off();

    (void)state;
    assert_false(sp_penalties_any(&penalties));
    apply(penalties, logits, logits);
    penalties.presence = 0.5; /* the prompt does not count */
    assert_true(sp_penalties_any(&penalties));
    apply(penalties, logits, (float[]){4, -4.5f, 7.5f, 2, -2, 0});
    penalties.frequency = 0.25; /* once, twice */
    apply(penalties, logits, (float[]){4, -4.75f, 7, 2, -2, 0});
    penalties = off();
    penalties.repetition = 2; /* prompt and output, each id once; a negative logit is multiplied */
    assert_true(sp_penalties_any(&penalties));
    apply(penalties, logits, (float[]){2, -8, 4, 2, -2, 0});
    penalties.presence = 1; /* behind the repetition penalty */
    apply(penalties, logits, (float[]){2, -9, 3, 2, -2, 0});
    penalties = off();
    penalties.bias = bias;
    penalties.n_bias = 2;
    assert_true(sp_penalties_any(&penalties));
    apply(penalties, logits, (float[]){4, -4, -8, 7, -2, 0});
    penalties.repetition = 2; /* before it, comes the bias: 8 - 16 is negative, so doubled */
    apply(penalties, logits, (float[]){2, -8, -16, 7, -2, 0});
}

static void test_infinite_stays(void **state)
{
    const float logits[6] = {-INFINITY, -INFINITY, -INFINITY, 1, 1, 1};
    sp_penalties penalties = {.presence = -2, .frequency = -2, .repetition = 0.01};

    (void)state;
    apply(penalties, logits, logits);
}

/* The definition, over the whole vocabulary, in double. */
static double reference(const sp_penalties *penalties, const int32_t *tokens, int32_t n_prompt,
                        int32_t n_tokens, int32_t id, double logit)
{
    bool seen = false;
    int count = 0;

    for (int32_t i = 0; i < penalties->n_bias; i++)
        if (penalties->bias[i].token == id)
            logit += (double)penalties->bias[i].bias;
    for (int32_t i = 0; i < n_tokens; i++) {
        seen = seen || tokens[i] == id;
        count += i >= n_prompt && tokens[i] == id;
    }
    if (seen)
        logit = logit > 0 ? logit / penalties->repetition : logit * penalties->repetition;
    return logit - penalties->frequency * count - (count > 0 ? penalties->presence : 0);
}

static void test_against_definition(void **state)
{
    enum { VOCAB = 97, TOKENS = 60 };
    sp_test_random random = {3};

    (void)state;
    for (int round = 0; round < 500; round++) {
        int32_t tokens[TOKENS], counts[VOCAB];
        int32_t n = 1 + (int32_t)sp_test_below(&random, TOKENS);
        int32_t n_prompt = 1 + (int32_t)sp_test_below(&random, (uint32_t)n);
        float before[VOCAB], row[VOCAB];
        sp_logit_bias bias[2] = {{(int32_t)sp_test_below(&random, 40), 9 * sp_test_float(&random)},
                                 {60, 9 * sp_test_float(&random)}};
        sp_penalties penalties = {
            .presence = round % 2 ? 2.0 * (double)sp_test_float(&random) : 0,
            .frequency = round % 3 ? 2.0 * (double)sp_test_float(&random) : 0,
            .repetition = round % 5 ? 0.5 + sp_test_below(&random, 20) * 0.1 : 1,
            .bias = bias,
            .n_bias = (int32_t)sp_test_below(&random, 3),
        };

        for (int32_t i = 0; i < n; i++)
            tokens[i] = (int32_t)sp_test_below(&random, VOCAB);
        for (int32_t i = 0; i < VOCAB; i++)
            before[i] = row[i] = 20 * sp_test_float(&random);
        memset(counts, 0xff - round % 7, sizeof counts);
        sp_penalties_apply(&penalties, tokens, n_prompt, n, counts, row);
        for (int32_t i = 0; i < VOCAB; i++) {
            double want = reference(&penalties, tokens, n_prompt, n, i, (double)before[i]);

            if (!(fabs(want - (double)row[i]) <= 2e-5 * (1 + fabs(want))))
                fail_msg("round %d, id %d: %g, expected %g", round, i, (double)row[i], want);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_by_hand),
        cmocka_unit_test(test_infinite_stays),
        cmocka_unit_test(test_against_definition),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
