/*
 * bench_structured.c: `bench structured`: what constrained output costs. Tokens a second of rows
 * under a schema over those of the same rows without one, in turn; when the first token comes with
 * a schema that was compiled before; and what rows without one feel of a large schema that another
 * thread compiles.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/file.h"
#include "base/text.h"
#include "cli/bench.h"
#include "cli/cli.h"
#include "cli/run_settings.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define FILE_BYTES  ((size_t)1 << 18)
#define LARGE_BYTES 100000 /* of the large schema */

/* Long enough that no row ends, with members of several kinds. */
static const char own_schema[] =
    "{\"type\":\"array\",\"minItems\":64,\"items\":{\"type\":\"object\",\"properties\":{"
    "\"name\":{\"type\":\"string\",\"minLength\":8,\"maxLength\":40},"
    "\"kind\":{\"enum\":[\"first\",\"second\",\"third\"]},"
    "\"size\":{\"type\":\"integer\",\"minimum\":0,\"maximum\":100000},"
    "\"when\":{\"type\":\"string\",\"format\":\"date-time\"},"
    "\"tags\":{\"type\":\"array\",\"items\":{\"type\":\"string\",\"maxLength\":16},"
    "\"minItems\":1,\"maxItems\":3},"
    "\"note\":{\"anyOf\":[{\"type\":\"null\"},{\"type\":\"string\"}]}},"
    "\"required\":[\"name\",\"kind\",\"size\",\"when\",\"tags\",\"note\"],"
    "\"additionalProperties\":false}}";

typedef struct structured_settings {
    sp_run_settings run;
    const char *schema_file;
    int64_t rows, prompt_tokens, new_tokens, rounds;
} structured_settings;

#define FIELD(member) offsetof(structured_settings, member)

static const sp_setting own_rows[] = {
    {"schema-file", SP_SETTING_STRING, FIELD(schema_file), NULL, 0, 0, NULL, "FILE",
     "JSON Schema of the constrained rows; without it one that no short text satisfies", true},
    {"rows", SP_SETTING_INT, FIELD(rows), "32", 1, 1024, NULL, "N",
     "requests that run side by side, a row a step each", true},
    {"prompt-tokens", SP_SETTING_INT, FIELD(prompt_tokens), "192", 1, 65536, NULL, "N",
     "tokens of each prompt", true},
    {"new-tokens", SP_SETTING_INT, FIELD(new_tokens), "128", 2, 65536, NULL, "N",
     "new tokens of each", true},
    {"rounds", SP_SETTING_INT, FIELD(rounds), "5", 1, 1000, NULL, "N",
     "runs without a schema and with one, in turn; the median of their ratios counts", true},
};

/* The median step of a run, of those in which every request had a token. */
typedef struct structured_times {
    double seconds, processor; /* the second: of all threads */
    uint64_t steps;
} structured_times;

typedef enum structured_schemas {
    SCHEMA_KNOWN, /* one for all rows, that outputs were made with before */
    SCHEMA_FRESH, /* one for each row, compiled for the run */
    SCHEMA_KINDS
} structured_schemas;

typedef struct structured_case {
    structured_schemas schemas;
    double temperature;
    double ratio, processor_ratio; /* tokens a second, of time and of the processor's */
    double plain_rate, rate;
    uint64_t steps;
} structured_case;

typedef struct structured_bench {
    structured_settings settings;
    sp_engine *engine;
    char *schema; /* owned; NULL: own_schema */
    size_t schema_bytes;
    sp_text large; /* the large schema */
    int32_t *prompt;
    int32_t n_requests;
    sp_constraint **constraints; /* [n_requests] of the current run; each its own reference */
    structured_case cases[2 * SCHEMA_KINDS];
    size_t n_cases;
    double first_plain, first_constrained;           /* seconds to the first token */
    double step_seconds;                             /* of one row without a schema */
    double compile_seconds;                          /* of the large schema, alone */
    double quiet_steps[2], busy_steps[2];            /* median and longest, seconds */
    uint64_t busy_count, busy_compiles, busy_missed; /* the last: steps without a token of a row */
} structured_bench;

