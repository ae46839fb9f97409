/*
 * The engine on a GPU: what only a GPU has. Graphs survive loads, unloads and scales without being
 * captured anew, and replay what an eager step computes; device memory stays flat; a call of the
 * device or a launch that fails once ends with a named status and loses nothing; two engines share
 * one GPU. What every backend must do is in tests/engine, which runs here too.
 */
#include "cuda/gpu_main.h"
#include "support/engine_run.h"
#include "support/faulty_device.h"

#include "engine/engine_state.h"
#include "engine/ops/cuda_ops.h"

#include <stdio.h>
#include <string.h>

#define MODEL       SP_TEST_FIXTURES "/qwen3-tied"
#define WITH_BIASES SP_TEST_FIXTURES "/qwen2"
#define N_NAMES     6
#define N_RUNS      7
#define PROMPT      21
#define NEW         6
#define LONG_PROMPT 150
#define ROUNDS      250 /* of four loads or unloads each */
#define VOCAB       509
#define SCALES      8 /* the first is 0 */

static const char *model = MODEL; /* of the engines that open */
static sp_device *gpu;            /* opened by gpu_main only to see whether there is one */

static const char *const names[N_NAMES] = {"all-linear", "attn-r4",    "r1",
                                           "ffn",        "rslora-r16", "patterns"};
static int32_t prompts[N_RUNS][PROMPT];

static sp_engine *open_engine_of(bool eager, int32_t slots, int32_t step_rows)
{
    sp_engine_options options;
    sp_engine *engine;
    sp_error error;

    sp_engine_options_default(&options, sizeof options);
    options.model_dir = model;
    options.device = "cuda";
    options.threads = 1;
    options.max_loras = slots;
    options.max_lora_rank = 64;
    options.lora_modules = "all-linear";
    options.adapter_loading = true;
    options.kv_tokens = 4096;
    options.step_rows = step_rows;
    options.prefix_cache = false;
    options.eager = eager;
    assert_ok(sp_engine_open(&options, NULL, 0, &engine, &error), &error);
    return engine;
}

static sp_engine *open_engine(bool eager, int32_t slots)
{
    return open_engine_of(eager, slots, 64);
}

static void load(sp_engine *engine, const char *name, const char *content)
{
    sp_stage *stage = sp_engine_stage(engine);
    sp_stage_load_options options;
    char path[512];
    int64_t ticket;
    sp_error error;
    sp_status status;

    snprintf(path, sizeof path, "%s/adapters/%s", model, content);
    sp_stage_load_options_default(&options, sizeof options);
    options.name = name;
    options.location = path;
    options.replace = true;
    status = sp_stage_load(stage, &options, &ticket, &error);
    while (status == SP_PENDING) {
        sp_stage_poll_wait(stage, 10);
        status = sp_stage_result(stage, ticket, NULL, &error);
    }
    assert_ok(status, &error);
}

static void unload(sp_engine *engine, const char *name)
{
    sp_error error;

    assert_ok(sp_stage_unload(sp_engine_stage(engine), name, &error), &error);
}

static engine_run make_run(int i, const char *adapter, float scale)
{
    engine_run run = engine_run_init(adapter, prompts[i], PROMPT, NEW);

    run.request.lora_scale = scale;
    run.request.logprobs = true;
    run.request.top_logprobs = 1;
    return run;
}

/* Runs of the two loaded adapters and the base, at scales that change with `round`. */
static void make_round(int round, engine_run *runs)
{
    for (int i = 0; i < N_RUNS; i++)
        runs[i] = make_run(i,
                           i % 3 == 2 ? NULL
                           : i % 3    ? "b"
                                      : "a",
                           i % 2 ? 1.0f : 0.25f * (float)(round % SCALES));
}

static void run_round(sp_engine *engine, engine_run *runs)
{
    engine_run *list[N_RUNS];

    for (int i = 0; i < N_RUNS; i++) {
        engine_run_submit(engine, &runs[i]);
        list[i] = &runs[i];
    }
    engine_run_all(engine, list, N_RUNS);
}

