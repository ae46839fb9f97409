/*
 * preflight: each sum is held against what is left, in order, and the first that does not fit is
 * named with its setting; what was left open gets its share. The sums are done by hand, in MiB.
 * Then the same through sp_engine_open, by memory_bytes and in a cgroup where one can be made:
 * every refusal comes within a second and leaves nothing allocated.
 */
#include "engine/model/preflight.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "support/test.h"

#include <sidepath/engine.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)

/* ---- the arithmetic ------------------------------------------------------------------------ */

/* 100 + 4 * 10 + 20 + 30 + 40 = 230 before the KV cache, which takes 16 more. */
static sp_memory_needs needs_of_246(void)
{
    return (sp_memory_needs){
        .weights = 100 * MIB,
        .slot = 10 * MIB,
        .slots = 4,
        .overlay = 20 * MIB,
        .scratch = 30 * MIB,
        .host_cache = 40 * MIB,
        .kv_token = MIB,
        .kv_tokens = 16,
        .max_running = 2,
        .max_context = 20,
        .page_tokens = 16,
    };
}

static void refused(const sp_memory_needs *needs, size_t free_bytes, const char *setting)
{
    sp_memory_shares shares = {.kv_tokens = -7, .host_cache = 7};
    sp_error error = {0};

    assert_int_equal(sp_memory_preflight(needs, free_bytes, &shares, &error), SP_ERR_MEMORY);
    assert_string_equal(error.code, SP_CODE_MEMORY_SHORT);
    assert_string_equal(error.subject, setting);
    assert_int_equal(shares.kv_tokens, -7);
    assert_int_equal(shares.host_cache, 7);
}

static sp_memory_shares fits(const sp_memory_needs *needs, size_t free_bytes)
{
    sp_memory_shares shares;
    sp_error error;

    assert_ok(sp_memory_preflight(needs, free_bytes, &shares, &error), &error);
    return shares;
}

static void the_sums_in_their_order(void **state)
{
    sp_memory_needs needs = needs_of_246();

    (void)state;
    assert_int_equal(fits(&needs, 246 * MIB).kv_tokens, 16);
    assert_int_equal(fits(&needs, 246 * MIB).host_cache, 40 * MIB);
    refused(&needs, 246 * MIB - 1, "kv-tokens");
    refused(&needs, 230 * MIB - 1, "host-cache-mib");
    refused(&needs, 190 * MIB - 1, "step-rows");
    refused(&needs, 160 * MIB - 1, "overlay-bytes");
    refused(&needs, 140 * MIB - 1, "max-loras");
    refused(&needs, 100 * MIB - 1, "model");
    refused(&needs, 0, "model");
    needs.draft = 50 * MIB; /* after the weights */
    assert_int_equal(fits(&needs, 296 * MIB).kv_tokens, 16);
    refused(&needs, 296 * MIB - 1, "kv-tokens");
    refused(&needs, 150 * MIB - 1, "draft-model");
    refused(&needs, 100 * MIB - 1, "model");
}

static void the_text_says_needed_and_free(void **state)
{
    sp_memory_needs needs = needs_of_246();
    sp_memory_shares shares;
    sp_error error;

    (void)state;
    needs.slots = 512;
    needs.slot = 40 * MIB;
    assert_int_equal(sp_memory_preflight(&needs, 2 * GIB, &shares, &error), SP_ERR_MEMORY);
    assert_non_null(strstr(error.text, "20480 MiB needed, 1948 MiB free"));
    assert_non_null(strstr(error.text, "lower max-loras"));
}

static void an_open_kv_cache_gets_half_of_what_is_left(void **state)
{
    sp_memory_needs needs = needs_of_246();

    (void)state;
    needs.kv_tokens = 0;
    assert_int_equal(fits(&needs, 330 * MIB).kv_tokens, 48); /* half of 100, in pages of 16 */
    assert_int_equal(fits(&needs, 358 * MIB).kv_tokens, 64); /* half of 128 */
    assert_int_equal(fits(&needs, 900 * MIB).kv_tokens, 64); /* 2 requests of 20, in pages */
    assert_int_equal(fits(&needs, 246 * MIB).kv_tokens, 16); /* one page is the least */
    refused(&needs, 245 * MIB, "kv-tokens");
}

