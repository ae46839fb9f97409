/* Texts made to cost much: long runs of marks, and far more tokens than anyone takes. */
#include "support/test.h"

#include "base/alloc.h"
#include "base/text.h"
#include "engine/tokenizer/tokenizer_parts.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

enum { CODE_POINTS = 0x110000 };

static void add_code(sp_text *text, int32_t code)
{
    utf8proc_uint8_t bytes[4];

    sp_text_add_bytes(text, (const char *)bytes, (size_t)utf8proc_encode_char(code, bytes));
}

static size_t bytes_of(int32_t code)
{
    return code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
}

static sp_tokenizer *open_tokenizer(const char *directory)
{
    sp_tokenizer *tokenizer;
    sp_error error;

    assert_ok(sp_tokenizer_open(directory, &tokenizer, &error), &error);
    return tokenizer;
}

/* --- NFC --------------------------------------------------------------------------------- */

/* All characters that are not starters, and the three that decompose to such only. */
static size_t collect_marks(int32_t *out_marks)
{
    size_t n = 0;

    for (int32_t code = 0; code < CODE_POINTS; code++)
        if (utf8proc_get_property(code)->combining_class != 0)
            out_marks[n++] = code;
    out_marks[n++] = 0x0f73;
    out_marks[n++] = 0x0f75;
    out_marks[n++] = 0x0f81;
    return n;
}

static int32_t random_starter(sp_test_random *random)
{
    static const int32_t some[] = {'a',    'e',    'K',    ' ',    0x00e9, 0x1e69, 0x212b, 0x212a,
                                   0x1fbe, 0x1f82, 0x0344, 0x1100, 0x1161, 0x11a8, 0xac00, 0xac01,
                                   0xd7a3, 0x304b, 0x3099, 0x09c7, 0x09be, 0x0dd9, 0x0958, 0x4e2d};

    if (sp_test_below(random, 4) != 0)
        return some[sp_test_below(random, sizeof some / sizeof *some)];
    return (int32_t)sp_test_below(random, 0xd800);
}

