/*
 * bench_overlay.c: what replaced rows of embeddings and head cost.
 *
 *     bench_overlay build [--repeats N] [--commit TEXT]
 *     bench_overlay step MODEL PLAIN TRAINED [--repeats N] [--threads N] [--commit TEXT]
 *
 * `build`: an overlay from a full saved table of a 0.6B model (151,936 × 1,024), a few rows or all
 * of them different, against the rate at which one thread reads the same memory in the same run.
 * Counted are the bytes that have to move: both tables read, and every replaced row read again and
 * written.
 *
 * `step`: a decode step of 32 rows of 8 adapters in each of two engines, in turns, step by step:
 * one with the adapters PLAIN/a0 .. a7, one with TRAINED/a0 .. a7, which are the same and replace
 * rows besides (tools/make_checkpoint --trained-tokens 100). Time on the processor is given beside
 * that on the wall, for machines that others use as well. Prints one JSON object; medians count.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "base/half.h"
#include "bench/bench_machine.h"
#include "pool/overlay.h"

#include <sidepath/engine.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define VOCAB         151936
#define HIDDEN        1024
#define FEW_ROWS      100
#define N_ADAPTERS    8
#define STEP_ROWS     32
#define PROMPT_TOKENS 2
#define REPEATS_MAX   1001

typedef struct settings {
    const char *model, *plain, *trained, *commit;
    int32_t repeats, threads;
} settings;

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
    (void)fprintf(stderr, "bench_overlay: %s: %s\n", what, error ? error->text : "out of memory");
    return 1;
}

/* ---- building ------------------------------------------------------------------------------ */

typedef struct build_case {
    const char *name;
    sp_dtype dtype; /* of the adapter's table */
    int32_t n_different;
} build_case;

static const build_case build_cases[] = {
    {"bf16 table, 100 rows differ", SP_DTYPE_BF16, FEW_ROWS},
    {"bf16 table, all rows differ", SP_DTYPE_BF16, VOCAB},
    {"f32 table, 100 rows differ", SP_DTYPE_F32, FEW_ROWS},
    {"f32 table, all rows differ", SP_DTYPE_F32, VOCAB},
};

#define N_BUILD_CASES (sizeof build_cases / sizeof build_cases[0])

/* The served table, and the adapter's: the same but for n_different rows, evenly spread. */
static void fill_tables(const build_case *c, uint16_t *served, void *own)
{
    int64_t every = VOCAB / c->n_different;

    for (int64_t i = 0; i < (int64_t)VOCAB * HIDDEN; i++) {
        uint16_t value = (uint16_t)(0x3c00 + (i * 2654435761 >> 20) % 512);
        bool differs = i / HIDDEN % every == 0 && i / HIDDEN / every < c->n_different;

        served[i] = value;
        /* The last element, so that the comparison has to read all of the row. */
        if (differs && i % HIDDEN == HIDDEN - 1)
            value ^= 1;
        if (c->dtype == SP_DTYPE_BF16)
            ((uint16_t *)own)[i] = value;
        else
            ((float *)own)[i] = sp_bf16_to_f32(value);
    }
}

