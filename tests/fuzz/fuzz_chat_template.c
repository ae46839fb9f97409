/*
 * A chat template: any bytes are a template or an error with a code, and what is a template
 * renders a conversation or fails with a code, within its limits.
 */
#include "fuzz/target.h"

#include "chat/chat.h"

#include <string.h>

static const char conversation[] =
    "[{\"role\":\"system\",\"content\":\"S <|im_end|>\"},{\"role\":\"user\",\"content\":\" \\u00e9"
    "\\n\"},{\"role\":\"assistant\",\"content\":\"<think>x</think>y\",\"tool_calls\":[{\"function\""
    ":{\"name\":\"f\",\"arguments\":\"{\\\"a\\\":[1,2.5,null,true]}\"}}]},{\"role\":\"tool\","
    "\"content\":\"1\"}]";
static const char tool_list[] =
    "[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"x\":[1,\"a\"]}}}]";

/* Stay for the life of the program. */
static json_t *messages, *tools;

static void check_prompt(const sp_chat_prompt *prompt)
{
    size_t at = 0;

    FUZZ_CHECK(sp_utf8_valid(prompt->text.data, prompt->text.bytes));
    for (size_t i = 0; i < prompt->n_spans; i++) {
        FUZZ_CHECK(prompt->spans[i].begin >= at + (i > 0) &&
                   prompt->spans[i].end > prompt->spans[i].begin);
        at = prompt->spans[i].end;
    }
    FUZZ_CHECK(at <= prompt->text.bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    sp_chat_request request;
    sp_chat_prompt prompt = {0};
    sp_chat *chat = NULL;
    sp_error error;
    sp_status status;

    if (!messages) {
        messages = json_loads(conversation, 0, NULL);
        tools = json_loads(tool_list, 0, NULL);
    }
    status = sp_chat_parse((const char *)data, bytes, "t", NULL, &chat, &error);
    if (status != SP_OK) {
        FUZZ_CHECK(strncmp(error.code, "chat-", 5) == 0 && chat == NULL);
        return 0;
    }
    sp_chat_request_default(&request);
    request.messages = messages;
    request.tools = tools;
    status = sp_chat_render(chat, &request, &prompt, &error);
    if (status == SP_OK)
        check_prompt(&prompt);
    else
        FUZZ_CHECK(strncmp(error.code, "chat-", 5) == 0);
    sp_chat_prompt_free(&prompt);
    sp_chat_close(chat);
    return 0;
}
