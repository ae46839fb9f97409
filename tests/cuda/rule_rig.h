/*
 * rule_rig.h: sequences of random rows for the gated delta rule on the GPU, steps of any of them,
 * and what a recurrence in double gives for each, for the tests and the bench. The state's memory
 * is all ones before the first step, as are the step's rows of y: so nothing stale can be a number.
 */
#ifndef SP_TESTS_CUDA_RULE_RIG_H
#define SP_TESTS_CUDA_RULE_RIG_H

#include "cuda/moe_rig.h"
#include "kernels/cuda/delta_rule_layout.h"

#include <math.h>
#include <stdbool.h>

typedef struct rule_size {
    sp_cuda_rule_shape shape;
    int32_t sequences, positions;
    int32_t slots, snapshots, rows_max, spans_max;
    bool zeroed; /* the states, as an engine's; else all ones */
} rule_size;

typedef struct rule_world {
    moe_rig *rig;
    rule_size size;
    sp_cuda_rule_layout layout;
    size_t z_width, y_width;
    /* [sequences, positions] rows of each; z and a are NULL where the shape is fused */
    uint16_t *qkv, *z;
    float *b, *a;
    uint16_t *conv;
    float *a_log, *dt_bias, *norm;
    uint16_t *y; /* what the steps gave */
    sp_cuda_delta_rule call;
    int keep; /* of the rig's blocks */
} rule_world;

/* A span of a step, of rows of the sequence; rows from `other` on are those of the next one. */
typedef struct rule_span {
    int32_t sequence, other;
    sp_cuda_rule_span span; /* without its row */
} rule_span;

static inline float *rule_floats(size_t n, uint32_t seed, float size, float offset)
{
    float *out = malloc(n * sizeof *out + 1);

    if (out == NULL)
        abort();
    for (size_t i = 0; i < n; i++)
        out[i] = moe_number(seed * 104729u + (uint32_t)i, size) + offset;
    return out;
}

static inline void *rule_ones(moe_rig *r, size_t bytes)
{
    char *ones = malloc(bytes + 1);
    void *at;

    if (ones == NULL)
        abort();
    memset(ones, 0xff, bytes);
    at = moe_put(r, ones, bytes);
    free(ones);
    return at;
}

static inline void rule_make_call(rule_world *w)
{
    const rule_size *size = &w->size;
    const sp_cuda_rule_shape *s = &size->shape;
    size_t rows = (size_t)size->rows_max, heads = (size_t)s->v_heads;
    size_t spans = (size_t)size->spans_max;
    size_t states = (size_t)size->slots * (size_t)w->layout.state_bytes;
    moe_rig *r = w->rig;

    w->keep = r->n_blocks;
    w->call = (sp_cuda_delta_rule){
        .shape = *s,
        .span = moe_put(r, NULL, spans * sizeof(sp_cuda_rule_span)),
        .item = moe_put(r, NULL, (rows / 32 + 2 * spans) * sizeof(sp_cuda_rule_item)),
        .n_items = moe_put(r, NULL, 4),
        .qkv = moe_put(r, NULL, rows * (size_t)w->layout.qkv_width * 2),
        .z = moe_put(r, NULL, rows * w->z_width * 2),
        .b = moe_put(r, NULL, rows * (size_t)w->layout.b_width * 4),
        .a = moe_put(r, NULL, rows * heads * 4),
        .conv = moe_put(r, w->conv, (size_t)w->layout.channels * (size_t)s->conv_width * 2),
        .a_log = moe_put(r, w->a_log, heads * 4),
        .dt_bias = moe_put(r, w->dt_bias, heads * 4),
        .norm = moe_put(r, w->norm, (size_t)s->v_dim * 4),
        .eps = 1e-6f,
        .y = moe_put(r, NULL, rows * w->y_width * 2),
        .states = size->zeroed ? moe_put(r, NULL, states) : rule_ones(r, states),
        .snapshots = rule_ones(r, (size_t)size->snapshots * (size_t)w->layout.snapshot_bytes + 16),
        .state_stride = w->layout.state_bytes,
        .snapshot_stride = w->layout.snapshot_bytes,
        .scratch = rule_ones(r, (size_t)sp_cuda_rule_scratch_bytes(*s, size->rows_max)),
        .fault = moe_put(r, NULL, spans * 4),
    };
}

