/*
 * bench_delta.c: `bench delta`: one call of sp_delta_apply at the groups of sites of a Qwen3 layer,
 * for ranks, rows and adapters, against the base GEMM of the same layer and against the time in
 * which the machine could read what the call must read. Needs no model: weights are made up.
 *
 * Every timed call finds its weights cold, as in a step that went through all other layers before:
 * a buffer larger than the caches is read in between. Ratios are between neighbours in time: a
 * round times the base GEMM once and every case right after it, the reading of that buffer gives
 * the machine's rate at that moment, and the median of the rounds counts.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "cli/bench.h"
#include "cli/cli.h"
#include "cli/run_settings.h"
#include "kernels/cpu/gemm.h"
#include "pool/image.h"

#include <sidepath/delta.h>

#include <stdio.h>
#include <string.h>

#define SLOTS       16 /* the most adapters of a case */
#define ROWS_MAX    64
#define TARGETS_MAX 3
#define ROUNDS_MAX  101
#define CASES_MAX   512
#define EVICT_BYTES ((size_t)128 << 20)
#define EVICT_PIECE ((size_t)1 << 20)
#define READ_LANES  16 /* independent sums, so that reads do not wait for each other */

static const int32_t ranks[] = {8, 16, 64};
static const int32_t row_counts[] = {1, 4, 16, 64};
static const int32_t adapter_counts[] = {1, 4, 16};

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* The outputs of one group that share x. */
typedef struct group {
    const char *model, *name;
    int32_t n_targets, k_in;
    const char *modules[TARGETS_MAX];
    int32_t n_out[TARGETS_MAX];
} group;

#define QKV                          \
    {                                \
        "q_proj", "k_proj", "v_proj" \
    }
#define GATE_UP                \
    {                          \
        "gate_proj", "up_proj" \
    }

static const group groups[] = {
    {"qwen3-0.6b", "qkv", 3, 1024, QKV, {2048, 1024, 1024}},
    {"qwen3-0.6b", "o", 1, 2048, {"o_proj"}, {1024}},
    {"qwen3-0.6b", "gate_up", 2, 1024, GATE_UP, {3072, 3072}},
    {"qwen3-0.6b", "down", 1, 3072, {"down_proj"}, {1024}},
    {"qwen3-8b", "qkv", 3, 4096, QKV, {4096, 1024, 1024}},
    {"qwen3-8b", "o", 1, 4096, {"o_proj"}, {4096}},
    {"qwen3-8b", "gate_up", 2, 4096, GATE_UP, {12288, 12288}},
    {"qwen3-8b", "down", 1, 12288, {"down_proj"}, {4096}},
};

typedef struct delta_settings {
    sp_run_settings run;
    const char *shapes;
    int64_t rounds, rows_max;
} delta_settings;

#define FIELD(member) offsetof(delta_settings, member)

static const sp_setting own_rows[] = {
    {"shapes", SP_SETTING_CHOICE, FIELD(shapes), "all", 0, 0, "all|qwen3-0.6b|qwen3-8b", NULL,
     "which model's layers", true},
    {"rows-max", SP_SETTING_INT, FIELD(rows_max), "64", 1, ROWS_MAX, NULL, "N",
     "leaves out the cases of more rows", true},
    {"rounds", SP_SETTING_INT, FIELD(rounds), "9", 3, ROUNDS_MAX, NULL, "N",
     "timed calls a case; the median counts", true},
};

typedef struct delta_case {
    const group *group;
    int32_t rank, rows, adapters;
    double seconds, base_seconds, ratio; /* ratio: seconds over the same round's base */
    double of_read;                      /* the time to read what it must, over seconds */
} delta_case;

/* One case's rounds at one number of rows. */
typedef struct rounds {
    size_t which; /* of ranks */
    int32_t adapters;
    double seconds[ROUNDS_MAX], ratio[ROUNDS_MAX], of_read[ROUNDS_MAX];
} rounds;

/* What belongs to one group. */
typedef struct rig {
    char paths[TARGETS_MAX][32]; /* of the sites */
    const group *group;
    uint16_t *weights[TARGETS_MAX]; /* bf16 [n_out, k_in] */
    sp_geometry *geometry;
    sp_layout *layout[COUNT(ranks)];
    sp_pool *pool[COUNT(ranks)];
    sp_slot_handle handles[COUNT(ranks)][SLOTS];
    sp_delta *delta[COUNT(ranks)];
    sp_plan *plan;
} rig;

