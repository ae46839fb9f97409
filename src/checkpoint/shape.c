/*
 * shape.c: config.json of a Hugging Face checkpoint → numbers.
 *
 * The Qwen3 families and the Llama types, in the styles of transformers 4 and 5. What would change
 * the mathematics and is not supported (RoPE of another kind, sliding windows, another activation)
 * is refused by name, because a base that runs slightly wrong is worse than one that does not
 * start.
 */
#include "checkpoint/shape.h"

#include "base/alloc.h"
#include "base/error.h"

#include <math.h>
#include <string.h>

#define LAYERS_MAX 4096
#define WIDTH_MAX  (1 << 24) /* any single dimension */
#define HEADS_MAX  65536

typedef struct reader {
    const json_t *top;  /* the whole file */
    const json_t *text; /* its text_config, or the same */
    const struct architecture *architecture;
    sp_error *error;
} reader;

/* ---- fields -------------------------------------------------------------------------------- */

static sp_status unsupported(const reader *r, const char *field, const char *what)
{
    return sp_fail(r->error, SP_ERR_UNSUPPORTED, NULL, field, -1, "config.json: %s", what);
}

static sp_status read_count(const reader *r, const char *field, bool required, int32_t maximum,
                            int32_t default_value, int32_t *out_value)
{
    int64_t value = 0;
    sp_status status =
        sp_json_int(r->text, field, required, 0, maximum, default_value, NULL, &value, r->error);

    if (status == SP_OK && required && value < 1)
        return sp_fail(r->error, SP_ERR_INPUT, NULL, field, -1,
                       "config.json: \"%s\" is %lld; it must be at least 1", field,
                       (long long)value);
    if (status == SP_OK)
        *out_value = (int32_t)value;
    return status;
}

typedef struct count_field {
    const char *name;
    int32_t maximum;
    int32_t *value;
} count_field;

static sp_status read_counts(const reader *r, const count_field *fields, size_t n)
{
    sp_status status = SP_OK;

    for (size_t i = 0; status == SP_OK && i < n; i++)
        status = read_count(r, fields[i].name, true, fields[i].maximum, 0, fields[i].value);
    return status;
}

/* ---- which model --------------------------------------------------------------------------- */

/* What an architecture does by itself where others have a field, or without any field. */
struct architecture {
    const char *name, *model_type;
    const char *text_model_type; /* of text_config, where it has another */
    sp_family family;
    double rope_theta;     /* where config.json has none; 0: it must */
    bool qkv_bias;         /* q, k and v have biases and o has none, whatever the fields say */
    bool reads_biases;     /* attention_bias (of all four) and mlp_bias */
    bool always_windowed;  /* sliding_window counts without use_sliding_window */
    bool skips_rope;       /* no_rope_layers */
    bool kv_heads_default; /* as many as heads where config.json has no num_key_value_heads */
    bool tied;             /* where config.json does not say */
};

static const struct architecture architectures[] = {
    {.name = "Qwen3ForCausalLM", .model_type = "qwen3", .family = SP_FAMILY_QWEN3},
    {.name = "Qwen3MoeForCausalLM", .model_type = "qwen3_moe", .family = SP_FAMILY_QWEN3_MOE},
    {.name = "Qwen3NextForCausalLM", .model_type = "qwen3_next", .family = SP_FAMILY_QWEN3_NEXT},
    {.name = "Qwen3_5ForCausalLM", .model_type = "qwen3_5_text", .family = SP_FAMILY_QWEN35},
    {.name = "Qwen3_5ForConditionalGeneration",
     .model_type = "qwen3_5",
     .text_model_type = "qwen3_5_text",
     .family = SP_FAMILY_QWEN35},
    {.name = "Qwen3_5MoeForCausalLM",
     .model_type = "qwen3_5_moe_text",
     .family = SP_FAMILY_QWEN35_MOE},
    {.name = "Qwen3_5MoeForConditionalGeneration",
     .model_type = "qwen3_5_moe",
     .text_model_type = "qwen3_5_moe_text",
     .family = SP_FAMILY_QWEN35_MOE},
    {.name = "LlamaForCausalLM",
     .model_type = "llama",
     .family = SP_FAMILY_LLAMA,
     .rope_theta = 10000,
     .reads_biases = true,
     .kv_heads_default = true},
    {.name = "MistralForCausalLM",
     .model_type = "mistral",
     .family = SP_FAMILY_LLAMA,
     .always_windowed = true},
    {.name = "Qwen2ForCausalLM",
     .model_type = "qwen2",
     .family = SP_FAMILY_LLAMA,
     .qkv_bias = true},
    {.name = "SmolLM3ForCausalLM",
     .model_type = "smollm3",
     .family = SP_FAMILY_LLAMA,
     .reads_biases = true,
     .skips_rope = true,
     .tied = true},
};
#define N_ARCHITECTURES (sizeof architectures / sizeof *architectures)

