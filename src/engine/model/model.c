#include "engine/model/model.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/json.h"
#include "base/text.h"
#include "checkpoint/shape.h"
#include "engine/model/family.h"
#include "engine/model/preflight.h"
#include "engine/model/weight_loader.h"

#include <sidepath/checkpoint.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GENERATION_CONFIG_BYTES_MAX ((size_t)1 << 20)
#define FAMILY_NAMES_BYTES          384

/* ---- names --------------------------------------------------------------------------------- */

/* The last part of a path, without trailing slashes. */
static char *folder_name(const char *path)
{
    size_t end = strlen(path);
    size_t begin;

    while (end > 1 && path[end - 1] == '/')
        end--;
    begin = end;
    while (begin > 0 && path[begin - 1] != '/')
        begin--;
    return sp_strndup(path + begin, end - begin);
}

/* ---- files --------------------------------------------------------------------------------- */

static sp_status read_generation_config(sp_model *model, const char *directory, sp_error *error)
{
    char *path = sp_path_join(directory, "generation_config.json");
    json_t *root;
    sp_status status;

    if (!path)
        return sp_fail_memory(error, strlen(directory), "a path");
    status = SP_OK;
    if (!sp_path_exists(path))
        goto free_path;
    status = sp_json_read_object(path, GENERATION_CONFIG_BYTES_MAX, NULL, &root, error);
    if (status != SP_OK)
        goto free_path;
    status =
        sp_model_shape_read_eos(json_object_get(root, "eos_token_id"), path, &model->shape, error);
    json_decref(root);
free_path:
    sp_free(path);
    return status;
}

static sp_status check_directory(const char *directory, sp_error *error)
{
    if (!sp_path_exists(directory))
        return sp_fail(error, SP_ERR_NOT_FOUND, NULL, directory, -1,
                       "the model directory %s does not exist", directory);
    if (!sp_path_is_directory(directory))
        return sp_fail(error, SP_ERR_INPUT, NULL, directory, -1,
                       "%s is not a directory; give the folder that holds config.json", directory);
    return SP_OK;
}

/* Compares whole files with the free memory where they are copied; of mapped ones only the tensors
 * in use become resident, and those are known once the files are mapped. */
static sp_status check_memory(const sp_checkpoint *checkpoint, size_t free_bytes, size_t *out_bytes,
                              sp_error *error)
{
    *out_bytes = 0;
    for (int32_t i = 0; i < sp_checkpoint_n_files(checkpoint); i++)
        *out_bytes += sp_checkpoint_file_bytes(checkpoint, i);
    return sp_memory_preflight_weights(*out_bytes, free_bytes, error);
}

static sp_status open_files(sp_model *model, const char *directory, bool copy, size_t free_bytes,
                            sp_load_progress progress, sp_error *error)
{
    size_t copied_bytes = 0;
    sp_checkpoint *checkpoint;
    sp_status status = sp_checkpoint_open(directory, "model", &checkpoint, error);

    if (status != SP_OK)
        return status;
    if (copy)
        status = check_memory(checkpoint, free_bytes, &copied_bytes, error);
    if (status == SP_OK)
        status = sp_weight_files_open(checkpoint, copy, progress, &model->files, error);
    if (status == SP_OK)
        status = sp_load_weights(model, checkpoint, copied_bytes, free_bytes, error);
    sp_checkpoint_destroy(checkpoint);
    return status;
}

/* Writes the names of the supported families, as far as they fit, to out_names [bytes]; returns it.
 */
static const char *name_families(char *out_names, size_t bytes)
{
    size_t n = 0;

    out_names[0] = '\0';
    for (const sp_family_row *const *row = sp_families; *row && n < bytes; row++)
        n += (size_t)snprintf(out_names + n, bytes - n, "%s%s", n > 0 ? ", " : "", (*row)->name);
    return out_names;
}

