/*
 * bench_rotation.c: many streams over more adapters than there are slots.
 *
 *     bench_rotation MODEL ADAPTERS [--adapters N] [--slots N] [--streams N] [--requests N]
 *                    [--threads N] [--loaders N] [--seed N] [--commit TEXT]
 *
 * ADAPTERS holds a0 .. aN-1 (tools/make_checkpoint --adapters N --adapters-only). Every stream
 * sends one request after the other, each for an adapter drawn anew, with an answer of 16 to 64
 * tokens. The same requests are served with --slots slots, with a slot for every adapter, and as
 * requests of one adapter, in engines of their own, one after the other. Counted from the first
 * round of answers on, while all streams are busy: tokens a second of steps, rows a step, and the
 * steps to the first token.
 *
 * `most` is the mean over the steps of what the adapters with most requests in flight have
 * together, as many of them as there are slots: that step cannot have more rows, since every row
 * of a step is of an adapter in a slot, and a request has one row while it decodes.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "bench/bench_machine.h"

#include <sidepath/engine.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ADAPTERS_MAX  256
#define STREAMS_MAX   256
#define REQUESTS_MAX  100000
#define PROMPT_TOKENS 8
#define ANSWER_MIN    16
#define ANSWER_SPAN   49

typedef struct settings {
    const char *model, *folder, *commit;
    int32_t adapters, slots, streams, requests, threads, loaders;
    uint64_t seed;
} settings;

typedef struct stream {
    int64_t id; /* of the request in flight; 0: none */
    int32_t adapter;
    int64_t began_step;
    bool waits; /* for its first token */
} stream;

typedef struct run {
    const settings *settings;
    sp_engine *engine;
    int32_t slots, adapters;
    stream streams[STREAMS_MAX];
    int32_t n_sent, n_ended, n_first;
    int64_t step, first_steps[REQUESTS_MAX];
    double cpu_seconds; /* of steps, on the thread that steps */
    uint64_t random;
} run;

typedef struct outcome {
    double seconds, cpu_seconds, tokens, rows_per_step, most, first_median, first_p95, first_max;
    uint64_t rotations, copies;
} outcome;

static int fail(const char *what, const sp_error *error)
{
    (void)fprintf(stderr, "bench_rotation: %s: %s\n", what, error ? error->text : "out of memory");
    return 1;
}

/* splitmix64 */
static uint32_t below(run *r, uint32_t n)
{
    uint64_t z = (r->random += UINT64_C(0x9e3779b97f4a7c15));

    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return (uint32_t)((z ^ (z >> 31)) >> 32) % n;
}

static sp_status open_engine(run *r, sp_error *error)
{
    static char names[ADAPTERS_MAX][16], paths[ADAPTERS_MAX][1024];
    static sp_engine_adapter adapters[ADAPTERS_MAX];
    sp_engine_options options;

    for (int32_t a = 0; a < r->adapters; a++) {
        snprintf(names[a], sizeof names[a], "a%d", (int)a);
        snprintf(paths[a], sizeof paths[a], "%s/a%d", r->settings->folder, (int)a);
        adapters[a] = (sp_engine_adapter){sizeof(sp_engine_adapter), names[a], paths[a]};
    }
    sp_engine_options_default(&options, sizeof options);
    options.model_dir = r->settings->model;
    options.threads = r->settings->threads;
    options.max_loras = r->slots;
    options.max_running = STREAMS_MAX;
    options.kv_tokens = (int64_t)STREAMS_MAX * 128;
    options.max_context = 128;
    options.prefix_cache = false;
    options.loader_threads = r->settings->loaders;
    return sp_engine_open(&options, adapters, (size_t)r->adapters, &r->engine, error);
}

/* ---- streams ------------------------------------------------------------------------------- */

/* The draws do not depend on the order of service: each request has its own. */
static sp_status send_request(run *r, stream *s, sp_error *error)
{
    int32_t prompt[PROMPT_TOKENS];
    char name[16];
    sp_request request;

    r->random = r->settings->seed * UINT64_C(1000003) + (uint64_t)r->n_sent++;
    s->adapter = (int32_t)below(r, (uint32_t)r->settings->adapters) % r->adapters;
    snprintf(name, sizeof name, "a%d", (int)s->adapter);
    for (int32_t t = 0; t < PROMPT_TOKENS; t++)
        prompt[t] = (int32_t)below(r, 500);
    sp_request_default(&request, sizeof request);
    request.adapter = name;
    request.tokens = prompt;
    request.n_tokens = PROMPT_TOKENS;
    request.max_tokens = ANSWER_MIN + (int32_t)below(r, ANSWER_SPAN);
    request.ignore_eos = true;
    s->began_step = r->step;
    s->waits = true;
    return sp_engine_submit(r->engine, &request, &s->id, error);
}

