/*
 * How the template closes a turn of the assistant: the model was trained to write that token where
 * its answer ends, whatever the configuration of the base says. Found by rendering two answers, one
 * of text and one that is a call, and reading the ids after what was put into them.
 */
#include "base/alloc.h"
#include "chat/chat_state.h"

#include <string.h>

#define PROBE "sidepathprobe" /* no template changes a plain word */

static const char text_messages[] = "[{\"role\": \"user\", \"content\": \"a\"},"
                                    " {\"role\": \"assistant\", \"content\": \"" PROBE "\"}]";
static const char call_messages[] =
    "[{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": \"\","
    " \"tool_calls\": [{\"type\": \"function\", \"id\": \"000000000\","
    " \"function\": {\"name\": \"" PROBE "\", \"arguments\": {}}}]}]";
static const char probe_tools[] =
    "[{\"type\": \"function\", \"function\": {\"name\": \"" PROBE "\", \"description\": \"a\","
    " \"parameters\": {\"type\": \"object\", \"properties\": {}}}}]";

static bool is_blank(const sp_engine *engine, int32_t token)
{
    size_t bytes;
    const char *text = sp_engine_token_bytes(engine, token, &bytes);

    for (size_t i = 0; i < bytes; i++)
        if (!memchr(" \t\r\n", text[i], 4))
            return false;
    return true;
}

/* The special token there with nothing but white space around it; -1: none. After text it is the
 * first, which others may follow; after a call the last, because calls may have marks of their
 * own. */
static int32_t find_end(const sp_engine *engine, const int32_t *tokens, int32_t n, bool last)
{
    int32_t step = last ? -1 : 1;

    for (int32_t i = last ? n - 1 : 0; i >= 0 && i < n; i += step) {
        if (sp_engine_token_is_special(engine, tokens[i]))
            return tokens[i];
        if (!is_blank(engine, tokens[i]))
            return -1;
    }
    return -1;
}

static const char *after_probe(const sp_text *text)
{
    const char *found = text->data, *after = NULL;

    while (found && (found = strstr(found, PROBE)) != NULL)
        after = found += strlen(PROBE);
    return after;
}

static void add_end(sp_chat *chat, int32_t token)
{
    for (int32_t i = 0; i < chat->n_turn_ends; i++)
        if (chat->turn_ends[i] == token)
            return;
    if (token >= 0 && chat->n_turn_ends < SP_CHAT_TURN_ENDS_MAX)
        chat->turn_ends[chat->n_turn_ends++] = token;
}

/* A template that refuses the probe, or does not show it, closes no turn of this kind. */
static sp_status probe(sp_chat *chat, const sp_engine *engine, const char *messages,
                       const char *tools)
{
    json_t *conversation = json_loads(messages, 0, NULL);
    json_t *functions = tools ? json_loads(tools, 0, NULL) : NULL;
    int32_t *tokens = NULL, n = 0;
    sp_chat_prompt prompt = {0};
    sp_chat_request request;
    const char *tail = NULL;
    sp_status status = SP_ERR_MEMORY;

    sp_chat_request_default(&request);
    request.messages = conversation;
    request.tools = functions;
    request.add_generation_prompt = false;
    if (conversation && (functions || !tools))
        status = sp_chat_render(chat, &request, &prompt, NULL);
    if (status == SP_OK)
        tail = after_probe(&prompt.text);
    if (tail)
        status = sp_engine_encode(engine, tail, strlen(tail), true, 0, &tokens, &n, NULL);
    if (tail && status == SP_OK)
        add_end(chat, find_end(engine, tokens, n, messages == call_messages));
    sp_engine_free(tokens);
    sp_chat_prompt_free(&prompt);
    json_decref(functions);
    json_decref(conversation);
    return status == SP_ERR_MEMORY ? status : SP_OK;
}

sp_status sp_chat_find_turn_ends(sp_chat *chat, const sp_engine *engine)
{
    sp_status status = probe(chat, engine, text_messages, NULL);

    if (status == SP_OK && chat->with_tools.body)
        status = probe(chat, engine, text_messages, probe_tools);
    if (status == SP_OK)
        status = probe(chat, engine, call_messages, probe_tools);
    return status;
}

const int32_t *sp_chat_turn_ends(const sp_chat *chat, int32_t *out_n)
{
    *out_n = chat->n_turn_ends;
    return chat->turn_ends;
}
