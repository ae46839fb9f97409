/*
 * Generated text to a message, as it comes. One state at a time: reasoning, content, or the inside
 * of a call. In the first two all text is passed on but for an end that may become a tag; a call is
 * kept until it ends, because only then is it known whether its JSON is whole.
 */
#include "base/alloc.h"
#include "base/json.h"
#include "chat/chat.h"
#include "chat/tagged_call.h"

#include <string.h>

typedef enum {
    STATE_BEGIN,     /* nothing but white space so far: <think> may come */
    STATE_THOUGHT,   /* right after <think>: a newline there belongs to the tag */
    STATE_REASONING, /* up to </think> */
    STATE_ANSWER,    /* right after </think>: two newlines there belong to the tag */
    STATE_CONTENT,   /* up to <tool_call> */
    STATE_CALL,      /* up to </tool_call> */
} state;

struct sp_chat_parser {
    sp_chat_delta_fn fn;
    void *user;
    bool reasoning, tools;
    json_t *tagged_tools; /* owned; see sp_chat_prompt */
    state state;
    size_t blanks;   /* STATE_BEGIN: white space at the beginning of `held`, counted once */
    size_t searched; /* STATE_CALL: bytes at the beginning of `held` where no end begins */
    bool newline;    /* there was one before the <tool_call> that is open */
    sp_text held;    /* not yet passed on */
    int32_t n_calls;
};

#define THINK_OPEN  "<think>"
#define THINK_CLOSE "</think>"
#define CALL_OPEN   "<tool_call>"
#define CALL_CLOSE  "</tool_call>"

sp_status sp_chat_parser_create(const sp_chat_prompt *prompt, sp_chat_delta_fn fn, void *user,
                                sp_chat_parser **out_parser, sp_error *error)
{
    sp_chat_parser *parser = sp_calloc(1, sizeof *parser);

    if (!parser)
        return sp_fail_memory(error, sizeof *parser, "the parser of an answer");
    parser->fn = fn;
    parser->user = user;
    parser->reasoning = prompt->reasoning;
    parser->tools = prompt->tools;
    parser->tagged_tools = json_incref(prompt->tagged_tools);
    parser->state = prompt->fresh       ? STATE_THOUGHT
                    : prompt->thinking  ? STATE_REASONING
                    : prompt->reasoning ? STATE_BEGIN
                                        : STATE_CONTENT;
    *out_parser = parser;
    return SP_OK;
}

void sp_chat_parser_free(sp_chat_parser *parser)
{
    if (!parser)
        return;
    sp_text_free(&parser->held);
    json_decref(parser->tagged_tools);
    sp_free(parser);
}

int32_t sp_chat_parser_n_calls(const sp_chat_parser *parser)
{
    return parser->n_calls;
}

/* --- Passing on ----------------------------------------------------------------------------- */

static void emit(sp_chat_parser *parser, sp_chat_delta_kind kind, const char *text, size_t bytes)
{
    const sp_chat_delta delta = {kind, parser->n_calls, text, bytes};

    if (bytes > 0)
        parser->fn(parser->user, &delta);
}

/* Takes the first `n` bytes away. */
static void drop(sp_chat_parser *parser, size_t n)
{
    sp_text *held = &parser->held;

    memmove(held->data, held->data + n, held->bytes - n);
    held->bytes -= n;
    held->data[held->bytes] = '\0';
}

static void pass_on(sp_chat_parser *parser, sp_chat_delta_kind kind, size_t n)
{
    if (n == 0)
        return;
    emit(parser, kind, parser->held.data, n);
    drop(parser, n);
}

/* --- Tags ----------------------------------------------------------------------------------- */

/* Where the tag is, from byte `from` on; SIZE_MAX: nowhere. */
static size_t find(const sp_text *text, const char *tag, size_t from)
{
    size_t n = strlen(tag);

    while (text->bytes >= n && from <= text->bytes - n) {
        const char *at = memchr(text->data + from, '<', text->bytes - n + 1 - from);

        if (!at || memcmp(at, tag, n) == 0)
            return at ? (size_t)(at - text->data) : SIZE_MAX;
        from = (size_t)(at - text->data) + 1;
    }
    return SIZE_MAX;
}

/* Bytes at the end that may be the beginning of `tag`, with one newline before it. */
static size_t possible_tag(const sp_text *text, const char *tag)
{
    size_t n = strlen(tag) - 1;

    for (n = n < text->bytes ? n : text->bytes; n > 0; n--)
        if (memcmp(text->data + text->bytes - n, tag, n) == 0)
            break;
    if (n < text->bytes && text->data[text->bytes - n - 1] == '\n')
        n++;
    return n;
}

/* The newlines at the beginning, at most `most`, that belong to the tag before them. False: there
 * may be more to come. */
