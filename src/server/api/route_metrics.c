/*
 * route_metrics.c: metrics, and the status page with its data. The engine's thread takes a snapshot
 * between two steps; the HTTP thread makes text of it.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "server/api/api.h"
#include "server/api/status_page.h"

#include <time.h>

#define NS_PER_S 1e9

static sp_front_counts count_front(const sp_call *call)
{
    sp_api *api = call->api;
    const sp_budget *budget = &api->budget;

    return (sp_front_counts){
        .weights_changed = sp_weights_watch_state(api->weights, NULL) != SP_WEIGHTS_SOUND,
        .http = sp_http_count(call->exchange),
        .client_bytes = {atomic_load(&budget->used[SP_BUDGET_BODIES]),
                         atomic_load(&budget->used[SP_BUDGET_REQUESTS]),
                         atomic_load(&budget->used[SP_BUDGET_ANSWERS])},
        .client_bytes_max = budget->bytes_max,
        .client_bytes_refused = atomic_load(&budget->refused),
        .log_lines_dropped = sp_log_dropped(api->settings->log),
        .key_reloads = atomic_load(&api->n_key_reloads),
        .key_reload_failures = atomic_load(&api->n_key_reload_failures),
    };
}

static sp_metrics_view view_of(const sp_call *call, const sp_front_counts *front)
{
    const sp_api *api = call->api;
    const sp_lora_task *task = (sp_lora_task *)(void *)call->task;
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    return (sp_metrics_view){
        .version = sp_library_version_text(),
        .base_name = sp_engine_base_name(api->engine),
        .cpu_isa = sp_engine_cpu_isa(api->engine),
        .now_unix_s = (double)now.tv_sec + (double)now.tv_nsec / NS_PER_S,
        .now_s = sp_clock_seconds(),
        .uptime_s = (double)(sp_clock_ns() - api->started_ns) / NS_PER_S,
        .draining = atomic_load(&api->draining),
        .stats = &task->snapshot.stats,
        .adapters = task->snapshot.adapters,
        .n_adapters = task->snapshot.n_adapters,
        .awaited = (const char *const *)task->snapshot.awaited,
        .n_awaited = task->snapshot.n_awaited,
        .metrics = task->snapshot.metrics,
        .counts = &task->snapshot.counts,
        .front = front,
        .http_codes = api->http_codes,
        .refusals = api->refusals,
    };
}

/* False: the snapshot is not there yet, or the call has been answered with an error. */
static bool has_snapshot(sp_call *call)
{
    if (!sp_task_is_done(call->task))
        return false;
    if (call->task->status == SP_OK)
        return true;
    sp_call_fail(call, call->task->status, &call->task->error);
    return false;
}

static void answer_metrics(sp_call *call)
{
    sp_front_counts front = count_front(call);
    sp_listed_peer *peers;
    sp_metrics_view view;
    sp_text body = {0};

    if (!has_snapshot(call))
        return;
    view = view_of(call, &front);
    peers = sp_peers_snapshot(call->api->settings->opened_peers, &view.n_peers);
    view.peers = peers;
    sp_metrics_text(&view, &body);
    sp_free(peers);
    sp_call_answer_text(call, 200, SP_METRICS_TYPE, &body);
}

/* Names of folders, copied: the next scan replaces them. */
typedef struct folder_names {
    char **names; /* [n], room for capacity */
    size_t n, capacity;
} folder_names;

static void add_folder(void *user, const char *name)
{
    folder_names *list = user;

    if (list->n == list->capacity) {
        size_t capacity = list->capacity ? 2 * list->capacity : 16;
        char **grown = sp_realloc(list->names, capacity * sizeof *grown);

        if (!grown)
            return;
        list->names = grown;
        list->capacity = capacity;
    }
    list->names[list->n] = sp_strdup(name);
    list->n += list->names[list->n] != NULL;
}

static void answer_status(sp_call *call)
{
    const sp_lora_task *task = (sp_lora_task *)(void *)call->task;
    sp_front_counts front = count_front(call);
    folder_names folders = {.n = 0};
    sp_metrics_view view;
    sp_text body = {0};

    if (!has_snapshot(call))
        return;
    view = view_of(call, &front);
    sp_lora_dir_list(call->api->dir, add_folder, &folders);
    view.folders = (const char *const *)folders.names;
    view.n_folders = folders.n;
    view.unloaded = (const char *const *)task->snapshot.hidden;
    view.n_unloaded = task->snapshot.n_hidden;
    sp_metrics_json(&view, &body);
    for (size_t i = 0; i < folders.n; i++)
        sp_free(folders.names[i]);
    sp_free(folders.names);
    sp_exchange_add_header(call->exchange, "Cache-Control", "no-store");
    sp_exchange_add_header(call->exchange, "X-Content-Type-Options", "nosniff");
    sp_call_answer_json(call, &body);
}

static void ask(sp_call *call, void (*answer)(sp_call *call))
{
    sp_lora_task *task = sp_lora_task_create(SP_TASK_LIST, NULL, NULL);

    if (task)
        task->with_metrics = true;
    sp_call_wait_lora(call, task, answer);
}

void sp_handle_metrics(sp_call *call)
{
    ask(call, answer_metrics);
}

void sp_handle_status(sp_call *call)
{
    ask(call, answer_status);
}

void sp_handle_page(sp_call *call)
{
    sp_text policy = {0}, body = {0};

    sp_status_page_add_policy(&policy);
    sp_status_page_add(&body);
    body.failed |= policy.failed;
    if (!body.failed)
        sp_exchange_add_header(call->exchange, "Content-Security-Policy", policy.data);
    sp_exchange_add_header(call->exchange, "X-Content-Type-Options", "nosniff");
    sp_exchange_add_header(call->exchange, "Referrer-Policy", "no-referrer");
    sp_exchange_add_header(call->exchange, "Cache-Control", "no-cache");
    sp_text_free(&policy);
    sp_call_answer_text(call, 200, SP_STATUS_PAGE_TYPE, &body);
}
