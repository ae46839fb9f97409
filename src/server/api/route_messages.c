/*
 * route_messages.c: Anthropic's POST /v1/messages. The request is one of chat in another spelling
 * (messages_request.c); the answer is a list of blocks (a thought, texts, uses of tools), and a
 * stream has the events that their clients put together again.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "server/api/chat_answer.h"
#include "server/api/messages_request.h"

#include <string.h>

/* Of the end of an answer, to see which text in "stop_sequences" it was. */
#define TAIL_TOKENS 64

typedef struct message {
    sp_chat_answer answer; /* first */
    sp_text blocks;        /* of "content", those that are closed, with commas between */
    sp_text text;          /* of the block that is open */
    sp_text name;          /* of its tool */
    int32_t n_blocks;      /* the open one is not counted */
    sp_chat_delta_kind kind;
    bool open, uses_tool;
    int32_t tail[TAIL_TOKENS], n_tail;
    const char *stop; /* that ended it; borrowed from the request. NULL: none did */
} message;

static message *message_of(sp_reply *reply)
{
    return (message *)(void *)reply;
}

static void add_string(sp_text *out, const char *name, const char *text, size_t bytes)
{
    sp_text_format(out, "\"%s\": ", name);
    sp_text_json_string(out, text ? text : "", bytes);
}

/* ---- blocks -------------------------------------------------------------------------------- */

static bool is_use(const message *made)
{
    return made->kind == SP_CHAT_TOOL_CALL || made->kind == SP_CHAT_TOOL_ARGUMENTS;
}

/* The block that is open, with its text or, as it begins, without. A thought has no signature. */
static void add_block(const message *made, bool whole, sp_text *out)
{
    const char *text = whole ? made->text.data : "";
    size_t bytes = whole ? made->text.bytes : 0;

    if (is_use(made)) {
        sp_text_format(out, "{\"type\": \"tool_use\", \"id\": \"toolu-%s-%d\", ",
                       made->answer.reply.call->id, made->n_blocks);
        add_string(out, "name", made->name.data, made->name.bytes);
        sp_text_add(out, ", \"input\": ");
        sp_text_add_bytes(out, bytes > 0 ? text : "{}", bytes > 0 ? bytes : 2);
    } else if (made->kind == SP_CHAT_REASONING) {
        sp_text_add(out, "{\"type\": \"thinking\", \"signature\": \"\", ");
        add_string(out, "thinking", text, bytes);
    } else {
        sp_text_add(out, "{\"type\": \"text\", ");
        add_string(out, "text", text, bytes);
    }
    sp_text_add(out, "}");
}

/* ---- the message --------------------------------------------------------------------------- */

static const char *stop_reason(const message *made)
{
    if (made->answer.choices[0].finish == SP_FINISH_LENGTH)
        return "max_tokens";
    if (made->uses_tool)
        return "tool_use";
    return made->stop ? "stop_sequence" : "end_turn";
}

static void add_stop(const message *made, sp_text *out)
{
    sp_text_format(out, "\"stop_reason\": \"%s\", \"stop_sequence\": ", stop_reason(made));
    if (made->stop)
        sp_text_json_string(out, made->stop, strlen(made->stop));
    else
        sp_text_add(out, "null");
}

/* Tokens that the prefix cache had are counted apart; that is known at the end. */
static void add_usage(const sp_reply *reply, sp_text *out)
{
    sp_text_format(out,
                   "\"usage\": {\"input_tokens\": %lld, \"cache_creation_input_tokens\": 0, "
                   "\"cache_read_input_tokens\": %lld, \"output_tokens\": %lld}",
                   (long long)(reply->prompt_tokens - reply->cached_tokens),
                   (long long)reply->cached_tokens, (long long)reply->generated_tokens);
}

static void add_message(const message *made, bool ended, sp_text *out)
{
    const sp_reply *reply = &made->answer.reply;
    const char *model = sp_reply_model(reply);

    sp_text_format(out, "{\"id\": \"msg-%s\", \"type\": \"message\", \"role\": \"assistant\", ",
                   reply->call->id);
    add_string(out, "model", model, strlen(model));
    sp_text_add(out, ", \"content\": [");
    if (ended)
        sp_text_add_bytes(out, made->blocks.data, made->blocks.bytes);
    sp_text_add(out, "], ");
    if (ended)
        add_stop(made, out);
    else
        sp_text_add(out, "\"stop_reason\": null, \"stop_sequence\": null");
    sp_text_add(out, ", ");
    add_usage(reply, out);
    sp_text_add(out, "}");
    out->failed |= made->blocks.failed || made->text.failed || made->name.failed;
}

