/*
 * gemm_vector.h: gemm_nt on vectors of FP32, for any vector width. A level's file defines the
 * vector and the sizes of the blocks below, then includes this, once.
 *
 * y[i, j] = Σ x[i, k] w[j, k]; w [n, k] verbatim, x packed as FP32 in pair order:
 * [k / K_BLOCK][rows][K_BLOCK], the last block as long as what is left, rounded up to K_STEP; pads
 * are zero.
 *
 * Order of one output, whatever surrounds it: one vector of LANES sums; for each K_STEP k a fused
 * step with the first and one with the second vector of the pair; then the tree of vec_reduce4.
 * Lanes run along k, so that w is used as stored; the cost is one reduction per output.
 *
 * One or two rows, and any rows at a short k, keep their sums in registers through all of k and
 * read w straight from memory, whose bandwidth bounds them. Up to SOME_ROWS rows do so for one
 * block of k at a time and keep their lanes in memory between blocks, so that x stays in the
 * first-level cache. More rows share pieces of w that are widened once into that cache. None of
 * this changes a bit: storing and loading a lane is exact.
 *
 * To be defined:
 *   vec, pair                       a vector; two of them in pair order, .first and .second
 *   LANES                           FP32 values in a vector
 *   vec_zero, vec_load, vec_store, vec_fma, vec_reduce4
 *   vec_epilogue                    sp_gemm_epilogue_<level>
 *   vec_keep                        holds a loaded vector in a register, where a compiler would
 *                                   rather load it again for each use and run out of load ports
 *   pair_load, pair_load_tail       K_STEP weights, or fewer followed by zeros
 *   pair_pack                       values of x in the pair order of the weights' type
 *   COLUMNS                         weight rows that an inner kernel takes, a multiple of 4
 *   ROWS                            rows of x that it takes when many share widened weights
 *   PANEL                           weight rows widened at a time, a multiple of COLUMNS
 *   N_BLOCK                         weight rows whose lanes stay in memory through all of k
 *   M_BLOCK                         rows of x that share a widened piece
 *   SOME_WIDTH                      weight rows at a time for up to SOME_ROWS rows of x
 *
 * Without them this file is empty, as is every second inclusion.
 */
#include "base/integer.h"
#include "kernels/cpu/levels.h"

#if defined(LANES) && !defined(SP_KERNELS_CPU_GEMM_VECTOR_H)
#define SP_KERNELS_CPU_GEMM_VECTOR_H

#include "kernels/cpu/lone_rows.h"
#include "kernels/cpu/vector_avx2.h"

#include <stdalign.h>

#define K_STEP       (2 * LANES)
#define K_BLOCK      512
#define FEW_ROWS     4   /* rows of x whose sums stay in registers when there are some */
#define SHORT_K      64  /* up to here sums never go to memory, however many rows there are */
#define FEW_COLUMNS  256 /* outputs finished before their epilogue runs */
#define SOME_ROWS    12  /* rows up to which widening w into the cache does not pay */
#define SOME_COLUMNS 32

_Static_assert(COLUMNS % 4 == 0 && PANEL % COLUMNS == 0 && N_BLOCK % PANEL == 0, "whole groups");
_Static_assert(SOME_COLUMNS % SOME_WIDTH == 0 && SOME_WIDTH <= COLUMNS, "whole groups");
_Static_assert(K_BLOCK % K_STEP == 0 && FEW_COLUMNS % COLUMNS == 0, "whole steps");

static int64_t padded(int64_t k)
{
    return (k + K_STEP - 1) / K_STEP * K_STEP;
}

/* ---- packing ------------------------------------------------------------------------------- */

static size_t x_pack_bytes(sp_dtype x_type, sp_dtype w_type, int64_t rows, int64_t k)
{
    (void)x_type;
    (void)w_type;
    return (size_t)(rows * padded(k)) * sizeof(float);
}

