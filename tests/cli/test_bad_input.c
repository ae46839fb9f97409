/*
 * Bad input to the verbs: one clear line on standard error, exit status 1 (2 for usage), nothing
 * on standard output and nothing half-written.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "base/file.h"
#include "support/shell.h"

#include <string.h>

#define TIED SP_TEST_FIXTURES "/qwen3-tied"
#define DEMO SP_TEST_DEMO "/base"

static void check_failure(shell_result result, int exit_code, const char *named)
{
    size_t lines = 0;

    for (size_t i = 0; i < result.err.bytes; i++)
        lines += result.err.data[i] == '\n';
    if (result.exit_code != exit_code || !result.err.data || !strstr(result.err.data, named))
        fail_msg("exit %d (expected %d), looking for \"%s\" in: %s", result.exit_code, exit_code,
                 named, result.err.data ? result.err.data : "");
    assert_int_equal(result.out.bytes, 0);
    assert_int_equal(lines, 1);
    shell_free(&result);
}

/* Every verb that runs a model refuses this directory for the same reason. */
static void check_model(const char *directory, const char *named)
{
    char *out = sp_path_join(directory, "out.safetensors");

    check_failure(shell_run(NULL, "generate --model %s --request hello", directory), 1, named);
    check_failure(shell_run(NULL, "logits --model %s --tokens 1,2 --out %s", directory, out), 1,
                  named);
    assert_false(sp_path_exists(out));
    sp_free(out);
}

static void drop_directory(char *directory)
{
    sp_test_remove_tree(directory);
    sp_free(directory);
}

static void test_missing_files(void **state)
{
    char *model = shell_copy_directory(TIED);

    (void)state;
    check_model("/nowhere/at/all", "/nowhere/at/all does not exist");
    shell_remove_file(model, "config.json");
    check_model(model, "config.json");
    drop_directory(model);

    model = shell_copy_directory(TIED);
    shell_remove_file(model, "model.safetensors");
    check_model(model, "model.safetensors");
    drop_directory(model);
}

static void test_malformed_config(void **state)
{
    char *model = shell_copy_directory(TIED);

    (void)state;
    sp_test_write_file(model, "config.json", "{\"hidden_size\": ", 16);
    check_model(model, "config.json");
    drop_directory(model);

    model = shell_copy_directory(TIED);
    shell_edit(model, "config.json", "\"hidden_size\": 64", "\"hidden_size\": \"64\"");
    check_model(model, "hidden_size");
    drop_directory(model);

    model = shell_copy_directory(TIED);
    shell_edit(model, "config.json", "Qwen3ForCausalLM", "LlamaForCausalLM");
    check_model(model, "LlamaForCausalLM");
    drop_directory(model);

    model = shell_copy_directory(TIED);
    shell_edit(model, "generation_config.json", "\"eos_token_id\": 509", "\"eos_token_id\": \"x\"");
    check_model(model, "eos_token_id");
    drop_directory(model);
}

static void test_other_architectures_are_named(void **state)
{
    (void)state;
    char *model = shell_copy_directory(TIED);

    shell_edit(model, "config.json", "Qwen3ForCausalLM", "Gemma2ForCausalLM");
    check_model(model, "Gemma2ForCausalLM");
    check_model(model, "Qwen3MoeForCausalLM"); /* one of those that run */
    drop_directory(model);
}

static void test_wrong_weights(void **state)
{
    char *model = shell_copy_directory(TIED);

    (void)state;
    /* One letter of a name in the header: the weight of layer 2 is no longer there. */
    shell_edit(model, "model.safetensors", "model.layers.2.mlp.up_proj",
               "model.layers.2.mlp.uq_proj");
    check_model(model, "model.layers.2.mlp.up_proj.weight");
    drop_directory(model);

    model = shell_copy_directory(TIED);
    shell_edit(model, "config.json", "\"intermediate_size\": 160", "\"intermediate_size\": 168");
    check_model(model, "[168, 64]");
    drop_directory(model);

    model = shell_copy_directory(TIED);
    shell_truncate(model, "model.safetensors", shell_file_bytes(model, "model.safetensors") - 2);
    check_model(model, "model.safetensors");
    drop_directory(model);

    model = shell_copy_directory(TIED);
    shell_truncate(model, "model.safetensors", 100);
    check_model(model, "model.safetensors");
    drop_directory(model);
}

