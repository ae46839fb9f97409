/* The tokenizer against what the reference tokenizer wrote down, and its own promises. */
#include "support/test.h"

#include "base/alloc.h"
#include "base/file.h"
#include "base/json.h"
#include "engine/tokenizer/tokenizer.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

static sp_tokenizer *open_tokenizer(const char *directory)
{
    sp_tokenizer *tokenizer = NULL;
    sp_error error;

    assert_ok(sp_tokenizer_open(directory, &tokenizer, &error), &error);
    return tokenizer;
}

static json_t *read_json(const char *path)
{
    json_error_t problem;
    json_t *root = json_load_file(path, JSON_ALLOW_NUL, &problem);

    if (!root)
        fail_msg("%s: %s", path, problem.text);
    return root;
}

/* One case: {"text", "ids", "decoded"} and, where they differ, "plain_ids" for parse_special off.
 */
static void check_encode(const sp_tokenizer *tokenizer, const json_t *entry, const char *field,
                         bool parse_special)
{
    const json_t *text = json_object_get(entry, "text");
    const json_t *want = json_object_get(entry, field);
    int32_t *ids = NULL;
    size_t n = 0;
    sp_error error;

    assert_ok(sp_tokenizer_encode(tokenizer, json_string_value(text), json_string_length(text),
                                  parse_special, &ids, &n, &error),
              &error);
    if (n != json_array_size(want))
        fail_msg("\"%s\": %zu ids, not %zu", json_string_value(text), n, json_array_size(want));
    for (size_t i = 0; i < n; i++)
        if (ids[i] != json_integer_value(json_array_get(want, i)))
            fail_msg("\"%s\": id %zu is %d", json_string_value(text), i, ids[i]);
    sp_free(ids);
}

static void check_decode(const sp_tokenizer *tokenizer, const json_t *entry, const char *field,
                         bool skip_special)
{
    const json_t *ids = json_object_get(entry, "ids");
    const json_t *want = json_object_get(entry, field);
    size_t n = json_array_size(ids);
    int32_t *list = sp_calloc(n + 1, sizeof *list);
    sp_text text = {0};

    for (size_t i = 0; i < n; i++)
        list[i] = (int32_t)json_integer_value(json_array_get(ids, i));
    sp_tokenizer_decode(tokenizer, list, n, skip_special, &text);
    assert_false(text.failed);
    assert_int_equal(text.bytes, json_string_length(want));
    if (text.bytes > 0)
        assert_memory_equal(text.data, json_string_value(want), text.bytes);
    sp_text_free(&text);
    sp_free(list);
}

static void check_cases(const sp_tokenizer *tokenizer, const json_t *cases, size_t n_at_least)
{
    size_t i;
    json_t *entry;

    assert_true(json_array_size(cases) >= n_at_least);
    json_array_foreach(cases, i, entry)
    {
        check_encode(tokenizer, entry, "ids", true);
        check_decode(tokenizer, entry, "decoded", false);
    }
}

static void test_demo_golden(void **state)
{
    json_t *root = read_json(SP_TEST_DEMO "/golden/tokenizer.json");
    sp_tokenizer *demo = open_tokenizer(SP_TEST_DEMO "/base");
    sp_tokenizer *small = open_tokenizer(SP_TEST_FIXTURES "/tokenizer512");

    (void)state;
    check_cases(demo, json_object_get(root, "vocab2048"), 40);
    check_cases(small, json_object_get(root, "vocab512"), 40);
    sp_tokenizer_close(small);
    sp_tokenizer_close(demo);
    json_decref(root);
}

static void test_fixture_golden(void **state)
{
    json_t *cases = read_json(SP_TEST_FIXTURES "/tokenizer512/golden.json");
    sp_tokenizer *tokenizer = open_tokenizer(SP_TEST_FIXTURES "/tokenizer512");

    (void)state;
    check_cases(tokenizer, cases, 40);
    sp_tokenizer_close(tokenizer);
    json_decref(cases);
}

