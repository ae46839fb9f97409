/*
 * connection.c: http.h by one thread that sleeps in epoll. A connection is read only while a
 * request is on its way in; what arrives too early stays in its buffer, or in the kernel's.
 * `advance` takes a connection as far as its bytes and its client allow, whatever woke it.
 */
#include "server/http/http.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "server/http/http_state.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#define TICK_MS            100
#define EVENTS_MAX         64
#define ACCEPTS_MAX        64 /* before others get their turn */
#define READS_MAX          4  /* likewise */
#define SCRATCH_BYTES      65536
#define IN_PLACE_BYTES     (256 << 10) /* the most of a body that is received in one call */
#define STREAM_BLOCK_BYTES 16384
#define SEND_BUFFER_BYTES  131072 /* what a client that does not read may hold in the system */
#define IN_KEPT_BYTES      65536  /* a larger buffer is given back between two requests */
#define HALF_CLOSED_NS     150000000u
#define LINGER_NS          (2ull * SP_NS_PER_S)
#define SURPLUS_IDLE_S     5
#define DRAIN_RECEIVE_NS   (1ull * SP_NS_PER_S)
#define DRAIN_SEND_NS      (5ull * SP_NS_PER_S)

static const sp_http_refusal body_too_large = {
    413, "body-too-large", "the body is larger than the server takes (--body-bytes-max)"};
static const sp_http_refusal no_room_for_body = {
    503, SP_CODE_MEMORY_FULL,
    "clients fill all memory that they may (--client-bytes-max); try again later"};
static const sp_http_refusal receives_too_long = {
    408, "receive-timeout", "the request did not come in within --receive-timeout"};

/* ---- interest ------------------------------------------------------------------------------ */

static bool has_unsent(const sp_connection *connection)
{
    const sp_exchange *exchange = connection->exchange;

    return connection->out_at < connection->out.bytes ||
           (exchange && exchange->answer_at < exchange->answer.bytes);
}

static uint32_t events_of(const sp_connection *connection)
{
    uint32_t end = connection->half_closed ? 0 : EPOLLRDHUP;

    switch (connection->state) {
    case SP_CONNECTION_HEAD:
    case SP_CONNECTION_BODY:
    case SP_CONNECTION_LINGERING:
        return EPOLLIN;
    case SP_CONNECTION_SENDING:
        return has_unsent(connection) ? EPOLLOUT | end : end;
    case SP_CONNECTION_WORKING:
        break;
    }
    return end;
}

static void watch(sp_connection *connection)
{
    struct epoll_event event = {.events = events_of(connection), .data.ptr = connection};

    if (connection->dead || event.events == connection->events)
        return;
    connection->events = event.events;
    epoll_ctl(connection->http->epoll, EPOLL_CTL_MOD, connection->fd, &event);
}

static void set_state(sp_connection *connection, sp_connection_state state)
{
    connection->state = state;
    connection->since_ns = sp_clock_ns();
    sp_limits_set_idle(
        connection, state == SP_CONNECTION_LINGERING ||
                        (state == SP_CONNECTION_HEAD && connection->in_at == connection->in.bytes));
}

/* ---- the end of exchanges and connections ---------------------------------------------------- */

static void set_stuck(sp_exchange *exchange, bool stuck)
{
    if (stuck == exchange->stuck)
        return;
    exchange->stuck = stuck;
    atomic_fetch_add(&exchange->http->n_stuck, stuck ? 1 : -1);
}

static void end_exchange(sp_connection *connection, bool whole)
{
    sp_exchange *exchange = connection->exchange;
    const sp_http_handlers *handlers = &connection->http->options.handlers;

    if (!exchange)
        return;
    handlers->ended(handlers->user, exchange, whole);
    sp_exchange_destroy(exchange);
}

void sp_connection_close(sp_connection *connection)
{
    sp_http *http = connection->http;

    if (connection->dead)
        return;
    end_exchange(connection, false);
    connection->dead = true;
    sp_limits_leave(connection);
    if (connection->previous)
        connection->previous->next = connection->next;
    else
        http->first = connection->next;
    if (connection->next)
        connection->next->previous = connection->previous;
    else
        http->last = connection->previous;
    close(connection->fd);
    connection->next = http->dead;
    http->dead = connection;
}

