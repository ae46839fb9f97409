/*
 * Calls of tools as grammars: JSON or tags, alone or among other text. Which texts are in them is
 * listed by hand; outputs that are drawn from tagged ones are read by the reader of answers
 * (src/chat/tagged_call.h), and hold what the schema says.
 */
#include "support/grammar_world.h"

#include "chat/tagged_call.h"

#include <string.h>

#define JSON_FORM                                                                \
    "\"begin\": \"<tool_call>\\n{\\\"name\\\": \\\"\", \"middle\": \"\\\", "     \
    "\\\"arguments\\\": \", \"end\": \"}\\n</tool_call>\", \"between\": \"\\n\"" \
    ", "
#define TAGGED_FORM                                                                     \
    "\"tagged\": true, \"begin\": \"<tool_call>\\n<function=\", \"middle\": \">\\n\", " \
    "\"end\": \"</function>\\n</tool_call>\", \"between\": \"\\n\", "
#define FREE "\"free\": \"<tool_call>\", "
#define SCHEMA                                                                                   \
    "{\"type\": \"object\", \"properties\": {\"text\": {\"type\": \"string\"}, \"n\": "          \
    "{\"type\": \"integer\", \"minimum\": 0, \"maximum\": 9}, \"kind\": {\"type\": \"string\", " \
    "\"enum\": [\"a\", \"b c\"]}, \"day\": {\"type\": \"string\", \"format\": \"date\"}, "       \
    "\"short\": {\"type\": \"string\", \"minLength\": 1, \"maxLength\": 3}, \"many\": "          \
    "{\"type\": \"array\", \"items\": {\"type\": \"string\"}}, \"maybe\": {\"type\": "           \
    "[\"string\", \"null\"], \"enum\": [\"x\", null]}}, \"required\": [\"text\", \"n\", "        \
    "\"kind\", \"other\"]}"
#define TOOLS                                                                        \
    "\"tools\": [{\"name\": \"f\", \"parameters\": " SCHEMA "}, {\"name\": \"g\"}, " \
    "{\"name\": \"h\", \"any\": true}]}"

#define TEXT(value) "<parameter=text>\n" value "\n</parameter>\n"
#define REST                                                                \
    "<parameter=n>\n7\n</parameter>\n<parameter=kind>\nb c\n</parameter>\n" \
    "<parameter=other>\nanything\n</parameter>\n"
#define CALL(inside) "<tool_call>\n<function=f>\n" inside "</function>\n</tool_call>"

typedef struct row {
    const char *text;
    bool has;
} row;

static void check(const char *description, const row *rows, size_t n)
{
    grammar_world world;
    sp_grammar *grammar;

    grammar_world_open(&world);
    grammar = grammar_world_compile(&world, SP_GRAMMAR_CALLS, description);
    for (size_t i = 0; i < n; i++)
        if (sp_grammar_has(grammar, rows[i].text, strlen(rows[i].text)) != rows[i].has)
            fail_msg("\"%s\" is %sin the grammar", rows[i].text, rows[i].has ? "not " : "");
    sp_grammar_release(grammar);
    grammar_world_close(&world);
}

static void test_tagged(void **state)
{
    static const row rows[] = {
        {CALL(TEXT("the text") REST), true},
        {CALL(TEXT("two\nlines\n") REST), true},
        {CALL(TEXT("") REST), true},
        {CALL("<parameter=text>\n</parameter>\n" REST), true}, /* an empty one, too */
        {CALL(TEXT("a < b, </p, </parameter, <parameter=n>") REST), true},
        {CALL(TEXT("\n<\n</parameter") REST), true},
        {CALL(TEXT("a</parameter>") REST), false},
        {CALL(TEXT("a\n</parameter>") REST), false}, /* the reader would end there */
        {CALL(TEXT("a<</parameter>") REST), false},
        {CALL(REST), false},
        {CALL(TEXT("a")), false},
        {CALL(TEXT("a") "<parameter=n>\n10\n</parameter>\n<parameter=kind>\na\n</parameter>\n"),
         false},
        {CALL(TEXT("a") "<parameter=n>\n1\n</parameter>\n<parameter=kind>\n\"a\"\n</parameter>\n"
                        "<parameter=other>\na\n</parameter>\n"),
         false},
        {CALL(TEXT(
             "a") "<parameter=n>\n1\n</parameter>\n<parameter=kind>\na\n</parameter>\n"
                  "<parameter=day>\n2026-02-28\n</parameter>\n<parameter=short>\nxyz\n</"
                  "parameter>\n"
                  "<parameter=many>\n[\"<a>\", \"<\\/b>\"]\n</parameter>\n"
                  "<parameter=maybe>\nnull\n</parameter>\n<parameter=other>\na\n</parameter>\n"),
         true},
        {CALL(TEXT("a") "<parameter=n>\n1\n</parameter>\n<parameter=kind>\na\n</parameter>\n"
                        "<parameter=day>\n2026-02-30\n</parameter>\n<parameter=other>\na\n</"
                        "parameter>\n"),
         false},
        {CALL(TEXT(
             "a") "<parameter=n>\n1\n</parameter>\n<parameter=kind>\na\n</parameter>\n"
                  "<parameter=short>\nwxyz\n</parameter>\n<parameter=other>\na\n</parameter>\n"),
         false},
        {CALL(TEXT("a") "<parameter=n>\n1\n</parameter>\n<parameter=kind>\na\n</parameter>\n"
                        "<parameter=many>\n[\"</b>\"]\n</parameter>\n<parameter=other>\na\n</"
                        "parameter>\n"),
         false},
        {"<tool_call>\n<function=g>\n</function>\n</tool_call>", true},
        {"<tool_call>\n<function=g>\n" TEXT("a") "</function>\n</tool_call>", false},
        {"<tool_call>\n<function=h>\nwhat it likes\n</function>\n</tool_call>", true},
        {"<tool_call>\n<function=k>\n</function>\n</tool_call>", false},
        {"words <tool_call>\n<function=g>\n</function>\n</tool_call>", false},
        {"<tool_call>\n<function=g>\n</function>\n</tool_call>\n"
         "<tool_call>\n<function=g>\n</function>\n</tool_call>",
         false},
        {"", false},
    };

    (void)state;
    check("{" TAGGED_FORM "\"many\": false, " TOOLS, rows, sizeof rows / sizeof *rows);
}

