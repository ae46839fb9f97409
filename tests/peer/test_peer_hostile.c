/*
 * What strangers do. To a peer: speak another protocol, greet wrongly, request what was not
 * offered, disconnect. To a client: send false answers. The peer serves others afterwards, and the
 * client has a named error in time.
 *
 * They all use the transport, so they may send any header and any body.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "peer/peer_transport.h"
#include "support/peer_world.h"
#include "support/test.h"

#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define LAYERS  8
#define RANK    16
#define WAIT_NS ((uint64_t)10 * 1000000000)

static void check_served(const peer_world *world)
{
    sp_peer_calls calls = peer_world_client(world, NULL, NULL);
    size_t n = 0, want_n;
    void *bytes = NULL, *want = peer_world_bytes(LAYERS, RANK, 1, &want_n);
    sp_error error;

    assert_ok(peer_world_fetch(&calls, "first", 20000, &bytes, &n, &error), &error);
    assert_int_equal(n, want_n);
    assert_memory_equal(bytes, want, n);
    sp_free(bytes);
    sp_free(want);
    calls.destroy(calls.user);
}

static void start(peer_world *world, const char *flags)
{
    peer_world_create(world);
    peer_world_adapter(world, "first", LAYERS, RANK, 1);
    peer_world_start(world, flags);
}

static void finish(peer_world *world)
{
    check_served(world);
    peer_world_stop(world);
    peer_world_destroy(world);
}

/* ---- another protocol ------------------------------------------------------------------------ */

static void send_raw(int port, const void *bytes, size_t n)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    assert_true(fd >= 0);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    assert_int_equal(connect(fd, (struct sockaddr *)&address, sizeof address), 0);
    (void)send(fd, bytes, n, MSG_NOSIGNAL);
    usleep(20000);
    close(fd);
}

static void a_peer_survives_another_protocol(void **state)
{
    static const char http[] = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n";
    sp_test_random random = {5};
    peer_world world;

    (void)state;
    start(&world, "");
    send_raw(world.port, http, sizeof http - 1);
    send_raw(world.port, "", 0);
    for (int i = 0; i < 20; i++) {
        uint8_t noise[512];

        for (size_t k = 0; k < sizeof noise; k++)
            noise[k] = (uint8_t)sp_test_next(&random);
        send_raw(world.port, noise, 1 + sp_test_below(&random, sizeof noise));
    }
    finish(&world);
}

/* ---- malicious clients ----------------------------------------------------------------------- */

/* A connection by hand. */
typedef struct liar {
    sp_peer_fabric *fabric;
    sp_peer_port *port;
    sp_peer_link *link;
    uint64_t session, requests;
    bool lost, answered;
    sp_peer_header answer;
    uint8_t body[4096]; /* of a short answer */
} liar;

static void liar_message(void *user, sp_peer_link *link, const void *header, size_t header_bytes,
                         uint64_t body_bytes, sp_peer_arrival *arrival)
{
    liar *l = user;
    const void *body = sp_peer_arrival_bytes(arrival);
    sp_error error;

    (void)link;
    assert_ok(sp_peer_header_decode(header, header_bytes, "peer", &l->answer, &error), &error);
    if (body && body_bytes <= sizeof l->body)
        memcpy(l->body, body, body_bytes);
    l->answered = true;
}

static void liar_told(void *user, sp_peer_link *link, void *token, bool whole)
{
    (void)user;
    (void)link;
    (void)token;
    (void)whole;
}

static void liar_lost(void *user, sp_peer_link *link, const char *why)
{
    (void)link;
    (void)why;
    ((liar *)user)->lost = true;
}

static void liar_open(liar *l, const peer_world *world)
{
    const sp_peer_fabric_options options = {.loopback = true};
    const sp_peer_events events = {.user = l,
                                   .on_message = liar_message,
                                   .on_received = liar_told,
                                   .on_sent = liar_told,
                                   .on_lost = liar_lost};
    sp_peer_address address;
    sp_error error;

    memset(l, 0, sizeof *l);
    assert_ok(sp_peer_fabric_open(&options, &l->fabric, &error), &error);
    assert_ok(sp_peer_port_create(l->fabric, &events, &l->port, &error), &error);
    assert_ok(sp_peer_address_resolve("127.0.0.1", world->port, &address, &error), &error);
    assert_ok(sp_peer_port_connect(l->port, &address, l, &l->link, &error), &error);
}

static void liar_close(liar *l)
{
    sp_peer_port_destroy(l->port);
    sp_peer_fabric_close(l->fabric);
}

