/* Logprobs of one row: a distribution worked out by hand, and random rows against a sum in long
 * double and a full sort. */
#include "support/test.h"

#include "base/alloc.h"
#include "engine/sampling/logprobs.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void test_by_hand(void **state)
{
    /* Probabilities 4, 1, 8, 1, 2 of 16. */
    const float logits[] = {3 + logf(4), 3, 3 + logf(8), 3, 3 + logf(2)};
    const int32_t ids[] = {2, 0, 4, 1, 3};
    const double sixteenths[] = {8, 4, 2, 1, 1};
    sp_logprob top[5];
    float logprob;
    sp_error error;

    (void)state;
    assert_ok(sp_logprobs(logits, 5, 3, 5, &logprob, top, &error), &error);
    assert_true(fabs((double)logprob - log(1.0 / 16)) < 1e-6);
    for (int i = 0; i < 5; i++) {
        assert_int_equal(top[i].token, ids[i]); /* of the two equal ones the lower id */
        assert_true(fabs((double)top[i].logprob - log(sixteenths[i] / 16)) < 1e-6);
    }
    assert_ok(sp_logprobs(logits, 5, 2, 0, &logprob, NULL, &error), &error);
    assert_true(fabs((double)logprob - log(0.5)) < 1e-6);
    assert_ok(sp_logprobs((float[]){-7}, 1, 0, 20, &logprob, top, &error), &error);
    assert_true(logprob >= 0 && logprob <= 0 && top[0].token == 0);
}

/* What is out of reach is -9999, so that JSON can carry it. */
static void test_smallest(void **state)
{
    const float logits[] = {-INFINITY, 0, -20000, -100, -INFINITY};
    sp_logprob top[5];
    float logprob;
    sp_error error;

    (void)state;
    assert_ok(sp_logprobs(logits, 5, 0, 5, &logprob, top, &error), &error);
    assert_true(logprob >= -9999.0f && logprob <= -9999.0f);
    assert_int_equal(top[0].token, 1);
    assert_int_equal(top[1].token, 3);
    assert_true(fabs((double)top[1].logprob + 100) < 1e-4);
    assert_int_equal(top[2].token, 2);
    assert_int_equal(top[3].token, 0);
    assert_int_equal(top[4].token, 4);
    for (int i = 2; i < 5; i++)
        assert_true(top[i].logprob >= -9999.0f && top[i].logprob <= -9999.0f);
}

typedef struct ranked {
    int32_t id;
    float logit;
} ranked;

static int by_rank(const void *a, const void *b)
{
    const ranked *x = a, *y = b;

    if (x->logit > y->logit || x->logit < y->logit)
        return x->logit > y->logit ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

static void check_row(const float *logits, int32_t vocab, int32_t chosen, int32_t n_top)
{
    ranked *order = sp_calloc((size_t)vocab, sizeof *order);
    sp_logprob *top = sp_calloc((size_t)n_top + 1, sizeof *top); /* a sanitizer sees more */
    long double sum = 0;
    double log_sum;
    float logprob;
    sp_error error;

    for (int32_t i = 0; i < vocab; i++)
        order[i] = (ranked){i, logits[i]};
    qsort(order, (size_t)vocab, sizeof *order, by_rank);
    for (int32_t i = 0; i < vocab; i++)
        sum += expl((long double)order[vocab - 1 - i].logit - (long double)order[0].logit);
    log_sum = (double)logl(sum) + (double)order[0].logit;
    top[n_top].token = -77;
    assert_ok(sp_logprobs(logits, vocab, chosen, n_top, &logprob, top, &error), &error);
    assert_true(fabs((double)logprob - ((double)logits[chosen] - log_sum)) <
                4e-6 + 1e-7 * fabs((double)logprob));
    for (int32_t i = 0; i < n_top && i < vocab; i++) {
        assert_int_equal(top[i].token, order[i].id);
        assert_true(fabs((double)top[i].logprob - ((double)order[i].logit - log_sum)) <
                    4e-6 + 1e-7 * fabs((double)top[i].logprob));
    }
    assert_int_equal(top[n_top].token, -77);
    sp_free(top);
    sp_free(order);
}

static void test_against_definition(void **state)
{
    static float logits[40000];
    static const int32_t sizes[] = {1, 2, 7, 15, 16, 17, 31, 33, 128, 509, 1000, 39999};
    sp_test_random random = {12};

    (void)state;
    for (int round = 0; round < 240; round++) {
        int32_t vocab = sizes[round % 12];
        float width = (float)(1 << sp_test_below(&random, 8));

        if (vocab > 1000 && round > 60)
            continue;
        for (int32_t i = 0; i < vocab; i++) {
            logits[i] = width * sp_test_float(&random);
            if (round % 3 == 0) /* so that there are ties */
                logits[i] = roundf(logits[i]);
        }
        check_row(logits, vocab, (int32_t)sp_test_below(&random, (uint32_t)vocab),
                  (int32_t)sp_test_below(&random, 21));
    }
    for (int32_t i = 0; i < 1000; i++) /* rising: every id comes into the list */
        logits[i] = (float)i / 64;
    check_row(logits, 1000, 0, 20);
    for (int32_t i = 0; i < 1000; i++)
        logits[i] = 5;
    check_row(logits, 1000, 999, 20);
}

static void test_refused(void **state)
{
    float logits[20] = {0}, logprob = 5;
    sp_logprob top[2];
    sp_error error;

    (void)state;
    logits[17] = NAN;
    assert_int_equal(sp_logprobs(logits, 20, 0, 2, &logprob, top, &error), SP_ERR_INPUT);
    assert_string_equal(error.code, "bad-logits");
    assert_int_equal(error.position, 17);
    assert_true(logprob >= 5 && logprob <= 5);
    assert_int_equal(sp_logprobs((float[]){-INFINITY}, 1, 0, 1, &logprob, top, &error),
                     SP_ERR_INPUT);
    assert_string_equal(error.code, "no-token");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_by_hand),
        cmocka_unit_test(test_smallest),
        cmocka_unit_test(test_against_definition),
        cmocka_unit_test(test_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