#define G "<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>"

static void test_among_text(void **state)
{
    static const row rows[] = {
        {"", true},
        {"just words", true},
        {"a < b <tool <tool_cal <<tool_call", true},
        {"words\n" G, true},
        {"words " G " words " G "\n" G " words", true},
        {"words <tool_call>", false}, /* once it is begun it is a call */
        {"words <tool_call> words", false},
        {"<tool_call>\n{\"name\": \"g\"}\n</tool_call>", false},
        {"<<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>", true},
        {"<tool_call<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>", true},
        {"<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>", false},
        {"<tool_call>\n{\"name\": \"f\", \"arguments\": {\"text\": \"a\", \"n\": 1, \"kind\": "
         "\"a\", "
         "\"other\": 1}}\n</tool_call>",
         true},
        {"<tool_call>\n{\"name\": \"h\", \"arguments\": [what it likes}\n</tool_call> words", true},
        {"<tool_call>\n{\"name\": \"k\", \"arguments\": {}}\n</tool_call>", false},
    };
    static const row once[] = {
        {"words", true},
        {"words " G, true},
        {"words " G " words", false},
    };

    (void)state;
    check("{" JSON_FORM FREE "\"many\": true, " TOOLS, rows, sizeof rows / sizeof *rows);
    check("{" JSON_FORM FREE "\"many\": false, " TOOLS, once, sizeof once / sizeof *once);
}

/* ---- read again ---------------------------------------------------------------------------- */

static const char *text_of(const json_t *arguments, const char *name)
{
    return json_string_value(json_object_get(arguments, name));
}

static void check_arguments(const json_t *arguments)
{
    const char *kind = text_of(arguments, "kind"), *text = text_of(arguments, "short");
    const json_t *many = json_object_get(arguments, "many"), *maybe;

    assert_non_null(text_of(arguments, "text"));
    assert_non_null(text_of(arguments, "other"));
    assert_true(json_is_integer(json_object_get(arguments, "n")));
    assert_in_range(json_integer_value(json_object_get(arguments, "n")), 0, 9);
    assert_true(kind && (strcmp(kind, "a") == 0 || strcmp(kind, "b c") == 0));
    if (json_object_get(arguments, "short"))
        assert_true(text && strlen(text) > 0);
    if (json_object_get(arguments, "day"))
        assert_int_equal(strlen(text_of(arguments, "day")), 10);
    maybe = json_object_get(arguments, "maybe");
    if (maybe)
        assert_true(json_is_null(maybe) || strcmp(json_string_value(maybe), "x") == 0);
    assert_true(!many || json_is_array(many));
    for (size_t i = 0; i < json_array_size(many); i++)
        assert_true(json_is_string(json_array_get(many, i)));
}

/* Nothing that random tokens would not come to the end of. */
#define DRAWN                                                                                      \
    "{\"type\": \"object\", \"properties\": {\"text\": {\"type\": \"string\", \"maxLength\": 9}, " \
    "\"n\": {\"type\": \"integer\", \"minimum\": 0, \"maximum\": 9}, \"kind\": {\"type\": "        \
    "\"string\", \"enum\": [\"a\", \"b c\"]}, \"day\": {\"type\": \"string\", \"format\": "        \
    "\"date\"}, "                                                                                  \
    "\"short\": {\"type\": \"string\", \"minLength\": 1, \"maxLength\": 3}, \"many\": {\"type\": " \
    "\"array\", \"maxItems\": 2, \"items\": {\"type\": \"string\", \"maxLength\": 9}}, "           \
    "\"maybe\": "                                                                                  \
    "{\"type\": [\"string\", \"null\"], \"enum\": [\"x\", null]}, \"other\": {\"type\": "          \
    "\"string\", "                                                                                 \
    "\"maxLength\": 4}}, \"required\": [\"text\", \"n\", \"kind\", \"other\"]}"

