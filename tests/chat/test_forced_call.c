/*
 * "tool_choice" that forces a call: which texts it makes of the tools, and what is refused. The
 * text is read back as JSON here, and compared with what the template's own form of a call is.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "chat/chat_state.h"
#include "chat/forced_call.h"

#include <string.h>

static const char tools[] =
    "[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"type\":\"object\"}}},"
    "{\"type\":\"function\",\"function\":{\"name\":\"g\"}}]";

static sp_status render(const char *template, const char *tool_list, const char *choice,
                        bool one_call, sp_chat_prompt *out_prompt, sp_error *error)
{
    json_t *messages = json_loads("[{\"role\":\"user\",\"content\":\"x\"}]", 0, NULL);
    json_t *list = tool_list ? json_loads(tool_list, 0, NULL) : NULL;
    json_t *tool_choice = json_loads(choice, JSON_DECODE_ANY, NULL);
    sp_chat_request request;
    sp_chat *chat;
    sp_status status;

    assert_ok(sp_chat_parse(template, strlen(template), "t", NULL, &chat, error), error);
    sp_chat_request_default(&request);
    request.messages = messages;
    request.tools = list;
    request.tool_choice = tool_choice;
    request.one_call = one_call;
    status = sp_chat_render(chat, &request, out_prompt, error);
    sp_chat_close(chat);
    json_decref(messages);
    json_decref(list);
    json_decref(tool_choice);
    return status;
}

static json_t *forced(const char *choice, bool one_call)
{
    sp_chat_prompt prompt = {0};
    sp_error error;
    json_t *root;

    assert_ok(render(sp_qwen_form, tools, choice, one_call, &prompt, &error), &error);
    assert_non_null(prompt.forced.data);
    root = json_loadb(prompt.forced.data, prompt.forced.bytes, 0, NULL);
    assert_non_null(root);
    assert_string_equal(json_string_value(json_object_get(root, "begin")),
                        "<tool_call>\n{\"name\": \"");
    assert_string_equal(json_string_value(json_object_get(root, "middle")), "\", \"arguments\": ");
    assert_string_equal(json_string_value(json_object_get(root, "end")), "}\n</tool_call>");
    sp_chat_prompt_free(&prompt);
    return root;
}

static const char *name_of(const json_t *root, size_t i)
{
    return json_string_value(
        json_object_get(json_array_get(json_object_get(root, "tools"), i), "name"));
}

static void test_texts(void **state)
{
    json_t *root = forced("\"required\"", false), *list = json_object_get(root, "tools");

    (void)state;
    assert_true(json_is_true(json_object_get(root, "many")));
    assert_int_equal(json_array_size(list), 2);
    assert_string_equal(name_of(root, 0), "f");
    assert_string_equal(name_of(root, 1), "g");
    assert_true(json_is_object(json_object_get(json_array_get(list, 0), "parameters")));
    assert_true(json_is_null(json_object_get(json_array_get(list, 1), "parameters")));
    json_decref(root);
    root = forced("\"required\"", true);
    assert_true(json_is_false(json_object_get(root, "many")));
    json_decref(root);
    root = forced("{\"type\":\"function\",\"function\":{\"name\":\"g\"}}", false);
    assert_true(json_is_false(json_object_get(root, "many")));
    assert_int_equal(json_array_size(json_object_get(root, "tools")), 1);
    assert_string_equal(name_of(root, 0), "g");
    json_decref(root);
}

static void test_not_forced(void **state)
{
    static const char *const choices[] = {"\"auto\"", "\"none\"", "null"};

    (void)state;
    for (int i = 0; i < 3; i++) {
        sp_chat_prompt prompt = {0};
        sp_error error;

        assert_ok(render(sp_qwen_form, tools, choices[i], false, &prompt, &error), &error);
        assert_null(prompt.forced.data);
        sp_chat_prompt_free(&prompt);
    }
}

/* The tags of a template that has them, in place of JSON. */
static void test_tags(void **state)
{
    sp_chat_prompt prompt = {0};
    sp_error error;
    json_t *root;

    (void)state;
    assert_ok(render("<tool_call>\n<function=NAME>", tools, "\"required\"", true, &prompt, &error),
              &error);
    root = json_loadb(prompt.forced.data, prompt.forced.bytes, 0, NULL);
    assert_true(json_is_true(json_object_get(root, "tagged")));
    assert_string_equal(json_string_value(json_object_get(root, "begin")),
                        "<tool_call>\n<function=");
    assert_string_equal(json_string_value(json_object_get(root, "middle")), ">\n");
    assert_string_equal(json_string_value(json_object_get(root, "end")),
                        "</function>\n</tool_call>");
    assert_true(json_is_null(json_object_get(root, "free")));
    json_decref(root);
    sp_chat_prompt_free(&prompt);
}