SP_INLINE void pack_row(float *to, sp_dtype x_type, sp_dtype order, const void *x, int64_t k,
                        int64_t block_stride)
{
    for (int64_t c = 0; c < k; c += K_STEP) {
        pair v = pair_pack(x_type, order, x, c, min64(K_STEP, k - c));
        float *out = to + c / K_BLOCK * block_stride + c % K_BLOCK;

        vec_store(out, v.first);
        vec_store(out + LANES, v.second);
    }
}

static void x_pack(void *packed, sp_dtype x_type, sp_dtype w_type, const void *x, int64_t x_stride,
                   const int32_t *row_index, int64_t rows, int64_t k, int64_t row_begin,
                   int64_t row_end)
{
    int64_t k_padded = padded(k), whole = k_padded / K_BLOCK * K_BLOCK;

    for (int64_t i = row_begin; i < row_end; i++) {
        const void *row = sp_element_at(x_type, x, (row_index ? row_index[i] : i) * x_stride);
        float *to = (float *)packed + i * K_BLOCK;

        pack_row(to, x_type, w_type, row, min64(k, whole), rows * K_BLOCK);
        if (k > whole)
            pack_row((float *)packed + whole * rows + i * (k_padded - whole), x_type, w_type,
                     sp_element_at(x_type, row, whole), k - whole, 0);
    }
}

/* Length of the block of k that starts at `k`; and the address of its row `row`. */
static int64_t block_length(const sp_gemm_args *args, int64_t k)
{
    return min64(K_BLOCK, padded(args->k) - k);
}

static const float *x_block(const sp_gemm_args *args, int64_t row, int64_t k)
{
    return (const float *)args->packed_x + k * args->rows + row * block_length(args, k);
}

/* ---- one or two rows, or a short k: w from memory into registers
 * ------------------------------------------------ */

/* The weight rows from j on, at k_begin; rows past n_end repeat the last one and are discarded. */
SP_INLINE void weight_rows(const sp_gemm_args *args, sp_dtype w_type, int64_t j, int64_t n_end,
                           int64_t n, const char **out_rows)
{
    for (int64_t c = 0; c < n; c++)
        out_rows[c] = sp_element_at(w_type, args->w, min64(j + c, n_end - 1) * args->w_stride);
}

/* One step of K_STEP k: rows × columns sums. */
SP_INLINE void few_step(vec acc[FEW_ROWS][COLUMNS], int rows, int columns, const pair *w,
                        const float *const *x, int64_t k)
{
    vec v[FEW_ROWS];

    SP_UNROLL
    for (int r = 0; r < rows; r++)
        v[r] = vec_load(x[r] + k);
    SP_UNROLL
    for (int c = 0; c < columns; c++) {
        SP_UNROLL
        for (int r = 0; r < rows; r++)
            acc[r][c] = vec_fma(w[c].first, v[r], acc[r][c]);
    }
    SP_UNROLL
    for (int r = 0; r < rows; r++)
        v[r] = vec_load(x[r] + k + LANES);
    SP_UNROLL
    for (int c = 0; c < columns; c++) {
        SP_UNROLL
        for (int r = 0; r < rows; r++)
            acc[r][c] = vec_fma(w[c].second, v[r], acc[r][c]);
    }
}

/* A block of k; w are the weight rows, fetched prefetch_bytes ahead. */
SP_INLINE void few_block(const sp_gemm_args *args, sp_dtype w_type, int rows, int columns,
                         vec acc[FEW_ROWS][COLUMNS], const char *const *w, int64_t row,
                         int64_t k_begin, int64_t prefetch_bytes)
{
    const int64_t w_bytes = w_type == SP_DTYPE_F32 ? 4 : 2;
    int64_t length = block_length(args, k_begin), whole = min64(length, args->k - k_begin);
    const float *x[FEW_ROWS];
    pair v[COLUMNS];
    int64_t k = 0;

    SP_UNROLL
    for (int r = 0; r < rows; r++)
        x[r] = x_block(args, row + r, k_begin);
    for (; k + K_STEP <= whole; k += K_STEP) {
        SP_UNROLL
        for (int c = 0; c < columns; c++) {
            const char *at = w[c] + (k_begin + k) * w_bytes;

            _mm_prefetch(at + prefetch_bytes, _MM_HINT_T0);
            v[c] = pair_load(w_type, at);
        }
        few_step(acc, rows, columns, v, x, k);
    }
    if (k < whole) {
        SP_UNROLL
        for (int c = 0; c < columns; c++)
            v[c] = pair_load_tail(w_type, w[c] + (k_begin + k) * w_bytes, whole - k);
        few_step(acc, rows, columns, v, x, k);
    }
}

