/*
 * test_choice_paths.c: the choices of a GPU's backend without a GPU: what it describes to the
 * kernel, what it takes back and what it leaves to the host, with a twin of the kernel in plain C.
 * tests/cuda/test_cuda_choice_paths.c holds the same on a GPU.
 */
#include "support/choice_paths.h"

static sp_device *cpu;
static sp_exec *threads;
static int n_samples, n_greedy, n_refusals;

/* ---- the kernel's twin --------------------------------------------------------------------- */

/* As sp_cuda_sample_result says. */
static int32_t why_bad(const float *logits, int32_t vocab)
{
    int32_t best;
    sp_error error = {0};
    sp_status status = sp_sample_greedy(logits, vocab, &best, &error);

    if (status == SP_OK)
        return -1;
    return strcmp(error.code, "no-token") == 0 ? -2 : (int32_t)error.position;
}

/* Each id comes once: else its order would decide. */
static void change(const sp_cuda_sample *sample, const sp_cuda_sample_row *row, float *logits)
{
    bool *seen = calloc((size_t)sample->vocab, sizeof *seen);

    assert_non_null(seen);
    for (int32_t i = row->first_change; i < row->first_change + row->n_changes; i++) {
        const sp_cuda_sample_change *one = &sample->changes[i];

        assert_in_range(one->token, 0, sample->vocab - 1);
        assert_false(seen[one->token]);
        seen[one->token] = true;
        logits[one->token] = sp_choose_change(row, one, logits[one->token]);
    }
    free(seen);
    if (row->mask > 0)
        sp_token_mask_apply(sample->masks +
                                (size_t)(row->mask - 1) * sp_token_mask_words(sample->vocab),
                            sample->vocab, logits);
}

static void tell_top(const sp_cuda_sample *sample, int32_t index, const float *logits)
{
    uint64_t *keys = twin_sort(logits, sample->vocab);

    for (int32_t i = 0; i < sample->row[index].n_top && i < sample->vocab; i++) {
        int32_t at = index * SP_CUDA_SAMPLE_TOP_MAX + i;

        sample->top_token[at] = sp_choose_key_id(keys[i]);
        sample->top_logit[at] = sp_choose_key_logit(keys[i]);
    }
    free(keys);
}

static void sample_row(const sp_cuda_sample *sample, int32_t index)
{
    const sp_cuda_sample_row *row = &sample->row[index];
    const float *logits = sample->logits + index * sample->stride;
    sp_cuda_sample_result result = {.token = row->given, .bad = why_bad(logits, sample->vocab)};
    float *changed = malloc((size_t)sample->vocab * sizeof *changed);
    int32_t best = -1;

    assert_non_null(changed);
    if (result.bad == -1) {
        assert_ok(sp_sample_greedy(logits, sample->vocab, &best, NULL), NULL);
        result.best = sp_choose_logit(sp_choose_order(logits[best]));
        result.mass = row->n_top >= 0 ? twin_mass(logits, sample->vocab) : 0;
        tell_top(sample, index, logits);
    }
    memcpy(changed, logits, (size_t)sample->vocab * sizeof *changed);
    if (result.bad == -1 && row->given < 0) {
        change(sample, row, changed);
        result.bad = why_bad(changed, sample->vocab);
    }
    if (result.bad != -1)
        result.token = -1;
    else if (row->given < 0)
        result.token = twin_choose(row, changed, sample->vocab);
    if (result.token >= 0)
        result.logit = logits[result.token];
    sample->result[index] = result;
    free(changed);
}

static int sample_rows(int gpu, const sp_cuda_sample *sample, void *stream)
{
    (void)gpu;
    (void)stream;
    n_samples += sample->rows > 0;
    for (int32_t i = 0; i < sample->rows; i++)
        if (sample->row[i].given != SP_CUDA_SAMPLE_NO_ROW)
            sample_row(sample, i);
    return 0;
}

static int refuse_rows(int gpu, const sp_cuda_sample *sample, void *stream)
{
    (void)gpu;
    (void)sample;
    (void)stream;
    n_refusals++;
    return SP_CUDA_NOT_SUPPORTED;
}

static int greedy_rows(int gpu, const sp_cuda_greedy *greedy, void *stream)
{
    (void)gpu;
    (void)stream;
    n_greedy++;
    for (int32_t i = 0; i < greedy->rows; i++) {
        const float *logits = greedy->logits + i * greedy->stride;

        greedy->token[i] = -1;
        greedy->bad[i] = why_bad(logits, greedy->vocab);
        (void)sp_sample_greedy(logits, greedy->vocab, &greedy->token[i], NULL);
    }
    return 0;
}

