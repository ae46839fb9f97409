/*
 * files.c: a folder's adapter_config.json and its weights.
 */
#include "adapter/files.h"

#include "adapter/reason.h"
#include "base/alloc.h"
#include "base/file.h"

#include <string.h>

#define CONFIG_BYTES_MAX ((size_t)16 << 20)

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), length = strlen(end);

    return n >= length && strcmp(text + n - length, end) == 0;
}

static sp_status read_config(sp_adapter_files *files, const char *folder, sp_error *error)
{
    const char *shown;
    sp_error local;
    sp_status status;

    files->config_path = sp_path_join(folder, "adapter_config.json");
    if (!files->config_path)
        return sp_fail_memory(error, strlen(folder), "a path");
    files->config_shown = shown = sp_path_tail(files->config_path);
    status = sp_file_read_all(files->config_path, CONFIG_BYTES_MAX, &files->config,
                              &files->config_bytes, &local);
    if (status == SP_ERR_NOT_FOUND || status == SP_ERR_INPUT)
        return sp_refuse(error, SP_REASON_CONFIG_MISSING, shown, -1, "%s", local.text);
    if (status == SP_ERR_TOO_LARGE || status == SP_ERR_TRUNCATED)
        return sp_refuse(error, SP_REASON_CONFIG_MALFORMED, shown, -1, "%s", local.text);
    if (status != SP_OK && error)
        *error = local;
    return status;
}

static void add_note(sp_adapter_files *files, const char *note)
{
    sp_text_add(&files->note, files->note.bytes > 0 ? "\n" : "");
    sp_text_add(&files->note, note);
}

/* The single file takes precedence over an index, as everywhere; but a folder with both was saved
 * twice. */
static sp_status look_for_two_saves(sp_adapter_files *files, const char *folder, sp_error *error)
{
    char *single = sp_path_join(folder, "adapter_model.safetensors");
    char *index = sp_path_join(folder, "adapter_model.safetensors.index.json");
    bool saved_twice = false;
    sp_status status = SP_OK;

    if (!single || !index)
        status = sp_fail_memory(error, strlen(folder), "a path");
    else
        saved_twice = sp_path_exists(single) && sp_path_exists(index);
    if (saved_twice)
        add_note(files, "adapter_model.safetensors is read; the index of shards beside it is not");
    sp_free(single);
    sp_free(index);
    return status;
}

static sp_status open_weights(sp_adapter_files *files, const char *path, const char *folder,
                              bool is_folder, sp_error *error)
{
    static const char *const pickles[] = {".bin", ".pt", ".pth", ".pkl", ".ckpt"};

    if (is_folder) {
        sp_status status = look_for_two_saves(files, folder, error);

        if (status == SP_OK)
            status = sp_checkpoint_open(folder, "adapter_model", &files->checkpoint, error);
        return status;
    }
    for (size_t i = 0; i < sizeof pickles / sizeof *pickles; i++) {
        if (ends_with(path, pickles[i]))
            return sp_refuse(error, SP_REASON_PICKLE_REFUSED, sp_path_tail(path), -1,
                             "%s is a pickle, which can run code when it is read; it was not "
                             "opened: save the weights as safetensors",
                             sp_path_tail(path));
    }
    return sp_checkpoint_open_file(path, &files->checkpoint, error);
}

/* Notes those of the files that are there, with what becomes of them. False: out of memory. */
static bool note_files(sp_adapter_files *files, const char *folder, const char *const *names,
                       size_t n, const char *what)
{
    sp_text found = {0};
    bool failed = false;

    for (size_t i = 0; i < n && !failed; i++) {
        char *path = sp_path_join(folder, names[i]);

        failed = !path;
        if (path && sp_path_exists(path)) {
            sp_text_add(&found, found.bytes > 0 ? ", " : "");
            sp_text_add(&found, names[i]);
        }
        sp_free(path);
    }
    if (found.bytes > 0) {
        sp_text_format(&found, " beside the weights: %s", what);
        add_note(files, found.failed ? "" : found.data);
    }
    failed |= found.failed || files->note.failed;
    sp_text_free(&found);
    return !failed;
}

