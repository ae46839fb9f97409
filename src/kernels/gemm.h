/*
 * gemm.h: the packed GEMM over an executor: pack x once, then run it against one or several
 * weights that share it. Splits work over threads without changing a bit.
 */
#ifndef SP_KERNELS_GEMM_H
#define SP_KERNELS_GEMM_H

#include "kernels/kernels.h"

/* Packs x (rows × k) into `packed` in parallel; see sp_kernels.x_pack. */
void sp_gemm_pack(const sp_kernels *kernels, sp_exec *exec, void *packed, sp_dtype x_type,
                  sp_dtype w_type, const void *x, int64_t x_stride, const int32_t *row_index,
                  int64_t rows, int64_t k);

/* Runs one or several GEMMs, their outputs split over the executor's threads as one job. They may
 * differ in everything but must not write the same memory. */
void sp_gemm_run(const sp_kernels *kernels, sp_exec *exec, const sp_gemm_args *gemms,
                 int32_t n_gemms);

#endif
