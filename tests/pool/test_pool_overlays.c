/*
 * test_pool_overlays.c: the pool's second memory through the life of slots: room, victims, tables,
 * versions, and what a failure leaves behind.
 */
#include "base/alloc.h"
#include "base/half.h"
#include "pool/image.h"
#include "pool/overlay.h"
#include "support/faulty_device.h"
#include "support/hand.h"

#include <string.h>

#define VOCAB  64
#define HIDDEN 128
#define SLOTS  4
#define UNIT   ((size_t)768) /* one replaced row: rows, map and ids, 256 bytes each */

static const site_dims sites[] = {
    {-1, SP_MODULE_EMBED_TOKENS, VOCAB, HIDDEN},
    {-1, SP_MODULE_LM_HEAD, HIDDEN, VOCAB},
    {0, SP_MODULE_Q_PROJ, HIDDEN, 8},
};

typedef struct world {
    sp_geometry *geometry;
    sp_layout *layout;
    sp_device *device;
    sp_pool *pool;
    sp_served_table table;
    uint16_t served[VOCAB * HIDDEN];
} world;

static world *world_create(size_t budget)
{
    world *w = sp_calloc(1, sizeof *w);
    sp_layout_options layout_options;
    sp_pool_options pool_options;
    sp_error error;

    assert_non_null(w);
    w->geometry = known_geometry(0, sites, 3);
    sp_layout_options_default(&layout_options, sizeof layout_options);
    layout_options.geometry = w->geometry;
    layout_options.rank = 8;
    w->table = (sp_served_table){sizeof w->table, w->served, SP_DTYPE_BF16, VOCAB, HIDDEN, false};
    layout_options.served_embed = &w->table;
    assert_ok(sp_layout_create(&layout_options, &w->layout, &error), &error);
    assert_ok(sp_device_open("cpu", NULL, &w->device, NULL), NULL);
    sp_pool_options_default(&pool_options, sizeof pool_options);
    pool_options.layout = w->layout;
    pool_options.device = w->device;
    pool_options.slots = SLOTS;
    pool_options.overlay_bytes = budget;
    assert_ok(sp_pool_create(&pool_options, &w->pool, &error), &error);
    return w;
}

static void world_destroy(world *w)
{
    sp_pool_destroy(w->pool);
    assert_int_equal(sp_device_allocated_bytes(w->device), 0);
    sp_device_close(w->device);
    sp_layout_release(w->layout);
    sp_geometry_release(w->geometry);
    sp_free(w);
}

/* An image of `n` replaced rows, tokens 0 .. n, all of whose elements are `value`; n 0: none. */
static sp_image *make_image(const world *w, int32_t n, float value)
{
    const site_dims dims = sites[2];
    sp_test_random random = {(uint64_t)value};
    hand_adapter *adapter = hand_adapter_create((uint64_t)value);
    float *rows = sp_calloc((size_t)n * HIDDEN + 1, sizeof *rows);
    int32_t ids[VOCAB];
    sp_adapter_table table = {.kind = SP_SITE_EMBEDDING, .token_ids = ids, .n_ids = n};
    hand_pool pool = {w->geometry, w->layout, w->device, w->pool, true};
    sp_image *image;
    sp_error error;

    for (int32_t i = 0; i < n * HIDDEN; i++)
        rows[i] = value;
    for (int32_t i = 0; i < n; i++)
        ids[i] = i;
    table.trainable = (sp_factor){rows, SP_DTYPE_F32, n, HIDDEN, HIDDEN, 1};
    hand_adapter_add(adapter, &dims, 8, 1.0f, SP_DTYPE_F32, &random);
    image = hand_pack(&pool, adapter);
    if (n > 0) {
        assert_ok(
            sp_overlay_build(&table, 1, &w->table, NULL, SP_DTYPE_BF16, &image->overlay, &error),
            &error);
        image->bytes += sizeof *image->overlay + image->overlay->bytes;
    }
    sp_free(rows);
    hand_adapter_destroy(adapter);
    return image;
}

/* The version, held. */
static sp_slot_handle load(world *w, int32_t n, float value)
{
    sp_image *image = make_image(w, n, value);
    sp_slot_handle handle = {-1, 0};
    sp_error error;

    assert_ok(sp_pool_load(w->pool, image, &handle, &error), &error);
    sp_image_destroy(image);
    return handle;
}

