/*
 * Patterns against PCRE2: the same texts match, wholly or, in a JSON string, somewhere in what the
 * string says. And what is refused, by its name.
 */
#include "support/grammar_world.h"

#include "grammar/regex.h"

#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

static const char *const patterns[] = {
    "abc",
    "a|bc|",
    "(ab|a)(c|bcd)(d*)",
    "(a|b)*a(a|b){3}",
    "[a-c]{2,4}",
    "[^ab]+",
    "x*?y+?z??",
    "\\d{2}-\\w+\\s?",
    "[\\d_-]+",
    "(?:ab){0}c",
    "a{2,}b{0,1}",
    "\\x41\\u00e9",
    "[\\u00e0-\\u00ff]+",
    "[^\\x00-\\x7f]",
    ".\\.\\n?",
    "((a*)*)*b",
    "\\$\\{\\}\\[\\]\\(\\)",
    "^ab|cd$",
    "^a$|^$",
    "[a\\-z]\\\\?\"?",
    "\\W\\D\\S",
    "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80?",
    "[\xe2\x82\xac-\xf0\x9f\x98\x80]",
};
#define N_PATTERNS (sizeof patterns / sizeof *patterns)

/* Pieces that texts are made of: what the patterns name, and what they do not. */
static const char *const pieces[] = {"a",        "b",        "c",
                                     "d",        "x",        "y",
                                     "z",        "A",        "1",
                                     "23",       "_",        "-",
                                     " ",        "\n",       "\"",
                                     "\\",       ".",        "{",
                                     "\xc3\xa9", "\xc3\xbf", "\xe2\x82\xac",
                                     "$",        "[",        "]",
                                     "()",       "ab",       "\xf0\x9f\x98\x80"};
#define N_PIECES (sizeof pieces / sizeof *pieces)

static pcre2_code *reference_of(const char *pattern, bool whole)
{
    /* What is a range of code points here is one there; PCRE2 writes the escapes in another way. */
    uint32_t options = PCRE2_UTF | PCRE2_ALT_BSUX | PCRE2_DOLLAR_ENDONLY;
    int number;
    PCRE2_SIZE offset;
    pcre2_code *code;

    code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED,
                         options | (whole ? PCRE2_ANCHORED | PCRE2_ENDANCHORED : 0), &number,
                         &offset, NULL);
    if (!code)
        fail_msg("PCRE2 refuses %s", pattern);
    return code;
}

static bool matches(const pcre2_code *code, const char *text, size_t bytes)
{
    pcre2_match_data *data = pcre2_match_data_create(8, NULL);
    int n = pcre2_match(code, (PCRE2_SPTR)text, bytes, 0, 0, data, NULL);

    pcre2_match_data_free(data);
    return n >= 0;
}

static void make_text(sp_test_random *random, sp_text *out)
{
    uint32_t n = sp_test_below(random, 9);

    sp_text_clear(out);
    sp_text_add(out, "");
    for (uint32_t i = 0; i < n; i++)
        sp_text_add(out, pieces[sp_test_below(random, N_PIECES)]);
}

static void compare(const grammar_world *world, const char *pattern, bool whole,
                    sp_test_random *random)
{
    pcre2_code *code = reference_of(pattern, whole);
    sp_text text = {0}, source = {0}, read = {0};
    sp_grammar *grammar;
    int n_matches = 0;

    if (whole) {
        sp_text_add(&source, pattern);
    } else {
        sp_text_add(&source, "{\"type\": \"string\", \"pattern\": ");
        sp_text_json_string(&source, pattern, strlen(pattern));
        sp_text_add(&source, "}");
    }
    grammar = grammar_world_compile(world, whole ? SP_GRAMMAR_REGEX : SP_GRAMMAR_JSON_SCHEMA,
                                    source.data);
    for (int round = 0; round < 4000; round++) {
        bool want;

        make_text(random, &text);
        want = matches(code, text.data, text.bytes);
        sp_text_clear(&read);
        if (whole)
            sp_text_add_bytes(&read, text.data, text.bytes);
        else
            sp_text_json_string(&read, text.data, text.bytes);
        if (sp_grammar_has(grammar, read.data ? read.data : "", read.bytes) != want)
            fail_msg("%s %s %s", pattern, want ? "does not take" : "takes", text.data);
        n_matches += want;
    }
    print_message("%-26s %s: %d of 4000\n", pattern, whole ? "whole" : "in a string", n_matches);
    sp_grammar_release(grammar);
    pcre2_code_free(code);
    sp_text_free(&text);
    sp_text_free(&source);
    sp_text_free(&read);
}

