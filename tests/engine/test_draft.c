/*
 * Drafts: what prompt lookup finds, against texts made by hand and a slow search of every place,
 * and how many the next step verifies after hits and misses.
 */
#include "support/test.h"

#include "engine/schedule/draft.h"

#include <string.h>

#define TOKENS_MAX 512

static void check_lookup(const int32_t *tokens, int32_t n, int32_t n_max, const int32_t *want,
                         int32_t n_want)
{
    int32_t text[64];

    assert_true(n + n_max < 64);
    memset(text, 0x7f, sizeof text);
    if (n > 0)
        memcpy(text, tokens, (size_t)n * sizeof *tokens);
    assert_int_equal(sp_draft_lookup(text, n, n_max), n_want);
    if (n > 0)
        assert_memory_equal(text, tokens, (size_t)n * sizeof *tokens);
    if (n_want > 0)
        assert_memory_equal(text + n, want, (size_t)n_want * sizeof *want);
    for (int32_t i = n + n_want; i < 64; i++)
        assert_int_equal(text[i], 0x7f7f7f7f);
}

#define TEXT(...) ((const int32_t[]){__VA_ARGS__}), sizeof((const int32_t[]){__VA_ARGS__}) / 4

static void test_lookup(void **state)
{
    (void)state;
    check_lookup(TEXT(1, 2, 3, 4, 1, 2), 3, (const int32_t[]){3, 4, 1}, 3);
    /* one token is not enough; two are */
    check_lookup(TEXT(1, 2, 3, 4, 9, 2), 3, NULL, 0);
    check_lookup(TEXT(1, 2, 3, 8, 2, 3), 1, (const int32_t[]){8}, 1);
    /* the longer run wins over the later one, the later one over its equal */
    check_lookup(TEXT(5, 1, 2, 7, 1, 2, 8, 5, 1, 2), 2, (const int32_t[]){7, 1}, 2);
    check_lookup(TEXT(1, 2, 7, 1, 2, 8, 1, 2), 2, (const int32_t[]){8, 1}, 2);
    /* a text that repeats itself goes on over its own drafts */
    check_lookup(TEXT(1, 2, 1, 2), 5, (const int32_t[]){1, 2, 1, 2, 1}, 5);
    check_lookup(TEXT(6, 6, 6), 4, (const int32_t[]){6, 6, 6, 6}, 4);
    /* nothing before it, nothing wanted */
    check_lookup(TEXT(1), 3, NULL, 0);
    check_lookup(TEXT(1, 1), 3, NULL, 0);
    check_lookup(TEXT(1, 2, 1, 2), 0, NULL, 0);
    check_lookup(NULL, 0, 3, NULL, 0);
}

/* The first draft by trying every place and length. */
static int32_t search(const int32_t *tokens, int32_t n, int32_t *out_token)
{
    for (int32_t length = SP_LOOKUP_MATCH_MAX; length >= SP_LOOKUP_MATCH_MIN; length--)
        for (int32_t end = n - 1; end >= length; end--)
            if (memcmp(tokens + end - length, tokens + n - length,
                       (size_t)length * sizeof *tokens) == 0) {
                *out_token = tokens[end];
                return 1;
            }
    return 0;
}

static void test_random_texts(void **state)
{
    sp_test_random random = {7};
    int32_t found = 0;

    (void)state;
    for (int32_t round = 0; round < 3000; round++) {
        int32_t tokens[TOKENS_MAX + 1], n = 1 + (int32_t)sp_test_below(&random, 200), token = -1;
        uint32_t ids = 2 + sp_test_below(&random, 30);

        for (int32_t i = 0; i < n; i++)
            tokens[i] = (int32_t)sp_test_below(&random, ids);
        tokens[n] = -2;
        assert_int_equal(sp_draft_lookup(tokens, n, 1), search(tokens, n, &token));
        assert_int_equal(tokens[n], token == -1 ? -2 : token);
        found += token >= 0;
    }
    assert_true(found > 500 && found < 2900);
}

/* What is further back than the window is not read. */
static void test_the_window(void **state)
{
    static int32_t tokens[SP_LOOKUP_TOKENS_MAX + 100];
    int32_t n = SP_LOOKUP_TOKENS_MAX + 50;

    (void)state;
    for (int32_t i = 0; i < n; i++)
        tokens[i] = 1000 + i;
    tokens[n - 2] = 1;
    tokens[n - 1] = 2;
    tokens[60] = 1;
    tokens[61] = 2;
    assert_int_equal(sp_draft_lookup(tokens, n, 1), 1);
    assert_int_equal(tokens[n], 1062);
    tokens[60] = tokens[61] = 3;
    tokens[46] = 1;
    tokens[47] = 2;
    assert_int_equal(sp_draft_lookup(tokens, n, 1), 0);
}

/* ---- how many ------------------------------------------------------------------------------ */

