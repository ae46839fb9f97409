/*
 * http_state.h: connections and exchanges, shared by connection.c (the loop), exchange.c (what
 * handlers see) and limits.c (which are closed for others). Everything belongs to the HTTP thread
 * alone, except what is under the lock and the atomics.
 */
#ifndef SP_SERVER_HTTP_HTTP_STATE_H
#define SP_SERVER_HTTP_HTTP_STATE_H

#include "server/http/http.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/un.h>

#define SP_CLIENT_BYTES       64
#define SP_ADDRESS_BUCKETS    1024
#define SP_ANSWER_HEADERS_MAX 12
#define SP_HTTP_SURPLUS_MAX   16 /* connections above the limit */
#define SP_NS_PER_S           1000000000u
#define SP_HTTP_LIMITS        4

typedef enum sp_http_limit {
    SP_LIMIT_CONNECTIONS,
    SP_LIMIT_ADDRESS,
    SP_LIMIT_DESCRIPTORS,
    SP_LIMIT_MEMORY
} sp_http_limit;

/* Clients by address; of IPv6 the network of 64 bits counts, since one client has all of it. */
typedef struct sp_address {
    struct sp_address *next; /* in its bucket */
    char key[SP_CLIENT_BYTES];
    int32_t n, n_idle;
} sp_address;

typedef enum sp_connection_state {
    SP_CONNECTION_HEAD,     /* idle, or the head comes in */
    SP_CONNECTION_BODY,     /* the body comes in */
    SP_CONNECTION_WORKING,  /* a handler has it: it sleeps */
    SP_CONNECTION_SENDING,  /* an answer goes out, or a stream waits for more of it */
    SP_CONNECTION_LINGERING /* all is sent and our side closed; the client's has not */
} sp_connection_state;

typedef struct sp_connection {
    struct sp_connection *previous, *next; /* from the oldest to the youngest */
    sp_http *http;
    sp_exchange *exchange; /* the one in progress; NULL: none */
    sp_address *address;
    sp_connection_state state;
    uint64_t since_ns; /* idle, receiving, without progress, or lingering since then */
    uint64_t half_closed_ns;
    uint32_t events; /* that epoll looks for */
    int fd;
    bool idle; /* counted so in its address */
    bool surplus, half_closed, dead;
    char client[SP_CLIENT_BYTES];
    sp_text in; /* what has come and was not used yet, from in_at on */
    size_t in_at, head_from;
    sp_text out; /* the answer's head, or the next part of a stream, from out_at on */
    size_t out_at;
} sp_connection;

typedef struct sp_answer_header {
    const char *name;
    char *value;
} sp_answer_header;

struct sp_exchange {
    sp_http *http;
    sp_connection *connection;
    char *head_text; /* what `head` points into */
    sp_http_head head;
    sp_http_chunks chunks;
    uint64_t body_left; /* where it has a length */
    bool body_ended;
    sp_text body;
    size_t body_held; /* of the budget */
    size_t body_bytes_max;
    const sp_http_refusal *body_too_large;
    bool body_in_place; /* its memory is there before it comes, where its length is known */
    void *context;
    /* The answer. */
    int status;
    const char *content_type;
    sp_text answer; /* the whole of it, sent after the connection's `out`, from answer_at on */
    size_t answer_at;
    uint64_t bytes_sent;
    sp_http_read_fn read;
    void *read_user;
    bool stream_ended;
    uint64_t wake_ns; /* 0: not by itself */
    bool close_after;
    bool stuck; /* counted in n_stuck */
    sp_answer_header headers[SP_ANSWER_HEADERS_MAX];
    int32_t n_headers;
    /* Under the lock. */
    bool woken;
    sp_exchange *woken_previous, *woken_next;
};

struct sp_http {
    sp_http_options options;
    int listener, epoll, knock; /* the last: an eventfd, for other threads */
    bool listening;             /* epoll looks at the listener */
    char address[sizeof(struct sockaddr_un) + 16];
    dev_t unix_device; /* of the Unix socket's file, which is removed if it is still that one; */
    ino_t unix_inode;  /* 0: there is none */
    pthread_t thread;
    bool has_thread;
    atomic_int n_exchanges, n_stuck;
    atomic_bool quiesce, stopping;
    const sp_http_refusal *unfinished; /* before `stopping` is set */
    uint64_t quiesced_ns;              /* 0: not yet */
    pthread_mutex_t lock;
    sp_exchange *woken_first, *woken_last; /* under the lock */
    sp_connection *first, *last;           /* all that are open */
    sp_connection *dead;                   /* by `next`: freed when no event can name them */
    sp_address *addresses[SP_ADDRESS_BUCKETS];
    int32_t n_surplus;
    sp_http_counts counts;
    uint64_t limited_ns[SP_HTTP_LIMITS];
    time_t date_s;
    char date[40];
    char *scratch;
};

/* exchange.c. The exchange of a head that is in, or of one that is refused (bytes 0). NULL:
 * out of memory. */
sp_exchange *sp_exchange_create(sp_connection *connection, const char *head, size_t bytes);
/* Frees the exchange, whose `ended` has been called. */
void sp_exchange_destroy(sp_exchange *exchange);
/* Puts the answer's head into the connection's `out`. */
void sp_exchange_write_head(sp_exchange *exchange);
/* The next one that was woken, or NULL. */
sp_exchange *sp_http_next_woken(sp_http *http);

/* limits.c. False: it is closed at once, and was counted. */
bool sp_limits_admit(sp_connection *added, const struct sockaddr_storage *from);
void sp_limits_leave(sp_connection *connection);
/* Marks a connection as idle: it can be closed for others. */
void sp_limits_set_idle(sp_connection *connection, bool idle);
/* Says that a limit was reached, unless that was said a moment ago. */
void sp_limits_note(sp_http *http, sp_http_limit limit);
/* The descriptors of this process are used up: closes an idle connection. */
void sp_limits_shed(sp_http *http);
/* See sp_http_start. */
sp_status sp_limits_fit_descriptors(sp_http *http, sp_error *error);

/* connection.c: ends its exchange and closes the socket. */
void sp_connection_close(sp_connection *connection);

/* listener.c: opens the listener and writes its address; closes it, if it is open. */
sp_status sp_http_listen(sp_http *http, sp_error *error);
void sp_http_close_listener(sp_http *http);

#endif
