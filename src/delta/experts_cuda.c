/*
 * experts_cuda.c: the deltas of experts and routers on a GPU: rows are grouped into items by one
 * kernel, and each call is one launch for a window of them; a router's rows are the plan's tiles.
 * A captured graph contains only addresses and sizes, as in delta_cuda.c, so nothing here depends
 * on what the pool holds.
 */
#include "base/error.h"
#include "base/integer.h"
#include "delta/delta_cuda_state.h"
#include "device/device_cuda.h"
#include "kernels/cuda/cuda_choose.h"

#define ALIGN_BYTES  256
#define COUNTS_BYTES (4 * sizeof(int32_t))

static_assert(sizeof(sp_cuda_expert_cell) == sizeof(sp_expert_cell) &&
                  offsetof(sp_cuda_expert_cell, rank) == offsetof(sp_expert_cell, rank) &&
                  offsetof(sp_cuda_expert_cell, scale) == offsetof(sp_expert_cell, scale),
              "kernels read the pool's cells");
static_assert(SP_POOL_ALIGN_BYTES == 256 && SP_POOL_RANK_STEP == 8, "as the kernels have it");

/* ---- memory -------------------------------------------------------------------------------- */

static void *take(char *block, size_t *cursor, size_t bytes)
{
    void *taken = block == NULL ? NULL : block + *cursor;

    *cursor += align_up(bytes, ALIGN_BYTES);
    return taken;
}

static int32_t largest_k(const sp_layout *layout)
{
    int32_t k_max = 1;

    for (int32_t i = 0; i < sp_layout_n_expert_places(layout); i++)
        if (sp_layout_expert_place_at(layout, i)->k_in > k_max)
            k_max = sp_layout_expert_place_at(layout, i)->k_in;
    return k_max;
}

/* Items of so many rows, in windows of up to rows_max. */
static int32_t bound_of(const sp_pool *pool, int32_t rows_max, int32_t item_rows)
{
    return sp_cuda_items_bound(rows_max,
                               sp_geometry_experts(sp_layout_geometry(sp_pool_layout(pool))),
                               sp_pool_slots(pool), item_rows);
}

/* Carves `block` up, for items of every size; with NULL only *out_bytes is valid. */
static void cut(char *block, const sp_pool *pool, int32_t tokens_max, int32_t rows_max, bool x_f32,
                sp_expert_items *out, size_t *out_bytes)
{
    static const int32_t sizes[] = {SP_CUDA_ITEM_FEW, SP_CUDA_ITEM_SOME, SP_CUDA_ITEM_MANY};
    size_t items = (size_t)bound_of(pool, rows_max, SP_CUDA_ITEM_FEW), rows = 0, at = 0;

    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        rows = (size_t)max64((int64_t)rows, (int64_t)bound_of(pool, rows_max, sizes[i]) * sizes[i]);
    out->items.counts = take(block, &at, COUNTS_BYTES);
    out->items.item = take(block, &at, items * sizeof *out->items.item);
    out->items.row = take(block, &at, rows * sizeof(int32_t));
    out->items.token = take(block, &at, rows * sizeof(int32_t));
    out->items.scale = take(block, &at, rows * sizeof(float));
    if (x_f32)
        out->rounded = take(block, &at,
                            (size_t)max64(tokens_max, rows_max) *
                                (size_t)largest_k(sp_pool_layout(pool)) * sizeof(uint16_t));
    *out_bytes = at;
}

static bool has_experts(const sp_pool *pool)
{
    return sp_layout_n_expert_places(sp_pool_layout(pool)) > 0 &&
           sp_pool_experts_at(pool, 0) != NULL;
}

size_t sp_delta_gpu_experts_bytes(const sp_pool *pool, int32_t tokens_max, int32_t rows_max,
                                  bool x_f32)
{
    sp_expert_items unused = {.block = NULL};
    size_t bytes = 0;

    if (has_experts(pool))
        cut(NULL, pool, tokens_max, rows_max, x_f32, &unused, &bytes);
    return bytes;
}

static sp_status check_supported(const sp_layout *layout, sp_error *error)
{
    if (sp_layout_expert_rank(layout) > SP_CUDA_RANK_MAX)
        return sp_fail(error, SP_ERR_UNSUPPORTED, "engine-unsupported", "max-lora-expert-rank", -1,
                       "the CUDA kernels take ranks up to %d", SP_CUDA_RANK_MAX);
    if (sp_geometry_experts(sp_layout_geometry(layout)) > SP_CUDA_EXPERTS_MAX)
        return sp_fail(error, SP_ERR_UNSUPPORTED, "engine-unsupported", "experts", -1,
                       "the CUDA kernels take up to %d experts", SP_CUDA_EXPERTS_MAX);
    return SP_OK;
}

