/*
 * Gated attention on the CPU: q and gate interleaved by head, a rotation of a part of each head,
 * and the gate on the output, each against double.
 */
#include "support/test.h"

#include "base/half.h"
#include "engine/ops/cpu_ops.h"
#include "kernels/element.h"

#include <math.h>
#include <string.h>

enum { Q_HEADS = 4, KV_HEADS = 2, HEAD_DIM = 32, N_ROT = 4, ROWS = 5, POSITION = 3 };
enum { Q, K, V, Q_GATE, Y, N_ACTIVATIONS };
enum { Q_WIDTH = Q_HEADS * HEAD_DIM, KV_WIDTH = KV_HEADS * HEAD_DIM };

static const int32_t widths[] = {Q_WIDTH, KV_WIDTH, KV_WIDTH, 2 * Q_WIDTH, Q_WIDTH};

typedef struct inputs {
    sp_dtype type;
    float rows[N_ACTIVATIONS][ROWS][2 * Q_WIDTH]; /* what the activations are at first */
    uint16_t norm[HEAD_DIM];
    bool with_norm;
} inputs;

static void fill(inputs *in, sp_dtype type, bool with_norm)
{
    sp_test_random random = {12};

    in->type = type;
    in->with_norm = with_norm;
    for (int a = 0; a < N_ACTIVATIONS; a++)
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < 2 * Q_WIDTH; i++)
                in->rows[a][r][i] = sp_bf16_to_f32(sp_f32_to_bf16(3.0f * sp_test_float(&random)));
    for (int i = 0; i < HEAD_DIM; i++)
        in->norm[i] = sp_f32_to_bf16(0.5f * sp_test_float(&random));
}

static void pass(void *user, sp_ops *ops)
{
    const inputs *in = user;
    sp_cpu_ops *cpu = (sp_cpu_ops *)ops;
    const sp_norm norm = {{SP_DTYPE_BF16, HEAD_DIM, 0, in->norm, in->norm}, 1e-6f, 1.0f};
    const sp_rope_call call = {
        .q = Q,
        .k = K,
        .v = V,
        .gated = true,
        .q_gate = Q_GATE,
        .q_norm = in->with_norm ? &norm : NULL,
        .k_norm = in->with_norm ? &norm : NULL,
    };

    for (int a = 0; a < N_ACTIVATIONS; a++)
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < widths[a]; i++)
                sp_element_store(in->type, sp_cpu_row(cpu, a, r), i, in->rows[a][r][i]);
    sp_op_rope_and_cache(ops, &call);
    sp_op_gate_heads(ops, Y, Q_GATE);
}

static double value(const sp_cpu_ops *cpu, sp_rows rows, int32_t row, int32_t column)
{
    return (double)sp_element_load(cpu->type, sp_cpu_row(cpu, rows, row), column);
}

static void assert_near(double have, double expected, double size, sp_dtype type)
{
    double bound = type == SP_DTYPE_F32 ? 2e-6 : 0x1p-8;

    if (!(fabs(have - expected) <= bound * size))
        fail_msg("%.9g where %.9g is right", have, expected);
}

/* One rotated head. */
static void check_head(const inputs *in, const sp_cpu_ops *cpu, const float *x, sp_rows rows,
                       int32_t row, int32_t column)
{
    double normed[HEAD_DIM], sum = 0, position = POSITION + row;

    for (int i = 0; i < HEAD_DIM; i++)
        sum += (double)x[i] * (double)x[i];
    for (int i = 0; i < HEAD_DIM; i++)
        normed[i] = in->with_norm ? (double)x[i] / sqrt(sum / HEAD_DIM + 1e-6) *
                                        (1.0 + (double)sp_bf16_to_f32(in->norm[i]))
                                  : (double)x[i];
    for (int i = 0; i < HEAD_DIM; i++) {
        int low = i % N_ROT;
        double angle = position * pow(10000.0, -(double)low / N_ROT), expected = normed[i];

        if (i < N_ROT)
            expected = normed[i] * cos(angle) - normed[i + N_ROT] * sin(angle);
        else if (i < 2 * N_ROT)
            expected = normed[i] * cos(angle) + normed[i - N_ROT] * sin(angle);
        assert_near(value(cpu, rows, row, column + i), expected,
                    fabs(normed[low]) + fabs(normed[low + N_ROT]) + fabs(normed[i]), in->type);
    }
}

static void check_row(const inputs *in, const sp_cpu_ops *cpu, int32_t row)
{
    for (int h = 0; h < Q_HEADS; h++)
        check_head(in, cpu, &in->rows[Q_GATE][row][2 * h * HEAD_DIM], Q, row, h * HEAD_DIM);
    for (int h = 0; h < KV_HEADS; h++)
        check_head(in, cpu, &in->rows[K][row][h * HEAD_DIM], K, row, h * HEAD_DIM);
    for (int i = 0; i < 2 * Q_WIDTH; i++)
        assert_true(value(cpu, Q_GATE, row, i) == (double)in->rows[Q_GATE][row][i]);
    for (int i = 0; i < Q_WIDTH; i++) {
        int gate = (2 * (i / HEAD_DIM) + 1) * HEAD_DIM + i % HEAD_DIM;
        double expected =
            (double)in->rows[Y][row][i] / (1.0 + exp(-(double)in->rows[Q_GATE][row][gate]));

        assert_near(value(cpu, Y, row, i), expected, fabs(expected), in->type);
    }
}

static void check(const char *level, sp_dtype type, bool with_norm)
{
    static inputs in;
    sp_ops_options options = {
        .type = type,
        .slots = 1,
        .rows_max = ROWS,
        .spans_max = 1,
        .hidden = 8,
        .vocab = 8,
        .widths = widths,
        .n_widths = N_ACTIVATIONS,
        .attention = {1, Q_HEADS, KV_HEADS, HEAD_DIM, 1},
        .rope = {.theta = 10000, .n_rot = N_ROT, .positions = 16},
        .kv_pages = 1,
        .page_tokens = 16,
    };
    static const int32_t tokens[ROWS], page;
    const sp_step_span span = {
        .tokens = tokens, .pages = &page, .position = POSITION, .n_rows = ROWS};
    const sp_step step = {.spans = &span, .n_spans = 1, .n_rows = ROWS};
    sp_error error;
    sp_ops *ops;

    if (sp_kernels_get(level, &options.kernels, NULL) != SP_OK)
        return;
    fill(&in, type, with_norm);
    assert_ok(sp_device_open("cpu", NULL, &options.device, &error), &error);
    assert_ok(sp_ops_create(&sp_cpu_op_table, &options, &ops, &error), &error);
    assert_int_equal(sp_op_step(ops, &step, pass, &in), SP_OK);
    for (int32_t row = 0; row < ROWS; row++)
        check_row(&in, (sp_cpu_ops *)ops, row);
    sp_ops_destroy(ops);
    sp_device_close(options.device);
}

static void heads_are_split_rotated_and_gated(void **state)
{
    (void)state;
    for (const char *const *level = sp_kernels_levels(); *level; level++)
        for (int i = 0; i < 4; i++)
            check(*level, i % 2 ? SP_DTYPE_F32 : SP_DTYPE_BF16, i / 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(heads_are_split_rotated_and_gated),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