/* ---- constraints --------------------------------------------------------------------------- */

static sp_status compile_text(const structured_bench *bench, const char *text, size_t bytes,
                              sp_constraint **out_constraint, sp_error *error)
{
    sp_constraint_options options;

    sp_constraint_options_default(&options, sizeof options);
    options.kind = SP_CONSTRAINT_JSON_SCHEMA;
    options.text = text;
    options.text_bytes = bytes;
    return sp_engine_compile(bench->engine, &options, out_constraint, error);
}

static sp_status compile_schema(const structured_bench *bench, sp_constraint **out_constraint,
                                sp_error *error)
{
    const char *text = bench->schema ? bench->schema : own_schema;
    size_t bytes = bench->schema ? bench->schema_bytes : sizeof own_schema - 1;

    return compile_text(bench, text, bytes, out_constraint, error);
}

static void release_constraints(structured_bench *bench)
{
    for (int32_t i = 0; bench->constraints && i < bench->n_requests; i++) {
        sp_constraint_release(bench->constraints[i]);
        bench->constraints[i] = NULL;
    }
}

static sp_status make_constraints(structured_bench *bench, structured_schemas schemas,
                                  sp_error *error)
{
    sp_status status = SP_OK;

    for (int32_t i = 0; i < bench->n_requests && status == SP_OK; i++) {
        if (i > 0 && schemas == SCHEMA_KNOWN) {
            bench->constraints[i] = bench->constraints[0];
            sp_constraint_retain(bench->constraints[i]);
            continue;
        }
        status = compile_schema(bench, &bench->constraints[i], error);
    }
    return status;
}

/* ---- runs ---------------------------------------------------------------------------------- */

static sp_status submit(const structured_bench *bench, int32_t i, double temperature,
                        int32_t max_tokens, sp_constraint *constraint, sp_error *error)
{
    sp_request request;
    int64_t id;

    sp_request_default(&request, sizeof request);
    request.adapter = sp_engine_base_name(bench->engine);
    request.tokens = bench->prompt + i;
    request.n_tokens = (int32_t)bench->settings.prompt_tokens;
    request.max_tokens = max_tokens;
    request.temperature = temperature;
    request.seed = (uint64_t)i;
    request.ignore_eos = true;
    request.speculative = SP_SPECULATIVE_OFF;
    request.constraint = constraint;
    return sp_engine_submit(bench->engine, &request, &id, error);
}

static double processor_seconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

typedef struct structured_step {
    sp_engine_stats before, after;
    double seconds, processor;
} structured_step;

static sp_status run_step(const structured_bench *bench, structured_step *out_step, sp_error *error)
{
    double began = sp_clock_seconds(), processor = processor_seconds();
    sp_status status;

    out_step->before = out_step->after = (sp_engine_stats){.struct_bytes = sizeof(sp_engine_stats)};
    sp_engine_get_stats(bench->engine, &out_step->before, NULL);
    status = sp_engine_step(bench->engine, NULL, NULL, error);
    sp_engine_get_stats(bench->engine, &out_step->after, NULL);
    out_step->seconds = sp_clock_seconds() - began;
    out_step->processor = processor_seconds() - processor;
    return status;
}

/* Whether it had one row of each request and nothing else. */
static bool decodes_all(const structured_bench *bench, const structured_step *step)
{
    return step->after.decode_rows - step->before.decode_rows == (uint64_t)bench->n_requests &&
           step->after.prefill_rows == step->before.prefill_rows;
}

static sp_status submit_all(const structured_bench *bench, double temperature, bool constrained,
                            sp_error *error)
{
    sp_status status = SP_OK;

    for (int32_t i = 0; i < bench->n_requests && status == SP_OK; i++)
        status = submit(bench, i, temperature, (int32_t)bench->settings.new_tokens,
                        constrained ? bench->constraints[i] : NULL, error);
    return status;
}

