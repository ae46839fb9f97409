/*
 * generate and logits as a user calls them: what is printed, in which form and order, and that the
 * ways to give the same thing (flags or JSON lines, one file or shards) give the same bytes.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "base/file.h"
#include "base/text.h"
#include "support/shell.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEMO                                                                                 \
    "--model " SP_TEST_DEMO "/base --adapter scripture=" SP_TEST_DEMO "/adapters/scripture " \
    "--adapter csource=" SP_TEST_DEMO "/adapters/csource --adapter sqldoc=" SP_TEST_DEMO     \
    "/adapters/sqldoc "
#define LINES_MAX 16

typedef struct json_lines {
    json_t *lines[LINES_MAX];
    size_t n;
} json_lines;

static json_lines run_json(const char *input, const char *arguments)
{
    shell_result result = shell_run(input, "generate %s --json", arguments);
    json_lines parsed = {.n = 0};
    const char *cursor = result.out.data;

    if (result.exit_code != 0)
        fail_msg("exit %d: %s", result.exit_code, result.err.data);
    while (cursor && *cursor) {
        size_t bytes = strcspn(cursor, "\n");

        assert_true(parsed.n < LINES_MAX);
        parsed.lines[parsed.n] = json_loadb(cursor, bytes, JSON_REJECT_DUPLICATES, NULL);
        assert_non_null(parsed.lines[parsed.n]);
        parsed.n++;
        cursor += bytes + 1;
    }
    shell_free(&result);
    return parsed;
}

static void free_json(json_lines *parsed)
{
    for (size_t i = 0; i < parsed->n; i++)
        json_decref(parsed->lines[i]);
}

static const char *text_of(const json_t *object, const char *field)
{
    return json_string_value(json_object_get(object, field));
}

static void test_json_of_a_batch(void **state)
{
    static const json_int_t greedy[] = {263, 413, 781, 266, 707};
    json_lines out = run_json(NULL, DEMO "--max-tokens 5 --precision f32 --request 'The' "
                                         "--request 'csource=The' --request '=a=b'");
    const json_t *summary;

    (void)state;
    assert_int_equal(out.n, 4);
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(json_object_size(out.lines[i]), 6);
        assert_int_equal(json_integer_value(json_object_get(out.lines[i], "index")), i);
        assert_int_equal(json_array_size(json_object_get(out.lines[i], "tokens")), 5);
        assert_string_equal(text_of(out.lines[i], "finish_reason"), "length");
    }
    assert_true(json_is_null(json_object_get(out.lines[0], "adapter")));
    assert_string_equal(text_of(out.lines[1], "adapter"), "csource");
    assert_true(json_is_null(json_object_get(out.lines[2], "adapter")));
    /* demo/golden/greedy.json: "The" is 495 and goes on with 263, 413, 781, 266, 707. */
    assert_int_equal(
        json_integer_value(json_array_get(json_object_get(out.lines[0], "prompt_tokens"), 0)), 495);
    for (size_t i = 0; i < 5; i++)
        assert_int_equal(
            json_integer_value(json_array_get(json_object_get(out.lines[0], "tokens"), i)),
            greedy[i]);
    assert_string_equal(text_of(out.lines[0], "text"), "re are two ways");
    summary = json_object_get(out.lines[3], "summary");
    assert_int_equal(json_integer_value(json_object_get(summary, "tokens")), 15);
    assert_int_equal(json_array_size(json_object_get(summary, "adapters")), 3);
    assert_true(json_number_value(
                    json_object_get(json_object_get(summary, "times"), "first_token_seconds")) > 0);
    free_json(&out);
}

static void test_lines_and_flags_agree(void **state)
{
    static const char input[] =
        "{\"adapter\": \"sqldoc\", \"prompt\": \"In the morning\", \"seed\": 5}\n"
        "\n"
        "{\"prompt_tokens\": [791, 262, 1656], \"temperature\": 0, \"stop\": \"said\"}\n";
    json_lines a = run_json(input, DEMO "--max-tokens 12 --temperature 0.8 --top-p 0.9");
    json_lines b = run_json(NULL, DEMO "--max-tokens 12 --temperature 0.8 --top-p 0.9 --seed 5 "
                                       "--request 'sqldoc=In the morning'");
    json_lines c = run_json(NULL, DEMO "--max-tokens 12 --stop said --request 'In the morning'");

    (void)state;
    assert_int_equal(a.n, 3);
    assert_true(
        json_equal(json_object_get(a.lines[0], "tokens"), json_object_get(b.lines[0], "tokens")));
    assert_true(
        json_equal(json_object_get(a.lines[1], "tokens"), json_object_get(c.lines[0], "tokens")));
    assert_string_equal(text_of(a.lines[1], "text"), text_of(c.lines[0], "text"));
    assert_string_equal(text_of(a.lines[1], "finish_reason"), "stop");
    free_json(&a);
    free_json(&b);
    free_json(&c);
}

