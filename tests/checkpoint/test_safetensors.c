/*
 * The header parser: against an independent reader on every fixture, and on headers written here
 * byte by byte, with the position that each failure must name.
 */
#include "support/golden.h"
#include "support/test.h"

#include "base/alloc.h"
#include "base/file.h"

#include <sidepath/checkpoint.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A file in memory: length field, header text, `data_bytes` zero bytes. */
typedef struct image {
    unsigned char *bytes;
    size_t n;
} image;

static image make(const char *header, size_t header_bytes, size_t data_bytes)
{
    image made = {.n = 8 + header_bytes + data_bytes};

    made.bytes = calloc(1, made.n);
    assert_non_null(made.bytes);
    for (int i = 0; i < 8; i++)
        made.bytes[i] = (unsigned char)((uint64_t)header_bytes >> (8 * i));
    memcpy(made.bytes + 8, header, header_bytes);
    return made;
}

static sp_status parse_text(const char *header, size_t data_bytes, sp_safetensors **out,
                            sp_error *error)
{
    image made = make(header, strlen(header), data_bytes);
    sp_status status = sp_safetensors_parse(made.bytes, made.n, made.n, "f", out, error);

    free(made.bytes);
    return status;
}

static void lists_tensors_by_name(void **state)
{
    const char *header =
        " {\"z\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},\n"
        "\"__metadata__\":{\"format\":\"pt\"},"
        "\"a\\u0062\\\"\":{\"data_offsets\":[24,26],\"shape\":[],\"dtype\":\"BF16\"},"
        "\"none\":{\"dtype\":\"I64\",\"shape\":[4,0],\"data_offsets\":[24,24]},"
        "\"c\":{\"dtype\":\"F6_E2M3\",\"shape\":[4],\"data_offsets\":[26,29]}}   ";
    sp_safetensors *file;
    const sp_tensor *tensor;
    sp_dtype dtype;
    sp_error error;

    (void)state;
    header++; /* the brace must come first */
    assert_ok(parse_text(header, 29, &file, &error), &error);
    assert_int_equal(sp_safetensors_n_tensors(file), 4);
    assert_string_equal(sp_safetensors_at(file, 0)->name, "ab\"");
    assert_string_equal(sp_safetensors_at(file, 1)->name, "c");
    assert_string_equal(sp_safetensors_at(file, 2)->name, "none");
    assert_string_equal(sp_safetensors_at(file, 3)->name, "z");
    assert_null(sp_safetensors_at(file, 4));
    tensor = sp_safetensors_find(file, "z");
    assert_int_equal(tensor->type, SP_TENSOR_F32);
    assert_int_equal(tensor->struct_bytes, sizeof *tensor);
    assert_int_equal(tensor->n_dims, 2);
    assert_int_equal(tensor->dims[0], 2);
    assert_int_equal(tensor->dims[1], 3);
    assert_int_equal(tensor->bytes, 24);
    assert_int_equal(tensor->offset_bytes, 8 + strlen(header));
    assert_int_equal(sp_safetensors_find(file, "ab\"")->n_dims, 0);
    assert_int_equal(sp_safetensors_find(file, "ab\"")->bytes, 2);
    assert_int_equal(sp_safetensors_find(file, "none")->bytes, 0);
    assert_null(sp_safetensors_find(file, "zz"));
    assert_true(sp_tensor_type_dtype(SP_TENSOR_F16, &dtype));
    assert_int_equal(dtype, SP_DTYPE_F16);
    assert_false(sp_tensor_type_dtype(SP_TENSOR_I16, &dtype));
    assert_string_equal(sp_tensor_type_name(SP_TENSOR_F8_E4M3), "F8_E4M3");
    sp_safetensors_destroy(file);
}

#define ENTRY(name, type, shape, begin, end) \
    "\"" name "\":{\"dtype\":\"" type "\",\"shape\":" shape ",\"data_offsets\":[" begin "," end "]}"

