/*
 * bench.c: measurements as ratios in one run. `bench step`: decode and prefill of a checkpoint,
 * against the streaming-read bandwidth that the same threads reach in the same run.
 */
#include "cli/bench.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "cli/cli.h"
#include "cli/run_settings.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROW_COUNTS_MAX 16
#define PROMPT_TOKENS  8
#define PREFILLS       5 /* timed */

typedef struct step_settings {
    sp_run_settings run;
    const char *rows;
    int64_t steps, prefill;
} step_settings;

#define FIELD(member) offsetof(step_settings, member)

static const sp_setting own_rows[] = {
    {"rows", SP_SETTING_STRING, FIELD(rows), "1,32", 0, 0, NULL, "N,N,...",
     "decode rows a step, one case each", true},
    {"steps", SP_SETTING_INT, FIELD(steps), "15", 3, 10000, NULL, "N",
     "timed steps a case; the median counts", true},
    {"prefill", SP_SETTING_INT, FIELD(prefill), "256", 0, 65536, NULL, "N",
     "prompt tokens of the prefill case; 0: none", true},
};

/* One measured case. */
typedef struct step_case {
    const char *kind; /* "decode" or "prefill" */
    int32_t rows;
    size_t adapters; /* distinct ones among the rows; 0: base */
    double seconds;
} step_case;

typedef struct step_bench {
    step_settings settings;
    sp_engine *engine;
    int32_t row_counts[ROW_COUNTS_MAX];
    int32_t n_row_counts;
    double read_bytes_per_second;
    step_case cases[4 * ROW_COUNTS_MAX];
    size_t n_cases;
} step_bench;

/* ---- numbers ------------------------------------------------------------------------------- */

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

