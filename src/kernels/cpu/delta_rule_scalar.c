/*
 * delta_rule_scalar.c: the reference of the gated delta rule's entries, and of the gates. Products
 * and additions are rounded one by one, in the order that kernels.h gives.
 */
#include "kernels/cpu/levels.h"
#include "kernels/element.h"
#include "kernels/scalar_math.h"

#include <math.h>

#define LANES 8

static float reduce(const float *v)
{
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

/* ---- gates and norms ------------------------------------------------------------------------ */

static void sigmoid_mul(sp_dtype type, void *y, const void *gate, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float sigmoid = sp_sigmoid_scalar(sp_element_load(type, gate, i));

        sp_element_store(type, y, i, sp_element_load(type, y, i) * sigmoid);
    }
}

static float silu(float x)
{
    return x / (1.0f + sp_exp_scalar(-x));
}

static void conv_silu(sp_dtype type, void *y, const void *const *x, const uint16_t *w,
                      int64_t width, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float sum = 0.0f;

        for (int64_t t = 0; t < width; t++)
            sum += sp_bf16_to_f32(w[i * width + t]) * sp_element_load(type, x[t], i);
        sp_element_store(type, y, i, silu(sum));
    }
}

static float sum_squares(sp_dtype type, const void *x, int64_t n)
{
    float lanes[LANES] = {0};

    for (int64_t i = 0; i < n; i++) {
        float value = sp_element_load(type, x, i);

        lanes[i % LANES] += value * value;
    }
    return reduce(lanes);
}

static void unit_norm(sp_dtype type, void *y, const void *x, int64_t n, float eps)
{
    float inverse = 1.0f / sqrtf(sum_squares(type, x, n) + eps);

    for (int64_t i = 0; i < n; i++)
        sp_element_store(type, y, i, sp_element_load(type, x, i) * inverse);
}

static void rmsnorm_gated(sp_dtype type, void *y, const float *x, const float *w, const void *gate,
                          int64_t n, float eps)
{
    float inverse = 1.0f / sqrtf(sum_squares(SP_DTYPE_F32, x, n) / (float)n + eps);

    for (int64_t i = 0; i < n; i++)
        sp_element_store(type, y, i, x[i] * inverse * w[i] * silu(sp_element_load(type, gate, i)));
}

/* ---- the rule ------------------------------------------------------------------------------- */

static void state_read(float *y, const float *x, const float *s, int64_t rows, int64_t k, int64_t n)
{
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t j = 0; j < n; j++)
            y[r * n + j] = 0.0f;
        for (int64_t d = 0; d < k; d++)
            for (int64_t j = 0; j < n; j++)
                y[r * n + j] += x[r * k + d] * s[d * n + j];
    }
}

static void state_fold(float *s, float decay, const float *x, const float *weights, const float *u,
                       int64_t rows, int64_t k, int64_t n)
{
    for (int64_t d = 0; d < k; d++) {
        for (int64_t j = 0; j < n; j++)
            s[d * n + j] *= decay;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < n; j++)
                s[d * n + j] += x[r * k + d] * (weights[r] * u[r * n + j]);
    }
}

static void dots(float *y, int64_t y_stride, const float *x, const float *z, int64_t rows,
                 int64_t columns, int64_t k)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < columns; j++) {
            float lanes[LANES] = {0};

            for (int64_t d = 0; d < k; d++)
                lanes[d % LANES] += x[r * k + d] * z[j * k + d];
            y[r * y_stride + j] = reduce(lanes);
        }
}

static void delta_row(const sp_delta_row_args *a)
{
    float *u = a->u + a->i * a->n;

    for (int64_t j = 0; j < a->n; j++) {
        float rest = a->v[j] - a->decay * a->sk[j], out = a->decay * a->sq[j];

        for (int64_t r = 0; r < a->i; r++) {
            rest -= a->wk[r] * a->u[r * a->n + j];
            out += a->wq[r] * a->u[r * a->n + j];
        }
        u[j] = a->beta * rest;
        a->o[j] = a->scale * (out + a->wq[a->i] * u[j]);
    }
}

void sp_kernels_fill_delta_rule_scalar(sp_kernels *kernels)
{
    kernels->sigmoid_mul = sigmoid_mul;
    kernels->conv_silu = conv_silu;
    kernels->unit_norm = unit_norm;
    kernels->rmsnorm_gated = rmsnorm_gated;
    kernels->state_read = state_read;
    kernels->state_fold = state_fold;
    kernels->dots = dots;
    kernels->delta_row = delta_row;
}
