/*
 * Generated text to messages and deltas: tool calls, reasoning, finish reasons. The same text,
 * cut anywhere, gives the same message, and its deltas put together are that message.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "server/api/chat_answer.h"

#include <string.h>

static const char reply_text[] =
    "<think>\nwhich \"one\"?\n</think>\n\nLet me see.\n<tool_call>\n"
    "{\"name\": \"add\", \"arguments\": {\"a\": 1, \"b\": \"x\\ny\"}}\n</tool_call>\n<tool_call>\n"
    "{\"name\": \"stop\", \"arguments\": {}}\n</tool_call>";

static sp_api api;
static sp_call call;

static bool one_call; /* of the answers that are created */

static sp_chat_answer *create(bool stream)
{
    sp_chat_answer *answer = sp_calloc(1, sizeof *answer);
    sp_error error;

    assert_non_null(answer);
    call.api = &api;
    answer->reply.call = &call;
    answer->reply.form = &sp_chat_answer_form;
    answer->reply.stream = stream;
    answer->request.fields.n = 1;
    answer->request.fields.one_call = one_call;
    answer->prompt.reasoning = true;
    answer->prompt.tools = true;
    sp_text_add(&answer->reply.head, "{\"choices\": [");
    assert_ok(sp_chat_answer_add_choices(answer, &error), &error);
    return answer;
}

static void push(sp_chat_answer *answer, const char *text, size_t bytes, sp_finish finish)
{
    sp_text record = {0};
    const sp_produced produced = {
        .token = 1, .finish = finish, .text_bytes = (uint32_t)bytes, .n_top = 0};

    sp_text_add_bytes(&record, (const char *)&produced, sizeof produced);
    sp_text_add_bytes(&record, text, bytes);
    answer->reply.form->produced(&answer->reply, (const sp_produced *)(const void *)record.data);
    sp_text_free(&record);
}

static void push_in_pieces(sp_chat_answer *answer, const char *text, size_t piece)
{
    size_t bytes = strlen(text);

    for (size_t at = 0; at < bytes; at += piece)
        push(answer, text + at, bytes - at < piece ? bytes - at : piece, SP_FINISH_NONE);
    push(answer, "", 0, SP_FINISH_STOP);
}

/* The message of a whole answer, as a value; the caller frees it. */
static json_t *message_of(const char *text, size_t piece, const char **out_finish)
{
    sp_chat_answer *answer = create(false);
    json_t *choice;
    json_t *message;

    push_in_pieces(answer, text, piece);
    sp_text_clear(&answer->reply.out);
    answer->reply.form->add_choices(&answer->reply);
    assert_false(answer->reply.out.failed);
    choice =
        json_loadb(answer->reply.out.data, answer->reply.out.bytes, JSON_REJECT_DUPLICATES, NULL);
    assert_non_null(choice);
    message = json_incref(json_object_get(choice, "message"));
    *out_finish = strcmp(json_string_value(json_object_get(choice, "finish_reason")), "stop") == 0
                      ? "stop"
                      : "tool_calls";
    json_decref(choice);
    answer->reply.form->destroy(&answer->reply);
    return message;
}

static const char *string_of(const json_t *object, const char *field)
{
    return json_string_value(json_object_get(object, field));
}

static void test_message(void **state)
{
    (void)state;
    for (size_t piece = 1; piece < sizeof reply_text; piece = piece * 3 + 1) {
        const char *finish;
        json_t *message = message_of(reply_text, piece, &finish);
        const json_t *calls = json_object_get(message, "tool_calls");
        const json_t *first = json_array_get(calls, 0);
        const json_t *function = json_object_get(first, "function");
        json_t *arguments;

        assert_string_equal(finish, "tool_calls");
        assert_string_equal(string_of(message, "role"), "assistant");
        assert_string_equal(string_of(message, "reasoning_content"), "which \"one\"?");
        assert_string_equal(string_of(message, "content"), "Let me see.");
        assert_int_equal(json_array_size(calls), 2);
        assert_string_equal(string_of(first, "type"), "function");
        assert_string_equal(string_of(function, "name"), "add");
        arguments = json_loads(string_of(function, "arguments"), 0, NULL);
        assert_int_equal(json_integer_value(json_object_get(arguments, "a")), 1);
        assert_string_equal(string_of(arguments, "b"), "x\ny");
        json_decref(arguments);
        function = json_object_get(json_array_get(calls, 1), "function");
        assert_string_equal(string_of(function, "name"), "stop");
        assert_string_not_equal(string_of(first, "id"), string_of(json_array_get(calls, 1), "id"));
        json_decref(message);
    }
}

