/*
 * few_avx512.c: one row's sums in the order of the tile instruction (gemm_amx.c), sixteen outputs
 * at a time: half the instructions of the form for eight. For a decode step of many adapters: long
 * rows, those of a shrink, are transposed eight k at a time out of sixteen streams; short ones,
 * those of an expand, a half of a block at a time, two rows to a register.
 */
#include "kernels/cpu/levels.h"
#include "kernels/cpu/lone_rows.h"
#include "kernels/cpu/transpose_avx512.h"

#define OUTPUTS     16
#define K_STEP      32  /* of one block of the order */
#define K_FOUR      8   /* four pairs, transposed at a time */
#define K_HALF      16  /* of a block: what a register has of two short rows */
#define FIRST_BYTES 512 /* of each of the first rows, before anything was prefetched */

/* A step of each chain of sixteen outputs: w has their pairs of BF16, x the pair of FP32. */
SP_INLINE void pair_step(__m512 pairs, const float *x, __m512 *even, __m512 *odd)
{
    const __m512i high = _mm512_set1_epi32((int)0xffff0000u);
    __m512i w = _mm512_castps_si512(pairs);

    *even =
        _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(w, 16)), _mm512_set1_ps(x[0]), *even);
    *odd =
        _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(w, high)), _mm512_set1_ps(x[1]), *odd);
}

/* The instruction continues a short block with zeros up to 32 k, which turns -0 into 0. */
SP_INLINE void pad_block(__m512 *even, __m512 *odd)
{
    *even = _mm512_add_ps(*even, _mm512_setzero_ps());
    *odd = _mm512_add_ps(*odd, _mm512_setzero_ps());
}

/* Eight k of sixteen outputs, `at` pairs along their lines. */
SP_INLINE void eight_steps(const float *const *lines, int64_t at, const float *x, __m512 *even,
                           __m512 *odd)
{
    __m512 pairs[4];

    sp_transpose_16x4(lines, at, pairs);
    SP_UNROLL
    for (int p = 0; p < 4; p++)
        pair_step(pairs[p], x + 2 * p, even, odd);
}

/* ---- long rows ------------------------------------------------------------------------------- */

/* One block of the order of `length` k, 16 or 32, from c on, added to sum. */
SP_INLINE __m512 add_block(int64_t length, const float *const *lines, int64_t c, const float *x,
                           __m512 sum)
{
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();

    SP_UNROLL
    for (int64_t i = 0; i < length; i += K_FOUR)
        eight_steps(lines, (c + i) / 2, x + c + i, &even, &odd);
    if (length < K_STEP)
        pad_block(&even, &odd);
    return _mm512_add_ps(sum, _mm512_add_ps(even, odd));
}

/* The lines of sixteen rows of w, a cache line of each. */
SP_INLINE void prefetch(const float *const *lines, int64_t bytes)
{
    for (int i = 0; i < OUTPUTS; i++)
        _mm_prefetch((const char *)lines[i] + bytes, _MM_HINT_T0);
}

static int64_t long_sums(const uint16_t *w, int64_t w_stride, const float *x, int64_t k, int64_t n,
                         int64_t ahead, float *sums)
{
    int64_t whole = k / K_STEP * K_STEP, j = 0;

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
            sum = add_block(K_HALF, lines, whole, x, sum);
        _mm512_storeu_ps(sums + j, sum);
    }
    return j;
}

/* ---- short rows ------------------------------------------------------------------------------ */

/* K_HALF elements of row i and of the fourth after it; of the `count` first where they are fewer,
 * with zeros after them. */
SP_INLINE __m512 two_rows(const uint16_t *w, int64_t w_stride, int64_t i, int64_t count)
{
    const uint16_t *one = w + i * w_stride, *two = one + 4 * w_stride;
    __mmask16 some = (__mmask16)((1u << count) - 1u);
    __m512i both;

    if (count == K_HALF) {
        both = _mm512_castsi256_si512(_mm256_loadu_si256((const void *)one));
        both = _mm512_inserti64x4(both, _mm256_loadu_si256((const void *)two), 1);
    } else {
        both = _mm512_castsi256_si512(_mm256_maskz_loadu_epi16(some, one));
        both = _mm512_inserti64x4(both, _mm256_maskz_loadu_epi16(some, two), 1);
    }
    return _mm512_castsi512_ps(both);
}

/* The first `count` elements, at most K_HALF, of sixteen rows: pairs[p] gets pair p of each. */
SP_INLINE void load_pairs(const uint16_t *w, int64_t w_stride, int64_t count, __m512 *pairs)
{
    __m512 r[8], t[8];

    SP_UNROLL
    for (int i = 0; i < 8; i++)
        r[i] = two_rows(w, w_stride, i < 4 ? i : i + 4, count);
    SP_UNROLL
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    SP_UNROLL
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    SP_UNROLL
    for (int i = 0; i < 4; i++) {
        pairs[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
        pairs[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    }
}

/* At most K_HALF k of a block of sixteen outputs. */
SP_INLINE void half_block(const uint16_t *w, int64_t w_stride, int64_t left, const float *x,
                          __m512 *even, __m512 *odd)
{
    __m512 pairs[K_HALF / 2];

    if (left >= K_HALF)
        load_pairs(w, w_stride, K_HALF, pairs);
    else
        load_pairs(w, w_stride, left, pairs);
    SP_UNROLL
    for (int p = 0; p < K_HALF / 2; p++)
        pair_step(pairs[p], x + 2 * p, even, odd);
}

SP_INLINE int64_t short_sums(const uint16_t *w, int64_t w_stride, const float *x, int64_t k,
                             int64_t n, float *sums)
{
    int64_t j = 0;

    for (; j + OUTPUTS <= n; j += OUTPUTS, w += OUTPUTS * w_stride) {
        __m512 sum = _mm512_setzero_ps();

        for (int64_t c = 0; c < k; c += K_STEP) {
            __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();

            half_block(w + c, w_stride, k - c, x + c, &even, &odd);
            if (k - c > K_HALF)
                half_block(w + c + K_HALF, w_stride, k - c - K_HALF, x + c + K_HALF, &even, &odd);
            else
                pad_block(&even, &odd);
            sum = _mm512_add_ps(sum, _mm512_add_ps(even, odd));
        }
        _mm512_storeu_ps(sums + j, sum);
    }
    return j;
}

/* ---- entry ----------------------------------------------------------------------------------- */

int64_t sp_few_sums_avx512(const uint16_t *w, int64_t w_stride, const float *x, int64_t k,
                           int64_t n, int64_t ahead, float *sums)
{
    if (k < SP_SHORT_ROW)
        return short_sums(w, w_stride, x, k, n, sums);
    return k % K_HALF == 0 ? long_sums(w, w_stride, x, k, n, ahead, sums) : 0;
}

void sp_lone_sums_avx512(const sp_gemm_args *const *gemms, int32_t count, int64_t j, int64_t n,
                         float *sums, int64_t sums_stride)
{
    for (int32_t i = 0; i < count; i++, sums += sums_stride) {
        const sp_gemm_args *args = gemms[i];
        const uint16_t *w = (const uint16_t *)args->w + j * args->w_stride;

        sp_prefetch_ahead(gemms, i, count, j, n);
        if (args->k == K_HALF) /* rank 16, with a constant trip count */
            (void)short_sums(w, args->w_stride, args->packed_x, K_HALF, n, sums);
        else
            (void)sp_few_sums_avx512(w, args->w_stride, args->packed_x, args->k, n, 0, sums);
    }
}
