/*
 * gemm_scalar.c: the reference form of gemm_nt, in portable C.
 *
 * y[i, j] = Σ x[i, k] w[j, k]; x packed as FP32 [rows, k rounded up to 16], pads zero.
 * Order: 8 lanes, lane l sums the products of k = l, l + 8, ... with a multiplication and an
 * addition each; then ((0+1)+(2+3)) + ((4+5)+(6+7)).
 */
#include "base/integer.h"
#include "kernels/cpu/levels.h"
#include "kernels/element.h"

#include <math.h>
#include <string.h>

#define LANES    8
#define K_STEP   16  /* of a packed row, so that it is a multiple of 64 bytes */
#define K_BLOCK  256 /* weights are widened in pieces of this length */
#define N_BLOCK  4
#define ROWS_MAX 32 /* rows that share one widened piece */

static int64_t padded(int64_t k)
{
    return (k + K_STEP - 1) / K_STEP * K_STEP;
}

size_t sp_x_pack_bytes_scalar(sp_dtype x_type, sp_dtype w_type, int64_t rows, int64_t k)
{
    (void)x_type;
    (void)w_type;
    return (size_t)(rows * padded(k)) * sizeof(float);
}

void sp_x_pack_scalar(void *packed, sp_dtype x_type, sp_dtype w_type, const void *x,
                      int64_t x_stride, const int32_t *row_index, int64_t rows, int64_t k,
                      int64_t row_begin, int64_t row_end)
{
    (void)w_type;
    (void)rows;
    for (int64_t i = row_begin; i < row_end; i++) {
        const void *row = sp_element_at(x_type, x, (row_index ? row_index[i] : i) * x_stride);
        float *to = (float *)packed + i * padded(k);

        for (int64_t c = 0; c < k; c++)
            to[c] = sp_element_load(x_type, row, c);
        for (int64_t c = k; c < padded(k); c++)
            to[c] = 0.0f;
    }
}

/* `count` weights from k_begin on, as FP32, zeroes up to the padded length. */
static void widen(float *to, const sp_gemm_args *args, int64_t j, int64_t k_begin, int64_t k_end)
{
    const void *row = sp_element_at(args->w_type, args->w, j * args->w_stride);
    int64_t c = k_begin;

    for (; c < min64(k_end, args->k); c++)
        to[c - k_begin] = sp_element_load(args->w_type, row, c);
    for (; c < k_end; c++)
        to[c - k_begin] = 0.0f;
}

static void accumulate(float *lanes, const float *x, const float *w, int64_t count)
{
    float sum[LANES];

    memcpy(sum, lanes, sizeof sum);
    for (int64_t c = 0; c < count; c += LANES)
        for (int l = 0; l < LANES; l++)
            sum[l] += x[c + l] * w[c + l];
    memcpy(lanes, sum, sizeof sum);
}

static float reduce(const float *v)
{
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

void sp_gemm_epilogue_scalar(const sp_gemm_args *args, int64_t row, int64_t n_begin, int64_t count,
                             const float *sums)
{
    int64_t y_row = args->row_index ? args->row_index[row] : row;
    void *y = sp_element_at_mut(args->y_type, args->y, y_row * args->y_stride);
    const int32_t *index = args->column_index;

    if (args->epilogue == SP_EPILOGUE_FOLD) {
        float scale = args->scale[row];

        if (scale == 0.0f)
            return;
        for (int64_t j = 0; j < count; j++) {
            float delta = sp_element_round(args->delta_type, sums[j]);
            int64_t column = index ? index[n_begin + j] : n_begin + j;

            sp_element_store(args->y_type, y, column,
                             fmaf(scale, delta, sp_element_load(args->y_type, y, column)));
        }
        return;
    }
    for (int64_t j = 0; j < count; j++) {
        float sum = sums[j];

        if (args->bias)
            sum += sp_element_load(args->w_type, args->bias, n_begin + j);
        sp_element_store(args->y_type, y, index ? index[n_begin + j] : n_begin + j, sum);
    }
}

/* A block of at most ROWS_MAX rows × N_BLOCK outputs. */
static void gemm_block(const sp_gemm_args *args, int64_t row, int64_t rows, int64_t j, int64_t n)
{
    float lanes[ROWS_MAX][N_BLOCK][LANES];
    float weights[K_BLOCK];
    float sums[N_BLOCK];
    int64_t k_padded = padded(args->k);
    const float *x = (const float *)args->packed_x + row * k_padded;

    memset(lanes, 0, sizeof lanes);
    for (int64_t k = 0; k < k_padded; k += K_BLOCK) {
        int64_t k_end = min64(k + K_BLOCK, k_padded);

        for (int64_t c = 0; c < n; c++) {
            widen(weights, args, j + c, k, k_end);
            for (int64_t i = 0; i < rows; i++)
                accumulate(lanes[i][c], x + i * k_padded + k, weights, k_end - k);
        }
    }
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t c = 0; c < n; c++)
            sums[c] = reduce(lanes[i][c]);
        sp_gemm_epilogue_scalar(args, row + i, j, n, sums);
    }
}

void sp_gemm_nt_scalar(const sp_gemm_args *args, int64_t row_begin, int64_t row_end,
                       int64_t n_begin, int64_t n_end)
{
    for (int64_t j = n_begin; j < n_end; j += N_BLOCK)
        for (int64_t i = row_begin; i < row_end; i += ROWS_MAX)
            gemm_block(args, i, min64(ROWS_MAX, row_end - i), j, min64(N_BLOCK, n_end - j));
}

void sp_gemm_nt_lone_scalar(const sp_gemm_args *const *gemms, int32_t count, int64_t n_begin,
                            int64_t n_end)
{
    for (int32_t i = 0; i < count; i++)
        sp_gemm_nt_scalar(gemms[i], 0, 1, n_begin, n_end);
}
