#include "support/test.h"

#include "base/alloc.h"
#include "base/file.h"

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

uint64_t sp_test_next(sp_test_random *random)
{
    uint64_t z = (random->state += 0x9e3779b97f4a7c15u);

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

uint32_t sp_test_below(sp_test_random *random, uint32_t n)
{
    return (uint32_t)((sp_test_next(random) >> 32) * n >> 32);
}

float sp_test_float(sp_test_random *random)
{
    /* An odd numerator over 2^23: exact in FP32 and never zero. */
    int32_t numerator = (int32_t)(sp_test_next(random) >> 41) * 2 + 1 - (1 << 23);

    return (float)numerator * 0x1p-23f;
}

void sp_test_ok(sp_status status, const sp_error *error, const char *file, int line)
{
    if (status == SP_OK)
        return;
    print_error("%s: %s\n", sp_status_name(status), error ? error->text : "");
    _fail(file, line);
}

char *sp_test_make_directory(void)
{
    char path[] = SP_TEST_BINARY_DIR "/tmp.XXXXXX";

    if (!mkdtemp(path)) {
        perror(path);
        abort();
    }
    return sp_strdup(path);
}

static int remove_one(const char *path, const struct stat *info, int kind, struct FTW *walk)
{
    (void)info;
    (void)kind;
    (void)walk;
    return remove(path);
}

void sp_test_remove_tree(const char *path)
{
    nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

void sp_test_write_file(const char *directory, const char *name, const void *data, size_t bytes)
{
    char *path = sp_path_join(directory, name);
    FILE *file = fopen(path, "wb");

    if (!file || fwrite(data, 1, bytes, file) != bytes || fclose(file) != 0) {
        perror(path);
        abort();
    }
    sp_free(path);
}