/* The slot; nobody holds it. */
static int32_t load_idle(world *w, int32_t n, float value)
{
    sp_slot_handle handle = load(w, n, value);

    assert_ok(sp_pool_release(w->pool, handle, NULL), NULL);
    return handle.slot;
}

static sp_status try_load(world *w, int32_t n, float value, sp_error *error)
{
    sp_image *image = make_image(w, n, value);
    sp_slot_handle handle = {-1, 0};
    sp_status status = sp_pool_load(w->pool, image, &handle, error);

    if (status == SP_OK)
        assert_ok(sp_pool_release(w->pool, handle, NULL), NULL);
    else
        assert_int_equal(handle.slot, -1);
    sp_image_destroy(image);
    return status;
}

static void check_shown(const world *w, int32_t slot, int32_t n, float value)
{
    const sp_pool_overlays *tables = sp_pool_overlays_of(w->pool, SP_SITE_EMBEDDING);
    const uint16_t *rows = tables->rows[slot];

    assert_int_equal(tables->n[slot], n);
    assert_int_equal(sp_pool_overlays_of(w->pool, SP_SITE_HEAD)->n[slot], 0);
    if (n == 0) {
        assert_null(rows);
        assert_null(tables->map[slot]);
        assert_null(tables->ids[slot]);
        return;
    }
    for (int32_t i = 0; i < n * HIDDEN; i++)
        assert_true(sp_bf16_to_f32(rows[i]) == value);
    for (int32_t i = 0; i < VOCAB; i++)
        assert_int_equal(tables->map[slot][i], i < n ? i : -1);
    assert_int_equal(tables->row_type[slot], SP_DTYPE_BF16);
}

static sp_slot_state state_of(const world *w, int32_t slot)
{
    return hand_slot_info(w->pool, slot).state;
}

static void loads_show_and_unloads_hide(void **state)
{
    world *w = world_create(4 * UNIT);
    sp_slot_handle a;
    int32_t b, plain;
    size_t bytes = sp_device_allocated_bytes(w->device);

    (void)state;
    a = load(w, 1, 3.0f);
    plain = load_idle(w, 0, 4.0f);
    b = load_idle(w, 2, 5.0f);
    check_shown(w, a.slot, 1, 3.0f);
    check_shown(w, plain, 0, 0);
    check_shown(w, b, 2, 5.0f);
    assert_int_equal(sp_pool_overlays_of(w->pool, SP_SITE_EMBEDDING)->n_slots, 2);
    assert_int_equal(sp_pool_drain(w->pool, a, NULL), SP_BUSY);
    check_shown(w, a.slot, 1, 3.0f); /* who holds it finishes on it */
    assert_ok(sp_pool_release(w->pool, a, NULL), NULL);
    check_shown(w, a.slot, 0, 0);
    assert_ok(sp_pool_drain(w->pool, hand_handle(w->pool, b), NULL), NULL);
    check_shown(w, b, 0, 0);
    assert_int_equal(sp_pool_overlays_of(w->pool, SP_SITE_EMBEDDING)->n_slots, 0);
    assert_int_equal(sp_device_allocated_bytes(w->device), bytes);
    world_destroy(w);
}

static void too_large_is_refused_by_name(void **state)
{
    world *w = world_create(UNIT);
    sp_error error = {0};

    (void)state;
    assert_int_equal(try_load(w, 2, 1.0f, &error), SP_ERR_TOO_LARGE);
    assert_string_equal(error.code, "overlay-too-large");
    assert_string_equal(error.subject, "overlay-bytes");
    for (int32_t i = 0; i < SLOTS; i++)
        assert_int_equal(state_of(w, i), SP_SLOT_EMPTY);
    world_destroy(w);
    w = world_create(0);
    assert_int_equal(try_load(w, 1, 1.0f, &error), SP_ERR_TOO_LARGE);
    assert_null(sp_pool_overlays_of(w->pool, SP_SITE_EMBEDDING)->n);
    load(w, 0, 1.0f);
    world_destroy(w);
}