static sp_status run_steps(const structured_bench *bench, double *seconds, double *processor,
                           structured_times *out_times, sp_error *error)
{
    sp_status status = SP_OK;

    *out_times = (structured_times){0};
    while (status == SP_OK) {
        structured_step step;

        status = run_step(bench, &step, error);
        if (!decodes_all(bench, &step))
            continue;
        seconds[out_times->steps] = step.seconds;
        processor[out_times->steps++] = step.processor;
    }
    if (status == SP_AGAIN && out_times->steps == 0)
        return sp_fail(error, SP_ERR_STATE, NULL, "rows", -1,
                       "the rows never ran in one step; raise --max-running or --kv-tokens");
    out_times->seconds = sp_bench_median(seconds, out_times->steps);
    out_times->processor = sp_bench_median(processor, out_times->steps);
    return status == SP_AGAIN ? SP_OK : status;
}

static sp_status run(const structured_bench *bench, double temperature, bool constrained,
                     structured_times *out_times, sp_error *error)
{
    size_t n = (size_t)bench->settings.new_tokens; /* no request has more steps */
    double *values = sp_calloc(2 * n, sizeof *values);
    sp_status status = values ? submit_all(bench, temperature, constrained, error)
                              : sp_fail_memory(error, 2 * n * sizeof *values, "times");

    if (status == SP_OK)
        status = run_steps(bench, values, values + n, out_times, error);
    sp_free(values);
    return status;
}

/* ---- rates --------------------------------------------------------------------------------- */

static sp_status run_round(structured_bench *bench, const structured_case *c,
                           structured_times out_times[2], sp_error *error)
{
    sp_status status = SP_OK;

    if (c->schemas == SCHEMA_FRESH || !bench->constraints[0]) {
        release_constraints(bench);
        status = make_constraints(bench, c->schemas, error);
    }
    if (status == SP_OK)
        status = run(bench, c->temperature, false, &out_times[0], error);
    if (status == SP_OK)
        status = run(bench, c->temperature, true, &out_times[1], error);
    return status;
}

static sp_status run_case(structured_bench *bench, structured_schemas schemas, double temperature,
                          sp_error *error)
{
    size_t n = (size_t)bench->settings.rounds;
    double *values = sp_calloc(4 * n, sizeof *values);
    structured_case *c = &bench->cases[bench->n_cases];
    structured_times times[2];
    sp_status status;

    if (!values)
        return sp_fail_memory(error, 4 * n * sizeof *values, "times");
    *c = (structured_case){.schemas = schemas, .temperature = temperature};
    release_constraints(bench);
    status = schemas == SCHEMA_KNOWN ? run_round(bench, c, times, error) : SP_OK;
    for (size_t i = 0; i < n && status == SP_OK; i++) {
        status = run_round(bench, c, times, error);
        if (status != SP_OK)
            break;
        values[i] = times[0].seconds / times[1].seconds;
        values[n + i] = times[0].processor / times[1].processor;
        values[2 * n + i] = bench->n_requests / times[0].seconds;
        values[3 * n + i] = bench->n_requests / times[1].seconds;
        c->steps = times[1].steps;
    }
    c->ratio = sp_bench_median(values, n);
    c->processor_ratio = sp_bench_median(values + n, n);
    c->plain_rate = sp_bench_median(values + 2 * n, n);
    c->rate = sp_bench_median(values + 3 * n, n);
    bench->n_cases += status == SP_OK;
    sp_free(values);
    return status;
}

/* ---- the first token ----------------------------------------------------------------------- */

/* One request alone, of two tokens: the seconds to the first, and those of the step after it. */
static sp_status time_first(const structured_bench *bench, sp_constraint *constraint,
                            double *out_first, double *out_step, sp_error *error)
{
    double began = sp_clock_seconds();
    sp_status status = submit(bench, 0, 0, 2, constraint, error);

    *out_first = *out_step = 0;
    while (status == SP_OK) {
        structured_step step;

        status = run_step(bench, &step, error);
        if (*out_first > 0 && *out_step <= 0)
            *out_step = step.seconds;
        if (*out_first <= 0 && step.after.tokens > step.before.tokens)
            *out_first = sp_clock_seconds() - began;
    }
    return status == SP_AGAIN ? SP_OK : status;
}

