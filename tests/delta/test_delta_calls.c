/*
 * What sp_delta_apply leaves alone, what it refuses before it writes, its levers, its memory, and
 * that a changed slot is seen by the next step.
 */
#include "route/plan_rows.h"
#include "support/delta_call.h"
#include "support/hand.h"
#include "support/test.h"

#include "base/alloc.h"

#include <sidepath/delta_pieces.h>

#include <math.h>
#include <string.h>

enum { K = 12, N_Q = 9, N_K = 4, N_DOWN = 6, K_DOWN = 10, ROWS = 4 };

static const site_dims sites[] = {
    {0, SP_MODULE_Q_PROJ, K, N_Q},
    {0, SP_MODULE_K_PROJ, K, N_K},
    {0, SP_MODULE_DOWN_PROJ, K_DOWN, N_DOWN},
    {1, SP_MODULE_Q_PROJ, K, N_Q},
    /* The pool holds none of these. */
    {0, SP_MODULE_UP_PROJ, K, N_Q},
    {-1, SP_MODULE_LM_HEAD, K, N_K},
};
enum { N_SITES = 6, N_HELD = 4 };

#define SITE(layer, module) known_site(f->pool.geometry, layer, module)

/* Slot 0 adapts q and down of layer 0, slot 1 nothing, slot 2 q of layer 1; slot 3 is empty. */
typedef struct fixture {
    hand_pool pool;
    hand_adapter *adapters[3];
    sp_exec *exec;
    sp_plan *plan;
    float x[ROWS][K], q[ROWS][N_Q], k[ROWS][N_K], down[ROWS][N_DOWN];
} fixture;

static void fill(float *values, size_t n)
{
    for (size_t i = 0; i < n; i++)
        values[i] = (float)(i % 7) - 2.5f;
}

static void reset_y(fixture *f)
{
    fill(&f->q[0][0], ROWS * N_Q);
    fill(&f->k[0][0], ROWS * N_K);
    fill(&f->down[0][0], ROWS * N_DOWN);
}

static int setup(void **state)
{
    static fixture f;
    sp_test_random random = {3};

    f.pool = hand_pool_create_part(sites, N_SITES, N_HELD, 8, SP_DTYPE_F32, 4);
    for (int32_t i = 0; i < 3; i++)
        f.adapters[i] = hand_adapter_create((uint64_t)i + 1);
    hand_adapter_add(f.adapters[0], &sites[0], 3, 2.0f, SP_DTYPE_F32, &random);
    hand_adapter_add(f.adapters[0], &sites[2], 5, 1.0f, SP_DTYPE_F32, &random);
    hand_adapter_add(f.adapters[2], &sites[3], 8, 1.0f, SP_DTYPE_F32, &random);
    for (int32_t i = 0; i < 3; i++)
        assert_int_equal(hand_load_adapter(&f.pool, f.adapters[i]).slot, i);
    f.exec = hand_exec(1);
    assert_ok(sp_plan_create(ROWS, 8, &f.plan, NULL), NULL);
    fill(&f.x[0][0], ROWS * K);
    reset_y(&f);
    *state = &f;
    return 0;
}

static int teardown(void **state)
{
    fixture *f = *state;

    sp_plan_destroy(f->plan);
    sp_exec_destroy(f->exec);
    for (int32_t i = 0; i < 3; i++)
        hand_adapter_destroy(f->adapters[i]);
    hand_pool_destroy(&f->pool);
    return 0;
}

static sp_delta *make_delta(const fixture *f, bool no_apply, sp_module_set skipped)
{
    sp_delta_options options;
    sp_delta *delta = NULL;
    sp_error error;

    sp_delta_options_default(&options, sizeof options);
    options.pool = f->pool.pool;
    options.exec = f->exec;
    options.rows_max = ROWS;
    options.no_apply = no_apply;
    options.skip_modules = skipped;
    assert_ok(sp_delta_create(&options, &delta, &error), &error);
    return delta;
}

static void plan_rows(const fixture *f, const int32_t *seq_slot, const float *row_scale)
{
    hand_plan_rows(f->plan, f->pool.pool, seq_slot, row_scale, ROWS);
}

