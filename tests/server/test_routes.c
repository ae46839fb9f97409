/*
 * Which handler a method and a path mean, and what the headers alone decide: unknown paths, other
 * methods, keys, JSON or not, a server that is ending. No socket: the exchange is this file's own,
 * so every function of http.h that a handler may call is here.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "server/api/api.h"

#include <stdio.h>
#include <string.h>

#define HEADERS_MAX 4

struct sp_exchange {
    const char *method, *path, *key, *type, *request_id, *body;
    bool is_surplus;
    size_t allowed_bytes; /* of a body; 0: as the options say */
    void *context;
    int status;
    sp_text answer;
    char headers[HEADERS_MAX][128]; /* "Name: value" of the answer */
    size_t n_headers;
};

const char *sp_exchange_method(const sp_exchange *exchange)
{
    return exchange->method;
}

const char *sp_exchange_path(const sp_exchange *exchange)
{
    return exchange->path;
}

const char *sp_exchange_client(const sp_exchange *exchange)
{
    (void)exchange;
    return "127.0.0.1";
}

const char *sp_exchange_header(const sp_exchange *exchange, const char *name)
{
    if (strcmp(name, "Authorization") == 0)
        return exchange->key;
    if (strcmp(name, "Content-Type") == 0)
        return exchange->type;
    return strcmp(name, "X-Request-Id") == 0 ? exchange->request_id : NULL;
}

const char *sp_exchange_body(const sp_exchange *exchange, size_t *out_bytes)
{
    *out_bytes = exchange->body ? strlen(exchange->body) : 0;
    return exchange->body ? exchange->body : "";
}

const char *sp_exchange_query(const sp_exchange *exchange)
{
    (void)exchange;
    return "";
}

void sp_exchange_allow_body(sp_exchange *exchange, size_t bytes_max,
                            const sp_http_refusal *too_large_refusal)
{
    assert_non_null(too_large_refusal);
    exchange->allowed_bytes = bytes_max;
}

void sp_exchange_take_body(sp_exchange *exchange, sp_text *out_body, size_t *out_held)
{
    (void)exchange;
    *out_body = (sp_text){0};
    *out_held = 0;
}

bool sp_exchange_is_surplus(const sp_exchange *exchange)
{
    return exchange->is_surplus;
}

void sp_exchange_drop_body(sp_exchange *exchange)
{
    exchange->body = NULL;
}

void sp_exchange_set_context(sp_exchange *exchange, void *context)
{
    exchange->context = context;
}

void *sp_exchange_context(const sp_exchange *exchange)
{
    return exchange->context;
}

void sp_exchange_add_header(sp_exchange *exchange, const char *name, const char *value)
{
    assert_true(exchange->n_headers < HEADERS_MAX);
    snprintf(exchange->headers[exchange->n_headers++], sizeof exchange->headers[0], "%s: %s", name,
             value);
}

void sp_exchange_answer(sp_exchange *exchange, int status, const char *content_type, sp_text *body)
{
    assert_int_equal(exchange->status, 0); /* one answer to each */
    assert_non_null(content_type);
    exchange->status = status;
    exchange->answer = *body;
    *body = (sp_text){0};
}

void sp_exchange_stream(sp_exchange *exchange, const char *content_type, sp_http_read_fn read,
                        void *user)
{
    (void)exchange;
    (void)content_type;
    (void)read;
    (void)user;
    fail_msg("nothing here streams");
}

void sp_exchange_wake_in(sp_exchange *exchange, int64_t milliseconds)
{
    (void)exchange;
    (void)milliseconds;
}

int sp_exchange_status(const sp_exchange *exchange)
{
    return exchange->status;
}

uint64_t sp_exchange_bytes_sent(const sp_exchange *exchange)
{
    return exchange->answer.bytes;
}

void sp_http_wake(sp_exchange *exchange)
{
    (void)exchange;
}

sp_http_counts sp_http_count(const sp_exchange *exchange)
{
    (void)exchange;
    return (sp_http_counts){.open = 1};
}

