/*
 * scalar_math.h: exp in FP32 from multiplications and additions alone, so that bits do not depend
 * on a libm. Every level has this shape: x = n ln2 + r with |r| <= ln2 / 2, the Taylor polynomial
 * of degree 7 for e^r (its remainder, r^8 / 8!, is below a tenth of an ulp), then two exact powers
 * of two, because one alone could not reach the subnormals. Error below 1 ulp (measured over every
 * 97th float).
 */
#ifndef SP_KERNELS_CPU_SCALAR_MATH_H
#define SP_KERNELS_CPU_SCALAR_MATH_H

#include "base/half.h"

#define SP_EXP_MAX      89.0f   /* e^89 is infinite in FP32 */
#define SP_EXP_MIN      -104.0f /* e^-104 rounds to 0 */
#define SP_EXP_LOG2E    0x1.715476p+0f
#define SP_EXP_LN2_HIGH 0x1.62e4p-1f /* 16 bits, so that n times it is exact */
#define SP_EXP_LN2_LOW  0x1.7f7d1cp-20f
#define SP_EXP_MAGIC    0x1.8p23f /* adding it rounds to an integer, found in the low bits */
#define SP_EXP_C2       (1.0f / 2.0f)
#define SP_EXP_C3       (1.0f / 6.0f)
#define SP_EXP_C4       (1.0f / 24.0f)
#define SP_EXP_C5       (1.0f / 120.0f)
#define SP_EXP_C6       (1.0f / 720.0f)
#define SP_EXP_C7       (1.0f / 5040.0f)

static inline float sp_exp_scalar(float x)
{
    float shifted, n, r, p;
    int32_t power, half;

    x = x > SP_EXP_MAX ? SP_EXP_MAX : x; /* NaN fails both comparisons and stays */
    x = x < SP_EXP_MIN ? SP_EXP_MIN : x;
    shifted = x * SP_EXP_LOG2E + SP_EXP_MAGIC;
    n = shifted - SP_EXP_MAGIC;
    r = (x - n * SP_EXP_LN2_HIGH) - n * SP_EXP_LN2_LOW;
    p = SP_EXP_C7;
    p = p * r + SP_EXP_C6;
    p = p * r + SP_EXP_C5;
    p = p * r + SP_EXP_C4;
    p = p * r + SP_EXP_C3;
    p = p * r + SP_EXP_C2;
    p = (p * (r * r) + r) + 1.0f;
    power = (int32_t)(sp_f32_bits(shifted) - sp_f32_bits(SP_EXP_MAGIC));
    half = power >> 1;
    p *= sp_f32_from_bits((uint32_t)(half + 127) << 23);
    return p * sp_f32_from_bits((uint32_t)(power - half + 127) << 23);
}

#endif
