/*
 * peer_client.c: the client's side of the messages. A call takes a connection for itself, one that
 * another call has left or a new one, and does all progress of it on its own thread. So threads
 * share nothing but the list of idle connections, and a connection that has failed in any way is
 * destroyed before the call returns: then UCX writes to nobody's memory any more.
 */
#include "peer/peer_client.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/integer.h"
#include "peer/peer_transport.h"

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#define CONNECT_MS  5000
#define CALL_MS     30000
#define WINDOW      4                   /* requests in flight */
#define CHUNK_BYTES ((uint64_t)4 << 20) /* of one of them */
#define POLL_MS     20                  /* between two looks at is_cancelled */
#define IDLE_MAX    8
#define HOST_BYTES  256

_Static_assert(CHUNK_BYTES <= SP_PEER_PIECE_BYTES_MAX, "a chunk is a piece");

/* UCX on the devices by which a peer is reached. */
typedef struct route {
    sp_peer_fabric *fabric;
    sp_peer_address local; /* from here; n_bytes 0: not known */
    int32_t n_users;       /* connections */
} route;

typedef struct client {
    route *route;                           /* the latest; under lock */
    char *devices, *gid_index, *transports; /* NULL: UCX's choice */
    bool sees_device;
    char host[HOST_BYTES], shown[HOST_BYTES + 8]; /* shown: as it was given */
    int port;
    sp_peer_key key;
    uint64_t connect_ns_max, call_ns_max;
    pthread_mutex_t lock;
    struct connection *idle; /* under lock */
    size_t n_idle;
    atomic_uint_fast64_t connects, failures, timeouts, manifests, pieces, bytes;
} client;

/* A request, and where its answer goes. */
typedef struct exchange {
    struct connection *connection;
    sp_peer_kind want;    /* 0: the place is free */
    sp_peer_header asked; /* the request */
    void *memory;         /* of DATA */
    bool on_device;
    bool receiving, done;
    sp_peer_header header; /* the answer */
    void *body;            /* of other kinds; owned */
} exchange;

typedef struct connection {
    client *client;
    route *route;
    struct connection *next; /* idle */
    sp_peer_port *port;
    sp_peer_link *link;
    uint64_t session, last_request;
    sp_peer_key key; /* of this connection; empty: no tags */
    bool welcome;
    sp_status failure; /* SP_OK: it can be used */
    sp_error error;
    exchange exchanges[WINDOW];
} connection;

typedef struct offer {
    sp_peer_offer public;
    uint64_t number;
    connection *connection; /* NULL: lost */
} offer;

/* ---- failures -------------------------------------------------------------------------------- */

/* The first failure stays. */
static void fail(connection *c, sp_status status, const char *code, const char *what)
{
    if (c->failure == SP_OK)
        c->failure = sp_fail(&c->error, status, code, c->client->shown, -1, "the peer %s %s",
                             c->client->shown, what);
}

static void fail_protocol(connection *c, const char *what)
{
    fail(c, SP_ERR_PEER_PROTOCOL, "peer-protocol", what);
}

static void fail_as(connection *c, sp_status status, const sp_error *error)
{
    if (c->failure == SP_OK) {
        c->failure = status;
        c->error = *error;
    }
}

typedef struct failure_row {
    uint32_t number;
    sp_status status;
    const char *code;
} failure_row;

static const failure_row failures[] = {
#define FAILURE_ROW(name, number, status, code) {number, status, code},
    SP_PEER_FAILURE_LIST(FAILURE_ROW)
#undef FAILURE_ROW
};

/* The peer has answered that it will not. */
static void fail_refused(connection *c, const exchange *e)
{
    char text[SP_PEER_TEXT_BYTES_MAX + 1];
    size_t n = (size_t)e->header.body_bytes;

    memcpy(text, e->body, n);
    text[n] = '\0';
    for (size_t i = 0; i < sizeof failures / sizeof failures[0]; i++)
        if (failures[i].number == e->header.part && c->failure == SP_OK)
            c->failure = sp_fail(&c->error, failures[i].status, failures[i].code, c->client->shown,
                                 -1, "the peer %s says: %s", c->client->shown, text);
}

/* ---- answers --------------------------------------------------------------------------------- */

