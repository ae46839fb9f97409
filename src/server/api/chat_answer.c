/*
 * chat_answer.c: deltas of the chat room into JSON. A message is kept until its end; a stream gives
 * every delta an event of its own.
 */
#include "server/api/chat_answer.h"

#include "base/alloc.h"
#include "base/error.h"
#include "server/api/logprob_text.h"

static sp_chat_answer *answer_of(sp_reply *reply)
{
    return (sp_chat_answer *)(void *)reply;
}

static int32_t index_of(const sp_chat_choice *choice)
{
    return (int32_t)(choice - choice->answer->choices);
}

/* ---- parts --------------------------------------------------------------------------------- */

static void add_member(sp_text *out, const char *name, const char *text, size_t bytes)
{
    sp_text_format(out, "\"%s\": ", name);
    sp_text_json_string(out, text ? text : "", bytes);
}

static void add_call_id(const sp_chat_choice *choice, int32_t call, sp_text *out)
{
    const sp_call *http = choice->answer->reply.call;

    sp_text_format(out, "\"id\": \"call-%s-%d-%d\", \"type\": \"function\"", http->id,
                   index_of(choice), call);
}

static void add_logprobs(sp_chat_choice *choice, sp_text *out)
{
    sp_text_add(out, ", \"logprobs\": ");
    if (choice->logprobs.bytes == 0) {
        sp_text_add(out, "null");
        return;
    }
    sp_text_add(out, "{\"content\": [");
    sp_text_add_bytes(out, choice->logprobs.data, choice->logprobs.bytes);
    sp_text_add(out, "], \"refusal\": null}");
    out->failed |= choice->logprobs.failed;
    sp_text_clear(&choice->logprobs);
}

static void add_ids(sp_chat_choice *choice, sp_text *out)
{
    if (!choice->answer->request.fields.return_token_ids)
        return;
    sp_text_format(out, ", \"token_ids\": [%s]",
                   choice->token_ids.data ? choice->token_ids.data : "");
    out->failed |= choice->token_ids.failed;
    sp_text_clear(&choice->token_ids);
}

static void add_routing(const sp_chat_choice *choice, sp_text *out)
{
    if (!choice->answer->request.fields.request.routed_experts)
        return;
    sp_reply_add_routing(&choice->answer->reply, out, choice->routed.data, choice->routed.bytes);
    out->failed |= choice->routed.failed;
}

static const char *finish_json(const sp_chat_choice *choice)
{
    if (choice->finish == SP_FINISH_STOP && sp_chat_parser_n_calls(choice->parser) > 0)
        return "\"tool_calls\"";
    return sp_finish_json(choice->finish);
}

/* ---- streams ------------------------------------------------------------------------------- */

static sp_text *begin_event(sp_chat_choice *choice)
{
    sp_reply *reply = &choice->answer->reply;

    sp_reply_event_begin(reply);
    sp_text_format(&reply->out, "{\"index\": %d, \"delta\": {", index_of(choice));
    return &reply->out;
}

/* The experts come with the last one, once the choice has its finish. */
static void end_event(sp_chat_choice *choice, const char *finish)
{
    sp_text *out = &choice->answer->reply.out;

    sp_text_add(out, "}");
    add_logprobs(choice, out);
    add_ids(choice, out);
    if (choice->finish != SP_FINISH_NONE)
        add_routing(choice, out);
    sp_text_format(out, ", \"finish_reason\": %s}", finish);
    sp_reply_event_end(&choice->answer->reply);
}

static void stream_delta(sp_chat_choice *choice, const sp_chat_delta *delta)
{
    sp_text *out = begin_event(choice);

    switch (delta->kind) {
    case SP_CHAT_CONTENT:
        add_member(out, "content", delta->text, delta->bytes);
        break;
    case SP_CHAT_REASONING:
        add_member(out, "reasoning_content", delta->text, delta->bytes);
        break;
    case SP_CHAT_TOOL_CALL:
        sp_text_format(out, "\"tool_calls\": [{\"index\": %d, ", delta->call);
        add_call_id(choice, delta->call, out);
        sp_text_add(out, ", \"function\": {");
        add_member(out, "name", delta->text, delta->bytes);
        sp_text_add(out, ", \"arguments\": \"\"}}]");
        break;
    case SP_CHAT_TOOL_ARGUMENTS:
        sp_text_format(out, "\"tool_calls\": [{\"index\": %d, \"function\": {", delta->call);
        add_member(out, "arguments", delta->text, delta->bytes);
        sp_text_add(out, "}}]");
        break;
    }
    end_event(choice, "null");
}