static void free_dead(sp_http *http)
{
    while (http->dead) {
        sp_connection *connection = http->dead;

        http->dead = connection->next;
        sp_text_free(&connection->in);
        sp_text_free(&connection->out);
        sp_free(connection);
    }
}

/* Our side is closed first, and further input is discarded: closing a socket with unread bytes
 * would reset the connection and lose the answer. */
static void linger(sp_connection *connection)
{
    if (shutdown(connection->fd, SHUT_WR) != 0) {
        sp_connection_close(connection);
        return;
    }
    sp_text_free(&connection->in);
    connection->in_at = 0;
    set_state(connection, SP_CONNECTION_LINGERING);
}

static void finish_answer(sp_connection *connection)
{
    bool close_after = connection->exchange->close_after;

    end_exchange(connection, true);
    sp_text_clear(&connection->out);
    connection->out_at = 0;
    if (close_after)
        linger(connection);
    else
        set_state(connection, SP_CONNECTION_HEAD);
}

/* ---- answers going out ----------------------------------------------------------------------- */

/* The handlers have answered: the head is written, and sending begins. */
static void begin_sending(sp_connection *connection)
{
    sp_exchange *exchange = connection->exchange;

    exchange->close_after |= !exchange->head.keep_alive || connection->surplus ||
                             connection->half_closed || !exchange->body_ended ||
                             (exchange->read && exchange->head.minor == 0);
    sp_exchange_write_head(exchange);
    set_stuck(exchange, false);
    set_state(connection, SP_CONNECTION_SENDING);
}

