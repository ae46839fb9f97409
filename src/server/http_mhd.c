/*
 * http_mhd.c: http.h by libmicrohttpd: one internal thread with epoll, sleeping by suspending.
 *
 * Two things that the library leaves to us. It does not watch a suspended connection, so a thread
 * of ours polls the sockets of sleeping exchanges for a close. And it takes requests that two
 * parsers could read differently; those are refused before their body is read.
 *
 * One lock guards who sleeps and the list of connections. A socket is closed by the HTTP thread
 * alone, after the connection has left the list under the lock, so a polled socket is never
 * another's.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "server/http.h"
#include "server/tcp.h"

#include <arpa/inet.h>
#include <errno.h>
#include <microhttpd.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#define WATCH_INTERVAL_MS  200
#define STREAM_BLOCK_BYTES 16384
#define SEND_BUFFER_BYTES  131072      /* what a client that does not read may hold in the system */
#define HALF_CLOSED_NS     1000000000u /* for what was sent before to be read */
#define HEADERS_MAX        8
#define ADDRESS_BYTES      64
#define DRAIN_FACTOR       4 /* of the body limit: what a chunked body may waste before the cut */
#define NS_PER_S           1000000000u

/* One connection. */
typedef struct peer {
    struct peer *previous, *next;
    sp_exchange *exchange; /* the one in progress; NULL: idle */
    uint64_t since_ns;     /* idle, or receiving, since then */
    uint64_t taken;        /* bytes of its requests so far, as they came */
    int fd;
    char address[ADDRESS_BYTES];
} peer;

struct sp_http {
    sp_http_options options;
    struct MHD_Daemon *daemon;
    int listener;
    bool quiesced; /* the listener is ours again */
    char address[ADDRESS_BYTES + 16];
    atomic_int n_exchanges;
    pthread_mutex_t lock; /* peers, and sleeping, woken and gone of every exchange */
    pthread_cond_t stop_wanted;
    peer *peers;
    struct pollfd *polled; /* the watcher's own */
    peer **polled_peers;
    int32_t polled_capacity;
    pthread_t watcher;
    bool has_watcher, stopping;
};

typedef struct header {
    const char *name;
    char *value;
} header;

struct sp_exchange {
    sp_http *http;
    struct MHD_Connection *connection;
    peer *peer;
    char *method, *path;
    sp_text body;
    void *context;
    struct MHD_Response *response;
    int status;
    uint64_t bytes_sent, body_seen;
    sp_http_read_fn read;
    void *read_user;
    header headers[HEADERS_MAX];
    int32_t n_headers;
    bool queued, received, too_large;
    bool receiving;             /* under the lock */
    bool chunked;               /* the body is */
    bool sleeping, woken, gone; /* under the lock */
};

/* ---- the request --------------------------------------------------------------------------- */

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
    return exchange->peer ? exchange->peer->address : "";
}

const char *sp_exchange_header(const sp_exchange *exchange, const char *name)
{
    return MHD_lookup_connection_value(exchange->connection, MHD_HEADER_KIND, name);
}

const char *sp_exchange_body(const sp_exchange *exchange, size_t *out_bytes)
{
    *out_bytes = exchange->body.bytes;
    return exchange->body.data ? exchange->body.data : "";
}

void sp_exchange_drop_body(sp_exchange *exchange)
{
    sp_text_free(&exchange->body);
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
    char *copy = exchange->n_headers < HEADERS_MAX && is_plain(value) ? sp_strdup(value) : NULL;

    if (copy)
        exchange->headers[exchange->n_headers++] = (header){name, copy};
}

/* Out of memory for an answer: the connection closes instead. */
static void give_up(sp_exchange *exchange)
{
    pthread_mutex_lock(&exchange->http->lock);
    exchange->gone = true;
    pthread_mutex_unlock(&exchange->http->lock);
}

static bool is_gone(sp_exchange *exchange)
{
    bool gone;

    pthread_mutex_lock(&exchange->http->lock);
    gone = exchange->gone || exchange->http->stopping;
    pthread_mutex_unlock(&exchange->http->lock);
    return gone;
}

