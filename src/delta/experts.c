/*
 * experts.c: the deltas of a layer's experts: the checks of both calls, and the work of the CPU;
 * that of a GPU is in experts_cuda.c. begin groups the rows into items of one
 * (expert, slot); apply adds those that the adapter adapts to a job of shrink_expand.h, whose
 * outputs depend on nothing but their own row: form, order, windows and rounds change no bit.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "base/grow.h"
#include "base/integer.h"
#include "delta/delta_state.h"

#include <sidepath/experts.h>

#define ALIGN_BYTES 256
#define PAIRS_MAX   (1 << 30)

/* ---- scratch ------------------------------------------------------------------------------- */

static int32_t largest_k(const sp_layout *layout)
{
    int32_t k_max = 1;

    for (int32_t i = 0; i < sp_layout_n_expert_places(layout); i++) {
        int32_t k_in = sp_layout_expert_place_at(layout, i)->k_in;

        k_max = k_in > k_max ? k_in : k_max;
    }
    return k_max;
}

static sp_lora_sizes sizes_of(const sp_layout *layout, int32_t rows_max, bool x_f32)
{
    return (sp_lora_sizes){
        .dtype = sp_layout_dtype(layout),
        .k_max = largest_k(layout),
        .rank_max = (int32_t)round_up(sp_layout_expert_rank(layout), SP_POOL_RANK_STEP),
        .rows_max = rows_max,
        .x_f32 = x_f32,
    };
}

/* The lists of one window follow the scratch in one block. */
typedef struct list_bytes {
    size_t lora, items, order, token, scratch;
} list_bytes;

static list_bytes bytes_of(const sp_layout *layout, int32_t slots, int32_t rows_max, bool x_f32)
{
    sp_lora_sizes sizes = sizes_of(layout, rows_max, x_f32);
    size_t rows = (size_t)rows_max;
    size_t scratch =
        sp_moe_items_scratch(rows_max, slots, sp_geometry_experts(sp_layout_geometry(layout)));

    return (list_bytes){
        .lora = align_up(sp_lora_scratch_bytes(&sizes), ALIGN_BYTES),
        .items = align_up(rows * sizeof(sp_moe_item), ALIGN_BYTES),
        .order = align_up(rows * sizeof(int32_t), ALIGN_BYTES),
        .token = align_up(rows * sizeof(int32_t), ALIGN_BYTES),
        .scratch = align_up(scratch * sizeof(int32_t), ALIGN_BYTES),
    };
}

size_t sp_delta_experts_workspace_bytes(const sp_layout *layout, int32_t slots,
                                        int32_t expert_rows_max, bool x_f32)
{
    list_bytes bytes;

    if (layout == NULL || slots < 1 || expert_rows_max < 1 ||
        expert_rows_max > SP_DELTA_EXPERT_ROWS_MAX || sp_layout_n_expert_places(layout) == 0)
        return 0;
    bytes = bytes_of(layout, slots, expert_rows_max, x_f32);
    return bytes.lora + bytes.items + bytes.order + bytes.token + bytes.scratch;
}

size_t sp_delta_experts_device_bytes(const sp_pool *pool, int32_t rows_max, int32_t expert_rows_max,
                                     bool x_f32)
{
    if (pool == NULL || rows_max < 1 || rows_max > SP_CUDA_ROWS_MAX || expert_rows_max < 1 ||
        expert_rows_max > SP_DELTA_EXPERT_ROWS_MAX ||
        sp_device_get_kind(sp_pool_device(pool)) != SP_DEVICE_CUDA)
        return 0;
    return sp_delta_gpu_experts_bytes(pool, rows_max, expert_rows_max, x_f32);
}

/* Where experts can be in the pool, and what applies their deltas is here. */
static bool needs_scratch(const sp_delta *delta)
{
    return delta->gpu == NULL && sp_pool_experts_at(delta->pool, 0) != NULL;
}