double sp_bench_median(double *values, size_t n)
{
    qsort(values, n, sizeof *values, compare_doubles);
    return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

static sp_status parse_row_counts(step_bench *bench, sp_error *error)
{
    const char *cursor = bench->settings.rows;

    while (*cursor) {
        char *end;
        long rows;

        errno = 0;
        rows = strtol(cursor, &end, 10);
        if (end == cursor || (*end != ',' && *end != '\0') || errno || rows < 1 || rows > 4096 ||
            bench->n_row_counts == ROW_COUNTS_MAX)
            return sp_fail(error, SP_ERR_ARGUMENT, NULL, "rows", -1,
                           "--rows: \"%s\" is not a list of at most %d counts from 1 to 4096",
                           bench->settings.rows, ROW_COUNTS_MAX);
        bench->row_counts[bench->n_row_counts++] = (int32_t)rows;
        cursor = *end ? end + 1 : end;
    }
    return SP_OK;
}

/* ---- cases --------------------------------------------------------------------------------- */

/* The adapter of row i when the rows take turns among all of them; NULL: the base. */
static const char *adapter_of(const step_bench *bench, bool with_adapters, int32_t row)
{
    const sp_stage *stage = sp_engine_stage(bench->engine);
    sp_stage_version_info info = {.struct_bytes = sizeof info};
    size_t n = sp_stage_n_versions(stage);

    if (!with_adapters || n == 0)
        return NULL;
    sp_stage_version_at(stage, (size_t)row % n, &info, NULL);
    return info.name;
}

static sp_status submit(const step_bench *bench, const char *adapter, const int32_t *tokens,
                        int32_t n_tokens, int32_t max_tokens, sp_error *error)
{
    sp_request request;
    int64_t id;

    sp_request_default(&request, sizeof request);
    request.adapter = adapter;
    request.tokens = tokens;
    request.n_tokens = n_tokens;
    request.max_tokens = max_tokens;
    request.ignore_eos = true;
    return sp_engine_submit(bench->engine, &request, &id, error);
}

/* Runs steps until nothing is left; keeps the times of those that decode `rows` rows. */
static sp_status time_decode(step_bench *bench, int32_t rows, bool with_adapters,
                             double *out_seconds, sp_error *error)
{
    int32_t vocab = sp_engine_shape(bench->engine)->vocab, prompt[PROMPT_TOKENS];
    size_t n_times = 0, n_max = (size_t)bench->settings.steps;
    double *times = sp_calloc(n_max, sizeof *times);
    sp_status status = SP_OK;

    if (!times)
        return sp_fail_memory(error, n_max * sizeof *times, "times");
    /* Prompts of their own, so that the rows of a mixture of experts go to different ones. */
    for (int32_t i = 0; i < rows && status == SP_OK; i++) {
        for (int32_t t = 0; t < PROMPT_TOKENS; t++)
            prompt[t] = (i * PROMPT_TOKENS + t + 1) % vocab;
        status = submit(bench, adapter_of(bench, with_adapters, i), prompt, PROMPT_TOKENS,
                        (int32_t)n_max + 2, error);
    }
    while (status == SP_OK) {
        sp_engine_stats before = {.struct_bytes = sizeof before},
                        after = {.struct_bytes = sizeof after};

        sp_engine_get_stats(bench->engine, &before, NULL);
        status = sp_engine_step(bench->engine, NULL, NULL, error);
        sp_engine_get_stats(bench->engine, &after, NULL);
        if (after.decode_rows - before.decode_rows == (uint64_t)rows && n_times < n_max)
            times[n_times++] = after.step_seconds - before.step_seconds;
    }
    if (status == SP_AGAIN)
        status = n_times ? SP_OK
                         : sp_fail(error, SP_ERR_STATE, NULL, "rows", -1,
                                   "%d rows never ran in one step; raise --max-running, "
                                   "--kv-tokens or --step-rows",
                                   rows);
    if (status == SP_OK)
        *out_seconds = sp_bench_median(times, n_times);
    sp_free(times);
    return status;
}

static sp_status time_one_prefill(step_bench *bench, bool with_adapters, double *out_seconds,
                                  sp_error *error)
{
    int32_t n = (int32_t)bench->settings.prefill;
    int32_t *tokens = sp_calloc((size_t)n, sizeof *tokens);
    sp_engine_stats before = {.struct_bytes = sizeof before},
                    after = {.struct_bytes = sizeof after};
    sp_status status;

    if (!tokens)
        return sp_fail_memory(error, (size_t)n * sizeof *tokens, "a prompt");
    for (int32_t i = 0; i < n; i++)
        tokens[i] = (i * 7) % sp_engine_shape(bench->engine)->vocab;
    sp_engine_get_stats(bench->engine, &before, NULL);
    status = submit(bench, adapter_of(bench, with_adapters, 0), tokens, n, 1, error);
    while (status == SP_OK)
        status = sp_engine_step(bench->engine, NULL, NULL, error);
    sp_engine_get_stats(bench->engine, &after, NULL);
    *out_seconds = after.step_seconds - before.step_seconds;
    sp_free(tokens);
    return status == SP_AGAIN ? SP_OK : status;
}

/* The median of a few; a single one says little on a machine with neighbours. */
static sp_status time_prefill(step_bench *bench, bool with_adapters, double *out_seconds,
                              sp_error *error)
{
    double times[PREFILLS];
    sp_status status = SP_OK;

    for (int i = 0; i < PREFILLS && status == SP_OK; i++)
        status = time_one_prefill(bench, with_adapters, &times[i], error);
    if (status == SP_OK)
        *out_seconds = sp_bench_median(times, PREFILLS);
    return status;
}

static void add_case(step_bench *bench, const char *kind, int32_t rows, bool with_adapters,
                     double seconds)
{
    size_t n = sp_stage_n_versions(sp_engine_stage(bench->engine));

    if ((size_t)rows < n && strcmp(kind, "decode") == 0)
        n = (size_t)rows;
    if (strcmp(kind, "prefill") == 0)
        n = 1;
    bench->cases[bench->n_cases++] = (step_case){
        .kind = kind, .rows = rows, .adapters = with_adapters ? n : 0, .seconds = seconds};
}

static sp_status run_cases(step_bench *bench, sp_error *error)
{
    bool adapters = sp_stage_n_versions(sp_engine_stage(bench->engine)) > 0;
    sp_status status = SP_OK;

    for (int32_t i = 0; i < bench->n_row_counts; i++) {
        for (int with = 0; with <= (adapters ? 1 : 0); with++) {
            double seconds = 0;

            status = time_decode(bench, bench->row_counts[i], with, &seconds, error);
            if (status != SP_OK)
                return status;
            add_case(bench, "decode", bench->row_counts[i], with, seconds);
        }
    }
    for (int with = 0; with <= (adapters ? 1 : 0) && bench->settings.prefill > 0; with++) {
        double seconds = 0;

        status = time_prefill(bench, with, &seconds, error);
        if (status != SP_OK)
            return status;
        add_case(bench, "prefill", (int32_t)bench->settings.prefill, with, seconds);
    }
    return status;
}

/* ---- output -------------------------------------------------------------------------------- */

/* Weight bytes a step reads, over what a plain read of as many bytes would take. */
static double read_ratio(const step_bench *bench, const step_case *c)
{
    sp_engine_stats stats = {.struct_bytes = sizeof stats};

    sp_engine_get_stats(bench->engine, &stats, NULL);
    return (double)stats.weight_bytes / bench->read_bytes_per_second / c->seconds;
}

static void print_json(const step_bench *bench)
{
    sp_engine_stats stats = {.struct_bytes = sizeof stats};

    sp_engine_get_stats(bench->engine, &stats, NULL);
    fputs("{\"bench\": \"step\", \"cases\": [", stdout);
    for (size_t i = 0; i < bench->n_cases; i++) {
        const step_case *c = &bench->cases[i];

        printf("%s{\"kind\": \"%s\", \"rows\": %d, \"adapters\": %zu, \"seconds\": %.6g, "
               "\"rows_per_second\": %.6g, \"ratio\": %.4g, \"against\": \"streaming read of the "
               "weights once\", \"over_first\": %.4g}",
               i ? ", " : "", c->kind, c->rows, c->adapters, c->seconds, c->rows / c->seconds,
               read_ratio(bench, c), c->seconds / bench->cases[0].seconds);
    }
    printf("], \"weight_bytes\": %zu, \"read_bytes_per_second\": %.6g, \"cpu_isa\": \"%s\", "
           "\"device\": \"%s\", ",
           stats.weight_bytes, bench->read_bytes_per_second, sp_engine_cpu_isa(bench->engine),
           sp_engine_device(bench->engine));
    sp_bench_print_machine(stdout);
    puts("}");
}

static void print_text(const step_bench *bench)
{
    sp_engine_stats stats = {.struct_bytes = sizeof stats};

    sp_engine_get_stats(bench->engine, &stats, NULL);
    printf("weights %.1f MB, streaming read %.2f GB/s, level %s, %s\n",
           (double)stats.weight_bytes / 1e6, bench->read_bytes_per_second / 1e9,
           sp_engine_cpu_isa(bench->engine), sp_engine_device(bench->engine));
    printf("%-8s %6s %9s %12s %12s %14s %12s\n", "case", "rows", "adapters", "ms a step", "rows/s",
           "of read limit", "over first");
    for (size_t i = 0; i < bench->n_cases; i++) {
        const step_case *c = &bench->cases[i];

        printf("%-8s %6d %9zu %12.3f %12.1f %13.1f%% %12.2f\n", c->kind, c->rows, c->adapters,
               c->seconds * 1e3, c->rows / c->seconds, read_ratio(bench, c) * 100,
               c->seconds / bench->cases[0].seconds);
    }
}

/* ---- the verb ------------------------------------------------------------------------------ */

static int64_t kv_tokens_wanted(const step_bench *bench)
{
    int64_t most = bench->settings.prefill + 2;

    for (int32_t i = 0; i < bench->n_row_counts; i++) {
        int64_t need = (int64_t)bench->row_counts[i] * (PROMPT_TOKENS + bench->settings.steps + 2 +
                                                        bench->settings.run.options.page_tokens);

        most = need > most ? need : most;
    }
    return most;
}

static int run_step_bench(void *memory)
{
    step_bench *bench = memory;
    sp_error error = {0};
    bool usage = true;
    sp_status status = parse_row_counts(bench, &error);

    bench->settings.run.options.prefix_cache = false; /* every row is to be computed */
    if (status == SP_OK)
        status = sp_run_settings_open(&bench->settings.run, kv_tokens_wanted(bench), &bench->engine,
                                      &usage, &error);
    if (status != SP_OK)
        return usage ? sp_cli_usage("bench", &error) : sp_cli_fail("bench", &error);
    if (strcmp(sp_engine_device(bench->engine), "cpu") == 0)
        status = sp_bench_read_bandwidth(bench->settings.run.options.threads,
                                         &bench->read_bytes_per_second, &error);
    else
        status = sp_bench_device_bandwidth(sp_engine_device(bench->engine),
                                           &bench->read_bytes_per_second, &error);
    if (status == SP_OK)
        status = run_cases(bench, &error);
    if (status != SP_OK)
        return sp_cli_fail("bench", &error);
    if (bench->settings.run.json)
        print_json(bench);
    else
        print_text(bench);
    return SP_EXIT_DONE;
}

static void close_step_bench(void *memory)
{
    step_bench *bench = memory;

    sp_engine_close(bench->engine);
}

static int bench_step(int argc, char **argv)
{
    static const sp_bench_verb verb = {
        .usage = "usage: sidepath bench step --model DIR [--adapter NAME=DIR]... [FLAGS]\n",
        .uses = SP_OPTION_OF_ENGINE | SP_SETTING_OF_OUTPUT,
        .rows = own_rows,
        .n_rows = sizeof own_rows / sizeof own_rows[0],
        .bytes = sizeof(step_bench),
        .run = run_step_bench,
        .close = close_step_bench,
    };

    return sp_bench_main(&verb, argc, argv);
}

int sp_bench_main(const sp_bench_verb *verb, int argc, char **argv)
{
    void *bench = sp_calloc(1, verb->bytes);
    size_t n_rows;
    sp_setting *rows =
        bench ? sp_run_settings_rows(bench, verb->uses, verb->rows, verb->n_rows, &n_rows) : NULL;
    sp_error error;
    int code = SP_EXIT_DONE;

    if (!rows || !bench) {
        sp_fail_memory(&error, verb->bytes, "the benchmark");
        code = sp_cli_fail("bench", &error);
    } else if (sp_cli_wants_help(argc, argv)) {
        puts(verb->usage);
        sp_settings_print_help(stdout, rows, n_rows);
    } else if (sp_run_settings_parse(bench, verb->uses, rows, n_rows, argc, argv, NULL, &error) !=
               SP_OK) {
        code = sp_cli_usage("bench", &error);
    } else {
        code = verb->run(bench);
        sp_settings_free_lists(rows, n_rows, bench, NULL);
    }
    if (bench)
        verb->close(bench);
    sp_free(bench);
    sp_free(rows);
    return code;
}

int sp_cli_bench(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "step") == 0)
        return bench_step(argc - 1, argv + 1);
    if (argc > 1 && strcmp(argv[1], "delta") == 0)
        return sp_bench_delta(argc - 1, argv + 1);
    if (argc > 1 && strcmp(argv[1], "load") == 0)
        return sp_bench_load(argc - 1, argv + 1);
    if (argc > 1 && strcmp(argv[1], "speculative") == 0)
        return sp_bench_speculative(argc - 1, argv + 1);
    if (argc > 1 && strcmp(argv[1], "structured") == 0)
        return sp_bench_structured(argc - 1, argv + 1);
    if (argc > 1 && strcmp(argv[1], "swap") == 0)
        return sp_bench_swap(argc - 1, argv + 1);
    if (argc > 1 && sp_cli_wants_help(argc, argv)) {
        puts("usage: sidepath bench delta|load|speculative|step|structured|swap [FLAGS]\n\n"
             "  delta  one delta, against the base GEMM of its layer; needs no model\n"
             "  load   what it costs to bring an adapter in, and what steps feel of it\n"
             "  speculative  tokens with drafts, against the same requests without\n"
             "  step   decode and prefill of a checkpoint, against streaming-read bandwidth\n"
             "  structured  tokens under a schema, against the same requests without\n"
             "  swap   adapters in and out of slots beside decoding, against quiet steps\n");
        return SP_EXIT_DONE;
    }
    fputs("sidepath bench: say what to measure: delta, load, speculative, step, structured or swap "
          "(try "
          "`sidepath bench step --help`)\n",
          stderr);
    return SP_EXIT_USAGE;
}
