/*
 * test_archs.c: adapters that PEFT saved of Falcon, Gemma 3, GLM-4, GPT-2, GPT-NeoX and Phi-3, from
 * their files to the delta of every site, against PEFT's own deltas.
 */
#include "support/archs.h"
#include "support/hand.h"

#include <sidepath/delta.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 5, WIDTH_MAX = 256 };

typedef struct rig {
    sp_layout *layout;
    sp_device *device;
    sp_pool *pool;
    sp_exec *exec;
    sp_delta *delta;
    sp_plan *plan;
    sp_slot_handle handle;
} rig;

static rig make_rig(const arch *a, const sp_adapter *adapter, sp_dtype dtype)
{
    sp_layout_options layout;
    sp_delta_options delta;
    sp_pool_options pool;
    sp_image *image;
    sp_error error;
    rig r;

    sp_layout_options_default(&layout, sizeof layout);
    layout.geometry = a->geometry;
    layout.modules = sp_geometry_modules(a->geometry);
    layout.rank = sp_adapter_rank_max(adapter);
    layout.dtype = dtype;
    assert_ok(sp_layout_create(&layout, &r.layout, &error), &error);
    assert_ok(sp_device_open("cpu", NULL, &r.device, &error), &error);
    sp_pool_options_default(&pool, sizeof pool);
    pool.layout = r.layout;
    pool.device = r.device;
    pool.slots = 1;
    assert_ok(sp_pool_create(&pool, &r.pool, &error), &error);
    assert_ok(sp_layout_pack(r.layout, adapter, NULL, &image, &error), &error);
    assert_ok(sp_pool_load(r.pool, image, &r.handle, &error), &error);
    sp_image_destroy(image);
    r.exec = hand_exec(1);
    sp_delta_options_default(&delta, sizeof delta);
    delta.pool = r.pool;
    delta.exec = r.exec;
    delta.rows_max = ROWS;
    assert_ok(sp_delta_create(&delta, &r.delta, &error), &error);
    assert_ok(sp_plan_create(ROWS, 1, &r.plan, &error), &error);
    assert_ok(sp_plan_build(r.plan, r.pool,
                            &(sp_route_span){.struct_bytes = sizeof(sp_route_span),
                                             .n_rows = ROWS,
                                             .handle = r.handle,
                                             .scale = 1},
                            1, ROWS, &error),
              &error);
    return r;
}

static void free_rig(rig *r)
{
    sp_plan_destroy(r->plan);
    sp_delta_destroy(r->delta);
    sp_exec_destroy(r->exec);
    assert_ok(sp_pool_release(r->pool, r->handle, NULL), NULL);
    sp_pool_destroy(r->pool);
    sp_device_close(r->device);
    sp_layout_release(r->layout);
}

/* |y - delta| / |delta| over all rows of a site, y from 0. */
static double site_error(const arch *a, const rig *r, int32_t number, sp_dtype dtype)
{
    static uint32_t x[ROWS * WIDTH_MAX]; /* of either type */
    static float y[ROWS * WIDTH_MAX];
    sp_site site = {.struct_bytes = sizeof site};
    const golden_tensor *from, *want;
    double off = 0, size = 0;
    sp_delta_output output;
    sp_delta_call call;
    sp_error error;

    assert_ok(sp_geometry_site_at(a->geometry, number, &site, &error), &error);
    from = golden_get(a->golden, "%s.x", site.path);
    want = golden_get(a->golden, "%s.delta", site.path);
    assert_int_equal(from->n, ROWS * site.k_in);
    assert_int_equal(want->n, ROWS * site.n_out);
    assert_true(site.k_in <= WIDTH_MAX && site.n_out <= WIDTH_MAX);
    for (int64_t i = 0; i < from->n; i++)
        hand_store(dtype, x, i, golden_value(from, i));
    memset(y, 0, sizeof y);
    output = (sp_delta_output){.struct_bytes = sizeof output,
                               .site = number,
                               .y = y,
                               .y_stride = site.n_out,
                               .y_type = SP_DTYPE_F32};
    call = (sp_delta_call){.struct_bytes = sizeof call,
                           .plan = r->plan,
                           .x = x,
                           .x_stride = site.k_in,
                           .x_type = dtype,
                           .outputs = &output,
                           .n_outputs = 1};
    assert_ok(sp_delta_apply(r->delta, &call, &error), &error);
    for (int64_t i = 0; i < want->n; i++) {
        off += pow((double)y[i] - golden_value(want, i), 2);
        size += pow(golden_value(want, i), 2);
    }
    assert_true(size > 0);
    return sqrt(off / size);
}

