/*
 * route_completions.c: POST /v1/completions.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "server/completion_request.h"
#include "server/logprob_text.h"
#include "server/reply.h"

#include <string.h>

/* What is known of one choice and not sent. In a stream that is little: logprobs on their way. */
typedef struct choice_state {
    sp_text text, token_ids;
    sp_logprob_lists logprobs;
    sp_finish finish;
    bool echoed;    /* the prompt's text, where it should be */
    bool has_first; /* the logprobs begin with the prompt's first token, where they should */
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
    return &made->request.prompts[choice / made->request.fields.n];
}

/* ---- the answer ---------------------------------------------------------------------------- */

static void add_token_ids(sp_text *out, const char *field, const int32_t *tokens, int32_t n)
{
    sp_text_format(out, ", \"%s\": [", field);
    for (int32_t i = 0; i < n; i++)
        sp_text_format(out, "%s%d", i ? ", " : "", tokens[i]);
    sp_text_add(out, "]");
}

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

static void add_choice(completion *made, int32_t index, const char *text, size_t bytes,
                       sp_finish finish)
{
    sp_text *out = &made->reply.out;

    sp_text_format(out, "{\"index\": %d, \"text\": ", index);
    sp_text_json_string(out, text ? text : "", bytes);
    sp_text_add(out, ", \"logprobs\": ");
    sp_logprob_lists_write(&made->choices[index].logprobs, out);
    sp_text_format(out, ", \"finish_reason\": %s", sp_finish_json(finish));
}

/* The prompt of one choice, once, before the first of its new tokens. */
static void echo(completion *made, int32_t index)
{
    choice_state *choice = &made->choices[index];

    if (choice->echoed || !made->request.echo)
        return;
    choice->echoed = true;
    add_prompt_text(made, index, &choice->text);
    if (!made->reply.stream)
        return;
    sp_reply_event_begin(&made->reply);
    add_choice(made, index, choice->text.data, choice->text.bytes, SP_FINISH_NONE);
    sp_text_add(&made->reply.out, "}");
    sp_reply_event_end(&made->reply);
    sp_text_free(&choice->text);
}

static void add_logprobs(completion *made, const sp_produced *produced)
{
    choice_state *choice = &made->choices[produced->choice];
    const sp_engine *engine = made->reply.call->api->engine;

    if (!made->request.fields.logprobs)
        return;
    /* A prompt's first token follows nothing, so the engine says nothing of it. */
    if (made->request.echo && !choice->has_first) {
        const sp_produced first = {.token = prompt_of(made, produced->choice)->tokens[0]};

        sp_logprob_lists_add(&choice->logprobs, engine, &first, true);
        choice->has_first = true;
    }
    if (produced->token >= 0)
        sp_logprob_lists_add(&choice->logprobs, engine, produced, false);
}

static void stream_token(completion *made, const sp_produced *produced)
{
    sp_reply *reply = &made->reply;
    const sp_sampling_fields *fields = &made->request.fields;

    /* Text that is held back comes with a later token. */
    if (produced->text_bytes == 0 && produced->finish == SP_FINISH_NONE &&
        !fields->return_token_ids && !fields->logprobs)
        return;
    sp_reply_event_begin(reply);
    add_choice(made, produced->choice, sp_produced_text(produced), produced->text_bytes,
               produced->finish);
    if (fields->return_token_ids)
        add_token_ids(&reply->out, "token_ids", &produced->token, produced->token >= 0);
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
    if (reply->stream) {
        stream_token(made, produced);
        return;
    }
    sp_text_add_bytes(&choice->text, sp_produced_text(produced), produced->text_bytes);
    if (made->request.fields.return_token_ids && produced->token >= 0)
        sp_text_format(&choice->token_ids, choice->token_ids.bytes ? ", %d" : "%d",
                       produced->token);
    choice->finish = produced->finish;
}

static void add_choices(sp_reply *reply)
{
    completion *made = completion_of(reply);
    sp_text *out = &reply->out;

    for (int32_t i = 0; i < made->n_choices; i++) {
        choice_state *choice = &made->choices[i];

        sp_text_add(out, i ? ", " : "");
        add_choice(made, i, choice->text.data, choice->text.bytes, choice->finish);
        if (made->request.fields.return_token_ids) {
            sp_text_format(out, ", \"token_ids\": [%s]",
                           choice->token_ids.data ? choice->token_ids.data : "");
            add_token_ids(out, "prompt_token_ids", prompt_of(made, i)->tokens,
                          prompt_of(made, i)->n_tokens);
        }
        sp_text_add(out, "}");
        out->failed |= choice->text.failed || choice->token_ids.failed;
    }
}

