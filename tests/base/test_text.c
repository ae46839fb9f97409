/* text: growing, JSON output against a reader of JSON, UTF-8 against the standard's table. */
#include "base/alloc.h"
#include "base/json.h"
#include "base/text.h"

#include "support/test.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static void grows(void **state)
{
    sp_text text = {0};
    char want[5001];

    (void)state;
    assert_null(text.data);
    sp_text_add(&text, "");
    assert_string_equal(text.data, "");
    for (size_t i = 0; i < 500; i++) {
        sp_text_add(&text, "abc");
        sp_text_add_bytes(&text, "de", 2);
        sp_text_format(&text, "%s%d%%%c", "f", 42, 'g');
        memcpy(want + 10 * i, "abcdef42%g", 10);
    }
    assert_int_equal(text.bytes, 5000);
    want[5000] = '\0';
    assert_string_equal(text.data, want);
    assert_false(text.failed);
    sp_text_clear(&text);
    assert_int_equal(text.bytes, 0);
    assert_string_equal(text.data, "");
    sp_text_add_bytes(&text, "a\0b", 3);
    assert_int_equal(text.bytes, 3);
    assert_memory_equal(text.data, "a\0b\0", 4);
    sp_text_free(&text);
    assert_null(text.data);
    assert_int_equal(text.bytes + text.capacity, 0);
    sp_text_free(&text);
}

/* The size at which a buffer doubles is where an off-by-one would be. */
static void grows_at_every_size(void **state)
{
    char data[300];

    (void)state;
    memset(data, 'x', sizeof data);
    for (size_t first = 0; first < 140; first++) {
        sp_text text = {0};

        sp_text_add_bytes(&text, data, first);
        sp_text_format(&text, "%s", "1234567");
        assert_int_equal(text.bytes, first + 7);
        assert_string_equal(text.data + first, "1234567");
        sp_text_free(&text);
    }
}

static void a_failure_is_remembered(void **state)
{
    sp_text text = {0};
    size_t blocks = sp_alloc_blocks();
    char data[100] = {0};

    (void)state;
    sp_text_add(&text, "kept");
    sp_alloc_fail_after(0);
    sp_text_add_bytes(&text, data, sizeof data);
    assert_true(text.failed);
    assert_string_equal(text.data, "kept");
    sp_text_add(&text, "more"); /* nothing is added after a failure, so that no gap stays unseen */
    sp_text_format(&text, "%d", 1);
    sp_text_json_string(&text, "a", 1);
    assert_string_equal(text.data, "kept");
    assert_true(text.failed);
    sp_text_clear(&text);
    assert_false(text.failed);
    sp_text_add(&text, "again");
    assert_string_equal(text.data, "again");
    sp_text_free(&text);
    assert_int_equal(sp_alloc_blocks(), blocks);
}

static void check_json_string(const char *in, size_t bytes, const char *want)
{
    sp_text text = {0};

    sp_text_json_string(&text, in, bytes);
    assert_string_equal(text.data, want);
    sp_text_free(&text);
}

static void escapes_as_json_says(void **state)
{
    (void)state;
    check_json_string("", 0, "\"\"");
    check_json_string("a\"b\\c/", 6, "\"a\\\"b\\\\c/\"");
    check_json_string("\n\r\t", 3, "\"\\n\\r\\t\"");
    check_json_string("\b\f\0\x1f\x7f", 5, "\"\\u0008\\u000c\\u0000\\u001f\\u007f\"");
    check_json_string("\xe2\x82\xac\xf0\x9f\x98\x80", 7, "\"\xe2\x82\xac\xf0\x9f\x98\x80\"");
    /* each byte that is in no sequence becomes U+FFFD */
    check_json_string("a\xff\x62", 3, "\"a\xef\xbf\xbd\x62\"");
    check_json_string("\xe2\x82", 2, "\"\xef\xbf\xbd\xef\xbf\xbd\"");
    check_json_string("\xc0\xaf", 2, "\"\xef\xbf\xbd\xef\xbf\xbd\"");
}

static json_t *read_back(const sp_text *text)
{
    json_t *value;
    json_error_t problem;

    assert_false(text->failed);
    value = json_loadb(text->data, text->bytes, JSON_DECODE_ANY | JSON_ALLOW_NUL, &problem);
    if (!value)
        fail_msg("%s: %s", text->data, problem.text);
    return value;
}

