/*
 * The gated delta rule on the CPU: against the recurrence in double precision, and the bits of a
 * row and of the state however its sequence was cut into steps, with rejected drafts, beside other
 * sequences, resumed from a snapshot, on one thread and on several.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "base/half.h"
#include "engine/ops/cpu_ops.h"
#include "kernels/element.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { POSITIONS = 200, ROWS_MAX = 2 * POSITIONS, SLOTS = 3, SNAPSHOTS = 2, LAYERS = 2 };
enum { QKV, Z, B, A, Y, N_ACTIVATIONS };
enum { K_DIM_MAX = 128, WIDTH_MAX = 8 };

static const sp_delta_rule_shape shapes[] = {
    {LAYERS, 2, 4, 16, 16, 4, true, SLOTS, SNAPSHOTS},
    {LAYERS, 2, 4, 16, 24, 4, false, SLOTS, SNAPSHOTS},
    {LAYERS, 1, 3, 128, 128, 4, false, SLOTS, SNAPSHOTS},
    {LAYERS, 2, 2, 24, 40, 3, true, SLOTS, SNAPSHOTS},
    {LAYERS, 1, 1, 7, 5, 2, false, SLOTS, SNAPSHOTS},
};
#define N_SHAPES ((int)(sizeof shapes / sizeof *shapes))

/* ---- a layer and a sequence ---------------------------------------------------------------- */

typedef struct layer {
    sp_delta_rule_shape shape;
    sp_dtype type;
    int32_t keys, values, channels; /* k_heads * k_dim, v_heads * v_dim, 2 * keys + values */
    int32_t widths[N_ACTIVATIONS];
    uint16_t *conv;                /* [channels, conv_width] */
    float *a_log, *dt_bias, *norm; /* [v_heads] twice, [v_dim] */
    sp_delta_rule rule;
} layer;

/* The inputs of all positions as activations, and garbage of the same size for rejected drafts. */
typedef struct sequence {
    char *inputs[Y], *garbage[Y];
} sequence;

static float *floats(sp_test_random *random, int32_t n, float size, float centre)
{
    float *values = sp_calloc((size_t)n, sizeof *values);

    assert_non_null(values);
    for (int32_t i = 0; i < n; i++)
        values[i] = centre + size * sp_test_float(random);
    return values;
}

static layer make_layer(const sp_delta_rule_shape *shape, sp_dtype type)
{
    sp_test_random random = {77};
    layer l = {.shape = *shape, .type = type};
    int32_t v_heads = shape->v_heads;

    l.keys = shape->k_heads * shape->k_dim;
    l.values = v_heads * shape->v_dim;
    l.channels = 2 * l.keys + l.values;
    l.widths[QKV] = shape->fused_inputs ? l.channels + l.values : l.channels;
    l.widths[Z] = l.widths[Y] = l.values;
    l.widths[B] = shape->fused_inputs ? 2 * v_heads : v_heads;
    l.widths[A] = v_heads;
    l.conv = sp_calloc((size_t)(l.channels * shape->conv_width), sizeof *l.conv);
    assert_non_null(l.conv);
    for (int32_t i = 0; i < l.channels * shape->conv_width; i++)
        l.conv[i] = sp_f32_to_bf16(0.8f * sp_test_float(&random));
    l.a_log = floats(&random, v_heads, 1.8f, -1.0f);
    l.dt_bias = floats(&random, v_heads, 1.2f, 0.2f);
    l.norm = floats(&random, shape->v_dim, 0.5f, 1.0f);
    l.rule = (sp_delta_rule){
        .conv = {SP_DTYPE_BF16, l.channels, shape->conv_width, l.conv, l.conv},
        .a_log = {SP_DTYPE_F32, v_heads, 0, l.a_log, l.a_log},
        .dt_bias = {SP_DTYPE_F32, v_heads, 0, l.dt_bias, l.dt_bias},
        .norm = {.weight = {SP_DTYPE_F32, shape->v_dim, 0, l.norm, l.norm}, .eps = 1e-6f},
    };
    return l;
}

