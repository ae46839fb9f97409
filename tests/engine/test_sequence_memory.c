/*
 * Sequence memory by hand: which positions a sequence may write, what of it counts, what others
 * find of it, and which page is evicted. Pages of 4 tokens. The simulator beside it does the rest.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "engine/schedule/sequence_memory.h"

#include <string.h>

#define PAGE_TOKENS 4
#define LONGEST     32

static const int32_t counting[LONGEST] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11,
                                          12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22,
                                          23, 24, 25, 26, 27, 28, 29, 30, 31, 32};

static sp_sequence_memory make_memory(int32_t n_pages, bool prefix_cache)
{
    sp_sequence_memory_options options = {
        .n_pages = n_pages, .page_tokens = PAGE_TOKENS, .prefix_cache = prefix_cache};
    sp_sequence_memory memory;

    assert_int_equal(sp_sequence_memory_create(&options, &memory), SP_OK);
    return memory;
}

static sp_held_memory make_held(const sp_sequence_memory *memory)
{
    sp_held_memory held;

    assert_int_equal(sp_held_memory_create(memory, LONGEST, &held), SP_OK);
    assert_int_equal(held.pages_max, LONGEST / PAGE_TOKENS);
    return held;
}

static void free_held(sp_sequence_memory *memory, sp_held_memory *held)
{
    sp_sequence_memory_release(memory, held);
    sp_held_memory_destroy(held);
}

/* A sequence that begins with what is known and computes n tokens. */
static sp_held_memory compute(sp_sequence_memory *memory, const int32_t *tokens, int32_t n)
{
    sp_held_memory held = make_held(memory);
    int32_t resumed = sp_sequence_memory_resume(memory, &held, tokens, n);

    assert_int_equal(sp_sequence_memory_reserve(memory, &held, n - resumed), n - resumed);
    sp_sequence_memory_commit(memory, &held, tokens, n - resumed);
    return held;
}

/* Tokens that a sequence with this key would find computed. */
static int32_t known(sp_sequence_memory *memory, sp_prefix_key key, const int32_t *tokens,
                     int32_t n)
{
    sp_held_memory held = make_held(memory);
    int32_t resumed;

    held.key = key;
    resumed = sp_sequence_memory_resume(memory, &held, tokens, n);
    assert_int_equal(held.n_pages, resumed / PAGE_TOKENS);
    free_held(memory, &held);
    return resumed;
}

static const sp_prefix_key base = {.scale = 0.0f};

static void test_a_reservation_is_as_long_as_there_are_pages(void **state)
{
    sp_sequence_memory memory = make_memory(3, true);
    sp_held_memory a = make_held(&memory), b = make_held(&memory);

    (void)state;
    assert_true(sp_sequence_memory_has_room(&memory, 12));
    assert_false(sp_sequence_memory_has_room(&memory, 13));
    assert_int_equal(sp_sequence_memory_reserve(&memory, &a, 5), 5);
    assert_int_equal(sp_sequence_memory_available(&memory), 1);
    assert_int_equal(sp_sequence_memory_reserve(&memory, &b, 6), 4);
    assert_int_equal(sp_sequence_memory_available(&memory), 0);
    sp_sequence_memory_commit(&memory, &a, counting, 5);
    /* Three positions are left in its second page, and no other page. */
    assert_int_equal(sp_sequence_memory_reserve(&memory, &a, 9), 3);
    sp_sequence_memory_commit(&memory, &a, counting, 3);
    assert_int_equal(sp_sequence_memory_reserve(&memory, &a, 1), 0);
    assert_int_equal(sp_sequence_memory_reserve(&memory, &a, 0), 0);
    sp_sequence_memory_release(&memory, &b);
    assert_int_equal(sp_sequence_memory_reserve(&memory, &a, 1), 1);
    assert_int_equal(a.n_committed, 8);
    assert_int_equal(a.n_reserved, 9);
    assert_int_equal(sp_sequence_memory_used_max(&memory), 3);
    /* It began without a resume, and is known all the same. */
    assert_int_equal(known(&memory, base, counting, 9), 8);
    free_held(&memory, &a);
    free_held(&memory, &b);
    sp_sequence_memory_destroy(&memory);
}

static void test_a_reservation_replaces_the_one_before(void **state)
{
    sp_sequence_memory memory = make_memory(4, true);
    sp_held_memory a = make_held(&memory);

    (void)state;
    assert_int_equal(sp_sequence_memory_reserve(&memory, &a, 13), 13);
    assert_int_equal(sp_sequence_memory_reserve(&memory, &a, 2), 2);
    assert_int_equal(a.n_pages, 1);
    assert_int_equal(sp_sequence_memory_available(&memory), 3);
    sp_sequence_memory_rollback(&memory, &a);
    assert_int_equal(a.n_pages, 0);
    assert_int_equal(sp_sequence_memory_available(&memory), 4);
    free_held(&memory, &a);
    sp_sequence_memory_destroy(&memory);
}

