/*
 * delta_cuda.c: a step's deltas on a GPU. The plan's rows are copied to fixed addresses and made
 * into tiles there by one kernel; then each group of sites is two launches that read the tables of
 * the pool. A captured graph contains only addresses and sizes, so it replays correctly whatever
 * the plan and the slots hold by then.
 */
#include "delta/delta_cuda_state.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/integer.h"
#include "device/device_cuda.h"
#include "device/step_streams.h"
#include "kernels/cuda/cuda_choose.h"

#include <string.h>

#define SCRATCH_ALIGN 256

/* ---- scratch ------------------------------------------------------------------------------- */

static void *take(char *block, size_t *cursor, size_t bytes)
{
    void *taken = block == NULL ? NULL : block + *cursor;

    *cursor += align_up(bytes, SCRATCH_ALIGN);
    return taken;
}

sp_cuda_scratch sp_cuda_scratch_cut(char *block, const sp_cuda_scratch_sizes *sizes)
{
    size_t rows = (size_t)sizes->rows_max * sizeof(int32_t), at = 0;
    size_t slots = (size_t)sizes->n_slots * sizeof(int32_t);
    size_t tiles = (size_t)sp_cuda_tiles_bound(sizes->rows_max, sizes->n_slots);
    sp_cuda_scratch s;

    s.plan.seq_slot_in = take(block, &at, rows);
    s.plan.row_scale_in = take(block, &at, rows);
    s.plan.head = take(block, &at, sizeof *s.plan.head);
    s.plan.seq_slot = take(block, &at, rows);
    s.plan.row_order = take(block, &at, rows);
    s.plan.segment_begin = take(block, &at, slots + sizeof(int32_t));
    s.plan.segment_slot = take(block, &at, slots);
    s.plan.row_scale = take(block, &at, rows);
    s.plan.tile_begin = take(block, &at, rows);
    s.plan.tile_rows = take(block, &at, rows);
    s.plan.tile_slot = take(block, &at, rows);
    s.plan.tiles = take(block, &at, tiles * sizeof(sp_cuda_tile));
    s.partials = take(block, &at, sizes->partials_bytes);
    s.rounded = sizes->rounded_bytes > 0 ? take(block, &at, sizes->rounded_bytes) : NULL;
    s.bytes = at;
    return s;
}

/* embed_tokens gathers, so no row of xa is computed from the vocabulary. */
static bool is_gathered(const sp_layout *layout, int32_t index)
{
    return sp_layout_site_at(layout, index)->kind == SP_SITE_EMBEDDING;
}

static bool is_first_of_width(const sp_layout *layout, int32_t index)
{
    for (int32_t i = 0; i < index; i++)
        if (!is_gathered(layout, i) &&
            sp_layout_site_at(layout, i)->k_in == sp_layout_site_at(layout, index)->k_in)
            return false;
    return true;
}

/* The largest size over all row counts, widths and groups: the number of partials is not
 * monotonic. */
static size_t partials_bytes(const sp_pool *pool, int32_t rows_max)
{
    const sp_layout *layout = sp_pool_layout(pool);
    int32_t n_slots = sp_pool_slots(pool), rank_stride = sp_layout_rank_stride(layout);
    int32_t multiprocessors = sp_device_cuda_multiprocessors(sp_pool_device(pool));
    size_t most = 0;

    for (int32_t i = 0; i < sp_layout_n_sites(layout); i++) {
        int32_t k = sp_layout_site_at(layout, i)->k_in;

        if (is_gathered(layout, i) || !is_first_of_width(layout, i))
            continue;
        for (int32_t rows = 1; rows <= rows_max; rows++)
            for (int32_t sites = 1; sites <= SP_CUDA_SITES_MAX; sites++) {
                size_t bytes =
                    sp_cuda_partials_bytes(multiprocessors, rows, n_slots, k, rank_stride, sites);

                most = bytes > most ? bytes : most;
            }
    }
    return most;
}

/* The width that the head reads, whether or not the pool has its pairs. */
static int32_t head_k(const sp_layout *layout)
{
    const sp_geometry *geometry = sp_layout_geometry(layout);
    sp_site site = {.struct_bytes = sizeof site};
    int32_t head = sp_geometry_find_kind(geometry, SP_SITE_HEAD);

    return sp_geometry_site_at(geometry, head, &site, NULL) == SP_OK ? site.k_in : 0;
}

