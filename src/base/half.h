/*
 * half.h: bf16 and f16 in integer arithmetic, so that every level and compiler gives the same
 * bits. Rounding is to nearest, ties to even; NaN stays a (quiet) NaN; overflow becomes infinity.
 */
#ifndef SP_BASE_HALF_H
#define SP_BASE_HALF_H

#include <stdint.h>
#include <string.h>

static inline uint32_t sp_f32_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float sp_f32_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float sp_bf16_to_f32(uint16_t bits)
{
    return sp_f32_from_bits((uint32_t)bits << 16);
}

static inline uint16_t sp_f32_to_bf16(float value)
{
    uint32_t bits = sp_f32_bits(value);

    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((bits >> 16) | 0x0040u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float sp_f16_to_f32(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t exponent = (half >> 10) & 0x1fu;
    uint32_t mantissa = half & 0x3ffu;

    if (exponent == 0x1fu)
        return sp_f32_from_bits(sign | 0x7f800000u | (mantissa << 13) |
                                (mantissa ? 0x00400000u : 0u));
    if (exponent != 0)
        return sp_f32_from_bits(sign | ((exponent + 112u) << 23) | (mantissa << 13));
    /* Zero and subnormals: mantissa * 2^-24 is exact in FP32. */
    return sp_f32_from_bits(sign | sp_f32_bits((float)mantissa * 0x1p-24f));
}

static inline uint16_t sp_f32_to_f16(float value)
{
    uint32_t bits = sp_f32_bits(value);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;

    if (magnitude > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    if (magnitude >= 0x477ff000u) /* 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7c00u);
    if (magnitude < 0x38800000u) { /* below 2^-14: subnormal; adding 0.5 aligns and rounds */
        float sum = sp_f32_from_bits(magnitude) + 0.5f;
        return (uint16_t)(sign | (sp_f32_bits(sum) - 0x3f000000u));
    }
    magnitude += 0xfffu + ((magnitude >> 13) & 1u);
    return (uint16_t)(sign | ((magnitude - 0x38000000u) >> 13));
}

#endif
