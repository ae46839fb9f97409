#include "peer/peer_server.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "peer/peer_catalog.h"
#include "peer/peer_transport.h"

#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>

#define MEMORY_BYTES        ((uint64_t)4 << 30)
#define RESCAN_MS           1000
#define STALL_MS            10000
#define IDLE_MS             60000
#define GREET_MS            5000 /* for both proofs */
#define CLIENTS             64
#define OFFERS_MAX          16 /* open at a time, for one client */
#define WAITING_MAX         64 /* requests that wait for the disk, for one client */
#define SENDS_MAX           64 /* answers in flight, for one client */
#define TICK_MS             100
#define LINE_BYTES          512
#define COUNT(server, name) atomic_fetch_add(&(server)->name, 1)

typedef struct peer_offer {
    uint64_t number; /* 0: the place is free */
    sp_peer_entry *entry;
    const char *block; /* pinned since the first piece; NULL: not yet */
    void *registered;
    uint64_t sent_bytes;
    uint64_t begin_ns;
} peer_offer;

/* A request that waits for the catalogue. */
typedef struct waiting {
    sp_peer_header header;
    char body[SP_PEER_NAME_BYTES_MAX + 1]; /* of MANIFEST */
} waiting;

typedef enum client_state { CLIENT_NEW, CLIENT_CHALLENGED, CLIENT_WELCOME } client_state;

typedef struct peer_client {
    sp_peer_server *server;
    struct peer_client *next;
    sp_peer_link *link; /* NULL: closed, and freed once its sends have ended */
    char address[SP_PEER_ADDRESS_BYTES];
    client_state state;
    uint64_t session;
    uint8_t client_nonce[SP_PEER_NONCE_BYTES], server_nonce[SP_PEER_NONCE_BYTES];
    sp_peer_key key;                        /* of the connection; empty: no tags */
    uint64_t begin_ns, request_ns, sent_ns; /* connected; last request; last answer that left */
    int32_t n_sends;
    peer_offer offers[OFFERS_MAX];
    waiting *waits; /* [n_waiting], a ring is not needed: they are answered in order */
    size_t n_waiting;
    uint8_t body[SP_PEER_NAME_BYTES_MAX + 1]; /* of the request that arrives */
} peer_client;

/* An answer whose body is not copied; what it is sent from is held until it has left. */
typedef struct sending {
    peer_client *client;
    sp_peer_entry *entry; /* NULL: of none */
    bool pinned;
    sp_text text; /* of a listing */
    uint64_t bytes;
} sending;

struct sp_peer_server {
    sp_peer_fabric *fabric;
    sp_peer_port *port;
    sp_peer_catalog *catalog;
    sp_peer_key key;
    char address[SP_PEER_ADDRESS_BYTES];
    uint64_t stall_ns, idle_ns;
    int32_t clients_max, n_clients;
    void (*log)(void *user, const char *line);
    void *user;
    int wake; /* eventfd: stop, or the catalogue has changed */
    atomic_bool stop, changed;
    atomic_bool closing; /* nothing is logged any more */
    peer_client *clients;
    uint64_t last_offer;
    atomic_uint_fast64_t connections, turned_away, wrong_keys, protocol_errors, stalled, idle;
    atomic_uint_fast64_t manifests, pieces, sent_bytes, refusals;
    atomic_int_fast32_t shown_clients;
};

/* ---- log ------------------------------------------------------------------------------------- */

static void log_line(sp_peer_server *server, const char *format, ...) SP_PRINTF(2, 3);
static void log_line(sp_peer_server *server, const char *format, ...)
{
    char line[LINE_BYTES];
    va_list arguments;

    if (!server->log || atomic_load(&server->closing))
        return;
    va_start(arguments, format);
    (void)vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    sp_make_printable(line);
    server->log(server->user, line);
}

static void wake(sp_peer_server *server)
{
    const uint64_t one = 1;
    ssize_t n = write(server->wake, &one, sizeof one);

    (void)n; /* full: it will wake anyway */
}

