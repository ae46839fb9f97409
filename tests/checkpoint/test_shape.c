/*
 * The shapes of the Llama types, from config.json in the styles of transformers 4 and 5. Expected
 * values are those of transformers' configuration classes; the Qwen3 families are in
 * tests/adapter/test_geometry.c, but for what docs/models says of hybrids.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "checkpoint/config_keys.h"
#include "checkpoint/shape.h"

#include <stdio.h>
#include <string.h>

#define FIELDS(architecture)                                                               \
    "\"architectures\":[\"" architecture "\"],\"num_hidden_layers\":5,\"hidden_size\":24," \
    "\"vocab_size\":16,\"max_position_embeddings\":64,\"rms_norm_eps\":1e-6,"              \
    "\"num_attention_heads\":4,\"intermediate_size\":12"
#define LLAMA   FIELDS("LlamaForCausalLM")
#define MISTRAL FIELDS("MistralForCausalLM") ",\"num_key_value_heads\":2,\"rope_theta\":1e4"
#define QWEN2   FIELDS("Qwen2ForCausalLM") ",\"num_key_value_heads\":2,\"rope_theta\":1e4"
#define SMOLLM3 FIELDS("SmolLM3ForCausalLM") ",\"num_key_value_heads\":2,\"rope_theta\":2e6"

typedef struct config {
    sp_model_shape shape;
    sp_layer_plan *layers;
    sp_text unused;
} config;

static sp_status read_json(json_t *root, config *out, sp_error *error)
{
    sp_status status;

    assert_non_null(root);
    *out = (config){.layers = NULL};
    status = sp_model_shape_read(root, &out->shape, &out->layers, error);
    if (status == SP_OK)
        status = sp_config_keys_check(root, &out->unused, error);
    json_decref(root);
    return status;
}

static void free_config(config *c)
{
    sp_free(c->layers);
    sp_text_free(&c->unused);
}

static config read_good(const char *text)
{
    sp_error error;
    config c;

    assert_ok(read_json(json_loads(text, 0, NULL), &c, &error), &error);
    return c;
}

static config read_file(const char *model, const char *name)
{
    char path[512];
    sp_error error;
    config c;

    snprintf(path, sizeof path, "%s/%s/%s", SP_TEST_FIXTURES, model, name);
    assert_ok(read_json(json_load_file(path, 0, NULL), &c, &error), &error);
    return c;
}

/* ---- the fixtures -------------------------------------------------------------------------- */

static void assert_same_rope(const sp_rope_scaling *a, const sp_rope_scaling *b)
{
    assert_int_equal(a->kind, b->kind);
    assert_true(a->factor == b->factor);
    assert_true(a->low_freq_factor == b->low_freq_factor);
    assert_true(a->high_freq_factor == b->high_freq_factor);
    assert_int_equal(a->original_positions, b->original_positions);
}

static void both_styles_say_the_same(void **state)
{
    static const char *const models[] = {"llama3", "qwen2", "smollm"};

    (void)state;
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        config a = read_file(models[i], "config.json"), b = read_file(models[i], "config.v5.json");

        assert_int_equal(a.shape.family, SP_FAMILY_LLAMA);
        assert_int_equal(b.shape.family, SP_FAMILY_LLAMA);
        assert_int_equal(a.shape.head_dim, b.shape.head_dim);
        assert_int_equal(a.shape.kv_heads, b.shape.kv_heads);
        assert_true(a.shape.rope_theta == b.shape.rope_theta);
        assert_same_rope(&a.shape.rope_scaling, &b.shape.rope_scaling);
        assert_int_equal(a.shape.attention_bias, b.shape.attention_bias);
        assert_int_equal(a.shape.tied_embeddings, b.shape.tied_embeddings);
        free_config(&a);
        free_config(&b);
    }
}

static void what_the_fixtures_have(void **state)
{
    const sp_rope_scaling llama3 = {SP_ROPE_LLAMA3, 8, 1, 4, 28};
    const sp_rope_scaling plain = {.kind = SP_ROPE_PLAIN, .factor = 1};
    config c = read_file("llama3", "config.json");

    (void)state;
    assert_same_rope(&c.shape.rope_scaling, &llama3);
    assert_true(c.shape.rope_theta == 5e5);
    assert_int_equal(c.shape.head_dim, 24); /* 72 / 3 */
    assert_int_equal(c.shape.n_eos_token_ids, 2);
    assert_false(c.shape.attention_bias || c.shape.attention_output_bias || c.shape.mlp_bias);
    free_config(&c);
    c = read_file("qwen2", "config.json");
    assert_same_rope(&c.shape.rope_scaling, &plain);
    assert_true(c.shape.attention_bias);
    assert_false(c.shape.attention_output_bias || c.shape.mlp_bias);
    assert_int_equal(c.shape.head_dim, 16);
    free_config(&c);
    c = read_file("smollm", "config.json");
    assert_true(c.shape.rope_theta == 1e5);
    assert_int_equal(c.shape.head_dim, 16);
    assert_true(c.shape.tied_embeddings);
    assert_null(c.unused.data);
    free_config(&c);
}

