/*
 * bench_attention.c: attention on the CPU at several levels in turn, 8 key heads of 128 and two
 * query heads of each (the 0.6B shape) or `--group` of them, one layer.
 *
 *     bench_attention [--threads N] [--repeats N] [--item-rows N] [--group N] [--decode 0|1]
 *                     [--commit TEXT]
 *
 * A prefill of N rows is N / 512 steps of 512 rows, as the engine takes them; a decode step has one
 * row of each sequence. Keys, values and queries are random BF16. A repeat runs every level once,
 * so that ratios are between neighbours in time. Prints one line of JSON for each case and level;
 * medians count. `of_tiles` is the share of what products of tiles that stay in their registers
 * reach with the same threads, 2 operations a multiply-add, keys after a row's own left out.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "base/half.h"
#include "bench/bench_machine.h"
#include "engine/ops/cpu_ops.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { KV_HEADS = 8, GROUP_MAX = 16, DIM = 128, PAGE = 16, STEP_ROWS = 512, KEYS_MAX = 8192 };
enum { PAGES = KEYS_MAX / PAGE, LEVELS_MAX = 4 };

#define REPEATS_MAX 101

typedef struct bench_case {
    const char *kind;
    int32_t sequences, rows, context; /* rows of each sequence, after `context` positions */
} bench_case;

static const bench_case cases[] = {{"prefill", 1, 512, 0},  {"prefill", 1, 2048, 0},
                                   {"prefill", 1, 8192, 0}, {"verify", 16, 5, 2043},
                                   {"decode", 1, 1, 8191},  {"decode", 16, 1, 511},
                                   {"decode", 16, 1, 2047}};
#define N_CASES (sizeof cases / sizeof *cases)

typedef struct bench {
    const char *commit;
    int32_t threads, repeats, item_rows;
    int32_t group, width; /* query heads of a key head; elements of a row */
    int32_t decode;       /* 1: those cases alone */
    sp_exec *exec;
    const sp_kernels *levels[LEVELS_MAX];
    int n_levels;
    uint16_t *k, *v, *q, *out; /* one sequence's; all sequences of a decode step have pages of it */
    int32_t pages[PAGES];
    float *scratch;
    size_t scratch_floats; /* per thread */
} bench;

/* Rows [first, first + n) of every sequence. */
typedef struct bench_step {
    const bench *b;
    const sp_kernels *kernels;
    int32_t first, n, items; /* items of one sequence */
} bench_step;

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

static void fill_random(uint16_t *values, size_t n, uint64_t seed, float size)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t bits = (i * 0x9e3779b97f4a7c15u + seed) * 0xbf58476d1ce4e5b9u;

        values[i] = sp_f32_to_bf16((float)(int32_t)(bits >> 32) * 0x1p-31f * size);
    }
}

static bool make_memory(bench *b)
{
    size_t cache = (size_t)KEYS_MAX * KV_HEADS * DIM, rows = 2 * STEP_ROWS * (size_t)b->width;

    for (int i = 0; i < b->n_levels; i++) {
        size_t floats = b->levels[i]->attention_scratch_floats(b->group, DIM);

        b->scratch_floats = floats > b->scratch_floats ? floats : b->scratch_floats;
    }
    b->k = sp_aligned_malloc(cache * 2, 4096);
    b->v = sp_aligned_malloc(cache * 2, 4096);
    b->q = sp_aligned_malloc(rows * 2, 4096);
    b->out = sp_aligned_malloc(rows * 2, 4096);
    b->scratch = sp_aligned_malloc(b->scratch_floats * 4 * (size_t)b->threads, 4096);
    if (!b->k || !b->v || !b->q || !b->out || !b->scratch)
        return false;
    fill_random(b->k, cache, 1, 2.0f);
    fill_random(b->v, cache, 2, 1.0f);
    fill_random(b->q, rows, 3, 2.0f);
    for (int32_t i = 0; i < PAGES; i++)
        b->pages[i] = (i * 37) % PAGES;
    return true;
}

/* ---- a step -------------------------------------------------------------------------------- */

static void attention_task(void *user, int32_t task, int32_t thread)
{
    const bench_step *step = user;
    const bench *b = step->b;
    int32_t head = task % KV_HEADS, item = task / KV_HEADS % step->items;
    int32_t sequence = task / KV_HEADS / step->items, row = item * b->item_rows;
    int32_t left = step->n - row;
    int64_t at = ((int64_t)sequence * step->n + (step->first + row) % STEP_ROWS) * b->width +
                 head * b->group * DIM;
    const sp_attention_args args = {
        .type = SP_DTYPE_BF16,
        .n_rows = left < b->item_rows ? left : b->item_rows,
        .first_position = step->first + row,
        .group = b->group,
        .head_dim = DIM,
        .kv_heads = KV_HEADS,
        .kv_head = head,
        .page_tokens = PAGE,
        .scale = 0.08838834764f,
        .q = b->q + at,
        .q_stride = b->width,
        .out = b->out + at,
        .out_stride = b->width,
        .k_cache = b->k,
        .v_cache = b->v,
        .pages = b->pages,
        .scratch = b->scratch + (size_t)thread * b->scratch_floats,
    };

    step->kernels->attention(&args);
}

