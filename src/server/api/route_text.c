/*
 * route_text.c: POST /tokenize and /detokenize, for clients that count or cut tokens, and GET
 * /tokenizer_info, for those that want to know its special tokens. `model` must be a name that the
 * server knows, as on every other route.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "server/api/api.h"
#include "server/api/chat_request.h"
#include "server/api/messages_request.h"

#include <string.h>
#include <time.h>

#define CONTEXTS_MAX 8 /* of a text to be counted */

/* The answer waits here while the engine's thread looks up the model's name. */
typedef struct text_state {
    sp_text body;
    char *adapter;
    json_t *messages; /* the request, whose answer needs the adapter's template; NULL: it is made */
} text_state;

static sp_status tokenize_with(const sp_call *call, const json_t *body, const sp_lora_chat *lora,
                               sp_text *out, sp_error *error);

static void destroy(void *state)
{
    text_state *text = state;

    sp_text_free(&text->body);
    json_decref(text->messages);
    sp_free(text->adapter);
    sp_free(text);
}

/* By the template of the adapter, which is loaded, or whose folder was looked up. */
static void answer_messages(sp_call *call, const sp_lora_task *task)
{
    text_state *state = call->state;
    sp_lora_chat *lora;
    bool loaded = sp_lora_chats_find(call->api->chats, state->adapter, &lora);
    sp_error error = task->look_up_error;
    sp_status status = loaded ? SP_OK : error.status;

    if (status == SP_OK)
        status =
            tokenize_with(call, state->messages, loaded ? lora : task->chat, &state->body, &error);
    sp_lora_chat_release(lora);
    if (status == SP_OK)
        sp_call_answer_json(call, &state->body);
    else
        sp_call_fail(call, status, &error);
}

static void answer(sp_call *call)
{
    text_state *state = call->state;
    const sp_lora_task *task = (sp_lora_task *)(void *)call->task;
    const sp_snapshot *snapshot = &task->snapshot;
    bool hidden, known;

    if (!sp_task_is_done(call->task))
        return;
    if (task->task.status != SP_OK) {
        sp_call_fail(call, task->task.status, &task->task.error);
        return;
    }
    hidden = sp_snapshot_is_hidden(snapshot, state->adapter);
    known = sp_snapshot_find(snapshot, state->adapter) || (task->path && !hidden) ||
            (!hidden && sp_peers_have(call->api->settings->opened_peers, state->adapter));
    if (known && state->messages)
        answer_messages(call, task);
    else if (known)
        sp_call_answer_json(call, &state->body);
    else if (!hidden && !task->looked_up && sp_api_may_have_folder(call->api, state->adapter))
        sp_call_wait_lora(call, sp_lora_task_create_list(state->adapter), answer);
    else
        sp_call_refuse(call, 404, NULL, "model", "model_not_found", "there is no model \"%.255s\"",
                       state->adapter);
}

/* Takes *text; without any, it is made of the messages in `body` when the adapter is known. */
static void ask_for_model(sp_call *call, const json_t *body, const char *adapter, sp_text *text)
{
    text_state *state = sp_calloc(1, sizeof *state);

    if (state) {
        *state = (text_state){*text, sp_strdup(adapter),
                              text->bytes > 0 ? NULL : json_incref((json_t *)(uintptr_t)body)};
        call->state = state;
        call->free_state = destroy;
        call->model = sp_strdup(json_string_value(json_object_get(body, "model")));
    }
    if (state && state->adapter) {
        sp_call_wait_lora(call, sp_lora_task_create(SP_TASK_LIST, NULL, NULL), answer);
        return;
    }
    if (!state)
        sp_text_free(text);
    sp_call_refuse(call, 503, NULL, NULL, "out-of-memory", "out of memory");
}

static const char *adapter_of(const sp_call *call, const json_t *body)
{
    return sp_api_model(call->api, json_string_value(json_object_get(body, "model")));
}

/* Takes *text. The base needs no question. */
static void answer_for_model(sp_call *call, const json_t *body, sp_text *text)
{
    const char *adapter = adapter_of(call, body);

    if (!adapter || strcmp(adapter, sp_engine_base_name(call->api->engine)) == 0)
        sp_call_answer_json(call, text);
    else
        ask_for_model(call, body, adapter, text);
}

static sp_status check_fields(const json_t *body, sp_field_set set, sp_error *error)
{
    const char *unused;
    sp_status status = sp_body_fields_check(body, set, error);

    return status == SP_OK ? sp_json_string(body, "model", false, NULL, &unused, error) : status;
}

