#include "engine/model/forward.h"

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

int32_t sp_forward_widths(const sp_model_shape *shape, int32_t out_widths[SP_ROWS_MAX])
{
    int32_t q = shape->q_heads * shape->head_dim, kv = shape->kv_heads * shape->head_dim;

    out_widths[RESIDUAL] = out_widths[HIDDEN] = out_widths[OUTPUT] = shape->hidden;
    out_widths[Q] = out_widths[ATTENDED] = q;
    out_widths[K] = out_widths[V] = kv;
    out_widths[GATE] = out_widths[UP] = shape->intermediate;
    return N_ACTIVATIONS;
}

/* One layer, from the residual and its norm by this layer's input norm to the residual and its norm
 * by `next`. */
static void run_layer(sp_ops *ops, int32_t layer, const sp_layer_weights *w, const sp_norm *next)
{
    const sp_projection qkv[] = {{&w->q, Q}, {&w->k, K}, {&w->v, V}};
    const sp_projection o[] = {{&w->o, OUTPUT}};
    const sp_projection gate_up[] = {{&w->gate, GATE}, {&w->up, UP}};
    const sp_projection down[] = {{&w->down, OUTPUT}};
    const sp_rope_call rope = {
        .q = Q, .k = K, .v = V, .q_norm = &w->q_norm, .k_norm = &w->k_norm, .layer = layer};

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

static void run_pass(void *user, sp_ops *ops)
{
    const sp_model *model = user;
    int32_t layers = model->shape.layers;

    sp_op_embed(ops, &model->embed, RESIDUAL);
    sp_op_norm(ops, RESIDUAL, &model->layers[0].input_norm, HIDDEN);
    for (int32_t layer = 0; layer < layers; layer++)
        run_layer(ops, layer, &model->layers[layer],
                  layer + 1 < layers ? &model->layers[layer + 1].input_norm : &model->final_norm);
}

sp_status sp_forward_run(const sp_model *model, sp_ops *ops, const sp_step *step)
{
    return sp_op_step(ops, step, run_pass, (void *)(uintptr_t)model);
}

sp_status sp_forward_logits(const sp_model *model, sp_ops *ops, const int32_t *rows, int32_t n_rows)
{
    return sp_op_logits(ops, HIDDEN, &model->head, rows, n_rows);
}
