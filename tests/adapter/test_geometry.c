/*
 * Shapes and sites of the five families, against numbers that are read off the fixtures' tensors
 * and the check values of the design.
 */
#include "support/known_sites.h"
#include "support/test.h"

#include "base/alloc.h"

#include <sidepath/adapter.h>

#include <stdio.h>
#include <string.h>

static sp_geometry *open_model(const char *model)
{
    char path[512];
    sp_geometry *geometry;
    sp_error error;

    snprintf(path, sizeof path, "%s/%s", SP_TEST_FIXTURES, model);
    assert_ok(sp_geometry_open(path, &geometry, &error), &error);
    return geometry;
}

static void check_site(const sp_geometry *geometry, int layer, sp_module module, int k_in,
                       int n_out)
{
    int32_t k = -1, n = -1;

    assert_true(known_dims(geometry, layer, module, &k, &n));
    assert_int_equal(k, k_in);
    assert_int_equal(n, n_out);
}

static void dense_transformers_5(void **state)
{
    sp_geometry *geometry = open_model("qwen3-tied");
    const sp_model_shape *shape = sp_geometry_shape(geometry);

    (void)state;
    assert_int_equal(shape->struct_bytes, sizeof *shape);
    assert_int_equal(shape->family, SP_FAMILY_QWEN3);
    assert_int_equal(shape->layers, 4);
    assert_int_equal(shape->hidden, 64);
    assert_int_equal(shape->vocab, 512);
    assert_int_equal(shape->q_heads, 4);
    assert_int_equal(shape->kv_heads, 2);
    assert_int_equal(shape->head_dim, 32);
    assert_int_equal(shape->intermediate, 160);
    assert_int_equal(shape->max_positions, 4096);
    assert_true(shape->rope_theta == 1e6);
    assert_true(shape->rms_norm_eps == 1e-6f);
    assert_true(shape->partial_rotary_factor == 1.0f);
    assert_true(shape->tied_embeddings);
    assert_false(shape->attention_bias);
    assert_false(shape->gated_attention);
    assert_false(shape->zero_centred_norms);
    assert_int_equal(shape->experts, 0);
    assert_int_equal(shape->n_eos_token_ids, 1);
    assert_int_equal(shape->eos_token_ids[0], 509);
    assert_int_equal(sp_geometry_layers(geometry), 4);
    for (int layer = 0; layer < 4; layer++) {
        check_site(geometry, layer, SP_MODULE_Q_PROJ, 64, 128);
        check_site(geometry, layer, SP_MODULE_K_PROJ, 64, 64);
        check_site(geometry, layer, SP_MODULE_V_PROJ, 64, 64);
        check_site(geometry, layer, SP_MODULE_O_PROJ, 128, 64);
        check_site(geometry, layer, SP_MODULE_GATE_PROJ, 64, 160);
        check_site(geometry, layer, SP_MODULE_UP_PROJ, 64, 160);
        check_site(geometry, layer, SP_MODULE_DOWN_PROJ, 160, 64);
    }
    check_site(geometry, -1, SP_MODULE_EMBED_TOKENS, 512, 64);
    check_site(geometry, -1, SP_MODULE_LM_HEAD, 64, 512);
    assert_false(known_dims(geometry, 4, SP_MODULE_Q_PROJ, NULL, NULL));
    assert_false(known_dims(geometry, -2, SP_MODULE_Q_PROJ, NULL, NULL));
    assert_false(known_dims(geometry, -1, SP_MODULE_Q_PROJ, NULL, NULL));
    assert_false(known_dims(geometry, 0, SP_MODULE_EMBED_TOKENS, NULL, NULL));
    assert_false(known_dims(geometry, 0, SP_MODULE_ROUTER, NULL, NULL));
    assert_int_equal(sp_geometry_n_sites(geometry), 2 + 4 * 7);
    sp_geometry_release(geometry);
}

static void dense_transformers_4(void **state)
{
    sp_geometry *geometry = open_model("qwen3-untied");
    const sp_model_shape *shape = sp_geometry_shape(geometry);

    (void)state;
    assert_true(shape->rope_theta == 1e4);
    assert_false(shape->tied_embeddings);
    assert_int_equal(shape->layers, 3);
    check_site(geometry, 2, SP_MODULE_K_PROJ, 64, 32);
    sp_geometry_release(geometry);
}

