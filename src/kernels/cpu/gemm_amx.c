/*
 * gemm_amx.c: gemm_nt for BF16 × BF16 with AMX tiles; the other types keep the level below.
 *
 * A tile of weights is 16 rows of w × 32 k, as stored in memory; a tile of x is 16 pairs of k × 16
 * rows of x, packed as [16 pairs][16 rows][2], padded with zeros. Tiles of x are stored in the
 * order in which a panel of weights reads them: [k / PANEL_K][row / 16][tiles of PANEL_K, or what
 * is left]. The product is 16 × 16 sums, which are transposed on the way to y.
 *
 * Order of one output, the instruction's own: per block of 32 k an even-k and an odd-k chain of
 * fused steps from 0; their sum is added to the accumulator, in block order; subnormals count as
 * zero throughout. A sum may be stored to memory between two blocks, which changes no bit.
 *
 * Up to FEW_ROWS rows run on vectors, in the same order, and are packed as plain FP32: a tile of x
 * with one row would take a kilobyte for 64 bytes of data. Up to DIRECT_ROWS rows, weights are
 * loaded from memory directly into tiles. More rows share panels of w that are copied into tile
 * order first: row-major lines 8 KiB apart map to the same cache sets. A call uses one tile shape
 * for full groups of 16 weight rows and another for the rest.
 */
#include "base/integer.h"
#include "kernels/cpu/levels.h"
#include "kernels/cpu/tiles_amx.h"
#include "kernels/cpu/vector_avx2.h"

#include <stdalign.h>
#include <stdbool.h>

#define GROUP     16   /* rows of one tile */
#define K_STEP    32   /* k of one tile */
#define X_TILE    1024 /* bytes */
#define PAIR      (2 * GROUP)
#define EIGHT     8           /* 32-bit values in a vector of AVX2 */
#define WIDE_ROWS (4 * GROUP) /* rows of x that share one pass over the weights */

#ifndef EPILOGUE
#define EPILOGUE            sp_gemm_epilogue_avx512
#define TRANSPOSED_EPILOGUE sp_gemm_transposed_epilogue_avx512
#define PACK_TILES          sp_pack_tiles_avx512
#define FEW_SUMS            sp_few_sums_avx512
#define LONE_SUMS           sp_lone_sums_avx512
#define LONE_EPILOGUE       sp_gemm_lone_epilogue_avx512
#endif
#define FEW_ROWS    2
#define FEW_COLUMNS 128 /* outputs finished before their epilogue runs */
#define LONE_GEMMS  16  /* whose sums are finished before their epilogues run */
#ifndef DIRECT_ROWS
#define DIRECT_ROWS 64
#endif
#ifndef AHEAD
#define AHEAD 128 /* prefetch distance in k */
#endif
#ifndef AHEAD_WIDE
#define AHEAD_WIDE 512
#endif
#define AHEAD_FEW 256
#ifndef PANEL_N
#define PANEL_N 128 /* weight rows of a panel */
#define PANEL_K 256 /* k of a panel: 64 KiB of weights */
#define M_BLOCK 512 /* rows of x that share a panel: 256 KiB of sums */
#endif

/* ---- transposes of 32-bit values
 * -------------------------------------------------------------- */

SP_INLINE void transpose_registers(__m256 *r)
{
    __m256 t[8];

    SP_UNROLL
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    SP_UNROLL
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    SP_UNROLL
    for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
        t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    }
    SP_UNROLL
    for (int i = 0; i < 8; i++)
        r[i] = t[i];
}

SP_INLINE void transpose_8x8(const char *in, int64_t in_stride, char *out, int64_t out_stride)
{
    __m256 r[8];

    SP_UNROLL
    for (int i = 0; i < 8; i++)
        r[i] = _mm256_loadu_ps((const void *)(in + i * in_stride));
    transpose_registers(r);
    SP_UNROLL
    for (int i = 0; i < 8; i++)
        _mm256_storeu_ps((void *)(out + i * out_stride), r[i]);
}

static void transpose_16x16(const char *in, int64_t in_stride, char *out, int64_t out_stride)
{
    for (int64_t i = 0; i < 2; i++)
        for (int64_t j = 0; j < 2; j++)
            transpose_8x8(in + 8 * i * in_stride + 32 * j, in_stride,
                          out + 8 * j * out_stride + 32 * i, out_stride);
}

/* ---- packing ------------------------------------------------------------------------------- */

static bool has_tiles(sp_dtype x_type, sp_dtype w_type)
{
    return x_type == SP_DTYPE_BF16 && w_type == SP_DTYPE_BF16;
}

static const sp_kernels *below; /* the level below, for the other types */

/* Elements of a row of plain FP32, padded with zeros. */
static int64_t plain_length(int64_t k)
{
    return ceil_div(k, K_STEP) * K_STEP;
}

