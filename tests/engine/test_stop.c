/* Stop strings: by hand, and against a search through the whole text at every cut. */
#include "support/test.h"

#include "base/alloc.h"
#include "base/text.h"
#include "engine/sampling/stop.h"

#include <string.h>

static sp_stop *watch(const char *const *strings, size_t n)
{
    size_t bytes[SP_STOP_STRINGS_MAX];
    sp_stop *stop = NULL;
    sp_error error;

    for (size_t i = 0; i < n; i++)
        bytes[i] = strlen(strings[i]);
    assert_ok(sp_stop_create(strings, bytes, n, &stop, &error), &error);
    return stop;
}
#define WATCH(...)                       \
    watch((const char *[]){__VA_ARGS__}, \
          sizeof((const char *[]){__VA_ARGS__}) / sizeof(const char *))

static void push(sp_stop *stop, const char *part, bool want_found, size_t want_shown)
{
    size_t shown = 999;

    assert_int_equal(sp_stop_push(stop, part, strlen(part), &shown), want_found);
    assert_int_equal(shown, want_shown);
}

static void test_by_hand(void **state)
{
    sp_stop *stop = WATCH("END");

    (void)state;
    push(stop, "the ", false, 4);
    push(stop, "E", false, 4); /* could begin END */
    push(stop, "N", false, 4);
    push(stop, "E", false, 6); /* ENE: only the last E still can */
    push(stop, "ND!", true, 6);
    push(stop, "more", true, 6);
    sp_stop_destroy(stop);

    stop = WATCH("\n\n");
    push(stop, "a\n", false, 1);
    push(stop, "b\n", false, 3);
    push(stop, "", false, 3);
    push(stop, "\nc", true, 3);
    sp_stop_destroy(stop);
}

static void test_overlaps(void **state)
{
    sp_stop *stop = WATCH("abcd", "bc");

    (void)state;
    push(stop, "xab", false, 1);
    push(stop, "cd", true, 2); /* "bc" is complete first, whatever the parts */
    sp_stop_destroy(stop);

    stop = WATCH("abcd", "bc");
    push(stop, "xabcd", true, 2);
    sp_stop_destroy(stop);

    stop = WATCH("bc", "abc"); /* complete at the same byte: the longest */
    push(stop, "xabc", true, 1);
    sp_stop_destroy(stop);

    stop = WATCH("aab");
    push(stop, "aaaa", false, 2);
    push(stop, "b", true, 2);
    sp_stop_destroy(stop);

    stop = WATCH("abab!"); /* falls back to a shorter beginning, not to nothing */
    push(stop, "ababab", false, 2);
    push(stop, "!", true, 2);
    sp_stop_destroy(stop);

    stop = WATCH("same", "same");
    push(stop, "the same", true, 4);
    sp_stop_destroy(stop);
}

static void test_utf8(void **state)
{
    /* U+4E2D U+6587 and U+4E2D U+56FD begin with the same character, and share bytes. */
    sp_stop *stop = WATCH("\xe4\xb8\xad\xe6\x96\x87");

    (void)state;
    push(stop, "x\xe4\xb8\xad", false, 1);
    push(stop, "\xe5\x9b\xbd", false, 7);
    push(stop, "\xe4\xb8\xad", false, 7);
    push(stop, "\xe6\x96\x87", true, 7);
    sp_stop_destroy(stop);
}

static void test_nothing_to_watch(void **state)
{
    sp_stop *stop = NULL;
    sp_error error;

    (void)state;
    assert_ok(sp_stop_create(NULL, NULL, 0, &stop, &error), &error);
    push(stop, "anything", false, 8);
    push(stop, "", false, 8);
    sp_stop_destroy(stop);
    sp_stop_destroy(NULL);
}

static void test_refused(void **state)
{
    const char *strings[SP_STOP_STRINGS_MAX + 1];
    size_t bytes[SP_STOP_STRINGS_MAX + 1];
    sp_stop *stop = NULL;
    sp_error error;

    (void)state;
    for (size_t i = 0; i <= SP_STOP_STRINGS_MAX; i++) {
        strings[i] = "x";
        bytes[i] = 1;
    }
    assert_int_equal(sp_stop_create(strings, bytes, SP_STOP_STRINGS_MAX + 1, &stop, &error),
                     SP_ERR_INPUT);
    bytes[3] = 0;
    assert_int_equal(sp_stop_create(strings, bytes, 5, &stop, &error), SP_ERR_INPUT);
    assert_string_equal(error.subject, "stop");
    assert_int_equal(error.position, 3);
    assert_null(stop);
    bytes[3] = 1;
    sp_alloc_fail_after(0);
    assert_int_equal(sp_stop_create(strings, bytes, 5, &stop, &error), SP_ERR_MEMORY);
    sp_alloc_fail_after(-1);
    assert_null(stop);
}

/* The rule, looked up in the whole text so far: true and the place of the first complete string,
 * else what no string can reach back to. */
static bool search(const char *text, size_t bytes, const char *const *strings, size_t n,
                   size_t *out_shown)
{
    for (size_t end = 1; end <= bytes; end++) {
        size_t longest = 0;

        for (size_t i = 0; i < n; i++) {
            size_t length = strlen(strings[i]);

            if (length <= end && length > longest &&
                memcmp(text + end - length, strings[i], length) == 0)
                longest = length;
        }
        if (longest) {
            *out_shown = end - longest;
            return true;
        }
    }
    for (size_t from = 0; from <= bytes; from++)
        for (size_t i = 0; i < n; i++)
            if (from == bytes || (strlen(strings[i]) > bytes - from &&
                                  memcmp(text + from, strings[i], bytes - from) == 0)) {
                *out_shown = from;
                return false;
            }
    return false;
}

static void test_random_against_search(void **state)
{
    sp_test_random random = {5};
    int n_found = 0;

    (void)state;
    for (int round = 0; round < 20000; round++) {
        char text[41], words[3][8];
        const char *strings[3] = {words[0], words[1], words[2]};
        size_t n = 1 + sp_test_below(&random, 3), at = 0, before = 0;
        sp_stop *stop;

        for (size_t i = 0; i < n; i++) {
            size_t length = 2 + sp_test_below(&random, 5);

            for (size_t j = 0; j < length; j++)
                words[i][j] = "ab"[sp_test_below(&random, 2)];
            words[i][length] = '\0';
        }
        for (size_t i = 0; i < 40; i++)
            text[i] = "abbbaac"[sp_test_below(&random, 7)];
        stop = watch(strings, n);
        while (at < 40) {
            size_t part = sp_test_below(&random, 5), shown, want_shown = 0;
            bool want;

            part = part > 40 - at ? 40 - at : part;
            want = search(text, at + part, strings, n, &want_shown);
            assert_int_equal(sp_stop_push(stop, text + at, part, &shown), want);
            assert_int_equal(shown, want_shown);
            assert_true(shown >= before);
            before = shown;
            at += part;
            n_found += want && at == 40;
        }
        sp_stop_destroy(stop);
    }
    assert_true(n_found > 5000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_by_hand), cmocka_unit_test(test_overlaps),
        cmocka_unit_test(test_utf8),    cmocka_unit_test(test_nothing_to_watch),
        cmocka_unit_test(test_refused), cmocka_unit_test(test_random_against_search),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
