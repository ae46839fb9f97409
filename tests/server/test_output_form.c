/* What bodies say their outputs have to be: the field, the kind, the text; and what is refused. */
#include "support/test.h"

#include "base/alloc.h"
#include "server/api/body_fields.h"

#include <string.h>

static sp_status read_body(const char *text, sp_wanted_output *out_wanted, sp_error *error)
{
    const sp_request defaults = sp_request_left_out(SP_LEFT_OUT_API);
    json_t *body = json_loads(text, 0, NULL);
    sp_body_fields fields;
    sp_status status;

    assert_non_null(body);
    *out_wanted = (sp_wanted_output){0};
    status = sp_body_fields_read(body, SP_FIELDS_COMPLETION, &defaults, &fields, error);
    if (status == SP_OK) {
        status = sp_output_form_want(&fields.output, SP_CONSTRAINT_THINKS, out_wanted, error);
        sp_body_fields_free(&fields);
    }
    json_decref(body);
    return status;
}

static void test_forms(void **state)
{
    static const struct {
        const char *body, *field;
        sp_constraint_kind kind;
        const char *text;
    } rows[] = {
        {"{\"response_format\": {\"type\": \"json_object\"}}", "response_format",
         SP_CONSTRAINT_JSON_OBJECT, ""},
        {"{\"response_format\": {\"type\": \"json_object\", \"schema\": null}}", "response_format",
         SP_CONSTRAINT_JSON_OBJECT, ""},
        {"{\"response_format\": {\"type\": \"json_object\", \"schema\": {\"type\": \"null\"}}}",
         "response_format", SP_CONSTRAINT_JSON_SCHEMA, "{\"type\":\"null\"}"},
        {"{\"response_format\": {\"type\": \"json_schema\", \"json_schema\": {\"name\": \"n\", "
         "\"strict\": true, \"schema\": {\"b\": 1, \"a\": 2}}}}",
         "response_format", SP_CONSTRAINT_JSON_SCHEMA, "{\"b\":1,\"a\":2}"},
        {"{\"structured_outputs\": {\"json\": {\"type\": \"null\"}, \"regex\": null}}",
         "structured_outputs", SP_CONSTRAINT_JSON_SCHEMA, "{\"type\":\"null\"}"},
        {"{\"structured_outputs\": {\"json_object\": true}}", "structured_outputs",
         SP_CONSTRAINT_JSON_OBJECT, ""},
        {"{\"structured_outputs\": {\"regex\": \"a+\"}}", "structured_outputs", SP_CONSTRAINT_REGEX,
         "a+"},
        {"{\"structured_outputs\": {\"choice\": [\"a\", \"b\"]}}", "structured_outputs",
         SP_CONSTRAINT_CHOICE, "[\"a\",\"b\"]"},
        {"{\"guided_json\": \"{\\\"type\\\": \\\"null\\\"}\"}", "guided_json",
         SP_CONSTRAINT_JSON_SCHEMA, "{\"type\": \"null\"}"},
        {"{\"guided_json\": true}", "guided_json", SP_CONSTRAINT_JSON_SCHEMA, "true"},
        {"{\"guided_regex\": \"[a-c]\", \"guided_choice\": null}", "guided_regex",
         SP_CONSTRAINT_REGEX, "[a-c]"},
        {"{\"guided_choice\": [\"x\"], \"guided_grammar\": \"\", \"guided_decoding_backend\": "
         "\"auto\"}",
         "guided_choice", SP_CONSTRAINT_CHOICE, "[\"x\"]"},
        {"{\"guided_grammar\": \"root ::= \\\"a\\\"\"}", "guided_grammar", SP_CONSTRAINT_GRAMMAR,
         "root ::= \"a\""},
        {"{\"structured_outputs\": {\"grammar\": \"root ::= [a]\", \"json\": null}}",
         "structured_outputs", SP_CONSTRAINT_GRAMMAR, "root ::= [a]"},
        {"{\"response_format\": {\"type\": \"text\"}, \"guided_regex\": \"a\"}", "guided_regex",
         SP_CONSTRAINT_REGEX, "a"},
    };
    size_t before = sp_alloc_bytes();

    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        sp_wanted_output wanted;
        sp_error error;

        assert_ok(read_body(rows[i].body, &wanted, &error), &error);
        assert_string_equal(wanted.field, rows[i].field);
        assert_int_equal(wanted.kind, rows[i].kind);
        assert_int_equal(wanted.thought, SP_CONSTRAINT_THINKS);
        assert_string_equal(wanted.text ? wanted.text : "", rows[i].text);
        assert_int_equal(wanted.bytes, strlen(rows[i].text));
        sp_free(wanted.text);
    }
    assert_int_equal(sp_alloc_bytes(), before);
}