static size_t x_pack_bytes(sp_dtype x_type, sp_dtype w_type, int64_t rows, int64_t k)
{
    if (!has_tiles(x_type, w_type))
        return below->x_pack_bytes(x_type, w_type, rows, k);
    if (rows <= FEW_ROWS)
        return (size_t)(rows * plain_length(k)) * sizeof(float);
    return (size_t)(ceil_div(rows, GROUP) * ceil_div(k, K_STEP)) * X_TILE;
}

/* Byte offset of the tiles of `row`'s group for the panel's k from `k` on. */
static int64_t x_offset(int64_t rows, int64_t row, int64_t k_length, int64_t k)
{
    int64_t tiles = min64(PANEL_K / K_STEP, ceil_div(k_length - k, K_STEP));

    return (k / K_STEP * ceil_div(rows, GROUP) + row / GROUP * tiles) * X_TILE;
}

static const char *x_group(const sp_gemm_args *args, int64_t row, int64_t k)
{
    return (const char *)args->packed_x + x_offset(args->rows, row, args->k, k);
}

/* One tile: `rows` lines of `count` values each, zeroes up to 16 × 32. */
static void pack_tile(char *to, const uint16_t *const *lines, int64_t rows, int64_t c,
                      int64_t count)
{
    alignas(64) uint16_t tile[GROUP][K_STEP];

    if (rows < GROUP || count < K_STEP)
        memset(tile, 0, sizeof tile);
    for (int64_t i = 0; i < rows; i++)
        memcpy(tile[i], lines[i] + c, (size_t)count * sizeof tile[0][0]);
    transpose_16x16((const char *)tile, TILE_BYTES, to, TILE_BYTES);
}

/* The tiles of one panel's k, from `begin` on. */
static void pack_panel(char *to, const uint16_t *const *lines, int64_t rows, int64_t begin,
                       int64_t length)
{
    int64_t whole = rows == GROUP ? length / K_STEP * K_STEP : 0;

    if (whole > 0) /* else some lines are missing */
        PACK_TILES(to, lines, begin, whole / K_STEP);
    for (int64_t c = whole; c < length; c += K_STEP)
        pack_tile(to + c / K_STEP * X_TILE, lines, rows, begin + c, min64(K_STEP, length - c));
}

static void pack_plain(float *to, const uint16_t *x, int64_t k)
{
    int64_t whole = k / EIGHT * EIGHT;

    for (int64_t c = 0; c < whole; c += EIGHT)
        _mm256_storeu_ps(to + c, sp_v8_load(SP_DTYPE_BF16, x, c));
    for (int64_t c = whole; c < plain_length(k); c++)
        to[c] = c < k ? sp_bf16_to_f32(x[c]) : 0.0f;
}

static void x_pack(void *packed, sp_dtype x_type, sp_dtype w_type, const void *x, int64_t x_stride,
                   const int32_t *row_index, int64_t rows, int64_t k, int64_t row_begin,
                   int64_t row_end)
{
    if (!has_tiles(x_type, w_type)) {
        below->x_pack(packed, x_type, w_type, x, x_stride, row_index, rows, k, row_begin, row_end);
        return;
    }
    for (int64_t i = row_begin; i < row_end && rows <= FEW_ROWS; i++)
        pack_plain((float *)packed + i * plain_length(k),
                   (const uint16_t *)x + (row_index ? row_index[i] : i) * x_stride, k);
    for (int64_t i = row_begin; i < row_end && rows > FEW_ROWS; i += GROUP) {
        const uint16_t *lines[GROUP];
        int64_t count = min64(GROUP, row_end - i);

        for (int64_t r = 0; r < count; r++)
            lines[r] = (const uint16_t *)x + (row_index ? row_index[i + r] : i + r) * x_stride;
        for (int64_t c = 0; c < k; c += PANEL_K)
            pack_panel((char *)packed + x_offset(rows, i, k, c), lines, count, c,
                       min64(PANEL_K, k - c));
    }
}

static const char *w_at(const sp_gemm_args *args, int64_t j, int64_t k)
{
    return (const char *)((const uint16_t *)args->w + j * args->w_stride + k);
}

/* ---- products ------------------------------------------------------------------------------ */

/* One step of 32 k: tile 2 w + x += weights w · x x, for one or two of each. */
SP_INLINE void tile_step(bool two_w, bool two_x, const char *w0, const char *w1, int64_t w_stride,
                         const char *x0, const char *x1)
{
    tile_load(6, x0, TILE_BYTES);
    tile_load(4, w0, w_stride);
    tile_dot(0, 4, 6);
    if (two_x) {
        tile_load(7, x1, TILE_BYTES);
        tile_dot(1, 4, 7);
    }
    if (two_w) {
        tile_load(5, w1, w_stride);
        tile_dot(2, 5, 6);
        if (two_x)
            tile_dot(3, 5, 7);
    }
}