/* ---- what is left out ---------------------------------------------------------------------- */

static void what_llama_leaves_out(void **state)
{
    config c = read_good("{" LLAMA "}");

    (void)state;
    assert_int_equal(c.shape.kv_heads, 4);
    assert_int_equal(c.shape.head_dim, 6);
    assert_true(c.shape.rope_theta == 10000);
    assert_false(c.shape.tied_embeddings);
    free_config(&c);
    c = read_good("{" LLAMA ",\"head_dim\":8,\"num_key_value_heads\":null}");
    assert_int_equal(c.shape.kv_heads, 4);
    assert_int_equal(c.shape.head_dim, 8);
    free_config(&c);
    c = read_good("{" LLAMA ",\"attention_bias\":true,\"mlp_bias\":true}");
    assert_true(c.shape.attention_bias && c.shape.attention_output_bias && c.shape.mlp_bias);
    free_config(&c);
    c = read_good("{\"model_type\":\"llama\"," LLAMA
                  ",\"rope_scaling\":{\"type\":\"linear\",\"factor\":2.5}}");
    assert_int_equal(c.shape.rope_scaling.kind, SP_ROPE_LINEAR);
    assert_true(c.shape.rope_scaling.factor == 2.5);
    free_config(&c);
}

static void layers_that_do_not_rotate(void **state)
{
    static const char *const texts[] = {
        "{" SMOLLM3 "}", "{" SMOLLM3 ",\"no_rope_layer_interval\":2}",
        "{" SMOLLM3 ",\"no_rope_layers\":[0,1,1,1,0]}",
        "{" LLAMA ",\"no_rope_layers\":[0,1,1,1,0]}", /* which transformers does not read there */
    };
    static const bool stays[][5] = {
        {0, 0, 0, 1, 0}, {0, 1, 0, 1, 0}, {1, 0, 0, 0, 1}, {0, 0, 0, 0, 0}};

    (void)state;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        config c = read_good(texts[i]);

        for (int layer = 0; layer < 5; layer++)
            assert_int_equal(c.layers[layer].kind, stays[i][layer] ? SP_LAYER_FULL_ATTENTION_NO_ROPE
                                                                   : SP_LAYER_FULL_ATTENTION);
        assert_int_equal(c.shape.tied_embeddings, i < 3); /* SmolLM3's default */
        free_config(&c);
    }
}

static void windows_that_no_text_fills(void **state)
{
    static const char *const texts[] = {
        "{" MISTRAL "}",
        "{" MISTRAL ",\"sliding_window\":null}",
        "{" MISTRAL ",\"sliding_window\":64}",
        "{" QWEN2 ",\"sliding_window\":16}",
    };

    (void)state;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        config c = read_good(texts[i]);

        assert_int_equal(c.shape.attention_bias, i == 3);
        free_config(&c);
    }
}

/* ---- refusals ------------------------------------------------------------------------------ */

