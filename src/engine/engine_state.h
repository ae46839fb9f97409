/*
 * engine_state.h: what an engine is made of. Shared by engine.c (opening), engine_adapters.c
 * (adapters), submit.c (submitting) and step.c (stepping).
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

/* Reason codes of requests. The first is OpenAI's, which clients and proxies look for. */
#define SP_ENGINE_CONTEXT_EXCEEDED   "context_length_exceeded"
#define SP_ENGINE_NO_TOKENIZER       "tokenizer-missing"
#define SP_ENGINE_ADAPTER_NON_FINITE "adapter-non-finite" /* logits, with an adapter applied */
#define SP_ENGINE_LOGITS_NON_FINITE  "logits-non-finite"  /* without one */

/* A row of the step under way whose logits are wanted. */
typedef struct sp_logit_row {
    int32_t row, position;
    sp_sequence *sequence;
} sp_logit_row;

struct sp_engine {
    sp_engine_options options; /* strings are not kept */
    char *base_name;
    sp_model model;
    const sp_kernels *kernels;
    sp_exec *exec;
    sp_device *device;
    sp_tokenizer *tokenizer;  /* NULL: the model directory has no tokenizer.json */
    char tokenizer_note[128]; /* "" for nothing to say */

    sp_layout *layout; /* NULL where no adapter can be loaded, as are pool, stage and delta */
    sp_pool *pool;
    sp_stage_source disk;
    sp_stage *stage;
    struct sp_step_run *run; /* the step that goes on; NULL: none */
    sp_delta *delta;
    sp_plan *plan;
    sp_route_span *spans; /* [max_running] */

    sp_sequence_memory memory; /* whose pages the backend has the bytes of */
    sp_scheduler scheduler;
    const sp_op_table *op_table; /* of the backend */
    sp_ops *ops;
    sp_step_span *step_spans; /* [max_running] */
    int32_t max_context;
    bool kv_left_open; /* the preflight has set the KV cache's size */

    sp_sequence **sequences; /* ascending by id */
    int32_t n_sequences, sequences_capacity;
    int64_t next_id;

    sp_logit_row logit_rows[SP_LOGIT_ROWS]; /* the window under way */
    int32_t n_logit_rows;
    sp_choice choices[SP_LOGIT_ROWS];    /* of the same rows */
    sp_logprob top[SP_TOP_LOGPROBS_MAX]; /* of the event under way */
    sp_text decoded;                     /* of the token under way */
    sp_text event_text;                  /* what of it is set free */
    sp_sequence **finished;              /* [max_running] of the step under way */
    int32_t n_finished;

    sp_engine_stats stats;
};

/* Frees a sequence: out of the scheduler, its adapter reference given back. */
void sp_engine_drop(sp_engine *engine, sp_sequence *sequence);

/* The start-up adapters between their opening and their slots. */
typedef struct sp_startup {
    const sp_engine_adapter *wanted; /* [n] borrowed */
    size_t n;
    sp_adapter **adapters; /* [n] one reference each; NULL: refused */
    double *seconds;       /* [n] that the opening took */
    size_t overlay_bytes;  /* that the pool is to have */
} sp_startup;

/* engine_adapters.c. First the adapters are opened and engine->layout is made, if there are to be
 * slots at all: then it is known what pool, stage and delta need. */
sp_status sp_engine_read_adapters(sp_engine *engine, const sp_engine_adapter *wanted, size_t n,
                                  sp_startup *out_startup, sp_error *error);
/* Then pool, stage and delta are made and the adapters loaded. */
sp_status sp_engine_start_adapters(sp_engine *engine, const sp_startup *startup, sp_error *error);
void sp_startup_free(sp_startup *startup);
void sp_engine_close_adapters(sp_engine *engine);

/* How the scheduler asks for slots; all NULL without a pool. */
sp_slot_gate sp_engine_gate(sp_engine *engine);

/* step.c, for the gate: a waiting sequence can never run. It is dropped, with an event. */
void sp_engine_refused(void *user, sp_sequence *sequence, const sp_error *error);

/* The adapter version that a request means. SP_ERR_NOT_FOUND. */
sp_status sp_engine_hold(const sp_engine *engine, const char *adapter, sp_hold *out_hold,
                         sp_error *error);

#endif