/* ---- a server without sockets, engine and driver ----------------------------------------------
 */

static sp_server_settings settings;
static sp_api api;

static int set_up(void **state)
{
    (void)state;
    memset(&api, 0, sizeof api);
    settings = (sp_server_settings){
        .adapter_routes = true, .adapter_bytes = 1 << 20, .client_bytes = 1 << 30};
    api.settings = &settings;
    pthread_mutex_init(&api.keys_lock, NULL);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    sp_keys_close(api.api_keys);
    sp_keys_close(api.admin_keys);
    pthread_mutex_destroy(&api.keys_lock);
    return 0;
}

static sp_keys *make_keys(const char *key)
{
    char *directory = sp_test_make_directory();
    sp_keys *keys = NULL;
    char path[512];
    sp_error error;

    snprintf(path, sizeof path, "%s/keys", directory);
    sp_test_write_file(directory, "keys", key, strlen(key));
    assert_ok(sp_keys_open(path, &keys, &error), &error);
    sp_test_remove_tree(directory);
    sp_free(directory);
    return keys;
}

/* The headers come in; the caller looks, and then ends it. */
static sp_exchange begin(const char *method, const char *path)
{
    return (sp_exchange){.method = method, .path = path, .type = "application/json"};
}

static void headers_are_in(sp_exchange *exchange)
{
    sp_http_handlers handlers = sp_api_handlers(&api);

    handlers.begun(handlers.user, exchange);
}

static void end(sp_exchange *exchange)
{
    sp_http_handlers handlers = sp_api_handlers(&api);

    handlers.ended(handlers.user, exchange, true);
    sp_text_free(&exchange->answer);
}

static const sp_call *call_of(const sp_exchange *exchange)
{
    return exchange->context;
}

/* The one answer is this error; then the exchange ends. */
static void check_refused(sp_exchange *exchange, int status, const char *code)
{
    json_t *root = json_loadb(exchange->answer.data ? exchange->answer.data : "",
                              exchange->answer.bytes, JSON_REJECT_DUPLICATES, NULL);
    const json_t *error = json_object_get(root, "error");

    assert_int_equal(exchange->status, status);
    assert_non_null(error);
    assert_string_equal(json_string_value(json_object_get(error, "code")), code);
    assert_true(json_string_length(json_object_get(error, "message")) > 0);
    assert_string_equal(call_of(exchange)->code, code);
    json_decref(root);
    end(exchange);
}

/* ---- paths --------------------------------------------------------------------------------- */

typedef struct route_case {
    const char *method, *path;
    void (*handle)(sp_call *call); /* NULL: refused, with: */
    int status;
} route_case;