static void refused_by_name(void **state)
{
    static const struct {
        const char *text;
        sp_status status;
        const char *subject;
    } cases[] = {
        {"{" FIELDS("GemmaForCausalLM") "}", SP_ERR_UNSUPPORTED, "architectures"},
        {"{\"model_type\":\"mistral\"," LLAMA "}", SP_ERR_UNSUPPORTED, "architectures"},
        {"{" FIELDS("MistralForCausalLM") ",\"rope_theta\":1}", SP_ERR_INPUT,
         "num_key_value_heads"},
        {"{" LLAMA ",\"num_key_value_heads\":3}", SP_ERR_INPUT, "num_key_value_heads"},
        {"{" FIELDS("Qwen2ForCausalLM") ",\"num_key_value_heads\":2}", SP_ERR_INPUT, "rope_theta"},
        {"{" MISTRAL ",\"sliding_window\":63}", SP_ERR_UNSUPPORTED, "sliding_window"},
        {"{" MISTRAL ",\"attention_bias\":true}", SP_ERR_UNSUPPORTED, "attention_bias"},
        {"{" MISTRAL ",\"mlp_bias\":true}", SP_ERR_UNSUPPORTED, "mlp_bias"},
        {"{" QWEN2 ",\"mlp_bias\":true}", SP_ERR_UNSUPPORTED, "mlp_bias"},
        {"{" FIELDS("Qwen3ForCausalLM") ",\"num_key_value_heads\":2,\"head_dim\":6,"
                                        "\"rope_theta\":1e4,\"mlp_bias\":true}",
         SP_ERR_UNSUPPORTED, "mlp_bias"},
        {"{" QWEN2 ",\"use_sliding_window\":true}", SP_ERR_UNSUPPORTED, "use_sliding_window"},
        {"{" LLAMA ",\"hidden_act\":\"gelu\"}", SP_ERR_UNSUPPORTED, "hidden_act"},
        {"{" LLAMA ",\"rope_scaling\":{\"type\":\"dynamic\",\"factor\":2}}", SP_ERR_UNSUPPORTED,
         "type"},
        {"{" LLAMA ",\"rope_scaling\":{\"type\":\"linear\",\"rope_type\":\"llama3\"}}",
         SP_ERR_UNSUPPORTED, "type"},
        {"{" LLAMA ",\"rope_scaling\":{\"rope_type\":\"linear\"}}", SP_ERR_INPUT, "factor"},
        {"{" LLAMA ",\"rope_scaling\":{\"rope_type\":\"linear\",\"factor\":0.5}}", SP_ERR_INPUT,
         "factor"},
        {"{" LLAMA ",\"rope_scaling\":{\"rope_type\":\"default\",\"factor\":2}}",
         SP_ERR_UNSUPPORTED, "factor"},
        {"{" LLAMA ",\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,"
         "\"low_freq_factor\":4,\"high_freq_factor\":4,\"original_max_position_embeddings\":8}}",
         SP_ERR_INPUT, "high_freq_factor"},
        {"{" LLAMA ",\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,"
         "\"low_freq_factor\":1,\"high_freq_factor\":4}}",
         SP_ERR_INPUT, "original_max_position_embeddings"},
        {"{" LLAMA ",\"partial_rotary_factor\":0.5}", SP_ERR_INPUT, "partial_rotary_factor"},
        {"{" LLAMA ",\"head_dim\":8,\"partial_rotary_factor\":0.5}", SP_ERR_UNSUPPORTED,
         "partial_rotary_factor"},
        {"{" SMOLLM3 ",\"no_rope_layers\":[1,1]}", SP_ERR_INPUT, "no_rope_layers"},
        {"{" SMOLLM3 ",\"no_rope_layers\":[1,1,1,1,2]}", SP_ERR_INPUT, "no_rope_layers"},
        {"{" SMOLLM3 ",\"no_rope_layers\":[1,1,1,1,true]}", SP_ERR_INPUT, "no_rope_layers"},
        {"{" SMOLLM3 ",\"no_rope_layer_interval\":0}", SP_ERR_INPUT, "no_rope_layer_interval"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sp_error error = {0};
        config c;

        if (read_json(json_loads(cases[i].text, 0, NULL), &c, &error) != cases[i].status ||
            strcmp(error.subject, cases[i].subject) != 0)
            fail_msg("case %zu: %s", i, error.text);
        free_config(&c);
    }
}

/* ---- made from a hybrid -------------------------------------------------------------------- */

static sp_status read_as(const char *architecture, const char *model_type, config *out)
{
    json_t *root = json_load_file(SP_TEST_FIXTURES "/qwen35moe-vl/config.json", 0, NULL);
    sp_error error = {0};
    sp_status status;

    assert_non_null(root);
    json_object_set_new(root, "architectures", json_pack("[s*]", architecture));
    json_object_set_new(root, "model_type", json_string(model_type));
    status = read_json(root, out, &error);
    if (status != SP_OK) {
        assert_string_equal(error.subject, "architectures");
        assert_non_null(strstr(error.text, model_type));
    }
    return status;
}

/* The architecture decides; a name of these types alone, or beside another class, does not. */
static void other_types_of_hybrids(void **state)
{
    static const char *const types[] = {"qwen3_6_moe", "holo3_1_moe", "laguna"};
    config c;

    (void)state;
    for (int i = 0; i < 3; i++) {
        assert_int_equal(read_as("Qwen3_5MoeForConditionalGeneration", types[i], &c), SP_OK);
        assert_int_equal(c.shape.family, SP_FAMILY_QWEN35_MOE);
        assert_int_equal(c.shape.gdn_value_heads, 4);
        free_config(&c);
        assert_int_equal(read_as(NULL, types[i], &c), SP_ERR_UNSUPPORTED);
        assert_int_equal(read_as("Qwen3MoeForCausalLM", types[i], &c), SP_ERR_UNSUPPORTED);
        assert_int_equal(read_as("LagunaForCausalLM", types[i], &c), SP_ERR_UNSUPPORTED);
    }
    assert_int_equal(read_as("Qwen3_5MoeForConditionalGeneration", "qwen3_7", &c),
                     SP_ERR_UNSUPPORTED);
}

/* The configuration of the text part, in which `edit` replaces members; null removes one. */
static json_t *text_of(json_t *root, const char *edit)
{
    json_t *text = json_object_get(root, "text_config"), *changes = json_loads(edit, 0, NULL);
    const char *key;
    json_t *value;

    text = text ? text : root;
    assert_non_null(changes);
    json_object_foreach(changes, key, value)
    {
        if (json_is_null(value))
            json_object_del(text, key);
        else
            json_object_set(text, key, value);
    }
    json_decref(changes);
    return text;
}

static sp_status read_edited(const char *fixture, const char *edit, config *out, sp_error *error)
{
    char path[512];
    json_t *root;

    snprintf(path, sizeof path, SP_TEST_FIXTURES "/%s/config.json", fixture);
    root = json_load_file(path, 0, NULL);
    assert_non_null(root);
    text_of(root, edit);
    return read_json(root, out, error);
}

/* docs/models/qwen3-next.md and qwen3.5.md. */
static void what_hybrids_leave_out(void **state)
{
    sp_error error;
    config c;

    (void)state;
    assert_ok(read_edited("qwen3next",
                          "{\"partial_rotary_factor\":null,\"rope_parameters\":null,"
                          "\"rope_theta\":1e4,\"norm_topk_prob\":null,\"layer_types\":null,"
                          "\"num_hidden_layers\":8}",
                          &c, &error),
              &error);
    assert_true(c.shape.partial_rotary_factor == 0.25f);
    assert_true(c.shape.norm_topk_prob);
    for (int32_t i = 0; i < 8; i++)
        assert_int_equal(c.layers[i].kind,
                         i % 4 == 3 ? SP_LAYER_FULL_ATTENTION : SP_LAYER_LINEAR_ATTENTION);
    free_config(&c);
    assert_ok(read_edited("qwen3next",
                          "{\"partial_rotary_factor\":null,\"attn_output_gate\":true,"
                          "\"rope_parameters\":{\"rope_type\":\"default\","
                          "\"rope_theta\":1e4,\"partial_rotary_factor\":0.5}}",
                          &c, &error),
              &error);
    assert_true(c.shape.partial_rotary_factor == 0.5f);
    free_config(&c);
    /* The weights of chosen experts sum to 1 whatever the key says, and text has one section. */
    assert_ok(read_edited("qwen35moe-vl",
                          "{\"norm_topk_prob\":false,\"partial_rotary_factor\":0.25,"
                          "\"rope_parameters\":{\"type\":\"mrope\",\"rope_theta\":1e4,"
                          "\"mrope_section\":[2,1,1],\"mrope_interleaved\":true}}",
                          &c, &error),
              &error);
    assert_true(c.shape.norm_topk_prob);
    assert_int_equal(c.shape.rope_scaling.kind, SP_ROPE_PLAIN);
    free_config(&c);
}

static void what_hybrids_refuse(void **state)
{
    static const struct {
        const char *fixture, *edit;
        sp_status status;
        const char *subject;
    } cases[] = {
        {"qwen3next", "{\"attn_output_gate\":false}", SP_ERR_UNSUPPORTED, "attn_output_gate"},
        {"qwen35", "{\"attn_output_gate\":false}", SP_ERR_UNSUPPORTED, "attn_output_gate"},
        {"qwen3next", "{\"linear_num_value_heads\":3}", SP_ERR_INPUT, "linear_num_value_heads"},
        {"qwen3next", "{\"shared_expert_intermediate_size\":null}", SP_ERR_INPUT,
         "shared_expert_intermediate_size"},
        {"qwen35", "{\"layer_types\":null,\"full_attention_interval\":0}", SP_ERR_INPUT,
         "full_attention_interval"},
        {"qwen35moe-vl", "{\"mlp_only_layers\":[1]}", SP_ERR_UNSUPPORTED, "mlp_only_layers"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sp_error error = {0};
        config c;

        if (read_edited(cases[i].fixture, cases[i].edit, &c, &error) != cases[i].status ||
            strcmp(error.subject, cases[i].subject) != 0)
            fail_msg("case %zu: %s", i, error.text);
        free_config(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(both_styles_say_the_same),   cmocka_unit_test(what_the_fixtures_have),
        cmocka_unit_test(what_llama_leaves_out),      cmocka_unit_test(layers_that_do_not_rotate),
        cmocka_unit_test(windows_that_no_text_fills), cmocka_unit_test(refused_by_name),
        cmocka_unit_test(other_types_of_hybrids),     cmocka_unit_test(what_hybrids_leave_out),
        cmocka_unit_test(what_hybrids_refuse),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
