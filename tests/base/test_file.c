/* file: what is opened and what is refused, files that change under the reader, atomic writing. */
#include "base/alloc.h"
#include "base/file.h"

#include "support/test.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define NOBODY 65534

static char *directory;

static char *in_directory(const char *name)
{
    char *path = sp_path_join(directory, name);

    assert_non_null(path);
    return path;
}

static size_t open_files(void)
{
    DIR *folder = opendir("/proc/self/fd");
    size_t n = 0;

    assert_non_null(folder);
    while (readdir(folder))
        n++;
    closedir(folder);
    return n;
}

static size_t entries(const char *path)
{
    DIR *folder = opendir(path);
    size_t n = 0;

    assert_non_null(folder);
    while (readdir(folder))
        n++;
    closedir(folder);
    return n - 2; /* . and .. */
}

static int make(void **state)
{
    (void)state;
    directory = sp_test_make_directory();
    return 0;
}

static int drop(void **state)
{
    (void)state;
    sp_test_remove_tree(directory);
    sp_free(directory);
    sp_alloc_fail_after(-1);
    return 0;
}

/* Expects `status` from every way of opening `name`, with nothing set and no file left open. */
static void check_refused(const char *name, sp_status status, const char *word)
{
    char *path = in_directory(name);
    size_t n_open = open_files();
    sp_file file = {-7, 77};
    char *data = (char *)&file;
    size_t bytes = 77;
    sp_mapping mapping = {&file, 77, -1};
    sp_error error;

    assert_int_equal(sp_file_open(path, &file, &error), status);
    assert_int_equal(file.fd, -7);
    assert_int_equal(file.bytes, 77);
    assert_int_equal(error.status, status);
    assert_non_null(strstr(error.text, word));
    assert_int_equal(sp_file_read_all(path, 1000, &data, &bytes, &error), status);
    assert_ptr_equal(data, &file);
    assert_int_equal(bytes, 77);
    assert_int_equal(sp_file_map(path, &mapping, &error), status);
    assert_ptr_equal(mapping.data, &file);
    assert_int_equal(mapping.bytes, 77);
    assert_int_equal(open_files(), n_open);
    assert_int_equal(sp_file_open(path, &file, NULL), status);
    sp_free(path);
}

static void refuses_what_is_no_file(void **state)
{
    char *path;

    (void)state;
    path = in_directory("folder");
    assert_int_equal(mkdir(path, 0755), 0);
    sp_free(path);
    check_refused("folder", SP_ERR_INPUT, "not a regular file");
    path = in_directory("fifo");
    assert_int_equal(mkfifo(path, 0644), 0);
    sp_free(path);
    check_refused("fifo", SP_ERR_INPUT, "not a regular file"); /* and does not wait for a writer */
    path = in_directory("socket");
    assert_int_equal(mknod(path, S_IFSOCK | 0644, 0), 0);
    sp_free(path);
    check_refused("socket", SP_ERR_INPUT, "not a regular file");
    path = in_directory("device");
    assert_int_equal(symlink("/dev/zero", path), 0);
    sp_free(path);
    check_refused("device", SP_ERR_INPUT, "not a regular file");
}

static void names_what_is_not_there(void **state)
{
    char *path = in_directory("dangling");
    char name[300];

    (void)state;
    check_refused("missing", SP_ERR_NOT_FOUND, "missing");
    assert_int_equal(symlink("nowhere", path), 0);
    sp_free(path);
    check_refused("dangling", SP_ERR_NOT_FOUND, "dangling");
    path = in_directory("loop");
    assert_int_equal(symlink("loop", path), 0);
    sp_free(path);
    check_refused("loop", SP_ERR_NOT_FOUND, "loop");
    sp_test_write_file(directory, "file", "x", 1);
    check_refused("file/below", SP_ERR_NOT_FOUND, "below");
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    check_refused(name, SP_ERR_NOT_FOUND, "nnn");
}

/* Root may read anything: it steps down for the moment. */
static void no_permission_is_an_io_error(void **state)
{
    char *path = in_directory("secret");
    bool root = geteuid() == 0;

    (void)state;
    sp_test_write_file(directory, "secret", "x", 1);
    assert_int_equal(chmod(path, 0), 0);
    assert_int_equal(chmod(directory, 0555), 0);
    if (root)
        assert_int_equal(seteuid(NOBODY), 0);
    check_refused("secret", SP_ERR_IO, "secret");
    sp_free(path);
    path = in_directory("new");
    assert_int_equal(sp_file_write_all(path, "x", 1, NULL), SP_ERR_IO);
    if (root)
        assert_int_equal(seteuid(0), 0);
    assert_int_equal(chmod(directory, 0755), 0);
    assert_int_equal(entries(directory), 1);
    sp_free(path);
}

