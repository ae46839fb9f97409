/*
 * gemm_avx2.c: gemm_nt with AVX2 and FMA.
 *
 * y[i, j] = Σ x[i, k] w[j, k]; w [n, k] verbatim, x packed as FP32 in pair order:
 * [k / K_BLOCK][rows][K_BLOCK], the last block as long as what is left, rounded up to 16; pads
 * are zero.
 *
 * Order of one output, whatever surrounds it: one vector of 8 lanes; for each 16 k a fused step
 * with the first and one with the second vector of the pair; then the tree of sp_v8_reduce4. Lanes
 * run along k, so that w is used as it lies in memory; the price, a reduction per output, is paid
 * once per k.
 *
 * One or two rows, and any rows at a short k, keep their sums in registers through all of k and
 * read w straight from memory, whose bandwidth bounds them. Up to SOME_ROWS rows do so for one
 * block of k at a time, their lanes in memory between the blocks, so that x stays in the
 * first-level cache. More rows share pieces of w that are widened once into that cache. None of
 * this changes a bit: storing and loading a lane is exact.
 */
#include "kernels/levels.h"
#include "kernels/vector_avx2.h"

#include <stdalign.h>
#include <stdbool.h>

#define K_STEP       16
#define K_BLOCK      512
#define COLUMNS      4   /* weight rows that one inner kernel takes */
#define ROWS         3   /* rows of x that it takes: 12 sums, 3 of x, 1 of w fill the registers */
#define PANEL        8   /* weight rows widened at a time: 16 KiB */
#define N_BLOCK      16  /* weight rows whose lanes stay in memory through all of k */
#define M_BLOCK      96  /* rows of x that share a widened piece */
#define FEW_ROWS     4   /* rows of x whose sums for two weight rows stay in registers */
#define SHORT_K      64  /* up to here sums never go to memory, however many rows there are */
#define FEW_COLUMNS  256 /* outputs finished before their epilogue runs */
#define SOME_ROWS    12  /* rows up to which widening w into the cache does not pay */
#define SOME_COLUMNS 32

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

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
        float *out = to + c / K_BLOCK * block_stride;
        __m256 low, high;
        sp_v16 v;

        out += (c % K_BLOCK);
        if (k - c >= K_STEP) {
            low = sp_v8_load(x_type, x, c);
            high = sp_v8_load(x_type, x, c + 8);
        } else {
            int64_t left = k - c;

            low = sp_v8_load_tail(x_type, x, c, min64(left, 8));
            high = sp_v8_load_tail(x_type, x, c + 8, left > 8 ? left - 8 : 0);
        }
        v = sp_v16_arrange(order, low, high);
        _mm256_storeu_ps(out, v.first);
        _mm256_storeu_ps(out + 8, v.second);
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

/* Length of the block of k that begins at `k`, and where row `row` of it lies. */
static int64_t block_length(const sp_gemm_args *args, int64_t k)
{
    return min64(K_BLOCK, padded(args->k) - k);
}

static const float *x_block(const sp_gemm_args *args, int64_t row, int64_t k)
{
    return (const float *)args->packed_x + k * args->rows + row * block_length(args, k);
}

/* ---- epilogue ------------------------------------------------------------------------------ */

SP_INLINE void fold(const sp_gemm_args *args, sp_dtype y_type, sp_dtype delta_type, int64_t row,
                    void *y, int64_t count, const float *sums)
{
    const __m256 scale = _mm256_set1_ps(args->scale[row]);

    for (int64_t j = 0; j < count; j += 8) {
        bool whole = count - j >= 8;
        __m256 sum =
            whole ? _mm256_loadu_ps(sums + j) : sp_v8_load_tail(SP_DTYPE_F32, sums, j, count - j);
        __m256 old = whole ? sp_v8_load(y_type, y, j) : sp_v8_load_tail(y_type, y, j, count - j);
        __m256 new = _mm256_fmadd_ps(scale, sp_v8_round(delta_type, sum), old);

        if (whole)
            sp_v8_store(y_type, y, j, new);
        else
            sp_v8_store_tail(y_type, y, j, count - j, new);
    }
}

SP_INLINE void store(sp_dtype y_type, void *y, int64_t count, const float *sums)
{
    int64_t j = 0;

    for (; j + 8 <= count; j += 8)
        sp_v8_store(y_type, y, j, _mm256_loadu_ps(sums + j));
    if (j < count)
        sp_v8_store_tail(y_type, y, j, count - j,
                         sp_v8_load_tail(SP_DTYPE_F32, sums, j, count - j));
}

