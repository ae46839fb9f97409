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
    sp_slot_handle handles[3];
} fixture;

static const sp_slot_handle base = {.slot = SP_SLOT_BASE, .generation = 123456};

static sp_route_span span_of(int32_t n_rows, sp_slot_handle handle, float scale)
{
    return (sp_route_span){sizeof(sp_route_span), handle, n_rows, scale};
}

static void release(const fixture *f, sp_slot_handle handle)
{
    sp_error error;

    assert_ok(sp_pool_release(f->hand.pool, handle, &error), &error);
}

static int setup(void **state)
{
    static fixture f;
    const site_dims dims = {0, SP_MODULE_Q_PROJ, 4, 4};

    f.hand = hand_pool_create(&dims, 1, 8, SP_DTYPE_F32, SLOTS);
    for (int32_t i = 0; i < 3; i++) {
        hand_adapter *adapter = hand_adapter_create((uint64_t)i + 1);

        f.handles[i] = hand_load_adapter(&f.hand, adapter);
        assert_int_equal(f.handles[i].slot, i);
        hand_adapter_destroy(adapter);
    }
    release(&f, f.handles[2]);
    assert_ok(sp_plan_create(ROWS_MAX, SLOTS, &f.plan, NULL), NULL);
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
        span_of(3, f->handles[1], 1.0f), /* a prefill chunk */
        span_of(1, base, 1.0f),          /* its generation is not looked at */
        span_of(1, f->handles[0], 0.5f), /* decode */
        span_of(2, f->handles[1], 2.0f), /* another request of slot 1 */
        span_of(1, f->handles[0], 0.0f), /* scale 0 is the base */
    };
    sp_plan_view view;

    build(f, spans, 5, 10);
    view = *sp_plan_get(f->plan);
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
    const sp_route_span span = span_of(5, f->handles[0], 1.0f);

    build(f, &span, 1, 0);
    assert_int_equal(sp_plan_get(f->plan)->n_rows, 5);
    build(f, &span, 1, 5);
    assert_int_equal(sp_plan_get(f->plan)->n_rows, 5);
    build(f, &span, 1, ROWS_MAX);
    assert_int_equal(sp_plan_get(f->plan)->n_rows, ROWS_MAX);
    assert_int_equal(sp_plan_get(f->plan)->n_routed, 5);
    build(f, NULL, 0, 3);
    assert_int_equal(sp_plan_get(f->plan)->n_rows, 3);
    assert_int_equal(sp_plan_get(f->plan)->n_routed, 0);
    build(f, NULL, 0, 0);
    assert_int_equal(sp_plan_get(f->plan)->n_rows, 0);
}

static void a_draining_version_still_runs(void **state)
{
    fixture *f = *state;
    const sp_route_span span = span_of(1, f->handles[0], 1.0f);
    sp_error error;

    assert_int_equal(sp_pool_drain(f->hand.pool, f->handles[0], NULL), SP_BUSY);
    build(f, &span, 1, 1);
    assert_int_equal(sp_plan_get(f->plan)->n_routed, 1);
    assert_ok(sp_plan_check(f->plan, f->hand.pool, NULL), NULL);
    release(f, f->handles[0]);
    assert_int_equal(sp_plan_build(f->plan, f->hand.pool, &span, 1, 1, &error), SP_ERR_STATE);
    assert_string_equal(error.code, "slot-empty");
}

typedef struct refusal {
    const char *what;
    sp_route_span span;
    sp_status status;
    const char *code;
} refusal;

static void expect_refusal(const fixture *f, const refusal *r, const sp_route_span *good)
{
    const sp_route_span spans[] = {*good, r->span};
    sp_error error = {.status = SP_OK, .code = ""};
    sp_status status = sp_plan_build(f->plan, f->hand.pool, spans, 2, 2, &error);
    const sp_plan_view *view = sp_plan_get(f->plan);

    if (status != r->status || strcmp(error.code, r->code) != 0)
        fail_msg("%s: %s, %s", r->what, sp_status_name(status), error.code);
    assert_int_equal(error.status, status);
    assert_string_equal(error.subject, "span");
    assert_int_equal(error.position, 1);
    assert_int_equal(view->n_rows, 5);
    expect_ints(view->seq_slot, (int32_t[]){1, 1, 0, -1, -1}, 5);
    expect_ints(view->row_order, (int32_t[]){2, 0, 1}, 3);
    assert_memory_equal(view->row_scale, ((float[]){1, 1, 3, 1, 1}), 5 * sizeof(float));
    assert_ok(sp_plan_check(f->plan, f->hand.pool, NULL), NULL);
}

static sp_slot_handle slot_of(int32_t slot)
{
    return (sp_slot_handle){slot, 1};
}

