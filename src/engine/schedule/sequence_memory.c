#include "engine/schedule/sequence_memory.h"

#include "base/alloc.h"
#include "base/assert.h"

/* ---- set-up -------------------------------------------------------------------------------- */

sp_status sp_sequence_memory_create(const sp_sequence_memory_options *options,
                                    sp_sequence_memory *out_memory)
{
    sp_sequence_memory memory = {.options = *options};

    SP_ASSERT(options->n_snapshots == 0 || (options->n_states > 0 && options->prefix_cache));
    if (sp_pages_create(options->n_pages, &memory.pages) != SP_OK ||
        (options->prefix_cache &&
         sp_prefix_create(options->n_pages, options->page_tokens, &memory.prefix) != SP_OK) ||
        sp_state_slots_create(options->n_states, options->n_snapshots, options->n_pages,
                              &memory.states) != SP_OK) {
        sp_sequence_memory_destroy(&memory);
        return SP_ERR_MEMORY;
    }
    *out_memory = memory;
    return SP_OK;
}

void sp_sequence_memory_destroy(sp_sequence_memory *memory)
{
    SP_ASSERT(sp_sequence_memory_available(memory) == memory->pages.n_pages);
    SP_ASSERT(memory->states.n_free_states == memory->states.n_states);
    sp_state_slots_destroy(&memory->states);
    sp_prefix_destroy(&memory->prefix);
    sp_pages_destroy(&memory->pages);
    *memory = (sp_sequence_memory){0};
}

sp_status sp_held_memory_create(const sp_sequence_memory *memory, int32_t n_tokens_max,
                                sp_held_memory *out_held)
{
    sp_held_memory held = {.pages_max = sp_pages_for(n_tokens_max, memory->options.page_tokens)};

    held.pages = sp_calloc((size_t)held.pages_max, sizeof *held.pages);
    if (!held.pages)
        return SP_ERR_MEMORY;
    *out_held = held;
    return SP_OK;
}

void sp_held_memory_destroy(sp_held_memory *held)
{
    SP_ASSERT(held->n_pages == 0 && !held->state.taken);
    sp_free(held->pages);
    *held = (sp_held_memory){0};
}

/* ---- pages --------------------------------------------------------------------------------- */

/* A page for a sequence to write into, or -1. */
static int32_t take_page(sp_sequence_memory *memory)
{
    int32_t page = sp_pages_take(&memory->pages);

    if (page >= 0)
        return page;
    page = sp_pages_evict(&memory->pages);
    if (page < 0)
        return -1;
    sp_prefix_remove(&memory->prefix, page);
    sp_state_slots_forget(&memory->states, page);
    return page;
}

/* From the last to the first, so that a page becomes idle before the one that it follows. */
static void give_pages_back(sp_sequence_memory *memory, sp_held_memory *held, int32_t n_kept)
{
    while (held->n_pages > n_kept)
        sp_pages_give(&memory->pages, held->pages[--held->n_pages]);
}

/* Those of its committed positions stay. */
static void give_rows_back(sp_sequence_memory *memory, sp_held_memory *held)
{
    SP_ASSERT(held->n_committed <= held->n_reserved);
    give_pages_back(memory, held, sp_pages_for(held->n_committed, memory->options.page_tokens));
    held->n_reserved = held->n_committed;
}

/* ---- states -------------------------------------------------------------------------------- */

static int32_t border_at(const sp_sequence_memory *memory, int32_t position)
{
    return position / memory->options.state_chunk * memory->options.state_chunk;
}

/* Whether it has what its rows need beside pages. */
static bool take_state(sp_sequence_memory *memory, sp_held_memory *held)
{
    sp_held_state *state = &held->state;

    if (memory->options.n_states == 0 || state->taken)
        return true;
    state->slot = sp_state_slots_take(&memory->states);
    state->taken = state->slot >= 0;
    return state->taken;
}