static const struct {
    const char *header;
    size_t data_bytes;
    const char *code;
    const char *subject;
    int position; /* -2: not checked */
} bad_headers[] = {
    {"  ", 0, "header-malformed", "f", 8},
    {"[]", 0, "header-malformed", "f", 8},
    {" {}", 0, "header-malformed", "f", 8},
    {"{}x", 0, "header-malformed", "f", 10},
    {"{} {", 0, "header-malformed", "f", 11},
    {"{\"a\"}", 0, "header-malformed", "f", 12},
    {"{\"a\":3}", 0, "header-malformed", "a", 9},
    {"{\"a\":{}}", 0, "header-malformed", "a", 9},
    {"{a:{}}", 0, "header-malformed", "f", 9},
    {"{\"a\":{", 0, "header-malformed", "f", 13},
    {"{\"a", 0, "header-malformed", "f", 9},
    {"{\"a\\", 0, "header-malformed", "f", 9},
    {"{\"a\":{]}", 0, "header-malformed", "f", -2},
    {"{\"\t\":{}}", 0, "header-malformed", "f", 10},
    {"{\"\xc0\x80\":{}}", 0, "header-malformed", "f", 9},
    {"{\"\\u0000\":{}}", 0, "header-malformed", "f", -2},
    {"{\"\\ud800\":{}}", 0, "header-malformed", "f", -2},
    {"{" ENTRY("a", "F32", "[1]", "0", "4") ",}", 4, "header-malformed", "f", 62},
    {"{" ENTRY("a", "F32", "[1]", "0", "4") " " ENTRY("b", "F32", "[1]", "4", "8") "}", 8,
     "header-malformed", "f", 62},
    {"{" ENTRY("a", "F33", "[1]", "0", "4") "}", 4, "unsupported-dtype", "a", 9},
    {"{" ENTRY("a", "F32", "[2]", "0", "4") "}", 4, "header-malformed", "a", 9},
    {"{" ENTRY("a", "F32", "[1]", "4", "0") "}", 4, "header-malformed", "a", 9},
    {"{" ENTRY("a", "F32", "[1]", "-4", "0") "}", 4, "header-malformed", "a", 9},
    {"{" ENTRY("a", "F32", "[1]", "0.0", "4") "}", 4, "header-malformed", "a", 9},
    {"{" ENTRY("a", "F32", "[1]", "0", "4,8") "}", 4, "header-malformed", "a", 9},
    {"{" ENTRY("a", "F32", "[-1]", "0", "4") "}", 4, "header-malformed", "a", 9},
    {"{" ENTRY("a", "F32", "1", "0", "4") "}", 4, "header-malformed", "a", 9},
    {"{" ENTRY("a", "F32", "[1,1,1,1,1,1,1,1,1]", "0", "4") "}", 4, "header-malformed", "a", 9},
    {"{" ENTRY("a", "F32", "[4294967296,4294967296]", "0", "4") "}", 4, "header-malformed", "a", 9},
    {"{" ENTRY("a", "F4", "[3]", "0", "1") "}", 1, "header-malformed", "a", 9},
    {"{" ENTRY("a", "F32", "[1]", "9223372036854775807", "9223372036854775811") "}", 4,
     "header-malformed", "f", -2},
    {"{" ENTRY("a", "F32", "[288230376151711743]", "0", "1152921504606846972") "}", 4, "truncated",
     "a", -2},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"x\":1}}", 4,
     "header-malformed", "a", 9},
    {"{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
     "duplicate-key", "f", -2},
    {"{" ENTRY("a", "F32", "[1]", "0", "4") "," ENTRY("a", "F32", "[1]", "4", "8") "}", 8,
     "duplicate-key", "a", 62},
    {"{" ENTRY("a", "F32", "[1]", "0", "4") "," ENTRY("\\u0061", "F32", "[1]", "4", "8") "}", 8,
     "duplicate-key", "a", 62},
    {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "duplicate-key", "__metadata__", 27},
    {"{\"__metadata__\":{\"a\":1}}", 0, "header-malformed", "__metadata__", 9},
    /* An entry has 52 bytes, so that the data begins at byte 8 + 1 + 52 + 1 + 52 + 1. */
    {"{" ENTRY("a", "F32", "[1]", "0", "4") "," ENTRY("b", "F32", "[1]", "3", "7") "}", 7,
     "header-overlap", "b", 118},
    {"{" ENTRY("a", "F32", "[1]", "0", "4") "," ENTRY("b", "F32", "[1]", "0", "4") "}", 4,
     "header-overlap", "b", 115},
    {"{" ENTRY("a", "F32", "[1]", "0", "4") "," ENTRY("b", "F32", "[1]", "5", "9") "}", 9,
     "header-malformed", "b", 119},
    {"{" ENTRY("a", "F32", "[1]", "0", "4") "," ENTRY("b", "F32", "[1]", "4", "8") "}", 9,
     "header-malformed", "f", 123},
    {"{" ENTRY("a", "F32", "[1]", "0", "4") "," ENTRY("b", "F32", "[1]", "4", "8") "}", 7,
     "truncated", "b", 122},
    {"{}", 1, "header-malformed", "f", 10},
};

