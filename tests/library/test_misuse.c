/*
 * Every public function that can fail, with every kind of wrong argument: the status, and a text
 * that names the argument. check_library.py holds these lines against the headers. What a function
 * refuses for other reasons is its room's to test.
 */
#include "support/misuse.h"

#include <sidepath/allocator.h>
#include <sidepath/checkpoint.h>

#include <math.h>

#define w       misuse_world
#define error   misuse_error
#define FOREIGN MISUSE_FOREIGN

static char place;

/* ---- base ---------------------------------------------------------------------------------- */

static void *no_memory(void *user, size_t bytes, size_t align_bytes)
{
    (void)user;
    (void)bytes;
    (void)align_bytes;
    return NULL;
}

static void no_free(void *user, void *memory, size_t bytes, size_t align_bytes)
{
    (void)user;
    (void)memory;
    (void)bytes;
    (void)align_bytes;
}

static void the_allocator(void **state)
{
    const sp_host_allocator whole = {sizeof whole, NULL, no_memory, no_free};
    sp_host_allocator half = whole;

    (void)state;
    half.alloc = NULL;
    REFUSED(SP_ERR_ARGUMENT, "alloc", sp_host_allocator_set(&half, &error));
    half = whole;
    half.free = NULL;
    REFUSED(SP_ERR_ARGUMENT, "free", sp_host_allocator_set(&half, &error));
    half.struct_bytes = 0;
    REFUSED(SP_ERR_ARGUMENT, "sp_host_allocator", sp_host_allocator_set(&half, &error));
    /* The world is open. */
    REFUSED(SP_ERR_STATE, "block", sp_host_allocator_set(&whole, &error));
}

/* ---- device -------------------------------------------------------------------------------- */

static void run_nothing(void *user, sp_task_fn fn, void *fn_user, int32_t n_tasks)
{
    (void)user;
    for (int32_t i = 0; i < n_tasks; i++)
        fn(fn_user, i, 0);
}