SP_INLINE void zero_sums(bool two_w, bool two_x)
{
    tile_zero(0);
    if (two_x)
        tile_zero(1);
    if (two_w)
        tile_zero(2);
    if (two_w && two_x)
        tile_zero(3);
}

/* Stores tiles to `sums` [PAIR outputs, PAIR rows]. */
SP_INLINE void store_sums(bool two_w, bool two_x, float *sums)
{
    tile_store(0, sums, PAIR * 4);
    if (two_x)
        tile_store(1, sums + GROUP, PAIR * 4);
    if (two_w)
        tile_store(2, sums + GROUP * PAIR, PAIR * 4);
    if (two_w && two_x)
        tile_store(3, sums + GROUP * PAIR + GROUP, PAIR * 4);
}

SP_INLINE void load_sums(bool two_w, bool two_x, const float *sums)
{
    tile_load(0, sums, PAIR * 4);
    if (two_x)
        tile_load(1, sums + GROUP, PAIR * 4);
    if (two_w)
        tile_load(2, sums + GROUP * PAIR, PAIR * 4);
    if (two_w && two_x)
        tile_load(3, sums + GROUP * PAIR + GROUP, PAIR * 4);
}

/* The last, short step of n weight rows as full lines padded with zeros: nothing beyond k is
 * read. */
static void copy_tail(char *lines, const sp_gemm_args *args, int64_t j, int64_t n, int64_t k)
{
    memset(lines, 0, (size_t)PAIR * TILE_BYTES);
    for (int64_t c = 0; c < n; c++)
        memcpy(lines + c * TILE_BYTES, w_at(args, j + c, k), (size_t)(args->k - k) * 2);
}

/* ---- epilogue ------------------------------------------------------------------------------ */

/* At most GROUP outputs from j on, of at most GROUP rows. */
static void finish_group(const sp_gemm_args *args, const float *sums, int64_t sums_stride,
                         int64_t row, int64_t rows, int64_t j, int64_t n)
{
    alignas(64) float transposed[GROUP][GROUP]; /* [row, output] */

    if (n == GROUP && TRANSPOSED_EPILOGUE(args, row, rows, j, sums, sums_stride))
        return;
    transpose_16x16((const char *)sums, sums_stride * 4, (char *)transposed, GROUP * 4);
    for (int64_t r = 0; r < rows; r++)
        EPILOGUE(args, row + r, j, n, transposed[r]);
}

/* n outputs from j on, of `rows` rows from `row` on; sums is [outputs, rows], stride sums_stride.
 */
static void finish(const sp_gemm_args *args, const float *sums, int64_t sums_stride, int64_t row,
                   int64_t rows, int64_t j, int64_t n)
{
    for (int64_t i = 0; i < rows; i += GROUP)
        for (int64_t c = 0; c < n; c += GROUP)
            finish_group(args, sums + c * sums_stride + i, sums_stride, row + i,
                         min64(GROUP, rows - i), j + c, min64(GROUP, n - c));
}

/* ---- few rows: weights from memory into tiles ------------------------------------------------ */

/* Prefetches the lines of `n` weight rows that a later step reads. */
SP_INLINE void prefetch_rows(const char *w, int64_t w_stride, int n)
{
    SP_UNROLL
    for (int i = 0; i < n; i++)
        _mm_prefetch(w + i * w_stride, _MM_HINT_T0);
}

SP_INLINE void direct_product(const sp_gemm_args *args, bool two_w, bool two_x, int64_t row,
                              int64_t j, int64_t n, float *sums)
{
    alignas(64) char tail[PAIR * TILE_BYTES];
    int64_t whole = args->k / K_STEP * K_STEP, stride = args->w_stride * 2;
    const char *w0 = w_at(args, j, 0), *w1 = w0 + GROUP * stride;
    const char *next = w0 + PAIR * stride - whole * 2; /* the rows after these */

    zero_sums(two_w, two_x);
    for (int64_t k = 0; k < args->k; k += PANEL_K) {
        const char *x0 = x_group(args, row, k), *x1 = x_group(args, row + GROUP, k);
        int64_t end = min64(k + PANEL_K, whole);

        for (int64_t c = k; c < end; c += K_STEP, x0 += X_TILE, x1 += X_TILE) {
            const char *ahead = (c + AHEAD < whole ? w0 : next) + (c + AHEAD) * 2;

            prefetch_rows(ahead, stride, GROUP);
            if (two_w)
                prefetch_rows(ahead + GROUP * stride, stride, GROUP);
            tile_step(two_w, two_x, w0 + c * 2, w1 + c * 2, stride, x0, x1);
        }
        if (end < args->k && end < k + PANEL_K) {
            copy_tail(tail, args, j, n, whole);
            tile_step(two_w, two_x, tail, tail + GROUP * TILE_BYTES, TILE_BYTES, x0, x1);
        }
    }
    store_sums(two_w, two_x, sums);
}