static void refused_headers(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bad_headers / sizeof *bad_headers; i++) {
        sp_safetensors *file = NULL;
        sp_error error;
        sp_status status =
            parse_text(bad_headers[i].header, bad_headers[i].data_bytes, &file, &error);

        if (status == SP_OK || strcmp(error.code, bad_headers[i].code) != 0 ||
            strcmp(error.subject, bad_headers[i].subject) != 0 ||
            (bad_headers[i].position != -2 && error.position != bad_headers[i].position))
            fail_msg("%s: %s, subject \"%s\", position %lld: %s", bad_headers[i].header, error.code,
                     error.subject, (long long)error.position, error.text);
        assert_null(file);
    }
}

static void length_fields(void **state)
{
    static const struct {
        unsigned char bytes[16];
        size_t n;
        const char *code;
        const char *word; /* of the text; NULL: any */
    } cases[] = {
        {"", 0, "truncated", "0 bytes"},
        {"{\"r\": 8, \"x\": 1}", 16, "header-malformed", "JSON text"},
        {"<!DOCTYPE html>", 15, "header-malformed", "web page"},
        {"\x02\0\0\0\0\0\0", 7, "truncated", NULL},
        {"\0\0\0\0\0\0\0\0", 8, "header-malformed", NULL},
        {"\x01\0\0\0\0\0\0\0{", 9, "header-malformed", NULL},
        {"\x02\0\0\0\0\0\0\0", 8, "truncated", NULL},
        {"\x02\0\0\0\0\0\0\0{", 9, "truncated", NULL},
        {"\0\0\0\0\0\0\0\x40{}", 10, "header-malformed", NULL},
        {"\xff\xff\xff\xff\xff\xff\xff\x7f{}", 10, "header-malformed", NULL},
        {"\xff\xff\xff\xff\xff\xff\xff\xff{}", 10, "header-malformed", NULL},
        {"\x01\xe1\xf5\x05\0\0\0\0{}", 10, "header-malformed", NULL}, /* 100,000,001 */
        {"\x00\xe1\xf5\x05\0\0\0\0{}", 10, "truncated", NULL},        /* 100,000,000 */
        {"version https://", 16, "lfs-pointer", NULL},
        {"PK\3\4\0\0\x08\x08\0\0", 10, "pickle-refused", NULL},
        {"\x80\2}q\0X\5\0\0\0", 10, "pickle-refused", NULL},
    };

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sp_safetensors *file = NULL;
        sp_error error;
        sp_status status =
            sp_safetensors_parse(cases[i].bytes, cases[i].n, cases[i].n, "f", &file, &error);

        assert_int_not_equal(status, SP_OK);
        assert_string_equal(error.code, cases[i].code);
        assert_true(!cases[i].word || strstr(error.text, cases[i].word));
    }
}