static void turn(liar *l)
{
    struct pollfd fd = {.fd = sp_peer_port_fd(l->port), .events = POLLIN};

    if (!sp_peer_port_progress(l->port) && sp_peer_port_arm(l->port))
        (void)poll(&fd, 1, 20);
}

/* Sends any bytes as a header, and waits for an answer or the end of the connection. */
static void say_bytes(liar *l, const void *header, const void *body, size_t body_bytes)
{
    uint64_t end_ns = sp_clock_ns() + WAIT_NS;

    l->answered = false;
    if (sp_peer_link_send(l->link, header, body, body_bytes, NULL, NULL, NULL) != SP_OK)
        l->lost = true;
    while (!l->answered && !l->lost && sp_clock_ns() < end_ns)
        turn(l);
    assert_true(l->answered || l->lost);
}

static void say(liar *l, sp_peer_header header, const void *body, size_t body_bytes)
{
    uint8_t bytes[SP_PEER_HEADER_BYTES];

    header.session = header.kind == SP_PEER_HELLO ? 0 : l->session;
    header.request = ++l->requests;
    header.body_bytes = body_bytes;
    sp_peer_header_encode(&header, bytes);
    say_bytes(l, bytes, body, body_bytes);
}

static void greet(liar *l)
{
    const uint8_t nonce[SP_PEER_NONCE_BYTES] = {1}, proof[SP_PEER_PROOF_BYTES] = {0};

    say(l, (sp_peer_header){.kind = SP_PEER_HELLO}, nonce, sizeof nonce);
    assert_true(l->answered);
    assert_int_equal(l->answer.kind, SP_PEER_CHALLENGE);
    l->session = l->answer.session;
    say(l, (sp_peer_header){.kind = SP_PEER_PROOF}, proof, sizeof proof);
    assert_true(l->answered);
    assert_int_equal(l->answer.kind, SP_PEER_WELCOME);
}

static void expect_refused(const liar *l, sp_peer_failure failure)
{
    assert_true(l->answered);
    assert_int_equal(l->answer.kind, SP_PEER_FAILED);
    assert_int_equal(l->answer.part, failure);
}

/* Each on a connection of its own, which the peer closes. */
static void what_is_no_request_ends_the_connection(void **state)
{
    static const sp_peer_header headers[] = {
        {.kind = SP_PEER_LIST, .session = 1, .request = 1}, /* before a greeting */
        {.kind = SP_PEER_PIECE, .session = 1, .request = 1, .offer = 1, .bytes = 64},
        {.kind = SP_PEER_WELCOME, .session = 1, .request = 1},
        {.kind = SP_PEER_DATA, .session = 1, .request = 1, .offer = 1, .bytes = 1},
        {.kind = (sp_peer_kind)99, .request = 1},
        {.kind = SP_PEER_HELLO, .request = 1, .body_bytes = 32}, /* whose body is missing */
        {.kind = SP_PEER_HELLO, .request = 0},
    };
    peer_world world;

    (void)state;
    start(&world, "");
    for (size_t i = 0; i < sizeof headers / sizeof headers[0]; i++) {
        uint8_t bytes[SP_PEER_HEADER_BYTES];
        liar l;

        liar_open(&l, &world);
        sp_peer_header_encode(&headers[i], bytes);
        say_bytes(&l, bytes, NULL, 0);
        assert_true(l.lost && !l.answered);
        liar_close(&l);
    }
    finish(&world);
}

static void after_a_greeting_too(void **state)
{
    static const sp_peer_kind kinds[] = {SP_PEER_HELLO, SP_PEER_CHALLENGE, SP_PEER_OFFER};
    peer_world world;

    (void)state;
    start(&world, "");
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        const uint8_t body[SP_PEER_NONCE_BYTES + SP_PEER_PROOF_BYTES] = {2};
        size_t n = kinds[i] == SP_PEER_HELLO ? SP_PEER_NONCE_BYTES : sizeof body;
        liar l;

        liar_open(&l, &world);
        greet(&l);
        say(&l, (sp_peer_header){.kind = kinds[i], .offer = kinds[i] == SP_PEER_OFFER}, body, n);
        assert_true(l.lost && !l.answered);
        liar_close(&l);
    }
    { /* another's session */
        liar l;

        liar_open(&l, &world);
        greet(&l);
        l.session ^= 2;
        say(&l, (sp_peer_header){.kind = SP_PEER_LIST}, NULL, 0);
        assert_true(l.lost && !l.answered);
        liar_close(&l);
    }
    finish(&world);
}

