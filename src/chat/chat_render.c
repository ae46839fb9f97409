/*
 * A request to a prompt: the messages are checked and become values, the template runs, and what
 * it wrote becomes text and spans. The values borrow the request's strings; all of them are data.
 */
#include "base/alloc.h"
#include "base/json.h"
#include "chat/chat.h"
#include "chat/chat_state.h"
#include "chat/forced_call.h"
#include "chat/jinja/interpreter.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* JSON that a string of the request held, released after the rendering. */
typedef struct owned {
    struct owned *next;
    json_t *json;
} owned;

typedef struct {
    sp_render render;
    sp_error *error;
    owned *owned;
} maker;

void sp_chat_request_default(sp_chat_request *out_request)
{
    *out_request =
        (sp_chat_request){.struct_bytes = sizeof *out_request, .add_generation_prompt = true};
}

void sp_chat_prompt_free(sp_chat_prompt *prompt)
{
    sp_text_free(&prompt->text);
    sp_free(prompt->spans);
    json_decref(prompt->tagged_tools);
    sp_text_free(&prompt->forced);
    *prompt = (sp_chat_prompt){0};
}

sp_status sp_chat_tokenize(const sp_engine *engine, const sp_chat_prompt *prompt,
                           int32_t max_tokens, int32_t **out_tokens, int32_t *out_n_tokens,
                           sp_error *error)
{
    sp_status status = sp_engine_encode_spans(engine, prompt->text.data ? prompt->text.data : "",
                                              prompt->text.bytes, prompt->spans, prompt->n_spans,
                                              max_tokens, out_tokens, out_n_tokens, error);

    /* The text is the template's; what the caller can shorten is in the messages. */
    if (status == SP_ERR_TOO_LARGE && error)
        snprintf(error->subject, sizeof error->subject, "messages");
    return status;
}

/* The path of a field for an error; a long one is cut. `out` has SP_ERROR_SUBJECT_BYTES. */
static void name_field(char *out, const char *format, ...) SP_PRINTF(2, 3);

static void name_field(char *out, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(out, SP_ERROR_SUBJECT_BYTES, format, arguments);
    va_end(arguments);
}

/* --- Failing -------------------------------------------------------------------------------- */

static void refuse(maker *make, const char *code, const char *field, const char *why)
{
    if (make->render.failed == SP_OK)
        make->render.failed =
            sp_fail(make->error, SP_ERR_INPUT, code, field, -1, "%s: %s", field, why);
}

static void refuse_field(maker *make, const char *parent, const char *name, const char *why)
{
    char field[SP_ERROR_SUBJECT_BYTES];

    name_field(field, "%s.%s", parent, name);
    refuse(make, SP_CHAT_BAD_MESSAGES, field, why);
}

static bool failed(const maker *make)
{
    return make->render.failed != SP_OK;
}

/* --- JSON to values ------------------------------------------------------------------------- */

static const sp_str *borrow(maker *make, const char *data, size_t bytes, bool literal)
{
    sp_str *text = sp_render_take(&make->render, 1, sizeof *text);

    if (!text)
        return &sp_str_empty;
    *text = (sp_str){.data = data, .bytes = bytes, .literal = literal};
    return text;
}

static sp_value text_value(maker *make, const json_t *json)
{
    return sp_value_text(borrow(make, json_string_value(json), json_string_length(json), false));
}

/* The keys of a JSON object are different, so that none needs to be looked for. */
static void push(maker *make, sp_map *map, const char *key, sp_value value)
{
    if (!map || map->n == map->capacity)
        return;
    map->keys[map->n] = borrow(make, key, strlen(key), false);
    map->values[map->n++] = value;
}

static sp_value value_of(maker *make, const json_t *json);

