/*
 * `sidepath inspect` as a user calls it: exit statuses, and what goes where.
 */
#include "base/alloc.h"
#include "base/file.h"
#include "support/make_adapter.h"
#include "support/shell.h"
#include "support/test.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

#define TIED     SP_TEST_FIXTURES "/qwen3-tied"
#define ADAPTERS TIED "/adapters/"

typedef struct outcome {
    int status;
    const char *out, *err; /* never NULL */
    shell_result result;
} outcome;

/* Arguments behind "inspect". */
static outcome run(const char *arguments)
{
    shell_result result = shell_run(NULL, "inspect %s", arguments);

    return (outcome){.status = result.exit_code,
                     .out = result.out.data ? result.out.data : "",
                     .err = result.err.data ? result.err.data : "",
                     .result = result};
}

static void forget(outcome *done)
{
    shell_free(&done->result);
}

static json_t *json_of(const outcome *result)
{
    json_error_t error;
    json_t *root = json_loads(result->out, JSON_REJECT_DUPLICATES, &error);

    if (!root)
        fail_msg("%s: %s", error.text, result->out);
    assert_string_equal(result->err, "");
    return root;
}

static const char *text_at(const json_t *root, const char *key)
{
    return json_string_value(json_object_get(root, key));
}

static void accepted(void **state)
{
    outcome result = run(ADAPTERS "plain-r8 --model " TIED " --json");
    json_t *root = json_of(&result);

    (void)state;
    assert_int_equal(result.status, 0);
    assert_string_equal(text_at(root, "verdict"), "accepted");
    assert_int_equal(json_integer_value(json_object_get(root, "sites")), 28);
    /* A slot of 4 layers at rank 8 in bf16: every matrix is a multiple of 256 bytes. */
    assert_int_equal(json_integer_value(json_object_get(root, "slot_bytes")),
                     4 * 8 * 2 *
                         ((64 + 128) + 2 * (64 + 64) + (128 + 64) + 2 * (64 + 160) + (160 + 64)));
    assert_int_equal(json_array_size(json_object_get(root, "engine_missing")), 0);
    json_decref(root);
    forget(&result);
    result = run("--model=" TIED " " ADAPTERS "plain-r8/adapter_model.safetensors");
    assert_int_equal(result.status, 0);
    assert_non_null(strstr(result.out, "verdict  accepted"));
    assert_non_null(strstr(result.out, "self_attn.q_proj"));
    assert_string_equal(result.err, "");
    forget(&result);
}

static void unchecked(void **state)
{
    outcome result = run("--json " ADAPTERS "plain-r8");
    json_t *root = json_of(&result);

    (void)state;
    assert_int_equal(result.status, 0);
    assert_string_equal(text_at(root, "verdict"), "unchecked");
    assert_true(json_is_null(json_object_get(root, "slot_bytes")));
    json_decref(root);
    forget(&result);
}

static void refused(void **state)
{
    outcome result = run(ADAPTERS "dora --json --model " TIED);
    json_t *root = json_of(&result);

    (void)state;
    assert_int_equal(result.status, 1);
    assert_string_equal(text_at(root, "verdict"), "refused");
    assert_string_equal(text_at(root, "code"), "dora");
    json_decref(root);
    forget(&result);
    result = run(ADAPTERS "plain-r8 --max-lora-rank 4 --model " TIED " --json");
    root = json_of(&result);
    assert_int_equal(result.status, 1);
    assert_string_equal(text_at(root, "code"), "rank-exceeds-pool");
    json_decref(root);
    forget(&result);
    result = run("/nonexistent --json");
    root = json_of(&result);
    assert_int_equal(result.status, 1);
    assert_string_equal(text_at(root, "code"), "config-missing");
    json_decref(root);
    forget(&result);
}

