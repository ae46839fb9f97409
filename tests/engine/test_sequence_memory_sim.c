/*
 * test_sequence_memory_sim.c: sequence memory under random lives of sequences: prompts that share
 * beginnings under several keys, prefill chunks, verify steps with drafts of which some are
 * accepted, steps that fail, preemptions. A model keeps what every position of every page holds
 * (key, token, and a hash of all that came before), who holds which page, and what a resume must
 * find. The model chooses nothing but predicts everything except which free page is taken.
 *
 * In three of four seeds there are recurrent layers, and the test plays their backend too, as ops.h
 * describes it: a state that folds whole chunks and cannot go back, a ring of the last rows, and
 * snapshots. A row is right if the state that it reads and the rows of the ring after it are its
 * sequence's. A step that fails has done any part of that. Steps last, so that others begin, end,
 * take pages and states meanwhile.
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

#define STATES_MAX    SEQUENCES
#define SNAPSHOTS_MAX 8
#define STATE_CHUNK   8
#define STATE_RING    16 /* an open chunk, a row and the drafts */

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

/* A state of the backend: what it has folded, and the last rows. */
typedef struct slot_model {
    bool used;
    int32_t at;
    uint64_t folded; /* the history of the first `at` positions */
    struct {
        int32_t position;
        uint64_t history;
    } ring[STATE_RING];
} slot_model;

typedef enum kind_model { SPACED, END, BEGUN_WITH } kind_model; /* in the order of eviction */

typedef struct snapshot_model {
    bool used, written;
    kind_model kind;
    int32_t page, holders, at;
    uint64_t folded;
    uint64_t idle_since;
} snapshot_model;

typedef struct fake {
    bool live, running;
    bool in_step; /* rows that are computed and not committed yet */
    int32_t n_rows;
    int32_t slot, load, save, folded; /* the model's own account; -1: none */
    int32_t n_prompt, begun, parting; /* 0: none */
    int32_t output;                   /* page of the last snapshot of its output, or -1 */
    bool saves_output;
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
    int32_t n_states, n_snapshots, snapshot_tokens;
    slot_model slots[STATES_MAX];
    snapshot_model snapshots[SNAPSHOTS_MAX];
    fake fakes[SEQUENCES];
    uint64_t clock;
} sim;

