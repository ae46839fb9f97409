/*
 * kernels_avx2.c: norms, RoPE, SiLU·mul, addition and conversion, eight values at a time. The
 * element types are constants inside each body, so that every (entry, type) pair compiles to its
 * own straight loop.
 */
#include "kernels/cpu/levels.h"
#include "kernels/cpu/vector_avx2.h"

#include <math.h>

/* ---- norms --------------------------------------------------------------------------------- */

SP_INLINE float inverse_rms(sp_dtype type, const void *x, int64_t n, float eps)
{
    return 1.0f / sqrtf(sp_v8_sum_squares(type, x, n) / (float)n + eps);
}

SP_INLINE __m256 normed(sp_dtype type, const void *x, const uint16_t *w, __m256 w_offset,
                        __m256 inverse, int64_t i)
{
    __m256 weight = _mm256_add_ps(sp_v8_load(SP_DTYPE_BF16, w, i), w_offset);

    return _mm256_mul_ps(_mm256_mul_ps(sp_v8_load(type, x, i), inverse), weight);
}

/* The same operations for one element, for the tails. */
SP_INLINE float normed_one(sp_dtype type, const void *x, const uint16_t *w, float w_offset,
                           float inverse, int64_t i)
{
    return sp_element_load(type, x, i) * inverse * (sp_bf16_to_f32(w[i]) + w_offset);
}

/* Elements [i, n) of a row whose factor is known. */
SP_INLINE void norm_rest(sp_dtype type, void *y, const void *x, const uint16_t *w, float w_offset,
                         float inverse, int64_t i, int64_t n)
{
    const __m256 offset = _mm256_set1_ps(w_offset), factor = _mm256_set1_ps(inverse);

    for (; i + 8 <= n; i += 8)
        sp_v8_store(type, y, i, normed(type, x, w, offset, factor, i));
    for (; i < n; i++)
        sp_element_store(type, y, i, normed_one(type, x, w, w_offset, inverse, i));
}

SP_INLINE void rmsnorm_typed(sp_dtype type, void *y, const void *x, const uint16_t *w,
                             float w_offset, int64_t n, float eps)
{
    norm_rest(type, y, x, w, w_offset, inverse_rms(type, x, n, eps), 0, n);
}

static void rmsnorm(sp_dtype type, void *y, const void *x, const uint16_t *w, float w_offset,
                    int64_t n, float eps)
{
    SP_WITH_TYPE(type, rmsnorm_typed, y, x, w, w_offset, n, eps);
}

SP_INLINE void rmsnorm_rope_typed(sp_dtype type, void *x, const uint16_t *w, float w_offset,
                                  int64_t n, float eps, const float *cosine, const float *sine,
                                  int64_t n_rot)
{
    float inverse = inverse_rms(type, x, n, eps);
    const __m256 offset = _mm256_set1_ps(w_offset), factor = _mm256_set1_ps(inverse);
    int64_t i = 0;

    for (; i + 8 <= n_rot; i += 8) {
        __m256 a = normed(type, x, w, offset, factor, i);
        __m256 b = normed(type, x, w, offset, factor, i + n_rot);
        __m256 c = _mm256_loadu_ps(cosine + i), s = _mm256_loadu_ps(sine + i);

        sp_v8_store(type, x, i, _mm256_sub_ps(_mm256_mul_ps(a, c), _mm256_mul_ps(b, s)));
        sp_v8_store(type, x, i + n_rot, _mm256_add_ps(_mm256_mul_ps(b, c), _mm256_mul_ps(a, s)));
    }
    for (; i < n_rot; i++) {
        float a = normed_one(type, x, w, w_offset, inverse, i);
        float b = normed_one(type, x, w, w_offset, inverse, i + n_rot);

        sp_element_store(type, x, i, a * cosine[i] - b * sine[i]);
        sp_element_store(type, x, i + n_rot, b * cosine[i] + a * sine[i]);
    }
    norm_rest(type, x, x, w, w_offset, inverse, 2 * n_rot, n);
}

static void rmsnorm_rope(sp_dtype type, void *x, const uint16_t *w, float w_offset, int64_t n,
                         float eps, const float *cosine, const float *sine, int64_t n_rot)
{
    SP_WITH_TYPE(type, rmsnorm_rope_typed, x, w, w_offset, n, eps, cosine, sine, n_rot);
}

SP_INLINE void rope_typed(sp_dtype type, void *x, const float *cosine, const float *sine,
                          int64_t n_rot)
{
    int64_t i = 0;

    for (; i + 8 <= n_rot; i += 8) {
        __m256 a = sp_v8_load(type, x, i), b = sp_v8_load(type, x, i + n_rot);
        __m256 c = _mm256_loadu_ps(cosine + i), s = _mm256_loadu_ps(sine + i);

        sp_v8_store(type, x, i, _mm256_sub_ps(_mm256_mul_ps(a, c), _mm256_mul_ps(b, s)));
        sp_v8_store(type, x, i + n_rot, _mm256_add_ps(_mm256_mul_ps(b, c), _mm256_mul_ps(a, s)));
    }
    for (; i < n_rot; i++) {
        float a = sp_element_load(type, x, i), b = sp_element_load(type, x, i + n_rot);

        sp_element_store(type, x, i, a * cosine[i] - b * sine[i]);
        sp_element_store(type, x, i + n_rot, b * cosine[i] + a * sine[i]);
    }
}

static void rope(sp_dtype type, void *x, const float *cosine, const float *sine, int64_t n_rot)
{
    SP_WITH_TYPE(type, rope_typed, x, cosine, sine, n_rot);
}

/* ---- elementwise --------------------------------------------------------------------------- */

