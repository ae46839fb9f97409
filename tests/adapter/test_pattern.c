/*
 * Patterns against what Python's `re` says of them (patterns.json, made by make_patterns.py).
 */
#include "support/test.h"

#include "adapter/pattern.h"
#include "base/alloc.h"
#include "base/clock.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

static json_t *read_table(void)
{
    json_error_t error;
    json_t *table = json_load_file(SP_TEST_SOURCE "/tests/adapter/patterns.json", 0, &error);

    if (!table)
        fail_msg("patterns.json: %s", error.text);
    return table;
}

static void check_key(const char *key, sp_pattern_form form, const json_t *paths,
                      const json_t *wanted)
{
    sp_pattern *pattern;
    sp_error error;

    assert_ok(sp_pattern_create(key, form, "rank_pattern", NULL, &pattern, &error), &error);
    for (size_t i = 0; i < json_array_size(paths); i++) {
        const char *path = json_string_value(json_array_get(paths, i));
        bool want = json_is_true(json_array_get(wanted, i));
        bool got;

        assert_ok(sp_pattern_match(pattern, path, strlen(path), &got, &error), &error);
        if (got != want)
            fail_msg("\"%s\" and %s: %d, but Python says %d", key, path, got, want);
    }
    sp_pattern_destroy(pattern);
}

static void as_python_does(void **state)
{
    json_t *table = read_table();
    const json_t *paths = json_object_get(table, "paths");
    const json_t *patterns = json_object_get(table, "patterns");
    size_t n_matches = 0;

    (void)state;
    assert_true(json_array_size(patterns) > 50);
    for (size_t i = 0; i < json_array_size(patterns); i++) {
        const json_t *row = json_array_get(patterns, i);
        const char *key = json_string_value(json_object_get(row, "key"));

        check_key(key, SP_PATTERN_SUFFIX, paths, json_object_get(row, "suffix"));
        check_key(key, SP_PATTERN_WHOLE, paths, json_object_get(row, "whole"));
        for (size_t p = 0; p < json_array_size(paths); p++)
            n_matches += json_is_true(json_array_get(json_object_get(row, "suffix"), p));
    }
    assert_true(n_matches > 100);
    json_decref(table);
}

static void unsupported(void **state)
{
    json_t *table = read_table();
    const json_t *keys = json_object_get(table, "unsupported");

    (void)state;
    assert_true(json_array_size(keys) > 40);
    for (size_t i = 0; i < json_array_size(keys); i++) {
        const char *key = json_string_value(json_array_get(keys, i));
        sp_pattern *pattern = NULL;
        sp_error error;

        if (sp_pattern_create(key, SP_PATTERN_SUFFIX, "alpha_pattern", NULL, &pattern, &error) ==
            SP_OK)
            fail_msg("\"%s\" was taken", key);
        assert_string_equal(error.code, "unsupported-pattern");
        assert_string_equal(error.subject, "alpha_pattern");
        assert_true(error.position >= 0 && error.position <= (int64_t)strlen(key));
        assert_null(pattern);
    }
    json_decref(table);
}

/* Patterns that would search for ages are given up on, soon. */
static void endless_patterns(void **state)
{
    static const char *const keys[] = {"(a|a)*b", "(a*)*b", "(.*.*)*x", "(\\w+\\w+)+\\d",
                                       "(?:a?){64}(?:a){64}b"};
    char path[400];
    double start = sp_clock_seconds();

    (void)state;
    memset(path, 'a', sizeof path);
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        sp_pattern *pattern;
        sp_error error;
        bool matches = true;
        sp_status status;

        assert_ok(
            sp_pattern_create(keys[i], SP_PATTERN_WHOLE, "target_modules", NULL, &pattern, &error),
            &error);
        status = sp_pattern_match(pattern, path, sizeof path, &matches, &error);
        if (status != SP_OK)
            assert_string_equal(error.code, "unsupported-pattern");
        else
            assert_false(matches);
        sp_pattern_destroy(pattern);
    }
    assert_true(sp_clock_seconds() - start < 20);
}

/*
 * The patterns of one config draw on one number of steps: each match of a simple one takes a
 * little, one that searches long takes what it searched, and behind the end all are refused.
 */
