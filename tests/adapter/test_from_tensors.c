/*
 * test_from_tensors.c: adapters from memory against the same content in a folder: verdict, digest,
 * receipt and packed image, for every fixture and every arrangement of views; views that are wrong;
 * and views in the memory of a device.
 */
#include "adapter/toy.h"
#include "support/archs.h"
#include "support/views.h"

#include "base/alloc.h"
#include "base/file.h"
#include "device/device_ops.h"
#include "pool/image.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define CONFIG "{\"r\": 2, \"lora_alpha\": 4, \"target_modules\": [\"q_proj\"]}"

/* ---- the same adapter in both forms ---------------------------------------------------------- */

static char *receipt_of(const sp_adapter *adapter)
{
    sp_receipt_options options;
    sp_receipt *receipt;
    sp_error error;
    char *json;

    sp_receipt_options_default(&options, sizeof options);
    assert_ok(sp_receipt_create(adapter, &options, &receipt, &error), &error);
    json = sp_strdup(sp_receipt_json(receipt));
    assert_non_null(json);
    sp_receipt_destroy(receipt);
    return json;
}

/* The base's tables; data NULL: not served. */
typedef struct served_pair {
    sp_served_table embed, head;
} served_pair;

/* Slot bytes and replaced rows; true where the pool takes them. */
static bool same_images(sp_geometry *geometry, const served_pair *served, const sp_adapter *one,
                        const sp_adapter *two)
{
    sp_layout_options options;
    sp_layout *layout;
    sp_image *images[2];
    sp_status status;
    sp_error error;

    sp_layout_options_default(&options, sizeof options);
    options.geometry = geometry;
    options.modules = sp_layout_pair_modules(one); /* 0: all linear ones */
    options.rank = 64;
    options.served_embed = served && served->embed.data ? &served->embed : NULL;
    options.served_head = served && served->head.data ? &served->head : NULL;
    assert_ok(sp_layout_create(&options, &layout, &error), &error);
    status = sp_layout_pack(layout, one, NULL, &images[0], &error);
    assert_int_equal(sp_layout_pack(layout, two, NULL, &images[1], &error), status);
    if (status == SP_OK) {
        size_t bytes = sp_image_overlay_bytes(images[0]);

        assert_memory_equal(images[0]->data, images[1]->data, sp_layout_slot_bytes(layout));
        assert_int_equal(sp_image_overlay_bytes(images[1]), bytes);
        if (bytes > 0)
            assert_memory_equal(images[0]->overlay->data, images[1]->overlay->data, bytes);
        sp_image_destroy(images[0]);
        sp_image_destroy(images[1]);
    }
    sp_layout_release(layout);
    return status == SP_OK;
}

static void assert_same_adapters(const sp_adapter *one, const sp_adapter *two)
{
    sp_digest a = sp_adapter_digest(one), b = sp_adapter_digest(two);
    char *left = receipt_of(one), *right = receipt_of(two);

    assert_memory_equal(&a, &b, sizeof a);
    assert_string_equal(left, right);
    sp_free(left);
    sp_free(right);
}

/* ---- fixtures -------------------------------------------------------------------------------- */

typedef struct model {
    const char *name;
    char path[256];
    sp_geometry *geometry;
    golden *file;
    served_pair served;
} model;

static sp_served_table table_of(const golden_tensor *tensor)
{
    return (sp_served_table){.struct_bytes = sizeof(sp_served_table),
                             .data = tensor->data,
                             .dtype = SP_DTYPE_BF16,
                             .rows = (int32_t)tensor->shape[0],
                             .hidden = (int32_t)tensor->shape[1]};
}