/* The common cases in vectors; elementwise, so the others are the scalar form's with its bits. */
void sp_gemm_epilogue_avx2(const sp_gemm_args *args, int64_t row, int64_t n_begin, int64_t count,
                           const float *sums)
{
    int64_t y_row = args->row_index ? args->row_index[row] : row;
    void *y = sp_element_at_mut(args->y_type, args->y, y_row * args->y_stride + n_begin);

    if (args->column_index) {
        sp_gemm_epilogue_scalar(args, row, n_begin, count, sums);
        return;
    }
    if (args->epilogue == SP_EPILOGUE_STORE && !args->bias) {
        if (args->y_type == SP_DTYPE_F32)
            store(SP_DTYPE_F32, y, count, sums);
        else if (args->y_type == SP_DTYPE_BF16)
            store(SP_DTYPE_BF16, y, count, sums);
        else
            store(SP_DTYPE_F16, y, count, sums);
        return;
    }
    if (args->epilogue == SP_EPILOGUE_FOLD && args->y_type == args->delta_type) {
        if (args->scale[row] == 0.0f)
            return;
        if (args->y_type == SP_DTYPE_F32)
            fold(args, SP_DTYPE_F32, SP_DTYPE_F32, row, y, count, sums);
        else if (args->y_type == SP_DTYPE_BF16)
            fold(args, SP_DTYPE_BF16, SP_DTYPE_BF16, row, y, count, sums);
        else
            fold(args, SP_DTYPE_F16, SP_DTYPE_F16, row, y, count, sums);
        return;
    }
    sp_gemm_epilogue_scalar(args, row, n_begin, count, sums);
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

/* One step of 16 k: rows × columns sums. */
SP_INLINE void few_step(__m256 acc[FEW_ROWS][COLUMNS], int rows, int columns, const sp_v16 *w,
                        const float *const *x, int64_t k)
{
    __m256 v[FEW_ROWS];

    SP_UNROLL
    for (int r = 0; r < rows; r++)
        v[r] = _mm256_loadu_ps(x[r] + k);
    SP_UNROLL
    for (int c = 0; c < columns; c++) {
        SP_UNROLL
        for (int r = 0; r < rows; r++)
            acc[r][c] = _mm256_fmadd_ps(w[c].first, v[r], acc[r][c]);
    }
    SP_UNROLL
    for (int r = 0; r < rows; r++)
        v[r] = _mm256_loadu_ps(x[r] + k + 8);
    SP_UNROLL
    for (int c = 0; c < columns; c++) {
        SP_UNROLL
        for (int r = 0; r < rows; r++)
            acc[r][c] = _mm256_fmadd_ps(w[c].second, v[r], acc[r][c]);
    }
}

/* A block of k; w are the weight rows, fetched prefetch_bytes ahead. */
SP_INLINE void few_block(const sp_gemm_args *args, sp_dtype w_type, int rows, int columns,
                         __m256 acc[FEW_ROWS][COLUMNS], const char *const *w, int64_t row,
                         int64_t k_begin, int64_t prefetch_bytes)
{
    const int64_t w_bytes = w_type == SP_DTYPE_F32 ? 4 : 2;
    int64_t length = block_length(args, k_begin), whole = min64(length, args->k - k_begin);
    const float *x[FEW_ROWS];
    sp_v16 v[COLUMNS];
    int64_t k = 0;

    SP_UNROLL
    for (int r = 0; r < rows; r++)
        x[r] = x_block(args, row + r, k_begin);
    for (; k + K_STEP <= whole; k += K_STEP) {
        SP_UNROLL
        for (int c = 0; c < columns; c++) {
            const char *at = w[c] + (k_begin + k) * w_bytes;

            _mm_prefetch(at + prefetch_bytes, _MM_HINT_T0);
            v[c] = sp_v16_load(w_type, at);
        }
        few_step(acc, rows, columns, v, x, k);
    }
    if (k < whole) {
        SP_UNROLL
        for (int c = 0; c < columns; c++)
            v[c] = sp_v16_load_tail(w_type, w[c] + (k_begin + k) * w_bytes, whole - k);
        few_step(acc, rows, columns, v, x, k);
    }
}

/* Sums of COLUMNS weight rows that stay in registers through all of k. */
SP_INLINE void few_columns(const sp_gemm_args *args, sp_dtype w_type, int rows, int64_t row,
                           int64_t j, int64_t n_end, float *out_sums)
{
    int64_t prefetch_bytes = COLUMNS * args->w_stride * (w_type == SP_DTYPE_F32 ? 4 : 2);
    __m256 acc[FEW_ROWS][COLUMNS];
    const char *w[COLUMNS];

    weight_rows(args, w_type, j, n_end, COLUMNS, w);
    SP_UNROLL
    for (int r = 0; r < rows; r++) {
        SP_UNROLL
        for (int c = 0; c < COLUMNS; c++)
            acc[r][c] = _mm256_setzero_ps();
    }
    for (int64_t k = 0; k < args->k; k += K_BLOCK)
        few_block(args, w_type, rows, COLUMNS, acc, w, row, k, prefetch_bytes);
    SP_UNROLL
    for (int r = 0; r < rows; r++)
        _mm_storeu_ps(out_sums + r * FEW_COLUMNS,
                      sp_v8_reduce4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]));
}

