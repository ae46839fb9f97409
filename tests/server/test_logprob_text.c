/*
 * Log probabilities as JSON, in both forms: offsets, alternatives that share a text, bytes that
 * are no characters. The vocabulary is this file's own: six tokens of known bytes.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "base/json.h"
#include "server/api/logprob_text.h"

#include <string.h>

static const struct {
    const char *text;
    size_t bytes;
} vocabulary[] = {{"a", 1}, {"\xc3\xa9", 2}, {" \"x\"", 4}, {"\xc3", 1}, {"\xa9", 1}, {"a", 1}};

/* In place of the engine's. */
const char *sp_engine_token_bytes(const sp_engine *engine, int32_t token, size_t *out_bytes)
{
    size_t i = (size_t)token;
    bool known = token >= 0 && i < sizeof vocabulary / sizeof *vocabulary;

    (void)engine;
    *out_bytes = known ? vocabulary[i].bytes : 0;
    return known ? vocabulary[i].text : NULL;
}

/* A record as the outbox holds it; the caller frees the text. */
static const sp_produced *produce(sp_text *record, int32_t token, float logprob,
                                  const sp_logprob *top, int32_t n_top)
{
    const sp_produced produced = {.token = token, .logprob = logprob, .n_top = n_top};

    sp_text_clear(record);
    sp_text_add_bytes(record, (const char *)&produced, sizeof produced);
    sp_text_add_bytes(record, (const char *)top, (size_t)n_top * sizeof *top);
    return (const sp_produced *)(const void *)record->data;
}

static void check_lists(sp_logprob_lists *lists, int64_t characters, const char *want)
{
    sp_text out = {0};
    json_t *root;

    sp_logprob_lists_write(lists, characters, &out);
    root = json_loadb(out.data, out.bytes, JSON_DECODE_ANY, NULL);
    assert_non_null(root);
    json_decref(root);
    assert_string_equal(out.data, want);
    sp_text_free(&out);
}

static void test_lists(void **state)
{
    static const sp_logprob top[] = {{1, -0.5f}, {0, -1.5f}};
    sp_logprob_lists lists = {.n = 0};
    sp_text record = {0};

    (void)state;
    check_lists(&lists, 0, "null");
    sp_logprob_lists_add(&lists, NULL, produce(&record, 1, 0, NULL, 0), true, false);
    sp_logprob_lists_add(&lists, NULL, produce(&record, 0, -1.5f, top, 2), false, false);
    sp_logprob_lists_add(&lists, NULL, produce(&record, 2, -2, top, 1), false, false);
    check_lists(&lists, 100,
                "{\"tokens\": [\"\xc3\xa9\", \"a\", \" \\\"x\\\"\"], "
                "\"token_logprobs\": [null, -1.5, -2], "
                "\"top_logprobs\": [null, {\"\xc3\xa9\": -0.5, \"a\": -1.5}, "
                "{\"\xc3\xa9\": -0.5, \" \\\"x\\\"\": -2}], \"text_offset\": [0, 1, 2]}");
    /* The next piece of a stream: the lists begin anew, the offset goes on. */
    sp_logprob_lists_add(&lists, NULL, produce(&record, 0, -1, NULL, 0), false, true);
    sp_logprob_lists_add(&lists, NULL, produce(&record, 0, -1, NULL, 0), false, false);
    check_lists(&lists, 100,
                "{\"tokens\": [\"a\", \"a\"], \"token_logprobs\": [-1, -1], "
                "\"top_logprobs\": [{\"a\": -1}, {\"a\": -1}], \"text_offset\": [6, 6]}");
    sp_logprob_lists_free(&lists);
    sp_text_free(&record);
}

/* No offset is beyond the text that is written. */
static void test_cut_text(void **state)
{
    sp_logprob_lists lists = {.n = 0};
    sp_text record = {0};

    (void)state;
    for (int i = 0; i < 3; i++)
        sp_logprob_lists_add(&lists, NULL, produce(&record, 2, -1, NULL, 0), false, false);
    check_lists(&lists, 5,
                "{\"tokens\": [\" \\\"x\\\"\", \" \\\"x\\\"\", \" \\\"x\\\"\"], "
                "\"token_logprobs\": [-1, -1, -1], "
                "\"top_logprobs\": [{\" \\\"x\\\"\": -1}, {\" \\\"x\\\"\": -1}, "
                "{\" \\\"x\\\"\": -1}], \"text_offset\": [0, 4, 5]}");
    sp_logprob_lists_free(&lists);
    sp_text_free(&record);
}

/* Members of one object have names of their own: 0 and 5 are both "a"; 3 and 4 both U+FFFD. */
static void test_same_text(void **state)
{
    static const sp_logprob same[] = {{5, -0.25f}, {0, -0.5f}, {3, -1}, {4, -2}, {77, -3}};
    sp_logprob_lists lists = {.n = 0};
    sp_text record = {0};

    (void)state;
    sp_logprob_lists_add(&lists, NULL, produce(&record, 0, -0.5f, same, 5), false, false);
    check_lists(&lists, 1,
                "{\"tokens\": [\"a\"], \"token_logprobs\": [-0.5], "
                "\"top_logprobs\": [{\"token_id:5\": -0.25, \"a\": -0.5, \"\xef\xbf\xbd\": -1, "
                "\"token_id:4\": -2, \"\": -3}], \"text_offset\": [0]}");
    sp_logprob_lists_free(&lists);
    sp_text_free(&record);
}

static void test_chat(void **state)
{
    static const sp_logprob top[] = {{1, -0.5f}, {3, -4}};
    sp_text record = {0}, out = {0};

    (void)state;
    sp_logprob_chat_add(&out, NULL, produce(&record, 2, -2, top, 2), false);
    assert_string_equal(out.data, "{\"token\": \" \\\"x\\\"\", \"logprob\": -2, "
                                  "\"bytes\": [32, 34, 120, 34], \"top_logprobs\": ["
                                  "{\"token\": \"\xc3\xa9\", \"logprob\": -0.5, "
                                  "\"bytes\": [195, 169]}, "
                                  "{\"token\": \"\xef\xbf\xbd\", \"logprob\": -4, "
                                  "\"bytes\": [195]}]}");
    sp_text_free(&out);
    sp_text_free(&record);
}

static void test_characters(void **state)
{
    (void)state;
    assert_int_equal(sp_count_characters("", 0), 0);
    assert_int_equal(sp_count_characters("a\xc3\xa9\xf0\x9f\x98\x80", 7), 3);
    assert_int_equal(sp_count_characters("\xa9", 1), 0); /* the rest of one */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lists),      cmocka_unit_test(test_cut_text),
        cmocka_unit_test(test_same_text),  cmocka_unit_test(test_chat),
        cmocka_unit_test(test_characters),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
