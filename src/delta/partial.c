/*
 * partial.c: a delta in two halves, shrink and expand, with xa in the host's memory between them
 * (the host may sum it over ranks). On the CPU each half is a job of delta.c restricted to it; on a
 * GPU the same shrink and expand run, with a launch between them that exports or imports xa. So on
 * a single rank the bits are those of a whole delta.
 */
#include "base/error.h"
#include "base/grow.h"
#include "delta/delta_state.h"

#include <sidepath/partial.h>

#include <string.h>

/* A call that has been read and is checked site by site. */
typedef struct partial_call {
    sp_delta *delta;
    sp_delta_partial_call args;
    const sp_plan_view *view; /* not used on a GPU */
    int32_t n_rows;
    sp_lora_half half;
    int32_t k_in; /* of the first site in the pool; 0: none yet */
} partial_call;

/* ---- checks -------------------------------------------------------------------------------- */

static sp_status read_site(const partial_call *call, int32_t index, sp_delta_partial *out,
                           sp_error *error)
{
    *out = (sp_delta_partial){.struct_bytes = sizeof *out};
    return sp_struct_read_at(out, sizeof *out, call->args.sites, (size_t)index, "sp_delta_partial",
                             error);
}

static sp_status bad(int32_t index, const char *what, sp_error *error)
{
    return sp_fail(error, SP_ERR_ARGUMENT, NULL, "sites", index, "site %d of the call: %s",
                   (int)index, what);
}

static sp_status check_xa(const partial_call *call, const sp_delta_partial *site, int32_t index,
                          sp_error *error)
{
    if (site->xa == NULL)
        return bad(index, "xa is NULL", error);
    return sp_delta_check_stride("xa_stride", site->xa_stride,
                                 sp_layout_rank_stride(call->delta->layout), error);
}

static sp_status check_y(const partial_call *call, const sp_delta_partial *site, int32_t index,
                         int32_t n_out, sp_error *error)
{
    if (site->y == NULL)
        return bad(index, "y is NULL", error);
    if (site->y_type != sp_layout_dtype(call->delta->layout) && site->y_type != SP_DTYPE_F32)
        return bad(index, "y is neither of the pool's type nor f32", error);
    return sp_delta_check_stride("y_stride", site->y_stride, n_out, error);
}

static sp_status check_site(partial_call *call, int32_t index, sp_error *error)
{
    const sp_layout *layout = call->delta->layout;
    const sp_layout_site *place;
    sp_delta_partial site;
    sp_site row = {.struct_bytes = sizeof row};
    sp_status status = read_site(call, index, &site, error);

    if (status != SP_OK)
        return status;
    if (sp_geometry_site_at(sp_layout_geometry(layout), site.site, &row, NULL) != SP_OK)
        return bad(index, "the geometry has no such site", error);
    if (row.kind != SP_SITE_LINEAR)
        return bad(index, "only linear sites have parts", error);
    status = check_xa(call, &site, index, error);
    place = sp_layout_site_at(layout, sp_layout_find(layout, site.site));
    if (status != SP_OK || place == NULL)
        return status;
    if (call->half == SP_LORA_EXPAND)
        return check_y(call, &site, index, place->n_out, error);
    if (call->k_in != 0 && place->k_in != call->k_in)
        return bad(index, "its inputs are not as many as those of the sites before it", error);
    call->k_in = place->k_in;
    return SP_OK;
}

static sp_status check_x(const partial_call *call, sp_error *error)
{
    sp_status status;

    if (call->args.x == NULL)
        return sp_delta_missing("x", error);
    status = sp_delta_check_x_type(call->delta, call->args.x_type, error);
    if (status != SP_OK)
        return status;
    return sp_delta_check_stride("x_stride", call->args.x_stride, call->k_in, error);
}

