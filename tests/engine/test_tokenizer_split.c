/*
 * The scanner against PCRE2 running the file's own pattern. PCRE2 has two habits that differ from
 * the reference's engine: \s takes U+180E, so that White_Space is written out here, and its Unicode
 * version may be another, so that the random texts use code points on which both agree, and a
 * disagreement must be about a code point that one side does not know.
 */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "support/test.h"

#include "base/alloc.h"
#include "base/text.h"
#include "engine/tokenizer/tokenizer_split.h"
#include "engine/tokenizer/unicode_class.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CODE_POINTS 0x110000u

static const char white_space[] = "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}"
                                  "\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}";

typedef struct {
    pcre2_code *code;
    pcre2_match_data *data;
} matcher;

static matcher compile(const char *pattern)
{
    int number;
    PCRE2_SIZE offset;
    matcher made;

    made.code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP,
                              &number, &offset, NULL);
    if (!made.code)
        fail_msg("%s does not compile: error %d at %zu", pattern, number, offset);
    pcre2_jit_compile(made.code, PCRE2_JIT_COMPLETE);
    made.data = pcre2_match_data_create(1, NULL);
    return made;
}

static void release(matcher made)
{
    pcre2_match_data_free(made.data);
    pcre2_code_free(made.code);
}

/* Bytes of the match at the very start of the text, or 0. */
static size_t match(matcher made, const char *text, size_t bytes)
{
    int n = pcre2_match(made.code, (PCRE2_SPTR)text, bytes, 0, PCRE2_NO_UTF_CHECK | PCRE2_ANCHORED,
                        made.data, NULL);

    return n < 0 ? 0 : pcre2_get_ovector_pointer(made.data)[1];
}

/* Writes \s and \S out as White_Space, inside and outside of brackets. */
static void expand(const char *pattern, sp_text *out)
{
    int depth = 0;

    for (const char *c = pattern; *c; c++) {
        if (c[0] == '\\' && (c[1] == 's' || c[1] == 'S')) {
            sp_text_add(out, depth ? "" : c[1] == 's' ? "[" : "[^");
            sp_text_add(out, white_space);
            sp_text_add(out, depth ? "" : "]");
            c++;
            continue;
        }
        depth += c[0] == '[' ? 1 : c[0] == ']' ? -1 : 0;
        sp_text_add_bytes(out, c, 1);
        if (c[0] == '\\')
            sp_text_add_bytes(out, ++c, 1);
    }
}

static size_t put_utf8(uint32_t code, char *out)
{
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    if (code < 0x800) {
        out[0] = (char)(0xc0 | code >> 6);
        out[1] = (char)(0x80 | (code & 0x3f));
        return 2;
    }
    if (code < 0x10000) {
        out[0] = (char)(0xe0 | code >> 12);
        out[1] = (char)(0x80 | (code >> 6 & 0x3f));
        out[2] = (char)(0x80 | (code & 0x3f));
        return 3;
    }
    out[0] = (char)(0xf0 | code >> 18);
    out[1] = (char)(0x80 | (code >> 12 & 0x3f));
    out[2] = (char)(0x80 | (code >> 6 & 0x3f));
    out[3] = (char)(0x80 | (code & 0x3f));
    return 4;
}

static bool oracle_is_newer(void)
{
    char version[64] = "";

    pcre2_config(PCRE2_CONFIG_UNICODE_VERSION, version);
    return strtod(version, NULL) > strtod(sp_unicode_version, NULL);
}

/* [CODE_POINTS] 1 where PCRE2's Unicode and ours agree. */
static uint8_t *agreed;

static void test_classes_agree(void **state)
{
    const unsigned flags[] = {SP_UNICODE_LETTER, SP_UNICODE_NUMBER, SP_UNICODE_MARK,
                              SP_UNICODE_SPACE,  SP_UNICODE_UPPER,  SP_UNICODE_LOWER};
    char spaces[sizeof white_space + 2];
    matcher classes[6], unassigned = compile("\\p{Cn}");
    size_t n_agreed = 0;

    (void)state;
    snprintf(spaces, sizeof spaces, "[%s]", white_space);
    classes[0] = compile("\\p{L}");
    classes[1] = compile("\\p{N}");
    classes[2] = compile("\\p{M}");
    classes[3] = compile(spaces);
    classes[4] = compile("[\\p{Lu}\\p{Lt}]");
    classes[5] = compile("\\p{Ll}");
    agreed = sp_calloc(CODE_POINTS, 1);
    for (uint32_t code = 0; code < CODE_POINTS; code++) {
        const unsigned all = SP_UNICODE_LETTER | SP_UNICODE_NUMBER | SP_UNICODE_MARK;
        char text[4];
        size_t n = put_utf8(code, text);
        bool same = true;

        if (code >= 0xd800 && code < 0xe000)
            continue;
        for (int i = 0; i < 6; i++)
            same = same &&
                   (match(classes[i], text, n) != 0) == ((sp_unicode_class(code) & flags[i]) != 0);
        if (!same && match(unassigned, text, n) == 0 &&
            ((sp_unicode_class(code) & all) || !oracle_is_newer()))
            fail_msg("U+%04X has another class than in PCRE2", code);
        agreed[code] = same;
        n_agreed += same;
    }
    assert_true(n_agreed > 1090000);
    for (int i = 0; i < 6; i++)
        release(classes[i]);
    release(unassigned);
}