static void a_refusal_changes_nothing(void **state)
{
    fixture *f = *state;
    const sp_slot_handle h0 = f->handles[0], old = {0, h0.generation - 1};
    const sp_route_span good[] = {span_of(2, f->handles[1], 1.0f), span_of(1, h0, 3.0f)};
    const refusal refusals[] = {
        {"no rows", span_of(0, h0, 1.0f), SP_ERR_ARGUMENT, ""},
        {"negative rows", span_of(-1, h0, 1.0f), SP_ERR_ARGUMENT, ""},
        {"too many rows", span_of(ROWS_MAX - 1, h0, 1.0f), SP_ERR_ARGUMENT, ""},
        {"rows that overflow", span_of(INT32_MAX, h0, 1.0f), SP_ERR_ARGUMENT, ""},
        {"a slot below the base", span_of(1, slot_of(-2), 1.0f), SP_ERR_ARGUMENT,
         "slot-out-of-range"},
        {"a slot above the pool", span_of(1, slot_of(SLOTS), 1.0f), SP_ERR_ARGUMENT,
         "slot-out-of-range"},
        {"a negative scale", span_of(1, h0, -1.0f), SP_ERR_ARGUMENT, ""},
        {"a scale above 16", span_of(1, h0, 16.01f), SP_ERR_ARGUMENT, ""},
        {"a scale that is no number", span_of(1, h0, NAN), SP_ERR_ARGUMENT, ""},
        {"a base row's bad scale", span_of(1, base, INFINITY), SP_ERR_ARGUMENT, ""},
        {"an empty slot", span_of(1, slot_of(3), 1.0f), SP_ERR_STATE, "slot-empty"},
        {"a handle that nobody filled in", span_of(1, (sp_slot_handle){0, 0}, 1.0f), SP_ERR_STATE,
         "handle-stale"},
        {"another generation", span_of(1, old, 1.0f), SP_ERR_STATE, "handle-stale"},
        {"a slot that no one holds", span_of(1, f->handles[2], 1.0f), SP_ERR_STATE,
         "handle-released"},
        {"a stale version at scale 0", span_of(1, old, 0.0f), SP_ERR_STATE, "handle-stale"},
    };

    build(f, good, 2, 5);
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++)
        expect_refusal(f, &refusals[i], &good[0]);
    assert_int_equal(sp_plan_build(NULL, f->hand.pool, good, 2, 5, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_build(f->plan, NULL, good, 2, 5, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_build(f->plan, f->hand.pool, NULL, 2, 5, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_build(f->plan, f->hand.pool, good, -1, 5, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_build(f->plan, f->hand.pool, good, 2, -1, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_build(f->plan, f->hand.pool, good, 2, ROWS_MAX + 1, NULL),
                     SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_get(f->plan)->n_rows, 5);
}

static void loading_slots_do_not_run(void **state)
{
    fixture *f = *state;
    sp_route_span span = span_of(1, slot_of(3), 1.0f);
    sp_error error;
    int32_t slot;

    assert_ok(sp_pool_load_begin(f->hand.pool, &slot, NULL), NULL);
    assert_int_equal(slot, 3);
    assert_int_equal(sp_plan_build(f->plan, f->hand.pool, &span, 1, 1, &error), SP_ERR_STATE);
    assert_string_equal(error.code, "slot-loading");
    assert_ok(sp_pool_load_abort(f->hand.pool, 3, NULL), NULL);
}

static void a_plan_for_fewer_slots_refuses_the_others(void **state)
{
    fixture *f = *state;
    const sp_route_span span = span_of(1, f->handles[1], 1.0f);
    sp_plan *plan = NULL;

    assert_ok(sp_plan_create(1, 1, &plan, NULL), NULL);
    assert_int_equal(sp_plan_build(plan, f->hand.pool, &span, 1, 1, NULL), SP_ERR_ARGUMENT);
    sp_plan_destroy(plan);
}

/* ---- what the plan remembers --------------------------------------------------------------- */

static void expect_ended(const sp_plan *plan, const sp_pool *pool, const char *code)
{
    sp_error error = {.code = ""};

    assert_int_equal(sp_plan_check(plan, pool, &error), SP_ERR_STATE);
    assert_string_equal(error.code, code);
}

static void a_plan_is_of_one_pool(void **state)
{
    fixture *f = *state;
    const site_dims dims = {0, SP_MODULE_Q_PROJ, 4, 4};
    const sp_route_span span = span_of(1, base, 1.0f);
    hand_pool other = hand_pool_create(&dims, 1, 8, SP_DTYPE_F32, SLOTS);

    expect_ended(f->plan, f->hand.pool, "plan-of-another-pool"); /* never built */
    build(f, &span, 1, 1);
    assert_ok(sp_plan_check(f->plan, f->hand.pool, NULL), NULL);
    expect_ended(f->plan, other.pool, "plan-of-another-pool");
    assert_ok(sp_plan_build(f->plan, other.pool, &span, 1, 1, NULL), NULL);
    expect_ended(f->plan, f->hand.pool, "plan-of-another-pool");
    assert_int_equal(sp_plan_check(NULL, f->hand.pool, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_check(f->plan, NULL, NULL), SP_ERR_ARGUMENT);
    hand_pool_destroy(&other);
}

static void a_plan_ends_with_its_versions(void **state)
{
    fixture *f = *state;
    const sp_route_span spans[] = {span_of(1, f->handles[0], 1.0f),
                                   span_of(1, f->handles[1], 1.0f)};

    build(f, spans, 1, 1);
    release(f, f->handles[1]); /* no row is of it */
    assert_ok(sp_plan_check(f->plan, f->hand.pool, NULL), NULL);
    assert_ok(sp_pool_acquire(f->hand.pool, f->handles[1], NULL), NULL);
    build(f, spans, 2, 2);
    assert_ok(sp_plan_check(f->plan, f->hand.pool, NULL), NULL);
    release(f, f->handles[1]);
    expect_ended(f->plan, f->hand.pool, "handle-released");
    assert_ok(sp_pool_acquire(f->hand.pool, f->handles[1], NULL), NULL);
    assert_ok(sp_plan_check(f->plan, f->hand.pool, NULL), NULL); /* it is the same version */
    hand_unload(f->hand.pool, f->handles[1]);
    expect_ended(f->plan, f->hand.pool, "slot-empty");
}

static void a_plan_ends_when_its_slot_is_loaded_anew(void **state)
{
    fixture *f = *state;
    const sp_route_span span = span_of(1, f->handles[0], 1.0f);
    hand_adapter *adapter = hand_adapter_create(77);

    build(f, &span, 1, 1);
    hand_unload(f->hand.pool, f->handles[0]);
    assert_int_equal(hand_load_adapter(&f->hand, adapter).slot, 0);
    expect_ended(f->plan, f->hand.pool, "handle-stale");
    hand_adapter_destroy(adapter);
}

/* ---- rows of another plan ------------------------------------------------------------------ */

/* What ended between the build and the selection has ended for the selection, too. */
static void a_selection_ends_with_its_plans_versions(void **state)
{
    fixture *f = *state;
    const sp_route_span span = span_of(2, f->handles[0], 1.0f);
    sp_plan *head;

    assert_ok(sp_plan_create(ROWS_MAX, SLOTS, &head, NULL), NULL);
    build(f, &span, 1, 0);
    release(f, f->handles[0]);
    assert_ok(sp_plan_select(head, f->plan, (int32_t[]){1}, 1, NULL), NULL);
    expect_ended(head, f->hand.pool, "handle-released");
    sp_plan_destroy(head);
}

static void a_selection_has_the_rows_of_its_plan(void **state)
{
    fixture *f = *state;
    const sp_route_span spans[] = {span_of(3, f->handles[1], 2.0f), span_of(2, base, 1.0f),
                                   span_of(1, f->handles[0], 0.5f)};
    sp_plan *head = NULL;
    const sp_plan_view *view;

    build(f, spans, 3, 8);
    assert_ok(sp_plan_create(4, SLOTS, &head, NULL), NULL);
    assert_ok(sp_plan_select(head, f->plan, (int32_t[]){5, 3, 1, 1}, 4, NULL), NULL);
    view = sp_plan_get(head);
    assert_int_equal(view->n_rows, 4);
    expect_ints(view->seq_slot, (int32_t[]){0, -1, 1, 1}, 4);
    assert_memory_equal(view->row_scale, ((float[]){0.5f, 1, 2, 2}), 4 * sizeof(float));
    expect_ints(view->row_order, (int32_t[]){0, 2, 3}, 3);
    assert_int_equal(view->n_segments, 2);
    assert_ok(sp_plan_check(head, f->hand.pool, NULL), NULL);
    release(f, f->handles[1]);
    expect_ended(head, f->hand.pool, "handle-released");
    assert_ok(sp_plan_select(head, f->plan, (int32_t[]){5}, 1, NULL), NULL);
    assert_ok(sp_plan_check(head, f->hand.pool, NULL), NULL);
    sp_plan_destroy(head);
}

static void a_bad_selection_changes_nothing(void **state)
{
    fixture *f = *state;
    const sp_route_span spans[] = {span_of(2, f->handles[1], 2.0f),
                                   span_of(1, f->handles[0], 1.0f)};
    sp_plan *head = NULL;
    sp_error error;

    build(f, spans, 2, 3);
    assert_ok(sp_plan_create(2, 1, &head, NULL), NULL);
    assert_ok(sp_plan_select(head, f->plan, (int32_t[]){2}, 1, NULL), NULL);
    assert_int_equal(sp_plan_select(head, f->plan, (int32_t[]){2, 3}, 2, &error), SP_ERR_ARGUMENT);
    assert_int_equal(error.position, 1);
    assert_int_equal(sp_plan_select(head, f->plan, (int32_t[]){-1}, 1, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_select(head, f->plan, (int32_t[]){2, 0}, 2, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.code, "slot-out-of-range");
    assert_int_equal(sp_plan_select(head, f->plan, (int32_t[]){2, 2, 2}, 3, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_select(head, f->plan, NULL, 1, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_select(head, head, (int32_t[]){0}, 1, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_select(NULL, f->plan, (int32_t[]){0}, 1, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_select(head, NULL, (int32_t[]){0}, 1, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_get(head)->n_rows, 1);
    assert_int_equal(sp_plan_get(head)->seq_slot[0], 0);
    sp_plan_destroy(head);
}

/* ---- the caller's sizes -------------------------------------------------------------------- */

/* Elements are as far apart as the caller's struct is long. */
static void spans_have_the_callers_size(void **state)
{
    fixture *f = *state;
    struct longer {
        sp_route_span span;
        uint64_t more;
    } longer[2] = {{span_of(2, f->handles[0], 1.0f), 0}, {span_of(1, f->handles[1], 1.0f), 0}};
    sp_route_span bad = span_of(1, f->handles[0], 1.0f);
    sp_error error;

    longer[0].span.struct_bytes = longer[1].span.struct_bytes = sizeof longer[0];
    build(f, &longer[0].span, 2, 3);
    expect_ints(sp_plan_get(f->plan)->seq_slot, (int32_t[]){0, 0, 1}, 3);
    longer[1].more = 1;
    assert_int_equal(sp_plan_build(f->plan, f->hand.pool, &longer[0].span, 2, 3, &error),
                     SP_ERR_UNSUPPORTED);
    assert_string_equal(error.subject, "sp_route_span");
    bad.struct_bytes = 0;
    assert_int_equal(sp_plan_build(f->plan, f->hand.pool, &bad, 1, 1, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "sp_route_span");
}

/* A span that says nothing of its scale must not fall to the base, which is what 0 means. */
static void a_span_without_a_scale_runs_its_adapter(void **state)
{
    fixture *f = *state;
    struct older {
        size_t struct_bytes;
        sp_slot_handle handle;
        int32_t n_rows;
    } older = {offsetof(sp_route_span, scale), f->handles[1], 2};
    sp_route_span span;

    sp_route_span_default(&span, sizeof span);
    build(f, &span, 1, 0);
    expect_ints(sp_plan_get(f->plan)->seq_slot, (int32_t[]){SP_SLOT_BASE}, 1);
    span.handle = f->handles[1];
    build(f, &span, 1, 0);
    expect_ints(sp_plan_get(f->plan)->seq_slot, (int32_t[]){1}, 1);
    build(f, (const sp_route_span *)&older, 1, 0);
    expect_ints(sp_plan_get(f->plan)->seq_slot, (int32_t[]){1, 1}, 2);
    assert_true(sp_plan_get(f->plan)->row_scale[1] == 1.0f);
}

static void a_build_has_a_number_of_its_own(void **state)
{
    fixture *f = *state;
    const sp_route_span span = span_of(1, f->handles[0], 1.0f);
    uint64_t first;
    sp_plan *other;

    assert_int_equal(sp_plan_get(f->plan)->build, 0);
    build(f, &span, 1, 0);
    first = sp_plan_get(f->plan)->build;
    build(f, &span, 1, 0);
    assert_true(sp_plan_get(f->plan)->build > first);
    assert_ok(sp_plan_create(1, 1, &other, NULL), NULL);
    assert_ok(sp_plan_select(other, f->plan, (int32_t[]){0}, 1, NULL), NULL);
    assert_true(sp_plan_get(other)->build > sp_plan_get(f->plan)->build);
    sp_plan_destroy(other);
}

static void building_does_not_allocate(void **state)
{
    fixture *f = *state;
    const sp_route_span span = span_of(4, f->handles[1], 1.0f);

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
        WITH_POOL(a_plan_is_of_one_pool),
        WITH_POOL(a_plan_ends_with_its_versions),
        WITH_POOL(a_plan_ends_when_its_slot_is_loaded_anew),
        WITH_POOL(a_span_without_a_scale_runs_its_adapter),
        WITH_POOL(a_build_has_a_number_of_its_own),
        WITH_POOL(a_selection_has_the_rows_of_its_plan),
        WITH_POOL(a_selection_ends_with_its_plans_versions),
        WITH_POOL(a_bad_selection_changes_nothing),
        WITH_POOL(spans_have_the_callers_size),
        WITH_POOL(building_does_not_allocate),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
