/*
 * vector_avx2.h: eight FP32 values at a time, from and to any element type. Only files that are
 * compiled for AVX2, FMA and F16C include it.
 */
#ifndef SP_KERNELS_CPU_VECTOR_AVX2_H
#define SP_KERNELS_CPU_VECTOR_AVX2_H

#include "kernels/element.h"
#include "kernels/scalar_math.h"

#include <immintrin.h>
#include <string.h>

/* Complete unrolling keeps small arrays of vectors in registers. */
#if defined(__clang__)
#define SP_UNROLL _Pragma("unroll")
#else
#define SP_UNROLL _Pragma("GCC unroll 16")
#endif
#define SP_INLINE static inline __attribute__((always_inline))

/* Calls BODY(type, ...) with `type` as a constant. */
#define SP_WITH_TYPE(type, BODY, ...)         \
    do {                                      \
        if ((type) == SP_DTYPE_BF16)          \
            BODY(SP_DTYPE_BF16, __VA_ARGS__); \
        else if ((type) == SP_DTYPE_F32)      \
            BODY(SP_DTYPE_F32, __VA_ARGS__);  \
        else                                  \
            BODY(SP_DTYPE_F16, __VA_ARGS__);  \
    } while (0)

SP_INLINE __m256 sp_v8_from_bf16(__m128i half)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

/* Rounds to nearest even; a NaN stays one and becomes quiet. See sp_f32_to_bf16. */
SP_INLINE __m128i sp_v8_to_bf16(__m256 value)
{
    __m256i bits = _mm256_castps_si256(value);
    __m256i high = _mm256_srli_epi32(bits, 16);
    __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    __m256i words = _mm256_blendv_epi8(rounded, quiet, nan);

    return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

SP_INLINE __m128i sp_v8_to_f16(__m256 value)
{
    return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

SP_INLINE __m256 sp_v8_load(sp_dtype type, const void *data, int64_t index)
{
    if (type == SP_DTYPE_F32)
        return _mm256_loadu_ps((const float *)data + index);
    __m128i half = _mm_loadu_si128((const void *)((const uint16_t *)data + index));
    return type == SP_DTYPE_BF16 ? sp_v8_from_bf16(half) : _mm256_cvtph_ps(half);
}

SP_INLINE void sp_v8_store(sp_dtype type, void *data, int64_t index, __m256 value)
{
    if (type == SP_DTYPE_F32)
        _mm256_storeu_ps((float *)data + index, value);
    else
        _mm_storeu_si128((void *)((uint16_t *)data + index),
                         type == SP_DTYPE_BF16 ? sp_v8_to_bf16(value) : sp_v8_to_f16(value));
}

/* The `count` < 8 elements from `index` on, followed by zeros; nothing beyond is read. */
SP_INLINE __m256 sp_v8_load_tail(sp_dtype type, const void *data, int64_t index, int64_t count)
{
    float values[8] = {0};

    for (int64_t i = 0; i < count; i++)
        values[i] = sp_element_load(type, data, index + i);
    return _mm256_loadu_ps(values);
}

SP_INLINE void sp_v8_store_tail(sp_dtype type, void *data, int64_t index, int64_t count,
                                __m256 value)
{
    float values[8];

    _mm256_storeu_ps(values, value);
    for (int64_t i = 0; i < count; i++)
        sp_element_store(type, data, index + i, values[i]);
}

/* Eight values from i on; the last ones of a row of n. */
SP_INLINE __m256 sp_v8_load_upto(sp_dtype type, const void *x, int64_t i, int64_t n)
{
    return n - i >= 8 ? sp_v8_load(type, x, i) : sp_v8_load_tail(type, x, i, n - i);
}

SP_INLINE void sp_v8_store_upto(sp_dtype type, void *y, int64_t i, int64_t n, __m256 value)
{
    if (n - i >= 8)
        sp_v8_store(type, y, i, value);
    else
        sp_v8_store_tail(type, y, i, n - i, value);
}

/* The values after a conversion to `type` and back. */
SP_INLINE __m256 sp_v8_round(sp_dtype type, __m256 value)
{
    if (type == SP_DTYPE_BF16)
        return sp_v8_from_bf16(sp_v8_to_bf16(value));
    return type == SP_DTYPE_F16 ? _mm256_cvtph_ps(sp_v8_to_f16(value)) : value;
}

/*
 * The lanes of four vectors, each summed by the one tree ((0+1)+(2+3)) + ((4+5)+(6+7)): every sum
 * over lanes at this level uses it.
 */
SP_INLINE __m128 sp_v8_reduce4(__m256 a, __m256 b, __m256 c, __m256 d)
{
    __m256 halves = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));

    return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

/* The sum of eight lanes, by the tree of sp_v8_reduce4. */
SP_INLINE float sp_v8_reduce(__m256 a)
{
    return _mm_cvtss_f32(sp_v8_reduce4(a, a, a, a));
}

/* e^x in the shape of sp_exp_scalar, with fused steps. */
SP_INLINE __m256 sp_v8_exp(__m256 x)
{
    const __m256 magic = _mm256_set1_ps(SP_EXP_MAGIC);
    __m256 shifted, n, r, p;
    __m256i power, half;

    /* The operand order keeps a NaN of x: min and max return the second one then. */
    x = _mm256_min_ps(_mm256_set1_ps(SP_EXP_MAX), x);
    x = _mm256_max_ps(_mm256_set1_ps(SP_EXP_MIN), x);
    shifted = _mm256_fmadd_ps(x, _mm256_set1_ps(SP_EXP_LOG2E), magic);
    n = _mm256_sub_ps(shifted, magic);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(SP_EXP_LN2_HIGH), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(SP_EXP_LN2_LOW), r);
    p = _mm256_set1_ps(SP_EXP_C7);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(SP_EXP_C6));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(SP_EXP_C5));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(SP_EXP_C4));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(SP_EXP_C3));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(SP_EXP_C2));
    p = _mm256_add_ps(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1.0f));
    power = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_castps_si256(magic));
    half = _mm256_srai_epi32(power, 1);
    power = _mm256_sub_epi32(power, half);
    half = _mm256_slli_epi32(_mm256_add_epi32(half, _mm256_set1_epi32(127)), 23);
    power = _mm256_slli_epi32(_mm256_add_epi32(power, _mm256_set1_epi32(127)), 23);
    p = _mm256_mul_ps(p, _mm256_castsi256_ps(half));
    return _mm256_mul_ps(p, _mm256_castsi256_ps(power));
}

