/*
 * exchange.c: one request and its answer, as seen by handlers.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "server/http/http_state.h"

#include <string.h>
#include <sys/eventfd.h>
#include <time.h>

/* ---- life ---------------------------------------------------------------------------------- */

sp_exchange *sp_exchange_create(sp_connection *connection, const char *head, size_t bytes)
{
    sp_exchange *exchange = sp_calloc(1, sizeof *exchange);

    if (!exchange)
        return NULL;
    exchange->http = connection->http;
    exchange->connection = connection;
    exchange->head.method = exchange->head.path = exchange->head.query = "";
    if (bytes > 0) {
        exchange->head_text = sp_strndup(head, bytes);
        if (!exchange->head_text) {
            sp_free(exchange);
            return NULL;
        }
    }
    connection->exchange = exchange;
    atomic_fetch_add(&exchange->http->n_exchanges, 1);
    return exchange;
}

/* Under the lock. */
static void unlink_woken(sp_exchange *exchange)
{
    sp_http *http = exchange->http;

    if (!exchange->woken)
        return;
    exchange->woken = false;
    if (exchange->woken_previous)
        exchange->woken_previous->woken_next = exchange->woken_next;
    else
        http->woken_first = exchange->woken_next;
    if (exchange->woken_next)
        exchange->woken_next->woken_previous = exchange->woken_previous;
    else
        http->woken_last = exchange->woken_previous;
    exchange->woken_previous = exchange->woken_next = NULL;
}

void sp_exchange_destroy(sp_exchange *exchange)
{
    sp_http *http = exchange->http;

    pthread_mutex_lock(&http->lock);
    unlink_woken(exchange);
    pthread_mutex_unlock(&http->lock);
    sp_exchange_drop_body(exchange);
    exchange->connection->exchange = NULL;
    if (exchange->stuck)
        atomic_fetch_sub(&http->n_stuck, 1);
    atomic_fetch_sub(&http->n_exchanges, 1);
    for (int32_t i = 0; i < exchange->n_headers; i++)
        sp_free(exchange->headers[i].value);
    sp_text_free(&exchange->answer);
    sp_free(exchange->head_text);
    sp_free(exchange);
}

/* ---- the request --------------------------------------------------------------------------- */

const char *sp_exchange_method(const sp_exchange *exchange)
{
    return exchange->head.method;
}

const char *sp_exchange_path(const sp_exchange *exchange)
{
    return exchange->head.path;
}

const char *sp_exchange_query(const sp_exchange *exchange)
{
    return exchange->head.query;
}

const char *sp_exchange_client(const sp_exchange *exchange)
{
    return exchange->connection->client;
}

const char *sp_exchange_header(const sp_exchange *exchange, const char *name)
{
    return sp_http_head_value(&exchange->head, name);
}

const char *sp_exchange_body(const sp_exchange *exchange, size_t *out_bytes)
{
    *out_bytes = exchange->body.bytes;
    return exchange->body.data ? exchange->body.data : "";
}

bool sp_exchange_is_surplus(const sp_exchange *exchange)
{
    return exchange->connection->surplus;
}

void sp_exchange_drop_body(sp_exchange *exchange)
{
    sp_text_free(&exchange->body);
    sp_budget_hold(exchange->http->options.budget, SP_BUDGET_BODIES, &exchange->body_held, 0);
}

void sp_exchange_allow_body(sp_exchange *exchange, size_t bytes_max,
                            const sp_http_refusal *too_large)
{
    exchange->body_bytes_max = bytes_max;
    exchange->body_too_large = too_large;
    exchange->body_in_place = true;
}

void sp_exchange_take_body(sp_exchange *exchange, sp_text *out_body, size_t *out_held)
{
    *out_body = exchange->body;
    *out_held = exchange->body_held;
    exchange->body = (sp_text){0};
    exchange->body_held = 0;
}

void sp_exchange_set_context(sp_exchange *exchange, void *context)
{
    exchange->context = context;
}

void *sp_exchange_context(const sp_exchange *exchange)
{
    return exchange->context;
}

/* ---- the answer ---------------------------------------------------------------------------- */

static bool is_plain(const char *value)
{
    for (; *value; value++)
        if ((unsigned char)*value < 0x20 || *value == 0x7f)
            return false;
    return true;
}

void sp_exchange_add_header(sp_exchange *exchange, const char *name, const char *value)
{
    char *copy =
        exchange->n_headers < SP_ANSWER_HEADERS_MAX && is_plain(value) ? sp_strdup(value) : NULL;

    if (copy)
        exchange->headers[exchange->n_headers++] = (sp_answer_header){name, copy};
}