static void on_event(void *user, const sp_request_event *event)
{
    run *r = user;

    for (int32_t i = 0; i < r->settings->streams; i++) {
        stream *s = &r->streams[i];

        if (s->id != event->request)
            continue;
        if (s->waits)
            r->first_steps[r->n_first++] = r->step - s->began_step;
        s->waits = false;
        if (event->finish != SP_FINISH_NONE) {
            s->id = 0;
            r->n_ended++;
        }
        return;
    }
}

static int compare_descending(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;

    return (x < y) - (x > y);
}

static double most_rows(const run *r)
{
    int32_t counts[ADAPTERS_MAX] = {0};
    double sum = 0;

    for (int32_t i = 0; i < r->settings->streams; i++)
        counts[r->streams[i].adapter]++;
    qsort(counts, (size_t)r->adapters, sizeof *counts, compare_descending);
    for (int32_t i = 0; i < r->slots && i < r->adapters; i++)
        sum += counts[i];
    return sum;
}

static double thread_seconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static sp_status step(run *r, sp_error *error)
{
    sp_status status;
    double began;

    for (int32_t i = 0; i < r->settings->streams; i++)
        if (r->streams[i].id == 0) {
            status = send_request(r, &r->streams[i], error);
            if (status != SP_OK)
                return status;
        }
    r->step++;
    began = thread_seconds();
    status = sp_engine_step(r->engine, on_event, r, error);
    r->cpu_seconds += thread_seconds() - began;
    return status < 0 ? status : SP_OK;
}

/* ---- one run ------------------------------------------------------------------------------- */

static sp_engine_stats stats_of(const run *r)
{
    sp_engine_stats stats = {.struct_bytes = sizeof stats};

    (void)sp_engine_get_stats(r->engine, &stats, NULL);
    return stats;
}

static int compare_steps(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

    return (x > y) - (x < y);
}

static void take_first_steps(run *r, int32_t from, outcome *out)
{
    int32_t n = r->n_first - from;
    int64_t *first = r->first_steps + from;

    qsort(first, (size_t)n, sizeof *first, compare_steps);
    out->first_median = (double)first[n / 2];
    out->first_p95 = (double)first[n * 95 / 100];
    out->first_max = (double)first[n - 1];
}

static sp_status measure(run *r, outcome *out, sp_error *error)
{
    sp_engine_stats before, after;
    sp_status status = SP_OK;
    int32_t first_from;
    int64_t step_from;
    double most = 0, cpu_before;

    while (status == SP_OK && r->n_ended < r->settings->streams)
        status = step(r, error);
    before = stats_of(r);
    cpu_before = r->cpu_seconds;
    first_from = r->n_first;
    step_from = r->step;
    while (status == SP_OK && r->n_ended < r->settings->requests) {
        most += most_rows(r);
        status = step(r, error);
    }
    after = stats_of(r);
    if (status != SP_OK)
        return status;
    out->seconds = after.step_seconds - before.step_seconds;
    out->cpu_seconds = r->cpu_seconds - cpu_before;
    out->tokens = (double)(after.tokens - before.tokens);
    out->rows_per_step =
        (double)(after.decode_rows - before.decode_rows) / (double)(after.steps - before.steps);
    out->most = most / (double)(r->step - step_from);
    out->rotations = after.rotations - before.rotations;
    out->copies = after.adapter_copies - before.adapter_copies;
    take_first_steps(r, first_from, out);
    return SP_OK;
}

static int run_case(const settings *s, int32_t adapters, int32_t slots, const char *name,
                    outcome *out)
{
    static run r;
    sp_error error;

    memset(&r, 0, sizeof r);
    r.settings = s;
    r.adapters = adapters;
    r.slots = slots;
    if (open_engine(&r, &error) != SP_OK || measure(&r, out, &error) != SP_OK)
        return fail(name, &error);
    sp_engine_close(r.engine);
    return 0;
}

