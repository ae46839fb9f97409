#include "server/api/responses_request.h"

#include "base/error.h"
#include "server/api/body_fields.h"

#include <string.h>

typedef struct translation {
    json_t *chat, *messages; /* the second is part of the first */
    sp_status status;
    sp_error *error;
} translation;

static void refuse(translation *to, const char *code, const char *field, const char *why)
{
    if (to->status == SP_OK)
        to->status =
            sp_fail(to->error, SP_ERR_INPUT, code, field, -1, "field \"%s\" %s", field, why);
}

/* Takes the value. */
static void set(translation *to, json_t *object, const char *name, json_t *value)
{
    if (to->status != SP_OK)
        json_decref(value);
    else if (json_object_set_new(object, name, value) != 0)
        to->status = sp_fail_memory(to->error, 0, "a request");
}

static void append(translation *to, json_t *list, json_t *value)
{
    if (to->status != SP_OK)
        json_decref(value);
    else if (json_array_append_new(list, value) != 0)
        to->status = sp_fail_memory(to->error, 0, "a request");
}

/* ---- input --------------------------------------------------------------------------------- */

/* A new reference: text as it is, parts with the type that chat has for them. */
static json_t *content_of(translation *to, json_t *content)
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
            refuse(to, SP_CHAT_BAD_CONTENT_TYPE, "input", "has a content that is no text");
        append(to, list,
               json_pack("{s:s, s:O?}", "type", "text", "text", json_object_get(part, "text")));
    }
    return list;
}

static json_t *last_with_calls(const translation *to)
{
    json_t *last = json_array_get(to->messages, json_array_size(to->messages) - 1);

    return json_array_size(to->messages) > 0 ? json_object_get(last, "tool_calls") : NULL;
}

/* Calls that follow each other are of one message. */
static void add_call(translation *to, const json_t *item)
{
    json_t *call =
        json_pack("{s:s, s:O?, s:{s:O?, s:O?}}", "type", "function", "id",
                  json_object_get(item, "call_id"), "function", "name",
                  json_object_get(item, "name"), "arguments", json_object_get(item, "arguments"));
    json_t *calls = last_with_calls(to);

    if (calls)
        append(to, calls, call);
    else
        append(to, to->messages,
               json_pack("{s:s, s:n, s:[o]}", "role", "assistant", "content", "tool_calls", call));
}

static void add_item(translation *to, const json_t *item)
{
    const char *type = json_string_value(json_object_get(item, "type"));

    if (!json_is_object(item))
        refuse(to, NULL, "input", "has an item that is no object");
    else if (!type || strcmp(type, "message") == 0)
        append(to, to->messages,
               json_pack("{s:O?, s:o?}", "role", json_object_get(item, "role"), "content",
                         content_of(to, json_object_get(item, "content"))));
    else if (strcmp(type, "function_call") == 0)
        add_call(to, item);
    else if (strcmp(type, "function_call_output") == 0)
        append(to, to->messages,
               json_pack("{s:s, s:O?, s:o?}", "role", "tool", "tool_call_id",
                         json_object_get(item, "call_id"), "content",
                         content_of(to, json_object_get(item, "output"))));
    else if (strcmp(type, "reasoning") != 0) /* what a model has thought is not said to it again */
        refuse(to, SP_CODE_UNSUPPORTED_FIELD, "input",
               "takes items of the types \"message\", \"function_call\", \"function_call_output\" "
               "and \"reasoning\"");
}

static void add_input(translation *to, const json_t *body)
{
    json_t *input = json_object_get(body, "input"), *item;
    json_t *instructions = json_object_get(body, "instructions");
    size_t i;

    if (instructions && !json_is_null(instructions))
        append(to, to->messages,
               json_pack("{s:s, s:O}", "role", "system", "content", instructions));
    if (json_is_string(input))
        append(to, to->messages, json_pack("{s:s, s:O}", "role", "user", "content", input));
    else if (!json_is_array(input) || json_array_size(input) == 0)
        refuse(to, NULL, "input", "must be a text, or a list of items");
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

static void add_tools(translation *to, const json_t *body)
{
    json_t *tools = json_object_get(body, "tools"), *list, *tool;
    json_t *choice = json_object_get(body, "tool_choice");
    size_t i;

    if (json_is_array(tools) && json_array_size(tools) > 0) {
        list = json_array();
        json_array_foreach(tools, i, tool)
        {
            if (!is_function(tool))
                refuse(to, SP_CODE_UNSUPPORTED_FIELD, "tools", "takes functions only");
            append(to, list, function_of(tool));
        }
        set(to, to->chat, "tools", list);
    }
    if (is_function(choice))
        choice = json_pack("{s:s, s:{s:O?}}", "type", "function", "function", "name",
                           json_object_get(choice, "name"));
    else
        json_incref(choice);
    if (choice)
        set(to, to->chat, "tool_choice", choice);
}

/* "text": {"format"}, whose schema is one level higher than in chat. */
static void add_format(translation *to, const json_t *body)
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
    set(to, to->chat, "response_format", format);
}

