/* A mask on a row: bits by hand, over a vocabulary that is no multiple of a word. */
#include "support/test.h"

#include "engine/sampling/token_mask.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

enum { VOCAB = 70 };

static void test_bits(void **state)
{
    uint32_t mask[3] = {0};
    float logits[VOCAB];

    (void)state;
    assert_int_equal(sp_token_mask_words(VOCAB), 3);
    assert_int_equal(sp_token_mask_words(64), 2);
    sp_token_mask_set(mask, 0, 1);
    sp_token_mask_set(mask, 31, 1);
    sp_token_mask_set(mask, 32, 1);
    sp_token_mask_set(mask, 69, 1);
    sp_token_mask_set(mask, 33, 1);
    sp_token_mask_set(mask, 33, 0);
    assert_int_equal(mask[0], 0x80000001u);
    assert_int_equal(mask[1], 1);
    assert_int_equal(mask[2], 1u << 5);
    for (int i = 0; i < VOCAB; i++)
        logits[i] = (float)i;
    sp_token_mask_apply(mask, VOCAB, logits);
    for (int i = 0; i < VOCAB; i++) {
        bool allowed = i == 0 || i == 31 || i == 32 || i == 69;

        assert_true(allowed ? logits[i] >= (float)i && logits[i] <= (float)i
                            : isinf(logits[i]) && logits[i] < 0);
    }
}

/* A mask must not hide that a row is broken: the request fails as it would without one. */
static void test_broken_rows(void **state)
{
    const uint32_t mask[1] = {1};
    float logits[3] = {1, NAN, INFINITY};

    (void)state;
    sp_token_mask_apply(mask, 3, logits);
    assert_true(isnan(logits[1]));
    assert_true(isinf(logits[2]) && logits[2] > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bits),
        cmocka_unit_test(test_broken_rows),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
