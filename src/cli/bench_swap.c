/*
 * bench_swap.c: `bench swap`: adapters go from the host cache into slots and out again, as fast as
 * slots fall free, beside rows that decode. What that does to a step, and the rate of the copies
 * against the same copies with nothing beside them, in one run.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "cli/bench.h"
#include "cli/cli.h"
#include "cli/run_settings.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PROMPT_TOKENS  8
#define STREAM_TOKENS  400
#define PLAIN_COPIES   20
#define SLOTS_MAX      64
#define ADAPTERS_LEAST 3 /* one whose rows run, and two that take turns in a slot */

typedef struct swap_settings {
    sp_run_settings run;
    int64_t rows, steps;
} swap_settings;

#define FIELD(member) offsetof(swap_settings, member)

static const sp_setting own_rows[] = {
    {"rows", SP_SETTING_INT, FIELD(rows), "8", 1, 1024, NULL, "N",
     "decode rows of the steps beside which adapters are swapped", true},
    {"steps", SP_SETTING_INT, FIELD(steps), "300", 20, 1000000, NULL, "N",
     "timed steps, without swaps and with", true},
};

typedef struct swap_bench {
    swap_settings settings;
    sp_engine *engine;
    sp_hold holds[SLOTS_MAX]; /* of versions that are on their way; version NULL: none */
    int32_t n_holds;          /* that are kept on their way */
    size_t next;              /* the version that is requested next */
    uint64_t copies;          /* that have ended while `timed` */
    double copy_seconds;      /* of steps while copies went on */
    double plain_seconds;     /* the best copy of as many bytes, with nothing beside it */
    double *quiet, *beside;   /* [steps] */
    size_t slot_bytes;
} swap_bench;

/* ---- rows ---------------------------------------------------------------------------------- */

static const char *name_at(const swap_bench *bench, size_t i)
{
    sp_stage_version_info info = {.struct_bytes = sizeof info};

    sp_stage_version_at(sp_engine_stage(bench->engine), i, &info, NULL);
    return info.name;
}

static sp_status submit_rows(const swap_bench *bench, sp_error *error)
{
    int32_t prompt[PROMPT_TOKENS] = {1, 2, 3, 4, 5, 6, 7, 8};
    int32_t room = sp_engine_shape(bench->engine)->max_positions - PROMPT_TOKENS;
    sp_status status = SP_OK;

    for (int64_t i = 0; i < bench->settings.rows && status == SP_OK; i++) {
        sp_request request;
        int64_t id;

        sp_request_default(&request, sizeof request);
        request.adapter = name_at(bench, 0);
        request.tokens = prompt;
        request.n_tokens = PROMPT_TOKENS;
        request.max_tokens = room < STREAM_TOKENS ? room : STREAM_TOKENS;
        request.ignore_eos = true;
        status = sp_engine_submit(bench->engine, &request, &id, error);
    }
    return status;
}

/* One step; *out_seconds is below 0 unless it decoded all rows and nothing else. */
static sp_status time_step(const swap_bench *bench, double *out_seconds, sp_error *error)
{
    sp_engine_stats before = {.struct_bytes = sizeof before},
                    after = {.struct_bytes = sizeof after};
    double began;
    sp_status status;

    sp_engine_get_stats(bench->engine, &before, NULL);
    if (before.running + before.waiting == 0) {
        status = submit_rows(bench, error);
        if (status != SP_OK)
            return status;
    }
    began = sp_clock_seconds();
    status = sp_engine_step(bench->engine, NULL, NULL, error);
    *out_seconds = sp_clock_seconds() - began;
    sp_engine_get_stats(bench->engine, &after, NULL);
    if (after.decode_rows - before.decode_rows != (uint64_t)bench->settings.rows ||
        after.prefill_rows != before.prefill_rows)
        *out_seconds = -1;
    return status;
}

/* ---- swaps --------------------------------------------------------------------------------- */