static void a_reader_gets_the_bytes_back(void **state)
{
    static const uint32_t ranges[][2] = {{0, 0x80},         {0, 0x800},          {0x800, 0xd800},
                                         {0xe000, 0x10000}, {0x10000, 0x110000}, {0, 0x20}};
    sp_test_random random = {1};

    (void)state;
    for (int round = 0; round < 2000; round++) {
        sp_text in = {0}, out = {0};
        json_t *value;

        for (int i = 0; i < 20; i++) {
            const uint32_t *range = ranges[sp_test_below(&random, 6)];
            uint32_t c = range[0] + sp_test_below(&random, range[1] - range[0]);
            char bytes[4] = {(char)c, (char)(0x80 | (c & 0x3f)), (char)(0x80 | (c & 0x3f)),
                             (char)(0x80 | (c & 0x3f))};
            size_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;

            if (n == 2)
                bytes[0] = (char)(0xc0 | c >> 6);
            if (n >= 3)
                bytes[n - 2] = (char)(0x80 | (c >> 6 & 0x3f));
            if (n == 3)
                bytes[0] = (char)(0xe0 | c >> 12);
            if (n == 4)
                bytes[0] = (char)(0xf0 | c >> 18), bytes[1] = (char)(0x80 | (c >> 12 & 0x3f));
            sp_text_add_bytes(&in, bytes, n);
        }
        assert_true(sp_utf8_valid(in.data, in.bytes));
        sp_text_json_string(&out, in.data, in.bytes);
        value = read_back(&out);
        assert_int_equal(json_string_length(value), in.bytes);
        assert_memory_equal(json_string_value(value), in.data, in.bytes);
        json_decref(value);
        sp_text_free(&in);
        sp_text_free(&out);
    }
}

static void any_bytes_give_valid_json(void **state)
{
    sp_test_random random = {2};

    (void)state;
    for (int round = 0; round < 2000; round++) {
        char bytes[16];
        sp_text text = {0};

        for (size_t i = 0; i < sizeof bytes; i++)
            bytes[i] = (char)(sp_test_below(&random, 4) ? 0x80 + sp_test_below(&random, 0x80)
                                                        : sp_test_below(&random, 0x80));
        sp_text_json_string(&text, bytes, sizeof bytes);
        json_decref(read_back(&text));
        sp_text_free(&text);
    }
}

static void check_double(double value)
{
    sp_text text = {0};
    json_t *number;

    sp_text_json_double(&text, value);
    number = read_back(&text);
    assert_true(json_is_number(number));
    assert_true(json_number_value(number) == value);
    json_decref(number);
    sp_text_free(&text);
}

static void doubles_read_back(void **state)
{
    static const double values[] = {0,       1,       -1,       0.1,          1.0 / 3, 1e20,
                                    1e-300,  DBL_MAX, -DBL_MAX, DBL_MIN,      5e-324,  123456789,
                                    1e6 + 1, 1e15,    0.25e-6,  1.7976931e308};
    sp_test_random random = {3};

    (void)state;
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        check_double(values[i]);
    for (int i = 0; i < 20000; i++) {
        uint64_t bits = sp_test_next(&random);
        double value;

        memcpy(&value, &bits, sizeof value);
        if (isfinite(value))
            check_double(value);
    }
}

static void doubles_are_short_and_never_words(void **state)
{
    static const struct {
        double value;
        const char *text;
    } table[] = {{0, "0"},           {1, "1"},           {0.1, "0.1"},         {-2.5, "-2.5"},
                 {1e20, "1e+20"},    {123456, "123456"}, {1234567, "1234567"}, {NAN, "null"},
                 {INFINITY, "null"}, {-INFINITY, "null"}};

    (void)state;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        sp_text text = {0};

        sp_text_json_double(&text, table[i].value);
        assert_string_equal(text.data, table[i].text);
        sp_text_free(&text);
    }
}

/* ---- UTF-8 --------------------------------------------------------------------------------- */

/*
 * Table 3-7 of the Unicode Standard, "Well-Formed UTF-8 Byte Sequences", as it is printed: rows of
 * ranges for each byte.
 */
static const struct {
    int n;
    unsigned char range[4][2];
} well_formed[] = {
    {1, {{0x00, 0x7f}}},
    {2, {{0xc2, 0xdf}, {0x80, 0xbf}}},
    {3, {{0xe0, 0xe0}, {0xa0, 0xbf}, {0x80, 0xbf}}},
    {3, {{0xe1, 0xec}, {0x80, 0xbf}, {0x80, 0xbf}}},
    {3, {{0xed, 0xed}, {0x80, 0x9f}, {0x80, 0xbf}}},
    {3, {{0xee, 0xef}, {0x80, 0xbf}, {0x80, 0xbf}}},
    {4, {{0xf0, 0xf0}, {0x90, 0xbf}, {0x80, 0xbf}, {0x80, 0xbf}}},
    {4, {{0xf1, 0xf3}, {0x80, 0xbf}, {0x80, 0xbf}, {0x80, 0xbf}}},
    {4, {{0xf4, 0xf4}, {0x80, 0x8f}, {0x80, 0xbf}, {0x80, 0xbf}}},
};

/* How many bytes of a row of the table `data` follows; -1 in *out_length for no row. */
static int follows_table(const unsigned char *data, int bytes, int *out_length)
{
    int best = 0;

    *out_length = -1;
    for (size_t row = 0; row < sizeof well_formed / sizeof *well_formed; row++) {
        int n = 0;

        while (n < bytes && n < well_formed[row].n && data[n] >= well_formed[row].range[n][0] &&
               data[n] <= well_formed[row].range[n][1])
            n++;
        if (n > best) {
            best = n;
            *out_length = well_formed[row].n;
        }
    }
    return best;
}

