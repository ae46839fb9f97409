/*
 * shell.h: runs the sidepath binary as a user does, and builds model directories that are wrong in
 * one way.
 */
#ifndef SP_TEST_SUPPORT_SHELL_H
#define SP_TEST_SUPPORT_SHELL_H

#include "base/text.h"

#include <stdbool.h>

typedef struct shell_result {
    int exit_code; /* -1 when it died by a signal */
    sp_text out, err;
} shell_result;

/*
 * Runs "sidepath ARGUMENTS" (a shell command line) with `input` on standard input (NULL: empty).
 * The caller frees the result.
 */
shell_result shell_run(const char *input, const char *arguments, ...)
    __attribute__((format(printf, 2, 3)));
void shell_free(shell_result *result);

/* A fresh directory with copies of the files (not the folders) of another one. */
char *shell_copy_directory(const char *source);
void shell_remove_file(const char *directory, const char *name);
/* Replaces the first occurrence of `old` in a text file; a text that is not there fails the test.
 */
void shell_edit(const char *directory, const char *name, const char *old, const char *replacement);
void shell_truncate(const char *directory, const char *name, long bytes);
/* Size of a file in bytes. */
long shell_file_bytes(const char *directory, const char *name);

#endif