/* One position and 6 drafts, 2 of them accepted: 3 positions count. */
static void test_rejected_drafts_leave_nothing(void **state)
{
    sp_sequence_memory memory = make_memory(8, true);
    sp_held_memory a = compute(&memory, counting, 6);
    int32_t drafted[LONGEST];

    (void)state;
    memcpy(drafted, counting, sizeof drafted);
    assert_int_equal(sp_sequence_memory_reserve(&memory, &a, 7), 7);
    assert_int_equal(a.n_pages, 4); /* for 13 positions */
    sp_sequence_memory_commit(&memory, &a, drafted, 3);
    assert_int_equal(a.n_committed, 9);
    assert_int_equal(a.n_reserved, 9);
    assert_int_equal(a.n_pages, 3);
    assert_int_equal(sp_sequence_memory_available(&memory), 5);
    /* The third page has one token that counts: only two pages are known. */
    assert_int_equal(known(&memory, base, drafted, 13), 8);
    /* It goes on with other tokens than the drafts, and those are what is known. */
    drafted[9] = 100;
    assert_int_equal(sp_sequence_memory_reserve(&memory, &a, 3), 3);
    sp_sequence_memory_commit(&memory, &a, drafted, 3);
    assert_int_equal(known(&memory, base, drafted, 12), 12);
    assert_int_equal(known(&memory, base, counting, 12), 8);
    /* All rejected, twice over: by a rollback and by a commit of none. */
    assert_int_equal(sp_sequence_memory_reserve(&memory, &a, 5), 5);
    sp_sequence_memory_rollback(&memory, &a);
    assert_int_equal(a.n_pages, 3);
    assert_int_equal(sp_sequence_memory_reserve(&memory, &a, 5), 5);
    sp_sequence_memory_commit(&memory, &a, drafted, 0);
    assert_int_equal(a.n_pages, 3);
    assert_int_equal(a.n_committed, 12);
    free_held(&memory, &a);
    sp_sequence_memory_destroy(&memory);
}

static void test_a_prompt_resumes_where_full_pages_end(void **state)
{
    sp_sequence_memory memory = make_memory(8, true);
    sp_held_memory a = compute(&memory, counting, 11), b;
    int32_t other[LONGEST];

    (void)state;
    memcpy(other, counting, sizeof other);
    other[5] = 0;
    assert_int_equal(known(&memory, base, counting, 11), 8);
    assert_int_equal(known(&memory, base, counting, 8), 8);
    assert_int_equal(known(&memory, base, counting, 7), 4);
    assert_int_equal(known(&memory, base, counting, 0), 0);
    assert_int_equal(known(&memory, base, other, 11), 4);
    other[0] = 0;
    assert_int_equal(known(&memory, base, other, 11), 0);
    /* Held together, and again after both are gone. */
    b = compute(&memory, counting, 9);
    assert_memory_equal(b.pages, a.pages, 2 * sizeof(int32_t));
    assert_int_not_equal(b.pages[2], a.pages[2]);
    assert_int_equal(sp_sequence_memory_available(&memory), 4);
    free_held(&memory, &a);
    assert_int_equal(sp_sequence_memory_evictable(&memory), 0);
    free_held(&memory, &b);
    assert_int_equal(sp_sequence_memory_evictable(&memory), 2);
    assert_int_equal(known(&memory, base, counting, 11), 8);
    assert_int_equal((int64_t)memory.resumed_tokens, 8 + 8 + 4 + 0 + 4 + 0 + 8 + 8);
    sp_sequence_memory_destroy(&memory);
}

static void test_keys_share_nothing(void **state)
{
    sp_sequence_memory memory = make_memory(8, true);
    sp_held_memory a = make_held(&memory);
    sp_prefix_key key = {.scale = 1.0f}, scaled, replaced;

    (void)state;
    key.digest.bytes[31] = 1;
    scaled = replaced = key;
    scaled.scale = 0.5f;
    replaced.digest.bytes[31] = 2;
    a.key = key;
    assert_int_equal(sp_sequence_memory_resume(&memory, &a, counting, 8), 0);
    assert_int_equal(sp_sequence_memory_reserve(&memory, &a, 8), 8);
    sp_sequence_memory_commit(&memory, &a, counting, 8);
    assert_int_equal(known(&memory, key, counting, 8), 8);
    assert_int_equal(known(&memory, scaled, counting, 8), 0);
    assert_int_equal(known(&memory, replaced, counting, 8), 0);
    assert_int_equal(known(&memory, base, counting, 8), 0);
    free_held(&memory, &a);
    sp_sequence_memory_destroy(&memory);
}

