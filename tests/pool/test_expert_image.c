/*
 * The router and expert pairs of an adapter, packed: the estimate equals what is taken, at the
 * sizes of a large model and for every adapter of the fixtures; every matrix has the stored
 * elements, rounded, and zeros around them.
 */
#include "adapter/intake_state.h"
#include "base/alloc.h"
#include "base/half.h"
#include "pool/expert_image.h"
#include "pool/image.h"
#include "support/hand.h"

#include <sidepath/intake.h>

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- a large model, from headers alone ----------------------------------------------------- */

enum { LAYERS = 40, EXPERTS = 256, HIDDEN = 2048, INTER = 512 };

static sp_geometry *large_geometry(void)
{
    char text[1024];
    int n =
        snprintf(text, sizeof text,
                 "{\"architectures\": [\"Qwen3MoeForCausalLM\"], \"model_type\": \"qwen3_moe\", "
                 "\"hidden_act\": \"silu\", \"head_dim\": 64, \"hidden_size\": %d, "
                 "\"intermediate_size\": 512, \"max_position_embeddings\": 4096, "
                 "\"moe_intermediate_size\": %d, \"norm_topk_prob\": true, "
                 "\"num_attention_heads\": 4, \"num_experts_per_tok\": 8, "
                 "\"num_hidden_layers\": %d, \"num_key_value_heads\": 2, \"num_experts\": %d, "
                 "\"rms_norm_eps\": 1e-06, \"rope_theta\": 10000.0, \"vocab_size\": 512, "
                 "\"tie_word_embeddings\": false}",
                 HIDDEN, INTER, LAYERS, EXPERTS);
    sp_geometry *geometry = NULL;
    sp_error error;

    assert_ok(sp_geometry_parse(text, (size_t)n, &geometry, &error), &error);
    return geometry;
}

/* Descriptions of pairs, to be filled. */
typedef struct described {
    sp_tensor_desc *tensors;
    char (*names)[96];
    int64_t (*shapes)[2];
    size_t n;
} described;

static described described_make(size_t n_max)
{
    described d = {.tensors = calloc(n_max, sizeof *d.tensors),
                   .names = calloc(n_max, sizeof *d.names),
                   .shapes = calloc(n_max, sizeof *d.shapes)};

    assert_true(d.tensors != NULL && d.names != NULL && d.shapes != NULL);
    return d;
}

static void describe(described *d, const char *path, const char *letter, int64_t rows, int64_t cols)
{
    snprintf(d->names[d->n], sizeof *d->names, "base_model.model.model.%s.lora_%s.weight", path,
             letter);
    d->shapes[d->n][0] = rows;
    d->shapes[d->n][1] = cols;
    d->tensors[d->n] =
        (sp_tensor_desc){sizeof *d->tensors, d->names[d->n], SP_TENSOR_BF16, 2, d->shapes[d->n]};
    d->n++;
}

/* The estimate for the descriptions; frees them. */
static size_t estimate(described *d, const char *config, sp_geometry *geometry)
{
    sp_adapter_options options;
    sp_intake *intake = NULL;
    sp_error error;
    size_t bytes;

    sp_adapter_options_default(&options, sizeof options);
    options.geometry = geometry;
    assert_ok(sp_intake_create(config, strlen(config), d->tensors, d->n, &options, &intake, &error),
              &error);
    bytes = sp_layout_expert_bytes(sp_intake_adapter(intake), SP_DTYPE_BF16);
    sp_intake_destroy(intake);
    free(d->tensors);
    free(d->names);
    free(d->shapes);
    return bytes;
}

static size_t estimate_each(int32_t rank, sp_geometry *geometry)
{
    static const struct {
        const char *name;
        int32_t in, out;
    } modules[] = {
        {"gate_proj", HIDDEN, INTER}, {"up_proj", HIDDEN, INTER}, {"down_proj", INTER, HIDDEN}};
    described d = described_make((size_t)LAYERS * EXPERTS * 6);
    char path[64], config[256];

    for (int layer = 0; layer < LAYERS; layer++) {
        for (int e = 0; e < EXPERTS; e++) {
            for (int m = 0; m < 3; m++) {
                snprintf(path, sizeof path, "layers.%d.mlp.experts.%d.%s", layer, e,
                         modules[m].name);
                describe(&d, path, "A", rank, modules[m].in);
                describe(&d, path, "B", modules[m].out, rank);
            }
        }
    }
    snprintf(config, sizeof config,
             "{\"peft_type\": \"LORA\", \"r\": %d, \"lora_alpha\": 16, \"target_modules\": "
             "[\"experts.0.gate_proj\"]}",
             rank);
    return estimate(&d, config, geometry);
}

