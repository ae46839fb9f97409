/*
 * delta.c: the plan's deltas at the sites of one layer that share x. Everything is checked before
 * anything is written; then each segment of the plan goes to the job with its slot's cells of the
 * tables, and absent sites drop out there.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "base/grow.h"
#include "delta/delta_state.h"

#define ROWS_LIMIT    (1 << 20)
#define SCRATCH_ALIGN 256

/* ---- life ---------------------------------------------------------------------------------- */

void sp_delta_options_default(sp_delta_options *out_options, size_t struct_bytes)
{
    const sp_delta_options defaults = {.struct_bytes = sizeof defaults, .rows_max = 512};

    sp_struct_default(out_options, struct_bytes, &defaults, sizeof defaults);
}

static int32_t largest_k(const sp_layout *layout)
{
    int32_t k_max = 1;

    for (int32_t i = 0; i < sp_layout_n_sites(layout); i++) {
        const sp_layout_site *site = sp_layout_site_at(layout, i);

        /* No row is ever as long as the vocabulary: embed_tokens gathers. */
        if (site->kind != SP_SITE_EMBEDDING && site->k_in > k_max)
            k_max = site->k_in;
    }
    return k_max;
}

size_t sp_delta_workspace_bytes(const sp_layout *layout, int32_t rows_max)
{
    if (layout == NULL || rows_max < 1 || rows_max > ROWS_LIMIT)
        return 0;
    return sp_lora_scratch_bytes(sp_layout_dtype(layout), largest_k(layout),
                                 sp_layout_rank_stride(layout), rows_max) +
           sp_token_scratch_bytes(layout);
}

static bool on_gpu(const sp_pool *pool)
{
    return sp_device_get_kind(sp_pool_device(pool)) == SP_DEVICE_CUDA;
}

size_t sp_delta_device_bytes(const sp_pool *pool, int32_t rows_max)
{
    if (pool == NULL || rows_max < 1 || rows_max > SP_CUDA_ROWS_MAX || !on_gpu(pool))
        return 0;
    return sp_delta_gpu_bytes(pool, rows_max);
}

static sp_status check_options(const sp_delta_options *options, sp_error *error)
{
    if (options == NULL || options->struct_bytes < sizeof *options || options->pool == NULL ||
        (options->exec == NULL && !on_gpu(options->pool)))
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, NULL, -1,
                       "delta options without a pool or executor, or not initialised");
    if (options->rows_max < 1 || options->rows_max > ROWS_LIMIT)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "rows_max", -1,
                       "rows_max must be from 1 to %d, not %d", ROWS_LIMIT, (int)options->rows_max);
    return SP_OK;
}

/* The CPU's kernels and scratch. */
static sp_status create_scratch(sp_delta *delta, const char *cpu_isa, sp_error *error)
{
    const sp_layout *layout = delta->layout;
    size_t scratch_bytes = sp_delta_workspace_bytes(layout, delta->rows_max);
    sp_status status = sp_kernels_get(cpu_isa, &delta->kernels, error);

    if (status != SP_OK)
        return status;
    delta->block = sp_aligned_calloc(scratch_bytes, SCRATCH_ALIGN);
    if (delta->block == NULL)
        return sp_fail_memory(error, scratch_bytes, "the delta's scratch");
    sp_lora_scratch_cut(delta->block, sp_layout_dtype(layout), largest_k(layout),
                        sp_layout_rank_stride(layout), delta->rows_max, &delta->scratch);
    sp_token_scratch_cut((char *)delta->block + scratch_bytes - sp_token_scratch_bytes(layout),
                         layout, &delta->token_scratch);
    return SP_OK;
}

static void set_sites(sp_delta *delta)
{
    const sp_geometry *geometry = sp_layout_geometry(delta->layout);

    delta->n_sites = sp_geometry_n_sites(geometry);
    delta->embed_site = sp_geometry_find_kind(geometry, SP_SITE_EMBEDDING);
    delta->head_site = sp_geometry_find_kind(geometry, SP_SITE_HEAD);
}

sp_status sp_delta_create(const sp_delta_options *options, sp_delta **out_delta, sp_error *error)
{
    sp_delta *delta;
    sp_status status = check_options(options, error);

    if (status != SP_OK)
        return status;
    delta = sp_calloc(1, sizeof *delta);
    if (delta == NULL)
        return sp_fail_memory(error, sizeof *delta, "the delta");
    delta->pool = options->pool;
    delta->layout = sp_pool_layout(options->pool);
    set_sites(delta);
    delta->exec = options->exec;
    delta->rows_max = options->rows_max;
    delta->no_apply = options->no_apply;
    delta->skipped = options->skip_modules;
    if (on_gpu(delta->pool))
        status = sp_delta_gpu_create(delta->pool, delta->rows_max, &delta->gpu, error);
    else
        status = create_scratch(delta, options->cpu_isa, error);
    if (status != SP_OK) {
        sp_free(delta);
        return status;
    }
    *out_delta = delta;
    return SP_OK;
}