/* y [n_out] of one row, in double from the adapter's own tensors. */
static void expect_row(const sp_adapter_site *site, double scale, const float *x, const float *y0,
                       const float *y)
{
    for (int32_t n = 0; n < site->b.rows; n++) {
        double want = (double)y0[n];

        for (int32_t j = 0; j < site->rank; j++) {
            double xa = 0;

            for (int32_t k = 0; k < site->a.cols; k++)
                xa += (double)x[k] * (double)((const float *)site->a.data)[j * site->a.cols + k];
            want += scale * xa * (double)((const float *)site->b.data)[n * site->rank + j];
        }
        assert_true(fabs((double)y[n] - want) <= 1e-5 * (1 + fabs(want)));
    }
}

/* ---- what is left alone -------------------------------------------------------------------- */

static void absent_rows_keep_their_bytes(void **state)
{
    fixture *f = *state;
    sp_delta *delta = make_delta(f, false, 0);
    sp_delta_output outputs[] = {
        {sizeof(sp_delta_output), SITE(0, SP_MODULE_Q_PROJ), f->q, N_Q, SP_DTYPE_F32},
        {sizeof(sp_delta_output), SITE(0, SP_MODULE_K_PROJ), f->k, N_K, SP_DTYPE_F32}};
    fixture before;

    reset_y(f);
    /* A NaN in y must survive untouched where no delta lands. */
    f->q[1][2] = f->q[3][0] = NAN;
    before = *f;
    plan_rows(f, (int32_t[]){0, 1, 0, -1}, (float[]){1.0f, 1.0f, 0.0f, 1.0f});
    assert_ok(hand_apply(delta, f->plan, SP_DTYPE_F32, f->x, K, outputs, 2), NULL);
    expect_row(&f->adapters[0]->sites[0], 2.0, f->x[0], before.q[0], f->q[0]);
    assert_memory_equal(f->q[1], before.q[1], 3 * sizeof f->q[1]);
    assert_memory_equal(f->k, before.k, sizeof f->k);
    sp_delta_destroy(delta);
}

static void layers_are_apart(void **state)
{
    fixture *f = *state;
    sp_delta *delta = make_delta(f, false, 0);
    sp_delta_output output = {sizeof(sp_delta_output), SITE(1, SP_MODULE_Q_PROJ), f->q, N_Q,
                              SP_DTYPE_F32};
    fixture before;

    reset_y(f);
    before = *f;
    plan_rows(f, (int32_t[]){2, 0, 1, 2}, (float[]){0.5f, 1.0f, 1.0f, 1.0f});
    assert_ok(hand_apply(delta, f->plan, SP_DTYPE_F32, f->x, K, &output, 1), NULL);
    expect_row(&f->adapters[2]->sites[0], 0.5, f->x[0], before.q[0], f->q[0]);
    assert_memory_equal(f->q[1], before.q[1], 2 * sizeof f->q[1]);
    expect_row(&f->adapters[2]->sites[0], 1.0, f->x[3], before.q[3], f->q[3]);
    sp_delta_destroy(delta);
}

static void sites_that_no_pool_holds_cost_nothing(void **state)
{
    fixture *f = *state;
    sp_delta *delta = make_delta(f, false, 0);
    sp_delta_output outputs[] = {
        {sizeof(sp_delta_output), SITE(0, SP_MODULE_UP_PROJ), f->q, N_Q, SP_DTYPE_F32},
        {sizeof(sp_delta_output), SITE(-1, SP_MODULE_LM_HEAD), f->k, N_K, SP_DTYPE_F32}};
    fixture before;

    reset_y(f);
    before = *f;
    plan_rows(f, (int32_t[]){0, 0, 0, 0}, NULL);
    assert_ok(hand_apply(delta, f->plan, SP_DTYPE_F32, f->x, K, outputs, 1), NULL);
    assert_ok(hand_apply(delta, f->plan, SP_DTYPE_F32, f->x, K, outputs + 1, 1), NULL);
    assert_ok(hand_apply(delta, f->plan, SP_DTYPE_F32, f->x, K, NULL, 0), NULL);
    assert_memory_equal(f->q, before.q, sizeof f->q);
    assert_memory_equal(f->k, before.k, sizeof f->k);
    sp_delta_destroy(delta);
}

