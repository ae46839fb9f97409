/*
 * test_cuda_expert_pool.c: experts and a router through sp_delta over a pool on a GPU, against the
 * same pool on the CPU; and by bytes, sorted rows against gathered ones, windows against one,
 * deltas by themselves against those that were added, and both halves of a router's delta against
 * the whole. Skipped where there is no GPU.
 */
#include "base/half.h"
#include "cuda/gpu_main.h"
#include "support/hand.h"

#include <sidepath/experts.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { HIDDEN = 72, INNER = 40, EXPERTS = 6, TOP_K = 2, ADAPTERS = 3, TOKENS = 50, MAPS = 4 };
enum { PAIRS = TOKENS * TOP_K, ROUTER = 3, BASE = ADAPTERS };

static sp_device *gpu;

/* Gate, up, down, the router; and a linear site, as a layout has one. */
static const site_dims dims[] = {
    {0, SP_MODULE_EXPERT_GATE_PROJ, HIDDEN, INNER},
    {0, SP_MODULE_EXPERT_UP_PROJ, HIDDEN, INNER},
    {0, SP_MODULE_EXPERT_DOWN_PROJ, INNER, HIDDEN},
    {0, SP_MODULE_ROUTER, HIDDEN, EXPERTS},
    {0, SP_MODULE_Q_PROJ, HIDDEN, 16},
};
enum { N_DIMS = sizeof dims / sizeof *dims };

typedef struct layer {
    sp_device *device;
    sp_geometry *geometry;
    sp_layout *layout;
    sp_pool *pool;
    hand_adapter *adapters[ADAPTERS];
    char paths[ADAPTERS][EXPERTS * 3][KNOWN_PATH_BYTES];
    sp_slot_handle handles[ADAPTERS];
} layer;

/* What every run reads, on the host, rows of experts by pair. */
typedef struct rows {
    int32_t adapter[TOKENS], expert[PAIRS];
    float scale[TOKENS];
    uint16_t x[TOKENS * HIDDEN], inner[PAIRS * INNER];
    float y[MAPS][PAIRS * HIDDEN];
} rows;

/* ---- pools --------------------------------------------------------------------------------- */

/* The first adapter adapts every expert, the second two of three, the third one; it has no router.
 */
static bool is_adapted(int32_t adapter, int32_t map, int32_t expert)
{
    return adapter == 0 || (adapter == 1 ? (expert + map) % 3 != 0 : expert == 4);
}

static void add_experts(layer *l, int32_t index, sp_test_random *random)
{
    int32_t n = 0;

    for (int32_t map = 0; map < 3; map++)
        for (int32_t e = 0; e < EXPERTS; e++) {
            sp_adapter_site *site;

            if (!is_adapted(index, map, e))
                continue;
            site = hand_adapter_add(l->adapters[index], &dims[map], 1 + (e * 7 + map) % 20,
                                    0.25f * (float)(e + 1), SP_DTYPE_BF16, random);
            known_path(0, dims[map].module, e, l->paths[index][n]);
            site->path = l->paths[index][n++];
            site->expert = e;
        }
}

static void open_pool(layer *l)
{
    hand_pool pool = {l->geometry, l->layout, l->device, NULL, true};
    sp_image *images[ADAPTERS];
    sp_pool_options options;
    sp_error error;

    sp_pool_options_default(&options, sizeof options);
    options.layout = l->layout;
    options.device = l->device;
    options.slots = ADAPTERS;
    for (int32_t i = 0; i < ADAPTERS; i++) {
        images[i] = hand_pack(&pool, l->adapters[i]);
        options.expert_bytes += sp_image_expert_bytes(images[i]);
    }
    assert_ok(sp_pool_create(&options, &l->pool, &error), &error);
    for (int32_t i = 0; i < ADAPTERS; i++) {
        assert_ok(sp_pool_load(l->pool, images[i], &l->handles[i], &error), &error);
        sp_image_destroy(images[i]);
    }
}