/* One sequence: valid, its length, and how much of it is held back, all from the table. */
static void check_sequence(const unsigned char *data, int bytes)
{
    const char *text = (const char *)data;
    int length;
    int n = follows_table(data, bytes, &length);
    bool whole = n > 0 && n == length;
    bool begun = n > 0 && n < length && n == bytes;

    assert_int_equal(sp_utf8_sequence_bytes(text, (size_t)bytes), whole ? length : 0);
    if (whole && n == bytes) {
        assert_true(sp_utf8_valid(text, (size_t)bytes));
        assert_int_equal(sp_utf8_complete_bytes(text, (size_t)bytes), bytes);
    }
    if (!whole)
        assert_false(sp_utf8_valid(text, (size_t)bytes));
    if (begun)
        assert_int_equal(sp_utf8_complete_bytes(text, (size_t)bytes), 0);
}

/* Every pair and triple of bytes near the table's borders, and quadruples of the four-byte rows. */
static void utf8_follows_the_standard(void **state)
{
    static const unsigned char edges[] = {0x00, 0x41, 0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf,
                                          0xc0, 0xc1, 0xc2, 0xdf, 0xe0, 0xe1, 0xec, 0xed, 0xee,
                                          0xef, 0xf0, 0xf1, 0xf3, 0xf4, 0xf5, 0xff};
    unsigned char data[4];
    size_t n = sizeof edges;

    (void)state;
    for (size_t a = 0; a < 256; a++) {
        data[0] = (unsigned char)a;
        check_sequence(data, 1);
        for (size_t b = 0; b < 256; b++) {
            data[1] = (unsigned char)b;
            check_sequence(data, 2);
            for (size_t c = 0; c < n; c++) {
                data[2] = edges[c];
                check_sequence(data, 3);
                data[3] = edges[(a + b + c) % n];
                check_sequence(data, 4);
            }
        }
    }
}

static void holds_back_only_what_may_become_a_character(void **state)
{
    static const struct {
        const char *text;
        size_t complete;
    } table[] = {
        {"", 0},
        {"abc", 3},
        {"ab\xe2", 2},
        {"ab\xe2\x82", 2},
        {"ab\xe2\x82\xac", 5},
        {"ab\xf0\x9f\x98", 2},
        {"ab\xf0\x9f\x98\x80", 6},
        {"ab\xc3", 2},
        {"ab\xff", 3},             /* never starts a character */
        {"ab\xc0", 3},             /* nor does this: overlong */
        {"ab\xe0\x80", 4},         /* overlong */
        {"ab\xed\xa0", 4},         /* a surrogate */
        {"ab\xf4\x90\x80", 5},     /* beyond U+10FFFF */
        {"ab\x80\x80\x80\x80", 6}, /* no start */
        {"\xe2\x82\xe2\x82", 2},
    };

    (void)state;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        assert_int_equal(sp_utf8_complete_bytes(table[i].text, strlen(table[i].text)),
                         table[i].complete);
    assert_int_equal(sp_utf8_sequence_bytes("", 0), 0);
    assert_true(sp_utf8_valid("", 0));
    assert_true(sp_utf8_valid("a\0b", 3));
    assert_false(sp_utf8_valid("ab\xe2\x82", 4));
}

/* A stranger's text in a table writes no line and moves no cursor. */
static void foreign_texts_are_printable(void **state)
{
    static const struct {
        const char *foreign, *shown;
    } table[] = {
        {"plain", "plain"},
        {"", ""},
        {"a\nverdict  accepted", "a?verdict  accepted"},
        {"\x1b[2J\r\t\x7f", "?[2J???"},
        {"\xc2\x9b"
         "31m",
         "??31m"},
        {"\xc3\xa4\xff\xe2\x82\xac", "\xc3\xa4?\xe2\x82\xac"},
        {"cut \xe2\x82", "cut "},
    };
    sp_text text = {0};

    (void)state;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        sp_text_clear(&text);
        sp_text_add(&text, "\n");
        sp_text_add_printable(&text, table[i].foreign);
        sp_text_add(&text, ".\n");
        assert_int_equal(text.bytes, strlen(text.data));
        assert_int_equal(text.data[0], '\n');
        assert_int_equal(strncmp(text.data + 1, table[i].shown, strlen(table[i].shown)), 0);
        assert_string_equal(text.data + 1 + strlen(table[i].shown), ".\n");
    }
    sp_text_free(&text);
    sp_alloc_fail_after(0);
    sp_text_add_printable(&text, "more");
    sp_alloc_fail_after(-1);
    assert_true(text.failed);
    sp_text_free(&text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(grows),
        cmocka_unit_test(grows_at_every_size),
        cmocka_unit_test(a_failure_is_remembered),
        cmocka_unit_test(escapes_as_json_says),
        cmocka_unit_test(a_reader_gets_the_bytes_back),
        cmocka_unit_test(any_bytes_give_valid_json),
        cmocka_unit_test(doubles_read_back),
        cmocka_unit_test(doubles_are_short_and_never_words),
        cmocka_unit_test(foreign_texts_are_printable),
        cmocka_unit_test(utf8_follows_the_standard),
        cmocka_unit_test(holds_back_only_what_may_become_a_character),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