/* Both began before either had a full page. */
static void test_a_page_filled_twice_is_kept_once(void **state)
{
    sp_sequence_memory memory = make_memory(8, true);
    sp_held_memory a = make_held(&memory), b = make_held(&memory);

    (void)state;
    assert_int_equal(sp_sequence_memory_resume(&memory, &a, counting, 5), 0);
    assert_int_equal(sp_sequence_memory_resume(&memory, &b, counting, 5), 0);
    assert_int_equal(sp_sequence_memory_reserve(&memory, &a, 6), 6);
    assert_int_equal(sp_sequence_memory_reserve(&memory, &b, 6), 6);
    assert_int_equal(sp_sequence_memory_available(&memory), 4);
    sp_sequence_memory_commit(&memory, &a, counting, 6);
    sp_sequence_memory_commit(&memory, &b, counting, 6);
    assert_int_equal(a.pages[0], b.pages[0]);
    assert_int_not_equal(a.pages[1], b.pages[1]);
    assert_int_equal(sp_sequence_memory_available(&memory), 5);
    free_held(&memory, &a);
    assert_int_equal(sp_sequence_memory_evictable(&memory), 0);
    free_held(&memory, &b);
    assert_int_equal(sp_sequence_memory_evictable(&memory), 1);
    sp_sequence_memory_destroy(&memory);
}

/* Free pages go first; then what fell idle first, and of a sequence its end before its beginning.
 */
static void test_the_page_that_fell_idle_first_is_evicted(void **state)
{
    sp_sequence_memory memory = make_memory(6, true);
    sp_held_memory a = compute(&memory, counting, 8), b = compute(&memory, counting + 8, 8);
    sp_held_memory c = make_held(&memory);

    (void)state;
    free_held(&memory, &a);
    free_held(&memory, &b);
    assert_int_equal(sp_sequence_memory_evictable(&memory), 4);
    assert_int_equal(sp_sequence_memory_reserve(&memory, &c, 8), 8);
    assert_int_equal(sp_sequence_memory_evictable(&memory), 4);
    assert_int_equal(sp_sequence_memory_reserve(&memory, &c, 12), 12);
    assert_int_equal(sp_sequence_memory_evictable(&memory), 3);
    /* What is looked at falls idle anew, so that the second one goes next. */
    assert_int_equal(known(&memory, base, counting, 8), 4);
    assert_int_equal(sp_sequence_memory_reserve(&memory, &c, 20), 20);
    assert_int_equal(known(&memory, base, counting, 8), 4);
    assert_int_equal(known(&memory, base, counting + 8, 8), 0);
    assert_int_equal(sp_sequence_memory_reserve(&memory, &c, 24), 24);
    assert_int_equal(known(&memory, base, counting, 8), 0);
    free_held(&memory, &c);
    sp_sequence_memory_destroy(&memory);
}

static void test_without_a_prefix_cache_nothing_is_remembered(void **state)
{
    sp_sequence_memory memory = make_memory(4, false);
    sp_held_memory a = compute(&memory, NULL, 9);

    (void)state;
    assert_int_equal(a.n_pages, 3);
    assert_int_equal(known(&memory, base, NULL, 9), 0);
    free_held(&memory, &a);
    assert_int_equal(sp_sequence_memory_evictable(&memory), 0);
    assert_int_equal(sp_sequence_memory_available(&memory), 4);
    sp_sequence_memory_destroy(&memory);
}

static void test_what_is_all_zero_holds_nothing(void **state)
{
    sp_sequence_memory memory = {0};
    sp_held_memory held = {0};

    (void)state;
    sp_held_memory_destroy(&held);
    sp_sequence_memory_destroy(&memory);
    memory = make_memory(1, true);
    sp_sequence_memory_release(&memory, &held);
    sp_sequence_memory_destroy(&memory);
}

/* What is broken is seen, and what is mended again is not. */
static void check_int_broken(const sp_sequence_memory *memory, int32_t *at, int32_t value)
{
    int32_t was = *at;

    *at = value;
    assert_false(sp_sequence_memory_is_consistent(memory));
    *at = was;
    assert_true(sp_sequence_memory_is_consistent(memory));
}

static void check_bool_broken(const sp_sequence_memory *memory, bool *at)
{
    *at = !*at;
    assert_false(sp_sequence_memory_is_consistent(memory));
    *at = !*at;
    assert_true(sp_sequence_memory_is_consistent(memory));
}

