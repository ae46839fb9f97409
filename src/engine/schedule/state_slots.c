#include "engine/schedule/state_slots.h"

#include "base/alloc.h"
#include "base/assert.h"

/* A stack of n numbers, 0 on its top; NULL without memory. */
static int32_t *create_stack(int32_t n)
{
    int32_t *stack = sp_calloc((size_t)n + 1, sizeof *stack);

    for (int32_t i = 0; stack && i < n; i++)
        stack[i] = n - 1 - i;
    return stack;
}

static int32_t *create_list(int32_t n, int32_t value)
{
    int32_t *list = sp_calloc((size_t)n + 1, sizeof *list);

    for (int32_t i = 0; list && i < n; i++)
        list[i] = value;
    return list;
}

sp_status sp_state_slots_create(int32_t n_states, int32_t n_snapshots, int32_t n_pages,
                                sp_state_slots *out_states)
{
    sp_state_slots states = {
        .n_states = n_states,
        .n_snapshots = n_snapshots,
        .n_pages = n_pages,
        .n_free_states = n_states,
        .n_free_snapshots = n_snapshots,
    };

    for (int32_t kind = 0; kind < SP_SNAPSHOT_KINDS; kind++)
        states.idle[kind] = (sp_idle_snapshots){.oldest = -1, .youngest = -1};

    states.free_states = create_stack(n_states);
    states.used = sp_calloc((size_t)n_states + 1, sizeof *states.used);
    states.free_snapshots = create_stack(n_snapshots);
    states.snapshots = create_list(n_snapshots > 0 ? n_pages : 0, -1);
    states.pages = create_list(n_snapshots, -1);
    states.holders = create_list(n_snapshots, 0);
    states.older = create_list(n_snapshots, -1);
    states.younger = create_list(n_snapshots, -1);
    states.written = sp_calloc((size_t)n_snapshots + 1, sizeof *states.written);
    states.kinds = sp_calloc((size_t)n_snapshots + 1, sizeof *states.kinds);
    if (!states.free_states || !states.used || !states.free_snapshots || !states.snapshots ||
        !states.pages || !states.holders || !states.older || !states.younger || !states.written ||
        !states.kinds) {
        sp_state_slots_destroy(&states);
        return SP_ERR_MEMORY;
    }
    *out_states = states;
    return SP_OK;
}

void sp_state_slots_destroy(sp_state_slots *states)
{
    sp_free(states->kinds);
    sp_free(states->written);
    sp_free(states->younger);
    sp_free(states->older);
    sp_free(states->holders);
    sp_free(states->pages);
    sp_free(states->snapshots);
    sp_free(states->free_snapshots);
    sp_free(states->used);
    sp_free(states->free_states);
    *states = (sp_state_slots){0};
}

/* ---- states -------------------------------------------------------------------------------- */

int32_t sp_state_slots_take(sp_state_slots *states)
{
    int32_t state, n_used;

    if (states->n_free_states == 0)
        return -1;
    state = states->free_states[--states->n_free_states];
    SP_ASSERT(!states->used[state]);
    states->used[state] = true;
    n_used = states->n_states - states->n_free_states;
    if (n_used > states->used_max)
        states->used_max = n_used;
    return state;
}

void sp_state_slots_give(sp_state_slots *states, int32_t state)
{
    SP_ASSERT(states->used[state]);
    states->used[state] = false;
    states->free_states[states->n_free_states++] = state;
}

/* ---- idle snapshots ------------------------------------------------------------------------ */

static void append_idle(sp_state_slots *states, int32_t snapshot)
{
    sp_idle_snapshots *idle = &states->idle[states->kinds[snapshot]];

    states->older[snapshot] = idle->youngest;
    states->younger[snapshot] = -1;
    if (idle->youngest >= 0)
        states->younger[idle->youngest] = snapshot;
    else
        idle->oldest = snapshot;
    idle->youngest = snapshot;
    idle->n++;
}

static void remove_idle(sp_state_slots *states, int32_t snapshot)
{
    sp_idle_snapshots *idle = &states->idle[states->kinds[snapshot]];
    int32_t older = states->older[snapshot], younger = states->younger[snapshot];

    if (older >= 0)
        states->younger[older] = younger;
    else
        idle->oldest = younger;
    if (younger >= 0)
        states->older[younger] = older;
    else
        idle->youngest = older;
    idle->n--;
}

/* ---- snapshots ----------------------------------------------------------------------------- */

/* It belongs to no page. */
static void free_snapshot(sp_state_slots *states, int32_t snapshot)
{
    states->snapshots[states->pages[snapshot]] = -1;
    states->pages[snapshot] = -1;
    states->free_snapshots[states->n_free_snapshots++] = snapshot;
    SP_ASSERT(states->n_free_snapshots <= states->n_snapshots);
}

/* The idle one to be evicted next, or -1. */
static int32_t next_victim(const sp_state_slots *states)
{
    const sp_idle_snapshots *used = &states->idle[SP_SNAPSHOT_USED];

    if (used->n > states->n_snapshots - states->n_snapshots / 4)
        return used->oldest;
    for (int32_t kind = 0; kind < SP_SNAPSHOT_KINDS; kind++)
        if (states->idle[kind].n > 0)
            return states->idle[kind].oldest;
    return -1;
}

