#include "support/golden.h"

#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* cmocka.h wants these before it. */
#include <setjmp.h>

#include <cmocka.h>

static void *must_alloc(size_t bytes)
{
    void *memory = malloc(bytes ? bytes : 1);

    if (memory == NULL)
        fail_msg("golden: out of memory for %zu bytes", bytes);
    return memory;
}

static char *copy_text(const char *text)
{
    size_t bytes = strlen(text) + 1;
    char *copy = must_alloc(bytes);

    memcpy(copy, text, bytes);
    return copy;
}

static void must_read(FILE *stream, const char *path, uint64_t offset, void *out, size_t bytes)
{
    if (fseek(stream, (long)offset, SEEK_SET) != 0 || fread(out, 1, bytes, stream) != bytes)
        fail_msg("golden: %s: cannot read %zu bytes at %llu", path, bytes,
                 (unsigned long long)offset);
}

static size_t element_bytes(const char *dtype)
{
    static const struct {
        const char *name;
        size_t bytes;
    } types[] = {{"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"I64", 8},
                 {"I32", 4}, {"I16", 2}, {"I8", 1},  {"U8", 1},   {"BOOL", 1}};

    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
        if (strcmp(types[i].name, dtype) == 0)
            return types[i].bytes;
    fail_msg("golden: unknown dtype %s", dtype);
    return 0;
}

static void read_tensor(FILE *stream, const char *path, uint64_t data_begin, const char *name,
                        json_t *entry, golden_tensor *out)
{
    json_t *shape = json_object_get(entry, "shape");
    json_t *offsets = json_object_get(entry, "data_offsets");
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    uint64_t begin = (uint64_t)json_integer_value(json_array_get(offsets, 0));
    uint64_t end = (uint64_t)json_integer_value(json_array_get(offsets, 1));

    if (dtype == NULL || json_array_size(shape) > GOLDEN_DIMS_MAX)
        fail_msg("golden: %s: bad entry of %s", path, name);
    out->name = copy_text(name);
    snprintf(out->dtype, sizeof out->dtype, "%s", dtype);
    out->n_dims = (int)json_array_size(shape);
    out->n = 1;
    for (int i = 0; i < out->n_dims; i++) {
        out->shape[i] = json_integer_value(json_array_get(shape, (size_t)i));
        out->n *= out->shape[i];
    }
    out->bytes = (size_t)out->n * element_bytes(dtype);
    if (end - begin != out->bytes)
        fail_msg("golden: %s: %s has the wrong size", path, name);
    out->data = must_alloc(out->bytes);
    must_read(stream, path, data_begin + begin, out->data, out->bytes);
}

static json_t *read_header(FILE *stream, const char *path, uint64_t *out_bytes)
{
    uint8_t prefix[8];
    json_error_t json_error;
    json_t *header;
    char *text;

    must_read(stream, path, 0, prefix, sizeof prefix);
    *out_bytes = 0;
    for (int i = 7; i >= 0; i--)
        *out_bytes = *out_bytes << 8 | prefix[i];
    if (*out_bytes > (100u << 20))
        fail_msg("golden: %s: no safetensors file", path);
    text = must_alloc((size_t)*out_bytes);
    must_read(stream, path, 8, text, (size_t)*out_bytes);
    header = json_loadb(text, (size_t)*out_bytes, 0, &json_error);
    free(text);
    if (header == NULL)
        fail_msg("golden: %s: %s", path, json_error.text);
    return header;
}

void golden_path(const char *name, char *out_path, size_t bytes)
{
    const char *folder = getenv("SP_FIXTURES");

    if (name[0] == '/')
        snprintf(out_path, bytes, "%s", name);
    else
        snprintf(out_path, bytes, "%s/%s", folder != NULL ? folder : SP_TEST_FIXTURES, name);
}

golden *golden_open(const char *name)
{
    golden *file = must_alloc(sizeof *file);
    uint64_t header_bytes;
    char path[4096];
    const char *key;
    json_t *header, *entry;
    FILE *stream;

    golden_path(name, path, sizeof path);
    stream = fopen(path, "rb");
    if (stream == NULL)
        fail_msg("golden: cannot open %s", path);
    header = read_header(stream, path, &header_bytes);
    file->path = copy_text(path);
    file->tensors = must_alloc(json_object_size(header) * sizeof *file->tensors);
    file->n_tensors = 0;
    json_object_foreach(header, key, entry)
    {
        if (strcmp(key, "__metadata__") == 0)
            continue;
        read_tensor(stream, path, 8 + header_bytes, key, entry, &file->tensors[file->n_tensors]);
        file->n_tensors++;
    }
    json_decref(header);
    fclose(stream);
    return file;
}

void golden_close(golden *file)
{
    if (file == NULL)
        return;
    for (size_t i = 0; i < file->n_tensors; i++) {
        free(file->tensors[i].name);
        free(file->tensors[i].data);
    }
    free(file->tensors);
    free(file->path);
    free(file);
}

static const golden_tensor *find(const golden *file, const char *name)
{
    for (size_t i = 0; i < file->n_tensors; i++)
        if (strcmp(file->tensors[i].name, name) == 0)
            return &file->tensors[i];
    return NULL;
}

const golden_tensor *golden_find(const golden *file, const char *format, ...)
{
    char name[512];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(name, sizeof name, format, arguments);
    va_end(arguments);
    return find(file, name);
}

const golden_tensor *golden_get(const golden *file, const char *format, ...)
{
    const golden_tensor *tensor;
    char name[512];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(name, sizeof name, format, arguments);
    va_end(arguments);
    tensor = find(file, name);
    if (tensor == NULL)
        fail_msg("golden: %s has no tensor %s", file->path, name);
    return tensor;
}

/* (-1)^s * 1.m * 2^(e - bias), written out so that it owes nothing to base/half.h. */
static double f16_value(uint16_t bits)
{
    int exponent = bits >> 10 & 31;
    double mantissa = bits & 1023, value;

    if (exponent == 31)
        value = mantissa != 0 ? (double)NAN : (double)INFINITY;
    else if (exponent == 0)
        value = ldexp(mantissa, -24);
    else
        value = ldexp(1024 + mantissa, exponent - 25);
    return bits & 0x8000 ? -value : value;
}

double golden_value(const golden_tensor *tensor, int64_t index)
{
    uint16_t half;
    float single;

    if (strcmp(tensor->dtype, "F64") == 0)
        return ((const double *)tensor->data)[index];
    if (strcmp(tensor->dtype, "F32") == 0)
        return (double)((const float *)tensor->data)[index];
    memcpy(&half, (const char *)tensor->data + 2 * index, sizeof half);
    if (strcmp(tensor->dtype, "F16") == 0)
        return f16_value(half);
    if (strcmp(tensor->dtype, "BF16") != 0)
        fail_msg("golden: %s is %s, no float", tensor->name, tensor->dtype);
    memcpy(&single, &(uint32_t){(uint32_t)half << 16}, sizeof single);
    return (double)single;
}

static const void *typed(const golden_tensor *tensor, const char *dtype)
{
    if (strcmp(tensor->dtype, dtype) != 0)
        fail_msg("golden: %s is %s, not %s", tensor->name, tensor->dtype, dtype);
    return tensor->data;
}

const float *golden_f32(const golden_tensor *tensor)
{
    return typed(tensor, "F32");
}

const int32_t *golden_i32(const golden_tensor *tensor)
{
    return typed(tensor, "I32");
}

void golden_check_sums(const golden *file, const char *prefix, const float *logits, int32_t rows,
                       int32_t vocab, double error)
{
    const golden_tensor *of_rows = golden_get(file, "%ssum", prefix);
    const golden_tensor *of_squares = golden_get(file, "%ssumsq", prefix);
    const float *sums = golden_f32(of_rows), *squares = golden_f32(of_squares);

    assert_int_equal(of_rows->n, rows);
    assert_int_equal(of_squares->n, rows);
    for (int32_t row = 0; row < rows; row++, logits += vocab) {
        double sum = 0, square = 0;

        for (int32_t v = 0; v < vocab; v++) {
            sum += (double)logits[v];
            square += (double)logits[v] * (double)logits[v];
        }
        if (!(fabs(sum - (double)sums[row]) <= error * sqrt((double)vocab)) ||
            !(fabs(square - (double)squares[row]) <= 2 * error * sqrt(square) + error))
            fail_msg("%s: %s: sums %g and %g at row %lld, not %g and %g", file->path, prefix, sum,
                     square, (long long)row, (double)sums[row], (double)squares[row]);
    }
}