/* Rows of an FP32 x, in two bytes an element. */
static size_t rounded_bytes(const sp_layout *layout, int32_t rows_max)
{
    int32_t k_max = 1;

    for (int32_t i = 0; i < sp_layout_n_sites(layout); i++)
        if (!is_gathered(layout, i) && sp_layout_site_at(layout, i)->k_in > k_max)
            k_max = sp_layout_site_at(layout, i)->k_in;
    k_max = head_k(layout) > k_max ? head_k(layout) : k_max;
    return (size_t)rows_max * (size_t)k_max * sizeof(uint16_t);
}

static sp_cuda_scratch_sizes sizes_of(const sp_pool *pool, int32_t rows_max, bool x_f32)
{
    return (sp_cuda_scratch_sizes){
        .rows_max = rows_max,
        .n_slots = sp_pool_slots(pool),
        .partials_bytes = partials_bytes(pool, rows_max),
        .rounded_bytes = x_f32 ? rounded_bytes(sp_pool_layout(pool), rows_max) : 0,
    };
}

/* The report comes after the scratch. */
static size_t block_bytes(const sp_cuda_scratch_sizes *sizes)
{
    return sp_cuda_scratch_cut(NULL, sizes).bytes + sizeof(sp_cuda_row_report);
}

size_t sp_delta_gpu_bytes(const sp_pool *pool, int32_t rows_max, bool x_f32)
{
    sp_cuda_scratch_sizes sizes = sizes_of(pool, rows_max, x_f32);

    return block_bytes(&sizes);
}

/* ---- life ---------------------------------------------------------------------------------- */

static sp_status refuse(const char *subject, const char *text, sp_error *error)
{
    return sp_fail(error, SP_ERR_UNSUPPORTED, "engine-unsupported", subject, -1, "%s", text);
}

static sp_status check_supported(const sp_pool *pool, int32_t rows_max, sp_error *error)
{
    const sp_layout *layout = sp_pool_layout(pool);

    if (sp_layout_dtype(layout) == SP_DTYPE_F32)
        return refuse("f32", "the CUDA kernels take bf16 and f16, not f32", error);
    if (sp_layout_rank_stride(layout) > SP_CUDA_RANK_MAX)
        return refuse("max-lora-rank", "the CUDA kernels take ranks up to 512", error);
    if (rows_max > SP_CUDA_ROWS_MAX)
        return refuse("rows_max", "the CUDA kernels take up to 65536 rows", error);
    return SP_OK;
}

static size_t upload_bytes(const sp_delta_gpu *gpu)
{
    return (size_t)gpu->rows_max * (sizeof(int32_t) + sizeof(float));
}

static int32_t *staged_slots(const sp_delta_gpu *gpu)
{
    return (int32_t *)(void *)(gpu->staging + (size_t)gpu->turn * upload_bytes(gpu));
}

static sp_status allocate(sp_delta_gpu *gpu, bool x_f32, sp_error *error)
{
    sp_cuda_scratch_sizes sizes = sizes_of(gpu->pool, gpu->rows_max, x_f32);
    size_t uploads = SP_CUDA_UPLOADS * upload_bytes(gpu);
    void *staging = NULL;
    sp_status status = sp_device_alloc(gpu->device, block_bytes(&sizes), &gpu->block, error);

    if (status != SP_OK)
        return status;
    gpu->scratch = sp_cuda_scratch_cut(gpu->block, &sizes);
    gpu->report = (sp_cuda_row_report *)(void *)((char *)gpu->block + gpu->scratch.bytes);
    status =
        sp_device_alloc_pinned(gpu->device, uploads + sizeof *gpu->report_read, &staging, error);
    if (status != SP_OK)
        return status;
    gpu->staging = staging;
    gpu->report_read = (sp_cuda_row_report *)(void *)(gpu->staging + uploads);
    *gpu->report_read = (sp_cuda_row_report){.first_row = -1};
    for (int i = 0; i < SP_CUDA_UPLOADS && status == SP_OK; i++)
        status = sp_event_create(gpu->device, &gpu->uploaded[i], error);
    return status;
}

