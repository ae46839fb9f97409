/*
 * The engine's own look at a request: every range at its borders and beyond them, NaN, lists that
 * are too long, ids outside the vocabulary; and what a request means by what it leaves out.
 */
#include "support/test.h"

#include "engine/request/request_table.h"
#include "engine/sampling/stop.h"

#include <math.h>
#include <string.h>

#define VOCAB 10

static void check_taken(const sp_request *request)
{
    sp_error error;

    assert_ok(sp_request_check(request, VOCAB, &error), &error);
}

static void check_refused(const sp_request *request, const char *field, const char *word)
{
    sp_error error;

    assert_int_equal(sp_request_check(request, VOCAB, &error), SP_ERR_INPUT);
    assert_string_equal(error.subject, field);
    if (!strstr(error.text, word))
        fail_msg("\"%s\" does not say \"%s\"", error.text, word);
}

/* The fields of a double, each with its range as docs/SAMPLING.md has it. */
typedef struct double_case {
    const char *name;
    size_t offset;
    double minimum, maximum;
    const char *range;
} double_case;

static void test_doubles(void **state)
{
    static const double_case cases[] = {
        {"temperature", offsetof(sp_request, temperature), 0, 1000, "0 to 1000"},
        {"top_p", offsetof(sp_request, top_p), 0, 1, "0 to 1"},
        {"min_p", offsetof(sp_request, min_p), 0, 1, "0 to 1"},
        {"presence_penalty", offsetof(sp_request, presence_penalty), -2, 2, "-2 to 2"},
        {"frequency_penalty", offsetof(sp_request, frequency_penalty), -2, 2, "-2 to 2"},
        {"repetition_penalty", offsetof(sp_request, repetition_penalty), 0.01, 100, "0.01 to 100"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sp_request request = sp_request_left_out(SP_LEFT_OUT_LIBRARY);
        double *field = (double *)(void *)((char *)&request + cases[i].offset);
        const double bad[] = {nextafter(cases[i].minimum, -INFINITY),
                              nextafter(cases[i].maximum, INFINITY), NAN, INFINITY, -INFINITY};

        check_taken(&request);
        *field = cases[i].minimum;
        check_taken(&request);
        *field = cases[i].maximum;
        check_taken(&request);
        for (size_t k = 0; k < sizeof bad / sizeof *bad; k++) {
            *field = bad[k];
            check_refused(&request, cases[i].name, cases[i].range);
        }
    }
}

static void test_numbers(void **state)
{
    sp_request request = sp_request_left_out(SP_LEFT_OUT_LIBRARY);

    (void)state;
    request.lora_scale = 16;
    request.top_k = -1;
    request.top_logprobs = 20;
    request.min_tokens = request.max_tokens;
    check_taken(&request);
    request.min_tokens++;
    check_refused(&request, "min_tokens", "which is 16");
    request.min_tokens = -1;
    check_refused(&request, "min_tokens", "from 0");
    request.min_tokens = 0;
    request.top_logprobs = 21;
    check_refused(&request, "top_logprobs", "0 to 20");
    request.top_logprobs = -1;
    check_refused(&request, "top_logprobs", "0 to 20");
    request.top_logprobs = 0;
    request.top_k = -2;
    check_refused(&request, "top_k", "-2");
    request.top_k = INT32_MAX;
    request.lora_scale = nextafterf(16, INFINITY);
    check_refused(&request, "lora_scale", "0 to 16");
    request.lora_scale = NAN;
    check_refused(&request, "lora_scale", "0 to 16");
    request.lora_scale = -0.5f;
    check_refused(&request, "lora_scale", "0 to 16");
}

static void check_bias(int32_t n, const sp_logit_bias *bias, const char *word)
{
    sp_request request = sp_request_left_out(SP_LEFT_OUT_LIBRARY);

    request.logit_bias = bias;
    request.n_logit_bias = n;
    if (word)
        check_refused(&request, "logit_bias", word);
    else
        check_taken(&request);
}

static void test_bias(void **state)
{
    static const sp_logit_bias many[SP_LOGIT_BIAS_MAX + 1];

    (void)state;
    check_bias(2, (sp_logit_bias[]){{0, 100}, {9, -100}}, NULL);
    check_bias(1, (sp_logit_bias[]){{10, 0}}, "the vocabulary has 10");
    check_bias(1, (sp_logit_bias[]){{-1, 0}}, "-1");
    check_bias(1, (sp_logit_bias[]){{1, 100.5f}}, "-100 to 100");
    check_bias(1, (sp_logit_bias[]){{1, NAN}}, "-100 to 100");
    check_bias(2, (sp_logit_bias[]){{1, 0}, {1, 0}}, "twice");
    check_bias(-1, many, "at most");
    check_bias(SP_LOGIT_BIAS_MAX + 1, many, "at most 1024");
}

static void check_stop(int32_t n, const char *const *stop, const char *word)
{
    sp_request request = sp_request_left_out(SP_LEFT_OUT_LIBRARY);

    request.stop = stop;
    request.n_stop = n;
    if (word)
        check_refused(&request, "stop", word);
    else
        check_taken(&request);
}

static void test_stop(void **state)
{
    static char longest[SP_STOP_TEXT_BYTES_MAX + 2];
    const char *many[SP_STOP_STRINGS_MAX + 1];

    (void)state;
    for (size_t i = 0; i <= SP_STOP_STRINGS_MAX; i++)
        many[i] = "a";
    memset(longest, 'x', SP_STOP_TEXT_BYTES_MAX);
    check_stop(SP_STOP_STRINGS_MAX, many, NULL);
    check_stop(1, (const char *[]){longest}, NULL);
    check_stop(SP_STOP_STRINGS_MAX + 1, many, "at most 64");
    check_stop(-1, many, "at most 64");
    check_stop(2, (const char *[]){"a", ""}, "1 to 1024");
    check_stop(1, (const char *[]){NULL}, "1 to 1024");
    check_stop(1, (const char *[]){"\xff"}, "UTF-8");
    longest[SP_STOP_TEXT_BYTES_MAX] = 'x';
    check_stop(1, (const char *[]){longest}, "1 to 1024");
}

static void test_stop_tokens(void **state)
{
    static const int32_t many[SP_STOP_TOKENS_MAX + 1];
    sp_request request = sp_request_left_out(SP_LEFT_OUT_LIBRARY);

    (void)state;
    request.stop_tokens = many;
    request.n_stop_tokens = SP_STOP_TOKENS_MAX;
    check_taken(&request);
    request.n_stop_tokens++;
    check_refused(&request, "stop_token_ids", "at most 128");
    request.n_stop_tokens = -1;
    check_refused(&request, "stop_token_ids", "at most 128");
    request.n_stop_tokens = 2;
    request.stop_tokens = (const int32_t[]){9, 10};
    check_refused(&request, "stop_token_ids", "the vocabulary has 10");
    request.stop_tokens = (const int32_t[]){-1, 9};
    check_refused(&request, "stop_token_ids", "-1");
}

static void check_no_list(sp_request request, const char *field)
{
    sp_error error;

    assert_int_equal(sp_request_check(&request, VOCAB, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, field);
}

static void test_no_lists(void **state)
{
    sp_request request = sp_request_left_out(SP_LEFT_OUT_LIBRARY);

    (void)state;
    request.n_logit_bias = 1;
    check_no_list(request, "logit_bias");
    request.n_logit_bias = 0;
    request.n_stop = 1;
    check_no_list(request, "stop");
    request.n_stop = 0;
    request.n_stop_tokens = 1;
    check_no_list(request, "stop_tokens");
}

static bool is_equal(double a, double b)
{
    return a >= b && a <= b;
}

/* What docs/HTTP.md, `generate --help` and engine.h say. */
static void test_left_out(void **state)
{
    static const struct {
        int32_t max_tokens;
        double temperature;
    } want[] = {{16, 0}, {64, 0}, {16, 1}};

    (void)state;
    for (int who = SP_LEFT_OUT_LIBRARY; who <= SP_LEFT_OUT_API; who++) {
        sp_request got = sp_request_left_out((sp_left_out)who);

        assert_int_equal(got.struct_bytes, sizeof got);
        assert_int_equal(got.max_tokens, want[who].max_tokens);
        assert_true(is_equal(got.temperature, want[who].temperature));
        assert_true(is_equal(got.top_p, 1) && is_equal(got.min_p, 0) && got.top_k == 0);
        assert_true(is_equal(got.repetition_penalty, 1) && is_equal((double)got.lora_scale, 1));
        assert_true(is_equal(got.presence_penalty, 0) && is_equal(got.frequency_penalty, 0));
        assert_false(got.ignore_eos || got.keep_special || got.logprobs || got.prompt_logprobs);
        assert_true(got.n_stop == 0 && got.n_logit_bias == 0 && got.n_stop_tokens == 0);
        assert_true(got.seed == 0 && got.min_tokens == 0 && got.top_logprobs == 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_doubles),     cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_bias),        cmocka_unit_test(test_stop),
        cmocka_unit_test(test_stop_tokens), cmocka_unit_test(test_no_lists),
        cmocka_unit_test(test_left_out),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
