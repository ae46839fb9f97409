#include "engine/model/family.h"

#include <math.h>

const sp_family_row *sp_family_find(sp_family family)
{
    for (const sp_family_row *const *row = sp_families; *row; row++)
        if ((*row)->family == family)
            return *row;
    return NULL;
}

static int32_t recurrent_layers(const sp_model *model)
{
    int32_t n = 0;

    for (int32_t i = 0; i < model->shape.layers; i++)
        n += sp_geometry_layer_kind(model->geometry, i) == SP_LAYER_LINEAR_ATTENTION;
    return n;
}

sp_attention_shape sp_family_attention(const sp_model *model)
{
    const sp_model_shape *shape = &model->shape;

    return (sp_attention_shape){
        .layers = shape->layers - recurrent_layers(model),
        .q_heads = shape->q_heads,
        .kv_heads = shape->kv_heads,
        .head_dim = shape->head_dim,
        .scale = (float)(1.0 / sqrt((double)shape->head_dim)),
    };
}

/* The configuration's reader made sure that it is a whole number. */
int32_t sp_family_rotated_pairs(const sp_model_shape *shape)
{
    return (int32_t)lround((double)shape->head_dim * (double)shape->partial_rotary_factor / 2);
}

static int32_t count_moe_layers(const sp_model *model)
{
    int32_t n = 0;

    for (int32_t layer = 0; layer < model->shape.layers; layer++)
        n += sp_geometry_find_module(model->geometry, layer, "mlp.gate", -1) >= 0;
    return n;
}

sp_moe_shape sp_family_moe(const sp_model *model, int32_t window_rows)
{
    const sp_model_shape *shape = &model->shape;

    if (shape->experts == 0)
        return (sp_moe_shape){0};
    return (sp_moe_shape){
        .experts = shape->experts,
        .per_token = shape->experts_per_token,
        .inner = shape->expert_intermediate,
        .window_rows = window_rows,
        .layers = count_moe_layers(model),
    };
}

sp_delta_rule_shape sp_family_delta_rule(const sp_model *model, int32_t states, int32_t snapshots)
{
    const sp_model_shape *shape = &model->shape;
    sp_delta_rule_shape rule = {
        .layers = recurrent_layers(model),
        .k_heads = shape->gdn_key_heads,
        .v_heads = shape->gdn_value_heads,
        .k_dim = shape->gdn_key_head_dim,
        .v_dim = shape->gdn_value_head_dim,
        .conv_width = shape->gdn_conv_kernel,
        .fused_inputs = shape->gdn_fused_inputs,
        .slots = states,
        .snapshots = snapshots,
    };

    return rule.layers > 0 ? rule : (sp_delta_rule_shape){0};
}

static void run_pass(void *user, sp_ops *ops)
{
    const sp_model *model = user;

    model->family->pass(model, ops);
}

sp_status sp_family_forward(const sp_model *model, sp_ops *ops, const sp_step *step)
{
    return sp_op_step(ops, step, run_pass, (void *)(uintptr_t)model);
}

sp_status sp_family_prepare(const sp_model *model, sp_ops *ops)
{
    return sp_op_prepare(ops, run_pass, (void *)(uintptr_t)model, &model->head);
}

sp_status sp_family_logits(const sp_model *model, sp_ops *ops, const int32_t *rows, int32_t n_rows)
{
    return sp_op_logits(ops, model->family->final, &model->head, rows, n_rows);
}
