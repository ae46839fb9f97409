/*
 * Sampling equals scoring, bit for bit: tokens of mixed adapters, greedy and sampled, in whatever
 * batches and chunks, with and without prefix hits; each one's logprob against the same ids scored
 * as a prompt, in other batches.
 *
 *     soak_scoring [TOKENS]      1,000,000
 */
#include "support/test.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "support/engine_run.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N_ADAPTERS 3
#define N_RUNS     64
#define PROMPT_MAX 200
#define NEW        96
#define VOCAB      2045 /* ids below the special ones */

static const char *const names[N_ADAPTERS] = {"scripture", "csource", "sqldoc"};
static int64_t wanted = 1000000;

static sp_engine *open_engine(void)
{
    static const char *const paths[N_ADAPTERS] = {SP_TEST_DEMO "/adapters/scripture",
                                                  SP_TEST_DEMO "/adapters/csource",
                                                  SP_TEST_DEMO "/adapters/sqldoc"};
    sp_engine_adapter adapters[N_ADAPTERS];
    sp_engine_options options;

    engine_run_turn(names, paths, N_ADAPTERS, 0, NULL, adapters);
    sp_engine_options_default(&options, sizeof options);
    options.model_dir = SP_TEST_DEMO "/base";
    options.kv_tokens = 16384; /* of 64 requests some are preempted */
    options.step_rows = 300;
    options.prefill_chunk = 70;
    return engine_run_open(&options, adapters, N_ADAPTERS);
}

typedef struct round {
    int32_t prompts[N_RUNS][PROMPT_MAX + NEW], n_prompt[N_RUNS];
    engine_run sampled[N_RUNS], scored[N_RUNS];
} round_of_runs;

static void run_all(sp_engine *engine, engine_run *runs)
{
    engine_run *list[N_RUNS];

    for (int i = 0; i < N_RUNS; i++) {
        list[i] = &runs[i];
        engine_run_submit(engine, &runs[i]);
    }
    engine_run_all(engine, list, N_RUNS);
}

static void sample(sp_engine *engine, round_of_runs *r, sp_test_random *random)
{
    for (int i = 0; i < N_RUNS; i++) {
        int32_t n = 1 + (int32_t)sp_test_below(random, PROMPT_MAX);
        engine_run *run = &r->sampled[i];

        r->n_prompt[i] = n;
        engine_run_fill_prompt(random, r->prompts[i], n, VOCAB);
        *run = engine_run_init(i % 4 == 3 ? NULL : names[i % 4], r->prompts[i], n, NEW);
        run->request.logprobs = true;
        run->request.temperature = i % 3 ? 0.7 + 0.1 * (double)(i % 5) : 0;
        run->request.top_p = i % 5 == 1 ? 0.9 : 1;
        run->request.top_k = i % 7 == 2 ? 40 : 0;
        run->request.repetition_penalty = i % 6 == 5 ? 1.1 : 1;
        run->request.seed = sp_test_next(random);
    }
    run_all(engine, r->sampled);
}

/* In the opposite order, so that the batches are others. */
static void score(sp_engine *engine, round_of_runs *r)
{
    for (int i = 0; i < N_RUNS; i++) {
        const engine_run *of = &r->sampled[N_RUNS - 1 - i];
        int32_t n = of->request.n_tokens, *ids = r->prompts[N_RUNS - 1 - i];

        memcpy(ids + n, of->tokens, NEW * sizeof *ids);
        r->scored[i] = engine_run_init(of->request.adapter, ids, n + NEW, 1);
        r->scored[i].request.prompt_logprobs = true;
    }
    run_all(engine, r->scored);
}

static void compare(round_of_runs *r)
{
    for (int i = 0; i < N_RUNS; i++) {
        const engine_run *sampled = &r->sampled[i], *scored = &r->scored[N_RUNS - 1 - i];

        for (int32_t t = 0; t < NEW; t++) {
            const engine_score *echo = &scored->scores[r->n_prompt[i] - 1 + t];

            assert_int_equal(echo->token, sampled->scores[t].token);
            assert_memory_equal(&echo->logprob, &sampled->scores[t].logprob, sizeof echo->logprob);
        }
    }
    for (int i = 0; i < N_RUNS; i++) {
        engine_run_free(&r->sampled[i]);
        engine_run_free(&r->scored[i]);
    }
}

static void test_a_million_tokens(void **state)
{
    sp_engine *engine = open_engine();
    round_of_runs *r = sp_calloc(1, sizeof *r);
    sp_test_random random = {510};
    double began = sp_clock_seconds();
    int64_t tokens = 0;

    (void)state;
    assert_non_null(r);
    for (; tokens < wanted; tokens += (int64_t)N_RUNS * NEW) {
        sample(engine, r, &random);
        score(engine, r);
        compare(r);
    }
    print_message("%lld tokens on %s, none differs, %.0f s\n", (long long)tokens,
                  sp_engine_device(engine), sp_clock_seconds() - began);
    sp_free(r);
    sp_engine_close(engine);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_a_million_tokens)};

    if (argc > 1)
        wanted = strtoll(argv[1], NULL, 10);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
