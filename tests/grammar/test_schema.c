/*
 * Schemas: texts that are in their grammars and texts that are not, worked out by hand from the
 * specification; numbers between bounds against arithmetic; what is refused, with its place; and
 * schemas made to hurt.
 */
#include "support/grammar_world.h"

#include "base/alloc.h"
#include "base/clock.h"

#include <stdio.h>
#include <string.h>

static grammar_world world;

static int open_world(void **state)
{
    (void)state;
    grammar_world_open(&world);
    return 0;
}

static int close_world(void **state)
{
    (void)state;
    grammar_world_close(&world);
    return 0;
}

static sp_grammar *compile(const char *schema)
{
    return grammar_world_compile(&world, SP_GRAMMAR_JSON_SCHEMA, schema);
}

static const struct {
    const char *schema;
    const char *has[8], *has_not[8];
} cases[] = {
    {"true",
     {"null", "{\"a\": [1, {}]}", "-1.5e3", "\"\\ud83d\\ude00\"", "[]"},
     {"", "nul", "01", "1.", "[1,]", "\"\\ud83d\"", "\"\n\"", "\"\\u0000\""}},
    {"{\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"string\"}, \"b\": {\"type\": "
     "\"null\"}}, \"required\": [\"b\"], \"additionalProperties\": false}",
     {"{\"a\":\"x\",\"b\":null}", "{\"b\": null}", "{\n  \"a\": \"\",\n  \"b\": null\n}"},
     {"{}", "{\"a\": \"x\"}", "{\"b\": null, \"a\": \"x\"}", "{\"b\": null, \"c\": 1}",
      "{\"a\": 1, \"b\": null}", "{\"b\":  null}", "{\"b\": null,}"}},
    {"{\"type\": \"object\", \"properties\": {\"a\": true, \"b\": true, \"c\": true}}",
     {"{}", "{\"a\": 1}", "{\"c\": 1}", "{\"a\": 1, \"c\": 2}", "{\"b\": [], \"c\": 2}"},
     {"{,\"a\": 1}", "{\"c\": 1, \"a\": 2}", "{\"d\": 1}", "{\"a\": 1 \"b\": 2}"}},
    {"{\"type\": \"object\", \"properties\": {\"ab\": {\"type\": \"integer\"}}, "
     "\"additionalProperties\": {\"type\": \"boolean\"}}",
     {"{}", "{\"ab\": 1, \"a\": true}", "{\"abc\": false}", "{\"\": true, \"b\xc3\xa9\": false}",
      "{\"ac\": true}"},
     {"{\"ab\": true}", "{\"a\": 1}", "{\"\\u0061b\": true}", "{\"abc\": 1}"}},
    {"{\"type\": \"object\", \"required\": [\"z\"]}",
     {"{\"z\": 1}", "{\"z\": 1, \"y\": 2}"},
     {"{}", "{\"y\": 1}"}},
    {"{\"type\": \"array\", \"items\": {\"type\": \"integer\"}, \"minItems\": 1, \"maxItems\": 3}",
     {"[1]", "[1, 2]", "[1,2,3]", "[\n 1\n]"},
     {"[]", "[1, 2, 3, 4]", "[1.5]", "[1,, 2]", "[1,]"}},
    {"{\"type\": \"array\", \"items\": {\"type\": \"integer\"}}",
     {"[]", "[ ]", "[1, 2, 3]"},
     {"[1,]", "[,]", "[1,\n]"}},
    {"{\"type\": \"array\", \"prefixItems\": [{\"type\": \"string\"}, {\"type\": \"integer\"}], "
     "\"items\": {\"type\": \"null\"}, \"minItems\": 1}",
     {"[\"a\"]", "[\"a\", 1]", "[\"a\", 1, null, null]"},
     {"[]", "[1]", "[\"a\", null]", "[\"a\", 1, 2]"}},
    {"{\"enum\": [\"a\", \"ab\", 1, null, {\"x\": [1]}]}",
     {"\"a\"", "\"ab\"", "1", "null", "{\"x\":[1]}"},
     {"\"b\"", "\"\"", "11", "{}"}},
    {"{\"type\": \"string\", \"enum\": [\"a\", 1]}", {"\"a\""}, {"1"}},
    {"{\"const\": \"x\\\"\"}", {"\"x\\\"\""}, {"\"x\"", "x"}},
    {"{\"anyOf\": [{\"type\": \"integer\"}, {\"type\": \"string\", \"minLength\": 2, "
     "\"maxLength\": "
     "3}]}",
     {"1", "\"ab\"", "\"a\\n\xc3\xa9\"", "\"\xf0\x9f\x98\x80z\""},
     {"\"a\"", "\"abcd\"", "null", "\"\xf0\x9f\x98\x80\""}},
    {"{\"type\": \"object\", \"properties\": {\"kids\": {\"type\": \"array\", \"items\": "
     "{\"$ref\": "
     "\"#\"}}}, \"required\": [\"kids\"]}",
     {"{\"kids\": []}", "{\"kids\": [{\"kids\": []}, {\"kids\": [{\"kids\": []}]}]}"},
     {"{\"kids\": [{}]}", "{\"kids\": [{\"kids\": []}}"}},
    {"{\"oneOf\": [{\"type\": \"object\", \"properties\": {\"k\": {\"const\": \"a\"}}, "
     "\"required\": "
     "[\"k\"]}, {\"type\": \"object\", \"properties\": {\"k\": {\"const\": \"b\"}, \"v\": "
     "{\"type\": "
     "\"integer\"}}, \"required\": [\"k\", \"v\"]}]}",
     {"{\"k\": \"a\"}", "{\"k\": \"b\", \"v\": 1}"},
     {"{\"k\": \"b\"}", "{\"k\": \"a\", \"v\": 1}"}},
    {"{\"$defs\": {\"a/b\": {\"type\": \"boolean\"}, \"c\": {\"$ref\": \"#/$defs/a~1b\"}}, "
     "\"$ref\": "
     "\"#/$defs/c\"}",
     {"true", "false"},
     {"1", "\"true\""}},
    {"{\"type\": \"string\", \"format\": \"date\"}",
     {"\"2024-01-31\"", "\"1999-02-28\"", "\"0001-12-01\""},
     {"\"2024-02-30\"", "\"2024-13-01\"", "\"0000-01-01\"", "\"2024-04-31\"", "\"24-1-1\""}},
    {"{\"type\": \"string\", \"format\": \"date-time\"}",
     {"\"2024-01-31T00:59:59Z\"", "\"2024-01-31T23:00:00.5+02:00\""},
     {"\"2024-01-31\"", "\"2024-01-31T24:00:00Z\"", "\"2024-01-31T23:00:00\""}},
    {"{\"type\": \"string\", \"format\": \"uuid\"}",
     {"\"123e4567-e89b-12d3-a456-426614174000\""},
     {"\"123e4567e89b12d3a456426614174000\"", "\"\""}},
    {"{\"type\": \"string\", \"format\": \"ipv4\"}",
     {"\"127.0.0.1\"", "\"255.255.255.0\""},
     {"\"256.0.0.1\"", "\"1.2.3\"", "\"01.2.3.4\""}},
    {"{\"type\": \"string\", \"format\": \"email\"}",
     {"\"a.b+c@example.org\""},
     {"\"a@\"", "\"@b.c\"", "\"a b@c.d\""}},
    {"{\"minimum\": 3, \"type\": \"integer\", \"title\": \"t\", \"x-own\": 1}", {"3", "10"}, {"2"}},
    {"{\"properties\": {\"a\": {\"type\": \"null\"}}}", {"{\"a\": null}"}, {"1", "{\"a\": 1}"}},
};