static void on_catalog_changed(void *user)
{
    sp_peer_server *server = user;

    atomic_store(&server->changed, true);
    wake(server);
}

static void on_catalog_log(void *user, const char *line)
{
    sp_peer_server *server = user;

    log_line(server, "%s", line);
}

static void *on_register(void *user, void *memory, size_t bytes)
{
    sp_peer_server *server = user;

    return sp_peer_fabric_register(server->fabric, memory, bytes);
}

static void on_unregister(void *user, void *handle)
{
    sp_peer_server *server = user;

    sp_peer_fabric_unregister(server->fabric, handle);
}

/* ---- offers ---------------------------------------------------------------------------------- */

static peer_offer *find_offer(peer_client *client, uint64_t number)
{
    for (size_t i = 0; i < OFFERS_MAX; i++)
        if (client->offers[i].number == number)
            return &client->offers[i];
    return NULL;
}

static void tell_sent(peer_client *client, const peer_offer *offer)
{
    double seconds = (double)(sp_clock_ns() - offer->begin_ns) * 1e-9;

    if (offer->sent_bytes > 0)
        log_line(client->server, "%s fetched %.1f MiB of \"%s\" in %.2f s", client->address,
                 (double)offer->sent_bytes / 0x1p20, sp_peer_entry_content(offer->entry)->name,
                 seconds);
}

static void end_offer(peer_client *client, peer_offer *offer)
{
    sp_peer_catalog *catalog = client->server->catalog;

    tell_sent(client, offer);
    if (offer->block)
        sp_peer_entry_unpin(catalog, offer->entry);
    sp_peer_entry_release(catalog, offer->entry);
    memset(offer, 0, sizeof *offer);
}

/* ---- clients --------------------------------------------------------------------------------- */

static void close_client(peer_client *client, const char *why)
{
    if (!client->link)
        return;
    sp_peer_link_close(client->link);
    client->link = NULL;
    for (size_t i = 0; i < OFFERS_MAX; i++)
        if (client->offers[i].number)
            end_offer(client, &client->offers[i]);
    client->n_waiting = 0;
    client->server->n_clients--;
    atomic_store(&client->server->shown_clients, client->server->n_clients);
    log_line(client->server, "%s has gone%s%s", client->address, why ? ": " : "", why ? why : "");
}

static void free_closed(sp_peer_server *server)
{
    for (peer_client **at = &server->clients; *at;) {
        peer_client *client = *at;

        if (!client->link && client->n_sends == 0) {
            *at = client->next;
            sp_free(client->waits);
            memset(client, 0, sizeof *client);
            sp_free(client);
        } else {
            at = &client->next;
        }
    }
}

static void *on_connect(void *user, sp_peer_link *link, const sp_peer_address *from)
{
    sp_peer_server *server = user;
    peer_client *client;

    COUNT(server, connections);
    client = server->n_clients < server->clients_max ? sp_calloc(1, sizeof *client) : NULL;
    if (client)
        client->waits = sp_calloc(WAITING_MAX, sizeof *client->waits);
    if (!client || !client->waits) {
        COUNT(server, turned_away);
        sp_free(client);
        return NULL;
    }
    client->server = server;
    client->link = link;
    client->begin_ns = client->request_ns = client->sent_ns = sp_clock_ns();
    sp_peer_address_text(from, client->address);
    client->next = server->clients;
    server->clients = client;
    server->n_clients++;
    atomic_store(&server->shown_clients, server->n_clients);
    return client;
}

static void on_lost(void *user, sp_peer_link *link, const char *why)
{
    peer_client *client = sp_peer_link_user(link);

    (void)user;
    if (client)
        close_client(client, why);
    else
        sp_peer_link_close(link);
}

/* ---- answers --------------------------------------------------------------------------------- */

static void end_sending(sending *s)
{
    sp_peer_catalog *catalog = s->client->server->catalog;

    if (s->pinned)
        sp_peer_entry_unpin(catalog, s->entry);
    if (s->entry)
        sp_peer_entry_release(catalog, s->entry);
    sp_text_free(&s->text);
    sp_free(s);
}

