/*
 * Masks: at each step of many drawn outputs the mask is what reading every token byte by byte says,
 * however the states were made, forgotten and found again.
 */
#include "support/grammar_world.h"

#include "base/alloc.h"

#include <string.h>

static const struct {
    sp_grammar_kind kind;
    const char *text;
} grammars[] = {
    {SP_GRAMMAR_JSON_OBJECT, NULL},
    {SP_GRAMMAR_JSON_SCHEMA, "{\"type\": \"object\", \"properties\": {\"name\": {\"type\": "
                             "\"string\"}, \"age\": {\"type\": \"integer\", \"minimum\": 0}, "
                             "\"tags\": {\"type\": \"array\", \"items\": {\"type\": \"string\"}}}, "
                             "\"required\": [\"name\", \"tags\"]}"},
    {SP_GRAMMAR_JSON_SCHEMA, "{\"$defs\": {\"n\": {\"type\": \"object\", \"properties\": {\"v\": "
                             "{\"enum\": [1, \"a\", null]}, \"next\": {\"anyOf\": [{\"$ref\": "
                             "\"#/$defs/n\"}, {\"type\": \"null\"}]}}, \"required\": [\"v\", "
                             "\"next\"]}}, \"$ref\": \"#/$defs/n\"}"},
    {SP_GRAMMAR_JSON_SCHEMA, "{\"type\": \"object\", \"additionalProperties\": {\"type\": "
                             "\"number\"}, \"properties\": {\"abc\": true, \"abd\": {\"type\": "
                             "\"boolean\"}}}"},
    {SP_GRAMMAR_JSON_SCHEMA,
     "{\"anyOf\": [{\"type\": \"object\", \"properties\": {\"a\": {\"type\": "
     "\"string\", \"maxLength\": 3}}, \"required\": [\"a\"]}, {\"type\": "
     "\"object\", \"properties\": {\"a\": {\"type\": \"array\", "
     "\"minItems\": 2, \"maxItems\": 4}}, \"required\": [\"a\"]}]}"},
    {SP_GRAMMAR_JSON_SCHEMA, "{\"type\": \"string\", \"pattern\": \"^[a-z\\u00e9\\\"]+( the| "
                             "a)*$\"}"},
    {SP_GRAMMAR_JSON_SCHEMA, "{\"type\": [\"number\", \"null\"], \"exclusiveMinimum\": -12, "
                             "\"maximum\": 345}"},
    {SP_GRAMMAR_REGEX, "(the |a )*[^aeiou]{2,5}(er|ing)?"},
    {SP_GRAMMAR_CHOICE, "[\"yes\", \"no\", \"not yet\", \"nothing\"]"},
    {SP_GRAMMAR_CALLS,
     "{\"begin\": \"<tool_call>\\n{\\\"name\\\": \\\"\", \"middle\": \"\\\", \\\"arguments\\\": "
     "\", "
     "\"end\": \"}\\n</tool_call>\", \"between\": \"\\n\", \"many\": true, \"tools\": [{\"name\": "
     "\"get\", \"parameters\": {\"type\": \"object\", \"properties\": {\"x\": {\"$ref\": "
     "\"#/$defs/y\"}}, \"$defs\": {\"y\": {\"type\": \"integer\"}}}}, {\"name\": \"get_all\", "
     "\"parameters\": null}]}"},
    {SP_GRAMMAR_CALLS,
     "{\"free\": \"<tool_call>\", \"begin\": \"<tool_call>\\n{\\\"name\\\": \\\"\", \"middle\": "
     "\"\\\", "
     "\\\"arguments\\\": \", \"end\": \"}\\n</tool_call>\", \"between\": \"\\n\", \"many\": true, "
     "\"tools\": [{\"name\": \"get\", \"parameters\": {\"type\": \"object\", \"properties\": "
     "{\"x\": "
     "{\"type\": \"boolean\"}}, \"required\": [\"x\"]}}, {\"name\": \"go\", \"any\": true}]}"},
    {SP_GRAMMAR_CALLS,
     "{\"tagged\": true, \"begin\": \"<tool_call>\\n<function=\", \"middle\": \">\\n\", \"end\": "
     "\"</function>\\n</tool_call>\", \"between\": \"\\n\", \"many\": false, \"tools\": "
     "[{\"name\": "
     "\"get\", \"parameters\": {\"type\": \"object\", \"properties\": {\"s\": {\"type\": "
     "\"string\"}, "
     "\"n\": {\"type\": [\"integer\", \"null\"]}}, \"required\": [\"s\"]}}]}"},
    {SP_GRAMMAR_EBNF, "root ::= expr\nexpr ::= expr [-+] term | term\nterm ::= [a-z0-9]+ | \"(\" "
                      "expr \")\" | \"the \" term"},
    {SP_GRAMMAR_EBNF,
     "root ::= (line \"\\n\")*\nline ::= \"in\" sp line | [^\\n aeiou]{2,9} | sp? "
     "list\nsp ::= \" \"*\nlist ::= \"[\" (list (\",\" sp list)*)? \"]\" | . \"t\"*"},
    {SP_GRAMMAR_EBNF,
     "root ::= a | b\na ::= \"(\" b \")\" | \"er\"\nb ::= \"(\" a \"]\" | \"e\" root? "
     "\"r\""},
};
#define N_GRAMMARS (sizeof grammars / sizeof *grammars)

