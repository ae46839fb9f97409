/*
 * Sequence memory with recurrent layers, by hand: who has a state, what a step does with it, which
 * failures lose it, where snapshots are taken, who begins with them, and which are evicted. Pages
 * of 4 tokens, borders at multiples of 8, snapshots at multiples of 16 unless a test says so.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "engine/schedule/sequence_memory.h"

#include <string.h>

#define PAGE_TOKENS 4
#define LONGEST     160

static int32_t counting[LONGEST];

static sp_sequence_memory_options options_of(int32_t n_pages, int32_t n_states, int32_t n_snapshots)
{
    return (sp_sequence_memory_options){
        .n_pages = n_pages,
        .page_tokens = PAGE_TOKENS,
        .prefix_cache = true,
        .n_states = n_states,
        .state_chunk = 8,
        .n_snapshots = n_snapshots,
        .snapshot_tokens = 16,
    };
}

static sp_sequence_memory make_memory(int32_t n_pages, int32_t n_states, int32_t n_snapshots)
{
    sp_sequence_memory_options options = options_of(n_pages, n_states, n_snapshots);
    sp_sequence_memory memory;

    for (int32_t i = 0; i < LONGEST; i++)
        counting[i] = i + 1;
    assert_int_equal(sp_sequence_memory_create(&options, &memory), SP_OK);
    return memory;
}

static sp_held_memory make_held(const sp_sequence_memory *memory)
{
    sp_held_memory held;

    assert_int_equal(sp_held_memory_create(memory, LONGEST, &held), SP_OK);
    return held;
}

static void free_held(sp_sequence_memory *memory, sp_held_memory *held)
{
    sp_sequence_memory_release(memory, held);
    sp_held_memory_destroy(held);
}

/* Reserves `want` rows, of which `rows` are given, and begins their step; n_drafts of them are
 * drafts. */
static sp_state_step begin(sp_sequence_memory *memory, sp_held_memory *held, int32_t want,
                           int32_t rows, int32_t n_drafts)
{
    assert_int_equal(sp_sequence_memory_reserve(memory, held, want), rows);
    return sp_sequence_memory_begin_step(memory, held, rows - n_drafts);
}

static void check_step(sp_state_step step, int32_t folded, int32_t load, int32_t save,
                       int32_t n_final)
{
    assert_int_equal(step.folded, folded);
    assert_int_equal(step.load, load);
    assert_int_equal(step.save, save);
    assert_int_equal(step.n_final, n_final);
}

/* Advances by steps of at most 16 rows to n committed positions. */
static void compute(sp_sequence_memory *memory, sp_held_memory *held, const int32_t *tokens,
                    int32_t n)
{
    while (held->n_committed < n) {
        int32_t rows = sp_sequence_memory_reserve(memory, held, n - held->n_committed);

        assert_true(rows > 0);
        sp_sequence_memory_begin_step(memory, held, rows);
        assert_true(sp_sequence_memory_commit(memory, held, tokens, rows));
        assert_true(sp_sequence_memory_is_consistent(memory));
    }
}

/* A sequence that computes n tokens, and is gone. */
static void pass(sp_sequence_memory *memory, const int32_t *tokens, int32_t n)
{
    sp_held_memory held = make_held(memory);

    sp_sequence_memory_resume(memory, &held, tokens, n - 1);
    compute(memory, &held, tokens, n);
    free_held(memory, &held);
}

/* Tokens that a sequence would find computed. */
static int32_t known(sp_sequence_memory *memory, const int32_t *tokens, int32_t n)
{
    sp_held_memory held = make_held(memory);
    int32_t resumed = sp_sequence_memory_resume(memory, &held, tokens, n);

    free_held(memory, &held);
    assert_true(sp_sequence_memory_is_consistent(memory));
    return resumed;
}

