/*
 * delta_rule_avx2.c: the gated delta rule's entries, eight values at a time: its products by
 * delta_rule_tile.h (12 sums, 3 of x, 1 of s), its convolution, gates and norms.
 */
#include "kernels/cpu/levels.h"
#include "kernels/cpu/vector_avx2.h"

#include <math.h>

#define LANES       8
#define ROWS        3
#define VECTORS     4
#define FEW_VECTORS 4

typedef __m256 vec;

#define vec_zero  _mm256_setzero_ps
#define vec_load  _mm256_loadu_ps
#define vec_store _mm256_storeu_ps
#define vec_set1  _mm256_set1_ps
#define vec_mul   _mm256_mul_ps
#define vec_fma   _mm256_fmadd_ps
#define vec_fnma  _mm256_fnmadd_ps

#include "kernels/cpu/delta_rule_tile.h"

/* ---- dot products -------------------------------------------------------------------------- */

#define DOT_ROWS    2
#define DOT_COLUMNS 4

/* Four sums of each of `rows` rows of x; element d goes to lane d mod 8. */
SP_INLINE void dot_tile(int rows, float *y, int64_t y_stride, const float *x, const float *z,
                        int64_t k)
{
    vec sums[DOT_ROWS][DOT_COLUMNS];

    SP_UNROLL
    for (int r = 0; r < rows; r++) {
        SP_UNROLL
        for (int c = 0; c < DOT_COLUMNS; c++)
            sums[r][c] = vec_zero();
    }
    for (int64_t d = 0; d < k; d += LANES) {
        vec value[DOT_ROWS];

        SP_UNROLL
        for (int r = 0; r < rows; r++)
            value[r] = sp_v8_load_upto(SP_DTYPE_F32, x + r * k, d, k);
        SP_UNROLL
        for (int c = 0; c < DOT_COLUMNS; c++) {
            vec other = sp_v8_load_upto(SP_DTYPE_F32, z + c * k, d, k);

            SP_UNROLL
            for (int r = 0; r < rows; r++)
                sums[r][c] = vec_fma(value[r], other, sums[r][c]);
        }
    }
    SP_UNROLL
    for (int r = 0; r < rows; r++)
        _mm_storeu_ps(y + r * y_stride,
                      sp_v8_reduce4(sums[r][0], sums[r][1], sums[r][2], sums[r][3]));
}

/* One sum. The other three lanes of the tree are copies. */
SP_INLINE float dot_one(const float *x, const float *z, int64_t k)
{
    vec sum = vec_zero();

    for (int64_t d = 0; d < k; d += LANES)
        sum = vec_fma(sp_v8_load_upto(SP_DTYPE_F32, x, d, k),
                      sp_v8_load_upto(SP_DTYPE_F32, z, d, k), sum);
    return sp_v8_reduce(sum);
}

static void dots(float *y, int64_t y_stride, const float *x, const float *z, int64_t rows,
                 int64_t columns, int64_t k)
{
    int64_t j = 0;

    for (; j + DOT_COLUMNS <= columns; j += DOT_COLUMNS) {
        int64_t r = 0;

        for (; r + DOT_ROWS <= rows; r += DOT_ROWS)
            dot_tile(DOT_ROWS, y + r * y_stride + j, y_stride, x + r * k, z + j * k, k);
        for (; r < rows; r++)
            dot_tile(1, y + r * y_stride + j, y_stride, x + r * k, z + j * k, k);
    }
    for (; j < columns; j++)
        for (int64_t r = 0; r < rows; r++)
            y[r * y_stride + j] = dot_one(x + r * k, z + j * k, k);
}

/* ---- the convolution ----------------------------------------------------------------------- */

/* The weights of eight channels at one row each, of four rows: [8, 4] BF16 to four vectors. */
SP_INLINE void load_taps_4(const uint16_t *w, vec *out_taps)
{
    /* 32-bit words 2c and 2c + 1 are rows 0, 1 and 2, 3 of channel c. */
    vec low = _mm256_loadu_ps((const float *)(const void *)w);
    vec high = _mm256_loadu_ps((const float *)(const void *)(w + 16));
    __m256i first =
        _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(low, high, 0x88)), 0xd8);
    __m256i second =
        _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(low, high, 0xdd)), 0xd8);
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000u);

    out_taps[0] = _mm256_castsi256_ps(_mm256_slli_epi32(first, 16));
    out_taps[1] = _mm256_castsi256_ps(_mm256_and_si256(first, upper));
    out_taps[2] = _mm256_castsi256_ps(_mm256_slli_epi32(second, 16));
    out_taps[3] = _mm256_castsi256_ps(_mm256_and_si256(second, upper));
}