void sp_delta_destroy(sp_delta *delta)
{
    if (delta == NULL)
        return;
    sp_delta_gpu_destroy(delta->gpu);
    sp_aligned_free(delta->block);
    sp_free(delta);
}

/* ---- checks -------------------------------------------------------------------------------- */

static sp_status check_output(const sp_delta *delta, const sp_delta_output *output,
                              int32_t *io_k_in)
{
    sp_dtype dtype = sp_layout_dtype(delta->layout);
    const sp_layout_site *site;

    if (output->site < 0 || output->site >= delta->n_sites || output->y == NULL ||
        output->site == delta->embed_site)
        return SP_ERR_ARGUMENT;
    if (output->y_type != dtype && output->y_type != SP_DTYPE_F32)
        return SP_ERR_ARGUMENT;
    site = sp_layout_site_at(delta->layout, sp_layout_find(delta->layout, output->site));
    if (site == NULL)
        return SP_OK;
    if (*io_k_in != 0 && site->k_in != *io_k_in)
        return SP_ERR_ARGUMENT;
    *io_k_in = site->k_in;
    return output->y_stride < site->n_out ? SP_ERR_STRIDE : SP_OK;
}

/* The plan is of this pool, its versions are held still, and its rows fit. */
sp_status sp_delta_check_plan(const sp_delta *delta, const sp_plan *plan)
{
    sp_status status;

    if (delta == NULL || plan == NULL)
        return SP_ERR_ARGUMENT;
    status = sp_plan_check(plan, delta->pool, NULL);
    if (status != SP_OK)
        return status;
    return sp_plan_get(plan)->n_rows <= delta->rows_max ? SP_OK : SP_ERR_ARGUMENT;
}

/* All but x. *out_k_in is 0 where the pool holds none of the sites. */
static sp_status check_outputs(const sp_delta *delta, const sp_delta_output *outputs,
                               int32_t n_outputs, int32_t *out_k_in)
{
    sp_status status = SP_OK;

    if (n_outputs < 0 || (outputs == NULL && n_outputs > 0))
        return SP_ERR_ARGUMENT;
    *out_k_in = 0;
    for (int32_t i = 0; i < n_outputs && status == SP_OK; i++)
        status = check_output(delta, &outputs[i], out_k_in);
    return status;
}

static sp_status check_apply(const sp_delta *delta, const void *x, int64_t x_stride,
                             const sp_delta_output *outputs, int32_t n_outputs, int32_t *out_k_in)
{
    sp_status status = x != NULL ? SP_OK : SP_ERR_ARGUMENT;

    if (status == SP_OK)
        status = check_outputs(delta, outputs, n_outputs, out_k_in);
    if (status != SP_OK)
        return status;
    return x_stride < *out_k_in ? SP_ERR_STRIDE : SP_OK;
}

/* ---- applying ------------------------------------------------------------------------------ */

/* The sites of one job: at most SP_LORA_GROUP_MAX that the pool holds. */
typedef struct site_group {
    int32_t n;
    const sp_pool_tables *tables[SP_LORA_GROUP_MAX];
    int32_t k_in[SP_LORA_GROUP_MAX];
} site_group;

static void add_site(const sp_delta *delta, int32_t index, const sp_delta_output *output,
                     site_group *group, sp_lora_job *job)
{
    const sp_layout_site *site = sp_layout_site_at(delta->layout, index);

    group->tables[group->n] = sp_pool_tables_at(delta->pool, index);
    group->k_in[group->n] = site->k_in;
    job->targets[group->n] = (sp_lora_target){
        .y = output->y,
        .y_stride = output->y_stride,
        .y_type = output->y_type,
        .n_out = site->n_out,
    };
    group->n++;
}

static void add_rows(const sp_plan_view *view, const site_group *group, sp_lora_job *job)
{
    job->n_targets = group->n;
    for (int32_t segment = 0; segment < view->n_segments; segment++) {
        int32_t slot = view->segment_slot[segment], begin = view->segment_begin[segment];
        sp_lora_pair pairs[SP_LORA_GROUP_MAX];

        for (int32_t t = 0; t < group->n; t++)
            pairs[t] = (sp_lora_pair){
                .a = group->tables[t]->a[slot],
                .b = group->tables[t]->b[slot],
                .a_stride = group->k_in[t],
                .b_stride = job->rank_max,
                .rank = group->tables[t]->rank[slot],
                .scale = group->tables[t]->scale[slot],
            };
        sp_lora_job_add(job, view->row_order + begin, view->segment_begin[segment + 1] - begin,
                        view->row_scale, pairs);
    }
}