/* Relative L2 per site that F32 and bf16 rounding stay below. */
static void deltas_are_those_of_peft(void **state)
{
    static const struct {
        sp_dtype dtype;
        double tolerance;
    } pools[] = {{SP_DTYPE_F32, 1e-6}, {SP_DTYPE_BF16, 1e-2}};

    (void)state;
    for (int i = 0; i < N_ARCHS; i++) {
        arch a = arch_open(arch_names[i]);

        for (int p = 0; p < 2; p++) {
            sp_adapter *adapter = arch_adapter(&a, pools[p].dtype);
            rig r = make_rig(&a, adapter, pools[p].dtype);

            for (int32_t site = 0; site < a.n_sites; site++) {
                double off = site_error(&a, &r, site, pools[p].dtype);

                if (!(off <= pools[p].tolerance))
                    fail_msg("%s, site %d, pool %d: %g", a.name, site, p, off);
            }
            free_rig(&r);
            sp_adapter_release(adapter);
        }
        arch_close(&a);
    }
}

/* Every row of sites.json is adapted, in its order. */
static void every_site_is_found(void **state)
{
    (void)state;
    for (int i = 0; i < N_ARCHS; i++) {
        arch a = arch_open(arch_names[i]);
        sp_adapter *adapter = arch_adapter(&a, SP_DTYPE_F32);

        assert_int_equal(sp_adapter_n_sites(adapter), a.n_sites);
        assert_int_equal(sp_adapter_modules(adapter), sp_geometry_modules(a.geometry));
        assert_int_equal(sp_layout_pair_modules(adapter), sp_geometry_modules(a.geometry));
        for (int32_t s = 0; s < a.n_sites; s++) {
            const sp_adapter_site *site = sp_adapter_site_at(adapter, (size_t)s);
            sp_site row = {.struct_bytes = sizeof row};

            assert_ok(sp_geometry_site_at(a.geometry, s, &row, NULL), NULL);
            assert_int_equal(site->site, s);
            assert_string_equal(site->path, row.path);
            assert_string_equal(site->module, row.module);
            assert_int_equal(site->layer, row.layer);
            assert_int_equal(site->kind, row.kind);
            assert_int_equal(site->a.cols, row.k_in);
            assert_int_equal(site->b.rows, row.n_out);
        }
        sp_adapter_release(adapter);
        arch_close(&a);
    }
}

/* Ranks and scales by hand from the configs: rank patterns, alpha patterns, rsLoRA. */
static void ranks_and_scales(void **state)
{
    static const struct {
        const char *arch, *path;
        int32_t rank;
        double scale;
    } cases[] = {
        {"falcon", "transformer.h.2.self_attention.dense", 4, 2.0},
        {"gemma3_text", "model.layers.0.self_attn.q_proj", 4, 3.0}, /* 6 / sqrt 4 */
        {"glm4", "model.layers.0.self_attn.o_proj", 5, 1.6},        /* the first pattern wins */
        {"glm4", "model.layers.1.self_attn.o_proj", 7, 8.0 / 7},
        {"glm4", "model.layers.1.mlp.gate_up_proj", 4, 5.0},
        {"gpt2", "transformer.h.0.attn.c_proj", 2, 6.0},
        {"gpt2", "transformer.h.0.mlp.c_proj", 6, 2.0},
        {"gpt2", "transformer.h.1.mlp.c_proj", 8, 1.5},
        {"gpt2", "transformer.h.1.mlp.c_fc", 6, 0.5},
        {"gpt_neox", "gpt_neox.layers.1.attention.dense", 5, 4.9193495504995377}, /* 11 / sqrt 5 */
        {"gpt_neox", "gpt_neox.layers.1.mlp.dense_h_to_4h", 5, 3.1304951684997055},
        {"phi3", "model.layers.0.mlp.gate_up_proj", 4, 4.0},
        {"phi3", "lm_head", 8, 2.0},
    };

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        arch a = arch_open(cases[i].arch);
        sp_adapter *adapter = arch_adapter(&a, SP_DTYPE_F32);
        int32_t number = sp_geometry_find(a.geometry, cases[i].path);
        const sp_adapter_site *site = sp_adapter_site_at(adapter, (size_t)number);

        assert_int_equal(site->rank, cases[i].rank);
        assert_true(site->scale == (float)cases[i].scale);
        sp_adapter_release(adapter);
        arch_close(&a);
    }
}

