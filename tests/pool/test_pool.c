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

static const sp_site_dims dims[SITES] = {
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

    f.hand = hand_pool_create(2, dims, SITES, 8, SP_DTYPE_BF16, SLOTS);
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
    sp_slot_info info;

    assert_ok(sp_pool_slot_info(f->pool, slot, &info), NULL);
    return info;
}

static sp_slot_state state_of(const fixture *f, int32_t slot)
{
    return info_of(f, slot).state;
}

/* Loads image i; returns its slot and generation. */
static int32_t load(const fixture *f, int32_t i, uint64_t *out_generation)
{
    int32_t slot = -1;
    sp_error error;

    assert_ok(sp_pool_load(f->pool, f->images[i], &slot, out_generation, &error), &error);
    return slot;
}

/* The slot's cells of every table show this image, or nothing (NULL). */
static void expect_tables(const fixture *f, int32_t slot, const sp_image *image)
{
    for (int32_t site = 0; site < SITES; site++) {
        const sp_layout_site *place = sp_layout_site_at(f->hand.layout, site);
        size_t a_bytes = 8 * 6 * 2, b_bytes = 5 * 8 * 2;
        sp_pool_tables tables;

        assert_ok(sp_pool_tables_at(f->pool, site, &tables), NULL);
        if (image == NULL || image->ranks[site] == 0) {
            assert_null(tables.a[slot]);
            assert_null(tables.b[slot]);
            assert_int_equal(tables.rank[slot], 0);
            assert_true(tables.scale[slot] == 0.0f);
            continue;
        }
        assert_int_equal(tables.rank[slot], image->ranks[site]);
        assert_true(tables.scale[slot] == image->scales[site]);
        assert_memory_equal(tables.a[slot], (char *)image->data + place->a_offset_bytes, a_bytes);
        assert_memory_equal(tables.b[slot], (char *)image->data + place->b_offset_bytes, b_bytes);
    }
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
    assert_int_equal(sp_pool_find(f->pool, &f->images[0]->digest), -1);
}

static void a_load_becomes_visible_by_its_commit(void **state)
{
    fixture *f = *state;
    uint64_t generation = 77;
    sp_error error;
    int32_t slot = -1;

    assert_ok(sp_pool_load_begin(f->pool, &slot), NULL);
    assert_int_equal(slot, 0);
    assert_int_equal(state_of(f, 0), SP_SLOT_LOADING);
    assert_ok(sp_pool_load_write(f->pool, 0, f->images[0], &error), &error);
    expect_tables(f, 0, NULL);
    assert_int_equal(sp_pool_find(f->pool, &f->images[0]->digest), -1);
    assert_ok(sp_pool_load_commit(f->pool, 0, f->images[0], &generation), NULL);
    assert_int_equal(generation, 1);
    assert_int_equal(state_of(f, 0), SP_SLOT_READY);
    assert_int_equal(info_of(f, 0).generation, 1);
    expect_tables(f, 0, f->images[0]);
    assert_int_equal(sp_pool_find(f->pool, &f->images[0]->digest), 0);
    assert_int_equal(sp_pool_find(f->pool, &f->images[1]->digest), -1);
    assert_int_equal(load(f, 1, &generation), 1);
    assert_int_equal(generation, 2);
    expect_tables(f, 1, f->images[1]);
    expect_tables(f, 0, f->images[0]);
    expect_tables(f, 2, NULL);
}

static void table_addresses_never_change(void **state)
{
    fixture *f = *state;
    sp_pool_tables before[SITES], after;

    for (int32_t site = 0; site < SITES; site++)
        assert_ok(sp_pool_tables_at(f->pool, site, &before[site]), NULL);
    for (int32_t i = 0; i < 3 * SLOTS; i++)
        load(f, i % 3, NULL);
    for (int32_t site = 0; site < SITES; site++) {
        assert_ok(sp_pool_tables_at(f->pool, site, &after), NULL);
        assert_memory_equal(&after, &before[site], sizeof after);
    }
    assert_int_equal(sp_pool_tables_at(f->pool, -1, &after), SP_ERR_ARGUMENT);
    assert_int_equal(sp_pool_tables_at(f->pool, SITES, &after), SP_ERR_ARGUMENT);
}

