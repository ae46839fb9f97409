/*
 * http.h: HTTP/1.1 as the server sees it: requests with their whole body in, answers or streams
 * out. It knows connections, limits and time-outs, and nothing of JSON, models or adapters.
 *
 * One thread, the HTTP thread, calls every handler; a handler must not block. An exchange is one
 * request and its answer. A handler that cannot answer yet returns without an answer: the exchange
 * sleeps until sp_http_wake, which is the one function that other threads may call. Whatever is
 * wrong with a request, its framing included, gets its one answer from `refused`.
 *
 * A client that closes its side while its exchange sleeps is noticed within a quarter of a second:
 * `ended` is called, and nothing more is sent. (A half-close counts as one: the client will send
 * nothing more, and no server can tell the two apart.)
 *
 * At the limit of connections the one that has been idle for longest, of the address that has most
 * of them, is closed for a new one. Where none is idle, a few more are accepted and marked: they
 * are for what must always answer (sp_exchange_is_surplus).
 */
#ifndef SP_SERVER_HTTP_HTTP_H
#define SP_SERVER_HTTP_HTTP_H

#include "base/text.h"
#include "server/http/budget.h"
#include "server/http/parse.h"

typedef struct sp_http sp_http;
typedef struct sp_exchange sp_exchange;

typedef struct sp_http_handlers {
    void *user;
    /* The headers are in and well formed. It may answer at once: then no body is read. */
    void (*begun)(void *user, sp_exchange *exchange);
    /* The body is in, whole. Answers, or returns to sleep. */
    void (*complete)(void *user, sp_exchange *exchange);
    /* A sleeping exchange without an answer was woken: answers, or returns to sleep. */
    void (*woken)(void *user, sp_exchange *exchange);
    /* The request is refused before `complete`: answers so. The connection ends after it. */
    void (*refused)(void *user, sp_exchange *exchange, const sp_http_refusal *refusal);
    /* The last call for an exchange. `whole`: all of the answer was handed to the system. */
    void (*ended)(void *user, sp_exchange *exchange, bool whole);
    /* A limit was reached, as a sentence; of each limit at most once in ten seconds. */
    void (*limited)(void *user, const char *what);
} sp_http_handlers;

typedef struct sp_http_options {
    const char *host;      /* a name or an address */
    int32_t port;          /* 0: any that is free */
    const char *unix_path; /* not NULL: a Unix socket there, in place of host and port */
    int32_t connections_max;
    int32_t connections_per_address_max; /* 0: no limit */
    int32_t idle_timeout_s;              /* of a connection without a request */
    int32_t receive_timeout_s;           /* from a request's first byte to its last */
    int32_t send_timeout_s;              /* of a client that takes nothing */
    size_t header_bytes_max, body_bytes_max;
    sp_budget *budget; /* of all bodies; borrowed, may be NULL */
    sp_http_handlers handlers;
} sp_http_options;

/* What has happened at its limits since the start, and what there is now. */
typedef struct sp_http_counts {
    int32_t open, idle;      /* connections now */
    int32_t connections_max; /* the option, limited by the process's descriptors */
    uint64_t shed;           /* idle ones that made way for new ones */
    uint64_t surplus;        /* let in above the limit, for what has to answer always */
    uint64_t turned_away;    /* closed without a request being read */
    uint64_t timed_out;      /* idle, or sending or receiving for too long */
} sp_http_counts;

/*
 * Raises the soft limit of descriptors where it is too low for the connections, and takes fewer
 * connections where that cannot be. SP_ERR_ARGUMENT: no such host, or too few descriptors (`ulimit
 * -n`); SP_ERR_IO: the port cannot be had, with the reason.
 */
