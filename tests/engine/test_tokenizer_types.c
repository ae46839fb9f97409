/*
 * Each served type of tokenizer.json against what the reference tokenizer wrote down
 * (tools/make_tokenizer_types.py). With arguments: folders of more such goldens, for a comparison
 * by hand over many texts.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "base/file.h"
#include "base/json.h"
#include "engine/tokenizer/tokenizer.h"

#include <stdio.h>
#include <string.h>

#define DATA SP_TEST_SOURCE "/tests/engine/data/tokenizers/"

static const char *const types[] = {
    "qwen2", "llama3",          "smollm2",           "smollm3",         "tekken",
    "gpt2",  "mistral_prepend", "mistral_metaspace", "metaspace_pieces"};
enum { N_TYPES = sizeof types / sizeof *types };

static char **folders; /* from the command line */
static int n_folders;

static json_t *read_golden(const char *directory)
{
    char *path = sp_path_join(directory, "golden.json");
    json_error_t problem;
    json_t *root = json_load_file(path, JSON_ALLOW_NUL, &problem);

    if (!root)
        fail_msg("%s: %s", path, problem.text);
    sp_free(path);
    return root;
}

static sp_tokenizer *open_tokenizer(const char *directory)
{
    sp_tokenizer *tokenizer = NULL;
    sp_error error;

    assert_ok(sp_tokenizer_open(directory, &tokenizer, &error), &error);
    return tokenizer;
}

static int32_t *ids_of(const json_t *list, size_t *out_n)
{
    int32_t *ids = sp_calloc(json_array_size(list) + 1, sizeof *ids);

    *out_n = json_array_size(list);
    for (size_t i = 0; i < *out_n; i++)
        ids[i] = (int32_t)json_integer_value(json_array_get(list, i));
    return ids;
}

/* Encodes with a limit that is just enough, and with one that is not. */
static void check_encode(const sp_tokenizer *tokenizer, const json_t *text, const json_t *want_ids,
                         bool parse_special, bool add_special)
{
    const sp_text_span all = {0, json_string_length(text)};
    const bool n_spans = parse_special && all.end > 0;
    size_t n_want, n = 0;
    int32_t *want = ids_of(want_ids, &n_want), *ids = NULL;
    sp_error error;

    assert_ok(sp_tokenizer_encode_spans(tokenizer, json_string_value(text), all.end, &all, n_spans,
                                        add_special, n_want, &ids, &n, &error),
              &error);
    if (n != n_want || (n > 0 && memcmp(ids, want, n * sizeof *ids) != 0)) {
        for (size_t i = 0; i < n; i++)
            print_error("%d ", ids[i]);
        fail_msg("\"%s\": %zu ids, not these %zu", json_string_value(text), n, n_want);
    }
    sp_free(ids);
    if (n_want > 0)
        assert_int_equal(sp_tokenizer_encode_spans(tokenizer, json_string_value(text), all.end,
                                                   &all, n_spans, add_special, n_want - 1, &ids, &n,
                                                   &error),
                         SP_ERR_TOO_LARGE);
    sp_free(want);
}

/* Whole, and one id at a time: every part is whole characters. */
static void check_decode(const sp_tokenizer *tokenizer, const json_t *id_list, const json_t *want,
                         bool skip_special)
{
    sp_decoder decoder = sp_decoder_start(tokenizer, skip_special);
    sp_text whole = {0}, stream = {0};
    size_t n;
    int32_t *ids = ids_of(id_list, &n);

    sp_tokenizer_decode(tokenizer, ids, n, skip_special, &whole);
    for (size_t i = 0; i < n; i++) {
        size_t before = stream.bytes;

        sp_decoder_push(&decoder, ids[i], &stream);
        if (stream.bytes > before)
            assert_true(sp_utf8_valid(stream.data + before, stream.bytes - before));
    }
    sp_decoder_flush(&decoder, &stream);
    assert_false(whole.failed);
    if (whole.bytes != json_string_length(want) ||
        (whole.bytes > 0 && memcmp(whole.data, json_string_value(want), whole.bytes) != 0))
        fail_msg("\"%s\", not \"%s\"", whole.data, json_string_value(want));
    assert_int_equal(whole.bytes, stream.bytes);
    if (whole.bytes > 0)
        assert_memory_equal(whole.data, stream.data, whole.bytes);
    sp_text_free(&whole);
    sp_text_free(&stream);
    sp_free(ids);
}

/* A field, or the one that it equals where it is absent. */
static const json_t *field(const json_t *entry, const char *name, const json_t *otherwise)
{
    const json_t *value = json_object_get(entry, name);

    return value ? value : otherwise;
}

static void check_case(const sp_tokenizer *tokenizer, const json_t *golden, const json_t *entry)
{
    const json_t *text = json_object_get(entry, "text"), *ids = json_object_get(entry, "ids");
    const json_t *decoded = field(entry, "decoded", text);
    json_t *around = json_array();

    json_array_extend(around, json_object_get(golden, "before"));
    json_array_extend(around, (json_t *)ids);
    json_array_extend(around, json_object_get(golden, "after"));
    check_encode(tokenizer, text, ids, true, false);
    check_encode(tokenizer, text, field(entry, "plain_ids", ids), false, false);
    check_encode(tokenizer, text, around, true, true);
    check_decode(tokenizer, ids, decoded, false);
    check_decode(tokenizer, ids, field(entry, "skipped", decoded), true);
    json_decref(around);
}

static void check_folder(const char *directory)
{
    json_t *golden = read_golden(directory), *entry;
    sp_tokenizer *tokenizer = open_tokenizer(directory);
    size_t i;

    assert_true(json_array_size(json_object_get(golden, "cases")) >= 300);
    assert_true(json_array_size(json_object_get(golden, "sequences")) >= 75);
    json_array_foreach(json_object_get(golden, "cases"), i, entry)
    {
        check_case(tokenizer, golden, entry);
    }
    json_array_foreach(json_object_get(golden, "sequences"), i, entry)
    {
        const json_t *ids = json_object_get(entry, "ids");

        check_decode(tokenizer, ids, json_object_get(entry, "decoded"), false);
        check_decode(tokenizer, ids, json_object_get(entry, "skipped"), true);
    }
    sp_tokenizer_close(tokenizer);
    json_decref(golden);
}

static void test_goldens(void **state)
{
    (void)state;
    for (int i = 0; i < n_folders; i++) {
        printf("%s\n", folders[i]);
        check_folder(folders[i]);
    }
    for (int i = 0; i < (n_folders ? 0 : N_TYPES); i++) {
        char *directory = sp_path_join(DATA, types[i]);

        check_folder(directory);
        sp_free(directory);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_goldens),
    };

    folders = argv + 1;
    n_folders = argc - 1;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