static void test_plain(void **state)
{
    const char *finish;
    json_t *message = message_of("just \xc3\xa9 text", 100, &finish);

    (void)state;
    assert_string_equal(finish, "stop");
    assert_string_equal(string_of(message, "content"), "just \xc3\xa9 text");
    assert_null(json_object_get(message, "tool_calls"));
    assert_null(json_object_get(message, "reasoning_content"));
    json_decref(message);
    message =
        message_of("<tool_call>\n{\"name\": \"a\", \"arguments\": {}}\n</tool_call>", 5, &finish);
    assert_true(json_is_null(json_object_get(message, "content")));
    json_decref(message);
}

/* "parallel_tool_calls": false: the first call, whatever else the model wrote. */
static void test_one_call(void **state)
{
    static const char three[] = "<tool_call>{\"name\": \"a\"}</tool_call>\n<tool_call>{\"name\": "
                                "\"b\", \"arguments\": {\"x\": 1}}</tool_call>\nand <tool_call>"
                                "{\"name\": \"c\"}</tool_call>";
    const char *finish;
    json_t *message;
    const json_t *calls;

    (void)state;
    one_call = true;
    message = message_of(three, 7, &finish);
    one_call = false;
    calls = json_object_get(message, "tool_calls");
    assert_string_equal(finish, "tool_calls");
    assert_int_equal(json_array_size(calls), 1);
    calls = json_object_get(json_array_get(calls, 0), "function");
    assert_string_equal(string_of(calls, "name"), "a");
    assert_string_equal(string_of(calls, "arguments"), "{}");
    assert_non_null(strstr(string_of(message, "content"), "and"));
    json_decref(message);
    message = message_of(three, 7, &finish);
    assert_int_equal(json_array_size(json_object_get(message, "tool_calls")), 3);
    json_decref(message);
}

/* ---- streams ------------------------------------------------------------------------------- */

typedef struct joined {
    sp_text content, reasoning, arguments[2], names[2];
    int n_finishes;
} joined;

static void join(joined *into, const json_t *choice)
{
    const json_t *delta = json_object_get(choice, "delta");
    const char *content = string_of(delta, "content");
    const char *reasoning = string_of(delta, "reasoning_content");
    const json_t *item = json_array_get(json_object_get(delta, "tool_calls"), 0);

    sp_text_add(&into->content, content ? content : "");
    sp_text_add(&into->reasoning, reasoning ? reasoning : "");
    if (item) {
        size_t index = (size_t)json_integer_value(json_object_get(item, "index"));
        const json_t *function = json_object_get(item, "function");
        const char *name = string_of(function, "name");

        assert_true(index < 2);
        assert_true((name != NULL) == (string_of(item, "id") != NULL));
        sp_text_add(&into->names[index], name ? name : "");
        sp_text_add(&into->arguments[index], string_of(function, "arguments"));
    }
    if (!json_is_null(json_object_get(choice, "finish_reason"))) {
        into->n_finishes++;
        assert_string_equal(string_of(choice, "finish_reason"), "tool_calls");
    }
}

static void join_events(joined *into, const sp_text *out)
{
    const char *cursor = out->data;

    while (*cursor) {
        const char *end = strstr(cursor, "\n\n");
        json_t *event;

        assert_memory_equal(cursor, "data: ", 6);
        assert_int_equal(into->n_finishes, 0);
        event = json_loadb(cursor + 6, (size_t)(end - cursor) - 6, JSON_REJECT_DUPLICATES, NULL);
        assert_non_null(event);
        join(into, json_array_get(json_object_get(event, "choices"), 0));
        json_decref(event);
        cursor = end + 2;
    }
    assert_int_equal(into->n_finishes, 1);
}

static void test_deltas(void **state)
{
    (void)state;
    for (size_t piece = 1; piece < sizeof reply_text; piece = piece * 4 + 2) {
        sp_chat_answer *answer = create(true);
        joined got = {.n_finishes = 0};

        answer->reply.form->begin(&answer->reply);
        push_in_pieces(answer, reply_text, piece);
        join_events(&got, &answer->reply.out);
        assert_string_equal(got.content.data, "Let me see.");
        assert_string_equal(got.reasoning.data, "which \"one\"?");
        assert_string_equal(got.names[0].data, "add");
        assert_string_equal(got.names[1].data, "stop");
        assert_non_null(strstr(got.arguments[0].data, "\"x\\ny\""));
        sp_text_free(&got.content);
        sp_text_free(&got.reasoning);
        for (int i = 0; i < 2; i++) {
            sp_text_free(&got.names[i]);
            sp_text_free(&got.arguments[i]);
        }
        answer->reply.form->destroy(&answer->reply);
    }
}

static int count_blocks(void **state)
{
    static size_t before;

    if (*state == NULL) {
        before = sp_alloc_blocks();
        *state = &before;
        return 0;
    }
    return before == sp_alloc_blocks() ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_message, count_blocks, count_blocks),
        cmocka_unit_test_setup_teardown(test_plain, count_blocks, count_blocks),
        cmocka_unit_test_setup_teardown(test_one_call, count_blocks, count_blocks),
        cmocka_unit_test_setup_teardown(test_deltas, count_blocks, count_blocks),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