/* What a configuration may say and the ops do not do. */
static sp_status check_shape(const sp_model *model, sp_error *error)
{
    const sp_model_shape *shape = &model->shape;

    if (sp_family_attention(model).layers == 0)
        return sp_fail(error, SP_ERR_UNSUPPORTED, NULL, "layer_types", -1,
                       "config.json: no layer has full attention; at least one must");
    if (sp_family_delta_rule(model, 0, 0).layers == 0)
        return SP_OK;
    if (shape->gdn_conv_kernel < 2 || shape->gdn_conv_kernel > 8)
        return sp_fail(error, SP_ERR_UNSUPPORTED, NULL, "linear_conv_kernel_dim", -1,
                       "config.json: a convolution of %d rows is not served; 2 to 8 are",
                       shape->gdn_conv_kernel);
    return SP_OK;
}

static sp_status refuse_family(const char *directory, sp_error *error)
{
    char names[FAMILY_NAMES_BYTES];

    return sp_fail(error, SP_ERR_UNSUPPORTED, NULL, "architectures", -1,
                   "%s/config.json: this engine runs %s only", directory,
                   name_families(names, sizeof names));
}

/* More families can be read, for adapters' sake, than run here: a refusal names those that run. */
static sp_status open_geometry(const char *directory, sp_geometry **out_geometry, sp_error *error)
{
    sp_error cause = {.position = -1};
    sp_status status = sp_geometry_open(directory, out_geometry, &cause);
    char names[FAMILY_NAMES_BYTES];

    if (status != SP_OK && error)
        *error = cause;
    if (status != SP_ERR_UNSUPPORTED || strcmp(cause.subject, "architectures") != 0)
        return status;
    return sp_fail(error, status, NULL, "architectures", -1, "%.*s; this engine runs %s only",
                   (int)strcspn(cause.text, ";"), cause.text, name_families(names, sizeof names));
}

sp_status sp_model_open(const char *directory, bool copy, size_t free_bytes,
                        sp_load_progress progress, sp_model *out_model, sp_error *error)
{
    sp_model *model = out_model;
    sp_status status = check_directory(directory, error);

    *model = (sp_model){.files.notify = -1};
    if (status != SP_OK)
        return status;
    status = open_geometry(directory, &model->geometry, error);
    if (status != SP_OK)
        return status;
    model->shape = *sp_geometry_shape(model->geometry);
    model->family = sp_family_find(model->shape.family);
    model->name = folder_name(directory);
    if (!model->name)
        status = sp_fail_memory(error, strlen(directory), "the model's name");
    else if (!model->family)
        status = refuse_family(directory, error);
    else
        status = check_shape(model, error);
    if (status == SP_OK)
        status = read_generation_config(model, directory, error);
    if (status == SP_OK)
        status = open_files(model, directory, copy, free_bytes, progress, error);
    if (status != SP_OK)
        sp_model_close(model);
    return status;
}

/* ---- placement ----------------------------------------------------------------------------- */

static size_t bytes_of(const sp_weight *weight)
{
    size_t columns = weight->columns > 0 ? (size_t)weight->columns : 1;

    return weight->host ? (size_t)weight->rows * columns * sp_dtype_bytes(weight->type) : 0;
}

sp_status sp_model_place(sp_model *model, sp_ops *ops, sp_load_progress progress, sp_error *error)
{
    sp_status status = SP_OK;
    size_t done = 0, total = 0;

    for (size_t i = 0; i < model->n_weights; i++)
        total += bytes_of(model->weights[i]);
    for (size_t i = 0; i < model->n_weights && status == SP_OK; i++) {
        status = sp_op_place(ops, model->weights[i], error);
        done += bytes_of(model->weights[i]);
        if (progress.tell)
            progress.tell(progress.user, "weights", done, total);
    }
    if (model->shape.tied_embeddings)
        model->head.placed = model->embed.placed;
    return status;
}

void sp_model_close(sp_model *model)
{
    sp_weight_files_close(&model->files);
    for (size_t i = 0; i < model->n_copies; i++)
        sp_free(model->copies[i]);
    sp_free(model->copies);
    sp_free(model->layers);
    sp_free(model->weights);
    sp_free(model->name);
    sp_free(model->unused);
    sp_free(model->converted);
    sp_geometry_release(model->geometry);
    *model = (sp_model){.files.notify = -1};
}
