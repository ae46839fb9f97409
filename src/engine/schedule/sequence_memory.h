/*
 * sequence_memory.h: the one owner of what sequences have computed and can continue from.
 *
 * It owns
 *   - the KV pages of the attention layers, as numbers: which are free, which are held by which
 *     sequence, which are idle (pages.h). kv_cache owns their bytes: one block of keys and
 *     one of values for each attention layer, and none for any other layer;
 *   - the prefix table: which pages hold which tokens (prefix.h);
 *   - the states of the recurrent layers, and snapshots of them, as numbers (state_slots.h);
 *   - for each sequence, its page table and its state, and how far it is reserved and committed.
 *
 * It must not know what tokens mean (they are compared, nothing else), requests, adapters (beyond
 * the key, which is compared as well), layers, weights, or the order of service: the scheduler
 * decides which sequences run, which are preempted and how many rows a step has.
 *
 * A sequence's life is `resume, { reserve, begin_step, the rows are computed, commit } ...,
 * release`, once for each time that it is admitted. One that is to compute all of its rows begins
 * with reserve:
 *
 *     resume      it holds nothing; it begins with the known pages of its first tokens
 *     reserve     the next k positions may be written
 *     begin_step  they will be; the first of them count whatever the step chooses. Needed where
 *                 there are recurrent layers
 *     commit      the first j of these k are computed and count; the others are rolled back
 *     rollback    none of them counts: a failed step, or rows that were never computed
 *     release     it holds nothing: finished, cancelled or preempted
 *
 * A prefill chunk and a decode step commit all that they reserved. A verify step reserves one
 * position and its drafts, and commits what was accepted. What is not committed never enters the
 * prefix table, and its pages are returned at once.
 *
 * A committed position is final: its page may be in the table, and then others read it. So only
 * reserved positions are ever written, and a page with reserved positions has one holder and is not
 * in the table. Of two pages with the same content one is kept: both hold the same bits, because a
 * row's bits depend on its key and tokens alone.
 *
 * Recurrent layers. Their state does not grow with the sequence and is advanced in place, so it is
 * not in pages: each sequence takes a state with its first reservation and returns it in release,
 * and where none is free nothing can be reserved. A state is at a border, a multiple of
 * state_chunk positions, and the rows after it are kept beside it (ops.h); it advances over the
 * borders that a step's first rows pass, those that count in any case, so that drafts which are
 * rejected leave nothing to undo. A step that failed may have advanced it or not: unless the next
 * one begins it anew, from zeros or from a snapshot, it is lost, and the sequence holds nothing.
 *
 * Pages alone are no beginning then. So the state is copied at some places: at every
 * snapshot_tokens positions; at the last border before the prompt's last token, from where the next
 * turn of a conversation goes on whose answer is written otherwise there; and at the last border up
 * to which the pages of the prompt were known when it began, where it parts from another. A step's
 * rows end there at the latest, and the next step of a sequence writes the snapshot before its own
 * rows, if the page that ends there has none. Of an output, the last border at which a step ended
 * has one, which the next one replaces. A place counts that is a quarter of snapshot_tokens or more
 * after the one before, or after where the sequence began. The snapshot belongs to its page and is
 * evicted with it or before it, in the order of state_slots.h. A resumed sequence begins at its
 * last page with a snapshot, which stays until the step that reads it is over.
 *
 * One thread at a time. All memory is taken in the two create calls. Pure: the same calls give the
 * same page numbers.
 */
#ifndef SP_ENGINE_SCHEDULE_SEQUENCE_MEMORY_H
#define SP_ENGINE_SCHEDULE_SEQUENCE_MEMORY_H

#include "engine/schedule/pages.h"
#include "engine/schedule/prefix.h"
#include "engine/schedule/state_slots.h"

/* The recurrent state of a sequence. All zero: none. */
typedef struct sp_held_state {
    bool taken;      /* it has the state `slot` */
    bool loads;      /* no step has read `load` yet, a snapshot at n_committed that it holds */
    bool in_step;    /* begin_step was called, and */
    bool saves;      /* the step writes the snapshot `save` */
    int32_t n_final; /* of the step */
    bool follows;    /* this one is of the output */
    int32_t slot, load, save;
    int32_t folded;  /* the border that the state is at */
    int32_t begun;   /* where the sequence resumed */
    int32_t parting; /* the last border up to which its pages were known then; 0: none after it */
    int32_t output;  /* 1 + the page of the last snapshot of its output; 0: none */
} sp_held_state;

/* What a step does with it: the members of sp_step_state (ops.h). */
typedef struct sp_state_step {
    int32_t slot, folded, load, save, n_final;
} sp_state_step;

/* The part of it that one sequence holds. All zero: nothing; may be released and destroyed. */
typedef struct sp_held_memory {
    sp_prefix_key key;     /* set once by its owner, before the first call */
    int32_t n_prompt;      /* likewise: tokens of its prompt; 0: snapshots at spaced places alone */
    int32_t *pages;        /* [pages_max] owned; position p is in page pages[p / page_tokens] */
    int32_t n_pages;       /* held pages: those of the first n_reserved positions */
    int32_t pages_max;     /* pages of its maximum length */
    int32_t n_committed;   /* computed positions: the next row is at this one */
    int32_t n_reserved;    /* positions that may be written end here; at least n_committed */
    int32_t n_known;       /* first pages that are in the prefix table */
    sp_prefix_place place; /* after them; undefined while there are none */
    sp_held_state state;
} sp_held_memory;