/* ---- to ids -------------------------------------------------------------------------------- */

static void add_tokens(const sp_call *call, sp_text *out, const int32_t *tokens, int32_t n)
{
    const sp_engine *engine = call->api->engine;

    if (call->route->fields & SP_FIELDS_MESSAGES) {
        sp_text_format(out, "{\"input_tokens\": %d", n);
        return;
    }
    sp_text_format(out, "{\"count\": %d, \"max_model_len\": %d, \"tokens\": [", n,
                   sp_engine_max_context(engine));
    for (int32_t i = 0; i < n; i++)
        sp_text_format(out, "%s%d", i ? ", " : "", tokens[i]);
    sp_text_add(out, "]");
}

static void add_token_texts(sp_text *out, const sp_engine *engine, const int32_t *tokens, int32_t n)
{
    sp_text_add(out, ", \"token_strs\": [");
    for (int32_t i = 0; i < n; i++) {
        size_t bytes;
        const char *text = sp_engine_token_bytes(engine, tokens[i], &bytes);

        sp_text_add(out, i ? ", " : "");
        sp_text_json_string(out, text ? text : "", bytes);
    }
    sp_text_add(out, "]");
}

/* Texts to be cut are longer than the context, but all of this runs on a thread that has other
 * clients. */
static int32_t tokens_max(const sp_engine *engine)
{
    int32_t context = sp_engine_max_context(engine);

    return context > INT32_MAX / CONTEXTS_MAX ? INT32_MAX : context * CONTEXTS_MAX;
}

static sp_status encode_prompt(const sp_call *call, const json_t *body, int32_t **out_tokens,
                               int32_t *out_n, sp_error *error)
{
    const sp_engine *engine = call->api->engine;
    const char *prompt;
    bool parse_special = false, add_special = true;
    sp_status status = sp_json_string(body, "prompt", true, NULL, &prompt, error);

    if (status == SP_OK)
        status = sp_json_bool(body, "parse_special", false, false, NULL, &parse_special, error);
    if (status == SP_OK)
        status = sp_json_bool(body, "add_special_tokens", false, true, NULL, &add_special, error);
    if (status != SP_OK)
        return status;
    return (add_special ? sp_engine_encode_prompt : sp_engine_encode)(
        engine, prompt, json_string_length(json_object_get(body, "prompt")), parse_special,
        tokens_max(engine), out_tokens, out_n, error);
}

static bool has_messages(const json_t *body)
{
    const json_t *messages = json_object_get(body, "messages");

    return messages && !json_is_null(messages);
}

/* A conversation as chat would put it to the model. */
static sp_status encode_messages(const sp_call *call, const json_t *body, const sp_lora_chat *lora,
                                 int32_t **out_tokens, int32_t *out_n, sp_error *error)
{
    const sp_api *api = call->api;
    const sp_chat *chat;
    sp_chat_prompt prompt = {.n_spans = 0};
    sp_chat_request request;
    bool add_special = false;
    sp_status status =
        sp_json_bool(body, "add_special_tokens", false, false, NULL, &add_special, error);

    if (status != SP_OK)
        return status;
    if (add_special)
        return sp_fail(error, SP_ERR_INPUT, SP_CODE_UNSUPPORTED_FIELD, "add_special_tokens", -1,
                       "with \"messages\", \"add_special_tokens\" must be false: the template "
                       "writes these tokens");
    if (json_object_get(body, "prompt"))
        return sp_fail(error, SP_ERR_INPUT, NULL, "messages", -1,
                       "\"prompt\" and \"messages\" exclude each other");
    status = sp_api_chat(api, lora, &chat, error);
    if (status == SP_OK)
        status = sp_chat_request_read(body, &request, error);
    request.unix_seconds = (int64_t)time(NULL);
    if (status == SP_OK)
        status = sp_chat_render(chat, &request, &prompt, error);
    if (status == SP_OK)
        status = sp_chat_tokenize(api->engine, &prompt, tokens_max(api->engine), out_tokens, out_n,
                                  error);
    sp_chat_prompt_free(&prompt);
    return status;
}