SP_INLINE __m256 silu_times(__m256 gate, __m256 up)
{
    return _mm256_mul_ps(sp_v8_silu(gate), up);
}

SP_INLINE __m256 weights_8(__m256 logits, float best, float inverse)
{
    return sp_v8_exp(
        _mm256_mul_ps(_mm256_sub_ps(logits, _mm256_set1_ps(best)), _mm256_set1_ps(inverse)));
}

static void exp_weights(float *weights, const float *logits, float best, float inverse, int64_t n)
{
    int64_t i = 0;

    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(weights + i, weights_8(_mm256_loadu_ps(logits + i), best, inverse));
    if (i < n)
        sp_v8_store_tail(SP_DTYPE_F32, weights, i, n - i,
                         weights_8(sp_v8_load_tail(SP_DTYPE_F32, logits, i, n - i), best, inverse));
}

SP_INLINE void silu_mul_typed(sp_dtype type, void *out, const void *gate, const void *up, int64_t n)
{
    int64_t i = 0;

    for (; i + 8 <= n; i += 8)
        sp_v8_store(type, out, i, silu_times(sp_v8_load(type, gate, i), sp_v8_load(type, up, i)));
    if (i < n)
        sp_v8_store_tail(
            type, out, i, n - i,
            silu_times(sp_v8_load_tail(type, gate, i, n - i), sp_v8_load_tail(type, up, i, n - i)));
}

static void silu_mul(sp_dtype type, void *out, const void *gate, const void *up, int64_t n)
{
    SP_WITH_TYPE(type, silu_mul_typed, out, gate, up, n);
}

SP_INLINE void add_typed(sp_dtype type, void *y, const void *x, int64_t n)
{
    int64_t i = 0;

    for (; i + 8 <= n; i += 8)
        sp_v8_store(type, y, i, _mm256_add_ps(sp_v8_load(type, y, i), sp_v8_load(type, x, i)));
    for (; i < n; i++)
        sp_element_store(type, y, i, sp_element_load(type, y, i) + sp_element_load(type, x, i));
}

static void add(sp_dtype type, void *y, const void *x, int64_t n)
{
    SP_WITH_TYPE(type, add_typed, y, x, n);
}

SP_INLINE void add_scaled_typed(sp_dtype type, void *y, const void *x, float scale, int64_t n)
{
    const __m256 factor = _mm256_set1_ps(scale);

    for (int64_t i = 0; i < n; i += 8)
        sp_v8_store_upto(type, y, i, n,
                         _mm256_fmadd_ps(factor, sp_v8_load_upto(type, x, i, n),
                                         sp_v8_load_upto(type, y, i, n)));
}

static void add_scaled(sp_dtype type, void *y, const void *x, float scale, int64_t n)
{
    SP_WITH_TYPE(type, add_scaled_typed, y, x, scale, n);
}

SP_INLINE void weighted_sum_typed(sp_dtype type, void *y, const void *x, int64_t x_stride,
                                  const int32_t *row_index, const float *weights, int64_t rows,
                                  int64_t n)
{
    for (int64_t j = 0; j < n; j += 8) {
        __m256 sum = _mm256_setzero_ps();

        for (int64_t i = 0; i < rows; i++)
            sum = _mm256_fmadd_ps(
                _mm256_set1_ps(weights[i]),
                sp_v8_load_upto(type, sp_element_at(type, x, row_index[i] * x_stride), j, n), sum);
        sp_v8_store_upto(type, y, j, n, sum);
    }
}

static void weighted_sum(sp_dtype type, void *y, const void *x, int64_t x_stride,
                         const int32_t *row_index, const float *weights, int64_t rows, int64_t n)
{
    SP_WITH_TYPE(type, weighted_sum_typed, y, x, x_stride, row_index, weights, rows, n);
}

SP_INLINE void convert_typed(sp_dtype to_type, void *to, sp_dtype from_type, const void *from,
                             int64_t n)
{
    int64_t i = 0;

    for (; i + 8 <= n; i += 8)
        sp_v8_store(to_type, to, i, sp_v8_load(from_type, from, i));
    for (; i < n; i++)
        sp_element_store(to_type, to, i, sp_element_load(from_type, from, i));
}

SP_INLINE void convert_to(sp_dtype to_type, void *to, sp_dtype from_type, const void *from,
                          int64_t n)
{
    if (from_type == SP_DTYPE_BF16)
        convert_typed(to_type, to, SP_DTYPE_BF16, from, n);
    else if (from_type == SP_DTYPE_F32)
        convert_typed(to_type, to, SP_DTYPE_F32, from, n);
    else
        convert_typed(to_type, to, SP_DTYPE_F16, from, n);
}

static void convert(sp_dtype to_type, void *to, sp_dtype from_type, const void *from, int64_t n)
{
    if (to_type == from_type)
        memcpy(to, from, (size_t)n * sp_dtype_bytes(to_type));
    else
        SP_WITH_TYPE(to_type, convert_to, to, from_type, from, n);
}

void sp_kernels_fill_avx2(sp_kernels *kernels)
{
    kernels->rmsnorm = rmsnorm;
    kernels->rmsnorm_rope = rmsnorm_rope;
    kernels->rope = rope;
    kernels->silu_mul = silu_mul;
    kernels->exp_weights = exp_weights;
    kernels->add = add;
    kernels->add_scaled = add_scaled;
    kernels->weighted_sum = weighted_sum;
    kernels->convert = convert;
    sp_kernels_fill_gemm_avx2(kernels);
    sp_kernels_fill_attention_avx2(kernels);
    sp_kernels_fill_delta_rule_avx2(kernels);
}
