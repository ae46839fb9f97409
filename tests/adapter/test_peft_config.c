/*
 * adapter_config.json: every field, what is taken, and what is refused with which code.
 */
#include "adapter/toy.h"

#include "adapter/peft_config.h"

#include <stdio.h>
#include <string.h>

/* Members put into the default config; a member given twice would be a duplicate key. */
static const struct {
    const char *members;
    const char *code; /* NULL: taken */
    const char *subject;
} members[] = {
    /* labels, whatever they say */
    {", \"base_model_name_or_path\": null", NULL, NULL},
    {", \"base_model_name_or_path\": \"https://example.org/model\"", NULL, NULL},
    {", \"base_model_name_or_path\": 3", NULL, NULL},
    {", \"revision\": \"main\", \"lora_dropout\": 0.1, \"inference_mode\": true", NULL, NULL},
    {", \"auto_mapping\": {\"base_model_class\": \"X\"}, \"megatron_core\": \"megatron.core\"",
     NULL, NULL},
    {", \"qalora_group_size\": 16, \"ensure_weight_tying\": true", NULL, NULL},
    {", \"runtime_config\": {\"ephemeral_gpu_offload\": true}", NULL, NULL},
    {", \"loftq_config\": {\"bits\": 4}, \"eva_config\": {\"rho\": 2}", NULL, NULL},
    {", \"corda_config\": {\"a\": 1}, \"lora_ga_config\": {\"a\": 1}", NULL, NULL},
    /* bias, DoRA */
    {", \"bias\": \"none\", \"lora_bias\": false, \"use_dora\": false", NULL, NULL},
    {", \"bias\": null, \"lora_bias\": null, \"use_dora\": null", NULL, NULL},
    {", \"bias\": \"all\"", "bias", "bias"},
    {", \"bias\": \"lora_only\"", "bias", "bias"},
    {", \"bias\": 1", "config-malformed", "bias"},
    {", \"lora_bias\": true", "bias", "lora_bias"},
    {", \"lora_bias\": 0", "config-malformed", "lora_bias"},
    {", \"use_dora\": true", "dora", "use_dora"},
    {", \"use_dora\": \"no\"", "config-malformed", "use_dora"},
    {", \"fan_in_fan_out\": true", NULL, NULL},
    {", \"fan_in_fan_out\": \"x\"", "config-malformed", "fan_in_fan_out"},
    /* initialisation */
    {", \"init_lora_weights\": true", NULL, NULL},
    {", \"init_lora_weights\": false", NULL, NULL},
    {", \"init_lora_weights\": \"gaussian\"", NULL, NULL},
    {", \"init_lora_weights\": \"eva\"", NULL, NULL},
    {", \"init_lora_weights\": \"orthogonal\"", NULL, NULL},
    {", \"init_lora_weights\": \"pissa\"", "base-changing-init", "init_lora_weights"},
    {", \"init_lora_weights\": \"pissa_niter_16\"", "base-changing-init", "init_lora_weights"},
    {", \"init_lora_weights\": \"OLoRA\"", "base-changing-init", "init_lora_weights"},
    {", \"init_lora_weights\": \"corda\"", "base-changing-init", "init_lora_weights"},
    {", \"init_lora_weights\": \"loftq\"", "base-changing-init", "init_lora_weights"},
    {", \"init_lora_weights\": \"lora_ga\"", "base-changing-init", "init_lora_weights"},
    {", \"init_lora_weights\": 1", "config-malformed", "init_lora_weights"},
    /* methods that are not served */
    {", \"alora_invocation_tokens\": [11, 12]", "unsupported-field", "alora_invocation_tokens"},
    {", \"alora_invocation_tokens\": []", NULL, NULL},
    {", \"layer_replication\": [[0, 4]]", "unsupported-field", "layer_replication"},
    {", \"use_qalora\": true", "unsupported-field", "use_qalora"},
    {", \"use_qalora\": false", NULL, NULL},
    {", \"megatron_config\": {\"a\": 1}", "unsupported-field", "megatron_config"},
    {", \"arrow_config\": {\"a\": 1}", "unsupported-field", "arrow_config"},
    {", \"use_bdlora\": {\"a\": 1}", "unsupported-field", "use_bdlora"},
    {", \"kasa_config\": {\"a\": 1}", "unsupported-field", "kasa_config"},
    {", \"velora_config\": {\"a\": 1}", "unsupported-field", "velora_config"},
    {", \"monteclora_config\": {\"a\": 1}", "unsupported-field", "monteclora_config"},
    /* keys that are not known */
    {", \"new\": null, \"newer\": false, \"newest\": 0", NULL, NULL},
    {", \"new\": \"\", \"newer\": [], \"newest\": {}, \"last\": 0.0", NULL, NULL},
    {", \"new_method\": true", "unknown-field", "new_method"},
    {", \"new_method\": 1", "unknown-field", "new_method"},
    {", \"new_method\": \"x\"", "unknown-field", "new_method"},
    {", \"new_method\": [0]", "unknown-field", "new_method"},
    {", \"new_method\": {\"a\": 0}", "unknown-field", "new_method"},
    /* targets */
    {", \"target_modules\": [\"q_proj\", \"v_proj\"]", NULL, NULL},
    {", \"target_modules\": [\"self_attn.q_proj\", \"v_proj\"]", NULL, NULL},
    {", \"target_modules\": \"all-linear\"", NULL, NULL},
    {", \"target_modules\": \"All-Linear\"", NULL, NULL},
    {", \"target_modules\": [\"model.language_model.layers.0.self_attn.q_proj\", "
     "\"layers.0.self_attn.v_proj\"]",
     NULL, NULL},
    {", \"target_modules\": [\"q_proj\", \"v_proj\", "
     "\"model.language_model.layers.0.self_attn.k_proj\"]",
     "unmatched-target", "model.language_model.layers.0.self_attn.k_proj"},
    {", \"target_modules\": [\"q_proj\", \"v_proj\", \"model.layers.1.self_attn.q_proj\"]", NULL,
     NULL},
    {", \"target_modules\": [\"q_proj\", \"v_proj\", \"\", \"o_proj\", \"k_proj\"]",
     "unmatched-target", "o_proj"},
    {", \"target_modules\": \".*\\\\.(q|v)_proj\"", NULL, NULL},
    {", \"target_modules\": \".*nothing\"", NULL, NULL},
    {", \"target_modules\": []", NULL, NULL},
    {", \"target_modules\": null", NULL, NULL},
    {", \"target_modules\": [\"q_proj\"]", NULL, NULL},
    {", \"target_modules\": [\"q_proj\", \"v_proj\", \"c_attn\", \"fc1\"]", NULL, NULL},
    {", \"target_modules\": [\"q_proj\", \"v_proj\", \"k_proj\"]", "unmatched-target", "k_proj"},
    {", \"target_modules\": [\"q_proj\", \"v_proj\", \"out_proj\"]", "unmatched-target",
     "out_proj"},
    {", \"target_modules\": [\"q_proj\", \"v_proj\", \"lm_head\"]", "unmatched-target", "lm_head"},
    {", \"target_modules\": [\"q_proj\", \"v_proj\", \"gate\"]", "unmatched-target", "gate"},
    {", \"target_modules\": [\"q_proj\", \"v_proj\", \"down_proj\"]", "unmatched-target",
     "down_proj"},
    {", \"target_modules\": [\"q_proj\", \"v_proj\", \"k_proj\"], \"exclude_modules\": "
     "[\"k_proj\"]",
     NULL, NULL},
    {", \"target_modules\": [\"q_proj\", \"v_proj\", \"k_proj\"], \"exclude_modules\": "
     "\".*k_proj\"",
     NULL, NULL},
    {", \"target_modules\": [\"q_proj\", \"v_proj\", \"out_proj\"], \"layers_to_transform\": 0",
     NULL, NULL},
    {", \"target_modules\": 3", "config-malformed", "target_modules"},
    {", \"target_modules\": [3]", "config-malformed", "target_modules"},
    {", \"target_modules\": \"(?<=x)q\"", "unsupported-pattern", "target_modules"},
    {", \"exclude_modules\": [\"v_proj\"]", "layer-not-targeted",
     "base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight"},
    {", \"exclude_modules\": \".*layers\\\\.0\\\\..*v_proj\"", "layer-not-targeted", NULL},
    {", \"exclude_modules\": [\"_proj\"]", NULL, NULL},
    {", \"layers_to_transform\": [0, 1]", NULL, NULL},
    {", \"layers_to_transform\": [0], \"layers_pattern\": \"layers\"", NULL, NULL},
    {", \"layers_to_transform\": [0], \"layers_pattern\": [\"h\", \"layers\"]", NULL, NULL},
    {", \"layers_to_transform\": [1]", "layer-not-targeted", NULL},
    {", \"layers_to_transform\": 1", "layer-not-targeted", NULL},
    {", \"layers_to_transform\": []", NULL, NULL},
    {", \"layers_to_transform\": [7, 3, 0, 5, 3]", NULL, NULL},
    {", \"layers_to_transform\": [7, 3, 5], \"target_modules\": \".*_proj\"", "layer-not-targeted",
     "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"},
    {", \"layers_to_transform\": [0], \"target_modules\": \".*_proj\"", NULL, NULL},
    {", \"layers_to_transform\": [0], \"layers_pattern\": \"h\"", "layer-not-targeted", NULL},
    {", \"layers_to_transform\": [-1]", "config-malformed", "layers_to_transform"},
    {", \"layers_to_transform\": [\"0\"]", "config-malformed", "layers_to_transform"},
    {", \"layers_to_transform\": 0.5", "config-malformed", "layers_to_transform"},
    {", \"layers_pattern\": 1", "config-malformed", "layers_pattern"},
    {", \"layers_pattern\": \"la.ers\"", "unsupported-pattern", "layers_pattern"},
    {", \"target_parameters\": []", NULL, NULL},
    {", \"target_parameters\": [\"mlp.experts.gate_up_proj\"]", "unmatched-target",
     "mlp.experts.gate_up_proj"},
    {", \"target_parameters\": [\"down_proj\"]", "unmatched-target", "mlp.experts.down_proj"},
    {", \"target_parameters\": [\"gate.weight\"]", "unmatched-target", "mlp.gate.weight"},
    {", \"target_parameters\": [\"q_proj.weight\"]", "unsupported-parameter", "target_parameters"},
    {", \"target_parameters\": [\"weight\"]", "unsupported-parameter", "target_parameters"},
    {", \"target_parameters\": [\"\"]", "unsupported-parameter", "target_parameters"},
    {", \"target_parameters\": \"down_proj\"", "config-malformed", "target_parameters"},
    {", \"modules_to_save\": [\"score\"]", "modules-to-save", "modules_to_save"},
    {", \"modules_to_save\": [\"norm\", \"lm_head\"]", "modules-to-save", "modules_to_save"},
    {", \"modules_to_save\": [\"lm_head\"]", "unmatched-target", "lm_head"},
    {", \"modules_to_save\": [\"model.embed_tokens\"]", "unmatched-target", "model.embed_tokens"},
    {", \"modules_to_save\": []", NULL, NULL},
    {", \"modules_to_save\": \"lm_head\"", "config-malformed", "modules_to_save"},
    {", \"trainable_token_indices\": []", NULL, NULL},
    {", \"trainable_token_indices\": {}", NULL, NULL},
    {", \"trainable_token_indices\": [1, 2]", "bad-token-index", "trainable_token_indices"},
    {", \"trainable_token_indices\": [1, -2]", "bad-token-index", "trainable_token_indices"},
    {", \"trainable_token_indices\": [3, 1, 3]", "bad-token-index", "trainable_token_indices"},
    {", \"trainable_token_indices\": [1.5]", "config-malformed", "trainable_token_indices"},
    {", \"trainable_token_indices\": 3", "config-malformed", "trainable_token_indices"},
    {", \"trainable_token_indices\": {\"lm_head\": 3}", "config-malformed",
     "trainable_token_indices"},
    {", \"trainable_token_indices\": {\"norm\": [3]}", "bad-token-index",
     "trainable_token_indices"},
    {", \"trainable_token_indices\": {\"embed_tokens\": [3], \"model.embed_tokens\": [4]}",
     "bad-token-index", "trainable_token_indices"},
    /* patterns */
    {", \"rank_pattern\": {}, \"alpha_pattern\": null", NULL, NULL},
    {", \"rank_pattern\": {\"k_proj\": 7}", NULL, NULL},
    {", \"rank_pattern\": {\"q_proj\": 4}", "rank-mismatch",
     "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"},
    {", \"rank_pattern\": {\"q_proj\": 0}", "bad-rank", "rank_pattern"},
    {", \"rank_pattern\": {\"q_proj\": 2.0}", "bad-rank", "rank_pattern"},
    {", \"rank_pattern\": {\"q_proj\": \"2\"}", "bad-rank", "rank_pattern"},
    {", \"rank_pattern\": [2]", "config-malformed", "rank_pattern"},
    {", \"rank_pattern\": {\"(?i)q\": 2}", "unsupported-pattern", "rank_pattern"},
    {", \"alpha_pattern\": {\"q_proj\": 0}", "bad-alpha", "alpha_pattern"},
    {", \"alpha_pattern\": {\"q_proj\": -1}", "bad-alpha", "alpha_pattern"},
    {", \"alpha_pattern\": {\"q_proj\": true}", "bad-alpha", "alpha_pattern"},
    {", \"alpha_pattern\": {\"q_proj\": 1e-60}", "bad-alpha", "lora_alpha"},
    {", \"alpha_pattern\": {\"q[\": 1}", "unsupported-pattern", "alpha_pattern"},
    /* markers of the expert layout */
    {", \"lora_B_layout\": \"rank_major\"", NULL, NULL},
    {", \"lora_B_layout\": \"grouped_by_expert\"", NULL, NULL},
    {", \"lora_B_layout\": \"other\"", "unsupported-field", "lora_B_layout"},
    {", \"lora_B_layout\": \"rank_major\", \"unsloth_fused_expert_lora\": {\"parameters\": "
     "{\"down_proj\": {\"lora_B_layout\": \"grouped_by_expert\"}}}",
     "unsupported-field", "unsloth_fused_expert_lora"},
};

