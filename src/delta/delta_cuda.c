/*
 * delta_cuda.c: a step's deltas on a GPU. The plan's rows are copied to fixed addresses and turned
 * into tiles there by one kernel; then each group of sites is two launches that read the tables of
 * the pool. A captured graph holds addresses and sizes only, so it replays rightly whatever the
 * plan and the slots hold by then.
 */
#include "delta/delta_cuda.h"

#include "base/alloc.h"
#include "base/error.h"
#include "device/device_cuda.h"
#include "device/step_streams.h"
#include "kernels/cuda_choose.h"

#include <string.h>

#define SCRATCH_ALIGN 256

struct sp_delta_gpu {
    sp_pool *pool;
    sp_device *device;
    int number; /* of the GPU */
    sp_cuda_kernels kernels;
    sp_stream *main_stream;
    void *main_native;
    int32_t rows_max, n_slots, rank_stride, type;
    int64_t slot_elements;
    void *block; /* device: what scratch is cut out of */
    sp_cuda_scratch scratch;
    /* Uploads take turns: pinned seq_slot and row_scale of rows_max each, and when they are read.
     */
    char *staging;
    sp_event *uploaded[SP_CUDA_UPLOADS];
    int32_t turn;
    int32_t rows_set;     /* rows of seq_slot_in that may not be -1 */
    int32_t rows_started; /* of the plan node that was enqueued last, or -1 */
    bool after_plan;      /* it is the main stream's last kernel, as far as we know */
};

/* ---- scratch ------------------------------------------------------------------------------- */

static void *take(char *block, size_t *cursor, size_t bytes)
{
    void *taken = block == NULL ? NULL : block + *cursor;

    *cursor += (bytes + SCRATCH_ALIGN - 1) & ~(size_t)(SCRATCH_ALIGN - 1);
    return taken;
}

sp_cuda_scratch sp_cuda_scratch_cut(char *block, int32_t rows_max, int32_t n_slots,
                                    size_t planes_bytes)
{
    size_t rows = (size_t)rows_max * sizeof(int32_t), slots = (size_t)n_slots * sizeof(int32_t);
    size_t tiles = (size_t)sp_cuda_tiles_bound(rows_max, n_slots) * sizeof(sp_cuda_tile), at = 0;
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
    s.plan.tiles = take(block, &at, tiles);
    s.planes = take(block, &at, planes_bytes);
    s.bytes = at;
    return s;
}

/* No row is ever as long as the vocabulary: embed_tokens gathers. */
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

/* The largest need of any row count, width and group: the choice of planes is no monotone one. */
static size_t planes_bytes(const sp_pool *pool, int32_t rows_max)
{
    const sp_layout *layout = sp_pool_layout(pool);
    int32_t n_slots = sp_pool_slots(pool), rank_stride = sp_layout_rank_stride(layout);
    size_t most = 0;

    for (int32_t i = 0; i < sp_layout_n_sites(layout); i++) {
        int32_t k = sp_layout_site_at(layout, i)->k_in;

        if (is_gathered(layout, i) || !is_first_of_width(layout, i))
            continue;
        for (int32_t rows = 1; rows <= rows_max; rows++)
            for (int32_t sites = 1; sites <= SP_CUDA_SITES_MAX; sites++) {
                size_t bytes = sp_cuda_planes_bytes(rows, n_slots, k, rank_stride, sites);

                most = bytes > most ? bytes : most;
            }
    }
    return most;
}

