/*
 * epilogue_avx2.c: the epilogue of a GEMM, eight outputs at a time. Elementwise, so every level has
 * the same bits.
 */
#include "kernels/cpu/levels.h"
#include "kernels/cpu/vector_avx2.h"

#include <stdbool.h>

SP_INLINE void fold(const sp_gemm_args *args, sp_dtype y_type, sp_dtype delta_type, int64_t row,
                    void *y, int64_t count, const float *sums)
{
    const __m256 scale = _mm256_set1_ps(args->scale[row]);

    for (int64_t j = 0; j < count; j += 8) {
        bool whole = count - j >= 8;
        __m256 sum =
            whole ? _mm256_loadu_ps(sums + j) : sp_v8_load_tail(SP_DTYPE_F32, sums, j, count - j);
        __m256 old = whole ? sp_v8_load(y_type, y, j) : sp_v8_load_tail(y_type, y, j, count - j);
        __m256 new = _mm256_fmadd_ps(scale, sp_v8_round(delta_type, sum), old);

        if (whole)
            sp_v8_store(y_type, y, j, new);
        else
            sp_v8_store_tail(y_type, y, j, count - j, new);
    }
}

SP_INLINE void store(sp_dtype y_type, void *y, int64_t count, const float *sums)
{
    int64_t j = 0;

    for (; j + 8 <= count; j += 8)
        sp_v8_store(y_type, y, j, _mm256_loadu_ps(sums + j));
    if (j < count)
        sp_v8_store_tail(y_type, y, j, count - j,
                         sp_v8_load_tail(SP_DTYPE_F32, sums, j, count - j));
}

/* The common cases in vectors; the others go to the scalar epilogue, which has the same bits. */
void sp_gemm_epilogue_avx2(const sp_gemm_args *args, int64_t row, int64_t n_begin, int64_t count,
                           const float *sums)
{
    int64_t y_row = args->row_index ? args->row_index[row] : row;
    void *y = sp_element_at_mut(args->y_type, args->y, y_row * args->y_stride + n_begin);

    if (args->column_index) {
        sp_gemm_epilogue_scalar(args, row, n_begin, count, sums);
        return;
    }
    if (args->epilogue == SP_EPILOGUE_STORE && !args->bias) {
        if (args->y_type == SP_DTYPE_F32)
            store(SP_DTYPE_F32, y, count, sums);
        else if (args->y_type == SP_DTYPE_BF16)
            store(SP_DTYPE_BF16, y, count, sums);
        else
            store(SP_DTYPE_F16, y, count, sums);
        return;
    }
    if (args->epilogue == SP_EPILOGUE_FOLD && args->y_type == args->delta_type) {
        if (args->scale[row] == 0.0f)
            return;
        if (args->y_type == SP_DTYPE_F32)
            fold(args, SP_DTYPE_F32, SP_DTYPE_F32, row, y, count, sums);
        else if (args->y_type == SP_DTYPE_BF16)
            fold(args, SP_DTYPE_BF16, SP_DTYPE_BF16, row, y, count, sums);
        else
            fold(args, SP_DTYPE_F16, SP_DTYPE_F16, row, y, count, sums);
        return;
    }
    sp_gemm_epilogue_scalar(args, row, n_begin, count, sums);
}