static void test_each_sequence_has_a_state_from_its_first_reservation(void **state)
{
    sp_sequence_memory memory = make_memory(16, 2, 0);
    sp_held_memory a = make_held(&memory), b = make_held(&memory), c = make_held(&memory);

    (void)state;
    assert_int_equal(sp_sequence_memory_reserve(&memory, &a, 0), 0);
    assert_int_equal(memory.states.n_free_states, 2);
    assert_int_equal(sp_sequence_memory_reserve(&memory, &a, 4), 4);
    assert_true(sp_sequence_memory_has_room(&memory, 4));
    assert_int_equal(sp_sequence_memory_reserve(&memory, &b, 4), 4);
    assert_int_not_equal(a.state.slot, b.state.slot);
    assert_false(sp_sequence_memory_has_room(&memory, 0));
    assert_int_equal(sp_sequence_memory_reserve(&memory, &c, 4), 0);
    assert_int_equal(c.n_pages, 0);
    assert_int_equal(sp_sequence_memory_available(&memory), 14);
    sp_sequence_memory_rollback(&memory, &a);
    assert_int_equal(memory.states.n_free_states, 0); /* the sequence goes on with it */
    sp_sequence_memory_release(&memory, &b);
    assert_true(sp_sequence_memory_has_room(&memory, 4));
    assert_int_equal(sp_sequence_memory_reserve(&memory, &c, 4), 4);
    assert_int_equal(memory.states.used_max, 2);
    free_held(&memory, &a);
    free_held(&memory, &b);
    free_held(&memory, &c);
    assert_int_equal(memory.states.n_free_states, 2);
    sp_sequence_memory_destroy(&memory);
}

/* The state advances over what counts in any case; drafts that are accepted follow a step later. */
static void test_a_state_is_at_the_last_border_of_the_final_rows(void **state)
{
    sp_sequence_memory memory = make_memory(16, 1, 0);
    sp_held_memory a = make_held(&memory);

    (void)state;
    check_step(begin(&memory, &a, 7, 7, 0), 0, -1, -1, 7);
    assert_true(sp_sequence_memory_commit(&memory, &a, counting, 7));
    check_step(begin(&memory, &a, 5, 5, 4), 0, -1, -1, 1);
    assert_true(sp_sequence_memory_commit(&memory, &a, counting, 3));
    check_step(begin(&memory, &a, 7, 7, 6), 8, -1, -1, 1);
    assert_true(sp_sequence_memory_commit(&memory, &a, counting, 7));
    assert_int_equal(a.n_committed, 17);
    check_step(begin(&memory, &a, 1, 1, 0), 8, -1, -1, 1);
    assert_true(sp_sequence_memory_commit(&memory, &a, counting, 1));
    check_step(begin(&memory, &a, 20, 20, 0), 16, -1, -1, 20);
    assert_true(sp_sequence_memory_commit(&memory, &a, counting, 20));
    check_step(begin(&memory, &a, 1, 1, 0), 32, -1, -1, 1);
    assert_true(sp_sequence_memory_commit(&memory, &a, counting, 1));
    free_held(&memory, &a);
    sp_sequence_memory_destroy(&memory);
}