typedef struct delta_bench {
    delta_settings settings;
    const sp_kernels *kernels;
    sp_exec *exec;
    sp_device *device;
    uint16_t *x;              /* bf16 [ROWS_MAX, widest k_in] */
    uint16_t *y[TARGETS_MAX]; /* bf16 [ROWS_MAX, widest n_out] */
    void *packed;
    uint64_t *evict; /* [EVICT_BYTES] */
    uint64_t evict_sums[EVICT_BYTES / EVICT_PIECE];
    double read_rate; /* bytes per second of the last eviction */
    double read_rate_best;
    rounds rounds[COUNT(ranks) * COUNT(adapter_counts)];
    delta_case cases[CASES_MAX];
    size_t n_cases;
} delta_bench;

enum { WIDEST = 12288 };

/* ---- memory -------------------------------------------------------------------------------- */

/* Small bf16 numbers of both signs: sums stay finite, denormals do not occur. */
static void fill(uint16_t *values, size_t n)
{
    uint32_t state = 1;

    for (size_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        values[i] = (uint16_t)(0x3c00u | (state >> 16 & 0x80ffu));
    }
}

static uint16_t *make_values(size_t n)
{
    uint16_t *values = sp_aligned_calloc(n * sizeof *values, 256);

    if (values)
        fill(values, n);
    return values;
}

static sp_status create_bench(delta_bench *bench, sp_error *error)
{
    sp_exec_options exec_options;
    bool complete = true;
    sp_status status = sp_kernels_get(bench->settings.run.cpu_isa, &bench->kernels, error);

    if (status != SP_OK)
        return status;
    sp_exec_options_default(&exec_options, sizeof exec_options);
    exec_options.threads = bench->settings.run.options.threads;
    status = sp_exec_create(&exec_options, &bench->exec, error);
    if (status == SP_OK)
        status = sp_device_open("cpu", NULL, &bench->device, error);
    if (status != SP_OK)
        return status;
    bench->x = make_values((size_t)ROWS_MAX * WIDEST);
    for (int32_t t = 0; t < TARGETS_MAX; t++) {
        bench->y[t] = make_values((size_t)ROWS_MAX * WIDEST);
        complete = complete && bench->y[t];
    }
    bench->packed = sp_aligned_calloc(
        bench->kernels->x_pack_bytes(SP_DTYPE_BF16, SP_DTYPE_BF16, ROWS_MAX, WIDEST), 256);
    bench->evict = sp_aligned_calloc(EVICT_BYTES, 4096);
    if (!complete || !bench->x || !bench->packed || !bench->evict)
        return sp_fail_memory(error, EVICT_BYTES, "the benchmark");
    memset(bench->evict, 1, EVICT_BYTES);
    return sp_bench_read_bandwidth(bench->settings.run.options.threads, &bench->read_rate_best,
                                   error);
}

static void destroy_bench(delta_bench *bench)
{
    sp_aligned_free(bench->evict);
    sp_aligned_free(bench->packed);
    for (int32_t t = 0; t < TARGETS_MAX; t++)
        sp_aligned_free(bench->y[t]);
    sp_aligned_free(bench->x);
    sp_device_close(bench->device);
    sp_exec_destroy(bench->exec);
}

/* ---- the rig of one group ------------------------------------------------------------------ */

/* SLOTS adapters of this rank, each with all sites of the group. */
static sp_status load_adapters(rig *r, size_t which, sp_error *error)
{
    const group *g = r->group;
    sp_adapter_site sites[TARGETS_MAX];
    uint16_t *values = make_values((size_t)ranks[which] * WIDEST);
    sp_status status = SP_OK;

    if (!values)
        return sp_fail_memory(error, (size_t)ranks[which] * WIDEST * 2, "an adapter");
    for (int32_t t = 0; t < g->n_targets; t++)
        sites[t] = (sp_adapter_site){
            .struct_bytes = sizeof sites[t],
            .site = t,
            .path = r->paths[t],
            .module = g->modules[t],
            .expert = -1,
            .rank = ranks[which],
            .scale = 0.5f,
            .a = {values, SP_DTYPE_BF16, ranks[which], g->k_in, g->k_in, 1},
            .b = {values, SP_DTYPE_BF16, g->n_out[t], ranks[which], ranks[which], 1},
        };
    for (int32_t s = 0; s < SLOTS && status == SP_OK; s++) {
        sp_digest digest = {{(uint8_t)(s + 1)}};
        sp_image *image = NULL;

        status = sp_layout_pack_sites(r->layout[which], sites, (size_t)g->n_targets, &digest, NULL,
                                      &image, error);
        if (status == SP_OK)
            status = sp_pool_load(r->pool[which], image, &r->handles[which][s], error);
        sp_image_destroy(image);
    }
    sp_aligned_free(values);
    return status;
}

