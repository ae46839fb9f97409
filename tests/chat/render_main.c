/*
 * Renders what it reads from its input, one JSON object a line, and answers with one each:
 *
 *     {"template": TEXT or null for the built-in form, "request": {"messages": [..], ..},
 *      "config": {..}, "now": SECONDS}
 *     {"text": .., "spans": [[begin, end], ..], "ids": [..], "thinking": bool}
 *     {"error": TEXT, "code": .., "line": ..}
 *
 * With --built-in it prints that form's text. "ids" are there when the program is given a directory
 * with a tokenizer.json. For the comparison with jinja2 in check_chat.py.
 */
#include "base/alloc.h"
#include "base/json.h"
#include "chat/chat_state.h"
#include "engine/tokenizer/tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const sp_tokenizer *tokenizer;

static json_t *failure(const sp_error *error)
{
    return json_pack("{s:s, s:s, s:I}", "error", error->text, "code", error->code, "line",
                     (json_int_t)error->position);
}

static json_t *ids_of(const sp_chat_prompt *prompt)
{
    int32_t *ids = NULL;
    size_t n = 0;
    sp_error error;
    json_t *list = json_array();

    if (sp_tokenizer_encode_spans(tokenizer, prompt->text.data, prompt->text.bytes, prompt->spans,
                                  prompt->n_spans, false, SIZE_MAX, &ids, &n, &error) != SP_OK)
        json_array_append_new(list, json_string(error.text));
    for (size_t i = 0; i < n; i++)
        json_array_append_new(list, json_integer(ids[i]));
    sp_free(ids);
    return list;
}

static json_t *answer(const sp_chat_prompt *prompt)
{
    json_t *spans = json_array();
    json_t *root = json_object();

    for (size_t i = 0; i < prompt->n_spans; i++)
        json_array_append_new(spans, json_pack("[I, I]", (json_int_t)prompt->spans[i].begin,
                                               (json_int_t)prompt->spans[i].end));
    json_object_set_new(
        root, "text", json_stringn(prompt->text.data ? prompt->text.data : "", prompt->text.bytes));
    json_object_set_new(root, "spans", spans);
    json_object_set_new(root, "thinking", json_boolean(prompt->thinking));
    if (tokenizer && prompt->text.bytes > 0)
        json_object_set_new(root, "ids", ids_of(prompt));
    return root;
}

static json_t *render(const json_t *line)
{
    const json_t *request = json_object_get(line, "request");
    const char *template = json_string_value(json_object_get(line, "template"));
    const json_t *generate = json_object_get(request, "add_generation_prompt");
    sp_chat_request chat_request;
    sp_chat_prompt prompt = {0};
    sp_chat *chat = NULL;
    sp_error error;
    json_t *root;

    if (!template)
        template = sp_qwen_form;
    if (sp_chat_parse(template, strlen(template), "template", json_object_get(line, "config"),
                      &chat, &error) != SP_OK)
        return failure(&error);
    sp_chat_request_default(&chat_request);
    chat_request.messages = json_object_get(request, "messages");
    chat_request.tools = json_object_get(request, "tools");
    chat_request.template_kwargs = json_object_get(request, "chat_template_kwargs");
    chat_request.continue_final_message =
        json_is_true(json_object_get(request, "continue_final_message"));
    chat_request.add_generation_prompt = !generate || json_is_true(generate);
    chat_request.unix_seconds = json_integer_value(json_object_get(line, "now"));
    root = sp_chat_render(chat, &chat_request, &prompt, &error) == SP_OK ? answer(&prompt)
                                                                         : failure(&error);
    sp_chat_prompt_free(&prompt);
    sp_chat_close(chat);
    return root;
}

int main(int argc, char **argv)
{
    static char line[1 << 24];
    sp_tokenizer *opened = NULL;
    sp_error error;

    if (argc > 1 && strcmp(argv[1], "--built-in") == 0) {
        fputs(sp_qwen_form, stdout);
        return 0;
    }
    if (argc > 1 && sp_tokenizer_open(argv[1], &opened, &error) != SP_OK) {
        fprintf(stderr, "%s\n", error.text);
        return 1;
    }
    tokenizer = opened;
    while (fgets(line, sizeof line, stdin)) {
        json_t *root = json_loads(line, 0, NULL);
        json_t *result = root ? render(root) : json_pack("{s:s}", "error", "no JSON");

        json_dumpf(result, stdout, JSON_COMPACT | JSON_ENSURE_ASCII);
        putchar('\n');
        json_decref(result);
        json_decref(root);
    }
    sp_tokenizer_close(opened);
    return 0;
}
