/*
 * test_geometry_rows.c: geometries from the host's own rows: what is found in them, by path and by
 * place, how modules are named and numbered, and every row that is refused.
 */
#include "support/test.h"

#include "base/alloc.h"

#include <sidepath/adapter.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static sp_site make_row(const char *path, sp_site_kind kind, int32_t layer, int32_t expert)
{
    sp_site site;

    sp_site_default(&site, sizeof site);
    site.path = path;
    site.kind = kind;
    site.layer = layer;
    site.expert = expert;
    site.k_in = 6;
    site.n_out = 9;
    return site;
}

static sp_geometry *create(const sp_site *sites, size_t n)
{
    sp_geometry *geometry = NULL;
    sp_error error;

    assert_ok(sp_geometry_create(sites, n, &geometry, &error), &error);
    return geometry;
}

static void defaults(void **state)
{
    sp_site site;

    (void)state;
    memset(&site, 0x5a, sizeof site);
    sp_site_default(&site, sizeof site);
    assert_int_equal(site.struct_bytes, sizeof site);
    assert_null(site.path);
    assert_null(site.module);
    assert_int_equal(site.kind, SP_SITE_LINEAR);
    assert_int_equal(site.layer, -1);
    assert_int_equal(site.expert, -1);
    assert_int_equal(site.group, -1);
    assert_int_equal(site.k_in, 0);
}

