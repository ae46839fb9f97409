#include "server/api/reply.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/hash.h"

#include <string.h>
#include <time.h>

#define NS_PER_S  1000000000u
#define NS_PER_MS 1000000u

static void resume(sp_call *call);

static sp_reply *reply_of(sp_call *call)
{
    return call->state;
}

const char *sp_finish_json(sp_finish finish)
{
    switch (finish) {
    case SP_FINISH_STOP:
        return "\"stop\"";
    case SP_FINISH_LENGTH:
        return "\"length\"";
    case SP_FINISH_ABORT:
        return "\"abort\"";
    case SP_FINISH_FAILED: /* an error is answered instead */
    case SP_FINISH_NONE:
        break;
    }
    return "null";
}

/* ---- what all objects of an answer share ---------------------------------------------------- */

static bool is_zero(const sp_digest *digest)
{
    static const sp_digest zero;

    return memcmp(digest, &zero, sizeof zero) == 0;
}

const char *sp_reply_model(const sp_reply *reply)
{
    if (reply->model)
        return reply->model;
    return reply->generation->served ? reply->generation->served
                                     : sp_engine_base_name(reply->call->api->engine);
}

void sp_reply_add_version(const sp_reply *reply, sp_text *out)
{
    const sp_generation *generation = reply->generation;
    char digest[2 * SP_DIGEST_BYTES + 1];

    sp_hex(generation->digest.bytes, SP_DIGEST_BYTES, digest);
    if (is_zero(&generation->digest))
        sp_text_add(out, ", \"adapter_digest\": null, \"adapter_generation\": null");
    else
        sp_text_format(out, ", \"adapter_digest\": \"%s\", \"adapter_generation\": %llu", digest,
                       (unsigned long long)generation->version);
}

static void write_head(sp_reply *reply)
{
    const char *model = sp_reply_model(reply);

    if (reply->head.bytes > 0 || reply->form->whole)
        return;
    sp_text_format(&reply->head,
                   "{\"id\": \"%s%s\", \"object\": \"%s\", \"created\": %lld, "
                   "\"model\": ",
                   reply->form->id_prefix, reply->call->id,
                   reply->stream ? reply->form->stream_object : reply->form->object,
                   (long long)time(NULL));
    sp_text_json_string(&reply->head, model, strlen(model));
    sp_reply_add_version(reply, &reply->head);
    sp_text_add(&reply->head, ", \"choices\": [");
}

/* Under OpenAI's names for tokens that were predicted, and the steps that verified them. */
static void add_drafts(const sp_reply *reply, sp_text *out)
{
    sp_text_format(out,
                   ", \"completion_tokens_details\": {\"accepted_prediction_tokens\": %lld, "
                   "\"rejected_prediction_tokens\": %lld, \"verify_steps\": %lld}",
                   (long long)reply->accepted_tokens,
                   (long long)(reply->drafted_tokens - reply->accepted_tokens),
                   (long long)reply->verify_steps);
}

static void add_usage(sp_reply *reply, sp_text *out)
{
    sp_text_format(out,
                   "\"usage\": {\"prompt_tokens\": %lld, \"completion_tokens\": %lld, "
                   "\"total_tokens\": %lld, \"prompt_tokens_details\": {\"cached_tokens\": %lld}",
                   (long long)reply->prompt_tokens, (long long)reply->generated_tokens,
                   (long long)(reply->prompt_tokens + reply->generated_tokens),
                   (long long)reply->cached_tokens);
    if (reply->verify_steps > 0)
        add_drafts(reply, out);
    sp_text_add(out, "}");
}

void sp_reply_event_begin(sp_reply *reply)
{
    sp_text_add(&reply->out, "data: ");
    sp_text_add_bytes(&reply->out, reply->head.data, reply->head.bytes);
}

void sp_reply_add_ids(sp_text *out, const char *field, const int32_t *tokens, int32_t n)
{
    sp_text_format(out, ", \"%s\": [", field);
    for (int32_t i = 0; i < n; i++)
        sp_text_format(out, "%s%d", i ? ", " : "", tokens[i]);
    sp_text_add(out, "]");
}

