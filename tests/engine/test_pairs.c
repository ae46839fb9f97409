/*
 * Every pair of what a step may meet at once: adapters mixed in a batch, chunks, preemption, prefix
 * hits, graphs, replaced rows, logprobs, rotation through few slots. Each request gets the tokens
 * and logprobs that it gets alone, byte for byte; and the logprobs of what it chose are those of
 * the same ids when they are scored as a prompt. On a dense model, on a mixture of experts, and on
 * models with gated delta nets, whose prefix hits begin at snapshots.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "support/engine_run.h"
#include "support/long_memory.h"

#include <stdio.h>
#include <string.h>

#define N_ADAPTERS 7
#define N_RUNS     10
#define N_LENGTHS  (N_RUNS / 2)
#define PROMPT_MAX 70
#define NEW        10
#define VOCAB      509 /* ids below the special ones */

typedef enum lever {
    MIXED = 1 << 0, /* all requests at once, else one after the other */
    CHUNKS = 1 << 1,
    PREEMPTION = 1 << 2,
    PREFIX_HITS = 1 << 3, /* every request twice, with a prefix cache */
    EAGER = 1 << 4,
    OVERLAYS = 1 << 5, /* the last adapters replace rows of tables */
    LOGPROBS = 1 << 6,
    ROTATION = 1 << 7, /* two slots */
    N_LEVERS = 8
} lever;

#define N_LINEAR 4 /* adapters without tables; they come first */

typedef struct model {
    const char *fixture;
    const char *names[N_ADAPTERS];
    int32_t lengths[N_LENGTHS]; /* of the prompts */
    bool hybrid;
} model;

static const model dense = {
    SP_TEST_FIXTURES "/qwen3-tied",
    {"all-linear", "attn-r4", "r64", "patterns", "tokens", "head-lora", "save-embed"},
    {1, 16, 33, 47, PROMPT_MAX},
    false};
/* All-linear ones adapt the routers too. */
static const model experts = {SP_TEST_FIXTURES "/qwen3moe",
                              {"all-linear", "v4-sparse-experts", "router", "experts-fused-attn",
                               "tokens", "save-head", "save-head-embed"},
                              {1, 16, 33, 47, PROMPT_MAX},
                              false};
/* Outputs that pass the first border of a state, and the second. */
static const model hybrid = {SP_TEST_FIXTURES "/qwen35",
                             {"all-linear", "gdn-in", "gdn-all-attn", "rslora-r16", "tokens",
                              "save-head", "save-head-embed"},
                             {1, 27, 33, 60, PROMPT_MAX},
                             true};
static const model hybrid_experts = {SP_TEST_FIXTURES "/qwen3next",
                                     {"all-linear", "gdn-in", "router", "experts-fused-attn",
                                      "tokens", "save-head", "save-head-embed"},
                                     {1, 27, 33, 60, PROMPT_MAX},
                                     true};

/* Of the test under way. */
static const model *m;
static char *base; /* the fixture, or a copy in which states remember */

static int32_t prompts[N_RUNS][PROMPT_MAX];
static int32_t n_prompt[N_RUNS];

/* Lengths around pages and blocks; the second half begin like the first. */
static void use_model(const model *used)
{
    sp_test_random random = {2201};

    m = used;
    base = m->hybrid ? long_memory_copy(m->fixture) : sp_strdup(m->fixture);
    assert_non_null(base);
    for (int i = 0; i < N_RUNS; i++) {
        n_prompt[i] = m->lengths[i % N_LENGTHS];
        engine_run_fill_prompt(&random, prompts[i], n_prompt[i], VOCAB);
        if (i >= N_LENGTHS)
            memcpy(prompts[i], prompts[i - N_LENGTHS], (size_t)(n_prompt[i] - 1) * sizeof(int32_t));
    }
}

static void leave_model(void)
{
    if (m->hybrid)
        sp_test_remove_tree(base);
    sp_free(base);
}

