#include "engine/model/weight_loader.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/half.h"
#include "base/text.h"
#include "engine/model/family.h"
#include "engine/model/preflight.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TENSOR_NAME_BYTES 192
#define UNUSED_NAMES      5 /* named in full in a note */

/* ---- tensors ------------------------------------------------------------------------------- */

struct sp_weight_loader {
    sp_model *model;
    const sp_checkpoint *checkpoint;
    sp_error *error;
    sp_status status;               /* the first failure; later look-ups do nothing */
    bool *used;                     /* [tensors of the checkpoint] */
    size_t capacity;                /* of model->weights */
    size_t free_bytes, owned_bytes; /* copies of files, and weights that were converted */
    size_t n_converted[2];          /* weights that were F32, and F16 */
};

/* Memory owned by the model for one weight; NULL after a failure, which is kept. */
static void *own_memory(sp_weight_loader *loader, size_t bytes, const char *what)
{
    sp_model *model = loader->model;
    void **grown = sp_realloc(model->copies, (model->n_copies + 1) * sizeof *grown);
    void *copy;

    if (grown)
        model->copies = grown;
    copy = grown ? sp_malloc(bytes) : NULL;
    if (copy)
        model->copies[model->n_copies++] = copy;
    else
        loader->status = sp_fail_memory(loader->error, bytes, what);
    return copy;
}

/* A tensor that starts at an odd address cannot be read as 16-bit elements: it is copied. */
static const void *aligned_data(sp_weight_loader *loader, const char *data, size_t bytes)
{
    void *copy;

    if (((uintptr_t)data & 1) == 0)
        return data;
    copy = own_memory(loader, bytes, "a weight that is not aligned");
    if (copy)
        memcpy(copy, data, bytes);
    return copy;
}

/* The ops read BF16: other types are rounded to it once, to nearest, ties to even. */
static const void *converted_data(sp_weight_loader *loader, const sp_tensor *tensor,
                                  const char *data)
{
    bool wide = tensor->type == SP_TENSOR_F32;
    size_t n = (size_t)tensor->bytes / (wide ? 4 : 2);
    uint16_t *copy;

    loader->owned_bytes += n * sizeof *copy;
    loader->n_converted[wide ? 0 : 1]++;
    loader->status =
        sp_memory_preflight_weights(loader->owned_bytes, loader->free_bytes, loader->error);
    if (loader->status != SP_OK)
        return NULL;
    copy = own_memory(loader, n * sizeof *copy, "a weight in BF16");
    for (size_t i = 0; copy && i < n; i++) {
        uint32_t word;
        uint16_t half;

        if (wide) {
            memcpy(&word, data + i * sizeof word, sizeof word);
            copy[i] = sp_f32_to_bf16(sp_f32_from_bits(word));
        } else {
            memcpy(&half, data + i * sizeof half, sizeof half);
            copy[i] = sp_f32_to_bf16(sp_f16_to_f32(half));
        }
    }
    return copy;
}

static void fail_shape(sp_weight_loader *loader, const sp_tensor *tensor, int32_t rows,
                       int32_t cols)
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

/* Appends the weight to the list of those to place. */
static void list_weight(sp_weight_loader *loader, sp_weight *weight)
{
    sp_model *model = loader->model;

    if (model->n_weights == loader->capacity) {
        size_t capacity = loader->capacity ? 2 * loader->capacity : 64;
        sp_weight **grown = sp_realloc(model->weights, capacity * sizeof(sp_weight *));

        if (!grown) {
            loader->status =
                sp_fail_memory(loader->error, capacity * sizeof(sp_weight *), "a list of weights");
            return;
        }
        model->weights = grown;
        loader->capacity = capacity;
    }
    model->weights[model->n_weights++] = weight;
}

/* Loads the weight [rows, columns] (a vector when columns is 0) of that name. */
static void load(sp_weight_loader *loader, const char *name, int32_t rows, int32_t columns,
                 sp_weight *out_weight)
{
    const sp_tensor *tensor;
    const char *data;
    bool fits;

    if (loader->status != SP_OK)
        return;
    tensor = sp_checkpoint_find(loader->checkpoint, name);
    if (!tensor) {
        loader->status = sp_fail(loader->error, SP_ERR_NOT_FOUND, NULL, name, -1,
                                 "the checkpoint has no weight %s", name);
        return;
    }
    fits = columns > 0
               ? tensor->n_dims == 2 && tensor->dims[0] == rows && tensor->dims[1] == columns
               : tensor->n_dims == 1 && tensor->dims[0] == rows;
    if (!fits) {
        fail_shape(loader, tensor, rows, columns);
        return;
    }
    if (!sp_tensor_type_dtype(tensor->type, NULL)) {
        loader->status = sp_fail(loader->error, SP_ERR_UNSUPPORTED, "unsupported-dtype", name, -1,
                                 "weight %s is %s; this engine runs BF16, F16 and F32 checkpoints",
                                 name, sp_tensor_type_name(tensor->type));
        return;
    }
    data = loader->model->files.files[tensor->file].data + tensor->offset_bytes;
    loader->used[tensor - sp_checkpoint_at(loader->checkpoint, 0)] = true;
    if (tensor->type == SP_TENSOR_BF16 &&
        !sp_weight_files_use(&loader->model->files, tensor->file, tensor->offset_bytes,
                             (size_t)tensor->bytes)) {
        loader->status = sp_fail_memory(loader->error, sizeof(sp_weight_range), "a list of ranges");
        return;
    }
    *out_weight = (sp_weight){.type = SP_DTYPE_BF16, .rows = rows, .columns = columns};
    out_weight->host = tensor->type == SP_TENSOR_BF16
                           ? aligned_data(loader, data, (size_t)tensor->bytes)
                           : converted_data(loader, tensor, data);
    loader->model->weight_bytes +=
        sizeof(uint16_t) * (size_t)rows * (columns ? (size_t)columns : 1);
    if (loader->status == SP_OK)
        list_weight(loader, out_weight);
}