static sp_status create_rank(const delta_bench *bench, rig *r, size_t which, sp_error *error)
{
    sp_layout_options layout;
    sp_pool_options pool;
    sp_delta_options delta;
    sp_status status;

    sp_layout_options_default(&layout, sizeof layout);
    layout.geometry = r->geometry;
    layout.rank = ranks[which];
    status = sp_layout_create(&layout, &r->layout[which], error);
    if (status != SP_OK)
        return status;
    sp_pool_options_default(&pool, sizeof pool);
    pool.layout = r->layout[which];
    pool.device = bench->device;
    pool.slots = SLOTS;
    status = sp_pool_create(&pool, &r->pool[which], error);
    if (status != SP_OK)
        return status;
    sp_delta_options_default(&delta, sizeof delta);
    delta.pool = r->pool[which];
    delta.exec = bench->exec;
    delta.rows_max = ROWS_MAX;
    delta.cpu_isa = bench->settings.run.cpu_isa;
    status = sp_delta_create(&delta, &r->delta[which], error);
    return status == SP_OK ? load_adapters(r, which, error) : status;
}

static void destroy_rig(rig *r)
{
    for (size_t i = 0; i < COUNT(ranks); i++) {
        sp_delta_destroy(r->delta[i]);
        sp_pool_destroy(r->pool[i]);
        sp_layout_release(r->layout[i]);
    }
    sp_plan_destroy(r->plan);
    sp_geometry_release(r->geometry);
    for (int32_t t = 0; t < TARGETS_MAX; t++)
        sp_aligned_free(r->weights[t]);
}

static sp_status create_rig(const delta_bench *bench, const group *g, rig *r, sp_error *error)
{
    sp_site sites[TARGETS_MAX];
    sp_status status = SP_OK;

    *r = (rig){.group = g};
    for (int32_t t = 0; t < g->n_targets; t++) {
        snprintf(r->paths[t], sizeof r->paths[t], "layers.0.%s", g->modules[t]);
        sites[t] = (sp_site){.struct_bytes = sizeof sites[t],
                             .path = r->paths[t],
                             .expert = -1,
                             .k_in = g->k_in,
                             .n_out = g->n_out[t]};
        r->weights[t] = make_values((size_t)g->n_out[t] * (size_t)g->k_in);
        if (!r->weights[t])
            return sp_fail_memory(error, (size_t)g->n_out[t] * (size_t)g->k_in * 2, "a layer");
    }
    status = sp_geometry_create(sites, (size_t)g->n_targets, &r->geometry, error);
    if (status == SP_OK)
        status = sp_plan_create(ROWS_MAX, SLOTS, &r->plan, error);
    for (size_t i = 0; i < COUNT(ranks) && status == SP_OK; i++)
        status = create_rank(bench, r, i, error);
    return status;
}

/* ---- timing -------------------------------------------------------------------------------- */

static void evict_task(void *user, int32_t task, int32_t thread)
{
    delta_bench *bench = user;
    const uint64_t *data = bench->evict + (size_t)task * (EVICT_PIECE / sizeof(uint64_t));
    uint64_t lanes[READ_LANES] = {0}, sum = 0;

    (void)thread;
    for (size_t i = 0; i < EVICT_PIECE / sizeof(uint64_t); i += READ_LANES)
        for (size_t lane = 0; lane < READ_LANES; lane++)
            lanes[lane] += data[i + lane];
    for (size_t lane = 0; lane < READ_LANES; lane++)
        sum += lanes[lane];
    bench->evict_sums[task] = sum; /* kept, so that no read can be left out */
}

static void evict(delta_bench *bench)
{
    double began = sp_clock_seconds();

    sp_exec_run(bench->exec, evict_task, bench, (int32_t)(EVICT_BYTES / EVICT_PIECE));
    bench->read_rate = (double)EVICT_BYTES / (sp_clock_seconds() - began);
    if (bench->read_rate > bench->read_rate_best)
        bench->read_rate_best = bench->read_rate;
}

