/*
 * route_completions.c: POST /v1/completions.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "server/api/completion_request.h"
#include "server/api/logprob_text.h"
#include "server/api/reply.h"

#include <string.h>

/* What is known of one choice and not sent. In a stream that is little: logprobs on their way. */
typedef struct choice_state {
    sp_text text, token_ids, routed; /* the last: 16-bit ids of experts */
    sp_logprob_lists logprobs;
    sp_finish finish;
    int64_t n_characters; /* of its text as far as it is known */
    double logprob_sum;   /* of its n_tokens new tokens, where best_of wants it */
    int32_t n_tokens;
    bool echoed;      /* the prompt's text, where it should be */
    bool has_first;   /* the logprobs begin with the prompt's first token, where they should */
    bool left_prompt; /* and go on with the new ones */
    bool has_prompt;  /* the prompt's ids were in an event */
    bool is_taken;    /* it is in the answer: one of the best */
} choice_state;

typedef struct completion {
    sp_reply reply; /* first */
    sp_completion_request request;
    choice_state *choices; /* [n_choices] */
    int32_t n_choices;
} completion;

static completion *completion_of(sp_reply *reply)
{
    return (completion *)(void *)reply;
}

static const sp_prompt *prompt_of(const completion *made, int32_t choice)
{
    return &made->request.prompts[choice / made->request.best_of];
}

/* ---- the answer ---------------------------------------------------------------------------- */

/* The prompt itself, for "echo". */
static void add_prompt_text(completion *made, int32_t choice, sp_text *out)
{
    const sp_prompt *prompt = prompt_of(made, choice);
    char *text;
    size_t bytes;

    if (prompt->text) {
        sp_text_add_bytes(out, prompt->text, prompt->text_bytes);
        return;
    }
    if (sp_engine_decode(made->reply.call->api->engine, prompt->tokens, prompt->n_tokens, false,
                         &text, &bytes, NULL) != SP_OK)
        return;
    sp_text_add_bytes(out, text, bytes);
    sp_engine_free(text);
}

/* Logprobs wait for the text that they belong to: of text that is held back it is not known yet
 * whether it becomes part of the answer. */
static void add_choice(completion *made, int32_t choice, int32_t index, const char *text,
                       size_t bytes, sp_finish finish)
{
    sp_text *out = &made->reply.out;
    choice_state *state = &made->choices[choice];

    sp_text_format(out, "{\"index\": %d, \"text\": ", index);
    sp_text_json_string(out, text ? text : "", bytes);
    sp_text_add(out, ", \"logprobs\": ");
    if (bytes > 0 || finish != SP_FINISH_NONE)
        sp_logprob_lists_write(&state->logprobs, state->n_characters, out);
    else
        sp_text_add(out, "null");
    sp_text_format(out, ", \"finish_reason\": %s", sp_finish_json(finish));
}

/* Once in a stream: in the choice's first event. */
static void add_prompt_ids(completion *made, int32_t choice)
{
    const sp_prompt *prompt = prompt_of(made, choice);

    if (!made->choices[choice].has_prompt && made->request.fields.return_token_ids)
        sp_reply_add_ids(&made->reply.out, "prompt_token_ids", prompt->tokens, prompt->n_tokens);
    made->choices[choice].has_prompt = true;
}

/* The prompt of one choice, once, before the first of its new tokens. */
static void echo(completion *made, int32_t index)
{
    choice_state *choice = &made->choices[index];

    if (choice->echoed || !made->request.fields.echo)
        return;
    choice->echoed = true;
    add_prompt_text(made, index, &choice->text);
    choice->n_characters = sp_count_characters(choice->text.data, choice->text.bytes);
    if (!made->reply.stream)
        return;
    sp_reply_event_begin(&made->reply);
    add_choice(made, index, index, choice->text.data, choice->text.bytes, SP_FINISH_NONE);
    add_prompt_ids(made, index);
    sp_text_add(&made->reply.out, "}");
    sp_reply_event_end(&made->reply);
    sp_text_free(&choice->text);
}

/* Whether a prompt's first token is one that the post-processor put before its text. */
static bool begins_unseen(const sp_engine *engine, const sp_prompt *prompt)
{
    size_t bytes;
    const char *text = sp_engine_token_bytes(engine, prompt->tokens[0], &bytes);

    return prompt->text && sp_engine_token_is_special(engine, prompt->tokens[0]) &&
           (bytes > prompt->text_bytes || memcmp(prompt->text, text, bytes) != 0);
}

static void add_logprobs(completion *made, const sp_produced *produced)
{
    choice_state *choice = &made->choices[produced->choice];
    const sp_engine *engine = made->reply.call->api->engine;
    bool hidden = !produced->is_prompt && !made->request.fields.request.keep_special &&
                  sp_engine_token_is_special(engine, produced->token);

    if (!made->request.fields.request.logprobs)
        return;
    choice->logprobs.with_processed = made->request.fields.request.processed_logprobs;
    /* A prompt's first token follows nothing, so the engine says nothing of it. */
    if (made->request.fields.echo && !choice->has_first) {
        const sp_produced first = {.token = prompt_of(made, produced->choice)->tokens[0]};

        sp_logprob_lists_add(&choice->logprobs, engine, &first, true,
                             begins_unseen(engine, prompt_of(made, produced->choice)));
        choice->has_first = true;
    }
    if (!produced->is_prompt && !choice->left_prompt) {
        choice->logprobs.offset = choice->n_characters;
        choice->left_prompt = true;
    }
    if (produced->token >= 0)
        sp_logprob_lists_add(&choice->logprobs, engine, produced, false, hidden);
}