/* No row is routed until the first upload. */
static sp_status clear_rows(sp_delta_gpu *gpu, sp_error *error)
{
    size_t bytes = (size_t)gpu->rows_max * sizeof(int32_t);

    memset(gpu->staging, 0xff, bytes);
    return sp_device_write(gpu->device, (void *)(uintptr_t)gpu->scratch.plan.seq_slot_in,
                           gpu->staging, bytes, error);
}

sp_status sp_delta_gpu_create(sp_pool *pool, int32_t rows_max, bool x_f32, sp_delta_gpu **out_gpu,
                              sp_error *error)
{
    const sp_layout *layout = sp_pool_layout(pool);
    sp_status status = check_supported(pool, rows_max, error);
    sp_delta_gpu *gpu;

    if (status != SP_OK)
        return status;
    gpu = sp_calloc(1, sizeof *gpu);
    if (gpu == NULL)
        return sp_fail_memory(error, sizeof *gpu, "the delta");
    gpu->pool = pool;
    gpu->device = sp_pool_device(pool);
    gpu->number = sp_device_cuda_index(gpu->device);
    gpu->multiprocessors = sp_device_cuda_multiprocessors(gpu->device);
    gpu->main_stream = sp_device_main_stream(gpu->device);
    gpu->rows_max = rows_max;
    gpu->n_slots = sp_pool_slots(pool);
    gpu->rank_stride = sp_layout_rank_stride(layout);
    gpu->type = (int32_t)sp_layout_dtype(layout);
    gpu->slot_elements = (int64_t)(sp_layout_slot_bytes(layout) / 2);
    gpu->rows_started = -1;
    status = sp_kernels_cuda_get(gpu->device, &gpu->kernels, error);
    if (status == SP_OK)
        status = allocate(gpu, x_f32, error);
    if (status == SP_OK)
        status = clear_rows(gpu, error);
    if (status != SP_OK) {
        sp_delta_gpu_destroy(gpu);
        return status;
    }
    *out_gpu = gpu;
    return SP_OK;
}

void sp_delta_gpu_destroy(sp_delta_gpu *gpu)
{
    if (gpu == NULL)
        return;
    (void)sp_device_wait_all(gpu->device, NULL);
    sp_delta_gpu_experts_destroy(gpu);
    for (int i = 0; i < SP_CUDA_UPLOADS; i++)
        sp_event_destroy(gpu->uploaded[i]);
    sp_device_free_pinned(gpu->device, gpu->staging);
    sp_device_free(gpu->device, gpu->block);
    sp_free(gpu);
}

/* ---- the plan ------------------------------------------------------------------------------ */

void *sp_delta_gpu_native(const sp_delta_gpu *gpu, const sp_stream *stream)
{
    return sp_stream_native(stream != NULL ? stream : gpu->main_stream);
}

sp_status sp_delta_gpu_launched(const sp_delta_gpu *gpu, int code, const char *what,
                                sp_error *error)
{
    sp_status status = sp_device_cuda_status(gpu->device, code, what);

    if (status == SP_OK)
        return SP_OK;
    return sp_fail(error, status, NULL, sp_device_name(gpu->device), -1, "%.400s",
                   sp_device_error_text(gpu->device));
}

/* Rows that an earlier upload set and this one lacks become -1, so that a graph captured with more
 * rows finds nothing there. */
sp_status sp_delta_gpu_upload(sp_delta_gpu *gpu, const sp_plan_view *view, sp_stream *stream,
                              sp_error *error)
{
    int32_t n_rows = view->n_rows, set = gpu->rows_set, n;
    int32_t *slots = staged_slots(gpu);
    float *scales = (float *)(void *)(slots + gpu->rows_max);
    sp_event *read = gpu->uploaded[gpu->turn];
    sp_status status = sp_event_wait(read, error);

    set = gpu->device_rows > set ? gpu->device_rows : set;
    n = n_rows > set ? n_rows : set;
    if (status != SP_OK || n == 0)
        return status;
    if (stream == NULL)
        stream = gpu->main_stream;
    memcpy(slots, view->seq_slot, (size_t)n_rows * sizeof *slots);
    memcpy(scales, view->row_scale, (size_t)n_rows * sizeof *scales);
    for (int32_t row = n_rows; row < n; row++) {
        slots[row] = SP_SLOT_BASE;
        scales[row] = 1.0f;
    }
    status = sp_stream_copy(stream, (void *)(uintptr_t)gpu->scratch.plan.seq_slot_in, slots,
                            (size_t)n * sizeof *slots, error);
    if (status == SP_OK)
        status = sp_stream_copy(stream, (void *)(uintptr_t)gpu->scratch.plan.row_scale_in, scales,
                                (size_t)n * sizeof *scales, error);
    gpu->rows_set = status == SP_OK ? n_rows : n;
    gpu->turn = (gpu->turn + 1) % SP_CUDA_UPLOADS;
    return status == SP_OK ? sp_event_record(read, stream, error) : status;
}