static void test_paths(void **state)
{
    static const route_case cases[] = {
        {"POST", "/v1/completions", sp_handle_completions, 0},
        {"POST", "/v1/chat/completions", sp_handle_chat, 0},
        {"GET", "/v1/models", sp_handle_models, 0},
        {"GET", "/v1/models/a", sp_handle_model, 0},
        {"POST", "/tokenize", sp_handle_tokenize, 0},
        {"POST", "/detokenize", sp_handle_detokenize, 0},
        {"GET", "/tokenizer_info", sp_handle_tokenizer_info, 0},
        {"GET", "/v1/lora_adapters", sp_handle_adapters, 0},
        {"POST", "/v1/load_lora_adapter", sp_handle_load, 0},
        {"POST", "/v1/unload_lora_adapter", sp_handle_unload, 0},
        {"POST", "/v1/lora/active", sp_handle_active, 0},
        {"PUT", "/v1/adapters/a", sp_handle_publish, 0},
        {"PUT", "/v1/adapters/a%2Fb", sp_handle_publish, 0},
        {"GET", "/v1/adapters/a/versions", sp_handle_versions, 0},
        {"POST", "/v1/adapters/a/abort", sp_handle_abort, 0},
        {"POST", "/v1/adapters/a/hold", sp_handle_hold, 0},
        {"POST", "/v1/adapters/a/resume", sp_handle_resume, 0},
        {"POST", "/v1/score", sp_handle_score, 0},
        {"GET", "/health", sp_handle_health, 0},
        {"GET", "/ready", sp_handle_ready, 0},
        {"GET", "/version", sp_handle_version, 0},
        {"GET", "/metrics", sp_handle_metrics, 0},
        {"GET", "/status.json", sp_handle_status, 0},
        {"GET", "/", sp_handle_page, 0},
        {"GET", "/v1/completions", NULL, 405},
        {"get", "/health", NULL, 405},
        {"HEAD", "/health", NULL, 405},
        {"POST", "/v1/models/a", NULL, 405},
        {"GET", "", NULL, 404},
        {"GET", "//", NULL, 404},
        {"GET", "/v1/models/", NULL, 404}, /* of no name */
        {"PUT", "/v1/adapters/", NULL, 404},
        {"PUT", "/v1/adapters/a/b", NULL, 404},
        {"POST", "/v1/adapters/a/b/abort", NULL, 404},
        {"POST", "/v1/adapters//abort", NULL, 405}, /* the path of a PUT */
        {"GET", "/v1/adapters/a/abort", NULL, 405},
        {"POST", "/v1/adapters/a", NULL, 405},
        {"GET", "/healthz", NULL, 404},
        {"GET", "/health/", NULL, 404},
        {"POST", "/v1/completions/x", NULL, 404},
        {"POST", "/V1/completions", NULL, 404},
    };

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sp_exchange exchange = begin(cases[i].method, cases[i].path);

        headers_are_in(&exchange);
        if (!cases[i].handle) {
            check_refused(&exchange, cases[i].status,
                          cases[i].status == 404 ? "not-found" : "method-not-allowed");
            continue;
        }
        if (exchange.status != 0)
            fail_msg("%s %s: %d", cases[i].method, cases[i].path, exchange.status);
        assert_true(call_of(&exchange)->route->handle == cases[i].handle);
        end(&exchange);
    }
}

static void test_rest_of_a_path(void **state)
{
    sp_exchange exchange = begin("GET", "/v1/models/a%2Fb%20c");

    (void)state;
    headers_are_in(&exchange);
    assert_int_equal(exchange.status, 0);
    assert_string_equal(call_of(&exchange)->argument, "a/b c");
    end(&exchange);
    exchange = begin("GET", "/v1/models/%zz");
    headers_are_in(&exchange);
    check_refused(&exchange, 400, "invalid-path");
    exchange = begin("GET", "/v1/models/%00");
    headers_are_in(&exchange);
    check_refused(&exchange, 400, "invalid-path");
}

/* Only what is no JSON is as long as adapters may be, and a page cannot send it unasked by POST. */
static void test_adapters_by_type(void **state)
{
    static const struct {
        const char *method, *path, *type;
        int status;
        bool is_long;
    } cases[] = {
        {"PUT", "/v1/adapters/a", "application/json", 0, false},
        {"PUT", "/v1/adapters/a", "application/octet-stream", 0, true},
        {"PUT", "/v1/adapters/a", "application/vnd.safetensors; v=1", 0, true},
        {"PUT", "/v1/adapters/a", "multipart/form-data; boundary=b", 0, true},
        {"PUT", "/v1/adapters/a", "multipart/form-data", 415, false},
        {"PUT", "/v1/adapters/a", "text/plain", 415, false},
        {"POST", "/v1/load_lora_adapter", "application/octet-stream", 0, true},
        {"POST", "/v1/load_lora_adapter", "multipart/form-data; boundary=b", 415, false},
        {"POST", "/v1/unload_lora_adapter", "application/octet-stream", 415, false},
    };

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sp_exchange exchange = begin(cases[i].method, cases[i].path);

        exchange.type = cases[i].type;
        headers_are_in(&exchange);
        assert_int_equal(exchange.status, cases[i].status);
        assert_int_equal(exchange.allowed_bytes, cases[i].is_long ? 1 << 20 : 0);
        end(&exchange);
    }
}

