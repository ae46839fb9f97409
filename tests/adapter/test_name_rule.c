/*
 * Lists of names: a name means the paths that end in it at a dot, whatever trunk stands before.
 */
#include "support/test.h"

#include "adapter/name_rule.h"
#include "base/alloc.h"
#include "base/clock.h"

#include <stdio.h>
#include <string.h>

/* A rule of these names; they are borrowed. */
static sp_name_rule rule_of(const char *const *names, size_t n)
{
    sp_name_rule rule = {.given = true, .n = n};
    sp_error error;

    rule.names = sp_calloc(n > 0 ? n : 1, sizeof *rule.names);
    assert_non_null(rule.names);
    for (size_t i = 0; i < n; i++)
        rule.names[i] = names[i];
    assert_ok(sp_name_rule_sort(&rule, "target_modules", &error), &error);
    return rule;
}

static bool matches(const sp_name_rule *rule, const char *path)
{
    bool answer;
    sp_error error;

    assert_ok(sp_name_rule_match(rule, path, strlen(path), &answer, &error), &error);
    return answer;
}

static const struct {
    const char *name, *path;
    bool fits;
} cases[] = {
    {"q_proj", "model.layers.0.self_attn.q_proj", true},
    {"self_attn.q_proj", "model.layers.0.self_attn.q_proj", true},
    {"layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj", true},
    {"proj", "model.layers.0.self_attn.q_proj", false},
    {"_proj", "model.layers.0.self_attn.q_proj", false},
    {"attn.q_proj", "model.layers.0.self_attn.q_proj", false},
    {"xq_proj", "model.layers.0.self_attn.q_proj", false},
    {"q_proj.x", "model.layers.0.self_attn.q_proj", false},
    {"q_pro", "model.layers.0.self_attn.q_proj", false},
    {"self_attn", "model.layers.0.self_attn.q_proj", false},
    {"", "model.layers.0.self_attn.q_proj", false},
    {".", "model.layers.0.self_attn.q_proj", false},
    {".q_proj", "model.layers.0.self_attn.q_proj", false},
    /* a full path under any trunk */
    {"model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj", true},
    {"model.layers.0.self_attn.q_proj", "layers.0.self_attn.q_proj", true},
    {"model.layers.0.self_attn.q_proj", "model.language_model.layers.0.self_attn.q_proj", true},
    {"model.layers.0.self_attn.q_proj", "language_model.model.layers.0.self_attn.q_proj", true},
    {"model.language_model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj", true},
    {"language_model.layers.0.self_attn.q_proj", "model.language_model.layers.0.self_attn.q_proj",
     true},
    {"model.layers.1.self_attn.q_proj", "model.layers.0.self_attn.q_proj", false},
    {"model.layers.1.self_attn.q_proj", "model.layers.11.self_attn.q_proj", false},
    {"mtp.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj", false},
    {"model.embed_tokens", "model.language_model.embed_tokens", true},
    {"lm_head", "language_model.lm_head", true},
    {"model.lm_head", "lm_head", true},
    /* what is no place of the trunk keeps its first word */
    {"model.gate", "model.layers.0.mlp.gate", false},
    {"model.q_proj", "model.layers.0.self_attn.q_proj", false},
};

static void names_and_paths(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sp_name_rule rule = rule_of(&cases[i].name, 1);

        if (matches(&rule, cases[i].path) != cases[i].fits)
            fail_msg("\"%s\" and %s", cases[i].name, cases[i].path);
        sp_name_rule_clear(&rule);
    }
}