static void on_sent(void *user, sp_peer_link *link, void *token, bool whole)
{
    sending *s = token;
    peer_client *client = s->client;

    (void)user;
    (void)link;
    client->n_sends--;
    client->sent_ns = sp_clock_ns();
    if (whole)
        atomic_fetch_add(&client->server->sent_bytes, s->bytes);
    end_sending(s);
}

/*
 * Signs and sends an answer to `to`. `held` (NULL: the body is short and copied) is taken, whatever
 * happens. A client that cannot be answered is closed.
 */
static void answer(peer_client *client, const sp_peer_header *to, sp_peer_header header,
                   const void *body, uint64_t body_bytes, void *registered, sending *held)
{
    uint8_t bytes[SP_PEER_HEADER_BYTES];
    sp_status status;

    header.session = client->session;
    header.request = to ? to->request : 0;
    header.body_bytes = body_bytes;
    status = sp_peer_sign(&client->key, &header, body);
    sp_peer_header_encode(&header, bytes);
    if (held) {
        held->client = client;
        held->bytes = body_bytes;
    }
    if (status == SP_OK && client->link)
        status = sp_peer_link_send(client->link, bytes, body, body_bytes, registered, held, NULL);
    if (status == SP_OK && client->link) {
        client->n_sends += held != NULL;
        return;
    }
    if (held)
        end_sending(held);
    close_client(client, "it cannot be answered");
}

static void refuse(peer_client *client, const sp_peer_header *to, sp_peer_failure failure,
                   const char *text)
{
    size_t n = strlen(text);

    COUNT(client->server, refusals);
    n = n < SP_PEER_TEXT_BYTES_MAX ? n : SP_PEER_TEXT_BYTES_MAX;
    answer(client, to, (sp_peer_header){.kind = SP_PEER_FAILED, .part = failure}, text, n, NULL,
           NULL);
}

/* ---- greeting -------------------------------------------------------------------------------- */

static void on_hello(peer_client *client, const sp_peer_header *header)
{
    const sp_peer_server *server = client->server;
    uint8_t body[SP_PEER_NONCE_BYTES + SP_PEER_PROOF_BYTES] = {0};
    sp_status status = SP_OK;

    if (client->state != CLIENT_NEW ||
        getrandom(client->server_nonce, SP_PEER_NONCE_BYTES, 0) != SP_PEER_NONCE_BYTES ||
        getrandom(&client->session, sizeof client->session, 0) != sizeof client->session) {
        close_client(client, "a second greeting");
        return;
    }
    client->session |= 1; /* never 0 */
    memcpy(client->client_nonce, client->body, SP_PEER_NONCE_BYTES);
    memcpy(body, client->server_nonce, SP_PEER_NONCE_BYTES);
    if (server->key.n_bytes > 0)
        status = sp_peer_prove(&server->key, SP_PEER_SIDE_SERVER, client->client_nonce,
                               client->server_nonce, body + SP_PEER_NONCE_BYTES);
    if (status != SP_OK) {
        close_client(client, "out of memory");
        return;
    }
    client->state = CLIENT_CHALLENGED;
    answer(client, header,
           (sp_peer_header){.kind = SP_PEER_CHALLENGE, .part = server->key.n_bytes > 0}, body,
           sizeof body, NULL, NULL);
}

