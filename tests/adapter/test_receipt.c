/*
 * The receipt: what it says as JSON and as a table, and what the engine lacks.
 */
#include "adapter/known_module.h"
#include "adapter/toy.h"

#include "adapter/reason.h"
#include "base/alloc.h"

#include <jansson.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

static json_t *parse(const sp_receipt *receipt)
{
    json_error_t error;
    const char *text = sp_receipt_json(receipt);
    json_t *root = json_loads(text, JSON_REJECT_DUPLICATES, &error);

    if (!root)
        fail_msg("%s: %s", error.text, text);
    assert_int_equal(text[strlen(text) - 1], '\n');
    return root;
}

/* Asserts that the value at a path of keys ("a.b") is the one that this JSON text says. */
static void check(const json_t *root, const char *path, const char *want)
{
    const json_t *value = root;
    char keys[128];
    json_t *wanted = json_loads(want, JSON_DECODE_ANY, NULL);

    snprintf(keys, sizeof keys, "%s", path);
    for (char *key = keys; key && value;) {
        char *slash = strchr(key, '/');

        if (slash)
            *slash = '\0';
        value = json_object_get(value, key);
        key = slash ? slash + 1 : NULL;
    }
    if (!value || !wanted || !json_equal(value, wanted)) {
        char *got = value ? json_dumps(value, JSON_ENCODE_ANY) : NULL;

        fail_msg("%s is %s, not %s", path, got ? got : "missing", want);
    }
    json_decref(wanted);
}

/* The keys that are promised, in this order. */
static void check_keys(const json_t *root)
{
    static const char *const keys[] = {
        "verdict",      "code", "message",  "tensor",  "digest",  "sites",          "slot_bytes",
        "expert_bytes", "rank", "row_macs", "modules", "ignored", "engine_missing", "notes"};
    void *at = json_object_iter((json_t *)(uintptr_t)root);

    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        assert_non_null(at);
        assert_string_equal(json_object_iter_key(at), keys[i]);
        at = json_object_iter_next((json_t *)(uintptr_t)root, at);
    }
    assert_null(at);
}

static sp_receipt *receipt_of(const make_adapter *adapter, const sp_adapter_options *options,
                              const sp_receipt_options *receipt_options)
{
    sp_adapter *opened = toy_opened(adapter, options);
    sp_receipt *receipt;
    sp_error error;

    assert_ok(sp_receipt_create(opened, receipt_options, &receipt, &error), &error);
    sp_adapter_release(opened);
    return receipt;
}

static make_adapter *varied_adapter(void)
{
    make_adapter *adapter = toy_adapter();

    make_adapter_config_with(adapter, ", \"alpha_pattern\": {\"layers.1.mlp.gate\": 9}, "
                                      "\"target_modules\": \"nothing\"");
    make_adapter_add_pair(adapter, "model.layers.0.mlp.gate", 2, 8, 4, 3);
    make_adapter_add_pair(adapter, "model.layers.1.mlp.gate", 2, 8, 4, 4);
    make_adapter_add_pair(adapter, "model.layers.1.mlp.experts.3.up_proj", 2, 8, 3, 5);
    make_adapter_add_pair(adapter, "lm_head", 2, 8, 16, 6);
    make_adapter_add_pair(adapter, "model.visual.blocks.0.qkv", 2, 8, 16, 7);
    return adapter;
}

