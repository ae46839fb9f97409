/*
 * An engine's options for adapters of routers and experts: what is refused, by which code and with
 * which setting to change, and that the budget holds them in turns. On the fixture with experts.
 */
#include "support/engine_run.h"
#include "support/test.h"

#include "base/alloc.h"

#include <sidepath/pool.h>

#include <stdio.h>
#include <string.h>

#define MODEL  SP_TEST_FIXTURES "/qwen3moe"
#define PROMPT 9
#define NEW    4

static const int32_t prompt[PROMPT] = {5, 200, 31, 77, 400, 12, 9, 310, 44};

static sp_engine_options default_options(void)
{
    sp_engine_options options;

    sp_engine_options_default(&options, sizeof options);
    options.model_dir = MODEL;
    options.threads = 1;
    options.kv_tokens = 512;
    return options;
}

static void check_refused(const sp_engine_options *options, const char *name, const char *code,
                          const char *setting)
{
    char path[256];
    const sp_engine_adapter adapter = {sizeof adapter, name, path};
    size_t bytes = sp_alloc_bytes();
    sp_engine *engine;
    sp_error error = {0};

    snprintf(path, sizeof path, MODEL "/adapters/%s", name);
    assert_true(sp_engine_open(options, &adapter, 1, &engine, &error) < 0);
    assert_string_equal(error.code, code);
    assert_non_null(strstr(error.text, setting));
    assert_int_equal(sp_alloc_bytes(), bytes);
}

static void refusals_name_the_setting(void **state)
{
    sp_engine_options options = default_options();

    (void)state;
    options.experts = false;
    check_refused(&options, "router", "experts-disabled", "experts");
    check_refused(&options, "v4-sparse-experts", "experts-disabled", "experts");
    options = default_options();
    options.max_lora_expert_rank = 7; /* it has 8 on gate_up */
    check_refused(&options, "experts-ffn-names", "expert-rank-exceeds-cap", "max-lora-expert-rank");
    options = default_options();
    options.expert_bytes = 4096;
    check_refused(&options, "all-linear", "experts-too-large", "expert-bytes");
}

/* The budget and the scratch are among what is held against the free memory. */
static void memory_is_counted(void **state)
{
    static const char *const names[] = {"plain-r8", "router"};
    sp_engine_options options = default_options();
    size_t scratch[2];
    sp_engine *engine;
    sp_error error = {0};

    (void)state;
    for (int i = 0; i < 2; i++) {
        sp_engine_stats stats = {.struct_bytes = sizeof stats};
        char path[256];
        const sp_engine_adapter adapter = {sizeof adapter, names[i], path};

        snprintf(path, sizeof path, MODEL "/adapters/%s", names[i]);
        engine = engine_run_open(&options, &adapter, 1);
        assert_ok(sp_engine_get_stats(engine, &stats, &error), &error);
        scratch[i] = stats.scratch_bytes;
        sp_engine_close(engine);
    }
    /* 256 rows of 2 experts, each at least as wide as an expert's input of 64. */
    assert_true(scratch[1] >= scratch[0] + 512 * 64 * 2);
    options.adapter_loading = true;
    options.memory_bytes = (size_t)1 << 30;
    options.expert_bytes = (size_t)1 << 40;
    assert_int_equal(sp_engine_open(&options, NULL, 0, &engine, &error), SP_ERR_MEMORY);
    assert_string_equal(error.code, SP_CODE_MEMORY_SHORT);
    assert_string_equal(error.subject, "expert-bytes");
}

static engine_run run_with(const sp_engine_options *options, const char *const *names, size_t n,
                           const char *adapter)
{
    sp_engine_adapter adapters[4];
    char paths[4][256];

    for (size_t i = 0; i < n; i++) {
        snprintf(paths[i], sizeof paths[i], MODEL "/adapters/%s", names[i]);
        adapters[i] = (sp_engine_adapter){sizeof adapters[i], names[i], paths[i]};
    }
    return engine_run_alone(engine_run_open(options, adapters, n), adapter, prompt, PROMPT, NEW,
                            true);
}