static void a_large_model_takes_what_is_written(void **state)
{
    sp_geometry *geometry = large_geometry();
    const int64_t rank = 16;
    described d = described_make((size_t)LAYERS * 4);
    char path[64];

    (void)state;
    assert_int_equal(estimate_each(16, geometry), 2516582400);
    assert_int_equal(estimate_each(12, geometry), 2516582400); /* takes a stride of 16 */
    for (int layer = 0; layer < LAYERS; layer++) {
        snprintf(path, sizeof path, "layers.%d.mlp.experts.base_layer", layer);
        describe(&d, path, "A", EXPERTS * rank, HIDDEN);
        describe(&d, path, "B", 2 * INTER, EXPERTS * rank);
        snprintf(path, sizeof path, "layers.%d.mlp.experts", layer);
        describe(&d, path, "A", EXPERTS * rank, INTER);
        describe(&d, path, "B", HIDDEN, EXPERTS * rank);
    }
    /* The fused pair keeps one A for gate and up: 16 x 2048 elements less for each expert. */
    assert_int_equal(estimate(&d,
                              "{\"peft_type\": \"LORA\", \"r\": 16, \"lora_alpha\": 16, "
                              "\"peft_version\": \"0.21.0\", \"target_parameters\": "
                              "[\"mlp.experts.gate_up_proj\", \"mlp.experts.down_proj\"]}",
                              geometry),
                     2516582400 - (size_t)LAYERS * EXPERTS * 16 * HIDDEN * 2);
    sp_geometry_release(geometry);
}

/* ---- the fixtures -------------------------------------------------------------------------- */

static float stored(const sp_factor *factor, int64_t row, int64_t col)
{
    int64_t index = row * factor->row_stride + col * factor->col_stride;
    const uint16_t *half = factor->data;

    if (factor->dtype == SP_DTYPE_F32)
        return ((const float *)factor->data)[index];
    return factor->dtype == SP_DTYPE_BF16 ? sp_bf16_to_f32(half[index])
                                          : sp_f16_to_f32(half[index]);
}

/* A matrix of rows x stride, of which the factor is the upper left part. */
static void expect_matrix(const char *data, uint32_t unit, int32_t rows, int32_t stride,
                          const sp_factor *factor)
{
    const uint16_t *got = (const uint16_t *)(const void *)(data + (size_t)unit * 256);

    for (int32_t i = 0; i < rows; i++) {
        for (int32_t j = 0; j < stride; j++) {
            bool inside = i < factor->rows && j < factor->cols;
            uint16_t want = inside ? sp_f32_to_bf16(stored(factor, i, j)) : 0;

            assert_int_equal(got[(int64_t)i * stride + j], want);
        }
    }
}

static const sp_expert_cell *cell_at(const sp_layout *layout, const sp_expert_image *image,
                                     const sp_adapter_site *site)
{
    int32_t place = sp_layout_find_expert_place(layout, site->site);

    if (site->kind == SP_SITE_EXPERT)
        return &image->cells[place * image->n_experts + site->expert];
    return &image->routers[sp_layout_find(layout, site->site) - sp_layout_n_slot_sites(layout)];
}

/* Returns the number of its expert and router pairs. */
static size_t check_image(const sp_layout *layout, const sp_adapter *adapter, const sp_image *image)
{
    size_t n = 0, n_cells = 0;

    assert_int_equal(sp_image_expert_bytes(image), sp_layout_expert_bytes(adapter, SP_DTYPE_BF16));
    for (size_t i = 0; i < sp_adapter_n_sites(adapter); i++) {
        const sp_adapter_site *site = sp_adapter_site_at(adapter, i);
        int32_t stride = (site->rank + 7) / 8 * 8;
        const sp_expert_cell *cell;

        if (site->kind != SP_SITE_ROUTER && site->kind != SP_SITE_EXPERT)
            continue;
        cell = cell_at(layout, image->experts, site);
        assert_int_equal(cell->rank, site->rank);
        assert_true(cell->scale == site->scale);
        expect_matrix(image->experts->data, cell->a, stride, site->a.cols, &site->a);
        expect_matrix(image->experts->data, cell->b, site->b.rows, stride, &site->b);
        n++;
    }
    for (int32_t i = 0; n > 0 && i < image->experts->n_places * image->experts->n_experts; i++)
        n_cells += image->experts->cells[i].rank > 0;
    for (int32_t i = 0; n > 0 && i < image->experts->n_routers; i++)
        n_cells += image->experts->routers[i].rank > 0;
    assert_int_equal(n_cells, n);
    return n;
}

