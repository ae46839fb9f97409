/*
 * test_module_place.c: adapters of models whose modules have names of their own: which site a
 * tensor's name finds, every reason why it finds none, tables under other names, and that a digest
 * is of what the files say.
 */
#include "adapter/toy.h"

#include <sidepath/pool.h>

#include "adapter/module_key.h"
#include "base/hash.h"
#include "support/archs.h"
#include "support/known_sites.h"

#include <stdio.h>
#include <string.h>

#define PEFT "base_model.model."

static sp_site row(const char *path, sp_site_kind kind, int32_t layer, int32_t expert)
{
    sp_site site;

    sp_site_default(&site, sizeof site);
    site.path = path;
    site.kind = kind;
    site.layer = layer;
    site.expert = expert;
    site.k_in = 6;
    site.n_out = 10;
    return site;
}

static sp_geometry *make(const sp_site *rows, size_t n)
{
    sp_geometry *geometry = NULL;
    sp_error error;

    assert_ok(sp_geometry_create(rows, n, &geometry, &error), &error);
    return geometry;
}

/* Two layers of latent attention; a dense FFN, then three experts of which one is described. */
static sp_geometry *deepseek(void)
{
    const sp_site rows[] = {
        row("model.embed_tokens", SP_SITE_EMBEDDING, -1, -1),
        row("lm_head", SP_SITE_HEAD, -1, -1),
        row("model.layers.0.self_attn.q_a_proj", SP_SITE_LINEAR, 0, -1),
        row("model.layers.0.self_attn.q_b_proj", SP_SITE_LINEAR, 0, -1),
        row("model.layers.0.self_attn.kv_a_proj_with_mqa", SP_SITE_LINEAR, 0, -1),
        row("model.layers.0.self_attn.o_proj", SP_SITE_LINEAR, 0, -1),
        row("model.layers.0.mlp.gate_proj", SP_SITE_LINEAR, 0, -1),
        row("model.layers.1.self_attn.q_a_proj", SP_SITE_LINEAR, 1, -1),
        row("model.layers.1.mlp.gate", SP_SITE_ROUTER, 1, -1),
        row("model.layers.1.mlp.experts.0.gate_proj", SP_SITE_EXPERT, 1, 0),
        row("model.layers.1.mlp.experts.1.gate_proj", SP_SITE_EXPERT, 1, 1),
        row("model.layers.1.mlp.shared_experts.down_proj", SP_SITE_LINEAR, 1, -1),
    };

    return make(rows, sizeof rows / sizeof *rows);
}

/* GPT-2's names, with another trunk and the embedding's own. */
static sp_geometry *gpt2(void)
{
    const sp_site rows[] = {
        row("transformer.wte", SP_SITE_EMBEDDING, -1, -1),
        row("lm_head", SP_SITE_HEAD, -1, -1),
        row("transformer.h.0.attn.c_attn", SP_SITE_LINEAR, 0, -1),
        row("transformer.h.0.mlp.c_fc", SP_SITE_LINEAR, 0, -1),
        row("transformer.h.2.mlp.c_fc", SP_SITE_LINEAR, 2, -1),
    };

    return make(rows, sizeof rows / sizeof *rows);
}

/* ---- names --------------------------------------------------------------------------------- */

typedef struct name_case {
    const char *name;
    const char *path; /* of the site; NULL: refused */
    const char *code, *words;
} name_case;

static void check_names(sp_geometry *geometry, const name_case *cases, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const name_case *c = &cases[i];
        sp_module_key key;
        sp_error error = {0};
        sp_status status = sp_module_key_read(geometry, c->name, &key, &error);

        if (c->path) {
            assert_ok(status, &error);
            assert_int_equal(key.site, sp_geometry_find(geometry, c->path));
            assert_true(key.site >= 0);
            continue;
        }
        if (status == SP_OK || strcmp(error.code, c->code) != 0)
            fail_msg("%s: %s (%s), not %s", c->name, error.code, error.text, c->code);
        assert_string_equal(error.subject, c->name);
        if (!strstr(error.text, c->words))
            fail_msg("%s: no \"%s\" in: %s", c->name, c->words, error.text);
    }
}