static void test_texts(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sp_grammar *grammar = compile(cases[i].schema);

        for (size_t j = 0; j < 8 && cases[i].has[j]; j++)
            if (!sp_grammar_has(grammar, cases[i].has[j], strlen(cases[i].has[j])))
                fail_msg("%s has no %s", cases[i].schema, cases[i].has[j]);
        for (size_t j = 0; j < 8 && cases[i].has_not[j]; j++)
            if (sp_grammar_has(grammar, cases[i].has_not[j], strlen(cases[i].has_not[j])))
                fail_msg("%s has %s", cases[i].schema, cases[i].has_not[j]);
        sp_grammar_release(grammar);
    }
}

/* ---- numbers ------------------------------------------------------------------------------- */

static void check_integers(int64_t low, int64_t high, bool exclusive)
{
    sp_grammar *grammar;
    char schema[200], text[32];

    snprintf(schema, sizeof schema, "{\"type\": \"integer\", \"%s\": %lld, \"%s\": %lld}",
             exclusive ? "exclusiveMinimum" : "minimum", (long long)low,
             exclusive ? "exclusiveMaximum" : "maximum", (long long)high);
    grammar = compile(schema);
    for (int64_t i = low - 1200; i <= high + 1200; i++) {
        bool want = exclusive ? i > low && i < high : i >= low && i <= high;
        int n = snprintf(text, sizeof text, "%lld", (long long)i);

        if (sp_grammar_has(grammar, text, (size_t)n) != want)
            fail_msg("%s: %s", schema, text);
    }
    sp_grammar_release(grammar);
}