static sp_status measure_first(structured_bench *bench, sp_error *error)
{
    size_t n = (size_t)bench->settings.rounds;
    double *values = sp_calloc(3 * n, sizeof *values), ignored;
    sp_constraint *constraint = NULL;
    sp_status status = values ? compile_schema(bench, &constraint, error)
                              : sp_fail_memory(error, 3 * n * sizeof *values, "times");

    for (size_t i = 0; i < n && status == SP_OK; i++) {
        status = time_first(bench, NULL, &values[i], &values[2 * n + i], error);
        if (status == SP_OK)
            status = time_first(bench, constraint, &values[n + i], &ignored, error);
    }
    if (status == SP_OK) {
        bench->first_plain = sp_bench_median(values, n);
        bench->first_constrained = sp_bench_median(values + n, n);
        bench->step_seconds = sp_bench_median(values + 2 * n, n);
    }
    sp_constraint_release(constraint);
    sp_free(values);
    return status;
}

/* ---- beside a large schema ----------------------------------------------------------------- */

/* Objects of a few members, each with notes of its own. */
static sp_status make_large(structured_bench *bench, sp_error *error)
{
    sp_text *text = &bench->large;

    sp_text_add(text, "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{");
    for (int i = 0; text->bytes < LARGE_BYTES && !text->failed; i++)
        sp_text_format(
            text,
            "%s\"member%d\":{\"type\":\"object\",\"description\":\"the member %d of many\","
            "\"properties\":{\"name%d\":{\"type\":\"string\",\"maxLength\":%d},\"values\":"
            "{\"type\":\"array\",\"items\":{\"type\":\"integer\",\"minimum\":%d}},\"kind\":"
            "{\"enum\":[\"a%d\",\"b%d\",null]}},\"required\":[\"name%d\",\"kind\"]}",
            i ? "," : "", i, i, i, 8 + i % 32, i, i, i, i);
    sp_text_add(text, "}}");
    return text->failed ? sp_fail_memory(error, LARGE_BYTES, "a schema") : SP_OK;
}

typedef struct structured_compiler {
    const structured_bench *bench;
    atomic_bool stop;
    uint64_t n;
    sp_status status;
    sp_error error;
} structured_compiler;

static void *compile_always(void *user)
{
    structured_compiler *compiler = user;

    while (!atomic_load(&compiler->stop) && compiler->status == SP_OK) {
        sp_constraint *constraint = NULL;

        compiler->status =
            compile_text(compiler->bench, compiler->bench->large.data, compiler->bench->large.bytes,
                         &constraint, &compiler->error);
        sp_constraint_release(constraint);
        compiler->n++;
    }
    return NULL;
}

/* The median and the longest of the steps of all rows; *out_n of them. */
static sp_status time_steps(const structured_bench *bench, double out_steps[2], uint64_t *out_n,
                            uint64_t *out_missed, sp_error *error)
{
    size_t n = 0, n_max = (size_t)bench->settings.new_tokens;
    double *times = sp_calloc(n_max, sizeof *times);
    sp_status status =
        times ? submit_all(bench, 0, false, error) : sp_fail_memory(error, n_max, "times");

    while (status == SP_OK) {
        structured_step step;
        uint64_t tokens;

        status = run_step(bench, &step, error);
        if (!decodes_all(bench, &step) || n == n_max)
            continue;
        tokens = step.after.tokens - step.before.tokens;
        *out_missed += tokens < (uint64_t)bench->n_requests;
        times[n++] = step.seconds;
    }
    if (n > 0) {
        out_steps[0] = sp_bench_median(times, n); /* sorts them */
        out_steps[1] = times[n - 1];
    }
    *out_n = n;
    sp_free(times);
    return status == SP_AGAIN ? SP_OK : status;
}

