/*
 * cuda_delta_rule.c: the memory of recurrent states on a GPU, the spans of a step as the kernels of
 * the gated delta rule read them, and its op. A slot, or a snapshot, has its layers one after the
 * other; delta_rule_layout.h has the layout of one. Slots are not cleared between sequences: with a
 * border of 0 nothing of one is read.
 */
#include "base/assert.h"
#include "base/error.h"
#include "engine/ops/cuda_ops.h"
#include "kernels/cuda/delta_rule_layout.h"

#include <assert.h>

static_assert(SP_STATE_CHUNK == SP_CUDA_RULE_CHUNK && SP_STATE_RING == SP_CUDA_RULE_RING,
              "the kernels have the op's chunks");

static sp_cuda_rule_shape shape_of(const sp_delta_rule_shape *shape)
{
    return (sp_cuda_rule_shape){
        .k_heads = shape->k_heads,
        .v_heads = shape->v_heads,
        .k_dim = shape->k_dim,
        .v_dim = shape->v_dim,
        .conv_width = shape->conv_width,
        .fused = shape->fused_inputs,
    };
}

/* ---- memory -------------------------------------------------------------------------------- */

size_t sp_cuda_state_bytes(const sp_delta_rule_shape *shape, sp_dtype type)
{
    (void)type; /* BF16 alone */
    return (size_t)shape->layers * (size_t)sp_cuda_rule_lay_out(shape_of(shape)).state_bytes;
}

size_t sp_cuda_snapshot_bytes(const sp_delta_rule_shape *shape, sp_dtype type)
{
    (void)type;
    return (size_t)shape->layers * (size_t)sp_cuda_rule_lay_out(shape_of(shape)).snapshot_bytes;
}

size_t sp_cuda_rule_bytes(const sp_ops_options *options)
{
    if (options->delta_rule.layers == 0)
        return 0;
    return (size_t)sp_cuda_rule_scratch_bytes(shape_of(&options->delta_rule), options->rows_max);
}

static sp_status check_shape(const sp_delta_rule_shape *shape, sp_error *error)
{
    if (shape->k_dim % 8 == 0 && shape->v_dim % 8 == 0 && shape->k_dim <= SP_CUDA_RULE_DIM_MAX &&
        shape->v_dim <= SP_CUDA_RULE_DIM_MAX && shape->conv_width >= 2 &&
        shape->conv_width <= SP_CUDA_RULE_CONV_MAX)
        return SP_OK;
    return sp_fail(error, SP_ERR_UNSUPPORTED, "engine-unsupported", "linear_attention", -1,
                   "a GPU takes gated delta nets with heads of a multiple of 8 up to %d and "
                   "convolutions over 2 to %d rows",
                   SP_CUDA_RULE_DIM_MAX, SP_CUDA_RULE_CONV_MAX);
}

sp_status sp_cuda_rule_create(sp_cuda_ops *cuda, const sp_ops_options *options, sp_error *error)
{
    const sp_delta_rule_shape *shape = &options->delta_rule;
    sp_cuda_rule *rule = &cuda->rule;
    sp_status status;

    rule->layers = shape->layers;
    if (shape->layers == 0)
        return SP_OK;
    status = check_shape(shape, error);
    rule->shape = shape_of(shape);
    rule->state_bytes = (int64_t)sp_cuda_state_bytes(shape, options->type);
    rule->snapshot_bytes = (int64_t)sp_cuda_snapshot_bytes(shape, options->type);
    cuda->ops.state_bytes = (size_t)shape->slots * (size_t)rule->state_bytes +
                            (size_t)shape->snapshots * (size_t)rule->snapshot_bytes;
    rule->states =
        sp_cuda_block(cuda, (size_t)shape->slots * (size_t)rule->state_bytes, &status, error);
    rule->snapshots = sp_cuda_block(cuda, (size_t)shape->snapshots * (size_t)rule->snapshot_bytes,
                                    &status, error);
    rule->scratch = sp_cuda_block(cuda, sp_cuda_rule_bytes(options), &status, error);
    return status;
}

/* ---- a step -------------------------------------------------------------------------------- */

int32_t sp_cuda_rule_items(int32_t rows, int32_t spans)
{
    return rows / SP_STATE_CHUNK + 2 * spans;
}

int32_t sp_cuda_rule_describe(const sp_step *step, sp_cuda_rule_span *out_spans,
                              sp_cuda_rule_item *out_items)
{
    int32_t row = 0, n_items = 0;

    for (int32_t s = 0; s < step->n_spans; s++) {
        const sp_step_span *span = &step->spans[s];
        const sp_step_state *state = &span->state;
        int32_t end = span->position + span->n_rows;
        int32_t border = span->position / SP_STATE_CHUNK * SP_STATE_CHUNK;

        SP_ASSERT(state->save < 0 || span->position == border);
        SP_ASSERT(state->load < 0 || span->position == border);
        SP_ASSERT(state->load >= 0 || span->position - state->folded < SP_STATE_RING);
        SP_ASSERT(end - sp_step_state_folded(span) <= SP_STATE_RING);
        out_spans[s] = (sp_cuda_rule_span){
            .row = row,
            .n_rows = span->n_rows,
            .position = span->position,
            .slot = state->slot,
            .folded = state->folded,
            .load = state->load,
            .save = state->save,
            .n_final = state->n_final,
        };
        for (; border < end; border += SP_STATE_CHUNK)
            out_items[n_items++] = (sp_cuda_rule_item){.span = s, .border = border};
        row += span->n_rows;
    }
    return n_items;
}

sp_status sp_cuda_op_delta_rule(sp_ops *ops, const sp_delta_rule_call *call)
{
    sp_cuda_ops *cuda = (sp_cuda_ops *)ops;
    const sp_cuda_rule *own = &cuda->rule;
    const sp_delta_rule *weights = call->rule;
    const sp_cuda_rule_layout layout = sp_cuda_rule_lay_out(own->shape);
    const sp_cuda_delta_rule rule = {
        .shape = own->shape,
        .rows = cuda->step.rows,
        .spans = cuda->step.spans,
        .wide = cuda->wide,
        .span = own->span,
        .item = own->item,
        .n_items = own->n_items,
        .qkv = cuda->rows[call->qkv],
        .z = own->shape.fused ? NULL : cuda->rows[call->z],
        .b = cuda->rows[call->b],
        .a = own->shape.fused ? NULL : cuda->rows[call->a],
        .conv = weights->conv.placed,
        .a_log = weights->a_log.placed,
        .dt_bias = weights->dt_bias.placed,
        .norm = weights->norm.weight.placed,
        .eps = weights->norm.eps,
        .y = cuda->rows[call->y],
        .states = own->states + call->layer * layout.state_bytes,
        .snapshots = own->snapshots + call->layer * layout.snapshot_bytes,
        .state_stride = own->state_bytes,
        .snapshot_stride = own->snapshot_bytes,
        .scratch = own->scratch,
        .fault = cuda->fault,
    };

    SP_ASSERT(call->layer >= 0 && call->layer < own->layers);
    SP_ASSERT(cuda->widths[call->qkv] == layout.qkv_width);
    SP_ASSERT(cuda->widths[call->b] == layout.b_width && cuda->types[call->b] == SP_DTYPE_F32);
    SP_ASSERT(weights->norm.weight.type == SP_DTYPE_F32 && weights->norm.offset == 0.0f);
    return sp_cuda_launched(cuda, cuda->kernels.delta_rule_rows(cuda->gpu, &rule, cuda->native),
                            "a gated delta rule");
}
