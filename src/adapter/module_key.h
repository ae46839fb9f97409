/*
 * module_key.h: a tensor's name → its role and place. Where all names of the model are in the table
 * of known modules, or no model is given, the place is parsed by their grammar and then checked
 * against the model; in a model with other names it is looked up. Pure; any thread. geometry may be
 * NULL where said, name and out_key may not; error may be.
 */
#ifndef SP_ADAPTER_MODULE_KEY_H
#define SP_ADAPTER_MODULE_KEY_H

#include "adapter/geometry.h"

typedef enum sp_key_role {
    SP_ROLE_A,         /* lora_A.weight, lora_embedding_A */
    SP_ROLE_B,         /* lora_B.weight, lora_embedding_B */
    SP_ROLE_TABLE,     /* a whole table: embed_tokens.weight, token_adapter.base_layer.weight */
    SP_ROLE_TOKENS,    /* token_adapter.trainable_tokens_delta */
    SP_ROLE_BASE_COPY, /* embed_tokens.base_layer.weight beside a pair */
    SP_ROLE_MAGNITUDE, /* DoRA's lora_magnitude_vector */
    SP_ROLE_BIAS,      /* any ".bias" but the next */
    SP_ROLE_BIAS_COPY  /* lm_head.base_layer.bias beside a pair */
} sp_key_role;

/* Fused experts: two pairs belong to one module, distinguished by nesting, not by name. */
typedef enum sp_key_fused {
    SP_FUSED_NONE,
    SP_FUSED_OUTER, /* mlp.experts.lora_A */
    SP_FUSED_INNER  /* mlp.experts.base_layer.lora_A */
} sp_key_fused;

typedef struct sp_module_key {
    sp_key_role role;
    int32_t layer;    /* -1 outside the layers */
    sp_module module; /* of the table; SP_MODULE_OTHER: identified only by its path */
    sp_site_kind kind;
    int32_t expert; /* -1 where the module is not a single expert */
    int32_t site;   /* in the geometry; -1 without one, and for a fused key */
    sp_key_fused fused;
    const char *path; /* the module's path as PEFT saw it, inside `name`: "model.layers.0.…" */
    size_t path_bytes;
    const char *adapter_name; /* inside `name`; NULL when the key has none */
    size_t adapter_name_bytes;
} sp_module_key;

/*
 * Name to role and place; the place is checked against the geometry, unless that is NULL. The codes
 * of the two below.
 */
sp_status sp_module_key_read(const sp_geometry *geometry, const char *name, sp_module_key *out_key,
                             sp_error *error);

/* The two steps of it for the names of the table, and the one for any other. */

/*
 * `unrecognized-tensor`, `not-peft-key`, `unknown-prefix`, `unsupported-module`,
 * `malformed-layer-index`, `malformed-expert-index`; the subject is the name. For a fused key
 * `module` is SP_MODULE_EXPERT_GATE_PROJ and means the experts as a whole.
 */
sp_status sp_module_key_parse(const char *name, sp_module_key *out_key, sp_error *error);

/*
 * Checks that the model has this place: `layer-out-of-range`, `expert-out-of-range`,
 * `expert-on-dense-model`, `wrong-layer-kind` (lists the layers that have it),
 * `unsupported-module`. Sets key->site.
 */
sp_status sp_module_key_check(const sp_geometry *geometry, sp_module_key *key, const char *name,
                              sp_error *error);

/*
 * Finds key->path, and fills layer, expert, kind, site and the table's module. Where the geometry
 * has no such path: `unknown-prefix`, `layer-out-of-range`, `expert-out-of-range`,
 * `wrong-layer-kind`, `malformed-layer-index`, `unsupported-module`.
 */
sp_status sp_module_key_find(const sp_geometry *geometry, sp_module_key *key, const char *name,
                             sp_error *error);

/* Whether the path starts with a wrapper's name, as torch.compile or distributed wrappers add
 * it. */
bool sp_path_is_wrapped(const char *path, size_t n);
/* Refuses a name with `unknown-prefix`, and returns that status. */
sp_status sp_refuse_prefix(const char *name, const char *path, size_t n, sp_error *error);

#endif
