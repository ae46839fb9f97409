/*
 * The scheduler's policy on sequences that compute nothing: the test plays the engine, commits
 * the rows of each step and advances n_tokens itself.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "engine/schedule/scheduler.h"

#include <string.h>

#define PAGE_TOKENS 4

typedef struct fake {
    sp_sequence sequence;
    int32_t pages[64];
    int32_t target; /* tokens at which it is finished */
} fake;

static void fake_init(fake *f, int64_t id, int32_t prompt, int32_t max_tokens)
{
    memset(f, 0, sizeof *f);
    f->sequence.id = id;
    f->sequence.memory.pages = f->pages;
    f->sequence.memory.pages_max = 64;
    f->sequence.request.n_prompt = prompt;
    f->sequence.n_tokens = prompt;
    f->sequence.request.max_tokens = max_tokens;
    f->target = prompt + max_tokens;
}

static sp_sequence_memory memory; /* of the scheduler under test */

static sp_scheduler make_scheduler(int32_t max_running, int32_t step_rows, int32_t chunk,
                                   int32_t n_pages)
{
    sp_sequence_memory_options pages = {.n_pages = n_pages, .page_tokens = PAGE_TOKENS};
    sp_scheduler_options options = {.memory = &memory,
                                    .max_running = max_running,
                                    .step_rows = step_rows,
                                    .prefill_chunk = chunk};
    sp_scheduler scheduler;

    assert_int_equal(sp_sequence_memory_create(&pages, &memory), SP_OK);
    assert_int_equal(sp_scheduler_create(&options, &scheduler), SP_OK);
    return scheduler;
}

static void destroy_scheduler(sp_scheduler *scheduler)
{
    sp_scheduler_destroy(scheduler);
    sp_sequence_memory_destroy(&memory);
}

/* What the engine does after a step: computed rows count, a finished prefill yields a token. */
static void advance(sp_scheduler *scheduler, const sp_batch *batch)
{
    sp_sequence *done[64];
    int32_t n_done = 0;

    for (int32_t i = 0; i < batch->n_entries; i++) {
        sp_sequence *s = batch->entries[i].sequence;

        sp_scheduler_advance(scheduler, s, batch->entries[i].n_rows);
        if (sp_sequence_pending(s) == 0) {
            s->n_tokens++;
            if (s->n_tokens - s->request.n_prompt >= s->request.max_tokens)
                done[n_done++] = s;
        }
    }
    for (int32_t i = 0; i < n_done; i++)
        sp_scheduler_remove(scheduler, done[i]);
}

static void check_pages(const sp_scheduler *scheduler)
{
    bool seen[256] = {false};
    int32_t held = 0;

    for (int32_t i = 0; i < scheduler->n_running; i++) {
        const sp_sequence *s = scheduler->running[i];

        for (int32_t p = 0; p < s->memory.n_pages; p++) {
            assert_in_range(s->memory.pages[p], 0, memory.pages.n_pages - 1);
            assert_false(seen[s->memory.pages[p]]);
            seen[s->memory.pages[p]] = true;
            held++;
        }
    }
    for (int32_t i = 0; i < scheduler->n_waiting; i++)
        assert_int_equal(scheduler->waiting[i]->memory.n_pages, 0);
    assert_int_equal(held + memory.pages.n_free, memory.pages.n_pages);
}

static void test_prefill_is_cut_into_chunks(void **state)
{
    sp_scheduler scheduler = make_scheduler(4, 16, 6, 16);
    const int32_t expected[] = {6, 6, 3, 1, 1};
    fake a;

    (void)state;
    fake_init(&a, 1, 15, 3);
    assert_int_equal(sp_scheduler_add(&scheduler, &a.sequence), SP_OK);
    for (size_t i = 0; i < 5; i++) {
        const sp_batch *batch = sp_scheduler_plan(&scheduler);

        assert_int_equal(batch->n_entries, 1);
        assert_int_equal(batch->n_rows, expected[i]);
        advance(&scheduler, batch);
        check_pages(&scheduler);
    }
    assert_int_equal(sp_scheduler_plan(&scheduler)->n_entries, 0);
    assert_int_equal(memory.pages.n_free, 16);
    destroy_scheduler(&scheduler);
}

