#include "support/engine_run.h"

#include "base/alloc.h"
#include "engine/draft_source.h"

#include <stdlib.h>
#include <string.h>

engine_run engine_run_init(const char *adapter, const int32_t *tokens, int32_t n_tokens,
                           int32_t max_tokens)
{
    engine_run run = {0};

    sp_request_default(&run.request, sizeof run.request);
    run.request.adapter = adapter;
    run.request.tokens = tokens;
    run.request.n_tokens = n_tokens;
    run.request.max_tokens = max_tokens;
    run.request.ignore_eos = true;
    return run;
}

void engine_run_free(engine_run *run)
{
    sp_free(run->tokens);
    sp_free(run->logits);
    sp_free(run->scores);
    sp_free(run->routed);
    sp_text_free(&run->text);
    *run = (engine_run){0};
}

static void keep_logits(void *user, int32_t position, const float *logits, int32_t vocab)
{
    engine_run *run = user;
    int32_t row = position - run->request.logits_from;

    /* A preempted request computes its positions again: they must be the same. */
    if (row >= run->n_logits) {
        assert_int_equal(row, run->n_logits);
        run->logits = sp_realloc(run->logits, ((size_t)row + 1) * (size_t)vocab * sizeof(float));
        assert_non_null(run->logits);
        run->n_logits = row + 1;
        run->vocab = vocab;
    } else {
        assert_memory_equal(run->logits + (size_t)row * (size_t)vocab, logits,
                            (size_t)vocab * sizeof(float));
        run->n_recomputed++;
    }
    memcpy(run->logits + (size_t)row * (size_t)vocab, logits, (size_t)vocab * sizeof(float));
}

void engine_run_submit(sp_engine *engine, engine_run *run)
{
    sp_error error;

    if (run->keep_logits) {
        run->request.logits_fn = keep_logits;
        run->request.logits_user = run;
    }
    if (run->request.routed_experts) {
        int32_t layers, per_token;

        sp_engine_routing(engine, &layers, &per_token);
        run->n_ids = layers * per_token;
    }
    run->n_prompt_left = run->request.n_tokens - 1;
    run->tokens = sp_calloc((size_t)run->request.max_tokens + 1, sizeof(int32_t));
    assert_non_null(run->tokens);
    assert_ok(sp_engine_submit(engine, &run->request, &run->id, &error), &error);
}

static void keep_score(engine_run *run, const sp_request_event *event)
{
    engine_score *score;

    assert_int_equal(event->position, run->request.n_tokens + run->n_tokens -
                                          (event->is_prompt ? run->n_prompt_left : 0));
    if (event->is_prompt)
        run->n_prompt_left--;
    if (!event->is_prompt && !run->request.logprobs)
        return;
    run->scores = sp_realloc(run->scores, ((size_t)run->n_scores + 1) * sizeof *run->scores);
    assert_non_null(run->scores);
    score = &run->scores[run->n_scores++];
    memset(score, 0, sizeof *score); /* padding and unused places too: they are compared */
    score->token = event->token;
    score->logprob = event->logprob;
    score->n_top = event->n_top;
    if (event->n_top > 0)
        memcpy(score->top, event->top, (size_t)event->n_top * sizeof *event->top);
}

/* With the last event: of all tokens but the last new one. */
static void keep_routing(engine_run *run, const sp_request_event *event)
{
    size_t bytes = (size_t)event->n_routed * (size_t)run->n_ids * sizeof *run->routed;
    int32_t n = run->request.n_tokens + run->n_tokens - (run->n_tokens > 0);

    if (event->finish == SP_FINISH_NONE || !run->request.routed_experts) {
        assert_null(event->routed_experts);
        assert_int_equal(event->n_routed, 0);
        return;
    }
    assert_int_equal(event->n_routed, n);
    run->routed = sp_malloc(bytes);
    assert_non_null(run->routed);
    memcpy(run->routed, event->routed_experts, bytes);
    run->n_routed = event->n_routed;
}

typedef struct run_list {
    engine_run **runs;
    size_t n;
} run_list;

static void on_event(void *user, const sp_request_event *event)
{
    const run_list *list = user;

    for (size_t i = 0; i < list->n; i++) {
        engine_run *run = list->runs[i];

        if (run->id != event->request)
            continue;
        assert_int_equal(run->finish, SP_FINISH_NONE); /* nothing comes behind the end */
        keep_score(run, event);
        if (event->is_prompt)
            return;
        if (event->token >= 0) {
            assert_true(run->n_tokens < run->request.max_tokens);
            run->tokens[run->n_tokens++] = event->token;
        }
        sp_text_add_bytes(&run->text, event->text, event->text_bytes);
        run->finish = event->finish;
        keep_routing(run, event);
        return;
    }
    fail_msg("an event for a request that nobody made");
}