static void attention_bias(void **state)
{
    sp_geometry *geometry = open_model("qwen3-bias/config.json");

    (void)state;
    assert_true(sp_geometry_shape(geometry)->attention_bias);
    check_site(geometry, 1, SP_MODULE_Q_PROJ, 48, 48);
    check_site(geometry, 1, SP_MODULE_DOWN_PROJ, 96, 48);
    sp_geometry_release(geometry);
}

static void moe(void **state)
{
    sp_geometry *geometry = open_model("qwen3moe");
    const sp_model_shape *shape = sp_geometry_shape(geometry);

    (void)state;
    assert_int_equal(shape->family, SP_FAMILY_QWEN3_MOE);
    assert_int_equal(shape->experts, 8);
    assert_int_equal(shape->experts_per_token, 2);
    assert_int_equal(shape->expert_intermediate, 48);
    assert_int_equal(shape->shared_expert_intermediate, 0);
    assert_int_equal(shape->intermediate, 0);
    assert_true(shape->norm_topk_prob);
    assert_int_equal(sp_geometry_experts(geometry), 8);
    check_site(geometry, 2, SP_MODULE_ROUTER, 64, 8);
    check_site(geometry, 2, SP_MODULE_EXPERT_GATE_PROJ, 64, 48);
    check_site(geometry, 2, SP_MODULE_EXPERT_UP_PROJ, 64, 48);
    check_site(geometry, 2, SP_MODULE_EXPERT_DOWN_PROJ, 48, 64);
    assert_false(known_dims(geometry, 2, SP_MODULE_GATE_PROJ, NULL, NULL));
    assert_false(known_dims(geometry, 2, SP_MODULE_SHARED_EXPERT_GATE, NULL, NULL));
    sp_geometry_release(geometry);
}

static void hybrid_moe_fused_inputs(void **state)
{
    sp_geometry *geometry = open_model("qwen3next");
    const sp_model_shape *shape = sp_geometry_shape(geometry);

    (void)state;
    assert_int_equal(shape->family, SP_FAMILY_QWEN3_NEXT);
    assert_true(shape->gated_attention && shape->zero_centred_norms && shape->gdn_fused_inputs);
    assert_true(shape->partial_rotary_factor == 0.25f);
    assert_int_equal(sp_geometry_layer_kind(geometry, 2), SP_LAYER_LINEAR_ATTENTION);
    assert_int_equal(sp_geometry_layer_kind(geometry, 3), SP_LAYER_FULL_ATTENTION);
    check_site(geometry, 3, SP_MODULE_Q_PROJ, 64, 256);
    check_site(geometry, 3, SP_MODULE_O_PROJ, 128, 64);
    /* 2 key heads of 16, 4 value heads of 16: qkvz 2 * 32 + 2 * 64, ba 2 * 4. */
    check_site(geometry, 0, SP_MODULE_GDN_IN_QKVZ, 64, 192);
    check_site(geometry, 0, SP_MODULE_GDN_IN_BA, 64, 8);
    check_site(geometry, 0, SP_MODULE_GDN_OUT, 64, 64);
    assert_false(known_dims(geometry, 0, SP_MODULE_GDN_IN_QKV, NULL, NULL));
    assert_false(known_dims(geometry, 0, SP_MODULE_Q_PROJ, NULL, NULL));
    assert_false(known_dims(geometry, 3, SP_MODULE_GDN_OUT, NULL, NULL));
    check_site(geometry, 3, SP_MODULE_SHARED_DOWN_PROJ, 40, 64);
    check_site(geometry, 0, SP_MODULE_SHARED_EXPERT_GATE, 64, 1);
    sp_geometry_release(geometry);
}