static sp_engine_stats stats_of(const sp_engine *engine)
{
    sp_engine_stats stats = {.struct_bytes = sizeof stats};

    assert_int_equal(sp_engine_get_stats(engine, &stats, NULL), SP_OK);
    return stats;
}

/* ---- cases --------------------------------------------------------------------------------- */

static void test_graphs_survive_loads_and_scales(void **state)
{
    sp_engine *graphs = open_engine(false, 2), *eager = open_engine(true, 2);
    sp_engine *engines[] = {graphs, eager};
    sp_engine_stats before = {0}, after;

    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        engine_run runs[2][N_RUNS];

        for (int e = 0; e < 2; e++) {
            load(engines[e], "a", names[round % N_NAMES]);
            load(engines[e], "b", names[(round + 1 + round / N_NAMES) % N_NAMES]);
            make_round(round, runs[e]);
            run_round(engines[e], runs[e]);
        }
        for (int i = 0; i < N_RUNS; i++) {
            engine_run_assert_same(&runs[1][i], &runs[0][i]);
            engine_run_free(&runs[0][i]);
            engine_run_free(&runs[1][i]);
        }
        for (int e = 0; e < 2; e++) {
            unload(engines[e], "a");
            unload(engines[e], "b");
        }
        if (round == 2 * SCALES) /* every kind of step has run twice */
            before = stats_of(graphs);
    }
    after = stats_of(graphs);
    assert_true(before.captures > 0);
    assert_int_equal(after.captures, before.captures);
    assert_int_equal(after.device_bytes, before.device_bytes);
    assert_int_equal(stats_of(eager).captures, 0);
    sp_engine_close(graphs);
    sp_engine_close(eager);
}

/* Steps until nothing is left; returns how many ended with SP_ERR_DEVICE. Any other failure fails
 * the test, as does a step that never ends the run. */
static int run_through_failures(sp_engine *engine, engine_run **list, size_t n)
{
    int failures = 0;

    for (int step = 0; step < 1000; step++) {
        sp_error error;
        sp_status status = engine_run_try_step(engine, list, n, &error);

        if (status == SP_AGAIN)
            return failures;
        if (status == SP_ERR_DEVICE)
            failures++;
        else
            assert_ok(status, &error);
    }
    fail_msg("the requests never end");
    return failures;
}

/* The request that follows a failure, in the same engine: its rows are computed again. */
static void check_one_failure(sp_engine *engine, const engine_run *expected, int64_t *io_fired)
{
    engine_run run = make_run(1, "a", 1.0f), *list[] = {&run};
    int failures;

    engine_run_submit(engine, &run);
    failures = run_through_failures(engine, list, 1);
    *io_fired += failures;
    if (run.finish != SP_FINISH_FAILED)
        engine_run_assert_same(expected, &run);
    engine_run_free(&run);
}

static void test_every_device_call_may_fail(void **state)
{
    for (int eager = 0; eager < 2; eager++) {
        sp_engine *engine = open_engine(eager != 0, 1);
        engine_run expected = make_run(1, "a", 1.0f), *list[] = {&expected};
        int64_t fired = 0;

        load(engine, "a", "all-linear");
        engine_run_submit(engine, &expected);
        engine_run_all(engine, list, 1);
        faulty_device_wrap(engine->device);
        for (int64_t n = 0; n < 10000; n++) {
            faulty_device_fail_after(n);
            check_one_failure(engine, &expected, &fired);
            if (!faulty_device_failed())
                break;
        }
        faulty_device_fail_after(-1);
        assert_true(fired > 10);
        engine_run_free(&expected);
        sp_engine_close(engine);
    }
    (void)state;
}

#define LAUNCH_FAILURE 719 /* cudaErrorLaunchFailure */

static int fail_launch(int number, const void *call, void *stream)
{
    (void)number;
    (void)call;
    (void)stream;
    return LAUNCH_FAILURE;
}