/* ---- keys ---------------------------------------------------------------------------------- */

typedef struct key_case {
    const char *method, *path, *shown;
    int status; /* 0: let in */
} key_case;

static void check_keys(const key_case *cases, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        sp_exchange exchange = begin(cases[i].method, cases[i].path);

        exchange.key = cases[i].shown;
        headers_are_in(&exchange);
        if (exchange.status != cases[i].status)
            fail_msg("%s with %s: %d", cases[i].path, cases[i].shown, exchange.status);
        if (cases[i].status == 0)
            end(&exchange);
        else
            check_refused(&exchange, cases[i].status, "invalid_api_key");
    }
}

static void test_keys(void **state)
{
    static const key_case one_file[] = {
        {"POST", "/v1/completions", NULL, 401},
        {"POST", "/v1/completions", "Bearer wrong", 401},
        {"POST", "/v1/completions", "Bearer user", 0},
        {"POST", "/v1/load_lora_adapter", "Bearer user", 0},
        {"GET", "/health", NULL, 0},
        {"GET", "/metrics", NULL, 0},
        {"GET", "/", NULL, 0},
        {"GET", "/status.json", NULL, 401},
    };
    static const key_case both_files[] = {
        {"POST", "/v1/completions", "Bearer user", 0},
        {"POST", "/v1/completions", "Bearer admin", 0},
        {"POST", "/v1/load_lora_adapter", "Bearer user", 401},
        {"POST", "/v1/load_lora_adapter", "Bearer admin", 0},
        {"POST", "/v1/lora/active", NULL, 401},
    };
    static const key_case admin_file[] = {
        {"POST", "/v1/completions", NULL, 0},
        {"POST", "/v1/unload_lora_adapter", NULL, 401},
        {"POST", "/v1/unload_lora_adapter", "Bearer admin", 0},
    };

    (void)state;
    api.api_keys = make_keys("user");
    check_keys(one_file, sizeof one_file / sizeof *one_file);
    api.admin_keys = make_keys("admin");
    check_keys(both_files, sizeof both_files / sizeof *both_files);
    sp_keys_close(api.api_keys);
    api.api_keys = NULL;
    check_keys(admin_file, sizeof admin_file / sizeof *admin_file);
}

/* The scheme that a client should use is said beside the refusal. */
static void test_refusal_headers(void **state)
{
    sp_exchange exchange = begin("POST", "/v1/completions");

    (void)state;
    api.api_keys = make_keys("user");
    headers_are_in(&exchange);
    assert_int_equal(exchange.n_headers, 2);
    assert_string_equal(exchange.headers[1], "WWW-Authenticate: Bearer");
    check_refused(&exchange, 401, "invalid_api_key");
}

/* ---- what else the headers decide ------------------------------------------------------------ */

static void test_content_type(void **state)
{
    static const struct {
        const char *type;
        bool is_json;
    } cases[] = {{"application/json", true},
                 {"Application/JSON; charset=utf-8", true},
                 {"application/json ;x", true},
                 {"application/jsonx", false},
                 {"text/plain", false},
                 {"", false},
                 {NULL, false}};

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sp_exchange exchange = begin("POST", "/tokenize");

        exchange.type = cases[i].type;
        headers_are_in(&exchange);
        if (cases[i].is_json) {
            assert_int_equal(exchange.status, 0);
            end(&exchange);
        } else {
            check_refused(&exchange, 415, "not-json");
        }
    }
}

