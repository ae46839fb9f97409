/*
 * route_responses.c: POST /v1/responses. The request is one of chat in another spelling
 * (responses_request.c); the answer is a list of items (a thought, a text, calls) instead of a
 * message, and a stream has an event for each change of one. Nothing is kept: the id of an answer
 * means nothing to a later request.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "server/api/chat_answer.h"
#include "server/api/responses_request.h"

#include <string.h>
#include <time.h>

typedef struct response {
    sp_chat_answer answer; /* first */
    json_t *body;          /* as it came: a reference */
    sp_text items;         /* of "output", those that are closed, with commas between */
    sp_text text;          /* of the item that is open */
    sp_text name;          /* of its function */
    int32_t n_items;       /* the open one is not counted */
    sp_chat_delta_kind kind;
    bool open;
    int64_t n_events, created;
} response;

static response *response_of(sp_reply *reply)
{
    return (response *)(void *)reply;
}

static const char *id_of(const response *made)
{
    return made->answer.reply.call->id;
}

/* ---- items --------------------------------------------------------------------------------- */

static bool is_call(const response *made)
{
    return made->kind == SP_CHAT_TOOL_CALL || made->kind == SP_CHAT_TOOL_ARGUMENTS;
}

static void add_string(sp_text *out, const char *name, const char *text, size_t bytes)
{
    sp_text_format(out, "\"%s\": ", name);
    sp_text_json_string(out, text ? text : "", bytes);
}

static void add_item_id(const response *made, sp_text *out)
{
    const char *prefix = is_call(made) ? "fc" : made->kind == SP_CHAT_REASONING ? "rs" : "msg";

    sp_text_format(out, "\"%s-%s-%d\"", prefix, id_of(made), made->n_items);
}

static void add_part(const response *made, const sp_text *text, sp_text *out)
{
    bool thought = made->kind == SP_CHAT_REASONING;

    sp_text_format(out, "{\"type\": \"%s\", ", thought ? "reasoning_text" : "output_text");
    add_string(out, "text", text->data, text->bytes);
    sp_text_add(out, thought ? "}" : ", \"annotations\": [], \"logprobs\": []}");
}

/* The item that is open, with its text or, as it begins, without. */
static void add_item(const response *made, bool whole, sp_text *out)
{
    static const sp_text empty;
    const sp_text *text = whole ? &made->text : &empty;

    sp_text_add(out, "{\"id\": ");
    add_item_id(made, out);
    sp_text_format(out, ", \"status\": \"%s\", ", whole ? "completed" : "in_progress");
    if (is_call(made)) {
        sp_text_format(out, "\"type\": \"function_call\", \"call_id\": \"call-%s-%d\", ",
                       id_of(made), made->n_items);
        add_string(out, "name", made->name.data, made->name.bytes);
        sp_text_add(out, ", ");
        add_string(out, "arguments", text->data, text->bytes);
    } else {
        sp_text_add(out, made->kind == SP_CHAT_REASONING
                             ? "\"type\": \"reasoning\", \"summary\": [], \"content\": ["
                             : "\"type\": \"message\", \"role\": \"assistant\", \"content\": [");
        if (whole)
            add_part(made, text, out);
        sp_text_add(out, "]");
    }
    sp_text_add(out, "}");
}

/* ---- the response -------------------------------------------------------------------------- */

static int take_json(const char *bytes, size_t n, void *user)
{
    sp_text_add_bytes(user, bytes, n);
    return 0;
}

/* What the request says, or what it means by not saying it. */
static void add_member(sp_text *out, const json_t *body, const char *name, const char *otherwise)
{
    const json_t *value = json_object_get(body, name);

    sp_text_format(out, ", \"%s\": ", name);
    if (!value || json_is_null(value))
        sp_text_add(out, otherwise);
    else if (json_dump_callback(value, take_json, out, JSON_ENCODE_ANY | JSON_COMPACT) != 0)
        out->failed = true;
}

static void add_usage(const sp_reply *reply, sp_text *out)
{
    sp_text_format(out,
                   ", \"usage\": {\"input_tokens\": %lld, \"input_tokens_details\": "
                   "{\"cached_tokens\": %lld}, \"output_tokens\": %lld, "
                   "\"output_tokens_details\": {\"reasoning_tokens\": 0}, \"total_tokens\": %lld}",
                   (long long)reply->prompt_tokens, (long long)reply->cached_tokens,
                   (long long)reply->generated_tokens,
                   (long long)(reply->prompt_tokens + reply->generated_tokens));
}

/* Why it is not all of an answer; NULL: it is. */
static const char *why_cut(const response *made)
{
    sp_finish finish = made->answer.choices[0].finish;

    if (finish == SP_FINISH_ABORT)
        return "abort";
    return finish == SP_FINISH_LENGTH ? "max_output_tokens" : NULL;
}

static bool is_cut(const response *made)
{
    return why_cut(made) != NULL;
}