/* Sums of COLUMNS weight rows that stay in registers through all of k. */
SP_INLINE void few_columns(const sp_gemm_args *args, sp_dtype w_type, int rows, int64_t row,
                           int64_t j, int64_t n_end, float *out_sums)
{
    int64_t prefetch_bytes = COLUMNS * args->w_stride * (w_type == SP_DTYPE_F32 ? 4 : 2);
    vec acc[FEW_ROWS][COLUMNS];
    const char *w[COLUMNS];

    weight_rows(args, w_type, j, n_end, COLUMNS, w);
    SP_UNROLL
    for (int r = 0; r < rows; r++) {
        SP_UNROLL
        for (int c = 0; c < COLUMNS; c++)
            acc[r][c] = vec_zero();
    }
    for (int64_t k = 0; k < args->k; k += K_BLOCK)
        few_block(args, w_type, rows, COLUMNS, acc, w, row, k, prefetch_bytes);
    SP_UNROLL
    for (int r = 0; r < rows; r++) {
        SP_UNROLL
        for (int c = 0; c < COLUMNS; c += 4)
            _mm_storeu_ps(out_sums + r * FEW_COLUMNS + c,
                          vec_reduce4(acc[r][c], acc[r][c + 1], acc[r][c + 2], acc[r][c + 3]));
    }
}

/* `rows` rows (1 or 2) against the outputs [begin, end), at most FEW_COLUMNS. */
SP_INLINE void few_outputs(const sp_gemm_args *args, sp_dtype w_type, int rows, int64_t row,
                           int64_t begin, int64_t end)
{
    float sums[2][FEW_COLUMNS];

    for (int64_t j = begin; j < end; j += COLUMNS)
        few_columns(args, w_type, rows, row, j, end, &sums[0][j - begin]);
    for (int r = 0; r < rows; r++)
        vec_epilogue(args, row + r, begin, end - begin, sums[r]);
}

SP_INLINE void gemm_few(const sp_gemm_args *args, sp_dtype w_type, int64_t row_begin,
                        int64_t row_end, int64_t n_begin, int64_t n_end)
{
    for (int64_t j = n_begin; j < n_end; j += FEW_COLUMNS) {
        int64_t end = min64(j + FEW_COLUMNS, n_end), i = row_begin;

        for (; i + 2 <= row_end; i += 2)
            few_outputs(args, w_type, 2, i, j, end);
        if (i < row_end)
            few_outputs(args, w_type, 1, i, j, end);
    }
}

/* The sums of `n` outputs (a multiple of 4) whose lanes are in memory. */
SP_INLINE void finish_lanes(const float *lanes, int n, float *out_sums)
{
    for (int c = 0; c < n; c += 4) {
        const float *v = lanes + c * LANES;

        _mm_storeu_ps(out_sums + c, vec_reduce4(vec_load(v), vec_load(v + LANES),
                                                vec_load(v + 2 * LANES), vec_load(v + 3 * LANES)));
    }
}

/* ---- some rows: w into registers, sums in memory between the blocks of k -------------------- */

typedef struct some_scratch {
    alignas(64) float lanes[SOME_ROWS * SOME_COLUMNS * LANES]; /* [row][output][lane] */
    float sums[SOME_COLUMNS];
} some_scratch;