static void another_version_is_named(void **state)
{
    const sp_peer_header header = {.kind = SP_PEER_HELLO, .request = 1, .body_bytes = 32};
    uint8_t bytes[SP_PEER_HEADER_BYTES], body[32] = {0};
    peer_world world;
    liar l;

    (void)state;
    start(&world, "");
    liar_open(&l, &world);
    sp_peer_header_encode(&header, bytes);
    bytes[4] = 2;
    say_bytes(&l, bytes, body, sizeof body);
    expect_refused(&l, SP_PEER_OTHER_VERSION);
    assert_non_null(strstr((const char *)l.body, "version 2"));
    liar_close(&l);
    finish(&world);
}

/* Outside of what was offered, and what was not offered to this client. */
static void pieces_beyond_the_offer_are_refused(void **state)
{
    const uint64_t all = 2 * LAYERS * RANK * 64 * 2;
    const sp_peer_header wrong[] = {
        {.kind = SP_PEER_PIECE, .offset = all, .bytes = 1},
        {.kind = SP_PEER_PIECE, .offset = all - 1, .bytes = 2},
        {.kind = SP_PEER_PIECE, .offset = 0, .bytes = all + 1},
        {.kind = SP_PEER_PIECE, .offset = SP_PEER_DATA_BYTES_MAX, .bytes = 4096},
        {.kind = SP_PEER_PIECE, .part = SP_PEER_PART_IMAGE, .offset = 0, .bytes = 1},
    };
    peer_world world;
    uint64_t offer;
    liar l, other;

    (void)state;
    start(&world, "");
    liar_open(&l, &world);
    greet(&l);
    say(&l, (sp_peer_header){.kind = SP_PEER_PIECE, .offer = 1, .bytes = 64}, NULL, 0);
    expect_refused(&l, SP_PEER_OUT_OF_RANGE);
    say(&l, (sp_peer_header){.kind = SP_PEER_MANIFEST}, "first", 5);
    assert_int_equal(l.answer.kind, SP_PEER_OFFER);
    offer = l.answer.offer;
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        sp_peer_header header = wrong[i];

        header.offer = offer;
        say(&l, header, NULL, 0);
        expect_refused(&l, SP_PEER_OUT_OF_RANGE);
    }
    say(&l,
        (sp_peer_header){.kind = SP_PEER_PIECE, .offer = offer, .offset = all - 64, .bytes = 64},
        NULL, 0);
    assert_int_equal(l.answer.kind, SP_PEER_DATA);
    liar_open(&other, &world);
    greet(&other);
    say(&other, (sp_peer_header){.kind = SP_PEER_PIECE, .offer = offer, .bytes = 64}, NULL, 0);
    expect_refused(&other, SP_PEER_OUT_OF_RANGE);
    liar_close(&other);
    liar_close(&l);
    finish(&world);
}

static void a_client_may_not_open_everything(void **state)
{
    peer_world world;
    liar l;

    (void)state;
    start(&world, "");
    liar_open(&l, &world);
    greet(&l);
    for (int i = 0; i < 16; i++) {
        say(&l, (sp_peer_header){.kind = SP_PEER_MANIFEST}, "first", 5);
        assert_int_equal(l.answer.kind, SP_PEER_OFFER);
    }
    say(&l, (sp_peer_header){.kind = SP_PEER_MANIFEST}, "first", 5);
    expect_refused(&l, SP_PEER_OVERLOADED);
    liar_close(&l);
    finish(&world);
}

/* Asks for an adapter until it is offered: it may be new, and clients that have just gone may still
 * have memory. */
static void ask_until_offered(liar *l, const char *name)
{
    uint64_t end_ns = sp_clock_ns() + WAIT_NS;

    do {
        say(l, (sp_peer_header){.kind = SP_PEER_MANIFEST}, name, strlen(name));
        if (l->answered && l->answer.kind == SP_PEER_OFFER)
            return;
        usleep(2000);
    } while (!l->lost && sp_clock_ns() < end_ns);
    fail_msg("%s is not offered: failure %d, %s", name, (int)l->answer.part,
             l->lost ? "and the connection is lost" : "for 10 seconds");
}

/* Clients that disconnect while pieces are in flight, again and again: their memory is given back,
 * or the budget of 1 MiB would be used up. */
