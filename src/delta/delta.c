/*
 * delta.c: the plan's deltas at the sites that share x. Everything is checked before anything is
 * written; then each segment of the plan is added to the job with its slot's cells of the tables;
 * absent sites are dropped there.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "base/grow.h"
#include "base/integer.h"
#include "delta/delta_state.h"

#define ROWS_LIMIT    (1 << 20)
#define SCRATCH_ALIGN 256

/* ---- life ---------------------------------------------------------------------------------- */

void sp_delta_options_default(sp_delta_options *out_options, size_t struct_bytes)
{
    const sp_delta_options defaults = {
        .struct_bytes = sizeof defaults, .rows_max = 512, .expert_rows_max = 4096};

    sp_struct_default(out_options, struct_bytes, &defaults, sizeof defaults);
}

static int32_t largest_k(const sp_layout *layout)
{
    int32_t k_max = 1;

    for (int32_t i = 0; i < sp_layout_n_sites(layout); i++) {
        const sp_layout_site *site = sp_layout_site_at(layout, i);

        /* embed_tokens gathers, so no packed row is as long as the vocabulary. */
        if (site->kind != SP_SITE_EMBEDDING && site->k_in > k_max)
            k_max = site->k_in;
    }
    return k_max;
}

/* Routers have ranks of their own. */
static int32_t largest_rank(const sp_layout *layout)
{
    const sp_layout_site *last = sp_layout_site_at(layout, sp_layout_n_sites(layout) - 1);
    int64_t of_slots = sp_layout_rank_stride(layout);

    if (last == NULL || !last->apart)
        return (int32_t)of_slots;
    return (int32_t)max64(of_slots, round_up(sp_layout_expert_rank(layout), SP_POOL_RANK_STEP));
}

static sp_lora_sizes sizes_of(const sp_layout *layout, int32_t rows_max, bool x_f32)
{
    return (sp_lora_sizes){
        .dtype = sp_layout_dtype(layout),
        .k_max = largest_k(layout),
        .rank_max = largest_rank(layout),
        .rows_max = rows_max,
        .x_f32 = x_f32,
    };
}

size_t sp_delta_workspace_bytes(const sp_layout *layout, int32_t rows_max, bool x_f32)
{
    sp_lora_sizes sizes;

    if (layout == NULL || rows_max < 1 || rows_max > ROWS_LIMIT)
        return 0;
    sizes = sizes_of(layout, rows_max, x_f32);
    return sp_lora_scratch_bytes(&sizes) + sp_token_scratch_bytes(layout, x_f32);
}

static bool on_gpu(const sp_pool *pool)
{
    return sp_device_get_kind(sp_pool_device(pool)) == SP_DEVICE_CUDA;
}

size_t sp_delta_device_bytes(const sp_pool *pool, int32_t rows_max, bool x_f32)
{
    if (pool == NULL || rows_max < 1 || rows_max > SP_CUDA_ROWS_MAX || !on_gpu(pool))
        return 0;
    return sp_delta_gpu_bytes(pool, rows_max, x_f32);
}

static sp_status read_options(const sp_delta_options *from, sp_delta_options *out, sp_error *error)
{
    sp_status status;

    sp_delta_options_default(out, sizeof *out);
    status = sp_struct_read(out, sizeof *out, from, "sp_delta_options", error);
    if (status != SP_OK)
        return status;
    if (out->pool == NULL)
        return sp_delta_missing("pool", error);
    if (out->rows_max < 1 || out->rows_max > ROWS_LIMIT)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "rows_max", -1,
                       "rows_max must be from 1 to %d, not %d", ROWS_LIMIT, (int)out->rows_max);
    if (out->expert_rows_max < 1 || out->expert_rows_max > SP_DELTA_EXPERT_ROWS_MAX)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "expert-max-tokens", -1,
                       "expert_rows_max must be from 1 to %d, not %d", SP_DELTA_EXPERT_ROWS_MAX,
                       (int)out->expert_rows_max);
    return SP_OK;
}