/* In any order, one listed twice, one the beginning of another: each path marks what it ends in. */
static void marks(void **state)
{
    static const char *const names[] = {"v_proj",
                                        "q_proj",
                                        "",
                                        "q_proj_x",
                                        "self_attn.q_proj",
                                        "q_proj",
                                        "model.norm",
                                        "q",
                                        "model.layers.2.self_attn.q_proj"};
    static const char path[] = "model.language_model.layers.2.self_attn.q_proj";
    sp_name_rule rule = rule_of(names, 9);
    bool marked[9] = {false};

    (void)state;
    assert_int_equal(rule.n, 9);
    assert_int_equal(rule.n_sorted, 7);
    sp_name_rule_mark(&rule, path, strlen(path), marked);
    for (size_t i = 0; i < 9; i++) {
        size_t index = sp_name_rule_index(&rule, names[i]);
        bool wanted = i == 1 || i == 4 || i == 5 || i == 8;

        if (*names[i] == '\0') {
            assert_int_equal(index, rule.n_sorted);
            continue;
        }
        assert_true(index < rule.n_sorted);
        assert_int_equal(marked[index], wanted);
    }
    assert_int_equal(sp_name_rule_index(&rule, "k_proj"), rule.n_sorted);
    sp_name_rule_clear(&rule);
    rule = rule_of(names, 0);
    assert_false(matches(&rule, path));
    sp_name_rule_clear(&rule);
}

/* Some parts joined by dots; no trunk among them. */
static void some_path(sp_test_random *random, char *out_text, size_t bytes)
{
    static const char *const parts[] = {"a", "b", "ab", "q", "0", "a", "aa"};
    size_t n = 0;

    for (uint32_t left = 1 + sp_test_below(random, 4); left > 0; left--)
        n += (size_t)snprintf(out_text + n, bytes - n, "%s%s", parts[sp_test_below(random, 7)],
                              left > 1 ? "." : "");
}

/* The rule as it is written: equal, or the end of the path behind a dot. */
static bool is_end_of(const char *path, const char *name)
{
    size_t n = strlen(path), length = strlen(name);

    return length > 0 && length <= n && strcmp(path + n - length, name) == 0 &&
           (length == n || path[n - length - 1] == '.');
}

static void as_if_gone_through(void **state)
{
    sp_test_random random = {20261130};
    size_t n_fitting = 0;

    (void)state;
    for (int round = 0; round < 2000; round++) {
        enum { N = 9 };
        char text[N][64], path[64];
        const char *names[N];
        bool marked[N] = {false};
        bool fits = false;
        sp_name_rule rule;

        for (int i = 0; i < N; i++) {
            some_path(&random, text[i], sizeof text[i]);
            names[i] = text[i];
        }
        some_path(&random, path, sizeof path);
        rule = rule_of(names, N);
        sp_name_rule_mark(&rule, path, strlen(path), marked);
        for (int i = 0; i < N; i++) {
            assert_int_equal(marked[sp_name_rule_index(&rule, names[i])],
                             is_end_of(path, names[i]));
            fits |= is_end_of(path, names[i]);
        }
        assert_int_equal(matches(&rule, path), fits);
        n_fitting += fits;
        sp_name_rule_clear(&rule);
    }
    assert_true(n_fitting > 200 && n_fitting < 1990);
}

/* A hundred thousand names against as many paths: a look-up each, not ten thousand million. */
static void many_names(void **state)
{
    enum { N = 100000 };
    static char text[N][40];
    static const char *names[N];
    double start = sp_clock_seconds();
    sp_name_rule rule;

    (void)state;
    for (int i = 0; i < N; i++) {
        snprintf(text[i], sizeof text[i], "layers.%d.mlp.up_proj", (int)(i * 7919LL % N));
        names[i] = text[i];
    }
    rule = rule_of(names, N);
    assert_int_equal(rule.n_sorted, N);
    for (int i = 0; i < 2 * N; i++) {
        char path[60];

        snprintf(path, sizeof path, "model.layers.%d.mlp.up_proj", i);
        assert_int_equal(matches(&rule, path), i < N);
    }
    assert_true(sp_clock_seconds() - start < 20);
    sp_name_rule_clear(&rule);
}

static void allocation_failure(void **state)
{
    const char *names[] = {"q_proj"};
    sp_name_rule rule = {.names = names, .n = 1};
    sp_error error;
    sp_status status;

    (void)state;
    sp_alloc_fail_after(0);
    status = sp_name_rule_sort(&rule, "exclude_modules", &error);
    sp_alloc_fail_after(-1);
    assert_int_equal(status, SP_ERR_MEMORY);
    assert_non_null(strstr(error.text, "exclude_modules"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_and_paths),    cmocka_unit_test(marks),
        cmocka_unit_test(as_if_gone_through), cmocka_unit_test(many_names),
        cmocka_unit_test(allocation_failure),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