/* False: the client takes no more for now, or the connection is closed. */
static bool send_unsent(sp_connection *connection)
{
    sp_exchange *exchange = connection->exchange;

    while (has_unsent(connection)) {
        struct iovec parts[2] = {
            {connection->out.data + connection->out_at, connection->out.bytes - connection->out_at},
            {exchange->answer.data + exchange->answer_at,
             exchange->answer.bytes - exchange->answer_at},
        };
        struct msghdr message = {.msg_iov = parts[0].iov_len > 0 ? parts : parts + 1};
        size_t sent, of_out;
        ssize_t n;

        message.msg_iovlen = parts[0].iov_len > 0 && parts[1].iov_len > 0 ? 2 : 1;
        n = sendmsg(connection->fd, &message, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return false;
        if (n <= 0) {
            sp_connection_close(connection);
            return false;
        }
        sent = (size_t)n;
        of_out = sent < parts[0].iov_len ? sent : parts[0].iov_len;
        connection->out_at += of_out;
        exchange->answer_at += sent - of_out;
        connection->since_ns = sp_clock_ns();
        set_stuck(exchange, false);
    }
    return true;
}

/* The next block of a stream, as a chunk. False: there is none yet, or the connection is closed. */
static bool read_block(sp_connection *connection)
{
    sp_exchange *exchange = connection->exchange;
    char *block = connection->http->scratch;
    bool chunked = exchange->head.minor > 0;
    int64_t n = exchange->read(exchange->read_user, exchange, block, STREAM_BLOCK_BYTES);

    if (n == SP_HTTP_WAIT)
        return false;
    if (n == SP_HTTP_ABORT) {
        sp_connection_close(connection);
        return false;
    }
    sp_text_clear(&connection->out);
    connection->out_at = 0;
    connection->since_ns = sp_clock_ns();
    if (n == SP_HTTP_END) {
        exchange->stream_ended = true;
        sp_text_add(&connection->out, chunked ? "0\r\n\r\n" : "");
        return true;
    }
    exchange->bytes_sent += (uint64_t)n;
    if (chunked)
        sp_text_format(&connection->out, "%llx\r\n", (unsigned long long)n);
    sp_text_add_bytes(&connection->out, block, (size_t)n);
    sp_text_add(&connection->out, chunked ? "\r\n" : "");
    return true;
}

/* Returns whether all was sent, so that the connection is at its next request, or lingers. */
static bool send_answer(sp_connection *connection)
{
    sp_exchange *exchange = connection->exchange;

    for (;;) {
        if (connection->out.failed) {
            sp_connection_close(connection);
            return false;
        }
        if (!send_unsent(connection))
            return false;
        if (!exchange->read || exchange->stream_ended) {
            finish_answer(connection);
            return !connection->dead;
        }
        if (!read_block(connection))
            return false;
    }
}

/* ---- requests coming in ---------------------------------------------------------------------- */

static void refuse(sp_connection *connection, const sp_http_refusal *refusal)
{
    const sp_http_handlers *handlers = &connection->http->options.handlers;
    sp_exchange *exchange = connection->exchange;

    if (!exchange)
        exchange = sp_exchange_create(connection, NULL, 0);
    if (!exchange) {
        sp_connection_close(connection);
        return;
    }
    sp_exchange_drop_body(exchange);
    exchange->close_after = true;
    handlers->refused(handlers->user, exchange, refusal);
    if (exchange->status != 0)
        begin_sending(connection);
    else
        sp_connection_close(connection);
}

/* Either way of an answer's absence is sleep. */
static void take_answer(sp_connection *connection)
{
    if (connection->exchange->status != 0)
        begin_sending(connection);
    else
        set_state(connection, SP_CONNECTION_WORKING);
}

static void complete(sp_connection *connection)
{
    const sp_http_handlers *handlers = &connection->http->options.handlers;

    connection->exchange->body_ended = true;
    set_stuck(connection->exchange, false);
    handlers->complete(handlers->user, connection->exchange);
    take_answer(connection);
}

/* False: it was refused. */
static bool make_room_for_body(sp_connection *connection)
{
    sp_exchange *exchange = connection->exchange;
    const sp_http_options *options = &connection->http->options;

    if (exchange->head.length > exchange->body_bytes_max) {
        refuse(connection, exchange->body_too_large);
        return false;
    }
    if (!exchange->body_in_place || exchange->head.length == 0)
        return true;
    if (sp_budget_hold(options->budget, SP_BUDGET_BODIES, &exchange->body_held,
                       (size_t)exchange->head.length + 1) &&
        sp_text_reserve(&exchange->body, (size_t)exchange->head.length))
        return true;
    sp_limits_note(connection->http, SP_LIMIT_MEMORY);
    refuse(connection, &no_room_for_body);
    return false;
}

/* The headers are judged: the body comes in, or nothing more is needed. */
static void begin_body(sp_connection *connection)
{
    static const char go_on[] = "HTTP/1.1 100 Continue\r\n\r\n";
    sp_exchange *exchange = connection->exchange;
    const sp_http_handlers *handlers = &connection->http->options.handlers;
    bool empty = !exchange->head.chunked && exchange->head.length == 0;

    exchange->body_ended = empty;
    exchange->body_left = exchange->head.length;
    exchange->body_bytes_max = connection->http->options.body_bytes_max;
    exchange->body_too_large = &body_too_large;
    handlers->begun(handlers->user, exchange);
    if (exchange->status != 0) {
        begin_sending(connection);
    } else if (empty) {
        complete(connection);
    } else if (make_room_for_body(connection)) {
        set_state(connection, SP_CONNECTION_BODY);
        if (exchange->head.expects_continue && connection->in_at == connection->in.bytes &&
            send(connection->fd, go_on, sizeof go_on - 1, MSG_NOSIGNAL) != sizeof go_on - 1)
            sp_connection_close(connection);
    }
}

/* Skips empty lines before a request. */
static void skip_empty_lines(sp_connection *connection)
{
    const sp_text *in = &connection->in;

    while (in->bytes - connection->in_at >= 2 &&
           memcmp(in->data + connection->in_at, "\r\n", 2) == 0)
        connection->in_at += 2;
}

/* Returns whether there is something new to look at. */
static bool take_head(sp_connection *connection)
{
    sp_http *http = connection->http;
    sp_http_refusal refusal;
    sp_http_parse parsed;
    size_t bytes = 0;
    const char *head;

    skip_empty_lines(connection);
    if (connection->in_at == connection->in.bytes)
        return false;
    if (connection->idle)
        set_state(connection, SP_CONNECTION_HEAD); /* its first byte: the time-out counts from it */
    head = connection->in.data + connection->in_at;
    parsed =
        sp_http_find_head(head, connection->in.bytes - connection->in_at,
                          http->options.header_bytes_max, &connection->head_from, &bytes, &refusal);
    if (parsed == SP_HTTP_PARSE_MORE)
        return false;
    if (parsed == SP_HTTP_PARSE_REFUSED) {
        refuse(connection, &refusal);
        return true;
    }
    if (!sp_exchange_create(connection, head, bytes)) {
        sp_connection_close(connection);
        return false;
    }
    connection->in_at += bytes;
    connection->head_from = 0;
    parsed = sp_http_parse_head(connection->exchange->head_text, bytes, &connection->exchange->head,
                                &refusal);
    if (parsed == SP_HTTP_PARSE_REFUSED)
        refuse(connection, &refusal);
    else
        begin_body(connection);
    return true;
}

/* False: it was refused. */
static bool add_to_body(sp_connection *connection, const char *data, size_t bytes)
{
    sp_exchange *exchange = connection->exchange;
    const sp_http_options *options = &connection->http->options;

    if (exchange->body.bytes + bytes > exchange->body_bytes_max) {
        refuse(connection, exchange->body_too_large);
        return false;
    }
    sp_text_add_bytes(&exchange->body, data, bytes);
    if (!exchange->body.failed && sp_budget_hold(options->budget, SP_BUDGET_BODIES,
                                                 &exchange->body_held, exchange->body.capacity))
        return true;
    sp_limits_note(connection->http, SP_LIMIT_MEMORY);
    refuse(connection, &no_room_for_body);
    return false;
}

static bool take_chunks(sp_connection *connection)
{
    sp_exchange *exchange = connection->exchange;

    while (connection->in_at < connection->in.bytes) {
        sp_http_refusal refusal;
        const char *data;
        size_t taken, bytes;
        sp_http_parse parsed = sp_http_parse_chunk(
            &exchange->chunks, connection->in.data + connection->in_at,
            connection->in.bytes - connection->in_at, &taken, &data, &bytes, &refusal);

        if (parsed == SP_HTTP_PARSE_REFUSED) {
            refuse(connection, &refusal);
            return true;
        }
        connection->in_at += taken;
        if (bytes > 0 && !add_to_body(connection, data, bytes))
            return true;
        if (parsed == SP_HTTP_PARSE_DONE) {
            complete(connection);
            return true;
        }
    }
    return false;
}

/* Returns whether there is something new to look at. */
static bool take_body(sp_connection *connection)
{
    sp_exchange *exchange = connection->exchange;
    size_t bytes = connection->in.bytes - connection->in_at;

    if (exchange->head.chunked)
        return take_chunks(connection);
    bytes = bytes < exchange->body_left ? bytes : (size_t)exchange->body_left;
    if (bytes > 0 && !add_to_body(connection, connection->in.data + connection->in_at, bytes))
        return true;
    connection->in_at += bytes;
    exchange->body_left -= bytes;
    if (exchange->body_left > 0)
        return false;
    complete(connection);
    return true;
}

static void tidy_in(sp_connection *connection)
{
    sp_text *in = &connection->in;
    size_t left = in->bytes - connection->in_at;

    if (connection->dead || (left > 0 && connection->in_at < IN_KEPT_BYTES))
        return;
    if (left > 0) {
        memmove(in->data, in->data + connection->in_at, left);
        in->bytes = left;
        in->data[left] = '\0';
    } else if (in->capacity > IN_KEPT_BYTES) {
        sp_text_free(in);
    } else {
        sp_text_clear(in);
    }
    connection->in_at = 0;
}

static void advance(sp_connection *connection)
{
    bool moved = true;

    while (moved && !connection->dead) {
        switch (connection->state) {
        case SP_CONNECTION_HEAD:
            moved = take_head(connection);
            break;
        case SP_CONNECTION_BODY:
            moved = take_body(connection);
            break;
        case SP_CONNECTION_SENDING:
            moved = send_answer(connection);
            break;
        case SP_CONNECTION_WORKING:
        case SP_CONNECTION_LINGERING:
            moved = false;
            break;
        }
    }
    tidy_in(connection);
    watch(connection);
}

/* ---- events -------------------------------------------------------------------------------- */

static bool is_reading(const sp_connection *connection)
{
    return !connection->dead &&
           (connection->state == SP_CONNECTION_HEAD || connection->state == SP_CONNECTION_BODY ||
            connection->state == SP_CONNECTION_LINGERING);
}

/* The rest of a body whose memory is there goes straight into it. NULL: the next bytes do not. */
static char *place_for_body(const sp_connection *connection, size_t *out_bytes)
{
    const sp_exchange *exchange = connection->exchange;
    bool in_place = connection->state == SP_CONNECTION_BODY && exchange->body_in_place &&
                    !exchange->head.chunked && connection->in_at == connection->in.bytes;

    if (!in_place)
        return NULL;
    *out_bytes =
        exchange->body_left < IN_PLACE_BYTES ? (size_t)exchange->body_left : IN_PLACE_BYTES;
    return exchange->body.data + exchange->body.bytes;
}

static void take_in_place(sp_connection *connection, size_t bytes)
{
    sp_exchange *exchange = connection->exchange;

    exchange->body.bytes += bytes;
    exchange->body.data[exchange->body.bytes] = '\0';
    exchange->body_left -= bytes;
    if (exchange->body_left > 0)
        return;
    complete(connection);
    advance(connection);
}

static void read_in(sp_connection *connection)
{
    char *scratch = connection->http->scratch;

    for (int i = 0; i < READS_MAX && is_reading(connection); i++) {
        size_t most = SCRATCH_BYTES;
        char *place = place_for_body(connection, &most);
        ssize_t n = recv(connection->fd, place ? place : scratch, most, 0);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        if (n <= 0) {
            sp_connection_close(connection);
            return;
        }
        if (connection->state == SP_CONNECTION_LINGERING)
            continue;
        if (place) {
            take_in_place(connection, (size_t)n);
            continue;
        }
        sp_text_add_bytes(&connection->in, scratch, (size_t)n);
        if (connection->in.failed)
            sp_connection_close(connection);
        else
            advance(connection);
        if (n < SCRATCH_BYTES)
            return;
    }
}

static void take_event(sp_connection *connection, uint32_t events)
{
    if (connection->dead)
        return;
    if ((events & (EPOLLERR | EPOLLHUP)) && !is_reading(connection)) {
        sp_connection_close(connection);
        return;
    }
    if (events & EPOLLRDHUP) {
        connection->half_closed = true;
        connection->half_closed_ns = sp_clock_ns();
        watch(connection);
    }
    if (events & (EPOLLIN | EPOLLERR | EPOLLHUP))
        read_in(connection);
    if ((events & EPOLLOUT) && !connection->dead)
        advance(connection);
}

static void wake(sp_connection *connection)
{
    const sp_http_handlers *handlers = &connection->http->options.handlers;
    sp_exchange *exchange = connection->exchange;

    exchange->wake_ns = 0;
    if (connection->state == SP_CONNECTION_WORKING) {
        handlers->woken(handlers->user, exchange);
        if (exchange->status != 0)
            begin_sending(connection);
    }
    if (connection->state == SP_CONNECTION_SENDING)
        advance(connection);
}

static void run_woken(sp_http *http)
{
    sp_exchange *exchange;

    while ((exchange = sp_http_next_woken(http)) != NULL)
        wake(exchange->connection);
}

static void append(sp_http *http, sp_connection *added)
{
    added->previous = http->last;
    if (http->last)
        http->last->next = added;
    else
        http->first = added;
    http->last = added;
}

static void add_connection(sp_http *http, int fd, const struct sockaddr_storage *from)
{
    sp_connection *added = sp_calloc(1, sizeof *added);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = added};
    int one = 1, send_bytes = SEND_BUFFER_BYTES;

    if (!added) {
        close(fd);
        return;
    }
    added->http = http;
    added->fd = fd;
    added->since_ns = sp_clock_ns();
    added->events = event.events;
    if (!sp_limits_admit(added, from)) {
        close(fd);
        sp_free(added);
        return;
    }
    append(http, added);
    /* Tokens are small and wanted at once. */
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &send_bytes, sizeof send_bytes);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one); /* a client may vanish unheard */
    if (epoll_ctl(http->epoll, EPOLL_CTL_ADD, fd, &event) != 0)
        sp_connection_close(added);
}