static sp_value map_value(maker *make, const json_t *json)
{
    sp_map *map = sp_map_create(&make->render, json_object_size(json));
    const char *key;
    json_t *value;

    json_object_foreach((json_t *)json, key, value) push(make, map, key, value_of(make, value));
    return map ? (sp_value){.kind = SP_VALUE_MAP, .as.map = map} : sp_value_undefined(NULL);
}

static sp_value list_value(maker *make, const json_t *json)
{
    sp_items items = {0};
    size_t i;
    json_t *value;

    json_array_foreach((json_t *)json, i, value)
        sp_items_add(&make->render, &items, value_of(make, value));
    return sp_items_list(&make->render, &items, false);
}

static sp_value nested(maker *make, const json_t *json)
{
    sp_value value;

    if (!sp_render_enter(&make->render))
        return sp_value_undefined(NULL);
    value = json_is_array(json) ? list_value(make, json) : map_value(make, json);
    make->render.depth--;
    return value;
}

static sp_value value_of(maker *make, const json_t *json)
{
    switch (json ? json_typeof(json) : JSON_NULL) {
    case JSON_OBJECT:
    case JSON_ARRAY:
        return nested(make, json);
    case JSON_STRING:
        return text_value(make, json);
    case JSON_INTEGER:
        return sp_value_int(json_integer_value(json));
    case JSON_REAL:
        return sp_value_real(json_real_value(json));
    case JSON_TRUE:
        return sp_value_bool(true);
    case JSON_FALSE:
        return sp_value_bool(false);
    default:
        return sp_value_none();
    }
}

/* --- Messages ------------------------------------------------------------------------------- */

/* A list of text parts becomes one text, with newlines between them. */
static sp_value join_parts(maker *make, const json_t *parts, const char *field)
{
    char name[SP_ERROR_SUBJECT_BYTES];
    sp_build build = {0};
    size_t i;
    json_t *part;

    json_array_foreach((json_t *)parts, i, part)
    {
        const json_t *text = json_object_get(part, "text");
        const char *type = json_string_value(json_object_get(part, "type"));

        name_field(name, "%s[%zu].type", field, i);
        if (!type)
            refuse(make, SP_CHAT_BAD_MESSAGES, name, "the type of the part is missing");
        else if (strcmp(type, "text") != 0 && strcmp(type, "input_text") != 0)
            refuse(make, SP_CHAT_BAD_CONTENT_TYPE, name, "only text is supported");
        else if (!json_is_string(text))
            refuse_field(make, name, "text", "the text is missing or no string");
        if (failed(make))
            return sp_value_undefined(NULL);
        if (i > 0)
            sp_build_add_data(&make->render, &build, "\n", 1);
        sp_build_add(&make->render, &build, text_value(make, text).as.text);
    }
    return sp_value_text(sp_build_finish(&make->render, &build));
}

static sp_value content_value(maker *make, const json_t *content, const char *message,
                              bool may_be_null)
{
    char field[SP_ERROR_SUBJECT_BYTES];

    name_field(field, "%s.content", message);
    if (json_is_string(content))
        return text_value(make, content);
    if (json_is_array(content))
        return join_parts(make, content, field);
    if (!may_be_null || (content && !json_is_null(content)))
        refuse(make, SP_CHAT_BAD_MESSAGES, field, "it is neither a string nor a list of parts");
    return sp_value_text(&sp_str_empty);
}

/* "developer" is what newer clients call "system", which is the word that templates know. */
static const char *role_of(maker *make, const json_t *message, const char *field)
{
    static const char *const roles[] = {"system", "user", "assistant", "tool"};
    const char *role = json_string_value(json_object_get(message, "role"));

    if (role && strcmp(role, "developer") == 0)
        return "system";
    for (size_t i = 0; role && i < sizeof roles / sizeof *roles; i++)
        if (strcmp(role, roles[i]) == 0)
            return roles[i];
    refuse_field(make, field, "role", "it is none of system, developer, user, assistant and tool");
    return "";
}

