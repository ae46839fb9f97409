#include "server/api/messages_request.h"

#include "base/text.h"
#include "server/api/body_fields.h"
#include "server/api/body_translation.h"

#include <string.h>

static bool is_type(const json_t *object, const char *type)
{
    const char *own = json_string_value(json_object_get(object, "type"));

    return own && strcmp(own, type) == 0;
}

/* ---- content ------------------------------------------------------------------------------- */

static void refuse_content(sp_translation *to, const char *field)
{
    sp_translation_refuse(to, SP_CHAT_BAD_CONTENT_TYPE, field,
                          "has a content that is no text, tool_use, tool_result or thinking");
}

/* A new reference: text, or a list of text blocks as parts of chat. */
static json_t *text_of(sp_translation *to, json_t *content, const char *field)
{
    json_t *list, *block;
    size_t i;

    if (!json_is_array(content))
        return json_incref(content);
    list = json_array();
    json_array_foreach(content, i, block)
    {
        if (!is_type(block, "text"))
            refuse_content(to, field);
        sp_translation_append(
            to, list,
            json_pack("{s:s, s:O?}", "type", "text", "text", json_object_get(block, "text")));
    }
    return list;
}

static void add_message(sp_translation *to, const char *role, json_t *parts)
{
    if (json_array_size(parts) > 0)
        sp_translation_append(to, to->messages,
                              json_pack("{s:s, s:O}", "role", role, "content", parts));
}

/* A result is a message of its own; what failed is told in words, as templates have no other. */
static void add_result(sp_translation *to, const json_t *block)
{
    json_t *content = json_object_get(block, "content");

    content = content ? text_of(to, content, "messages") : json_string("");
    sp_translation_append(to, to->messages,
                          json_pack("{s:s, s:O?, s:o}", "role", "tool", "tool_call_id",
                                    json_object_get(block, "tool_use_id"), "content", content));
}

/* Texts of a user, and what tools have answered, in their order. */
static void add_user(sp_translation *to, json_t *content)
{
    json_t *parts = json_array(), *block;
    size_t i;

    json_array_foreach(content, i, block)
    {
        if (is_type(block, "tool_result")) {
            add_message(to, "user", parts);
            json_decref(parts);
            parts = json_array();
            add_result(to, block);
        } else if (is_type(block, "text")) {
            sp_translation_append(
                to, parts,
                json_pack("{s:s, s:O?}", "type", "text", "text", json_object_get(block, "text")));
        } else {
            refuse_content(to, "messages");
        }
    }
    add_message(to, "user", parts);
    json_decref(parts);
}

static int take(const char *bytes, size_t n, void *user)
{
    sp_text_add_bytes(user, bytes, n);
    return 0;
}

static void add_use(sp_translation *to, json_t *calls, const json_t *block)
{
    const json_t *input = json_object_get(block, "input");
    sp_text arguments = {0};
    json_t *call = NULL;

    if (input && json_dump_callback(input, take, &arguments, JSON_COMPACT | JSON_ENCODE_ANY) != 0)
        arguments.failed = true;
    if (!arguments.failed)
        call = json_pack("{s:s, s:O?, s:{s:O?, s:s}}", "type", "function", "id",
                         json_object_get(block, "id"), "function", "name",
                         json_object_get(block, "name"), "arguments",
                         arguments.data ? arguments.data : "{}");
    sp_translation_append(to, calls, call);
    sp_text_free(&arguments);
}

/* Texts and calls of one message; earlier thoughts are not said to a model again. */
static void add_assistant(sp_translation *to, json_t *content)
{
    json_t *parts = json_array(), *calls = json_array(), *block, *message;
    size_t i;

    json_array_foreach(content, i, block)
    {
        if (is_type(block, "tool_use"))
            add_use(to, calls, block);
        else if (is_type(block, "text"))
            sp_translation_append(
                to, parts,
                json_pack("{s:s, s:O?}", "type", "text", "text", json_object_get(block, "text")));
        else if (!is_type(block, "thinking") && !is_type(block, "redacted_thinking"))
            refuse_content(to, "messages");
    }
    message = json_pack("{s:s, s:O}", "role", "assistant", "content", parts);
    if (json_array_size(calls) > 0)
        sp_translation_set(to, message, "tool_calls", json_incref(calls));
    sp_translation_append(to, to->messages, message);
    json_decref(parts);
    json_decref(calls);
}

