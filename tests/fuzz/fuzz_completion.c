/*
 * Bodies of POST /v1/completions, /v1/chat/completions and /v1/responses: any bytes give a request
 * within its limits, or an error that is printable text and leaks nothing.
 */
#include "fuzz/target.h"

#include "base/alloc.h"
#include "base/text.h"
#include "engine/sampling/stop.h"
#include "server/api/chat_request.h"
#include "server/api/completion_request.h"
#include "server/api/responses_request.h"

#include <string.h>

static void check_request(const sp_completion_request *request)
{
    sp_request engine = request->fields.request;

    FUZZ_CHECK(request->n_prompts >= 1 && request->n_prompts <= SP_PROMPTS_MAX);
    FUZZ_CHECK(request->fields.n >= 1 && request->fields.n <= SP_N_MAX);
    FUZZ_CHECK(engine.max_tokens >= 0);
    FUZZ_CHECK(engine.temperature >= 0 && engine.top_p >= 0 && engine.top_p <= 1);
    FUZZ_CHECK(engine.lora_scale >= 0 && engine.lora_scale <= 16);
    FUZZ_CHECK(engine.n_stop >= 0 && engine.n_stop <= SP_STOP_STRINGS_MAX);
    for (int32_t i = 0; i < engine.n_stop; i++)
        FUZZ_CHECK(engine.stop[i][0] != '\0' && strlen(engine.stop[i]) <= SP_STOP_TEXT_BYTES_MAX);
    for (int32_t i = 0; i < request->n_prompts; i++) {
        const sp_prompt *prompt = &request->prompts[i];

        if (prompt->text)
            FUZZ_CHECK(sp_utf8_valid(prompt->text, prompt->text_bytes));
        else
            FUZZ_CHECK(prompt->n_tokens >= 1 && prompt->tokens[prompt->n_tokens - 1] >= 0);
    }
}

static void check_error(sp_status status, const sp_error *error)
{
    FUZZ_CHECK(status == SP_ERR_INPUT && error->text[0] != '\0');
    FUZZ_CHECK(sp_utf8_valid(error->text, strlen(error->text)));
}

static void read_completion(json_t *body)
{
    const sp_request defaults = sp_request_left_out(SP_LEFT_OUT_API);
    sp_completion_request request;
    sp_error error;
    sp_status status = sp_completion_request_read(body, &defaults, &request, &error);

    if (status != SP_OK) {
        check_error(status, &error);
        return;
    }
    check_request(&request);
    sp_completion_request_free(&request);
}

static void read_chat(json_t *body)
{
    const sp_request defaults = sp_request_left_out(SP_LEFT_OUT_API);
    sp_chat_completion_request request;
    sp_error error;
    sp_status status = sp_chat_completion_request_read(body, &defaults, &request, &error);

    if (status != SP_OK) {
        check_error(status, &error);
        return;
    }
    FUZZ_CHECK(json_array_size(request.chat.messages) > 0);
    FUZZ_CHECK(request.fields.request.max_tokens != 0 && request.fields.n >= 1);
    sp_chat_completion_request_free(&request);
}

static void read_responses(json_t *body)
{
    json_t *chat;
    sp_error error;
    sp_status status = sp_responses_to_chat(body, &chat, &error);

    if (status != SP_OK) {
        check_error(status, &error);
        return;
    }
    FUZZ_CHECK(json_array_size(json_object_get(chat, "messages")) > 0);
    read_chat(chat);
    json_decref(chat);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    sp_error error;
    json_t *body;
    size_t before = sp_alloc_bytes();

    if (sp_json_parse((const char *)data, bytes, "body", NULL, NULL, &body, &error) != SP_OK)
        return 0;
    if (json_is_object(body)) {
        read_completion(body);
        read_chat(body);
        read_responses(body);
    }
    json_decref(body);
    FUZZ_CHECK(sp_alloc_bytes() == before);
    return 0;
}
