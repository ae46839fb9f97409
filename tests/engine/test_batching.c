/*
 * Continuous batching: 64 requests arrive at random, the KV cache has pages for 12 of them, six
 * adapters and the base take part. Every text, token and logit equals that of the request run
 * alone, byte for byte; with experts, so do the experts that each token was routed to, and asking
 * for them changes nothing. A prompt has the same logits in one step and in short ones.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "base/file.h"
#include "support/engine_run.h"
#include "support/shell.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N_REQUESTS 64
#define N_ADAPTERS 6
#define PAGE       4
#define PAGES_EACH 16 /* a request has at most 64 tokens */
#define PROMPT_MAX 24
#define NEW_MAX    40
#define VOCAB      509

/* A base and adapters of it. */
typedef struct family {
    const char *model;
    const char *names[N_ADAPTERS];
    bool experts;
} family;

static const family dense = {
    .model = SP_TEST_FIXTURES "/qwen3-tied",
    .names = {"all-linear", "attn-r4", "r1", "r64", "rslora-r16", "patterns"},
};
static const family moe = {
    .model = SP_TEST_FIXTURES "/qwen3moe",
    .names = {"all-linear", "router", "experts-fused", "v4-sparse-experts", "rslora-r16",
              "experts-gateup"},
    .experts = true,
};

typedef struct plan_entry {
    int32_t prompt[PROMPT_MAX];
    int32_t arrival; /* the step before which it is submitted */
    engine_run alone, together;
} plan_entry;

/* The fixture model with the tokenizer that fits it. */
static char *make_model(const family *base)
{
    char *model = shell_copy_directory(base->model);
    char *data;
    size_t bytes;
    sp_error error;

    assert_ok(sp_file_read_all(SP_TEST_FIXTURES "/tokenizer512/tokenizer.json", 1 << 24, &data,
                               &bytes, &error),
              &error);
    sp_test_write_file(model, "tokenizer.json", data, bytes);
    sp_free(data);
    return model;
}

static sp_engine *open_engine(const family *base, const char *model, sp_dtype precision,
                              int32_t max_running, int64_t kv_tokens)
{
    char paths[N_ADAPTERS][256];
    sp_engine_adapter adapters[N_ADAPTERS];
    sp_engine_options options;

    for (size_t i = 0; i < N_ADAPTERS; i++) {
        snprintf(paths[i], sizeof paths[i], "%s/adapters/%s", base->model, base->names[i]);
        adapters[i] = (sp_engine_adapter){sizeof(sp_engine_adapter), base->names[i], paths[i]};
    }
    sp_engine_options_default(&options, sizeof options);
    options.model_dir = model;
    options.precision = precision;
    options.threads = 2;
    options.max_running = max_running;
    options.page_tokens = PAGE;
    options.kv_tokens = kv_tokens;
    options.step_rows = 48;
    options.prefill_chunk = 17;
    return engine_run_open(&options, adapters, N_ADAPTERS);
}

static engine_run make_run(const family *base, const plan_entry *entry, uint32_t adapter,
                           int32_t n_prompt, int32_t n_new, double temperature, uint64_t seed)
{
    engine_run run = engine_run_init(adapter < N_ADAPTERS ? base->names[adapter] : NULL,
                                     entry->prompt, n_prompt, n_new);

    run.request.temperature = temperature;
    run.request.seed = seed;
    run.keep_logits = true;
    run.request.logits_from = n_prompt - 1;
    return run;
}

/* Every request of the plan alone, one after another, in an engine of its own. */
static void make_plan(const family *base, plan_entry *plan, const char *model, sp_dtype precision,
                      uint64_t seed)
{
    sp_test_random random = {seed};
    sp_engine *engine = open_engine(base, model, precision, 1, PAGES_EACH * PAGE);

    for (int32_t i = 0; i < N_REQUESTS; i++) {
        plan_entry *entry = &plan[i];
        uint32_t adapter = sp_test_below(&random, N_ADAPTERS + 1);
        int32_t n_prompt = 1 + (int32_t)sp_test_below(&random, PROMPT_MAX);
        int32_t n_new = 1 + (int32_t)sp_test_below(&random, NEW_MAX);
        /* Half greedy, half sampled: a sampled request has more than its logits to keep. */
        double temperature = sp_test_below(&random, 2) * 0.9;
        engine_run *list[1] = {&entry->alone};

        entry->arrival = (int32_t)sp_test_below(&random, 20);
        for (int32_t t = 0; t < n_prompt; t++)
            entry->prompt[t] = (int32_t)sp_test_below(&random, VOCAB);
        entry->alone = make_run(base, entry, adapter, n_prompt, n_new, temperature, (uint64_t)i);
        entry->together = entry->alone;
        entry->alone.request.routed_experts = base->experts;
        entry->together.request.routed_experts = base->experts && i % 4 != 0;
        if (base->experts && i % 2 != 0) /* drafts have rows that may not count */
            entry->together.request.speculative = SP_SPECULATIVE_ON;
        engine_run_submit(engine, &entry->alone);
        engine_run_all(engine, list, 1);
    }
    sp_engine_close(engine);
}

