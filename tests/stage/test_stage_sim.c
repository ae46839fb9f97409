/*
 * test_stage_sim.c: random lives of a stage, its pool and a stand-in for a scheduler, on one
 * thread and a clock of steps, with invariants checked after every event.
 *
 *     test_stage_sim [FIRST_SEED N_SEEDS]      without arguments: seeds 1 .. 500
 *
 * A failing seed prints the line that replays it. "Disk" is a table location → identity that
 * changes under the stage; an identity stands for the bytes of one adapter. Loads fail before and
 * behind the packing, allocations fail at random, pools have 1 to 4 slots and budgets 1 to 6
 * images.
 *
 * Besides the disk there are two peers, trusted with images, with the source that real ones have.
 * Each has its own table of names, and changes it; it fails in every way that a peer fails, dies
 * half-way, and forges bytes, digests, ranks, layouts and lengths. Loads go by name and by
 * digest. Whatever they do, what a digest means stays what it is.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "base/hash.h"
#include "pool/image.h"
#include "stage/source_peer.h"
#include "support/hand.h"
#include "support/packed_source.h"
#include "support/seeds.h"
#include "support/test.h"

#include <sidepath/stage.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#define N_NAMES       8
#define N_LOCATIONS   10
#define N_IDENTITIES  12
#define N_PEERS       2
#define REQUESTS_MAX  24
#define LOADS_MAX     16
#define EVENTS        400
#define WAIT_STEPS    6  /* as the scheduler's adapter-wait-steps, in small */
#define PREEMPT_STEPS 16 /* and adapter-preempt-steps */
#define WORK_MAX      40
/*
 * Every request before it in the queue may hold a slot for its whole work and be sent away for
 * others, and a load takes a few polls. Far below what starvation would give.
 */
#define WAITED_MAX (REQUESTS_MAX * (WORK_MAX + PREEMPT_STEPS + 8))

typedef struct sim_request {
    bool live;
    int64_t id;
    sp_hold hold;
    sp_digest digest;
    uint64_t generation;
    int32_t work, waited;
} sim_request;

typedef struct sim_name {
    bool exists, pinned;
    uint64_t generation;
} sim_name;

typedef struct sim_load {
    bool live, cancelled, by_digest;
    int64_t ticket;
    int32_t name;
    sp_digest digest; /* with by_digest */
} sim_load;

typedef struct sim_peer {
    struct sim *s;
    int32_t names[N_NAMES]; /* identity, -1: it has no such adapter */
    sp_peer_source *source;
    int32_t n_open;
} sim_peer;

typedef struct sim {
    uint64_t seed;
    int32_t event;
    sp_test_random random;
    hand_pool pool;
    hand_adapter *adapters[N_IDENTITIES];
    sp_image *expected[N_IDENTITIES];
    packed_source packed;
    int32_t disk[N_LOCATIONS]; /* identity, -1: nothing there */
    sim_peer peers[N_PEERS];
    uint32_t fail_permille, forge_permille;
    size_t budget;
    sp_stage *stage;
    sim_name names[N_NAMES];
    int32_t active; /* name, -1: none */
    sim_request requests[REQUESTS_MAX];
    sim_load loads[LOADS_MAX];
    int64_t next_id;
    int32_t head_waited; /* steps since the head of the queue has waited for a slot */
    int64_t head;
    uint64_t landed; /* straight into slots, so far */
    bool head_full;  /* it waits for a slot, not for room in the host cache */
} sim;

/* What the whole run covered; asserted at the end, so that no branch is dead. */
static struct {
    uint64_t loads_ok, loads_failed, pool_full, host_full, pinned_for_good, changed, preempted;
    uint64_t waited_max, cancelled, shared, name_taken, stale, busy_unload, memory;
    uint64_t images, landed, forgeries, peer_failures, by_digest, other_bytes;
} seen;

static sim *running; /* for the line that replays a failure */

