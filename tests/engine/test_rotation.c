/*
 * Adapters that come, go and change while requests run: whatever happens around a request, its
 * tokens and logits are those of a quiet run, byte for byte.
 *
 *     test_rotation [soak]      soak: 500 adapters, 10,000 loads and unloads
 */
#include "support/test.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "support/engine_run.h"
#include "support/shell.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MODEL    SP_TEST_FIXTURES "/qwen3-tied"
#define ADAPTERS MODEL "/adapters/"
#define N_NAMES  6
#define PROMPT   9
#define NEW      24

static const char *const names[N_NAMES] = {"all-linear", "attn-r4",    "r1",
                                           "ffn",        "rslora-r16", "patterns"};
static bool soak;

/* ---- engines and requests ------------------------------------------------------------------ */

static sp_engine_options options_with(int32_t slots)
{
    sp_engine_options options;

    sp_engine_options_default(&options, sizeof options);
    options.model_dir = MODEL;
    options.threads = 1;
    options.max_loras = slots;
    options.max_lora_rank = 64;
    options.adapter_loading = true;
    options.kv_tokens = 4096;
    options.step_rows = 64;
    options.page_tokens = 4;
    return options;
}

static sp_engine *open_with(sp_engine_options options)
{
    options.lora_modules = "q_proj,k_proj,v_proj,o_proj,mlp.gate_proj,mlp.up_proj,mlp.down_proj";
    return engine_run_open(&options, NULL, 0);
}

static const char *path_of(const char *name)
{
    static char path[512];

    snprintf(path, sizeof path, ADAPTERS "%s", name);
    return path;
}

static sp_status load_as(sp_engine *engine, const char *name, const char *path, bool replace,
                         sp_error *error)
{
    sp_stage_load_options load;
    int64_t ticket;
    sp_status status;

    sp_stage_load_options_default(&load, sizeof load);
    load.name = name;
    load.location = path;
    load.replace = replace;
    status = sp_stage_load(sp_engine_stage(engine), &load, &ticket, error);
    while (status == SP_PENDING) {
        sp_stage_poll_wait(sp_engine_stage(engine), 10);
        status = sp_stage_result(sp_engine_stage(engine), ticket, NULL, error);
    }
    return status;
}

static void must_load(sp_engine *engine, const char *name)
{
    sp_error error;

    assert_ok(load_as(engine, name, path_of(name), true, &error), &error);
}

static int32_t prompts[N_NAMES + 1][PROMPT];

static void make_prompts(void)
{
    sp_test_random random = {44};

    for (size_t i = 0; i <= N_NAMES; i++)
        for (size_t t = 0; t < PROMPT; t++)
            prompts[i][t] = (int32_t)sp_test_below(&random, 500);
}

static engine_run make_run(const char *adapter, int32_t prompt, int32_t n_new)
{
    engine_run run = engine_run_init(adapter, prompts[prompt], PROMPT, n_new);

    run.keep_logits = true;
    run.request.logits_from = PROMPT - 1;
    return run;
}

/* The request in an engine that has nothing else, its adapter loaded from `path`. */
static engine_run quiet(const char *path, int32_t prompt, int32_t n_new)
{
    sp_engine *engine = open_with(options_with(1));
    engine_run run = make_run(path ? "quiet" : NULL, prompt, n_new), *runs[] = {&run};
    sp_error error;

    if (path)
        assert_ok(load_as(engine, "quiet", path, false, &error), &error);
    engine_run_submit(engine, &run);
    engine_run_all(engine, runs, 1);
    sp_engine_close(engine);
    return run;
}

static void run_one(sp_engine *engine, engine_run *run)
{
    engine_run_submit(engine, run);
    engine_run_all(engine, &run, 1);
}

static void check_quiet(sp_engine *engine, const char *name, const char *path, int32_t prompt,
                        int32_t n_new)
{
    engine_run alone = quiet(path, prompt, n_new), here = make_run(name, prompt, n_new);

    run_one(engine, &here);
    engine_run_assert_same(&alone, &here);
    engine_run_free(&alone);
    engine_run_free(&here);
}

/* A copy of an adapter with another alpha: other content, the same tensors. */
static char *make_variant(const char *adapter, int32_t alpha)
{
    char *directory = shell_copy_directory(path_of(adapter));
    char text[64];

    snprintf(text, sizeof text, "\"lora_alpha\": %d", (int)alpha);
    shell_edit(directory, "adapter_config.json", "\"lora_alpha\": 16", text);
    return directory;
}

