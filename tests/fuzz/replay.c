/*
 * replay.c: runs a fuzz target on the files of a folder without libFuzzer: each file whole, cut at
 * up to 256 places, and with up to 256 single bytes changed. Every input lies in a block of exactly
 * its size, so that a sanitizer sees a read past its end.
 *     replay_fuzz_<name> FOLDER
 */
#include "fuzz/target.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define VARIANTS_MAX 256

/* A target may keep its input until it returns, so each call gets a fresh copy. */
static void run_copy(const uint8_t *data, size_t bytes, size_t changed_at, uint8_t change)
{
    uint8_t *copy = malloc(bytes ? bytes : 1);

    if (!copy)
        abort();
    memcpy(copy, data, bytes);
    if (changed_at < bytes)
        copy[changed_at] ^= change;
    LLVMFuzzerTestOneInput(copy, bytes);
    free(copy);
}

static void run_variants(const uint8_t *data, size_t bytes)
{
    static const uint8_t changes[] = {0x01, 0x20, 0x80, 0xff};
    size_t step = bytes / VARIANTS_MAX + 1;

    run_copy(data, bytes, bytes, 0);
    for (size_t i = 0; i < bytes; i += step) {
        run_copy(data, i, i, 0);
        run_copy(data, bytes, i, changes[(i / step) % sizeof changes]);
    }
}

static int run_file(const char *folder, const char *name)
{
    char path[4096];
    FILE *file;
    uint8_t *data;
    long bytes;
    int n = snprintf(path, sizeof path, "%s/%s", folder, name);

    if (n < 0 || (size_t)n >= sizeof path)
        return -1;
    file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END) != 0 || (bytes = ftell(file)) < 0) {
        perror(path);
        return -1;
    }
    rewind(file);
    data = malloc((size_t)bytes + 1);
    if (!data || fread(data, 1, (size_t)bytes, file) != (size_t)bytes) {
        perror(path);
        return -1;
    }
    fclose(file);
    run_variants(data, (size_t)bytes);
    free(data);
    return 0;
}

int main(int argc, char **argv)
{
    DIR *folder = argc == 2 ? opendir(argv[1]) : NULL;
    struct dirent *entry;
    int n = 0;

    if (!folder) {
        fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
        return 2;
    }
    while ((entry = readdir(folder)) != NULL) {
        if (entry->d_name[0] == '.')
            continue;
        if (run_file(argv[1], entry->d_name) != 0)
            return 1;
        n++;
    }
    closedir(folder);
    printf("%d seeds\n", n);
    return n > 0 ? 0 : 1;
}
