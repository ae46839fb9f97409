/*
 * bench_speculative.c: `bench speculative`: tokens per second with drafts over without, by prompt
 * lookup and draft model, and with a source of which a given share of drafts is accepted; for each
 * number of requests with the base, with one adapter and with all. A run that gave other tokens
 * than the plain one is an error, not a result.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "base/file.h"
#include "cli/bench.h"
#include "cli/cli.h"
#include "cli/run_settings.h"
#include "engine/draft_source.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SHARES_MAX 8
#define COUNTS_MAX 8    /* of requests */
#define FULL_MAX   4096 /* steps whose times are kept */
#define PERIOD     48   /* of the prompt without a file */
#define FILE_BYTES ((size_t)1 << 24)

typedef struct spec_settings {
    sp_run_settings run;
    const char *prompt_file, *acceptance, *requests;
    int64_t prompt_tokens, new_tokens, rounds;
    bool own_drafts;
} spec_settings;

#define FIELD(member) offsetof(spec_settings, member)

static const sp_setting own_rows[] = {
    {"prompt-file", SP_SETTING_STRING, FIELD(prompt_file), NULL, 0, 0, NULL, "FILE",
     "text that prompts are parts of; without it ids that repeat themselves", true},
    {"acceptance", SP_SETTING_STRING, FIELD(acceptance), "0,0.5,0.8,1", 0, 0, NULL, "P,P,...",
     "shares of drafts that are accepted, one case each beside the engine's own drafts", true},
    {"own-drafts", SP_SETTING_BOOL, FIELD(own_drafts), "true", 0, 0, NULL, NULL,
     "a case with the engine's own drafts: prompt lookup, and the draft model if there is one",
     true},
    {"requests", SP_SETTING_STRING, FIELD(requests), "4", 0, 0, NULL, "N,N,...",
     "requests that run side by side, cases for each number", true},
    {"prompt-tokens", SP_SETTING_INT, FIELD(prompt_tokens), "192", 1, 65536, NULL, "N",
     "tokens of each prompt", true},
    {"new-tokens", SP_SETTING_INT, FIELD(new_tokens), "128", 2, 65536, NULL, "N",
     "new tokens of each", true},
    {"rounds", SP_SETTING_INT, FIELD(rounds), "5", 1, 1000, NULL, "N",
     "plain runs and runs with drafts, in turn; the median of their ratios counts; where there are "
     "several, one more before them is not counted",
     true},
};

/* The sums of the steps that had no rows of prompts. */
typedef struct spec_sums {
    double seconds, processor; /* the second: of all threads */
    double drafting;           /* seconds of the first that the draft model took */
    uint64_t tokens, drafted, accepted, steps;
} spec_sums;

typedef struct spec_case {
    int32_t requests;
    size_t adapters;               /* that they take turns among; 0: the base */
    double share;                  /* of drafts that are right; below 0: the engine's own drafts */
    double ratio, processor_ratio; /* tokens a second, of time and of the processor's */
    double plain_rate, rate;
    double verify_seconds; /* of a step in which all requests have all drafts; 0: there was none */
    spec_sums sums;
} spec_case;

typedef struct spec_bench {
    spec_settings settings;
    sp_engine *engine;
    int32_t *text; /* [n_text] */
    int32_t n_text, n_prompt, n_new, n_requests;
    int32_t counts[COUNTS_MAX], n_counts, requests_max;
    size_t n_adapters;       /* of the current case */
    int64_t *ids;            /* [n_requests] of the current run */
    int32_t *plain, *tokens; /* [n_requests][n_new], of the plain run and of the current one */
    double share;
    double full[FULL_MAX]; /* [n_full] times of the current case's steps with all drafts */
    size_t n_full;
    spec_case cases[3 * COUNTS_MAX * (SHARES_MAX + 1)];
    size_t n_cases;
} spec_bench;

/* ---- a run --------------------------------------------------------------------------------- */

/* The index of a request of the current run. */
static int32_t request_of(const spec_bench *bench, int64_t id)
{
    int32_t i = 0;

    while (i < bench->n_requests - 1 && bench->ids[i] != id)
        i++;
    return i;
}

