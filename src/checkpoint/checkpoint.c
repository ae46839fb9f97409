/*
 * checkpoint.c: the files of a checkpoint: one safetensors file, or shards with an index. Headers
 * are read here with pread; data is left to the caller.
 */
#include "base/alloc.h"
#include "base/file.h"
#include "checkpoint/file_reason.h"

#include <sidepath/checkpoint.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define INDEX_BYTES_MAX ((size_t)64 << 20)
#define FILES_MAX       4096

/* ---- the index ----------------------------------------------------------------------------- */

typedef struct promise {
    const char *tensor;
    int32_t file;
} promise;

struct sp_shard_index {
    json_t *root;       /* owns every name */
    const char **files; /* [n_files], ascending, each once */
    promise *promises;  /* [n_promises], in the order of the text */
    size_t n_promises;
    int32_t n_files;
};

/* A relative path that stays inside its folder: no empty, "." or ".." part, no backslash. */
static bool is_safe_path(const char *path)
{
    if (*path == '\0' || strchr(path, '\\'))
        return false;
    for (const char *part = path;;) {
        size_t n = strcspn(part, "/");

        if (n == 0 || (n == 1 && part[0] == '.') || (n == 2 && part[0] == '.' && part[1] == '.'))
            return false;
        if (part[n] == '\0')
            return true;
        part += n + 1;
    }
}

static int by_text(const void *left, const void *right)
{
    return strcmp(*(const char *const *)left, *(const char *const *)right);
}

static int32_t find_file(const sp_shard_index *index, const char *name)
{
    const char *const *found =
        bsearch(&name, index->files, (size_t)index->n_files, sizeof *index->files, by_text);

    return (int32_t)(found - index->files);
}

static sp_status collect_files(sp_shard_index *index, const json_t *map, const char *subject,
                               sp_error *error)
{
    const char *tensor;
    json_t *file;
    size_t n = 0, kept = 0;

    json_object_foreach((json_t *)(uintptr_t)map, tensor, file)
    {
        const char *name = json_string_value(file);

        if (!name)
            return sp_refuse_file(error, SP_REASON_HEADER_MALFORMED, tensor, -1,
                                  "%s: the file of tensor %.200s is no text", subject, tensor);
        if (!is_safe_path(name))
            return sp_refuse_file(
                error, SP_REASON_UNSAFE_PATH, tensor, -1,
                "%s: tensor %.200s is said to be in \"%.100s\", which leads out of the "
                "folder",
                subject, tensor, name);
        index->files[n] = name;
        index->promises[n].tensor = tensor;
        n++;
    }
    qsort(index->files, n, sizeof *index->files, by_text);
    for (size_t i = 0; i < n; i++) {
        if (i == 0 || strcmp(index->files[i], index->files[kept - 1]) != 0)
            index->files[kept++] = index->files[i];
    }
    if (kept > FILES_MAX)
        return sp_refuse_file(error, SP_REASON_HEADER_MALFORMED, subject, -1,
                              "%s lists %zu files; at most %d are read", subject, kept, FILES_MAX);
    index->n_files = (int32_t)kept;
    index->n_promises = n;
    n = 0;
    json_object_foreach((json_t *)(uintptr_t)map, tensor, file) index->promises[n++].file =
        find_file(index, json_string_value(file));
    return SP_OK;
}