static sp_status tokenize_with(const sp_call *call, const json_t *body, const sp_lora_chat *lora,
                               sp_text *out, sp_error *error)
{
    const sp_engine *engine = call->api->engine;
    bool texts = false;
    int32_t *tokens = NULL;
    int32_t n = 0;
    sp_status status = sp_json_bool(body, "return_token_strs", false, false, NULL, &texts, error);

    if (status == SP_OK && has_messages(body))
        status = encode_messages(call, body, lora, &tokens, &n, error);
    else if (status == SP_OK)
        status = encode_prompt(call, body, &tokens, &n, error);
    if (status != SP_OK)
        return status;
    add_tokens(call, out, tokens, n);
    if (texts)
        add_token_texts(out, engine, tokens, n);
    sp_text_add(out, "}\n");
    sp_engine_free(tokens);
    return SP_OK;
}

/* Without a text where the messages are for an adapter that is not loaded. */
static sp_status tokenize(const sp_call *call, const json_t *body, sp_text *out, sp_error *error)
{
    sp_status status = check_fields(body, SP_FIELDS_TOKENIZE, error);
    sp_lora_chat *lora = NULL;
    bool known;

    if (status != SP_OK)
        return status;
    known = sp_lora_chats_find(call->api->chats, adapter_of(call, body), &lora);
    if (known || !has_messages(body))
        status = tokenize_with(call, body, lora, out, error);
    sp_lora_chat_release(lora);
    return status;
}

/* ---- to text ------------------------------------------------------------------------------- */

static sp_status detokenize(const sp_call *call, const json_t *body, sp_text *out, sp_error *error)
{
    const json_t *list = json_object_get(body, "tokens");
    int32_t *tokens = NULL;
    int32_t n = 0;
    char *text = NULL;
    size_t bytes = 0;
    sp_status status = check_fields(body, SP_FIELDS_DETOKENIZE, error);

    if (status == SP_OK && !json_is_array(list))
        status = sp_fail(error, SP_ERR_INPUT, NULL, "tokens", -1,
                         "field \"tokens\" must be a list of token ids");
    if (status == SP_OK && json_array_size(list) > 0)
        status = sp_field_read_ids(list, "tokens", &tokens, &n, error);
    if (status == SP_OK)
        status = sp_engine_decode(call->api->engine, tokens, n, false, &text, &bytes, error);
    sp_free(tokens);
    if (status != SP_OK)
        return status;
    sp_text_add(out, "{\"prompt\": ");
    sp_text_json_string(out, text, bytes);
    sp_text_add(out, "}\n");
    sp_engine_free(text);
    return SP_OK;
}

typedef sp_status (*convert_fn)(const sp_call *call, const json_t *body, sp_text *out,
                                sp_error *error);

/* Takes the reference to the body; NULL: the call is answered. */
static void convert_body(sp_call *call, convert_fn function, json_t *body)
{
    sp_text out = {0};
    sp_error error;
    sp_status status;

    if (!body)
        return;
    status = function(call, body, &out, &error);
    if (status == SP_OK)
        answer_for_model(call, body, &out);
    else
        sp_call_fail(call, status, &error);
    json_decref(body);
}

static void convert(sp_call *call, convert_fn function)
{
    convert_body(call, function, sp_call_body(call));
}

void sp_handle_tokenize(sp_call *call)
{
    convert(call, tokenize);
}

/* What a prompt of /v1/messages would take. */
void sp_handle_count_tokens(sp_call *call)
{
    json_t *body = sp_call_body(call), *chat = NULL;
    sp_error error;

    if (body && sp_messages_to_chat(body, true, &chat, &error) != SP_OK)
        sp_call_fail(call, error.status, &error);
    json_decref(body);
    convert_body(call, tokenize, chat);
}

void sp_handle_detokenize(sp_call *call)
{
    convert(call, detokenize);
}

/* ---- the tokenizer itself ------------------------------------------------------------------ */

static int add_json(const char *bytes, size_t n, void *user)
{
    sp_text_add_bytes(user, bytes, n);
    return 0;
}

void sp_handle_tokenizer_info(sp_call *call)
{
    const json_t *config = call->api->tokenizer_config;
    sp_text body = {0};

    if (!config) {
        sp_call_refuse(call, 501, NULL, NULL, SP_CODE_NO_TOKENIZER,
                       "the model's folder has no tokenizer_config.json");
        return;
    }
    if (json_dump_callback(config, add_json, &body, JSON_ENSURE_ASCII) != 0)
        body.failed = true;
    sp_text_add(&body, "\n");
    sp_call_answer_json(call, &body);
}