sp_status sp_delta_experts_create(sp_delta *delta, int32_t rows_max, sp_error *error)
{
    sp_delta_experts *own = &delta->experts;
    int32_t slots = sp_pool_slots(delta->pool);
    size_t total = sp_delta_experts_workspace_bytes(delta->layout, slots, rows_max, delta->x_f32);
    sp_lora_sizes sizes = sizes_of(delta->layout, rows_max, delta->x_f32);
    list_bytes bytes;
    char *at;

    own->rows_max = rows_max;
    if (delta->gpu != NULL)
        return sp_delta_gpu_experts_create(delta->gpu, rows_max, delta->x_f32, error);
    if (!needs_scratch(delta))
        return SP_OK;
    own->block = at = sp_aligned_calloc(total, ALIGN_BYTES);
    if (at == NULL)
        return sp_fail_memory(error, total, "the scratch for the deltas of experts");
    bytes = bytes_of(delta->layout, slots, rows_max, delta->x_f32);
    sp_lora_scratch_cut(at, &sizes, &own->scratch);
    own->window.items = (sp_moe_item *)(void *)(at += bytes.lora);
    own->window.order = (int32_t *)(void *)(at += bytes.items);
    own->window.token = (int32_t *)(void *)(at += bytes.order);
    own->window.scratch = (int32_t *)(void *)(at + bytes.token);
    return SP_OK;
}

void sp_delta_experts_destroy(sp_delta *delta)
{
    sp_aligned_free(delta->experts.block);
}

/* ---- rows ---------------------------------------------------------------------------------- */

static int32_t rows_of(const sp_moe_rows *rows)
{
    return rows->expert != NULL ? rows->n_tokens * rows->top_k : rows->n_rows;
}

static int32_t pair_of(const sp_moe_rows *rows, int32_t row)
{
    return rows->expert != NULL ? row : rows->row_pair[row];
}

/* Groups the window that begins at this row. */
static sp_status group_window(sp_delta *delta, int32_t row_begin, sp_error *error)
{
    sp_delta_experts *own = &delta->experts;
    sp_expert_window *window = &own->window;
    int32_t n = (int32_t)min64(own->rows_max, rows_of(&own->rows) - row_begin), n_routed = 0;
    const sp_moe_items call = {
        .struct_bytes = sizeof call,
        .rows = &own->rows,
        .token_slot = own->view->seq_slot,
        .n_slots = sp_pool_slots(delta->pool),
        .item_rows_max = own->rows_max,
        .row_begin = row_begin,
        .n_rows = n,
        .scratch = window->scratch,
        .row_order = window->order,
        .items = window->items,
    };
    sp_status status = sp_moe_items_build(&call, &window->n_items, error);

    window->begin = -1;
    if (status != SP_OK)
        return status;
    if (window->n_items > 0)
        n_routed =
            window->items[window->n_items - 1].begin + window->items[window->n_items - 1].n_rows;
    for (int32_t i = 0; i < n_routed; i++)
        window->token[i] = pair_of(&own->rows, window->order[i]) / own->rows.top_k;
    window->begin = row_begin;
    return SP_OK;
}

/* All windows are grouped once, which finds every bad row; a single one stays grouped. */
static sp_status group_all(sp_delta *delta, sp_error *error)
{
    sp_status status = SP_OK;

    for (int32_t row = 0; row < rows_of(&delta->experts.rows) && status == SP_OK;
         row += delta->experts.rows_max)
        status = group_window(delta, row, error);
    return status;
}

static sp_status check_counts(const sp_delta *delta, const sp_moe_rows *rows, int32_t n_tokens,
                              sp_error *error)
{
    int32_t n_experts = sp_geometry_experts(sp_layout_geometry(delta->layout));

    if (rows->n_experts != n_experts)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "n_experts", -1,
                       "n_experts is %d, the geometry has %d", (int)rows->n_experts,
                       (int)n_experts);
    if (rows->n_tokens != n_tokens)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "n_tokens", -1,
                       "n_tokens is %d, the plan has %d rows", (int)rows->n_tokens, (int)n_tokens);
    if (rows->top_k < 1 || rows->top_k > n_experts || n_tokens > PAIRS_MAX / rows->top_k)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "top_k", -1,
                       "top_k is %d, it must be from 1 to %d", (int)rows->top_k, (int)n_experts);
    if (delta->gpu == NULL) /* else the items are not built here, which checks the form */
        return SP_OK;
    if (rows->expert != NULL ? rows->row_pair != NULL || rows->expert_begin != NULL
                             : rows->row_pair == NULL || rows->expert_begin == NULL)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "rows", -1,
                       "the rows need either expert or both row_pair and expert_begin");
    if (rows->expert == NULL && (rows->n_rows < 0 || rows->n_rows > PAIRS_MAX))
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "n_rows", -1, "n_rows is %d",
                       (int)rows->n_rows);
    return SP_OK;
}

