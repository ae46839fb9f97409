/*
 * epilogue_avx512.c: the epilogue of a GEMM, sixteen outputs at a time, the last few masked. The
 * bits are those of epilogue_avx2.c; uncommon cases go there.
 */
#include "kernels/cpu/levels.h"
#include "kernels/cpu/transpose_avx512.h"

/* Rounds to nearest even; a NaN stays one and becomes quiet. See sp_f32_to_bf16. The result is in
 * the upper halves, the lower ones are anything. */
SP_INLINE __m512i round_bf16(__m512 value)
{
    __m512i bits = _mm512_castps_si512(value);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);

    return _mm512_mask_or_epi32(_mm512_add_epi32(bits, bias), nan, bits,
                                _mm512_set1_epi32(0x400000));
}

SP_INLINE __m256i to_bf16(__m512 value)
{
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_bf16(value), 16));
}

SP_INLINE __m512 from_bf16(__m256i half)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

SP_INLINE __m512 load(sp_dtype type, const void *data, int64_t index, __mmask16 mask)
{
    const void *at = sp_element_at(type, data, index);

    if (type == SP_DTYPE_F32)
        return _mm512_maskz_loadu_ps(mask, at);
    return from_bf16(_mm256_maskz_loadu_epi16(mask, at));
}

SP_INLINE void store(sp_dtype type, void *data, int64_t index, __mmask16 mask, __m512 value)
{
    void *at = sp_element_at_mut(type, data, index);

    if (type == SP_DTYPE_F32)
        _mm512_mask_storeu_ps(at, mask, value);
    else
        _mm256_mask_storeu_epi16(at, mask, to_bf16(value));
}

/* Y's new values; the old ones, of `type`, are at y + index. */
SP_INLINE __m512 folded(sp_dtype type, __m512 scale, __m512 sum, const void *y, int64_t index,
                        __mmask16 mask)
{
    if (type == SP_DTYPE_BF16)
        sum = _mm512_castsi512_ps(
            _mm512_and_si512(round_bf16(sum), _mm512_set1_epi32((int)0xffff0000u)));
    return _mm512_fmadd_ps(scale, sum, load(type, y, index, mask));
}

SP_INLINE void fold_or_store(const sp_gemm_args *args, sp_dtype type, bool fold, int64_t row,
                             void *y, int64_t count, const float *sums)
{
    const __m512 scale = _mm512_set1_ps(fold ? args->scale[row] : 0.0f);

    for (int64_t j = 0; j < count; j += 16) {
        __mmask16 mask = (__mmask16)(count - j >= 16 ? 0xffffu : (1u << (count - j)) - 1u);
        __m512 value = _mm512_maskz_loadu_ps(mask, sums + j);

        if (fold)
            value = folded(type, scale, value, y, j, mask);
        store(type, y, j, mask, value);
    }
}

static void *y_at(const sp_gemm_args *args, int64_t row, int64_t n)
{
    int64_t y_row = args->row_index ? args->row_index[row] : row;

    return sp_element_at_mut(args->y_type, args->y, y_row * args->y_stride + n);
}

/* y and delta of the same type, BF16 or FP32, consecutive columns, no bias. */
static bool is_common(const sp_gemm_args *args)
{
    bool fold = args->epilogue == SP_EPILOGUE_FOLD;

    return !args->column_index && args->y_type != SP_DTYPE_F16 && (fold || !args->bias) &&
           (!fold || args->y_type == args->delta_type);
}

void sp_gemm_epilogue_avx512(const sp_gemm_args *args, int64_t row, int64_t n_begin, int64_t count,
                             const float *sums)
{
    void *y = y_at(args, row, n_begin);
    bool fold = args->epilogue == SP_EPILOGUE_FOLD;

    if (!is_common(args))
        sp_gemm_epilogue_avx2(args, row, n_begin, count, sums);
    else if (fold && args->scale[row] == 0.0f)
        return;
    else if (args->y_type == SP_DTYPE_F32 && fold)
        fold_or_store(args, SP_DTYPE_F32, true, row, y, count, sums);
    else if (args->y_type == SP_DTYPE_F32)
        fold_or_store(args, SP_DTYPE_F32, false, row, y, count, sums);
    else if (fold)
        fold_or_store(args, SP_DTYPE_BF16, true, row, y, count, sums);
    else
        fold_or_store(args, SP_DTYPE_BF16, false, row, y, count, sums);
}

void sp_gemm_lone_epilogue_avx512(const sp_gemm_args *const *gemms, int32_t count, int64_t j,
                                  int64_t n, const float *sums, int64_t sums_stride)
{
    for (int32_t i = 0; i < count; i++, sums += sums_stride) {
        const sp_gemm_args *args = gemms[i];
        bool usual = is_common(args) && args->y_type == SP_DTYPE_BF16 &&
                     args->epilogue == SP_EPILOGUE_FOLD && args->scale[0] != 0.0f;
        uint16_t *y = y_at(args, 0, j);
        __m512 scale;

        if (!usual) {
            sp_gemm_epilogue_avx512(args, 0, j, n, sums);
            continue;
        }
        scale = _mm512_set1_ps(args->scale[0]);
        for (int64_t c = 0; c + 16 <= n; c += 16)
            store(SP_DTYPE_BF16, y, c, 0xffff,
                  folded(SP_DTYPE_BF16, scale, _mm512_loadu_ps(sums + c), y, c, 0xffff));
    }
}

/* ---- transposed sums ------------------------------------------------------------------------- */

SP_INLINE void finish_transposed(const sp_gemm_args *args, sp_dtype type, bool fold, int64_t row,
                                 int64_t rows, int64_t n_begin, const float *sums, int64_t stride)
{
    const float *lines[16];

    SP_UNROLL
    for (int c = 0; c < 16; c++)
        lines[c] = sums + c * stride;
    for (int64_t r = 0; r < rows; r += 4) {
        __m512 value[4];

        sp_transpose_16x4(lines, r, value);
        SP_UNROLL
        for (int i = 0; i < 4; i++) {
            void *y;

            if (r + i >= rows || (fold && args->scale[row + r + i] == 0.0f))
                continue;
            y = y_at(args, row + r + i, n_begin);
            if (fold)
                value[i] =
                    folded(type, _mm512_set1_ps(args->scale[row + r + i]), value[i], y, 0, 0xffff);
            store(type, y, 0, 0xffff, value[i]);
        }
    }
}

bool sp_gemm_transposed_epilogue_avx512(const sp_gemm_args *args, int64_t row, int64_t rows,
                                        int64_t n_begin, const float *sums, int64_t stride)
{
    bool fold = args->epilogue == SP_EPILOGUE_FOLD;

    if (!is_common(args))
        return false;
    if (args->y_type == SP_DTYPE_F32 && fold)
        finish_transposed(args, SP_DTYPE_F32, true, row, rows, n_begin, sums, stride);
    else if (args->y_type == SP_DTYPE_F32)
        finish_transposed(args, SP_DTYPE_F32, false, row, rows, n_begin, sums, stride);
    else if (fold)
        finish_transposed(args, SP_DTYPE_BF16, true, row, rows, n_begin, sums, stride);
    else
        finish_transposed(args, SP_DTYPE_BF16, false, row, rows, n_begin, sums, stride);
    return true;
}
