/*
 * test_stage_experts.c: adapters of routers and experts through a stage: their slot and their part
 * of the expert memory come and go as one, whatever way they came in.
 */
#include "base/alloc.h"
#include "pool/expert_image.h"
#include "pool/image.h"
#include "support/test.h"

#include <sidepath/stage.h>

#include <stdio.h>
#include <string.h>

#define BASE     SP_TEST_FIXTURES "/qwen3moe"
#define ADAPTERS BASE "/adapters/"

typedef struct world {
    sp_geometry *geometry;
    sp_layout *layout;
    sp_device *device;
    sp_pool *pool;
    sp_stage_source disk;
    sp_stage *stage;
    size_t one; /* bytes of experts-fused in the expert memory */
} world;

static void open_stage(world *w, int32_t threads, size_t host_bytes)
{
    sp_adapter_options audit;
    sp_stage_options options;
    sp_error error;

    sp_adapter_options_default(&audit, sizeof audit);
    audit.geometry = w->geometry;
    audit.base_dir = BASE;
    w->disk.struct_bytes = sizeof w->disk;
    assert_ok(sp_disk_source_create(&w->disk, &error), &error);
    sp_stage_options_default(&options, sizeof options);
    options.pool = w->pool;
    options.sources = &w->disk;
    options.n_sources = 1;
    options.audit = &audit;
    options.supported = sp_geometry_modules(w->geometry);
    options.threads = threads;
    options.host_bytes_max = host_bytes;
    options.base_name = "base";
    assert_ok(sp_stage_create(&options, &w->stage, &error), &error);
}

static size_t bytes_of(const world *w, const char *name)
{
    sp_adapter_options options;
    sp_adapter *adapter;
    char path[512];
    sp_error error;
    size_t bytes;

    snprintf(path, sizeof path, ADAPTERS "%s", name);
    sp_adapter_options_default(&options, sizeof options);
    options.geometry = w->geometry;
    assert_ok(sp_adapter_open(path, &options, &adapter, &error), &error);
    bytes = sp_layout_expert_bytes(adapter, SP_DTYPE_BF16);
    sp_adapter_release(adapter);
    return bytes;
}

/* The expert memory has room for `share` times experts-fused. */
static world *world_create(int32_t slots, int32_t threads, double share)
{
    world *w = sp_calloc(1, sizeof *w);
    sp_layout_options layout_options;
    sp_pool_options options;
    sp_error error;

    assert_non_null(w);
    assert_ok(sp_geometry_open(BASE, &w->geometry, &error), &error);
    sp_layout_options_default(&layout_options, sizeof layout_options);
    layout_options.geometry = w->geometry;
    layout_options.rank = 16;
    assert_ok(sp_layout_create(&layout_options, &w->layout, &error), &error);
    assert_ok(sp_device_open("cpu", NULL, &w->device, NULL), NULL);
    w->one = bytes_of(w, "experts-fused");
    sp_pool_options_default(&options, sizeof options);
    options.layout = w->layout;
    options.device = w->device;
    options.slots = slots;
    options.expert_bytes = (size_t)(share * (double)w->one);
    assert_ok(sp_pool_create(&options, &w->pool, &error), &error);
    open_stage(w, threads, 0);
    return w;
}

static void world_destroy(world *w)
{
    sp_stage_destroy(w->stage);
    sp_disk_source_destroy(&w->disk);
    sp_pool_destroy(w->pool);
    assert_int_equal(sp_device_allocated_bytes(w->device), 0);
    sp_device_close(w->device);
    sp_layout_release(w->layout);
    sp_geometry_release(w->geometry);
    sp_free(w);
}

static sp_status load(const world *w, const char *name, const char *location, sp_error *error)
{
    sp_stage_load_options options;
    int64_t ticket;
    sp_status status;

    sp_stage_load_options_default(&options, sizeof options);
    options.name = name;
    options.location = location;
    options.replace = true;
    status = sp_stage_load(w->stage, &options, &ticket, error);
    while (status == SP_PENDING) {
        sp_stage_wait(w->stage, 100);
        sp_stage_poll(w->stage);
        status = sp_stage_result(w->stage, ticket, NULL, error);
    }
    return status;
}

