/*
 * vector_avx512.h: sixteen FP32 values at a time, from and to any element type, with the bits that
 * vector_avx2.h gives each of them. Only files that are compiled for AVX-512 include it.
 */
#ifndef SP_KERNELS_CPU_VECTOR_AVX512_H
#define SP_KERNELS_CPU_VECTOR_AVX512_H

#include "kernels/cpu/vector_avx2.h"

SP_INLINE __m512 sp_wide_from_bf16(__m256i half)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* As sp_v8_to_bf16. */
SP_INLINE __m256i sp_wide_to_bf16(__m512 value)
{
    __m512i bits = _mm512_castps_si512(value);
    __m512i high = _mm512_srli_epi32(bits, 16);
    __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);

    return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40)));
}

SP_INLINE __m512 sp_wide_load(sp_dtype type, const void *data, int64_t index)
{
    if (type == SP_DTYPE_F32)
        return _mm512_loadu_ps((const float *)data + index);
    __m256i half = _mm256_loadu_si256((const void *)((const uint16_t *)data + index));
    return type == SP_DTYPE_BF16 ? sp_wide_from_bf16(half) : _mm512_cvtph_ps(half);
}

SP_INLINE void sp_wide_store(sp_dtype type, void *data, int64_t index, __m512 value)
{
    void *to =
        type == SP_DTYPE_F32 ? (void *)((float *)data + index) : (void *)((uint16_t *)data + index);

    if (type == SP_DTYPE_F32)
        _mm512_storeu_ps(to, value);
    else if (type == SP_DTYPE_BF16)
        _mm256_storeu_si256(to, sp_wide_to_bf16(value));
    else
        _mm256_storeu_si256(to,
                            _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* e^x as sp_v8_exp. */
SP_INLINE __m512 sp_wide_exp(__m512 x)
{
    const __m512 magic = _mm512_set1_ps(SP_EXP_MAGIC);
    __m512 shifted, n, r, p;
    __m512i power, half;

    /* The operand order keeps a NaN of x: min and max return the second one then. */
    x = _mm512_min_ps(_mm512_set1_ps(SP_EXP_MAX), x);
    x = _mm512_max_ps(_mm512_set1_ps(SP_EXP_MIN), x);
    shifted = _mm512_fmadd_ps(x, _mm512_set1_ps(SP_EXP_LOG2E), magic);
    n = _mm512_sub_ps(shifted, magic);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(SP_EXP_LN2_HIGH), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(SP_EXP_LN2_LOW), r);
    p = _mm512_set1_ps(SP_EXP_C7);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(SP_EXP_C6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(SP_EXP_C5));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(SP_EXP_C4));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(SP_EXP_C3));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(SP_EXP_C2));
    p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
    power = _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_castps_si512(magic));
    half = _mm512_srai_epi32(power, 1);
    power = _mm512_sub_epi32(power, half);
    half = _mm512_slli_epi32(_mm512_add_epi32(half, _mm512_set1_epi32(127)), 23);
    power = _mm512_slli_epi32(_mm512_add_epi32(power, _mm512_set1_epi32(127)), 23);
    p = _mm512_mul_ps(p, _mm512_castsi512_ps(half));
    return _mm512_mul_ps(p, _mm512_castsi512_ps(power));
}

SP_INLINE __m512 sp_wide_silu(__m512 x)
{
    __m512 power = sp_wide_exp(_mm512_xor_ps(x, _mm512_set1_ps(-0.0f)));

    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), power));
}

/* Σ x² in the order of sp_v8_sum_squares: lane i mod 32, the last n mod 32 in their own chain. */
SP_INLINE float sp_wide_sum_squares(sp_dtype type, const void *x, int64_t n)
{
    __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()}, value;
    __m256 four[4], eight, last = _mm256_setzero_ps();
    int64_t i = 0;

    for (; i + 32 <= n; i += 32) {
        SP_UNROLL
        for (int s = 0; s < 2; s++) {
            value = sp_wide_load(type, x, i + 16 * s);
            sums[s] = _mm512_fmadd_ps(value, value, sums[s]);
        }
    }
    for (; i < n; i += 8) {
        eight = sp_v8_load_upto(type, x, i, n);
        last = _mm256_fmadd_ps(eight, eight, last);
    }
    SP_UNROLL
    for (int s = 0; s < 2; s++) {
        four[2 * s] = _mm512_castps512_ps256(sums[s]);
        four[2 * s + 1] = _mm512_extractf32x8_ps(sums[s], 1);
    }
    eight = _mm256_add_ps(_mm256_add_ps(four[0], four[1]), _mm256_add_ps(four[2], four[3]));
    return sp_v8_reduce(_mm256_add_ps(eight, last));
}

#endif