/* At most eight channels of any width. */
SP_INLINE vec gather_taps(const uint16_t *w, int64_t width, int64_t t, int64_t channels)
{
    float taps[LANES] = {0};

    for (int64_t c = 0; c < channels; c++)
        taps[c] = sp_bf16_to_f32(w[c * width + t]);
    return vec_load(taps);
}

SP_INLINE void conv_silu_typed(sp_dtype type, void *y, const void *const *x, const uint16_t *w,
                               int64_t width, int64_t n)
{
    int64_t i = 0;

    for (; width == 4 && i + LANES <= n; i += LANES) {
        vec taps[4], sum = vec_zero();

        load_taps_4(w + i * 4, taps);
        SP_UNROLL
        for (int t = 0; t < 4; t++)
            sum = vec_fma(taps[t], sp_v8_load(type, x[t], i), sum);
        sp_v8_store(type, y, i, sp_v8_silu(sum));
    }
    for (; i < n; i += LANES) {
        int64_t channels = n - i < LANES ? n - i : LANES;
        vec sum = vec_zero();

        for (int64_t t = 0; t < width; t++)
            sum = vec_fma(gather_taps(w + i * width, width, t, channels),
                          sp_v8_load_upto(type, x[t], i, n), sum);
        sp_v8_store_upto(type, y, i, n, sp_v8_silu(sum));
    }
}

static void conv_silu(sp_dtype type, void *y, const void *const *x, const uint16_t *w,
                      int64_t width, int64_t n)
{
    SP_WITH_TYPE(type, conv_silu_typed, y, x, w, width, n);
}

/* ---- gates and norms ------------------------------------------------------------------------ */

SP_INLINE void sigmoid_mul_typed(sp_dtype type, void *y, const void *gate, int64_t n)
{
    for (int64_t i = 0; i < n; i += LANES) {
        vec sigmoid = sp_v8_sigmoid(sp_v8_load_upto(type, gate, i, n));

        sp_v8_store_upto(type, y, i, n, vec_mul(sp_v8_load_upto(type, y, i, n), sigmoid));
    }
}

static void sigmoid_mul(sp_dtype type, void *y, const void *gate, int64_t n)
{
    SP_WITH_TYPE(type, sigmoid_mul_typed, y, gate, n);
}

SP_INLINE void unit_norm_typed(sp_dtype type, void *y, const void *x, int64_t n, float eps)
{
    const vec inverse = vec_set1(1.0f / sqrtf(sp_v8_sum_squares(type, x, n) + eps));

    for (int64_t i = 0; i < n; i += LANES)
        sp_v8_store_upto(type, y, i, n, vec_mul(sp_v8_load_upto(type, x, i, n), inverse));
}

static void unit_norm(sp_dtype type, void *y, const void *x, int64_t n, float eps)
{
    SP_WITH_TYPE(type, unit_norm_typed, y, x, n, eps);
}

SP_INLINE void rmsnorm_gated_typed(sp_dtype type, void *y, const float *x, const float *w,
                                   const void *gate, int64_t n, float eps)
{
    const vec inverse =
        vec_set1(1.0f / sqrtf(sp_v8_sum_squares(SP_DTYPE_F32, x, n) / (float)n + eps));

    for (int64_t i = 0; i < n; i += LANES) {
        vec normed = vec_mul(vec_mul(sp_v8_load_upto(SP_DTYPE_F32, x, i, n), inverse),
                             sp_v8_load_upto(SP_DTYPE_F32, w, i, n));

        sp_v8_store_upto(type, y, i, n,
                         vec_mul(normed, sp_v8_silu(sp_v8_load_upto(type, gate, i, n))));
    }
}

static void rmsnorm_gated(sp_dtype type, void *y, const float *x, const float *w, const void *gate,
                          int64_t n, float eps)
{
    SP_WITH_TYPE(type, rmsnorm_gated_typed, y, x, w, gate, n, eps);
}

void sp_kernels_fill_delta_rule_avx2(sp_kernels *kernels)
{
    kernels->sigmoid_mul = sigmoid_mul;
    kernels->conv_silu = conv_silu;
    kernels->unit_norm = unit_norm;
    kernels->rmsnorm_gated = rmsnorm_gated;
    kernels->state_read = state_read;
    kernels->state_fold = state_fold;
    kernels->dots = dots;
    kernels->delta_row = delta_row;
}