/* Made by tools/make_tokenizer_golden.py; a field that is absent equals the one before it. */
static void test_large_golden(void **state)
{
    json_t *root = read_json(SP_TEST_SOURCE "/tests/engine/data/tokenizer_golden.json");
    const json_t *cases = json_object_get(root, "cases");
    const json_t *sequences = json_object_get(root, "sequences");
    sp_tokenizer *tokenizer = open_tokenizer(SP_TEST_DEMO "/base");
    size_t i, n_plain = 0, n_skipped = 0;
    json_t *entry;

    (void)state;
    assert_true(json_array_size(cases) > 600);
    json_array_foreach(cases, i, entry)
    {
        const char *plain = json_object_get(entry, "plain_ids") ? "plain_ids" : "ids";
        const char *decoded = json_object_get(entry, "decoded") ? "decoded" : "text";
        const char *skipped = json_object_get(entry, "skipped") ? "skipped" : decoded;

        n_plain += strcmp(plain, "plain_ids") == 0;
        n_skipped += strcmp(skipped, "skipped") == 0;
        check_encode(tokenizer, entry, "ids", true);
        check_encode(tokenizer, entry, plain, false);
        check_decode(tokenizer, entry, decoded, false);
        check_decode(tokenizer, entry, skipped, true);
    }
    assert_true(n_plain > 20 && n_skipped > 20);
    assert_int_equal(json_array_size(sequences), 200);
    json_array_foreach(sequences, i, entry)
    {
        check_decode(tokenizer, entry, "decoded", false);
        check_decode(tokenizer, entry, "skipped", true);
    }
    sp_tokenizer_close(tokenizer);
    json_decref(root);
}

/* --- Streaming --------------------------------------------------------------------------- */

static void test_stream_equals_whole(void **state)
{
    sp_tokenizer *tokenizer = open_tokenizer(SP_TEST_FIXTURES "/tokenizer512");
    sp_test_random random = {7};

    (void)state;
    for (int round = 0; round < 3000; round++) {
        int32_t ids[24];
        size_t n = sp_test_below(&random, 24);
        sp_text whole = {0}, stream = {0};
        sp_decoder decoder = sp_decoder_start(tokenizer, round % 2);

        for (size_t i = 0; i < n; i++) {
            size_t before = stream.bytes;

            /* Mostly single bytes above 0x7f, some outside the vocabulary on both sides. */
            ids[i] = (int32_t)(sp_test_below(&random, 3) ? 94 + sp_test_below(&random, 162)
                                                         : sp_test_below(&random, 520)) -
                     (round % 3 == 0 ? 2 : 0);
            sp_decoder_push(&decoder, ids[i], &stream);
            if (stream.bytes > before)
                assert_true(sp_utf8_valid(stream.data + before, stream.bytes - before));
            assert_true(decoder.n_held <= 3);
        }
        sp_decoder_flush(&decoder, &stream);
        sp_tokenizer_decode(tokenizer, ids, n, round % 2, &whole);
        assert_int_equal(whole.bytes, stream.bytes);
        if (whole.bytes > 0)
            assert_memory_equal(whole.data, stream.data, whole.bytes);
        sp_text_free(&whole);
        sp_text_free(&stream);
    }
    sp_tokenizer_close(tokenizer);
}

static int32_t byte_token(const sp_tokenizer *tokenizer, unsigned char byte)
{
    for (int32_t id = 0; id < sp_tokenizer_n_ids(tokenizer); id++) {
        size_t bytes;
        const char *data = sp_tokenizer_token_bytes(tokenizer, id, &bytes);

        if (bytes == 1 && (unsigned char)data[0] == byte)
            return id;
    }
    fail_msg("no token for byte 0x%02x", byte);
    return -1;
}

/* Pushes bytes as single tokens and checks what comes out after each one and at the end. */
static void check_stream(const sp_tokenizer *tokenizer, const char *bytes, const char *const *want,
                         const char *rest)
{
    sp_decoder decoder = sp_decoder_start(tokenizer, false);
    sp_text text = {0};

    for (size_t i = 0; bytes[i]; i++) {
        sp_text_clear(&text);
        sp_decoder_push(&decoder, byte_token(tokenizer, (unsigned char)bytes[i]), &text);
        assert_string_equal(text.data ? text.data : "", want[i]);
    }
    sp_text_clear(&text);
    sp_decoder_flush(&decoder, &text);
    assert_string_equal(text.data ? text.data : "", rest);
    sp_text_free(&text);
}

#define BAD "\xef\xbf\xbd"