static void free_layer(layer *l)
{
    sp_free(l->conv);
    sp_free(l->a_log);
    sp_free(l->dt_bias);
    sp_free(l->norm);
}

static sp_dtype type_of(const layer *l, int rows)
{
    return rows == B || rows == A ? SP_DTYPE_F32 : l->type;
}

static size_t row_bytes(const layer *l, int rows)
{
    return (size_t)l->widths[rows] * sp_dtype_bytes(type_of(l, rows));
}

static sequence make_sequence(const layer *l, uint64_t seed)
{
    sp_test_random random = {seed};
    sequence s;

    for (int rows = 0; rows < Y; rows++) {
        int64_t n = (int64_t)POSITIONS * l->widths[rows];

        s.inputs[rows] = sp_calloc(POSITIONS, row_bytes(l, rows));
        s.garbage[rows] = sp_calloc(POSITIONS, row_bytes(l, rows));
        assert_true(s.inputs[rows] && s.garbage[rows]);
        for (int64_t i = 0; i < n; i++) {
            sp_element_store(type_of(l, rows), s.inputs[rows], i, 2.0f * sp_test_float(&random));
            sp_element_store(type_of(l, rows), s.garbage[rows], i,
                             i % 7 == 0 ? NAN : 9.0f * sp_test_float(&random));
        }
    }
    return s;
}

static void free_sequence(sequence *s)
{
    for (int rows = 0; rows < Y; rows++) {
        sp_free(s->inputs[rows]);
        sp_free(s->garbage[rows]);
    }
}

/* ---- a backend ----------------------------------------------------------------------------- */

typedef struct backend {
    sp_device *device;
    sp_exec *exec;
    sp_cpu_ops *cpu;
} backend;

static backend open_backend(const char *level, const layer *l, int32_t threads)
{
    sp_exec_options exec_options;
    sp_ops_options options = {
        .type = l->type,
        .slots = 1,
        .rows_max = ROWS_MAX,
        .spans_max = SLOTS,
        .hidden = 8,
        .vocab = 8,
        .widths = l->widths,
        .n_widths = N_ACTIVATIONS,
        .fp32_rows = SP_ROWS_BIT(B) | SP_ROWS_BIT(A),
        .attention = {.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 16, .scale = 1},
        .delta_rule = l->shape,
        .rope = {.theta = 10000, .n_rot = 8, .positions = 16},
        .kv_pages = 1,
        .page_tokens = 16,
    };
    backend b;
    sp_ops *ops;
    sp_error error;

    sp_exec_options_default(&exec_options, sizeof exec_options);
    exec_options.threads = threads;
    assert_ok(sp_device_open("cpu", NULL, &b.device, &error), &error);
    assert_ok(sp_exec_create(&exec_options, &b.exec, &error), &error);
    assert_ok(sp_kernels_get(level, &options.kernels, &error), &error);
    options.device = b.device;
    options.exec = b.exec;
    assert_ok(sp_ops_create(&sp_cpu_op_table, &options, &ops, &error), &error);
    b.cpu = (sp_cpu_ops *)ops;
    return b;
}

static void close_backend(backend *b)
{
    sp_ops_destroy(&b->cpu->ops);
    sp_exec_destroy(b->exec);
    sp_device_close(b->device);
}

/* ---- steps --------------------------------------------------------------------------------- */

/* A sequence that is computed, and what it has given. */
typedef struct progress {
    const sequence *sequence;
    char *y; /* [POSITIONS] rows of Y */
    int32_t slot, position, folded, load;
} progress;

static progress begin(const layer *l, const sequence *s, int32_t slot)
{
    progress p = {.sequence = s, .slot = slot, .load = -1};

    p.y = sp_calloc(POSITIONS, row_bytes(l, Y));
    assert_non_null(p.y);
    return p;
}

/* What a span of the next step does: the first `good` of its rows are the sequence's and are
 * committed, the others are garbage. */
typedef struct part {
    progress *p;
    int32_t rows, n_final, good, save;
} part;

typedef struct step_pass {
    const layer *l;
    const part *parts;
    int32_t n_parts, layer;
} step_pass;

