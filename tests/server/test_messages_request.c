/* Bodies of /v1/messages as bodies of chat: the whole translation, by hand, and what is refused. */
#include "support/test.h"

#include "base/alloc.h"
#include "server/api/body_fields.h"
#include "server/api/messages_request.h"

#include <string.h>

#define USER   "\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]"
#define NO     "\"chat_template_kwargs\": {\"enable_thinking\": false}"
#define TOKENS "\"max_tokens\": 5"

static void check_as(bool counts, const char *from, const char *to)
{
    json_t *body = json_loads(from, 0, NULL), *want = json_loads(to, 0, NULL), *chat = NULL;
    sp_error error;

    if (!body || !want)
        fail_msg("%s: %s", from, to);
    assert_ok(sp_messages_to_chat(body, counts, &chat, &error), &error);
    if (!json_equal(chat, want))
        fail_msg("%s becomes %s", from, json_dumps(chat, 0));
    json_decref(body);
    json_decref(want);
    json_decref(chat);
}

static void check(const char *from, const char *to)
{
    check_as(false, from, to);
}

static void test_messages(void **state)
{
    (void)state;
    check("{" USER ", " TOKENS "}", "{" USER ", " TOKENS ", " NO "}");
    check("{" USER ", " TOKENS ", \"system\": \"s\"}",
          "{\"messages\": [{\"role\": \"system\", \"content\": \"s\"}, {\"role\": \"user\", "
          "\"content\": \"a\"}], " TOKENS ", " NO "}");
    check(
        "{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"text\": \"a\", "
        "\"cache_control\": {}}]}, {\"role\": \"assistant\", \"content\": [{\"type\": "
        "\"thinking\", \"thinking\": \"t\"}, {\"type\": \"text\", \"text\": \"b\"}, {\"type\": "
        "\"tool_use\", \"id\": \"i\", \"name\": \"f\", \"input\": {\"x\": 1}}, {\"type\": "
        "\"tool_use\", \"id\": \"j\", \"name\": \"g\"}]}, {\"role\": \"user\", \"content\": "
        "[{\"type\": \"text\", \"text\": \"c\"}, {\"type\": \"tool_result\", \"tool_use_id\": "
        "\"i\", \"content\": \"7\"}, {\"type\": \"tool_result\", \"tool_use_id\": \"j\", "
        "\"content\": [{\"type\": \"text\", \"text\": \"8\"}]}, {\"type\": \"tool_result\", "
        "\"tool_use_id\": \"k\"}, {\"type\": \"text\", \"text\": \"d\"}]}], " TOKENS "}",
        "{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"text\": "
        "\"a\"}]}, {\"role\": \"assistant\", \"content\": [{\"type\": \"text\", \"text\": "
        "\"b\"}], \"tool_calls\": [{\"type\": \"function\", \"id\": \"i\", \"function\": "
        "{\"name\": \"f\", \"arguments\": \"{\\\"x\\\":1}\"}}, {\"type\": \"function\", \"id\": "
        "\"j\", \"function\": {\"name\": \"g\", \"arguments\": \"{}\"}}]}, {\"role\": \"user\", "
        "\"content\": [{\"type\": \"text\", \"text\": \"c\"}]}, {\"role\": \"tool\", "
        "\"tool_call_id\": \"i\", \"content\": \"7\"}, {\"role\": \"tool\", \"tool_call_id\": "
        "\"j\", \"content\": [{\"type\": \"text\", \"text\": \"8\"}]}, {\"role\": \"tool\", "
        "\"tool_call_id\": \"k\", \"content\": \"\"}, {\"role\": \"user\", \"content\": "
        "[{\"type\": \"text\", \"text\": \"d\"}]}], " TOKENS ", " NO "}");
    check("{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", "
          "\"content\": \"b\"}], " TOKENS "}",
          "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", "
          "\"content\": \"b\"}], " TOKENS ", \"continue_final_message\": true, "
          "\"add_generation_prompt\": false, " NO "}");
}

