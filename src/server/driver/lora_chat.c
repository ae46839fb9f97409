#include "server/driver/lora_chat.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "checkpoint/shape.h"

#include <string.h>

_Static_assert(sizeof((sp_lora_chat *)0)->ends == sizeof((sp_model_shape *)0)->eos_token_ids,
               "an adapter may have as many ends as a base");

#define GENERATION_FILE      "generation_config.json"
#define GENERATION_BYTES_MAX ((size_t)1 << 20)

/* ---- the file system ----------------------------------------------------------------------- */

/* A failure without a code is one of the file. */
static void keep_failure(sp_error *kept, const sp_error *why, const char *code)
{
    *kept = *why;
    if (!kept->code || !kept->code[0])
        kept->code = code;
}

static void read_generation_config(const char *folder, sp_lora_files *files)
{
    char *path = sp_path_join(folder, GENERATION_FILE);
    sp_error why = {0};
    sp_status status = path
                           ? sp_file_read_all(path, GENERATION_BYTES_MAX, &files->generation_config,
                                              &files->generation_bytes, &why)
                           : sp_fail_memory(&why, strlen(folder), "a path");

    sp_free(path);
    if (status != SP_OK && status != SP_ERR_NOT_FOUND)
        keep_failure(&files->generation_error, &why, SP_CODE_GENERATION_CONFIG);
}

sp_status sp_lora_files_read(const char *path, sp_lora_files *out_files, sp_error *error)
{
    char *folder = sp_path_is_directory(path) ? sp_strdup(path) : sp_path_folder(path);
    sp_lora_files files = {.generation_config = NULL};
    sp_error why = {0};

    if (!folder)
        return sp_fail_memory(error, strlen(path), "a path");
    if (sp_chat_folder_read(folder, &files.chat, &why) != SP_OK)
        keep_failure(&files.chat_error, &why, SP_CHAT_MALFORMED);
    read_generation_config(folder, &files);
    sp_free(folder);
    *out_files = files;
    return SP_OK;
}

void sp_lora_files_free(sp_lora_files *files)
{
    sp_chat_folder_free(&files->chat);
    sp_free(files->generation_config);
    *files = (sp_lora_files){.generation_config = NULL};
}

/* ---- understanding ------------------------------------------------------------------------- */

/* Under --chat-template an adapter's own is not looked at, so nothing in it can be wrong. */
static sp_status take_template(const sp_lora_files *files, const sp_lora_chat_base *base,
                               sp_lora_chat *chat, sp_error *error)
{
    sp_error why = {0};
    sp_status status = files->chat_error.status;

    if (base->overrules)
        return SP_OK;
    if (status != SP_OK)
        why = files->chat_error;
    else
        status = sp_chat_open_folder(&files->chat, base->tokenizer_config, base->engine,
                                     &chat->chat, &why);
    if (status == SP_ERR_MEMORY)
        return sp_fail_memory(error, 1, "the template of an adapter");
    if (status != SP_OK)
        keep_failure(&chat->chat_error, &why, SP_CHAT_MALFORMED);
    return SP_OK;
}

/* By the rules of the base's own file; null and nothing leave the base's ids. */
static sp_status read_ends(const json_t *root, const sp_engine *engine, sp_lora_chat *chat,
                           sp_error *error)
{
    const json_t *value = json_object_get(root, "eos_token_id");
    sp_model_shape shape = *sp_engine_shape(engine);
    sp_status status = sp_model_shape_read_eos(value, GENERATION_FILE, &shape, error);

    if (status != SP_OK || !value || json_is_null(value))
        return status;
    memcpy(chat->ends, shape.eos_token_ids, sizeof chat->ends);
    chat->n_ends = shape.n_eos_token_ids;
    chat->has_ends = true;
    return SP_OK;
}

static sp_status take_ends(const sp_lora_files *files, const sp_engine *engine, sp_lora_chat *chat,
                           sp_error *error)
{
    json_t *root = NULL;
    sp_error why = files->generation_error;
    sp_status status = why.status;

    if (status == SP_OK && files->generation_config)
        status = sp_json_parse(files->generation_config, files->generation_bytes, GENERATION_FILE,
                               SP_CODE_GENERATION_CONFIG, NULL, &root, &why);
    if (status == SP_OK && root && !json_is_object(root))
        status = sp_fail(&why, SP_ERR_INPUT, SP_CODE_GENERATION_CONFIG, GENERATION_FILE, -1,
                         GENERATION_FILE " is not a JSON object");
    if (status == SP_OK)
        status = read_ends(root, engine, chat, &why);
    json_decref(root);
    if (status == SP_ERR_MEMORY)
        return sp_fail_memory(error, files->generation_bytes, GENERATION_FILE);
    if (status != SP_OK)
        keep_failure(&chat->ends_error, &why, SP_CODE_GENERATION_CONFIG);
    return SP_OK;
}

static void destroy(sp_lora_chat *chat)
{
    sp_chat_close(chat->chat);
    sp_free(chat);
}

static bool says_nothing(const sp_lora_chat *chat)
{
    return !chat->chat && !chat->has_ends && chat->chat_error.status == SP_OK &&
           chat->ends_error.status == SP_OK;
}

sp_status sp_lora_chat_make(const sp_lora_files *files, const sp_lora_chat_base *base,
                            sp_lora_chat **out_chat, sp_error *error)
{
    sp_lora_chat *chat = sp_calloc(1, sizeof *chat);
    sp_status status;

    if (!chat)
        return sp_fail_memory(error, sizeof *chat, "what an adapter says of chat");
    atomic_init(&chat->references, 1);
    chat->destroy = destroy;
    status = take_template(files, base, chat, error);
    if (status == SP_OK)
        status = take_ends(files, base->engine, chat, error);
    if (status != SP_OK || says_nothing(chat)) {
        sp_lora_chat_release(chat);
        chat = NULL;
    }
    *out_chat = chat;
    return status;
}