static exchange *find_exchange(connection *c, const sp_peer_header *header)
{
    for (size_t i = 0; i < WINDOW; i++) {
        exchange *e = &c->exchanges[i];

        if (e->want && !e->receiving && !e->done &&
            (e->asked.request == header->request ||
             (header->request == 0 && header->kind == SP_PEER_FAILED)))
            return e;
    }
    return NULL;
}

/* Whether this is the kind of answer that the request wants, on this connection. */
static bool is_answer(const connection *c, const exchange *e, const sp_peer_header *header)
{
    const sp_peer_header *asked = &e->asked;

    if (header->kind == SP_PEER_FAILED)
        return true;
    if (header->kind != e->want)
        return false;
    if (header->kind == SP_PEER_CHALLENGE)
        return header->session != 0;
    if (header->session != c->session)
        return false;
    return header->kind != SP_PEER_DATA ||
           (header->offer == asked->offer && header->part == asked->part &&
            header->offset == asked->offset && header->bytes == asked->bytes);
}

/* Before WELCOME an answer cannot have a tag that both sides can make. */
static bool is_tagged(const connection *c, const exchange *e)
{
    return !c->welcome || sp_peer_is_signed(&c->key, &e->header, e->body);
}

static void finish(connection *c, exchange *e)
{
    e->done = true;
    if (e->want == SP_PEER_WELCOME && e->header.kind == SP_PEER_WELCOME &&
        !sp_peer_is_signed(&c->key, &e->header, e->body))
        fail_protocol(c, "sent a welcome with a wrong tag");
    else if (!is_tagged(c, e))
        fail_protocol(c, "sent an answer with a wrong tag");
    else if (e->header.kind == SP_PEER_FAILED)
        fail_refused(c, e);
}

static void receive(connection *c, exchange *e, sp_peer_arrival *arrival)
{
    uint64_t n = e->header.body_bytes;
    bool is_data = e->header.kind == SP_PEER_DATA;
    sp_error error;
    sp_status status;

    if (!is_data) {
        e->body = sp_malloc((size_t)n + 1);
        if (!e->body) {
            fail_as(c, sp_fail_memory(&error, (size_t)n, "an answer of a peer"), &error);
            return;
        }
    }
    e->receiving = true;
    status = sp_peer_arrival_receive(arrival, is_data ? e->memory : e->body, n,
                                     is_data && e->on_device, e, &error);
    if (status == SP_ERR_MEMORY)
        fail_as(c, status, &error);
    else if (status != SP_OK)
        fail(c, status, status == SP_ERR_PEER_LOST ? "peer-lost" : "peer-protocol",
             status == SP_ERR_PEER_LOST ? "was lost while it sent an answer"
                                        : "sent a body of another length than it said");
}

static void on_message(void *user, sp_peer_link *link, const void *header, size_t header_bytes,
                       uint64_t body_bytes, sp_peer_arrival *arrival)
{
    connection *c = user;
    sp_peer_header read;
    sp_error error;
    exchange *e;

    (void)link;
    (void)body_bytes;
    if (c->failure != SP_OK)
        return;
    if (sp_peer_header_decode(header, header_bytes, c->client->shown, &read, &error) != SP_OK) {
        fail_as(c, error.status, &error);
        return;
    }
    e = find_exchange(c, &read);
    if (!e || !is_answer(c, e, &read)) {
        fail_protocol(c, "sent what is no answer to a request");
        return;
    }
    e->header = read;
    receive(c, e, arrival);
}

static void on_received(void *user, sp_peer_link *link, void *token, bool whole)
{
    connection *c = user;
    exchange *e = token;

    (void)link;
    if (!whole)
        fail(c, SP_ERR_PEER_LOST, "peer-lost", "was lost while it sent an answer");
    else if (c->failure == SP_OK)
        finish(c, e);
}

static void on_lost(void *user, sp_peer_link *link, const char *why)
{
    connection *c = user;
    char what[128];

    (void)link;
    snprintf(what, sizeof what, c->session ? "was lost: %s" : "cannot be reached: %s", why);
    fail(c, c->session ? SP_ERR_PEER_LOST : SP_ERR_PEER_UNREACHABLE,
         c->session ? "peer-lost" : "peer-unreachable", what);
}