/* What clients write for a call without arguments: nothing, blanks, or the word null. */
static bool is_no_arguments(const json_t *json)
{
    const char *text = json_string_value(json);
    size_t bytes = json_string_length(json), begin = 0;

    if (!json || json_is_null(json))
        return true;
    if (!text)
        return false;
    while (begin < bytes && memchr(" \t\r\n", text[begin], 4))
        begin++;
    while (bytes > begin && memchr(" \t\r\n", text[bytes - 1], 4))
        bytes--;
    return bytes == begin || (bytes - begin == 4 && memcmp(text + begin, "null", 4) == 0);
}

/* Templates want the arguments of a call as a mapping; in OpenAI's form they are JSON text. */
static sp_value arguments_value(maker *make, const json_t *json, const char *field)
{
    json_t *root = NULL;
    owned *keep;

    if (is_no_arguments(json))
        return (sp_value){.kind = SP_VALUE_MAP, .as.map = sp_map_create(&make->render, 0)};
    if (json_is_object(json))
        return value_of(make, json);
    keep = sp_render_take(&make->render, 1, sizeof *keep);
    if (keep && json_is_string(json)) {
        sp_status status = sp_json_parse(json_string_value(json), json_string_length(json), field,
                                         SP_CHAT_BAD_MESSAGES, NULL, &root, make->error);

        if (status != SP_OK) {
            make->render.failed = status;
            return sp_value_undefined(NULL);
        }
        *keep = (owned){make->owned, root};
        make->owned = keep;
    }
    if (!json_is_object(root)) {
        refuse(make, SP_CHAT_BAD_MESSAGES, field, "it is no JSON object, nor the text of one");
        return sp_value_undefined(NULL);
    }
    return value_of(make, root);
}

/* A function with its arguments parsed. */
static sp_value function_value(maker *make, const json_t *function, const char *field)
{
    char name[SP_ERROR_SUBJECT_BYTES];
    sp_map *map;
    const char *key;
    json_t *value;

    if (!json_is_string(json_object_get(function, "name"))) {
        refuse_field(make, field, "name", "it is missing or no string");
        return sp_value_undefined(NULL);
    }
    name_field(name, "%s.arguments", field);
    map = sp_map_create(&make->render, json_object_size(function) + 1);
    json_object_foreach((json_t *)function, key, value) push(
        make, map, key,
        strcmp(key, "arguments") == 0 ? arguments_value(make, value, name) : value_of(make, value));
    if (!json_object_get(function, "arguments"))
        push(make, map, "arguments", arguments_value(make, NULL, name));
    return map ? (sp_value){.kind = SP_VALUE_MAP, .as.map = map} : sp_value_undefined(NULL);
}

static sp_value call_value(maker *make, const json_t *call, const char *field)
{
    char name[SP_ERROR_SUBJECT_BYTES];
    sp_map *map;
    const char *key;
    json_t *value;

    if (!json_object_get(call, "function"))
        return function_value(make, call, field); /* the function itself, as transformers takes */
    map = sp_map_create(&make->render, json_object_size(call));
    name_field(name, "%s.function", field);
    json_object_foreach((json_t *)call, key, value) push(
        make, map, key,
        strcmp(key, "function") == 0 ? function_value(make, value, name) : value_of(make, value));
    return map ? (sp_value){.kind = SP_VALUE_MAP, .as.map = map} : sp_value_undefined(NULL);
}

static sp_value calls_value(maker *make, const json_t *calls, const char *message)
{
    char field[SP_ERROR_SUBJECT_BYTES];
    sp_items items = {0};
    size_t i;
    json_t *call;

    if (json_is_null(calls))
        return sp_value_none();
    if (!json_is_array(calls))
        refuse_field(make, message, "tool_calls", "it is no list");
    json_array_foreach((json_t *)calls, i, call)
    {
        name_field(field, "%s.tool_calls[%zu]", message, i);
        sp_items_add(&make->render, &items, call_value(make, call, field));
        if (failed(make))
            break;
    }
    return sp_items_list(&make->render, &items, false);
}