static void destroy(sp_reply *reply)
{
    completion *made = completion_of(reply);

    for (int32_t i = 0; made->choices && i < made->n_choices; i++) {
        sp_text_free(&made->choices[i].text);
        sp_text_free(&made->choices[i].token_ids);
        sp_logprob_lists_free(&made->choices[i].logprobs);
    }
    sp_free(made->choices);
    sp_completion_request_free(&made->request);
    sp_reply_free_parts(reply);
    sp_free(made);
}

static const sp_reply_form form = {
    .object = "text_completion",
    .stream_object = "text_completion",
    .id_prefix = "cmpl-",
    .produced = produced_token,
    .add_choices = add_choices,
    .destroy = destroy,
};

/* ---- the request --------------------------------------------------------------------------- */

static sp_status tokenize(completion *made, const sp_engine *engine, sp_error *error)
{
    for (int32_t i = 0; i < made->request.n_prompts; i++) {
        sp_prompt *prompt = &made->request.prompts[i];

        if (prompt->text) {
            sp_status status = sp_engine_encode(
                engine, prompt->text, prompt->text_bytes, made->request.parse_special,
                sp_engine_max_context(engine), &prompt->tokens, &prompt->n_tokens, error);

            if (status != SP_OK)
                return status;
        }
        made->reply.prompt_tokens += prompt->n_tokens;
    }
    return SP_OK;
}

/* Every prompt n times; the choices of one prompt differ by their seeds. */
static void fill_choices(completion *made, sp_generation *generation)
{
    const sp_sampling_fields *fields = &made->request.fields;

    for (int32_t i = 0; i < generation->n_choices; i++) {
        sp_request *request = &generation->choices[i].request;
        const sp_prompt *prompt = prompt_of(made, i);

        *request = sp_sampling_fields_request(fields);
        request->seed = fields->seed + (uint64_t)(i % fields->n);
        request->tokens = prompt->tokens;
        request->n_tokens = prompt->n_tokens;
        /* Without new tokens the engine is asked for those of the prompt, which it reads anyway. */
        request->prompt_logprobs =
            made->request.echo && (fields->logprobs || fields->max_tokens == 0);
    }
}

static sp_generation *create_generation(completion *made)
{
    const char *adapter;
    char *path;
    sp_generation *generation;

    made->n_choices = made->request.n_prompts * made->request.fields.n;
    made->choices = sp_calloc((size_t)made->n_choices, sizeof *made->choices);
    if (!made->choices)
        return NULL;
    sp_api_model(made->reply.call->api, made->request.fields.model, &adapter, &path);
    generation = sp_generation_create(made->n_choices, adapter, path);
    sp_free(path);
    if (generation)
        fill_choices(made, generation);
    return generation;
}

static void start(completion *made, sp_call *call)
{
    const sp_sampling_fields *fields = &made->request.fields;
    sp_generation *generation = NULL;
    sp_error error;
    sp_status status;

    made->reply.call = call;
    if (fields->model)
        call->model = sp_strdup(fields->model);
    status = tokenize(made, call->api->engine, &error);
    if (status == SP_OK) {
        generation = create_generation(made);
        if (!generation)
            status = sp_fail_memory(&error, sizeof *generation, "a generation");
    }
    if (status != SP_OK) {
        destroy(&made->reply);
        sp_call_fail(call, status, &error);
        return;
    }
    made->reply.model = fields->model;
    made->reply.stream = fields->stream;
    made->reply.include_usage = fields->include_usage;
    made->reply.choices_per_prompt = fields->n;
    sp_reply_start(&made->reply, call, generation);
}

void sp_route_completions(sp_call *call)
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
    made->reply.form = &form;
    status = sp_completion_request_read(body, &made->request, &error);
    json_decref(body);
    if (status == SP_OK) {
        start(made, call);
        return;
    }
    sp_free(made);
    sp_call_fail(call, status, &error);
}