static void on_proof(peer_client *client, const sp_peer_header *header)
{
    const sp_peer_key *key = &client->server->key;
    uint8_t want[SP_PEER_PROOF_BYTES] = {0};
    sp_status status = SP_OK;

    if (key->n_bytes > 0)
        status = sp_peer_prove(key, SP_PEER_SIDE_CLIENT, client->client_nonce, client->server_nonce,
                               want);
    if (status != SP_OK || client->state != CLIENT_CHALLENGED) {
        close_client(client, "a proof that was not wanted");
        return;
    }
    if (!sp_peer_equal(want, client->body, sizeof want)) {
        COUNT(client->server, wrong_keys);
        log_line(client->server, "%s has no key, or another one", client->address);
        refuse(client, header, SP_PEER_WRONG_KEY, "the keys of the two sides differ");
        client->state = CLIENT_NEW; /* and stays it: the next message closes it */
        return;
    }
    if (sp_peer_connection_key(key, client->client_nonce, client->server_nonce, &client->key) !=
            SP_OK ||
        !sp_peer_is_signed(&client->key, header, client->body)) {
        close_client(client, "a proof with a wrong tag");
        return;
    }
    client->state = CLIENT_WELCOME;
    log_line(client->server, "%s has connected", client->address);
    answer(client, header, (sp_peer_header){.kind = SP_PEER_WELCOME}, NULL, 0, NULL, NULL);
}

/* ---- requests -------------------------------------------------------------------------------- */

/* Puts a request off until the catalogue has changed. */
static void put_off(peer_client *client, const sp_peer_header *header, const char *body)
{
    waiting *w;

    if (client->n_waiting == WAITING_MAX) {
        refuse(client, header, SP_PEER_OVERLOADED, "too many requests of one client wait");
        return;
    }
    w = &client->waits[client->n_waiting++];
    w->header = *header;
    memcpy(w->body, body, sizeof w->body);
}

static void refuse_failed(peer_client *client, const sp_peer_header *header, sp_status status,
                          const sp_error *error)
{
    sp_peer_failure failure = status == SP_ERR_NOT_FOUND   ? SP_PEER_NOT_FOUND
                              : status == SP_ERR_PEER_LOST ? SP_PEER_GONE
                                                           : SP_PEER_INTERNAL;

    refuse(client, header, failure, error->text);
}

static void make_offer(peer_client *client, const sp_peer_header *header, sp_peer_entry *entry)
{
    const sp_peer_content *content = sp_peer_entry_content(entry);
    peer_offer *offer = find_offer(client, 0);
    sending *held = offer ? sp_calloc(1, sizeof *held) : NULL;

    if (!held) {
        sp_peer_entry_release(client->server->catalog, entry);
        refuse(client, header, SP_PEER_OVERLOADED, "too many adapters are open");
        return;
    }
    /* One reference is the offer's, one the answer's, whose body is the entry's. */
    *offer = (peer_offer){
        .number = ++client->server->last_offer, .entry = entry, .begin_ns = sp_clock_ns()};
    held->entry = sp_peer_entry_retain(client->server->catalog, entry);
    COUNT(client->server, manifests);
    answer(client, header, (sp_peer_header){.kind = SP_PEER_OFFER, .offer = offer->number},
           content->manifest.data, content->manifest.bytes, NULL, held);
}

static void on_manifest(peer_client *client, const sp_peer_header *header, const char *body)
{
    bool by_name = header->part == SP_PEER_BY_NAME;
    char name[SP_PEER_NAME_BYTES_MAX + 1] = "";
    sp_digest digest;
    sp_peer_entry *entry;
    sp_error error;
    sp_status status;

    memcpy(digest.bytes, body, sizeof digest.bytes);
    memcpy(name, body, header->body_bytes);
    status = sp_peer_catalog_find(client->server->catalog, by_name ? name : NULL,
                                  by_name ? NULL : &digest, &entry, &error);
    if (status == SP_OK)
        make_offer(client, header, entry);
    else if (status == SP_PENDING)
        put_off(client, header, body);
    else
        refuse_failed(client, header, status, &error);
}

static void send_piece(peer_client *client, const sp_peer_header *header, peer_offer *offer,
                       uint64_t at)
{
    sp_peer_header data = {.kind = SP_PEER_DATA,
                           .offer = offer->number,
                           .part = header->part,
                           .offset = header->offset,
                           .bytes = header->bytes};
    sp_peer_catalog *catalog = client->server->catalog;
    const char *block;
    void *registered;
    sending *held = client->n_sends < SENDS_MAX ? sp_calloc(1, sizeof *held) : NULL;

    if (!held) {
        refuse(client, header, SP_PEER_OVERLOADED, "too many answers are in flight");
        return;
    }
    /* The answer has a pin of its own: the offer may end before it has left. */
    (void)sp_peer_entry_pin(catalog, offer->entry, &block, &registered);
    held->pinned = true;
    held->entry = sp_peer_entry_retain(catalog, offer->entry);
    offer->sent_bytes += header->bytes;
    COUNT(client->server, pieces);
    answer(client, header, data, block + at, header->bytes, registered, held);
}