static void reads_what_is_there(void **state)
{
    char *path = in_directory("data");
    char part[4] = "....";
    char *data;
    size_t bytes;
    sp_file file;
    sp_mapping mapping;
    sp_error error;

    (void)state;
    sp_test_write_file(directory, "data", "ab\0cdef", 7);
    assert_ok(sp_file_open(path, &file, &error), &error);
    assert_int_equal(file.bytes, 7);
    assert_ok(sp_file_read(&file, 3, part, 3, &error), &error);
    assert_memory_equal(part, "cde.", 4);
    assert_ok(sp_file_read(&file, 0, part, 4, &error), &error);
    assert_memory_equal(part, "ab\0c", 4);
    assert_ok(sp_file_read(&file, 7, part, 0, &error), &error);
    sp_file_close(&file);
    assert_int_equal(file.fd, -1);
    sp_file_close(&file); /* twice is harmless */
    assert_ok(sp_file_read_all(path, 7, &data, &bytes, &error), &error);
    assert_int_equal(bytes, 7);
    assert_memory_equal(data, "ab\0cdef\0", 8);
    sp_free(data);
    assert_ok(sp_file_map(path, &mapping, &error), &error);
    assert_int_equal(mapping.bytes, 7);
    assert_memory_equal(mapping.data, "ab\0cdef", 7);
    sp_file_unmap(&mapping);
    assert_null(mapping.data);
    sp_file_unmap(&mapping);
    sp_free(path);
}

static void empty_files_are_files(void **state)
{
    char *path = in_directory("empty");
    char *data;
    size_t bytes = 9;
    sp_mapping mapping = {&path, 9, -1};
    sp_error error;

    (void)state;
    sp_test_write_file(directory, "empty", "", 0);
    assert_ok(sp_file_read_all(path, 0, &data, &bytes, &error), &error);
    assert_int_equal(bytes, 0);
    assert_string_equal(data, "");
    sp_free(data);
    assert_ok(sp_file_map(path, &mapping, &error), &error);
    assert_null(mapping.data);
    assert_int_equal(mapping.bytes, 0);
    sp_file_unmap(&mapping);
    sp_free(path);
}

static void a_limit_is_kept(void **state)
{
    char *path = in_directory("data");
    char *data = NULL;
    size_t bytes;
    sp_error error;

    (void)state;
    sp_test_write_file(directory, "data", "1234567", 7);
    assert_int_equal(sp_file_read_all(path, 6, &data, &bytes, &error), SP_ERR_TOO_LARGE);
    assert_null(data);
    assert_string_equal(error.subject, path);
    assert_non_null(strstr(error.text, "has 7 bytes; at most 6"));
    sp_free(path);
}

static void a_shrinking_file_is_an_error(void **state)
{
    char *path = in_directory("data");
    char buffer[16];
    sp_file file;
    sp_error error;

    (void)state;
    sp_test_write_file(directory, "data", "0123456789", 10);
    assert_ok(sp_file_open(path, &file, &error), &error);
    assert_int_equal(truncate(path, 4), 0);
    assert_int_equal(sp_file_read(&file, 2, buffer, 8, &error), SP_ERR_TRUNCATED);
    assert_int_equal(error.position, 4);
    assert_non_null(strstr(error.text, "ends at byte 4, 6 bytes too early"));
    assert_int_equal(sp_file_read(&file, 9, buffer, 1, &error), SP_ERR_TRUNCATED);
    assert_int_equal(error.position, 9);
    assert_int_equal(sp_file_read(&file, UINT64_MAX, buffer, 1, &error), SP_ERR_IO);
    sp_file_close(&file);
    assert_int_equal(sp_file_read(&file, 0, buffer, 1, NULL), SP_ERR_IO);
    sp_free(path);
}

/* A sysfs file says 4096 bytes and has fewer: as if it had shrunk after it was opened. */
static void read_all_notices_a_short_file(void **state)
{
    static const char path[] = "/sys/kernel/mm/transparent_hugepage/enabled";
    struct stat info;
    char *data = NULL;
    size_t blocks = sp_alloc_blocks();
    size_t bytes;
    sp_error error;

    (void)state;
    if (stat(path, &info) != 0 || info.st_size != 4096)
        skip();
    assert_int_equal(sp_file_read_all(path, 5000, &data, &bytes, &error), SP_ERR_TRUNCATED);
    assert_null(data);
    assert_string_equal(error.subject, path);
    assert_int_equal(sp_alloc_blocks(), blocks);
}

static void check_content(const char *path, const char *want)
{
    char *data;
    size_t bytes;
    sp_error error;

    assert_ok(sp_file_read_all(path, 100000, &data, &bytes, &error), &error);
    assert_string_equal(data, want);
    sp_free(data);
}

static void writes_whole_files(void **state)
{
    char *path = in_directory("out");
    struct stat info;
    mode_t old_mask = umask(027);
    sp_error error;

    (void)state;
    assert_ok(sp_file_write_all(path, "first", 5, &error), &error);
    check_content(path, "first");
    assert_int_equal(stat(path, &info), 0);
    assert_int_equal(info.st_mode & 0777, 0640); /* as the umask says */
    assert_ok(sp_file_write_all(path, "second", 6, &error), &error);
    check_content(path, "second");
    assert_ok(sp_file_write_all(path, "", 0, &error), &error);
    check_content(path, "");
    assert_int_equal(entries(directory), 1);
    umask(old_mask);
    sp_free(path);
}

