/*
 * choose_rules.h: the numbers of a choice of a token (choose.cu), as pure functions for host and
 * device.
 *
 * Weights are those of the CPU's scalar level, bit by bit. Sums of weights are integers, in units
 * of 2^-45 of the best token's weight, so that they are exact and do not depend on the order: a
 * token below 2^-46 of the best one is never drawn. Tokens are ranked by key, which orders logits
 * first and equal ones by ascending id.
 */
#ifndef SP_KERNELS_CUDA_CHOOSE_RULES_H
#define SP_KERNELS_CUDA_CHOOSE_RULES_H

#include "kernels/cuda/ops_cuda.h"
#include "kernels/scalar_math.h"

#include <float.h>
#include <math.h>

/* ---- keys ---------------------------------------------------------------------------------- */

/* Larger for a larger logit; the two zeros are equal. 0 is below that of every logit. */
SP_HOST_AND_DEVICE uint32_t sp_choose_order(float logit)
{
    uint32_t bits;

    memcpy(&bits, &logit, sizeof bits);
    if (bits == 0x80000000u)
        bits = 0;
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

SP_HOST_AND_DEVICE float sp_choose_logit(uint32_t order)
{
    uint32_t bits = (order & 0x80000000u) != 0 ? order & 0x7fffffffu : ~order;
    float logit;

    memcpy(&logit, &bits, sizeof logit);
    return logit;
}

SP_HOST_AND_DEVICE uint64_t sp_choose_key(float logit, int32_t id)
{
    return (uint64_t)sp_choose_order(logit) << 32 | (uint32_t)~id;
}

SP_HOST_AND_DEVICE float sp_choose_key_logit(uint64_t key)
{
    return sp_choose_logit((uint32_t)(key >> 32));
}

SP_HOST_AND_DEVICE int32_t sp_choose_key_id(uint64_t key)
{
    return (int32_t) ~(uint32_t)key;
}

/* NaN or +inf. */
SP_HOST_AND_DEVICE bool sp_choose_is_bad(float logit)
{
    return !(logit <= FLT_MAX);
}

/* ---- weights ------------------------------------------------------------------------------- */

#define SP_CHOOSE_ONE 0x1p45f /* the best token's weight */

/* A weight of 0 .. 1 in these units, nearest even. */
SP_HOST_AND_DEVICE uint64_t sp_choose_part(float weight)
{
    const float whole = 0x1p23f; /* from here on, a float is an integer */
    float units = weight * SP_CHOOSE_ONE;

    if (units < whole)
        units = (units + whole) - whole;
    return (uint64_t)units;
}

/* top_p of the mass, at least 1: the best tokens are kept until they reach it. */
SP_HOST_AND_DEVICE uint64_t sp_choose_target(double top_p, uint64_t mass)
{
    double target = ceil(top_p * (double)mass);

    if (target < 1)
        return 1;
    return target < (double)mass ? (uint64_t)target : mass;
}

/* The high half of a product: with a random number of 64 bits, a point of [0, mass). */
SP_HOST_AND_DEVICE uint64_t sp_choose_point(uint64_t mass, uint64_t random)
{
    uint64_t low = (mass & 0xffffffffu) * (random & 0xffffffffu);
    uint64_t a = (mass >> 32) * (random & 0xffffffffu) + (low >> 32);
    uint64_t b = (mass & 0xffffffffu) * (random >> 32) + (a & 0xffffffffu);

    return (mass >> 32) * (random >> 32) + (a >> 32) + (b >> 32);
}

/* A mass as the sum that sp_logprob_of takes. */
SP_HOST_AND_DEVICE double sp_choose_sum(uint64_t mass)
{
    return (double)mass / (double)SP_CHOOSE_ONE;
}

/* ---- changes ------------------------------------------------------------------------------- */

/* As sp_ends_forbid and sp_penalties_apply. */
SP_HOST_AND_DEVICE float sp_choose_change(const sp_cuda_sample_row *row,
                                          const sp_cuda_sample_change *change, float logit)
{
    if (change->count == SP_CUDA_CHANGE_FORBIDS)
        return -INFINITY;
    logit = logit + change->bias;
    if (change->count == SP_CUDA_CHANGE_BIAS)
        return logit;
    logit = logit > 0 ? logit / row->repetition : logit * row->repetition;
    if (change->count == 0)
        return logit;
    logit = logit - row->frequency * (float)change->count;
    return logit - row->presence;
}

#endif
