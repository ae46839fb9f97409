#include "adapter/intake_state.h"
#include "base/alloc.h"
#include "base/grow.h"
#include "pool/image.h"
#include "stage/stage_state.h"

#define LOADERS_MAX 64
#define SOURCES_MAX 64

void sp_stage_options_default(sp_stage_options *out_options, size_t struct_bytes)
{
    const sp_stage_options defaults = {
        .struct_bytes = sizeof defaults,
        .threads = 1,
        .supported = ~(sp_module_set)0,
    };

    sp_struct_default(out_options, struct_bytes, &defaults, sizeof defaults);
}

/* ---- options ------------------------------------------------------------------------------- */

static sp_status bad_option(const char *field, int32_t value, const char *wanted, sp_error *error)
{
    return sp_fail(error, SP_ERR_ARGUMENT, NULL, field, -1, "%s is %d; it must be %s", field,
                   (int)value, wanted);
}

static sp_status check_options(const sp_stage_options *options, sp_error *error)
{
    size_t image_bytes;

    if (options->pool == NULL)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "pool", -1, "stage options without a pool");
    if (options->n_sources < 0 || options->n_sources > SOURCES_MAX ||
        (options->n_sources > 0 && options->sources == NULL))
        return bad_option("n_sources", options->n_sources, "from 0 to 64, of a list that is given",
                          error);
    if (options->threads < 0 || options->threads > LOADERS_MAX)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "loader-threads", -1,
                       "loader threads must be from 0 to %d, not %d", LOADERS_MAX,
                       (int)options->threads);
    if (options->call_ms_max < 0)
        return bad_option("call_ms_max", options->call_ms_max, "at least 0", error);
    image_bytes = sp_layout_image_bytes(sp_pool_layout(options->pool));
    if (options->host_bytes_max != 0 && options->host_bytes_max < image_bytes)
        return sp_fail(error, SP_ERR_BUDGET, NULL, "host-cache-mib", -1,
                       "the host cache of %zu bytes does not hold one packed adapter of %zu; "
                       "raise host-cache-mib",
                       options->host_bytes_max, image_bytes);
    return SP_OK;
}

static sp_status read_sources(sp_stage *stage, const sp_stage_options *options, sp_error *error)
{
    for (int32_t i = 0; i < options->n_sources; i++) {
        sp_stage_source *source = &stage->sources[i];
        sp_status status;

        source->struct_bytes = sizeof *source;
        status = sp_struct_read_at(source, sizeof *source, options->sources, (size_t)i,
                                   "sp_stage_source", error);
        if (status != SP_OK)
            return status;
        if (source->describe == NULL || source->fetch == NULL)
            return sp_fail(error, SP_ERR_ARGUMENT, NULL, "sources", i,
                           "source %d has no function that describes, or none that fetches",
                           (int)i);
        if (source->threads < 0 || source->threads > LOADERS_MAX)
            return bad_option("threads", source->threads, "from 0 to 64 for a source", error);
    }
    stage->n_sources = options->n_sources;
    return SP_OK;
}

/* How adapters are audited: by the caller's options, else by the pool's layout. */
static sp_status read_audit(sp_stage *stage, const sp_stage_options *options, sp_error *error)
{
    sp_adapter_options *audit = &stage->audit;
    sp_status status = SP_OK;

    sp_adapter_options_default(audit, sizeof *audit);
    if (options->audit != NULL)
        status = sp_adapter_options_read(options->audit, audit, error);
    if (status != SP_OK)
        return status;
    audit->exec = NULL; /* which loader threads could not share */
    if (audit->geometry == NULL)
        audit->geometry = sp_layout_geometry(stage->layout);
    if (audit->served_embed == NULL && audit->served_head == NULL && audit->base_dir == NULL) {
        audit->served_embed = sp_layout_served(stage->layout, SP_SITE_EMBEDDING);
        audit->served_head = sp_layout_served(stage->layout, SP_SITE_HEAD);
    }
    if (audit->base_dir != NULL) {
        audit->base_dir = stage->base_dir = sp_strdup(audit->base_dir);
        if (stage->base_dir == NULL)
            return sp_fail_memory(error, 1, "a path");
    }
    stage->geometry = sp_geometry_retain(audit->geometry);
    return SP_OK;
}

static sp_status copy_base_name(sp_stage *stage, const sp_stage_options *options, sp_error *error)
{
    if (options->base_name == NULL)
        return SP_OK;
    stage->base_name = sp_strdup(options->base_name);
    return stage->base_name != NULL ? SP_OK : sp_fail_memory(error, 1, "a name");
}

static sp_status allocate(sp_stage *stage, const sp_stage_options *options, sp_error *error)
{
    size_t n_sources = (size_t)options->n_sources, n_slots = (size_t)stage->n_slots;

    stage->slot_content = sp_calloc(n_slots, sizeof(stage_content *));
    stage->slot_infos = sp_calloc(n_slots, sizeof *stage->slot_infos);
    stage->sources =
        sp_calloc(n_sources + 1,
                  sizeof *stage->sources); /* at least one, since an empty block would be NULL */
    stage->fetch_queues = sp_calloc(n_sources + 1, sizeof *stage->fetch_queues);
    if (stage->slot_content == NULL || stage->slot_infos == NULL || stage->sources == NULL ||
        stage->fetch_queues == NULL)
        return sp_fail_memory(error, n_slots * sizeof *stage->slot_infos, "the stage");
    for (size_t i = 0; i < n_slots; i++)
        stage->slot_infos[i].struct_bytes = sizeof *stage->slot_infos;
    return SP_OK;
}

