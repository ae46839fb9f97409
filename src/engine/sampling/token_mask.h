/*
 * token_mask.h: the ids that may be chosen for one row, a bit each, applied to its logits. It must
 * not know where a mask comes from.
 */
#ifndef SP_ENGINE_SAMPLING_TOKEN_MASK_H
#define SP_ENGINE_SAMPLING_TOKEN_MASK_H

#include <stddef.h>
#include <stdint.h>

static inline size_t sp_token_mask_words(int32_t vocab)
{
    return ((size_t)vocab + 31) / 32;
}

static inline void sp_token_mask_set(uint32_t *mask, int32_t id, int allowed)
{
    uint32_t bit = 1u << (id % 32);

    mask[id / 32] = allowed ? mask[id / 32] | bit : mask[id / 32] & ~bit;
}

/* Sets the logits of all ids that may not be chosen to -inf, in place; one that is NaN or +inf
 * stays, so that the row is refused as it would be without a mask. */
void sp_token_mask_apply(const uint32_t *mask, int32_t vocab, float *logits);

#endif