static void a_victim_leaves_the_tables_before_it_is_overwritten(void **state)
{
    fixture *f = *state;
    sp_error error;
    int32_t slot = -1;

    for (int32_t i = 0; i < SLOTS; i++)
        load(f, 0, NULL);
    sp_pool_touch(f->pool, 0); /* slot 1 is now the least recently used */
    assert_ok(sp_pool_load_begin(f->pool, &slot), NULL);
    assert_int_equal(slot, 1);
    expect_tables(f, 1, NULL);
    assert_int_equal(state_of(f, 1), SP_SLOT_LOADING);
    assert_ok(sp_pool_load_write(f->pool, 1, f->images[1], &error), &error);
    assert_ok(sp_pool_load_commit(f->pool, 1, f->images[1], NULL), NULL);
    expect_tables(f, 1, f->images[1]);
}

/* What the new adapter lacks is zero in the slot, whatever lay there before. */
static void a_slot_holds_exactly_its_image(void **state)
{
    fixture *f = *state;
    size_t bytes = sp_layout_slot_bytes(f->hand.layout);
    sp_pool_tables tables;
    const char *memory;

    load(f, 0, NULL);
    assert_ok(sp_pool_tables_at(f->pool, 0, &tables), NULL);
    memory = tables.a[0]; /* site 0's A is the slot's first byte */
    assert_memory_equal(memory, f->images[0]->data, bytes);
    assert_int_equal(sp_pool_drain(f->pool, 0), SP_OK);
    assert_int_equal(load(f, 2, NULL), 0);
    for (size_t i = 0; i < bytes; i++)
        assert_int_equal(memory[i], 0);
    assert_int_equal(sp_pool_drain(f->pool, 0), SP_OK);
    assert_int_equal(load(f, 0, NULL), 0);
    assert_memory_equal(memory, f->images[0]->data, bytes);
}

static void an_aborted_load_leaves_nothing(void **state)
{
    fixture *f = *state;
    size_t bytes = sp_layout_slot_bytes(f->hand.layout);
    sp_pool_tables tables;
    const char *memory;
    sp_error error;
    int32_t slot;

    load(f, 0, NULL);
    assert_ok(sp_pool_tables_at(f->pool, 0, &tables), NULL);
    memory = tables.a[0];
    assert_int_equal(sp_pool_drain(f->pool, 0), SP_OK);
    assert_ok(sp_pool_load_begin(f->pool, &slot), NULL);
    assert_int_equal(slot, 0);
    assert_ok(sp_pool_load_write(f->pool, 0, f->images[1], &error), &error);
    assert_ok(sp_pool_load_abort(f->pool, 0), NULL);
    assert_int_equal(state_of(f, 0), SP_SLOT_EMPTY);
    expect_tables(f, 0, NULL);
    for (size_t i = 0; i < bytes; i++)
        assert_int_equal(memory[i], 0);
}

/* ---- versions and draining ----------------------------------------------------------------- */

