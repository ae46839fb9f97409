/*
 * The prefix cache: pages begin a sequence only if they hold exactly its tokens under its key, and
 * no bit of a result depends on whether there is one.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "engine/schedule/scheduler.h"
#include "support/engine_run.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ADAPTERS SP_TEST_FIXTURES "/qwen3-tied/adapters/"

/* ---- the scheduler, with a model of what every page holds ---------------------------------- */

#define PAGE_TOKENS 4
#define TOKENS_MAX  40
#define SEQUENCES   12
#define PAGES       24

/* What computing would have left in a page: all that its keys and values depend on. */
typedef struct page_model {
    float scale;
    int32_t n;                  /* tokens from the beginning to the end of this page */
    int32_t tokens[TOKENS_MAX]; /* [n] */
} page_model;

typedef struct fake {
    bool live;
    sp_sequence sequence;
    int32_t tokens[TOKENS_MAX], pages[TOKENS_MAX / PAGE_TOKENS + 1];
} fake;

typedef struct world {
    sp_sequence_memory memory;
    sp_scheduler scheduler;
    fake fakes[SEQUENCES];
    page_model model[PAGES];
    sp_test_random random;
    int64_t next_id;
} world;

/* A request's first rows were computed by someone: the pages must hold its own tokens. */
static void check_begun(const world *w, const sp_sequence *s)
{
    for (int32_t p = 0; (p + 1) * PAGE_TOKENS <= s->memory.n_committed; p++) {
        const page_model *m = &w->model[s->memory.pages[p]];

        assert_int_equal(m->n, (p + 1) * PAGE_TOKENS);
        assert_true(memcmp(&m->scale, &s->memory.key.scale, sizeof m->scale) == 0);
        assert_memory_equal(m->tokens, s->tokens, (size_t)m->n * sizeof(int32_t));
    }
}

static void check_pages(const world *w)
{
    int32_t holders[PAGES] = {0}, held = 0;

    for (int32_t i = 0; i < SEQUENCES; i++)
        for (int32_t p = 0; w->fakes[i].live && p < w->fakes[i].sequence.memory.n_pages; p++)
            holders[w->fakes[i].pages[p]]++;
    for (int32_t page = 0; page < PAGES; page++) {
        assert_int_equal(w->memory.pages.holders[page], holders[page]);
        held += holders[page] > 0;
    }
    assert_int_equal(held + w->memory.pages.n_free + w->memory.pages.n_idle, PAGES);
}

/* Writes the rows of the step into the model; no page with another holder may be written. */
static void compute(world *w, const sp_batch *batch)
{
    for (int32_t e = 0; e < batch->n_entries; e++) {
        sp_sequence *s = batch->entries[e].sequence;

        for (int32_t i = 0; i < batch->entries[e].n_rows; i++) {
            int32_t at = s->memory.n_committed + i, page = s->memory.pages[at / PAGE_TOKENS];

            assert_int_equal(w->memory.pages.holders[page], 1);
            w->model[page].scale = s->memory.key.scale;
            w->model[page].n = at + 1;
            memcpy(w->model[page].tokens, s->tokens, ((size_t)at + 1) * sizeof(int32_t));
        }
    }
}

static void step(world *w)
{
    const sp_batch *batch = sp_scheduler_plan(&w->scheduler);

    for (int32_t e = 0; e < batch->n_entries; e++)
        check_begun(w, batch->entries[e].sequence);
    compute(w, batch);
    for (int32_t e = 0; e < batch->n_entries; e++)
        sp_scheduler_advance(&w->scheduler, batch->entries[e].sequence, batch->entries[e].n_rows);
    for (int32_t i = 0; i < SEQUENCES; i++) {
        sp_sequence *s = &w->fakes[i].sequence;

        if (!w->fakes[i].live || s->memory.n_committed < s->n_tokens)
            continue;
        check_begun(w, s);
        if (s->n_tokens < s->request.n_prompt + s->request.max_tokens) {
            s->tokens[s->n_tokens++] = (int32_t)sp_test_below(&w->random, 2);
            continue;
        }
        sp_scheduler_remove(&w->scheduler, s);
        w->fakes[i].live = false;
    }
    check_pages(w);
}

/* Two tokens and two keys: equal beginnings are common. */
static void submit(world *w)
{
    for (int32_t i = 0; i < SEQUENCES; i++) {
        fake *f = &w->fakes[i];

        if (f->live)
            continue;
        memset(f, 0, sizeof *f);
        f->live = true;
        f->sequence.id = ++w->next_id;
        f->sequence.tokens = f->tokens;
        f->sequence.memory.pages = f->pages;
        f->sequence.memory.pages_max = TOKENS_MAX / PAGE_TOKENS + 1;
        f->sequence.request.n_prompt = 1 + (int32_t)sp_test_below(&w->random, 24);
        f->sequence.n_tokens = f->sequence.request.n_prompt;
        f->sequence.request.max_tokens = 1 + (int32_t)sp_test_below(&w->random, 15);
        f->sequence.memory.key.scale = sp_test_below(&w->random, 2) ? 1.0f : 0.0f;
        for (int32_t t = 0; t < f->sequence.request.n_prompt; t++)
            f->tokens[t] = t < 6 ? 7 : (int32_t)sp_test_below(&w->random, 2);
        assert_int_equal(sp_scheduler_add(&w->scheduler, &f->sequence), SP_OK);
        return;
    }
}

