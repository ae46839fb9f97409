/*
 * One row, one answer: the bytes of a request's logits, tokens and text do not depend on who else
 * is in the batch, on the order, the slot, the pool's rank, the chunks of the prefill, the pages,
 * the threads or a preemption. On the demo model, in both precisions, for each adapter and the
 * base; and on the fixtures of the Llama types, of a mixture of experts and of hybrids.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "support/engine_run.h"

#include <stdio.h>
#include <string.h>

#define N_ADAPTERS 3
#define N_OTHERS   16
#define PROMPT     41 /* longer than an attention block, no multiple of anything */
#define MAX_TOKENS 12

typedef struct model {
    const char *dir;
    const char *names[N_ADAPTERS], *paths[N_ADAPTERS];
    int32_t vocab; /* ids below the special ones */
} model;

#define FIXTURE(name, first, second, third)                 \
    {                                                       \
        SP_TEST_FIXTURES "/" name, {first, second, third},  \
            {SP_TEST_FIXTURES "/" name "/adapters/" first,  \
             SP_TEST_FIXTURES "/" name "/adapters/" second, \
             SP_TEST_FIXTURES "/" name "/adapters/" third}, \
            509                                             \
    }

static const model demo = {SP_TEST_DEMO "/base",
                           {"scripture", "csource", "sqldoc"},
                           {SP_TEST_DEMO "/adapters/scripture", SP_TEST_DEMO "/adapters/csource",
                            SP_TEST_DEMO "/adapters/sqldoc"},
                           2045};
static const model fixtures[] = {FIXTURE("llama3", "plain-r8", "patterns", "save-head-embed"),
                                 FIXTURE("qwen2", "plain-r8", "patterns", "head-embed-lora"),
                                 FIXTURE("smollm", "plain-r8", "patterns", "tokens"),
                                 FIXTURE("qwen3moe", "all-linear", "v4-sparse-experts", "router"),
                                 FIXTURE("qwen3next", "all-linear", "gdn-in", "shared-expert"),
                                 FIXTURE("qwen35", "gdn-all-attn", "gdn-out", "tokens")};

static const model *const with_experts = &fixtures[3];

static const model *m = &demo; /* of the test under way */

/* How the engine under test is set up: everything that must not change a bit. */
typedef struct variant {
    const char *label;
    int32_t order; /* the adapters are loaded from this one on, round about */
    int32_t max_lora_rank, prefill_chunk, threads, page_tokens, step_rows;
    int32_t others; /* requests beside the one that counts */
    int64_t kv_tokens;
    bool must_preempt;
} variant;

static const variant variants[] = {
    {"alone, other slots", 1, 0, 0, 1, 16, 256, 0, 4096, false},
    {"among 16 others", 0, 0, 0, 2, 16, 256, N_OTHERS, 4096, false},
    {"among 16 others, other slots", 2, 0, 0, 2, 16, 256, N_OTHERS, 4096, false},
    {"pool rank 64", 0, 64, 0, 2, 16, 256, 5, 4096, false},
    {"pool rank 16", 1, 16, 0, 1, 16, 256, 5, 4096, false},
    {"chunks of 1", 0, 0, 1, 2, 16, 256, 3, 4096, false},
    {"chunks of 7", 0, 0, 7, 1, 16, 256, 3, 4096, false},
    {"chunks of 64", 0, 0, 64, 2, 16, 256, 3, 4096, false},
    {"steps of 5 rows", 0, 0, 0, 2, 16, 5, 4, 4096, false},
    {"steps of 700 rows, cut in two", 1, 0, 0, 2, 16, 700, N_OTHERS, 4096, false},
    {"pages of 4", 0, 0, 0, 2, 4, 256, 3, 4096, false},
    {"pages of 32", 0, 0, 0, 1, 32, 256, 3, 4096, false},
    {"3 threads", 0, 0, 0, 3, 16, 256, 7, 4096, false},
    {"preempted", 0, 0, 0, 2, 4, 256, 2, 112, true},
};

static sp_engine *open_engine(const variant *v, sp_dtype precision, const char *only)
{
    sp_engine_adapter adapters[N_ADAPTERS];
    sp_engine_options options;
    size_t n = engine_run_turn(m->names, m->paths, N_ADAPTERS, v->order, only, adapters);

    sp_engine_options_default(&options, sizeof options);
    options.model_dir = m->dir;
    options.precision = precision;
    options.max_loras = N_ADAPTERS;
    options.max_lora_rank = v->max_lora_rank;
    options.prefill_chunk = v->prefill_chunk;
    options.threads = v->threads;
    options.page_tokens = v->page_tokens;
    options.step_rows = v->step_rows;
    options.kv_tokens = v->kv_tokens;
    return engine_run_open(&options, adapters, n);
}

/* The request that counts, run alone in an engine that holds nothing else. */
static engine_run run_reference(const char *adapter, const int32_t *prompt, sp_dtype precision)
{
    static const variant plain = {"reference", 0, 0, 0, 1, 16, 256, 0, 4096, false};
    sp_engine *engine = open_engine(&plain, precision, adapter ? adapter : "none");
    engine_run run = engine_run_alone(engine, adapter, prompt, PROMPT, MAX_TOKENS, false);

    assert_int_equal(run.n_logits, PROMPT + MAX_TOKENS - 1);
    return run;
}