/* At most FEW_ROWS rows × SOME_WIDTH outputs over one block of k. */
SP_INLINE void some_sums(const sp_gemm_args *args, sp_dtype w_type, int rows, float *lanes,
                         const char *const *w, int64_t row, int64_t k, int64_t prefetch_bytes)
{
    vec acc[FEW_ROWS][COLUMNS];

    SP_UNROLL
    for (int r = 0; r < rows; r++) {
        SP_UNROLL
        for (int c = 0; c < SOME_WIDTH; c++)
            acc[r][c] = vec_load(lanes + (r * SOME_COLUMNS + c) * LANES);
    }
    few_block(args, w_type, rows, SOME_WIDTH, acc, w, row, k, prefetch_bytes);
    SP_UNROLL
    for (int r = 0; r < rows; r++) {
        SP_UNROLL
        for (int c = 0; c < SOME_WIDTH; c++)
            vec_store(lanes + (r * SOME_COLUMNS + c) * LANES, acc[r][c]);
    }
}

SP_INLINE void some_block(const sp_gemm_args *args, sp_dtype w_type, some_scratch *scratch,
                          int64_t row, int64_t rows, int64_t j, int64_t n)
{
    int64_t ahead = SOME_WIDTH * args->w_stride * (w_type == SP_DTYPE_F32 ? 4 : 2);

    memset(scratch->lanes, 0, (size_t)(rows * SOME_COLUMNS) * LANES * sizeof(float));
    for (int64_t k = 0; k < args->k; k += K_BLOCK)
        for (int64_t c = 0; c < n; c += SOME_WIDTH) {
            const char *w[SOME_WIDTH];

            weight_rows(args, w_type, j + c, j + n, SOME_WIDTH, w);
            for (int64_t i = 0; i < rows; i += FEW_ROWS) {
                float *lanes = scratch->lanes + (i * SOME_COLUMNS + c) * LANES;
                int64_t left = rows - i;

                if (left >= 4)
                    some_sums(args, w_type, 4, lanes, w, row + i, k, ahead);
                else if (left == 3)
                    some_sums(args, w_type, 3, lanes, w, row + i, k, ahead);
                else if (left == 2)
                    some_sums(args, w_type, 2, lanes, w, row + i, k, ahead);
                else
                    some_sums(args, w_type, 1, lanes, w, row + i, k, ahead);
            }
        }
    for (int64_t i = 0; i < rows; i++) {
        finish_lanes(scratch->lanes + i * SOME_COLUMNS * LANES, SOME_COLUMNS, scratch->sums);
        vec_epilogue(args, row + i, j, n, scratch->sums);
    }
}

SP_INLINE void gemm_some(const sp_gemm_args *args, sp_dtype w_type, int64_t row_begin,
                         int64_t row_end, int64_t n_begin, int64_t n_end)
{
    some_scratch scratch;

    for (int64_t j = n_begin; j < n_end; j += SOME_COLUMNS)
        some_block(args, w_type, &scratch, row_begin, row_end - row_begin, j,
                   min64(SOME_COLUMNS, n_end - j));
}

/* ---- many rows: pieces of w widened into the cache ----------------------------------------- */

/* One thread's, on its stack: 64 to 112 KiB. */
typedef struct many_scratch {
    alignas(64) float lanes[M_BLOCK * N_BLOCK * LANES]; /* [row][output][lane] */
    alignas(64) float panel[PANEL][K_BLOCK];
    float sums[N_BLOCK];
} many_scratch;

SP_INLINE float *lanes_at(float *lanes, int64_t row, int64_t output)
{
    return lanes + (row * N_BLOCK + output) * LANES;
}

SP_INLINE void widen_row(float *to, sp_dtype w_type, const char *w, int64_t whole)
{
    const int64_t w_bytes = w_type == SP_DTYPE_F32 ? 4 : 2;
    int64_t k = 0;

    for (; k + K_STEP <= whole; k += K_STEP) {
        pair v = pair_load(w_type, w + k * w_bytes);

        vec_store(to + k, v.first);
        vec_store(to + k + LANES, v.second);
    }
    if (k < whole) {
        pair v = pair_load_tail(w_type, w + k * w_bytes, whole - k);

        vec_store(to + k, v.first);
        vec_store(to + k + LANES, v.second);
    }
}