static void add_one(sp_translation *to, const json_t *message)
{
    const char *role = json_string_value(json_object_get(message, "role"));
    json_t *content = json_object_get(message, "content");
    bool user = role && strcmp(role, "user") == 0;

    if (!user && !(role && strcmp(role, "assistant") == 0))
        sp_translation_refuse(to, SP_CHAT_BAD_MESSAGES, "messages",
                              "takes the roles \"user\" and \"assistant\"");
    else if (json_is_string(content))
        sp_translation_append(to, to->messages,
                              json_pack("{s:s, s:O}", "role", role, "content", content));
    else if (!json_is_array(content))
        sp_translation_refuse(to, SP_CHAT_BAD_MESSAGES, "messages",
                              "has a content that is neither a text nor a list");
    else if (user)
        add_user(to, content);
    else
        add_assistant(to, content);
}

/* An answer that the client has begun goes on. */
static void add_beginning(sp_translation *to, const json_t *messages)
{
    const json_t *last = json_array_get(messages, json_array_size(messages) - 1);
    const char *role = json_string_value(json_object_get(last, "role"));

    if (json_array_size(messages) == 0 || !role || strcmp(role, "assistant") != 0)
        return;
    sp_translation_set(to, to->chat, "continue_final_message", json_true());
    sp_translation_set(to, to->chat, "add_generation_prompt", json_false());
}

static void add_messages(sp_translation *to, const json_t *body)
{
    json_t *messages = json_object_get(body, "messages"), *system = json_object_get(body, "system");
    json_t *message;
    size_t i;

    if (system && !json_is_null(system))
        sp_translation_append(
            to, to->messages,
            json_pack("{s:s, s:o}", "role", "system", "content", text_of(to, system, "system")));
    if (!json_is_array(messages) || json_array_size(messages) == 0)
        sp_translation_refuse(to, NULL, "messages", "must be a list of messages");
    json_array_foreach(messages, i, message) add_one(to, message);
    add_beginning(to, messages);
}

/* ---- tools --------------------------------------------------------------------------------- */

/* A tool of the client's own has no type, or the type "custom". */
static bool is_own_tool(const json_t *tool)
{
    return json_is_object(tool) && (!json_object_get(tool, "type") || is_type(tool, "custom") ||
                                    json_is_null(json_object_get(tool, "type")));
}

static void add_tools(sp_translation *to, const json_t *body)
{
    json_t *tools = json_object_get(body, "tools"), *list, *tool;
    size_t i;

    if (!json_is_array(tools) || json_array_size(tools) == 0)
        return;
    list = json_array();
    json_array_foreach(tools, i, tool)
    {
        json_t *function = json_pack(
            "{s:O?, s:O*, s:O*, s:O*}", "name", json_object_get(tool, "name"), "description",
            json_object_get(tool, "description"), "parameters",
            json_object_get(tool, "input_schema"), "strict", json_object_get(tool, "strict"));

        if (!is_own_tool(tool))
            sp_translation_refuse(to, SP_CODE_UNSUPPORTED_FIELD, "tools",
                                  "takes tools of the type \"custom\" only");
        sp_translation_append(to, list,
                              json_pack("{s:s, s:o}", "type", "function", "function", function));
    }
    sp_translation_set(to, to->chat, "tools", list);
}

static void add_tool_choice(sp_translation *to, const json_t *body, bool counts)
{
    const json_t *choice = json_object_get(body, "tool_choice");
    json_t *made = NULL;

    if (!choice || json_is_null(choice))
        return;
    if (is_type(choice, "auto"))
        made = json_string("auto");
    else if (is_type(choice, "none"))
        made = json_string("none");
    else if (is_type(choice, "any"))
        made = json_string("required");
    else if (is_type(choice, "tool"))
        made = json_pack("{s:s, s:{s:O?}}", "type", "function", "function", "name",
                         json_object_get(choice, "name"));
    else
        sp_translation_refuse(to, NULL, "tool_choice",
                              "takes the types \"auto\", \"any\", \"tool\" and \"none\"");
    if (made)
        sp_translation_set(to, to->chat, "tool_choice", made);
    if (!counts && json_is_true(json_object_get(choice, "disable_parallel_tool_use")))
        sp_translation_set(to, to->chat, "parallel_tool_calls", json_false());
}

/* ---- other fields -------------------------------------------------------------------------- */