static inline rule_world rule_make(moe_rig *rig, const rule_size *size)
{
    const sp_cuda_rule_shape *s = &size->shape;
    rule_world w = {.rig = rig, .size = *size, .layout = sp_cuda_rule_lay_out(*s)};
    size_t rows = (size_t)size->sequences * (size_t)size->positions, heads = (size_t)s->v_heads;

    w.y_width = heads * (size_t)s->v_dim;
    w.z_width = s->fused ? 0 : w.y_width;
    w.qkv = moe_numbers(SP_DTYPE_BF16, rows * (size_t)w.layout.qkv_width, 1, 2.0f);
    w.z = moe_numbers(SP_DTYPE_BF16, rows * w.z_width, 2, 2.0f);
    w.b = rule_floats(rows * (size_t)w.layout.b_width, 3, 2.0f, s->fused ? -0.5f : 0.5f);
    w.a = rule_floats(rows * heads, 4, 1.5f, -1.5f);
    w.conv = moe_numbers(SP_DTYPE_BF16, (size_t)w.layout.channels * (size_t)s->conv_width, 5, 0.6f);
    w.norm = rule_floats((size_t)s->v_dim, 6, 1.0f, 0.25f);
    w.a_log = rule_floats(heads, 7, 2.0f, -1.5f);
    w.dt_bias = rule_floats(heads, 8, 1.0f, -1.0f);
    w.y = calloc(rows * w.y_width + 1, 2);
    if (w.y == NULL)
        abort();
    rule_make_call(&w);
    return w;
}

static inline void rule_free(rule_world *w)
{
    moe_free(w->rig, w->keep);
    free(w->qkv), free(w->z), free(w->b), free(w->a), free(w->conv), free(w->norm);
    free(w->a_log), free(w->dt_bias), free(w->y);
}

/* Places a span's input rows, which begin at `row` of the step. */
static inline void rule_gather(const rule_world *w, const rule_span *span, int32_t row, void **to)
{
    const size_t qkv = (size_t)w->layout.qkv_width * 2, b = (size_t)w->layout.b_width * 4;
    const size_t z = w->z_width * 2, a = (size_t)w->size.shape.v_heads * 4;

    for (int32_t i = 0; i < span->span.n_rows; i++) {
        int32_t sequence = span->sequence + (span->other >= 0 && i >= span->other);
        size_t from = (size_t)(sequence % w->size.sequences) * (size_t)w->size.positions +
                      (size_t)(span->span.position + i);
        size_t at = (size_t)(row + i);

        memcpy((char *)to[0] + at * qkv, (const char *)w->qkv + from * qkv, qkv);
        memcpy((char *)to[1] + at * z, (const char *)w->z + from * z, z);
        memcpy((char *)to[2] + at * b, (const char *)w->b + from * b, b);
        memcpy((char *)to[3] + at * a, (const char *)w->a + from * a, a);
    }
}

/* Describes the step as an engine does, and writes its rows. */
static inline void rule_set(rule_world *w, const rule_span *spans, int32_t n, int32_t pads)
{
    const int32_t n_spans = n + pads;
    size_t rows = (size_t)w->size.rows_max;
    const size_t bytes[4] = {rows * (size_t)w->layout.qkv_width * 2, rows * w->z_width * 2,
                             rows * (size_t)w->layout.b_width * 4,
                             rows * (size_t)w->size.shape.v_heads * 4};
    const void *const device[4] = {w->call.qkv, w->call.z, w->call.b, w->call.a};
    sp_cuda_rule_span *table = calloc((size_t)n_spans + 1, sizeof *table);
    sp_cuda_rule_item *items = calloc(rows / 32 + 2 * (size_t)w->size.spans_max + 1, sizeof *items);
    int32_t row = 0, n_items = 0;
    void *to[4];

    for (int i = 0; i < 4; i++) {
        to[i] = malloc(bytes[i] + 1);
        if (table == NULL || items == NULL || to[i] == NULL || n_spans > w->size.spans_max)
            abort();
        memset(to[i], 0xff, bytes[i]);
    }
    w->call.wide = 0;
    for (int32_t s = 0; s < n; s++) {
        const sp_cuda_rule_span *span = &spans[s].span;

        if (row + span->n_rows > w->size.rows_max)
            abort();
        table[s] = *span;
        table[s].row = row;
        rule_gather(w, &spans[s], row, to);
        row += span->n_rows;
        w->call.wide |= span->n_rows > SP_CUDA_NARROW_ROWS;
        for (int32_t at = span->position / 32 * 32; at < span->position + span->n_rows; at += 32)
            items[n_items++] = (sp_cuda_rule_item){s, at};
    }
    w->call.rows = row + pads;
    w->call.spans = n_spans;
    for (int i = 0; i < 4; i++) {
        moe_write(w->rig, device[i], to[i], bytes[i]);
        free(to[i]);
    }
    moe_write(w->rig, w->call.span, table, (size_t)n_spans * sizeof *table);
    moe_write(w->rig, w->call.item, items, (size_t)n_items * sizeof *items);
    moe_write(w->rig, w->call.n_items, &n_items, sizeof n_items);
    free(table), free(items);
}

static inline void rule_launch(rule_world *w)
{
    w->rig->failed |= w->rig->ops.delta_rule_rows(w->rig->gpu, &w->call, w->rig->stream) != 0;
}

/* One step; rows of y that the spans' own sequences have go to w->y. Returns the number of elements
 * that were written outside of the spans' rows. */
