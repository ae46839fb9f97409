/*
 * family_qwen3_next.c: Qwen3-Next and Qwen3.5, dense and with experts: most layers are gated delta
 * nets, the others attention whose heads are gated. All have an FFN after it, dense or a mixture of
 * experts with a shared one. The families differ in their numbers, and in whether the inputs of a
 * gated delta net are two linear maps or four.
 */
#include "engine/model/family.h"
#include "engine/model/moe.h"

/* The activations. H hidden, Q = q_heads * head_dim, K = kv_heads * head_dim; of the gated delta
 * net C channels, V values and N value heads; I intermediate, E experts, S of the shared one. */
enum {
    RESIDUAL,      /* [rows, H] */
    HIDDEN,        /* [rows, H] normed: what the next linear maps read */
    Q_GATE,        /* [rows, 2 * Q] of each head q and its gate */
    Q,             /* [rows, Q] */
    K,             /* [rows, K] */
    V,             /* [rows, K] */
    ATTENDED,      /* [rows, Q] */
    QKV,           /* [rows, C], or [rows, C + V] with z */
    Z,             /* [rows, V], or without columns */
    B,             /* [rows, N] FP32, or [rows, 2 * N] with a */
    A,             /* [rows, N] FP32, or without columns */
    MIXED,         /* [rows, V] of the gated delta net */
    GATE,          /* [rows, I] */
    UP,            /* [rows, I] */
    ROUTED,        /* [rows, E] FP32 logits of the router */
    SHARED_GATE,   /* [rows, S] */
    SHARED_UP,     /* [rows, S] */
    SHARED_Y,      /* [rows, H] */
    SHARED_SWITCH, /* [rows, 1] FP32 */
    OUTPUT,        /* [rows, H] of mixer and FFN, before it is added to the residual */
    N_ACTIVATIONS
};

typedef struct attention_weights {
    sp_linear q, k, v, o;   /* [2 * Q, H] [K, H] [K, H] [H, Q] */
    sp_norm q_norm, k_norm; /* [head_dim] */
} attention_weights;

typedef struct delta_weights {
    sp_linear qkv, z, b, a; /* [C, H] [V, H] [N, H] [N, H]; fused: [C + V, H] and [2 * N, H] */
    sp_delta_rule rule;
    sp_linear out; /* [H, V] */
} delta_weights;

typedef struct layer_weights {
    sp_norm input_norm; /* [H] */
    bool is_recurrent;
    int32_t number;              /* among the layers with the same mixer */
    attention_weights attention; /* one of the two */
    delta_weights delta;
    sp_norm post_norm; /* [H] */
    bool has_experts;
    sp_linear gate, up, down; /* [I, H] [I, H] [H, I], without experts */
    sp_moe moe;
} layer_weights;

static int32_t channels_of(const sp_model_shape *shape)
{
    return 2 * shape->gdn_key_heads * shape->gdn_key_head_dim +
           shape->gdn_value_heads * shape->gdn_value_head_dim;
}

static int32_t widths(const sp_model_shape *shape, int32_t out_widths[SP_ROWS_MAX])
{
    int32_t values = shape->gdn_value_heads * shape->gdn_value_head_dim;
    bool fused = shape->gdn_fused_inputs;

    out_widths[RESIDUAL] = out_widths[HIDDEN] = out_widths[OUTPUT] = shape->hidden;
    out_widths[Q] = out_widths[ATTENDED] = shape->q_heads * shape->head_dim;
    out_widths[Q_GATE] = 2 * out_widths[Q];
    out_widths[K] = out_widths[V] = shape->kv_heads * shape->head_dim;
    out_widths[QKV] = channels_of(shape) + (fused ? values : 0);
    out_widths[Z] = fused ? 0 : values;
    out_widths[B] = (fused ? 2 : 1) * shape->gdn_value_heads;
    out_widths[A] = fused ? 0 : shape->gdn_value_heads;
    out_widths[MIXED] = values;
    out_widths[GATE] = out_widths[UP] = shape->intermediate;
    out_widths[ROUTED] = shape->experts;
    out_widths[SHARED_GATE] = out_widths[SHARED_UP] = shape->shared_expert_intermediate;
    out_widths[SHARED_Y] = shape->shared_expert_intermediate > 0 ? shape->hidden : 0;
    out_widths[SHARED_SWITCH] = shape->shared_expert_intermediate > 0 ? 1 : 0;
    return N_ACTIVATIONS;
}

/* ---- weights ------------------------------------------------------------------------------- */