static void test_integers(void **state)
{
    sp_test_random random = {3};

    (void)state;
    check_integers(0, 0, false);
    check_integers(-1, 1, true);
    check_integers(9, 101, false);
    check_integers(-1000, -10, false);
    for (int round = 0; round < 60; round++) {
        int64_t low = (int64_t)sp_test_below(&random, 4000) - 2000;

        check_integers(low, low + 2 + sp_test_below(&random, 3000), round % 2);
    }
}

static void check_numbers(int32_t low, int32_t high, bool exclusive)
{
    sp_grammar *grammar;
    char schema[200], text[32];

    snprintf(schema, sizeof schema, "{\"type\": \"number\", \"%s\": %d, \"%s\": %d}",
             exclusive ? "exclusiveMinimum" : "minimum", low,
             exclusive ? "exclusiveMaximum" : "maximum", high);
    grammar = compile(schema);
    for (int64_t i = (int64_t)low * 100 - 300; i <= (int64_t)high * 100 + 300; i++) {
        double value = (double)i / 100;
        bool want = exclusive ? value > low && value < high : value >= low && value <= high;
        int n = snprintf(text, sizeof text, i % 100 ? "%.2f" : "%.0f", value);

        if (sp_grammar_has(grammar, text, (size_t)n) != want)
            fail_msg("%s: %s", schema, text);
    }
    sp_grammar_release(grammar);
}

static void test_numbers(void **state)
{
    sp_test_random random = {4};

    (void)state;
    check_numbers(0, 1, false);
    check_numbers(0, 1, true);
    check_numbers(-1, 0, true);
    check_numbers(5, 5, false);
    for (int round = 0; round < 40; round++) {
        int32_t low = (int32_t)sp_test_below(&random, 60) - 30;

        check_numbers(low, low + 1 + (int32_t)sp_test_below(&random, 40), round % 2);
    }
}

/* ---- refusals ------------------------------------------------------------------------------ */

