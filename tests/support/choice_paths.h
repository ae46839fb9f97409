/*
 * choice_paths.h: what tests of a GPU's choices hold, on a GPU or on its twin: the kernel's answers
 * are those of the host's path byte by byte, tokens are those of choose_twin.h, logprobs those of
 * sums in double, and nothing but answers is read.
 */
#ifndef SP_TESTS_SUPPORT_CHOICE_PATHS_H
#define SP_TESTS_SUPPORT_CHOICE_PATHS_H

#include "support/choice_scene.h"
#include "support/choose_twin.h"

static inline int32_t paths_rows_fetched(const choice_scene *scene)
{
    int32_t n = 0;

    for (int32_t i = 0; i < scene->n; i++)
        n += scene->cuda.window.fetched[i];
    return n;
}

static inline void paths_assert_same(const choice_scene *scene, const choice_answer *want,
                                     const choice_answer *got)
{
    for (int32_t i = 0; i < scene->n; i++)
        if (memcmp(&want[i], &got[i], sizeof *want) != 0)
            fail_msg("row %d of %d: status %d, token %d, logprob %a, not %d, %d, %a", i,
                     scene->vocab, got[i].status, got[i].token, (double)got[i].logprob,
                     want[i].status, want[i].token, (double)want[i].logprob);
}

static inline double paths_logprob(const float *logits, int32_t vocab, int32_t token)
{
    double best = -INFINITY, sum = 0, logprob;

    for (int32_t i = 0; i < vocab; i++)
        best = (double)logits[i] > best ? (double)logits[i] : best;
    for (int32_t i = 0; i < vocab; i++)
        sum += exp((double)logits[i] - best);
    logprob = (double)logits[token] - best - log(sum);
    return logprob > SP_LOGPROB_MIN ? logprob : SP_LOGPROB_MIN;
}

/* A row of numbers, by the rules for one request alone. */
static inline void paths_check_row(const choice_scene *scene, int32_t index,
                                   const choice_answer *answer)
{
    const float *logits = scene->logits + (size_t)index * (size_t)scene->vocab;
    const sp_choice *choice = &scene->choices[index];
    int32_t vocab = scene->vocab, n_output = choice->n_tokens - choice->n_prompt;
    float *changed = malloc((size_t)vocab * sizeof *changed);
    int32_t *counts = calloc((size_t)vocab, sizeof *counts);

    assert_true(changed && counts);
    memcpy(changed, logits, (size_t)vocab * sizeof *changed);
    if (n_output < choice->ends->min_tokens)
        sp_ends_forbid(choice->ends, changed);
    sp_penalties_apply(choice->penalties, choice->tokens, choice->n_prompt, choice->n_tokens,
                       counts, changed);
    if (choice->mask)
        sp_token_mask_apply(choice->mask, vocab, changed);
    if (choice->sampling && answer->status == SP_OK) {
        const sp_cuda_sample_row row = twin_row(choice->sampling, (uint64_t)n_output);

        assert_int_equal(answer->token, twin_choose(&row, changed, vocab));
    } else if (choice->sampling) {
        for (int32_t i = 0; i < vocab; i++)
            assert_true(changed[i] <= -INFINITY);
    }
    if (choice->n_top >= 0 && answer->token >= 0 && answer->status == SP_OK)
        assert_true(fabs((double)answer->logprob - paths_logprob(logits, vocab, answer->token)) <
                    1e-5 * (1 + fabs((double)answer->logprob)));
    free(changed);
    free(counts);
}

/* The kernel's path, the host's, and one on which few changes have room. */
static inline void paths_check_scene(choice_scene *scene)
{
    static choice_answer device[CHOICE_ROWS], host[CHOICE_ROWS], mixed[CHOICE_ROWS];
    sp_cuda_samples *samples = &scene->cuda.samples;
    int32_t changes_max = samples->changes_max;

    assert_false(scene->failed);
    assert_true(samples->there);
    memset(samples->host_out, 0xa5, 64);
    choice_scene_run(scene, device);
    assert_int_equal(paths_rows_fetched(scene), 0);
    for (int32_t i = 0; i < scene->n; i++)
        paths_check_row(scene, i, &device[i]);
    samples->there = false;
    choice_scene_run(scene, host);
    samples->there = true;
    paths_assert_same(scene, host, device);
    samples->changes_max = 100;
    choice_scene_run(scene, mixed);
    samples->changes_max = changes_max;
    paths_assert_same(scene, host, mixed);
}

