/*
 * test_cuda_fixtures.c: every case of the kernel fixtures on a GPU: the single form on
 * delta.safetensors, the routed form on routed.safetensors. Skipped where there is no GPU.
 */
#include "cuda/gpu_batch.h"
#include "support/golden.h"

#include <jansson.h>
#include <math.h>

static sp_device *gpu;

static sp_dtype dtype_of(const golden_tensor *tensor)
{
    return strcmp(tensor->dtype, "BF16") == 0 ? SP_DTYPE_BF16 : SP_DTYPE_F16;
}

/* fixtures/README.md: relative L2 against y_ref. */
static double limit_of(sp_dtype dtype)
{
    return dtype == SP_DTYPE_BF16 ? 4e-3 : 6e-4;
}

static json_t *read_cases(const char *kind, json_t **out_root)
{
    json_error_t error;

    *out_root = json_load_file(SP_TEST_FIXTURES "/kernels/cases.json", 0, &error);
    assert_non_null(*out_root);
    return json_object_get(json_object_get(*out_root, "cases"), kind);
}

/* The tensor in device memory, between guards. */
static gpu_buffer put(const golden_tensor *tensor)
{
    gpu_buffer buffer = gpu_buffer_make(gpu, tensor->bytes);

    gpu_buffer_write(gpu, &buffer, tensor->data, tensor->bytes);
    return buffer;
}

/* y0 as `type`; exact where that is its own or F32. */
static gpu_buffer put_as(const golden_tensor *y0, sp_dtype type)
{
    size_t bytes = (size_t)y0->n * sp_dtype_bytes(type);
    gpu_buffer buffer = gpu_buffer_make(gpu, bytes);
    void *y = malloc(bytes);

    assert_non_null(y);
    for (int64_t i = 0; i < y0->n; i++)
        hand_store(type, y, i, golden_value(y0, i));
    gpu_buffer_write(gpu, &buffer, y, bytes);
    free(y);
    return buffer;
}

/* ---- the single form ----------------------------------------------------------------------- */

typedef struct single_case {
    const char *name;
    const golden_tensor *x, *a, *b, *y0, *y_ref, *y_staged;
    float scale;
} single_case;

static single_case find_case(const golden *file, const json_t *entry)
{
    const char *name = json_string_value(json_object_get(entry, "name"));

    return (single_case){
        .name = name,
        .x = golden_get(file, "%s.x", name),
        .a = golden_get(file, "%s.A", name),
        .b = golden_get(file, "%s.B", name),
        .y0 = golden_get(file, "%s.y0", name),
        .y_ref = golden_get(file, "%s.y_ref", name),
        .y_staged = golden_get(file, "%s.y_staged", name),
        .scale = (float)json_real_value(json_object_get(entry, "scale")),
    };
}

static void apply_case(sp_delta_solo *solo, const single_case *c, sp_dtype y_type, gpu_buffer *y)
{
    gpu_buffer x = put(c->x), a = put(c->a), b = put(c->b);
    sp_delta_single args = {
        .rows = (int32_t)c->x->shape[0],
        .k_in = (int32_t)c->a->shape[1],
        .n_out = (int32_t)c->b->shape[0],
        .rank = (int32_t)c->a->shape[0],
        .dtype = dtype_of(c->x),
        .y_type = y_type,
        .x = x.device + GUARD_BYTES,
        .a = a.device + GUARD_BYTES,
        .b = b.device + GUARD_BYTES,
        .y = y->device + GUARD_BYTES,
        .x_stride = c->x->shape[1],
        .a_stride = c->a->shape[1],
        .b_stride = c->b->shape[1],
        .y_stride = c->y0->shape[1],
        .scale = c->scale,
    };
    sp_error error;

    assert_ok(sp_delta_solo_apply(solo, &args, NULL, &error), &error);
    assert_ok(sp_stream_wait(sp_device_main_stream(gpu)), NULL);
    gpu_buffer_free(gpu, &x);
    gpu_buffer_free(gpu, &a);
    gpu_buffer_free(gpu, &b);
}

typedef struct staged_count {
    int64_t elements, differing;
} staged_count;

static void check_case(const single_case *c, sp_dtype y_type, const void *y, staged_count *count)
{
    int64_t stride = c->y0->shape[1], n_out = c->b->shape[0];
    double error2 = 0.0, sum2 = 0.0, limit = limit_of(dtype_of(c->x));

    for (int64_t i = 0; i < c->y0->n; i++) {
        double got = hand_load(y_type, y, i), want = golden_value(c->y_ref, i);

        if (i % stride >= n_out) {
            assert_true(got == golden_value(c->y0, i));
            continue;
        }
        error2 += (got - want) * (got - want);
        sum2 += want * want;
        count->elements++;
        count->differing += got != golden_value(c->y_staged, i);
    }
    if (!(error2 <= sum2 * limit * limit))
        fail_msg("%s: relative error %g", c->name, sqrt(error2 / sum2));
}