/* The CPU's kernels and scratch. */
static sp_status create_scratch(sp_delta *delta, const char *cpu_isa, sp_error *error)
{
    const sp_layout *layout = delta->layout;
    size_t bytes = sp_delta_workspace_bytes(layout, delta->rows_max, delta->x_f32);
    sp_lora_sizes sizes = sizes_of(layout, delta->rows_max, delta->x_f32);
    sp_status status = sp_kernels_get(cpu_isa, &delta->kernels, error);

    if (status != SP_OK)
        return status;
    delta->block = sp_aligned_calloc(bytes, SCRATCH_ALIGN);
    if (delta->block == NULL)
        return sp_fail_memory(error, bytes, "the delta's scratch");
    sp_lora_scratch_cut(delta->block, &sizes, &delta->scratch);
    sp_token_scratch_cut((char *)delta->block + bytes -
                             sp_token_scratch_bytes(layout, delta->x_f32),
                         layout, delta->x_f32, &delta->token_scratch);
    return SP_OK;
}

sp_status sp_delta_create(const sp_delta_options *options, sp_delta **out_delta, sp_error *error)
{
    sp_delta_options own;
    sp_status status = read_options(options, &own, error);
    sp_delta *delta;

    if (status != SP_OK)
        return status;
    if (out_delta == NULL)
        return sp_delta_missing("out_delta", error);
    delta = sp_calloc(1, sizeof *delta);
    if (delta == NULL)
        return sp_fail_memory(error, sizeof *delta, "the delta");
    delta->pool = own.pool;
    delta->layout = sp_pool_layout(own.pool);
    delta->exec = own.exec;
    delta->rows_max = own.rows_max;
    delta->n_sites = sp_geometry_n_sites(sp_layout_geometry(delta->layout));
    delta->embed = sp_token_table_of(delta->layout, SP_SITE_EMBEDDING);
    delta->head = sp_token_table_of(delta->layout, SP_SITE_HEAD);
    delta->x_f32 = own.x_f32;
    delta->no_apply = own.no_apply;
    delta->skipped = own.skip_modules;
    if (on_gpu(delta->pool))
        status = sp_delta_gpu_create(delta->pool, delta->rows_max, own.x_f32, &delta->gpu, error);
    else
        status = create_scratch(delta, own.cpu_isa, error);
    if (status == SP_OK)
        status = sp_delta_experts_create(delta, own.expert_rows_max, error);
    if (status != SP_OK) {
        sp_delta_destroy(delta);
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
    sp_delta_experts_destroy(delta);
    sp_aligned_free(delta->block);
    sp_free(delta);
}

/* ---- checks -------------------------------------------------------------------------------- */

sp_status sp_delta_missing(const char *name, sp_error *error)
{
    return sp_fail(error, SP_ERR_ARGUMENT, NULL, name, -1, "%s is NULL", name);
}

sp_status sp_delta_rows_of(const sp_delta *delta, const sp_plan *plan,
                           const sp_plan_view **out_view, int32_t *out_rows, sp_error *error)
{
    sp_status status;

    if (delta == NULL)
        return sp_delta_missing("delta", error);
    *out_view = NULL;
    if (plan == NULL && (delta->gpu == NULL || !sp_delta_gpu_has_device_rows(delta->gpu)))
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "plan", -1,
                       "plan is NULL, and the step did not begin with sp_plan_from_device");
    if (plan == NULL) {
        *out_rows = sp_delta_gpu_rows_started(delta->gpu);
        return SP_OK;
    }
    status = sp_plan_check(plan, delta->pool, error);
    if (status != SP_OK)
        return status;
    *out_view = sp_plan_get(plan);
    *out_rows = (*out_view)->n_rows;
    if (*out_rows > delta->rows_max)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "plan", -1,
                       "the plan has %d rows, the delta was made for %d", (int)*out_rows,
                       (int)delta->rows_max);
    return SP_OK;
}