static int run_build_case(const build_case *c, const settings *s, sp_exec *exec, uint16_t *served,
                          void *own, bool last)
{
    sp_served_table embed = {sizeof embed, served, SP_DTYPE_BF16, VOCAB, HIDDEN, false};
    sp_adapter_table table = {.struct_bytes = sizeof table,
                              .kind = SP_SITE_EMBEDDING,
                              .full = {own, c->dtype, VOCAB, HIDDEN, HIDDEN, 1}};
    double row = HIDDEN * (double)sp_dtype_bytes(c->dtype);
    double moved = VOCAB * (row + HIDDEN * 2.0) + c->n_different * (row + HIDDEN * 2.0);
    double seconds[REPEATS_MAX], ratios[REPEATS_MAX], rates[REPEATS_MAX], rate, ratio, spent;
    sp_error error;

    fill_tables(c, served, own);
    for (int32_t i = 0; i < s->repeats; i++) {
        sp_overlay *overlay;
        double began;

        rates[i] = sp_bench_read_rate(exec, own, (size_t)VOCAB * HIDDEN * 2);
        began = sp_clock_seconds();
        if (sp_overlay_build(&table, 1, &embed, NULL, SP_DTYPE_BF16, &overlay, &error) != SP_OK)
            return fail("building", &error);
        seconds[i] = sp_clock_seconds() - began;
        ratios[i] = moved / seconds[i] / rates[i];
        if (overlay->embed.n != c->n_different)
            return fail("building", NULL);
        sp_overlay_destroy(overlay);
    }
    spent = median(seconds, s->repeats);
    rate = median(rates, s->repeats);
    ratio = median(ratios, s->repeats);
    printf(
        "    {\"case\": \"%s\", \"bytes\": %.0f, \"seconds\": %.6f, \"ratio\": %.3f, \"against\": "
        "\"reads of one thread at %.3g bytes/s\"}%s\n",
        c->name, moved, spent, ratio, rate, last ? "" : ",");
    return 0;
}

static int bench_build(const settings *s)
{
    uint16_t *served = sp_aligned_malloc((size_t)VOCAB * HIDDEN * 2, 4096);
    void *own = sp_aligned_malloc((size_t)VOCAB * HIDDEN * 4, 4096);
    sp_exec_options options;
    sp_exec *exec;
    int result = 0;

    sp_exec_options_default(&options, sizeof options);
    options.threads = 1;
    if (!served || !own || sp_exec_create(&options, &exec, NULL) != SP_OK)
        return fail("build", NULL);
    for (size_t i = 0; i < N_BUILD_CASES && result == 0; i++)
        result = run_build_case(&build_cases[i], s, exec, served, own, i + 1 == N_BUILD_CASES);
    sp_exec_destroy(exec);
    sp_aligned_free(own);
    sp_aligned_free(served);
    return result;
}

/* ---- stepping ------------------------------------------------------------------------------ */

/* An engine in the middle of decoding 32 requests, four of each adapter. */
static sp_engine *start_engine(const settings *s, const char *folder, sp_error *error)
{
    char names[N_ADAPTERS][8], paths[N_ADAPTERS][1024];
    sp_engine_adapter adapters[N_ADAPTERS];
    sp_engine_options options;
    int32_t prompt[PROMPT_TOKENS];
    sp_engine *engine;

    for (int32_t a = 0; a < N_ADAPTERS; a++) {
        snprintf(names[a], sizeof names[a], "a%d", (int)a);
        snprintf(paths[a], sizeof paths[a], "%s/a%d", folder, (int)a);
        adapters[a] = (sp_engine_adapter){sizeof(sp_engine_adapter), names[a], paths[a]};
    }
    sp_engine_options_default(&options, sizeof options);
    options.model_dir = s->model;
    options.threads = s->threads;
    options.max_loras = N_ADAPTERS;
    options.max_context = 2048;
    options.kv_tokens = STEP_ROWS * 2048;
    if (sp_engine_open(&options, adapters, N_ADAPTERS, &engine, error) != SP_OK)
        return NULL;
    for (int32_t i = 0; i < STEP_ROWS; i++) {
        sp_request request;
        int64_t id;

        for (int32_t t = 0; t < PROMPT_TOKENS; t++)
            prompt[t] = 1000 * i + 17 * t;
        sp_request_default(&request, sizeof request);
        request.adapter = names[i % N_ADAPTERS];
        request.tokens = prompt;
        request.n_tokens = PROMPT_TOKENS;
        request.max_tokens = s->repeats + 8;
        request.ignore_eos = true;
        if (sp_engine_submit(engine, &request, &id, error) != SP_OK)
            return NULL;
    }
    for (int32_t i = 0; i < 3; i++)
        if (sp_engine_step(engine, NULL, NULL, error) != SP_OK)
            return NULL;
    return engine;
}