static void levers_skip_what_they_say(void **state)
{
    fixture *f = *state;
    sp_delta *none = make_delta(f, true, 0),
             *no_down = make_delta(f, false, known_bit(f->pool.geometry, SP_MODULE_DOWN_PROJ));
    sp_delta_output q = {sizeof(sp_delta_output), SITE(0, SP_MODULE_Q_PROJ), f->q, N_Q,
                         SP_DTYPE_F32};
    sp_delta_output down = {sizeof(sp_delta_output), SITE(0, SP_MODULE_DOWN_PROJ), f->down, N_DOWN,
                            SP_DTYPE_F32};
    fixture before;

    reset_y(f);
    before = *f;
    plan_rows(f, (int32_t[]){0, 0, 0, 0}, NULL);
    assert_ok(hand_apply(none, f->plan, SP_DTYPE_F32, f->x, K, &q, 1), NULL);
    assert_ok(hand_apply(none, f->plan, SP_DTYPE_F32, f->x, K, &down, 1), NULL);
    assert_ok(hand_apply(no_down, f->plan, SP_DTYPE_F32, f->x, K, &down, 1), NULL);
    assert_memory_equal(f->q, before.q, sizeof f->q);
    assert_memory_equal(f->down, before.down, sizeof f->down);
    assert_ok(hand_apply(no_down, f->plan, SP_DTYPE_F32, f->x, K, &q, 1), NULL);
    assert_memory_not_equal(f->q, before.q, sizeof f->q);
    /* A lever skips work, not checks. */
    down.y_stride = N_DOWN - 1;
    assert_int_equal(hand_apply(none, f->plan, SP_DTYPE_F32, f->x, K, &down, 1), SP_ERR_STRIDE);
    sp_delta_destroy(none);
    sp_delta_destroy(no_down);
}

/* ---- refusals ------------------------------------------------------------------------------ */

static void bad_calls_write_nothing(void **state)
{
    fixture *f = *state;
    sp_delta *delta = make_delta(f, false, 0);
    const sp_delta_output good = {sizeof(sp_delta_output), SITE(0, SP_MODULE_Q_PROJ), f->q, N_Q,
                                  SP_DTYPE_F32};
    sp_delta_output two[] = {
        good, {sizeof(sp_delta_output), SITE(0, SP_MODULE_K_PROJ), f->k, N_K, SP_DTYPE_F32}};
    fixture before;

    reset_y(f);
    before = *f;
    plan_rows(f, (int32_t[]){0, 0, 0, 0}, NULL);
    assert_int_equal(hand_apply(NULL, f->plan, SP_DTYPE_F32, f->x, K, two, 1), SP_ERR_ARGUMENT);
    assert_int_equal(hand_apply(delta, NULL, SP_DTYPE_F32, f->x, K, two, 1), SP_ERR_ARGUMENT);
    assert_int_equal(hand_apply(delta, f->plan, SP_DTYPE_F32, NULL, K, two, 1), SP_ERR_ARGUMENT);
    assert_int_equal(hand_apply(delta, f->plan, SP_DTYPE_F32, f->x, K, NULL, 1), SP_ERR_ARGUMENT);
    assert_int_equal(hand_apply(delta, f->plan, SP_DTYPE_F32, f->x, K, two, -1), SP_ERR_ARGUMENT);
    assert_int_equal(hand_apply(delta, f->plan, SP_DTYPE_F32, f->x, K - 1, two, 1), SP_ERR_STRIDE);
    /* The first output is good: it must not be written because the second is not. */
    two[1].y_stride = N_K - 1;
    assert_int_equal(hand_apply(delta, f->plan, SP_DTYPE_F32, f->x, K, two, 2), SP_ERR_STRIDE);
    two[1].y_stride = N_K;
    two[1].y_type = SP_DTYPE_BF16;
    assert_int_equal(hand_apply(delta, f->plan, SP_DTYPE_F32, f->x, K, two, 2), SP_ERR_ARGUMENT);
    two[1] = good;
    two[1].y = NULL;
    assert_int_equal(hand_apply(delta, f->plan, SP_DTYPE_F32, f->x, K, two, 2), SP_ERR_ARGUMENT);
    two[1] = good;
    two[1].site = N_SITES;
    assert_int_equal(hand_apply(delta, f->plan, SP_DTYPE_F32, f->x, K, two, 2), SP_ERR_ARGUMENT);
    two[1].site = -1;
    assert_int_equal(hand_apply(delta, f->plan, SP_DTYPE_F32, f->x, K, two, 2), SP_ERR_ARGUMENT);
    two[1] = (sp_delta_output){sizeof(sp_delta_output), SITE(0, SP_MODULE_DOWN_PROJ), f->down,
                               N_DOWN, SP_DTYPE_F32};
    assert_int_equal(hand_apply(delta, f->plan, SP_DTYPE_F32, f->x, K, two, 2), SP_ERR_ARGUMENT);
    assert_memory_equal(f->q, before.q, sizeof f->q);
    assert_memory_equal(f->k, before.k, sizeof f->k);
    assert_memory_equal(f->down, before.down, sizeof f->down);
    sp_delta_destroy(delta);
}

