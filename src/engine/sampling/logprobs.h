/*
 * logprobs.h: the log-softmax of a row of logits at a few ids: the chosen one and the best ones.
 *
 * A pure function of the row: sums run in 16 lanes in double, in an order fixed by the vocabulary's
 * size, in one pass after the one that finds the maximum. The exponential is a polynomial without
 * branches (relative error below 2e-7), which compilers vectorise.
 */
#ifndef SP_ENGINE_SAMPLING_LOGPROBS_H
#define SP_ENGINE_SAMPLING_LOGPROBS_H

#include <sidepath/engine.h>

/*
 * The n_top (0 .. vocab) best ids of logits [vocab], best first, the lower of equal ones first,
 * into out_top [n_top], and the chosen id's logprob into *out_logprob. None is below
 * SP_LOGPROB_MIN, so all are finite. Allocates nothing. Errors as sp_sample: SP_ERR_INPUT,
 * "bad-logits" or "no-token".
 */
sp_status sp_logprobs(const float *logits, int32_t vocab, int32_t chosen, int32_t n_top,
                      float *out_logprob, sp_logprob *out_top, sp_error *error);

/* The logprob of a logit in a row whose largest logit is `best` and whose Σ e^(logit - best) is
 * `sum`; for rows whose sum was computed elsewhere. */
float sp_logprob_of(float logit, float best, double sum);

#endif