/* Whether the output may go on with a token, by its bytes alone. */
static bool reads(sp_grammar *grammar, int32_t *tokens, int32_t n, int32_t id)
{
    sp_grammar_place place = {0};
    sp_grammar_next next;

    tokens[n] = id;
    return sp_grammar_follow(grammar, &place, tokens, n + 1, NULL, &next, NULL) == SP_OK;
}

static void check_masks(sp_grammar *grammar, const int32_t *tokens, int32_t n, size_t which)
{
    int32_t own[256];
    sp_grammar_place place = {0};

    for (int32_t i = 0; i <= n; i++) {
        uint32_t mask[WORLD_WORDS];
        sp_grammar_next next;
        bool any = false;

        memcpy(own, tokens, (size_t)i * sizeof *own);
        assert_ok(sp_grammar_follow(grammar, &place, tokens, i, mask, &next, NULL), NULL);
        for (int32_t id = 0; id < WORLD_IDS; id++) {
            if (world_allows(mask, id) != reads(grammar, own, i, id))
                fail_msg("grammar %zu, step %d: token %d is %sin the mask", which, i, id,
                         world_allows(mask, id) ? "" : "not ");
            any |= world_allows(mask, id);
        }
        assert_int_equal(any, next.goes_on);
        assert_true(any || next.complete);
    }
}

static void test_masks(void **state)
{
    grammar_world world;
    sp_test_random random = {1};

    (void)state;
    grammar_world_open(&world);
    for (size_t i = 0; i < N_GRAMMARS; i++) {
        sp_grammar *grammar = grammar_world_compile(&world, grammars[i].kind, grammars[i].text);

        for (int round = 0; round < 6; round++) {
            sp_text text = {0};
            int32_t tokens[64], n;

            if (grammar_world_draw(&world, grammar, &random, tokens, 60, &n, &text))
                assert_true(sp_grammar_has(grammar, text.data, text.bytes));
            check_masks(grammar, tokens, n, i);
            sp_text_free(&text);
        }
        sp_grammar_release(grammar);
    }
    grammar_world_close(&world);
}

/* What a grammar answers does not depend on which outputs were followed before. */
static void test_order_of_outputs(void **state)
{
    grammar_world world;
    sp_test_random random = {2};

    (void)state;
    grammar_world_open(&world);
    for (size_t i = 0; i < N_GRAMMARS; i++) {
        sp_grammar *used = grammar_world_compile(&world, grammars[i].kind, grammars[i].text);
        sp_grammar *fresh = grammar_world_compile(&world, grammars[i].kind, grammars[i].text);
        int32_t tokens[64], n, other[64], n_other;
        sp_text text = {0};

        grammar_world_draw(&world, used, &random, other, 60, &n_other, &text);
        grammar_world_draw(&world, used, &random, tokens, 60, &n, &text);
        for (int32_t at = n; at >= 0; at--) {
            uint32_t a[WORLD_WORDS], b[WORLD_WORDS];
            sp_grammar_place here = {0}, there = {0};
            sp_grammar_next next, same;

            assert_ok(sp_grammar_follow(used, &here, tokens, at, a, &next, NULL), NULL);
            assert_ok(sp_grammar_follow(fresh, &there, tokens, at, b, &same, NULL), NULL);
            assert_memory_equal(a, b, sizeof a);
            assert_int_equal(next.complete, same.complete);
        }
        sp_text_free(&text);
        sp_grammar_release(used);
        sp_grammar_release(fresh);
    }
    grammar_world_close(&world);
}

static void test_leaving(void **state)
{
    grammar_world world;
    sp_grammar *grammar;
    sp_grammar_place place = {0};
    sp_grammar_next next;
    sp_error error;
    int32_t *tokens;
    size_t n;

    (void)state;
    grammar_world_open(&world);
    grammar = grammar_world_compile(&world, SP_GRAMMAR_CHOICE, "[\"yes\", \"no\"]");
    assert_ok(sp_tokenizer_encode(world.tokenizer, "yesterday", 9, false, &tokens, &n, NULL), NULL);
    assert_int_equal(sp_grammar_follow(grammar, &place, tokens, (int32_t)n, NULL, &next, &error),
                     SP_ERR_STATE);
    assert_string_equal(error.code, SP_GRAMMAR_LEFT);
    assert_true(error.position >= 0 && error.position < (int64_t)n);
    tokens[0] = WORLD_IDS; /* and an id that the vocabulary lacks, and a special one */
    assert_int_equal(sp_grammar_follow(grammar, &place, tokens, 1, NULL, &next, &error),
                     SP_ERR_STATE);
    tokens[0] = 511;
    assert_int_equal(sp_grammar_follow(grammar, &place, tokens, 1, NULL, &next, &error),
                     SP_ERR_STATE);
    sp_free(tokens);
    sp_grammar_release(grammar);
    grammar_world_close(&world);
}

