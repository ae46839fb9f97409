/*
 * Names of tensors: every form that is taken, under every prefix, and every one that is refused.
 */
#include "support/test.h"

#include "adapter/module_key.h"
#include "adapter/reason.h"

#include <stdio.h>
#include <string.h>

static void check(const char *name, sp_key_role role, int layer, sp_module module, int expert,
                  sp_key_fused fused, const char *path)
{
    sp_module_key key;
    sp_error error;

    assert_ok(sp_module_key_parse(name, &key, &error), &error);
    assert_int_equal(key.role, role);
    assert_int_equal(key.layer, layer);
    assert_int_equal(key.module, module);
    assert_int_equal(key.expert, expert);
    assert_int_equal(key.fused, fused);
    assert_int_equal(key.path_bytes, strlen(path));
    assert_memory_equal(key.path, path, key.path_bytes);
}

/* Every module under every prefix, with and without an adapter name. */
static void every_module_and_prefix(void **state)
{
    static const char *const outer[] = {"", "base_model.model."};
    static const char *const trunks[] = {"", "model.", "model.language_model.",
                                         "language_model.model."};
    static const char *const names[] = {"", ".default", ".my-adapter_2"};

    (void)state;
    for (int i = 0; i < 2 * 4 * 3 * SP_MODULE_EXPERT_GATE_PROJ; i++) {
        sp_module module = (sp_module)(i / 24);
        const char *adapter = names[i / 8 % 3];
        char path[256], name[512];
        sp_module_key key;

        snprintf(path, sizeof path, "%slayers.%d.%s", trunks[i / 2 % 4], i, sp_module_name(module));
        snprintf(name, sizeof name, "%s%s.lora_A%s.weight", outer[i % 2], path, adapter);
        check(name, SP_ROLE_A, i, module, -1, SP_FUSED_NONE, path);
        assert_int_equal(sp_module_key_parse(name, &key, NULL), SP_OK);
        assert_int_equal(key.adapter_name_bytes, adapter[0] ? strlen(adapter) - 1 : 0);
        snprintf(name, sizeof name, "%s%s.lora_B%s.weight", outer[i % 2], path, adapter);
        check(name, SP_ROLE_B, i, module, -1, SP_FUSED_NONE, path);
    }
}

static void experts(void **state)
{
    (void)state;
    check("base_model.model.model.layers.3.mlp.experts.lora_A.weight", SP_ROLE_A, 3,
          SP_MODULE_EXPERT_GATE_PROJ, -1, SP_FUSED_OUTER, "model.layers.3.mlp.experts");
    check("base_model.model.model.layers.3.mlp.experts.base_layer.lora_B.weight", SP_ROLE_B, 3,
          SP_MODULE_EXPERT_GATE_PROJ, -1, SP_FUSED_INNER, "model.layers.3.mlp.experts.base_layer");
    check("layers.0.mlp.experts.127.down_proj.lora_A.x.weight", SP_ROLE_A, 0,
          SP_MODULE_EXPERT_DOWN_PROJ, 127, SP_FUSED_NONE, "layers.0.mlp.experts.127.down_proj");
    check("layers.0.mlp.experts.0.up_proj.lora_A.weight", SP_ROLE_A, 0, SP_MODULE_EXPERT_UP_PROJ, 0,
          SP_FUSED_NONE, "layers.0.mlp.experts.0.up_proj");
}