static void test_a_failed_step_loses_a_state_that_it_may_have_advanced(void **state)
{
    sp_sequence_memory memory = make_memory(16, 1, 0);
    sp_held_memory a = make_held(&memory);

    (void)state;
    /* From zeros it begins anew, however often. */
    for (int32_t i = 0; i < 3; i++) {
        check_step(begin(&memory, &a, 20, 20, 0), 0, -1, -1, 20);
        assert_true(i == 0 ? sp_sequence_memory_rollback(&memory, &a)
                           : sp_sequence_memory_commit(&memory, &a, counting, 0));
        assert_int_equal(a.n_pages, 0);
    }
    compute(&memory, &a, counting, 12);
    /* No border is passed: the state is as it was. */
    check_step(begin(&memory, &a, 7, 7, 4), 8, -1, -1, 3);
    assert_true(sp_sequence_memory_commit(&memory, &a, counting, 0));
    assert_int_equal(a.n_committed, 12);
    /* Those that were never begun have changed nothing. */
    assert_int_equal(sp_sequence_memory_reserve(&memory, &a, 20), 20);
    assert_true(sp_sequence_memory_rollback(&memory, &a));
    /* By the rows of the step. */
    check_step(begin(&memory, &a, 8, 8, 4), 8, -1, -1, 4);
    assert_false(sp_sequence_memory_commit(&memory, &a, counting, 0));
    assert_int_equal(a.n_committed, 0);
    assert_int_equal(a.n_pages, 0);
    assert_int_equal(memory.states.n_free_states, 1);
    /* By the drafts that were accepted before it. */
    compute(&memory, &a, counting, 14);
    begin(&memory, &a, 4, 4, 3);
    assert_true(sp_sequence_memory_commit(&memory, &a, counting, 4));
    assert_int_equal(a.state.folded, 8);
    check_step(begin(&memory, &a, 1, 1, 0), 8, -1, -1, 1);
    assert_false(sp_sequence_memory_rollback(&memory, &a));
    assert_int_equal(a.n_committed, 0);
    check_step(begin(&memory, &a, 2, 2, 0), 0, -1, -1, 2);
    free_held(&memory, &a); /* in the middle of a step */
    assert_int_equal(memory.states.n_free_states, 1);
    sp_sequence_memory_destroy(&memory);
}

static void test_a_prompt_resumes_at_a_snapshot(void **state)
{
    sp_sequence_memory memory = make_memory(32, 3, 4);
    sp_held_memory a = make_held(&memory), b = make_held(&memory);

    (void)state;
    check_step(begin(&memory, &a, 40, 16, 0), 0, -1, -1, 16);
    assert_true(sp_sequence_memory_commit(&memory, &a, counting, 16));
    /* Its pages are known, and of no use yet. */
    assert_int_equal(known(&memory, counting, 40), 0);
    check_step(begin(&memory, &a, 3, 3, 0), 16, -1, 0, 3);
    assert_int_equal(known(&memory, counting, 40), 0); /* it is being written */
    assert_true(sp_sequence_memory_commit(&memory, &a, counting, 3));
    assert_int_equal(known(&memory, counting, 40), 16);
    assert_int_equal(known(&memory, counting, 16), 16);
    assert_int_equal(known(&memory, counting, 15), 0);
    /* A verify step ends there as well. */
    compute(&memory, &a, counting, 30);
    check_step(begin(&memory, &a, 7, 2, 1), 24, -1, -1, 1);
    assert_true(sp_sequence_memory_commit(&memory, &a, counting, 2));
    check_step(begin(&memory, &a, 4, 4, 3), 24, -1, 1, 1);
    assert_true(sp_sequence_memory_commit(&memory, &a, counting, 1));
    assert_int_equal(known(&memory, counting, 40), 32);
    assert_int_equal(known(&memory, counting, 31), 16);
    /* The pages after the snapshot are not taken, and are computed anew. */
    assert_int_equal(sp_sequence_memory_resume(&memory, &b, counting, 30), 16);
    assert_int_equal(b.n_pages, 4);
    assert_int_equal(b.n_known, 4);
    assert_memory_equal(b.pages, a.pages, 4 * sizeof(int32_t));
    check_step(begin(&memory, &b, 40, 16, 0), 16, 0, -1, 16);
    assert_int_not_equal(b.pages[4], a.pages[4]);
    assert_true(sp_sequence_memory_commit(&memory, &b, counting, 16));
    assert_memory_equal(b.pages, a.pages, 8 * sizeof(int32_t));
    check_step(begin(&memory, &b, 1, 1, 0), 32, -1, -1, 1); /* there is one already */
    assert_true(sp_sequence_memory_commit(&memory, &b, counting, 1));
    free_held(&memory, &a);
    free_held(&memory, &b);
    assert_int_equal(known(&memory, counting, 40), 32);
    sp_sequence_memory_destroy(&memory);
}

