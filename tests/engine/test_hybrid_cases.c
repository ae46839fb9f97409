/*
 * What users of other servers have reported, on models with gated delta nets, with adapters of
 * rank 64 and prompts beyond 400 tokens: the same adapter under each trunk's prefix; files of the
 * small projections alone; fifty runs of one request, alone and among others; prompts whose length
 * is around a block's.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "support/engine_run.h"
#include "support/make_adapter.h"

#include <sidepath/adapter.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#define PROMPT 430
#define NEW    8
#define VOCAB  509

static const char *const models[] = {SP_TEST_FIXTURES "/qwen3next", SP_TEST_FIXTURES "/qwen35",
                                     SP_TEST_FIXTURES "/qwen35moe-vl"};
#define N_MODELS (sizeof models / sizeof *models)

static int32_t prompt[PROMPT];

/* The part of a site's path from "layers." on. */
static const char *core_of(const char *path)
{
    const char *core = strstr(path, "layers.");

    assert_non_null(core);
    return core;
}

/* A pair of this rank for every linear site in the layers whose module's name has `word` in it. */
static char *write_adapter(const char *model, const char *prefix, const char *word, int rank)
{
    make_adapter *adapter = make_adapter_create();
    sp_geometry *geometry;
    char config[256], *folder;
    int32_t n_pairs = 0;
    sp_error error;

    snprintf(config, sizeof config,
             "{\"peft_type\": \"LORA\", \"r\": %d, \"lora_alpha\": 1, \"target_modules\": "
             "\"all-linear\"}",
             rank);
    make_adapter_config(adapter, config);
    assert_ok(sp_geometry_open(model, &geometry, &error), &error);
    for (int32_t i = 0; i < sp_geometry_n_sites(geometry); i++) {
        sp_site site = {.struct_bytes = sizeof site};
        char path[SP_SITE_PATH_BYTES_MAX];

        assert_ok(sp_geometry_site_at(geometry, i, &site, &error), &error);
        if (site.kind != SP_SITE_LINEAR || site.layer < 0 || !strstr(site.module, word))
            continue;
        snprintf(path, sizeof path, "%s%s", prefix, core_of(site.path));
        make_adapter_add_pair(adapter, path, rank, site.k_in, site.n_out, (uint64_t)i + 1);
        n_pairs++;
    }
    assert_true(n_pairs > 0);
    sp_geometry_release(geometry);
    folder = make_adapter_folder(adapter);
    make_adapter_destroy(adapter);
    return folder;
}

static sp_engine *open_engine(const char *model, const char *const *names, char *const *folders,
                              size_t n)
{
    sp_engine_options options;
    sp_engine_adapter adapters[8];

    for (size_t i = 0; i < n; i++)
        adapters[i] = (sp_engine_adapter){sizeof adapters[i], names[i], folders[i]};
    sp_engine_options_default(&options, sizeof options);
    options.model_dir = model;
    options.threads = 1;
    options.max_loras = 8;
    options.kv_tokens = 4096;
    options.max_running = 8;
    options.state_snapshot_tokens = 64;
    return engine_run_open(&options, adapters, n);
}

static void remove_folder(char *folder)
{
    sp_test_remove_tree(folder);
    sp_free(folder);
}

/* One request on an engine that others may have used. */
static engine_run run_request(sp_engine *engine, const char *adapter, int32_t n_prompt)
{
    engine_run run = engine_run_init(adapter, prompt, n_prompt, NEW), *list[] = {&run};

    run.keep_logits = true;
    run.request.logits_from = n_prompt - 1;
    engine_run_submit(engine, &run);
    engine_run_all(engine, list, 1);
    return run;
}

/* ---- cases --------------------------------------------------------------------------------- */

/* Case 1. */
static void the_same_adapter_under_each_prefix(void **state)
{
    static const char *const prefixes[] = {"base_model.model.model.",
                                           "base_model.model.model.language_model.",
                                           "base_model.model.language_model.model.",
                                           "base_model.model.",
                                           "model.",
                                           "model.language_model.",
                                           ""};
    static const char *const names[] = {"p0", "p1", "p2", "p3", "p4", "p5", "p6"};
    enum { N = sizeof prefixes / sizeof *prefixes };

    (void)state;
    for (size_t m = 0; m < N_MODELS; m++) {
        char *folders[N], *unknown = write_adapter(models[m], "base_model.model.mtp.", "", 64);
        engine_run first, base;
        sp_engine *engine;
        sp_error error;

        for (size_t i = 0; i < N; i++)
            folders[i] = write_adapter(models[m], prefixes[i], "", 64);
        engine = open_engine(models[m], names, folders, N);
        first = run_request(engine, names[0], PROMPT);
        base = run_request(engine, NULL, PROMPT);
        assert_memory_not_equal(first.logits, base.logits, (size_t)base.vocab * sizeof(float));
        for (size_t i = 1; i < N; i++) {
            engine_run run = run_request(engine, names[i], PROMPT);

            engine_run_assert_same(&first, &run);
            engine_run_free(&run);
        }
        sp_engine_close(engine);
        {
            sp_engine_adapter adapter = {sizeof adapter, "unknown", unknown};
            sp_engine_options options;

            sp_engine_options_default(&options, sizeof options);
            options.model_dir = models[m];
            assert_true(sp_engine_open(&options, &adapter, 1, &engine, &error) < 0);
            assert_string_equal(error.code, "unknown-prefix");
        }
        for (size_t i = 0; i < N; i++)
            remove_folder(folders[i]);
        remove_folder(unknown);
        engine_run_free(&first);
        engine_run_free(&base);
    }
}