/* The share that may differ from y_staged is what tests/delta holds the CPU's levels to. */
static void single_matches_fixtures(void **state)
{
    static const double shares[] = {[SP_DTYPE_BF16] = 0.0005, [SP_DTYPE_F16] = 0.012};
    golden *file = golden_open("kernels/delta.safetensors");
    json_t *root, *entry, *cases = read_cases("delta", &root);
    staged_count counts[3] = {{0, 0}, {0, 0}, {0, 0}}, wide = {0, 0};
    sp_delta_solo *solo = NULL;
    sp_error error;
    size_t index;

    (void)state;
    assert_ok(sp_delta_solo_create(gpu, 257, 256, 128, &solo, &error), &error);
    json_array_foreach(cases, index, entry)
    {
        single_case c = find_case(file, entry);
        sp_dtype dtype = dtype_of(c.x);
        gpu_buffer y = put_as(c.y0, dtype), y32 = put_as(c.y0, SP_DTYPE_F32);

        apply_case(solo, &c, dtype, &y);
        check_case(&c, dtype, gpu_buffer_read(gpu, &y, y.bytes), &counts[dtype]);
        apply_case(solo, &c, SP_DTYPE_F32, &y32);
        check_case(&c, SP_DTYPE_F32, gpu_buffer_read(gpu, &y32, y32.bytes), &wide);
        gpu_buffer_free(gpu, &y);
        gpu_buffer_free(gpu, &y32);
    }
    for (int dtype = SP_DTYPE_BF16; dtype <= SP_DTYPE_F16; dtype++) {
        print_message("%s: %lld of %lld elements differ from y_staged\n",
                      sp_dtype_name((sp_dtype)dtype), (long long)counts[dtype].differing,
                      (long long)counts[dtype].elements);
        assert_true((double)counts[dtype].differing <=
                    shares[dtype] * (double)counts[dtype].elements);
    }
    assert_int_equal(json_array_size(cases), 43);
    sp_delta_solo_destroy(solo);
    json_decref(root);
    golden_close(file);
}

/* ---- the routed form ----------------------------------------------------------------------- */

typedef struct routed_case {
    const char *name;
    const golden_tensor *x, *y0, *slots, *y_ref;
    int32_t n_rows, n_slots, k_in, n_out;
    sp_dtype dtype;
    hand_pool pool;
} routed_case;

/* One site, q_proj of layer 0; slot s holds the case's adapter s. */
static routed_case load_routed(const golden *file, const json_t *entry)
{
    const char *name = json_string_value(json_object_get(entry, "name"));
    const int32_t *ranks = golden_i32(golden_get(file, "%s.ranks", name));
    const float *scales = golden_f32(golden_get(file, "%s.scales", name));
    routed_case c = {
        .name = name,
        .x = golden_get(file, "%s.x", name),
        .y0 = golden_get(file, "%s.y0", name),
        .slots = golden_get(file, "%s.slots", name),
        .y_ref = golden_get(file, "%s.y_ref", name),
        .n_slots = (int32_t)json_integer_value(json_object_get(entry, "slots")),
    };
    sp_site_dims dims = {0, SP_MODULE_Q_PROJ, (int32_t)c.x->shape[1], (int32_t)c.y0->shape[1]};

    c.n_rows = (int32_t)c.x->shape[0];
    c.k_in = dims.k_in;
    c.n_out = dims.n_out;
    c.dtype = dtype_of(c.x);
    c.pool = hand_pool_create_on(gpu, 1, &dims, 1,
                                 (int32_t)json_integer_value(json_object_get(entry, "max_rank")),
                                 c.dtype, c.n_slots);
    for (int32_t slot = 0; slot < c.n_slots; slot++) {
        hand_adapter *adapter = hand_adapter_create((uint64_t)slot + 1);

        if (ranks[slot] > 0)
            hand_adapter_add_copy(adapter, &dims, ranks[slot], scales[slot], c.dtype,
                                  golden_get(file, "%s.A%d", name, (int)slot)->data,
                                  golden_get(file, "%s.B%d", name, (int)slot)->data);
        assert_int_equal(hand_load_adapter(&c.pool, adapter, NULL), slot);
        hand_adapter_destroy(adapter);
    }
    return c;
}

static void apply_routed(const routed_case *c, sp_dtype y_type, gpu_buffer *y)
{
    gpu_buffer x = put(c->x);
    sp_delta_options options;
    sp_delta *delta = NULL;
    sp_plan *plan = NULL;
    sp_error error;
    sp_delta_output output = {SP_MODULE_Q_PROJ, y->device + GUARD_BYTES, c->n_out, y_type};

    sp_delta_options_default(&options);
    options.pool = c->pool.pool;
    options.rows_max = c->n_rows;
    assert_ok(sp_delta_create(&options, &delta, &error), &error);
    assert_ok(sp_plan_create(c->n_rows, c->n_slots, &plan), NULL);
    assert_ok(sp_plan_build_rows(plan, golden_i32(c->slots), NULL, c->n_rows, c->n_slots, &error),
              &error);
    assert_ok(sp_delta_upload(delta, plan), NULL);
    assert_ok(sp_delta_start(delta, plan), NULL);
    assert_ok(sp_delta_apply(delta, plan, 0, x.device + GUARD_BYTES, c->k_in, &output, 1), NULL);
    sp_delta_destroy(delta); /* waits */
    sp_plan_destroy(plan);
    gpu_buffer_free(gpu, &x);
}