/* A step with the drafts that are wanted, of which the first `right` are. Returns how many. */
static int32_t step_at(sp_draft *draft, int32_t right, double cost)
{
    int32_t n = sp_draft_wanted(draft, SP_DRAFT_BY_LOOKUP, cost), guess = 1;

    sp_draft_begin(draft, SP_DRAFT_BY_LOOKUP, n);
    for (int32_t i = 0; i <= n && !draft->rejected; i++) {
        bool met = sp_draft_meet(draft, i < right ? 1 : 2, &guess);

        assert_int_equal(met, i < n && i < right);
    }
    assert_int_equal(draft->n_accepted, right < n ? right : n);
    assert_int_equal(draft->rejected, right < n);
    sp_draft_end(draft, n, cost);
    return n;
}

static int32_t step(sp_draft *draft, int32_t right)
{
    return step_at(draft, right, 0.4);
}

static void test_hits_and_misses(void **state)
{
    sp_draft draft = sp_draft_create(8);

    (void)state;
    assert_int_equal(step(&draft, 8),
                     8); /* 0.9 to the 8th is 0.43; 8 of 8, kept as 4 of 4: a share of 1 */
    assert_int_equal(step(&draft, 2), 8); /* 6 of 7: 7 / 8, whose 6th power is 0.45, 7th 0.39 */
    assert_int_equal(step(&draft, 0), 6); /* 6 of 8, kept as 3 of 4: 4 / 5; 0.41, 0.33 */
    assert_int_equal(step(&draft, 0), 4); /* 3 of 5: 4 / 6; 0.44, 0.30 */
    assert_int_equal(step(&draft, 0), 2); /* 3 of 6: 4 / 7; 0.57, 0.33 */
    assert_int_equal(step(&draft, 1), 1); /* 4 of 7: 5 / 8; 0.39 */
    assert_int_equal(step(&draft, 1), 1); /* 5 of 8, kept as 2 of 4: 3 / 5; 0.36 */
    assert_int_equal(step(&draft, 1), 1); /* 3 of 5: 4 / 6 */
    assert_int_equal(step(&draft, 2), 2); /* 5 of 7: 6 / 8; 0.56, 0.42, 0.32 */
    assert_int_equal(step(&draft, 3), 3); /* 8 of 10, kept as 4 of 5: 5 / 6; 0.40 to the 5th */
    assert_int_equal(step(&draft, 5), 5);
}

/* The share of steps with drafts goes to 1 in 65, of one draft each. */
static void test_nothing_is_ever_right(void **state)
{
    sp_draft draft = sp_draft_create(4);
    int32_t drafted = 0, tries = 0;

    (void)state;
    for (int32_t i = 0; i < 1000; i++) {
        int32_t n = step(&draft, 0);

        drafted += n;
        tries += n > 0;
    }
    /* 4 drafts, one more, then one after each pause of 15, 30, 60, 64, 64, .. steps */
    assert_int_equal(tries, 2 + 3 + (1000 - (2 + 3 + 105)) / 65);
    assert_int_equal(drafted, 4 + tries - 1);
    while (sp_draft_wanted(&draft, SP_DRAFT_BY_LOOKUP, 0.4) == 0)
        step(&draft, 0);
    for (int32_t i = 0; i < 3; i++) /* hits bring it back, without pauses */
        assert_int_equal(step(&draft, 1), 1);
    for (int32_t i = 0; i < 8; i++)
        assert_true(step(&draft, 4) > 0);
    assert_int_equal(step(&draft, 4), 4);
}

/* The dearer a row, the fewer drafts, and the longer the pauses. */
static void test_what_a_row_costs(void **state)
{
    sp_draft dear = sp_draft_create(4), cheap = sp_draft_create(4);
    int32_t rows = 0;

    (void)state;
    assert_int_equal(sp_draft_wanted(&dear, SP_DRAFT_BY_LOOKUP, 0.5),
                     4); /* 0.9 to the 4th is 0.66 */
    assert_int_equal(sp_draft_wanted(&dear, SP_DRAFT_BY_LOOKUP, 0.7), 3); /* to the third 0.73 */
    assert_int_equal(step_at(&dear, 1, 0.9), 1);
    assert_int_equal(step_at(&dear, 4, 0.9), 4); /* 1 of 1 */
    dear = sp_draft_create(4);
    for (int32_t i = 0; i < 128; i++)
        rows += step_at(&dear, 0, 0.9);
    assert_int_equal(rows, 3); /* at once, after 29 steps, after 58 more */
    rows = 0;
    for (int32_t i = 0; i < 100; i++) /* where it costs nothing a miss is no reason, eight are */
        rows += step_at(&cheap, 0, 0);
    assert_int_equal(rows, 4 * (8 + 4)); /* after 4, 8, 16 and 32 steps */
}

static void test_without_drafts(void **state)
{
    sp_draft none = {0}, zero = sp_draft_create(0);
    int32_t guess = 1;

    (void)state;
    assert_int_equal(step(&none, 0), 0);
    assert_int_equal(step(&zero, 0), 0);
    assert_false(sp_draft_meet(&none, 1, &guess));
    assert_false(none.rejected);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lookup),
        cmocka_unit_test(test_random_texts),
        cmocka_unit_test(test_the_window),
        cmocka_unit_test(test_hits_and_misses),
        cmocka_unit_test(test_nothing_is_ever_right),
        cmocka_unit_test(test_what_a_row_costs),
        cmocka_unit_test(test_without_drafts),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
