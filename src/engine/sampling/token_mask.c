#include "engine/sampling/token_mask.h"

#include <float.h>
#include <math.h>

void sp_token_mask_apply(const uint32_t *mask, int32_t vocab, float *logits)
{
    for (int32_t first = 0; first < vocab; first += 32) {
        int32_t n = vocab - first < 32 ? vocab - first : 32;
        uint32_t bits = mask[first / 32];

        for (int32_t i = 0; i < n; i++) {
            float logit = logits[first + i];

            logits[first + i] = !(bits >> i & 1) && logit <= FLT_MAX ? -INFINITY : logit;
        }
    }
}