sp_status sp_shard_index_parse(const char *bytes, size_t n_bytes, const char *subject,
                               sp_shard_index **out_index, sp_error *error)
{
    const json_t *map;
    size_t n;
    sp_status status =
        SP_NEED(error, {"bytes", bytes}, {"subject", subject}, {"out_index", out_index});
    sp_shard_index *index;

    if (status != SP_OK)
        return status;
    index = sp_calloc(1, sizeof *index);
    if (!index)
        return sp_fail_memory(error, sizeof *index, subject);
    status =
        sp_reason_json(bytes, n_bytes, subject, SP_REASON_HEADER_MALFORMED, 0, &index->root, error);
    if (status != SP_OK)
        goto destroy_index;
    map = json_object_get(index->root, "weight_map");
    n = json_object_size(map);
    if (n == 0) {
        status = sp_refuse_file(error, SP_REASON_HEADER_MALFORMED, subject, -1,
                                "%s has no \"weight_map\" with tensors", subject);
        goto destroy_index;
    }
    index->files = sp_calloc(n, sizeof *index->files);
    index->promises = sp_calloc(n, sizeof *index->promises);
    if (!index->files || !index->promises) {
        status = sp_fail_memory(error, n * sizeof *index->promises, subject);
        goto destroy_index;
    }
    status = collect_files(index, map, subject, error);
    if (status != SP_OK)
        goto destroy_index;
    *out_index = index;
    return SP_OK;

destroy_index:
    sp_shard_index_destroy(index);
    return status;
}

void sp_shard_index_destroy(sp_shard_index *index)
{
    if (!index)
        return;
    sp_free(index->files);
    sp_free(index->promises);
    json_decref(index->root);
    sp_free(index);
}

int32_t sp_shard_index_n_files(const sp_shard_index *index)
{
    return index->n_files;
}

const char *sp_shard_index_file(const sp_shard_index *index, int32_t file)
{
    return file >= 0 && file < index->n_files ? index->files[file] : NULL;
}

size_t sp_shard_index_n_tensors(const sp_shard_index *index)
{
    return index->n_promises;
}

const char *sp_shard_index_tensor(const sp_shard_index *index, size_t tensor, int32_t *out_file)
{
    if (tensor >= index->n_promises)
        return NULL;
    *out_file = index->promises[tensor].file;
    return index->promises[tensor].tensor;
}

/* ---- the files ----------------------------------------------------------------------------- */

typedef struct checkpoint_file {
    char *path;
    uint64_t bytes;
    sp_safetensors *header; /* owns the names of its tensors */
} checkpoint_file;

struct sp_checkpoint {
    checkpoint_file *files; /* [n_files] */
    int32_t n_files;
    sp_tensor *tensors; /* [n_tensors], ascending by name */
    size_t n_tensors;
};

/* Missing, or not a regular file: the same to the user. */
static sp_status open_weights(const char *path, sp_file *out_file, sp_error *error)
{
    sp_error local;
    sp_status status = sp_file_open(path, out_file, &local);

    if (status == SP_ERR_NOT_FOUND || status == SP_ERR_INPUT)
        return sp_refuse_file(error, SP_REASON_WEIGHTS_MISSING, sp_path_tail(path), -1, "%s",
                              local.text);
    if (status != SP_OK && error)
        *error = local;
    return status;
}

/* A short read means that the file has shrunk since it was opened. */
static sp_status read_at_start(const sp_file *file, const char *path, void *out_bytes,
                               size_t n_bytes, sp_error *error)
{
    sp_error local;
    sp_status status = sp_file_read(file, 0, out_bytes, n_bytes, &local);

    if (status == SP_ERR_TRUNCATED)
        return sp_refuse_file(error, SP_REASON_TRUNCATED, path, local.position, "%s: %s", path,
                              local.text);
    if (status != SP_OK)
        return sp_fail(error, status, NULL, path, local.position, "%s: %s", path, local.text);
    return SP_OK;
}

static sp_status read_header(const sp_file *file, const char *path, sp_safetensors **out_header,
                             sp_error *error)
{
    unsigned char length[8] = {0};
    size_t first = file->bytes < sizeof length ? (size_t)file->bytes : sizeof length;
    size_t n_bytes;
    char *bytes;
    sp_status status = read_at_start(file, path, length, first, error);

    if (status == SP_OK)
        status = sp_safetensors_header_bytes(length, first, file->bytes, path, &n_bytes, error);
    if (status != SP_OK)
        return status;
    bytes = sp_malloc(n_bytes);
    if (!bytes)
        return sp_fail_memory(error, n_bytes, path);
    status = read_at_start(file, path, bytes, n_bytes, error);
    if (status == SP_OK)
        status = sp_safetensors_parse(bytes, n_bytes, file->bytes, path, out_header, error);
    sp_free(bytes);
    return status;
}