/* Strict tools that the model may call: other text is free, and so are other tools' arguments. */
static void test_strict(void **state)
{
    static const char strict[] =
        "[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"strict\":true,\"parameters\":{"
        "\"type\":\"object\"}}},{\"type\":\"function\",\"function\":{\"name\":\"g\"}}]";
    static const char *const choices[] = {"\"auto\"", "null"};

    (void)state;
    for (int i = 0; i < 2; i++) {
        sp_chat_prompt prompt = {0};
        sp_error error;
        json_t *root, *list;

        assert_ok(render(sp_qwen_form, strict, choices[i], i == 0, &prompt, &error), &error);
        assert_true(prompt.may_call);
        root = json_loadb(prompt.forced.data, prompt.forced.bytes, 0, NULL);
        list = json_object_get(root, "tools");
        assert_string_equal(json_string_value(json_object_get(root, "free")), "<tool_call>");
        assert_int_equal(json_is_true(json_object_get(root, "many")), i == 1);
        assert_true(json_is_false(json_object_get(json_array_get(list, 0), "any")));
        assert_true(json_is_true(json_object_get(json_array_get(list, 1), "any")));
        json_decref(root);
        sp_chat_prompt_free(&prompt);
        assert_ok(render("plain", strict, choices[i], false, &prompt, &error), &error);
        assert_null(prompt.forced.data); /* a template without calls */
        sp_chat_prompt_free(&prompt);
    }
}

static void test_refused(void **state)
{
    static const struct {
        const char *template, *tools, *choice, *word;
    } rows[] = {
        {sp_qwen_form, NULL, "\"required\"", "no tools"},
        {sp_qwen_form, "[]", "\"required\"", "no tools"},
        {sp_qwen_form, tools, "{\"type\":\"function\",\"function\":{\"name\":\"h\"}}", "called h"},
        {sp_qwen_form, tools, "{\"type\":\"function\"}", "by its name"},
        {sp_qwen_form, tools, "{\"type\":\"custom\",\"custom\":{\"name\":\"f\"}}", "by its name"},
        {sp_qwen_form, tools, "\"any\"", "by its name"},
        {sp_qwen_form, tools, "7", "by its name"},
        {"plain", tools, "\"required\"", "template has none"},
    };
    size_t before = sp_alloc_bytes();

    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        sp_chat_prompt prompt = {0};
        sp_error error;

        assert_int_equal(
            render(rows[i].template, rows[i].tools, rows[i].choice, false, &prompt, &error),
            SP_ERR_INPUT);
        assert_string_equal(error.code, SP_CHAT_BAD_TOOL_CHOICE);
        assert_string_equal(error.subject, "tool_choice");
        if (!strstr(error.text, rows[i].word))
            fail_msg("%s: %s", rows[i].choice, error.text);
    }
    assert_int_equal(sp_alloc_bytes(), before);
}

/* What may come before an answer that is constrained. */
static void test_thoughts(void **state)
{
    static const struct {
        const char *template;
        sp_constraint_thought thought;
    } rows[] = {
        {"plain", SP_CONSTRAINT_NO_THOUGHT},
        {sp_qwen_form, SP_CONSTRAINT_MAY_THINK},
        {"{{ messages[0].content }}</think><think>\n", SP_CONSTRAINT_THINKS},
        {"<think>\n\n</think>\n\n", SP_CONSTRAINT_NO_THOUGHT},
    };

    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        sp_chat_prompt prompt = {0};
        sp_error error;

        assert_ok(render(rows[i].template, NULL, "null", false, &prompt, &error), &error);
        assert_int_equal(prompt.thought, rows[i].thought);
        sp_chat_prompt_free(&prompt);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_texts),   cmocka_unit_test(test_not_forced),
        cmocka_unit_test(test_tags),    cmocka_unit_test(test_strict),
        cmocka_unit_test(test_refused), cmocka_unit_test(test_thoughts),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