static void names_like_deepseek(void **state)
{
    static const name_case cases[] = {
        {PEFT "model.layers.0.self_attn.kv_a_proj_with_mqa.lora_A.weight",
         "model.layers.0.self_attn.kv_a_proj_with_mqa", NULL, NULL},
        {"layers.0.self_attn.q_b_proj.lora_B.default.weight", "model.layers.0.self_attn.q_b_proj",
         NULL, NULL},
        {PEFT "model.language_model.layers.1.mlp.shared_experts.down_proj.lora_B.weight",
         "model.layers.1.mlp.shared_experts.down_proj", NULL, NULL},
        {PEFT "model.layers.0.self_attn.o_proj.lora_A.weight", "model.layers.0.self_attn.o_proj",
         NULL, NULL},
        {PEFT "model.layers.1.mlp.experts.1.gate_proj.lora_A.weight",
         "model.layers.1.mlp.experts.1.gate_proj", NULL, NULL},
        {PEFT "model.embed_tokens.lora_embedding_A", "model.embed_tokens", NULL, NULL},
        {"lm_head.weight", "lm_head", NULL, NULL},
        /* A layer that is not there, one of another kind, an expert that is not there. */
        {PEFT "model.layers.2.self_attn.q_a_proj.lora_A.weight", NULL, "layer-out-of-range",
         "layer 2; the base model has 2 layers"},
        {PEFT "model.layers.1.self_attn.q_b_proj.lora_A.weight", NULL, "wrong-layer-kind",
         "layer 1 has no self_attn.q_b_proj; the layers that have it: 0"},
        {PEFT "model.layers.0.mlp.gate.lora_A.weight", NULL, "wrong-layer-kind", "have it: 1"},
        {PEFT "model.layers.0.mlp.experts.0.gate_proj.lora_A.weight", NULL, "wrong-layer-kind",
         "have it: 1"},
        {PEFT "model.layers.1.mlp.experts.2.gate_proj.lora_A.weight", NULL, "expert-out-of-range",
         "expert 2; the base model has 2 experts"},
        /* Names that it does not have. */
        {PEFT "model.layers.0.self_attn.q_proj.lora_A.weight", NULL, "unsupported-module",
         "allow-partial"},
        {PEFT "model.layers.0.q_a_proj.lora_A.weight", NULL, "unsupported-module", "q_a_proj"},
        {PEFT "model.norm.lora_A.weight", NULL, "unsupported-module", "model.norm"},
        {PEFT "model.layers.0.lora_A.weight", NULL, "unsupported-module", "layers.0"},
        /* Other trunks. */
        {PEFT "mtp.layers.0.self_attn.q_a_proj.lora_A.weight", NULL, "unknown-prefix",
         "\"mtp.\" is not a place"},
        {PEFT "visual.layers.7.self_attn.q_a_proj.lora_A.weight", NULL, "unknown-prefix", "visual"},
        {PEFT "visual.lm_head.lora_A.weight", NULL, "unknown-prefix", "visual"},
        {PEFT "visual.embed_tokens.weight", NULL, "unknown-prefix", "visual"},
        {PEFT "_orig_mod.model.layers.0.self_attn.q_a_proj.lora_A.weight", NULL, "unknown-prefix",
         "wrapped"},
        /* Numbers. */
        {PEFT "model.layers.00.self_attn.q_a_proj.lora_A.weight", NULL, "malformed-layer-index",
         "\"00\" is no number"},
        {PEFT "model.layers.-1.self_attn.q_a_proj.lora_A.weight", NULL, "malformed-layer-index",
         "\"-1\" is no number"},
        /* Endings. */
        {PEFT "model.layers.0.self_attn.q_a_proj.lora_C.weight", NULL, "unrecognized-tensor",
         "ending"},
        {PEFT "model.layers.0.self_attn.q_a_proj.weight", NULL, "unrecognized-tensor", "ending"},
        {PEFT "model.layers.0.self_attn.q_a_proj.lora_embedding_A", NULL, "unrecognized-tensor",
         "lora_embedding_A"},
        {PEFT "model.embed_tokens.lora_A.weight", NULL, "unrecognized-tensor", "lora_embedding_A"},
        {"model.layers.0.self_attn.q_a_proj.weight", NULL, "not-peft-key", "not a name"},
    };
    sp_geometry *geometry = deepseek();

    (void)state;
    check_names(geometry, cases, sizeof cases / sizeof *cases);
    sp_geometry_release(geometry);
}

