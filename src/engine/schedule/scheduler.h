/*
 * scheduler.h: which rows of which sequences make up the next step. Owns the order of service and
 * decides which sequences hold memory; sequence memory owns the pages and the prefix cache, and
 * reserves rows at its request. It knows nothing of weights, adapters or time: the same calls in
 * the same order give the same steps. One thread at a time.
 *
 * Policy. Sequences are served in the order of submission. First every running sequence that has
 * one row pending (decode), then the running ones with more (prefill chunks), then waiting ones are
 * admitted while there is memory for all their tokens and one more. A sequence that gets no memory
 * for its next row preempts the youngest running sequence that is younger than itself; the youngest
 * of all skips the step. So the oldest always advances, and nothing starves. A preempted sequence
 * releases all its memory and waits, in its old place in the order; its tokens and its sampler's
 * position stay, so its output does not change.
 *
 * Adapters. A sequence runs only while its adapter is in a slot; a gate assigns and releases slots,
 * and a sequence holds its slot exactly while it is running. One that cannot get a slot yet lets
 * those after it pass. Fairness is counted in steps: when some sequence has waited
 * adapter_wait_steps for slots that others hold, counted from the last time that a slot changed
 * hands, no new sequence of an adapter in a slot is admitted; after adapter_preempt_steps the
 * sequences of the slot that has been in use longest are preempted, once each of them has yielded a
 * token since it was admitted. So every adapter gets its turn, and every turn yields tokens.
 *
 * Pauses. A paused sequence has no rows and is not admitted; it keeps what it holds. When a
 * sequence that is not paused could not get rows or a place in a step, the youngest paused one that
 * runs is preempted before the next, so that a pause never stops others.
 *
 * Drafts. Rows and pages that are left over when all others have theirs go to the drafts of
 * sequences whose last row is in the step; for a draft no sequence waits or is preempted. How many
 * a sequence drafts depends on its own acceptance and on what a row costs (draft.h, step_cost.h).
 *
 * Prefix cache. An admitted sequence resumes after the tokens that sequence memory knows, and
 * computes at least its last token. No sequence is preempted while there is a page without holders,
 * and a state where it needs one.
 */
#ifndef SP_ENGINE_SCHEDULE_SCHEDULER_H
#define SP_ENGINE_SCHEDULE_SCHEDULER_H

#include "engine/schedule/sequence.h"
#include "engine/schedule/sequence_memory.h"
#include "engine/schedule/step_cost.h"

/* n_rows rows of one sequence, from position sequence->memory.n_committed on; the last n_drafts of
 * them are those of its drafts, tokens[n_tokens ..]. */
typedef struct sp_batch_entry {
    sp_sequence *sequence;
    int32_t n_rows, n_drafts;
} sp_batch_entry;

typedef struct sp_batch {
    sp_batch_entry *entries; /* [max_running], ascending by sequence id */
    int32_t n_entries, n_rows;
} sp_batch;

/*
 * The source of slots; all are called inside sp_scheduler_plan. `ask`, in every step for every
 * waiting sequence: SP_OK, it could get its slot; SP_POOL_FULL or SP_BUSY, it waits for what others
 * hold; another positive status, it waits; negative, it can never run. `take`, after an `ask` that
 * returned SP_OK, gives it the slot. `refused` is called for a waiting sequence that can never run,
 * and must remove it; the error is borrowed until return.
 */
typedef struct sp_slot_gate {
    void *user;
    sp_status (*ask)(void *user, sp_sequence *sequence, bool give_way, sp_error *error);
    sp_status (*take)(void *user, sp_sequence *sequence, sp_error *error);
    void (*refused)(void *user, sp_sequence *sequence, const sp_error *error);
    void (*yield)(void *user, sp_sequence *sequence);
    bool (*can_yield)(void *user, const sp_sequence *sequence);
    uint64_t (*handovers)(void *user); /* times that a slot has changed hands */
} sp_slot_gate;

/* A source of drafts that takes the place of prompt lookup and draft model. `propose` writes at
 * most n_max (1 or more) tokens that may follow the sequence's to out_tokens and returns how many;
 * ids below the vocabulary. */
typedef struct sp_draft_source {
    void *user;
    int32_t (*propose)(void *user, const sp_sequence *sequence, int32_t n_max, int32_t *out_tokens);
} sp_draft_source;

/* A sequence that wants drafts of a draft model, n_max (1 or more) at most. */
typedef struct sp_draft_call {
    sp_sequence *sequence;
    int32_t n_max;
    int32_t n_drafts; /* out: how many were written after its tokens; 0 before */
} sp_draft_call;

