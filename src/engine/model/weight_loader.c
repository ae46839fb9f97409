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
    const char *trunk; /* "model." or "model.language_model." */
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

/* An element of a tensor at any address. */
static float element_of(sp_dtype type, const char *data, size_t i)
{
    uint32_t word;
    uint16_t half;

    if (type == SP_DTYPE_F32) {
        memcpy(&word, data + i * sizeof word, sizeof word);
        return sp_f32_from_bits(word);
    }
    memcpy(&half, data + i * sizeof half, sizeof half);
    return type == SP_DTYPE_F16 ? sp_f16_to_f32(half) : sp_bf16_to_f32(half);
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
    for (size_t i = 0; copy && i < n; i++)
        copy[i] = sp_f32_to_bf16(element_of(wide ? SP_DTYPE_F32 : SP_DTYPE_F16, data, i));
    return copy;
}

static void add_dims(sp_text *out, int32_t n, const int64_t *dims)
{
    for (int32_t i = 0; i < n; i++)
        sp_text_format(out, "%s%lld", i ? ", " : "", (long long)dims[i]);
}

static void fail_shape(sp_weight_loader *loader, const sp_tensor *tensor, int32_t n_dims,
                       const int64_t *dims)
{
    sp_text have = {0}, want = {0};

    add_dims(&have, tensor->n_dims, tensor->dims);
    add_dims(&want, n_dims, dims);
    loader->status = sp_fail(loader->error, SP_ERR_MISMATCH, NULL, tensor->name, -1,
                             "weight %s has the shape [%s]; config.json wants [%s]", tensor->name,
                             have.data ? have.data : "", want.data ? want.data : "");
    sp_text_free(&have);
    sp_text_free(&want);
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

/* The tensor of that name; NULL after a failure, which is kept. */
static const sp_tensor *find(sp_weight_loader *loader, const char *name, int32_t n_dims,
                             const int64_t *dims)
{
    const sp_tensor *tensor;

    if (loader->status != SP_OK)
        return NULL;
    tensor = sp_checkpoint_find(loader->checkpoint, name);
    if (!tensor)
        loader->status = sp_fail(loader->error, SP_ERR_NOT_FOUND, NULL, name, -1,
                                 "the checkpoint has no weight %s", name);
    else if (tensor->n_dims != n_dims ||
             memcmp(tensor->dims, dims, (size_t)n_dims * sizeof *dims) != 0)
        fail_shape(loader, tensor, n_dims, dims);
    else if (!sp_tensor_type_dtype(tensor->type, NULL))
        loader->status = sp_fail(loader->error, SP_ERR_UNSUPPORTED, "unsupported-dtype", name, -1,
                                 "weight %s is %s; this engine runs BF16, F16 and F32 checkpoints",
                                 name, sp_tensor_type_name(tensor->type));
    return loader->status == SP_OK ? tensor : NULL;
}

/* The bytes of the tensor of that name in its file, of which the model uses `bytes_each` for each
 * element; NULL after a failure. */
static const char *use(sp_weight_loader *loader, const char *name, int32_t n_dims,
                       const int64_t *dims, size_t bytes_each, const sp_tensor **out_tensor)
{
    const sp_tensor *tensor = find(loader, name, n_dims, dims);
    size_t bytes = bytes_each;

    if (!tensor)
        return NULL;
    for (int32_t i = 0; i < n_dims; i++)
        bytes *= (size_t)dims[i];
    loader->used[tensor - sp_checkpoint_at(loader->checkpoint, 0)] = true;
    loader->model->weight_bytes += bytes;
    *out_tensor = tensor;
    return loader->model->files.files[tensor->file].data + tensor->offset_bytes;
}

/* The elements of the tensor of that name, in BF16; NULL after a failure. */
static const uint16_t *load_data(sp_weight_loader *loader, const char *name, int32_t n_dims,
                                 const int64_t *dims)
{
    const sp_tensor *tensor;
    const char *data = use(loader, name, n_dims, dims, sizeof(uint16_t), &tensor);

    if (!data)
        return NULL;
    if (tensor->type != SP_TENSOR_BF16)
        return converted_data(loader, tensor, data);
    if (!sp_weight_files_use(&loader->model->files, tensor->file, tensor->offset_bytes,
                             (size_t)tensor->bytes)) {
        loader->status = sp_fail_memory(loader->error, sizeof(sp_weight_range), "a list of ranges");
        return NULL;
    }
    return aligned_data(loader, data, (size_t)tensor->bytes);
}

/* Sets a weight [rows, columns] (a vector when columns is 0) with those elements and lists it. */
static void set_weight(sp_weight_loader *loader, const uint16_t *data, int32_t rows,
                       int32_t columns, sp_weight *out_weight)
{
    if (loader->status != SP_OK)
        return;
    *out_weight =
        (sp_weight){.type = SP_DTYPE_BF16, .rows = rows, .columns = columns, .host = data};
    list_weight(loader, out_weight);
}

static void load(sp_weight_loader *loader, const char *name, int32_t rows, int32_t columns,
                 sp_weight *out_weight)
{
    const int64_t dims[] = {rows, columns};

    set_weight(loader, load_data(loader, name, columns > 0 ? 2 : 1, dims), rows, columns,
               out_weight);
}

static void load_in_layer(sp_weight_loader *loader, int32_t layer, const char *module,
                          const char *parameter, int32_t rows, int32_t columns,
                          sp_weight *out_weight)
{
    char name[TENSOR_NAME_BYTES];

    snprintf(name, sizeof name, "%slayers.%d.%s.%s", loader->trunk, layer, module, parameter);
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

bool sp_weight_loader_is_moe(const sp_weight_loader *loader, int32_t layer)
{
    return sp_geometry_find_module(loader->model->geometry, layer, "mlp.gate", -1) >= 0;
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

void sp_load_conv(sp_weight_loader *loader, int32_t layer, const char *module, int32_t channels,
                  int32_t width, sp_weight *out_weight)
{
    const int64_t dims[] = {channels, 1, width};
    char name[TENSOR_NAME_BYTES];

    snprintf(name, sizeof name, "%slayers.%d.%s.weight", loader->trunk, layer, module);
    set_weight(loader, load_data(loader, name, 3, dims), channels, width, out_weight);
}

void sp_load_fp32(sp_weight_loader *loader, int32_t layer, const char *name, int32_t n,
                  sp_weight *out_weight)
{
    const int64_t dims[] = {n};
    char full[TENSOR_NAME_BYTES];
    const sp_tensor *tensor;
    const char *data;
    sp_dtype type;
    float *values;

    snprintf(full, sizeof full, "%slayers.%d.%s", loader->trunk, layer, name);
    data = use(loader, full, 1, dims, sizeof *values, &tensor);
    if (!data)
        return;
    values = own_memory(loader, (size_t)n * sizeof *values, "a weight in FP32");
    if (!values)
        return;
    sp_tensor_type_dtype(tensor->type, &type);
    for (int32_t i = 0; i < n; i++)
        values[i] = element_of(type, data, (size_t)i);
    *out_weight = (sp_weight){.type = SP_DTYPE_F32, .rows = n, .host = values};
    list_weight(loader, out_weight);
}

/* ---- experts -------------------------------------------------------------------------------- */

static void set_sites(const sp_weight_loader *loader, int32_t layer, const char *module, int32_t n,
                      sp_linear *maps)
{
    for (int32_t e = 0; e < n; e++)
        maps[e].site = sp_geometry_find_module(loader->model->geometry, layer, module, e);
}

static void load_one_by_one(sp_weight_loader *loader, int32_t layer, int32_t hidden, int32_t inner,
                            const sp_experts *experts)
{
    char module[64];

    for (int32_t e = 0; e < experts->n && loader->status == SP_OK; e++) {
        snprintf(module, sizeof module, "mlp.experts.%d.gate_proj", e);
        load_in_layer(loader, layer, module, "weight", inner, hidden, &experts->gate[e].weight);
        snprintf(module, sizeof module, "mlp.experts.%d.up_proj", e);
        load_in_layer(loader, layer, module, "weight", inner, hidden, &experts->up[e].weight);
        snprintf(module, sizeof module, "mlp.experts.%d.down_proj", e);
        load_in_layer(loader, layer, module, "weight", hidden, inner, &experts->down[e].weight);
    }
}

/* gate_up [n, 2 * inner, hidden], of each expert gate before up; down [n, hidden, inner]. */
static void load_stacked(sp_weight_loader *loader, const char *gate_up_name, const char *down_name,
                         int32_t hidden, int32_t inner, const sp_experts *experts)
{
    const int64_t gate_up_dims[] = {experts->n, 2 * (int64_t)inner, hidden};
    const int64_t down_dims[] = {experts->n, hidden, inner};
    const uint16_t *gate_up = load_data(loader, gate_up_name, 3, gate_up_dims);
    const uint16_t *down = load_data(loader, down_name, 3, down_dims);
    size_t elements = (size_t)hidden * (size_t)inner;

    for (int32_t e = 0; e < experts->n && loader->status == SP_OK; e++) {
        const uint16_t *gate = gate_up + 2 * elements * (size_t)e;

        set_weight(loader, gate, inner, hidden, &experts->gate[e].weight);
        set_weight(loader, gate + elements, inner, hidden, &experts->up[e].weight);
        set_weight(loader, down + elements * (size_t)e, hidden, inner, &experts->down[e].weight);
    }
}

void sp_load_experts(sp_weight_loader *loader, int32_t layer, sp_experts *out_experts)
{
    const sp_model_shape *shape = &loader->model->shape;
    size_t n = (size_t)shape->experts, bytes = 3 * n * sizeof(sp_linear);
    char gate_up[TENSOR_NAME_BYTES], down[TENSOR_NAME_BYTES];
    sp_linear *maps;

    if (loader->status != SP_OK)
        return;
    maps = own_memory(loader, bytes, "a list of experts");
    if (!maps)
        return;
    memset(maps, 0, bytes);
    *out_experts = (sp_experts){shape->experts, maps, maps + n, maps + 2 * n};
    set_sites(loader, layer, "mlp.experts.gate_proj", shape->experts, out_experts->gate);
    set_sites(loader, layer, "mlp.experts.up_proj", shape->experts, out_experts->up);
    set_sites(loader, layer, "mlp.experts.down_proj", shape->experts, out_experts->down);
    snprintf(gate_up, sizeof gate_up, "%slayers.%d.mlp.experts.gate_up_proj", loader->trunk, layer);
    snprintf(down, sizeof down, "%slayers.%d.mlp.experts.down_proj", loader->trunk, layer);
    if (sp_checkpoint_find(loader->checkpoint, gate_up))
        load_stacked(loader, gate_up, down, shape->hidden, shape->expert_intermediate, out_experts);
    else
        load_one_by_one(loader, layer, shape->hidden, shape->expert_intermediate, out_experts);
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
static bool is_in_trunk(const sp_weight_loader *loader, const char *name)
{
    static const char layers[] = "layers.";

    if (begins_with(name, "lm_head."))
        return true;
    if (!begins_with(name, loader->trunk))
        return false;
    name += strlen(loader->trunk);
    if (begins_with(name, layers)) {
        long long layer = strtoll(name + strlen(layers), NULL, 10);

        return layer >= 0 && layer < loader->model->shape.layers;
    }
    return begins_with(name, "embed_tokens.") || begins_with(name, "norm.");
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
        if (is_in_trunk(loader, name)) {
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

static const char *find_trunk(const sp_checkpoint *checkpoint)
{
    static const char in_vision[] = "model.language_model.";
    char embed[TENSOR_NAME_BYTES];

    snprintf(embed, sizeof embed, "%sembed_tokens.weight", in_vision);
    return sp_checkpoint_find(checkpoint, embed) ? in_vision : "model.";
}

static void load_all(sp_weight_loader *loader)
{
    sp_model *model = loader->model;
    const sp_model_shape *shape = &model->shape;

    char embed[TENSOR_NAME_BYTES], norm[TENSOR_NAME_BYTES];

    loader->trunk = find_trunk(loader->checkpoint);
    snprintf(embed, sizeof embed, "%sembed_tokens.weight", loader->trunk);
    snprintf(norm, sizeof norm, "%snorm.weight", loader->trunk);
    load(loader, embed, shape->vocab, shape->hidden, &model->embed);
    load(loader, norm, shape->hidden, 0, &model->final_norm.weight);
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
