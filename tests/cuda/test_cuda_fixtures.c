/*
 * test_cuda_fixtures.c: every case of the kernel fixtures on a GPU: the single form and the routed
 * form. Skipped where there is no GPU.
 */
#include "cuda/gpu_batch.h"
#include "support/kernel_cases.h"

#include <math.h>

static sp_device *gpu;

/* `bytes` in device memory, between guards; `values` is freed. */
static gpu_buffer put(void *values, size_t bytes)
{
    gpu_buffer buffer = gpu_buffer_make(gpu, bytes);

    gpu_buffer_write(gpu, &buffer, values, bytes);
    free(values);
    return buffer;
}

static gpu_buffer put_tensor(const golden_tensor *tensor, sp_dtype dtype)
{
    return put(kernel_case_values(tensor, dtype), (size_t)tensor->n * sp_dtype_bytes(dtype));
}

/* The buffer's data, owned by the caller; the buffer is freed. */
static void *take(gpu_buffer *buffer)
{
    void *data = malloc(buffer->bytes);

    assert_non_null(data);
    memcpy(data, gpu_buffer_read(gpu, buffer, buffer->bytes), buffer->bytes);
    gpu_buffer_free(gpu, buffer);
    return data;
}

static sp_status make_single(int32_t rows_max, int32_t k_in_max, int32_t rank_max,
                             sp_delta_single **out_single)
{
    sp_delta_single_options options;

    sp_delta_single_options_default(&options, sizeof options);
    options.device = gpu;
    options.rows_max = rows_max;
    options.k_in_max = k_in_max;
    options.rank_max = rank_max;
    return sp_delta_single_create(&options, out_single, NULL);
}

/* single_run_fn. */
static void *run_single(void *user, const single_case *c, sp_dtype dtype, sp_dtype y_type)
{
    sp_delta_single *single = user;
    gpu_buffer x = put_tensor(c->x, dtype), a = put_tensor(c->a, dtype);
    gpu_buffer b = put_tensor(c->b, dtype), y = put_tensor(c->y0, y_type);
    sp_delta_single_args args = {
        .struct_bytes = sizeof args,
        .rows = (int32_t)c->x->shape[0],
        .k_in = (int32_t)c->a->shape[1],
        .n_out = (int32_t)c->b->shape[0],
        .rank = (int32_t)c->a->shape[0],
        .dtype = dtype,
        .x_type = dtype,
        .y_type = y_type,
        .x = x.device + GUARD_BYTES,
        .a = a.device + GUARD_BYTES,
        .b = b.device + GUARD_BYTES,
        .y = y.device + GUARD_BYTES,
        .x_stride = c->x->shape[1],
        .a_stride = c->a->shape[1],
        .b_stride = c->b->shape[1],
        .y_stride = c->y0->shape[1],
        .scale = c->scale,
    };
    sp_error error;

    assert_ok(sp_delta_single_apply(single, &args, &error), &error);
    assert_ok(sp_stream_wait(sp_device_main_stream(gpu), NULL), NULL);
    gpu_buffer_free(gpu, &x);
    gpu_buffer_free(gpu, &a);
    gpu_buffer_free(gpu, &b);
    return take(&y);
}

static void single_matches_fixtures(void **state)
{
    sp_delta_single *single;

    (void)state;
    assert_ok(make_single(257, 256, 128, &single), NULL);
    kernel_cases_check_single("cuda", run_single, single, false);
    sp_delta_single_destroy(single);
}