static void on_piece(peer_client *client, const sp_peer_header *header, const char *body)
{
    peer_offer *offer = find_offer(client, header->offer);
    sp_status status = SP_OK;
    uint64_t at;

    if (!offer ||
        !sp_peer_content_find(sp_peer_entry_content(offer->entry), (sp_peer_part)header->part,
                              header->offset, header->bytes, &at)) {
        refuse(client, header, SP_PEER_OUT_OF_RANGE, "not a part of what was offered");
        return;
    }
    if (!offer->block)
        status = sp_peer_entry_pin(client->server->catalog, offer->entry, &offer->block,
                                   &offer->registered);
    if (status == SP_OK)
        send_piece(client, header, offer, at);
    else if (status == SP_PENDING)
        put_off(client, header, body);
    else
        refuse(client, header, SP_PEER_GONE, "the files have changed");
}

static void on_list(peer_client *client, const sp_peer_header *header)
{
    sending *held = sp_calloc(1, sizeof *held);

    if (!held || sp_peer_catalog_list(client->server->catalog, &held->text, NULL) != SP_OK) {
        if (held)
            sp_text_free(&held->text);
        sp_free(held);
        refuse(client, header, SP_PEER_INTERNAL, "out of memory");
        return;
    }
    if (held->text.bytes > SP_PEER_LISTING_BYTES_MAX) {
        sp_text_free(&held->text);
        sp_free(held);
        refuse(client, header, SP_PEER_INTERNAL, "there are too many adapters to list");
        return;
    }
    answer(client, header, (sp_peer_header){.kind = SP_PEER_LISTING}, held->text.data,
           held->text.bytes, NULL, held);
}

static void on_release(peer_client *client, const sp_peer_header *header)
{
    peer_offer *offer = find_offer(client, header->offer);

    if (offer)
        end_offer(client, offer);
}

static void dispatch(peer_client *client, const sp_peer_header *header, const char *body)
{
    switch (header->kind) {
    case SP_PEER_LIST:
        on_list(client, header);
        break;
    case SP_PEER_MANIFEST:
        on_manifest(client, header, body);
        break;
    case SP_PEER_PIECE:
        on_piece(client, header, body);
        break;
    case SP_PEER_RELEASE:
        on_release(client, header);
        break;
    default: /* an answer, and nothing was requested of a client */
        COUNT(client->server, protocol_errors);
        close_client(client, "it sent an answer");
    }
}

/* The requests that wait, in order; those that still must are put off again. */
static void retry_waiting(peer_client *client)
{
    size_t n = client->n_waiting;
    waiting *waits = client->waits;

    if (n == 0)
        return;
    client->waits = sp_calloc(WAITING_MAX, sizeof *waits);
    if (!client->waits) {
        client->waits = waits; /* at the next change */
        return;
    }
    client->n_waiting = 0;
    for (size_t i = 0; i < n && client->link; i++)
        dispatch(client, &waits[i].header, waits[i].body);
    sp_free(waits);
}

/* ---- messages -------------------------------------------------------------------------------- */

static void on_request(peer_client *client, const sp_peer_header *header)
{
    client->request_ns = sp_clock_ns();
    if (header->kind == SP_PEER_HELLO) {
        on_hello(client, header);
    } else if (header->kind == SP_PEER_PROOF) {
        on_proof(client, header);
    } else if (client->state != CLIENT_WELCOME || header->session != client->session ||
               !sp_peer_is_signed(&client->key, header, client->body)) {
        COUNT(client->server, protocol_errors);
        close_client(client, "it sent a request without a welcome, or with a wrong tag");
    } else {
        dispatch(client, header, (const char *)client->body);
    }
}