static void drop_all(world *w)
{
    for (int32_t i = 0; i < SEQUENCES; i++)
        if (w->fakes[i].live)
            sp_scheduler_remove(&w->scheduler, &w->fakes[i].sequence);
}

static void test_pages_hold_what_they_are_known_for(void **state)
{
    static world w;
    sp_sequence_memory_options memory = {
        .n_pages = PAGES, .page_tokens = PAGE_TOKENS, .prefix_cache = true};
    sp_scheduler_options options = {
        .memory = &w.memory, .max_running = 6, .step_rows = 16, .prefill_chunk = 7};
    uint64_t preemptions = 0, saved = 0;

    (void)state;
    for (uint64_t seed = 1; seed <= 40; seed++) {
        memset(&w, 0, sizeof w);
        w.random.state = seed;
        assert_int_equal(sp_sequence_memory_create(&memory, &w.memory), SP_OK);
        assert_int_equal(sp_scheduler_create(&options, &w.scheduler), SP_OK);
        for (int32_t i = 0; i < 400; i++) {
            if (sp_test_below(&w.random, 2))
                submit(&w);
            if (sp_test_below(&w.random, 30) == 0) {
                fake *f = &w.fakes[sp_test_below(&w.random, SEQUENCES)];

                if (f->live)
                    sp_scheduler_remove(&w.scheduler, &f->sequence);
                f->live = false;
            }
            step(&w);
        }
        preemptions += w.scheduler.preemptions;
        saved += w.memory.resumed_tokens;
        drop_all(&w);
        sp_scheduler_destroy(&w.scheduler);
        sp_sequence_memory_destroy(&w.memory);
    }
    print_message("%llu tokens saved, %llu preemptions\n", (unsigned long long)saved,
                  (unsigned long long)preemptions);
    assert_true(saved > 0 && preemptions > 0);
}

/* What a hash that happens to be equal must not do: the rest is compared in full. */
static void test_equal_hashes_are_not_enough(void **state)
{
    const int32_t tokens[PAGE_TOKENS] = {1, 2, 3, 4};
    sp_prefix_key one = {.scale = 1.0f}, two = {.scale = 2.0f}, three = {.scale = 1.0f};
    sp_prefix_place place = sp_prefix_begin(&one), elsewhere = place;
    sp_prefix prefix;

    (void)state;
    three.digest.bytes[31] = 1;
    elsewhere.parent = 2;
    assert_int_equal(sp_prefix_create(4, PAGE_TOKENS, &prefix), SP_OK);
    sp_prefix_insert(&prefix, &one, place, tokens, 3);
    assert_int_equal(sp_prefix_find(&prefix, &one, place, tokens), 3);
    assert_int_equal(sp_prefix_find(&prefix, &two, place, tokens), -1);
    assert_int_equal(sp_prefix_find(&prefix, &three, place, tokens), -1);
    assert_int_equal(sp_prefix_find(&prefix, &one, elsewhere, tokens), -1);
    prefix.tokens[3 * PAGE_TOKENS + 2]++; /* as if other tokens had this hash */
    assert_int_equal(sp_prefix_find(&prefix, &one, place, tokens), -1);
    prefix.tokens[3 * PAGE_TOKENS + 2]--;
    assert_int_equal(sp_prefix_find(&prefix, &one, place, tokens), 3);
    sp_prefix_remove(&prefix, 3);
    assert_int_equal(sp_prefix_find(&prefix, &one, place, tokens), -1);
    sp_prefix_destroy(&prefix);
}

/* ---- the engine ---------------------------------------------------------------------------- */

#define SHARED   37
#define N_PROMPT 45
#define N_RUNS   16

static const char *const names[] = {"ffn", "r1", "same-as-ffn"};

static sp_engine *open_engine(bool prefix_cache, int64_t kv_tokens)
{
    const sp_engine_adapter adapters[] = {{sizeof(sp_engine_adapter), names[0], ADAPTERS "ffn"},
                                          {sizeof(sp_engine_adapter), names[1], ADAPTERS "r1"},
                                          {sizeof(sp_engine_adapter), names[2], ADAPTERS "ffn"}};
    sp_engine_options options;

    sp_engine_options_default(&options, sizeof options);
    options.model_dir = SP_TEST_FIXTURES "/qwen3-tied";
    options.threads = 2;
    options.page_tokens = 8;
    options.kv_tokens = kv_tokens;
    options.step_rows = 40;
    options.prefix_cache = prefix_cache;
    return engine_run_open(&options, adapters, 3);
}

static int32_t prompts[N_RUNS][N_PROMPT];

