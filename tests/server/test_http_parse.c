/* Heads and chunked bodies of HTTP, by their bytes. What a whole server makes of them is in
 * check_http_robust.py. */
#include "support/test.h"

#include "server/http/parse.h"

#include <stdio.h>
#include <string.h>

#define HEAD_BYTES_MAX 200

/* Parses a copy of `text`, which stays for the strings of *out_head. */
static sp_http_parse parse(const char *text, sp_http_head *out_head, sp_http_refusal *out_refusal)
{
    static char copy[4096];
    size_t bytes = strlen(text);

    assert_true(bytes < sizeof copy);
    memcpy(copy, text, bytes + 1);
    return sp_http_parse_head(copy, bytes, out_head, out_refusal);
}

static void assert_refused(const char *text, int status, const char *code)
{
    sp_http_head head;
    sp_http_refusal refusal;

    assert_int_equal(parse(text, &head, &refusal), SP_HTTP_PARSE_REFUSED);
    assert_int_equal(refusal.status, status);
    assert_string_equal(refusal.code, code);
    assert_non_null(head.method);
    assert_non_null(head.path);
}

static void test_a_head(void **state)
{
    sp_http_head head;
    sp_http_refusal refusal;

    (void)state;
    assert_int_equal(parse("POST /a%20b?c=d?e HTTP/1.1\r\nHost: x\r\nX-Empty:\r\n"
                           "content-LENGTH:\t 042 \r\nExpect: 100-Continue\r\n\r\n",
                           &head, &refusal),
                     SP_HTTP_PARSE_DONE);
    assert_string_equal(head.method, "POST");
    assert_string_equal(head.path, "/a%20b");
    assert_string_equal(head.query, "c=d?e");
    assert_int_equal(head.minor, 1);
    assert_int_equal(head.length, 42);
    assert_int_equal(head.n_headers, 4);
    assert_true(head.keep_alive);
    assert_true(head.expects_continue);
    assert_false(head.chunked);
    assert_string_equal(sp_http_head_value(&head, "HOST"), "x");
    assert_string_equal(sp_http_head_value(&head, "x-empty"), "");
    assert_string_equal(sp_http_head_value(&head, "Content-Length"), "042");
    assert_null(sp_http_head_value(&head, "Content"));
}

static bool keeps_alive(const char *text)
{
    sp_http_head head;
    sp_http_refusal refusal;

    assert_int_equal(parse(text, &head, &refusal), SP_HTTP_PARSE_DONE);
    return head.keep_alive;
}

static void test_connections_that_go_on(void **state)
{
    (void)state;
    assert_true(keeps_alive("GET / HTTP/1.1\r\nHost: x\r\n\r\n"));
    assert_true(keeps_alive("GET / HTTP/1.7\r\nHost: x\r\n\r\n"));
    assert_false(keeps_alive("GET / HTTP/1.1\r\nHost: x\r\nConnection: Close\r\n\r\n"));
    assert_false(keeps_alive("GET / HTTP/1.1\r\nHost: x\r\nConnection: te, close\r\n\r\n"));
    assert_true(keeps_alive("GET / HTTP/1.1\r\nHost: x\r\nConnection: closed\r\n\r\n"));
    assert_false(keeps_alive("GET / HTTP/1.0\r\n\r\n"));
    assert_true(keeps_alive("GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n"));
    assert_false(keeps_alive("GET / HTTP/1.0\r\nConnection: keep-alive, close\r\n\r\n"));
}

static void test_targets(void **state)
{
    sp_http_head head;
    sp_http_refusal refusal;

    (void)state;
    assert_int_equal(parse("GET HTTP://h:1/p?q HTTP/1.1\r\nHost: h\r\n\r\n", &head, &refusal),
                     SP_HTTP_PARSE_DONE);
    assert_string_equal(head.path, "/p");
    assert_int_equal(parse("OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n", &head, &refusal),
                     SP_HTTP_PARSE_DONE);
    assert_string_equal(head.path, "*");
    assert_refused("GET http://h HTTP/1.1\r\nHost: h\r\n\r\n", 400, "malformed-request");
    assert_refused("GET ** HTTP/1.1\r\nHost: h\r\n\r\n", 400, "malformed-request");
    assert_refused("GET  HTTP/1.1\r\nHost: h\r\n\r\n", 400, "malformed-request");
    assert_refused("CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n", 400, "malformed-request");
}

static void test_versions(void **state)
{
    (void)state;
    assert_refused("GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505, "http-version");
    assert_refused("GET / HTTP/0.9\r\nHost: x\r\n\r\n", 505, "http-version");
    assert_refused("GET / HTTP/1.10\r\nHost: x\r\n\r\n", 400, "malformed-request");
    assert_refused("GET / http/1.1\r\nHost: x\r\n\r\n", 400, "malformed-request");
    assert_refused("GET /\r\n\r\n", 400, "malformed-request");
    assert_refused("PRI * HTTP/2.0\r\n\r\n", 505, "http-version");
}

static void test_lengths(void **state)
{
    static const char *const bad[] = {"+5", "-5", "5,5", "5 5", "0x5", "", "5.0", "\xd9\xa5"};
    char text[200];

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        snprintf(text, sizeof text, "GET / HTTP/1.1\r\nHost: x\r\nContent-Length: %s\r\n\r\n",
                 bad[i]);
        assert_refused(text, 400, "malformed-request");
    }
    assert_refused("GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n", 413,
                   "body-too-large");
    assert_refused("GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999999999999999x\r\n\r\n", 400,
                   "malformed-request");
    assert_refused("GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\n",
                   400, "malformed-request");
}

