#include "engine/sampling/token_mask.h"

#include <float.h>
#include <math.h>

#define WORD 32

static inline float forbidden(float logit)
{
    return logit <= FLT_MAX ? -INFINITY : logit;
}

/* A word of a mask, at the end of a vocabulary less than one. */
static void apply_few(uint32_t bits, int32_t n, float *logits)
{
    for (int32_t i = 0; i < n; i++)
        logits[i] = bits >> i & 1 ? logits[i] : forbidden(logits[i]);
}

/* In a form that compilers make vectors of: a test by a list of bits, no shift. */
static void apply_word(uint32_t bits, float *logits)
{
#define BITS_4(first) 1u << (first), 2u << (first), 4u << (first), 8u << (first)
    static const uint32_t bit[WORD] = {BITS_4(0),  BITS_4(4),  BITS_4(8),  BITS_4(12),
                                       BITS_4(16), BITS_4(20), BITS_4(24), BITS_4(28)};
#undef BITS_4

    for (int32_t i = 0; i < WORD; i++) {
        float logit = logits[i], other = forbidden(logit);

        logits[i] = bits & bit[i] ? logit : other;
    }
}

static void forbid_word(float *logits)
{
    for (int32_t i = 0; i < WORD; i++)
        logits[i] = forbidden(logits[i]);
}

void sp_token_mask_apply(const uint32_t *mask, int32_t vocab, float *logits)
{
    int32_t first = 0;

    for (; first + WORD <= vocab; first += WORD) {
        uint32_t bits = mask[first / WORD];

        if (bits == 0)
            forbid_word(logits + first);
        else if (bits != UINT32_MAX)
            apply_word(bits, logits + first);
    }
    if (first < vocab)
        apply_few(mask[first / WORD], vocab - first, logits + first);
}