static void every_member(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter = toy_adapter();

    (void)state;
    for (size_t i = 0; i < sizeof members / sizeof *members; i++) {
        make_adapter_config_with(adapter, members[i].members);
        if (members[i].code) {
            toy_refused(adapter, &options, members[i].code, members[i].subject, NULL,
                        members[i].members);
        } else {
            sp_adapter *opened = toy_opened(adapter, &options);

            assert_int_equal(sp_adapter_n_sites(opened), 2);
            sp_adapter_release(opened);
        }
    }
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* The text alone, which is all that a log has, says which field to look at. */
static void changing_init_names_its_field(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter = toy_adapter();

    (void)state;
    make_adapter_config_with(adapter, ", \"init_lora_weights\": \"pissa_niter_4\"");
    toy_refused(adapter, &options, "base-changing-init", "init_lora_weights",
                "init_lora_weights is \"pissa_niter_4\"", "PiSSA");
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* Whole texts: what is required, and what is no config at all. */
static const struct {
    const char *text;
    const char *code;
    float scale; /* of q_proj, where it is taken */
} texts[] = {
    {"{\"r\": 2, \"lora_alpha\": 4}", NULL, 2.0f},
    {"{\"r\": 2, \"lora_alpha\": 5.5}", NULL, 2.75f},
    {"{\"r\": 2, \"lora_alpha\": 1e-30}", NULL, 5e-31f},
    {"{\"r\": 2, \"lora_alpha\": 8, \"use_rslora\": true}", NULL, 5.656854249492381f},
    {"{\"r\": 2, \"lora_alpha\": 8, \"use_rslora\": false}", NULL, 4.0f},
    {"{\"r\": 2, \"lora_alpha\": 8, \"use_rslora\": null}", NULL, 4.0f},
    {"{\"r\": 2, \"lora_alpha\": 8, \"use_rslora\": 1}", "config-malformed", 0},
    {"{\"r\": 2, \"lora_alpha\": 4, \"peft_type\": \"lora\"}", NULL, 2.0f},
    {"{\"r\": 2, \"lora_alpha\": 4, \"peft_type\": \"LoRA\"}", NULL, 2.0f},
    {"{\"r\": 2, \"lora_alpha\": 4, \"peft_type\": null, \"task_type\": null}", NULL, 2.0f},
    {"{\"r\": 2, \"lora_alpha\": 4, \"peft_type\": \"IA3\"}", "peft-type", 0},
    {"{\"r\": 2, \"lora_alpha\": 4, \"peft_type\": 7}", "config-malformed", 0},
    {"{\"r\": 2, \"lora_alpha\": 4, \"task_type\": \"SEQ_CLS\"}", "task-type", 0},
    {"{\"r\": 2, \"lora_alpha\": 4, \"task_type\": 1}", "config-malformed", 0},
    {"{\"r\": 8, \"lora_alpha\": 4, \"rank_pattern\": {\"q_proj\": 2, \"v_proj\": 2}, "
     "\"alpha_pattern\": {\"q_proj\": 6}}",
     NULL, 3.0f},
    {"{\"r\": 2, \"lora_alpha\": 4, \"alpha_pattern\": {\"self_attn.q_proj\": 6, \"q_proj\": 8}}",
     NULL, 3.0f},
    {"{\"r\": 2, \"lora_alpha\": 4, \"alpha_pattern\": {\"q_proj\": 8, \"self_attn.q_proj\": 6}}",
     NULL, 4.0f},
    {"{\"r\": 2, \"lora_alpha\": 4, \"alpha_pattern\": {\"proj\": 8, \"xq_proj\": 6}}", NULL, 2.0f},
    {"{\"lora_alpha\": 4}", "bad-rank", 0},
    {"{\"r\": null, \"lora_alpha\": 4}", "bad-rank", 0},
    {"{\"r\": 2.0, \"lora_alpha\": 4}", "bad-rank", 0},
    {"{\"r\": true, \"lora_alpha\": 4}", "bad-rank", 0},
    {"{\"r\": 4294967298, \"lora_alpha\": 4}", "bad-rank", 0},
    {"{\"r\": 2}", "bad-alpha", 0},
    {"{\"r\": 2, \"lora_alpha\": 0}", "bad-alpha", 0},
    {"{\"r\": 2, \"lora_alpha\": -4}", "bad-alpha", 0},
    {"{\"r\": 2, \"lora_alpha\": \"4\"}", "bad-alpha", 0},
    {"{\"r\": 2, \"lora_alpha\": 1e39}", "bad-alpha", 0},
    {"{\"r\": 2, \"lora_alpha\": 1e-60}", "bad-alpha", 0},
    {"{\"r\": 2, \"lora_alpha\": 1e400}", "config-malformed", 0},
    {"{\"r\": 2, \"r\": 2, \"lora_alpha\": 4}", "duplicate-key", 0},
    {"{\"r\": 2, \"lora_alpha\": 4, \"rank_pattern\": {\"a\": 1, \"a\": 1}}", "duplicate-key", 0},
    {"", "config-malformed", 0},
    {"[]", "config-malformed", 0},
    {"null", "config-malformed", 0},
    {"{\"r\": 2, \"lora_alpha\": 4} x", "config-malformed", 0},
    {"{'r': 2}", "config-malformed", 0},
    {"{\"r\": 2, \"lora_alpha\": 4,}", "config-malformed", 0},
    {"\xef\xbb\xbf{\"r\": 2, \"lora_alpha\": 4}", "config-malformed", 0},
    {"{\"r\": 2, \"lora_alpha\": 4, \"revision\": \"\xff\"}", "config-malformed", 0},
    {"{\"r\": 2, \"lora_alpha\": 4, \"revision\": \"\\u0000\"}", "config-malformed", 0},
    {NULL, "config-missing", 0},
};

static void whole_texts(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter = toy_adapter();

    (void)state;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        make_adapter_config(adapter, texts[i].text);
        if (texts[i].code) {
            toy_refused(adapter, &options, texts[i].code, NULL, NULL,
                        texts[i].text ? texts[i].text : "no config");
        } else {
            sp_adapter *opened = toy_opened(adapter, &options);
            const sp_adapter_site *site = sp_adapter_site_at(opened, 0);

            assert_string_equal(site->module, "self_attn.q_proj");
            if (site->scale != texts[i].scale)
                fail_msg("%s: scale %.9g", texts[i].text, (double)site->scale);
            sp_adapter_release(opened);
        }
    }
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* Rank and scale: alpha / r, or alpha / √r, of the pattern's r and alpha; in double, then FP32. */
static const struct {
    const char *text;
    int rank;
    float scale;
} scales[] = {
    {"{\"r\": 6, \"lora_alpha\": 0.9}", 6, 0.15f}, /* 0.14999999 by FP32 alone */
    {"{\"r\": 6, \"lora_alpha\": 0.9, \"use_rslora\": true}", 6, 0.36742346141747673f},
    {"{\"r\": 3, \"lora_alpha\": 4.3}", 3, 1.43333333333333f},
    {"{\"r\": 16, \"lora_alpha\": 16, \"use_rslora\": true}", 16, 4},
    {"{\"r\": 8, \"lora_alpha\": 6, \"rank_pattern\": {\"q_proj\": 4}}", 4, 1.5f},
    {"{\"r\": 8, \"lora_alpha\": 6, \"rank_pattern\": {\"q_proj\": 4}, \"use_rslora\": true}", 4,
     3},
    {"{\"r\": 8, \"lora_alpha\": 6, \"rank_pattern\": {\"v_proj\": 4}, \"use_rslora\": true}", 8,
     2.1213203435596424f},
    {"{\"r\": 8, \"lora_alpha\": 6, \"alpha_pattern\": {\"q_proj\": 2}, \"use_rslora\": true}", 8,
     0.70710678118654752f},
    {"{\"r\": 8, \"lora_alpha\": 6, \"rank_pattern\": {\"q_proj\": 4}, "
     "\"alpha_pattern\": {\"q_proj\": 2}, \"use_rslora\": true}",
     4, 1},
    /* one key the end of another: the first that fits decides, in the file's order */
    {"{\"r\": 8, \"lora_alpha\": 6, \"rank_pattern\": {\"proj\": 1, \"attn.q_proj\": 2, "
     "\"0.self_attn.q_proj\": 4, \"q_proj\": 5}}",
     4, 1.5f},
    {"{\"r\": 8, \"lora_alpha\": 6, \"rank_pattern\": {\"^q_proj\": 1, "
     "\"^layers.0.self_attn.q_proj\": 2, \"^model\\\\.layers\\\\.0\\\\..*q_proj$\": 3, \"q_proj\": "
     "5}}",
     3, 2},
};

static void scales_of_a_module(void **state)
{
    static const char path[] = "model.layers.0.self_attn.q_proj";

    (void)state;
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i++) {
        sp_adapter_options options;
        sp_remarks remarks = {0};
        sp_peft_config config;
        sp_error error;
        int32_t rank;
        float scale;

        sp_adapter_options_default(&options, sizeof options);
        assert_ok(sp_peft_config_parse(scales[i].text, strlen(scales[i].text), "config", &options,
                                       &config, &remarks, &error),
                  &error);
        assert_ok(sp_peft_config_scale(&config, path, strlen(path), &rank, &scale, &error), &error);
        if (rank != scales[i].rank || scale != scales[i].scale)
            fail_msg("%s: rank %d, scale %.9g", scales[i].text, rank, (double)scale);
        sp_peft_config_clear(&config);
        sp_text_free(&remarks.text);
    }
}

/*
 * Which number of a path PEFT takes for the layer: the last one behind a word, an expert's too;
 * with layers_pattern, the one behind the first of its words that the path has.
 */
static const struct {
    const char *members, *path;
    bool listed;
} layers[] = {
    {"\"layers_to_transform\": [2]", "model.layers.2.mlp.up_proj", true},
    {"\"layers_to_transform\": 2", "model.layers.2.mlp.up_proj", true},
    {"\"layers_to_transform\": [3, 9, 2, 1]", "model.layers.2.mlp.up_proj", true},
    {"\"layers_to_transform\": [3, 9, 22, 1]", "model.layers.2.mlp.up_proj", false},
    {"\"layers_to_transform\": [5, 4, 3, 2, 1]", "model.layers.5.mlp.up_proj", true},
    {"\"layers_to_transform\": [5, 4, 3, 2, 1]", "model.layers.1.mlp.up_proj", true},
    {"\"layers_to_transform\": [2]", "model.layers.0.mlp.experts.2.up_proj", true},
    {"\"layers_to_transform\": [0]", "model.layers.0.mlp.experts.2.up_proj", false},
    {"\"layers_to_transform\": [0], \"layers_pattern\": \"layers\"",
     "model.layers.0.mlp.experts.2.up_proj", true},
    {"\"layers_to_transform\": [2], \"layers_pattern\": \"layers\"",
     "model.layers.0.mlp.experts.2.up_proj", false},
    {"\"layers_to_transform\": [2], \"layers_pattern\": [\"h\", \"experts\", \"layers\"]",
     "model.layers.0.mlp.experts.2.up_proj", true},
    {"\"layers_to_transform\": [0], \"layers_pattern\": [\"h\", \"experts\", \"layers\"]",
     "model.layers.0.mlp.experts.2.up_proj", false},
    {"\"layers_to_transform\": [0], \"layers_pattern\": \"layer\"", "model.layers.0.mlp.up_proj",
     false},
    {"\"layers_to_transform\": [0]", "lm_head", false},
    {"\"layers_to_transform\": [0]", "model.layers.0", false}, /* nothing behind the number */
    {"\"layers_to_transform\": null", "lm_head", true},
};

static void layers_of_paths(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof layers / sizeof *layers; i++) {
        sp_adapter_options options;
        sp_remarks remarks = {0};
        sp_peft_config config;
        char text[256];
        sp_error error;
        bool listed;

        snprintf(text, sizeof text, "{\"r\": 2, \"lora_alpha\": 4, %s}", layers[i].members);
        sp_adapter_options_default(&options, sizeof options);
        assert_ok(
            sp_peft_config_parse(text, strlen(text), "config", &options, &config, &remarks, &error),
            &error);
        listed = sp_peft_config_layer_listed(&config, layers[i].path, strlen(layers[i].path));
        if (listed != layers[i].listed)
            fail_msg("%s: %s", text, layers[i].path);
        sp_peft_config_clear(&config);
        sp_text_free(&remarks.text);
    }
}

