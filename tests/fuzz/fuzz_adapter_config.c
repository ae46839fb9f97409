/*
 * adapter_config.json: any bytes give a config or an error with a code. A config that was read
 * answers for any path with a rank and a scale that can be used, or with an error.
 */
#include "fuzz/target.h"

#include "adapter/peft_config.h"

#include <math.h>
#include <string.h>

static const char *const paths[] = {
    "model.layers.0.self_attn.q_proj",
    "model.language_model.layers.13.mlp.experts.gate_up_proj",
    "model.layers.2.mlp.experts.17.down_proj",
    "lm_head",
    "a",
};

static void use(const sp_peft_config *config)
{
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        size_t n = strlen(paths[i]);
        int32_t rank = 0;
        float scale = 0;
        bool answer;
        sp_error error;

        if (sp_peft_config_scale(config, paths[i], n, &rank, &scale, &error) == SP_OK)
            FUZZ_CHECK(rank >= 1 && scale > 0 && isfinite(scale));
        else
            FUZZ_CHECK(error.code[0] != '\0');
        sp_name_rule_match(&config->target_modules, paths[i], n, &answer, &error);
        sp_name_rule_match(&config->exclude_modules, paths[i], n, &answer, &error);
        answer = sp_peft_config_layer_listed(config, paths[i], n);
        FUZZ_CHECK(answer || config->layers_to_transform.given);
    }
    FUZZ_CHECK(config->rank >= 1 && config->alpha > 0);
    for (int32_t i = 0; i < config->tokens_embed.n; i++)
        FUZZ_CHECK(config->tokens_embed.ids[i] >= 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    sp_adapter_options options;
    sp_peft_config config;
    sp_remarks remarks = {0};
    sp_error error;
    sp_status status;

    sp_adapter_options_default(&options, sizeof options);
    options.allow_unknown_fields = bytes % 2;
    status = sp_peft_config_parse((const char *)data, bytes, "input", &options, &config, &remarks,
                                  &error);
    if (status == SP_OK)
        use(&config);
    else
        FUZZ_CHECK(status < 0 && error.code[0] != '\0' && error.text[0] != '\0');
    sp_peft_config_clear(&config);
    sp_text_free(&remarks.text);
    return 0;
}