static layer *layer_open(sp_device *device)
{
    layer *l = calloc(1, sizeof *l);
    sp_test_random random = {77};
    sp_layout_options options;
    sp_error error;

    assert_non_null(l);
    l->device = device;
    l->geometry = known_geometry(EXPERTS, dims, N_DIMS);
    sp_layout_options_default(&options, sizeof options);
    options.geometry = l->geometry;
    options.rank = 16;
    options.dtype = SP_DTYPE_BF16;
    assert_ok(sp_layout_create(&options, &l->layout, &error), &error);
    for (int32_t i = 0; i < ADAPTERS; i++) {
        l->adapters[i] = hand_adapter_create((uint64_t)i + 1);
        hand_adapter_add(l->adapters[i], &dims[N_DIMS - 1], 4, 1.0f, SP_DTYPE_BF16, &random);
        if (i < 2)
            hand_adapter_add(l->adapters[i], &dims[ROUTER], 5 + 6 * i, 0.5f, SP_DTYPE_BF16,
                             &random);
        add_experts(l, i, &random);
    }
    open_pool(l);
    return l;
}

static void layer_close(layer *l)
{
    for (int32_t i = 0; i < ADAPTERS; i++) {
        assert_ok(sp_pool_release(l->pool, l->handles[i], NULL), NULL);
        hand_adapter_destroy(l->adapters[i]);
    }
    sp_pool_destroy(l->pool);
    sp_layout_release(l->layout);
    sp_geometry_release(l->geometry);
    free(l);
}

/* ---- rows ---------------------------------------------------------------------------------- */

static void fill_rows(rows *r)
{
    sp_test_random random = {5};

    for (int32_t i = 0; i < TOKENS; i++) {
        r->adapter[i] = (int32_t)sp_test_below(&random, ADAPTERS + 1);
        r->scale[i] = i % 9 == 0 ? 0.0f : 0.5f + 0.25f * (float)(i % 3);
        for (int32_t k = 0; k < TOP_K; k++)
            r->expert[i * TOP_K + k] = i % 11 == 0 ? -1 : (int32_t)sp_test_below(&random, EXPERTS);
    }
    for (int32_t i = 0; i < TOKENS * HIDDEN; i++)
        hand_store(SP_DTYPE_BF16, r->x, i, (double)sp_test_float(&random));
    for (int32_t i = 0; i < PAIRS * INNER; i++)
        hand_store(SP_DTYPE_BF16, r->inner, i, (double)sp_test_float(&random));
    for (int32_t map = 0; map < MAPS; map++)
        for (int32_t i = 0; i < PAIRS * HIDDEN; i++)
            r->y[map][i] = sp_test_float(&random);
}

static sp_plan *plan_of(const layer *l, const rows *r)
{
    sp_route_span *spans = calloc(TOKENS, sizeof *spans);
    sp_plan *plan = NULL;
    sp_error error;

    assert_non_null(spans);
    for (int32_t i = 0; i < TOKENS; i++) {
        sp_route_span_default(&spans[i], sizeof *spans);
        spans[i].scale = r->scale[i];
        if (r->adapter[i] != BASE)
            spans[i].handle = l->handles[r->adapter[i]];
    }
    assert_ok(sp_plan_create(TOKENS, ADAPTERS, &plan, &error), &error);
    assert_ok(sp_plan_build(plan, l->pool, spans, TOKENS, TOKENS, &error), &error);
    free(spans);
    return plan;
}

/* ---- a run --------------------------------------------------------------------------------- */

/* One delta's step; what was put is freed at its end. */
typedef struct run {
    const layer *l;
    sp_delta *delta;
    sp_plan *plan;
    void *blocks[32];
    int n_blocks;
} run;

static void *put(run *r, const void *data, size_t bytes)
{
    void *memory = NULL;
    sp_error error;

    assert_true(r->n_blocks < 32);
    assert_ok(sp_device_alloc(r->l->device, bytes, &memory, &error), &error);
    assert_ok(sp_device_write(r->l->device, memory, data, bytes, &error), &error);
    r->blocks[r->n_blocks++] = memory;
    return memory;
}