static void on_malformed(peer_client *client, const sp_error *error)
{
    COUNT(client->server, protocol_errors);
    if (strcmp(error->code, "peer-version") == 0)
        refuse(client, NULL, SP_PEER_OTHER_VERSION, error->text);
    else
        close_client(client, error->text);
}

/* Requests are short, so their bodies come with them. */
static void on_message(void *user, sp_peer_link *link, const void *header, size_t header_bytes,
                       uint64_t body_bytes, sp_peer_arrival *arrival)
{
    peer_client *client = sp_peer_link_user(link);
    const void *body = sp_peer_arrival_bytes(arrival);
    sp_peer_header read;
    sp_error error;

    (void)user;
    if (!client->link)
        return;
    if (sp_peer_header_decode(header, header_bytes, client->address, &read, &error) != SP_OK) {
        on_malformed(client, &error);
        return;
    }
    if (read.body_bytes != body_bytes || body_bytes > SP_PEER_NAME_BYTES_MAX ||
        (body_bytes > 0 && !body)) {
        COUNT(client->server, protocol_errors);
        close_client(client, "it sent a body of another length than it said");
        return;
    }
    memset(client->body, 0, sizeof client->body);
    if (body_bytes > 0)
        memcpy(client->body, body, (size_t)body_bytes);
    on_request(client, &read);
}

static void on_received(void *user, sp_peer_link *link, void *token, bool whole)
{
    (void)user; /* nothing is received but what comes with its message */
    (void)link;
    (void)token;
    (void)whole;
}

/* ---- running --------------------------------------------------------------------------------- */

/* Clients that are silent, stopped or slow. */
static void check_clients(sp_peer_server *server)
{
    uint64_t now_ns = sp_clock_ns();

    for (peer_client *client = server->clients; client; client = client->next) {
        uint64_t last_ns =
            client->request_ns > client->sent_ns ? client->request_ns : client->sent_ns;

        if (!client->link) {
            continue;
        } else if (client->state != CLIENT_WELCOME &&
                   now_ns - client->begin_ns > (uint64_t)GREET_MS * 1000000) {
            close_client(client, "it did not greet in time");
        } else if (client->n_sends > 0 && now_ns - last_ns > server->stall_ns) {
            COUNT(server, stalled);
            close_client(client, "it takes no answers");
        } else if (client->n_sends == 0 && client->n_waiting == 0 &&
                   now_ns - last_ns > server->idle_ns) {
            COUNT(server, idle);
            close_client(client, "it requests nothing");
        }
    }
}

static void sleep_for_events(sp_peer_server *server)
{
    struct pollfd fds[] = {{.fd = sp_peer_port_fd(server->port), .events = POLLIN},
                           {.fd = server->wake, .events = POLLIN}};
    uint64_t n;
    ssize_t got;

    if (!sp_peer_port_arm(server->port))
        return;
    if (poll(fds, 2, TICK_MS) > 0 && (fds[1].revents & POLLIN)) {
        got = read(server->wake, &n, sizeof n);
        (void)got;
    }
}

void sp_peer_server_run(sp_peer_server *server)
{
    uint64_t next_check_ns = 0;

    while (!atomic_load(&server->stop)) {
        uint64_t now_ns = sp_clock_ns();

        if (atomic_exchange(&server->changed, false))
            for (peer_client *client = server->clients; client; client = client->next)
                retry_waiting(client);
        if (now_ns >= next_check_ns) {
            check_clients(server);
            next_check_ns = now_ns + (uint64_t)TICK_MS * 1000000;
        }
        if (!sp_peer_port_progress(server->port))
            sleep_for_events(server);
        free_closed(server);
    }
}

void sp_peer_server_stop(sp_peer_server *server)
{
    atomic_store(&server->stop, true);
    wake(server);
}

/* ---- creating -------------------------------------------------------------------------------- */