static const char *adapter_of(int i, unsigned levers)
{
    int n = levers & OVERLAYS ? N_ADAPTERS : N_LINEAR;

    return i % 5 == 4 ? NULL : m->names[i % n];
}

static engine_run make_run(int i, unsigned levers)
{
    engine_run run = engine_run_init(adapter_of(i, levers), prompts[i], n_prompt[i], NEW);

    run.request.temperature = i % 2 ? 0.9 : 0;
    run.request.top_p = i % 2 ? 0.95 : 1;
    run.request.seed = (uint64_t)i;
    run.request.repetition_penalty = i % 3 == 2 ? 1.2 : 1;
    run.request.logprobs = (levers & LOGPROBS) != 0;
    run.request.top_logprobs = levers & LOGPROBS ? i % 3 : 0;
    return run;
}

static sp_engine *open_engine(unsigned levers)
{
    sp_engine_adapter adapters[N_ADAPTERS];
    char paths[N_ADAPTERS][512];
    sp_engine_options options;

    for (int i = 0; i < N_ADAPTERS; i++) {
        snprintf(paths[i], sizeof paths[i], "%s/adapters/%s", m->fixture, m->names[i]);
        adapters[i] = (sp_engine_adapter){sizeof adapters[i], m->names[i], paths[i]};
    }
    sp_engine_options_default(&options, sizeof options);
    options.model_dir = base;
    options.threads = 1;
    options.max_loras = levers & ROTATION ? 2 : N_ADAPTERS;
    options.kv_tokens = levers & PREEMPTION ? 128 : 4096;
    options.step_rows = 64;
    options.prefill_chunk = levers & CHUNKS ? 7 : 0;
    options.prefix_cache = (levers & PREFIX_HITS) != 0;
    options.state_snapshot_tokens = 32;
    options.eager = (levers & EAGER) != 0;
    options.adapter_wait_steps = 4;
    options.adapter_preempt_steps = 8;
    return engine_run_open(&options, adapters, N_ADAPTERS);
}

static void run_under(unsigned levers, engine_run *runs)
{
    int times = levers & PREFIX_HITS ? 2 : 1;
    sp_engine_stats stats = {.struct_bytes = sizeof stats};
    sp_engine *engine = open_engine(levers);

    for (int t = 0; t < times; t++) {
        engine_run *list[N_RUNS];

        for (int i = 0; i < N_RUNS; i++) {
            engine_run_free(&runs[i]);
            runs[i] = make_run(i, levers);
            list[i] = &runs[i];
            engine_run_submit(engine, &runs[i]);
            if (!(levers & MIXED))
                engine_run_all(engine, &list[i], 1);
        }
        if (levers & MIXED)
            engine_run_all(engine, list, N_RUNS);
    }
    assert_int_equal(sp_engine_get_stats(engine, &stats, NULL), SP_OK);
    if (!(levers & PREEMPTION)) /* else nothing is kept long enough, or not all of it */
        assert_int_equal(stats.prefix_tokens > 0, times > 1);
    sp_engine_close(engine);
}

/* ---- cases --------------------------------------------------------------------------------- */

/* One after the other, eagerly, whole, with all slots: what each request is. */
static void check_every_pair(void)
{
    engine_run plain[2][2][N_RUNS] = {0}; /* by overlays and logprobs, which make other requests */

    for (unsigned o = 0; o < 2; o++)
        for (unsigned l = 0; l < 2; l++)
            run_under(EAGER | (o ? OVERLAYS : 0) | (l ? LOGPROBS : 0), plain[o][l]);
    for (unsigned a = 0; a < N_LEVERS; a++)
        for (unsigned b = a; b < N_LEVERS; b++) {
            unsigned levers = 1u << a | 1u << b;
            engine_run runs[N_RUNS] = {0};
            const engine_run *expected =
                plain[levers & OVERLAYS ? 1 : 0][levers & LOGPROBS ? 1 : 0];

            run_under(levers, runs);
            for (int i = 0; i < N_RUNS; i++) {
                engine_run_assert_same(&expected[i], &runs[i]);
                engine_run_free(&runs[i]);
            }
        }
    for (int i = 0; i < N_RUNS; i++) /* logprobs change no token */
        for (unsigned o = 0; o < 2; o++)
            assert_memory_equal(plain[o][0][i].tokens, plain[o][1][i].tokens,
                                NEW * sizeof(int32_t));
    for (unsigned o = 0; o < 4; o++)
        for (int i = 0; i < N_RUNS; i++)
            engine_run_free(&plain[o / 2][o % 2][i]);
}

