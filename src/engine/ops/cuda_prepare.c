/*
 * cuda_prepare.c: before the first step the pass is read once with a table of ops of which two do
 * anything: each shape of a linear map is tried with cuBLASLt, which is used where it computes our
 * bytes faster, or, with free_gemm, any bytes; and the weights of experts are put into tables.
 */
#include "engine/ops/cuda_ops.h"

#define SMALL_BYTES ((size_t)4 << 20)

/* ---- reading the pass ---------------------------------------------------------------------- */

static sp_status skip_embed(sp_ops *ops, const sp_weight *table, sp_rows y)
{
    (void)ops;
    (void)table;
    (void)y;
    return SP_OK;
}

static sp_status skip_norm(sp_ops *ops, sp_rows x, const sp_norm *norm, sp_rows y)
{
    (void)ops;
    (void)x;
    (void)norm;
    (void)y;
    return SP_OK;
}

static sp_status skip_add_norm(sp_ops *ops, sp_rows sum, sp_rows x, const sp_norm *norm, sp_rows y)
{
    (void)sum;
    return skip_norm(ops, x, norm, y);
}

static sp_status skip_rope(sp_ops *ops, const sp_rope_call *call)
{
    (void)ops;
    (void)call;
    return SP_OK;
}

static sp_status skip_attention(sp_ops *ops, sp_rows q, int32_t layer, sp_rows y)
{
    (void)ops;
    (void)q;
    (void)layer;
    (void)y;
    return SP_OK;
}

static sp_status skip_delta_rule(sp_ops *ops, const sp_delta_rule_call *call)
{
    (void)ops;
    (void)call;
    return SP_OK;
}

static sp_status skip_silu_mul(sp_ops *ops, sp_rows gate, sp_rows up)
{
    (void)ops;
    (void)gate;
    (void)up;
    return SP_OK;
}

static sp_status skip_route(sp_ops *ops, sp_rows logits, bool normalised)
{
    (void)ops;
    (void)logits;
    (void)normalised;
    return SP_OK;
}

static sp_status skip_add_gated(sp_ops *ops, sp_rows y, sp_rows x, sp_rows gate)
{
    (void)gate;
    return skip_silu_mul(ops, y, x);
}

/* ---- learning ------------------------------------------------------------------------------ */

static bool is_like(const sp_cuda_gemm *a, const sp_cuda_gemm *b)
{
    bool like = a->k == b->k && a->n_outputs == b->n_outputs;

    for (int32_t i = 0; like && i < a->n_outputs; i++)
        like = a->outputs[i].n == b->outputs[i].n &&
               a->outputs[i].y_is_f32 == b->outputs[i].y_is_f32 &&
               (a->outputs[i].bias != NULL) == (b->outputs[i].bias != NULL);
    return like;
}

/* Weights that a GPU reads in a few microseconds are not worth the time that trying takes. */
static bool is_small(const sp_cuda_gemm *gemm)
{
    size_t bytes = 0;

    for (int32_t i = 0; i < gemm->n_outputs; i++)
        bytes += (size_t)gemm->outputs[i].n * (size_t)gemm->k * sizeof(uint16_t);
    return bytes < SMALL_BYTES;
}

static sp_status learn(sp_cuda_ops *cuda, const sp_cuda_gemm *gemm)
{
    sp_cuda_gemm_report report;

    if (is_small(gemm))
        return SP_OK;
    return sp_cuda_launched(
        cuda, cuda->kernels.base_gemm_learn(cuda->gpu, cuda->gemm, gemm, gemm->rows, &report),
        "trying the base's products");
}

static sp_status learn_linear(sp_ops *ops, sp_rows x, const sp_projection *projections, int32_t n)
{
    sp_cuda_ops *cuda = (sp_cuda_ops *)ops;
    sp_cuda_gemm gemm = sp_cuda_gemm_of(cuda, x, projections, n, cuda->rows_max);

    for (int32_t i = 0; i < cuda->n_learnt; i++)
        if (is_like(&cuda->learnt[i], &gemm))
            return SP_OK;
    if (cuda->n_learnt == SP_CUDA_SHAPES_MAX)
        return SP_OK;
    cuda->learnt[cuda->n_learnt++] = gemm;
    return learn(cuda, &gemm);
}

static const sp_op_table learning = {
    .embed = skip_embed,
    .norm = skip_norm,
    .add_norm = skip_add_norm,
    .linear = learn_linear,
    .rope_and_cache = skip_rope,
    .attention = skip_attention,
    .gate_heads = skip_silu_mul,
    .delta_rule = skip_delta_rule,
    .silu_mul = skip_silu_mul,
    .route = skip_route,
    .experts = sp_cuda_learn_experts,
    .add_gated = skip_add_gated,
};

static sp_status learn_head(sp_cuda_ops *cuda, const sp_weight *head)
{
    const sp_cuda_gemm gemm = {
        .rows = cuda->ops.window,
        .k = head->columns,
        .x = cuda->window.x,
        .x_stride = cuda->hidden,
        .n_outputs = 1,
        .outputs[0] = {.w = head->placed,
                       .y = cuda->window.logits,
                       .y_stride = cuda->vocab,
                       .n = head->rows,
                       .y_is_f32 = 1},
    };

    return learn(cuda, &gemm);
}

sp_status sp_cuda_op_prepare(sp_ops *ops, sp_pass_fn pass, void *user, const sp_weight *head)
{
    sp_cuda_ops *cuda = (sp_cuda_ops *)ops;
    int found = 0;
    sp_status status = sp_stream_wait(cuda->stream, NULL); /* the weights are there */

    if (status == SP_OK)
        status = sp_cuda_launched(
            cuda, cuda->kernels.base_gemm_library(cuda->gpu, cuda->gemm, NULL, &found),
            "opening cuBLASLt");
    if (status == SP_OK && found && cuda->free_gemm)
        status = sp_cuda_launched(cuda, cuda->kernels.base_gemm_free(cuda->gpu, cuda->gemm),
                                  "freeing the order of the base's products");
    if (status != SP_OK || (!found && cuda->moe.shape.experts == 0))
        return status;
    ops->table = &learning;
    pass(user, ops);
    ops->table = &sp_cuda_op_table;
    return ops->status == SP_OK ? learn_head(cuda, head) : ops->status;
}