static void load_in_layer(sp_weight_loader *loader, int32_t layer, const char *module,
                          const char *parameter, int32_t rows, int32_t columns,
                          sp_weight *out_weight)
{
    char name[TENSOR_NAME_BYTES];

    snprintf(name, sizeof name, "model.layers.%d.%s.%s", layer, module, parameter);
    load(loader, name, rows, columns, out_weight);
}

static void set_norm(const sp_weight_loader *loader, sp_norm *out_norm)
{
    const sp_model_shape *shape = &loader->model->shape;

    out_norm->eps = shape->rms_norm_eps;
    out_norm->offset = shape->zero_centred_norms ? 1.0f : 0.0f;
}

const sp_model_shape *sp_weight_loader_shape(const sp_weight_loader *loader)
{
    return &loader->model->shape;
}

sp_layer_kind sp_weight_loader_kind(const sp_weight_loader *loader, int32_t layer)
{
    return sp_geometry_layer_kind(loader->model->geometry, layer);
}

void sp_load_norm(sp_weight_loader *loader, int32_t layer, const char *module, int32_t width,
                  sp_norm *out_norm)
{
    load_in_layer(loader, layer, module, "weight", width, 0, &out_norm->weight);
    set_norm(loader, out_norm);
}

void sp_load_linear(sp_weight_loader *loader, int32_t layer, const char *module, int32_t outputs,
                    int32_t inputs, bool bias, sp_linear *out_linear)
{
    load_in_layer(loader, layer, module, "weight", outputs, inputs, &out_linear->weight);
    if (bias)
        load_in_layer(loader, layer, module, "bias", outputs, 0, &out_linear->bias);
    out_linear->site = sp_geometry_find_module(loader->model->geometry, layer, module, -1);
}

/* ---- unused tensors --------------------------------------------------------------------- */

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

/* Tables that older programs saved, and a tied base's copy of its embedding: safe to skip. */
static bool is_redundant(const sp_model_shape *shape, const char *name)
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

/* A weight of a part that runs and that is not applied would make the answers slightly wrong. */
static void check_unused(sp_weight_loader *loader)
{
    const sp_model_shape *shape = &loader->model->shape;
    sp_text names = {0};
    size_t n = 0;

    for (size_t i = 0; i < sp_checkpoint_n_tensors(loader->checkpoint); i++) {
        const char *name = sp_checkpoint_at(loader->checkpoint, i)->name;

        if (loader->used[i] || is_redundant(shape, name))
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

static void note_converted(sp_weight_loader *loader)
{
    const size_t *n = loader->n_converted;
    sp_text note = {0};

    if (n[0] + n[1] == 0)
        return;
    sp_text_format(&note, "weights converted to BF16: %zu of F32, %zu of F16", n[0], n[1]);
    if (note.failed)
        loader->status = sp_fail_memory(loader->error, 1, "a note");
    loader->model->converted = note.data;
}

/* ---- all of them --------------------------------------------------------------------------- */

static void load_all(sp_weight_loader *loader)
{
    sp_model *model = loader->model;
    const sp_model_shape *shape = &model->shape;

    load(loader, "model.embed_tokens.weight", shape->vocab, shape->hidden, &model->embed);
    load(loader, "model.norm.weight", shape->hidden, 0, &model->final_norm.weight);
    set_norm(loader, &model->final_norm);
    if (shape->tied_embeddings)
        model->head = model->embed;
    else
        load(loader, "lm_head.weight", shape->vocab, shape->hidden, &model->head);
    for (int32_t layer = 0; layer < shape->layers; layer++)
        model->family->load_layer(
            loader, layer, (char *)model->layers + (size_t)layer * model->family->layer_bytes);
    if (loader->status == SP_OK)
        check_unused(loader);
    if (loader->status == SP_OK)
        note_converted(loader);
}

sp_status sp_load_weights(sp_model *model, const sp_checkpoint *checkpoint, size_t copied_bytes,
                          size_t free_bytes, sp_error *error)
{
    size_t layers = (size_t)model->shape.layers;
    sp_weight_loader loader = {.model = model,
                               .checkpoint = checkpoint,
                               .error = error,
                               .status = SP_OK,
                               .free_bytes = free_bytes,
                               .owned_bytes = copied_bytes};

    model->layers = sp_calloc(layers, model->family->layer_bytes);
    if (!model->layers)
        return sp_fail_memory(error, layers * model->family->layer_bytes, "layers");
    loader.used = sp_calloc(sp_checkpoint_n_tensors(checkpoint) + 1, sizeof *loader.used);
    if (!loader.used)
        return sp_fail_memory(error, sp_checkpoint_n_tensors(checkpoint), "a list of weights");
    load_all(&loader);
    model->needed_bytes = copied_bytes > 0 ? loader.owned_bytes : model->weight_bytes;
    sp_free(loader.used);
    return loader.status;
}
