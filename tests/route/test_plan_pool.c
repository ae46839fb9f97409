/*
 * The plan of a step from spans against a pool: which versions may run, pads, and that a refusal
 * leaves the plan of the step before as it was.
 */
#include "support/hand.h"
#include "support/test.h"

#include "base/alloc.h"

#include <sidepath/route.h>

#include <math.h>
#include <string.h>

enum { SLOTS = 4, ROWS_MAX = 16 };

/* Slots 0 and 1 are ready and held once, 2 is ready and held by no one, 3 is empty. */
typedef struct fixture {
    hand_pool hand;
    sp_plan *plan;
    uint64_t generation[3];
} fixture;

static int setup(void **state)
{
    static fixture f;
    const sp_site_dims dims = {0, SP_MODULE_Q_PROJ, 4, 4};

    f.hand = hand_pool_create(1, &dims, 1, 8, SP_DTYPE_F32, SLOTS);
    for (int32_t i = 0; i < 3; i++) {
        hand_adapter *adapter = hand_adapter_create((uint64_t)i + 1);

        assert_int_equal(hand_load_adapter(&f.hand, adapter, &f.generation[i]), i);
        hand_adapter_destroy(adapter);
        if (i < 2)
            assert_ok(sp_pool_acquire(f.hand.pool, i, f.generation[i]), NULL);
    }
    assert_ok(sp_plan_create(ROWS_MAX, SLOTS, &f.plan), NULL);
    *state = &f;
    return 0;
}

static int teardown(void **state)
{
    fixture *f = *state;

    sp_plan_destroy(f->plan);
    hand_pool_destroy(&f->hand);
    return 0;
}

static void expect_ints(const int32_t *got, const int32_t *want, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        assert_int_equal(got[i], want[i]);
}

static void build(const fixture *f, const sp_route_span *spans, int32_t n_spans, int32_t padded)
{
    sp_error error;

    assert_ok(sp_plan_build(f->plan, f->hand.pool, spans, n_spans, padded, &error), &error);
}

static void prefill_decode_and_base_rows_share_a_step(void **state)
{
    fixture *f = *state;
    const sp_route_span spans[] = {
        {3, 1, f->generation[1], 1.0f},  /* a prefill chunk */
        {1, SP_SLOT_BASE, 123456, 1.0f}, /* the base's generation is not looked at */
        {1, 0, f->generation[0], 0.5f},  /* decode */
        {2, 1, f->generation[1], 2.0f},  /* another request of slot 1 */
        {1, 0, f->generation[0], 0.0f},  /* scale 0 is the base */
    };
    sp_plan_view view;

    build(f, spans, 5, 10);
    view = sp_plan_get(f->plan);
    assert_int_equal(view.n_rows, 10);
    expect_ints(view.seq_slot, (int32_t[]){1, 1, 1, -1, 0, 1, 1, -1, -1, -1}, 10);
    assert_memory_equal(view.row_scale, ((float[]){1, 1, 1, 1, 0.5f, 2, 2, 0, 1, 1}),
                        10 * sizeof(float));
    assert_int_equal(view.n_routed, 6);
    expect_ints(view.row_order, (int32_t[]){4, 0, 1, 2, 5, 6}, 6);
    assert_int_equal(view.n_segments, 2);
    expect_ints(view.segment_begin, (int32_t[]){0, 1, 6}, 3);
    assert_int_equal(view.n_tiles, 2);
}

static void pads_never_make_a_step_smaller(void **state)
{
    fixture *f = *state;
    const sp_route_span span = {5, 0, f->generation[0], 1.0f};

    build(f, &span, 1, 0);
    assert_int_equal(sp_plan_get(f->plan).n_rows, 5);
    build(f, &span, 1, 5);
    assert_int_equal(sp_plan_get(f->plan).n_rows, 5);
    build(f, &span, 1, ROWS_MAX);
    assert_int_equal(sp_plan_get(f->plan).n_rows, ROWS_MAX);
    assert_int_equal(sp_plan_get(f->plan).n_routed, 5);
    build(f, NULL, 0, 3);
    assert_int_equal(sp_plan_get(f->plan).n_rows, 3);
    assert_int_equal(sp_plan_get(f->plan).n_routed, 0);
    build(f, NULL, 0, 0);
    assert_int_equal(sp_plan_get(f->plan).n_rows, 0);
}

static void a_draining_version_still_runs(void **state)
{
    fixture *f = *state;
    const sp_route_span span = {1, 0, f->generation[0], 1.0f};

    assert_int_equal(sp_pool_drain(f->hand.pool, 0), SP_BUSY);
    build(f, &span, 1, 1);
    assert_int_equal(sp_plan_get(f->plan).n_routed, 1);
    assert_ok(sp_pool_release(f->hand.pool, 0, f->generation[0]), NULL);
    assert_int_equal(sp_plan_build(f->plan, f->hand.pool, &span, 1, 1, NULL), SP_ERR_STATE);
}

typedef struct refusal {
    const char *what;
    sp_route_span span;
    sp_status status;
} refusal;