static void test_stream_by_hand(void **state)
{
    sp_tokenizer *tokenizer = open_tokenizer(SP_TEST_FIXTURES "/tokenizer512");

    (void)state;
    /* U+1F600 comes out with its last byte, once. */
    check_stream(tokenizer, "\xf0\x9f\x98\x80", (const char *[]){"", "", "", "\xf0\x9f\x98\x80"},
                 "");
    /* A beginning of three bytes is one wrong thing, not three. */
    check_stream(tokenizer, "\xf0\x9f\x98z", (const char *[]){"", "", "", BAD "z"}, "");
    check_stream(tokenizer, "\xf0\x9f\x98", (const char *[]){"", "", ""}, BAD);
    /* e0 80 begins nothing: e0 is wrong as soon as 80 comes, and 80 is wrong itself. */
    check_stream(tokenizer, "\xe0\x80\xff", (const char *[]){"", BAD BAD, BAD}, "");
    /* A good beginning that another lead cuts off stays held as the new one. */
    check_stream(tokenizer, "\xe4\xb8\xc3\xa9", (const char *[]){"", "", BAD, "\xc3\xa9"}, "");
    /* A surrogate and a number above U+10FFFF. */
    check_stream(tokenizer, "\xed\xa0", (const char *[]){"", BAD BAD}, "");
    check_stream(tokenizer, "\xf4\x90", (const char *[]){"", BAD BAD}, "");
    sp_tokenizer_close(tokenizer);
}

/* --- Ids --------------------------------------------------------------------------------- */

static void test_ids(void **state)
{
    sp_tokenizer *tokenizer = open_tokenizer(SP_TEST_DEMO "/base");
    size_t bytes;

    (void)state;
    assert_int_equal(sp_tokenizer_n_ids(tokenizer), 2048);
    assert_int_equal(sp_tokenizer_added_id(tokenizer, "<|endoftext|>"), 2045);
    assert_int_equal(sp_tokenizer_added_id(tokenizer, "<|im_end|>"), 2047);
    assert_int_equal(sp_tokenizer_added_id(tokenizer, "the"), -1);
    assert_true(sp_tokenizer_is_special(tokenizer, 2045));
    assert_false(sp_tokenizer_is_special(tokenizer, 2044));
    assert_false(sp_tokenizer_is_special(tokenizer, -1));
    assert_false(sp_tokenizer_is_special(tokenizer, 2048));
    assert_memory_equal(sp_tokenizer_token_bytes(tokenizer, 2046, &bytes), "<|im_start|>", 12);
    assert_int_equal(bytes, 12);
    /* The first merge of the file is a blank and a t. */
    assert_memory_equal(sp_tokenizer_token_bytes(tokenizer, 256, &bytes), " t", 2);
    assert_int_equal(bytes, 2);
    assert_null(sp_tokenizer_token_bytes(tokenizer, 2048, &bytes));
    assert_int_equal(bytes, 0);
    assert_null(sp_tokenizer_token_bytes(tokenizer, -1, &bytes));
    sp_tokenizer_close(tokenizer);
}

/* --- Bad text ---------------------------------------------------------------------------- */

static void check_invalid(const sp_tokenizer *tokenizer, const char *text, size_t bytes,
                          int64_t position)
{
    int32_t *ids = NULL;
    size_t n = 99;
    sp_error error;

    assert_int_equal(sp_tokenizer_encode(tokenizer, text, bytes, false, &ids, &n, &error),
                     SP_ERR_INPUT);
    assert_string_equal(error.code, "invalid-utf8");
    assert_int_equal(error.position, position);
    assert_null(ids);
    assert_int_equal(n, 99);
}

static void test_invalid_utf8(void **state)
{
    sp_tokenizer *tokenizer = open_tokenizer(SP_TEST_FIXTURES "/tokenizer512");
    int32_t *ids = NULL;
    size_t n;
    sp_error error;

    (void)state;
    check_invalid(tokenizer, "\x80", 1, 0);
    check_invalid(tokenizer, "ab\xff", 3, 2);
    check_invalid(tokenizer, "ab\xc3", 3, 2);
    check_invalid(tokenizer, "\xc0\x80", 2, 0);         /* a long form of NUL */
    check_invalid(tokenizer, "x\xe0\x9f\xbf", 4, 1);    /* a long form */
    check_invalid(tokenizer, "x\xed\xa0\x80", 4, 1);    /* a surrogate */
    check_invalid(tokenizer, "\xf4\x90\x80\x80", 4, 0); /* above U+10FFFF */
    check_invalid(tokenizer, "\xe4\xb8\xad\xe4\xb8", 5, 3);
    assert_int_equal(sp_tokenizer_encode(tokenizer, "", SP_TOKENIZER_TEXT_BYTES_MAX + 1, false,
                                         &ids, &n, &error),
                     SP_ERR_TOO_LARGE);
    assert_string_equal(error.code, "text-too-large");
    sp_tokenizer_close(tokenizer);
}