static void a_reference_is_to_a_version(void **state)
{
    fixture *f = *state;
    uint64_t first, second;

    assert_int_equal(load(f, 0, &first), 0);
    assert_int_equal(sp_pool_acquire(f->pool, 0, first + 1), SP_ERR_STATE);
    assert_ok(sp_pool_acquire(f->pool, 0, first), NULL);
    assert_ok(sp_pool_acquire(f->pool, 0, first), NULL);
    assert_int_equal(info_of(f, 0).references, 2);
    assert_int_equal(sp_pool_release(f->pool, 0, first + 1), SP_ERR_STATE);
    assert_ok(sp_pool_release(f->pool, 0, first), NULL);
    assert_ok(sp_pool_release(f->pool, 0, first), NULL);
    assert_int_equal(sp_pool_release(f->pool, 0, first), SP_ERR_STATE);
    assert_int_equal(sp_pool_drain(f->pool, 0), SP_OK);
    assert_int_equal(load(f, 0, &second), 0);
    assert_true(second > first);
    assert_int_equal(sp_pool_acquire(f->pool, 0, first), SP_ERR_STATE);
    assert_ok(sp_pool_acquire(f->pool, 0, second), NULL);
    assert_int_equal(sp_pool_release(f->pool, 0, first), SP_ERR_STATE);
    assert_ok(sp_pool_release(f->pool, 0, second), NULL);
}

static void a_draining_slot_serves_to_its_last_reference(void **state)
{
    fixture *f = *state;
    uint64_t generation;

    assert_int_equal(load(f, 0, &generation), 0);
    assert_ok(sp_pool_acquire(f->pool, 0, generation), NULL);
    assert_ok(sp_pool_acquire(f->pool, 0, generation), NULL);
    assert_ok(sp_pool_set_awaited(f->pool, 0, true), NULL);
    assert_int_equal(sp_pool_drain(f->pool, 0), SP_BUSY);
    assert_int_equal(state_of(f, 0), SP_SLOT_DRAINING);
    assert_false(info_of(f, 0).awaited);
    expect_tables(f, 0, f->images[0]); /* its requests still run */
    assert_int_equal(sp_pool_find(f->pool, &f->images[0]->digest), -1);
    assert_int_equal(sp_pool_acquire(f->pool, 0, generation), SP_ERR_STATE);
    assert_int_equal(sp_pool_set_pinned(f->pool, 0, true), SP_ERR_STATE);
    assert_int_equal(sp_pool_set_awaited(f->pool, 0, true), SP_ERR_STATE);
    assert_int_equal(sp_pool_drain(f->pool, 0), SP_BUSY);
    assert_ok(sp_pool_release(f->pool, 0, generation), NULL);
    assert_int_equal(state_of(f, 0), SP_SLOT_DRAINING);
    expect_tables(f, 0, f->images[0]);
    assert_ok(sp_pool_release(f->pool, 0, generation), NULL);
    assert_int_equal(state_of(f, 0), SP_SLOT_EMPTY);
    expect_tables(f, 0, NULL);
    assert_int_equal(sp_pool_release(f->pool, 0, generation), SP_ERR_STATE);
}

static void pins_hold(void **state)
{
    fixture *f = *state;
    uint64_t generation;
    sp_error error;
    int32_t slot = -5;

    for (int32_t i = 0; i < SLOTS; i++)
        assert_int_equal(load(f, i, &generation), i);
    for (int32_t i = 0; i < SLOTS; i++)
        assert_ok(sp_pool_set_pinned(f->pool, i, true), NULL);
    assert_ok(sp_pool_set_pinned(f->pool, 0, true), NULL); /* twice is once */
    assert_int_equal(sp_pool_drain(f->pool, 0), SP_ERR_STATE);
    assert_int_equal(sp_pool_load(f->pool, f->images[0], &slot, NULL, &error), SP_ERR_SLOTS_PINNED);
    assert_int_equal(error.status, SP_ERR_SLOTS_PINNED);
    assert_int_equal(sp_pool_load_begin(f->pool, &slot), SP_ERR_SLOTS_PINNED);
    assert_int_equal(slot, -5);
    for (int32_t i = 0; i < SLOTS; i++)
        expect_tables(f, i, f->images[i]);
    assert_ok(sp_pool_set_pinned(f->pool, 1, false), NULL);
    assert_ok(sp_pool_set_awaited(f->pool, 1, true), NULL);
    assert_int_equal(sp_pool_load(f->pool, f->images[0], &slot, NULL, &error), SP_POOL_FULL);
    assert_string_equal(error.subject, "--max-loras");
    assert_ok(sp_pool_set_awaited(f->pool, 1, false), NULL);
    assert_ok(sp_pool_acquire(f->pool, 1, 2), NULL);
    assert_int_equal(sp_pool_load(f->pool, f->images[0], &slot, NULL, &error), SP_POOL_FULL);
    assert_ok(sp_pool_release(f->pool, 1, 2), NULL);
    assert_int_equal(load(f, 0, NULL), 1);
}

