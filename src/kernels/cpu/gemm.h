/*
 * gemm.h: the packed GEMM over an executor: pack x once, then run it against one or several
 * weights that share it. Splits work over threads without changing a bit.
 */
#ifndef SP_KERNELS_CPU_GEMM_H
#define SP_KERNELS_CPU_GEMM_H

#include "base/private.h"

#include "kernels/cpu/kernels.h"

/* x [rows, k] to be packed, cut into pieces of rows like sp_gemm_job; see sp_kernels.x_pack. */
typedef struct sp_pack_job {
    const sp_kernels *kernels;
    void *packed;
    sp_dtype x_type, w_type;
    const void *x;    /* stride x_stride elements */
    int64_t x_stride; /* elements */
    const int32_t *row_index;
    int64_t rows, k;
    int64_t piece_rows; /* the last two by sp_pack_job_cut */
    int32_t n_pieces;
} sp_pack_job;

SP_PRIVATE void sp_pack_job_cut(sp_pack_job *job, int32_t threads);
SP_PRIVATE void sp_pack_job_run(const sp_pack_job *job, int32_t piece);

/* Packs x (rows × k) into `packed` in parallel. */
SP_PRIVATE void sp_gemm_pack(const sp_kernels *kernels, sp_exec *exec, void *packed,
                             sp_dtype x_type, sp_dtype w_type, const void *x, int64_t x_stride,
                             const int32_t *row_index, int64_t rows, int64_t k);

/*
 * One or several GEMMs cut into pieces of about equal work, for a caller that runs them inside a
 * parallel job of its own. Piece numbers count up through the GEMMs; a piece is a run of columns of
 * one of them, and all of its rows unless it has many rows or next to no columns. The pieces that
 * share their columns are a strip.
 */
typedef struct sp_gemm_job {
    const sp_kernels *kernels;
    const sp_gemm_args *gemms; /* borrowed until the last piece has run */
    int32_t n_gemms;
    int64_t piece_work; /* multiply-adds of one piece, roughly */
    int32_t n_pieces, n_strips;
} sp_gemm_job;

/* What a piece computes. */
typedef struct sp_gemm_piece {
    int32_t gemm;
    int32_t strip, strip_pieces; /* its number, through all GEMMs; how many pieces it has */
    int64_t row_begin, row_end, column_begin, column_end;
} sp_gemm_piece;

/* The GEMMs may differ in everything but must not write the same memory. */
SP_PRIVATE void sp_gemm_job_cut(const sp_kernels *kernels, int32_t threads,
                                const sp_gemm_args *gemms, int32_t n_gemms, sp_gemm_job *out_job);
SP_PRIVATE sp_gemm_piece sp_gemm_job_piece(const sp_gemm_job *job, int32_t piece);
SP_PRIVATE void sp_gemm_job_run(const sp_gemm_job *job, const sp_gemm_piece *piece);

/* Runs GEMMs as one job of the executor. */
SP_PRIVATE void sp_gemm_run(const sp_kernels *kernels, sp_exec *exec, const sp_gemm_args *gemms,
                            int32_t n_gemms);

#endif