static run begin_run(const layer *l, const rows *of, int32_t window)
{
    run r = {.l = l, .plan = plan_of(l, of)};
    size_t before = sp_device_allocated_bytes(l->device);
    sp_delta_options options;
    sp_error error;

    sp_delta_options_default(&options, sizeof options);
    options.pool = l->pool;
    options.rows_max = TOKENS;
    options.expert_rows_max = window;
    assert_ok(sp_delta_create(&options, &r.delta, &error), &error);
    if (l->device == gpu)
        assert_int_equal(sp_device_allocated_bytes(gpu) - before,
                         sp_delta_device_bytes(l->pool, TOKENS, false) +
                             sp_delta_experts_device_bytes(l->pool, TOKENS, window, false));
    assert_ok(sp_delta_upload(r.delta, r.plan, NULL, &error), &error);
    assert_ok(sp_delta_start(r.delta, r.plan, NULL, &error), &error);
    return r;
}

static void end_run(run *r)
{
    sp_plan_destroy(r->plan);
    sp_delta_destroy(r->delta);
    while (r->n_blocks > 0)
        sp_device_free(r->l->device, r->blocks[--r->n_blocks]);
}

static sp_delta_output output_of(const layer *l, int32_t map, void *y)
{
    return (sp_delta_output){sizeof(sp_delta_output),
                             known_site(l->geometry, 0, dims[map].module) + (map < 3 ? map : 0), y,
                             HIDDEN, SP_DTYPE_F32};
}

/* Rows of `width` elements, by pair, in the form's order. */
static void *put_sorted(run *r, const void *by_pair, const int32_t *pair, int32_t n, size_t bytes)
{
    char *sorted = malloc((size_t)PAIRS * bytes);
    void *memory;

    assert_non_null(sorted);
    memcpy(sorted, by_pair, (size_t)PAIRS * bytes);
    for (int32_t i = 0; i < n; i++)
        memcpy(sorted + (size_t)i * bytes, (const char *)by_pair + (size_t)pair[i] * bytes, bytes);
    memory = put(r, sorted, (size_t)PAIRS * bytes);
    free(sorted);
    return memory;
}

/* The y of one module's call before it is folded: deltas by themselves, and their scales. */
typedef struct apart_rows {
    uint16_t delta[PAIRS * HIDDEN];
    float scale[PAIRS];
} apart_rows;

/* y with the deltas, as the host folds them. */
static void fold_apart(const apart_rows *from, float *y)
{
    for (int32_t row = 0; row < PAIRS; row++)
        for (int32_t i = row * HIDDEN; from->scale[row] != 0.0f && i < (row + 1) * HIDDEN; i++)
            y[i] = fmaf(from->scale[row], sp_bf16_to_f32(from->delta[i]), y[i]);
}

/* Reads y, [PAIRS, HIDDEN] in the form's order; with scales y is a delta by itself, and `before`
 * what it is folded into. Columns that the module does not have were 0 before. */
static void read_outputs(const layer *l, const sp_delta_output *output, const float *scales,
                         const float *before, float *y)
{
    static apart_rows apart;
    size_t bytes = (size_t)PAIRS * HIDDEN * sizeof *y;
    sp_error error;

    if (scales == NULL) {
        assert_ok(sp_device_read(l->device, y, output->y, bytes, &error), &error);
        return;
    }
    assert_ok(sp_device_read(l->device, apart.delta, output->y, sizeof apart.delta, &error),
              &error);
    assert_ok(sp_device_read(l->device, apart.scale, scales, sizeof apart.scale, &error), &error);
    assert_ok(sp_device_read(l->device, y, before, bytes, &error), &error);
    fold_apart(&apart, y);
}