static void set_response(sp_exchange *exchange, struct MHD_Response *response, int status,
                         const char *content_type)
{
    if (!response) {
        give_up(exchange);
        return;
    }
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, content_type);
    for (int32_t i = 0; i < exchange->n_headers; i++)
        MHD_add_response_header(response, exchange->headers[i].name, exchange->headers[i].value);
    exchange->response = response;
    exchange->status = status;
}

void sp_exchange_answer(sp_exchange *exchange, int status, const char *content_type, sp_text *body)
{
    struct MHD_Response *response;

    if (exchange->response)
        return;
    if (body->bytes > 0) {
        response =
            MHD_create_response_from_buffer_with_free_callback(body->bytes, body->data, sp_free);
        if (!response)
            sp_free(body->data);
    } else {
        sp_free(body->data);
        response = MHD_create_response_from_buffer(0, NULL, MHD_RESPMEM_PERSISTENT);
    }
    exchange->bytes_sent = body->bytes;
    *body = (sp_text){0};
    set_response(exchange, response, status, content_type);
}

/* Puts the exchange to sleep, unless it was woken since it was last looked at. */
static bool sleep_or_go_on(sp_exchange *exchange)
{
    bool sleeps;

    pthread_mutex_lock(&exchange->http->lock);
    sleeps = !exchange->woken && !exchange->gone && !exchange->http->stopping;
    if (sleeps) {
        MHD_suspend_connection(exchange->connection);
        exchange->sleeping = true;
    }
    exchange->woken = false;
    pthread_mutex_unlock(&exchange->http->lock);
    return sleeps;
}

static ssize_t read_stream(void *cls, uint64_t position, char *buffer, size_t bytes)
{
    sp_exchange *exchange = cls;

    (void)position;
    for (;;) {
        int64_t n;

        if (is_gone(exchange))
            return MHD_CONTENT_READER_END_WITH_ERROR;
        n = exchange->read(exchange->read_user, exchange, buffer, bytes);
        if (n > 0) {
            exchange->bytes_sent += (uint64_t)n;
            return (ssize_t)n;
        }
        if (n == SP_HTTP_END)
            return MHD_CONTENT_READER_END_OF_STREAM;
        if (n == SP_HTTP_ABORT)
            return MHD_CONTENT_READER_END_WITH_ERROR;
        if (sleep_or_go_on(exchange))
            return 0;
    }
}

void sp_exchange_stream(sp_exchange *exchange, const char *content_type, sp_http_read_fn read,
                        void *user)
{
    struct MHD_Response *response;

    if (exchange->response)
        return;
    exchange->read = read;
    exchange->read_user = user;
    response = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, STREAM_BLOCK_BYTES, read_stream,
                                                 exchange, NULL);
    set_response(exchange, response, MHD_HTTP_OK, content_type);
}

int sp_exchange_status(const sp_exchange *exchange)
{
    return exchange->status;
}

uint64_t sp_exchange_bytes_sent(const sp_exchange *exchange)
{
    return exchange->bytes_sent;
}

void sp_http_wake(sp_exchange *exchange)
{
    pthread_mutex_lock(&exchange->http->lock);
    if (exchange->sleeping) {
        exchange->sleeping = false;
        MHD_resume_connection(exchange->connection);
    } else {
        exchange->woken = true;
    }
    pthread_mutex_unlock(&exchange->http->lock);
}

/* ---- checks of the header ------------------------------------------------------------------ */

typedef struct header_check {
    int32_t n_lengths, n_encodings, n_hosts;
    bool control, bad_name, chunked;
    uint64_t length;
} header_check;

/* Digits only: a sign, a list or a blank inside is another reading waiting to happen. */
static bool read_length(const char *value, uint64_t *out_length)
{
    uint64_t length = 0;

    if (*value == '\0')
        return false;
    for (; *value; value++) {
        if (*value < '0' || *value > '9' || length > UINT64_MAX / 10 - 1)
            return false;
        length = length * 10 + (uint64_t)(*value - '0');
    }
    *out_length = length;
    return true;
}