sp_status sp_delta_check_x_type(const sp_delta *delta, sp_dtype x_type, sp_error *error)
{
    sp_dtype dtype = sp_layout_dtype(delta->layout);

    if (x_type == dtype || (x_type == SP_DTYPE_F32 && delta->x_f32))
        return SP_OK;
    if (x_type == SP_DTYPE_F32)
        return sp_fail(error, SP_ERR_UNSUPPORTED, NULL, "x_type", -1,
                       "x is f32 and the pool %s: set x_f32 in sp_delta_options",
                       sp_dtype_name(dtype));
    return sp_fail(error, SP_ERR_ARGUMENT, NULL, "x_type", (int64_t)x_type,
                   "x_type is %d, it must be %s as the pool's, or f32", (int)x_type,
                   sp_dtype_name(dtype));
}

sp_status sp_delta_check_stride(const char *name, int64_t stride, int64_t width, sp_error *error)
{
    if (stride >= width)
        return SP_OK;
    return sp_fail(error, SP_ERR_STRIDE, "bad-stride", name, -1,
                   "%s is %lld, a row has %lld elements", name, (long long)stride,
                   (long long)width);
}

/* What a site is of, where that is no matter of these calls. */
static sp_status check_kind(const sp_delta *delta, const sp_delta_output *output, int32_t index,
                            sp_error *error)
{
    sp_site row = {.struct_bytes = sizeof row};

    (void)sp_geometry_site_at(sp_layout_geometry(delta->layout), output->site, &row, NULL);
    if (row.kind == SP_SITE_EXPERT)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "site", index,
                       "output %d names site %d, which is an expert's: call "
                       "sp_delta_experts_apply",
                       (int)index, (int)output->site);
    return SP_OK;
}

static sp_status check_output(const sp_delta *delta, const sp_delta_output *output, int32_t index,
                              int32_t *io_k_in, sp_error *error)
{
    sp_dtype dtype = sp_layout_dtype(delta->layout);
    const sp_layout_site *site;
    sp_status status;

    if (output->site < 0 || output->site >= delta->n_sites)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "site", index,
                       "output %d names site %d, the geometry has sites 0 to %d", (int)index,
                       (int)output->site, (int)delta->n_sites - 1);
    if (output->y == NULL)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "y", index, "y of output %d is NULL",
                       (int)index);
    if (output->y_type != dtype && output->y_type != SP_DTYPE_F32)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "y_type", index,
                       "y_type of output %d is %d, it must be %s as the pool's, or f32", (int)index,
                       (int)output->y_type, sp_dtype_name(dtype));
    if (output->site == delta->embed.site)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "site", index,
                       "output %d names site %d, which takes tokens: call sp_delta_embed",
                       (int)index, (int)output->site);
    site = sp_layout_site_at(delta->layout, sp_layout_find(delta->layout, output->site));
    status = check_kind(delta, output, index, error);
    if (status != SP_OK || site == NULL)
        return status;
    if (*io_k_in != 0 && site->k_in != *io_k_in)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "site", index,
                       "output %d has %d inputs, the outputs before it %d: they do not share x",
                       (int)index, (int)site->k_in, (int)*io_k_in);
    *io_k_in = site->k_in;
    return sp_delta_check_stride("y_stride", output->y_stride, site->n_out, error);
}

sp_delta_output sp_delta_output_at(const sp_delta_group *group, int32_t index)
{
    sp_delta_output output = {.struct_bytes = sizeof output};

    (void)sp_struct_read_at(&output, sizeof output, group->call.outputs, (size_t)index,
                            "sp_delta_output", NULL);
    return output;
}