static void on_sent(void *user, sp_peer_link *link, void *token, bool whole)
{
    (void)user; /* requests are copied, so their sends have no tokens */
    (void)link;
    (void)token;
    (void)whole;
}

/* ---- requests -------------------------------------------------------------------------------- */

static exchange *free_exchange(connection *c)
{
    for (size_t i = 0; i < WINDOW; i++)
        if (!c->exchanges[i].want)
            return &c->exchanges[i];
    return NULL;
}

static void forget(exchange *e)
{
    sp_free(e->body);
    memset(e, 0, sizeof *e);
}

/* Signs and sends. Its number, session and length of the body are set here. */
static void send_message(connection *c, sp_peer_header *header, const void *body, size_t body_bytes)
{
    uint8_t bytes[SP_PEER_HEADER_BYTES];
    sp_error error;
    sp_status status;

    header->session = c->session;
    header->request = ++c->last_request;
    header->body_bytes = body_bytes;
    status = sp_peer_sign(&c->key, header, body);
    sp_peer_header_encode(header, bytes);
    if (status != SP_OK)
        (void)sp_fail_memory(&error, 0, "a tag");
    else
        status = sp_peer_link_send(c->link, bytes, body, body_bytes, NULL, NULL, &error);
    if (status == SP_ERR_PEER_LOST)
        fail(c, status, "peer-lost", "was lost");
    else if (status != SP_OK)
        fail_as(c, status, &error);
}

/* There is a free exchange. */
static exchange *request(connection *c, const sp_peer_header *header, const void *body,
                         size_t body_bytes, sp_peer_kind want)
{
    exchange *e = free_exchange(c);

    e->connection = c;
    e->want = want;
    e->asked = *header;
    send_message(c, &e->asked, body, body_bytes);
    return e;
}

/* ---- waiting --------------------------------------------------------------------------------- */

/* For how long one call may wait. */
typedef struct limit {
    const sp_peer_wait *wait;
    uint64_t begin_ns, end_ns;
} limit;

static limit limit_of(const client *from, const sp_peer_wait *wait)
{
    uint64_t now_ns = sp_clock_ns();
    uint64_t end_ns = wait && wait->deadline_ns ? wait->deadline_ns : now_ns + from->call_ns_max;

    return (limit){wait, now_ns, end_ns};
}

/* Fails the connection once the call may wait no longer. */
static void check_limit(connection *c, const limit *l, uint64_t now_ns)
{
    char what[64];

    if (l->wait && l->wait->is_cancelled && l->wait->is_cancelled(l->wait->user)) {
        fail(c, SP_ERR_STATE, "peer-cancelled", "is not needed any more");
    } else if (now_ns >= l->end_ns) {
        snprintf(what, sizeof what, "did not answer within %llu ms",
                 (unsigned long long)((l->end_ns - l->begin_ns) / 1000000));
        atomic_fetch_add(&c->client->timeouts, 1);
        fail(c, SP_ERR_PEER_TIMEOUT, "peer-timeout", what);
    }
}

static void sleep_for_events(connection *c, const limit *l, uint64_t now_ns)
{
    struct pollfd fd = {.fd = sp_peer_port_fd(c->port), .events = POLLIN};
    uint64_t left_ms = (l->end_ns - now_ns) / 1000000 + 1;

    if (sp_peer_port_arm(c->port))
        (void)poll(&fd, 1, left_ms < POLL_MS ? (int)left_ms : POLL_MS);
}

/* Progress until the exchange is done, or any one where it is NULL. */
static sp_status await(connection *c, const exchange *e, const limit *l)
{
    for (;;) {
        uint64_t now_ns;

        if (c->failure != SP_OK)
            return c->failure;
        for (size_t i = 0; i < WINDOW; i++)
            if (c->exchanges[i].done && (!e || e == &c->exchanges[i]))
                return SP_OK;
        now_ns = sp_clock_ns();
        check_limit(c, l, now_ns);
        if (c->failure == SP_OK && !sp_peer_port_progress(c->port))
            sleep_for_events(c, l, now_ns);
    }
}

/* ---- routes ---------------------------------------------------------------------------------- */

static void close_route(route *r)
{
    if (!r)
        return;
    sp_peer_fabric_close(r->fabric);
    sp_free(r);
}

