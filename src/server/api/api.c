/*
 * api.c: bodies in, errors out, and waiting for tasks.
 */
#include "server/api/api.h"

#include "base/alloc.h"
#include "base/confine.h"
#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* ---- what an error is answered with --------------------------------------------------------- */

typedef struct code_status {
    const char *code;
    int http_status;
} code_status;

/* Where the reason says more than the library's status. 503 and 429: try again later. */
static const code_status by_code[] = {
    {SP_CODE_WEIGHTS_CHANGED, 503},
    {SP_CODE_WEIGHTS_REPLACED, 503},
    {SP_CODE_SHUTTING_DOWN, 503},
    {SP_CODE_REQUEST_TIMEOUT, 504},
    {"name-taken", 400},
    {"generation-changed", 409},
    {SP_CODE_ADAPTER_NOT_FOUND, 404},
    {"load-cancelled", 409},
    {"pinned", 409},
    {"peer-not-found", 404},
    {SP_CODE_SHARED_ELSEWHERE, 403},
    {"body-too-large", 413},
    {SP_CODE_STORE_FAILED, 503},
    {SP_CODE_ADAPTER_NON_FINITE, 500},
    {SP_CODE_LOGITS_NON_FINITE, 500},
    {SP_CODE_NO_TOKENIZER, 501},
    {SP_CHAT_NO_TEMPLATE, 501},
    {SP_CHAT_MALFORMED, 501},
    {SP_CHAT_UNSUPPORTED, 501},
    {SP_CODE_GENERATION_CONFIG, 501},
};

typedef struct status_default {
    sp_status status;
    int http_status;
    const char *code;
} status_default;

static const status_default by_status[] = {
    {SP_AGAIN, 429, "queue-full"},
    {SP_BUSY, 503, "busy"},
    {SP_PENDING, 503, "busy"},
    {SP_POOL_FULL, 503, "pool-full"},
    {SP_ERR_SLOTS_PINNED, 409, "slots-pinned"},
    {SP_ERR_STATE, 409, "conflict"},
    {SP_ERR_NOT_FOUND, 404, "model_not_found"},
    {SP_ERR_ARGUMENT, 400, SP_CODE_INVALID_VALUE},
    {SP_ERR_UNSUPPORTED, 400, "unsupported"},
    {SP_ERR_INPUT, 400, SP_CODE_INVALID_VALUE},
    {SP_ERR_TRUNCATED, 400, "truncated"},
    {SP_ERR_REFUSED, 400, "refused"},
    {SP_ERR_MISMATCH, 400, "mismatch"},
    {SP_ERR_TOO_LARGE, 400, "too-large"},
    {SP_ERR_BUDGET, 400, "budget-too-small"},
    {SP_ERR_MEMORY, 503, "out-of-memory"},
    {SP_ERR_PEER_UNREACHABLE, 502, "peer-unreachable"},
    {SP_ERR_PEER_TIMEOUT, 504, "peer-timeout"},
    {SP_ERR_PEER_LOST, 502, "peer-lost"},
    {SP_ERR_PEER_PROTOCOL, 502, "peer-protocol"},
    {SP_ERR_PEER_REFUSED, 502, "peer-refused"},
    {SP_ERR_PEER_CONTENT, 502, "peer-content"},
};

static const status_default *default_of(sp_status status)
{
    static const status_default unknown = {SP_OK, 500, "internal"};

    for (size_t i = 0; i < sizeof by_status / sizeof *by_status; i++)
        if (by_status[i].status == status)
            return &by_status[i];
    return &unknown;
}

static bool has_code(const sp_error *error)
{
    return error->code && error->code[0];
}

int sp_http_status_of(sp_status status, const sp_error *error)
{
    for (size_t i = 0; has_code(error) && i < sizeof by_code / sizeof *by_code; i++)
        if (strcmp(by_code[i].code, error->code) == 0)
            return by_code[i].http_status;
    /* A missing file of an adapter is the adapter's fault, not an unknown URL. */
    if (status == SP_ERR_NOT_FOUND && has_code(error))
        return 400;
    return default_of(status)->http_status;
}

static const char *code_of(sp_status status, const sp_error *error)
{
    return has_code(error) ? error->code : default_of(status)->code;
}

/* The names that OpenAI's clients know. */
static const char *type_of(int http_status)
{
    switch (http_status) {
    case 401:
        return "authentication_error";
    case 403:
        return "permission_error";
    case 404:
        return "not_found_error";
    case 409:
        return "conflict_error";
    case 429:
        return "rate_limit_error";
    default:
        return http_status >= 500 ? "server_error" : "invalid_request_error";
    }
}

