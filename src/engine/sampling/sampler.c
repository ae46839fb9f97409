#include "engine/sampling/sampler.h"

#include "base/error.h"

#include <sidepath/engine.h>

#include <float.h>
#include <math.h>
#include <stdbool.h>

/* --- Random numbers ---------------------------------------------------------------------- */

void sp_philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out_words[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];

    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)c0 * 0xd2511f53u;
        uint64_t b = (uint64_t)c2 * 0xcd9e8d57u;

        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    out_words[0] = c0;
    out_words[1] = c1;
    out_words[2] = c2;
    out_words[3] = c3;
}

uint64_t sp_sample_random(uint64_t seed, uint64_t position)
{
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    const uint32_t counter[4] = {(uint32_t)position, (uint32_t)(position >> 32), 0, 0};
    uint32_t words[4];

    sp_philox4x32(counter, key, words);
    return ((uint64_t)words[1] << 32 | words[0]) >> 11 << 11;
}

double sp_sample_uniform(uint64_t seed, uint64_t position)
{
    return (double)(sp_sample_random(seed, position) >> 11) * 0x1p-53;
}

/* --- Parameters -------------------------------------------------------------------------- */

sp_sample_params sp_sample_params_default(void)
{
    return (sp_sample_params){.temperature = 0, .top_k = 0, .top_p = 1, .min_p = 0, .seed = 0};
}

size_t sp_sample_scratch_bytes(int32_t vocab)
{
    return vocab > 0 ? (size_t)vocab * (sizeof(float) + sizeof(int32_t)) : 0;
}

/* --- The best token ---------------------------------------------------------------------- */

#define LANES 16 /* independent maxima, so that the compiler can keep them in vectors */

static sp_status bad_logits(const float *logits, int32_t vocab, sp_error *error)
{
    int32_t id = 0;

    while (id < vocab && logits[id] <= FLT_MAX)
        id++;
    return sp_fail(error, SP_ERR_INPUT, "bad-logits", NULL, id, "the logit of token %d is %g", id,
                   id < vocab ? (double)logits[id] : 0.0);
}

sp_status sp_sample_greedy(const float *logits, int32_t vocab, int32_t *out_token, sp_error *error)
{
    float lane[LANES], best = -INFINITY;
    bool good = true;
    int32_t id = 0;

    if (vocab < 1)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "vocab", -1, "a vocabulary of %d", vocab);
    for (int j = 0; j < LANES; j++)
        lane[j] = -INFINITY;
    for (; id + LANES <= vocab; id += LANES)
        for (int j = 0; j < LANES; j++) {
            good &= logits[id + j] <= FLT_MAX;
            lane[j] = logits[id + j] > lane[j] ? logits[id + j] : lane[j];
        }
    for (; id < vocab; id++) {
        good &= logits[id] <= FLT_MAX;
        best = logits[id] > best ? logits[id] : best;
    }
    if (!good)
        return bad_logits(logits, vocab, error);
    for (int j = 0; j < LANES; j++)
        best = lane[j] > best ? lane[j] : best;
    if (best == -INFINITY)
        return sp_fail(error, SP_ERR_INPUT, "no-token", NULL, -1, "every logit is -inf");
    id = 0;
    while (logits[id] != best)
        id++;
    *out_token = id;
    return SP_OK;
}

/* --- Filters ----------------------------------------------------------------------------- */

/*
 * Tokens are ranked by logit, equal ones by id. A filter keeps the beginning of that order, so that
 * all filters together are one cut: the last token kept.
 */
typedef struct {
    const sp_kernels *kernels;
    const float *logits; /* [vocab] */
    int32_t vocab;
    float *weight; /* [vocab] scratch */
    bool weighed;  /* weight has that of every token, kept or not */
    int32_t *ids;  /* [vocab] scratch */
    float best;    /* the largest logit */
    float inverse; /* 1 / temperature */
    float min_p;
    int32_t last; /* the last token kept, or -1 for no cut */
} sampler;