static void add_response(const response *made, bool ended, sp_text *out)
{
    static const char *const said[][2] = {
        {"instructions", "null"},
        {"max_output_tokens", "null"},
        {"parallel_tool_calls", "true"},
        {"reasoning", "null"},
        {"temperature", "null"},
        {"text", "{\"format\": {\"type\": "
                 "\"text\"}}"},
        {"tool_choice", "\"auto\""},
        {"tools", "[]"},
        {"top_p", "null"},
        {"metadata", "{}"},
    };
    const sp_reply *reply = &made->answer.reply;
    const char *model = sp_reply_model(reply);

    sp_text_format(out, "{\"id\": \"resp-%s\", \"object\": \"response\", \"created_at\": %lld, ",
                   id_of(made), (long long)made->created);
    sp_text_format(out, "\"status\": \"%s\", \"error\": null, \"incomplete_details\": ",
                   !ended         ? "in_progress"
                   : is_cut(made) ? "incomplete"
                                  : "completed");
    if (ended && is_cut(made))
        sp_text_format(out, "{\"reason\": \"%s\"}, ", why_cut(made));
    else
        sp_text_add(out, "null, ");
    add_string(out, "model", model, strlen(model));
    sp_reply_add_version(reply, out);
    sp_text_add(out, ", \"previous_response_id\": null, \"store\": false, \"truncation\": "
                     "\"disabled\", \"output\": [");
    if (ended)
        sp_text_add_bytes(out, made->items.data, made->items.bytes);
    sp_text_add(out, "]");
    for (size_t i = 0; i < sizeof said / sizeof *said; i++)
        add_member(out, made->body, said[i][0], said[i][1]);
    if (ended)
        add_usage(reply, out);
    else
        sp_text_add(out, ", \"usage\": null");
    sp_text_add(out, "}");
    out->failed |= made->items.failed || made->text.failed || made->name.failed;
}

/* ---- events -------------------------------------------------------------------------------- */

/* An event up to its own members; NULL where the answer is no stream. */
static sp_text *begin_event(response *made, const char *type)
{
    sp_text *out = &made->answer.reply.out;

    if (!made->answer.reply.stream)
        return NULL;
    sp_text_format(out, "event: %s\ndata: {\"type\": \"%s\", \"sequence_number\": %lld", type, type,
                   (long long)made->n_events++);
    return out;
}

static void end_event(sp_text *out)
{
    sp_text_add(out, "}\n\n");
}

/* An event of the item that is open, with its place. */
static sp_text *begin_item_event(response *made, const char *type)
{
    sp_text *out = begin_event(made, type);

    if (!out)
        return NULL;
    sp_text_format(out, ", \"output_index\": %d, \"item_id\": ", made->n_items);
    add_item_id(made, out);
    if (!is_call(made))
        sp_text_add(out, ", \"content_index\": 0");
    return out;
}

static void send_response(response *made, const char *type, bool ended)
{
    sp_text *out = begin_event(made, type);

    if (!out)
        return;
    sp_text_add(out, ", \"response\": ");
    add_response(made, ended, out);
    end_event(out);
}

static void send_item(response *made, const char *type, bool whole)
{
    sp_text *out = begin_event(made, type);

    if (!out)
        return;
    sp_text_format(out, ", \"output_index\": %d, \"item\": ", made->n_items);
    add_item(made, whole, out);
    end_event(out);
}

static void send_part(response *made, const char *type, const sp_text *text)
{
    sp_text *out = begin_item_event(made, type);

    if (!out)
        return;
    sp_text_add(out, ", \"part\": ");
    add_part(made, text, out);
    end_event(out);
}

static void send_text(response *made, const char *type, const char *member, const char *text,
                      size_t bytes)
{
    sp_text *out = begin_item_event(made, type);

    if (!out)
        return;
    sp_text_add(out, ", ");
    add_string(out, member, text, bytes);
    if (made->kind == SP_CHAT_CONTENT)
        sp_text_add(out, ", \"logprobs\": []");
    end_event(out);
}

/* ---- deltas -------------------------------------------------------------------------------- */

static const char *event_of(const response *made, bool done)
{
    if (is_call(made))
        return done ? "response.function_call_arguments.done"
                    : "response.function_call_arguments.delta";
    if (made->kind == SP_CHAT_REASONING)
        return done ? "response.reasoning_text.done" : "response.reasoning_text.delta";
    return done ? "response.output_text.done" : "response.output_text.delta";
}

static void close_item(response *made)
{
    if (!made->open)
        return;
    send_text(made, event_of(made, true), is_call(made) ? "arguments" : "text", made->text.data,
              made->text.bytes);
    if (!is_call(made))
        send_part(made, "response.content_part.done", &made->text);
    send_item(made, "response.output_item.done", true);
    sp_text_add(&made->items, made->n_items > 0 ? ", " : "");
    add_item(made, true, &made->items);
    made->n_items++;
    made->open = false;
}

