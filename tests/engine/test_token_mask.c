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

/* Words of every kind, over vocabularies that end anywhere in one, bit by bit. */
static void test_every_word(void **state)
{
    enum { WORDS = 9, MOST = 32 * WORDS };
    static const uint32_t mask[WORDS] = {0, UINT32_MAX,  0x80000000u, 1, 0x7fffffffu, 0xfffffffeu,
                                         0, 0xa5c3f019u, UINT32_MAX};

    (void)state;
    for (int32_t vocab = 1; vocab <= MOST; vocab++) {
        float logits[MOST + 1];

        for (int i = 0; i <= MOST; i++)
            logits[i] = i % 37 == 5 ? NAN : i % 41 == 7 ? INFINITY : (float)i;
        sp_token_mask_apply(mask, vocab, logits);
        for (int i = 0; i <= MOST; i++) {
            bool kept = i >= vocab || (mask[i / 32] >> i % 32 & 1);

            if (i % 37 == 5)
                assert_true(isnan(logits[i]));
            else if (i % 41 == 7)
                assert_true(isinf(logits[i]) && logits[i] > 0);
            else if (kept)
                assert_true(logits[i] >= (float)i && logits[i] <= (float)i);
            else
                assert_true(isinf(logits[i]) && logits[i] < 0);
        }
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
        cmocka_unit_test(test_every_word),
        cmocka_unit_test(test_broken_rows),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