/* One step of 32 k: three or four groups of x against one group of weights, which is read once. */
SP_INLINE void wide_step(bool four, const char *w, int64_t w_stride, const char *const *x,
                         int64_t offset)
{
    tile_load(4, w, w_stride);
    tile_load(5, x[0] + offset, TILE_BYTES);
    tile_load(6, x[1] + offset, TILE_BYTES);
    tile_dot(0, 4, 5);
    tile_load(7, x[2] + offset, TILE_BYTES);
    tile_dot(1, 4, 6);
    if (four)
        tile_load(5, x[3] + offset, TILE_BYTES);
    tile_dot(2, 4, 7);
    if (four)
        tile_dot(3, 4, 5);
}

/* GROUP weight rows against WIDE_ROWS rows of x; sums is [GROUP outputs, WIDE_ROWS]. */
SP_INLINE void wide_product(const sp_gemm_args *args, bool four, int64_t row, int64_t j,
                            float *sums)
{
    alignas(64) char tail[PAIR * TILE_BYTES];
    int64_t whole = args->k / K_STEP * K_STEP, stride = args->w_stride * 2;
    const char *w = w_at(args, j, 0);
    const char *next = w + GROUP * stride - whole * 2; /* the rows after these */

    zero_sums(true, true);
    for (int64_t k = 0; k < args->k; k += PANEL_K) {
        const char *const x[4] = {x_group(args, row, k), x_group(args, row + GROUP, k),
                                  x_group(args, row + 2 * GROUP, k),
                                  x_group(args, row + 3 * GROUP, k)};
        int64_t end = min64(k + PANEL_K, whole), offset = 0;

        for (int64_t c = k; c < end; c += K_STEP, offset += X_TILE) {
            prefetch_rows((c + AHEAD_WIDE < whole ? w : next) + (c + AHEAD_WIDE) * 2, stride,
                          GROUP);
            wide_step(four, w + c * 2, stride, x, offset);
        }
        if (end < args->k && end < k + PANEL_K) {
            copy_tail(tail, args, j, GROUP, whole);
            wide_step(four, tail, TILE_BYTES, x, offset);
        }
    }
    tile_store(0, sums, WIDE_ROWS * 4);
    tile_store(1, sums + GROUP, WIDE_ROWS * 4);
    tile_store(2, sums + 2 * GROUP, WIDE_ROWS * 4);
    if (four)
        tile_store(3, sums + 3 * GROUP, WIDE_ROWS * 4);
}

/* GROUP outputs from j on, of more than PAIR and at most WIDE_ROWS rows. */
static void wide_block(const sp_gemm_args *args, int64_t row, int64_t rows, int64_t j)
{
    alignas(64) float sums[GROUP * WIDE_ROWS];

    if (rows > 3 * GROUP)
        wide_product(args, true, row, j, sums);
    else
        wide_product(args, false, row, j, sums);
    finish(args, sums, WIDE_ROWS, row, rows, j, GROUP);
}

/* Outputs [j, j + n) of at most PAIR rows. */
static void direct_block(const sp_gemm_args *args, int64_t row, int64_t rows, int64_t j, int64_t n)
{
    alignas(64) float sums[PAIR * PAIR];

    if (n == PAIR && rows > GROUP)
        direct_product(args, true, true, row, j, n, sums);
    else if (n == PAIR)
        direct_product(args, true, false, row, j, n, sums);
    else if (rows > GROUP)
        direct_product(args, false, true, row, j, n, sums);
    else
        direct_product(args, false, false, row, j, n, sums);
    finish(args, sums, PAIR, row, rows, j, n);
}

/* n is a multiple of 16, or what the tiles were configured for. */
static void gemm_direct(const sp_gemm_args *args, int64_t row_begin, int64_t row_end,
                        int64_t n_begin, int64_t n_end)
{
    int64_t rows = row_end - row_begin;

    /* A wide step holds x in a tile whose shape is set for a short group of weights. */
    if (rows > PAIR && rows <= WIDE_ROWS && n_end - n_begin >= GROUP) {
        for (int64_t j = n_begin; j < n_end; j += GROUP)
            wide_block(args, row_begin, rows, j);
        return;
    }
    for (int64_t j = n_begin; j < n_end; j += PAIR)
        for (int64_t i = row_begin; i < row_end; i += PAIR)
            direct_block(args, i, min64(PAIR, row_end - i), j, min64(PAIR, n_end - j));
}

/* ---- few rows: the instruction's arithmetic on vectors --------------------------------------- */

/*
 * Eight outputs fill one vector, their weights transposed, so that each lane runs one output's
 * chain in the instruction's order. Memory-bound for one row, and without tile configuration, which
 * would cost more than the short sums of an expand.
 */
typedef float few_sums[FEW_ROWS][FEW_COLUMNS];

