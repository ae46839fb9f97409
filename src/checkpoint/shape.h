/*
 * checkpoint: the files of a base model or an adapter, read and checked: safetensors with shards
 * and index, and config.json as a model shape. Must not know adapters, sites or slots.
 *
 * shape.h: config.json to numbers.
 */
#ifndef SP_CHECKPOINT_SHAPE_H
#define SP_CHECKPOINT_SHAPE_H

#include "base/json.h"
#include "base/private.h"

#include <sidepath/checkpoint.h>

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

/*
 * "eos_token_id" of a config.json or generation_config.json, which errors call `file`: an id of the
 * vocabulary or a list of them, in place of those in *shape; NULL and null leave these. On failure
 * n_eos_token_ids is as it was. SP_ERR_INPUT, SP_ERR_UNSUPPORTED: too many.
 */
SP_PRIVATE sp_status sp_model_shape_read_eos(const json_t *value, const char *file,
                                             sp_model_shape *shape, sp_error *error);

#endif