static void test_states_of_the_server(void **state)
{
    sp_exchange exchange = begin("POST", "/v1/load_lora_adapter");

    (void)state;
    settings.adapter_routes = false;
    headers_are_in(&exchange);
    check_refused(&exchange, 403, "adapter-routes-off");
    exchange = begin("POST", "/v1/completions");
    exchange.is_surplus = true;
    headers_are_in(&exchange);
    assert_string_equal(exchange.headers[1], "Retry-After: 1");
    check_refused(&exchange, 503, "too-many-connections");
    exchange = begin("GET", "/health"); /* what has to answer always */
    exchange.is_surplus = true;
    headers_are_in(&exchange);
    assert_int_equal(exchange.status, 0);
    end(&exchange);
    atomic_store(&api.draining, true);
    exchange = begin("POST", "/v1/completions");
    headers_are_in(&exchange);
    check_refused(&exchange, 503, SP_CODE_SHUTTING_DOWN);
    exchange = begin("GET", "/v1/models");
    headers_are_in(&exchange);
    assert_int_equal(exchange.status, 0);
    end(&exchange);
}

static void test_request_ids(void **state)
{
    char sent[SP_LOGGED_BYTES + 1];
    sp_exchange exchange = begin("GET", "/version");

    (void)state;
    exchange.request_id = "mine-1";
    headers_are_in(&exchange);
    assert_string_equal(exchange.headers[0], "X-Request-Id: mine-1");
    end(&exchange);
    memset(sent, 'x', sizeof sent - 1);
    sent[sizeof sent - 1] = '\0';
    exchange = begin("GET", "/version");
    exchange.request_id = sent; /* too long for the log: the server gives its own */
    headers_are_in(&exchange);
    assert_string_equal(exchange.headers[0] + strlen("X-Request-Id: "), call_of(&exchange)->id);
    end(&exchange);
}

/* From the headers to the answer, counted by its status. */
static void test_whole_call(void **state)
{
    sp_http_handlers handlers = sp_api_handlers(&api);
    sp_exchange exchange = begin("GET", "/version");

    (void)state;
    headers_are_in(&exchange);
    handlers.complete(handlers.user, &exchange);
    assert_int_equal(exchange.status, 200);
    assert_non_null(strstr(exchange.answer.data, sp_library_version_text()));
    end(&exchange);
    assert_int_equal(api.http_codes[200], 1);
}

/* A body that is no object is refused before anything is asked of the engine. */
static void test_bodies(void **state)
{
    static const char *const bodies[] = {"", "[]", "{", "{\"a\": 1, \"a\": 2}", "null"};
    sp_http_handlers handlers = sp_api_handlers(&api);

    (void)state;
    for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++) {
        sp_exchange exchange = begin("POST", "/v1/completions");

        exchange.body = bodies[i];
        headers_are_in(&exchange);
        handlers.complete(handlers.user, &exchange);
        check_refused(&exchange, 400, "invalid-json");
    }
}

/* The field that an error is about is one of the route's bodies, or nothing is said. */
static void test_param(void **state)
{
    static const struct {
        const char *path, *body, *param, *code;
    } cases[] = {
        {"/v1/completions", "{\"prompt\": \"a\", \"top_p\": 2}", "top_p", "invalid-value"},
        {"/v1/completions", "{\"prompt\": \"a\", \"topp\": 2}", "topp", "unknown-field"},
        {"/v1/completions", "{\"prompt\": \"a\", \"suffix\": \"x\"}", "suffix",
         "unsupported-field"},
        {"/v1/completions", "{\"prompt\": \"a\", \"logit_bias\": {\"07\": 1}}", "logit_bias",
         "invalid-value"},
        {"/v1/completions", "{}", "prompt", "invalid-value"},
    };
    sp_http_handlers handlers = sp_api_handlers(&api);

    (void)state;
    api.sampling = sp_request_left_out(SP_LEFT_OUT_API);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sp_exchange exchange = begin("POST", cases[i].path);

        exchange.body = cases[i].body;
        headers_are_in(&exchange);
        handlers.complete(handlers.user, &exchange);
        assert_string_equal(call_of(&exchange)->param, cases[i].param);
        check_refused(&exchange, 400, cases[i].code);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_paths, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_rest_of_a_path, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_adapters_by_type, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_keys, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_refusal_headers, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_content_type, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_states_of_the_server, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_request_ids, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_whole_call, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_bodies, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_param, set_up, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
