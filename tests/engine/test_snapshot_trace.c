/*
 * What snapshots save on a trace: conversations side by side whose prompts grow, under two system
 * prompts; short requests under three long beginnings; and long documents that come once. Compared
 * with a plain rule, which the test plays itself: snapshots at every 512 positions alone, and the
 * one that was used longest ago is evicted. docs/models/qwen3-next.md has the figures.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "base/hash.h"
#include "engine/schedule/sequence_memory.h"

#include <stdio.h>
#include <string.h>

#define SPACING       512
#define CHUNK         32
#define PAGE          16
#define PAGES         60000
#define TOKENS_MAX    20000
#define CONVERSATIONS 8
#define TURNS         8
#define DOCUMENTS     30
#define SHORT_ONES    60
#define REQUESTS      (CONVERSATIONS * TURNS + DOCUMENTS + SHORT_ONES)
#define SEEDS         2

typedef struct text {
    int32_t tokens[TOKENS_MAX], n;
} text;

typedef struct trace {
    sp_test_random random;
    bool rewritten; /* the next prompt has another text in place of most of the answer */
    int32_t kinds[REQUESTS];
    text systems[2], stems[3], conversations[CONVERSATIONS];
    int32_t turns[CONVERSATIONS];
    text request; /* a prompt and its answer */
    int32_t n_prompt;
} trace;

/* ---- the trace ----------------------------------------------------------------------------- */

static int32_t between(trace *t, int32_t low, int32_t high)
{
    return low + (int32_t)sp_test_below(&t->random, (uint32_t)(high - low));
}

static void add_tokens(trace *t, text *to, int32_t n)
{
    assert_true(to->n + n <= TOKENS_MAX);
    for (int32_t i = 0; i < n; i++)
        to->tokens[to->n++] = between(t, 0, 100000);
}

static void begin_trace(trace *t, uint64_t seed, bool rewritten)
{
    memset(t, 0, sizeof *t);
    t->random.state = seed;
    t->rewritten = rewritten;
    for (int32_t i = 0; i < REQUESTS; i++) {
        int32_t other = between(t, 0, i + 1);

        t->kinds[i] = t->kinds[other];
        t->kinds[other] = i < CONVERSATIONS * TURNS ? 0 : i < REQUESTS - SHORT_ONES ? 1 : 2;
    }
    for (int32_t i = 0; i < 2; i++)
        add_tokens(t, &t->systems[i], 700 + 800 * i);
    for (int32_t i = 0; i < 3; i++)
        add_tokens(t, &t->stems[i], 900 + 600 * i);
    for (int32_t i = 0; i < CONVERSATIONS; i++)
        t->conversations[i] = t->systems[i % 2];
}

static void take_turn(trace *t)
{
    int32_t c = between(t, 0, CONVERSATIONS), n;
    text *conversation;

    while (t->turns[c] == TURNS)
        c = (c + 1) % CONVERSATIONS;
    t->turns[c]++;
    conversation = &t->conversations[c];
    add_tokens(t, conversation, between(t, 20, 400));
    t->request = *conversation;
    t->n_prompt = t->request.n;
    n = between(t, 30, 500);
    add_tokens(t, &t->request, n);
    if (t->rewritten)
        add_tokens(t, conversation, n / 2);
    else
        *conversation = t->request;
}

static void next_request(trace *t, int32_t i)
{
    t->request.n = 0;
    if (t->kinds[i] == 0) {
        take_turn(t);
        return;
    }
    if (t->kinds[i] == 2)
        t->request = t->stems[between(t, 0, 3)];
    add_tokens(t, &t->request, t->kinds[i] == 1 ? between(t, 2000, 9000) : between(t, 20, 120));
    t->n_prompt = t->request.n;
    add_tokens(t, &t->request, between(t, 10, 200));
}

/* ---- sequence memory ----------------------------------------------------------------------- */

/* Tokens of the prompt that were found computed. */
static int32_t answer(sp_sequence_memory *memory, const trace *t)
{
    const int32_t *tokens = t->request.tokens;
    sp_held_memory held;
    int32_t found;

    assert_int_equal(sp_held_memory_create(memory, t->request.n, &held), SP_OK);
    held.n_prompt = t->n_prompt;
    found = sp_sequence_memory_resume(memory, &held, tokens, t->n_prompt - 1);
    while (held.n_committed < t->request.n - 1) {
        int32_t left = t->n_prompt - held.n_committed;
        int32_t rows = sp_sequence_memory_reserve(memory, &held, left > 0 ? left : 1);

        assert_true(rows > 0);
        sp_sequence_memory_begin_step(memory, &held, rows);
        assert_true(sp_sequence_memory_commit(memory, &held, tokens, rows));
    }
    sp_sequence_memory_release(memory, &held);
    sp_held_memory_destroy(&held);
    return found;
}