static void keep_token(void *user, const sp_request_event *event)
{
    const spec_bench *bench = user;
    int32_t at = event->position - bench->n_prompt;

    if (event->token >= 0 && at < bench->n_new)
        bench->tokens[request_of(bench, event->request) * bench->n_new + at] = event->token;
}

/* The finalizer of MurmurHash3: neighbours have nothing in common. */
static uint32_t mix(uint32_t x)
{
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    return x ^ x >> 16;
}

/* The tokens of the plain run, of which some are wrong: which, depends on request and place alone,
 * so a draft that is wrong once is wrong again. */
static int32_t propose(void *user, const sp_sequence *sequence, int32_t n_max, int32_t *out_tokens)
{
    const spec_bench *bench = user;
    int32_t at = sequence->n_tokens - bench->n_prompt;
    const int32_t *plain = bench->plain + request_of(bench, sequence->id) * bench->n_new;

    for (int32_t i = 0; i < n_max; i++) {
        uint32_t mixed = mix((uint32_t)(at + i) + ((uint32_t)sequence->id << 16));
        bool right = (double)(mixed >> 8) / (1 << 24) < bench->share;

        out_tokens[i] = at + i < bench->n_new ? plain[at + i] : 0;
        if (!right)
            out_tokens[i] = out_tokens[i] == 0;
    }
    return n_max;
}

static sp_status submit(spec_bench *bench, int32_t i, bool drafts, sp_error *error)
{
    const sp_stage *stage = sp_engine_stage(bench->engine);
    size_t n = bench->n_adapters;
    sp_stage_version_info info = {.struct_bytes = sizeof info};
    sp_request request;

    sp_request_default(&request, sizeof request);
    if (n > 0) {
        sp_stage_version_at(stage, (size_t)i % n, &info, NULL);
        request.adapter = info.name;
    } else {
        request.adapter = sp_engine_base_name(bench->engine);
    }
    request.tokens = bench->text + (int64_t)i * 7 % (bench->n_text - bench->n_prompt + 1);
    request.n_tokens = bench->n_prompt;
    request.max_tokens = bench->n_new;
    request.ignore_eos = true;
    request.speculative = drafts ? SP_SPECULATIVE_ON : SP_SPECULATIVE_OFF;
    return sp_engine_submit(bench->engine, &request, &bench->ids[i], error);
}

static double processor_seconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void add_step(spec_bench *bench, spec_sums *sums, const sp_engine_stats *before,
                     const sp_engine_stats *after, double processor)
{
    uint64_t all =
        (uint64_t)bench->n_requests * (uint64_t)(bench->settings.run.options.draft_tokens + 1);

    if (after->prefill_rows > before->prefill_rows)
        return;
    if (after->rows - before->rows == all && bench->n_full < FULL_MAX)
        bench->full[bench->n_full++] = after->step_seconds - before->step_seconds;
    sums->seconds += after->step_seconds - before->step_seconds;
    sums->processor += processor;
    sums->drafting += after->draft_seconds - before->draft_seconds;
    sums->tokens += after->tokens - before->tokens;
    sums->drafted += after->drafted_tokens - before->drafted_tokens;
    sums->accepted += after->accepted_tokens - before->accepted_tokens;
    sums->steps += after->steps - before->steps;
}

static sp_status run(spec_bench *bench, bool drafts, spec_sums *out_sums, sp_error *error)
{
    sp_status status = SP_OK;

    *out_sums = (spec_sums){0};
    for (int32_t i = 0; i < bench->n_requests && status == SP_OK; i++)
        status = submit(bench, i, drafts, error);
    while (status == SP_OK) {
        sp_engine_stats before = {.struct_bytes = sizeof before},
                        after = {.struct_bytes = sizeof after};
        double began = processor_seconds();

        sp_engine_get_stats(bench->engine, &before, NULL);
        status = sp_engine_step(bench->engine, keep_token, bench, error);
        sp_engine_get_stats(bench->engine, &after, NULL);
        add_step(bench, out_sums, &before, &after, processor_seconds() - began);
    }
    return status == SP_AGAIN ? SP_OK : status;
}

/* ---- cases --------------------------------------------------------------------------------- */

static double rate_of(const spec_sums *sums)
{
    return sums->seconds > 0 ? (double)sums->tokens / sums->seconds : 0;
}