const char *sp_family_name(sp_family family)
{
    if (family == SP_FAMILY_CUSTOM)
        return "custom";
    for (size_t i = 0; i < N_ARCHITECTURES; i++)
        if (architectures[i].family == family)
            return architectures[i].model_type;
    return NULL;
}

static bool is_hybrid(sp_family family)
{
    return family == SP_FAMILY_QWEN3_NEXT || family == SP_FAMILY_QWEN35 ||
           family == SP_FAMILY_QWEN35_MOE;
}

/* Model types of checkpoints that were made from a hybrid: where their architecture is that of one,
 * it decides. */
static bool is_made_from_hybrid(const struct architecture *a, const char *model_type)
{
    static const char *const names[] = {"qwen3_6_moe", "holo3_1_moe", "laguna"};
    bool found = false;

    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        found |= strcmp(model_type, names[i]) == 0;
    return found && is_hybrid(a->family);
}

static bool fits(const struct architecture *a, const char *name, const char *model_type)
{
    if (name && strcmp(name, a->name) != 0)
        return false;
    return !model_type || strcmp(model_type, a->model_type) == 0 ||
           (a->text_model_type && strcmp(model_type, a->text_model_type) == 0) ||
           (name && is_made_from_hybrid(a, model_type));
}

/* The architecture decides; without one, the model type. Both must agree. */
static sp_status read_architecture(reader *r)
{
    const json_t *list = json_object_get(r->top, "architectures");
    const char *name = json_string_value(json_array_get(list, 0));
    const char *model_type;
    sp_status status = sp_json_string(r->top, "model_type", false, NULL, &model_type, r->error);

    if (status != SP_OK)
        return status;
    if (!name && !model_type)
        return sp_fail(r->error, SP_ERR_INPUT, NULL, "architectures", -1,
                       "config.json has neither \"architectures\" nor \"model_type\"");
    for (size_t i = 0; i < N_ARCHITECTURES && !r->architecture; i++)
        if (fits(&architectures[i], name, model_type))
            r->architecture = &architectures[i];
    if (!r->architecture)
        return sp_fail(r->error, SP_ERR_UNSUPPORTED, NULL, "architectures", -1,
                       "the architecture %.100s (model_type %.100s) is not served; Qwen3, "
                       "Qwen3Moe, Qwen3Next, Qwen3_5, Qwen3_5Moe, Llama, Mistral, Qwen2 and "
                       "SmolLM3 are",
                       name ? name : "?", model_type ? model_type : "?");
    return SP_OK;
}

static bool is_moe(sp_family family)
{
    return family == SP_FAMILY_QWEN3_MOE || family == SP_FAMILY_QWEN3_NEXT ||
           family == SP_FAMILY_QWEN35_MOE;
}

/* ---- attention and RoPE -------------------------------------------------------------------- */

static const struct {
    const char *name;
    sp_rope_kind kind;
    bool llama_only;
} rope_types[] = {
    {"default", SP_ROPE_PLAIN, false},
    /* Text positions are the same in all sections of a multimodal RoPE, so that it is a plain one.
     */
    {"mrope", SP_ROPE_PLAIN, false},
    {"linear", SP_ROPE_LINEAR, true},
    {"llama3", SP_ROPE_LLAMA3, true},
};

/* Both names of the type must mean the same, where both are there. */
static sp_status read_rope_type(const reader *r, const json_t *rope, sp_rope_kind *out_kind)
{
    static const char *const names[] = {"rope_type", "type"};
    bool llama = r->architecture->family == SP_FAMILY_LLAMA, first = true;

    for (size_t i = 0; i < 2; i++) {
        const char *type;
        size_t t = 0;
        sp_status status = sp_json_string(rope, names[i], false, NULL, &type, r->error);

        if (status != SP_OK)
            return status;
        if (!type)
            continue;
        while (t < sizeof rope_types / sizeof *rope_types &&
               (strcmp(type, rope_types[t].name) != 0 || (rope_types[t].llama_only && !llama)))
            t++;
        if (t == sizeof rope_types / sizeof *rope_types ||
            (!first && rope_types[t].kind != *out_kind))
            return sp_fail(r->error, SP_ERR_UNSUPPORTED, NULL, names[i], -1,
                           "config.json: RoPE of type \"%.100s\" is not served", type);
        *out_kind = rope_types[t].kind;
        first = false;
    }
    return SP_OK;
}

