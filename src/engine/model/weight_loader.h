/*
 * weight_loader.h: names of tensors to weights, while a model is opened. A family names what it
 * needs; the first failure is kept, and look-ups after it do nothing. Tensors that were not named
 * are classified afterwards: of a part that runs, or of another. One thread.
 */
#ifndef SP_ENGINE_MODEL_WEIGHT_LOADER_H
#define SP_ENGINE_MODEL_WEIGHT_LOADER_H

#include "engine/model/model.h"

typedef struct sp_weight_loader sp_weight_loader;

/* The model's weights, by its family, out of its mapped or copied files. Sets model->layers, embed,
 * head, final_norm, the notes and the list for sp_model_place. What conversion takes is added to
 * copied_bytes (of the files; 0: they are mapped). Statuses as sp_model_open. */
sp_status sp_load_weights(sp_model *model, const sp_checkpoint *checkpoint, size_t copied_bytes,
                          size_t free_bytes, sp_error *error);

/* Borrowed until the model is closed. */
const sp_model_shape *sp_weight_loader_shape(const sp_weight_loader *loader);
bool sp_weight_loader_is_moe(const sp_weight_loader *loader, int32_t layer);
sp_layer_kind sp_weight_loader_kind(const sp_weight_loader *loader, int32_t layer);

/* The names below begin with "model.", or in a checkpoint of text and vision with
 * "model.language_model.". */

/* "model.layers.N.<module>.weight" [width]. *out_norm must not be moved until the model is closed:
 * the list of weights points into it. */
void sp_load_norm(sp_weight_loader *loader, int32_t layer, const char *module, int32_t width,
                  sp_norm *out_norm);

/* "model.layers.N.<module>.weight" [outputs, inputs], and ".bias" [outputs] with `bias`; the module
 * is the site of its side paths. *out_linear must not be moved either. */
void sp_load_linear(sp_weight_loader *loader, int32_t layer, const char *module, int32_t outputs,
                    int32_t inputs, bool bias, sp_linear *out_linear);

/* "model.layers.N.<module>.weight" [channels, 1, width], a convolution of each channel alone, as
 * [channels, width]. */
void sp_load_conv(sp_weight_loader *loader, int32_t layer, const char *module, int32_t channels,
                  int32_t width, sp_weight *out_weight);

/* "model.layers.N.<name>" [n] as FP32, whatever type the file has: of small tensors whose rounding
 * would be seen in every row. The memory is the model's. */
void sp_load_fp32(sp_weight_loader *loader, int32_t layer, const char *name, int32_t n,
                  sp_weight *out_weight);

/*
 * The experts of a layer, with shape->experts and expert_intermediate: one by one as
 * "model.layers.N.mlp.experts.E.gate_proj.weight" [inner, hidden], "up_proj" and "down_proj"
 * [hidden, inner], or stacked as "model.layers.N.mlp.experts.gate_up_proj" [experts, 2 * inner,
 * hidden] (of each expert gate before up) and "down_proj" [experts, hidden, inner]. Their memory is
 * the model's.
 */
void sp_load_experts(sp_weight_loader *loader, int32_t layer, sp_experts *out_experts);

#endif