static void an_open_host_cache_gets_half_of_the_rest(void **state)
{
    sp_memory_needs needs = needs_of_246();

    (void)state;
    needs.kv_tokens = 0;
    needs.host_cache = 0;
    /* 190 are taken, KV gets 64 of the 128 that are left; an image of 10, and half of 64. */
    assert_int_equal(fits(&needs, 318 * MIB).kv_tokens, 64);
    assert_int_equal(fits(&needs, 318 * MIB).host_cache, 42 * MIB);
    needs.slots = 0;
    assert_int_equal(fits(&needs, 318 * MIB).host_cache, 0);
}

/* Beside the 230 of the others: 2 states of 8, and snapshots of 5 at every 32 tokens. */
static sp_memory_needs recurrent_needs(void)
{
    sp_memory_needs needs = needs_of_246();

    needs.kv_tokens = 128;
    needs.state = 8 * MIB;
    needs.state_budget = 16 * MIB;
    needs.snapshot = 5 * MIB;
    needs.snapshot_budget = 15 * MIB;
    needs.snapshot_tokens = 32;
    return needs;
}

static void budgets_of_states_and_snapshots_come_before_the_kv_cache(void **state)
{
    sp_memory_needs needs = recurrent_needs();

    (void)state;
    assert_int_equal(fits(&needs, 389 * MIB).states, 2);
    assert_int_equal(fits(&needs, 389 * MIB).snapshots, 3);
    refused(&needs, 389 * MIB - 1, "kv-tokens");
    refused(&needs, 261 * MIB - 1, "state-snapshot-bytes");
    refused(&needs, 246 * MIB - 1, "state-bytes");
    refused(&needs, 230 * MIB - 1, "host-cache-mib");
    needs.state_budget = 8 * MIB;
    assert_int_equal(fits(&needs, 389 * MIB).states, 1);
    /* No more than can be used: max_running states, and a snapshot for every 32 tokens. */
    needs.state_budget = needs.snapshot_budget = 400 * MIB;
    assert_int_equal(fits(&needs, 900 * MIB).states, 2);
    assert_int_equal(fits(&needs, 900 * MIB).snapshots, 4);
    needs.snapshot_tokens = 0;
    assert_int_equal(fits(&needs, 900 * MIB).snapshots, 0);
    needs = needs_of_246();
    assert_int_equal(fits(&needs, 900 * MIB).states, 0);
    assert_int_equal(fits(&needs, 900 * MIB).snapshots, 0);
}

static void open_budgets_are_shares_of_what_is_left(void **state)
{
    sp_memory_needs needs = recurrent_needs();

    (void)state;
    needs.state_budget = needs.snapshot_budget = 0;
    needs.max_running = 100;
    /* A quarter of 160 for states, an eighth of the other 120 for snapshots. */
    needs.kv_tokens = 96;
    assert_int_equal(fits(&needs, 390 * MIB).states, 5);
    assert_int_equal(fits(&needs, 390 * MIB).snapshots, 3);
    /* One state is the least, and no snapshot. */
    needs.kv_tokens = 16;
    assert_int_equal(fits(&needs, 254 * MIB).states, 1);
    assert_int_equal(fits(&needs, 254 * MIB).snapshots, 0);
    refused(&needs, 254 * MIB - 1, "kv-tokens");
    refused(&needs, 238 * MIB - 1, "state-bytes");
    /* Where the free memory is not known, what is useful. */
    needs.kv_tokens = 0;
    assert_int_equal(fits(&needs, SIZE_MAX).states, 100);
    assert_int_equal(fits(&needs, SIZE_MAX).snapshots, 100);
    needs.state = SIZE_MAX / 4;
    refused(&needs, SIZE_MAX, "state-bytes");
}