/* --- The merge loop ---------------------------------------------------------------------- */

/* Ranks by the text of a pair, read from the file on a path of its own. */
typedef struct {
    json_t *root, *ranks;
} merge_oracle;

static merge_oracle oracle_open(const char *path)
{
    merge_oracle oracle = {read_json(path), json_object()};
    size_t i;
    json_t *merge;
    char key[256];

    json_array_foreach(json_object_get(json_object_get(oracle.root, "model"), "merges"), i, merge)
    {
        snprintf(key, sizeof key, "%s %s", json_string_value(json_array_get(merge, 0)),
                 json_string_value(json_array_get(merge, 1)));
        json_object_set_new(oracle.ranks, key, json_integer((json_int_t)i));
    }
    return oracle;
}

/*
 * The definition: join the leftmost pair of lowest rank until there is none. Letters only, which
 * the vocabulary writes as themselves. Word i is piece[begin[i] .. begin[i + 1]).
 */
static size_t oracle_merge(const merge_oracle *oracle, const char *piece, int *begin)
{
    int n = (int)strlen(piece);

    for (int i = 0; i <= n; i++)
        begin[i] = i;
    for (;;) {
        json_int_t lowest = -1;
        int at = 0;

        for (int i = 0; i + 1 < n; i++) {
            const json_t *rank;
            char key[256];

            snprintf(key, sizeof key, "%.*s %.*s", begin[i + 1] - begin[i], piece + begin[i],
                     begin[i + 2] - begin[i + 1], piece + begin[i + 1]);
            rank = json_object_get(oracle->ranks, key);
            if (rank && (lowest < 0 || json_integer_value(rank) < lowest)) {
                lowest = json_integer_value(rank);
                at = i;
            }
        }
        if (lowest < 0)
            return (size_t)n;
        for (int i = at + 1; i < n; i++)
            begin[i] = begin[i + 1];
        n--;
    }
}

static void test_merges_follow_the_definition(void **state)
{
    merge_oracle oracle = oracle_open(SP_TEST_DEMO "/base/tokenizer.json");
    const json_t *vocab = json_object_get(json_object_get(oracle.root, "model"), "vocab");
    sp_tokenizer *tokenizer = open_tokenizer(SP_TEST_DEMO "/base");
    sp_test_random random = {3};
    size_t n_joined = 0;

    (void)state;
    for (int round = 0; round < 1500; round++) {
        char piece[64];
        size_t length = 1 + sp_test_below(&random, 60), n;
        int begin[65];
        int32_t *ids;
        sp_error error;

        for (size_t i = 0; i < length; i++)
            piece[i] = "etaoinshrdlucm"[sp_test_below(&random, 14)];
        piece[length] = '\0';
        assert_ok(sp_tokenizer_encode(tokenizer, piece, length, false, &ids, &n, &error), &error);
        assert_int_equal(n, oracle_merge(&oracle, piece, begin));
        for (size_t i = 0; i < n; i++) {
            char word[64];

            snprintf(word, sizeof word, "%.*s", begin[i + 1] - begin[i], piece + begin[i]);
            assert_int_equal(ids[i], json_integer_value(json_object_get(vocab, word)));
        }
        n_joined += length - n;
        sp_free(ids);
    }
    assert_true(n_joined > 10000);
    sp_tokenizer_close(tokenizer);
    json_decref(oracle.ranks);
    json_decref(oracle.root);
}

/* One piece of a megabyte: with a quadratic loop these would take hours. */
static void test_long_pieces(void **state)
{
    const size_t bytes = 1 << 20;
    static const char *const alphabets[] = {"a",          " ",   "\n",       "!", "=",
                                            "abcdefghij", "eth", "\xcc\x81", "<"};
    sp_tokenizer *tokenizer = open_tokenizer(SP_TEST_DEMO "/base");
    char *text = sp_malloc(bytes);
    sp_test_random random = {9};

    (void)state;
    for (size_t i = 0; i < sizeof alphabets / sizeof *alphabets; i++) {
        const char *letters = alphabets[i];
        size_t n_letters = strlen(letters), n;
        bool is_mark = (unsigned char)letters[0] >= 0x80;
        int32_t *ids;
        sp_error error;
        sp_text back = {0};

        for (size_t at = 0; at < bytes; at++)
            text[at] = letters[is_mark ? at % 2 : sp_test_below(&random, (uint32_t)n_letters)];
        assert_ok(sp_tokenizer_encode(tokenizer, text, bytes, true, &ids, &n, &error), &error);
        sp_tokenizer_decode(tokenizer, ids, n, false, &back);
        assert_int_equal(back.bytes, bytes);
        assert_memory_equal(back.data, text, bytes);
        sp_text_free(&back);
        sp_free(ids);
    }
    sp_free(text);
    sp_tokenizer_close(tokenizer);
}

