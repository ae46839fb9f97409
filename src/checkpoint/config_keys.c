#include "checkpoint/config_keys.h"

#include "base/error.h"

#include <string.h>

typedef enum key_rule {
    ANY,      /* read elsewhere, or without effect on the forward pass */
    NULL_KEY, /* served only as absent */
    FALSE_KEY,
    ONE_KEY,
    SCALED_KEY /* of a RoPE's object: read where its type scales, else served only as 1 */
} key_rule;

typedef struct config_key {
    const char *name;
    key_rule rule;
} config_key;

static const config_key keys[] = {
    /* the shape */
    {"architectures", ANY},
    {"attention_bias", ANY},
    {"attn_output_gate", ANY},
    {"decoder_sparse_step", ANY},
    {"full_attention_interval", ANY},
    {"head_dim", ANY},
    {"hidden_act", ANY},
    {"hidden_size", ANY},
    {"intermediate_size", ANY},
    {"layer_types", ANY},
    {"linear_conv_kernel_dim", ANY},
    {"linear_key_head_dim", ANY},
    {"linear_num_key_heads", ANY},
    {"linear_num_value_heads", ANY},
    {"linear_value_head_dim", ANY},
    {"max_position_embeddings", ANY},
    {"mlp_bias", ANY},
    {"mlp_only_layers", ANY},
    {"model_type", ANY},
    {"moe_intermediate_size", ANY},
    {"no_rope_layer_interval", ANY},
    {"no_rope_layers", ANY},
    {"norm_topk_prob", ANY},
    {"num_attention_heads", ANY},
    {"num_experts", ANY},
    {"num_experts_per_tok", ANY},
    {"num_hidden_layers", ANY},
    {"num_key_value_heads", ANY},
    {"num_local_experts", ANY},
    {"partial_rotary_factor", ANY},
    {"rms_norm_eps", ANY},
    {"rope_parameters", ANY},
    {"rope_scaling", ANY},
    {"rope_theta", ANY},
    {"shared_expert_intermediate_size", ANY},
    {"text_config", ANY},
    {"tie_word_embeddings", ANY},
    {"use_sliding_window", ANY},
    {"vocab_size", ANY},
    /* ids, types, training, other towers, the program that saved it */
    {"attention_dropout", ANY},
    {"auto_map", ANY},
    {"bos_token_id", ANY},
    {"dtype", ANY},
    {"eos_token_id", ANY},
    {"hidden_dropout", ANY},
    {"image_token_id", ANY},
    {"initializer_range", ANY},
    {"is_llama_config", ANY},
    {"mamba_ssm_dtype", ANY},
    {"max_window_layers", ANY},
    {"mtp_num_hidden_layers", ANY},
    {"mtp_use_dedicated_embeddings", ANY},
    {"output_attentions", ANY},
    {"output_hidden_states", ANY},
    {"output_router_logits", ANY},
    {"pad_token_id", ANY},
    {"pretraining_tp", ANY},
    {"return_dict", ANY},
    {"router_aux_loss_coef", ANY},
    {"sliding_window", ANY},
    {"tokenizer_class", ANY},
    {"torch_dtype", ANY},
    {"transformers.js_config", ANY},
    {"transformers_version", ANY},
    {"unsloth_fixed", ANY},
    {"unsloth_version", ANY},
    {"use_cache", ANY},
    {"video_token_id", ANY},
    {"vision_config", ANY},
    {"vision_end_token_id", ANY},
    {"vision_start_token_id", ANY},
    /* what other families compute */
    {"attention_multiplier", NULL_KEY},
    {"attn_logit_softcapping", NULL_KEY},
    {"clip_qkv", NULL_KEY},
    {"compression_config", NULL_KEY},
    {"embedding_multiplier", ONE_KEY},
    {"embedding_scale", ONE_KEY},
    {"final_logit_softcapping", NULL_KEY},
    {"lm_head_bias", FALSE_KEY},
    {"lm_head_multiplier", ONE_KEY},
    {"logit_scale", ONE_KEY},
    {"logits_scaling", ONE_KEY},
    {"moe_router_bias", FALSE_KEY},
    {"parallel_attn", FALSE_KEY},
    {"qkv_bias", FALSE_KEY},
    {"quantization_config", NULL_KEY},
    {"query_pre_attn_scalar", NULL_KEY},
    {"residual_multiplier", ONE_KEY},
    {"rope_interleaved", FALSE_KEY},
    {"routed_scaling_factor", ONE_KEY},
    {"scale_depth", ONE_KEY},
    {"scale_emb", ONE_KEY},
    {"use_bias", FALSE_KEY},
    {NULL, ANY},
};

