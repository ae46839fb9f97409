/*
 * routes.c: an exchange becomes a call: which route it is for, whether it may, and at its end a
 * line in the access log. Everything that can be said by the headers is said before the body is
 * read.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "server/api/api.h"
#include "server/api/cors.h"
#include "server/api/route_publish.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

#define NS_PER_MS  1e6
#define REQUEST_ID "X-Request-Id"
#define ADAPTERS   "/v1/adapters/"
#define KEY_BYTES  1024 /* of a key with what is before it */

static const sp_endpoint routes[] = {
    {"POST", "/v1/completions", NULL, SP_ACCESS_USER, SP_FIELDS_COMPLETION, sp_handle_completions},
    {"POST", "/v1/chat/completions", NULL, SP_ACCESS_USER, SP_FIELDS_CHAT, sp_handle_chat},
    {"POST", "/v1/responses", NULL, SP_ACCESS_USER, SP_FIELDS_CHAT | SP_FIELDS_RESPONSES,
     sp_handle_responses},
    {"POST", "/v1/score", NULL, SP_ACCESS_USER, SP_FIELDS_COMPLETION | SP_FIELDS_SCORE,
     sp_handle_score},
    {"POST", "/v1/messages", NULL, SP_ACCESS_USER, SP_FIELDS_CHAT | SP_FIELDS_MESSAGES,
     sp_handle_messages},
    {"POST", "/v1/messages/count_tokens", NULL, SP_ACCESS_USER,
     SP_FIELDS_TOKENIZE | SP_FIELDS_MESSAGES, sp_handle_count_tokens},
    {"GET", "/v1/models", NULL, SP_ACCESS_USER, SP_FIELDS_NONE, sp_handle_models},
    {"GET", "/v1/models/", "", SP_ACCESS_USER, SP_FIELDS_NONE, sp_handle_model},
    {"POST", "/tokenize", NULL, SP_ACCESS_USER, SP_FIELDS_TOKENIZE, sp_handle_tokenize},
    {"GET", "/tokenizer_info", NULL, SP_ACCESS_USER, SP_FIELDS_NONE, sp_handle_tokenizer_info},
    {"POST", "/detokenize", NULL, SP_ACCESS_USER, SP_FIELDS_DETOKENIZE, sp_handle_detokenize},
    {"GET", "/v1/lora_adapters", NULL, SP_ACCESS_USER, SP_FIELDS_NONE, sp_handle_adapters},
    {"POST", "/v1/load_lora_adapter", NULL, SP_ACCESS_ADMIN, SP_FIELDS_LOAD, sp_handle_load},
    {"POST", "/v1/unload_lora_adapter", NULL, SP_ACCESS_ADMIN, SP_FIELDS_NAME, sp_handle_unload},
    {"POST", "/v1/lora/active", NULL, SP_ACCESS_ADMIN, SP_FIELDS_NAME, sp_handle_active},
    {"PUT", ADAPTERS, "", SP_ACCESS_ADMIN, SP_FIELDS_PUBLISH, sp_handle_publish},
    {"GET", ADAPTERS, "/versions", SP_ACCESS_USER, SP_FIELDS_NONE, sp_handle_versions},
    {"POST", ADAPTERS, "/abort", SP_ACCESS_ADMIN, SP_FIELDS_NONE, sp_handle_abort},
    {"POST", ADAPTERS, "/hold", SP_ACCESS_ADMIN, SP_FIELDS_NONE, sp_handle_hold},
    {"POST", ADAPTERS, "/resume", SP_ACCESS_ADMIN, SP_FIELDS_NONE, sp_handle_resume},
    {"GET", "/health", NULL, SP_ACCESS_PROBE, SP_FIELDS_NONE, sp_handle_health},
    {"GET", "/ready", NULL, SP_ACCESS_PROBE, SP_FIELDS_NONE, sp_handle_ready},
    {"GET", "/version", NULL, SP_ACCESS_OPEN, SP_FIELDS_NONE, sp_handle_version},
    {"GET", "/metrics", NULL, SP_ACCESS_PROBE, SP_FIELDS_NONE, sp_handle_metrics},
    {"GET", "/status.json", NULL, SP_ACCESS_USER, SP_FIELDS_NONE, sp_handle_status},
    {"GET", "/", NULL, SP_ACCESS_OPEN, SP_FIELDS_NONE, sp_handle_page},
};

