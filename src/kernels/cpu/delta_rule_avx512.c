/*
 * delta_rule_avx512.c: the gated delta rule's entries, sixteen values at a time, bit for bit those
 * of AVX2: delta_rule_tile.h with 512-bit vectors (24 sums, 4 of s or u, 1 of x), the convolution
 * and the norms. What is left of a row after its last sixteen is given to the level below. Dot
 * products have eight lanes and stay there.
 */
#include "kernels/cpu/levels.h"
#include "kernels/cpu/vector_avx512.h"

#include <math.h>

#define LANES       16
#define ROWS        6
#define VECTORS     4
#define FEW_VECTORS 8

typedef __m512 vec;

#define vec_zero  _mm512_setzero_ps
#define vec_load  _mm512_loadu_ps
#define vec_store _mm512_storeu_ps
#define vec_set1  _mm512_set1_ps
#define vec_mul   _mm512_mul_ps
#define vec_fma   _mm512_fmadd_ps
#define vec_fnma  _mm512_fnmadd_ps

#include "kernels/cpu/delta_rule_tile.h"

/* ---- the convolution ----------------------------------------------------------------------- */

#define TAPS 4 /* other widths are left to the level below */

static sp_kernels below;

/* The weights of sixteen channels at one row each, of four rows: [16, 4] BF16 to four vectors. */
SP_INLINE void load_taps_4(const uint16_t *w, vec *out_taps)
{
    /* 32-bit words 2c and 2c + 1 are rows 0, 1 and 2, 3 of channel c. */
    const __m512i first =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
    __m512i low = _mm512_loadu_si512(w), high = _mm512_loadu_si512(w + 32), pairs[2];

    pairs[0] = _mm512_permutex2var_epi32(low, first, high);
    pairs[1] = _mm512_permutex2var_epi32(low, _mm512_add_epi32(first, _mm512_set1_epi32(1)), high);
    SP_UNROLL
    for (int p = 0; p < 2; p++) {
        out_taps[2 * p] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs[p], 16));
        out_taps[2 * p + 1] = _mm512_castsi512_ps(_mm512_and_si512(pairs[p], upper));
    }
}

/* Whole sixteens of channels; returns how many channels they have. */
SP_INLINE int64_t conv_silu_typed(sp_dtype type, void *y, const void *const *x, const uint16_t *w,
                                  int64_t n)
{
    int64_t i = 0;

    for (; i + LANES <= n; i += LANES) {
        vec taps[TAPS], sum = vec_zero();

        load_taps_4(w + i * TAPS, taps);
        SP_UNROLL
        for (int t = 0; t < TAPS; t++)
            sum = vec_fma(taps[t], sp_wide_load(type, x[t], i), sum);
        sp_wide_store(type, y, i, sp_wide_silu(sum));
    }
    return i;
}

static void conv_silu(sp_dtype type, void *y, const void *const *x, const uint16_t *w,
                      int64_t width, int64_t n)
{
    const void *rest[TAPS];
    int64_t done;

    if (width != TAPS) {
        below.conv_silu(type, y, x, w, width, n);
        return;
    }
    done = type == SP_DTYPE_BF16  ? conv_silu_typed(SP_DTYPE_BF16, y, x, w, n)
           : type == SP_DTYPE_F32 ? conv_silu_typed(SP_DTYPE_F32, y, x, w, n)
                                  : conv_silu_typed(SP_DTYPE_F16, y, x, w, n);
    if (done == n)
        return;
    for (int t = 0; t < TAPS; t++)
        rest[t] = sp_element_at(type, x[t], done);
    below.conv_silu(type, sp_element_at_mut(type, y, done), rest, w + done * TAPS, TAPS, n - done);
}

/* ---- norms ---------------------------------------------------------------------------------- */

SP_INLINE void unit_norm_typed(sp_dtype type, void *y, const void *x, int64_t n, float eps)
{
    const float inverse = 1.0f / sqrtf(sp_wide_sum_squares(type, x, n) + eps);
    int64_t i = 0;

    for (; i + LANES <= n; i += LANES)
        sp_wide_store(type, y, i, vec_mul(sp_wide_load(type, x, i), vec_set1(inverse)));
    for (; i < n; i += 8)
        sp_v8_store_upto(type, y, i, n,
                         _mm256_mul_ps(sp_v8_load_upto(type, x, i, n), _mm256_set1_ps(inverse)));
}

static void unit_norm(sp_dtype type, void *y, const void *x, int64_t n, float eps)
{
    SP_WITH_TYPE(type, unit_norm_typed, y, x, n, eps);
}

SP_INLINE void rmsnorm_gated_typed(sp_dtype type, void *y, const float *x, const float *w,
                                   const void *gate, int64_t n, float eps)
{
    const float inverse = 1.0f / sqrtf(sp_wide_sum_squares(SP_DTYPE_F32, x, n) / (float)n + eps);
    int64_t i = 0;

    for (; i + LANES <= n; i += LANES) {
        vec normed = vec_mul(vec_mul(vec_load(x + i), vec_set1(inverse)), vec_load(w + i));

        sp_wide_store(type, y, i, vec_mul(normed, sp_wide_silu(sp_wide_load(type, gate, i))));
    }
    for (; i < n; i += 8) {
        __m256 normed = _mm256_mul_ps(
            _mm256_mul_ps(sp_v8_load_upto(SP_DTYPE_F32, x, i, n), _mm256_set1_ps(inverse)),
            sp_v8_load_upto(SP_DTYPE_F32, w, i, n));

        sp_v8_store_upto(type, y, i, n,
                         _mm256_mul_ps(normed, sp_v8_silu(sp_v8_load_upto(type, gate, i, n))));
    }
}

static void rmsnorm_gated(sp_dtype type, void *y, const float *x, const float *w, const void *gate,
                          int64_t n, float eps)
{
    SP_WITH_TYPE(type, rmsnorm_gated_typed, y, x, w, gate, n, eps);
}

void sp_kernels_fill_delta_rule_avx512(sp_kernels *kernels)
{
    below = *kernels;
    kernels->conv_silu = conv_silu;
    kernels->unit_norm = unit_norm;
    kernels->rmsnorm_gated = rmsnorm_gated;
    kernels->state_read = state_read;
    kernels->state_fold = state_fold;
    kernels->delta_row = delta_row;
}