/* A plain run, and one with drafts that has to give the same. */
static sp_status run_pair(spec_bench *bench, spec_sums out_sums[2], sp_error *error)
{
    size_t bytes = (size_t)bench->n_requests * (size_t)bench->n_new * sizeof(int32_t);
    sp_status status = run(bench, false, &out_sums[0], error);

    if (status != SP_OK)
        return status;
    memcpy(bench->plain, bench->tokens, bytes);
    status = run(bench, true, &out_sums[1], error);
    if (status == SP_OK && memcmp(bench->plain, bench->tokens, bytes) != 0)
        return sp_fail(error, SP_ERR_STATE, NULL, "speculative", -1,
                       "the tokens with drafts are not those without");
    return status;
}

static sp_status run_case(spec_bench *bench, double share, sp_error *error)
{
    size_t n = (size_t)bench->settings.rounds;
    double *values = sp_calloc(4 * n, sizeof *values);
    spec_case *c = &bench->cases[bench->n_cases];
    sp_draft_source source = {bench, share >= 0 ? propose : NULL};
    sp_status status = SP_OK;

    if (!values)
        return sp_fail_memory(error, 4 * n * sizeof *values, "times");
    *c = (spec_case){.requests = bench->n_requests, .adapters = bench->n_adapters, .share = share};
    bench->share = share;
    bench->n_full = 0;
    sp_engine_set_draft_source(bench->engine, source);
    if (n > 1) { /* on a GPU, passes of new numbers of rows are captured */
        spec_sums unused[2];

        status = run_pair(bench, unused, error);
    }
    for (size_t i = 0; i < n && status == SP_OK; i++) {
        spec_sums sums[2];

        status = run_pair(bench, sums, error);
        values[i] = rate_of(&sums[0]) > 0 ? rate_of(&sums[1]) / rate_of(&sums[0]) : 0;
        values[n + i] = rate_of(&sums[0]);
        values[2 * n + i] = rate_of(&sums[1]);
        values[3 * n + i] = sums[0].processor / sums[1].processor; /* of as many tokens */
        c->sums = sums[1];
    }
    c->ratio = sp_bench_median(values, n);
    c->processor_ratio = sp_bench_median(values + 3 * n, n);
    c->plain_rate = sp_bench_median(values + n, n);
    c->rate = sp_bench_median(values + 2 * n, n);
    c->verify_seconds = bench->n_full > 0 ? sp_bench_median(bench->full, bench->n_full) : 0;
    bench->n_cases += status == SP_OK;
    sp_free(values);
    return status;
}

/* The engine's own drafts, and one case for each share. */
static sp_status run_cases(spec_bench *bench, const double *shares, size_t n, size_t n_adapters,
                           sp_error *error)
{
    sp_status status = SP_OK;

    bench->n_adapters = n_adapters;
    if (bench->settings.own_drafts)
        status = run_case(bench, -1, error);
    for (size_t i = 0; i < n && status == SP_OK; i++)
        status = run_case(bench, shares[i], error);
    return status;
}

/* With the base, one adapter, and all. */
static sp_status run_count(spec_bench *bench, const double *shares, size_t n, int32_t n_requests,
                           sp_error *error)
{
    size_t n_adapters = sp_stage_n_versions(sp_engine_stage(bench->engine));
    spec_sums warm;
    sp_status status;

    bench->n_requests = n_requests;
    bench->n_adapters = 0;
    status = run(bench, false, &warm, error);
    if (status == SP_OK)
        status = run_cases(bench, shares, n, 0, error);
    if (status == SP_OK && n_adapters > 1)
        status = run_cases(bench, shares, n, 1, error);
    if (status == SP_OK && n_adapters > 0 && (n_adapters == 1 || n_requests > 1))
        status = run_cases(bench, shares, n, n_adapters, error);
    return status;
}

/* ---- set-up -------------------------------------------------------------------------------- */

static sp_status parse_shares(const char *text, double *out_shares, size_t *out_n, sp_error *error)
{
    const char *cursor = text;

    for (*out_n = 0; *cursor; (*out_n)++) {
        char *end;
        double share;

        errno = 0;
        share = strtod(cursor, &end);
        if (end == cursor || (*end != ',' && *end != '\0') || errno ||
            !(share >= 0 && share <= 1) || *out_n == SHARES_MAX)
            return sp_fail(error, SP_ERR_ARGUMENT, NULL, "acceptance", -1,
                           "--acceptance: \"%s\" is not a list of at most %d numbers from 0 to 1",
                           text, SHARES_MAX);
        out_shares[*out_n] = share;
        cursor = *end ? end + 1 : end;
    }
    return SP_OK;
}