/* One step of LANES k. */
SP_INLINE void inner_step(int rows, vec acc[ROWS][COLUMNS], const float *x, int64_t x_stride,
                          const float (*w)[K_BLOCK], int64_t k)
{
    vec v[ROWS];

    SP_UNROLL
    for (int r = 0; r < rows; r++)
        v[r] = vec_load(x + r * x_stride + k);
    SP_UNROLL
    for (int c = 0; c < COLUMNS; c++) {
        vec weight = vec_load(&w[c][k]);

        vec_keep(weight);
        SP_UNROLL
        for (int r = 0; r < rows; r++)
            acc[r][c] = vec_fma(weight, v[r], acc[r][c]);
    }
}

/*
 * Adds `length` k of rows × COLUMNS outputs to their lanes; see lanes_at. Also prefetches `length`
 * 16-bit weights of two rows of the next piece, to overlap memory access with arithmetic.
 */
SP_INLINE void inner(int rows, float *lanes, const float *x, int64_t x_stride,
                     const float (*w)[K_BLOCK], int64_t length, const char *const *fetch)
{
    vec acc[ROWS][COLUMNS];
    int64_t k = 0;

    SP_UNROLL
    for (int r = 0; r < rows; r++) {
        SP_UNROLL
        for (int c = 0; c < COLUMNS; c++)
            acc[r][c] = vec_load(lanes_at(lanes, r, c));
    }
    if (fetch)
        for (; k + 32 <= length; k += 32) {
            _mm_prefetch(fetch[0] + 2 * k, _MM_HINT_T1);
            _mm_prefetch(fetch[1] + 2 * k, _MM_HINT_T1);
            SP_UNROLL
            for (int step = 0; step < 32; step += LANES)
                inner_step(rows, acc, x, x_stride, w, k + step);
        }
    for (; k < length; k += LANES)
        inner_step(rows, acc, x, x_stride, w, k);
    SP_UNROLL
    for (int r = 0; r < rows; r++) {
        SP_UNROLL
        for (int c = 0; c < COLUMNS; c++)
            vec_store(lanes_at(lanes, r, c), acc[r][c]);
    }
}

/* All rows of a block against one panel; `next` are the PANEL pieces of w that come after it. */
static void panel_product(many_scratch *scratch, int64_t column, const float *x, int64_t rows,
                          int64_t length, const char *const *next)
{
    const float(*w)[K_BLOCK] = (const float(*)[K_BLOCK])scratch->panel;
    const char *const *end = next + PANEL;
    int64_t i = 0;

    for (; i + ROWS <= rows; i += ROWS)
        for (int64_t c = 0; c < PANEL; c += COLUMNS) {
            float *lanes = lanes_at(scratch->lanes, i, column + c);

            if (next < end)
                inner(ROWS, lanes, x + i * length, length, w + c, length, next);
            else
                inner(ROWS, lanes, x + i * length, length, w + c, length, NULL);
            next += 2;
        }
    for (int64_t c = 0; c < PANEL; c += COLUMNS) {
        float *lanes = lanes_at(scratch->lanes, i, column + c);

        if (next >= end)
            next = end - 2; /* in the cache already: cheaper than a body without it */
        if (rows - i == 2)
            inner(2, lanes, x + i * length, length, w + c, length, next);
        else if (rows - i == 1)
            inner(1, lanes, x + i * length, length, w + c, length, next);
        next += 2;
    }
}

/* The rows of the piece of w after panel p of the block at j, k. */
SP_INLINE void next_piece(const sp_gemm_args *args, sp_dtype w_type, int64_t j, int64_t n,
                          int64_t p, int64_t k, const char **out_rows)
{
    int64_t next_j = j + p + PANEL;

    if (p + PANEL >= n) {
        next_j = j;
        k += K_BLOCK;
    }
    if (k >= args->k) {
        next_j = j + N_BLOCK;
        k = 0;
    }
    weight_rows(args, w_type, next_j, args->n, PANEL, out_rows);
    for (int c = 0; c < PANEL; c++)
        out_rows[c] += k * (w_type == SP_DTYPE_F32 ? 4 : 2);
}