static void test_fields(void **state)
{
    (void)state;
    check("{" USER ", " TOKENS ", \"model\": \"m\", \"top_k\": 3, \"stop_sequences\": [\"x\"], "
          "\"stream\": true, \"metadata\": {}, \"nobody\": 1, \"container\": null, "
          "\"thinking\": {\"type\": \"enabled\", \"budget_tokens\": 9}}",
          "{" USER ", " TOKENS ", \"model\": \"m\", \"top_k\": 3, \"stop\": [\"x\"], \"stream\": "
          "true, \"metadata\": {}, \"nobody\": 1, \"chat_template_kwargs\": {\"enable_thinking\": "
          "true}}");
    check("{" USER ", " TOKENS ", \"chat_template_kwargs\": {\"k\": 1}, \"thinking\": {\"type\": "
          "\"disabled\"}}",
          "{" USER ", " TOKENS ", \"chat_template_kwargs\": {\"k\": 1}}");
    check("{" USER ", " TOKENS ", \"tools\": [{\"name\": \"f\", \"description\": \"d\", "
          "\"input_schema\": {\"x\": 1}, \"strict\": true}, {\"type\": \"custom\", \"name\": "
          "\"g\"}], \"tool_choice\": {\"type\": \"tool\", \"name\": \"f\", "
          "\"disable_parallel_tool_use\": true}}",
          "{" USER ", " TOKENS ", \"tools\": [{\"type\": \"function\", \"function\": {\"name\": "
          "\"f\", \"description\": \"d\", \"parameters\": {\"x\": 1}, \"strict\": true}}, "
          "{\"type\": \"function\", \"function\": {\"name\": \"g\"}}], \"tool_choice\": {\"type\": "
          "\"function\", \"function\": {\"name\": \"f\"}}, \"parallel_tool_calls\": false, " NO
          "}");
    check("{" USER ", " TOKENS ", \"tool_choice\": {\"type\": \"any\"}}",
          "{" USER ", " TOKENS ", \"tool_choice\": \"required\", " NO "}");
    check("{" USER ", " TOKENS ", \"output_config\": {\"effort\": \"low\", \"format\": {\"type\": "
          "\"json_schema\", \"schema\": {\"x\": 1}}}}",
          "{" USER ", " TOKENS ", \"response_format\": {\"type\": \"json_schema\", "
          "\"json_schema\": {\"schema\": {\"x\": 1}}}, " NO "}");
}

static void test_counts(void **state)
{
    (void)state;
    check_as(true,
             "{" USER ", \"model\": \"m\", \"tool_choice\": {\"type\": \"none\", "
             "\"disable_parallel_tool_use\": true}, \"stop_sequences\": [\"x\"]}",
             "{" USER ", \"model\": \"m\", \"tool_choice\": \"none\", " NO "}");
}

static void test_refused(void **state)
{
    static const struct {
        const char *body, *subject, *code;
        bool counts;
    } rows[] = {
        {"{" USER "}", "max_tokens", NULL, false},
        {"{" USER ", \"max_tokens\": \"5\"}", "max_tokens", NULL, false},
        {"{" TOKENS "}", "messages", NULL, false},
        {"{" TOKENS ", \"messages\": []}", "messages", NULL, false},
        {"{" TOKENS ", \"messages\": [7]}", "messages", SP_CHAT_BAD_MESSAGES, false},
        {"{" TOKENS ", \"messages\": [{\"role\": \"tool\", \"content\": \"a\"}]}", "messages",
         SP_CHAT_BAD_MESSAGES, false},
        {"{" TOKENS ", \"messages\": [{\"role\": \"user\"}]}", "messages", SP_CHAT_BAD_MESSAGES,
         false},
        {"{" TOKENS ", \"messages\": [{\"role\": \"assistant\", \"content\": [{\"type\": "
         "\"tool_result\"}]}]}",
         "messages", SP_CHAT_BAD_CONTENT_TYPE, false},
        {"{" TOKENS ", \"messages\": [{\"role\": \"user\", \"content\": [{\"type\": "
         "\"document\"}]}]}",
         "messages", SP_CHAT_BAD_CONTENT_TYPE, false},
        {"{" USER ", " TOKENS ", \"system\": [{\"type\": \"image\"}]}", "system",
         SP_CHAT_BAD_CONTENT_TYPE, false},
        {"{" USER ", " TOKENS ", \"tools\": [{\"type\": \"bash_20250124\", \"name\": \"b\"}]}",
         "tools", SP_CODE_UNSUPPORTED_FIELD, false},
        {"{" USER ", " TOKENS ", \"tool_choice\": \"auto\"}", "tool_choice", NULL, false},
        {"{" USER ", " TOKENS ", \"thinking\": {\"type\": \"deep\"}}", "thinking", NULL, false},
        {"{" USER ", " TOKENS ", \"output_config\": {\"format\": {\"type\": \"xml\"}}}",
         "output_config", SP_CODE_UNSUPPORTED_FIELD, false},
        {"{" USER ", " TOKENS ", \"mcp_servers\": [1]}", "mcp_servers", SP_CODE_UNSUPPORTED_FIELD,
         false},
        {"{" USER ", " TOKENS ", \"n\": 2}", "n", SP_CODE_UNSUPPORTED_FIELD, false},
        {"{" USER ", \"max_tokens\": 3}", "max_tokens", SP_CODE_UNKNOWN_FIELD, true},
    };
    size_t before = sp_alloc_bytes();

    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        json_t *body = json_loads(rows[i].body, 0, NULL), *chat = NULL;
        sp_error error;

        assert_non_null(body);
        assert_int_equal(sp_messages_to_chat(body, rows[i].counts, &chat, &error), SP_ERR_INPUT);
        assert_null(chat);
        assert_string_equal(error.subject, rows[i].subject);
        if (rows[i].code)
            assert_string_equal(error.code, rows[i].code);
        json_decref(body);
    }
    assert_int_equal(sp_alloc_bytes(), before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_messages),
        cmocka_unit_test(test_fields),
        cmocka_unit_test(test_counts),
        cmocka_unit_test(test_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