/* Fields that would change what the message says, and that no template is given. */
static void check_fields(maker *make, const json_t *message, const char *field)
{
    static const char *const refused[] = {"audio", "function_call"};

    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        const json_t *value = json_object_get(message, refused[i]);

        if (value && !json_is_null(value))
            refuse_field(make, field, refused[i], "the field is not supported");
    }
}

static sp_value message_value(maker *make, const json_t *message, size_t index)
{
    char field[SP_ERROR_SUBJECT_BYTES];
    sp_map *map = sp_map_create(&make->render, json_object_size(message) + 1);
    const char *role, *key;
    bool assistant;
    json_t *value;

    name_field(field, "messages[%zu]", index);
    if (!json_is_object(message))
        refuse(make, SP_CHAT_BAD_MESSAGES, field, "it is no object");
    check_fields(make, message, field);
    role = role_of(make, message, field);
    assistant = strcmp(role, "assistant") == 0;
    json_object_foreach((json_t *)message, key, value)
    {
        if (failed(make))
            break;
        if (strcmp(key, "role") == 0)
            push(make, map, key, sp_value_text(borrow(make, role, strlen(role), false)));
        else if (strcmp(key, "content") == 0)
            push(make, map, key, content_value(make, value, field, assistant));
        else if (strcmp(key, "tool_calls") == 0)
            push(make, map, key, calls_value(make, value, field));
        else
            push(make, map, key, value_of(make, value));
    }
    if (!failed(make) && !json_object_get(message, "content"))
        push(make, map, "content", content_value(make, NULL, field, assistant));
    return map ? (sp_value){.kind = SP_VALUE_MAP, .as.map = map} : sp_value_undefined(NULL);
}

static sp_value messages_value(maker *make, const json_t *messages)
{
    sp_items items = {0};
    size_t i;
    json_t *message;

    if (!json_is_array(messages) || json_array_size(messages) == 0)
        refuse(make, SP_CHAT_BAD_MESSAGES, "messages", "it is no list, or an empty one");
    json_array_foreach((json_t *)messages, i, message)
    {
        if (failed(make))
            break;
        sp_items_add(&make->render, &items, message_value(make, message, i));
    }
    return sp_items_list(&make->render, &items, false);
}

/* --- Tools ---------------------------------------------------------------------------------- */

/* Whether the tools are shown to the model. */
static bool wants_tools(maker *make, const sp_chat_request *request)
{
    const char *choice = json_string_value(request->tool_choice);

    if (!request->tool_choice || json_is_null(request->tool_choice))
        return true;
    if (choice && strcmp(choice, "none") == 0)
        return false;
    if (!(choice && strcmp(choice, "auto") == 0) && !sp_forced_call_is_wanted(request->tool_choice))
        refuse(make, SP_CHAT_BAD_TOOL_CHOICE, "tool_choice",
               "only \"none\", \"auto\", \"required\" and a function by its name");
    return true;
}

static void check_tool(maker *make, const json_t *tool, size_t index)
{
    char field[SP_ERROR_SUBJECT_BYTES];
    const char *type = json_string_value(json_object_get(tool, "type"));
    const json_t *function = json_object_get(tool, "function");

    name_field(field, "tools[%zu]", index);
    if (!type || strcmp(type, "function") != 0)
        refuse_field(make, field, "type", "only \"function\" is supported");
    else if (!json_is_string(json_object_get(function, "name")))
        refuse_field(make, field, "function.name", "it is missing or no string");
}

static sp_value tools_value(maker *make, const sp_chat_request *request)
{
    size_t i;
    json_t *tool;

    if (!wants_tools(make, request) || !request->tools || json_is_null(request->tools))
        return sp_value_none();
    if (!json_is_array(request->tools))
        refuse(make, SP_CHAT_BAD_MESSAGES, "tools", "it is no list");
    json_array_foreach((json_t *)request->tools, i, tool) check_tool(make, tool, i);
    return failed(make) ? sp_value_none() : value_of(make, request->tools);
}

