/*
 * Text grammars: which texts are in them, what is refused and where, and that no text takes long.
 */
#include "support/grammar_world.h"

#include "base/alloc.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#define TEXTS_MAX 10

/* Texts end with NULL. */
static const struct {
    const char *grammar;
    const char *in[TEXTS_MAX], *out[TEXTS_MAX];
} rows[] = {
    {"root ::= \"yes\" | \"no\"", {"yes", "no"}, {"", "y", "yesno", "No", "yes "}},
    {"# all\nroot ::= # of it\n  \"a\"\n  | b # one\nb\n::= \"b\" \"c\"\n#end", {"a", "bc"}, {"b"}},
    {"root::=\"a\"b c\nb::=\"b\"c::=[c]", {"abc"}, {"ab", "ac"}},
    {"root ::= [a-c]* [^a-c\\n] .", {"x\n", "abcabc-\xc3\xa9"}, {"aa", "\nx", "x", "\xc3\xa9"}},
    {"root ::= [-a] [a-] [\\]\\\\^] [\\x41-\\u0043\\U0001F600]",
     {"-a]A", "a-\\B", "aa^\xf0\x9f\x98\x80"},
     {"ba]A", "aa]D"}},
    {"root ::= \"\\x41\\u00e9\\U0001F600\\n\\t\\\"\\\\\\[\"",
     {"A\xc3\xa9\xf0\x9f\x98\x80\n\t\"\\["},
     {"A"}},
    {"root ::= [\\u07ff-\\u0800\\ud800-\\uE000]",
     {"\xdf\xbf", "\xe0\xa0\x80", "\xee\x80\x80"},
     {"\xed\xa0\x80", "\xc3\xa9", "\xee\x80\x81"}},
    {"root ::= ([0-9]{3} \"-\"){2} [x]{0,1} \"y\" { 2 , } z{0}\nz ::= \"z\"",
     {"123-456-yy", "123-456-xyyyy"},
     {"123-456-y", "12-456-yy", "123-456-yyz"}},
    {"root ::= (a | \"x\" \"y\"?)+\na ::= | \"a\"", {"a", "x", "xyaax"}, {"y", "axyy"}},
    {"root ::= ((\"a\"*)* | (\"b\"?)+)* \"c\"", {"c", "abbac"}, {"", "ab", "cc"}},
    {"root ::= e\ne ::= \"\" | \"(\" e \")\" e", {"()", "(()())()"}, {"(", ")(", "(()"}},
    {"root ::= \"a\" root \"b\" | \"ab\"", {"ab", "aaabbb"}, {"aab", "abab"}},
    {"root ::= root \"+\" t | root \"-\" t | t\nt ::= t \"*\" f | f\nf ::= [0-9] | \"(\" root "
     "\")\"",
     {"1", "1+2-3", "1*(2+3)*4-5"},
     {"+1", "1+", "(1", "1**2"}},
    {"root ::= x ((\"a\" | x) \"!\")*\nx ::= x x | x | \"x\"",
     {"x", "xx", "xxa!x!xx!"},
     {"a!", "x!a"}},
    {"root ::= \"\" | root \"a\" | \"b\" root \"c\"",
     {"a", "bc", "bbcacaa", "baac"},
     {"b", "cb", "ab"}},
    {"root ::= a-b.c_1 .\na-b.c_1 ::= 2nd\n2nd ::= \"2\"", {"2x", "22"}, {"2"}},
    {"root ::= \"a\" | never\nnever ::= \"b\" never", {"a"}, {"b", "bb"}},
    {"root ::= object\nobject ::= \"{\" ws (pair (\",\" ws pair)*)? \"}\" ws\npair ::= string "
     "\":\" "
     "ws value\nvalue ::= object | string | [0-9]+ ws | \"[\" ws (value (\",\" ws value)*)? \"]\" "
     "ws\nstring ::= \"\\\"\" ([^\"\\\\\\x7F\\x00-\\x1F] | \"\\\\\" [\"\\\\nrt])* \"\\\"\" ws\n"
     "ws ::= [ \\t\\n]*",
     {"{}", "{ \"a\": [1, {\"b\\n\":\"\"}], \"c\" :2 }\n"},
     {"{", "{\"a\"}", "{\"a\":1,}", "[]", "{\"a\n\":1}"}},
};