static sp_status measure_beside(structured_bench *bench, sp_error *error)
{
    structured_compiler compiler = {.bench = bench};
    double began = sp_clock_seconds();
    sp_constraint *constraint = NULL;
    uint64_t ignored, missed = 0;
    pthread_t thread;
    sp_status status =
        compile_text(bench, bench->large.data, bench->large.bytes, &constraint, error);

    bench->compile_seconds = sp_clock_seconds() - began;
    sp_constraint_release(constraint);
    if (status == SP_OK)
        status = time_steps(bench, bench->quiet_steps, &ignored, &missed, error);
    if (status != SP_OK)
        return status;
    if (pthread_create(&thread, NULL, compile_always, &compiler) != 0)
        return sp_fail(error, SP_ERR_THREAD, NULL, NULL, -1, "a thread could not be started");
    status = time_steps(bench, bench->busy_steps, &bench->busy_count, &bench->busy_missed, error);
    atomic_store(&compiler.stop, true);
    pthread_join(thread, NULL);
    bench->busy_compiles = compiler.n;
    if (status == SP_OK && compiler.status != SP_OK) {
        *error = compiler.error;
        return compiler.status;
    }
    return status;
}

/* ---- output -------------------------------------------------------------------------------- */

static const char *schemas_name(structured_schemas schemas)
{
    return schemas == SCHEMA_KNOWN ? "known" : "fresh";
}

static void print_json(const structured_bench *bench)
{
    fputs("{\"bench\": \"structured\", \"cases\": [", stdout);
    for (size_t i = 0; i < bench->n_cases; i++) {
        const structured_case *c = &bench->cases[i];

        printf("%s{\"schemas\": \"%s\", \"temperature\": %g, \"tokens_per_second\": %.6g, "
               "\"ratio\": %.4g, \"against\": \"the same requests without a schema\", "
               "\"processor_ratio\": %.4g, \"plain_tokens_per_second\": %.6g, \"steps\": %llu}",
               i ? ", " : "", schemas_name(c->schemas), c->temperature, c->rate, c->ratio,
               c->processor_ratio, c->plain_rate, (unsigned long long)c->steps);
    }
    printf("], \"first_token\": {\"plain_seconds\": %.6g, \"constrained_seconds\": %.6g, "
           "\"step_seconds\": %.6g, \"later_by_steps\": %.4g}, ",
           bench->first_plain, bench->first_constrained, bench->step_seconds,
           (bench->first_constrained - bench->first_plain) / bench->step_seconds);
    printf("\"large_schema\": {\"bytes\": %zu, \"compile_seconds\": %.4g, \"quiet_step_seconds\": "
           "[%.6g, %.6g], \"step_seconds\": [%.6g, %.6g], \"steps\": %llu, \"compiled\": %llu, "
           "\"steps_without_a_token\": %llu}, ",
           bench->large.bytes, bench->compile_seconds, bench->quiet_steps[0], bench->quiet_steps[1],
           bench->busy_steps[0], bench->busy_steps[1], (unsigned long long)bench->busy_count,
           (unsigned long long)bench->busy_compiles, (unsigned long long)bench->busy_missed);
    printf("\"requests\": %d, \"prompt_tokens\": %d, \"new_tokens\": %d, \"cpu_isa\": \"%s\", "
           "\"device\": \"%s\", ",
           bench->n_requests, (int)bench->settings.prompt_tokens, (int)bench->settings.new_tokens,
           sp_engine_cpu_isa(bench->engine), sp_engine_device(bench->engine));
    sp_bench_print_machine(stdout);
    puts("}");
}

