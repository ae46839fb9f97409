/*
 * A setting is one row: a flag that two verbs have has the same value, help, default and variable
 * in both, and none has it twice. The measurements' own (how many rounds, rows and steps) are named
 * alike and are each verb's own, and so is the port that a verb listens on.
 */
#include "support/shell.h"
#include "support/test.h"

#include "base/alloc.h"

#include <stdio.h>
#include <string.h>

#define FLAGS_MAX 512

/* Help of one flag, cut out of the help of a verb. */
typedef struct flag_help {
    const char *verb;
    char name[64];
    char *text; /* owned */
} flag_help;

typedef struct flag_list {
    flag_help flags[FLAGS_MAX];
    size_t n;
} flag_list;

static bool is_own(const char *name)
{
    static const char *const own[] = {"rounds", "rows", "steps", "port"};

    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        if (strcmp(name, own[i]) == 0)
            return true;
    return false;
}

/* "  --[no-]name VALUE   help": from there to the next flag. */
static const char *take_flag(flag_list *list, const char *verb, const char *at)
{
    const char *name = at + strlen("\n  --");
    const char *end = strstr(name, "\n  --");
    flag_help *flag = &list->flags[list->n++];

    assert_true(list->n <= FLAGS_MAX);
    name += strncmp(name, "[no-]", 5) == 0 ? 5 : 0;
    flag->verb = verb;
    snprintf(flag->name, sizeof flag->name, "%.*s", (int)strcspn(name, " "), name);
    flag->text = sp_strndup(at, end ? (size_t)(end - at) : strlen(at));
    assert_non_null(flag->text);
    return end;
}

/* inspect takes a model from the command line alone: it has no variable there. */
static bool same_help(const flag_help *a, const flag_help *b)
{
    size_t bytes = strcspn(a->text, "(");

    if (strcmp(a->text, b->text) == 0)
        return true;
    if (strcmp(a->verb, "inspect") == 0)
        return same_help(b, a);
    return strcmp(a->name, "model") == 0 && strcmp(b->verb, "inspect") == 0 &&
           strlen(b->text) == bytes - 1 && strncmp(a->text, b->text, bytes - 1) == 0;
}

static void read_help(flag_list *list, const char *verb)
{
    shell_result result = shell_run(NULL, "%s --help", verb);
    size_t first = list->n;

    assert_int_equal(result.exit_code, 0);
    result.out.data[result.out.bytes - 1] = '\0'; /* the last new line */
    for (const char *at = strstr(result.out.data, "\n  --"); at;)
        at = take_flag(list, verb, at);
    if (list->n < first + 5)
        fail_msg("%s has %zu flags", verb, list->n - first);
    shell_free(&result);
}

static void test_one_row_each(void **state)
{
    static const char *const verbs[] = {
        "generate",         "logits",     "serve",       "inspect",
        "bench load",       "bench step", "bench delta", "bench speculative",
        "bench structured", "bench swap", "peer"};
    flag_list list = {.n = 0};
    size_t n_shared = 0;

    (void)state;
    for (size_t i = 0; i < sizeof verbs / sizeof *verbs; i++)
        read_help(&list, verbs[i]);
    for (size_t i = 0; i < list.n; i++)
        for (size_t k = i + 1; k < list.n; k++) {
            const flag_help *a = &list.flags[i], *b = &list.flags[k];

            if (strcmp(a->name, b->name) != 0)
                continue;
            if (a->verb == b->verb)
                fail_msg("%s has --%s twice", a->verb, a->name);
            if (!is_own(a->name) && !same_help(a, b))
                fail_msg("%s and %s differ in%s and%s", a->verb, b->verb, a->text, b->text);
            n_shared++;
        }
    if (n_shared < 100)
        fail_msg("only %zu pairs", n_shared);
    for (size_t i = 0; i < list.n; i++)
        sp_free(list.flags[i].text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_one_row_each)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