static void test_read_again(void **state)
{
    static const char description[] = "{" TAGGED_FORM "\"many\": false, \"tools\": [{\"name\": "
                                      "\"f\", \"parameters\": " DRAWN "}]}";
    static const char head[] = "<tool_call>", tail[] = "</tool_call>";
    json_t *tools = json_loads("[{\"type\": \"function\", \"function\": {\"name\": \"f\", "
                               "\"parameters\": " DRAWN "}}]",
                               0, NULL);
    sp_test_random random = {7};
    grammar_world world;
    sp_grammar *grammar;
    int n_read = 0;

    (void)state;
    assert_non_null(tools);
    grammar_world_open(&world);
    grammar = grammar_world_compile(&world, SP_GRAMMAR_CALLS, description);
    for (int i = 0; i < 400; i++) {
        sp_text text = {0}, arguments = {0};
        int32_t tokens[600], n;

        if (grammar_world_draw(&world, grammar, &random, tokens, 599, &n, &text)) {
            size_t bytes = text.bytes - (sizeof head - 1) - (sizeof tail - 1), name_bytes;
            const char *name;
            json_t *root;

            assert_ok(sp_tagged_call_read(text.data + sizeof head - 1, bytes, tools, &name,
                                          &name_bytes, &arguments),
                      NULL);
            root = json_loadb(arguments.data, arguments.bytes, 0, NULL);
            assert_non_null(root);
            check_arguments(root);
            n_read++;
            json_decref(root);
        }
        sp_text_free(&text);
        sp_text_free(&arguments);
    }
    assert_true(n_read > 100);
    sp_grammar_release(grammar);
    grammar_world_close(&world);
    json_decref(tools);
}

/* ---- refused ------------------------------------------------------------------------------- */

static void test_refused(void **state)
{
    static const struct {
        const char *parameters, *code, *subject;
    } rows[] = {
        {"{\"properties\": {\"a\": {\"type\": \"string\", \"pattern\": \"a\"}}}",
         SP_GRAMMAR_UNSUPPORTED, "#/properties/a/pattern"},
        {"{\"properties\": {\"a\": {\"type\": \"array\", \"uniqueItems\": true}}}",
         SP_GRAMMAR_UNSUPPORTED, "#/properties/a/uniqueItems"},
        {"{\"properties\": {\"a\": {\"type\": \"string\", \"nonsense\": 1}}}",
         SP_GRAMMAR_UNSUPPORTED, "#/properties/a/nonsense"},
        {"{\"anyOf\": [{\"type\": \"object\"}]}", SP_GRAMMAR_UNSUPPORTED, "#/anyOf"},
        {"{\"properties\": {\"a>\": {\"type\": \"string\"}}}", SP_GRAMMAR_UNSUPPORTED,
         "#/properties/a>"},
        {"{\"properties\": {\"a\": {\"type\": \"string\", \"enum\": [\"</parameter>\"]}}}",
         SP_GRAMMAR_UNSATISFIABLE, "#/properties/a/enum"},
        {"{\"required\": [\"a\"], \"additionalProperties\": {\"type\": \"integer\"}}",
         SP_GRAMMAR_UNSUPPORTED, "#/additionalProperties"},
    };
    static const char *const malformed[] = {
        "{\"begin\": \"a\", \"end\": \"b\", \"free\": \"x\", \"tools\": []}",
        "{\"begin\": \"a\", \"end\": \"b\", \"free\": \"\", \"tools\": []}",
        "{\"begin\": \"a\", \"tools\": []}",
    };
    grammar_world world;
    sp_grammar *grammar;
    sp_error error;

    (void)state;
    grammar_world_open(&world);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        sp_text text = {0};

        sp_text_format(&text, "{" TAGGED_FORM "\"tools\": [{\"name\": \"f\", \"parameters\": %s}]}",
                       rows[i].parameters);
        assert_int_equal(grammar_world_try(&world, SP_GRAMMAR_CALLS, text.data, &grammar, &error),
                         SP_ERR_INPUT);
        assert_string_equal(error.code, rows[i].code);
        assert_string_equal(error.subject, rows[i].subject);
        sp_text_free(&text);
    }
    for (size_t i = 0; i < sizeof malformed / sizeof *malformed; i++) {
        assert_int_equal(
            grammar_world_try(&world, SP_GRAMMAR_CALLS, malformed[i], &grammar, &error),
            SP_ERR_INPUT);
        assert_string_equal(error.code, SP_GRAMMAR_MALFORMED);
    }
    grammar_world_close(&world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tagged),
        cmocka_unit_test(test_among_text),
        cmocka_unit_test(test_read_again),
        cmocka_unit_test(test_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