static void hybrid_dense(void **state)
{
    sp_geometry *geometry = open_model("qwen35");

    (void)state;
    assert_int_equal(sp_geometry_shape(geometry)->family, SP_FAMILY_QWEN35);
    /* 2 key heads of 16, 4 value heads of 24. */
    check_site(geometry, 0, SP_MODULE_GDN_IN_QKV, 64, 160);
    check_site(geometry, 0, SP_MODULE_GDN_IN_Z, 64, 96);
    check_site(geometry, 0, SP_MODULE_GDN_IN_B, 64, 4);
    check_site(geometry, 0, SP_MODULE_GDN_IN_A, 64, 4);
    check_site(geometry, 0, SP_MODULE_GDN_OUT, 96, 64);
    check_site(geometry, 1, SP_MODULE_Q_PROJ, 64, 256);
    for (int layer = 0; layer < 4; layer++)
        check_site(geometry, layer, SP_MODULE_DOWN_PROJ, 128, 64);
    sp_geometry_release(geometry);
}

static void nested_text_config(void **state)
{
    sp_geometry *geometry = open_model("qwen35moe-vl");
    const sp_model_shape *shape = sp_geometry_shape(geometry);

    (void)state;
    assert_int_equal(shape->family, SP_FAMILY_QWEN35_MOE);
    assert_false(shape->tied_embeddings);
    assert_int_equal(shape->hidden, 64);
    assert_true(shape->norm_topk_prob);
    check_site(geometry, 0, SP_MODULE_EXPERT_DOWN_PROJ, 32, 64);
    check_site(geometry, 3, SP_MODULE_SHARED_GATE_PROJ, 64, 40);
    check_site(geometry, 1, SP_MODULE_GDN_IN_QKV, 64, 128);
    sp_geometry_release(geometry);
}

/* ---- configs made up -------------------------------------------------------------------------*/

#define DENSE_FIELDS                                                                         \
    "\"architectures\":[\"Qwen3ForCausalLM\"],\"num_hidden_layers\":2,\"hidden_size\":8,"    \
    "\"vocab_size\":16,\"max_position_embeddings\":64,\"rms_norm_eps\":1e-6,\"head_dim\":4," \
    "\"num_attention_heads\":2,\"num_key_value_heads\":1,\"intermediate_size\":12"

static sp_status parse(const char *text, sp_geometry **out, sp_error *error)
{
    return sp_geometry_parse(text, strlen(text), out, error);
}