SP_INLINE __m256 sp_v8_sigmoid(__m256 x)
{
    __m256 power = sp_v8_exp(_mm256_xor_ps(x, _mm256_set1_ps(-0.0f)));

    return _mm256_div_ps(_mm256_set1_ps(1.0f), _mm256_add_ps(_mm256_set1_ps(1.0f), power));
}

SP_INLINE __m256 sp_v8_silu(__m256 x)
{
    __m256 power = sp_v8_exp(_mm256_xor_ps(x, _mm256_set1_ps(-0.0f)));

    return _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0f), power));
}

/* Σ x² of one row: element i goes to lane i mod 32, but for the last n mod 32, which have a chain
 * of their own. */
#define SP_SQUARE_SUMS 4
SP_INLINE float sp_v8_sum_squares(sp_dtype type, const void *x, int64_t n)
{
    __m256 sums[SP_SQUARE_SUMS];
    __m256 value, last = _mm256_setzero_ps();
    int64_t i = 0;

    SP_UNROLL
    for (int s = 0; s < SP_SQUARE_SUMS; s++)
        sums[s] = _mm256_setzero_ps();
    for (; i + 8 * SP_SQUARE_SUMS <= n; i += 8 * SP_SQUARE_SUMS) {
        SP_UNROLL
        for (int s = 0; s < SP_SQUARE_SUMS; s++) {
            value = sp_v8_load(type, x, i + 8 * s);
            sums[s] = _mm256_fmadd_ps(value, value, sums[s]);
        }
    }
    for (; i < n; i += 8) {
        value = sp_v8_load_upto(type, x, i, n);
        last = _mm256_fmadd_ps(value, value, last);
    }
    sums[0] = _mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3]));
    return sp_v8_reduce(_mm256_add_ps(sums[0], last));
}

/*
 * Sixteen values as two vectors in *pair order*: for BF16 the even ones and the odd ones, because
 * a shift and a mask widen them so without any shuffle; else the first and the second eight. A sum
 * over them only has to use the same order on both sides.
 */
typedef struct sp_v16 {
    __m256 first, second;
} sp_v16;

SP_INLINE sp_v16 sp_v16_load(sp_dtype type, const void *data)
{
    sp_v16 v;

    if (type == SP_DTYPE_BF16) {
        __m256i pairs = _mm256_loadu_si256(data);

        v.first = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
        v.second =
            _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000u)));
    } else {
        v.first = sp_v8_load(type, data, 0);
        v.second = sp_v8_load(type, data, 8);
    }
    return v;
}

/* The same for `count` < 16 values, followed by zeros; nothing beyond is read. */
SP_INLINE sp_v16 sp_v16_load_tail(sp_dtype type, const void *data, int64_t count)
{
    __m256i buffer[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};

    if (type != SP_DTYPE_F32 && count == 8) /* rank 8, the most common tail */
        buffer[0] = _mm256_zextsi128_si256(_mm_loadu_si128(data));
    else
        memcpy(buffer, data, (size_t)count * (type == SP_DTYPE_F32 ? 4 : 2));
    return sp_v16_load(type, buffer);
}

/* Sixteen FP32 values in the pair order of `order`. */
SP_INLINE sp_v16 sp_v16_arrange(sp_dtype order, __m256 low, __m256 high)
{
    sp_v16 v = {low, high};

    if (order == SP_DTYPE_BF16) {
        const __m256i to_halves = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
        __m256 a = _mm256_permutevar8x32_ps(low, to_halves);
        __m256 b = _mm256_permutevar8x32_ps(high, to_halves);

        v.first = _mm256_permute2f128_ps(a, b, 0x20);
        v.second = _mm256_permute2f128_ps(a, b, 0x31);
    }
    return v;
}

/* The way back from pair order. */
SP_INLINE void sp_v16_restore(sp_dtype order, sp_v16 v, __m256 *low, __m256 *high)
{
    *low = v.first;
    *high = v.second;
    if (order == SP_DTYPE_BF16) {
        __m256 a = _mm256_unpacklo_ps(v.first, v.second);
        __m256 b = _mm256_unpackhi_ps(v.first, v.second);

        *low = _mm256_permute2f128_ps(a, b, 0x20);
        *high = _mm256_permute2f128_ps(a, b, 0x31);
    }
}

#endif