/* Up to 16 k of n weight rows: r[pair] gets one pair of each. Nothing beyond k or the rows is read.
 */
SP_INLINE void transpose_weights(const sp_gemm_args *args, int64_t j, int64_t n, int64_t k,
                                 __m256 *r)
{
    alignas(32) uint16_t lines[EIGHT][EIGHT * 2];
    int64_t count = min64(args->k - k, EIGHT * 2), stride = args->w_stride * 2;
    const char *from = w_at(args, j, k);

    if (n < EIGHT || count < EIGHT * 2) {
        memset(lines, 0, sizeof lines);
        for (int64_t c = 0; c < n; c++)
            memcpy(lines[c], from + c * stride, (size_t)count * sizeof lines[0][0]);
        from = (const char *)lines;
        stride = sizeof lines[0];
    }
    SP_UNROLL
    for (int c = 0; c < EIGHT; c++)
        r[c] = _mm256_loadu_ps((const void *)(from + c * stride));
    transpose_registers(r);
}

/* Sixteen k of a block for EIGHT outputs of `rows` rows; x is at these k. */
SP_INLINE void few_steps(int rows, const __m256 *transposed, const float *x, int64_t x_stride,
                         __m256 *even, __m256 *odd)
{
    const __m256i high = _mm256_set1_epi32((int)0xffff0000u);

    SP_UNROLL
    for (int pair = 0; pair < EIGHT; pair++) {
        __m256i w = _mm256_castps_si256(transposed[pair]);
        __m256 w_even = _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
        __m256 w_odd = _mm256_castsi256_ps(_mm256_and_si256(w, high));

        SP_UNROLL
        for (int r = 0; r < rows; r++) {
            const float *at = x + r * x_stride + 2 * pair;

            even[r] = _mm256_fmadd_ps(w_even, _mm256_broadcast_ss(at), even[r]);
            odd[r] = _mm256_fmadd_ps(w_odd, _mm256_broadcast_ss(at + 1), odd[r]);
        }
    }
}

/* One block of 32 k for EIGHT outputs, n of which are there; x is at its first k. */
SP_INLINE void few_block(int rows, const sp_gemm_args *args, int64_t j, int64_t n, int64_t k,
                         const float *x, int64_t x_stride, __m256 *sum)
{
    __m256 even[FEW_ROWS], odd[FEW_ROWS], transposed[EIGHT];
    bool is_short = k + K_STEP / 2 >= args->k;

    SP_UNROLL
    for (int r = 0; r < rows; r++)
        even[r] = odd[r] = _mm256_setzero_ps();
    transpose_weights(args, j, n, k, transposed);
    few_steps(rows, transposed, x, x_stride, even, odd);
    if (!is_short) {
        transpose_weights(args, j, n, k + K_STEP / 2, transposed);
        few_steps(rows, transposed, x + K_STEP / 2, x_stride, even, odd);
    }
    SP_UNROLL
    for (int r = 0; r < rows; r++) {
        /* The instruction continues with zeros up to 32 k, which turns -0 into 0. */
        if (is_short) {
            even[r] = _mm256_add_ps(even[r], _mm256_setzero_ps());
            odd[r] = _mm256_add_ps(odd[r], _mm256_setzero_ps());
        }
        sum[r] = _mm256_add_ps(sum[r], _mm256_add_ps(even[r], odd[r]));
    }
}

/* `groups` times EIGHT outputs of `rows` rows from `row` on; n of them are there. Two groups at a
 * time keep twice as many chains in flight. Weights are prefetched `ahead` bytes ahead. */
SP_INLINE void few_outputs(int rows, int groups, const sp_gemm_args *args, int64_t row, int64_t j,
                           int64_t n, int64_t ahead, float *sums)
{
    int64_t x_stride = plain_length(args->k);
    const float *x = (const float *)args->packed_x + row * x_stride;
    __m256 sum[2][FEW_ROWS];

    SP_UNROLL
    for (int g = 0; g < groups; g++) {
        SP_UNROLL
        for (int r = 0; r < rows; r++)
            sum[g][r] = _mm256_setzero_ps();
    }
    for (int64_t k = 0; k < args->k; k += K_STEP) {
        prefetch_rows(w_at(args, j, k) + ahead, args->w_stride * 2, groups * EIGHT);
        SP_UNROLL
        for (int g = 0; g < groups; g++)
            few_block(rows, args, j + g * EIGHT, min64(n - g * EIGHT, EIGHT), k, x + k, x_stride,
                      sum[g]);
    }
    SP_UNROLL
    for (int g = 0; g < groups; g++) {
        SP_UNROLL
        for (int r = 0; r < rows; r++)
            _mm256_storeu_ps(sums + r * FEW_COLUMNS + g * EIGHT, sum[g][r]);
    }
}

