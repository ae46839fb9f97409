#include "engine/ops/exact_choice.h"

#include "kernels/cuda/choose_rules.h"

sp_cuda_sample_row sp_exact_row(const sp_sample_params *params, uint64_t position)
{
    sp_cuda_sample_row row = {
        .random = sp_sample_random(params->seed, position),
        .top_p = params->top_p,
        .min_p = (float)params->min_p,
        .top_k = params->top_k > 0 ? params->top_k : 0,
        .repetition = 1,
        .given = SP_CUDA_SAMPLE_CHOOSES,
        .n_top = -1,
    };

    if (params->temperature >= SP_TEMPERATURE_MIN)
        row.inverse = (float)(1 / params->temperature);
    return row;
}

/* ---- filters ------------------------------------------------------------------------------- */

typedef struct exact_row {
    const sp_cuda_sample_row *row;
    const float *logits; /* [vocab] */
    int32_t vocab;
    float best;     /* the largest logit */
    uint64_t *keys; /* [vocab] scratch */
} exact_row;

static float weight_of(const exact_row *exact, float logit)
{
    return sp_exp_scalar((logit - exact->best) * exact->row->inverse);
}

static uint64_t part_of(const exact_row *exact, uint64_t key)
{
    return sp_choose_part(weight_of(exact, sp_choose_key_logit(key)));
}

/* A token's part of what a cut counts. */
static uint64_t counted(const exact_row *exact, uint64_t key, bool by_weight)
{
    return by_weight ? part_of(exact, key) : 1;
}

static void swap(uint64_t *a, uint64_t *b)
{
    uint64_t held = *a;

    *a = *b;
    *b = held;
}

/* Moves those of keys[low .. high) that are better than the middle one before it; returns its new
 * index, and the parts of those before it. */
static int32_t partition(const exact_row *exact, int32_t low, int32_t high, bool by_weight,
                         uint64_t *out_above)
{
    uint64_t *keys = exact->keys, above = 0, pivot;
    int32_t at = low;

    swap(&keys[low + (high - low) / 2], &keys[high - 1]);
    pivot = keys[high - 1];
    for (int32_t i = low; i < high - 1; i++)
        if (keys[i] > pivot) {
            above += counted(exact, keys[i], by_weight);
            swap(&keys[i], &keys[at++]);
        }
    swap(&keys[at], &keys[high - 1]);
    *out_above = above;
    return at;
}

/* The key at which the parts of the first n keys, best first, reach the target, which is at most
 * their sum; those that are better are before it then. */
static uint64_t cut(const exact_row *exact, int32_t n, uint64_t target, bool by_weight)
{
    int32_t low = 0, high = n;

    for (;;) {
        uint64_t above, own;
        int32_t at = partition(exact, low, high, by_weight, &above);

        own = counted(exact, exact->keys[at], by_weight);
        if (above >= target) {
            high = at;
        } else if (above + own >= target) {
            return exact->keys[at];
        } else {
            target -= above + own;
            low = at + 1;
        }
    }
}

/* The same of the mass of the first n keys. All tokens up to the n-th part of what may be left out
 * can be left out together, and most tokens are such. */
static uint64_t cut_mass(const exact_row *exact, int32_t n)
{
    uint64_t mass = 0, target, least;
    int32_t left = 0;

    for (int32_t i = 0; i < n; i++)
        mass += part_of(exact, exact->keys[i]);
    target = sp_choose_target(exact->row->top_p, mass);
    least = (mass - target) / (uint64_t)n;
    for (int32_t i = 0; i < n; i++)
        if (part_of(exact, exact->keys[i]) > least)
            exact->keys[left++] = exact->keys[i];
    return cut(exact, left, target, true);
}

/* The key of the last token that top-k and top-p keep; 0: all are kept. */
static uint64_t find_limit(const exact_row *exact)
{
    const sp_cuda_sample_row *row = exact->row;
    bool some = row->top_k > 0 && row->top_k < exact->vocab;
    uint64_t limit = 0;

    if (!some && !(row->top_p < 1))
        return 0;
    for (int32_t id = 0; id < exact->vocab; id++)
        exact->keys[id] = sp_choose_key(exact->logits[id], id);
    if (some)
        limit = cut(exact, exact->vocab, (uint64_t)row->top_k, false);
    return row->top_p < 1 ? cut_mass(exact, some ? row->top_k : exact->vocab) : limit;
}

/* ---- a token ------------------------------------------------------------------------------- */

/* What an id has of the mass that is drawn from. */
static uint64_t drawn_part(const exact_row *exact, uint64_t limit, int32_t id)
{
    float weight;

    if (sp_choose_key(exact->logits[id], id) < limit)
        return 0;
    weight = weight_of(exact, exact->logits[id]);
    return weight >= exact->row->min_p ? sp_choose_part(weight) : 0;
}

static int32_t draw(const exact_row *exact, uint64_t limit)
{
    uint64_t mass = 0, sum, point;
    int32_t id = 0;

    for (int32_t i = 0; i < exact->vocab; i++)
        mass += drawn_part(exact, limit, i);
    point = sp_choose_point(mass, exact->row->random);
    sum = drawn_part(exact, limit, 0);
    while (sum <= point)
        sum += drawn_part(exact, limit, ++id);
    return id;
}

sp_status sp_exact_sample(const float *logits, int32_t vocab, const sp_sample_params *params,
                          uint64_t position, void *scratch, int32_t *out_token)
{
    const sp_cuda_sample_row row = sp_exact_row(params, position);
    exact_row exact = {.row = &row, .logits = logits, .vocab = vocab, .keys = scratch};
    int32_t best;
    sp_status status = sp_sample_greedy(logits, vocab, &best, NULL);

    if (status != SP_OK)
        return status;
    exact.best = logits[best];
    *out_token = row.inverse > 0 && row.top_k != 1 ? draw(&exact, find_limit(&exact)) : best;
    return SP_OK;
}

/* ---- logprobs ------------------------------------------------------------------------------ */

/* The kernel's largest logits are decoded from keys, where both zeros are one. */
static float decoded(float logit)
{
    return sp_choose_logit(sp_choose_order(logit));
}

sp_status sp_exact_logprobs(const float *logits, int32_t vocab, int32_t chosen, int32_t n_top,
                            float *out_logprob, sp_logprob *out_top)
{
    uint64_t mass = 0;
    int32_t best_id;
    double sum;
    float best;
    sp_status status = sp_sample_greedy(logits, vocab, &best_id, NULL);

    if (status == SP_OK && n_top > 0) /* for the ids */
        status = sp_logprobs(logits, vocab, chosen, n_top, out_logprob, out_top, NULL);
    if (status != SP_OK)
        return status;
    best = decoded(logits[best_id]);
    for (int32_t id = 0; id < vocab; id++)
        mass += sp_choose_part(sp_exp_softmax(logits[id] - best));
    sum = sp_choose_sum(mass);
    for (int32_t i = 0; i < n_top && i < vocab; i++)
        out_top[i].logprob = sp_logprob_of(decoded(logits[out_top[i].token]), best, sum);
    *out_logprob = sp_logprob_of(logits[chosen], best, sum);
    return SP_OK;
}