static void executors(void **state)
{
    sp_exec_options options;
    sp_exec *exec = NULL;

    (void)state;
    sp_exec_options_default(&options, sizeof options);
    REFUSED(SP_ERR_ARGUMENT, "sp_exec_options", sp_exec_create(NULL, &exec, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_exec", sp_exec_create(&options, NULL, &error));
    options.threads = -1;
    REFUSED(SP_ERR_ARGUMENT, "threads", sp_exec_create(&options, &exec, &error));
    options.threads = 1025;
    REFUSED(SP_ERR_ARGUMENT, "threads", sp_exec_create(&options, &exec, &error));
    options.threads = 1;
    options.spin_us = -1;
    REFUSED(SP_ERR_ARGUMENT, "spin_us", sp_exec_create(&options, &exec, &error));
    REFUSED(SP_ERR_ARGUMENT, "threads", sp_exec_create_host(0, run_nothing, NULL, &exec, &error));
    REFUSED(SP_ERR_ARGUMENT, "run", sp_exec_create_host(1, NULL, NULL, &exec, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_exec", sp_exec_create_host(1, run_nothing, NULL, NULL, &error));
    assert_null(exec);
}

static void *no_device_memory(void *user, size_t bytes)
{
    (void)user;
    (void)bytes;
    return NULL;
}

static void devices(void **state)
{
    sp_device_options options;
    sp_device *device = NULL;
    size_t bytes;
    void *memory = NULL;

    (void)state;
    sp_device_options_default(&options, sizeof options);
    REFUSED(SP_ERR_ARGUMENT, "name", sp_device_open(NULL, &options, &device, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_device", sp_device_open("cpu", &options, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "tpu", sp_device_open("tpu", &options, &device, &error));
    REFUSED(SP_ERR_ARGUMENT, "cuda:x", sp_device_open("cuda:x", &options, &device, &error));
    options.alloc = no_device_memory;
    REFUSED(SP_ERR_ARGUMENT, "alloc", sp_device_open("cpu", &options, &device, &error));
    assert_null(device);
    REFUSED(SP_ERR_ARGUMENT, "device", sp_device_memory(NULL, &bytes, &bytes, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_free", sp_device_memory(w.device, NULL, &bytes, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_total", sp_device_memory(w.device, &bytes, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "device", sp_device_alloc(NULL, 8, &memory, &error));
    REFUSED(SP_ERR_ARGUMENT, "bytes", sp_device_alloc(w.device, 0, &memory, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_memory", sp_device_alloc(w.device, 8, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "device", sp_device_alloc_pinned(NULL, 8, &memory, &error));
    REFUSED(SP_ERR_ARGUMENT, "bytes", sp_device_alloc_pinned(w.device, 0, &memory, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_memory", sp_device_alloc_pinned(w.device, 8, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "device", sp_device_pin(NULL, &place, 1, &error));
    REFUSED(SP_ERR_ARGUMENT, "memory", sp_device_pin(w.device, NULL, 1, &error));
    assert_null(memory);
}

static void copies(void **state)
{
    char a[8] = {0}, b[8] = {0};

    (void)state;
    REFUSED(SP_ERR_ARGUMENT, "device", sp_device_write(NULL, a, b, 8, &error));
    REFUSED(SP_ERR_ARGUMENT, "device_memory", sp_device_write(w.device, NULL, b, 8, &error));
    REFUSED(SP_ERR_ARGUMENT, "host_memory", sp_device_write(w.device, a, NULL, 8, &error));
    REFUSED(SP_ERR_ARGUMENT, "device", sp_device_read(NULL, a, b, 8, &error));
    REFUSED(SP_ERR_ARGUMENT, "host_memory", sp_device_read(w.device, NULL, b, 8, &error));
    REFUSED(SP_ERR_ARGUMENT, "device_memory", sp_device_read(w.device, a, NULL, 8, &error));
    REFUSED(SP_ERR_ARGUMENT, "device", sp_device_zero(NULL, a, 8, &error));
    REFUSED(SP_ERR_ARGUMENT, "device_memory", sp_device_zero(w.device, NULL, 8, &error));
    REFUSED(SP_ERR_ARGUMENT, "device", sp_device_write_column(NULL, a, 4, b, 4, 4, 2, &error));
    REFUSED(SP_ERR_ARGUMENT, "device_memory",
            sp_device_write_column(w.device, NULL, 4, b, 4, 4, 2, &error));
    REFUSED(SP_ERR_ARGUMENT, "host_memory",
            sp_device_write_column(w.device, a, 4, NULL, 4, 4, 2, &error));
    REFUSED(SP_ERR_STRIDE, "stride", sp_device_write_column(w.device, a, 3, b, 4, 4, 2, &error));
    REFUSED(SP_ERR_STRIDE, "stride", sp_device_write_column(w.device, a, 4, b, 3, 4, 2, &error));
}

static void streams(void **state)
{
    sp_stream *main_stream = sp_device_main_stream(w.device);
    sp_stream *stream = NULL;
    char a[8] = {0}, b[8] = {0};

    (void)state;
    REFUSED(SP_ERR_ARGUMENT, "device", sp_stream_create(NULL, &stream, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_stream", sp_stream_create(w.device, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "device", sp_stream_wrap(NULL, NULL, &stream, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_stream", sp_stream_wrap(w.device, NULL, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "native", sp_stream_wrap(w.device, a, &stream, &error));
    assert_null(stream);
    REFUSED(SP_ERR_ARGUMENT, "stream", sp_stream_wait(NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "stream", sp_stream_copy(NULL, a, b, 8, &error));
    REFUSED(SP_ERR_ARGUMENT, "to", sp_stream_copy(main_stream, NULL, b, 8, &error));
    REFUSED(SP_ERR_ARGUMENT, "from", sp_stream_copy(main_stream, a, NULL, 8, &error));
    REFUSED(SP_ERR_ARGUMENT, "stream", sp_stream_zero(NULL, a, 8, &error));
    REFUSED(SP_ERR_ARGUMENT, "to", sp_stream_zero(main_stream, NULL, 8, &error));
    REFUSED(SP_ERR_ARGUMENT, "stream", sp_stream_copy_column(NULL, a, 4, b, 4, 4, 2, &error));
    REFUSED(SP_ERR_ARGUMENT, "to", sp_stream_copy_column(main_stream, NULL, 4, b, 4, 4, 2, &error));
    REFUSED(SP_ERR_ARGUMENT, "from",
            sp_stream_copy_column(main_stream, a, 4, NULL, 4, 4, 2, &error));
    REFUSED(SP_ERR_STRIDE, "stride", sp_stream_copy_column(main_stream, a, 3, b, 4, 4, 2, &error));
}

static void events(void **state)
{
    sp_stream *main_stream = sp_device_main_stream(w.device);
    sp_event *event = NULL;
    sp_graph *graph = NULL;
    double seconds;

    (void)state;
    assert_ok(sp_event_create(w.device, &event, &error), &error);
    REFUSED(SP_ERR_ARGUMENT, "device", sp_event_create(NULL, &event, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_event", sp_event_create(w.device, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "event", sp_event_record(NULL, main_stream, &error));
    REFUSED(SP_ERR_ARGUMENT, "stream", sp_event_record(event, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "event", sp_event_query(NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "event", sp_event_wait(NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "from", sp_event_seconds(NULL, event, &seconds, &error));
    REFUSED(SP_ERR_ARGUMENT, "to", sp_event_seconds(event, NULL, &seconds, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_seconds", sp_event_seconds(event, event, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "stream", sp_stream_wait_event(NULL, event, &error));
    REFUSED(SP_ERR_ARGUMENT, "event", sp_stream_wait_event(main_stream, NULL, &error));
    sp_event_destroy(event);
    REFUSED(SP_ERR_ARGUMENT, "stream", sp_graph_begin(NULL, &error));
    REFUSED(SP_ERR_UNSUPPORTED, "cpu", sp_graph_begin(main_stream, &error));
    REFUSED(SP_ERR_ARGUMENT, "stream", sp_graph_end(NULL, &graph, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_graph", sp_graph_end(main_stream, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "graph", sp_graph_launch(NULL, main_stream, &error));
    assert_null(graph);
}

/* ---- adapter ------------------------------------------------------------------------------- */

static void geometries(void **state)
{
    const char text[] = "{}";
    sp_geometry *geometry = NULL;
    sp_site site, row = {.struct_bytes = sizeof row};
    sp_module_set set = 0;

    (void)state;
    REFUSED(SP_ERR_ARGUMENT, "path", sp_geometry_open(NULL, &geometry, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_geometry", sp_geometry_open(LIBRARY_WORLD_MODEL, NULL, &error));
    REFUSED(SP_ERR_NOT_FOUND, "nowhere", sp_geometry_open("/nowhere", &geometry, &error));
    REFUSED(SP_ERR_ARGUMENT, "bytes", sp_geometry_parse(NULL, 2, &geometry, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_geometry", sp_geometry_parse(text, 2, NULL, &error));
    REFUSED(SP_ERR_INPUT, "", sp_geometry_parse(text, 0, &geometry, &error));
    sp_site_default(&site, sizeof site);
    site.path = "model.layers.0.mlp.fc";
    site.layer = 0;
    site.k_in = site.n_out = 8;
    REFUSED(SP_ERR_ARGUMENT, "sites", sp_geometry_create(NULL, 1, &geometry, &error));
    REFUSED(SP_ERR_ARGUMENT, "sites", sp_geometry_create(&site, 0, &geometry, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_geometry", sp_geometry_create(&site, 1, NULL, &error));
    REFUSED(SP_ERR_TOO_LARGE, "", sp_geometry_create(&site, SIZE_MAX / 256, &geometry, &error));
    site.k_in = 0;
    REFUSED(SP_ERR_ARGUMENT, "k_in", sp_geometry_create(&site, 1, &geometry, &error));
    site.k_in = 8;
    site.n_out = -1;
    REFUSED(SP_ERR_ARGUMENT, "n_out", sp_geometry_create(&site, 1, &geometry, &error));
    site.n_out = 8;
    site.kind = (sp_site_kind)FOREIGN;
    REFUSED(SP_ERR_ARGUMENT, "kind", sp_geometry_create(&site, 1, &geometry, &error));
    site.kind = SP_SITE_LINEAR;
    site.path = NULL;
    REFUSED(SP_ERR_ARGUMENT, "path", sp_geometry_create(&site, 1, &geometry, &error));
    assert_null(geometry);
    REFUSED(SP_ERR_ARGUMENT, "geometry", sp_geometry_site_at(NULL, 0, &row, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_site", sp_geometry_site_at(w.geometry, 0, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "site", sp_geometry_site_at(w.geometry, -1, &row, &error));
    REFUSED(SP_ERR_ARGUMENT, "site", sp_geometry_site_at(w.geometry, INT32_MAX, &row, &error));
    REFUSED(SP_ERR_ARGUMENT, "text", sp_module_set_parse(w.geometry, NULL, &set, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_set", sp_module_set_parse(w.geometry, "q_proj", NULL, &error));
    REFUSED(SP_ERR_INPUT, "q_prj", sp_module_set_parse(w.geometry, "q_prj", &set, &error));
    assert_int_equal(set, 0);
}

static void adapters(void **state)
{
    sp_adapter_options options;
    sp_receipt_options receipt_options;
    sp_adapter *adapter = NULL;
    sp_receipt *receipt = NULL;
    const sp_error why = {.code = "bad-rank", .text = "why"};

    (void)state;
    sp_adapter_options_default(&options, sizeof options);
    options.geometry = w.geometry;
    REFUSED(SP_ERR_ARGUMENT, "path", sp_adapter_open(NULL, &options, &adapter, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_adapter_options",
            sp_adapter_open(LIBRARY_WORLD_ADAPTER, NULL, &adapter, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_adapter",
            sp_adapter_open(LIBRARY_WORLD_ADAPTER, &options, NULL, &error));
    options.pool_dtype = (sp_dtype)FOREIGN;
    REFUSED(SP_ERR_ARGUMENT, "pool_dtype",
            sp_adapter_open(LIBRARY_WORLD_ADAPTER, &options, &adapter, &error));
    options.pool_dtype = SP_DTYPE_BF16;
    options.rank_max = -1;
    REFUSED(SP_ERR_ARGUMENT, "rank_max",
            sp_adapter_open(LIBRARY_WORLD_ADAPTER, &options, &adapter, &error));
    options.rank_max = 0;
    options.expert_layout = (sp_expert_layout)FOREIGN;
    REFUSED(SP_ERR_ARGUMENT, "expert_layout",
            sp_adapter_open(LIBRARY_WORLD_ADAPTER, &options, &adapter, &error));
    assert_null(adapter);
    sp_receipt_options_default(&receipt_options, sizeof receipt_options);
    REFUSED(SP_ERR_ARGUMENT, "adapter",
            sp_receipt_create(NULL, &receipt_options, &receipt, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_receipt_options",
            sp_receipt_create(w.adapter, NULL, &receipt, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_receipt",
            sp_receipt_create(w.adapter, &receipt_options, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "name", sp_receipt_create_refused(NULL, &why, &receipt, &error));
    REFUSED(SP_ERR_ARGUMENT, "refusal", sp_receipt_create_refused("a", NULL, &receipt, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_receipt", sp_receipt_create_refused("a", &why, NULL, &error));
    assert_null(receipt);
}

static void safetensors(void **state)
{
    const char bytes[16] = {8};
    sp_safetensors *header = NULL;
    sp_checkpoint *checkpoint = NULL;
    sp_shard_index *index = NULL;
    size_t n;

    (void)state;
    REFUSED(SP_ERR_ARGUMENT, "bytes", sp_safetensors_parse(NULL, 16, 16, "s", &header, &error));
    REFUSED(SP_ERR_ARGUMENT, "subject", sp_safetensors_parse(bytes, 16, 16, NULL, &header, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_header", sp_safetensors_parse(bytes, 16, 16, "s", NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "bytes", sp_safetensors_header_bytes(NULL, 16, 16, "s", &n, &error));
    REFUSED(SP_ERR_ARGUMENT, "subject",
            sp_safetensors_header_bytes(bytes, 16, 16, NULL, &n, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_bytes",
            sp_safetensors_header_bytes(bytes, 16, 16, "s", NULL, &error));
    assert_null(header);
    REFUSED(SP_ERR_ARGUMENT, "directory", sp_checkpoint_open(NULL, "model", &checkpoint, &error));
    REFUSED(SP_ERR_ARGUMENT, "stem",
            sp_checkpoint_open(LIBRARY_WORLD_MODEL, NULL, &checkpoint, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_checkpoint",
            sp_checkpoint_open(LIBRARY_WORLD_MODEL, "model", NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "path", sp_checkpoint_open_file(NULL, &checkpoint, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_checkpoint",
            sp_checkpoint_open_file(LIBRARY_WORLD_MODEL "/model.safetensors", NULL, &error));
    assert_null(checkpoint);
    REFUSED(SP_ERR_ARGUMENT, "bytes", sp_shard_index_parse(NULL, 2, "s", &index, &error));
    REFUSED(SP_ERR_ARGUMENT, "subject", sp_shard_index_parse("{}", 2, NULL, &index, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_index", sp_shard_index_parse("{}", 2, "s", NULL, &error));
    assert_null(index);
}

/* ---- pool ---------------------------------------------------------------------------------- */

static void layouts(void **state)
{
    sp_layout_options options;
    sp_layout *layout = NULL;
    sp_image *image = NULL;
    size_t bytes;

    (void)state;
    sp_layout_options_default(&options, sizeof options);
    options.geometry = w.geometry;
    options.rank = 8;
    REFUSED(SP_ERR_ARGUMENT, "layout", sp_layout_create(NULL, &layout, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_layout", sp_layout_create(&options, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "layout", sp_layout_measure(NULL, &bytes, &bytes, &error));
    options.rank = 0;
    REFUSED(SP_ERR_ARGUMENT, "rank", sp_layout_create(&options, &layout, &error));
    options.rank = SP_POOL_RANK_MAX + 1;
    REFUSED(SP_ERR_ARGUMENT, "rank", sp_layout_create(&options, &layout, &error));
    options.rank = 8;
    options.dtype = (sp_dtype)FOREIGN;
    REFUSED(SP_ERR_ARGUMENT, "element type", sp_layout_create(&options, &layout, &error));
    options.dtype = SP_DTYPE_BF16;
    options.modules = (sp_module_set)1 << 63;
    REFUSED(SP_ERR_ARGUMENT, "module", sp_layout_create(&options, &layout, &error));
    options.modules = 0;
    options.geometry = NULL;
    REFUSED(SP_ERR_ARGUMENT, "geometry", sp_layout_create(&options, &layout, &error));
    assert_null(layout);
    REFUSED(SP_ERR_ARGUMENT, "layout", sp_layout_measure_overlay(NULL, w.adapter, &bytes, &error));
    REFUSED(SP_ERR_ARGUMENT, "adapter", sp_layout_measure_overlay(w.layout, NULL, &bytes, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_bytes",
            sp_layout_measure_overlay(w.layout, w.adapter, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "layout", sp_layout_pack(NULL, w.adapter, NULL, &image, &error));
    REFUSED(SP_ERR_ARGUMENT, "adapter", sp_layout_pack(w.layout, NULL, NULL, &image, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_image", sp_layout_pack(w.layout, w.adapter, NULL, NULL, &error));
    assert_null(image);
}

static void pools(void **state)
{
    sp_slot_info info = {.struct_bytes = sizeof info};
    sp_pool_options options;
    sp_pool *pool = NULL;
    int32_t slot = -5;

    (void)state;
    sp_pool_options_default(&options, sizeof options);
    options.layout = w.layout;
    options.device = w.device;
    options.slots = 1;
    REFUSED(SP_ERR_ARGUMENT, "sp_pool_options", sp_pool_create(NULL, &pool, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_pool", sp_pool_create(&options, NULL, &error));
    options.slots = 0;
    REFUSED(SP_ERR_ARGUMENT, "slots", sp_pool_create(&options, &pool, &error));
    options.slots = 4097;
    REFUSED(SP_ERR_ARGUMENT, "slots", sp_pool_create(&options, &pool, &error));
    options.slots = 1;
    options.layout = NULL;
    REFUSED(SP_ERR_ARGUMENT, "layout", sp_pool_create(&options, &pool, &error));
    options.layout = w.layout;
    options.device = NULL;
    REFUSED(SP_ERR_ARGUMENT, "device", sp_pool_create(&options, &pool, &error));
    assert_null(pool);
    REFUSED(SP_ERR_ARGUMENT, "pool", sp_pool_slot_info(NULL, 0, &info, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_slot_info", sp_pool_slot_info(w.pool, 0, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "slot", sp_pool_slot_info(w.pool, -1, &info, &error));
    REFUSED(SP_ERR_ARGUMENT, "slot", sp_pool_slot_info(w.pool, 2, &info, &error));
    REFUSED(SP_ERR_ARGUMENT, "slots", sp_pool_pick_victim(NULL, 1, &slot, &error));
    REFUSED(SP_ERR_ARGUMENT, "slots", sp_pool_pick_victim(&info, 0, &slot, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_slot", sp_pool_pick_victim(&info, 1, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "state",
            (info.state = (sp_slot_state)FOREIGN, sp_pool_pick_victim(&info, 1, &slot, &error)));
    assert_int_equal(slot, -5);
}

static void handles(void **state)
{
    const sp_slot_handle stale = {w.handle.slot, w.handle.generation + 1};
    const sp_slot_handle outside = {2, w.handle.generation}, empty = {1 - w.handle.slot, 1};
    const sp_digest digest = sp_adapter_digest(w.adapter);
    sp_slot_handle handle = {-7, 7};

    (void)state;
    REFUSED(SP_ERR_ARGUMENT, "pool", sp_pool_load(NULL, w.image, &handle, &error));
    REFUSED(SP_ERR_ARGUMENT, "image", sp_pool_load(w.pool, NULL, &handle, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_handle", sp_pool_load(w.pool, w.image, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "pool", sp_pool_find(NULL, &digest, &handle, &error));
    REFUSED(SP_ERR_ARGUMENT, "digest", sp_pool_find(w.pool, NULL, &handle, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_handle", sp_pool_find(w.pool, &digest, NULL, &error));
    assert_int_equal(handle.slot, -7);
    REFUSED(SP_ERR_ARGUMENT, "pool", sp_pool_acquire(NULL, w.handle, &error));
    REFUSED(SP_ERR_STATE, "slot", sp_pool_acquire(w.pool, stale, &error));
    REFUSED(SP_ERR_STATE, "slot", sp_pool_acquire(w.pool, empty, &error));
    REFUSED(SP_ERR_ARGUMENT, "slot", sp_pool_acquire(w.pool, outside, &error));
    REFUSED(SP_ERR_ARGUMENT, "pool", sp_pool_release(NULL, w.handle, &error));
    REFUSED(SP_ERR_STATE, "slot", sp_pool_release(w.pool, stale, &error));
    REFUSED(SP_ERR_STATE, "slot", sp_pool_release(w.pool, empty, &error));
    REFUSED(SP_ERR_ARGUMENT, "slot", sp_pool_release(w.pool, outside, &error));
    REFUSED(SP_ERR_ARGUMENT, "pool", sp_pool_check_handle(NULL, w.handle, &error));
    REFUSED(SP_ERR_STATE, "slot", sp_pool_check_handle(w.pool, stale, &error));
    REFUSED(SP_ERR_ARGUMENT, "pool", sp_pool_drain(NULL, w.handle, &error));
    REFUSED(SP_ERR_STATE, "slot", sp_pool_drain(w.pool, stale, &error));
    REFUSED(SP_ERR_ARGUMENT, "pool", sp_pool_set_pinned(NULL, w.handle, true, &error));
    REFUSED(SP_ERR_STATE, "slot", sp_pool_set_pinned(w.pool, stale, true, &error));
    REFUSED(SP_ERR_ARGUMENT, "pool", sp_pool_set_awaited(NULL, w.handle, true, &error));
    REFUSED(SP_ERR_STATE, "slot", sp_pool_set_awaited(w.pool, stale, true, &error));
    assert_ok(sp_pool_check_handle(w.pool, w.handle, &error), &error);
}

static void slots_that_are_opened(void **state)
{
    const sp_packed_image packed = {.struct_bytes = sizeof packed};
    sp_image *image = NULL;
    void *memory = NULL;
    int32_t slot, ready = w.handle.slot;

    (void)state;
    REFUSED(SP_ERR_ARGUMENT, "pool", sp_pool_load_open(NULL, 0, &image, &memory, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_image", sp_pool_load_open(w.pool, 0, NULL, &memory, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_memory", sp_pool_load_open(w.pool, 0, &image, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "slot", sp_pool_load_open(w.pool, 9, &image, &memory, &error));
    REFUSED(SP_ERR_STATE, "slot", sp_pool_load_open(w.pool, ready, &image, &memory, &error));
    REFUSED(SP_ERR_ARGUMENT, "pool", sp_pool_load_seal(NULL, 0, w.image, &packed, &error));
    REFUSED(SP_ERR_ARGUMENT, "slot", sp_pool_load_seal(w.pool, 9, w.image, &packed, &error));
    REFUSED(SP_ERR_ARGUMENT, "image", sp_pool_load_seal(w.pool, ready, NULL, &packed, &error));
    REFUSED(SP_ERR_STATE, "slot", sp_pool_load_seal(w.pool, ready, w.image, &packed, &error));
    assert_null(image);
    assert_null(memory);
    assert_ok(sp_pool_load_begin(w.pool, &slot, &error), &error);
    assert_ok(sp_pool_load_open(w.pool, slot, &image, &memory, &error), &error);
    REFUSED(SP_ERR_ARGUMENT, "sp_packed_image",
            sp_pool_load_seal(w.pool, slot, image, NULL, &error));
    assert_ok(sp_pool_load_abort(w.pool, slot, &error), &error);
    sp_image_destroy(image);
}

static void loads_in_pieces(void **state)
{
    sp_slot_handle handle = {-7, 7};
    int32_t slot = -5, ready = w.handle.slot;

    (void)state;
    REFUSED(SP_ERR_ARGUMENT, "pool", sp_pool_load_begin(NULL, &slot, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_slot", sp_pool_load_begin(w.pool, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "pool", sp_pool_check_room(NULL, w.image, &error));
    REFUSED(SP_ERR_ARGUMENT, "image", sp_pool_check_room(w.pool, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "pool", sp_pool_load_reserve(NULL, 0, w.image, &error));
    REFUSED(SP_ERR_ARGUMENT, "image", sp_pool_load_reserve(w.pool, ready, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "slot", sp_pool_load_reserve(w.pool, 2, w.image, &error));
    REFUSED(SP_ERR_STATE, "slot", sp_pool_load_reserve(w.pool, ready, w.image, &error));
    REFUSED(SP_ERR_ARGUMENT, "pool", sp_pool_load_write(NULL, 0, w.image, &error));
    REFUSED(SP_ERR_ARGUMENT, "image", sp_pool_load_write(w.pool, ready, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "slot", sp_pool_load_write(w.pool, -1, w.image, &error));
    REFUSED(SP_ERR_STATE, "slot", sp_pool_load_write(w.pool, ready, w.image, &error));
    REFUSED(SP_ERR_ARGUMENT, "pool", sp_pool_load_commit(NULL, 0, w.image, &handle, &error));
    REFUSED(SP_ERR_ARGUMENT, "image", sp_pool_load_commit(w.pool, ready, NULL, &handle, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_handle",
            sp_pool_load_commit(w.pool, ready, w.image, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "slot", sp_pool_load_commit(w.pool, 9, w.image, &handle, &error));
    REFUSED(SP_ERR_STATE, "slot", sp_pool_load_commit(w.pool, ready, w.image, &handle, &error));
    REFUSED(SP_ERR_ARGUMENT, "pool", sp_pool_load_abort(NULL, 0, &error));
    REFUSED(SP_ERR_ARGUMENT, "slot", sp_pool_load_abort(w.pool, 9, &error));
    REFUSED(SP_ERR_STATE, "slot", sp_pool_load_abort(w.pool, ready, &error));
    assert_int_equal(slot, -5);
    assert_int_equal(handle.slot, -7);
    assert_ok(sp_pool_check_handle(w.pool, w.handle, &error), &error);
}

/* ---- route --------------------------------------------------------------------------------- */

static void plans(void **state)
{
    sp_route_span span = {sizeof span, w.handle, 1, 1};
    const int32_t row = 0, outside = 2;
    sp_plan *plan = NULL;

    (void)state;
    REFUSED(SP_ERR_ARGUMENT, "rows_max", sp_plan_create(0, 1, &plan, &error));
    REFUSED(SP_ERR_ARGUMENT, "rows_max", sp_plan_create((1 << 20) + 1, 1, &plan, &error));
    REFUSED(SP_ERR_ARGUMENT, "slots_max", sp_plan_create(1, 0, &plan, &error));
    REFUSED(SP_ERR_ARGUMENT, "slots_max", sp_plan_create(1, 4097, &plan, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_plan", sp_plan_create(1, 1, NULL, &error));
    assert_null(plan);
    assert_ok(sp_plan_create(4, 2, &plan, &error), &error);
    REFUSED(SP_ERR_ARGUMENT, "plan", sp_plan_build(NULL, w.pool, &span, 1, 1, &error));
    REFUSED(SP_ERR_ARGUMENT, "pool", sp_plan_build(plan, NULL, &span, 1, 1, &error));
    REFUSED(SP_ERR_ARGUMENT, "spans", sp_plan_build(plan, w.pool, NULL, 1, 1, &error));
    REFUSED(SP_ERR_ARGUMENT, "n_spans", sp_plan_build(plan, w.pool, &span, -1, 1, &error));
    REFUSED(SP_ERR_ARGUMENT, "rows", sp_plan_build(plan, w.pool, &span, 1, 5, &error));
    span.n_rows = 0;
    REFUSED(SP_ERR_ARGUMENT, "row", sp_plan_build(plan, w.pool, &span, 1, 1, &error));
    span.n_rows = 1;
    span.scale = NAN;
    REFUSED(SP_ERR_ARGUMENT, "scale", sp_plan_build(plan, w.pool, &span, 1, 1, &error));
    span.scale = 1;
    span.handle.generation++;
    REFUSED(SP_ERR_STATE, "slot", sp_plan_build(plan, w.pool, &span, 1, 1, &error));
    REFUSED(SP_ERR_ARGUMENT, "plan", sp_plan_select(NULL, w.plan, &row, 1, &error));
    REFUSED(SP_ERR_ARGUMENT, "from", sp_plan_select(plan, NULL, &row, 1, &error));
    REFUSED(SP_ERR_ARGUMENT, "rows", sp_plan_select(plan, w.plan, NULL, 1, &error));
    REFUSED(SP_ERR_ARGUMENT, "n_rows", sp_plan_select(plan, w.plan, &row, -1, &error));
    REFUSED(SP_ERR_ARGUMENT, "row", sp_plan_select(plan, w.plan, &outside, 1, &error));
    REFUSED(SP_ERR_ARGUMENT, "plan", sp_plan_select(w.plan, w.plan, &row, 1, &error));
    REFUSED(SP_ERR_ARGUMENT, "plan", sp_plan_check(NULL, w.pool, &error));
    REFUSED(SP_ERR_ARGUMENT, "pool", sp_plan_check(plan, NULL, &error));
    REFUSED(SP_ERR_STATE, "plan", sp_plan_check(plan, w.pool, &error));
    sp_plan_destroy(plan);
}

/* ---- engine -------------------------------------------------------------------------------- */

static void engines(void **state)
{
    const sp_engine_adapter adapter = {sizeof adapter, NULL, LIBRARY_WORLD_ADAPTER};
    sp_engine_options options;
    sp_engine *engine = NULL;

    (void)state;
    sp_engine_options_default(&options, sizeof options);
    options.model_dir = LIBRARY_WORLD_MODEL;
    REFUSED(SP_ERR_ARGUMENT, "sp_engine_options", sp_engine_open(NULL, NULL, 0, &engine, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_engine", sp_engine_open(&options, NULL, 0, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_engine_adapter",
            sp_engine_open(&options, NULL, 1, &engine, &error));
    REFUSED(SP_ERR_ARGUMENT, "name", sp_engine_open(&options, &adapter, 1, &engine, &error));
    options.precision = (sp_dtype)FOREIGN;
    REFUSED(SP_ERR_ARGUMENT, "precision", sp_engine_open(&options, NULL, 0, &engine, &error));
    options.precision = SP_DTYPE_BF16;
    options.max_loras = -1;
    REFUSED(SP_ERR_ARGUMENT, "max-loras", sp_engine_open(&options, NULL, 0, &engine, &error));
    options.max_loras = 1;
    options.kv_tokens = INT64_MAX;
    REFUSED(SP_ERR_ARGUMENT, "kv-tokens", sp_engine_open(&options, NULL, 0, &engine, &error));
    options.kv_tokens = 64;
    options.model_dir = NULL;
    REFUSED(SP_ERR_ARGUMENT, "model", sp_engine_open(&options, NULL, 0, &engine, &error));
    assert_null(engine);
    REFUSED(SP_ERR_ARGUMENT, "name", sp_stage_name_check(NULL, "base", &error));
    REFUSED(SP_ERR_INPUT, "name", sp_stage_name_check("", "base", &error));
}

static void texts(void **state)
{
    const sp_text_span span = {0, 1};
    const int32_t token = 1;
    int32_t *tokens = NULL, n = 0;
    size_t bytes = 0;
    char *text = NULL;

    (void)state;
    REFUSED(SP_ERR_ARGUMENT, "engine",
            sp_engine_encode(NULL, "a", 1, false, 0, &tokens, &n, &error));
    REFUSED(SP_ERR_ARGUMENT, "text",
            sp_engine_encode(w.engine, NULL, 1, false, 0, &tokens, &n, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_tokens",
            sp_engine_encode(w.engine, "a", 1, false, 0, NULL, &n, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_n_tokens",
            sp_engine_encode(w.engine, "a", 1, false, 0, &tokens, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "engine",
            sp_engine_encode_prompt(NULL, "a", 1, false, 0, &tokens, &n, &error));
    REFUSED(SP_ERR_ARGUMENT, "text",
            sp_engine_encode_prompt(w.engine, NULL, 1, false, 0, &tokens, &n, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_tokens",
            sp_engine_encode_prompt(w.engine, "a", 1, false, 0, NULL, &n, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_n_tokens",
            sp_engine_encode_prompt(w.engine, "a", 1, false, 0, &tokens, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "engine",
            sp_engine_encode_spans(NULL, "a", 1, &span, 1, 0, &tokens, &n, &error));
    REFUSED(SP_ERR_ARGUMENT, "text",
            sp_engine_encode_spans(w.engine, NULL, 1, &span, 1, 0, &tokens, &n, &error));
    REFUSED(SP_ERR_ARGUMENT, "spans",
            sp_engine_encode_spans(w.engine, "a", 1, NULL, 1, 0, &tokens, &n, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_tokens",
            sp_engine_encode_spans(w.engine, "a", 1, &span, 1, 0, NULL, &n, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_n_tokens",
            sp_engine_encode_spans(w.engine, "a", 1, &span, 1, 0, &tokens, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "engine",
            sp_engine_decode(NULL, &token, 1, true, &text, &bytes, &error));
    REFUSED(SP_ERR_ARGUMENT, "tokens",
            sp_engine_decode(w.engine, NULL, 1, true, &text, &bytes, &error));
    REFUSED(SP_ERR_ARGUMENT, "n_tokens",
            sp_engine_decode(w.engine, &token, -1, true, &text, &bytes, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_text",
            sp_engine_decode(w.engine, &token, 1, true, NULL, &bytes, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_bytes",
            sp_engine_decode(w.engine, &token, 1, true, &text, NULL, &error));
    assert_null(text);
    assert_null(tokens);
}

static void requests(void **state)
{
    const int32_t token = 1;
    sp_request request;
    const char *name;
    sp_digest digest;
    int64_t id = -3;

    (void)state;
    sp_request_default(&request, sizeof request);
    request.tokens = &token;
    request.n_tokens = 1;
    request.max_tokens = 1;
    REFUSED(SP_ERR_ARGUMENT, "engine", sp_engine_submit(NULL, &request, &id, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_request", sp_engine_submit(w.engine, NULL, &id, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_id", sp_engine_submit(w.engine, &request, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "engine", sp_engine_check(NULL, &request, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_request", sp_engine_check(w.engine, NULL, &error));
    request.n_tokens = INT32_MAX;
    request.tokens = NULL;
    REFUSED(SP_ERR_INPUT, "prompt", sp_engine_check(w.engine, &request, &error));
    request.tokens = &token;
    request.n_tokens = -1;
    REFUSED(SP_ERR_INPUT, "prompt", sp_engine_check(w.engine, &request, &error));
    request.n_tokens = 1;
    request.n_stop = 1;
    REFUSED(SP_ERR_ARGUMENT, "stop", sp_engine_check(w.engine, &request, &error));
    request.n_stop = 0;
    request.n_logit_bias = 1;
    REFUSED(SP_ERR_ARGUMENT, "logit_bias", sp_engine_check(w.engine, &request, &error));
    request.n_logit_bias = 0;
    request.lora_scale = NAN;
    REFUSED(SP_ERR_INPUT, "lora_scale", sp_engine_check(w.engine, &request, &error));
    assert_int_equal(id, -3);
    REFUSED(SP_ERR_ARGUMENT, "engine", sp_engine_cancel(NULL, 1, &error));
    REFUSED(SP_ERR_NOT_FOUND, "-1", sp_engine_cancel(w.engine, -1, &error));
    REFUSED(SP_ERR_ARGUMENT, "engine", sp_engine_set_paused(NULL, 1, true, &error));
    REFUSED(SP_ERR_NOT_FOUND, "-1", sp_engine_set_paused(w.engine, -1, true, &error));
    REFUSED(SP_ERR_ARGUMENT, "engine", sp_engine_step(NULL, NULL, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "engine", sp_engine_request_adapter(NULL, 1, &name, &digest, &error));
    REFUSED(SP_ERR_NOT_FOUND, "99",
            sp_engine_request_adapter(w.engine, 99, &name, &digest, &error));
}

static void constraints(void **state)
{
    sp_constraint *constraint = NULL;
    sp_constraint_options options;

    (void)state;
    sp_constraint_options_default(&options, sizeof options);
    REFUSED(SP_ERR_ARGUMENT, "engine", sp_engine_compile(NULL, &options, &constraint, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_constraint_options",
            sp_engine_compile(w.engine, NULL, &constraint, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_constraint", sp_engine_compile(w.engine, &options, NULL, &error));
    options.kind = SP_CONSTRAINT_REGEX;
    options.text_bytes = 1;
    REFUSED(SP_ERR_ARGUMENT, "text", sp_engine_compile(w.engine, &options, &constraint, &error));
    assert_null(constraint);
    sp_constraint_retain(NULL);
    sp_constraint_release(NULL);
}

static void engine_stats(void **state)
{
    sp_engine_stats stats = {.struct_bytes = sizeof stats};

    (void)state;
    REFUSED(SP_ERR_ARGUMENT, "engine", sp_engine_get_stats(NULL, &stats, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_engine_stats", sp_engine_get_stats(w.engine, NULL, &error));
    assert_null(sp_engine_stage(NULL));
}

static void engine_memory(void **state)
{
    const char config[] = "{}";
    const sp_tensor_view view = {.struct_bytes = sizeof view};
    sp_adapter *adapter = NULL;

    (void)state;
    REFUSED(SP_ERR_ARGUMENT, "engine", sp_engine_check_weights(NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "engine",
            sp_engine_read_tensors(NULL, "b", config, 2, &view, 1, &adapter, &error));
    REFUSED(SP_ERR_ARGUMENT, "name",
            sp_engine_read_tensors(w.engine, NULL, config, 2, &view, 1, &adapter, &error));
    REFUSED(SP_ERR_ARGUMENT, "config",
            sp_engine_read_tensors(w.engine, "b", NULL, 2, &view, 1, &adapter, &error));
    REFUSED(SP_ERR_ARGUMENT, "views",
            sp_engine_read_tensors(w.engine, "b", config, 2, NULL, 1, &adapter, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_adapter",
            sp_engine_read_tensors(w.engine, "b", config, 2, &view, 1, NULL, &error));
    assert_null(adapter);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        MISUSE(the_allocator),   MISUSE(executors),
        MISUSE(devices),         MISUSE(copies),
        MISUSE(streams),         MISUSE(events),
        MISUSE(geometries),      MISUSE(adapters),
        MISUSE(safetensors),     MISUSE(layouts),
        MISUSE(pools),           MISUSE(handles),
        MISUSE(loads_in_pieces), MISUSE(slots_that_are_opened),
        MISUSE(plans),           MISUSE(engines),
        MISUSE(texts),           MISUSE(requests),
        MISUSE(constraints),     MISUSE(engine_stats),
        MISUSE(engine_memory),
    };
    return cmocka_run_group_tests(tests, misuse_open_world, misuse_close_world);
}