static void test_texts(void **state)
{
    grammar_world world;

    (void)state;
    grammar_world_open(&world);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        sp_grammar *grammar = grammar_world_compile(&world, SP_GRAMMAR_EBNF, rows[i].grammar);

        for (int t = 0; t < TEXTS_MAX && rows[i].in[t]; t++)
            if (!sp_grammar_has(grammar, rows[i].in[t], strlen(rows[i].in[t])))
                fail_msg("%s lacks %s", rows[i].grammar, rows[i].in[t]);
        for (int t = 0; t < TEXTS_MAX && rows[i].out[t]; t++)
            if (sp_grammar_has(grammar, rows[i].out[t], strlen(rows[i].out[t])))
                fail_msg("%s has %s", rows[i].grammar, rows[i].out[t]);
        sp_grammar_release(grammar);
    }
    grammar_world_close(&world);
}

#define BAD   SP_GRAMMAR_MALFORMED
#define NOT   SP_GRAMMAR_UNSUPPORTED
#define LARGE SP_GRAMMAR_TOO_LARGE
#define NEVER SP_GRAMMAR_UNSATISFIABLE

static const struct {
    const char *grammar, *code, *words[2];
} refusals[] = {
    {"", BAD, {"no rule root", "line 1, column 1"}},
    {"a ::= \"a\"", BAD, {"no rule root"}},
    {"root \"a\"", BAD, {"::=", "line 1, column 6"}},
    {"root = \"a\"", BAD, {"::=", "line 1, column 6"}},
    {"root := \"a\"", BAD, {"::=", "line 1, column 6"}},
    {"root ::= \"a\"\n)", BAD, {"closes nothing", "line 2, column 1"}},
    {"::= \"a\"", BAD, {"no name", "line 1, column 1"}},
    {"root ::= a\n\n  b ::= c", BAD, {"the rule a, which is not defined", "line 1, column 10"}},
    {"root ::= \"\xc3\xa9\" a", BAD, {"the rule a,", "line 1, column 14"}},
    {"root ::= \"a\"\nroot ::= \"b\"", BAD, {"defined twice", "line 2, column 1"}},
    {"root ::= \"a", BAD, {"a literal without its end", "line 1, column 10"}},
    {"root ::= [a", BAD, {"a class without its end", "line 1, column 10"}},
    {"root ::= (\"a\"", BAD, {"a group without its end", "line 1, column 10"}},
    {"root ::= (\"a\"\nb ::= \"c\"", BAD, {"a group without its end", "line 1, column 10"}},
    {"root ::= []", BAD, {"an empty class"}},
    {"root ::= [^]", BAD, {"an empty class"}},
    {"root ::= [b-a]", BAD, {"no order", "line 1, column 11"}},
    {"root ::= \"a\"{2,1}", BAD, {"no order", "line 1, column 13"}},
    {"root ::= \"a\"{,1}", BAD, {"without a number"}},
    {"root ::= \"a\"{1", BAD, {"no count"}},
    {"root ::= \"a\"{1;2}", BAD, {"no count", "line 1, column 15"}},
    {"root ::= *", BAD, {"a repetition of nothing", "line 1, column 10"}},
    {"root ::= \"a\"**", BAD, {"a repetition of nothing", "line 1, column 14"}},
    {"root ::= \"\\u12\"", BAD, {"cut short"}},
    {"root ::= \"\\U00110000\"", BAD, {"no character"}},
    {"root ::= \"\\ud800\"", BAD, {"surrogate", "line 1, column 11"}},
    {"root ::= \"a\xff\"", BAD, {"UTF-8", "line 1, column 12"}},
    {"root ::= \"\\", BAD, {"a backslash"}},
    {"root ::= \"a\" , \"b\"", BAD, {"means nothing here", "line 1, column 14"}},
    {"root ::= \"\\q\"", NOT, {"an escape"}},
    {"root ::= [\\d]", NOT, {"an escape"}},
    {"start: \"a\"", NOT, {"Lark", "line 1, column 6"}},
    {"root ::= \"a\"\n?start: \"a\"", NOT, {"Lark", "line 2, column 7"}},
    {"?start: \"a\"", NOT, {"Lark", "line 1, column 1"}},
    {"%import common.WORD", NOT, {"Lark"}},
    {"root ::= \"a\"\n%ignore \" \"", NOT, {"Lark", "line 2, column 1"}},
    {"root ::= /a+/", NOT, {"between slashes"}},
    {"root ::= \"a\" ~ 3", NOT, {"~"}},
    {"root ::= 'a'", NOT, {"single quotes"}},
    {"root ::= [a-z] - [b]", NOT, {"an exception"}},
    {"root ::= \"a\" (=\"b\")", NOT, {"look-ahead", "line 1, column 14"}},
    {"root ::= \"a\" (?!\"b\")", NOT, {"look-ahead"}},
    {"root ::= <think> .", NOT, {"a token", "line 1, column 10"}},
    {"root ::= !<[1000]>", NOT, {"a token"}},
    {"root ::= TagDispatch((\"a\", root))", NOT, {"TagDispatch", "line 1, column 10"}},
    {"root ::= a \"x\"\na ::= b\nb ::= a | \"c\"", NOT, {"left recursion"}},
    {"root ::= e\nws ::= \" \"*\ne ::= ws e \"x\" | \"y\"",
     NOT,
     {"the rule e, which comes back", "line 3, column 1"}},
    {"root ::= \"a\" root", NEVER, {"no text"}},
    {"root ::= root", NEVER, {"no text"}},
    {"root ::= a{2}\na ::= \"(\" b \")\"\nb ::= a", NEVER, {"no text"}},
    {"root ::= [\\ud800-\\udfff]", NEVER, {"no text"}},
    {"root ::= \"\"", NEVER, {NULL}},
    {"root ::=", NEVER, {NULL}},
    {"root ::= \"a\"{2001}", LARGE, {"2000", "line 1, column 14"}},
    {"root ::= ([ab]{2000}){2000}", LARGE, {"the rule root", "line 1, column 1"}},
    {"root ::= [ab]* \"a\" [ab]{30}", LARGE, {"states"}},
};

