#include "engine/model/model.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/json.h"
#include "base/text.h"
#include "engine/model/preflight.h"

#include <sidepath/checkpoint.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GENERATION_CONFIG_BYTES_MAX ((size_t)1 << 20)
#define TENSOR_NAME_BYTES           192
#define UNUSED_NAMES                5 /* that a note has in full */

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

/* ---- tensors ------------------------------------------------------------------------------- */

/* What the look-ups need while a model is opened. */
typedef struct model_loader {
    sp_model *model;
    const sp_checkpoint *checkpoint;
    sp_error *error;
    sp_status status; /* the first failure; later look-ups do nothing */
    bool *used;       /* [tensors of the checkpoint] */
} model_loader;

/* A tensor that starts at an odd address cannot be read as 16-bit elements: it is copied. */
static const void *aligned_data(model_loader *loader, const char *data, size_t bytes)
{
    sp_model *model = loader->model;
    void **grown;
    void *copy;

    if (((uintptr_t)data & 1) == 0)
        return data;
    grown = sp_realloc(model->copies, (model->n_copies + 1) * sizeof *grown);
    if (grown)
        model->copies = grown;
    copy = grown ? sp_malloc(bytes) : NULL;
    if (!copy) {
        loader->status = sp_fail_memory(loader->error, bytes, "a weight that is not aligned");
        return NULL;
    }
    memcpy(copy, data, bytes);
    model->copies[model->n_copies++] = copy;
    return copy;
}

static void fail_shape(model_loader *loader, const sp_tensor *tensor, int32_t rows, int32_t cols)
{
    char have[96] = "";
    size_t n = 0;

    for (int32_t i = 0; i < tensor->n_dims && n < sizeof have; i++)
        n += (size_t)snprintf(have + n, sizeof have - n, "%s%lld", i ? ", " : "",
                              (long long)tensor->dims[i]);
    if (cols > 0)
        loader->status = sp_fail(loader->error, SP_ERR_MISMATCH, NULL, tensor->name, -1,
                                 "weight %s has the shape [%s]; config.json wants [%d, %d]",
                                 tensor->name, have, rows, cols);
    else
        loader->status = sp_fail(loader->error, SP_ERR_MISMATCH, NULL, tensor->name, -1,
                                 "weight %s has the shape [%s]; config.json wants [%d]",
                                 tensor->name, have, rows);
}

/* The weight [rows, cols] (a vector when cols is 0) of that name; a failure is kept in loader. */
static sp_weight find_weight(model_loader *loader, const char *name, int32_t rows, int32_t cols)
{
    sp_weight weight = {.type = SP_DTYPE_BF16, .rows = rows, .columns = cols};
    const sp_tensor *tensor;
    bool fits;

    if (loader->status != SP_OK)
        return weight;
    tensor = sp_checkpoint_find(loader->checkpoint, name);
    if (!tensor) {
        loader->status = sp_fail(loader->error, SP_ERR_NOT_FOUND, NULL, name, -1,
                                 "the checkpoint has no weight %s", name);
        return weight;
    }
    fits = cols > 0 ? tensor->n_dims == 2 && tensor->dims[0] == rows && tensor->dims[1] == cols
                    : tensor->n_dims == 1 && tensor->dims[0] == rows;
    if (!fits) {
        fail_shape(loader, tensor, rows, cols);
        return weight;
    }
    if (tensor->type != SP_TENSOR_BF16) {
        loader->status = sp_fail(loader->error, SP_ERR_UNSUPPORTED, "unsupported-dtype", name, -1,
                                 "weight %s is %s; this engine runs BF16 checkpoints", name,
                                 sp_tensor_type_name(tensor->type));
        return weight;
    }
    loader->used[tensor - sp_checkpoint_at(loader->checkpoint, 0)] = true;
    loader->model->weight_bytes += (size_t)tensor->bytes;
    weight.host =
        aligned_data(loader, loader->model->files.files[tensor->file].data + tensor->offset_bytes,
                     (size_t)tensor->bytes);
    return weight;
}