static sp_status open_catalog(sp_peer_server *server, const sp_peer_server_options *options,
                              sp_error *error)
{
    sp_adapter_options audit;
    sp_peer_catalog_options catalog = {
        .directory = options->directory,
        .audit = options->audit ? options->audit : &audit,
        .packer = options->packer,
        .digests = options->digests,
        .memory_bytes = options->memory_bytes ? options->memory_bytes : MEMORY_BYTES,
        .rescan_ms = options->rescan_ms ? options->rescan_ms : RESCAN_MS,
        .events = {server, on_catalog_changed, on_catalog_log, on_register, on_unregister},
    };

    sp_adapter_options_default(&audit, sizeof audit);
    return sp_peer_catalog_create(&catalog, &server->catalog, error);
}

static sp_status open_port(sp_peer_server *server, const sp_peer_server_options *options,
                           sp_error *error)
{
    const sp_peer_events events = {server, on_connect, on_message, on_received, on_sent, on_lost};
    sp_peer_fabric_options fabric = {.devices = options->devices,
                                     .gid_index = options->gid_index,
                                     .transports = options->transports};
    sp_peer_address address;
    sp_status status = sp_peer_address_resolve(options->host ? options->host : "127.0.0.1",
                                               options->port, &address, error);

    if (status != SP_OK)
        return status;
    fabric.loopback = sp_peer_address_is_loopback(&address);
    fabric.local = &address;
    status = sp_peer_fabric_open(&fabric, &server->fabric, error);
    if (status == SP_OK)
        status = sp_peer_port_create(server->fabric, &events, &server->port, error);
    if (status == SP_OK)
        status = sp_peer_port_listen(server->port, &address, error);
    if (status == SP_OK)
        sp_peer_address_text(&address, server->address);
    return status;
}

sp_status sp_peer_server_create(const sp_peer_server_options *options, sp_peer_server **out_server,
                                sp_error *error)
{
    sp_peer_server *server = sp_calloc(1, sizeof *server);
    sp_status status;

    if (!server)
        return sp_fail_memory(error, sizeof *server, "a peer's server");
    if (options->key)
        server->key = *options->key;
    server->stall_ns = (options->stall_ms ? options->stall_ms : STALL_MS) * 1000000;
    server->idle_ns = (options->idle_ms ? options->idle_ms : IDLE_MS) * 1000000;
    server->clients_max = options->clients_max ? options->clients_max : CLIENTS;
    server->log = options->log;
    server->user = options->user;
    server->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    status = server->wake >= 0
                 ? open_port(server, options, error)
                 : sp_fail(error, SP_ERR_IO, NULL, NULL, -1, "no more files can be opened");
    if (status == SP_OK)
        status = open_catalog(server, options, error);
    if (status != SP_OK) {
        sp_peer_server_destroy(server);
        return status;
    }
    *out_server = server;
    return SP_OK;
}

void sp_peer_server_destroy(sp_peer_server *server)
{
    if (!server)
        return;
    atomic_store(&server->closing, true);
    for (peer_client *client = server->clients; client; client = client->next)
        close_client(client, NULL);
    sp_peer_port_destroy(server->port); /* reports every send */
    free_closed(server);
    sp_peer_catalog_destroy(server->catalog);
    sp_peer_fabric_close(server->fabric);
    if (server->wake >= 0)
        close(server->wake);
    memset(&server->key, 0, sizeof server->key);
    sp_free(server);
}

const char *sp_peer_server_address(const sp_peer_server *server)
{
    return server->address;
}

/* ---- counts ---------------------------------------------------------------------------------- */

