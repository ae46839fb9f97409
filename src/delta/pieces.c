/*
 * pieces.c: an apply in halves, for a host with two streams or two phases, in pieces, for one that
 * runs them inside its own parallel jobs, and around a product. The first two use a single round of
 * one sp_lora_job.
 */
#include "base/error.h"
#include "base/grow.h"
#include "delta/delta_state.h"

#include <sidepath/delta_pieces.h>

/* ---- in pieces ----------------------------------------------------------------------------- */

static bool can_be_in_pieces(const sp_delta *delta, const sp_delta_group *group)
{
    return delta->gpu == NULL && group->call.n_outputs <= SP_LORA_GROUP_MAX;
}

sp_status sp_delta_pieces_begin(sp_delta *delta, const sp_delta_call *call,
                                sp_delta_pieces *out_pieces, sp_error *error)
{
    sp_delta_pieces pieces = {.struct_bytes = sizeof pieces};
    sp_delta_group group;
    sp_status status = sp_delta_read_group(delta, call, true, &group, error);

    if (status != SP_OK)
        return status;
    sp_delta_end_round(delta);
    pieces.fits = can_be_in_pieces(delta, &group) && sp_delta_begin_round(delta, &group);
    if (pieces.fits) {
        pieces.pack = delta->pieces.n_pack_tasks;
        pieces.shrink = delta->pieces.n_shrink_tasks;
        if (group.call.x_type == delta->pieces.dtype)
            pieces.packed_x = sp_lora_job_packed_x(&delta->pieces, group.n_rows);
    }
    return sp_struct_write(out_pieces, &pieces, sizeof pieces, "sp_delta_pieces", error);
}

void sp_delta_pieces_pack(sp_delta *delta, int32_t piece)
{
    sp_lora_job_pack(&delta->pieces, piece);
}

void sp_delta_pieces_shrink(sp_delta *delta, int32_t piece)
{
    sp_lora_job_shrink(&delta->pieces, piece);
}

bool sp_delta_pieces_expand(sp_delta *delta, int32_t output, int64_t column_begin,
                            int64_t column_end)
{
    int32_t target = delta->piece_target[output];

    return target < 0 || sp_lora_job_expand(&delta->pieces, target, column_begin, column_end);
}

/* ---- in halves ----------------------------------------------------------------------------- */

static sp_status read_half(const sp_delta *delta, const sp_delta_call *call, bool with_x,
                           sp_delta_group *out_group, sp_error *error)
{
    sp_status status = sp_delta_read_group(delta, call, with_x, out_group, error);

    if (status != SP_OK || out_group->call.n_outputs <= SP_DELTA_GROUP_MAX)
        return status;
    return sp_fail(error, SP_ERR_ARGUMENT, NULL, "n_outputs", -1,
                   "a half takes up to %d outputs, not %d", SP_DELTA_GROUP_MAX,
                   (int)out_group->call.n_outputs);
}

/* 0: rows chosen on the device. */
static uint64_t build_of(const sp_delta_group *group)
{
    return group->view != NULL ? group->view->build : 0;
}

static void open_half(sp_delta *delta, const sp_delta_group *group, bool whole)
{
    delta->half = (sp_delta_half){
        .open = true,
        .whole = whole,
        .n_outputs = group->call.n_outputs,
        .build = build_of(group),
        .call = group->call,
    };
    for (int32_t i = 0; i < group->call.n_outputs; i++)
        delta->half.sites[i] = sp_delta_output_at(group, i).site;
}

static sp_status check_half(const sp_delta *delta, const sp_delta_group *group, sp_error *error)
{
    const sp_delta_half *half = &delta->half;
    bool same = half->open && half->n_outputs == group->call.n_outputs &&
                half->call.plan == group->call.plan && half->build == build_of(group);

    for (int32_t i = 0; same && i < half->n_outputs; i++)
        same = half->sites[i] == sp_delta_output_at(group, i).site;
    if (same)
        return SP_OK;
    return sp_fail(error, SP_ERR_STATE, NULL, half->open ? "outputs" : "delta", -1,
                   half->open
                       ? "the shrink that is under way is of another plan, of one that was built "
                         "anew since, or of other sites: shrink again"
                       : "no shrink is under way: call sp_delta_shrink first");
}