static void names_like_gpt2(void **state)
{
    static const name_case cases[] = {
        {PEFT "transformer.h.2.mlp.c_fc.lora_A.weight", "transformer.h.2.mlp.c_fc", NULL, NULL},
        {PEFT "transformer.wte.lora_embedding_B", "transformer.wte", NULL, NULL},
        {PEFT "transformer.wte.token_adapter.trainable_tokens_delta", "transformer.wte", NULL,
         NULL},
        {PEFT "transformer.wte.modules_to_save.weight", "transformer.wte", NULL, NULL},
        /* Layer 1 has no site at all, layer 3 is beyond all of them. */
        {PEFT "transformer.h.1.mlp.c_fc.lora_A.weight", NULL, "layer-out-of-range", "layer 1"},
        {PEFT "transformer.h.3.mlp.c_fc.lora_A.weight", NULL, "layer-out-of-range", "3 layers"},
        {PEFT "transformer.h.2.attn.c_attn.lora_A.weight", NULL, "wrong-layer-kind", "have it: 0"},
        {PEFT "transformer.h.0.attn.c_proj.lora_A.weight", NULL, "unsupported-module", "c_proj"},
        {PEFT "transformer.wpe.lora_A.weight", NULL, "unsupported-module", "wpe"},
        {PEFT "h.0.mlp.c_fc.lora_A.weight", NULL, "unknown-prefix", "h.0.mlp"},
        {PEFT "model.transformer.h.0.mlp.c_fc.lora_A.weight", NULL, "unknown-prefix", "model."},
        {PEFT "decoder.wte.weight", NULL, "unknown-prefix", "decoder"},
        {PEFT "transformer.h.x.mlp.c_fc.lora_A.weight", NULL, "unsupported-module", "h.x"},
        {PEFT "transformer.h.0x.mlp.c_fc.lora_A.weight", NULL, "malformed-layer-index", "0x"},
    };
    sp_geometry *geometry = gpt2();

    (void)state;
    check_names(geometry, cases, sizeof cases / sizeof *cases);
    sp_geometry_release(geometry);
}

/* Cut anywhere, a name is something else or nothing; never a read past its end. */
static void cut_names(void **state)
{
    static const char whole[] = PEFT "model.layers.1.mlp.experts.1.gate_proj.lora_A.x.weight";
    sp_geometry *geometry = deepseek();
    sp_module_key key;

    (void)state;
    for (size_t n = 0; n <= strlen(whole); n++) {
        char name[128];

        memcpy(name, whole, n);
        name[n] = '\0';
        assert_int_equal(sp_module_key_read(geometry, name, &key, NULL) == SP_OK,
                         n == strlen(whole));
        memcpy(name, whole + n, strlen(whole) - n + 1);
        sp_module_key_read(geometry, name, &key, NULL);
    }
    sp_geometry_release(geometry);
}

/* ---- whole adapters ------------------------------------------------------------------------ */

static make_adapter *with_pairs(const char *const *paths, size_t n)
{
    make_adapter *adapter = make_adapter_create();

    for (size_t i = 0; i < n; i++)
        make_adapter_add_pair(adapter, paths[i], 2, 6, 10, i + 1);
    return adapter;
}

static sp_adapter_options options_of(sp_geometry *geometry)
{
    sp_adapter_options options;

    sp_adapter_options_default(&options, sizeof options);
    options.geometry = geometry;
    return options;
}

