/* Rows of a mixture-of-experts layer: hand-computed maps, sorts and items; an oracle that scans all
 * rows for every (expert, slot); malformed spans give no work. */
#include "support/test.h"

#include <sidepath/moe_rows.h>

#include <string.h>

enum { ROWS_MAX = 128, SCRATCH_MAX = 512 };

static void expect_ints(const int32_t *got, const int32_t *want, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        assert_int_equal(got[i], want[i]);
}

/* ---- row maps ------------------------------------------------------------------------------ */

static void rows_of_a_stream_carry_its_slot(void **state)
{
    int32_t slots[8];

    (void)state;
    /* Three rows of slot 2, none, two of the base, one of slot 0, two pads. */
    assert_int_equal(sp_moe_row_adapter_build((int32_t[]){0, 3, 3, 5, 6},
                                              (int32_t[]){2, 7, SP_SLOT_BASE, 0}, 4, 8, slots),
                     4);
    expect_ints(slots, (int32_t[]){2, 2, 2, -1, -1, 0, -1, -1}, 8);
    assert_int_equal(sp_moe_row_adapter_build((int32_t[]){0}, (int32_t[]){0}, 0, 2, slots), 0);
    expect_ints(slots, (int32_t[]){-1, -1}, 2);
}

static void malformed_spans_give_no_work(void **state)
{
    static const int32_t begins[][4] = {
        {1, 2, 3, 4},         /* does not begin at 0 */
        {0, 3, 2, 4},         /* falls */
        {0, 2, 4, 9},         /* ends beyond the rows */
        {0, -1, 2, 4},        /* negative */
        {0, 2, 4, INT32_MIN}, /* far below */
    };
    static const int32_t streams[3] = {0, 1, 2};
    static const int32_t wrong[] = {0, 2, 3, 1, 3};
    int32_t slots[8];
    sp_error error;

    (void)state;
    for (size_t i = 0; i < sizeof begins / sizeof begins[0]; i++) {
        memset(slots, 5, sizeof slots);
        assert_int_equal(sp_moe_row_adapter_build(begins[i], streams, 3, 8, slots), 0);
        expect_ints(slots, (int32_t[]){-1, -1, -1, -1, -1, -1, -1, -1}, 8);
        assert_int_equal(sp_moe_prefix_check(begins[i], 3, 8, &error), SP_ERR_INPUT);
        assert_string_equal(error.code, "bad-expert-rows");
        assert_int_equal(error.position, wrong[i]);
    }
    assert_int_equal(sp_moe_row_adapter_build(NULL, streams, 3, 8, slots), 0);
    assert_int_equal(sp_moe_row_adapter_build(begins[0], NULL, 3, 8, slots), 0);
    assert_int_equal(sp_moe_row_adapter_build(begins[0], streams, -1, 8, slots), 0);
    assert_int_equal(sp_moe_row_adapter_build(begins[0], streams, 3, -1, slots), 0);
    assert_int_equal(sp_moe_row_adapter_build(begins[0], streams, 3, 8, NULL), 0);
}

/* ---- sort and items ------------------------------------------------------------------------ */

static void pairs_are_sorted_by_expert(void **state)
{
    /* Three tokens of two experts each; one id is out of range on either side. */
    const int32_t chosen[] = {2, 0, 0, 4, -1, 2};
    int32_t begin[5], pairs[6] = {-7, -7, -7, -7, -7, -7};
    sp_moe_rows rows = {
        .struct_bytes = sizeof rows, .n_tokens = 3, .top_k = 2, .n_experts = 4, .expert = chosen};

    (void)state;
    assert_ok(sp_moe_rows_sort(&rows, begin, pairs, NULL), NULL);
    expect_ints(begin, (int32_t[]){0, 2, 2, 4, 4}, 5);
    expect_ints(pairs, (int32_t[]){1, 2, 0, 5, -7, -7}, 6);
}

static void items_are_runs_of_a_slot_and_expert(void **state)
{
    /* Tokens of slots 1, 0, base, 1; two experts each, of three. */
    const int32_t slots[] = {1, 0, -1, 1}, chosen[] = {0, 2, 0, 2, 0, 1, 2, 0};
    int32_t scratch[SCRATCH_MAX], order[8], n = 0;
    sp_moe_item items[8];
    sp_moe_rows rows = {
        .struct_bytes = sizeof rows, .n_tokens = 4, .top_k = 2, .n_experts = 3, .expert = chosen};
    sp_moe_items call = {.struct_bytes = sizeof call,
                         .rows = &rows,
                         .token_slot = slots,
                         .n_slots = 2,
                         .item_rows_max = 8,
                         .n_rows = 8,
                         .scratch = scratch,
                         .row_order = order,
                         .items = items};
    const sp_moe_item want[] = {{0, 0, 0, 1}, {1, 0, 1, 2}, {0, 2, 3, 1}, {1, 2, 4, 2}};

    (void)state;
    assert_ok(sp_moe_items_build(&call, &n, NULL), NULL);
    assert_int_equal(n, 4);
    assert_memory_equal(items, want, sizeof want);
    expect_ints(order, (int32_t[]){2, 0, 7, 3, 1, 6}, 6);
    /* A window of three rows, items of one row each. */
    call.row_begin = 5;
    call.n_rows = 3;
    call.item_rows_max = 1;
    assert_ok(sp_moe_items_build(&call, &n, NULL), NULL);
    assert_int_equal(n, 2);
    expect_ints(order, (int32_t[]){7, 6}, 2);
}

