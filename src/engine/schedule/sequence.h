/*
 * engine: the host model: weights, forward pass, KV pages, scheduler, sampler, tokenizer. It
 * reaches adapters, pool, routing and deltas only through their public headers, and knows no HTTP.
 *
 * sequence.h: one request inside the engine. Its tokens are the prompt and what was sampled since;
 * the first memory.n_committed of them have their keys and values in the cache. A prefill chunk, a
 * decode step and the recomputation after a preemption are all the same thing: rows n_committed ..
 * n_tokens - 1 that have not been computed yet. The last of them yields the next token.
 */
#ifndef SP_ENGINE_SCHEDULE_SEQUENCE_H
#define SP_ENGINE_SCHEDULE_SEQUENCE_H

#include "engine/sampling/ends.h"
#include "engine/sampling/penalties.h"
#include "engine/sampling/sampler.h"
#include "engine/sampling/stop.h"
#include "engine/schedule/sequence_memory.h"
#include "engine/tokenizer/tokenizer.h"

#include <sidepath/engine.h>
#include <sidepath/route.h>
#include <sidepath/stage.h>

typedef enum sp_sequence_state {
    SP_SEQUENCE_WAITING = 0, /* holds no memory */
    SP_SEQUENCE_RUNNING = 1
} sp_sequence_state;

typedef struct sp_sequence {
    int64_t id; /* rises with submission: the order of service */
    sp_sequence_state state;
    int32_t *tokens; /* [n_prompt + max_tokens], owned */
    int32_t n_prompt, n_tokens, max_tokens;
    sp_held_memory memory;

    sp_hold hold; /* the adapter version that it means, and its slot while it runs */
    float lora_scale;
    uint64_t slot_wait;        /* steps that it has waited for a slot that others held */
    uint64_t admitted_step;    /* of the scheduler, when it last began to run */
    int32_t n_tokens_admitted; /* tokens that it had then */

    sp_sample_params sampling;
    sp_penalties penalties;
    sp_logit_bias *bias; /* [penalties.n_bias], owned */
    bool adjusted;       /* bias or penalties change its logits */
    bool logprobs, prompt_logprobs;
    int32_t top_logprobs;
    int32_t n_scored; /* with prompt_logprobs: positions whose logits have been used up */
    sp_request_trace trace;
    sp_ends ends;
    sp_logits_fn logits_fn;
    void *logits_user;
    int32_t logits_from;

    sp_decoder decoder; /* unused where the model has no tokenizer */
    sp_stop *stop;      /* NULL without stop strings */
    sp_text held;       /* text that could still begin a stop string */
    size_t n_shown;     /* bytes of text that events have carried */
} sp_sequence;

/* Whether the logits at a position are wanted for the logprob of the prompt's next token. */
static inline bool sp_sequence_scores(const sp_sequence *sequence, int32_t position)
{
    return sequence->prompt_logprobs && position >= sequence->n_scored &&
           position < sequence->n_prompt - 1;
}

/* Rows that wait to be computed. */
static inline int32_t sp_sequence_pending(const sp_sequence *sequence)
{
    return sequence->n_tokens - sequence->memory.n_committed;
}

#endif
