/*
 * Penalties, bias and logprobs in the engine: alone, in a batch, chunked, preempted, with and
 * without prefix cache, a request gets the same bytes; and they are what its own raw logits say,
 * worked out here in double.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "support/engine_run.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define N_RUNS 10
#define VOCAB  512
#define PROMPT 29
#define NEW    24

typedef struct model {
    const char *name, *second; /* of the fixture and of an adapter */
    bool recurrent;            /* such short prompts have no beginning that is kept */
} model;

static const model dense = {"qwen3-tied", "r64", false}, hybrid = {"qwen35", "gdn-all-attn", true};
static const model *m = &dense; /* of the test in progress */

/* What makes one run of the list differ from the next. */
static engine_run make_run(const int32_t *prompt, const sp_logit_bias *bias, int i)
{
    static const char *const names[] = {"all-linear", "tokens", NULL};
    engine_run run = engine_run_init(names[(i + i / 3) % 3], prompt, PROMPT, NEW);

    run.keep_logits = true;
    run.request.logits_from = i % 4 == 3 ? 1 << 20 : 0;
    run.request.temperature = i % 2 ? 1.1 : 0;
    run.request.top_p = i % 2 ? 0.95 : 1;
    run.request.seed = (uint64_t)i;
    run.request.presence_penalty = i % 3 ? 0.7 : 0;
    run.request.frequency_penalty = i % 5 ? -0.3 : 0;
    run.request.repetition_penalty = i % 4 ? 1.3 : 1;
    run.request.logit_bias = bias;
    run.request.n_logit_bias = i % 2 ? 2 : 0;
    run.request.logprobs = i % 5 != 4;
    run.request.prompt_logprobs = i % 2 == 0 || i == 3;
    run.request.top_logprobs = i % 4;
    return run;
}

static sp_engine *open_engine(sp_dtype precision, int32_t max_running, int64_t kv_tokens,
                              bool prefix_cache, int32_t chunk)
{
    /* The last one replaces rows of the head: logits that are computed once more. */
    const char *const names[3] = {"all-linear", m->second, "tokens"};
    char paths[3][600], model_dir[512];
    sp_engine_adapter adapters[3];
    sp_engine_options options;

    sp_engine_options_default(&options, sizeof options);
    snprintf(model_dir, sizeof model_dir, "%s/%s", SP_TEST_FIXTURES, m->name);
    for (int i = 0; i < 3; i++) {
        snprintf(paths[i], sizeof paths[i], "%s/adapters/%s", model_dir, names[i]);
        adapters[i] = (sp_engine_adapter){sizeof(sp_engine_adapter), names[i], paths[i]};
    }
    options.model_dir = model_dir;
    options.precision = precision;
    options.threads = 2;
    options.max_running = max_running;
    options.kv_tokens = kv_tokens;
    options.page_tokens = 4;
    options.step_rows = 64;
    options.prefill_chunk = chunk;
    options.prefix_cache = prefix_cache;
    return engine_run_open(&options, adapters, 3);
}

/* ---- what a request's logits say ----------------------------------------------------------- */

static double logprob_in_double(const float *logits, int32_t token)
{
    double best = -INFINITY, sum = 0;

    /* Not fmax: gcc 12 for aarch64 cannot compile that loop. */
    for (int32_t i = 0; i < VOCAB; i++)
        if ((double)logits[i] > best)
            best = (double)logits[i];
    for (int32_t i = 0; i < VOCAB; i++)
        sum += exp((double)logits[i] - best);
    return (double)logits[token] - best - log(sum);
}

