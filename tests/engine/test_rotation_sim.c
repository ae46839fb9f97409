/*
 * test_rotation_sim.c: the scheduler, the prefix cache, the stage and a pool together on a fake
 * clock of steps, with everything around them random. Nothing is computed: a model remembers what
 * every KV page would hold, and every slot is compared with the adapter that a row expects. In half
 * of the seeds there are recurrent states as well, and steps that fail.
 *
 *     test_rotation_sim [FIRST_SEED N_SEEDS]      without arguments: seeds 1 .. 500
 *
 * A failing seed prints the line that replays it.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "engine/schedule/scheduler.h"
#include "pool/image.h"
#include "support/hand.h"
#include "support/packed_source.h"
#include "support/seeds.h"
#include "support/test.h"

#include <stdio.h>
#include <string.h>

#define N_NAMES       5
#define N_IDENTITIES  7
#define SEQUENCES     14
#define PAGE_TOKENS   4
#define PAGES         32
#define TOKENS_MAX    48
#define WAIT_STEPS    5
#define PREEMPT_STEPS 12
#define EVENTS        500
#define STATE_CHUNK   8
#define SNAPSHOTS_MAX 5
/* All others once through a slot, each for its whole length, and sent away for every other. */
#define LIFE_MAX (SEQUENCES * (TOKENS_MAX + PREEMPT_STEPS + 10) * 2)

typedef struct page_model {
    sp_digest digest;
    int32_t n;
    int32_t tokens[TOKENS_MAX];
} page_model;

/* A state, or a snapshot of one: of which tokens, and how many of them it cannot go back over. */
typedef struct state_model {
    sp_digest digest;
    int32_t n, folded;
    int32_t tokens[TOKENS_MAX];
} state_model;

typedef struct fake {
    bool live;
    sp_sequence sequence;
    sp_digest digest; /* of the version that it was submitted for */
    int32_t tokens[TOKENS_MAX], pages[TOKENS_MAX / PAGE_TOKENS + 1];
    int32_t age; /* steps since it was submitted */
} fake;

typedef struct sim {
    uint64_t seed;
    int32_t event;
    sp_test_random random;
    hand_pool pool;
    hand_adapter *adapters[N_IDENTITIES];
    sp_image *expected[N_IDENTITIES];
    packed_source packed;
    sp_stage *stage;
    sp_sequence_memory memory;
    sp_scheduler scheduler;
    fake fakes[SEQUENCES];
    page_model model[PAGES];
    state_model states[6], snapshots[SNAPSHOTS_MAX];
    int64_t next_id;
    bool fetch_fails;
} sim;

static struct {
    uint64_t finished, failed, rotations, preemptions, saved, evicted, age_max;
    uint64_t snapshots, restarts, waits;
} seen;

static sim *running;

#define SIM_CHECK(condition)                                                        \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fprintf(stderr, "replay: test_rotation_sim %llu 1   (event %d: %s)\n",  \
                    (unsigned long long)running->seed, running->event, #condition); \
            fail_msg("%s", #condition);                                             \
        }                                                                           \
    } while (0)

static uint32_t below(sim *s, uint32_t n)
{
    return sp_test_below(&s->random, n);
}

/* ---- the gate and the source --------------------------------------------------------------- */

static sp_status ask(void *user, sp_sequence *sequence, bool give_way, sp_error *error)
{
    sim *s = user;

    return sp_stage_ask(s->stage, &sequence->hold, give_way, error);
}

static sp_status take(void *user, sp_sequence *sequence, sp_error *error)
{
    sim *s = user;

    return sp_stage_request(s->stage, &sequence->hold, false, error);
}

static void refused(void *user, sp_sequence *sequence, const sp_error *error);

static void yield(void *user, sp_sequence *sequence)
{
    sim *s = user;

    sp_stage_yield(s->stage, &sequence->hold);
}

static bool can_yield(void *user, const sp_sequence *sequence)
{
    sim *s = user;

    return sp_stage_can_yield(s->stage, &sequence->hold);
}

static uint64_t handovers(void *user)
{
    sim *s = user;
    sp_stage_stats stats = {.struct_bytes = sizeof stats};

    (void)sp_stage_get_stats(s->stage, &stats, NULL);
    return stats.handovers;
}