/* The tables of the base are not served: adapters that replace rows are packed without them. */
static size_t pack_adapter(const char *model, const char *name, sp_geometry *geometry)
{
    sp_adapter_options options;
    sp_layout_options layout_options;
    char path[512], base[512];
    sp_adapter *adapter;
    sp_layout *layout;
    sp_image *image;
    sp_adapter_site *sites;
    sp_digest digest;
    sp_error error;
    size_t n;

    snprintf(path, sizeof path, "%s/%s/adapters/%s", SP_TEST_FIXTURES, model, name);
    snprintf(base, sizeof base, "%s/%s", SP_TEST_FIXTURES, model);
    sp_adapter_options_default(&options, sizeof options);
    options.geometry = geometry;
    options.base_dir = base;
    assert_ok(sp_adapter_open(path, &options, &adapter, &error), &error);
    sp_layout_options_default(&layout_options, sizeof layout_options);
    layout_options.geometry = geometry;
    layout_options.modules = sp_layout_pair_modules(adapter);
    assert_ok(sp_layout_create(&layout_options, &layout, &error), &error);
    n = sp_adapter_n_sites(adapter);
    sites = calloc(n + 1, sizeof *sites);
    assert_non_null(sites);
    for (size_t i = 0; i < n; i++)
        sites[i] = *sp_adapter_site_at(adapter, i);
    digest = sp_adapter_digest(adapter);
    assert_ok(sp_layout_pack_sites(layout, sites, n, &digest, NULL, &image, &error), &error);
    n = check_image(layout, adapter, image);
    free(sites);
    sp_image_destroy(image);
    sp_layout_release(layout);
    sp_adapter_release(adapter);
    return n;
}

static void every_adapter_of_the_fixtures_is_packed(void **state)
{
    json_error_t why;
    json_t *index = json_load_file(SP_TEST_FIXTURES "/index.json", 0, &why);
    const char *model;
    json_t *entry;
    size_t n = 0, n_with_experts = 0;

    (void)state;
    assert_non_null(index);
    json_object_foreach(json_object_get(index, "models"), model, entry)
    {
        char path[512];
        sp_geometry *geometry;
        const char *name;
        json_t *adapter;

        snprintf(path, sizeof path, "%s/%s", SP_TEST_FIXTURES, model);
        assert_ok(sp_geometry_open(path, &geometry, NULL), NULL);
        json_object_foreach(json_object_get(entry, "adapters"), name, adapter)
        {
            if (strcmp(json_string_value(json_object_get(adapter, "expect")), "load") != 0)
                continue;
            n_with_experts += pack_adapter(model, name, geometry) > 0;
            n++;
        }
        sp_geometry_release(geometry);
    }
    printf("%zu adapters, %zu with router or experts\n", n, n_with_experts);
    assert_true(n >= 107);
    assert_true(n_with_experts >= 28);
    json_decref(index);
}

/* ---- refusals ------------------------------------------------------------------------------ */

static const site_dims small[] = {{0, SP_MODULE_Q_PROJ, 16, 8},
                                  {0, SP_MODULE_ROUTER, 16, 4},
                                  {0, SP_MODULE_EXPERT_GATE_PROJ, 16, 8},
                                  {0, SP_MODULE_EXPERT_DOWN_PROJ, 8, 16}};

static void refuse(const sp_layout *layout, const hand_adapter *adapter, sp_status status,
                   const char *code, const char *word)
{
    size_t before = sp_alloc_bytes();
    sp_image *image = NULL;
    sp_error error = {.status = SP_OK};

    assert_int_equal(sp_layout_pack_sites(layout, adapter->sites, (size_t)adapter->n_sites,
                                          &adapter->digest, NULL, &image, &error),
                     status);
    assert_string_equal(error.code, code);
    if (strstr(error.text, word) == NULL)
        fail_msg("no \"%s\" in \"%s\"", word, error.text);
    assert_null(image);
    assert_int_equal(sp_alloc_bytes(), before);
}