static void listen_again(sp_http *http, bool again)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = &http->listener};

    if (http->listener < 0 || http->listening == again)
        return;
    http->listening = again;
    epoll_ctl(http->epoll, again ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, http->listener, &event);
}

static void accept_some(sp_http *http)
{
    for (int i = 0; i < ACCEPTS_MAX && http->listener >= 0; i++) {
        struct sockaddr_storage from = {0};
        socklen_t bytes = sizeof from;
        int fd =
            accept4(http->listener, (struct sockaddr *)&from, &bytes, SOCK_NONBLOCK | SOCK_CLOEXEC);

        if (fd >= 0) {
            add_connection(http, fd, &from);
            continue;
        }
        if (errno == EINTR || errno == ECONNABORTED)
            continue;
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
            sp_limits_shed(http);
            listen_again(http, false); /* until the next tick: else epoll would never sleep */
        }
        return;
    }
}

/* ---- time ---------------------------------------------------------------------------------- */

static bool is_late(const sp_connection *connection, int64_t limit_s, uint64_t now_ns)
{
    return now_ns - connection->since_ns > (uint64_t)limit_s * SP_NS_PER_S;
}

static void time_out(sp_connection *connection)
{
    connection->http->counts.timed_out++;
    sp_connection_close(connection);
}

