/*
 * Every case of the kernel fixtures, at every level that this machine runs.
 */
#include "support/delta_call.h"
#include "support/kernel_cases.h"
#include "support/test.h"

#include "kernels/cpu/kernels.h"

#include <sidepath/delta.h>

#include <stdlib.h>

typedef struct cpu_run {
    sp_exec *exec;
    const char *level;
} cpu_run;

/* single_run_fn. */
static void *run_single(void *user, const single_case *c, sp_dtype dtype, sp_dtype y_type)
{
    const cpu_run *run = user;
    void *x = kernel_case_values(c->x, dtype), *a = kernel_case_values(c->a, dtype),
         *b = kernel_case_values(c->b, dtype);
    sp_delta_single_args args = {
        .struct_bytes = sizeof args,
        .rows = (int32_t)c->x->shape[0],
        .k_in = (int32_t)c->a->shape[1],
        .n_out = (int32_t)c->b->shape[0],
        .rank = (int32_t)c->a->shape[0],
        .dtype = dtype,
        .x_type = dtype,
        .y_type = y_type,
        .x = x,
        .a = a,
        .b = b,
        .y = kernel_case_values(c->y0, y_type),
        .x_stride = c->x->shape[1],
        .a_stride = c->a->shape[1],
        .b_stride = c->b->shape[1],
        .y_stride = c->y0->shape[1],
        .scale = c->scale,
    };
    sp_error error;

    assert_ok(hand_single(&args, run->exec, run->level, &error), &error);
    free(x);
    free(a);
    free(b);
    return args.y;
}

static void single_matches_fixtures(void **state)
{
    cpu_run run = {hand_exec(2), NULL};

    (void)state;
    for (const char *const *level = sp_kernels_levels(); *level != NULL; level++) {
        run.level = *level;
        kernel_cases_check_single(*level, run_single, &run, true);
    }
    sp_exec_destroy(run.exec);
}

/* routed_run_fn. */
static void *run_routed(void *user, const routed_case *c, sp_dtype y_type)
{
    const cpu_run *run = user;
    sp_delta_options options;
    sp_delta *delta;
    sp_plan *plan;
    sp_error error;
    sp_delta_output output = {sizeof(sp_delta_output), 0, kernel_case_values(c->y0, y_type),
                              c->n_out, y_type};

    sp_delta_options_default(&options, sizeof options);
    options.pool = c->pool.pool;
    options.exec = run->exec;
    options.rows_max = c->n_rows;
    options.cpu_isa = run->level;
    assert_ok(sp_delta_create(&options, &delta, &error), &error);
    assert_ok(sp_plan_create(c->n_rows, c->n_slots, &plan, NULL), NULL);
    hand_plan_rows(plan, c->pool.pool, golden_i32(c->slots), NULL, c->n_rows);
    assert_ok(
        hand_apply(delta, plan, sp_layout_dtype(c->pool.layout), c->x->data, c->k_in, &output, 1),
        NULL);
    sp_plan_destroy(plan);
    sp_delta_destroy(delta);
    return output.y;
}

static void routed_matches_fixtures(void **state)
{
    cpu_run run = {hand_exec(2), NULL};

    (void)state;
    for (const char *const *level = sp_kernels_levels(); *level != NULL; level++) {
        run.level = *level;
        kernel_cases_check_routed(NULL, run_routed, &run);
    }
    sp_exec_destroy(run.exec);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(single_matches_fixtures),
        cmocka_unit_test(routed_matches_fixtures),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
