/*
 * bench_delta_rule.c: the gated delta rule on the CPU at 16 key and 48 value heads of 128, decode
 * and prefill, beside the linear maps of the same layer (hidden 5120, FFN 17408).
 *
 *     bench_delta_rule [--threads N] [--repeats N] [--isa LEVEL] [--commit TEXT]
 *
 * Decode is compared with a plain read of the states at the rate of the same threads over the same
 * memory in the same run, prefill against a plain read of its inputs. A decoding sequence is in the
 * middle of a chunk. Inputs are random, and the same in every repeat. Prints one JSON object;
 * medians count. `entries` are the convolution and the norms of one row by themselves, from the
 * first-level cache on one thread, at each level.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "base/half.h"
#include "bench/bench_machine.h"
#include "engine/ops/cpu_ops.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { K_HEADS = 16, V_HEADS = 48, DIM = 128, CONV = 4, HIDDEN = 5120, INNER = 17408 };
enum { KEYS = K_HEADS * DIM, VALUES = V_HEADS * DIM, CHANNELS = 2 * KEYS + VALUES };
enum { SPANS_MAX = 32, ROWS_MAX = 512, POSITION = 31 * SP_STATE_CHUNK + SP_STATE_CHUNK / 2 };
enum { X, QKV, Z, B, A, Y, OUT, GATE, UP, N_ACTIVATIONS };
enum { IN_QKV, IN_Z, IN_B, IN_A, OUT_PROJ, GATE_PROJ, UP_PROJ, DOWN_PROJ, N_MAPS };

#define REPEATS_MAX 1001

typedef struct bench_case {
    int32_t spans, rows; /* of each span */
} bench_case;

static const bench_case cases[] = {{1, 1}, {8, 1}, {32, 1}, {8, 4}, {1, 64}, {1, 512}};
#define N_CASES (sizeof cases / sizeof *cases)

typedef struct bench {
    const char *isa, *commit;
    int32_t threads, repeats;
    uint16_t *weights;
    sp_linear maps[N_MAPS];
    sp_delta_rule rule;
    float gates[2][V_HEADS], norm[DIM];
    sp_exec *exec;
    sp_device *device;
    sp_ops *ops;
} bench;

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double median(double *values, int32_t n)
{
    qsort(values, (size_t)n, sizeof *values, compare_doubles);
    return values[n / 2];
}

static int fail(const char *what, const sp_error *error)
{
    (void)fprintf(stderr, "bench_delta_rule: %s: %s\n", what,
                  error ? error->text : "out of memory");
    return 1;
}

/* Uniform in (-1, 1). */
static float random_value(uint64_t seed)
{
    return (float)(int32_t)(seed * UINT64_C(0x9e3779b97f4a7c15) >> 32) * 0x1p-31f;
}

/* ---- weights ------------------------------------------------------------------------------- */

static const int32_t map_shapes[N_MAPS][2] = {
    [IN_QKV] = {CHANNELS, HIDDEN}, [IN_Z] = {VALUES, HIDDEN},     [IN_B] = {V_HEADS, HIDDEN},
    [IN_A] = {V_HEADS, HIDDEN},    [OUT_PROJ] = {HIDDEN, VALUES}, [GATE_PROJ] = {INNER, HIDDEN},
    [UP_PROJ] = {INNER, HIDDEN},   [DOWN_PROJ] = {HIDDEN, INNER}};

