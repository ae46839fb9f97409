/*
 * test_cuda_choice_paths.c: the choices of a GPU's backend: what the kernel answers is what the
 * host's path answers, byte by byte, for random requests; then the same in an engine, where rows
 * take one path or the other. Skipped where there is no GPU.
 */
#include "cuda/gpu_main.h"
#include "cuda/rig.h"
#include "support/choice_paths.h"
#include "support/engine_run.h"

#include "engine/engine_state.h"

#define N_RUNS 12
#define PROMPT 23
#define NEW    14
#define VOCAB  509

static sp_device *gpu;
static rig r;
static sp_cuda_ops_kernels ops;

static int open_launchers(void **state)
{
    sp_error error;

    (void)state;
    assert_ok(rig_start(&r, gpu, &error), &error);
    assert_ok(sp_ops_cuda_get(gpu, &ops, &error), &error);
    return 0;
}

static choice_scene *create(int32_t n, int32_t vocab)
{
    choice_scene *scene = choice_scene_create(gpu, r.gpu, NULL, &ops, n, vocab);

    assert_false(scene->failed);
    if (!scene->cuda.samples.there) {
        choice_scene_destroy(scene);
        skip();
    }
    return scene;
}

/* ---- windows ------------------------------------------------------------------------------- */

static void check_random(int32_t n, int32_t vocab, int times)
{
    choice_scene *scene = create(n, vocab);

    paths_check_random(scene, (uint64_t)vocab, times);
    choice_scene_destroy(scene);
}

static void a_small_window_has_one_answer(void **state)
{
    (void)state;
    check_random(9, 130, 2);
}

static void random_windows_have_one_answer(void **state)
{
    (void)state;
    check_random(CHOICE_ROWS, 1, 4);
    check_random(CHOICE_ROWS, 37, 20);
    check_random(CHOICE_ROWS, 1000, 20);
    check_random(1, 5003, 20);
    check_random(CHOICE_ROWS, 32003, 4);
    check_random(CHOICE_ROWS, 151936, 1);
}

static void plain_windows_have_one_answer(void **state)
{
    choice_scene *scene = create(33, 9001);

    (void)state;
    paths_check_plain(scene, 3);
    choice_scene_destroy(scene);
}

static void a_token_has_one_logprob(void **state)
{
    choice_scene *scene = create(CHOICE_ROWS, 20011);

    (void)state;
    paths_check_scores(scene, 4);
    choice_scene_destroy(scene);
}

static void bad_rows_have_one_answer(void **state)
{
    choice_scene *scene = create(CHOICE_ROWS, 3001);

    (void)state;
    paths_check_bad_rows(scene, 5);
    choice_scene_destroy(scene);
}

/* ---- an engine ----------------------------------------------------------------------------- */

static sp_engine *open_engine(void)
{
    sp_engine_options options;
    sp_engine *engine;
    sp_error error;

    sp_engine_options_default(&options, sizeof options);
    options.model_dir = SP_TEST_FIXTURES "/qwen3-tied";
    options.device = "cuda";
    options.threads = 2;
    options.kv_tokens = 4096;
    options.step_rows = 64;
    options.prefix_cache = false;
    assert_ok(sp_engine_open(&options, NULL, 0, &engine, &error), &error);
    return engine;
}

static engine_run make_run(const int32_t *prompt, const sp_logit_bias *bias, int i)
{
    engine_run run = engine_run_init(NULL, prompt, PROMPT, NEW);

    run.request.temperature = i % 3 ? 0.4 * i : 0;
    run.request.top_k = i % 4 == 1 ? 30 : 0;
    run.request.top_p = i % 2 ? 0.9 : 1;
    run.request.min_p = i % 5 == 4 ? 0.02 : 0;
    run.request.seed = (uint64_t)i * 77;
    run.request.presence_penalty = i % 3 == 1 ? 0.7 : 0;
    run.request.frequency_penalty = i % 5 == 2 ? -0.3 : 0;
    run.request.repetition_penalty = i % 4 == 3 ? 1.3 : 1;
    run.request.logit_bias = bias;
    run.request.n_logit_bias = i % 2 ? 2 : 0;
    run.request.logprobs = i % 4 != 2;
    run.request.prompt_logprobs = i % 3 == 0;
    run.request.top_logprobs = (i * 7) % (SP_TOP_LOGPROBS_MAX + 1);
    run.request.min_tokens = i % 2 ? NEW : 0;
    return run;
}

static void run_together(sp_engine *engine, engine_run *runs)
{
    engine_run *list[N_RUNS];

    for (int i = 0; i < N_RUNS; i++) {
        engine_run_submit(engine, &runs[i]);
        list[i] = &runs[i];
    }
    engine_run_all(engine, list, N_RUNS);
}

/* All rows on the device, none, and some that find no room for their changes. */
static void engines_have_one_answer(void **state)
{
    const sp_logit_bias bias[2] = {{7, 3.5f}, {11, -100}};
    static int32_t prompts[N_RUNS][PROMPT];
    sp_engine *engine = open_engine();
    sp_cuda_samples *samples = &((sp_cuda_ops *)engine->ops)->samples;
    sp_test_random random = {21};
    engine_run runs[3][N_RUNS];

    (void)state;
    if (!samples->there) {
        sp_engine_close(engine);
        skip();
    }
    for (int path = 0; path < 3; path++) {
        samples->there = path != 1;
        samples->changes_max = path == 2 ? 70 : samples->changes_max;
        for (int i = 0; i < N_RUNS; i++) {
            if (path == 0)
                engine_run_fill_prompt(&random, prompts[i], PROMPT, VOCAB);
            runs[path][i] = make_run(prompts[i], bias, i);
        }
        run_together(engine, runs[path]);
    }
    for (int i = 0; i < N_RUNS; i++)
        for (int path = 1; path < 3; path++)
            engine_run_assert_same(&runs[0][i], &runs[path][i]);
    for (int i = 0; i < N_RUNS; i++)
        for (int path = 0; path < 3; path++)
            engine_run_free(&runs[path][i]);
    sp_engine_close(engine);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_small_window_has_one_answer),
        cmocka_unit_test(random_windows_have_one_answer),
        cmocka_unit_test(plain_windows_have_one_answer),
        cmocka_unit_test(a_token_has_one_logprob),
        cmocka_unit_test(bad_rows_have_one_answer),
        cmocka_unit_test(engines_have_one_answer),
    };

    return gpu_main(&gpu, tests, sizeof tests / sizeof tests[0], open_launchers, NULL, argc, argv);
}
