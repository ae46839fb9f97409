#include "server/driver/peers.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "server/driver/helper.h"
#include "stage/source_peer.h"

#include <string.h>

#define LIST_NS   5000000000 /* from one list to the next */
#define NS_PER_MS 1000000u

typedef struct peer {
    sp_helper helper; /* its lock is that of listing, reached, asked */
    char *address;
    sp_peer_calls calls;
    bool has_calls, runs, is_trusted;
    sp_peer_source *source;
    int32_t call_ms_max;
    sp_log *log;
    sp_peer_listing listing; /* the last one that came */
    bool reached, asked;     /* by the last list; whether there was one */
} peer;

struct sp_peers {
    peer **peers; /* [n] */
    sp_stage_source *sources;
    size_t n;
};

/* ---- the names of one peer, on its thread ---------------------------------------------------- */

static bool is_closed(void *user)
{
    peer *p = user;
    bool closed;

    pthread_mutex_lock(&p->helper.lock);
    closed = p->helper.closed;
    pthread_mutex_unlock(&p->helper.lock);
    return closed;
}

/* A change is logged, and nothing while it stays so. */
static void log_change(const peer *p, bool reached, const sp_error *error)
{
    if (p->asked && p->reached == reached)
        return;
    if (reached)
        sp_log_line(p->log, SP_LOG_PREFIX "the peer %s serves %zu adapters", p->address,
                    p->listing.n_adapters);
    else
        sp_log_line(p->log, SP_LOG_PREFIX "warning: the peer %s gives no list: %s [%s]", p->address,
                    error->text, error->code ? error->code : "");
}

static void take_list(peer *p, sp_status status, sp_peer_listing *listing, const sp_error *error)
{
    sp_peer_listing before = {0};

    pthread_mutex_lock(&p->helper.lock);
    if (status == SP_OK) {
        before = p->listing;
        p->listing = *listing;
    }
    if (!p->helper.closed)
        log_change(p, status == SP_OK, error);
    p->reached = status == SP_OK;
    p->asked = true;
    pthread_mutex_unlock(&p->helper.lock);
    sp_peer_listing_free(&before);
}

static void run(void *state)
{
    peer *p = state;

    pthread_mutex_lock(&p->helper.lock);
    while (!p->helper.closed) {
        const sp_peer_wait wait = {sp_clock_ns() + (uint64_t)p->call_ms_max * NS_PER_MS, is_closed,
                                   p};
        sp_peer_listing listing = {0};
        sp_error error = {.code = ""};
        sp_status status;

        pthread_mutex_unlock(&p->helper.lock);
        status = p->calls.list(p->calls.user, &wait, &listing, &error);
        take_list(p, status, &listing, &error);
        pthread_mutex_lock(&p->helper.lock);
        if (!p->helper.closed)
            sp_helper_wait(&p->helper, LIST_NS);
    }
    pthread_mutex_unlock(&p->helper.lock);
}

/* ---- one peer -------------------------------------------------------------------------------- */

static void destroy_peer(void *state)
{
    peer *p = state;

    sp_peer_source_destroy(p->source);
    if (p->has_calls)
        p->calls.destroy(p->calls.user);
    sp_peer_listing_free(&p->listing);
    sp_helper_destroy(&p->helper);
    sp_free(p->address);
    sp_free(p);
}

static void close_peer(peer *p)
{
    if (!p)
        return;
    if (p->runs)
        sp_helper_close(&p->helper);
    else
        destroy_peer(p);
}

static bool is_among(const char *const *list, size_t n, const char *text)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(list[i], text) == 0)
            return true;
    return false;
}

static const char *or_null(const char *text)
{
    return text && text[0] ? text : NULL;
}

