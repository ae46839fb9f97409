/* The engine's text functions on the demo model: there and back, by tokens and by bytes. */
#include "support/test.h"

#include "base/text.h"

#include <sidepath/engine.h>
#include <string.h>

static sp_engine *engine;

static int open_engine(void **state)
{
    sp_engine_options options;
    sp_error error;

    (void)state;
    sp_engine_options_default(&options, sizeof options);
    options.model_dir = SP_TEST_DEMO "/base";
    options.threads = 1;
    options.kv_tokens = 320;
    assert_ok(sp_engine_open(&options, NULL, 0, &engine, &error), &error);
    return 0;
}

static int close_engine(void **state)
{
    (void)state;
    sp_engine_close(engine);
    return 0;
}

static void test_there_and_back(void **state)
{
    static const char text[] = "The caf\xc3\xa9 \xf0\x9f\x98\x80 int x;\n";
    sp_text joined = {0};
    int32_t *tokens;
    int32_t n;
    char *back;
    size_t bytes;
    sp_error error;

    (void)state;
    assert_ok(sp_engine_encode(engine, text, sizeof text - 1, false, 0, &tokens, &n, &error),
              &error);
    assert_ok(sp_engine_decode(engine, tokens, n, false, &back, &bytes, &error), &error);
    assert_int_equal(bytes, sizeof text - 1);
    assert_string_equal(back, text);
    for (int32_t i = 0; i < n; i++) {
        const char *part = sp_engine_token_bytes(engine, tokens[i], &bytes);

        sp_text_add_bytes(&joined, part, bytes);
    }
    assert_string_equal(joined.data, text);
    sp_text_free(&joined);
    sp_engine_free(back);
    sp_engine_free(tokens);
}

static void test_too_many_tokens(void **state)
{
    static const char text[] = "One limit, reached and passed: <|im_end|>";
    int32_t *tokens = NULL;
    int32_t n, again;
    sp_error error;

    (void)state;
    assert_ok(sp_engine_encode(engine, text, sizeof text - 1, true, 0, &tokens, &n, &error),
              &error);
    sp_engine_free(tokens);
    assert_ok(sp_engine_encode(engine, text, sizeof text - 1, true, n, &tokens, &again, &error),
              &error);
    assert_int_equal(again, n);
    sp_engine_free(tokens);
    tokens = NULL;
    assert_int_equal(
        sp_engine_encode(engine, text, sizeof text - 1, true, n - 1, &tokens, &again, &error),
        SP_ERR_TOO_LARGE);
    assert_null(tokens);
    assert_string_equal(error.code, "too-many-tokens");
    assert_string_equal(error.subject, "prompt");
    assert_non_null(strstr(error.text, "the context is 320 (max-context"));
    assert_int_equal(
        sp_engine_encode(engine, text, sizeof text - 1, true, n - 1, &tokens, &again, NULL),
        SP_ERR_TOO_LARGE);
}

/* OpenAI's code and sentence where the limit is the context, by text and by ids. */
static void test_context(void **state)
{
    static const char sentence[] = "This model's maximum context length is 320 tokens. However, ";
    sp_text text = {0};
    int32_t *tokens = NULL;
    int32_t ids[320] = {0}, n;
    sp_request request;
    int64_t id;
    sp_error error;

    (void)state;
    for (int i = 0; i < 321; i++)
        sp_text_add(&text, "The "); /* a token each at least */
    assert_int_equal(
        sp_engine_encode(engine, text.data, text.bytes, false, 320, &tokens, &n, &error),
        SP_ERR_TOO_LARGE);
    sp_text_free(&text);
    assert_string_equal(error.code, "context_length_exceeded");
    assert_string_equal(error.subject, "prompt");
    assert_memory_equal(error.text, sentence, sizeof sentence - 1);
    sp_request_default(&request, sizeof request);
    request.tokens = ids;
    request.n_tokens = 300;
    request.max_tokens = 21;
    assert_int_equal(sp_engine_submit(engine, &request, &id, &error), SP_ERR_TOO_LARGE);
    assert_string_equal(error.code, "context_length_exceeded");
    assert_memory_equal(error.text, sentence, sizeof sentence - 1);
    assert_non_null(strstr(error.text, "requested 321 tokens (300 in the prompt, 21 in"));
    assert_non_null(strstr(error.text, "kv-tokens"));
    request.max_tokens = 20;
    assert_ok(sp_engine_check(engine, &request, &error), &error);
}

static void test_ends(void **state)
{
    const int32_t foreign = 1 << 30;
    char *text;
    size_t bytes;
    sp_error error;

    (void)state;
    assert_ok(sp_engine_decode(engine, NULL, 0, false, &text, &bytes, &error), &error);
    assert_int_equal(bytes, 0);
    assert_string_equal(text, "");
    sp_engine_free(text);
    assert_null(sp_engine_token_bytes(engine, foreign, &bytes));
    assert_int_equal(bytes, 0);
    assert_null(sp_engine_token_bytes(engine, -1, &bytes));
}

/* 320 tokens of KV are less than the model's 2048. */
static void test_max_context(void **state)
{
    (void)state;
    assert_int_equal(sp_engine_max_context(engine), 320);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_there_and_back), cmocka_unit_test(test_too_many_tokens),
        cmocka_unit_test(test_context),        cmocka_unit_test(test_ends),
        cmocka_unit_test(test_max_context),
    };

    return cmocka_run_group_tests(tests, open_engine, close_engine);
}