static void test_decode_rows_go_before_prefill(void **state)
{
    sp_scheduler scheduler = make_scheduler(4, 8, 8, 64);
    const sp_batch *batch;
    fake a, b;

    (void)state;
    fake_init(&a, 1, 4, 10);
    fake_init(&b, 2, 30, 2);
    sp_scheduler_add(&scheduler, &a.sequence);
    advance(&scheduler, sp_scheduler_plan(&scheduler)); /* a: 4 prompt rows */
    sp_scheduler_add(&scheduler, &b.sequence);
    batch = sp_scheduler_plan(&scheduler);
    /* One decode row of a, and b gets what is left of the 8 rows. */
    assert_int_equal(batch->n_entries, 2);
    assert_ptr_equal(batch->entries[0].sequence, &a.sequence);
    assert_int_equal(batch->entries[0].n_rows, 1);
    assert_ptr_equal(batch->entries[1].sequence, &b.sequence);
    assert_int_equal(batch->entries[1].n_rows, 7);
    sp_scheduler_remove(&scheduler, &a.sequence);
    sp_scheduler_remove(&scheduler, &b.sequence);
    destroy_scheduler(&scheduler);
}

static void test_the_youngest_is_preempted_and_comes_back(void **state)
{
    sp_scheduler scheduler = make_scheduler(4, 32, 32, 4); /* 16 tokens in all */
    fake a, b;
    int32_t steps = 0;

    (void)state;
    fake_init(&a, 1, 7, 9); /* needs all 4 pages at its end */
    fake_init(&b, 2, 6, 5);
    sp_scheduler_add(&scheduler, &a.sequence);
    sp_scheduler_add(&scheduler, &b.sequence);
    while (scheduler.n_running + scheduler.n_waiting > 0 && steps < 100) {
        const sp_batch *batch = sp_scheduler_plan(&scheduler);

        assert_true(batch->n_entries > 0);
        if (a.sequence.n_tokens < a.target) /* the oldest advances in every step */
            assert_ptr_equal(batch->entries[0].sequence, &a.sequence);
        check_pages(&scheduler);
        advance(&scheduler, batch);
        steps++;
    }
    assert_int_equal(a.sequence.n_tokens, 16);
    assert_int_equal(b.sequence.n_tokens, 11);
    assert_true(scheduler.preemptions >= 1);
    assert_int_equal(memory.pages.n_free, 4);
    destroy_scheduler(&scheduler);
}

static void test_a_preempted_sequence_keeps_its_tokens(void **state)
{
    sp_scheduler scheduler = make_scheduler(2, 32, 32, 2);
    fake a, b;

    (void)state;
    fake_init(&a, 1, 4, 4);
    fake_init(&b, 2, 3, 4);
    sp_scheduler_add(&scheduler, &a.sequence);
    advance(&scheduler, sp_scheduler_plan(&scheduler)); /* a holds 1 page and 5 tokens */
    sp_scheduler_add(&scheduler, &b.sequence);
    /* a takes the last page for its fifth row, so b cannot be admitted. */
    assert_int_equal(sp_scheduler_plan(&scheduler)->n_entries, 1);
    assert_int_equal(b.sequence.queue.state, SP_SEQUENCE_WAITING);
    sp_scheduler_remove(&scheduler, &a.sequence);
    advance(&scheduler, sp_scheduler_plan(&scheduler));
    assert_int_equal(b.sequence.n_tokens, 4);
    assert_int_equal(b.sequence.memory.n_committed, 3);
    sp_scheduler_remove(&scheduler, &b.sequence);
    destroy_scheduler(&scheduler);
}

/* Random arrivals and cancels in a cache for a few of them: nobody starves, no page is lost. */
/* Says of each sequence what its prompt's length means. */
static sp_status say(void *user, sp_sequence *sequence, bool give_way, sp_error *error)
{
    static const sp_status answers[] = {SP_OK, SP_POOL_FULL, SP_BUSY, SP_PENDING, SP_AGAIN};

    (void)user;
    (void)give_way;
    (void)error;
    return answers[sequence->request.n_prompt - 1];
}

/* Each that waits is counted once, by what it lacks; who waits for others that find no room, by
 * what those lack. */