static model open_model(const char *name)
{
    model m = {.name = name};
    const golden_tensor *embed, *head;
    char path[512];
    sp_error error;

    snprintf(m.path, sizeof m.path, "%s/%s", SP_TEST_FIXTURES, name);
    assert_ok(sp_geometry_open(m.path, &m.geometry, &error), &error);
    snprintf(path, sizeof path, "%s/model.safetensors", name);
    m.file = golden_open(path);
    embed = golden_find(m.file, "model.embed_tokens.weight");
    if (!embed)
        embed = golden_get(m.file, "model.language_model.embed_tokens.weight");
    head = golden_find(m.file, "lm_head.weight");
    assert_string_equal(embed->dtype, "BF16");
    m.served.embed = table_of(embed);
    m.served.head = table_of(head ? head : embed);
    return m;
}

static void close_model(model *m)
{
    golden_close(m->file);
    sp_geometry_release(m->geometry);
}

/* The folder, judged with the base's files; and its tensors, judged with the tables in memory. */
static sp_status open_both(const model *m, const char *adapter, view_form form,
                           sp_adapter **out_folder, sp_adapter **out_memory, sp_error *error)
{
    char folder[512], path[1024];
    sp_adapter_options options;
    golden *file;
    view_list *list;
    char *config;
    size_t config_bytes;
    sp_status status, of_folder;
    sp_error folder_error;

    snprintf(folder, sizeof folder, "%s/adapters/%s", m->path, adapter);
    sp_adapter_options_default(&options, sizeof options);
    options.geometry = m->geometry;
    options.name = adapter;
    options.base_dir = m->path;
    of_folder = sp_adapter_open(folder, &options, out_folder, &folder_error);
    snprintf(path, sizeof path, "%s/adapter_config.json", folder);
    assert_ok(sp_file_read_all(path, 1u << 20, &config, &config_bytes, error), error);
    snprintf(path, sizeof path, "%s/adapters/%s/adapter_model.safetensors", m->name, adapter);
    file = golden_open(path);
    list = view_list_create(file, form);
    options.base_dir = NULL;
    options.served_embed = &m->served.embed;
    options.served_head = &m->served.head;
    status = sp_adapter_from_tensors(config, config_bytes, list->views, list->n, &options,
                                     out_memory, error);
    view_list_destroy(list);
    golden_close(file);
    sp_free(config);
    assert_int_equal(status, of_folder);
    if (status != SP_OK)
        assert_string_equal(error->code, folder_error.code);
    return status;
}

static const struct {
    const char *model, *adapter;
} fixtures[] = {
    {"qwen3-tied", "plain-r8"},
    {"qwen3-tied", "attn-r4"},
    {"qwen3-tied", "patterns"},
    {"qwen3-tied", "rslora-r16"},
    {"qwen3-tied", "embed-lora"},
    {"qwen3-tied", "head-lora"},
    {"qwen3-tied", "tokens"},
    {"qwen3-tied", "save-head"},
    {"qwen3-tied", "save-embed"},
    {"qwen3-tied", "save-head-embed"},
    {"qwen3-tied", "save-embed-tied"},
    {"qwen3-untied", "plain-r8"},
    {"qwen3-tied", "dora"},
    {"qwen3-tied", "bias-lora-only"},
};

static void the_fixtures_are_the_same_from_memory(void **state)
{
    size_t n_opened = 0;

    (void)state;
    for (size_t i = 0; i < sizeof fixtures / sizeof *fixtures; i++) {
        model m = open_model(fixtures[i].model);

        for (int form = 0; form < VIEW_FORMS; form++) {
            sp_adapter *folder = NULL, *memory = NULL;
            sp_error error;

            if (open_both(&m, fixtures[i].adapter, (view_form)form, &folder, &memory, &error) !=
                SP_OK)
                continue;
            assert_same_adapters(folder, memory);
            assert_true(same_images(m.geometry, &m.served, folder, memory));
            sp_adapter_release(folder);
            sp_adapter_release(memory);
            n_opened++;
        }
        close_model(&m);
    }
    assert_int_equal(n_opened, 12 * VIEW_FORMS);
}