/* rope_parameters (transformers 5) or rope_scaling (4); NULL when there is neither. */
static sp_status find_rope(const reader *r, const json_t **out_rope, sp_rope_kind *out_kind)
{
    static const char *const names[] = {"rope_parameters", "rope_scaling"};

    *out_rope = NULL;
    *out_kind = SP_ROPE_PLAIN;
    for (size_t i = 0; i < 2; i++) {
        const json_t *value = json_object_get(r->text, names[i]);
        sp_rope_kind kind = SP_ROPE_PLAIN;
        sp_status status;

        if (!value || json_is_null(value))
            continue;
        if (!json_is_object(value))
            return sp_fail(r->error, SP_ERR_INPUT, NULL, names[i], -1,
                           "config.json: \"%s\" is no object", names[i]);
        status = read_rope_type(r, value, &kind);
        if (status != SP_OK)
            return status;
        if (*out_rope && kind != *out_kind)
            return sp_fail(r->error, SP_ERR_INPUT, NULL, names[i], -1,
                           "config.json: rope_parameters and rope_scaling are of two types");
        if (!*out_rope)
            *out_rope = value;
        *out_kind = kind;
    }
    return SP_OK;
}

/* A number of the RoPE object, or of the level above it where transformers 4 had it; where both
 * have it they must agree. */
static sp_status read_rope_number(const reader *r, const json_t *rope, const char *field,
                                  bool required, double default_value, double *out_value)
{
    const json_t *inner = rope ? json_object_get(rope, field) : NULL;
    const json_t *outer = json_object_get(r->text, field);

    if (json_is_number(inner) && json_is_number(outer) &&
        (json_number_value(inner) < json_number_value(outer) ||
         json_number_value(inner) > json_number_value(outer)))
        return sp_fail(r->error, SP_ERR_INPUT, NULL, field, -1,
                       "config.json: %s is %g, and %g in RoPE's object", field,
                       json_number_value(outer), json_number_value(inner));
    return sp_json_double(inner && !json_is_null(inner) ? rope : r->text, field, required,
                          default_value, NULL, out_value, r->error);
}

/* The numbers of a scaled RoPE are in its object alone. */
static sp_status read_rope_scaling(const reader *r, const json_t *rope, sp_rope_scaling *out)
{
    int64_t original = 0;
    sp_status status = SP_OK;

    out->factor = 1;
    if (out->kind != SP_ROPE_PLAIN)
        status = sp_json_double(rope, "factor", true, 1, NULL, &out->factor, r->error);
    if (status == SP_OK && !(out->factor >= 1 && isfinite(out->factor)))
        return sp_fail(r->error, SP_ERR_INPUT, NULL, "factor", -1,
                       "config.json: RoPE's factor must be at least 1");
    if (status != SP_OK || out->kind != SP_ROPE_LLAMA3)
        return status;
    status =
        sp_json_double(rope, "low_freq_factor", true, 0, NULL, &out->low_freq_factor, r->error);
    if (status == SP_OK)
        status = sp_json_double(rope, "high_freq_factor", true, 0, NULL, &out->high_freq_factor,
                                r->error);
    if (status == SP_OK)
        status = sp_json_int(rope, "original_max_position_embeddings", true, 1, WIDTH_MAX, 0, NULL,
                             &original, r->error);
    if (status != SP_OK)
        return status;
    if (!(out->low_freq_factor > 0 && out->high_freq_factor > out->low_freq_factor &&
          isfinite(out->high_freq_factor)))
        return sp_fail(r->error, SP_ERR_INPUT, NULL, "high_freq_factor", -1,
                       "config.json: RoPE's low_freq_factor must be above 0 and its "
                       "high_freq_factor above that");
    out->original_positions = (int32_t)original;
    return SP_OK;
}

