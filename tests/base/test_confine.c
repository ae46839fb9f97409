/*
 * Out of the directory leads no way: "..", absolute links, relative links, links of links, a link
 * as the last part or in the middle. Inside, links are followed. Elsewhere nothing changes. The
 * directory is known under each of its names, and a snapshot's links lead into its repository.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "base/confine.h"
#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static char *top, *inside;

static char *path_of(const char *directory, const char *name)
{
    char *path = sp_path_join(directory, name);

    assert_non_null(path);
    return path;
}

static void link_to(const char *target, const char *name)
{
    char *path = path_of(inside, name);

    assert_int_equal(symlink(target, path), 0);
    sp_free(path);
}

static int set_up(void **state)
{
    char *folder;
    sp_error error;

    (void)state;
    top = sp_test_make_directory();
    inside = path_of(top, "inside");
    assert_int_equal(mkdir(inside, 0700), 0);
    folder = path_of(inside, "folder");
    assert_int_equal(mkdir(folder, 0700), 0);
    sp_test_write_file(top, "secret", "secret", 6);
    sp_test_write_file(folder, "file", "good", 4);
    link_to("folder/file", "good_link");
    link_to("folder", "good_folder");
    link_to("../secret", "up");
    link_to("..", "up_folder");
    link_to("up", "link_of_link");
    folder = (sp_free(folder), path_of(top, "secret"));
    link_to(folder, "absolute");
    sp_free(folder);
    link_to("/proc/self/root", "magic");
    assert_ok(sp_confine_to(inside, &error), &error);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    assert_int_equal(sp_confine_to(NULL, NULL), SP_OK);
    sp_test_remove_tree(top);
    sp_free(inside);
    sp_free(top);
    return 0;
}

static sp_status read_inside(const char *name, sp_error *error)
{
    char *path = path_of(sp_confine_directory(), name);
    char *data;
    size_t bytes;
    sp_status status = sp_file_read_all(path, 100, &data, &bytes, error);

    sp_free(path);
    if (status != SP_OK)
        return status;
    assert_int_equal(bytes, 4);
    assert_memory_equal(data, "good", 4);
    sp_free(data);
    return SP_OK;
}

/* Old kernels and some sandboxes have none: then links and ".." are refused altogether. */
static bool system_has_openat2(void)
{
    struct open_how how = {.flags = O_PATH};
    long fd = syscall(SYS_openat2, AT_FDCWD, "/", &how, sizeof how);

    if (fd >= 0)
        close((int)fd);
    return fd >= 0;
}

static void test_ways_in(void **state)
{
    static const char *const good[] = {"folder/file", "folder//file", "folder/./file"};
    static const char *const good_links[] = {"folder/../folder/file", "good_link",
                                             "good_folder/file"};
    sp_error error;

    (void)state;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++)
        assert_ok(read_inside(good[i], &error), &error);
    for (size_t i = 0; i < sizeof good_links / sizeof *good_links; i++) {
        if (system_has_openat2())
            assert_ok(read_inside(good_links[i], &error), &error);
        else
            assert_true(read_inside(good_links[i], &error) < 0);
    }
}

static void test_ways_out(void **state)
{
    static const char *const bad[] = {"../secret",   "folder/../../secret",  "up",
                                      "absolute",    "link_of_link",         "up_folder/secret",
                                      "magic/etc/x", "../inside/folder/file"};

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        sp_error error = {0};
        char *path = path_of(sp_confine_directory(), bad[i]);
        sp_status status = read_inside(bad[i], &error);

        assert_true(status == SP_ERR_INPUT || status == SP_ERR_NOT_FOUND);
        assert_false(sp_path_exists(path));
        assert_false(sp_path_is_directory(path));
        sp_free(path);
    }
}

static void test_reason(void **state)
{
    sp_error error = {0};

    (void)state;
    assert_int_equal(read_inside("up", &error), SP_ERR_INPUT);
    assert_string_equal(error.code, SP_CODE_UNSAFE_PATH);
    assert_int_equal(read_inside("none", &error), SP_ERR_NOT_FOUND);
}

static void test_elsewhere(void **state)
{
    char *secret = path_of(top, "secret");
    char *similar = path_of(top, "inside2");
    const char *relative;

    (void)state;
    assert_true(sp_path_exists(secret));
    assert_false(sp_is_confined(secret, NULL));
    assert_false(sp_is_confined(similar, NULL));
    assert_false(sp_is_confined(sp_confine_directory(), NULL));
    sp_free(similar);
    similar = path_of(sp_confine_directory(), "/a/b");
    assert_true(sp_is_confined(similar, &relative));
    assert_string_equal(relative, "a/b");
    sp_free(similar);
    sp_free(secret);
}

static void test_no_directory(void **state)
{
    sp_error error;

    (void)state;
    assert_int_equal(sp_confine_to("/no/such/place", &error), SP_ERR_NOT_FOUND);
    assert_int_equal(sp_confine_to("/", &error), SP_ERR_INPUT);
    assert_null(sp_confine_directory());
    assert_null(sp_confine_directory());
    assert_ok(sp_confine_to(inside, &error), &error);
}

static sp_status read_file(const char *path)
{
    char *data;
    size_t bytes;
    sp_error error = {0};
    sp_status status = sp_file_read_all(path, 100, &data, &bytes, &error);

    if (status == SP_OK)
        sp_free(data);
    else if (error.code[0])
        assert_string_equal(error.code, SP_CODE_UNSAFE_PATH);
    return status;
}