/* a holds two known pages, b an unknown one, c's known one is idle, and two are free. */
static void test_each_broken_invariant_is_seen(void **state)
{
    sp_sequence_memory memory = make_memory(6, true);
    sp_pages *pages = &memory.pages;
    sp_held_memory a = compute(&memory, counting, 8), b = compute(&memory, counting + 16, 2);
    sp_held_memory c = compute(&memory, counting + 8, 4);
    int32_t idle = c.pages[0];

    (void)state;
    free_held(&memory, &c);
    assert_int_equal(sp_sequence_memory_evictable(&memory), 1);
    check_int_broken(&memory, &pages->n_free, 1);
    check_int_broken(&memory, &pages->n_idle, 0);
    check_int_broken(&memory, &pages->holders[b.pages[0]], 0);
    check_int_broken(&memory, &pages->holders[b.pages[0]], -1);
    check_int_broken(&memory, &pages->holders[a.pages[1]], 2);
    check_int_broken(&memory, &pages->holders[idle], 1);
    check_bool_broken(&memory, &pages->known[a.pages[1]]);
    check_bool_broken(&memory, &pages->known[b.pages[0]]);
    check_bool_broken(&memory, &pages->known[idle]);
    check_bool_broken(&memory, &pages->known[pages->free_pages[0]]);
    check_int_broken(&memory, &pages->free_pages[0], b.pages[0]);
    check_int_broken(&memory, &pages->oldest, -1);
    check_int_broken(&memory, &pages->youngest, -1);
    check_int_broken(&memory, &pages->older[idle], a.pages[0]);
    check_int_broken(&memory, &pages->younger[idle], idle);
    check_int_broken(&memory, &memory.prefix.parents[a.pages[1]], b.pages[0]);
    memory.prefix.hashes[idle]++; /* another bucket */
    assert_false(sp_sequence_memory_is_consistent(&memory));
    memory.prefix.hashes[idle]--;
    assert_true(sp_sequence_memory_may_write(&memory, &b));
    pages->holders[b.pages[0]]++; /* as if another sequence read it */
    assert_false(sp_sequence_memory_may_write(&memory, &b));
    pages->holders[b.pages[0]]--;
    assert_true(sp_sequence_memory_may_write(&memory, &a)); /* where it ends is a page's border */
    free_held(&memory, &a);
    free_held(&memory, &b);
    sp_sequence_memory_destroy(&memory);
}

static void test_creation_survives_every_failed_allocation(void **state)
{
    sp_sequence_memory_options options = {
        .n_pages = 8, .page_tokens = PAGE_TOKENS, .prefix_cache = true};
    size_t blocks = sp_alloc_blocks();
    bool failed = true;

    (void)state;
    for (int64_t n = 0; failed; n++) {
        sp_sequence_memory memory = {0};
        sp_held_memory held = {0};
        sp_status status;

        sp_alloc_fail_after(n);
        status = sp_sequence_memory_create(&options, &memory);
        if (status == SP_OK)
            status = sp_held_memory_create(&memory, 9, &held);
        failed = sp_alloc_failed();
        sp_alloc_fail_after(-1);
        assert_int_equal(status, failed ? SP_ERR_MEMORY : SP_OK);
        assert_int_equal(held.pages_max, failed ? 0 : 3);
        sp_held_memory_destroy(&held);
        sp_sequence_memory_destroy(&memory);
        assert_int_equal(sp_alloc_blocks(), blocks);
    }
}

static int leaks_nothing(void **state)
{
    (void)state;
    return sp_alloc_blocks() == 0 ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_a_reservation_is_as_long_as_there_are_pages, leaks_nothing),
        cmocka_unit_test_teardown(test_a_reservation_replaces_the_one_before, leaks_nothing),
        cmocka_unit_test_teardown(test_rejected_drafts_leave_nothing, leaks_nothing),
        cmocka_unit_test_teardown(test_a_prompt_resumes_where_full_pages_end, leaks_nothing),
        cmocka_unit_test_teardown(test_keys_share_nothing, leaks_nothing),
        cmocka_unit_test_teardown(test_a_page_filled_twice_is_kept_once, leaks_nothing),
        cmocka_unit_test_teardown(test_the_page_that_fell_idle_first_is_evicted, leaks_nothing),
        cmocka_unit_test_teardown(test_without_a_prefix_cache_nothing_is_remembered, leaks_nothing),
        cmocka_unit_test_teardown(test_what_is_all_zero_holds_nothing, leaks_nothing),
        cmocka_unit_test_teardown(test_each_broken_invariant_is_seen, leaks_nothing),
        cmocka_unit_test_teardown(test_creation_survives_every_failed_allocation, leaks_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