static sp_status check_outputs(const sp_delta *delta, const sp_delta_call *call, int32_t *out_k_in,
                               sp_error *error)
{
    if (call->n_outputs < 0)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "n_outputs", -1,
                       "n_outputs cannot be negative (%d)", (int)call->n_outputs);
    if (call->outputs == NULL && call->n_outputs > 0)
        return sp_delta_missing("outputs", error);
    *out_k_in = 0;
    for (int32_t i = 0; i < call->n_outputs; i++) {
        sp_delta_output output = {.struct_bytes = sizeof output};
        sp_status status = sp_struct_read_at(&output, sizeof output, call->outputs, (size_t)i,
                                             "sp_delta_output", error);

        if (status == SP_OK)
            status = check_output(delta, &output, i, out_k_in, error);
        if (status != SP_OK)
            return status;
    }
    return SP_OK;
}

sp_status sp_delta_read_group(const sp_delta *delta, const sp_delta_call *call, bool with_x,
                              sp_delta_group *out_group, sp_error *error)
{
    sp_status status;

    out_group->call = (sp_delta_call){.struct_bytes = sizeof out_group->call};
    status = sp_struct_read(&out_group->call, sizeof out_group->call, call, "sp_delta_call", error);
    if (status == SP_OK)
        status = sp_delta_rows_of(delta, out_group->call.plan, &out_group->view, &out_group->n_rows,
                                  error);
    if (status == SP_OK && with_x && out_group->call.x == NULL)
        status = sp_delta_missing("x", error);
    if (status == SP_OK && with_x)
        status = sp_delta_check_x_type(delta, out_group->call.x_type, error);
    if (status == SP_OK)
        status = check_outputs(delta, &out_group->call, &out_group->k_in, error);
    if (status != SP_OK || !with_x)
        return status;
    return sp_delta_check_stride("x_stride", out_group->call.x_stride, out_group->k_in, error);
}

/* ---- on the CPU ---------------------------------------------------------------------------- */

/* The sites of one job: at most SP_LORA_GROUP_MAX that the pool holds. */
typedef struct site_group {
    int32_t n;
    const sp_pool_tables *tables[SP_LORA_GROUP_MAX];
    int32_t k_in[SP_LORA_GROUP_MAX];
    bool apart[SP_LORA_GROUP_MAX]; /* B has the stride of the pair's own rank */
} site_group;

static void add_site(const sp_delta *delta, int32_t index, const sp_delta_output *output,
                     site_group *group, sp_lora_job *job)
{
    const sp_layout_site *site = sp_layout_site_at(delta->layout, index);

    group->tables[group->n] = sp_pool_tables_at(delta->pool, index);
    group->k_in[group->n] = site->k_in;
    group->apart[group->n] = site->apart;
    job->targets[group->n] = (sp_lora_target){
        .y = output->y,
        .y_stride = output->y_stride,
        .y_type = output->y_type,
        .n_out = site->n_out,
    };
    group->n++;
}

static void add_rows(const sp_plan_view *view, const site_group *group, int32_t rank_stride,
                     sp_lora_job *job)
{
    job->n_targets = group->n;
    for (int32_t segment = 0; segment < view->n_segments; segment++) {
        int32_t slot = view->segment_slot[segment], begin = view->segment_begin[segment];
        sp_lora_pair pairs[SP_LORA_GROUP_MAX];

        for (int32_t t = 0; t < group->n; t++) {
            int32_t rank = group->tables[t]->rank[slot];

            pairs[t] = (sp_lora_pair){
                .a = group->tables[t]->a[slot],
                .b = group->tables[t]->b[slot],
                .a_stride = group->k_in[t],
                .b_stride = group->apart[t] ? round_up(rank, SP_POOL_RANK_STEP) : rank_stride,
                .rank = rank,
                .scale = group->tables[t]->scale[slot],
            };
        }
        sp_lora_job_add(job,
                        &(sp_lora_rows){.n = view->segment_begin[segment + 1] - begin,
                                        .order = view->row_order + begin,
                                        .row_scale = view->row_scale},
                        pairs);
    }
}

static sp_lora_job new_job(const sp_delta *delta, const sp_delta_group *group)
{
    return (sp_lora_job){
        .kernels = delta->kernels,
        .exec = delta->exec,
        .scratch = &delta->scratch,
        .dtype = sp_layout_dtype(delta->layout),
        .x_type = group->call.x_type,
        .k_in = group->k_in,
        .rank_max = largest_rank(delta->layout),
        .x = group->call.x,
        .x_stride = group->call.x_stride,
    };
}