/* Relative, through links to it, to its parent or into it, and from inside of it. */
static void test_other_names(void **state)
{
    static const char *const good[] = {
        "inside/folder/file", "./inside//folder/./file",  "folder/../inside/folder/file",
        "alias/folder/file",  "above/inside/folder/file", "into/file",
        "chain/folder/file",
    };
    static const char *const bad[] = {
        "inside/up",
        "./inside/absolute",
        "alias/up",
        "above/inside/link_of_link",
        "into_up/secret",
        "inside/up_folder/secret",
        "to_up",
        "chain/folder/../../secret",
        "alias/../inside/folder/file",
    };
    static const char *const links[][2] = {
        {"inside", "alias"},
        {".", "above"},
        {"inside/folder", "into"},
        {"alias", "chain"},
        {"inside/up_folder", "into_up"},
        {"inside/up", "to_up"},
        {"to_itself", "to_itself"},
    };
    char before[4096];

    (void)state;
    if (getenv("SP_EMULATED")) { /* the root of qemu-user is the one of its libraries */
        print_message("skipped: in an emulator, / is another directory\n");
        skip();
    }
    assert_non_null(getcwd(before, sizeof before));
    assert_int_equal(chdir(top), 0);
    assert_int_equal(mkdir("folder", 0700), 0);
    for (size_t i = 0; i < sizeof links / sizeof *links; i++)
        assert_int_equal(symlink(links[i][0], links[i][1]), 0);
    for (size_t i = 0; i < sizeof good / sizeof *good; i++)
        if (read_file(good[i]) != SP_OK)
            fail_msg("%s is not opened", good[i]);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (read_file(bad[i]) == SP_OK || sp_path_exists(bad[i]))
            fail_msg("%s is opened", bad[i]);
    assert_int_equal(read_file("secret"), SP_OK);
    assert_int_equal(read_file("to_itself"), SP_ERR_NOT_FOUND);
    assert_int_equal(chdir("inside/folder"), 0);
    assert_int_equal(read_file("file"), SP_OK);
    assert_int_equal(read_file("../up"), SP_ERR_INPUT);
    assert_int_equal(chdir(before), 0);
}

/* As it was given, made absolute, counts as text too. */
static void test_given_name(void **state)
{
    char *alias = path_of(top, "given");
    char *file = path_of(alias, "folder/file");
    const char *relative;
    sp_error error;

    (void)state;
    assert_int_equal(symlink("inside", alias), 0);
    assert_false(sp_is_confined(file, NULL));
    assert_ok(sp_confine_to(alias, &error), &error);
    assert_true(sp_is_confined(file, &relative));
    assert_string_equal(relative, "folder/file");
    assert_ok(sp_confine_to(inside, &error), &error);
    sp_free(file);
    sp_free(alias);
}

/* The cache of Hugging Face: a snapshot's files are links to blobs. */
static void test_snapshot(void **state)
{
    static const char *const folders[] = {"hub",
                                          "hub/models--a--b",
                                          "hub/models--a--b/blobs",
                                          "hub/models--a--b/snapshots",
                                          "hub/models--a--b/snapshots/1",
                                          "hub/models--a--b/snapshots/1/sub"};
    static const char *const links[][2] = {{"../../blobs/x", "file"},
                                           {"../../../blobs/x", "sub/file"},
                                           {"../../../../secret", "out"},
                                           {"../../../blobs", "gone"}};
    sp_error error;
    char *hub = path_of(top, "hub");
    char *path = path_of(top, folders[4]);

    (void)state;
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        char *folder = path_of(top, folders[i]);

        assert_int_equal(mkdir(folder, 0700), 0);
        sp_free(folder);
    }
    for (size_t i = 0; i < sizeof links / sizeof *links; i++) {
        char *link = path_of(path, links[i][1]);

        assert_int_equal(symlink(links[i][0], link), 0);
        sp_free(link);
    }
    sp_test_write_file(hub, "models--a--b/blobs/x", "good", 4);
    for (size_t i = 3; i < 6; i++) { /* snapshots, the snapshot, a folder in it */
        static const char *const to_file[] = {"1/sub/file", "sub/file", "file"};
        char *confined = path_of(top, folders[i]);

        assert_ok(sp_confine_to(confined, &error), &error);
        if (system_has_openat2())
            assert_ok(read_inside(to_file[i - 3], &error), &error);
        sp_free(confined);
    }
    assert_ok(sp_confine_to(path, &error), &error);
    assert_int_equal(read_inside("out", &error), SP_ERR_INPUT);
    assert_true(read_inside("gone", &error) < 0);
    assert_int_equal(read_inside("../../blobs/x", &error), SP_ERR_INPUT);
    assert_int_equal(read_inside("sub/../../../blobs/x", &error), SP_ERR_INPUT);
    /* The cache as a whole is none of it: its links lead where they always do. */
    assert_ok(sp_confine_to(hub, &error), &error);
    if (system_has_openat2())
        assert_ok(read_inside("models--a--b/snapshots/1/file", &error), &error);
    assert_ok(sp_confine_to(inside, &error), &error);
    sp_free(path);
    sp_free(hub);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ways_in),      cmocka_unit_test(test_ways_out),
        cmocka_unit_test(test_reason),       cmocka_unit_test(test_elsewhere),
        cmocka_unit_test(test_no_directory), cmocka_unit_test(test_other_names),
        cmocka_unit_test(test_given_name),   cmocka_unit_test(test_snapshot),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