/* Prefetch distance: from one group of outputs to the same k of the next; for the last group, whose
 * successor belongs to another task or does not exist, further along its own rows, if they are that
 * long. */
static int64_t few_ahead(const sp_gemm_args *args, int64_t j, int64_t outputs, int64_t n_end)
{
    if (j + outputs < n_end)
        return outputs * args->w_stride * 2;
    return args->k > AHEAD_FEW ? AHEAD_FEW * 2 : 0;
}

/* Outputs [begin, end) of a call for [.., n_end). Not inlined, so that no arithmetic is moved to
 * where subnormals are not flushed. */
static __attribute__((noinline)) void few_columns(const sp_gemm_args *args, int64_t row,
                                                  int64_t rows, int64_t begin, int64_t end,
                                                  int64_t n_end, few_sums sums)
{
    int64_t j = begin;

    if (rows == 1)
        j += FEW_SUMS((const void *)w_at(args, j, 0), args->w_stride,
                      (const float *)args->packed_x + row * plain_length(args->k), args->k,
                      end - begin, few_ahead(args, end - 2 * EIGHT, 2 * EIGHT, n_end), sums[0]);
    for (; rows == 1 && j + 2 * EIGHT <= end; j += 2 * EIGHT)
        few_outputs(1, 2, args, row, j, 2 * EIGHT, few_ahead(args, j, 2 * EIGHT, n_end),
                    &sums[0][j - begin]);
    for (; j < end; j += EIGHT) {
        int64_t n = min64(EIGHT, end - j), ahead = few_ahead(args, j, EIGHT, n_end);

        if (rows == 1)
            few_outputs(1, 1, args, row, j, n, ahead, &sums[0][j - begin]);
        else
            few_outputs(2, 1, args, row, j, n, ahead, &sums[0][j - begin]);
    }
}

static void gemm_few(const sp_gemm_args *args, int64_t row_begin, int64_t row_end, int64_t n_begin,
                     int64_t n_end)
{
    alignas(64) few_sums sums;
    unsigned mode = _mm_getcsr();

    for (int64_t j = n_begin; j < n_end; j += FEW_COLUMNS) {
        int64_t end = min64(j + FEW_COLUMNS, n_end);

        _mm_setcsr(mode | FLUSH_SUBNORMALS);
        few_columns(args, row_begin, row_end - row_begin, j, end, n_end, sums);
        _mm_setcsr(mode);
        for (int64_t r = row_begin; r < row_end; r++)
            EPILOGUE(args, r, j, end - j, sums[r - row_begin]);
    }
}

/* ---- one row of each of several GEMMs -------------------------------------------------------- */

/* At most FEW_COLUMNS outputs of at most LONE_GEMMS GEMMs, a multiple of GROUP. */
static void lone_block(const sp_gemm_args *const *gemms, int32_t count, int64_t j, int64_t n)
{
    alignas(64) float sums[LONE_GEMMS][FEW_COLUMNS];
    unsigned mode = _mm_getcsr();

    _mm_setcsr(mode | FLUSH_SUBNORMALS);
    LONE_SUMS(gemms, count, j, n, sums[0], FEW_COLUMNS);
    _mm_setcsr(mode);
    LONE_EPILOGUE(gemms, count, j, n, sums[0], FEW_COLUMNS);
}

static void lone_columns(const sp_gemm_args *const *gemms, int32_t count, int64_t n_begin,
                         int64_t n_end)
{
    int64_t n_whole = n_begin + (n_end - n_begin) / GROUP * GROUP;

    for (int64_t j = n_begin; j < n_whole; j += FEW_COLUMNS)
        lone_block(gemms, count, j, min64(FEW_COLUMNS, n_whole - j));
    for (int32_t i = 0; i < count && n_whole < n_end; i++)
        gemm_few(gemms[i], 0, 1, n_whole, n_end);
}

/* ---- many rows: panels of w in tile order ---------------------------------------------------- */

/* A pair of groups, [step][weight row][32 k], contiguous: at a stride it would map to a few sets of
 * the first-level cache, where it must stay while all rows of x are multiplied. */
typedef char pair_panel[PANEL_K / K_STEP][PAIR][TILE_BYTES];

/* One thread's, on its stack. */
typedef struct panel_scratch {
    alignas(64) pair_panel panel[PANEL_N / PAIR];
    alignas(64) float sums[PANEL_N / PAIR][M_BLOCK / PAIR][PAIR * PAIR];
} panel_scratch;

