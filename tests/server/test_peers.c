/*
 * test_peers.c: the peers of a server: their settings, and the names that they serve, whatever one
 * of them does.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "server/driver/peers.h"
#include "support/fake_peer.h"
#include "support/test.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#define PEERS 2

typedef struct world {
    fake_peer fakes[PEERS];
    char *key_file;
    size_t key_bytes; /* that the clients were given */
    sp_peers_options options;
} world;

static sp_status connect(void *user, const sp_peer_client_options *options,
                         sp_peer_calls *out_calls, sp_error *error)
{
    world *w = user;
    int i = options->address[strlen(options->address) - 1] - '0';

    if (i < 0 || i >= PEERS)
        return sp_fail(error, SP_ERR_INPUT, "peer-address", options->address, -1, "no such peer");
    w->key_bytes = options->key ? options->key->n_bytes : 0;
    *out_calls = fake_peer_calls(&w->fakes[i]);
    return SP_OK;
}

static const char *const addresses[] = {"host:0", "host:1"};

static world *world_create(void)
{
    static const char *const first[] = {"plain-r8", "attn-r4"};
    static const char *const second[] = {"r1", "plain-r8"};
    world *w = sp_calloc(1, sizeof *w);

    assert_non_null(w);
    for (int i = 0; i < PEERS; i++) {
        w->fakes[i].folder = SP_TEST_FIXTURES "/qwen3-tied/adapters";
        w->fakes[i].names = i == 0 ? first : second;
        w->fakes[i].n_names = 2;
    }
    w->options = (sp_peers_options){.addresses = addresses,
                                    .n_addresses = PEERS,
                                    .call_ms_max = 60000,
                                    .connect = connect,
                                    .connect_user = w};
    return w;
}

static void world_destroy(world *w)
{
    sp_free(w);
    assert_int_equal(sp_alloc_blocks(), 0);
}

static void wait_for(sp_peers *peers, const char *name)
{
    while (!sp_peers_have(peers, name))
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

typedef struct names {
    char text[256];
    int n;
} names;

static void add_name(void *user, const char *name)
{
    names *list = user;

    size_t used = strlen(list->text);

    snprintf(list->text + used, sizeof list->text - used, "%s ", name);
    list->n++;
}

static void names_of_all_each_once(void **state)
{
    world *w = world_create();
    names list = {"", 0};
    sp_listed_peer *snapshot;
    sp_peers *peers;
    int32_t n_sources;
    size_t n;
    sp_error error;

    (void)state;
    assert_ok(sp_peers_open(&w->options, &peers, &error), &error);
    wait_for(peers, "attn-r4");
    wait_for(peers, "r1");
    assert_true(sp_peers_have(peers, "plain-r8"));
    assert_false(sp_peers_have(peers, "plain"));
    assert_false(sp_peers_have(peers, "zzz"));
    sp_peers_list(peers, add_name, &list);
    assert_string_equal(list.text, "attn-r4 plain-r8 r1 ");
    assert_non_null(sp_peers_sources(peers, &n_sources));
    assert_int_equal(n_sources, PEERS);
    snapshot = sp_peers_snapshot(peers, &n);
    assert_int_equal(n, PEERS);
    assert_string_equal(snapshot[1].address, "host:1");
    assert_int_equal(snapshot[1].reached, 1);
    assert_int_equal(snapshot[1].n_adapters, 2);
    sp_free(snapshot);
    sp_peers_close(peers);
    world_destroy(w);
}

/* Its names do not come, those of the other do; closing waits for nobody. */
static void one_that_hangs_delays_no_other(void **state)
{
    world *w = world_create();
    uint64_t began_ns;
    sp_listed_peer *snapshot;
    sp_peers *peers;
    size_t n;
    sp_error error;

    (void)state;
    w->fakes[0].manner = FAKE_HANGS_DESCRIBING;
    assert_ok(sp_peers_open(&w->options, &peers, &error), &error);
    wait_for(peers, "r1");
    assert_false(sp_peers_have(peers, "attn-r4"));
    snapshot = sp_peers_snapshot(peers, &n);
    assert_int_equal(snapshot[0].reached, 0);
    assert_int_equal(snapshot[0].n_adapters, 0);
    sp_free(snapshot);
    began_ns = sp_clock_ns();
    sp_peers_close(peers);
    assert_true(sp_clock_ns() - began_ns < 30000000000); /* not the minute of the deadline */
    assert_int_equal(w->fakes[0].n_waiting, 0);
    world_destroy(w);
}

static void no_peers_have_nothing(void **state)
{
    names list = {"", 0};
    size_t n = 1;

    (void)state;
    assert_false(sp_peers_have(NULL, "x"));
    sp_peers_list(NULL, add_name, &list);
    assert_int_equal(list.n, 0);
    assert_null(sp_peers_snapshot(NULL, &n));
    assert_int_equal(n, 0);
    sp_peers_close(NULL);
}

static void expect_refusal(world *w, const char *subject, const char *word)
{
    sp_peers *peers;
    sp_error error;

    assert_int_equal(sp_peers_open(&w->options, &peers, &error), SP_ERR_INPUT);
    assert_string_equal(error.subject, subject);
    if (!strstr(error.text, word))
        fail_msg("\"%s\" lacks \"%s\"", error.text, word);
}

static void settings_that_contradict_each_other(void **state)
{
    static const char *const twice[] = {"host:0", "host:0"};
    static const char *const foreign[] = {"host:7"};
    world *w = world_create();

    (void)state;
    w->options.addresses = twice;
    expect_refusal(w, "peer", "twice");
    w->options.addresses = addresses;
    w->options.trusted = foreign;
    w->options.n_trusted = 1;
    expect_refusal(w, "peer-trust-images", "none of the peers");
    w->options.trusted = addresses;
    expect_refusal(w, "peer-key-file", "needs --peer-key-file");
    w->options.n_trusted = 0;
    w->options.addresses = foreign;
    w->options.n_addresses = 1;
    expect_refusal(w, "host:7", "no such peer");
    world_destroy(w);
}

static void a_build_without_a_transport_says_so(void **state)
{
    world *w = world_create();
    sp_peers *peers;
    sp_error error;
    sp_status status;

    (void)state;
    if (sp_peer_is_built(NULL)) {
        world_destroy(w);
        skip();
    }
    w->options.connect = NULL;
    status = sp_peers_open(&w->options, &peers, &error);
    assert_int_equal(status, SP_ERR_UNSUPPORTED);
    assert_string_equal(error.code, "no-ucx");
    world_destroy(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_of_all_each_once),
        cmocka_unit_test(one_that_hangs_delays_no_other),
        cmocka_unit_test(no_peers_have_nothing),
        cmocka_unit_test(settings_that_contradict_each_other),
        cmocka_unit_test(a_build_without_a_transport_says_so),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