static sp_status connect_peer(const sp_peers_options *options, const sp_peer_key *key, peer *p,
                              sp_error *error)
{
    const sp_peer_client_options client = {.address = p->address,
                                           .key = key,
                                           .connect_ms_max = (uint64_t)options->call_ms_max,
                                           .call_ms_max = (uint64_t)options->call_ms_max,
                                           .devices = or_null(options->devices),
                                           .gid_index = or_null(options->gid_index),
                                           .transports = or_null(options->transports)};
    sp_status status = options->connect
                           ? options->connect(options->connect_user, &client, &p->calls, error)
                           : sp_peer_client_create(&client, &p->calls, error);

    p->has_calls = status == SP_OK;
    return status;
}

static sp_status open_peer(const sp_peers_options *options, const sp_peer_key *key, size_t index,
                           peer **out_peer, sp_error *error)
{
    peer *p = sp_calloc(1, sizeof *p);
    sp_status status;

    if (!p)
        return sp_fail_memory(error, sizeof *p, "a peer");
    *out_peer = p; /* whatever follows, it is closed with the others */
    sp_helper_init(&p->helper);
    p->address = sp_strdup(options->addresses[index]);
    if (!p->address)
        return sp_fail_memory(error, 1, "a peer");
    p->is_trusted = is_among(options->trusted, options->n_trusted, p->address);
    p->call_ms_max = options->call_ms_max;
    p->log = options->log;
    status = connect_peer(options, key, p, error);
    if (status == SP_OK)
        status = sp_peer_source_create(
            &(sp_peer_source_options){.address = p->address,
                                      .calls = p->calls,
                                      .trust_images = p->is_trusted,
                                      .call_ms_max = (uint64_t)options->call_ms_max},
            &p->source, error);
    return status;
}

/* ---- all of them ----------------------------------------------------------------------------- */

static sp_status check_options(const sp_peers_options *options, sp_error *error)
{
    for (size_t i = 0; i < options->n_addresses; i++)
        if (is_among(options->addresses, i, options->addresses[i]))
            return sp_fail(error, SP_ERR_INPUT, NULL, "peer", -1, "--peer %s is given twice",
                           options->addresses[i]);
    for (size_t i = 0; i < options->n_trusted; i++)
        if (!is_among(options->addresses, options->n_addresses, options->trusted[i]))
            return sp_fail(error, SP_ERR_INPUT, NULL, "peer-trust-images", -1,
                           "--peer-trust-images %s is none of the peers; give it as --peer too",
                           options->trusted[i]);
    if (options->n_trusted > 0 && !or_null(options->key_file))
        return sp_fail(error, SP_ERR_INPUT, NULL, "peer-key-file", -1,
                       "--peer-trust-images needs --peer-key-file: only a peer that proves the "
                       "shared key can be told from another");
    return SP_OK;
}

static sp_status open_all(const sp_peers_options *options, sp_peers *peers, sp_error *error)
{
    sp_peer_key key = {.n_bytes = 0};
    sp_status status = SP_OK;

    if (or_null(options->key_file))
        status = sp_peer_key_read(options->key_file, &key, error);
    for (size_t i = 0; i < options->n_addresses && status == SP_OK; i++) {
        peers->n = i + 1;
        status = open_peer(options, key.n_bytes > 0 ? &key : NULL, i, &peers->peers[i], error);
        if (status == SP_OK)
            peers->sources[i] = sp_peer_source_table(peers->peers[i]->source);
    }
    explicit_bzero(&key, sizeof key);
    for (size_t i = 0; i < peers->n && status == SP_OK; i++) {
        peer *p = peers->peers[i];

        status = sp_helper_start(&p->helper, "a peer's names", run, destroy_peer, p, error);
        p->runs = status == SP_OK;
    }
    return status;
}

sp_status sp_peers_open(const sp_peers_options *options, sp_peers **out_peers, sp_error *error)
{
    sp_status status = check_options(options, error);
    sp_peers *peers;

    if (status != SP_OK)
        return status;
    peers = sp_calloc(1, sizeof *peers);
    if (!peers)
        return sp_fail_memory(error, sizeof *peers, "the peers");
    peers->peers = sp_calloc(options->n_addresses + 1, sizeof(peer *)); /* never an empty block */
    peers->sources = sp_calloc(options->n_addresses + 1, sizeof *peers->sources);
    if (peers->peers && peers->sources)
        status = open_all(options, peers, error);
    else
        status = sp_fail_memory(error, options->n_addresses * sizeof(peer *), "the peers");
    if (status == SP_OK)
        *out_peers = peers;
    else
        sp_peers_close(peers);
    return status;
}