static sp_status start_plan(sp_delta_gpu *gpu, int32_t n_rows, sp_stream *stream, bool from_device,
                            sp_error *error)
{
    void *native = sp_delta_gpu_native(gpu, stream);
    sp_status status = sp_delta_gpu_launched(
        gpu, gpu->kernels.plan_rows(gpu->number, &gpu->scratch.plan, n_rows, gpu->n_slots, native),
        "launching the plan", error);

    gpu->rows_started = status == SP_OK ? n_rows : -1;
    gpu->from_device = status == SP_OK && from_device;
    gpu->plan_native = native;
    gpu->after_plan = true;
    return status;
}

sp_status sp_delta_gpu_start(sp_delta_gpu *gpu, const sp_plan_view *view, sp_stream *stream,
                             sp_error *error)
{
    gpu->build_started = view->build;
    return start_plan(gpu, view->n_rows, stream, false, error);
}

/* Reads the caller's arrays, writes the plan's input and the report, which is copied to where the
 * host reads it. */
sp_status sp_delta_gpu_rows_from_device(sp_delta_gpu *gpu, const sp_device_rows *rows,
                                        sp_stream *stream, sp_error *error)
{
    const sp_cuda_rows check = {
        .n_rows = rows->n_rows,
        .n_slots = gpu->n_slots,
        .slot = rows->slot,
        .generation = rows->generation,
        .scale = rows->row_scale,
        .shown = sp_pool_generations(gpu->pool),
        .seq_slot = (int32_t *)(uintptr_t)gpu->scratch.plan.seq_slot_in,
        .row_scale = (float *)(uintptr_t)gpu->scratch.plan.row_scale_in,
        .report = gpu->report,
    };
    sp_status status;

    if (stream == NULL)
        stream = gpu->main_stream;
    if (rows->n_rows > gpu->device_rows)
        gpu->device_rows = rows->n_rows;
    gpu->build_started = 0;
    status = sp_delta_gpu_launched(
        gpu, gpu->kernels.check_rows(gpu->number, &check, sp_stream_native(stream)),
        "checking rows", error);
    if (status == SP_OK)
        status = sp_stream_copy(stream, gpu->report_read, gpu->report, sizeof *gpu->report, error);
    return status == SP_OK ? start_plan(gpu, rows->n_rows, stream, true, error) : status;
}

void sp_delta_gpu_report(const sp_delta_gpu *gpu, sp_row_report *out_report)
{
    sp_cuda_row_report read = *(const volatile sp_cuda_row_report *)gpu->report_read;

    *out_report = (sp_row_report){
        .struct_bytes = sizeof *out_report,
        .step = read.step,
        .n_rows = read.n_rows,
        .n_refused = read.n_refused,
        .first_row = read.first_row,
        .reason = (sp_row_refusal)read.reason,
    };
}

int32_t sp_delta_gpu_rows_started(const sp_delta_gpu *gpu)
{
    return gpu->rows_started;
}

bool sp_delta_gpu_has_device_rows(const sp_delta_gpu *gpu)
{
    return gpu->from_device;
}

sp_status sp_delta_gpu_check_step(const sp_delta_gpu *gpu, const sp_plan_view *view,
                                  sp_error *error)
{
    if (gpu->rows_started < 0)
        return sp_fail(error, SP_ERR_STATE, NULL, "plan", -1,
                       "no step was started: call sp_delta_upload and sp_delta_start first");
    if ((view != NULL ? view->build : 0) == gpu->build_started)
        return SP_OK;
    return sp_fail(error, SP_ERR_STATE, NULL, "plan", -1,
                   "the step was started with another plan, or this one was built anew since: call "
                   "sp_delta_upload and sp_delta_start with it");
}

/* ---- groups -------------------------------------------------------------------------------- */