static void test_of_two_at_one_place_one_writes(void **state)
{
    sp_sequence_memory memory = make_memory(32, 2, 4);
    sp_held_memory a = make_held(&memory), b = make_held(&memory);

    (void)state;
    compute(&memory, &a, counting, 16);
    compute(&memory, &b, counting, 16);
    check_step(begin(&memory, &a, 1, 1, 0), 16, -1, 0, 1);
    check_step(begin(&memory, &b, 1, 1, 0), 16, -1, -1, 1);
    /* The one that writes fails: no snapshot. */
    assert_true(sp_sequence_memory_commit(&memory, &a, counting, 0));
    assert_true(sp_sequence_memory_commit(&memory, &b, counting, 1));
    assert_int_equal(known(&memory, counting, 20), 0);
    assert_int_equal(memory.states.n_free_snapshots, 4);
    /* The next attempt does. A release in its step would not. */
    check_step(begin(&memory, &a, 1, 1, 0), 16, -1, 0, 1);
    sp_sequence_memory_release(&memory, &a);
    assert_int_equal(memory.states.n_free_snapshots, 4);
    assert_int_equal(sp_sequence_memory_resume(&memory, &a, counting, 20), 0);
    compute(&memory, &a, counting, 17);
    assert_int_equal(known(&memory, counting, 20), 16);
    free_held(&memory, &a);
    free_held(&memory, &b);
    sp_sequence_memory_destroy(&memory);
}

static void test_a_snapshot_stays_until_it_was_read(void **state)
{
    sp_sequence_memory memory = make_memory(32, 3, 1);
    sp_held_memory a = make_held(&memory), b = make_held(&memory);
    int32_t other[LONGEST] = {0};

    (void)state;
    pass(&memory, counting, 17);
    assert_int_equal(sp_sequence_memory_resume(&memory, &a, counting, 20), 16);
    /* Another sequence would write where none is free. */
    compute(&memory, &b, other, 16);
    check_step(begin(&memory, &b, 1, 1, 0), 16, -1, -1, 1);
    assert_true(sp_sequence_memory_commit(&memory, &b, other, 1));
    /* A step that failed has read it or not: the next one reads it again. */
    check_step(begin(&memory, &a, 16, 16, 0), 16, 0, -1, 16);
    assert_true(sp_sequence_memory_commit(&memory, &a, counting, 0));
    assert_int_equal(a.n_committed, 16);
    check_step(begin(&memory, &a, 3, 3, 0), 16, 0, -1, 3);
    assert_true(sp_sequence_memory_commit(&memory, &a, counting, 3));
    check_step(begin(&memory, &a, 1, 1, 0), 16, -1, -1, 1);
    assert_true(sp_sequence_memory_commit(&memory, &a, counting, 1));
    /* Now it may make way. */
    compute(&memory, &b, other, 32);
    check_step(begin(&memory, &b, 1, 1, 0), 32, -1, 0, 1);
    assert_int_equal(known(&memory, counting, 20), 0);
    assert_true(sp_sequence_memory_commit(&memory, &b, other, 1));
    assert_int_equal(known(&memory, other, 40), 32);
    free_held(&memory, &a);
    free_held(&memory, &b);
    sp_sequence_memory_destroy(&memory);
}

static void test_a_lost_state_begins_at_the_last_snapshot(void **state)
{
    sp_sequence_memory memory = make_memory(32, 1, 4);
    sp_held_memory a = make_held(&memory);

    (void)state;
    compute(&memory, &a, counting, 23);
    begin(&memory, &a, 1, 1, 0);
    assert_false(sp_sequence_memory_commit(&memory, &a, counting, 0));
    assert_int_equal(a.n_pages, 0);
    assert_int_equal(sp_sequence_memory_resume(&memory, &a, counting, 23), 16);
    check_step(begin(&memory, &a, 8, 8, 0), 16, 0, -1, 8);
    free_held(&memory, &a);
    sp_sequence_memory_destroy(&memory);
}

