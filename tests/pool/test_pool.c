/*
 * Slots: every transition from every state, legal or not; references by version; pins, awaited and
 * draining; tables and bytes after each; the accounting of bytes; out of memory and a pool that is
 * too large.
 */
#include "support/hand.h"
#include "support/test.h"

#include "base/alloc.h"
#include "pool/image.h"

#include <stdlib.h>
#include <string.h>

enum { SLOTS = 3, SITES = 2 };

static const site_dims dims[SITES] = {
    {0, SP_MODULE_Q_PROJ, 6, 5},
    {1, SP_MODULE_Q_PROJ, 6, 5},
};

/* Adapter 0 adapts both sites, 1 the first only, 2 nothing. */
typedef struct fixture {
    hand_pool hand;
    sp_pool *pool;
    sp_image *images[3];
} fixture;

static int setup(void **state)
{
    static fixture f;
    sp_test_random random = {1};

    f.hand = hand_pool_create(dims, SITES, 8, SP_DTYPE_BF16, SLOTS);
    f.pool = f.hand.pool;
    for (int32_t i = 0; i < 3; i++) {
        hand_adapter *adapter = hand_adapter_create((uint64_t)i + 100);

        for (int32_t site = 0; site < SITES - i; site++)
            hand_adapter_add(adapter, &dims[site], 3 + i, 0.5f + (float)i, SP_DTYPE_BF16, &random);
        f.images[i] = hand_pack(&f.hand, adapter);
        hand_adapter_destroy(adapter);
    }
    *state = &f;
    return 0;
}

static int teardown(void **state)
{
    fixture *f = *state;

    for (int32_t i = 0; i < 3; i++)
        sp_image_destroy(f->images[i]);
    hand_pool_destroy(&f->hand);
    return 0;
}

static sp_slot_info info_of(const fixture *f, int32_t slot)
{
    return hand_slot_info(f->pool, slot);
}

static sp_slot_state state_of(const fixture *f, int32_t slot)
{
    return info_of(f, slot).state;
}

static sp_slot_handle handle_of(const fixture *f, int32_t slot)
{
    return hand_handle(f->pool, slot);
}

/* Loads image i; returns its version, held. */
static sp_slot_handle load(const fixture *f, int32_t i)
{
    sp_slot_handle handle = {-1, 0};
    sp_error error;

    assert_ok(sp_pool_load(f->pool, f->images[i], &handle, &error), &error);
    return handle;
}

static void release(const fixture *f, sp_slot_handle handle)
{
    sp_error error;

    assert_ok(sp_pool_release(f->pool, handle, &error), &error);
}

/* The same, held by nobody; returns its slot. */
static int32_t load_idle(const fixture *f, int32_t i)
{
    sp_slot_handle handle = load(f, i);

    release(f, handle);
    return handle.slot;
}

/* The slot's cells of every table show this image, or nothing (NULL). */
static void expect_tables(const fixture *f, int32_t slot, const sp_image *image)
{
    assert_int_equal(sp_pool_generations(f->pool)[slot],
                     image != NULL ? info_of(f, slot).generation : 0);
    for (int32_t site = 0; site < SITES; site++) {
        const sp_layout_site *place = sp_layout_site_at(f->hand.layout, site);
        size_t a_bytes = 8 * 6 * 2, b_bytes = 5 * 8 * 2;
        const sp_pool_tables *tables = sp_pool_tables_at(f->pool, site);

        if (image == NULL || image->ranks[site] == 0) {
            assert_null(tables->a[slot]);
            assert_null(tables->b[slot]);
            assert_int_equal(tables->rank[slot], 0);
            assert_true(tables->scale[slot] == 0.0f);
            continue;
        }
        assert_int_equal(tables->rank[slot], image->ranks[site]);
        assert_true(tables->scale[slot] == image->scales[site]);
        assert_memory_equal(tables->a[slot], (char *)image->data + place->a_offset_bytes, a_bytes);
        assert_memory_equal(tables->b[slot], (char *)image->data + place->b_offset_bytes, b_bytes);
    }
}

static void expect_not_found(const fixture *f, int32_t i)
{
    sp_slot_handle handle = {-1, 0};
    sp_error error;

    assert_int_equal(sp_pool_find(f->pool, &f->images[i]->digest, &handle, &error),
                     SP_ERR_NOT_FOUND);
    assert_int_equal(error.status, SP_ERR_NOT_FOUND);
    assert_int_equal(handle.slot, -1);
}

static void expect_found(const fixture *f, int32_t i, sp_slot_handle want)
{
    sp_slot_handle handle = {-1, 0};

    assert_ok(sp_pool_find(f->pool, &f->images[i]->digest, &handle, NULL), NULL);
    assert_int_equal(handle.slot, want.slot);
    assert_int_equal(handle.generation, want.generation);
}

