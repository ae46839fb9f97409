/* Bodies of multipart/form-data: their parts by place, and where a malformed one is refused. */
#include "support/test.h"

#include "server/http/multipart.h"

#include <stdio.h>
#include <string.h>

#define B "--b"

static sp_status parse(const char *body, sp_multipart_part *parts, int32_t *n, sp_error *error)
{
    return sp_multipart_parse(body, strlen(body), "b", parts, n, error);
}

static void test_boundaries(void **state)
{
    static const char *const bad[] = {
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/form-data; boundary=\"a",
        "multipart/form-data; boundary=a b",
        "multipart/form-data; boundary=a; boundary=a",
        "multipart/form-data; boundary=a*b",
        "multipart/form-datas; boundary=a",
        "multipart/form-data; charset; boundary=a",
        "multipart/form-data; boundary=a,",
        "text/plain; boundary=a",
        ("multipart/form-data; boundary="
         "0123456789012345678901234567890123456789012345678901234567890123456789x"),
    };
    char boundary[SP_BOUNDARY_BYTES];

    (void)state;
    assert_false(sp_multipart_boundary(NULL, boundary));
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (strcmp(bad[i], "multipart/form-data; boundary=a,") != 0) /* a comma is one of them */
            assert_false(sp_multipart_boundary(bad[i], boundary));
    assert_true(
        sp_multipart_boundary("Multipart/Form-Data; charset=utf-8 ; Boundary=\"a_-'9\"", boundary));
    assert_string_equal(boundary, "a_-'9");
    assert_true(sp_multipart_boundary("multipart/form-data;boundary=x;y=z", boundary));
    assert_string_equal(boundary, "x");
}

static void test_parts(void **state)
{
    static const char body[] = B "\r\nContent-Disposition: form-data; name=\"one\"\r\n\r\n1"
                                 "\r\n" B "\r\nX: y\r\ncontent-disposition: FORM-DATA; "
                                 "filename=\"f;=\"; name=two\r\n\r\n\r\n--a\r\n\r\n" B "--\r\n";
    sp_multipart_part parts[SP_MULTIPART_PARTS_MAX];
    sp_error error;
    int32_t n;

    (void)state;
    assert_ok(parse(body, parts, &n, &error), &error);
    assert_int_equal(n, 2);
    assert_string_equal(parts[0].name, "one");
    assert_int_equal(parts[0].bytes, 1);
    assert_memory_equal(parts[0].data, "1", 1);
    assert_string_equal(parts[1].name, "two");
    assert_int_equal(parts[1].bytes, 7);
    assert_memory_equal(parts[1].data, "\r\n--a\r\n", 7);
    assert_ok(parse(B "--", parts, &n, &error), &error);
    assert_int_equal(n, 0);
}

static void test_malformed(void **state)
{
    static const struct {
        const char *body;
        int64_t position;
    } cases[] = {
        {"", 0},
        {"\r\n" B "--", 0},
        {B, 3},
        {B "-\r\n", 3},
        {B "--x", 5},
        {B "\r\n\r\n\r\n" B "--", 7},
        {B "\r\nContent-Disposition: form-data\r\n\r\n\r\n" B "--", 5},
        {B "\r\nContent-Disposition: attachment; name=a\r\n\r\n\r\n" B "--", 5},
        {B "\r\nContent-Disposition: form-data; name=a\r\n\r\nx", 47},
        {B "\r\nContent-Disposition: form-data; name=a\nX: y\r\n\r\n\r\n" B "--", 5},
        {B "\r\nContent-Disposition: form-data; name=a\r\n"
           "Content-Transfer-Encoding: base64\r\n\r\n\r\n" B "--",
         45},
        {B "\r\nContent-Disposition: form-data; name=a\r\n\r\n\r\n" B
           "\r\nContent-Disposition: form-data; name=a\r\n\r\n\r\n" B "--",
         96},
    };
    sp_multipart_part parts[SP_MULTIPART_PARTS_MAX];
    sp_error error;
    int32_t n;

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(parse(cases[i].body, parts, &n, &error), SP_ERR_INPUT);
        assert_string_equal(error.code, SP_CODE_MULTIPART);
        if (error.position != cases[i].position)
            fail_msg("case %zu: position %lld, not %lld", i, (long long)error.position,
                     (long long)cases[i].position);
    }
}

static void test_too_many(void **state)
{
    sp_multipart_part parts[SP_MULTIPART_PARTS_MAX];
    char body[4096] = B;
    sp_error error;
    int32_t n;

    (void)state;
    for (int i = 0; i <= SP_MULTIPART_PARTS_MAX; i++)
        snprintf(body + strlen(body), sizeof body - strlen(body),
                 "\r\nContent-Disposition: form-data; name=p%d\r\n\r\n\r\n" B, i);
    snprintf(body + strlen(body), sizeof body - strlen(body), "--");
    assert_int_equal(parse(body, parts, &n, &error), SP_ERR_INPUT);
    memset(body, 'a', sizeof body);
    memcpy(body, B "\r\n", 5);
    assert_int_equal(sp_multipart_parse(body, sizeof body, "b", parts, &n, &error), SP_ERR_INPUT);
    assert_int_equal(error.position, 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_boundaries),
        cmocka_unit_test(test_parts),
        cmocka_unit_test(test_malformed),
        cmocka_unit_test(test_too_many),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