/* `peer` may be NULL: not known now. */
static sp_status open_route(const client *from, const sp_peer_address *peer,
                            const sp_peer_address *local, route **out_route, sp_error *error)
{
    const sp_peer_fabric_options options = {
        .devices = from->devices,
        .gid_index = from->gid_index,
        .transports = from->transports,
        .loopback = peer && sp_peer_address_is_loopback(peer),
        .local = local->n_bytes > 0 ? local : NULL,
    };
    route *r = sp_calloc(1, sizeof *r);
    sp_status status;

    if (!r)
        return sp_fail_memory(error, sizeof *r, "a route");
    r->local = *local;
    status = sp_peer_fabric_open(&options, &r->fabric, error);
    if (status != SP_OK) {
        sp_free(r);
        return status;
    }
    *out_route = r;
    return SP_OK;
}

/* That of the present route to the peer, which changes when links come and go. */
static sp_status take_route(client *from, const sp_peer_address *peer, route **out_route,
                            sp_error *error)
{
    sp_peer_address local;
    bool known = sp_peer_address_local(peer, &local);
    route *r = NULL;
    sp_status status = SP_OK;

    pthread_mutex_lock(&from->lock);
    if (known && !sp_peer_address_is_same(&local, &from->route->local)) {
        status = open_route(from, peer, &local, &r, error);
        if (status == SP_OK) {
            if (from->route->n_users == 0)
                close_route(from->route);
            from->route = r;
        }
    }
    from->route->n_users += status == SP_OK;
    *out_route = from->route;
    pthread_mutex_unlock(&from->lock);
    return status;
}

static void drop_route(client *from, route *r)
{
    pthread_mutex_lock(&from->lock);
    if (--r->n_users == 0 && r != from->route)
        close_route(r);
    pthread_mutex_unlock(&from->lock);
}

/* ---- connections ----------------------------------------------------------------------------- */

static void destroy_connection(connection *c)
{
    if (!c)
        return;
    sp_peer_port_destroy(c->port); /* before memory that UCX may write to */
    if (c->route)
        drop_route(c->client, c->route);
    for (size_t i = 0; i < WINDOW; i++)
        sp_free(c->exchanges[i].body);
    sp_free(c);
}

static sp_status check_proof(connection *c, const uint8_t *nonce, const exchange *challenge)
{
    const uint8_t *server_nonce = challenge->body;
    const uint8_t *proof = server_nonce + SP_PEER_NONCE_BYTES;
    const sp_peer_key *key = &c->client->key;
    uint8_t want[SP_PEER_PROOF_BYTES];

    if (key->n_bytes == 0 && challenge->header.part == 1)
        fail(c, SP_ERR_PEER_REFUSED, "peer-key", "wants a key, and there is none here");
    if (key->n_bytes > 0 && challenge->header.part == 0)
        fail(c, SP_ERR_PEER_REFUSED, "peer-key", "has no key, and the one here has no use");
    if (key->n_bytes == 0 || c->failure != SP_OK)
        return c->failure;
    if (sp_peer_prove(key, SP_PEER_SIDE_SERVER, nonce, server_nonce, want) != SP_OK)
        fail(c, SP_ERR_MEMORY, NULL, "could not be checked: out of memory");
    else if (!sp_peer_equal(want, proof, sizeof want))
        fail(c, SP_ERR_PEER_REFUSED, "peer-key", "has another key");
    return c->failure;
}

/* What follows a CHALLENGE: this side's proof. Without a key it is all zeros. */
static sp_status answer_challenge(connection *c, const uint8_t *nonce, exchange *challenge,
                                  const limit *l)
{
    const sp_peer_key *key = &c->client->key;
    uint8_t proof[SP_PEER_PROOF_BYTES] = {0};
    const uint8_t *server_nonce = challenge->body;
    exchange *e;
    sp_status status = check_proof(c, nonce, challenge);

    if (status != SP_OK)
        return status;
    c->session = challenge->header.session;
    if (key->n_bytes > 0)
        status = sp_peer_prove(key, SP_PEER_SIDE_CLIENT, nonce, server_nonce, proof);
    if (status == SP_OK)
        status = sp_peer_connection_key(key, nonce, server_nonce, &c->key);
    if (status != SP_OK) {
        fail(c, status, NULL, "could not be answered: out of memory");
        return c->failure;
    }
    e = request(c, &(sp_peer_header){.kind = SP_PEER_PROOF}, proof, sizeof proof, SP_PEER_WELCOME);
    status = await(c, e, l);
    forget(e);
    c->welcome = status == SP_OK;
    return status;
}