/* The greedy choice with bias and penalties; *out_gap is its lead over the next best. */
static int32_t choose_in_double(const sp_request *request, const int32_t *output, int32_t n_output,
                                const float *logits, double *out_gap)
{
    double best = -INFINITY, second = -INFINITY;
    int32_t choice = -1;

    for (int32_t id = 0; id < VOCAB; id++) {
        double logit = (double)logits[id];
        int in_prompt = 0, count = 0;

        for (int32_t i = 0; i < request->n_logit_bias; i++)
            if (request->logit_bias[i].token == id)
                logit += (double)request->logit_bias[i].bias;
        for (int32_t i = 0; i < request->n_tokens; i++)
            in_prompt += request->tokens[i] == id;
        for (int32_t i = 0; i < n_output; i++)
            count += output[i] == id;
        if (in_prompt + count > 0)
            logit = logit > 0 ? logit / request->repetition_penalty
                              : logit * request->repetition_penalty;
        logit -= request->frequency_penalty * count;
        logit -= count > 0 ? request->presence_penalty : 0;
        if (logit > best) {
            second = best;
            best = logit;
            choice = id;
        } else {
            second = fmax(second, logit);
        }
    }
    *out_gap = best - second;
    return choice;
}

/* A run that kept all its logits, against sums in double. */
static void check_values(const engine_run *run)
{
    const sp_request *request = &run->request;
    int32_t n_prompt = request->prompt_logprobs ? PROMPT - 1 : 0;
    int32_t n_new = request->logprobs ? run->n_tokens : 0;

    assert_int_equal(run->n_scores, n_prompt + n_new);
    assert_int_equal(run->n_logits, PROMPT + NEW - 1);
    for (int32_t i = 0; i < run->n_scores; i++) {
        int32_t row = i < n_prompt ? i : PROMPT - 1 + i - n_prompt;
        int32_t token = row < PROMPT - 1 ? request->tokens[row + 1] : run->tokens[row - PROMPT + 1];
        const float *logits = run->logits + (size_t)row * VOCAB;

        assert_int_equal(run->scores[i].token, token);
        assert_int_equal(run->scores[i].n_top, request->top_logprobs);
        assert_true(fabs((double)run->scores[i].logprob - logprob_in_double(logits, token)) < 1e-5);
        for (int32_t k = 0; k < request->top_logprobs; k++) {
            int32_t id = run->scores[i].top[k].token, above = 0;

            for (int32_t other = 0; other < VOCAB; other++)
                above += logits[other] > logits[id] || (logits[other] >= logits[id] && other < id);
            assert_int_equal(above, k);
            assert_true(
                fabs((double)run->scores[i].top[k].logprob - logprob_in_double(logits, id)) < 1e-5);
        }
    }
    for (int32_t i = 0; i < run->n_tokens && request->temperature <= 0; i++) {
        double gap;
        int32_t want = choose_in_double(request, run->tokens, i,
                                        run->logits + (size_t)(PROMPT - 1 + i) * VOCAB, &gap);

        if (gap > 1e-4)
            assert_int_equal(run->tokens[i], want);
    }
}

/* ---- the same bytes, whatever happens ------------------------------------------------------- */

typedef struct scene {
    int32_t prompts[N_RUNS][PROMPT];
    sp_logit_bias bias[2];
    engine_run alone[N_RUNS];
} scene;

/* All prompts begin alike, so that the prefix cache has something to give. */
static void make_scene(scene *s, sp_dtype precision)
{
    sp_engine *engine = open_engine(precision, 1, 64, false, 64);
    sp_test_random random = {99};

    s->bias[0] = (sp_logit_bias){7, 3.5f};
    s->bias[1] = (sp_logit_bias){11, -100};
    for (int i = 0; i < N_RUNS; i++) {
        engine_run *one[1] = {&s->alone[i]};

        for (int t = 0; t < PROMPT; t++)
            s->prompts[i][t] = t < 17 ? t * 5 + 1 : (int32_t)sp_test_below(&random, VOCAB);
        s->alone[i] = make_run(s->prompts[i], s->bias, i);
        engine_run_submit(engine, &s->alone[i]);
        engine_run_all(engine, one, 1);
        if (s->alone[i].request.logits_from == 0)
            check_values(&s->alone[i]);
    }
    sp_engine_close(engine);
}

static void free_scene(scene *s)
{
    for (int i = 0; i < N_RUNS; i++)
        engine_run_free(&s->alone[i]);
}

