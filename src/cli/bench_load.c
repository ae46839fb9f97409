/*
 * bench_load.c: `bench load`: what it costs to bring an adapter in. Each figure is a ratio to the
 * simplest way of moving the same bytes, or to the same step without a concurrent load, in one run.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/file.h"
#include "cli/bench.h"
#include "cli/cli.h"
#include "cli/run_settings.h"
#include "kernels/cpu/kernels.h"
#include "pool/image.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WEIGHTS_FILE  "adapter_model.safetensors"
#define PIECE_BYTES   ((size_t)256 << 10)
#define PROMPT_TOKENS 8
#define STREAM_TOKENS 200
#define ENDS          20 /* loads at either end of the row that are compared */
#define CASES_MAX     16

typedef struct load_settings {
    sp_run_settings run;
    int64_t loads, rounds, rows, steps;
    bool files_only;
} load_settings;

#define FIELD(member) offsetof(load_settings, member)

static const sp_setting own_rows[] = {
    {"loads", SP_SETTING_INT, FIELD(loads), "1000", 40, 1000000, NULL, "N",
     "loads and unloads in a row, of which the first and the last are compared", true},
    {"rounds", SP_SETTING_INT, FIELD(rounds), "15", 3, 10000, NULL, "N",
     "rounds of packing and copying; the best one counts", true},
    {"rows", SP_SETTING_INT, FIELD(rows), "4", 1, 1024, NULL, "N",
     "decode rows of the steps beside which adapters are loaded", true},
    {"steps", SP_SETTING_INT, FIELD(steps), "300", 20, 1000000, NULL, "N",
     "timed steps, without loads and with", true},
    {"files-only", SP_SETTING_BOOL, FIELD(files_only), NULL, 0, 0, NULL, NULL,
     "packing and copying only: of the model, config.json is enough", true},
};

typedef struct load_case {
    const char *name, *against;
    size_t bytes;
    double seconds, other_seconds; /* ratio is seconds / other_seconds, or its inverse for rates */
    double ratio;
} load_case;

typedef struct load_bench {
    load_settings settings;
    const char *name, *path; /* the adapter */
    char *name_memory;
    double plain_seconds; /* reading, converting and one memcpy */
    load_case cases[CASES_MAX];
    size_t n_cases;
} load_bench;