SP_INLINE void many_block(const sp_gemm_args *args, sp_dtype w_type, many_scratch *scratch,
                          int64_t row, int64_t rows, int64_t j, int64_t n)
{
    const int64_t w_bytes = w_type == SP_DTYPE_F32 ? 4 : 2;

    memset(scratch->lanes, 0, (size_t)rows * N_BLOCK * LANES * sizeof(float));
    for (int64_t k = 0; k < args->k; k += K_BLOCK) {
        int64_t length = block_length(args, k), whole = min64(length, args->k - k);
        const float *x = x_block(args, row, k);

        for (int64_t p = 0; p < n; p += PANEL) {
            const char *w[PANEL], *next[PANEL];

            weight_rows(args, w_type, j + p, j + n, PANEL, w);
            next_piece(args, w_type, j, n, p, k, next);
            for (int c = 0; c < PANEL; c++)
                widen_row(scratch->panel[c], w_type, w[c] + k * w_bytes, whole);
            panel_product(scratch, p, x, rows, length, next);
        }
    }
    for (int64_t i = 0; i < rows; i++) {
        finish_lanes(lanes_at(scratch->lanes, i, 0), N_BLOCK, scratch->sums);
        vec_epilogue(args, row + i, j, n, scratch->sums);
    }
}

SP_INLINE void gemm_many(const sp_gemm_args *args, sp_dtype w_type, int64_t row_begin,
                         int64_t row_end, int64_t n_begin, int64_t n_end)
{
    many_scratch scratch;

    for (int64_t i = row_begin; i < row_end; i += M_BLOCK)
        for (int64_t j = n_begin; j < n_end; j += N_BLOCK)
            many_block(args, w_type, &scratch, i, min64(M_BLOCK, row_end - i), j,
                       min64(N_BLOCK, n_end - j));
}

/* ---- entry --------------------------------------------------------------------------------- */

SP_INLINE void gemm_typed(const sp_gemm_args *args, sp_dtype w_type, int64_t row_begin,
                          int64_t row_end, int64_t n_begin, int64_t n_end)
{
    int64_t rows = row_end - row_begin;

    if (rows <= 2 || args->k <= SHORT_K)
        gemm_few(args, w_type, row_begin, row_end, n_begin, n_end);
    else if (rows <= SOME_ROWS)
        gemm_some(args, w_type, row_begin, row_end, n_begin, n_end);
    else
        gemm_many(args, w_type, row_begin, row_end, n_begin, n_end);
}

static void gemm_nt(const sp_gemm_args *args, int64_t row_begin, int64_t row_end, int64_t n_begin,
                    int64_t n_end)
{
    if (args->w_type == SP_DTYPE_BF16)
        gemm_typed(args, SP_DTYPE_BF16, row_begin, row_end, n_begin, n_end);
    else if (args->w_type == SP_DTYPE_F16)
        gemm_typed(args, SP_DTYPE_F16, row_begin, row_end, n_begin, n_end);
    else
        gemm_typed(args, SP_DTYPE_F32, row_begin, row_end, n_begin, n_end);
}

static void gemm_nt_lone(const sp_gemm_args *const *gemms, int32_t count, int64_t n_begin,
                         int64_t n_end)
{
    for (int32_t i = 0; i < count; i++) {
        sp_prefetch_ahead(gemms, i, count, n_begin, n_end - n_begin);
        gemm_nt(gemms[i], 0, 1, n_begin, n_end);
    }
}

/* The entries of gemm_nt, for the including file's level. */
static void fill_gemm(sp_kernels *kernels)
{
    kernels->x_pack_bytes = x_pack_bytes;
    kernels->x_pack = x_pack;
    kernels->x_pack_rows = 1;
    kernels->gemm_nt = gemm_nt;
    kernels->gemm_rows = 1;
    kernels->gemm_columns = COLUMNS;
    kernels->gemm_nt_lone = gemm_nt_lone;
}

#endif