static void outside_of_layers(void **state)
{
    (void)state;
    check("base_model.model.lm_head.lora_A.weight", SP_ROLE_A, -1, SP_MODULE_LM_HEAD, -1,
          SP_FUSED_NONE, "lm_head");
    check("language_model.lm_head.lora_B.weight", SP_ROLE_B, -1, SP_MODULE_LM_HEAD, -1,
          SP_FUSED_NONE, "language_model.lm_head");
    check("base_model.model.model.embed_tokens.lora_embedding_A", SP_ROLE_A, -1,
          SP_MODULE_EMBED_TOKENS, -1, SP_FUSED_NONE, "model.embed_tokens");
    check("embed_tokens.lora_embedding_B.default", SP_ROLE_B, -1, SP_MODULE_EMBED_TOKENS, -1,
          SP_FUSED_NONE, "embed_tokens");
    check("base_model.model.lm_head.weight", SP_ROLE_TABLE, -1, SP_MODULE_LM_HEAD, -1,
          SP_FUSED_NONE, "lm_head");
    check("base_model.model.lm_head.modules_to_save.weight", SP_ROLE_TABLE, -1, SP_MODULE_LM_HEAD,
          -1, SP_FUSED_NONE, "lm_head");
    check("model.embed_tokens.modules_to_save.default.weight", SP_ROLE_TABLE, -1,
          SP_MODULE_EMBED_TOKENS, -1, SP_FUSED_NONE, "model.embed_tokens");
    check("model.embed_tokens.token_adapter.base_layer.weight", SP_ROLE_TABLE, -1,
          SP_MODULE_EMBED_TOKENS, -1, SP_FUSED_NONE, "model.embed_tokens");
    check("model.language_model.embed_tokens.token_adapter.trainable_tokens_delta", SP_ROLE_TOKENS,
          -1, SP_MODULE_EMBED_TOKENS, -1, SP_FUSED_NONE, "model.language_model.embed_tokens");
    check("lm_head.token_adapter.trainable_tokens_delta.default", SP_ROLE_TOKENS, -1,
          SP_MODULE_LM_HEAD, -1, SP_FUSED_NONE, "lm_head");
    check("base_model.model.lm_head.base_layer.bias", SP_ROLE_BIAS_COPY, -1, SP_MODULE_LM_HEAD, -1,
          SP_FUSED_NONE, "lm_head");
    check("lm_head.base_layer.weight", SP_ROLE_BASE_COPY, -1, SP_MODULE_LM_HEAD, -1, SP_FUSED_NONE,
          "lm_head");
}

static const struct {
    const char *name, *code;
} refused_names[] = {
    {"base_model.model.mtp.layers.0.self_attn.q_proj.lora_A.weight", "unknown-prefix"},
    {"base_model.model.visual.blocks.0.attn.qkv.lora_A.weight", "unknown-prefix"},
    {"base_model.model.model.visual.blocks.0.attn.qkv.lora_A.weight", "unknown-prefix"},
    {"vision_tower.layers.0.self_attn.q_proj.lora_A.weight", "unknown-prefix"},
    {"language_model.layers.0.self_attn.q_proj.lora_A.weight", "unknown-prefix"},
    {"base_model.model.base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
     "unknown-prefix"},
    {"xmodel.layers.0.self_attn.q_proj.lora_A.weight", "unknown-prefix"},
    {"visual.embed_tokens.lora_embedding_A", "unknown-prefix"},
    {"mtp.embed_tokens.weight", "unknown-prefix"},
    {"base_model.model.visual.lm_head.modules_to_save.default.weight", "unknown-prefix"},
    {"base_model.model.mtp.embed_tokens.token_adapter.trainable_tokens_delta", "unknown-prefix"},
    {"base_model.model.model.lm_head.weight", "unsupported-module"},
    {"base_model.model.xlm_head.weight", "unrecognized-tensor"},
    {"base_model.model.model.layers.0.embed_tokens.weight", "unsupported-module"},
    {"base_model.model.score.lora_A.weight", "unsupported-module"},
    {"model.norm.lora_A.weight", "unsupported-module"},
    {"model.layers.0.self_attn.qq_proj.lora_A.weight", "unsupported-module"},
    {"model.layers.0.q_proj.lora_A.weight", "unsupported-module"},
    {"model.layers.0.lora_A.weight", "unsupported-module"},
    {"model.layers.0.linear_attn.conv1d.lora_A.weight", "unsupported-module"},
    {"model.layers.0.mlp.experts.gate_up_proj.lora_A.weight", "unsupported-module"},
    {"model.layers.0.mlp.experts.0.lora_A.weight", "unsupported-module"},
    {"model.layers.0.mlp.experts.0.gate_up_proj.lora_A.weight", "unsupported-module"},
    {"model.layers.0.mlp.expertsX.lora_A.weight", "unsupported-module"},
    {"model.layers.0.mlp.experts.base_layer.base_layer.lora_A.weight", "unsupported-module"},
    {"model.layers.00.self_attn.q_proj.lora_A.weight", "malformed-layer-index"},
    {"model.layers.-1.self_attn.q_proj.lora_A.weight", "malformed-layer-index"},
    {"model.layers.+1.self_attn.q_proj.lora_A.weight", "malformed-layer-index"},
    {"model.layers.1x.self_attn.q_proj.lora_A.weight", "malformed-layer-index"},
    {"model.layers..self_attn.q_proj.lora_A.weight", "malformed-layer-index"},
    {"model.layers.2147483648.self_attn.q_proj.lora_A.weight", "malformed-layer-index"},
    {"model.layers.99999999999999999999.self_attn.q_proj.lora_A.weight", "malformed-layer-index"},
    {"model.layers.0.mlp.experts.01.gate_proj.lora_A.weight", "malformed-expert-index"},
    {"model.layers.0.mlp.experts.-1.gate_proj.lora_A.weight", "malformed-expert-index"},
    {"model.layers.0.mlp.experts.x.gate_proj.lora_A.weight", "malformed-expert-index"},
    {"model.layers.0.mlp.experts..gate_proj.lora_A.weight", "malformed-expert-index"},
    {"base_model.model.model.layers.0.self_attn.q_proj.lora_C.weight", "unrecognized-tensor"},
    {"base_model.model.model.layers.0.self_attn.q_proj.weight", "unrecognized-tensor"},
    {"base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight", "unrecognized-tensor"},
    {"base_model.model.score.weight", "unrecognized-tensor"},
    {"base_model.model.model.rotary_emb.inv_freq", "unrecognized-tensor"},
    {"model.layers.0.self_attn.q_proj.lora_a", "unrecognized-tensor"},
    {"model.layers.0.self_attn.q_proj.lora_A", "unrecognized-tensor"},
    {"model.layers.0.self_attn.q_proj.lora_A.a.b.weight", "unrecognized-tensor"},
    {"model.layers.0.self_attn.q_proj.lora_embedding_A", "unrecognized-tensor"},
    {"model.embed_tokens.lora_A.weight", "unrecognized-tensor"},
    {"model.layers.0.self_attn.q_proj.modules_to_save.default.weight", "not-peft-key"},
    {"model.layers.0.self_attn.q_proj.weight", "not-peft-key"},
    {"lora_unet_down_blocks_0.alpha", "not-peft-key"},
    {"rotary_emb.inv_freq", "not-peft-key"},
    {"score.weight", "not-peft-key"},
    {"", "not-peft-key"},
    {".", "not-peft-key"},
};