sp_status sp_delta_experts_begin(sp_delta *delta, const sp_plan *plan, const sp_moe_rows *rows,
                                 sp_stream *stream, sp_error *error)
{
    sp_moe_rows own = {.struct_bytes = sizeof own};
    const sp_plan_view *view;
    int32_t n_tokens;
    sp_status status = sp_delta_rows_of(delta, plan, &view, &n_tokens, error);

    if (status == SP_OK && delta->gpu != NULL)
        status = sp_delta_gpu_check_step(delta->gpu, view, error);
    if (status == SP_OK)
        status = sp_struct_read(&own, sizeof own, rows, "sp_moe_rows", error);
    if (status == SP_OK)
        status = check_counts(delta, &own, n_tokens, error);
    if (status != SP_OK)
        return status;
    delta->experts.open = false;
    delta->experts.rows = own;
    delta->experts.plan = plan;
    delta->experts.view = view;
    delta->experts.build = view != NULL ? view->build : 0;
    delta->experts.window.begin = -1;
    delta->experts.window.n_items = 0;
    if (delta->gpu != NULL)
        status = sp_delta_gpu_experts_begin(delta->gpu, &own, stream, error);
    else if (delta->experts.block != NULL)
        status = group_all(delta, error);
    delta->experts.open = status == SP_OK;
    return status;
}

/* ---- applying ------------------------------------------------------------------------------ */

/* Outputs of one call. */
typedef struct expert_group {
    sp_delta_experts_call call;
    sp_site first; /* the row of the first output's site */
    int32_t n;
    const sp_pool_experts *experts[SP_DELTA_GROUP_MAX]; /* NULL: no delta there */
    sp_delta_output outputs[SP_DELTA_GROUP_MAX];
    int32_t n_out[SP_DELTA_GROUP_MAX];
} expert_group;

static sp_status check_open(const sp_delta *delta, sp_error *error)
{
    const sp_plan_view *view;
    int32_t n_rows;
    sp_status status;

    if (!delta->experts.open)
        return sp_fail(error, SP_ERR_STATE, NULL, "rows", -1,
                       "no rows were begun: call sp_delta_experts_begin first");
    if (delta->experts.plan != NULL &&
        sp_plan_get(delta->experts.plan)->build != delta->experts.build)
        return sp_fail(error, SP_ERR_STATE, NULL, "plan", -1,
                       "the plan was built anew since sp_delta_experts_begin: call it again");
    status = sp_delta_rows_of(delta, delta->experts.plan, &view, &n_rows, error);
    if (status != SP_OK || delta->gpu == NULL)
        return status;
    return sp_delta_gpu_check_step(delta->gpu, view, error);
}

static sp_status check_site(const expert_group *group, const sp_site *row, int32_t index,
                            sp_error *error)
{
    if (row->kind != SP_SITE_EXPERT)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "site", index,
                       "output %d names %.200s, which is no expert's", (int)index, row->path);
    if (index > 0 && (row->layer != group->first.layer || row->k_in != group->first.k_in))
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "site", index,
                       "output %d is %.200s with %d inputs, the first one is of layer %d with %d: "
                       "they do not share x",
                       (int)index, row->path, (int)row->k_in, (int)group->first.layer,
                       (int)group->first.k_in);
    return SP_OK;
}