/* Without this field no thought comes, as far as the template can leave it out. */
static void add_thinking(sp_translation *to, const json_t *body)
{
    const json_t *thinking = json_object_get(body, "thinking");
    bool on = thinking && !json_is_null(thinking) && !is_type(thinking, "disabled");

    if (thinking && !json_is_null(thinking) && on && !is_type(thinking, "enabled") &&
        !is_type(thinking, "adaptive"))
        sp_translation_refuse(to, NULL, "thinking",
                              "takes the types \"enabled\", \"adaptive\" and \"disabled\"");
    if (!json_object_get(body, "chat_template_kwargs"))
        sp_translation_set(to, to->chat, "chat_template_kwargs",
                           json_pack("{s:b}", "enable_thinking", on));
}

/* "output_config": {"format"}, and its older name "output_format". */
static void add_format(sp_translation *to, const json_t *body)
{
    const json_t *format = json_object_get(json_object_get(body, "output_config"), "format");

    if (!format || json_is_null(format))
        format = json_object_get(body, "output_format");
    if (!format || json_is_null(format))
        return;
    if (!is_type(format, "json_schema"))
        sp_translation_refuse(to, SP_CODE_UNSUPPORTED_FIELD, "output_config",
                              "takes the format \"json_schema\" only");
    sp_translation_set(to, to->chat, "response_format",
                       json_pack("{s:s, s:{s:O?}}", "type", "json_schema", "json_schema", "schema",
                                 json_object_get(format, "schema")));
}

static const sp_translated_field own_fields[] = {
    {"messages", SP_TRANSLATED_APART, NULL},
    {"system", SP_TRANSLATED_APART, NULL},
    {"tools", SP_TRANSLATED_APART, NULL},
    {"tool_choice", SP_TRANSLATED_APART, NULL},
    {"thinking", SP_TRANSLATED_APART, NULL},
    {"output_config", SP_TRANSLATED_APART, NULL},
    {"output_format", SP_TRANSLATED_APART, NULL},
    {"stop_sequences", SP_TRANSLATED_RENAMED, "stop"},
    {"cache_control", SP_TRANSLATED_IGNORED, NULL},
    {"inference_geo", SP_TRANSLATED_IGNORED, NULL},
    {"container", SP_TRANSLATED_REFUSED, NULL},
    {"mcp_servers", SP_TRANSLATED_REFUSED, NULL},
    {"context_management", SP_TRANSLATED_REFUSED, NULL},
    {"stop", SP_TRANSLATED_REFUSED, NULL},
    {"n", SP_TRANSLATED_REFUSED, NULL},
    {"logprobs", SP_TRANSLATED_REFUSED, NULL},
    {"top_logprobs", SP_TRANSLATED_REFUSED, NULL},
    {"response_format", SP_TRANSLATED_REFUSED, NULL},
    {"max_completion_tokens", SP_TRANSLATED_REFUSED, NULL},
    {"stream_options", SP_TRANSLATED_REFUSED, NULL},
    {"return_token_ids", SP_TRANSLATED_REFUSED, NULL},
    {"routed_experts", SP_TRANSLATED_REFUSED, NULL},
    {"continue_final_message", SP_TRANSLATED_REFUSED, NULL},
    {"add_generation_prompt", SP_TRANSLATED_REFUSED, NULL},
};

static const sp_translated_field *find_own(const char *name)
{
    return sp_translation_find(own_fields, sizeof own_fields / sizeof *own_fields, name);
}

/* Fields that both kinds of bodies have, but for the lists above. */
static void add_fields(sp_translation *to, const json_t *body, bool counts)
{
    const char *name;
    json_t *value;

    json_object_foreach((json_t *)(uintptr_t)body, name, value)
    {
        if (!counts || find_own(name) || strcmp(name, "model") == 0 ||
            strcmp(name, "chat_template_kwargs") == 0)
            sp_translation_add(to, find_own(name), name, value);
        else
            sp_translation_refuse(to, SP_CODE_UNKNOWN_FIELD, name, "is not known here");
    }
}

sp_status sp_messages_to_chat(const json_t *body, bool counts, json_t **out_chat, sp_error *error)
{
    sp_translation to = sp_translation_start(error);

    add_fields(&to, body, counts);
    if (counts)
        json_object_del(to.chat, "stop");
    else if (!json_is_integer(json_object_get(body, "max_tokens")))
        sp_translation_refuse(&to, NULL, "max_tokens", "must be a number of tokens");
    if (to.status == SP_OK)
        add_messages(&to, body);
    add_tools(&to, body);
    add_tool_choice(&to, body, counts);
    add_thinking(&to, body);
    if (!counts)
        add_format(&to, body);
    return sp_translation_end(&to, out_chat);
}
