/*
 * scheduler.h: which rows of which sequences make up the next step. Owns the order of service and
 * the pages of sequences; knows nothing of weights, adapters or time: the same calls in the same
 * order give the same steps.
 *
 * Policy. Sequences are served in the order of submission. First every running sequence that has
 * one row pending (decode), then the running ones with more (prefill chunks), then waiting ones
 * are admitted while pages for all their tokens and one more are free. A sequence that needs a
 * page when none is free preempts the youngest running sequence that is younger than itself; the
 * youngest of all just sits the step out. So the oldest always advances, and nothing starves.
 * A preempted sequence gives all its pages back and waits, in its old place in the order; its
 * tokens and its sampler's position stay, so its output does not change.
 *
 * Adapters. A waiting sequence runs only while its adapter is in a slot, which a gate gives and
 * takes; a sequence holds its slot exactly while it is running. One that cannot have a slot yet
 * lets those behind it pass. Fairness is counted in steps: when some sequence has waited
 * adapter_wait_steps for slots that others hold, counted from the last time that a slot changed
 * hands, no new sequence of an adapter in a slot is admitted; after adapter_preempt_steps the
 * sequences of the slot that has been in use longest are preempted, once each of them has yielded
 * a token since it was admitted. So every adapter gets its turn, and every turn gets on.
 *
 * Prefix cache. Full pages are remembered with what is in them. A sequence that is admitted begins
 * with the known pages of its tokens, and computes at least its last token. A page that nobody
 * holds stays until a page is needed; nobody is preempted while such a page is left.
 */
#ifndef SP_ENGINE_SCHEDULE_SCHEDULER_H
#define SP_ENGINE_SCHEDULE_SCHEDULER_H

#include "engine/schedule/pages.h"
#include "engine/schedule/prefix.h"
#include "engine/schedule/sequence.h"

/* n_rows rows of one sequence, from position sequence->n_computed on. */
typedef struct sp_batch_entry {
    sp_sequence *sequence;
    int32_t n_rows;
} sp_batch_entry;

typedef struct sp_batch {
    sp_batch_entry *entries; /* [max_running], ascending by sequence id */
    int32_t n_entries, n_rows;
} sp_batch;

/*
 * Where slots come from. `ask`, in every step for every waiting sequence: SP_OK, it could have its
 * slot; SP_POOL_FULL or SP_BUSY, it waits for what others hold; another positive status, it waits;
 * negative, it can never run. `take` after an `ask` that said SP_OK gives it the slot.
 */
typedef struct sp_slot_gate {
    void *user;
    sp_status (*ask)(void *user, sp_sequence *sequence, bool give_way);
    sp_status (*take)(void *user, sp_sequence *sequence);
    void (*yield)(void *user, sp_sequence *sequence);
    bool (*can_yield)(void *user, const sp_sequence *sequence);
    uint64_t (*handovers)(void *user); /* times that a slot has changed hands */
} sp_slot_gate;

typedef struct sp_scheduler_options {
    int32_t max_running, step_rows, prefill_chunk, page_tokens, n_pages;
    uint64_t adapter_wait_steps, adapter_preempt_steps;
    sp_slot_gate gate; /* all NULL: every sequence may run */
    bool prefix_cache; /* sequences begin with pages that others have computed */
} sp_scheduler_options;

typedef struct sp_scheduler {
    sp_scheduler_options options;
    sp_pages pages;
    sp_prefix prefix;       /* unused without options.prefix_cache */
    uint64_t prefix_tokens; /* that were found in it */
    sp_sequence **running;  /* [max_running], ascending by id, owned as pointers only */
    int32_t n_running;
    sp_sequence **waiting; /* ascending by id */
    int32_t n_waiting, waiting_capacity;
    sp_batch batch;
    uint64_t preemptions, rotations; /* the second: slots emptied by preemption */
    uint64_t step;
    uint64_t handovers, handover_step; /* as last seen, and when it last rose */
    uint64_t slot_wait;                /* the longest wait for a slot, as fairness counts it */
    bool slot_wait_full;               /* it is for a slot, not for room in the host cache */
    sp_sequence *failed;               /* of the last plan: one that can never run, or NULL */
    sp_status failed_status;
} sp_scheduler;

sp_status sp_scheduler_create(const sp_scheduler_options *options, sp_scheduler *out_scheduler);
void sp_scheduler_destroy(sp_scheduler *scheduler);

/* Queues a sequence. Borrowed until sp_scheduler_remove. SP_ERR_MEMORY: nothing was queued. */
sp_status sp_scheduler_add(sp_scheduler *scheduler, sp_sequence *sequence);

/* Takes a sequence out, running or waiting, and its pages back. */
void sp_scheduler_remove(sp_scheduler *scheduler, sp_sequence *sequence);

/*
 * Plans the next step: fills scheduler->batch and reserves the pages that its rows will write. Not
 * a state change of the sequences' tokens: the caller calls sp_scheduler_advance after the step,
 * before it removes sequences. Empty
 * batch: nothing runs, and what waits (n_waiting) waits for an adapter. A sequence that can never
 * run is left in scheduler->failed, still waiting: the caller removes it.
 */
const sp_batch *sp_scheduler_plan(sp_scheduler *scheduler);

/* The sequence's next n_rows rows have been computed. */
void sp_scheduler_advance(sp_scheduler *scheduler, sp_sequence *sequence, int32_t n_rows);

#endif
