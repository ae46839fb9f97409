/* The text of a saved state: what is read of it, and that nothing else is. */
#include "support/test.h"

#include "server/driver/saved_state.h"

#include <string.h>

#define WHOLE                                                         \
    "{\"state_of_sidepath\": 1, \"active\": \"b\", \"adapters\": [\n" \
    "  {\"name\": \"a\", \"path\": \"x/a-v2\", \"pinned\": false},\n" \
    "  {\"name\": \"b\", \"path\": \"b\", \"pinned\": true}], \"unloaded\": [\"c\", \"d\"]}\n"

static sp_status parse(const char *text, size_t bytes, sp_saved_state *out_state, sp_error *error)
{
    return sp_saved_state_parse(text, bytes, "FILE", out_state, error);
}

static void test_whole(void **state)
{
    sp_saved_state got;
    sp_error error;

    (void)state;
    assert_ok(parse(WHOLE, strlen(WHOLE), &got, &error), &error);
    assert_string_equal(got.active, "b");
    assert_int_equal(got.n_adapters, 2);
    assert_string_equal(got.adapters[0].name, "a");
    assert_string_equal(got.adapters[0].path, "x/a-v2");
    assert_false(got.adapters[0].pinned);
    assert_true(got.adapters[1].pinned);
    assert_int_equal(got.n_unloaded, 2);
    assert_string_equal(got.unloaded[1], "d");
    sp_saved_state_free(&got);
    assert_null(got.adapters);
}

/* An empty file, and one with the least that there can be. */
static void test_least(void **state)
{
    const char least[] = "{\"state_of_sidepath\": 1, \"adapters\": []}";
    sp_saved_state got;
    sp_error error;

    (void)state;
    assert_ok(parse("", 0, &got, &error), &error);
    assert_int_equal(got.n_adapters + got.n_unloaded, 0);
    assert_ok(parse(least, strlen(least), &got, &error), &error);
    assert_null(got.active);
    sp_saved_state_free(&got);
}

static void assert_invalid(const char *text, size_t bytes)
{
    sp_saved_state got;
    sp_error error;

    assert_int_equal(parse(text, bytes, &got, &error), SP_ERR_INPUT);
    assert_string_equal(error.code, SP_CODE_STATE_FILE);
    assert_non_null(strstr(error.text, "FILE"));
    assert_null(got.adapters);
    assert_null(got.unloaded);
    assert_null(got.active);
}

/* A part of a state is never taken for one. */
static void test_cut_at_every_byte(void **state)
{
    (void)state;
    for (size_t n = 1; n < strlen(WHOLE) - 1; n++)
        assert_invalid(WHOLE, n);
}

static void test_foreign(void **state)
{
    static const char *const texts[] = {
        "null",
        "[1]",
        "{\"state_of_sidepath\": \"1\", \"adapters\": []}",
        "{\"state_of_sidepath\": 0, \"adapters\": []}",
        "{\"state_of_sidepath\": 1, \"adapters\": {}}",
        "{\"state_of_sidepath\": 1, \"state_of_sidepath\": 1, \"adapters\": []}",
        "{\"state_of_sidepath\": 1, \"adapters\": [\"a\"]}",
        "{\"state_of_sidepath\": 1, \"adapters\": [{\"name\": \"a\"}]}",
        "{\"state_of_sidepath\":1, \"adapters\":[{\"name\":\"a\", \"path\":\"a\", \"pinned\":1}]}",
        "{\"state_of_sidepath\": 1, \"adapters\": [], \"active\": []}",
        "{\"state_of_sidepath\": 1, \"adapters\": [], \"unloaded\": {}}",
        "{\"state_of_sidepath\": 1, \"adapters\": [], \"unloaded\": [\"a\", 2]}",
    };

    (void)state;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        assert_invalid(texts[i], strlen(texts[i]));
}

/* What could not be restored is written on, by what was saved, and nothing else of before. */
static void test_missing(void **state)
{
    char *unloaded[] = {(char *)(uintptr_t) "e"};
    sp_saved_state got, again;
    sp_text text = {0};
    sp_error error;

    (void)state;
    assert_ok(parse(WHOLE, strlen(WHOLE), &got, &error), &error);
    assert_null(sp_saved_state_missing(&got, "b"));
    assert_null(sp_saved_state_missing(NULL, "b"));
    got.adapters[1].missing = true;
    got.active_missing = true;
    assert_ptr_equal(sp_saved_state_missing(&got, "b"), &got.adapters[1]);
    sp_saved_state_write(NULL, &got, unloaded, 1, &text);
    assert_ok(parse(text.data, text.bytes, &again, &error), &error);
    assert_int_equal(again.n_adapters, 1);
    assert_string_equal(again.adapters[0].name, "b");
    assert_string_equal(again.adapters[0].path, "b");
    assert_true(again.adapters[0].pinned);
    assert_string_equal(again.active, "b");
    assert_int_equal(again.n_unloaded, 1);
    assert_string_equal(again.unloaded[0], "e");
    sp_saved_state_free(&again);
    got.active_missing = false;
    sp_text_clear(&text);
    sp_saved_state_write(NULL, &got, NULL, 0, &text);
    assert_ok(parse(text.data, text.bytes, &again, &error), &error);
    assert_null(again.active);
    sp_saved_state_free(&again);
    sp_saved_state_free(&got);
    sp_text_free(&text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole),
        cmocka_unit_test(test_least),
        cmocka_unit_test(test_cut_at_every_byte),
        cmocka_unit_test(test_foreign),
        cmocka_unit_test(test_missing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