static void clients_that_disconnect_leave_nothing(void **state)
{
    peer_world world;

    (void)state;
    start(&world, "--memory-mib 1");
    peer_world_adapter(&world, "other", 128, RANK, 2);
    for (int i = 0; i < 12; i++) {
        liar l;
        uint8_t bytes[SP_PEER_HEADER_BYTES];
        sp_peer_header header = {.kind = SP_PEER_PIECE, .offset = 0, .bytes = 64 * 256};

        liar_open(&l, &world);
        greet(&l);
        ask_until_offered(&l, i % 2 ? "first" : "other");
        header.session = l.session;
        header.offer = l.answer.offer;
        for (int k = 0; k < 8; k++) {
            header.request = 100 + (uint64_t)k;
            sp_peer_header_encode(&header, bytes);
            (void)sp_peer_link_send(l.link, bytes, NULL, 0, NULL, NULL, NULL);
            (void)sp_peer_port_progress(l.port);
        }
        liar_close(&l);
    }
    finish(&world);
}

/* ---- malicious peers ------------------------------------------------------------------------- */

typedef enum forgery {
    FORGERY_SILENT,
    FORGERY_WRONG_KIND,
    FORGERY_NO_HEADER,
    FORGERY_VERSION,
    FORGERY_REQUEST,
    FORGERY_SESSION,
    FORGERY_SHORT_BODY,
    FORGERY_LONG_BODY,
    FORGERY_HUGE_MANIFEST,
    FORGERY_NO_JSON,
    FORGERY_OTHER_NAME,
    FORGERY_DATA_OFFSET,
    FORGERY_DATA_OFFER,
    FORGERY_DATA_SHORT,
    FORGERY_DATA_FAILED,
    FORGERY_DATA_GONE,
    FORGERY_UNASKED,
    FORGERY_NONE,
} forgery;

typedef struct peer_of_forgeries {
    sp_peer_fabric *fabric;
    sp_peer_port *port;
    sp_peer_link *link;
    sp_peer_address address;
    pthread_t thread;
    atomic_int forgery;
    atomic_bool stop;
    uint8_t data[SP_PEER_COPIED_BYTES];
} peer_of_forgeries;

static void *forgeries_connect(void *user, sp_peer_link *link, const sp_peer_address *from)
{
    (void)link;
    (void)from;
    return user;
}

static void forgeries_lost(void *user, sp_peer_link *link, const char *why)
{
    (void)user;
    (void)why;
    sp_peer_link_close(link);
}

static void reply(sp_peer_link *link, sp_peer_header header, const void *body, size_t n)
{
    uint8_t bytes[SP_PEER_HEADER_BYTES];

    sp_peer_header_encode(&header, bytes);
    (void)sp_peer_link_send(link, bytes, body, n, NULL, NULL, NULL);
}

static const char manifest_text[] =
    "{\"sidepath_manifest\":1,\"name\":\"%s\",\"digest\":"
    "\"00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff\",\"config\":\"{}\","
    "\"tensors\":[{\"name\":\"a\",\"dtype\":\"F32\",\"shape\":[64],\"offset\":0,\"bytes\":256}]}";

static void forge_a_manifest(peer_of_forgeries *p, sp_peer_link *link, const sp_peer_header *to)
{
    char text[512];
    int n = snprintf(text, sizeof text, manifest_text,
                     p->forgery == FORGERY_OTHER_NAME ? "other" : "first");
    sp_peer_header header = {.kind = SP_PEER_OFFER,
                             .session = to->session,
                             .request = to->request,
                             .body_bytes = (uint64_t)n,
                             .offer = 7};
    uint8_t bytes[SP_PEER_HEADER_BYTES];

    if (p->forgery == FORGERY_SILENT)
        return;
    header.kind = p->forgery == FORGERY_WRONG_KIND ? SP_PEER_LISTING : SP_PEER_OFFER;
    header.offer = p->forgery == FORGERY_WRONG_KIND ? 0 : 7;
    header.request += p->forgery == FORGERY_REQUEST;
    header.session ^= p->forgery == FORGERY_SESSION;
    header.body_bytes += p->forgery == FORGERY_SHORT_BODY;
    header.body_bytes -= p->forgery == FORGERY_LONG_BODY;
    if (p->forgery == FORGERY_HUGE_MANIFEST)
        header.body_bytes = (uint64_t)256 << 20;
    if (p->forgery == FORGERY_NO_JSON)
        text[1] = '?';
    sp_peer_header_encode(&header, bytes);
    bytes[4] ^= p->forgery == FORGERY_VERSION ? 3 : 0;
    bytes[0] ^= p->forgery == FORGERY_NO_HEADER;
    (void)sp_peer_link_send(link, bytes, text, (uint64_t)n, NULL, NULL, NULL);
}