/* Runs the list twice, so that the second round finds the first one's pages; returns statistics. */
static sp_engine_stats check_together(scene *s, sp_engine *engine)
{
    sp_engine_stats stats = {.struct_bytes = sizeof stats};

    for (int round = 0; round < 2; round++) {
        engine_run together[N_RUNS], *list[N_RUNS];

        for (int i = 0; i < N_RUNS; i++) {
            together[i] = make_run(s->prompts[i], s->bias, i);
            together[i].keep_logits = false; /* else no cached page could be used at all */
            list[i] = &together[i];
            engine_run_submit(engine, list[i]);
        }
        engine_run_all(engine, list, N_RUNS);
        for (int i = 0; i < N_RUNS; i++) {
            engine_run_assert_same(&s->alone[i], &together[i]);
            engine_run_free(&together[i]);
        }
    }
    sp_engine_get_stats(engine, &stats, NULL);
    sp_engine_close(engine);
    return stats;
}

static void check_scene(sp_dtype precision)
{
    static scene s;
    sp_engine_stats stats = {.struct_bytes = sizeof stats};

    make_scene(&s, precision);
    stats = check_together(&s, open_engine(precision, 16, 1024, false, 64));
    assert_int_equal(stats.preemptions, 0);
    assert_int_equal(stats.prefix_tokens, 0);
    stats = check_together(&s, open_engine(precision, 16, 1024, true, 5));
    assert_true(stats.prefix_tokens > 0 || m->recurrent);
    stats = check_together(&s, open_engine(precision, 16, 160, false, 7));
    assert_true(stats.preemptions > 0);
    stats = check_together(&s, open_engine(precision, 16, 160, true, 7));
    assert_true(stats.preemptions > 0 && (stats.prefix_tokens > 0 || m->recurrent));
    free_scene(&s);
}

static void test_bf16(void **state)
{
    (void)state;
    check_scene(SP_DTYPE_BF16);
}

static void test_f32(void **state)
{
    (void)state;
    check_scene(SP_DTYPE_F32);
}

/* ---- single features ------------------------------------------------------------------------ */

/* A bias of 100 decides, one of -100 forbids; the logprob is the raw one, as if there were none. */
static void test_bias_decides(void **state)
{
    const int32_t prompt[3] = {4, 5, 6};
    sp_engine *engine = open_engine(SP_DTYPE_BF16, 4, 256, true, 64);
    engine_run plain = engine_run_init(NULL, prompt, 3, 1), forced = plain, banned = plain;
    engine_run *list[3] = {&plain, &forced, &banned};
    sp_logit_bias up = {123, 100}, down = {0, -100};

    (void)state;
    plain.request.logprobs = forced.request.logprobs = true;
    plain.request.top_logprobs = forced.request.top_logprobs = 3;
    engine_run_submit(engine, &plain);
    engine_run_all(engine, list, 1);
    down.token = plain.tokens[0];
    forced.request.logit_bias = &up;
    banned.request.logit_bias = &down;
    forced.request.n_logit_bias = banned.request.n_logit_bias = 1;
    engine_run_submit(engine, &forced);
    engine_run_submit(engine, &banned);
    engine_run_all(engine, &list[1], 2);
    assert_int_equal(forced.tokens[0], 123);
    assert_int_not_equal(banned.tokens[0], plain.tokens[0]);
    assert_int_equal(banned.tokens[0], plain.scores[0].top[1].token);
    assert_memory_equal(forced.scores[0].top, plain.scores[0].top, 3 * sizeof(sp_logprob));
    assert_true(forced.scores[0].logprob <= plain.scores[0].top[2].logprob);
    sp_engine_close(engine);
    for (int i = 0; i < 3; i++)
        engine_run_free(list[i]);
}