static void pass(void *user, sp_ops *ops)
{
    const step_pass *step = user;
    sp_cpu_ops *cpu = (sp_cpu_ops *)ops;
    const sp_delta_rule_call call = {
        .qkv = QKV, .z = Z, .b = B, .a = A, .rule = &step->l->rule, .layer = step->layer, .y = Y};
    int32_t row = 0;

    for (int32_t i = 0; i < step->n_parts; i++)
        for (int32_t r = 0; r < step->parts[i].rows; r++, row++) {
            const part *from_part = &step->parts[i];

            for (int rows = 0; rows < Y; rows++) {
                size_t bytes = row_bytes(step->l, rows);
                char *const *from = r < from_part->good ? from_part->p->sequence->inputs
                                                        : from_part->p->sequence->garbage;

                memcpy(sp_cpu_row(cpu, rows, row),
                       from[rows] + (size_t)(from_part->p->position + r) * bytes, bytes);
            }
        }
    sp_op_delta_rule(ops, &call);
}

/* One step of all parts. */
static void run(const backend *b, const layer *l, int32_t number, const part *parts,
                int32_t n_parts)
{
    static const int32_t tokens[ROWS_MAX], page;
    step_pass user = {l, parts, n_parts, number};
    sp_step_span spans[SLOTS];
    sp_step step = {.spans = spans, .n_spans = n_parts};
    int32_t row = 0;

    for (int32_t i = 0; i < n_parts; i++) {
        const progress *p = parts[i].p;

        spans[i] = (sp_step_span){
            .tokens = tokens,
            .pages = &page,
            .position = p->position,
            .n_rows = parts[i].rows,
            .state = {p->slot, p->folded, p->load, parts[i].save, parts[i].n_final},
        };
        step.n_rows += parts[i].rows;
    }
    assert_int_equal(sp_op_step(&b->cpu->ops, &step, pass, &user), SP_OK);
    for (int32_t i = 0; i < n_parts; i++) {
        progress *p = parts[i].p;
        size_t bytes = row_bytes(l, Y);

        memcpy(p->y + (size_t)p->position * bytes, sp_cpu_row(b->cpu, Y, row),
               (size_t)parts[i].good * bytes);
        row += parts[i].rows;
        p->folded = sp_step_state_folded(&spans[i]);
        p->position += parts[i].good;
        p->load = -1;
    }
}

static void advance(const backend *b, const layer *l, progress *p, int32_t rows)
{
    const part all = {p, rows, rows, rows, -1};

    run(b, l, 0, &all, 1);
}

/* ---- states -------------------------------------------------------------------------------- */

/* Makes the two states be at the same border, and compares all that a later row reads. */
static void assert_same_state(const backend *b, const layer *l, const progress *p,
                              const progress *q)
{
    const sp_delta_rule_shape *shape = &l->shape;
    const sp_cpu_ops *cpu = b->cpu;
    size_t n = (size_t)cpu->states.n;

    assert_int_equal(p->position, q->position);
    assert_int_equal(p->folded, q->folded);
    for (int32_t h = 0; h < shape->v_heads; h++) {
        assert_memory_equal(sp_cpu_state_s(cpu, p->slot, 0, h), sp_cpu_state_s(cpu, q->slot, 0, h),
                            (size_t)shape->k_dim * n * sizeof(float));
        for (int32_t i = p->folded; i < p->position; i++) {
            int32_t place = i % SP_STATE_RING, k_head = h / (shape->v_heads / shape->k_heads);

            assert_memory_equal(sp_cpu_state_u(cpu, p->slot, 0, h, place),
                                sp_cpu_state_u(cpu, q->slot, 0, h, place), n * sizeof(float));
            assert_memory_equal(sp_cpu_state_g(cpu, p->slot, 0, h) + place,
                                sp_cpu_state_g(cpu, q->slot, 0, h) + place, sizeof(float));
            assert_memory_equal(sp_cpu_state_k(cpu, p->slot, 0, k_head, place),
                                sp_cpu_state_k(cpu, q->slot, 0, k_head, place),
                                (size_t)shape->k_dim * sp_dtype_bytes(l->type));
        }
    }
    for (int32_t i = p->position - shape->conv_width + 1; i < p->position; i++)
        assert_memory_equal(sp_cpu_state_inputs(cpu, p->slot, 0, i & (SP_STATE_RING - 1)),
                            sp_cpu_state_inputs(cpu, q->slot, 0, i & (SP_STATE_RING - 1)),
                            (size_t)l->channels * sp_dtype_bytes(l->type));
}