sp_status sp_delta_gpu_experts_create(sp_delta_gpu *gpu, int32_t rows_max, bool x_f32,
                                      sp_error *error)
{
    size_t bytes = sp_delta_gpu_experts_bytes(gpu->pool, gpu->rows_max, rows_max, x_f32);
    sp_expert_items *own = &gpu->experts;
    sp_status status;

    own->rows_max = rows_max;
    own->grouped = -1;
    if (bytes == 0)
        return SP_OK;
    status = check_supported(sp_pool_layout(gpu->pool), error);
    if (status != SP_OK)
        return status;
    status = sp_device_alloc(gpu->device, bytes, &own->block, error);
    if (status != SP_OK)
        return status;
    cut(own->block, gpu->pool, gpu->rows_max, rows_max, x_f32, own, &bytes);
    return sp_device_zero(gpu->device, own->items.counts, COUNTS_BYTES, error);
}

void sp_delta_gpu_experts_destroy(sp_delta_gpu *gpu)
{
    sp_device_free(gpu->device, gpu->experts.block);
}

/* ---- rows ---------------------------------------------------------------------------------- */

/* Groups the window that begins at this row. */
static sp_status group_window(sp_delta_gpu *gpu, int32_t row, void *native, sp_error *error)
{
    sp_expert_items *own = &gpu->experts;
    sp_cuda_group_rows rows = own->rows;
    sp_status status;

    rows.row_begin = row;
    rows.n_rows = (int32_t)min64(own->rows_max, rows.all_rows - row);
    own->items.item_rows = sp_cuda_item_rows(rows.n_rows);
    own->items.bound = bound_of(gpu->pool, rows.n_rows, own->items.item_rows);
    rows.items = own->items;
    sp_delta_gpu_record(gpu, native);
    status = sp_delta_gpu_launched(gpu, gpu->kernels.group_experts(gpu->number, &rows, native),
                                   "grouping the rows of experts", error);
    own->grouped = status == SP_OK ? row : -1;
    own->native = native;
    own->after_group = true;
    return status;
}

sp_status sp_delta_gpu_experts_begin(sp_delta_gpu *gpu, const sp_moe_rows *rows, sp_stream *stream,
                                     sp_error *error)
{
    sp_expert_items *own = &gpu->experts;

    own->grouped = -1;
    own->rows = (sp_cuda_group_rows){
        .n_tokens = rows->n_tokens,
        .top_k = rows->top_k,
        .n_experts = rows->n_experts,
        .n_slots = gpu->n_slots,
        .expert = rows->expert,
        .row_pair = rows->row_pair,
        .expert_begin = rows->expert_begin,
        .all_rows = rows->expert != NULL ? rows->n_tokens * rows->top_k : rows->n_rows,
        .token_slot = gpu->scratch.plan.seq_slot,
        .token_scale = gpu->scratch.plan.row_scale,
    };
    if (own->block == NULL || own->rows.all_rows == 0)
        return SP_OK;
    return group_window(gpu, 0, sp_delta_gpu_native(gpu, stream), error);
}

/* ---- applying ------------------------------------------------------------------------------ */

/* What experts and routers share. */
static sp_cuda_expert_delta delta_of(const sp_delta_gpu *gpu, int32_t k_in)
{
    return (sp_cuda_expert_delta){
        .type = gpu->type,
        .k_in = k_in,
        .rank_max =
            (int32_t)round_up(sp_layout_expert_rank(sp_pool_layout(gpu->pool)), SP_POOL_RANK_STEP),
        .multiprocessors = gpu->multiprocessors,
    };
}

static sp_cuda_expert_delta delta_for(const sp_delta_gpu *gpu, const sp_delta_gpu_experts *call)
{
    sp_cuda_expert_delta delta = delta_of(gpu, call->k_in);

    delta.x_by_token = call->call.x_rows == SP_EXPERT_X_TOKEN;
    delta.x = call->call.x;
    delta.x_stride = call->call.x_stride;
    for (int32_t i = 0; i < call->n; i++)
        if (call->experts[i] != NULL)
            delta.sites[delta.n_sites++] = (sp_cuda_expert_site){
                .cells = (const sp_cuda_expert_cell *const *)(const void *)call->experts[i]->cells,
                .factors = call->experts[i]->factors,
                .y = call->outputs[i].y,
                .y_stride = call->outputs[i].y_stride,
                .n_out = call->n_out[i],
                .y_is_f32 = call->outputs[i].y_type == SP_DTYPE_F32,
                .scales = call->call.scales != NULL ? call->call.scales[i] : NULL,
            };
    return delta;
}

/* Of all outputs, also of those without experts in the pool. The grouping lets nothing begin before
 * it has ended, so what follows the zeros need not wait for it. */
static sp_status clear_scales(sp_delta_gpu *gpu, const sp_delta_gpu_experts *call, void *native,
                              sp_error *error)
{
    sp_cuda_clear clear = {.n_arrays = call->n, .n = gpu->experts.rows.all_rows};

    if (call->call.scales == NULL)
        return SP_OK;
    for (int32_t i = 0; i < call->n; i++)
        clear.array[i] = call->call.scales[i];
    sp_delta_gpu_record(gpu, native);
    return sp_delta_gpu_launched(gpu, gpu->kernels.clear_scales(gpu->number, &clear, native),
                                 "clearing scales", error);
}

