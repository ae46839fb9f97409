/*
 * The ops of a mixture of experts on the CPU: the choice against a sort, the experts and the shared
 * expert's gate against double, and a row's bits whatever surrounds it: other rows, their order,
 * how many an expert has, the window, threads. Rows are fed by an embedding whose first columns a
 * router of unit rows turns into logits, so that a test says where a row goes.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "base/half.h"
#include "engine/ops/cpu_ops.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { EXPERTS = 7, CHOSEN = 3, HIDDEN = 40, INNER = 24, VOCAB = 300, ROWS_MAX = 4097 };
enum { X, LOGITS, Y, SHARED, SWITCH, N_ACTIVATIONS };

/* ---- a layer ------------------------------------------------------------------------------- */

typedef struct layer {
    uint16_t table[VOCAB][HIDDEN]; /* of the tokens: the rows of x */
    uint16_t router[EXPERTS][HIDDEN], shared[HIDDEN][HIDDEN], switches[1][HIDDEN];
    uint16_t gate[EXPERTS][INNER][HIDDEN], up[EXPERTS][INNER][HIDDEN], down[EXPERTS][HIDDEN][INNER];
    sp_linear gates[EXPERTS], ups[EXPERTS], downs[EXPERTS];
    sp_linear router_map, shared_map, switch_map;
    sp_weight embed;
    sp_experts experts;
    bool normalised, with_shared;
} layer;

static void fill(sp_test_random *random, uint16_t *to, size_t n, float size)
{
    for (size_t i = 0; i < n; i++)
        to[i] = sp_f32_to_bf16(sp_test_float(random) * size);
}

static sp_linear map_of(const uint16_t *data, int32_t rows, int32_t columns)
{
    const sp_weight weight = {SP_DTYPE_BF16, rows, columns, data, data};

    return (sp_linear){.weight = weight};
}

static layer *make_layer(uint64_t seed)
{
    layer *l = sp_calloc(1, sizeof *l);
    sp_test_random random = {seed};

    assert_non_null(l);
    fill(&random, l->table[0], sizeof l->table / 2, 1.0f);
    fill(&random, l->shared[0], sizeof l->shared / 2, 0.3f);
    fill(&random, l->switches[0], sizeof l->switches / 2, 0.3f);
    fill(&random, l->gate[0][0], sizeof l->gate / 2, 0.3f);
    fill(&random, l->up[0][0], sizeof l->up / 2, 0.3f);
    fill(&random, l->down[0][0], sizeof l->down / 2, 0.3f);
    for (int e = 0; e < EXPERTS; e++) {
        l->router[e][e] = sp_f32_to_bf16(1.0f);
        l->gates[e] = map_of(l->gate[e][0], INNER, HIDDEN);
        l->ups[e] = map_of(l->up[e][0], INNER, HIDDEN);
        l->downs[e] = map_of(l->down[e][0], HIDDEN, INNER);
    }
    l->embed = map_of(l->table[0], VOCAB, HIDDEN).weight;
    l->router_map = map_of(l->router[0], EXPERTS, HIDDEN);
    l->shared_map = map_of(l->shared[0], HIDDEN, HIDDEN);
    l->switch_map = map_of(l->switches[0], 1, HIDDEN);
    l->experts = (sp_experts){EXPERTS, l->gates, l->ups, l->downs};
    l->normalised = true;
    return l;
}

static void pass(void *user, sp_ops *ops)
{
    const layer *l = user;
    const sp_projection maps[] = {
        {&l->router_map, LOGITS}, {&l->shared_map, SHARED}, {&l->switch_map, SWITCH}};

    sp_op_embed(ops, &l->embed, X);
    sp_op_linear(ops, X, maps, 3);
    sp_op_route(ops, LOGITS, l->normalised);
    sp_op_experts(ops, X, &l->experts, Y);
    if (l->with_shared)
        sp_op_add_gated(ops, Y, SHARED, SWITCH);
}

/* ---- a backend ----------------------------------------------------------------------------- */

typedef struct backend {
    sp_device *device;
    sp_exec *exec;
    sp_cpu_ops *cpu;
} backend;

