/*
 * The body of a completion: every form of a prompt, and how many choices are made of it. What it
 * shares with chat is in test_body_fields.c.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "server/api/completion_request.h"

#include <string.h>

static sp_status read_text(const char *text, sp_completion_request *out_request, sp_error *error)
{
    const sp_request defaults = sp_request_left_out(SP_LEFT_OUT_API);
    json_t *body = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
    sp_status status;

    assert_non_null(body);
    status = sp_completion_request_read(body, &defaults, out_request, error);
    json_decref(body);
    return status;
}

static void test_forms_of_a_prompt(void **state)
{
    static const struct {
        const char *text;
        int32_t n_prompts, n_tokens; /* of the first; 0: a text */
    } cases[] = {
        {"{\"prompt\": \"\"}", 1, 0},
        {"{\"prompt\": \"a b\"}", 1, 0},
        {"{\"prompt\": [\"a\", \"b\", \"\"]}", 3, 0},
        {"{\"prompt\": [0]}", 1, 1},
        {"{\"prompt\": [1, 2, 2147483647]}", 1, 3},
        {"{\"prompt\": [[1, 2], [3], \"a text\"]}", 3, 2},
    };

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sp_completion_request request;
        sp_error error;

        assert_ok(read_text(cases[i].text, &request, &error), &error);
        assert_int_equal(request.n_prompts, cases[i].n_prompts);
        assert_int_equal(request.prompts[0].n_tokens, cases[i].n_tokens);
        assert_true((request.prompts[0].text != NULL) == (cases[i].n_tokens == 0));
        sp_completion_request_free(&request);
        assert_null(request.prompts);
    }
}

static void check_bad(const char *text, const char *subject)
{
    size_t before = sp_alloc_bytes();
    sp_completion_request request;
    sp_error error;

    assert_int_equal(read_text(text, &request, &error), SP_ERR_INPUT);
    assert_string_equal(error.subject, subject);
    assert_int_equal(sp_alloc_bytes(), before);
}

static void test_bad_prompts(void **state)
{
    (void)state;
    check_bad("{\"prompt\": null}", "prompt");
    check_bad("{\"prompt\": true}", "prompt");
    check_bad("{\"prompt\": 5}", "prompt");
    check_bad("{\"prompt\": []}", "prompt");
    check_bad("{\"prompt\": [[]]}", "prompt");
    check_bad("{\"prompt\": [[1], []]}", "prompt");
    check_bad("{\"prompt\": [[1], [\"a\"]]}", "prompt");
    check_bad("{\"prompt\": [1, -1]}", "prompt");
    check_bad("{\"prompt\": [1, 2147483648]}", "prompt");
    check_bad("{\"prompt\": [null]}", "prompt");
}

/* At the most, and one more. */
static void test_number_of_prompts(void **state)
{
    (void)state;
    for (int extra = 0; extra < 2; extra++) {
        const sp_request defaults = sp_request_left_out(SP_LEFT_OUT_API);
        json_t *body = json_object(), *list = json_array();
        sp_completion_request request;
        sp_error error;
        sp_status status;

        for (int i = 0; i < SP_PROMPTS_MAX + extra; i++)
            json_array_append_new(list, json_string("a"));
        json_object_set_new(body, "prompt", list);
        status = sp_completion_request_read(body, &defaults, &request, &error);
        assert_int_equal(status, extra ? SP_ERR_INPUT : SP_OK);
        if (status == SP_OK) {
            assert_int_equal(request.n_prompts, SP_PROMPTS_MAX);
            sp_completion_request_free(&request);
        }
        json_decref(body);
    }
}

static void check_choices(const char *text, int32_t n, int32_t best_of)
{
    sp_completion_request request;
    sp_error error;

    assert_ok(read_text(text, &request, &error), &error);
    assert_int_equal(request.fields.n, n);
    assert_int_equal(request.best_of, best_of);
    sp_completion_request_free(&request);
}

static void test_choices(void **state)
{
    (void)state;
    check_choices("{\"prompt\": \"a\"}", 1, 1);
    check_choices("{\"prompt\": \"a\", \"n\": 128}", 128, 128);
    check_choices("{\"prompt\": \"a\", \"n\": 2, \"best_of\": 2, \"stream\": true}", 2, 2);
    check_choices("{\"prompt\": \"a\", \"n\": 2, \"best_of\": 128}", 2, 128);
    check_choices("{\"prompt\": \"a\", \"best_of\": null}", 1, 1);
    check_bad("{\"prompt\": \"a\", \"n\": 129}", "n");
    check_bad("{\"prompt\": \"a\", \"n\": 3, \"best_of\": 2}", "best_of");
    check_bad("{\"prompt\": \"a\", \"best_of\": 0}", "best_of");
    check_bad("{\"prompt\": \"a\", \"best_of\": 129}", "best_of");
    check_bad("{\"prompt\": \"a\", \"best_of\": 2, \"stream\": true}", "best_of");
}

/* Texts are borrowed from the body, which lives as long as the request. */
static void test_body_is_kept(void **state)
{
    sp_completion_request request;
    sp_error error;

    (void)state;
    assert_ok(read_text("{\"prompt\": \"kept\", \"model\": \"m\"}", &request, &error), &error);
    assert_string_equal(request.prompts[0].text, "kept");
    assert_string_equal(request.fields.model, "m");
    sp_completion_request_free(&request);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forms_of_a_prompt), cmocka_unit_test(test_bad_prompts),
        cmocka_unit_test(test_number_of_prompts), cmocka_unit_test(test_choices),
        cmocka_unit_test(test_body_is_kept),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