/* Rows in an order of the host's, of a model that no family here has. */
static void rows_keep_their_order_and_names(void **state)
{
    sp_site rows[] = {
        make_row("transformer.h.1.mlp.c_proj", SP_SITE_LINEAR, 1, -1),
        make_row("transformer.h.0.attn.c_proj", SP_SITE_LINEAR, 0, -1),
        make_row("transformer.h.0.mlp.c_proj", SP_SITE_LINEAR, 0, -1),
        make_row("transformer.wte", SP_SITE_EMBEDDING, -1, -1),
        make_row("transformer.h.1.moe.router", SP_SITE_ROUTER, 1, -1),
        make_row("transformer.h.1.moe.experts.7.w1", SP_SITE_EXPERT, 1, 7),
    };
    static const char *const names[] = {"mlp.c_proj", "attn.c_proj", "wte", "moe.router",
                                        "moe.experts.w1"};
    sp_geometry *geometry;
    sp_site site = {.struct_bytes = sizeof site};
    sp_error error;

    (void)state;
    rows[1].group = 4;
    rows[1].k_in = 12;
    geometry = create(rows, 6);
    assert_null(sp_geometry_shape(geometry));
    assert_int_equal(sp_geometry_n_sites(geometry), 6);
    assert_int_equal(sp_geometry_layers(geometry), 2);
    assert_int_equal(sp_geometry_experts(geometry), 8);
    assert_int_equal(sp_geometry_n_modules(geometry), 5);
    for (int32_t i = 0; i < 5; i++)
        assert_string_equal(sp_geometry_module_name(geometry, i), names[i]);
    assert_null(sp_geometry_module_name(geometry, 5));
    assert_ok(sp_geometry_site_at(geometry, 1, &site, &error), &error);
    assert_string_equal(site.path, rows[1].path);
    assert_ptr_not_equal(site.path, rows[1].path);
    assert_string_equal(site.module, "attn.c_proj");
    assert_int_equal(site.layer, 0);
    assert_int_equal(site.group, 4);
    assert_int_equal(site.k_in, 12);
    assert_int_equal(site.n_out, 9);
    for (int32_t i = 0; i < 6; i++)
        assert_int_equal(sp_geometry_find(geometry, rows[i].path), i);
    assert_int_equal(sp_geometry_find_module(geometry, 0, "mlp.c_proj", -1), 2);
    assert_int_equal(sp_geometry_find_module(geometry, 1, "mlp.c_proj", -1), 0);
    assert_int_equal(sp_geometry_find_module(geometry, -1, "wte", -1), 3);
    assert_int_equal(sp_geometry_find_module(geometry, 1, "moe.experts.w1", 7), 5);
    assert_int_equal(sp_geometry_find_module(geometry, 1, "moe.experts.w1", 6), -1);
    assert_int_equal(sp_geometry_find_module(geometry, 1, "attn.c_proj", -1), -1);
    assert_int_equal(sp_geometry_find_module(geometry, 0, "c_proj", -1), -1);
    assert_int_equal(sp_geometry_find_module(geometry, 0, NULL, -1), -1);
    assert_int_equal(sp_geometry_find_kind(geometry, SP_SITE_EMBEDDING), 3);
    assert_int_equal(sp_geometry_find_kind(geometry, SP_SITE_HEAD), -1);
    assert_int_equal(sp_geometry_find_kind(geometry, SP_SITE_LINEAR), 0);
    assert_int_equal(sp_geometry_find_kind(geometry, SP_SITE_EXPERT), 5);
    assert_int_equal(sp_geometry_site_module(geometry, 2), 0);
    assert_int_equal(sp_geometry_site_module(geometry, 6), -1);
    assert_int_equal(sp_geometry_modules(geometry), 0x1f);
    assert_int_equal(sp_geometry_kind_modules(geometry, SP_SITE_LINEAR), 0x3);
    assert_int_equal(sp_geometry_kind_modules(geometry, SP_SITE_ROUTER), 0x8);
    assert_int_equal(sp_geometry_layer_kind(geometry, 0), SP_LAYER_FULL_ATTENTION);
    assert_int_equal(sp_geometry_find(geometry, ""), -1);
    assert_int_equal(sp_geometry_find(geometry, NULL), -1);
    assert_int_equal(sp_geometry_find(geometry, "model.transformer.wte"), -1);
    assert_int_equal(sp_geometry_site_at(geometry, 6, &site, &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_geometry_site_at(geometry, -1, &site, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_geometry_site_at(geometry, 0, NULL, NULL), SP_ERR_ARGUMENT);
    site.struct_bytes = 0;
    assert_int_equal(sp_geometry_site_at(geometry, 0, &site, NULL), SP_ERR_ARGUMENT);
    assert_ptr_equal(sp_geometry_retain(geometry), geometry);
    sp_geometry_release(geometry);
    sp_geometry_release(geometry);
    sp_geometry_release(NULL);
}

/* The trunk before layers, embedding and head says nothing. */
static void trunks_are_left_aside(void **state)
{
    const sp_site rows[] = {
        make_row("model.layers.0.self_attn.qkv_proj", SP_SITE_LINEAR, 0, -1),
        make_row("model.embed_tokens", SP_SITE_EMBEDDING, -1, -1),
        make_row("lm_head", SP_SITE_HEAD, -1, -1),
    };
    static const char *const same[] = {"layers.0.self_attn.qkv_proj",
                                       "model.language_model.layers.0.self_attn.qkv_proj",
                                       "language_model.model.layers.0.self_attn.qkv_proj"};
    sp_geometry *geometry = create(rows, 3);

    (void)state;
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        assert_int_equal(sp_geometry_find(geometry, same[i]), 0);
    assert_int_equal(sp_geometry_find(geometry, "embed_tokens"), 1);
    assert_int_equal(sp_geometry_find(geometry, "language_model.lm_head"), 2);
    assert_int_equal(sp_geometry_find(geometry, "visual.layers.0.self_attn.qkv_proj"), -1);
    assert_int_equal(sp_geometry_find(geometry, "model.lm_head"), -1);
    sp_geometry_release(geometry);
}

/* Names that are all of the families' have the families' numbers, whatever the order. */
static void known_names_have_their_numbers(void **state)
{
    const sp_site rows[] = {
        make_row("lm_head", SP_SITE_HEAD, -1, -1),
        make_row("model.layers.3.mlp.down_proj", SP_SITE_LINEAR, 3, -1),
        make_row("model.layers.0.self_attn.k_proj", SP_SITE_LINEAR, 0, -1),
    };
    sp_geometry *geometry = create(rows, 3);
    sp_module_set set;
    sp_error error;

    (void)state;
    assert_int_equal(sp_geometry_n_modules(geometry), 24);
    assert_int_equal(sp_geometry_modules(geometry), 1 << 23 | 1 << 13 | 1 << 1);
    assert_int_equal(sp_geometry_site_module(geometry, 1), 13);
    assert_int_equal(sp_geometry_find_module(geometry, 3, "mlp.down_proj", -1), 1);
    assert_int_equal(sp_geometry_layers(geometry), 4);
    assert_ok(sp_module_set_parse(geometry, "q_proj", &set, &error), &error);
    assert_int_equal(set & sp_geometry_modules(geometry), 0);
    sp_geometry_release(geometry);
}

static void sets_of_other_names(void **state)
{
    const sp_site rows[] = {
        make_row("transformer.h.0.attn.c_proj", SP_SITE_LINEAR, 0, -1),
        make_row("transformer.h.0.mlp.c_proj", SP_SITE_LINEAR, 0, -1),
        make_row("transformer.wte", SP_SITE_EMBEDDING, -1, -1),
        make_row("transformer.h.0.experts.0.c_proj", SP_SITE_EXPERT, 0, 0),
    };
    static const struct {
        const char *text;
        sp_module_set set;
    } cases[] = {
        {"attn.c_proj", 1}, {"c_proj", 3},          {"experts.c_proj", 8},
        {"all-linear", 3},  {"wte, all-linear", 7}, {"mlp.c_proj,attn.c_proj", 3},
    };
    sp_geometry *geometry = create(rows, 4);
    sp_module_set set;
    sp_error error;

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_ok(sp_module_set_parse(geometry, cases[i].text, &set, &error), &error);
        assert_int_equal(set, cases[i].set);
    }
    assert_int_equal(sp_module_set_parse(geometry, "wte,q_proj", &set, &error), SP_ERR_INPUT);
    assert_int_equal(error.position, 4);
    assert_non_null(strstr(error.text, "attn.c_proj"));
    sp_geometry_release(geometry);
}

/* ---- refusals ------------------------------------------------------------------------------ */

/* `second` after a good first row: refused with its number, and the words. */
static void refuse(const sp_site *first, const sp_site *second, const char *words)
{
    const sp_site rows[] = {*first, *second};
    sp_geometry *geometry = NULL;
    sp_error error;

    assert_int_equal(sp_geometry_create(rows, 2, &geometry, &error), SP_ERR_ARGUMENT);
    assert_int_equal(error.position, 1);
    if (!strstr(error.text, words))
        fail_msg("no \"%s\" in: %s", words, error.text);
    assert_null(geometry);
}

static void wrong_rows_are_refused(void **state)
{
    const sp_site good = make_row("model.layers.1.mlp.fc", SP_SITE_LINEAR, 1, -1);
    const struct {
        sp_site row;
        const char *words;
    } cases[] = {
        {make_row(NULL, SP_SITE_LINEAR, 0, -1), "no path"},
        {make_row("", SP_SITE_LINEAR, 0, -1), "no path"},
        {make_row(".h.0.fc", SP_SITE_LINEAR, 0, -1), "empty word"},
        {make_row("h.0..fc", SP_SITE_LINEAR, 0, -1), "empty word"},
        {make_row("h.0.fc.", SP_SITE_LINEAR, 0, -1), "empty word"},
        {make_row("h.0.f c", SP_SITE_LINEAR, 0, -1), "ASCII"},
        {make_row("h.0.f\xc3\xa9", SP_SITE_LINEAR, 0, -1), "ASCII"},
        {make_row("base_model.model.h.0.fc", SP_SITE_LINEAR, 0, -1), "base model's own"},
        {make_row("h.0.fc", SP_SITE_LINEAR, 1, -1), "layer's number"},
        {make_row("h.00.fc", SP_SITE_LINEAR, 0, -1), "layer's number"},
        {make_row("h.fc.0", SP_SITE_LINEAR, 0, -1), "layer's number"},
        {make_row("h.0.fc", SP_SITE_LINEAR, -2, -1), "-1 to 65535"},
        {make_row("h.65536.fc", SP_SITE_LINEAR, 65536, -1), "-1 to 65535"},
        {make_row("h.0.fc", SP_SITE_LINEAR, 0, 0), "no expert's"},
        {make_row("h.0.experts.1.fc", SP_SITE_EXPERT, 0, 2), "expert's number"},
        {make_row("h.0.experts.fc", SP_SITE_EXPERT, 0, -1), "without a layer or expert"},
        {make_row("experts.1.fc", SP_SITE_EXPERT, -1, 1), "without a layer or expert"},
        {make_row("h.0.wte", SP_SITE_EMBEDDING, 0, -1), "its layer is -1"},
        {make_row("h.0.head", SP_SITE_HEAD, 0, -1), "its layer is -1"},
        {make_row("h.0.fc", (sp_site_kind)5, 0, -1), "kind that does not exist"},
        {make_row("h.0.fc", (sp_site_kind)-1, 0, -1), "kind that does not exist"},
        /* Against the first row. */
        {make_row("model.layers.1.mlp.fc", SP_SITE_LINEAR, 1, -1), "same place"},
        {make_row("layers.1.mlp.fc", SP_SITE_LINEAR, 1, -1), "same place"},
        {make_row("visual.layers.1.mlp.fc", SP_SITE_LINEAR, 1, -1), "sp_site.module"},
        {make_row("model.layers.2.mlp.fc", SP_SITE_ROUTER, 2, -1), "of kind 0 before"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        refuse(&good, &cases[i].row, cases[i].words);
}

static void wrong_numbers_are_refused(void **state)
{
    sp_site good = make_row("h.0.q", SP_SITE_LINEAR, 0, -1), bad;

    (void)state;
    good.group = 0;
    bad = make_row("h.0.k", SP_SITE_LINEAR, 0, -1);
    bad.k_in = 0;
    refuse(&good, &bad, "k_in below 1");
    bad.k_in = 6;
    bad.n_out = -1;
    refuse(&good, &bad, "n_out below 1");
    bad.n_out = 9;
    bad.group = -2;
    refuse(&good, &bad, "group below -1");
    bad.group = 0;
    bad.k_in = 7;
    refuse(&good, &bad, "7 inputs, the rest of group 0 6");
    bad.k_in = 6;
    bad.module = "";
    refuse(&good, &bad, "module that is empty");
    good.struct_bytes = bad.struct_bytes;
    bad.struct_bytes = 4;
    assert_int_equal(sp_geometry_create(&bad, 1, &(sp_geometry *){NULL}, NULL), SP_ERR_ARGUMENT);
}

static void one_embedding_and_one_head(void **state)
{
    const sp_site wte = make_row("wte", SP_SITE_EMBEDDING, -1, -1);
    const sp_site wpe = make_row("wpe", SP_SITE_EMBEDDING, -1, -1);
    const sp_site head = make_row("head.a", SP_SITE_HEAD, -1, -1);
    const sp_site other = make_row("head.b", SP_SITE_HEAD, -1, -1);

    (void)state;
    refuse(&wte, &wpe, "second embedding");
    refuse(&head, &other, "second head");
}

static void a_tied_head_has_its_embedding(void **state)
{
    sp_site rows[] = {make_row("h.0.q", SP_SITE_LINEAR, 0, -1),
                      make_row("wte", SP_SITE_EMBEDDING, -1, -1),
                      make_row("out", SP_SITE_HEAD, -1, -1)};
    sp_site site = {.struct_bytes = sizeof site};
    sp_geometry *geometry = NULL;
    sp_error error;

    (void)state;
    rows[2].k_in = rows[1].n_out; /* 9 */
    rows[2].n_out = rows[1].k_in; /* 6 */
    geometry = create(rows, 3);
    assert_ok(sp_geometry_site_at(geometry, 2, &site, &error), &error);
    assert_false(site.tied);
    sp_geometry_release(geometry);
    rows[2].tied = true;
    geometry = create(rows, 3);
    assert_ok(sp_geometry_site_at(geometry, 2, &site, &error), &error);
    assert_true(site.tied);
    assert_ok(sp_geometry_site_at(geometry, 1, &site, &error), &error);
    assert_false(site.tied);
    sp_geometry_release(geometry);
    refuse(&rows[0], &rows[2], "no embedding with 6 tokens of 9");
    rows[2].n_out++;
    refuse(&rows[1], &rows[2], "no embedding with 7 tokens of 9");
    rows[0].tied = true;
    refuse(&rows[1], &rows[0], "tied, and no head");
}

static void long_texts(void **state)
{
    char path[SP_SITE_PATH_BYTES_MAX + 1];
    sp_site row = make_row(path, SP_SITE_LINEAR, 0, -1);
    sp_geometry *geometry = NULL;
    sp_error error;

    (void)state;
    memset(path, 'a', sizeof path);
    memcpy(path, "h.0.", 4);
    path[SP_SITE_PATH_BYTES_MAX] = '\0';
    assert_int_equal(sp_geometry_create(&row, 1, &geometry, &error), SP_ERR_ARGUMENT);
    assert_non_null(strstr(error.text, "511"));
    path[SP_SITE_PATH_BYTES_MAX - 1] = '\0';
    geometry = create(&row, 1);
    assert_int_equal(sp_geometry_find(geometry, path), 0);
    sp_geometry_release(geometry);
    row.path = "h.0.fc";
    row.module = path;
    path[SP_SITE_PATH_BYTES_MAX - 1] = 'a';
    assert_int_equal(sp_geometry_create(&row, 1, &geometry, &error), SP_ERR_ARGUMENT);
}

static void sixty_four_modules_at_most(void **state)
{
    enum { N = 65 };
    char paths[N][32];
    sp_site rows[N];
    sp_geometry *geometry = NULL;
    sp_error error;

    (void)state;
    for (int i = 0; i < N; i++) {
        snprintf(paths[i], sizeof paths[i], "h.0.module_%d", i);
        rows[i] = make_row(paths[i], SP_SITE_LINEAR, 0, -1);
    }
    assert_int_equal(sp_geometry_create(rows, N, &geometry, &error), SP_ERR_ARGUMENT);
    assert_int_equal(error.position, 64);
    assert_non_null(strstr(error.text, "65th"));
    geometry = create(rows, N - 1);
    assert_true(sp_geometry_modules(geometry) == ~(sp_module_set)0);
    sp_geometry_release(geometry);
    /* One name for all of them: they are layers of their own then. */
    for (int i = 0; i < N; i++) {
        snprintf(paths[i], sizeof paths[i], "h.%d.odd_%d", i, i);
        rows[i] = make_row(paths[i], SP_SITE_LINEAR, i, -1);
        rows[i].module = "even";
    }
    geometry = create(rows, N);
    assert_int_equal(sp_geometry_n_modules(geometry), 1);
    assert_int_equal(sp_geometry_find_module(geometry, 64, "even", -1), 64);
    sp_geometry_release(geometry);
}

static void wrong_calls(void **state)
{
    const sp_site row = make_row("h.0.fc", SP_SITE_LINEAR, 0, -1);
    sp_geometry *geometry = NULL;
    sp_module_set set;
    sp_error error;

    (void)state;
    assert_int_equal(sp_geometry_create(NULL, 1, &geometry, &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_geometry_create(&row, 0, &geometry, &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_geometry_create(&row, 1, NULL, &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_geometry_create(&row, SP_SITES_MAX + 1, &geometry, &error),
                     SP_ERR_TOO_LARGE);
    assert_int_equal(sp_module_set_parse(NULL, NULL, &set, &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_module_set_parse(NULL, "q_proj", NULL, &error), SP_ERR_ARGUMENT);
    assert_null(geometry);
}

/* ---- size and memory ----------------------------------------------------------------------- */

/* 48 layers of 256 experts: every one of 36,864 rows is found, and none takes 200 bytes. */
static void many_experts(void **state)
{
    enum { LAYERS = 48, EXPERTS = 256, N = LAYERS * EXPERTS * 3 };
    static const char *const leaves[] = {"w1", "w2", "w3"};
    char(*paths)[48] = malloc(N * sizeof *paths);
    sp_site *rows = malloc(N * sizeof *rows);
    size_t before = sp_alloc_bytes();
    sp_geometry *geometry;

    (void)state;
    assert_true(paths && rows);
    for (int i = 0; i < N; i++) {
        int layer = i / (EXPERTS * 3), expert = i / 3 % EXPERTS;

        snprintf(paths[i], sizeof paths[i], "model.layers.%d.moe.experts.%d.%s", layer, expert,
                 leaves[i % 3]);
        rows[i] = make_row(paths[i], SP_SITE_EXPERT, layer, expert);
    }
    geometry = create(rows, N);
    assert_true(sp_alloc_bytes() - before < (size_t)N * 200);
    assert_int_equal(sp_geometry_n_modules(geometry), 3);
    assert_int_equal(sp_geometry_experts(geometry), EXPERTS);
    for (int i = 0; i < N; i += 7) {
        assert_int_equal(sp_geometry_find(geometry, paths[i]), i);
        assert_int_equal(sp_geometry_find_module(geometry, i / (EXPERTS * 3),
                                                 sp_geometry_module_name(geometry, i % 3),
                                                 i / 3 % EXPERTS),
                         i);
    }
    sp_geometry_release(geometry);
    assert_int_equal(sp_alloc_bytes(), before);
    free(rows);
    free(paths);
}

static void every_allocation_can_fail(void **state)
{
    const sp_site rows[] = {
        make_row("transformer.h.0.attn.c_proj", SP_SITE_LINEAR, 0, -1),
        make_row("transformer.h.0.mlp.c_proj", SP_SITE_LINEAR, 0, -1),
    };

    (void)state;
    for (int64_t n = 0;; n++) {
        size_t blocks = sp_alloc_blocks();
        sp_geometry *geometry = NULL;
        sp_status status;

        sp_alloc_fail_after(n);
        status = sp_geometry_create(rows, 2, &geometry, NULL);
        if (!sp_alloc_failed()) {
            sp_alloc_fail_after(-1);
            assert_int_equal(status, SP_OK);
            sp_geometry_release(geometry);
            assert_int_equal(sp_alloc_blocks(), blocks);
            assert_true(n > 5);
            return;
        }
        sp_alloc_fail_after(-1);
        assert_int_equal(status, SP_ERR_MEMORY);
        assert_null(geometry);
        assert_int_equal(sp_alloc_blocks(), blocks);
    }
}

/* An older host's rows are shorter, a newer one's longer by fields that must say nothing. */
static void rows_grow(void **state)
{
    struct {
        sp_site site;
        uint64_t later;
    } longer[2] = {{make_row("h.0.a", SP_SITE_LINEAR, 0, -1), 0},
                   {make_row("h.0.b", SP_SITE_LINEAR, 0, -1), 0}};
    sp_geometry *geometry = NULL;
    sp_error error;

    (void)state;
    longer[0].site.struct_bytes = longer[1].site.struct_bytes = sizeof longer[0];
    assert_ok(sp_geometry_create(&longer[0].site, 2, &geometry, &error), &error);
    assert_int_equal(sp_geometry_find(geometry, "h.0.b"), 1);
    sp_geometry_release(geometry);
    longer[1].later = 1;
    assert_int_equal(sp_geometry_create(&longer[0].site, 2, &geometry, &error), SP_ERR_UNSUPPORTED);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults),
        cmocka_unit_test(rows_keep_their_order_and_names),
        cmocka_unit_test(trunks_are_left_aside),
        cmocka_unit_test(known_names_have_their_numbers),
        cmocka_unit_test(sets_of_other_names),
        cmocka_unit_test(wrong_rows_are_refused),
        cmocka_unit_test(wrong_numbers_are_refused),
        cmocka_unit_test(one_embedding_and_one_head),
        cmocka_unit_test(a_tied_head_has_its_embedding),
        cmocka_unit_test(long_texts),
        cmocka_unit_test(sixty_four_modules_at_most),
        cmocka_unit_test(wrong_calls),
        cmocka_unit_test(many_experts),
        cmocka_unit_test(every_allocation_can_fail),
        cmocka_unit_test(rows_grow),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