static sp_status parse_counts(spec_bench *bench, sp_error *error)
{
    const char *cursor = bench->settings.requests;

    do {
        char *end;
        long count;

        errno = 0;
        count = strtol(cursor, &end, 10);
        if (end == cursor || (*end != ',' && *end != '\0') || errno || count < 1 || count > 1024 ||
            bench->n_counts == COUNTS_MAX)
            return sp_fail(error, SP_ERR_ARGUMENT, NULL, "requests", -1,
                           "--requests: \"%s\" is not a list of at most %d numbers from 1 to 1024",
                           bench->settings.requests, COUNTS_MAX);
        bench->counts[bench->n_counts++] = (int32_t)count;
        if (count > bench->requests_max)
            bench->requests_max = (int32_t)count;
        cursor = *end ? end + 1 : end;
    } while (*cursor);
    return SP_OK;
}

static sp_status read_text(spec_bench *bench, sp_error *error)
{
    int32_t vocab = sp_engine_shape(bench->engine)->vocab;
    char *text;
    size_t bytes;
    sp_status status;

    if (!bench->settings.prompt_file) {
        bench->n_text = bench->n_prompt + PERIOD;
        bench->text = sp_calloc((size_t)bench->n_text, sizeof *bench->text);
        for (int32_t i = 0; bench->text && i < bench->n_text; i++)
            bench->text[i] = (int32_t)((uint32_t)(i % PERIOD) * 2654435761u % (uint32_t)vocab);
        return bench->text ? SP_OK : sp_fail_memory(error, (size_t)bench->n_text, "prompts");
    }
    status = sp_file_read_all(bench->settings.prompt_file, FILE_BYTES, &text, &bytes, error);
    if (status != SP_OK)
        return status;
    status =
        sp_engine_encode(bench->engine, text, bytes, false, 0, &bench->text, &bench->n_text, error);
    sp_free(text);
    if (status == SP_OK && bench->n_text < bench->n_prompt)
        return sp_fail(error, SP_ERR_INPUT, NULL, "prompt-file", -1,
                       "%s has %d tokens; --prompt-tokens is %d", bench->settings.prompt_file,
                       bench->n_text, bench->n_prompt);
    return status;
}

static sp_status prepare(spec_bench *bench, sp_error *error)
{
    size_t n = (size_t)bench->requests_max * (size_t)bench->n_new;

    bench->ids = sp_calloc((size_t)bench->requests_max, sizeof *bench->ids);
    bench->plain = sp_calloc(n, sizeof *bench->plain);
    bench->tokens = sp_calloc(n, sizeof *bench->tokens);
    if (!bench->ids || !bench->plain || !bench->tokens)
        return sp_fail_memory(error, n * sizeof *bench->tokens, "tokens");
    return read_text(bench, error);
}

/* ---- output -------------------------------------------------------------------------------- */

static double accepted_share(const spec_case *c)
{
    return c->sums.drafted ? (double)c->sums.accepted / (double)c->sums.drafted : 0;
}

static void print_json(const spec_bench *bench)
{
    fputs("{\"bench\": \"speculative\", \"cases\": [", stdout);
    for (size_t i = 0; i < bench->n_cases; i++) {
        const spec_case *c = &bench->cases[i];

        printf("%s{\"requests\": %d, \"adapters\": %zu, \"drafts\": \"%s\", \"right\": %.4g, "
               "\"accepted\": %.4g, \"steps\": %llu, \"tokens_per_second\": %.6g, \"ratio\": %.4g, "
               "\"against\": \"the same requests without drafts\", \"processor_ratio\": %.4g, "
               "\"plain_tokens_per_second\": %.6g, \"verify_seconds\": %.6g, \"drafted\": %llu, "
               "\"draft_model_seconds\": %.4g}",
               i ? ", " : "", c->requests, c->adapters, c->share < 0 ? "own" : "forced",
               c->share < 0 ? 0 : c->share, accepted_share(c), (unsigned long long)c->sums.steps,
               c->rate, c->ratio, c->processor_ratio, c->plain_rate, c->verify_seconds,
               (unsigned long long)c->sums.drafted, c->sums.drafting);
    }
    printf("], \"prompt_tokens\": %d, \"new_tokens\": %d, \"draft_tokens\": %d, "
           "\"draft_model\": %s, \"device\": \"%s\", \"cpu_isa\": \"%s\", ",
           bench->n_prompt, bench->n_new, bench->settings.run.options.draft_tokens,
           bench->settings.run.draft_model ? "true" : "false", sp_engine_device(bench->engine),
           sp_engine_cpu_isa(bench->engine));
    sp_bench_print_machine(stdout);
    puts("}");
}