static void test_against_pcre(void **state)
{
    grammar_world world;
    sp_test_random random = {11};

    (void)state;
    grammar_world_open(&world);
    for (size_t i = 0; i < N_PATTERNS; i++) {
        compare(&world, patterns[i], true, &random);
        compare(&world, patterns[i], false, &random);
    }
    grammar_world_close(&world);
}

/* What is drawn from a pattern's masks matches it. */
static void test_drawn(void **state)
{
    grammar_world world;
    sp_test_random random = {12};

    (void)state;
    grammar_world_open(&world);
    for (size_t i = 0; i < N_PATTERNS; i++) {
        pcre2_code *code = reference_of(patterns[i], true);
        sp_grammar *grammar = grammar_world_compile(&world, SP_GRAMMAR_REGEX, patterns[i]);

        for (int round = 0; round < 50; round++) {
            sp_text text = {0};
            int32_t tokens[64], n;

            if (grammar_world_draw(&world, grammar, &random, tokens, 64, &n, &text) &&
                !matches(code, text.data ? text.data : "", text.bytes))
                fail_msg("%s: drew %s", patterns[i], text.data);
            sp_text_free(&text);
        }
        sp_grammar_release(grammar);
        pcre2_code_free(code);
    }
    grammar_world_close(&world);
}

static void test_refused(void **state)
{
    static const struct {
        const char *pattern, *code, *word;
        int64_t position;
    } cases[] = {
        {"(a)\\1", SP_GRAMMAR_UNSUPPORTED, "back reference", 4},
        {"(?=a)b", SP_GRAMMAR_UNSUPPORTED, "looking around", 1},
        {"(?<n>a)", SP_GRAMMAR_UNSUPPORTED, "a name", 1},
        {"a\\bb", SP_GRAMMAR_UNSUPPORTED, "an escape", 2},
        {"\\p{L}", SP_GRAMMAR_UNSUPPORTED, "an escape", 1},
        {"a^b", SP_GRAMMAR_UNSUPPORTED, "an anchor", 1},
        {"(a$)", SP_GRAMMAR_UNSUPPORTED, "an anchor", 2},
        {"[[:alpha:]]", SP_GRAMMAR_UNSUPPORTED, "a class by name", 1},
        {"a++", SP_GRAMMAR_UNSUPPORTED, "gives nothing back", 2},
        {"a{2001}", SP_GRAMMAR_UNSUPPORTED, "a count above", 6},
        {"(a", SP_GRAMMAR_MALFORMED, "a group without", 2},
        {"a)", SP_GRAMMAR_MALFORMED, "closes nothing", 1},
        {"[a", SP_GRAMMAR_MALFORMED, "a class without", 2},
        {"[]a]", SP_GRAMMAR_UNSUPPORTED, "an empty class", 1},
        {"[^]a]", SP_GRAMMAR_UNSUPPORTED, "an empty class", 2},
        {"[b-a]", SP_GRAMMAR_MALFORMED, "in no order", 4},
        {"*a", SP_GRAMMAR_MALFORMED, "of nothing", 0},
        {"a{3,2}", SP_GRAMMAR_MALFORMED, "in no order", 6},
        {"a\\", SP_GRAMMAR_MALFORMED, "a backslash", 2},
        {"\\x4", SP_GRAMMAR_MALFORMED, "cut short", 3},
        {"a\xff", SP_GRAMMAR_MALFORMED, "no UTF-8", 2},
        /* Exponential without bounds, by what they would need. */
        {"(a|b)*a(a|b){20}", SP_GRAMMAR_TOO_LARGE, "states", -1},
        {"((((a{99}){99}){99}){99})", SP_GRAMMAR_TOO_LARGE, "states", -1},
        {"([ab]*a[ab]{30}c){5}", SP_GRAMMAR_TOO_LARGE, "states", -1},
    };
    grammar_world world;

    (void)state;
    grammar_world_open(&world);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sp_grammar *grammar;
        sp_error error;

        if (grammar_world_try(&world, SP_GRAMMAR_REGEX, cases[i].pattern, &grammar, &error) ==
            SP_OK)
            fail_msg("%s is taken", cases[i].pattern);
        if (strcmp(error.code, cases[i].code) != 0 || !strstr(error.text, cases[i].word) ||
            error.position != cases[i].position)
            fail_msg("%s: %s, %s, position %lld", cases[i].pattern, error.code, error.text,
                     (long long)error.position);
    }
    grammar_world_close(&world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_pcre),
        cmocka_unit_test(test_drawn),
        cmocka_unit_test(test_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