static double number_of(const json_t *object, const char *field)
{
    return json_number_value(json_object_get(object, field));
}

/* Penalties, bias and logprobs by field and by flag; the same request twice gives one score. */
static void test_scores(void **state)
{
    static const char input[] =
        "{\"prompt\": \"The\", \"logprobs\": true, \"top_logprobs\": 2}\n"
        "{\"prompt\": \"The\", \"logit_bias\": {\"300\": 100}, \"logprobs\": true}\n"
        "{\"prompt_tokens\": [495, 263, 413], \"prompt_logprobs\": true, \"max_tokens\": 0}\n"
        "{\"prompt\": \"The\", \"repetition_penalty\": 1.5, \"presence_penalty\": 1}\n";
    json_lines a = run_json(input, DEMO "--max-tokens 2 --precision f32");
    json_lines b = run_json(NULL, DEMO "--max-tokens 2 --precision f32 --repetition-penalty 1.5 "
                                       "--presence-penalty 1 --request The");
    const json_t *scores = json_object_get(a.lines[0], "logprobs");
    const json_t *prompt = json_object_get(a.lines[2], "prompt_logprobs");
    const json_t *first = json_array_get(scores, 0);

    (void)state;
    assert_int_equal(json_array_size(scores), 2);
    assert_int_equal(json_integer_value(json_object_get(first, "token")), 263);
    assert_int_equal(json_array_size(json_object_get(first, "top")), 2);
    assert_int_equal(json_integer_value(json_array_get(json_object_get(a.lines[1], "tokens"), 0)),
                     300);
    /* "The" and its two greedy tokens as a prompt: the logprobs that they had as output. */
    assert_int_equal(json_array_size(prompt), 3);
    assert_true(json_is_null(json_array_get(prompt, 0)));
    for (size_t i = 0; i < 2; i++)
        assert_true(number_of(json_array_get(scores, i), "logprob") ==
                    number_of(json_array_get(prompt, i + 1), "logprob"));
    assert_int_equal(json_array_size(json_object_get(a.lines[2], "tokens")), 0);
    assert_null(json_object_get(a.lines[3], "logprobs"));
    assert_true(
        json_equal(json_object_get(a.lines[3], "tokens"), json_object_get(b.lines[0], "tokens")));
    free_json(&a);
    free_json(&b);
}

/* A JSON line with a prompt of n tokens. */
static void add_long_prompt(sp_text *input, int n)
{
    sp_text_add(input, "{\"prompt_tokens\": [495");
    for (int i = 1; i < n; i++)
        sp_text_format(input, ", %d", 200 + (i * 37) % 500);
    sp_text_add(input, "], \"logprobs\": true, \"prompt_logprobs\": true, \"top_logprobs\": 5}\n");
}

static void check_finite(const json_t *scores, size_t from, size_t n)
{
    assert_int_equal(json_array_size(scores), n);
    for (size_t i = from; i < n; i++) {
        const json_t *score = json_array_get(scores, i);

        assert_true(json_is_number(json_object_get(score, "logprob")));
        assert_true(number_of(score, "logprob") >= -9999 && number_of(score, "logprob") <= 0);
        assert_int_equal(json_array_size(json_object_get(score, "top")), 5);
        for (size_t k = 0; k < 5; k++)
            assert_true(number_of(json_array_get(json_object_get(score, "top"), k), "logprob") <=
                        0);
    }
}