/* A rank that no pool takes is a verdict like any other, and what the server gives too. */
static void rank_of_no_pool(void **state)
{
    make_adapter *adapter = make_adapter_create();
    char arguments[1024];
    char *folder;
    outcome result;
    json_t *root;

    (void)state;
    make_adapter_config(adapter, "{\"r\": 4097, \"lora_alpha\": 4, \"use_rslora\": false}");
    make_adapter_add_pair(adapter, "model.layers.0.self_attn.k_proj", 4097, 64, 64, 1);
    folder = make_adapter_folder(adapter);
    snprintf(arguments, sizeof arguments, "%s --json --model " TIED, folder);
    result = run(arguments);
    root = json_of(&result);
    assert_int_equal(result.status, 1);
    assert_string_equal(text_at(root, "code"), "rank-exceeds-pool");
    assert_non_null(strstr(text_at(root, "message"), "at most 4096"));
    json_decref(root);
    forget(&result);
    snprintf(arguments, sizeof arguments, "%s --json", folder);
    result = run(arguments);
    assert_int_equal(result.status, 0);
    forget(&result);
    result = (outcome){.result = shell_run(
                           NULL, "generate --model " TIED " --adapter a=%s --request a=x", folder)};
    assert_int_equal(result.result.exit_code, 1);
    assert_non_null(strstr(result.result.err.data, "[rank-exceeds-pool]"));
    forget(&result);
    sp_test_remove_tree(folder);
    sp_free(folder);
    make_adapter_destroy(adapter);
}

/* The base's weights are not needed for an adapter without a table: its config.json is enough. */
static void base_without_weights(void **state)
{
    char *folder = sp_test_make_directory();
    char arguments[1024];
    size_t n_bytes;
    char *config;
    outcome result;
    json_t *root;
    sp_error error;

    (void)state;
    assert_ok(sp_file_read_all(TIED "/config.json", 1u << 20, &config, &n_bytes, &error), &error);
    sp_test_write_file(folder, "config.json", config, n_bytes);
    sp_free(config);
    snprintf(arguments, sizeof arguments, ADAPTERS "plain-r8 --json --model %s", folder);
    result = run(arguments);
    root = json_of(&result);
    assert_int_equal(result.status, 0);
    assert_string_equal(text_at(root, "verdict"), "accepted");
    json_decref(root);
    forget(&result);
    snprintf(arguments, sizeof arguments, ADAPTERS "save-embed --json --model %s", folder);
    result = run(arguments);
    root = json_of(&result);
    assert_int_equal(result.status, 1);
    assert_string_equal(text_at(root, "code"), "base-unavailable");
    json_decref(root);
    forget(&result);
    sp_test_remove_tree(folder);
    sp_free(folder);
}

/* Switches: each turns a verdict around. */
static void switches(void **state)
{
    static const struct {
        const char *without, *with;
    } pairs[] = {
        {SP_TEST_FIXTURES "/qwen3moe/adapters/router --no-experts --model " SP_TEST_FIXTURES
                          "/qwen3moe",
         SP_TEST_FIXTURES "/qwen3moe/adapters/router --experts --model " SP_TEST_FIXTURES
                          "/qwen3moe"},
        {SP_TEST_FIXTURES
         "/qwen3moe/adapters/experts-ffn-names --max-lora-expert-rank 7 --model " SP_TEST_FIXTURES
         "/qwen3moe",
         SP_TEST_FIXTURES
         "/qwen3moe/adapters/experts-ffn-names --max-lora-expert-rank 8 --model " SP_TEST_FIXTURES
         "/qwen3moe"},
        {SP_TEST_FIXTURES "/qwen3-tied/malformed/unknown-module --model " TIED,
         SP_TEST_FIXTURES "/qwen3-tied/malformed/unknown-module --allow-partial --model " TIED},
    };

    (void)state;
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        outcome result = run(pairs[i].without);

        assert_int_equal(result.status, 1);
        forget(&result);
        result = run(pairs[i].with);
        assert_int_equal(result.status, 0);
        forget(&result);
    }
}

/* In the checking mode a slot holds FP32. */
static void precision(void **state)
{
    int64_t bytes[2];

    (void)state;
    for (int i = 0; i < 2; i++) {
        outcome result = run(i ? ADAPTERS "r64 --precision f32 --json --model " TIED
                               : ADAPTERS "r64 --precision bf16 --json --model " TIED);
        json_t *root = json_of(&result);

        assert_int_equal(result.status, 0);
        bytes[i] = json_integer_value(json_object_get(root, "slot_bytes"));
        json_decref(root);
        forget(&result);
    }
    assert_int_equal(bytes[1], 2 * bytes[0]);
}

