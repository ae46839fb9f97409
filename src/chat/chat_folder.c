/*
 * The template that an adapter brings. An adapter was trained on prompts of its own template, with
 * its own special tokens; the tokenizer here is the base's, so a template that writes tokens which
 * only the adapter's has cannot be used: what it writes would be other ids than in training.
 */
#include "base/alloc.h"
#include "base/file.h"
#include "base/json.h"
#include "chat/chat_state.h"

#include <stdlib.h>
#include <string.h>

#define ADDED_FILE "added_tokens.json"

static const struct {
    const char *name;
    size_t bytes_max;
} files[SP_CHAT_FILES] = {
    {SP_CHAT_TEMPLATE_FILE, SP_TEMPLATE_BYTES_MAX},
    {SP_CHAT_TOOLS_FILE, SP_TEMPLATE_BYTES_MAX},
    {SP_CHAT_CONFIG_FILE, SP_CHAT_CONFIG_BYTES_MAX},
    {ADDED_FILE, SP_CHAT_CONFIG_BYTES_MAX},
};

/* --- The file system -------------------------------------------------------------------------- */

static sp_status read_file(const char *folder, size_t i, sp_chat_folder *out, sp_error *error)
{
    char *path = sp_path_join(folder, files[i].name);
    sp_error why = {0};
    sp_status status =
        path ? sp_file_read_all(path, files[i].bytes_max, &out->bytes[i], &out->n_bytes[i], &why)
             : sp_fail_memory(&why, strlen(folder), "a path");

    sp_free(path);
    if (status == SP_OK || status == SP_ERR_NOT_FOUND)
        return SP_OK;
    return sp_fail(error, status, why.code, files[i].name, -1, "%s", why.text);
}

sp_status sp_chat_folder_read(const char *path, sp_chat_folder *out_folder, sp_error *error)
{
    sp_chat_folder folder = {.bytes = {NULL}};
    sp_status status = SP_OK;

    for (size_t i = 0; i < SP_CHAT_FILES && status == SP_OK; i++)
        status = read_file(path, i, &folder, error);
    if (status != SP_OK)
        sp_chat_folder_free(&folder);
    *out_folder = folder;
    return status;
}

void sp_chat_folder_free(sp_chat_folder *folder)
{
    for (size_t i = 0; i < SP_CHAT_FILES; i++)
        sp_free(folder->bytes[i]);
    *folder = (sp_chat_folder){.bytes = {NULL}};
}

/* --- Tokens ----------------------------------------------------------------------------------- */

/* What a check of tokens looks at. */
typedef struct written {
    const sp_engine *engine;
    const char *sources[3]; /* [n] texts of templates */
    size_t bytes[3];
    size_t n;
} written;

static void add_source(written *texts, const char *source, size_t bytes)
{
    if (!source)
        return;
    texts->sources[texts->n] = source;
    texts->bytes[texts->n++] = bytes;
}

static bool is_written(const written *texts, const char *what)
{
    for (size_t i = 0; i < texts->n; i++)
        if (sp_chat_mentions(texts->sources[i], texts->bytes[i], what))
            return true;
    return false;
}

/* What the template writes has to be one token of the engine's, with that id where `id` is not
 * negative. */
static sp_status hold_token(const written *texts, const char *text, int64_t id, sp_error *error)
{
    int32_t *tokens = NULL, n = 0;
    bool known;
    sp_status status =
        sp_engine_encode(texts->engine, text, strlen(text), true, 0, &tokens, &n, error);

    known = status == SP_OK && n == 1 && (id < 0 || tokens[0] == id);
    sp_engine_free(tokens);
    if (known || status == SP_ERR_MEMORY)
        return status;
    return sp_fail(error, SP_ERR_UNSUPPORTED, SP_CHAT_UNSUPPORTED, "chat_template", -1,
                   "the adapter's template writes \"%.100s\", which is no such token of the base's "
                   "tokenizer",
                   text);
}

/* Variables of the template that the folder gives a text of its own. */
static sp_status check_named(const written *texts, const json_t *config, sp_error *error)
{
    sp_status status = SP_OK;

    for (size_t i = 0; i < SP_CHAT_TOKENS; i++) {
        const char *text = sp_chat_token_text(json_object_get(config, sp_chat_token_names[i]));

        if (status == SP_OK && text && is_written(texts, sp_chat_token_names[i]))
            status = hold_token(texts, text, -1, error);
    }
    return status;
}

/* "added_tokens_decoder": {"151643": {"content": "<|endoftext|>", ..}} */
static sp_status check_decoder(const written *texts, const json_t *config, sp_error *error)
{
    json_t *decoder = json_object_get(config, "added_tokens_decoder"), *entry;
    const char *id;
    sp_status status = SP_OK;

    json_object_foreach(decoder, id, entry)
    {
        const char *text = sp_chat_token_text(entry);

        if (status == SP_OK && text && text[0] && is_written(texts, text))
            status = hold_token(texts, text, strtoll(id, NULL, 10), error);
    }
    return status;
}

/* added_tokens.json: {"<|endoftext|>": 151643} */
static sp_status check_added(const written *texts, const sp_chat_folder *folder, sp_error *error)
{
    const char *text;
    json_t *root = NULL, *id;
    sp_status status = SP_OK;

    if (folder->bytes[SP_CHAT_FILE_ADDED])
        status =
            sp_json_parse(folder->bytes[SP_CHAT_FILE_ADDED], folder->n_bytes[SP_CHAT_FILE_ADDED],
                          ADDED_FILE, SP_CHAT_MALFORMED, NULL, &root, error);
    json_object_foreach(root, text, id)
    {
        if (status == SP_OK && text[0] && is_written(texts, text))
            status =
                hold_token(texts, text, json_is_integer(id) ? json_integer_value(id) : -1, error);
    }
    json_decref(root);
    return status;
}

