/*
 * test_sequence_memory_sim.c: sequence memory under random lives of sequences: prompts that share
 * beginnings under several keys, prefill chunks, verify steps with drafts of which some are
 * accepted, steps that fail, preemptions. A model keeps what every position of every page holds
 * (key, token, and a hash of all that came before), who holds which page, and what a resume must
 * find. The model chooses nothing but predicts everything except which free page is taken.
 *
 *     test_sequence_memory_sim [FIRST_SEED N_SEEDS]      without arguments: seeds 1 .. 500
 *
 * A failing seed prints the line that replays it.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "engine/schedule/sequence_memory.h"
#include "support/seeds.h"

#include <stdio.h>
#include <string.h>

#define SEQUENCES  10
#define TOKENS_MAX 64
#define PAGES_MAX  (3 * TOKENS_MAX)
#define CHUNK_MAX  24
#define DRAFTS_MAX 6
#define N_KEYS     4
#define EVENTS     400

/* What computing a row leaves at its position. */
typedef struct cell {
    int32_t key, token;
    uint64_t history; /* of key and tokens up to this one; 0: nothing was written */
} cell;

typedef struct page_model {
    int32_t holders;
    bool known;          /* a resume finds it */
    uint64_t history;    /* where known: at its last position */
    uint64_t idle_since; /* where known and not held */
    cell cells[16];      /* [page_tokens] */
} page_model;

typedef struct fake {
    bool live, running;
    sp_held_memory held;
    int32_t key, n_tokens, n_target;
    int32_t tokens[TOKENS_MAX];
    uint64_t histories[TOKENS_MAX];
    /* the model's own account */
    int32_t pages[TOKENS_MAX], n_pages, n_committed;
} fake;

typedef struct sim {
    uint64_t seed;
    int32_t event, page_tokens, n_pages;
    bool prefix_cache;
    sp_test_random random;
    sp_sequence_memory memory;
    page_model pages[PAGES_MAX];
    fake fakes[SEQUENCES];
    uint64_t clock;
} sim;

static struct {
    uint64_t finished, preempted, failed_steps, rows, drafted, accepted, resumed, evicted, twins;
} seen;

static sim *running;

#define SIM_CHECK(condition)                                                              \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            fprintf(stderr, "replay: test_sequence_memory_sim %llu 1   (event %d: %s)\n", \
                    (unsigned long long)running->seed, running->event, #condition);       \
            fail_msg("%s", #condition);                                                   \
        }                                                                                 \
    } while (0)

static int32_t below(sim *s, int32_t n)
{
    return (int32_t)sp_test_below(&s->random, (uint32_t)n);
}