static sp_status greet(connection *c, const limit *l)
{
    uint8_t nonce[SP_PEER_NONCE_BYTES];
    exchange *e;
    sp_status status;

    if (getrandom(nonce, sizeof nonce, 0) != (ssize_t)sizeof nonce) {
        fail(c, SP_ERR_IO, NULL, "cannot be greeted: no random bytes");
        return c->failure;
    }
    e = request(c, &(sp_peer_header){.kind = SP_PEER_HELLO}, nonce, sizeof nonce,
                SP_PEER_CHALLENGE);
    status = await(c, e, l);
    if (status == SP_OK)
        status = answer_challenge(c, nonce, e, l);
    forget(e);
    return status;
}

static sp_status create_connection(client *from, connection **out_connection, sp_error *error)
{
    connection *c = sp_calloc(1, sizeof *c);
    const sp_peer_events events = {.user = c,
                                   .on_message = on_message,
                                   .on_received = on_received,
                                   .on_sent = on_sent,
                                   .on_lost = on_lost};
    sp_peer_address address;
    sp_status status;

    if (!c)
        return sp_fail_memory(error, sizeof *c, "a connection");
    c->client = from;
    status = sp_peer_address_resolve(from->host, from->port, &address, error);
    if (status == SP_OK)
        status = take_route(from, &address, &c->route, error);
    if (status == SP_OK)
        status = sp_peer_port_create(c->route->fabric, &events, &c->port, error);
    if (status == SP_OK)
        status = sp_peer_port_connect(c->port, &address, c, &c->link, error);
    if (status != SP_OK) {
        destroy_connection(c);
        return status;
    }
    *out_connection = c;
    return SP_OK;
}

static sp_status connect_anew(client *from, const limit *l, connection **out_connection,
                              sp_error *error)
{
    connection *c = NULL;
    limit shorter = *l;
    uint64_t end_ns = sp_clock_ns() + from->connect_ns_max;
    sp_status status = create_connection(from, &c, error);

    if (status != SP_OK)
        return status;
    atomic_fetch_add(&from->connects, 1);
    if (end_ns < shorter.end_ns)
        shorter.end_ns = end_ns;
    status = greet(c, &shorter);
    if (status == SP_OK) {
        *out_connection = c;
        return SP_OK;
    }
    if (error)
        *error = c->error;
    destroy_connection(c);
    return status;
}

static connection *take_idle(client *from)
{
    connection *c;

    pthread_mutex_lock(&from->lock);
    c = from->idle;
    if (c) {
        from->idle = c->next;
        from->n_idle--;
    }
    pthread_mutex_unlock(&from->lock);
    return c;
}

/* An idle connection that is still whole, as far as can be seen from here. */
static connection *reuse(client *from)
{
    connection *c;

    while ((c = take_idle(from)) != NULL) {
        for (int i = 0; i < 16 && sp_peer_port_progress(c->port); i++)
            ;
        if (c->failure == SP_OK)
            return c;
        destroy_connection(c);
    }
    return NULL;
}

static void give_back(connection *c)
{
    client *to = c->client;
    bool kept;

    if (c->failure != SP_OK) {
        destroy_connection(c);
        return;
    }
    pthread_mutex_lock(&to->lock);
    kept = to->n_idle < IDLE_MAX;
    if (kept) {
        c->next = to->idle;
        to->idle = c;
        to->n_idle++;
    }
    pthread_mutex_unlock(&to->lock);
    if (!kept)
        destroy_connection(c);
}

/* ---- one request on any connection ----------------------------------------------------------- */

static sp_status ask_on(connection *c, const sp_peer_header *header, const void *body,
                        size_t body_bytes, sp_peer_kind want, const limit *l, exchange **out_answer)
{
    *out_answer = request(c, header, body, body_bytes, want);
    return await(c, *out_answer, l);
}

