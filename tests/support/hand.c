#include "support/hand.h"

#include "base/half.h"
#include "pool/image.h"

#include <stdlib.h>
#include <string.h>

/* ---- elements ------------------------------------------------------------------------------ */

void hand_store(sp_dtype dtype, void *tensor, int64_t index, double value)
{
    float single = (float)value;

    if (dtype == SP_DTYPE_F32)
        ((float *)tensor)[index] = single;
    else if (dtype == SP_DTYPE_BF16)
        ((uint16_t *)tensor)[index] = sp_f32_to_bf16(single);
    else
        ((uint16_t *)tensor)[index] = sp_f32_to_f16(single);
}

double hand_load(sp_dtype dtype, const void *tensor, int64_t index)
{
    if (dtype == SP_DTYPE_F32)
        return (double)((const float *)tensor)[index];
    if (dtype == SP_DTYPE_BF16)
        return (double)sp_bf16_to_f32(((const uint16_t *)tensor)[index]);
    return (double)sp_f16_to_f32(((const uint16_t *)tensor)[index]);
}

/* ---- adapters ------------------------------------------------------------------------------ */

hand_adapter *hand_adapter_create(uint64_t identity)
{
    hand_adapter *adapter = calloc(1, sizeof *adapter);

    assert_non_null(adapter);
    memcpy(adapter->digest.bytes, &identity, sizeof identity);
    return adapter;
}

void hand_adapter_destroy(hand_adapter *adapter)
{
    if (adapter == NULL)
        return;
    for (int32_t i = 0; i < adapter->n_sites; i++) {
        free((void *)(uintptr_t)adapter->sites[i].a.data);
        free((void *)(uintptr_t)adapter->sites[i].b.data);
        free(adapter->paths[i]);
    }
    free(adapter->paths);
    free(adapter->sites);
    free(adapter);
}

/* Blocks of the exact size, so that a sanitizer sees a read past a factor's end. */
static void *factor_block(int32_t rows, int32_t cols, sp_dtype dtype)
{
    void *block = malloc((size_t)rows * (size_t)cols * sp_dtype_bytes(dtype));

    assert_non_null(block);
    return block;
}

static sp_adapter_site *add_empty(hand_adapter *adapter, const site_dims *dims, int32_t rank,
                                  float scale, sp_dtype dtype, void *a, void *b)
{
    sp_adapter_site *sites =
        realloc(adapter->sites, ((size_t)adapter->n_sites + 1) * sizeof *sites);

    char **paths = realloc(adapter->paths, ((size_t)adapter->n_sites + 1) * sizeof *paths);
    char *path = malloc(KNOWN_PATH_BYTES);

    assert_true(sites != NULL && paths != NULL && path != NULL);
    known_path(dims->layer, dims->module, -1, path);
    paths[adapter->n_sites] = path;
    adapter->sites = sites;
    adapter->paths = paths;
    sites[adapter->n_sites] = (sp_adapter_site){
        .struct_bytes = sizeof *sites,
        .site = -1,
        .path = path,
        .module = sp_module_name(dims->module),
        .layer = dims->layer,
        .expert = -1,
        .kind = sp_known_modules[dims->module].kind,
        .rank = rank,
        .scale = scale,
        .a = {a, dtype, rank, dims->k_in, dims->k_in, 1},
        .b = {b, dtype, dims->n_out, rank, rank, 1},
    };
    return &sites[adapter->n_sites++];
}

sp_adapter_site *hand_adapter_add(hand_adapter *adapter, const site_dims *dims, int32_t rank,
                                  float scale, sp_dtype dtype, sp_test_random *random)
{
    void *a = factor_block(rank, dims->k_in, dtype), *b = factor_block(dims->n_out, rank, dtype);

    for (int64_t i = 0; i < (int64_t)rank * dims->k_in; i++)
        hand_store(dtype, a, i, (double)sp_test_float(random));
    for (int64_t i = 0; i < (int64_t)rank * dims->n_out; i++)
        hand_store(dtype, b, i, (double)sp_test_float(random));
    return add_empty(adapter, dims, rank, scale, dtype, a, b);
}

sp_adapter_site *hand_adapter_add_copy(hand_adapter *adapter, const site_dims *dims, int32_t rank,
                                       float scale, sp_dtype dtype, const void *a, const void *b)
{
    void *a_copy = factor_block(rank, dims->k_in, dtype);
    void *b_copy = factor_block(dims->n_out, rank, dtype);
    size_t element = sp_dtype_bytes(dtype);

    memcpy(a_copy, a, (size_t)rank * (size_t)dims->k_in * element);
    memcpy(b_copy, b, (size_t)rank * (size_t)dims->n_out * element);
    return add_empty(adapter, dims, rank, scale, dtype, a_copy, b_copy);
}

/* ---- pools --------------------------------------------------------------------------------- */

/* What a pool's layout is made from beside its rank and type. */
typedef struct pool_sites {
    const site_dims *sites;
    size_t n_sites, n_held;
    const sp_site_slice *slices;
    size_t n_slices;
} pool_sites;

