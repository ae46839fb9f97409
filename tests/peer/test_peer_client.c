/*
 * Two processes: a peer and its client, over TCP and with UCX's transports of shared memory
 * allowed. The bytes that come are those that the test has written; what can go wrong has its name
 * and costs its deadline and no more.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "support/peer_world.h"
#include "support/test.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LAYERS  8
#define RANK    16
#define WAIT_MS 20000

static void check_fetched(const sp_peer_calls *calls, const char *name, int layers, int rank,
                          uint64_t seed)
{
    size_t n = 0, want_n;
    void *bytes = NULL;
    void *want = peer_world_bytes(layers, rank, seed, &want_n);
    sp_error error;

    assert_ok(peer_world_fetch(calls, name, WAIT_MS, &bytes, &n, &error), &error);
    assert_int_equal(n, want_n);
    assert_memory_equal(bytes, want, n);
    sp_free(bytes);
    sp_free(want);
}

static void expect(const sp_peer_calls *calls, const char *name, uint64_t ms_max, sp_status status,
                   const char *code)
{
    void *bytes;
    size_t n;
    sp_error error;

    assert_int_equal(peer_world_fetch(calls, name, ms_max, &bytes, &n, &error), status);
    assert_string_equal(error.code, code);
    assert_true(error.text[0] != '\0');
}

/* Each test has blocks to give back: nothing stays when a client is destroyed. */
typedef struct scene {
    peer_world world;
    sp_peer_calls calls;
    size_t blocks;
} scene;

static void begin(scene *s, const char *flags, const sp_peer_key *key)
{
    peer_world_create(&s->world);
    peer_world_adapter(&s->world, "first", LAYERS, RANK, 1);
    peer_world_start(&s->world, flags);
    s->blocks = sp_alloc_blocks();
    s->calls = peer_world_client(&s->world, key, NULL);
}

static void end(scene *s)
{
    s->calls.destroy(s->calls.user);
    assert_int_equal(sp_alloc_blocks(), s->blocks);
    peer_world_stop(&s->world);
    peer_world_destroy(&s->world);
}

/* ---- what comes ------------------------------------------------------------------------------ */

/* Whether a mapping of this process that others may write to, by its device and inode, is one of
 * theirs too. */
static bool is_mapped_by(pid_t pid, const char *mapping)
{
    char path[64], line[512];
    bool found = false;
    FILE *file;

    snprintf(path, sizeof path, "/proc/%d/maps", (int)pid);
    file = fopen(path, "r");
    assert_non_null(file);
    while (!found && fgets(line, sizeof line, file))
        found = strstr(line, mapping) != NULL;
    fclose(file);
    return found;
}

static bool shares_memory_with(pid_t pid)
{
    FILE *file = fopen("/proc/self/maps", "r");
    char line[512];
    bool shares = false;

    assert_non_null(file);
    while (!shares && fgets(line, sizeof line, file)) {
        char *device = strstr(line, " rw-s ");

        device = device ? strchr(device + 6, ' ') : NULL; /* after the offset */
        if (!device)
            continue;
        device[1 + strcspn(device + 1, "/\n")] = '\0';
        shares = is_mapped_by(pid, device);
    }
    fclose(file);
    return shares;
}

/* What the setting names is what carries the bytes, and shared memory reports a dead peer too. */
static void bytes_come_as_they_are(void **state)
{
    static const char *const transports[] = {"tcp", "tcp,posix,sysv,cma,self"};

    (void)state;
    for (size_t i = 0; i < sizeof transports / sizeof transports[0]; i++) {
        sp_peer_calls calls;
        char flags[64];
        scene s;

        snprintf(flags, sizeof flags, "--peer-transports %s", transports[i]);
        begin(&s, flags, NULL);
        calls = peer_world_client(&s.world, NULL, transports[i]);
        check_fetched(&calls, "first", LAYERS, RANK, 1);
        assert_int_equal(shares_memory_with(s.world.pid), i == 1);
        peer_world_signal(&s.world, SIGKILL);
        expect(&calls, "first", WAIT_MS, SP_ERR_PEER_UNREACHABLE, "peer-unreachable");
        calls.destroy(calls.user);
        peer_world_start(&s.world, flags);
        end(&s);
    }
}

