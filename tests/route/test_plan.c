/* The plan of a step from plain rows: hand-computed cases, an O(n * slots) oracle, refusals. */
#include "base/alloc.h"
#include "route/plan_rows.h"
#include "support/test.h"

#include <math.h>
#include <string.h>

static sp_plan *make_plan(int32_t rows_max, int32_t slots_max)
{
    sp_plan *plan = NULL;

    assert_int_equal(sp_plan_create(rows_max, slots_max, &plan, NULL), SP_OK);
    assert_non_null(plan);
    return plan;
}

static void expect_ints(const int32_t *got, const int32_t *want, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        assert_int_equal(got[i], want[i]);
}

/* ---- scale --------------------------------------------------------------------------------- */

static void scale_is_rounded_once(void **state)
{
    (void)state;
    assert_true(sp_effective_scale(2.0f, 1.0f) == 2.0f);
    assert_true(sp_effective_scale(-1.5f, 0.5f) == -0.75f);
    assert_true(sp_effective_scale(0.1f, 0.0f) == 0.0f);
    /* 16777215 * 16777215 = 281474943156225 needs 48 bits; the nearest float is 2^48 - 2^25. */
    assert_true(sp_effective_scale(16777215.0f, 16777215.0f) == 281474943156224.0f);
    /* The exact product of the floats nearest 1.1 and 0.3 is 0.33000002026557950...: 0x3ea8f5c3. */
    float product = sp_effective_scale(1.1f, 0.3f);
    uint32_t bits;
    memcpy(&bits, &product, sizeof bits);
    assert_int_equal(bits, 0x3ea8f5c3);
    /* Overflow and underflow are what the one rounding makes of them. */
    assert_true(isinf(sp_effective_scale(3e38f, 16.0f)));
    assert_true(sp_effective_scale(1e-40f, 1e-10f) == 0.0f);
}

/* ---- hand-computed plans ------------------------------------------------------------------- */

static void groups_rows_by_slot(void **state)
{
    const int32_t seq_slot[] = {2, -1, 0, 2, 0, -1, 5, 2};
    const float scales[] = {1.0f, 1.0f, 0.5f, 2.0f, 16.0f, 3.0f, 1.0f, 1.0f};
    sp_plan *plan = make_plan(16, 6);
    sp_plan_view view;

    (void)state;
    assert_int_equal(sp_plan_build_rows(plan, seq_slot, scales, 8, 6, NULL), SP_OK);
    view = *sp_plan_get(plan);
    assert_int_equal(view.n_rows, 8);
    expect_ints(view.seq_slot, seq_slot, 8);
    assert_memory_equal(view.row_scale, scales, sizeof scales);
    assert_int_equal(view.n_routed, 6);
    expect_ints(view.row_order, (int32_t[]){2, 4, 0, 3, 7, 6}, 6);
    assert_int_equal(view.n_segments, 3);
    expect_ints(view.segment_slot, (int32_t[]){0, 2, 5}, 3);
    expect_ints(view.segment_begin, (int32_t[]){0, 2, 5, 6}, 4);
    assert_int_equal(view.n_tiles, 3);
    expect_ints(view.tile_begin, (int32_t[]){0, 2, 5}, 3);
    expect_ints(view.tile_rows, (int32_t[]){2, 3, 1}, 3);
    expect_ints(view.tile_slot, (int32_t[]){0, 2, 5}, 3);
    sp_plan_destroy(plan);
}

static void tiles_have_at_most_eight_rows(void **state)
{
    int32_t seq_slot[27];
    sp_plan *plan = make_plan(27, 2);
    sp_plan_view view;

    (void)state;
    for (int32_t i = 0; i < 27; i++)
        seq_slot[i] = i < 17 ? 1 : 0; /* 17 rows of slot 1, then 10 of slot 0 */
    assert_int_equal(sp_plan_build_rows(plan, seq_slot, NULL, 27, 2, NULL), SP_OK);
    view = *sp_plan_get(plan);
    assert_int_equal(view.n_tiles, 5);
    expect_ints(view.tile_begin, (int32_t[]){0, 8, 10, 18, 26}, 5);
    expect_ints(view.tile_rows, (int32_t[]){8, 2, 8, 8, 1}, 5);
    expect_ints(view.tile_slot, (int32_t[]){0, 0, 1, 1, 1}, 5);
    assert_int_equal(view.row_order[0], 17);
    assert_int_equal(view.row_order[10], 0);
    for (int32_t i = 0; i < 27; i++)
        assert_true(view.row_scale[i] == 1.0f);
    sp_plan_destroy(plan);
}

