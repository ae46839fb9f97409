/*
 * module_key.h: the name of a tensor → what it is. Pure, and without a model: whether a model has
 * such a place is asked afterwards.
 */
#ifndef SP_ADAPTER_MODULE_KEY_H
#define SP_ADAPTER_MODULE_KEY_H

#include <sidepath/adapter.h>

typedef enum sp_key_role {
    SP_ROLE_A,         /* lora_A.weight, lora_embedding_A */
    SP_ROLE_B,         /* lora_B.weight, lora_embedding_B */
    SP_ROLE_TABLE,     /* a whole table: embed_tokens.weight, token_adapter.base_layer.weight */
    SP_ROLE_TOKENS,    /* token_adapter.trainable_tokens_delta */
    SP_ROLE_BASE_COPY, /* embed_tokens.base_layer.weight beside a pair */
    SP_ROLE_MAGNITUDE, /* DoRA's lora_magnitude_vector */
    SP_ROLE_BIAS       /* any ".bias" */
} sp_key_role;

/* Fused experts: two pairs hang on one module, told apart by nesting, not by name. */
typedef enum sp_key_fused {
    SP_FUSED_NONE,
    SP_FUSED_OUTER, /* mlp.experts.lora_A */
    SP_FUSED_INNER  /* mlp.experts.base_layer.lora_A */
} sp_key_fused;

typedef struct sp_module_key {
    sp_key_role role;
    int32_t layer; /* -1 for embed_tokens and lm_head */
    sp_module module;
    int32_t expert; /* -1 where the module is no single expert */
    sp_key_fused fused;
    const char *path; /* the module's path as PEFT saw it, inside `name`: "model.layers.0.…" */
    size_t path_bytes;
    const char *adapter_name; /* inside `name`; NULL when the key has none */
    size_t adapter_name_bytes;
} sp_module_key;

/*
 * `unrecognized-tensor`, `not-peft-key`, `unknown-prefix`, `unsupported-module`,
 * `malformed-layer-index`, `malformed-expert-index`; the subject is the name. For a fused key
 * `module` is SP_MODULE_EXPERT_GATE_PROJ and means the experts as a whole.
 */
sp_status sp_module_key_parse(const char *name, sp_module_key *out_key, sp_error *error);

/*
 * Whether the model has this place: `layer-out-of-range`, `expert-out-of-range`,
 * `expert-on-dense-model`, `wrong-layer-kind` (lists the layers that have it),
 * `unsupported-module`.
 */
sp_status sp_module_key_check(const sp_geometry *geometry, const sp_module_key *key,
                              const char *name, sp_error *error);

#endif