static void check_nfc(const sp_text *text)
{
    utf8proc_uint8_t *want = NULL;
    const char *got;
    size_t bytes;
    utf8proc_ssize_t n =
        utf8proc_map((const utf8proc_uint8_t *)text->data, (utf8proc_ssize_t)text->bytes, &want,
                     UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    sp_error error;

    assert_true(n >= 0);
    assert_ok(sp_nfc(text->data, text->bytes, &got, &bytes, &error), &error);
    assert_int_equal(bytes, n);
    assert_memory_equal(got, want, bytes);
    if (got != text->data)
        sp_free((char *)got);
    free(want);
}

/* Runs on both sides of the length at which the way of sorting changes. */
static void test_nfc_is_utf8procs(void **state)
{
    int32_t *marks = sp_malloc(CODE_POINTS * sizeof *marks);
    size_t n_marks = collect_marks(marks);
    sp_test_random random = {77};

    (void)state;
    assert_true(n_marks > 800);
    for (int round = 0; round < 4000; round++) {
        sp_text text = {0};
        uint32_t run_max = round % 2 ? 4 : 90;

        for (uint32_t n = 1 + sp_test_below(&random, 6); n > 0; n--) {
            add_code(&text, random_starter(&random));
            for (uint32_t run = sp_test_below(&random, run_max); run > 0; run--)
                add_code(&text, marks[sp_test_below(&random, (uint32_t)n_marks)]);
        }
        check_nfc(&text);
        sp_text_free(&text);
    }
    sp_free(marks);
}

/* Swapping neighbours would take minutes. None of these composes with an x or with another. */
static void test_nfc_of_many_marks(void **state)
{
    static const struct {
        int32_t code;
        int class;
    } marks[] = {{0x0345, 240}, {0x0305, 230}, {0x0316, 220}, {0x030d, 230},
                 {0x031b, 216}, {0x0334, 1},   {0x0317, 220}};
    enum { N = 400000 };
    uint8_t *drawn = sp_malloc(N);
    sp_test_random random = {5};
    sp_text text = {0}, want = {0};
    const char *got;
    size_t bytes;
    sp_error error;

    (void)state;
    sp_text_add(&text, "x");
    sp_text_add(&want, "x");
    for (int i = 0; i < N; i++) {
        drawn[i] = (uint8_t)sp_test_below(&random, sizeof marks / sizeof *marks);
        add_code(&text, marks[drawn[i]].code);
    }
    for (int class = 1; class < 256; class ++)
        for (int i = 0; i < N; i++)
            if (marks[drawn[i]].class == class)
                add_code(&want, marks[drawn[i]].code);
    assert_ok(sp_nfc(text.data, text.bytes, &got, &bytes, &error), &error);
    assert_int_equal(bytes, want.bytes);
    assert_memory_equal(got, want.data, bytes);
    sp_free((char *)got);
    sp_text_free(&text);
    sp_text_free(&want);
    sp_free(drawn);
}

static utf8proc_ssize_t decompose(int32_t code, int32_t *out_codes)
{
    return utf8proc_decompose_char(code, out_codes, 8, UTF8PROC_STABLE | UTF8PROC_COMPOSE, NULL);
}

/* How much NFC can shrink a text, which the bound on its tokens allows for: every character that
 * NFC leaves, against the longest ways to write the parts of it. */
static void test_how_much_nfc_shrinks(void **state)
{
    uint8_t *longest = sp_calloc(CODE_POINTS, 1);
    int32_t parts[8], worst = 0;
    size_t most = 0;

    (void)state;
    for (int32_t code = 0; code < CODE_POINTS; code++) {
        size_t sum = 0;
        utf8proc_ssize_t n = decompose(code, parts);

        for (utf8proc_ssize_t i = 0; i < n; i++)
            sum += bytes_of(parts[i]);
        if (n == 1 && bytes_of(code) > longest[parts[0]])
            longest[parts[0]] = (uint8_t)bytes_of(code);
        assert_true(n == 1 || bytes_of(code) <= sum);
    }
    for (int32_t code = 0; code < CODE_POINTS; code++) {
        utf8proc_ssize_t n = decompose(code, parts);
        size_t sum = 0;

        for (utf8proc_ssize_t i = 0; i < n; i++)
            sum += longest[parts[i]];
        if (n > 1 || parts[0] == code) {
            sum = sum * 1000 / bytes_of(code);
            worst = sum > most ? code : worst;
            most = sum > most ? sum : most;
        }
    }
    assert_int_equal(most, 3500);
    assert_int_equal(worst, 0x0390);
    sp_free(longest);
}

/* --- The limit --------------------------------------------------------------------------- */

static sp_status encode(const sp_tokenizer *tokenizer, const sp_text *text, size_t n_max,
                        int32_t **out_ids, size_t *out_n, sp_error *error)
{
    const sp_text_span all = {0, text->bytes};

    return sp_tokenizer_encode_spans(tokenizer, text->data, text->bytes, &all, 1, false, n_max,
                                     out_ids, out_n, error);
}

static void check_refused(const sp_tokenizer *tokenizer, const sp_text *text, size_t n_max)
{
    int32_t *ids = NULL;
    size_t n = 99;
    sp_error error;

    assert_int_equal(encode(tokenizer, text, n_max, &ids, &n, &error), SP_ERR_TOO_LARGE);
    assert_string_equal(error.code, "too-many-tokens");
    assert_null(ids);
    assert_int_equal(n, 99);
}

/* As many tokens as the text has are enough, and one less is not. */
static void check_border(const sp_tokenizer *tokenizer, const sp_text *text)
{
    int32_t *want, *got;
    size_t n_want, n_got;
    sp_error error;

    assert_ok(encode(tokenizer, text, SIZE_MAX, &want, &n_want, &error), &error);
    assert_ok(encode(tokenizer, text, n_want, &got, &n_got, &error), &error);
    assert_int_equal(n_got, n_want);
    assert_memory_equal(got, want, n_want * sizeof *got);
    check_refused(tokenizer, text, n_want - 1);
    sp_free(want);
    sp_free(got);
}

static void check_random_borders(const sp_tokenizer *tokenizer)
{
    static const char *const parts[] = {"the ",
                                        "int main(void)\n",
                                        "        ",
                                        "=====",
                                        "aaaaaaaa",
                                        "<|im_end|>",
                                        "\n\n",
                                        "cafe\xcc\x81",
                                        "\xc3\xa9",
                                        "\xe4\xb8\xad\xe6\x96\x87",
                                        "1234",
                                        "\xe2\x84\xaa",
                                        "<|im_",
                                        "\xcc\x81z",
                                        "\xe1\xbe\xbe\xcc\x88\xcc\x81",
                                        "<think>",
                                        "\xe1\x84\x80",
                                        "\xe1\x85\xa1",
                                        "\xe1\x86\xa8"};
    sp_test_random random = {31};

    for (int round = 0; round < 4000; round++) {
        sp_text text = {0};

        for (uint32_t n = 1 + sp_test_below(&random, 12); n > 0; n--) {
            const char *part = parts[sp_test_below(&random, sizeof parts / sizeof *parts)];

            for (uint32_t times = 1 + sp_test_below(&random, 8); times > 0; times--)
                sp_text_add(&text, part);
        }
        check_border(tokenizer, &text);
        sp_text_free(&text);
    }
}

/* Nothing has fewer tokens for its bytes than tokens in a row. */
static void check_token_borders(const sp_tokenizer *tokenizer)
{
    for (int32_t id = 0; id < sp_tokenizer_n_ids(tokenizer); id++) {
        size_t bytes;
        const char *token = sp_tokenizer_token_bytes(tokenizer, id, &bytes);
        sp_text text = {0};

        if (bytes == 0 || !sp_utf8_valid(token, bytes))
            continue;
        for (int times = 0; times < 20; times++)
            sp_text_add_bytes(&text, token, bytes);
        check_border(tokenizer, &text);
        sp_text_free(&text);
    }
}

static void test_borders(void **state)
{
    static const char *const directories[] = {SP_TEST_DEMO "/base",
                                              SP_TEST_FIXTURES "/tokenizer512"};

    (void)state;
    for (size_t i = 0; i < sizeof directories / sizeof *directories; i++) {
        sp_tokenizer *tokenizer = open_tokenizer(directories[i]);
        sp_text empty = {.data = (char *)""};
        int32_t *ids = NULL;
        size_t n = 99;

        check_random_borders(tokenizer);
        check_token_borders(tokenizer);
        assert_int_equal(
            sp_tokenizer_encode_spans(tokenizer, empty.data, 0, NULL, 0, false, 0, &ids, &n, NULL),
            SP_OK);
        assert_int_equal(n, 0);
        sp_tokenizer_close(tokenizer);
    }
}

/* Eight megabytes of this or that. The bound alone sees it, so that nothing is encoded. */
static void test_giants(void **state)
{
    static const char *const parts[] = {
        "a",         "the cat and ",    "=", " ", "9", "e\xcc\x81", "<|im_end|>", "\xe4\xb8\xad",
        "x\xcc\x81", "\xcc\x81\xcc\x96"};
    const size_t bytes = (size_t)8 << 20, context = 2048;
    sp_tokenizer *tokenizer = open_tokenizer(SP_TEST_DEMO "/base");

    (void)state;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        sp_text text = {0};

        while (text.bytes < bytes)
            sp_text_add(&text, parts[i]);
        assert_true(sp_bound_exceeds(tokenizer, text.data, text.bytes, false, context));
        check_refused(tokenizer, &text, context);
        sp_text_free(&text);
    }
    sp_tokenizer_close(tokenizer);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nfc_is_utf8procs),
        cmocka_unit_test(test_nfc_of_many_marks),
        cmocka_unit_test(test_how_much_nfc_shrinks),
        cmocka_unit_test(test_borders),
        cmocka_unit_test(test_giants),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