static sp_weight find_in_layer(model_loader *loader, int32_t layer, const char *module,
                               const char *parameter, int32_t rows, int32_t cols)
{
    char name[TENSOR_NAME_BYTES];

    snprintf(name, sizeof name, "model.layers.%d.%s.%s", layer, module, parameter);
    return find_weight(loader, name, rows, cols);
}

static sp_norm as_norm(const model_loader *loader, sp_weight weight)
{
    const sp_model_shape *shape = &loader->model->shape;

    return (sp_norm){
        .weight = weight,
        .eps = shape->rms_norm_eps,
        .offset = shape->zero_centred_norms ? 1.0f : 0.0f,
    };
}

static sp_norm find_norm(model_loader *loader, int32_t layer, const char *module, int32_t width)
{
    return as_norm(loader, find_in_layer(loader, layer, module, "weight", width, 0));
}

static sp_linear find_linear(model_loader *loader, int32_t layer, const char *module,
                             int32_t outputs, int32_t inputs, bool bias)
{
    sp_linear linear = {
        .weight = find_in_layer(loader, layer, module, "weight", outputs, inputs),
        .site = sp_geometry_find_module(loader->model->geometry, layer, module, -1),
    };

    if (bias)
        linear.bias = find_in_layer(loader, layer, module, "bias", outputs, 0);
    return linear;
}

static void load_layer(model_loader *loader, int32_t layer)
{
    const sp_model_shape *shape = &loader->model->shape;
    sp_layer_weights *w = &loader->model->layers[layer];
    bool bias = shape->attention_bias;
    int32_t hidden = shape->hidden, inner = shape->intermediate;
    int32_t q = shape->q_heads * shape->head_dim;
    int32_t kv = shape->kv_heads * shape->head_dim;

    w->input_norm = find_norm(loader, layer, "input_layernorm", hidden);
    w->q = find_linear(loader, layer, "self_attn.q_proj", q, hidden, bias);
    w->k = find_linear(loader, layer, "self_attn.k_proj", kv, hidden, bias);
    w->v = find_linear(loader, layer, "self_attn.v_proj", kv, hidden, bias);
    w->o = find_linear(loader, layer, "self_attn.o_proj", hidden, q, bias);
    w->q_norm = find_norm(loader, layer, "self_attn.q_norm", shape->head_dim);
    w->k_norm = find_norm(loader, layer, "self_attn.k_norm", shape->head_dim);
    w->post_norm = find_norm(loader, layer, "post_attention_layernorm", hidden);
    w->gate = find_linear(loader, layer, "mlp.gate_proj", inner, hidden, false);
    w->up = find_linear(loader, layer, "mlp.up_proj", inner, hidden, false);
    w->down = find_linear(loader, layer, "mlp.down_proj", hidden, inner, false);
}

/* ---- what is left over --------------------------------------------------------------------- */

static bool begins_with(const char *text, const char *beginning)
{
    return strncmp(text, beginning, strlen(beginning)) == 0;
}

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), length = strlen(end);

    return n >= length && strcmp(text + n - length, end) == 0;
}

/* Of the layers that run, the embedding, the last norm or the head. */
static bool is_in_trunk(const sp_model_shape *shape, const char *name)
{
    static const char layers[] = "model.layers.";

    if (begins_with(name, layers)) {
        long long layer = strtoll(name + strlen(layers), NULL, 10);

        return layer >= 0 && layer < shape->layers;
    }
    return begins_with(name, "model.embed_tokens.") || begins_with(name, "model.norm.") ||
           begins_with(name, "lm_head.");
}

/* Tables that older programs saved, and a tied base's copy of its embedding. */
static bool says_nothing(const sp_model_shape *shape, const char *name)
{
    return ends_with(name, ".rotary_emb.inv_freq") ||
           (shape->tied_embeddings && strcmp(name, "lm_head.weight") == 0);
}

static void add_unused(sp_text *out, const char *name, size_t n)
{
    if (n == 0)
        sp_text_add(out, "weights that nothing uses: ");
    if (n > 0 && n < UNUSED_NAMES)
        sp_text_add(out, ", ");
    if (n < UNUSED_NAMES)
        sp_text_add_printable(out, name);
}