/* "Content-Length : 5" is a length to some and nothing to others. */
static bool is_token(const char *name)
{
    static const char marks[] = "!#$%&'*+-.^_`|~";

    if (*name == '\0')
        return false;
    for (; *name; name++)
        if (!(*name >= '0' && *name <= '9') && !(*name >= 'A' && *name <= 'Z') &&
            !(*name >= 'a' && *name <= 'z') && !strchr(marks, *name))
            return false;
    return true;
}

static enum MHD_Result check_one(void *cls, enum MHD_ValueKind kind, const char *name,
                                 const char *value)
{
    header_check *check = cls;

    (void)kind;
    if (!value)
        value = "";
    for (const unsigned char *c = (const unsigned char *)value; *c; c++)
        check->control |= (*c < 0x20 && *c != '\t') || *c == 0x7f;
    check->bad_name |= !is_token(name);
    if (strcasecmp(name, MHD_HTTP_HEADER_CONTENT_LENGTH) == 0) {
        check->n_lengths++;
        if (!read_length(value, &check->length))
            check->n_lengths = 2;
    } else if (strcasecmp(name, MHD_HTTP_HEADER_TRANSFER_ENCODING) == 0) {
        check->n_encodings++;
        check->chunked = strcasecmp(value, "chunked") == 0;
    } else if (strcasecmp(name, MHD_HTTP_HEADER_HOST) == 0) {
        check->n_hosts++;
    }
    return MHD_YES;
}

/* NULL, or what is wrong, with the status. */
static const char *check_headers(sp_exchange *exchange, int *out_status)
{
    header_check check = {0};

    MHD_get_connection_values(exchange->connection, MHD_HEADER_KIND, check_one, &check);
    exchange->chunked = check.n_encodings > 0;
    *out_status = MHD_HTTP_BAD_REQUEST;
    if (check.control)
        return "a header holds a control character";
    if (check.bad_name)
        return "the name of a header is no token";
    if (check.n_hosts > 1)
        return "more than one Host header";
    if (check.n_lengths > 1)
        return "Content-Length is not one whole number";
    if (check.n_encodings > 1 || (check.n_encodings == 1 && !check.chunked))
        return "a Transfer-Encoding other than chunked";
    if (check.n_encodings == 1 && check.n_lengths > 0)
        return "both Content-Length and Transfer-Encoding";
    *out_status = MHD_HTTP_CONTENT_TOO_LARGE;
    if (check.length > exchange->http->options.body_bytes_max)
        return "the body is larger than the server takes (--body-bytes-max)";
    return NULL;
}

/* ---- life of an exchange ------------------------------------------------------------------- */

static void free_exchange(sp_exchange *exchange)
{
    for (int32_t i = 0; i < exchange->n_headers; i++)
        sp_free(exchange->headers[i].value);
    sp_text_free(&exchange->body);
    sp_free(exchange->method);
    sp_free(exchange->path);
    sp_free(exchange);
}

static sp_exchange *create_exchange(sp_http *http, struct MHD_Connection *connection,
                                    const char *method, const char *path)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    sp_exchange *exchange = sp_calloc(1, sizeof *exchange);

    if (!exchange)
        return NULL;
    exchange->http = http;
    exchange->connection = connection;
    exchange->method = sp_strdup(method);
    exchange->path = sp_strdup(path);
    exchange->peer = info ? info->socket_context : NULL;
    if (!exchange->method || !exchange->path || !exchange->peer) {
        free_exchange(exchange);
        return NULL;
    }
    atomic_fetch_add(&http->n_exchanges, 1);
    pthread_mutex_lock(&http->lock);
    exchange->peer->exchange = exchange;
    exchange->peer->since_ns = sp_clock_ns();
    exchange->receiving = true;
    pthread_mutex_unlock(&http->lock);
    return exchange;
}

static void request_completed(void *cls, struct MHD_Connection *connection, void **context,
                              enum MHD_RequestTerminationCode code)
{
    sp_http *http = cls;
    sp_exchange *exchange = *context;

