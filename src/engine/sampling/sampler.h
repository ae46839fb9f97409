/*
 * sampler.h: one row of logits to one token id.
 *
 * Owns: the order of the filters, the random numbers, the rule for ties. It must not know:
 * requests, batches, models. A pure function of its arguments: no state to keep across a
 * preemption; a token depends on its own row, parameters, seed and position alone. Any thread.
 *
 * The filters apply in the order of transformers' logits processors: temperature, top-k, top-p,
 * min-p, each on what the previous one kept. Two rules are stricter than theirs: top-k keeps
 * exactly k tokens and top-p the smallest set that reaches the mass; among equal logits the lower
 * id wins. vLLM applies min-p before top-k and top-p: since min-p compares with the best token, the
 * order changes the kept set only through the mass that top-p sees.
 *
 * The random number of output position p is Philox4x32-10 with the seed as key and p as counter: 53
 * bits of its first two words. The kept tokens divide the unit interval in the order of their ids.
 */
#ifndef SP_ENGINE_SAMPLING_SAMPLER_H
#define SP_ENGINE_SAMPLING_SAMPLER_H

#include "kernels/cpu/kernels.h"

#include <sidepath/status.h>

#include <stddef.h>
#include <stdint.h>

/* A temperature below this is greedy: a logit 0.001 under the best is e^-1000 there. */
#define SP_TEMPERATURE_MIN 1e-6

typedef struct sp_sample_params {
    double temperature; /* 0 (greedy) .. 1000 */
    int32_t top_k;      /* keeps the k best; 0 or -1: all */
    double top_p;       /* 0 .. 1: the best tokens up to this mass, at least one; 1: all */
    double min_p;       /* 0 .. 1: tokens of at least this share of the best one's; 0: all */
    uint64_t seed;
} sp_sample_params;

/* Greedy: temperature 0, no filter, seed 0. */
sp_sample_params sp_sample_params_default(void);

/* Bytes of scratch for a vocabulary: 8 for each id. Aligned for float. */
size_t sp_sample_scratch_bytes(int32_t vocab);

/*
 * `kernels` computes the weights, so a token depends on their level as its logits do. logits
 * [vocab], finite or -inf (an excluded token); params within these ranges; position counts the
 * output tokens of the request from 0. Allocates nothing; scratch [sp_sample_scratch_bytes] may be
 * NULL when greedy. SP_ERR_INPUT, code "bad-logits": a NaN or +inf, position is its id; code
 * "no-token": every logit is -inf. SP_ERR_ARGUMENT: vocab < 1.
 */
sp_status sp_sample(const sp_kernels *kernels, const float *logits, int32_t vocab,
                    const sp_sample_params *params, uint64_t position, void *scratch,
                    int32_t *out_token, sp_error *error);

/*
 * The logprob of `token` in the distribution that sp_sample draws from: what the filters keep, at
 * the temperature; where that is greedy, of all logits as they are. A token that is not kept has
 * SP_LOGPROB_MIN, which nothing is below. Arguments and errors as sp_sample, with scratch in any
 * case; token is below vocab.
 */
sp_status sp_sample_logprob(const sp_kernels *kernels, const float *logits, int32_t vocab,
                            const sp_sample_params *params, void *scratch, int32_t token,
                            float *out_logprob, sp_error *error);

/* The id of the largest logit, the lower of equal ones. Errors as above. */
sp_status sp_sample_greedy(const float *logits, int32_t vocab, int32_t *out_token, sp_error *error);

/* The number in [0, 1) of an output position, and the same in units of 2^-64. */
double sp_sample_uniform(uint64_t seed, uint64_t position);
uint64_t sp_sample_random(uint64_t seed, uint64_t position);

/* Philox4x32-10. */
void sp_philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out_words[4]);

#endif
