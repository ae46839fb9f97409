#include "chat/forced_call.h"

#include "base/error.h"

#include <string.h>

/* The form of Qwen and Hermes, which chat_reply.c reads. */
#define BEGIN   "<tool_call>\n{\"name\": \""
#define MIDDLE  "\", \"arguments\": "
#define END     "}\n</tool_call>"
#define BETWEEN "\n"

/* The name that {"type": "function", "function": {"name"}} gives; NULL: it is none of these. */
static const char *named(const json_t *tool_choice)
{
    const char *type = json_string_value(json_object_get(tool_choice, "type"));

    if (!type || strcmp(type, "function") != 0)
        return NULL;
    return json_string_value(json_object_get(json_object_get(tool_choice, "function"), "name"));
}

bool sp_forced_call_is_wanted(const json_t *tool_choice)
{
    const char *word = json_string_value(tool_choice);

    return (word && strcmp(word, "required") == 0) || named(tool_choice);
}

static sp_status refuse(sp_error *error, const char *why, const char *name)
{
    return sp_fail(error, SP_ERR_INPUT, SP_CHAT_BAD_TOOL_CHOICE, "tool_choice", -1,
                   "field \"tool_choice\": %s%.100s", why, name ? name : "");
}

/* The tools that may be called, as a constraint has them; a new reference. NULL: out of memory. */
static json_t *tools_of(const json_t *tools, const char *name)
{
    json_t *list = json_array(), *tool;
    size_t i;

    json_array_foreach((json_t *)(uintptr_t)tools, i, tool)
    {
        json_t *function = json_object_get(tool, "function");
        const char *own = json_string_value(json_object_get(function, "name"));
        json_t *parameters = json_object_get(function, "parameters");

        if (name && strcmp(name, own) != 0)
            continue;
        if (json_array_append_new(
                list, json_pack("{s:s, s:O?}", "name", own, "parameters", parameters)) != 0) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

static int take(const char *bytes, size_t n, void *user)
{
    sp_text_add_bytes(user, bytes, n);
    return 0;
}

static sp_status write(json_t *list, bool many, sp_text *out_text, sp_error *error)
{
    json_t *call = json_pack("{s:s, s:s, s:s, s:s, s:b, s:o}", "begin", BEGIN, "middle", MIDDLE,
                             "end", END, "between", BETWEEN, "many", many, "tools", list);

    if (!call || json_dump_callback(call, take, out_text, JSON_COMPACT) != 0)
        out_text->failed = true;
    json_decref(call);
    if (!out_text->failed)
        return SP_OK;
    sp_text_free(out_text);
    return sp_fail_memory(error, 0, "a forced call");
}

sp_status sp_forced_call_write(const sp_chat_prompt *prompt, const sp_chat_request *request,
                               sp_text *out_text, sp_error *error)
{
    const char *name = named(request->tool_choice);
    json_t *list;

    if (json_array_size(request->tools) == 0)
        return refuse(error, "a call is forced, and there are no tools", NULL);
    if (!prompt->tools)
        return refuse(error, "a call is forced, and the model's template has none", NULL);
    if (prompt->tagged_tools)
        return refuse(error, "a call in the tags of this model's template cannot be forced", NULL);
    list = tools_of(request->tools, name);
    if (list && json_array_size(list) == 0) {
        json_decref(list);
        return refuse(error, "no tool is called ", name);
    }
    if (!list)
        return sp_fail_memory(error, 0, "a forced call");
    return write(list, !name && !request->one_call, out_text, error);
}
