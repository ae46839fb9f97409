/* delta_rule_avx512.c: delta_rule_tile.h with 512-bit vectors: 24 sums, 4 of s or u, 1 of x. The
 * other entries of the rule are those of AVX2. */
#include "kernels/cpu/levels.h"
#include "kernels/cpu/vector_avx2.h"

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

void sp_kernels_fill_delta_rule_avx512(sp_kernels *kernels)
{
    kernels->state_read = state_read;
    kernels->state_fold = state_fold;
    kernels->delta_row = delta_row;
}