static sp_status read_rope(const reader *r, sp_model_shape *shape)
{
    const json_t *rope;
    double theta = 0, factor = 1, fallback = r->architecture->rope_theta;
    double rotary;
    sp_status status = find_rope(r, &rope, &shape->rope_scaling.kind);

    if (status == SP_OK)
        status = read_rope_number(r, rope, "rope_theta", !(fallback > 0), fallback, &theta);
    if (status == SP_OK)
        status = read_rope_scaling(r, rope, &shape->rope_scaling);
    if (status == SP_OK)
        status = read_rope_number(r, rope, "partial_rotary_factor", false,
                                  is_hybrid(shape->family) ? 0.25 : 1, &factor);
    if (status != SP_OK)
        return status;
    if (!(theta > 0) || !isfinite(theta))
        return sp_fail(r->error, SP_ERR_INPUT, NULL, "rope_theta", -1,
                       "config.json: rope_theta must be a positive number");
    rotary = (double)shape->head_dim * factor;
    if (!(factor > 0 && factor <= 1) || rotary != floor(rotary) || fmod(rotary, 2) != 0)
        return sp_fail(r->error, SP_ERR_INPUT, NULL, "partial_rotary_factor", -1,
                       "config.json: partial_rotary_factor %g of head_dim %d is no even number of "
                       "dimensions",
                       factor, shape->head_dim);
    if (!is_hybrid(shape->family) && factor < 1)
        return unsupported(r, "partial_rotary_factor",
                           "this family rotates whole heads; partial_rotary_factor is not served");
    shape->rope_theta = theta;
    shape->partial_rotary_factor = (float)factor;
    return SP_OK;
}

static sp_status read_head_dim(const reader *r, sp_model_shape *shape)
{
    /* Of the Qwen3 families only Qwen3Moe has a fallback in transformers that follows from the
     * other fields. */
    bool llama = shape->family == SP_FAMILY_LLAMA;
    bool given = json_is_integer(json_object_get(r->text, "head_dim"));
    bool required = shape->family != SP_FAMILY_QWEN3_MOE && !llama;
    int32_t fallback = shape->hidden / shape->q_heads;
    sp_status status = read_count(r, "head_dim", required, HEADS_MAX, fallback, &shape->head_dim);

    if (status == SP_OK && llama && !given && shape->hidden % shape->q_heads != 0)
        return sp_fail(r->error, SP_ERR_INPUT, NULL, "num_attention_heads", -1,
                       "config.json: hidden_size %d is no multiple of %d heads, and there is no "
                       "head_dim",
                       shape->hidden, shape->q_heads);
    if (status == SP_OK && shape->head_dim < 1)
        return sp_fail(r->error, SP_ERR_INPUT, NULL, "head_dim", -1,
                       "config.json: head_dim must be at least 1");
    return status;
}

/* Biases of the linear maps. A field that the architecture does not read must not require any. */
static sp_status read_biases(const reader *r, sp_model_shape *shape)
{
    const struct architecture *a = r->architecture;
    bool llama = shape->family == SP_FAMILY_LLAMA;
    sp_status status = sp_json_bool(r->text, "attention_bias", false, false, NULL,
                                    &shape->attention_bias, r->error);

    if (status == SP_OK)
        status = sp_json_bool(r->text, "mlp_bias", false, false, NULL, &shape->mlp_bias, r->error);
    if (status != SP_OK)
        return status;
    if (shape->mlp_bias && !a->reads_biases)
        return unsupported(r, "mlp_bias", "\"mlp_bias\" is not served with this architecture");
    if (shape->attention_bias && llama && !a->reads_biases && !a->qkv_bias)
        return unsupported(r, "attention_bias",
                           "\"attention_bias\" is not served with this architecture");
    shape->attention_output_bias = shape->attention_bias && !a->qkv_bias;
    shape->attention_bias |= a->qkv_bias;
    return SP_OK;
}

/* Old checkpoints of Llama have as many of one as of the other, and do not say so. */
static sp_status read_heads(const reader *r, sp_model_shape *shape)
{
    const json_t *kv_heads = json_object_get(r->text, "num_key_value_heads");
    const count_field fields[] = {
        {"num_attention_heads", HEADS_MAX, &shape->q_heads},
        {"num_key_value_heads", HEADS_MAX, &shape->kv_heads},
    };
    bool both = !r->architecture->kv_heads_default || (kv_heads && !json_is_null(kv_heads));
    sp_status status = read_counts(r, fields, both ? 2 : 1);

    if (status == SP_OK && !both)
        shape->kv_heads = shape->q_heads;
    return status;
}