static const struct {
    const char *schema, *code, *subject;
} refused[] = {
    {"{\"multipleOf\": 2}", SP_GRAMMAR_UNSUPPORTED, "#/multipleOf"},
    {"{\"type\": \"number\", \"minimum\": 0.5}", SP_GRAMMAR_UNSUPPORTED, "#/minimum"},
    {"{\"properties\": {\"a\": {\"not\": {}}}}", SP_GRAMMAR_UNSUPPORTED, "#/properties/a/not"},
    {"{\"items\": {\"if\": true}}", SP_GRAMMAR_UNSUPPORTED, "#/items/if"},
    {"{\"patternProperties\": {}}", SP_GRAMMAR_UNSUPPORTED, "#/patternProperties"},
    {"{\"propertyNames\": true}", SP_GRAMMAR_UNSUPPORTED, "#/propertyNames"},
    {"{\"minProperties\": 1}", SP_GRAMMAR_UNSUPPORTED, "#/minProperties"},
    {"{\"maxProperties\": 1}", SP_GRAMMAR_UNSUPPORTED, "#/maxProperties"},
    {"{\"dependentRequired\": {}}", SP_GRAMMAR_UNSUPPORTED, "#/dependentRequired"},
    {"{\"dependentSchemas\": {}}", SP_GRAMMAR_UNSUPPORTED, "#/dependentSchemas"},
    {"{\"unevaluatedProperties\": false}", SP_GRAMMAR_UNSUPPORTED, "#/unevaluatedProperties"},
    {"{\"unevaluatedItems\": false}", SP_GRAMMAR_UNSUPPORTED, "#/unevaluatedItems"},
    {"{\"contains\": {}}", SP_GRAMMAR_UNSUPPORTED, "#/contains"},
    {"{\"minContains\": 1}", SP_GRAMMAR_UNSUPPORTED, "#/minContains"},
    {"{\"uniqueItems\": true}", SP_GRAMMAR_UNSUPPORTED, "#/uniqueItems"},
    {"{\"$dynamicRef\": \"#\"}", SP_GRAMMAR_UNSUPPORTED, "#/$dynamicRef"},
    {"{\"$anchor\": \"a\"}", SP_GRAMMAR_UNSUPPORTED, "#/$anchor"},
    {"{\"properties\": {\"a\": {\"$id\": \"a\"}}}", SP_GRAMMAR_UNSUPPORTED, "#/properties/a/$id"},
    {"{\"minLenght\": 1}", SP_GRAMMAR_UNSUPPORTED, "#/minLenght"},
    {"{\"type\": \"string\", \"format\": \"iri\"}", SP_GRAMMAR_UNSUPPORTED, "#/format"},
    {"{\"type\": \"string\", \"pattern\": \"(?=a)\"}", SP_GRAMMAR_UNSUPPORTED, "#/pattern"},
    {"{\"type\": \"string\", \"pattern\": \"a\", \"minLength\": 1}", SP_GRAMMAR_UNSUPPORTED,
     "#/pattern"},
    {"{\"items\": [true]}", SP_GRAMMAR_UNSUPPORTED, "#/items"},
    {"{\"$ref\": \"other.json\"}", SP_GRAMMAR_UNSUPPORTED, "#/$ref"},
    {"{\"$ref\": \"#/$defs/none\"}", SP_GRAMMAR_UNSUPPORTED, "#/$ref"},
    {"{\"$defs\": {\"a\": {}}, \"$ref\": \"#/$defs/a\", \"minLength\": 1}", SP_GRAMMAR_UNSUPPORTED,
     "#/minLength"},
    {"{\"anyOf\": [true], \"type\": \"object\"}", SP_GRAMMAR_UNSUPPORTED, "#/type"},
    {"{\"anyOf\": [true], \"allOf\": [true]}", SP_GRAMMAR_UNSUPPORTED, "#/allOf"},
    {"{\"allOf\": [true, true]}", SP_GRAMMAR_UNSUPPORTED, "#/allOf"},
    {"{\"oneOf\": [{\"type\": \"integer\"}, {\"type\": \"number\"}]}", SP_GRAMMAR_UNSUPPORTED,
     "#/oneOf"},
    {"{\"properties\": {\"a~/b\": {\"enum\": 1}}}", SP_GRAMMAR_MALFORMED,
     "#/properties/a~0~1b/enum"},
    {"{\"anyOf\": [true, {\"type\": \"text\"}]}", SP_GRAMMAR_MALFORMED, "#/anyOf/1/type"},
    {"{\"properties\": 1}", SP_GRAMMAR_MALFORMED, "#/properties"},
    {"{\"required\": \"a\"}", SP_GRAMMAR_MALFORMED, "#/required"},
    {"{\"required\": [1]}", SP_GRAMMAR_MALFORMED, "#/required"},
    {"{\"minItems\": -1}", SP_GRAMMAR_MALFORMED, "#/minItems"},
    {"{\"type\": \"integer\", \"minimum\": \"1\"}", SP_GRAMMAR_MALFORMED, "#/minimum"},
    {"{\"prefixItems\": []}", SP_GRAMMAR_MALFORMED, "#/prefixItems"},
    {"{\"anyOf\": []}", SP_GRAMMAR_MALFORMED, "#/anyOf"},
    {"[]", SP_GRAMMAR_MALFORMED, "#"},
    {"{\"a\":", SP_GRAMMAR_MALFORMED, NULL},
    {"false", SP_GRAMMAR_UNSATISFIABLE, NULL},
    {"{\"$ref\": \"#\"}", SP_GRAMMAR_UNSATISFIABLE, NULL},
    {"{\"anyOf\": [{\"$ref\": \"#\"}]}", SP_GRAMMAR_UNSATISFIABLE, NULL},
    {"{\"properties\": {\"a\": {\"$ref\": \"#\"}}, \"required\": [\"a\"]}",
     SP_GRAMMAR_UNSATISFIABLE, NULL},
    {"{\"type\": \"integer\", \"minimum\": 3, \"maximum\": 2}", SP_GRAMMAR_UNSATISFIABLE, NULL},
    {"{\"type\": \"array\", \"minItems\": 3, \"maxItems\": 2}", SP_GRAMMAR_UNSATISFIABLE, NULL},
    {"{\"type\": \"string\", \"minLength\": 3, \"maxLength\": 2}", SP_GRAMMAR_UNSATISFIABLE, NULL},
    {"{\"enum\": []}", SP_GRAMMAR_UNSATISFIABLE, NULL},
    {"{\"required\": [\"a\"], \"additionalProperties\": false}", SP_GRAMMAR_UNSATISFIABLE,
     "#/required"},
    {"{\"type\": \"array\", \"minItems\": 100000000}", SP_GRAMMAR_TOO_LARGE, NULL},
    {"{\"type\": \"string\", \"maxLength\": 1000000000}", SP_GRAMMAR_TOO_LARGE, NULL},
};