static void only_base_rows_give_no_work(void **state)
{
    const int32_t seq_slot[] = {-1, -1, -1};
    sp_plan *plan = make_plan(3, 1);
    sp_plan_view view;

    (void)state;
    assert_int_equal(sp_plan_build_rows(plan, seq_slot, NULL, 3, 1, NULL), SP_OK);
    view = *sp_plan_get(plan);
    assert_int_equal(view.n_rows, 3);
    assert_int_equal(view.n_routed, 0);
    assert_int_equal(view.n_segments, 0);
    assert_int_equal(view.segment_begin[0], 0);
    assert_int_equal(view.n_tiles, 0);
    assert_int_equal(sp_plan_build_rows(plan, NULL, NULL, 0, 1, NULL), SP_OK);
    assert_int_equal(sp_plan_get(plan)->n_rows, 0);
    sp_plan_destroy(plan);
}

static void scale_zero_is_the_base(void **state)
{
    const int32_t seq_slot[] = {0, 1, 0};
    const float scales[] = {0.0f, -0.0f, 1.0f};
    sp_plan *plan = make_plan(3, 2);
    sp_plan_view view;

    (void)state;
    assert_int_equal(sp_plan_build_rows(plan, seq_slot, scales, 3, 2, NULL), SP_OK);
    view = *sp_plan_get(plan);
    expect_ints(view.seq_slot, (int32_t[]){-1, -1, 0}, 3);
    assert_int_equal(view.n_routed, 1);
    assert_int_equal(view.row_order[0], 2);
    sp_plan_destroy(plan);
}

static void arrays_stay_where_they_are(void **state)
{
    sp_plan *plan = make_plan(8, 4);
    sp_plan_view first = *sp_plan_get(plan), second;

    (void)state;
    assert_int_equal(sp_plan_build_rows(plan, (int32_t[]){0, 3, 1}, NULL, 3, 4, NULL), SP_OK);
    second = *sp_plan_get(plan);
    assert_ptr_equal(first.seq_slot, second.seq_slot);
    assert_ptr_equal(first.row_scale, second.row_scale);
    assert_ptr_equal(first.row_order, second.row_order);
    assert_ptr_equal(first.segment_begin, second.segment_begin);
    assert_ptr_equal(first.segment_slot, second.segment_slot);
    assert_ptr_equal(first.tile_begin, second.tile_begin);
    assert_ptr_equal(first.tile_rows, second.tile_rows);
    assert_ptr_equal(first.tile_slot, second.tile_slot);
    sp_plan_destroy(plan);
}

static int32_t pick(sp_test_random *random, int32_t low, int32_t high)
{
    return low + (int32_t)sp_test_below(random, (uint32_t)(high - low + 1));
}

/* ---- an oracle without a sort -------------------------------------------------------------- */

static void expect_segments(const sp_plan_view *view, const int32_t *seq_slot, int32_t n_slots)
{
    int32_t at = 0, segment = 0, tile = 0;

    for (int32_t slot = 0; slot < n_slots; slot++) {
        int32_t rows = 0;

        for (int32_t row = 0; row < view->n_rows; row++) {
            if (seq_slot[row] != slot)
                continue;
            assert_int_equal(view->row_order[at + rows], row);
            if (rows % 8 == 0) { /* the tile before is full */
                if (rows > 0)
                    assert_int_equal(view->tile_rows[tile - 1], 8);
                assert_int_equal(view->tile_begin[tile], at + rows);
                assert_int_equal(view->tile_slot[tile++], slot);
            }
            rows++;
        }
        if (rows == 0)
            continue;
        assert_int_equal(view->tile_rows[tile - 1], (rows - 1) % 8 + 1);
        assert_int_equal(view->segment_slot[segment], slot);
        assert_int_equal(view->segment_begin[segment++], at);
        at += rows;
        assert_int_equal(view->segment_begin[segment], at);
    }
    assert_int_equal(view->n_segments, segment);
    assert_int_equal(view->n_tiles, tile);
    assert_int_equal(view->n_routed, at);
}

static void random_mixes_match_the_oracle(void **state)
{
    sp_test_random random = {20};
    sp_plan *plan = make_plan(300, 64);
    int32_t seq_slot[300];

    (void)state;
    for (int32_t round = 0; round < 3000; round++) {
        int32_t n_rows = pick(&random, 1, round % 10 == 0 ? 300 : 24);
        int32_t n_slots = pick(&random, 1, 64);
        int32_t kind = pick(&random, 0, 3);
        sp_plan_view view;

        for (int32_t row = 0; row < n_rows; row++)
            seq_slot[row] = kind == 0   ? n_slots - 1                      /* all equal */
                            : kind == 1 ? row % n_slots                    /* different */
                            : kind == 2 ? pick(&random, -1, n_slots - 1)   /* any mix */
                                        : pick(&random, -1, n_slots) / 60; /* few, many 0 */
        for (int32_t row = 0; row < n_rows; row++)
            seq_slot[row] = seq_slot[row] >= n_slots ? -1 : seq_slot[row];
        assert_int_equal(sp_plan_build_rows(plan, seq_slot, NULL, n_rows, n_slots, NULL), SP_OK);
        view = *sp_plan_get(plan);
        assert_int_equal(view.n_rows, n_rows);
        expect_ints(view.seq_slot, seq_slot, n_rows);
        expect_segments(&view, seq_slot, n_slots);
    }
    sp_plan_destroy(plan);
}