static sp_status read_attention(const reader *r, sp_model_shape *shape)
{
    bool gate = true;
    sp_status status = read_heads(r, shape);

    if (status == SP_OK)
        status = read_head_dim(r, shape);
    if (status != SP_OK)
        return status;
    if (shape->q_heads % shape->kv_heads != 0)
        return sp_fail(r->error, SP_ERR_INPUT, NULL, "num_key_value_heads", -1,
                       "config.json: %d query heads are no multiple of %d key-value heads",
                       shape->q_heads, shape->kv_heads);
    if ((int64_t)shape->q_heads * shape->head_dim > WIDTH_MAX / 2)
        return sp_fail(r->error, SP_ERR_INPUT, NULL, "head_dim", -1,
                       "config.json: %d heads of %d are too wide", shape->q_heads, shape->head_dim);
    status = read_biases(r, shape);
    if (status == SP_OK)
        status = sp_json_bool(r->text, "attn_output_gate", false, true, NULL, &gate, r->error);
    if (status != SP_OK)
        return status;
    shape->gated_attention = is_hybrid(shape->family);
    if (shape->gated_attention && !gate)
        return unsupported(r, "attn_output_gate",
                           "attention without its output gate is not served");
    return read_rope(r, shape);
}

/* ---- layers -------------------------------------------------------------------------------- */

static sp_status read_layer_types(const reader *r, const json_t *types, const sp_model_shape *shape,
                                  sp_layer_plan *layers)
{
    if (!json_is_array(types) || json_array_size(types) != (size_t)shape->layers)
        return sp_fail(r->error, SP_ERR_INPUT, NULL, "layer_types", -1,
                       "config.json: \"layer_types\" is not a list of %d names", shape->layers);
    for (int32_t i = 0; i < shape->layers; i++) {
        const char *type = json_string_value(json_array_get(types, (size_t)i));

        if (type && strcmp(type, "full_attention") == 0)
            layers[i].kind = SP_LAYER_FULL_ATTENTION;
        else if (type && strcmp(type, "linear_attention") == 0 && is_hybrid(shape->family))
            layers[i].kind = SP_LAYER_LINEAR_ATTENTION;
        else
            return sp_fail(r->error, SP_ERR_UNSUPPORTED, NULL, "layer_types", i,
                           "config.json: layer %d is of type \"%.100s\", which is not served", i,
                           type ? type : "?");
    }
    return SP_OK;
}

/* Layers that do not rotate, of full attention otherwise: a list of 0 (does not) and 1, or every
 * so many-th. */
static sp_status read_rope_layers(const reader *r, const sp_model_shape *shape,
                                  sp_layer_plan *layers)
{
    const json_t *list = json_object_get(r->text, "no_rope_layers");
    bool listed = list && !json_is_null(list);
    int32_t interval = 4;
    sp_status status =
        read_count(r, "no_rope_layer_interval", false, LAYERS_MAX, interval, &interval);

    if (status != SP_OK)
        return status;
    if (interval < 1 && !listed)
        return sp_fail(r->error, SP_ERR_INPUT, NULL, "no_rope_layer_interval", -1,
                       "config.json: no_rope_layer_interval must be at least 1");
    if (listed && (!json_is_array(list) || json_array_size(list) != (size_t)shape->layers))
        return sp_fail(r->error, SP_ERR_INPUT, NULL, "no_rope_layers", -1,
                       "config.json: \"no_rope_layers\" is not a list of %d numbers",
                       shape->layers);
    for (int32_t i = 0; i < shape->layers; i++) {
        const json_t *item = json_array_get(list, (size_t)i);
        json_int_t rotates = listed ? json_integer_value(item) : (i + 1) % interval != 0;

        if (listed && (!json_is_integer(item) || rotates < 0 || rotates > 1))
            return sp_fail(r->error, SP_ERR_INPUT, NULL, "no_rope_layers", i,
                           "config.json: \"no_rope_layers\" has an entry that is neither 0 nor 1");
        if (rotates == 0)
            layers[i].kind = SP_LAYER_FULL_ATTENTION_NO_ROPE;
    }
    return SP_OK;
}

static sp_status read_layer_kinds(const reader *r, const sp_model_shape *shape,
                                  sp_layer_plan *layers)
{
    const json_t *types = json_object_get(r->text, "layer_types");
    int32_t interval = 4;
    sp_status status;

    if (types && !json_is_null(types))
        return read_layer_types(r, types, shape, layers);
    status = read_count(r, "full_attention_interval", false, LAYERS_MAX, interval, &interval);
    if (status != SP_OK || !is_hybrid(shape->family))
        return status;
    if (interval < 1)
        return sp_fail(r->error, SP_ERR_INPUT, NULL, "full_attention_interval", -1,
                       "config.json: full_attention_interval must be at least 1");
    for (int32_t i = 0; i < shape->layers; i++)
        layers[i].kind =
            (i + 1) % interval == 0 ? SP_LAYER_FULL_ATTENTION : SP_LAYER_LINEAR_ATTENTION;
    return SP_OK;
}

