/*
 * choice_scene.h: a window of random logits and random choices for the backend of a GPU, without an
 * engine around it: sp_cuda_ops with the members that choices need, on a GPU or, with a twin of its
 * kernels, in the host's memory. For tests and the bench; failures of set-up are kept in `failed`.
 */
#ifndef SP_TESTS_SUPPORT_CHOICE_SCENE_H
#define SP_TESTS_SUPPORT_CHOICE_SCENE_H

#include "base/alloc.h"
#include "engine/ops/cuda_ops.h"
#include "support/test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CHOICE_ROWS = 48, CHOICE_TOKENS = 90, CHOICE_BIASES = 3, CHOICE_ENDS = 2 };

/* What a row's choice borrows. */
typedef struct choice_row {
    sp_sample_params params;
    sp_penalties penalties;
    sp_logit_bias bias[CHOICE_BIASES];
    sp_ends ends;
    int32_t end_tokens[CHOICE_ENDS], tokens[CHOICE_TOKENS];
    uint32_t *mask; /* owned; NULL: none */
} choice_row;

/* All that a row's choice and score say. */
typedef struct choice_answer {
    sp_status status, scored;
    int32_t token;
    float logprob;
    sp_logprob top[SP_TOP_LOGPROBS_MAX];
} choice_answer;

typedef struct choice_scene {
    sp_cuda_ops cuda;
    sp_ops_options options;
    int32_t n, vocab;
    float *logits; /* [n, vocab] as on the device */
    choice_row rows[CHOICE_ROWS];
    sp_choice choices[CHOICE_ROWS];
    bool failed;
} choice_scene;

/* ---- life ---------------------------------------------------------------------------------- */

static inline void choice_scene_place(choice_scene *scene)
{
    sp_cuda_ops *cuda = &scene->cuda;
    sp_cuda_window *window = &cuda->window;
    size_t index = (size_t)scene->n * sizeof(int32_t), logits = index * (size_t)scene->vocab;
    sp_status status = SP_OK;

    window->logits = sp_cuda_block(cuda, logits, &status, NULL);
    window->token = sp_cuda_block(cuda, index, &status, NULL);
    window->bad = sp_cuda_block(cuda, index, &status, NULL);
    window->greedy_scratch = sp_cuda_block(cuda, sp_cuda_greedy_bytes(scene->n), &status, NULL);
    window->host_logits = sp_cuda_pinned(cuda, logits, &status, NULL);
    window->host_token = sp_cuda_pinned(cuda, index, &status, NULL);
    window->host_bad = sp_cuda_pinned(cuda, index, &status, NULL);
    if (status == SP_OK)
        status = sp_cuda_samples_create(cuda, NULL);
    scene->logits = calloc((size_t)scene->n * (size_t)scene->vocab, sizeof(float));
    scene->failed = status != SP_OK || !scene->logits ||
                    !sp_host_choice_create(&scene->options, scene->n, &cuda->choice);
    cuda->choice.exact = true;
}

/* n, at most CHOICE_ROWS, rows; `exec` may be NULL, and is borrowed. */
static inline choice_scene *choice_scene_create(sp_device *device, int gpu, sp_exec *exec,
                                                const sp_cuda_ops_kernels *kernels, int32_t n,
                                                int32_t vocab)
{
    choice_scene *scene = calloc(1, sizeof *scene);
    sp_cuda_ops *cuda = &scene->cuda;

    scene->n = n;
    scene->vocab = vocab;
    scene->options = (sp_ops_options){.exec = exec, .vocab = vocab};
    scene->failed = sp_kernels_get("scalar", &scene->options.kernels, NULL) != SP_OK;
    cuda->device = device;
    cuda->gpu = gpu;
    cuda->kernels = *kernels;
    cuda->stream = sp_device_main_stream(device);
    cuda->native = sp_stream_native(cuda->stream);
    cuda->vocab = vocab;
    cuda->ops.window = n;
    cuda->attention.positions_max = CHOICE_TOKENS;
    choice_scene_place(scene);
    return scene;
}

static inline void choice_scene_destroy(choice_scene *scene)
{
    sp_cuda_ops *cuda = &scene->cuda;

    for (size_t i = 0; i < cuda->n_blocks; i++)
        sp_device_free(cuda->device, cuda->blocks[i]);
    for (size_t i = 0; i < cuda->n_pinned; i++)
        sp_device_free_pinned(cuda->device, cuda->pinned[i]);
    sp_free(cuda->blocks);
    sp_free(cuda->pinned);
    sp_host_choice_destroy(&cuda->choice);
    for (int32_t i = 0; i < scene->n; i++)
        free(scene->rows[i].mask);
    free(scene->logits);
    free(scene);
}

/* ---- random choices ------------------------------------------------------------------------ */

static inline bool choice_one_in(sp_test_random *random, uint32_t n)
{
    return sp_test_below(random, n) == 0;
}

static inline sp_sample_params choice_params(sp_test_random *random)
{
    static const double temperatures[] = {0, 0.1, 0.7, 1, 1, 1.5, 20, 1000};
    static const int32_t tops[] = {0, -1, 0, 1, 2, 20, 50, 1000};
    static const double masses[] = {1, 1, 0.95, 0.8, 0.5, 0.1, 0.999, 0};
    static const double shares[] = {0, 0, 0, 0, 0.05, 0.2, 1, 1e-6};

    return (sp_sample_params){.temperature = temperatures[sp_test_below(random, 8)],
                              .top_k = tops[sp_test_below(random, 8)],
                              .top_p = masses[sp_test_below(random, 8)],
                              .min_p = shares[sp_test_below(random, 8)],
                              .seed = sp_test_next(random)};
}