int32_t sp_state_slots_write(sp_state_slots *states, int32_t page, sp_snapshot_kind kind)
{
    int32_t snapshot;

    SP_ASSERT(!sp_state_slots_has(states, page) && kind != SP_SNAPSHOT_USED);
    if (states->n_free_snapshots == 0) {
        int32_t victim = next_victim(states);

        if (victim < 0)
            return -1;
        sp_state_slots_forget(states, states->pages[victim]);
    }
    snapshot = states->free_snapshots[--states->n_free_snapshots];
    SP_ASSERT(states->pages[snapshot] < 0 && states->holders[snapshot] == 0);
    states->pages[snapshot] = page;
    states->snapshots[page] = snapshot;
    states->written[snapshot] = true;
    states->kinds[snapshot] = kind;
    return snapshot;
}

void sp_state_slots_written(sp_state_slots *states, int32_t snapshot, bool kept)
{
    SP_ASSERT(states->written[snapshot] && states->holders[snapshot] == 0);
    states->written[snapshot] = false;
    states->n_written += kept;
    if (kept)
        append_idle(states, snapshot);
    else
        free_snapshot(states, snapshot);
}

int32_t sp_state_slots_find(const sp_state_slots *states, int32_t page)
{
    int32_t snapshot = sp_state_slots_has(states, page) ? states->snapshots[page] : -1;

    return snapshot >= 0 && !states->written[snapshot] ? snapshot : -1;
}

void sp_state_slots_hold(sp_state_slots *states, int32_t snapshot)
{
    SP_ASSERT(states->pages[snapshot] >= 0 && !states->written[snapshot]);
    if (states->holders[snapshot]++ == 0)
        remove_idle(states, snapshot);
    states->kinds[snapshot] = SP_SNAPSHOT_USED;
}

void sp_state_slots_drop(sp_state_slots *states, int32_t snapshot)
{
    SP_ASSERT(states->holders[snapshot] > 0);
    if (--states->holders[snapshot] == 0)
        append_idle(states, snapshot);
}

void sp_state_slots_forget(sp_state_slots *states, int32_t page)
{
    int32_t snapshot = sp_state_slots_has(states, page) ? states->snapshots[page] : -1;

    if (snapshot < 0)
        return;
    SP_ASSERT(states->holders[snapshot] == 0 && !states->written[snapshot]);
    remove_idle(states, snapshot);
    free_snapshot(states, snapshot);
}

void sp_state_slots_replace(sp_state_slots *states, int32_t page, sp_snapshot_kind kind)
{
    int32_t snapshot = sp_state_slots_find(states, page);

    if (snapshot >= 0 && states->holders[snapshot] == 0 && states->kinds[snapshot] == kind)
        sp_state_slots_forget(states, page);
}

/* ---- what must hold ------------------------------------------------------------------------ */

static bool is_idle(const sp_state_slots *states, int32_t snapshot)
{
    return states->pages[snapshot] >= 0 && states->holders[snapshot] == 0 &&
           !states->written[snapshot];
}

/* A snapshot is that of its page; a free one has no holder and is not written. */
static bool is_placed(const sp_state_slots *states, int32_t snapshot)
{
    int32_t page = states->pages[snapshot], holders = states->holders[snapshot];

    if (holders < 0 || (states->written[snapshot] && holders > 0))
        return false;
    if (page < 0)
        return holders == 0 && !states->written[snapshot];
    return page < states->n_pages && states->snapshots[page] == snapshot;
}

static bool idle_list_is_whole(const sp_state_slots *states, sp_snapshot_kind kind)
{
    const sp_idle_snapshots *idle = &states->idle[kind];
    int32_t older = -1, n = 0;

    for (int32_t at = idle->oldest; at >= 0; older = at, at = states->younger[at])
        if (n++ == idle->n || !is_idle(states, at) || states->kinds[at] != kind ||
            states->older[at] != older)
            return false;
    return n == idle->n && idle->youngest == older;
}

/* All idle ones are in the lists of their kinds. */
static bool idle_lists_are_whole(const sp_state_slots *states, int32_t n_idle)
{
    for (int32_t kind = 0; kind < SP_SNAPSHOT_KINDS; kind++) {
        if (!idle_list_is_whole(states, (sp_snapshot_kind)kind))
            return false;
        n_idle -= states->idle[kind].n;
    }
    return n_idle == 0;
}

/* The free ones are those that are not in use. */
static bool stacks_are_right(const sp_state_slots *states)
{
    int32_t n_free_states = 0, n_free_snapshots = 0;

    for (int32_t state = 0; state < states->n_states; state++)
        n_free_states += !states->used[state];
    for (int32_t snapshot = 0; snapshot < states->n_snapshots; snapshot++)
        n_free_snapshots += states->pages[snapshot] < 0;
    if (n_free_states != states->n_free_states || n_free_snapshots != states->n_free_snapshots)
        return false;
    for (int32_t i = 0; i < n_free_states; i++)
        if (states->used[states->free_states[i]])
            return false;
    for (int32_t i = 0; i < n_free_snapshots; i++)
        if (states->pages[states->free_snapshots[i]] >= 0)
            return false;
    return true;
}

bool sp_state_slots_is_consistent(const sp_state_slots *states)
{
    int32_t n_idle = 0, n_of_pages = 0;

    if (!stacks_are_right(states))
        return false;
    for (int32_t snapshot = 0; snapshot < states->n_snapshots; snapshot++) {
        n_idle += is_idle(states, snapshot);
        if (!is_placed(states, snapshot))
            return false;
    }
    for (int32_t page = 0; states->n_snapshots > 0 && page < states->n_pages; page++)
        n_of_pages += states->snapshots[page] >= 0;
    return n_of_pages == sp_state_slots_n_kept(states) && idle_lists_are_whole(states, n_idle);
}