static void add_case(load_bench *bench, const char *name, size_t bytes, double seconds,
                     double other_seconds, double ratio, const char *against)
{
    bench->cases[bench->n_cases++] = (load_case){.name = name,
                                                 .against = against,
                                                 .bytes = bytes,
                                                 .seconds = seconds,
                                                 .other_seconds = other_seconds,
                                                 .ratio = ratio};
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* What the machine can do, whatever else runs on it. */
static double best_of(double *values, size_t n)
{
    qsort(values, n, sizeof *values, compare_doubles);
    return values[0];
}

/* The value that 99 of 100 do not exceed; sorts them in place. */
static double percentile_99(double *values, size_t n)
{
    qsort(values, n, sizeof *values, compare_doubles);
    return values[(n - 1) * 99 / 100];
}

/* ---- from disk to an image ----------------------------------------------------------------- */

typedef struct pack_parts {
    sp_geometry *geometry;
    sp_layout *layout;
    sp_device *device;
    sp_pool *pool;
    sp_image *image;
    sp_exec *exec;
    size_t file_bytes;
    sp_dtype stored;
} pack_parts;

static sp_status open_once(const load_bench *bench, const pack_parts *parts, sp_exec *exec,
                           sp_adapter **out_adapter, sp_error *error)
{
    sp_adapter_options options;

    sp_adapter_options_default(&options, sizeof options);
    options.geometry = parts->geometry;
    options.base_dir = bench->settings.run.model;
    options.exec = exec;
    return sp_adapter_open(bench->path, &options, out_adapter, error);
}

static sp_status create_exec(const load_bench *bench, sp_exec **out_exec, sp_error *error)
{
    sp_exec_options options;

    sp_exec_options_default(&options, sizeof options);
    options.threads = bench->settings.run.options.threads;
    return sp_exec_create(&options, out_exec, error);
}

static sp_status create_parts(const load_bench *bench, pack_parts *parts, sp_error *error)
{
    sp_layout_options layout;
    sp_pool_options pool;
    sp_adapter *adapter;
    sp_status status = sp_geometry_open(bench->settings.run.model, &parts->geometry, error);

    if (status != SP_OK)
        return status;
    status = create_exec(bench, &parts->exec, error);
    if (status != SP_OK)
        return status;
    status = open_once(bench, parts, NULL, &adapter, error);
    if (status != SP_OK)
        return status;
    sp_layout_options_default(&layout, sizeof layout);
    layout.geometry = parts->geometry;
    layout.modules = sp_adapter_modules(adapter);
    layout.rank = sp_adapter_rank_max(adapter);
    status = sp_layout_create(&layout, &parts->layout, error);
    if (status == SP_OK)
        status = sp_layout_pack(parts->layout, adapter, NULL, &parts->image, error);
    for (size_t i = 0; status == SP_OK && i < sp_adapter_n_sites(adapter); i++) {
        const sp_adapter_site *site = sp_adapter_site_at(adapter, i);

        parts->stored = site->a.dtype;
        parts->file_bytes += ((size_t)site->a.rows * (size_t)site->a.cols +
                              (size_t)site->b.rows * (size_t)site->b.cols) *
                             sp_dtype_bytes(site->a.dtype);
    }
    sp_adapter_release(adapter);
    if (status == SP_OK)
        status = sp_device_open("cpu", NULL, &parts->device, error);
    if (status != SP_OK)
        return status;
    sp_pool_options_default(&pool, sizeof pool);
    pool.layout = parts->layout;
    pool.device = parts->device;
    pool.slots = 2;
    return sp_pool_create(&pool, &parts->pool, error);
}

static void destroy_parts(pack_parts *parts)
{
    sp_exec_destroy(parts->exec);
    sp_image_destroy(parts->image);
    sp_pool_destroy(parts->pool);
    sp_device_close(parts->device);
    sp_layout_release(parts->layout);
    sp_geometry_release(parts->geometry);
}

/*
 * The plain loop over the same bytes, without any check: the file into memory, and from there as
 * BF16 into memory of its own, as an image is. In steps of the whole file, or of pieces, where the
 * stored bytes never leave the cache: an opened adapter keeps them.
 */
static sp_status read_and_convert(const sp_file *file, sp_dtype stored, const sp_kernels *kernels,
                                  size_t step_bytes, double *out_seconds, sp_error *error)
{
    double began = sp_clock_seconds();
    size_t element_bytes = sp_dtype_bytes(stored);
    char *piece = sp_aligned_malloc(step_bytes, 64);
    uint16_t *out = sp_aligned_malloc(file->bytes / element_bytes * 2 + 64, 64);
    sp_status status = piece && out ? SP_OK : sp_fail_memory(error, file->bytes, "a copy");

    for (uint64_t at = 0; at < file->bytes && status == SP_OK; at += step_bytes) {
        uint64_t left = file->bytes - at;
        size_t n = left < step_bytes ? (size_t)left : step_bytes;

        status = sp_file_read(file, at, piece, n, error);
        kernels->convert(SP_DTYPE_BF16, out + at / element_bytes, stored, piece,
                         (int64_t)(n / element_bytes));
    }
    sp_aligned_free(out);
    sp_aligned_free(piece);
    *out_seconds = sp_clock_seconds() - began;
    return status;
}

/* Seconds of each round. */
typedef struct pack_times {
    double *alone, *hashing, *rest; /* [rounds] each, as all of them; alone = hashing + rest */
    double *helped, *plain, *in_cache;
} pack_times;

static sp_status pack_again(const load_bench *bench, pack_parts *parts, sp_exec *exec,
                            double *out_seconds, double *out_hash_seconds, sp_error *error)
{
    double began = sp_clock_seconds();
    sp_adapter *adapter;
    sp_image *image;
    sp_status status = open_once(bench, parts, exec, &adapter, error);

    if (status != SP_OK)
        return status;
    *out_hash_seconds = sp_adapter_hash_seconds(adapter);
    status = sp_layout_pack(parts->layout, adapter, exec, &image, error);
    sp_adapter_release(adapter);
    if (status == SP_OK)
        sp_image_destroy(image);
    *out_seconds = sp_clock_seconds() - began;
    return status;
}

/* The rounds take turns, so that what else the machine does meets all of them. */
static sp_status run_packing(const load_bench *bench, pack_parts *parts, const sp_file *file,
                             const pack_times *times, sp_error *error)
{
    const sp_kernels *kernels;
    double ignored;
    sp_status status = sp_kernels_get(NULL, &kernels, error);

    for (int64_t i = 0; i < bench->settings.rounds && status == SP_OK; i++) {
        status = pack_again(bench, parts, NULL, &times->alone[i], &times->hashing[i], error);
        times->rest[i] = times->alone[i] - times->hashing[i];
        if (status == SP_OK)
            status = pack_again(bench, parts, parts->exec, &times->helped[i], &ignored, error);
        if (status == SP_OK)
            status = read_and_convert(file, parts->stored, kernels, (size_t)file->bytes,
                                      &times->plain[i], error);
        if (status == SP_OK)
            status = read_and_convert(file, parts->stored, kernels, PIECE_BYTES,
                                      &times->in_cache[i], error);
    }
    return status;
}

/* What no plain loop has to make, the digest, is taken out of the first case and shown apart. */
static void add_packing(load_bench *bench, const pack_parts *parts, const pack_times *times)
{
    static const char plain_rate[] = "rate of reading the file and converting all of it";
    static const char cache_rate[] = "rate of the same in pieces that stay in the cache";
    size_t n = (size_t)bench->settings.rounds, bytes = parts->file_bytes;
    double plain = best_of(times->plain, n), rest = best_of(times->rest, n);
    double hashing = best_of(times->hashing, n), alone = best_of(times->alone, n);
    double helped = best_of(times->helped, n), in_cache = best_of(times->in_cache, n);

    bench->plain_seconds += plain;
    add_case(bench, "open, audit and pack, no digest", bytes, rest, plain, plain / rest,
             plain_rate);
    add_case(bench, "  the same", bytes, rest, in_cache, in_cache / rest, cache_rate);
    add_case(bench, "  the digest", bytes, hashing, plain, plain / hashing, plain_rate);
    add_case(bench, "  both", bytes, alone, plain, plain / alone, plain_rate);
    if (sp_exec_threads(parts->exec) > 1)
        add_case(bench, "  both, by all threads", bytes, helped, alone, alone / helped,
                 "rate of one thread");
}

static sp_status time_packing(load_bench *bench, pack_parts *parts, double *memory, sp_error *error)
{
    size_t n = (size_t)bench->settings.rounds;
    pack_times times = {memory,         memory + n,     memory + 2 * n,
                        memory + 3 * n, memory + 4 * n, memory + 5 * n};
    char *path = sp_path_join(bench->path, WEIGHTS_FILE);
    sp_file file;
    sp_status status;

    if (!path)
        return sp_fail_memory(error, strlen(bench->path), "a path");
    status = sp_file_open(path, &file, error);
    sp_free(path);
    if (status != SP_OK)
        return status;
    status = run_packing(bench, parts, &file, &times, error);
    sp_file_close(&file);
    if (status == SP_OK)
        add_packing(bench, parts, &times);
    return status;
}

/* ---- from an image to a slot --------------------------------------------------------------- */

static sp_status time_copying(load_bench *bench, pack_parts *parts, double *times, double *plain,
                              sp_error *error)
{
    size_t n = (size_t)bench->settings.rounds, bytes = sp_layout_slot_bytes(parts->layout);
    char *to = sp_aligned_calloc(2 * bytes, SP_POOL_ALIGN_BYTES);
    double seconds, other;
    sp_status status = to ? SP_OK : sp_fail_memory(error, 2 * bytes, "a copy");

    for (size_t i = 0; i < n + 2 && status == SP_OK; i++) { /* two more: pages are touched */
        sp_slot_handle handle;
        double began = sp_clock_seconds();

        status = sp_pool_load(parts->pool, parts->image, &handle, error);
        times[i % n] = sp_clock_seconds() - began;
        if (status == SP_OK)
            status = sp_pool_release(parts->pool, handle, error);
        began = sp_clock_seconds();
        memcpy(to + (i % 2) * bytes, parts->image->data, bytes);
        plain[i % n] = sp_clock_seconds() - began;
    }
    if (status == SP_OK) {
        seconds = best_of(times, n);
        other = best_of(plain, n);
        bench->plain_seconds += other;
        add_case(bench, "image to slot, tables switched", bytes, seconds, other, other / seconds,
                 "rate of memcpy of the same bytes");
    }
    sp_aligned_free(to);
    return status;
}

static sp_status time_parts(load_bench *bench, sp_error *error)
{
    size_t n = (size_t)bench->settings.rounds;
    double *times = sp_calloc(6 * n, sizeof *times);
    pack_parts parts = {0};
    sp_status status = SP_ERR_MEMORY;

    if (times)
        status = create_parts(bench, &parts, error);
    else
        sp_fail_memory(error, 6 * n * sizeof *times, "times");
    if (status == SP_OK)
        status = time_packing(bench, &parts, times, error);
    if (status == SP_OK)
        status = time_copying(bench, &parts, times, times + n, error);
    destroy_parts(&parts);
    sp_free(times);
    return status;
}

/* ---- loads in an engine -------------------------------------------------------------------- */

static sp_status begin_load(load_bench *bench, sp_engine *engine, int64_t *out_ticket,
                            sp_error *error)
{
    sp_stage_load_options load;

    sp_stage_load_options_default(&load, sizeof load);
    load.name = "loaded by bench";
    load.location = bench->path;
    load.replace = true;
    return sp_stage_load(sp_engine_stage(engine), &load, out_ticket, error);
}

static sp_status load_and_unload(load_bench *bench, sp_engine *engine, double *out_seconds,
                                 sp_error *error)
{
    double began = sp_clock_seconds();
    int64_t ticket;
    sp_status status = begin_load(bench, engine, &ticket, error);

    while (status == SP_PENDING) {
        sp_stage_poll_wait(sp_engine_stage(engine), 100);
        status = sp_stage_result(sp_engine_stage(engine), ticket, NULL, error);
    }
    *out_seconds = sp_clock_seconds() - began;
    if (status == SP_OK)
        status = sp_stage_unload(sp_engine_stage(engine), "loaded by bench", error);
    return status;
}

/* Nothing else holds the content, so every load reads, packs and copies all of it. */
static sp_status time_loads(load_bench *bench, sp_error *error)
{
    size_t n = (size_t)bench->settings.loads;
    double *times = sp_calloc(n, sizeof *times), first, last, all;
    sp_run_settings settings = bench->settings.run;
    sp_engine *engine = NULL;
    bool usage;
    sp_status status;

    if (!times)
        return sp_fail_memory(error, n * sizeof *times, "times");
    settings.adapters.n = 0;
    status = sp_run_settings_open(&settings, 64, &engine, &usage, error);
    for (size_t i = 0; i < n && status == SP_OK; i++)
        status = load_and_unload(bench, engine, &times[i], error);
    if (status == SP_OK) {
        first = sp_bench_median(times, ENDS);
        last = sp_bench_median(times + n - ENDS, ENDS);
        all = sp_bench_median(times, n);
        add_case(bench, "disk to READY", 0, all, bench->plain_seconds, bench->plain_seconds / all,
                 "rate of reading, converting and one memcpy");
        add_case(bench, "the last 20 loads", 0, last, first, last / first,
                 "time of the first 20 loads");
    }
    sp_engine_close(engine);
    sp_free(times);
    return status;
}

/* ---- steps beside loads -------------------------------------------------------------------- */

/* Every second row has the adapter, the others are the base's. */
static sp_status submit_rows(load_bench *bench, sp_engine *engine, sp_error *error)
{
    int32_t prompt[PROMPT_TOKENS] = {1, 2, 3, 4, 5, 6, 7, 8};
    int32_t room = sp_engine_shape(engine)->max_positions - PROMPT_TOKENS;
    sp_status status = SP_OK;

    for (int64_t i = 0; i < bench->settings.rows && status == SP_OK; i++) {
        sp_request request;
        int64_t id;

        sp_request_default(&request, sizeof request);
        request.adapter = i % 2 == 0 ? bench->name : sp_engine_base_name(engine);
        request.tokens = prompt;
        request.n_tokens = PROMPT_TOKENS;
        request.max_tokens = room < STREAM_TOKENS ? room : STREAM_TOKENS;
        request.ignore_eos = true;
        status = sp_engine_submit(engine, &request, &id, error);
    }
    return status;
}

/* One step; *out_seconds is below 0 unless it decoded all rows and nothing else. */
static sp_status time_step(load_bench *bench, sp_engine *engine, double *out_seconds,
                           sp_error *error)
{
    sp_engine_stats before = {.struct_bytes = sizeof before},
                    after = {.struct_bytes = sizeof after};
    double began;
    sp_status status;

    sp_engine_get_stats(engine, &before, NULL);
    if (before.running + before.waiting == 0) {
        status = submit_rows(bench, engine, error);
        if (status != SP_OK)
            return status;
    }
    began = sp_clock_seconds();
    status = sp_engine_step(engine, NULL, NULL, error);
    *out_seconds = sp_clock_seconds() - began;
    sp_engine_get_stats(engine, &after, NULL);
    if (after.decode_rows - before.decode_rows != (uint64_t)bench->settings.rows ||
        after.prefill_rows != before.prefill_rows)
        *out_seconds = -1;
    return status;
}

/* Times steps; with_loads: a load, a new one whenever the last has ended, goes on beside them. */
static sp_status time_steps(load_bench *bench, sp_engine *engine, bool with_loads, double *times,
                            uint64_t *out_loads, sp_error *error)
{
    size_t n = 0;
    int64_t ticket = 0;
    sp_status status = SP_OK;

    while (n < (size_t)bench->settings.steps && status == SP_OK) {
        if (with_loads && ticket == 0) {
            sp_stage_unload(sp_engine_stage(engine), "loaded by bench", NULL);
            status = begin_load(bench, engine, &ticket, error);
            if (status != SP_PENDING)
                break;
        }
        status = time_step(bench, engine, &times[n], error);
        if (status == SP_OK && times[n] >= 0)
            n++;
        if (ticket != 0 && sp_stage_result(sp_engine_stage(engine), ticket, NULL, error) == SP_OK) {
            ticket = 0;
            ++*out_loads;
        }
    }
    return status;
}

static void add_steps(load_bench *bench, double *quiet, double *loaded, bool spare)
{
    size_t n = (size_t)bench->settings.steps;
    double quiet_median = sp_bench_median(quiet, n), quiet_99 = percentile_99(quiet, n);
    double loaded_median = sp_bench_median(loaded, n), loaded_99 = percentile_99(loaded, n);

    add_case(bench, spare ? "step beside loads, a spare core" : "step beside loads, no spare core",
             0, loaded_median, quiet_median, loaded_median / quiet_median,
             "time of a quiet step, medians");
    add_case(bench, "  99 of 100 such steps", 0, loaded_99, quiet_99, loaded_99 / quiet_99,
             "time of 99 of 100 quiet steps");
    add_case(bench, "  longest such step", 0, loaded[n - 1], quiet[n - 1],
             loaded[n - 1] / quiet[n - 1], "time of the longest quiet step");
}

/*
 * The adapter that is loaded has the running one's bytes under the same digest, which would make
 * a load share its slot: so the running rows' adapter is the second --adapter where there is one,
 * and else the base alone runs.
 */
static sp_status time_pauses(load_bench *bench, int32_t threads, bool spare, sp_error *error)
{
    size_t n = (size_t)bench->settings.steps;
    double *quiet = sp_calloc(n, sizeof *quiet), *loaded = sp_calloc(n, sizeof *loaded);
    sp_run_settings settings = bench->settings.run;
    sp_engine *engine = NULL;
    uint64_t n_loads = 0;
    bool usage;
    sp_status status = SP_ERR_MEMORY;

    settings.options.threads = threads;
    settings.adapters.values++;
    settings.adapters.n--;
    if (quiet && loaded)
        status =
            sp_run_settings_open(&settings, bench->settings.rows * 512, &engine, &usage, error);
    else
        sp_fail_memory(error, n * sizeof *quiet, "times");
    if (status == SP_OK)
        status = time_steps(bench, engine, false, quiet, &n_loads, error);
    if (status == SP_OK)
        status = time_steps(bench, engine, true, loaded, &n_loads, error);
    if (status == SP_OK)
        add_steps(bench, quiet, loaded, spare);
    sp_engine_close(engine);
    sp_free(loaded);
    sp_free(quiet);
    return status;
}

static int32_t usable_threads(const load_bench *bench)
{
    sp_exec *exec;
    int32_t threads;

    if (create_exec(bench, &exec, NULL) != SP_OK)
        return 1;
    threads = sp_exec_threads(exec);
    sp_exec_destroy(exec);
    return threads;
}

static sp_status time_engine(load_bench *bench, int32_t threads, sp_error *error)
{
    sp_status status = time_loads(bench, error);

    if (status == SP_OK && threads > 1)
        status = time_pauses(bench, threads - 1, true, error);
    if (status == SP_OK)
        status = time_pauses(bench, threads, false, error);
    return status;
}

/* ---- the verb ------------------------------------------------------------------------------ */

static void print_json(const load_bench *bench)
{
    fputs("{\"bench\": \"load\", \"cases\": [", stdout);
    for (size_t i = 0; i < bench->n_cases; i++) {
        const load_case *c = &bench->cases[i];

        printf("%s{\"case\": \"%s\", \"bytes\": %zu, \"seconds\": %.6g, \"against_seconds\": %.6g, "
               "\"ratio\": %.4g, \"against\": \"%s\"}",
               i ? ", " : "", c->name + strspn(c->name, " "), c->bytes, c->seconds,
               c->other_seconds, c->ratio, c->against);
    }
    fputs("], ", stdout);
    sp_bench_print_machine(stdout);
    puts("}");
}

static void print_text(const load_bench *bench)
{
    printf("%-34s %12s %12s %9s %7s  %s\n", "case", "bytes", "ms", "GB/s", "ratio", "to");
    for (size_t i = 0; i < bench->n_cases; i++) {
        const load_case *c = &bench->cases[i];

        printf("%-34s %12zu %12.3f %9.2f %7.2f  %s\n", c->name, c->bytes, c->seconds * 1e3,
               (double)c->bytes / c->seconds / 1e9, c->ratio, c->against);
    }
}

/* The first --adapter is the one that is loaded; the second one's rows run beside. */
static sp_status choose_adapter(load_bench *bench, sp_error *error)
{
    const sp_setting_list *list = &bench->settings.run.adapters;
    const char *equals = list->n > 0 ? strchr(list->values[0], '=') : NULL;
    const char *second = list->n > 1 ? strchr(list->values[1], '=') : NULL;

    if (!equals)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "adapter", -1,
                       "--adapter NAME=DIR is required: the first is loaded, rows of the second "
                       "run beside it");
    bench->path = equals + 1;
    bench->name = NULL;
    if (second)
        bench->name = bench->name_memory =
            sp_strndup(list->values[1], (size_t)(second - list->values[1]));
    return SP_OK;
}