static void begin(sp_reply *reply)
{
    sp_chat_answer *answer = answer_of(reply);

    for (int32_t i = 0; i < answer->request.fields.n; i++) {
        sp_text_add(begin_event(&answer->choices[i]), "\"role\": \"assistant\", \"content\": \"\"");
        end_event(&answer->choices[i], "null");
    }
}

/* ---- whole messages ------------------------------------------------------------------------ */

/* Arguments of one call come in pieces; a call is closed when the next starts, or at the end. */
static void keep_delta(sp_chat_choice *choice, const sp_chat_delta *delta)
{
    sp_text *calls = &choice->calls;

    switch (delta->kind) {
    case SP_CHAT_CONTENT:
        sp_text_add_bytes(&choice->content, delta->text, delta->bytes);
        break;
    case SP_CHAT_REASONING:
        sp_text_add_bytes(&choice->reasoning, delta->text, delta->bytes);
        break;
    case SP_CHAT_TOOL_CALL:
        sp_text_add(calls, delta->call > 0 ? "\"}}, {" : "{");
        add_call_id(choice, delta->call, calls);
        sp_text_add(calls, ", \"function\": {");
        add_member(calls, "name", delta->text, delta->bytes);
        sp_text_add(calls, ", \"arguments\": \"");
        break;
    case SP_CHAT_TOOL_ARGUMENTS: {
        /* A string in pieces: each as a string of its own, without its quotes. */
        sp_text piece = {0};

        sp_text_json_string(&piece, delta->text, delta->bytes);
        if (piece.bytes >= 2)
            sp_text_add_bytes(calls, piece.data + 1, piece.bytes - 2);
        calls->failed |= piece.failed;
        sp_text_free(&piece);
        break;
    }
    }
}

static void add_message(const sp_chat_choice *choice, sp_text *out)
{
    bool has_calls = choice->calls.bytes > 0;

    sp_text_add(out, "\"message\": {\"role\": \"assistant\", ");
    if (has_calls && choice->content.bytes == 0)
        sp_text_add(out, "\"content\": null");
    else
        add_member(out, "content", choice->content.data, choice->content.bytes);
    if (choice->reasoning.bytes > 0) {
        sp_text_add(out, ", ");
        add_member(out, "reasoning_content", choice->reasoning.data, choice->reasoning.bytes);
    }
    if (has_calls) {
        sp_text_add(out, ", \"tool_calls\": [");
        sp_text_add_bytes(out, choice->calls.data, choice->calls.bytes);
        sp_text_add(out, "\"}}]");
    }
    sp_text_add(out, "}");
    out->failed |= choice->content.failed || choice->reasoning.failed || choice->calls.failed;
}

static void add_members(sp_reply *reply)
{
    const sp_chat_answer *answer = answer_of(reply);

    if (answer->request.fields.return_token_ids)
        sp_reply_add_ids(&reply->out, "prompt_token_ids", answer->tokens, answer->n_tokens);
}

static void add_choices(sp_reply *reply)
{
    sp_chat_answer *answer = answer_of(reply);
    sp_text *out = &reply->out;

    for (int32_t i = 0; i < answer->request.fields.n; i++) {
        sp_chat_choice *choice = &answer->choices[i];

        sp_text_format(out, "%s{\"index\": %d, ", i ? ", " : "", i);
        add_message(choice, out);
        add_logprobs(choice, out);
        add_ids(choice, out);
        add_routing(choice, out);
        sp_text_format(out, ", \"finish_reason\": %s}", finish_json(choice));
    }
}

/* ---- tokens -------------------------------------------------------------------------------- */

static void on_delta(void *user, const sp_chat_delta *delta)
{
    sp_chat_choice *choice = user;
    bool is_call = delta->kind == SP_CHAT_TOOL_CALL || delta->kind == SP_CHAT_TOOL_ARGUMENTS;

    /* A client that takes one call at a time gets the first; the model may have made more. */
    if (is_call && delta->call > 0 && choice->answer->request.fields.one_call)
        return;
    if (choice->answer->reply.stream)
        stream_delta(choice, delta);
    else
        keep_delta(choice, delta);
}

