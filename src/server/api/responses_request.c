#include "server/api/responses_request.h"

#include "server/api/body_fields.h"
#include "server/api/body_translation.h"

#include <string.h>

/* ---- input --------------------------------------------------------------------------------- */

/* A new reference: text as it is, parts with the type that chat has for them. */
static json_t *content_of(sp_translation *to, json_t *content)
{
    static const char *const texts[] = {"input_text", "output_text", "text"};
    json_t *list, *part;
    size_t i;

    if (!json_is_array(content))
        return json_incref(content);
    list = json_array();
    json_array_foreach(content, i, part)
    {
        const char *type = json_string_value(json_object_get(part, "type"));
        bool is_text = false;

        for (int known = 0; type && known < 3; known++)
            is_text |= strcmp(type, texts[known]) == 0;
        if (!is_text)
            sp_translation_refuse(to, SP_CHAT_BAD_CONTENT_TYPE, "input",
                                  "has a content that is no text");
        sp_translation_append(
            to, list,
            json_pack("{s:s, s:O?}", "type", "text", "text", json_object_get(part, "text")));
    }
    return list;
}

static json_t *last_with_calls(const sp_translation *to)
{
    json_t *last = json_array_get(to->messages, json_array_size(to->messages) - 1);

    return json_array_size(to->messages) > 0 ? json_object_get(last, "tool_calls") : NULL;
}

/* Calls that follow each other are of one message. */
static void add_call(sp_translation *to, const json_t *item)
{
    json_t *call =
        json_pack("{s:s, s:O?, s:{s:O?, s:O?}}", "type", "function", "id",
                  json_object_get(item, "call_id"), "function", "name",
                  json_object_get(item, "name"), "arguments", json_object_get(item, "arguments"));
    json_t *calls = last_with_calls(to);

    if (calls)
        sp_translation_append(to, calls, call);
    else
        sp_translation_append(
            to, to->messages,
            json_pack("{s:s, s:n, s:[o]}", "role", "assistant", "content", "tool_calls", call));
}

static void add_item(sp_translation *to, const json_t *item)
{
    const char *type = json_string_value(json_object_get(item, "type"));

    if (!json_is_object(item))
        sp_translation_refuse(to, NULL, "input", "has an item that is no object");
    else if (!type || strcmp(type, "message") == 0)
        sp_translation_append(to, to->messages,
                              json_pack("{s:O?, s:o?}", "role", json_object_get(item, "role"),
                                        "content",
                                        content_of(to, json_object_get(item, "content"))));
    else if (strcmp(type, "function_call") == 0)
        add_call(to, item);
    else if (strcmp(type, "function_call_output") == 0)
        sp_translation_append(to, to->messages,
                              json_pack("{s:s, s:O?, s:o?}", "role", "tool", "tool_call_id",
                                        json_object_get(item, "call_id"), "content",
                                        content_of(to, json_object_get(item, "output"))));
    else if (strcmp(type, "reasoning") != 0) /* what a model has thought is not said to it again */
        sp_translation_refuse(
            to, SP_CODE_UNSUPPORTED_FIELD, "input",
            "takes items of the types \"message\", \"function_call\", \"function_call_output\" "
            "and \"reasoning\"");
}

static void add_input(sp_translation *to, const json_t *body)
{
    json_t *input = json_object_get(body, "input"), *item;
    json_t *instructions = json_object_get(body, "instructions");
    size_t i;

    if (instructions && !json_is_null(instructions))
        sp_translation_append(to, to->messages,
                              json_pack("{s:s, s:O}", "role", "system", "content", instructions));
    if (json_is_string(input))
        sp_translation_append(to, to->messages,
                              json_pack("{s:s, s:O}", "role", "user", "content", input));
    else if (!json_is_array(input) || json_array_size(input) == 0)
        sp_translation_refuse(to, NULL, "input", "must be a text, or a list of items");
    json_array_foreach(input, i, item) add_item(to, item);
}

/* ---- tools and forms ----------------------------------------------------------------------- */

static json_t *function_of(const json_t *tool)
{
    static const char *const names[] = {"name", "description", "parameters", "strict"};
    json_t *function = json_object();

    for (int i = 0; i < 4; i++) {
        json_t *value = json_object_get(tool, names[i]);

        if (value && !json_is_null(value))
            json_object_set(function, names[i], value);
    }
    return json_pack("{s:s, s:o}", "type", "function", "function", function);
}

static bool is_function(const json_t *tool)
{
    const char *type = json_string_value(json_object_get(tool, "type"));

    return type && strcmp(type, "function") == 0;
}

