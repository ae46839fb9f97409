/* cuda_rows.c: the row-wise ops and attention on a GPU: one launch each. */
#include "base/assert.h"
#include "engine/ops/cuda_ops.h"

/* ---- the embedding ------------------------------------------------------------------------- */

sp_status sp_cuda_op_embed(sp_ops *ops, const sp_weight *table, sp_rows y)
{
    sp_cuda_ops *cuda = (sp_cuda_ops *)ops;
    const sp_cuda_gather gather = {
        .step = cuda->step,
        .table = table->placed,
        .width = table->columns,
        .y = cuda->rows[y],
    };
    const sp_delta_embed_call call = {
        .struct_bytes = sizeof call,
        .plan = cuda->plan,
        .tokens = cuda->step.token,
        .y = cuda->rows[y],
        .y_stride = table->columns,
        .stream = cuda->stream,
    };
    sp_status status = sp_cuda_launched(
        cuda, cuda->kernels.gather_rows(cuda->gpu, &gather, cuda->native), "gathering embeddings");

    if (status != SP_OK || !cuda->adapted || !sp_delta_has_tokens(cuda->delta, SP_SITE_EMBEDDING))
        return status;
    return sp_delta_embed(cuda->delta, &call, NULL);
}

/* ---- norms, sums and the activation -------------------------------------------------------- */

static sp_status norm_rows(sp_cuda_ops *cuda, sp_rows x, const void *add, const sp_norm *norm,
                           sp_rows y)
{
    const sp_cuda_norm call = {
        .rows = cuda->step.rows,
        .width = norm->weight.rows,
        .x = cuda->rows[x],
        .add = add,
        .weight = norm->weight.placed,
        .eps = norm->eps,
        .offset = norm->offset,
        .y = cuda->rows[y],
    };

    SP_ASSERT(cuda->widths[x] == norm->weight.rows && cuda->widths[y] == norm->weight.rows);
    return sp_cuda_launched(cuda, cuda->kernels.norm_rows(cuda->gpu, &call, cuda->native),
                            "a norm");
}

sp_status sp_cuda_op_norm(sp_ops *ops, sp_rows x, const sp_norm *norm, sp_rows y)
{
    return norm_rows((sp_cuda_ops *)ops, x, NULL, norm, y);
}

sp_status sp_cuda_op_add_norm(sp_ops *ops, sp_rows sum, sp_rows x, const sp_norm *norm, sp_rows y)
{
    sp_cuda_ops *cuda = (sp_cuda_ops *)ops;

    return norm_rows(cuda, sum, cuda->rows[x], norm, y);
}

sp_status sp_cuda_op_silu_mul(sp_ops *ops, sp_rows gate, sp_rows up)
{
    sp_cuda_ops *cuda = (sp_cuda_ops *)ops;
    const sp_cuda_silu call = {
        .n = (int64_t)cuda->step.rows * cuda->widths[gate],
        .gate = cuda->rows[gate],
        .up = cuda->rows[up],
    };

    return sp_cuda_launched(cuda, cuda->kernels.silu_mul(cuda->gpu, &call, cuda->native),
                            "an activation");
}

/* ---- attention ----------------------------------------------------------------------------- */

sp_status sp_cuda_op_rope_and_cache(sp_ops *ops, const sp_rope_call *call)
{
    sp_cuda_ops *cuda = (sp_cuda_ops *)ops;
    sp_cuda_rope rope = {
        .step = cuda->step,
        .q_heads = cuda->attention.q_heads,
        .kv_heads = cuda->attention.kv_heads,
        .head_dim = cuda->attention.head_dim,
        .n_rot = cuda->n_rot,
        .q_gate = call->gated ? cuda->rows[call->q_gate] : NULL,
        .q = cuda->rows[call->q],
        .k = cuda->rows[call->k],
        .v = cuda->rows[call->v],
        .cosine = call->unrotated ? NULL : cuda->cosine,
        .sine = call->unrotated ? NULL : cuda->sine,
        .keys = sp_kv_cache_keys(&cuda->cache, call->layer),
        .values = sp_kv_cache_values(&cuda->cache, call->layer),
        .fault = cuda->fault,
    };

    SP_ASSERT(!call->unrotated || (!call->q_norm && !call->k_norm));
    if (call->q_norm) {
        rope.q_norm = call->q_norm->weight.placed;
        rope.q_eps = call->q_norm->eps;
        rope.q_offset = call->q_norm->offset;
    }
    if (call->k_norm) {
        rope.k_norm = call->k_norm->weight.placed;
        rope.k_eps = call->k_norm->eps;
        rope.k_offset = call->k_norm->offset;
    }
    return sp_cuda_launched(cuda, cuda->kernels.rope_rows(cuda->gpu, &rope, cuda->native),
                            "rotating keys");
}

sp_status sp_cuda_op_attention(sp_ops *ops, sp_rows q, int32_t layer, sp_rows y)
{
    sp_cuda_ops *cuda = (sp_cuda_ops *)ops;
    const sp_cuda_attention attention = {
        .shape = cuda->attention,
        .step = cuda->step,
        .q = cuda->rows[q],
        .y = cuda->rows[y],
        .keys = sp_kv_cache_keys(&cuda->cache, layer),
        .values = sp_kv_cache_values(&cuda->cache, layer),
        .scratch = cuda->attention_scratch,
        .wide = cuda->wide,
    };

    return sp_cuda_launched(cuda, cuda->kernels.attend_rows(cuda->gpu, &attention, cuda->native),
                            "attention");
}

sp_status sp_cuda_op_gate_heads(sp_ops *ops, sp_rows y, sp_rows q_gate)
{
    sp_cuda_ops *cuda = (sp_cuda_ops *)ops;
    const sp_cuda_gate_heads gate = {
        .rows = cuda->step.rows,
        .heads = cuda->attention.q_heads,
        .head_dim = cuda->attention.head_dim,
        .q_gate = cuda->rows[q_gate],
        .y = cuda->rows[y],
    };

    SP_ASSERT(cuda->widths[q_gate] == 2 * cuda->widths[y]);
    return sp_cuda_launched(cuda, cuda->kernels.gate_head_rows(cuda->gpu, &gate, cuda->native),
                            "gating heads");
}