/* Takes ownership of `path` in every case. */
static sp_status add_file(sp_checkpoint *checkpoint, char *path, sp_error *error)
{
    checkpoint_file *added = &checkpoint->files[checkpoint->n_files];
    sp_file file;
    sp_status status;

    if (!path)
        return sp_fail_memory(error, 0, "a path");
    added->path = path;
    checkpoint->n_files++;
    status = open_weights(path, &file, error);
    if (status != SP_OK)
        return status;
    added->bytes = file.bytes;
    status = read_header(&file, sp_path_tail(path), &added->header, error);
    sp_file_close(&file);
    return status;
}

static int by_tensor_name(const void *left, const void *right)
{
    const sp_tensor *a = left;
    const sp_tensor *b = right;
    int order = strcmp(a->name, b->name);

    return order != 0 ? order : (a->file > b->file) - (a->file < b->file);
}

static sp_status merge_tensors(sp_checkpoint *checkpoint, sp_error *error)
{
    size_t n = 0;

    for (int32_t f = 0; f < checkpoint->n_files; f++)
        n += sp_safetensors_n_tensors(checkpoint->files[f].header);
    if (n == 0)
        return SP_OK;
    checkpoint->tensors = sp_malloc(n * sizeof *checkpoint->tensors);
    if (!checkpoint->tensors)
        return sp_fail_memory(error, n * sizeof *checkpoint->tensors, "a list of tensors");
    for (int32_t f = 0; f < checkpoint->n_files; f++) {
        const sp_safetensors *header = checkpoint->files[f].header;

        for (size_t i = 0; i < sp_safetensors_n_tensors(header); i++) {
            sp_tensor *tensor = &checkpoint->tensors[checkpoint->n_tensors++];

            *tensor = *sp_safetensors_at(header, i);
            tensor->file = f;
        }
    }
    if (checkpoint->n_files == 1)
        return SP_OK; /* in order already */
    qsort(checkpoint->tensors, n, sizeof *checkpoint->tensors, by_tensor_name);
    for (size_t i = 1; i < n; i++) {
        const sp_tensor *twin = &checkpoint->tensors[i];

        if (strcmp(twin[-1].name, twin->name) == 0)
            return sp_refuse_file(error, SP_REASON_DUPLICATE_TENSOR, twin->name, -1,
                                  "tensor %.200s is in two shards, %s and %s", twin->name,
                                  sp_path_tail(checkpoint->files[twin[-1].file].path),
                                  sp_path_tail(checkpoint->files[twin->file].path));
    }
    return SP_OK;
}

static sp_status check_promises(const sp_checkpoint *checkpoint, const sp_shard_index *index,
                                sp_error *error)
{
    for (size_t i = 0; i < sp_shard_index_n_tensors(index); i++) {
        int32_t file;
        const char *name = sp_shard_index_tensor(index, i, &file);

        if (!sp_safetensors_find(checkpoint->files[file].header, name))
            return sp_refuse_file(error, SP_REASON_WEIGHTS_MISSING, name, -1,
                                  "the index says that tensor %.200s is in %s, which lacks it",
                                  name, sp_path_tail(checkpoint->files[file].path));
    }
    return SP_OK;
}