static void refused_configs(void **state)
{
    static const struct {
        const char *text;
        sp_status status;
        const char *subject;
    } cases[] = {
        {"", SP_ERR_INPUT, "config.json"},
        {"{", SP_ERR_INPUT, "config.json"},
        {"[]", SP_ERR_INPUT, "text_config"},
        {"{\"text_config\":3}", SP_ERR_INPUT, "text_config"},
        {"{}", SP_ERR_INPUT, "architectures"},
        {"{\"architectures\":[\"GemmaForCausalLM\"]}", SP_ERR_UNSUPPORTED, "architectures"},
        {"{\"architectures\":[\"Qwen3ForCausalLM\"],\"model_type\":\"qwen3_moe\"}",
         SP_ERR_UNSUPPORTED, "architectures"},
        {"{" DENSE_FIELDS "}", SP_ERR_INPUT, "rope_theta"},
        {"{" DENSE_FIELDS ",\"rope_theta\":\"x\"}", SP_ERR_INPUT, "rope_theta"},
        {"{" DENSE_FIELDS ",\"rope_theta\":-1}", SP_ERR_INPUT, "rope_theta"},
        {"{" DENSE_FIELDS ",\"rope_theta\":1e4,\"rope_scaling\":{\"type\":\"yarn\"}}",
         SP_ERR_UNSUPPORTED, "type"},
        {"{" DENSE_FIELDS ",\"rope_parameters\":{\"rope_type\":\"linear\",\"rope_theta\":1}}",
         SP_ERR_UNSUPPORTED, "rope_type"},
        {"{" DENSE_FIELDS ",\"rope_theta\":1e4,\"hidden_act\":\"gelu\"}", SP_ERR_UNSUPPORTED,
         "hidden_act"},
        {"{" DENSE_FIELDS ",\"rope_theta\":1e4,\"use_sliding_window\":true}", SP_ERR_UNSUPPORTED,
         "use_sliding_window"},
        {"{" DENSE_FIELDS ",\"rope_theta\":1e4,\"layer_types\":[\"full_attention\"]}", SP_ERR_INPUT,
         "layer_types"},
        {"{" DENSE_FIELDS ",\"rope_theta\":1e4,\"layer_types\":[\"full_attention\","
         "\"sliding_attention\"]}",
         SP_ERR_UNSUPPORTED, "layer_types"},
        {"{" DENSE_FIELDS ",\"rope_theta\":1e4,\"layer_types\":[\"full_attention\","
         "\"linear_attention\"]}",
         SP_ERR_UNSUPPORTED, "layer_types"},
        {"{" DENSE_FIELDS ",\"rope_theta\":1e4,\"partial_rotary_factor\":0.25}", SP_ERR_INPUT,
         "partial_rotary_factor"},
        {"{" DENSE_FIELDS ",\"rope_theta\":1e4,\"partial_rotary_factor\":0.5}", SP_ERR_UNSUPPORTED,
         "partial_rotary_factor"},
        {"{" DENSE_FIELDS ",\"rope_theta\":1e4,\"rope_parameters\":{\"rope_theta\":1e6}}",
         SP_ERR_INPUT, "rope_theta"},
        {"{" DENSE_FIELDS ",\"rope_parameters\":{\"rope_theta\":1e6},"
         "\"rope_scaling\":{\"rope_type\":\"yarn\"}}",
         SP_ERR_UNSUPPORTED, "rope_type"},
        {"{" DENSE_FIELDS ",\"rope_theta\":1e4,\"eos_token_id\":16}", SP_ERR_INPUT, "eos_token_id"},
        {"{" DENSE_FIELDS ",\"rope_theta\":1e4,\"eos_token_id\":[1,2,3,4,5,6,7,8,9]}",
         SP_ERR_UNSUPPORTED, "eos_token_id"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sp_geometry *geometry = NULL;
        sp_error error;

        assert_int_equal(parse(cases[i].text, &geometry, &error), cases[i].status);
        assert_string_equal(error.subject, cases[i].subject);
        assert_null(geometry);
    }
}

static void notes(void **state)
{
    sp_geometry *geometry = open_model("qwen3-tied");
    sp_error error;

    (void)state;
    assert_null(sp_geometry_note(geometry, 0));
    sp_geometry_release(geometry);
    assert_ok(parse("{" DENSE_FIELDS ",\"rope_theta\":1e4,\"new_key\":0,\"other\":[]}", &geometry,
                    &error),
              &error);
    assert_string_equal(sp_geometry_note(geometry, 0), "config.json: not used: new_key, other");
    assert_null(sp_geometry_note(geometry, 1));
    sp_geometry_release(geometry);
}

/* Each required field in turn made absent, of the wrong type, and out of range. */
static void each_field_is_checked(void **state)
{
    static const char *const fields[] = {
        "num_hidden_layers",       "hidden_size",         "vocab_size",
        "max_position_embeddings", "rms_norm_eps",        "head_dim",
        "num_attention_heads",     "num_key_value_heads", "intermediate_size"};
    static const char *const values[] = {"null", "\"8\"", "-1", "99999999999"};

    (void)state;
    for (size_t f = 0; f < sizeof fields / sizeof *fields; f++) {
        for (size_t v = 0; v < sizeof values / sizeof *values; v++) {
            char text[1024] = "{" DENSE_FIELDS ",\"rope_theta\":1e4}";
            char changed[1100];
            char *at = strstr(text, fields[f]) + strlen(fields[f]) + 2;
            char *end = at + strcspn(at, ",");
            sp_geometry *geometry = NULL;
            sp_error error;

            snprintf(changed, sizeof changed, "%.*s%s%s", (int)(at - text), text, values[v], end);
            assert_int_equal(parse(changed, &geometry, &error), SP_ERR_INPUT);
            assert_string_equal(error.subject, fields[f]);
        }
    }
}

static void mlp_only_layers(void **state)
{
    const char *text =
        "{\"architectures\":[\"Qwen3MoeForCausalLM\"],\"num_hidden_layers\":4,\"hidden_size\":8,"
        "\"vocab_size\":16,\"max_position_embeddings\":64,\"rms_norm_eps\":1e-6,"
        "\"num_attention_heads\":2,\"num_key_value_heads\":1,\"intermediate_size\":12,"
        "\"rope_theta\":1e4,\"num_experts\":3,\"num_experts_per_tok\":2,"
        "\"moe_intermediate_size\":5,\"decoder_sparse_step\":2,\"mlp_only_layers\":[3],"
        "\"eos_token_id\":[3,4]}";
    sp_geometry *geometry;
    sp_error error;

    (void)state;
    assert_ok(parse(text, &geometry, &error), &error);
    /* Sparse are the layers 1 and 3 by the step, and 3 is listed as dense. head_dim is 8 / 2. */
    for (int layer = 0; layer < 4; layer++)
        assert_int_equal(known_dims(geometry, layer, SP_MODULE_ROUTER, NULL, NULL), layer == 1);
    check_site(geometry, 3, SP_MODULE_UP_PROJ, 8, 12);
    check_site(geometry, 0, SP_MODULE_K_PROJ, 8, 4);
    assert_false(sp_geometry_shape(geometry)->norm_topk_prob);
    assert_int_equal(sp_geometry_shape(geometry)->n_eos_token_ids, 2);
    sp_geometry_release(geometry);
}

/* Without layer_types, every fourth layer of a hybrid is full attention (transformers 4). */
static void full_attention_interval(void **state)
{
    static const char form[] =
        "{\"architectures\":[\"Qwen3_5ForCausalLM\"],\"num_hidden_layers\":6,\"hidden_size\":8,"
        "\"vocab_size\":16,\"max_position_embeddings\":64,\"rms_norm_eps\":1e-6,\"head_dim\":8,"
        "\"num_attention_heads\":2,\"num_key_value_heads\":1,\"intermediate_size\":12,"
        "\"rope_theta\":1e4,\"linear_num_key_heads\":1,\"linear_num_value_heads\":2,"
        "\"linear_key_head_dim\":2,\"linear_value_head_dim\":3,\"linear_conv_kernel_dim\":4%s}";
    static const char *const extra[] = {"", ",\"full_attention_interval\":3"};
    static const int intervals[] = {4, 3};

    (void)state;
    for (int i = 0; i < 2; i++) {
        char text[1024];
        sp_geometry *geometry;
        sp_error error;

        snprintf(text, sizeof text, form, extra[i]);
        assert_ok(parse(text, &geometry, &error), &error);
        for (int layer = 0; layer < 6; layer++)
            assert_int_equal(sp_geometry_layer_kind(geometry, layer) == SP_LAYER_FULL_ATTENTION,
                             (layer + 1) % intervals[i] == 0);
        sp_geometry_release(geometry);
    }
}

/* ---- modules --------------------------------------------------------------------------------- */

/* The names of the families, whatever the model. */
static void module_sets(void **state)
{
    static const struct {
        const char *text;
        sp_module_set set;
    } cases[] = {
        {"q_proj", 1u << SP_MODULE_Q_PROJ},
        {" self_attn.q_proj , o_proj", 1u << SP_MODULE_Q_PROJ | 1u << SP_MODULE_O_PROJ},
        {"gate_proj", 1u << SP_MODULE_GATE_PROJ | 1u << SP_MODULE_SHARED_GATE_PROJ},
        {"mlp.gate_proj", 1u << SP_MODULE_GATE_PROJ},
        {"experts.gate_proj", 1u << SP_MODULE_EXPERT_GATE_PROJ},
        {"gate", 1u << SP_MODULE_ROUTER},
        {"out_proj", 1u << SP_MODULE_GDN_OUT},
        {"lm_head,embed_tokens", 1u << SP_MODULE_LM_HEAD | 1u << SP_MODULE_EMBED_TOKENS},
        {"all-linear", (1u << 18) - 1},
    };
    static const struct {
        const char *text;
        int position;
    } wrong[] = {{"", 0}, {"q_proj,", 7}, {"q_proj,r_proj", 7}, {"proj", 0}, {",q_proj", 0}};
    sp_geometry *geometry = open_model("qwen3-tied");
    sp_module_set set;
    sp_error error;

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_ok(sp_module_set_parse(NULL, cases[i].text, &set, &error), &error);
        assert_int_equal(set, cases[i].set);
        assert_ok(sp_module_set_parse(geometry, cases[i].text, &set, &error), &error);
        assert_int_equal(set, cases[i].set);
    }
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_int_equal(sp_module_set_parse(NULL, wrong[i].text, &set, &error), SP_ERR_INPUT);
        assert_int_equal(error.position, wrong[i].position);
        assert_int_equal(sp_module_set_parse(geometry, wrong[i].text, &set, &error), SP_ERR_INPUT);
    }
    assert_int_equal(sp_geometry_n_modules(NULL), 24);
    assert_int_equal(sp_geometry_n_modules(geometry), 24);
    assert_string_equal(sp_geometry_module_name(NULL, 23), "lm_head");
    assert_string_equal(sp_geometry_module_name(geometry, 23), "lm_head");
    assert_null(sp_geometry_module_name(NULL, 24));
    assert_null(sp_geometry_module_name(geometry, -1));
    /* q, k, v, o; gate, up, down; embedding and head. */
    assert_int_equal(sp_geometry_modules(geometry), 0xf | 0x7 << 11 | 0x3 << 22);
    assert_int_equal(sp_geometry_kind_modules(geometry, SP_SITE_LINEAR), 0xf | 0x7 << 11);
    assert_int_equal(sp_geometry_kind_modules(geometry, SP_SITE_HEAD), 1 << 23);
    assert_int_equal(sp_geometry_kind_modules(geometry, SP_SITE_EXPERT), 0);
    sp_geometry_release(geometry);
}