static void assert_same_rows(const layer *l, const progress *p, const progress *q)
{
    assert_memory_equal(p->y, q->y, (size_t)p->position * row_bytes(l, Y));
}

/* ---- the recurrence ------------------------------------------------------------------------ */

static double input(const layer *l, const sequence *s, int rows, int32_t position, int32_t column)
{
    return position < 0 ? 0.0
                        : (double)sp_element_load(type_of(l, rows), s->inputs[rows],
                                                  (int64_t)position * l->widths[rows] + column);
}

/* Where channel `c` of the convolution, or with c >= channels element c - channels of z, is in a
 * fused row. */
static int32_t fused_column(const layer *l, int32_t c)
{
    const sp_delta_rule_shape *shape = &l->shape;
    int32_t n = shape->v_heads / shape->k_heads * shape->v_dim;
    int32_t head = 2 * shape->k_dim + 2 * n, keys = l->keys, k_dim = shape->k_dim;

    if (c < keys)
        return c / k_dim * head + c % k_dim;
    if (c < 2 * keys)
        return (c - keys) / k_dim * head + k_dim + (c - keys) % k_dim;
    if (c < l->channels)
        return (c - 2 * keys) / n * head + 2 * k_dim + (c - 2 * keys) % n;
    c -= l->channels;
    return c / n * head + 2 * k_dim + n + c % n;
}

static double silu(double x)
{
    return x / (1.0 + exp(-x));
}

static double rounded(const layer *l, double x)
{
    return (double)sp_element_round(l->type, (float)x);
}

static double channel(const layer *l, const sequence *s, int32_t position, int32_t c)
{
    int32_t width = l->shape.conv_width, column = l->shape.fused_inputs ? fused_column(l, c) : c;
    double sum = 0;

    for (int32_t t = 0; t < width; t++)
        sum += (double)sp_bf16_to_f32(l->conv[c * width + t]) *
               input(l, s, QKV, position - (width - 1 - t), column);
    return rounded(l, silu(sum));
}

static void unit(const layer *l, double *x)
{
    double sum = 0;

    for (int32_t d = 0; d < l->shape.k_dim; d++)
        sum += x[d] * x[d];
    for (int32_t d = 0; d < l->shape.k_dim; d++)
        x[d] = rounded(l, x[d] / sqrt(sum + 1e-6));
}

/* q, k, beta and e^g of a row. */
static void row_of(const layer *l, const sequence *s, int32_t position, int32_t h, double *q,
                   double *k, double *out_beta, double *out_decay)
{
    const sp_delta_rule_shape *shape = &l->shape;
    int32_t n = shape->v_heads / shape->k_heads, k_head = h / n;
    int32_t at = k_head * 2 * n + h % n;
    double b = input(l, s, B, position, shape->fused_inputs ? at : h);
    double a = shape->fused_inputs ? input(l, s, B, position, at + n) : input(l, s, A, position, h);

    for (int32_t d = 0; d < shape->k_dim; d++) {
        q[d] = channel(l, s, position, k_head * shape->k_dim + d);
        k[d] = channel(l, s, position, l->keys + k_head * shape->k_dim + d);
    }
    unit(l, q);
    unit(l, k);
    *out_beta = 1.0 / (1.0 + exp(-b));
    *out_decay = exp(-exp((double)l->a_log[h]) * log1p(exp(a + (double)l->dt_bias[h])));
}

static double z_of(const layer *l, const sequence *s, int32_t position, int32_t h, int32_t j)
{
    int32_t element = h * l->shape.v_dim + j;

    if (!l->shape.fused_inputs)
        return input(l, s, Z, position, element);
    return input(l, s, QKV, position, fused_column(l, l->channels + element));
}