static void check_refused(const char *schema, const char *code, const char *subject)
{
    size_t before = sp_alloc_bytes();
    sp_grammar *grammar = NULL;
    sp_error error = {0};

    if (grammar_world_try(&world, SP_GRAMMAR_JSON_SCHEMA, schema, &grammar, &error) == SP_OK)
        fail_msg("%.200s is taken", schema);
    if (!error.code || strcmp(error.code, code) != 0 ||
        (subject && strcmp(error.subject, subject) != 0))
        fail_msg("%.200s: %s at %s: %s", schema, error.code ? error.code : "no code", error.subject,
                 error.text);
    assert_int_equal(sp_alloc_bytes(), before);
}

static void test_refused(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        check_refused(refused[i].schema, refused[i].code, refused[i].subject);
}

/* ---- schemas made to hurt -------------------------------------------------------------------- */

static void repeat(sp_text *out, const char *piece, int n)
{
    for (int i = 0; i < n; i++)
        sp_text_format(out, piece, i, i + 1);
}

/* Compiles or is refused, in bounded time and memory; then outputs are drawn from it. */
static void try_hostile(const char *what, const sp_text *schema)
{
    double began = sp_clock_seconds(), compiled;
    sp_test_random random = {5};
    sp_grammar *grammar = NULL;
    sp_error error = {0};
    sp_status status =
        grammar_world_try(&world, SP_GRAMMAR_JSON_SCHEMA, schema->data, &grammar, &error);
    size_t memory = status == SP_OK ? sp_grammar_memory(grammar) : 0;

    compiled = sp_clock_seconds();
    for (int round = 0; status == SP_OK && round < 3; round++) {
        int32_t tokens[200], n;
        sp_text text = {0};

        grammar_world_draw(&world, grammar, &random, tokens, 200, &n, &text);
        sp_text_free(&text);
    }
    print_message("%-28s %7zu bytes: %s, %.0f ms, %zu KB, then %.0f ms\n", what, schema->bytes,
                  status == SP_OK ? "taken" : error.code, (compiled - began) * 1e3, memory >> 10,
                  (sp_clock_seconds() - compiled) * 1e3);
    assert_true(status == SP_OK || (error.code != NULL && status != SP_ERR_MEMORY));
    assert_true(memory < (64u << 20));
    sp_grammar_release(grammar);
}