static struct {
    uint64_t finished, preempted, failed_steps, rows, drafted, accepted, resumed, evicted, twins;
    uint64_t lost, kept, loaded, dropped, unsaved;
    uint64_t ends, outputs, replaced, partings, used_dropped, withheld;
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

/* ---- the model's snapshots ----------------------------------------------------------------- */

/* The snapshot of a page, written ones among them; -1: none. */
static int32_t snapshot_of(const sim *s, int32_t page)
{
    for (int32_t i = 0; i < s->n_snapshots; i++)
        if (s->snapshots[i].used && s->snapshots[i].page == page)
            return i;
    return -1;
}

static bool is_idle_snapshot(const snapshot_model *m)
{
    return m->used && !m->written && m->holders == 0;
}

static void model_forget(sim *s, int32_t page)
{
    int32_t i = snapshot_of(s, page);

    if (i < 0)
        return;
    SIM_CHECK(is_idle_snapshot(&s->snapshots[i]));
    s->snapshots[i].used = false;
    seen.dropped++;
}

static void model_drop_load(sim *s, fake *f)
{
    if (f->load < 0)
        return;
    SIM_CHECK(s->snapshots[f->load].holders > 0);
    if (--s->snapshots[f->load].holders == 0)
        s->snapshots[f->load].idle_since = ++s->clock;
    f->load = -1;
}

/* ---- the model's places of snapshots -------------------------------------------------------- */

static int32_t unit_of(const sim *s)
{
    return s->page_tokens > STATE_CHUNK ? s->page_tokens : STATE_CHUNK;
}

/* The last place before a prompt's last token, as for any other number of tokens. */
static int32_t last_place(const sim *s, int32_t n_tokens)
{
    int32_t place = 0;

    while (place + unit_of(s) < n_tokens)
        place += unit_of(s);
    return place;
}

/* Whether the nearest of the places that come before is a quarter of the spacing away. */
static bool is_far(const sim *s, const fake *f, int32_t place)
{
    for (int32_t p = place - 1; p > place - s->snapshot_tokens / 4 && p >= 0; p--)
        if (p % s->snapshot_tokens == 0 || p == f->begun || p == f->parting ||
            (f->n_prompt > 0 && p == last_place(s, f->n_prompt)))
            return false;
    return true;
}

static bool rows_end_at(const sim *s, const fake *f, int32_t place)
{
    if (place % s->snapshot_tokens == 0)
        return true;
    return f->n_prompt > 0 && place > 0 &&
           (place == f->parting || place == last_place(s, f->n_prompt)) && is_far(s, f, place);
}

static bool is_output(const sim *s, const fake *f)
{
    return f->n_prompt > 0 && f->n_committed > last_place(s, f->n_prompt) &&
           f->n_committed % unit_of(s) == 0 && f->n_committed % s->snapshot_tokens != 0 &&
           f->n_committed != f->parting && is_far(s, f, f->n_committed);
}

/* The one to be evicted, of those that are idle; -1: none is. */
static int32_t next_victim(const sim *s)
{
    int32_t oldest[3] = {-1, -1, -1}, n_begun_with = 0;

    for (int32_t i = 0; i < s->n_snapshots; i++) {
        const snapshot_model *m = &s->snapshots[i];
        int32_t *first = &oldest[m->kind];

        if (!is_idle_snapshot(m))
            continue;
        n_begun_with += m->kind == BEGUN_WITH;
        if (*first < 0 || m->idle_since < s->snapshots[*first].idle_since)
            *first = i;
    }
    if (4 * n_begun_with > 3 * s->n_snapshots + s->n_snapshots % 4)
        return oldest[BEGUN_WITH];
    return oldest[SPACED] >= 0 ? oldest[SPACED]
           : oldest[END] >= 0  ? oldest[END]
                               : oldest[BEGUN_WITH];
}

/* The last snapshot of its output makes place for the next. False: it was evicted. */
static bool model_replace(sim *s, const fake *f)
{
    int32_t i = f->output >= 0 ? snapshot_of(s, f->output) : -1;

    if (f->output < 0)
        return true;
    if (i < 0)
        return false;
    if (is_idle_snapshot(&s->snapshots[i]) && s->snapshots[i].kind == END) {
        s->snapshots[i].used = false;
        seen.replaced++;
    }
    return true;
}

/* The snapshot that a step writes: a free one, or else the next victim. */
static void model_save(sim *s, fake *f, int32_t snapshot)
{
    int32_t n_full = f->n_committed / s->page_tokens;
    int32_t page = n_full > 0 ? f->pages[n_full - 1] : -1;
    int32_t n_free = 0, victim;

    f->saves_output = s->n_snapshots > 0 && f->n_committed > 0 && is_output(s, f);
    if (s->n_snapshots == 0 || f->n_committed == 0 ||
        !(f->saves_output || rows_end_at(s, f, f->n_committed)) || snapshot_of(s, page) >= 0) {
        SIM_CHECK(snapshot < 0);
        return;
    }
    if (f->saves_output && !model_replace(s, f)) {
        SIM_CHECK(snapshot < 0);
        seen.withheld++;
        return;
    }
    victim = next_victim(s);
    for (int32_t i = 0; i < s->n_snapshots; i++)
        n_free += !s->snapshots[i].used;
    if (n_free == 0 && victim < 0) {
        SIM_CHECK(snapshot < 0);
        seen.unsaved++;
        return;
    }
    SIM_CHECK(snapshot >= 0 && snapshot < s->n_snapshots);
    SIM_CHECK(n_free > 0 ? !s->snapshots[snapshot].used : snapshot == victim);
    seen.dropped += n_free == 0;
    seen.used_dropped += n_free == 0 && s->snapshots[victim].kind == BEGUN_WITH;
    s->snapshots[snapshot] = (snapshot_model){
        .used = true,
        .written = true,
        .page = page,
        .kind = f->n_committed % s->snapshot_tokens == 0 ? SPACED : END,
    };
    f->save = snapshot;
}

static void model_saved(sim *s, fake *f, bool kept)
{
    if (f->save < 0)
        return;
    s->snapshots[f->save].written = false;
    s->snapshots[f->save].idle_since = ++s->clock;
    s->snapshots[f->save].used = kept;
    seen.kept += kept;
    seen.ends += kept && s->snapshots[f->save].kind == END;
    seen.outputs += kept && f->saves_output;
    if (f->saves_output)
        f->output = kept ? s->snapshots[f->save].page : -1;
    f->save = -1;
}

/* ---- the backend's states ------------------------------------------------------------------ */

/* The rows of the ring from the state's border to `end` are the sequence's, and so is the state. */
static void check_state(const sim *s, const fake *f, const slot_model *slot, int32_t end)
{
    SIM_CHECK(s->n_states > 0);
    SIM_CHECK(slot->folded == (slot->at > 0 ? f->histories[slot->at - 1] : (uint64_t)f->key));
    for (int32_t p = slot->at; p < end; p++)
        SIM_CHECK(slot->ring[p % STATE_RING].position == p &&
                  slot->ring[p % STATE_RING].history == f->histories[p]);
}

static void fold(const sim *s, const fake *f, slot_model *slot, int32_t end)
{
    while (slot->at + STATE_CHUNK <= end) {
        check_state(s, f, slot, slot->at + STATE_CHUNK);
        slot->at += STATE_CHUNK;
        slot->folded = slot->ring[(slot->at - 1) % STATE_RING].history;
    }
}

/* What a step does, as far as `n_parts` of its parts: the load, the folds before its rows, the
 * save, its rows. */
static void run_state(sim *s, fake *f, const sp_state_step *step, int32_t n_rows, int32_t n_parts)
{
    slot_model *slot = &s->slots[step->slot];
    int32_t position = f->n_committed;

    if (n_parts-- == 0)
        return;
    if (position == 0) {
        slot->at = 0;
        slot->folded = (uint64_t)f->key;
    } else if (step->load >= 0) {
        const snapshot_model *m = &s->snapshots[step->load];

        SIM_CHECK(m->used && !m->written && m->holders > 0 && m->at == position);
        slot->at = position;
        slot->folded = m->folded;
    }
    SIM_CHECK(slot->at == step->folded);
    if (n_parts-- == 0)
        return;
    fold(s, f, slot, position);
    if (n_parts-- == 0)
        return;
    if (step->save >= 0) {
        SIM_CHECK(slot->at == position && position % unit_of(s) == 0);
        s->snapshots[step->save].at = position;
        s->snapshots[step->save].folded = slot->folded;
    }
    for (int32_t p = position; p < position + n_rows && n_parts-- > 0; p++) {
        check_state(s, f, slot, p);
        slot->ring[p % STATE_RING].position = p;
        slot->ring[p % STATE_RING].history = f->histories[p];
        if (p < position + step->n_final)
            fold(s, f, slot, p + 1);
    }
}

/* ---- the model's pages, given out ---------------------------------------------------------- */

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
    model_forget(s, page);
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

/* Each state has one sequence or none, and each snapshot the holders that begin with it. */
static void check_states(const sim *s)
{
    const sp_state_slots *states = &s->memory.states;
    int32_t holders[SNAPSHOTS_MAX] = {0}, n_used = 0, n_kept = 0;
    bool used[STATES_MAX] = {false};

    for (int32_t i = 0; i < SEQUENCES; i++) {
        const fake *f = &s->fakes[i];

        if (!f->live || !f->running)
            continue;
        SIM_CHECK(f->held.state.taken == (f->slot >= 0));
        if (f->load >= 0)
            holders[f->load]++;
        if (f->slot < 0)
            continue;
        SIM_CHECK(!used[f->slot] && s->slots[f->slot].used && f->held.state.slot == f->slot);
        used[f->slot] = true;
        n_used++;
    }
    for (int32_t i = 0; i < s->n_states; i++)
        SIM_CHECK(s->slots[i].used == used[i] && states->used[i] == used[i]);
    SIM_CHECK(states->n_free_states == s->n_states - n_used);
    for (int32_t i = 0; i < s->n_snapshots; i++) {
        const snapshot_model *m = &s->snapshots[i];

        n_kept += m->used;
        SIM_CHECK(states->pages[i] == (m->used ? m->page : -1));
        SIM_CHECK(!m->used || (m->holders == holders[i] && states->holders[i] == holders[i]));
        SIM_CHECK(!m->used || s->pages[m->page].known);
    }
    SIM_CHECK(sp_state_slots_n_kept(states) == n_kept);
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
    check_states(s);
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
    f->slot = f->load = f->save = f->output = -1;
    f->key = below(s, N_KEYS);
    f->n_tokens = 1 + below(s, TOKENS_MAX / 2);
    f->n_target = f->n_tokens + 1 + below(s, TOKENS_MAX - f->n_tokens);
    for (int32_t t = 0; t < f->n_tokens; t++)
        put_token(f, t, t < shared ? 7 : below(s, 2));
    SIM_CHECK(sp_held_memory_create(&s->memory, f->n_target, &f->held) == SP_OK);
    f->held.key = key_of(f->key);
    f->n_prompt = f->held.n_prompt = below(s, 4) > 0 ? f->n_tokens : 0;
}

/* The known pages that it may begin with, of at most `limit` tokens, go to its table. */
static void model_resume(sim *s, fake *f, int32_t limit)
{
    int32_t n = 0, n_usable = 0;

    while (s->prefix_cache && (n + 1) * s->page_tokens <= limit) {
        int32_t page = model_find(s, f->histories[(n + 1) * s->page_tokens - 1]), snapshot;

        if (page < 0)
            break;
        f->pages[n++] = page;
        snapshot = snapshot_of(s, page);
        if (s->n_states > 0 && (snapshot < 0 || s->snapshots[snapshot].written))
            continue;
        n_usable = n;
        f->load = snapshot;
    }
    while (f->n_pages < n_usable)
        s->pages[f->pages[f->n_pages++]].holders++;
    f->n_committed = f->folded = f->begun = f->n_pages * s->page_tokens;
    f->parting = n * s->page_tokens / unit_of(s) * unit_of(s);
    if (s->n_snapshots == 0 || f->n_prompt == 0 || f->parting <= f->n_committed)
        f->parting = 0;
    seen.partings += f->parting > 0;
    if (f->load < 0)
        return;
    s->snapshots[f->load].holders++;
    s->snapshots[f->load].kind = BEGUN_WITH;
    seen.loaded++;
}

static void start(sim *s, fake *f)
{
    int32_t limit = below(s, 8) == 0 ? below(s, f->n_tokens) : f->n_tokens - 1;
    int32_t n;

    f->running = true;
    if (below(s, 8) == 0)
        return; /* it computes all of its rows */
    model_resume(s, f, limit);
    n = sp_sequence_memory_resume(&s->memory, &f->held, f->tokens, limit);
    SIM_CHECK(n == f->n_committed);
    SIM_CHECK(f->load < 0 || (f->held.state.loads && f->held.state.load == f->load));
    seen.resumed += (uint64_t)n;
}

/* It holds nothing any more; the memory has been told. */
static void model_release(sim *s, fake *f)
{
    model_saved(s, f, false);
    model_drop_load(s, f);
    if (f->slot >= 0)
        s->slots[f->slot].used = false;
    model_trim(s, f, 0);
    f->slot = f->output = -1;
    f->n_committed = f->folded = f->begun = f->parting = 0;
    f->running = f->in_step = false;
}

static void release(sim *s, fake *f)
{
    sp_sequence_memory_release(&s->memory, &f->held);
    model_release(s, f);
}

static void drop(sim *s, fake *f)
{
    release(s, f);
    sp_held_memory_destroy(&f->held);
    f->live = false;
}

/* ---- a step of one sequence ---------------------------------------------------------------- */

/* Whether it has a state, or gets one with a reservation. */
static bool finds_state(const sim *s, const fake *f)
{
    int32_t n_free = 0;

    for (int32_t i = 0; i < s->n_states; i++)
        n_free += !s->slots[i].used;
    return s->n_states == 0 || f->slot >= 0 || n_free > 0;
}

static int32_t reserve(sim *s, fake *f, int32_t want)
{
    int32_t expected, n;
    bool stateful = finds_state(s, f);

    model_trim(s, f, pages_for(s, f->n_committed));
    expected = (f->n_pages + count_pages(s, true) + count_pages(s, false)) * s->page_tokens;
    expected = min_of(want, expected - f->n_committed);
    for (int32_t p = f->n_committed + 1; s->n_snapshots > 0 && p < f->n_committed + expected; p++)
        if (rows_end_at(s, f, p))
            expected = p - f->n_committed;
    if (!stateful)
        expected = 0;
    n = sp_sequence_memory_reserve(&s->memory, &f->held, want);
    SIM_CHECK(n == expected && sp_sequence_memory_may_write(&s->memory, &f->held));
    while (f->n_pages < pages_for(s, f->n_committed + n)) {
        int32_t page = f->held.pages[f->n_pages];

        SIM_CHECK(page >= 0 && page < s->n_pages);
        model_take(s, page);
        f->pages[f->n_pages++] = page;
    }
    if (s->n_states > 0 && f->slot < 0 && stateful) {
        f->slot = f->held.state.slot;
        SIM_CHECK(f->slot >= 0 && f->slot < s->n_states && !s->slots[f->slot].used);
        s->slots[f->slot].used = true;
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

    SIM_CHECK(sp_sequence_memory_commit(&s->memory, &f->held, f->tokens, n_rows));
    f->in_step = false;
    model_saved(s, f, true);
    model_drop_load(s, f);
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
    int32_t border = (f->n_committed + f->held.state.n_final) / STATE_CHUNK * STATE_CHUNK;
    bool lost = s->n_states > 0 && f->n_committed > 0 && f->load < 0 && border != f->folded;
    int32_t way = below(s, 3);
    bool kept = true;

    seen.failed_steps++;
    f->in_step = false;
    if (way == 0 && s->n_states == 0)
        return; /* the next reserve, or a release, replaces the reservation */
    if (way == 1)
        kept = sp_sequence_memory_rollback(&s->memory, &f->held);
    else
        kept = sp_sequence_memory_commit(&s->memory, &f->held, f->tokens, 0);
    SIM_CHECK(kept == !lost);
    if (lost) {
        model_release(s, f);
        seen.lost++;
        return;
    }
    model_saved(s, f, false);
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

/* Begins a step of n rows, the first n_final of which count in any case, and plays the backend; a
 * step that is to fail does any part of it. */
static void begin_state(sim *s, fake *f, int32_t n, int32_t n_final, bool fails)
{
    sp_state_step step = sp_sequence_memory_begin_step(&s->memory, &f->held, n_final);

    if (s->n_states == 0)
        return;
    SIM_CHECK(step.slot == f->slot && step.folded == f->folded && step.load == f->load);
    SIM_CHECK(step.n_final == n_final);
    model_save(s, f, step.save);
    run_state(s, f, &step, n, fails ? below(s, n + 4) : n + 3);
    if (!fails)
        f->folded = (f->n_committed + n_final) / STATE_CHUNK * STATE_CHUNK;
}

/* The step of its reserved rows is over, and the first j of its drafts are accepted. */
static void finish(sim *s, fake *f)
{
    int32_t pending = f->n_tokens - f->n_committed, n = f->n_rows, accepted;

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

/* Rows n_committed .. n_tokens - 1, and then drafts. */
static void step(sim *s, fake *f)
{
    int32_t pending = f->n_tokens - f->n_committed, drafts = 0, n;
    bool fails = below(s, 12) == 0;

    if (pending == 1 && below(s, 2) == 0)
        drafts = min_of(below(s, DRAFTS_MAX + 1), f->n_target - f->n_tokens);
    for (int32_t i = 0; i < drafts; i++)
        put_token(f, f->n_tokens + i, below(s, 2));
    n = reserve(s, f, drafts > 0 ? 1 + drafts : min_of(pending, 1 + below(s, CHUNK_MAX)));
    if (n == 0) {
        make_room(s, f);
        return;
    }
    if (below(s, 8) == 0)
        return; /* it is planned anew: nothing has begun */
    f->n_rows = n;
    f->in_step = true;
    begin_state(s, f, n, min_of(n, pending), fails);
    compute(s, f, n);
    if (fails)
        fail_step(s, f);
    else if (below(s, 2) == 0)
        finish(s, f);
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
    else if (f->in_step && kind < 92)
        finish(s, f);
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
    if (seed % 4 != 1) {
        s->n_states = STATES_MAX - below(s, 2) * below(s, STATES_MAX);
        s->n_snapshots = s->prefix_cache ? below(s, SNAPSHOTS_MAX + 1) : 0;
        s->snapshot_tokens = unit_of(s) * (1 + below(s, 6));
    }
    options = (sp_sequence_memory_options){
        .n_pages = s->n_pages,
        .page_tokens = s->page_tokens,
        .prefix_cache = s->prefix_cache,
        .n_states = s->n_states,
        .state_chunk = STATE_CHUNK,
        .n_snapshots = s->n_snapshots,
        .snapshot_tokens = s->snapshot_tokens,
    };
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
    print_message(
        "states lost %llu; snapshots kept %llu, read %llu, dropped %llu, not taken for want "
        "of a free one %llu\n",
        (unsigned long long)seen.lost, (unsigned long long)seen.kept,
        (unsigned long long)seen.loaded, (unsigned long long)seen.dropped,
        (unsigned long long)seen.unsaved);
    print_message("snapshots at ends kept %llu, of outputs %llu, replaced %llu, not taken again "
                  "%llu; partings %llu; dropped though begun with %llu\n",
                  (unsigned long long)seen.ends, (unsigned long long)seen.outputs,
                  (unsigned long long)seen.replaced, (unsigned long long)seen.withheld,
                  (unsigned long long)seen.partings, (unsigned long long)seen.used_dropped);
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
    assert_true(seen.lost > 0 && seen.kept > 0 && seen.loaded > 0 && seen.dropped > 0);
    assert_true(seen.unsaved > 0 && seen.ends > seen.outputs && seen.outputs > 0);
    assert_true(seen.replaced > 0 && seen.withheld > 0 && seen.partings > 0);
    assert_true(seen.used_dropped > 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_random_lives)};

    seeds = seeds_of(argc, argv, 500);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
