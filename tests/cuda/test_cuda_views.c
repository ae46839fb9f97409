/*
 * test_cuda_views.c: adapters from tensors in the GPU's memory: digest, receipt and packed image of
 * the same tensors in host memory. Skipped where there is no GPU.
 */
#include "cuda/gpu_batch.h"
#include "pool/image.h"

#include <sidepath/intake.h>

#include <string.h>

enum { K = 40, N = 24, RANK = 3, POOL_RANK = 8, TENSORS = 2 };

static sp_device *gpu;

static const char config[] =
    "{\"peft_type\": \"LORA\", \"r\": 3, \"lora_alpha\": 6, \"target_modules\": [\"o_proj\"]}";

static const site_dims dims = {0, SP_MODULE_O_PROJ, K, N};
static const int64_t shapes[TENSORS][2] = {{RANK, K}, {N, RANK}};
static const char *const names[TENSORS] = {
    "base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight",
    "base_model.model.model.layers.0.self_attn.o_proj.lora_B.weight"};

/* Both factors, row by row in host memory. */
typedef struct factors {
    sp_tensor_type type;
    size_t element;
    char host[TENSORS][RANK * K * sizeof(float)];
} factors;

static factors make_factors(sp_dtype dtype)
{
    factors f = {.type = dtype == SP_DTYPE_F32 ? SP_TENSOR_F32 : SP_TENSOR_BF16,
                 .element = sp_dtype_bytes(dtype)};
    sp_test_random random = {15};

    for (int t = 0; t < TENSORS; t++)
        for (int64_t i = 0; i < shapes[t][0] * shapes[t][1]; i++)
            hand_store(dtype, f.host[t], i, (double)sp_test_float(&random));
    return f;
}

static sp_tensor_view host_view(const factors *f, int t)
{
    return (sp_tensor_view){
        .struct_bytes = sizeof(sp_tensor_view),
        .name = names[t],
        .data = f->host[t],
        .type = f->type,
        .n_dims = 2,
        .shape = shapes[t],
    };
}

/* How a matrix lies on the GPU: strides, and elements before its first. */
typedef struct arrangement {
    int64_t row, column; /* 0: dense, without strides */
    int64_t before;
} arrangement;

typedef struct gpu_views {
    sp_tensor_view views[TENSORS];
    int64_t strides[TENSORS][2];
    gpu_buffer buffers[TENSORS];
} gpu_views;

static void place(const factors *f, int t, const arrangement *how, gpu_views *v)
{
    int64_t rows = shapes[t][0], cols = shapes[t][1];
    int64_t row = how->row != 0 ? how->row : cols, column = how->column != 0 ? how->column : 1;
    size_t bytes = (size_t)(how->before + (rows - 1) * row + (cols - 1) * column + 1) * f->element;
    char *laid = calloc(1, bytes);

    assert_non_null(laid);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++)
            memcpy(laid + (size_t)(how->before + r * row + c * column) * f->element,
                   f->host[t] + (size_t)(r * cols + c) * f->element, f->element);
    v->buffers[t] = gpu_buffer_make(gpu, bytes);
    gpu_buffer_write(gpu, &v->buffers[t], laid, bytes);
    free(laid);
    v->strides[t][0] = row;
    v->strides[t][1] = column;
    v->views[t] = host_view(f, t);
    v->views[t].data = v->buffers[t].device + GUARD_BYTES;
    v->views[t].byte_offset = (uint64_t)how->before * f->element;
    v->views[t].strides = how->row != 0 ? v->strides[t] : NULL;
    v->views[t].device_kind = SP_VIEW_CUDA;
}

static void free_views(gpu_views *v)
{
    for (int t = 0; t < TENSORS; t++)
        gpu_buffer_free(gpu, &v->buffers[t]);
}

static sp_adapter *adapter_of(const sp_tensor_view *views, sp_geometry *geometry, sp_device *on)
{
    sp_adapter_options options;
    sp_adapter *adapter = NULL;
    sp_error error;

    sp_adapter_options_default(&options, sizeof options);
    options.geometry = geometry;
    options.views_on = on;
    assert_ok(sp_adapter_from_tensors(config, sizeof config - 1, views, TENSORS, &options, &adapter,
                                      &error),
              &error);
    return adapter;
}

static sp_receipt *receipt_of(const sp_adapter *adapter)
{
    sp_receipt_options options;
    sp_receipt *receipt = NULL;
    sp_error error;

    sp_receipt_options_default(&options, sizeof options);
    assert_ok(sp_receipt_create(adapter, &options, &receipt, &error), &error);
    return receipt;
}