/* target_modules, exclude_modules, layers_to_transform and patterns mean the base's own paths. */
static void configs_of_other_names(void **state)
{
    static const char *const pairs[] = {PEFT "model.layers.0.self_attn.q_a_proj",
                                        PEFT "model.layers.0.self_attn.kv_a_proj_with_mqa"};
    static const struct {
        const char *members, *code, *word;
    } cases[] = {
        {", \"target_modules\": [\"q_a_proj\", \"kv_a_proj_with_mqa\"], "
         "\"layers_to_transform\": [0]",
         NULL, NULL},
        {", \"target_modules\": [\"q_a_proj\", \"q_b_proj\"]", "unmatched-target", "q_b_proj"},
        {", \"target_modules\": [\"q_b_proj\"], \"exclude_modules\": [\"q_b_proj\"]", NULL, NULL},
        {", \"exclude_modules\": [\"q_a_proj\"]", "layer-not-targeted", "exclude_modules"},
        {", \"layers_to_transform\": [1]", "layer-not-targeted", "layers_to_transform"},
        {", \"rank_pattern\": {\"kv_a_proj_with_mqa\": 3}", "rank-mismatch", "rank 3"},
        {", \"modules_to_save\": [\"lm_head\"]", "unmatched-target", "lm_head"},
        {", \"modules_to_save\": [\"wte\"]", "modules-to-save", "embed_tokens"},
    };
    sp_geometry *geometry = deepseek();
    sp_adapter_options options = options_of(geometry);

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        make_adapter *adapter = with_pairs(pairs, 2);

        make_adapter_config_with(adapter, cases[i].members);
        if (cases[i].code)
            toy_refused(adapter, &options, cases[i].code, NULL, cases[i].word, cases[i].members);
        else
            sp_adapter_release(toy_opened(adapter, &options));
        make_adapter_destroy(adapter);
    }
    sp_geometry_release(geometry);
}

static void wrong_shapes(void **state)
{
    sp_geometry *geometry = gpt2();
    sp_adapter_options options = options_of(geometry);
    make_adapter *adapter = make_adapter_create();

    (void)state;
    make_adapter_add_pair(adapter, PEFT "transformer.h.0.mlp.c_fc", 2, 6, 12, 1);
    toy_refused(adapter, &options, "shape-mismatch", PEFT "transformer.h.0.mlp.c_fc.lora_B.weight",
                "[10, 2]", "n_out 12");
    make_adapter_destroy(adapter);
    adapter = make_adapter_create();
    make_adapter_add_pair(adapter, PEFT "transformer.h.0.mlp.c_fc", 2, 7, 10, 1);
    toy_refused(adapter, &options, "shape-mismatch", PEFT "transformer.h.0.mlp.c_fc.lora_A.weight",
                "[2, 6]", "k_in 7");
    make_adapter_destroy(adapter);
    sp_geometry_release(geometry);
}

/* What is left out in part is on the receipt, under its name. */
static void parts(void **state)
{
    static const char *const pairs[] = {PEFT "transformer.h.0.mlp.c_fc",
                                        PEFT "transformer.h.0.attn.c_proj"};
    sp_geometry *geometry = gpt2();
    sp_adapter_options options = options_of(geometry);
    make_adapter *adapter = with_pairs(pairs, 2);
    sp_adapter *opened;

    (void)state;
    toy_refused(adapter, &options, "unsupported-module", NULL, "attn.c_proj", "a module too many");
    options.allow_partial = true;
    opened = toy_opened(adapter, &options);
    assert_int_equal(sp_adapter_n_sites(opened), 1);
    assert_string_equal(sp_adapter_site_at(opened, 0)->module, "mlp.c_fc");
    sp_adapter_release(opened);
    make_adapter_destroy(adapter);
    sp_geometry_release(geometry);
}

/* Experts one by one are sites; switched off, they are refused as ever. */
static void experts(void **state)
{
    static const char *const pairs[] = {PEFT "model.layers.1.mlp.experts.1.gate_proj",
                                        PEFT "model.layers.1.mlp.gate"};
    sp_geometry *geometry = deepseek();
    sp_adapter_options options = options_of(geometry);
    make_adapter *adapter = with_pairs(pairs, 2);
    sp_adapter *opened = toy_opened(adapter, &options);

    (void)state;
    assert_int_equal(sp_adapter_n_sites(opened), 2);
    assert_int_equal(sp_adapter_site_at(opened, 0)->kind, SP_SITE_ROUTER);
    assert_int_equal(sp_adapter_site_at(opened, 1)->kind, SP_SITE_EXPERT);
    assert_int_equal(sp_adapter_site_at(opened, 1)->expert, 1);
    assert_string_equal(sp_adapter_site_at(opened, 1)->module, "mlp.experts.gate_proj");
    assert_int_equal(sp_adapter_rank_max(opened), 0); /* outside experts and router */
    assert_true(sp_layout_expert_bytes(opened, SP_DTYPE_BF16) > 0);
    sp_adapter_release(opened);
    options.experts_off = true;
    toy_refused(adapter, &options, "experts-disabled", NULL, NULL, "experts off");
    make_adapter_destroy(adapter);
    sp_geometry_release(geometry);
}

