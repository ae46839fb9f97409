/* bench speculative runs on a small model, forces what is accepted, and says what it measured. */
#include "support/test.h"

#include "support/shell.h"

#include <jansson.h>
#include <string.h>

#define MODEL SP_TEST_FIXTURES "/qwen3-tied"

static double number_of(const json_t *object, const char *name)
{
    const json_t *value = json_object_get(object, name);

    assert_true(json_is_number(value));
    return json_number_value(value);
}

static void test_every_case_is_measured(void **state)
{
    shell_result result = shell_run(
        NULL,
        "bench speculative --model %s --adapter a=%s/adapters/r1 --adapter b=%s/adapters/r64 "
        "--threads 1 --requests 2 --prompt-tokens 9 --new-tokens 41 --rounds 1 --acceptance 0,1 "
        "--json",
        MODEL, MODEL, MODEL);
    json_t *root, *cases, *one;
    size_t i;

    (void)state;
    assert_int_equal(result.exit_code, 0);
    root = json_loads(result.out.data, 0, NULL);
    assert_non_null(root);
    cases = json_object_get(root, "cases");
    assert_int_equal(json_array_size(cases), 9);
    json_array_foreach(cases, i, one)
    {
        assert_int_equal((size_t)number_of(one, "adapters"), i / 3);
        assert_int_equal((int)number_of(one, "requests"), 2);
        assert_true(number_of(one, "tokens_per_second") > 0 && number_of(one, "ratio") > 0);
        if (i % 3 == 1)
            assert_true(number_of(one, "accepted") <= 0 && (int)number_of(one, "steps") == 40);
        if (i % 3 == 2) /* the first four come with the prompt's step */
            assert_true(number_of(one, "accepted") >= 1 && (int)number_of(one, "steps") == 8 &&
                        number_of(one, "verify_seconds") > 0);
    }
    json_decref(root);
    shell_free(&result);
}

/* Drafts of a model that is the base itself. */
static void test_a_draft_model(void **state)
{
    shell_result result = shell_run(NULL,
                                    "bench speculative --model %s --draft-model %s --threads 1 "
                                    "--requests 1,3 --prompt-tokens 9 "
                                    "--new-tokens 30 --rounds 1 --acceptance 0 --json",
                                    MODEL, MODEL);
    json_t *root, *cases;

    (void)state;
    assert_int_equal(result.exit_code, 0);
    root = json_loads(result.out.data, 0, NULL);
    assert_true(json_is_true(json_object_get(root, "draft_model")));
    cases = json_object_get(root, "cases");
    assert_int_equal(json_array_size(cases), 4);
    assert_int_equal((int)number_of(json_array_get(cases, 3), "requests"), 3);
    assert_true(number_of(json_array_get(cases, 0), "accepted") > 0);
    json_decref(root);
    shell_free(&result);
}

static void test_refusals(void **state)
{
    static const char *const bad[] = {
        "--acceptance 0,2", "--acceptance x",  "--acceptance 0,0,0,0,0,0,0,0,0",
        "--requests 0",     "--requests 1,,2", "--draft-tokens 33"};

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        shell_result result = shell_run(NULL, "bench speculative --model %s %s", MODEL, bad[i]);

        assert_int_equal(result.exit_code, 2);
        assert_non_null(strstr(result.err.data, i < 3   ? "acceptance"
                                                : i < 5 ? "requests"
                                                        : "draft-tokens"));
        shell_free(&result);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_case_is_measured),
        cmocka_unit_test(test_a_draft_model),
        cmocka_unit_test(test_refusals),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
