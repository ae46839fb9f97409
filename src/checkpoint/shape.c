/*
 * shape.c: config.json of a Hugging Face checkpoint → numbers.
 *
 * Five families, in the styles of transformers 4 and 5. What would change the mathematics and is
 * not supported (scaled RoPE, sliding windows, another activation) is refused by name, because a
 * base that runs slightly wrong is worse than one that does not start.
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

static const struct {
    const char *architecture, *model_type, *text_model_type;
    sp_family family;
} families[] = {
    {"Qwen3ForCausalLM", "qwen3", "qwen3", SP_FAMILY_QWEN3},
    {"Qwen3MoeForCausalLM", "qwen3_moe", "qwen3_moe", SP_FAMILY_QWEN3_MOE},
    {"Qwen3NextForCausalLM", "qwen3_next", "qwen3_next", SP_FAMILY_QWEN3_NEXT},
    {"Qwen3_5ForCausalLM", "qwen3_5_text", "qwen3_5_text", SP_FAMILY_QWEN35},
    {"Qwen3_5ForConditionalGeneration", "qwen3_5", "qwen3_5_text", SP_FAMILY_QWEN35},
    {"Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", "qwen3_5_moe_text", SP_FAMILY_QWEN35_MOE},
    {"Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", "qwen3_5_moe_text", SP_FAMILY_QWEN35_MOE},
};
#define N_FAMILIES (sizeof families / sizeof *families)

static bool is_one_of(const char *text, const char *a, const char *b)
{
    return strcmp(text, a) == 0 || strcmp(text, b) == 0;
}

/* The architecture decides; without one, the model type. Both must agree. */
static sp_status read_family(const reader *r, sp_family *out_family)
{
    const json_t *list = json_object_get(r->top, "architectures");
    const char *architecture = json_string_value(json_array_get(list, 0));
    const char *model_type;
    bool found = false;
    sp_status status = sp_json_string(r->top, "model_type", false, NULL, &model_type, r->error);

    if (status != SP_OK)
        return status;
    if (!architecture && !model_type)
        return sp_fail(r->error, SP_ERR_INPUT, NULL, "architectures", -1,
                       "config.json has neither \"architectures\" nor \"model_type\"");
    for (size_t i = 0; i < N_FAMILIES && !found; i++) {
        if (architecture && strcmp(architecture, families[i].architecture) != 0)
            continue;
        if (model_type &&
            !is_one_of(model_type, families[i].model_type, families[i].text_model_type))
            continue;
        *out_family = families[i].family;
        found = true;
    }
    if (!found)
        return sp_fail(r->error, SP_ERR_UNSUPPORTED, NULL, "architectures", -1,
                       "the architecture %.100s (model_type %.100s) is not served; Qwen3, "
                       "Qwen3Moe, Qwen3Next, Qwen3_5 and Qwen3_5Moe are",
                       architecture ? architecture : "?", model_type ? model_type : "?");
    return SP_OK;
}

static bool is_hybrid(sp_family family)
{
    return family == SP_FAMILY_QWEN3_NEXT || family == SP_FAMILY_QWEN35 ||
           family == SP_FAMILY_QWEN35_MOE;
}

static bool is_moe(sp_family family)
{
    return family == SP_FAMILY_QWEN3_MOE || family == SP_FAMILY_QWEN3_NEXT ||
           family == SP_FAMILY_QWEN35_MOE;
}

/* ---- attention and RoPE -------------------------------------------------------------------- */

/* Text positions are the same in all sections of a multimodal RoPE, which makes it a plain one. */
static sp_status check_rope_type(const reader *r, const json_t *rope)
{
    static const char *const names[] = {"rope_type", "type"};

    for (size_t i = 0; i < 2; i++) {
        const char *type;
        sp_status status = sp_json_string(rope, names[i], false, NULL, &type, r->error);

        if (status != SP_OK)
            return status;
        if (type && !is_one_of(type, "default", "mrope"))
            return sp_fail(r->error, SP_ERR_UNSUPPORTED, NULL, names[i], -1,
                           "config.json: RoPE of type \"%.100s\" is not served", type);
    }
    return SP_OK;
}

/* rope_parameters (transformers 5) or rope_scaling (4); NULL when there is neither. */
static sp_status find_rope(const reader *r, const json_t **out_rope)
{
    static const char *const names[] = {"rope_parameters", "rope_scaling"};

    *out_rope = NULL;
    for (size_t i = 0; i < 2; i++) {
        const json_t *value = json_object_get(r->text, names[i]);
        sp_status status;

        if (!value || json_is_null(value))
            continue;
        if (!json_is_object(value))
            return sp_fail(r->error, SP_ERR_INPUT, NULL, names[i], -1,
                           "config.json: \"%s\" is no object", names[i]);
        status = check_rope_type(r, value);
        if (status != SP_OK)
            return status;
        if (!*out_rope)
            *out_rope = value;
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

static sp_status read_rope(const reader *r, sp_model_shape *shape)
{
    const json_t *rope;
    double theta = 0, factor = 1;
    double rotary;
    sp_status status = find_rope(r, &rope);

    if (status == SP_OK)
        status = read_rope_number(r, rope, "rope_theta", true, 0, &theta);
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
    /* Only Qwen3Moe has a fallback in transformers that follows from the other fields. */
    bool required = shape->family != SP_FAMILY_QWEN3_MOE;
    int32_t fallback = shape->hidden / shape->q_heads;
    sp_status status = read_count(r, "head_dim", required, HEADS_MAX, fallback, &shape->head_dim);

    if (status == SP_OK && shape->head_dim < 1)
        return sp_fail(r->error, SP_ERR_INPUT, NULL, "head_dim", -1,
                       "config.json: head_dim must be at least 1");
    return status;
}

static sp_status read_attention(const reader *r, sp_model_shape *shape)
{
    const count_field fields[] = {
        {"num_attention_heads", HEADS_MAX, &shape->q_heads},
        {"num_key_value_heads", HEADS_MAX, &shape->kv_heads},
    };
    bool gate = true;
    sp_status status = read_counts(r, fields, sizeof fields / sizeof *fields);

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
    status = sp_json_bool(r->text, "attention_bias", false, false, NULL, &shape->attention_bias,
                          r->error);
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

static sp_status read_eos(const reader *r, sp_model_shape *shape)
{
    const json_t *value = json_object_get(r->text, "eos_token_id");
    size_t n = json_is_array(value) ? json_array_size(value) : 1;

    if (!value || json_is_null(value))
        value = json_object_get(r->top, "eos_token_id");
    if (!value || json_is_null(value))
        return SP_OK;
    if (json_is_array(value))
        n = json_array_size(value);
    if (n > sizeof shape->eos_token_ids / sizeof *shape->eos_token_ids)
        return unsupported(r, "eos_token_id", "more than 8 end-of-text ids");
    for (size_t i = 0; i < n; i++) {
        const json_t *id = json_is_array(value) ? json_array_get(value, i) : value;

        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            json_integer_value(id) >= shape->vocab)
            return sp_fail(r->error, SP_ERR_INPUT, NULL, "eos_token_id", (int64_t)i,
                           "config.json: \"eos_token_id\" is no id of the vocabulary");
        shape->eos_token_ids[shape->n_eos_token_ids++] = (int32_t)json_integer_value(id);
    }
    return SP_OK;
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
    shape->tied_embeddings = in_top ? top : text;
    return SP_OK;
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
    return SP_OK;
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

static sp_status read_shape(const reader *r, sp_model_shape *shape)
{
    sp_status status = read_family(r, &shape->family);

    if (status == SP_OK)
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