static void free_stage(sp_stage *stage)
{
    sp_geometry_release(stage->geometry);
    sp_free(stage->base_dir);
    sp_free(stage->base_name);
    sp_free(stage->fetch_queues);
    sp_free(stage->sources);
    sp_free(stage->slot_infos);
    sp_free(stage->slot_content);
    sp_free(stage);
}

static sp_status set_up(sp_stage *stage, const sp_stage_options *options, sp_error *error)
{
    sp_status status;

    stage->pool = options->pool;
    stage->layout = sp_pool_layout(options->pool);
    stage->image_bytes = sp_layout_image_bytes(stage->layout);
    stage->host_bytes_max = options->host_bytes_max;
    stage->exec = options->exec;
    stage->n_slots = sp_pool_slots(options->pool);
    stage->supported = options->supported;
    stage->call_ns_max = (uint64_t)options->call_ms_max * 1000000;
    status = allocate(stage, options, error);
    if (status == SP_OK)
        status = read_sources(stage, options, error);
    if (status == SP_OK)
        status = read_audit(stage, options, error);
    if (status == SP_OK)
        status = copy_base_name(stage, options, error);
    if (status == SP_OK)
        status = sp_stage_workers_start(stage, options->threads, error);
    return status;
}

sp_status sp_stage_create(const sp_stage_options *options, sp_stage **out_stage, sp_error *error)
{
    sp_stage_options own;
    sp_stage *stage;
    sp_status status;

    sp_stage_options_default(&own, sizeof own);
    status = sp_struct_read(&own, sizeof own, options, "sp_stage_options", error);
    if (status == SP_OK && out_stage == NULL)
        status = sp_fail_null(error, "out_stage");
    if (status == SP_OK)
        status = check_options(&own, error);
    if (status != SP_OK)
        return status;
    stage = sp_calloc(1, sizeof *stage);
    if (stage == NULL)
        return sp_fail_memory(error, sizeof *stage, "the stage");
    status = set_up(stage, &own, error);
    if (status != SP_OK) {
        free_stage(stage);
        return status;
    }
    *out_stage = stage;
    return SP_OK;
}

/* ---- the end ------------------------------------------------------------------------------- */

/* Fetched and not taken: the task owns the image. */
static void drop_task_image(stage_task *task)
{
    if (task->kind != TASK_COPY && task->image != NULL && task->status == SP_OK)
        sp_image_destroy(task->image);
}

/* What a load has opened, and the slot that an image is being made of, which is a content's. */
static void drop_opened(sp_stage *stage, stage_task *task)
{
    if (task->kind == TASK_KEEP) {
        sp_image_destroy(task->landing);
        return;
    }
    sp_stage_fetch_end(task);
    sp_stage_close_slot(stage, task);
}

static void drop_queue(sp_stage *stage, const stage_queue *queue)
{
    stage_task *next;

    for (stage_task *task = queue->first; task != NULL; task = next) {
        next = task->next;
        drop_task_image(task);
        drop_opened(stage, task);
        if (task->kind == TASK_COPY)
            sp_pool_load_abort(stage->pool, task->slot, NULL);
    }
}

static void drop_tasks(sp_stage *stage)
{
    for (int32_t i = 0; i < stage->n_sources; i++)
        drop_queue(stage, &stage->fetch_queues[i]);
    drop_queue(stage, &stage->pack_queue);
    drop_queue(stage, &stage->copy_queue);
    drop_queue(stage, &stage->done);
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
    bool is_parents;

    if (stage == NULL)
        return;
    is_parents = sp_stage_is_parents(stage);
    sp_stage_workers_stop(stage);
    if (!is_parents) /* else a thread may have been working on them */
        drop_tasks(stage);
    while (stage->loads != NULL) {
        stage_load *load = stage->loads;

        stage->loads = load->next;
        sp_stage_load_destroy(load);
    }
    while (stage->versions != NULL) {
        sp_stage_version *version = stage->versions;

        stage->versions = version->next;
        sp_stage_version_destroy(version);
    }
    while (stage->contents != NULL) {
        stage_content *content = stage->contents;

        stage->contents = content->next;
        if (content->slot >= 0)
            empty_slot(stage, content->slot);
        sp_image_destroy(content->image);
        sp_stage_facts_clear(&content->facts);
        sp_stage_facts_clear(&content->task.facts);
        sp_free(content->fetch_name);
        sp_free(content->fetch_location);
        sp_free(content);
    }
    free_stage(stage);
}

static sp_stage_stats stats_of(const sp_stage *stage)
{
    sp_stage_stats stats = {
        .struct_bytes = sizeof stats,
        .host_bytes = stage->host_bytes,
        .host_bytes_max = stage->host_bytes_max,
        .fetches = stage->fetches,
        .copies = stage->copies,
        .handovers = stage->handovers,
        .evictions = stage->evictions,
        .n_in_flight = stage->n_in_flight,
        .landed = stage->landed,
    };

    for (const stage_content *c = stage->contents; c != NULL; c = c->next)
        stats.n_images += c->image != NULL;
    return stats;
}

sp_status sp_stage_get_stats(const sp_stage *stage, sp_stage_stats *out_stats, sp_error *error)
{
    sp_stage_stats stats;

    if (stage == NULL)
        return sp_fail_null(error, "stage");
    stats = stats_of(stage);
    return sp_struct_write(out_stats, &stats, sizeof stats, "sp_stage_stats", error);
}
