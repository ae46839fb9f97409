/*
 * experts.c: the deltas of a layer's experts. Their memory and kernels are not in this build: the
 * calls check what they are given and say so.
 */
#include "base/error.h"
#include "base/grow.h"
#include "delta/delta_state.h"

#include <sidepath/experts.h>

static sp_status no_kernels(sp_error *error)
{
    return sp_fail(error, SP_ERR_UNSUPPORTED, "engine-unsupported", "experts", -1,
                   "this build has no kernels for the deltas of experts");
}

sp_status sp_delta_experts_begin(sp_delta *delta, const sp_plan *plan, const sp_moe_rows *rows,
                                 sp_stream *stream, sp_error *error)
{
    sp_moe_rows own = {.struct_bytes = sizeof own};
    const sp_plan_view *view;
    int32_t n_rows;
    sp_status status = sp_delta_rows_of(delta, plan, &view, &n_rows, error);

    (void)stream;
    if (status == SP_OK)
        status = sp_struct_read(&own, sizeof own, rows, "sp_moe_rows", error);
    if (status == SP_OK && own.n_experts != sp_geometry_experts(sp_layout_geometry(delta->layout)))
        status = sp_fail(error, SP_ERR_ARGUMENT, NULL, "n_experts", -1,
                         "n_experts is %d, the geometry has %d", (int)own.n_experts,
                         (int)sp_geometry_experts(sp_layout_geometry(delta->layout)));
    return status == SP_OK ? no_kernels(error) : status;
}

sp_status sp_delta_experts_apply(sp_delta *delta, const sp_delta_experts_call *call,
                                 sp_error *error)
{
    sp_delta_experts_call own = {.struct_bytes = sizeof own};
    sp_status status = SP_NEED(error, {"delta", delta});

    if (status == SP_OK)
        status = sp_struct_read(&own, sizeof own, call, "sp_delta_experts_call", error);
    if (status == SP_OK)
        status = sp_fail(error, SP_ERR_STATE, NULL, "rows", -1,
                         "no rows were begun: call sp_delta_experts_begin first");
    return status;
}
