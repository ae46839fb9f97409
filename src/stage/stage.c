#include "base/alloc.h"
#include "base/grow.h"
#include "pool/image.h"
#include "stage/stage_state.h"

#include <string.h>

#define LOADERS_MAX 64

void sp_stage_options_default(sp_stage_options *out_options, size_t struct_bytes)
{
    const sp_stage_options defaults = {.struct_bytes = sizeof defaults, .threads = 1};

    sp_struct_default(out_options, struct_bytes, &defaults, sizeof defaults);
}

static sp_status check_options(const sp_stage_options *options, sp_error *error)
{
    size_t image_bytes;

    if (options->struct_bytes < sizeof *options || options->pool == NULL ||
        options->n_sources < 0 || (options->n_sources > 0 && options->sources == NULL))
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, NULL, -1,
                       "stage options without a pool, or not initialised");
    if (options->threads < 0 || options->threads > LOADERS_MAX)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "loader-threads", -1,
                       "loader threads must be from 0 to %d, not %d", LOADERS_MAX,
                       (int)options->threads);
    image_bytes = sp_layout_image_bytes(sp_pool_layout(options->pool));
    if (options->host_bytes_max != 0 && options->host_bytes_max < image_bytes)
        return sp_fail(error, SP_ERR_BUDGET, NULL, "host-cache-mib", -1,
                       "the host cache of %zu bytes does not hold one packed adapter of %zu; "
                       "raise host-cache-mib",
                       options->host_bytes_max, image_bytes);
    return SP_OK;
}

static sp_status allocate(sp_stage *stage, const sp_stage_options *options)
{
    size_t n_sources = (size_t)options->n_sources, n_slots = (size_t)stage->n_slots;

    stage->slot_content = sp_calloc(n_slots, sizeof(stage_content *));
    stage->slot_infos = sp_calloc(n_slots, sizeof *stage->slot_infos);
    stage->sources = sp_calloc(n_sources + 1, sizeof *stage->sources); /* never an empty block */
    if (stage->slot_content == NULL || stage->slot_infos == NULL || stage->sources == NULL)
        return SP_ERR_MEMORY;
    for (size_t i = 0; i < n_slots; i++)
        stage->slot_infos[i].struct_bytes = sizeof *stage->slot_infos;
    if (n_sources > 0)
        memcpy(stage->sources, options->sources, n_sources * sizeof *stage->sources);
    stage->n_sources = options->n_sources;
    return SP_OK;
}

static void free_stage(sp_stage *stage)
{
    sp_free(stage->sources);
    sp_free(stage->slot_infos);
    sp_free(stage->slot_content);
    sp_free(stage);
}

sp_status sp_stage_create(const sp_stage_options *options, sp_stage **out_stage, sp_error *error)
{
    sp_stage *stage;
    sp_status status = check_options(options, error);

    if (status != SP_OK)
        return status;
    stage = sp_calloc(1, sizeof *stage);
    if (stage == NULL)
        return sp_fail_memory(error, sizeof *stage, "the stage");
    stage->pool = options->pool;
    stage->layout = sp_pool_layout(options->pool);
    stage->image_bytes = sp_layout_image_bytes(stage->layout);
    stage->host_bytes_max = options->host_bytes_max;
    stage->exec = options->exec;
    stage->n_slots = sp_pool_slots(options->pool);
    status = allocate(stage, options);
    if (status != SP_OK)
        sp_fail_memory(error, (size_t)stage->n_slots * sizeof *stage->slot_infos, "the stage");
    else
        status = sp_stage_workers_start(stage, options->threads, error);
    if (status != SP_OK) {
        free_stage(stage);
        return status;
    }
    *out_stage = stage;
    return SP_OK;
}

/* ---- the end ------------------------------------------------------------------------------- */

/* Fetched and not taken back: the image is the task's. */
static void drop_task_image(stage_task *task)
{
    if (task->kind != TASK_COPY && task->image != NULL && task->status == SP_OK)
        sp_image_destroy(task->image);
}

static void drop_tasks(sp_stage *stage)
{
    stage_queue *queues[] = {&stage->fetch_queue, &stage->copy_queue, &stage->done};
    stage_task *next;

    for (size_t i = 0; i < sizeof queues / sizeof queues[0]; i++) {
        for (stage_task *task = queues[i]->first; task != NULL; task = next) {
            next = task->next;
            drop_task_image(task);
            if (task->kind == TASK_COPY)
                sp_pool_load_abort(stage->pool, task->slot, NULL);
        }
    }
}

static void empty_slot(sp_stage *stage, int32_t slot)
{
    sp_slot_info info = {.struct_bytes = sizeof info};
    sp_slot_handle handle;

    (void)sp_pool_slot_info(stage->pool, slot, &info, NULL);
    handle = (sp_slot_handle){slot, info.generation};
    sp_pool_set_pinned(stage->pool, handle, false, NULL);
    sp_pool_drain(stage->pool, handle, NULL);
}

void sp_stage_destroy(sp_stage *stage)
{
    if (stage == NULL)
        return;
    sp_stage_workers_stop(stage);
    drop_tasks(stage);
    while (stage->loads != NULL) {
        stage_load *load = stage->loads;

        stage->loads = load->next;
        sp_stage_load_destroy(load);
    }
    while (stage->versions != NULL) {
        sp_version *version = stage->versions;

        stage->versions = version->next;
        sp_version_destroy(version);
    }
    while (stage->contents != NULL) {
        stage_content *content = stage->contents;

        stage->contents = content->next;
        if (content->slot >= 0)
            empty_slot(stage, content->slot);
        sp_image_destroy(content->image);
        sp_adapter_facts_clear(&content->facts);
        sp_adapter_facts_clear(&content->task.facts);
        sp_free(content->fetch_name);
        sp_free(content->fetch_location);
        sp_free(content);
    }
    free_stage(stage);
}

void sp_stage_get_stats(const sp_stage *stage, sp_stage_stats *out_stats)
{
    *out_stats = (sp_stage_stats){
        .host_bytes = stage->host_bytes,
        .host_bytes_max = stage->host_bytes_max,
        .fetches = stage->fetches,
        .copies = stage->copies,
        .handovers = stage->handovers,
        .evictions = stage->evictions,
        .n_in_flight = stage->n_in_flight,
    };
    for (const stage_content *c = stage->contents; c != NULL; c = c->next)
        out_stats->n_images += c->image != NULL;
}