static sp_status find(void *user, const sp_source_request *request, sp_image **out_image,
                      sp_error *error)
{
    sim *s = user;
    const hand_adapter *adapter = s->adapters[request->location[0] - '0'];

    if (s->fetch_fails && below(s, 8) == 0)
        return sp_fail(error, SP_ERR_IO, NULL, request->name, -1, "a disk that fails");
    return sp_layout_pack_sites(s->pool.layout, adapter->sites, (size_t)adapter->n_sites,
                                &adapter->digest, NULL, out_image, error);
}

/* ---- a world ------------------------------------------------------------------------------- */

static const site_dims sites[] = {{0, SP_MODULE_Q_PROJ, 8, 8}, {0, SP_MODULE_DOWN_PROJ, 12, 8}};

static void sim_begin(sim *s, uint64_t seed)
{
    sp_stage_source source;
    sp_stage_options stage;
    sp_sequence_memory_options memory = {
        .n_pages = PAGES,
        .page_tokens = PAGE_TOKENS,
        .prefix_cache = seed % 4 != 0,
        .n_states = seed % 8 < 4 ? 0 : 1 + (int32_t)(seed / 8 % 6),
        .state_chunk = STATE_CHUNK,
        .n_snapshots = seed % 8 <= 4 ? 0 : (int32_t)(seed / 64 % (SNAPSHOTS_MAX + 1)),
        .snapshot_tokens = STATE_CHUNK << seed % 2,
    };
    sp_scheduler_options scheduler = {.memory = &s->memory,
                                      .max_running = 1 + (int32_t)(seed % 6),
                                      .step_rows = 16,
                                      .prefill_chunk = 9,
                                      .adapter_wait_steps = WAIT_STEPS,
                                      .adapter_preempt_steps = PREEMPT_STEPS,
                                      .gate = {s, ask, take, refused, yield, can_yield, handovers}};
    sp_error error;

    memset(s, 0, sizeof *s);
    s->seed = seed;
    s->random.state = seed * UINT64_C(0x9e3779b97f4a7c15);
    running = s;
    s->pool = hand_pool_create(sites, 2, 8, SP_DTYPE_BF16, 1 + (int32_t)below(s, 3));
    for (int32_t i = 0; i < N_IDENTITIES; i++) {
        s->adapters[i] = hand_adapter_create((uint64_t)i + 1);
        hand_adapter_add(s->adapters[i], &sites[i % 2], 1 + (int32_t)below(s, 8), 1.0f,
                         SP_DTYPE_BF16, &s->random);
        s->expected[i] = hand_pack(&s->pool, s->adapters[i]);
    }
    s->packed = (packed_source){s, s->pool.layout, find, NULL};
    source = packed_source_table(&s->packed);
    sp_stage_options_default(&stage, sizeof stage);
    stage.pool = s->pool.pool;
    stage.sources = &source;
    stage.n_sources = 1;
    stage.threads = 0;
    stage.host_bytes_max = below(s, 2) ? 0 : (1 + below(s, 4)) * s->expected[0]->bytes;
    assert_ok(sp_stage_create(&stage, &s->stage, &error), &error);
    assert_int_equal(sp_sequence_memory_create(&memory, &s->memory), SP_OK);
    assert_int_equal(sp_scheduler_create(&scheduler, &s->scheduler), SP_OK);
    s->fetch_fails = below(s, 2) != 0;
}

static void sim_end(sim *s)
{
    sp_scheduler_destroy(&s->scheduler);
    sp_sequence_memory_destroy(&s->memory);
    sp_stage_destroy(s->stage);
    for (int32_t i = 0; i < N_IDENTITIES; i++) {
        sp_image_destroy(s->expected[i]);
        hand_adapter_destroy(s->adapters[i]);
    }
    hand_pool_destroy(&s->pool);
}

static void drop(sim *s, fake *f)
{
    sp_scheduler_remove(&s->scheduler, &f->sequence);
    sp_stage_release(s->stage, &f->sequence.hold);
    f->live = false;
}

/* ---- invariants ---------------------------------------------------------------------------- */