/* Each launcher fails once: when the pass is captured, which is at the third step, and eagerly. */
static void test_every_launch_may_fail(void **state)
{
    const sp_cuda_sample no_sample = {0};

    (void)state;
    for (int i = 0; i < 18; i++) {
        sp_engine *engine = open_engine(i % 2 != 0, 1);
        sp_cuda_ops *ops = (sp_cuda_ops *)engine->ops;
        sp_cuda_ops_kernels real = ops->kernels;
        engine_run run = make_run(1, "a", 1.0f), again = make_run(1, "a", 1.0f);
        engine_run *list[] = {&run}, *list_again[] = {&again};
        int failures;

        if (i / 2 == 8 && real.sample_rows(ops->gpu, &no_sample, ops->native)) {
            sp_engine_close(engine); /* not supported: nothing launches it */
            continue;
        }
        run.request.logprobs = again.request.logprobs = i / 2 != 7; /* with them no row is plain */
        load(engine, "a", "all-linear");
        engine_run_submit(engine, &run);
        for (int step = 0; step < (i % 2 ? 0 : 2); step++)
            engine_run_step(engine, list, 1);
        switch (i / 2) {
#define FAIL(n, name)                                                                   \
    case n:                                                                             \
        ops->kernels.name = (__typeof__(ops->kernels.name))(void (*)(void))fail_launch; \
        break
            FAIL(0, gather_rows);
            FAIL(1, norm_rows);
            FAIL(2, silu_mul);
            FAIL(3, rope_rows);
            FAIL(4, attention_plan);
            FAIL(5, attend_rows);
            FAIL(6, pick_rows);
            FAIL(7, greedy_rows);
            FAIL(8, sample_rows);
        }
        failures = 0;
        for (int step = 0; step < 4 && failures == 0; step++) {
            sp_error error;

            failures += engine_run_try_step(engine, list, 1, &error) == SP_ERR_DEVICE;
        }
        assert_int_equal(failures, 1);
        ops->kernels = real;
        assert_int_equal(run_through_failures(engine, list, 1), 0);
        engine_run_submit(engine, &again);
        engine_run_all(engine, list_again, 1);
        engine_run_assert_same(&again, &run);
        engine_run_free(&again);
        engine_run_free(&run);
        sp_engine_close(engine);
    }
}

static void test_two_engines_share_a_gpu(void **state)
{
    sp_engine *first = open_engine(false, 1), *second = open_engine(false, 1);
    engine_run a[2], b[2];
    engine_run *list_a[] = {&a[0]}, *list_b[] = {&b[0]};
    bool more_a = true, more_b = true;

    (void)state;
    load(first, "a", "all-linear");
    load(second, "a", "ffn");
    for (int i = 0; i < 2; i++) {
        a[i] = make_run(0, "a", 1.0f);
        b[i] = make_run(1, "a", 1.0f);
    }
    engine_run_submit(first, &a[0]);
    engine_run_submit(second, &b[0]);
    while (more_a || more_b) {
        more_a = more_a && engine_run_step(first, list_a, 1);
        more_b = more_b && engine_run_step(second, list_b, 1);
    }
    list_a[0] = &a[1];
    list_b[0] = &b[1];
    engine_run_submit(first, &a[1]);
    engine_run_all(first, list_a, 1);
    engine_run_submit(second, &b[1]);
    engine_run_all(second, list_b, 1);
    engine_run_assert_same(&a[0], &a[1]);
    engine_run_assert_same(&b[0], &b[1]);
    assert_memory_not_equal(a[0].scores, b[0].scores, sizeof *a[0].scores);
    for (int i = 0; i < 2; i++) {
        engine_run_free(&a[i]);
        engine_run_free(&b[i]);
    }
    sp_engine_close(first);
    sp_engine_close(second);
}