static int32_t min_of(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

/* ---- the model's pages --------------------------------------------------------------------- */

static int32_t pages_for(const sim *s, int32_t n_tokens)
{
    return n_tokens / s->page_tokens + (n_tokens % s->page_tokens > 0);
}

static int32_t count_pages(const sim *s, bool known)
{
    int32_t n = 0;

    for (int32_t page = 0; page < s->n_pages; page++)
        n += s->pages[page].holders == 0 && s->pages[page].known == known;
    return n;
}

static void model_give(sim *s, int32_t page)
{
    SIM_CHECK(s->pages[page].holders > 0);
    if (--s->pages[page].holders == 0)
        s->pages[page].idle_since = ++s->clock;
}

/* The memory has handed this page out: a free one, or else the one that has been idle longest. */
static void model_take(sim *s, int32_t page)
{
    page_model *m = &s->pages[page];

    SIM_CHECK(m->holders == 0);
    if (m->known) {
        SIM_CHECK(count_pages(s, false) == 0);
        for (int32_t other = 0; other < s->n_pages; other++)
            SIM_CHECK(s->pages[other].holders > 0 || s->pages[other].idle_since >= m->idle_since);
        seen.evicted++;
    }
    memset(m, 0, sizeof *m);
    m->holders = 1;
}

static int32_t model_find(const sim *s, uint64_t history)
{
    for (int32_t page = 0; page < s->n_pages; page++)
        if (s->pages[page].known && s->pages[page].history == history)
            return page;
    return -1;
}

static void model_trim(sim *s, fake *f, int32_t n_kept)
{
    while (f->n_pages > n_kept)
        model_give(s, f->pages[--f->n_pages]);
}

/* ---- what must hold ------------------------------------------------------------------------ */

static cell *cell_at(sim *s, const fake *f, int32_t position)
{
    return &s->pages[f->held.pages[position / s->page_tokens]].cells[position % s->page_tokens];
}

/* The sequence reads at each position what it would have written there. */
static void check_held(sim *s, const fake *f)
{
    SIM_CHECK(f->held.n_pages == f->n_pages && f->held.n_committed == f->n_committed);
    SIM_CHECK(f->held.n_reserved >= f->n_committed);
    SIM_CHECK(f->n_pages == pages_for(s, f->held.n_reserved));
    SIM_CHECK(memcmp(f->held.pages, f->pages, (size_t)f->n_pages * sizeof f->pages[0]) == 0);
    SIM_CHECK(f->running || f->n_pages == 0);
    for (int32_t p = 0; p < f->n_committed; p++) {
        const cell *at = cell_at(s, f, p);

        SIM_CHECK(at->key == f->key && at->token == f->tokens[p]);
        SIM_CHECK(at->history == f->histories[p]);
    }
}

static void check_all(sim *s)
{
    int32_t holders[PAGES_MAX] = {0};

    for (int32_t i = 0; i < SEQUENCES; i++) {
        const fake *f = &s->fakes[i];

        if (!f->live)
            continue;
        check_held(s, f);
        for (int32_t p = 0; p < f->n_pages; p++)
            holders[f->pages[p]]++;
    }
    for (int32_t page = 0; page < s->n_pages; page++) {
        SIM_CHECK(s->pages[page].holders == holders[page]);
        SIM_CHECK(s->memory.pages.holders[page] == holders[page]);
    }
    SIM_CHECK(sp_sequence_memory_evictable(&s->memory) == count_pages(s, true));
    SIM_CHECK(sp_sequence_memory_available(&s->memory) ==
              count_pages(s, true) + count_pages(s, false));
    SIM_CHECK(sp_sequence_memory_is_consistent(&s->memory));
}

/* ---- sequences ----------------------------------------------------------------------------- */

static void put_token(fake *f, int32_t position, int32_t token)
{
    uint64_t before = position > 0 ? f->histories[position - 1] : (uint64_t)(f->key + 1) << 32;
    sp_test_random mix = {before ^ (uint64_t)(token + 1)};

    f->tokens[position] = token;
    f->histories[position] = sp_test_next(&mix);
}

/* Differing in one thing each: the digest's last byte, the scale, both from the base's. */
static sp_prefix_key key_of(int32_t key)
{
    sp_prefix_key made = {.scale = key == 0 ? 0.0f : key == 1 ? 0.5f : 1.0f};

    made.digest.bytes[sizeof made.digest.bytes - 1] = (uint8_t)(key == 0 ? 0 : key == 3 ? 2 : 1);
    return made;
}

static void submit(sim *s)
{
    fake *f = NULL;
    int32_t shared = below(s, 20);

    for (int32_t i = 0; i < SEQUENCES && !f; i++)
        if (!s->fakes[i].live)
            f = &s->fakes[i];
    if (!f)
        return;
    memset(f, 0, sizeof *f);
    f->live = true;
    f->key = below(s, N_KEYS);
    f->n_tokens = 1 + below(s, TOKENS_MAX / 2);
    f->n_target = f->n_tokens + 1 + below(s, TOKENS_MAX - f->n_tokens);
    for (int32_t t = 0; t < f->n_tokens; t++)
        put_token(f, t, t < shared ? 7 : below(s, 2));
    SIM_CHECK(sp_held_memory_create(&s->memory, f->n_target, &f->held) == SP_OK);
    f->held.key = key_of(f->key);
}

static void start(sim *s, fake *f)
{
    int32_t limit = below(s, 8) == 0 ? below(s, f->n_tokens) : f->n_tokens - 1;
    int32_t n;

    f->running = true;
    if (below(s, 8) == 0)
        return; /* it computes all of its rows */
    while (s->prefix_cache && (f->n_pages + 1) * s->page_tokens <= limit) {
        int32_t page = model_find(s, f->histories[(f->n_pages + 1) * s->page_tokens - 1]);

        if (page < 0)
            break;
        s->pages[page].holders++;
        f->pages[f->n_pages++] = page;
    }
    f->n_committed = f->n_pages * s->page_tokens;
    n = sp_sequence_memory_resume(&s->memory, &f->held, f->tokens, limit);
    SIM_CHECK(n == f->n_committed);
    seen.resumed += (uint64_t)n;
}

static void release(sim *s, fake *f)
{
    sp_sequence_memory_release(&s->memory, &f->held);
    model_trim(s, f, 0);
    f->n_committed = 0;
    f->running = false;
}

static void drop(sim *s, fake *f)
{
    release(s, f);
    sp_held_memory_destroy(&f->held);
    f->live = false;
}

/* ---- a step of one sequence ---------------------------------------------------------------- */

static int32_t reserve(sim *s, fake *f, int32_t want)
{
    int32_t expected, n;

    model_trim(s, f, pages_for(s, f->n_committed));
    expected = (f->n_pages + count_pages(s, true) + count_pages(s, false)) * s->page_tokens;
    expected = min_of(want, expected - f->n_committed);
    n = sp_sequence_memory_reserve(&s->memory, &f->held, want);
    SIM_CHECK(n == expected && sp_sequence_memory_may_write(&s->memory, &f->held));
    while (f->n_pages < pages_for(s, f->n_committed + n)) {
        int32_t page = f->held.pages[f->n_pages];

        SIM_CHECK(page >= 0 && page < s->n_pages);
        model_take(s, page);
        f->pages[f->n_pages++] = page;
    }
    return n;
}

/* Only pages that nobody else reads are written. */
static void compute(sim *s, fake *f, int32_t n_rows)
{
    for (int32_t i = 0; i < n_rows; i++) {
        int32_t position = f->n_committed + i;
        const page_model *m = &s->pages[f->held.pages[position / s->page_tokens]];

        SIM_CHECK(m->holders == 1 && !m->known);
        *cell_at(s, f, position) = (cell){f->key, f->tokens[position], f->histories[position]};
    }
    seen.rows += (uint64_t)n_rows;
}

static void commit(sim *s, fake *f, int32_t n_rows)
{
    int32_t n_full = f->n_committed / s->page_tokens;

    sp_sequence_memory_commit(&s->memory, &f->held, f->tokens, n_rows);
    f->n_committed += n_rows;
    model_trim(s, f, pages_for(s, f->n_committed));
    for (; s->prefix_cache && n_full < f->n_committed / s->page_tokens; n_full++) {
        uint64_t history = f->histories[(n_full + 1) * s->page_tokens - 1];
        int32_t *page = &f->pages[n_full], twin = model_find(s, history);

        if (twin < 0) {
            s->pages[*page].known = true;
            s->pages[*page].history = history;
            continue;
        }
        seen.twins++;
        s->pages[twin].holders++;
        model_give(s, *page);
        *page = twin;
    }
}

/* Nothing of the step counts, and the memory is told so in each of the ways that there are. */
static void fail_step(sim *s, fake *f)
{
    int32_t way = below(s, 3);

    seen.failed_steps++;
    if (way == 0)
        return; /* the next reserve, or a release, replaces the reservation */
    if (way == 1)
        sp_sequence_memory_rollback(&s->memory, &f->held);
    else
        sp_sequence_memory_commit(&s->memory, &f->held, f->tokens, 0);
    model_trim(s, f, pages_for(s, f->n_committed));
}

static void preempt(sim *s, fake *f)
{
    release(s, f);
    seen.preempted++;
}

/* Finds no memory: someone gives way, perhaps the sequence itself. */
static void make_room(sim *s, fake *f)
{
    int32_t first = below(s, SEQUENCES);

    for (int32_t i = 0; i < SEQUENCES; i++) {
        fake *other = &s->fakes[(first + i) % SEQUENCES];

        if (other != f && other->live && other->running) {
            preempt(s, other);
            return;
        }
    }
    preempt(s, f);
}

/* Rows n_committed .. n_tokens - 1, and then drafts, of which the first j are accepted. */
static void step(sim *s, fake *f)
{
    int32_t pending = f->n_tokens - f->n_committed, drafts = 0, n, accepted;

    if (pending == 1 && below(s, 2) == 0)
        drafts = min_of(below(s, DRAFTS_MAX + 1), f->n_target - f->n_tokens);
    for (int32_t i = 0; i < drafts; i++)
        put_token(f, f->n_tokens + i, below(s, 2));
    n = reserve(s, f, drafts > 0 ? 1 + drafts : min_of(pending, 1 + below(s, CHUNK_MAX)));
    if (n == 0) {
        make_room(s, f);
        return;
    }
    compute(s, f, n);
    if (below(s, 12) == 0) {
        fail_step(s, f);
        return;
    }
    accepted = n > pending ? below(s, n - pending + 1) : 0;
    seen.drafted += n > pending ? (uint64_t)(n - pending) : 0;
    seen.accepted += (uint64_t)accepted;
    f->n_tokens += accepted;
    commit(s, f, n > pending ? pending + accepted : n);
    if (f->n_committed < f->n_tokens)
        return;
    if (f->n_tokens == f->n_target) {
        seen.finished++;
        drop(s, f);
    } else {
        put_token(f, f->n_tokens, below(s, 2));
        f->n_tokens++;
    }
}

/* ---- lives --------------------------------------------------------------------------------- */

static void random_event(sim *s)
{
    fake *f = &s->fakes[below(s, SEQUENCES)];
    int32_t kind = below(s, 100);

    if (!f->live)
        submit(s);
    else if (!f->running)
        start(s, f);
    else if (kind < 92)
        step(s, f);
    else if (kind < 97)
        preempt(s, f);
    else
        drop(s, f);
}

static void sim_begin(sim *s, uint64_t seed)
{
    sp_sequence_memory_options options;

    memset(s, 0, sizeof *s);
    running = s;
    s->seed = seed;
    s->random.state = seed * UINT64_C(0x9e3779b97f4a7c15);
    s->page_tokens = 1 << below(s, 5);
    s->n_pages = pages_for(s, TOKENS_MAX) * (1 + below(s, 3)) - below(s, 2);
    s->prefix_cache = seed % 8 != 0;
    options = (sp_sequence_memory_options){
        .n_pages = s->n_pages, .page_tokens = s->page_tokens, .prefix_cache = s->prefix_cache};
    SIM_CHECK(sp_sequence_memory_create(&options, &s->memory) == SP_OK);
    SIM_CHECK(sp_sequence_memory_capacity(&s->memory) == (int64_t)s->n_pages * s->page_tokens);
}

static void live(uint64_t seed)
{
    size_t bytes = sp_alloc_bytes();
    static sim s;

    sim_begin(&s, seed);
    for (s.event = 0; s.event < EVENTS; s.event++) {
        random_event(&s);
        check_all(&s);
    }
    for (int32_t i = 0; i < SEQUENCES; i++)
        if (s.fakes[i].live)
            drop(&s, &s.fakes[i]);
    check_all(&s);
    SIM_CHECK(sp_sequence_memory_available(&s.memory) == s.n_pages);
    sp_sequence_memory_destroy(&s.memory);
    SIM_CHECK(sp_alloc_bytes() == bytes);
}

static seed_range seeds;

static void test_random_lives(void **state)
{
    (void)state;
    seeds_run(&seeds, live);
    print_message("seeds %llu..%llu: finished %llu, preempted %llu, failed steps %llu, rows %llu, "
                  "drafted %llu, accepted %llu, tokens resumed %llu, pages evicted %llu, pages "
                  "filled twice %llu\n",
                  (unsigned long long)seeds.first, (unsigned long long)(seeds.first + seeds.n - 1),
                  (unsigned long long)seen.finished, (unsigned long long)seen.preempted,
                  (unsigned long long)seen.failed_steps, (unsigned long long)seen.rows,
                  (unsigned long long)seen.drafted, (unsigned long long)seen.accepted,
                  (unsigned long long)seen.resumed, (unsigned long long)seen.evicted,
                  (unsigned long long)seen.twins);
    if (!seeds_are_many(&seeds))
        return;
    assert_true(seen.finished > 0 && seen.preempted > 0 && seen.failed_steps > 0);
    assert_true(seen.accepted > 0 && seen.drafted > seen.accepted);
    assert_true(seen.resumed > 0 && seen.evicted > 0 && seen.twins > 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_random_lives)};

    seeds = seeds_of(argc, argv, 500);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