static void stream_token(completion *made, const sp_produced *produced)
{
    sp_reply *reply = &made->reply;
    const sp_body_fields *fields = &made->request.fields;

    /* Text that is held back comes with a later token. */
    if (produced->text_bytes == 0 && produced->finish == SP_FINISH_NONE &&
        !fields->return_token_ids)
        return;
    sp_reply_event_begin(reply);
    add_choice(made, produced->choice, produced->choice, sp_produced_text(produced),
               produced->text_bytes, produced->finish);
    if (fields->return_token_ids)
        sp_reply_add_ids(&reply->out, "token_ids", &produced->token, produced->token >= 0);
    if (fields->request.routed_experts && produced->finish != SP_FINISH_NONE)
        sp_reply_add_routing(reply, &reply->out, sp_produced_routed(produced),
                             produced->routed_bytes);
    add_prompt_ids(made, produced->choice);
    sp_text_add(&reply->out, "}");
    sp_reply_event_end(reply);
}

static void produced_token(sp_reply *reply, const sp_produced *produced)
{
    completion *made = completion_of(reply);
    choice_state *choice = &made->choices[produced->choice];

    if (produced->is_prompt) {
        add_logprobs(made, produced);
        return;
    }
    echo(made, produced->choice);
    add_logprobs(made, produced);
    choice->n_characters += sp_count_characters(sp_produced_text(produced), produced->text_bytes);
    choice->logprob_sum += (double)produced->logprob;
    choice->n_tokens += produced->token >= 0;
    if (reply->stream) {
        stream_token(made, produced);
        return;
    }
    sp_text_add_bytes(&choice->text, sp_produced_text(produced), produced->text_bytes);
    if (made->request.fields.return_token_ids && produced->token >= 0)
        sp_text_format(&choice->token_ids, choice->token_ids.bytes ? ", %d" : "%d",
                       produced->token);
    sp_text_add_bytes(&choice->routed, (const char *)sp_produced_routed(produced),
                      produced->routed_bytes);
    choice->finish = produced->finish;
}

/* The best of the choices first .. first + n - 1 that is not in the answer yet: with the largest
 * mean logprob of its tokens, the lower of equal ones. */
static int32_t take_best(completion *made, int32_t first, int32_t n)
{
    int32_t best = -1;
    double best_mean = 0;

    for (int32_t i = first; i < first + n; i++) {
        const choice_state *choice = &made->choices[i];
        double mean = choice->logprob_sum / (choice->n_tokens > 0 ? choice->n_tokens : 1);

        if (choice->is_taken || (best >= 0 && !(mean > best_mean)))
            continue;
        best = i;
        best_mean = mean;
    }
    made->choices[best].is_taken = true;
    return best;
}

static void add_whole_choice(completion *made, int32_t at, int32_t index)
{
    choice_state *choice = &made->choices[at];
    const sp_prompt *prompt = prompt_of(made, at);
    sp_text *out = &made->reply.out;

    sp_text_add(out, index > 0 ? ", " : "");
    add_choice(made, at, index, choice->text.data, choice->text.bytes, choice->finish);
    if (made->request.fields.return_token_ids) {
        sp_text_format(out, ", \"token_ids\": [%s]",
                       choice->token_ids.data ? choice->token_ids.data : "");
        sp_reply_add_ids(out, "prompt_token_ids", prompt->tokens, prompt->n_tokens);
    }
    if (made->request.fields.request.routed_experts)
        sp_reply_add_routing(&made->reply, out, choice->routed.data, choice->routed.bytes);
    sp_text_add(out, "}");
    out->failed |= choice->text.failed || choice->token_ids.failed || choice->routed.failed;
}

static void add_choices(sp_reply *reply)
{
    completion *made = completion_of(reply);
    int32_t n = made->request.fields.n, best_of = made->request.best_of;

    for (int32_t prompt = 0; prompt < made->request.n_prompts; prompt++)
        for (int32_t i = 0; i < n; i++) {
            int32_t first = prompt * best_of;

            add_whole_choice(made, best_of > n ? take_best(made, first, best_of) : first + i,
                             prompt * n + i);
        }
}

static size_t kept_bytes(const sp_reply *reply)
{
    const completion *made = (const completion *)(const void *)reply;
    size_t bytes = 0;

    for (int32_t i = 0; i < made->n_choices; i++) {
        const choice_state *choice = &made->choices[i];

        bytes += choice->text.capacity + choice->token_ids.capacity + choice->routed.capacity +
                 sp_logprob_lists_bytes(&choice->logprobs);
    }
    return bytes;
}