static void drop_load(sp_sequence_memory *memory, sp_held_state *state)
{
    if (state->loads)
        sp_state_slots_drop(&memory->states, state->load);
    state->loads = false;
}

static void end_snapshot(sp_sequence_memory *memory, sp_held_state *state, bool kept)
{
    if (!state->saves)
        return;
    if (state->follows)
        state->output = kept ? memory->states.pages[state->save] + 1 : 0;
    sp_state_slots_written(&memory->states, state->save, kept);
    state->saves = false;
}

static void give_state_back(sp_sequence_memory *memory, sp_held_memory *held)
{
    sp_held_state *state = &held->state;

    end_snapshot(memory, state, false);
    drop_load(memory, state);
    if (state->taken)
        sp_state_slots_give(&memory->states, state->slot);
    *state = (sp_held_state){0};
}

/* ---- places of snapshots ------------------------------------------------------------------- */

/* The last border that is the end of a page, of the first n_tokens positions. */
static int32_t place_within(const sp_sequence_memory *memory, int32_t n_tokens)
{
    int32_t chunk = memory->options.state_chunk, page = memory->options.page_tokens;
    int32_t unit = chunk > page ? chunk : page;

    SP_ASSERT(unit % chunk == 0 && unit % page == 0);
    return n_tokens / unit * unit;
}

/* The last token of a prompt is always computed: the place is of use to the same prompt, too. */
static int32_t prompt_place(const sp_sequence_memory *memory, const sp_held_memory *held)
{
    return held->n_prompt > 0 ? place_within(memory, held->n_prompt - 1) : 0;
}

/* Whether a place is far enough from the last one before it. */
static bool is_worth(const sp_sequence_memory *memory, const sp_held_memory *held, int32_t place)
{
    int32_t spacing = memory->options.snapshot_tokens;
    int32_t places[] = {held->state.begun, held->state.parting, prompt_place(memory, held)};
    int32_t before = place - place % spacing;

    if (before == place)
        return true;
    for (size_t i = 0; i < sizeof places / sizeof *places; i++)
        if (places[i] < place && places[i] > before)
            before = places[i];
    return place - before >= spacing / 4;
}

/* The next place after its committed positions where rows have to end. */
static int32_t next_place(const sp_sequence_memory *memory, const sp_held_memory *held)
{
    int32_t spacing = memory->options.snapshot_tokens, at = held->n_committed;
    int32_t places[] = {held->state.parting, prompt_place(memory, held)};
    int32_t next = at - at % spacing + spacing;

    for (size_t i = 0; i < sizeof places / sizeof *places; i++)
        if (places[i] > at && places[i] < next && is_worth(memory, held, places[i]))
            next = places[i];
    return next;
}

/* Whether a snapshot is to be written where the sequence is, and of which kind; *out_follows: it is
 * of the output. */
static bool is_place(const sp_sequence_memory *memory, const sp_held_memory *held,
                     sp_snapshot_kind *out_kind, bool *out_follows)
{
    int32_t at = held->n_committed, prompt = prompt_place(memory, held);

    *out_kind = SP_SNAPSHOT_SPACED;
    *out_follows = false;
    if (memory->options.n_snapshots == 0 || at == 0 || at != place_within(memory, at))
        return false;
    if (at % memory->options.snapshot_tokens == 0)
        return true;
    *out_kind = SP_SNAPSHOT_END;
    *out_follows = held->n_prompt > 0 && at > prompt && at != held->state.parting;
    return held->n_prompt > 0 && (at >= prompt || at == held->state.parting) &&
           is_worth(memory, held, at);
}