    (void)connection;
    if (!exchange)
        return;
    *context = NULL;
    http->options.handlers.ended(http->options.handlers.user, exchange,
                                 code == MHD_REQUEST_TERMINATED_COMPLETED_OK);
    pthread_mutex_lock(&http->lock);
    exchange->peer->exchange = NULL;
    exchange->peer->since_ns = sp_clock_ns();
    pthread_mutex_unlock(&http->lock);
    atomic_fetch_sub(&http->n_exchanges, 1);
    free_exchange(exchange);
}

/*
 * Whether more has come than this request and those before it. libmicrohttpd takes a header line
 * that begins with a colon or a NUL for the end of the header, where a proxy in front of it may
 * not: what follows, a request to the one, are headers of the first to the other. No client sends a
 * second request before the answer to the first, so such a connection ends behind the answer.
 */
static bool has_leftover(const sp_exchange *exchange)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(exchange->connection, MHD_CONNECTION_INFO_REQUEST_HEADER_SIZE);

    if (exchange->chunked || !info)
        return true; /* its length on the wire is not known */
    exchange->peer->taken += info->header_size + exchange->body_seen;
    return sp_tcp_bytes_received(exchange->peer->fd) != exchange->peer->taken;
}

static enum MHD_Result queue_answer(sp_exchange *exchange)
{
    enum MHD_Result result;

    if (has_leftover(exchange))
        MHD_add_response_header(exchange->response, MHD_HTTP_HEADER_CONNECTION, "close");
    result =
        MHD_queue_response(exchange->connection, (unsigned)exchange->status, exchange->response);

    /* The connection holds it from here on; the pointer still says that there is an answer. */
    MHD_destroy_response(exchange->response);
    exchange->queued = true;
    return result;
}

/* Answers a request whose form is wrong, and lets the connection close behind it. */
static enum MHD_Result refuse(sp_exchange *exchange, int status, const char *why)
{
    const sp_http_handlers *handlers = &exchange->http->options.handlers;

    sp_exchange_add_header(exchange, MHD_HTTP_HEADER_CONNECTION, "close");
    handlers->refused(handlers->user, exchange, status, why);
    return exchange->response ? queue_answer(exchange) : MHD_NO;
}

static enum MHD_Result begin(sp_exchange *exchange)
{
    const sp_http_handlers *handlers = &exchange->http->options.handlers;
    int status;
    const char *why = check_headers(exchange, &status);

    if (why)
        return refuse(exchange, status, why);
    handlers->begun(handlers->user, exchange);
    return exchange->response ? queue_answer(exchange) : MHD_YES;
}

static enum MHD_Result take_body(sp_exchange *exchange, const char *data, size_t bytes)
{
    size_t most = exchange->http->options.body_bytes_max;

    exchange->body_seen += bytes;
    if (exchange->body_seen > most) {
        exchange->too_large = true;
        sp_text_free(&exchange->body);
        return exchange->body_seen / DRAIN_FACTOR > most ? MHD_NO : MHD_YES;
    }
    sp_text_add_bytes(&exchange->body, data, bytes);
    return exchange->body.failed ? MHD_NO : MHD_YES;
}

/* The body is in, or a sleeper was woken. */
static enum MHD_Result go_on(sp_exchange *exchange)
{
    const sp_http_handlers *handlers = &exchange->http->options.handlers;

    if (exchange->too_large)
        return refuse(exchange, MHD_HTTP_CONTENT_TOO_LARGE,
                      "the body is larger than the server takes (--body-bytes-max)");
    if (!exchange->received) {
        exchange->received = true;
        pthread_mutex_lock(&exchange->http->lock);
        exchange->receiving = false;
        pthread_mutex_unlock(&exchange->http->lock);
        handlers->complete(handlers->user, exchange);
    } else {
        handlers->woken(handlers->user, exchange);
    }
    while (!exchange->response) {
        if (is_gone(exchange))
            return MHD_NO;
        if (sleep_or_go_on(exchange))
            return MHD_YES;
        handlers->woken(handlers->user, exchange);
    }
    return queue_answer(exchange);
}

