/*
 * What a row more costs, from steps whose times are a line that the test knows, with other numbers
 * of rows, noise and outliers.
 */
#include "support/test.h"

#include "engine/schedule/step_cost.h"

static void near(double a, double b)
{
    assert_true(a > b - 1e-9 && a < b + 1e-9);
}

static void test_nothing_is_known(void **state)
{
    sp_step_cost cost = {0};

    (void)state;
    near(sp_step_cost_of_row(&cost, 1, 0), SP_ROW_COST_UNKNOWN);
    for (int32_t i = 0; i < 200; i++) /* of one number of rows there is no slope */
        sp_step_cost_note(&cost, 8, 1 + 0.1 * (i % 3));
    near(sp_step_cost_of_row(&cost, 8, 0), SP_ROW_COST_UNKNOWN);
}

static void test_a_line(void **state)
{
    sp_step_cost cost = {0};

    (void)state;
    for (int32_t i = 0; i < 50; i++)
        sp_step_cost_note(&cost, 8 + i % 2, 5 + 2 * (8 + i % 2));
    near(sp_step_cost_of_row(&cost, 8, 0), 2 * 8 / 21.0);
    near(sp_step_cost_of_row(&cost, 1, 0), 2 * 1 / 7.0);
    near(sp_step_cost_of_row(&cost, 32, 0), 2 * 32 / 69.0 > 0.9 ? 0.9 : 2 * 32 / 69.0);
    near(sp_step_cost_of_row(&cost, 1, 2), 4 / 7.0); /* and two seconds to draft it */
    for (int32_t i = 0; i < 3000; i++)               /* the slope stays */
        sp_step_cost_note(&cost, 8, 21);
    near(sp_step_cost_of_row(&cost, 8, 0), 2 * 8 / 21.0);
    for (int32_t i = 0; i < 3000; i++) /* the height follows */
        sp_step_cost_note(&cost, 8, 42);
    near(sp_step_cost_of_row(&cost, 8, 0), 2 * 8 / 42.0);
}

/* No time, more rows in less time, and a line through zero. */
static void test_the_ends(void **state)
{
    sp_step_cost none = {0}, less = {0}, all = {0};

    (void)state;
    for (int32_t i = 0; i < 50; i++) {
        sp_step_cost_note(&none, 1 + i % 4, 0);
        sp_step_cost_note(&less, 1 + i % 4, 9 - i % 4);
        sp_step_cost_note(&all, 1 + i % 4, 3 * (1 + i % 4));
    }
    near(sp_step_cost_of_row(&none, 2, 0), SP_ROW_COST_MAX);
    near(sp_step_cost_of_row(&less, 2, 0), 0);
    near(sp_step_cost_of_row(&all, 2, 0), SP_ROW_COST_MAX);
}

/* Another load on the machine: after some hundred steps the old line is forgotten. */
static void test_a_change(void **state)
{
    sp_step_cost cost = {0};
    double before;

    (void)state;
    for (int32_t i = 0; i < 300; i++)
        sp_step_cost_note(&cost, 4 + 4 * (i % 8 == 0), 10 + 0.1 * (4 + 4 * (i % 8 == 0)));
    before = sp_step_cost_of_row(&cost, 4, 0);
    near(before, 0.4 / 10.4);
    for (int32_t i = 0; i < 600; i++)
        sp_step_cost_note(&cost, 4 + 4 * (i % 8 == 0), 2 + 4.0 * (4 + 4 * (i % 8 == 0)));
    assert_true(sp_step_cost_of_row(&cost, 4, 0) > 0.87 && sp_step_cost_of_row(&cost, 4, 0) < 0.9);
}

/* A twentieth of the steps tries 8 rows more; times vary by a tenth, and some are far too long. */
static void test_noise(void **state)
{
    sp_test_random random = {3};
    sp_step_cost cost = {0};
    int32_t close = 0;

    (void)state;
    for (int32_t i = 0; i < 3000; i++) {
        int32_t rows = i % 20 == 0 ? 16 : 8;
        double seconds = (5 + 0.5 * rows) * (0.95 + sp_test_below(&random, 1000) * 1e-4);

        if (i % 97 == 0)
            seconds *= 1000;
        sp_step_cost_note(&cost, rows, seconds);
        close += i > 200 && sp_step_cost_of_row(&cost, 8, 0) > 0.3 &&
                 sp_step_cost_of_row(&cost, 8, 0) < 0.6; /* 0.44 */
    }
    assert_true(close > 2400);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nothing_is_known),
        cmocka_unit_test(test_a_line),
        cmocka_unit_test(test_the_ends),
        cmocka_unit_test(test_a_change),
        cmocka_unit_test(test_noise),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