static void add_id(sp_text *out, uint16_t id)
{
    char digits[5];
    size_t at = sizeof digits;

    do {
        digits[--at] = (char)('0' + id % 10);
        id /= 10;
    } while (id > 0);
    sp_text_add_bytes(out, digits + at, sizeof digits - at);
}

void sp_reply_add_routing(const sp_reply *reply, sp_text *out, const void *routed, size_t bytes)
{
    const char *from = routed;
    int32_t layers, per_token;

    sp_text_add(out, ", \"routed_experts\": ");
    sp_engine_routing(reply->call->api->engine, &layers, &per_token);
    if (bytes == 0) {
        sp_text_add(out, "null");
        return;
    }
    for (size_t i = 0; i < bytes / sizeof(uint16_t); i++) {
        size_t place = i % (size_t)per_token, token = i % (size_t)(layers * per_token);
        uint16_t id;

        memcpy(&id, from + i * sizeof id, sizeof id);
        if (token == 0)
            sp_text_add(out, i == 0 ? "[[[" : "]], [[");
        else
            sp_text_add(out, place == 0 ? "], [" : ", ");
        add_id(out, id);
    }
    sp_text_add(out, "]]]");
}

/* Adds the members after the list of choices. */
static void add_members(sp_reply *reply)
{
    sp_text_add(&reply->out, "]");
    if (reply->form->add_members && !reply->has_members)
        reply->form->add_members(reply);
    reply->has_members = true;
}

void sp_reply_event_end(sp_reply *reply)
{
    add_members(reply);
    if (reply->usage_each) {
        sp_text_add(&reply->out, ", ");
        add_usage(reply, &reply->out);
    } else if (reply->include_usage) {
        sp_text_add(&reply->out, ", \"usage\": null");
    }
    sp_text_add(&reply->out, "}\n\n");
}

/* ---- out of the outbox ---------------------------------------------------------------------- */

static void hold(sp_reply *reply)
{
    size_t bytes = reply->head.capacity + reply->taken.capacity + reply->out.capacity +
                   reply->form->kept_bytes(reply);

    reply->no_room |= !sp_budget_hold(reply->budget, SP_BUDGET_ANSWERS, &reply->held, bytes);
}

/* Who serves it is known as soon as there is a token. */
static void begin_answer(sp_reply *reply)
{
    write_head(reply);
    if (reply->stream && !reply->begun && reply->form->begin)
        reply->form->begin(reply);
    reply->begun = true;
}

/* Returns whether that was the last of it. */
static bool take(sp_reply *reply)
{
    bool done = sp_generation_take(reply->generation, &reply->taken);
    const sp_produced *produced;
    size_t cursor = 0;

    if (reply->taken.bytes > 0)
        begin_answer(reply);
    while ((produced = sp_produced_next(&reply->taken, &cursor)) != NULL) {
        reply->generated_tokens += produced->token >= 0 && !produced->is_prompt;
        if (produced->choice % reply->choices_per_prompt == 0)
            reply->cached_tokens += produced->cached_tokens;
        reply->drafted_tokens += produced->drafted_tokens;
        reply->accepted_tokens += produced->accepted_tokens;
        reply->verify_steps += produced->verify_steps;
        reply->form->produced(reply, produced);
    }
    reply->call->generated_tokens = reply->generated_tokens;
    hold(reply);
    return done;
}

static void no_room(sp_error *out_error)
{
    sp_fail(out_error, SP_ERR_MEMORY, SP_CODE_MEMORY_FULL, NULL, -1,
            "clients fill all memory that they may (--client-bytes-max); try again later");
}

static void add_error_event(sp_reply *reply, sp_status status, const sp_error *error)
{
    reply->call->code = error->code;
    if (reply->form->error_event)
        sp_text_format(&reply->out, "event: %s\n", reply->form->error_event);
    sp_text_add(&reply->out, "data: ");
    sp_error_json(reply->call, &reply->out, status, error);
    sp_text_add(&reply->out, "\n\n");
}

