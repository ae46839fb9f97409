/* Files that shrink while they are mapped: the fault ends the program by name, or is survived. */
#include "support/test.h"

#include "base/alloc.h"
#include "base/file.h"
#include "base/mapped.h"

#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define FILE_BYTES 65536

typedef struct scene {
    char *directory, *path;
    sp_mapping mapping;
} scene;

static scene make_scene(void)
{
    scene made = {.directory = sp_test_make_directory()};
    char *data = sp_malloc(FILE_BYTES);
    sp_error error;

    made.path = sp_path_join(made.directory, "weights");
    memset(data, 7, FILE_BYTES);
    sp_test_write_file(made.directory, "weights", data, FILE_BYTES);
    sp_free(data);
    assert_ok(sp_file_map(made.path, &made.mapping, &error), &error);
    assert_true(made.mapping.entry >= 0);
    return made;
}

static void free_scene(scene *made)
{
    sp_file_unmap(&made->mapping);
    sp_test_remove_tree(made->directory);
    sp_free(made->path);
    sp_free(made->directory);
}

static int byte_at(const scene *made, size_t at)
{
    return ((const volatile unsigned char *)made->mapping.data)[at];
}

/* What a child wrote on its standard error while it shrank and read the file; its end. */
static int run_child(scene *made, sp_fault fault, char *out_said, size_t bytes)
{
    int fds[2], ended = 0;
    size_t at = 0;
    ssize_t n;
    pid_t child;

    assert_int_equal(pipe(fds), 0);
    child = fork();
    if (child == 0) {
        bool right;

        dup2(fds[1], STDERR_FILENO);
        sp_mapped_handle_faults(fault);
        right = byte_at(made, FILE_BYTES - 1) == 7 && truncate(made->path, 4096) == 0 &&
                byte_at(made, 0) == 7 && !sp_mapped_has_faulted(made->mapping.entry) &&
                byte_at(made, FILE_BYTES - 1) == 0 && byte_at(made, 0) == 0 &&
                sp_mapped_has_faulted(made->mapping.entry);
        _exit(right ? 42 : 1);
    }
    close(fds[1]);
    while (at + 1 < bytes && (n = read(fds[0], out_said + at, bytes - 1 - at)) > 0)
        at += (size_t)n; /* it is written in pieces */
    out_said[at] = '\0';
    close(fds[0]);
    assert_int_equal(waitpid(child, &ended, 0), child);
    return ended;
}

static void test_a_fault_is_named(void **state)
{
    scene made = make_scene();
    char said[1024];
    int ended = run_child(&made, SP_FAULT_ENDS, said, sizeof said);

    (void)state;
    assert_true(WIFSIGNALED(ended));
    assert_int_equal(WTERMSIG(ended), SIGBUS);
    assert_non_null(strstr(said, made.path));
    assert_non_null(strstr(said, "shorter"));
    free_scene(&made);
}

static void test_a_fault_is_survived(void **state)
{
    scene made = make_scene();
    char said[1024];
    int ended = run_child(&made, SP_FAULT_SURVIVES, said, sizeof said);

    (void)state;
    assert_true(WIFEXITED(ended));
    assert_int_equal(WEXITSTATUS(ended), 42);
    assert_string_equal(said, "");
    free_scene(&made);
}

/* Places are used again, and when all are taken a file is mapped without one. */
static void test_places(void **state)
{
    static const char byte;
    int32_t entries[SP_MAPPED_MAX];
    int32_t first = sp_mapped_add(&byte, 1, "a");

    (void)state;
    assert_true(first >= 0);
    sp_mapped_remove(first);
    for (int32_t i = 0; i < SP_MAPPED_MAX; i++)
        entries[i] = sp_mapped_add(&byte, 1, "a");
    assert_int_equal(entries[0], first);
    assert_int_equal(sp_mapped_add(&byte, 1, "b"), -1);
    assert_false(sp_mapped_has_faulted(-1));
    for (int32_t i = 0; i < SP_MAPPED_MAX; i++)
        sp_mapped_remove(entries[i]);
    sp_mapped_remove(-1);
    assert_int_equal(sp_mapped_add(NULL, 0, "empty"), -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_fault_is_named),
        cmocka_unit_test(test_a_fault_is_survived),
        cmocka_unit_test(test_places),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