/* Room is made of idle slots only, the oldest first, and of no more than is needed. */
static void room_comes_from_idle_slots(void **state)
{
    size_t two_rows = 256 + 512; /* 2 rows are 512 bytes; map and ids 256 each */
    world *w = world_create(UNIT + 2 * (two_rows + 256));
    sp_slot_handle a;
    int32_t b, c;
    sp_error error = {0};

    (void)state;
    a = load(w, 1, 1.0f);
    b = load_idle(w, 2, 2.0f);
    c = load_idle(w, 2, 3.0f);
    sp_pool_touch(w->pool, hand_handle(w->pool, b)); /* c is the oldest idle one now */
    assert_int_equal(load_idle(w, 1, 4.0f), 3);
    assert_int_equal(state_of(w, c), SP_SLOT_EMPTY);
    check_shown(w, c, 0, 0);
    check_shown(w, a.slot, 1, 1.0f);
    check_shown(w, b, 2, 2.0f);
    check_shown(w, 3, 1, 4.0f);
    /* With both held there is no room for three rows, and trying changes nothing. */
    assert_ok(sp_pool_set_pinned(w->pool, hand_handle(w->pool, b), true, NULL), NULL);
    assert_int_equal(try_load(w, 6, 5.0f, &error), SP_POOL_FULL);
    assert_string_equal(error.subject, "overlay-bytes");
    check_shown(w, b, 2, 2.0f);
    check_shown(w, 3, 1, 4.0f);
    assert_int_equal(state_of(w, 3), SP_SLOT_READY);
    assert_ok(sp_pool_release(w->pool, a, NULL), NULL);
    world_destroy(w);
}

/* A load that finds no room for its rows takes no victim for its slot either. */
static void a_load_without_room_evicts_nobody(void **state)
{
    world *w = world_create(UNIT);
    sp_error error = {0};

    (void)state;
    load(w, 1, 1.0f); /* held, with all of the room */
    for (int32_t i = 1; i < SLOTS; i++)
        load_idle(w, 0, (float)(1 + i));
    assert_int_equal(try_load(w, 1, 9.0f, &error), SP_POOL_FULL);
    assert_int_equal(try_load(w, 2, 9.0f, &error), SP_ERR_TOO_LARGE);
    for (int32_t i = 0; i < SLOTS; i++)
        assert_int_equal(state_of(w, i), SP_SLOT_READY);
    world_destroy(w);
}

/* Which rows an adapter replaces depends on the table that they were compared with: two models of
 * one shape have one fingerprint, and an image with rows is still of one of them. */