static void test_waits_are_told_apart(void **state)
{
    sp_scheduler scheduler = make_scheduler(2, 32, 32, 16);
    fake f[8];

    (void)state;
    scheduler.options.gate.ask = say;
    for (int32_t i = 0; i < 8; i++) { /* 1, 1, 1, 2, 3, 4, 5, 1 */
        fake_init(&f[i], i + 1, i < 3 || i == 7 ? 1 : i - 1, 4);
        sp_scheduler_add(&scheduler, &f[i].sequence);
    }
    sp_scheduler_plan(&scheduler);
    assert_int_equal(scheduler.n_running, 2);
    assert_int_equal(scheduler.n_waiting, 6);
    assert_int_equal(scheduler.waits[SP_WAIT_BATCH], 2);
    assert_int_equal(scheduler.waits[SP_WAIT_SLOT], 3); /* full, busy, and those that give way */
    assert_int_equal(scheduler.waits[SP_WAIT_LOAD], 1);
    assert_int_equal(scheduler.waits[SP_WAIT_PAGES], 0);
    for (int32_t i = 0; i < 8; i++)
        sp_scheduler_remove(&scheduler, &f[i].sequence);
    destroy_scheduler(&scheduler);
}

static void test_waits_for_pages(void **state)
{
    sp_scheduler scheduler = make_scheduler(8, 32, 32, 2);
    fake f[3];

    (void)state;
    for (int32_t i = 0; i < 3; i++) {
        fake_init(&f[i], i + 1, i == 0 ? 3 : 4, 4);
        sp_scheduler_add(&scheduler, &f[i].sequence);
    }
    sp_scheduler_plan(&scheduler);
    assert_int_equal(scheduler.waits[SP_WAIT_PAGES], 2);
    assert_int_equal(scheduler.waits[SP_WAIT_BATCH] + scheduler.waits[SP_WAIT_SLOT], 0);
    for (int32_t i = 0; i < 3; i++)
        sp_scheduler_remove(&scheduler, &f[i].sequence);
    sp_scheduler_plan(&scheduler);
    assert_int_equal(scheduler.waits[SP_WAIT_PAGES], 0);
    destroy_scheduler(&scheduler);
}

/* As advance, of sequences with states; the step has failed where it did not count. */
static void advance_states(sp_scheduler *scheduler, const sp_batch *batch, bool counts)
{
    for (int32_t i = 0; i < batch->n_entries; i++) {
        const sp_batch_entry *entry = &batch->entries[i];

        sp_sequence_memory_begin_step(&memory, &entry->sequence->memory,
                                      entry->n_rows - entry->n_drafts);
    }
    if (counts)
        advance(scheduler, batch);
    for (int32_t i = 0; !counts && i < batch->n_entries; i++)
        sp_scheduler_advance(scheduler, batch->entries[i].sequence, 0);
}

static sp_scheduler make_recurrent_scheduler(int32_t n_states, int32_t n_snapshots)
{
    sp_scheduler scheduler = make_scheduler(4, 64, 32, 64);
    sp_sequence_memory_options options = memory.options;

    sp_sequence_memory_destroy(&memory);
    options.prefix_cache = n_snapshots > 0;
    options.n_states = n_states;
    options.state_chunk = 8;
    options.n_snapshots = n_snapshots;
    options.snapshot_tokens = 16;
    assert_int_equal(sp_sequence_memory_create(&options, &memory), SP_OK);
    return scheduler;
}

static void test_waits_for_a_state(void **state)
{
    sp_scheduler scheduler = make_recurrent_scheduler(2, 0);
    fake f[3];

    (void)state;
    for (int32_t i = 0; i < 3; i++) {
        fake_init(&f[i], i + 1, 4, 1 + 2 * i);
        sp_scheduler_add(&scheduler, &f[i].sequence);
    }
    advance_states(&scheduler, sp_scheduler_plan(&scheduler), true);
    assert_int_equal(scheduler.waits[SP_WAIT_PAGES], 1);
    assert_int_equal(scheduler.n_running, 1); /* the first is finished */
    assert_int_equal(sp_scheduler_plan(&scheduler)->n_entries, 2);
    assert_int_equal(scheduler.waits[SP_WAIT_PAGES], 0);
    assert_int_equal((int64_t)scheduler.preemptions, 0);
    sp_scheduler_remove(&scheduler, &f[2].sequence);
    sp_scheduler_remove(&scheduler, &f[1].sequence);
    assert_int_equal(memory.states.n_free_states, 2);
    destroy_scheduler(&scheduler);
}