/* ---- a slot's life ------------------------------------------------------------------------- */

static void everything_starts_empty(void **state)
{
    fixture *f = *state;

    assert_int_equal(sp_pool_slots(f->pool), SLOTS);
    assert_ptr_equal(sp_pool_layout(f->pool), f->hand.layout);
    for (int32_t slot = 0; slot < SLOTS; slot++) {
        sp_slot_info info = info_of(f, slot);

        assert_int_equal(info.state, SP_SLOT_EMPTY);
        assert_int_equal(info.generation, 0);
        assert_int_equal(info.references, 0);
        expect_tables(f, slot, NULL);
    }
    expect_not_found(f, 0);
}

static void a_load_becomes_visible_by_its_commit(void **state)
{
    fixture *f = *state;
    sp_slot_handle first = {-1, 0}, second;
    sp_error error;
    int32_t slot = -1;

    assert_ok(sp_pool_load_begin(f->pool, &slot, &error), &error);
    assert_int_equal(slot, 0);
    assert_int_equal(state_of(f, 0), SP_SLOT_LOADING);
    assert_ok(sp_pool_load_write(f->pool, 0, f->images[0], &error), &error);
    expect_tables(f, 0, NULL);
    expect_not_found(f, 0);
    assert_ok(sp_pool_load_commit(f->pool, 0, f->images[0], &first, &error), &error);
    assert_int_equal(first.slot, 0);
    assert_true(first.generation > 0);
    assert_int_equal(state_of(f, 0), SP_SLOT_READY);
    assert_int_equal(info_of(f, 0).generation, first.generation);
    assert_int_equal(info_of(f, 0).references, 1); /* the caller's */
    expect_tables(f, 0, f->images[0]);
    expect_found(f, 0, first);
    expect_not_found(f, 1);
    second = load(f, 1);
    assert_int_equal(second.slot, 1);
    assert_true(second.generation > first.generation);
    expect_tables(f, 1, f->images[1]);
    expect_tables(f, 0, f->images[0]);
    expect_tables(f, 2, NULL);
}

/* What was loaded stays until it is released, whatever else is loaded. */
static void a_loaded_version_is_held(void **state)
{
    fixture *f = *state;
    sp_slot_handle handles[SLOTS], more = {-7, 7};
    sp_error error;

    for (int32_t i = 0; i < SLOTS; i++)
        handles[i] = load(f, i);
    assert_int_equal(sp_pool_load(f->pool, f->images[0], &more, &error), SP_POOL_FULL);
    assert_int_equal(error.status, SP_POOL_FULL);
    assert_non_null(strstr(error.text, "release one"));
    assert_int_equal(more.slot, -7);
    assert_int_equal(more.generation, 7);
    for (int32_t i = 0; i < SLOTS; i++) {
        expect_tables(f, i, f->images[i]);
        assert_ok(sp_pool_check_handle(f->pool, handles[i], &error), &error);
    }
    release(f, handles[1]);
    more = load(f, 0);
    assert_int_equal(more.slot, 1);
    assert_int_equal(sp_pool_check_handle(f->pool, handles[1], &error), SP_ERR_STATE);
    assert_string_equal(error.code, "handle-stale");
    assert_ok(sp_pool_check_handle(f->pool, more, &error), &error);
}

/* Released, the version waits in its slot for who acquires it again. */
static void a_released_version_can_be_had_again(void **state)
{
    fixture *f = *state;
    sp_slot_handle handle = load(f, 0);
    sp_error error;

    release(f, handle);
    assert_int_equal(sp_pool_check_handle(f->pool, handle, &error), SP_ERR_STATE);
    assert_string_equal(error.code, "handle-released");
    expect_found(f, 0, handle);
    assert_ok(sp_pool_acquire(f->pool, handle, &error), &error);
    assert_ok(sp_pool_check_handle(f->pool, handle, &error), &error);
    expect_tables(f, 0, f->images[0]);
}

/* A handle of one pool means nothing in another, though the slots are alike. */
static void handles_of_another_pool_are_stale(void **state)
{
    fixture *f = *state;
    hand_pool other = hand_pool_create(dims, SITES, 8, SP_DTYPE_BF16, SLOTS);
    sp_slot_handle here = load(f, 0), there = {-1, 0};
    sp_error error;

    assert_ok(sp_pool_load(other.pool, f->images[1], &there, &error), &error);
    assert_int_equal(here.slot, there.slot);
    assert_int_equal(sp_pool_check_handle(f->pool, there, &error), SP_ERR_STATE);
    assert_string_equal(error.code, "handle-stale");
    assert_int_equal(sp_pool_release(other.pool, here, &error), SP_ERR_STATE);
    assert_string_equal(error.code, "handle-stale");
    hand_pool_destroy(&other);
}