static sp_status create(int32_t files_max, sp_checkpoint **out_checkpoint, sp_error *error)
{
    sp_checkpoint *checkpoint = sp_calloc(1, sizeof *checkpoint);

    if (!checkpoint)
        return sp_fail_memory(error, sizeof *checkpoint, "a checkpoint");
    checkpoint->files = sp_calloc((size_t)files_max, sizeof *checkpoint->files);
    if (!checkpoint->files) {
        sp_free(checkpoint);
        return sp_fail_memory(error, (size_t)files_max * sizeof *checkpoint->files, "a checkpoint");
    }
    *out_checkpoint = checkpoint;
    return SP_OK;
}

static sp_status open_single(char *path, sp_checkpoint **out_checkpoint, sp_error *error)
{
    sp_checkpoint *checkpoint = NULL;
    sp_status status = create(1, &checkpoint, error);

    if (status != SP_OK) {
        sp_free(path);
        return status;
    }
    status = add_file(checkpoint, path, error);
    if (status == SP_OK)
        status = merge_tensors(checkpoint, error);
    if (status != SP_OK) {
        sp_checkpoint_destroy(checkpoint);
        return status;
    }
    *out_checkpoint = checkpoint;
    return SP_OK;
}

static sp_status open_shards(const char *directory, const sp_shard_index *index,
                             sp_checkpoint **out_checkpoint, sp_error *error)
{
    sp_checkpoint *checkpoint = NULL;
    sp_status status = create(sp_shard_index_n_files(index), &checkpoint, error);

    if (status != SP_OK)
        return status;
    for (int32_t f = 0; status == SP_OK && f < sp_shard_index_n_files(index); f++)
        status =
            add_file(checkpoint, sp_path_join(directory, sp_shard_index_file(index, f)), error);
    if (status == SP_OK)
        status = check_promises(checkpoint, index, error);
    if (status == SP_OK)
        status = merge_tensors(checkpoint, error);
    if (status != SP_OK) {
        sp_checkpoint_destroy(checkpoint);
        return status;
    }
    *out_checkpoint = checkpoint;
    return SP_OK;
}

static sp_status open_index(const char *directory, const char *path, sp_checkpoint **out_checkpoint,
                            sp_error *error)
{
    sp_shard_index *index;
    char *bytes;
    size_t n_bytes;
    sp_error local;
    sp_status status = sp_file_read_all(path, INDEX_BYTES_MAX, &bytes, &n_bytes, &local);

    if (status == SP_ERR_NOT_FOUND || status == SP_ERR_INPUT)
        return sp_refuse_file(error, SP_REASON_WEIGHTS_MISSING, sp_path_tail(path), -1, "%s",
                              local.text);
    if (status == SP_ERR_TOO_LARGE)
        return sp_refuse_file(error, SP_REASON_HEADER_MALFORMED, sp_path_tail(path), -1, "%s",
                              local.text);
    if (status != SP_OK) {
        if (error)
            *error = local;
        return status;
    }
    status = sp_shard_index_parse(bytes, n_bytes, sp_path_tail(path), &index, error);
    sp_free(bytes);
    if (status != SP_OK)
        return status;
    status = open_shards(directory, index, out_checkpoint, error);
    sp_shard_index_destroy(index);
    return status;
}

/* "<directory>/<before><stem><after>", NULL when out of memory. */
static char *file_of(const char *directory, const char *before, const char *stem, const char *after)
{
    size_t bytes = strlen(before) + strlen(stem) + strlen(after) + 1;
    char *name = sp_malloc(bytes);
    char *path = NULL;

    if (name) {
        snprintf(name, bytes, "%s%s%s", before, stem, after);
        path = sp_path_join(directory, name);
    }
    sp_free(name);
    return path;
}

