/*
 * three_adapters MODEL ADAPTER ADAPTER ADAPTER [SLOTS] (directories): applies three adapters to a
 * batch of rows in one call, each row with its own or none, and checks a row by hand, in double
 * from the tensors as stored. No model runs: this is a host's part at one layer, after its GEMM.
 *
 * Loading gives a handle that holds the adapter in its slot until it is released, and the plan is
 * built of handles. So with fewer SLOTS than adapters (2, say) the third load ends the program with
 * SP_POOL_FULL, and no row ever meets another's adapter.
 */
#include <sidepath/delta.h>

#include <stdio.h>
#include <stdlib.h>

enum { N_ADAPTERS = 3, N_ROWS = 7, LAYER = 0, BY_HAND = 4, WIDTH_MAX = 1024 };

/* The adapter of each row, in the order of the arguments. -1 is the base. */
static const int32_t row_adapter[N_ROWS] = {0, 1, -1, 2, 1, 0, 2};
static float x[N_ROWS][WIDTH_MAX], y[N_ROWS][WIDTH_MAX];
static sp_error error;

static void check(sp_status status)
{
    if (status == SP_OK)
        return;
    fprintf(stderr, "%s: %s\n", sp_status_name(status), error.text);
    exit(1);
}

static sp_pool *make_pool(sp_geometry *geometry, sp_device *device, int32_t slots)
{
    sp_layout_options layout_options;
    sp_pool_options pool_options;
    sp_pool *pool;

    sp_layout_options_default(&layout_options, sizeof layout_options);
    layout_options.geometry = geometry;
    layout_options.dtype = SP_DTYPE_F32; /* bf16 is for serving; this one is easy to check */
    sp_pool_options_default(&pool_options, sizeof pool_options);
    check(sp_layout_create(&layout_options, &pool_options.layout, &error));
    pool_options.device = device;
    pool_options.slots = slots;
    check(sp_pool_create(&pool_options, &pool, &error));
    sp_layout_release(pool_options.layout); /* the pool keeps it */
    return pool;
}

/* Files, checked adapter, packed image, slot. *handle holds it. */
static sp_adapter *load(sp_pool *pool, sp_geometry *geometry, const char *path,
                        sp_slot_handle *handle)
{
    sp_adapter_options options;
    sp_adapter *adapter;
    sp_image *image;

    sp_adapter_options_default(&options, sizeof options);
    options.geometry = geometry;
    check(sp_adapter_open(path, &options, &adapter, &error));
    check(sp_layout_pack(sp_pool_layout(pool), adapter, NULL, &image, &error));
    check(sp_pool_load(pool, image, handle, &error));
    sp_image_destroy(image);
    printf("slot %d: %s\n", (int)handle->slot, sp_adapter_name(adapter));
    return adapter;
}

/* One row a span, each with its adapter's handle. */
static sp_plan *make_plan(const sp_pool *pool, const sp_slot_handle *handles)
{
    sp_route_span spans[N_ROWS];
    sp_plan *plan;

    for (int i = 0; i < N_ROWS; i++) {
        sp_route_span_default(&spans[i], sizeof spans[i]);
        if (row_adapter[i] >= 0)
            spans[i].handle = handles[row_adapter[i]];
    }
    check(sp_plan_create(N_ROWS, sp_pool_slots(pool), &plan, &error));
    check(sp_plan_build(plan, pool, spans, N_ROWS, 0, &error));
    return plan;
}

/* Is y of row BY_HAND at output n scale * (x A^T) B^T? A [rank, k_in], B [n_out, rank], F32. */
static int is_right(const sp_adapter *adapter, int32_t number, int32_t n)
{
    const sp_adapter_site *site = sp_adapter_site_at(adapter, 0);
    double sum = 0;

    for (size_t i = 1; site->site != number; i++)
        site = sp_adapter_site_at(adapter, i);
    for (int32_t i = 0, k_in = site->a.cols; i < site->rank * k_in; i++)
        sum += (double)x[BY_HAND][i % k_in] * (double)((const float *)site->a.data)[i] *
               (double)((const float *)site->b.data)[n * site->rank + i / k_in];
    sum = sum * (double)site->scale - (double)y[BY_HAND][n];
    return y[BY_HAND][n] != 0 && sum < 1e-5 && sum > -1e-5;
}

int main(int argc, char **argv)
{
    sp_delta_output output = {
        .struct_bytes = sizeof output, .y = y, .y_stride = WIDTH_MAX, .y_type = SP_DTYPE_F32};
    sp_delta_call call = {.struct_bytes = sizeof call,
                          .x = x,
                          .x_stride = WIDTH_MAX,
                          .x_type = SP_DTYPE_F32,
                          .outputs = &output,
                          .n_outputs = 1};
    sp_site site = {.struct_bytes = sizeof site};
    sp_adapter *adapters[N_ADAPTERS];
    sp_slot_handle handles[N_ADAPTERS];
    sp_delta_options options;
    sp_exec_options threads;
    sp_geometry *geometry;
    sp_device *device;
    sp_delta *delta;
    sp_plan *plan;
    int32_t slots, n_right = 0;

    if (argc != 2 + N_ADAPTERS && argc != 3 + N_ADAPTERS)
        return 2;
    check(sp_geometry_open(argv[1], &geometry, &error));
    output.site = sp_geometry_find_module(geometry, LAYER, "self_attn.q_proj", -1);
    check(sp_geometry_site_at(geometry, output.site, &site, &error));
    check(sp_device_open("cpu", NULL, &device, &error));
    sp_exec_options_default(&threads, sizeof threads);
    sp_delta_options_default(&options, sizeof options);
    check(sp_exec_create(&threads, &options.exec, &error));
    slots = argc > 2 + N_ADAPTERS ? (int32_t)strtol(argv[2 + N_ADAPTERS], NULL, 10) : N_ADAPTERS;
    options.pool = make_pool(geometry, device, slots);
    for (int i = 0; i < N_ADAPTERS; i++)
        adapters[i] = load(options.pool, geometry, argv[2 + i], &handles[i]);
    check(sp_delta_create(&options, &delta, &error));
    call.plan = plan = make_plan(options.pool, handles);
    for (int i = 0; i < N_ROWS * WIDTH_MAX; i++)
        x[i / WIDTH_MAX][i % WIDTH_MAX] = (float)(i % 13) / 8 - 1;
    check(sp_delta_apply(delta, &call, &error));
    for (int32_t n = 0; n < site.n_out; n++)
        n_right += is_right(adapters[row_adapter[BY_HAND]], output.site, n);
    printf("row %d: %d of %d outputs are right\n", BY_HAND, (int)n_right, (int)site.n_out);
    sp_plan_destroy(plan);
    sp_delta_destroy(delta);
    for (int i = 0; i < N_ADAPTERS; i++)
        check(sp_pool_release(options.pool, handles[i], &error));
    sp_pool_destroy(options.pool);
    sp_exec_destroy(options.exec);
    for (int i = 0; i < N_ADAPTERS; i++)
        sp_adapter_release(adapters[i]);
    sp_device_close(device);
    sp_geometry_release(geometry);
    return n_right == site.n_out ? 0 : 1;
}