/* Files that transformers or vLLM would read there. */
static sp_status look_beside(sp_adapter_files *files, const char *folder, sp_error *error)
{
    static const char *const unused[] = {"added_tokens.json",
                                         "chat_template.json",
                                         "merges.txt",
                                         "new_embeddings.safetensors",
                                         "special_tokens_map.json",
                                         "tokenizer.json",
                                         "tokenizer.model",
                                         "vocab.json"};
    static const char *const of_requests[] = {"chat_template.jinja", "generation_config.json",
                                              "tokenizer_config.json"};

    if (note_files(files, folder, unused, sizeof unused / sizeof *unused,
                   "not used; texts become tokens by the base's tokenizer for every adapter") &&
        note_files(files, folder, of_requests, sizeof of_requests / sizeof *of_requests,
                   "a server takes the chat template and the ids that end a text from there, and "
                   "nothing else"))
        return SP_OK;
    return sp_fail_memory(error, strlen(folder), "a list of files");
}

sp_status sp_adapter_files_open(const char *path, sp_adapter_files *out_files, sp_error *error)
{
    bool is_folder = sp_path_is_directory(path) || ends_with(path, "/") || !sp_path_exists(path);
    char *folder = is_folder ? sp_strdup(path) : sp_path_folder(path);
    sp_adapter_files files = {0};
    sp_status status;

    if (!folder)
        return sp_fail_memory(error, strlen(path) + 1, "a path");
    status = read_config(&files, folder, error);
    if (status == SP_OK)
        status = open_weights(&files, path, folder, is_folder, error);
    if (status == SP_OK)
        status = look_beside(&files, folder, error);
    sp_free(folder);
    if (status == SP_OK)
        *out_files = files;
    else
        sp_adapter_files_close(&files);
    return status;
}

void sp_adapter_files_close(sp_adapter_files *files)
{
    sp_checkpoint_destroy(files->checkpoint);
    sp_free(files->config);
    sp_free(files->config_path);
    sp_text_free(&files->note);
    *files = (sp_adapter_files){0};
}

/* ---- data ----------------------------------------------------------------------------------- */

sp_status sp_adapter_file_open(const sp_checkpoint *checkpoint, int32_t index, sp_file *out_file,
                               sp_error *error)
{
    const char *path = sp_checkpoint_path(checkpoint, index);
    uint64_t bytes = sp_checkpoint_file_bytes(checkpoint, index);
    sp_error local;
    sp_status status = sp_file_open(path, out_file, &local);

    if (status == SP_ERR_NOT_FOUND || status == SP_ERR_INPUT)
        return sp_refuse(error, SP_REASON_WEIGHTS_MISSING, sp_path_tail(path), -1, "%s",
                         local.text);
    if (status != SP_OK) {
        if (error)
            *error = local;
        return status;
    }
    if (out_file->bytes != bytes) {
        path = sp_path_tail(path);
        status = sp_refuse(error, SP_REASON_TRUNCATED, path, (int64_t)out_file->bytes,
                           "%s had %llu bytes when its header was read, now %llu", path,
                           (unsigned long long)bytes, (unsigned long long)out_file->bytes);
        sp_file_close(out_file);
    }
    return status;
}

sp_status sp_adapter_file_read(const sp_checkpoint *checkpoint, const sp_file *file,
                               const sp_tensor *tensor, uint64_t at, void *memory, size_t n,
                               sp_error *error)
{
    const char *path = sp_path_tail(sp_checkpoint_path(checkpoint, tensor->file));
    sp_error local;
    sp_status status = sp_file_read(file, tensor->offset_bytes + at, memory, n, &local);

    if (status == SP_ERR_TRUNCATED)
        return sp_refuse(error, SP_REASON_TRUNCATED, tensor->name, local.position,
                         "%s shrank while %.150s was read: %s", path, tensor->name, local.text);
    if (status != SP_OK)
        return sp_fail(error, status, NULL, path, local.position, "%s: %s", path, local.text);
    return SP_OK;
}