/* Cut anywhere, a file is refused; the whole one is not. */
static void cut_at_every_byte(void **state)
{
    const char *header =
        "{" ENTRY("a", "F32", "[2]", "0", "8") "," ENTRY("b", "F16", "[3]", "8", "14") "}";
    image whole = make(header, strlen(header), 14);

    (void)state;
    for (size_t n = 0; n <= whole.n; n++) {
        /* A block of its own lets a sanitizer see a read past the cut. */
        unsigned char *cut = malloc(n + 1);
        sp_safetensors *file = NULL;
        sp_error error;
        sp_status status;

        assert_non_null(cut);
        memcpy(cut, whole.bytes, n);
        cut = realloc(cut, n ? n : 1);
        status = sp_safetensors_parse(cut, n, n, "f", &file, &error);
        assert_int_equal(status, n == whole.n ? SP_OK : SP_ERR_TRUNCATED);
        if (status != SP_OK)
            assert_string_equal(error.code, "truncated");
        sp_safetensors_destroy(file);
        free(cut);
    }
    free(whole.bytes);
}

/* Every byte of a small file replaced by every of a few values: an error or a list, no more. */
static void every_byte_changed(void **state)
{
    static const unsigned char values[] = {0,   ' ', '"', '\\', '{', '}',  '[',
                                           ']', ',', '0', '9',  'a', 0x80, 0xff};
    const char *header = "{\"__metadata__\":{\"k\":\"v\"}," ENTRY("a", "F32", "[2]", "0", "8") "}";
    image whole = make(header, strlen(header), 8);
    size_t blocks = sp_alloc_blocks();

    (void)state;
    for (size_t at = 0; at < whole.n; at++) {
        unsigned char old = whole.bytes[at];

        for (size_t v = 0; v < sizeof values; v++) {
            sp_safetensors *file = NULL;

            whole.bytes[at] = values[v];
            if (sp_safetensors_parse(whole.bytes, whole.n, whole.n, "f", &file, NULL) == SP_OK)
                sp_safetensors_destroy(file);
            else
                assert_null(file);
        }
        whole.bytes[at] = old;
    }
    assert_int_equal(sp_alloc_blocks(), blocks);
    free(whole.bytes);
}

static void deep_nesting_is_bounded(void **state)
{
    static const char *const openers[] = {"{\"a\":{\"b\":", "{\"__metadata__\":{\"b\":"};
    size_t n = 1 << 20;
    char *text = malloc(n + 1);

    (void)state;
    assert_non_null(text);
    for (size_t i = 0; i < 2; i++) {
        size_t opener = strlen(openers[i]);
        sp_safetensors *file = NULL;
        sp_error error;

        memset(text, '[', n);
        memcpy(text, openers[i], opener);
        memset(text + n / 2 + opener / 2, ']', n - n / 2 - opener / 2);
        memcpy(text + n - 2, "}}", 3);
        assert_int_equal(parse_text(text, 0, &file, &error), SP_ERR_REFUSED);
        assert_string_equal(error.code, "header-malformed");
    }
    free(text);
}

static void a_long_name(void **state)
{
    size_t n = 65536;
    char *name = malloc(n + 1), *text = malloc(n + 200);
    sp_safetensors *file;
    sp_error error;

    (void)state;
    assert_true(name && text);
    memset(name, 'n', n);
    name[n] = '\0';
    snprintf(text, n + 200, "{\"%s\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}",
             name);
    assert_ok(parse_text(text, 1, &file, &error), &error);
    assert_string_equal(sp_safetensors_at(file, 0)->name, name);
    sp_safetensors_destroy(file);
    assert_int_equal(parse_text(text, 2, &file, &error), SP_ERR_REFUSED);
    free(name);
    free(text);
}

static void a_hundred_thousand_tensors(void **state)
{
    size_t n = 100000, at = 1, capacity = n * 96 + 16;
    char *text = malloc(capacity);
    sp_safetensors *file;
    sp_error error;

    (void)state;
    assert_non_null(text);
    text[0] = '{';
    for (size_t i = 0; i < n; i++)
        at += (size_t)snprintf(
            text + at, capacity - at,
            "%s\"t%zu\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[%zu,%zu]}", i ? "," : "",
            (i * 7919) % n, i, i + 1);
    memcpy(text + at, "}", 2);
    assert_ok(parse_text(text, n, &file, &error), &error);
    assert_int_equal(sp_safetensors_n_tensors(file), n);
    for (size_t i = 1; i < n; i++)
        assert_true(strcmp(sp_safetensors_at(file, i - 1)->name, sp_safetensors_at(file, i)->name) <
                    0);
    assert_int_equal(sp_safetensors_find(file, "t7919")->offset_bytes, 8 + strlen(text) + 1);
    sp_safetensors_destroy(file);
    free(text);
}