static void forge_data(peer_of_forgeries *p, sp_peer_link *link, const sp_peer_header *to)
{
    sp_peer_header header = *to;

    header.kind = SP_PEER_DATA;
    header.body_bytes = to->bytes;
    header.offset += p->forgery == FORGERY_DATA_OFFSET;
    header.offer += p->forgery == FORGERY_DATA_OFFER;
    if (p->forgery == FORGERY_DATA_SHORT)
        header.bytes = header.body_bytes = to->bytes - 1;
    if (p->forgery == FORGERY_DATA_FAILED || p->forgery == FORGERY_DATA_GONE)
        reply(link,
              (sp_peer_header){.kind = SP_PEER_FAILED,
                               .session = to->session,
                               .request = to->request,
                               .part = p->forgery == FORGERY_DATA_GONE ? SP_PEER_GONE
                                                                       : SP_PEER_INTERNAL,
                               .body_bytes = 7},
              "a\x1b[31m\n", 7);
    else
        reply(link, header, p->data, header.body_bytes);
    if (p->forgery == FORGERY_UNASKED)
        reply(link, header, p->data, header.body_bytes);
}

static void forgeries_message(void *user, sp_peer_link *link, const void *header,
                              size_t header_bytes, uint64_t body_bytes, sp_peer_arrival *arrival)
{
    peer_of_forgeries *p = user;
    uint8_t challenge[SP_PEER_NONCE_BYTES + SP_PEER_PROOF_BYTES] = {9};
    sp_peer_header read;

    (void)body_bytes;
    (void)arrival;
    if (sp_peer_header_decode(header, header_bytes, "client", &read, NULL) != SP_OK)
        return;
    if (read.kind == SP_PEER_HELLO)
        reply(link,
              (sp_peer_header){.kind = SP_PEER_CHALLENGE,
                               .session = 5,
                               .request = read.request,
                               .body_bytes = sizeof challenge},
              challenge, sizeof challenge);
    else if (read.kind == SP_PEER_PROOF)
        reply(link,
              (sp_peer_header){.kind = SP_PEER_WELCOME, .session = 5, .request = read.request},
              NULL, 0);
    else if (read.kind == SP_PEER_MANIFEST)
        forge_a_manifest(p, link, &read);
    else if (read.kind == SP_PEER_PIECE)
        forge_data(p, link, &read);
}

static void *forgeries_run(void *user)
{
    peer_of_forgeries *p = user;

    while (!atomic_load(&p->stop)) {
        struct pollfd fd = {.fd = sp_peer_port_fd(p->port), .events = POLLIN};

        if (!sp_peer_port_progress(p->port) && sp_peer_port_arm(p->port))
            (void)poll(&fd, 1, 20);
    }
    return NULL;
}

static void forgeries_start(peer_of_forgeries *p, sp_peer_calls *out_calls)
{
    const sp_peer_fabric_options options = {.loopback = true};
    const sp_peer_events events = {p,         forgeries_connect, forgeries_message,
                                   liar_told, liar_told,         forgeries_lost};
    char text[SP_PEER_ADDRESS_BYTES];
    sp_peer_client_options client = {.address = text};
    sp_error error;

    memset(p, 0, sizeof *p);
    memset(p->data, 0x42, sizeof p->data);
    assert_ok(sp_peer_fabric_open(&options, &p->fabric, &error), &error);
    assert_ok(sp_peer_port_create(p->fabric, &events, &p->port, &error), &error);
    assert_ok(sp_peer_address_resolve("127.0.0.1", 0, &p->address, &error), &error);
    assert_ok(sp_peer_port_listen(p->port, &p->address, &error), &error);
    sp_peer_address_text(&p->address, text);
    assert_int_equal(pthread_create(&p->thread, NULL, forgeries_run, p), 0);
    assert_ok(sp_peer_client_create(&client, out_calls, &error), &error);
}

static void forgeries_stop(peer_of_forgeries *p)
{
    atomic_store(&p->stop, true);
    pthread_join(p->thread, NULL);
    sp_peer_port_destroy(p->port);
    sp_peer_fabric_close(p->fabric);
}

