/* json: what the strict reader refuses and where, and the typed getters. */
#include "base/alloc.h"
#include "base/json.h"

#include "support/test.h"

#include <stdlib.h>
#include <string.h>

/* Parses text that must be refused; returns the byte behind the token that is wrong. */
static int64_t refused_at(const char *bytes, size_t n_bytes, bool want_duplicate, const char *word)
{
    json_t *root = (json_t *)&root;
    json_t *untouched = root;
    bool duplicate = !want_duplicate;
    sp_error error;

    assert_int_equal(
        sp_json_parse(bytes, n_bytes, "some file", "config-malformed", &duplicate, &root, &error),
        SP_ERR_INPUT);
    assert_ptr_equal(root, untouched);
    assert_int_equal(duplicate, want_duplicate);
    assert_string_equal(error.code, "config-malformed");
    assert_string_equal(error.subject, "some file");
    assert_true(strncmp(error.text, "some file: ", 11) == 0);
    if (!strstr(error.text, word))
        fail_msg("\"%s\" does not say \"%s\"", error.text, word);
    return error.position;
}

static void refuses_with_a_position(void **state)
{
    /* The position is that of the byte behind the wrong token, counted by hand. */
    static const struct {
        const char *text;
        int position;
        const char *word;
    } table[] = {
        {"", 0, "end of file"},
        {"nul", 3, "invalid token"},
        {"{} x", 4, "end of file expected"},
        {"{}{}", 3, "end of file expected"},
        {" \n\n  x", 6, "line 3"},
        {"[1 2]", 4, "']' expected"},
        {"[1,]", 4, "unexpected token"},
        {"{\"a\"", 4, "':' expected"},
        {"{'a':1}", 2, "string or '}' expected"},
        {"\xef\xbb\xbf{}", 3, "invalid token"}, /* a byte order mark */
        {"{\"a\":01}", 6, "invalid token"},
        {"[9223372036854775808]", 20, "too big integer"},
        {"[1e400]", 6, "overflow"},
        {"[NaN]", 4, "invalid token"},
        {"\"\\ud800\"", 8, "invalid Unicode"}, /* half of a surrogate pair */
        {"\"a\nb\"", 2, "newline"},
        {"\"a\x01\"", 2, "control character"},
        {"{\"a\":\"x\\u0000y\"}", 15, "\\u0000"},
        {"{\"\\u0000\":1}", 9, "NUL"},
        /* not UTF-8: a stray byte, an overlong slash, a surrogate, beyond U+10FFFF */
        {"\"\xff\"", 1, "0xff"},
        {"\"\xc0\xaf\"", 1, "0xc0"},
        {"\"\xed\xa0\x80\"", 1, "0xed"},
        {"\"\xf4\x90\x80\x80\"", 1, "0xf4"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        const char *text = table[i].text;

        assert_int_equal(refused_at(text, strlen(text), false, table[i].word), table[i].position);
    }
}

static void refuses_raw_nul(void **state)
{
    (void)state;
    assert_int_equal(refused_at("[\"a\0b\"]", 7, false, "control character"), 3);
    assert_int_equal(refused_at("[1]\0", 4, false, "end of file expected"), 4);
}

static void tells_duplicates_apart(void **state)
{
    static const char inner[] = "{\"b\":{\"a\":1,\"a\":2}}";
    static const char escaped[] = "{\"a\":1,\"\\u0061\":2}";

    (void)state;
    assert_int_equal(refused_at("{\"a\":1,\"a\":1}", 13, true, "duplicate"), 10);
    assert_int_equal(refused_at(inner, sizeof inner - 1, true, "duplicate"), 15);
    assert_int_equal(refused_at(escaped, sizeof escaped - 1, true, "duplicate"), 15);
}

static void deep_nesting_is_refused(void **state)
{
    static char deep[100000];

    (void)state;
    memset(deep, '[', sizeof deep);
    assert_int_equal(refused_at(deep, sizeof deep, false, "maximum parsing depth"), 2049);
}

static void reads_any_top_level(void **state)
{
    static const char text[] = " {\"n\": 9007199254740993, \"s\": \"\xe2\x82\xac\"} ";
    json_t *root;
    sp_error error;

    (void)state;
    assert_ok(sp_json_parse("3", 1, "x", NULL, NULL, &root, &error), &error);
    assert_int_equal(json_integer_value(root), 3);
    json_decref(root);
    assert_ok(sp_json_parse(text, sizeof text - 1, "x", NULL, NULL, &root, &error), &error);
    /* 2^53 + 1 would not survive a double. */
    assert_int_equal(json_integer_value(json_object_get(root, "n")), 9007199254740993);
    assert_string_equal(json_string_value(json_object_get(root, "s")), "\xe2\x82\xac");
    json_decref(root);
    assert_int_equal(sp_json_parse("x", 1, "x", NULL, NULL, &root, NULL), SP_ERR_INPUT);
}

static void reads_objects_from_files(void **state)
{
    char *directory = sp_test_make_directory();
    char path[4096];
    json_t *root = NULL;
    size_t blocks = sp_alloc_blocks();
    sp_error error;

    (void)state;
    snprintf(path, sizeof path, "%s/config.json", directory);
    assert_int_equal(sp_json_read_object(path, 100, "c", &root, &error), SP_ERR_NOT_FOUND);
    sp_test_write_file(directory, "config.json", "{\"a\": 1}", 8);
    assert_ok(sp_json_read_object(path, 8, "c", &root, &error), &error);
    assert_int_equal(json_integer_value(json_object_get(root, "a")), 1);
    json_decref(root);
    root = NULL;
    assert_int_equal(sp_json_read_object(path, 7, "c", &root, &error), SP_ERR_TOO_LARGE);
    sp_test_write_file(directory, "config.json", "[1]", 3);
    assert_int_equal(sp_json_read_object(path, 100, "c", &root, &error), SP_ERR_INPUT);
    assert_string_equal(error.code, "c");
    assert_string_equal(error.subject, path);
    assert_non_null(strstr(error.text, "not an object"));
    sp_test_write_file(directory, "config.json", "{\"a\"", 4);
    assert_int_equal(sp_json_read_object(path, 100, "c", &root, &error), SP_ERR_INPUT);
    assert_int_equal(error.position, 4);
    assert_null(root);
    assert_int_equal(sp_alloc_blocks(), blocks);
    sp_test_remove_tree(directory);
    sp_free(directory);
}

/* ---- getters ------------------------------------------------------------------------------- */

static json_t *object;

static int make_object(void **state)
{
    static const char text[] = "{\"int\": -7, \"large\": 9223372036854775807, \"real\": 1.5,"
                               " \"true\": true, \"false\": false, \"string\": \"text\","
                               " \"empty\": \"\", \"null\": null, \"list\": []}";

    (void)state;
    return sp_json_parse(text, sizeof text - 1, "object", NULL, NULL, &object, NULL);
}

static int drop_object(void **state)
{
    (void)state;
    json_decref(object);
    return 0;
}

static int64_t int_of(const char *field, int64_t minimum, int64_t maximum)
{
    int64_t value = 99;
    sp_error error;

    assert_ok(sp_json_int(object, field, true, minimum, maximum, 0, "c", &value, &error), &error);
    return value;
}

static void check_int_refused(const char *field, bool required, int64_t minimum, int64_t maximum,
                              const char *text)
{
    int64_t value = 99;
    sp_error error;

    assert_int_equal(sp_json_int(object, field, required, minimum, maximum, 0, "c", &value, &error),
                     SP_ERR_INPUT);
    assert_int_equal(value, 99);
    assert_string_equal(error.code, "c");
    assert_string_equal(error.subject, field);
    assert_string_equal(error.text, text);
}

static void gets_integers(void **state)
{
    int64_t value = 99;

    (void)state;
    assert_int_equal(int_of("int", -7, -7), -7);
    assert_int_equal(int_of("large", 0, INT64_MAX), INT64_MAX);
    check_int_refused("int", false, -6, 5, "field \"int\" is -7; it must be from -6 to 5");
    check_int_refused("int", false, -9, -8, "field \"int\" is -7; it must be from -9 to -8");
    check_int_refused("real", false, 0, 5, "field \"real\" is not an integer");
    check_int_refused("true", true, 0, 5, "field \"true\" is not an integer");
    check_int_refused("string", true, 0, 5, "field \"string\" is not an integer");
    check_int_refused("absent", true, 0, 5, "field \"absent\" is missing");
    check_int_refused("null", true, 0, 5, "field \"null\" is missing");
    /* The default is taken as it is, in the range or not. */
    assert_int_equal(sp_json_int(object, "absent", false, 0, 5, -3, "c", &value, NULL), SP_OK);
    assert_int_equal(value, -3);
    assert_int_equal(sp_json_int(object, "null", false, 0, 5, 4, "c", &value, NULL), SP_OK);
    assert_int_equal(value, 4);
}

static void gets_doubles(void **state)
{
    double value = 99;
    sp_error error;

    (void)state;
    assert_ok(sp_json_double(object, "real", true, 0, "c", &value, &error), &error);
    assert_true(value == 1.5);
    assert_ok(sp_json_double(object, "int", true, 0, "c", &value, &error), &error);
    assert_true(value == -7);
    assert_ok(sp_json_double(object, "absent", false, 0.25, "c", &value, &error), &error);
    assert_true(value == 0.25);
    assert_int_equal(sp_json_double(object, "string", false, 0, "c", &value, &error), SP_ERR_INPUT);
    assert_string_equal(error.text, "field \"string\" is not a number");
    assert_int_equal(sp_json_double(object, "absent", true, 0, "c", &value, &error), SP_ERR_INPUT);
    assert_string_equal(error.text, "field \"absent\" is missing");
    assert_true(value == 0.25);
}

static void gets_booleans(void **state)
{
    bool value = false;
    sp_error error;

    (void)state;
    assert_ok(sp_json_bool(object, "true", true, false, "c", &value, &error), &error);
    assert_true(value);
    assert_ok(sp_json_bool(object, "false", true, true, "c", &value, &error), &error);
    assert_false(value);
    assert_ok(sp_json_bool(object, "null", false, true, "c", &value, &error), &error);
    assert_true(value);
    assert_int_equal(sp_json_bool(object, "int", false, false, "c", &value, &error), SP_ERR_INPUT);
    assert_string_equal(error.text, "field \"int\" is not true or false");
    assert_int_equal(sp_json_bool(object, "null", true, false, "c", &value, &error), SP_ERR_INPUT);
    assert_string_equal(error.text, "field \"null\" is missing");
    assert_true(value);
}

static void gets_strings(void **state)
{
    const char *value = "untouched";
    sp_error error;

    (void)state;
    assert_ok(sp_json_string(object, "string", true, "c", &value, &error), &error);
    assert_string_equal(value, "text");
    assert_ok(sp_json_string(object, "empty", true, "c", &value, &error), &error);
    assert_string_equal(value, "");
    assert_int_equal(sp_json_string(object, "list", true, "c", &value, &error), SP_ERR_INPUT);
    assert_string_equal(error.text, "field \"list\" is not a string");
    assert_int_equal(sp_json_string(object, "absent", true, "c", &value, &error), SP_ERR_INPUT);
    assert_string_equal(value, "");
    assert_ok(sp_json_string(object, "absent", false, "c", &value, &error), &error);
    assert_null(value);
}

/* ---- memory -------------------------------------------------------------------------------- */

/* Fails each allocation of one parse in turn, jansson's own included. */
static void memory_may_run_out(void **state)
{
    static const char text[] = "{\"a\": [1, 2.5, \"some text that is long\", null], "
                               "\"b\": {\"c, another long name\": true}}";
    size_t blocks = sp_alloc_blocks();
    sp_status status = SP_ERR_MEMORY;
    int n;

    (void)state;
    sp_json_own_memory(true);
    for (n = 0; status != SP_OK && n < 1000; n++) {
        json_t *root = NULL;
        sp_error error;

        sp_alloc_fail_after(n);
        status = sp_json_parse(text, sizeof text - 1, "x", NULL, NULL, &root, &error);
        assert_int_equal(status, sp_alloc_failed() ? SP_ERR_MEMORY : SP_OK);
        assert_int_equal(root != NULL, status == SP_OK);
        json_decref(root);
        assert_int_equal(sp_alloc_blocks(), blocks);
    }
    sp_alloc_fail_after(-1);
    sp_json_own_memory(false);
    assert_int_equal(status, SP_OK);
    assert_in_range(n, 15, 100);
}

#define TEST_GETTER(name) cmocka_unit_test_setup_teardown(name, make_object, drop_object)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refuses_with_a_position),
        cmocka_unit_test(refuses_raw_nul),
        cmocka_unit_test(tells_duplicates_apart),
        cmocka_unit_test(deep_nesting_is_refused),
        cmocka_unit_test(reads_any_top_level),
        cmocka_unit_test(reads_objects_from_files),
        TEST_GETTER(gets_integers),
        TEST_GETTER(gets_doubles),
        TEST_GETTER(gets_booleans),
        TEST_GETTER(gets_strings),
        cmocka_unit_test(memory_may_run_out),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