static bool drop_newlines(sp_chat_parser *parser, size_t most, bool ended)
{
    size_t n = 0;

    while (n < most && n < parser->held.bytes && parser->held.data[n] == '\n')
        n++;
    if (n == parser->held.bytes && n < most && !ended)
        return false;
    if (n > 0)
        drop(parser, n);
    return true;
}

/*
 * Passes on what is before `tag` and takes the tag, with a newline before it. False: it is not
 * there, and all but a possible beginning of it was passed on.
 */
static bool up_to(sp_chat_parser *parser, const char *tag, sp_chat_delta_kind kind, bool ended)
{
    size_t at = find(&parser->held, tag, 0);
    size_t keep = ended ? 0 : possible_tag(&parser->held, tag);

    if (at == SIZE_MAX) {
        pass_on(parser, kind, parser->held.bytes - keep);
        return false;
    }
    parser->newline = at > 0 && parser->held.data[at - 1] == '\n';
    pass_on(parser, kind, at - parser->newline);
    drop(parser, strlen(tag) + parser->newline);
    return true;
}

/* --- Calls ---------------------------------------------------------------------------------- */

static const char *skip_blanks(const char *at)
{
    return at + strspn(at, " \t\r\n");
}

/* The end of a JSON value, in text that is known to be JSON. */
static const char *skip_value(const char *at)
{
    int depth = 0;

    do {
        if (*at == '"') {
            for (at++; *at != '"'; at++)
                at += *at == '\\';
            at++;
        } else if (*at == '{' || *at == '[') {
            depth++;
            at++;
        } else if (*at == '}' || *at == ']') {
            depth--;
            at++;
        } else if (depth == 0) { /* a number, or a word */
            return at + strcspn(at, ",}] \t\r\n");
        } else {
            at += strcspn(at, "\"{}[]");
        }
    } while (depth > 0);
    return at;
}

/* The text of "arguments" in the object at `at`, just as the model wrote it; NULL: not there. */
static const char *find_arguments(const char *at, size_t *out_bytes)
{
    static const char key[] = "\"arguments\"";

    at = skip_blanks(skip_blanks(at) + 1);
    while (*at == '"') {
        bool found = strncmp(at, key, sizeof key - 1) == 0;
        const char *value = skip_blanks(skip_blanks(skip_value(at)) + 1);

        at = skip_value(value);
        if (found) {
            *out_bytes = (size_t)(at - value);
            return value;
        }
        at = skip_blanks(at);
        at = skip_blanks(at + (*at == ','));
    }
    return NULL;
}

static void emit_call(sp_chat_parser *parser, const char *name, size_t name_bytes,
                      const char *arguments, size_t bytes)
{
    emit(parser, SP_CHAT_TOOL_CALL, name, name_bytes);
    emit(parser, SP_CHAT_TOOL_ARGUMENTS, arguments, bytes);
    parser->n_calls++;
}

/* A name and arguments, and nothing else: what another member means is not known here, and a call
 * without it may be another call. */
static bool is_call(const json_t *root)
{
    const json_t *name = json_object_get(root, "name");
    const json_t *arguments = json_object_get(root, "arguments");

    return json_is_string(name) && json_string_length(name) > 0 &&
           (!arguments || json_is_object(arguments)) &&
           json_object_size(root) == (arguments ? 2u : 1u);
}

/* The call whose JSON these bytes are. SP_ERR_INPUT: they are none. */
static sp_status json_call(sp_chat_parser *parser, const char *json, size_t bytes)
{
    json_t *root = NULL;
    sp_status status = sp_json_parse(json, bytes, CALL_OPEN, NULL, NULL, &root, NULL);
    const json_t *name = json_object_get(root, "name");
    size_t n = 2;
    const char *text = "{}";

    if (status != SP_OK)
        return status;
    if (!is_call(root))
        text = NULL;
    else if (json_object_get(root, "arguments"))
        text = find_arguments(json, &n);
    if (text)
        emit_call(parser, json_string_value(name), json_string_length(name), text, n);
    json_decref(root);
    return text ? SP_OK : SP_ERR_INPUT;
}

static sp_status tagged_call(sp_chat_parser *parser, const char *text, size_t bytes)
{
    sp_text arguments = {0};
    const char *name;
    size_t n;
    sp_status status =
        sp_tagged_call_read(text, bytes, parser->tagged_tools, &name, &n, &arguments);

    if (status == SP_OK)
        emit_call(parser, name, n, arguments.data, arguments.bytes);
    sp_text_free(&arguments);
    return status;
}

/* What was searched once is not searched again: a call may be long, and come by the byte. */
static size_t find_call_end(sp_chat_parser *parser)
{
    size_t at = find(&parser->held, CALL_CLOSE, parser->searched);
    size_t tail = strlen(CALL_CLOSE) - 1;

    parser->searched = parser->held.bytes > tail ? parser->held.bytes - tail : 0;
    return at;
}