static void look_at_receiver(sp_connection *connection, uint64_t now_ns)
{
    sp_http *http = connection->http;

    if (is_late(connection, http->options.receive_timeout_s, now_ns)) {
        http->counts.timed_out++;
        refuse(connection, &receives_too_long);
        advance(connection);
    } else if (connection->exchange && http->quiesced_ns != 0 &&
               now_ns - http->quiesced_ns > DRAIN_RECEIVE_NS) {
        set_stuck(connection->exchange, true);
    }
}

static void wake_if_due(sp_connection *connection, uint64_t now_ns)
{
    if (connection->exchange->wake_ns != 0 && now_ns >= connection->exchange->wake_ns)
        wake(connection);
}

static void look_at_sender(sp_connection *connection, uint64_t now_ns)
{
    sp_http *http = connection->http;

    if (connection->half_closed && now_ns - connection->half_closed_ns > HALF_CLOSED_NS &&
        connection->exchange->read)
        sp_connection_close(connection);
    else if (has_unsent(connection) && is_late(connection, http->options.send_timeout_s, now_ns))
        time_out(connection);
    else if (has_unsent(connection) && http->quiesced_ns != 0 &&
             now_ns - connection->since_ns > DRAIN_SEND_NS)
        set_stuck(connection->exchange, true);
    else
        wake_if_due(connection, now_ns);
}