/* Models that are described by hand, among them Phi-3 and GPT-2, as trainers hold their adapters.
 */
static void architectures_are_the_same_from_memory(void **state)
{
    (void)state;
    for (int32_t i = 0; i < N_ARCHS * VIEW_FORMS; i++) {
        arch a = arch_open(arch_names[i / VIEW_FORMS]);
        view_list *list = view_list_create(a.adapter, (view_form)(i % VIEW_FORMS));
        sp_adapter *folder = arch_adapter(&a, SP_DTYPE_BF16), *memory;
        const served_pair served = {.head = a.head};
        sp_adapter_options options;
        char path[640], *config;
        size_t config_bytes;
        sp_error error;

        snprintf(path, sizeof path, "%s/adapter_config.json", a.folder);
        assert_ok(sp_file_read_all(path, 1u << 20, &config, &config_bytes, &error), &error);
        sp_adapter_options_default(&options, sizeof options);
        options.geometry = a.geometry;
        options.served_head = a.head.data ? &a.head : NULL;
        options.name = sp_adapter_name(folder);
        assert_ok(sp_adapter_from_tensors(config, config_bytes, list->views, list->n, &options,
                                          &memory, &error),
                  &error);
        view_list_destroy(list);
        sp_free(config);
        assert_same_adapters(folder, memory);
        assert_true(same_images(a.geometry, &served, folder, memory));
        sp_adapter_release(folder);
        sp_adapter_release(memory);
        arch_close(&a);
    }
}

/* ---- toys ------------------------------------------------------------------------------------ */

static float value_at(int64_t i)
{
    return (float)(i % 13 - 6) * 0.0123f + 0.001f;
}

/* q_proj at rank 2 in F32, as a folder has it. */
static make_adapter *f32_adapter(const char *prefix)
{
    make_adapter *adapter = make_adapter_create();
    char name[128];
    float *data;

    make_adapter_config(adapter, CONFIG);
    snprintf(name, sizeof name, "%smodel.layers.0.self_attn.q_proj.lora_A.weight", prefix);
    data = make_adapter_add(adapter, name, "F32", 2, 2, TOY_HIDDEN);
    for (int64_t i = 0; i < 2 * TOY_HIDDEN; i++)
        data[i] = value_at(i);
    snprintf(name, sizeof name, "%smodel.layers.0.self_attn.q_proj.lora_B.weight", prefix);
    data = make_adapter_add(adapter, name, "F32", 2, 12, 2);
    for (int64_t i = 0; i < 12 * 2; i++)
        data[i] = value_at(i + 5);
    return adapter;
}

/* The same as a trainer may hold it: both factors transposed, without the prefix, B first. */
typedef struct held {
    float a[TOY_HIDDEN * 2], b[2 * 12];
    sp_tensor_view views[2];
} held;

static const int64_t a_shape[] = {2, TOY_HIDDEN}, a_strides[] = {1, 2};
static const int64_t b_shape[] = {12, 2}, b_strides[] = {1, 12};

static held *hold(void)
{
    held *h = sp_calloc(1, sizeof *h);

    assert_non_null(h);
    for (int64_t r = 0; r < 2; r++)
        for (int64_t c = 0; c < TOY_HIDDEN; c++)
            h->a[c * 2 + r] = value_at(r * TOY_HIDDEN + c);
    for (int64_t r = 0; r < 12; r++)
        for (int64_t c = 0; c < 2; c++)
            h->b[c * 12 + r] = value_at(r * 2 + c + 5);
    h->views[0] = (sp_tensor_view){.struct_bytes = sizeof(sp_tensor_view),
                                   .name = "model.layers.0.self_attn.q_proj.lora_B.weight",
                                   .data = h->b,
                                   .type = SP_TENSOR_F32,
                                   .n_dims = 2,
                                   .shape = b_shape,
                                   .strides = b_strides,
                                   .device_kind = SP_VIEW_HOST};
    h->views[1] = (sp_tensor_view){.struct_bytes = sizeof(sp_tensor_view),
                                   .name = "model.layers.0.self_attn.q_proj.lora_A.weight",
                                   .data = h->a,
                                   .type = SP_TENSOR_F32,
                                   .n_dims = 2,
                                   .shape = a_shape,
                                   .strides = a_strides};
    return h;
}