static void load_attention(sp_weight_loader *loader, int32_t layer, attention_weights *w)
{
    const sp_model_shape *shape = sp_weight_loader_shape(loader);
    bool bias = shape->attention_bias;
    int32_t hidden = shape->hidden, head = shape->head_dim;
    int32_t q = shape->q_heads * head, kv = shape->kv_heads * head;

    sp_load_linear(loader, layer, "self_attn.q_proj", 2 * q, hidden, bias, &w->q);
    sp_load_linear(loader, layer, "self_attn.k_proj", kv, hidden, bias, &w->k);
    sp_load_linear(loader, layer, "self_attn.v_proj", kv, hidden, bias, &w->v);
    sp_load_linear(loader, layer, "self_attn.o_proj", hidden, q, shape->attention_output_bias,
                   &w->o);
    sp_load_norm(loader, layer, "self_attn.q_norm", head, &w->q_norm);
    sp_load_norm(loader, layer, "self_attn.k_norm", head, &w->k_norm);
}

static void load_delta_inputs(sp_weight_loader *loader, int32_t layer, delta_weights *w)
{
    const sp_model_shape *shape = sp_weight_loader_shape(loader);
    int32_t hidden = shape->hidden, channels = channels_of(shape), heads = shape->gdn_value_heads;
    int32_t values = heads * shape->gdn_value_head_dim;

    if (shape->gdn_fused_inputs) {
        sp_load_linear(loader, layer, "linear_attn.in_proj_qkvz", channels + values, hidden, false,
                       &w->qkv);
        sp_load_linear(loader, layer, "linear_attn.in_proj_ba", 2 * heads, hidden, false, &w->b);
        return;
    }
    sp_load_linear(loader, layer, "linear_attn.in_proj_qkv", channels, hidden, false, &w->qkv);
    sp_load_linear(loader, layer, "linear_attn.in_proj_z", values, hidden, false, &w->z);
    sp_load_linear(loader, layer, "linear_attn.in_proj_b", heads, hidden, false, &w->b);
    sp_load_linear(loader, layer, "linear_attn.in_proj_a", heads, hidden, false, &w->a);
}

static void load_delta(sp_weight_loader *loader, int32_t layer, delta_weights *w)
{
    const sp_model_shape *shape = sp_weight_loader_shape(loader);
    int32_t heads = shape->gdn_value_heads, v_dim = shape->gdn_value_head_dim;

    load_delta_inputs(loader, layer, w);
    sp_load_conv(loader, layer, "linear_attn.conv1d", channels_of(shape), shape->gdn_conv_kernel,
                 &w->rule.conv);
    sp_load_fp32(loader, layer, "linear_attn.A_log", heads, &w->rule.a_log);
    sp_load_fp32(loader, layer, "linear_attn.dt_bias", heads, &w->rule.dt_bias);
    sp_load_fp32(loader, layer, "linear_attn.norm.weight", v_dim, &w->rule.norm.weight);
    w->rule.norm.eps = shape->rms_norm_eps;
    sp_load_linear(loader, layer, "linear_attn.out_proj", shape->hidden, heads * v_dim, false,
                   &w->out);
}

static void load_layer(sp_weight_loader *loader, int32_t layer, void *out_layer)
{
    const sp_model_shape *shape = sp_weight_loader_shape(loader);
    layer_weights *w = out_layer;
    sp_layer_kind kind = sp_weight_loader_kind(loader, layer);
    int32_t hidden = shape->hidden, inner = shape->intermediate;

    w->is_recurrent = kind == SP_LAYER_LINEAR_ATTENTION;
    for (int32_t before = 0; before < layer; before++)
        w->number += sp_weight_loader_kind(loader, before) == kind;
    sp_load_norm(loader, layer, "input_layernorm", hidden, &w->input_norm);
    if (w->is_recurrent)
        load_delta(loader, layer, &w->delta);
    else
        load_attention(loader, layer, &w->attention);
    sp_load_norm(loader, layer, "post_attention_layernorm", hidden, &w->post_norm);
    w->has_experts = sp_weight_loader_is_moe(loader, layer);
    if (w->has_experts) {
        sp_load_moe(loader, layer, &w->moe);
        return;
    }
    sp_load_linear(loader, layer, "mlp.gate_proj", inner, hidden, false, &w->gate);
    sp_load_linear(loader, layer, "mlp.up_proj", inner, hidden, false, &w->up);
    sp_load_linear(loader, layer, "mlp.down_proj", hidden, inner, false, &w->down);
}

/* ---- the pass ------------------------------------------------------------------------------ */

