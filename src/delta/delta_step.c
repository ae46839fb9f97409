/* delta_step.c: the start of a step: the plan's rows, from the host or from device memory. On the
 * CPU there is nothing to do. */
#include "base/error.h"
#include "base/grow.h"
#include "delta/delta_state.h"

static sp_status check_plan(const sp_delta *delta, const sp_plan *plan,
                            const sp_plan_view **out_view, sp_error *error)
{
    int32_t n_rows;

    if (delta != NULL && plan == NULL)
        return sp_delta_missing("plan", error);
    return sp_delta_rows_of(delta, plan, out_view, &n_rows, error);
}

sp_status sp_delta_upload(sp_delta *delta, const sp_plan *plan, sp_stream *stream, sp_error *error)
{
    const sp_plan_view *view;
    sp_status status = check_plan(delta, plan, &view, error);

    if (status != SP_OK || delta->gpu == NULL)
        return status;
    return sp_delta_gpu_upload(delta->gpu, view, stream, error);
}

sp_status sp_delta_start(sp_delta *delta, const sp_plan *plan, sp_stream *stream, sp_error *error)
{
    const sp_plan_view *view;
    sp_status status = check_plan(delta, plan, &view, error);

    if (status != SP_OK || delta->gpu == NULL)
        return status;
    sp_delta_end_round(delta);
    return sp_delta_gpu_start(delta->gpu, view, stream, error);
}

/* ---- rows that the device chose ------------------------------------------------------------ */

static sp_status check_on_gpu(const sp_delta *delta, sp_error *error)
{
    if (delta == NULL)
        return sp_delta_missing("delta", error);
    if (delta->gpu != NULL)
        return SP_OK;
    return sp_fail(error, SP_ERR_UNSUPPORTED, NULL, sp_device_name(sp_pool_device(delta->pool)), -1,
                   "rows in device memory are for a GPU: build a plan with sp_plan_build");
}

sp_status sp_plan_from_device(sp_delta *delta, const sp_device_rows *rows, sp_stream *stream,
                              sp_error *error)
{
    sp_device_rows own = {.struct_bytes = sizeof own};
    sp_status status = check_on_gpu(delta, error);

    if (status == SP_OK)
        status = sp_struct_read(&own, sizeof own, rows, "sp_device_rows", error);
    if (status != SP_OK)
        return status;
    if (own.n_rows < 0 || own.n_rows > delta->rows_max)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "n_rows", -1,
                       "n_rows is %d, the delta was made for 0 to %d", (int)own.n_rows,
                       (int)delta->rows_max);
    if (own.n_rows > 0 && (own.slot == NULL || own.generation == NULL))
        return sp_delta_missing(own.slot == NULL ? "slot" : "generation", error);
    sp_delta_end_round(delta);
    return sp_delta_gpu_rows_from_device(delta->gpu, &own, stream, error);
}

sp_status sp_delta_row_report(const sp_delta *delta, sp_row_report *out_report, sp_error *error)
{
    sp_row_report report = {.struct_bytes = sizeof report};
    sp_status status = check_on_gpu(delta, error);

    if (status != SP_OK)
        return status;
    sp_delta_gpu_report(delta->gpu, &report);
    return sp_struct_write(out_report, &report, sizeof report, "sp_row_report", error);
}
