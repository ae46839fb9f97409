/*
 * moe.h: the mixture of experts of a layer, for the families that have one: a router, its experts,
 * and in some a shared expert with a gate of its own, that every row goes through.
 */
#ifndef SP_ENGINE_MODEL_MOE_H
#define SP_ENGINE_MODEL_MOE_H

#include "engine/model/weight_loader.h"

/* E experts, H hidden, S the shared expert's intermediate width. */
typedef struct sp_moe {
    sp_linear router; /* [E, H] */
    sp_experts experts;
    sp_linear shared_gate, shared_up, shared_down; /* [S, H] [S, H] [H, S] */
    sp_linear shared_switch;                       /* [1, H] mlp.shared_expert_gate */
} sp_moe;

/* Activations. `shared` and those after it are used with a shared expert only. */
typedef struct sp_moe_rows {
    sp_rows x;                       /* [H] */
    sp_rows logits;                  /* [E], FP32 */
    sp_rows y;                       /* [H] */
    sp_rows shared_gate, shared_up;  /* [S] */
    sp_rows shared_y, shared_switch; /* [H], and [1] in FP32 */
} sp_moe_rows;

/* "mlp.gate", the experts, and where the shape has one "mlp.shared_expert" and its gate. *out_moe
 * must not be moved until the model is closed. */
void sp_load_moe(sp_weight_loader *loader, int32_t layer, sp_moe *out_moe);

/* y = the experts' output for x, and the shared expert's. */
void sp_run_moe(sp_ops *ops, const sp_model_shape *shape, const sp_moe *moe,
                const sp_moe_rows *rows);

#endif