static inline void paths_check_random(choice_scene *scene, uint64_t seed, int times)
{
    sp_test_random random = {seed};

    for (int again = 0; again < times; again++) {
        choice_scene_fill(scene, &random);
        paths_check_scene(scene);
    }
}

/* Rows that are alone, or best ones all: the smaller launch; nothing at all. */
static inline void paths_check_plain(choice_scene *scene, uint64_t seed)
{
    static choice_answer device[CHOICE_ROWS], host[CHOICE_ROWS];
    sp_test_random random = {seed};

    choice_scene_fill(scene, &random);
    for (int32_t i = 0; i < scene->n; i++) {
        scene->rows[i].params = sp_sample_params_default();
        scene->rows[i].ends.min_tokens = 0;
        scene->choices[i].sampling = i % 5 == 4 ? NULL : &scene->rows[i].params;
        scene->choices[i].adjusted = false;
        scene->choices[i].mask = NULL;
        scene->choices[i].given = scene->choices[i].n_top = -1;
    }
    choice_scene_run(scene, device);
    assert_int_equal(paths_rows_fetched(scene), 0);
    scene->cuda.samples.there = false;
    choice_scene_run(scene, host);
    assert_int_equal(paths_rows_fetched(scene), 0);
    scene->cuda.samples.there = true;
    paths_assert_same(scene, host, device);
    scene->choices[0].n_top = 3; /* one score takes the other launch */
    choice_scene_run(scene, device);
    assert_int_equal(device[0].token, host[0].token);
    device[0] = host[0];
    paths_assert_same(scene, host, device);
    for (int32_t i = 0; i < scene->n; i++)
        scene->choices[i].sampling = NULL;
    choice_scene_run(scene, device);
    assert_int_equal(paths_rows_fetched(scene), 0);
}

/* A token has the logprob that it has when it is scored later, on either path. */
static inline void paths_check_scores(choice_scene *scene, uint64_t seed)
{
    static choice_answer chosen[CHOICE_ROWS], scored[CHOICE_ROWS];
    sp_test_random random = {seed};

    choice_scene_fill(scene, &random);
    for (int32_t i = 0; i < scene->n; i++) {
        scene->choices[i].sampling = &scene->rows[i].params;
        scene->choices[i].given = -1;
        scene->choices[i].n_top = i % 6;
    }
    choice_scene_run(scene, chosen);
    for (int32_t i = 0; i < scene->n; i++) {
        scene->choices[i].given = chosen[i].token;
        scene->choices[i].sampling = NULL;
    }
    for (int on_host = 0; on_host < 2; on_host++) {
        scene->cuda.samples.there = on_host == 0;
        choice_scene_run(scene, scored);
        for (int32_t i = 0; i < scene->n; i++) {
            if (chosen[i].status == SP_OK)
                assert_memory_equal(&scored[i], &chosen[i], sizeof *scored);
        }
    }
    scene->cuda.samples.there = true;
}

/* Rows that are no numbers are refused alone, on either path, whatever changes them. */
static inline void paths_check_bad_rows(choice_scene *scene, uint64_t seed)
{
    static choice_answer device[CHOICE_ROWS], host[CHOICE_ROWS];
    sp_test_random random = {seed};
    int32_t vocab = scene->vocab;

    choice_scene_fill(scene, &random);
    for (int32_t i = 0; i < scene->n; i++) {
        float *row = scene->logits + (size_t)i * (size_t)vocab;

        if (i % 4 == 0)
            row[scene->rows[i].end_tokens[i / 4 % 2]] = i % 8 == 0 ? NAN : INFINITY;
        for (int32_t id = 0; id < vocab && i % 4 == 1; id++)
            row[id] = -INFINITY;
    }
    choice_scene_write(scene);
    choice_scene_run(scene, device);
    scene->cuda.samples.there = false;
    choice_scene_run(scene, host);
    scene->cuda.samples.there = true;
    paths_assert_same(scene, host, device);
    for (int32_t i = 0; i < scene->n; i++) {
        const sp_choice *choice = &scene->choices[i];

        if (i % 4 < 2 && choice->sampling)
            assert_int_equal(device[i].status, SP_ERR_INPUT);
        if (i % 4 < 2 && !choice->sampling && choice->given >= 0)
            assert_int_equal(device[i].scored, SP_ERR_INPUT);
    }
}

#endif