static void destroy(sp_reply *reply)
{
    completion *made = completion_of(reply);

    for (int32_t i = 0; made->choices && i < made->n_choices; i++) {
        sp_text_free(&made->choices[i].text);
        sp_text_free(&made->choices[i].token_ids);
        sp_text_free(&made->choices[i].routed);
        sp_logprob_lists_free(&made->choices[i].logprobs);
    }
    sp_free(made->choices);
    sp_completion_request_free(&made->request);
    sp_reply_free_parts(reply);
    sp_free(made);
}

/* ---- the request --------------------------------------------------------------------------- */

static sp_status tokenize(completion *made, const sp_engine *engine, sp_error *error)
{
    for (int32_t i = 0; i < made->request.n_prompts; i++) {
        sp_prompt *prompt = &made->request.prompts[i];

        if (prompt->text) {
            sp_status status = (made->request.fields.add_special_tokens ? sp_engine_encode_prompt
                                                                        : sp_engine_encode)(
                engine, prompt->text, prompt->text_bytes, made->request.fields.parse_special,
                sp_engine_max_context(engine), &prompt->tokens, &prompt->n_tokens, error);

            if (status != SP_OK)
                return status;
        }
        made->reply.prompt_tokens += prompt->n_tokens;
    }
    return SP_OK;
}

/* Every prompt best_of times; the choices of one prompt differ by their seeds. */
static void fill_choices(completion *made, sp_generation *generation)
{
    const sp_body_fields *fields = &made->request.fields;

    for (int32_t i = 0; i < generation->n_choices; i++) {
        sp_request *request = &generation->choices[i].request;
        const sp_prompt *prompt = prompt_of(made, i);

        *request = fields->request;
        request->seed = fields->request.seed + (uint64_t)(i % made->request.best_of);
        request->logprobs |= made->request.best_of > fields->n;
        request->tokens = prompt->tokens;
        request->n_tokens = prompt->n_tokens;
        /* Without new tokens the engine computes those of the prompt, which it reads anyway. */
        request->prompt_logprobs =
            fields->echo && (fields->request.logprobs || fields->request.max_tokens == 0);
    }
}

static sp_generation *create_generation(completion *made)
{
    const sp_api *api = made->reply.call->api;
    sp_generation *generation;

    if (!made->choices) {
        made->n_choices = made->request.n_prompts * made->request.best_of;
        made->choices = sp_calloc((size_t)made->n_choices, sizeof *made->choices);
    }
    if (!made->choices)
        return NULL;
    generation =
        sp_generation_create(made->n_choices, sp_api_model(api, made->request.fields.model));
    if (generation)
        fill_choices(made, generation);
    return generation;
}

/* The prompts mean the same to every adapter, its ends do not. */
static sp_status make(sp_reply *reply, sp_lora_chat *lora, sp_generation **out_generation,
                      sp_error *error)
{
    completion *made = completion_of(reply);
    sp_status status = SP_OK;

    if (!made->choices)
        status = tokenize(made, reply->call->api->engine, error);
    if (status == SP_OK)
        status = sp_body_fields_set_ends(&made->request.fields, lora, NULL, 0, error);
    if (status != SP_OK)
        return status;
    *out_generation = create_generation(made);
    if (!*out_generation)
        return sp_fail_memory(error, sizeof **out_generation, "a generation");
    (*out_generation)->chat = sp_lora_chat_retain(lora);
    status = sp_output_form_want(&made->request.fields.output, SP_CONSTRAINT_NO_THOUGHT,
                                 &(*out_generation)->wanted, error);
    if (status != SP_OK)
        sp_task_release(&(*out_generation)->task);
    return status;
}

static const sp_reply_form form = {
    .object = "text_completion",
    .stream_object = "text_completion",
    .id_prefix = "cmpl-",
    .make = make,
    .produced = produced_token,
    .add_choices = add_choices,
    .kept_bytes = kept_bytes,
    .destroy = destroy,
};

static void start(completion *made, sp_call *call)
{
    const sp_body_fields *fields = &made->request.fields;

    if (fields->model)
        call->model = sp_strdup(fields->model);
    made->reply.form = &form;
    made->reply.model = fields->model;
    made->reply.wanted_version = fields->version;
    made->reply.stream = fields->stream;
    made->reply.include_usage = fields->include_usage;
    made->reply.usage_each = fields->usage_each;
    made->reply.choices_per_prompt = made->request.best_of;
    sp_reply_start(&made->reply, call, false);
}

void sp_handle_completions(sp_call *call)
{
    json_t *body = sp_call_body(call);
    completion *made;
    sp_error error;
    sp_status status;

    if (!body)
        return;
    made = sp_calloc(1, sizeof *made);
    if (!made) {
        json_decref(body);
        sp_fail_memory(&error, sizeof *made, "a request");
        sp_call_fail(call, SP_ERR_MEMORY, &error);
        return;
    }
    status = sp_completion_request_read(body, &call->api->sampling, &made->request, &error);
    json_decref(body);
    if (status == SP_OK) {
        start(made, call);
        return;
    }
    sp_free(made);
    sp_call_fail(call, status, &error);
}
