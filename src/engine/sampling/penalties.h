/*
 * penalties.h: a request's changes to its logits before a token is chosen: a bias for given ids,
 * and penalties for ids that occurred. Owns the formulas and their order; knows no sampling.
 *
 * The order is vLLM's: bias, repetition, frequency, presence. In FP32, for a token t:
 *
 *     l += bias[t]
 *     t in prompt or output:  l = l > 0 ? l / repetition : l * repetition
 *     t in output, n times:   l -= frequency * n
 *                             l -= presence
 *
 * There is no state: everything is counted again from the request's own tokens, so that a preempted
 * request, or one in another batch, gets the same bits. The cost is in proportion to the tokens,
 * not to the vocabulary.
 */
#ifndef SP_ENGINE_SAMPLING_PENALTIES_H
#define SP_ENGINE_SAMPLING_PENALTIES_H

#include <sidepath/engine.h>

typedef struct sp_penalties {
    double presence, frequency; /* -2 .. 2; 0: off */
    double repetition;          /* 0.01 .. 100; 1: off */
    const sp_logit_bias *bias;  /* [n_bias], borrowed */
    int32_t n_bias;
} sp_penalties;

/* Whether any of them is on. */
bool sp_penalties_any(const sp_penalties *penalties);

/* The first of a request's tokens whose id they change: only the repetition penalty reads the
 * prompt. n_tokens: none. */
int32_t sp_penalties_first(const sp_penalties *penalties, int32_t n_prompt, int32_t n_tokens);

/*
 * Changes logits [vocab] in place. tokens [n_tokens]: the first n_prompt are the prompt, the others
 * the output (either may be none); all are below vocab. counts [vocab] is scratch with any content;
 * threads need scratch of their own. Allocates nothing.
 */
void sp_penalties_apply(const sp_penalties *penalties, const int32_t *tokens, int32_t n_prompt,
                        int32_t n_tokens, int32_t *counts, float *logits);

#endif