/* ---- cases --------------------------------------------------------------------------------- */

/* Two slots, eight streams over six adapters and the base; loads, replacements and unloads of
 * other names between all steps. */
static void test_churn_changes_no_token(void **state)
{
    sp_engine_options options = options_with(2);
    sp_engine *engine;
    engine_run alone[N_NAMES + 1], here[N_NAMES + 1], *runs[N_NAMES + 1];
    int64_t ticket = 0, n_loads = 0;
    sp_error error;

    (void)state;
    options.adapter_wait_steps = 4;
    options.adapter_preempt_steps = 8;
    engine = open_with(options);
    for (int32_t i = 0; i < N_NAMES; i++)
        must_load(engine, names[i]);
    for (int32_t i = 0; i <= N_NAMES; i++) {
        alone[i] = quiet(i < N_NAMES ? path_of(names[i]) : NULL, i, NEW);
        here[i] = make_run(i < N_NAMES ? names[i] : NULL, i, NEW);
        runs[i] = &here[i];
        engine_run_submit(engine, &here[i]);
    }
    for (int32_t step = 0; engine_run_step(engine, runs, N_NAMES + 1); step++) {
        sp_stage_load_options load;

        sp_stage_load_options_default(&load, sizeof load);
        load.name = "noise";
        load.location = path_of(step % 3 == 0 ? "plain-r8" : step % 3 == 1 ? "regex" : "exclude");
        load.replace = true;
        if (ticket == 0 &&
            sp_stage_load(sp_engine_stage(engine), &load, &ticket, &error) != SP_PENDING)
            ticket = 0;
        if (ticket != 0 &&
            sp_stage_result(sp_engine_stage(engine), ticket, NULL, &error) != SP_PENDING) {
            ticket = 0;
            n_loads++;
        }
        if (step % 7 == 3)
            sp_stage_unload(sp_engine_stage(engine), "noise", NULL);
        if (step % 11 == 5) /* the names of running requests get other contents as well */
            load_as(engine, names[step % N_NAMES], path_of("regex"), true, &error);
    }
    assert_true(n_loads > 3);
    for (int32_t i = 0; i <= N_NAMES; i++) {
        engine_run_assert_same(&alone[i], &here[i]);
        engine_run_free(&alone[i]);
        engine_run_free(&here[i]);
    }
    sp_engine_close(engine);
}

static void test_load_evict_load_gives_the_same_bits(void **state)
{
    sp_engine *engine = open_with(options_with(1));
    sp_stage_version_info info = {.struct_bytes = sizeof info};

    (void)state;
    must_load(engine, "r1");
    must_load(engine, "ffn");
    check_quiet(engine, "r1", path_of("r1"), 0, NEW);
    check_quiet(engine, "ffn", path_of("ffn"), 1, NEW);
    assert_ok(sp_stage_find(sp_engine_stage(engine), "r1", &info, NULL), NULL);
    assert_int_equal(info.state, SP_STAGE_VERSION_HOST);
    check_quiet(engine, "r1", path_of("r1"), 0, NEW);
    /* Rank 16 after all seven modules at other ranks: nothing of an earlier adapter shows. */
    must_load(engine, "all-linear");
    check_quiet(engine, "all-linear", path_of("all-linear"), 2, NEW);
    must_load(engine, "attn-r4");
    check_quiet(engine, "attn-r4", path_of("attn-r4"), 2, NEW);
    check_quiet(engine, NULL, NULL, 2, NEW);
    sp_engine_close(engine);
}

/* The same name, new weights, the same prompt: as a fresh server. The old bytes under another
 * name: as they were. */
static void test_replaced_content_leaves_nothing_behind(void **state)
{
    sp_engine *engine = open_with(options_with(2));
    char *variant = make_variant("plain-r8", 48);
    sp_error error;

    (void)state;
    assert_ok(load_as(engine, "x", path_of("plain-r8"), false, &error), &error);
    check_quiet(engine, "x", path_of("plain-r8"), 0, NEW);
    check_quiet(engine, "x", path_of("plain-r8"), 0, NEW);
    assert_ok(load_as(engine, "x", variant, true, &error), &error);
    check_quiet(engine, "x", variant, 0, NEW);
    assert_ok(load_as(engine, "y", path_of("plain-r8"), false, &error), &error);
    check_quiet(engine, "y", path_of("plain-r8"), 0, NEW);
    check_quiet(engine, NULL, NULL, 0, NEW);
    assert_int_equal(sp_stage_unload(sp_engine_stage(engine), "x", &error), SP_OK);
    assert_ok(load_as(engine, "x", path_of("r1"), false, &error), &error);
    check_quiet(engine, "x", path_of("r1"), 0, NEW);
    sp_engine_close(engine);
    sp_test_remove_tree(variant);
    sp_free(variant);
}