static void refused(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof refused_names / sizeof *refused_names; i++) {
        sp_module_key key;
        sp_error error;
        sp_status status = sp_module_key_parse(refused_names[i].name, &key, &error);

        if (status == SP_OK || strcmp(error.code, refused_names[i].code) != 0)
            fail_msg("%s: %s", refused_names[i].name, status == SP_OK ? "taken" : error.text);
        assert_string_equal(error.subject, refused_names[i].name);
        assert_true(strstr(error.text, refused_names[i].name) != NULL);
    }
}

/* What the text adds to the name, where it can say more than that it is not known. */
static void refusals_say_what_to_do(void **state)
{
    static const struct {
        const char *name, *words;
    } cases[] = {
        {"_orig_mod.model.layers.0.self_attn.q_proj.lora_A.weight", "wrapped"},
        {"module.base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "wrapped"},
        {"base_model.model._fsdp_wrapped_module.model.layers.0.self_attn.q_proj.lora_A.weight",
         "wrapped"},
        {"base_model.model._orig_mod.model.layers.0.self_attn.q_proj.lora_A.weight", "wrapped"},
        {"base_model.model.base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
         "wrapped"},
        {"mtp.layers.0.self_attn.q_proj.lora_A.weight", "\"mtp.\" is not a place"},
        {"mtp.layers.0.self_attn.q_proj.lora_A.weight", "allow-partial"},
        {"model.layers.0.self_attn.qq_proj.lora_A.weight", "allow-partial"},
        {"model.embed_tokens.lora_A.weight", "embed_tokens has lora_embedding_A"},
        {"model.layers.0.self_attn.q_proj.lora_embedding_A", "embed_tokens has lora_embedding_A"},
        {"model.layers.0.self_attn.q_proj.lora_C.weight", "the ending is neither"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sp_module_key key;
        sp_error error;

        assert_int_not_equal(sp_module_key_parse(cases[i].name, &key, &error), SP_OK);
        if (!strstr(error.text, cases[i].words))
            fail_msg("no \"%s\" in: %s", cases[i].words, error.text);
    }
}

static void biases_and_magnitudes(void **state)
{
    static const struct {
        const char *name;
        sp_key_role role;
    } cases[] = {
        {"base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias", SP_ROLE_BIAS},
        {"base_model.model.lm_head.bias", SP_ROLE_BIAS},
        {"model.layers.0.self_attn.k_proj.bias", SP_ROLE_BIAS},
        {"model.layers.0.self_attn.k_proj.lora_B.bias", SP_ROLE_BIAS},
        {"model.layers.0.self_attn.k_proj.lora_B.default.bias", SP_ROLE_BIAS},
        {"model.layers.0.self_attn.k_proj.lora_magnitude_vector", SP_ROLE_MAGNITUDE},
        {"model.layers.0.self_attn.k_proj.lora_magnitude_vector.default", SP_ROLE_MAGNITUDE},
        {"model.layers.0.self_attn.k_proj.lora_magnitude_vector.default.weight", SP_ROLE_MAGNITUDE},
    };

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sp_module_key key;
        sp_error error;

        assert_ok(sp_module_key_parse(cases[i].name, &key, &error), &error);
        assert_int_equal(key.role, cases[i].role);
    }
}

/* ---- against a model ------------------------------------------------------------------------- */

static const struct {
    const char *model, *name, *code, *word;
} places[] = {
    {"qwen3-tied", "model.layers.4.self_attn.q_proj.lora_A.weight", "layer-out-of-range",
     "4 layers"},
    {"qwen3-tied", "model.layers.0.mlp.gate.lora_A.weight", "expert-on-dense-model", "no experts"},
    {"qwen3-tied", "model.layers.0.mlp.experts.lora_A.weight", "expert-on-dense-model",
     "no experts"},
    {"qwen3-tied", "model.layers.0.mlp.experts.0.up_proj.lora_A.weight", "expert-on-dense-model",
     "no experts"},
    {"qwen3-tied", "model.layers.0.linear_attn.out_proj.lora_A.weight", "unsupported-module",
     "linear_attn.out_proj"},
    {"qwen3-tied", "model.layers.3.self_attn.q_proj.lora_A.weight", NULL, NULL},
    {"qwen3next", "model.layers.0.self_attn.q_proj.lora_A.weight", "wrong-layer-kind",
     "have it: 3"},
    {"qwen3next", "model.layers.3.linear_attn.out_proj.lora_A.weight", "wrong-layer-kind",
     "have it: 0-2"},
    {"qwen35", "model.layers.0.self_attn.q_proj.lora_A.weight", "wrong-layer-kind",
     "have it: 1, 3"},
    {"qwen3next", "model.layers.0.linear_attn.in_proj_qkv.lora_A.weight", "unsupported-module",
     "in_proj_qkv"},
    {"qwen3next", "model.layers.0.mlp.gate_proj.lora_A.weight", "unsupported-module",
     "mlp.gate_proj"},
    {"qwen3moe", "model.layers.0.mlp.experts.8.up_proj.lora_A.weight", "expert-out-of-range",
     "8 experts"},
    {"qwen3moe", "model.layers.0.mlp.experts.7.up_proj.lora_A.weight", NULL, NULL},
};

static void against_models(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        char path[512];
        sp_geometry *geometry;
        sp_module_key key;
        sp_error error;
        sp_status status;

        snprintf(path, sizeof path, "%s/%s", SP_TEST_FIXTURES, places[i].model);
        assert_ok(sp_geometry_open(path, &geometry, &error), &error);
        assert_ok(sp_module_key_parse(places[i].name, &key, &error), &error);
        status = sp_module_key_check(geometry, &key, places[i].name, &error);
        if (places[i].code) {
            assert_int_not_equal(status, SP_OK);
            assert_string_equal(error.code, places[i].code);
            assert_non_null(strstr(error.text, places[i].word));
        } else {
            assert_ok(status, &error);
        }
        sp_geometry_release(geometry);
    }
}

/* Cut anywhere, a name is something else or nothing; never a read past its end. */
static void cut_names(void **state)
{
    const char *whole = "base_model.model.model.language_model.layers.12.mlp.experts.34.gate_proj."
                        "lora_A.default.weight";

    (void)state;
    for (size_t n = 0; n <= strlen(whole); n++) {
        char name[128];
        sp_module_key key;

        memcpy(name, whole, n);
        name[n] = '\0';
        assert_int_equal(sp_module_key_parse(name, &key, NULL) == SP_OK, n == strlen(whole));
        memcpy(name, whole + n, strlen(whole) - n + 1);
        sp_module_key_parse(name, &key, NULL);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_module_and_prefix), cmocka_unit_test(experts),
        cmocka_unit_test(outside_of_layers),       cmocka_unit_test(refused),
        cmocka_unit_test(refusals_say_what_to_do), cmocka_unit_test(biases_and_magnitudes),
        cmocka_unit_test(against_models),          cmocka_unit_test(cut_names),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