static void a_budget_holds_one_at_least(void **state)
{
    sp_memory_needs needs = recurrent_needs();
    sp_memory_shares shares = {-7, 7, 7, 7};
    sp_error error;

    (void)state;
    needs.state_budget = 8 * MIB - 1;
    assert_int_equal(sp_memory_preflight(&needs, GIB, &shares, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "state-bytes");
    assert_non_null(strstr(error.text, "8388608"));
    needs = recurrent_needs();
    needs.snapshot_budget = 5 * MIB - 1;
    assert_int_equal(sp_memory_preflight(&needs, GIB, &shares, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "state-snapshot-bytes");
    assert_non_null(strstr(error.text, "state-snapshot-tokens"));
    assert_int_equal(shares.states, 7);
}

static void sums_that_overflow_fit_nowhere(void **state)
{
    sp_memory_needs needs = needs_of_246();

    (void)state;
    needs.slot = SIZE_MAX / 2;
    refused(&needs, 1000 * MIB, "max-loras");
    refused(&needs, SIZE_MAX, "max-loras");
    needs = needs_of_246();
    needs.kv_token = SIZE_MAX / 4;
    refused(&needs, SIZE_MAX, "kv-tokens");
}

static void where_nothing_is_known_all_fit(void **state)
{
    sp_memory_needs needs = needs_of_246();

    (void)state;
    needs.kv_tokens = 0;
    needs.host_cache = 0;
    assert_int_equal(fits(&needs, SIZE_MAX).kv_tokens, 64);
    assert_int_equal(fits(&needs, SIZE_MAX).host_cache, 0);
    needs.max_context = 40960;
    assert_int_equal(fits(&needs, SIZE_MAX).kv_tokens, 65536);
}

/* ---- an engine's opening ------------------------------------------------------------------- */

static sp_engine_options small_options(void)
{
    sp_engine_options options;

    sp_engine_options_default(&options, sizeof options);
    options.model_dir = SP_TEST_DEMO "/base";
    options.threads = 1;
    options.max_loras = 2;
    options.max_lora_rank = 8;
    options.kv_tokens = 320;
    options.adapter_loading = true;
    return options;
}

/* NULL where the opening is refused as it should be, else what is wrong; it runs in a child, too,
 * where no assertion of cmocka is heard. */
static const char *opening_refused(const sp_engine_options *options, const char *setting)
{
    size_t before = sp_alloc_bytes();
    double began = sp_clock_seconds();
    sp_engine *engine = NULL;
    sp_error error = {0};
    sp_status status = sp_engine_open(options, NULL, 0, &engine, &error);

    if (status == SP_OK)
        sp_engine_close(engine);
    if (status != SP_ERR_MEMORY || !error.code || strcmp(error.code, SP_CODE_MEMORY_SHORT) != 0)
        return "it was not refused for memory";
    if (strcmp(error.subject, setting) != 0)
        return "another setting is named";
    if (sp_clock_seconds() - began > 1)
        return "it took more than a second";
    return sp_alloc_bytes() == before ? NULL : "memory was left behind";
}

static void check_refused(const sp_engine_options *options, const char *setting)
{
    const char *wrong = opening_refused(options, setting);

    if (wrong)
        fail_msg("%s: %s", setting, wrong);
}

/* ---- an engine of a model with gated delta nets -------------------------------------------- */

static sp_engine_options recurrent_options(void)
{
    sp_engine_options options = small_options();

    options.model_dir = SP_TEST_FIXTURES "/qwen35";
    options.max_running = 3;
    options.memory_bytes = 128 * MIB;
    return options;
}

static sp_engine_stats stats_of_opened(const sp_engine_options *options)
{
    sp_engine_stats stats = {.struct_bytes = sizeof stats};
    sp_engine *engine;
    sp_error error;

    assert_ok(sp_engine_open(options, NULL, 0, &engine, &error), &error);
    assert_ok(sp_engine_get_stats(engine, &stats, &error), &error);
    sp_engine_close(engine);
    return stats;
}

static void check_bad_budget(const sp_engine_options *options, const char *setting)
{
    sp_engine *engine = NULL;
    sp_error error;

    assert_int_equal(sp_engine_open(options, NULL, 0, &engine, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, setting);
    assert_null(engine);
}

/* Two layers with a state: 4 value heads of 24 with keys of 16, and the last 64 rows. */
static void states_of_an_engine(void **state)
{
    sp_engine_options options = recurrent_options();
    sp_engine_stats stats, other;
    const size_t least = (size_t)2 * 4 * (16 + 64) * 24 * sizeof(float); /* S and u */
    size_t one;

    (void)state;
    options.state_snapshot_tokens = 0;
    stats = stats_of_opened(&options);
    assert_int_equal(stats.states, 3);
    assert_int_equal(stats.states_used, 0);
    assert_int_equal(stats.state_snapshots, 0);
    assert_true(stats.state_bytes % 3 == 0);
    one = stats.state_bytes / 3;
    assert_in_range(one, least, 3 * least);
    options.state_snapshot_tokens = 512;
    assert_int_equal(stats_of_opened(&options).state_snapshots, 320 / (512 / 4));
    options.state_snapshot_tokens = 33; /* that is 64, and a border is at every 32 */
    other = stats_of_opened(&options);
    assert_int_equal(other.state_snapshots, 320 / 32);
    assert_true(other.state_bytes > stats.state_bytes);
    options.state_snapshot_bytes = other.state_bytes - stats.state_bytes - 1;
    assert_int_equal(stats_of_opened(&options).state_snapshots, 320 / 32 - 1);
    options.prefix_cache = false;
    assert_int_equal(stats_of_opened(&options).state_snapshots, 0);
    options.state_bytes = 2 * one + one / 2;
    assert_int_equal(stats_of_opened(&options).states, 2);
    /* Nothing of it for a model without such layers. */
    options.model_dir = SP_TEST_DEMO "/base";
    stats = stats_of_opened(&options);
    assert_true(stats.states == 0 && stats.state_snapshots == 0 && stats.state_bytes == 0);
}

static void bad_budgets_of_states(void **state)
{
    sp_engine_options options = recurrent_options();

    (void)state;
    options.state_bytes = 1;
    check_bad_budget(&options, "state-bytes");
    options = recurrent_options();
    options.state_snapshot_tokens = 32;
    options.state_snapshot_bytes = 1;
    check_bad_budget(&options, "state-snapshot-bytes");
    options.state_snapshot_tokens = 0;
    assert_int_equal(stats_of_opened(&options).state_snapshots, 0);
    options = recurrent_options();
    options.state_bytes = GIB;
    options.max_running = 4096;
    check_refused(&options, "state-bytes");
    options.state_bytes = 0; /* a share of what there is */
    assert_true(stats_of_opened(&options).states < 4096);
    options.max_running = 1;
    options.kv_tokens = 100000;
    options.memory_bytes = 45 * MIB;
    options.state_snapshot_tokens = 32;
    options.state_snapshot_bytes = GIB;
    check_refused(&options, "state-snapshot-bytes");
}

static void each_sum_of_an_engine(void **state)
{
    sp_engine_options options = small_options();
    sp_engine *engine;
    sp_error error;

    (void)state;
    options.memory_bytes = 128 * MIB;
    assert_ok(sp_engine_open(&options, NULL, 0, &engine, &error), &error);
    sp_engine_close(engine);
    options.memory_bytes = MIB;
    check_refused(&options, "model");
    options.weights_copy = true;
    check_refused(&options, "model");
    options = small_options();
    options.memory_bytes = 128 * MIB;
    options.max_loras = 512;
    options.max_lora_rank = 1024;
    check_refused(&options, "max-loras");
    options = small_options();
    options.memory_bytes = 128 * MIB;
    options.overlay_bytes = GIB;
    check_refused(&options, "overlay-bytes");
    options = small_options();
    options.memory_bytes = 128 * MIB;
    options.step_rows = 65536;
    check_refused(&options, "step-rows");
    options = small_options();
    options.memory_bytes = 128 * MIB;
    options.host_bytes_max = GIB;
    check_refused(&options, "host-cache-mib");
    options = small_options();
    options.memory_bytes = 128 * MIB;
    options.kv_tokens = 1000000;
    check_refused(&options, "kv-tokens");
}

/* Their tensors are in memory until all are packed: as many as the weights leave room for. */
static void adapters_of_the_start(void **state)
{
    const sp_engine_adapter wanted = {sizeof wanted, "a", SP_TEST_DEMO "/adapters/scripture"};
    sp_engine_options options = small_options();
    sp_engine_stats stats = {.struct_bytes = sizeof stats};
    sp_engine *engine = NULL;
    size_t before = sp_alloc_bytes();
    sp_error error;

    (void)state;
    options.max_lora_rank = 16;
    options.memory_bytes = 128 * MIB;
    assert_ok(sp_engine_open(&options, &wanted, 1, &engine, &error), &error);
    assert_ok(sp_engine_get_stats(engine, &stats, &error), &error);
    sp_engine_close(engine);
    options.memory_bytes = stats.weight_bytes + 4096;
    assert_int_equal(sp_engine_open(&options, &wanted, 1, &engine, &error), SP_ERR_MEMORY);
    assert_string_equal(error.code, SP_CODE_MEMORY_SHORT);
    assert_string_equal(error.subject, "adapter");
    assert_int_equal(sp_alloc_bytes(), before);
}

/* 3,072 bytes a token; 2,048 tokens for each of two requests are less than half of what is left. */
static void an_open_cache_of_an_engine(void **state)
{
    sp_engine_options options = small_options();
    sp_engine_stats stats = {.struct_bytes = sizeof stats};
    sp_engine *engine;
    sp_error error;

    (void)state;
    options.kv_tokens = 0;
    options.max_running = 2;
    options.memory_bytes = GIB;
    assert_ok(sp_engine_open(&options, NULL, 0, &engine, &error), &error);
    assert_ok(sp_engine_get_stats(engine, &stats, &error), &error);
    sp_engine_close(engine);
    assert_int_equal(stats.kv_bytes, (size_t)2 * 2048 * 3072);
    options.max_running = 4096; /* 24 GiB */
    assert_ok(sp_engine_open(&options, NULL, 0, &engine, &error), &error);
    assert_ok(sp_engine_get_stats(engine, &stats, &error), &error);
    sp_engine_close(engine);
    assert_true(stats.kv_bytes < GIB / 2);
    assert_true(stats.kv_bytes > GIB / 2 - 64 * MIB);
}

/* ---- in a cgroup --------------------------------------------------------------------------- */

static bool write_number(const char *folder, const char *name, long long number)
{
    char path[512];
    FILE *file;
    bool written;

    snprintf(path, sizeof path, "%s/%s", folder, name);
    file = fopen(path, "r+");
    if (!file)
        return false;
    written = fprintf(file, "%lld\n", number) > 0;
    return fclose(file) == 0 && written;
}

/* A group of its own with that limit; false where this machine does not let us make one. */
static bool make_group(char *folder, size_t folder_bytes, long long limit)
{
    static const char *const mounts[][2] = {
        {"/sys/fs/cgroup/memory", "memory.limit_in_bytes"},
        {"/sys/fs/cgroup", "memory.max"},
    };

    for (size_t i = 0; i < 2; i++) {
        snprintf(folder, folder_bytes, "%s/sidepath-test-%d", mounts[i][0], (int)getpid());
        if (mkdir(folder, 0755) != 0)
            continue;
        if (write_number(folder, mounts[i][1], limit))
            return true;
        rmdir(folder);
    }
    return false;
}

/* In the child: the number of the first opening that is not refused as it should be. */
static int openings_in_a_group(void)
{
    sp_engine_options options = small_options();

    options.max_loras = 512;
    options.max_lora_rank = 1024;
    if (opening_refused(&options, "max-loras"))
        return 1;
    options = small_options();
    options.overlay_bytes = 4 * GIB;
    if (opening_refused(&options, "overlay-bytes"))
        return 2;
    options = small_options();
    options.host_bytes_max = 4 * GIB;
    if (opening_refused(&options, "host-cache-mib"))
        return 3;
    options = small_options();
    options.kv_tokens = 1000000;
    return opening_refused(&options, "kv-tokens") ? 4 : 0;
}

static void in_a_group_of_2_gib(void **state)
{
    char folder[256];
    pid_t child;
    int status;

    (void)state;
    if (!make_group(folder, sizeof folder, 2LL << 30)) {
        print_message("in_a_group_of_2_gib: no cgroup can be made on this machine\n");
        skip();
    }
    child = fork();
    if (child == 0)
        _exit(write_number(folder, "cgroup.procs", getpid()) ? openings_in_a_group() : 99);
    assert_int_equal(waitpid(child, &status, 0), child);
    rmdir(folder);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == 99) {
        print_message("in_a_group_of_2_gib: no process can join a cgroup on this machine\n");
        skip();
    }
    assert_int_equal(WEXITSTATUS(status), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_sums_in_their_order),
        cmocka_unit_test(the_text_says_needed_and_free),
        cmocka_unit_test(an_open_kv_cache_gets_half_of_what_is_left),
        cmocka_unit_test(an_open_host_cache_gets_half_of_the_rest),
        cmocka_unit_test(budgets_of_states_and_snapshots_come_before_the_kv_cache),
        cmocka_unit_test(open_budgets_are_shares_of_what_is_left),
        cmocka_unit_test(a_budget_holds_one_at_least),
        cmocka_unit_test(sums_that_overflow_fit_nowhere),
        cmocka_unit_test(where_nothing_is_known_all_fit),
        cmocka_unit_test(in_a_group_of_2_gib), /* before any thread is started */
        cmocka_unit_test(states_of_an_engine),
        cmocka_unit_test(bad_budgets_of_states),
        cmocka_unit_test(each_sum_of_an_engine),
        cmocka_unit_test(adapters_of_the_start),
        cmocka_unit_test(an_open_cache_of_an_engine),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
