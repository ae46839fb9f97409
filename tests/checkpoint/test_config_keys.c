/*
 * Keys of config.json: those that would change what a model computes are refused unless their value
 * changes nothing; those that nothing knows are listed.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "checkpoint/config_keys.h"

#include <string.h>

static sp_status check_text(const char *text, sp_text *unused, sp_error *error)
{
    json_t *config = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
    sp_status status;

    assert_non_null(config);
    status = sp_config_keys_check(config, unused, error);
    json_decref(config);
    return status;
}

static void check_unused(const char *text, const char *wanted)
{
    sp_text unused = {0};
    sp_error error;

    assert_ok(check_text(text, &unused, &error), &error);
    assert_string_equal(unused.data ? unused.data : "", wanted);
    sp_text_free(&unused);
}

static void test_listed(void **state)
{
    (void)state;
    check_unused("{}", "");
    check_unused("{\"hidden_size\": 5, \"_name_or_path\": \"x\", \"whatever\": null}", "");
    check_unused("{\"whatever\": 0, \"model_type\": \"qwen3\", \"zzz\": {\"a\": 1}}",
                 "whatever, zzz");
    check_unused("{\"text_config\": {\"new\": 1, \"head_dim\": 2}, \"vision_config\": {\"x\": 1}}",
                 "text_config.new");
    check_unused("{\"rope_parameters\": {\"rope_theta\": 1, \"beta\": 3}}", "RoPE's beta");
    check_unused("{\"a\\u001b[2J\": 1}", "a?[2J");
}

static void test_refused(void **state)
{
    static const char *const bad[][2] = {
        {"{\"final_logit_softcapping\": 30.0}", "final_logit_softcapping"},
        {"{\"attn_logit_softcapping\": 50}", "attn_logit_softcapping"},
        {"{\"logit_scale\": 0.0625}", "logit_scale"},
        {"{\"embedding_multiplier\": 12}", "embedding_multiplier"},
        {"{\"residual_multiplier\": \"1\"}", "residual_multiplier"},
        {"{\"qkv_bias\": true}", "qkv_bias"},
        {"{\"quantization_config\": {}}", "quantization_config"},
        {"{\"rope_parameters\": {\"attention_factor\": 1.2}}", "attention_factor"},
        {"{\"rope_scaling\": {\"factor\": 4}}", "factor"},
        {"{\"rope_scaling\": {\"type\": \"default\", \"low_freq_factor\": 2}}", "low_freq_factor"},
        {"{\"text_config\": {\"clip_qkv\": 8}}", "clip_qkv"},
        {"{\"text_config\": {\"rope_parameters\": {\"mscale\": 0.7}}}", "mscale"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        sp_text unused = {0};
        sp_error error;

        assert_int_equal(check_text(bad[i][0], &unused, &error), SP_ERR_UNSUPPORTED);
        assert_string_equal(error.subject, bad[i][1]);
        assert_non_null(strstr(error.text, bad[i][1]));
        sp_text_free(&unused);
    }
}

static void test_neutral(void **state)
{
    (void)state;
    check_unused("{\"final_logit_softcapping\": null, \"logit_scale\": 1.0, \"mlp_bias\": false,"
                 " \"embedding_multiplier\": 1, \"quantization_config\": null,"
                 " \"rope_scaling\": {\"factor\": 1, \"attention_factor\": null}}",
                 "");
}

static void test_no_memory(void **state)
{
    size_t bytes = sp_alloc_bytes();
    sp_text unused = {0};
    sp_error error;

    (void)state;
    sp_alloc_fail_after(0);
    assert_int_equal(check_text("{\"new\": 1}", &unused, &error), SP_ERR_MEMORY);
    sp_alloc_fail_after(-1);
    sp_text_free(&unused);
    assert_int_equal(sp_alloc_bytes(), bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_listed),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_neutral),
        cmocka_unit_test(test_no_memory),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
