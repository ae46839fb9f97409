/*
 * route_models.c: GET /v1/models and /v1/models/ID: the base, the adapters that are loaded, those
 * whose folder waits in --adapter-dir, and those that peers have. No path is disclosed: `root` is a
 * name.
 */
#include "base/alloc.h"
#include "base/hash.h"
#include "server/api/api.h"

#include <string.h>

typedef struct model_list {
    const sp_call *call;
    const sp_snapshot *snapshot;
    sp_text *out;
    const char *wanted; /* NULL: all */
    size_t n;
} model_list;

static void add_string(sp_text *out, const char *field, const char *value)
{
    sp_text_format(out, ", \"%s\": ", field);
    if (value)
        sp_text_json_string(out, value, strlen(value));
    else
        sp_text_add(out, "null");
}

static void add_model(model_list *list, const char *id, const char *parent,
                      const sp_listed_adapter *info)
{
    const sp_api *api = list->call->api;
    char digest[2 * SP_DIGEST_BYTES + 1];

    if (list->wanted && strcmp(list->wanted, id) != 0)
        return;
    sp_text_add(list->out, list->n++ > 0 ? ", {\"id\": " : "{\"id\": ");
    sp_text_json_string(list->out, id, strlen(id));
    sp_text_format(list->out,
                   ", \"object\": \"model\", \"created\": %lld, "
                   "\"owned_by\": \"sidepath\"",
                   (long long)api->started_s);
    add_string(list->out, "root", id);
    add_string(list->out, "parent", parent);
    if (!parent)
        sp_text_format(list->out, ", \"max_model_len\": %d", sp_engine_max_context(api->engine));
    if (info) {
        sp_hex(info->digest.bytes, SP_DIGEST_BYTES, digest);
        add_string(list->out, "adapter_digest", digest);
    }
    sp_text_add(list->out, "}");
}

static void visit_folder(void *user, const char *name)
{
    model_list *list = user;
    const char *base = sp_engine_base_name(list->call->api->engine);

    if (sp_snapshot_find(list->snapshot, name) || sp_snapshot_is_hidden(list->snapshot, name) ||
        sp_stage_name_check(name, base, NULL) != SP_OK)
        return;
    add_model(list, name, base, NULL);
}

static void visit_peers(void *user, const char *name)
{
    model_list *list = user;

    if (!sp_lora_dir_has_listed(list->call->api->dir, name))
        visit_folder(user, name);
}

static void add_models(model_list *list)
{
    const char *base = sp_engine_base_name(list->call->api->engine);
    sp_peers *peers = list->call->api->settings->opened_peers;

    add_model(list, base, NULL, NULL);
    for (size_t i = 0; i < list->snapshot->n_adapters; i++)
        if (list->snapshot->adapters[i].state != SP_STAGE_VERSION_DRAINING)
            add_model(list, list->snapshot->adapters[i].name, base, &list->snapshot->adapters[i]);
    if (!list->wanted) {
        sp_lora_dir_list(list->call->api->dir, visit_folder, list);
        sp_peers_list(peers, visit_peers, list);
    } else if (list->n == 0 && sp_peers_have(peers, list->wanted)) {
        visit_folder(list, list->wanted);
    }
}

/* Of one model: its folder was looked up where that is what decides. */
static bool needs_look_up(const model_list *list, const sp_lora_task *task)
{
    return list->wanted && list->n == 0 && !task->looked_up &&
           !sp_snapshot_is_hidden(list->snapshot, list->wanted) &&
           sp_api_may_have_folder(list->call->api, list->wanted);
}

static void answer_models(sp_call *call)
{
    const sp_lora_task *task = (sp_lora_task *)(void *)call->task;
    sp_text body = {0};
    model_list list = {call, &task->snapshot, &body, call->argument, 0};

    if (!sp_task_is_done(call->task))
        return;
    if (task->task.status != SP_OK) {
        sp_call_fail(call, task->task.status, &task->task.error);
        return;
    }
    if (!list.wanted)
        sp_text_add(&body, "{\"object\": \"list\", \"data\": [");
    add_models(&list);
    if (needs_look_up(&list, task)) {
        sp_text_free(&body);
        sp_call_wait_lora(call, sp_lora_task_create_list(list.wanted), answer_models);
        return;
    }
    if (list.wanted && list.n == 0 && task->path)
        visit_folder(&list, list.wanted);
    if (!list.wanted)
        sp_text_add(&body, "]}");
    if (list.n > 0) {
        sp_text_add(&body, "\n");
        sp_call_answer_json(call, &body);
        return;
    }
    sp_text_free(&body);
    sp_call_refuse(call, 404, NULL, "model", "model_not_found", "there is no model \"%s\"",
                   list.wanted);
}

void sp_handle_models(sp_call *call)
{
    sp_call_wait_lora(call, sp_lora_task_create_list(NULL), answer_models);
}

/* "BASE:NAME" is NAME here too. */
void sp_handle_model(sp_call *call)
{
    char *name = sp_strdup(sp_api_model(call->api, call->argument));

    sp_free(call->argument);
    call->argument = name;
    if (!name) {
        sp_call_refuse(call, 503, NULL, NULL, "out-of-memory", "out of memory");
        return;
    }
    sp_call_wait_lora(call, sp_lora_task_create(SP_TASK_LIST, NULL, NULL), answer_models);
}