static void test_hostile(void **state)
{
    static const struct {
        const char *what, *head, *piece, *tail;
        int n;
    } shapes[] = {
        {"a chain of references", "{\"$ref\": \"#/$defs/d0\", \"$defs\": {",
         "\"d%d\": {\"$ref\": \"#/$defs/d%d\"}, ", "\"d3000\": {\"type\": \"null\"}}}", 3000},
        {"objects in objects", "{\"$ref\": \"#/$defs/d0\", \"$defs\": {",
         "\"d%d\": {\"properties\": {\"a\": {\"$ref\": \"#/$defs/d%d\"}}, \"required\": [\"a\"]}, ",
         "\"d1200\": {\"type\": \"null\"}}}", 1200},
        {"choices in choices", "{\"$ref\": \"#/$defs/d0\", \"$defs\": {",
         "\"d%d\": {\"anyOf\": [{\"properties\": {\"a\": {\"$ref\": \"#/$defs/d%d\"}}, "
         "\"required\": "
         "[\"a\"]}, {\"properties\": {\"a\": {\"$ref\": \"#/$defs/d0\"}, \"b\": {}}, \"required\": "
         "[\"a\"]}]}, ",
         "\"d60\": {\"type\": \"null\"}}}", 60},
        {"many optional members", "{\"properties\": {", "\"name%d\": {\"type\": \"integer\"}, ",
         "\"z\": true}}", 3000},
        {"and any others", "{\"additionalProperties\": true, \"properties\": {",
         "\"name%d\": {\"type\": \"integer\"}, ", "\"z\": true}}", 3000},
        {"a large enumeration", "{\"enum\": [", "\"value number %d of many\", ", "1]}", 4000},
        {"many patterns", "{\"properties\": {",
         "\"p%d\": {\"type\": \"string\", \"pattern\": \"(a|b)*a(a|b){8}\"}, ", "\"z\": true}}",
         1500},
        {"many lengths", "{\"properties\": {",
         "\"p%d\": {\"type\": \"string\", \"maxLength\": 2000}, ", "\"z\": true}}", 1500},
        {"alternatives that begin alike", "{\"anyOf\": [",
         "{\"properties\": {\"kind\": {\"type\": \"string\"}, \"k%d\": {}}, \"required\": "
         "[\"kind\", \"k%d\"]}, ",
         "{\"type\": \"null\"}]}", 1000},
    };

    (void)state;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        sp_text schema = {0};

        sp_text_add(&schema, shapes[i].head);
        repeat(&schema, shapes[i].piece, shapes[i].n);
        sp_text_add(&schema, shapes[i].tail);
        assert_false(schema.failed);
        try_hostile(shapes[i].what, &schema);
        sp_text_free(&schema);
    }
}

/* An object has as many members as it has: none of them makes it deeper. */
static void test_many_members(void **state)
{
    sp_text schema = {0}, text = {0};
    sp_grammar *grammar;

    (void)state;
    sp_text_add(&schema, "{\"properties\": {");
    repeat(&schema, "\"m%d\": {\"properties\": {\"a\": {\"type\": \"integer\"}}}, ", 1000);
    sp_text_add(&schema, "\"z\": {}}, \"required\": [");
    repeat(&schema, "\"m%d\", ", 1000);
    sp_text_add(&schema, "\"z\"]}");
    sp_text_add(&text, "{");
    repeat(&text, "\"m%d\": {\"a\": %d}, ", 1000);
    sp_text_add(&text, "\"z\": []}");
    grammar = compile(schema.data);
    assert_true(sp_grammar_has(grammar, text.data, text.bytes));
    assert_false(sp_grammar_has(grammar, text.data, text.bytes - 1));
    sp_grammar_release(grammar);
    sp_text_free(&schema);
    sp_text_free(&text);
}

static void test_too_long(void **state)
{
    sp_text schema = {0};

    (void)state;
    sp_text_add(&schema, "{\"description\": \"");
    for (int i = 0; i < 300000; i++)
        sp_text_add(&schema, "a");
    sp_text_add(&schema, "\"}");
    check_refused(schema.data, SP_GRAMMAR_TOO_LARGE, NULL);
    sp_text_free(&schema);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_texts),    cmocka_unit_test(test_integers),
        cmocka_unit_test(test_numbers),  cmocka_unit_test(test_refused),
        cmocka_unit_test(test_hostile),  cmocka_unit_test(test_many_members),
        cmocka_unit_test(test_too_long),
    };

    return cmocka_run_group_tests(tests, open_world, close_world);
}
