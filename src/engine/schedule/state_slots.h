/*
 * state_slots.h: which recurrent states are in use, and which snapshots of them are kept. A part of
 * sequence memory, its only caller. Owns numbers only; the backend owns the bytes. Pure and
 * allocation-free after creation.
 *
 * A state belongs to one sequence. A snapshot is free, or it belongs to a page, the one that ends
 * where it was taken: it is written (by a step that is not over), held (sequences are to begin
 * with it), or idle. When none is free, an idle one is evicted: of those at spaced places that
 * nobody has begun with, then of the others that nobody has begun with, then of the rest, each time
 * the one that became idle first. So a long text that is read once evicts its own places, and not
 * what prompts begin with. While more than three of four are idle ones that were begun with, one of
 * these is evicted first: what was useful once makes way too.
 */
#ifndef SP_ENGINE_SCHEDULE_STATE_SLOTS_H
#define SP_ENGINE_SCHEDULE_STATE_SLOTS_H

#include <sidepath/status.h>

#include <stdbool.h>

/* Of snapshots, in the order in which they are evicted. */
typedef enum sp_snapshot_kind {
    SP_SNAPSHOT_SPACED, /* nobody has begun with it, likewise: */
    SP_SNAPSHOT_END,    /* where a prompt or an output ended, or two prompts parted */
    SP_SNAPSHOT_USED,   /* sequences have begun with it */
    SP_SNAPSHOT_KINDS
} sp_snapshot_kind;

/* The idle ones of a kind, in the order in which they became idle: ends of a list, or -1. */
typedef struct sp_idle_snapshots {
    int32_t oldest, youngest, n;
} sp_idle_snapshots;

typedef struct sp_state_slots {
    int32_t n_states, n_snapshots, n_pages;
    int32_t *free_states; /* [n_states], a stack: the last freed is taken first */
    int32_t n_free_states;
    bool *used;              /* [n_states] by a sequence */
    int32_t *free_snapshots; /* [n_snapshots], a stack as well */
    int32_t n_free_snapshots;
    int32_t *snapshots;       /* [n_pages] of each page, or -1 */
    int32_t *pages;           /* [n_snapshots] whose it is; -1: free */
    int32_t *holders;         /* [n_snapshots] sequences that are to begin with it */
    bool *written;            /* [n_snapshots] by a step that is not over */
    sp_snapshot_kind *kinds;  /* [n_snapshots] */
    int32_t *older, *younger; /* [n_snapshots] neighbours in the list of idle ones, or -1 */
    sp_idle_snapshots idle[SP_SNAPSHOT_KINDS];
    int32_t used_max;   /* the most states that were in use at a time */
    uint64_t n_written; /* snapshots that were kept */
} sp_state_slots;

/* n_states and n_snapshots: 0 or more; n_pages: 1 or more. *out_states is owned by the caller.
 * SP_ERR_MEMORY. */
sp_status sp_state_slots_create(int32_t n_states, int32_t n_snapshots, int32_t n_pages,
                                sp_state_slots *out_states);
/* An all-zero struct is fine. */
void sp_state_slots_destroy(sp_state_slots *states);

/* A free state, or -1. */
int32_t sp_state_slots_take(sp_state_slots *states);
void sp_state_slots_give(sp_state_slots *states, int32_t state);

/* A snapshot that a step writes, of a page that has none; -1: each is held or written. */
int32_t sp_state_slots_write(sp_state_slots *states, int32_t page, sp_snapshot_kind kind);
/* The step is over: the snapshot is kept, or it is free again. */
void sp_state_slots_written(sp_state_slots *states, int32_t snapshot, bool kept);

/* The kept snapshot of a page, or -1. */
int32_t sp_state_slots_find(const sp_state_slots *states, int32_t page);
/* One holder more, or less, of a kept snapshot, which is of the kind SP_SNAPSHOT_USED then. */
void sp_state_slots_hold(sp_state_slots *states, int32_t snapshot);
void sp_state_slots_drop(sp_state_slots *states, int32_t snapshot);

/* The page's content is known no more: its snapshot, if it has one, is idle, and free now. */
void sp_state_slots_forget(sp_state_slots *states, int32_t page);
/* The same, if the page has an idle snapshot of this kind. */
void sp_state_slots_replace(sp_state_slots *states, int32_t page, sp_snapshot_kind kind);

/* Each state and each snapshot is in one place, and the counts say so. Time grows with their
 * numbers and n_pages. */
bool sp_state_slots_is_consistent(const sp_state_slots *states);

static inline bool sp_state_slots_has(const sp_state_slots *states, int32_t page)
{
    return states->n_snapshots > 0 && states->snapshots[page] >= 0;
}

/* Snapshots that are kept, or written. */
static inline int32_t sp_state_slots_n_kept(const sp_state_slots *states)
{
    return states->n_snapshots - states->n_free_snapshots;
}

#endif