static void awaited_may_be_set_while_loading(void **state)
{
    fixture *f = *state;
    sp_error error;
    int32_t slot;

    assert_ok(sp_pool_load_begin(f->pool, &slot), NULL);
    assert_ok(sp_pool_set_awaited(f->pool, slot, true), NULL);
    assert_ok(sp_pool_load_write(f->pool, slot, f->images[0], &error), &error);
    assert_ok(sp_pool_load_commit(f->pool, slot, f->images[0], NULL), NULL);
    assert_true(info_of(f, slot).awaited);
}

static void use_orders_victims(void **state)
{
    fixture *f = *state;
    uint64_t generation[SLOTS];
    int32_t slot;

    for (int32_t i = 0; i < SLOTS; i++)
        assert_int_equal(load(f, i, &generation[i]), i);
    assert_ok(sp_pool_acquire(f->pool, 0, generation[0]), NULL);
    assert_ok(sp_pool_release(f->pool, 0, generation[0]), NULL);
    sp_pool_touch(f->pool, 1);
    assert_ok(sp_pool_load_begin(f->pool, &slot), NULL);
    assert_int_equal(slot, 2); /* 0 was acquired and 1 touched since */
    sp_pool_touch(f->pool, 2); /* nothing uses a LOADING slot */
    sp_pool_touch(f->pool, -1);
    sp_pool_touch(f->pool, SLOTS);
    assert_int_equal(info_of(f, 2).last_use, 0);
}

/* ---- what is refused ----------------------------------------------------------------------- */

/* Calls that must be SP_ERR_STATE for a slot in one of the four states, and change nothing. */
static void expect_refused(const fixture *f, int32_t slot, unsigned calls)
{
    enum { WRITE = 1, COMMIT = 2, ABORT = 4, ACQUIRE = 8, RELEASE = 16, DRAIN = 32, PIN = 64 };
    sp_slot_info before = info_of(f, slot), after;

    if (calls & WRITE)
        assert_int_equal(sp_pool_load_write(f->pool, slot, f->images[0], NULL), SP_ERR_STATE);
    if (calls & COMMIT)
        assert_int_equal(sp_pool_load_commit(f->pool, slot, f->images[0], NULL), SP_ERR_STATE);
    if (calls & ABORT)
        assert_int_equal(sp_pool_load_abort(f->pool, slot), SP_ERR_STATE);
    if (calls & ACQUIRE)
        assert_int_equal(sp_pool_acquire(f->pool, slot, before.generation), SP_ERR_STATE);
    if (calls & RELEASE)
        assert_int_equal(sp_pool_release(f->pool, slot, before.generation), SP_ERR_STATE);
    if (calls & DRAIN)
        assert_int_equal(sp_pool_drain(f->pool, slot), SP_ERR_STATE);
    if (calls & PIN) {
        assert_int_equal(sp_pool_set_pinned(f->pool, slot, true), SP_ERR_STATE);
        assert_int_equal(sp_pool_set_pinned(f->pool, slot, false), SP_ERR_STATE);
    }
    after = info_of(f, slot);
    assert_int_equal(after.state, before.state);
    assert_int_equal(after.references, before.references);
    assert_int_equal(after.generation, before.generation);
    assert_int_equal(after.last_use, before.last_use);
    assert_int_equal(after.pinned, before.pinned);
}