static void apply_group(const sp_plan_view *view, const site_group *group, sp_lora_job *job)
{
    add_rows(view, group, job);
    sp_lora_job_finish(job);
}

static sp_lora_job new_job(const sp_delta *delta, const void *x, int64_t x_stride, int32_t k_in)
{
    return (sp_lora_job){
        .kernels = delta->kernels,
        .exec = delta->exec,
        .scratch = &delta->scratch,
        .dtype = sp_layout_dtype(delta->layout),
        .k_in = k_in,
        .rank_max = sp_layout_rank_stride(delta->layout),
        .x = x,
        .x_stride = x_stride,
    };
}

/* The layout's index of an output that has a delta to apply, or -1. */
static int32_t site_of(const sp_delta *delta, int32_t site)
{
    int32_t index = sp_layout_find(delta->layout, site);

    if (index >= 0 && (delta->skipped >> sp_layout_site_at(delta->layout, index)->module & 1u) != 0)
        return -1;
    return index;
}

/* The checks are over and the plan routes a row. */
static void apply_on_cpu(const sp_delta *delta, const sp_plan_view *view, sp_lora_job *job,
                         const sp_delta_output *outputs, int32_t n_outputs)
{
    site_group group = {.n = 0};

    for (int32_t i = 0; i < n_outputs; i++) {
        int32_t site = site_of(delta, outputs[i].site);

        if (site < 0)
            continue;
        add_site(delta, site, &outputs[i], &group, job);
        if (group.n == SP_LORA_GROUP_MAX) {
            apply_group(view, &group, job);
            group.n = 0;
        }
    }
    if (group.n > 0)
        apply_group(view, &group, job);
}

/* Sites from outputs [first, n_outputs) until the call is full; returns the output after them. */
static int32_t fill_call(const sp_delta *delta, const sp_delta_output *outputs, int32_t n_outputs,
                         int32_t first, sp_delta_gpu_call *call)
{
    int32_t i = first;

    call->n = 0;
    for (; i < n_outputs && call->n < SP_CUDA_SITES_MAX; i++) {
        int32_t site = site_of(delta, outputs[i].site);

        if (site < 0)
            continue;
        call->sites[call->n] = site;
        call->outputs[call->n++] = &outputs[i];
    }
    return i;
}

/* What the plan routes does not matter: a graph that is captured here may replay any other. */
static sp_status apply_on_gpu(const sp_delta *delta, sp_delta_gpu_call *call,
                              const sp_delta_output *outputs, int32_t n_outputs)
{
    sp_status status = SP_OK;

    for (int32_t i = 0; i < n_outputs && status == SP_OK;) {
        i = fill_call(delta, outputs, n_outputs, i, call);
        if (call->n > 0)
            status = sp_delta_gpu_apply(delta->gpu, call);
    }
    return status;
}

sp_status sp_delta_apply(sp_delta *delta, const sp_plan *plan, const void *x, int64_t x_stride,
                         const sp_delta_output *outputs, int32_t n_outputs)
{
    sp_plan_view view;
    sp_lora_job job;
    int32_t k_in;
    sp_status status;

    status = sp_delta_check_plan(delta, plan);
    if (status != SP_OK)
        return status;
    view = *sp_plan_get(plan);
    status = check_apply(delta, x, x_stride, outputs, n_outputs, &k_in);
    if (status != SP_OK || delta->no_apply || k_in == 0)
        return status;
    if (delta->gpu != NULL) {
        sp_delta_gpu_call call = {view.n_rows, k_in, x, x_stride, .n = 0};

        return apply_on_gpu(delta, &call, outputs, n_outputs);
    }
    job = new_job(delta, x, x_stride, k_in);
    if (view.n_segments > 0)
        apply_on_cpu(delta, &view, &job, outputs, n_outputs);
    return SP_OK;
}

/* ---- in pieces ----------------------------------------------------------------------------- */

