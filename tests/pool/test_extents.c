/* test_extents.c: the search for room, against a map of bytes and by hand. */
#include "pool/extents.h"
#include "support/test.h"

#include <stdbool.h>
#include <string.h>

#define N     6
#define BLOCK 64

static void expect(const sp_extent *taken, size_t bytes, bool found, size_t offset)
{
    size_t got = 999;

    assert_int_equal(sp_extents_place(taken, N, BLOCK, bytes, &got), found);
    assert_int_equal(got, found ? offset : 999);
}

static void takes_the_smallest_gap_that_fits(void **state)
{
    const sp_extent none[N] = {{0, 0}};
    /* Gaps: 8 .. 20 (12), 30 .. 34 (4), 40 .. 44 (4), 60 .. 64 (4). */
    const sp_extent some[N] = {{34, 6}, {0, 8}, {44, 16}, {0, 0}, {20, 10}, {0, 0}};

    (void)state;
    expect(none, BLOCK, true, 0);
    expect(none, 1, true, 0);
    expect(none, BLOCK + 1, false, 0);
    expect(some, 1, true, 30);
    expect(some, 4, true, 30);
    expect(some, 5, true, 8);
    expect(some, 12, true, 8);
    expect(some, 13, false, 0);
}

static void empty_extents_count_for_nothing(void **state)
{
    const sp_extent taken[N] = {{5, 0}, {0, 10}, {10, 54}, {63, 0}, {0, 0}, {0, 0}};

    (void)state;
    expect(taken, 1, false, 0);
    assert_false(sp_extents_overlap(&taken[0], &taken[1]));
    assert_false(sp_extents_overlap(&taken[1], &taken[2]));
    assert_true(sp_extents_overlap(&(sp_extent){9, 2}, &taken[1]));
    assert_true(sp_extents_overlap(&(sp_extent){9, 2}, &taken[2]));
    assert_true(sp_extents_overlap(&(sp_extent){0, BLOCK}, &taken[2]));
}

/* What a map of bytes says: the smallest run of free bytes that is large enough, the first one. */
static bool search_map(const sp_extent *taken, size_t bytes, size_t *out_offset)
{
    bool used[BLOCK + 1] = {false};
    size_t best = BLOCK + 1;

    used[BLOCK] = true;
    for (int i = 0; i < N; i++)
        for (size_t b = 0; b < taken[i].bytes; b++)
            used[taken[i].offset_bytes + b] = true;
    for (size_t begin = 0, run = 0; begin <= BLOCK; begin++) {
        if (!used[begin]) {
            run++;
            continue;
        }
        if (run >= bytes && run < best) {
            best = run;
            *out_offset = begin - run;
        }
        run = 0;
    }
    return best <= BLOCK;
}

static void agrees_with_a_map_of_bytes(void **state)
{
    sp_test_random random = {5};
    sp_extent taken[N] = {{0, 0}};
    int32_t n_found = 0, n_full = 0;

    (void)state;
    for (int round = 0; round < 20000; round++) {
        uint32_t slot = sp_test_below(&random, N);
        size_t bytes = 1 + sp_test_below(&random, 30), expected = 0, got = 0;
        bool found;

        taken[slot] = (sp_extent){0, 0};
        found = search_map(taken, bytes, &expected);
        assert_int_equal(sp_extents_place(taken, N, BLOCK, bytes, &got), found);
        n_found += found;
        n_full += !found;
        if (!found)
            continue;
        assert_int_equal(got, expected);
        taken[slot] = (sp_extent){got, bytes};
    }
    assert_true(n_found > 1000 && n_full > 1000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(takes_the_smallest_gap_that_fits),
        cmocka_unit_test(empty_extents_count_for_nothing),
        cmocka_unit_test(agrees_with_a_map_of_bytes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
