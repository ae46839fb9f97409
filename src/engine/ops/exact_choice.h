/*
 * exact_choice.h: tokens and logprobs by the numbers of the GPU's kernel (choose_rules.h), on the
 * host, for the rows of a GPU engine that its kernel does not take: a token and its logprob do not
 * depend on where they were found. Against sp_sample and sp_logprobs, weights have the bits of the
 * scalar level whatever the CPU has, and sums are exact.
 */
#ifndef SP_ENGINE_OPS_EXACT_CHOICE_H
#define SP_ENGINE_OPS_EXACT_CHOICE_H

#include "engine/sampling/logprobs.h"
#include "engine/sampling/sampler.h"
#include "kernels/cuda/ops_cuda.h"

/* A row for the kernel: it chooses, has no changes and no mask, and wants no logprob. */
sp_cuda_sample_row sp_exact_row(const sp_sample_params *params, uint64_t position);

/* As sp_sample; scratch [sp_sample_scratch_bytes] is aligned for uint64_t. */
sp_status sp_exact_sample(const float *logits, int32_t vocab, const sp_sample_params *params,
                          uint64_t position, void *scratch, int32_t *out_token);

/* As sp_logprobs. */
sp_status sp_exact_logprobs(const float *logits, int32_t vocab, int32_t chosen, int32_t n_top,
                            float *out_logprob, sp_logprob *out_top);

#endif