/* One load, many requests: the files are read once, they may even be gone. */
static void test_files_are_read_once(void **state)
{
    sp_engine *engine = open_with(options_with(1));
    char *variant = make_variant("plain-r8", 20);
    engine_run alone = quiet(variant, 0, 2);
    sp_error error;

    (void)state;
    assert_ok(load_as(engine, "x", variant, false, &error), &error);
    must_load(engine, "r1");
    sp_test_remove_tree(variant);
    for (int32_t i = 0; i < 100; i++) {
        engine_run here = make_run(i % 5 == 4 ? "r1" : "x", 0, 2);

        run_one(engine, &here);
        if (i % 5 != 4)
            engine_run_assert_same(&alone, &here);
        engine_run_free(&here);
    }
    engine_run_free(&alone);
    sp_engine_close(engine);
    sp_free(variant);
}

/* A, B, A, A, A ... with one slot: B comes within the stated bound, and A's tokens stay. */
static void test_every_adapter_gets_its_turn(void **state)
{
    enum { WAIT = 8, PREEMPT = 24, STREAM = 12, LONG = 60 };
    sp_engine_options options = options_with(1);
    sp_engine *engine;
    engine_run a[STREAM], b = make_run("r1", 1, 6), *runs[STREAM + 1];
    engine_run alone_a = quiet(path_of("ffn"), 0, LONG), alone_b = quiet(path_of("r1"), 1, 6);
    sp_engine_stats stats = {.struct_bytes = sizeof stats};
    int32_t steps_b = 0;

    (void)state;
    options.adapter_wait_steps = WAIT;
    options.adapter_preempt_steps = PREEMPT;
    options.max_running = 4;
    engine = open_with(options);
    must_load(engine, "r1");
    must_load(engine, "ffn"); /* it has the slot */
    for (int32_t i = 0; i < STREAM; i++) {
        a[i] = make_run("ffn", 0, LONG);
        runs[i] = &a[i];
        engine_run_submit(engine, &a[i]);
        if (i == 0)
            engine_run_submit(engine, &b);
    }
    runs[STREAM] = &b;
    for (int32_t step = 1; engine_run_step(engine, runs, STREAM + 1); step++)
        if (steps_b == 0 && b.n_tokens > 0)
            steps_b = step;
    /* The bound, and the steps of a copy on a thread of its own: 10 ms each where nothing runs. */
    assert_in_range(steps_b, PREEMPT, PREEMPT + 60);
    sp_engine_get_stats(engine, &stats, NULL);
    assert_true(stats.rotations > 0);
    engine_run_assert_same(&alone_b, &b);
    for (int32_t i = 0; i < STREAM; i++) {
        engine_run_assert_same(&alone_a, &a[i]);
        engine_run_free(&a[i]);
    }
    engine_run_free(&alone_a);
    engine_run_free(&alone_b);
    engine_run_free(&b);
    sp_engine_close(engine);
}

static void test_unload_in_mid_stream(void **state)
{
    sp_engine *engine = open_with(options_with(1));
    engine_run alone = quiet(path_of("ffn"), 0, NEW), here = make_run("ffn", 0, NEW);
    engine_run late = make_run("ffn", 0, NEW), *runs[] = {&here};
    sp_stage_version_info info = {.struct_bytes = sizeof info};
    int64_t id;
    sp_error error;

    (void)state;
    must_load(engine, "ffn");
    engine_run_submit(engine, &here);
    for (int32_t i = 0; i < 5; i++)
        engine_run_step(engine, runs, 1);
    assert_int_equal(sp_stage_unload(sp_engine_stage(engine), "ffn", &error), SP_BUSY);
    assert_int_equal(sp_engine_submit(engine, &late.request, &id, &error), SP_ERR_NOT_FOUND);
    assert_ok(sp_stage_version_at(sp_engine_stage(engine), 0, &info, NULL), NULL);
    assert_int_equal(info.state, SP_STAGE_VERSION_DRAINING);
    engine_run_all(engine, runs, 1);
    engine_run_assert_same(&alone, &here);
    assert_int_equal(sp_stage_n_versions(sp_engine_stage(engine)), 0);
    engine_run_free(&alone);
    engine_run_free(&here);
    sp_engine_close(engine);
}