static sp_stage_version_info find(const world *w, const char *name)
{
    sp_stage_version_info info = {.struct_bytes = sizeof info};
    sp_error error;

    assert_ok(sp_stage_find(w->stage, name, &info, &error), &error);
    return info;
}

static sp_hold hold(const world *w, const char *name)
{
    sp_hold held = {.struct_bytes = sizeof held};
    sp_error error;

    assert_ok(sp_stage_hold(w->stage, SP_HOLD_NAMED, name, &held, &error), &error);
    return held;
}

static sp_status request(const world *w, sp_hold *held)
{
    sp_error error;
    sp_status status = sp_stage_request(w->stage, held, false, &error);

    for (int32_t i = 0; i < 1000 && status == SP_PENDING; i++) {
        sp_stage_wait(w->stage, 100);
        sp_stage_poll(w->stage);
        status = sp_stage_request(w->stage, held, false, &error);
    }
    return status;
}

/* The ranks that the slot shows for one expert of gate_proj in layer 0, and for its q_proj. */
static int32_t expert_rank(const world *w, int32_t slot)
{
    int32_t place = sp_layout_find_expert_place(
        w->layout, sp_geometry_find(w->geometry, "model.layers.0.mlp.experts.5.gate_proj"));
    const sp_expert_cell *cells = sp_pool_experts_at(w->pool, place)->cells[slot];

    return cells != NULL ? cells[5].rank : 0;
}

static int32_t linear_rank(const world *w, int32_t slot)
{
    int32_t site = sp_geometry_find(w->geometry, "model.layers.0.self_attn.q_proj");

    return sp_pool_tables_at(w->pool, sp_layout_find(w->layout, site))->rank[slot];
}

/* ---- tests --------------------------------------------------------------------------------- */

static void a_load_brings_both_parts_and_says_so(void **state)
{
    world *w = world_create(2, 1, 4);
    char want[64];
    sp_stage_version_info info;
    sp_error error;

    (void)state;
    assert_ok(load(w, "a", ADAPTERS "experts-fused-attn", &error), &error);
    info = find(w, "a");
    assert_true(info.slot >= 0);
    assert_true(expert_rank(w, info.slot) > 0 && linear_rank(w, info.slot) > 0);
    snprintf(want, sizeof want, "\"expert_bytes\": %zu,", bytes_of(w, "experts-fused-attn"));
    assert_non_null(strstr(info.facts->receipt, want));
    assert_true(info.image_bytes > sp_layout_image_bytes(w->layout) + w->one);
    assert_ok(load(w, "b", ADAPTERS "experts-fused", &error), &error);
    info = find(w, "b");
    assert_int_equal(info.facts->rank, 4); /* of experts alone */
    assert_int_equal(linear_rank(w, info.slot), 0);
    assert_ok(load(w, "c", ADAPTERS "plain-r8", &error), &error);
    info = find(w, "c");
    assert_int_equal(expert_rank(w, info.slot), 0);
    assert_non_null(strstr(info.facts->receipt, "\"expert_bytes\": 0,"));
    world_destroy(w);
}

/* Room for one adapter: the requested one is loaded, the other stays whole in the host cache. */
static void two_adapters_take_turns_in_the_expert_memory(void **state)
{
    world *w = world_create(3, 1, 1);
    sp_error error;

    (void)state;
    assert_ok(load(w, "a", ADAPTERS "experts-fused", &error), &error);
    assert_ok(load(w, "b", ADAPTERS "experts-down", &error), &error);
    assert_ok(load(w, "plain", ADAPTERS "plain-r8", &error), &error);
    for (int turn = 0; turn < 6; turn++) {
        const char *name = turn % 2 ? "b" : "a";
        sp_hold held = hold(w, name);

        assert_int_equal(request(w, &held), SP_OK);
        assert_int_equal(expert_rank(w, held.slot), turn % 2 ? 0 : 4);
        assert_int_equal(sp_pool_expert_slots(w->pool), 1);
        assert_int_equal(find(w, turn % 2 ? "a" : "b").slot, -1);
        assert_true(find(w, "plain").slot >= 0); /* has no part in it */
        sp_stage_release(w->stage, &held);
    }
    world_destroy(w);
}