static void make_prompts(void)
{
    sp_test_random random = {9};

    for (int32_t i = 0; i < N_RUNS; i++)
        for (int32_t t = 0; t < N_PROMPT; t++)
            prompts[i][t] =
                i > 0 && t < SHARED ? prompts[0][t] : (int32_t)sp_test_below(&random, 500);
}

/* Base, three names of two contents, four scales (one of them 0); every prompt twice. */
static engine_run make_run(int32_t i)
{
    static const float scales[] = {1.0f, 0.5f, 1.0f, 0.0f};
    engine_run run = engine_run_init(i % 4 < 3 ? names[i % 4] : NULL, prompts[i / 2], N_PROMPT, 12);

    run.request.lora_scale = scales[(i / 4) % 4];
    run.keep_logits = true;
    run.request.logits_from = N_PROMPT - 1;
    return run;
}

static uint64_t run_all(engine_run *runs, bool prefix_cache, int64_t kv_tokens, bool one_by_one)
{
    sp_engine *engine = open_engine(prefix_cache, kv_tokens);
    engine_run *list[N_RUNS];
    sp_engine_stats stats = {.struct_bytes = sizeof stats};

    for (int32_t i = 0; i < N_RUNS; i++) {
        runs[i] = make_run(i);
        list[i] = &runs[i];
        engine_run_submit(engine, &runs[i]);
        if (one_by_one)
            engine_run_all(engine, &list[i], 1);
    }
    engine_run_all(engine, list, N_RUNS);
    sp_engine_get_stats(engine, &stats, NULL);
    assert_int_equal(stats.kv_pages_used, 0);
    sp_engine_close(engine);
    return stats.prefix_tokens;
}

static void check_same(engine_run *a, engine_run *b)
{
    for (int32_t i = 0; i < N_RUNS; i++) {
        engine_run_assert_same(&a[i], &b[i]);
        engine_run_free(&b[i]);
    }
}

static void test_results_are_equal_with_it_off(void **state)
{
    engine_run off[N_RUNS], on[N_RUNS];

    (void)state;
    assert_true(run_all(off, false, 4096, true) == 0);
    assert_true(run_all(on, true, 4096, true) > (uint64_t)SHARED);
    check_same(off, on);
    assert_true(run_all(on, true, 4096, false) > 0);
    check_same(off, on);
    /* Room for two requests: pages are evicted and requests preempted. */
    run_all(on, true, 136, false);
    check_same(off, on);
    for (int32_t i = 0; i < N_RUNS; i++)
        engine_run_free(&off[i]);
}

/* Tokens that the second of two runs did not compute. */
static uint64_t saved_by(const char *first, float first_scale, const char *second,
                         float second_scale)
{
    sp_engine *engine = open_engine(true, 4096);
    engine_run a = engine_run_init(first, prompts[0], N_PROMPT, 1);
    engine_run b = engine_run_init(second, prompts[0], N_PROMPT, 1), *runs[] = {&a, &b};
    sp_engine_stats stats = {.struct_bytes = sizeof stats};

    a.request.lora_scale = first_scale;
    b.request.lora_scale = second_scale;
    engine_run_submit(engine, &a);
    engine_run_all(engine, runs, 1);
    engine_run_submit(engine, &b);
    engine_run_all(engine, runs, 2);
    sp_engine_get_stats(engine, &stats, NULL);
    engine_run_free(&a);
    engine_run_free(&b);
    sp_engine_close(engine);
    return stats.prefix_tokens;
}

/* Tokens in full pages of the prompt; its last token is always computed. */
static uint64_t whole_pages(void)
{
    sp_engine *engine = open_engine(true, 4096);
    int32_t page = engine_run_page_tokens(engine);

    sp_engine_close(engine);
    assert_true(page == 8 || getenv("SP_TEST_DEVICE"));
    return (uint64_t)((N_PROMPT - 1) / page * page);
}

static void test_what_shares_pages(void **state)
{
    const uint64_t whole = whole_pages();

    (void)state;
    assert_int_equal(saved_by(NULL, 1, NULL, 1), whole);
    assert_int_equal(saved_by("ffn", 1, "ffn", 1), whole);
    assert_int_equal(saved_by("ffn", 1, "same-as-ffn", 1), whole);
    assert_int_equal(saved_by("ffn", 0, NULL, 1), whole);
    assert_int_equal(saved_by("ffn", 1, NULL, 1), 0);
    assert_int_equal(saved_by(NULL, 1, "ffn", 1), 0);
    assert_int_equal(saved_by("ffn", 1, "r1", 1), 0);
    assert_int_equal(saved_by("ffn", 1, "ffn", 0.5f), 0);
}

static int leaks_nothing(void **state)
{
    (void)state;
    return sp_alloc_blocks() == 0 ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_pages_hold_what_they_are_known_for, leaks_nothing),
        cmocka_unit_test_teardown(test_equal_hashes_are_not_enough, leaks_nothing),
        cmocka_unit_test_teardown(test_results_are_equal_with_it_off, leaks_nothing),
        cmocka_unit_test_teardown(test_what_shares_pages, leaks_nothing),
    };

    make_prompts();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