/* Requests the next version that is in no slot; the first one's rows run. */
static sp_status begin_swap(swap_bench *bench, sp_hold *hold, sp_error *error)
{
    size_t n = sp_stage_n_versions(sp_engine_stage(bench->engine));

    bench->next = bench->next + 1 < n ? bench->next + 1 : 1;
    *hold = (sp_hold){.struct_bytes = sizeof *hold};
    return sp_stage_hold(sp_engine_stage(bench->engine), SP_HOLD_NAMED, name_at(bench, bench->next),
                         hold, error);
}

/* Lets go of what is in its slot, and requests others in its place. */
static sp_status move_swaps(swap_bench *bench, bool timed, sp_error *error)
{
    sp_stage *stage = sp_engine_stage(bench->engine);

    for (int32_t i = 0; i < bench->n_holds; i++) {
        sp_hold *hold = &bench->holds[i];
        sp_status status = SP_OK;

        if (hold->version == NULL)
            status = begin_swap(bench, hold, error);
        if (status == SP_OK)
            status = sp_stage_request(stage, hold, false, error);
        if (status < 0)
            return status;
        if (status != SP_OK)
            continue;
        sp_stage_release(stage, hold);
        hold->version = NULL;
        bench->copies += timed;
    }
    return SP_OK;
}

static void end_swaps(swap_bench *bench)
{
    for (int32_t i = 0; i < bench->n_holds; i++)
        if (bench->holds[i].version != NULL)
            sp_stage_release(sp_engine_stage(bench->engine), &bench->holds[i]);
}

/* Times steps; swaps: while some versions are on their way into slots, until one has got there. */
static sp_status time_steps(swap_bench *bench, bool swaps, double *times, sp_error *error)
{
    size_t n = 0, wanted = (size_t)bench->settings.steps;
    double seconds;
    sp_status status = SP_OK;

    while ((n < wanted || (swaps && bench->copies == 0)) && status == SP_OK) {
        if (swaps)
            status = move_swaps(bench, n > 0, error);
        if (status == SP_OK)
            status = time_step(bench, &seconds, error);
        if (status != SP_OK)
            break;
        if (swaps && n > 0)
            bench->copy_seconds += seconds > 0 ? seconds : 0;
        if (seconds >= 0 && n < wanted)
            times[n++] = seconds;
    }
    return status;
}

/* The bytes of a slot, from memory that the device reaches at full speed, with nothing beside. */
static sp_status time_plain(swap_bench *bench, sp_error *error)
{
    sp_device *device;
    void *from = NULL, *to = NULL;
    sp_status status = sp_device_open(sp_engine_device(bench->engine), NULL, &device, error);

    if (status != SP_OK)
        return status;
    status = sp_device_alloc_pinned(device, bench->slot_bytes, &from, error);
    if (status == SP_OK)
        status = sp_device_alloc(device, bench->slot_bytes, &to, error);
    if (status == SP_OK)
        memset(from, 1, bench->slot_bytes);
    bench->plain_seconds = 1e9;
    for (int i = 0; i < PLAIN_COPIES && status == SP_OK; i++) {
        double began = sp_clock_seconds(), seconds;

        status = sp_device_write(device, to, from, bench->slot_bytes, error);
        seconds = sp_clock_seconds() - began;
        bench->plain_seconds = seconds < bench->plain_seconds ? seconds : bench->plain_seconds;
    }
    sp_device_free(device, to);
    sp_device_free_pinned(device, from);
    sp_device_close(device);
    return status;
}

/* ---- the verb ------------------------------------------------------------------------------ */

static sp_status prepare(swap_bench *bench, sp_error *error)
{
    sp_stage *stage = sp_engine_stage(bench->engine);
    sp_stage_version_info info = {.struct_bytes = sizeof info};
    size_t n = sp_stage_n_versions(stage);
    int32_t slots = bench->settings.run.options.max_loras;

    if (n < ADAPTERS_LEAST || slots < 2 || slots > SLOTS_MAX || (size_t)slots >= n)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "adapter", -1,
                       "at least %d adapters and fewer slots than adapters are needed, and at "
                       "least 2: give more --adapter NAME=DIR or lower --max-loras",
                       ADAPTERS_LEAST);
    sp_stage_version_at(stage, 0, &info, NULL);
    bench->slot_bytes = info.slot_bytes;
    bench->n_holds = slots - 1;
    bench->quiet = sp_calloc((size_t)bench->settings.steps, sizeof *bench->quiet);
    bench->beside = sp_calloc((size_t)bench->settings.steps, sizeof *bench->beside);
    if (bench->quiet == NULL || bench->beside == NULL)
        return sp_fail_memory(error, (size_t)bench->settings.steps * sizeof(double), "times");
    return SP_OK;
}