static void a_held_adapter_keeps_its_room_and_others_wait(void **state)
{
    world *w = world_create(3, 1, 1);
    sp_hold first, second, third;
    sp_error error;

    (void)state;
    assert_ok(load(w, "a", ADAPTERS "experts-fused", &error), &error);
    assert_ok(load(w, "plain", ADAPTERS "plain-r8", &error), &error);
    first = hold(w, "a");
    assert_int_equal(request(w, &first), SP_OK);
    assert_ok(load(w, "b", ADAPTERS "experts-down", &error), &error); /* into the host cache */
    second = hold(w, "b");
    assert_int_equal(request(w, &second), SP_POOL_FULL);
    third = hold(w, "plain"); /* is not kept waiting by it */
    assert_int_equal(request(w, &third), SP_OK);
    assert_int_equal(expert_rank(w, first.slot), 4);
    sp_stage_release(w->stage, &first);
    assert_int_equal(request(w, &second), SP_OK);
    assert_int_equal(sp_pool_expert_slots(w->pool), 1);
    sp_stage_release(w->stage, &second);
    sp_stage_release(w->stage, &third);
    world_destroy(w);
}

static void too_large_is_named_and_the_old_one_serves(void **state)
{
    world *w = world_create(2, 1, 0.6);
    sp_error error;

    (void)state;
    assert_ok(load(w, "a", ADAPTERS "router", &error), &error);
    assert_int_equal(load(w, "a", ADAPTERS "experts-fused", &error), SP_ERR_TOO_LARGE);
    assert_string_equal(error.code, "experts-too-large");
    assert_non_null(strstr(error.text, "expert-bytes"));
    assert_true(find(w, "a").slot >= 0);
    assert_int_equal(sp_pool_expert_slots(w->pool), 1);
    world_destroy(w);
}

/* A replaced version keeps both parts for those who hold it. */
static void a_replaced_version_drains_with_both_parts(void **state)
{
    world *w = world_create(2, 1, 2.5);
    sp_hold old, new;
    int32_t slot;
    sp_error error;

    (void)state;
    assert_ok(load(w, "a", ADAPTERS "experts-fused", &error), &error);
    old = hold(w, "a");
    assert_int_equal(request(w, &old), SP_OK);
    slot = old.slot;
    assert_ok(load(w, "a", ADAPTERS "experts-fused-attn", &error), &error);
    new = hold(w, "a");
    assert_int_equal(request(w, &new), SP_OK);
    assert_true(new.slot != slot);
    assert_true(expert_rank(w, slot) > 0 && expert_rank(w, new.slot) > 0);
    assert_int_equal(linear_rank(w, slot), 0);
    assert_true(linear_rank(w, new.slot) > 0);
    sp_stage_release(w->stage, &old);
    assert_int_equal(expert_rank(w, slot), 0);
    sp_stage_release(w->stage, &new);
    assert_int_equal(sp_stage_unload(w->stage, "a", &error), SP_OK);
    assert_int_equal(sp_pool_expert_slots(w->pool), 0);
    world_destroy(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_load_brings_both_parts_and_says_so),
        cmocka_unit_test(two_adapters_take_turns_in_the_expert_memory),
        cmocka_unit_test(a_held_adapter_keeps_its_room_and_others_wait),
        cmocka_unit_test(too_large_is_named_and_the_old_one_serves),
        cmocka_unit_test(a_replaced_version_drains_with_both_parts),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
