/*
 * scalar_math.h: exp in FP32 from multiplications and additions alone, so that bits do not depend
 * on a libm, for the host and the device.
 *
 * sp_exp_scalar: every level of the CPU has this shape: x = n ln2 + r with |r| <= ln2 / 2, the
 * Taylor polynomial of degree 7 for e^r (its remainder, r^8 / 8!, is below a tenth of an ulp), then
 * two exact powers of two, because one alone could not reach the subnormals. Error below 1 ulp
 * (measured over every 97th float). sp_exp_softmax: of log-softmax sums, shorter, without branches,
 * so that compilers vectorise it. Relative error below 2e-7.
 */
#ifndef SP_KERNELS_SCALAR_MATH_H
#define SP_KERNELS_SCALAR_MATH_H

#include "kernels/effective_scale.h"

#include <stdint.h>
#include <string.h>

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

SP_HOST_AND_DEVICE float sp_power_of_two(int32_t power)
{
    uint32_t bits = (uint32_t)(power + 127) << 23;
    float value;

    memcpy(&value, &bits, sizeof value);
    return value;
}

SP_HOST_AND_DEVICE float sp_exp_scalar(float x)
{
    const float magic = SP_EXP_MAGIC;
    float shifted, n, r, p;
    uint32_t bits, none;
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
    memcpy(&bits, &shifted, sizeof bits);
    memcpy(&none, &magic, sizeof none);
    power = (int32_t)(bits - none);
    half = power >> 1;
    p *= sp_power_of_two(half);
    return p * sp_power_of_two(power - half);
}

SP_HOST_AND_DEVICE float sp_sigmoid_scalar(float x)
{
    return 1.0f / (1.0f + sp_exp_scalar(-x));
}

/*
 * ln(1 + e^x) = max(x, 0) + ln(1 + y) with y = e^-|x|. ln(1 + y) = 2 artanh(s), s = y / (2 + y) <=
 * 1/3, by the series up to s^17 (its remainder is below 1e-9 of it). Relative error below 4e-7; a
 * NaN stays one.
 */
SP_HOST_AND_DEVICE float sp_softplus_scalar(float x)
{
    float y = sp_exp_scalar(x > 0.0f ? -x : x);
    float s = y / (2.0f + y), square = s * s, sum = 1.0f / 17;

    sum = sum * square + 1.0f / 15;
    sum = sum * square + 1.0f / 13;
    sum = sum * square + 1.0f / 11;
    sum = sum * square + 1.0f / 9;
    sum = sum * square + 1.0f / 7;
    sum = sum * square + 1.0f / 5;
    sum = sum * square + 1.0f / 3;
    sum = 2.0f * (sum * square * s + s);
    return x > 0.0f ? x + sum : sum;
}

/*
 * e^x for x <= 0, -inf included; below -87 it is about 1e-38. The limit is set on the bits, as an
 * integer (a larger magnitude is a larger number there): compilers do not vectorise a
 * floating-point select.
 */
SP_HOST_AND_DEVICE float sp_exp_softmax(float x)
{
    const float log2_e = 1.442695041f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
    const int32_t sign = INT32_MIN, limit = (int32_t)0xc2ae0000; /* -87 */
    float rest, power, sum;
    int32_t bits, exponent;

    memcpy(&bits, &x, sizeof bits);
    bits |= sign;
    bits = bits < limit ? bits : limit;
    memcpy(&x, &bits, sizeof x);
    exponent = (int32_t)(x * log2_e - 0.5f); /* towards 0, so to the nearest: x is not positive */
    rest = x - (float)exponent * ln2_high;
    rest = rest - (float)exponent * ln2_low;
    /* The series up to the sixth power; |rest| is at most 0.35. */
    sum = 1.0f / 720;
    sum = sum * rest + 1.0f / 120;
    sum = sum * rest + 1.0f / 24;
    sum = sum * rest + 1.0f / 6;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.0f;
    sum = sum * rest + 1.0f;
    bits = (exponent + 127) * (1 << 23);
    memcpy(&power, &bits, sizeof power);
    return sum * power;
}

#endif