static void test_cancel_gives_the_slot_back(void **state)
{
    sp_engine *engine = open_with(options_with(1));
    engine_run here = make_run("ffn", 0, 200), *runs[] = {&here};
    sp_stage_version_info info = {.struct_bytes = sizeof info};

    (void)state;
    must_load(engine, "ffn");
    must_load(engine, "r1");
    for (int32_t i = 0; i < 3; i++) {
        engine_run_submit(engine, &here);
        for (int32_t k = 0; k < 4; k++)
            engine_run_step(engine, runs, 1);
        assert_ok(sp_stage_find(sp_engine_stage(engine), "ffn", &info, NULL), NULL);
        assert_int_equal(info.references, 1);
        assert_int_equal(sp_engine_cancel(engine, here.id, NULL), SP_OK);
        assert_ok(sp_stage_find(sp_engine_stage(engine), "ffn", &info, NULL), NULL);
        assert_int_equal(info.references, 0);
        engine_run_free(&here);
        check_quiet(engine, "r1", path_of("r1"), 1, 4);
        here = make_run("ffn", 0, 200);
        runs[0] = &here;
    }
    sp_engine_close(engine);
}

static void test_all_slots_and_the_base_at_once(void **state)
{
    sp_engine *engine = open_with(options_with(N_NAMES));
    engine_run alone, here[N_NAMES + 1], *runs[N_NAMES + 1];
    sp_engine_stats stats = {.struct_bytes = sizeof stats};

    (void)state;
    for (int32_t i = 0; i < N_NAMES; i++)
        must_load(engine, names[i]);
    for (int32_t i = 0; i <= N_NAMES; i++) {
        here[i] = make_run(i < N_NAMES ? names[i] : NULL, i, NEW);
        runs[i] = &here[i];
        engine_run_submit(engine, &here[i]);
    }
    engine_run_all(engine, runs, N_NAMES + 1);
    sp_engine_get_stats(engine, &stats, NULL);
    assert_int_equal(stats.rotations, 0);
    for (int32_t i = 0; i <= N_NAMES; i++) {
        alone = quiet(i < N_NAMES ? path_of(names[i]) : NULL, i, NEW);
        engine_run_assert_same(&alone, &here[i]);
        engine_run_free(&alone);
        engine_run_free(&here[i]);
    }
    sp_engine_close(engine);
}

static void test_active_moves_default_only(void **state)
{
    sp_engine *engine = open_with(options_with(2));
    engine_run base = quiet(NULL, 0, 6), ffn = quiet(path_of("ffn"), 0, 6), here;
    sp_error error;

    (void)state;
    must_load(engine, "ffn");
    assert_ok(sp_stage_set_active(sp_engine_stage(engine), "ffn", &error), &error);
    here = make_run(NULL, 0, 6);
    run_one(engine, &here);
    engine_run_assert_same(&ffn, &here);
    engine_run_free(&here);
    here = make_run(sp_engine_base_name(engine), 0, 6);
    run_one(engine, &here);
    engine_run_assert_same(&base, &here);
    engine_run_free(&here);
    assert_ok(sp_stage_set_active(sp_engine_stage(engine), NULL, &error), &error);
    here = make_run(NULL, 0, 6);
    run_one(engine, &here);
    engine_run_assert_same(&base, &here);
    engine_run_free(&here);
    engine_run_free(&base);
    engine_run_free(&ffn);
    sp_engine_close(engine);
}