sp_status sp_http_start(const sp_http_options *options, sp_http **out_http, sp_error *error);
/* "127.0.0.1:8000" or "unix:PATH": where it listens. Lives as long as `http`. */
const char *sp_http_address(const sp_http *http);
/* Takes no new connection from now on; requests on open ones continue. Any thread. */
void sp_http_quiesce(sp_http *http);
/*
 * Exchanges that are worth waiting for: a handler works on it, or its client takes its answer. Not
 * counted are those whose body has not come in a second after the quiesce, and those whose client
 * has taken nothing for five seconds though all of the answer is there. Any thread.
 */
int32_t sp_http_n_working(const sp_http *http);
/* The HTTP thread, from a handler. */
sp_http_counts sp_http_count(const sp_exchange *exchange);
/* Ends every exchange and frees all; bodies that are still on their way in are refused with
 * `unfinished`. NULL is allowed. */
void sp_http_stop(sp_http *http, const sp_http_refusal *unfinished);

/* ---- the request --------------------------------------------------------------------------- */

const char *sp_exchange_method(const sp_exchange *exchange);
const char *sp_exchange_path(const sp_exchange *exchange);   /* as sent, without the query */
const char *sp_exchange_query(const sp_exchange *exchange);  /* as sent; "" without one */
const char *sp_exchange_client(const sp_exchange *exchange); /* its address, without the port */
/* NULL: it has none. Names are compared without case. */
const char *sp_exchange_header(const sp_exchange *exchange, const char *name);
const char *sp_exchange_body(const sp_exchange *exchange, size_t *out_bytes);
/* Its connection is above the limit: all but the most needed should be refused. */
bool sp_exchange_is_surplus(const sp_exchange *exchange);
/* Gives the body's memory back before the end of a long exchange. */
void sp_exchange_drop_body(sp_exchange *exchange);
/*
 * From `begun`: the body may have bytes_max bytes, whatever the options say; a longer one is
 * refused with `too_large`, which stays. One whose length is known gets its memory, and its part of
 * the budget, before its first byte comes, and is received straight into it.
 */
void sp_exchange_allow_body(sp_exchange *exchange, size_t bytes_max,
                            const sp_http_refusal *too_large);
/* Moves the body to the caller (sp_text_free), with what it holds of the budget: the caller gives
 * that back. Both outputs are overwritten. */
void sp_exchange_take_body(sp_exchange *exchange, sp_text *out_body, size_t *out_held);

/* The handlers' own data. */
void sp_exchange_set_context(sp_exchange *exchange, void *context);
void *sp_exchange_context(const sp_exchange *exchange);

/* ---- the answer ---------------------------------------------------------------------------- */

/* A header of the answer; before it. Values with control characters are left out. */
void sp_exchange_add_header(sp_exchange *exchange, const char *name, const char *value);
/* The whole answer. Takes *body, which is empty afterwards. */
void sp_exchange_answer(sp_exchange *exchange, int status, const char *content_type, sp_text *body);

/*
 * The next bytes of a stream: how many were written to `buffer`, or one of these. After WAIT it
 * is called again when the exchange was woken.
 */
#define SP_HTTP_WAIT  0
#define SP_HTTP_END   (-1)
#define SP_HTTP_ABORT (-2) /* closes the connection, so that the client sees a cut answer */
typedef int64_t (*sp_http_read_fn)(void *user, sp_exchange *exchange, char *buffer, size_t bytes);

/* An answer whose bytes come later (status 200). */
void sp_exchange_stream(sp_exchange *exchange, const char *content_type, sp_http_read_fn read,
                        void *user);

/* A sleeping exchange, or its stream, is looked at again in this time, once, unless it was before.
 */
void sp_exchange_wake_in(sp_exchange *exchange, int64_t milliseconds);

int sp_exchange_status(const sp_exchange *exchange);          /* 0: not answered */
uint64_t sp_exchange_bytes_sent(const sp_exchange *exchange); /* of the body */

/* Any thread, while the exchange has not ended: it, or its stream, is looked at again. */
void sp_http_wake(sp_exchange *exchange);

#endif
