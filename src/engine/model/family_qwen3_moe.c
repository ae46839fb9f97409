/*
 * family_qwen3_moe.c: Qwen3MoeForCausalLM: the attention of Qwen3, and experts in place of the
 * dense FFN in all layers but those that config.json excepts (mlp_only_layers,
 * decoder_sparse_step).
 */
#include "engine/model/family.h"
#include "engine/model/moe.h"

/* The activations. H hidden, Q = q_heads * head_dim, K = kv_heads * head_dim, I intermediate, E
 * experts. */
enum {
    RESIDUAL, /* [rows, H] */
    HIDDEN,   /* [rows, H] normed: what the next linear maps read */
    Q,        /* [rows, Q] */
    K,        /* [rows, K] */
    V,        /* [rows, K] */
    ATTENDED, /* [rows, Q] */
    GATE,     /* [rows, I] */
    UP,       /* [rows, I] */
    ROUTED,   /* [rows, E] FP32 logits of the router */
    OUTPUT,   /* [rows, H] of attention and FFN, before it is added to the residual */
    N_ACTIVATIONS
};

typedef struct layer_weights {
    sp_norm input_norm;     /* [H] */
    sp_linear q, k, v, o;   /* [Q, H] [K, H] [K, H] [H, Q] */
    sp_norm q_norm, k_norm; /* [head_dim] */
    sp_norm post_norm;      /* [H] */
    bool has_experts;
    sp_linear gate, up, down; /* [I, H] [I, H] [H, I], without experts */
    sp_moe moe;
} layer_weights;

static int32_t widths(const sp_model_shape *shape, int32_t out_widths[SP_ROWS_MAX])
{
    out_widths[RESIDUAL] = out_widths[HIDDEN] = out_widths[OUTPUT] = shape->hidden;
    out_widths[Q] = out_widths[ATTENDED] = shape->q_heads * shape->head_dim;
    out_widths[K] = out_widths[V] = shape->kv_heads * shape->head_dim;
    out_widths[GATE] = out_widths[UP] = shape->intermediate;
    out_widths[ROUTED] = shape->experts;
    return N_ACTIVATIONS;
}

static void load_layer(sp_weight_loader *loader, int32_t layer, void *out_layer)
{
    const sp_model_shape *shape = sp_weight_loader_shape(loader);
    layer_weights *w = out_layer;
    bool bias = shape->attention_bias;
    int32_t hidden = shape->hidden, inner = shape->intermediate, head = shape->head_dim;
    int32_t q = shape->q_heads * head, kv = shape->kv_heads * head;

    sp_load_norm(loader, layer, "input_layernorm", hidden, &w->input_norm);
    sp_load_linear(loader, layer, "self_attn.q_proj", q, hidden, bias, &w->q);
    sp_load_linear(loader, layer, "self_attn.k_proj", kv, hidden, bias, &w->k);
    sp_load_linear(loader, layer, "self_attn.v_proj", kv, hidden, bias, &w->v);
    sp_load_linear(loader, layer, "self_attn.o_proj", hidden, q, shape->attention_output_bias,
                   &w->o);
    sp_load_norm(loader, layer, "self_attn.q_norm", head, &w->q_norm);
    sp_load_norm(loader, layer, "self_attn.k_norm", head, &w->k_norm);
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
static void run_layer(sp_ops *ops, const sp_model_shape *shape, int32_t layer,
                      const layer_weights *w, const sp_norm *next)
{
    const sp_projection qkv[] = {{&w->q, Q}, {&w->k, K}, {&w->v, V}};
    const sp_projection o[] = {{&w->o, OUTPUT}};
    const sp_moe_rows moe = {.x = HIDDEN, .logits = ROUTED, .y = OUTPUT};
    const sp_rope_call rope = {
        .q = Q, .k = K, .v = V, .q_norm = &w->q_norm, .k_norm = &w->k_norm, .layer = layer};

    sp_op_linear(ops, HIDDEN, qkv, 3);
    sp_op_rope_and_cache(ops, &rope);
    sp_op_attention(ops, Q, layer, ATTENDED);
    sp_op_linear(ops, ATTENDED, o, 1);
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
        run_layer(ops, &model->shape, layer, &w[layer],
                  layer + 1 < layers ? &w[layer + 1].input_norm : &model->final_norm);
}

const sp_family_row sp_family_qwen3_moe = {
    .family = SP_FAMILY_QWEN3_MOE,
    .name = "Qwen3MoeForCausalLM",
    .layer_bytes = sizeof(layer_weights),
    .widths = widths,
    .fp32_rows = SP_ROWS_BIT(ROUTED),
    .load_layer = load_layer,
    .pass = pass,
    .final = HIDDEN,
};