static void look_at(sp_connection *connection, uint64_t now_ns)
{
    const sp_http_options *options = &connection->http->options;
    int32_t idle_s = options->idle_timeout_s;

    switch (connection->state) {
    case SP_CONNECTION_HEAD:
        if (connection->surplus && idle_s > SURPLUS_IDLE_S)
            idle_s = SURPLUS_IDLE_S;
        if (connection->idle && is_late(connection, idle_s, now_ns))
            time_out(connection);
        else if (!connection->idle)
            look_at_receiver(connection, now_ns);
        break;
    case SP_CONNECTION_BODY:
        look_at_receiver(connection, now_ns);
        break;
    case SP_CONNECTION_WORKING:
        if (connection->half_closed && now_ns - connection->half_closed_ns > HALF_CLOSED_NS)
            sp_connection_close(connection);
        else
            wake_if_due(connection, now_ns);
        break;
    case SP_CONNECTION_SENDING:
        look_at_sender(connection, now_ns);
        break;
    case SP_CONNECTION_LINGERING:
        if (now_ns - connection->since_ns > LINGER_NS)
            sp_connection_close(connection);
        break;
    }
}

static void tick(sp_http *http)
{
    uint64_t now_ns = sp_clock_ns();
    sp_connection *next;

    if (atomic_load(&http->quiesce) && http->listener >= 0) {
        accept_some(http); /* those that had come before */
        listen_again(http, false);
        sp_http_close_listener(http);
        http->quiesced_ns = now_ns;
    }
    listen_again(http, true);
    for (sp_connection *c = http->first; c; c = next) {
        next = c->next;
        look_at(c, now_ns);
    }
}

/* ---- the thread ---------------------------------------------------------------------------- */