/*
 * The longest header that is read, 100 MB: one tensor and blanks, and what only grows as it is
 * read: brackets, one name, an endless list.
 */
static void a_header_of_100_megabytes(void **state)
{
    static const struct {
        const char *begin, *end, *code;
        char fill;
    } cases[] = {
        {"{" ENTRY("a", "F32", "[2]", "0", "8"), "}", NULL, ' '},
        {"{\"__metadata__\":{\"a\":\"", "\"}," ENTRY("a", "F32", "[2]", "0", "8") "}",
         "header-malformed", 'm'},
        {"{\"a\":", "", "header-malformed", '['},
        {"{\"", "", "header-malformed", 'n'},
        {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,8],\"shape\":[2", "", "header-malformed",
         '1'},
        {"{", "", "header-malformed", ','},
        {"{" ENTRY("a", "F32", "[2]", "0", "8"), "", "header-malformed", ' '},
    };
    const size_t n = 100000000;
    unsigned char *file = malloc(8 + n + 8);
    size_t blocks = sp_alloc_blocks();

    (void)state;
    assert_non_null(file);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t begin = strlen(cases[i].begin), end = strlen(cases[i].end);
        sp_safetensors *header = NULL;
        sp_error error;
        sp_status status;

        memcpy(file, "\x00\xe1\xf5\x05\0\0\0\0", 8);
        memset(file + 8, cases[i].fill, n);
        memcpy(file + 8, cases[i].begin, begin);
        memcpy(file + 8 + n - end, cases[i].end, end);
        status = sp_safetensors_parse(file, 8 + n + 8, 8 + n + 8, "f", &header, &error);
        if (cases[i].code) {
            assert_int_equal(status, SP_ERR_REFUSED);
            assert_string_equal(error.code, cases[i].code);
            assert_null(header);
        } else {
            assert_ok(status, &error);
            assert_int_equal(sp_safetensors_find(header, "a")->offset_bytes, 8 + n);
            sp_safetensors_destroy(header);
        }
        assert_int_equal(sp_alloc_blocks(), blocks);
    }
    free(file);
}

static void allocation_failures(void **state)
{
    const char *header = "{\"__metadata__\":{}," ENTRY("a\\u0061", "F32", "[2]", "0", "8") "}";
    image whole = make(header, strlen(header), 8);
    size_t blocks = sp_alloc_blocks();

    (void)state;
    for (int64_t n = 0;; n++) {
        sp_safetensors *file = NULL;
        sp_status status;

        sp_alloc_fail_after(n);
        status = sp_safetensors_parse(whole.bytes, whole.n, whole.n, "f", &file, NULL);
        if (!sp_alloc_failed()) {
            sp_alloc_fail_after(-1);
            assert_int_equal(status, SP_OK);
            sp_safetensors_destroy(file);
            assert_true(n >= 4);
            break;
        }
        sp_alloc_fail_after(-1);
        assert_int_equal(status, SP_ERR_MEMORY);
        assert_null(file);
        assert_int_equal(sp_alloc_blocks(), blocks);
    }
    assert_int_equal(sp_alloc_blocks(), blocks);
    free(whole.bytes);
}

/* ---- checkpoints --------------------------------------------------------------------------- */

static void compare_with_golden(const sp_checkpoint *checkpoint, int32_t file, size_t *seen)
{
    golden *independent = golden_open(sp_checkpoint_path(checkpoint, file));
    sp_mapping mapping;
    sp_error error;

    assert_ok(sp_file_map(sp_checkpoint_path(checkpoint, file), &mapping, &error), &error);
    assert_int_equal(mapping.bytes, sp_checkpoint_file_bytes(checkpoint, file));
    for (size_t i = 0; i < independent->n_tensors; i++) {
        const golden_tensor *want = &independent->tensors[i];
        const sp_tensor *got = sp_checkpoint_find(checkpoint, want->name);

        assert_non_null(got);
        assert_int_equal(got->file, file);
        assert_string_equal(sp_tensor_type_name(got->type), want->dtype);
        assert_int_equal(got->n_dims, want->n_dims);
        for (int d = 0; d < want->n_dims; d++)
            assert_int_equal(got->dims[d], want->shape[d]);
        assert_int_equal(got->bytes, want->bytes);
        assert_memory_equal((const char *)mapping.data + got->offset_bytes, want->data,
                            want->bytes);
    }
    *seen += independent->n_tensors;
    sp_file_unmap(&mapping);
    golden_close(independent);
}