static bool make_weights(bench *b)
{
    size_t all = (size_t)CHANNELS * CONV, done = all;

    for (int m = 0; m < N_MAPS; m++)
        all += (size_t)map_shapes[m][0] * (size_t)map_shapes[m][1];
    b->weights = sp_aligned_malloc(all * sizeof *b->weights, 4096);
    if (!b->weights)
        return false;
    for (size_t i = 0; i < all; i++) /* near 1 / sqrt(HIDDEN), the convolution's near 1 / 2 */
        b->weights[i] = sp_f32_to_bf16(random_value(i) * (i < done ? 0.8f : 0.02f));
    for (int m = 0; m < N_MAPS; m++) {
        const uint16_t *data = b->weights + done;

        b->maps[m].weight =
            (sp_weight){SP_DTYPE_BF16, map_shapes[m][0], map_shapes[m][1], data, data};
        done += (size_t)map_shapes[m][0] * (size_t)map_shapes[m][1];
    }
    for (int h = 0; h < V_HEADS; h++) {
        b->gates[0][h] = random_value((uint64_t)h + 5);
        b->gates[1][h] = random_value((uint64_t)h + 99);
    }
    for (int i = 0; i < DIM; i++)
        b->norm[i] = 1.0f;
    b->rule = (sp_delta_rule){
        .conv = {SP_DTYPE_BF16, CHANNELS, CONV, b->weights, b->weights},
        .a_log = {SP_DTYPE_F32, V_HEADS, 0, b->gates[0], b->gates[0]},
        .dt_bias = {SP_DTYPE_F32, V_HEADS, 0, b->gates[1], b->gates[1]},
        .norm = {.weight = {SP_DTYPE_F32, DIM, 0, b->norm, b->norm}, .eps = 1e-6f},
    };
    return true;
}

static sp_status open_ops(bench *b, sp_error *error)
{
    static const int32_t widths[] = {HIDDEN, CHANNELS, VALUES, V_HEADS, V_HEADS,
                                     VALUES, HIDDEN,   INNER,  INNER};
    sp_exec_options exec_options;
    sp_ops_options options = {
        .type = SP_DTYPE_BF16,
        .slots = 1,
        .rows_max = ROWS_MAX,
        .spans_max = SPANS_MAX,
        .hidden = HIDDEN,
        .vocab = 16,
        .widths = widths,
        .n_widths = N_ACTIVATIONS,
        .fp32_rows = SP_ROWS_BIT(B) | SP_ROWS_BIT(A),
        .attention = {.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 16, .scale = 1},
        .delta_rule = {1, K_HEADS, V_HEADS, DIM, DIM, CONV, false, SPANS_MAX, 0},
        .rope = {.theta = 10000, .n_rot = 8, .positions = 16},
        .kv_pages = 1,
        .page_tokens = 16,
        .kv_resident = true,
    };
    sp_status status;

    sp_exec_options_default(&exec_options, sizeof exec_options);
    exec_options.threads = b->threads;
    status = sp_exec_create(&exec_options, &b->exec, error);
    if (status == SP_OK)
        status = sp_device_open("cpu", NULL, &b->device, error);
    if (status == SP_OK)
        status = sp_kernels_get(b->isa, &options.kernels, error);
    options.exec = b->exec;
    options.device = b->device;
    return status == SP_OK ? sp_ops_create(&sp_cpu_op_table, &options, &b->ops, error) : status;
}

/* Activations of random rows. */
static void fill_rows(const bench *b)
{
    const sp_cpu_ops *cpu = (const sp_cpu_ops *)b->ops;

    for (int32_t rows = X; rows <= A; rows++)
        for (int64_t i = 0; i < (int64_t)ROWS_MAX * cpu->widths[rows]; i++) {
            float value = 2.0f * random_value((uint64_t)(i * N_ACTIVATIONS + rows));

            if (cpu->types[rows] == SP_DTYPE_F32)
                ((float *)cpu->rows[rows])[i] = value;
            else
                ((uint16_t *)cpu->rows[rows])[i] = sp_f32_to_bf16(value);
        }
}

/* ---- cases --------------------------------------------------------------------------------- */

static void rule_pass(void *user, sp_ops *ops)
{
    const bench *b = user;
    const sp_delta_rule_call call = {
        .qkv = QKV, .z = Z, .b = B, .a = A, .rule = &b->rule, .layer = 0, .y = Y};

    sp_op_delta_rule(ops, &call);
}

