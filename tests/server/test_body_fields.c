/*
 * Bodies to requests: defaults, every form of a prompt, what is refused by which name, and what is
 * taken without meaning anything.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "server/api/completion_request.h"

#include <string.h>

static sp_status read_text(const char *text, sp_completion_request *out_request, sp_error *error)
{
    const sp_request defaults = sp_request_left_out(SP_LEFT_OUT_API);
    json_t *body = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
    sp_status status;

    assert_non_null(body);
    status = sp_completion_request_read(body, &defaults, out_request, error);
    json_decref(body);
    return status;
}

static void test_defaults(void **state)
{
    sp_completion_request request;
    sp_error error;
    sp_request engine;

    (void)state;
    assert_ok(read_text("{\"prompt\": \"a\\u00e9\"}", &request, &error), &error);
    assert_null(request.fields.model);
    assert_int_equal(request.n_prompts, 1);
    assert_int_equal(request.prompts[0].text_bytes, 3);
    assert_false(request.fields.echo || request.fields.parse_special || request.fields.stream);
    engine = request.fields.request;
    assert_int_equal(engine.max_tokens, 16);
    assert_true(engine.temperature >= 1 && engine.temperature <= 1);
    assert_true(engine.top_p >= 1 && engine.min_p <= 0 && engine.top_k == 0);
    assert_true(engine.lora_scale >= 1 && engine.lora_scale <= 1);
    assert_true(engine.repetition_penalty >= 1 && engine.repetition_penalty <= 1);
    assert_int_equal(request.fields.n, 1);
    assert_int_equal(engine.n_stop_tokens, 0);
    assert_int_equal(engine.min_tokens, 0);
    assert_false(engine.logprobs || engine.keep_special);
    assert_int_equal(engine.speculative, SP_SPECULATIVE_DEFAULT);
    sp_completion_request_free(&request);
}

static void test_all_fields(void **state)
{
    sp_completion_request request;
    sp_error error;
    sp_request engine;

    (void)state;
    assert_ok(read_text("{\"model\": \"m\", \"prompt\": [[5, 6], [7]], \"n\": 3, \"max_tokens\": 9,"
                        "\"temperature\": 0.5, \"top_p\": 0.25, \"top_k\": 4, \"min_p\": 0.125,"
                        "\"seed\": -2, \"stop\": [\"x\", \"yy\"], \"stream\": true,"
                        "\"stream_options\": {\"include_usage\": true}, \"echo\": true,"
                        "\"logprobs\": 0, \"logit_bias\": {\"7\": -3.5}, \"ignore_eos\": true,"
                        "\"presence_penalty\": 0.5, \"frequency_penalty\": -0.5,"
                        "\"repetition_penalty\": 1.5, \"lora_scale\": 2,"
                        "\"stop_token_ids\": [8, 2], \"min_tokens\": 4,"
                        "\"skip_special_tokens\": false, \"speculative\": true}",
                        &request, &error),
              &error);
    engine = request.fields.request;
    assert_string_equal(request.fields.model, "m");
    assert_int_equal(request.n_prompts, 2);
    assert_int_equal(request.prompts[0].n_tokens, 2);
    assert_int_equal(request.prompts[0].tokens[1], 6);
    assert_int_equal(request.prompts[1].tokens[0], 7);
    assert_true(request.fields.request.seed == (uint64_t)-2);
    assert_int_equal(engine.n_stop, 2);
    assert_string_equal(engine.stop[1], "yy");
    assert_true(engine.logprobs && engine.top_logprobs == 0 && engine.ignore_eos);
    assert_int_equal(engine.n_logit_bias, 1);
    assert_int_equal(engine.logit_bias[0].token, 7);
    assert_true(engine.logit_bias[0].bias <= -3.5f && engine.logit_bias[0].bias >= -3.5f);
    assert_true(engine.presence_penalty > 0 && engine.frequency_penalty < 0);
    assert_true(request.fields.include_usage && request.fields.echo);
    assert_int_equal(engine.n_stop_tokens, 2);
    assert_int_equal(engine.stop_tokens[0], 8);
    assert_int_equal(engine.stop_tokens[1], 2);
    assert_int_equal(engine.min_tokens, 4);
    assert_true(engine.keep_special);
    assert_int_equal(engine.speculative, SP_SPECULATIVE_ON);
    /* Nothing but its own ids ends a text that ignores ends. */
    assert_ok(sp_body_fields_set_ends(&request.fields, NULL, (const int32_t[]){7}, 1, &error),
              &error);
    assert_int_equal(request.fields.request.n_stop_tokens, 2);
    sp_completion_request_free(&request);
}