/* Mostly characters that the pattern is about, else any that both know. */
static uint32_t random_code(sp_test_random *random)
{
    static const uint32_t likely[] = {
        ' ',   ' ',   ' ',   '\n',   '\r',    '\t',   0xa0,   0x3000, 0x2028, 0x85,   0x180e, '\'',
        '\'',  's',   'S',   0x17f,  't',     'r',    'e',    'E',    'v',    'l',    'L',    'm',
        'd',   'a',   'Z',   '1',    '2',     '9',    0x661,  0xbd,   '!',    '.',    '(',    '/',
        0x301, 0x94d, 0x903, 0x4e2d, 0x1f600, 0x200d, 0xfe0f, 0x0,    0xe9,   0x212a, 0xdf,   0x378,
        'A',   'B',   'C',   0x1c5,  0x2b0,   0xaa,   0x416,  '/',    '/',    'n',    'T',    'R',
    };
    uint32_t code;

    if (sp_test_below(random, 8) != 0)
        return likely[sp_test_below(random, sizeof likely / sizeof *likely)];
    do
        code = sp_test_below(random, sp_test_below(random, 2) ? 0x3000 : CODE_POINTS);
    while (!agreed[code]);
    return code;
}

static void compare_split(const sp_split *split, matcher oracle, const char *text, size_t bytes)
{
    for (size_t at = 0; at < bytes;) {
        size_t found = sp_split_next(split, text + at, bytes - at);
        size_t want = match(oracle, text + at, bytes - at);

        if (found != want || found == 0) {
            for (size_t i = at; i < bytes; i++)
                print_error("%02x ", (unsigned char)text[i]);
            fail_msg("%s: a piece of %zu bytes, not %zu", split->name, found, want);
        }
        at += found;
    }
}

static void test_random_texts(void **state)
{
    sp_test_random random = {41};
    size_t n_splits = 0;

    (void)state;
    for (const sp_split *split = sp_splits; split->name; split++, n_splits++) {
        sp_text pattern = {0};
        matcher oracle;

        expand(split->pattern, &pattern);
        oracle = compile(pattern.data);
        for (int round = 0; round < 60000; round++) {
            char text[4 * 24];
            size_t n = 1 + sp_test_below(&random, 24), bytes = 0;

            for (size_t i = 0; i < n; i++)
                bytes += put_utf8(random_code(&random), text + bytes);
            compare_split(split, oracle, text, bytes);
        }
        release(oracle);
        sp_text_free(&pattern);
    }
    assert_int_equal(n_splits, 6);
}

/* Worked out by hand from the pattern; "|" marks the borders. */
static void check_pieces(const char *name, const char *marked)
{
    const sp_split *split = sp_splits;
    char text[128];
    size_t bytes = 0, at = 0;

    while (strcmp(split->name, name) != 0)
        split++;
    for (const char *c = marked; *c; c++)
        if (*c != '|')
            text[bytes++] = *c;
    for (const char *c = marked; *c;) {
        size_t want = strcspn(c, "|");

        assert_int_equal(sp_split_next(split, text + at, bytes - at), want);
        at += want;
        c += want + (c[want] == '|');
    }
    assert_int_equal(at, bytes);
}

static void test_by_hand(void **state)
{
    (void)state;
    check_pieces("qwen2", "He|'s| a| b|  | c");
    check_pieces("qwen2", "it|'\xc5\xbf|t"); /* U+017F is an s in any case */
    check_pieces("qwen2", "o|'clock");       /* no contraction: one odd character */
    check_pieces("qwen2", "1|2|3|a|1");      /* numbers stand alone */
    check_pieces("qwen2", "a| \n\n|   | b"); /* up to the last newline; then all but one */
    check_pieces("qwen2", "x|  ");           /* trailing spaces stay together */
    check_pieces("qwen2", " !?\r\n|\ta|  \t| !");
    check_pieces("qwen2", "\xe0\xa4\xb9|\xe0\xa4\xbf\xe0\xa4\xa8"); /* a mark begins a word */
    check_pieces("qwen3.5", "\xe0\xa4\xb9\xe0\xa4\xbf\xe0\xa4\xa8");
    check_pieces("llama3", "123|45|a|1|.|678|9");
    check_pieces("tekken", "Hello|World|ABCabc|Def"); /* the case rises: a new word */
    check_pieces("tekken", "it|'s| I|'LLx");          /* no contractions: one odd character first */
    check_pieces("tekken", "A\xe4\xb8\xad|BC|!|1|2| http|://|a|//\n/|x");
    check_pieces("gpt2", "He|'s|'|S| a|123| | !?|\n\n| x| 12");
    check_pieces("smollm2", "He|'s|'|S| a|1|2|3|  |1| |2| x");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_classes_agree),
        cmocka_unit_test(test_random_texts),
        cmocka_unit_test(test_by_hand),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);

    sp_free(agreed);
    return failed;
}
