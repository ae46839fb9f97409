/*
 * route_score.c: POST /v1/score: the logprobs of tokens that are given, many sequences at a time,
 * each with the bits that sampling it would have given. A number is written so that it reads back
 * as the same float, or as base64 of its bytes.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "server/api/reply.h"
#include "server/api/score_request.h"

#include <string.h>
#include <time.h>

typedef struct scores {
    sp_text logprobs, processed; /* floats, in the order of the tokens */
    sp_text routed;              /* 16-bit ids of experts: [tokens, layers, experts of a token] */
} scores;

typedef struct score {
    sp_reply reply; /* first */
    sp_score_request request;
    scores *scores; /* [n_sequences] */
} score;

static score *score_of(sp_reply *reply)
{
    return (score *)(void *)reply;
}

/* ---- the answer ---------------------------------------------------------------------------- */

static void produced_token(sp_reply *reply, const sp_produced *produced)
{
    const score *made = score_of(reply);
    scores *to = &made->scores[produced->choice];

    sp_text_add_bytes(&to->routed, (const char *)sp_produced_routed(produced),
                      produced->routed_bytes);
    if (!produced->is_prompt)
        return;
    sp_text_add_bytes(&to->logprobs, (const char *)&produced->logprob, sizeof(float));
    if (made->request.fields.request.processed_logprobs)
        sp_text_add_bytes(&to->processed, (const char *)&produced->processed_logprob,
                          sizeof(float));
}

/* Three bytes are four characters. */
static void add_base64(sp_text *out, const char *data, size_t bytes)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

    for (size_t at = 0; at < bytes; at += 3) {
        size_t n = bytes - at < 3 ? bytes - at : 3;
        uint32_t word = 0;
        char four[4];

        for (size_t i = 0; i < 3; i++)
            word = word << 8 | (i < n ? (unsigned char)data[at + i] : 0u);
        for (size_t i = 0; i < 4; i++)
            four[i] = digits[word >> (18 - 6 * i) & 63u];
        for (size_t i = n + 1; i < 4; i++)
            four[i] = '=';
        sp_text_add_bytes(out, four, sizeof four);
    }
}

static void add_numbers(const score *made, const char *field, const sp_text *floats)
{
    sp_text *out = (sp_text *)(uintptr_t)&made->reply.out;

    out->failed |= floats->failed;
    sp_text_format(out, ", \"%s\": ", field);
    if (made->request.base64) {
        sp_text_add(out, "\"");
        add_base64(out, floats->data, floats->bytes);
        sp_text_add(out, "\"");
        return;
    }
    sp_text_add(out, "[");
    for (size_t at = 0; at < floats->bytes; at += sizeof(float)) {
        float number;

        memcpy(&number, floats->data + at, sizeof number);
        sp_text_add(out, at ? ", " : "");
        sp_text_json_double(out, (double)number);
    }
    sp_text_add(out, "]");
}

/* With the dimensions of what has none itself. */
static void add_routing(const score *made, const sp_text *routed)
{
    sp_text *out = (sp_text *)(uintptr_t)&made->reply.out;
    int32_t layers, per_token;

    out->failed |= routed->failed;
    if (!made->request.base64) {
        sp_reply_add_routing(&made->reply, out, routed->data, routed->bytes);
        return;
    }
    sp_engine_routing(made->reply.call->api->engine, &layers, &per_token);
    sp_text_add(out, ", \"routed_experts\": \"");
    add_base64(out, routed->data, routed->bytes);
    sp_text_format(out, "\", \"routed_experts_shape\": [%zu, %d, %d]",
                   routed->bytes / sizeof(uint16_t) / (size_t)(layers * per_token), layers,
                   per_token);
}