/* How many requests were preempted on the way. */
static uint64_t check_batching(const family *base, sp_dtype precision, uint64_t seed)
{
    plan_entry *plan = sp_calloc(N_REQUESTS, sizeof *plan);
    char *model = make_model(base);
    engine_run *list[N_REQUESTS];
    sp_engine_stats stats = {.struct_bytes = sizeof stats};
    sp_engine *engine;
    int32_t submitted = 0, step = 0;
    bool more = true;

    make_plan(base, plan, model, precision, seed);
    engine = open_engine(base, model, precision, 32, (int64_t)12 * PAGES_EACH * PAGE);
    for (int32_t i = 0; i < N_REQUESTS; i++)
        list[i] = &plan[i].together;
    while (more || submitted < N_REQUESTS) {
        for (int32_t i = 0; i < N_REQUESTS; i++) {
            if (plan[i].arrival != step)
                continue;
            engine_run_submit(engine, &plan[i].together);
            submitted++;
        }
        more = engine_run_step(engine, list, N_REQUESTS);
        step++;
    }
    for (int32_t i = 0; i < N_REQUESTS; i++)
        engine_run_assert_same(&plan[i].alone, &plan[i].together);
    sp_engine_get_stats(engine, &stats, NULL);
    print_message("%llu steps, %llu rows, %llu preemptions, %lld of %lld pages at most\n",
                  (unsigned long long)stats.steps, (unsigned long long)stats.rows,
                  (unsigned long long)stats.preemptions, (long long)stats.kv_pages_used_max,
                  (long long)stats.kv_pages);
    assert_int_equal(stats.kv_pages_used, 0);
    sp_engine_close(engine);
    for (int32_t i = 0; i < N_REQUESTS; i++) {
        engine_run_free(&plan[i].alone);
        engine_run_free(&plan[i].together);
    }
    sp_test_remove_tree(model);
    sp_free(model);
    sp_free(plan);
    return stats.preemptions;
}

static void test_bf16(void **state)
{
    (void)state;
    assert_true(check_batching(&dense, SP_DTYPE_BF16, 1) > 0);
}

static void test_f32(void **state)
{
    (void)state;
    assert_true(check_batching(&dense, SP_DTYPE_F32, 2) > 0);
}

static void test_experts(void **state)
{
    (void)state;
    assert_true(check_batching(&moe, SP_DTYPE_BF16, 3) > 0);
    assert_true(check_batching(&moe, SP_DTYPE_F32, 4) > 0);
}

/* A prompt in one step and in short ones: on a GPU the deltas of experts go another way in steps of
 * many rows. */
static void test_long_steps(void **state)
{
    enum { LONG = 400 };
    static const int32_t step_rows[] = {512, 40};
    static int32_t prompt[LONG];
    sp_test_random random = {9};
    char path[256];
    const sp_engine_adapter adapter = {sizeof adapter, "all-linear", path};
    engine_run runs[2];

    (void)state;
    snprintf(path, sizeof path, "%s/adapters/all-linear", moe.model);
    engine_run_fill_prompt(&random, prompt, LONG, VOCAB);
    for (int i = 0; i < 2; i++) {
        sp_engine_options options;

        sp_engine_options_default(&options, sizeof options);
        options.model_dir = moe.model;
        options.precision = SP_DTYPE_BF16;
        options.threads = 2;
        options.kv_tokens = 512;
        options.step_rows = options.prefill_chunk = step_rows[i];
        runs[i] = engine_run_alone(engine_run_open(&options, &adapter, 1), "all-linear", prompt,
                                   LONG, 4, true);
    }
    engine_run_assert_same(&runs[0], &runs[1]);
    engine_run_free(&runs[0]);
    engine_run_free(&runs[1]);
}

/* A cancelled request gives back its pages and its reference, and nobody else notices. */
static void test_cancel(void **state)
{
    char *model = make_model(&dense);
    sp_engine *engine = open_engine(&dense, model, SP_DTYPE_BF16, 8, 1024);
    int32_t prompt[3] = {5, 6, 7};
    engine_run a = engine_run_init("r1", prompt, 3, 10), b = a, alone = a;
    engine_run *both[2] = {&a, &b}, *one[1] = {&alone};
    sp_engine_stats stats = {.struct_bytes = sizeof stats};

    (void)state;
    engine_run_submit(engine, &a);
    engine_run_submit(engine, &b);
    engine_run_step(engine, both, 2);
    engine_run_step(engine, both, 2);
    assert_int_equal(sp_engine_cancel(engine, a.id, NULL), SP_OK);
    assert_int_equal(sp_engine_cancel(engine, a.id, NULL), SP_ERR_NOT_FOUND);
    while (engine_run_step(engine, both, 2))
        continue;
    assert_int_equal(a.n_tokens, 2);
    sp_engine_get_stats(engine, &stats, NULL);
    assert_int_equal(stats.kv_pages_used, 0);
    assert_int_equal(stats.running + stats.waiting, 0);
    engine_run_submit(engine, &alone);
    engine_run_all(engine, one, 1);
    engine_run_assert_same(&b, &alone);
    sp_engine_close(engine);
    engine_run_free(&a);
    engine_run_free(&b);
    engine_run_free(&alone);
    sp_test_remove_tree(model);
    sp_free(model);
}