static void end_stream(sp_reply *reply)
{
    const sp_task *task = &reply->generation->task;

    reply->ended = true;
    if (task->status != SP_OK) {
        add_error_event(reply, task->status, &task->error);
        return;
    }
    begin_answer(reply);
    if (reply->form->end)
        reply->form->end(reply);
    if (reply->form->whole)
        return;
    if (reply->include_usage) {
        sp_text_add(&reply->out, "data: ");
        sp_text_add_bytes(&reply->out, reply->head.data, reply->head.bytes);
        sp_text_add(&reply->out, "], ");
        add_usage(reply, &reply->out);
        sp_text_add(&reply->out, "}\n\n");
    }
    sp_text_add(&reply->out, "data: [DONE]\n\n");
}

/* A comment from time to time tells proxies and clients that a stream lives. */
static void keep_alive(sp_reply *reply)
{
    uint64_t interval_ns = (uint64_t)reply->call->api->settings->keep_alive_s * NS_PER_S;
    uint64_t now_ns = sp_clock_ns();

    if (interval_ns == 0 || reply->ended)
        return;
    if (reply->out.bytes > 0) {
        reply->sent_ns = now_ns;
        return;
    }
    if (now_ns - reply->sent_ns >= interval_ns) {
        sp_text_add(&reply->out, ": waiting\n\n");
        reply->sent_ns = now_ns;
    } else {
        sp_exchange_wake_in(reply->call->exchange,
                            (int64_t)((reply->sent_ns + interval_ns - now_ns) / NS_PER_MS) + 1);
    }
}

/* ---- generations ---------------------------------------------------------------------------- */

static void release(void *state)
{
    sp_reply *reply = state;

    if (atomic_fetch_sub(&reply->references, 1) == 1)
        reply->form->destroy(reply);
}

/* Takes the generation in place of one before. */
static sp_status wait_for(sp_reply *reply, sp_generation *generation, sp_error *error)
{
    sp_call *call = reply->call;

    atomic_fetch_add(&reply->references, 1);
    reply->generation = generation;
    generation->owned = reply;
    generation->release_owned = release;
    generation->wake_each = reply->stream;
    generation->received_ns = call->began_ns;
    generation->wanted_version = reply->wanted_version;
    call->prompt_tokens = reply->prompt_tokens;
    call->generated_tokens = 0;
    if (sp_generation_hold(generation, reply->budget))
        return sp_call_wait_generation(call, generation, resume, error);
    sp_task_release(call->task);
    call->task = &generation->task; /* it ends with the call */
    no_room(error);
    return error->status;
}

/* Whether it was not begun, because its adapter says something else now, or has been loaded. */
static bool comes_back(const sp_reply *reply)
{
    const sp_task *task = &reply->generation->task;

    return task->status == SP_AGAIN && task->error.code &&
           strcmp(task->error.code, SP_CODE_MAKE_AGAIN) == 0;
}

static sp_status make_again(sp_reply *reply, sp_error *error)
{
    sp_generation *generation;
    sp_status status = reply->form->make(reply, reply->generation->chat, &generation, error);

    return status == SP_OK ? wait_for(reply, generation, error) : status;
}

/* ---- streams and whole answers -------------------------------------------------------------- */

static void end_with_error(sp_reply *reply, sp_status status, const sp_error *error)
{
    add_error_event(reply, status, error);
    reply->ended = true; /* the exchange's end takes it out of the batch */
}

static void take_last(sp_reply *reply)
{
    sp_error error;
    sp_status status;

    if (!comes_back(reply)) {
        end_stream(reply);
        return;
    }
    status = make_again(reply, &error);
    if (status != SP_OK)
        end_with_error(reply, status, &error);
}

static int64_t read_stream(void *user, sp_exchange *exchange, char *buffer, size_t bytes)
{
    sp_reply *reply = user;
    size_t left = reply->out.bytes - reply->out_sent;

    (void)exchange;
    if (left == 0 && !reply->ended) {
        sp_text_clear(&reply->out);
        reply->out_sent = 0;
        if (take(reply)) {
            take_last(reply);
        } else if (reply->no_room) {
            sp_error error;

            no_room(&error);
            end_with_error(reply, SP_ERR_MEMORY, &error);
        }
        keep_alive(reply);
        left = reply->out.bytes;
    }
    if (reply->out.failed || reply->head.failed || reply->taken.failed)
        return SP_HTTP_ABORT;
    if (left == 0)
        return reply->ended ? SP_HTTP_END : SP_HTTP_WAIT;
    left = left < bytes ? left : bytes;
    memcpy(buffer, reply->out.data + reply->out_sent, left);
    reply->out_sent += left;
    return (int64_t)left;
}