static void write_answer(sp_reply *reply)
{
    const score *made = score_of(reply);
    const char *model = sp_reply_model(reply);
    sp_text *out = &reply->out;

    sp_text_format(out,
                   "{\"id\": \"score-%s\", \"object\": \"score\", \"created\": %lld, \"model\": ",
                   reply->call->id, (long long)time(NULL));
    sp_text_json_string(out, model, strlen(model));
    sp_reply_add_version(reply, out);
    sp_text_add(out, ", \"data\": [");
    for (int32_t i = 0; i < made->request.n_sequences; i++) {
        sp_text_format(out, "%s{\"index\": %d, \"from\": %d", i ? ", " : "", i,
                       made->request.sequences[i].from);
        add_numbers(made, "logprobs", &made->scores[i].logprobs);
        if (made->request.fields.request.processed_logprobs)
            add_numbers(made, "processed_logprobs", &made->scores[i].processed);
        if (made->request.fields.request.routed_experts)
            add_routing(made, &made->scores[i].routed);
        sp_text_add(out, "}");
    }
    sp_text_format(out, "], \"usage\": {\"prompt_tokens\": %lld, \"total_tokens\": %lld}}\n",
                   (long long)reply->prompt_tokens, (long long)reply->prompt_tokens);
}

static size_t kept_bytes(const sp_reply *reply)
{
    const score *made = (const score *)(const void *)reply;
    size_t bytes = 0;

    for (int32_t i = 0; made->scores && i < made->request.n_sequences; i++)
        bytes += made->scores[i].logprobs.capacity + made->scores[i].processed.capacity +
                 made->scores[i].routed.capacity;
    return bytes;
}

static void destroy(sp_reply *reply)
{
    score *made = score_of(reply);

    for (int32_t i = 0; made->scores && i < made->request.n_sequences; i++) {
        sp_text_free(&made->scores[i].logprobs);
        sp_text_free(&made->scores[i].processed);
        sp_text_free(&made->scores[i].routed);
    }
    sp_free(made->scores);
    sp_score_request_free(&made->request);
    sp_reply_free_parts(reply);
    sp_free(made);
}

/* ---- the request --------------------------------------------------------------------------- */

static void fill_choices(const score *made, sp_generation *generation)
{
    for (int32_t i = 0; i < generation->n_choices; i++) {
        const sp_scored *sequence = &made->request.sequences[i];
        sp_request *request = &generation->choices[i].request;

        *request = made->request.fields.request;
        request->tokens = sequence->tokens;
        request->n_tokens = sequence->n_tokens;
        request->max_tokens = 0;
        request->logprobs = false;
        request->prompt_logprobs = true;
        request->scored_from = sequence->from;
    }
}

/* Ids mean the same to every adapter. */
static sp_status make(sp_reply *reply, sp_lora_chat *lora, sp_generation **out_generation,
                      sp_error *error)
{
    score *made = score_of(reply);
    size_t n = (size_t)made->request.n_sequences;
    sp_generation *generation;

    if (!made->scores)
        made->scores = sp_calloc(n, sizeof *made->scores);
    generation =
        made->scores
            ? sp_generation_create(made->request.n_sequences,
                                   sp_api_model(reply->call->api, made->request.fields.model))
            : NULL;
    if (!generation)
        return sp_fail_memory(error, n * sizeof *made->scores, "a generation");
    fill_choices(made, generation);
    generation->chat = sp_lora_chat_retain(lora);
    *out_generation = generation;
    return SP_OK;
}

static const sp_reply_form form = {
    .object = "score",
    .stream_object = "score",
    .id_prefix = "score-",
    .make = make,
    .produced = produced_token,
    .whole = write_answer,
    .kept_bytes = kept_bytes,
    .destroy = destroy,
};

static void start(score *made, sp_call *call)
{
    const sp_body_fields *fields = &made->request.fields;

    if (fields->model)
        call->model = sp_strdup(fields->model);
    made->reply.form = &form;
    made->reply.model = fields->model;
    made->reply.wanted_version = fields->version;
    made->reply.choices_per_prompt = 1;
    for (int32_t i = 0; i < made->request.n_sequences; i++)
        made->reply.prompt_tokens += made->request.sequences[i].n_tokens;
    sp_reply_start(&made->reply, call, false);
}

void sp_handle_score(sp_call *call)
{
    json_t *body = sp_call_body(call);
    score *made;
    sp_error error;
    sp_status status;

    if (!body)
        return;
    made = sp_calloc(1, sizeof *made);
    status = made ? sp_score_request_read(body, &call->api->sampling, &made->request, &error)
                  : sp_fail_memory(&error, sizeof *made, "a request");
    json_decref(body);
    if (status == SP_OK) {
        start(made, call);
        return;
    }
    sp_free(made);
    sp_call_fail(call, status, &error);
}