/* routed_run_fn. */
static void *run_routed(void *user, const routed_case *c, sp_dtype y_type)
{
    gpu_buffer x = put_tensor(c->x, c->dtype), y = put_tensor(c->y0, y_type);
    sp_delta_options options;
    sp_delta *delta = NULL;
    sp_plan *plan = NULL;
    sp_error error;
    sp_delta_output output = {sizeof(sp_delta_output), 0, y.device + GUARD_BYTES, c->n_out, y_type};

    (void)user;
    sp_delta_options_default(&options, sizeof options);
    options.pool = c->pool.pool;
    options.rows_max = c->n_rows;
    assert_ok(sp_delta_create(&options, &delta, &error), &error);
    assert_ok(sp_plan_create(c->n_rows, c->n_slots, &plan, NULL), NULL);
    hand_plan_rows(plan, c->pool.pool, golden_i32(c->slots), NULL, c->n_rows);
    assert_ok(sp_delta_upload(delta, plan, NULL, NULL), NULL);
    assert_ok(sp_delta_start(delta, plan, NULL, NULL), NULL);
    assert_ok(hand_apply(delta, plan, c->dtype, x.device + GUARD_BYTES, c->k_in, &output, 1), NULL);
    sp_delta_destroy(delta); /* waits */
    sp_plan_destroy(plan);
    gpu_buffer_free(gpu, &x);
    return take(&y);
}

static void routed_matches_fixtures(void **state)
{
    (void)state;
    kernel_cases_check_routed(gpu, run_routed, NULL);
}

/* ---- calls of the single form -------------------------------------------------------------- */

static void bad_single_calls_are_refused(void **state)
{
    sp_delta_single *single = NULL;
    gpu_buffer buffer = gpu_buffer_make(gpu, 4096);
    void *p = buffer.device;
    const sp_delta_single_args good = {.struct_bytes = sizeof good,
                                       .rows = 4,
                                       .k_in = 16,
                                       .n_out = 8,
                                       .rank = 8,
                                       .dtype = SP_DTYPE_BF16,
                                       .x_type = SP_DTYPE_BF16,
                                       .y_type = SP_DTYPE_BF16,
                                       .x = p,
                                       .a = p,
                                       .b = p,
                                       .y = p,
                                       .x_stride = 16,
                                       .a_stride = 16,
                                       .b_stride = 8,
                                       .y_stride = 8,
                                       .scale = 1.0f};
    sp_delta_single_args args = good;
    sp_error error;

    (void)state;
    assert_int_equal(make_single(0, 16, 8, &single), SP_ERR_ARGUMENT);
    assert_int_equal(make_single(4, 16, 513, &single), SP_ERR_ARGUMENT);
    assert_int_equal(make_single(65537, 16, 8, &single), SP_ERR_ARGUMENT);
    assert_ok(make_single(4, 16, 8, &single), NULL);
#define REFUSED(field, value, wanted)                                       \
    args = good;                                                            \
    args.field = value;                                                     \
    assert_int_equal(sp_delta_single_apply(single, &args, &error), wanted); \
    assert_int_equal(error.status, wanted)
    REFUSED(rows, 5, SP_ERR_ARGUMENT);
    REFUSED(rows, -1, SP_ERR_ARGUMENT);
    REFUSED(k_in, 17, SP_ERR_ARGUMENT);
    REFUSED(x_stride, 15, SP_ERR_STRIDE);
    REFUSED(x_type, SP_DTYPE_F32, SP_ERR_UNSUPPORTED);
    REFUSED(x, NULL, SP_ERR_ARGUMENT);
    REFUSED(y_type, SP_DTYPE_F16, SP_ERR_ARGUMENT);
    REFUSED(y_stride, 7, SP_ERR_STRIDE);
    REFUSED(scale, NAN, SP_ERR_ARGUMENT);
#undef REFUSED
    args = good;
    args.dtype = args.x_type = args.y_type = SP_DTYPE_F32;
    assert_int_equal(sp_delta_single_apply(single, &args, &error), SP_ERR_UNSUPPORTED);
    sp_delta_single_destroy(single);
    gpu_buffer_free(gpu, &buffer);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_single_calls_are_refused),
        cmocka_unit_test(single_matches_fixtures),
        cmocka_unit_test(routed_matches_fixtures),
    };

    return gpu_main(&gpu, tests, sizeof tests / sizeof tests[0], NULL, NULL, argc, argv);
}