/* Which layers have experts: all, but for those listed and those between the sparse steps. */
static sp_status read_moe_layers(const reader *r, const sp_model_shape *shape,
                                 sp_layer_plan *layers, bool *out_any_dense)
{
    const json_t *dense = json_object_get(r->text, "mlp_only_layers");
    int32_t step = 1;
    sp_status status = read_count(r, "decoder_sparse_step", false, LAYERS_MAX, 1, &step);

    if (status != SP_OK)
        return status;
    if (step < 1)
        return sp_fail(r->error, SP_ERR_INPUT, NULL, "decoder_sparse_step", -1,
                       "config.json: decoder_sparse_step must be at least 1");
    if (dense && !json_is_null(dense) && !json_is_array(dense))
        return sp_fail(r->error, SP_ERR_INPUT, NULL, "mlp_only_layers", -1,
                       "config.json: \"mlp_only_layers\" is no list");
    for (int32_t i = 0; i < shape->layers; i++)
        layers[i].moe = (i + 1) % step == 0;
    for (size_t i = 0; i < json_array_size(dense); i++) {
        const json_t *layer = json_array_get(dense, i);
        json_int_t number = json_integer_value(layer);

        if (!json_is_integer(layer) || number < 0 || number >= shape->layers)
            return sp_fail(r->error, SP_ERR_INPUT, NULL, "mlp_only_layers", (int64_t)i,
                           "config.json: \"mlp_only_layers\" has an entry that is no layer");
        layers[number].moe = false;
    }
    *out_any_dense = false;
    for (int32_t i = 0; i < shape->layers; i++)
        *out_any_dense |= !layers[i].moe;
    if (*out_any_dense && shape->family == SP_FAMILY_QWEN35_MOE)
        return unsupported(r, "mlp_only_layers", "Qwen3_5Moe has experts in every layer");
    return SP_OK;
}

/* ---- experts and gated delta net ----------------------------------------------------------- */

static sp_status read_expert_count(const reader *r, sp_model_shape *shape)
{
    int32_t other = 0;
    sp_status status = read_count(r, "num_experts", false, HEADS_MAX, 0, &shape->experts);

    if (status == SP_OK)
        status = read_count(r, "num_local_experts", false, HEADS_MAX, 0, &other);
    if (status != SP_OK)
        return status;
    if (shape->experts == 0)
        shape->experts = other;
    if (shape->experts < 1 || (other > 0 && other != shape->experts))
        return sp_fail(r->error, SP_ERR_INPUT, NULL, "num_experts", -1,
                       "config.json: num_experts (or num_local_experts) must be one count, at "
                       "least 1");
    return SP_OK;
}

static sp_status read_moe(const reader *r, sp_model_shape *shape)
{
    const count_field fields[] = {
        {"num_experts_per_tok", HEADS_MAX, &shape->experts_per_token},
        {"moe_intermediate_size", WIDTH_MAX, &shape->expert_intermediate},
    };
    sp_status status = read_expert_count(r, shape);

    if (status == SP_OK)
        status = read_counts(r, fields, sizeof fields / sizeof *fields);
    if (status != SP_OK)
        return status;
    if (shape->experts_per_token > shape->experts)
        return sp_fail(r->error, SP_ERR_INPUT, NULL, "num_experts_per_tok", -1,
                       "config.json: %d experts per token of %d", shape->experts_per_token,
                       shape->experts);
    shape->norm_topk_prob = true; /* always so in Qwen3_5Moe */
    if (shape->family == SP_FAMILY_QWEN3_MOE || shape->family == SP_FAMILY_QWEN3_NEXT)
        status =
            sp_json_bool(r->text, "norm_topk_prob", false, shape->family == SP_FAMILY_QWEN3_NEXT,
                         NULL, &shape->norm_topk_prob, r->error);
    if (status == SP_OK && shape->family != SP_FAMILY_QWEN3_MOE)
        status = read_count(r, "shared_expert_intermediate_size", true, WIDTH_MAX, 0,
                            &shape->shared_expert_intermediate);
    return status;
}