static void run_attention(sp_ops *ops, const layer_weights *layer)
{
    const attention_weights *w = &layer->attention;
    const sp_projection qkv[] = {{&w->q, Q_GATE}, {&w->k, K}, {&w->v, V}};
    const sp_projection o[] = {{&w->o, OUTPUT}};
    const sp_rope_call rope = {.q = Q,
                               .k = K,
                               .v = V,
                               .gated = true,
                               .q_gate = Q_GATE,
                               .q_norm = &w->q_norm,
                               .k_norm = &w->k_norm,
                               .layer = layer->number};

    sp_op_linear(ops, HIDDEN, qkv, 3);
    sp_op_rope_and_cache(ops, &rope);
    sp_op_attention(ops, Q, layer->number, ATTENDED);
    sp_op_gate_heads(ops, ATTENDED, Q_GATE);
    sp_op_linear(ops, ATTENDED, o, 1);
}

static void run_delta(sp_ops *ops, const sp_model_shape *shape, const layer_weights *layer)
{
    const delta_weights *w = &layer->delta;
    const sp_projection apart[] = {{&w->qkv, QKV}, {&w->z, Z}, {&w->b, B}, {&w->a, A}};
    const sp_projection fused[] = {{&w->qkv, QKV}, {&w->b, B}};
    const sp_projection out[] = {{&w->out, OUTPUT}};
    const sp_delta_rule_call call = {
        .qkv = QKV, .z = Z, .b = B, .a = A, .rule = &w->rule, .layer = layer->number, .y = MIXED};

    if (shape->gdn_fused_inputs)
        sp_op_linear(ops, HIDDEN, fused, 2);
    else
        sp_op_linear(ops, HIDDEN, apart, 4);
    sp_op_delta_rule(ops, &call);
    sp_op_linear(ops, MIXED, out, 1);
}

static void run_dense(sp_ops *ops, const layer_weights *w)
{
    const sp_projection gate_up[] = {{&w->gate, GATE}, {&w->up, UP}};
    const sp_projection down[] = {{&w->down, OUTPUT}};

    sp_op_linear(ops, HIDDEN, gate_up, 2);
    sp_op_silu_mul(ops, GATE, UP);
    sp_op_linear(ops, GATE, down, 1);
}

/* One layer, from the residual and its norm by this layer's input norm to the residual and its norm
 * by `next`. */
static void run_layer(sp_ops *ops, const sp_model_shape *shape, const layer_weights *w,
                      const sp_norm *next)
{
    const sp_moe_rows moe = {.x = HIDDEN,
                             .logits = ROUTED,
                             .y = OUTPUT,
                             .shared_gate = SHARED_GATE,
                             .shared_up = SHARED_UP,
                             .shared_y = SHARED_Y,
                             .shared_switch = SHARED_SWITCH};

    if (w->is_recurrent)
        run_delta(ops, shape, w);
    else
        run_attention(ops, w);
    sp_op_add_norm(ops, RESIDUAL, OUTPUT, &w->post_norm, HIDDEN);

    if (w->has_experts)
        sp_run_moe(ops, shape, &w->moe, &moe);
    else
        run_dense(ops, w);
    sp_op_add_norm(ops, RESIDUAL, OUTPUT, next, HIDDEN);
}

static void pass(const sp_model *model, sp_ops *ops)
{
    const layer_weights *w = model->layers;
    int32_t layers = model->shape.layers;

    sp_op_embed(ops, &model->embed, RESIDUAL);
    sp_op_norm(ops, RESIDUAL, &w[0].input_norm, HIDDEN);
    for (int32_t layer = 0; layer < layers; layer++)
        run_layer(ops, &model->shape, &w[layer],
                  layer + 1 < layers ? &w[layer + 1].input_norm : &model->final_norm);
}

#define HYBRID_ROW(family_of_row, names)                                                        \
    {                                                                                           \
        .family = (family_of_row), .name = (names), .layer_bytes = sizeof(layer_weights),       \
        .widths = widths,                                                                       \
        .fp32_rows =                                                                            \
            SP_ROWS_BIT(B) | SP_ROWS_BIT(A) | SP_ROWS_BIT(ROUTED) | SP_ROWS_BIT(SHARED_SWITCH), \
        .load_layer = load_layer, .pass = pass, .final = HIDDEN,                                \
    }

const sp_family_row sp_family_qwen3_next = HYBRID_ROW(SP_FAMILY_QWEN3_NEXT, "Qwen3NextForCausalLM");
const sp_family_row sp_family_qwen35 =
    HYBRID_ROW(SP_FAMILY_QWEN35, "Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration");
const sp_family_row sp_family_qwen35_moe =
    HYBRID_ROW(SP_FAMILY_QWEN35_MOE, "Qwen3_5MoeForCausalLM, Qwen3_5MoeForConditionalGeneration");