/* max_tokens 0 is a prompt to be scored, with nothing behind it. */
static void test_score_only(void **state)
{
    const int32_t prompt[9] = {4, 5, 6, 4, 5, 6, 4, 5, 6};
    sp_engine *engine = open_engine(SP_DTYPE_BF16, 4, 256, true, 2);
    engine_run longer = engine_run_init(m->second, prompt, 9, 3), score = longer;
    engine_run *list[2] = {&longer, &score};

    (void)state;
    longer.request.prompt_logprobs = score.request.prompt_logprobs = true;
    longer.request.top_logprobs = score.request.top_logprobs = 20;
    score.request.max_tokens = 0;
    engine_run_submit(engine, &longer);
    engine_run_all(engine, list, 1);
    engine_run_submit(engine, &score); /* every page of it is cached now */
    engine_run_all(engine, list, 2);
    assert_int_equal(score.n_tokens, 0);
    assert_int_equal(score.finish, SP_FINISH_LENGTH);
    assert_int_equal(score.n_scores, 8);
    assert_int_equal(longer.n_scores, 8);
    assert_memory_equal(score.scores, longer.scores, 8 * sizeof *score.scores);
    sp_engine_close(engine);
    engine_run_free(&longer);
    engine_run_free(&score);
}

/* All of it at once, on a sampled request: steps find their memory ready. */
static engine_run run_of_everything(const int32_t *prompt, const sp_logit_bias *bias)
{
    engine_run run = engine_run_init("tokens", prompt, 9, 12);

    run.request.temperature = 1;
    run.request.presence_penalty = 0.5;
    run.request.repetition_penalty = 1.2;
    run.request.logit_bias = bias;
    run.request.n_logit_bias = 1;
    run.request.logprobs = run.request.prompt_logprobs = true;
    run.request.top_logprobs = 20;
    return run;
}

static void ignore_event(void *user, const sp_request_event *event)
{
    *(int32_t *)user += event->n_top;
}

static void test_steps_allocate_nothing(void **state)
{
    const int32_t prompt[9] = {4, 5, 6, 4, 5, 6, 4, 5, 6};
    const sp_logit_bias bias = {3, 2};
    sp_engine *engine = open_engine(SP_DTYPE_BF16, 4, 256, true, 4);
    engine_run run = run_of_everything(prompt, &bias);
    int32_t n_top = 0;
    sp_error error;

    (void)state;
    for (int i = 0; i < 2; i++) { /* on a GPU such steps are captured as graphs, once */
        assert_ok(sp_engine_submit(engine, &run.request, &run.id, &error), &error);
        while (sp_engine_step(engine, ignore_event, &n_top, &error) == SP_OK)
            continue;
    }
    n_top = 0;
    assert_ok(sp_engine_submit(engine, &run.request, &run.id, &error), &error);
    sp_alloc_fail_after(0);
    while (sp_engine_step(engine, ignore_event, &n_top, &error) == SP_OK)
        continue;
    assert_false(sp_alloc_failed());
    sp_alloc_fail_after(-1);
    assert_int_equal(n_top, (8 + 12) * 20);
    sp_engine_close(engine);
}

static void test_submit_without_memory(void **state)
{
    const int32_t prompt[9] = {4, 5, 6, 4, 5, 6, 4, 5, 6};
    const sp_logit_bias bias = {3, 2};
    sp_engine *engine = open_engine(SP_DTYPE_BF16, 4, 256, true, 4);
    engine_run run = run_of_everything(prompt, &bias);
    sp_status status = SP_ERR_MEMORY;
    size_t blocks;
    sp_error error;
    int64_t n;

    (void)state;
    /* Lists grow once and stay. */
    assert_ok(sp_engine_submit(engine, &run.request, &run.id, &error), &error);
    assert_ok(sp_engine_cancel(engine, run.id, NULL), NULL);
    blocks = sp_alloc_blocks();
    for (n = 0; status == SP_ERR_MEMORY; n++) {
        assert_int_equal(sp_alloc_blocks(), blocks);
        sp_alloc_fail_after(n);
        status = sp_engine_submit(engine, &run.request, &run.id, &error);
    }
    sp_alloc_fail_after(-1);
    assert_int_equal(status, SP_OK);
    assert_true(n > 3);
    sp_engine_close(engine);
}

static void check_refused(sp_engine *engine, const sp_request *request, const char *field)
{
    sp_error error;
    int64_t id = -5;

    assert_int_equal(sp_engine_submit(engine, request, &id, &error), SP_ERR_INPUT);
    assert_string_equal(error.subject, field);
    assert_int_equal(id, -5);
}