/* Of those that nobody holds and of one kind, the one that was written or read longest ago. */
static void test_the_snapshot_that_was_used_longest_ago_is_evicted(void **state)
{
    sp_sequence_memory memory = make_memory(64, 1, 2);
    int32_t second[LONGEST] = {2}, third[LONGEST] = {3};

    (void)state;
    pass(&memory, counting, 17);
    pass(&memory, second, 17);
    pass(&memory, third, 17);
    assert_int_equal(known(&memory, counting, 20), 0);
    assert_int_equal(known(&memory, second, 20), 16);
    assert_int_equal(known(&memory, third, 20), 16);
    assert_int_equal(known(&memory, second, 20), 16);
    pass(&memory, counting, 17);
    assert_int_equal(known(&memory, counting, 20), 16);
    assert_int_equal(known(&memory, second, 20), 16);
    assert_int_equal(known(&memory, third, 20), 0);
    sp_sequence_memory_destroy(&memory);
}

/* Snapshots at multiples of 64: what is at other borders is at an end. */
static sp_sequence_memory make_spaced(int32_t n_pages, int32_t n_snapshots)
{
    sp_sequence_memory_options options = options_of(n_pages, 4, n_snapshots);
    sp_sequence_memory memory;

    options.snapshot_tokens = 64;
    assert_int_equal(sp_sequence_memory_create(&options, &memory), SP_OK);
    return memory;
}

/* Tokens that begin with `first`, and are all the same else. */
static const int32_t *text_of(int32_t first)
{
    static int32_t texts[16][LONGEST];

    texts[first][0] = first + 100;
    return texts[first];
}

/* Computes up to n positions, the last of them one by one from the prompt's end. */
static void write_text(sp_sequence_memory *memory, sp_held_memory *held, const int32_t *tokens,
                       int32_t n)
{
    while (held->n_committed < n) {
        int32_t left = held->n_prompt - held->n_committed, rows;

        rows = sp_sequence_memory_reserve(memory, held, left > 0 ? left : 1);
        sp_sequence_memory_begin_step(memory, held, rows);
        assert_true(sp_sequence_memory_commit(memory, held, tokens, rows));
    }
}

/* A request: a prompt and what it gives. Returns what it found computed. */
static int32_t answer(sp_sequence_memory *memory, const int32_t *tokens, int32_t n_prompt,
                      int32_t n)
{
    sp_held_memory held = make_held(memory);
    int32_t found;

    held.n_prompt = n_prompt;
    found = sp_sequence_memory_resume(memory, &held, tokens, n_prompt - 1);
    write_text(memory, &held, tokens, n);
    free_held(memory, &held);
    assert_true(sp_sequence_memory_is_consistent(memory));
    return found;
}

/* Begins a sequence with n_prompt tokens that holds what it finds. */
static sp_held_memory begin_prompt(sp_sequence_memory *memory, const int32_t *tokens,
                                   int32_t n_prompt)
{
    sp_held_memory held = make_held(memory);

    held.n_prompt = n_prompt;
    sp_sequence_memory_resume(memory, &held, tokens, n_prompt - 1);
    return held;
}

/* The last border before the prompt's last token: for the same prompt, and for a longer one. */
static void test_a_snapshot_at_the_end_of_a_prompt(void **state)
{
    sp_sequence_memory memory = make_spaced(64, 8);
    sp_held_memory a;

    (void)state;
    a = begin_prompt(&memory, text_of(0), 40);
    check_step(begin(&memory, &a, 40, 32, 0), 0, -1, -1, 32); /* not 40: its last row is computed */
    assert_true(sp_sequence_memory_commit(&memory, &a, text_of(0), 32));
    check_step(begin(&memory, &a, 8, 8, 0), 32, -1, 0, 8);
    assert_true(sp_sequence_memory_commit(&memory, &a, text_of(0), 8));
    free_held(&memory, &a);
    assert_int_equal(known(&memory, text_of(0), 39), 32);
    assert_int_equal(answer(&memory, text_of(0), 100, 100), 32);
    assert_int_equal(known(&memory, text_of(0), 150), 96);
    /* A short one is not worth a step; nor one just after another place. */
    assert_int_equal(answer(&memory, text_of(1), 16, 17), 0);
    assert_int_equal(known(&memory, text_of(1), 150), 0);
    assert_int_equal(answer(&memory, text_of(2), 76, 77), 0);
    assert_int_equal(known(&memory, text_of(2), 150), 64);
    assert_int_equal(answer(&memory, text_of(2), 90, 91), 64);
    assert_int_equal(known(&memory, text_of(2), 150), 88);
    sp_sequence_memory_destroy(&memory);
}