static bool is_better(const float *logits, int32_t a, int32_t b)
{
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

static float weight_of(const sampler *sample, int32_t id)
{
    float weight;

    sample->kernels->exp_weights(&weight, &sample->logits[id], sample->best, sample->inverse, 1);
    return weight;
}

static void weigh_all(sampler *sample)
{
    sample->kernels->exp_weights(sample->weight, sample->logits, sample->best, sample->inverse,
                                 sample->vocab);
    sample->weighed = true;
}

/* Restores a heap below i. The root is the worst token. */
static void sift_down(const sampler *sample, int32_t n, int32_t i)
{
    int32_t *heap = sample->ids, moved = heap[i];

    for (;;) {
        int32_t child = 2 * i + 1;

        if (child >= n)
            break;
        if (child + 1 < n && is_better(sample->logits, heap[child], heap[child + 1]))
            child++;
        if (is_better(sample->logits, heap[child], moved))
            break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = moved;
}

/* Leaves the k best ids as a heap, the worst of them at its root: the cut. */
static void cut_top_k(sampler *sample, int32_t k)
{
    for (int32_t id = 0; id < k; id++)
        sample->ids[id] = id;
    for (int32_t i = k / 2 - 1; i >= 0; i--)
        sift_down(sample, k, i);
    for (int32_t id = k; id < sample->vocab; id++)
        if (sample->logits[id] > sample->logits[sample->ids[0]]) {
            sample->ids[0] = id;
            sift_down(sample, k, 0);
        }
    sample->last = sample->ids[0];
}

/*
 * Collects the tokens that top-p may keep and returns their number; *out_mass is the mass of the
 * n_kept tokens that top-k left. A token below (1 - top_p) · mass / n cannot be among the best ones
 * up to top_p · mass: the mass of all such tokens together is below what may be left out. The half
 * allows for the rounding of the sums.
 */
static int32_t collect_for_top_p(sampler *sample, double top_p, int32_t n_kept, double *out_mass)
{
    bool is_cut = sample->last >= 0;
    double mass = 0;
    float floor;
    int32_t n = 0;

    if (!is_cut)
        weigh_all(sample);
    for (int32_t i = 0; i < n_kept; i++) {
        int32_t id = is_cut ? sample->ids[i] : i;

        if (is_cut)
            sample->weight[id] = weight_of(sample, id);
        mass += sample->weight[id];
    }
    floor = (float)(0.5 * (1 - top_p) * mass / n_kept);
    floor = sample->min_p > floor ? sample->min_p : floor;
    for (int32_t i = 0; i < n_kept; i++) {
        int32_t id = is_cut ? sample->ids[i] : i;

        if (sample->weight[id] >= floor)
            sample->ids[n++] = id;
    }
    *out_mass = mass;
    return n;
}

static void swap(int32_t *a, int32_t *b)
{
    int32_t held = *a;

    *a = *b;
    *b = held;
}

/*
 * Moves the tokens of ids[low .. high) that are better than the middle one before it; returns its
 * new index, and the mass of those before it.
 */
static int32_t partition(const sampler *sample, int32_t low, int32_t high, double *out_mass)
{
    int32_t *ids = sample->ids, at = low, pivot;
    double mass = 0;

    swap(&ids[low + (high - low) / 2], &ids[high - 1]);
    pivot = ids[high - 1];
    for (int32_t i = low; i < high - 1; i++)
        if (is_better(sample->logits, ids[i], pivot)) {
            mass += sample->weight[ids[i]];
            swap(&ids[i], &ids[at++]);
        }
    swap(&ids[at], &ids[high - 1]);
    *out_mass = mass;
    return at;
}

/* Finds the token at which the best ones reach top_p of the mass, without sorting them. */
static void cut_top_p(sampler *sample, double top_p, int32_t n_kept)
{
    double mass, target;
    int32_t low = 0, high = collect_for_top_p(sample, top_p, n_kept, &mass);

    target = top_p * mass;
    while (low < high) {
        int32_t at = partition(sample, low, high, &mass);

        if (at > low && mass >= target) {
            high = at;
            continue;
        }
        sample->last = sample->ids[at];
        target -= mass + sample->weight[sample->last];
        if (target <= 0)
            return;
        low = at + 1;
    }
}

/* Computes the weights of the kept tokens, 0 for all others, and returns their mass. */
static double weigh(sampler *sample)
{
    double mass = 0;

    if (sample->last < 0 && !sample->weighed)
        weigh_all(sample);
    for (int32_t id = 0; id < sample->vocab; id++) {
        float weight = 0;

        if (sample->last < 0 || !is_better(sample->logits, sample->last, id))
            weight = sample->weighed ? sample->weight[id] : weight_of(sample, id);
        if (weight < sample->min_p)
            weight = 0;
        sample->weight[id] = weight;
        mass += weight;
    }
    return mass;
}

/* The token whose part of the mass contains `target`, which is below the mass; the best one always
 * has weight 1. */
static int32_t draw(const sampler *sample, double target)
{
    double sum = 0;
    int32_t id = 0;

    for (; id < sample->vocab - 1; id++) {
        sum += sample->weight[id];
        if (sum > target)
            break;
    }
    return id;
}

/* Computes the weights of what the filters keep, and returns their mass. */
static double cut_and_weigh(sampler *sample, const sp_sample_params *params, int32_t best,
                            void *scratch)
{
    int32_t n_kept = sample->vocab;

    sample->weight = scratch;
    sample->ids = (int32_t *)(sample->weight + sample->vocab);
    sample->best = sample->logits[best];
    sample->inverse = (float)(1 / params->temperature);
    sample->min_p = (float)params->min_p;
    if (params->top_k > 0 && params->top_k < sample->vocab) {
        n_kept = params->top_k;
        cut_top_k(sample, n_kept);
    }
    if (params->top_p < 1)
        cut_top_p(sample, params->top_p, n_kept);
    return weigh(sample);
}

sp_status sp_sample(const sp_kernels *kernels, const float *logits, int32_t vocab,
                    const sp_sample_params *params, uint64_t position, void *scratch,
                    int32_t *out_token, sp_error *error)
{
    sampler sample = {.kernels = kernels, .logits = logits, .vocab = vocab, .last = -1};
    int32_t best;
    sp_status status = sp_sample_greedy(logits, vocab, &best, error);

    if (status != SP_OK)
        return status;
    if (params->temperature < SP_TEMPERATURE_MIN || params->top_k == 1) {
        *out_token = best;
        return SP_OK;
    }
    *out_token = draw(&sample, cut_and_weigh(&sample, params, best, scratch) *
                                   sp_sample_uniform(params->seed, position));
    return SP_OK;
}

sp_status sp_sample_logprob(const sp_kernels *kernels, const float *logits, int32_t vocab,
                            const sp_sample_params *params, void *scratch, int32_t token,
                            float *out_logprob, sp_error *error)
{
    sp_sample_params used = *params;
    sampler sample = {.kernels = kernels, .logits = logits, .vocab = vocab, .last = -1};
    int32_t best;
    double mass, logprob;
    sp_status status = sp_sample_greedy(logits, vocab, &best, error);

    if (status != SP_OK)
        return status;
    if (params->temperature < SP_TEMPERATURE_MIN)
        used = (sp_sample_params){.temperature = 1, .top_p = 1};
    mass = cut_and_weigh(&sample, &used, best, scratch);
    /* Of the logit, not of the weight, which may be too small for a float. */
    logprob = (double)(logits[token] - sample.best) / used.temperature - log(mass);
    if (!(sample.weight[token] > 0) && (used.top_k > 0 || used.top_p < 1 || used.min_p > 0))
        logprob = SP_LOGPROB_MIN;
    *out_logprob = (float)(logprob > SP_LOGPROB_MIN ? logprob : SP_LOGPROB_MIN);
    return SP_OK;
}