static void a_refusal_changes_nothing(void **state)
{
    fixture *f = *state;
    const uint64_t g0 = f->generation[0];
    const sp_route_span good[] = {{2, 1, f->generation[1], 1.0f}, {1, 0, g0, 3.0f}};
    const refusal refusals[] = {
        {"no rows", {0, 0, g0, 1.0f}, SP_ERR_ARGUMENT},
        {"negative rows", {-1, 0, g0, 1.0f}, SP_ERR_ARGUMENT},
        {"too many rows", {ROWS_MAX - 1, 0, g0, 1.0f}, SP_ERR_ARGUMENT},
        {"rows that overflow", {INT32_MAX, 0, g0, 1.0f}, SP_ERR_ARGUMENT},
        {"a slot below the base", {1, -2, g0, 1.0f}, SP_ERR_ARGUMENT},
        {"a slot above the pool", {1, SLOTS, g0, 1.0f}, SP_ERR_ARGUMENT},
        {"a negative scale", {1, 0, g0, -1.0f}, SP_ERR_ARGUMENT},
        {"a scale above 16", {1, 0, g0, 16.01f}, SP_ERR_ARGUMENT},
        {"a scale that is no number", {1, 0, g0, NAN}, SP_ERR_ARGUMENT},
        {"a base row's bad scale", {1, -1, 0, INFINITY}, SP_ERR_ARGUMENT},
        {"an empty slot", {1, 3, 0, 1.0f}, SP_ERR_STATE},
        {"another generation", {1, 0, g0 + 1, 1.0f}, SP_ERR_STATE},
        {"a slot that no one holds", {1, 2, f->generation[2], 1.0f}, SP_ERR_STATE},
        {"a stale version at scale 0", {1, 0, g0 + 1, 0.0f}, SP_ERR_STATE},
    };

    build(f, good, 2, 5);
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
        const sp_route_span spans[] = {good[0], refusals[i].span};
        sp_error error = {.status = SP_OK};
        sp_status status = sp_plan_build(f->plan, f->hand.pool, spans, 2, 2, &error);
        sp_plan_view view = sp_plan_get(f->plan);

        if (status != refusals[i].status)
            fail_msg("%s: %s", refusals[i].what, sp_status_name(status));
        assert_int_equal(error.status, status);
        assert_int_equal(error.position, 1);
        assert_int_equal(view.n_rows, 5);
        expect_ints(view.seq_slot, (int32_t[]){1, 1, 0, -1, -1}, 5);
        expect_ints(view.row_order, (int32_t[]){2, 0, 1}, 3);
        assert_memory_equal(view.row_scale, ((float[]){1, 1, 3, 1, 1}), 5 * sizeof(float));
    }
    assert_int_equal(sp_plan_build(NULL, f->hand.pool, good, 2, 5, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_build(f->plan, NULL, good, 2, 5, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_build(f->plan, f->hand.pool, NULL, 2, 5, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_build(f->plan, f->hand.pool, good, -1, 5, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_build(f->plan, f->hand.pool, good, 2, -1, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_build(f->plan, f->hand.pool, good, 2, ROWS_MAX + 1, NULL),
                     SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_get(f->plan).n_rows, 5);
}

static void loading_slots_do_not_run(void **state)
{
    fixture *f = *state;
    sp_route_span span = {1, 3, 0, 1.0f};
    int32_t slot;

    assert_ok(sp_pool_load_begin(f->hand.pool, &slot), NULL);
    assert_int_equal(slot, 3);
    assert_int_equal(sp_plan_build(f->plan, f->hand.pool, &span, 1, 1, NULL), SP_ERR_STATE);
    assert_ok(sp_pool_load_abort(f->hand.pool, 3), NULL);
}

static void a_plan_for_fewer_slots_refuses_the_others(void **state)
{
    fixture *f = *state;
    const sp_route_span span = {1, 1, f->generation[1], 1.0f};
    sp_plan *plan = NULL;

    assert_ok(sp_plan_create(1, 1, &plan), NULL);
    assert_int_equal(sp_plan_build(plan, f->hand.pool, &span, 1, 1, NULL), SP_ERR_ARGUMENT);
    sp_plan_destroy(plan);
}

static void building_does_not_allocate(void **state)
{
    fixture *f = *state;
    const sp_route_span span = {4, 1, f->generation[1], 1.0f};

    sp_alloc_fail_after(0);
    assert_int_equal(sp_plan_build(f->plan, f->hand.pool, &span, 1, 8, NULL), SP_OK);
    assert_false(sp_alloc_failed());
    sp_alloc_fail_after(-1);
}

#define WITH_POOL(test) cmocka_unit_test_setup_teardown(test, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WITH_POOL(prefill_decode_and_base_rows_share_a_step),
        WITH_POOL(pads_never_make_a_step_smaller),
        WITH_POOL(a_draining_version_still_runs),
        WITH_POOL(a_refusal_changes_nothing),
        WITH_POOL(loading_slots_do_not_run),
        WITH_POOL(a_plan_for_fewer_slots_refuses_the_others),
        WITH_POOL(building_does_not_allocate),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
