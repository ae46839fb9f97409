/* bench load runs on a small model and says what it measured. */
#include "support/test.h"

#include "support/shell.h"

#include <jansson.h>
#include <string.h>

#define MODEL SP_TEST_FIXTURES "/qwen3-tied"

static void test_every_case_is_measured(void **state)
{
    static const char *const names[] = {"open, audit and pack, no digest",
                                        "the same",
                                        "the digest",
                                        "both",
                                        "image to slot, tables switched",
                                        "disk to READY",
                                        "the last 20 loads",
                                        "step beside loads, no spare core",
                                        "99 of 100 such steps",
                                        "longest such step"};
    shell_result result =
        shell_run(NULL,
                  "bench load --model %s --adapter a=%s/adapters/r1 --adapter b=%s/adapters/ffn "
                  "--threads 1 --loads 40 --rounds 3 --steps 20 --rows 2 --json",
                  MODEL, MODEL, MODEL);
    json_t *root, *cases, *one;
    size_t i;

    (void)state;
    assert_int_equal(result.exit_code, 0);
    root = json_loads(result.out.data, 0, NULL);
    assert_non_null(root);
    cases = json_object_get(root, "cases");
    assert_int_equal(json_array_size(cases), sizeof names / sizeof names[0]);
    json_array_foreach(cases, i, one)
    {
        assert_string_equal(json_string_value(json_object_get(one, "case")), names[i]);
        assert_true(json_real_value(json_object_get(one, "seconds")) > 0);
        assert_true(json_number_value(json_object_get(one, "ratio")) > 0);
    }
    assert_non_null(json_object_get(root, "machine"));
    json_decref(root);
    shell_free(&result);
}

/* Of the model, config.json is enough. */
static void test_files_only(void **state)
{
    shell_result result = shell_run(NULL,
                                    "bench load --model %s --adapter a=%s/adapters/r1 --files-only "
                                    "--threads 2 --rounds 3",
                                    MODEL, MODEL);

    (void)state;
    assert_int_equal(result.exit_code, 0);
    assert_non_null(strstr(result.out.data, "both, by all threads"));
    assert_non_null(strstr(result.out.data, "image to slot"));
    assert_null(strstr(result.out.data, "disk to READY"));
    shell_free(&result);
}

static void test_needs_an_adapter(void **state)
{
    shell_result result = shell_run(NULL, "bench load --model %s", MODEL);

    (void)state;
    assert_int_equal(result.exit_code, 2);
    assert_non_null(strstr(result.err.data, "--adapter NAME=DIR"));
    shell_free(&result);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_case_is_measured),
        cmocka_unit_test(test_files_only),
        cmocka_unit_test(test_needs_an_adapter),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