/* --- Variables ------------------------------------------------------------------------------ */

static void set_global(const sp_template *template, sp_value *globals, const char *name,
                       sp_value value)
{
    int32_t at = sp_template_name(template, name, strlen(name));

    if (at >= 0)
        globals[at] = value;
}

static void set_kwargs(maker *make, const sp_template *template, sp_value *globals,
                       const json_t *kwargs)
{
    static const char *const taken[] = {"messages", "tools", "add_generation_prompt",
                                        "continue_final_message"};
    const char *key;
    json_t *value;

    if (kwargs && !json_is_null(kwargs) && !json_is_object(kwargs))
        refuse(make, SP_CHAT_BAD_MESSAGES, "chat_template_kwargs", "it is no object");
    json_object_foreach((json_t *)kwargs, key, value)
    {
        for (size_t i = 0; i < sizeof taken / sizeof *taken; i++)
            if (strcmp(key, taken[i]) == 0)
                refuse_field(make, "chat_template_kwargs", key, "the request has a field for it");
        set_global(template, globals, key, value_of(make, value));
    }
}

static void set_effort(maker *make, const sp_template *template, sp_value *globals,
                       const char *effort)
{
    if (!effort)
        return;
    if (strcmp(effort, "none") == 0 || strcmp(effort, "minimal") == 0)
        set_global(template, globals, "enable_thinking", sp_value_bool(false));
    set_global(template, globals, "reasoning_effort",
               sp_value_text(borrow(make, effort, strlen(effort), false)));
}

static sp_value *make_globals(maker *make, const sp_chat *chat, const sp_template *template,
                              const sp_chat_request *request, sp_value tools)
{
    sp_value *globals = sp_render_take(&make->render, (size_t) template->n_names, sizeof *globals);

    if (!globals)
        return NULL;
    for (size_t i = 0; i < SP_CHAT_TOKENS; i++)
        if (chat->tokens[i])
            set_global(template, globals, sp_chat_token_names[i],
                       sp_value_text(borrow(make, chat->tokens[i], strlen(chat->tokens[i]), true)));
    set_effort(make, template, globals, request->effort);
    set_kwargs(make, template, globals, request->template_kwargs);
    set_global(template, globals, "messages", messages_value(make, request->messages));
    set_global(template, globals, "tools", tools);
    set_global(template, globals, "documents", sp_value_none());
    set_global(template, globals, "add_generation_prompt",
               sp_value_bool(request->add_generation_prompt));
    return globals;
}

/* --- Output --------------------------------------------------------------------------------- */

static sp_status add_span(sp_chat_prompt *prompt, size_t begin, size_t end, sp_error *error)
{
    if (prompt->n_spans == prompt->spans_capacity) {
        size_t capacity = prompt->spans_capacity ? prompt->spans_capacity * 2 : 64;
        sp_text_span *spans = sp_realloc(prompt->spans, capacity * sizeof *spans);

        if (!spans)
            return sp_fail_memory(error, capacity * sizeof *spans, "the spans of a prompt");
        prompt->spans = spans;
        prompt->spans_capacity = capacity;
    }
    prompt->spans[prompt->n_spans++] = (sp_text_span){begin, end};
    return SP_OK;
}

/* Text and spans of the first `bytes` bytes of what the template wrote. */
static sp_status copy_out(sp_chat_prompt *prompt, const sp_build *build, size_t bytes,
                          sp_error *error)
{
    size_t begin, at = 0;
    sp_status status = SP_OK;

    sp_text_add_bytes(&prompt->text, build->data ? build->data : "", bytes);
    if (prompt->text.failed)
        return sp_fail_memory(error, bytes, "a prompt");
    while (at < bytes && status == SP_OK) {
        for (begin = at; at < bytes && build->own[at]; at++)
            ;
        if (at > begin)
            status = add_span(prompt, begin, at, error);
        for (; at < bytes && !build->own[at]; at++)
            ;
    }
    return status;
}