static void each_lie_has_a_name(void **state)
{
    static const struct {
        forgery forgery;
        sp_status status;
        const char *code;
    } forgeries[] = {
        {FORGERY_SILENT, SP_ERR_PEER_TIMEOUT, "peer-timeout"},
        {FORGERY_WRONG_KIND, SP_ERR_PEER_PROTOCOL, "peer-protocol"},
        {FORGERY_NO_HEADER, SP_ERR_PEER_PROTOCOL, "peer-protocol"},
        {FORGERY_VERSION, SP_ERR_PEER_PROTOCOL, "peer-version"},
        {FORGERY_REQUEST, SP_ERR_PEER_PROTOCOL, "peer-protocol"},
        {FORGERY_SESSION, SP_ERR_PEER_PROTOCOL, "peer-protocol"},
        {FORGERY_SHORT_BODY, SP_ERR_PEER_PROTOCOL, "peer-protocol"},
        {FORGERY_LONG_BODY, SP_ERR_PEER_PROTOCOL, "peer-protocol"},
        {FORGERY_HUGE_MANIFEST, SP_ERR_PEER_PROTOCOL, "peer-protocol"},
        {FORGERY_NO_JSON, SP_ERR_PEER_PROTOCOL, "peer-manifest"},
        {FORGERY_OTHER_NAME, SP_ERR_PEER_PROTOCOL, "peer-protocol"},
        {FORGERY_DATA_OFFSET, SP_ERR_PEER_PROTOCOL, "peer-protocol"},
        {FORGERY_DATA_OFFER, SP_ERR_PEER_PROTOCOL, "peer-protocol"},
        {FORGERY_DATA_SHORT, SP_ERR_PEER_PROTOCOL, "peer-protocol"},
        {FORGERY_DATA_FAILED, SP_ERR_PEER_REFUSED, "peer-failed"},
        {FORGERY_DATA_GONE, SP_ERR_PEER_LOST, "peer-offer-gone"},
    };
    peer_of_forgeries p;
    sp_peer_calls calls;
    size_t blocks = sp_alloc_blocks();

    (void)state;
    forgeries_start(&p, &calls);
    for (size_t i = 0; i < sizeof forgeries / sizeof forgeries[0]; i++) {
        uint64_t ms_max = forgeries[i].forgery == FORGERY_SILENT ? 300 : 20000;
        sp_error error = {0};
        void *bytes = NULL;
        size_t n = 0;

        atomic_store(&p.forgery, (int)forgeries[i].forgery);
        if (peer_world_fetch(&calls, "first", ms_max, &bytes, &n, &error) != forgeries[i].status ||
            strcmp(error.code, forgeries[i].code) != 0)
            fail_msg("forgery %d: %s [%s]", (int)forgeries[i].forgery, error.text, error.code);
        assert_null(strchr(error.text, '\x1b'));
        atomic_store(&p.forgery, (int)FORGERY_NONE); /* and a retry succeeds */
        assert_ok(peer_world_fetch(&calls, "first", 20000, &bytes, &n, &error), &error);
        assert_int_equal(n, 256);
        assert_memory_equal(bytes, p.data, n);
        sp_free(bytes);
    }
    calls.destroy(calls.user);
    forgeries_stop(&p);
    assert_int_equal(sp_alloc_blocks(), blocks);
}

/* A second answer to one request comes when nobody waits: the next call notices. */
static void an_answer_that_nobody_wants_ends_the_connection(void **state)
{
    peer_of_forgeries p;
    sp_peer_calls calls;

    (void)state;
    forgeries_start(&p, &calls);
    atomic_store(&p.forgery, (int)FORGERY_UNASKED);
    for (int i = 0; i < 8; i++) {
        sp_error error;
        void *bytes;
        size_t n;
        sp_status status = peer_world_fetch(&calls, "first", 20000, &bytes, &n, &error);

        assert_true(status == SP_OK || status == SP_ERR_PEER_PROTOCOL);
        if (status == SP_OK)
            sp_free(bytes);
    }
    calls.destroy(calls.user);
    forgeries_stop(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_peer_survives_another_protocol),
        cmocka_unit_test(what_is_no_request_ends_the_connection),
        cmocka_unit_test(after_a_greeting_too),
        cmocka_unit_test(another_version_is_named),
        cmocka_unit_test(pieces_beyond_the_offer_are_refused),
        cmocka_unit_test(a_client_may_not_open_everything),
        cmocka_unit_test(clients_that_disconnect_leave_nothing),
        cmocka_unit_test(each_lie_has_a_name),
        cmocka_unit_test(an_answer_that_nobody_wants_ends_the_connection),
    };

    peer_world_need_ucx();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