static const sp_cuda_ops_kernels twins = {.sample_rows = sample_rows, .greedy_rows = greedy_rows};

/* ---- cases --------------------------------------------------------------------------------- */

static choice_scene *create(int32_t n, int32_t vocab)
{
    choice_scene *scene = choice_scene_create(cpu, 0, threads, &twins, n, vocab);

    assert_false(scene->failed);
    return scene;
}

static void test_random_rows(void **state)
{
    static const int32_t vocabs[] = {1, 2, 33, 257, 1000};

    (void)state;
    for (size_t i = 0; i < sizeof vocabs / sizeof vocabs[0]; i++) {
        choice_scene *scene = create(CHOICE_ROWS, vocabs[i]);

        n_samples = n_greedy = 0;
        paths_check_random(scene, 10 + i, 12);
        assert_int_equal(n_samples, 2 * 12); /* the kernel's path and the mixed one */
        choice_scene_destroy(scene);
    }
}

static void test_a_window_of_one(void **state)
{
    choice_scene *scene = create(1, 700);

    (void)state;
    paths_check_random(scene, 5, 60);
    choice_scene_destroy(scene);
}

static void test_plain_rows(void **state)
{
    choice_scene *scene = create(17, 400);

    (void)state;
    n_samples = n_greedy = 0;
    paths_check_plain(scene, 6);
    assert_int_equal(n_greedy, 2);
    assert_int_equal(n_samples, 1);
    choice_scene_destroy(scene);
}

static void test_scores(void **state)
{
    choice_scene *scene = create(40, 1000);

    (void)state;
    paths_check_scores(scene, 7);
    choice_scene_destroy(scene);
}

static void test_bad_rows(void **state)
{
    choice_scene *scene = create(40, 600);

    (void)state;
    paths_check_bad_rows(scene, 8);
    choice_scene_destroy(scene);
}

/* A GPU that lacks the kernel, and a vocabulary that is too large for it. */
static void test_what_the_host_does(void **state)
{
    const sp_cuda_ops_kernels refuses = {.sample_rows = refuse_rows, .greedy_rows = greedy_rows};
    static choice_answer answers[CHOICE_ROWS];
    sp_test_random random = {9};
    choice_scene *scene;

    (void)state;
    n_refusals = 0;
    scene = choice_scene_create(cpu, 0, threads, &refuses, 12, 500);
    assert_false(scene->failed || scene->cuda.samples.there);
    choice_scene_fill(scene, &random);
    choice_scene_run(scene, answers);
    for (int32_t i = 0; i < scene->n; i++)
        paths_check_row(scene, i, &answers[i]);
    assert_int_equal(n_refusals, 1);
    choice_scene_destroy(scene);
    scene = create(2, SP_CUDA_SAMPLE_VOCAB_MAX + 1);
    assert_false(scene->cuda.samples.there);
    choice_scene_fill(scene, &random);
    choice_scene_run(scene, answers);
    for (int32_t i = 0; i < scene->n; i++)
        paths_check_row(scene, i, &answers[i]);
    choice_scene_destroy(scene);
}

/* The number of threads changes nothing. */
static void test_threads(void **state)
{
    static choice_answer want[CHOICE_ROWS], got[CHOICE_ROWS];
    choice_scene *one = choice_scene_create(cpu, 0, NULL, &twins, 30, 900), *more = create(30, 900);
    sp_test_random random = {12}, again = {12};

    (void)state;
    choice_scene_fill(one, &random);
    choice_scene_fill(more, &again);
    choice_scene_run(one, want);
    choice_scene_run(more, got);
    paths_assert_same(one, want, got);
    choice_scene_destroy(one);
    choice_scene_destroy(more);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_rows), cmocka_unit_test(test_a_window_of_one),
        cmocka_unit_test(test_plain_rows),  cmocka_unit_test(test_scores),
        cmocka_unit_test(test_bad_rows),    cmocka_unit_test(test_what_the_host_does),
        cmocka_unit_test(test_threads),
    };
    sp_exec_options options;
    int failed;

    sp_exec_options_default(&options, sizeof options);
    options.threads = 3;
    assert_ok(sp_device_open("cpu", NULL, &cpu, NULL), NULL);
    assert_ok(sp_exec_create(&options, &threads, NULL), NULL);
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    sp_exec_destroy(threads);
    sp_device_close(cpu);
    return failed;
}