static void test_pins_states_and_digests(void **state)
{
    sp_engine *engine = open_with(options_with(1));
    engine_run b = make_run("r1", 0, 2);
    sp_stage_version_info info = {.struct_bytes = sizeof info};
    sp_stage_load_options load;
    const char *name = NULL;
    sp_digest digest, none = {{0}};
    int64_t ticket, id;
    sp_error error;

    (void)state;
    must_load(engine, "ffn");
    assert_ok(sp_stage_set_pinned(sp_engine_stage(engine), "ffn", true, &error), &error);
    sp_stage_load_options_default(&load, sizeof load);
    load.name = "r1";
    load.location = path_of("r1");
    assert_int_equal(sp_stage_load(sp_engine_stage(engine), &load, &ticket, &error), SP_PENDING);
    sp_stage_forget(sp_engine_stage(engine), ticket);
    while (sp_stage_find(sp_engine_stage(engine), "r1", &info, NULL) != SP_OK)
        sp_stage_poll_wait(sp_engine_stage(engine), 10);
    assert_string_equal(sp_stage_version_state_name(info.state), "host");
    assert_int_equal(sp_engine_submit(engine, &b.request, &id, &error), SP_OK);
    assert_ok(sp_engine_request_adapter(engine, id, &name, &digest, NULL), NULL);
    assert_string_equal(name, "r1");
    assert_memory_equal(&digest, &info.digest, sizeof digest);
    /* Its only slot is pinned for good: told by name, and the engine goes on. */
    assert_int_equal(sp_engine_step(engine, NULL, NULL, &error), SP_ERR_SLOTS_PINNED);
    assert_int_equal(error.position, id);
    assert_int_equal(sp_engine_request_adapter(engine, id, &name, &digest, NULL), SP_ERR_NOT_FOUND);
    b.request.adapter = NULL;
    assert_int_equal(sp_engine_submit(engine, &b.request, &id, &error), SP_OK);
    assert_ok(sp_engine_request_adapter(engine, id, &name, &digest, NULL), NULL);
    assert_null(name);
    assert_memory_equal(&digest, &none, sizeof digest);
    assert_int_equal(sp_stage_unload(sp_engine_stage(engine), "ffn", &error), SP_ERR_STATE);
    load.name = "no:name";
    assert_int_equal(sp_stage_load(sp_engine_stage(engine), &load, &ticket, &error), SP_ERR_INPUT);
    assert_int_equal(sp_stage_name_check("fine", NULL, &error), SP_OK);
    sp_engine_close(engine);
    engine_run_free(&b);
}

/* Files that changed on disk since: those that wait for the old ones hear of it, by name. */
static void test_changed_files_end_their_requests_only(void **state)
{
    sp_engine_options options = options_with(1);
    sp_stage_version_info info = {.struct_bytes = sizeof info};
    sp_engine *engine = open_with(options);
    char *variant = make_variant("plain-r8", 20);
    engine_run alone = quiet(path_of("r1"), 1, 4), bad = make_run("x", 0, 4), good;
    sp_error error;
    sp_status status;

    (void)state;
    assert_ok(load_as(engine, "x", variant, false, &error), &error);
    assert_ok(sp_stage_find(sp_engine_stage(engine), "x", &info, NULL), NULL);
    sp_engine_close(engine);
    options.host_bytes_max = info.image_bytes;
    engine = open_with(options);
    assert_ok(load_as(engine, "x", variant, false, &error), &error);
    must_load(engine, "r1");
    shell_edit(variant, "adapter_config.json", "\"lora_alpha\": 20", "\"lora_alpha\": 21");
    engine_run_submit(engine, &bad);
    good = make_run("r1", 1, 4);
    engine_run_submit(engine, &good);
    do
        status = sp_engine_step(engine, NULL, NULL, &error);
    while (status == SP_OK);
    assert_int_equal(status, SP_ERR_MISMATCH);
    assert_string_equal(error.code, "content-changed");
    assert_int_equal(error.position, bad.id);
    while (sp_engine_step(engine, NULL, NULL, &error) == SP_OK)
        continue;
    assert_int_equal(good.n_logits, alone.n_logits);
    assert_memory_equal(good.logits, alone.logits,
                        (size_t)good.n_logits * (size_t)good.vocab * sizeof(float));
    engine_run_free(&alone);
    engine_run_free(&good);
    engine_run_free(&bad);
    sp_engine_close(engine);
    sp_test_remove_tree(variant);
    sp_free(variant);
}

/* ---- many ---------------------------------------------------------------------------------- */

/* The second number of /proc/self/statm, in pages. */
static long resident_kib(void)
{
    char line[128], *end;
    FILE *file = fopen("/proc/self/statm", "r");

    assert_non_null(file);
    assert_non_null(fgets(line, sizeof line, file));
    fclose(file);
    strtol(line, &end, 10);
    return strtol(end, NULL, 10) * (sysconf(_SC_PAGESIZE) / 1024);
}