/* It goes along with the output: one snapshot, whatever the output's length. */
static void test_a_snapshot_where_the_output_is(void **state)
{
    sp_sequence_memory memory = make_spaced(64, 8);
    sp_held_memory a = begin_prompt(&memory, text_of(0), 20);

    (void)state;
    write_text(&memory, &a, text_of(0), 33);
    assert_int_equal(known(&memory, text_of(0), 150), 32); /* 16 after the prompt's */
    write_text(&memory, &a, text_of(0), 50);
    assert_int_equal(sp_state_slots_n_kept(&memory.states), 3);
    assert_int_equal(known(&memory, text_of(0), 150), 48);
    free_held(&memory, &a);

    a = begin_prompt(&memory, text_of(1), 20);
    write_text(&memory, &a, text_of(1), 63);
    assert_int_equal(sp_state_slots_n_kept(&memory.states), 5); /* at 16 and 56 */
    assert_int_equal(known(&memory, text_of(1), 55), 16);
    write_text(&memory, &a, text_of(1), 65);
    assert_int_equal(known(&memory, text_of(1), 150), 64);
    free_held(&memory, &a);
    assert_int_equal(known(&memory, text_of(1), 63), 56); /* somebody has begun with it */
    sp_sequence_memory_destroy(&memory);
}

/* Others have evicted it: it is not taken again, because that would evict theirs. */
static void test_an_output_takes_one_snapshot_from_others(void **state)
{
    sp_sequence_memory memory = make_spaced(64, 2);
    sp_held_memory a = begin_prompt(&memory, text_of(0), 2);

    (void)state;
    write_text(&memory, &a, text_of(0), 17);
    assert_int_equal(answer(&memory, text_of(1), 30, 30), 0);
    assert_int_equal(answer(&memory, text_of(2), 30, 30), 0);
    write_text(&memory, &a, text_of(0), 60);
    free_held(&memory, &a);
    assert_int_equal(known(&memory, text_of(0), 150), 0);
    assert_int_equal(known(&memory, text_of(1), 150), 24);
    assert_int_equal(known(&memory, text_of(2), 150), 24);
    sp_sequence_memory_destroy(&memory);
}

/* Of the prompts that begin alike the second takes a snapshot where it parts, the third begins with
 * it. */
static void test_a_snapshot_where_prompts_part(void **state)
{
    sp_sequence_memory memory = make_spaced(64, 8);
    int32_t other[LONGEST];

    (void)state;
    memcpy(other, text_of(3), sizeof other);
    for (int32_t i = 45; i < LONGEST; i++)
        other[i] = 7;
    assert_int_equal(answer(&memory, text_of(3), 120, 121), 0);
    assert_int_equal(answer(&memory, other, 100, 101), 0);
    assert_int_equal(known(&memory, other, 45), 40);
    for (int32_t i = 45; i < LONGEST; i++)
        other[i] = 8;
    assert_int_equal(answer(&memory, other, 100, 101), 40);
    sp_sequence_memory_destroy(&memory);
}