size_t sp_delta_gpu_bytes(const sp_pool *pool, int32_t rows_max)
{
    return sp_cuda_scratch_cut(NULL, rows_max, sp_pool_slots(pool), planes_bytes(pool, rows_max))
        .bytes;
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

static sp_status allocate(sp_delta_gpu *gpu, sp_error *error)
{
    size_t planes = planes_bytes(gpu->pool, gpu->rows_max);
    size_t bytes = sp_cuda_scratch_cut(NULL, gpu->rows_max, gpu->n_slots, planes).bytes;
    void *staging = NULL;
    sp_status status = sp_device_alloc(gpu->device, bytes, &gpu->block, error);

    if (status != SP_OK)
        return status;
    gpu->scratch = sp_cuda_scratch_cut(gpu->block, gpu->rows_max, gpu->n_slots, planes);
    status =
        sp_device_alloc_pinned(gpu->device, SP_CUDA_UPLOADS * upload_bytes(gpu), &staging, error);
    gpu->staging = staging;
    for (int i = 0; i < SP_CUDA_UPLOADS && status == SP_OK; i++) {
        status = sp_event_create(gpu->device, &gpu->uploaded[i], NULL);
        if (status != SP_OK)
            sp_fail(error, status, NULL, sp_device_name(gpu->device), -1, "%.400s",
                    sp_device_error_text(gpu->device));
    }
    return status;
}

/* No row is routed until the first upload. */
static sp_status clear_rows(sp_delta_gpu *gpu)
{
    size_t bytes = (size_t)gpu->rows_max * sizeof(int32_t);

    memset(gpu->staging, 0xff, bytes);
    return sp_device_write(gpu->device, (void *)(uintptr_t)gpu->scratch.plan.seq_slot_in,
                           gpu->staging, bytes, NULL);
}

sp_status sp_delta_gpu_create(sp_pool *pool, int32_t rows_max, sp_delta_gpu **out_gpu,
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
    gpu->main_stream = sp_device_main_stream(gpu->device);
    gpu->main_native = sp_stream_native(gpu->main_stream);
    gpu->rows_max = rows_max;
    gpu->n_slots = sp_pool_slots(pool);
    gpu->rank_stride = sp_layout_rank_stride(layout);
    gpu->type = (int32_t)sp_layout_dtype(layout);
    gpu->slot_elements = (int64_t)(sp_layout_slot_bytes(layout) / 2);
    gpu->rows_started = -1;
    status = sp_kernels_cuda_get(gpu->device, &gpu->kernels, error);
    if (status == SP_OK)
        status = allocate(gpu, error);
    if (status == SP_OK) {
        status = clear_rows(gpu);
        if (status != SP_OK)
            sp_fail(error, status, NULL, sp_device_name(gpu->device), -1, "%.400s",
                    sp_device_error_text(gpu->device));
    }
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
    for (int i = 0; i < SP_CUDA_UPLOADS; i++)
        sp_event_destroy(gpu->uploaded[i]);
    sp_device_free_pinned(gpu->device, gpu->staging);
    sp_device_free(gpu->device, gpu->block);
    sp_free(gpu);
}

/* ---- the plan ------------------------------------------------------------------------------ */

/* Rows that an earlier upload set and this one has not become -1, so that a graph which was
 * captured with more rows finds nothing there. */
sp_status sp_delta_gpu_upload(sp_delta_gpu *gpu, const sp_plan_view *view)
{
    int32_t n_rows = view->n_rows, n = n_rows > gpu->rows_set ? n_rows : gpu->rows_set;
    int32_t *slots = staged_slots(gpu);
    float *scales = (float *)(void *)(slots + gpu->rows_max);
    sp_event *read = gpu->uploaded[gpu->turn];
    sp_status status = sp_event_wait(read, NULL);

    if (status != SP_OK || n == 0)
        return status;
    memcpy(slots, view->seq_slot, (size_t)n_rows * sizeof *slots);
    memcpy(scales, view->row_scale, (size_t)n_rows * sizeof *scales);
    for (int32_t row = n_rows; row < n; row++) {
        slots[row] = SP_SLOT_BASE;
        scales[row] = 1.0f;
    }
    status = sp_stream_copy(gpu->main_stream, (void *)(uintptr_t)gpu->scratch.plan.seq_slot_in,
                            slots, (size_t)n * sizeof *slots, NULL);
    if (status == SP_OK)
        status = sp_stream_copy(gpu->main_stream, (void *)(uintptr_t)gpu->scratch.plan.row_scale_in,
                                scales, (size_t)n * sizeof *scales, NULL);
    gpu->rows_set = status == SP_OK ? n_rows : n;
    gpu->turn = (gpu->turn + 1) % SP_CUDA_UPLOADS;
    return status == SP_OK ? sp_event_record(read, gpu->main_stream, NULL) : status;
}

sp_status sp_delta_gpu_start(sp_delta_gpu *gpu, int32_t n_rows)
{
    int code = gpu->kernels.plan_rows(gpu->number, &gpu->scratch.plan, n_rows, gpu->n_slots,
                                      gpu->main_native);
    sp_status status = sp_device_cuda_status(gpu->device, code, "launching the plan");

    gpu->rows_started = status == SP_OK ? n_rows : -1;
    gpu->after_plan = true;
    return status;
}

/* ---- groups -------------------------------------------------------------------------------- */

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

static void set_group(const sp_delta_gpu *gpu, const sp_delta_gpu_call *call, sp_cuda_group *group)
{
    *group = (sp_cuda_group){
        .type = gpu->type,
        .n_rows = call->n_rows,
        .n_slots = gpu->n_slots,
        .n_sites = call->n,
        .k_in = call->k_in,
        .rank_stride = gpu->rank_stride,
        .x = call->x,
        .x_stride = call->x_stride,
        .plan = gpu->scratch.plan,
        .planes = gpu->scratch.planes,
    };
    for (int32_t i = 0; i < call->n; i++)
        set_site(gpu, call->sites[i], call->outputs[i], &group->sites[i]);
}

/*
 * A kernel may begin while its predecessor ends, but reads the plan at once: so not when the
 * predecessor is the plan's own. What stands before on another stream is not known here.
 */
static sp_status launch_shrink(sp_delta_gpu *gpu, sp_cuda_group *group, sp_stream *stream)
{
    bool on_main = stream == NULL || stream == gpu->main_stream;
    void *native = on_main ? gpu->main_native : sp_stream_native(stream);

    group->after_plan = !on_main || gpu->after_plan;
    if (on_main)
        gpu->after_plan = false;
    return sp_device_cuda_status(gpu->device, gpu->kernels.shrink(gpu->number, group, native),
                                 "launching a shrink");
}

static sp_status launch_expand(sp_delta_gpu *gpu, const sp_cuda_group *group, sp_stream *stream)
{
    void *native = stream == NULL ? gpu->main_native : sp_stream_native(stream);

    return sp_device_cuda_status(gpu->device, gpu->kernels.expand(gpu->number, group, native),
                                 "launching an expand");
}

sp_status sp_delta_gpu_shrink(sp_delta_gpu *gpu, const sp_delta_gpu_call *call, sp_stream *stream)
{
    sp_cuda_group group;

    if (call->n_rows != gpu->rows_started)
        return SP_ERR_STATE;
    set_group(gpu, call, &group);
    return launch_shrink(gpu, &group, stream);
}

sp_status sp_delta_gpu_expand(sp_delta_gpu *gpu, const sp_delta_gpu_call *call, sp_stream *stream)
{
    sp_cuda_group group;

    if (call->n_rows != gpu->rows_started)
        return SP_ERR_STATE;
    set_group(gpu, call, &group);
    return launch_expand(gpu, &group, stream);
}

sp_status sp_delta_gpu_apply(sp_delta_gpu *gpu, const sp_delta_gpu_call *call)
{
    sp_cuda_group group;
    sp_status status;

    if (call->n_rows != gpu->rows_started)
        return SP_ERR_STATE;
    set_group(gpu, call, &group);
    status = launch_shrink(gpu, &group, NULL);
    return status == SP_OK ? launch_expand(gpu, &group, NULL) : status;
}

/* ---- tokens -------------------------------------------------------------------------------- */

sp_status sp_delta_gpu_embed(sp_delta_gpu *gpu, int32_t n_rows, const int32_t *tokens,
                             int32_t vocab, int32_t hidden, void *y, int64_t y_stride)
{
    const sp_pool_overlays *overlays = sp_pool_overlays_of(gpu->pool, SP_SITE_EMBEDDING);
    const sp_layout *layout = sp_pool_layout(gpu->pool);
    int32_t site = sp_layout_find(
        layout, sp_geometry_find_kind(sp_layout_geometry(layout), SP_SITE_EMBEDDING));
    sp_pool_tables pairs = {.rank = NULL};
    sp_cuda_embed embed;

    if (n_rows != gpu->rows_started)
        return SP_ERR_STATE;
    if (site >= 0)
        pairs = *sp_pool_tables_at(gpu->pool, site);
    embed = (sp_cuda_embed){
        .type = gpu->type,
        .n_rows = n_rows,
        .vocab = vocab,
        .hidden = hidden,
        .tokens = tokens,
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
        .y = y,
        .y_stride = y_stride,
    };
    gpu->after_plan = false;
    return sp_device_cuda_status(gpu->device,
                                 gpu->kernels.embed_rows(gpu->number, &embed, gpu->main_native),
                                 "launching the embeddings");
}

sp_status sp_delta_gpu_head(sp_delta_gpu *gpu, int32_t n_rows, const void *x, int64_t x_stride,
                            int32_t vocab, int32_t hidden, float *logits, int64_t logits_stride)
{
    const sp_pool_overlays *overlays = sp_pool_overlays_of(gpu->pool, SP_SITE_HEAD);
    sp_cuda_head head = {
        .type = gpu->type,
        .n_rows = n_rows,
        .n_slots = gpu->n_slots,
        .vocab = vocab,
        .hidden = hidden,
        .x = x,
        .x_stride = x_stride,
        .tiles = gpu->scratch.plan.tiles,
        .rows = overlays->rows,
        .ids = overlays->ids,
        .n = overlays->n,
        .logits = logits,
        .logits_stride = logits_stride,
    };

    if (n_rows != gpu->rows_started)
        return SP_ERR_STATE;
    if (overlays->n == NULL)
        return SP_OK;
    gpu->after_plan = false;
    return sp_device_cuda_status(gpu->device,
                                 gpu->kernels.head_rows(gpu->number, &head, gpu->main_native),
                                 "launching the replaced logits");
}