static enum MHD_Result on_request(void *cls, struct MHD_Connection *connection, const char *url,
                                  const char *method, const char *version, const char *data,
                                  size_t *data_bytes, void **context)
{
    sp_http *http = cls;
    sp_exchange *exchange = *context;

    (void)version;
    if (!exchange) {
        exchange = create_exchange(http, connection, method, url);
        *context = exchange;
        return exchange ? begin(exchange) : MHD_NO;
    }
    if (exchange->queued)
        return MHD_NO;
    if (*data_bytes > 0) {
        size_t bytes = *data_bytes;

        *data_bytes = 0;
        return take_body(exchange, data, bytes);
    }
    return go_on(exchange);
}

/* ---- connections --------------------------------------------------------------------------- */

static void name_peer(struct MHD_Connection *connection, peer *added)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
    const struct sockaddr *address = info ? info->client_addr : NULL;

    if (address && address->sa_family == AF_INET)
        inet_ntop(AF_INET, &((const struct sockaddr_in *)(const void *)address)->sin_addr,
                  added->address, sizeof added->address);
    else if (address && address->sa_family == AF_INET6)
        inet_ntop(AF_INET6, &((const struct sockaddr_in6 *)(const void *)address)->sin6_addr,
                  added->address, sizeof added->address);
}

static void add_peer(sp_http *http, struct MHD_Connection *connection, void **context)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    peer *added = sp_calloc(1, sizeof *added);
    int one = 1, send_bytes = SEND_BUFFER_BYTES;

    *context = added;
    if (!added)
        return; /* its first request is turned away */
    added->fd = info->connect_fd;
    added->since_ns = sp_clock_ns();
    name_peer(connection, added);
    /* Tokens are small and wanted at once. */
    setsockopt(added->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(added->fd, SOL_SOCKET, SO_SNDBUF, &send_bytes, sizeof send_bytes);
    pthread_mutex_lock(&http->lock);
    added->next = http->peers;
    if (http->peers)
        http->peers->previous = added;
    http->peers = added;
    pthread_mutex_unlock(&http->lock);
}

static void remove_peer(sp_http *http, peer *removed)
{
    pthread_mutex_lock(&http->lock);
    if (removed->previous)
        removed->previous->next = removed->next;
    else
        http->peers = removed->next;
    if (removed->next)
        removed->next->previous = removed->previous;
    pthread_mutex_unlock(&http->lock);
    sp_free(removed);
}

static void on_connection(void *cls, struct MHD_Connection *connection, void **context,
                          enum MHD_ConnectionNotificationCode code)
{
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        add_peer(cls, connection, context);
    } else if (*context) {
        remove_peer(cls, *context);
        *context = NULL;
    }
}

/* ---- the watcher --------------------------------------------------------------------------- */

static bool reserve_polled(sp_http *http, int32_t n)
{
    struct pollfd *fds;
    peer **peers;
    int32_t capacity = n + n / 2 + 16;

    if (n <= http->polled_capacity)
        return true;
    fds = sp_realloc(http->polled, (size_t)capacity * sizeof *fds);
    if (fds)
        http->polled = fds;
    peers = sp_realloc(http->polled_peers, (size_t)capacity * sizeof *peers);
    if (peers)
        http->polled_peers = peers;
    if (!fds || !peers)
        return false;
    http->polled_capacity = capacity;
    return true;
}

/* Idle for too long, or sending its request for too long: the socket is shut, and the HTTP thread
 * sees its end. */
static void shut_if_late(const sp_http *http, const peer *connection, uint64_t now_ns)
{
    int32_t limit_s = 0;

    if (!connection->exchange)
        limit_s = http->options.idle_timeout_s;
    else if (connection->exchange->receiving)
        limit_s = http->options.receive_timeout_s;
    if (limit_s > 0 && now_ns - connection->since_ns > (uint64_t)limit_s * NS_PER_S)
        shutdown(connection->fd, SHUT_RDWR);
}

static void wake_gone(sp_exchange *exchange)
{
    exchange->gone = true;
    exchange->sleeping = false;
    MHD_resume_connection(exchange->connection);
}