/* Neither file exists. A pickle there has its own error, and is not opened. */
static sp_status refuse_missing(const char *directory, const char *stem, const char *single,
                                sp_error *error)
{
    char *plain = file_of(directory, "", stem, ".bin");
    char *prefixed = file_of(directory, "pytorch_", stem, ".bin");
    const char *pickle = NULL;
    sp_status status;

    if (plain && sp_path_exists(plain))
        pickle = plain;
    else if (prefixed && sp_path_exists(prefixed))
        pickle = prefixed;
    if (!plain || !prefixed)
        status = sp_fail_memory(error, 0, "a path");
    else if (pickle)
        status =
            sp_refuse_file(error, SP_REASON_PICKLE_REFUSED, sp_path_tail(pickle), -1,
                           "%s is a pickle, which can run code when it is read; it was not opened: "
                           "save the weights as safetensors",
                           sp_path_tail(pickle));
    else
        status = sp_refuse_file(error, SP_REASON_WEIGHTS_MISSING, sp_path_tail(single), -1,
                                "there is no %s, and no index of shards", sp_path_tail(single));
    sp_free(plain);
    sp_free(prefixed);
    return status;
}

sp_status sp_checkpoint_open(const char *directory, const char *stem,
                             sp_checkpoint **out_checkpoint, sp_error *error)
{
    sp_status status = SP_NEED(error, {"directory", directory}, {"stem", stem},
                               {"out_checkpoint", out_checkpoint});
    char *single, *index;

    if (status != SP_OK)
        return status;
    single = file_of(directory, "", stem, ".safetensors");
    index = file_of(directory, "", stem, ".safetensors.index.json");
    if (!single || !index) {
        status = sp_fail_memory(error, 0, "a path");
    } else if (sp_path_exists(single)) {
        status = open_single(single, out_checkpoint, error);
        single = NULL;
    } else if (sp_path_exists(index)) {
        status = open_index(directory, index, out_checkpoint, error);
    } else {
        status = refuse_missing(directory, stem, single, error);
    }
    sp_free(single);
    sp_free(index);
    return status;
}

sp_status sp_checkpoint_open_file(const char *path, sp_checkpoint **out_checkpoint, sp_error *error)
{
    char *copy;

    if (!path || !out_checkpoint)
        return sp_fail_null(error, path ? "out_checkpoint" : "path");
    copy = sp_strdup(path);
    if (!copy)
        return sp_fail_memory(error, strlen(path) + 1, "a path");
    return open_single(copy, out_checkpoint, error);
}

void sp_checkpoint_destroy(sp_checkpoint *checkpoint)
{
    if (!checkpoint)
        return;
    for (int32_t f = 0; f < checkpoint->n_files; f++) {
        sp_safetensors_destroy(checkpoint->files[f].header);
        sp_free(checkpoint->files[f].path);
    }
    sp_free(checkpoint->files);
    sp_free(checkpoint->tensors);
    sp_free(checkpoint);
}

int32_t sp_checkpoint_n_files(const sp_checkpoint *checkpoint)
{
    return checkpoint->n_files;
}

const char *sp_checkpoint_path(const sp_checkpoint *checkpoint, int32_t file)
{
    return file >= 0 && file < checkpoint->n_files ? checkpoint->files[file].path : NULL;
}

uint64_t sp_checkpoint_file_bytes(const sp_checkpoint *checkpoint, int32_t file)
{
    return file >= 0 && file < checkpoint->n_files ? checkpoint->files[file].bytes : 0;
}

size_t sp_checkpoint_n_tensors(const sp_checkpoint *checkpoint)
{
    return checkpoint->n_tensors;
}

const sp_tensor *sp_checkpoint_at(const sp_checkpoint *checkpoint, size_t index)
{
    return index < checkpoint->n_tensors ? &checkpoint->tensors[index] : NULL;
}

static int name_against_tensor(const void *name, const void *tensor)
{
    return strcmp(name, ((const sp_tensor *)tensor)->name);
}

const sp_tensor *sp_checkpoint_find(const sp_checkpoint *checkpoint, const char *name)
{
    if (checkpoint->n_tensors == 0)
        return NULL;
    return bsearch(name, checkpoint->tensors, checkpoint->n_tensors, sizeof *checkpoint->tensors,
                   name_against_tensor);
}