static void changes_tell_when_a_handle_may_have_ended(void **state)
{
    fixture *f = *state;
    sp_slot_handle first = load(f, 0), second = load(f, 1);
    uint64_t before = sp_pool_changes(f->pool), now;

    assert_ok(sp_pool_acquire(f->pool, first, NULL), NULL);
    release(f, first);
    sp_pool_touch(f->pool, second);
    assert_ok(sp_pool_set_pinned(f->pool, second, true, NULL), NULL);
    assert_ok(sp_pool_set_pinned(f->pool, second, false, NULL), NULL);
    assert_int_equal(sp_pool_changes(f->pool), before); /* both are held all the while */
    release(f, first);
    now = sp_pool_changes(f->pool);
    assert_true(now != before);
    assert_int_equal(sp_pool_drain(f->pool, second, NULL), SP_BUSY);
    assert_int_equal(sp_pool_changes(f->pool), now);
    release(f, second);
    assert_true(sp_pool_changes(f->pool) != now);
    now = sp_pool_changes(f->pool);
    assert_ok(sp_pool_drain(f->pool, first, NULL), NULL);
    assert_true(sp_pool_changes(f->pool) != now); /* its slot is empty */
}

static void table_addresses_never_change(void **state)
{
    fixture *f = *state;
    sp_pool_tables before[SITES];

    for (int32_t site = 0; site < SITES; site++)
        before[site] = *sp_pool_tables_at(f->pool, site);
    for (int32_t i = 0; i < 3 * SLOTS; i++)
        load_idle(f, i % 3);
    for (int32_t site = 0; site < SITES; site++) {
        const sp_pool_tables *after = sp_pool_tables_at(f->pool, site);

        assert_int_equal(after->struct_bytes, sizeof *after);
        assert_memory_equal(after, &before[site], sizeof *after);
    }
    assert_null(sp_pool_tables_at(f->pool, -1));
    assert_null(sp_pool_tables_at(f->pool, SITES));
}

static void a_victim_leaves_the_tables_before_it_is_overwritten(void **state)
{
    fixture *f = *state;
    sp_slot_handle handle;
    sp_error error;
    int32_t slot = -1;

    for (int32_t i = 0; i < SLOTS; i++)
        load_idle(f, 0);
    sp_pool_touch(f->pool, handle_of(f, 0)); /* slot 1 is now the least recently used */
    assert_ok(sp_pool_load_begin(f->pool, &slot, NULL), NULL);
    assert_int_equal(slot, 1);
    expect_tables(f, 1, NULL);
    assert_int_equal(state_of(f, 1), SP_SLOT_LOADING);
    assert_ok(sp_pool_load_write(f->pool, 1, f->images[1], &error), &error);
    assert_ok(sp_pool_load_commit(f->pool, 1, f->images[1], &handle, NULL), NULL);
    expect_tables(f, 1, f->images[1]);
}

/* What the new adapter lacks is zero in the slot, whatever lay there before. */
static void a_slot_holds_exactly_its_image(void **state)
{
    fixture *f = *state;
    size_t bytes = sp_layout_slot_bytes(f->hand.layout);
    const char *memory;

    load_idle(f, 0);
    memory = sp_pool_tables_at(f->pool, 0)->a[0]; /* site 0's A is the slot's first byte */
    assert_memory_equal(memory, f->images[0]->data, bytes);
    assert_int_equal(sp_pool_drain(f->pool, handle_of(f, 0), NULL), SP_OK);
    assert_int_equal(load_idle(f, 2), 0);
    for (size_t i = 0; i < bytes; i++)
        assert_int_equal(memory[i], 0);
    assert_int_equal(sp_pool_drain(f->pool, handle_of(f, 0), NULL), SP_OK);
    assert_int_equal(load_idle(f, 0), 0);
    assert_memory_equal(memory, f->images[0]->data, bytes);
}

static void an_aborted_load_leaves_nothing(void **state)
{
    fixture *f = *state;
    size_t bytes = sp_layout_slot_bytes(f->hand.layout);
    const char *memory;
    sp_error error;
    int32_t slot;

    load_idle(f, 0);
    memory = sp_pool_tables_at(f->pool, 0)->a[0];
    assert_int_equal(sp_pool_drain(f->pool, handle_of(f, 0), NULL), SP_OK);
    assert_ok(sp_pool_load_begin(f->pool, &slot, NULL), NULL);
    assert_int_equal(slot, 0);
    assert_ok(sp_pool_load_write(f->pool, 0, f->images[1], &error), &error);
    assert_ok(sp_pool_load_abort(f->pool, 0, NULL), NULL);
    assert_int_equal(state_of(f, 0), SP_SLOT_EMPTY);
    expect_tables(f, 0, NULL);
    for (size_t i = 0; i < bytes; i++)
        assert_int_equal(memory[i], 0);
}