/*
 * Sends a request and waits for its answer, which the caller forgets. A connection that was idle
 * may have ended unseen, so then a new one gets a second try.
 */
static sp_status ask(client *from, const sp_peer_header *header, const void *body,
                     size_t body_bytes, sp_peer_kind want, const limit *l,
                     connection **out_connection, exchange **out_answer, sp_error *error)
{
    connection *c = reuse(from);
    sp_status status = SP_ERR_PEER_LOST;

    if (c) {
        status = ask_on(c, header, body, body_bytes, want, l, out_answer);
        if (status == SP_ERR_PEER_LOST) {
            destroy_connection(c);
            c = NULL;
        }
    }
    if (!c) {
        status = connect_anew(from, l, &c, error);
        if (status != SP_OK)
            return status;
        status = ask_on(c, header, body, body_bytes, want, l, out_answer);
    }
    if (status != SP_OK) {
        if (error)
            *error = c->error;
        destroy_connection(c);
        return status;
    }
    *out_connection = c;
    return SP_OK;
}

static sp_status count_failure(client *from, sp_status status)
{
    if (status != SP_OK)
        atomic_fetch_add(&from->failures, 1);
    return status;
}

/* ---- calls ----------------------------------------------------------------------------------- */

static sp_status client_list(void *user, const sp_peer_wait *wait, sp_peer_listing *out_listing,
                             sp_error *error)
{
    client *from = user;
    limit l = limit_of(from, wait);
    connection *c;
    exchange *e;
    sp_status status = ask(from, &(sp_peer_header){.kind = SP_PEER_LIST}, NULL, 0, SP_PEER_LISTING,
                           &l, &c, &e, error);

    if (status != SP_OK)
        return count_failure(from, status);
    status = sp_peer_listing_decode(e->body, (size_t)e->header.body_bytes, out_listing, error);
    forget(e);
    give_back(c);
    return count_failure(from, status);
}

static sp_status check_manifest(const client *from, const sp_peer_query *query,
                                const sp_peer_manifest *manifest, sp_error *error)
{
    if (query->name && strcmp(query->name, manifest->name) != 0)
        return sp_fail(error, SP_ERR_PEER_PROTOCOL, "peer-protocol", from->shown, -1,
                       "the peer %s was asked about \"%s\" and describes \"%s\"", from->shown,
                       query->name, manifest->name);
    if (query->digest && memcmp(query->digest->bytes, manifest->digest.bytes, SP_DIGEST_BYTES) != 0)
        return sp_fail(error, SP_ERR_NOT_FOUND, "peer-not-found", from->shown, -1,
                       "the peer %s has other content than was wanted as \"%s\"", from->shown,
                       manifest->name);
    return SP_OK;
}

static void release_offer(connection *c, uint64_t number)
{
    sp_peer_header header = {.kind = SP_PEER_RELEASE, .offer = number};

    send_message(c, &header, NULL, 0);
    for (int i = 0; i < 16 && sp_peer_port_progress(c->port); i++)
        ;
    give_back(c);
}

/* Of the answer, whose connection the offer takes on success. */
static sp_status create_offer(connection *c, const sp_peer_query *query, const exchange *answer,
                              offer **out_offer, sp_error *error)
{
    offer *o = sp_calloc(1, sizeof *o);
    sp_status status;

    if (!o)
        return sp_fail_memory(error, sizeof *o, "a manifest");
    status = sp_peer_manifest_decode(answer->body, (size_t)answer->header.body_bytes,
                                     &o->public.manifest, error);
    if (status == SP_OK)
        status = check_manifest(c->client, query, &o->public.manifest, error);
    if (status != SP_OK) {
        sp_peer_manifest_free(&o->public.manifest);
        sp_free(o);
        return status;
    }
    o->public.proven = c->key.n_bytes > 0;
    o->number = answer->header.offer;
    o->connection = c;
    *out_offer = o;
    return SP_OK;
}

