/*
 * gemm.c: splits packing and GEMMs over the executor. A split never changes a bit, because an
 * output depends on its own row of x and of w only; so it is free to follow the machine: pieces
 * that are large enough to stream memory in long runs and small enough to keep all threads busy
 * to the end.
 */
#include "kernels/gemm.h"

#define PIECES_PER_THREAD 8
#define PIECE_WORK_MIN    (1 << 17) /* multiply-adds below which a piece costs more than it gives */
#define PIECE_ROWS_MAX    512

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t max64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

static int64_t round_up(int64_t a, int64_t step)
{
    return ceil_div(a, step) * step;
}

/* ---- packing ------------------------------------------------------------------------------- */

typedef struct pack_job {
    const sp_kernels *kernels;
    void *packed;
    sp_dtype x_type, w_type;
    const void *x; /* [rows, k], stride x_stride elements */
    int64_t x_stride;
    const int32_t *row_index;
    int64_t rows, k, rows_per_task;
} pack_job;

static void pack_task(void *user, int32_t task, int32_t thread)
{
    const pack_job *job = user;
    int64_t begin = task * job->rows_per_task;

    (void)thread;
    job->kernels->x_pack(job->packed, job->x_type, job->w_type, job->x, job->x_stride,
                         job->row_index, job->rows, job->k, begin,
                         min64(begin + job->rows_per_task, job->rows));
}

void sp_gemm_pack(const sp_kernels *kernels, sp_exec *exec, void *packed, sp_dtype x_type,
                  sp_dtype w_type, const void *x, int64_t x_stride, const int32_t *row_index,
                  int64_t rows, int64_t k)
{
    pack_job job = {kernels, packed, x_type, w_type, x, x_stride, row_index, rows, k, 0};
    int64_t pieces = (int64_t)sp_exec_threads(exec) * PIECES_PER_THREAD;
    int64_t least = ceil_div(PIECE_WORK_MIN / 4, max64(k, 1));

    if (rows <= 0)
        return;
    job.rows_per_task = round_up(max64(ceil_div(rows, pieces), least), kernels->x_pack_rows);
    sp_exec_run(exec, pack_task, &job, (int32_t)ceil_div(rows, job.rows_per_task));
}

/* ---- running ------------------------------------------------------------------------------- */

typedef struct gemm_job {
    const sp_kernels *kernels;
    const sp_gemm_args *gemms;
    int32_t n_gemms;
    int64_t piece_work; /* multiply-adds of one piece, roughly */
} gemm_job;

/* How one GEMM is cut: pieces of rows × columns, columns varying fastest. */
typedef struct gemm_split {
    int64_t rows, columns; /* of one piece */
    int64_t row_pieces, column_pieces;
} gemm_split;

static gemm_split split_gemm(const gemm_job *job, const sp_gemm_args *args)
{
    const sp_kernels *kernels = job->kernels;
    gemm_split split;
    int64_t k = max64(args->k, 1);

    split.rows = min64(args->rows, PIECE_ROWS_MAX);
    split.columns = min64(max64(job->piece_work / (k * split.rows), 1), args->n);
    split.columns = round_up(split.columns, kernels->gemm_columns);
    /* Too few columns for a whole piece's work is a shrink: it is cut over its rows as well. */
    if (split.columns >= args->n)
        split.rows = max64(job->piece_work / (k * args->n), 1);
    split.rows = round_up(min64(split.rows, args->rows), kernels->gemm_rows);
    split.row_pieces = ceil_div(args->rows, split.rows);
    split.column_pieces = ceil_div(args->n, split.columns);
    return split;
}

static bool is_empty(const sp_gemm_args *args)
{
    return args->rows <= 0 || args->n <= 0;
}

static void gemm_task(void *user, int32_t task, int32_t thread)
{
    const gemm_job *job = user;
    int64_t piece = task;

    (void)thread;
    for (int32_t g = 0; g < job->n_gemms; g++) {
        const sp_gemm_args *args = &job->gemms[g];
        gemm_split split;
        int64_t row, column;

        if (is_empty(args))
            continue;
        split = split_gemm(job, args);
        if (piece >= split.row_pieces * split.column_pieces) {
            piece -= split.row_pieces * split.column_pieces;
            continue;
        }
        row = piece / split.column_pieces * split.rows;
        column = piece % split.column_pieces * split.columns;
        job->kernels->gemm_nt(args, row, min64(row + split.rows, args->rows), column,
                              min64(column + split.columns, args->n));
        return;
    }
}

void sp_gemm_run(const sp_kernels *kernels, sp_exec *exec, const sp_gemm_args *gemms,
                 int32_t n_gemms)
{
    gemm_job job = {kernels, gemms, n_gemms, 0};
    int64_t work = 0, pieces = 0;

    for (int32_t g = 0; g < n_gemms; g++)
        if (!is_empty(&gemms[g]))
            work += gemms[g].rows * gemms[g].n * max64(gemms[g].k, 1);
    job.piece_work =
        max64(work / ((int64_t)sp_exec_threads(exec) * PIECES_PER_THREAD), PIECE_WORK_MIN);
    for (int32_t g = 0; g < n_gemms; g++) {
        gemm_split split;

        if (is_empty(&gemms[g]))
            continue;
        split = split_gemm(&job, &gemms[g]);
        pieces += split.row_pieces * split.column_pieces;
    }
    sp_exec_run(exec, gemm_task, &job, (int32_t)pieces);
}