/* ---- versions and draining ----------------------------------------------------------------- */

static sp_slot_handle newer(sp_slot_handle handle)
{
    handle.generation++;
    return handle;
}

static void a_reference_is_to_a_version(void **state)
{
    fixture *f = *state;
    sp_slot_handle first = load(f, 0), second;

    assert_int_equal(sp_pool_acquire(f->pool, newer(first), NULL), SP_ERR_STATE);
    assert_ok(sp_pool_acquire(f->pool, first, NULL), NULL);
    assert_int_equal(info_of(f, 0).references, 2);
    assert_int_equal(sp_pool_release(f->pool, newer(first), NULL), SP_ERR_STATE);
    release(f, first);
    release(f, first);
    assert_int_equal(sp_pool_release(f->pool, first, NULL), SP_ERR_STATE);
    assert_ok(sp_pool_drain(f->pool, first, NULL), NULL);
    second = load(f, 0);
    assert_int_equal(second.slot, 0);
    assert_true(second.generation > first.generation);
    assert_int_equal(sp_pool_acquire(f->pool, first, NULL), SP_ERR_STATE);
    assert_ok(sp_pool_acquire(f->pool, second, NULL), NULL);
    assert_int_equal(sp_pool_release(f->pool, first, NULL), SP_ERR_STATE);
    release(f, second);
    release(f, second);
}

static void a_draining_slot_serves_to_its_last_reference(void **state)
{
    fixture *f = *state;
    sp_slot_handle handle = load(f, 0);
    sp_error error;

    assert_ok(sp_pool_acquire(f->pool, handle, NULL), NULL);
    assert_ok(sp_pool_set_awaited(f->pool, handle, true, NULL), NULL);
    assert_int_equal(sp_pool_drain(f->pool, handle, &error), SP_BUSY);
    assert_int_equal(error.status, SP_BUSY);
    assert_int_equal(state_of(f, 0), SP_SLOT_DRAINING);
    assert_false(info_of(f, 0).awaited);
    expect_tables(f, 0, f->images[0]); /* its requests still run */
    assert_ok(sp_pool_check_handle(f->pool, handle, NULL), NULL);
    expect_not_found(f, 0);
    assert_int_equal(sp_pool_acquire(f->pool, handle, &error), SP_ERR_STATE);
    assert_string_equal(error.code, "slot-draining");
    assert_int_equal(sp_pool_set_pinned(f->pool, handle, true, NULL), SP_ERR_STATE);
    assert_int_equal(sp_pool_set_awaited(f->pool, handle, true, NULL), SP_ERR_STATE);
    assert_int_equal(sp_pool_drain(f->pool, handle, NULL), SP_BUSY);
    release(f, handle);
    assert_int_equal(state_of(f, 0), SP_SLOT_DRAINING);
    expect_tables(f, 0, f->images[0]);
    release(f, handle);
    assert_int_equal(state_of(f, 0), SP_SLOT_EMPTY);
    expect_tables(f, 0, NULL);
    assert_int_equal(sp_pool_release(f->pool, handle, &error), SP_ERR_STATE);
    assert_string_equal(error.code, "slot-empty");
}

static void pins_hold(void **state)
{
    fixture *f = *state;
    sp_slot_handle handles[SLOTS], more = {-5, 0};
    sp_error error;
    int32_t slot = -5;

    for (int32_t i = 0; i < SLOTS; i++) {
        handles[i] = load(f, i);
        release(f, handles[i]);
        assert_ok(sp_pool_set_pinned(f->pool, handles[i], true, NULL), NULL);
    }
    assert_ok(sp_pool_set_pinned(f->pool, handles[0], true, NULL), NULL); /* twice is once */
    assert_int_equal(sp_pool_drain(f->pool, handles[0], &error), SP_ERR_STATE);
    assert_string_equal(error.code, "pinned");
    assert_int_equal(sp_pool_load(f->pool, f->images[0], &more, &error), SP_ERR_SLOTS_PINNED);
    assert_int_equal(error.status, SP_ERR_SLOTS_PINNED);
    assert_int_equal(sp_pool_load_begin(f->pool, &slot, NULL), SP_ERR_SLOTS_PINNED);
    assert_int_equal(slot, -5);
    assert_int_equal(more.slot, -5);
    for (int32_t i = 0; i < SLOTS; i++)
        expect_tables(f, i, f->images[i]);
    assert_ok(sp_pool_set_pinned(f->pool, handles[1], false, NULL), NULL);
    assert_ok(sp_pool_set_awaited(f->pool, handles[1], true, NULL), NULL);
    assert_int_equal(sp_pool_load(f->pool, f->images[0], &more, &error), SP_POOL_FULL);
    assert_string_equal(error.subject, "max-loras");
    assert_ok(sp_pool_set_awaited(f->pool, handles[1], false, NULL), NULL);
    assert_ok(sp_pool_acquire(f->pool, handles[1], NULL), NULL);
    assert_int_equal(sp_pool_load(f->pool, f->images[0], &more, &error), SP_POOL_FULL);
    release(f, handles[1]);
    assert_int_equal(load(f, 0).slot, 1);
}