/* S = e^g S; u = beta (v - Sᵀk); S += k uᵀ; o = Sᵀq / sqrt(k_dim). Adds the squares of error and
 * output of one value head. */
static void check_head(const layer *l, const sequence *s, const char *y, int32_t h, double *error,
                       double *size)
{
    const sp_delta_rule_shape *shape = &l->shape;
    int32_t v_dim = shape->v_dim, k_dim = shape->k_dim;
    double *state = sp_calloc((size_t)(k_dim * v_dim), sizeof *state), q[K_DIM_MAX], k[K_DIM_MAX];
    double *o = sp_calloc((size_t)v_dim, sizeof *o);

    assert_true(state && o);
    for (int32_t p = 0; p < POSITIONS; p++) {
        double beta, decay, sum = 0;

        row_of(l, s, p, h, q, k, &beta, &decay);
        for (int32_t j = 0; j < v_dim; j++) {
            double v = channel(l, s, p, 2 * l->keys + h * v_dim + j), read = 0, u;

            for (int32_t d = 0; d < k_dim; d++) {
                state[d * v_dim + j] *= decay;
                read += state[d * v_dim + j] * k[d];
            }
            u = beta * (v - read);
            o[j] = 0;
            for (int32_t d = 0; d < k_dim; d++) {
                state[d * v_dim + j] += k[d] * u;
                o[j] += state[d * v_dim + j] * q[d] / sqrt((double)k_dim);
            }
            sum += o[j] * o[j];
        }
        for (int32_t j = 0; j < v_dim; j++) {
            double expected =
                o[j] / sqrt(sum / v_dim + 1e-6) * (double)l->norm[j] * silu(z_of(l, s, p, h, j));
            double have =
                (double)sp_element_load(l->type, y, ((int64_t)p * shape->v_heads + h) * v_dim + j);

            *error += (have - expected) * (have - expected);
            *size += expected * expected;
        }
    }
    sp_free(state);
    sp_free(o);
}

/* ---- tests --------------------------------------------------------------------------------- */

static void matches_the_recurrence(void **state)
{
    const sp_kernels *kernels;

    if (sp_kernels_get(*state, &kernels, NULL) != SP_OK)
        skip();
    for (int i = 0; i < 2 * N_SHAPES; i++) {
        layer l = make_layer(&shapes[i / 2], i % 2 ? SP_DTYPE_F32 : SP_DTYPE_BF16);
        sequence s = make_sequence(&l, 5);
        backend b = open_backend(*state, &l, 2);
        progress p = begin(&l, &s, 1);
        double error = 0, size = 0;

        advance(&b, &l, &p, POSITIONS);
        for (int32_t h = 0; h < l.shape.v_heads; h++)
            check_head(&l, &s, p.y, h, &error, &size);
        /* BF16: half an ulp of the output, and now and then an ulp of q, k or v. */
        assert_true(sqrt(error / size) <= (l.type == SP_DTYPE_F32 ? 1e-6 : 2.5e-3));
        sp_free(p.y);
        close_backend(&b);
        free_sequence(&s);
        free_layer(&l);
    }
}

typedef void (*cut_fn)(const backend *b, const layer *l, const progress *whole, progress *p);

/* Runs the sequence whole in slot 0, then by `cut` in slot 1; rows and state must be the same. */
static void check_cut(const char *level, int32_t threads, cut_fn cut)
{
    for (int i = 0; i < 2 * N_SHAPES; i++) {
        layer l = make_layer(&shapes[i / 2], i % 2 ? SP_DTYPE_F32 : SP_DTYPE_BF16);
        sequence s = make_sequence(&l, 6);
        backend b = open_backend(level, &l, threads);
        progress whole = begin(&l, &s, 0), p = begin(&l, &s, 1);

        advance(&b, &l, &whole, POSITIONS);
        cut(&b, &l, &whole, &p);
        if (p.folded < whole.folded) { /* what a draft completed is folded by the next step */
            advance(&b, &l, &whole, 0);
            advance(&b, &l, &p, 0);
        }
        assert_same_rows(&l, &whole, &p);
        assert_same_state(&b, &l, &whole, &p);
        sp_free(whole.y);
        sp_free(p.y);
        close_backend(&b);
        free_sequence(&s);
        free_layer(&l);
    }
}