/* Prompt and output of a run, scored as a prompt. */
static void check_scored(sp_engine *engine, const engine_run *run)
{
    int32_t ids[PROMPT_MAX + NEW], n = run->request.n_tokens;
    engine_run scored, *list[] = {&scored};

    memcpy(ids, run->request.tokens, (size_t)n * sizeof *ids);
    memcpy(ids + n, run->tokens, NEW * sizeof *ids);
    scored = engine_run_init(run->request.adapter, ids, n + NEW, 1);
    scored.request.prompt_logprobs = true;
    engine_run_submit(engine, &scored);
    engine_run_all(engine, list, 1);
    assert_int_equal(run->n_scores, NEW);
    for (int32_t i = 0; i < NEW; i++) {
        const engine_score *echo = &scored.scores[n - 1 + i];

        assert_int_equal(echo->token, run->scores[i].token);
        assert_memory_equal(&echo->logprob, &run->scores[i].logprob, sizeof echo->logprob);
    }
    engine_run_free(&scored);
}

static void check_sampling_equals_scoring(void)
{
    for (unsigned hits = 0; hits < 2; hits++) {
        unsigned levers = MIXED | OVERLAYS | LOGPROBS | (hits ? PREFIX_HITS : CHUNKS);
        engine_run runs[N_RUNS] = {0};
        sp_engine *engine;

        run_under(levers, runs);
        engine = open_engine(hits ? CHUNKS : PREFIX_HITS);
        for (int i = 0; i < N_RUNS; i++) {
            check_scored(engine, &runs[i]);
            engine_run_free(&runs[i]);
        }
        sp_engine_close(engine);
    }
}

static void dense_pairs(void **state)
{
    (void)state;
    use_model(&dense);
    check_every_pair();
    leave_model();
}

static void dense_sampling_equals_scoring(void **state)
{
    (void)state;
    use_model(&dense);
    check_sampling_equals_scoring();
    leave_model();
}

static void expert_pairs(void **state)
{
    (void)state;
    use_model(&experts);
    check_every_pair();
    leave_model();
}

static void expert_sampling_equals_scoring(void **state)
{
    (void)state;
    use_model(&experts);
    check_sampling_equals_scoring();
    leave_model();
}

static void hybrid_pairs(void **state)
{
    (void)state;
    use_model(&hybrid);
    check_every_pair();
    leave_model();
}

static void hybrid_sampling_equals_scoring(void **state)
{
    (void)state;
    use_model(&hybrid);
    check_sampling_equals_scoring();
    leave_model();
    use_model(&hybrid_experts);
    check_sampling_equals_scoring();
    leave_model();
}

static void hybrid_expert_pairs(void **state)
{
    (void)state;
    use_model(&hybrid_experts);
    check_every_pair();
    leave_model();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dense_pairs),
        cmocka_unit_test(dense_sampling_equals_scoring),
        cmocka_unit_test(expert_pairs),
        cmocka_unit_test(expert_sampling_equals_scoring),
        cmocka_unit_test(hybrid_pairs),
        cmocka_unit_test(hybrid_expert_pairs),
        cmocka_unit_test(hybrid_sampling_equals_scoring),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