static void use_orders_victims(void **state)
{
    fixture *f = *state;
    sp_slot_handle handles[SLOTS];
    int32_t slot;

    for (int32_t i = 0; i < SLOTS; i++) {
        handles[i] = load(f, i);
        release(f, handles[i]);
    }
    assert_ok(sp_pool_acquire(f->pool, handles[0], NULL), NULL);
    release(f, handles[0]);
    sp_pool_touch(f->pool, handles[1]);
    assert_ok(sp_pool_load_begin(f->pool, &slot, NULL), NULL);
    assert_int_equal(slot, 2);          /* 0 was acquired and 1 touched since */
    sp_pool_touch(f->pool, handles[2]); /* nothing uses a LOADING slot */
    sp_pool_touch(f->pool, (sp_slot_handle){-1, 1});
    sp_pool_touch(f->pool, (sp_slot_handle){SLOTS, 1});
    assert_int_equal(info_of(f, 2).last_use, 0);
}

/* ---- what is refused ----------------------------------------------------------------------- */

enum {
    WRITE = 1,
    COMMIT = 2,
    ABORT = 4,
    ACQUIRE = 8,
    RELEASE = 16,
    DRAIN = 32,
    PIN = 64,
    ROUTE = 128,
    EVERY = 255
};

/* The calls that take a version: SP_ERR_STATE with this code. */
static void expect_handle_refused(const fixture *f, sp_slot_handle handle, unsigned calls,
                                  const char *code)
{
    sp_error errors[6];
    int32_t n = 0;

    if (calls & ACQUIRE)
        assert_int_equal(sp_pool_acquire(f->pool, handle, &errors[n++]), SP_ERR_STATE);
    if (calls & RELEASE)
        assert_int_equal(sp_pool_release(f->pool, handle, &errors[n++]), SP_ERR_STATE);
    if (calls & DRAIN)
        assert_int_equal(sp_pool_drain(f->pool, handle, &errors[n++]), SP_ERR_STATE);
    if (calls & PIN) {
        assert_int_equal(sp_pool_set_pinned(f->pool, handle, true, &errors[n++]), SP_ERR_STATE);
        assert_int_equal(sp_pool_set_awaited(f->pool, handle, true, &errors[n++]), SP_ERR_STATE);
    }
    if (calls & ROUTE)
        assert_int_equal(sp_pool_check_handle(f->pool, handle, &errors[n++]), SP_ERR_STATE);
    while (n-- > 0) {
        assert_string_equal(errors[n].code, code);
        assert_int_equal(errors[n].position, handle.slot);
    }
}

/* Calls that must be SP_ERR_STATE for a slot in one of the four states, and change nothing. */
static void expect_refused(const fixture *f, int32_t slot, unsigned calls, const char *code)
{
    sp_slot_info before = info_of(f, slot), after;
    sp_slot_handle handle = {-5, 0};

    if (calls & WRITE)
        assert_int_equal(sp_pool_load_write(f->pool, slot, f->images[0], NULL), SP_ERR_STATE);
    if (calls & COMMIT)
        assert_int_equal(sp_pool_load_commit(f->pool, slot, f->images[0], &handle, NULL),
                         SP_ERR_STATE);
    if (calls & ABORT)
        assert_int_equal(sp_pool_load_abort(f->pool, slot, NULL), SP_ERR_STATE);
    assert_int_equal(handle.slot, -5);
    expect_handle_refused(f, handle_of(f, slot), calls, code);
    after = info_of(f, slot);
    assert_memory_equal(&after, &before, sizeof after);
}

static void every_illegal_transition_is_refused(void **state)
{
    fixture *f = *state;
    sp_slot_handle handle;
    int32_t slot;

    expect_refused(f, 0, EVERY, "slot-empty"); /* never loaded */
    handle = load(f, 0);
    expect_refused(f, 0, WRITE | COMMIT | ABORT, NULL); /* READY, held */
    expect_handle_refused(f, newer(handle), ACQUIRE | RELEASE | DRAIN | PIN | ROUTE,
                          "handle-stale");
    release(f, handle);
    expect_refused(f, 0, RELEASE | ROUTE, "handle-released");
    assert_ok(sp_pool_acquire(f->pool, handle, NULL), NULL);
    assert_int_equal(sp_pool_drain(f->pool, handle, NULL), SP_BUSY);
    expect_refused(f, 0, WRITE | COMMIT | ABORT | ACQUIRE | PIN, "slot-draining");
    release(f, handle);
    expect_refused(f, 0, EVERY, "slot-empty"); /* again */
    assert_ok(sp_pool_load_begin(f->pool, &slot, NULL), NULL);
    assert_int_equal(slot, 0);
    /* LOADING; a commit needs a write. */
    expect_refused(f, 0, COMMIT | ACQUIRE | RELEASE | DRAIN | PIN | ROUTE, "slot-loading");
    assert_ok(sp_pool_load_abort(f->pool, 0, NULL), NULL);
    expect_refused(f, 0, EVERY, "slot-empty");
}