sp_delta_gpu_call sp_delta_gpu_call_of(int32_t n_rows, int32_t k_in, const sp_delta_call *call)
{
    return (sp_delta_gpu_call){
        .n_rows = n_rows,
        .k_in = k_in,
        .x = call->x,
        .x_stride = call->x_stride,
        .x_type = call->x_type,
        .stream = call->stream,
    };
}

void sp_delta_gpu_call_add(sp_delta_gpu_call *call, int32_t site, const sp_delta_output *output)
{
    call->sites[call->n] = site;
    call->outputs[call->n++] = *output;
}

static void set_site(const sp_delta_gpu *gpu, int32_t index, const sp_delta_output *output,
                     sp_cuda_site *site)
{
    const sp_layout_site *place = sp_layout_site_at(sp_pool_layout(gpu->pool), index);
    const sp_pool_tables *tables = sp_pool_tables_at(gpu->pool, index);

    *site = (sp_cuda_site){
        .a = tables->first_a,
        .b = tables->first_b,
        .a_slot_stride = gpu->slot_elements,
        .b_slot_stride = gpu->slot_elements,
        .a_stride = place->k_in,
        .b_stride = gpu->rank_stride,
        .rank = tables->rank,
        .scale = tables->scale,
        .y = output->y,
        .y_stride = output->y_stride,
        .n_out = place->n_out,
        .y_is_f32 = output->y_type == SP_DTYPE_F32,
    };
}

static bool is_apart(const sp_delta_gpu *gpu, const sp_delta_gpu_call *call, int32_t i)
{
    return sp_layout_site_at(sp_pool_layout(gpu->pool), call->sites[i])->apart;
}

/* Of the sites that slots hold: none where all are routers. */
static void set_group(const sp_delta_gpu *gpu, const sp_delta_gpu_call *call, sp_cuda_group *group)
{
    *group = (sp_cuda_group){
        .type = gpu->type,
        .n_rows = call->n_rows,
        .n_slots = gpu->n_slots,
        .k_in = call->k_in,
        .rank_stride = gpu->rank_stride,
        .multiprocessors = gpu->multiprocessors,
        .x = call->x,
        .x_stride = call->x_stride,
        .plan = gpu->scratch.plan,
        .partials = gpu->scratch.partials,
    };
    for (int32_t i = 0; i < call->n; i++)
        if (!is_apart(gpu, call, i))
            set_site(gpu, call->sites[i], &call->outputs[i], &group->sites[group->n_sites++]);
}

void sp_delta_gpu_record(sp_delta_gpu *gpu, const void *native)
{
    if (native == gpu->plan_native)
        gpu->after_plan = false;
}

static sp_status round_x(sp_delta_gpu *gpu, int32_t n_rows, int32_t k, const void *x,
                         int64_t x_stride, void *native, sp_error *error)
{
    const sp_cuda_round round = {
        .type = gpu->type,
        .n_rows = n_rows,
        .k = k,
        .x = x,
        .x_stride = x_stride,
        .to = gpu->scratch.rounded,
    };

    sp_delta_gpu_record(gpu, native);
    return sp_delta_gpu_launched(gpu, gpu->kernels.round_rows(gpu->number, &round, native),
                                 "rounding x", error);
}

/*
 * A kernel may start before its predecessor ends, but it reads the plan at once: so it must not
 * overlap the plan's own kernel. Work on other streams is not tracked here.
 */
static sp_status shrink_group(sp_delta_gpu *gpu, const sp_delta_gpu_call *call,
                              sp_cuda_group *group, sp_error *error)
{
    void *native = sp_delta_gpu_native(gpu, call->stream);

    if (group->n_sites == 0)
        return SP_OK;
    if ((int32_t)call->x_type != gpu->type) {
        sp_status status =
            round_x(gpu, call->n_rows, call->k_in, call->x, call->x_stride, native, error);

        if (status != SP_OK)
            return status;
        group->x = gpu->scratch.rounded;
        group->x_stride = call->k_in;
    }
    group->after_plan = native != gpu->plan_native || gpu->after_plan;
    sp_delta_gpu_record(gpu, native);
    return sp_delta_gpu_launched(gpu, gpu->kernels.shrink(gpu->number, group, native),
                                 "launching a shrink", error);
}