static sp_status read_gdn(const reader *r, sp_model_shape *shape)
{
    const count_field fields[] = {
        {"linear_num_key_heads", HEADS_MAX, &shape->gdn_key_heads},
        {"linear_num_value_heads", HEADS_MAX, &shape->gdn_value_heads},
        {"linear_key_head_dim", HEADS_MAX, &shape->gdn_key_head_dim},
        {"linear_value_head_dim", HEADS_MAX, &shape->gdn_value_head_dim},
        {"linear_conv_kernel_dim", HEADS_MAX, &shape->gdn_conv_kernel},
    };
    sp_status status = read_counts(r, fields, sizeof fields / sizeof *fields);
    int64_t key, value;

    if (status != SP_OK)
        return status;
    key = (int64_t)shape->gdn_key_heads * shape->gdn_key_head_dim;
    value = (int64_t)shape->gdn_value_heads * shape->gdn_value_head_dim;
    if (key > WIDTH_MAX / 8 || value > WIDTH_MAX / 8)
        return sp_fail(r->error, SP_ERR_INPUT, NULL, "linear_key_head_dim", -1,
                       "config.json: the linear attention is too wide");
    if (shape->gdn_value_heads % shape->gdn_key_heads != 0)
        return sp_fail(r->error, SP_ERR_INPUT, NULL, "linear_num_value_heads", -1,
                       "config.json: %d value heads are no multiple of %d key heads",
                       shape->gdn_value_heads, shape->gdn_key_heads);
    shape->gdn_fused_inputs = shape->family == SP_FAMILY_QWEN3_NEXT;
    return SP_OK;
}

/* ---- the rest ------------------------------------------------------------------------------ */

sp_status sp_model_shape_read_eos(const json_t *value, const char *file, sp_model_shape *shape,
                                  sp_error *error)
{
    const size_t n_max = sizeof shape->eos_token_ids / sizeof *shape->eos_token_ids;
    size_t n = json_is_array(value) ? json_array_size(value) : 1;

    if (!value || json_is_null(value))
        return SP_OK;
    if (n > n_max)
        return sp_fail(error, SP_ERR_UNSUPPORTED, NULL, "eos_token_id", -1,
                       "%s: \"eos_token_id\" has %zu ids; at most %zu are served", file, n, n_max);
    for (size_t i = 0; i < n; i++) {
        const json_t *id = json_is_array(value) ? json_array_get(value, i) : value;

        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            json_integer_value(id) >= shape->vocab)
            return sp_fail(error, SP_ERR_INPUT, NULL, "eos_token_id", (int64_t)i,
                           "%s: \"eos_token_id\" is no id of the vocabulary", file);
        shape->eos_token_ids[i] = (int32_t)json_integer_value(id);
    }
    shape->n_eos_token_ids = (int32_t)n;
    return SP_OK;
}

static sp_status read_eos(const reader *r, sp_model_shape *shape)
{
    const json_t *value = json_object_get(r->text, "eos_token_id");

    if (!value || json_is_null(value))
        value = json_object_get(r->top, "eos_token_id");
    return sp_model_shape_read_eos(value, "config.json", shape, r->error);
}

/* Either level may have it; when both have it they must agree. */
static sp_status read_tied(const reader *r, sp_model_shape *shape)
{
    bool top = false, text = false;
    bool in_text = json_is_boolean(json_object_get(r->text, "tie_word_embeddings"));
    bool in_top = json_is_boolean(json_object_get(r->top, "tie_word_embeddings"));
    sp_status status =
        sp_json_bool(r->top, "tie_word_embeddings", false, false, NULL, &top, r->error);

    if (status == SP_OK)
        status = sp_json_bool(r->text, "tie_word_embeddings", false, false, NULL, &text, r->error);
    if (status != SP_OK)
        return status;
    if (in_top && in_text && top != text)
        return sp_fail(r->error, SP_ERR_INPUT, NULL, "tie_word_embeddings", -1,
                       "config.json: tie_word_embeddings is %s, and %s in text_config",
                       top ? "true" : "false", text ? "true" : "false");
    shape->tied_embeddings = in_top ? top : in_text ? text : r->architecture->tied;
    return SP_OK;
}

/* A window that no text can be longer than is none. */
/* What transformers takes for a window that the file leaves out; null is none. */
#define WINDOW_LEFT_OUT 4096

