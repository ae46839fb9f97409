/*
 * bench_experts.c: the experts of Qwen3-30B-A3B-shaped layers on the CPU: router, choice and the
 * experts themselves, without attention.
 *
 *     bench_experts [--layers N] [--threads N] [--repeats N] [--isa LEVEL] [--commit TEXT]
 *
 * Rows are random, and so is where they go. The ratio is against the time that a plain read of the
 * touched experts takes at the rate of the same threads over the same memory in the same run.
 * Prints one JSON object; medians count.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "bench/bench_machine.h"
#include "engine/ops/cpu_ops.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EXPERTS = 128, CHOSEN = 8, HIDDEN = 2048, INNER = 768, VOCAB = 4096, ROWS_MAX = 512 };
enum { X, LOGITS, Y, N_ACTIVATIONS };

#define MATRIX      ((size_t)HIDDEN * INNER)
#define LAYERS_MAX  48
#define REPEATS_MAX 1001
#define PAGE        4096

static const int32_t row_counts[] = {1, 4, 16, 64, 512};
#define N_COUNTS (sizeof row_counts / sizeof *row_counts)

typedef struct settings {
    const char *isa, *commit;
    int32_t layers, threads, repeats;
} settings;

typedef struct bench {
    settings s;
    uint16_t *weights; /* [layers, EXPERTS, 3, MATRIX] gate, up, down */
    uint16_t *routers; /* [layers, EXPERTS, HIDDEN] */
    uint16_t *table;   /* [VOCAB, HIDDEN] */
    sp_linear maps[LAYERS_MAX][3][EXPERTS], router_maps[LAYERS_MAX];
    sp_experts experts[LAYERS_MAX];
    sp_weight embed;
    sp_exec *exec;
    sp_device *device;
    sp_ops *ops;
    int64_t touched; /* experts of the last pass */
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
    (void)fprintf(stderr, "bench_experts: %s: %s\n", what, error ? error->text : "out of memory");
    return 1;
}

/* ---- weights ------------------------------------------------------------------------------- */

/* BF16 of both signs from 2^-6 up to 2^-5: near 1 / sqrt(HIDDEN). */
static void fill(uint16_t *to, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t bits = (seed + i) * UINT64_C(0x9e3779b97f4a7c15);

        to[i] = (uint16_t)(0x3c80 + (bits >> 40 & 0x7f) + (bits >> 63 << 15));
    }
}

static sp_linear map_of(const uint16_t *data, int32_t rows, int32_t columns)
{
    const sp_weight weight = {SP_DTYPE_BF16, rows, columns, data, data};

    return (sp_linear){.weight = weight};
}

static bool make_weights(bench *b)
{
    size_t layer = 3 * EXPERTS * MATRIX, layers = (size_t)b->s.layers;

    b->weights = sp_aligned_malloc(layers * layer * sizeof(uint16_t), PAGE);
    b->routers = sp_aligned_malloc(layers * EXPERTS * HIDDEN * sizeof(uint16_t), PAGE);
    b->table = sp_aligned_malloc((size_t)VOCAB * HIDDEN * sizeof(uint16_t), PAGE);
    if (!b->weights || !b->routers || !b->table)
        return false;
    fill(b->weights, layers * layer, 1);
    fill(b->routers, layers * EXPERTS * HIDDEN, 2);
    fill(b->table, (size_t)VOCAB * HIDDEN, 3);
    b->embed = map_of(b->table, VOCAB, HIDDEN).weight;
    for (size_t l = 0; l < layers; l++) {
        b->router_maps[l] = map_of(b->routers + l * EXPERTS * HIDDEN, EXPERTS, HIDDEN);
        for (size_t e = 0; e < EXPERTS; e++)
            for (size_t m = 0; m < 3; m++)
                b->maps[l][m][e] = map_of(b->weights + l * layer + (3 * e + m) * MATRIX,
                                          m < 2 ? INNER : HIDDEN, m < 2 ? HIDDEN : INNER);
        b->experts[l] = (sp_experts){EXPERTS, b->maps[l][0], b->maps[l][1], b->maps[l][2]};
    }
    return true;
}

static sp_status open_ops(bench *b, sp_error *error)
{
    static const int32_t widths[] = {HIDDEN, EXPERTS, HIDDEN};
    sp_exec_options exec_options;
    sp_ops_options options = {
        .type = SP_DTYPE_BF16,
        .slots = 1,
        .rows_max = ROWS_MAX,
        .spans_max = 1,
        .hidden = HIDDEN,
        .vocab = VOCAB,
        .widths = widths,
        .n_widths = N_ACTIVATIONS,
        .fp32_rows = SP_ROWS_BIT(LOGITS),
        .attention = {.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 16, .scale = 1},
        .moe = {EXPERTS, CHOSEN, INNER, ROWS_MAX, b->s.layers},
        .rope = {.theta = 10000, .n_rot = 8, .positions = 16},
        .kv_pages = 1,
        .page_tokens = 16,
    };
    sp_status status;

    sp_exec_options_default(&exec_options, sizeof exec_options);
    exec_options.threads = b->s.threads;
    status = sp_exec_create(&exec_options, &b->exec, error);
    if (status == SP_OK)
        status = sp_device_open("cpu", NULL, &b->device, error);
    if (status == SP_OK)
        status = sp_kernels_get(b->s.isa, &options.kernels, error);
    options.exec = b->exec;
    options.device = b->device;
    return status == SP_OK ? sp_ops_create(&sp_cpu_op_table, &options, &b->ops, error) : status;
}

