/*
 * gemm_avx512.c: gemm_nt with FP32 fused steps on 512-bit vectors; gemm_vector.h describes the
 * algorithm. BF16 weights are widened, because the BF16 dot instruction has half the rate of FP32
 * FMA where it was measured. 32 registers: 24 sums, 3 of x and 1 of w when many rows share widened
 * weights.
 */
#include "kernels/cpu/vector_avx2.h"

#define LANES      16
#define COLUMNS    8
#define ROWS       3
#define PANEL      8
#define N_BLOCK    16
#define M_BLOCK    96
#define SOME_WIDTH 4

typedef __m512 vec;
typedef struct pair {
    __m512 first, second;
} pair;

#define vec_zero     _mm512_setzero_ps
#define vec_epilogue sp_gemm_epilogue_avx512
#define vec_load     _mm512_loadu_ps
#define vec_store    _mm512_storeu_ps
#define vec_fma      _mm512_fmadd_ps
#define vec_keep(v)  __asm__("" : "+v"(v))

/* Lane l and lane l + 8, then the tree of eight lanes. */
SP_INLINE __m256 fold_halves(__m512 v)
{
    return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
}

SP_INLINE __m128 vec_reduce4(__m512 a, __m512 b, __m512 c, __m512 d)
{
    return sp_v8_reduce4(fold_halves(a), fold_halves(b), fold_halves(c), fold_halves(d));
}

/* A mask of the lower `count` bits, 0 <= count. */
SP_INLINE __mmask32 first_lanes(int64_t count)
{
    return count >= 32 ? 0xffffffffu : (1u << count) - 1u;
}

/* At most 16 values from `index` on, zeros after `count`; nothing beyond is read. */
SP_INLINE __m512 load_lanes(sp_dtype type, const void *data, int64_t index, int64_t count)
{
    __mmask16 mask = count <= 0 ? 0 : (__mmask16)(first_lanes(count) & 0xffffu);
    const void *at = sp_element_at(type, data, index);
    __m256i half;

    if (type == SP_DTYPE_F32)
        return _mm512_maskz_loadu_ps(mask, at);
    half = _mm256_maskz_loadu_epi16(mask, at);
    if (type == SP_DTYPE_F16)
        return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

SP_INLINE pair widen_pairs(__m512i pairs)
{
    pair v = {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
              _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000u)))};

    return v;
}

SP_INLINE pair pair_load_tail(sp_dtype type, const void *data, int64_t count)
{
    if (type == SP_DTYPE_BF16)
        return widen_pairs(_mm512_maskz_loadu_epi16(first_lanes(count), data));
    pair v = {load_lanes(type, data, 0, count), load_lanes(type, data, 16, count - 16)};
    return v;
}

SP_INLINE pair pair_load(sp_dtype type, const void *data)
{
    if (type == SP_DTYPE_BF16)
        return widen_pairs(_mm512_loadu_si512(data));
    return pair_load_tail(type, data, 32);
}

SP_INLINE pair pair_pack(sp_dtype x_type, sp_dtype order, const void *x, int64_t index,
                         int64_t count)
{
    const __m512i even =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    pair v = {load_lanes(x_type, x, index, count), load_lanes(x_type, x, index + 16, count - 16)};
    __m512 low = v.first;

    if (order == SP_DTYPE_BF16) {
        v.first = _mm512_permutex2var_ps(low, even, v.second);
        v.second =
            _mm512_permutex2var_ps(low, _mm512_add_epi32(even, _mm512_set1_epi32(1)), v.second);
    }
    return v;
}

#include "kernels/cpu/gemm_vector.h"

void sp_kernels_fill_avx512(sp_kernels *kernels)
{
    fill_gemm(kernels);
    sp_kernels_fill_attention_avx512(kernels);
    sp_kernels_fill_delta_rule_avx512(kernels);
}
