#include "engine/model/moe.h"

void sp_load_moe(sp_weight_loader *loader, int32_t layer, sp_moe *out_moe)
{
    const sp_model_shape *shape = sp_weight_loader_shape(loader);
    int32_t hidden = shape->hidden, shared = shape->shared_expert_intermediate;

    sp_load_linear(loader, layer, "mlp.gate", shape->experts, hidden, false, &out_moe->router);
    sp_load_experts(loader, layer, &out_moe->experts);
    if (shared == 0)
        return;
    sp_load_linear(loader, layer, "mlp.shared_expert.gate_proj", shared, hidden, false,
                   &out_moe->shared_gate);
    sp_load_linear(loader, layer, "mlp.shared_expert.up_proj", shared, hidden, false,
                   &out_moe->shared_up);
    sp_load_linear(loader, layer, "mlp.shared_expert.down_proj", hidden, shared, false,
                   &out_moe->shared_down);
    sp_load_linear(loader, layer, "mlp.shared_expert_gate", 1, hidden, false,
                   &out_moe->shared_switch);
}

void sp_run_moe(sp_ops *ops, const sp_model_shape *shape, const sp_moe *moe,
                const sp_moe_rows *rows)
{
    bool shared = shape->shared_expert_intermediate > 0;
    const sp_projection inputs[] = {{&moe->router, rows->logits},
                                    {&moe->shared_gate, rows->shared_gate},
                                    {&moe->shared_up, rows->shared_up},
                                    {&moe->shared_switch, rows->shared_switch}};
    const sp_projection down[] = {{&moe->shared_down, rows->shared_y}};

    sp_op_linear(ops, rows->x, inputs, shared ? 4 : 1);
    sp_op_route(ops, rows->logits, shape->norm_topk_prob);
    sp_op_experts(ops, rows->x, &moe->experts, rows->y);
    if (!shared)
        return;
    sp_op_silu_mul(ops, rows->shared_gate, rows->shared_up);
    sp_op_linear(ops, rows->shared_gate, down, 1);
    sp_op_add_gated(ops, rows->y, rows->shared_y, rows->shared_switch);
}
