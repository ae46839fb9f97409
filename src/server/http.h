/*
 * http.h: HTTP/1.1 as the server sees it: requests with their whole body in, answers or streams
 * out. It knows connections, limits and time-outs, and nothing of JSON, models or adapters. The
 * library behind it (http_mhd.c) can be replaced without the rest of the room noticing.
 *
 * One thread, the HTTP thread, calls every handler; a handler must not block. An exchange is one
 * request and its answer. A handler that cannot answer yet returns without an answer: the exchange
 * sleeps until sp_http_wake, which is the one function that other threads may call.
 *
 * A client that closes its side while its exchange sleeps is noticed within a quarter of a second:
 * `ended` is called, and nothing more is sent. (Half of a close counts: the client has said that
 * it will not follow up, and no server can tell the two apart.)
 */
#ifndef SP_SERVER_HTTP_H
#define SP_SERVER_HTTP_H

#include "base/text.h"

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
    /* The request is refused before `complete`, for its form or size: answers with this status. */
    void (*refused)(void *user, sp_exchange *exchange, int status, const char *why);
    /* The last call for an exchange. `whole`: all of the answer was handed to the system. */
    void (*ended)(void *user, sp_exchange *exchange, bool whole);
} sp_http_handlers;

typedef struct sp_http_options {
    const char *host; /* a name or an address */
    int32_t port;     /* 0: any that is free */
    int32_t connections_max;
    int32_t connections_per_address_max; /* 0: no limit */
    int32_t idle_timeout_s;              /* of a connection without a request */
    int32_t receive_timeout_s;           /* from a request's first byte to its last */
    int32_t send_timeout_s;              /* of a client that takes nothing */
    size_t header_bytes_max, body_bytes_max;
    sp_http_handlers handlers;
} sp_http_options;

/* SP_ERR_ARGUMENT: no such host; SP_ERR_IO: the port cannot be had, with the reason. */
sp_status sp_http_start(const sp_http_options *options, sp_http **out_http, sp_error *error);
/* "127.0.0.1:8000": the address that it listens on. Lives as long as `http`. */
const char *sp_http_address(const sp_http *http);
/* Takes no new connection from now on; requests on open ones go on. */
void sp_http_quiesce(sp_http *http);
/* Exchanges that have begun and not ended. Any thread. */
int32_t sp_http_n_exchanges(const sp_http *http);
/* Ends every exchange and frees all. NULL is allowed. */
void sp_http_stop(sp_http *http);

/* ---- the request --------------------------------------------------------------------------- */

const char *sp_exchange_method(const sp_exchange *exchange);
const char *sp_exchange_path(const sp_exchange *exchange);   /* as sent, without the query */
const char *sp_exchange_client(const sp_exchange *exchange); /* its address, without the port */
/* NULL: it has none. Names are compared without case. */
const char *sp_exchange_header(const sp_exchange *exchange, const char *name);
const char *sp_exchange_body(const sp_exchange *exchange, size_t *out_bytes);
/* Gives the body's memory back before the end of a long exchange. */
void sp_exchange_drop_body(sp_exchange *exchange);

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

int sp_exchange_status(const sp_exchange *exchange);          /* 0: not answered */
uint64_t sp_exchange_bytes_sent(const sp_exchange *exchange); /* of the body */

/* Any thread, while the exchange has not ended: it, or its stream, is looked at again. */
void sp_http_wake(sp_exchange *exchange);

#endif
