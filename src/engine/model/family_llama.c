/*
 * family_llama.c: the Llama types, dense: Llama, Mistral, Qwen2, SmolLM2 and SmolLM3. Their
 * differences are in the shape: biases, the scaling of RoPE, layers that do not rotate.
 */
#include "engine/model/family.h"

/* The activations. H hidden, Q = q_heads * head_dim, K = kv_heads * head_dim, I intermediate. */
enum {
    RESIDUAL, /* [rows, H] */
    HIDDEN,   /* [rows, H] normed: what the next linear maps read */
    Q,        /* [rows, Q] */
    K,        /* [rows, K] */
    V,        /* [rows, K] */
    ATTENDED, /* [rows, Q] */
    GATE,     /* [rows, I] */
    UP,       /* [rows, I] */
    OUTPUT,   /* [rows, H] of o_proj and down_proj, before it is added to the residual */
    N_ACTIVATIONS
};

typedef struct layer_weights {
    sp_norm input_norm;       /* [H] */
    sp_linear q, k, v, o;     /* [Q, H] [K, H] [K, H] [H, Q] */
    bool unrotated;           /* of q and k */
    sp_norm post_norm;        /* [H] */
    sp_linear gate, up, down; /* [I, H] [I, H] [H, I] */
} layer_weights;

static int32_t widths(const sp_model_shape *shape, int32_t out_widths[SP_ROWS_MAX])
{
    out_widths[RESIDUAL] = out_widths[HIDDEN] = out_widths[OUTPUT] = shape->hidden;
    out_widths[Q] = out_widths[ATTENDED] = shape->q_heads * shape->head_dim;
    out_widths[K] = out_widths[V] = shape->kv_heads * shape->head_dim;
    out_widths[GATE] = out_widths[UP] = shape->intermediate;
    return N_ACTIVATIONS;
}

static void load_layer(sp_weight_loader *loader, int32_t layer, void *out_layer)
{
    const sp_model_shape *shape = sp_weight_loader_shape(loader);
    layer_weights *w = out_layer;
    bool bias = shape->attention_bias, mlp_bias = shape->mlp_bias;
    int32_t hidden = shape->hidden, inner = shape->intermediate, head = shape->head_dim;
    int32_t q = shape->q_heads * head, kv = shape->kv_heads * head;

    w->unrotated = sp_weight_loader_kind(loader, layer) == SP_LAYER_FULL_ATTENTION_NO_ROPE;
    sp_load_norm(loader, layer, "input_layernorm", hidden, &w->input_norm);
    sp_load_linear(loader, layer, "self_attn.q_proj", q, hidden, bias, &w->q);
    sp_load_linear(loader, layer, "self_attn.k_proj", kv, hidden, bias, &w->k);
    sp_load_linear(loader, layer, "self_attn.v_proj", kv, hidden, bias, &w->v);
    sp_load_linear(loader, layer, "self_attn.o_proj", hidden, q, shape->attention_output_bias,
                   &w->o);
    sp_load_norm(loader, layer, "post_attention_layernorm", hidden, &w->post_norm);
    sp_load_linear(loader, layer, "mlp.gate_proj", inner, hidden, mlp_bias, &w->gate);
    sp_load_linear(loader, layer, "mlp.up_proj", inner, hidden, mlp_bias, &w->up);
    sp_load_linear(loader, layer, "mlp.down_proj", hidden, inner, mlp_bias, &w->down);
}

/* One layer, from the residual and its norm by this layer's input norm to the residual and its norm
 * by `next`. */
static void run_layer(sp_ops *ops, int32_t layer, const layer_weights *w, const sp_norm *next)
{
    const sp_projection qkv[] = {{&w->q, Q}, {&w->k, K}, {&w->v, V}};
    const sp_projection o[] = {{&w->o, OUTPUT}};
    const sp_projection gate_up[] = {{&w->gate, GATE}, {&w->up, UP}};
    const sp_projection down[] = {{&w->down, OUTPUT}};
    const sp_rope_call rope = {.q = Q, .k = K, .v = V, .unrotated = w->unrotated, .layer = layer};

    sp_op_linear(ops, HIDDEN, qkv, 3);
    sp_op_rope_and_cache(ops, &rope);
    sp_op_attention(ops, Q, layer, ATTENDED);
    sp_op_linear(ops, ATTENDED, o, 1);
    sp_op_add_norm(ops, RESIDUAL, OUTPUT, &w->post_norm, HIDDEN);

    sp_op_linear(ops, HIDDEN, gate_up, 2);
    sp_op_silu_mul(ops, GATE, UP);
    sp_op_linear(ops, GATE, down, 1);
    sp_op_add_norm(ops, RESIDUAL, OUTPUT, next, HIDDEN);
}

static void pass(const sp_model *model, sp_ops *ops)
{
    const layer_weights *w = model->layers;
    int32_t layers = model->shape.layers;

    sp_op_embed(ops, &model->embed, RESIDUAL);
    sp_op_norm(ops, RESIDUAL, &w[0].input_norm, HIDDEN);
    for (int32_t layer = 0; layer < layers; layer++)
        run_layer(ops, layer, &w[layer],
                  layer + 1 < layers ? &w[layer + 1].input_norm : &model->final_norm);
}

const sp_family_row sp_family_llama = {
    .family = SP_FAMILY_LLAMA,
    .name = "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, SmolLM3ForCausalLM",
    .layer_bytes = sizeof(layer_weights),
    .widths = widths,
    .load_layer = load_layer,
    .pass = pass,
    .final = HIDDEN,
};