static void add_tools(sp_translation *to, const json_t *body)
{
    json_t *tools = json_object_get(body, "tools"), *list, *tool;
    json_t *choice = json_object_get(body, "tool_choice");
    size_t i;

    if (json_is_array(tools) && json_array_size(tools) > 0) {
        list = json_array();
        json_array_foreach(tools, i, tool)
        {
            if (!is_function(tool))
                sp_translation_refuse(to, SP_CODE_UNSUPPORTED_FIELD, "tools",
                                      "takes functions only");
            sp_translation_append(to, list, function_of(tool));
        }
        sp_translation_set(to, to->chat, "tools", list);
    }
    if (is_function(choice))
        choice = json_pack("{s:s, s:{s:O?}}", "type", "function", "function", "name",
                           json_object_get(choice, "name"));
    else
        json_incref(choice);
    if (choice)
        sp_translation_set(to, to->chat, "tool_choice", choice);
}

/* "text": {"format"}, whose schema is one level higher than in chat. */
static void add_format(sp_translation *to, const json_t *body)
{
    json_t *text = json_object_get(body, "text"), *format = json_object_get(text, "format");
    const char *type = json_string_value(json_object_get(format, "type"));

    if (!format || json_is_null(format))
        return;
    if (type && strcmp(type, "json_schema") == 0)
        format = json_pack("{s:s, s:{s:O?}}", "type", type, "json_schema", "schema",
                           json_object_get(format, "schema"));
    else
        json_incref(format);
    sp_translation_set(to, to->chat, "response_format", format);
}

/* The templates that can leave thinking out have one name for it. */
static void add_reasoning(sp_translation *to, const json_t *body)
{
    const char *effort =
        json_string_value(json_object_get(json_object_get(body, "reasoning"), "effort"));

    if (effort && (strcmp(effort, "none") == 0 || strcmp(effort, "minimal") == 0))
        sp_translation_set(to, to->chat, "chat_template_kwargs",
                           json_pack("{s:b}", "enable_thinking", 0));
}

/* ---- all fields ---------------------------------------------------------------------------- */

static const sp_translated_field own_fields[] = {
    {"input", SP_TRANSLATED_APART, NULL},
    {"instructions", SP_TRANSLATED_APART, NULL},
    {"tools", SP_TRANSLATED_APART, NULL},
    {"tool_choice", SP_TRANSLATED_APART, NULL},
    {"text", SP_TRANSLATED_APART, NULL},
    {"reasoning", SP_TRANSLATED_APART, NULL},
    {"max_output_tokens", SP_TRANSLATED_RENAMED, "max_tokens"},
    {"include", SP_TRANSLATED_IGNORED, NULL},
    {"truncation", SP_TRANSLATED_IGNORED, NULL},
    {"prompt_cache_retention", SP_TRANSLATED_IGNORED, NULL},
    {"stream_options", SP_TRANSLATED_IGNORED, NULL},
    {"previous_response_id", SP_TRANSLATED_REFUSED, NULL},
    {"conversation", SP_TRANSLATED_REFUSED, NULL},
    {"background", SP_TRANSLATED_REFUSED, NULL},
    {"prompt", SP_TRANSLATED_REFUSED, NULL},
    {"max_tool_calls", SP_TRANSLATED_REFUSED, NULL},
    {"top_logprobs", SP_TRANSLATED_REFUSED, NULL},
    {"logprobs", SP_TRANSLATED_REFUSED, NULL},
    {"messages", SP_TRANSLATED_REFUSED, NULL},
    {"response_format", SP_TRANSLATED_REFUSED, NULL},
    {"n", SP_TRANSLATED_REFUSED, NULL},
    {"max_tokens", SP_TRANSLATED_REFUSED, NULL},
    {"max_completion_tokens", SP_TRANSLATED_REFUSED, NULL},
    {"return_token_ids", SP_TRANSLATED_REFUSED, NULL},
    {"routed_experts", SP_TRANSLATED_REFUSED, NULL},
};

static const sp_translated_field *find_own(const char *name)
{
    return sp_translation_find(own_fields, sizeof own_fields / sizeof *own_fields, name);
}

sp_status sp_responses_to_chat(const json_t *body, json_t **out_chat, sp_error *error)
{
    sp_translation to = sp_translation_start(error);
    const char *name;
    json_t *value;

    json_object_foreach((json_t *)(uintptr_t)body, name, value)
        sp_translation_add(&to, find_own(name), name, value);
    if (to.status == SP_OK)
        add_input(&to, body);
    add_tools(&to, body);
    add_format(&to, body);
    add_reasoning(&to, body);
    return sp_translation_end(&to, out_chat);
}
