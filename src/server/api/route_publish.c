#include "server/api/route_publish.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/hash.h"
#include "server/api/query.h"
#include "server/driver/publish_body.h"

#include <stdio.h>
#include <string.h>

#define FILE_TYPE "application/octet-stream"

static const sp_http_refusal too_large = {
    413, "body-too-large", "the adapter is larger than the server takes (--adapter-bytes-max)"};
static const sp_http_refusal no_budget = {
    413, "body-too-large",
    "the adapter is larger than what clients may fill (6/8 of --client-bytes-max)"};

/* ---- the body ------------------------------------------------------------------------------ */

static const char *type_of(const sp_call *call)
{
    return sp_exchange_header(call->exchange, "Content-Type");
}

bool sp_call_brings_adapter(const sp_call *call)
{
    if (call->route->handle == sp_handle_publish)
        return sp_publish_body_takes(type_of(call));
    return call->route->handle == sp_handle_load && sp_publish_body_is_file(type_of(call));
}

void sp_call_allow_adapter(sp_call *call)
{
    const sp_server_settings *settings = call->api->settings;
    size_t share = (size_t)settings->client_bytes / 8 * 6;

    if (!sp_call_brings_adapter(call))
        return;
    if ((size_t)settings->adapter_bytes < share)
        sp_exchange_allow_body(call->exchange, (size_t)settings->adapter_bytes, &too_large);
    else
        sp_exchange_allow_body(call->exchange, share - 1, &no_budget);
}

/* ---- loading ------------------------------------------------------------------------------- */

/* By a loopback address or a Unix socket. */
static bool is_same_host(const sp_call *call)
{
    const char *client = sp_exchange_client(call->exchange);

    return strncmp(client, "127.", 4) == 0 || strcmp(client, "::1") == 0 ||
           strncmp(client, "::ffff:127.", 11) == 0 || strcmp(client, "unix") == 0;
}

static sp_status take_shared(const sp_call *call, const json_t *fields, sp_published *published,
                             sp_error *error)
{
    if (!is_same_host(call))
        return sp_fail(error, SP_ERR_UNSUPPORTED, SP_CODE_SHARED_ELSEWHERE, "shm", -1,
                       "shared memory can only be named by clients of the server's own host");
    published->bytes_max = (size_t)call->api->settings->adapter_bytes;
    return sp_adapter_wish_read_shared(fields, published, error);
}

sp_status sp_call_publish(sp_call *call, const sp_adapter_wish *wish, const json_t *fields,
                          void (*resume)(sp_call *call), sp_error *error)
{
    bool brings = sp_call_brings_adapter(call);
    sp_lora_task *task;
    sp_status status =
        sp_stage_name_check(wish->name, sp_engine_base_name(call->api->engine), error);

    if (status != SP_OK) /* its subject is the name itself */
        snprintf(error->subject, sizeof error->subject, "lora_name");
    if (status != SP_OK)
        return status;
    task = sp_adapter_wish_task(wish, NULL);
    if (task)
        task->published =
            sp_published_create(brings ? type_of(call) : FILE_TYPE, &call->api->budget);
    if (!task || !task->published)
        status = sp_fail_memory(error, sizeof *task, "a task");
    if (status == SP_OK && brings)
        sp_exchange_take_body(call->exchange, &task->published->body, &task->published->held);
    else if (status == SP_OK)
        status = take_shared(call, fields, task->published, error);
    if (status != SP_OK) {
        sp_task_release(task ? &task->task : NULL);
        return status;
    }
    sp_call_wait_published(call, task, resume);
    return SP_OK;
}

/* ---- PUT ----------------------------------------------------------------------------------- */

void sp_call_add_version(sp_call *call, const sp_lora_task *task)
{
    char digest[2 * SP_DIGEST_BYTES + 1], generation[32];

    if (task->generation == 0)
        return;
    sp_hex(task->digest.bytes, SP_DIGEST_BYTES, digest);
    snprintf(generation, sizeof generation, "%llu", (unsigned long long)task->generation);
    sp_exchange_add_header(call->exchange, "X-Adapter-Digest", digest);
    sp_exchange_add_header(call->exchange, "X-Adapter-Generation", generation);
}

static void answer_publish(sp_call *call)
{
    const sp_lora_task *task = (sp_lora_task *)(void *)call->task;
    char digest[2 * SP_DIGEST_BYTES + 1];
    sp_text body = {0};

    if (!sp_task_is_done(call->task))
        return;
    if (task->task.status != SP_OK) {
        sp_call_fail(call, task->task.status, &task->task.error);
        return;
    }
    sp_call_add_version(call, task);
    sp_hex(task->digest.bytes, SP_DIGEST_BYTES, digest);
    sp_text_add(&body, "{\"name\": ");
    sp_text_json_string(&body, task->name, strlen(task->name));
    sp_text_format(&body, ", \"digest\": \"%s\", \"generation\": %llu, \"receipt\": ", digest,
                   (unsigned long long)task->generation);
    sp_text_add(&body, task->published->receipt ? task->published->receipt : "null");
    sp_text_add(&body, "}\n");
    sp_call_answer_json(call, &body);
}

/* NULL: the call is answered. */
static json_t *read_fields(sp_call *call)
{
    json_t *fields = NULL;
    sp_error error;
    sp_status status;

    if (!sp_call_brings_adapter(call))
        return sp_call_body(call);
    status = sp_query_read(sp_exchange_query(call->exchange), "", &fields, &error);
    if (status != SP_OK)
        sp_call_fail(call, status, &error);
    return fields;
}

void sp_handle_publish(sp_call *call)
{
    json_t *fields = read_fields(call);
    sp_adapter_wish wish;
    sp_error error;
    sp_status status;

    if (!fields)
        return;
    call->model = sp_strdup(call->argument);
    status = sp_adapter_wish_read(fields, SP_FIELDS_PUBLISH, true, false, &wish, &error);
    wish.name = call->argument;
    wish.replace = true;
    if (status == SP_OK)
        status = sp_call_publish(call, &wish, fields, answer_publish, &error);
    if (status != SP_OK)
        sp_call_fail(call, status, &error);
    json_decref(fields);
}