static void print_text(const spec_bench *bench)
{
    printf("requests of %d prompt tokens and %d new, at most %d drafts, %s, level %s\n",
           bench->n_prompt, bench->n_new, bench->settings.run.options.draft_tokens,
           sp_engine_device(bench->engine), sp_engine_cpu_isa(bench->engine));
    printf("%8s %8s %-14s %9s %9s %12s %12s %14s\n", "requests", "adapters", "drafts", "accepted",
           "steps", "tokens/s", "over plain", "by processor");
    for (size_t i = 0; i < bench->n_cases; i++) {
        const spec_case *c = &bench->cases[i];
        char drafts[32] = "the engine's";

        if (c->share >= 0)
            snprintf(drafts, sizeof drafts, "%.0f%% right", c->share * 100);
        printf("%8d %8zu %-14s %8.1f%% %9llu %12.1f %12.3f %14.3f\n", c->requests, c->adapters,
               drafts, accepted_share(c) * 100, (unsigned long long)c->sums.steps, c->rate,
               c->ratio, c->processor_ratio);
    }
}

/* ---- the verb ------------------------------------------------------------------------------ */

static sp_status measure(spec_bench *bench, const double *shares, size_t n, sp_error *error)
{
    sp_status status = prepare(bench, error);

    for (int32_t i = 0; i < bench->n_counts && status == SP_OK; i++)
        status = run_count(bench, shares, n, bench->counts[i], error);
    return status;
}

static int run_spec_bench(void *memory)
{
    spec_bench *bench = memory;
    const spec_settings *settings = &bench->settings;
    double shares[SHARES_MAX];
    size_t n = 0;
    sp_error error = {0};
    bool usage = true;
    sp_status status = parse_shares(settings->acceptance, shares, &n, &error);

    if (status == SP_OK)
        status = parse_counts(bench, &error);
    bench->n_prompt = (int32_t)settings->prompt_tokens;
    bench->n_new = (int32_t)settings->new_tokens;
    bench->settings.run.options.prefix_cache = false; /* every prompt is computed in every run */
    if (status == SP_OK)
        status = sp_run_settings_open(&settings->run,
                                      bench->requests_max *
                                          (settings->prompt_tokens + settings->new_tokens + 32),
                                      &bench->engine, &usage, &error);
    if (status != SP_OK)
        return usage ? sp_cli_usage("bench", &error) : sp_cli_fail("bench", &error);
    status = measure(bench, shares, n, &error);
    if (status != SP_OK)
        return sp_cli_fail("bench", &error);
    if (settings->run.json)
        print_json(bench);
    else
        print_text(bench);
    return SP_EXIT_DONE;
}

static void close_spec_bench(void *memory)
{
    spec_bench *bench = memory;

    sp_engine_close(bench->engine);
    sp_free(bench->text);
    sp_free(bench->ids);
    sp_free(bench->plain);
    sp_free(bench->tokens);
}

int sp_bench_speculative(int argc, char **argv)
{
    static const sp_bench_verb verb = {
        .usage = "usage: sidepath bench speculative --model DIR [--adapter NAME=DIR]... [FLAGS]\n",
        .uses = SP_OPTION_OF_ENGINE | SP_SETTING_OF_OUTPUT,
        .rows = own_rows,
        .n_rows = sizeof own_rows / sizeof own_rows[0],
        .bytes = sizeof(spec_bench),
        .run = run_spec_bench,
        .close = close_spec_bench,
    };

    return sp_bench_main(&verb, argc, argv);
}
