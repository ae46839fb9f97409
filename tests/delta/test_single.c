/*
 * test_single.c: the single-adapter form: one object for many calls of other sizes and types, an x
 * of FP32, what it refuses, and memory. Its bits against the routed form are in test_delta_bits.c,
 * its values against fixtures in test_delta_golden.c.
 */
#include "base/alloc.h"
#include "kernels/cpu/kernels.h"
#include "support/delta_call.h"
#include "support/hand.h"
#include "support/test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 30, K = 75, N = 21, RANK = 11 };

/* A call with its tensors. */
typedef struct single_test {
    char x[ROWS * K * 4], a[RANK * K * 4], b[N * RANK * 4], y[ROWS * N * 4];
    sp_delta_single_args args;
} single_test;

static void fill(sp_dtype dtype, void *values, int64_t n, sp_test_random *random)
{
    for (int64_t i = 0; i < n; i++)
        hand_store(dtype, values, i, (double)sp_test_float(random));
}

static void make_test(single_test *t, sp_dtype dtype, int32_t rows, int32_t rank, uint64_t seed)
{
    sp_test_random random = {seed};

    fill(dtype, t->x, ROWS * K, &random);
    fill(dtype, t->a, RANK * K, &random);
    fill(dtype, t->b, N * RANK, &random);
    fill(dtype, t->y, ROWS * N, &random);
    t->args = (sp_delta_single_args){
        .struct_bytes = sizeof t->args,
        .rows = rows,
        .k_in = K,
        .n_out = N,
        .rank = rank,
        .dtype = dtype,
        .x_type = dtype,
        .y_type = dtype,
        .x = t->x,
        .a = t->a,
        .b = t->b,
        .y = t->y,
        .x_stride = K,
        .a_stride = K,
        .b_stride = RANK,
        .y_stride = N,
        .scale = 0.75f,
    };
}

static sp_delta_single *make_single(const char *level, bool x_f32)
{
    sp_delta_single_options options;
    sp_delta_single *single = NULL;
    sp_error error;

    sp_delta_single_options_default(&options, sizeof options);
    options.cpu_isa = level;
    options.rows_max = ROWS;
    options.k_in_max = K;
    options.rank_max = RANK;
    options.x_f32 = x_f32;
    assert_ok(sp_delta_single_create(&options, &single, &error), &error);
    return single;
}

/* Calls of other sizes and types in between change nothing. */
static void one_object_serves_many_calls(void **state)
{
    static single_test first, again, other;

    (void)state;
    for (const char *const *level = sp_kernels_levels(); *level != NULL; level++) {
        sp_delta_single *single = make_single(*level, false);
        sp_error error;

        make_test(&first, SP_DTYPE_BF16, ROWS, RANK, 3);
        again = first;
        again.args.x = again.x;
        again.args.y = again.y;
        assert_ok(sp_delta_single_apply(single, &first.args, &error), &error);
        for (int i = 0; i < 6; i++) {
            make_test(&other, (sp_dtype)(i % 3), 1 + i * 5, RANK - i, 9);
            assert_ok(sp_delta_single_apply(single, &other.args, &error), &error);
        }
        assert_ok(sp_delta_single_apply(single, &again.args, &error), &error);
        assert_memory_equal(first.y, again.y, sizeof first.y);
        sp_delta_single_destroy(single);
    }
}

static void an_f32_x_is_rounded_first(void **state)
{
    static single_test rounded, test;
    static float x[ROWS * K];

    (void)state;
    for (const char *const *level = sp_kernels_levels(); *level != NULL; level++) {
        sp_delta_single *single = make_single(*level, true);
        sp_error error;

        make_test(&rounded, SP_DTYPE_BF16, ROWS, RANK, 4);
        test = rounded;
        for (int64_t i = 0; i < ROWS * K; i++) /* off by an eighth of what a bf16 can tell */
            x[i] = (float)(hand_load(SP_DTYPE_BF16, rounded.x, i) * (1 + 0x1p-10));
        test.args.x = x;
        test.args.x_type = SP_DTYPE_F32;
        test.args.y = test.y;
        assert_ok(sp_delta_single_apply(single, &rounded.args, &error), &error);
        assert_ok(sp_delta_single_apply(single, &test.args, &error), &error);
        assert_memory_equal(test.y, rounded.y, sizeof test.y);
        sp_delta_single_destroy(single);
    }
}