static sp_status client_describe(void *user, const sp_peer_query *query, const sp_peer_wait *wait,
                                 sp_peer_offer **out_offer, sp_error *error)
{
    client *from = user;
    limit l = limit_of(from, wait);
    const void *body = query->name ? (const void *)query->name : (const void *)query->digest;
    size_t n = query->name ? strlen(query->name) : sizeof *query->digest;
    sp_peer_header header = {.kind = SP_PEER_MANIFEST,
                             .part = query->name ? SP_PEER_BY_NAME : SP_PEER_BY_DIGEST};
    connection *c;
    exchange *e;
    offer *o = NULL;
    sp_status status;

    if (n == 0 || n > SP_PEER_NAME_BYTES_MAX)
        return sp_fail(error, SP_ERR_NOT_FOUND, "peer-not-found", from->shown, -1,
                       "no peer has an adapter whose name has %zu bytes", n);
    status = ask(from, &header, body, n, SP_PEER_OFFER, &l, &c, &e, error);
    if (status != SP_OK)
        return count_failure(from, status);
    status = create_offer(c, query, e, &o, error);
    if (status != SP_OK) {
        uint64_t number = e->header.offer;

        forget(e);
        release_offer(c, number);
        return count_failure(from, status);
    }
    forget(e);
    atomic_fetch_add(&from->manifests, 1);
    *out_offer = &o->public;
    return SP_OK;
}

/* ---- fetching -------------------------------------------------------------------------------- */

static sp_status check_ranges(const sp_peer_manifest *m, const sp_peer_range *ranges,
                              size_t n_ranges, sp_error *error)
{
    for (size_t i = 0; i < n_ranges; i++) {
        const sp_peer_range *range = &ranges[i];
        uint64_t all = range->part == SP_PEER_PART_TENSORS ? m->data_bytes
                       : m->image                          ? m->image->bytes
                                                           : 0;

        if (range->bytes == 0 || range->bytes > all || range->offset > all - range->bytes ||
            !range->memory)
            return sp_fail(error, SP_ERR_ARGUMENT, NULL, "ranges", (int64_t)i,
                           "range %zu is not part of what was offered", i);
    }
    return SP_OK;
}

/* How far the ranges have been requested. */
typedef struct cursor {
    const sp_peer_range *range;
    size_t n_left;
    uint64_t at; /* in the range */
} cursor;

static void request_chunk(connection *c, uint64_t number, cursor *next)
{
    const sp_peer_range *range = next->range;
    uint64_t n = range->bytes - next->at < CHUNK_BYTES ? range->bytes - next->at : CHUNK_BYTES;
    sp_peer_header header = {.kind = SP_PEER_PIECE,
                             .offer = number,
                             .part = range->part,
                             .offset = range->offset + next->at,
                             .bytes = n};
    exchange *e = free_exchange(c);

    e->memory = (char *)range->memory + next->at; /* before the answer can come */
    e->on_device = range->on_device;
    (void)request(c, &header, NULL, 0, SP_PEER_DATA);
    next->at += n;
    if (next->at == range->bytes) {
        next->range++;
        next->n_left--;
        next->at = 0;
    }
}

static void count_chunk(client *from, exchange *e)
{
    atomic_fetch_add(&from->pieces, 1);
    atomic_fetch_add(&from->bytes, e->header.bytes);
    forget(e);
}

static sp_status fetch_all(connection *c, uint64_t number, cursor next, const limit *l)
{
    size_t n_in_flight = 0;
    sp_status status = SP_OK;

    while (status == SP_OK && (next.n_left > 0 || n_in_flight > 0)) {
        for (; next.n_left > 0 && n_in_flight < WINDOW; n_in_flight++)
            request_chunk(c, number, &next);
        status = await(c, NULL, l);
        for (size_t i = 0; i < WINDOW && status == SP_OK; i++) {
            if (c->exchanges[i].done) {
                count_chunk(c->client, &c->exchanges[i]);
                n_in_flight--;
            }
        }
    }
    return status;
}

static sp_status client_fetch(void *user, sp_peer_offer *public, const sp_peer_range *ranges,
                              size_t n_ranges, const sp_peer_wait *wait, sp_error *error)
{
    client *from = user;
    offer *o = (offer *)public;
    limit l = limit_of(from, wait);
    sp_status status = check_ranges(&public->manifest, ranges, n_ranges, error);

    if (status != SP_OK)
        return status;
    if (!o->connection)
        return sp_fail(error, SP_ERR_PEER_LOST, "peer-lost", from->shown, -1,
                       "the connection to the peer %s was lost before", from->shown);
    status = fetch_all(o->connection, o->number, (cursor){ranges, n_ranges, 0}, &l);
    if (status == SP_OK)
        return SP_OK;
    if (error)
        *error = o->connection->error;
    destroy_connection(o->connection);
    o->connection = NULL;
    return count_failure(from, status);
}