static void missing_files(void **state)
{
    sp_geometry *geometry = NULL;
    sp_error error;

    (void)state;
    assert_int_equal(sp_geometry_open("/nonexistent", &geometry, &error), SP_ERR_NOT_FOUND);
    assert_int_equal(sp_geometry_open(SP_TEST_FIXTURES, &geometry, &error), SP_ERR_NOT_FOUND);
    assert_null(geometry);
}

static void every_allocation_can_fail(void **state)
{
    char path[512];

    (void)state;
    snprintf(path, sizeof path, "%s/qwen3next", SP_TEST_FIXTURES);
    for (int64_t n = 0;; n++) {
        size_t blocks = sp_alloc_blocks();
        sp_geometry *geometry = NULL;
        sp_status status;

        sp_alloc_fail_after(n);
        status = sp_geometry_open(path, &geometry, NULL);
        if (!sp_alloc_failed()) {
            sp_alloc_fail_after(-1);
            assert_int_equal(status, SP_OK);
            sp_geometry_release(geometry);
            assert_int_equal(sp_alloc_blocks(), blocks);
            assert_true(n > 3);
            return;
        }
        sp_alloc_fail_after(-1);
        assert_int_equal(status, SP_ERR_MEMORY);
        assert_null(geometry);
        assert_int_equal(sp_alloc_blocks(), blocks);
    }
}

static void family_names(void **state)
{
    (void)state;
    assert_string_equal(sp_family_name(SP_FAMILY_QWEN3), "qwen3");
    assert_string_equal(sp_family_name(SP_FAMILY_QWEN35_MOE), "qwen3_5_moe_text");
    assert_string_equal(sp_family_name(SP_FAMILY_CUSTOM), "custom");
    assert_null(sp_family_name((sp_family)98));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(family_names),
        cmocka_unit_test(dense_transformers_5),
        cmocka_unit_test(dense_transformers_4),
        cmocka_unit_test(attention_bias),
        cmocka_unit_test(moe),
        cmocka_unit_test(hybrid_moe_fused_inputs),
        cmocka_unit_test(hybrid_dense),
        cmocka_unit_test(nested_text_config),
        cmocka_unit_test(refused_configs),
        cmocka_unit_test(each_field_is_checked),
        cmocka_unit_test(mlp_only_layers),
        cmocka_unit_test(full_attention_interval),
        cmocka_unit_test(module_sets),
        cmocka_unit_test(notes),
        cmocka_unit_test(missing_files),
        cmocka_unit_test(every_allocation_can_fail),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