static sp_status from_held(const held *h, const sp_adapter_options *options,
                           sp_adapter **out_adapter, sp_error *error)
{
    return sp_adapter_from_tensors(CONFIG, strlen(CONFIG), h->views, 2, options, out_adapter,
                                   error);
}

/* With and without an executor; and nothing of the caller's memory is needed afterwards. */
static void transposed_f32_views_are_the_folder_with_these_bytes(void **state)
{
    sp_adapter_options options = toy_options();
    sp_exec_options exec_options;
    sp_exec *exec;

    (void)state;
    sp_exec_options_default(&exec_options, sizeof exec_options);
    exec_options.threads = 3;
    assert_ok(sp_exec_create(&exec_options, &exec, NULL), NULL);
    options.name = "toy";
    for (int i = 0; i < 4; i++) {
        make_adapter *made = f32_adapter(i % 2 ? "base_model.model." : "");
        held *h = hold();
        sp_adapter *folder, *memory;
        sp_error error;

        folder = toy_opened(made, &options);
        options.exec = i < 2 ? NULL : exec;
        assert_ok(from_held(h, &options, &memory, &error), &error);
        options.exec = NULL;
        memset(h->a, 0xff, sizeof h->a);
        sp_free(h);
        assert_same_adapters(folder, memory);
        assert_true(same_images(options.geometry, NULL, folder, memory));
        sp_adapter_release(folder);
        sp_adapter_release(memory);
        make_adapter_destroy(made);
    }
    sp_exec_destroy(exec);
    sp_geometry_release(options.geometry);
}

/* Views are copied piece by piece: a row that is longer than a piece goes on in the next one. */
static void long_rows_go_over_the_borders_of_pieces(void **state)
{
    enum { COLS = 70001 }; /* of 4 bytes; a piece has 2^18 bytes */
    static float columns[COLS * 2], b[12 * 2];
    static const int64_t shape[] = {2, COLS}, strides[] = {1, 2};
    sp_site site;
    sp_adapter_options options;
    held *h = hold();
    sp_adapter *adapter;
    const float *a;
    sp_error error;

    (void)state;
    for (int64_t i = 0; i < 2 * COLS; i++)
        columns[i % COLS * 2 + i / COLS] = value_at(i);
    for (int64_t i = 0; i < 12 * 2; i++)
        b[i] = value_at(i);
    sp_site_default(&site, sizeof site);
    site.path = "model.layers.0.self_attn.q_proj";
    site.layer = 0;
    site.k_in = COLS;
    site.n_out = 12;
    sp_adapter_options_default(&options, sizeof options);
    assert_ok(sp_geometry_create(&site, 1, &options.geometry, &error), &error);
    h->views[1].data = columns;
    h->views[1].shape = shape;
    h->views[1].strides = strides;
    h->views[1].device_kind = SP_VIEW_CUDA_PINNED; /* which is host memory */
    h->views[0].data = b;
    h->views[0].strides = NULL;
    assert_ok(from_held(h, &options, &adapter, &error), &error);
    a = sp_adapter_site_at(adapter, 0)->a.data;
    for (int64_t i = 0; i < 2 * COLS; i++)
        assert_true(a[i] == value_at(i));
    assert_memory_equal(sp_adapter_site_at(adapter, 0)->b.data, b, sizeof b);
    sp_adapter_release(adapter);
    sp_free(h);
    sp_geometry_release(options.geometry);
}

/* ---- what is wrong --------------------------------------------------------------------------- */