/* Seconds of the whole case. */
static double run_case(const bench *b, const sp_kernels *kernels, const bench_case *c)
{
    double began = sp_clock_seconds();

    for (int32_t first = 0; first < c->rows; first += STEP_ROWS) {
        int32_t n = c->rows - first < STEP_ROWS ? c->rows - first : STEP_ROWS;
        bench_step step = {b, kernels, c->context + first, n,
                           (n + b->item_rows - 1) / b->item_rows};

        sp_exec_run(b->exec, attention_task, &step, c->sequences * step.items * KV_HEADS);
    }
    return sp_clock_seconds() - began;
}

static double operations(const bench *b, const bench_case *c)
{
    double keys = 0;

    for (int32_t i = 0; i < c->rows; i++)
        keys += c->context + i + 1;
    return 4.0 * b->width * keys * c->sequences;
}

static void measure(const bench *b, const bench_case *c, bool last)
{
    static double seconds[LEVELS_MAX][REPEATS_MAX], ratios[LEVELS_MAX][REPEATS_MAX];
    static double tiles[REPEATS_MAX];
    double tile_rate;

    for (int32_t i = -1; i < b->repeats; i++) { /* the first one warms up */
        double rate = sp_bench_tile_rate(b->exec), base = 0;

        for (int l = 0; l < b->n_levels; l++) {
            double took = run_case(b, b->levels[l], c);

            base = l == 0 ? took : base;
            if (i < 0)
                continue;
            seconds[l][i] = took;
            ratios[l][i] = base / took;
            tiles[i] = rate;
        }
    }
    tile_rate = median(tiles, b->repeats);
    for (int l = 0; l < b->n_levels; l++) {
        double time_s = median(seconds[l], b->repeats);

        printf("    {\"kind\": \"%s\", \"sequences\": %d, \"rows\": %d, \"context\": %d, "
               "\"level\": \"%s\", \"milliseconds\": %.4f, \"best_milliseconds\": %.4f, "
               "\"gflop_per_s\": %.1f, \"of_tiles\": %.3f, \"over_first\": %.3f}%s\n",
               c->kind, (int)c->sequences, (int)c->rows, (int)c->context, b->levels[l]->level,
               time_s * 1e3, seconds[l][0] * 1e3, operations(b, c) / time_s * 1e-9,
               tile_rate > 0 ? operations(b, c) / time_s / tile_rate : 0.0,
               median(ratios[l], b->repeats), last && l + 1 == b->n_levels ? "" : ",");
    }
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
        else if (strcmp(argv[i], "--item-rows") == 0)
            b->item_rows = (int32_t)strtol(value, NULL, 10);
        else if (strcmp(argv[i], "--group") == 0)
            b->group = (int32_t)strtol(value, NULL, 10);
        else if (strcmp(argv[i], "--decode") == 0)
            b->decode = (int32_t)strtol(value, NULL, 10);
        else if (strcmp(argv[i], "--commit") == 0)
            b->commit = value;
        else
            return false;
    }
    b->width = KV_HEADS * b->group * DIM;
    return b->repeats >= 1 && b->repeats <= REPEATS_MAX && b->threads >= 1 && b->item_rows >= 1 &&
           b->group >= 1 && b->group <= GROUP_MAX;
}

int main(int argc, char **argv)
{
    static bench b = {.commit = "unknown",
                      .threads = 1,
                      .repeats = 7,
                      .item_rows = SP_ATTENTION_ROWS,
                      .group = 2};
    static const char *const names[] = {"avx512", "amx"};
    sp_exec_options options;
    char processor[128];

    if (!parse(&b, argc, argv)) {
        (void)fprintf(stderr, "usage: bench_attention [--threads N] [--repeats N] [--item-rows N] "
                              "[--group N] [--decode 0|1] [--commit TEXT]\n");
        return 2;
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (sp_kernels_get(names[i], &b.levels[b.n_levels], NULL) == SP_OK)
            b.n_levels++;
    sp_exec_options_default(&options, sizeof options);
    options.threads = b.threads;
    if (b.n_levels == 0 || !make_memory(&b) || sp_exec_create(&options, &b.exec, NULL) != SP_OK) {
        (void)fprintf(stderr, "bench_attention: no level of AVX-512, no memory or no threads\n");
        return 1;
    }
    sp_bench_processor_name(processor, sizeof processor);
    printf("{\n  \"bench\": \"attention\",\n  \"commit\": \"%s\",\n  \"machine\": {\"processor\": "
           "\"%s\", \"threads\": %d},\n  \"item_rows\": %d,\n  \"group\": %d,\n  "
           "\"cases\": [\n",
           b.commit, processor, (int)b.threads, (int)b.item_rows, (int)b.group);
    for (size_t c = 0; c < N_CASES; c++)
        if (!b.decode || strcmp(cases[c].kind, "decode") == 0)
            measure(&b, &cases[c], c + 1 == N_CASES);
    printf("  ]\n}\n");
    sp_exec_destroy(b.exec);
    sp_aligned_free(b.scratch);
    sp_aligned_free(b.out);
    sp_aligned_free(b.q);
    sp_aligned_free(b.v);
    sp_aligned_free(b.k);
    return 0;
}