void sp_exchange_answer(sp_exchange *exchange, int status, const char *content_type, sp_text *body)
{
    if (exchange->status != 0) {
        sp_text_free(body);
        return;
    }
    exchange->status = status;
    exchange->content_type = content_type;
    exchange->answer = *body;
    exchange->bytes_sent = body->bytes;
    *body = (sp_text){0};
}

void sp_exchange_stream(sp_exchange *exchange, const char *content_type, sp_http_read_fn read,
                        void *user)
{
    if (exchange->status != 0)
        return;
    exchange->status = 200;
    exchange->content_type = content_type;
    exchange->read = read;
    exchange->read_user = user;
}

void sp_exchange_wake_in(sp_exchange *exchange, int64_t milliseconds)
{
    exchange->wake_ns = sp_clock_ns() + (uint64_t)milliseconds * 1000000u;
}

int sp_exchange_status(const sp_exchange *exchange)
{
    return exchange->status;
}

uint64_t sp_exchange_bytes_sent(const sp_exchange *exchange)
{
    return exchange->bytes_sent;
}

static const char *reason_of(int status)
{
    static const struct {
        int status;
        const char *reason;
    } reasons[] = {
        {200, "OK"},
        {204, "No Content"},
        {400, "Bad Request"},
        {401, "Unauthorized"},
        {403, "Forbidden"},
        {404, "Not Found"},
        {405, "Method Not Allowed"},
        {408, "Request Timeout"},
        {409, "Conflict"},
        {413, "Content Too Large"},
        {414, "URI Too Long"},
        {415, "Unsupported Media Type"},
        {417, "Expectation Failed"},
        {429, "Too Many Requests"},
        {431, "Request Header Fields Too Large"},
        {500, "Internal Server Error"},
        {501, "Not Implemented"},
        {503, "Service Unavailable"},
        {504, "Gateway Timeout"},
        {505, "HTTP Version Not Supported"},
    };

    for (size_t i = 0; i < sizeof reasons / sizeof *reasons; i++)
        if (reasons[i].status == status)
            return reasons[i].reason;
    return "";
}

static const char *date_of(sp_http *http)
{
    time_t now_s = time(NULL);
    struct tm utc;

    if (now_s != http->date_s && gmtime_r(&now_s, &utc)) {
        http->date_s = now_s;
        strftime(http->date, sizeof http->date, "%a, %d %b %Y %H:%M:%S GMT", &utc);
    }
    return http->date;
}

void sp_exchange_write_head(sp_exchange *exchange)
{
    sp_text *out = &exchange->connection->out;
    bool chunked = exchange->read && exchange->head.minor > 0;

    sp_text_format(out, "HTTP/1.1 %d %s\r\nDate: %s\r\n", exchange->status,
                   reason_of(exchange->status), date_of(exchange->http));
    if (exchange->content_type)
        sp_text_format(out, "Content-Type: %s\r\n", exchange->content_type);
    for (int32_t i = 0; i < exchange->n_headers; i++)
        sp_text_format(out, "%s: %s\r\n", exchange->headers[i].name, exchange->headers[i].value);
    if (chunked)
        sp_text_add(out, "Transfer-Encoding: chunked\r\n");
    else if (!exchange->read && exchange->status != 204) /* which has no body by itself */
        sp_text_format(out, "Content-Length: %zu\r\n", exchange->answer.bytes);
    if (exchange->close_after)
        sp_text_add(out, "Connection: close\r\n");
    else if (exchange->head.minor == 0)
        sp_text_add(out, "Connection: keep-alive\r\n");
    sp_text_add(out, "\r\n");
    if (strcmp(exchange->head.method, "HEAD") == 0) {
        sp_text_free(&exchange->answer);
        exchange->stream_ended = true;
    }
}

/* ---- waking -------------------------------------------------------------------------------- */

void sp_http_wake(sp_exchange *exchange)
{
    sp_http *http = exchange->http;
    bool first;

    pthread_mutex_lock(&http->lock);
    first = !http->woken_first;
    if (!exchange->woken) {
        exchange->woken = true;
        exchange->woken_previous = http->woken_last;
        if (http->woken_last)
            http->woken_last->woken_next = exchange;
        else
            http->woken_first = exchange;
        http->woken_last = exchange;
    }
    pthread_mutex_unlock(&http->lock);
    if (first)
        eventfd_write(http->knock, 1);
}

sp_exchange *sp_http_next_woken(sp_http *http)
{
    sp_exchange *exchange;

    pthread_mutex_lock(&http->lock);
    exchange = http->woken_first;
    if (exchange)
        unlink_woken(exchange);
    pthread_mutex_unlock(&http->lock);
    return exchange;
}