static inline void choice_fill_penalties(choice_row *row, sp_test_random *random, int32_t vocab)
{
    int32_t first = (int32_t)sp_test_below(random, (uint32_t)vocab);

    row->penalties = (sp_penalties){.repetition = 1, .bias = row->bias};
    if (choice_one_in(random, 3))
        row->penalties.repetition = 1 + 0.5 * (double)sp_test_float(random);
    if (choice_one_in(random, 3))
        row->penalties.presence = 2 * (double)sp_test_float(random);
    if (choice_one_in(random, 3))
        row->penalties.frequency = (double)sp_test_float(random);
    if (choice_one_in(random, 3))
        row->penalties.n_bias = vocab < CHOICE_BIASES ? 1 : CHOICE_BIASES;
    for (int32_t i = 0; i < CHOICE_BIASES; i++)
        row->bias[i] = (sp_logit_bias){(first + i) % vocab, 40 * sp_test_float(random)};
}

/* A mask that allows at least one id, and seldom many. */
static inline uint32_t *choice_mask(sp_test_random *random, int32_t vocab)
{
    uint32_t *mask = calloc(sp_token_mask_words(vocab), sizeof *mask);
    uint32_t every = 1 + sp_test_below(random, 40);

    for (int32_t id = 0; mask && id < vocab; id++)
        if (choice_one_in(random, every))
            sp_token_mask_set(mask, id, 1);
    if (mask)
        sp_token_mask_set(mask, (int32_t)sp_test_below(random, (uint32_t)vocab), 1);
    return mask;
}

/* Tokens repeat, are biased, penalised and ends at once. */
static inline void choice_fill_row(choice_scene *scene, int32_t index, sp_test_random *random)
{
    choice_row *row = &scene->rows[index];
    int32_t vocab = scene->vocab, few = vocab < 60 ? vocab : 60;
    bool scores = choice_one_in(random, 5), wants_score = scores || choice_one_in(random, 2);

    row->params = choice_params(random);
    choice_fill_penalties(row, random, vocab);
    for (int32_t i = 0; i < CHOICE_TOKENS; i++)
        row->tokens[i] = i % 4 == 3 ? row->bias[i % CHOICE_BIASES].token
                                    : (int32_t)sp_test_below(random, (uint32_t)few);
    row->end_tokens[0] = row->bias[0].token;
    row->end_tokens[1] = row->tokens[4];
    row->ends = (sp_ends){row->end_tokens, CHOICE_ENDS, choice_one_in(random, 3) ? 1000 : 0};
    free(row->mask);
    row->mask = choice_one_in(random, 4) ? choice_mask(random, vocab) : NULL;
    scene->choices[index] = (sp_choice){
        .sampling = scores || choice_one_in(random, 12) ? NULL : &row->params,
        .penalties = &row->penalties,
        .ends = &row->ends,
        .tokens = row->tokens,
        .n_prompt = (int32_t)sp_test_below(random, CHOICE_TOKENS / 2),
        .n_tokens = CHOICE_TOKENS / 2 + (int32_t)sp_test_below(random, CHOICE_TOKENS / 2),
        .adjusted = sp_penalties_any(&row->penalties) || row->mask,
        .mask = row->mask,
        .given = scores ? (int32_t)sp_test_below(random, (uint32_t)vocab) : -1,
        .n_top = wants_score ? (int32_t)sp_test_below(random, SP_TOP_LOGPROBS_MAX + 1) : -1,
    };
}

/* The device's logits are those of the scene. */
static inline void choice_scene_write(choice_scene *scene)
{
    size_t bytes = (size_t)scene->n * (size_t)scene->vocab * sizeof(float);

    scene->failed |= sp_device_write(scene->cuda.device, scene->cuda.window.logits, scene->logits,
                                     bytes, NULL) != SP_OK;
}

static inline void choice_scene_fill(choice_scene *scene, sp_test_random *random)
{
    size_t n = (size_t)scene->n * (size_t)scene->vocab;

    for (size_t i = 0; i < n; i++)
        scene->logits[i] = sp_test_float(random) * 7 + sp_test_float(random) * 7;
    for (int32_t i = 0; i < scene->n; i++)
        choice_fill_row(scene, i, random);
    choice_scene_write(scene);
}

/* ---- answers ------------------------------------------------------------------------------- */

/* Forgets what was read of the window, as new logits do. */
static inline void choice_scene_begin(choice_scene *scene)
{
    sp_cuda_ops *cuda = &scene->cuda;

    memset(cuda->window.fetched, 0, sizeof cuda->window.fetched);
    memset(cuda->samples.n_top, -1, sizeof cuda->samples.n_top);
    cuda->ops.status = SP_OK;
}

/* Chooses, then scores what the choices say. */
static inline void choice_scene_run(choice_scene *scene, choice_answer *out)
{
    choice_scene_begin(scene);
    memset(out, 0, (size_t)scene->n * sizeof *out);
    sp_cuda_op_choose(&scene->cuda.ops, scene->choices, scene->n);
    for (int32_t i = 0; i < scene->n; i++) {
        const sp_choice *choice = &scene->choices[i];

        out[i].status = choice->sampling ? choice->status : SP_OK;
        out[i].token = choice->sampling && choice->status == SP_OK ? choice->token : choice->given;
        if (out[i].status == SP_OK && choice->n_top >= 0 && out[i].token >= 0)
            out[i].scored = sp_cuda_op_score(&scene->cuda.ops, i, out[i].token, choice->n_top,
                                             &out[i].logprob, out[i].top);
    }
}

#endif
