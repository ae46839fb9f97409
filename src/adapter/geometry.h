/*
 * geometry.h: what the files of this room share about a base model: its shape, and the dimensions
 * of every site, by layer and module.
 */
#ifndef SP_ADAPTER_GEOMETRY_H
#define SP_ADAPTER_GEOMETRY_H

#include "base/json.h"

#include <sidepath/adapter.h>

/* What one layer of a model is made of. */
typedef struct sp_layer_plan {
    sp_layer_kind kind;
    bool moe; /* router and experts instead of a dense FFN */
} sp_layer_plan;

/*
 * Reads config.json into a shape and one plan per layer. *out_layers is owned by the caller
 * (sp_free), shape->layers long.
 */
sp_status sp_model_shape_read(const json_t *config, sp_model_shape *out_shape,
                              sp_layer_plan **out_layers, sp_error *error);

/* Modules that this layer has; -1 gives embed_tokens and lm_head. 0 for a layer out of range. */
sp_module_set sp_geometry_layer_modules(const sp_geometry *geometry, int32_t layer);

#define SP_MODULE_BIT(module) ((sp_module_set)1 << (module))
#define SP_MODULES_EXPERTS                                                                 \
    (SP_MODULE_BIT(SP_MODULE_EXPERT_GATE_PROJ) | SP_MODULE_BIT(SP_MODULE_EXPERT_UP_PROJ) | \
     SP_MODULE_BIT(SP_MODULE_EXPERT_DOWN_PROJ))

#endif