/* Leaves out where the directory of adapters is. */
static void add_without_directory(sp_text *out, const char *text)
{
    const char *directory = sp_confine_directory();
    size_t bytes = directory ? strlen(directory) : 0;
    sp_text plain = {0};
    const char *found;

    while (bytes > 0 && (found = strstr(text, directory)) != NULL) {
        sp_text_add_bytes(&plain, text, (size_t)(found - text));
        text = found + bytes;
        text += *text == '/';
    }
    sp_text_add(&plain, text);
    sp_text_json_string(out, plain.data ? plain.data : "", plain.bytes);
    out->failed |= plain.failed;
    sp_text_free(&plain);
}

static void add_string_or_null(sp_text *out, const char *text)
{
    if (text && text[0])
        add_without_directory(out, text);
    else
        sp_text_add(out, "null");
}

static bool is_messages(const sp_call *call)
{
    return call->route && (call->route->fields & SP_FIELDS_MESSAGES);
}

/* The names that Anthropic's clients know. */
static const char *messages_type_of(int http_status)
{
    switch (http_status) {
    case 401:
        return "authentication_error";
    case 403:
        return "permission_error";
    case 404:
        return "not_found_error";
    case 413:
        return "request_too_large";
    case 429:
        return "rate_limit_error";
    case 503:
        return "overloaded_error";
    default:
        return http_status >= 500 ? "api_error" : "invalid_request_error";
    }
}

/* `type` may be NULL: that of the status. */
static void add_error(const sp_call *call, sp_text *out, int http_status, const char *type,
                      const char *param, const char *code, const char *message)
{
    bool messages = is_messages(call);

    if (messages)
        type = messages_type_of(http_status);
    sp_text_add(out, messages ? "{\"type\": \"error\", \"error\": {\"message\": "
                              : "{\"error\": {\"message\": ");
    add_without_directory(out, message);
    sp_text_format(out, ", \"type\": \"%s\", \"param\": ", type ? type : type_of(http_status));
    add_string_or_null(out, param);
    sp_text_add(out, ", \"code\": ");
    add_string_or_null(out, code);
    sp_text_add(out, "}");
    if (messages) {
        sp_text_add(out, ", \"request_id\": ");
        add_string_or_null(out, call->request_id[0] ? call->request_id : call->id);
    }
    sp_text_add(out, "}");
}

/* The field of the body that the error is about. The subject of an unknown name is that name; a
 * prompt that was made of messages is in no field but these; other subjects may be files, tensors
 * or flags. */
static const char *param_of(const sp_call *call, sp_status status, const sp_error *error)
{
    sp_field_set fields = call->route ? call->route->fields : SP_FIELDS_NONE;

    if (status == SP_ERR_NOT_FOUND && !has_code(error))
        return sp_body_fields_know(fields, "model") ? "model" : "lora_name";
    if (has_code(error) && strcmp(error->code, SP_CODE_UNKNOWN_FIELD) == 0)
        return error->subject;
    if (fields == SP_FIELDS_CHAT && strcmp(error->subject, "prompt") == 0)
        return "messages";
    return sp_body_fields_know(fields, error->subject) ? error->subject : NULL;
}

void sp_error_json(const sp_call *call, sp_text *out, sp_status status, const sp_error *error)
{
    add_error(call, out, sp_http_status_of(status, error), NULL, param_of(call, status, error),
              code_of(status, error), error->text);
}

/* ---- answers ------------------------------------------------------------------------------- */

void sp_call_answer_text(sp_call *call, int status, const char *content_type, sp_text *body)
{
    if (body->failed) {
        sp_text_free(body);
        sp_call_refuse(call, 503, type_of(503), NULL, "out-of-memory", "out of memory");
        return;
    }
    sp_exchange_answer(call->exchange, status, content_type, body);
}

void sp_call_answer_json(sp_call *call, sp_text *body)
{
    sp_call_answer_text(call, 200, SP_JSON_TYPE, body);
}

static void answer_error(sp_call *call, int status, sp_text *body, const char *code,
                         const char *param)
{
    call->code = code;
    snprintf(call->param, sizeof call->param, "%s", param ? param : "");
    if (status == 429 || status == 503)
        sp_exchange_add_header(call->exchange, "Retry-After", "1");
    if (status == 401)
        sp_exchange_add_header(call->exchange, "WWW-Authenticate", "Bearer");
    sp_exchange_answer(call->exchange, status, SP_JSON_TYPE, body);
}

void sp_call_refuse(sp_call *call, int status, const char *type, const char *param,
                    const char *code, const char *format, ...)
{
    char message[SP_ERROR_TEXT_BYTES];
    sp_text body = {0};
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    add_error(call, &body, status, type, param, code, message);
    answer_error(call, status, &body, code, param);
}

