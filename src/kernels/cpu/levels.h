/*
 * levels.h: what each level adds to the table of functions. A fill function overwrites the entries
 * that its level improves and leaves the others as the level below set them.
 */
#ifndef SP_KERNELS_CPU_LEVELS_H
#define SP_KERNELS_CPU_LEVELS_H

#include "kernels/cpu/kernels.h"

/* Each overwrites its level's entries in a table filled by the level below. The CPU must have the
 * level. */
void sp_kernels_fill_scalar(sp_kernels *kernels);
void sp_kernels_fill_avx2(sp_kernels *kernels);
void sp_kernels_fill_avx512(sp_kernels *kernels);
/* `below` serves the types that have no tile instruction; it must outlive the table. */
void sp_kernels_fill_amx(sp_kernels *kernels, const sp_kernels *below);

/* Parts of a level in files of their own. */
void sp_kernels_fill_gemm_avx2(sp_kernels *kernels);
void sp_kernels_fill_attention_avx2(sp_kernels *kernels);
void sp_kernels_fill_attention_avx512(sp_kernels *kernels);
void sp_kernels_fill_attention_amx(sp_kernels *kernels, const sp_kernels *below);
void sp_kernels_fill_delta_rule_scalar(sp_kernels *kernels);
void sp_kernels_fill_delta_rule_avx2(sp_kernels *kernels);
void sp_kernels_fill_delta_rule_avx512(sp_kernels *kernels);

/* gemm_scalar.c; see the entries of sp_kernels. */
size_t sp_x_pack_bytes_scalar(sp_dtype x_type, sp_dtype w_type, int64_t rows, int64_t k);
void sp_x_pack_scalar(void *packed, sp_dtype x_type, sp_dtype w_type, const void *x,
                      int64_t x_stride, const int32_t *row_index, int64_t rows, int64_t k,
                      int64_t row_begin, int64_t row_end);
void sp_gemm_nt_lone_scalar(const sp_gemm_args *const *gemms, int32_t count, int64_t n_begin,
                            int64_t n_end);
void sp_gemm_nt_scalar(const sp_gemm_args *args, int64_t row_begin, int64_t row_end,
                       int64_t n_begin, int64_t n_end);

/*
 * The end of a GEMM, elementwise and therefore the same bits on every level: `count` finished sums
 * of row `row` for outputs from n_begin on.
 */
void sp_gemm_epilogue_scalar(const sp_gemm_args *args, int64_t row, int64_t n_begin, int64_t count,
                             const float *sums);
void sp_gemm_epilogue_avx2(const sp_gemm_args *args, int64_t row, int64_t n_begin, int64_t count,
                           const float *sums);
void sp_gemm_epilogue_avx512(const sp_gemm_args *args, int64_t row, int64_t n_begin, int64_t count,
                             const float *sums);

/* `tiles` tiles [16 pairs][16 rows][2] of BF16, contiguous, from 16 rows, starting at element c.
 * Copies bits. */
void sp_pack_tiles_avx512(void *to, const uint16_t *const *lines, int64_t c, int64_t tiles);

#define SP_SHORT_ROW 64 /* k below which a row is short */

/* Sums of one row of x, FP32 [k] and zeros up to a multiple of 32, with n rows of w, BF16, in
 * gemm_amx.c's order, where the caller has set that subnormals are flushed. Prefetches `ahead`
 * bytes ahead from the last rows of w if they are long, and nothing if they are short. Returns how
 * many sums it computed: a multiple of 16; 0 where k is long and not
 * a multiple of 16. */
int64_t sp_few_sums_avx512(const uint16_t *w, int64_t w_stride, const float *x, int64_t k,
                           int64_t n, int64_t ahead, float *sums);

/* The same sums, n (a multiple of 16) from weight row j on, of each of `count` GEMMs of one row,
 * whose k is short or a multiple of 16. Prefetches their weights. */
void sp_lone_sums_avx512(const sp_gemm_args *const *gemms, int32_t count, int64_t j, int64_t n,
                         float *sums, int64_t sums_stride);

/* The epilogue of the only rows of `count` GEMMs, n sums each. */
void sp_gemm_lone_epilogue_avx512(const sp_gemm_args *const *gemms, int32_t count, int64_t j,
                                  int64_t n, const float *sums, int64_t sums_stride);

/*
 * The epilogue for `rows` (at most 16) rows of 16 outputs whose sums are transposed: [16 outputs,
 * rows], stride `stride` floats, a multiple of four rows readable. Returns false and does nothing
 * for uncommon types or columns.
 */
bool sp_gemm_transposed_epilogue_avx512(const sp_gemm_args *args, int64_t row, int64_t rows,
                                        int64_t n_begin, const float *sums, int64_t stride);

#endif
