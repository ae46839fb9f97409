/*
 * route_adapters.c: loading, unloading, activating and listing adapters. Bodies and success texts
 * of the first two are those that clients of vLLM send and expect.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "base/hash.h"
#include "server/api/api.h"
#include "server/api/body_fields.h"
#include "server/api/query.h"
#include "server/api/route_publish.h"
#include "server/metrics/plain_text.h"

#include <stdio.h>
#include <string.h>

static void answer_success(sp_call *call, const char *name, const char *what)
{
    sp_text body = {0};

    sp_text_format(&body, "Success: LoRA adapter '%s' %s successfully.", name, what);
    sp_call_answer_text(call, 200, SP_TEXT_TYPE, &body);
}

/* ---- load ---------------------------------------------------------------------------------- */

static void answer_load(sp_call *call)
{
    const sp_lora_task *task = (sp_lora_task *)(void *)call->task;
    const sp_error *error = &task->task.error;

    if (!sp_task_is_done(call->task))
        return;
    if (task->task.status == SP_OK) {
        sp_call_add_version(call, task);
        answer_success(call, task->name, "added");
    } else if (task->task.status == SP_ERR_STATE && error->code &&
               strcmp(error->code, "name-taken") == 0) {
        sp_call_refuse(call, 400, "InvalidUserInput", "lora_name", "name-taken",
                       "The lora adapter '%s' has already been loaded. \"load_inplace\": true "
                       "replaces it.",
                       task->name);
    } else {
        sp_call_fail(call, task->task.status, error);
    }
}

static sp_status start_load(sp_call *call, const sp_adapter_wish *wish, sp_error *error)
{
    sp_lora_task *task;
    char *path = NULL; /* it stays so where peers are to have it */
    sp_status status =
        sp_stage_name_check(wish->name, sp_engine_base_name(call->api->engine), error);

    if (status != SP_OK) /* its subject is the name itself */
        snprintf(error->subject, sizeof error->subject, "lora_name");
    if (status == SP_OK && wish->path)
        status = sp_lora_dir_resolve(wish->path, &path, error);
    if (status != SP_OK)
        return status;
    task = sp_adapter_wish_task(wish, path);
    sp_free(path);
    if (task && task->path)
        task->look_up = SP_LOOK_UP_PATH;
    sp_call_wait_lora(call, task, answer_load);
    return SP_OK;
}

/* What the body says, or the query where the body is the adapter. NULL: the call is answered. */
static json_t *load_fields(sp_call *call)
{
    json_t *fields = NULL;
    sp_error error;

    if (!sp_call_brings_adapter(call))
        return sp_call_body(call);
    if (sp_query_read(sp_exchange_query(call->exchange), "lora_name", &fields, &error) != SP_OK)
        sp_call_fail(call, error.status, &error);
    return fields;
}

void sp_handle_load(sp_call *call)
{
    json_t *fields = load_fields(call);
    bool brings = sp_call_brings_adapter(call);
    sp_adapter_wish wish;
    sp_error error;
    sp_status status;

    if (!fields)
        return;
    status = sp_adapter_wish_read(fields, SP_FIELDS_LOAD, brings,
                                  call->api->settings->opened_peers != NULL, &wish, &error);
    if (wish.name)
        call->model = sp_strdup(wish.name);
    if (status == SP_OK && (brings || wish.has_shared))
        status = sp_call_publish(call, &wish, fields, answer_load, &error);
    else if (status == SP_OK)
        status = start_load(call, &wish, &error);
    if (status == SP_ERR_UNSUPPORTED && !error.code[0])
        sp_call_refuse(call, 403, NULL, error.subject, "no-adapter-dir", "%s", error.text);
    else if (status != SP_OK)
        sp_call_fail(call, status, &error);
    json_decref(fields);
}

/* ---- unload and activate ------------------------------------------------------------------- */

static void answer_unload(sp_call *call)
{
    const sp_lora_task *task = (sp_lora_task *)(void *)call->task;

    if (!sp_task_is_done(call->task))
        return;
    if (task->task.status >= 0)
        answer_success(call, task->name, "removed");
    else if (task->task.status == SP_ERR_NOT_FOUND)
        sp_call_refuse(call, 404, "NotFoundError", "lora_name", "model_not_found",
                       "The lora adapter '%s' cannot be found.", task->name);
    else
        sp_call_fail(call, task->task.status, &task->task.error);
}

void sp_handle_unload(sp_call *call)
{
    json_t *body = sp_call_body(call);
    sp_adapter_wish wanted;
    sp_error error;
    sp_status status;

    if (!body)
        return;
    status = sp_adapter_wish_read(body, SP_FIELDS_NAME, false, false, &wanted, &error);
    if (status == SP_OK) {
        call->model = sp_strdup(wanted.name);
        sp_call_wait_lora(call, sp_lora_task_create(SP_TASK_UNLOAD, wanted.name, NULL),
                          answer_unload);
    } else {
        sp_call_fail(call, status, &error);
    }
    json_decref(body);
}

static void answer_active(sp_call *call)
{
    const sp_lora_task *task = (sp_lora_task *)(void *)call->task;
    sp_text body = {0};

    if (!sp_task_is_done(call->task))
        return;
    if (task->task.status != SP_OK) {
        sp_call_fail(call, task->task.status, &task->task.error);
        return;
    }
    sp_text_add(&body, "{\"active\": ");
    if (task->name)
        sp_text_json_string(&body, task->name, strlen(task->name));
    else
        sp_text_add(&body, "null");
    sp_text_add(&body, "}\n");
    sp_call_answer_json(call, &body);
}