/* First the spaced ones, then those at ends, last those that somebody has begun with. */
static void test_what_was_begun_with_is_evicted_last(void **state)
{
    sp_sequence_memory memory = make_spaced(200, 4);

    (void)state;
    assert_int_equal(answer(&memory, text_of(0), 26, 26), 0);  /* an end at 24 */
    assert_int_equal(answer(&memory, text_of(1), 34, 34), 0);  /* an end at 32 */
    assert_int_equal(answer(&memory, text_of(0), 26, 26), 24); /* begun with */
    pass(&memory, text_of(2), 130);                            /* spaced ones at 64 and 128 */
    assert_int_equal(sp_state_slots_n_kept(&memory.states), 4);
    pass(&memory, text_of(3), 130); /* they make way, in their order, as do its own */
    assert_int_equal(known(&memory, text_of(0), 150), 24);
    assert_int_equal(memory.states.idle[SP_SNAPSHOT_END].n, 1);
    assert_int_equal(known(&memory, text_of(3), 150), 128);
    pass(&memory, text_of(4), 66); /* takes the place of the last spaced one, 64 of text 3 */
    pass(&memory, text_of(5), 66);
    assert_int_equal(known(&memory, text_of(1), 150), 32);
    assert_int_equal(known(&memory, text_of(4), 150), 0);
    assert_int_equal(known(&memory, text_of(5), 150), 64);
    /* All four were begun with now: the oldest of them makes way. */
    assert_int_equal(memory.states.idle[SP_SNAPSHOT_USED].n, 4);
    pass(&memory, text_of(6), 66);
    assert_int_equal(known(&memory, text_of(0), 150), 0);
    assert_int_equal(known(&memory, text_of(1), 150), 32);
    assert_int_equal(known(&memory, text_of(6), 150), 64);
    sp_sequence_memory_destroy(&memory);
}

static void test_a_snapshot_goes_with_its_page(void **state)
{
    sp_sequence_memory memory = make_memory(10, 2, 4);
    sp_held_memory a = make_held(&memory);
    int32_t other[LONGEST] = {0};

    (void)state;
    pass(&memory, counting, 33);
    assert_int_equal(known(&memory, counting, 40), 32);
    assert_int_equal(sp_state_slots_n_kept(&memory.states), 2);
    /* Two pages are free, and the others go from their end. */
    assert_int_equal(sp_sequence_memory_reserve(&memory, &a, 12), 12);
    assert_int_equal(sp_state_slots_n_kept(&memory.states), 1);
    assert_int_equal(known(&memory, counting, 40), 16);
    assert_int_equal(sp_sequence_memory_reserve(&memory, &a, 16), 16);
    sp_sequence_memory_begin_step(&memory, &a, 16);
    assert_true(sp_sequence_memory_commit(&memory, &a, other, 16));
    assert_int_equal(known(&memory, counting, 40), 16);
    compute(&memory, &a, other, 33);
    assert_int_equal(known(&memory, counting, 40), 0);
    assert_int_equal(sp_state_slots_n_kept(&memory.states), 2); /* of the other sequence */
    free_held(&memory, &a);
    sp_sequence_memory_destroy(&memory);
}

/* Pages are shared all the same, by those that fill them with the same content. */
static void test_without_snapshots_nothing_resumes(void **state)
{
    sp_sequence_memory memory = make_memory(16, 2, 0);
    sp_held_memory a = make_held(&memory), b = make_held(&memory);

    (void)state;
    compute(&memory, &a, counting, 20);
    assert_int_equal(known(&memory, counting, 20), 0);
    compute(&memory, &b, counting, 20);
    assert_memory_equal(a.pages, b.pages, 5 * sizeof(int32_t));
    free_held(&memory, &a);
    free_held(&memory, &b);
    sp_sequence_memory_destroy(&memory);
}