int32_t sp_delta_site_of(const sp_delta *delta, int32_t site)
{
    int32_t index = sp_layout_find(delta->layout, site);

    if (index >= 0 && (delta->skipped >> sp_layout_site_at(delta->layout, index)->module & 1u) != 0)
        return -1;
    return index;
}

/* After all checks, if the plan routes any row. */
static void apply_on_cpu(const sp_delta *delta, const sp_delta_group *group)
{
    sp_lora_job job = new_job(delta, group);
    site_group sites = {.n = 0};

    for (int32_t i = 0; i < group->call.n_outputs; i++) {
        sp_delta_output output = sp_delta_output_at(group, i);
        int32_t site = sp_delta_site_of(delta, output.site);

        if (site >= 0)
            add_site(delta, site, &output, &sites, &job);
        if (sites.n == SP_LORA_GROUP_MAX || (sites.n > 0 && i + 1 == group->call.n_outputs)) {
            add_rows(group->view, &sites, sp_layout_rank_stride(delta->layout), &job);
            sp_lora_job_finish(&job);
            sites.n = 0;
        }
    }
}

bool sp_delta_begin_round(sp_delta *delta, const sp_delta_group *group)
{
    site_group sites = {.n = 0};

    delta->pieces = new_job(delta, group);
    delta->pieces.in_pieces = true;
    for (int32_t i = 0; i < group->call.n_outputs; i++) {
        sp_delta_output output = sp_delta_output_at(group, i);
        int32_t site = delta->no_apply ? -1 : sp_delta_site_of(delta, output.site);

        delta->piece_target[i] = site < 0 ? -1 : sites.n;
        if (site >= 0)
            add_site(delta, site, &output, &sites, &delta->pieces);
    }
    if (sites.n > 0)
        add_rows(group->view, &sites, sp_layout_rank_stride(delta->layout), &delta->pieces);
    if (delta->pieces.too_large)
        return false;
    sp_lora_job_cut(&delta->pieces);
    return true;
}

void sp_delta_end_round(sp_delta *delta)
{
    delta->half.open = false;
}

/* ---- applying ------------------------------------------------------------------------------ */

/* Independent of what the plan routes: a graph captured here may replay any other plan. */
static sp_status apply_on_gpu(const sp_delta *delta, const sp_delta_group *group, sp_error *error)
{
    sp_delta_gpu_call call = sp_delta_gpu_call_of(group->n_rows, group->k_in, &group->call);
    sp_status status = sp_delta_gpu_check_step(delta->gpu, group->view, error);

    for (int32_t i = 0; i < group->call.n_outputs && status == SP_OK; i++) {
        sp_delta_output output = sp_delta_output_at(group, i);
        int32_t site = sp_delta_site_of(delta, output.site);

        if (site >= 0)
            sp_delta_gpu_call_add(&call, site, &output);
        if (call.n == SP_CUDA_SITES_MAX || (call.n > 0 && i + 1 == group->call.n_outputs)) {
            status = sp_delta_gpu_apply(delta->gpu, &call, error);
            call.n = 0;
        }
    }
    return status;
}

sp_status sp_delta_apply_group(sp_delta *delta, const sp_delta_group *group, sp_error *error)
{
    sp_delta_end_round(delta);
    if (delta->no_apply || group->k_in == 0)
        return SP_OK;
    if (delta->gpu != NULL)
        return apply_on_gpu(delta, group, error);
    if (group->view->n_segments > 0)
        apply_on_cpu(delta, group);
    return SP_OK;
}

sp_status sp_delta_apply(sp_delta *delta, const sp_delta_call *call, sp_error *error)
{
    sp_delta_group group;
    sp_status status = sp_delta_read_group(delta, call, true, &group, error);

    return status == SP_OK ? sp_delta_apply_group(delta, &group, error) : status;
}
