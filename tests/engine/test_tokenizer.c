/* The tokenizer against what the reference tokenizer wrote down, and its own promises. */
#include "support/test.h"

#include "base/alloc.h"
#include "base/file.h"
#include "base/json.h"
#include "engine/tokenizer.h"

#include <string.h>

static sp_tokenizer *open_tokenizer(const char *directory)
{
    sp_tokenizer *tokenizer = NULL;
    sp_error error;

    assert_ok(sp_tokenizer_open(directory, &tokenizer, &error), &error);
    return tokenizer;
}

static json_t *read_json(const char *path)
{
    json_error_t problem;
    json_t *root = json_load_file(path, JSON_ALLOW_NUL, &problem);

    if (!root)
        fail_msg("%s: %s", path, problem.text);
    return root;
}

/* One case: {"text", "ids", "decoded"} and, where they differ, "plain_ids" for parse_special off.
 */
static void check_encode(const sp_tokenizer *tokenizer, const json_t *entry, const char *field,
                         bool parse_special)
{
    const json_t *text = json_object_get(entry, "text");
    const json_t *want = json_object_get(entry, field);
    int32_t *ids = NULL;
    size_t n = 0;
    sp_error error;

    assert_ok(sp_tokenizer_encode(tokenizer, json_string_value(text), json_string_length(text),
                                  parse_special, &ids, &n, &error),
              &error);
    if (n != json_array_size(want))
        fail_msg("\"%s\": %zu ids, not %zu", json_string_value(text), n, json_array_size(want));
    for (size_t i = 0; i < n; i++)
        if (ids[i] != json_integer_value(json_array_get(want, i)))
            fail_msg("\"%s\": id %zu is %d", json_string_value(text), i, ids[i]);
    sp_free(ids);
}

static void check_decode(const sp_tokenizer *tokenizer, const json_t *entry, const char *field,
                         bool skip_special)
{
    const json_t *ids = json_object_get(entry, "ids");
    const json_t *want = json_object_get(entry, field);
    size_t n = json_array_size(ids);
    int32_t *list = sp_calloc(n + 1, sizeof *list);
    sp_text text = {0};

    for (size_t i = 0; i < n; i++)
        list[i] = (int32_t)json_integer_value(json_array_get(ids, i));
    sp_tokenizer_decode(tokenizer, list, n, skip_special, &text);
    assert_false(text.failed);
    assert_int_equal(text.bytes, json_string_length(want));
    if (text.bytes > 0)
        assert_memory_equal(text.data, json_string_value(want), text.bytes);
    sp_text_free(&text);
    sp_free(list);
}

static void check_cases(const sp_tokenizer *tokenizer, const json_t *cases, size_t n_at_least)
{
    size_t i;
    json_t *entry;

    assert_true(json_array_size(cases) >= n_at_least);
    json_array_foreach(cases, i, entry)
    {
        check_encode(tokenizer, entry, "ids", true);
        check_decode(tokenizer, entry, "decoded", false);
    }
}

static void test_demo_golden(void **state)
{
    json_t *root = read_json(SP_TEST_DEMO "/golden/tokenizer.json");
    sp_tokenizer *demo = open_tokenizer(SP_TEST_DEMO "/base");
    sp_tokenizer *small = open_tokenizer(SP_TEST_FIXTURES "/tokenizer512");

    (void)state;
    check_cases(demo, json_object_get(root, "vocab2048"), 40);
    check_cases(small, json_object_get(root, "vocab512"), 40);
    sp_tokenizer_close(small);
    sp_tokenizer_close(demo);
    json_decref(root);
}

static void test_fixture_golden(void **state)
{
    json_t *cases = read_json(SP_TEST_FIXTURES "/tokenizer512/golden.json");
    sp_tokenizer *tokenizer = open_tokenizer(SP_TEST_FIXTURES "/tokenizer512");

    (void)state;
    check_cases(tokenizer, cases, 40);
    sp_tokenizer_close(tokenizer);
    json_decref(cases);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_demo_golden),
        cmocka_unit_test(test_fixture_golden),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