/* ---- events -------------------------------------------------------------------------------- */

/* An event up to its own members; NULL where the answer is no stream. */
static sp_text *begin_event(message *made, const char *type)
{
    sp_text *out = &made->answer.reply.out;

    if (!made->answer.reply.stream)
        return NULL;
    sp_text_format(out, "event: %s\ndata: {\"type\": \"%s\"", type, type);
    return out;
}

static void end_event(sp_text *out)
{
    sp_text_add(out, "}\n\n");
}

static sp_text *begin_block_event(message *made, const char *type)
{
    sp_text *out = begin_event(made, type);

    if (out)
        sp_text_format(out, ", \"index\": %d", made->n_blocks);
    return out;
}

static void send_delta(message *made, const char *text, size_t bytes)
{
    sp_text *out = begin_block_event(made, "content_block_delta");

    if (!out)
        return;
    if (is_use(made)) {
        sp_text_add(out, ", \"delta\": {\"type\": \"input_json_delta\", ");
        add_string(out, "partial_json", text, bytes);
    } else if (made->kind == SP_CHAT_REASONING) {
        sp_text_add(out, ", \"delta\": {\"type\": \"thinking_delta\", ");
        add_string(out, "thinking", text, bytes);
    } else {
        sp_text_add(out, ", \"delta\": {\"type\": \"text_delta\", ");
        add_string(out, "text", text, bytes);
    }
    sp_text_add(out, "}");
    end_event(out);
}

static void close_block(message *made)
{
    sp_text *out;

    if (!made->open)
        return;
    out = begin_block_event(made, "content_block_stop");
    if (out)
        end_event(out);
    sp_text_add(&made->blocks, made->n_blocks > 0 ? ", " : "");
    add_block(made, true, &made->blocks);
    made->n_blocks++;
    made->open = false;
}

static void open_block(message *made, sp_chat_delta_kind kind, const sp_chat_delta *call)
{
    sp_text *out;

    close_block(made);
    made->open = true;
    made->kind = kind;
    made->uses_tool |= call != NULL;
    sp_text_clear(&made->text);
    sp_text_clear(&made->name);
    if (call)
        sp_text_add_bytes(&made->name, call->text, call->bytes);
    out = begin_block_event(made, "content_block_start");
    if (!out)
        return;
    sp_text_add(out, ", \"content_block\": ");
    add_block(made, false, out);
    end_event(out);
}

static void take_delta(void *user, const sp_chat_delta *delta)
{
    const sp_chat_choice *choice = user;
    message *made = message_of(&choice->answer->reply);
    bool call = delta->kind == SP_CHAT_TOOL_CALL || delta->kind == SP_CHAT_TOOL_ARGUMENTS;

    if (call && delta->call > 0 && choice->answer->request.fields.one_call)
        return;
    if (delta->kind == SP_CHAT_TOOL_CALL) {
        open_block(made, delta->kind, delta);
        return;
    }
    if (!made->open || (made->kind != delta->kind && !(call && is_use(made))))
        open_block(made, delta->kind, NULL);
    sp_text_add_bytes(&made->text, delta->text, delta->bytes);
    send_delta(made, delta->text, delta->bytes);
}

/* ---- its end ------------------------------------------------------------------------------- */

static void keep_token(message *made, int32_t token)
{
    if (token < 0)
        return;
    if (made->n_tail == TAIL_TOKENS) {
        memmove(made->tail, made->tail + 1, (TAIL_TOKENS - 1) * sizeof *made->tail);
        made->n_tail--;
    }
    made->tail[made->n_tail++] = token;
}