static void print_case(const char *name, const outcome *o, const outcome *of_all, bool last)
{
    double rate = o->tokens / o->seconds, cpu_rate = o->tokens / o->cpu_seconds;

    printf("    {\"case\": \"%s\", \"tokens_per_second\": %.1f, \"ratio\": %.3f, \"against\": "
           "\"a slot for every adapter\", \"tokens_per_cpu_second\": %.1f, \"cpu_ratio\": %.3f, "
           "\"rows_per_step\": %.2f, \"most\": %.2f, "
           "\"first_token_steps\": {\"median\": %.0f, \"p95\": %.0f, \"max\": %.0f}, "
           "\"rotations\": %llu, \"copies\": %llu}%s\n",
           name, rate, rate / (of_all->tokens / of_all->seconds), cpu_rate,
           cpu_rate / (of_all->tokens / of_all->cpu_seconds), o->rows_per_step, o->most,
           o->first_median, o->first_p95, o->first_max, (unsigned long long)o->rotations,
           (unsigned long long)o->copies, last ? "" : ",");
}

/*
 * Processor time of a step as a fixed part, above all the reading of the weights, and one for each
 * row, by the two cases; and what that leaves of the throughput where a step has `most` rows.
 */
static void print_bound(const outcome *all, const outcome *few)
{
    double all_step = all->cpu_seconds / all->tokens * all->rows_per_step;
    double few_step = few->cpu_seconds / few->tokens * few->rows_per_step;
    double row = (all_step - few_step) / (all->rows_per_step - few->rows_per_step);
    double fixed = few_step - row * few->rows_per_step;
    double most_rate = few->most / (fixed + row * few->most);

    printf("  \"step_ms\": {\"fixed\": %.3f, \"row\": %.3f}, \"cpu_ratio_at_most\": %.3f,\n",
           1e3 * fixed, 1e3 * row, most_rate / (all->rows_per_step / all_step));
}

/* ---- command line -------------------------------------------------------------------------- */

static bool parse(settings *s, int argc, char **argv)
{
    const struct {
        const char *flag;
        int32_t *value, most;
    } numbers[] = {{"--adapters", &s->adapters, ADAPTERS_MAX},
                   {"--slots", &s->slots, ADAPTERS_MAX},
                   {"--streams", &s->streams, STREAMS_MAX},
                   {"--threads", &s->threads, 1024},
                   {"--loaders", &s->loaders, 64},
                   {"--requests", &s->requests, REQUESTS_MAX - STREAMS_MAX}};
    const size_t n_numbers = sizeof numbers / sizeof *numbers;

    for (int i = 3; i + 1 < argc; i += 2) {
        size_t at = 0;

        while (at < n_numbers && strcmp(argv[i], numbers[at].flag) != 0)
            at++;
        if (at < n_numbers)
            *numbers[at].value = (int32_t)strtol(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--seed") == 0)
            s->seed = strtoull(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--commit") == 0)
            s->commit = argv[i + 1];
        else
            return false;
        if (at < n_numbers && (*numbers[at].value < (numbers[at].value != &s->loaders) ||
                               *numbers[at].value > numbers[at].most))
            return false;
    }
    return argc >= 3 && argc % 2 == 1 && s->requests > s->streams;
}

int main(int argc, char **argv)
{
    settings s = {.commit = "unknown",
                  .adapters = 50,
                  .slots = 4,
                  .streams = 64,
                  .requests = 640,
                  .threads = 1,
                  .seed = 1};
    outcome few = {0}, all = {0}, one = {0};
    char processor[128];
    int result;

    if (!parse(&s, argc, argv)) {
        (void)fprintf(stderr, "usage: bench_rotation MODEL ADAPTERS [--adapters N] [--slots N] "
                              "[--streams N] [--requests N] [--threads N] [--loaders N] [--seed N] "
                              "[--commit TEXT]\n");
        return 2;
    }
    s.model = argv[1];
    s.folder = argv[2];
    result = run_case(&s, s.adapters, s.adapters, "all", &all);
    if (result == 0)
        result = run_case(&s, s.adapters, s.slots, "few", &few);
    if (result == 0)
        result = run_case(&s, 1, 1, "one", &one);
    if (result != 0)
        return result;
    sp_bench_processor_name(processor, sizeof processor);
    printf("{\n  \"bench\": \"rotation: %d streams over %d adapters\",\n  \"commit\": \"%s\",\n"
           "  \"machine\": {\"processor\": \"%s\"},\n  \"seed\": %llu, \"threads\": %d,\n"
           "  \"cases\": [\n",
           (int)s.streams, (int)s.adapters, s.commit, processor, (unsigned long long)s.seed,
           (int)s.threads);
    print_case("a slot for every adapter", &all, &all, false);
    print_case("few slots", &few, &all, false);
    print_case("one adapter", &one, &all, true);
    printf("  ],\n");
    print_bound(&all, &few);
    printf("  \"slots\": %d\n}\n", (int)s.slots);
    return 0;
}
