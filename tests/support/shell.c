#include "support/shell.h"

#include "base/alloc.h"
#include "base/file.h"
#include "support/test.h"

#include <dirent.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define COMMAND_BYTES 16384

static void read_into(const char *directory, const char *name, sp_text *text)
{
    char *path = sp_path_join(directory, name);
    char *data;
    size_t bytes;
    sp_error error;

    assert_ok(sp_file_read_all(path, (size_t)1 << 30, &data, &bytes, &error), &error);
    sp_text_add_bytes(text, data, bytes);
    sp_free(data);
    sp_free(path);
}

shell_result shell_run(const char *input, const char *arguments, ...)
{
    char command[COMMAND_BYTES];
    char *directory = sp_test_make_directory();
    shell_result result = {.exit_code = -1};
    va_list list;
    int n, status;

    sp_test_write_file(directory, "in", input ? input : "", input ? strlen(input) : 0);
    n = snprintf(command, sizeof command, "%s/sidepath ", SP_TEST_BINARY_DIR);
    va_start(list, arguments);
    n += vsnprintf(command + n, sizeof command - (size_t)n, arguments, list);
    va_end(list);
    assert_true((size_t)n < sizeof command - 200);
    snprintf(command + n, sizeof command - (size_t)n, " <%s/in >%s/out 2>%s/err", directory,
             directory, directory);
    status = system(command);
    if (status != -1 && WIFEXITED(status))
        result.exit_code = WEXITSTATUS(status);
    read_into(directory, "out", &result.out);
    read_into(directory, "err", &result.err);
    sp_test_remove_tree(directory);
    sp_free(directory);
    return result;
}

void shell_free(shell_result *result)
{
    sp_text_free(&result->out);
    sp_text_free(&result->err);
}

char *shell_copy_directory(const char *source)
{
    char *target = sp_test_make_directory();
    DIR *directory = opendir(source);
    const struct dirent *entry;

    assert_non_null(directory);
    while ((entry = readdir(directory))) {
        char *path = sp_path_join(source, entry->d_name);

        if (!sp_path_is_directory(path)) {
            sp_text text = {0};

            read_into(source, entry->d_name, &text);
            sp_test_write_file(target, entry->d_name, text.data, text.bytes);
            sp_text_free(&text);
        }
        sp_free(path);
    }
    closedir(directory);
    return target;
}

void shell_remove_file(const char *directory, const char *name)
{
    char *path = sp_path_join(directory, name);

    assert_int_equal(unlink(path), 0);
    sp_free(path);
}

void shell_edit(const char *directory, const char *name, const char *old, const char *replacement)
{
    sp_text text = {0}, edited = {0};
    char *at;

    read_into(directory, name, &text);
    at = memmem(text.data, text.bytes, old, strlen(old));
    assert_non_null(at);
    sp_text_add_bytes(&edited, text.data, (size_t)(at - text.data));
    sp_text_add(&edited, replacement);
    at += strlen(old);
    sp_text_add_bytes(&edited, at, text.bytes - (size_t)(at - text.data));
    sp_test_write_file(directory, name, edited.data, edited.bytes);
    sp_text_free(&text);
    sp_text_free(&edited);
}

void shell_truncate(const char *directory, const char *name, long bytes)
{
    char *path = sp_path_join(directory, name);

    assert_int_equal(truncate(path, bytes), 0);
    sp_free(path);
}

long shell_file_bytes(const char *directory, const char *name)
{
    char *path = sp_path_join(directory, name);
    struct stat info;

    assert_int_equal(stat(path, &info), 0);
    sp_free(path);
    return (long)info.st_size;
}