static void checkpoints_of_the_fixtures(void **state)
{
    static const char *const models[] = {"qwen3-bias",   "qwen3-tied", "qwen3-untied", "qwen35",
                                         "qwen35moe-vl", "qwen3moe",   "qwen3next"};

    (void)state;
    for (size_t m = 0; m < sizeof models / sizeof *models; m++) {
        char path[512];
        sp_checkpoint *checkpoint;
        sp_error error;
        size_t seen = 0;

        snprintf(path, sizeof path, "%s/%s", SP_TEST_FIXTURES, models[m]);
        assert_ok(sp_checkpoint_open(path, "model", &checkpoint, &error), &error);
        assert_int_equal(sp_checkpoint_n_files(checkpoint),
                         strcmp(models[m], "qwen3moe") == 0 ? 3 : 1);
        for (int32_t f = 0; f < sp_checkpoint_n_files(checkpoint); f++)
            compare_with_golden(checkpoint, f, &seen);
        assert_int_equal(sp_checkpoint_n_tensors(checkpoint), seen);
        for (size_t i = 1; i < seen; i++)
            assert_true(strcmp(sp_checkpoint_at(checkpoint, i - 1)->name,
                               sp_checkpoint_at(checkpoint, i)->name) < 0);
        assert_null(sp_checkpoint_at(checkpoint, seen));
        assert_null(sp_checkpoint_find(checkpoint, "no such tensor"));
        assert_null(sp_checkpoint_path(checkpoint, sp_checkpoint_n_files(checkpoint)));
        sp_checkpoint_destroy(checkpoint);
    }
}

static void write_shard(const char *directory, const char *name, const char *header,
                        size_t data_bytes)
{
    image made = make(header, strlen(header), data_bytes);

    sp_test_write_file(directory, name, made.bytes, made.n);
    free(made.bytes);
}

static void refused_indexes(void **state)
{
    static const struct {
        const char *text;
        const char *code;
    } cases[] = {
        {"{\"weight_map\":{\"a\":\"s1\",\"b\":\"s2\"}}", NULL},
        {"{\"weight_map\":{\"a\":\"s1\"}}", NULL},
        {"{\"weight_map\":{\"a\":\"s1\",\"b\":\"s1\"}}", "weights-missing"},
        {"{\"weight_map\":{\"a\":\"s1\",\"b\":\"s3\"}}", "weights-missing"},
        {"{\"weight_map\":{\"a\":\"s1\",\"b\":\"twin\"}}", "duplicate-tensor"},
        {"{\"weight_map\":{\"a\":\"../s1\"}}", "unsafe-path"},
        {"{\"weight_map\":{\"a\":\"/s1\"}}", "unsafe-path"},
        {"{\"weight_map\":{\"a\":\"x/../../s1\"}}", "unsafe-path"},
        {"{\"weight_map\":{\"a\":\".\"}}", "unsafe-path"},
        {"{\"weight_map\":{\"a\":\"\"}}", "unsafe-path"},
        {"{\"weight_map\":{\"a\":\"..\\\\s1\"}}", "unsafe-path"},
        {"{\"weight_map\":{\"a\":1}}", "header-malformed"},
        {"{\"weight_map\":{}}", "header-malformed"},
        {"{\"weight_map\":[]}", "header-malformed"},
        {"{}", "header-malformed"},
        {"[]", "header-malformed"},
        {"", "header-malformed"},
        {"{\"weight_map\":{\"a\":\"s1\",\"a\":\"s1\"}}", "duplicate-key"},
        {"{\"weight_map\":{\"a\":\"folder\"}}", "weights-missing"},
    };
    char *directory = sp_test_make_directory();
    char folder[512];

    (void)state;
    write_shard(directory, "s1", "{" ENTRY("a", "F32", "[1]", "0", "4") "}", 4);
    write_shard(directory, "s2", "{" ENTRY("b", "F32", "[1]", "0", "4") "}", 4);
    write_shard(directory, "twin",
                "{" ENTRY("a", "F32", "[1]", "0", "4") "," ENTRY("b", "F32", "[1]", "4", "8") "}",
                8);
    snprintf(folder, sizeof folder, "mkdir %s/folder", directory);
    assert_int_equal(system(folder), 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sp_checkpoint *checkpoint = NULL;
        sp_error error;
        sp_status status;

        sp_test_write_file(directory, "m.safetensors.index.json", cases[i].text,
                           strlen(cases[i].text));
        status = sp_checkpoint_open(directory, "m", &checkpoint, &error);
        if (cases[i].code) {
            assert_int_not_equal(status, SP_OK);
            assert_string_equal(error.code, cases[i].code);
            assert_null(checkpoint);
        } else {
            assert_ok(status, &error);
            sp_checkpoint_destroy(checkpoint);
        }
    }
    sp_test_remove_tree(directory);
    sp_free(directory);
}