static void refused(const held *h, const sp_adapter_options *options, sp_status status,
                    const char *code, const char *word)
{
    sp_adapter *adapter = NULL;
    sp_error error;

    assert_int_equal(from_held(h, options, &adapter, &error), status);
    assert_null(adapter);
    assert_string_equal(error.code, code);
    if (!strstr(error.text, word) && strcmp(error.subject, word) != 0)
        fail_msg("\"%s\" is neither in \"%s\" nor \"%s\"", word, error.text, error.subject);
}

static void wrong_strides_are_named(void **state)
{
    static const int64_t zero[] = {0, 2}, negative[] = {1, -2}, far[] = {INT64_MAX / 2, 2};
    static const int64_t farther[] = {INT64_MAX, INT64_MAX};
    sp_adapter_options options = toy_options();
    held *h = hold();
    sp_tensor_view *view = &h->views[1], good = *view;

    (void)state;
    view->strides = zero;
    refused(h, &options, SP_ERR_STRIDE, "bad-stride", "above 0");
    view->strides = negative;
    refused(h, &options, SP_ERR_STRIDE, "bad-stride", "-2");
    view->strides = far;
    refused(h, &options, SP_ERR_STRIDE, "bad-stride", "address space");
    view->strides = farther;
    refused(h, &options, SP_ERR_STRIDE, "bad-stride", "address space");
    *view = good;
    view->byte_offset = UINT64_MAX;
    refused(h, &options, SP_ERR_STRIDE, "bad-stride", "address space");
    sp_free(h);
    sp_geometry_release(options.geometry);
}

static void wrong_views_are_named(void **state)
{
    static const int64_t below[] = {-2, TOY_HIDDEN};
    static const int64_t huge[] = {INT64_MAX, INT64_MAX}, three[] = {3, TOY_HIDDEN};
    static const int64_t empty[] = {0, TOY_HIDDEN};
    sp_adapter_options options = toy_options();
    held *h = hold();
    sp_tensor_view *view = &h->views[1], good = *view;

    (void)state;
    view->shape = below;
    refused(h, &options, SP_ERR_REFUSED, "header-malformed", "negative");
    view->shape = huge;
    view->strides = NULL;
    refused(h, &options, SP_ERR_STRIDE, "bad-stride", "address space");
    view->shape = three;
    view->strides = NULL;
    refused(h, &options, SP_ERR_MISMATCH, "shape-mismatch", "rank");
    view->shape = empty;
    refused(h, &options, SP_ERR_REFUSED, "empty-adapter", "no elements");
    *view = good;
    view->n_dims = 1;
    refused(h, &options, SP_ERR_MISMATCH, "shape-mismatch", "two");
    view->n_dims = SP_TENSOR_DIMS_MAX + 1;
    refused(h, &options, SP_ERR_REFUSED, "header-malformed", "dimensions");
    view->n_dims = -1;
    refused(h, &options, SP_ERR_REFUSED, "header-malformed", "dimensions");
    *view = good;
    view->shape = NULL;
    refused(h, &options, SP_ERR_ARGUMENT, "", "shape");
    *view = good;
    view->data = NULL;
    refused(h, &options, SP_ERR_ARGUMENT, "", "memory");
    *view = good;
    view->name = NULL;
    refused(h, &options, SP_ERR_ARGUMENT, "", "name");
    view->name = h->views[0].name;
    refused(h, &options, SP_ERR_REFUSED, "duplicate-key", "twice");
    view->name = "model.layers.0.self_attn.q_proj.lora_A.\nweight";
    refused(h, &options, SP_ERR_REFUSED, "header-malformed", "control");
    *view = good;
    view->type = SP_TENSOR_F64;
    refused(h, &options, SP_ERR_REFUSED, "unsupported-dtype", "F64");
    view->type = (sp_tensor_type)99;
    refused(h, &options, SP_ERR_REFUSED, "unsupported-dtype", "99");
    *view = good;
    view->device_kind = SP_VIEW_CUDA;
    refused(h, &options, SP_ERR_ARGUMENT, "", "views_on");
    view->device_kind = 4; /* OpenCL */
    refused(h, &options, SP_ERR_ARGUMENT, "", "kind 4");
    *view = good;
    view->struct_bytes = 0;
    refused(h, &options, SP_ERR_ARGUMENT, "", "struct_bytes");
    *view = good;
    h->a[5] = NAN;
    refused(h, &options, SP_ERR_REFUSED, "non-finite", "row 1, column 2");
    sp_free(h);
    sp_geometry_release(options.geometry);
}