static void test_vocabulary_mismatch(void **state)
{
    char *model = shell_copy_directory(TIED);
    char *data;
    size_t bytes;
    sp_error error;

    (void)state;
    /* A tokenizer of 2048 ids over a model of 512. */
    assert_ok(sp_file_read_all(DEMO "/tokenizer.json", 1 << 24, &data, &bytes, &error), &error);
    sp_test_write_file(model, "tokenizer.json", data, bytes);
    check_model(model, "2048");
    sp_free(data);
    drop_directory(model);
}

static void test_bad_requests(void **state)
{
    (void)state;
    check_failure(shell_run(NULL, "generate --model %s --request nobody=hello", DEMO), 1,
                  "no adapter is loaded under the name \"nobody\"");
    check_failure(shell_run(NULL, "generate --model %s --request 'a=b'", DEMO), 1, "\"=PROMPT\"");
    check_failure(shell_run(NULL, "generate --model %s --request ''", DEMO), 1,
                  "the prompt is empty");
    check_failure(shell_run(NULL, "generate --model %s --request hello --max-tokens 4000", DEMO), 1,
                  "context length is 2048");
    check_failure(shell_run(NULL,
                            "generate --model %s --request 'hello you' --max-tokens 100 "
                            "--kv-tokens 64",
                            DEMO),
                  1, "raise kv-tokens");
    check_failure(shell_run(NULL,
                            "generate --model %s --request hello --memory 64000000 "
                            "--max-loras 512 --max-lora-rank 1024 --adapter a=" SP_TEST_DEMO
                            "/adapters/sqldoc",
                            DEMO),
                  1, "lower max-loras");
    check_failure(shell_run(NULL, "generate --model %s --request hello", TIED), 1,
                  "tokenizer.json");
    check_failure(shell_run(NULL, "logits --model %s --tokens 1,600 --out /nowhere/x", TIED), 1,
                  "600");
    check_failure(shell_run(NULL, "logits --model %s --tokens 1,2 --out /nowhere/x", TIED), 1,
                  "/nowhere/x");
    check_failure(shell_run(NULL, "logits --model %s --use x --tokens 1,2 --out /nowhere/x", TIED),
                  1, "\"x\"");
}

