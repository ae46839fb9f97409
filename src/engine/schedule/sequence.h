/*
 * engine: the host model: weights, forward pass, KV pages, scheduler, sampler, tokenizer. It
 * reaches adapters, pool, routing and deltas only through their public headers, and knows no HTTP.
 *
 * sequence.h: one request inside the engine. Its tokens are the prompt and those sampled since; the
 * first memory.n_committed of them have their keys and values in the cache. A prefill chunk, a
 * decode step and the recomputation after a preemption are all the same thing: rows n_committed ..
 * n_tokens - 1 that have not been computed yet. The last of them yields the next token. Drafts are
 * rows after it, each of which yields one more token as long as the choice before was its draft.
 */
#ifndef SP_ENGINE_SCHEDULE_SEQUENCE_H
#define SP_ENGINE_SCHEDULE_SEQUENCE_H

#include "engine/sampling/ends.h"
#include "engine/sampling/penalties.h"
#include "engine/sampling/sampler.h"
#include "engine/sampling/stop.h"
#include "engine/schedule/draft.h"
#include "engine/schedule/sequence_memory.h"
#include "engine/tokenizer/tokenizer.h"
#include "grammar/grammar.h"

#include <sidepath/engine.h>
#include <sidepath/route.h>
#include <sidepath/stage.h>

typedef enum sp_sequence_state {
    SP_SEQUENCE_WAITING = 0, /* holds no memory */
    SP_SEQUENCE_RUNNING = 1
} sp_sequence_state;

/* The request's parameters; they never change after submission. */
typedef struct sp_sequence_request {
    int32_t n_prompt, max_tokens;
    float lora_scale;
    bool logprobs, prompt_logprobs, processed_logprobs;
    int32_t top_logprobs;
    int32_t n_given; /* tokens before its output: n_prompt, or fewer where the end of the prompt is
                        scored as an output */
    sp_logits_fn logits_fn; /* NULL: the caller does not read logits */
    void *logits_user;
    int32_t logits_from;
} sp_sequence_request;

/* How its next token is chosen from a row of logits, and which positions were scored. */
typedef struct sp_sequence_sampling {
    sp_sample_params params;
    sp_penalties penalties;
    sp_logit_bias *bias; /* [penalties.n_bias], owned */
    bool adjusted;       /* bias or penalties change its logits */
    sp_ends ends;
    int32_t n_scored; /* with prompt_logprobs: positions that were scored, or are not to be */
} sp_sequence_sampling;

/* The grammar of its output, and where the output is in it. */
typedef struct sp_sequence_constraint {
    sp_grammar *grammar; /* a reference; NULL: it has none */
    sp_grammar_place place;
} sp_sequence_constraint;

/* The experts that its tokens were routed to, where the request wants them. Grows with the rows. */
typedef struct sp_sequence_routing {
    int32_t n_ids;  /* of a token: MoE layers times experts of each; 0: they are not wanted */
    uint16_t *ids;  /* [capacity, n_ids] by position, owned; drafts' rows are beyond n_tokens */
    int32_t n_rows; /* first positions whose rows were computed for it, whatever became of their
                       pages */
    int32_t capacity;
    bool failed; /* there was no memory */
} sp_sequence_routing;

/* The detokenized part of its output. Unused where the model has no tokenizer. */
typedef struct sp_sequence_text {
    sp_decoder decoder;
    sp_stop *stop;  /* NULL without stop strings */
    sp_text held;   /* text that could still begin a stop string */
    size_t n_shown; /* bytes of text that events have carried */
} sp_sequence_text;

/* Its place in the scheduler's queues. Only the scheduler writes it. */
typedef struct sp_sequence_queue {
    sp_sequence_state state;
    uint64_t slot_wait;        /* steps that it has waited for a slot that others held */
    uint64_t admitted_step;    /* of the scheduler, when it last began to run */
    int32_t n_tokens_admitted; /* tokens that it had then */
    bool paused;
} sp_sequence_queue;

/* What a draft model has computed of a sequence that runs. Only the draft model writes it. */
typedef struct sp_draft_trail {
    sp_held_memory memory; /* of that model's own pages; all zero: the sequence is not drafted */
    int32_t n_rows;        /* computed rows that are not committed yet, and */
    int32_t n_tokens;      /* tokens that the sequence had then; the rows after these are of */
    int32_t fed[SP_DRAFT_TOKENS_MAX]; /* its drafts */
} sp_draft_trail;

typedef struct sp_sequence {
    int64_t id;      /* rises with submission: the order of service */
    int32_t *tokens; /* [request.n_prompt + request.max_tokens], owned; after the first n_tokens
                        those that the current step verifies */
    int32_t n_tokens;
    sp_hold hold; /* the adapter version that it means, and its slot while it runs */
    sp_sequence_request request;
    sp_held_memory memory;
    sp_sequence_sampling sampling;
    sp_sequence_constraint constraint;
    sp_sequence_text text;
    sp_sequence_routing routing;
    sp_sequence_queue queue;
    sp_draft draft;
    sp_draft_trail trail;
    sp_request_trace trace;
} sp_sequence;

/* Whether the logits at a position are needed for the logprob of the prompt's next token. */
static inline bool sp_sequence_scores(const sp_sequence *sequence, int32_t position)
{
    return sequence->request.prompt_logprobs && position >= sequence->sampling.n_scored &&
           position < sequence->request.n_prompt - 1;
}

/* Rows that wait to be computed. */
static inline int32_t sp_sequence_pending(const sp_sequence *sequence)
{
    return sequence->n_tokens - sequence->memory.n_committed;
}

#endif