/* Rows of an embedding that is called wte, against the served table. */
static void tables_of_other_names(void **state)
{
    static const uint16_t served[6 * 10];
    const sp_served_table embed = {sizeof embed, served, SP_DTYPE_BF16, 6, 10, false};
    sp_geometry *geometry = gpt2();
    sp_adapter_options options = options_of(geometry);
    make_adapter *adapter = make_adapter_create();
    const sp_adapter_table *table;
    sp_adapter *opened;

    (void)state;
    options.served_embed = &embed;
    make_adapter_config_with(adapter, ", \"trainable_token_indices\": {\"wte\": [4, 1]}");
    make_adapter_add_random(adapter, PEFT "transformer.wte.token_adapter.trainable_tokens_delta", 2,
                            10, 3);
    opened = toy_opened(adapter, &options);
    assert_int_equal(sp_adapter_n_tables(opened), 1);
    table = sp_adapter_table_at(opened, 0);
    assert_int_equal(table->struct_bytes, sizeof *table);
    assert_int_equal(table->kind, SP_SITE_EMBEDDING);
    assert_string_equal(table->module, "wte");
    assert_int_equal(table->n_ids, 2);
    assert_int_equal(table->token_ids[0], 4);
    assert_int_equal(sp_adapter_modules(opened),
                     (sp_module_set)1 << sp_geometry_site_module(geometry, 0));
    sp_adapter_release(opened);
    make_adapter_config_with(adapter, ", \"trainable_token_indices\": {\"embed_tokens\": [4, 1]}");
    toy_refused(adapter, &options, "bad-token-index", NULL, "embed_tokens", "another name");
    make_adapter_destroy(adapter);
    sp_geometry_release(geometry);
}

/* StarCoder2: half of its names are of the table, half are not. */
static void half_known_names(void **state)
{
    static const char *const pairs[] = {PEFT "model.layers.0.self_attn.q_proj",
                                        PEFT "model.layers.0.mlp.c_fc",
                                        PEFT "model.layers.1.self_attn.q_proj"};
    const sp_site rows[] = {
        row("model.layers.0.mlp.c_fc", SP_SITE_LINEAR, 0, -1),
        row("model.layers.0.self_attn.q_proj", SP_SITE_LINEAR, 0, -1),
        row("model.layers.1.self_attn.q_proj", SP_SITE_LINEAR, 1, -1),
    };
    static const name_case cases[] = {
        {PEFT "model.layers.1.mlp.c_fc.lora_A.weight", NULL, "wrong-layer-kind", "have it: 0"},
        {PEFT "model.layers.2.self_attn.q_proj.lora_A.weight", NULL, "layer-out-of-range", "2"},
        {PEFT "model.layers.0.self_attn.k_proj.lora_A.weight", NULL, "unsupported-module",
         "k_proj"},
        {PEFT "model.layers.0.mlp.experts.lora_A.weight", NULL, "unsupported-module", "experts"},
    };
    sp_geometry *geometry = make(rows, 3);
    sp_adapter_options options = options_of(geometry);
    make_adapter *adapter = with_pairs(pairs, 3);
    sp_adapter *opened = toy_opened(adapter, &options);

    (void)state;
    assert_int_equal(sp_adapter_n_sites(opened), 3);
    for (int32_t i = 0; i < 3; i++) {
        assert_int_equal(sp_adapter_site_at(opened, (size_t)i)->site, i);
        assert_string_equal(sp_adapter_site_at(opened, (size_t)i)->path, rows[i].path);
    }
    assert_int_equal(sp_adapter_modules(opened), 3);
    check_names(geometry, cases, sizeof cases / sizeof *cases);
    sp_adapter_release(opened);
    make_adapter_destroy(adapter);
    sp_geometry_release(geometry);
}