/* Begins to write a snapshot where the sequence is, if there is to be one. */
static void begin_snapshot(sp_sequence_memory *memory, sp_held_memory *held)
{
    sp_held_state *state = &held->state;
    sp_snapshot_kind kind;
    int32_t page;

    if (!is_place(memory, held, &kind, &state->follows))
        return;
    SP_ASSERT(held->n_known * memory->options.page_tokens == held->n_committed);
    page = held->pages[held->n_known - 1];
    if (sp_state_slots_has(&memory->states, page))
        return;
    if (state->follows && state->output > 0) {
        if (!sp_state_slots_has(&memory->states, state->output - 1))
            return; /* it was evicted: others want the memory, and it would take theirs */
        sp_state_slots_replace(&memory->states, state->output - 1, SP_SNAPSHOT_END);
    }
    state->save = sp_state_slots_write(&memory->states, page, kind);
    state->saves = state->save >= 0;
    if (!state->saves && state->follows)
        state->output = 0; /* the one before it is gone */
}

/* ---- steps --------------------------------------------------------------------------------- */

sp_state_step sp_sequence_memory_begin_step(sp_sequence_memory *memory, sp_held_memory *held,
                                            int32_t n_final)
{
    sp_held_state *state = &held->state;

    SP_ASSERT(n_final > 0 && n_final <= held->n_reserved - held->n_committed);
    SP_ASSERT(!state->in_step);
    if (memory->options.n_states == 0)
        return (sp_state_step){.load = -1, .save = -1};
    SP_ASSERT(state->taken && state->folded <= held->n_committed);
    state->in_step = true;
    state->n_final = n_final;
    begin_snapshot(memory, held);
    SP_ASSERT(!state->saves || !state->loads);
    return (sp_state_step){
        .slot = state->slot,
        .folded = state->folded,
        .load = state->loads ? state->load : -1,
        .save = state->saves ? state->save : -1,
        .n_final = n_final,
    };
}

/* The step is over, if there was one. Returns false where the state may be ahead of the committed
 * rows: it can be advanced only. */
static bool end_step(sp_sequence_memory *memory, sp_held_memory *held, bool counts)
{
    sp_held_state *state = &held->state;
    int32_t folded;

    if (!state->in_step)
        return true;
    state->in_step = false;
    folded = border_at(memory, held->n_committed + state->n_final);
    end_snapshot(memory, state, counts);
    if (!counts)
        return state->loads || held->n_committed == 0 || folded == state->folded;
    drop_load(memory, state);
    state->folded = folded;
    return true;
}

/* ---- reservations -------------------------------------------------------------------------- */

/* Rows up to the next place of a snapshot, at most. */
static int32_t rows_to_snapshot(const sp_sequence_memory *memory, const sp_held_memory *held,
                                int32_t n_rows)
{
    int32_t left;

    if (memory->options.n_snapshots == 0)
        return n_rows;
    left = next_place(memory, held) - held->n_committed;
    return n_rows < left ? n_rows : left;
}

int32_t sp_sequence_memory_reserve(sp_sequence_memory *memory, sp_held_memory *held, int32_t n_rows)
{
    int32_t page_tokens = memory->options.page_tokens;
    int32_t n_pages, page = 0;

    SP_ASSERT(n_rows >= 0 && !held->state.in_step);
    n_rows = rows_to_snapshot(memory, held, n_rows);
    n_pages = sp_pages_for(held->n_committed + n_rows, page_tokens);
    SP_ASSERT(n_pages <= held->pages_max);
    give_rows_back(memory, held);
    if (n_rows == 0 || !take_state(memory, held))
        return 0;
    while (held->n_pages < n_pages && (page = take_page(memory)) >= 0)
        held->pages[held->n_pages++] = page;
    held->n_reserved = held->n_committed + n_rows;
    if (held->n_reserved > held->n_pages * page_tokens)
        held->n_reserved = held->n_pages * page_tokens;
    SP_ASSERT(held->n_reserved >= held->n_committed);
    SP_ASSERT(sp_sequence_memory_may_write(memory, held));
    return held->n_reserved - held->n_committed;
}

bool sp_sequence_memory_rollback(sp_sequence_memory *memory, sp_held_memory *held)
{
    bool kept = end_step(memory, held, false);

    if (kept)
        give_rows_back(memory, held);
    else
        sp_sequence_memory_release(memory, held);
    return kept;
}