static bool is_quiet(const peer *connection)
{
    return !connection->exchange || connection->exchange->receiving;
}

/* The client has closed its side: a sleeper is ended; one whose request can never be completed any
 * more gives its place to others. */
static void take_close(const peer *connection, uint64_t now_ns)
{
    if (connection->exchange && connection->exchange->sleeping)
        wake_gone(connection->exchange);
    else if (is_quiet(connection) && now_ns - connection->since_ns > HALF_CLOSED_NS)
        shutdown(connection->fd, SHUT_RDWR);
}

/* Under the lock. */
static void watch_once(sp_http *http)
{
    uint64_t now_ns = sp_clock_ns();
    int32_t n = 0;

    for (peer *p = http->peers; p; p = p->next) {
        shut_if_late(http, p, now_ns);
        if (!(is_quiet(p) || p->exchange->sleeping) || !reserve_polled(http, n + 1))
            continue;
        http->polled[n] = (struct pollfd){.fd = p->fd, .events = POLLRDHUP};
        http->polled_peers[n++] = p;
    }
    if (n == 0 || poll(http->polled, (nfds_t)n, 0) <= 0)
        return;
    for (int32_t i = 0; i < n; i++)
        if (http->polled[i].revents & (POLLRDHUP | POLLHUP | POLLERR))
            take_close(http->polled_peers[i], now_ns);
}

static void *watch(void *cls)
{
    sp_http *http = cls;

    pthread_mutex_lock(&http->lock);
    while (!http->stopping) {
        struct timespec until;

        watch_once(http);
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += WATCH_INTERVAL_MS * 1000000L;
        if (until.tv_nsec >= (long)NS_PER_S) {
            until.tv_nsec -= (long)NS_PER_S;
            until.tv_sec++;
        }
        pthread_cond_timedwait(&http->stop_wanted, &http->lock, &until);
    }
    for (peer *p = http->peers; p; p = p->next) {
        if (p->exchange && p->exchange->sleeping)
            wake_gone(p->exchange);
        else if (p->exchange)
            p->exchange->gone = true;
    }
    pthread_mutex_unlock(&http->lock);
    return NULL;
}

/* ---- starting and stopping ----------------------------------------------------------------- */

static sp_status cannot_listen(const sp_http_options *options, sp_error *error)
{
    return sp_fail(error, SP_ERR_IO, NULL, "port", -1, "cannot listen on %s port %d: %s",
                   options->host, options->port, strerror(errno));
}

static void print_address(const struct sockaddr_storage *bound, char *out_text, size_t bytes)
{
    char host[ADDRESS_BYTES] = "";

    if (bound->ss_family == AF_INET6) {
        const struct sockaddr_in6 *six = (const struct sockaddr_in6 *)(const void *)bound;

        inet_ntop(AF_INET6, &six->sin6_addr, host, sizeof host);
        snprintf(out_text, bytes, "[%s]:%u", host, ntohs(six->sin6_port));
    } else {
        const struct sockaddr_in *four = (const struct sockaddr_in *)(const void *)bound;

        inet_ntop(AF_INET, &four->sin_addr, host, sizeof host);
        snprintf(out_text, bytes, "%s:%u", host, ntohs(four->sin_port));
    }
}

static sp_status listen_on(sp_http *http, const struct addrinfo *found, sp_error *error)
{
    struct sockaddr_storage bound = {0};
    socklen_t bytes = sizeof bound;
    int one = 1;

    http->listener = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (http->listener < 0)
        return cannot_listen(&http->options, error);
    setsockopt(http->listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(http->listener, found->ai_addr, found->ai_addrlen) != 0 ||
        listen(http->listener, SOMAXCONN) != 0 ||
        getsockname(http->listener, (struct sockaddr *)&bound, &bytes) != 0)
        return cannot_listen(&http->options, error);
    print_address(&bound, http->address, sizeof http->address);
    return SP_OK;
}