/* ---- the plain rule ------------------------------------------------------------------------ */

typedef struct plain_rule {
    int32_t n, n_used;
    uint64_t keys[1024], used[1024], clock;
} plain_rule;

static uint64_t key_of(const trace *t, int32_t n)
{
    return sp_xxh3(t->request.tokens, (size_t)n * sizeof(int32_t));
}

static int32_t find(const plain_rule *rule, uint64_t key)
{
    for (int32_t i = 0; i < rule->n_used; i++)
        if (rule->keys[i] == key)
            return i;
    return -1;
}

static void put(plain_rule *rule, uint64_t key)
{
    int32_t at = 0;

    if (rule->n_used < rule->n)
        at = rule->n_used++;
    else
        for (int32_t i = 1; i < rule->n; i++)
            at = rule->used[i] < rule->used[at] ? i : at;
    rule->keys[at] = key;
    rule->used[at] = ++rule->clock;
}

static int32_t answer_plainly(plain_rule *rule, const trace *t)
{
    int32_t found = (t->n_prompt - 1) / SPACING * SPACING, at = -1;

    while (found > 0 && (at = find(rule, key_of(t, found))) < 0)
        found -= SPACING;
    if (found > 0)
        rule->used[at] = ++rule->clock;
    for (int32_t place = found + SPACING; place < t->request.n; place += SPACING)
        if (find(rule, key_of(t, place)) < 0)
            put(rule, key_of(t, place));
    return found;
}

/* ---- figures ------------------------------------------------------------------------------- */

typedef struct figures {
    int64_t tokens, found, found_plainly;
    int32_t hits, hits_plainly;
} figures;

static void run_trace(trace *t, int32_t n_snapshots, figures *f)
{
    const sp_sequence_memory_options options = {
        .n_pages = PAGES,
        .page_tokens = PAGE,
        .prefix_cache = true,
        .n_states = 1,
        .state_chunk = CHUNK,
        .n_snapshots = n_snapshots,
        .snapshot_tokens = SPACING,
    };
    plain_rule *rule = sp_calloc(1, sizeof *rule);
    sp_sequence_memory memory;

    assert_non_null(rule);
    rule->n = n_snapshots;
    assert_int_equal(sp_sequence_memory_create(&options, &memory), SP_OK);
    for (int32_t i = 0; i < REQUESTS; i++) {
        int32_t found, plainly;

        next_request(t, i);
        found = answer(&memory, t);
        plainly = answer_plainly(rule, t);
        f->tokens += t->n_prompt;
        f->found += found;
        f->found_plainly += plainly;
        f->hits += found > 0;
        f->hits_plainly += plainly > 0;
    }
    sp_sequence_memory_destroy(&memory);
    sp_free(rule);
}

static double percent(int64_t part, int64_t whole)
{
    return 100.0 * (double)part / (double)whole;
}

static void check_trace(bool rewritten)
{
    static const int32_t sizes[] = {8, 16, 32, 1000};
    trace *t = sp_calloc(1, sizeof *t);

    assert_non_null(t);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        figures f = {0};

        for (uint64_t seed = 1; seed <= SEEDS; seed++) {
            begin_trace(t, seed, rewritten);
            run_trace(t, sizes[i], &f);
        }
        print_message("%d snapshots: %d of %d requests found %.1f %% of all prompts' tokens; "
                      "plainly %d and %.1f %%\n",
                      sizes[i], f.hits, SEEDS * REQUESTS, percent(f.found, f.tokens),
                      f.hits_plainly, percent(f.found_plainly, f.tokens));
        assert_true(f.hits >= f.hits_plainly && f.found > f.found_plainly);
        if (sizes[i] <= 32)
            assert_true(2 * f.found > 3 * f.found_plainly);
    }
    sp_free(t);
}

static void conversations_that_go_on(void **state)
{
    (void)state;
    check_trace(false);
}

static void conversations_that_are_written_otherwise(void **state)
{
    (void)state;
    check_trace(true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(conversations_that_go_on),
        cmocka_unit_test(conversations_that_are_written_otherwise),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