static sp_status read_output(const sp_delta *delta, expert_group *group, int32_t index,
                             sp_error *error)
{
    sp_delta_output *output = &group->outputs[index];
    sp_dtype dtype = sp_layout_dtype(delta->layout);
    sp_site row = {.struct_bytes = sizeof row};
    int32_t place;
    sp_status status;

    output->struct_bytes = sizeof *output;
    status = sp_struct_read_at(output, sizeof *output, group->call.outputs, (size_t)index,
                               "sp_delta_output", error);
    if (status != SP_OK)
        return status;
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
    (void)sp_geometry_site_at(sp_layout_geometry(delta->layout), output->site, &row, NULL);
    status = check_site(group, &row, index, error);
    if (status == SP_OK)
        status = sp_delta_check_stride("y_stride", output->y_stride, row.n_out, error);
    if (status != SP_OK)
        return status;
    if (index == 0)
        group->first = row;
    place = sp_layout_find_expert_place(delta->layout, output->site);
    group->n_out[index] = row.n_out;
    group->experts[index] = sp_pool_experts_at(delta->pool, place);
    if ((delta->skipped >>
             sp_geometry_site_module(sp_layout_geometry(delta->layout), output->site) &
         1u) != 0)
        group->experts[index] = NULL;
    return SP_OK;
}

/* Deltas by themselves. */
static sp_status check_scales(const sp_delta *delta, const expert_group *group, sp_error *error)
{
    if (group->call.scales == NULL)
        return SP_OK;
    if (delta->gpu == NULL)
        return sp_fail(error, SP_ERR_UNSUPPORTED, "engine-unsupported", "scales", -1,
                       "deltas by themselves are computed on a GPU, the pool is in host memory");
    for (int32_t i = 0; i < group->n; i++) {
        if (group->call.scales[i] == NULL)
            return sp_fail(error, SP_ERR_ARGUMENT, NULL, "scales", i, "scales of output %d is NULL",
                           (int)i);
        if (group->outputs[i].y_type != sp_layout_dtype(delta->layout))
            return sp_fail(error, SP_ERR_ARGUMENT, NULL, "y_type", i,
                           "y_type of output %d is %s, a delta by itself is %s as the pool", (int)i,
                           sp_dtype_name(group->outputs[i].y_type),
                           sp_dtype_name(sp_layout_dtype(delta->layout)));
    }
    return SP_OK;
}

static sp_status read_call(const sp_delta *delta, const sp_delta_experts_call *call,
                           expert_group *group, sp_error *error)
{
    sp_status status;

    group->call = (sp_delta_experts_call){.struct_bytes = sizeof group->call};
    status = sp_struct_read(&group->call, sizeof group->call, call, "sp_delta_experts_call", error);
    if (status == SP_OK)
        status = check_open(delta, error);
    if (status == SP_OK)
        status = SP_NEED(error, {"x", group->call.x}, {"outputs", group->call.outputs});
    if (status == SP_OK)
        status = sp_delta_check_x_type(delta, group->call.x_type, error);
    if (status != SP_OK)
        return status;
    if (group->call.x_rows != SP_EXPERT_X_TOKEN && group->call.x_rows != SP_EXPERT_X_ROW)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "x_rows", -1, "x_rows is %d",
                       (int)group->call.x_rows);
    if (group->call.n_outputs < 1 || group->call.n_outputs > SP_DELTA_GROUP_MAX)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "n_outputs", -1,
                       "n_outputs is %d, it must be from 1 to %d", (int)group->call.n_outputs,
                       SP_DELTA_GROUP_MAX);
    group->n = group->call.n_outputs;
    for (int32_t i = 0; i < group->n && status == SP_OK; i++)
        status = read_output(delta, group, i, error);
    if (status == SP_OK)
        status = check_scales(delta, group, error);
    if (status != SP_OK)
        return status;
    return sp_delta_check_stride("x_stride", group->call.x_stride, group->first.k_in, error);
}