/* ---- finding and refusing ------------------------------------------------------------------ */

static bool fits(const sp_endpoint *route, const char *path)
{
    size_t bytes = strlen(route->path), end_bytes, rest;

    if (!route->end)
        return strcmp(path, route->path) == 0;
    if (strncmp(path, route->path, bytes) != 0)
        return false;
    end_bytes = strlen(route->end);
    rest = strlen(path + bytes);
    return rest > end_bytes && strcmp(path + bytes + rest - end_bytes, route->end) == 0;
}

/* *out_other_method: the path exists, for other methods. */
static const sp_endpoint *find_route(const sp_exchange *exchange, bool *out_other_method)
{
    const char *path = sp_exchange_path(exchange);

    *out_other_method = false;
    for (size_t i = 0; i < sizeof routes / sizeof *routes; i++) {
        if (!fits(&routes[i], path))
            continue;
        if (strcmp(routes[i].method, sp_exchange_method(exchange)) == 0)
            return &routes[i];
        *out_other_method = true;
    }
    return NULL;
}

/* Those of --admin-key-file for what changes adapters, else those of --api-key-file. */
static bool shows_key(const sp_api *api, sp_access access, const char *shown)
{
    if (access == SP_ACCESS_ADMIN && api->admin_keys)
        return sp_keys_accept(api->admin_keys, shown);
    if (!api->api_keys)
        return true;
    return sp_keys_accept(api->api_keys, shown) ||
           (api->admin_keys && sp_keys_accept(api->admin_keys, shown));
}

/* What the key is shown in; Anthropic's clients have a header of their own, whose key becomes one
 * of the other kind in `buffer`. NULL: nothing is shown. */
static const char *shown_key(const sp_call *call, char buffer[KEY_BYTES])
{
    const char *shown = sp_exchange_header(call->exchange, "Authorization");
    const char *key = sp_exchange_header(call->exchange, "X-Api-Key");

    if (shown || !key || !(call->route->fields & SP_FIELDS_MESSAGES))
        return shown;
    return snprintf(buffer, KEY_BYTES, "Bearer %s", key) < KEY_BYTES ? buffer : NULL;
}

static bool may(const sp_call *call)
{
    sp_api *api = call->api;
    char buffer[KEY_BYTES];
    bool shown;

    if (call->route->access <= SP_ACCESS_OPEN)
        return true;
    pthread_mutex_lock(&api->keys_lock);
    shown = shows_key(api, call->route->access, shown_key(call, buffer));
    pthread_mutex_unlock(&api->keys_lock);
    return shown;
}

/* A page on another site can make a browser post text or a form, but not JSON, unasked. */
static bool is_json(const sp_call *call)
{
    const char *type = sp_exchange_header(call->exchange, "Content-Type");
    size_t bytes = sizeof SP_JSON_TYPE - 1;

    return type && strncasecmp(type, SP_JSON_TYPE, bytes) == 0 &&
           (type[bytes] == '\0' || type[bytes] == ';' || type[bytes] == ' ');
}

static void refuse_no_route(sp_call *call, bool other_method)
{
    if (other_method)
        sp_call_refuse(call, 405, NULL, NULL, "method-not-allowed", "this path does not take %s",
                       sp_exchange_method(call->exchange));
    else
        sp_call_refuse(call, 404, NULL, NULL, "not-found", "there is no such path");
}

static void take_argument(sp_call *call)
{
    const char *from = sp_exchange_path(call->exchange) + strlen(call->route->path);
    char *text = sp_strndup(from, strlen(from) - strlen(call->route->end));
    bool is_name = strcmp(call->route->path, ADAPTERS) == 0;

    if (is_name && text && strchr(text, '/')) { /* in a name it is written as %2F */
        sp_free(text);
        refuse_no_route(call, false);
        return;
    }
    call->argument = text ? sp_path_decode(text) : NULL;
    sp_free(text);
    if (!call->argument)
        sp_call_refuse(call, 400, NULL, NULL, "invalid-path", "the path does not decode");
}