static double time_base(delta_bench *bench, const rig *r, int32_t n_rows)
{
    sp_gemm_args gemms[TARGETS_MAX];
    double began;

    for (int32_t t = 0; t < r->group->n_targets; t++)
        gemms[t] = (sp_gemm_args){
            .packed_x = bench->packed,
            .x_type = SP_DTYPE_BF16,
            .w_type = SP_DTYPE_BF16,
            .y_type = SP_DTYPE_BF16,
            .delta_type = SP_DTYPE_BF16,
            .rows = n_rows,
            .n = r->group->n_out[t],
            .k = r->group->k_in,
            .w = r->weights[t],
            .w_stride = r->group->k_in,
            .y = bench->y[t],
            .y_stride = r->group->n_out[t],
        };
    evict(bench);
    began = sp_clock_seconds();
    sp_gemm_pack(bench->kernels, bench->exec, bench->packed, SP_DTYPE_BF16, SP_DTYPE_BF16, bench->x,
                 r->group->k_in, NULL, n_rows, r->group->k_in);
    sp_gemm_run(bench->kernels, bench->exec, gemms, r->group->n_targets);
    return sp_clock_seconds() - began;
}

static sp_status time_delta(delta_bench *bench, const rig *r, size_t which, double *out_seconds)
{
    sp_delta_output outputs[TARGETS_MAX];
    const sp_delta_call call = {
        .struct_bytes = sizeof call,
        .plan = r->plan,
        .x = bench->x,
        .x_stride = r->group->k_in,
        .x_type = SP_DTYPE_BF16,
        .outputs = outputs,
        .n_outputs = r->group->n_targets,
    };
    sp_status status;
    double began;

    for (int32_t t = 0; t < r->group->n_targets; t++)
        outputs[t] =
            (sp_delta_output){sizeof *outputs, t, bench->y[t], r->group->n_out[t], SP_DTYPE_BF16};
    evict(bench);
    began = sp_clock_seconds();
    status = sp_delta_apply(r->delta[which], &call, NULL);
    *out_seconds = sp_clock_seconds() - began;
    return status;
}

/* What the call must move: A and B of its adapters, x, and y twice. */
static double bytes_moved(const group *g, int32_t rank, int32_t n_rows, int32_t adapters)
{
    double n_out = 0;

    for (int32_t t = 0; t < g->n_targets; t++)
        n_out += g->n_out[t];
    return 2.0 * ((double)adapters * rank * (g->n_targets * (double)g->k_in + n_out) +
                  (double)n_rows * (g->k_in + 2 * n_out));
}

static sp_status run_once(delta_bench *bench, const rig *r, int32_t n_rows, double base_seconds,
                          rounds *c, int64_t round, sp_error *error)
{
    sp_route_span spans[ROWS_MAX];
    double seconds = 0;
    sp_status status;

    for (int32_t row = 0; row < n_rows; row++)
        spans[row] = (sp_route_span){
            .struct_bytes = sizeof spans[row],
            .handle = r->handles[c->which][row % c->adapters],
            .n_rows = 1,
            .scale = 1,
        };
    status = sp_plan_build(r->plan, r->pool[c->which], spans, n_rows, n_rows, error);
    if (status != SP_OK)
        return status;
    status = time_delta(bench, r, c->which, &seconds);
    if (status != SP_OK)
        return sp_fail(error, status, NULL, NULL, -1, "applying a delta failed");
    if (round < 0)
        return SP_OK;
    c->seconds[round] = seconds;
    c->ratio[round] = seconds / base_seconds;
    c->of_read[round] =
        bytes_moved(r->group, ranks[c->which], n_rows, c->adapters) / bench->read_rate / seconds;
    return SP_OK;
}

/* All cases of one number of rows; the first round warms up. */
static sp_status run_rows(delta_bench *bench, const rig *r, int32_t n_rows, sp_error *error)
{
    size_t n_rounds = (size_t)bench->settings.rounds, n = 0;
    double base[ROUNDS_MAX], base_seconds;
    sp_status status = SP_OK;

    for (size_t which = 0; which < COUNT(ranks); which++)
        for (size_t a = 0; a < COUNT(adapter_counts); a++)
            if (adapter_counts[a] <= n_rows) {
                bench->rounds[n].which = which;
                bench->rounds[n++].adapters = adapter_counts[a];
            }
    for (int64_t round = -1; round < (int64_t)n_rounds; round++) {
        base_seconds = time_base(bench, r, n_rows);
        base[round < 0 ? 0 : round] = base_seconds;
        for (size_t i = 0; i < n && status == SP_OK; i++)
            status = run_once(bench, r, n_rows, base_seconds, &bench->rounds[i], round, error);
    }
    base_seconds = sp_bench_median(base, n_rounds);
    for (size_t i = 0; i < n && status == SP_OK; i++) {
        rounds *c = &bench->rounds[i];

        bench->cases[bench->n_cases++] = (delta_case){
            .group = r->group,
            .rank = ranks[c->which],
            .rows = n_rows,
            .adapters = c->adapters,
            .seconds = sp_bench_median(c->seconds, n_rounds),
            .base_seconds = base_seconds,
            .ratio = sp_bench_median(c->ratio, n_rounds),
            .of_read = sp_bench_median(c->of_read, n_rounds),
        };
    }
    return status;
}