/* The text after <tool_call>, when it is complete or the answer has ended. False: not yet. */
static sp_status close_call(sp_chat_parser *parser, bool ended, bool *out_more, sp_error *error)
{
    size_t at = find_call_end(parser);
    size_t bytes = at != SIZE_MAX ? at : parser->held.bytes;
    size_t taken = at != SIZE_MAX ? at + strlen(CALL_CLOSE) : bytes;
    sp_status status;
    char *call;

    *out_more = at != SIZE_MAX || ended;
    if (!*out_more)
        return SP_OK;
    call = sp_calloc(bytes + 1, 1); /* with a NUL after it, for the scanner of arguments */
    if (!call)
        return sp_fail_memory(error, bytes, "a tool call");
    if (bytes > 0)
        memcpy(call, parser->held.data, bytes);
    status = json_call(parser, call, bytes);
    if (status == SP_ERR_INPUT && parser->tagged_tools)
        status = tagged_call(parser, call, bytes);
    sp_free(call);
    if (status == SP_ERR_INPUT) {
        emit(parser, SP_CHAT_CONTENT, parser->newline ? "\n" CALL_OPEN : CALL_OPEN,
             strlen(CALL_OPEN) + parser->newline);
        emit(parser, SP_CHAT_CONTENT, parser->held.data, taken);
    } else if (status != SP_OK) {
        return sp_fail_memory(error, bytes, "a tool call");
    }
    if (taken > 0)
        drop(parser, taken);
    parser->searched = 0;
    parser->state = STATE_CONTENT;
    return SP_OK;
}

/* --- States --------------------------------------------------------------------------------- */

/* White space, however much, may precede <think>; anything else means that there will be none.
 * `held` is not empty. */
static bool begin(sp_chat_parser *parser, bool ended)
{
    const sp_text *held = &parser->held;
    size_t left, n = strlen(THINK_OPEN);

    parser->blanks += strspn(held->data + parser->blanks, " \t\r\n");
    left = held->bytes - parser->blanks;
    if (left >= n && memcmp(held->data + parser->blanks, THINK_OPEN, n) == 0) {
        drop(parser, parser->blanks + n);
        parser->state = STATE_THOUGHT;
        return true;
    }
    if (!ended && left < n && memcmp(held->data + parser->blanks, THINK_OPEN, left) == 0)
        return false;
    parser->state = STATE_CONTENT;
    return true;
}

/* One move to another state; *out_more is false when there is nothing to do but wait. */
static sp_status move(sp_chat_parser *parser, bool ended, bool *out_more, sp_error *error)
{
    *out_more = false;
    switch (parser->state) {
    case STATE_BEGIN:
        *out_more = begin(parser, ended);
        return SP_OK;
    case STATE_THOUGHT:
        *out_more = drop_newlines(parser, 1, ended);
        parser->state = *out_more ? STATE_REASONING : STATE_THOUGHT;
        return SP_OK;
    case STATE_REASONING:
        *out_more = up_to(parser, THINK_CLOSE, SP_CHAT_REASONING, ended);
        parser->state = *out_more ? STATE_ANSWER : STATE_REASONING;
        return SP_OK;
    case STATE_ANSWER:
        *out_more = drop_newlines(parser, 2, ended);
        parser->state = *out_more ? STATE_CONTENT : STATE_ANSWER;
        return SP_OK;
    case STATE_CONTENT:
        if (!parser->tools) {
            pass_on(parser, SP_CHAT_CONTENT, parser->held.bytes);
            return SP_OK;
        }
        *out_more = up_to(parser, CALL_OPEN, SP_CHAT_CONTENT, ended);
        parser->state = *out_more ? STATE_CALL : STATE_CONTENT;
        return SP_OK;
    default:
        return close_call(parser, ended, out_more, error);
    }
}

static sp_status advance(sp_chat_parser *parser, bool ended, sp_error *error)
{
    bool more = true;
    sp_status status = SP_OK;

    /* At the end an empty rest stops the moves, but for a call that is open. */
    while (status == SP_OK && more && (parser->held.bytes > 0 || parser->state == STATE_CALL))
        status = move(parser, ended, &more, error);
    return status;
}

sp_status sp_chat_parser_push(sp_chat_parser *parser, const char *text, size_t bytes,
                              sp_error *error)
{
    if (bytes == 0)
        return SP_OK;
    sp_text_add_bytes(&parser->held, text, bytes);
    if (parser->held.failed)
        return sp_fail_memory(error, bytes, "the text of an answer");
    return advance(parser, false, error);
}

sp_status sp_chat_parser_finish(sp_chat_parser *parser, sp_error *error)
{
    return advance(parser, true, error);
}