/* Copies n weight rows × `length` k; missing rows of a pair are zero, as is everything beyond k. */
static void copy_panel(panel_scratch *scratch, const sp_gemm_args *args, int64_t j, int64_t n,
                       int64_t k, int64_t length)
{
    for (int64_t c = 0; c < ceil_div(n, PAIR) * PAIR; c++) {
        const char *from = w_at(args, j + c, k);

        for (int64_t s = 0; s * K_STEP < length; s++) {
            char *to = scratch->panel[c / PAIR][s][c % PAIR];
            int64_t count = c < n ? min64(K_STEP, length - s * K_STEP) : 0;

            if (count == K_STEP) {
                const __m256i *line = (const void *)(from + s * TILE_BYTES);

                _mm256_store_si256((void *)to, _mm256_loadu_si256(line));
                _mm256_store_si256((void *)(to + 32), _mm256_loadu_si256(line + 1));
            } else {
                memset(to, 0, TILE_BYTES);
                if (count > 0)
                    memcpy(to, from + s * TILE_BYTES, (size_t)count * 2);
            }
        }
    }
}

/* What the next panel reads, to be prefetched while this one is multiplied: weights from memory, x
 * from the shared cache. A step prefetches one line of `rows` weight rows and the next `x_lines` of
 * x. */
typedef struct prefetch_list {
    const char *w, *x;
    int64_t w_stride, rows, x_lines;
} prefetch_list;

SP_INLINE void prefetch_next(prefetch_list *fetch, int64_t step)
{
    for (int64_t i = 0; i < fetch->rows; i++)
        _mm_prefetch(fetch->w + i * fetch->w_stride + step * TILE_BYTES, _MM_HINT_T1);
    for (int64_t i = 0; i < fetch->x_lines; i++)
        _mm_prefetch(fetch->x + i * TILE_BYTES, _MM_HINT_T1);
    fetch->x += fetch->x_lines * TILE_BYTES;
}

SP_INLINE void load_step(bool two_x, const char *w, const char *x0, const char *x1)
{
    tile_load(4, w, TILE_BYTES);
    tile_load(5, w + GROUP * TILE_BYTES, TILE_BYTES);
    tile_load(6, x0, TILE_BYTES);
    if (two_x)
        tile_load(7, x1, TILE_BYTES);
}

SP_INLINE void dot_step(bool two_x)
{
    tile_dot(0, 4, 6);
    tile_dot(2, 5, 6);
    if (two_x) {
        tile_dot(1, 4, 7);
        tile_dot(3, 5, 7);
    }
}

/*
 * The products of one step; each tile is reloaded for the next step right after its last use. While
 * the core's other hyperthread is busy, tiles seem not to be renamed, and a load waits for the
 * products before it: this order is 10 to 15 % faster then, and equal otherwise.
 */
SP_INLINE void dot_and_load(bool two_x, const char *w, const char *x0, const char *x1)
{
    tile_dot(0, 4, 6);
    if (two_x)
        tile_dot(1, 4, 7);
    tile_load(4, w, TILE_BYTES);
    tile_dot(2, 5, 6);
    tile_load(6, x0, TILE_BYTES);
    if (two_x)
        tile_dot(3, 5, 7);
    tile_load(5, w + GROUP * TILE_BYTES, TILE_BYTES);
    if (two_x)
        tile_load(7, x1, TILE_BYTES);
}

/* One pair of groups of weights × one pair of groups of x over a panel's k. */
SP_INLINE void panel_product(bool two_x, bool first, pair_panel *panel, const char *x0,
                             const char *x1, int64_t steps, float *sums, prefetch_list *fetch)
{
    if (first)
        zero_sums(true, two_x);
    else
        load_sums(true, two_x, sums);
    load_step(two_x, (*panel)[0][0], x0, x1);
    for (int64_t s = 0; s < steps; s++) {
        prefetch_next(fetch, s);
        if (s + 1 < steps)
            dot_and_load(two_x, (*panel)[s + 1][0], x0 + (s + 1) * X_TILE, x1 + (s + 1) * X_TILE);
        else
            dot_step(two_x);
    }
    store_sums(true, two_x, sums);
}

/* Where the panel of n columns after the one at j, k starts, and how much of it a step
 * prefetches. */
static prefetch_list next_panel(const sp_gemm_args *args, int64_t row, int64_t rows, int64_t j,
                                int64_t n, int64_t k)
{
    int64_t products = ceil_div(rows, PAIR) * ceil_div(n, PAIR);
    int64_t x_lines = ceil_div(rows, GROUP) * PANEL_K / K_STEP * GROUP;
    bool last = k + PANEL_K >= args->k;

    return (prefetch_list){
        .w = last ? w_at(args, j + PANEL_N, 0) : w_at(args, j, k + PANEL_K),
        .x = x_group(args, row, last ? 0 : k + PANEL_K),
        .w_stride = args->w_stride * 2,
        .rows = ceil_div(PANEL_N, products),
        .x_lines = ceil_div(x_lines, products * (PANEL_K / K_STEP)),
    };
}

/* Columns [j, j + n) and k of one panel. The last panel finishes each sum while it is in the
 * first-level cache. */