void sp_call_fail(sp_call *call, sp_status status, const sp_error *error)
{
    sp_text body = {0};

    sp_error_json(call, &body, status, error);
    answer_error(call, sp_http_status_of(status, error), &body, code_of(status, error),
                 param_of(call, status, error));
}

/* ---- requests ------------------------------------------------------------------------------ */

json_t *sp_call_body(sp_call *call)
{
    size_t bytes;
    const char *text = sp_exchange_body(call->exchange, &bytes);
    sp_error error;
    json_t *root;
    sp_status status = sp_json_parse(text, bytes, "the body", "invalid-json", NULL, &root, &error);

    if (status != SP_OK) {
        sp_call_fail(call, status, &error);
        return NULL;
    }
    if (!json_is_object(root)) {
        json_decref(root);
        sp_call_refuse(call, 400, NULL, NULL, "invalid-json", "the body is not a JSON object");
        return NULL;
    }
    sp_exchange_drop_body(call->exchange);
    return root;
}

static void wake_exchange(void *user)
{
    sp_http_wake(user);
}

static void start_waiting(sp_call *call, sp_task *task, void (*resume)(sp_call *call))
{
    sp_task_release(call->task);
    call->task = task;
    call->resume = resume;
    sp_task_listen(task, wake_exchange, call->exchange);
}

static void stop_waiting(sp_call *call, sp_status status, const sp_error *error)
{
    sp_task_release(call->task);
    call->task = NULL;
    sp_call_fail(call, status, error);
}

void sp_call_wait_lora(sp_call *call, sp_lora_task *task, void (*resume)(sp_call *call))
{
    sp_error error;
    sp_status status;

    if (!task) {
        sp_fail_memory(&error, sizeof *task, "a task");
        sp_call_fail(call, SP_ERR_MEMORY, &error);
        return;
    }
    start_waiting(call, &task->task, resume);
    if (call->api->dir && task->look_up != SP_LOOK_UP_NONE) {
        sp_lora_dir_look_up(call->api->dir, task);
        return;
    }
    status = sp_driver_adapter(call->api->driver, task, &error);
    if (status != SP_OK)
        stop_waiting(call, status, &error);
}

void sp_call_wait_published(sp_call *call, sp_lora_task *task, void (*resume)(sp_call *call))
{
    sp_error error;
    sp_status status;

    start_waiting(call, &task->task, resume);
    status = sp_publisher_publish(call->api->publisher, task, &error);
    if (status != SP_OK)
        stop_waiting(call, status, &error);
}

sp_status sp_call_wait_generation(sp_call *call, sp_generation *generation,
                                  void (*resume)(sp_call *call), sp_error *error)
{
    start_waiting(call, &generation->task, resume);
    return sp_compiler_generate(call->api->compiler, generation, error);
}

static sp_status pass_error(sp_error *error, const sp_error *why)
{
    *error = *why;
    return why->status;
}

sp_status sp_api_chat(const sp_api *api, const sp_lora_chat *lora, const sp_chat **out_chat,
                      sp_error *error)
{
    if (lora && lora->chat_error.status != SP_OK)
        return pass_error(error, &lora->chat_error);
    *out_chat = lora && lora->chat ? lora->chat : api->chat;
    if (*out_chat)
        return SP_OK;
    return sp_fail(error, SP_ERR_NOT_FOUND, api->chat_error.code, NULL, -1,
                   "no chat with this model: %s", api->chat_error.text);
}

const char *sp_api_model(const sp_api *api, const char *model)
{
    const char *base = sp_engine_base_name(api->engine);
    size_t bytes = strlen(base);

    return model && strncmp(model, base, bytes) == 0 && model[bytes] == ':' ? model + bytes + 1
                                                                            : model;
}

bool sp_api_may_have_folder(const sp_api *api, const char *name)
{
    return api->dir && sp_lora_dir_may_hold(name, sp_engine_base_name(api->engine));
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

char *sp_path_decode(const char *path)
{
    char *decoded = sp_malloc(strlen(path) + 1);
    size_t n = 0;

    if (!decoded)
        return NULL;
    for (; *path; path++) {
        int high = 0, low = 0;

        decoded[n] = *path;
        if (*path == '%') {
            high = hex_digit(path[1]);
            low = high < 0 ? -1 : hex_digit(path[2]);
            if (high < 0 || low < 0 || high + low == 0) {
                sp_free(decoded);
                return NULL;
            }
            decoded[n] = (char)(high * 16 + low);
            path += 2;
        }
        n++;
    }
    decoded[n] = '\0';
    if (sp_utf8_valid(decoded, n))
        return decoded;
    sp_free(decoded);
    return NULL;
}