static void test_refused(void **state)
{
    grammar_world world;
    size_t before;

    (void)state;
    grammar_world_open(&world);
    before = sp_alloc_bytes();
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        const char *text = refusals[i].grammar;
        sp_grammar *grammar = NULL;
        sp_error error;
        sp_status status = grammar_world_try(&world, SP_GRAMMAR_EBNF, text, &grammar, &error);

        if (status == SP_OK)
            fail_msg("%s is taken", text);
        if (strcmp(error.code, refusals[i].code) != 0)
            fail_msg("%s: %s: %s", text, error.code, error.text);
        for (int w = 0; w < 2 && refusals[i].words[w]; w++)
            if (!strstr(error.text, refusals[i].words[w]))
                fail_msg("%s: %s", text, error.text);
        assert_int_equal(sp_alloc_bytes(), before);
    }
    grammar_world_close(&world);
}

/* ---- bounds -------------------------------------------------------------------------------- */

static void add_many(sp_text *out, const char *before, const char *format, int n, const char *after)
{
    sp_text_add(out, before);
    for (int i = 0; i < n; i++) {
        char line[160];

        snprintf(line, sizeof line, format, i, i + 1, i + 2);
        sp_text_add(out, line);
    }
    sp_text_add(out, after);
}

/* NULL: it is taken. */
static void check_bound(const grammar_world *world, sp_text *text, const char *code)
{
    clock_t begin = clock();
    sp_grammar *grammar = NULL;
    sp_error error;
    sp_status status = grammar_world_try(world, SP_GRAMMAR_EBNF, text->data, &grammar, &error);

    assert_true(clock() - begin < 30 * CLOCKS_PER_SEC); /* with sanitizers, on a busy machine */
    if ((status == SP_OK) != (code == NULL) || (code && strcmp(error.code, code) != 0))
        fail_msg("%.60s: %s", text->data, status == SP_OK ? "is taken" : error.text);
    sp_grammar_release(grammar);
    sp_text_free(text);
}

static void test_bounds(void **state)
{
    grammar_world world;
    sp_text text = {0};

    (void)state;
    grammar_world_open(&world);
    add_many(&text, "root ::= ", "(", 64, "\"a\"");
    add_many(&text, "", ")", 64, "");
    check_bound(&world, &text, NULL);
    add_many(&text, "root ::= ", "(", 100000, "");
    check_bound(&world, &text, LARGE);
    add_many(&text, "root ::= r0\n", "r%d ::= r%d | \"a\"\n", 4000, "r4000 ::= \"a\"");
    check_bound(&world, &text, NULL);
    add_many(&text, "root ::= r0\n", "r%d ::= r%d \"x\" | \"a\"\n", 4000, "r4000 ::= \"a\"");
    check_bound(&world, &text, LARGE);
    add_many(&text, "root ::= r0\n", "r%d ::= r%d? r%d?\n", 2000, "r2000::=\"a\" r2001::=\"b\"");
    check_bound(&world, &text, LARGE);
    add_many(&text, "root ::= r0\n", "r%d ::= r%d r%d\n", 26, "r26::=\"a\"{2} r27::=\"b\"");
    check_bound(&world, &text, NULL);
    add_many(&text, "root ::= r0\n",
             "r%1$d ::= p%1$d | q%1$d\np%1$d ::= r%2$d \"1\"\nq%1$d ::= r%2$d \"2\"\n", 28,
             "r28 ::= \"a\"");
    check_bound(&world, &text, LARGE);
    add_many(&text, "root ::= \"x\" (r0 | r1 | r2)\n",
             "r%1$d ::= p%1$d | q%1$d\np%1$d ::= r%2$d \"1\"\nq%1$d ::= r%2$d \"2\"\n", 14,
             "r14 ::= \"a\"");
    check_bound(&world, &text, LARGE);
    add_many(&text, "root ::= r1\n", "r%d ::= \"a\"\n", 5000, "");
    check_bound(&world, &text, LARGE);
    add_many(&text, "root ::= r0", " | r%d", 3000, "\n");
    add_many(&text, "", "r%d ::= \"a\" [b-x]*\n", 3000, "");
    check_bound(&world, &text, NULL);
    add_many(&text, "root ::= \"x\"\n", "r%d ::= ([a]{2000}){100}\n", 4000, "");
    check_bound(&world, &text, LARGE);
    add_many(&text, "root ::= \"x", "abcdefghi", 30000, "\"");
    check_bound(&world, &text, LARGE);
    add_many(&text, "", "#", 200000, "\nroot ::= \"a\"");
    check_bound(&world, &text, NULL);
    grammar_world_close(&world);
}