static void every_illegal_transition_is_refused(void **state)
{
    fixture *f = *state;
    uint64_t generation;
    int32_t slot;

    expect_refused(f, 0, 1 | 2 | 4 | 8 | 16 | 32 | 64); /* EMPTY, never loaded */
    assert_int_equal(sp_pool_set_awaited(f->pool, 0, true), SP_ERR_STATE);
    load(f, 0, &generation);
    expect_refused(f, 0, 1 | 2 | 4 | 16); /* READY */
    assert_ok(sp_pool_acquire(f->pool, 0, generation), NULL);
    assert_int_equal(sp_pool_drain(f->pool, 0), SP_BUSY);
    expect_refused(f, 0, 1 | 2 | 4 | 8 | 64); /* DRAINING */
    assert_ok(sp_pool_release(f->pool, 0, generation), NULL);
    expect_refused(f, 0, 1 | 2 | 4 | 8 | 16 | 32 | 64); /* EMPTY again */
    assert_ok(sp_pool_load_begin(f->pool, &slot), NULL);
    assert_int_equal(slot, 0);
    expect_refused(f, 0, 2 | 8 | 16 | 32 | 64); /* LOADING; a commit needs a write */
    assert_ok(sp_pool_load_abort(f->pool, 0), NULL);
    expect_refused(f, 0, 1 | 2 | 4 | 8 | 16 | 32 | 64);
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
        sp_slot_info info;

        assert_int_equal(sp_pool_slot_info(f->pool, slots[i], &info), SP_ERR_ARGUMENT);
        assert_int_equal(sp_pool_load_write(f->pool, slots[i], f->images[0], NULL),
                         SP_ERR_ARGUMENT);
        assert_int_equal(sp_pool_load_commit(f->pool, slots[i], f->images[0], NULL),
                         SP_ERR_ARGUMENT);
        assert_int_equal(sp_pool_load_abort(f->pool, slots[i]), SP_ERR_ARGUMENT);
        assert_int_equal(sp_pool_acquire(f->pool, slots[i], 0), SP_ERR_ARGUMENT);
        assert_int_equal(sp_pool_release(f->pool, slots[i], 0), SP_ERR_ARGUMENT);
        assert_int_equal(sp_pool_drain(f->pool, slots[i]), SP_ERR_ARGUMENT);
        assert_int_equal(sp_pool_set_pinned(f->pool, slots[i], true), SP_ERR_ARGUMENT);
        assert_int_equal(sp_pool_set_awaited(f->pool, slots[i], true), SP_ERR_ARGUMENT);
    }
}