typedef struct sp_sequence_memory_options {
    int32_t n_pages;         /* 1 or more */
    int32_t page_tokens;     /* 1 or more */
    bool prefix_cache;       /* without it no page is known, and tokens are never read */
    int32_t n_states;        /* 0: there are no recurrent layers */
    int32_t state_chunk;     /* with them: positions from one border to the next */
    int32_t n_snapshots;     /* 0 without states or without prefix_cache; else with any */
    int32_t snapshot_tokens; /* a multiple of state_chunk and of page_tokens; of these two, one is a
                                multiple of the other */
} sp_sequence_memory_options;

typedef struct sp_sequence_memory {
    sp_sequence_memory_options options;
    sp_pages pages;
    sp_prefix prefix; /* all zero without options.prefix_cache */
    sp_state_slots states;
    uint64_t resumed_tokens; /* found computed by resume calls, over all sequences */
} sp_sequence_memory;

/* SP_ERR_MEMORY: *out_memory is unchanged, and nothing is left allocated. */
sp_status sp_sequence_memory_create(const sp_sequence_memory_options *options,
                                    sp_sequence_memory *out_memory);
/* After the last sequence has released its pages. An all-zero struct is fine. */
void sp_sequence_memory_destroy(sp_sequence_memory *memory);

/* An empty page table for at most n_tokens_max (1 or more) positions, with a key of zeros.
 * SP_ERR_MEMORY: *out_held is unchanged. */
sp_status sp_held_memory_create(const sp_sequence_memory *memory, int32_t n_tokens_max,
                                sp_held_memory *out_held);
/* Frees the table; its pages were released before. An all-zero struct is fine. */
void sp_held_memory_destroy(sp_held_memory *held);

/*
 * Begins a sequence that holds nothing. It now holds the longest known run of pages with the first
 * of its tokens under its key, with at most n_tokens (0 or more) of them; with recurrent layers,
 * the longest one that ends at a snapshot. Returns how many positions are committed now: the caller
 * computes from there on. `tokens` [n_tokens] are borrowed for the call; NULL is fine without a
 * prefix cache.
 */
int32_t sp_sequence_memory_resume(sp_sequence_memory *memory, sp_held_memory *held,
                                  const int32_t *tokens, int32_t n_tokens);

/*
 * Makes the next n_rows (0 or more) positions writable and returns for how many of them there are
 * pages: from 0 to n_rows, and none beyond the next place of a snapshot. Takes free pages first,
 * then evicts idle ones. Replaces a reservation of which no step has begun. The sequence's length
 * is limited by its table (pages_max).
 */
int32_t sp_sequence_memory_reserve(sp_sequence_memory *memory, sp_held_memory *held,
                                   int32_t n_rows);

/*
 * A step is going to compute the reserved rows. The first n_final (1 or more) of them will count,
 * unless the step fails. Returns what it is to do with the state; to be followed by commit,
 * rollback or release. Without recurrent layers it does nothing.
 */
sp_state_step sp_sequence_memory_begin_step(sp_sequence_memory *memory, sp_held_memory *held,
                                            int32_t n_final);

/*
 * The first n_rows (0 to what is reserved; in a step 0, or n_final and more) of the reserved
 * positions are computed; the others are rolled back. `tokens` [n_committed + n_rows] are the
 * sequence's from its first, borrowed for the call; NULL is fine without a prefix cache. Full pages
 * are in the prefix table from now on; one with the same content as another page is given back, and
 * the table names the other. Returns false where none counts and the state is lost: the sequence
 * holds nothing now, and begins again.
 */
bool sp_sequence_memory_commit(sp_sequence_memory *memory, sp_held_memory *held,
                               const int32_t *tokens, int32_t n_rows);

/* Returns what is reserved and not committed, as a commit of no rows. Without a reservation it does
 * nothing. */
bool sp_sequence_memory_rollback(sp_sequence_memory *memory, sp_held_memory *held);

/* The sequence holds nothing, as after its creation. Its known pages stay known until they are
 * evicted. */
void sp_sequence_memory_release(sp_sequence_memory *memory, sp_held_memory *held);

/* Pages without holders: free ones, and idle ones that can be evicted. */
static inline int32_t sp_sequence_memory_available(const sp_sequence_memory *memory)
{
    return sp_pages_available(&memory->pages);
}

/* The idle ones among them, whose content is known. */
static inline int32_t sp_sequence_memory_evictable(const sp_sequence_memory *memory)
{
    return memory->pages.n_idle;
}

/* The most pages that were held at a time. */
static inline int32_t sp_sequence_memory_used_max(const sp_sequence_memory *memory)
{
    return memory->pages.used_max;
}

/* Whether there are pages now for n_tokens (0 or more) positions of a sequence without memory, and
 * a state where it needs one. */
bool sp_sequence_memory_has_room(const sp_sequence_memory *memory, int32_t n_tokens);

/* The positions of all pages together. */
int64_t sp_sequence_memory_capacity(const sp_sequence_memory *memory);

/*
 * Every page is in exactly one place (free, held or idle), and the prefix table has exactly the
 * known ones, each after a page that is held at least as often. Every state and every snapshot is
 * in one place as well, and the pages of the snapshots are known. For assertions and tests: time
 * grows with the number of pages.
 */
bool sp_sequence_memory_is_consistent(const sp_sequence_memory *memory);

/* Whether it is the only holder of the pages after its committed positions. True for one that holds
 * nothing. */
bool sp_sequence_memory_may_write(const sp_sequence_memory *memory, const sp_held_memory *held);

#endif
