/* error: what sp_fail writes, and that foreign text cannot harm a terminal or a JSON line. */
#include "base/error.h"

#include "base/text.h"
#include "support/test.h"

#include <string.h>

static void fills_every_field(void **state)
{
    sp_error error;

    (void)state;
    memset(&error, 0xff, sizeof error);
    assert_int_equal(sp_fail(&error, SP_ERR_MISMATCH, "shape-mismatch", "a.weight", 42,
                             "%s is [%d, %d]", "a.weight", 3, 4),
                     SP_ERR_MISMATCH);
    assert_int_equal(error.status, SP_ERR_MISMATCH);
    assert_string_equal(error.code, "shape-mismatch");
    assert_string_equal(error.subject, "a.weight");
    assert_int_equal(error.position, 42);
    assert_string_equal(error.text, "a.weight is [3, 4]");
}

static void absent_parts_are_empty(void **state)
{
    sp_error error;

    (void)state;
    memset(&error, 0xff, sizeof error);
    assert_int_equal(sp_fail(&error, SP_ERR_IO, NULL, NULL, -1, "plain"), SP_ERR_IO);
    assert_string_equal(error.code, "");
    assert_string_equal(error.subject, "");
    assert_int_equal(error.position, -1);
}

static void no_record_is_fine(void **state)
{
    (void)state;
    assert_int_equal(sp_fail(NULL, SP_ERR_INPUT, "x", "y", 1, "%d", 1), SP_ERR_INPUT);
    assert_int_equal(sp_fail_memory(NULL, 10, "x"), SP_ERR_MEMORY);
}

static void memory_error_says_how_much_for_what(void **state)
{
    sp_error error;

    (void)state;
    assert_int_equal(sp_fail_memory(&error, 1234, "a table"), SP_ERR_MEMORY);
    assert_int_equal(error.status, SP_ERR_MEMORY);
    assert_string_equal(error.text, "out of memory: 1234 bytes for a table");
}

static const char *subject_after(const char *subject)
{
    static sp_error error;

    sp_fail(&error, SP_ERR_INPUT, NULL, subject, -1, "%s", subject);
    assert_string_equal(error.text, error.subject);
    return error.subject;
}