static void test_bad_json_lines(void **state)
{
    static const char *const lines[][2] = {
        {"{\"prompt\": \"a\"", "line 1"},
        {"\n[1]\n", "line 2"},
        {"{\"prompt\": \"a\", \"promt\": 1}", "promt"},
        {"{\"prompt\": \"a\", \"prompt\": \"b\"}", "duplicate"},
        {"{\"prompt\": 7}", "prompt"},
        {"{\"prompt_tokens\": []}", "prompt_tokens"},
        {"{\"prompt_tokens\": [1, -1]}", "element 1"},
        {"{\"prompt_tokens\": [1], \"prompt\": \"a\"}", "either"},
        {"{\"prompt\": \"a\", \"max_tokens\": 0}", "max_tokens"},
        {"{\"prompt\": \"a\", \"temperature\": -1}", "temperature"},
        {"{\"prompt\": \"a\", \"top_p\": 1.5}", "top_p"},
        {"{\"prompt\": \"a\", \"lora_scale\": 17}", "lora_scale"},
        {"{\"prompt\": \"a\", \"presence_penalty\": -3}", "presence_penalty"},
        {"{\"prompt\": \"a\", \"frequency_penalty\": \"1\"}", "frequency_penalty"},
        {"{\"prompt\": \"a\", \"repetition_penalty\": 0}", "repetition_penalty"},
        {"{\"prompt\": \"a\", \"top_logprobs\": 21}", "top_logprobs"},
        {"{\"prompt\": \"a\", \"logprobs\": 1}", "logprobs"},
        {"{\"prompt\": \"a\", \"logit_bias\": [1]}", "logit_bias"},
        {"{\"prompt\": \"a\", \"logit_bias\": {\"a\": 1}}", "is not an id"},
        {"{\"prompt\": \"a\", \"logit_bias\": {\"01\": 1}}", "is not an id"},
        {"{\"prompt\": \"a\", \"logit_bias\": {\"1\": true}}", "logit_bias"},
        {"{\"prompt\": \"a\", \"logit_bias\": {\"1\": 101}}", "-100 to 100"},
        {"{\"prompt\": \"a\", \"logit_bias\": {\"999999999\": 1}}", "vocabulary"},
        {"{\"prompt\": \"a\", \"stop\": [\"\"]}", "stop"},
        {"{\"prompt\": \"a\", \"stop\": 1}", "stop"},
        {"{\"prompt\": \"a\", \"adapter\": \"gone\"}", "gone"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++)
        check_failure(shell_run(lines[i][0], "generate --model %s", DEMO), 1, lines[i][1]);
}

static void test_usage(void **state)
{
    (void)state;
    check_failure(shell_run(NULL, "generate --request hello"), 2, "--model DIR is required");
    check_failure(shell_run(NULL, "generate --model %s", DEMO), 2, "there is no request");
    check_failure(shell_run(NULL, "generate --modle %s", DEMO), 2, "did you mean --model");
    check_failure(shell_run(NULL, "generate --model %s --request a --adapter nothing", DEMO), 2,
                  "NAME=DIR");
    check_failure(
        shell_run(NULL, "generate --model %s --request a --precision f32 --device cuda", DEMO), 2,
        "CPU only");
    check_failure(shell_run(NULL, "generate --model %s --request a --temperature hot", DEMO), 2,
                  "not a number");
    check_failure(shell_run(NULL, "logits --model %s --tokens 1,x --out /nowhere/x", TIED), 2,
                  "item 1");
    check_failure(shell_run(NULL, "logits --model %s", TIED), 2, "--out");
    check_failure(shell_run(NULL, "frobnicate"), 2, "frobnicate");
}

static void test_bad_adapters(void **state)
{
    (void)state;
    check_failure(shell_run(NULL, "generate --model %s --adapter a=/nowhere --request a=x", DEMO),
                  1, "/nowhere");
    check_failure(shell_run(NULL,
                            "generate --model %s --adapter a=%s/adapters/plain-r8 --request a=x",
                            DEMO, TIED),
                  1, "[");
    check_failure(shell_run(NULL,
                            "generate --model %s --adapter base=%s/adapters/sqldoc --request x",
                            DEMO, SP_TEST_DEMO),
                  1, "base model's own name");
    check_failure(shell_run(NULL,
                            "generate --model %s --adapter a=%s/adapters/sqldoc "
                            "--adapter b=%s/adapters/csource --max-loras 0 --request x",
                            DEMO, SP_TEST_DEMO, SP_TEST_DEMO),
                  1, "max-loras");
    check_failure(shell_run(NULL,
                            "generate --model %s --adapter a=%s/adapters/csource "
                            "--max-lora-rank 8 --request x",
                            DEMO, SP_TEST_DEMO),
                  1, "rank-exceeds-pool");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_missing_files),
        cmocka_unit_test(test_malformed_config),
        cmocka_unit_test(test_other_architectures_are_named),
        cmocka_unit_test(test_wrong_weights),
        cmocka_unit_test(test_vocabulary_mismatch),
        cmocka_unit_test(test_bad_requests),
        cmocka_unit_test(test_bad_json_lines),
        cmocka_unit_test(test_usage),
        cmocka_unit_test(test_bad_adapters),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