void sp_peers_close(sp_peers *peers)
{
    if (!peers)
        return;
    for (size_t i = 0; i < peers->n; i++)
        close_peer(peers->peers[i]);
    sp_free(peers->sources);
    sp_free(peers->peers);
    sp_free(peers);
}

const sp_stage_source *sp_peers_sources(const sp_peers *peers, int32_t *out_n)
{
    *out_n = (int32_t)peers->n;
    return peers->sources;
}

/* ---- names ----------------------------------------------------------------------------------- */

/* Under the peer's lock. */
static bool lists(const peer *p, const char *name)
{
    size_t low = 0, high = p->listing.n_adapters;

    while (low < high) { /* they ascend */
        size_t middle = low + (high - low) / 2;
        int order = strcmp(name, p->listing.adapters[middle].name);

        if (order == 0)
            return true;
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return false;
}

static bool has(peer *p, const char *name)
{
    bool found;

    pthread_mutex_lock(&p->helper.lock);
    found = lists(p, name);
    pthread_mutex_unlock(&p->helper.lock);
    return found;
}

bool sp_peers_have(sp_peers *peers, const char *name)
{
    for (size_t i = 0; peers && i < peers->n; i++)
        if (has(peers->peers[i], name))
            return true;
    return false;
}

/* A copy of a peer's names, one after the other with their NULs; NULL: none, or out of memory. */
static char *copy_names(peer *p, size_t *out_bytes)
{
    size_t bytes = 0, at = 0;
    char *names;

    pthread_mutex_lock(&p->helper.lock);
    for (size_t i = 0; i < p->listing.n_adapters; i++)
        bytes += strlen(p->listing.adapters[i].name) + 1;
    names = bytes > 0 ? sp_malloc(bytes) : NULL;
    for (size_t i = 0; names && i < p->listing.n_adapters; i++) {
        size_t n = strlen(p->listing.adapters[i].name) + 1;

        memcpy(names + at, p->listing.adapters[i].name, n);
        at += n;
    }
    pthread_mutex_unlock(&p->helper.lock);
    *out_bytes = at;
    return names;
}

static bool is_of_earlier(const sp_peers *peers, size_t index, const char *name)
{
    for (size_t i = 0; i < index; i++)
        if (has(peers->peers[i], name))
            return true;
    return false;
}

void sp_peers_list(sp_peers *peers, void (*visit)(void *user, const char *name), void *user)
{
    for (size_t i = 0; peers && i < peers->n; i++) {
        size_t bytes;
        char *names = copy_names(peers->peers[i], &bytes);

        for (size_t at = 0; names && at < bytes; at += strlen(names + at) + 1)
            if (!is_of_earlier(peers, i, names + at))
                visit(user, names + at);
        sp_free(names);
    }
}

/* ---- metrics --------------------------------------------------------------------------------- */

sp_listed_peer *sp_peers_snapshot(sp_peers *peers, size_t *out_n)
{
    sp_listed_peer *list = peers ? sp_calloc(peers->n + 1, sizeof *list) : NULL;

    *out_n = list ? peers->n : 0;
    for (size_t i = 0; i < *out_n; i++) {
        peer *p = peers->peers[i];
        sp_peer_source_counts counts;

        sp_peer_source_count(p->source, &counts);
        list[i] = (sp_listed_peer){.address = p->address,
                                   .manifests = counts.described,
                                   .images = counts.images,
                                   .images_passed = counts.images_passed,
                                   .failures = counts.failures,
                                   .bytes = counts.bytes};
        pthread_mutex_lock(&p->helper.lock);
        list[i].reached = p->reached;
        list[i].n_adapters = p->listing.n_adapters;
        pthread_mutex_unlock(&p->helper.lock);
    }
    return list;
}