/* A dimension of one may have any stride that is not negative: frameworks give it some. */
static void strides_of_single_rows_do_not_matter(void **state)
{
    static const int64_t a_one[] = {1, TOY_HIDDEN}, a_any[] = {0, 1};
    static const int64_t b_one[] = {12, 1}, b_any[] = {1, INT64_MAX};
    static const char config[] = "{\"r\": 1, \"lora_alpha\": 4, \"target_modules\": [\"q_proj\"]}";
    sp_adapter_options options = toy_options();
    held *h = hold();
    sp_adapter *adapter;
    const sp_adapter_site *site;
    sp_error error;

    (void)state;
    h->views[1].shape = a_one;
    h->views[1].strides = a_any;
    h->views[0].shape = b_one;
    h->views[0].strides = b_any;
    assert_ok(
        sp_adapter_from_tensors(config, strlen(config), h->views, 2, &options, &adapter, &error),
        &error);
    site = sp_adapter_site_at(adapter, 0);
    assert_memory_equal(site->a.data, h->a, TOY_HIDDEN * sizeof(float));
    assert_memory_equal(site->b.data, h->b, 12 * sizeof(float));
    sp_adapter_release(adapter);
    sp_free(h);
    sp_geometry_release(options.geometry);
}

static void wrong_calls_are_named(void **state)
{
    sp_adapter_options options = toy_options();
    held *h = hold();
    sp_adapter *adapter = NULL;
    sp_error error;

    (void)state;
    assert_int_equal(sp_adapter_from_tensors(NULL, 0, h->views, 2, &options, &adapter, &error),
                     SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "config");
    assert_int_equal(sp_adapter_from_tensors(CONFIG, 5, NULL, 2, &options, &adapter, &error),
                     SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "views");
    assert_int_equal(sp_adapter_from_tensors(CONFIG, 5, h->views, 2, &options, NULL, &error),
                     SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "out_adapter");
    assert_int_equal(sp_adapter_from_tensors(CONFIG, 5, h->views, 2, NULL, &adapter, &error),
                     SP_ERR_ARGUMENT);
    assert_int_equal(sp_adapter_from_tensors(CONFIG, 5, h->views, 2, &options, &adapter, &error),
                     SP_ERR_REFUSED);
    assert_string_equal(error.code, "config-malformed");
    assert_int_equal(
        sp_adapter_from_tensors(CONFIG, strlen(CONFIG), NULL, 0, &options, &adapter, &error),
        SP_ERR_REFUSED);
    assert_string_equal(error.code, "empty-adapter");
    assert_int_equal(sp_adapter_from_tensors(CONFIG, strlen(CONFIG), h->views, SIZE_MAX, &options,
                                             &adapter, &error),
                     SP_ERR_TOO_LARGE);
    assert_string_equal(error.subject, "n_views");
    assert_null(adapter);
    sp_free(h);
    sp_geometry_release(options.geometry);
}

