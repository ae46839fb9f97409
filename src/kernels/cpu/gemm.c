/*
 * gemm.c: splits packing and GEMMs into tasks of the executor. A split never changes a bit, because
 * an output depends only on its own row of x and of w; so it can be tuned for the machine: pieces
 * large enough to stream memory in long runs, and small enough to balance the threads.
 */
#include "kernels/cpu/gemm.h"

#include "base/assert.h"
#include "base/integer.h"

#define PIECES_PER_THREAD 8
#define PIECE_WORK_MIN    (1 << 17) /* multiply-adds; less is not worth a piece's overhead */
#define PIECE_ROWS_MAX    512
/* Many rows are split over rows rather than into narrower pieces: x of 512 rows exceeds a core's
 * cache, and would be read from memory again for every few columns. */
#define PIECE_COLUMNS_MIN 128
#define PIECE_ROWS_MIN    256
/* Upper bound of both sides of a level's inner tile: a narrower piece wastes part of it. */
#define PIECE_STEP 32

/* ---- packing ------------------------------------------------------------------------------- */

void sp_pack_job_cut(sp_pack_job *job, int32_t threads)
{
    int64_t pieces = (int64_t)threads * PIECES_PER_THREAD;
    int64_t least = ceil_div(PIECE_WORK_MIN / 4, max64(job->k, 1));
    int64_t rows = max64(job->rows, 0);

    job->piece_rows = round_up(max64(ceil_div(rows, pieces), least), job->kernels->x_pack_rows);
    job->n_pieces = (int32_t)ceil_div(rows, job->piece_rows);
    SP_ASSERT(job->piece_rows > 0 && job->piece_rows % job->kernels->x_pack_rows == 0);
    SP_ASSERT(job->n_pieces * job->piece_rows >= rows);
}

void sp_pack_job_run(const sp_pack_job *job, int32_t piece)
{
    int64_t begin = piece * job->piece_rows;

    SP_ASSERT(piece >= 0 && piece < job->n_pieces);
    SP_ASSERT(begin < job->rows);
    job->kernels->x_pack(job->packed, job->x_type, job->w_type, job->x, job->x_stride,
                         job->row_index, job->rows, job->k, begin,
                         min64(begin + job->piece_rows, job->rows));
}

static void pack_task(void *user, int32_t task, int32_t thread)
{
    (void)thread;
    sp_pack_job_run(user, task);
}

void sp_gemm_pack(const sp_kernels *kernels, sp_exec *exec, void *packed, sp_dtype x_type,
                  sp_dtype w_type, const void *x, int64_t x_stride, const int32_t *row_index,
                  int64_t rows, int64_t k)
{
    sp_pack_job job = {
        .kernels = kernels,
        .packed = packed,
        .x_type = x_type,
        .w_type = w_type,
        .x = x,
        .x_stride = x_stride,
        .row_index = row_index,
        .rows = rows,
        .k = k,
    };

    sp_pack_job_cut(&job, sp_exec_threads(exec));
    sp_exec_run(exec, pack_task, &job, job.n_pieces);
}

/* ---- running ------------------------------------------------------------------------------- */

/* How one GEMM is split: pieces of rows × columns, columns varying fastest. */
typedef struct gemm_split {
    int64_t rows, columns; /* of one piece */
    int64_t row_pieces, column_pieces;
} gemm_split;

static gemm_split split_gemm(const sp_gemm_job *job, const sp_gemm_args *args)
{
    const sp_kernels *kernels = job->kernels;
    gemm_split split;
    int64_t k = max64(args->k, 1);

    split.rows = max64(job->piece_work / (k * min64(PIECE_COLUMNS_MIN, args->n)), PIECE_ROWS_MIN);
    split.rows = min64(round_up(split.rows, PIECE_STEP), min64(args->rows, PIECE_ROWS_MAX));
    split.columns = min64(max64(job->piece_work / (k * split.rows), 1), args->n);
    if (args->rows >= PIECE_ROWS_MIN)
        split.columns = round_up(split.columns, PIECE_STEP);
    split.columns = round_up(split.columns, kernels->gemm_columns);
    /* Too few columns for one piece's work, as in a shrink: it is split over rows as well. */
    if (split.columns >= args->n)
        split.rows = max64(job->piece_work / (k * args->n), 1);
    split.rows = round_up(min64(split.rows, args->rows), kernels->gemm_rows);
    split.row_pieces = ceil_div(args->rows, split.rows);
    split.column_pieces = ceil_div(args->n, split.columns);
    /* Pieces must start on the level's tile boundaries. */
    SP_ASSERT(split.rows > 0 && split.rows % kernels->gemm_rows == 0);
    SP_ASSERT(split.columns > 0 && split.columns % kernels->gemm_columns == 0);
    SP_ASSERT((split.row_pieces - 1) * split.rows < args->rows);
    SP_ASSERT((split.column_pieces - 1) * split.columns < args->n);
    return split;
}

