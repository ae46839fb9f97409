/*
 * test_pool_experts.c: the pool's expert memory over the lifetime of slots: free room, victims,
 * cells, versions, overlays of the same adapter, and the state after a failure.
 */
#include "base/alloc.h"
#include "base/half.h"
#include "pool/expert_image.h"
#include "pool/image.h"
#include "pool/overlay.h"
#include "support/faulty_device.h"
#include "support/hand.h"

#include <string.h>

enum { VOCAB = 64, HIDDEN = 16, INTER = 8, EXPERTS = 6, SLOTS = 4, RANK = 5 };
#define UNIT ((size_t)512) /* one expert's gate: A [8, 16], B [8, 8]: 256 bytes each */
#define ROW  ((size_t)768) /* one replaced row: rows, map and ids */

static const site_dims sites[] = {
    {-1, SP_MODULE_EMBED_TOKENS, VOCAB, HIDDEN},    {0, SP_MODULE_Q_PROJ, HIDDEN, 8},
    {0, SP_MODULE_ROUTER, HIDDEN, EXPERTS},         {0, SP_MODULE_EXPERT_GATE_PROJ, HIDDEN, INTER},
    {0, SP_MODULE_EXPERT_DOWN_PROJ, INTER, HIDDEN},
};

typedef struct world {
    sp_geometry *geometry;
    sp_layout *layout;
    sp_device *device;
    sp_pool *pool;
    int32_t gate, down, router; /* places of experts; the router's index in the layout */
    bool overlays;
    sp_served_table table;
    uint16_t served[VOCAB * HIDDEN];
} world;