/* What no slot could hold ends here, as it does from files. */
static void ranks_and_scales_beyond_all_bounds(void **state)
{
    static const char *const configs[] = {
        "{\"r\": 2, \"lora_alpha\": NaN}",
        "{\"r\": 2, \"lora_alpha\": 1e999}",
        "{\"r\": 2, \"lora_alpha\": 1e300}",
    };
    static const int64_t a_large[] = {5000, TOY_HIDDEN}, b_large[] = {12, 5000};
    static const char large[] = "{\"r\": 5000, \"lora_alpha\": 1}";
    sp_adapter_options options = toy_options();
    held *h = hold();
    float *data = sp_calloc(5000 * 12, sizeof *data);
    sp_adapter *adapter = NULL;
    sp_error error;

    (void)state;
    assert_non_null(data);
    for (size_t i = 0; i < sizeof configs / sizeof *configs; i++) {
        assert_int_equal(sp_adapter_from_tensors(configs[i], strlen(configs[i]), h->views, 2,
                                                 &options, &adapter, &error),
                         SP_ERR_REFUSED);
        assert_string_equal(error.code, i < 2 ? "config-malformed" : "bad-alpha");
    }
    data[0] = 1;
    h->views[0] = (sp_tensor_view){
        h->views[0].struct_bytes, h->views[0].name, data, SP_TENSOR_F32, 2, b_large, NULL, 0, 0, 0};
    h->views[1] = (sp_tensor_view){
        h->views[1].struct_bytes, h->views[1].name, data, SP_TENSOR_F32, 2, a_large, NULL, 0, 0, 0};
    options.rank_max = 64;
    assert_int_equal(
        sp_adapter_from_tensors(large, strlen(large), h->views, 2, &options, &adapter, &error),
        SP_ERR_TOO_LARGE);
    assert_string_equal(error.code, "rank-exceeds-pool");
    assert_null(adapter);
    sp_free(data);
    sp_free(h);
    sp_geometry_release(options.geometry);
}

static void every_allocation_that_fails_is_given_back(void **state)
{
    sp_adapter_options options = toy_options();
    held *h = hold();
    size_t bytes = sp_alloc_bytes();
    sp_status status = SP_ERR_MEMORY;
    int64_t n = 0;

    (void)state;
    for (; status == SP_ERR_MEMORY; n++) {
        sp_adapter *adapter = NULL;
        sp_error error;

        sp_alloc_fail_after(n);
        status = from_held(h, &options, &adapter, &error);
        sp_alloc_fail_after(-1);
        if (status == SP_OK)
            sp_adapter_release(adapter);
        else
            assert_int_equal(status, SP_ERR_MEMORY);
        assert_int_equal(sp_alloc_bytes(), bytes);
    }
    assert_int_equal(status, SP_OK);
    assert_true(n > 10);
    sp_free(h);
    sp_geometry_release(options.geometry);
}

/* ---- served tables --------------------------------------------------------------------------- */

/* A copied head beside a pair: only the host's own table can tell what it is. */
static void a_copied_head_is_held_against_the_served_one(void **state)
{
    static const char config[] = "{\"r\": 2, \"lora_alpha\": 4, \"target_modules\": [\"lm_head\"]}";
    sp_adapter_options options = toy_options();
    make_adapter *made = make_adapter_create();
    float table[TOY_VOCAB * TOY_HIDDEN];
    sp_served_table head = {sizeof head, table, SP_DTYPE_F32, TOY_VOCAB, TOY_HIDDEN, false};
    float *copy;

    (void)state;
    for (int i = 0; i < TOY_VOCAB * TOY_HIDDEN; i++)
        table[i] = value_at(i);
    make_adapter_config(made, config);
    make_adapter_add_pair(made, "base_model.model.lm_head", 2, TOY_HIDDEN, TOY_VOCAB, 1);
    copy = make_adapter_add(made, "base_model.model.lm_head.base_layer.weight", "F32", 2, TOY_VOCAB,
                            TOY_HIDDEN);
    memcpy(copy, table, sizeof table);
    toy_refused(made, &options, "base-unavailable", "lm_head", "was not given", "no witness");
    options.served_head = &head;
    options.base_dir = "/nonexistent"; /* which is not looked into */
    sp_adapter_release(toy_opened(made, &options));
    copy[77] += 0.5f;
    toy_refused(made, &options, "base-copy-differs", NULL, "row 9", "another base");
    head.approximate = true;
    toy_refused(made, &options, "base-copy-differs", NULL, "row 9", "more than noise");
    copy[77] -= 0.45f;
    sp_adapter_release(toy_opened(made, &options));
    head.rows--;
    toy_refused(made, &options, "base-unavailable", "lm_head", "shape", "of another shape");
    make_adapter_destroy(made);
    sp_geometry_release(options.geometry);
}