static void a_plan_above_rows_max_is_refused(void **state)
{
    fixture *f = *state;
    sp_delta *delta = make_delta(f, false, 0);
    sp_delta_output output = {sizeof(sp_delta_output), SITE(0, SP_MODULE_Q_PROJ), f->q, N_Q,
                              SP_DTYPE_F32};
    sp_plan *plan = NULL;

    assert_ok(sp_plan_create(ROWS + 1, 4, &plan, NULL), NULL);
    hand_plan_rows(plan, f->pool.pool, (int32_t[]){0, 0, 0, 0, -1}, NULL, ROWS + 1);
    assert_int_equal(hand_apply(delta, plan, SP_DTYPE_F32, f->x, K, &output, 1), SP_ERR_ARGUMENT);
    sp_plan_destroy(plan);
    sp_delta_destroy(delta);
}

static void bad_options_are_refused(void **state)
{
    fixture *f = *state;
    sp_delta_options options;
    sp_delta *delta = NULL;
    sp_error error;

    sp_delta_options_default(&options, sizeof options);
    assert_int_equal(sp_delta_create(&options, &delta, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "pool");
    options.pool = f->pool.pool;
    assert_int_equal(sp_delta_create(&options, NULL, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "out_delta");
    options.rows_max = 0;
    assert_int_equal(sp_delta_create(&options, &delta, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "rows_max");
    options.rows_max = (1 << 20) + 1;
    assert_int_equal(sp_delta_create(&options, &delta, &error), SP_ERR_ARGUMENT);
    options.rows_max = 8;
    options.cpu_isa = "mmx";
    assert_int_equal(sp_delta_create(&options, &delta, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "mmx");
    options.cpu_isa = "auto";
    options.struct_bytes = 0;
    assert_int_equal(sp_delta_create(&options, &delta, &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_delta_create(NULL, &delta, &error), SP_ERR_ARGUMENT);
    assert_null(delta);
    sp_delta_destroy(NULL);
    assert_int_equal(sp_delta_workspace_bytes(f->pool.layout, 0, false), 0);
    assert_int_equal(sp_delta_workspace_bytes(NULL, 8, false), 0);
}

/* On the CPU a step needs no beginning: the calls check. */
static void a_step_on_the_cpu_begins_with_checks(void **state)
{
    fixture *f = *state;
    sp_delta *delta = make_delta(f, false, 0);
    const sp_device_rows rows = {.struct_bytes = sizeof rows};
    sp_row_report report = {.struct_bytes = sizeof report};
    sp_plan *larger = NULL;
    sp_error error;

    plan_rows(f, (int32_t[]){0, 0, 0, 0}, NULL);
    assert_ok(sp_delta_upload(delta, f->plan, NULL, &error), &error);
    assert_ok(sp_delta_start(delta, f->plan, NULL, &error), &error);
    assert_int_equal(sp_delta_upload(delta, NULL, NULL, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "plan");
    assert_int_equal(sp_delta_start(NULL, f->plan, NULL, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "delta");
    assert_ok(sp_plan_create(ROWS + 1, 4, &larger, NULL), NULL);
    hand_plan_rows(larger, f->pool.pool, (int32_t[]){0, 0, 0, 0, -1}, NULL, ROWS + 1);
    assert_int_equal(sp_delta_upload(delta, larger, NULL, &error), SP_ERR_ARGUMENT);
    assert_non_null(strstr(error.text, "5 rows"));
    assert_int_equal(sp_delta_start(delta, larger, NULL, &error), SP_ERR_ARGUMENT);
    sp_plan_destroy(larger);
    assert_int_equal(sp_delta_device_bytes(f->pool.pool, ROWS, false), 0);
    assert_int_equal(sp_plan_from_device(delta, &rows, NULL, &error), SP_ERR_UNSUPPORTED);
    assert_string_equal(error.subject, "cpu");
    assert_int_equal(sp_delta_row_report(delta, &report, &error), SP_ERR_UNSUPPORTED);
    sp_delta_destroy(delta);
}

/* Each says which argument, what it was and what was expected. */
static void refusals_say_what_was_expected(void **state)
{
    fixture *f = *state;
    sp_delta *delta = make_delta(f, false, 0);
    sp_delta_output output = {sizeof output, SITE(0, SP_MODULE_Q_PROJ), f->q, N_Q, SP_DTYPE_F32};
    sp_delta_call call = hand_call(f->plan, SP_DTYPE_F32, f->x, K, &output, 1);
    sp_error error;

    plan_rows(f, (int32_t[]){0, 0, 0, 0}, NULL);
    call.x_stride = 11;
    assert_int_equal(sp_delta_apply(delta, &call, &error), SP_ERR_STRIDE);
    assert_string_equal(error.subject, "x_stride");
    assert_non_null(strstr(error.text, "11"));
    assert_non_null(strstr(error.text, "12"));
    call.x_stride = K;
    output.y_stride = 8;
    assert_int_equal(sp_delta_apply(delta, &call, &error), SP_ERR_STRIDE);
    assert_string_equal(error.subject, "y_stride");
    output.y_stride = N_Q;
    output.site = 1000;
    assert_int_equal(sp_delta_apply(delta, &call, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "site");
    assert_non_null(strstr(error.text, "1000"));
    output.site = SITE(0, SP_MODULE_Q_PROJ);
    call.plan = NULL;
    assert_int_equal(sp_delta_apply(delta, &call, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "plan");
    call.plan = f->plan;
    call.outputs = NULL;
    assert_int_equal(sp_delta_apply(delta, &call, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "outputs");
    call.outputs = &output;
    call.struct_bytes = 4;
    assert_int_equal(sp_delta_apply(delta, &call, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "sp_delta_call");
    assert_int_equal(sp_delta_apply(delta, NULL, &error), SP_ERR_ARGUMENT);
    sp_delta_destroy(delta);
}

/* Outputs of an older host, a field shorter and so closer together, and of a newer one. */
static void outputs_of_other_sizes_are_read(void **state)
{
    typedef struct newer_output {
        sp_delta_output known;
        int64_t more;
    } newer_output;
    fixture *f = *state;
    sp_delta *delta = make_delta(f, false, 0);
    newer_output outputs[2] = {
        {{sizeof *outputs, SITE(0, SP_MODULE_Q_PROJ), f->q, N_Q, SP_DTYPE_F32}, 0},
        {{sizeof *outputs, SITE(0, SP_MODULE_K_PROJ), f->k, N_K, SP_DTYPE_F32}, 0}};
    sp_delta_call call = hand_call(f->plan, SP_DTYPE_F32, f->x, K, &outputs[0].known, 2);
    fixture before;
    sp_error error;

    reset_y(f);
    before = *f;
    plan_rows(f, (int32_t[]){0, 0, 0, 0}, NULL);
    assert_ok(sp_delta_apply(delta, &call, &error), &error);
    expect_row(&f->adapters[0]->sites[0], 2.0, f->x[1], before.q[1], f->q[1]);
    outputs[1].more = 1;
    assert_int_equal(sp_delta_apply(delta, &call, &error), SP_ERR_UNSUPPORTED);
    assert_string_equal(error.subject, "sp_delta_output");
    outputs[1] = (newer_output){.known = outputs[1].known};
    outputs[1].known.struct_bytes = sizeof(sp_delta_output);
    assert_int_equal(sp_delta_apply(delta, &call, &error), SP_ERR_ARGUMENT);
    sp_delta_destroy(delta);
}

/* ---- memory -------------------------------------------------------------------------------- */

static void apply_does_not_allocate(void **state)
{
    fixture *f = *state;
    sp_delta *delta = make_delta(f, false, 0);
    sp_delta_output output = {sizeof(sp_delta_output), SITE(0, SP_MODULE_Q_PROJ), f->q, N_Q,
                              SP_DTYPE_F32};
    size_t blocks = sp_alloc_blocks();

    plan_rows(f, (int32_t[]){0, 0, 1, -1}, NULL);
    sp_alloc_fail_after(0);
    assert_ok(hand_apply(delta, f->plan, SP_DTYPE_F32, f->x, K, &output, 1), NULL);
    assert_false(sp_alloc_failed());
    sp_alloc_fail_after(-1);
    assert_int_equal(sp_alloc_blocks(), blocks);
    sp_delta_destroy(delta);
}

static void create_takes_the_bytes_it_says(void **state)
{
    fixture *f = *state;
    size_t before = sp_alloc_bytes();
    size_t workspace = sp_delta_workspace_bytes(f->pool.layout, ROWS, false);
    sp_delta *delta = make_delta(f, false, 0);
    size_t taken = sp_alloc_bytes() - before;

    assert_in_range(taken, workspace, workspace + 4096);
    sp_delta_destroy(delta);
    assert_int_equal(sp_alloc_bytes(), before);
}

static void every_failed_allocation_is_survived(void **state)
{
    fixture *f = *state;
    size_t before = sp_alloc_bytes();
    sp_delta_options options;
    sp_error error;
    int64_t n = 0;

    sp_delta_options_default(&options, sizeof options);
    options.pool = f->pool.pool;
    options.exec = f->exec;
    for (;; n++) {
        sp_delta *delta = NULL;

        sp_alloc_fail_after(n);
        if (sp_delta_create(&options, &delta, &error) == SP_OK) {
            sp_alloc_fail_after(-1);
            sp_delta_destroy(delta);
            break;
        }
        assert_true(sp_alloc_failed());
        assert_int_equal(error.status, SP_ERR_MEMORY);
        assert_int_equal(sp_alloc_bytes(), before);
    }
    assert_int_equal(n, 2);
}

/* ---- changes between steps ----------------------------------------------------------------- */

static void the_next_step_sees_a_swapped_slot(void **state)
{
    fixture *f = *state;
    sp_delta *delta = make_delta(f, false, 0);
    sp_delta_output outputs[] = {
        {sizeof(sp_delta_output), SITE(0, SP_MODULE_Q_PROJ), f->q, N_Q, SP_DTYPE_F32},
        {sizeof(sp_delta_output), SITE(0, SP_MODULE_K_PROJ), f->k, N_K, SP_DTYPE_F32}};
    hand_adapter *other = hand_adapter_create(99);
    sp_test_random random = {9};
    fixture before;

    hand_adapter_add(other, &sites[1], 2, 3.0f, SP_DTYPE_F32, &random);
    hand_unload(f->pool.pool, hand_handle(f->pool.pool, 0));
    assert_int_equal(hand_load_adapter(&f->pool, other).slot, 0);
    reset_y(f);
    before = *f;
    plan_rows(f, (int32_t[]){0, 0, 0, 0}, NULL); /* the plan's arrays have not moved */
    assert_ok(hand_apply(delta, f->plan, SP_DTYPE_F32, f->x, K, outputs, 2), NULL);
    assert_memory_equal(f->q, before.q, sizeof f->q); /* the old adapter's q is gone */
    for (int32_t row = 0; row < ROWS; row++)
        expect_row(&other->sites[0], 3.0, f->x[row], before.k[row], f->k[row]);
    hand_adapter_destroy(other);
    sp_delta_destroy(delta);
}

/* ---- plans that have ended ----------------------------------------------------------------- */

/* Every call that takes a plan refuses it, and writes nothing. */
static void expect_plan_refused(fixture *f, sp_delta *delta)
{
    sp_delta_output output = {sizeof(sp_delta_output), SITE(0, SP_MODULE_Q_PROJ), f->q, N_Q,
                              SP_DTYPE_F32};
    const int32_t tokens[ROWS] = {0};
    sp_delta_call call = hand_call(f->plan, SP_DTYPE_F32, f->x, K, &output, 1);
    sp_delta_pieces pieces = {.struct_bytes = sizeof pieces, .fits = true, .pack = 7};
    fixture before = *f;

    assert_int_equal(hand_apply(delta, f->plan, SP_DTYPE_F32, f->x, K, &output, 1), SP_ERR_STATE);
    assert_int_equal(sp_delta_pieces_begin(delta, &call, &pieces, NULL), SP_ERR_STATE);
    assert_int_equal(sp_delta_shrink(delta, &call, NULL), SP_ERR_STATE);
    assert_int_equal(sp_delta_expand(delta, &call, NULL), SP_ERR_STATE);
    assert_int_equal(pieces.pack, 7);
    assert_int_equal(sp_delta_upload(delta, f->plan, NULL, NULL), SP_ERR_STATE);
    assert_int_equal(sp_delta_start(delta, f->plan, NULL, NULL), SP_ERR_STATE);
    assert_int_equal(hand_embed(delta, f->plan, tokens, f->q, N_Q), SP_ERR_STATE);
    assert_int_equal(hand_head(delta, f->plan, SP_DTYPE_F32, f->x, K, SP_DTYPE_F32, f->q, N_Q),
                     SP_ERR_STATE);
    assert_memory_equal(f->q, before.q, sizeof f->q);
}

static void a_plan_of_released_versions_is_refused(void **state)
{
    fixture *f = *state;
    sp_delta *delta = make_delta(f, false, 0);
    sp_slot_handle handle = hand_handle(f->pool.pool, 0);
    sp_delta_output output = {sizeof(sp_delta_output), SITE(0, SP_MODULE_Q_PROJ), f->q, N_Q,
                              SP_DTYPE_F32};
    fixture before = *f;

    plan_rows(f, (int32_t[]){0, -1, 0, 2}, NULL);
    assert_ok(sp_pool_release(f->pool.pool, handle, NULL), NULL);
    expect_plan_refused(f, delta);
    assert_ok(sp_pool_acquire(f->pool.pool, handle, NULL), NULL);
    assert_ok(hand_apply(delta, f->plan, SP_DTYPE_F32, f->x, K, &output, 1), NULL);
    assert_memory_not_equal(f->q[0], before.q[0], sizeof f->q[0]);
    reset_y(f);
    hand_unload(f->pool.pool, handle);
    expect_plan_refused(f, delta);
    assert_int_equal(hand_load_adapter(&f->pool, f->adapters[1]).slot, 0);
    expect_plan_refused(f, delta);
    sp_delta_destroy(delta);
}

static void a_plan_of_another_pool_is_refused(void **state)
{
    fixture *f = *state;
    hand_pool other = hand_pool_create_part(sites, N_SITES, N_HELD, 8, SP_DTYPE_F32, 4);
    sp_delta *delta = make_delta(f, false, 0);

    expect_plan_refused(f, delta); /* never built */
    assert_int_equal(hand_load_adapter(&other, f->adapters[0]).slot, 0);
    hand_plan_rows(f->plan, other.pool, (int32_t[]){0, 0, 0, 0}, NULL, ROWS);
    expect_plan_refused(f, delta);
    hand_pool_destroy(&other);
    expect_plan_refused(f, delta);
    /* Nor one of rows alone. */
    assert_ok(sp_plan_build_rows(f->plan, (int32_t[]){0, 0, 0, 0}, NULL, ROWS, 4, NULL), NULL);
    expect_plan_refused(f, delta);
    sp_delta_destroy(delta);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(absent_rows_keep_their_bytes, setup, teardown),
        cmocka_unit_test_setup_teardown(layers_are_apart, setup, teardown),
        cmocka_unit_test_setup_teardown(sites_that_no_pool_holds_cost_nothing, setup, teardown),
        cmocka_unit_test_setup_teardown(levers_skip_what_they_say, setup, teardown),
        cmocka_unit_test_setup_teardown(bad_calls_write_nothing, setup, teardown),
        cmocka_unit_test_setup_teardown(a_plan_above_rows_max_is_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(bad_options_are_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(a_step_on_the_cpu_begins_with_checks, setup, teardown),
        cmocka_unit_test_setup_teardown(refusals_say_what_was_expected, setup, teardown),
        cmocka_unit_test_setup_teardown(outputs_of_other_sizes_are_read, setup, teardown),
        cmocka_unit_test_setup_teardown(apply_does_not_allocate, setup, teardown),
        cmocka_unit_test_setup_teardown(create_takes_the_bytes_it_says, setup, teardown),
        cmocka_unit_test_setup_teardown(every_failed_allocation_is_survived, setup, teardown),
        cmocka_unit_test_setup_teardown(the_next_step_sees_a_swapped_slot, setup, teardown),
        cmocka_unit_test_setup_teardown(a_plan_of_released_versions_is_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(a_plan_of_another_pool_is_refused, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