sp_status sp_delta_begin(sp_delta *delta, const sp_plan *plan, const void *x, int64_t x_stride,
                         const sp_delta_output *outputs, int32_t n_outputs,
                         sp_delta_pieces *out_pieces)
{
    sp_plan_view view;
    site_group group = {.n = 0};
    int32_t k_in;
    sp_status status;

    if (out_pieces == NULL)
        return SP_ERR_ARGUMENT;
    status = sp_delta_check_plan(delta, plan);
    if (status != SP_OK)
        return status;
    view = *sp_plan_get(plan);
    status = check_apply(delta, x, x_stride, outputs, n_outputs, &k_in);
    if (status != SP_OK)
        return status;
    *out_pieces = (sp_delta_pieces){.fits = n_outputs <= SP_LORA_GROUP_MAX && delta->gpu == NULL};
    if (!out_pieces->fits)
        return SP_OK;
    delta->pieces = new_job(delta, x, x_stride, k_in);
    delta->pieces.in_pieces = true;
    for (int32_t i = 0; i < n_outputs; i++) {
        int32_t site = delta->no_apply ? -1 : site_of(delta, outputs[i].site);

        delta->piece_target[i] = site < 0 ? -1 : group.n;
        if (site >= 0)
            add_site(delta, site, &outputs[i], &group, &delta->pieces);
    }
    if (group.n > 0)
        add_rows(&view, &group, &delta->pieces);
    out_pieces->fits = !delta->pieces.too_large;
    if (!out_pieces->fits)
        return SP_OK;
    sp_lora_job_cut(&delta->pieces);
    out_pieces->pack = delta->pieces.n_pack_tasks;
    out_pieces->shrink = delta->pieces.n_shrink_tasks;
    out_pieces->packed_x = sp_lora_job_packed_x(&delta->pieces, view.n_rows);
    return SP_OK;
}

void sp_delta_pack(sp_delta *delta, int32_t piece)
{
    sp_lora_job_pack(&delta->pieces, piece);
}

void sp_delta_shrink(sp_delta *delta, int32_t piece)
{
    sp_lora_job_shrink(&delta->pieces, piece);
}

bool sp_delta_expand(sp_delta *delta, int32_t output, int64_t column_begin, int64_t column_end)
{
    int32_t target = delta->piece_target[output];

    return target < 0 || sp_lora_job_expand(&delta->pieces, target, column_begin, column_end);
}

/* ---- a step on a GPU ----------------------------------------------------------------------- */

sp_status sp_delta_upload(sp_delta *delta, const sp_plan *plan)
{
    sp_plan_view view;
    sp_status status;

    status = sp_delta_check_plan(delta, plan);
    if (status != SP_OK)
        return status;
    view = *sp_plan_get(plan);
    return delta->gpu != NULL ? sp_delta_gpu_upload(delta->gpu, &view) : SP_OK;
}

sp_status sp_delta_start(sp_delta *delta, const sp_plan *plan)
{
    sp_plan_view view;
    sp_status status;

    status = sp_delta_check_plan(delta, plan);
    if (status != SP_OK)
        return status;
    view = *sp_plan_get(plan);
    return delta->gpu != NULL ? sp_delta_gpu_start(delta->gpu, view.n_rows) : SP_OK;
}

/* Both halves take one group: the sites that the pool holds, in the order of the outputs. The
 * checks are over. */
static sp_status fill_half(const sp_delta *delta, const sp_delta_output *outputs, int32_t n_outputs,
                           sp_delta_gpu_call *call)
{
    int32_t taken = fill_call(delta, outputs, n_outputs, 0, call);

    return taken < n_outputs ? SP_ERR_ARGUMENT : SP_OK;
}

sp_status sp_delta_enqueue_shrink(sp_delta *delta, const sp_plan *plan, const void *x,
                                  int64_t x_stride, const sp_delta_output *outputs,
                                  int32_t n_outputs, sp_stream *stream)
{
    sp_delta_gpu_call call = {.x = x, .x_stride = x_stride};
    sp_plan_view view;
    sp_status status;

    status = sp_delta_check_plan(delta, plan);
    if (status != SP_OK)
        return status;
    if (delta->gpu == NULL)
        return SP_ERR_UNSUPPORTED;
    view = *sp_plan_get(plan);
    call.n_rows = view.n_rows;
    status = check_apply(delta, x, x_stride, outputs, n_outputs, &call.k_in);
    if (status == SP_OK)
        status = fill_half(delta, outputs, n_outputs, &call);
    if (status != SP_OK || delta->no_apply || call.n == 0)
        return status;
    return sp_delta_gpu_shrink(delta->gpu, &call, stream);
}

sp_status sp_delta_enqueue_expand(sp_delta *delta, const sp_plan *plan,
                                  const sp_delta_output *outputs, int32_t n_outputs,
                                  sp_stream *stream)
{
    sp_delta_gpu_call call = {.x = NULL};
    sp_plan_view view;
    sp_status status;

    status = sp_delta_check_plan(delta, plan);
    if (status != SP_OK)
        return status;
    if (delta->gpu == NULL)
        return SP_ERR_UNSUPPORTED;
    view = *sp_plan_get(plan);
    call.n_rows = view.n_rows;
    status = check_outputs(delta, outputs, n_outputs, &call.k_in);
    if (status == SP_OK)
        status = fill_half(delta, outputs, n_outputs, &call);
    if (status != SP_OK || delta->no_apply || call.n == 0)
        return status;
    return sp_delta_gpu_expand(delta->gpu, &call, stream);
}
