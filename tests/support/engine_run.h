/*
 * engine_run.h: runs requests on an engine through its public interface and keeps all that comes
 * back: tokens, text, finish reason and, where wanted, the logits of every position.
 */
#ifndef SP_TEST_SUPPORT_ENGINE_RUN_H
#define SP_TEST_SUPPORT_ENGINE_RUN_H

#include "base/text.h"

#include "support/test.h"

#include <sidepath/engine.h>

/* The logprob of one token, prompt tokens first, with the best ids beside it. */
typedef struct engine_score {
    int32_t token, n_top;
    float logprob;
    sp_logprob top[SP_TOP_LOGPROBS_MAX];
} engine_score;

typedef struct engine_run {
    sp_request request; /* filled by the test; engine_run_init gives greedy defaults */
    bool keep_logits;   /* from request.logits_from on */
    int64_t id;
    int32_t *tokens; /* [n_tokens] new ones */
    int32_t n_tokens;
    float *logits; /* [n_logits, vocab] */
    int32_t n_logits, vocab;
    int32_t n_recomputed;            /* rows of logits that came again, after a preemption */
    engine_score *scores;            /* [n_scores] */
    int32_t n_scores, n_prompt_left; /* the second: tokens of the prompt that may still come */
    uint16_t *routed;                /* [n_routed, n_ids], with request.routed_experts */
    int32_t n_routed, n_ids;
    sp_text text;
    sp_finish finish;
} engine_run;

engine_run engine_run_init(const char *adapter, const int32_t *tokens, int32_t n_tokens,
                           int32_t max_tokens);
void engine_run_free(engine_run *run);

/* Submits one request; any failure fails the test. */
void engine_run_submit(sp_engine *engine, engine_run *run);

/* Steps until nothing is left; events go to the runs in the array. */
void engine_run_all(sp_engine *engine, engine_run **runs, size_t n_runs);

/* One step, with its status. */
sp_status engine_run_try_step(sp_engine *engine, engine_run **runs, size_t n_runs, sp_error *error);

/* One step, which must not fail; false when there is nothing to do. */
bool engine_run_step(sp_engine *engine, engine_run **runs, size_t n_runs);

/* Tokens of a page of the engine. */
int32_t engine_run_page_tokens(const sp_engine *engine);

/* Opens an engine for fixture or demo models; any failure fails the test. SP_TEST_DEVICE in the
 * environment names the device of bf16 engines, and SP_TEST_EAGER runs them without graphs. How
 * many tokens they draft does not depend on time. */
sp_engine *engine_run_open(const sp_engine_options *options, const sp_engine_adapter *adapters,
                           size_t n_adapters);

/* The adapters from number `first` on, round about; with `only`, that one alone. Returns how many.
 */
size_t engine_run_turn(const char *const *names, const char *const *paths, int32_t n, int32_t first,
                       const char *only, sp_engine_adapter *out_adapters);

/* n random ids below `vocab`. */
void engine_run_fill_prompt(sp_test_random *random, int32_t *tokens, int32_t n, int32_t vocab);

/* Runs one request alone, keeping its logits, and closes the engine. */
engine_run engine_run_alone(sp_engine *engine, const char *adapter, const int32_t *tokens,
                            int32_t n_tokens, int32_t max_tokens, bool ignore_eos);

/* Fails the test unless both gave the same tokens, text, logits and experts, byte for byte. */
void engine_run_assert_same(const engine_run *a, const engine_run *b);

#endif