static sp_status check_window(const reader *r)
{
    const json_t *window = json_object_get(r->text, "sliding_window");
    json_int_t width = window ? json_integer_value(window) : WINDOW_LEFT_OUT;
    json_int_t positions = json_integer_value(json_object_get(r->text, "max_position_embeddings"));

    if (!r->architecture->always_windowed || json_is_null(window) || width >= positions)
        return SP_OK;
    return unsupported(r, "sliding_window", "sliding-window attention is not served");
}

static sp_status check_unserved(const reader *r)
{
    const char *activation;
    bool window = false;
    sp_status status = sp_json_string(r->text, "hidden_act", false, NULL, &activation, r->error);

    if (status == SP_OK)
        status = sp_json_bool(r->text, "use_sliding_window", false, false, NULL, &window, r->error);
    if (status != SP_OK)
        return status;
    if (activation && strcmp(activation, "silu") != 0)
        return sp_fail(r->error, SP_ERR_UNSUPPORTED, NULL, "hidden_act", -1,
                       "config.json: the activation \"%.100s\" is not served; silu is", activation);
    if (window)
        return unsupported(r, "use_sliding_window", "sliding-window attention is not served");
    return check_window(r);
}

static sp_status read_trunk(const reader *r, sp_model_shape *shape)
{
    const count_field fields[] = {
        {"num_hidden_layers", LAYERS_MAX, &shape->layers},
        {"hidden_size", WIDTH_MAX, &shape->hidden},
        {"vocab_size", WIDTH_MAX, &shape->vocab},
        {"max_position_embeddings", WIDTH_MAX, &shape->max_positions},
    };
    double epsilon = 0;
    sp_status status = read_counts(r, fields, sizeof fields / sizeof *fields);

    if (status == SP_OK)
        status = sp_json_double(r->text, "rms_norm_eps", true, 0, NULL, &epsilon, r->error);
    if (status != SP_OK)
        return status;
    if (!(epsilon >= 0 && epsilon < 1))
        return sp_fail(r->error, SP_ERR_INPUT, NULL, "rms_norm_eps", -1,
                       "config.json: rms_norm_eps must be from 0 to 1");
    shape->rms_norm_eps = (float)epsilon;
    shape->zero_centred_norms = is_hybrid(shape->family);
    return SP_OK;
}

static sp_status read_shape(reader *r, sp_model_shape *shape)
{
    sp_status status = read_architecture(r);

    if (status != SP_OK)
        return status;
    shape->family = r->architecture->family;
    status = check_unserved(r);
    if (status == SP_OK)
        status = read_trunk(r, shape);
    if (status == SP_OK)
        status = read_attention(r, shape);
    if (status == SP_OK && is_moe(shape->family))
        status = read_moe(r, shape);
    if (status == SP_OK && is_hybrid(shape->family))
        status = read_gdn(r, shape);
    if (status == SP_OK)
        status = read_tied(r, shape);
    if (status == SP_OK)
        status = read_eos(r, shape);
    return status;
}

static sp_status read_layers(const reader *r, sp_model_shape *shape, sp_layer_plan *layers)
{
    bool any_dense = true;
    sp_status status = read_layer_kinds(r, shape, layers);

    if (status == SP_OK && r->architecture->skips_rope)
        status = read_rope_layers(r, shape, layers);
    if (status == SP_OK && is_moe(shape->family))
        status = read_moe_layers(r, shape, layers, &any_dense);
    if (status == SP_OK && any_dense)
        status = read_count(r, "intermediate_size", true, WIDTH_MAX, 0, &shape->intermediate);
    return status;
}

sp_status sp_model_shape_read(const json_t *config, sp_model_shape *out_shape,
                              sp_layer_plan **out_layers, sp_error *error)
{
    const json_t *text = json_object_get(config, "text_config");
    reader r = {.top = config, .text = text ? text : config, .error = error};
    sp_model_shape shape = {.struct_bytes = sizeof shape};
    sp_layer_plan *layers;
    sp_status status;

    if (!json_is_object(config) || !json_is_object(r.text))
        return sp_fail(error, SP_ERR_INPUT, NULL, "text_config", 0,
                       "config.json: the top level, or text_config, is no object");
    status = read_shape(&r, &shape);
    if (status != SP_OK)
        return status;
    layers = sp_calloc((size_t)shape.layers, sizeof *layers);
    if (!layers)
        return sp_fail_memory(error, (size_t)shape.layers * sizeof *layers, "the layers");
    status = read_layers(&r, &shape, layers);
    if (status != SP_OK) {
        sp_free(layers);
        return status;
    }
    *out_shape = shape;
    *out_layers = layers;
    return SP_OK;
}