/* The file-size limit stops the write half-way, as a full disk would. */
static void a_failed_write_leaves_the_old_file(void **state)
{
    static char large[10000];
    char *path = in_directory("out");
    size_t n_open = open_files();
    struct rlimit old_limit, limit;
    void (*old_handler)(int) = signal(SIGXFSZ, SIG_IGN);
    sp_status status;
    sp_error error;

    (void)state;
    assert_ok(sp_file_write_all(path, "old", 3, &error), &error);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old_limit), 0);
    limit = old_limit;
    limit.rlim_cur = 4096;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    status = sp_file_write_all(path, large, sizeof large, &error);
    setrlimit(RLIMIT_FSIZE, &old_limit);
    signal(SIGXFSZ, old_handler);
    assert_int_equal(status, SP_ERR_IO);
    assert_string_equal(error.subject, path);
    check_content(path, "old");
    assert_int_equal(entries(directory), 1);
    assert_int_equal(open_files(), n_open);
    sp_free(path);
}

static void writing_spares_what_is_no_file(void **state)
{
    char *path = in_directory("device");
    struct stat info;
    sp_error error;

    (void)state;
    assert_int_equal(symlink("/dev/null", path), 0);
    assert_int_equal(sp_file_write_all(path, "x", 1, &error), SP_ERR_INPUT);
    assert_int_equal(lstat(path, &info), 0);
    assert_true(S_ISLNK(info.st_mode));
    assert_int_equal(sp_file_write_all(directory, "x", 1, &error), SP_ERR_INPUT);
    assert_int_equal(entries(directory), 1);
    sp_free(path);
    path = in_directory("missing/out");
    assert_int_equal(sp_file_write_all(path, "x", 1, &error), SP_ERR_NOT_FOUND);
    assert_string_equal(error.subject, path);
    sp_free(path);
}

static void memory_may_run_out(void **state)
{
    char *path = in_directory("data");
    size_t blocks = sp_alloc_blocks();
    char *data = NULL;
    size_t bytes;
    sp_error error;

    (void)state;
    sp_test_write_file(directory, "data", "x", 1);
    blocks = sp_alloc_blocks();
    sp_alloc_fail_after(0);
    assert_int_equal(sp_file_read_all(path, 10, &data, &bytes, &error), SP_ERR_MEMORY);
    sp_alloc_fail_after(0);
    assert_int_equal(sp_file_write_all(path, "y", 1, &error), SP_ERR_MEMORY);
    sp_alloc_fail_after(0);
    assert_null(sp_path_join("a", "b"));
    assert_null(data);
    assert_int_equal(sp_alloc_blocks(), blocks);
    check_content(path, "x");
    sp_free(path);
}

static void check_join(const char *a, const char *b, const char *want)
{
    char *path = sp_path_join(a, b);

    assert_string_equal(path, want);
    sp_free(path);
}

static void joins_paths(void **state)
{
    (void)state;
    check_join("a", "b", "a/b");
    check_join("a/", "b", "a/b");
    check_join("/", "b", "/b");
    check_join("", "b", "b");
    check_join("a", "", "a/");
}

static void tells_directories(void **state)
{
    char *path = in_directory("file");

    (void)state;
    assert_true(sp_path_is_directory(directory));
    assert_true(sp_path_exists(directory));
    assert_false(sp_path_exists(path));
    assert_false(sp_path_is_directory(path));
    sp_test_write_file(directory, "file", "", 0);
    assert_true(sp_path_exists(path));
    assert_false(sp_path_is_directory(path));
    sp_free(path);
}

/* A long path is shown by its last parts; one name that is longer still by its end. */
static void shows_the_end_of_a_long_path(void **state)
{
    char path[600];

    (void)state;
    assert_string_equal(sp_path_tail("a/b"), "a/b");
    assert_string_equal(sp_path_tail(""), "");
    memset(path, 'x', sizeof path - 1);
    path[sizeof path - 1] = '\0';
    assert_int_equal(strlen(sp_path_tail(path)), 200);
    path[200] = '\0';
    assert_ptr_equal(sp_path_tail(path), path);
    path[200] = 'x';
    memcpy(path + 450, "/dir/file.json", 15);
    assert_string_equal(sp_path_tail(path), "dir/file.json");
    path[300] = '/'; /* fits, with what is behind it */
    assert_ptr_equal(sp_path_tail(path), path + 301);
    memset(path, 'x', sizeof path - 1);
    path[598] = '/';
    assert_int_equal(strlen(sp_path_tail(path)), 200);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, make, drop)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(refuses_what_is_no_file),
        TEST(names_what_is_not_there),
        TEST(no_permission_is_an_io_error),
        TEST(reads_what_is_there),
        TEST(empty_files_are_files),
        TEST(a_limit_is_kept),
        TEST(a_shrinking_file_is_an_error),
        TEST(read_all_notices_a_short_file),
        TEST(writes_whole_files),
        TEST(a_failed_write_leaves_the_old_file),
        TEST(writing_spares_what_is_no_file),
        TEST(memory_may_run_out),
        TEST(joins_paths),
        TEST(tells_directories),
        TEST(shows_the_end_of_a_long_path),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
