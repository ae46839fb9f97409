/* Room in two memories at once: hand-computed cases, and a search over random ones. */
#include "pool/room.h"

#include "pool/victim.h"
#include "support/test.h"

#include <string.h>

enum { SLOTS = 4 };

static sp_slot_info slot_of(sp_slot_state state, uint64_t last_use, int32_t references)
{
    return (sp_slot_info){.struct_bytes = sizeof(sp_slot_info),
                          .state = state,
                          .last_use = last_use,
                          .references = references};
}

typedef struct scene {
    sp_slot_info slots[SLOTS];
    sp_extent extents[2][SLOTS], trial[2][SLOTS];
    sp_room rooms[2];
} scene;

/* Memories of 100 bytes; slots 0 and 1 are idle (1 is older), 2 is held, 3 is being loaded. */
static scene two_memories(void)
{
    scene s = {
        .slots = {slot_of(SP_SLOT_READY, 9, 0), slot_of(SP_SLOT_READY, 5, 0),
                  slot_of(SP_SLOT_READY, 1, 1), slot_of(SP_SLOT_LOADING, 0, 0)},
        .extents = {{{0, 40}, {40, 30}, {0, 0}, {0, 0}}, {{0, 20}, {0, 0}, {20, 50}, {0, 0}}}};

    return s;
}

static bool find(scene *s, size_t first, size_t second)
{
    for (int i = 0; i < 2; i++)
        s->rooms[i] = (sp_room){.extents = s->extents[i],
                                .trial = s->trial[i],
                                .block_bytes = 100,
                                .bytes = i == 0 ? first : second};
    return sp_room_find(s->rooms, 2, s->slots, SLOTS);
}

static void both_or_neither(void **state)
{
    scene s = two_memories(), before = s;

    (void)state;
    assert_true(find(&s, 30, 30)); /* as it is */
    assert_int_equal(s.rooms[0].offset_bytes, 70);
    assert_int_equal(s.rooms[1].offset_bytes, 70);
    assert_true(find(&s, 60, 30)); /* the older idle slot goes */
    assert_int_equal(s.rooms[0].offset_bytes, 40);
    assert_int_equal(s.rooms[1].offset_bytes, 70);
    assert_false(find(&s, 30, 60)); /* the held one is in the way, whatever goes */
    assert_false(find(&s, 101, 0));
    assert_true(find(&s, 100, 30));
    assert_int_equal(s.rooms[0].offset_bytes, 0);
    assert_true(find(&s, 0, 0));
    assert_memory_equal(s.extents, before.extents, sizeof s.extents);
}

/* A slot that goes for one memory goes from the other too. */
static void an_idle_slot_gives_all_that_it_has(void **state)
{
    scene s = two_memories();

    (void)state;
    s.extents[1][1] = (sp_extent){70, 30};
    /* Nothing is free in the second; the older one gives 70 .. 100 there, and 40 .. 100 here. */
    assert_true(find(&s, 60, 30));
    assert_int_equal(s.rooms[0].offset_bytes, 40);
    assert_int_equal(s.rooms[1].offset_bytes, 70);
}

/* What is found overlaps nothing that must stay; what is not found is not there even when all that
 * is idle goes. */
static void random_scenes(void **state)
{
    sp_test_random random = {77};
    int n_found = 0;

    (void)state;
    for (int round = 0; round < 5000; round++) {
        scene s = two_memories();
        size_t need[2] = {sp_test_below(&random, 60), sp_test_below(&random, 60)}, offset;
        bool found, possible = true;

        for (int m = 0; m < 2; m++) {
            size_t at = 0;

            for (int i = 0; i < SLOTS; i++) {
                size_t gap = sp_test_below(&random, 12), bytes = sp_test_below(&random, 30);

                s.extents[m][i] = (sp_extent){at + gap, at + gap + bytes <= 100 ? bytes : 0};
                at += gap + bytes;
            }
        }
        for (int i = 0; i < SLOTS; i++)
            s.slots[i] = slot_of(sp_test_below(&random, 4) ? SP_SLOT_READY : SP_SLOT_LOADING,
                                 (uint64_t)i, (int32_t)sp_test_below(&random, 2));
        found = find(&s, need[0], need[1]);
        for (int m = 0; m < 2; m++) {
            sp_extent left[SLOTS];

            memcpy(left, s.extents[m], sizeof left);
            for (int i = 0; i < SLOTS; i++) {
                sp_extent got = {s.rooms[m].offset_bytes, need[m]};

                if (sp_slot_is_idle(&s.slots[i]))
                    left[i].bytes = 0;
                else if (found)
                    assert_false(sp_extents_overlap(&s.extents[m][i], &got));
            }
            possible &= need[m] == 0 || sp_extents_place(left, SLOTS, 100, need[m], &offset);
        }
        assert_int_equal(found, possible);
        n_found += found;
    }
    assert_in_range(n_found, 500, 4900); /* both happen */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(both_or_neither),
        cmocka_unit_test(an_idle_slot_gives_all_that_it_has),
        cmocka_unit_test(random_scenes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
