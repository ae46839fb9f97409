/*
 * generation_config.json: what is taken, what is named as unused, and what no request may have.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "base/json.h"
#include "server/api/body_fields.h"
#include "server/api/generation_config.h"

#include <string.h>

static sp_status take(const char *text, sp_request *defaults, sp_text *applied, sp_text *unused,
                      sp_error *error)
{
    json_t *root = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
    sp_status status;

    assert_non_null(root);
    status = sp_generation_config_take(root, defaults, applied, unused, error);
    json_decref(root);
    return status;
}

static bool is_equal(double a, double b)
{
    return a >= b && a <= b;
}

static void assert_same(const sp_request *a, const sp_request *b)
{
    assert_true(is_equal(a->temperature, b->temperature) && is_equal(a->top_p, b->top_p));
    assert_true(is_equal(a->min_p, b->min_p));
    assert_true(is_equal(a->repetition_penalty, b->repetition_penalty));
    assert_int_equal(a->top_k, b->top_k);
}

static void check(const char *text, sp_request want, const char *applied, const char *unused)
{
    sp_request got = sp_request_left_out(SP_LEFT_OUT_API);
    sp_text taken = {0}, left = {0};
    sp_error error;

    assert_ok(take(text, &got, &taken, &left, &error), &error);
    assert_same(&got, &want);
    assert_string_equal(taken.data ? taken.data : "", applied);
    assert_string_equal(left.data ? left.data : "", unused);
    sp_text_free(&taken);
    sp_text_free(&left);
}

static void test_taken(void **state)
{
    sp_request want = sp_request_left_out(SP_LEFT_OUT_API);

    (void)state;
    check("{}", want, "", "");
    check("{\"do_sample\": false, \"eos_token_id\": [1, 2], \"transformers_version\": \"5\", "
          "\"_from_model_config\": true, \"pad_token_id\": 3, \"temperature\": null}",
          want, "", "do_sample");
    want.temperature = 0.5;
    want.top_k = 20;
    want.top_p = 0.75;
    check("{\"temperature\": 0.5, \"top_k\": 20, \"max_new_tokens\": 2048, \"top_p\": 0.75, "
          "\"suppress_tokens\": [5]}",
          want, "temperature 0.5, top_k 20, top_p 0.75", "max_new_tokens, suppress_tokens");
    want = sp_request_left_out(SP_LEFT_OUT_API);
    want.temperature = 0;
    want.min_p = 0.25;
    want.repetition_penalty = 1.5;
    check("{\"temperature\": 0, \"min_p\": 0.25, \"repetition_penalty\": 1.5}", want,
          "temperature 0, min_p 0.25, repetition_penalty 1.5", "");
    /* Its names are from outside, too. */
    check("{\"a\\u001b[2J\": 1}", sp_request_left_out(SP_LEFT_OUT_API), "", "a?[2J");
}

static void test_refused(void **state)
{
    static const char *const bad[][2] = {{"{\"temperature\": -1}", "temperature"},
                                         {"{\"temperature\": \"hot\"}", "temperature"},
                                         {"{\"top_p\": 1.5}", "top_p"},
                                         {"{\"top_k\": 2.5}", "top_k"},
                                         {"{\"repetition_penalty\": 0}", "repetition_penalty"},
                                         {"{\"min_p\": [0]}", "min_p"}};

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        sp_request got = sp_request_left_out(SP_LEFT_OUT_API);
        const sp_request untouched = got;
        sp_text taken = {0}, left = {0};
        sp_error error;

        assert_int_equal(take(bad[i][0], &got, &taken, &left, &error), SP_ERR_INPUT);
        assert_string_equal(error.code, SP_CODE_GENERATION_CONFIG);
        assert_string_equal(error.subject, bad[i][1]);
        assert_non_null(strstr(error.text, "--generation-config none"));
        assert_same(&got, &untouched);
        sp_text_free(&taken);
        sp_text_free(&left);
    }
}

/* What a request says itself stays. */
static void test_order(void **state)
{
    const sp_request defaults = {.temperature = 0.5,
                                 .top_p = 0.75,
                                 .min_p = 0.25,
                                 .repetition_penalty = 1.5,
                                 .lora_scale = 1,
                                 .top_k = 20};
    json_t *body = json_loads("{\"temperature\": 2, \"top_k\": -1, \"top_p\": null}", 0, NULL);
    sp_body_fields fields;
    sp_request request;
    sp_error error;

    (void)state;
    assert_ok(sp_body_fields_read(body, SP_FIELDS_COMPLETION, &defaults, &fields, &error), &error);
    request = fields.request;
    assert_true(is_equal((double)request.temperature, 2));
    assert_int_equal(request.top_k, -1);
    assert_true(is_equal((double)request.top_p, 0.75));
    assert_true(is_equal((double)request.min_p, 0.25));
    assert_true(is_equal((double)request.repetition_penalty, 1.5));
    assert_true(is_equal((double)request.lora_scale, 1));
    sp_body_fields_free(&fields);
    json_decref(body);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_taken), cmocka_unit_test(test_refused),
                                       cmocka_unit_test(test_order)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