static inline size_t rule_step(rule_world *w, const rule_span *spans, int32_t n, int32_t pads)
{
    size_t bytes = (size_t)w->size.rows_max * w->y_width * 2, outside = 0;
    char *ones = malloc(bytes + 1);
    uint16_t *y;
    size_t row = 0;

    if (ones == NULL)
        abort();
    memset(ones, 0xff, bytes);
    rule_set(w, spans, n, pads);
    moe_write(w->rig, w->call.y, ones, bytes);
    moe_write(w->rig, w->call.fault, memset(ones, 0, 4 * (size_t)w->size.spans_max),
              4 * (size_t)w->size.spans_max);
    free(ones);
    rule_launch(w);
    y = moe_get(w->rig, w->call.y, bytes);
    for (int32_t s = 0; s < n; s++)
        for (int32_t i = 0; i < spans[s].span.n_rows; i++, row++) {
            size_t to = (size_t)spans[s].sequence * (size_t)w->size.positions +
                        (size_t)(spans[s].span.position + i);

            if (spans[s].other < 0 || i < spans[s].other)
                memcpy(w->y + to * w->y_width, y + row * w->y_width, w->y_width * 2);
        }
    for (size_t i = row * w->y_width; i < bytes / 2; i++)
        outside += y[i] != 0xffff;
    free(y);
    return outside;
}

/* ---- the recurrence in double -------------------------------------------------------------- */

static inline double rule_round(double x)
{
    return (double)sp_bf16_to_f32(sp_f32_to_bf16((float)x));
}

static inline double rule_silu(double x)
{
    return x / (1 + exp(-x));
}

/* silu of the convolution of a channel, rounded. */
static inline double rule_convolve(const rule_world *w, int32_t sequence, int32_t position,
                                   int32_t channel, int32_t offset)
{
    int32_t width = w->size.shape.conv_width;
    double sum = 0;

    for (int32_t t = 0; t < width; t++) {
        int32_t at = position - (width - 1) + t;
        size_t row = (size_t)(sequence * w->size.positions + at);

        if (at >= 0)
            sum += moe_value(SP_DTYPE_BF16, w->conv[channel * width + t]) *
                   moe_value(SP_DTYPE_BF16,
                             w->qkv[row * (size_t)w->layout.qkv_width + (size_t)offset]);
    }
    return rule_round(rule_silu(sum));
}

static inline void rule_divide(double *x, int32_t n)
{
    double sum = 0;

    for (int32_t i = 0; i < n; i++)
        sum += x[i] * x[i];
    for (int32_t i = 0; i < n; i++)
        x[i] = rule_round(x[i] / sqrt(sum + 1e-6));
}

/* One head and position: S [k_dim, v_dim] is advanced, y is [v_dim], not rounded. */
static inline void rule_advance(const rule_world *w, int32_t sequence, int32_t position,
                                int32_t head, double *state, double *y)
{
    const sp_cuda_rule_shape *s = &w->size.shape;
    int32_t n = s->v_heads / s->k_heads, kh = head / n, own = head % n, kd = s->k_dim;
    int32_t vd = s->v_dim, block = 2 * kd + 2 * n * vd, all_k = s->k_heads * kd;
    int32_t q_at = s->fused ? kh * block : kh * kd, k_at = s->fused ? q_at + kd : all_k + kh * kd;
    int32_t v_at = s->fused ? q_at + 2 * kd + own * vd : 2 * all_k + head * vd;
    size_t row = (size_t)(sequence * w->size.positions + position), heads = (size_t)s->v_heads;
    size_t b_at = row * (size_t)w->layout.b_width + (size_t)(s->fused ? kh * 2 * n + own : head);
    double b = (double)w->b[b_at];
    double a = (double)(s->fused ? w->b[b_at + (size_t)n] : w->a[row * heads + (size_t)head]);
    double beta = 1 / (1 + exp(-b)), sum = 0, q[128], k[128], v[128];
    double decay = exp(-exp((double)w->a_log[head]) * log1p(exp(a + (double)w->dt_bias[head])));

    for (int32_t i = 0; i < kd; i++) {
        q[i] = rule_convolve(w, sequence, position, kh * kd + i, q_at + i);
        k[i] = rule_convolve(w, sequence, position, all_k + kh * kd + i, k_at + i);
    }
    rule_divide(q, kd), rule_divide(k, kd);
    for (int32_t c = 0; c < vd; c++) {
        double seen = 0, u, o = 0;

        v[c] = rule_convolve(w, sequence, position, 2 * all_k + head * vd + c, v_at + c);
        for (int32_t i = 0; i < kd; i++)
            seen += (state[i * vd + c] *= decay) * k[i];
        u = beta * (v[c] - seen);
        for (int32_t i = 0; i < kd; i++)
            o += (state[i * vd + c] += k[i] * u) * q[i];
        y[c] = o / sqrt((double)kd);
        sum += y[c] * y[c];
    }
    for (int32_t c = 0; c < vd; c++) {
        uint16_t z = s->fused ? w->qkv[row * (size_t)w->layout.qkv_width +
                                       (size_t)(q_at + 2 * kd + (n + own) * vd + c)]
                              : w->z[row * w->z_width + (size_t)(head * vd + c)];

        y[c] *= (double)w->norm[c] / sqrt(sum / vd + (double)w->call.eps) *
                rule_silu(moe_value(SP_DTYPE_BF16, z));
    }
}

#endif