/* ---- the end of a head ------------------------------------------------------------------------
 */

/* Gives the bytes one by one; returns what was said of the last one. */
static sp_http_parse find(const char *text, size_t *out_bytes, sp_http_refusal *out_refusal)
{
    sp_http_parse found = SP_HTTP_PARSE_MORE;
    size_t from = 0;

    for (size_t n = 1; n <= strlen(text) && found == SP_HTTP_PARSE_MORE; n++)
        found = sp_http_find_head(text, n, HEAD_BYTES_MAX, &from, out_bytes, out_refusal);
    return found;
}

static void test_the_end_of_a_head(void **state)
{
    char text[2 * HEAD_BYTES_MAX];
    sp_http_refusal refusal;
    size_t bytes = 0, from = 0;

    (void)state;
    assert_int_equal(find("GET / HTTP/1.1\r\n\r\nrest", &bytes, &refusal), SP_HTTP_PARSE_DONE);
    assert_int_equal(bytes, 18);
    assert_int_equal(find("GET / HTTP/1.1\r\nHost: x\r\n", &bytes, &refusal), SP_HTTP_PARSE_MORE);
    memset(text, 'a', sizeof text);
    text[HEAD_BYTES_MAX] = '\0';
    assert_int_equal(find(text, &bytes, &refusal), SP_HTTP_PARSE_REFUSED);
    assert_int_equal(refusal.status, 414);
    memcpy(text + 20, "\r\n", 2);
    assert_int_equal(find(text, &bytes, &refusal), SP_HTTP_PARSE_REFUSED);
    assert_int_equal(refusal.status, 431);
    /* The longest that fits, and one byte more. */
    memcpy(text + HEAD_BYTES_MAX - 4, "\r\n\r\n", 5);
    assert_int_equal(find(text, &bytes, &refusal), SP_HTTP_PARSE_DONE);
    assert_int_equal(bytes, HEAD_BYTES_MAX);
    memcpy(text + HEAD_BYTES_MAX - 4, "a\r\n\r\n", 6);
    assert_int_equal(
        sp_http_find_head(text, HEAD_BYTES_MAX + 1, HEAD_BYTES_MAX, &from, &bytes, &refusal),
        SP_HTTP_PARSE_REFUSED);
    assert_int_equal(refusal.status, 431);
}

/* ---- chunks -------------------------------------------------------------------------------- */

/* The body of `text` given in pieces of this size, and what is left of it; NULL: refused. */
static const char *unchunk(const char *text, size_t piece, size_t *out_left)
{
    static char body[256];
    size_t n = 0, at = 0, end = strlen(text);
    sp_http_chunks chunks = {0};
    sp_http_refusal refusal;

    while (at < end) {
        size_t bytes = end - at < piece ? end - at : piece, taken = 0, n_data = 0;
        const char *data;
        sp_http_parse parsed =
            sp_http_parse_chunk(&chunks, text + at, bytes, &taken, &data, &n_data, &refusal);

        if (parsed == SP_HTTP_PARSE_REFUSED) {
            assert_int_equal(refusal.status, 400);
            return NULL;
        }
        assert_true(taken > 0 && taken <= bytes && n + n_data < sizeof body);
        memcpy(body + n, data, n_data);
        n += n_data;
        at += taken;
        body[n] = '\0';
        if (parsed == SP_HTTP_PARSE_DONE) {
            *out_left = end - at;
            return body;
        }
    }
    *out_left = SIZE_MAX; /* it is not at its end */
    return body;
}

static void test_chunks(void **state)
{
    static const char text[] = "5\r\nhello\r\n00A;a=\"b\"\r\n, my world\r\n0;x\r\nA: b\r\n\r\nGET";
    static const char *const bad[] = {
        "\r\n\r\n",         "5hello\r\n",           "-1\r\n",
        "5\nhello\r\n",     "2\r\nabc\r\n",         "2\r\nab\n0\r\n\r\n",
        "0x2\r\nab\r\n",    " 2\r\nab\r\n",         "1234567890123456\r\n",
        "2;\x01\r\nab\r\n", "0\r\n bad: x\r\n\r\n", "0\r\nA: \x02\r\n\r\n",
        "2\r\nab\r\n;\r\n", "2\r\rab\r\n",
    };
    size_t left;

    (void)state;
    for (size_t piece = 1; piece < sizeof text; piece++) {
        assert_string_equal(unchunk(text, piece, &left), "hello, my world");
        assert_int_equal(left, 3);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        for (size_t piece = 1; piece < 12; piece++)
            assert_null(unchunk(bad[i], piece, &left));
    assert_string_equal(unchunk("2\r\nab\r\n0\r\n\r", 3, &left), "ab");
    assert_int_equal(left, SIZE_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_head),  cmocka_unit_test(test_connections_that_go_on),
        cmocka_unit_test(test_targets), cmocka_unit_test(test_versions),
        cmocka_unit_test(test_lengths), cmocka_unit_test(test_the_end_of_a_head),
        cmocka_unit_test(test_chunks),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
