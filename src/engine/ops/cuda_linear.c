/* cuda_linear.c: linear maps that share their input, with the side paths of the rows' adapters. */
#include "base/assert.h"
#include "engine/ops/cuda_ops.h"

#include <sidepath/delta_pieces.h>

#include <assert.h>

static_assert(SP_LINEAR_MAX <= SP_CUDA_OUTPUTS_MAX, "a group is one launch");
static_assert(SP_LINEAR_MAX <= SP_DELTA_GROUP_MAX, "and one call of the deltas");

sp_cuda_gemm sp_cuda_gemm_of(const sp_cuda_ops *cuda, sp_rows x, const sp_projection *projections,
                             int32_t n, int32_t rows)
{
    sp_cuda_gemm gemm = {
        .rows = rows,
        .k = cuda->widths[x],
        .x = cuda->rows[x],
        .x_stride = cuda->widths[x],
        .n_outputs = n,
    };

    SP_ASSERT(n > 0 && n <= SP_LINEAR_MAX && cuda->types[x] == SP_DTYPE_BF16);
    for (int32_t i = 0; i < n; i++) {
        const sp_linear *linear = projections[i].linear;
        sp_rows y = projections[i].y;

        SP_ASSERT(linear->weight.columns == cuda->widths[x]);
        SP_ASSERT(linear->weight.rows == cuda->widths[y]);
        gemm.outputs[i] = (sp_cuda_gemm_output){
            .w = linear->weight.placed,
            .bias = linear->bias.placed,
            .y = cuda->rows[y],
            .y_stride = cuda->widths[y],
            .n = linear->weight.rows,
            .y_is_f32 = cuda->types[y] == SP_DTYPE_F32,
        };
    }
    return gemm;
}

static sp_status run_base(const sp_cuda_ops *cuda, const sp_cuda_gemm *gemm)
{
    return sp_cuda_launched(
        cuda, cuda->kernels.base_gemm(cuda->gpu, cuda->gemm, gemm, cuda->native), "a linear map");
}

/* The shrink reads x beside the base's product; the expand follows both. The next kernels begin
 * before the last ones end, which is worth more there than a faster product of cuBLASLt. */
static sp_status run_beside(const sp_cuda_ops *cuda, const sp_cuda_gemm *gemm, sp_delta_call *call)
{
    sp_cuda_gemm own = *gemm;
    sp_status status = sp_event_record(cuda->fork, cuda->stream, NULL);

    if (status == SP_OK)
        status = sp_stream_wait_event(cuda->side, cuda->fork, NULL);
    own.own = 1;
    call->stream = cuda->side;
    if (status == SP_OK)
        status = sp_delta_shrink(cuda->delta, call, NULL);
    if (status == SP_OK)
        status = run_base(cuda, &own);
    if (status == SP_OK)
        status = sp_event_record(cuda->join, cuda->side, NULL);
    if (status == SP_OK)
        status = sp_stream_wait_event(cuda->stream, cuda->join, NULL);
    call->stream = cuda->stream;
    return status == SP_OK ? sp_delta_expand(cuda->delta, call, NULL) : status;
}

/* A router's delta has no half that could run beside its product, and the kernel that adds it
 * begins before the product ends, unless it waits for another stream too. */
static bool has_halves(const sp_cuda_gemm *gemm)
{
    bool any = false;

    for (int32_t i = 0; i < gemm->n_outputs; i++)
        any = any || !gemm->outputs[i].y_is_f32;
    return any;
}

/* A product that deltas are folded into where it can be. */
typedef struct folding_call {
    sp_cuda_ops *cuda;
    const sp_cuda_gemm *gemm;
} folding_call;

static sp_status run_folding(void *user, const sp_cuda_group *group, bool *out_folded)
{
    const folding_call *call = user;
    sp_cuda_ops *cuda = call->cuda;
    sp_cuda_gemm gemm = *call->gemm;
    int code = SP_CUDA_NOT_SUPPORTED;

    gemm.deltas = group;
    if (group)
        code = cuda->kernels.base_gemm(cuda->gpu, cuda->gemm, &gemm, cuda->native);
    *out_folded = code != SP_CUDA_NOT_SUPPORTED;
    cuda->n_folded += code == 0;
    if (*out_folded)
        return sp_cuda_launched(cuda, code, "a linear map with deltas");
    return run_base(cuda, call->gemm);
}

sp_status sp_cuda_op_linear(sp_ops *ops, sp_rows x, const sp_projection *projections, int32_t n)
{
    sp_cuda_ops *cuda = (sp_cuda_ops *)ops;
    const sp_cuda_gemm gemm = sp_cuda_gemm_of(cuda, x, projections, n, cuda->step.rows);
    sp_delta_output outputs[SP_LINEAR_MAX];
    sp_delta_call call = {
        .struct_bytes = sizeof call,
        .plan = cuda->plan,
        .x = cuda->rows[x],
        .x_stride = cuda->widths[x],
        .x_type = SP_DTYPE_BF16,
        .outputs = outputs,
        .n_outputs = n,
        .stream = cuda->stream,
    };
    sp_status status;

    for (int32_t i = 0; i < n; i++)
        outputs[i] = (sp_delta_output){
            .struct_bytes = sizeof outputs[i],
            .site = projections[i].linear->site,
            .y = cuda->rows[projections[i].y],
            .y_stride = cuda->widths[projections[i].y],
            .y_type = cuda->types[projections[i].y],
        };
    if (cuda->adapted && cuda->step.rows <= SP_CUDA_SIDE_ROWS && has_halves(&gemm))
        return run_beside(cuda, &gemm, &call);
    if (cuda->adapted && cuda->folds)
        return sp_delta_apply_around(cuda->delta, &call, run_folding, &(folding_call){cuda, &gemm},
                                     NULL);
    status = run_base(cuda, &gemm);
    if (status != SP_OK || !cuda->adapted)
        return status;
    return sp_delta_apply(cuda->delta, &call, NULL);
}