/* The bytes that the kernels would read for a row of this sequence. */
static void check_slot(const sim *s, const fake *f)
{
    const sp_hold *hold = &f->sequence.hold;
    sp_slot_info info = {.struct_bytes = sizeof info};

    if (!hold->version)
        return;
    SIM_CHECK(sp_pool_slot_info(s->pool.pool, hold->slot, &info, NULL) == SP_OK);
    SIM_CHECK(info.state == SP_SLOT_READY && info.generation == hold->generation);
    SIM_CHECK(memcmp(&info.digest, &f->digest, sizeof f->digest) == 0);
    for (int32_t i = 0; i < N_IDENTITIES; i++) {
        const sp_image *image = s->expected[i];

        if (memcmp(&image->digest, &f->digest, sizeof f->digest) != 0)
            continue;
        for (int32_t site = 0; site < 2; site++) {
            const sp_layout_site *place = sp_layout_site_at(s->pool.layout, site);
            const sp_pool_tables *tables = sp_pool_tables_at(s->pool.pool, site);

            SIM_CHECK(tables != NULL);
            SIM_CHECK(tables->rank[hold->slot] == image->ranks[site]);
            if (image->ranks[site] != 0)
                SIM_CHECK(memcmp(tables->a[hold->slot],
                                 (const char *)image->data + place->a_offset_bytes,
                                 (size_t)8 * (size_t)place->k_in * 2) == 0);
        }
    }
}

static void check_begun(const sim *s, const fake *f)
{
    const sp_sequence *q = &f->sequence;

    for (int32_t p = 0; (p + 1) * PAGE_TOKENS <= q->memory.n_committed; p++) {
        const page_model *m = &s->model[q->memory.pages[p]];

        SIM_CHECK(m->n == (p + 1) * PAGE_TOKENS);
        SIM_CHECK(memcmp(&m->digest, &f->digest, sizeof f->digest) == 0);
        SIM_CHECK(memcmp(m->tokens, q->tokens, (size_t)m->n * sizeof(int32_t)) == 0);
    }
}

static void check_all(const sim *s)
{
    int32_t holders[PAGES] = {0}, held = 0;

    for (int32_t i = 0; i < SEQUENCES; i++) {
        const sp_sequence *q = &s->fakes[i].sequence;

        if (!s->fakes[i].live)
            continue;
        for (int32_t p = 0; p < q->memory.n_pages; p++)
            holders[q->memory.pages[p]]++;
        SIM_CHECK(q->queue.state == SP_SEQUENCE_RUNNING ||
                  (q->hold.slot < 0 && q->memory.n_pages == 0));
        SIM_CHECK(q->queue.state == SP_SEQUENCE_WAITING || !q->hold.version || q->hold.slot >= 0);
    }
    for (int32_t page = 0; page < PAGES; page++) {
        SIM_CHECK(s->memory.pages.holders[page] == holders[page]);
        held += holders[page] > 0;
    }
    SIM_CHECK(held + sp_sequence_memory_available(&s->memory) == PAGES);
    SIM_CHECK(sp_sequence_memory_is_consistent(&s->memory));
}

/* ---- a step -------------------------------------------------------------------------------- */

static fake *fake_of(sim *s, const sp_sequence *sequence)
{
    for (int32_t i = 0; i < SEQUENCES; i++)
        if (&s->fakes[i].sequence == sequence)
            return &s->fakes[i];
    return NULL;
}

/* The state is that of the tokens before the rows; afterwards that of the rows too, whether they
 * count or not. */