static sp_lora_job new_job(const sp_delta *delta, const expert_group *group)
{
    sp_lora_job job = {
        .kernels = delta->kernels,
        .exec = delta->exec,
        .scratch = &delta->experts.scratch,
        .dtype = sp_layout_dtype(delta->layout),
        .x_type = group->call.x_type,
        .k_in = group->first.k_in,
        .rank_max = (int32_t)round_up(sp_layout_expert_rank(delta->layout), SP_POOL_RANK_STEP),
        .x = group->call.x,
        .x_stride = group->call.x_stride,
        .n_targets = group->n,
    };

    for (int32_t t = 0; t < group->n; t++)
        job.targets[t] = (sp_lora_target){
            .y = group->outputs[t].y,
            .y_stride = group->outputs[t].y_stride,
            .y_type = group->outputs[t].y_type,
            .n_out = group->n_out[t],
        };
    return job;
}

/* The factors of the item's expert at one output; rank 0 where there are none. */
static sp_lora_pair pair_at(const sp_pool_experts *experts, const sp_moe_item *item, int32_t k_in)
{
    const sp_expert_cell *cells = experts != NULL ? experts->cells[item->slot] : NULL;
    const sp_expert_cell *cell;
    const char *factors;

    if (cells == NULL || cells[item->expert].rank == 0)
        return (sp_lora_pair){.rank = 0};
    cell = &cells[item->expert];
    factors = experts->factors[item->slot];
    return (sp_lora_pair){
        .a = factors + (size_t)cell->a * SP_POOL_ALIGN_BYTES,
        .b = factors + (size_t)cell->b * SP_POOL_ALIGN_BYTES,
        .a_stride = k_in,
        .b_stride = round_up(cell->rank, SP_POOL_RANK_STEP),
        .rank = cell->rank,
        .scale = cell->scale,
    };
}

/* The grouped window. */
static void apply_window(const sp_delta *delta, const expert_group *group)
{
    const sp_expert_window *window = &delta->experts.window;
    bool by_token = group->call.x_rows == SP_EXPERT_X_TOKEN;
    sp_lora_job job = new_job(delta, group);

    sp_lora_job_expect(&job, window->n_items);
    for (int32_t i = 0; i < window->n_items; i++) {
        const sp_moe_item *item = &window->items[i];
        sp_lora_pair pairs[SP_DELTA_GROUP_MAX];

        for (int32_t t = 0; t < group->n; t++)
            pairs[t] = pair_at(group->experts[t], item, group->first.k_in);
        sp_lora_job_add(&job,
                        &(sp_lora_rows){
                            .n = item->n_rows,
                            .order = window->order + item->begin,
                            .x_order = by_token ? window->token + item->begin : NULL,
                            .scale_order = window->token + item->begin,
                            .row_scale = delta->experts.view->row_scale,
                        },
                        pairs);
    }
    sp_lora_job_finish(&job);
}

static sp_status apply_on_gpu(const sp_delta *delta, const expert_group *group, sp_error *error)
{
    sp_delta_gpu_experts call = {.call = group->call, .k_in = group->first.k_in, .n = group->n};

    for (int32_t i = 0; i < group->n; i++) {
        call.experts[i] = delta->no_apply ? NULL : group->experts[i];
        call.outputs[i] = group->outputs[i];
        call.n_out[i] = group->n_out[i];
    }
    return sp_delta_gpu_experts_apply(delta->gpu, &call, error);
}

sp_status sp_delta_experts_apply(sp_delta *delta, const sp_delta_experts_call *call,
                                 sp_error *error)
{
    expert_group group = {.n = 0};
    sp_status status = SP_NEED(error, {"delta", delta});

    if (status == SP_OK)
        status = read_call(delta, call, &group, error);
    if (status == SP_OK && delta->gpu != NULL)
        return apply_on_gpu(delta, &group, error);
    if (status != SP_OK || delta->no_apply || delta->experts.block == NULL ||
        sp_pool_expert_slots(delta->pool) == 0)
        return status;
    for (int32_t row = 0; row < rows_of(&delta->experts.rows) && status == SP_OK;
         row += delta->experts.rows_max) {
        if (delta->experts.window.begin != row)
            status = group_window(delta, row, error);
        if (status == SP_OK)
            apply_window(delta, &group);
    }
    return status;
}