/*
 * Where the last message's content ends in the prompt. Templates may trim it, so that it is looked
 * for without white space at its ends; and they may take it apart, so that parts of what is found
 * may be their own. But its last character is data, and so is white space after it.
 */
static size_t end_of_content(maker *make, const sp_build *build, const sp_value *messages)
{
    const sp_list *list = messages->as.list;
    sp_value last = list->items[list->n - 1];
    const sp_value *content = sp_map_find(&make->render, last.as.map, "content", 7);
    const sp_str *whole = content ? content->as.text : &sp_str_empty;
    size_t begin, end, at, n;

    sp_str_strip(whole, NULL, true, true, &begin, &end);
    n = end - begin;
    if (n == 0 || n > build->bytes)
        return SIZE_MAX;
    for (at = build->bytes - n + 1; at > 0 && sp_render_spend(&make->render, n / 64); at--)
        if (!build->own[at + n - 2] && memcmp(build->data + at - 1, whole->data + begin, n) == 0)
            break;
    if (at == 0 || failed(make))
        return SIZE_MAX;
    for (at += n - 1; end < whole->bytes && at < build->bytes && !build->own[at] &&
                      build->data[at] == whole->data[end];
         at++)
        end++;
    return end == whole->bytes ? at : at - (end - begin - n);
}

/* The last place of `what` in the first `bytes` bytes, plus one; 0: nowhere. */
static size_t last_of(const char *data, size_t bytes, const char *what)
{
    size_t n = strlen(what);

    for (size_t at = bytes >= n ? bytes - n + 1 : 0; at > 0; at--)
        if (memcmp(data + at - 1, what, n) == 0)
            return at;
    return 0;
}

/* Whether an answer goes on inside <think>: the template opened it last, or, where the prompt ends
 * inside a message, that message did. */
static bool ends_thinking(const sp_chat_prompt *prompt, bool continues)
{
    const char *data = prompt->text.data;
    size_t bytes = prompt->text.bytes;

    if (continues)
        return last_of(data, bytes, "<think>") > last_of(data, bytes, "</think>");
    while (bytes > 0 && strchr(" \n\t", data[bytes - 1]))
        bytes--;
    return bytes >= 7 && memcmp(data + bytes - 7, "<think>", 7) == 0 && prompt->n_spans > 0 &&
           prompt->spans[prompt->n_spans - 1].begin <= bytes - 7 &&
           prompt->spans[prompt->n_spans - 1].end >= bytes;
}

/* A template that knows <think> leaves it to the model, unless the thought is over already. */
static sp_constraint_thought thought_of(const sp_chat_prompt *prompt, bool continues)
{
    static const char close[] = "</think>";
    const char *data = prompt->text.data;
    size_t bytes = prompt->text.bytes, n = sizeof close - 1;

    if (prompt->thinking)
        return SP_CONSTRAINT_THINKS;
    while (bytes > 0 && strchr(" \n\t", data[bytes - 1]))
        bytes--;
    if (!prompt->reasoning || continues || (bytes >= n && memcmp(data + bytes - n, close, n) == 0))
        return SP_CONSTRAINT_NO_THOUGHT;
    return SP_CONSTRAINT_MAY_THINK;
}

/* --- All of it ------------------------------------------------------------------------------ */