static void print_text(const structured_bench *bench)
{
    printf("%d requests of %d prompt tokens and %d new, level %s, %s\n", bench->n_requests,
           (int)bench->settings.prompt_tokens, (int)bench->settings.new_tokens,
           sp_engine_cpu_isa(bench->engine), sp_engine_device(bench->engine));
    printf("%-8s %12s %8s %12s %12s %14s\n", "schemas", "temperature", "steps", "tokens/s",
           "over plain", "by processor");
    for (size_t i = 0; i < bench->n_cases; i++) {
        const structured_case *c = &bench->cases[i];

        printf("%-8s %12g %8llu %12.1f %12.3f %14.3f\n", schemas_name(c->schemas), c->temperature,
               (unsigned long long)c->steps, c->rate, c->ratio, c->processor_ratio);
    }
    printf("first token: %.3f ms, with a schema %.3f ms; a step %.3f ms\n",
           bench->first_plain * 1e3, bench->first_constrained * 1e3, bench->step_seconds * 1e3);
    printf("a schema of %zu bytes compiles in %.1f ms; steps beside it %.3f ms, longest %.3f "
           "(without it %.3f, %.3f), without a token %llu\n",
           bench->large.bytes, bench->compile_seconds * 1e3, bench->busy_steps[0] * 1e3,
           bench->busy_steps[1] * 1e3, bench->quiet_steps[0] * 1e3, bench->quiet_steps[1] * 1e3,
           (unsigned long long)bench->busy_missed);
}

/* ---- the verb ------------------------------------------------------------------------------ */

static sp_status prepare(structured_bench *bench, sp_error *error)
{
    const char *file = bench->settings.schema_file;
    int32_t n = (int32_t)bench->settings.prompt_tokens + bench->n_requests;
    uint32_t vocab = (uint32_t)sp_engine_shape(bench->engine)->vocab;

    bench->constraints = sp_calloc((size_t)bench->n_requests, sizeof(sp_constraint *));
    bench->prompt = sp_calloc((size_t)n, sizeof *bench->prompt);
    if (!bench->constraints || !bench->prompt)
        return sp_fail_memory(error, (size_t)n * sizeof *bench->prompt, "prompts");
    for (int32_t i = 0; i < n; i++)
        bench->prompt[i] = (int32_t)((uint32_t)i * 2654435761u % vocab);
    if (file &&
        sp_file_read_all(file, FILE_BYTES, &bench->schema, &bench->schema_bytes, error) != SP_OK)
        return error->status;
    return make_large(bench, error);
}

static sp_status measure(structured_bench *bench, sp_error *error)
{
    sp_status status = prepare(bench, error);

    for (int kind = 0; kind < SCHEMA_KINDS; kind++)
        for (int temperature = 0; temperature <= 1 && status == SP_OK; temperature++)
            status = run_case(bench, (structured_schemas)kind, temperature, error);
    release_constraints(bench);
    if (status == SP_OK)
        status = measure_first(bench, error);
    return status == SP_OK ? measure_beside(bench, error) : status;
}

static int run_structured_bench(void *memory)
{
    structured_bench *bench = memory;
    structured_settings *settings = &bench->settings;
    sp_error error = {0};
    bool usage = true;
    sp_status status;

    bench->n_requests = (int32_t)settings->rows;
    settings->run.options.prefix_cache = false; /* every prompt is computed in every run */
    status = sp_run_settings_open(
        &settings->run, settings->rows * (settings->prompt_tokens + settings->new_tokens + 32),
        &bench->engine, &usage, &error);
    if (status != SP_OK)
        return usage ? sp_cli_usage("bench", &error) : sp_cli_fail("bench", &error);
    status = measure(bench, &error);
    if (status != SP_OK)
        return sp_cli_fail("bench", &error);
    if (settings->run.json)
        print_json(bench);
    else
        print_text(bench);
    return SP_EXIT_DONE;
}

static void close_structured_bench(void *memory)
{
    structured_bench *bench = memory;

    release_constraints(bench);
    sp_engine_close(bench->engine);
    sp_free(bench->constraints);
    sp_free(bench->prompt);
    sp_free(bench->schema);
    sp_text_free(&bench->large);
}

int sp_bench_structured(int argc, char **argv)
{
    static const sp_bench_verb verb = {
        .usage = "usage: sidepath bench structured --model DIR [FLAGS]\n",
        .uses = SP_OPTION_OF_ENGINE | SP_SETTING_OF_OUTPUT,
        .rows = own_rows,
        .n_rows = sizeof own_rows / sizeof own_rows[0],
        .bytes = sizeof(structured_bench),
        .run = run_structured_bench,
        .close = close_structured_bench,
    };

    return sp_bench_main(&verb, argc, argv);
}