/* Puts the request at a random place among the others; they have other lengths and adapters. */
static void run_variant(const variant *v, const engine_run *reference, const char *adapter,
                        const int32_t *prompt, sp_dtype precision, sp_test_random *random)
{
    sp_engine *engine = open_engine(v, precision, NULL);
    engine_run runs[N_OTHERS + 1];
    engine_run *list[N_OTHERS + 1];
    int32_t prompts[N_OTHERS + 1][80];
    /* The youngest is the one that is preempted. */
    int32_t place =
        v->must_preempt ? v->others : (int32_t)sp_test_below(random, (uint32_t)v->others + 1);
    sp_engine_stats stats = {.struct_bytes = sizeof stats};

    for (int32_t i = 0; i <= v->others; i++) {
        uint32_t other = sp_test_below(random, N_ADAPTERS + 1);
        int32_t length = 1 + (int32_t)sp_test_below(random, 70);

        if (i == place) {
            runs[i] = engine_run_init(adapter, prompt, PROMPT, MAX_TOKENS);
            runs[i].keep_logits = true;
        } else {
            int32_t n_new = 1 + (int32_t)sp_test_below(random, 20);

            /* Two that grow from 31 to 60 tokens push a third out of 28 pages of 4. */
            if (v->must_preempt)
                length = n_new = 30;
            engine_run_fill_prompt(random, prompts[i], length, m->vocab);
            runs[i] = engine_run_init(other < N_ADAPTERS ? m->names[other] : NULL, prompts[i],
                                      length, n_new);
        }
        list[i] = &runs[i];
    }
    for (int32_t i = 0; i <= v->others; i++)
        engine_run_submit(engine, &runs[i]);
    engine_run_all(engine, list, (size_t)v->others + 1);
    engine_run_assert_same(reference, &runs[place]);
    sp_engine_get_stats(engine, &stats, NULL);
    if (v->must_preempt)
        assert_true(runs[place].n_recomputed > PROMPT);
    assert_int_equal(stats.kv_pages_used, 0);
    for (int32_t i = 0; i <= v->others; i++)
        engine_run_free(&runs[i]);
    sp_engine_close(engine);
}

static void check_precision(sp_dtype precision)
{
    sp_test_random random = {42};

    for (int32_t a = 0; a <= N_ADAPTERS; a++) {
        const char *adapter = a < N_ADAPTERS ? m->names[a] : NULL;
        int32_t prompt[PROMPT];
        engine_run reference;

        engine_run_fill_prompt(&random, prompt, PROMPT, m->vocab);
        reference = run_reference(adapter, prompt, precision);
        for (size_t i = 0; i < sizeof variants / sizeof variants[0]; i++)
            run_variant(&variants[i], &reference, adapter, prompt, precision, &random);
        engine_run_free(&reference);
    }
}

static void test_bf16(void **state)
{
    (void)state;
    check_precision(SP_DTYPE_BF16);
}

static void test_f32(void **state)
{
    (void)state;
    check_precision(SP_DTYPE_F32);
}

static void test_fixtures(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof fixtures / sizeof fixtures[0]; i++) {
        m = &fixtures[i];
        check_precision(SP_DTYPE_BF16);
    }
    m = &demo;
}

/* The adapters do something: otherwise all of the above would hold for an engine without them. */
static void check_adapters_differ(void)
{
    sp_test_random random = {7};
    int32_t prompt[PROMPT];
    engine_run runs[N_ADAPTERS + 1];

    engine_run_fill_prompt(&random, prompt, PROMPT, m->vocab);
    for (int32_t a = 0; a <= N_ADAPTERS; a++)
        runs[a] = run_reference(a < N_ADAPTERS ? m->names[a] : NULL, prompt, SP_DTYPE_BF16);
    for (int32_t a = 0; a <= N_ADAPTERS; a++)
        for (int32_t b = 0; b < a; b++)
            assert_memory_not_equal(runs[a].logits, runs[b].logits,
                                    (size_t)runs[a].vocab * sizeof(float));
    for (int32_t a = 0; a <= N_ADAPTERS; a++)
        engine_run_free(&runs[a]);
}

static void test_adapters_differ_from_the_base(void **state)
{
    (void)state;
    check_adapters_differ();
    m = with_experts;
    check_adapters_differ();
    m = &demo;
}

/* lora_scale 0 is the base, exactly; 1 is the plain result; 2 is something else. */
static void check_request_scale(const char *adapter)
{
    static const variant plain = {"scale", 0, 0, 0, 1, 16, 256, 0, 4096, false};
    sp_test_random random = {11};
    sp_engine *engine = open_engine(&plain, SP_DTYPE_BF16, NULL);
    int32_t prompt[PROMPT];
    engine_run runs[4];
    engine_run *list[4];

    engine_run_fill_prompt(&random, prompt, PROMPT, m->vocab);
    for (int32_t i = 0; i < 4; i++) {
        runs[i] = engine_run_init(i == 3 ? NULL : adapter, prompt, PROMPT, MAX_TOKENS);
        runs[i].request.lora_scale = (float)i;
        if (i == 3)
            runs[i].request.lora_scale = 1;
        runs[i].keep_logits = true;
        engine_run_submit(engine, &runs[i]);
        list[i] = &runs[i];
    }
    engine_run_all(engine, list, 4);
    engine_run_assert_same(&runs[0], &runs[3]);
    assert_memory_not_equal(runs[1].logits, runs[2].logits, (size_t)runs[1].vocab * sizeof(float));
    assert_memory_not_equal(runs[1].logits, runs[0].logits, (size_t)runs[1].vocab * sizeof(float));
    for (int32_t i = 0; i < 4; i++)
        engine_run_free(&runs[i]);
    sp_engine_close(engine);
}

static void test_request_scale(void **state)
{
    (void)state;
    check_request_scale("csource");
    m = with_experts;
    for (int32_t a = 0; a < N_ADAPTERS; a++)
        check_request_scale(m->names[a]);
    m = &demo;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bf16),          cmocka_unit_test(test_f32),
        cmocka_unit_test(test_fixtures),      cmocka_unit_test(test_adapters_differ_from_the_base),
        cmocka_unit_test(test_request_scale),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