static sp_status shrink(sp_delta_gpu *gpu, const sp_delta_gpu_call *call, bool keep_sums,
                        sp_error *error)
{
    sp_cuda_group group;

    set_group(gpu, call, &group);
    group.keep_sums = keep_sums;
    return shrink_group(gpu, call, &group, error);
}

sp_status sp_delta_gpu_shrink(sp_delta_gpu *gpu, const sp_delta_gpu_call *call, sp_error *error)
{
    return shrink(gpu, call, false, error);
}

/* Routers, whose logits are written. */
static sp_status add_routers(sp_delta_gpu *gpu, const sp_delta_gpu_call *call, sp_error *error)
{
    sp_status status = SP_OK;

    for (int32_t i = 0; i < call->n && status == SP_OK; i++)
        if (is_apart(gpu, call, i))
            status = sp_delta_gpu_add_router(gpu, call, i, error);
    return status;
}

sp_status sp_delta_gpu_expand(sp_delta_gpu *gpu, const sp_delta_gpu_call *call, sp_error *error)
{
    void *native = sp_delta_gpu_native(gpu, call->stream);
    sp_status status = SP_OK;
    sp_cuda_group group;

    set_group(gpu, call, &group);
    if (group.n_sites > 0)
        status = sp_delta_gpu_launched(gpu, gpu->kernels.expand(gpu->number, &group, native),
                                       "launching an expand", error);
    return status == SP_OK ? add_routers(gpu, call, error) : status;
}

sp_status sp_delta_gpu_apply(sp_delta_gpu *gpu, const sp_delta_gpu_call *call, sp_error *error)
{
    sp_status status = sp_delta_gpu_shrink(gpu, call, error);

    return status == SP_OK ? sp_delta_gpu_expand(gpu, call, error) : status;
}

/* Where nothing can be folded the product comes first, as if the host had called it and then the
 * apply. Else the shrink comes first; if the product did not fold after all, an ordinary expand
 * reads what that shrink wrote. */
sp_status sp_delta_gpu_around(sp_delta_gpu *gpu, const sp_delta_gpu_call *call,
                              sp_delta_product_fn product, void *user, sp_error *error)
{
    sp_cuda_group group;
    bool folded = false;
    sp_status status;

    set_group(gpu, call, &group);
    group.folds = sp_cuda_folds(call->n_rows, gpu->rank_stride) && group.n_sites > 0;
    if (!group.folds) {
        status = product(user, NULL, &folded);
        return status == SP_OK ? sp_delta_gpu_apply(gpu, call, error) : status;
    }
    status = shrink_group(gpu, call, &group, error);
    if (status == SP_OK)
        status = product(user, &group, &folded);
    if (status != SP_OK)
        return status;
    return folded ? add_routers(gpu, call, error) : sp_delta_gpu_expand(gpu, call, error);
}

/* ---- parts --------------------------------------------------------------------------------- */

static sp_status take_parts(sp_delta_gpu *gpu, const sp_cuda_group *group,
                            const sp_cuda_parts *parts, void *native, sp_error *error)
{
    sp_delta_gpu_record(gpu, native);
    return sp_delta_gpu_launched(gpu, gpu->kernels.take_parts(gpu->number, group, parts, native),
                                 "taking a part of xa", error);
}

sp_status sp_delta_gpu_shrink_parts(sp_delta_gpu *gpu, const sp_delta_gpu_call *call,
                                    const sp_cuda_parts *parts, sp_error *error)
{
    sp_status status = shrink(gpu, call, true, error);
    sp_cuda_group group;

    if (status != SP_OK)
        return status;
    set_group(gpu, call, &group);
    return take_parts(gpu, &group, parts, sp_delta_gpu_native(gpu, call->stream), error);
}

/* With one input there is one partial: the sums themselves. */
sp_status sp_delta_gpu_expand_parts(sp_delta_gpu *gpu, const sp_delta_gpu_call *call,
                                    const sp_cuda_parts *parts, sp_error *error)
{
    void *native = sp_delta_gpu_native(gpu, call->stream);
    sp_cuda_group group;
    sp_status status;

    set_group(gpu, call, &group);
    group.k_in = 1;
    sp_delta_gpu_record(gpu, native);
    status = sp_delta_gpu_launched(gpu, gpu->kernels.give_parts(gpu->number, &group, parts, native),
                                   "giving a sum of parts", error);
    if (status != SP_OK)
        return status;
    return sp_delta_gpu_launched(gpu, gpu->kernels.expand(gpu->number, &group, native),
                                 "launching an expand", error);
}