static void pairs_that_do_not_fit_are_named(void **state)
{
    sp_geometry *geometry = known_geometry(4, small, 4);
    sp_layout_options options;
    sp_layout *layout, *without;
    hand_adapter *adapter = hand_adapter_create(3);
    sp_test_random random = {9};
    sp_adapter_site *site;
    char path[KNOWN_PATH_BYTES];
    float huge = 3.4e38f;

    (void)state;
    sp_layout_options_default(&options, sizeof options);
    options.geometry = geometry;
    options.expert_rank = 6;
    assert_ok(sp_layout_create(&options, &layout, NULL), NULL);
    options.expert_rank = 0;
    assert_ok(sp_layout_create(&options, &without, NULL), NULL);
    site = hand_adapter_add(adapter, &small[2], 6, 1, SP_DTYPE_F32, &random);
    known_path(0, SP_MODULE_EXPERT_GATE_PROJ, 3, path);
    site->path = path;
    site->expert = 3;
    refuse(without, adapter, SP_ERR_REFUSED, "experts-disabled", "switched off");
    site->rank = 7;
    refuse(layout, adapter, SP_ERR_TOO_LARGE, "expert-rank-exceeds-cap", "max-lora-expert-rank");
    site->rank = 6;
    site->a.cols = 15;
    refuse(layout, adapter, SP_ERR_MISMATCH, "shape-mismatch", "15");
    site->a.cols = 16;
    ((float *)(uintptr_t)site->b.data)[10] = huge;
    refuse(layout, adapter, SP_ERR_REFUSED, "non-finite", "lora_B [1, 4]");
    ((float *)(uintptr_t)site->b.data)[10] = 1;
    hand_adapter_add(adapter, &small[2], 6, 1, SP_DTYPE_F32, &random);
    adapter->sites[1].path = adapter->sites[0].path;
    adapter->sites[1].expert = 3;
    refuse(layout, adapter, SP_ERR_REFUSED, "duplicate-tensor", "twice");
    known_path(0, SP_MODULE_EXPERT_GATE_PROJ, 4, path);
    refuse(layout, adapter, SP_ERR_MISMATCH, "expert-out-of-range", "experts.4");
    hand_adapter_destroy(adapter);
    sp_layout_release(layout);
    sp_layout_release(without);
    sp_geometry_release(geometry);
}

/* A failed allocation anywhere leaves nothing, and threads change no byte. */
static void packing_survives_failed_allocations(void **state)
{
    sp_geometry *geometry = known_geometry(4, small, 4);
    sp_layout_options options;
    sp_layout *layout;
    hand_adapter *adapter = hand_adapter_create(3);
    sp_test_random random = {9};
    sp_image *image = NULL, *threaded = NULL;
    sp_exec *exec = hand_exec(3);
    size_t before;
    sp_error error;
    int64_t n = 0;

    (void)state;
    sp_layout_options_default(&options, sizeof options);
    options.geometry = geometry;
    assert_ok(sp_layout_create(&options, &layout, NULL), NULL);
    hand_adapter_add(adapter, &small[0], 3, 1, SP_DTYPE_F32, &random);
    hand_adapter_add(adapter, &small[1], 9, 2, SP_DTYPE_BF16, &random);
    before = sp_alloc_bytes();
    for (;; n++) {
        sp_alloc_fail_after(n);
        if (sp_layout_pack_sites(layout, adapter->sites, 2, &adapter->digest, NULL, &image,
                                 &error) == SP_OK)
            break;
        assert_true(sp_alloc_failed());
        assert_int_equal(error.status, SP_ERR_MEMORY);
        assert_null(image);
        assert_int_equal(sp_alloc_bytes(), before);
    }
    sp_alloc_fail_after(-1);
    /* Places, an image of four (cells are part of its data), pairs, experts of three. */
    assert_int_equal(n, 9);
    /* A [16, 16] and B [4, 16] of 2 bytes. */
    assert_int_equal(sp_image_expert_bytes(image), 512 + 256);
    assert_int_equal(sp_image_bytes(image) - sp_layout_image_bytes(layout),
                     image->experts->host_bytes);
    assert_ok(
        sp_layout_pack_sites(layout, adapter->sites, 2, &adapter->digest, exec, &threaded, NULL),
        NULL);
    assert_memory_equal(image->experts->data, threaded->experts->data, 512 + 256);
    sp_image_destroy(image);
    sp_image_destroy(threaded);
    sp_exec_destroy(exec);
    hand_adapter_destroy(adapter);
    sp_layout_release(layout);
    sp_geometry_release(geometry);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_large_model_takes_what_is_written),
        cmocka_unit_test(every_adapter_of_the_fixtures_is_packed),
        cmocka_unit_test(pairs_that_do_not_fit_are_named),
        cmocka_unit_test(packing_survives_failed_allocations),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