/* An answer that stopped ends with its last token: a text of the request that it holds ended it. */
static void find_stop(message *made)
{
    const sp_request *request = &made->answer.request.fields.request;
    const char *found = NULL;
    char *text;
    size_t bytes;

    if (request->n_stop == 0 || made->answer.choices[0].finish != SP_FINISH_STOP ||
        sp_engine_decode(made->answer.reply.call->api->engine, made->tail, made->n_tail, false,
                         &text, &bytes, NULL) != SP_OK)
        return;
    for (int32_t i = 0; i < request->n_stop; i++) {
        const char *at = memmem(text, bytes, request->stop[i], strlen(request->stop[i]));

        if (!at || (found && found <= at))
            continue;
        found = at;
        made->stop = request->stop[i];
    }
    sp_engine_free(text);
}

/* ---- the form ------------------------------------------------------------------------------ */

static void begin(sp_reply *reply)
{
    sp_text *out = begin_event(message_of(reply), "message_start");

    if (!out)
        return;
    sp_text_add(out, ", \"message\": ");
    add_message(message_of(reply), false, out);
    end_event(out);
}

static void produced_token(sp_reply *reply, const sp_produced *produced)
{
    message *made = message_of(reply);
    sp_chat_choice *choice = &made->answer.choices[0];
    sp_status status =
        sp_chat_parser_push(choice->parser, sp_produced_text(produced), produced->text_bytes, NULL);

    keep_token(made, produced->token);
    choice->finish = produced->finish;
    if (status == SP_OK && produced->finish != SP_FINISH_NONE)
        status = sp_chat_parser_finish(choice->parser, NULL);
    if (produced->finish != SP_FINISH_NONE) {
        close_block(made);
        find_stop(made);
    }
    if (status != SP_OK)
        reply->out.failed = true;
}

static void end(sp_reply *reply)
{
    message *made = message_of(reply);
    sp_text *out = begin_event(made, "message_delta");

    if (!out)
        return;
    sp_text_add(out, ", \"delta\": {");
    add_stop(made, out);
    sp_text_add(out, "}, ");
    add_usage(reply, out);
    end_event(out);
    end_event(begin_event(made, "message_stop"));
}

static void whole(sp_reply *reply)
{
    add_message(message_of(reply), true, &reply->out);
    sp_text_add(&reply->out, "\n");
}

static size_t kept_bytes(const sp_reply *reply)
{
    const message *made = (const message *)(const void *)reply;

    return made->blocks.capacity + made->text.capacity + made->name.capacity;
}

static void destroy(sp_reply *reply)
{
    message *made = message_of(reply);

    sp_text_free(&made->blocks);
    sp_text_free(&made->text);
    sp_text_free(&made->name);
    sp_chat_answer_form.destroy(reply);
}

static const sp_reply_form form = {
    .error_event = "error",
    .make = sp_chat_answer_make,
    .begin = begin,
    .end = end,
    .produced = produced_token,
    .whole = whole,
    .kept_bytes = kept_bytes,
    .destroy = destroy,
};

/* ---- the request --------------------------------------------------------------------------- */

static sp_status read_request(const json_t *body, const sp_call *call, message *made,
                              sp_error *error)
{
    json_t *chat;
    sp_status status = sp_messages_to_chat(body, false, &chat, error);

    if (status != SP_OK)
        return status;
    status =
        sp_chat_completion_request_read(chat, &call->api->sampling, &made->answer.request, error);
    json_decref(chat);
    return status;
}

static void read_and_start(sp_call *call, const json_t *body)
{
    message *made = sp_calloc(1, sizeof *made);
    sp_reply *reply;
    sp_error error;
    sp_status status = made ? read_request(body, call, made, &error)
                            : sp_fail_memory(&error, sizeof *made, "a request");

    if (status != SP_OK) {
        sp_free(made);
        sp_call_fail(call, status, &error);
        return;
    }
    reply = &made->answer.reply;
    made->answer.take_delta = take_delta;
    reply->form = &form;
    reply->model = made->answer.request.fields.model;
    reply->stream = made->answer.request.fields.stream;
    reply->choices_per_prompt = 1;
    if (reply->model)
        call->model = sp_strdup(reply->model);
    sp_reply_start(reply, call, true);
}

void sp_handle_messages(sp_call *call)
{
    json_t *body = sp_call_body(call);

    if (!body)
        return;
    read_and_start(call, body);
    json_decref(body);
}