static void in_pieces(const backend *b, const layer *l, progress *p, int32_t rows)
{
    while (p->position < POSITIONS)
        advance(b, l, p, POSITIONS - p->position < rows ? POSITIONS - p->position : rows);
}

static void cut_by_size(const backend *b, const layer *l, const progress *whole, progress *p)
{
    static const int32_t sizes[] = {1, 7, 31, 32, 33, 64, 65, 100};

    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        p->position = p->folded = 0;
        in_pieces(b, l, p, sizes[i]);
        assert_same_rows(l, whole, p);
    }
}

static void every_cut_gives_the_same_bits(void **state)
{
    const sp_kernels *kernels;

    if (sp_kernels_get(*state, &kernels, NULL) != SP_OK)
        skip();
    check_cut(*state, 1, cut_by_size);
    check_cut(*state, 3, cut_by_size);
}

/* docs/KERNELS.md says so. */
static void both_vector_levels_agree(void **state)
{
    const sp_kernels *kernels;

    (void)state;
    if (sp_kernels_get("avx512", &kernels, NULL) != SP_OK)
        skip();
    for (int i = 0; i < 2 * N_SHAPES; i++) {
        layer l = make_layer(&shapes[i / 2], i % 2 ? SP_DTYPE_F32 : SP_DTYPE_BF16);
        sequence s = make_sequence(&l, 6);
        backend narrow = open_backend("avx2", &l, 1), wide = open_backend("avx512", &l, 2);
        progress a = begin(&l, &s, 0), b = begin(&l, &s, 0);

        advance(&narrow, &l, &a, POSITIONS);
        in_pieces(&wide, &l, &b, 37);
        assert_same_rows(&l, &a, &b);
        sp_free(a.y);
        sp_free(b.y);
        close_backend(&narrow);
        close_backend(&wide);
        free_sequence(&s);
        free_layer(&l);
    }
}

/* A row, and drafts of which some are accepted. */
static void cut_with_drafts(const backend *b, const layer *l, const progress *whole, progress *p)
{
    sp_test_random random = {(uint64_t)l->channels};

    (void)whole;
    while (p->position < POSITIONS) {
        int32_t left = POSITIONS - p->position;
        int32_t rows = 1 + (int32_t)sp_test_below(&random, left < 30 ? (uint32_t)left : 30);
        part verify = {p, rows, 1, 1 + (int32_t)sp_test_below(&random, (uint32_t)rows), -1};

        run(b, l, 0, &verify, 1);
    }
}

static void rejected_drafts_leave_no_trace(void **state)
{
    (void)state;
    check_cut("scalar", 2, cut_with_drafts);
    check_cut("auto", 2, cut_with_drafts);
}

/* The other layer and another sequence in the same steps, before and after this one. */
static void cut_beside_others(const backend *b, const layer *l, const progress *whole, progress *p)
{
    sequence other_sequence = make_sequence(l, 8);
    progress other = begin(l, &other_sequence, 2);
    sp_test_random random = {9};

    (void)whole;
    for (int32_t round = 0; p->position < POSITIONS; round++) {
        int32_t left = POSITIONS - p->position, rest = POSITIONS - other.position;
        int32_t rows = 1 + (int32_t)sp_test_below(&random, left < 45 ? (uint32_t)left : 45);
        int32_t others = 1 + (int32_t)sp_test_below(&random, rest < 40 ? (uint32_t)rest : 40);
        part mine = {p, rows, rows, rows, -1}, theirs = {&other, others, others, others, -1};
        const part both[] = {round % 2 ? mine : theirs, round % 2 ? theirs : mine};
        progress saved[2] = {*p, other};

        run(b, l, 0, both, 2);
        saved[0].y = saved[1].y = other.y; /* the second layer's rows are of no interest */
        if (round == 0)
            run(b, l, 1, &(part){&saved[0], rows, rows, rows, -1}, 1);
        if (other.position == POSITIONS)
            other.position = other.folded = 0;
    }
    sp_free(other.y);
    free_sequence(&other_sequence);
}