/* Rows of x in the pool's type; `first` is row 0 of the result. */
static sp_status round_x(sp_delta_gpu *gpu, const sp_delta_gpu_experts *call, int32_t first,
                         int32_t n, void *native, sp_error *error)
{
    const sp_cuda_round round = {
        .type = gpu->type,
        .n_rows = n,
        .k = call->k_in,
        .x = (const float *)call->call.x + first * call->call.x_stride,
        .x_stride = call->call.x_stride,
        .to = gpu->experts.rounded,
    };

    return sp_delta_gpu_launched(gpu, gpu->kernels.round_rows(gpu->number, &round, native),
                                 "rounding x", error);
}

static bool is_rounded(const sp_delta_gpu *gpu, const sp_delta_gpu_experts *call)
{
    return (int32_t)call->call.x_type != gpu->type;
}

/* The window that begins at this row. */
static sp_status apply_window(sp_delta_gpu *gpu, const sp_delta_gpu_experts *call,
                              sp_cuda_expert_delta *delta, int32_t row, void *native,
                              sp_error *error)
{
    sp_expert_items *own = &gpu->experts;
    int32_t n = (int32_t)min64(own->rows_max, own->rows.all_rows - row);
    sp_status status = SP_OK;

    if (own->grouped != row)
        status = group_window(gpu, row, native, error);
    if (status == SP_OK && is_rounded(gpu, call) && !delta->x_by_token) {
        status = round_x(gpu, call, row, n, native, error);
        delta->x = (const uint16_t *)own->rounded - (int64_t)row * call->k_in;
    }
    delta->items = own->items;
    delta->after_group = own->after_group || native != own->native;
    own->after_group = false;
    own->native = native;
    if (status != SP_OK)
        return status;
    return sp_delta_gpu_launched(gpu, gpu->kernels.add_experts(gpu->number, delta, native),
                                 "the deltas of experts", error);
}

sp_status sp_delta_gpu_experts_apply(sp_delta_gpu *gpu, const sp_delta_gpu_experts *call,
                                     sp_error *error)
{
    sp_cuda_expert_delta delta = delta_for(gpu, call);
    void *native = sp_delta_gpu_native(gpu, call->call.stream);
    sp_status status = clear_scales(gpu, call, native, error);

    if (status != SP_OK || gpu->experts.block == NULL || delta.n_sites == 0)
        return status;
    sp_delta_gpu_record(gpu, native);
    if (is_rounded(gpu, call)) {
        if (delta.x_by_token)
            status = round_x(gpu, call, 0, gpu->experts.rows.n_tokens, native, error);
        delta.x = gpu->experts.rounded;
        delta.x_stride = call->k_in;
    }
    for (int32_t row = 0; row < gpu->experts.rows.all_rows && status == SP_OK;
         row += gpu->experts.rows_max)
        status = apply_window(gpu, call, &delta, row, native, error);
    return status;
}

/* ---- routers ------------------------------------------------------------------------------- */

sp_status sp_delta_gpu_add_router(sp_delta_gpu *gpu, const sp_delta_gpu_call *call, int32_t index,
                                  sp_error *error)
{
    const sp_pool_tables *tables = sp_pool_tables_at(gpu->pool, call->sites[index]);
    const sp_delta_output *output = &call->outputs[index];
    void *native = sp_delta_gpu_native(gpu, call->stream);
    sp_cuda_expert_delta delta = delta_of(gpu, call->k_in);

    delta.n_sites = 1;
    delta.after_group = native != gpu->plan_native || gpu->after_plan;
    delta.x = call->x;
    delta.x_stride = call->x_stride;
    delta.tiles = gpu->scratch.plan.tiles;
    delta.head = gpu->scratch.plan.head;
    delta.items.bound = sp_cuda_tiles_bound(call->n_rows, gpu->n_slots);
    delta.sites[0] = (sp_cuda_expert_site){
        .a = tables->a,
        .b = tables->b,
        .rank = tables->rank,
        .scale = tables->scale,
        .y = output->y,
        .y_stride = output->y_stride,
        .n_out = sp_layout_site_at(sp_pool_layout(gpu->pool), call->sites[index])->n_out,
        .y_is_f32 = output->y_type == SP_DTYPE_F32,
    };
    sp_delta_gpu_record(gpu, native);
    if ((int32_t)call->x_type != gpu->type) {
        const sp_cuda_round round = {gpu->type, call->n_rows,   call->k_in,
                                     call->x,   call->x_stride, gpu->scratch.rounded};
        sp_status status = sp_delta_gpu_launched(
            gpu, gpu->kernels.round_rows(gpu->number, &round, native), "rounding x", error);

        if (status != SP_OK)
            return status;
        delta.x = gpu->scratch.rounded;
        delta.x_stride = call->k_in;
    }
    return sp_delta_gpu_launched(gpu, gpu->kernels.add_experts(gpu->number, &delta, native),
                                 "the deltas of a router", error);
}