/* ---- refusals ------------------------------------------------------------------------------ */

static void a_refusal_changes_nothing(void **state)
{
    static const float bad_scales[] = {-1.0f, 16.5f, INFINITY, -INFINITY, NAN, -1e-30f};
    sp_plan *plan = make_plan(4, 3);
    sp_plan_view view;
    sp_error error;

    (void)state;
    assert_int_equal(sp_plan_build_rows(plan, (int32_t[]){1, 0, 1}, (float[]){1, 2, 3}, 3, 2, NULL),
                     SP_OK);
    for (size_t i = 0; i < sizeof bad_scales / sizeof bad_scales[0]; i++) {
        float scales[] = {1.0f, bad_scales[i]};

        assert_int_equal(sp_plan_build_rows(plan, (int32_t[]){0, 0}, scales, 2, 2, &error),
                         SP_ERR_ARGUMENT);
        assert_int_equal(error.position, 1);
    }
    assert_int_equal(sp_plan_build_rows(plan, (int32_t[]){0, 2}, NULL, 2, 2, &error),
                     SP_ERR_ARGUMENT);
    assert_int_equal(error.position, 1);
    assert_int_equal(error.status, SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_build_rows(plan, (int32_t[]){-2}, NULL, 1, 2, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_build_rows(plan, (int32_t[]){INT32_MIN}, NULL, 1, 2, NULL),
                     SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_build_rows(plan, (int32_t[]){0}, NULL, 1, 4, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_build_rows(plan, (int32_t[]){0}, NULL, 1, -1, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_build_rows(plan, (int32_t[]){0, 0, 0, 0, 0}, NULL, 5, 3, NULL),
                     SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_build_rows(plan, (int32_t[]){0}, NULL, -1, 3, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_build_rows(plan, NULL, NULL, 1, 3, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_build_rows(NULL, (int32_t[]){0}, NULL, 1, 3, NULL), SP_ERR_ARGUMENT);

    view = *sp_plan_get(plan);
    assert_int_equal(view.n_rows, 3);
    expect_ints(view.seq_slot, (int32_t[]){1, 0, 1}, 3);
    assert_memory_equal(view.row_scale, ((float[]){1, 2, 3}), 3 * sizeof(float));
    expect_ints(view.row_order, (int32_t[]){1, 0, 2}, 3);
    expect_ints(view.segment_begin, (int32_t[]){0, 1, 3}, 3);
    sp_plan_destroy(plan);
}

static void create_checks_its_limits(void **state)
{
    sp_plan *plan = NULL;

    (void)state;
    assert_int_equal(sp_plan_create(0, 1, &plan, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_create((1 << 20) + 1, 1, &plan, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_create(1, 0, &plan, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_create(1, 4097, &plan, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_plan_create(1, 1, NULL, NULL), SP_ERR_ARGUMENT);
    assert_null(plan);
    assert_int_equal(sp_plan_create(1 << 20, 4096, &plan, NULL), SP_OK);
    sp_plan_destroy(plan);
    sp_plan_destroy(NULL);
}

static void create_survives_every_failed_allocation(void **state)
{
    size_t bytes = sp_alloc_bytes();
    int64_t n = 0;

    (void)state;
    for (;; n++) {
        sp_plan *plan = NULL;
        sp_status status;

        sp_alloc_fail_after(n);
        status = sp_plan_create(10, 3, &plan, NULL);
        if (!sp_alloc_failed()) {
            sp_alloc_fail_after(-1);
            assert_int_equal(status, SP_OK);
            sp_plan_destroy(plan);
            break;
        }
        assert_int_equal(status, SP_ERR_MEMORY);
        assert_null(plan);
        assert_int_equal(sp_alloc_bytes(), bytes);
    }
    assert_int_equal(n, 4); /* plan, rows and segments, scales, generations */
    assert_int_equal(sp_alloc_bytes(), bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scale_is_rounded_once),
        cmocka_unit_test(groups_rows_by_slot),
        cmocka_unit_test(tiles_have_at_most_eight_rows),
        cmocka_unit_test(only_base_rows_give_no_work),
        cmocka_unit_test(scale_zero_is_the_base),
        cmocka_unit_test(arrays_stay_where_they_are),
        cmocka_unit_test(random_mixes_match_the_oracle),
        cmocka_unit_test(a_refusal_changes_nothing),
        cmocka_unit_test(create_checks_its_limits),
        cmocka_unit_test(create_survives_every_failed_allocation),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
