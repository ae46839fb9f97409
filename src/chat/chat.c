/* Finding and reading a checkpoint's template. */
#include "chat/chat.h"

#include "base/alloc.h"
#include "base/file.h"
#include "base/json.h"
#include "chat/chat_state.h"

#include <string.h>

#define BUILT_IN "built-in Qwen form"

bool sp_chat_mentions(const char *source, size_t bytes, const char *what)
{
    size_t n = strlen(what);

    for (size_t at = 0; at + n <= bytes; at++)
        if (memcmp(source + at, what, n) == 0)
            return true;
    return false;
}

/* --- The tokens of the configuration --------------------------------------------------------- */

const char *const sp_chat_token_names[SP_CHAT_TOKENS] = {
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"};

/* A token is given as its text, or as an object with its text as "content". */
const char *sp_chat_token_text(const json_t *value)
{
    return json_string_value(json_is_object(value) ? json_object_get(value, "content") : value);
}

static sp_status keep_tokens(sp_chat *chat, const json_t *config, sp_error *error)
{
    for (size_t i = 0; i < SP_CHAT_TOKENS; i++) {
        const char *text = sp_chat_token_text(json_object_get(config, sp_chat_token_names[i]));

        if (!text)
            continue;
        chat->tokens[i] = sp_strdup(text);
        if (!chat->tokens[i])
            return sp_fail_memory(error, strlen(text), sp_chat_token_names[i]);
    }
    return SP_OK;
}

/* --- Templates -------------------------------------------------------------------------------- */

sp_status sp_chat_add_template(sp_chat *chat, sp_template *template, const char *source,
                               size_t bytes, const char *subject, sp_error *error)
{
    sp_status status = sp_template_parse(source, bytes, subject, template, error);

    if (status == SP_OK) {
        chat->reasoning |= sp_chat_mentions(source, bytes, "</think>");
        chat->calls |= sp_chat_mentions(source, bytes, "<tool_call>");
        chat->tagged_calls |= sp_chat_mentions(source, bytes, "<function=");
    }
    return status;
}

sp_status sp_chat_parse(const char *source, size_t bytes, const char *subject, const json_t *config,
                        sp_chat **out_chat, sp_error *error)
{
    sp_chat *chat = sp_calloc(1, sizeof *chat);
    sp_status status;

    if (!chat)
        return sp_fail_memory(error, sizeof *chat, subject);
    chat->source_name = sp_strdup(subject);
    status = chat->source_name ? keep_tokens(chat, config, error)
                               : sp_fail_memory(error, strlen(subject), subject);
    if (status == SP_OK)
        status = sp_chat_add_template(chat, &chat->plain, source, bytes, subject, error);
    if (status != SP_OK) {
        sp_chat_close(chat);
        return status;
    }
    *out_chat = chat;
    return SP_OK;
}

void sp_chat_close(sp_chat *chat)
{
    if (!chat)
        return;
    sp_template_free(&chat->plain);
    sp_template_free(&chat->with_tools);
    for (size_t i = 0; i < SP_CHAT_TOKENS; i++)
        sp_free(chat->tokens[i]);
    sp_free(chat->source_name);
    sp_free(chat);
}

const char *sp_chat_source(const sp_chat *chat)
{
    return chat->source_name;
}

/* --- A checkpoint's files --------------------------------------------------------------------- */

static sp_status parse_file(const char *path, const json_t *config, sp_chat **out_chat,
                            sp_error *error)
{
    char *source;
    size_t bytes;
    sp_status status = sp_file_read_all(path, SP_TEMPLATE_BYTES_MAX, &source, &bytes, error);

    if (status != SP_OK)
        return status;
    status = sp_chat_parse(source, bytes, path, config, out_chat, error);
    sp_free(source);
    return status;
}

/* The template for requests with tools, when there is one of its own. */
static sp_status add_tools_file(const char *model_dir, sp_chat *chat, sp_error *error)
{
    char *path = sp_path_join(model_dir, SP_CHAT_TOOLS_FILE), *source = NULL;
    size_t bytes;
    sp_status status = SP_OK;

    if (!path)
        return sp_fail_memory(error, strlen(model_dir), model_dir);
    if (sp_path_exists(path)) {
        status = sp_file_read_all(path, SP_TEMPLATE_BYTES_MAX, &source, &bytes, error);
        if (status == SP_OK)
            status = sp_chat_add_template(chat, &chat->with_tools, source, bytes, path, error);
    }
    sp_free(source);
    sp_free(path);
    return status;
}

static const json_t *named_template(const json_t *list, const char *name)
{
    size_t i;
    json_t *entry;

    json_array_foreach((json_t *)list, i, entry)
    {
        const char *found = json_string_value(json_object_get(entry, "name"));

        if (found && strcmp(found, name) == 0)
            return json_object_get(entry, "template");
    }
    return NULL;
}

/* "chat_template" of tokenizer_config.json: a text, or a list of named ones. */
sp_status sp_chat_parse_config(const json_t *value, const char *subject, const json_t *config,
                               sp_chat **out_chat, sp_error *error)
{
    const json_t *plain = json_is_array(value) ? named_template(value, "default") : value;
    const json_t *tools = json_is_array(value) ? named_template(value, "tool_use") : NULL;
    sp_status status;

    if (!json_is_string(plain))
        return sp_fail(error, SP_ERR_INPUT, SP_CHAT_MALFORMED, "chat_template", -1,
                       "%s: chat_template is neither a text nor a list with one named \"default\"",
                       subject);
    status = sp_chat_parse(json_string_value(plain), json_string_length(plain), subject, config,
                           out_chat, error);
    if (status != SP_OK || !json_is_string(tools))
        return status;
    status = sp_chat_add_template(*out_chat, &(*out_chat)->with_tools, json_string_value(tools),
                                  json_string_length(tools), subject, error);
    if (status != SP_OK) {
        sp_chat_close(*out_chat);
        *out_chat = NULL;
    }
    return status;
}

/* Whether a text is one special token. */
static bool is_special(const sp_engine *engine, const char *text)
{
    int32_t *tokens = NULL, n = 0, n_plain = 0;
    bool known = sp_engine_encode(engine, text, strlen(text), true, 0, &tokens, &n, NULL) == SP_OK;

    sp_engine_free(tokens);
    tokens = NULL;
    known = known && sp_engine_encode(engine, text, strlen(text), false, 0, &tokens, &n_plain,
                                      NULL) == SP_OK;
    sp_engine_free(tokens);
    return known && n == 1 && n_plain > 1;
}

static sp_status built_in(const char *model_dir, const sp_engine *engine, const json_t *config,
                          sp_chat **out_chat, sp_error *error)
{
    if (!engine || !is_special(engine, "<|im_start|>") || !is_special(engine, "<|im_end|>"))
        return sp_fail(error, SP_ERR_NOT_FOUND, SP_CHAT_NO_TEMPLATE, model_dir, -1,
                       "%s has no " SP_CHAT_TEMPLATE_FILE
                       " and no chat_template in its " SP_CHAT_CONFIG_FILE
                       ", and its tokenizer lacks the special tokens of the Qwen form",
                       model_dir);
    return sp_chat_parse(sp_qwen_form, strlen(sp_qwen_form), BUILT_IN, config, out_chat, error);
}

static sp_status open_with(const char *model_dir, const char *template_file, const char *file,
                           const char *config_path, const json_t *config, const sp_engine *engine,
                           sp_chat **out_chat, sp_error *error)
{
    const json_t *value = json_object_get(config, "chat_template");
    sp_status status;

    if (template_file)
        return parse_file(template_file, config, out_chat, error);
    if (!sp_path_exists(file)) {
        if (value && !json_is_null(value))
            return sp_chat_parse_config(value, config_path, config, out_chat, error);
        return built_in(model_dir, engine, config, out_chat, error);
    }
    status = parse_file(file, config, out_chat, error);
    if (status == SP_OK)
        status = add_tools_file(model_dir, *out_chat, error);
    return status;
}

sp_status sp_chat_open(const char *model_dir, const char *template_file, const sp_engine *engine,
                       sp_chat **out_chat, sp_error *error)
{
    char *file = sp_path_join(model_dir, SP_CHAT_TEMPLATE_FILE);
    char *config_path = sp_path_join(model_dir, SP_CHAT_CONFIG_FILE);
    json_t *config = NULL;
    sp_chat *chat = NULL;
    sp_status status = SP_OK;

    if (!file || !config_path)
        status = sp_fail_memory(error, strlen(model_dir), model_dir);
    else if (sp_path_exists(config_path))
        status = sp_json_read_object(config_path, SP_CHAT_CONFIG_BYTES_MAX, SP_CHAT_MALFORMED,
                                     &config, error);
    if (status == SP_OK)
        status =
            open_with(model_dir, template_file, file, config_path, config, engine, &chat, error);
    if (status == SP_OK && engine && sp_chat_find_turn_ends(chat, engine) != SP_OK)
        status = sp_fail_memory(error, 1, "the ends of a template's turns");
    json_decref(config);
    sp_free(config_path);
    sp_free(file);
    if (status != SP_OK) {
        sp_chat_close(chat);
        return status;
    }
    *out_chat = chat;
    return SP_OK;
}