static void client_close(void *user, sp_peer_offer *public)
{
    offer *o = (offer *)public;

    (void)user;
    if (!o)
        return;
    if (o->connection)
        release_offer(o->connection, o->number);
    sp_peer_manifest_free(&o->public.manifest);
    sp_free(o);
}

/* ---- the client ------------------------------------------------------------------------------ */

static void client_destroy(void *user)
{
    client *from = user;
    connection *c;

    while ((c = take_idle(from)) != NULL)
        destroy_connection(c);
    close_route(from->route);
    pthread_mutex_destroy(&from->lock);
    memset(&from->key, 0, sizeof from->key);
    sp_free(from->devices);
    sp_free(from->gid_index);
    sp_free(from->transports);
    sp_free(from);
}

bool sp_peer_is_built(const char **out_why)
{
    return sp_peer_fabric_is_built(out_why);
}

static sp_status copy_text(const char *text, char **out_copy, sp_error *error)
{
    *out_copy = text ? sp_strdup(text) : NULL;
    return text && !*out_copy ? sp_fail_memory(error, strlen(text), "a client of a peer") : SP_OK;
}

/* The peer may be unknown or out of reach as yet: each connection looks for the route anew. */
static sp_status open_first_route(client *from, const sp_peer_client_options *options,
                                  sp_error *error)
{
    sp_peer_address address, local = {.n_bytes = 0};
    bool known = sp_peer_address_resolve(from->host, from->port, &address, NULL) == SP_OK;
    sp_status status = copy_text(options->devices, &from->devices, error);

    if (status == SP_OK)
        status = copy_text(options->gid_index, &from->gid_index, error);
    if (status == SP_OK)
        status = copy_text(options->transports, &from->transports, error);
    if (known && !sp_peer_address_local(&address, &local))
        local.n_bytes = 0;
    if (status == SP_OK)
        status = open_route(from, known ? &address : NULL, &local, &from->route, error);
    if (status == SP_OK)
        from->sees_device = sp_peer_fabric_sees_device(from->route->fabric);
    return status;
}

sp_status sp_peer_client_create(const sp_peer_client_options *options, sp_peer_calls *out_calls,
                                sp_error *error)
{
    client *from = sp_calloc(1, sizeof *from);
    sp_status status;

    if (!from)
        return sp_fail_memory(error, sizeof *from, "a client of a peer");
    pthread_mutex_init(&from->lock, NULL);
    status =
        sp_peer_address_split(options->address, from->host, sizeof from->host, &from->port, error);
    if (status == SP_OK)
        status = open_first_route(from, options, error);
    if (status != SP_OK) {
        client_destroy(from);
        return status;
    }
    snprintf(from->shown, sizeof from->shown, "%s", options->address);
    if (options->key)
        from->key = *options->key;
    from->connect_ns_max =
        (options->connect_ms_max ? options->connect_ms_max : CONNECT_MS) * 1000000;
    from->call_ns_max = (options->call_ms_max ? options->call_ms_max : CALL_MS) * 1000000;
    *out_calls = (sp_peer_calls){from,         client_list,  client_describe,
                                 client_fetch, client_close, client_destroy};
    return SP_OK;
}

bool sp_peer_client_sees_device(const sp_peer_calls *calls)
{
    const client *from = calls->user;

    return from->sees_device;
}

void sp_peer_client_count(const sp_peer_calls *calls, sp_peer_client_counts *out_counts)
{
    client *from = calls->user;

    out_counts->connects = atomic_load(&from->connects);
    out_counts->failures = atomic_load(&from->failures);
    out_counts->timeouts = atomic_load(&from->timeouts);
    out_counts->manifests = atomic_load(&from->manifests);
    out_counts->pieces = atomic_load(&from->pieces);
    out_counts->bytes = atomic_load(&from->bytes);
}
