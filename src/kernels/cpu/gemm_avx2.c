/*
 * gemm_avx2.c: gemm_nt with AVX2 and FMA; gemm_vector.h describes the algorithm. 16 registers: 12
 * sums, 3 of x and 1 of w when many rows share widened weights.
 */
#include "kernels/cpu/vector_avx2.h"

#define LANES      8
#define COLUMNS    4
#define ROWS       3
#define PANEL      8
#define N_BLOCK    16
#define M_BLOCK    96
#define SOME_WIDTH 2

typedef __m256 vec;
typedef sp_v16 pair;

#define vec_epilogue   sp_gemm_epilogue_avx2
#define vec_zero       _mm256_setzero_ps
#define vec_load       _mm256_loadu_ps
#define vec_store      _mm256_storeu_ps
#define vec_fma        _mm256_fmadd_ps
#define vec_reduce4    sp_v8_reduce4
#define vec_keep(v)    __asm__("" : "+x"(v))
#define pair_load      sp_v16_load
#define pair_load_tail sp_v16_load_tail

SP_INLINE pair pair_pack(sp_dtype x_type, sp_dtype order, const void *x, int64_t index,
                         int64_t count)
{
    int64_t low = count < 8 ? count : 8, high = count - low;

    if (count == 16)
        return sp_v16_arrange(order, sp_v8_load(x_type, x, index),
                              sp_v8_load(x_type, x, index + 8));
    return sp_v16_arrange(order, sp_v8_load_tail(x_type, x, index, low),
                          sp_v8_load_tail(x_type, x, index + 8, high));
}

#include "kernels/cpu/gemm_vector.h"

void sp_kernels_fill_gemm_avx2(sp_kernels *kernels)
{
    fill_gemm(kernels);
}