sp_status sp_delta_gpu_clear_part(sp_delta_gpu *gpu, int32_t n_rows, const sp_cuda_parts *parts,
                                  sp_stream *stream, sp_error *error)
{
    const sp_cuda_group none = {
        .type = gpu->type,
        .n_rows = n_rows,
        .n_slots = gpu->n_slots,
        .n_sites = 1,
        .k_in = 1,
        .rank_stride = gpu->rank_stride,
        .multiprocessors = gpu->multiprocessors,
        .plan = gpu->scratch.plan,
        .partials = gpu->scratch.partials,
    };

    return take_parts(gpu, &none, parts, sp_delta_gpu_native(gpu, stream), error);
}

/* ---- tokens -------------------------------------------------------------------------------- */

sp_status sp_delta_gpu_embed(sp_delta_gpu *gpu, int32_t n_rows, const sp_token_table *table,
                             const sp_delta_embed_call *call, sp_error *error)
{
    const sp_pool_overlays *overlays = sp_pool_overlays_of(gpu->pool, SP_SITE_EMBEDDING);
    sp_pool_tables pairs = {.rank = NULL};
    void *native = sp_delta_gpu_native(gpu, call->stream);
    sp_cuda_embed embed;

    if (table->index >= 0)
        pairs = *sp_pool_tables_at(gpu->pool, table->index);
    embed = (sp_cuda_embed){
        .type = gpu->type,
        .n_rows = n_rows,
        .vocab = table->vocab,
        .hidden = table->hidden,
        .tokens = call->tokens,
        .seq_slot = gpu->scratch.plan.seq_slot,
        .row_scale = gpu->scratch.plan.row_scale,
        .rows = overlays->rows,
        .map = overlays->map,
        .a = pairs.first_a,
        .b = pairs.first_b,
        .slot_stride = gpu->slot_elements,
        .rank_stride = gpu->rank_stride,
        .rank = pairs.rank,
        .scale = pairs.scale,
        .y = call->y,
        .y_stride = call->y_stride,
    };
    sp_delta_gpu_record(gpu, native);
    return sp_delta_gpu_launched(gpu, gpu->kernels.embed_rows(gpu->number, &embed, native),
                                 "launching the embeddings", error);
}

static sp_status launch_head(sp_delta_gpu *gpu, int32_t n_rows, const sp_token_table *table,
                             const sp_delta_head_call *call, sp_error *error)
{
    const sp_pool_overlays *overlays = sp_pool_overlays_of(gpu->pool, SP_SITE_HEAD);
    void *native = sp_delta_gpu_native(gpu, call->stream);
    const sp_cuda_head head = {
        .type = gpu->type,
        .n_rows = n_rows,
        .n_slots = gpu->n_slots,
        .vocab = table->vocab,
        .hidden = table->hidden,
        .x = call->x,
        .x_stride = call->x_stride,
        .tiles = gpu->scratch.plan.tiles,
        .rows = overlays->rows,
        .ids = overlays->ids,
        .n = overlays->n,
        .logits = call->logits,
        .logits_stride = call->logits_stride,
        .logits_is_f32 = call->logits_type == SP_DTYPE_F32,
    };

    if (overlays->n == NULL)
        return SP_OK;
    sp_delta_gpu_record(gpu, native);
    return sp_delta_gpu_launched(gpu, gpu->kernels.head_rows(gpu->number, &head, native),
                                 "launching the replaced logits", error);
}

sp_status sp_delta_gpu_head(sp_delta_gpu *gpu, int32_t n_rows, const sp_token_table *table,
                            sp_delta_head_call *io_call, sp_error *error)
{
    sp_status status;

    if ((int32_t)io_call->x_type != gpu->type) {
        status = round_x(gpu, n_rows, table->hidden, io_call->x, io_call->x_stride,
                         sp_delta_gpu_native(gpu, io_call->stream), error);
        if (status != SP_OK)
            return status;
        io_call->x = gpu->scratch.rounded;
        io_call->x_stride = table->hidden;
        io_call->x_type = (sp_dtype)gpu->type;
    }
    return launch_head(gpu, n_rows, table, io_call, error);
}
