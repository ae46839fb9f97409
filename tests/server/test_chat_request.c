/* The body of a chat: the fields of the conversation, two names for a length, logprobs by a yes. */
#include "support/test.h"

#include "base/alloc.h"
#include "server/api/chat_request.h"

#include <stdio.h>
#include <string.h>

#define HELLO "\"messages\": [{\"role\": \"user\", \"content\": \"hello\"}]"

static sp_status read_text(const char *text, sp_chat_completion_request *out_request,
                           sp_error *error)
{
    const sp_request defaults = sp_request_left_out(SP_LEFT_OUT_API);
    json_t *body = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
    sp_status status;

    assert_non_null(body);
    status = sp_chat_completion_request_read(body, &defaults, out_request, error);
    json_decref(body);
    return status;
}

/* `fields` follow a good list of messages. */
static void read_good(const char *fields, sp_chat_completion_request *out_request)
{
    char text[512];
    sp_error error;

    snprintf(text, sizeof text, "{" HELLO "%s}", fields);
    assert_ok(read_text(text, out_request, &error), &error);
}

static void check_bad(const char *text, const char *subject, const char *code)
{
    size_t before = sp_alloc_bytes();
    sp_chat_completion_request request;
    sp_error error;

    assert_int_equal(read_text(text, &request, &error), SP_ERR_INPUT);
    assert_string_equal(error.subject, subject);
    assert_string_equal(error.code ? error.code : "", code);
    assert_int_equal(sp_alloc_bytes(), before);
}

static void test_left_out(void **state)
{
    sp_chat_completion_request request;

    (void)state;
    read_good("", &request);
    assert_int_equal(json_array_size(request.chat.messages), 1);
    assert_null(request.chat.tools);
    assert_null(request.chat.tool_choice);
    assert_null(request.chat.effort);
    assert_true(request.chat.add_generation_prompt);
    assert_false(request.chat.continue_final_message || request.fields.one_call);
    assert_int_equal(request.fields.request.max_tokens, -1); /* the room that there is */
    assert_int_equal(request.fields.n, 1);
    assert_false(request.fields.request.logprobs);
    sp_chat_completion_request_free(&request);
}

static void test_conversation(void **state)
{
    sp_chat_completion_request request;

    (void)state;
    read_good(", \"continue_final_message\": true, \"tools\": [], \"tool_choice\": \"none\", "
              "\"chat_template_kwargs\": {\"x\": 1}, \"parallel_tool_calls\": false",
              &request);
    assert_false(request.chat.add_generation_prompt);
    assert_true(request.chat.continue_final_message && request.fields.one_call);
    assert_string_equal(json_string_value(request.chat.tool_choice), "none");
    assert_int_equal(json_object_size(request.chat.template_kwargs), 1);
    assert_true(json_is_array(request.chat.tools));
    sp_chat_completion_request_free(&request);
    read_good(", \"add_generation_prompt\": false, \"chat_template_kwargs\": null", &request);
    assert_false(request.chat.add_generation_prompt || request.chat.continue_final_message);
    sp_chat_completion_request_free(&request);
}

static void check_length(const char *fields, int32_t want)
{
    sp_chat_completion_request request;

    read_good(fields, &request);
    assert_int_equal(request.fields.request.max_tokens, want);
    sp_chat_completion_request_free(&request);
}

static void test_length(void **state)
{
    (void)state;
    check_length(", \"max_tokens\": 3", 3);
    check_length(", \"max_completion_tokens\": 4", 4);
    check_length(", \"max_tokens\": 5, \"max_completion_tokens\": 5", 5);
    check_length(", \"max_tokens\": null, \"max_completion_tokens\": 6", 6);
    check_length(", \"max_tokens\": 7, \"max_completion_tokens\": null", 7);
    check_length(", \"max_tokens\": 2147483647", INT32_MAX);
    check_bad("{" HELLO ", \"max_tokens\": 3, \"max_completion_tokens\": 4}", "max_tokens", "");
    check_bad("{" HELLO ", \"max_tokens\": 0}", "max_tokens", "");
    check_bad("{" HELLO ", \"max_completion_tokens\": 0}", "max_tokens", "");
    check_bad("{" HELLO ", \"max_completion_tokens\": -1}", "max_completion_tokens", "");
    check_bad("{" HELLO ", \"max_tokens\": 2147483648}", "max_tokens", "");
}