static void test_many_adapters_through_few_slots(void **state)
{
    int32_t n = soak ? 500 : 40;
    sp_engine_options options = options_with(4);
    sp_engine *engine;
    size_t before;

    (void)state;
    options.host_bytes_max = (size_t)32 << 20;
    engine = open_with(options);
    check_quiet(engine, NULL, NULL, 0, 2); /* texts of events grow to their size */
    before = sp_alloc_bytes();
    for (int32_t round = 0; round < 2; round++) {
        for (int32_t i = 0; i < n; i++) {
            char *variant = make_variant("plain-r8", 17 + i), name[32];
            engine_run here;
            sp_error error;

            snprintf(name, sizeof name, "adapter-%d", (int)i);
            assert_ok(load_as(engine, name, variant, true, &error), &error);
            here = make_run(name, i % N_NAMES, 2);
            run_one(engine, &here);
            if (i % (n / 4) == 0) {
                engine_run alone = quiet(variant, i % N_NAMES, 2);

                engine_run_assert_same(&alone, &here);
                engine_run_free(&alone);
            }
            engine_run_free(&here);
            sp_test_remove_tree(variant);
            sp_free(variant);
        }
        assert_int_equal(sp_stage_n_versions(sp_engine_stage(engine)), n);
    }
    for (int32_t i = 0; i < n; i++) {
        char name[32];

        snprintf(name, sizeof name, "adapter-%d", (int)i);
        assert_int_equal(sp_stage_unload(sp_engine_stage(engine), name, NULL), SP_OK);
    }
    assert_int_equal(sp_stage_n_versions(sp_engine_stage(engine)), 0);
    assert_true(sp_alloc_bytes() <= before + 65536); /* a hash of pages may have grown */
    sp_engine_close(engine);
}

static void test_loads_and_unloads_leave_memory_flat(void **state)
{
    int32_t n = soak ? 10000 : 200;
    sp_engine *engine = open_with(options_with(2));
    size_t bytes = 0, blocks = 0;
    long kib = 0, kib_tenth = 0;
    double first = 0, last = 0;

    (void)state;
    for (int32_t i = 0; i < n + 10; i++) {
        double began = sp_clock_seconds();
        sp_error error;

        assert_ok(load_as(engine, "x", path_of(names[i % N_NAMES]), false, &error), &error);
        assert_int_equal(sp_stage_unload(sp_engine_stage(engine), "x", &error), SP_OK);
        last = sp_clock_seconds() - began;
        if (i < 10)
            first = last;
        if (i == 9) {
            bytes = sp_alloc_bytes();
            blocks = sp_alloc_blocks();
            kib = resident_kib();
        }
        if (i == n / 10)
            kib_tenth = resident_kib();
    }
    assert_int_equal(sp_alloc_bytes(), bytes);
    assert_int_equal(sp_alloc_blocks(), blocks);
    print_message("%d pairs: %ld KiB resident before, %ld after a tenth, %ld after all; pair 10 "
                  "took %.2f ms, the last %.2f ms\n",
                  (int)n, kib, kib_tenth, resident_kib(), first * 1e3, last * 1e3);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    /* Sanitizers keep freed blocks for a while: there only the counters above tell. */
    assert_true(resident_kib() < kib + 8192);
    if (soak) /* once the allocator has all that a thousand pairs need, nothing is added */
        assert_true(resident_kib() <= kib_tenth + 512);
#endif
    sp_engine_close(engine);
}

static int leaks_nothing(void **state)
{
    (void)state;
    return sp_alloc_blocks() == 0 ? 0 : -1;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_churn_changes_no_token, leaks_nothing),
        cmocka_unit_test_teardown(test_load_evict_load_gives_the_same_bits, leaks_nothing),
        cmocka_unit_test_teardown(test_replaced_content_leaves_nothing_behind, leaks_nothing),
        cmocka_unit_test_teardown(test_files_are_read_once, leaks_nothing),
        cmocka_unit_test_teardown(test_every_adapter_gets_its_turn, leaks_nothing),
        cmocka_unit_test_teardown(test_unload_in_mid_stream, leaks_nothing),
        cmocka_unit_test_teardown(test_cancel_gives_the_slot_back, leaks_nothing),
        cmocka_unit_test_teardown(test_all_slots_and_the_base_at_once, leaks_nothing),
        cmocka_unit_test_teardown(test_active_moves_default_only, leaks_nothing),
        cmocka_unit_test_teardown(test_pins_states_and_digests, leaks_nothing),
        cmocka_unit_test_teardown(test_changed_files_end_their_requests_only, leaks_nothing),
        cmocka_unit_test_teardown(test_many_adapters_through_few_slots, leaks_nothing),
        cmocka_unit_test_teardown(test_loads_and_unloads_leave_memory_flat, leaks_nothing),
    };

    soak = argc > 1 && strcmp(argv[1], "soak") == 0;
    make_prompts();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