static void check_words(const char *arch_name, const char *const *words, size_t n)
{
    arch a = arch_open(arch_name);
    sp_adapter *adapter = arch_adapter(&a, SP_DTYPE_BF16);
    sp_receipt_options options;
    sp_receipt *receipt;
    sp_error error;

    sp_receipt_options_default(&options, sizeof options);
    assert_ok(sp_receipt_create(adapter, &options, &receipt, &error), &error);
    for (size_t i = 0; i < n; i++) {
        if (!strstr(sp_receipt_json(receipt), words[i]))
            fail_msg("no %s in %s", words[i], sp_receipt_json(receipt));
    }
    assert_true(sp_receipt_is_servable(receipt, NULL));
    sp_receipt_destroy(receipt);
    sp_adapter_release(adapter);
    arch_close(&a);
}

/* Receipts are by the module's name, and say what was left out. */
static void receipts(void **state)
{
    static const char *const gpt2[] = {
        "\"verdict\": \"accepted\"", "\"sites\": 8", "\"attn.c_proj\": {\"sites\": 2, \"rank\": 2",
        ("{\"rank\": 6, \"scale\": 2, \"sites\": 1, \"layers\": [0]}, "
         "{\"rank\": 8, \"scale\": 1.5, \"sites\": 1, \"layers\": [1]}"),
        "fan_in_fan_out"};
    static const char *const phi3[] = {
        "\"self_attn.qkv_proj\": {\"sites\": 2", "\"lm_head\": {\"sites\": 1",
        "{\"tensor\": \"base_model.model.lm_head.base_layer.weight\", \"reason\": "};
    static const char *const falcon[] = {"\"self_attention.query_key_value\": {\"sites\": 2",
                                         "\"layers\": [0, 2]"};

    (void)state;
    check_words("gpt2", gpt2, 5);
    check_words("phi3", phi3, 3);
    check_words("falcon", falcon, 2);
}

/* A pool of some modules refuses an adapter of others by the module's name. */
static void a_pool_of_some_modules(void **state)
{
    arch a = arch_open("gpt_neox");
    sp_adapter *adapter = arch_adapter(&a, SP_DTYPE_BF16);
    sp_layout_options options;
    sp_layout *layout;
    sp_image *image = NULL;
    sp_error error;

    (void)state;
    sp_layout_options_default(&options, sizeof options);
    options.geometry = a.geometry;
    options.rank = 8;
    assert_ok(sp_module_set_parse(a.geometry, "dense,query_key_value", &options.modules, &error),
              &error);
    assert_ok(sp_layout_create(&options, &layout, &error), &error);
    assert_int_equal(sp_layout_n_sites(layout), 4);
    assert_int_equal(
        sp_layout_find(layout, sp_geometry_find(a.geometry, "gpt_neox.layers.1.mlp.dense_h_to_4h")),
        -1);
    assert_int_equal(sp_layout_pack(layout, adapter, NULL, &image, &error), SP_ERR_REFUSED);
    assert_string_equal(error.code, "module-not-in-pool");
    assert_string_equal(error.subject, "mlp.dense_h_to_4h");
    assert_null(image);
    sp_layout_release(layout);
    sp_adapter_release(adapter);
    arch_close(&a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(deltas_are_those_of_peft), cmocka_unit_test(every_site_is_found),
        cmocka_unit_test(ranks_and_scales),         cmocka_unit_test(receipts),
        cmocka_unit_test(a_pool_of_some_modules),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