static void panel_rows(panel_scratch *scratch, const sp_gemm_args *args, int64_t row, int64_t rows,
                       int64_t j, int64_t n, int64_t k)
{
    int64_t steps = ceil_div(min64(PANEL_K, args->k - k), K_STEP), fetched = 0;
    prefetch_list fetch = next_panel(args, row, rows, j, n, k);

    for (int64_t c = 0; c < n; c += PAIR) {
        pair_panel *panel = &scratch->panel[c / PAIR];

        for (int64_t i = 0; i < rows; i += PAIR) {
            const char *x0 = x_group(args, row + i, k), *x1 = x_group(args, row + i + GROUP, k);
            /* With one panel nothing has to be kept. */
            float *sums =
                args->k <= PANEL_K ? scratch->sums[0][0] : scratch->sums[c / PAIR][i / PAIR];

            if (rows - i > GROUP && k == 0)
                panel_product(true, true, panel, x0, x1, steps, sums, &fetch);
            else if (rows - i > GROUP)
                panel_product(true, false, panel, x0, x1, steps, sums, &fetch);
            else
                panel_product(false, k == 0, panel, x0, x1, steps, sums, &fetch);
            if (k + PANEL_K >= args->k)
                finish(args, sums, PAIR, row + i, min64(PAIR, rows - i), j + c, min64(PAIR, n - c));
            fetched += fetch.rows;
            fetch.w += fetch.rows * fetch.w_stride;
            if (fetched >= PANEL_N)
                fetch.rows = 0;
        }
    }
}

static void gemm_panels(const sp_gemm_args *args, int64_t row, int64_t rows, int64_t n_begin,
                        int64_t n_end)
{
    panel_scratch scratch;

    for (int64_t j = n_begin; j < n_end; j += PANEL_N) {
        int64_t n = min64(PANEL_N, n_end - j);

        for (int64_t k = 0; k < args->k; k += PANEL_K) {
            copy_panel(&scratch, args, j, n, k, min64(PANEL_K, args->k - k));
            panel_rows(&scratch, args, row, rows, j, n, k);
        }
    }
}

/* ---- entry --------------------------------------------------------------------------------- */

static void gemm_shaped(const sp_gemm_args *args, int64_t row_begin, int64_t row_end,
                        int64_t n_begin, int64_t n_end, int64_t tile_rows)
{
    tile_config config = tile_config_of(tile_rows);

    tile_configure(&config);
    if (tile_rows < GROUP || row_end - row_begin <= DIRECT_ROWS)
        gemm_direct(args, row_begin, row_end, n_begin, n_end);
    else
        for (int64_t i = row_begin; i < row_end; i += M_BLOCK)
            gemm_panels(args, i, min64(M_BLOCK, row_end - i), n_begin, n_end);
    tile_release();
}

static void gemm_nt(const sp_gemm_args *args, int64_t row_begin, int64_t row_end, int64_t n_begin,
                    int64_t n_end)
{
    int64_t n_whole = n_begin + (n_end - n_begin) / GROUP * GROUP;

    if (!has_tiles(args->x_type, args->w_type)) {
        below->gemm_nt(args, row_begin, row_end, n_begin, n_end);
        return;
    }
    if (args->rows <= FEW_ROWS) {
        gemm_few(args, row_begin, row_end, n_begin, n_end);
        return;
    }
    if (n_begin < n_whole)
        gemm_shaped(args, row_begin, row_end, n_begin, n_whole, GROUP);
    if (n_whole < n_end)
        gemm_shaped(args, row_begin, row_end, n_whole, n_end, n_end - n_whole);
}

/* Whether LONE_SUMS has a form for it. */
static bool is_lone(const sp_gemm_args *args)
{
    return has_tiles(args->x_type, args->w_type) &&
           (args->k < SP_SHORT_ROW || args->k % GROUP == 0);
}

static void gemm_nt_lone(const sp_gemm_args *const *gemms, int32_t count, int64_t n_begin,
                         int64_t n_end)
{
    const sp_gemm_args *lone[LONE_GEMMS];
    int32_t n = 0;

    for (int32_t i = 0; i < count; i++) {
        if (!is_lone(gemms[i])) {
            gemm_nt(gemms[i], 0, 1, n_begin, n_end);
            continue;
        }
        lone[n++] = gemms[i];
        if (n < LONE_GEMMS)
            continue;
        lone_columns(lone, n, n_begin, n_end);
        n = 0;
    }
    if (n > 0)
        lone_columns(lone, n, n_begin, n_end);
}

void sp_kernels_fill_amx(sp_kernels *kernels, const sp_kernels *level_below)
{
    below = level_below;
    kernels->x_pack_bytes = x_pack_bytes;
    kernels->x_pack = x_pack;
    kernels->x_pack_rows = GROUP;
    kernels->gemm_nt = gemm_nt;
    kernels->gemm_rows = GROUP;
    kernels->gemm_columns = GROUP;
    kernels->gemm_nt_lone = gemm_nt_lone;
}