/* What is broken is seen, and what is mended again is not. */
static void check_int_broken(const sp_sequence_memory *memory, int32_t *at, int32_t value)
{
    int32_t was = *at;

    assert_int_not_equal(was, value);
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

/* Snapshot 0 is held by b, 1 is idle, 2 is written by a, and 3 is free. */
static void test_each_broken_invariant_is_seen(void **state)
{
    sp_sequence_memory memory = make_memory(32, 3, 4);
    sp_state_slots *states = &memory.states;
    sp_held_memory a = make_held(&memory), b = make_held(&memory);

    (void)state;
    compute(&memory, &a, counting, 48);
    assert_int_equal(sp_sequence_memory_resume(&memory, &b, counting, 20), 16);
    check_step(begin(&memory, &a, 1, 1, 0), 48, -1, 2, 1);
    check_int_broken(&memory, &states->n_free_states, 1);
    check_bool_broken(&memory, &states->used[a.state.slot]);
    check_int_broken(&memory, &states->free_states[0], a.state.slot);
    check_int_broken(&memory, &states->n_free_snapshots, 2);
    check_int_broken(&memory, &states->free_snapshots[0], 1);
    check_int_broken(&memory, &states->idle[SP_SNAPSHOT_SPACED].n, 2);
    check_int_broken(&memory, &states->idle[SP_SNAPSHOT_END].n, 1);
    check_int_broken(&memory, (int32_t *)&states->kinds[1], SP_SNAPSHOT_END);
    check_int_broken(&memory, &states->holders[0], 0);
    check_int_broken(&memory, &states->holders[1], 1);
    check_int_broken(&memory, &states->holders[2], 1);
    check_int_broken(&memory, &states->holders[3], 1);
    check_int_broken(&memory, &states->holders[0], -1);
    check_bool_broken(&memory, &states->written[0]);
    check_bool_broken(&memory, &states->written[1]);
    check_bool_broken(&memory, &states->written[3]);
    check_int_broken(&memory, &states->pages[1], a.pages[3]);
    check_int_broken(&memory, &states->pages[1], -1);
    check_int_broken(&memory, &states->pages[3], a.pages[3]);
    check_int_broken(&memory, &states->snapshots[a.pages[3]], 1);
    check_int_broken(&memory, &states->snapshots[a.pages[3]], -1);
    check_int_broken(&memory, &states->snapshots[a.pages[12]], 3); /* of an unknown page */
    check_int_broken(&memory, &states->idle[SP_SNAPSHOT_SPACED].oldest, -1);
    check_int_broken(&memory, &states->idle[SP_SNAPSHOT_SPACED].youngest, -1);
    check_int_broken(&memory, &states->younger[1], 1);
    check_int_broken(&memory, &states->older[1], 0);
    free_held(&memory, &a);
    free_held(&memory, &b);
    sp_sequence_memory_destroy(&memory);
}

static void test_creation_survives_every_failed_allocation(void **state)
{
    sp_sequence_memory_options options = options_of(8, 2, 2);
    size_t blocks = sp_alloc_blocks();
    bool failed = true;

    (void)state;
    for (int64_t n = 0; failed; n++) {
        sp_sequence_memory memory = {0};
        sp_status status;

        sp_alloc_fail_after(n);
        status = sp_sequence_memory_create(&options, &memory);
        failed = sp_alloc_failed();
        sp_alloc_fail_after(-1);
        assert_int_equal(status, failed ? SP_ERR_MEMORY : SP_OK);
        sp_sequence_memory_destroy(&memory);
        assert_int_equal(sp_alloc_blocks(), blocks);
    }
}

static int leaks_nothing(void **state)
{
    (void)state;
    return sp_alloc_blocks() == 0 ? 0 : -1;
}

#define TEST(name) cmocka_unit_test_teardown(name, leaks_nothing)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_each_sequence_has_a_state_from_its_first_reservation),
        TEST(test_a_state_is_at_the_last_border_of_the_final_rows),
        TEST(test_a_failed_step_loses_a_state_that_it_may_have_advanced),
        TEST(test_a_prompt_resumes_at_a_snapshot),
        TEST(test_of_two_at_one_place_one_writes),
        TEST(test_a_snapshot_stays_until_it_was_read),
        TEST(test_a_lost_state_begins_at_the_last_snapshot),
        TEST(test_the_snapshot_that_was_used_longest_ago_is_evicted),
        TEST(test_a_snapshot_at_the_end_of_a_prompt),
        TEST(test_a_snapshot_where_the_output_is),
        TEST(test_an_output_takes_one_snapshot_from_others),
        TEST(test_a_snapshot_where_prompts_part),
        TEST(test_what_was_begun_with_is_evicted_last),
        TEST(test_a_snapshot_goes_with_its_page),
        TEST(test_without_snapshots_nothing_resumes),
        TEST(test_each_broken_invariant_is_seen),
        TEST(test_creation_survives_every_failed_allocation),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
