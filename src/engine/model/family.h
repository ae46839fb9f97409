/*
 * family.h: what an engine needs to know about a family of models, as a row of a table: the weights
 * of a layer, and the forward pass in ops. A family is one file (family_qwen3.c) and its row in
 * families.c; its part of config.json is read by checkpoint/shape.c.
 */
#ifndef SP_ENGINE_MODEL_FAMILY_H
#define SP_ENGINE_MODEL_FAMILY_H

#include "engine/model/model.h"
#include "engine/model/weight_loader.h"

typedef struct sp_family_row {
    sp_family family;
    const char *name;   /* as refusals of others list it */
    size_t layer_bytes; /* of the family's own struct of a layer's weights */

    /* Numbers and widths of the pass's activations; returns how many there are. */
    int32_t (*widths)(const sp_model_shape *shape, int32_t out_widths[SP_ROWS_MAX]);
    uint32_t fp32_rows; /* sp_ops_options.fp32_rows */

    /* Looks up the weights of a layer. out_layer is layer_bytes of zeros, at a fixed address until
     * the model is closed. */
    void (*load_layer)(sp_weight_loader *loader, int32_t layer, void *out_layer);

    /* The forward pass, an sp_pass_fn: from the tokens of the step to hidden states after the last
     * norm, which are left in the activation `final`. */
    void (*pass)(const sp_model *model, sp_ops *ops);
    sp_rows final;
} sp_family_row;

/* All families that the engine supports, NULL-terminated. A statically linked program that defines
 * this array itself, as a test does, supports its own families instead. */
extern const sp_family_row *const sp_families[];

extern const sp_family_row sp_family_qwen3, sp_family_qwen3_moe, sp_family_llama;
extern const sp_family_row sp_family_qwen3_next, sp_family_qwen35, sp_family_qwen35_moe;

/* The row of a family; NULL: not supported. Any thread. */
const sp_family_row *sp_family_find(sp_family family);

/* The dimensions of attention and its cache: of the layers that have keys and values. */
sp_attention_shape sp_family_attention(const sp_model *model);

/* Pairs of a head that are rotated. */
int32_t sp_family_rotated_pairs(const sp_model_shape *shape);

/* The dimensions of the experts; all 0 for a dense model. */
sp_moe_shape sp_family_moe(const sp_model *model, int32_t window_rows);

/* The dimensions of the gated delta rule and the numbers of its states and snapshots; all 0 for a
 * model without one. */
sp_delta_rule_shape sp_family_delta_rule(const sp_model *model, int32_t states, int32_t snapshots);

/* As sp_op_prepare, after sp_model_place. */
sp_status sp_family_prepare(const sp_model *model, sp_ops *ops);

/* Computes all rows of the step: writes their keys and values to the cache, and keeps their final
 * hidden states for sp_family_logits. Engine thread. Fails like sp_op_step. */
sp_status sp_family_forward(const sp_model *model, sp_ops *ops, const sp_step *step);

/* Logits of n_rows (at most ops->window) rows of the last step, named by their row numbers. Fails
 * like sp_op_logits. */
sp_status sp_family_logits(const sp_model *model, sp_ops *ops, const int32_t *rows, int32_t n_rows);

#endif