/* The FFN of every form is skipped; a router is none. */
static void no_ffn_covers_experts(void **state)
{
    static const char *const names[] = {"v4-sparse-experts", "router"};
    sp_engine_options options = default_options();
    engine_run base = run_with(&options, names, 2, NULL);
    engine_run plain = run_with(&options, names, 2, "v4-sparse-experts");
    engine_run router = run_with(&options, names, 2, "router");
    size_t logits_bytes = PROMPT * (size_t)base.vocab * sizeof(float);
    engine_run skipped, still;

    (void)state;
    options.no_ffn = true;
    skipped = run_with(&options, names, 2, "v4-sparse-experts");
    still = run_with(&options, names, 2, "router");
    engine_run_assert_same(&base, &skipped);
    engine_run_assert_same(&router, &still);
    assert_memory_not_equal(base.logits, plain.logits, logits_bytes);
    assert_memory_not_equal(base.logits, router.logits, logits_bytes);
    engine_run_free(&base);
    engine_run_free(&plain);
    engine_run_free(&router);
    engine_run_free(&skipped);
    engine_run_free(&still);
}

/* However few tokens' experts are computed at a time, the logits have the same bits. */
static void windows_change_no_bit(void **state)
{
    static const char *const names[] = {"all-linear"};
    static const int32_t windows[] = {1, 2, 5};
    sp_engine_options options = default_options();
    engine_run whole = run_with(&options, names, 1, "all-linear");

    (void)state;
    for (size_t i = 0; i < sizeof windows / sizeof *windows; i++) {
        engine_run cut;

        options.expert_max_tokens = windows[i];
        cut = run_with(&options, names, 1, "all-linear");
        engine_run_assert_same(&whole, &cut);
        engine_run_free(&cut);
    }
    engine_run_free(&whole);
}

static size_t bytes_of(const char *name)
{
    char path[256];
    sp_adapter_options options;
    sp_geometry *geometry;
    sp_adapter *adapter;
    sp_error error;
    size_t bytes;

    snprintf(path, sizeof path, MODEL "/adapters/%s", name);
    assert_ok(sp_geometry_open(MODEL, &geometry, &error), &error);
    sp_adapter_options_default(&options, sizeof options);
    options.geometry = geometry;
    assert_ok(sp_adapter_open(path, &options, &adapter, &error), &error);
    bytes = sp_layout_expert_bytes(adapter, SP_DTYPE_BF16);
    sp_adapter_release(adapter);
    sp_geometry_release(geometry);
    return bytes;
}

/* Room for the largest alone: four slots, and their adapters take turns in the budget. */
static void adapters_take_turns_in_the_budget(void **state)
{
    static const char *const names[] = {"all-linear", "v4-per-expert", "experts-fused", "plain-r8"};
    sp_engine_options options = default_options();
    engine_run alone[4], runs[8];
    engine_run *list[8];
    sp_engine_adapter adapters[4];
    char paths[4][256];
    sp_engine *engine;

    (void)state;
    for (int a = 0; a < 4; a++)
        alone[a] = run_with(&options, names, 4, names[a]);
    for (int a = 0; a < 4; a++) {
        snprintf(paths[a], sizeof paths[a], MODEL "/adapters/%s", names[a]);
        adapters[a] = (sp_engine_adapter){sizeof adapters[a], names[a], paths[a]};
        if (bytes_of(names[a]) > options.expert_bytes)
            options.expert_bytes = bytes_of(names[a]);
    }
    options.adapter_wait_steps = 2;
    options.adapter_preempt_steps = 4;
    engine = engine_run_open(&options, adapters, 4);
    for (int i = 0; i < 8; i++) {
        runs[i] = engine_run_init(names[i % 4], prompt, PROMPT, NEW);
        runs[i].request.ignore_eos = true;
        runs[i].keep_logits = true;
        list[i] = &runs[i];
        engine_run_submit(engine, &runs[i]);
    }
    engine_run_all(engine, list, 8);
    for (int i = 0; i < 8; i++) {
        engine_run_assert_same(&alone[i % 4], &runs[i]);
        engine_run_free(&runs[i]);
    }
    for (int a = 0; a < 4; a++)
        engine_run_free(&alone[a]);
    sp_engine_close(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refusals_name_the_setting),
        cmocka_unit_test(memory_is_counted),
        cmocka_unit_test(no_ffn_covers_experts),
        cmocka_unit_test(windows_change_no_bit),
        cmocka_unit_test(adapters_take_turns_in_the_budget),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