static void rows_belong_to_the_table_they_were_compared_with(void **state)
{
    world *w = world_create(4 * UNIT), *other = world_create(4 * UNIT);
    sp_digest one = sp_layout_fingerprint(w->layout), two = sp_layout_fingerprint(other->layout);
    sp_image *rows = make_image(w, 1, 3.0f), *plain = make_image(w, 0, 4.0f);
    sp_slot_handle handle;
    sp_error error;

    (void)state;
    assert_memory_equal(&one, &two, sizeof one);
    assert_int_equal(sp_pool_load(other->pool, rows, &handle, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.code, "other-layout");
    assert_ok(sp_pool_load(other->pool, plain, &handle, &error), &error);
    assert_ok(sp_pool_load(w->pool, rows, &handle, &error), &error);
    sp_image_destroy(rows);
    sp_image_destroy(plain);
    world_destroy(other);
    world_destroy(w);
}

static void a_slot_is_loaded_again_with_another_overlay(void **state)
{
    world *w = world_create(8 * UNIT);
    sp_test_random random = {9};
    float values[SLOTS] = {0};
    int32_t counts[SLOTS] = {0};

    (void)state;
    for (int32_t round = 0; round < 200; round++) {
        int32_t n = (int32_t)sp_test_below(&random, 5);
        float value = (float)(1 + round);
        int32_t slot = load_idle(w, n, value);

        counts[slot] = n;
        values[slot] = value;
        for (int32_t i = 0; i < SLOTS; i++)
            if (state_of(w, i) == SP_SLOT_READY)
                check_shown(w, i, counts[i], values[i]);
            else
                check_shown(w, i, 0, 0);
    }
    world_destroy(w);
}

static void an_aborted_load_gives_its_room_back(void **state)
{
    world *w = world_create(UNIT);
    sp_image *image = make_image(w, 1, 2.0f), *plain = make_image(w, 0, 2.0f);
    sp_slot_handle handle;
    int32_t slot;
    sp_error error;

    (void)state;
    for (int32_t round = 0; round < 3; round++) {
        assert_ok(sp_pool_load_begin(w->pool, &slot, NULL), NULL);
        assert_ok(sp_pool_load_reserve(w->pool, slot, image, &error), &error);
        assert_ok(sp_pool_load_reserve(w->pool, slot, image, &error), &error);
        assert_ok(sp_pool_load_write(w->pool, slot, image, &error), &error);
        check_shown(w, slot, 0, 0);
        assert_int_equal(sp_pool_load_commit(w->pool, slot, plain, &handle, NULL), SP_ERR_ARGUMENT);
        assert_ok(sp_pool_load_abort(w->pool, slot, NULL), NULL);
    }
    assert_int_equal(sp_pool_load_reserve(w->pool, slot, image, NULL), SP_ERR_STATE);
    sp_image_destroy(plain);
    sp_image_destroy(image);
    check_shown(w, load(w, 1, 7.0f).slot, 1, 7.0f);
    world_destroy(w);
}

static int32_t n_shown(const world *w)
{
    return sp_pool_overlays_of(w->pool, SP_SITE_EMBEDDING)->n_slots;
}

/* The device fails at its n-th call of a load: nothing of it is seen, the slot beside it is as it
 * was, and the next load is whole. */
static void a_load_that_fails_half_way_shows_nothing(void **state)
{
    bool failed = true;
    int64_t n = 0;

    (void)state;
    for (; failed; n++) {
        world *w = world_create(4 * UNIT);
        int32_t first = load_idle(w, 1, 3.0f);
        sp_status status;
        sp_error error;

        faulty_device_wrap(w->device);
        faulty_device_fail_after(n);
        status = try_load(w, 2, 5.0f, &error);
        failed = faulty_device_failed();
        faulty_device_fail_after(-1);
        check_shown(w, first, 1, 3.0f);
        if (failed) {
            assert_int_equal(status, SP_ERR_DEVICE);
            check_shown(w, first + 1, 0, 0);
            assert_int_equal(n_shown(w), 1);
            assert_int_equal(load_idle(w, 2, 6.0f), first + 1);
            check_shown(w, first + 1, 2, 6.0f);
        }
        assert_int_equal(n_shown(w), 2);
        world_destroy(w);
    }
    assert_true(n > 6); /* image, rows, wait, four columns of sites, two of rows */
}

/* The device fails at its n-th call of an unload: as much as can be is hidden, no slot counts as
 * shown, and the next load is whole, be it with replaced rows or without. */
static void loaded_over_a_failed_unload(bool lost)
{
    bool failed = true;
    int64_t n = 0;

    faulty_device_lose_columns(lost);
    for (; failed; n++) {
        world *w = world_create(4 * UNIT);
        int32_t slot = load_idle(w, 1, 3.0f);
        sp_status status;

        faulty_device_wrap(w->device);
        faulty_device_fail_after(n);
        status = sp_pool_drain(w->pool, hand_handle(w->pool, slot), NULL);
        failed = faulty_device_failed();
        faulty_device_fail_after(-1);
        assert_int_equal(status, failed ? SP_ERR_DEVICE : SP_OK);
        assert_int_equal(state_of(w, slot), SP_SLOT_EMPTY);
        assert_int_equal(n_shown(w), 0);
        if (!failed)
            check_shown(w, slot, 0, 0);
        if (n % 4 < 2) {
            assert_int_equal(load_idle(w, 0, 5.0f), slot);
            check_shown(w, slot, 0, 0);
        } else {
            assert_int_equal(load_idle(w, 2, 6.0f), slot);
            check_shown(w, slot, 2, 6.0f);
        }
        world_destroy(w);
    }
    assert_true(n > 5); /* two columns of rows, four of sites */
}

static void an_unload_that_fails_half_way_can_be_loaded_over(void **state)
{
    (void)state;
    loaded_over_a_failed_unload(false);
    loaded_over_a_failed_unload(true);
    faulty_device_lose_columns(false);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(loads_show_and_unloads_hide),
        cmocka_unit_test(too_large_is_refused_by_name),
        cmocka_unit_test(room_comes_from_idle_slots),
        cmocka_unit_test(a_load_without_room_evicts_nobody),
        cmocka_unit_test(rows_belong_to_the_table_they_were_compared_with),
        cmocka_unit_test(a_slot_is_loaded_again_with_another_overlay),
        cmocka_unit_test(an_aborted_load_gives_its_room_back),
        cmocka_unit_test(a_load_that_fails_half_way_shows_nothing),
        cmocka_unit_test(an_unload_that_fails_half_way_can_be_loaded_over),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
