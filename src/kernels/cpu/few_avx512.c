/*
 * few_avx512.c: one row's sums in the order of the tile instruction (gemm_amx.c), sixteen outputs
 * at a time: half the instructions of the form for eight. For the shrinks of a decode step of many
 * adapters; the short sums of an expand are left to the other form.
 */
#include "kernels/cpu/levels.h"
#include "kernels/cpu/transpose_avx512.h"

#define OUTPUTS     16
#define K_STEP      32  /* of one block of the order */
#define K_FOUR      8   /* four pairs, transposed at a time */
#define LONG_ROW    64  /* k from which this is faster than eight outputs at a time */
#define FIRST_BYTES 512 /* of each of the first rows, before anything was prefetched */

/* Eight k of sixteen outputs, `at` pairs along their lines. */
SP_INLINE void eight_steps(const float *const *lines, int64_t at, const float *x, __m512 *even,
                           __m512 *odd)
{
    const __m512i high = _mm512_set1_epi32((int)0xffff0000u);
    __m512 pairs[4];

    sp_transpose_16x4(lines, at, pairs);
    SP_UNROLL
    for (int p = 0; p < 4; p++) {
        __m512i w = _mm512_castps_si512(pairs[p]);

        *even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(w, 16)),
                                _mm512_set1_ps(x[2 * p]), *even);
        *odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(w, high)),
                               _mm512_set1_ps(x[2 * p + 1]), *odd);
    }
}

/* One block of the order of `length` k, 16 or 32, from c on, added to sum. */
SP_INLINE __m512 add_block(int64_t length, const float *const *lines, int64_t c, const float *x,
                           __m512 sum)
{
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();

    SP_UNROLL
    for (int64_t i = 0; i < length; i += K_FOUR)
        eight_steps(lines, (c + i) / 2, x + c + i, &even, &odd);
    /* The instruction continues with zeros up to 32 k, which turns -0 into 0. */
    if (length < K_STEP) {
        even = _mm512_add_ps(even, _mm512_setzero_ps());
        odd = _mm512_add_ps(odd, _mm512_setzero_ps());
    }
    return _mm512_add_ps(sum, _mm512_add_ps(even, odd));
}

/* The lines of sixteen rows of w, a cache line of each. */
SP_INLINE void prefetch(const float *const *lines, int64_t bytes)
{
    for (int i = 0; i < OUTPUTS; i++)
        _mm_prefetch((const char *)lines[i] + bytes, _MM_HINT_T0);
}

int64_t sp_few_sums_avx512(const uint16_t *w, int64_t w_stride, const float *x, int64_t k,
                           int64_t n, int64_t ahead, float *sums)
{
    int64_t whole = k / K_STEP * K_STEP, j = 0;

    if (k < LONG_ROW || k % (K_STEP / 2) != 0)
        return 0;
    for (; j + OUTPUTS <= n; j += OUTPUTS) {
        bool last = j + 2 * OUTPUTS > n;
        int64_t distance = last ? ahead : OUTPUTS * w_stride * 2;
        const float *lines[OUTPUTS];
        __m512 sum = _mm512_setzero_ps();

        for (int i = 0; i < OUTPUTS; i++)
            lines[i] = (const void *)(w + (j + i) * w_stride);
        for (int64_t c = 0; j == 0 && c < FIRST_BYTES; c += 2 * K_STEP)
            prefetch(lines, c);
        for (int64_t c = 0; c < whole; c += K_STEP) {
            prefetch(lines, c * 2 + distance);
            sum = add_block(K_STEP, lines, c, x, sum);
        }
        if (whole < k)
            sum = add_block(K_STEP / 2, lines, whole, x, sum);
        _mm512_storeu_ps(sums + j, sum);
    }
    return j;
}