static void test_refused(void **state)
{
    const int32_t prompt[2] = {1, 2};
    const sp_logit_bias outside = {VOCAB, 1};
    sp_engine *engine = open_engine(SP_DTYPE_BF16, 2, 64, false, 8);
    sp_request good, bad;
    sp_engine_stats stats = {.struct_bytes = sizeof stats};

    (void)state;
    sp_request_default(&good, sizeof good);
    good.tokens = prompt;
    good.n_tokens = 2;
    bad = good;
    bad.presence_penalty = 2.5;
    check_refused(engine, &bad, "presence_penalty");
    bad = good;
    bad.frequency_penalty = NAN;
    check_refused(engine, &bad, "frequency_penalty");
    bad = good;
    bad.repetition_penalty = 0;
    check_refused(engine, &bad, "repetition_penalty");
    bad = good;
    bad.top_logprobs = 21;
    check_refused(engine, &bad, "top_logprobs");
    bad = good;
    bad.logit_bias = &outside;
    bad.n_logit_bias = 1;
    check_refused(engine, &bad, "logit_bias");
    bad = good;
    bad.max_tokens = 0;
    check_refused(engine, &bad, "max_tokens");
    sp_engine_get_stats(engine, &stats, NULL);
    assert_int_equal(stats.waiting + stats.running, 0);
    sp_engine_close(engine);
}

/* ---- the trace ------------------------------------------------------------------------------ */

typedef struct trace_log {
    sp_request_trace last;
    int32_t n_events;
} trace_log;

static void log_trace(void *user, const sp_request_event *event)
{
    trace_log *log = user;

    log->last = *event->trace;
    log->n_events++;
    assert_int_equal(event->trace->new_tokens, log->n_events);
    assert_int_equal(event->position, event->trace->prompt_tokens + log->n_events - 1);
}

static trace_log run_traced(sp_engine *engine, const int32_t *prompt, int32_t n)
{
    trace_log log = {.n_events = 0};
    sp_request request;
    sp_error error;
    int64_t id;

    sp_request_default(&request, sizeof request);
    request.tokens = prompt;
    request.n_tokens = n;
    request.max_tokens = 3;
    request.ignore_eos = true;
    assert_ok(sp_engine_submit(engine, &request, &id, &error), &error);
    while (sp_engine_step(engine, log_trace, &log, &error) == SP_OK)
        continue;
    return log;
}

static void test_trace(void **state)
{
    const int32_t prompt[10] = {9, 8, 7, 6, 5, 4, 3, 2, 1, 0};
    sp_engine *engine = open_engine(SP_DTYPE_BF16, 2, 64, true, 4);
    int32_t whole_pages = 9 / engine_run_page_tokens(engine) * engine_run_page_tokens(engine);
    double before = sp_clock_seconds(), after;
    trace_log first = run_traced(engine, prompt, 10), second = run_traced(engine, prompt, 10);

    (void)state;
    after = sp_clock_seconds();
    assert_true(before <= first.last.submitted && first.last.submitted <= first.last.scheduled &&
                first.last.scheduled <= first.last.first_token && first.last.first_token <= after);
    assert_true(second.last.submitted >= first.last.first_token);
    assert_int_equal(first.last.prompt_tokens, 10);
    assert_int_equal(first.last.new_tokens, 3);
    assert_int_equal(first.last.cached_tokens, 0);
    assert_int_equal(second.last.cached_tokens, whole_pages);
    assert_int_equal(second.last.preemptions, 0);
    sp_engine_close(engine);
}

static void test_hybrid(void **state)
{
    m = &hybrid;
    check_scene(SP_DTYPE_BF16);
    test_score_only(state);
    test_steps_allocate_nothing(state);
    m = &dense;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bf16),
        cmocka_unit_test(test_f32),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_bias_decides),
        cmocka_unit_test(test_trace),
        cmocka_unit_test(test_score_only),
        cmocka_unit_test(test_steps_allocate_nothing),
        cmocka_unit_test(test_submit_without_memory),
        cmocka_unit_test(test_hybrid),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