/* Case 2: the steps of a decode are others than the base's, not the prompt's alone. */
static void the_small_projections_alone(void **state)
{
    static const char *const words[N_MODELS] = {"in_proj_ba", "in_proj_a", "in_proj_b"};

    (void)state;
    for (size_t m = 0; m < N_MODELS; m++)
        for (int rank = 1; rank <= 64; rank *= 64) {
            static const char *const names[] = {"small"};
            char *folder = write_adapter(models[m], "base_model.model.model.", words[m], rank);
            sp_engine *engine = open_engine(models[m], names, &folder, 1);
            engine_run base = run_request(engine, NULL, PROMPT);
            engine_run run = run_request(engine, "small", PROMPT);
            size_t row = (size_t)base.vocab * sizeof(float);

            for (int32_t i = 0; i < NEW; i++)
                assert_memory_not_equal((const char *)run.logits + (size_t)i * row,
                                        (const char *)base.logits + (size_t)i * row, row);
            engine_run_free(&base);
            engine_run_free(&run);
            sp_engine_close(engine);
            remove_folder(folder);
        }
}

/* Case 50. */
static void fifty_identical_runs(void **state)
{
    static const char *const names[] = {"r64"};

    (void)state;
    for (size_t m = 0; m < N_MODELS; m++) {
        char *folder = write_adapter(models[m], "base_model.model.model.", "", 64);
        sp_engine *engine = open_engine(models[m], names, &folder, 1);
        engine_run first = run_request(engine, "r64", PROMPT);

        for (int32_t round = 0; round < 10; round++) {
            engine_run runs[5], *list[5];

            for (int32_t i = 0; i < 5; i++) {
                /* All the same, or every other one a stranger. */
                bool stranger = round % 2 == 1 && i % 2 == 1;

                runs[i] = engine_run_init(stranger ? NULL : "r64", prompt + (stranger ? i : 0),
                                          PROMPT - (stranger ? 20 * i : 0), NEW);
                runs[i].keep_logits = !stranger;
                runs[i].request.logits_from = PROMPT - 1;
                list[i] = &runs[i];
                engine_run_submit(engine, &runs[i]);
            }
            engine_run_all(engine, list, 5);
            for (int32_t i = 0; i < 5; i++) {
                if (runs[i].keep_logits)
                    engine_run_assert_same(&first, &runs[i]);
                engine_run_free(&runs[i]);
            }
        }
        engine_run_free(&first);
        sp_engine_close(engine);
        remove_folder(folder);
    }
}

/* Case 51, and the lengths around a chunk of the gated delta rule. */
static void prompts_of_any_length(void **state)
{
    static const int32_t lengths[] = {1, 31, 32, 33, 127, 128, 129, 400, PROMPT};
    static const char *const names[] = {"r64"};

    (void)state;
    for (size_t m = 0; m < N_MODELS; m++) {
        char *folder = write_adapter(models[m], "base_model.model.model.", "", 64);
        sp_engine *engine = open_engine(models[m], names, &folder, 1);

        for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++)
            for (int32_t adapted = 0; adapted < 2; adapted++) {
                engine_run run = engine_run_init(adapted ? "r64" : NULL, prompt, lengths[l], NEW);
                engine_run *list[] = {&run};

                run.keep_logits = run.request.logprobs = run.request.prompt_logprobs = true;
                engine_run_submit(engine, &run);
                engine_run_all(engine, list, 1);
                assert_int_equal(run.n_scores, lengths[l] - 1 + NEW);
                for (int32_t i = 0; i < run.n_logits * run.vocab; i++)
                    assert_true(isfinite(run.logits[i]));
                for (int32_t i = 0; i < run.n_scores; i++)
                    assert_true(isfinite(run.scores[i].logprob) && run.scores[i].logprob <= 0);
                engine_run_free(&run);
            }
        sp_engine_close(engine);
        remove_folder(folder);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_same_adapter_under_each_prefix),
        cmocka_unit_test(the_small_projections_alone),
        cmocka_unit_test(fifty_identical_runs),
        cmocka_unit_test(prompts_of_any_length),
    };
    sp_test_random random = {4051};

    engine_run_fill_prompt(&random, prompt, PROMPT, VOCAB);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