static sp_status check_sites(partial_call *call, sp_error *error)
{
    sp_status status = SP_OK;

    if (call->args.n_sites < 0)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "n_sites", -1,
                       "n_sites cannot be negative (%d)", (int)call->args.n_sites);
    if (call->args.n_sites > 0 && call->args.sites == NULL)
        return sp_delta_missing("sites", error);
    for (int32_t i = 0; i < call->args.n_sites && status == SP_OK; i++)
        status = check_site(call, i, error);
    return status;
}

/* Checks everything before anything is written. */
static sp_status begin(sp_delta *delta, const sp_delta_partial_call *from, sp_lora_half half,
                       partial_call *call, sp_error *error)
{
    sp_status status;

    *call = (partial_call){.delta = delta, .half = half};
    call->args.struct_bytes = sizeof call->args;
    status = sp_struct_read(&call->args, sizeof call->args, from, "sp_delta_partial_call", error);
    if (status == SP_OK && delta == NULL)
        status = sp_delta_missing("delta", error);
    if (status != SP_OK)
        return status;
    status = sp_delta_rows_of(delta, call->args.plan, &call->view, &call->n_rows, error);
    if (status == SP_OK && delta->gpu != NULL)
        status = sp_delta_gpu_check_step(delta->gpu, call->view, error);
    if (status == SP_OK)
        status = check_sites(call, error);
    if (status == SP_OK && half == SP_LORA_SHRINK)
        status = check_x(call, error);
    return status;
}

/* ---- running ------------------------------------------------------------------------------- */

/* Sites of one job or launch. */
typedef struct partial_group {
    int32_t n;
    int32_t places[SP_LORA_GROUP_MAX]; /* in the layout */
    sp_delta_partial sites[SP_LORA_GROUP_MAX];
} partial_group;

static void add_segments(const partial_call *call, const partial_group *group, sp_lora_job *job)
{
    const sp_plan_view *view = call->view;

    for (int32_t segment = 0; segment < view->n_segments; segment++) {
        int32_t slot = view->segment_slot[segment], first = view->segment_begin[segment];
        sp_lora_pair pairs[SP_LORA_GROUP_MAX];

        for (int32_t t = 0; t < group->n; t++) {
            const sp_pool_tables *tables = sp_pool_tables_at(call->delta->pool, group->places[t]);

            pairs[t] = (sp_lora_pair){
                .a = tables->a[slot],
                .b = tables->b[slot],
                .a_stride = sp_layout_site_at(call->delta->layout, group->places[t])->k_in,
                .b_stride = job->rank_max,
                .rank = tables->rank[slot],
                .scale = tables->scale[slot],
            };
        }
        sp_lora_job_add(job,
                        &(sp_lora_rows){.n = view->segment_begin[segment + 1] - first,
                                        .order = view->row_order + first,
                                        .row_scale = view->row_scale},
                        pairs);
    }
}

static void run_on_cpu(const partial_call *call, const partial_group *group)
{
    const sp_delta *delta = call->delta;
    sp_lora_job job = {
        .kernels = delta->kernels,
        .exec = delta->exec,
        .scratch = &delta->scratch,
        .dtype = sp_layout_dtype(delta->layout),
        .x_type = call->args.x_type,
        .k_in = call->k_in,
        .rank_max = sp_layout_rank_stride(delta->layout),
        .x = call->args.x,
        .x_stride = call->args.x_stride,
        .n_targets = group->n,
        .half = call->half,
    };

    for (int32_t t = 0; t < group->n; t++)
        job.targets[t] = (sp_lora_target){
            .y = group->sites[t].y,
            .y_stride = group->sites[t].y_stride,
            .y_type = group->sites[t].y_type,
            .n_out = sp_layout_site_at(delta->layout, group->places[t])->n_out,
            .xa = group->sites[t].xa,
            .xa_stride = group->sites[t].xa_stride,
        };
    add_segments(call, group, &job);
    sp_lora_job_finish(&job);
}

