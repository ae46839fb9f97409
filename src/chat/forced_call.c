#include "chat/forced_call.h"

#include "base/error.h"

#include <string.h>

#define OPEN    "<tool_call>"
#define BETWEEN "\n"

/* A call as chat_reply.c reads it again. */
typedef struct call_form {
    const char *begin, *middle, *end;
    bool tagged;
} call_form;

/* Of Qwen and Hermes, and of Qwen3-Coder and Qwen3.5 (tagged_call.h). */
static const call_form json_form = {OPEN "\n{\"name\": \"",
                                    "\", \"arguments\": ", "}\n</tool_call>", false};
static const call_form tagged_form = {OPEN "\n<function=", ">\n", "</function>\n</tool_call>",
                                      true};

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

static bool is_strict(const json_t *tool)
{
    return json_is_true(json_object_get(json_object_get(tool, "function"), "strict"));
}

bool sp_strict_call_is_wanted(const sp_chat_request *request)
{
    const char *word = json_string_value(request->tool_choice);

    if (request->tool_choice && !json_is_null(request->tool_choice) &&
        !(word && strcmp(word, "auto") == 0))
        return false;
    for (size_t i = 0; i < json_array_size(request->tools); i++)
        if (is_strict(json_array_get(request->tools, i)))
            return true;
    return false;
}

static sp_status refuse(sp_error *error, const char *why, const char *name)
{
    return sp_fail(error, SP_ERR_INPUT, SP_CHAT_BAD_TOOL_CHOICE, "tool_choice", -1,
                   "field \"tool_choice\": %s%.100s", why, name ? name : "");
}

/* The tools that may be called, all or the one of a name, as a constraint has them; a new
 * reference. `strict`: others than strict ones take any arguments. NULL: out of memory. */
static json_t *tools_of(const json_t *tools, const char *name, bool strict)
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
        if (json_array_append_new(list, json_pack("{s:s, s:O?, s:b}", "name", own, "parameters",
                                                  parameters, "any", strict && !is_strict(tool))) !=
            0) {
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

/* `free`: the text that begins a call among other text; NULL: there are only calls. */
static sp_status write(const sp_chat_prompt *prompt, json_t *list, bool many, const char *free,
                       sp_text *out_text, sp_error *error)
{
    const call_form *form = prompt->tagged_tools ? &tagged_form : &json_form;
    json_t *call = json_pack("{s:s, s:s, s:s, s:s, s:b, s:b, s:s?, s:o}", "begin", form->begin,
                             "middle", form->middle, "end", form->end, "between", BETWEEN, "many",
                             many, "tagged", form->tagged, "free", free, "tools", list);

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
    list = tools_of(request->tools, name, false);
    if (list && json_array_size(list) == 0) {
        json_decref(list);
        return refuse(error, "no tool is called ", name);
    }
    if (!list)
        return sp_fail_memory(error, 0, "a forced call");
    return write(prompt, list, !name && !request->one_call, NULL, out_text, error);
}

sp_status sp_strict_call_write(const sp_chat_prompt *prompt, const sp_chat_request *request,
                               sp_text *out_text, sp_error *error)
{
    json_t *list;

    if (!prompt->tools)
        return SP_OK;
    list = tools_of(request->tools, NULL, true);
    if (!list)
        return sp_fail_memory(error, 0, "calls of strict tools");
    return write(prompt, list, !request->one_call, OPEN, out_text, error);
}