void sp_peer_server_count(sp_peer_server *server, sp_peer_server_counts *out_counts)
{
    sp_peer_catalog_counts catalog = {0};

    sp_peer_catalog_count(server->catalog, &catalog);
    *out_counts = (sp_peer_server_counts){
        .clients = (uint64_t)atomic_load(&server->shown_clients),
        .connections = atomic_load(&server->connections),
        .turned_away = atomic_load(&server->turned_away),
        .wrong_keys = atomic_load(&server->wrong_keys),
        .protocol_errors = atomic_load(&server->protocol_errors),
        .stalled = atomic_load(&server->stalled),
        .idle = atomic_load(&server->idle),
        .manifests = atomic_load(&server->manifests),
        .pieces = atomic_load(&server->pieces),
        .sent_bytes = atomic_load(&server->sent_bytes),
        .refusals = atomic_load(&server->refusals),
        .offered = catalog.offered,
        .refused = catalog.refused,
        .reading = catalog.reading,
        .memory_bytes = catalog.memory_bytes,
        .pinned_bytes = catalog.pinned_bytes,
        .reads = catalog.reads,
        .read_bytes = catalog.read_bytes,
        .evictions = catalog.evictions,
        .known_digests = catalog.known_digests,
    };
}

typedef struct metric_row {
    const char *name, *type, *help;
    size_t offset; /* in the counts */
} metric_row;

#define FIELD(name) offsetof(sp_peer_server_counts, name)
static const metric_row metrics[] = {
    {"sidepath_peer_clients", "gauge", "Clients that are connected.", FIELD(clients)},
    {"sidepath_peer_connections_total", "counter", "Connections so far.", FIELD(connections)},
    {"sidepath_peer_turned_away_total", "counter", "Connections beyond the limit.",
     FIELD(turned_away)},
    {"sidepath_peer_wrong_keys_total", "counter", "Clients without the shared key.",
     FIELD(wrong_keys)},
    {"sidepath_peer_protocol_errors_total", "counter", "Clients that broke the protocol.",
     FIELD(protocol_errors)},
    {"sidepath_peer_stalled_total", "counter", "Clients closed because they took no answers.",
     FIELD(stalled)},
    {"sidepath_peer_idle_total", "counter", "Clients closed because they requested nothing.",
     FIELD(idle)},
    {"sidepath_peer_manifests_total", "counter", "Manifests sent.", FIELD(manifests)},
    {"sidepath_peer_pieces_total", "counter", "Pieces requested and answered.", FIELD(pieces)},
    {"sidepath_peer_sent_bytes_total", "counter", "Bytes of bodies that have left.",
     FIELD(sent_bytes)},
    {"sidepath_peer_refusals_total", "counter", "Requests refused.", FIELD(refusals)},
    {"sidepath_peer_adapters_offered", "gauge", "Adapters that are offered.", FIELD(offered)},
    {"sidepath_peer_adapters_refused", "gauge", "Adapters in the directory that are not.",
     FIELD(refused)},
    {"sidepath_peer_adapters_reading", "gauge", "Adapters that are still to be read.",
     FIELD(reading)},
    {"sidepath_peer_memory_bytes", "gauge", "Memory for adapters in use.", FIELD(memory_bytes)},
    {"sidepath_peer_pinned_bytes", "gauge", "Memory of adapters that clients fetch.",
     FIELD(pinned_bytes)},
    {"sidepath_peer_reads_total", "counter", "Adapters read from disk.", FIELD(reads)},
    {"sidepath_peer_read_bytes_total", "counter", "Bytes read from disk.", FIELD(read_bytes)},
    {"sidepath_peer_evictions_total", "counter", "Adapters that gave up their memory.",
     FIELD(evictions)},
    {"sidepath_peer_known_digests_total", "counter",
     "Adapters offered with the digest of an earlier run.", FIELD(known_digests)},
};

void sp_peer_server_metrics(sp_peer_server *server, sp_text *out_text)
{
    sp_peer_server_counts counts;

    sp_peer_server_count(server, &counts);
    for (size_t i = 0; i < sizeof metrics / sizeof metrics[0]; i++) {
        uint64_t value;

        memcpy(&value, (const char *)&counts + metrics[i].offset, sizeof value);
        sp_text_format(out_text, "# HELP %s %s\n# TYPE %s %s\n%s %llu\n", metrics[i].name,
                       metrics[i].help, metrics[i].name, metrics[i].type, metrics[i].name,
                       (unsigned long long)value);
    }
}