/* The outputs of the experts, by pair, in out; with `apart` of deltas by themselves. */
static void run_experts(const layer *l, const rows *of, bool sorted, int32_t window, bool apart,
                        float out[3][PAIRS * HIDDEN])
{
    static const uint16_t zeros[PAIRS * HIDDEN];
    float *before[3], *scales[3] = {NULL};
    run r = begin_run(l, of, window);
    int32_t pair[PAIRS], first[EXPERTS + 1], n = PAIRS;
    sp_moe_rows form = {.struct_bytes = sizeof form,
                        .n_tokens = TOKENS,
                        .top_k = TOP_K,
                        .n_experts = EXPERTS,
                        .expert = of->expert};
    sp_delta_output outputs[3];
    sp_delta_experts_call call = {.struct_bytes = sizeof call,
                                  .x_stride = HIDDEN,
                                  .x_type = SP_DTYPE_BF16,
                                  .outputs = outputs,
                                  .n_outputs = 2};
    float *y = malloc(sizeof of->y[0]);
    sp_error error;

    assert_non_null(y);
    for (int32_t i = 0; i < PAIRS; i++)
        pair[i] = i;
    if (sorted) {
        assert_ok(sp_moe_rows_sort(&form, first, pair, &error), &error);
        n = form.n_rows = first[EXPERTS];
        form.row_pair = put(&r, pair, sizeof pair);
        form.expert_begin = put(&r, first, sizeof first);
    }
    form.expert = sorted ? NULL : put(&r, of->expert, sizeof of->expert);
    for (int32_t map = 0; map < 3; map++) {
        before[map] = put_sorted(&r, of->y[map], pair, n, HIDDEN * 4);
        outputs[map] = output_of(l, map, before[map]);
        if (apart) {
            scales[map] = put(&r, of->y[map], PAIRS * sizeof(float)); /* no row's, until cleared */
            outputs[map].y = put(&r, zeros, sizeof zeros);
            outputs[map].y_type = SP_DTYPE_BF16;
        }
    }
    call.scales = apart ? scales : NULL;
    call.x = put(&r, of->x, sizeof of->x);
    assert_ok(sp_delta_experts_begin(r.delta, r.plan, &form, NULL, &error), &error);
    assert_ok(sp_delta_experts_apply(r.delta, &call, &error), &error);
    call.x = put_sorted(&r, of->inner, pair, n, INNER * 2);
    call.x_stride = INNER;
    call.x_rows = SP_EXPERT_X_ROW;
    call.outputs = &outputs[2];
    call.n_outputs = 1;
    call.scales = apart ? &scales[2] : NULL;
    assert_ok(sp_delta_experts_apply(r.delta, &call, &error), &error);
    for (int32_t map = 0; map < 3; map++) {
        read_outputs(l, &outputs[map], scales[map], before[map], y);
        memcpy(out[map], of->y[map], sizeof of->y[0]);
        for (int32_t i = 0; i < n; i++)
            memcpy(out[map] + pair[i] * HIDDEN, y + i * HIDDEN, HIDDEN * sizeof *y);
    }
    free(y);
    end_run(&r);
}

/* The router's logits of all tokens. */
static void run_router(const layer *l, const rows *of, bool halves, float out[PAIRS * HIDDEN])
{
    run r = begin_run(l, of, 4096);
    sp_delta_output output = output_of(l, ROUTER, put(&r, of->y[ROUTER], sizeof of->y[ROUTER]));
    sp_delta_call call = {.struct_bytes = sizeof call,
                          .plan = r.plan,
                          .x = put(&r, of->x, sizeof of->x),
                          .x_stride = HIDDEN,
                          .x_type = SP_DTYPE_BF16,
                          .outputs = &output,
                          .n_outputs = 1};
    sp_error error;

    if (halves) {
        assert_ok(sp_delta_shrink(r.delta, &call, &error), &error);
        assert_ok(sp_delta_expand(r.delta, &call, &error), &error);
    } else
        assert_ok(sp_delta_apply(r.delta, &call, &error), &error);
    assert_ok(sp_device_read(l->device, out, output.y, sizeof of->y[0], &error), &error);
    end_run(&r);
}

/* ---- tests --------------------------------------------------------------------------------- */

/* Both round xa and the delta to bf16, so they are apart by a few of its units where a sum is at a
 * border. */
static void expect_near(const rows *of, int32_t map, const float *cpu, const float *got)
{
    int32_t changed = 0;

    for (int32_t row = 0; row < PAIRS; row++) {
        float largest = 0.0f;

        for (int32_t i = row * HIDDEN; i < (row + 1) * HIDDEN; i++)
            largest = fmaxf(largest, fabsf(cpu[i] - of->y[map][i]));
        changed += largest > 0.0f;
        for (int32_t i = row * HIDDEN; i < (row + 1) * HIDDEN; i++)
            if (!(fabsf(cpu[i] - got[i]) <= largest * 0.015f))
                fail_msg("map %d, row %d, column %d: %g on the GPU, %g on the CPU; before %g",
                         (int)map, (int)row, (int)(i % HIDDEN), (double)got[i], (double)cpu[i],
                         (double)of->y[map][i]);
    }
    assert_true(changed > TOKENS / 4);
}