/* ---- digests ------------------------------------------------------------------------------- */

static sp_digest digest_of(const make_adapter *adapter, sp_geometry *geometry)
{
    sp_adapter_options options = options_of(geometry);
    sp_adapter *opened = toy_opened(adapter, &options);
    sp_digest digest = sp_adapter_digest(opened);

    sp_adapter_release(opened);
    return digest;
}

static bool same(const sp_digest *a, const sp_digest *b)
{
    return memcmp(a, b, sizeof *a) == 0;
}

/* The order and the names of the host's rows do not enter, nor does the trunk; paths do. */
static void digests_are_of_paths(void **state)
{
    static const char *const pairs[] = {PEFT "model.layers.0.self_attn.q_b_proj",
                                        PEFT "model.layers.0.self_attn.o_proj"};
    static const char *const nested[] = {PEFT "model.language_model.layers.0.self_attn.q_b_proj",
                                         PEFT "model.language_model.layers.0.self_attn.o_proj"};
    static const char *const other[] = {PEFT "model.layers.0.self_attn.q_c_proj",
                                        PEFT "model.layers.0.self_attn.o_proj"};
    sp_site turned[] = {row("model.layers.0.self_attn.o_proj", SP_SITE_LINEAR, 0, -1),
                        row("model.layers.0.self_attn.q_c_proj", SP_SITE_LINEAR, 0, -1),
                        row("model.layers.0.self_attn.q_b_proj", SP_SITE_LINEAR, 0, -1)};
    sp_geometry *geometry = deepseek(), *turned_geometry;
    make_adapter *adapter = with_pairs(pairs, 2);
    make_adapter *nested_adapter = with_pairs(nested, 2);
    make_adapter *other_adapter = with_pairs(other, 2);
    sp_digest digest = digest_of(adapter, geometry), again;

    (void)state;
    turned[2].module = "latent";
    turned[0].group = 3;
    turned_geometry = make(turned, 3);
    again = digest_of(adapter, turned_geometry);
    assert_true(same(&digest, &again));
    again = digest_of(nested_adapter, geometry);
    assert_true(same(&digest, &again));
    again = digest_of(other_adapter, turned_geometry);
    assert_false(same(&digest, &again));
    make_adapter_destroy(adapter);
    make_adapter_destroy(nested_adapter);
    make_adapter_destroy(other_adapter);
    sp_geometry_release(geometry);
    sp_geometry_release(turned_geometry);
}

/*
 * hashlib.sha256 over "sidepath adapter 1\0"; for each tensor by path and role 0x80000000, 1, the
 * length of its path, the path, role, 0, scale, dtype, rows, columns and its bytes' SHA-256; and
 * two empty lists: written down apart from the code, in Python.
 */