/* Whether the GPU has products through wgmma, and so those that fold: one of 64 by 64 zeros. */
static bool has_wide_products(const sp_cuda_ops *cuda)
{
    enum { N = 64, BYTES = N * N * 2 };
    sp_cuda_gemm gemm = {
        .form = SP_CUDA_GEMM_WIDE, .rows = N, .k = N, .x_stride = N, .n_outputs = 1};
    void *memory;
    int code;

    assert_int_equal(sp_device_alloc(cuda->device, (size_t)3 * BYTES, &memory, NULL), SP_OK);
    gemm.x = memory;
    gemm.outputs[0] = (sp_cuda_gemm_output){
        .w = (char *)memory + BYTES, .y = (char *)memory + 2 * BYTES, .y_stride = N, .n = N};
    code = cuda->kernels.base_gemm(cuda->gpu, cuda->gemm, &gemm, cuda->native);
    assert_int_equal(sp_stream_wait(cuda->stream, NULL), SP_OK);
    sp_device_free(cuda->device, memory);
    return code != SP_CUDA_NOT_SUPPORTED;
}

/* Prompts of two adapters and of the base in one step, whose products fold the deltas in, and in
 * steps of fewer rows, which have separate expands. */
static void compare_folded(const char *first, const char *second)
{
    static const char *const adapters[] = {"a", "b", NULL};
    static int32_t tokens[3][LONG_PROMPT];
    sp_engine *engines[] = {open_engine_of(false, 2, 512), open_engine_of(false, 2, 64)};
    const sp_cuda_ops *many = (const sp_cuda_ops *)engines[0]->ops;
    const sp_cuda_ops *few = (const sp_cuda_ops *)engines[1]->ops;
    sp_test_random random = {31};
    engine_run runs[2][3];

    for (int i = 0; i < 3; i++)
        engine_run_fill_prompt(&random, tokens[i], LONG_PROMPT, VOCAB);
    for (int e = 0; e < 2; e++) {
        engine_run *list[] = {&runs[e][0], &runs[e][1], &runs[e][2]};

        load(engines[e], "a", first);
        load(engines[e], "b", second);
        for (int i = 0; i < 3; i++) {
            runs[e][i] = engine_run_init(adapters[i], tokens[i], LONG_PROMPT, NEW);
            runs[e][i].keep_logits = true;
            engine_run_submit(engines[e], &runs[e][i]);
        }
        engine_run_all(engines[e], list, 3);
    }
    assert_int_equal(few->n_folded, 0);
    assert_int_equal(many->n_folded > 0, has_wide_products(many));
    for (int i = 0; i < 3; i++) {
        engine_run_assert_same(&runs[1][i], &runs[0][i]);
        engine_run_free(&runs[0][i]);
        engine_run_free(&runs[1][i]);
    }
    sp_engine_close(engines[0]);
    sp_engine_close(engines[1]);
}

static void test_folded_prompts_have_the_bits_of_others(void **state)
{
    (void)state;
    compare_folded("all-linear", "rslora-r16");
}

/* Products of outputs with biases are not folded into, so the expand follows the shrink that was
 * there for them. */
static void test_biases_are_beside_folded_products(void **state)
{
    (void)state;
    model = WITH_BIASES;
    compare_folded("all-linear-rs", "plain-r8");
    model = MODEL;
}

/* For the sanitizers: a prefill, decode steps, eager and captured, two adapters and the base. */
static void a_small_run(void **state)
{
    sp_engine *engine = open_engine(false, 2);
    engine_run runs[N_RUNS];

    (void)state;
    load(engine, "a", "all-linear");
    load(engine, "b", "patterns");
    for (int round = 0; round < 2; round++) {
        make_round(round, runs);
        run_round(engine, runs);
        for (int i = 0; i < N_RUNS; i++)
            engine_run_free(&runs[i]);
    }
    sp_engine_close(engine);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_small_run),
        cmocka_unit_test(test_graphs_survive_loads_and_scales),
        cmocka_unit_test(test_every_device_call_may_fail),
        cmocka_unit_test(test_every_launch_may_fail),
        cmocka_unit_test(test_two_engines_share_a_gpu),
        cmocka_unit_test(test_folded_prompts_have_the_bits_of_others),
        cmocka_unit_test(test_biases_are_beside_folded_products),
    };
    sp_test_random random = {97};

    for (int i = 0; i < N_RUNS; i++)
        engine_run_fill_prompt(&random, prompts[i], PROMPT, VOCAB);
    return gpu_main(&gpu, tests, sizeof tests / sizeof tests[0], NULL, NULL, argc, argv);
}