/* Into activations that the rule does not read, but for its inputs, which are put back. */
static void maps_pass(void *user, sp_ops *ops)
{
    const bench *b = user;
    const sp_projection inputs[] = {
        {&b->maps[IN_QKV], QKV}, {&b->maps[IN_Z], Z}, {&b->maps[IN_B], B}, {&b->maps[IN_A], A}};
    const sp_projection out[] = {{&b->maps[OUT_PROJ], OUT}};
    const sp_projection gate_up[] = {{&b->maps[GATE_PROJ], GATE}, {&b->maps[UP_PROJ], UP}};
    const sp_projection down[] = {{&b->maps[DOWN_PROJ], OUT}};

    sp_op_linear(ops, X, inputs, 4);
    sp_op_linear(ops, Y, out, 1);
    sp_op_linear(ops, X, gate_up, 2);
    sp_op_linear(ops, GATE, down, 1);
}

static double time_pass(bench *b, const sp_step *step, sp_pass_fn pass, sp_status *status)
{
    double began = sp_clock_seconds();

    *status = sp_op_step(b->ops, step, pass, b);
    return sp_clock_seconds() - began;
}

static sp_status run_case(bench *b, const bench_case *c, bool last)
{
    static const int32_t tokens[ROWS_MAX], page;
    static sp_step_span spans[SPANS_MAX];
    double rule[REPEATS_MAX], maps[REPEATS_MAX], ratios[REPEATS_MAX];
    const sp_cpu_ops *cpu = (const sp_cpu_ops *)b->ops;
    bool decode = c->rows < SP_STATE_CHUNK / 2;
    size_t bytes = decode ? (size_t)c->spans * V_HEADS * DIM * DIM * sizeof(float)
                          : (size_t)c->rows * (CHANNELS + VALUES) * sizeof(uint16_t);
    const sp_step step = {.spans = spans, .n_spans = c->spans, .n_rows = c->spans * c->rows};
    sp_status status = SP_OK;

    for (int32_t s = 0; s < c->spans; s++)
        spans[s] = (sp_step_span){
            .tokens = tokens,
            .pages = &page,
            .position = decode ? POSITION : 0,
            .n_rows = c->rows,
            .state = {s, decode ? POSITION / SP_STATE_CHUNK * SP_STATE_CHUNK : 0, -1, -1,
                      decode ? 1 : c->rows},
        };
    for (int32_t i = -1; i < b->repeats && status == SP_OK; i++) {
        double of_rule, of_maps = 0, rate;

        fill_rows(b);
        of_rule = time_pass(b, &step, rule_pass, &status);
        rate =
            sp_bench_read_rate(b->exec, decode ? (const void *)cpu->states.slots : cpu->rows[QKV],
                               decode ? sp_cpu_state_bytes(&cpu->states.shape, cpu->type) / 4096 *
                                            4096 * (size_t)c->spans
                                      : (size_t)c->rows * CHANNELS * sizeof(uint16_t));
        if (status == SP_OK)
            of_maps = time_pass(b, &step, maps_pass, &status);
        if (i < 0)
            continue;
        rule[i] = of_rule;
        maps[i] = of_maps;
        ratios[i] = (double)bytes / rate / of_rule;
    }
    if (status != SP_OK)
        return status;
    printf("    {\"sequences\": %d, \"rows_each\": %d, \"rule_us\": %.1f, \"rule_us_a_row\": %.2f, "
           "\"read_bytes\": %zu, \"read_ratio\": %.3f, \"maps_us\": %.1f, \"share\": %.3f}%s\n",
           (int)c->spans, (int)c->rows, 1e6 * median(rule, b->repeats),
           1e6 * median(rule, b->repeats) / step.n_rows, bytes, median(ratios, b->repeats),
           1e6 * median(maps, b->repeats),
           median(rule, b->repeats) / (median(rule, b->repeats) + median(maps, b->repeats)),
           last ? "" : ",");
    return SP_OK;
}

/* ---- entries by themselves ----------------------------------------------------------------- */

enum { ENTRY_CONV, ENTRY_UNIT_NORM, ENTRY_GATED_NORM, N_ENTRIES };

static const char *const entry_names[N_ENTRIES] = {"conv_silu", "unit_norm", "rmsnorm_gated"};