static world *world_create(size_t expert_bytes, size_t overlay_bytes)
{
    world *w = sp_calloc(1, sizeof *w);
    sp_layout_options layout_options;
    sp_pool_options options;
    sp_error error;

    assert_non_null(w);
    w->geometry = known_geometry(EXPERTS, sites, sizeof sites / sizeof *sites);
    sp_layout_options_default(&layout_options, sizeof layout_options);
    layout_options.geometry = w->geometry;
    layout_options.rank = 8;
    w->table = (sp_served_table){sizeof w->table, w->served, SP_DTYPE_BF16, VOCAB, HIDDEN, false};
    layout_options.served_embed = &w->table;
    assert_ok(sp_layout_create(&layout_options, &w->layout, &error), &error);
    assert_ok(sp_device_open("cpu", NULL, &w->device, NULL), NULL);
    sp_pool_options_default(&options, sizeof options);
    options.layout = w->layout;
    options.device = w->device;
    options.slots = SLOTS;
    options.expert_bytes = expert_bytes;
    options.overlay_bytes = overlay_bytes;
    assert_ok(sp_pool_create(&options, &w->pool, &error), &error);
    w->overlays = overlay_bytes > 0;
    w->gate = sp_layout_find_expert_place(w->layout,
                                          known_site(w->geometry, 0, SP_MODULE_EXPERT_GATE_PROJ));
    w->down = sp_layout_find_expert_place(w->layout,
                                          known_site(w->geometry, 0, SP_MODULE_EXPERT_DOWN_PROJ));
    w->router = sp_layout_find(w->layout, known_site(w->geometry, 0, SP_MODULE_ROUTER));
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

static void add_pair(hand_adapter *adapter, const site_dims *dims, int32_t expert, float value,
                     char path[KNOWN_PATH_BYTES])
{
    static float a[RANK * HIDDEN], b[HIDDEN * RANK];
    sp_adapter_site *site;

    for (int i = 0; i < RANK * HIDDEN; i++)
        a[i] = b[i] = value;
    site = hand_adapter_add_copy(adapter, dims, RANK, value, SP_DTYPE_F32, a, b);
    if (expert < 0)
        return;
    known_path(0, dims->module, expert, path);
    site->path = path;
    site->expert = expert;
}

/* What an adapter has, every element of which is `value`. */
typedef struct content {
    int32_t n_gates; /* of experts 0 .. n - 1 */
    bool router;
    int32_t n_rows; /* replaced tokens 0 .. n - 1 */
    float value;
} content;

static void add_rows(const world *w, const content *c, sp_image *image)
{
    float rows[VOCAB * HIDDEN];
    int32_t ids[VOCAB];
    sp_adapter_table table = {.kind = SP_SITE_EMBEDDING, .token_ids = ids, .n_ids = c->n_rows};
    sp_error error;

    for (int32_t i = 0; i < c->n_rows * HIDDEN; i++)
        rows[i] = c->value;
    for (int32_t i = 0; i < c->n_rows; i++)
        ids[i] = i;
    table.trainable = (sp_factor){rows, SP_DTYPE_F32, c->n_rows, HIDDEN, HIDDEN, 1};
    assert_ok(sp_overlay_build(&table, 1, &w->table, NULL, SP_DTYPE_BF16, &image->overlay, &error),
              &error);
    image->bytes += sizeof *image->overlay + image->overlay->bytes;
}

static sp_image *make_image(const world *w, content c)
{
    static char paths[EXPERTS][KNOWN_PATH_BYTES];
    hand_adapter *adapter = hand_adapter_create((uint64_t)(c.value * 64));
    hand_pool pool = {w->geometry, w->layout, w->device, w->pool, true};
    sp_image *image;

    add_pair(adapter, &sites[1], -1, c.value, NULL);
    if (c.router)
        add_pair(adapter, &sites[2], -1, c.value, NULL);
    for (int32_t e = 0; e < c.n_gates; e++)
        add_pair(adapter, &sites[3], e, c.value, paths[e]);
    image = hand_pack(&pool, adapter);
    if (c.n_rows > 0)
        add_rows(w, &c, image);
    hand_adapter_destroy(adapter);
    return image;
}

static sp_status try_load(world *w, content c, sp_slot_handle *out_handle, sp_error *error)
{
    sp_image *image = make_image(w, c);
    sp_status status = sp_pool_load(w->pool, image, out_handle, error);

    sp_image_destroy(image);
    return status;
}

/* The version, held. */
static sp_slot_handle load(world *w, content c)
{
    sp_slot_handle handle = {-1, 0};
    sp_error error;

    assert_ok(try_load(w, c, &handle, &error), &error);
    return handle;
}

/* The slot; nobody holds it. */
static int32_t load_idle(world *w, content c)
{
    sp_slot_handle handle = load(w, c);

    assert_ok(sp_pool_release(w->pool, handle, NULL), NULL);
    return handle.slot;
}

static void expect_values(const void *matrix, int32_t n, float value)
{
    const uint16_t *elements = matrix;

    for (int32_t i = 0; i < n; i++)
        assert_true(sp_bf16_to_f32(elements[i]) == value);
}

/* What the tables say of a slot. */
static void check_shown(const world *w, int32_t slot, content c)
{
    const sp_pool_experts *gate = sp_pool_experts_at(w->pool, w->gate);
    const sp_pool_tables *router = sp_pool_tables_at(w->pool, w->router);
    const sp_expert_cell *cells = gate->cells[slot];

    assert_null(sp_pool_experts_at(w->pool, w->down)->cells[slot]);
    assert_int_equal(cells != NULL, c.n_gates > 0);
    assert_int_equal(gate->factors[slot] != NULL, c.n_gates > 0 || c.router);
    for (int32_t e = 0; cells != NULL && e < EXPERTS; e++) {
        const char *factors = gate->factors[slot];

        assert_int_equal(cells[e].rank, e < c.n_gates ? RANK : 0);
        if (e >= c.n_gates)
            continue;
        assert_true(cells[e].scale == c.value);
        expect_values(factors + 256 * (size_t)cells[e].a, RANK * HIDDEN, c.value);
        expect_values(factors + 256 * (size_t)cells[e].a + 2 * RANK * HIDDEN, (8 - RANK) * HIDDEN,
                      0);
        for (int32_t n = 0; n < INTER; n++)
            expect_values(factors + 256 * (size_t)cells[e].b + 16 * n, RANK, c.value);
    }
    assert_int_equal(router->rank[slot], c.router ? RANK : 0);
    assert_null(router->first_a);
    if (c.router)
        expect_values(router->a[slot], RANK * HIDDEN, c.value);
    if (w->overlays)
        assert_int_equal(sp_pool_overlays_of(w->pool, SP_SITE_EMBEDDING)->n[slot], c.n_rows);
}

static const content nothing = {0};

/* ---- life ---------------------------------------------------------------------------------- */

static void loads_show_and_unloads_hide(void **state)
{
    world *w = world_create(8 * UNIT, 0);
    content first = {.n_gates = 3, .router = true, .value = 2}, second = {.n_gates = 1, .value = 4},
            third = {.router = true, .value = 8}, fourth = {.value = 16};
    int32_t slots[3];

    (void)state;
    slots[0] = load_idle(w, first);
    slots[1] = load_idle(w, second);
    slots[2] = load_idle(w, third);
    load_idle(w, fourth);
    check_shown(w, slots[0], first);
    check_shown(w, slots[1], second);
    check_shown(w, slots[2], third);
    assert_int_equal(sp_pool_expert_slots(w->pool), 3);
    assert_ok(sp_pool_drain(w->pool, hand_handle(w->pool, slots[0]), NULL), NULL);
    check_shown(w, slots[0], nothing);
    check_shown(w, slots[1], second);
    assert_int_equal(sp_pool_expert_slots(w->pool), 2);
    /* The slot of three experts now has two: of the third nothing is seen. */
    first.n_gates = 2;
    first.router = false;
    assert_int_equal(load_idle(w, first), slots[0]);
    check_shown(w, slots[0], first);
    world_destroy(w);
}

static void too_large_is_refused_by_name(void **state)
{
    world *w = world_create(2 * UNIT, 0), *without = world_create(0, 0);
    sp_slot_handle handle = {-1, 0};
    sp_error error;

    (void)state;
    assert_int_equal(try_load(w, (content){.n_gates = 3, .value = 2}, &handle, &error),
                     SP_ERR_TOO_LARGE);
    assert_string_equal(error.code, "experts-too-large");
    assert_string_equal(error.subject, "expert-bytes");
    assert_non_null(strstr(error.text, "1536"));
    assert_non_null(strstr(error.text, "1024"));
    assert_int_equal(try_load(without, (content){.router = true, .value = 2}, &handle, &error),
                     SP_ERR_TOO_LARGE);
    assert_string_equal(error.code, "experts-too-large");
    assert_null(sp_pool_experts_at(without->pool, 0));
    assert_int_equal(load_idle(without, (content){.value = 2}), 0);
    assert_int_equal(sp_pool_tables_at(without->pool, without->router)->rank[0], 0);
    world_destroy(without);
    world_destroy(w);
}

static void room_comes_from_idle_slots(void **state)
{
    world *w = world_create(4 * UNIT, 0);
    content two = {.n_gates = 2, .value = 2}, one = {.n_gates = 1, .value = 4},
            last = {.n_gates = 3, .value = 8};
    sp_slot_handle handle = {-1, 0};
    sp_slot_handle held = load(w, two);
    int32_t idle = load_idle(w, one), slot;
    sp_error error;

    (void)state;
    assert_int_equal(try_load(w, last, &handle, &error), SP_POOL_FULL); /* two are held */
    assert_string_equal(error.subject, "expert-bytes");
    check_shown(w, idle, one); /* and nobody is emptied in vain */
    last.n_gates = 2;
    slot = load_idle(w, last);
    check_shown(w, slot, last);
    check_shown(w, held.slot, two);
    check_shown(w, idle, nothing);
    assert_int_equal(hand_slot_info(w->pool, idle).state, SP_SLOT_EMPTY);
    assert_ok(sp_pool_release(w->pool, held, NULL), NULL);
    last.n_gates = 4;
    last.value = 16;
    slot = load_idle(w, last);
    check_shown(w, slot, last);
    assert_int_equal(sp_pool_expert_slots(w->pool), 1);
    world_destroy(w);
}

static void rows_and_experts_find_room_together_or_not_at_all(void **state)
{
    world *w = world_create(4 * UNIT, ROW);
    content rows = {.n_rows = 1, .value = 2}, experts = {.n_gates = 3, .value = 4},
            both = {.n_gates = 1, .n_rows = 2, .value = 8};
    sp_slot_handle handle = {-1, 0};
    sp_slot_handle first = load(w, rows), second = load(w, experts);
    sp_image *image;
    sp_error error;
    int32_t slot = -1;

    (void)state;
    /* Room for the expert is there, for the rows not: neither is taken. */
    assert_int_equal(try_load(w, both, &handle, &error), SP_POOL_FULL);
    assert_string_equal(error.subject, "overlay-bytes");
    assert_ok(sp_pool_release(w->pool, first, NULL), NULL);
    both.n_gates = 2; /* now the other way round */
    assert_int_equal(try_load(w, both, &handle, &error), SP_POOL_FULL);
    assert_string_equal(error.subject, "expert-bytes");
    check_shown(w, first.slot, rows);
    check_shown(w, second.slot, experts);
    both.n_gates = 1;
    image = make_image(w, both);
    assert_ok(sp_pool_load_begin(w->pool, &slot, &error), &error);
    assert_ok(sp_pool_load_reserve(w->pool, slot, image, &error), &error);
    assert_ok(sp_pool_load_reserve(w->pool, slot, image, &error), &error); /* twice is harmless */
    check_shown(w, first.slot, nothing);                                   /* its row made room */
    assert_ok(sp_pool_load_write(w->pool, slot, image, &error), &error);
    check_shown(w, slot, nothing);
    assert_ok(sp_pool_load_commit(w->pool, slot, image, &handle, &error), &error);
    check_shown(w, slot, both);
    check_shown(w, second.slot, experts);
    /* What is given back is found again, of both kinds. */
    hand_unload(w->pool, handle);
    both.n_rows = 2;
    assert_ok(try_load(w, both, &handle, &error), &error);
    sp_image_destroy(image);
    assert_ok(sp_pool_release(w->pool, handle, NULL), NULL);
    assert_ok(sp_pool_release(w->pool, second, NULL), NULL);
    world_destroy(w);
}

/* A draining version keeps its experts until the last holder is gone. */
static void a_draining_slot_keeps_its_experts(void **state)
{
    world *w = world_create(2 * UNIT, 0);
    content two = {.n_gates = 2, .value = 2}, one = {.n_gates = 1, .value = 4};
    sp_slot_handle held = load(w, two), handle;
    sp_error error;

    (void)state;
    assert_int_equal(sp_pool_drain(w->pool, held, NULL), SP_BUSY);
    check_shown(w, held.slot, two);
    assert_int_equal(try_load(w, one, &handle, &error), SP_POOL_FULL);
    check_shown(w, held.slot, two);
    assert_ok(sp_pool_release(w->pool, held, NULL), NULL);
    check_shown(w, held.slot, nothing);
    assert_ok(try_load(w, one, &handle, &error), &error);
    assert_ok(sp_pool_release(w->pool, handle, NULL), NULL);
    world_destroy(w);
}

/* ---- failures ------------------------------------------------------------------------------ */

static void a_load_that_fails_half_way_shows_nothing(void **state)
{
    content first = {.n_gates = 1, .router = true, .value = 2},
            second = {.n_gates = 2, .router = true, .value = 4};
    bool failed = true;
    int64_t n = 0;

    (void)state;
    for (; failed; n++) {
        world *w = world_create(8 * UNIT, 0);
        int32_t slot = load_idle(w, first);
        sp_slot_handle handle = {-1, 0};
        sp_status status;
        sp_error error;

        faulty_device_wrap(w->device);
        faulty_device_fail_after(n);
        status = try_load(w, second, &handle, &error);
        failed = faulty_device_failed();
        faulty_device_fail_after(-1);
        check_shown(w, slot, first);
        if (failed) {
            assert_int_equal(status, SP_ERR_DEVICE);
            check_shown(w, slot + 1, nothing);
            assert_int_equal(sp_pool_expert_slots(w->pool), 1);
            assert_int_equal(load_idle(w, second), slot + 1);
        } else {
            assert_ok(sp_pool_release(w->pool, handle, NULL), NULL);
        }
        check_shown(w, slot + 1, second);
        assert_int_equal(sp_pool_expert_slots(w->pool), 2);
        world_destroy(w);
    }
    assert_true(n > 8); /* image, factors, cells, wait, four columns of sites, two of experts */
}

static void loaded_over_a_failed_unload(bool lost)
{
    content first = {.n_gates = 2, .router = true, .value = 2}, second = {.n_gates = 1, .value = 4},
            third = {.value = 8};
    bool failed = true;
    int64_t n = 0;

    faulty_device_lose_columns(lost);
    for (; failed; n++) {
        world *w = world_create(4 * UNIT, 0);
        int32_t slot = load_idle(w, first);

        faulty_device_wrap(w->device);
        faulty_device_fail_after(n);
        (void)sp_pool_drain(w->pool, hand_handle(w->pool, slot), NULL);
        failed = faulty_device_failed();
        faulty_device_fail_after(-1);
        assert_int_equal(sp_pool_expert_slots(w->pool), 0);
        if (!failed)
            check_shown(w, slot, nothing);
        assert_int_equal(load_idle(w, n % 2 ? second : third), slot);
        check_shown(w, slot, n % 2 ? second : third);
        world_destroy(w);
    }
    assert_true(n > 5);
}

static void an_unload_that_fails_half_way_can_be_loaded_over(void **state)
{
    (void)state;
    loaded_over_a_failed_unload(false);
    loaded_over_a_failed_unload(true);
    faulty_device_lose_columns(false);
}

static void creating_survives_failed_allocations(void **state)
{
    world *w = world_create(0, 0);
    sp_pool_options options;
    size_t before = sp_alloc_bytes(), device = sp_device_allocated_bytes(w->device);
    sp_pool *pool = NULL;
    sp_error error;
    int64_t n = 0;

    (void)state;
    sp_pool_options_default(&options, sizeof options);
    options.layout = w->layout;
    options.device = w->device;
    options.slots = 2;
    options.expert_bytes = 3 * UNIT;
    for (;; n++) {
        sp_alloc_fail_after(n);
        if (sp_pool_create(&options, &pool, &error) == SP_OK)
            break;
        assert_int_equal(error.status, SP_ERR_MEMORY);
        assert_null(pool);
        assert_int_equal(sp_alloc_bytes(), before);
        assert_int_equal(sp_device_allocated_bytes(w->device), device);
    }
    sp_alloc_fail_after(-1);
    assert_true(n > 10);
    /* 2 places of 6 experts of 16 bytes, and 3 pointers, for each slot. */
    assert_int_equal(sp_layout_expert_table_bytes(w->layout, 2), 2 * (2 * 6 * 16 + 3 * 8));
    assert_int_equal(sp_pool_device_bytes(pool) - sp_pool_device_bytes(w->pool),
                     3 * UNIT + 2 * (2 * 6 * 16 + 3 * 8) -
                         2 * (sp_layout_slot_bytes(w->layout) + 2 * 24 + 8));
    sp_pool_destroy(pool);
    world_destroy(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(loads_show_and_unloads_hide),
        cmocka_unit_test(too_large_is_refused_by_name),
        cmocka_unit_test(room_comes_from_idle_slots),
        cmocka_unit_test(rows_and_experts_find_room_together_or_not_at_all),
        cmocka_unit_test(a_draining_slot_keeps_its_experts),
        cmocka_unit_test(a_load_that_fails_half_way_shows_nothing),
        cmocka_unit_test(an_unload_that_fails_half_way_can_be_loaded_over),
        cmocka_unit_test(creating_survives_failed_allocations),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