static void foreign_bytes_become_question_marks(void **state)
{
    static const struct {
        const char *in, *out;
    } table[] = {
        {"plain", "plain"},
        {"a\nb\tc\r\x1b[31m\x7f", "a?b?c??[31m?"},
        {"na\xc3\xafve \xe2\x82\xac \xf0\x9f\x98\x80",
         "na\xc3\xafve \xe2\x82\xac \xf0\x9f\x98\x80"},
        {"\xc2\x9b"
         "31m",
         "??31m"}, /* C1's CSI */
        {"\xc2\xa0", "\xc2\xa0"},
        {"\x9b\xff\xfe.", "???."},
        {"\xc0\xaf \xed\xa0\x80 \xf4\x90\x80\x80 .", "?? ??? ???? ."},
        {"cut \xe2\x82", "cut "},
        {"lone \xe2\x82 inside", "lone ?? inside"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        assert_string_equal(subject_after(table[i].in), table[i].out);
}

/* Fills a buffer of `capacity` bytes with `lead` ASCII bytes and then a character of n bytes over
 * and over, and expects the longest whole prefix. */
static void check_cut(size_t capacity, size_t lead, const char *character)
{
    char in[2048] = {0};
    sp_error error;
    size_t n = strlen(character);
    size_t want = lead + (capacity - 1 - lead) / n * n;

    memset(in, 'a', lead);
    for (size_t at = lead; at + n < sizeof in; at += n)
        memcpy(in + at, character, n);
    sp_fail(&error, SP_ERR_INPUT, NULL, in, -1, "%s", in);
    assert_true(sp_utf8_valid(error.subject, strlen(error.subject)));
    assert_true(sp_utf8_valid(error.text, strlen(error.text)));
    if (capacity == SP_ERROR_SUBJECT_BYTES) {
        assert_int_equal(strlen(error.subject), want);
        assert_memory_equal(error.subject, in, want);
    } else {
        assert_int_equal(strlen(error.text), want);
        assert_memory_equal(error.text, in, want);
    }
}

static void long_text_is_cut_at_a_character(void **state)
{
    static const char *const characters[] = {"x", "\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80"};

    (void)state;
    for (size_t i = 0; i < 4; i++) {
        for (size_t lead = 0; lead < 5; lead++) {
            check_cut(SP_ERROR_SUBJECT_BYTES, lead, characters[i]);
            check_cut(SP_ERROR_TEXT_BYTES, lead, characters[i]);
        }
    }
}

static void statuses_have_names_texts_and_ranges(void **state)
{
    static const sp_status all[] = {
#define SP_TEST_STATUS(name, number, text) name,
        SP_STATUS_LIST(SP_TEST_STATUS)
#undef SP_TEST_STATUS
    };
    size_t n = sizeof all / sizeof *all;

    (void)state;
    assert_string_equal(sp_status_name(SP_ERR_MEMORY), "SP_ERR_MEMORY");
    assert_string_equal(sp_status_text(SP_ERR_MEMORY), "out of memory");
    assert_string_equal(sp_status_name(SP_POOL_FULL), "SP_POOL_FULL");
    assert_string_equal(sp_status_name((sp_status)-9999), "SP_UNKNOWN");
    assert_string_equal(sp_status_text((sp_status)-9999), "unknown status");
    for (size_t i = 0; i < n; i++) {
        assert_true(strncmp(sp_status_name(all[i]), "SP_", 3) == 0);
        assert_true(strlen(sp_status_text(all[i])) > 0);
        assert_int_equal(all[i] < 0, strncmp(sp_status_name(all[i]), "SP_ERR_", 7) == 0);
        for (size_t j = 0; j < i; j++)
            assert_string_not_equal(sp_status_text(all[i]), sp_status_text(all[j]));
    }
}

/* Programs that were built earlier rely on these. */
static void numbers_are_stable(void **state)
{
    (void)state;
    assert_int_equal(SP_OK, 0);
    assert_int_equal(SP_PENDING, 1);
    assert_int_equal(SP_AGAIN, 2);
    assert_int_equal(SP_BUSY, 3);
    assert_int_equal(SP_POOL_FULL, 4);
    assert_int_equal(SP_ERR_ARGUMENT, -1);
    assert_int_equal(SP_ERR_STATE, -2);
    assert_int_equal(SP_ERR_STRIDE, -3);
    assert_int_equal(SP_ERR_UNSUPPORTED, -4);
    assert_int_equal(SP_ERR_INPUT, -100);
    assert_int_equal(SP_ERR_NOT_FOUND, -101);
    assert_int_equal(SP_ERR_TRUNCATED, -102);
    assert_int_equal(SP_ERR_REFUSED, -103);
    assert_int_equal(SP_ERR_MISMATCH, -104);
    assert_int_equal(SP_ERR_TOO_LARGE, -105);
    assert_int_equal(SP_ERR_MEMORY, -200);
    assert_int_equal(SP_ERR_IO, -201);
    assert_int_equal(SP_ERR_SLOTS_PINNED, -202);
    assert_int_equal(SP_ERR_BUDGET, -203);
    assert_int_equal(SP_ERR_THREAD, -204);
    assert_int_equal(SP_ERR_PEER_UNREACHABLE, -300);
    assert_int_equal(SP_ERR_PEER_TIMEOUT, -301);
    assert_int_equal(SP_ERR_PEER_LOST, -302);
    assert_int_equal(SP_ERR_PEER_PROTOCOL, -303);
    assert_int_equal(SP_ERR_PEER_REFUSED, -304);
    assert_int_equal(SP_ERR_PEER_CONTENT, -305);
    assert_int_equal(SP_ERR_DEVICE, -400);
    assert_int_equal(SP_ERR_NO_DEVICE, -401);
    assert_int_equal(SP_DTYPE_F32, 0);
    assert_int_equal(SP_DTYPE_BF16, 1);
    assert_int_equal(SP_DTYPE_F16, 2);
}

static void dtypes_have_names_and_sizes(void **state)
{
    (void)state;
    assert_int_equal(sp_dtype_bytes(SP_DTYPE_F32), 4);
    assert_int_equal(sp_dtype_bytes(SP_DTYPE_BF16), 2);
    assert_int_equal(sp_dtype_bytes(SP_DTYPE_F16), 2);
    assert_int_equal(sp_dtype_bytes((sp_dtype)17), 0);
    assert_string_equal(sp_dtype_name(SP_DTYPE_F32), "f32");
    assert_string_equal(sp_dtype_name(SP_DTYPE_BF16), "bf16");
    assert_string_equal(sp_dtype_name(SP_DTYPE_F16), "f16");
    assert_string_equal(sp_dtype_name((sp_dtype)17), "unknown");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fills_every_field),
        cmocka_unit_test(absent_parts_are_empty),
        cmocka_unit_test(no_record_is_fine),
        cmocka_unit_test(memory_error_says_how_much_for_what),
        cmocka_unit_test(foreign_bytes_become_question_marks),
        cmocka_unit_test(long_text_is_cut_at_a_character),
        cmocka_unit_test(statuses_have_names_texts_and_ranges),
        cmocka_unit_test(numbers_are_stable),
        cmocka_unit_test(dtypes_have_names_and_sizes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