/* Without a tokenizer there is nothing to hold them against. */
static sp_status check_tokens(const written *texts, const sp_chat_folder *folder,
                              const json_t *config, sp_error *error)
{
    sp_status status = SP_OK;

    if (!texts->engine)
        return SP_OK;
    status = check_named(texts, config, error);
    if (status == SP_OK)
        status = check_decoder(texts, config, error);
    if (status == SP_OK)
        status = check_added(texts, folder, error);
    return status;
}

/* --- The template ----------------------------------------------------------------------------- */

/* The adapter's tokens, and the base's where its configuration does not name one. */
static json_t *join_configs(const json_t *own, const json_t *base)
{
    json_t *joined = json_object();

    for (size_t i = 0; joined && i < SP_CHAT_TOKENS; i++) {
        const char *name = sp_chat_token_names[i];
        json_t *value = json_object_get(own, name);

        if (!value)
            value = json_object_get(base, name);
        if (value && json_object_set(joined, name, value) != 0) {
            json_decref(joined);
            return NULL;
        }
    }
    return joined;
}

static sp_status parse_file(const sp_chat_folder *folder, const json_t *tokens, written *texts,
                            sp_chat **out_chat, sp_error *error)
{
    const char *source = folder->bytes[SP_CHAT_FILE_TEMPLATE];
    const char *tools = folder->bytes[SP_CHAT_FILE_TOOLS];
    size_t bytes = folder->n_bytes[SP_CHAT_FILE_TEMPLATE];
    size_t tools_bytes = folder->n_bytes[SP_CHAT_FILE_TOOLS];
    sp_status status = sp_chat_parse(source, bytes, SP_CHAT_TEMPLATE_FILE, tokens, out_chat, error);

    add_source(texts, source, bytes);
    add_source(texts, tools, tools_bytes);
    if (status == SP_OK && tools)
        status = sp_chat_add_template(*out_chat, &(*out_chat)->with_tools, tools, tools_bytes,
                                      SP_CHAT_TOOLS_FILE, error);
    return status;
}

static sp_status parse_value(const json_t *value, const json_t *tokens, written *texts,
                             sp_chat **out_chat, sp_error *error)
{
    size_t i;
    json_t *entry;

    if (json_is_string(value))
        add_source(texts, json_string_value(value), json_string_length(value));
    json_array_foreach((json_t *)(uintptr_t)value, i, entry)
    {
        const char *name = json_string_value(json_object_get(entry, "name"));
        const json_t *source = json_object_get(entry, "template");

        if (name && (strcmp(name, "default") == 0 || strcmp(name, "tool_use") == 0) &&
            texts->n < sizeof texts->sources / sizeof *texts->sources)
            add_source(texts, json_string_value(source), json_string_length(source));
    }
    return sp_chat_parse_config(value, SP_CHAT_CONFIG_FILE, tokens, out_chat, error);
}

static sp_status open_template(const sp_chat_folder *folder, const json_t *config,
                               const json_t *base_config, const sp_engine *engine,
                               sp_chat **out_chat, sp_error *error)
{
    const json_t *value = json_object_get(config, "chat_template");
    written texts = {.engine = engine};
    json_t *tokens;
    sp_status status;

    if (!folder->bytes[SP_CHAT_FILE_TEMPLATE] && (!value || json_is_null(value)))
        return SP_OK;
    tokens = join_configs(config, base_config);
    if (!tokens)
        return sp_fail_memory(error, 1, "the tokens of a template");
    if (folder->bytes[SP_CHAT_FILE_TEMPLATE])
        status = parse_file(folder, tokens, &texts, out_chat, error);
    else
        status = parse_value(value, tokens, &texts, out_chat, error);
    json_decref(tokens);
    if (status == SP_OK)
        status = check_tokens(&texts, folder, config, error);
    if (status == SP_OK && engine && sp_chat_find_turn_ends(*out_chat, engine) != SP_OK)
        status = sp_fail_memory(error, 1, "the ends of a template's turns");
    return status;
}

sp_status sp_chat_open_folder(const sp_chat_folder *folder, const json_t *base_config,
                              const sp_engine *engine, sp_chat **out_chat, sp_error *error)
{
    json_t *config = NULL;
    sp_chat *chat = NULL;
    sp_status status = SP_OK;

    if (folder->bytes[SP_CHAT_FILE_CONFIG])
        status =
            sp_json_parse(folder->bytes[SP_CHAT_FILE_CONFIG], folder->n_bytes[SP_CHAT_FILE_CONFIG],
                          SP_CHAT_CONFIG_FILE, SP_CHAT_MALFORMED, NULL, &config, error);
    if (status == SP_OK && config && !json_is_object(config))
        status = sp_fail(error, SP_ERR_INPUT, SP_CHAT_MALFORMED, SP_CHAT_CONFIG_FILE, -1,
                         SP_CHAT_CONFIG_FILE " is not a JSON object");
    if (status == SP_OK)
        status = open_template(folder, config, base_config, engine, &chat, error);
    json_decref(config);
    if (status != SP_OK) {
        sp_chat_close(chat);
        return status;
    }
    *out_chat = chat;
    return SP_OK;
}