static void a_pool_knows_its_device(void **state)
{
    fixture *f = *state;

    assert_ptr_equal(sp_pool_device(f->pool), f->hand.device);
    assert_ptr_equal(sp_layout_images_for(f->hand.layout), f->hand.device);
    assert_null(f->images[0]->pinned); /* the CPU has no other memory */
}

static void slots_out_of_range_are_refused(void **state)
{
    fixture *f = *state;
    static const int32_t slots[] = {-1, SLOTS, INT32_MAX, INT32_MIN};

    for (size_t i = 0; i < sizeof slots / sizeof slots[0]; i++) {
        sp_slot_info info = {.struct_bytes = sizeof info};
        sp_slot_handle handle = {slots[i], 1}, out;
        sp_error error;

        assert_int_equal(sp_pool_slot_info(f->pool, slots[i], &info, NULL), SP_ERR_ARGUMENT);
        assert_int_equal(sp_pool_load_write(f->pool, slots[i], f->images[0], NULL),
                         SP_ERR_ARGUMENT);
        assert_int_equal(sp_pool_load_commit(f->pool, slots[i], f->images[0], &out, NULL),
                         SP_ERR_ARGUMENT);
        assert_int_equal(sp_pool_load_abort(f->pool, slots[i], NULL), SP_ERR_ARGUMENT);
        assert_int_equal(sp_pool_acquire(f->pool, handle, NULL), SP_ERR_ARGUMENT);
        assert_int_equal(sp_pool_release(f->pool, handle, NULL), SP_ERR_ARGUMENT);
        assert_int_equal(sp_pool_drain(f->pool, handle, NULL), SP_ERR_ARGUMENT);
        assert_int_equal(sp_pool_set_pinned(f->pool, handle, true, NULL), SP_ERR_ARGUMENT);
        assert_int_equal(sp_pool_set_awaited(f->pool, handle, true, NULL), SP_ERR_ARGUMENT);
        assert_int_equal(sp_pool_check_handle(f->pool, handle, &error), SP_ERR_ARGUMENT);
        assert_string_equal(error.code, "slot-out-of-range");
        assert_int_equal(error.position, slots[i]);
    }
}

