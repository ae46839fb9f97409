#include "server/driver/lora_task.h"

#include "base/alloc.h"

#include <string.h>

static void destroy(sp_task *task)
{
    sp_lora_task *adapter = (sp_lora_task *)(void *)task;

    sp_snapshot_free(&adapter->snapshot);
    sp_lora_chat_release(adapter->chat);
    sp_published_destroy(adapter->published);
    sp_free(adapter->in_use);
    sp_free(adapter->name);
    sp_free(adapter->path);
    sp_free(adapter);
}

sp_lora_task *sp_lora_task_create(sp_task_kind kind, const char *name, const char *path)
{
    sp_lora_task *created = sp_calloc(1, sizeof *created);

    if (!created)
        return NULL;
    sp_task_start(&created->task, kind, destroy);
    if (name)
        created->name = sp_strdup(name);
    if (path)
        created->path = sp_strdup(path);
    if ((name && !created->name) || (path && !created->path)) {
        sp_task_release(&created->task);
        return NULL;
    }
    return created;
}

sp_lora_task *sp_lora_task_create_list(const char *name)
{
    sp_lora_task *created = sp_lora_task_create(SP_TASK_LIST, name, NULL);

    if (created)
        created->look_up = name ? SP_LOOK_UP_NAME : SP_LOOK_UP_LIST;
    return created;
}

/* Strings are the copy's own. False: out of memory. */
static bool copy_adapter(const sp_stage_version_info *info, bool with_receipt,
                         sp_listed_adapter *out_adapter)
{
    const sp_stage_facts *facts = info->facts;
    bool receipt = with_receipt && facts->receipt;

    *out_adapter = (sp_listed_adapter){
        .name = sp_strdup(info->name),
        .path = sp_strdup(info->location),
        .receipt = receipt ? sp_strdup(facts->receipt) : NULL,
        .state = info->state,
        .slot = info->slot,
        .rank = facts->rank,
        .sites = facts->sites,
        .file_bytes = facts->file_bytes,
        .slot_bytes = info->slot_bytes,
        .host_bytes = info->image_bytes,
        .digest = info->digest,
        .generation = info->generation,
        .pinned = info->pinned,
        .active = info->active,
        .references = info->references,
        .running = info->in_slot,
        .waiting = info->references - info->in_slot,
        .rows = info->uses,
        .load_seconds = info->load_seconds,
    };
    return out_adapter->name && out_adapter->path && (!receipt || out_adapter->receipt);
}

static bool copy_adapters(const sp_stage *stage, bool with_receipts, sp_snapshot *snapshot)
{
    size_t n = sp_stage_n_versions(stage);

    snapshot->adapters = sp_calloc(n + 1, sizeof *snapshot->adapters);
    if (!snapshot->adapters)
        return false;
    for (size_t i = 0; i < n; i++) {
        sp_stage_version_info info = {.struct_bytes = sizeof info};

        if (sp_stage_version_at(stage, i, &info, NULL) != SP_OK)
            break;
        snapshot->n_adapters = i + 1;
        if (!copy_adapter(&info, with_receipts, &snapshot->adapters[i]))
            return false;
    }
    return true;
}

static bool copy_hidden(char *const *hidden, size_t n, sp_snapshot *snapshot)
{
    snapshot->hidden = sp_calloc(n + 1, sizeof *snapshot->hidden);
    if (!snapshot->hidden)
        return false;
    for (; snapshot->n_hidden < n; snapshot->n_hidden++) {
        snapshot->hidden[snapshot->n_hidden] = sp_strdup(hidden[snapshot->n_hidden]);
        if (!snapshot->hidden[snapshot->n_hidden])
            return false;
    }
    return true;
}

static bool copy_metrics(const sp_metrics *metrics, sp_snapshot *snapshot)
{
    if (!metrics)
        return true;
    snapshot->metrics = sp_malloc(sizeof *snapshot->metrics);
    if (snapshot->metrics)
        *snapshot->metrics = *metrics;
    return snapshot->metrics != NULL;
}

sp_status sp_snapshot_take(const sp_engine *engine, const sp_driver_counts *counts,
                           const sp_metrics *metrics, bool with_receipts, char *const *hidden,
                           size_t n_hidden, sp_snapshot *out_snapshot)
{
    sp_snapshot snapshot = {.counts = *counts, .stats.struct_bytes = sizeof snapshot.stats};

    sp_engine_get_stats(engine, &snapshot.stats, NULL);
    if (!copy_adapters(sp_engine_stage(engine), with_receipts, &snapshot) ||
        !copy_hidden(hidden, n_hidden, &snapshot) || !copy_metrics(metrics, &snapshot)) {
        sp_snapshot_free(&snapshot);
        return SP_ERR_MEMORY;
    }
    *out_snapshot = snapshot;
    return SP_OK;
}

bool sp_snapshot_add_awaited(sp_snapshot *snapshot, const char *name)
{
    char **grown = sp_realloc(snapshot->awaited, (snapshot->n_awaited + 1) * sizeof *grown);

    if (!grown)
        return false;
    snapshot->awaited = grown;
    grown[snapshot->n_awaited] = sp_strdup(name);
    if (!grown[snapshot->n_awaited])
        return false;
    snapshot->n_awaited++;
    return true;
}

void sp_snapshot_free(sp_snapshot *snapshot)
{
    for (size_t i = 0; i < snapshot->n_adapters; i++) {
        sp_free((void *)(uintptr_t)snapshot->adapters[i].name);
        sp_free((void *)(uintptr_t)snapshot->adapters[i].path);
        sp_free((void *)(uintptr_t)snapshot->adapters[i].receipt);
    }
    for (size_t i = 0; i < snapshot->n_hidden; i++)
        sp_free(snapshot->hidden[i]);
    sp_free(snapshot->adapters);
    for (size_t i = 0; i < snapshot->n_awaited; i++)
        sp_free(snapshot->awaited[i]);
    sp_free(snapshot->awaited);
    sp_free(snapshot->hidden);
    sp_free(snapshot->metrics);
    *snapshot = (sp_snapshot){.n_adapters = 0};
}

const sp_listed_adapter *sp_snapshot_find(const sp_snapshot *snapshot, const char *name)
{
    for (size_t i = 0; i < snapshot->n_adapters; i++)
        if (snapshot->adapters[i].state != SP_STAGE_VERSION_DRAINING &&
            strcmp(snapshot->adapters[i].name, name) == 0)
            return &snapshot->adapters[i];
    return NULL;
}

bool sp_snapshot_is_hidden(const sp_snapshot *snapshot, const char *name)
{
    for (size_t i = 0; i < snapshot->n_hidden; i++)
        if (strcmp(snapshot->hidden[i], name) == 0)
            return true;
    return false;
}