static void test_a_failed_step_begins_again_where_a_snapshot_is(void **state)
{
    sp_scheduler scheduler = make_recurrent_scheduler(2, 4);
    const sp_batch *batch;
    int32_t tokens[64] = {0};
    fake a;

    (void)state;
    fake_init(&a, 1, 31, 8);
    a.sequence.tokens = tokens;
    sp_scheduler_add(&scheduler, &a.sequence);
    /* A chunk ends where a snapshot may be taken. */
    batch = sp_scheduler_plan(&scheduler);
    assert_int_equal(batch->n_rows, 16);
    advance_states(&scheduler, batch, false);
    assert_int_equal(a.sequence.memory.n_committed, 0);
    assert_int_equal(sp_scheduler_plan(&scheduler)->n_rows, 16);
    advance_states(&scheduler, &scheduler.batch, true);
    assert_int_equal(sp_scheduler_plan(&scheduler)->n_rows, 15);
    advance_states(&scheduler, &scheduler.batch, true);
    assert_int_equal(a.sequence.n_tokens, 32);
    /* This row is the last of a chunk: nobody knows what the state is now. */
    assert_int_equal(sp_scheduler_plan(&scheduler)->n_rows, 1);
    advance_states(&scheduler, &scheduler.batch, false);
    assert_int_equal(a.sequence.queue.state, SP_SEQUENCE_RUNNING);
    assert_int_equal(a.sequence.memory.n_committed, 16);
    assert_int_equal(sp_scheduler_plan(&scheduler)->n_rows, 16);
    advance_states(&scheduler, &scheduler.batch, true);
    assert_int_equal(a.sequence.n_tokens, 33);
    sp_scheduler_remove(&scheduler, &a.sequence);
    destroy_scheduler(&scheduler);
}

/* Drafts end where a snapshot may be taken. */
static int32_t propose_ones(void *user, const sp_sequence *sequence, int32_t n_max,
                            int32_t *out_tokens)
{
    (void)user;
    (void)sequence;
    for (int32_t i = 0; i < n_max; i++)
        out_tokens[i] = 1;
    return n_max;
}

static void test_drafts_end_at_a_snapshot(void **state)
{
    sp_scheduler scheduler = make_recurrent_scheduler(2, 4);
    const int32_t rows[] = {3, 1, 5}; /* at 13, 15 and 16 */
    int32_t tokens[64] = {0};
    fake a;

    (void)state;
    fake_init(&a, 1, 13, 20);
    a.sequence.tokens = tokens;
    a.sequence.draft = sp_draft_create(4);
    scheduler.options.drafts = (sp_draft_source){NULL, propose_ones};
    sp_scheduler_add(&scheduler, &a.sequence);
    assert_int_equal(sp_scheduler_plan(&scheduler)->n_rows, 16);
    sp_sequence_memory_begin_step(&memory, &a.sequence.memory, 13);
    sp_scheduler_advance(&scheduler, &a.sequence, 13);
    a.sequence.n_tokens = 14;
    for (size_t i = 0; i < 3; i++) {
        const sp_batch_entry *entry = sp_scheduler_plan(&scheduler)->entries;
        int32_t n = entry->n_rows < 2 ? 1 : 2; /* a draft is accepted */

        assert_int_equal(entry->n_rows, rows[i]);
        assert_int_equal(entry->n_drafts, rows[i] - 1);
        sp_sequence_memory_begin_step(&memory, &a.sequence.memory, 1);
        sp_scheduler_advance(&scheduler, &a.sequence, n);
        a.sequence.n_tokens += n;
    }
    assert_int_equal((int64_t)memory.states.n_written, 1);
    sp_scheduler_remove(&scheduler, &a.sequence);
    destroy_scheduler(&scheduler);
}