static void start_stream(sp_reply *reply)
{
    reply->sent_ns = sp_clock_ns();
    sp_exchange_add_header(reply->call->exchange, "Cache-Control", "no-cache");
    sp_exchange_stream(reply->call->exchange, "text/event-stream; charset=utf-8", read_stream,
                       reply);
}

static void answer_whole(sp_reply *reply)
{
    sp_text body = {0};

    if (reply->form->whole) {
        reply->form->whole(reply);
        body = reply->out;
        reply->out = (sp_text){0};
        sp_call_answer_json(reply->call, &body);
        return;
    }
    write_head(reply);
    sp_text_add_bytes(&body, reply->head.data, reply->head.bytes);
    reply->out = body;
    reply->form->add_choices(reply);
    add_members(reply);
    sp_text_add(&reply->out, ", ");
    add_usage(reply, &reply->out);
    sp_text_add(&reply->out, "}\n");
    body = reply->out;
    reply->out = (sp_text){0};
    body.failed |= reply->head.failed;
    sp_call_answer_json(reply->call, &body);
}

/* The exchange's end takes it out of the batch. */
static void fail_without_room(sp_call *call)
{
    sp_error error;

    no_room(&error);
    sp_call_fail(call, SP_ERR_MEMORY, &error);
}

static void resume_again(sp_call *call)
{
    sp_error error;
    sp_status status = make_again(reply_of(call), &error);

    if (status != SP_OK)
        sp_call_fail(call, status, &error);
}

/* There is news: the end, a failure, or the first tokens of a stream, or that it waits for long. */
static void resume(sp_call *call)
{
    sp_reply *reply = reply_of(call);
    sp_task *task = call->task;
    bool done = sp_task_is_done(task);

    if (done && comes_back(reply))
        resume_again(call);
    else if (done && task->status != SP_OK && reply->generated_tokens == 0)
        sp_call_fail(call, task->status, &task->error);
    else if (reply->stream)
        start_stream(reply);
    else if (!take(reply) && !reply->no_room)
        return;
    else if (reply->no_room)
        fail_without_room(call);
    else if (task->status != SP_OK)
        sp_call_fail(call, task->status, &task->error);
    else
        answer_whole(reply);
}

void sp_reply_free_parts(sp_reply *reply)
{
    sp_text_free(&reply->head);
    sp_text_free(&reply->taken);
    sp_text_free(&reply->out);
    if (reply->held > 0)
        sp_budget_hold(reply->budget, SP_BUDGET_ANSWERS, &reply->held, 0);
}

/* Nothing is made until the adapter is there. */
static sp_generation *create_question(const char *adapter)
{
    sp_generation *generation = sp_generation_create(1, adapter);

    if (generation) {
        sp_request_default(&generation->choices[0].request, sizeof generation->choices[0].request);
        generation->asks = true;
    }
    return generation;
}

static sp_status start(sp_reply *reply, bool asks, sp_error *error)
{
    const sp_api *api = reply->call->api;
    const char *adapter = sp_api_model(api, reply->model);
    sp_generation *generation = NULL;
    sp_lora_chat *lora;
    bool known = sp_lora_chats_find(api->chats, adapter, &lora);
    sp_status status = SP_OK;

    if (known || !asks)
        status = reply->form->make(reply, lora, &generation, error);
    else if ((generation = create_question(adapter)) == NULL)
        status = sp_fail_memory(error, sizeof *generation, "a generation");
    sp_lora_chat_release(lora);
    return status == SP_OK ? wait_for(reply, generation, error) : status;
}

void sp_reply_start(sp_reply *reply, sp_call *call, bool asks)
{
    sp_error error;
    sp_status status;

    reply->call = call;
    atomic_init(&reply->references, 1);
    call->state = reply;
    call->free_state = release;
    reply->budget = &call->api->budget;
    status = start(reply, asks, &error);
    if (status != SP_OK)
        sp_call_fail(call, status, &error);
    else if (reply->stream && call->api->settings->keep_alive_s > 0)
        sp_exchange_wake_in(call->exchange, call->api->settings->keep_alive_s * 1000);
}