static void small_experts_are_those_of_the_cpu(void **unused)
{
    static rows of;
    static float cpu[3][PAIRS * HIDDEN], want[3][PAIRS * HIDDEN], got[3][PAIRS * HIDDEN];
    static const int32_t windows[] = {4096, 33, 1};
    sp_device *host = NULL;
    layer *on_cpu, *on_gpu;

    (void)unused;
    fill_rows(&of);
    assert_ok(sp_device_open("cpu", NULL, &host, NULL), NULL);
    on_cpu = layer_open(host);
    on_gpu = layer_open(gpu);
    run_experts(on_cpu, &of, false, 4096, false, cpu);
    run_experts(on_gpu, &of, false, 4096, false, want);
    for (int32_t map = 0; map < 3; map++)
        expect_near(&of, map, cpu[map], want[map]);
    for (size_t i = 0; i < sizeof windows / sizeof *windows; i++)
        for (int sorted = 0; sorted < 2; sorted++) {
            run_experts(on_gpu, &of, sorted, windows[i], false, got);
            assert_memory_equal(got, want, sizeof want);
            run_experts(on_gpu, &of, sorted, windows[i], true, got);
            assert_memory_equal(got, want, sizeof want);
        }
    layer_close(on_gpu);
    layer_close(on_cpu);
    sp_device_close(host);
}

static void a_small_router_is_that_of_the_cpu(void **unused)
{
    static rows of;
    static float cpu[PAIRS * HIDDEN], want[PAIRS * HIDDEN], got[PAIRS * HIDDEN];
    sp_device *host = NULL;
    layer *on_cpu, *on_gpu;

    (void)unused;
    fill_rows(&of);
    assert_ok(sp_device_open("cpu", NULL, &host, NULL), NULL);
    on_cpu = layer_open(host);
    on_gpu = layer_open(gpu);
    run_router(on_cpu, &of, false, cpu);
    run_router(on_gpu, &of, false, want);
    run_router(on_gpu, &of, true, got);
    expect_near(&of, ROUTER, cpu, want);
    assert_memory_equal(got, want, sizeof want);
    layer_close(on_gpu);
    layer_close(on_cpu);
    sp_device_close(host);
}

static void small_scales_need_the_pools_type(void **unused)
{
    static rows of;
    layer *l = layer_open(gpu);
    run r;
    float *scales[1] = {NULL};
    sp_delta_output output;
    sp_delta_experts_call call = {.struct_bytes = sizeof call,
                                  .x_stride = HIDDEN,
                                  .x_type = SP_DTYPE_BF16,
                                  .outputs = &output,
                                  .n_outputs = 1,
                                  .scales = scales};
    sp_moe_rows form = {
        .struct_bytes = sizeof form, .n_tokens = TOKENS, .top_k = TOP_K, .n_experts = EXPERTS};
    sp_error error;

    (void)unused;
    fill_rows(&of);
    r = begin_run(l, &of, 4096);
    form.expert = put(&r, of.expert, sizeof of.expert);
    call.x = put(&r, of.x, sizeof of.x);
    output = output_of(l, 0, put(&r, of.y[0], sizeof of.y[0]));
    assert_ok(sp_delta_experts_begin(r.delta, r.plan, &form, NULL, &error), &error);
    assert_int_equal(sp_delta_experts_apply(r.delta, &call, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "scales");
    scales[0] = put(&r, of.scale, sizeof of.scale);
    assert_int_equal(sp_delta_experts_apply(r.delta, &call, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "y_type");
    end_run(&r);
    layer_close(l);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(small_experts_are_those_of_the_cpu),
        cmocka_unit_test(a_small_router_is_that_of_the_cpu),
        cmocka_unit_test(small_scales_need_the_pools_type),
    };

    return gpu_main(&gpu, tests, sizeof tests / sizeof tests[0], NULL, NULL, argc, argv);
}