static void digests_are_the_hash_of_their_records(void **state)
{
    static const struct {
        const char *name, *digest;
    } cases[] = {
        {"falcon", "9a399a76e405ebbf3d9106fa9f5b612b58de752fb8d99c2bc39f4ff14c7cf7e8"},
        {"gpt_neox", "69d1947212da091fd4e1ad644566a3b2414c7bdfe730b996d13509b9c8180d29"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        arch a = arch_open(cases[i].name);
        sp_adapter *adapter = arch_adapter(&a, SP_DTYPE_BF16);
        sp_digest digest = sp_adapter_digest(adapter);
        char text[2 * SP_DIGEST_BYTES + 1];

        sp_hex(digest.bytes, sizeof digest.bytes, text);
        assert_string_equal(text, cases[i].digest);
        sp_adapter_release(adapter);
        arch_close(&a);
    }
}

/* A model of the table's names by hand, in any order, gives what its config.json gives. */
static void digests_of_known_names_do_not_move(void **state)
{
    static const char *const folder = SP_TEST_FIXTURES "/qwen3-tied/adapters/all-linear";
    sp_geometry *by_config, *by_hand;
    sp_site rows[256];
    sp_adapter *a, *b, *unchecked;
    sp_adapter_options options = options_of(NULL);
    sp_digest first, second;
    sp_error error;
    int32_t n;

    (void)state;
    assert_ok(sp_geometry_open(SP_TEST_FIXTURES "/qwen3-tied", &by_config, &error), &error);
    n = sp_geometry_n_sites(by_config);
    assert_true(n <= 256);
    for (int32_t i = 0; i < n; i++) { /* the last one first */
        rows[i].struct_bytes = sizeof rows[i];
        assert_ok(sp_geometry_site_at(by_config, n - 1 - i, &rows[i], &error), &error);
    }
    by_hand = make(rows, (size_t)n);
    assert_ok(sp_adapter_open(folder, &options, &unchecked, &error), &error);
    options.geometry = by_config;
    assert_ok(sp_adapter_open(folder, &options, &a, &error), &error);
    options.geometry = by_hand;
    assert_ok(sp_adapter_open(folder, &options, &b, &error), &error);
    first = sp_adapter_digest(a);
    second = sp_adapter_digest(b);
    assert_true(same(&first, &second));
    second = sp_adapter_digest(unchecked);
    assert_true(same(&first, &second));
    assert_int_equal(sp_adapter_n_sites(a), sp_adapter_n_sites(b));
    assert_int_equal(sp_adapter_modules(a), sp_adapter_modules(b));
    assert_int_equal(sp_adapter_site_at(unchecked, 0)->site, -1);
    assert_null(sp_adapter_geometry(unchecked));
    sp_adapter_release(a);
    sp_adapter_release(b);
    sp_adapter_release(unchecked);
    sp_geometry_release(by_config);
    sp_geometry_release(by_hand);
}

/* ---- PEFT's own ---------------------------------------------------------------------------- */

/* Llama, Mistral and Gemma have the table's names; without a geometry those of others have none. */
static void without_a_geometry(void **state)
{
    sp_adapter_options options = options_of(NULL);

    (void)state;
    for (int i = 0; i < N_ARCHS; i++) {
        arch a = arch_open(arch_names[i]);
        sp_adapter *opened = NULL;
        sp_error error;
        sp_status status = sp_adapter_open(a.folder, &options, &opened, &error);

        if (strcmp(a.name, "gemma3_text") == 0) {
            assert_ok(status, &error);
            assert_int_equal(sp_adapter_n_sites(opened), a.n_sites);
            assert_string_equal(sp_adapter_site_at(opened, 0)->path,
                                "model.layers.0.self_attn.q_proj");
        } else {
            assert_int_not_equal(status, SP_OK);
            assert_true(strcmp(error.code, "unsupported-module") == 0 ||
                        strcmp(error.code, "unknown-prefix") == 0);
        }
        sp_adapter_release(opened);
        arch_close(&a);
    }
}

/* The adapter of one model against another's rows: never in silence. */
static void the_wrong_model(void **state)
{
    (void)state;
    for (int i = 0; i < N_ARCHS; i++) {
        arch own = arch_open(arch_names[i]);

        for (int k = 0; k < N_ARCHS; k++) {
            arch other = arch_open(arch_names[k]);
            sp_adapter_options options = options_of(other.geometry);
            sp_adapter *opened = NULL;
            sp_error error = {0};

            if (i != k) {
                assert_int_not_equal(sp_adapter_open(own.folder, &options, &opened, &error), SP_OK);
                assert_true(error.code[0] != '\0');
                assert_null(opened);
            }
            arch_close(&other);
        }
        arch_close(&own);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_like_deepseek),
        cmocka_unit_test(names_like_gpt2),
        cmocka_unit_test(cut_names),
        cmocka_unit_test(configs_of_other_names),
        cmocka_unit_test(wrong_shapes),
        cmocka_unit_test(parts),
        cmocka_unit_test(experts),
        cmocka_unit_test(tables_of_other_names),
        cmocka_unit_test(half_known_names),
        cmocka_unit_test(digests_are_of_paths),
        cmocka_unit_test(digests_are_the_hash_of_their_records),
        cmocka_unit_test(digests_of_known_names_do_not_move),
        cmocka_unit_test(without_a_geometry),
        cmocka_unit_test(the_wrong_model),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
