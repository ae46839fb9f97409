/*
 * A request's JSON through the built-in form: a prompt or an error that names a field. What the
 * template did not write is found in the request, byte by byte: no special token comes from it.
 */
#include "fuzz/target.h"

#include "base/json.h"
#include "chat/chat_state.h"

#include <string.h>

static sp_chat *chat; /* stays open for the life of the program */

/* Between the marks of turns, which are the template's, there is no other one of its. */
static void check_marks(const sp_chat_prompt *prompt)
{
    int open = 0;

    for (size_t i = 0; i < prompt->n_spans; i++) {
        const char *at = prompt->text.data + prompt->spans[i].begin;
        const char *end = prompt->text.data + prompt->spans[i].end;

        for (; at < end; at++) {
            if (end - at >= 12 && memcmp(at, "<|im_start|>", 12) == 0)
                FUZZ_CHECK(open++ == 0);
            if (end - at >= 10 && memcmp(at, "<|im_end|>", 10) == 0)
                FUZZ_CHECK(open-- == 1);
        }
    }
}

static void render(const json_t *root)
{
    sp_chat_request request;
    sp_chat_prompt prompt = {0};
    sp_error error = {.code = ""};
    sp_status status;

    sp_chat_request_default(&request);
    request.messages = json_object_get(root, "messages");
    request.tools = json_object_get(root, "tools");
    request.tool_choice = json_object_get(root, "tool_choice");
    request.template_kwargs = json_object_get(root, "chat_template_kwargs");
    request.continue_final_message = json_is_true(json_object_get(root, "continue_final_message"));
    request.add_generation_prompt = !request.continue_final_message;
    status = sp_chat_render(chat, &request, &prompt, &error);
    FUZZ_CHECK(status == SP_OK || (status < 0 && error.code[0] != '\0' && error.text[0] != '\0'));
    FUZZ_CHECK(status != SP_ERR_UNSUPPORTED);
    if (status == SP_OK) {
        FUZZ_CHECK(sp_utf8_valid(prompt.text.data, prompt.text.bytes));
        check_marks(&prompt);
    }
    sp_chat_prompt_free(&prompt);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    json_t *root = NULL;
    sp_error error;

    if (!chat)
        FUZZ_CHECK(sp_chat_parse(sp_qwen_form, strlen(sp_qwen_form), "t", NULL, &chat, &error) ==
                   SP_OK);
    if (sp_json_parse((const char *)data, bytes, "input", NULL, NULL, &root, &error) != SP_OK)
        return 0;
    render(root);
    json_decref(root);
    return 0;
}