/* A paused request has no token until it goes on, and then those that it would have had; with
 * nothing else there is nothing to do. */
static void test_pause(void **state)
{
    char *model = make_model(&dense);
    sp_engine *engine = open_engine(&dense, model, SP_DTYPE_BF16, 8, 1024);
    int32_t prompt[3] = {5, 6, 7};
    engine_run a = engine_run_init("r1", prompt, 3, 10), b = a, alone = a;
    engine_run *both[2] = {&a, &b}, *one[1] = {&alone};

    (void)state;
    engine_run_submit(engine, &a);
    engine_run_submit(engine, &b);
    engine_run_step(engine, both, 2);
    assert_int_equal(sp_engine_set_paused(engine, a.id, true, NULL), SP_OK);
    while (engine_run_step(engine, both, 2))
        continue;
    assert_int_equal(a.n_tokens, 1);
    assert_int_equal(b.n_tokens, 10);
    assert_int_equal(sp_engine_set_paused(engine, b.id, true, NULL), SP_ERR_NOT_FOUND);
    assert_int_equal(sp_engine_set_paused(engine, a.id, false, NULL), SP_OK);
    while (engine_run_step(engine, both, 2))
        continue;
    engine_run_submit(engine, &alone);
    engine_run_all(engine, one, 1);
    engine_run_assert_same(&a, &alone);
    engine_run_assert_same(&b, &alone);
    sp_engine_close(engine);
    engine_run_free(&a);
    engine_run_free(&b);
    engine_run_free(&alone);
    sp_test_remove_tree(model);
    sp_free(model);
}

/* Every allocation of opening, submitting and stepping may fail: a clean error, nothing leaked. */
static void test_every_allocation_may_fail(void **state)
{
    sp_engine_adapter adapter = {sizeof(sp_engine_adapter), "all-linear",
                                 SP_TEST_FIXTURES "/qwen3moe/adapters/all-linear"};
    int32_t prompt[3] = {5, 6, 7};
    sp_engine_options options;
    size_t blocks = sp_alloc_blocks();
    int64_t n;

    (void)state;
    sp_engine_options_default(&options, sizeof options);
    options.model_dir = SP_TEST_FIXTURES "/qwen3moe";
    options.threads = 1;
    options.max_running = 4;
    options.kv_tokens = 64;
    options.step_rows = 16;
    for (n = 0;; n++) {
        sp_engine *engine = NULL;
        sp_error error = {0};
        sp_request request;
        sp_status status;
        int64_t id;

        sp_request_default(&request, sizeof request);
        request.adapter = "all-linear";
        request.routed_experts = true;
        request.tokens = prompt;
        request.n_tokens = 3;
        sp_alloc_fail_after(n);
        status = sp_engine_open(&options, &adapter, 1, &engine, &error);
        if (status == SP_OK)
            status = sp_engine_submit(engine, &request, &id, &error);
        while (status == SP_OK)
            status = sp_engine_step(engine, NULL, NULL, &error);
        sp_engine_close(engine);
        assert_int_equal(sp_alloc_blocks(), blocks);
        if (!sp_alloc_failed())
            break;
        assert_int_equal(status, SP_ERR_MEMORY);
        assert_int_equal(error.status, SP_ERR_MEMORY);
    }
    sp_alloc_fail_after(-1);
    print_message("%lld allocations\n", (long long)n);
    assert_true(n > 20);
}

/* How many seeds the soak runs; 0 when the program is run as a quick test. */
static uint64_t soak_seeds;

/* A seed in which nobody is preempted may happen; one in two may not. */
static void test_many_seeds(void **state)
{
    uint64_t preempted = 0;

    (void)state;
    for (uint64_t seed = 100; seed < 100 + soak_seeds; seed++) {
        print_message("seed %llu\n", (unsigned long long)seed);
        preempted += check_batching(seed % 4 < 2 ? &dense : &moe,
                                    seed % 2 ? SP_DTYPE_BF16 : SP_DTYPE_F32, seed) > 0;
    }
    assert_true(2 * preempted > soak_seeds);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest soak[] = {cmocka_unit_test(test_many_seeds)};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bf16),
        cmocka_unit_test(test_f32),
        cmocka_unit_test(test_experts),
        cmocka_unit_test(test_long_steps),
        cmocka_unit_test(test_cancel),
        cmocka_unit_test(test_pause),
        cmocka_unit_test(test_every_allocation_may_fail),
    };

    if (argc > 1) {
        soak_seeds = strtoull(argv[1], NULL, 10);
        return cmocka_run_group_tests(soak, NULL, NULL);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