static void neighbours_change_no_bit(void **state)
{
    (void)state;
    check_cut("scalar", 2, cut_beside_others);
    check_cut("auto", 3, cut_beside_others);
}

/* Saves at border 64 and at the end of a sequence's chunk that drafts completed, and goes on in
 * another slot from the snapshot. */
static void cut_by_snapshot(const backend *b, const layer *l, const progress *whole, progress *p)
{
    progress resumed = begin(l, p->sequence, 2);
    part save = {p, 40, 40, 40, 1};

    advance(b, l, p, 60);
    run(b, l, 0, &(part){p, 4, 1, 4, -1}, 1); /* 64: a draft has completed the chunk */
    assert_int_equal(p->folded, 32);
    run(b, l, 0, &save, 1);
    resumed.position = resumed.folded = 64;
    resumed.load = 1;
    run(b, l, 0, &(part){&resumed, 1, 1, 1, 0}, 1); /* loads, and saves what it has loaded */
    in_pieces(b, l, &resumed, 50);
    memcpy(resumed.y, p->y, 64 * row_bytes(l, Y));
    assert_same_rows(l, whole, &resumed);
    assert_same_state(b, l, whole, &resumed);
    for (int32_t h = 0; h < l->shape.v_heads; h++)
        assert_memory_equal(sp_cpu_snapshot_s(b->cpu, 0, 0, h), sp_cpu_snapshot_s(b->cpu, 1, 0, h),
                            (size_t)l->shape.k_dim * (size_t)b->cpu->states.n * sizeof(float));
    in_pieces(b, l, p, 50);
    sp_free(resumed.y);
}

static void snapshots_resume_with_the_same_bits(void **state)
{
    (void)state;
    check_cut("scalar", 2, cut_by_snapshot);
    check_cut("auto", 2, cut_by_snapshot);
}

/* S, u and G of 3 value heads of 128, k of one key head, 2 * 128 + 3 * 128 channels: by hand. */
static void sizes_are_what_the_parts_need(void **state)
{
    size_t heads = 3 * (128 * 128 * 4 + 64 * 128 * 4 + 64 * 4), keys = 64 * 128 * 2;

    (void)state;
    assert_int_equal(sp_ops_state_bytes(&sp_cpu_op_table, &shapes[2], SP_DTYPE_BF16),
                     LAYERS * (heads + keys + 64 * 640 * 2));
    assert_int_equal(sp_ops_snapshot_bytes(&sp_cpu_op_table, &shapes[2], SP_DTYPE_BF16),
                     LAYERS * (3 * 128 * 128 * 4 + 3 * 640 * 2));
    assert_int_equal(sp_ops_state_bytes(&sp_cpu_op_table, &(sp_delta_rule_shape){0}, SP_DTYPE_BF16),
                     0);
}

#define LEVEL(f, level)                                       \
    {                                                         \
#f "/" level, f, NULL, NULL, (void *)(uintptr_t)level \
    }

int main(void)
{
    const struct CMUnitTest tests[] = {
        LEVEL(matches_the_recurrence, "scalar"),
        LEVEL(matches_the_recurrence, "avx2"),
        LEVEL(matches_the_recurrence, "avx512"),
        LEVEL(every_cut_gives_the_same_bits, "scalar"),
        LEVEL(every_cut_gives_the_same_bits, "avx2"),
        LEVEL(every_cut_gives_the_same_bits, "avx512"),
        cmocka_unit_test(both_vector_levels_agree),
        cmocka_unit_test(rejected_drafts_leave_no_trace),
        cmocka_unit_test(neighbours_change_no_bit),
        cmocka_unit_test(snapshots_resume_with_the_same_bits),
        cmocka_unit_test(sizes_are_what_the_parts_need),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
