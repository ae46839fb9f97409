/*
 * From an adapter's files to y, with numbers that can be worked out in the head: all factors and x
 * are ones, k = 4, so that xa = 4 for each rank and an element of y is scale · r · 4.
 */
#include "support/delta_call.h"
#include "support/hand.h"
#include "support/make_adapter.h"

#include "base/alloc.h"

#include <sidepath/delta.h>

#include <stdio.h>

enum { K = 4, N = 3 };

static const site_dims sites[] = {{0, SP_MODULE_Q_PROJ, K, N}, {0, SP_MODULE_V_PROJ, K, N}};

static void add_ones(make_adapter *adapter, const char *module, int rank)
{
    char name[128];
    float *a, *b;

    snprintf(name, sizeof name, "model.layers.0.self_attn.%s.lora_A.weight", module);
    a = make_adapter_add(adapter, name, "F32", 2, rank, K);
    snprintf(name, sizeof name, "model.layers.0.self_attn.%s.lora_B.weight", module);
    b = make_adapter_add(adapter, name, "F32", 2, N, rank);
    for (int i = 0; i < rank * K; i++)
        a[i] = 1;
    for (int i = 0; i < N * rank; i++)
        b[i] = 1;
}

/* Opens the adapter for the pool and loads it into slot 0; returns its sites' y of one row. */
static void apply(const make_adapter *made, float request_scale, float y[2][N])
{
    char *folder = make_adapter_folder(made);
    hand_pool pool = hand_pool_create(sites, 2, 16, SP_DTYPE_F32, 1);
    const float x[K] = {1, 1, 1, 1};
    sp_delta_output outputs[] = {{sizeof(sp_delta_output), 0, y[0], N, SP_DTYPE_F32},
                                 {sizeof(sp_delta_output), 1, y[1], N, SP_DTYPE_F32}};
    sp_adapter_options options;
    sp_delta_options delta_options;
    sp_adapter *adapter;
    sp_image *image;
    sp_delta *delta;
    sp_plan *plan;
    sp_error error;
    sp_slot_handle handle;

    sp_adapter_options_default(&options, sizeof options);
    options.geometry = pool.geometry;
    options.pool_dtype = SP_DTYPE_F32;
    assert_ok(sp_adapter_open(folder, &options, &adapter, &error), &error);
    assert_ok(sp_layout_pack(pool.layout, adapter, NULL, &image, &error), &error);
    assert_ok(sp_pool_load(pool.pool, image, &handle, &error), &error);
    sp_delta_options_default(&delta_options, sizeof delta_options);
    delta_options.pool = pool.pool;
    delta_options.exec = hand_exec(1);
    delta_options.rows_max = 1;
    assert_ok(sp_delta_create(&delta_options, &delta, &error), &error);
    assert_ok(sp_plan_create(1, 1, &plan, NULL), NULL);
    hand_plan_rows(plan, pool.pool, &handle.slot, &request_scale, 1);
    for (int i = 0; i < 2 * N; i++)
        y[i / N][i % N] = 0;
    assert_ok(hand_apply(delta, plan, SP_DTYPE_F32, x, K, outputs, 2), NULL);
    sp_plan_destroy(plan);
    sp_delta_destroy(delta);
    sp_exec_destroy(delta_options.exec);
    sp_image_destroy(image);
    sp_adapter_release(adapter);
    hand_pool_destroy(&pool);
    sp_test_remove_tree(folder);
    sp_free(folder);
}

static const struct {
    const char *config;
    int rank_q, rank_v;
    float request, q, v; /* an element of y */
} cases[] = {
    {"{\"r\": 8, \"lora_alpha\": 16}", 8, 8, 1, 64, 64},
    {"{\"r\": 16, \"lora_alpha\": 16}", 16, 16, 1, 64, 64},
    {"{\"r\": 16, \"lora_alpha\": 16, \"use_rslora\": true}", 16, 16, 1, 256, 256}, /* 4 times */
    {"{\"r\": 8, \"lora_alpha\": 16, \"rank_pattern\": {\"q_proj\": 4}}", 4, 8, 1, 64, 64},
    {"{\"r\": 8, \"lora_alpha\": 16, \"rank_pattern\": {\"q_proj\": 4}, \"alpha_pattern\": "
     "{\"q_proj\": 2, \"v_proj\": 1}}",
     4, 8, 1, 8, 4},
    {"{\"r\": 8, \"lora_alpha\": 16}", 8, 8, 0.25f, 16, 16}, /* times the request's */
};

static void scales_arrive(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        make_adapter *adapter = make_adapter_create();
        float y[2][N];

        make_adapter_config(adapter, cases[i].config);
        add_ones(adapter, "q_proj", cases[i].rank_q);
        add_ones(adapter, "v_proj", cases[i].rank_v);
        apply(adapter, cases[i].request, y);
        for (int n = 0; n < N; n++) {
            assert_true(y[0][n] == cases[i].q);
            assert_true(y[1][n] == cases[i].v);
        }
        make_adapter_destroy(adapter);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(scales_arrive)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