static void check_ends(const sp_completion_request *request, bool ignore_eos, const int32_t *want,
                       int32_t n)
{
    assert_true(request->fields.request.ignore_eos == ignore_eos);
    assert_int_equal(request->fields.request.n_stop_tokens, n);
    for (int32_t i = 0; i < n; i++)
        assert_int_equal(request->fields.request.stop_tokens[i], want[i]);
}

/* An adapter's ends take the place of the base's, and may be taken back for another adapter. */
static void test_ends(void **state)
{
    const sp_lora_chat own = {.has_ends = true, .n_ends = 2, .ends = {3, 4}};
    const sp_lora_chat none = {.has_ends = true};
    const sp_lora_chat template_alone = {.has_ends = false};
    sp_lora_chat broken = {.has_ends = false};
    sp_completion_request request;
    sp_error error;

    (void)state;
    sp_fail(&broken.ends_error, SP_ERR_INPUT, SP_CODE_GENERATION_CONFIG, "", -1, "why");
    assert_ok(read_text("{\"prompt\": \"a\", \"stop_token_ids\": [8]}", &request, &error), &error);
    assert_ok(sp_body_fields_set_ends(&request.fields, &own, (const int32_t[]){7}, 1, &error),
              &error);
    check_ends(&request, true, (const int32_t[]){8, 3, 4, 7}, 4);
    assert_int_equal(sp_body_fields_set_ends(&request.fields, &broken, NULL, 0, &error),
                     SP_ERR_INPUT);
    assert_string_equal(error.code, SP_CODE_GENERATION_CONFIG);
    assert_ok(sp_body_fields_set_ends(&request.fields, &none, NULL, 0, &error), &error);
    check_ends(&request, true, (const int32_t[]){8}, 1);
    assert_ok(
        sp_body_fields_set_ends(&request.fields, &template_alone, (const int32_t[]){7}, 1, &error),
        &error);
    check_ends(&request, false, (const int32_t[]){8, 7}, 2);
    assert_ok(sp_body_fields_set_ends(&request.fields, NULL, NULL, 0, &error), &error);
    check_ends(&request, false, (const int32_t[]){8}, 1);
    sp_completion_request_free(&request);
}

typedef struct bad_body {
    const char *text, *subject, *code;
} bad_body;

static void test_refusals(void **state)
{
    static const bad_body bad[] = {
        {"{}", "prompt", ""},
        {"{\"prompt\": {}}", "prompt", ""},
        {"{\"prompt\": [1, 2.5]}", "prompt", ""},
        {"{\"prompt\": [\"a\", 5]}", "prompt", ""},
        {"{\"prompt\": [4294967296]}", "prompt", ""},
        {"{\"prompt\": \"a\", \"n\": 0}", "n", ""},
        {"{\"prompt\": \"a\", \"max_tokens\": -1}", "max_tokens", ""},
        {"{\"prompt\": \"a\", \"stream\": 1}", "stream", ""},
        {"{\"prompt\": \"a\", \"stop\": [\"\"]}", "stop", ""},
        {"{\"prompt\": \"a\", \"stop\": [5]}", "stop", ""},
        {"{\"prompt\": \"a\", \"logit_bias\": {\"-1\": 1}}", "logit_bias", ""},
        {"{\"prompt\": \"a\", \"logit_bias\": {\"1\": true}}", "logit_bias", ""},
        {"{\"prompt\": \"a\", \"logprobs\": true}", "logprobs", ""},
        {"{\"prompt\": \"a\", \"stream_options\": {}}", "stream_options", ""},
        {"{\"prompt\": \"a\", \"messages\": []}", "messages", SP_CODE_UNKNOWN_FIELD},
        {"{\"prompt\": \"a\", \"Temperature\": 1}", "Temperature", SP_CODE_UNKNOWN_FIELD},
        {"{\"prompt\": \"a\", \"use_beam_search\": true}", "use_beam_search",
         SP_CODE_UNSUPPORTED_FIELD},
        {"{\"prompt\": \"a\", \"stop_token_ids\": 3}", "stop_token_ids", ""},
        {"{\"prompt\": \"a\", \"stop_token_ids\": [-1]}", "stop_token_ids", ""},
        {"{\"prompt\": \"a\", \"stop_token_ids\": [true]}", "stop_token_ids", ""},
        {"{\"prompt\": \"a\", \"stop_token_ids\": {}}", "stop_token_ids", ""},
        {"{\"prompt\": \"a\", \"min_tokens\": -1}", "min_tokens", ""},
        {"{\"prompt\": \"a\", \"min_tokens\": 1.5}", "min_tokens", ""},
        {"{\"prompt\": \"a\", \"skip_special_tokens\": 0}", "skip_special_tokens", ""},
        {"{\"prompt\": \"a\", \"speculative\": 1}", "speculative", ""},
        {"{\"prompt\": \"a\", \"response_format\": {\"type\": \"grammar\"}}", "response_format",
         SP_CODE_UNSUPPORTED_FIELD},
    };
    size_t bytes = sp_alloc_bytes();

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        sp_completion_request request;
        sp_error error = {.code = ""};

        assert_int_equal(read_text(bad[i].text, &request, &error), SP_ERR_INPUT);
        assert_string_equal(error.subject, bad[i].subject);
        assert_string_equal(error.code ? error.code : "", bad[i].code);
    }
    assert_int_equal(sp_alloc_bytes(), bytes);
}

