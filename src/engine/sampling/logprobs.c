#include "engine/sampling/logprobs.h"

#include "engine/sampling/sampler.h"
#include "kernels/scalar_math.h"

#include <math.h>

#define LANES 16

/* The best ids so far, best first; equal ones in ascending order. */
typedef struct best_list {
    sp_logprob *items; /* logits, until all are found */
    int32_t n, n_max;
    float floor; /* an id comes in when it is above; ids ascend, so equal ones stay out */
} best_list;

static void offer(best_list *list, int32_t id, float logit)
{
    int32_t at = list->n < list->n_max ? list->n++ : list->n - 1;

    for (; at > 0 && list->items[at - 1].logprob < logit; at--)
        list->items[at] = list->items[at - 1];
    list->items[at] = (sp_logprob){.token = id, .logprob = logit};
    if (list->n == list->n_max)
        list->floor = list->items[list->n - 1].logprob;
}

/* A row that has fewer ids than the list has places lets -inf in as well. */
static bool is_wanted(const best_list *list, float logit)
{
    return list->n < list->n_max || logit > list->floor;
}

static void offer_lanes(best_list *list, const float *logits, int32_t id)
{
    bool any = list->n < list->n_max;

    if (list->n_max == 0)
        return;
    for (int j = 0; j < LANES; j++)
        any |= logits[id + j] > list->floor;
    for (int j = 0; j < LANES && any; j++)
        if (is_wanted(list, logits[id + j]))
            offer(list, id + j, logits[id + j]);
}

/* The sum of e^(logit - best) over the row; offers every id to the list on the way. */
static double sum_row(const float *logits, int32_t vocab, float best, best_list *list)
{
    double lanes[LANES] = {0}, sum = 0;
    float weights[LANES];
    int32_t id = 0;

    for (; id + LANES <= vocab; id += LANES) {
        for (int j = 0; j < LANES; j++)
            weights[j] = sp_exp_softmax(logits[id + j] - best);
        for (int j = 0; j < LANES; j++)
            lanes[j] += (double)weights[j];
        offer_lanes(list, logits, id);
    }
    for (int j = 0; id < vocab; id++, j++) {
        lanes[j] += (double)sp_exp_softmax(logits[id] - best);
        if (list->n_max > 0 && is_wanted(list, logits[id]))
            offer(list, id, logits[id]);
    }
    for (int j = 0; j < LANES; j++)
        sum += lanes[j];
    return sum;
}

float sp_logprob_of(float logit, float best, double sum)
{
    double logprob = (double)logit - (double)best - log(sum);

    return logprob > SP_LOGPROB_MIN ? (float)logprob : (float)SP_LOGPROB_MIN;
}

sp_status sp_logprobs(const float *logits, int32_t vocab, int32_t chosen, int32_t n_top,
                      float *out_logprob, sp_logprob *out_top, sp_error *error)
{
    best_list list = {.items = out_top, .n_max = n_top < vocab ? n_top : vocab, .floor = -INFINITY};
    int32_t best_id;
    double sum;
    float best;
    sp_status status = sp_sample_greedy(logits, vocab, &best_id, error);

    if (status != SP_OK)
        return status;
    best = logits[best_id];
    sum = sum_row(logits, vocab, best, &list);
    for (int32_t i = 0; i < list.n; i++)
        out_top[i].logprob = sp_logprob_of(out_top[i].logprob, best, sum);
    *out_logprob = sp_logprob_of(logits[chosen], best, sum);
    return SP_OK;
}