static int bench_step(const settings *s)
{
    sp_error error = {0};
    sp_engine *engines[2] = {start_engine(s, s->plain, &error), NULL};
    double seconds[2][REPEATS_MAX], cpu_seconds[2][REPEATS_MAX];
    double ratios[REPEATS_MAX], cpu_ratios[REPEATS_MAX];

    if (engines[0])
        engines[1] = start_engine(s, s->trained, &error);
    if (!engines[1])
        return fail("step", &error);
    for (int32_t i = 0; i < s->repeats; i++) {
        for (int32_t k = 0; k < 2; k++) {
            int32_t e = (k + i) % 2; /* each goes first every other time */
            double began = sp_clock_seconds();
            clock_t cpu_began = clock();

            if (sp_engine_step(engines[e], NULL, NULL, &error) != SP_OK)
                return fail("step", &error);
            cpu_seconds[e][i] = (double)(clock() - cpu_began) / CLOCKS_PER_SEC;
            seconds[e][i] = sp_clock_seconds() - began;
        }
        ratios[i] = seconds[1][i] / seconds[0][i];
        cpu_ratios[i] = cpu_seconds[1][i] / cpu_seconds[0][i];
    }
    printf("    {\"case\": \"decode step, 32 rows, 8 adapters\", \"steps\": %d, \"seconds\": %.6f, "
           "\"seconds_without\": %.6f, \"ratio\": %.4f, \"cpu_seconds\": %.6f, "
           "\"cpu_seconds_without\": %.6f, \"cpu_ratio\": %.4f, \"against\": \"the same adapters "
           "without replaced rows, step by step in turns\"}\n",
           (int)s->repeats, median(seconds[1], s->repeats), median(seconds[0], s->repeats),
           median(ratios, s->repeats), median(cpu_seconds[1], s->repeats),
           median(cpu_seconds[0], s->repeats), median(cpu_ratios, s->repeats));
    sp_engine_close(engines[0]);
    sp_engine_close(engines[1]);
    return 0;
}

/* ---- command line -------------------------------------------------------------------------- */

static bool parse(settings *s, int argc, char **argv, int first)
{
    for (int i = first; i < argc; i += 2) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;

        if (!value)
            return false;
        if (strcmp(argv[i], "--repeats") == 0)
            s->repeats = (int32_t)strtol(value, NULL, 10);
        else if (strcmp(argv[i], "--threads") == 0)
            s->threads = (int32_t)strtol(value, NULL, 10);
        else if (strcmp(argv[i], "--commit") == 0)
            s->commit = value;
        else
            return false;
    }
    return s->repeats >= 1 && s->repeats <= REPEATS_MAX;
}

int main(int argc, char **argv)
{
    settings s = {.commit = "unknown", .repeats = 21};
    bool step = argc >= 5 && strcmp(argv[1], "step") == 0;
    bool build = argc >= 2 && strcmp(argv[1], "build") == 0;
    char processor[128];
    int result;

    if ((!step && !build) || !parse(&s, argc, argv, step ? 5 : 2)) {
        (void)fprintf(stderr, "usage: bench_overlay build | step MODEL PLAIN TRAINED "
                              "[--repeats N] [--threads N] [--commit TEXT]\n");
        return 2;
    }
    sp_bench_processor_name(processor, sizeof processor);
    printf("{\n  \"bench\": \"overlay %s\",\n  \"commit\": \"%s\",\n  \"machine\": {\"processor\": "
           "\"%s\"},\n  \"cases\": [\n",
           argv[1], s.commit, processor);
    if (step) {
        s.model = argv[2];
        s.plain = argv[3];
        s.trained = argv[4];
    }
    result = step ? bench_step(&s) : bench_build(&s);
    printf("  ]\n}\n");
    return result;
}