/* A weight of a part that runs, and that is not applied, would make the answers slightly wrong. */
static void check_unused(model_loader *loader)
{
    const sp_model_shape *shape = &loader->model->shape;
    sp_text names = {0};
    size_t n = 0;

    for (size_t i = 0; i < sp_checkpoint_n_tensors(loader->checkpoint); i++) {
        const char *name = sp_checkpoint_at(loader->checkpoint, i)->name;

        if (loader->used[i] || says_nothing(shape, name))
            continue;
        if (is_in_trunk(shape, name)) {
            sp_text_free(&names);
            loader->status =
                sp_fail(loader->error, SP_ERR_UNSUPPORTED, "unused-weight", name, -1,
                        "the checkpoint has the weight %s, which this engine does not apply", name);
            return;
        }
        add_unused(&names, name, n++);
    }
    if (n > UNUSED_NAMES)
        sp_text_format(&names, " and %zu more", n - UNUSED_NAMES);
    if (names.failed)
        loader->status = sp_fail_memory(loader->error, 1, "the names of weights");
    loader->model->unused = names.data;
}

static sp_status load_weights(sp_model *model, const sp_checkpoint *checkpoint, sp_error *error)
{
    const sp_model_shape *shape = &model->shape;
    model_loader loader = {
        .model = model, .checkpoint = checkpoint, .error = error, .status = SP_OK};

    model->layers = sp_calloc((size_t)shape->layers, sizeof *model->layers);
    if (!model->layers)
        return sp_fail_memory(error, (size_t)shape->layers * sizeof *model->layers, "layers");
    loader.used = sp_calloc(sp_checkpoint_n_tensors(checkpoint) + 1, sizeof *loader.used);
    if (!loader.used)
        return sp_fail_memory(error, sp_checkpoint_n_tensors(checkpoint), "a list of weights");
    model->embed = find_weight(&loader, "model.embed_tokens.weight", shape->vocab, shape->hidden);
    model->final_norm =
        as_norm(&loader, find_weight(&loader, "model.norm.weight", shape->hidden, 0));
    model->head = model->embed;
    if (!shape->tied_embeddings)
        model->head = find_weight(&loader, "lm_head.weight", shape->vocab, shape->hidden);
    for (int32_t layer = 0; layer < shape->layers; layer++)
        load_layer(&loader, layer);
    if (loader.status == SP_OK)
        check_unused(&loader);
    sp_free(loader.used);
    return loader.status;
}

/* ---- files --------------------------------------------------------------------------------- */

static sp_status bad_eos(sp_error *error, const char *path)
{
    return sp_fail(error, SP_ERR_INPUT, NULL, "eos_token_id", -1,
                   "%s: \"eos_token_id\" is neither an id nor a list of at most 8 ids", path);
}

/* eos_token_id is a number or a list of numbers; absent leaves config.json's in force. */
static sp_status take_eos_ids(sp_model_shape *shape, const json_t *value, const char *path,
                              sp_error *error)
{
    size_t n = json_is_array(value) ? json_array_size(value) : 1;
    size_t n_max = sizeof shape->eos_token_ids / sizeof shape->eos_token_ids[0];

    if (!value || json_is_null(value))
        return SP_OK;
    if (n > n_max)
        return bad_eos(error, path);
    for (size_t i = 0; i < n; i++) {
        const json_t *id = json_is_array(value) ? json_array_get(value, i) : value;

        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            json_integer_value(id) > INT32_MAX)
            return bad_eos(error, path);
        shape->eos_token_ids[i] = (int32_t)json_integer_value(id);
    }
    shape->n_eos_token_ids = (int32_t)n;
    return SP_OK;
}

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
    status = take_eos_ids(&model->shape, json_object_get(root, "eos_token_id"), path, error);
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

/* Whole files are held against what is free where they are copied; of mapped ones only the tensors
 * in use come into memory, and those are known once they are mapped. */