/* A thought may hold anything, and is over with its end; the grammar begins after it. */
static void test_thoughts(void **state)
{
    static const struct {
        sp_grammar_thought thought;
        const char *text;
        bool has;
    } cases[] = {
        {SP_GRAMMAR_NO_THOUGHT, "no", true},
        {SP_GRAMMAR_NO_THOUGHT, "<think>\n</think>no", false},
        {SP_GRAMMAR_MAY_THINK, "no", true},
        {SP_GRAMMAR_MAY_THINK, "<think>\nyes</thin</</think>\n\nno", true},
        {SP_GRAMMAR_MAY_THINK, "<think>\xff\n</think>no", true},
        {SP_GRAMMAR_MAY_THINK, "<think>no", false},
        {SP_GRAMMAR_MAY_THINK, "</think>no", false},
        {SP_GRAMMAR_THINKS, "hm <</think>no", true},
        {SP_GRAMMAR_THINKS, "</think>\nno", true},
        {SP_GRAMMAR_THINKS, "</think>\n\n\nno", false},
        {SP_GRAMMAR_THINKS, "no", false},
        {SP_GRAMMAR_THINKS, "</think>no</think>no", false},
    };
    grammar_world world;

    (void)state;
    grammar_world_open(&world);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const sp_grammar_source source = {SP_GRAMMAR_CHOICE, cases[i].thought, "[\"no\"]", 6};
        sp_grammar *grammar;
        sp_error error;

        assert_ok(sp_grammar_compile(world.vocabulary, &source, &grammar, &error), &error);
        if (sp_grammar_has(grammar, cases[i].text, strlen(cases[i].text)) != cases[i].has)
            fail_msg("%s", cases[i].text);
        sp_grammar_release(grammar);
    }
    grammar_world_close(&world);
}

/* States are forgotten when their memory is full, and an output goes on as if nothing had been. */
static void test_forgetting(void **state)
{
    grammar_world world;
    sp_grammar *grammar;
    sp_grammar_place place = {0};
    sp_grammar_next next;
    uint32_t mask[WORLD_WORDS], again[WORLD_WORDS];
    int32_t tokens[800], n = 0;
    size_t n_open, most = 0;
    int32_t *open;

    (void)state;
    grammar_world_open(&world);
    grammar = grammar_world_compile(&world, SP_GRAMMAR_JSON_SCHEMA, "{\"type\": \"array\"}");
    assert_ok(sp_tokenizer_encode(world.tokenizer, "[", 1, false, &open, &n_open, NULL), NULL);
    assert_int_equal(n_open, 1);
    for (; n < 800; n++) { /* deeper and deeper, until no bracket may open any more */
        assert_ok(sp_grammar_follow(grammar, &place, tokens, n, mask, &next, NULL), NULL);
        most = sp_grammar_memory(grammar) > most ? sp_grammar_memory(grammar) : most;
        if (!world_allows(mask, open[0]))
            break;
        tokens[n] = open[0];
    }
    assert_in_range(n, 600, SP_NET_DEPTH_MAX);
    assert_true(next.goes_on);
    assert_true(most < SP_GRAMMAR_STATES_BYTES_MAX + (16u << 20));
    place = (sp_grammar_place){.epoch = 77, .state = 12345, .n_tokens = 3};
    assert_ok(sp_grammar_follow(grammar, &place, tokens, n, again, &next, NULL), NULL);
    assert_memory_equal(mask, again, sizeof mask);
    sp_free(open);
    sp_grammar_release(grammar);
    grammar_world_close(&world);
}

/* Every allocation of a compile and of a step may fail: a status, and nothing is lost. */
static void test_out_of_memory(void **state)
{
    grammar_world world;
    const char *schema = grammars[1].text;
    size_t before;
    bool failed = true;

    (void)state;
    grammar_world_open(&world);
    before = sp_alloc_bytes();
    for (int64_t n = 0; failed; n++) {
        sp_grammar *grammar = NULL;
        sp_error error;
        sp_status status;
        sp_text text = {0};
        int32_t tokens[8] = {0};
        sp_grammar_place place = {0};
        sp_grammar_next next;
        uint32_t mask[WORLD_WORDS];

        sp_alloc_fail_after(n);
        status = grammar_world_try(&world, SP_GRAMMAR_JSON_SCHEMA, schema, &grammar, &error);
        if (status == SP_OK)
            status = sp_grammar_follow(grammar, &place, tokens, 0, mask, &next, &error);
        failed = sp_alloc_failed();
        sp_alloc_fail_after(-1);
        assert_true(status == SP_OK || (failed && status == SP_ERR_MEMORY));
        sp_grammar_release(grammar);
        sp_text_free(&text);
        assert_int_equal(sp_alloc_bytes(), before);
    }
    grammar_world_close(&world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_masks),      cmocka_unit_test(test_order_of_outputs),
        cmocka_unit_test(test_leaving),    cmocka_unit_test(test_thoughts),
        cmocka_unit_test(test_forgetting), cmocka_unit_test(test_out_of_memory),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