static backend open_backend(const char *level, sp_dtype type, int32_t window, int32_t threads)
{
    static const int32_t widths[] = {HIDDEN, EXPERTS, HIDDEN, HIDDEN, 1};
    sp_exec_options exec_options;
    sp_ops_options options = {
        .type = type,
        .slots = 1,
        .rows_max = ROWS_MAX,
        .spans_max = 1,
        .hidden = HIDDEN,
        .vocab = VOCAB,
        .widths = widths,
        .n_widths = N_ACTIVATIONS,
        .fp32_rows = SP_ROWS_BIT(LOGITS) | SP_ROWS_BIT(SWITCH),
        .attention = {.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 16, .scale = 1},
        .moe = {EXPERTS, CHOSEN, INNER, window, 1},
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

static void run(const backend *b, const layer *l, const int32_t *tokens, int32_t n)
{
    const int32_t page = 0;
    const sp_step_span span = {.tokens = tokens, .pages = &page, .n_rows = n};
    const sp_step step = {.spans = &span, .n_spans = 1, .n_rows = n};

    assert_int_equal(sp_op_step(&b->cpu->ops, &step, pass, (void *)(uintptr_t)l), SP_OK);
}

static double value(const sp_cpu_ops *cpu, sp_rows rows, int32_t row, int32_t column)
{
    const void *at = sp_cpu_row(cpu, rows, row);

    return cpu->types[rows] == SP_DTYPE_F32
               ? (double)((const float *)at)[column]
               : (double)sp_bf16_to_f32(((const uint16_t *)at)[column]);
}

/* ---- the choice ---------------------------------------------------------------------------- */

typedef struct logits_pass {
    const float *logits; /* [n, EXPERTS] */
    int32_t n;
    bool normalised;
} logits_pass;

static void route_pass(void *user, sp_ops *ops)
{
    const logits_pass *p = user;

    memcpy(((sp_cpu_ops *)ops)->rows[LOGITS], p->logits,
           (size_t)p->n * EXPERTS * sizeof *p->logits);
    sp_op_route(ops, LOGITS, p->normalised);
}

static bool goes_first(const float *logits, int32_t a, int32_t b)
{
    float x = logits[a], y = logits[b];

    if (isnan(x) || isnan(y))
        return isnan(x) && (!isnan(y) || a < b);
    return x > y || (!(x < y) && a < b);
}

/* The rank of every expert is the number of those that go first. */
static void check_choice(const float *logits, const int32_t *choice)
{
    for (int32_t e = 0; e < EXPERTS; e++) {
        int32_t rank = 0;

        for (int32_t other = 0; other < EXPERTS; other++)
            rank += other != e && goes_first(logits, other, e);
        if (rank < CHOSEN)
            assert_int_equal(choice[rank], e);
    }
}

static void check_weights(const float *logits, bool normalised, const int32_t *choice,
                          const float *weight)
{
    double total = 0;

    for (int32_t e = 0; e < EXPERTS; e++) {
        bool chosen = !normalised;

        for (int32_t i = 0; i < CHOSEN; i++)
            chosen |= choice[i] == e;
        total += chosen ? exp((double)logits[e]) : 0;
    }
    for (int32_t i = 0; i < CHOSEN; i++) {
        double expected = exp((double)logits[choice[i]]) / total;

        if (isfinite(logits[choice[0]]))
            assert_true(fabs((double)weight[i] - expected) <= 1e-6);
        else /* the row must fail */
            assert_true(isnan(weight[i]));
    }
}

/* Few different values, so that nearly every row has ties; zeroes of both signs are equal. */
static void check_values(const float *values, uint32_t n_values, bool normalised)
{
    static float logits[VOCAB][EXPERTS];
    backend b = open_backend(NULL, SP_DTYPE_BF16, 64, 2);
    sp_test_random random = {2};
    logits_pass user = {logits[0], VOCAB, normalised};
    int32_t tokens[VOCAB] = {0};
    const int32_t page = 0;
    const sp_step_span span = {.tokens = tokens, .pages = &page, .n_rows = VOCAB};
    const sp_step step = {.spans = &span, .n_spans = 1, .n_rows = VOCAB};

    for (int32_t t = 0; t < VOCAB; t++)
        for (int32_t e = 0; e < EXPERTS; e++)
            logits[t][e] = values[sp_test_below(&random, n_values)];
    assert_int_equal(sp_op_step(&b.cpu->ops, &step, route_pass, &user), SP_OK);
    for (int32_t t = 0; t < VOCAB; t++) {
        const int32_t *choice = b.cpu->experts.choice + t * CHOSEN;

        check_choice(logits[t], choice);
        check_weights(logits[t], normalised, choice, b.cpu->experts.weight + t * CHOSEN);
    }
    close_backend(&b);
}

static void ties_take_the_lower_expert(void **state)
{
    static const float values[] = {-1.0f, -0.0f, 0.0f, 0.5f, 0.5f, 2.0f};
    static const float odd[] = {-INFINITY, 0.0f, 1.0f, INFINITY, NAN};

    (void)state;
    for (int normalised = 0; normalised < 2; normalised++) {
        check_values(values, 6, normalised);
        check_values(odd, 5, normalised);
    }
}

/* A row that is not finite fails alone, and its experts are experts. */
static void not_finite_rows_stay_alone(void **state)
{
    static const uint16_t bits[] = {0x7fc0, 0x7f80, 0xff80}; /* NaN, inf, -inf */
    backend b = open_backend(NULL, SP_DTYPE_BF16, 64, 2);
    layer *l = make_layer(3);
    int32_t tokens[VOCAB];
    uint16_t expected[VOCAB][HIDDEN];

    (void)state;
    for (int32_t t = 0; t < VOCAB; t++)
        tokens[t] = t;
    run(&b, l, tokens, VOCAB);
    memcpy(expected, b.cpu->rows[Y], sizeof expected);
    for (int32_t t = 0; t < VOCAB; t += 10)
        for (int32_t e = 0; e < EXPERTS; e++)
            l->table[t][e] = bits[(e + t / 10) % 3];
    run(&b, l, tokens, VOCAB);
    for (int32_t t = 0; t < VOCAB; t++) {
        const int32_t *choice = b.cpu->experts.choice + t * CHOSEN;

        for (int32_t i = 0; i < CHOSEN; i++)
            assert_true(choice[i] >= 0 && choice[i] < EXPERTS);
        assert_true(choice[0] != choice[1] && choice[1] != choice[2] && choice[0] != choice[2]);
        if (t % 10 == 0)
            assert_true(isnan(value(b.cpu, Y, t, 0)));
        else
            assert_memory_equal(sp_cpu_row(b.cpu, Y, t), expected[t], sizeof expected[t]);
    }
    sp_free(l);
    close_backend(&b);
}

/* ---- against double ------------------------------------------------------------------------ */

static double dot(const uint16_t *w, const double *x, int n)
{
    double sum = 0;

    for (int i = 0; i < n; i++)
        sum += (double)sp_bf16_to_f32(w[i]) * x[i];
    return sum;
}

/* One row's y; the choice and the weights are those that were checked. */
static void expect_row(const backend *b, const layer *l, int32_t row, int32_t token, double *y)
{
    const sp_cpu_experts *own = &b->cpu->experts;
    double x[HIDDEN], inner[INNER];

    for (int i = 0; i < HIDDEN; i++)
        x[i] = (double)sp_bf16_to_f32(l->table[token][i]);
    memset(y, 0, HIDDEN * sizeof *y);
    for (int32_t j = 0; j < CHOSEN; j++) {
        int32_t e = own->choice[row * CHOSEN + j];

        for (int i = 0; i < INNER; i++) {
            double gate = dot(l->gate[e][i], x, HIDDEN);

            inner[i] = gate / (1 + exp(-gate)) * dot(l->up[e][i], x, HIDDEN);
        }
        for (int i = 0; i < HIDDEN; i++)
            y[i] += (double)own->weight[row * CHOSEN + j] * dot(l->down[e][i], inner, INNER);
    }
    for (int i = 0; l->with_shared && i < HIDDEN; i++)
        y[i] += dot(l->shared[i], x, HIDDEN) / (1 + exp(-dot(l->switches[0], x, HIDDEN)));
}

static void check_level(const char *level, sp_dtype type, double allowed)
{
    backend b = open_backend(level, type, 100, 2);
    layer *l = make_layer(5);
    int32_t tokens[VOCAB];

    l->with_shared = true;
    for (int32_t t = 0; t < VOCAB; t++)
        tokens[t] = (t * 7) % VOCAB;
    run(&b, l, tokens, VOCAB);
    for (int32_t row = 0; row < VOCAB; row++) {
        double y[HIDDEN], error = 0, norm = 0;
        float logits[EXPERTS];

        for (int32_t e = 0; e < EXPERTS; e++)
            logits[e] = sp_bf16_to_f32(l->table[tokens[row]][e]);
        check_choice(logits, b.cpu->experts.choice + row * CHOSEN);
        expect_row(&b, l, row, tokens[row], y);
        for (int i = 0; i < HIDDEN; i++) {
            error += pow(value(b.cpu, Y, row, i) - y[i], 2);
            norm += y[i] * y[i];
        }
        assert_true(sqrt(error / norm) <= allowed);
    }
    sp_free(l);
    close_backend(&b);
}

static void experts_match_double(void **state)
{
    (void)state;
    for (const char *const *level = sp_kernels_levels(); *level; level++) {
        check_level(*level, SP_DTYPE_F32, 1e-5);
        /* Seven roundings of half an ulp, 2^-9, between x and y. */
        check_level(*level, SP_DTYPE_BF16, 0.02);
    }
}

/* ---- one row, one answer ------------------------------------------------------------------- */

/* Each token alone, one row a step. */
static void answer_alone(const backend *b, const layer *l, char *out_rows, size_t row_bytes)
{
    for (int32_t t = 0; t < VOCAB; t++) {
        run(b, l, &t, 1);
        memcpy(out_rows + (size_t)t * row_bytes, b->cpu->rows[Y], row_bytes);
    }
}

static void check_mixed(const backend *b, const layer *l, const char *alone, size_t row_bytes,
                        int32_t n, sp_test_random *random)
{
    static int32_t tokens[ROWS_MAX];

    for (int32_t i = 0; i < n; i++)
        tokens[i] = (int32_t)sp_test_below(random, VOCAB);
    run(b, l, tokens, n);
    for (int32_t i = 0; i < n; i++)
        assert_memory_equal(sp_cpu_row(b->cpu, Y, i), alone + (size_t)tokens[i] * row_bytes,
                            row_bytes);
}

/* Tokens below 100 go where they like, the next 100 all to one expert, the rest to two. */
static void send_to_few(layer *l)
{
    for (int32_t t = 100; t < VOCAB; t++) {
        l->table[t][2] = sp_f32_to_bf16(5.0f);
        if (t >= 200)
            l->table[t][6] = sp_f32_to_bf16(5.0f);
    }
}

static void a_row_has_one_answer(void **state)
{
    static const int32_t counts[] = {1, 2, 3, 15, 16, 17, 63, 100, 1000, ROWS_MAX};
    static const int32_t windows[] = {1, 7, 100, ROWS_MAX};

    (void)state;
    for (const char *const *level = sp_kernels_levels(); *level; level++)
        for (int precision = 0; precision < 2; precision++) {
            sp_dtype type = precision ? SP_DTYPE_F32 : SP_DTYPE_BF16;
            size_t row_bytes = HIDDEN * sp_dtype_bytes(type);
            char *alone = sp_calloc(VOCAB, row_bytes);
            layer *l = make_layer(7);
            sp_test_random random = {8};

            assert_non_null(alone);
            send_to_few(l);
            l->with_shared = true;
            for (size_t w = 0; w < sizeof windows / sizeof *windows; w++) {
                backend b = open_backend(*level, type, windows[w], 1 + (int32_t)w % 3);

                if (w == 0)
                    answer_alone(&b, l, alone, row_bytes);
                for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
                    if (windows[w] > 1 || counts[c] <= 100)
                        check_mixed(&b, l, alone, row_bytes, counts[c], &random);
                close_backend(&b);
            }
            sp_free(l);
            sp_free(alone);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ties_take_the_lower_expert),
        cmocka_unit_test(not_finite_rows_stay_alone),
        cmocka_unit_test(experts_match_double),
        cmocka_unit_test(a_row_has_one_answer),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