/* What a row pays, of experts for those that it goes through: 2 of 8 in these bases. By hand. */
static void cost(void **state)
{
    static const struct {
        const char *model, *adapter, *rank, *macs;
    } cases[] = {
        /* three layers, rank 4: gate 64 → 48, up 64 → 48, down 48 → 64 of two experts each */
        {"qwen3moe", "experts-fused", "4", "8064"},
        /* three layers of GDN, rank 4: qkvz 64 → 192, ba 64 → 8 */
        {"qwen3next", "gdn-in", "4", "3936"},
        /* three layers, rank 4: the router 64 → 8, q_proj 64 → 128 */
        {"qwen3moe", "router", "4", "3168"},
    };

    (void)state;
    assert_false(sp_adapter_row_macs(NULL) > 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sp_receipt_options receipt_options;
        sp_adapter_options options;
        sp_receipt *receipt;
        sp_adapter *adapter;
        char path[512];
        sp_error error;
        json_t *root;

        sp_receipt_options_default(&receipt_options, sizeof receipt_options);
        sp_adapter_options_default(&options, sizeof options);
        snprintf(path, sizeof path, SP_TEST_FIXTURES "/%s", cases[i].model);
        assert_ok(sp_geometry_open(path, &options.geometry, &error), &error);
        snprintf(path, sizeof path, SP_TEST_FIXTURES "/%s/adapters/%s", cases[i].model,
                 cases[i].adapter);
        assert_ok(sp_adapter_open(path, &options, &adapter, &error), &error);
        assert_ok(sp_receipt_create(adapter, &receipt_options, &receipt, &error), &error);
        root = parse(receipt);
        check(root, "rank", cases[i].rank);
        check(root, "row_macs", cases[i].macs);
        assert_non_null(strstr(sp_receipt_table(receipt), cases[i].macs));
        json_decref(root);
        sp_receipt_destroy(receipt);
        sp_adapter_release(adapter);
        sp_geometry_release(options.geometry);
    }
}