/* `rows` rows (1 or 2) against the outputs [begin, end), at most FEW_COLUMNS. */
SP_INLINE void few_outputs(const sp_gemm_args *args, sp_dtype w_type, int rows, int64_t row,
                           int64_t begin, int64_t end)
{
    float sums[2][FEW_COLUMNS];

    for (int64_t j = begin; j < end; j += COLUMNS)
        few_columns(args, w_type, rows, row, j, end, &sums[0][j - begin]);
    for (int r = 0; r < rows; r++)
        sp_gemm_epilogue_avx2(args, row + r, begin, end - begin, sums[r]);
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

/* ---- some rows: w into registers, sums in memory between the blocks of k -------------------- */

typedef struct some_scratch {
    alignas(64) float lanes[SOME_ROWS * SOME_COLUMNS * 8]; /* [row][output][lane] */
    float sums[SOME_COLUMNS];
} some_scratch;

/* At most FEW_ROWS rows × 2 outputs over one block of k. */
SP_INLINE void some_pair(const sp_gemm_args *args, sp_dtype w_type, int rows, float *lanes,
                         const char *const *w, int64_t row, int64_t k, int64_t prefetch_bytes)
{
    __m256 acc[FEW_ROWS][COLUMNS];

    SP_UNROLL
    for (int r = 0; r < rows; r++) {
        SP_UNROLL
        for (int c = 0; c < 2; c++)
            acc[r][c] = _mm256_load_ps(lanes + (r * SOME_COLUMNS + c) * 8);
    }
    few_block(args, w_type, rows, 2, acc, w, row, k, prefetch_bytes);
    SP_UNROLL
    for (int r = 0; r < rows; r++) {
        SP_UNROLL
        for (int c = 0; c < 2; c++)
            _mm256_store_ps(lanes + (r * SOME_COLUMNS + c) * 8, acc[r][c]);
    }
}

SP_INLINE void some_block(const sp_gemm_args *args, sp_dtype w_type, some_scratch *scratch,
                          int64_t row, int64_t rows, int64_t j, int64_t n)
{
    int64_t ahead = 2 * args->w_stride * (w_type == SP_DTYPE_F32 ? 4 : 2);

    memset(scratch->lanes, 0, (size_t)(rows * SOME_COLUMNS) * 8 * sizeof(float));
    for (int64_t k = 0; k < args->k; k += K_BLOCK)
        for (int64_t c = 0; c < n; c += 2) {
            const char *w[2];

            weight_rows(args, w_type, j + c, j + n, 2, w);
            for (int64_t i = 0; i < rows; i += FEW_ROWS) {
                float *lanes = scratch->lanes + (i * SOME_COLUMNS + c) * 8;
                int64_t left = rows - i;

                if (left >= 4)
                    some_pair(args, w_type, 4, lanes, w, row + i, k, ahead);
                else if (left == 3)
                    some_pair(args, w_type, 3, lanes, w, row + i, k, ahead);
                else if (left == 2)
                    some_pair(args, w_type, 2, lanes, w, row + i, k, ahead);
                else
                    some_pair(args, w_type, 1, lanes, w, row + i, k, ahead);
            }
        }
    for (int64_t i = 0; i < rows; i++) {
        for (int c = 0; c < SOME_COLUMNS; c += 4) {
            const float *v = scratch->lanes + (i * SOME_COLUMNS + c) * 8;

            _mm_storeu_ps(&scratch->sums[c],
                          sp_v8_reduce4(_mm256_load_ps(v), _mm256_load_ps(v + 8),
                                        _mm256_load_ps(v + 16), _mm256_load_ps(v + 24)));
        }
        sp_gemm_epilogue_avx2(args, row + i, j, n, scratch->sums);
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

/* What one thread keeps on its stack: 48 KiB of lanes and 16 KiB of widened weights. */
typedef struct many_scratch {
    alignas(64) float lanes[M_BLOCK * N_BLOCK * 8]; /* [row][output][lane] */
    alignas(64) float panel[PANEL][K_BLOCK];
    float sums[N_BLOCK];
} many_scratch;

SP_INLINE float *lanes_at(float *lanes, int64_t row, int64_t output)
{
    return lanes + (row * N_BLOCK + output) * 8;
}

SP_INLINE void widen_row(float *to, sp_dtype w_type, const char *w, int64_t whole)
{
    const int64_t w_bytes = w_type == SP_DTYPE_F32 ? 4 : 2;
    int64_t k = 0;

    for (; k + K_STEP <= whole; k += K_STEP) {
        sp_v16 v = sp_v16_load(w_type, w + k * w_bytes);

        _mm256_store_ps(to + k, v.first);
        _mm256_store_ps(to + k + 8, v.second);
    }
    if (k < whole) {
        sp_v16 v = sp_v16_load_tail(w_type, w + k * w_bytes, whole - k);

        _mm256_store_ps(to + k, v.first);
        _mm256_store_ps(to + k + 8, v.second);
    }
}

/* One step of 8 k. */
SP_INLINE void inner_step(int rows, __m256 acc[ROWS][COLUMNS], const float *x, int64_t x_stride,
                          const float (*w)[K_BLOCK], int64_t k)
{
    __m256 v[ROWS];

    SP_UNROLL
    for (int r = 0; r < rows; r++)
        v[r] = _mm256_loadu_ps(x + r * x_stride + k);
    SP_UNROLL
    for (int c = 0; c < COLUMNS; c++) {
        __m256 weight = _mm256_load_ps(&w[c][k]);

        SP_UNROLL
        for (int r = 0; r < rows; r++)
            acc[r][c] = _mm256_fmadd_ps(weight, v[r], acc[r][c]);
    }
}

/*
 * Adds `length` k of rows × COLUMNS outputs to their lanes; see lanes_at. On the way it fetches
 * `length` 16-bit weights of two rows of the piece that comes next, so that memory works while
 * this thread multiplies.
 */
SP_INLINE void inner(int rows, float *lanes, const float *x, int64_t x_stride,
                     const float (*w)[K_BLOCK], int64_t length, const char *const *fetch)
{
    __m256 acc[ROWS][COLUMNS];
    int64_t k = 0;

    SP_UNROLL
    for (int r = 0; r < rows; r++) {
        SP_UNROLL
        for (int c = 0; c < COLUMNS; c++)
            acc[r][c] = _mm256_load_ps(lanes_at(lanes, r, c));
    }
    if (fetch)
        for (; k + 32 <= length; k += 32) {
            _mm_prefetch(fetch[0] + 2 * k, _MM_HINT_T1);
            _mm_prefetch(fetch[1] + 2 * k, _MM_HINT_T1);
            SP_UNROLL
            for (int step = 0; step < 32; step += 8)
                inner_step(rows, acc, x, x_stride, w, k + step);
        }
    for (; k < length; k += 8)
        inner_step(rows, acc, x, x_stride, w, k);
    SP_UNROLL
    for (int r = 0; r < rows; r++) {
        SP_UNROLL
        for (int c = 0; c < COLUMNS; c++)
            _mm256_store_ps(lanes_at(lanes, r, c), acc[r][c]);
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

/* Where the piece of w after panel p of the block at j, k begins. */
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

    memset(scratch->lanes, 0, (size_t)rows * N_BLOCK * 8 * sizeof(float));
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
        for (int c = 0; c < N_BLOCK; c += 4) {
            const float *v = lanes_at(scratch->lanes, i, c);

            _mm_storeu_ps(&scratch->sums[c],
                          sp_v8_reduce4(_mm256_load_ps(v), _mm256_load_ps(v + 8),
                                        _mm256_load_ps(v + 16), _mm256_load_ps(v + 24)));
        }
        sp_gemm_epilogue_avx2(args, row + i, j, n, scratch->sums);
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

void sp_kernels_fill_gemm_avx2(sp_kernels *kernels)
{
    kernels->x_pack_bytes = x_pack_bytes;
    kernels->x_pack = x_pack;
    kernels->x_pack_rows = 1;
    kernels->gemm_nt = gemm_nt;
    kernels->gemm_rows = 1;
    kernels->gemm_columns = COLUMNS;
}
