/*
 * forward.h: the forward pass of a dense Qwen3 over the rows of a step, in ops. Owns nothing.
 */
#ifndef SP_ENGINE_MODEL_FORWARD_H
#define SP_ENGINE_MODEL_FORWARD_H

#include "engine/model/model.h"
#include "engine/ops/ops.h"

/* Widths of the pass's activations, for sp_ops_options; returns their number. */
int32_t sp_forward_widths(const sp_model_shape *shape, int32_t out_widths[SP_ROWS_MAX]);

/* Computes all rows of the step: their keys and values go to the cache, and their final hidden
 * states (after the last norm) stay for sp_forward_logits. Fails like sp_op_step. */
sp_status sp_forward_run(const sp_model *model, sp_ops *ops, const sp_step *step);

/* Logits of n_rows (at most SP_LOGIT_ROWS) rows of the last run, named by their row numbers. Fails
 * like sp_op_logits. */
sp_status sp_forward_logits(const sp_model *model, sp_ops *ops, const int32_t *rows,
                            int32_t n_rows);

#endif
