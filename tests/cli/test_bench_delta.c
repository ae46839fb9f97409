/* bench delta runs without a model and says what it measured. */
#include "support/test.h"

#include "support/shell.h"

#include <jansson.h>
#include <string.h>

static void test_every_case_is_measured(void **state)
{
    shell_result result = shell_run(
        NULL, "bench delta --shapes qwen3-0.6b --threads 1 --rounds 3 --rows-max 1 --json");
    json_t *root, *cases, *one;
    size_t i;

    (void)state;
    assert_int_equal(result.exit_code, 0);
    root = json_loads(result.out.data, 0, NULL);
    assert_non_null(root);
    cases = json_object_get(root, "cases");
    assert_int_equal(json_array_size(cases), 4 * 3); /* groups, ranks; one row, one adapter */
    json_array_foreach(cases, i, one)
    {
        static const int ranks[] = {8, 16, 64};

        assert_int_equal(json_integer_value(json_object_get(one, "rank")), ranks[i % 3]);
        assert_int_equal(json_integer_value(json_object_get(one, "adapters")), 1);
        assert_true(json_number_value(json_object_get(one, "seconds")) > 0);
        assert_true(json_number_value(json_object_get(one, "base_seconds")) > 0);
        assert_true(json_number_value(json_object_get(one, "ratio")) > 0);
        assert_true(json_number_value(json_object_get(one, "of_read_limit")) > 0);
    }
    assert_non_null(json_object_get(root, "machine"));
    json_decref(root);
    shell_free(&result);
}

static void test_bad_flags_are_usage_errors(void **state)
{
    shell_result result = shell_run(NULL, "bench delta --shapes qwen9");

    (void)state;
    assert_int_equal(result.exit_code, 2);
    assert_non_null(strstr(result.err.data, "qwen3-0.6b"));
    shell_free(&result);
    result = shell_run(NULL, "bench delta --help");
    assert_int_equal(result.exit_code, 0);
    assert_non_null(strstr(result.out.data, "--rows-max"));
    shell_free(&result);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_case_is_measured),
        cmocka_unit_test(test_bad_flags_are_usage_errors),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
