/* Bodies of /v1/responses as bodies of chat: the whole translation, by hand, and what is refused.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "server/api/body_fields.h"
#include "server/api/responses_request.h"

#include <string.h>

static void check(const char *from, const char *to)
{
    json_t *body = json_loads(from, 0, NULL), *want = json_loads(to, 0, NULL), *chat = NULL;
    sp_error error;

    assert_true(body && want);
    assert_ok(sp_responses_to_chat(body, &chat, &error), &error);
    if (!json_equal(chat, want))
        fail_msg("%s becomes %s", from, json_dumps(chat, 0));
    json_decref(body);
    json_decref(want);
    json_decref(chat);
}

static void test_translation(void **state)
{
    (void)state;
    check("{\"input\": \"a\"}", "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}");
    check("{\"input\": \"a\", \"instructions\": \"s\", \"max_output_tokens\": 5, \"top_k\": 3, "
          "\"previous_response_id\": null, \"background\": false, \"include\": [\"x\"], "
          "\"truncation\": \"auto\", \"nobody\": 1}",
          "{\"messages\": [{\"role\": \"system\", \"content\": \"s\"}, {\"role\": \"user\", "
          "\"content\": \"a\"}], \"max_tokens\": 5, \"top_k\": 3, \"nobody\": 1}");
    check("{\"input\": [{\"role\": \"user\", \"content\": [{\"type\": \"input_text\", \"text\": "
          "\"a\"}]}, {\"type\": \"message\", \"role\": \"assistant\", \"content\": [{\"type\": "
          "\"output_text\", \"text\": \"b\", \"annotations\": []}]}, {\"type\": \"reasoning\", "
          "\"summary\": []}, {\"type\": \"function_call\", \"call_id\": \"c\", \"name\": \"f\", "
          "\"arguments\": \"{}\"}, {\"type\": \"function_call\", \"call_id\": \"d\", \"name\": "
          "\"g\", \"arguments\": \"{}\"}, {\"type\": \"function_call_output\", \"call_id\": \"c\", "
          "\"output\": \"7\"}]}",
          "{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"text\": "
          "\"a\"}]}, {\"role\": \"assistant\", \"content\": [{\"type\": \"text\", \"text\": "
          "\"b\"}]}, {\"role\": \"assistant\", \"content\": null, \"tool_calls\": [{\"type\": "
          "\"function\", \"id\": \"c\", \"function\": {\"name\": \"f\", \"arguments\": \"{}\"}}, "
          "{\"type\": \"function\", \"id\": \"d\", \"function\": {\"name\": \"g\", \"arguments\": "
          "\"{}\"}}]}, {\"role\": \"tool\", \"tool_call_id\": \"c\", \"content\": \"7\"}]}");
    check("{\"input\": \"a\", \"tools\": [{\"type\": \"function\", \"name\": \"f\", "
          "\"description\": null, \"parameters\": {\"x\": 1}, \"strict\": true}], "
          "\"tool_choice\": {\"type\": \"function\", \"name\": \"f\"}}",
          "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"tools\": [{\"type\": "
          "\"function\", \"function\": {\"name\": \"f\", \"parameters\": {\"x\": 1}, \"strict\": "
          "true}}], \"tool_choice\": {\"type\": \"function\", \"function\": {\"name\": \"f\"}}}");
    check("{\"input\": \"a\", \"tools\": [], \"tool_choice\": \"required\", \"text\": "
          "{\"format\": {\"type\": \"json_schema\", \"name\": \"n\", \"schema\": {}}}, "
          "\"reasoning\": {\"effort\": \"none\"}}",
          "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"tool_choice\": "
          "\"required\", \"response_format\": {\"type\": \"json_schema\", \"json_schema\": "
          "{\"schema\": {}}}, \"chat_template_kwargs\": {\"enable_thinking\": false}}");
    check("{\"input\": \"a\", \"text\": {\"format\": {\"type\": \"text\"}}, \"reasoning\": "
          "{\"effort\": \"high\"}}",
          "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"response_format\": "
          "{\"type\": \"text\"}}");
}

static void test_refused(void **state)
{
    static const struct {
        const char *body, *subject;
    } rows[] = {
        {"{}", "input"},
        {"{\"input\": []}", "input"},
        {"{\"input\": 5}", "input"},
        {"{\"input\": [5]}", "input"},
        {"{\"input\": [{\"type\": \"item_reference\", \"id\": \"a\"}]}", "input"},
        {"{\"input\": [{\"role\": \"user\", \"content\": [{\"type\": \"input_image\"}]}]}",
         "input"},
        {"{\"input\": \"a\", \"tools\": [{\"type\": \"web_search\"}]}", "tools"},
        {"{\"input\": \"a\", \"previous_response_id\": \"resp-1\"}", "previous_response_id"},
        {"{\"input\": \"a\", \"conversation\": {\"id\": \"c\"}}", "conversation"},
        {"{\"input\": \"a\", \"background\": true}", "background"},
        {"{\"input\": \"a\", \"messages\": []}", "messages"},
        {"{\"input\": \"a\", \"n\": 2}", "n"},
    };
    size_t before = sp_alloc_bytes();

    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        json_t *body = json_loads(rows[i].body, 0, NULL), *chat = NULL;
        sp_error error;

        assert_non_null(body);
        if (sp_responses_to_chat(body, &chat, &error) != SP_ERR_INPUT)
            fail_msg("%s is taken", rows[i].body);
        assert_string_equal(error.subject, rows[i].subject);
        assert_null(chat);
        json_decref(body);
    }
    assert_int_equal(sp_alloc_bytes(), before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_translation),
        cmocka_unit_test(test_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