static bool is_empty(const sp_gemm_args *args)
{
    return args->rows <= 0 || args->n <= 0;
}

void sp_gemm_job_cut(const sp_kernels *kernels, int32_t threads, const sp_gemm_args *gemms,
                     int32_t n_gemms, sp_gemm_job *out_job)
{
    sp_gemm_job job = {.kernels = kernels, .gemms = gemms, .n_gemms = n_gemms};
    int64_t work = 0;

    for (int32_t g = 0; g < n_gemms; g++)
        if (!is_empty(&gemms[g]))
            work += gemms[g].rows * gemms[g].n * max64(gemms[g].k, 1);
    job.piece_work = max64(work / ((int64_t)threads * PIECES_PER_THREAD), PIECE_WORK_MIN);
    for (int32_t g = 0; g < n_gemms; g++) {
        gemm_split split;

        if (is_empty(&gemms[g]))
            continue;
        split = split_gemm(&job, &gemms[g]);
        job.n_pieces += (int32_t)(split.row_pieces * split.column_pieces);
        job.n_strips += (int32_t)split.column_pieces;
    }
    *out_job = job;
}

sp_gemm_piece sp_gemm_job_piece(const sp_gemm_job *job, int32_t piece)
{
    int64_t left = piece;
    int32_t strips = 0;

    SP_ASSERT(piece >= 0 && piece < job->n_pieces);
    for (int32_t g = 0; g < job->n_gemms; g++) {
        const sp_gemm_args *args = &job->gemms[g];
        gemm_split split;
        int64_t row, column;

        if (is_empty(args))
            continue;
        split = split_gemm(job, args);
        if (left >= split.row_pieces * split.column_pieces) {
            left -= split.row_pieces * split.column_pieces;
            strips += (int32_t)split.column_pieces;
            continue;
        }
        row = left / split.column_pieces * split.rows;
        column = left % split.column_pieces * split.columns;
        return (sp_gemm_piece){
            .gemm = g,
            .strip = strips + (int32_t)(left % split.column_pieces),
            .strip_pieces = (int32_t)split.row_pieces,
            .row_begin = row,
            .row_end = min64(row + split.rows, args->rows),
            .column_begin = column,
            .column_end = min64(column + split.columns, args->n),
        };
    }
    SP_ASSERT(false && "a piece of no GEMM");
    return (sp_gemm_piece){0};
}

void sp_gemm_job_run(const sp_gemm_job *job, const sp_gemm_piece *piece)
{
    SP_ASSERT(piece->gemm >= 0 && piece->gemm < job->n_gemms);
    SP_ASSERT(piece->row_begin < piece->row_end && piece->column_begin < piece->column_end);
    SP_ASSERT(piece->row_end <= job->gemms[piece->gemm].rows);
    SP_ASSERT(piece->column_end <= job->gemms[piece->gemm].n);
    job->kernels->gemm_nt(&job->gemms[piece->gemm], piece->row_begin, piece->row_end,
                          piece->column_begin, piece->column_end);
}

static void gemm_task(void *user, int32_t task, int32_t thread)
{
    const sp_gemm_job *job = user;
    sp_gemm_piece piece = sp_gemm_job_piece(job, task);

    (void)thread;
    sp_gemm_job_run(job, &piece);
}

void sp_gemm_run(const sp_kernels *kernels, sp_exec *exec, const sp_gemm_args *gemms,
                 int32_t n_gemms)
{
    sp_gemm_job job;

    sp_gemm_job_cut(kernels, sp_exec_threads(exec), gemms, n_gemms, &job);
    sp_exec_run(exec, gemm_task, &job, job.n_pieces);
}
