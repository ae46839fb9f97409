/*
 * The index of a sharded checkpoint: every file that it names stays inside the folder, and every
 * tensor has one of them.
 */
#include "fuzz/target.h"

#include <sidepath/checkpoint.h>

#include <string.h>

static void check_file(const char *name)
{
    FUZZ_CHECK(name[0] != '/' && name[0] != '\0');
    for (const char *part = name; part; part = strchr(part, '/') ? strchr(part, '/') + 1 : NULL)
        FUZZ_CHECK(strcmp(part, "..") != 0 && strncmp(part, "../", 3) != 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    sp_shard_index *index = NULL;
    sp_error error;
    sp_status status = sp_shard_index_parse((const char *)data, bytes, "input", &index, &error);

    if (status != SP_OK) {
        FUZZ_CHECK(status < 0 && index == NULL && error.code[0] != '\0');
        return 0;
    }
    for (int32_t i = 0; i < sp_shard_index_n_files(index); i++) {
        check_file(sp_shard_index_file(index, i));
        if (i > 0)
            FUZZ_CHECK(strcmp(sp_shard_index_file(index, i - 1), sp_shard_index_file(index, i)) <
                       0);
    }
    for (size_t i = 0; i < sp_shard_index_n_tensors(index); i++) {
        int32_t file = -1;

        FUZZ_CHECK(sp_shard_index_tensor(index, i, &file) != NULL);
        FUZZ_CHECK(sp_shard_index_file(index, file) != NULL);
    }
    sp_shard_index_destroy(index);
    return 0;
}