/* An adapter of tables and experts only takes no slot, and nothing of it is left out. */
static void no_linear_site(void **state)
{
    static const char *const cases[] = {
        SP_TEST_FIXTURES "/qwen3moe/adapters/v4-sparse-experts --json --model " SP_TEST_FIXTURES
                         "/qwen3moe",
        SP_TEST_FIXTURES "/qwen3next/adapters/v4-sparse-experts --json --model " SP_TEST_FIXTURES
                         "/qwen3next"};

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        outcome result = run(cases[i]);
        json_t *root = json_of(&result);

        assert_int_equal(result.status, 0);
        assert_int_equal(json_integer_value(json_object_get(root, "slot_bytes")), 0);
        assert_int_equal(json_array_size(json_object_get(root, "engine_missing")), 0);
        json_decref(root);
        forget(&result);
    }
}

/* A verdict that cannot be written is a failure: a script must not take silence for a yes. */
static void a_full_disk(void **state)
{
    outcome result =
        run(ADAPTERS "plain-r8 --json --model " TIED " > /dev/full 2> /dev/null; test $? = 1");

    (void)state;
    assert_int_equal(result.status, 0);
    forget(&result);
}

static void failures(void **state)
{
    static const char *const bad_models[] = {"/nonexistent", ADAPTERS "plain-r8"};
    static const char *const words[] = {"/nonexistent", "config.json"};

    (void)state;
    for (size_t i = 0; i < 2; i++) {
        char arguments[1024];
        outcome result;

        snprintf(arguments, sizeof arguments, ADAPTERS "plain-r8 --model %s", bad_models[i]);
        result = run(arguments);
        assert_int_equal(result.status, 1);
        assert_string_equal(result.out, "");
        assert_non_null(strstr(result.err, words[i]));
        forget(&result);
    }
}

/* A script that requests JSON gets it, whatever is wrong with the base. */
static void json_of_a_bad_base(void **state)
{
    static const struct {
        const char *model, *words;
    } cases[] = {
        {SP_TEST_FIXTURES "/archs/gemma3_text",
         "Gemma3ForCausalLM (model_type gemma3_text) is not served"},
        {SP_TEST_FIXTURES "/archs/phi3", "Phi3ForCausalLM"},
        {"/nonexistent", "cannot open /nonexistent"},
        {ADAPTERS "plain-r8", "config.json"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char arguments[1024];
        outcome result;
        json_t *root;

        snprintf(arguments, sizeof arguments, ADAPTERS "plain-r8 --json --model %s",
                 cases[i].model);
        result = run(arguments);
        root = json_of(&result);
        assert_int_equal(result.status, 1);
        assert_string_equal(text_at(root, "verdict"), "refused");
        assert_string_equal(text_at(root, "code"), "base-unavailable");
        assert_non_null(strstr(text_at(root, "message"), cases[i].words));
        assert_true(json_is_null(json_object_get(root, "tensor")));
        assert_true(json_is_null(json_object_get(root, "digest")));
        json_decref(root);
        forget(&result);
    }
}

static void usage(void **state)
{
    static const char *const wrong[] = {"", "a b", "--nonsense x", "x --precision f16",
                                        "x --max-lora-rank many"};
    outcome result;

    (void)state;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        result = run(wrong[i]);
        assert_int_equal(result.status, 2);
        assert_string_equal(result.out, "");
        assert_true(strlen(result.err) > 0);
        forget(&result);
    }
    result = run("--help");
    assert_int_equal(result.status, 0);
    assert_non_null(strstr(result.out, "allow-partial"));
    assert_string_equal(result.err, "");
    forget(&result);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(accepted),
        cmocka_unit_test(unchecked),
        cmocka_unit_test(refused),
        cmocka_unit_test(rank_of_no_pool),
        cmocka_unit_test(base_without_weights),
        cmocka_unit_test(switches),
        cmocka_unit_test(precision),
        cmocka_unit_test(no_linear_site),
        cmocka_unit_test(a_full_disk),
        cmocka_unit_test(failures),
        cmocka_unit_test(json_of_a_bad_base),
        cmocka_unit_test(usage),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