static void test_random_load_finishes(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 200; seed++) {
        sp_test_random random = {seed};
        sp_scheduler scheduler = make_scheduler(
            1 + (int32_t)sp_test_below(&random, 6), 1 + (int32_t)sp_test_below(&random, 12),
            1 + (int32_t)sp_test_below(&random, 9), 8 + (int32_t)sp_test_below(&random, 8));
        fake fakes[24];
        int32_t added = 0, steps = 0;

        while (added < 24 || scheduler.n_running + scheduler.n_waiting > 0) {
            const sp_batch *batch;

            if (added < 24 && sp_test_below(&random, 3) == 0) {
                /* At most 8 pages of 4 tokens, so that each fits alone. */
                fake_init(&fakes[added], added + 1, 1 + (int32_t)sp_test_below(&random, 20),
                          1 + (int32_t)sp_test_below(&random, 12));
                sp_scheduler_add(&scheduler, &fakes[added].sequence);
                added++;
            }
            batch = sp_scheduler_plan(&scheduler);
            check_pages(&scheduler);
            assert_true(batch->n_rows <= scheduler.options.step_rows);
            for (int32_t i = 1; i < batch->n_entries; i++)
                assert_true(batch->entries[i - 1].sequence->id < batch->entries[i].sequence->id);
            for (int32_t i = 0; i < batch->n_entries; i++) {
                const sp_sequence *s = batch->entries[i].sequence;

                assert_true(s->memory.n_pages * PAGE_TOKENS >=
                            s->memory.n_committed + batch->entries[i].n_rows);
            }
            advance(&scheduler, batch);
            if (scheduler.n_running > 0 && sp_test_below(&random, 40) == 0) {
                sp_sequence *victim =
                    scheduler.running[sp_test_below(&random, (uint32_t)scheduler.n_running)];

                sp_scheduler_remove(&scheduler, victim);
                victim->n_tokens = victim->request.n_prompt + victim->request.max_tokens;
            }
            assert_true(++steps < 20000);
        }
        for (int32_t i = 0; i < added; i++)
            assert_int_equal(fakes[i].sequence.n_tokens, fakes[i].target);
        assert_int_equal(memory.pages.n_free, memory.pages.n_pages);
        destroy_scheduler(&scheduler);
    }
}

static int32_t rows_of(const sp_batch *batch, const sp_sequence *sequence)
{
    for (int32_t i = 0; i < batch->n_entries; i++)
        if (batch->entries[i].sequence == sequence)
            return batch->entries[i].n_rows;
    return 0;
}

/* A paused sequence has no rows and keeps its pages, one that waits is not taken in, and what runs
 * beside them goes on. */
static void test_a_paused_one_stands_still(void **state)
{
    sp_scheduler scheduler = make_scheduler(4, 16, 16, 32);
    fake running, other, late;
    int32_t pages;

    (void)state;
    fake_init(&running, 1, 4, 20);
    fake_init(&other, 2, 4, 20);
    fake_init(&late, 3, 4, 20);
    assert_int_equal(sp_scheduler_add(&scheduler, &running.sequence), SP_OK);
    assert_int_equal(sp_scheduler_add(&scheduler, &other.sequence), SP_OK);
    advance(&scheduler, sp_scheduler_plan(&scheduler));
    pages = running.sequence.memory.n_pages;
    sp_scheduler_set_paused(&running.sequence, true);
    sp_scheduler_set_paused(&late.sequence, true);
    assert_int_equal(sp_scheduler_add(&scheduler, &late.sequence), SP_OK);
    for (int32_t i = 0; i < 5; i++) {
        const sp_batch *batch = sp_scheduler_plan(&scheduler);

        assert_int_equal(batch->n_entries, 1);
        assert_int_equal(rows_of(batch, &other.sequence), 1);
        advance(&scheduler, batch);
    }
    assert_int_equal(running.sequence.n_tokens, 5);
    assert_int_equal(running.sequence.memory.n_pages, pages);
    assert_false(sp_scheduler_is_waiting(&scheduler));
    sp_scheduler_set_paused(&running.sequence, false);
    sp_scheduler_set_paused(&late.sequence, false);
    assert_true(sp_scheduler_is_waiting(&scheduler));
    assert_int_equal(sp_scheduler_plan(&scheduler)->n_entries, 3);
    sp_scheduler_remove(&scheduler, &running.sequence);
    sp_scheduler_remove(&scheduler, &other.sequence);
    sp_scheduler_remove(&scheduler, &late.sequence);
    destroy_scheduler(&scheduler);
}