#define SIM_CHECK(condition)                                                        \
    do {                                                                            \
        if (!(condition)) {                                                         \
            sp_alloc_fail_after(-1);                                                \
            fprintf(stderr, "replay: test_stage_sim %llu 1   (event %d: %s)\n",     \
                    (unsigned long long)running->seed, running->event, #condition); \
            fail_msg("%s", #condition);                                             \
        }                                                                           \
    } while (0)

static const char *name_text(int32_t name)
{
    static const char *const texts[N_NAMES] = {"a", "b", "c", "d", "e", "f", "g", "h"};

    return texts[name];
}

static uint32_t below(sim *s, uint32_t n)
{
    return sp_test_below(&s->random, n);
}

/* ---- the source ---------------------------------------------------------------------------- */

static sp_status find(void *user, const sp_source_request *request, sp_image **out_image,
                      sp_error *error)
{
    sim *s = user;
    int32_t identity = request->location[0] != '\0' ? s->disk[request->location[0] - '0'] : -1;
    const hand_adapter *adapter;

    if (identity < 0)
        return sp_fail(error, SP_ERR_NOT_FOUND, NULL, request->name, -1, "nothing there");
    if (below(s, 1000) < s->fail_permille)
        return sp_fail(error, SP_ERR_TRUNCATED, NULL, request->name, -1, "cut short");
    adapter = s->adapters[identity];
    return sp_layout_pack_sites(s->pool.layout, adapter->sites, (size_t)adapter->n_sites,
                                &adapter->digest, NULL, out_image, error);
}

static sp_status after_the_last_byte(void *user, const sp_source_request *request, sp_error *error)
{
    sim *s = user;

    if (below(s, 1000) < s->fail_permille)
        return sp_fail(error, SP_ERR_IO, NULL, request->name, -1, "failed after the last byte");
    return SP_OK;
}

/* ---- the peers ----------------------------------------------------------------------------- */

typedef struct sim_offer {
    sp_peer_offer offer; /* first */
    sp_peer_image image;
    char *data;      /* a copy, or that of the expected image */
    bool owns_data;  /* and the lists of the image */
    size_t bytes_to; /* how many bytes come before it dies */
} sim_offer;

static void close_offer(void *user, sp_peer_offer *offer)
{
    sim_peer *peer = user;
    sim_offer *own = (sim_offer *)(void *)offer;

    if (own->owns_data) {
        sp_free(own->data);
        sp_free(own->image.ranks);
        sp_free(own->image.scales);
    }
    sp_free(own);
    peer->n_open--;
}

/* What a forgery may change is copied first. False: out of memory, and nothing has changed. */
static bool copy_image(const sim *s, sim_offer *offer)
{
    size_t n = (size_t)offer->image.n_sites, bytes = sp_layout_slot_bytes(s->pool.layout);
    char *data = sp_malloc(bytes);
    int32_t *ranks = sp_calloc(n, sizeof *ranks);
    float *scales = sp_calloc(n, sizeof *scales);

    if (data == NULL || ranks == NULL || scales == NULL) {
        sp_free(data);
        sp_free(ranks);
        sp_free(scales);
        return false;
    }
    memcpy(data, offer->data, bytes);
    memcpy(ranks, offer->image.ranks, n * sizeof *ranks);
    memcpy(scales, offer->image.scales, n * sizeof *scales);
    offer->data = data;
    offer->image.ranks = ranks;
    offer->image.scales = scales;
    offer->owns_data = true;
    return true;
}

static void tell_forgery(sim *s, const sp_peer_query *query, sim_offer *offer)
{
    size_t bytes = sp_layout_slot_bytes(s->pool.layout);

    switch (below(s, 9)) {
    case 0:
        offer->data[below(s, (uint32_t)bytes)] ^= 1;
        offer->image.checksum = sp_xxh3(offer->data, bytes);
        break;
    case 1:
        offer->data[below(s, (uint32_t)bytes)] ^= 0x40;
        break;
    case 2: /* other bytes under the digest that is wanted, or under any */
        offer->offer.manifest.digest =
            query->digest != NULL ? *query->digest : s->adapters[below(s, N_IDENTITIES)]->digest;
        break;
    case 3:
        offer->image.ranks[below(s, 3)] ^= 1;
        break;
    case 4:
        offer->image.scales[below(s, 3)] = below(s, 2) ? NAN : 17.0f;
        break;
    case 5:
        offer->image.fingerprint.bytes[below(s, 32)] ^= 1;
        break;
    case 6:
        offer->image.bytes -= 256;
        break;
    case 7:
        offer->offer.proven = false;
        break;
    default:
        offer->image.seal.bytes[below(s, 32)] ^= 1;
        break;
    }
    seen.forgeries++;
}

static sp_status peer_fails(sim *s, sp_error *error)
{
    static const sp_status statuses[] = {SP_ERR_PEER_UNREACHABLE, SP_ERR_PEER_LOST,
                                         SP_ERR_PEER_PROTOCOL, SP_ERR_PEER_REFUSED,
                                         SP_ERR_TOO_LARGE};

    return sp_fail(error, statuses[below(s, 5)], "peer-failed", "peer", -1, "the peer fails");
}

static int32_t identity_of(const sim_peer *peer, const sp_peer_query *query)
{
    for (int32_t i = 0; i < N_NAMES; i++) {
        int32_t identity = peer->names[i];

        if (identity < 0 || (query->name != NULL && strcmp(query->name, name_text(i)) != 0))
            continue;
        if (query->digest == NULL ||
            memcmp(query->digest, &peer->s->adapters[identity]->digest, sizeof *query->digest) == 0)
            return identity;
    }
    return -1;
}

static sp_status label_offer(const sim *s, int32_t identity, sim_offer *offer, sp_error *error)
{
    const sp_image *packed = s->expected[identity];
    const sp_image_label label = {packed->ranks, packed->scales, packed->digest, packed->checksum};

    offer->data = packed->data;
    offer->image = (sp_peer_image){
        .bytes = sp_layout_slot_bytes(s->pool.layout),
        .fingerprint = packed->fingerprint,
        .checksum = packed->checksum,
        .n_sites = sp_layout_n_sites(s->pool.layout),
        .ranks = packed->ranks,
        .scales = packed->scales,
        .rank = 4,
        .pairs = 1,
        .file_bytes = 100,
    };
    offer->offer.manifest.digest = packed->digest;
    offer->offer.manifest.image = &offer->image;
    offer->offer.proven = true;
    return sp_image_bind(s->pool.layout, &label, packed->data, NULL, &offer->image.seal, error);
}

static sp_status describe_offer(void *user, const sp_peer_query *query, const sp_peer_wait *wait,
                                sp_peer_offer **out_offer, sp_error *error)
{
    sim_peer *peer = user;
    sim *s = peer->s;
    int32_t identity = identity_of(peer, query);
    sim_offer *offer;
    sp_status status;

    (void)wait;
    if (below(s, 1000) < s->fail_permille) {
        seen.peer_failures++;
        return peer_fails(s, error);
    }
    if (below(s, 1000) < s->forge_permille && identity < 0)
        identity = (int32_t)below(s, N_IDENTITIES); /* it has something else */
    if (identity < 0)
        return sp_fail(error, SP_ERR_NOT_FOUND, "peer-not-found", "peer", -1, "not there");
    offer = sp_calloc(1, sizeof *offer);
    if (offer == NULL)
        return sp_fail_memory(error, sizeof *offer, "an offer");
    peer->n_open++;
    status = label_offer(s, identity, offer, error);
    if (status != SP_OK) {
        close_offer(peer, &offer->offer);
        return status;
    }
    offer->bytes_to = below(s, 1000) < s->fail_permille
                          ? below(s, (uint32_t)sp_layout_slot_bytes(s->pool.layout))
                          : SIZE_MAX;
    if (below(s, 1000) < s->forge_permille && copy_image(s, offer))
        tell_forgery(s, query, offer);
    *out_offer = &offer->offer;
    return SP_OK;
}

static sp_status fetch_ranges(void *user, sp_peer_offer *offer, const sp_peer_range *ranges,
                              size_t n_ranges, const sp_peer_wait *wait, sp_error *error)
{
    const sim_offer *own = (const sim_offer *)(const void *)offer;

    (void)user;
    (void)wait;
    for (size_t i = 0; i < n_ranges; i++) {
        SIM_CHECK(ranges[i].part == SP_PEER_PART_IMAGE);
        SIM_CHECK(ranges[i].offset + ranges[i].bytes <= own->image.bytes);
        if (ranges[i].offset + ranges[i].bytes > own->bytes_to) {
            seen.peer_failures++;
            return sp_fail(error, SP_ERR_PEER_LOST, "peer-lost", "peer", -1, "it died");
        }
        memcpy(ranges[i].memory, own->data + ranges[i].offset, (size_t)ranges[i].bytes);
    }
    return SP_OK;
}

static void open_peers(sim *s, sp_stage_source *out_sources)
{
    for (int32_t p = 0; p < N_PEERS; p++) {
        sim_peer *peer = &s->peers[p];
        const sp_peer_source_options options = {.address = "peer",
                                                .calls = {.user = peer,
                                                          .describe = describe_offer,
                                                          .fetch = fetch_ranges,
                                                          .close = close_offer},
                                                .trust_images = true};
        sp_error error;

        peer->s = s;
        for (int32_t i = 0; i < N_NAMES; i++)
            peer->names[i] = (int32_t)below(s, N_IDENTITIES + 4) - 4;
        assert_ok(sp_peer_source_create(&options, &peer->source, &error), &error);
        out_sources[p] = sp_peer_source_table(peer->source);
    }
}

static void close_peers(sim *s)
{
    for (int32_t p = 0; p < N_PEERS; p++) {
        sp_peer_source_counts counts;

        sp_peer_source_count(s->peers[p].source, &counts);
        seen.images += counts.images;
        sp_peer_source_destroy(s->peers[p].source);
        SIM_CHECK(s->peers[p].n_open == 0);
    }
}

/* A peer restarts with other bytes under a name, or without it. */
static void change_peer(sim *s)
{
    s->peers[below(s, N_PEERS)].names[below(s, N_NAMES)] = (int32_t)below(s, N_IDENTITIES + 4) - 4;
}

/* ---- a world ------------------------------------------------------------------------------- */

static const site_dims sites[] = {
    {0, SP_MODULE_Q_PROJ, 8, 8}, {0, SP_MODULE_DOWN_PROJ, 12, 8}, {1, SP_MODULE_Q_PROJ, 8, 8}};

static void make_identities(sim *s)
{
    for (int32_t i = 0; i < N_IDENTITIES; i++) {
        s->adapters[i] = hand_adapter_create((uint64_t)i + 1);
        for (int32_t k = 0; k < 3; k++)
            if (k == i % 3 || below(s, 2) == 0)
                hand_adapter_add(s->adapters[i], &sites[k], 1 + (int32_t)below(s, 8),
                                 0.25f * (float)(i + 1), SP_DTYPE_BF16, &s->random);
        s->expected[i] = hand_pack(&s->pool, s->adapters[i]);
    }
}

static void sim_begin(sim *s, uint64_t seed)
{
    sp_stage_source sources[1 + N_PEERS];
    sp_stage_options options;
    sp_error error;

    *s = (sim){.seed = seed, .random = {seed * UINT64_C(0x9e3779b97f4a7c15)}, .active = -1};
    running = s;
    s->pool = hand_pool_create(sites, 3, 8, SP_DTYPE_BF16, 1 + (int32_t)below(s, 4));
    make_identities(s);
    for (int32_t i = 0; i < N_LOCATIONS; i++)
        s->disk[i] = (int32_t)below(s, N_IDENTITIES);
    s->fail_permille = below(s, 2) ? below(s, 200) : 0;
    s->forge_permille = below(s, 2) ? below(s, 400) : 0;
    s->budget = below(s, 3) == 0 ? 0 : (1 + below(s, 6)) * s->expected[0]->bytes;
    s->packed = (packed_source){s, s->pool.layout, find, after_the_last_byte};
    sources[0] = packed_source_table(&s->packed);
    open_peers(s, sources + 1);
    sp_stage_options_default(&options, sizeof options);
    options.pool = s->pool.pool;
    options.sources = sources;
    options.n_sources = 1 + N_PEERS;
    options.host_bytes_max = s->budget;
    options.threads = 0;
    assert_ok(sp_stage_create(&options, &s->stage, &error), &error);
}

static void sim_end(sim *s)
{
    sp_stage_destroy(s->stage);
    close_peers(s);
    for (int32_t i = 0; i < sp_pool_slots(s->pool.pool); i++) {
        sp_slot_info info = {.struct_bytes = sizeof info};

        SIM_CHECK(sp_pool_slot_info(s->pool.pool, i, &info, NULL) == SP_OK);
        SIM_CHECK(info.state == SP_SLOT_EMPTY && info.references == 0);
    }
    for (int32_t i = 0; i < N_IDENTITIES; i++) {
        sp_image_destroy(s->expected[i]);
        hand_adapter_destroy(s->adapters[i]);
    }
    hand_pool_destroy(&s->pool);
}

/* ---- invariants ---------------------------------------------------------------------------- */

static const sp_image *expected_of(const sim *s, const sp_digest *digest)
{
    for (int32_t i = 0; i < N_IDENTITIES; i++)
        if (memcmp(&s->expected[i]->digest, digest, sizeof *digest) == 0)
            return s->expected[i];
    return NULL;
}

/* What kernels would read of a slot: nothing, or exactly the bytes of this image. */
static void check_tables(const sim *s, int32_t slot, const sp_image *image)
{
    for (int32_t i = 0; i < sp_layout_n_sites(s->pool.layout); i++) {
        const sp_layout_site *site = sp_layout_site_at(s->pool.layout, i);
        const char *data = image != NULL ? image->data : NULL;
        size_t a_bytes = (size_t)8 * (size_t)site->k_in * 2;
        size_t b_bytes = (size_t)8 * (size_t)site->n_out * 2;
        const sp_pool_tables *tables = sp_pool_tables_at(s->pool.pool, i);

        SIM_CHECK(tables != NULL);
        SIM_CHECK(tables->rank[slot] == (image != NULL ? image->ranks[i] : 0));
        if (tables->rank[slot] == 0)
            continue;
        SIM_CHECK(memcmp(&tables->scale[slot], &image->scales[i], sizeof(float)) == 0);
        SIM_CHECK(memcmp(tables->a[slot], data + site->a_offset_bytes, a_bytes) == 0);
        SIM_CHECK(memcmp(tables->b[slot], data + site->b_offset_bytes, b_bytes) == 0);
    }
}

static void check_slots(const sim *s)
{
    for (int32_t slot = 0; slot < sp_pool_slots(s->pool.pool); slot++) {
        int32_t holders = 0;
        sp_slot_info info = {.struct_bytes = sizeof info};

        SIM_CHECK(sp_pool_slot_info(s->pool.pool, slot, &info, NULL) == SP_OK);
        for (int32_t i = 0; i < REQUESTS_MAX; i++) {
            const sim_request *r = &s->requests[i];

            if (!r->live || r->hold.slot != slot)
                continue;
            holders++;
            SIM_CHECK(info.state == SP_SLOT_READY && info.generation == r->hold.generation);
            SIM_CHECK(memcmp(&info.digest, &r->digest, sizeof r->digest) == 0);
        }
        SIM_CHECK(info.references == holders);
        check_tables(s, slot, info.state == SP_SLOT_READY ? expected_of(s, &info.digest) : NULL);
    }
}

static void check_requests(const sim *s)
{
    for (int32_t i = 0; i < REQUESTS_MAX; i++) {
        const sim_request *r = &s->requests[i];

        if (!r->live || r->hold.version == NULL)
            continue;
        SIM_CHECK(memcmp(sp_stage_version_digest(r->hold.version), &r->digest, sizeof r->digest) ==
                  0);
        SIM_CHECK(sp_stage_version_generation(r->hold.version) == r->generation);
    }
}

static int32_t holders_of(const sim *s, uint64_t generation)
{
    int32_t n = 0;

    for (int32_t i = 0; i < REQUESTS_MAX; i++)
        n += s->requests[i].live && s->requests[i].hold.version != NULL &&
             s->requests[i].generation == generation;
    return n;
}

static void check_registry(const sim *s)
{
    size_t n_current = 0, n = sp_stage_n_versions(s->stage);
    sp_stage_version_info info = {.struct_bytes = sizeof info};

    for (int32_t i = 0; i < N_NAMES; i++) {
        sp_status status = sp_stage_find(s->stage, name_text(i), &info, NULL);

        SIM_CHECK(status == (s->names[i].exists ? SP_OK : SP_ERR_NOT_FOUND));
        if (status != SP_OK)
            continue;
        n_current++;
        SIM_CHECK(info.generation == s->names[i].generation);
        SIM_CHECK(info.pinned == s->names[i].pinned && info.active == (s->active == i));
    }
    for (size_t i = 0; i < n; i++) {
        SIM_CHECK(sp_stage_version_at(s->stage, i, &info, NULL) == SP_OK);
        SIM_CHECK(info.references == holders_of(s, info.generation));
        SIM_CHECK(info.state != SP_STAGE_VERSION_DRAINING || info.references > 0);
        n_current -= info.state != SP_STAGE_VERSION_DRAINING;
    }
    SIM_CHECK(n_current == 0);
}

static void check_budget(sim *s)
{
    size_t image_bytes = s->expected[0]->bytes;
    sp_stage_stats stats = {.struct_bytes = sizeof stats};

    SIM_CHECK(sp_stage_get_stats(s->stage, &stats, NULL) == SP_OK);
    SIM_CHECK(s->budget == 0 || stats.host_bytes <= s->budget);
    SIM_CHECK(stats.host_bytes >= (size_t)stats.n_images * image_bytes);
    SIM_CHECK(stats.host_bytes <= (size_t)(stats.n_images + stats.n_in_flight) * image_bytes);
    seen.landed += stats.landed - s->landed;
    s->landed = stats.landed;
}

static void check_all(sim *s)
{
    check_slots(s);
    check_requests(s);
    check_registry(s);
    check_budget(s);
}

/* POOL_FULL is true: every slot is being written, pinned, awaited or read by someone. */
static void check_full(const sim *s)
{
    for (int32_t slot = 0; slot < sp_pool_slots(s->pool.pool); slot++) {
        sp_slot_info info = {.struct_bytes = sizeof info};

        SIM_CHECK(sp_pool_slot_info(s->pool.pool, slot, &info, NULL) == SP_OK);
        SIM_CHECK(
            info.state == SP_SLOT_LOADING ||
            (info.state == SP_SLOT_READY && (info.pinned || info.awaited || info.references > 0)));
    }
}

/* ---- loads --------------------------------------------------------------------------------- */

static sim_load *free_load(sim *s)
{
    for (int32_t i = 0; i < LOADS_MAX; i++)
        if (!s->loads[i].live)
            return &s->loads[i];
    return NULL;
}

static void start_load(sim *s)
{
    int32_t name = (int32_t)below(s, N_NAMES);
    sim_load *load = free_load(s);
    sp_stage_load_options options;
    char location[16];
    sp_error error;
    sp_status status;

    if (load == NULL)
        return;
    snprintf(location, sizeof location, "%u", below(s, N_LOCATIONS));
    sp_stage_load_options_default(&options, sizeof options);
    options.name = name_text(name);
    options.location = below(s, 2) ? location : NULL;
    if (below(s, 4) == 0)
        options.source = (int32_t)below(s, 1 + N_PEERS);
    if (below(s, 3) == 0)
        options.digest = &s->adapters[below(s, N_IDENTITIES)]->digest;
    options.replace = below(s, 2) != 0;
    options.pinned = below(s, 24) == 0;
    if (below(s, 4) == 0)
        options.expected_generation = s->names[name].generation + (below(s, 3) == 0);
    status = sp_stage_load(s->stage, &options, &load->ticket, &error);
    SIM_CHECK(status == SP_PENDING || status == SP_BUSY || status == SP_POOL_FULL ||
              status == SP_ERR_STATE || status == SP_ERR_MEMORY);
    SIM_CHECK(status != SP_ERR_MEMORY || sp_alloc_failed());
    seen.name_taken += status == SP_ERR_STATE && strcmp(error.code, "name-taken") == 0;
    seen.stale += status == SP_ERR_STATE && strcmp(error.code, "generation-changed") == 0;
    seen.host_full += status == SP_POOL_FULL;
    if (status != SP_PENDING)
        return;
    load->live = true;
    load->cancelled = false;
    load->name = name;
    load->by_digest = options.digest != NULL;
    if (load->by_digest)
        load->digest = *options.digest;
}

/* Names of one content are in one slot, or in none. */
static void check_shared(sim *s, int32_t name, const sp_stage_version_info *info)
{
    for (int32_t i = 0; i < N_NAMES; i++) {
        sp_stage_version_info other = {.struct_bytes = sizeof other};

        if (i == name || sp_stage_find(s->stage, name_text(i), &other, NULL) != SP_OK ||
            memcmp(&other.digest, &info->digest, sizeof info->digest) != 0)
            continue;
        seen.shared++;
        SIM_CHECK(other.slot == info->slot);
    }
}

static void take_result(sim *s, sim_load *load)
{
    uint64_t generation = 0;
    sp_error error;
    sp_status status = sp_stage_result(s->stage, load->ticket, &generation, &error);
    sp_stage_version_info info = {.struct_bytes = sizeof info};

    if (status == SP_PENDING)
        return;
    load->live = false;
    SIM_CHECK(!load->cancelled || status != SP_OK);
    if (status != SP_OK) {
        seen.other_bytes += status == SP_ERR_PEER_CONTENT;
        seen.loads_failed++;
        seen.pool_full += status == SP_POOL_FULL;
        seen.pinned_for_good += status == SP_ERR_SLOTS_PINNED;
        seen.memory += status == SP_ERR_MEMORY;
        return;
    }
    seen.loads_ok++;
    SIM_CHECK(generation > s->names[load->name].generation);
    SIM_CHECK(sp_stage_find(s->stage, name_text(load->name), &info, NULL) == SP_OK);
    SIM_CHECK(expected_of(s, &info.digest) != NULL);
    SIM_CHECK(!load->by_digest || memcmp(&load->digest, &info.digest, sizeof info.digest) == 0);
    seen.by_digest += load->by_digest;
    s->names[load->name].exists = true;
    s->names[load->name].generation = generation;
    s->names[load->name].pinned = info.pinned;
    check_shared(s, load->name, &info);
}

static void poll(sim *s)
{
    sp_stage_poll(s->stage);
    for (int32_t i = 0; i < LOADS_MAX; i++)
        if (s->loads[i].live)
            take_result(s, &s->loads[i]);
}

static void unload(sim *s)
{
    int32_t name = (int32_t)below(s, N_NAMES);
    int32_t held = s->names[name].exists ? holders_of(s, s->names[name].generation) : 0;
    bool loading = false;
    sp_status status = sp_stage_unload(s->stage, name_text(name), NULL);

    for (int32_t i = 0; i < LOADS_MAX; i++)
        if (s->loads[i].live && s->loads[i].name == name && !s->loads[i].cancelled)
            loading = true;
    if (s->names[name].pinned) {
        SIM_CHECK(status == SP_ERR_STATE);
        return;
    }
    if (!s->names[name].exists && !loading) {
        SIM_CHECK(status == SP_ERR_NOT_FOUND);
        return;
    }
    SIM_CHECK(status == (held > 0 ? SP_BUSY : SP_OK));
    seen.busy_unload += held > 0;
    for (int32_t i = 0; i < LOADS_MAX; i++)
        if (s->loads[i].live && s->loads[i].name == name)
            s->loads[i].cancelled = true;
    s->names[name].exists = false;
    if (s->active == name)
        s->active = -1;
}

static void set_pinned(sim *s)
{
    int32_t name = (int32_t)below(s, N_NAMES);
    bool pinned = below(s, 4) == 0;
    sp_error error;
    sp_status status = sp_stage_set_pinned(s->stage, name_text(name), pinned, &error);

    if (!s->names[name].exists) {
        SIM_CHECK(status == SP_ERR_NOT_FOUND);
        return;
    }
    if (status == SP_POOL_FULL)
        check_full(s);
    if (status == SP_OK || status == SP_PENDING)
        s->names[name].pinned = pinned;
}

static void set_active(sim *s)
{
    int32_t name = (int32_t)below(s, N_NAMES + 1) - 1;
    sp_status status = sp_stage_set_active(s->stage, name >= 0 ? name_text(name) : NULL, NULL);

    if (name >= 0 && !s->names[name].exists)
        SIM_CHECK(status == SP_ERR_NOT_FOUND);
    else
        s->active = name;
}

/* ---- requests ------------------------------------------------------------------------------ */

static sim_request *free_request(sim *s)
{
    for (int32_t i = 0; i < REQUESTS_MAX; i++)
        if (!s->requests[i].live)
            return &s->requests[i];
    return NULL;
}

static void submit(sim *s)
{
    int32_t name = (int32_t)below(s, N_NAMES);
    uint32_t draw = below(s, 6);
    sp_hold_kind kind = draw == 0 ? SP_HOLD_BASE : draw == 1 ? SP_HOLD_DEFAULT : SP_HOLD_NAMED;
    sim_request *r = free_request(s);
    sp_status status;

    if (r == NULL)
        return;
    *r = (sim_request){.id = ++s->next_id, .work = 1 + (int32_t)below(s, WORK_MAX)};
    r->hold.struct_bytes = sizeof r->hold;
    status = sp_stage_hold(s->stage, kind, name_text(name), &r->hold, NULL);
    if (kind == SP_HOLD_NAMED && !s->names[name].exists) {
        SIM_CHECK(status == SP_ERR_NOT_FOUND);
        return;
    }
    SIM_CHECK(status == SP_OK);
    if (kind == SP_HOLD_BASE || (kind == SP_HOLD_DEFAULT && s->active < 0))
        SIM_CHECK(r->hold.version == NULL);
    else
        SIM_CHECK(strcmp(sp_stage_version_name(r->hold.version),
                         name_text(kind == SP_HOLD_DEFAULT ? s->active : name)) == 0);
    r->live = true;
    if (r->hold.version == NULL)
        return;
    r->digest = *sp_stage_version_digest(r->hold.version);
    r->generation = sp_stage_version_generation(r->hold.version);
}

static void finish(sim *s, sim_request *r)
{
    sp_stage_release(s->stage, &r->hold);
    sp_stage_release(s->stage, &r->hold);
    r->live = false;
}

static void cancel(sim *s)
{
    sim_request *r = &s->requests[below(s, REQUESTS_MAX)];

    if (!r->live)
        return;
    seen.cancelled++;
    finish(s, r);
}

/* As a scheduler preempts for want of pages: the slot goes, the version stays. */
static void preempt_one(sim *s)
{
    sim_request *r = &s->requests[below(s, REQUESTS_MAX)];

    if (r->live)
        sp_stage_yield(s->stage, &r->hold);
}

/* After PREEMPT_STEPS the holders of one slot that can be had without loss are sent away. */
static void preempt_for_head(sim *s)
{
    int32_t slot = -1;

    for (int32_t i = 0; i < REQUESTS_MAX && slot < 0; i++)
        if (s->requests[i].live && sp_stage_can_yield(s->stage, &s->requests[i].hold))
            slot = s->requests[i].hold.slot;
    if (slot < 0)
        return;
    seen.preempted++;
    for (int32_t i = 0; i < REQUESTS_MAX; i++)
        if (s->requests[i].live && s->requests[i].hold.slot == slot)
            sp_stage_yield(s->stage, &s->requests[i].hold);
    s->head_waited = WAIT_STEPS;
}

static sim_request *next_by_id(sim *s, int64_t after)
{
    sim_request *best = NULL;

    for (int32_t i = 0; i < REQUESTS_MAX; i++)
        if (s->requests[i].live && s->requests[i].id > after &&
            (best == NULL || s->requests[i].id < best->id))
            best = &s->requests[i];
    return best;
}

static void refused(sim *s, sim_request *r, sp_status status, const sp_error *error)
{
    seen.changed += status == SP_ERR_MISMATCH;
    seen.memory += status == SP_ERR_MEMORY;
    seen.pinned_for_good += status == SP_ERR_SLOTS_PINNED;
    SIM_CHECK(status != SP_ERR_MISMATCH || strcmp(error->code, "content-changed") == 0);
    /* Whoever has begun is never lost, unless others pinned every slot meanwhile. */
    SIM_CHECK(!r->hold.begun || status == SP_ERR_SLOTS_PINNED);
    finish(s, r);
}

/* A waiting request asks; SP_POOL_FULL or SP_BUSY: it waits for what others hold. */
static sp_status ask(sim *s, sim_request *r)
{
    sp_error error = {.code = ""};
    sp_status status = sp_stage_request(s->stage, &r->hold, s->head_waited >= WAIT_STEPS, &error);

    if (status == SP_OK) {
        if ((uint64_t)r->waited > seen.waited_max)
            seen.waited_max = (uint64_t)r->waited;
        r->waited = 0;
        return status;
    }
    if (status < 0) {
        refused(s, r, status, &error);
        return status;
    }
    if (status == SP_POOL_FULL) {
        check_full(s);
        seen.pool_full++;
    }
    seen.host_full += status == SP_BUSY;
    SIM_CHECK(++r->waited < WAITED_MAX);
    return status;
}

static void step(sim *s)
{
    int64_t head = 0;

    poll(s);
    for (sim_request *r = next_by_id(s, 0); r != NULL;) {
        int64_t id = r->id;

        if (r->hold.version == NULL || r->hold.slot >= 0) {
            sp_stage_use(s->stage, &r->hold, 1);
            if (--r->work <= 0)
                finish(s, r);
        } else {
            sp_status status = ask(s, r);

            if (head == 0 && (status == SP_POOL_FULL || status == SP_BUSY)) {
                head = id;
                s->head_full = status == SP_POOL_FULL;
            }
        }
        r = next_by_id(s, id);
    }
    s->head_waited = head != 0 && head == s->head ? s->head_waited + 1 : 0;
    s->head = head;
    if (s->head_waited >= PREEMPT_STEPS && s->head_full)
        preempt_for_head(s);
}

/* ---- one life ------------------------------------------------------------------------------ */

static void random_event(sim *s)
{
    uint32_t kind = below(s, 100);

    if (below(s, 12) == 0)
        sp_alloc_fail_after((int64_t)below(s, 12));
    if (kind < 50)
        step(s);
    else if (kind < 70)
        submit(s);
    else if (kind < 82)
        start_load(s);
    else if (kind < 86)
        unload(s);
    else if (kind < 89)
        cancel(s);
    else if (kind < 92)
        set_pinned(s);
    else if (kind < 94)
        set_active(s);
    else if (kind < 96)
        preempt_one(s);
    else if (kind < 98)
        change_peer(s);
    else
        s->disk[below(s, N_LOCATIONS)] = (int32_t)below(s, N_IDENTITIES + 1) - 1;
    sp_alloc_fail_after(-1);
}

/* With nothing new coming, everyone gets done. */
static void wind_down(sim *s)
{
    for (int32_t i = 0; i < N_NAMES; i++)
        if (s->names[i].pinned) {
            SIM_CHECK(sp_stage_set_pinned(s->stage, name_text(i), false, NULL) == SP_OK);
            s->names[i].pinned = false;
        }
    for (int32_t i = 0; next_by_id(s, 0) != NULL; i++) {
        SIM_CHECK(i < WAITED_MAX);
        step(s);
        check_all(s);
    }
    for (int32_t i = 0; sp_stage_poll(s->stage) != SP_AGAIN; i++)
        SIM_CHECK(i < WAITED_MAX);
    poll(s);
    check_all(s);
}

static void unload_all(sim *s)
{
    sp_stage_stats stats = {.struct_bytes = sizeof stats};

    for (int32_t i = 0; i < N_NAMES; i++) {
        sp_stage_set_pinned(s->stage, name_text(i), false, NULL);
        SIM_CHECK(sp_stage_unload(s->stage, name_text(i), NULL) ==
                  (s->names[i].exists ? SP_OK : SP_ERR_NOT_FOUND));
    }
    SIM_CHECK(sp_stage_get_stats(s->stage, &stats, NULL) == SP_OK);
    SIM_CHECK(sp_stage_n_versions(s->stage) == 0 && stats.host_bytes == 0);
}

static void live(uint64_t seed)
{
    size_t bytes = sp_alloc_bytes(), blocks = sp_alloc_blocks();
    static sim s;

    sim_begin(&s, seed);
    for (s.event = 0; s.event < EVENTS; s.event++) {
        random_event(&s);
        check_all(&s);
    }
    if (below(&s, 4) != 0) { /* else destroyed with everything under way */
        wind_down(&s);
        unload_all(&s);
    }
    for (int32_t i = 0; i < REQUESTS_MAX; i++)
        if (s.requests[i].live)
            finish(&s, &s.requests[i]);
    sim_end(&s);
    SIM_CHECK(sp_alloc_bytes() == bytes && sp_alloc_blocks() == blocks);
}

static seed_range seeds;

static void print_seen(void)
{
    print_message("seeds %llu..%llu: loads %llu, failed %llu, shared %llu, POOL_FULL %llu, host "
                  "cache full %llu, pinned for good %llu, content changed %llu, preempted %llu, "
                  "cancelled %llu, images of peers %llu, %llu of them straight into slots, "
                  "their failures %llu, their forgeries %llu, other "
                  "bytes %llu, by digest %llu, longest wait %llu steps\n",
                  (unsigned long long)seeds.first, (unsigned long long)(seeds.first + seeds.n - 1),
                  (unsigned long long)seen.loads_ok, (unsigned long long)seen.loads_failed,
                  (unsigned long long)seen.shared, (unsigned long long)seen.pool_full,
                  (unsigned long long)seen.host_full, (unsigned long long)seen.pinned_for_good,
                  (unsigned long long)seen.changed, (unsigned long long)seen.preempted,
                  (unsigned long long)seen.cancelled, (unsigned long long)seen.images,
                  (unsigned long long)seen.landed, (unsigned long long)seen.peer_failures,
                  (unsigned long long)seen.forgeries, (unsigned long long)seen.other_bytes,
                  (unsigned long long)seen.by_digest, (unsigned long long)seen.waited_max);
}

static void test_random_lives(void **state)
{
    (void)state;
    seeds_run(&seeds, live);
    print_seen();
    if (!seeds_are_many(&seeds))
        return;
    assert_true(seen.loads_ok > 0 && seen.loads_failed > 0 && seen.shared > 0);
    assert_true(seen.pool_full > 0 && seen.host_full > 0 && seen.pinned_for_good > 0);
    assert_true(seen.changed > 0 && seen.preempted > 0 && seen.cancelled > 0);
    assert_true(seen.images > 0 && seen.landed > 0 && seen.peer_failures > 0 && seen.forgeries > 0);
    assert_true(seen.other_bytes > 0 && seen.by_digest > 0);
    assert_true(seen.name_taken > 0 && seen.stale > 0 && seen.busy_unload > 0 && seen.memory > 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_random_lives)};

    seeds = seeds_of(argc, argv, 500);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