static void other_things_in_its_place(void **state)
{
    char *directory = sp_test_make_directory();
    char command[1024];
    sp_checkpoint *checkpoint = NULL;
    sp_error error;

    (void)state;
    assert_int_equal(sp_checkpoint_open(directory, "m", &checkpoint, &error), SP_ERR_NOT_FOUND);
    assert_string_equal(error.code, "weights-missing");
    sp_test_write_file(directory, "m.bin", "PK", 2);
    assert_int_equal(sp_checkpoint_open(directory, "m", &checkpoint, &error), SP_ERR_REFUSED);
    assert_string_equal(error.code, "pickle-refused");
    snprintf(command, sizeof command, "cd %s && mv m.bin pytorch_m.bin", directory);
    assert_int_equal(system(command), 0);
    assert_int_equal(sp_checkpoint_open(directory, "m", &checkpoint, &error), SP_ERR_REFUSED);
    assert_string_equal(error.code, "pickle-refused");
    assert_non_null(strstr(error.subject, "pytorch_m.bin"));
    snprintf(command, sizeof command, "cd %s && mkfifo m.safetensors", directory);
    assert_int_equal(system(command), 0);
    assert_int_equal(sp_checkpoint_open(directory, "m", &checkpoint, &error), SP_ERR_NOT_FOUND);
    assert_string_equal(error.code, "weights-missing");
    snprintf(command, sizeof command,
             "cd %s && rm m.safetensors pytorch_m.bin && ln -s m.safetensors m.safetensors",
             directory);
    assert_int_equal(system(command), 0);
    assert_int_equal(sp_checkpoint_open(directory, "m", &checkpoint, &error), SP_ERR_NOT_FOUND);
    assert_string_equal(error.code, "weights-missing");
    write_shard(directory, "real", "{" ENTRY("a", "F32", "[1]", "0", "4") "}", 4);
    snprintf(command, sizeof command, "cd %s && rm m.safetensors && ln -s real m.safetensors",
             directory);
    assert_int_equal(system(command), 0);
    assert_ok(sp_checkpoint_open(directory, "m", &checkpoint, &error), &error);
    sp_checkpoint_destroy(checkpoint);
    sp_test_remove_tree(directory);
    sp_free(directory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lists_tensors_by_name),
        cmocka_unit_test(refused_headers),
        cmocka_unit_test(length_fields),
        cmocka_unit_test(cut_at_every_byte),
        cmocka_unit_test(every_byte_changed),
        cmocka_unit_test(deep_nesting_is_bounded),
        cmocka_unit_test(a_long_name),
        cmocka_unit_test(a_hundred_thousand_tensors),
        cmocka_unit_test(a_header_of_100_megabytes),
        cmocka_unit_test(allocation_failures),
        cmocka_unit_test(checkpoints_of_the_fixtures),
        cmocka_unit_test(refused_indexes),
        cmocka_unit_test(other_things_in_its_place),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