static const config_key rope_keys[] = {
    {"mrope_interleaved", ANY},
    {"mrope_section", ANY},
    {"original_max_position_embeddings", ANY}, /* where long-context scaling starts */
    {"partial_rotary_factor", ANY},
    {"rope_theta", ANY},
    {"rope_type", ANY},
    {"type", ANY},
    {"attention_factor", ONE_KEY},
    {"factor", SCALED_KEY},
    {"high_freq_factor", SCALED_KEY},
    {"low_freq_factor", SCALED_KEY},
    {"mscale", ONE_KEY},
    {"mscale_all_dim", ONE_KEY},
    {NULL, ANY},
};

static const config_key *find_key(const config_key *table, const char *name)
{
    while (table->name && strcmp(table->name, name) != 0)
        table++;
    return table->name ? table : NULL;
}

/* The types that have been read (shape.c), by their names. */
static bool is_scaled(const json_t *rope)
{
    const char *type = json_string_value(json_object_get(rope, "rope_type"));

    if (!type)
        type = json_string_value(json_object_get(rope, "type"));
    return type && (strcmp(type, "linear") == 0 || strcmp(type, "llama3") == 0);
}

static bool changes_nothing(const json_t *object, const json_t *value, key_rule rule)
{
    double number = json_number_value(value);

    switch (rule) {
    case ANY:
        return true;
    case NULL_KEY:
        break;
    case FALSE_KEY:
        return json_is_false(value);
    case SCALED_KEY:
        if (is_scaled(object))
            return true;
        return json_is_number(value) && number >= 1 && number <= 1;
    case ONE_KEY:
        return json_is_number(value) && number >= 1 && number <= 1;
    }
    return false;
}

static sp_status check_object(const json_t *object, const config_key *table, const char *before,
                              sp_text *unused, sp_error *error)
{
    const char *name;
    json_t *value;

    json_object_foreach((json_t *)(uintptr_t)object, name, value)
    {
        const config_key *key = find_key(table, name);

        if (json_is_null(value) || name[0] == '_')
            continue;
        if (key && !changes_nothing(object, value, key->rule))
            return sp_fail(error, SP_ERR_UNSUPPORTED, NULL, name, -1,
                           "config.json: \"%s%s\" with this value is not served: it changes what "
                           "the model computes",
                           before, name);
        if (key)
            continue;
        sp_text_add(unused, unused->bytes > 0 ? ", " : "");
        sp_text_add(unused, before);
        sp_text_add_printable(unused, name);
    }
    return unused->failed ? sp_fail_memory(error, 1, "the keys of config.json") : SP_OK;
}

sp_status sp_config_keys_check(const json_t *config, sp_text *unused, sp_error *error)
{
    const json_t *text = json_object_get(config, "text_config");
    const json_t *levels[] = {config, text};
    static const char *const ropes[] = {"rope_parameters", "rope_scaling"};
    sp_status status = SP_OK;

    for (size_t i = 0; i < 2 && levels[i]; i++) {
        if (status == SP_OK)
            status = check_object(levels[i], keys, i ? "text_config." : "", unused, error);
        for (size_t j = 0; j < 2 && status == SP_OK; j++)
            status = check_object(json_object_get(levels[i], ropes[j]), rope_keys, "RoPE's ",
                                  unused, error);
    }
    return status;
}
