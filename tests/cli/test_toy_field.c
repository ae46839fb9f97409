/*
 * A new field is one row. This program has a table of its own, which is the real one and a toy
 * beside it; both readers, the defaults, the engine's check, the flags and their help follow, and
 * the document is found to lack it.
 */
#include "support/field_docs.h"
#include "support/test.h"

#include "base/alloc.h"
#include "base/file.h"
#include "cli/requests.h"
#include "engine/sampling/stop.h"
#include "server/api/chat_request.h"
#include "server/api/completion_request.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define JSON_FORMS (SP_FORM_COMPLETION | SP_FORM_CHAT | SP_FORM_LINE)
#define AT(member) offsetof(sp_request, member)

const sp_field sp_request_rows[] = {
    {.name = "toy_from",
     .type = SP_FIELD_INT,
     .forms = JSON_FORMS | SP_FORM_FLAGS,
     .offset = AT(logits_from),
     .minimum = 1,
     .maximum = 100,
     .defaults = {3, 4, 5},
     .value_name = "N",
     .help = "a toy"},
#include "engine/request/request_rows.inc"
};
const size_t sp_n_request_rows = sizeof sp_request_rows / sizeof *sp_request_rows;

static int32_t completion_toy(const char *text, sp_error *error)
{
    const sp_request defaults = sp_request_left_out(SP_LEFT_OUT_API);
    sp_completion_request request;
    json_t *body = json_loads(text, 0, NULL);
    sp_status status = sp_completion_request_read(body, &defaults, &request, error);
    int32_t toy = status == SP_OK ? request.fields.request.logits_from : -1;

    if (status == SP_OK)
        sp_completion_request_free(&request);
    json_decref(body);
    return toy;
}

static int32_t chat_toy(const char *text, sp_error *error)
{
    const sp_request defaults = sp_request_left_out(SP_LEFT_OUT_API);
    sp_chat_completion_request request;
    json_t *body = json_loads(text, 0, NULL);
    sp_status status = sp_chat_completion_request_read(body, &defaults, &request, error);
    int32_t toy = status == SP_OK ? request.fields.request.logits_from : -1;

    if (status == SP_OK)
        sp_chat_completion_request_free(&request);
    json_decref(body);
    return toy;
}

static int32_t line_toy(const char *text, char *flag, sp_error *error)
{
    char *argv[] = {(char[]){"generate"}, flag, NULL};
    const sp_field_flag_set set = sp_request_flag_set(SP_FORM_FLAGS);
    sp_setting rows[SP_FIELD_FLAGS_MAX];
    sp_field_flags flags;
    size_t n = sp_field_flags_rows(&flags, &set, 0, rows);
    sp_cli_requests requests = {0};
    int32_t toy = -1;

    if (sp_settings_parse(rows, n, flag ? 2 : 1, argv, &flags, NULL, error) == SP_OK &&
        sp_cli_requests_add_json(&requests, text, strlen(text), 1, &flags, error) == SP_OK)
        toy = sp_cli_request_view(&requests.items[0]).logits_from;
    sp_cli_requests_free(&requests);
    return toy;
}

static void test_readers(void **state)
{
    sp_error error;

    (void)state;
    assert_int_equal(completion_toy("{\"prompt\": \"a\"}", &error), 5);
    assert_int_equal(completion_toy("{\"prompt\": \"a\", \"toy_from\": 7}", &error), 7);
    assert_int_equal(completion_toy("{\"prompt\": \"a\", \"toy_from\": 101}", &error), -1);
    assert_string_equal(error.subject, "toy_from");
    assert_int_equal(chat_toy("{\"messages\": [{\"role\": \"user\"}], \"toy_from\": 8}", &error),
                     8);
    assert_int_equal(line_toy("{\"prompt\": \"a\"}", NULL, &error), 4);
    assert_int_equal(line_toy("{\"prompt\": \"a\", \"toy_from\": 9}", NULL, &error), 9);
    assert_int_equal(line_toy("{\"prompt\": \"a\", \"toy_from\": 0}", NULL, &error), -1);
    assert_string_equal(error.text, "line 1: toy_from is 0; it must be from 1 to 100");
    assert_int_equal(line_toy("{\"prompt\": \"a\"}", (char[]){"--toy-from=10"}, &error), 10);
    assert_int_equal(line_toy("{\"prompt\": \"a\"}", (char[]){"--toy-from=0"}, &error), -1);
    assert_true(sp_body_fields_know(SP_FIELDS_CHAT, "toy_from"));
}

static void test_engine(void **state)
{
    sp_request request;
    sp_error error;

    (void)state;
    sp_request_default(&request, sizeof request);
    assert_int_equal(request.logits_from, 3);
    assert_ok(sp_request_check(&request, 10, &error), &error);
    request.logits_from = 0;
    assert_int_equal(sp_request_check(&request, 10, &error), SP_ERR_INPUT);
    assert_string_equal(error.subject, "toy_from");
}

static void test_help(void **state)
{
    const sp_field_flag_set set = sp_request_flag_set(SP_FORM_FLAGS);
    sp_setting rows[SP_FIELD_FLAGS_MAX];
    sp_field_flags flags;
    size_t n = sp_field_flags_rows(&flags, &set, 0, rows), bytes = 0;
    char *text = NULL;
    FILE *stream = open_memstream(&text, &bytes);

    (void)state;
    assert_non_null(stream);
    sp_settings_print_help(stream, rows, n);
    sp_cli_requests_print_fields(stream);
    fclose(stream);
    assert_non_null(strstr(text, "  --toy-from N                a toy [4]\n"));
    assert_non_null(strstr(text, "prompt_tokens, toy_from, max_tokens"));
    free(text);
}

static void test_document(void **state)
{
    sp_text problems = {0};
    char *text;
    size_t bytes;
    sp_error error;

    (void)state;
    assert_ok(sp_file_read_all(SP_TEST_SOURCE "/docs/HTTP.md", 1 << 20, &text, &bytes, &error),
              &error);
    sp_field_docs_http(text, &problems);
    assert_string_equal(problems.data, "| `toy_from` | both | 5 | 1 to 100\n");
    sp_text_free(&problems);
    sp_free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_readers),
        cmocka_unit_test(test_engine),
        cmocka_unit_test(test_help),
        cmocka_unit_test(test_document),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