void sp_sequence_memory_release(sp_sequence_memory *memory, sp_held_memory *held)
{
    give_state_back(memory, held);
    give_pages_back(memory, held, 0);
    held->n_committed = held->n_reserved = held->n_known = 0;
    SP_ASSERT(sp_sequence_memory_is_consistent(memory));
}

/* ---- known pages --------------------------------------------------------------------------- */

static const int32_t *next_block(const sp_sequence_memory *memory, const sp_held_memory *held,
                                 const int32_t *tokens)
{
    return tokens + (size_t)held->n_known * (size_t)memory->options.page_tokens;
}

/* Advances over its next page, `page`, which has the next of its tokens and is in the table. */
static void pass_known(const sp_sequence_memory *memory, sp_held_memory *held,
                       const int32_t *tokens, int32_t page)
{
    SP_ASSERT(sp_pages_is_known(&memory->pages, page));
    held->place =
        sp_prefix_after(&memory->prefix, held->place, page, next_block(memory, held, tokens));
    held->n_known++;
}

/* It begins after n_usable of its known pages: another sequence has gone on as it will. */
static void note_parting(const sp_sequence_memory *memory, sp_held_memory *held, int32_t n_usable)
{
    int32_t place = place_within(memory, held->n_known * memory->options.page_tokens);

    held->state.parting = place > n_usable * memory->options.page_tokens ? place : 0;
}

/* Writes the known pages of its first n_blocks blocks to its table, and returns how many it may
 * begin with. Nobody holds them for it yet. */
static int32_t find_known(const sp_sequence_memory *memory, sp_held_memory *held,
                          const int32_t *tokens, int32_t n_blocks)
{
    sp_prefix_place place = held->place;
    int32_t n_usable = 0;

    while (held->n_known < n_blocks) {
        int32_t page = sp_prefix_find(&memory->prefix, &held->key, held->place,
                                      next_block(memory, held, tokens));

        if (page < 0)
            break;
        held->pages[held->n_known] = page;
        pass_known(memory, held, tokens, page);
        if (memory->options.n_states > 0 && sp_state_slots_find(&memory->states, page) < 0)
            continue;
        n_usable = held->n_known;
        place = held->place;
    }
    if (memory->options.n_snapshots > 0 && held->n_prompt > 0)
        note_parting(memory, held, n_usable);
    held->n_known = n_usable;
    held->place = place;
    return n_usable;
}

/* It begins at the snapshot of its last page. */
static void hold_snapshot(sp_sequence_memory *memory, sp_held_memory *held)
{
    sp_held_state *state = &held->state;

    if (memory->options.n_states == 0 || held->n_pages == 0)
        return;
    state->load = sp_state_slots_find(&memory->states, held->pages[held->n_pages - 1]);
    state->loads = true;
    state->folded = state->begun = held->n_committed;
    sp_state_slots_hold(&memory->states, state->load);
}

int32_t sp_sequence_memory_resume(sp_sequence_memory *memory, sp_held_memory *held,
                                  const int32_t *tokens, int32_t n_tokens)
{
    int32_t n_blocks = n_tokens / memory->options.page_tokens, n;

    SP_ASSERT(held->n_pages == 0 && held->n_committed == 0 && held->n_reserved == 0);
    SP_ASSERT(n_tokens >= 0 && n_blocks <= held->pages_max && !held->state.taken);
    if (!memory->options.prefix_cache)
        return 0;
    held->place = sp_prefix_begin(&held->key);
    n = find_known(memory, held, tokens, n_blocks);
    while (held->n_pages < n)
        sp_pages_share(&memory->pages, held->pages[held->n_pages++]);
    held->n_committed = held->n_reserved = n * memory->options.page_tokens;
    hold_snapshot(memory, held);
    memory->resumed_tokens += (uint64_t)held->n_committed;
    SP_ASSERT(sp_sequence_memory_is_consistent(memory));
    return held->n_committed;
}

