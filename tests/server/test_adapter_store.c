/* The store of published adapters, by its files: what a kill may leave, and what stays. */
#include "support/test.h"

#include "base/alloc.h"
#include "base/file.h"
#include "server/driver/adapter_store.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

static sp_digest digest_of(uint8_t byte)
{
    sp_digest digest;

    memset(digest.bytes, byte, sizeof digest.bytes);
    return digest;
}

/* "DIR/sha256-0b0b.." of a digest of one byte; static. */
static const char *content(const char *directory, uint8_t byte)
{
    static char path[512];
    size_t at = (size_t)snprintf(path, sizeof path, "%s/sha256-", directory);

    for (size_t i = 0; i < SP_DIGEST_BYTES; i++)
        at += (size_t)snprintf(path + at, sizeof path - at, "%02x", byte);
    return path;
}

static sp_adapter_store *open_store(const char *directory)
{
    sp_adapter_store *store;
    sp_error error;

    assert_ok(sp_adapter_store_open(directory, &store, &error), &error);
    return store;
}

/* Puts a content, as whose weights "w" stand. */
static void put(sp_adapter_store *store, uint8_t byte)
{
    sp_digest digest = digest_of(byte);
    char *folder;
    sp_error error;

    assert_ok(sp_adapter_store_put(store, &digest, "{}", 2, "w", 1, &folder, &error), &error);
    assert_true(sp_path_is_directory(folder));
    sp_free(folder);
}

static void record(sp_adapter_store *store, const char *name, uint8_t byte, bool pinned)
{
    sp_digest digest = digest_of(byte);
    sp_error error;

    assert_ok(sp_adapter_store_record(store, name, byte ? &digest : NULL, pinned, &error), &error);
}

static void settle(sp_adapter_store *store, uint8_t byte)
{
    sp_digest digest = digest_of(byte);

    sp_adapter_store_settle(store, &digest);
}

static void test_names_come_back(void **state)
{
    char *directory = sp_test_make_directory();
    sp_adapter_store *store = open_store(directory);

    (void)state;
    put(store, 1);
    record(store, "a", 1, false);
    put(store, 2);
    record(store, "b \"é\"", 2, true);
    put(store, 3);
    record(store, "c", 3, false);
    record(store, "c", 0, false);
    record(store, "never", 0, false);
    put(store, 4);
    record(store, "a", 4, false);
    sp_adapter_store_close(store);
    store = open_store(directory);
    assert_int_equal(sp_adapter_store_n(store), 2);
    assert_string_equal(sp_adapter_store_at(store, 0)->name, "a");
    assert_string_equal(sp_adapter_store_at(store, 0)->folder, content(directory, 4));
    assert_false(sp_adapter_store_at(store, 0)->pinned);
    assert_string_equal(sp_adapter_store_at(store, 1)->name, "b \"é\"");
    assert_int_equal(sp_adapter_store_at(store, 1)->digest.bytes[31], 2);
    assert_true(sp_adapter_store_at(store, 1)->pinned);
    assert_true(sp_adapter_store_has(store, "a"));
    assert_false(sp_adapter_store_has(store, "c"));
    /* The opening removes what no name means. */
    assert_true(sp_path_exists(content(directory, 2)));
    assert_false(sp_path_exists(content(directory, 1)));
    assert_false(sp_path_exists(content(directory, 3)));
    sp_adapter_store_close(store);
    sp_test_remove_tree(directory);
    sp_free(directory);
}

/* A content stays while a put or a version holds it, and goes after that. */
static void test_tidying(void **state)
{
    char *directory = sp_test_make_directory();
    sp_adapter_store *store = open_store(directory);
    sp_digest in_use = digest_of(2);

    (void)state;
    put(store, 1);
    put(store, 1);
    put(store, 2);
    settle(store, 2);
    settle(store, 1);
    sp_adapter_store_tidy(store, &in_use, 1);
    assert_true(sp_path_exists(content(directory, 1))); /* the second put of it */
    assert_true(sp_path_exists(content(directory, 2)));
    settle(store, 1);
    sp_adapter_store_tidy(store, NULL, 0);
    assert_false(sp_path_exists(content(directory, 1)));
    assert_false(sp_path_exists(content(directory, 2)));
    sp_adapter_store_close(store);
    sp_test_remove_tree(directory);
    sp_free(directory);
}

