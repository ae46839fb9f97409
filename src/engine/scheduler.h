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
 */
#ifndef SP_ENGINE_SCHEDULER_H
#define SP_ENGINE_SCHEDULER_H

#include "engine/pages.h"
#include "engine/sequence.h"

/* n_rows rows of one sequence, from position sequence->n_computed on. */
typedef struct sp_batch_entry {
    sp_sequence *sequence;
    int32_t n_rows;
} sp_batch_entry;

typedef struct sp_batch {
    sp_batch_entry *entries; /* [max_running], ascending by sequence id */
    int32_t n_entries, n_rows;
} sp_batch;

typedef struct sp_scheduler_options {
    int32_t max_running, step_rows, prefill_chunk, page_tokens, n_pages;
} sp_scheduler_options;

typedef struct sp_scheduler {
    sp_scheduler_options options;
    sp_pages pages;
    sp_sequence **running; /* [max_running], ascending by id, owned as pointers only */
    int32_t n_running;
    sp_sequence **waiting; /* ascending by id */
    int32_t n_waiting, waiting_capacity;
    sp_batch batch;
    uint64_t preemptions;
} sp_scheduler;

sp_status sp_scheduler_create(const sp_scheduler_options *options, sp_scheduler *out_scheduler);
void sp_scheduler_destroy(sp_scheduler *scheduler);

/* Queues a sequence. Borrowed until sp_scheduler_remove. SP_ERR_MEMORY: nothing was queued. */
sp_status sp_scheduler_add(sp_scheduler *scheduler, sp_sequence *sequence);

/* Takes a sequence out, running or waiting, and its pages back. */
void sp_scheduler_remove(sp_scheduler *scheduler, sp_sequence *sequence);

/*
 * Plans the next step: fills scheduler->batch and reserves the pages that its rows will write. Not
 * a state change of the sequences' tokens: the caller advances n_computed after the step. Empty
 * batch: nothing waits or runs.
 */
const sp_batch *sp_scheduler_plan(sp_scheduler *scheduler);

#endif