static void steps_are_shared(void **state)
{
    static const char path[] = "model.layers.0.self_attn.q_proj";
    static const char *const keys[] = {"(q|k)_proj", "[a-z0-9._]*[a-z0-9._]*[a-z0-9._]*[^a-z0-9._]",
                                       "q_proj"};
    static const char expert[] = "model.language_model.layers.47.mlp.experts.127.down_proj";
    sp_pattern *patterns[3], *layer;
    int64_t steps_left = 100000, before;
    sp_error error;
    bool matches;

    (void)state;
    for (int i = 0; i < 3; i++)
        assert_ok(sp_pattern_create(keys[i], SP_PATTERN_SUFFIX, "alpha_pattern", &steps_left,
                                    &patterns[i], &error),
                  &error);
    assert_ok(sp_pattern_match(patterns[0], path, strlen(path), &matches, &error), &error);
    assert_true(matches);
    assert_true(steps_left < 100000 && steps_left > 99000);
    before = steps_left;
    assert_ok(sp_pattern_match(patterns[1], path, strlen(path), &matches, &error), &error);
    assert_false(matches);
    assert_true(before - steps_left > 1000);
    assert_ok(sp_pattern_create(".*\\.layers\\.3\\..*", SP_PATTERN_SUFFIX, "rank_pattern",
                                &steps_left, &layer, &error),
              &error);
    before = steps_left;
    assert_ok(sp_pattern_match(layer, expert, strlen(expert), &matches, &error), &error);
    assert_false(matches);
    assert_true(before - steps_left <= 1000); /* the path of an expert is no extravagance */
    sp_pattern_destroy(layer);
    steps_left = 1;
    assert_ok(sp_pattern_match(patterns[0], path, strlen(path), &matches, &error), &error);
    assert_true(steps_left <= 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(sp_pattern_match(patterns[i], path, strlen(path), &matches, &error),
                         SP_ERR_REFUSED);
        assert_string_equal(error.code, "unsupported-pattern");
        assert_non_null(strstr(error.text, "together"));
    }
    /* Plain names need none. */
    assert_ok(sp_pattern_match(patterns[2], path, strlen(path), &matches, &error), &error);
    assert_true(matches);
    for (int i = 0; i < 3; i++)
        sp_pattern_destroy(patterns[i]);
}

static void long_and_deep_patterns(void **state)
{
    static char text[20000];
    sp_pattern *pattern = NULL;
    sp_error error;

    (void)state;
    memset(text, '(', 65);
    memset(text + 65, ')', 65);
    assert_int_equal(sp_pattern_create(text, SP_PATTERN_WHOLE, "x", NULL, &pattern, &error),
                     SP_ERR_REFUSED);
    assert_int_equal(error.position, 64);
    memset(text, 'a', sizeof text - 1);
    assert_int_equal(sp_pattern_create(text, SP_PATTERN_WHOLE, "x", NULL, &pattern, &error),
                     SP_ERR_REFUSED);
    text[16384] = '\0';
    assert_ok(sp_pattern_create(text, SP_PATTERN_WHOLE, "x", NULL, &pattern, &error), &error);
    sp_pattern_destroy(pattern);
    sp_pattern_destroy(NULL);
}

static void allocation_failures(void **state)
{
    size_t blocks = sp_alloc_blocks();

    (void)state;
    for (int64_t n = 0;; n++) {
        sp_pattern *pattern = NULL;
        bool matches = false;
        sp_error error;
        sp_status status;

        sp_alloc_fail_after(n);
        status = sp_pattern_create("(q|k)_proj", SP_PATTERN_SUFFIX, "x", NULL, &pattern, &error);
        if (status == SP_OK)
            status = sp_pattern_match(pattern, "a.k_proj", 8, &matches, &error);
        if (!sp_alloc_failed()) {
            sp_alloc_fail_after(-1);
            assert_ok(status, &error);
            assert_true(matches);
            sp_pattern_destroy(pattern);
            assert_int_equal(sp_alloc_blocks(), blocks);
            assert_true(n >= 6);
            return;
        }
        sp_alloc_fail_after(-1);
        assert_int_equal(status, SP_ERR_MEMORY);
        sp_pattern_destroy(pattern);
        assert_int_equal(sp_alloc_blocks(), blocks);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(as_python_does),         cmocka_unit_test(unsupported),
        cmocka_unit_test(endless_patterns),       cmocka_unit_test(steps_are_shared),
        cmocka_unit_test(long_and_deep_patterns), cmocka_unit_test(allocation_failures),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