/* The one thing that is no JSON is an adapter. */
static void check_type(sp_call *call)
{
    if (sp_call_brings_adapter(call) || is_json(call))
        return;
    if (call->route->handle == sp_handle_publish)
        sp_call_refuse(call, 415, NULL, NULL, "not-an-adapter",
                       "send multipart/form-data with the parts \"config\" and \"weights\", a "
                       "safetensors file as application/octet-stream, or JSON that names shared "
                       "memory");
    else
        sp_call_refuse(call, 415, NULL, NULL, "not-json",
                       "send JSON, with the header \"Content-Type: application/json\"");
}

/* Answers what the headers alone decide. */
static void check_call(sp_call *call)
{
    const sp_api *api = call->api;
    bool has_body = strcmp(call->route->method, "GET") != 0;

    if (call->route->access > SP_ACCESS_OPEN && sp_exchange_is_surplus(call->exchange))
        sp_call_refuse(call, 503, NULL, NULL, "too-many-connections",
                       "the server has all connections that it may have; try again later");
    else if (!may(call))
        sp_call_refuse(call, 401, NULL, NULL, "invalid_api_key",
                       "this route needs a key: \"Authorization: Bearer KEY\"");
    else if (call->route->access == SP_ACCESS_ADMIN && !api->settings->adapter_routes)
        sp_call_refuse(call, 403, NULL, NULL, "adapter-routes-off",
                       "the server was started with --no-adapter-routes");
    else if (has_body && atomic_load(&api->draining))
        sp_call_refuse(call, 503, NULL, NULL, SP_CODE_SHUTTING_DOWN, "the server is shutting down");
    else if (has_body)
        check_type(call);
    if (sp_exchange_status(call->exchange) != 0)
        return;
    if (call->route->end)
        take_argument(call);
    sp_call_allow_adapter(call);
}

/* ---- the life of a call -------------------------------------------------------------------- */

/* The client's own, if it is safe in a log and a header, else the call's. */
static void take_request_id(sp_call *call, const char *sent)
{
    if (sent && strlen(sent) < sizeof call->request_id)
        snprintf(call->request_id, sizeof call->request_id, "%s", sent);
    sp_exchange_add_header(call->exchange, REQUEST_ID,
                           call->request_id[0] ? call->request_id : call->id);
}

static sp_call *create_call(sp_api *api, sp_exchange *exchange)
{
    sp_call *call = sp_calloc(1, sizeof *call);

    if (!call)
        return NULL;
    call->api = api;
    call->exchange = exchange;
    call->began_ns = sp_clock_ns();
    call->number = atomic_fetch_add(&api->n_calls, 1);
    call->prompt_tokens = -1;
    call->generated_tokens = -1;
    snprintf(call->id, sizeof call->id, "%016llx-%llx", (unsigned long long)api->instance,
             (unsigned long long)call->number);
    take_request_id(call, sp_exchange_header(exchange, REQUEST_ID));
    sp_exchange_set_context(exchange, call);
    return call;
}

/* No memory even for a call: an empty answer. */
static void answer_nothing(sp_exchange *exchange)
{
    sp_text empty = {0};

    sp_exchange_answer(exchange, 503, SP_TEXT_TYPE, &empty);
}

static void on_begun(void *user, sp_exchange *exchange)
{
    sp_call *call = create_call(user, exchange);
    bool other_method, may_read;

    if (!call) {
        answer_nothing(exchange);
        return;
    }
    may_read = sp_cors_add_headers(call);
    call->route = find_route(exchange, &other_method);
    if (may_read && other_method && sp_cors_answer_preflight(call))
        return;
    if (call->route)
        check_call(call);
    else
        refuse_no_route(call, other_method);
}