/*
 * A draft model; all are called inside calls of the scheduler. `propose`, at most once in a plan:
 * drafts for n (1 or more) running sequences, each in the plan once. `release`: the sequence runs
 * no more. `seconds`: what a draft takes; 0: not known.
 */
typedef struct sp_draft_model_calls {
    void *user;
    void (*propose)(void *user, sp_draft_call *calls, int32_t n);
    void (*release)(void *user, sp_sequence *sequence);
    double (*seconds)(void *user);
} sp_draft_model_calls;

typedef struct sp_scheduler_options {
    sp_sequence_memory *memory; /* borrowed until destruction; all sequences' memory is of it */
    int32_t max_running, step_rows, prefill_chunk;
    uint64_t adapter_wait_steps, adapter_preempt_steps;
    sp_slot_gate gate;             /* all NULL: every sequence may run */
    sp_draft_source drafts;        /* all NULL: prompt lookup, and the model where it finds none */
    sp_draft_model_calls model;    /* all NULL: there is none */
    const sp_step_cost *step_cost; /* of the steps so far, borrowed; NULL: not known */
} sp_scheduler_options;

/* What a waiting sequence waits for. */
typedef enum sp_wait {
    SP_WAIT_SLOT,  /* a slot, or room in the host cache, that others hold */
    SP_WAIT_LOAD,  /* its adapter, on its way */
    SP_WAIT_PAGES, /* or a state */
    SP_WAIT_BATCH, /* room in the batch, or those in front of it */
    SP_WAITS
} sp_wait;

typedef struct sp_scheduler {
    sp_scheduler_options options;
    sp_sequence **running; /* [max_running], ascending by id, owned as pointers only */
    int32_t n_running;
    sp_sequence **waiting; /* ascending by id */
    int32_t n_waiting, waiting_capacity;
    sp_batch batch;
    sp_draft_call *draft_calls;      /* [max_running] */
    double draft_costs[SP_DRAFTERS]; /* of a draft in the batch, in tokens (step_cost.h) */
    int32_t waits[SP_WAITS];         /* of n_waiting, in the last plan that could admit */
    uint64_t preemptions, rotations; /* rotations: slots emptied by preemption */
    uint64_t step;
    uint64_t handovers, handover_step; /* as last seen, and when it last rose */
    uint64_t slot_wait;                /* the longest wait for a slot, as fairness counts it */
    bool slot_wait_full;               /* it waits for a slot, not for the host cache */
    bool starved;                      /* in the last plan one that is not paused lacked memory or a
                                          place, and a paused one holds some */
} sp_scheduler;

/* options.memory is not NULL. *out_scheduler is owned by the caller. SP_ERR_MEMORY. */
sp_status sp_scheduler_create(const sp_scheduler_options *options, sp_scheduler *out_scheduler);
/* After the last sequence was removed. An all-zero struct is fine. */
void sp_scheduler_destroy(sp_scheduler *scheduler);

/* Queues a sequence. Borrowed until sp_scheduler_remove. SP_ERR_MEMORY: nothing was queued. */
sp_status sp_scheduler_add(sp_scheduler *scheduler, sp_sequence *sequence);

/* Removes a sequence, running or waiting, and releases its memory; the caller still owns it. */
void sp_scheduler_remove(sp_scheduler *scheduler, sp_sequence *sequence);

/* What happens to a sequence's rows from the next plan on. */
void sp_scheduler_set_paused(sp_sequence *sequence, bool paused);
/* Whether the next plan may find something to do: a waiting sequence that is not paused, or room to
 * be made. */
bool sp_scheduler_is_waiting(const sp_scheduler *scheduler);

/*
 * Plans the next step: fills scheduler->batch and reserves the memory that its rows will write. The
 * sequences' tokens do not change, drafts are written after them: the caller calls
 * sp_scheduler_advance after the step, before it removes sequences. A step that failed is planned
 * again, from the same rows. Never NULL, and valid until the next call; an empty batch: nothing
 * runs, and the waiting sequences (n_waiting) wait for adapters.
 */
const sp_batch *sp_scheduler_plan(sp_scheduler *scheduler);

/* Commits the first n_rows (0 or more) of the sequence's rows in the batch; the others are rolled
 * back. Where that loses the state of recurrent layers, it begins again from what is known. */
void sp_scheduler_advance(sp_scheduler *scheduler, sp_sequence *sequence, int32_t n_rows);

#endif