static void a_foreign_image_is_refused(void **state)
{
    fixture *f = *state;
    hand_pool other = hand_pool_create(2, dims, SITES, 64, SP_DTYPE_BF16, 1);
    hand_adapter *adapter = hand_adapter_create(1);
    sp_image *image = hand_pack(&other, adapter);
    sp_error error;
    int32_t slot;

    load(f, 0, NULL);
    assert_int_equal(sp_pool_load(f->pool, image, &slot, NULL, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.code, "other-layout");
    assert_int_equal(sp_pool_load(f->pool, NULL, &slot, NULL, &error), SP_ERR_ARGUMENT);
    assert_ok(sp_pool_load_begin(f->pool, &slot), NULL);
    assert_int_equal(sp_pool_load_write(f->pool, slot, image, &error), SP_ERR_ARGUMENT);
    assert_ok(sp_pool_load_write(f->pool, slot, f->images[1], &error), &error);
    assert_int_equal(sp_pool_load_commit(f->pool, slot, image, NULL), SP_ERR_ARGUMENT);
    /* Not the image that was written. */
    assert_int_equal(sp_pool_load_commit(f->pool, slot, f->images[0], NULL), SP_ERR_ARGUMENT);
    expect_tables(f, slot, NULL);
    assert_ok(sp_pool_load_commit(f->pool, slot, f->images[1], NULL), NULL);
    sp_image_destroy(image);
    hand_adapter_destroy(adapter);
    hand_pool_destroy(&other);
}

/* ---- memory -------------------------------------------------------------------------------- */

static void loads_and_unloads_return_to_the_same_bytes(void **state)
{
    fixture *f = *state;
    size_t host = sp_alloc_bytes(), device = sp_device_allocated_bytes(f->hand.device);
    uint64_t generation, last = 0;

    for (int32_t i = 0; i < 1000; i++) {
        int32_t slot = load(f, i % 3, &generation);

        assert_true(generation > last);
        last = generation;
        assert_ok(sp_pool_acquire(f->pool, slot, generation), NULL);
        assert_int_equal(sp_pool_drain(f->pool, slot), SP_BUSY);
        assert_ok(sp_pool_release(f->pool, slot, generation), NULL);
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
    /* 5 slots of 4 regions (A 96, B 80 bytes each, on 256), and 5 × 2 cells of 24 bytes. */
    assert_int_equal(sp_pool_device_bytes(pool), 5 * 4 * 256 + 5 * 2 * 24);
    assert_true(sp_device_allocated_bytes(f->hand.device) - device >= sp_pool_device_bytes(pool));
    sp_pool_destroy(pool);
    sp_pool_destroy(NULL);
    assert_int_equal(sp_alloc_bytes(), host);
    assert_int_equal(sp_device_allocated_bytes(f->hand.device), device);
}

static void expect_too_large(const sp_error *error, const char *numbers)
{
    assert_int_equal(error->status, SP_ERR_MEMORY);
    assert_string_equal(error->subject, "--max-loras");
    assert_non_null(strstr(error->text, numbers));
    assert_non_null(strstr(error->text, "--max-lora-rank"));
}

static void a_pool_that_is_too_large_says_what_to_lower(void **state)
{
    enum { LAYERS = 8192 };
    fixture *f = *state;
    sp_site_dims *wide = calloc(LAYERS, sizeof *wide);
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
    for (int64_t n = 0; n < 8 && error.subject[0] == '\0'; n++) {
        sp_alloc_fail_after(n);
        assert_int_equal(sp_pool_create(&options, &pool, &error), SP_ERR_MEMORY);
    }
    sp_alloc_fail_after(-1);
    expect_too_large(&error, "1024 slots of 0.0 MiB");

    /* 8192 × 4096 × (2^31 - 1) × 2 × 2 bytes, 2^58 a slot: 4096 of them are beyond 2^64. */
    for (int32_t layer = 0; layer < LAYERS; layer++)
        wide[layer] = (sp_site_dims){layer, SP_MODULE_Q_PROJ, INT32_MAX, INT32_MAX};
    assert_ok(sp_geometry_create(LAYERS, 0, wide, LAYERS, &geometry, &error), &error);
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
        WITH_POOL(table_addresses_never_change),
        WITH_POOL(a_victim_leaves_the_tables_before_it_is_overwritten),
        WITH_POOL(a_slot_holds_exactly_its_image),
        WITH_POOL(an_aborted_load_leaves_nothing),
        WITH_POOL(a_reference_is_to_a_version),
        WITH_POOL(a_draining_slot_serves_to_its_last_reference),
        WITH_POOL(pins_hold),
        WITH_POOL(awaited_may_be_set_while_loading),
        WITH_POOL(use_orders_victims),
        WITH_POOL(every_illegal_transition_is_refused),
        WITH_POOL(a_pool_knows_its_device),
        WITH_POOL(slots_out_of_range_are_refused),
        WITH_POOL(a_foreign_image_is_refused),
        WITH_POOL(loads_and_unloads_return_to_the_same_bytes),
        WITH_POOL(create_and_destroy_return_to_the_same_bytes),
        WITH_POOL(a_pool_that_is_too_large_says_what_to_lower),
        WITH_POOL(bad_pool_options_are_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