static void calls_without_a_pool_or_a_place_for_the_answer_are_refused(void **state)
{
    fixture *f = *state;
    sp_slot_info info = {.struct_bytes = 0};
    sp_slot_handle handle = load(f, 0);
    sp_error error;
    int32_t slot;

    assert_int_equal(sp_pool_slot_info(f->pool, 0, &info, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "sp_slot_info");
    assert_int_equal(sp_pool_slot_info(f->pool, 0, NULL, &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_pool_slot_info(NULL, 0, &info, &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_pool_load(NULL, f->images[0], &handle, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_pool_load(f->pool, f->images[0], NULL, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_pool_load_begin(f->pool, NULL, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_pool_acquire(NULL, handle, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_pool_release(NULL, handle, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_pool_find(f->pool, NULL, &handle, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_pool_find(f->pool, &f->images[0]->digest, NULL, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(state_of(f, 1), SP_SLOT_EMPTY); /* nothing was taken for the refused loads */
    assert_ok(sp_pool_load_begin(f->pool, &slot, NULL), NULL);
    assert_ok(sp_pool_load_write(f->pool, slot, f->images[1], NULL), NULL);
    assert_int_equal(sp_pool_load_commit(f->pool, slot, f->images[1], NULL, &error),
                     SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "out_handle");
    assert_int_equal(state_of(f, slot), SP_SLOT_LOADING);
}

/* The caller's struct may be shorter or longer than today's. */
static void a_slots_info_has_the_callers_size(void **state)
{
    fixture *f = *state;
    struct longer {
        sp_slot_info info;
        char more[24];
    } longer;
    sp_slot_info shorter;

    load(f, 0);
    memset(&longer, 0x5a, sizeof longer);
    longer.info.struct_bytes = sizeof longer;
    assert_ok(sp_pool_slot_info(f->pool, 0, &longer.info, NULL), NULL);
    assert_int_equal(longer.info.struct_bytes, sizeof longer);
    assert_int_equal(longer.info.references, 1);
    for (size_t i = 0; i < sizeof longer.more; i++)
        assert_int_equal(longer.more[i], 0);
    memset(&shorter, 0x5a, sizeof shorter);
    shorter.struct_bytes = offsetof(sp_slot_info, generation);
    assert_ok(sp_pool_slot_info(f->pool, 0, &shorter, NULL), NULL);
    assert_int_equal(shorter.state, SP_SLOT_READY);
    assert_int_equal(shorter.references, 1);
    assert_int_equal(shorter.generation, 0x5a5a5a5a5a5a5a5a);
}

static void a_foreign_image_is_refused(void **state)
{
    fixture *f = *state;
    hand_pool other = hand_pool_create(dims, SITES, 64, SP_DTYPE_BF16, 1);
    hand_adapter *adapter = hand_adapter_create(1);
    sp_image *image = hand_pack(&other, adapter);
    sp_error error;
    sp_slot_handle handle;
    int32_t slot;

    load(f, 0);
    assert_int_equal(sp_pool_load(f->pool, image, &handle, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.code, "other-layout");
    assert_int_equal(sp_pool_load(f->pool, NULL, &handle, &error), SP_ERR_ARGUMENT);
    assert_ok(sp_pool_load_begin(f->pool, &slot, NULL), NULL);
    assert_int_equal(sp_pool_load_write(f->pool, slot, image, &error), SP_ERR_ARGUMENT);
    assert_ok(sp_pool_load_write(f->pool, slot, f->images[1], &error), &error);
    assert_int_equal(sp_pool_load_commit(f->pool, slot, image, &handle, NULL), SP_ERR_ARGUMENT);
    /* Not the image that was written. */
    assert_int_equal(sp_pool_load_commit(f->pool, slot, f->images[0], &handle, NULL),
                     SP_ERR_ARGUMENT);
    expect_tables(f, slot, NULL);
    assert_ok(sp_pool_load_commit(f->pool, slot, f->images[1], &handle, NULL), NULL);
    sp_image_destroy(image);
    hand_adapter_destroy(adapter);
    hand_pool_destroy(&other);
}

/* ---- memory -------------------------------------------------------------------------------- */

static void loads_and_unloads_return_to_the_same_bytes(void **state)
{
    fixture *f = *state;
    size_t host = sp_alloc_bytes(), device = sp_device_allocated_bytes(f->hand.device);
    uint64_t last = 0;

    for (int32_t i = 0; i < 1000; i++) {
        sp_slot_handle handle = load(f, i % 3);

        assert_true(handle.generation > last);
        last = handle.generation;
        assert_int_equal(sp_pool_drain(f->pool, handle, NULL), SP_BUSY);
        release(f, handle);
        assert_int_equal(sp_alloc_bytes(), host);
        assert_int_equal(sp_device_allocated_bytes(f->hand.device), device);
    }
}

static void create_and_destroy_return_to_the_same_bytes(void **state)
{
    fixture *f = *state;
    size_t host = sp_alloc_bytes(), device = sp_device_allocated_bytes(f->hand.device);
    sp_pool_options options;
    sp_pool *pool = NULL;
    sp_error error;
    int64_t n = 0;

    sp_pool_options_default(&options, sizeof options);
    options.layout = f->hand.layout;
    options.device = f->hand.device;
    options.slots = 5;
    for (;; n++) {
        sp_alloc_fail_after(n);
        if (sp_pool_create(&options, &pool, &error) == SP_OK)
            break;
        assert_true(sp_alloc_failed());
        assert_int_equal(error.status, SP_ERR_MEMORY);
        assert_null(pool);
        assert_int_equal(sp_alloc_bytes(), host);
        assert_int_equal(sp_device_allocated_bytes(f->hand.device), device);
    }
    sp_alloc_fail_after(-1);
    assert_true(n >= 5); /* pool, slots, contents, memory, tables */
    /* 5 slots of 4 regions (A 96, B 80 bytes each, on 256), 5 × 2 cells of 24 bytes, and
     * 5 generations. */
    assert_int_equal(sp_pool_device_bytes(pool), 5 * 4 * 256 + 5 * 2 * 24 + 5 * 8);
    assert_true(sp_device_allocated_bytes(f->hand.device) - device >= sp_pool_device_bytes(pool));
    sp_pool_destroy(pool);
    sp_pool_destroy(NULL);
    assert_int_equal(sp_alloc_bytes(), host);
    assert_int_equal(sp_device_allocated_bytes(f->hand.device), device);
}

static void expect_too_large(const sp_error *error, const char *numbers)
{
    assert_int_equal(error->status, SP_ERR_MEMORY);
    assert_string_equal(error->subject, "max-loras");
    assert_non_null(strstr(error->text, numbers));
    assert_non_null(strstr(error->text, "max-lora-rank"));
}

static void a_pool_that_is_too_large_says_what_to_lower(void **state)
{
    enum { LAYERS = 8192 };
    fixture *f = *state;
    site_dims *wide = calloc(LAYERS, sizeof *wide);
    sp_layout_options layout_options;
    sp_geometry *geometry = NULL;
    sp_pool_options options;
    sp_pool *pool = NULL;
    sp_error error;

    assert_non_null(wide);
    sp_pool_options_default(&options, sizeof options);
    options.layout = f->hand.layout;
    options.device = f->hand.device;
    options.slots = 1024;
    /* The slots' memory is one of the first allocations; it fails as no other does. */
    error.subject[0] = '\0';
    for (int64_t n = 0; n < 16 && error.subject[0] == '\0'; n++) {
        sp_alloc_fail_after(n);
        assert_int_equal(sp_pool_create(&options, &pool, &error), SP_ERR_MEMORY);
    }
    sp_alloc_fail_after(-1);
    expect_too_large(&error, "1024 slots of 0.0 MiB");

    /* 8192 × 4096 × (2^31 - 1) × 2 × 2 bytes, 2^58 a slot: 4096 of them are beyond 2^64. */
    for (int32_t layer = 0; layer < LAYERS; layer++)
        wide[layer] = (site_dims){layer, SP_MODULE_Q_PROJ, INT32_MAX, INT32_MAX};
    geometry = known_geometry(0, wide, LAYERS);
    sp_layout_options_default(&layout_options, sizeof layout_options);
    layout_options.geometry = geometry;
    layout_options.rank = SP_POOL_RANK_MAX;
    assert_ok(sp_layout_create(&layout_options, &options.layout, &error), &error);
    options.slots = 4096;
    assert_int_equal(sp_pool_create(&options, &pool, &error), SP_ERR_MEMORY);
    expect_too_large(&error, "4096 slots of 274877906816.0 MiB"); /* 2^38 less 128 */
    assert_null(pool);
    sp_layout_release(options.layout);
    sp_geometry_release(geometry);
    free(wide);
}

static void bad_pool_options_are_refused(void **state)
{
    fixture *f = *state;
    sp_pool_options options;
    sp_pool *pool = NULL;

    sp_pool_options_default(&options, sizeof options);
    assert_int_equal(sp_pool_create(&options, &pool, NULL), SP_ERR_ARGUMENT);
    options.layout = f->hand.layout;
    assert_int_equal(sp_pool_create(&options, &pool, NULL), SP_ERR_ARGUMENT);
    options.device = f->hand.device;
    options.slots = 4097;
    assert_int_equal(sp_pool_create(&options, &pool, NULL), SP_ERR_ARGUMENT);
    options.slots = 0;
    assert_int_equal(sp_pool_create(&options, &pool, NULL), SP_ERR_ARGUMENT);
    options.slots = 1;
    options.struct_bytes = 0;
    assert_int_equal(sp_pool_create(&options, &pool, NULL), SP_ERR_ARGUMENT);
    assert_null(pool);
}

#define WITH_POOL(test) cmocka_unit_test_setup_teardown(test, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WITH_POOL(everything_starts_empty),
        WITH_POOL(a_load_becomes_visible_by_its_commit),
        WITH_POOL(a_loaded_version_is_held),
        WITH_POOL(a_released_version_can_be_had_again),
        WITH_POOL(handles_of_another_pool_are_stale),
        WITH_POOL(changes_tell_when_a_handle_may_have_ended),
        WITH_POOL(table_addresses_never_change),
        WITH_POOL(a_victim_leaves_the_tables_before_it_is_overwritten),
        WITH_POOL(a_slot_holds_exactly_its_image),
        WITH_POOL(an_aborted_load_leaves_nothing),
        WITH_POOL(a_reference_is_to_a_version),
        WITH_POOL(a_draining_slot_serves_to_its_last_reference),
        WITH_POOL(pins_hold),
        WITH_POOL(use_orders_victims),
        WITH_POOL(every_illegal_transition_is_refused),
        WITH_POOL(a_pool_knows_its_device),
        WITH_POOL(slots_out_of_range_are_refused),
        WITH_POOL(calls_without_a_pool_or_a_place_for_the_answer_are_refused),
        WITH_POOL(a_slots_info_has_the_callers_size),
        WITH_POOL(a_foreign_image_is_refused),
        WITH_POOL(loads_and_unloads_return_to_the_same_bytes),
        WITH_POOL(create_and_destroy_return_to_the_same_bytes),
        WITH_POOL(a_pool_that_is_too_large_says_what_to_lower),
        WITH_POOL(bad_pool_options_are_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