static void a_manifest_says_what_the_files_say(void **state)
{
    const sp_peer_query query = {.name = "first"};
    sp_peer_offer *offer;
    sp_error error;
    scene s;

    (void)state;
    begin(&s, "", NULL);
    assert_ok(s.calls.describe(s.calls.user, &query, NULL, &offer, &error), &error);
    assert_string_equal(offer->manifest.name, "first");
    assert_non_null(strstr(offer->manifest.config, "\"r\":16"));
    assert_int_equal(offer->manifest.n_tensors, 2 * LAYERS);
    assert_string_equal(offer->manifest.tensors[1].name,
                        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight");
    assert_int_equal(offer->manifest.tensors[1].type, SP_TENSOR_BF16);
    assert_int_equal(offer->manifest.tensors[1].shape[0], 64);
    assert_int_equal(offer->manifest.tensors[1].shape[1], RANK);
    assert_int_equal(offer->manifest.offsets[1], RANK * 64 * 2);
    assert_null(offer->manifest.image);
    assert_false(offer->proven);
    s.calls.close(s.calls.user, offer);
    end(&s);
}

/* The digest of the demo's adapter, as its receipt and every other way in have it. */
static void the_digest_is_that_of_the_files(void **state)
{
    peer_world world;
    sp_adapter_options options;
    sp_adapter *adapter;
    sp_peer_calls calls;
    sp_peer_listing listing;
    sp_digest digest;
    sp_error error;

    (void)state;
    peer_world_create(&world);
    peer_world_adapter(&world, "first", LAYERS, RANK, 1);
    {
        char path[4096];

        snprintf(path, sizeof path, "%s/first", world.directory);
        sp_adapter_options_default(&options, sizeof options);
        assert_ok(sp_adapter_open(path, &options, &adapter, &error), &error);
        digest = sp_adapter_digest(adapter);
        sp_adapter_release(adapter);
    }
    peer_world_start(&world, "");
    calls = peer_world_client(&world, NULL, NULL);
    check_fetched(&calls, "first", LAYERS, RANK, 1); /* it has been read now */
    assert_ok(calls.list(calls.user, NULL, &listing, &error), &error);
    assert_int_equal(listing.n_adapters, 1);
    assert_string_equal(listing.adapters[0].name, "first");
    assert_memory_equal(listing.adapters[0].digest.bytes, digest.bytes, SP_DIGEST_BYTES);
    assert_int_equal(listing.adapters[0].bytes, 2 * LAYERS * RANK * 64 * 2);
    assert_false(listing.adapters[0].packed);
    sp_peer_listing_free(&listing);
    calls.destroy(calls.user);
    peer_world_stop(&world);
    peer_world_destroy(&world);
}

static void pieces_may_be_anywhere_in_what_was_offered(void **state)
{
    const sp_peer_query query = {.name = "first"};
    uint8_t got[5][64];
    sp_peer_offer *offer;
    size_t n;
    uint8_t *want;
    sp_error error;
    scene s;

    (void)state;
    begin(&s, "", NULL);
    want = peer_world_bytes(LAYERS, RANK, 1, &n);
    assert_ok(s.calls.describe(s.calls.user, &query, NULL, &offer, &error), &error);
    {
        const uint64_t offsets[5] = {n - 1, 0, 4097, n - 64, 12345};
        const uint64_t lengths[5] = {1, 64, 63, 64, 7};
        sp_peer_range ranges[5];

        for (int i = 0; i < 5; i++)
            ranges[i] =
                (sp_peer_range){SP_PEER_PART_TENSORS, offsets[i], lengths[i], got[i], false};
        assert_ok(s.calls.fetch(s.calls.user, offer, ranges, 5, NULL, &error), &error);
        for (int i = 0; i < 5; i++)
            assert_memory_equal(got[i], want + offsets[i], lengths[i]);
        ranges[0].bytes = 2; /* one beyond the end */
        assert_int_equal(s.calls.fetch(s.calls.user, offer, ranges, 5, NULL, &error),
                         SP_ERR_ARGUMENT);
        ranges[0].bytes = 1; /* it was not sent, so the offer is as good as before */
        assert_ok(s.calls.fetch(s.calls.user, offer, ranges, 5, NULL, &error), &error);
    }
    s.calls.close(s.calls.user, offer);
    sp_free(want);
    end(&s);
}

static void an_adapter_is_found_by_its_digest(void **state)
{
    sp_peer_query query = {.name = "first"};
    sp_digest digest, other;
    sp_peer_offer *offer;
    sp_error error;
    scene s;

    (void)state;
    begin(&s, "", NULL);
    assert_ok(s.calls.describe(s.calls.user, &query, NULL, &offer, &error), &error);
    digest = other = offer->manifest.digest;
    s.calls.close(s.calls.user, offer);
    other.bytes[0] ^= 1;
    query = (sp_peer_query){.digest = &digest};
    assert_ok(s.calls.describe(s.calls.user, &query, NULL, &offer, &error), &error);
    assert_string_equal(offer->manifest.name, "first");
    s.calls.close(s.calls.user, offer);
    query = (sp_peer_query){.digest = &other};
    assert_int_equal(s.calls.describe(s.calls.user, &query, NULL, &offer, &error),
                     SP_ERR_NOT_FOUND);
    query = (sp_peer_query){.name = "first", .digest = &other};
    assert_int_equal(s.calls.describe(s.calls.user, &query, NULL, &offer, &error),
                     SP_ERR_NOT_FOUND);
    assert_string_equal(error.code, "peer-not-found");
    end(&s);
}

/* ---- names ----------------------------------------------------------------------------------- */

static void names_do_not_lead_out(void **state)
{
    static const char *const names[] = {"..",   ".", "../first", "first/../first",
                                        "/etc", "",  "none",     "first/"};
    char path[4096];
    scene s;

    (void)state;
    begin(&s, "", NULL);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        expect(&s.calls, names[i], WAIT_MS, SP_ERR_NOT_FOUND, "peer-not-found");
    /* A link to another place of this host is in the directory, and is not followed. */
    snprintf(path, sizeof path, "%s/outside", s.world.directory);
    assert_int_equal(symlink(SP_TEST_DEMO "/adapters/scripture", path), 0);
    usleep(300000);
    expect(&s.calls, "outside", WAIT_MS, SP_ERR_PEER_REFUSED, "peer-failed");
    check_fetched(&s.calls, "first", LAYERS, RANK, 1);
    end(&s);
}

static void a_refused_adapter_says_why(void **state)
{
    char path[4096];
    sp_error error;
    void *bytes;
    size_t n;
    scene s;

    (void)state;
    begin(&s, "", NULL);
    peer_world_adapter(&s.world, "second", LAYERS, RANK, 2);
    snprintf(path, sizeof path, "%s/second", s.world.directory);
    sp_test_write_file(path, "adapter_config.json", "{\"r\": 0, \"lora_alpha\": 1}", 25);
    usleep(300000);
    assert_int_equal(peer_world_fetch(&s.calls, "second", WAIT_MS, &bytes, &n, &error),
                     SP_ERR_PEER_REFUSED);
    assert_string_equal(error.code, "peer-failed");
    assert_non_null(strstr(error.text, "\"r\""));
    end(&s);
}

/* ---- changes --------------------------------------------------------------------------------- */

static void wait_for(const sp_peer_calls *calls, const char *name, int layers, uint64_t seed)
{
    size_t want_n;
    void *want = peer_world_bytes(layers, RANK, seed, &want_n);
    bool same = false;

    for (int i = 0; i < 200 && !same; i++) {
        size_t n = 0;
        void *bytes = NULL;

        if (peer_world_fetch(calls, name, WAIT_MS, &bytes, &n, NULL) == SP_OK) {
            same = n == want_n && memcmp(bytes, want, n) == 0;
            sp_free(bytes);
        }
        if (!same)
            usleep(20000);
    }
    assert_true(same);
    sp_free(want);
}

/* An offer is of one content: its bytes stay what they were, whatever the folder holds. */
static void a_new_version_leaves_offers_alone(void **state)
{
    const sp_peer_query query = {.name = "first"};
    sp_peer_range ranges[2] = {{.part = SP_PEER_PART_TENSORS}};
    sp_peer_offer *offer;
    size_t n;
    char *want, *got;
    sp_error error;
    scene s;

    (void)state;
    begin(&s, "", NULL);
    want = peer_world_bytes(LAYERS, RANK, 1, &n);
    got = sp_malloc(n);
    assert_ok(s.calls.describe(s.calls.user, &query, NULL, &offer, &error), &error);
    ranges[0].bytes = n / 2;
    ranges[0].memory = got;
    assert_ok(s.calls.fetch(s.calls.user, offer, ranges, 1, NULL, &error), &error);
    peer_world_adapter(&s.world, "first", LAYERS, RANK, 77);
    wait_for(&s.calls, "first", LAYERS, 77);
    ranges[0] = (sp_peer_range){SP_PEER_PART_TENSORS, n / 2, n - n / 2, got + n / 2, false};
    assert_ok(s.calls.fetch(s.calls.user, offer, ranges, 1, NULL, &error), &error);
    assert_memory_equal(got, want, n);
    s.calls.close(s.calls.user, offer);
    sp_free(want);
    sp_free(got);
    end(&s);
}

static void adapters_come_and_go(void **state)
{
    char command[4200];
    scene s;

    (void)state;
    begin(&s, "", NULL);
    expect(&s.calls, "later", WAIT_MS, SP_ERR_NOT_FOUND, "peer-not-found");
    peer_world_adapter(&s.world, "later", 3, RANK, 5);
    wait_for(&s.calls, "later", 3, 5);
    snprintf(command, sizeof command, "rm -r '%s/later'", s.world.directory);
    assert_int_equal(system(command), 0);
    for (int i = 0; i < 200; i++) {
        sp_error error;
        void *bytes;
        size_t n;

        if (peer_world_fetch(&s.calls, "later", WAIT_MS, &bytes, &n, &error) != SP_OK) {
            assert_int_equal(error.status, SP_ERR_NOT_FOUND);
            break;
        }
        sp_free(bytes);
        usleep(20000);
    }
    expect(&s.calls, "later", WAIT_MS, SP_ERR_NOT_FOUND, "peer-not-found");
    end(&s);
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* 3 adapters of 1 MiB each in 2 MiB: each is read again when it is needed. */
static void adapters_beyond_the_budget_take_turns(void **state)
{
    static const char *const names[] = {"a", "b", "c"};
    scene s;

    (void)state;
    begin(&s, "--memory-mib 2", NULL);
    for (int i = 0; i < 3; i++)
        peer_world_adapter(&s.world, names[i], 256, RANK, 10 + (uint64_t)i);
    peer_world_adapter(&s.world, "larger", 769, RANK, 9);
    for (int i = 0; i < 3; i++)
        wait_for(&s.calls, names[i], 256, 10 + (uint64_t)i);
    for (int i = 0; i < 9; i++)
        check_fetched(&s.calls, names[i % 3], 256, RANK, 10 + (uint64_t)(i % 3));
    expect(&s.calls, "larger", WAIT_MS, SP_ERR_PEER_REFUSED, "peer-failed");
    end(&s);
}

/* ---- several clients ------------------------------------------------------------------------- */

static void *fetch_often(void *user)
{
    const sp_peer_calls *calls = user;

    for (int i = 0; i < 10; i++)
        check_fetched(calls, "first", LAYERS, RANK, 1);
    return NULL;
}

static void threads_and_clients_share_a_peer(void **state)
{
    pthread_t threads[4];
    sp_peer_calls other;
    scene s;

    (void)state;
    begin(&s, "", NULL);
    other = peer_world_client(&s.world, NULL, NULL);
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, fetch_often, i < 2 ? &s.calls : &other),
                         0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    other.destroy(other.user);
    end(&s);
}

static void clients_beyond_the_limit_are_turned_away(void **state)
{
    const sp_peer_query query = {.name = "first"};
    sp_peer_calls other;
    sp_peer_offer *offer;
    sp_error error;
    scene s;

    (void)state;
    begin(&s, "--max-clients 1", NULL);
    assert_ok(s.calls.describe(s.calls.user, &query, NULL, &offer, &error), &error);
    other = peer_world_client(&s.world, NULL, NULL);
    expect(&other, "first", WAIT_MS, SP_ERR_PEER_UNREACHABLE, "peer-unreachable");
    s.calls.close(s.calls.user, offer);
    check_fetched(&s.calls, "first", LAYERS, RANK, 1);
    other.destroy(other.user);
    end(&s);
}

/* An idle connection is closed by the peer; the next call makes another. */
static void an_idle_connection_is_replaced(void **state)
{
    scene s;

    (void)state;
    begin(&s, "--idle-seconds 1", NULL);
    check_fetched(&s.calls, "first", LAYERS, RANK, 1);
    sleep(2);
    check_fetched(&s.calls, "first", LAYERS, RANK, 1);
    end(&s);
}

/* ---- the key --------------------------------------------------------------------------------- */

static void only_the_same_key_is_served(void **state)
{
    static const sp_peer_key right = {"the key of this test", 20},
                             wrong = {"not that key at all!", 20};
    const sp_peer_query query = {.name = "first"};
    char *directory = sp_test_make_directory();
    char flags[4200];
    sp_peer_calls calls;
    sp_peer_offer *offer;
    sp_error error;
    scene s;

    (void)state;
    snprintf(flags, sizeof flags, "%s/key", directory);
    sp_test_write_file(directory, "key", "the key of this test\n", 21);
    {
        char command[4300];

        snprintf(command, sizeof command, "chmod 600 '%s'", flags);
        assert_int_equal(system(command), 0);
    }
    snprintf(flags, sizeof flags, "--peer-key-file '%s/key'", directory);
    begin(&s, flags, &right);
    check_fetched(&s.calls, "first", LAYERS, RANK, 1);
    assert_ok(s.calls.describe(s.calls.user, &query, NULL, &offer, &error), &error);
    assert_true(offer->proven);
    s.calls.close(s.calls.user, offer);
    calls = peer_world_client(&s.world, &wrong, NULL);
    expect(&calls, "first", WAIT_MS, SP_ERR_PEER_REFUSED, "peer-key");
    calls.destroy(calls.user);
    calls = peer_world_client(&s.world, NULL, NULL);
    expect(&calls, "first", WAIT_MS, SP_ERR_PEER_REFUSED, "peer-key");
    calls.destroy(calls.user);
    check_fetched(&s.calls, "first", LAYERS, RANK, 1);
    end(&s);
    begin(&s, "", &right); /* a peer without a key proves nothing */
    expect(&s.calls, "first", WAIT_MS, SP_ERR_PEER_REFUSED, "peer-key");
    end(&s);
    sp_test_remove_tree(directory);
    sp_free(directory);
}

/* ---- a peer that is gone, or stopped --------------------------------------------------------- */

static void nobody_there_is_unreachable(void **state)
{
    const sp_peer_client_options bad = {.address = "127.0.0.1"};
    uint64_t begin_ns;
    sp_peer_calls calls;
    sp_error error;
    scene s;

    (void)state;
    assert_int_equal(sp_peer_client_create(&bad, &calls, &error), SP_ERR_INPUT);
    assert_string_equal(error.code, "peer-address");
    begin(&s, "", NULL);
    peer_world_stop(&s.world);
    begin_ns = sp_clock_ns();
    expect(&s.calls, "first", WAIT_MS, SP_ERR_PEER_UNREACHABLE, "peer-unreachable");
    assert_true(sp_clock_ns() - begin_ns < (uint64_t)10 * 1000000000);
    peer_world_start(&s.world, "");
    check_fetched(&s.calls, "first", LAYERS, RANK, 1); /* on the same port as before */
    end(&s);
}

/* UCX reports nothing of it: the deadline is ours. */
static void a_stopped_peer_costs_the_deadline(void **state)
{
    uint64_t begin_ns, took_ms;
    scene s;

    (void)state;
    begin(&s, "", NULL);
    check_fetched(&s.calls, "first", LAYERS, RANK, 1);
    peer_world_signal(&s.world, SIGSTOP);
    for (int i = 0; i < 2; i++) { /* on a connection that is open, and on a new one */
        begin_ns = sp_clock_ns();
        expect(&s.calls, "first", 300, SP_ERR_PEER_TIMEOUT, "peer-timeout");
        took_ms = (sp_clock_ns() - begin_ns) / 1000000;
        assert_true(took_ms >= 300 && took_ms < 5000);
    }
    peer_world_signal(&s.world, SIGCONT);
    check_fetched(&s.calls, "first", LAYERS, RANK, 1);
    end(&s);
}

/* Bytes are in flight when it stops: nothing is written to the memory afterwards. */
static void a_peer_stopped_in_a_transfer_leaves_the_memory_alone(void **state)
{
    const sp_peer_query query = {.name = "large"};
    sp_peer_wait wait = {0};
    sp_peer_offer *offer;
    sp_peer_range range = {.part = SP_PEER_PART_TENSORS};
    sp_error error;
    sp_status status;
    uint8_t *memory;
    scene s;

    (void)state;
    begin(&s, "", NULL);
    peer_world_adapter(&s.world, "large", 2048, RANK, 3);
    wait_for(&s.calls, "large", 2048, 3);
    assert_ok(s.calls.describe(s.calls.user, &query, NULL, &offer, &error), &error);
    range.bytes = offer->manifest.data_bytes;
    memory = range.memory = sp_malloc((size_t)range.bytes);
    peer_world_signal(&s.world, SIGSTOP);
    wait.deadline_ns = sp_clock_ns() + 200000000;
    status = s.calls.fetch(s.calls.user, offer, &range, 1, &wait, &error);
    assert_int_equal(status, SP_ERR_PEER_TIMEOUT);
    memset(memory, 0x5a, (size_t)range.bytes);
    peer_world_signal(&s.world, SIGCONT);
    check_fetched(&s.calls, "first", LAYERS, RANK, 1);
    for (size_t i = 0; i < range.bytes; i++)
        assert_int_equal(memory[i], 0x5a);
    assert_int_equal(s.calls.fetch(s.calls.user, offer, &range, 1, NULL, &error), SP_ERR_PEER_LOST);
    s.calls.close(s.calls.user, offer);
    sp_free(memory);
    end(&s);
}

static bool is_cancelled(void *user)
{
    return atomic_load((atomic_bool *)user);
}

static void *cancel_soon(void *user)
{
    usleep(100000);
    atomic_store((atomic_bool *)user, true);
    return NULL;
}

static void a_call_can_be_cancelled(void **state)
{
    const sp_peer_query query = {.name = "first"};
    atomic_bool cancelled = false;
    const sp_peer_wait wait = {.is_cancelled = is_cancelled, .user = &cancelled};
    sp_peer_offer *offer;
    uint64_t begin_ns;
    pthread_t thread;
    sp_error error;
    scene s;

    (void)state;
    begin(&s, "", NULL);
    peer_world_signal(&s.world, SIGSTOP);
    begin_ns = sp_clock_ns();
    assert_int_equal(pthread_create(&thread, NULL, cancel_soon, &cancelled), 0);
    assert_int_equal(s.calls.describe(s.calls.user, &query, &wait, &offer, &error), SP_ERR_STATE);
    assert_string_equal(error.code, "peer-cancelled");
    assert_true(sp_clock_ns() - begin_ns < (uint64_t)4 * 1000000000);
    pthread_join(thread, NULL);
    peer_world_signal(&s.world, SIGCONT);
    check_fetched(&s.calls, "first", LAYERS, RANK, 1);
    end(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_come_as_they_are),
        cmocka_unit_test(a_manifest_says_what_the_files_say),
        cmocka_unit_test(the_digest_is_that_of_the_files),
        cmocka_unit_test(pieces_may_be_anywhere_in_what_was_offered),
        cmocka_unit_test(an_adapter_is_found_by_its_digest),
        cmocka_unit_test(names_do_not_lead_out),
        cmocka_unit_test(a_refused_adapter_says_why),
        cmocka_unit_test(a_new_version_leaves_offers_alone),
        cmocka_unit_test(adapters_come_and_go),
        cmocka_unit_test(adapters_beyond_the_budget_take_turns),
        cmocka_unit_test(threads_and_clients_share_a_peer),
        cmocka_unit_test(clients_beyond_the_limit_are_turned_away),
        cmocka_unit_test(an_idle_connection_is_replaced),
        cmocka_unit_test(only_the_same_key_is_served),
        cmocka_unit_test(nobody_there_is_unreachable),
        cmocka_unit_test(a_stopped_peer_costs_the_deadline),
        cmocka_unit_test(a_peer_stopped_in_a_transfer_leaves_the_memory_alone),
        cmocka_unit_test(a_call_can_be_cancelled),
    };

    peer_world_need_ucx();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