/* One head of DIM elements, as the rule calls them. */
static void run_entry(const bench *b, const sp_kernels *kernels, int entry, uint16_t *y)
{
    const uint16_t *x = b->weights;
    const void *rows[CONV] = {x, x + DIM, x + 2 * DIM, x + 3 * DIM};

    if (entry == ENTRY_CONV)
        kernels->conv_silu(SP_DTYPE_BF16, y, rows, x + 4 * DIM, CONV, DIM);
    else if (entry == ENTRY_UNIT_NORM)
        kernels->unit_norm(SP_DTYPE_BF16, y, x, DIM, 1e-6f);
    else
        kernels->rmsnorm_gated(SP_DTYPE_BF16, y, b->norm, b->norm, x, DIM, 1e-6f);
}

static void time_entries(const bench *b)
{
    enum { CALLS = 20000, ROUNDS = 15 };
    const char *const *levels = sp_kernels_levels();
    uint16_t y[DIM];
    const char *separator = "";

    for (int entry = 0; entry < N_ENTRIES; entry++)
        for (int l = 0; levels[l]; l++) {
            const sp_kernels *kernels = NULL;
            double best = 1e9;

            (void)sp_kernels_get(levels[l], &kernels, NULL);
            for (int round = 0; round < ROUNDS; round++) {
                double began = sp_clock_seconds(), took;

                for (int call = 0; call < CALLS; call++)
                    run_entry(b, kernels, entry, y);
                took = (sp_clock_seconds() - began) / CALLS;
                best = took < best ? took : best;
            }
            printf("%s    {\"entry\": \"%s\", \"n\": %d, \"level\": \"%s\", \"best_ns\": %.1f}",
                   separator, entry_names[entry], DIM, levels[l], best * 1e9);
            separator = ",\n";
        }
    printf("\n");
}

static int run(bench *b)
{
    sp_error error = {0};

    if (!make_weights(b))
        return fail("weights", NULL);
    if (open_ops(b, &error) != SP_OK)
        return fail("opening", &error);
    for (size_t c = 0; c < N_CASES; c++)
        if (run_case(b, &cases[c], c + 1 == N_CASES) != SP_OK)
            return fail("a step", NULL);
    printf("  ],\n  \"entries\": [\n");
    time_entries(b);
    return 0;
}

/* ---- command line -------------------------------------------------------------------------- */

static bool parse(bench *b, int argc, char **argv)
{
    for (int i = 1; i < argc; i += 2) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;

        if (!value)
            return false;
        if (strcmp(argv[i], "--repeats") == 0)
            b->repeats = (int32_t)strtol(value, NULL, 10);
        else if (strcmp(argv[i], "--threads") == 0)
            b->threads = (int32_t)strtol(value, NULL, 10);
        else if (strcmp(argv[i], "--isa") == 0)
            b->isa = value;
        else if (strcmp(argv[i], "--commit") == 0)
            b->commit = value;
        else
            return false;
    }
    return b->repeats >= 1 && b->repeats <= REPEATS_MAX;
}

int main(int argc, char **argv)
{
    static bench b = {.commit = "unknown", .isa = "auto", .repeats = 11};
    char processor[128];
    int result;

    if (!parse(&b, argc, argv)) {
        (void)fprintf(stderr, "usage: bench_delta_rule [--threads N] [--repeats N] [--isa LEVEL] "
                              "[--commit TEXT]\n");
        return 2;
    }
    sp_bench_processor_name(processor, sizeof processor);
    printf(
        "{\n  \"bench\": \"delta_rule\",\n  \"commit\": \"%s\",\n  \"machine\": {\"processor\": "
        "\"%s\", \"threads\": %d},\n  \"isa\": \"%s\",\n  \"against\": \"decode: a plain read of "
        "the states; prefill: of the inputs\",\n  \"cases\": [\n",
        b.commit, processor, (int)b.threads, b.isa);
    result = run(&b);
    printf("  ]\n}\n");
    sp_ops_destroy(b.ops);
    sp_exec_destroy(b.exec);
    sp_device_close(b.device);
    sp_aligned_free(b.weights);
    return result;
}
