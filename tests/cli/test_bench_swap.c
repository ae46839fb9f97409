/* bench swap runs on a small model, swaps, and says what it measured. */
#include "support/test.h"

#include "support/shell.h"

#include <jansson.h>
#include <string.h>

#define MODEL SP_TEST_FIXTURES "/qwen3-tied"

static void test_swaps_are_measured(void **state)
{
    static const char *const numbers[] = {
        "slot_bytes", "swaps",           "step_seconds",        "step_beside_seconds",
        "step_ratio", "longest_seconds", "longest_over_median", "copied_over_plain"};
    shell_result result = shell_run(
        NULL,
        "bench swap --model %s --adapter a=%s/adapters/r1 --adapter b=%s/adapters/ffn "
        "--adapter c=%s/adapters/all-linear --max-loras 2 --threads 1 --steps 40 --rows 2 "
        "--json",
        MODEL, MODEL, MODEL, MODEL);
    json_t *root;

    (void)state;
    assert_int_equal(result.exit_code, 0);
    root = json_loads(result.out.data, 0, NULL);
    assert_non_null(root);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        assert_true(json_number_value(json_object_get(root, numbers[i])) > 0);
    assert_non_null(json_object_get(root, "machine"));
    json_decref(root);
    shell_free(&result);
}

static void test_needs_fewer_slots_than_adapters(void **state)
{
    shell_result result = shell_run(
        NULL, "bench swap --model %s --adapter a=%s/adapters/r1 --max-loras 2", MODEL, MODEL);

    (void)state;
    assert_int_equal(result.exit_code, 2);
    assert_non_null(strstr(result.err.data, "--max-loras"));
    shell_free(&result);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_swaps_are_measured),
        cmocka_unit_test(test_needs_fewer_slots_than_adapters),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