/* The templates that can leave thinking out have one name for it. */
static void add_reasoning(translation *to, const json_t *body)
{
    const char *effort =
        json_string_value(json_object_get(json_object_get(body, "reasoning"), "effort"));

    if (effort && (strcmp(effort, "none") == 0 || strcmp(effort, "minimal") == 0))
        set(to, to->chat, "chat_template_kwargs", json_pack("{s:b}", "enable_thinking", 0));
}

/* ---- all fields ---------------------------------------------------------------------------- */

typedef enum field_use {
    FIELD_READ,    /* by one of the functions above */
    FIELD_IGNORED, /* changes no answer */
    FIELD_REFUSED, /* but null, false and empty */
    FIELD_RENAMED
} field_use;

static const struct own_field {
    const char *name;
    field_use use;
    const char *renamed;
} own_fields[] = {
    {"input", FIELD_READ, NULL},
    {"instructions", FIELD_READ, NULL},
    {"tools", FIELD_READ, NULL},
    {"tool_choice", FIELD_READ, NULL},
    {"text", FIELD_READ, NULL},
    {"reasoning", FIELD_READ, NULL},
    {"max_output_tokens", FIELD_RENAMED, "max_tokens"},
    {"include", FIELD_IGNORED, NULL},
    {"truncation", FIELD_IGNORED, NULL},
    {"prompt_cache_retention", FIELD_IGNORED, NULL},
    {"stream_options", FIELD_IGNORED, NULL},
    {"previous_response_id", FIELD_REFUSED, NULL},
    {"conversation", FIELD_REFUSED, NULL},
    {"background", FIELD_REFUSED, NULL},
    {"prompt", FIELD_REFUSED, NULL},
    {"max_tool_calls", FIELD_REFUSED, NULL},
    {"top_logprobs", FIELD_REFUSED, NULL},
    {"logprobs", FIELD_REFUSED, NULL},
    {"messages", FIELD_REFUSED, NULL},
    {"response_format", FIELD_REFUSED, NULL},
    {"n", FIELD_REFUSED, NULL},
    {"max_tokens", FIELD_REFUSED, NULL},
    {"max_completion_tokens", FIELD_REFUSED, NULL},
    {"return_token_ids", FIELD_REFUSED, NULL},
};

static const struct own_field *find_own(const char *name)
{
    for (size_t i = 0; i < sizeof own_fields / sizeof *own_fields; i++)
        if (strcmp(own_fields[i].name, name) == 0)
            return &own_fields[i];
    return NULL;
}

static bool says_nothing(const json_t *value)
{
    return json_is_null(value) || json_is_false(value) ||
           (json_is_integer(value) && json_integer_value(value) == 0);
}

static void add_field(translation *to, const char *name, json_t *value)
{
    const struct own_field *own = find_own(name);

    if (!own)
        set(to, to->chat, name, json_incref(value));
    else if (own->use == FIELD_RENAMED)
        set(to, to->chat, own->renamed, json_incref(value));
    else if (own->use == FIELD_REFUSED && !says_nothing(value))
        refuse(to, SP_CODE_UNSUPPORTED_FIELD, name, "is not supported here");
}

sp_status sp_responses_to_chat(const json_t *body, json_t **out_chat, sp_error *error)
{
    translation to = {.chat = json_object(), .messages = json_array(), .error = error};
    const char *name;
    json_t *value;

    set(&to, to.chat, "messages", to.messages);
    json_object_foreach((json_t *)(uintptr_t)body, name, value) add_field(&to, name, value);
    if (to.status == SP_OK)
        add_input(&to, body);
    add_tools(&to, body);
    add_format(&to, body);
    add_reasoning(&to, body);
    if (to.status != SP_OK)
        json_decref(to.chat);
    else
        *out_chat = to.chat;
    return to.status;
}