static void compute_state(sim *s, const fake *f, const sp_batch_entry *entry)
{
    sp_sequence *q = entry->sequence;
    int32_t position = q->memory.n_committed;
    sp_state_step step =
        sp_sequence_memory_begin_step(&s->memory, &q->memory, entry->n_rows - entry->n_drafts);
    state_model *m = &s->states[step.slot];

    if (s->memory.options.n_states == 0)
        return;
    SIM_CHECK(step.slot >= 0 && step.slot < s->memory.options.n_states);
    if (step.load >= 0)
        *m = s->snapshots[step.load];
    if (position == 0)
        *m = (state_model){.digest = f->digest};
    SIM_CHECK(m->n >= position && m->folded == step.folded && m->folded <= position);
    SIM_CHECK(memcmp(&m->digest, &f->digest, sizeof f->digest) == 0);
    SIM_CHECK(memcmp(m->tokens, q->tokens, (size_t)position * sizeof(int32_t)) == 0);
    m->folded = position / STATE_CHUNK * STATE_CHUNK;
    if (step.save >= 0) {
        SIM_CHECK(m->folded == position);
        s->snapshots[step.save] = *m;
        seen.snapshots++;
    }
    m->n = position + entry->n_rows;
    m->folded = (position + step.n_final) / STATE_CHUNK * STATE_CHUNK;
    memcpy(m->tokens, q->tokens, (size_t)m->n * sizeof(int32_t));
}

static void compute(sim *s, const sp_batch_entry *entry)
{
    fake *f = fake_of(s, entry->sequence);
    sp_sequence *q = entry->sequence;

    check_slot(s, f);
    check_begun(s, f);
    compute_state(s, f, entry);
    for (int32_t i = 0; i < entry->n_rows; i++) {
        int32_t at = q->memory.n_committed + i;
        page_model *m = &s->model[q->memory.pages[at / PAGE_TOKENS]];

        SIM_CHECK(s->memory.pages.holders[q->memory.pages[at / PAGE_TOKENS]] == 1);
        m->digest = f->digest;
        m->n = at + 1;
        memcpy(m->tokens, q->tokens, ((size_t)at + 1) * sizeof(int32_t));
    }
    sp_stage_use(s->stage, &q->hold, (uint64_t)entry->n_rows);
}

static void after_step(sim *s, fake *f)
{
    sp_sequence *q = &f->sequence;

    SIM_CHECK(++f->age < LIFE_MAX);
    if (q->memory.n_committed < q->n_tokens)
        return;
    if (q->n_tokens < q->request.n_prompt + q->request.max_tokens) {
        q->tokens[q->n_tokens++] = (int32_t)below(s, 2);
        return;
    }
    if ((uint64_t)f->age > seen.age_max)
        seen.age_max = (uint64_t)f->age;
    seen.finished++;
    drop(s, f);
}

/* Only before its first turn: what it holds cannot get lost later. */
static void refused(void *user, sp_sequence *sequence, const sp_error *error)
{
    sim *s = user;

    SIM_CHECK(!sequence->hold.begun && error->status < 0);
    seen.failed++;
    drop(s, fake_of(s, sequence));
}

static void step(sim *s)
{
    const sp_batch *batch;
    bool fails;

    sp_stage_poll(s->stage);
    batch = sp_scheduler_plan(&s->scheduler);
    for (int32_t i = 0; i < batch->n_entries; i++)
        compute(s, &batch->entries[i]);
    fails = s->memory.options.n_states > 0 && below(s, 16) == 0;
    for (int32_t i = 0; i < batch->n_entries; i++) {
        sp_sequence *q = batch->entries[i].sequence;
        int32_t before = q->memory.n_committed;

        sp_scheduler_advance(&s->scheduler, q, fails ? 0 : batch->entries[i].n_rows);
        seen.restarts += q->memory.n_committed < before;
    }
    seen.waits += (uint64_t)s->scheduler.waits[SP_WAIT_PAGES];
    for (int32_t i = 0; i < SEQUENCES; i++)
        if (s->fakes[i].live)
            after_step(s, &s->fakes[i]);
}

/* ---- events -------------------------------------------------------------------------------- */

static const char *random_name(sim *s)
{
    static const char *const names[N_NAMES] = {"a", "b", "c", "d", "e"};

    return names[below(s, N_NAMES)];
}