static void expect_same(const hand_pool *pool, const sp_adapter *host, const sp_adapter *device)
{
    sp_digest want = sp_adapter_digest(host), got = sp_adapter_digest(device);
    const sp_adapter *adapters[2] = {host, device};
    sp_receipt *receipts[2];
    sp_image *images[2];
    sp_error error;

    assert_memory_equal(&got, &want, sizeof want);
    for (int i = 0; i < 2; i++) {
        receipts[i] = receipt_of(adapters[i]);
        assert_ok(sp_layout_pack(pool->layout, adapters[i], NULL, &images[i], &error), &error);
    }
    assert_string_equal(sp_receipt_json(receipts[1]), sp_receipt_json(receipts[0]));
    assert_memory_equal(images[1]->data, images[0]->data, sp_layout_slot_bytes(pool->layout));
    assert_int_equal(images[1]->ranks[0], RANK);
    for (int i = 0; i < 2; i++) {
        sp_receipt_destroy(receipts[i]);
        sp_image_destroy(images[i]);
    }
}

static void check_arrangement(const factors *f, const arrangement how[TENSORS])
{
    hand_pool pool = hand_pool_create_on(gpu, &dims, 1, POOL_RANK, SP_DTYPE_BF16, 1);
    sp_tensor_view host[TENSORS] = {host_view(f, 0), host_view(f, 1)};
    sp_adapter *of_host = adapter_of(host, pool.geometry, NULL), *of_device, *of_both;
    gpu_views v;

    for (int t = 0; t < TENSORS; t++)
        place(f, t, &how[t], &v);
    of_device = adapter_of(v.views, pool.geometry, gpu);
    host[1] = v.views[1]; /* one of them is enough */
    of_both = adapter_of(host, pool.geometry, gpu);
    free_views(&v); /* everything that is kept has been copied */
    expect_same(&pool, of_host, of_device);
    expect_same(&pool, of_host, of_both);
    sp_adapter_release(of_host);
    sp_adapter_release(of_device);
    sp_adapter_release(of_both);
    hand_pool_destroy(&pool);
}

static void a_small_adapter_on_the_gpu_is_that_on_the_host(void **state)
{
    static const sp_dtype types[] = {SP_DTYPE_BF16, SP_DTYPE_F32};
    static const arrangement ways[][TENSORS] = {
        {{0, 0, 0}, {0, 0, 0}},
        {{0, 0, 1}, {0, 0, 3}},               /* at odd addresses */
        {{1, RANK, 0}, {1, N, 0}},            /* transposed */
        {{3 * K + 5, 3, 7}, {RANK + 2, 1, 1}} /* parts of larger tensors */
    };

    (void)state;
    for (int i = 0; i < 2; i++) {
        factors f = make_factors(types[i]);

        for (size_t w = 0; w < sizeof ways / sizeof ways[0]; w++)
            check_arrangement(&f, ways[w]);
    }
}

static void views_of_another_device_are_refused(void **state)
{
    static const arrangement dense[TENSORS];
    hand_pool pool = hand_pool_create_on(gpu, &dims, 1, POOL_RANK, SP_DTYPE_BF16, 1);
    factors f = make_factors(SP_DTYPE_F32);
    sp_adapter_options options;
    sp_adapter *adapter = NULL;
    sp_error error;
    gpu_views v;

    (void)state;
    for (int t = 0; t < TENSORS; t++)
        place(&f, t, &dense[t], &v);
    sp_adapter_options_default(&options, sizeof options);
    options.geometry = pool.geometry;
    assert_int_equal(sp_adapter_from_tensors(config, sizeof config - 1, v.views, TENSORS, &options,
                                             &adapter, &error),
                     SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "device_kind"); /* views_on names none */
    options.views_on = gpu;
    v.views[1].device_index = 99;
    assert_int_equal(sp_adapter_from_tensors(config, sizeof config - 1, v.views, TENSORS, &options,
                                             &adapter, &error),
                     SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "device_index");
    assert_null(adapter);
    free_views(&v);
    hand_pool_destroy(&pool);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_small_adapter_on_the_gpu_is_that_on_the_host),
        cmocka_unit_test(views_of_another_device_are_refused),
    };

    return gpu_main(&gpu, tests, sizeof tests / sizeof tests[0], NULL, NULL, argc, argv);
}