static void bad_calls_are_refused(void **state)
{
    static single_test t;
    static char before[sizeof t.y];
    static const float bad_scales[] = {NAN, INFINITY, -INFINITY};
    sp_delta_single *single = make_single(NULL, false);
    sp_delta_single_args good;
    sp_error error;

    (void)state;
    make_test(&t, SP_DTYPE_BF16, 4, RANK, 5);
    good = t.args;
    memcpy(before, t.y, sizeof before);
    assert_int_equal(sp_delta_single_apply(single, NULL, &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_delta_single_apply(NULL, &good, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "single");
#define REFUSED(field, value, wanted)                                         \
    t.args = good;                                                            \
    t.args.field = value;                                                     \
    assert_int_equal(sp_delta_single_apply(single, &t.args, &error), wanted); \
    assert_string_equal(error.subject, #field)
    REFUSED(rows, -1, SP_ERR_ARGUMENT);
    REFUSED(rows, ROWS + 1, SP_ERR_ARGUMENT);
    REFUSED(rank, -1, SP_ERR_ARGUMENT);
    REFUSED(rank, RANK + 1, SP_ERR_ARGUMENT);
    REFUSED(k_in, 0, SP_ERR_ARGUMENT);
    REFUSED(k_in, K + 1, SP_ERR_ARGUMENT);
    REFUSED(n_out, 0, SP_ERR_ARGUMENT);
    REFUSED(x, NULL, SP_ERR_ARGUMENT);
    REFUSED(a, NULL, SP_ERR_ARGUMENT);
    REFUSED(b, NULL, SP_ERR_ARGUMENT);
    REFUSED(y, NULL, SP_ERR_ARGUMENT);
    REFUSED(y_type, SP_DTYPE_F16, SP_ERR_ARGUMENT);
    REFUSED(x_type, SP_DTYPE_F16, SP_ERR_ARGUMENT);
    REFUSED(x_type, SP_DTYPE_F32, SP_ERR_UNSUPPORTED);
    REFUSED(dtype, (sp_dtype)9, SP_ERR_ARGUMENT);
    REFUSED(x_stride, K - 1, SP_ERR_STRIDE);
    REFUSED(a_stride, K - 1, SP_ERR_STRIDE);
    REFUSED(b_stride, RANK - 1, SP_ERR_STRIDE);
    REFUSED(y_stride, N - 1, SP_ERR_STRIDE);
    for (size_t i = 0; i < 3; i++) {
        REFUSED(scale, bad_scales[i], SP_ERR_ARGUMENT);
    }
#undef REFUSED
    assert_memory_equal(t.y, before, sizeof before);
    sp_delta_single_destroy(single);
}

static void bad_options_are_refused(void **state)
{
    sp_delta_single_options options;
    sp_delta_single *single = NULL;
    sp_error error;

    (void)state;
#define REFUSED(field, value)                                                             \
    sp_delta_single_options_default(&options, sizeof options);                            \
    options.field = value;                                                                \
    assert_int_equal(sp_delta_single_create(&options, &single, &error), SP_ERR_ARGUMENT); \
    assert_string_equal(error.subject, #field)
    REFUSED(rows_max, 0);
    REFUSED(rows_max, (1 << 20) + 1);
    REFUSED(k_in_max, 0);
    REFUSED(rank_max, 4097);
    REFUSED(rank_max, -1);
#undef REFUSED
    assert_int_equal(sp_delta_single_create(NULL, &single, &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_delta_single_create(&options, NULL, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "out_single");
    assert_null(single);
    sp_delta_single_destroy(NULL);
}

static void apply_does_not_allocate_and_create_survives(void **state)
{
    static single_test t;
    size_t before = sp_alloc_bytes(), blocks;
    sp_delta_single_options options;
    sp_delta_single *single = NULL;
    sp_error error;

    (void)state;
    sp_delta_single_options_default(&options, sizeof options);
    for (int64_t n = 0; n < 2; n++) {
        sp_alloc_fail_after(n);
        assert_int_equal(sp_delta_single_create(&options, &single, &error), SP_ERR_MEMORY);
        assert_true(sp_alloc_failed());
        assert_int_equal(sp_alloc_bytes(), before);
    }
    sp_alloc_fail_after(-1);
    single = make_single(NULL, true);
    make_test(&t, SP_DTYPE_BF16, ROWS, RANK, 6);
    blocks = sp_alloc_blocks();
    sp_alloc_fail_after(0);
    assert_ok(sp_delta_single_apply(single, &t.args, &error), &error);
    assert_false(sp_alloc_failed());
    sp_alloc_fail_after(-1);
    assert_int_equal(sp_alloc_blocks(), blocks);
    sp_delta_single_destroy(single);
    assert_int_equal(sp_alloc_bytes(), before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_object_serves_many_calls),
        cmocka_unit_test(an_f32_x_is_rounded_first),
        cmocka_unit_test(bad_calls_are_refused),
        cmocka_unit_test(bad_options_are_refused),
        cmocka_unit_test(apply_does_not_allocate_and_create_survives),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
