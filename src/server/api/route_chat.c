/*
 * route_chat.c: POST /v1/chat/completions. The chat room makes a prompt of the messages, by the
 * template of the adapter that is meant or by the base's; the rest of the way is that of
 * completions, with an answer of its own (chat_answer.c).
 */
#include "base/alloc.h"
#include "base/error.h"
#include "server/api/chat_answer.h"

#include <time.h>

static sp_status make_prompt(sp_chat_answer *answer, const sp_chat *chat, const sp_engine *engine,
                             sp_error *error)
{
    sp_status status;

    answer->request.chat.unix_seconds = (int64_t)time(NULL);
    answer->request.chat.one_call = answer->request.fields.one_call;
    status = sp_chat_render(chat, &answer->request.chat, &answer->prompt, error);
    if (status == SP_OK)
        status = sp_chat_tokenize(engine, &answer->prompt, sp_engine_max_context(engine),
                                  &answer->tokens, &answer->n_tokens, error);
    sp_text_free(&answer->prompt.text);
    return status;
}

/* Without max_tokens: as many as fit into the context. */
static int32_t tokens_wanted(const sp_chat_answer *answer, const sp_engine *engine)
{
    int64_t room = (int64_t)sp_engine_max_context(engine) - answer->n_tokens;

    if (answer->request.fields.request.max_tokens >= 0)
        return answer->request.fields.request.max_tokens;
    return room > 1 ? (int32_t)room : 1;
}

/* The model ends an answer with what its template writes there. */
static sp_status set_ends(sp_chat_answer *answer, const sp_chat *chat, const sp_lora_chat *lora,
                          sp_error *error)
{
    int32_t n;
    const int32_t *ends = sp_chat_turn_ends(chat, &n);

    return sp_body_fields_set_ends(&answer->request.fields, lora, ends, n, error);
}

static sp_generation *create_generation(const sp_chat_answer *answer, const sp_api *api)
{
    const sp_body_fields *fields = &answer->request.fields;
    sp_generation *generation = sp_generation_create(fields->n, sp_api_model(api, fields->model));

    for (int32_t i = 0; generation && i < fields->n; i++) {
        sp_request *request = &generation->choices[i].request;

        *request = fields->request;
        request->max_tokens = tokens_wanted(answer, api->engine);
        request->seed = fields->request.seed + (uint64_t)i;
        request->tokens = answer->tokens;
        request->n_tokens = answer->n_tokens;
    }
    return generation;
}

/* A call that is forced is one form of an output, what the body says of it another; with one that
 * may come or not the latter is what counts. */
static sp_status want(sp_chat_answer *answer, sp_wanted_output *out_wanted, sp_error *error)
{
    const sp_output_form *output = &answer->request.fields.output;
    sp_text *forced = &answer->prompt.forced;

    if (!forced->data || (answer->prompt.may_call && output->field))
        return sp_output_form_want(output, answer->prompt.thought, out_wanted, error);
    if (output->field)
        return sp_fail(error, SP_ERR_INPUT, NULL, "tool_choice", -1,
                       "\"tool_choice\" forces a call: it and \"%s\" exclude each other",
                       output->field);
    *out_wanted = (sp_wanted_output){
        .field = answer->prompt.may_call ? "tools" : "tool_choice",
        .kind = SP_CONSTRAINT_CALLS,
        .thought = answer->prompt.thought,
        .text = forced->data,
        .bytes = forced->bytes,
    };
    *forced = (sp_text){0};
    return SP_OK;
}

sp_status sp_chat_answer_make(sp_reply *reply, sp_lora_chat *lora, sp_generation **out_generation,
                              sp_error *error)
{
    sp_chat_answer *answer = (sp_chat_answer *)(void *)reply;
    const sp_api *api = reply->call->api;
    const sp_chat *chat;
    sp_status status = sp_api_chat(api, lora, &chat, error);

    sp_chat_answer_clear(answer);
    if (status == SP_OK)
        status = make_prompt(answer, chat, api->engine, error);
    if (status == SP_OK)
        status = set_ends(answer, chat, lora, error);
    if (status == SP_OK)
        status = sp_chat_answer_add_choices(answer, error);
    if (status != SP_OK)
        return status;
    reply->prompt_tokens = answer->n_tokens;
    *out_generation = create_generation(answer, api);
    if (!*out_generation)
        return sp_fail_memory(error, sizeof **out_generation, "a generation");
    (*out_generation)->chat = sp_lora_chat_retain(lora);
    status = want(answer, &(*out_generation)->wanted, error);
    if (status != SP_OK)
        sp_task_release(&(*out_generation)->task);
    return status;
}

static void start(sp_chat_answer *answer, sp_call *call)
{
    const sp_body_fields *fields = &answer->request.fields;

    answer->reply.model = fields->model;
    answer->reply.wanted_version = fields->version;
    answer->reply.stream = fields->stream;
    answer->reply.include_usage = fields->include_usage;
    answer->reply.usage_each = fields->usage_each;
    answer->reply.choices_per_prompt = fields->n;
    sp_reply_start(&answer->reply, call, true);
}

static void read_and_start(sp_call *call, json_t *body)
{
    sp_chat_answer *answer = sp_calloc(1, sizeof *answer);
    sp_error error;
    sp_status status;

    if (!answer) {
        sp_fail_memory(&error, sizeof *answer, "a request");
        sp_call_fail(call, SP_ERR_MEMORY, &error);
        return;
    }
    answer->reply.form = &sp_chat_answer_form;
    status = sp_chat_completion_request_read(body, &call->api->sampling, &answer->request, &error);
    if (status != SP_OK) {
        sp_free(answer);
        sp_call_fail(call, status, &error);
        return;
    }
    if (answer->request.fields.model)
        call->model = sp_strdup(answer->request.fields.model);
    start(answer, call);
}

void sp_handle_chat(sp_call *call)
{
    json_t *body = sp_call_body(call);

    if (!body)
        return;
    read_and_start(call, body);
    json_decref(body);
}
