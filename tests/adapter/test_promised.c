/*
 * Places that target_modules covers and the file lacks, on a base of 4 layers whose attention is
 * alike (hidden 64, q_proj 128, k_proj and v_proj 64 wide), and on the toy base.
 */
#include "adapter/toy.h"

#include "base/alloc.h"

#include <stdio.h>
#include <string.h>

#define N_LAYERS 4
#define HIDDEN   64

#define WHOLE "the file has no tensor for layer"
#define PART  "the file has no self_attn"

/* Pairs of q_proj, k_proj, v_proj in the layers whose digits the texts have. */
static make_adapter *with_layers(const char *q, const char *k, const char *v)
{
    static const char *const modules[] = {"q_proj", "k_proj", "v_proj"};
    static const int widths[] = {128, 64, 64};
    const char *layers[] = {q, k, v};
    make_adapter *adapter = make_adapter_create();

    for (int m = 0; m < 3; m++) {
        for (const char *at = layers[m]; *at; at++) {
            char path[128];

            snprintf(path, sizeof path, "base_model.model.model.layers.%c.self_attn.%s", *at,
                     modules[m]);
            make_adapter_add_pair(adapter, path, 2, HIDDEN, widths[m], (uint64_t)m + 1);
        }
    }
    return adapter;
}

/* The receipt's text; the caller frees it. */
static char *receipt_of(const make_adapter *adapter, const sp_adapter_options *options)
{
    sp_adapter *opened = toy_opened(adapter, options);
    sp_receipt_options receipt_options;
    sp_receipt *receipt;
    char *text;

    sp_receipt_options_default(&receipt_options, sizeof receipt_options);
    assert_int_equal(sp_receipt_create(opened, &receipt_options, &receipt, NULL), SP_OK);
    text = sp_strdup(sp_receipt_table(receipt));
    sp_receipt_destroy(receipt);
    sp_adapter_release(opened);
    return text;
}

#define ALL "\"target_modules\": [\"q_proj\", \"k_proj\", \"v_proj\"]"

static const struct {
    const char *q, *k, *v; /* layers in the file */
    const char *members;
    const char *notes[3]; /* all that there are */
} cases[] = {
    {"0123", "", "", ", \"target_modules\": [\"q_proj\"]", {NULL}},
    {"013", "", "", ", \"target_modules\": [\"q_proj\"]", {WHOLE " 2, which"}},
    {"3", "", "", ", \"target_modules\": [\"q_proj\"]", {WHOLE "s 0-2, which"}},
    {"02", "", "", ", \"target_modules\": [\"self_attn.q_proj\"]", {WHOLE "s 1, 3, which"}},
    {"013", "", "", ", \"target_modules\": \".*\\\\.q_proj\"", {WHOLE " 2, which"}},
    {"013", "", "", ", \"target_modules\": \".*\\\\.[013]\\\\..*q_proj\"", {NULL}},
    {"013",
     "",
     "",
     ", \"target_modules\": [\"q_proj\"], \"layers_to_transform\": [0, 1, 3]",
     {NULL}},
    {"01",
     "",
     "",
     ", \"target_modules\": [\"q_proj\"], \"layers_to_transform\": [0, 1, 3]",
     {WHOLE " 3, which"}},
    {"013",
     "",
     "",
     ", \"target_modules\": [\"q_proj\"], \"exclude_modules\": "
     "\".*layers\\\\.2\\\\..*\"",
     {NULL}},
    {"013", "", "", "", {NULL}}, /* no target_modules: nothing was promised */
    {"0123", "0123", "0123", ", " ALL, {NULL}},
    {"0123", "012", "13", ", " ALL, {PART ".k_proj for layer 3, ", PART ".v_proj for layers 0, 2"}},
    {"01",
     "013",
     "1",
     ", " ALL,
     {WHOLE " 2, which", PART ".q_proj for layer 3", PART ".v_proj for layers 0, 3"}},
    /* of an expression's modules all are promised */
    {"0123",
     "0123",
     "",
     ", \"target_modules\": \".*(q|k|v)_proj\"",
     {PART ".v_proj for layers 0-3"}},
};

static size_t count(const char *text, const char *words)
{
    size_t n = 0;

    for (const char *at = strstr(text, words); at; at = strstr(at + 1, words))
        n++;
    return n;
}

static void lacking_places(void **state)
{
    sp_adapter_options options;
    sp_error error;

    (void)state;
    sp_adapter_options_default(&options, sizeof options);
    assert_ok(sp_geometry_open(SP_TEST_FIXTURES "/qwen3-tied", &options.geometry, &error), &error);
    assert_int_equal(sp_geometry_layers(options.geometry), N_LAYERS);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        make_adapter *adapter = with_layers(cases[i].q, cases[i].k, cases[i].v);
        size_t n = 0;
        char *text;

        make_adapter_config_with(adapter, cases[i].members);
        text = receipt_of(adapter, &options);
        for (; n < 3 && cases[i].notes[n]; n++) {
            if (!strstr(text, cases[i].notes[n]))
                fail_msg("case %zu: no \"%s\" in\n%s", i, cases[i].notes[n], text);
        }
        if (count(text, "the file has no") != n)
            fail_msg("case %zu: not %zu notes of places in\n%s", i, n, text);
        sp_free(text);
        make_adapter_destroy(adapter);
    }
    sp_geometry_release(options.geometry);
}

/* One pair for some expert is enough for its layer; fused pairs stand for what they cover. */
static void experts(void **state)
{
    static const char *const one_layer[] = {
        "base_model.model.model.layers.0.mlp.experts.2.down_proj",
        "base_model.model.model.layers.1.mlp.experts.3.down_proj"};
    sp_adapter_options options = toy_options();

    (void)state;
    for (int n = 1; n <= 2; n++) {
        make_adapter *adapter = toy_adapter();
        char *text;

        for (int i = 0; i < n; i++)
            make_adapter_add_pair(adapter, one_layer[i], 2, TOY_INTERMEDIATE, TOY_HIDDEN, 5);
        make_adapter_config_with(adapter, ", \"target_modules\": [\"q_proj\", \"v_proj\", "
                                          "\"down_proj\"]");
        text = receipt_of(adapter, &options);
        assert_int_equal(count(text, WHOLE " 1, which"), n == 1);
        assert_int_equal(count(text, "the file has no"), n == 1);
        sp_free(text);
        make_adapter_destroy(adapter);
    }
    sp_geometry_release(options.geometry);
}

/* Names of another model are said once; what the config leaves out of the base is none of them. */
static void names_that_the_base_lacks(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter = toy_adapter();
    char *text;

    (void)state;
    make_adapter_config_with(adapter, ", \"target_modules\": [\"q_proj\", \"query_key_value\", "
                                      "\"v_proj\", \"k_proj\"], \"exclude_modules\": "
                                      "[\"k_proj\"]");
    text = receipt_of(adapter, &options);
    assert_int_equal(count(text, "target_modules: 1 of 4 names fit no module of the base model "
                                 "that an adapter can change (first \"query_key_value\")"),
                     1);
    sp_free(text);
    make_adapter_config_with(adapter, ", \"target_modules\": [\"q_proj\", \"v_proj\", "
                                      "\"k_proj\"], \"exclude_modules\": [\"k_proj\"]");
    text = receipt_of(adapter, &options);
    assert_int_equal(count(text, "fit no module"), 0);
    sp_free(text);
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lacking_places),
        cmocka_unit_test(experts),
        cmocka_unit_test(names_that_the_base_lacks),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