/* Any text of starters that NFC leaves alone comes back byte for byte, specials parsed or not. */
static void test_round_trip(void **state)
{
    static const char *const parts[] = {
        " ",
        "\n",
        "\t",
        "\r\n",
        "a",
        "Z",
        "the ",
        "'s",
        "9",
        "!",
        "\xc3\xa9",
        "\xe4\xb8\xad",
        "\xed\x95\x9c",
        "\xf0\x9f\x98\x80",
        "\xe2\x80\x8d",
        "<|im_end|>",
        "<|",
        "|>",
        "\x01",
        "\xd8\xb9",
        "\xe1\xa0\x8e",
        "\xc5\xbf",
        "\xf4\x8f\xbf\xbf",
        "\xef\xbf\xbd",
    };
    sp_tokenizer *tokenizer = open_tokenizer(SP_TEST_FIXTURES "/tokenizer512");
    sp_test_random random = {12};

    (void)state;
    for (int round = 0; round < 5000; round++) {
        sp_text text = {0}, back = {0};
        int32_t *ids;
        size_t n;
        sp_error error;

        for (uint32_t i = 1 + sp_test_below(&random, 30); i > 0; i--)
            sp_text_add(&text, parts[sp_test_below(&random, sizeof parts / sizeof *parts)]);
        assert_ok(
            sp_tokenizer_encode(tokenizer, text.data, text.bytes, round % 2, &ids, &n, &error),
            &error);
        sp_tokenizer_decode(tokenizer, ids, n, false, &back);
        assert_int_equal(back.bytes, text.bytes);
        assert_memory_equal(back.data, text.data, text.bytes);
        sp_text_free(&text);
        sp_text_free(&back);
        sp_free(ids);
    }
    sp_tokenizer_close(tokenizer);
}

/* --- Threads ----------------------------------------------------------------------------- */

typedef struct {
    const sp_tokenizer *tokenizer;
    bool same;
} thread_job;

static void *encode_in_thread(void *argument)
{
    thread_job *job = argument;
    static const char text[] = "One tokenizer, many threads: cafe\xcc\x81 <|im_end|> \xe4\xb8\xad";
    int32_t *first = NULL;
    size_t n_first = 0;

    job->same = true;
    for (int i = 0; i < 200; i++) {
        int32_t *ids;
        size_t n;

        if (sp_tokenizer_encode(job->tokenizer, text, sizeof text - 1, true, &ids, &n, NULL)) {
            job->same = false;
            break;
        }
        if (first && (n != n_first || memcmp(ids, first, n * sizeof *ids) != 0))
            job->same = false;
        sp_free(first);
        first = ids;
        n_first = n;
    }
    sp_free(first);
    return NULL;
}

static void test_threads_share_one(void **state)
{
    sp_tokenizer *tokenizer = open_tokenizer(SP_TEST_DEMO "/base");
    thread_job jobs[4];
    pthread_t threads[4];

    (void)state;
    for (int i = 0; i < 4; i++) {
        jobs[i].tokenizer = tokenizer;
        assert_int_equal(pthread_create(&threads[i], NULL, encode_in_thread, &jobs[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        assert_true(jobs[i].same);
    }
    sp_tokenizer_close(tokenizer);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_demo_golden),
        cmocka_unit_test(test_fixture_golden),
        cmocka_unit_test(test_large_golden),
        cmocka_unit_test(test_stream_equals_whole),
        cmocka_unit_test(test_stream_by_hand),
        cmocka_unit_test(test_ids),
        cmocka_unit_test(test_invalid_utf8),
        cmocka_unit_test(test_merges_follow_the_definition),
        cmocka_unit_test(test_long_pieces),
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_threads_share_one),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