/* Where a paused one holds the last place, or the last pages, it makes way in the next plan. */
static void check_makes_way(int32_t max_running, int32_t n_pages)
{
    sp_scheduler scheduler = make_scheduler(max_running, 16, 16, n_pages);
    fake held, other;

    fake_init(&held, 1, 8, 20);
    fake_init(&other, 2, 8, 4);
    assert_int_equal(sp_scheduler_add(&scheduler, &held.sequence), SP_OK);
    advance(&scheduler, sp_scheduler_plan(&scheduler));
    sp_scheduler_set_paused(&held.sequence, true);
    assert_int_equal(sp_scheduler_plan(&scheduler)->n_entries, 0);
    assert_int_equal(held.sequence.queue.state, SP_SEQUENCE_RUNNING);
    assert_int_equal(sp_scheduler_add(&scheduler, &other.sequence), SP_OK);
    assert_int_equal(sp_scheduler_plan(&scheduler)->n_entries, 0);
    assert_true(sp_scheduler_is_waiting(&scheduler));
    assert_int_equal(rows_of(sp_scheduler_plan(&scheduler), &other.sequence), 8);
    assert_int_equal(held.sequence.queue.state, SP_SEQUENCE_WAITING);
    assert_int_equal(held.sequence.trace.preemptions, 1);
    assert_int_equal(held.sequence.n_tokens, 9);
    sp_scheduler_remove(&scheduler, &held.sequence);
    sp_scheduler_remove(&scheduler, &other.sequence);
    destroy_scheduler(&scheduler);
}

static void test_a_paused_one_makes_way(void **state)
{
    (void)state;
    check_makes_way(1, 32);
    check_makes_way(4, 4);
}

/* So does an older one, where the oldest that runs lacks a page. */
static void test_an_older_paused_one_makes_way(void **state)
{
    sp_scheduler scheduler = make_scheduler(4, 16, 16, 4);
    fake held, other;

    (void)state;
    fake_init(&held, 1, 7, 20);
    fake_init(&other, 2, 7, 8);
    assert_int_equal(sp_scheduler_add(&scheduler, &held.sequence), SP_OK);
    assert_int_equal(sp_scheduler_add(&scheduler, &other.sequence), SP_OK);
    advance(&scheduler, sp_scheduler_plan(&scheduler));
    sp_scheduler_set_paused(&held.sequence, true);
    for (int32_t i = 0; i < 4 && other.sequence.n_tokens < 12; i++)
        advance(&scheduler, sp_scheduler_plan(&scheduler));
    /* A row in its second page, a plan without any, one in the page of the other, and the next. */
    assert_int_equal(other.sequence.n_tokens, 11);
    assert_int_equal(held.sequence.trace.preemptions, 1);
    sp_scheduler_remove(&scheduler, &held.sequence);
    sp_scheduler_remove(&scheduler, &other.sequence);
    destroy_scheduler(&scheduler);
}

static void test_creation_survives_every_failed_allocation(void **state)
{
    sp_scheduler_options options = {
        .memory = &memory, .max_running = 8, .step_rows = 8, .prefill_chunk = 8};
    size_t blocks = sp_alloc_blocks();

    (void)state;
    for (int64_t n = 0;; n++) {
        sp_scheduler scheduler;
        sp_status status;

        sp_alloc_fail_after(n);
        status = sp_scheduler_create(&options, &scheduler);
        if (!sp_alloc_failed()) {
            sp_alloc_fail_after(-1);
            assert_int_equal(status, SP_OK);
            sp_scheduler_destroy(&scheduler);
            break;
        }
        sp_alloc_fail_after(-1);
        assert_int_equal(status, SP_ERR_MEMORY);
    }
    assert_int_equal(sp_alloc_blocks(), blocks);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_prefill_is_cut_into_chunks),
        cmocka_unit_test(test_decode_rows_go_before_prefill),
        cmocka_unit_test(test_the_youngest_is_preempted_and_comes_back),
        cmocka_unit_test(test_a_preempted_sequence_keeps_its_tokens),
        cmocka_unit_test(test_waits_are_told_apart),
        cmocka_unit_test(test_waits_for_pages),
        cmocka_unit_test(test_waits_for_a_state),
        cmocka_unit_test(test_a_failed_step_begins_again_where_a_snapshot_is),
        cmocka_unit_test(test_drafts_end_at_a_snapshot),
        cmocka_unit_test(test_random_load_finishes),
        cmocka_unit_test(test_a_paused_one_stands_still),
        cmocka_unit_test(test_a_paused_one_makes_way),
        cmocka_unit_test(test_an_older_paused_one_makes_way),
        cmocka_unit_test(test_creation_survives_every_failed_allocation),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
