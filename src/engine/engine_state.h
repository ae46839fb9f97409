/*
 * engine_state.h: the members of an engine. Shared by engine.c (opening), engine_adapters.c
 * (adapters), submit.c (submitting) and step.c (stepping). What changes after opening
 * belongs to the engine thread.
 */
#ifndef SP_ENGINE_ENGINE_STATE_H
#define SP_ENGINE_ENGINE_STATE_H

#include "base/text.h"
#include "engine/model/family.h"
#include "engine/model/model.h"
#include "engine/ops/ops.h"
#include "engine/schedule/scheduler.h"
#include "engine/tokenizer/tokenizer.h"

#include <sidepath/engine.h>
#include <sidepath/pool.h>
#include <sidepath/stage.h>

/* Reason codes of requests. The first is OpenAI's, which clients and proxies check. */
#define SP_ENGINE_CONTEXT_EXCEEDED   "context_length_exceeded"
#define SP_ENGINE_NO_TOKENIZER       "tokenizer-missing"
#define SP_ENGINE_ADAPTER_NON_FINITE "adapter-non-finite" /* logits, with an adapter applied */
#define SP_ENGINE_LOGITS_NON_FINITE  "logits-non-finite"  /* without one */

#define SP_TOKENIZER_FILE "tokenizer.json" /* of a model's directory */

/* constrain.h and draft_model.h; opaque elsewhere. */
typedef struct sp_constrain sp_constrain;
typedef struct sp_draft_model sp_draft_model;

/* A row of the current step whose logits are needed. */
typedef struct sp_logit_row {
    int32_t row, position;
    sp_sequence *sequence;
} sp_logit_row;

/* One row's logits on their way to a processed logprob; NULL until a request wants one. */
typedef struct sp_processed {
    float *logits; /* [vocab] */
    void *scratch; /* [sp_sample_scratch_bytes] */
} sp_processed;

void sp_processed_free(sp_processed *processed); /* zeros are allowed */

struct sp_engine {
    sp_engine_options options; /* strings are not kept */
    char *base_name;
    sp_model model;
    const sp_kernels *kernels;
    sp_exec *exec;
    sp_device *device;
    sp_tokenizer *tokenizer;  /* NULL: the model directory has no tokenizer.json */
    char tokenizer_note[128]; /* "": no note */

    sp_layout *layout; /* NULL where no adapter can be loaded, as are pool, stage and delta */
    sp_pool *pool;
    sp_stage_source disk;
    sp_stage *stage;
    struct sp_step_run *run;      /* the current step; NULL between steps */
    sp_delta *delta, *head_delta; /* the latter on a GPU alone, as ops.h says */
    sp_plan *plan;
    sp_route_span *spans; /* [max_running] */

    sp_moe_shape moe;          /* of the model; all 0 without experts */
    sp_sequence_memory memory; /* page numbers; the backend owns the bytes */
    sp_scheduler scheduler;
    sp_step_cost step_cost;
    bool untimed;                /* no step is noted there */
    const sp_op_table *op_table; /* of the backend */
    sp_ops *ops;
    sp_draft_model *draft_model; /* NULL: none */
    bool *faults;                /* [max_running] of the current step's spans */
    sp_step_span *step_spans;    /* [max_running] */
    int32_t max_context;
    bool kv_left_open; /* the preflight has set the KV cache's size */
    int32_t n_states,
        n_snapshots; /* of recurrent layers, the draft model's too, by the preflight */

    sp_sequence **sequences; /* ascending by id */
    int32_t n_sequences, sequences_capacity;
    int64_t next_id;

    sp_logit_row logit_rows[SP_LOGIT_ROWS_MAX]; /* the current window */
    int32_t n_logit_rows;
    sp_choice choices[SP_LOGIT_ROWS_MAX]; /* of the same rows */
    sp_processed processed;
    sp_constrain *constrain;
    sp_logprob top[SP_TOP_LOGPROBS_MAX]; /* of the current event */
    sp_text decoded;                     /* of the current token */
    sp_text event_text;                  /* the part of it that events may carry */
    sp_sequence **finished;              /* [max_running] of the current step */
    int32_t n_finished;

    sp_engine_stats stats;
};

/* Removes a sequence (not NULL) from the engine and the scheduler, releases its adapter and pages,
 * and frees it. Engine thread. */
void sp_engine_drop(sp_engine *engine, sp_sequence *sequence);

/* (token, k) rows of a window of the experts' deltas; 1 for a base without experts. */
int32_t sp_engine_expert_rows(const sp_engine *engine);

/* The start-up adapters between their opening and their slots. */
typedef struct sp_startup {
    const sp_engine_adapter *wanted; /* [n] borrowed */
    size_t n;
    sp_adapter **adapters; /* [n] one reference each; NULL: refused */
    double *seconds;       /* [n] that opening each took */
    size_t overlay_bytes;  /* the pool's budgets */
    size_t expert_bytes;
    size_t free_bytes; /* for their tensors until they are packed; SIZE_MAX: not known */
} sp_startup;

/* engine_adapters.c. Opens the adapters (n may be 0) and creates engine->layout, which stays NULL
 * without slots: after that the needs of pool, stage and delta are known. *out_startup is owned by
 * the caller (sp_startup_free), and after a failure empty or unchanged. */
sp_status sp_engine_read_adapters(sp_engine *engine, const sp_engine_adapter *wanted, size_t n,
                                  size_t free_bytes, sp_startup *out_startup, sp_error *error);
/* Creates pool, stage and delta and loads the adapters; what a failure leaves is freed by
 * sp_engine_close_adapters. */
sp_status sp_engine_start_adapters(sp_engine *engine, const sp_startup *startup, sp_error *error);
/* Releases its references. An all-zero struct is fine. */
void sp_startup_free(sp_startup *startup);
/* After the last sequence was dropped; members may be NULL. */
void sp_engine_close_adapters(sp_engine *engine);

/* The scheduler's access to slots; all NULL without a pool. */
sp_slot_gate sp_engine_gate(sp_engine *engine);

/* step.c, for the gate: a waiting sequence can never run. Drops it, with an event. `user` is the
 * engine, inside a step; `error` is borrowed until return. */
void sp_engine_refused(void *user, sp_sequence *sequence, const sp_error *error);

/* step.c: how the token after a sequence's first n_tokens, drafts included, is chosen. */
sp_choice sp_engine_choice(const sp_sequence *sequence, int32_t n_tokens);

/* engine.c: those of a backend for a model, whose pages are `memory`'s, with the engine's deltas.
 * All positions are below max_positions. `widths` is filled and borrowed by the options. */
sp_ops_options sp_engine_ops_options(sp_engine *engine, const sp_model *model,
                                     const sp_sequence_memory *memory, int32_t max_positions,
                                     int32_t widths[SP_ROWS_MAX]);

/* The adapter version of a name; NULL: the active one, or the base. *out_hold is one reference
 * (sp_stage_release). Engine thread. SP_ERR_NOT_FOUND. */
sp_status sp_engine_hold(const sp_engine *engine, const char *adapter, sp_hold *out_hold,
                         sp_error *error);

#endif
