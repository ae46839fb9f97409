/*
 * known_module.h: the names of the model families that config.json is read for, as one table. A
 * geometry made from a config.json takes its sites from these rows; for any other model the host
 * gives rows of its own. The numbers enter digests and are stable.
 */
#ifndef SP_ADAPTER_KNOWN_MODULE_H
#define SP_ADAPTER_KNOWN_MODULE_H

#include <sidepath/adapter.h>

/* Sites of one layer with the same group share their input; -1: alone. */
#define SP_GROUP_ALONE (-1)
#define SP_GROUP_MIXER 0 /* the input of the layer's attention, of either kind */
#define SP_GROUP_FFN   1 /* the input of its FFN, dense or MoE */

/*
 * Number, the path after "layers.N." (without the expert's number) or after the trunk, kind, group.
 * The order is that of sites inside a layer.
 */
#define SP_KNOWN_MODULES(X)                                                         \
    X(SP_MODULE_Q_PROJ, 0, "self_attn.q_proj", LINEAR, MIXER)                       \
    X(SP_MODULE_K_PROJ, 1, "self_attn.k_proj", LINEAR, MIXER)                       \
    X(SP_MODULE_V_PROJ, 2, "self_attn.v_proj", LINEAR, MIXER)                       \
    X(SP_MODULE_O_PROJ, 3, "self_attn.o_proj", LINEAR, ALONE)                       \
    X(SP_MODULE_GDN_IN_QKVZ, 4, "linear_attn.in_proj_qkvz", LINEAR, MIXER)          \
    X(SP_MODULE_GDN_IN_BA, 5, "linear_attn.in_proj_ba", LINEAR, MIXER)              \
    X(SP_MODULE_GDN_IN_QKV, 6, "linear_attn.in_proj_qkv", LINEAR, MIXER)            \
    X(SP_MODULE_GDN_IN_Z, 7, "linear_attn.in_proj_z", LINEAR, MIXER)                \
    X(SP_MODULE_GDN_IN_B, 8, "linear_attn.in_proj_b", LINEAR, MIXER)                \
    X(SP_MODULE_GDN_IN_A, 9, "linear_attn.in_proj_a", LINEAR, MIXER)                \
    X(SP_MODULE_GDN_OUT, 10, "linear_attn.out_proj", LINEAR, ALONE)                 \
    X(SP_MODULE_GATE_PROJ, 11, "mlp.gate_proj", LINEAR, FFN)                        \
    X(SP_MODULE_UP_PROJ, 12, "mlp.up_proj", LINEAR, FFN)                            \
    X(SP_MODULE_DOWN_PROJ, 13, "mlp.down_proj", LINEAR, ALONE)                      \
    X(SP_MODULE_SHARED_GATE_PROJ, 14, "mlp.shared_expert.gate_proj", LINEAR, FFN)   \
    X(SP_MODULE_SHARED_UP_PROJ, 15, "mlp.shared_expert.up_proj", LINEAR, FFN)       \
    X(SP_MODULE_SHARED_DOWN_PROJ, 16, "mlp.shared_expert.down_proj", LINEAR, ALONE) \
    X(SP_MODULE_SHARED_EXPERT_GATE, 17, "mlp.shared_expert_gate", LINEAR, FFN)      \
    X(SP_MODULE_ROUTER, 18, "mlp.gate", ROUTER, FFN)                                \
    X(SP_MODULE_EXPERT_GATE_PROJ, 19, "mlp.experts.gate_proj", EXPERT, ALONE)       \
    X(SP_MODULE_EXPERT_UP_PROJ, 20, "mlp.experts.up_proj", EXPERT, ALONE)           \
    X(SP_MODULE_EXPERT_DOWN_PROJ, 21, "mlp.experts.down_proj", EXPERT, ALONE)       \
    X(SP_MODULE_EMBED_TOKENS, 22, "embed_tokens", EMBEDDING, ALONE)                 \
    X(SP_MODULE_LM_HEAD, 23, "lm_head", HEAD, ALONE)

typedef enum sp_module {
    SP_MODULE_OTHER = -1, /* a name that is not in the table */
#define SP_MODULE_ENUM(symbol, number, name, kind, group) symbol = number,
    SP_KNOWN_MODULES(SP_MODULE_ENUM)
#undef SP_MODULE_ENUM
        SP_MODULE_COUNT = 24
} sp_module;

typedef struct sp_known_module {
    const char *name;
    sp_site_kind kind;
    int32_t group;
} sp_known_module;

extern const sp_known_module sp_known_modules[SP_MODULE_COUNT];

/* The name of one of the table's modules; NULL for any other number. */
const char *sp_module_name(sp_module module);

/* The module of exactly this name of n bytes, or SP_MODULE_OTHER. */
sp_module sp_module_find(const char *name, size_t n);

#define SP_MODULE_BIT(module) ((sp_module_set)1 << (module))
#define SP_MODULES_EXPERTS                                                                 \
    (SP_MODULE_BIT(SP_MODULE_EXPERT_GATE_PROJ) | SP_MODULE_BIT(SP_MODULE_EXPERT_UP_PROJ) | \
     SP_MODULE_BIT(SP_MODULE_EXPERT_DOWN_PROJ))

#endif