/* An invisible mark is named. */
static void byte_order_mark(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter = toy_adapter();

    (void)state;
    make_adapter_config(adapter, "\xef\xbb\xbf{\"r\": 2, \"lora_alpha\": 4}");
    toy_refused(adapter, &options, "config-malformed", NULL, "byte order mark", "a mark");
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

static void nested_deeply(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter = toy_adapter();
    static char text[300000];

    (void)state;
    memset(text, '[', sizeof text - 1);
    make_adapter_config(adapter, text);
    toy_refused(adapter, &options, "config-malformed", NULL, NULL, "150,000 brackets");
    memcpy(text, "{\"a\":", 5);
    make_adapter_config(adapter, text);
    toy_refused(adapter, &options, "config-malformed", NULL, NULL, "nested lists");
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* exclude_modules reaches the head and the embedding; layers_to_transform, of no layer, does not.
 */
static void outside_of_layers(void **state)
{
    static const struct {
        const char *members, *code, *subject;
    } cases[] = {
        {", \"exclude_modules\": [\"lm_head\"]", "layer-not-targeted",
         "base_model.model.lm_head.lora_A.weight"},
        {", \"exclude_modules\": \".*(embed|head).*\"", "layer-not-targeted",
         "base_model.model.model.embed_tokens.lora_embedding_A"},
        {", \"exclude_modules\": [\"k_proj\"]", NULL, NULL},
        {", \"layers_to_transform\": [0]", NULL, NULL},
    };
    sp_adapter_options options = toy_options();
    make_adapter *adapter = toy_adapter();

    (void)state;
    make_adapter_config_with(adapter, ", \"layers_to_transform\": [0], \"target_modules\": "
                                      "[\"q_proj\", \"lm_head\"]");
    toy_refused(adapter, &options, "unmatched-target", "lm_head", "lm_head", "a head, in no layer");
    make_adapter_add_pair(adapter, "base_model.model.lm_head", 2, TOY_HIDDEN, TOY_VOCAB, 3);
    make_adapter_add_random(adapter, "base_model.model.model.embed_tokens.lora_embedding_A", 2,
                            TOY_VOCAB, 4);
    make_adapter_add_random(adapter, "base_model.model.model.embed_tokens.lora_embedding_B",
                            TOY_HIDDEN, 2, 5);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        make_adapter_config_with(adapter, cases[i].members);
        if (cases[i].code)
            toy_refused(adapter, &options, cases[i].code, cases[i].subject, "exclude_modules",
                        cases[i].members);
        else
            sp_adapter_release(toy_opened(adapter, &options));
    }
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* The expressions of one config share their steps, and a list of words has its limit. */
static void bounded_work(void **state)
{
    static const char text[] = "{\"r\": 2, \"lora_alpha\": 4, \"rank_pattern\": {\"(q|k)\": 1}, "
                               "\"alpha_pattern\": {\"(v|o)\": 3}, \"target_modules\": \".*\", "
                               "\"exclude_modules\": \"(k|x)\"}";
    sp_adapter_options options;
    sp_remarks remarks = {0};
    sp_peft_config config;
    char words[1000] = "";
    sp_error error;
    int32_t rank;
    float scale;
    bool answer;

    (void)state;
    sp_adapter_options_default(&options, sizeof options);
    assert_ok(
        sp_peft_config_parse(text, strlen(text), "config", &options, &config, &remarks, &error),
        &error);
    config.steps_left = 1;
    assert_int_equal(sp_peft_config_scale(&config, "a.v", 3, &rank, &scale, &error),
                     SP_ERR_REFUSED);
    assert_string_equal(error.code, "unsupported-pattern");
    assert_int_equal(sp_name_rule_match(&config.target_modules, "a.v", 3, &answer, &error),
                     SP_ERR_REFUSED);
    assert_int_equal(sp_name_rule_match(&config.exclude_modules, "a.v", 3, &answer, &error),
                     SP_ERR_REFUSED);
    sp_peft_config_clear(&config);
    sp_text_free(&remarks.text);
    for (int n = 64; n <= 65; n++) {
        sp_adapter_options toy = toy_options();
        make_adapter *adapter = toy_adapter();
        size_t at = (size_t)snprintf(words, sizeof words,
                                     ", \"layers_to_transform\": [0], \"layers_pattern\": [");

        for (int i = 1; i < n; i++)
            at += (size_t)snprintf(words + at, sizeof words - at, "\"h\", ");
        snprintf(words + at, sizeof words - at, "\"layers\"]");
        make_adapter_config_with(adapter, words);
        if (n > 64)
            toy_refused(adapter, &toy, "unsupported-pattern", "layers_pattern", "65 words", words);
        else
            sp_adapter_release(toy_opened(adapter, &toy));
        make_adapter_destroy(adapter);
        sp_geometry_release(toy.geometry);
    }
}

static void allowed_by_flags(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter = toy_adapter();
    sp_adapter *opened;

    (void)state;
    options.allow_unknown_fields = true;
    make_adapter_config_with(adapter, ", \"new_method\": true");
    opened = toy_opened(adapter, &options);
    sp_adapter_release(opened);
    make_adapter_config_with(adapter, ", \"layer_replication\": [[0, 1]]");
    toy_refused(adapter, &options, "unsupported-field", NULL, NULL, "a known field");
    options.allow_base_changing_init = true;
    make_adapter_config_with(adapter, ", \"init_lora_weights\": \"pissa\"");
    opened = toy_opened(adapter, &options);
    sp_adapter_release(opened);
    options.allow_partial = true;
    make_adapter_config_with(adapter, ", \"target_modules\": [\"q_proj\", \"v_proj\", \"k_proj\"]");
    opened = toy_opened(adapter, &options);
    sp_adapter_release(opened);
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_member),    cmocka_unit_test(changing_init_names_its_field),
        cmocka_unit_test(whole_texts),     cmocka_unit_test(scales_of_a_module),
        cmocka_unit_test(layers_of_paths), cmocka_unit_test(byte_order_mark),
        cmocka_unit_test(nested_deeply),   cmocka_unit_test(outside_of_layers),
        cmocka_unit_test(bounded_work),    cmocka_unit_test(allowed_by_flags),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