static hand_pool create_pool(sp_device *device, const pool_sites *of, int32_t rank, sp_dtype dtype,
                             int32_t slots)
{
    hand_pool pool = {.device = device, .borrowed = true};
    sp_layout_options layout_options;
    sp_pool_options pool_options;
    sp_error error;

    pool.geometry = known_geometry(0, of->sites, of->n_sites);
    sp_layout_options_default(&layout_options, sizeof layout_options);
    layout_options.geometry = pool.geometry;
    for (size_t i = 0; i < of->n_held; i++)
        layout_options.modules |= known_bit(pool.geometry, of->sites[i].module);
    layout_options.slices = of->slices;
    layout_options.n_slices = of->n_slices;
    layout_options.rank = rank;
    layout_options.dtype = dtype;
    layout_options.images_for = device;
    assert_ok(sp_layout_create(&layout_options, &pool.layout, &error), &error);
    sp_pool_options_default(&pool_options, sizeof pool_options);
    pool_options.layout = pool.layout;
    pool_options.device = pool.device;
    pool_options.slots = slots;
    assert_ok(sp_pool_create(&pool_options, &pool.pool, &error), &error);
    return pool;
}

static hand_pool create_cpu_pool(const pool_sites *of, int32_t rank, sp_dtype dtype, int32_t slots)
{
    sp_device *device = NULL;
    hand_pool pool;

    assert_ok(sp_device_open("cpu", NULL, &device, NULL), NULL);
    pool = create_pool(device, of, rank, dtype, slots);
    pool.borrowed = false;
    return pool;
}

hand_pool hand_pool_create_part(const site_dims *sites, size_t n_sites, size_t n_held, int32_t rank,
                                sp_dtype dtype, int32_t slots)
{
    const pool_sites of = {sites, n_sites, n_held, NULL, 0};

    return create_cpu_pool(&of, rank, dtype, slots);
}

hand_pool hand_pool_create(const site_dims *sites, size_t n_sites, int32_t rank, sp_dtype dtype,
                           int32_t slots)
{
    return hand_pool_create_part(sites, n_sites, n_sites, rank, dtype, slots);
}

hand_pool hand_pool_create_sliced(const site_dims *sites, size_t n_sites, int32_t rank,
                                  sp_dtype dtype, int32_t slots, const sp_site_slice *slices,
                                  size_t n_slices)
{
    const pool_sites of = {sites, n_sites, n_sites, slices, n_slices};

    return create_cpu_pool(&of, rank, dtype, slots);
}

hand_pool hand_pool_create_on(sp_device *device, const site_dims *sites, size_t n_sites,
                              int32_t rank, sp_dtype dtype, int32_t slots)
{
    return hand_pool_create_sliced_on(device, sites, n_sites, rank, dtype, slots, NULL, 0);
}

hand_pool hand_pool_create_sliced_on(sp_device *device, const site_dims *sites, size_t n_sites,
                                     int32_t rank, sp_dtype dtype, int32_t slots,
                                     const sp_site_slice *slices, size_t n_slices)
{
    const pool_sites of = {sites, n_sites, n_sites, slices, n_slices};

    return create_pool(device, &of, rank, dtype, slots);
}

void hand_pool_destroy(hand_pool *pool)
{
    sp_pool_destroy(pool->pool);
    if (!pool->borrowed)
        sp_device_close(pool->device);
    sp_layout_release(pool->layout);
    sp_geometry_release(pool->geometry);
}

sp_image *hand_pack(const hand_pool *pool, const hand_adapter *adapter)
{
    sp_image *image = NULL;
    sp_error error;

    assert_ok(sp_layout_pack_sites(pool->layout, adapter->sites, (size_t)adapter->n_sites,
                                   &adapter->digest, NULL, &image, &error),
              &error);
    return image;
}

sp_slot_handle hand_load_adapter(const hand_pool *pool, const hand_adapter *adapter)
{
    sp_image *image = hand_pack(pool, adapter);
    sp_slot_handle handle = {-1, 0};
    sp_error error;

    assert_ok(sp_pool_load(pool->pool, image, &handle, &error), &error);
    sp_image_destroy(image);
    return handle;
}

sp_slot_info hand_slot_info(const sp_pool *pool, int32_t slot)
{
    sp_slot_info info = {.struct_bytes = sizeof info};
    sp_error error;

    assert_ok(sp_pool_slot_info(pool, slot, &info, &error), &error);
    return info;
}

sp_slot_handle hand_handle(const sp_pool *pool, int32_t slot)
{
    return (sp_slot_handle){slot, hand_slot_info(pool, slot).generation};
}

void hand_unload(sp_pool *pool, sp_slot_handle handle)
{
    sp_error error;

    assert_ok(sp_pool_release(pool, handle, &error), &error);
    assert_ok(sp_pool_drain(pool, handle, &error), &error);
}

void hand_plan_rows(sp_plan *plan, const sp_pool *pool, const int32_t *seq_slot,
                    const float *row_scale, int32_t n_rows)
{
    sp_route_span *spans = calloc((size_t)n_rows + 1, sizeof *spans);
    sp_error error;

    assert_non_null(spans);
    for (int32_t i = 0; i < n_rows; i++)
        spans[i] = (sp_route_span){
            .struct_bytes = sizeof spans[i],
            .handle = {.slot = SP_SLOT_BASE},
            .n_rows = 1,
            .scale = row_scale != NULL ? row_scale[i] : 1.0f,
        };
    for (int32_t i = 0; i < n_rows; i++)
        if (seq_slot[i] >= 0)
            spans[i].handle = hand_handle(pool, seq_slot[i]);
    assert_ok(sp_plan_build(plan, pool, spans, n_rows, n_rows, &error), &error);
    free(spans);
}

sp_exec *hand_exec(int32_t threads)
{
    sp_exec_options options;
    sp_exec *exec = NULL;

    sp_exec_options_default(&options, sizeof options);
    options.threads = threads;
    assert_ok(sp_exec_create(&options, &exec, NULL), NULL);
    return exec;
}