static sp_status open_listener(sp_http *http, sp_error *error)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    struct addrinfo *found = NULL;
    char port[16];
    sp_status status;

    snprintf(port, sizeof port, "%d", http->options.port);
    if (getaddrinfo(http->options.host, port, &hints, &found) != 0 || !found)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "host", -1,
                       "there is no address for --host %s", http->options.host);
    status = listen_on(http, found, error);
    freeaddrinfo(found);
    return status;
}

/* Paths stay as they were sent: the routes decode them, and refuse what does not decode. */
static size_t keep_escapes(void *cls, struct MHD_Connection *connection, char *text)
{
    (void)cls;
    (void)connection;
    return strlen(text);
}

static sp_status start_daemon(sp_http *http, sp_error *error)
{
    const sp_http_options *o = &http->options;
    unsigned flags = MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME;

    if (http->address[0] == '[')
        flags |= MHD_USE_IPv6;
    http->daemon = MHD_start_daemon(
        flags, 0, NULL, NULL, on_request, http, MHD_OPTION_LISTEN_SOCKET, http->listener,
        MHD_OPTION_STRICT_FOR_CLIENT, 1, MHD_OPTION_CONNECTION_LIMIT, (unsigned)o->connections_max,
        MHD_OPTION_PER_IP_CONNECTION_LIMIT, (unsigned)o->connections_per_address_max,
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, o->header_bytes_max + STREAM_BLOCK_BYTES,
        MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)o->send_timeout_s, MHD_OPTION_NOTIFY_COMPLETED,
        request_completed, http, MHD_OPTION_NOTIFY_CONNECTION, on_connection, http,
        MHD_OPTION_UNESCAPE_CALLBACK, keep_escapes, NULL, MHD_OPTION_END);
    if (!http->daemon)
        return sp_fail(error, SP_ERR_THREAD, NULL, NULL, -1, "cannot start the HTTP thread");
    if (pthread_create(&http->watcher, NULL, watch, http) != 0)
        return sp_fail(error, SP_ERR_THREAD, NULL, NULL, -1, "cannot start the HTTP watcher");
    http->has_watcher = true;
    return SP_OK;
}

sp_status sp_http_start(const sp_http_options *options, sp_http **out_http, sp_error *error)
{
    sp_http *http = sp_calloc(1, sizeof *http);
    pthread_condattr_t monotonic;
    sp_status status;

    if (!http)
        return sp_fail_memory(error, sizeof *http, "the HTTP server");
    http->options = *options;
    http->listener = -1;
    pthread_mutex_init(&http->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&http->stop_wanted, &monotonic);
    pthread_condattr_destroy(&monotonic);
    status = open_listener(http, error);
    if (status == SP_OK)
        status = start_daemon(http, error);
    if (status != SP_OK) {
        sp_http_stop(http);
        return status;
    }
    *out_http = http;
    return SP_OK;
}

const char *sp_http_address(const sp_http *http)
{
    return http->address;
}

/* The library's thread may be at the listener still, so it is shut here and closed at the end. */
void sp_http_quiesce(sp_http *http)
{
    if (http->quiesced)
        return;
    http->quiesced = true;
    http->listener = MHD_quiesce_daemon(http->daemon);
    if (http->listener >= 0)
        shutdown(http->listener, SHUT_RDWR);
}

int32_t sp_http_n_exchanges(const sp_http *http)
{
    return atomic_load(&http->n_exchanges);
}

/* Sleepers are woken to their end first: the library may not be stopped while one is suspended. */
void sp_http_stop(sp_http *http)
{
    if (!http)
        return;
    if (http->has_watcher) {
        pthread_mutex_lock(&http->lock);
        http->stopping = true;
        pthread_cond_signal(&http->stop_wanted);
        pthread_mutex_unlock(&http->lock);
        pthread_join(http->watcher, NULL);
    }
    if (http->daemon)
        MHD_stop_daemon(http->daemon);
    if ((!http->daemon || http->quiesced) && http->listener >= 0)
        close(http->listener);
    pthread_cond_destroy(&http->stop_wanted);
    pthread_mutex_destroy(&http->lock);
    sp_free(http->polled);
    sp_free(http->polled_peers);
    sp_free(http);
}