static int run_load_bench(void *memory)
{
    load_bench *bench = memory;
    int32_t threads = usable_threads(bench);
    sp_error error = {0};
    sp_status status = choose_adapter(bench, &error);

    if (status != SP_OK)
        return sp_cli_usage("bench", &error);
    bench->settings.run.options.adapter_loading = true;
    bench->settings.run.options.prefix_cache = false;
    status = time_parts(bench, &error);
    if (status == SP_OK && !bench->settings.files_only)
        status = time_engine(bench, threads, &error);
    if (status != SP_OK)
        return sp_cli_fail("bench", &error);
    if (bench->settings.run.json)
        print_json(bench);
    else
        print_text(bench);
    return SP_EXIT_DONE;
}

static void close_load_bench(void *memory)
{
    load_bench *bench = memory;

    sp_free(bench->name_memory);
}

int sp_bench_load(int argc, char **argv)
{
    static const sp_bench_verb verb = {
        .usage = "usage: sidepath bench load --model DIR --adapter NAME=DIR [--adapter NAME=DIR] "
                 "[FLAGS]\n\nThe first adapter is loaded again and again, rows of the second run "
                 "beside it.\n",
        .uses = SP_OPTION_OF_ENGINE | SP_SETTING_OF_OUTPUT,
        .rows = own_rows,
        .n_rows = sizeof own_rows / sizeof own_rows[0],
        .bytes = sizeof(load_bench),
        .run = run_load_bench,
        .close = close_load_bench,
    };

    return sp_bench_main(&verb, argc, argv);
}