static void accepted(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter = varied_adapter();
    sp_receipt_options receipt_options;
    sp_receipt *receipt;
    json_t *root;

    (void)state;
    options.allow_partial = true;
    sp_receipt_options_default(&receipt_options, sizeof receipt_options);
    receipt_options.slot_bytes = 12345;
    receipt_options.expert_bytes = 678;
    receipt = receipt_of(adapter, &options, &receipt_options);
    root = parse(receipt);
    check_keys(root);
    check(root, "verdict", "\"accepted\"");
    check(root, "code", "null");
    check(root, "sites", "6");
    check(root, "slot_bytes", "12345");
    check(root, "expert_bytes", "678");
    check(root, "rank", "2");
    check(root, "row_macs", "186"); /* 40 + 28 + 24 + 24 + 22 + 48 */
    assert_int_equal(strlen(json_string_value(json_object_get(root, "digest"))), 64);
    check(root, "modules/self_attn.q_proj",
          "{\"sites\": 1, \"rank\": 2, \"scale\": 2, \"variants\": [{\"rank\": 2, \"scale\": 2, "
          "\"sites\": 1, \"layers\": [0]}]}");
    check(root, "modules/mlp.gate",
          "{\"sites\": 2, \"rank\": null, \"scale\": null, \"variants\": [{\"rank\": 2, \"scale\": "
          "2, \"sites\": 1, \"layers\": [0]}, {\"rank\": 2, \"scale\": 4.5, \"sites\": 1, "
          "\"layers\": [1]}]}");
    check(root, "modules/lm_head/variants",
          "[{\"rank\": 2, \"scale\": 2, \"sites\": 1, \"layers\": []}]");
    check(root, "engine_missing", "[]");
    check(root, "ignored",
          "[{\"tensor\": \"model.visual.blocks.0.qkv.lora_A.weight\", \"reason\": "
          "\"unknown-prefix\"}, {\"tensor\": \"model.visual.blocks.0.qkv.lora_B.weight\", "
          "\"reason\": \"unknown-prefix\"}]");
    check(root, "notes",
          "[\"the regular expression of target_modules fits none of the file's tensors\"]");
    assert_true(sp_receipt_is_servable(receipt, NULL));
    assert_non_null(strstr(sp_receipt_table(receipt), "verdict  accepted\ndigest"));
    json_decref(root);
    sp_receipt_destroy(receipt);
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* What the config says that deserves a word, and the word. */
static const struct {
    const char *members, *notes;
} noted[] = {
    {"", "[]"},
    {", \"fan_in_fan_out\": true",
     "[\"fan_in_fan_out is true: PEFT ignores it on linear layers, and the shapes fit as they "
     "are\"]"},
    {", \"new_method\": 1", "[\"the unknown field \\\"new_method\\\" is ignored, as was asked\"]"},
    {", \"init_lora_weights\": \"Gaussian\"", "[]"},
    {", \"init_lora_weights\": \"eva\"", "[]"},
    {", \"init_lora_weights\": \"orthogonal\"", "[]"},
    {", \"init_lora_weights\": \"milora\"",
     "[\"init_lora_weights is \\\"milora\\\", which is not known here: right only if it leaves the "
     "base as it is\"]"},
    {", \"init_lora_weights\": \"pissa\"", "[\"init_lora_weights is \\\"pissa\\\": right only if "
                                           "the file was converted back to the plain "
                                           "base\"]"},
    {", \"target_modules\": [\"q_proj\", \"v_proj\"]", "[]"},
    {", \"target_modules\": \"ALL-linear\"",
     "[\"the file has no tensor for layer 1, which target_modules covers\", \"the file has no "
     "self_attn.k_proj for layer 0, which target_modules covers\", \"the file has no "
     "self_attn.o_proj for layer 0, which target_modules covers\"]"},
    {", \"target_modules\": [\"q_proj\", \"c_attn\", \"v_proj\", \"fc1\"]",
     "[\"target_modules: 2 of 4 names fit no module of the base model that an adapter can change "
     "(first \\\"c_attn\\\")\"]"},
    {", \"target_modules\": []",
     "[\"target_modules is an empty list\", \"2 of 2 modules in the file are not in "
     "target_modules; they are applied\"]"},
    {", \"target_modules\": [\"q_proj\"]",
     "[\"1 of 2 modules in the file are not in target_modules; they are applied\"]"},
    {", \"target_modules\": \".*v_proj\"",
     "[\"1 of 2 modules in the file are not in target_modules; they are applied\"]"},
    {", \"target_modules\": [\"q_proj\", \"v_proj\", \"k_proj\"]",
     "[\"target_modules lists \\\"k_proj\\\", but the file has no tensor for it\"]"},
    /* a pattern that was meant for something, and changes nothing */
    {", \"alpha_pattern\": {\"q_proj\": 3, \"v_proj\": 5}", "[]"},
    {", \"rank_pattern\": {\"q_proj\": 2, \"up_proj\": 5}",
     "[\"rank_pattern: 1 of 2 keys decide no module of the file (first \\\"up_proj\\\")\"]"},
    {", \"alpha_pattern\": {\"base_model.model.model.layers.0.self_attn.q_proj\": 3}",
     "[\"alpha_pattern: 1 of 1 keys decide no module of the file (first "
     "\\\"base_model.model.model.layers.0.self_attn.q_proj\\\")\"]"},
    {", \"alpha_pattern\": {\"(q|v)_proj\": 3, \"self_attn.v_proj\": 5, \"^q_proj\": 6}",
     "[\"alpha_pattern: 2 of 3 keys decide no module of the file (first "
     "\\\"self_attn.v_proj\\\")\"]"},
};

static void notes(void **state)
{
    sp_adapter_options options = toy_options();
    sp_receipt_options receipt_options;
    make_adapter *adapter = toy_adapter();

    (void)state;
    options.allow_unknown_fields = true;
    options.allow_base_changing_init = true;
    options.allow_partial = true;
    sp_receipt_options_default(&receipt_options, sizeof receipt_options);
    for (size_t i = 0; i < sizeof noted / sizeof *noted; i++) {
        sp_receipt *receipt;
        json_t *root;

        make_adapter_config_with(adapter, noted[i].members);
        receipt = receipt_of(adapter, &options, &receipt_options);
        root = parse(receipt);
        check(root, "notes", noted[i].notes);
        json_decref(root);
        sp_receipt_destroy(receipt);
    }
    make_adapter_config(adapter, "{\"r\": 2, \"lora_alpha\": 4}");
    {
        sp_receipt *receipt = receipt_of(adapter, &options, &receipt_options);
        json_t *root = parse(receipt);

        check(root, "notes", "[\"use_rslora is absent: the scale is alpha / r\"]");
        json_decref(root);
        sp_receipt_destroy(receipt);
    }
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

static void engine_missing(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter = varied_adapter();
    sp_receipt_options receipt_options;
    sp_receipt *receipt;
    sp_error error;
    json_t *root;

    (void)state;
    options.allow_partial = true;
    sp_receipt_options_default(&receipt_options, sizeof receipt_options);
    receipt_options.engine_modules =
        1u << SP_MODULE_Q_PROJ | 1u << SP_MODULE_V_PROJ | 1u << SP_MODULE_ROUTER;
    receipt = receipt_of(adapter, &options, &receipt_options);
    root = parse(receipt);
    check(root, "verdict", "\"accepted\"");
    check(root, "engine_missing", "[\"mlp.experts.up_proj\", \"lm_head\"]");
    assert_non_null(strstr(sp_receipt_table(receipt), "not yet applied by this engine\n  "
                                                      "mlp.experts.up_proj\n  lm_head\n"));
    assert_non_null(strstr(sp_receipt_table(receipt),
                           "verdict  accepted\nengine   cannot apply all of it yet"));
    assert_false(sp_receipt_is_servable(receipt, &error));
    assert_int_equal(error.status, SP_ERR_UNSUPPORTED);
    assert_string_equal(error.code, "engine-unsupported");
    assert_non_null(strstr(error.text, "mlp.experts.up_proj and more"));
    json_decref(root);
    sp_receipt_destroy(receipt);
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* Adapters of one rare kind alone: applied, or named as what the engine lacks; never in silence. */
static void one_kind_alone(void **state)
{
    static const struct {
        const char *path;
        int k_in, n_out;
        const char *missing; /* by an engine of attention and dense FFN */
    } kinds[] = {
        {"model.layers.1.mlp.gate", TOY_HIDDEN, TOY_EXPERTS, "[\"mlp.gate\"]"},
        {"model.layers.0.mlp.experts.2.up_proj", TOY_HIDDEN, TOY_INTERMEDIATE,
         "[\"mlp.experts.up_proj\"]"},
        {"model.layers.1.linear_attn.in_proj_ba", TOY_HIDDEN, 4, "[\"linear_attn.in_proj_ba\"]"},
        {"model.layers.1.linear_attn.out_proj", 5, TOY_HIDDEN, "[\"linear_attn.out_proj\"]"},
        {"lm_head", TOY_HIDDEN, TOY_VOCAB, "[\"lm_head\"]"},
    };
    sp_adapter_options options = toy_options();
    sp_receipt_options all, few;

    (void)state;
    sp_receipt_options_default(&all, sizeof all);
    sp_receipt_options_default(&few, sizeof few);
    few.engine_modules = 1u << SP_MODULE_Q_PROJ | 1u << SP_MODULE_V_PROJ;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        make_adapter *adapter = make_adapter_create();
        sp_receipt *receipt;
        sp_error error;
        json_t *root;

        make_adapter_add_pair(adapter, kinds[i].path, 2, kinds[i].k_in, kinds[i].n_out, 1);
        for (int lacking = 0; lacking < 2; lacking++) {
            receipt = receipt_of(adapter, &options, lacking ? &few : &all);
            root = parse(receipt);
            check(root, "verdict", "\"accepted\"");
            check(root, "sites", "1");
            check(root, "engine_missing", lacking ? kinds[i].missing : "[]");
            assert_int_equal(sp_receipt_is_servable(receipt, &error), !lacking);
            json_decref(root);
            sp_receipt_destroy(receipt);
        }
        make_adapter_destroy(adapter);
    }
    sp_geometry_release(options.geometry);
}

/* Rows of tables: how many change, and that an engine without overlays cannot serve them. */
static void replaced_rows(void **state)
{
    sp_adapter_options options;
    sp_receipt_options receipt_options;
    sp_adapter *opened;
    sp_receipt *receipt;
    sp_error error;
    json_t *root;

    (void)state;
    sp_adapter_options_default(&options, sizeof options);
    assert_ok(sp_geometry_open(SP_TEST_FIXTURES "/qwen3-tied", &options.geometry, &error), &error);
    options.base_dir = SP_TEST_FIXTURES "/qwen3-tied";
    assert_ok(
        sp_adapter_open(SP_TEST_FIXTURES "/qwen3-tied/adapters/tokens", &options, &opened, &error),
        &error);
    sp_receipt_options_default(&receipt_options, sizeof receipt_options);
    receipt_options.engine_modules = 1u << SP_MODULE_Q_PROJ;
    assert_ok(sp_receipt_create(opened, &receipt_options, &receipt, &error), &error);
    root = parse(receipt);
    check(root, "modules/embed_tokens",
          "{\"sites\": 0, \"rank\": null, \"scale\": null, \"variants\": [], \"rows\": 5}");
    check(root, "modules/lm_head/rows", "5");
    check(root, "engine_missing", "[\"self_attn.v_proj\", \"embed_tokens\", \"lm_head\"]");
    check(root, "slot_bytes", "null");
    check(root, "expert_bytes", "null");
    assert_non_null(strstr(sp_receipt_table(receipt), "5 rows replaced"));
    assert_false(sp_receipt_is_servable(receipt, NULL));
    json_decref(root);
    sp_receipt_destroy(receipt);
    sp_adapter_release(opened);
    sp_geometry_release(options.geometry);
}

static void unchecked(void **state)
{
    sp_adapter_options options;
    sp_receipt_options receipt_options;
    make_adapter *adapter = toy_adapter();
    sp_receipt *receipt;
    json_t *root;

    (void)state;
    sp_adapter_options_default(&options, sizeof options);
    sp_receipt_options_default(&receipt_options, sizeof receipt_options);
    receipt_options.slot_bytes = 1;
    receipt = receipt_of(adapter, &options, &receipt_options);
    root = parse(receipt);
    check_keys(root);
    check(root, "verdict", "\"unchecked\"");
    check(root, "sites", "null");
    check(root, "slot_bytes", "null");
    assert_true(json_is_string(json_object_get(root, "digest")));
    assert_non_null(strstr(sp_receipt_table(receipt), "unchecked"));
    json_decref(root);
    sp_receipt_destroy(receipt);
    /* How a fused pair is read is not known without a version or a model: no digest either. */
    make_adapter_config(adapter, "{\"r\": 2, \"lora_alpha\": 4}");
    make_adapter_add_pair(adapter, "model.layers.0.mlp.experts", 6, 8, 8, 3);
    receipt = receipt_of(adapter, &options, &receipt_options);
    root = parse(receipt);
    check(root, "digest", "null");
    check(root, "notes",
          "[\"use_rslora is absent: the scale is alpha / r\", \"1 fused expert pairs (the first: "
          "rank 2, scale 2) are not listed: their number of experts is not known without "
          "a base model\"]");
    json_decref(root);
    sp_receipt_destroy(receipt);
    make_adapter_destroy(adapter);
}

/* Opens what is in the folder and holds the receipt's notes against JSON. */
static void check_notes(const char *folder, const sp_adapter_options *options, const char *notes)
{
    sp_receipt_options receipt_options;
    sp_adapter *opened;
    sp_receipt *receipt;
    sp_error error;
    json_t *root;

    sp_receipt_options_default(&receipt_options, sizeof receipt_options);
    assert_ok(sp_adapter_open(folder, options, &opened, &error), &error);
    assert_ok(sp_receipt_create(opened, &receipt_options, &receipt, &error), &error);
    root = parse(receipt);
    check(root, "notes", notes);
    json_decref(root);
    sp_receipt_destroy(receipt);
    sp_adapter_release(opened);
}

/* Files that trainers save beside the weights are named, those that are there and no others. */
static void beside(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter = toy_adapter();
    char *folder = make_adapter_folder(adapter);

    (void)state;
    sp_test_write_file(folder, "README.md", "{}", 2);
    check_notes(folder, &options, "[]");
    sp_test_write_file(folder, "generation_config.json", "{", 1);
    check_notes(folder, &options,
                "[\"generation_config.json beside the weights: a server takes the chat template "
                "and the ids that end a text from there, and nothing else\"]");
    sp_test_write_file(folder, "chat_template.jinja", "x", 1);
    sp_test_write_file(folder, "added_tokens.json", "{}", 2);
    check_notes(folder, &options,
                "[\"added_tokens.json beside the weights: not used; texts become tokens by the "
                "base's tokenizer for every adapter\",\"chat_template.jinja, "
                "generation_config.json beside the weights: a server takes the chat template and "
                "the ids that end a text from there, and nothing else\"]");
    sp_test_remove_tree(folder);
    sp_free(folder);
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* One file and an index of shards in one folder: the file is read, and the receipt says so. */
static void saved_twice(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter = toy_adapter();
    char *folder = make_adapter_folder(adapter);

    (void)state;
    check_notes(folder, &options, "[]");
    sp_test_write_file(folder, "adapter_model.safetensors.index.json", "{}", 2);
    check_notes(folder, &options,
                "[\"adapter_model.safetensors is read; the index of shards beside it is not\"]");
    sp_test_remove_tree(folder);
    sp_free(folder);
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* Names of tensors, fields and folders are a stranger's: exact in JSON, printable in the table. */
static void foreign_names(void **state)
{
    static const char stored[] = /* as JSON has it */
        "model.layers.0.self_attn.\\u001b[31m\\nverdict  refused.lora_A.weight";
    static const char name[] = "model.layers.0.self_attn.\x1b[31m\nverdict  refused.lora_A.weight";
    sp_adapter_options options = toy_options();
    sp_receipt_options receipt_options;
    make_adapter *adapter = toy_adapter();
    sp_receipt *receipt;
    sp_error refusal, error;
    json_t *root;

    (void)state;
    options.allow_partial = true;
    options.allow_unknown_fields = true;
    options.name = "a\nverdict  accepted";
    make_adapter_add_random(adapter, stored, 2, 8, 1);
    make_adapter_config_with(adapter, ", \"new\\u001b\\n\": 1");
    sp_receipt_options_default(&receipt_options, sizeof receipt_options);
    receipt = receipt_of(adapter, &options, &receipt_options);
    root = parse(receipt);
    assert_string_equal(json_string_value(json_object_get(
                            json_array_get(json_object_get(root, "ignored"), 0), "tensor")),
                        name);
    assert_non_null(
        strstr(json_string_value(json_array_get(json_object_get(root, "notes"), 0)), "new\x1b\n"));
    for (const char *c = sp_receipt_table(receipt); *c != '\0'; c++)
        assert_true(*c == '\n' || (unsigned char)*c >= ' ');
    assert_non_null(strstr(sp_receipt_table(receipt), "adapter  a?verdict  accepted\nverdict"));
    assert_non_null(strstr(sp_receipt_table(receipt),
                           "\n  model.layers.0.self_attn.?[31m?verdict  refused.lora_A.weight: "
                           "unsupported-module\n"));
    assert_non_null(strstr(sp_receipt_table(receipt), "\"new??\""));
    json_decref(root);
    sp_receipt_destroy(receipt);
    sp_refuse(&refusal, SP_REASON_EMPTY_ADAPTER, NULL, -1, "nothing");
    assert_ok(sp_receipt_create_refused(options.name, &refusal, &receipt, &error), &error);
    assert_string_equal(sp_receipt_table(receipt),
                        "adapter  a?verdict  accepted\nverdict  refused: empty-adapter\n"
                        "because  nothing\n");
    sp_receipt_destroy(receipt);
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

static void refused(void **state)
{
    sp_error refusal, error;
    sp_receipt *receipt;
    json_t *root;

    (void)state;
    sp_refuse(&refusal, SP_REASON_SHAPE_MISMATCH, "a \"tensor\"", 3, "it is %d by %d", 4, 5);
    assert_ok(sp_receipt_create_refused("name", &refusal, &receipt, &error), &error);
    root = parse(receipt);
    check_keys(root);
    check(root, "verdict", "\"refused\"");
    check(root, "code", "\"shape-mismatch\"");
    check(root, "message", "\"it is 4 by 5\"");
    check(root, "tensor", "\"a \\\"tensor\\\"\"");
    check(root, "digest", "null");
    check(root, "modules", "{}");
    assert_string_equal(sp_receipt_table(receipt),
                        "adapter  name\nverdict  refused: shape-mismatch\nabout    a \"tensor\"\n"
                        "because  it is 4 by 5\n");
    json_decref(root);
    sp_receipt_destroy(receipt);
    sp_receipt_destroy(NULL);
    assert_int_equal(sp_receipt_create_refused("name", NULL, &receipt, &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_receipt_create(NULL, NULL, &receipt, &error), SP_ERR_ARGUMENT);
}

/* An older host's options are shorter: what they lack is the default. */
static void options_grow(void **state)
{
    struct {
        sp_receipt_options options;
        uint64_t later;
    } longer;
    sp_adapter_options options = toy_options();
    make_adapter *adapter = toy_adapter();
    sp_adapter *opened = toy_opened(adapter, &options);
    sp_receipt *receipt = NULL;
    sp_error error;

    (void)state;
    memset(&longer, 0, sizeof longer);
    longer.options.struct_bytes = offsetof(sp_receipt_options, slot_bytes);
    longer.options.engine_modules = 1u << SP_MODULE_Q_PROJ;
    longer.options.slot_bytes = 77; /* beyond what the host has */
    assert_ok(sp_receipt_create(opened, &longer.options, &receipt, &error), &error);
    assert_non_null(strstr(sp_receipt_json(receipt), "\"slot_bytes\": null"));
    assert_false(sp_receipt_is_servable(receipt, &error));
    sp_receipt_destroy(receipt);
    longer.options.struct_bytes = sizeof longer;
    assert_ok(sp_receipt_create(opened, &longer.options, &receipt, &error), &error);
    assert_non_null(strstr(sp_receipt_json(receipt), "\"slot_bytes\": 77"));
    sp_receipt_destroy(receipt);
    receipt = NULL;
    longer.later = 1;
    assert_int_equal(sp_receipt_create(opened, &longer.options, &receipt, &error),
                     SP_ERR_UNSUPPORTED);
    assert_int_equal(error.position, sizeof(sp_receipt_options));
    longer.options.struct_bytes = 0;
    assert_int_equal(sp_receipt_create(opened, &longer.options, &receipt, &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_receipt_create(opened, NULL, &receipt, &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_receipt_create(opened, &longer.options, NULL, &error), SP_ERR_ARGUMENT);
    assert_null(receipt);
    sp_adapter_release(opened);
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* ---- reason codes ---------------------------------------------------------------------------- */

static void reason_codes(void **state)
{
    (void)state;
    assert_int_equal(sp_reason_count(), SP_REASON_COUNT);
    assert_string_equal(sp_reason_name(0), "config-missing");
    assert_string_equal(sp_reason_name(SP_REASON_SHAPE_MISMATCH), "shape-mismatch");
    assert_null(sp_reason_name(SP_REASON_COUNT));
    assert_null(sp_reason_name(-1));
    for (int32_t i = 0; i < sp_reason_count(); i++) {
        const char *name = sp_reason_name(i);

        assert_non_null(name);
        assert_true(strspn(name, "abcdefghijklmnopqrstuvwxyz-") == strlen(name));
        assert_true(sp_reason_status(i) < 0);
        for (int32_t other = 0; other < i; other++)
            assert_string_not_equal(name, sp_reason_name(other));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cost),           cmocka_unit_test(accepted),
        cmocka_unit_test(notes),          cmocka_unit_test(engine_missing),
        cmocka_unit_test(one_kind_alone), cmocka_unit_test(replaced_rows),
        cmocka_unit_test(unchecked),      cmocka_unit_test(refused),
        cmocka_unit_test(saved_twice),    cmocka_unit_test(beside),
        cmocka_unit_test(foreign_names),  cmocka_unit_test(options_grow),
        cmocka_unit_test(reason_codes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