static void test_none(void **state)
{
    static const char *const bodies[] = {
        "{}",
        "{\"response_format\": null}",
        "{\"response_format\": {\"type\": \"text\"}}",
        "{\"structured_outputs\": {}}",
        "{\"structured_outputs\": {\"regex\": null, \"json_object\": false}}",
    };

    (void)state;
    for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++) {
        sp_wanted_output wanted;
        sp_error error;

        assert_ok(read_body(bodies[i], &wanted, &error), &error);
        assert_null(wanted.field);
    }
}

static void test_refused(void **state)
{
    static const struct {
        const char *body, *subject, *code;
    } rows[] = {
        {"{\"response_format\": 5}", "response_format", SP_CODE_UNSUPPORTED_FIELD},
        {"{\"response_format\": {\"type\": \"grammar\"}}", "response_format",
         SP_CODE_UNSUPPORTED_FIELD},
        {"{\"response_format\": {\"type\": \"json_schema\"}}", "response_format", ""},
        {"{\"response_format\": {\"type\": \"json_schema\", \"json_schema\": {\"name\": \"n\"}}}",
         "response_format", ""},
        {"{\"response_format\": {\"type\": \"json_schema\", \"json_schema\": {\"schema\": []}}}",
         "response_format", ""},
        {"{\"structured_outputs\": []}", "structured_outputs", ""},
        {"{\"structured_outputs\": {\"grammar\": [\"root ::= a\"]}}", "structured_outputs", ""},
        {"{\"structured_outputs\": {\"grammar\": \"r\", \"regex\": \"a\"}}", "structured_outputs",
         ""},
        {"{\"structured_outputs\": {\"structural_tag\": \"{}\"}}", "structured_outputs",
         SP_CODE_UNSUPPORTED_FIELD},
        {"{\"structured_outputs\": {\"regex\": \"a\", \"choice\": [\"a\"]}}", "structured_outputs",
         ""},
        {"{\"structured_outputs\": {\"regex\": 5}}", "structured_outputs", ""},
        {"{\"guided_json\": 5}", "guided_json", ""},
        {"{\"guided_choice\": []}", "guided_choice", ""},
        {"{\"guided_choice\": [1]}", "guided_choice", ""},
        {"{\"guided_grammar\": 5}", "guided_grammar", ""},
        {"{\"guided_grammar\": \"r\", \"guided_choice\": [\"a\"]}", "guided_grammar", ""},
        {"{\"guided_regex\": \"a\", \"guided_choice\": [\"a\"]}", "guided_choice", ""},
        {"{\"guided_regex\": \"a\", \"response_format\": {\"type\": \"json_object\"}}",
         "guided_regex", ""},
    };
    size_t before = sp_alloc_bytes();

    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        sp_wanted_output wanted;
        sp_error error = {.code = ""};

        if (read_body(rows[i].body, &wanted, &error) != SP_ERR_INPUT)
            fail_msg("%s is taken", rows[i].body);
        assert_string_equal(error.subject, rows[i].subject);
        assert_string_equal(error.code ? error.code : "", rows[i].code);
    }
    assert_int_equal(sp_alloc_bytes(), before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forms),
        cmocka_unit_test(test_none),
        cmocka_unit_test(test_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
