#include "support/library_world.h"

#include "support/test.h"

static void open_engine(library_world *world)
{
    const sp_engine_adapter adapter = {sizeof adapter, "a", LIBRARY_WORLD_ADAPTER};
    sp_engine_options options;
    sp_error error;

    sp_engine_options_default(&options, sizeof options);
    options.model_dir = LIBRARY_WORLD_MODEL;
    options.threads = 1;
    options.max_loras = 2;
    options.kv_tokens = 256;
    options.adapter_loading = true;
    assert_ok(sp_engine_open(&options, &adapter, 1, &world->engine, &error), &error);
}

static void build_plan(library_world *world)
{
    const sp_route_span span = {
        .struct_bytes = sizeof span, .handle = world->handle, .n_rows = 2, .scale = 1};
    sp_error error;

    assert_ok(sp_plan_create(8, 2, &world->plan, &error), &error);
    assert_ok(sp_plan_build(world->plan, world->pool, &span, 1, 2, &error), &error);
}

void library_world_open(library_world *world)
{
    sp_adapter_options adapter_options;
    sp_layout_options layout_options;
    sp_pool_options pool_options;
    sp_exec_options exec_options;
    sp_error error;

    assert_ok(sp_geometry_open(LIBRARY_WORLD_MODEL, &world->geometry, &error), &error);
    sp_adapter_options_default(&adapter_options, sizeof adapter_options);
    adapter_options.geometry = world->geometry;
    assert_ok(sp_adapter_open(LIBRARY_WORLD_ADAPTER, &adapter_options, &world->adapter, &error),
              &error);
    sp_layout_options_default(&layout_options, sizeof layout_options);
    layout_options.geometry = world->geometry;
    layout_options.rank = 8;
    assert_ok(sp_layout_create(&layout_options, &world->layout, &error), &error);
    assert_ok(sp_layout_pack(world->layout, world->adapter, NULL, &world->image, &error), &error);
    assert_ok(sp_device_open("cpu", NULL, &world->device, &error), &error);
    sp_pool_options_default(&pool_options, sizeof pool_options);
    pool_options.layout = world->layout;
    pool_options.device = world->device;
    pool_options.slots = 2;
    assert_ok(sp_pool_create(&pool_options, &world->pool, &error), &error);
    assert_ok(sp_pool_load(world->pool, world->image, &world->handle, &error), &error);
    build_plan(world);
    sp_exec_options_default(&exec_options, sizeof exec_options);
    exec_options.threads = 1;
    assert_ok(sp_exec_create(&exec_options, &world->exec, &error), &error);
    open_engine(world);
}

void library_world_close(library_world *world)
{
    sp_engine_close(world->engine);
    sp_exec_destroy(world->exec);
    sp_plan_destroy(world->plan);
    sp_pool_release(world->pool, world->handle, NULL);
    sp_pool_destroy(world->pool);
    sp_device_close(world->device);
    sp_image_destroy(world->image);
    sp_layout_release(world->layout);
    sp_adapter_release(world->adapter);
    sp_geometry_release(world->geometry);
    *world = (library_world){0};
}
