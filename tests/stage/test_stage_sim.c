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
 */
#include "base/alloc.h"
#include "base/error.h"
#include "pool/image.h"
#include "support/hand.h"
#include "support/packed_source.h"
#include "support/seeds.h"
#include "support/test.h"

#include <sidepath/stage.h>

#include <stdio.h>
#include <string.h>

#define N_NAMES       8
#define N_LOCATIONS   10
#define N_IDENTITIES  12
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
    bool live, cancelled;
    int64_t ticket;
    int32_t name;
} sim_load;

typedef struct sim {
    uint64_t seed;
    int32_t event;
    sp_test_random random;
    hand_pool pool;
    hand_adapter *adapters[N_IDENTITIES];
    sp_image *expected[N_IDENTITIES];
    packed_source packed;
    int32_t disk[N_LOCATIONS]; /* identity, -1: nothing there */
    uint32_t fail_permille;
    size_t budget;
    sp_stage *stage;
    sim_name names[N_NAMES];
    int32_t active; /* name, -1: none */
    sim_request requests[REQUESTS_MAX];
    sim_load loads[LOADS_MAX];
    int64_t next_id;
    int32_t head_waited; /* steps since the head of the queue has waited for a slot */
    int64_t head;
    bool head_full; /* it waits for a slot, not for room in the host cache */
} sim;

/* What the whole run covered; asserted at the end, so that no branch is dead. */
static struct {
    uint64_t loads_ok, loads_failed, pool_full, host_full, pinned_for_good, changed, preempted;
    uint64_t waited_max, cancelled, shared, name_taken, stale, busy_unload, memory;
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
    int32_t identity = s->disk[request->location[0] - '0'];
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
    sp_stage_source source;
    sp_stage_options options;
    sp_error error;

    *s = (sim){.seed = seed, .random = {seed * UINT64_C(0x9e3779b97f4a7c15)}, .active = -1};
    running = s;
    s->pool = hand_pool_create(sites, 3, 8, SP_DTYPE_BF16, 1 + (int32_t)below(s, 4));
    make_identities(s);
    for (int32_t i = 0; i < N_LOCATIONS; i++)
        s->disk[i] = (int32_t)below(s, N_IDENTITIES);
    s->fail_permille = below(s, 2) ? below(s, 200) : 0;
    s->budget = below(s, 3) == 0 ? 0 : (1 + below(s, 6)) * s->expected[0]->bytes;
    s->packed = (packed_source){s, s->pool.layout, find, after_the_last_byte};
    source = packed_source_table(&s->packed);
    sp_stage_options_default(&options, sizeof options);
    options.pool = s->pool.pool;
    options.sources = &source;
    options.n_sources = 1;
    options.host_bytes_max = s->budget;
    options.threads = 0;
    assert_ok(sp_stage_create(&options, &s->stage, &error), &error);
}

static void sim_end(sim *s)
{
    sp_stage_destroy(s->stage);
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

static void check_budget(const sim *s)
{
    size_t image_bytes = s->expected[0]->bytes;
    sp_stage_stats stats = {.struct_bytes = sizeof stats};

    SIM_CHECK(sp_stage_get_stats(s->stage, &stats, NULL) == SP_OK);
    SIM_CHECK(s->budget == 0 || stats.host_bytes <= s->budget);
    SIM_CHECK(stats.host_bytes >= (size_t)stats.n_images * image_bytes);
    SIM_CHECK(stats.host_bytes <= (size_t)(stats.n_images + stats.n_in_flight) * image_bytes);
}

static void check_all(const sim *s)
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
    options.location = location;
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
                  "cancelled %llu, longest wait %llu steps\n",
                  (unsigned long long)seeds.first, (unsigned long long)(seeds.first + seeds.n - 1),
                  (unsigned long long)seen.loads_ok, (unsigned long long)seen.loads_failed,
                  (unsigned long long)seen.shared, (unsigned long long)seen.pool_full,
                  (unsigned long long)seen.host_full, (unsigned long long)seen.pinned_for_good,
                  (unsigned long long)seen.changed, (unsigned long long)seen.preempted,
                  (unsigned long long)seen.cancelled, (unsigned long long)seen.waited_max);
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
    assert_true(seen.name_taken > 0 && seen.stale > 0 && seen.busy_unload > 0 && seen.memory > 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_random_lives)};

    seeds = seeds_of(argc, argv, 500);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