/* What a kill leaves goes at the next opening; what is not the store's own stays. */
static void test_leftovers(void **state)
{
    char *directory = sp_test_make_directory(), path[512];
    sp_adapter_store *store = open_store(directory);

    (void)state;
    put(store, 1);
    record(store, "a", 1, false);
    sp_adapter_store_close(store);
    snprintf(path, sizeof path, "%s/new-7", directory);
    assert_int_equal(mkdir(path, 0777), 0);
    sp_test_write_file(path, "adapter_config.json", "{", 1);
    sp_test_write_file(directory, "names.json.123-0", "{", 1);
    sp_test_write_file(directory, "notes", "x", 1);
    store = open_store(directory);
    assert_false(sp_path_exists(path));
    snprintf(path, sizeof path, "%s/names.json.123-0", directory);
    assert_false(sp_path_exists(path));
    snprintf(path, sizeof path, "%s/notes", directory);
    assert_true(sp_path_exists(path));
    assert_int_equal(sp_adapter_store_n(store), 1);
    sp_adapter_store_close(store);
    sp_test_remove_tree(directory);
    sp_free(directory);
}

static void assert_invalid(const char *directory, const char *names)
{
    sp_adapter_store *store;
    sp_error error;

    sp_test_write_file(directory, "names.json", names, strlen(names));
    assert_int_equal(sp_adapter_store_open(directory, &store, &error), SP_ERR_INPUT);
    assert_string_equal(error.code, SP_CODE_STORE_INVALID);
}

static void test_refusals(void **state)
{
    char *directory = sp_test_make_directory();
    sp_adapter_store *store = open_store(directory), *second;
    sp_error error;

    (void)state;
    put(store, 1);
    record(store, "a", 1, false);
    assert_int_equal(sp_adapter_store_open(directory, &second, &error), SP_ERR_STATE);
    assert_string_equal(error.code, SP_CODE_STORE_IN_USE);
    sp_adapter_store_close(store);
    assert_invalid(directory, "");
    assert_invalid(directory, "[]");
    assert_invalid(directory, "{\"store_of_sidepath\": 2, \"adapters\": []}");
    assert_invalid(directory, "{\"store_of_sidepath\": 1}");
    assert_invalid(directory, "{\"store_of_sidepath\": 1, \"adapters\": [{\"name\": \"a\"}]}");
    assert_invalid(directory, "{\"store_of_sidepath\": 1, \"adapters\": [{\"name\": \"a\", "
                              "\"digest\": \"0101\"}]}");
    assert_true(sp_path_exists(content(directory, 1))); /* nothing was removed */
    sp_test_remove_tree(directory);
    assert_int_equal(sp_adapter_store_open(directory, &store, &error), SP_ERR_NOT_FOUND);
    sp_free(directory);
}

/* A directory that is gone: nothing is recorded, and names mean what they did. */
static void test_failing(void **state)
{
    char *directory = sp_test_make_directory(), *folder;
    sp_adapter_store *store = open_store(directory);
    sp_digest digest = digest_of(2);
    sp_error error;

    (void)state;
    put(store, 1);
    record(store, "a", 1, false);
    sp_test_remove_tree(directory);
    assert_int_equal(sp_adapter_store_put(store, &digest, "{}", 2, "w", 1, &folder, &error),
                     SP_ERR_IO);
    assert_string_equal(error.code, SP_CODE_STORE_FAILED);
    assert_int_equal(sp_adapter_store_record(store, "a", &digest, false, &error), SP_ERR_IO);
    assert_int_equal(sp_adapter_store_record(store, "b", &digest, false, &error), SP_ERR_IO);
    assert_int_equal(sp_adapter_store_record(store, "a", NULL, false, &error), SP_ERR_IO);
    assert_int_equal(sp_adapter_store_n(store), 1);
    assert_int_equal(sp_adapter_store_at(store, 0)->digest.bytes[0], 1);
    sp_adapter_store_close(store);
    sp_free(directory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names_come_back), cmocka_unit_test(test_tidying),
        cmocka_unit_test(test_leftovers),       cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_failing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