/* {"lora_name": NAME}, or null or the base's name for the base. */
void sp_handle_active(sp_call *call)
{
    json_t *body = sp_call_body(call);
    const char *adapter, *wanted;
    sp_error error;

    if (!body)
        return;
    if (json_object_size(body) != 1 || !json_object_get(body, "lora_name")) {
        sp_call_refuse(call, 400, NULL, "lora_name", SP_CODE_INVALID_VALUE,
                       "the body must be {\"lora_name\": NAME}, or null for the base");
    } else if (sp_json_string(body, "lora_name", false, NULL, &wanted, &error) != SP_OK) {
        sp_call_fail(call, SP_ERR_INPUT, &error);
    } else {
        adapter = sp_api_model(call->api, wanted);
        if (adapter && strcmp(adapter, sp_engine_base_name(call->api->engine)) == 0)
            adapter = NULL;
        sp_call_wait_lora(call, sp_lora_task_create(SP_TASK_ACTIVATE, adapter, NULL),
                          answer_active);
    }
    json_decref(body);
}

/* ---- list ---------------------------------------------------------------------------------- */

static void add_adapter(sp_text *out, const sp_listed_adapter *info)
{
    char digest[2 * SP_DIGEST_BYTES + 1];

    sp_hex(info->digest.bytes, SP_DIGEST_BYTES, digest);
    sp_text_add(out, "{\"name\": ");
    sp_text_json_string(out, info->name, strlen(info->name));
    sp_text_format(out,
                   ", \"state\": \"%s\", \"digest\": \"%s\", \"generation\": %llu, \"slot\": %d, "
                   "\"pinned\": %s, \"active\": %s, \"held\": %s, \"references\": %d, \"rows\": "
                   "%llu, ",
                   sp_stage_version_state_name(info->state), digest,
                   (unsigned long long)info->generation, info->slot,
                   info->pinned ? "true" : "false", info->active ? "true" : "false",
                   info->held ? "true" : "false", info->references, (unsigned long long)info->rows);
    sp_text_format(out,
                   "\"rank\": %d, \"sites\": %d, \"file_bytes\": %zu, \"slot_bytes\": %zu, "
                   "\"host_bytes\": %zu, \"load_seconds\": ",
                   info->rank, info->sites, info->file_bytes, info->slot_bytes, info->host_bytes);
    sp_text_json_double(out, info->load_seconds);
    sp_text_add(out, ", \"receipt\": ");
    sp_text_add(out, info->receipt ? info->receipt : "null");
    sp_text_add(out, ", \"error\": null}");
}

static void add_refusal(sp_text *out, const sp_server_refusal *refusal)
{
    const char *code = refusal->error.code ? refusal->error.code : "";

    sp_text_add(out, "{\"name\": ");
    sp_text_json_string(out, refusal->name, strlen(refusal->name));
    sp_text_format(out, ", \"state\": \"failed\", \"error\": {\"code\": \"%s\", \"message\": ",
                   code[0] ? code : sp_status_name(refusal->error.status));
    sp_text_json_without_paths(out, refusal->error.text);
    sp_text_add(out, "}}");
}

typedef struct folder_list {
    const sp_call *call;
    const sp_snapshot *snapshot;
    sp_text *out;
    const char *separator;
} folder_list;

static void add_folder(void *user, const char *name)
{
    folder_list *list = user;

    if (sp_snapshot_find(list->snapshot, name) ||
        sp_stage_name_check(name, sp_engine_base_name(list->call->api->engine), NULL) != SP_OK)
        return;
    sp_text_add(list->out, list->separator);
    list->separator = ", ";
    sp_text_add(list->out, "{\"name\": ");
    sp_text_json_string(list->out, name, strlen(name));
    sp_text_format(list->out, ", \"state\": \"%s\", \"error\": null}",
                   sp_snapshot_is_hidden(list->snapshot, name) ? "unloaded" : "available");
}

static void add_of_peer(void *user, const char *name)
{
    const folder_list *list = user;

    if (!sp_lora_dir_has_listed(list->call->api->dir, name))
        add_folder(user, name);
}

static void answer_adapters(sp_call *call)
{
    const sp_lora_task *task = (sp_lora_task *)(void *)call->task;
    const sp_server_refusals *refusals = call->api->refusals;
    sp_text body = {0};
    folder_list folders = {call, &task->snapshot, &body, ""};

    if (!sp_task_is_done(call->task))
        return;
    if (task->task.status != SP_OK) {
        sp_call_fail(call, task->task.status, &task->task.error);
        return;
    }
    sp_text_add(&body, "{\"object\": \"list\", \"data\": [");
    for (size_t i = 0; i < task->snapshot.n_adapters; i++) {
        sp_text_add(&body, folders.separator);
        add_adapter(&body, &task->snapshot.adapters[i]);
        folders.separator = ", ";
    }
    for (size_t i = 0; i < refusals->n; i++) {
        if (sp_snapshot_find(&task->snapshot, refusals->items[i].name))
            continue; /* loaded since */
        sp_text_add(&body, folders.separator);
        add_refusal(&body, &refusals->items[i]);
        folders.separator = ", ";
    }
    sp_lora_dir_list(call->api->dir, add_folder, &folders);
    sp_peers_list(call->api->settings->opened_peers, add_of_peer, &folders);
    sp_text_add(&body, "]}\n");
    sp_call_answer_json(call, &body);
}

void sp_handle_adapters(sp_call *call)
{
    sp_lora_task *task = sp_lora_task_create_list(NULL);

    if (task)
        task->with_receipts = true;
    sp_call_wait_lora(call, task, answer_adapters);
}