static sp_delta_gpu_call gpu_call(const sp_delta *delta, const sp_delta_group *group)
{
    sp_delta_gpu_call call = sp_delta_gpu_call_of(group->n_rows, group->k_in, &group->call);

    for (int32_t i = 0; i < group->call.n_outputs && !delta->no_apply; i++) {
        sp_delta_output output = sp_delta_output_at(group, i);
        int32_t site = sp_delta_site_of(delta, output.site);

        if (site >= 0)
            sp_delta_gpu_call_add(&call, site, &output);
    }
    return call;
}

sp_status sp_delta_shrink(sp_delta *delta, const sp_delta_call *call, sp_error *error)
{
    sp_delta_group group;
    sp_status status = read_half(delta, call, true, &group, error);
    bool fits = true;

    if (status != SP_OK)
        return status;
    sp_delta_end_round(delta);
    if (delta->gpu != NULL) {
        sp_delta_gpu_call on_gpu = gpu_call(delta, &group);

        status = sp_delta_gpu_check_step(delta->gpu, group.view, error);
        if (status == SP_OK && on_gpu.n > 0)
            status = sp_delta_gpu_shrink(delta->gpu, &on_gpu, error);
        if (status != SP_OK)
            return status;
    } else {
        fits = sp_delta_begin_round(delta, &group);
        if (fits)
            sp_lora_job_run_shrinks(&delta->pieces);
    }
    open_half(delta, &group, !fits);
    return SP_OK;
}

static void expand_on_cpu(sp_delta *delta, const sp_delta_group *group)
{
    for (int32_t i = 0; i < group->call.n_outputs; i++) {
        sp_delta_output output = sp_delta_output_at(group, i);

        if (delta->piece_target[i] >= 0)
            sp_lora_job_set_y(&delta->pieces, delta->piece_target[i], output.y, output.y_stride,
                              output.y_type);
    }
    sp_lora_job_run_expands(&delta->pieces);
}

sp_status sp_delta_expand(sp_delta *delta, const sp_delta_call *call, sp_error *error)
{
    sp_delta_group group;
    sp_status status = read_half(delta, call, false, &group, error);

    if (status == SP_OK)
        status = check_half(delta, &group, error);
    if (status != SP_OK)
        return status;
    if (delta->gpu != NULL) {
        sp_delta_gpu_call on_gpu = gpu_call(delta, &group);

        on_gpu.x = delta->half.call.x;
        on_gpu.x_stride = delta->half.call.x_stride;
        on_gpu.x_type = delta->half.call.x_type;
        status = sp_delta_gpu_check_step(delta->gpu, group.view, error);
        if (status == SP_OK && on_gpu.n > 0)
            status = sp_delta_gpu_expand(delta->gpu, &on_gpu, error);
    } else if (delta->half.whole) {
        group.call.x = delta->half.call.x;
        group.call.x_stride = delta->half.call.x_stride;
        group.call.x_type = delta->half.call.x_type;
        status = sp_delta_apply_group(delta, &group, error);
    } else {
        expand_on_cpu(delta, &group);
    }
    sp_delta_end_round(delta);
    return status;
}

/* ---- around a product ---------------------------------------------------------------------- */

static sp_status around_on_gpu(sp_delta *delta, const sp_delta_group *group,
                               sp_delta_product_fn product, void *user, sp_error *error)
{
    sp_delta_gpu_call on_gpu = gpu_call(delta, group);
    sp_status status = sp_delta_gpu_check_step(delta->gpu, group->view, error);
    bool folded = false;

    if (status != SP_OK)
        return status;
    if (on_gpu.n == 0)
        return product(user, NULL, &folded);
    return sp_delta_gpu_around(delta->gpu, &on_gpu, product, user, error);
}

sp_status sp_delta_apply_around(sp_delta *delta, const sp_delta_call *call,
                                sp_delta_product_fn product, void *user, sp_error *error)
{
    sp_delta_group group;
    sp_status status = read_half(delta, call, true, &group, error);
    bool folded = false;

    if (status != SP_OK)
        return status;
    if (product == NULL)
        return sp_delta_missing("product", error);
    sp_delta_end_round(delta);
    if (delta->gpu != NULL)
        return around_on_gpu(delta, &group, product, user, error);
    status = product(user, NULL, &folded);
    return status == SP_OK ? sp_delta_apply_group(delta, &group, error) : status;
}