static void print_results(swap_bench *bench)
{
    size_t n = (size_t)bench->settings.steps;
    double quiet = sp_bench_median(bench->quiet, n), beside = sp_bench_median(bench->beside, n);
    double copied = (double)bench->copies * (double)bench->slot_bytes / bench->copy_seconds;
    double plain = (double)bench->slot_bytes / bench->plain_seconds;
    bool json = bench->settings.run.json;

    printf(json ? "{\"bench\": \"swap\", \"device\": \"%s\", \"slot_bytes\": %zu, \"rows\": %d, "
                  "\"swaps\": %llu, \"step_seconds\": %.6g, \"step_beside_seconds\": %.6g, "
                  "\"step_ratio\": %.4g, \"longest_seconds\": %.6g, \"longest_over_median\": %.4g, "
                  "\"quiet_longest_over_median\": %.4g, \"copied_bytes_per_second\": %.6g, "
                  "\"plain_bytes_per_second\": %.6g, \"copied_over_plain\": %.4g, "
                : "%s: slots of %zu bytes, %d rows, %llu swaps\n"
                  "a quiet step %.6g s, beside swaps %.6g s: %.4g times\n"
                  "the longest beside swaps %.6g s, %.4g of the median there, of the quiet ones "
                  "%.4g\n"
                  "copied %.6g bytes a second, alone %.6g: %.4g\n",
           sp_engine_device(bench->engine), bench->slot_bytes, (int)bench->settings.rows,
           (unsigned long long)bench->copies, quiet, beside, beside / quiet, bench->beside[n - 1],
           bench->beside[n - 1] / beside, bench->quiet[n - 1] / quiet, copied, plain,
           copied / plain);
    if (!json)
        return;
    sp_bench_print_machine(stdout);
    puts("}");
}

static int run_swap_bench(void *memory)
{
    swap_bench *bench = memory;
    sp_error error = {0};
    bool usage = false;
    sp_status status;

    bench->settings.run.options.prefix_cache = false;
    status = sp_run_settings_open(&bench->settings.run, bench->settings.rows * 512, &bench->engine,
                                  &usage, &error);
    if (status == SP_OK) {
        status = prepare(bench, &error);
        usage = status == SP_ERR_ARGUMENT;
    }
    if (status == SP_OK)
        status = time_plain(bench, &error);
    if (status == SP_OK)
        status = time_steps(bench, false, bench->quiet, &error);
    if (status == SP_OK)
        status = time_steps(bench, true, bench->beside, &error);
    if (status != SP_OK)
        return usage ? sp_cli_usage("bench", &error) : sp_cli_fail("bench", &error);
    print_results(bench);
    return SP_EXIT_DONE;
}

static void close_swap_bench(void *memory)
{
    swap_bench *bench = memory;

    if (bench->engine != NULL)
        end_swaps(bench);
    sp_engine_close(bench->engine);
    sp_free(bench->beside);
    sp_free(bench->quiet);
}

int sp_bench_swap(int argc, char **argv)
{
    static const sp_bench_verb verb = {
        .usage = "usage: sidepath bench swap --model DIR --adapter NAME=DIR... [FLAGS]\n\nRows of "
                 "the first adapter run; the others take turns in the slots that are left.\n",
        .uses = SP_OPTION_OF_ENGINE | SP_SETTING_OF_OUTPUT,
        .rows = own_rows,
        .n_rows = sizeof own_rows / sizeof own_rows[0],
        .bytes = sizeof(swap_bench),
        .run = run_swap_bench,
        .close = close_swap_bench,
    };

    return sp_bench_main(&verb, argc, argv);
}