/* A byte that opens many rules, one in another, as deep as they may be open: masks are those of a
 * grammar that met no other output, and what a mask allows can be followed to the end. */
static void test_many_opened(void **state)
{
    grammar_world world;
    sp_grammar *grammar;
    sp_text text = {0};
    sp_grammar_place place = {0};
    sp_grammar_next next;
    int32_t *open, tokens[2048], n = 0, last;
    size_t n_open;
    uint32_t mask[WORLD_WORDS];

    (void)state;
    grammar_world_open(&world);
    add_many(&text, "root ::= r0 \n", "r%d ::= r%d \"x\"? \"y\"\n", 12,
             "r12 ::= \"(\" r0 \")\" | \"z\"");
    grammar = grammar_world_compile(&world, SP_GRAMMAR_EBNF, text.data);
    assert_ok(sp_tokenizer_encode(world.tokenizer, "(", 1, false, &open, &n_open, NULL), NULL);
    assert_int_equal(n_open, 1);
    for (; n < 2048; n++) {
        assert_ok(sp_grammar_follow(grammar, &place, tokens, n, mask, &next, NULL), NULL);
        if (!world_allows(mask, open[0]))
            break;
        tokens[n] = open[0];
    }
    last = n;
    assert_in_range(last, 100, 400); /* brackets: 13 rules each */
    for (; n < 2048 && next.goes_on && !next.complete; n++) {
        int32_t own[2048], first = -1;

        for (int32_t id = 0; id < WORLD_IDS; id++) {
            sp_grammar_place again = {0};
            sp_grammar_next unused;
            bool reads;

            if (world_allows(mask, id) && first < 0)
                first = id;
            if (n > last + 3)
                continue;
            memcpy(own, tokens, (size_t)n * sizeof *own);
            own[n] = id;
            reads = sp_grammar_follow(grammar, &again, own, n + 1, NULL, &unused, NULL) == SP_OK;
            assert_int_equal(reads, world_allows(mask, id));
        }
        assert_true(first >= 0);
        tokens[n] = first;
        assert_ok(sp_grammar_follow(grammar, &place, tokens, n + 1, mask, &next, NULL), NULL);
    }
    sp_free(open);
    sp_text_free(&text);
    sp_grammar_release(grammar);
    grammar_world_close(&world);
}

/* Every allocation may fail: a status, and nothing is lost. */
static void test_out_of_memory(void **state)
{
    static const char grammar_text[] =
        "root ::= root \"+\" t | t\nt ::= [a-c^]* (\"x\" t? \"y\"){2}";
    grammar_world world;
    size_t before;
    bool failed = true;

    (void)state;
    grammar_world_open(&world);
    before = sp_alloc_bytes();
    for (int64_t n = 0; failed; n++) {
        sp_grammar *grammar = NULL;
        sp_error error;
        sp_status status;

        sp_alloc_fail_after(n);
        status = grammar_world_try(&world, SP_GRAMMAR_EBNF, grammar_text, &grammar, &error);
        failed = sp_alloc_failed();
        sp_alloc_fail_after(-1);
        assert_true(status == SP_OK || (failed && status == SP_ERR_MEMORY));
        sp_grammar_release(grammar);
        assert_int_equal(sp_alloc_bytes(), before);
    }
    grammar_world_close(&world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_texts),         cmocka_unit_test(test_refused),
        cmocka_unit_test(test_bounds),        cmocka_unit_test(test_many_opened),
        cmocka_unit_test(test_out_of_memory),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
