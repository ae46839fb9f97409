/*
 * Generated text: cut anywhere it gives the same message as whole, and without tools and tags it
 * comes out as it went in. The first byte holds the flags and the length of the pieces.
 */
#include "fuzz/target.h"

#include "chat/chat.h"

#include <string.h>

static const char tool_list[] =
    "[{\"function\":{\"name\":\"f\",\"parameters\":{\"properties\":{\"s\":{\"type\":\"string\"},"
    "\"i\":{\"type\":\"integer\"},\"n\":{\"type\":[\"string\",\"null\"]},\"a\":{}}}}}]";
static json_t *tools; /* stay for the life of the program */

/* Each delta with its kind before it; neighbours of one kind as one. */
typedef struct {
    sp_text text;
    int last;
} record;

static void take(void *user, const sp_chat_delta *delta)
{
    record *into = user;

    FUZZ_CHECK(delta->bytes > 0);
    if ((int)delta->kind != into->last || delta->kind == SP_CHAT_TOOL_CALL)
        sp_text_format(&into->text, "|%d.%d|", (int)delta->kind, (int)delta->call);
    into->last = (int)delta->kind;
    sp_text_add_bytes(&into->text, delta->text, delta->bytes);
}

static record parse(const char *text, size_t bytes, size_t step, unsigned flags)
{
    const sp_chat_prompt prompt = {.thinking = flags & 1,
                                   .fresh = (flags & 3) == 3,
                                   .reasoning = (flags & 3) != 0,
                                   .tools = (flags & 4) != 0,
                                   .tagged_tools = flags & 8 ? tools : NULL};
    record into = {.last = -1};
    sp_chat_parser *parser = NULL;
    sp_error error;

    FUZZ_CHECK(sp_chat_parser_create(&prompt, take, &into, &parser, &error) == SP_OK);
    for (size_t at = 0; at < bytes; at += step)
        FUZZ_CHECK(sp_chat_parser_push(parser, text + at, step < bytes - at ? step : bytes - at,
                                       &error) == SP_OK);
    FUZZ_CHECK(sp_chat_parser_finish(parser, &error) == SP_OK);
    sp_chat_parser_free(parser);
    return into;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    record whole, cut;
    const char *text;

    if (bytes < 2)
        return 0;
    if (!tools)
        tools = json_loads(tool_list, 0, NULL);
    text = (const char *)data + 1;
    whole = parse(text, bytes - 1, bytes - 1, data[0] & 15);
    cut = parse(text, bytes - 1, (size_t)(data[0] >> 4) + 1, data[0] & 15);
    FUZZ_CHECK(whole.text.bytes == cut.text.bytes &&
               memcmp(whole.text.data ? whole.text.data : "", cut.text.data ? cut.text.data : "",
                      cut.text.bytes) == 0);
    sp_text_free(&whole.text);
    sp_text_free(&cut.text);
    whole = parse(text, bytes - 1, 1, 0);
    FUZZ_CHECK(whole.text.bytes == bytes - 1 + strlen("|0.0|") &&
               memcmp(whole.text.data + strlen("|0.0|"), text, bytes - 1) == 0);
    sp_text_free(&whole.text);
    return 0;
}