sp_status engine_run_try_step(sp_engine *engine, engine_run **runs, size_t n_runs, sp_error *error)
{
    run_list list = {runs, n_runs};

    return sp_engine_step(engine, on_event, &list, error);
}

bool engine_run_step(sp_engine *engine, engine_run **runs, size_t n_runs)
{
    sp_error error;
    sp_status status = engine_run_try_step(engine, runs, n_runs, &error);

    if (status != SP_AGAIN)
        assert_ok(status, &error);
    return status == SP_OK;
}

void engine_run_all(sp_engine *engine, engine_run **runs, size_t n_runs)
{
    while (engine_run_step(engine, runs, n_runs))
        continue;
    for (size_t i = 0; i < n_runs; i++)
        assert_int_not_equal(runs[i]->finish, SP_FINISH_NONE);
}

/* On a GPU a page has 16 tokens, whatever the test varies. */
sp_engine *engine_run_open(const sp_engine_options *options, const sp_engine_adapter *adapters,
                           size_t n_adapters)
{
    sp_engine_options own = *options;
    sp_engine *engine = NULL;
    sp_error error;

    if (getenv("SP_TEST_DEVICE") && own.precision == SP_DTYPE_BF16) {
        own.device = getenv("SP_TEST_DEVICE");
        own.page_tokens = 16;
        own.eager |= getenv("SP_TEST_EAGER") != NULL;
    }
    assert_ok(sp_engine_open(&own, adapters, n_adapters, &engine, &error), &error);
    sp_engine_set_untimed(engine);
    return engine;
}

int32_t engine_run_page_tokens(const sp_engine *engine)
{
    sp_engine_stats stats = {.struct_bytes = sizeof stats};

    assert_int_equal(sp_engine_get_stats(engine, &stats, NULL), SP_OK);
    return stats.page_tokens;
}

size_t engine_run_turn(const char *const *names, const char *const *paths, int32_t n, int32_t first,
                       const char *only, sp_engine_adapter *out_adapters)
{
    size_t n_taken = 0;

    for (int32_t i = 0; i < n; i++) {
        int32_t a = (i + first) % n;

        if (!only || strcmp(only, names[a]) == 0)
            out_adapters[n_taken++] =
                (sp_engine_adapter){sizeof(sp_engine_adapter), names[a], paths[a]};
    }
    return n_taken;
}

void engine_run_fill_prompt(sp_test_random *random, int32_t *tokens, int32_t n, int32_t vocab)
{
    for (int32_t i = 0; i < n; i++)
        tokens[i] = (int32_t)sp_test_below(random, (uint32_t)vocab);
}

engine_run engine_run_alone(sp_engine *engine, const char *adapter, const int32_t *tokens,
                            int32_t n_tokens, int32_t max_tokens, bool ignore_eos)
{
    engine_run run = engine_run_init(adapter, tokens, n_tokens, max_tokens);
    engine_run *list[1] = {&run};

    run.keep_logits = true;
    run.request.ignore_eos = ignore_eos;
    engine_run_submit(engine, &run);
    engine_run_all(engine, list, 1);
    sp_engine_close(engine);
    return run;
}

void engine_run_assert_same(const engine_run *a, const engine_run *b)
{
    assert_int_equal(a->n_tokens, b->n_tokens);
    assert_memory_equal(a->tokens, b->tokens, (size_t)a->n_tokens * sizeof(int32_t));
    assert_int_equal(a->text.bytes, b->text.bytes);
    if (a->text.bytes > 0)
        assert_memory_equal(a->text.data, b->text.data, a->text.bytes);
    assert_int_equal(a->finish, b->finish);
    assert_int_equal(a->n_scores, b->n_scores);
    if (a->n_scores > 0)
        assert_memory_equal(a->scores, b->scores, (size_t)a->n_scores * sizeof *a->scores);
    if (a->n_routed > 0 && b->n_routed > 0) {
        assert_int_equal(a->n_routed, b->n_routed);
        assert_int_equal(a->n_ids, b->n_ids);
        assert_memory_equal(a->routed, b->routed,
                            (size_t)a->n_routed * (size_t)a->n_ids * sizeof *a->routed);
    }
    if (!a->keep_logits || !b->keep_logits)
        return;
    assert_int_equal(a->n_logits, b->n_logits);
    assert_memory_equal(a->logits, b->logits,
                        (size_t)a->n_logits * (size_t)a->vocab * sizeof(float));
}
