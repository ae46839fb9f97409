/*
 * Every linear module of the known families, those of gated delta nets and of shared experts
 * included: a delta lands there, once, with the tree's rounding points, against sums in double.
 */
#include "base/half.h"
#include "kernels/cpu/kernels.h"
#include "support/delta_call.h"
#include "support/hand.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 11, RANK = 5, WIDTH_MAX = 48 };

/* A width for each module: odd ones, and 1 for the shared expert's gate. */
static site_dims dims_of(sp_module module)
{
    site_dims dims = {0, module, 17 + (int32_t)module, 20 + 23 * (int32_t)module % 27};

    if (module == SP_MODULE_SHARED_EXPERT_GATE)
        dims.n_out = 1;
    return dims;
}

static size_t list_sites(site_dims *out)
{
    size_t n = 0;

    for (int m = 0; m < SP_MODULE_COUNT; m++)
        if (sp_known_modules[m].kind == SP_SITE_LINEAR)
            out[n++] = dims_of((sp_module)m);
    return n;
}

static double rounded(sp_dtype dtype, double value)
{
    return dtype == SP_DTYPE_BF16 ? (double)sp_bf16_to_f32(sp_f32_to_bf16((float)value)) : value;
}

static double want_at(const sp_adapter_site *site, sp_dtype dtype, const void *x, int32_t row,
                      int32_t n, double y)
{
    int32_t k_in = site->a.cols;
    double delta = 0;

    for (int32_t j = 0; j < RANK; j++) {
        double xa = 0;

        for (int32_t k = 0; k < k_in; k++)
            xa += hand_load(dtype, x, (int64_t)row * k_in + k) *
                  hand_load(dtype, site->a.data, (int64_t)j * k_in + k);
        delta += rounded(dtype, xa) * hand_load(dtype, site->b.data, (int64_t)n * RANK + j);
    }
    return rounded(dtype, y + (double)site->scale * rounded(dtype, delta));
}

/* One site: rows of the adapter and of the base in turn. Returns the relative error. */
static double check_site(sp_delta *delta, const sp_plan *plan, const hand_pool *pool,
                         const sp_adapter_site *site, const site_dims *dims, sp_dtype dtype)
{
    static float x[ROWS * WIDTH_MAX], y[ROWS * WIDTH_MAX], y0[ROWS * WIDTH_MAX];
    sp_test_random random = {(uint64_t)dims->module};
    sp_delta_output output = {sizeof output, known_site(pool->geometry, 0, dims->module), y,
                              dims->n_out, dtype};
    double off = 0, norm = 0;

    for (int32_t i = 0; i < ROWS * dims->k_in; i++)
        hand_store(dtype, x, i, (double)sp_test_float(&random));
    for (int32_t i = 0; i < ROWS * dims->n_out; i++)
        hand_store(dtype, y, i, (double)sp_test_float(&random));
    memcpy(y0, y, sizeof y);
    assert_ok(hand_apply(delta, plan, dtype, x, dims->k_in, &output, 1), NULL);
    for (int32_t row = 0; row < ROWS; row++) {
        for (int32_t n = 0; n < dims->n_out; n++) {
            int64_t at = (int64_t)row * dims->n_out + n;
            double got = hand_load(dtype, y, at), before = hand_load(dtype, y0, at);
            double want = row % 2 ? want_at(site, dtype, x, row, n, before) : before;

            off += (got - want) * (got - want);
            norm += want * want;
            if (row % 2 == 0)
                assert_true(got == before);
        }
    }
    return sqrt(off / norm);
}

static void check_level(const hand_pool *pool, const hand_adapter *adapter, const site_dims *sites,
                        sp_slot_handle handle, const char *level, sp_dtype dtype)
{
    sp_delta_options options;
    sp_delta *delta;
    sp_plan *plan;
    int32_t slots[ROWS];
    double worst = 0;

    for (int32_t i = 0; i < ROWS; i++)
        slots[i] = i % 2 ? handle.slot : SP_SLOT_BASE;
    sp_delta_options_default(&options, sizeof options);
    options.pool = pool->pool;
    options.rows_max = ROWS;
    options.cpu_isa = level;
    assert_ok(sp_delta_create(&options, &delta, NULL), NULL);
    assert_ok(sp_plan_create(ROWS, 1, &plan, NULL), NULL);
    hand_plan_rows(plan, pool->pool, slots, NULL, ROWS);
    for (int32_t i = 0; i < adapter->n_sites; i++) {
        double error = check_site(delta, plan, pool, &adapter->sites[i], &sites[i], dtype);

        if (error > (dtype == SP_DTYPE_BF16 ? 4e-3 : 1e-5))
            fail_msg("%s at level %s: relative error %g", adapter->sites[i].module, level, error);
        worst = error > worst ? error : worst;
    }
    printf("%s, %s: %d modules, relative error at most %.2g\n", level, sp_dtype_name(dtype),
           (int)adapter->n_sites, worst);
    sp_plan_destroy(plan);
    sp_delta_destroy(delta);
}

static void every_linear_module(void **state)
{
    site_dims sites[SP_MODULE_COUNT];
    size_t n = list_sites(sites);
    static const sp_dtype dtypes[] = {SP_DTYPE_BF16, SP_DTYPE_F32};

    (void)state;
    assert_true(n >= 18); /* attention, FFN, shared expert and its gate, gated delta net */
    for (int t = 0; t < 2; t++) {
        hand_pool pool = hand_pool_create(sites, n, 8, dtypes[t], 1);
        hand_adapter *adapter = hand_adapter_create(1);
        sp_test_random random = {7};
        sp_slot_handle handle;

        for (size_t i = 0; i < n; i++)
            hand_adapter_add(adapter, &sites[i], RANK, 0.5f + (float)i / 8, dtypes[t], &random);
        handle = hand_load_adapter(&pool, adapter);
        for (const char *const *level = sp_kernels_levels(); *level != NULL; level++)
            check_level(&pool, adapter, sites, handle, *level, dtypes[t]);
        hand_unload(pool.pool, handle);
        hand_adapter_destroy(adapter);
        hand_pool_destroy(&pool);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_linear_module)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