/* ---- cases --------------------------------------------------------------------------------- */

static void pass(void *user, sp_ops *ops)
{
    bench *b = user;

    b->touched = 0;
    sp_op_embed(ops, &b->embed, X);
    for (int32_t l = 0; l < b->s.layers; l++) {
        const sp_projection router = {&b->router_maps[l], LOGITS};

        sp_op_linear(ops, X, &router, 1);
        sp_op_route(ops, LOGITS, true);
        sp_op_experts(ops, X, &b->experts[l], Y);
        b->touched += ((sp_cpu_ops *)ops)->experts.n_active;
    }
}

static sp_status run_case(bench *b, int32_t rows, bool last)
{
    static int32_t tokens[ROWS_MAX];
    double seconds[REPEATS_MAX], ratios[REPEATS_MAX], rates[REPEATS_MAX];
    size_t all = (size_t)b->s.layers * 3 * EXPERTS * MATRIX * sizeof(uint16_t);
    const int32_t page = 0;
    const sp_step_span span = {.tokens = tokens, .pages = &page, .n_rows = rows};
    const sp_step step = {.spans = &span, .n_spans = 1, .n_rows = rows};
    double bytes = 0, spent;

    for (int32_t i = -1; i < b->s.repeats; i++) {
        sp_status status;
        double began;

        for (int32_t t = 0; t < rows; t++)
            tokens[t] = (int32_t)(((int64_t)(i + 1) * rows + t) * 1031 % VOCAB);
        began = sp_clock_seconds();
        status = sp_op_step(b->ops, &step, pass, b);
        if (status != SP_OK)
            return status;
        if (i < 0)
            continue;
        seconds[i] = sp_clock_seconds() - began;
        rates[i] = sp_bench_read_rate(b->exec, b->weights, all);
        bytes = (double)b->touched * 3 * MATRIX * sizeof(uint16_t);
        ratios[i] = bytes / rates[i] / seconds[i];
    }
    spent = median(seconds, b->s.repeats);
    printf("    {\"rows\": %d, \"seconds\": %.6f, \"rows_per_second\": %.1f, \"touched\": %.1f, "
           "\"bytes\": %.0f, \"read_ratio\": %.3f, \"flops\": %.4g, \"read_rate\": %.4g}%s\n",
           (int)rows, spent, rows / spent, (double)b->touched / b->s.layers, bytes,
           median(ratios, b->s.repeats),
           (double)rows * CHOSEN * 6 * (double)MATRIX * b->s.layers / spent,
           median(rates, b->s.repeats), last ? "" : ",");
    return SP_OK;
}

static int run(bench *b)
{
    sp_error error = {0};

    if (!make_weights(b))
        return fail("weights", NULL);
    if (open_ops(b, &error) != SP_OK)
        return fail("opening", &error);
    for (size_t c = 0; c < N_COUNTS; c++)
        if (run_case(b, row_counts[c], c + 1 == N_COUNTS) != SP_OK)
            return fail("a step", NULL);
    return 0;
}

/* ---- command line -------------------------------------------------------------------------- */

static bool parse(settings *s, int argc, char **argv)
{
    for (int i = 1; i < argc; i += 2) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;

        if (!value)
            return false;
        if (strcmp(argv[i], "--repeats") == 0)
            s->repeats = (int32_t)strtol(value, NULL, 10);
        else if (strcmp(argv[i], "--threads") == 0)
            s->threads = (int32_t)strtol(value, NULL, 10);
        else if (strcmp(argv[i], "--layers") == 0)
            s->layers = (int32_t)strtol(value, NULL, 10);
        else if (strcmp(argv[i], "--isa") == 0)
            s->isa = value;
        else if (strcmp(argv[i], "--commit") == 0)
            s->commit = value;
        else
            return false;
    }
    return s->repeats >= 1 && s->repeats <= REPEATS_MAX && s->layers >= 1 &&
           s->layers <= LAYERS_MAX;
}

int main(int argc, char **argv)
{
    bench *b = sp_calloc(1, sizeof *b);
    char processor[128];
    int result;

    if (!b)
        return fail("starting", NULL);
    b->s = (settings){.commit = "unknown", .isa = "auto", .layers = 2, .repeats = 11};
    if (!parse(&b->s, argc, argv)) {
        (void)fprintf(stderr, "usage: bench_experts [--layers N] [--threads N] [--repeats N] "
                              "[--isa LEVEL] [--commit TEXT]\n");
        return 2;
    }
    sp_bench_processor_name(processor, sizeof processor);
    printf(
        "{\n  \"bench\": \"experts\",\n  \"commit\": \"%s\",\n  \"machine\": {\"processor\": "
        "\"%s\", \"threads\": %d},\n  \"isa\": \"%s\", \"layers\": %d,\n  \"against\": \"a plain "
        "read of the touched experts, same threads and memory\",\n  \"cases\": [\n",
        b->s.commit, processor, (int)b->s.threads, b->s.isa, (int)b->s.layers);
    result = run(b);
    printf("  ]\n}\n");
    sp_ops_destroy(b->ops);
    sp_exec_destroy(b->exec);
    sp_device_close(b->device);
    sp_aligned_free(b->table);
    sp_aligned_free(b->routers);
    sp_aligned_free(b->weights);
    sp_free(b);
    return result;
}