/* Rows of the base and of adapters without this module keep y0's bytes; the rest is near y_ref. */
static void check_routed(const golden *file, const routed_case *c, sp_dtype y_type, const void *y)
{
    const int32_t *ranks = golden_i32(golden_get(file, "%s.ranks", c->name));
    const int32_t *slots = golden_i32(c->slots);
    double error2 = 0.0, sum2 = 0.0;

    for (int64_t i = 0; i < c->y0->n; i++) {
        int32_t slot = slots[i / c->n_out];
        double want = golden_value(c->y_ref, i), got = hand_load(y_type, y, i);

        if (slot < 0 || ranks[slot] == 0)
            assert_true(got == golden_value(c->y0, i));
        else
            sum2 += want * want;
        error2 += (got - want) * (got - want);
    }
    if (!(error2 <= sum2 * limit_of(c->dtype) * limit_of(c->dtype)))
        fail_msg("%s: relative error %g", c->name, sqrt(error2 / sum2));
}

static void routed_matches_fixtures(void **state)
{
    golden *file = golden_open("kernels/routed.safetensors");
    json_t *root, *entry, *cases = read_cases("routed", &root);
    size_t index;

    (void)state;
    json_array_foreach(cases, index, entry)
    {
        routed_case c = load_routed(file, entry);
        gpu_buffer y = put_as(c.y0, c.dtype), y32 = put_as(c.y0, SP_DTYPE_F32);

        apply_routed(&c, c.dtype, &y);
        check_routed(file, &c, c.dtype, gpu_buffer_read(gpu, &y, y.bytes));
        apply_routed(&c, SP_DTYPE_F32, &y32);
        check_routed(file, &c, SP_DTYPE_F32, gpu_buffer_read(gpu, &y32, y32.bytes));
        gpu_buffer_free(gpu, &y);
        gpu_buffer_free(gpu, &y32);
        hand_pool_destroy(&c.pool);
    }
    assert_int_equal(json_array_size(cases), 8);
    json_decref(root);
    golden_close(file);
}

/* ---- calls of the single form -------------------------------------------------------------- */

static void bad_single_calls_are_refused(void **state)
{
    sp_delta_solo *solo = NULL;
    gpu_buffer buffer = gpu_buffer_make(gpu, 4096);
    void *p = buffer.device;
    const sp_delta_single good = {4,  16, 8, 8, SP_DTYPE_BF16, SP_DTYPE_BF16, p, p, p, p,
                                  16, 16, 8, 8, 1.0f};
    sp_delta_single args = good;
    sp_error error;

    (void)state;
    assert_int_equal(sp_delta_solo_create(gpu, 0, 16, 8, &solo, &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_delta_solo_create(gpu, 4, 16, 513, &solo, &error), SP_ERR_ARGUMENT);
    assert_ok(sp_delta_solo_create(gpu, 4, 16, 8, &solo, &error), &error);
#define REFUSED(field, value, wanted)                                         \
    args = good;                                                              \
    args.field = value;                                                       \
    assert_int_equal(sp_delta_solo_apply(solo, &args, NULL, &error), wanted); \
    assert_int_equal(error.status, wanted)
    REFUSED(rows, 5, SP_ERR_ARGUMENT);
    REFUSED(rows, -1, SP_ERR_ARGUMENT);
    REFUSED(k_in, 17, SP_ERR_STRIDE);
    REFUSED(x, NULL, SP_ERR_ARGUMENT);
    REFUSED(y_type, SP_DTYPE_F16, SP_ERR_ARGUMENT);
    REFUSED(y_stride, 7, SP_ERR_STRIDE);
    REFUSED(scale, NAN, SP_ERR_ARGUMENT);
#undef REFUSED
    args = good;
    args.dtype = args.y_type = SP_DTYPE_F32;
    assert_int_equal(sp_delta_solo_apply(solo, &args, NULL, &error), SP_ERR_UNSUPPORTED);
    sp_delta_solo_destroy(solo);
    gpu_buffer_free(gpu, &buffer);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_single_calls_are_refused),
        cmocka_unit_test(single_matches_fixtures),
        cmocka_unit_test(routed_matches_fixtures),
    };
    int code, failed;

    gpu = gpu_open(&code);
    if (gpu == NULL)
        return code;
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    sp_device_close(gpu);
    return failed;
}