static sp_status check_memory(const sp_checkpoint *checkpoint, size_t free_bytes, sp_error *error)
{
    size_t sum = 0;

    for (int32_t i = 0; i < sp_checkpoint_n_files(checkpoint); i++)
        sum += sp_checkpoint_file_bytes(checkpoint, i);
    return sp_memory_preflight_weights(sum, free_bytes, error);
}

static sp_status open_files(sp_model *model, const char *directory, bool copy, size_t free_bytes,
                            sp_error *error)
{
    sp_checkpoint *checkpoint;
    sp_status status = sp_checkpoint_open(directory, "model", &checkpoint, error);

    if (status != SP_OK)
        return status;
    if (copy)
        status = check_memory(checkpoint, free_bytes, error);
    if (status == SP_OK)
        status = sp_weight_files_open(checkpoint, copy, &model->files, error);
    if (status == SP_OK)
        status = load_weights(model, checkpoint, error);
    sp_checkpoint_destroy(checkpoint);
    return status;
}

sp_status sp_model_open(const char *directory, bool copy, size_t free_bytes, sp_model *out_model,
                        sp_error *error)
{
    sp_model model = {.files.notify = -1};
    sp_status status = check_directory(directory, error);

    if (status != SP_OK)
        return status;
    status = sp_geometry_open(directory, &model.geometry, error);
    if (status != SP_OK)
        return status;
    model.shape = *sp_geometry_shape(model.geometry);
    model.name = folder_name(directory);
    if (!model.name)
        status = sp_fail_memory(error, strlen(directory), "the model's name");
    else if (model.shape.family != SP_FAMILY_QWEN3)
        status =
            sp_fail(error, SP_ERR_UNSUPPORTED, NULL, "architectures", -1,
                    "%s/config.json: this engine runs Qwen3ForCausalLM (dense) only", directory);
    if (status == SP_OK)
        status = read_generation_config(&model, directory, error);
    if (status == SP_OK)
        status = open_files(&model, directory, copy, free_bytes, error);
    if (status != SP_OK) {
        sp_model_close(&model);
        return status;
    }
    *out_model = model;
    return SP_OK;
}

/* ---- placement ----------------------------------------------------------------------------- */

static sp_status place_linear(sp_linear *linear, sp_ops *ops, sp_error *error)
{
    sp_status status = sp_op_place(ops, &linear->weight, error);

    return status == SP_OK ? sp_op_place(ops, &linear->bias, error) : status;
}

static sp_status place_layer(sp_layer_weights *w, sp_ops *ops, sp_error *error)
{
    sp_norm *norms[] = {&w->input_norm, &w->q_norm, &w->k_norm, &w->post_norm};
    sp_linear *linears[] = {&w->q, &w->k, &w->v, &w->o, &w->gate, &w->up, &w->down};
    sp_status status = SP_OK;

    for (size_t i = 0; i < sizeof norms / sizeof norms[0] && status == SP_OK; i++)
        status = sp_op_place(ops, &norms[i]->weight, error);
    for (size_t i = 0; i < sizeof linears / sizeof linears[0] && status == SP_OK; i++)
        status = place_linear(linears[i], ops, error);
    return status;
}

sp_status sp_model_place(sp_model *model, sp_ops *ops, sp_error *error)
{
    sp_status status = sp_op_place(ops, &model->embed, error);

    if (model->head.host == model->embed.host)
        model->head.placed = model->embed.placed;
    else if (status == SP_OK)
        status = sp_op_place(ops, &model->head, error);
    if (status == SP_OK)
        status = sp_op_place(ops, &model->final_norm.weight, error);
    for (int32_t layer = 0; layer < model->shape.layers && status == SP_OK; layer++)
        status = place_layer(&model->layers[layer], ops, error);
    return status;
}

void sp_model_close(sp_model *model)
{
    sp_weight_files_close(&model->files);
    for (size_t i = 0; i < model->n_copies; i++)
        sp_free(model->copies[i]);
    sp_free(model->copies);
    sp_free(model->layers);
    sp_free(model->name);
    sp_free(model->unused);
    sp_geometry_release(model->geometry);
    *model = (sp_model){.files.notify = -1};
}