static void keep_token(sp_chat_choice *choice, const sp_produced *produced)
{
    const sp_chat_answer *answer = choice->answer;

    if (produced->token < 0)
        return;
    if (answer->request.fields.return_token_ids)
        sp_text_format(&choice->token_ids, choice->token_ids.bytes ? ", %d" : "%d",
                       produced->token);
    if (!answer->request.fields.request.logprobs)
        return;
    if (choice->logprobs.bytes > 0)
        sp_text_add(&choice->logprobs, ", ");
    sp_logprob_chat_add(&choice->logprobs, answer->reply.call->api->engine, produced,
                        answer->request.fields.request.processed_logprobs);
}

static void produced_token(sp_reply *reply, const sp_produced *produced)
{
    sp_chat_choice *choice = &answer_of(reply)->choices[produced->choice];
    sp_status status;

    keep_token(choice, produced);
    sp_text_add_bytes(&choice->routed, (const char *)sp_produced_routed(produced),
                      produced->routed_bytes);
    status =
        sp_chat_parser_push(choice->parser, sp_produced_text(produced), produced->text_bytes, NULL);
    if (status == SP_OK && produced->finish != SP_FINISH_NONE)
        status = sp_chat_parser_finish(choice->parser, NULL);
    choice->finish = produced->finish;
    if (status != SP_OK)
        reply->out.failed = true;
    if (!reply->stream)
        return;
    /* What is left of a token without text of its own, or the end. */
    if (produced->finish != SP_FINISH_NONE || choice->logprobs.bytes > 0 ||
        choice->token_ids.bytes > 0) {
        begin_event(choice);
        end_event(choice, finish_json(choice));
    }
}

/* ---- life --------------------------------------------------------------------------------------
 */

sp_status sp_chat_answer_add_choices(sp_chat_answer *answer, sp_error *error)
{
    int32_t n = answer->request.fields.n;
    sp_status status = SP_OK;

    answer->choices = sp_calloc((size_t)n, sizeof *answer->choices);
    if (!answer->choices)
        return sp_fail_memory(error, (size_t)n * sizeof *answer->choices, "choices");
    for (int32_t i = 0; i < n && status == SP_OK; i++) {
        answer->choices[i].answer = answer;
        status = sp_chat_parser_create(&answer->prompt,
                                       answer->take_delta ? answer->take_delta : on_delta,
                                       &answer->choices[i], &answer->choices[i].parser, error);
    }
    return status;
}

static size_t kept_bytes(const sp_reply *reply)
{
    const sp_chat_answer *answer = (const sp_chat_answer *)(const void *)reply;
    size_t bytes = 0;

    for (int32_t i = 0; answer->choices && i < answer->request.fields.n; i++) {
        const sp_chat_choice *choice = &answer->choices[i];

        bytes += choice->content.capacity + choice->reasoning.capacity + choice->calls.capacity +
                 choice->logprobs.capacity + choice->token_ids.capacity + choice->routed.capacity;
    }
    return bytes;
}

void sp_chat_answer_clear(sp_chat_answer *answer)
{
    for (int32_t i = 0; answer->choices && i < answer->request.fields.n; i++) {
        sp_chat_choice *choice = &answer->choices[i];

        sp_chat_parser_free(choice->parser);
        sp_text_free(&choice->content);
        sp_text_free(&choice->reasoning);
        sp_text_free(&choice->calls);
        sp_text_free(&choice->logprobs);
        sp_text_free(&choice->token_ids);
        sp_text_free(&choice->routed);
    }
    sp_free(answer->choices);
    answer->choices = NULL;
    sp_engine_free(answer->tokens);
    answer->tokens = NULL;
    answer->n_tokens = 0;
    sp_chat_prompt_free(&answer->prompt);
}

static void destroy(sp_reply *reply)
{
    sp_chat_answer *answer = answer_of(reply);

    sp_chat_answer_clear(answer);
    sp_chat_completion_request_free(&answer->request);
    sp_reply_free_parts(reply);
    sp_free(answer);
}

const sp_reply_form sp_chat_answer_form = {
    .object = "chat.completion",
    .stream_object = "chat.completion.chunk",
    .id_prefix = "chatcmpl-",
    .make = sp_chat_answer_make,
    .begin = begin,
    .produced = produced_token,
    .add_members = add_members,
    .add_choices = add_choices,
    .kept_bytes = kept_bytes,
    .destroy = destroy,
};
