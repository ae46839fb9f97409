/*
 * route_holds.c: one adapter's requests: aborted, held, resumed; and its versions.
 */
#include "base/hash.h"
#include "server/api/api.h"

#include <string.h>

/* ---- requests ------------------------------------------------------------------------------ */

static void answer_hold(sp_call *call)
{
    const sp_lora_task *task = (sp_lora_task *)(void *)call->task;
    sp_text body = {0};

    if (!sp_task_is_done(call->task))
        return;
    if (task->task.status != SP_OK) {
        sp_call_fail(call, task->task.status, &task->task.error);
        return;
    }
    sp_text_add(&body, "{\"name\": ");
    sp_text_json_string(&body, task->name, strlen(task->name));
    if (task->task.kind != SP_TASK_ABORT)
        sp_text_format(&body, ", \"held\": %s", task->task.kind == SP_TASK_HOLD ? "true" : "false");
    sp_text_format(&body, ", \"requests\": %d}\n", task->n_requests);
    sp_call_answer_json(call, &body);
}

static void handle(sp_call *call, sp_task_kind kind)
{
    sp_exchange_drop_body(call->exchange); /* it says nothing */
    sp_call_wait_lora(call, sp_lora_task_create(kind, call->argument, NULL), answer_hold);
}

void sp_handle_abort(sp_call *call)
{
    handle(call, SP_TASK_ABORT);
}

void sp_handle_hold(sp_call *call)
{
    handle(call, SP_TASK_HOLD);
}

void sp_handle_resume(sp_call *call)
{
    handle(call, SP_TASK_RESUME);
}

/* ---- versions ------------------------------------------------------------------------------ */

static void add_version(sp_text *out, const sp_listed_adapter *info)
{
    char digest[2 * SP_DIGEST_BYTES + 1];

    sp_hex(info->digest.bytes, SP_DIGEST_BYTES, digest);
    sp_text_format(out,
                   "{\"generation\": %llu, \"digest\": \"%s\", \"current\": %s, "
                   "\"state\": \"%s\", \"held\": %s, \"requests\": %d, \"running\": %d}",
                   (unsigned long long)info->generation, digest,
                   info->state != SP_STAGE_VERSION_DRAINING ? "true" : "false",
                   sp_stage_version_state_name(info->state), info->held ? "true" : "false",
                   info->references, info->running);
}

static void answer_versions(sp_call *call)
{
    const sp_lora_task *task = (sp_lora_task *)(void *)call->task;
    sp_text body = {0};
    size_t n = 0;

    if (!sp_task_is_done(call->task))
        return;
    if (task->task.status != SP_OK) {
        sp_call_fail(call, task->task.status, &task->task.error);
        return;
    }
    sp_text_add(&body, "{\"object\": \"list\", \"data\": [");
    for (size_t i = 0; i < task->snapshot.n_adapters; i++) {
        if (strcmp(task->snapshot.adapters[i].name, call->argument) != 0)
            continue;
        sp_text_add(&body, n++ > 0 ? ", " : "");
        add_version(&body, &task->snapshot.adapters[i]);
    }
    sp_text_add(&body, "]}\n");
    if (n > 0) {
        sp_call_answer_json(call, &body);
        return;
    }
    sp_text_free(&body);
    sp_call_refuse(call, 404, NULL, NULL, "model_not_found",
                   "no adapter is loaded under the name \"%s\"", call->argument);
}

void sp_handle_versions(sp_call *call)
{
    sp_call_wait_lora(call, sp_lora_task_create(SP_TASK_LIST, NULL, NULL), answer_versions);
}
