#include "support/long_memory.h"

#include "base/alloc.h"
#include "base/file.h"
#include "base/half.h"
#include "support/shell.h"
#include "support/test.h"

#include <stdio.h>
#include <string.h>

#define FILE_NAME "model.safetensors"
#define LESS      5.0f /* of A_log: a decay of some 0.995 in place of 0.5 a row */

/* Where the header says that the data of the tensor begins whose name ends at `name`. */
static void find_data(const char *name, size_t *out_begin, size_t *out_end)
{
    const char *at = strstr(name, "\"data_offsets\"");
    const char *type = strstr(name, "\"BF16\"");

    assert_true(at && type && type < at);
    at = strchr(at, '[');
    assert_non_null(at);
    assert_int_equal(sscanf(at, "[%zu,%zu]", out_begin, out_end), 2);
}

/* Lowers each A_log of a safetensors file, and returns how many there were. */
static int32_t lower_decays(char *file, size_t bytes)
{
    uint64_t header_bytes;
    char *header;
    int32_t n = 0;

    assert_true(bytes > sizeof header_bytes);
    memcpy(&header_bytes, file, sizeof header_bytes);
    assert_true(header_bytes < bytes - sizeof header_bytes);
    header = sp_calloc(1, (size_t)header_bytes + 1);
    assert_non_null(header);
    memcpy(header, file + sizeof header_bytes, (size_t)header_bytes);
    for (const char *name = header; (name = strstr(name, ".A_log\"")); name++, n++) {
        size_t begin, end;
        uint16_t value;

        find_data(name, &begin, &end);
        assert_true(end <= bytes - sizeof header_bytes - header_bytes);
        for (size_t at = begin; at < end; at += sizeof value) {
            char *where = file + sizeof header_bytes + header_bytes + at;

            memcpy(&value, where, sizeof value);
            value = sp_f32_to_bf16(sp_bf16_to_f32(value) - LESS);
            memcpy(where, &value, sizeof value);
        }
    }
    sp_free(header);
    return n;
}

char *long_memory_copy(const char *fixture)
{
    char *directory = shell_copy_directory(fixture), *path = sp_path_join(directory, FILE_NAME);
    char *data;
    size_t bytes;
    sp_error error;

    assert_non_null(path);
    assert_ok(sp_file_read_all(path, 1 << 26, &data, &bytes, &error), &error);
    assert_true(lower_decays(data, bytes) > 0);
    sp_test_write_file(directory, FILE_NAME, data, bytes);
    sp_free(data);
    sp_free(path);
    return directory;
}