/* Prompts at and around the borders of pages, blocks and chunks: every logprob is a number. */
static void test_scores_of_long_prompts(void **state)
{
    static const int lengths[] = {1, 127, 128, 129, 400};
    sp_text input = {0};
    json_lines out;

    (void)state;
    for (size_t i = 0; i < 5; i++)
        add_long_prompt(&input, lengths[i]);
    out = run_json(input.data, DEMO "--max-tokens 2 --ignore-eos");
    assert_int_equal(out.n, 6);
    for (size_t i = 0; i < 5; i++) {
        check_finite(json_object_get(out.lines[i], "logprobs"), 0, 2);
        check_finite(json_object_get(out.lines[i], "prompt_logprobs"), 1, (size_t)lengths[i]);
    }
    free_json(&out);
    sp_text_free(&input);
}

static void test_text_output(void **state)
{
    shell_result result =
        shell_run(NULL, "generate " DEMO "--precision f32 --max-tokens 3 --request The");

    (void)state;
    assert_int_equal(result.exit_code, 0);
    assert_string_equal(result.out.data, "[0] base: 1 prompt tokens, 3 new, length\n"
                                         "There are two\n\n");
    assert_non_null(strstr(result.err.data, "tokens/s"));
    shell_free(&result);
}

/* Sanitizers and their shadow memory would be measured, not the program. */
static void test_memory_beyond_the_mapping(void **state)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    (void)state;
    print_message("skipped: memory is not measured under a sanitizer\n");
    skip();
#else
    json_lines out = run_json(NULL, DEMO "--max-tokens 5 --request 'sqldoc=The'");
    const json_t *memory =
        json_object_get(json_object_get(out.lines[out.n - 1], "summary"), "memory");
    json_int_t beyond =
        json_integer_value(json_object_get(memory, "resident_beyond_weights_bytes"));
    json_int_t pool = json_integer_value(json_object_get(memory, "pool_bytes"));
    json_int_t kv = json_integer_value(json_object_get(memory, "kv_bytes"));

    (void)state;
    assert_true(beyond > 0);
    assert_true(beyond < pool + kv + (100 << 20));
    free_json(&out);
#endif
}

/* The same weights as one file and as three shards, with an adapter. */
static void test_shards_give_the_same_logits(void **state)
{
    char *directory = sp_test_make_directory();
    char command[2048];
    char *files[2];
    size_t bytes[2];

    (void)state;
    for (int i = 0; i < 2; i++) {
        shell_result result;
        char path[512];
        sp_error error;

        snprintf(command, sizeof command,
                 SP_TEST_BINARY_DIR "/tools/make_checkpoint --preset tiny --seed 3 --shards %d "
                                    "--adapters 1 --rank 8 %s/m%d >%s/log 2>&1",
                 i ? 3 : 1, directory, i, directory);
        assert_int_equal(system(command), 0);
        result = shell_run(NULL,
                           "logits --model %s/m%d --adapter a=%s/m%d/adapters/a0 --use a "
                           "--tokens 1,2,3,4,5 --last 2 --out %s/o%d",
                           directory, i, directory, i, directory, i);
        if (result.exit_code != 0)
            fail_msg("%s", result.err.data);
        shell_free(&result);
        snprintf(path, sizeof path, "%s/o%d", directory, i);
        assert_ok(sp_file_read_all(path, 1 << 24, &files[i], &bytes[i], &error), &error);
    }
    assert_int_equal(bytes[0], bytes[1]);
    assert_memory_equal(files[0], files[1], bytes[0]);
    sp_free(files[0]);
    sp_free(files[1]);
    sp_test_remove_tree(directory);
    sp_free(directory);
}

static void test_help(void **state)
{
    static const char *const verbs[] = {"--help", "generate --help", "logits --help",
                                        "bench --help", "bench step --help"};

    (void)state;
    for (size_t i = 0; i < sizeof verbs / sizeof verbs[0]; i++) {
        shell_result result = shell_run(NULL, "%s", verbs[i]);

        assert_int_equal(result.exit_code, 0);
        assert_int_equal(result.err.bytes, 0);
        assert_non_null(strstr(result.out.data, "usage: sidepath"));
        shell_free(&result);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_json_of_a_batch),
        cmocka_unit_test(test_lines_and_flags_agree),
        cmocka_unit_test(test_scores),
        cmocka_unit_test(test_scores_of_long_prompts),
        cmocka_unit_test(test_text_output),
        cmocka_unit_test(test_memory_beyond_the_mapping),
        cmocka_unit_test(test_shards_give_the_same_logits),
        cmocka_unit_test(test_help),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