static void test_logprobs(void **state)
{
    sp_chat_completion_request request;

    (void)state;
    read_good(", \"logprobs\": true, \"top_logprobs\": 20", &request);
    assert_true(request.fields.request.logprobs);
    assert_int_equal(request.fields.request.top_logprobs, 20);
    sp_chat_completion_request_free(&request);
    read_good(", \"top_logprobs\": 0", &request);
    assert_false(request.fields.request.logprobs);
    sp_chat_completion_request_free(&request);
    check_bad("{" HELLO ", \"top_logprobs\": 2}", "top_logprobs", "");
    check_bad("{" HELLO ", \"logprobs\": false, \"top_logprobs\": 2}", "top_logprobs", "");
    check_bad("{" HELLO ", \"logprobs\": true, \"top_logprobs\": 21}", "top_logprobs", "");
    check_bad("{" HELLO ", \"logprobs\": 2}", "logprobs", "");
}

static void test_refused(void **state)
{
    (void)state;
    check_bad("{}", "messages", "");
    check_bad("{\"messages\": []}", "messages", "");
    check_bad("{\"messages\": null}", "messages", "");
    check_bad("{\"messages\": \"hello\"}", "messages", "");
    check_bad("{" HELLO ", \"prompt\": \"a\"}", "prompt", SP_CODE_UNKNOWN_FIELD);
    check_bad("{" HELLO ", \"best_of\": 1}", "best_of", SP_CODE_UNKNOWN_FIELD);
    check_bad("{" HELLO ", \"echo\": true}", "echo", SP_CODE_UNSUPPORTED_FIELD);
    check_bad("{" HELLO ", \"functions\": [{}]}", "functions", SP_CODE_UNSUPPORTED_FIELD);
    check_bad("{" HELLO ", \"chat_template\": \"x\"}", "chat_template", SP_CODE_UNSUPPORTED_FIELD);
    check_bad("{" HELLO ", \"chat_template_kwargs\": []}", "chat_template_kwargs", "");
    check_bad("{" HELLO ", \"parallel_tool_calls\": 1}", "parallel_tool_calls", "");
    check_bad("{" HELLO ", \"add_generation_prompt\": true, \"continue_final_message\": true}",
              "continue_final_message", "");
    check_bad("{" HELLO ", \"stream_options\": {\"include_usage\": true}}", "stream_options", "");
    check_bad("{" HELLO ", \"stream\": true, \"stream_options\": {\"x\": true}}", "stream_options",
              SP_CODE_UNSUPPORTED_FIELD);
}

static void test_stream_options(void **state)
{
    sp_chat_completion_request request;

    (void)state;
    /* The order of the body does not matter. */
    read_good(", \"stream_options\": {\"continuous_usage_stats\": true, \"include_usage\": true, "
              "\"x\": null}, \"stream\": true",
              &request);
    assert_true(request.fields.stream && request.fields.include_usage && request.fields.usage_each);
    sp_chat_completion_request_free(&request);
    read_good(", \"stream\": true, \"stream_options\": {\"continuous_usage_stats\": true}",
              &request);
    assert_false(request.fields.include_usage || request.fields.usage_each);
    sp_chat_completion_request_free(&request);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_left_out), cmocka_unit_test(test_conversation),
        cmocka_unit_test(test_length),   cmocka_unit_test(test_logprobs),
        cmocka_unit_test(test_refused),  cmocka_unit_test(test_stream_options),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
