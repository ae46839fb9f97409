/*
 * tests/support: what the test programs share. test.h brings cmocka with the headers that it needs
 * and the small helpers that nearly every test uses.
 */
#ifndef SP_TEST_SUPPORT_TEST_H
#define SP_TEST_SUPPORT_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <sidepath/status.h>

/* A seeded generator for test data: SplitMix64. */
typedef struct sp_test_random {
    uint64_t state;
} sp_test_random;

uint64_t sp_test_next(sp_test_random *random);
/* Uniform in [0, n). */
uint32_t sp_test_below(sp_test_random *random, uint32_t n);
/* Uniform in (-1, 1), never zero. */
float sp_test_float(sp_test_random *random);

/* Fails the test with the error's text when status is not SP_OK. */
void sp_test_ok(sp_status status, const sp_error *error, const char *file, int line);
#define assert_ok(status, error) sp_test_ok((status), (error), __FILE__, __LINE__)

/* A fresh empty directory under the build tree, removed by sp_test_remove_tree. */
char *sp_test_make_directory(void); /* owned by the caller: sp_free */
void sp_test_remove_tree(const char *path);
void sp_test_write_file(const char *directory, const char *name, const void *data, size_t bytes);

#endif
