/* The victim policy as a table: each row says what the slots are and which one must go. */
#include "support/test.h"

#include <sidepath/pool.h>

/* Slot states, written short. READY slots carry their last use. */
#define SIZED .struct_bytes = sizeof(sp_slot_info)
#define EMPTY                                        \
    {                                                \
        SIZED, .state = SP_SLOT_EMPTY, .last_use = 9 \
    }
#define LOADING                         \
    {                                   \
        SIZED, .state = SP_SLOT_LOADING \
    }
#define DRAINING                                          \
    {                                                     \
        SIZED, .state = SP_SLOT_DRAINING, .references = 1 \
    }
#define IDLE(use)                                        \
    {                                                    \
        SIZED, .state = SP_SLOT_READY, .last_use = (use) \
    }
#define HELD(use)                                                         \
    {                                                                     \
        SIZED, .state = SP_SLOT_READY, .references = 1, .last_use = (use) \
    }
#define PINNED(use)                                                      \
    {                                                                    \
        SIZED, .state = SP_SLOT_READY, .pinned = true, .last_use = (use) \
    }
#define AWAITED(use)                                                      \
    {                                                                     \
        SIZED, .state = SP_SLOT_READY, .awaited = true, .last_use = (use) \
    }

enum { SLOTS_MAX = 4, NONE = -7 };

static const struct {
    const char *what;
    int32_t n;
    sp_slot_info slots[SLOTS_MAX];
    sp_status status;
    int32_t victim;
} cases[] = {
    {"one empty slot", 1, {EMPTY}, SP_OK, 0},
    {"the first empty slot", 4, {HELD(1), EMPTY, EMPTY, IDLE(2)}, SP_OK, 1},
    {"an empty slot goes before an idle one", 3, {IDLE(1), IDLE(2), EMPTY}, SP_OK, 2},
    {"the least recently used", 4, {IDLE(5), IDLE(3), IDLE(4), IDLE(9)}, SP_OK, 1},
    {"the oldest is last", 3, {IDLE(5), IDLE(4), IDLE(3)}, SP_OK, 2},
    {"a tie goes to the lowest", 4, {IDLE(8), IDLE(6), IDLE(6), IDLE(7)}, SP_OK, 1},
    {"a use count above 2^32", 2, {IDLE(1ull << 40), IDLE((1ull << 40) - 1)}, SP_OK, 1},
    {"held is never a victim", 3, {HELD(1), IDLE(9), HELD(2)}, SP_OK, 1},
    {"pinned is never a victim", 3, {PINNED(1), IDLE(9), PINNED(2)}, SP_OK, 1},
    {"awaited is never a victim", 3, {AWAITED(1), IDLE(9), AWAITED(2)}, SP_OK, 1},
    {"loading and draining are never victims", 3, {LOADING, DRAINING, IDLE(9)}, SP_OK, 2},
    {"all held", 2, {HELD(1), HELD(2)}, SP_POOL_FULL, NONE},
    {"all awaited", 2, {AWAITED(1), AWAITED(2)}, SP_POOL_FULL, NONE},
    {"all loading", 2, {LOADING, LOADING}, SP_POOL_FULL, NONE},
    {"all draining", 2, {DRAINING, DRAINING}, SP_POOL_FULL, NONE},
    {"pinned but for one that is held", 3, {PINNED(1), HELD(2), PINNED(3)}, SP_POOL_FULL, NONE},
    {"pinned but for one that drains", 2, {PINNED(1), DRAINING}, SP_POOL_FULL, NONE},
    {"all pinned is for good", 2, {PINNED(1), PINNED(2)}, SP_ERR_SLOTS_PINNED, NONE},
    {"one slot, pinned", 1, {PINNED(1)}, SP_ERR_SLOTS_PINNED, NONE},
    {"no slots", 0, {EMPTY}, SP_ERR_ARGUMENT, NONE},
};

static void follows_the_table(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int32_t victim = NONE;
        sp_status status = sp_pool_pick_victim(cases[i].slots, cases[i].n, &victim, NULL);

        if (status != cases[i].status || victim != cases[i].victim)
            fail_msg("%s: %s, slot %d", cases[i].what, sp_status_name(status), (int)victim);
    }
}

static void a_pinned_slot_that_is_also_held_counts_as_pinned(void **state)
{
    const sp_slot_info slot = {SIZED, .state = SP_SLOT_READY, .pinned = true, .references = 3};
    int32_t victim = NONE;

    (void)state;
    assert_int_equal(sp_pool_pick_victim(&slot, 1, &victim, NULL), SP_ERR_SLOTS_PINNED);
    assert_int_equal(victim, NONE);
    assert_int_equal(sp_pool_pick_victim(NULL, 1, &victim, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_pool_pick_victim(&slot, 1, NULL, NULL), SP_ERR_ARGUMENT);
}

/* A newer caller's array: elements are as far apart as its struct says. */
static void elements_have_the_callers_size(void **state)
{
    struct longer {
        sp_slot_info info;
        uint64_t more[3];
    } slots[3] = {0};
    int32_t victim = NONE;
    sp_error error;

    (void)state;
    for (int32_t i = 0; i < 3; i++) {
        slots[i].info.struct_bytes = sizeof slots[i];
        slots[i].info.state = SP_SLOT_READY;
        slots[i].info.last_use = 10 - (uint64_t)i;
    }
    assert_ok(sp_pool_pick_victim(&slots[0].info, 3, &victim, &error), &error);
    assert_int_equal(victim, 2);
    slots[1].info.struct_bytes = sizeof(sp_slot_info);
    victim = NONE;
    assert_int_equal(sp_pool_pick_victim(&slots[0].info, 3, &victim, &error), SP_ERR_ARGUMENT);
    assert_int_equal(error.position, 1);
    assert_int_equal(victim, NONE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(follows_the_table),
        cmocka_unit_test(a_pinned_slot_that_is_also_held_counts_as_pinned),
        cmocka_unit_test(elements_have_the_callers_size),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
