/*
 * gemm.h: the packed GEMM over an executor: pack x once, then run it against one or several
 * weights that share it. Splits work over threads without changing a bit.
 */
#ifndef SP_KERNELS_CPU_GEMM_H
#define SP_KERNELS_CPU_GEMM_H

#include "base/private.h"

#include "kernels/cpu/kernels.h"

/* x [rows, k] to be packed, split into pieces of rows like sp_gemm_job; see sp_kernels.x_pack. */
typedef struct sp_pack_job {
    const sp_kernels *kernels;
    void *packed;
    sp_dtype x_type, w_type;
    const void *x;    /* stride x_stride elements */
    int64_t x_stride; /* elements */
    const int32_t *row_index;
    int64_t rows, k;
    int64_t piece_rows; /* piece_rows and n_pieces: set by sp_pack_job_cut */
    int32_t n_pieces;
} sp_pack_job;

/* Sets piece_rows and n_pieces for `threads` threads; rows may be 0. */
SP_PRIVATE void sp_pack_job_cut(sp_pack_job *job, int32_t threads);
/* Packs one piece; distinct pieces may run on distinct threads. */
SP_PRIVATE void sp_pack_job_run(const sp_pack_job *job, int32_t piece);

/* Packs x (rows × k) into `packed` in parallel. Blocks; exec NULL: on the calling thread. */
SP_PRIVATE void sp_gemm_pack(const sp_kernels *kernels, sp_exec *exec, void *packed,
                             sp_dtype x_type, sp_dtype w_type, const void *x, int64_t x_stride,
                             const int32_t *row_index, int64_t rows, int64_t k);

/*
 * One or several GEMMs split into pieces of about equal work, for a caller that runs them inside
 * its own parallel loop. Pieces are numbered consecutively over the GEMMs; a piece is a range of
 * columns of one GEMM, with all of its rows unless it has many rows or few columns. Pieces with the
 * same columns form a strip.
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

/* Splits `n` GEMMs, which may differ in everything but must not write the same memory. */
SP_PRIVATE void sp_gemm_job_cut(const sp_kernels *kernels, int32_t threads,
                                const sp_gemm_args *gemms, int32_t n_gemms, sp_gemm_job *out_job);
/* What piece `piece` of 0 .. n_pieces - 1 computes. */
SP_PRIVATE sp_gemm_piece sp_gemm_job_piece(const sp_gemm_job *job, int32_t piece);
/* Computes one piece; distinct pieces may run on distinct threads. */
SP_PRIVATE void sp_gemm_job_run(const sp_gemm_job *job, const sp_gemm_piece *piece);

/* Runs GEMMs as one parallel loop of the executor. Blocks; exec NULL: on the calling thread. */
SP_PRIVATE void sp_gemm_run(const sp_kernels *kernels, sp_exec *exec, const sp_gemm_args *gemms,
                            int32_t n_gemms);

#endif