static void on_complete(void *user, sp_exchange *exchange)
{
    sp_call *call = sp_exchange_context(exchange);

    (void)user;
    call->route->handle(call);
}

static void on_woken(void *user, sp_exchange *exchange)
{
    sp_call *call = sp_exchange_context(exchange);

    (void)user;
    if (call->resume)
        call->resume(call);
}

static void on_refused(void *user, sp_exchange *exchange, const sp_http_refusal *refusal)
{
    sp_call *call = sp_exchange_context(exchange);

    if (!call)
        call = create_call(user, exchange);
    if (call)
        sp_call_refuse(call, refusal->status, NULL, NULL, refusal->code, "%s", refusal->why);
    else
        answer_nothing(exchange);
}

static void on_limited(void *user, const char *what)
{
    const sp_api *api = user;

    sp_log_line(api->settings->log, "sidepath serve: %s", what);
}

/* ---- the access log ------------------------------------------------------------------------ */

static void add_text_field(sp_text *out, const char *name, const char *value)
{
    sp_text_format(out, ", \"%s\": ", name);
    if (value)
        sp_text_json_string(out, value, strlen(value));
    else
        sp_text_add(out, "null");
}

static void log_call(const sp_call *call, bool whole)
{
    const sp_exchange *exchange = call->exchange;
    sp_text line = {0};

    sp_log_begin_object(&line);
    sp_text_format(&line, ", \"id\": \"%s\"", call->id);
    if (call->request_id[0])
        add_text_field(&line, "request_id", call->request_id);
    add_text_field(&line, "client", sp_exchange_client(exchange));
    add_text_field(&line, "method", sp_exchange_method(exchange));
    add_text_field(&line, "path", sp_exchange_path(exchange));
    sp_text_format(&line, ", \"status\": %d, \"whole\": %s, \"ms\": %.3f, \"bytes\": %llu",
                   sp_exchange_status(exchange), whole ? "true" : "false",
                   (double)(sp_clock_ns() - call->began_ns) / NS_PER_MS,
                   (unsigned long long)sp_exchange_bytes_sent(exchange));
    if (call->model)
        add_text_field(&line, "model", call->model);
    if (call->prompt_tokens >= 0)
        sp_text_format(&line, ", \"prompt_tokens\": %lld, \"generated_tokens\": %lld",
                       (long long)call->prompt_tokens, (long long)call->generated_tokens);
    if (call->code)
        add_text_field(&line, "code", call->code);
    if (call->param[0])
        add_text_field(&line, "param", call->param);
    sp_text_add(&line, "}\n");
    if (!line.failed)
        sp_log_add(call->api->settings->log, line.data, line.bytes);
    sp_text_free(&line);
}

/* What asks every few seconds whether all is well stays out, as long as it is. */
static bool is_logged(const sp_call *call, int status, bool whole)
{
    return !call->route || call->route->access != SP_ACCESS_PROBE || status != 200 || !whole;
}

static void on_ended(void *user, sp_exchange *exchange, bool whole)
{
    sp_call *call = sp_exchange_context(exchange);
    int status = sp_exchange_status(exchange);
    sp_api *api = user;

    if (status > 0 && status < SP_HTTP_CODES)
        api->http_codes[status]++;
    if (!call)
        return;
    if (call->task) {
        if (call->task->kind == SP_TASK_GENERATE && !sp_task_is_done(call->task))
            sp_driver_cancel(api->driver, call->task);
        else
            sp_task_detach(call->task, false);
    }
    if (api->settings->access_log && is_logged(call, status, whole))
        log_call(call, whole);
    if (call->free_state)
        call->free_state(call->state);
    sp_task_release(call->task);
    sp_free(call->argument);
    sp_free(call->model);
    sp_free(call);
}

sp_http_handlers sp_api_handlers(sp_api *api)
{
    return (sp_http_handlers){.user = api,
                              .begun = on_begun,
                              .complete = on_complete,
                              .woken = on_woken,
                              .refused = on_refused,
                              .ended = on_ended,
                              .limited = on_limited};
}