static sp_status finish(maker *make, const sp_chat *chat, const sp_chat_request *request,
                        const sp_build *build, const sp_value *messages, sp_chat_prompt *out_prompt)
{
    sp_chat_prompt prompt = {0};
    size_t bytes = build->bytes;
    sp_status status;

    if (request->continue_final_message)
        bytes = end_of_content(make, build, messages);
    if (bytes == SIZE_MAX) {
        refuse(make, SP_CHAT_BAD_MESSAGES, "continue_final_message",
               "the last message has no text, or the template does not write it as it is");
        return make->render.failed;
    }
    status = copy_out(&prompt, build, bytes, make->error);
    if (status != SP_OK) {
        sp_chat_prompt_free(&prompt);
        return status;
    }
    prompt.reasoning = chat->reasoning;
    prompt.thinking = chat->reasoning && ends_thinking(&prompt, request->continue_final_message);
    prompt.fresh =
        prompt.thinking && bytes >= 7 && memcmp(prompt.text.data + bytes - 7, "<think>", 7) == 0;
    prompt.thought = thought_of(&prompt, request->continue_final_message);
    *out_prompt = prompt;
    return SP_OK;
}

/* What calls have to be, where the request says so. */
static sp_status hold_calls(sp_chat_prompt *prompt, const sp_chat_request *request, sp_error *error)
{
    sp_status status = SP_OK;

    if (sp_forced_call_is_wanted(request->tool_choice)) {
        status = sp_forced_call_write(prompt, request, &prompt->forced, error);
    } else if (sp_strict_call_is_wanted(request)) {
        prompt->may_call = true;
        status = sp_strict_call_write(prompt, request, &prompt->forced, error);
    }
    if (status != SP_OK)
        sp_chat_prompt_free(prompt);
    return status;
}

static sp_status render_with(maker *make, const sp_chat *chat, const sp_chat_request *request,
                             sp_chat_prompt *out_prompt)
{
    sp_value tools = tools_value(make, request);
    bool has_tools = sp_value_truth(&tools);
    const sp_template *template =
        has_tools && chat->with_tools.body ? &chat->with_tools : &chat->plain;
    sp_value *globals, messages;
    sp_build build = {0};
    sp_status status;
    int32_t name = sp_template_name(template, "messages", 8);

    if (request->continue_final_message && request->add_generation_prompt)
        refuse(make, SP_CHAT_BAD_MESSAGES, "continue_final_message",
               "it excludes add_generation_prompt");
    globals = make_globals(make, chat, template, request, tools);
    if (!globals || failed(make))
        return make->render.failed;
    messages = name >= 0 ? globals[name] : sp_value_undefined(NULL);
    sp_template_run(template, &make->render, globals, &build);
    if (failed(make))
        return make->render.failed;
    if (request->continue_final_message && messages.kind != SP_VALUE_LIST)
        return sp_fail(make->error, SP_ERR_INPUT, SP_CHAT_FAILED, chat->source_name, -1,
                       "the template does not use the messages");
    status = finish(make, chat, request, &build, &messages, out_prompt);
    if (status == SP_OK)
        out_prompt->tools = chat->calls && has_tools;
    if (status == SP_OK && out_prompt->tools && chat->tagged_calls)
        out_prompt->tagged_tools = json_incref((json_t *)request->tools);
    if (status == SP_OK)
        status = hold_calls(out_prompt, request, make->error);
    return status;
}

sp_status sp_chat_render(const sp_chat *chat, const sp_chat_request *request,
                         sp_chat_prompt *out_prompt, sp_error *error)
{
    sp_error local; /* the interpreter always has one to write to */
    maker make = {.error = error ? error : &local,
                  .render = {.subject = chat->source_name,
                             .steps_left = SP_RENDER_STEPS_MAX,
                             .unix_seconds = request->unix_seconds}};
    sp_status status;

    make.render.error = make.error;
    sp_arena_start(&make.render.arena, SP_RENDER_BYTES_MAX);
    status = render_with(&make, chat, request, out_prompt);
    for (owned *at = make.owned; at; at = at->next)
        json_decref(at->json);
    sp_arena_free(&make.render.arena);
    return status;
}