static void take_events(sp_http *http, const struct epoll_event *events, int n)
{
    for (int i = 0; i < n; i++) {
        if (events[i].data.ptr == &http->listener) {
            accept_some(http);
        } else if (events[i].data.ptr == &http->knock) {
            eventfd_t ignored;

            eventfd_read(http->knock, &ignored);
        } else {
            take_event(events[i].data.ptr, events[i].events);
        }
    }
}

/* Those whose request is still on its way in are told; they get as much of it as their socket takes
 * at once. */
static void end_all(sp_http *http)
{
    while (http->first) {
        sp_connection *connection = http->first;

        if (connection->state == SP_CONNECTION_BODY && http->unfinished) {
            refuse(connection, http->unfinished);
            advance(connection);
        }
        sp_connection_close(connection);
    }
    free_dead(http);
}

static void *run(void *user)
{
    sp_http *http = user;
    struct epoll_event events[EVENTS_MAX];
    uint64_t next_tick_ns = 0;

    while (!atomic_load(&http->stopping)) {
        uint64_t now_ns = sp_clock_ns();
        int n;

        if (now_ns >= next_tick_ns) {
            tick(http);
            next_tick_ns = now_ns + TICK_MS * 1000000u;
        }
        n = epoll_wait(http->epoll, events, EVENTS_MAX, TICK_MS);
        take_events(http, events, n);
        run_woken(http);
        free_dead(http);
    }
    end_all(http);
    return NULL;
}

/* ---- starting and stopping ----------------------------------------------------------------- */

static sp_status start_loop(sp_http *http, sp_error *error)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = &http->knock};

    http->scratch = sp_malloc(SCRATCH_BYTES);
    if (!http->scratch)
        return sp_fail_memory(error, SCRATCH_BYTES, "the HTTP server");
    http->epoll = epoll_create1(EPOLL_CLOEXEC);
    http->knock = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (http->epoll < 0 || http->knock < 0 ||
        epoll_ctl(http->epoll, EPOLL_CTL_ADD, http->knock, &event) != 0)
        return sp_fail(error, SP_ERR_IO, NULL, NULL, -1, "cannot start the HTTP server: %s",
                       strerror(errno));
    if (pthread_create(&http->thread, NULL, run, http) != 0)
        return sp_fail(error, SP_ERR_THREAD, NULL, NULL, -1, "cannot start the HTTP thread");
    http->has_thread = true;
    return SP_OK;
}

sp_status sp_http_start(const sp_http_options *options, sp_http **out_http, sp_error *error)
{
    sp_http *http = sp_calloc(1, sizeof *http);
    sp_status status;

    if (!http)
        return sp_fail_memory(error, sizeof *http, "the HTTP server");
    http->options = *options;
    http->listener = http->epoll = http->knock = -1;
    pthread_mutex_init(&http->lock, NULL);
    status = sp_limits_fit_descriptors(http, error);
    if (status == SP_OK)
        status = sp_http_listen(http, error);
    if (status == SP_OK)
        status = start_loop(http, error);
    if (status != SP_OK) {
        sp_http_stop(http, NULL);
        return status;
    }
    *out_http = http;
    return SP_OK;
}

const char *sp_http_address(const sp_http *http)
{
    return http->address;
}

void sp_http_quiesce(sp_http *http)
{
    atomic_store(&http->quiesce, true);
    eventfd_write(http->knock, 1);
}

int32_t sp_http_n_working(const sp_http *http)
{
    return atomic_load(&http->n_exchanges) - atomic_load(&http->n_stuck);
}

sp_http_counts sp_http_count(const sp_exchange *exchange)
{
    return exchange->http->counts;
}

void sp_http_stop(sp_http *http, const sp_http_refusal *unfinished)
{
    if (!http)
        return;
    if (http->has_thread) {
        http->unfinished = unfinished;
        atomic_store(&http->stopping, true);
        eventfd_write(http->knock, 1);
        pthread_join(http->thread, NULL);
    }
    sp_http_close_listener(http);
    if (http->epoll >= 0)
        close(http->epoll);
    if (http->knock >= 0)
        close(http->knock);
    pthread_mutex_destroy(&http->lock);
    sp_free(http->scratch);
    sp_free(http);
}