static sp_status run_groups(delta_bench *bench, sp_error *error)
{
    sp_status status = SP_OK;

    for (size_t i = 0; i < COUNT(groups) && status == SP_OK; i++) {
        const char *wanted = bench->settings.shapes;
        rig r;

        if (strcmp(wanted, "all") != 0 && strcmp(wanted, groups[i].model) != 0)
            continue;
        status = create_rig(bench, &groups[i], &r, error);
        for (size_t n = 0; n < COUNT(row_counts) && status == SP_OK; n++)
            if (row_counts[n] <= bench->settings.rows_max)
                status = run_rows(bench, &r, row_counts[n], error);
        destroy_rig(&r);
    }
    return status;
}

/* ---- the verb ------------------------------------------------------------------------------ */

static void print_json(const delta_bench *bench)
{
    fputs("{\"bench\": \"delta\", \"cases\": [", stdout);
    for (size_t i = 0; i < bench->n_cases; i++) {
        const delta_case *c = &bench->cases[i];

        printf("%s{\"shape\": \"%s\", \"group\": \"%s\", \"rank\": %d, \"rows\": %d, "
               "\"adapters\": %d, \"seconds\": %.6g, \"ratio\": %.4g, \"against\": \"the base GEMM "
               "of the group\", \"base_seconds\": %.6g, \"of_read_limit\": %.4g}",
               i ? ", " : "", c->group->model, c->group->name, (int)c->rank, (int)c->rows,
               (int)c->adapters, c->seconds, c->ratio, c->base_seconds, c->of_read);
    }
    printf("], \"read_bytes_per_second\": %.6g, \"cpu_isa\": \"%s\", \"threads\": %d, ",
           bench->read_rate_best, bench->kernels->level, (int)sp_exec_threads(bench->exec));
    sp_bench_print_machine(stdout);
    puts("}");
}

static void print_text(const delta_bench *bench)
{
    printf("streaming read %.2f GB/s, level %s, %d threads\n", bench->read_rate_best / 1e9,
           bench->kernels->level, (int)sp_exec_threads(bench->exec));
    printf("%-10s %-8s %5s %5s %9s %10s %10s %10s %14s\n", "shape", "group", "rank", "rows",
           "adapters", "us", "base us", "of base", "of read limit");
    for (size_t i = 0; i < bench->n_cases; i++) {
        const delta_case *c = &bench->cases[i];

        printf("%-10s %-8s %5d %5d %9d %10.1f %10.1f %9.1f%% %13.1f%%\n", c->group->model,
               c->group->name, (int)c->rank, (int)c->rows, (int)c->adapters, c->seconds * 1e6,
               c->base_seconds * 1e6, c->ratio * 100, c->of_read * 100);
    }
}

static int run_bench(void *memory)
{
    delta_bench *bench = memory;
    sp_error error;
    sp_status status = create_bench(bench, &error);

    if (status == SP_OK)
        status = run_groups(bench, &error);
    if (status != SP_OK)
        return sp_cli_fail("bench", &error);
    if (bench->settings.run.json)
        print_json(bench);
    else
        print_text(bench);
    return SP_EXIT_DONE;
}

static void close_delta_bench(void *memory)
{
    destroy_bench(memory);
}

int sp_bench_delta(int argc, char **argv)
{
    static const sp_bench_verb verb = {
        .usage = "usage: sidepath bench delta [FLAGS]\n",
        .uses = SP_OPTION_OF_KERNELS | SP_SETTING_OF_OUTPUT,
        .rows = own_rows,
        .n_rows = COUNT(own_rows),
        .bytes = sizeof(delta_bench),
        .run = run_bench,
        .close = close_delta_bench,
    };

    return sp_bench_main(&verb, argc, argv);
}