static void open_item(response *made, sp_chat_delta_kind kind, const sp_chat_delta *call)
{
    static const sp_text empty;

    close_item(made);
    made->open = true;
    made->kind = kind;
    sp_text_clear(&made->text);
    sp_text_clear(&made->name);
    if (call)
        sp_text_add_bytes(&made->name, call->text, call->bytes);
    send_item(made, "response.output_item.added", false);
    if (!is_call(made))
        send_part(made, "response.content_part.added", &empty);
}

static void take_delta(void *user, const sp_chat_delta *delta)
{
    const sp_chat_choice *choice = user;
    response *made = response_of(&choice->answer->reply);
    bool call = delta->kind == SP_CHAT_TOOL_CALL || delta->kind == SP_CHAT_TOOL_ARGUMENTS;

    if (call && delta->call > 0 && choice->answer->request.fields.one_call)
        return;
    if (delta->kind == SP_CHAT_TOOL_CALL) {
        open_item(made, delta->kind, delta);
        return;
    }
    if (!made->open || (made->kind != delta->kind && !(call && is_call(made))))
        open_item(made, delta->kind, NULL);
    sp_text_add_bytes(&made->text, delta->text, delta->bytes);
    send_text(made, event_of(made, false), "delta", delta->text, delta->bytes);
}

/* ---- the form ------------------------------------------------------------------------------ */

static void begin(sp_reply *reply)
{
    send_response(response_of(reply), "response.created", false);
    send_response(response_of(reply), "response.in_progress", false);
}

static void produced_token(sp_reply *reply, const sp_produced *produced)
{
    sp_chat_choice *choice = &response_of(reply)->answer.choices[0];
    sp_status status =
        sp_chat_parser_push(choice->parser, sp_produced_text(produced), produced->text_bytes, NULL);

    choice->finish = produced->finish;
    if (status == SP_OK && produced->finish != SP_FINISH_NONE)
        status = sp_chat_parser_finish(choice->parser, NULL);
    if (produced->finish != SP_FINISH_NONE)
        close_item(response_of(reply));
    if (status != SP_OK)
        reply->out.failed = true;
}

static void end(sp_reply *reply)
{
    response *made = response_of(reply);

    send_response(made, is_cut(made) ? "response.incomplete" : "response.completed", true);
}

static void whole(sp_reply *reply)
{
    add_response(response_of(reply), true, &reply->out);
    sp_text_add(&reply->out, "\n");
}

static size_t kept_bytes(const sp_reply *reply)
{
    const response *made = (const response *)(const void *)reply;

    return made->items.capacity + made->text.capacity + made->name.capacity;
}

static void destroy(sp_reply *reply)
{
    response *made = response_of(reply);

    sp_text_free(&made->items);
    sp_text_free(&made->text);
    sp_text_free(&made->name);
    json_decref(made->body);
    sp_chat_answer_form.destroy(reply);
}

static const sp_reply_form form = {
    .make = sp_chat_answer_make,
    .begin = begin,
    .end = end,
    .produced = produced_token,
    .whole = whole,
    .kept_bytes = kept_bytes,
    .destroy = destroy,
};

/* ---- the request --------------------------------------------------------------------------- */

static sp_status read_request(const json_t *body, const sp_call *call, response *made,
                              sp_error *error)
{
    json_t *chat;
    sp_status status = sp_responses_to_chat(body, &chat, error);

    if (status != SP_OK)
        return status;
    status =
        sp_chat_completion_request_read(chat, &call->api->sampling, &made->answer.request, error);
    json_decref(chat);
    return status;
}

static void read_and_start(sp_call *call, json_t *body)
{
    response *made = sp_calloc(1, sizeof *made);
    sp_error error;
    sp_status status;

    if (!made) {
        sp_fail_memory(&error, sizeof *made, "a request");
        sp_call_fail(call, SP_ERR_MEMORY, &error);
        return;
    }
    status = read_request(body, call, made, &error);
    if (status != SP_OK) {
        sp_free(made);
        sp_call_fail(call, status, &error);
        return;
    }
    made->body = json_incref(body);
    made->created = (int64_t)time(NULL);
    made->answer.take_delta = take_delta;
    made->answer.reply.form = &form;
    made->answer.reply.model = made->answer.request.fields.model;
    made->answer.reply.wanted_version = made->answer.request.fields.version;
    made->answer.reply.stream = made->answer.request.fields.stream;
    made->answer.reply.choices_per_prompt = 1;
    if (made->answer.request.fields.model)
        call->model = sp_strdup(made->answer.request.fields.model);
    sp_reply_start(&made->answer.reply, call, true);
}

void sp_handle_responses(sp_call *call)
{
    json_t *body = sp_call_body(call);

    if (!body)
        return;
    read_and_start(call, body);
    json_decref(body);
}
