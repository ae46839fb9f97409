/*
 * draft_model.h: drafts by a second, small model of the same tokenizer.
 *
 * It owns that model's weights, a backend of its own with its own KV cache, and the sequence memory
 * of these pages, which keeps the rules of the engine's own: a sequence holds pages while it runs,
 * and a state where the model has recurrent layers, resumes where its tokens are known, and rolls
 * back what was not accepted. All passes of one drafting are one step there. It must not know
 * adapters: the model is the base of nothing and drafts for all of them alike. It learns what was
 * accepted from the sequences' tokens alone.
 *
 * A draft is the token that the request's own rules (1 to 9 of docs/SAMPLING.md, with the random
 * number of its place) choose from this model's logits. So a draft model that were the model itself
 * would always be right, sampled or greedy. All sequences that draft do so together, one pass for
 * each of their next tokens. A sequence whose tokens are not computed here yet catches up first, a
 * prefill chunk in each step, and drafts when it has.
 *
 * Nothing that happens here changes a token: a pass that fails, or pages that are short, is no
 * draft. Engine thread.
 */
#ifndef SP_ENGINE_DRAFT_MODEL_H
#define SP_ENGINE_DRAFT_MODEL_H

#include "engine/engine_state.h"
#include "engine/model/preflight.h"

/* A sequence in the current drafting. */
typedef struct sp_drafting {
    sp_draft_call *call;
    int32_t n_rows;   /* of the first pass: tokens that were not computed yet */
    int32_t n_wanted; /* drafts; 0: it has to catch up first */
    sp_state_step state;
} sp_drafting;

struct sp_draft_model {
    sp_model model;
    sp_sequence_memory memory;
    sp_ops *ops;
    int32_t positions;      /* all tokens are below */
    sp_drafting *draftings; /* [max_running] of the current call, as the arrays below */
    sp_step_span *spans;    /* [max_running] of the current pass */
    sp_drafting **span_of;  /* [max_running] whose they are */
    int32_t rows[SP_LOGIT_ROWS_MAX];
    sp_choice choices[SP_LOGIT_ROWS_MAX];
    double draft_seconds; /* of one draft, by the last passes; 0: not known */
};

/*
 * Opens the model of options.draft_model, if there is one: engine->draft_model, which stays NULL
 * without. After the engine's own model and tokenizer; free_bytes as sp_model_open. SP_ERR_MISMATCH
 * with SP_CODE_DRAFT_MISMATCH: another vocabulary, or ids with another text. Else what
 * sp_model_open and sp_tokenizer_open return.
 */
sp_status sp_draft_model_open(sp_engine *engine, size_t free_bytes, sp_error *error);

/* Adds what it will take to the engine's needs. */
void sp_draft_model_add_needs(sp_engine *engine, sp_memory_needs *needs);

/* Memory and backend, after the preflight and the engine's own sequence memory. SP_ERR_MEMORY,
 * SP_ERR_DEVICE. */
sp_status sp_draft_model_start(sp_engine *engine, sp_error *error);

/* After the last sequence was dropped. */
void sp_draft_model_close(sp_engine *engine);

/* Room for a sequence of at most n_tokens_max tokens. SP_ERR_MEMORY. */
sp_status sp_draft_model_begin(const sp_engine *engine, int32_t n_tokens_max,
                               sp_draft_trail *out_trail);

/* What the scheduler asks; all NULL without a draft model. */
sp_draft_model_calls sp_draft_model_scheduled(sp_engine *engine);

/* Bytes of its weights, KV cache and scratch; 0 without one. */
size_t sp_draft_model_bytes(const sp_engine *engine);

#endif
