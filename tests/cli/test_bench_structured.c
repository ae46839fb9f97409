/* bench structured runs on the demo's base, and says what it measured. */
#include "support/test.h"

#include "support/shell.h"

#include <jansson.h>
#include <string.h>

#define MODEL SP_TEST_DEMO "/base"

static double number_of(const json_t *object, const char *name)
{
    const json_t *value = json_object_get(object, name);

    assert_true(json_is_number(value));
    return json_number_value(value);
}

static void test_every_case_is_measured(void **state)
{
    shell_result result = shell_run(NULL,
                                    "bench structured --model %s --threads 1 --rows 2 "
                                    "--prompt-tokens 5 --new-tokens 9 --rounds 1 --json",
                                    MODEL);
    json_t *root, *cases, *one, *first, *large;
    size_t i;

    (void)state;
    assert_int_equal(result.exit_code, 0);
    root = json_loads(result.out.data, 0, NULL);
    assert_non_null(root);
    cases = json_object_get(root, "cases");
    assert_int_equal(json_array_size(cases), 4);
    json_array_foreach(cases, i, one)
    {
        assert_string_equal(json_string_value(json_object_get(one, "schemas")),
                            i < 2 ? "known" : "fresh");
        assert_int_equal((int)number_of(one, "temperature"), i % 2);
        assert_true(number_of(one, "tokens_per_second") > 0 && number_of(one, "ratio") > 0);
        assert_int_equal((int)number_of(one, "steps"), 8); /* the first comes with the prompt */
    }
    first = json_object_get(root, "first_token");
    assert_true(number_of(first, "constrained_seconds") > 0 &&
                number_of(first, "step_seconds") > 0);
    large = json_object_get(root, "large_schema");
    assert_true(number_of(large, "bytes") >= 100000 && number_of(large, "compile_seconds") > 0);
    assert_int_equal((int)number_of(large, "steps"), 8);
    assert_int_equal((int)number_of(large, "steps_without_a_token"), 0);
    json_decref(root);
    shell_free(&result);
}

static void test_refusals(void **state)
{
    static const char *const bad[] = {"--schema-file /nowhere/at/all", "--rows 0"};
    static const int codes[] = {1, 2};

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        shell_result result = shell_run(NULL, "bench structured --model %s %s", MODEL, bad[i]);

        assert_int_equal(result.exit_code, codes[i]);
        assert_non_null(strstr(result.err.data, i ? "rows" : "/nowhere/at/all"));
        shell_free(&result);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_case_is_measured),
        cmocka_unit_test(test_refusals),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
