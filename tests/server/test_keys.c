/* Key files and what they let in; names and paths in requests. */
#include "support/test.h"

#include "base/alloc.h"
#include "base/file.h"
#include "server/api/api.h"

#include <string.h>

static sp_status open_text(const char *text, sp_keys **out_keys, sp_error *error)
{
    char *directory = sp_test_make_directory();
    char *path = sp_path_join(directory, "keys");
    sp_status status;

    sp_test_write_file(directory, "keys", text, strlen(text));
    status = sp_keys_open(path, out_keys, error);
    sp_test_remove_tree(directory);
    sp_free(path);
    sp_free(directory);
    return status;
}

static void test_keys(void **state)
{
    sp_keys *keys = NULL;
    sp_error error;

    (void)state;
    assert_ok(open_text("# a comment\n\none \r\n\t two\t\nthree", &keys, &error), &error);
    assert_true(sp_keys_accept(keys, "Bearer one"));
    assert_true(sp_keys_accept(keys, "bearer two"));
    assert_true(sp_keys_accept(keys, "Bearer  three"));
    assert_false(sp_keys_accept(keys, NULL));
    assert_false(sp_keys_accept(keys, ""));
    assert_false(sp_keys_accept(keys, "one"));
    assert_false(sp_keys_accept(keys, "Basic one"));
    assert_false(sp_keys_accept(keys, "Bearer "));
    assert_false(sp_keys_accept(keys, "Bearer on"));
    assert_true(sp_keys_accept(keys, "Bearer one "));
    assert_false(sp_keys_accept(keys, "Bearer one e"));
    assert_false(sp_keys_accept(keys, "Bearer # a comment"));
    sp_keys_close(keys);
}

static void test_no_keys(void **state)
{
    sp_keys *keys = NULL;
    sp_error error;

    (void)state;
    assert_int_equal(open_text("# nothing\n \n", &keys, &error), SP_ERR_INPUT);
    assert_int_equal(open_text("\xef\xbb\xbfone\n", &keys, &error), SP_ERR_INPUT);
    assert_int_equal(open_text("one\ntw\x01o\n", &keys, &error), SP_ERR_INPUT);
    assert_int_equal(error.position, 6);
    assert_int_equal(sp_keys_open("/no/such/file", &keys, &error), SP_ERR_NOT_FOUND);
    assert_null(keys);
}

static void check_path(const char *path, const char *want)
{
    char *decoded = sp_path_decode(path);

    if (want)
        assert_string_equal(decoded, want);
    else
        assert_null(decoded);
    sp_free(decoded);
}

static void test_paths(void **state)
{
    (void)state;
    check_path("plain", "plain");
    check_path("a%2Fb%20c", "a/b c");
    check_path("%C3%A9", "\xc3\xa9");
    check_path("%2525", "%25");
    check_path("a+b", "a+b");
    check_path("%", NULL);
    check_path("%2", NULL);
    check_path("%zz", NULL);
    check_path("%00", NULL);
    check_path("%ff", NULL);
}

static void test_statuses(void **state)
{
    const sp_error none = {.code = ""};
    const sp_error missing = {.code = "config-missing"};
    const sp_error taken = {.code = "generation-changed"};

    (void)state;
    /* Retryable: 429 and 503. Everything else stays as it is however often it is asked for. */
    assert_int_equal(sp_http_status_of(SP_AGAIN, &none), 429);
    assert_int_equal(sp_http_status_of(SP_POOL_FULL, &none), 503);
    assert_int_equal(sp_http_status_of(SP_BUSY, &none), 503);
    assert_int_equal(sp_http_status_of(SP_ERR_SLOTS_PINNED, &none), 409);
    assert_int_equal(sp_http_status_of(SP_ERR_NOT_FOUND, &none), 404);
    assert_int_equal(sp_http_status_of(SP_ERR_NOT_FOUND, &missing), 400);
    assert_int_equal(sp_http_status_of(SP_ERR_REFUSED, &missing), 400);
    assert_int_equal(sp_http_status_of(SP_ERR_STATE, &taken), 409);
    assert_int_equal(sp_http_status_of(SP_ERR_DEVICE, &none), 500);
    /* The server is a gateway to its peers: a client can mend nothing there. */
    assert_int_equal(sp_http_status_of(SP_ERR_PEER_UNREACHABLE, &none), 502);
    assert_int_equal(sp_http_status_of(SP_ERR_PEER_TIMEOUT, &none), 504);
    assert_int_equal(sp_http_status_of(SP_ERR_PEER_LOST, &none), 502);
    assert_int_equal(sp_http_status_of(SP_ERR_PEER_PROTOCOL, &none), 502);
    assert_int_equal(sp_http_status_of(SP_ERR_PEER_REFUSED, &none), 502);
    assert_int_equal(sp_http_status_of(SP_ERR_PEER_CONTENT, &none), 502);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_keys),
        cmocka_unit_test(test_no_keys),
        cmocka_unit_test(test_paths),
        cmocka_unit_test(test_statuses),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