/* Adds its next page, which is full, to the table, or replaces it by its equal there. */
static void remember_page(sp_sequence_memory *memory, sp_held_memory *held, const int32_t *tokens)
{
    const int32_t *block = next_block(memory, held, tokens);
    int32_t *page = &held->pages[held->n_known];
    int32_t twin;

    SP_ASSERT(sp_pages_is_private(&memory->pages, *page));
    if (held->n_known == 0)
        held->place = sp_prefix_begin(&held->key);
    twin = sp_prefix_find(&memory->prefix, &held->key, held->place, block);
    if (twin >= 0) {
        sp_pages_share(&memory->pages, twin);
        sp_pages_give(&memory->pages, *page);
        *page = twin;
    } else {
        sp_prefix_insert(&memory->prefix, &held->key, held->place, block, *page);
        sp_pages_set_known(&memory->pages, *page);
    }
    pass_known(memory, held, tokens, *page);
}

bool sp_sequence_memory_commit(sp_sequence_memory *memory, sp_held_memory *held,
                               const int32_t *tokens, int32_t n_rows)
{
    SP_ASSERT(n_rows >= 0 && n_rows <= held->n_reserved - held->n_committed);
    SP_ASSERT(!held->state.in_step || n_rows == 0 || n_rows >= held->state.n_final);
    if (n_rows == 0)
        return sp_sequence_memory_rollback(memory, held);
    SP_ASSERT(held->state.in_step || memory->options.n_states == 0);
    (void)end_step(memory, held, true);
    held->n_committed += n_rows;
    give_rows_back(memory, held);
    if (!memory->options.prefix_cache)
        return true;
    while ((held->n_known + 1) * memory->options.page_tokens <= held->n_committed)
        remember_page(memory, held, tokens);
    SP_ASSERT(held->n_known <= held->n_pages);
    return true;
}

/* ---- what there is ------------------------------------------------------------------------- */

bool sp_sequence_memory_has_room(const sp_sequence_memory *memory, int32_t n_tokens)
{
    return sp_pages_for(n_tokens, memory->options.page_tokens) <=
               sp_sequence_memory_available(memory) &&
           (memory->options.n_states == 0 || memory->states.n_free_states > 0);
}

int64_t sp_sequence_memory_capacity(const sp_sequence_memory *memory)
{
    return (int64_t)memory->pages.n_pages * memory->options.page_tokens;
}

/* The table's pages are known, and each comes after one that is held at least as often. */
static bool is_entry(const sp_sequence_memory *memory, int32_t page)
{
    const sp_pages *pages = &memory->pages;
    int32_t parent = memory->prefix.parents[page];

    return sp_prefix_has(&memory->prefix, page) &&
           (parent < 0 ||
            (sp_pages_is_known(pages, parent) && pages->holders[parent] >= pages->holders[page]));
}

bool sp_sequence_memory_is_consistent(const sp_sequence_memory *memory)
{
    const sp_pages *pages = &memory->pages;
    int32_t n_known = 0;

    if (!sp_pages_is_consistent(pages) || !sp_state_slots_is_consistent(&memory->states))
        return false;
    for (int32_t page = 0; page < pages->n_pages; page++) {
        if (!sp_pages_is_known(pages, page) && sp_state_slots_has(&memory->states, page))
            return false;
        if (!sp_pages_is_known(pages, page))
            continue;
        n_known++;
        if (!memory->options.prefix_cache || !is_entry(memory, page))
            return false;
    }
    return !memory->options.prefix_cache || sp_prefix_entries(&memory->prefix) == n_known;
}

bool sp_sequence_memory_may_write(const sp_sequence_memory *memory, const sp_held_memory *held)
{
    for (int32_t p = held->n_committed / memory->options.page_tokens; p < held->n_pages; p++)
        if (!sp_pages_is_private(&memory->pages, held->pages[p]))
            return false;
    return true;
}