static sp_status run_on_gpu(const partial_call *call, const partial_group *group, sp_error *error)
{
    sp_delta_gpu_call own = {
        .n_rows = call->n_rows,
        .k_in = call->k_in,
        .x = call->args.x,
        .x_stride = call->args.x_stride,
        .x_type = call->args.x_type,
        .stream = call->args.stream,
    };
    sp_cuda_parts parts = {.xa = {NULL}};

    for (int32_t t = 0; t < group->n; t++) {
        const sp_delta_partial *site = &group->sites[t];
        const sp_delta_output output = {
            .struct_bytes = sizeof output,
            .site = site->site,
            .y = site->y,
            .y_stride = site->y_stride,
            .y_type = site->y_type,
        };

        sp_delta_gpu_call_add(&own, group->places[t], &output);
        parts.xa[t] = site->xa;
        parts.xa_stride[t] = site->xa_stride;
    }
    if (call->half == SP_LORA_SHRINK)
        return sp_delta_gpu_shrink_parts(call->delta->gpu, &own, &parts, error);
    return sp_delta_gpu_expand_parts(call->delta->gpu, &own, &parts, error);
}

static sp_status run_group(const partial_call *call, const partial_group *group, sp_error *error)
{
    if (group->n == 0)
        return SP_OK;
    if (call->delta->gpu != NULL)
        return run_on_gpu(call, group, error);
    run_on_cpu(call, group);
    return SP_OK;
}

/* Zeros in every row of a site's xa. */
static sp_status clear_xa(const partial_call *call, const sp_delta_partial *site, sp_error *error)
{
    size_t bytes = (size_t)sp_layout_rank_stride(call->delta->layout) * sizeof *site->xa;

    if (call->delta->gpu != NULL) {
        const sp_cuda_parts part = {.xa = {site->xa}, .xa_stride = {site->xa_stride}};

        return sp_delta_gpu_clear_part(call->delta->gpu, call->n_rows, &part, call->args.stream,
                                       error);
    }
    for (int32_t row = 0; row < call->n_rows; row++)
        memset(site->xa + row * site->xa_stride, 0, bytes);
    return SP_OK;
}

/* Whether a site's xa must be zeroed first: the CPU writes only existing sums, a GPU's launch all
 * of a site in the pool. */
static bool wants_zeros(const partial_call *call, int32_t place)
{
    return call->half == SP_LORA_SHRINK && (place < 0 || call->delta->gpu == NULL);
}

/* Sites that are not in the pool, or are skipped by a setting, are dropped here. */
static sp_status run(const partial_call *call, sp_error *error)
{
    partial_group group = {.n = 0};
    sp_status status = SP_OK;

    sp_delta_end_round(call->delta);
    for (int32_t i = 0; i < call->args.n_sites && status == SP_OK; i++) {
        sp_delta_partial *site = &group.sites[group.n];
        int32_t place;

        (void)read_site(call, i, site, NULL);
        place = call->delta->no_apply ? -1 : sp_delta_site_of(call->delta, site->site);
        if (wants_zeros(call, place))
            status = clear_xa(call, site, error);
        if (status != SP_OK || place < 0)
            continue;
        group.places[group.n] = place;
        if (++group.n == SP_LORA_GROUP_MAX) {
            status = run_group(call, &group, error);
            group.n = 0;
        }
    }
    return status == SP_OK ? run_group(call, &group, error) : status;
}

sp_status sp_delta_shrink_partial(sp_delta *delta, const sp_delta_partial_call *call,
                                  sp_error *error)
{
    partial_call own;
    sp_status status = begin(delta, call, SP_LORA_SHRINK, &own, error);

    return status == SP_OK ? run(&own, error) : status;
}

sp_status sp_delta_expand_from(sp_delta *delta, const sp_delta_partial_call *call, sp_error *error)
{
    partial_call own;
    sp_status status = begin(delta, call, SP_LORA_EXPAND, &own, error);

    return status == SP_OK ? run(&own, error) : status;
}
