/*
 * transpose_avx512.h: transposes 16 lines of 32-bit values, four values at a time. Loads place the
 * lanes where they belong, which saves half of the shuffles.
 */
#ifndef SP_KERNELS_CPU_TRANSPOSE_AVX512_H
#define SP_KERNELS_CPU_TRANSPOSE_AVX512_H

#include "kernels/cpu/vector_avx2.h"

/* The values `at` .. `at` + 4 of 16 lines, as four vectors of 16. */
SP_INLINE void sp_transpose_16x4(const float *const *lines, int64_t at, __m512 *out_values)
{
    __m512 m[4], low[2], high[2];

    SP_UNROLL
    for (int p = 0; p < 4; p++) {
        m[p] = _mm512_castps128_ps512(_mm_loadu_ps(lines[p] + at));
        m[p] = _mm512_insertf32x4(m[p], _mm_loadu_ps(lines[4 + p] + at), 1);
        m[p] = _mm512_insertf32x4(m[p], _mm_loadu_ps(lines[8 + p] + at), 2);
        m[p] = _mm512_insertf32x4(m[p], _mm_loadu_ps(lines[12 + p] + at), 3);
    }
    SP_UNROLL
    for (int h = 0; h < 2; h++) {
        low[h] = _mm512_unpacklo_ps(m[2 * h], m[2 * h + 1]);
        high[h] = _mm512_unpackhi_ps(m[2 * h], m[2 * h + 1]);
    }
    out_values[0] = _mm512_shuffle_ps(low[0], low[1], 0x44);
    out_values[1] = _mm512_shuffle_ps(low[0], low[1], 0xee);
    out_values[2] = _mm512_shuffle_ps(high[0], high[1], 0x44);
    out_values[3] = _mm512_shuffle_ps(high[0], high[1], 0xee);
}

#endif
