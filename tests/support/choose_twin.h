/*
 * choose_twin.h: the choice of a token by the numbers of choose_rules.h, in plain C on the host:
 * all tokens are sorted, and sums run over them one by one. What choose.cu must equal bit by bit.
 */
#ifndef SP_TESTS_SUPPORT_CHOOSE_TWIN_H
#define SP_TESTS_SUPPORT_CHOOSE_TWIN_H

#include "engine/sampling/sampler.h"
#include "kernels/cuda/choose_rules.h"
#include "support/test.h"

#include <stdlib.h>

static inline int twin_descending(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x < y) - (x > y);
}

/* Keys of all logits, best first; to be freed. */
static inline uint64_t *twin_sort(const float *logits, int32_t vocab)
{
    uint64_t *keys = malloc((size_t)vocab * sizeof *keys);

    assert_non_null(keys);
    for (int32_t id = 0; id < vocab; id++)
        keys[id] = sp_choose_key(logits[id], id);
    qsort(keys, (size_t)vocab, sizeof *keys, twin_descending);
    return keys;
}

static inline float twin_weight(const sp_cuda_sample_row *row, float logit, float best)
{
    return sp_exp_scalar((logit - best) * row->inverse);
}

/* How many of the keys, best first, top-k and top-p keep. */
static inline int32_t twin_kept(const sp_cuda_sample_row *row, const uint64_t *keys, int32_t vocab)
{
    int32_t n = row->top_k > 0 && row->top_k < vocab ? row->top_k : vocab, kept = 0;
    float best = sp_choose_key_logit(keys[0]);
    uint64_t mass = 0, target, sum = 0;

    if (!(row->top_p < 1))
        return n;
    for (int32_t i = 0; i < n; i++)
        mass += sp_choose_part(twin_weight(row, sp_choose_key_logit(keys[i]), best));
    target = sp_choose_target(row->top_p, mass);
    while (sum < target)
        sum += sp_choose_part(twin_weight(row, sp_choose_key_logit(keys[kept++]), best));
    return kept;
}

/* The token of a row of finite logits or -inf, changed already. */
static inline int32_t twin_choose(const sp_cuda_sample_row *row, const float *logits, int32_t vocab)
{
    uint64_t *keys = twin_sort(logits, vocab), *parts = calloc((size_t)vocab, sizeof *parts);
    float best = sp_choose_key_logit(keys[0]);
    int32_t n = twin_kept(row, keys, vocab), token = sp_choose_key_id(keys[0]);
    uint64_t mass = 0, sum = 0, point;

    assert_non_null(parts);
    for (int32_t i = 0; i < n; i++) {
        float weight = twin_weight(row, sp_choose_key_logit(keys[i]), best);
        int32_t id = sp_choose_key_id(keys[i]);

        parts[id] = weight >= row->min_p ? sp_choose_part(weight) : 0;
        mass += parts[id];
    }
    point = sp_choose_point(mass, row->random);
    if (row->inverse > 0 && row->top_k != 1)
        for (token = 0; sum + parts[token] <= point; token++)
            sum += parts[token];
    free(keys), free(parts);
    return token;
}

/* The sum that a logprob is relative to. */
static inline uint64_t twin_mass(const float *logits, int32_t vocab)
{
    uint64_t mass = 0;
    float best = -INFINITY;

    for (int32_t id = 0; id < vocab; id++)
        best = logits[id] > best ? logits[id] : best;
    for (int32_t id = 0; id < vocab; id++)
        mass += sp_choose_part(sp_exp_softmax(logits[id] - best));
    return mass;
}

/* A row as an engine would write it for these parameters and output position. */
static inline sp_cuda_sample_row twin_row(const sp_sample_params *params, uint64_t position)
{
    const uint32_t key[2] = {(uint32_t)params->seed, (uint32_t)(params->seed >> 32)};
    const uint32_t counter[4] = {(uint32_t)position, (uint32_t)(position >> 32), 0, 0};
    sp_cuda_sample_row row = {.top_p = params->top_p,
                              .min_p = (float)params->min_p,
                              .top_k = params->top_k > 0 ? params->top_k : 0,
                              .repetition = 1,
                              .given = SP_CUDA_SAMPLE_CHOOSES,
                              .n_top = -1};
    uint32_t words[4];

    sp_philox4x32(counter, key, words);
    row.random = ((uint64_t)words[1] << 32 | words[0]) >> 11 << 11;
    if (params->temperature >= SP_TEMPERATURE_MIN)
        row.inverse = (float)(1 / params->temperature);
    return row;
}

#endif