/* The rows of every (expert, slot), by looking at all of them. */
static int32_t scan(const sp_moe_items *call, int32_t expert, int32_t slot, int32_t *out_rows)
{
    const sp_moe_rows *rows = call->rows;
    int32_t n = 0;

    for (int32_t row = call->row_begin; row < call->row_begin + call->n_rows; row++) {
        int32_t pair = rows->expert != NULL ? row : rows->row_pair[row], its = -1;

        if (rows->expert != NULL)
            its = rows->expert[row];
        for (int32_t e = 0; rows->expert == NULL && e < rows->n_experts; e++)
            if (row >= rows->expert_begin[e] && row < rows->expert_begin[e + 1])
                its = e;
        if (its == expert && call->token_slot[pair / rows->top_k] == slot)
            out_rows[n++] = row;
    }
    return n;
}

static void expect_scan(const sp_moe_items *call)
{
    int32_t n_items = -1, item = 0, at = 0, rows[ROWS_MAX];

    assert_ok(sp_moe_items_build(call, &n_items, NULL), NULL);
    for (int32_t expert = 0; expert < call->rows->n_experts; expert++) {
        for (int32_t slot = 0; slot < call->n_slots; slot++) {
            int32_t n = scan(call, expert, slot, rows);

            for (int32_t first = 0; first < n; first += call->item_rows_max, item++) {
                int32_t count = n - first < call->item_rows_max ? n - first : call->item_rows_max;
                sp_moe_item want = {slot, expert, at, count};

                assert_true(item < n_items);
                assert_memory_equal(&call->items[item], &want, sizeof want);
                expect_ints(call->row_order + at, rows + first, count);
                at += count;
            }
        }
    }
    assert_int_equal(item, n_items);
}

static int32_t pick(sp_test_random *random, int32_t low, int32_t high)
{
    return low + (int32_t)sp_test_below(random, (uint32_t)(high - low + 1));
}

static void random_layers_match_the_scan(void **state)
{
    sp_test_random random = {18};
    int32_t slots[ROWS_MAX], chosen[ROWS_MAX], begin[40], pairs[ROWS_MAX], scratch[SCRATCH_MAX],
        order[ROWS_MAX];
    sp_moe_item items[ROWS_MAX];

    (void)state;
    for (int round = 0; round < 600; round++) {
        sp_moe_rows rows = {.struct_bytes = sizeof rows, .n_experts = pick(&random, 1, 33)};
        sp_moe_items call = {.struct_bytes = sizeof call,
                             .rows = &rows,
                             .token_slot = slots,
                             .n_slots = pick(&random, 1, 12),
                             .item_rows_max = pick(&random, 1, 9),
                             .scratch = scratch,
                             .row_order = order,
                             .items = items};

        rows.top_k = pick(&random, 1, rows.n_experts < 4 ? rows.n_experts : 4);
        rows.n_tokens = pick(&random, 0, ROWS_MAX / rows.top_k);
        rows.expert = chosen;
        for (int32_t i = 0; i < rows.n_tokens; i++)
            slots[i] = pick(&random, -1, call.n_slots - 1);
        for (int32_t i = 0; i < rows.n_tokens * rows.top_k; i++)
            chosen[i] = round % 5 == 0 ? rows.n_experts - 1 : pick(&random, -1, rows.n_experts);
        call.n_rows = rows.n_tokens * rows.top_k;
        assert_true(sp_moe_items_scratch(call.n_rows, call.n_slots, rows.n_experts) <= SCRATCH_MAX);
        expect_scan(&call);
        assert_ok(sp_moe_rows_sort(&rows, begin, pairs, NULL), NULL);
        rows.expert = NULL;
        rows.row_pair = pairs;
        rows.expert_begin = begin;
        rows.n_rows = call.n_rows;
        expect_scan(&call);
        call.row_begin = pick(&random, 0, rows.n_rows);
        call.n_rows = pick(&random, 0, rows.n_rows - call.row_begin);
        expect_scan(&call);
    }
}

static void bad_rows_are_named(void **state)
{
    const int32_t slots[] = {0, 0}, falling[] = {0, 3, 2}, fine[] = {0, 1, 3};
    int32_t pairs[] = {0, 1, 2}, scratch[SCRATCH_MAX], order[4], n = 9;
    sp_moe_item items[4];
    sp_moe_rows rows = {.struct_bytes = sizeof rows,
                        .n_tokens = 2,
                        .top_k = 2,
                        .n_experts = 2,
                        .row_pair = pairs,
                        .expert_begin = falling,
                        .n_rows = 3};
    sp_moe_items call = {.struct_bytes = sizeof call,
                         .rows = &rows,
                         .token_slot = slots,
                         .n_slots = 1,
                         .item_rows_max = 8,
                         .n_rows = 3,
                         .scratch = scratch,
                         .row_order = order,
                         .items = items};
    sp_error error;

    (void)state;
    assert_int_equal(sp_moe_items_build(&call, &n, &error), SP_ERR_INPUT);
    assert_string_equal(error.code, "bad-expert-rows");
    assert_int_equal(error.position, 2);
    rows.expert_begin = fine;
    pairs[1] = 4;
    assert_int_equal(sp_moe_items_build(&call, &n, &error), SP_ERR_INPUT);
    assert_string_equal(error.subject, "row_pair");
    assert_int_equal(error.position, 1);
    pairs[1] = -1;
    assert_int_equal(sp_moe_items_build(&call, &n, &error), SP_ERR_INPUT);
    assert_int_equal(n, 9);
    pairs[1] = 3;
    assert_ok(sp_moe_items_build(&call, &n, &error), &error);
    assert_int_equal(n, 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_of_a_stream_carry_its_slot),
        cmocka_unit_test(malformed_spans_give_no_work),
        cmocka_unit_test(pairs_are_sorted_by_expert),
        cmocka_unit_test(items_are_runs_of_a_slot_and_expert),
        cmocka_unit_test(random_layers_match_the_scan),
        cmocka_unit_test(bad_rows_are_named),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