/* ---- a device's memory ----------------------------------------------------------------------- */

static const sp_device_ops *cpu_ops;
static int32_t reads_left = -1; /* that succeed; -1: all */

/* "Device memory" lies one page before its address, so that nobody else can read it by luck. */
static sp_status read_shifted(sp_device *device, void *to, const void *from, size_t bytes)
{
    (void)device;
    if (reads_left == 0)
        return SP_ERR_DEVICE;
    memcpy(to, (const char *)from - 4096, bytes);
    return SP_OK;
}

static void views_of_device_memory(void **state)
{
    sp_adapter_options options = toy_options();
    sp_device *device;
    sp_device_ops ops;
    held *h = hold();
    sp_adapter *host, *memory = NULL, *again = NULL;
    sp_error error;

    (void)state;
    assert_ok(sp_device_open("cpu", NULL, &device, NULL), NULL);
    assert_ok(from_held(h, &options, &host, &error), &error);
    cpu_ops = device->ops;
    ops = *cpu_ops;
    ops.kind = SP_DEVICE_CUDA;
    ops.read = read_shifted;
    device->ops = &ops;
    for (int i = 0; i < 2; i++) {
        h->views[i].device_kind = i == 0 ? SP_VIEW_CUDA : SP_VIEW_CUDA_MANAGED;
        h->views[i].data = (const char *)h->views[i].data + 4096;
    }
    refused(h, &options, SP_ERR_ARGUMENT, "", "views_on");
    options.views_on = device;
    assert_ok(from_held(h, &options, &memory, &error), &error);
    assert_same_adapters(host, memory);
    reads_left = 0;
    refused(h, &options, SP_ERR_DEVICE, "", "could not be copied");
    reads_left = -1;
    h->views[1].device_index = 1;
    refused(h, &options, SP_ERR_ARGUMENT, "", "is on GPU 1");
    memcpy(device->name, "cuda:1", sizeof "cuda:1");
    refused(h, &options, SP_ERR_ARGUMENT, "", "is on GPU 0, and views_on is cuda:1");
    h->views[0].device_index = 1;
    assert_ok(from_held(h, &options, &again, &error), &error);
    assert_same_adapters(host, again);
    device->ops = cpu_ops;
    refused(h, &options, SP_ERR_ARGUMENT, "", "views_on"); /* the CPU is no GPU */
    sp_adapter_release(host);
    sp_adapter_release(memory);
    sp_adapter_release(again);
    sp_device_close(device);
    sp_free(h);
    sp_geometry_release(options.geometry);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_fixtures_are_the_same_from_memory),
        cmocka_unit_test(architectures_are_the_same_from_memory),
        cmocka_unit_test(transposed_f32_views_are_the_folder_with_these_bytes),
        cmocka_unit_test(long_rows_go_over_the_borders_of_pieces),
        cmocka_unit_test(wrong_strides_are_named),
        cmocka_unit_test(wrong_views_are_named),
        cmocka_unit_test(strides_of_single_rows_do_not_matter),
        cmocka_unit_test(wrong_calls_are_named),
        cmocka_unit_test(ranks_and_scales_beyond_all_bounds),
        cmocka_unit_test(every_allocation_that_fails_is_given_back),
        cmocka_unit_test(a_copied_head_is_held_against_the_served_one),
        cmocka_unit_test(views_of_device_memory),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