static void submit(sim *s)
{
    sp_hold_kind kind = below(s, 6) == 0 ? SP_HOLD_BASE : SP_HOLD_NAMED;
    fake *f = NULL;
    sp_sequence *q;

    for (int32_t i = 0; i < SEQUENCES && !f; i++)
        if (!s->fakes[i].live)
            f = &s->fakes[i];
    if (!f)
        return;
    memset(f, 0, sizeof *f);
    q = &f->sequence;
    q->hold.struct_bytes = sizeof q->hold;
    if (sp_stage_hold(s->stage, kind, random_name(s), &q->hold, NULL) != SP_OK)
        return;
    f->live = true;
    if (q->hold.version)
        f->digest = *sp_stage_version_digest(q->hold.version);
    q->memory.key.digest = f->digest;
    q->id = ++s->next_id;
    q->tokens = f->tokens;
    q->memory.pages = f->pages;
    q->memory.pages_max = TOKENS_MAX / PAGE_TOKENS + 1;
    q->request.n_prompt = q->n_tokens = 1 + (int32_t)below(s, 24);
    q->request.max_tokens = 1 + (int32_t)below(s, TOKENS_MAX - 25);
    for (int32_t t = 0; t < q->request.n_prompt; t++)
        q->tokens[t] = t < 6 ? 7 : (int32_t)below(s, 2);
    SIM_CHECK(sp_scheduler_add(&s->scheduler, q) == SP_OK);
}

static void load(sim *s)
{
    char location[] = {(char)('0' + below(s, N_IDENTITIES)), '\0'};
    sp_stage_load_options options;
    int64_t ticket;

    sp_stage_load_options_default(&options, sizeof options);
    options.name = random_name(s);
    options.location = location;
    options.replace = true;
    if (sp_stage_load(s->stage, &options, &ticket, NULL) == SP_PENDING)
        sp_stage_forget(s->stage, ticket);
}

static void random_event(sim *s)
{
    uint32_t kind = below(s, 100);

    if (kind < 60)
        step(s);
    else if (kind < 80)
        submit(s);
    else if (kind < 92)
        load(s);
    else if (kind < 96)
        sp_stage_unload(s->stage, random_name(s), NULL);
    else if (s->fakes[kind % SEQUENCES].live)
        drop(s, &s->fakes[kind % SEQUENCES]);
}

static bool anyone(const sim *s)
{
    for (int32_t i = 0; i < SEQUENCES; i++)
        if (s->fakes[i].live)
            return true;
    return false;
}

static void live(uint64_t seed)
{
    size_t bytes = sp_alloc_bytes();
    sp_stage_stats stats = {.struct_bytes = sizeof stats};
    static sim s;

    sim_begin(&s, seed);
    for (s.event = 0; s.event < EVENTS; s.event++) {
        random_event(&s);
        check_all(&s);
    }
    while (anyone(&s)) {
        step(&s);
        check_all(&s);
    }
    (void)sp_stage_get_stats(s.stage, &stats, NULL);
    seen.rotations += s.scheduler.rotations;
    seen.preemptions += s.scheduler.preemptions;
    seen.saved += s.memory.resumed_tokens;
    seen.evicted += stats.evictions;
    sim_end(&s);
    SIM_CHECK(sp_alloc_bytes() == bytes);
}

static seed_range seeds;

static void test_random_lives(void **state)
{
    (void)state;
    seeds_run(&seeds, live);
    print_message("snapshots %llu, restarts %llu, waits for pages or a state %llu\n",
                  (unsigned long long)seen.snapshots, (unsigned long long)seen.restarts,
                  (unsigned long long)seen.waits);
    print_message("seeds %llu..%llu: finished %llu, failed %llu, rotations %llu, preemptions %llu, "
                  "tokens saved %llu, images evicted %llu, longest life %llu steps\n",
                  (unsigned long long)seeds.first, (unsigned long long)(seeds.first + seeds.n - 1),
                  (unsigned long long)seen.finished, (unsigned long long)seen.failed,
                  (unsigned long long)seen.rotations, (unsigned long long)seen.preemptions,
                  (unsigned long long)seen.saved, (unsigned long long)seen.evicted,
                  (unsigned long long)seen.age_max);
    if (!seeds_are_many(&seeds))
        return;
    assert_true(seen.finished > 0 && seen.failed > 0 && seen.rotations > 0);
    assert_true(seen.preemptions > seen.rotations && seen.saved > 0 && seen.evicted > 0);
    assert_true(seen.snapshots > 0 && seen.restarts > 0 && seen.waits > 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_random_lives)};

    seeds = seeds_of(argc, argv, 500);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