/* Fields belong to bodies; what is inside of one is known by it. */
static void test_known(void **state)
{
    (void)state;
    assert_true(sp_body_fields_know(SP_FIELDS_CHAT, "messages[2].content[0].type"));
    assert_true(sp_body_fields_know(SP_FIELDS_CHAT, "chat_template_kwargs.x"));
    assert_true(sp_body_fields_know(SP_FIELDS_TOKENIZE, "messages"));
    assert_true(sp_body_fields_know(SP_FIELDS_LOAD, "lora_path"));
    assert_false(sp_body_fields_know(SP_FIELDS_NAME, "lora_path"));
    assert_false(sp_body_fields_know(SP_FIELDS_COMPLETION, "messages"));
    assert_false(sp_body_fields_know(SP_FIELDS_CHAT, "message"));
    assert_false(sp_body_fields_know(SP_FIELDS_CHAT, "messagesx"));
    assert_false(sp_body_fields_know(SP_FIELDS_CHAT, ""));
    assert_false(sp_body_fields_know(SP_FIELDS_COMPLETION, "tokenizer.json"));
    assert_false(sp_body_fields_know(SP_FIELDS_NONE, "model"));
}

static void test_harmless(void **state)
{
    sp_completion_request request;
    sp_error error;

    (void)state;
    assert_ok(read_text("{\"prompt\": \"a\", \"user\": \"u\", \"best_of\": 1, \"suffix\": \"\","
                        "\"what\": null, \"min_tokens\": 0, \"logprobs\": null,"
                        "\"response_format\": {\"type\": \"text\"}, \"stop\": []}",
                        &request, &error),
              &error);
    assert_int_equal(request.fields.request.n_stop, 0);
    assert_false(request.fields.request.logprobs);
    sp_completion_request_free(&request);
}

static void test_no_memory(void **state)
{
    static const char text[] = "{\"prompt\": [[5, 6], [7]], \"stop\": [\"x\"], "
                               "\"stop_token_ids\": [4], "
                               "\"logit_bias\": {\"7\": 1}}";
    size_t bytes = sp_alloc_bytes();
    sp_status status = SP_ERR_MEMORY;

    (void)state;
    for (int64_t n = 0; status == SP_ERR_MEMORY; n++) {
        sp_completion_request request;
        sp_error error;

        sp_alloc_fail_after(n);
        status = read_text(text, &request, &error);
        sp_alloc_fail_after(-1);
        assert_true(status == SP_OK || status == SP_ERR_MEMORY);
        if (status == SP_OK)
            sp_completion_request_free(&request);
        assert_int_equal(sp_alloc_bytes(), bytes);
        assert_true(n < 20);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),  cmocka_unit_test(test_all_fields),
        cmocka_unit_test(test_ends),      cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_harmless),  cmocka_unit_test(test_known),
        cmocka_unit_test(test_no_memory),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
