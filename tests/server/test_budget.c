/* The budget of what clients can fill: its shares, and that all of it comes back. */
#include "support/test.h"

#include "server/http/budget.h"

#define MAX  ((size_t)8 << 20)
#define MANY ((size_t)1 << 20)

static void test_shares(void **state)
{
    sp_budget budget;
    size_t body = 0, small = 0, request = 0, answer = 0;

    (void)state;
    sp_budget_open(&budget, MAX);
    assert_false(sp_budget_hold(&budget, SP_BUDGET_BODIES, &body, 6 * MANY + 1));
    assert_int_equal(body, 0);
    assert_true(sp_budget_hold(&budget, SP_BUDGET_BODIES, &body, 6 * MANY));
    assert_false(sp_budget_hold(&budget, SP_BUDGET_BODIES, &small, SP_BUDGET_SMALL_BODY + 1));
    assert_true(sp_budget_hold(&budget, SP_BUDGET_BODIES, &small, SP_BUDGET_SMALL_BODY));
    assert_false(sp_budget_hold(&budget, SP_BUDGET_REQUESTS, &request, MANY));
    assert_true(sp_budget_hold(&budget, SP_BUDGET_REQUESTS, &request, MANY - SP_BUDGET_SMALL_BODY));
    assert_false(sp_budget_hold(&budget, SP_BUDGET_REQUESTS, &request, MANY));
    assert_int_equal(request, MANY - SP_BUDGET_SMALL_BODY);
    assert_true(sp_budget_hold(&budget, SP_BUDGET_ANSWERS, &answer, MANY));
    assert_false(sp_budget_hold(&budget, SP_BUDGET_ANSWERS, &answer, MANY + 1));
    assert_int_equal(atomic_load(&budget.total), MAX);
    assert_int_equal(atomic_load(&budget.used[SP_BUDGET_BODIES]), 6 * MANY + SP_BUDGET_SMALL_BODY);
    assert_int_equal(atomic_load(&budget.refused), 5);
    /* Less is always taken, and then there is room. */
    assert_true(sp_budget_hold(&budget, SP_BUDGET_BODIES, &body, 1));
    assert_true(sp_budget_hold(&budget, SP_BUDGET_ANSWERS, &answer, 2 * MANY));
    assert_true(sp_budget_hold(&budget, SP_BUDGET_BODIES, &body, 0));
    assert_true(sp_budget_hold(&budget, SP_BUDGET_BODIES, &small, 0));
    assert_true(sp_budget_hold(&budget, SP_BUDGET_REQUESTS, &request, 0));
    assert_true(sp_budget_hold(&budget, SP_BUDGET_ANSWERS, &answer, 0));
    assert_int_equal(atomic_load(&budget.total), 0);
    for (int kind = 0; kind < SP_BUDGET_KINDS; kind++)
        assert_int_equal(atomic_load(&budget.used[kind]), 0);
}

static void test_huge_and_none(void **state)
{
    sp_budget budget;
    size_t held = 0;

    (void)state;
    sp_budget_open(&budget, MAX);
    assert_true(sp_budget_hold(&budget, SP_BUDGET_ANSWERS, &held, 3));
    assert_false(sp_budget_hold(&budget, SP_BUDGET_ANSWERS, &held, SIZE_MAX));
    assert_int_equal(held, 3);
    assert_true(sp_budget_hold(NULL, SP_BUDGET_ANSWERS, &held, SIZE_MAX));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shares),
        cmocka_unit_test(test_huge_and_none),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
