/*
 * test_stage.c: the registry and the room's promises, on adapters of the fixtures, with loader
 * threads and without. Random lives are test_stage_sim.c's.
 */
#include "base/alloc.h"
#include "base/file.h"
#include "support/faulty_device.h"
#include "support/test.h"

#include <sidepath/stage.h>

#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define ADAPTERS SP_TEST_FIXTURES "/qwen3-tied/adapters/"

typedef struct world {
    sp_geometry *geometry;
    sp_layout *layout;
    sp_device *device;
    sp_pool *pool;
    sp_stage_source disk;
    sp_stage *stage;
} world;

static world *world_create(int32_t slots, int32_t threads, size_t budget)
{
    world *w = sp_calloc(1, sizeof *w);
    sp_adapter_options adapter_options;
    sp_layout_options layout_options;
    sp_pool_options pool_options;
    sp_stage_options options;
    sp_error error;

    assert_non_null(w);
    assert_ok(sp_geometry_open(SP_TEST_FIXTURES "/qwen3-tied", &w->geometry, &error), &error);
    sp_layout_options_default(&layout_options, sizeof layout_options);
    layout_options.geometry = w->geometry;
    layout_options.rank = 16;
    layout_options.dtype = SP_DTYPE_BF16;
    assert_ok(sp_layout_create(&layout_options, &w->layout, &error), &error);
    assert_ok(sp_device_open("cpu", NULL, &w->device, NULL), NULL);
    sp_pool_options_default(&pool_options, sizeof pool_options);
    pool_options.layout = w->layout;
    pool_options.device = w->device;
    pool_options.slots = slots;
    assert_ok(sp_pool_create(&pool_options, &w->pool, &error), &error);
    sp_adapter_options_default(&adapter_options, sizeof adapter_options);
    adapter_options.geometry = w->geometry;
    adapter_options.base_dir = SP_TEST_FIXTURES "/qwen3-tied";
    w->disk.struct_bytes = sizeof w->disk;
    assert_ok(sp_disk_source_create(&w->disk, &error), &error);
    sp_stage_options_default(&options, sizeof options);
    options.pool = w->pool;
    options.sources = &w->disk;
    options.n_sources = 1;
    options.audit = &adapter_options;
    options.threads = threads;
    options.host_bytes_max = budget;
    options.base_name = "the-base";
    assert_ok(sp_stage_create(&options, &w->stage, &error), &error);
    return w;
}

static void world_destroy(world *w)
{
    sp_stage_destroy(w->stage);
    sp_disk_source_destroy(&w->disk);
    sp_pool_destroy(w->pool);
    sp_device_close(w->device);
    sp_layout_release(w->layout);
    sp_geometry_release(w->geometry);
    sp_free(w);
}

/* Polls until the load is settled. */
static sp_status settle(const world *w, int64_t ticket, uint64_t *out_generation, sp_error *error)
{
    sp_status status;

    do {
        sp_stage_wait(w->stage, 100);
        sp_stage_poll(w->stage);
        status = sp_stage_result(w->stage, ticket, out_generation, error);
    } while (status == SP_PENDING);
    return status;
}

static sp_status load(const world *w, const char *name, const char *location, bool replace,
                      uint64_t *out_generation, sp_error *error)
{
    sp_stage_load_options options;
    int64_t ticket;
    sp_status status;

    sp_stage_load_options_default(&options, sizeof options);
    options.name = name;
    options.location = location;
    options.replace = replace;
    status = sp_stage_load(w->stage, &options, &ticket, error);
    return status == SP_PENDING ? settle(w, ticket, out_generation, error) : status;
}

static void must_load(const world *w, const char *name, const char *location)
{
    sp_error error;

    assert_ok(load(w, name, location, true, NULL, &error), &error);
}

static sp_stage_version_info find(const world *w, const char *name)
{
    sp_stage_version_info info = {.struct_bytes = sizeof info};
    sp_error error;

    assert_ok(sp_stage_find(w->stage, name, &info, &error), &error);
    return info;
}

static sp_hold hold(const world *w, sp_hold_kind kind, const char *name)
{
    sp_hold held = {.struct_bytes = sizeof held};
    sp_error error;

    assert_ok(sp_stage_hold(w->stage, kind, name, &held, &error), &error);
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

/* ---- tests --------------------------------------------------------------------------------- */

static void test_id_hash(void **state)
{
    (void)state;
    assert_true(sp_stage_id_hash("a", 0) == UINT64_C(0xaf63dc4c8601ec8c));
    assert_true(sp_stage_id_hash("scripture", 0) == UINT64_C(0xc7bea099fc88b678));
    assert_true(sp_stage_id_hash("scripture", 1) == UINT64_C(0x546fcadd27557f99));
    assert_true(sp_stage_id_hash("scripture", 256) == UINT64_C(0xfac77f5e6e3a0853));
}

static void test_names_of_one_content_share(void **state)
{
    world *w = world_create(2, 0, 0);
    sp_stage_version_info one, two;
    sp_stage_stats stats = {.struct_bytes = sizeof stats};

    (void)state;
    must_load(w, "one", ADAPTERS "plain-r8");
    must_load(w, "two", ADAPTERS "plain-r8");
    one = find(w, "one");
    two = find(w, "two");
    assert_int_equal(one.state, SP_STAGE_VERSION_READY);
    assert_int_equal(one.slot, two.slot);
    assert_true(one.generation != two.generation && one.id_hash != two.id_hash);
    assert_ok(sp_stage_get_stats(w->stage, &stats, NULL), NULL);
    assert_int_equal(stats.n_images, 1);
    assert_true(stats.copies == 1);
    assert_int_equal(sp_stage_unload(w->stage, "one", NULL), SP_OK);
    assert_int_equal(find(w, "two").state, SP_STAGE_VERSION_READY);
    world_destroy(w);
}

static void test_replace_keeps_the_old_for_its_holders(void **state)
{
    world *w = world_create(2, 0, 0);
    uint64_t generation;
    sp_hold old, new;
    sp_error error;

    (void)state;
    must_load(w, "x", ADAPTERS "plain-r8");
    old = hold(w, SP_HOLD_NAMED, "x");
    assert_int_equal(request(w, &old), SP_OK);
    assert_int_equal(load(w, "x", ADAPTERS "attn-r4", false, NULL, &error), SP_ERR_STATE);
    assert_string_equal(error.code, "name-taken");
    assert_ok(load(w, "x", ADAPTERS "attn-r4", true, &generation, &error), &error);
    assert_true(generation > sp_stage_version_generation(old.version));
    new = hold(w, SP_HOLD_NAMED, "x");
    assert_true(sp_stage_version_generation(new.version) == generation);
    assert_int_equal(request(w, &new), SP_OK);
    assert_true(new.slot != old.slot);
    assert_int_equal(sp_stage_n_versions(w->stage), 2);
    sp_stage_release(w->stage, &old);
    assert_int_equal(sp_stage_n_versions(w->stage), 1);
    sp_stage_release(w->stage, &new);
    world_destroy(w);
}

static void test_expected_generation(void **state)
{
    world *w = world_create(2, 0, 0);
    sp_stage_load_options options;
    int64_t ticket;
    sp_error error;

    (void)state;
    must_load(w, "x", ADAPTERS "plain-r8");
    sp_stage_load_options_default(&options, sizeof options);
    options.name = "x";
    options.location = ADAPTERS "attn-r4";
    options.replace = true;
    options.expected_generation = find(w, "x").generation + 1;
    assert_int_equal(sp_stage_load(w->stage, &options, &ticket, &error), SP_ERR_STATE);
    assert_string_equal(error.code, "generation-changed");
    options.expected_generation = find(w, "x").generation;
    assert_int_equal(sp_stage_load(w->stage, &options, &ticket, &error), SP_PENDING);
    assert_ok(settle(w, ticket, NULL, &error), &error);
    world_destroy(w);
}

static void test_full_pool(void **state)
{
    world *w = world_create(1, 0, 0);
    sp_stage_version_info info = {.struct_bytes = sizeof info};
    sp_hold a, b;
    sp_error error;

    (void)state;
    must_load(w, "a", ADAPTERS "plain-r8");
    a = hold(w, SP_HOLD_NAMED, "a");
    assert_int_equal(request(w, &a), SP_OK);
    /* A new name waits on the host; a replacement beside a version in use finds no slot. */
    must_load(w, "b", ADAPTERS "attn-r4");
    assert_int_equal(find(w, "b").state, SP_STAGE_VERSION_HOST);
    assert_int_equal(load(w, "a", ADAPTERS "ffn", true, NULL, &error), SP_POOL_FULL);
    info = find(w, "a");
    assert_memory_equal(&info.digest, sp_stage_version_digest(a.version), SP_DIGEST_BYTES);
    b = hold(w, SP_HOLD_NAMED, "b");
    assert_int_equal(request(w, &b), SP_POOL_FULL);
    sp_stage_release(w->stage, &a);
    assert_int_equal(request(w, &b), SP_OK);
    assert_int_equal(find(w, "a").state, SP_STAGE_VERSION_HOST);
    sp_stage_release(w->stage, &b);
    /* Idle, the only slot's version may be replaced in its place. */
    assert_ok(load(w, "b", ADAPTERS "ffn", true, NULL, &error), &error);
    b = hold(w, SP_HOLD_NAMED, "b");
    assert_int_equal(request(w, &b), SP_OK);
    sp_stage_release(w->stage, &b);
    world_destroy(w);
}

static void test_pins(void **state)
{
    world *w = world_create(1, 0, 0);
    sp_hold b;
    sp_error error;

    (void)state;
    must_load(w, "a", ADAPTERS "plain-r8");
    assert_int_equal(sp_stage_set_pinned(w->stage, "a", true, &error), SP_OK);
    must_load(w, "b", ADAPTERS "attn-r4");
    b = hold(w, SP_HOLD_NAMED, "b");
    assert_int_equal(sp_stage_request(w->stage, &b, false, &error), SP_ERR_SLOTS_PINNED);
    sp_stage_release(w->stage, &b);
    assert_int_equal(sp_stage_unload(w->stage, "a", &error), SP_ERR_STATE);
    assert_string_equal(error.code, "pinned");
    assert_int_equal(sp_stage_set_pinned(w->stage, "a", false, &error), SP_OK);
    assert_int_equal(sp_stage_unload(w->stage, "a", &error), SP_OK);
    assert_int_equal(sp_stage_unload(w->stage, "a", &error), SP_ERR_NOT_FOUND);
    world_destroy(w);
}

static void test_active_is_default_only(void **state)
{
    world *w = world_create(2, 0, 0);
    sp_hold before, after, named;

    (void)state;
    must_load(w, "a", ADAPTERS "plain-r8");
    must_load(w, "b", ADAPTERS "attn-r4");
    before = hold(w, SP_HOLD_DEFAULT, NULL);
    assert_null(before.version);
    assert_int_equal(sp_stage_set_active(w->stage, "b", NULL), SP_OK);
    after = hold(w, SP_HOLD_DEFAULT, NULL);
    named = hold(w, SP_HOLD_NAMED, "a");
    assert_string_equal(sp_stage_version_name(after.version), "b");
    assert_string_equal(sp_stage_version_name(named.version), "a");
    assert_int_equal(sp_stage_set_active(w->stage, "c", NULL), SP_ERR_NOT_FOUND);
    assert_int_equal(sp_stage_unload(w->stage, "b", NULL), SP_BUSY);
    assert_null(hold(w, SP_HOLD_DEFAULT, NULL).version);
    sp_stage_release(w->stage, &after);
    sp_stage_release(w->stage, &named);
    world_destroy(w);
}

/* No adapter has the base's name, and where a request or the active adapter is named so, the base
 * is meant. Names that no adapter may have are refused before anything begins. */
static void test_the_bases_name(void **state)
{
    static const char *const bad[] = {"the-base", "", "a:b", "..", " a", "a\n"};
    world *w = world_create(2, 0, 0);
    sp_stage_version_info info = {.struct_bytes = sizeof info};
    sp_error error;
    sp_hold x;

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(load(w, bad[i], ADAPTERS "plain-r8", false, NULL, &error), SP_ERR_INPUT);
    assert_int_equal(sp_stage_n_versions(w->stage), 0);
    must_load(w, "a", ADAPTERS "plain-r8");
    assert_int_equal(sp_stage_set_active(w->stage, "a", NULL), SP_OK);
    assert_null(hold(w, SP_HOLD_NAMED, "the-base").version);
    x = hold(w, SP_HOLD_DEFAULT, NULL);
    assert_string_equal(sp_stage_version_name(x.version), "a");
    assert_ok(sp_stage_request(w->stage, &x, false, &error), &error);
    assert_ok(sp_stage_find(w->stage, "a", &info, &error), &error);
    assert_int_equal(info.references, 1);
    assert_int_equal(info.in_slot, 1);
    sp_stage_yield(w->stage, &x);
    assert_ok(sp_stage_find(w->stage, "a", &info, &error), &error);
    assert_int_equal(info.references, 1);
    assert_int_equal(info.in_slot, 0);
    sp_stage_release(w->stage, &x);
    assert_int_equal(sp_stage_set_active(w->stage, "the-base", NULL), SP_OK);
    assert_null(hold(w, SP_HOLD_DEFAULT, NULL).version);
    world_destroy(w);
}

/* The folder cut at many bytes: each is a named error, and the old version serves on. */
static void test_cut_files_leave_the_old_state(void **state)
{
    world *w = world_create(2, 0, 0);
    char *directory = sp_test_make_directory(), *config, *weights;
    size_t config_bytes, weights_bytes, n_failed = 0;
    sp_stage_version_info info = {.struct_bytes = sizeof info};
    sp_digest digest;
    sp_error error;
    sp_hold x;

    (void)state;
    assert_ok(sp_file_read_all(ADAPTERS "r1/adapter_config.json", 1u << 20, &config, &config_bytes,
                               &error),
              &error);
    assert_ok(sp_file_read_all(ADAPTERS "r1/adapter_model.safetensors", 1u << 24, &weights,
                               &weights_bytes, &error),
              &error);
    must_load(w, "x", ADAPTERS "plain-r8");
    digest = find(w, "x").digest;
    sp_test_write_file(directory, "adapter_config.json", config, config_bytes);
    for (size_t cut = 0; cut < weights_bytes; cut += 1 + cut / 3) {
        sp_test_write_file(directory, "adapter_model.safetensors", weights, cut);
        assert_true(load(w, "x", directory, true, NULL, &error) < 0);
        assert_true(error.text[0] != '\0');
        info = find(w, "x");
        assert_memory_equal(&info.digest, &digest, sizeof digest);
        assert_int_equal(info.state, SP_STAGE_VERSION_READY);
        n_failed++;
    }
    assert_true(n_failed > 20);
    sp_test_write_file(directory, "adapter_model.safetensors", weights, weights_bytes);
    assert_ok(load(w, "x", directory, true, NULL, &error), &error);
    sp_test_remove_tree(directory);
    /* The files are gone, the host cache serves on. */
    must_load(w, "y", ADAPTERS "plain-r8");
    must_load(w, "z", ADAPTERS "attn-r4");
    x = hold(w, SP_HOLD_NAMED, "x");
    assert_int_equal(request(w, &x), SP_OK);
    sp_stage_release(w->stage, &x);
    sp_free(config);
    sp_free(weights);
    sp_free(directory);
    world_destroy(w);
}

static void test_content_changed_on_disk(void **state)
{
    world *probe = world_create(1, 0, 0);
    sp_stage_stats stats = {.struct_bytes = sizeof stats};
    size_t image_bytes;
    char *directory = sp_test_make_directory(), *bytes;
    const char *const files[] = {"adapter_config.json", "adapter_model.safetensors"};
    const char *const from[] = {ADAPTERS "r1/", ADAPTERS "plain-r8/"};
    sp_error error = {.code = ""};
    sp_status status;
    sp_hold x;
    world *w;

    (void)state;
    must_load(probe, "x", ADAPTERS "r1");
    assert_ok(sp_stage_get_stats(probe->stage, &stats, NULL), NULL);
    image_bytes = stats.host_bytes;
    world_destroy(probe);
    w = world_create(1, 0, image_bytes);
    for (size_t version = 0; version < 2; version++) {
        for (size_t i = 0; i < 2; i++) {
            char path[512];
            size_t n;

            snprintf(path, sizeof path, "%s%s", from[version], files[i]);
            assert_ok(sp_file_read_all(path, 1u << 24, &bytes, &n, &error), &error);
            sp_test_write_file(directory, files[i], bytes, n);
            sp_free(bytes);
        }
        if (version == 0) {
            must_load(w, "x", directory);
            must_load(w, "y", ADAPTERS "attn-r4"); /* drives x out of slot and host */
            assert_int_equal(find(w, "x").state, SP_STAGE_VERSION_DISK);
        }
    }
    x = hold(w, SP_HOLD_NAMED, "x");
    do {
        sp_stage_poll(w->stage);
        status = sp_stage_request(w->stage, &x, false, &error);
    } while (status == SP_PENDING);
    assert_int_equal(status, SP_ERR_MISMATCH);
    assert_string_equal(error.code, "content-changed");
    sp_stage_release(w->stage, &x);
    sp_test_remove_tree(directory);
    sp_free(directory);
    world_destroy(w);
}

static void test_options(void **state)
{
    world *w = world_create(1, 0, 0);
    sp_stage_options options;
    sp_stage *stage;
    sp_error error;

    (void)state;
    sp_stage_options_default(&options, sizeof options);
    options.pool = w->pool;
    options.host_bytes_max = 1;
    assert_int_equal(sp_stage_create(&options, &stage, &error), SP_ERR_BUDGET);
    options.host_bytes_max = 0;
    options.threads = 65;
    assert_int_equal(sp_stage_create(&options, &stage, &error), SP_ERR_ARGUMENT);
    world_destroy(w);
}

/* At start: from adapters that are open already, into slots while there are some. */
static void test_start_up(void **state)
{
    static const char *const locations[] = {"plain-r8", "attn-r4", "ffn"};
    world *w = world_create(2, 0, 0);
    sp_adapter_options audit;
    sp_error error;

    (void)state;
    sp_adapter_options_default(&audit, sizeof audit);
    audit.geometry = w->geometry;
    for (int32_t i = 0; i < 3; i++) {
        sp_stage_load_options options;
        sp_adapter *adapter;
        char path[512];

        snprintf(path, sizeof path, ADAPTERS "%s", locations[i]);
        assert_ok(sp_adapter_open(path, &audit, &adapter, &error), &error);
        assert_ok(sp_adapter_check_modules(adapter, sp_adapter_modules(adapter), &error), &error);
        assert_int_equal(sp_adapter_check_modules(adapter, 0, &error), SP_ERR_UNSUPPORTED);
        assert_string_equal(error.code, "engine-unsupported");
        sp_stage_load_options_default(&options, sizeof options);
        options.name = locations[i];
        options.location = path;
        assert_ok(sp_stage_add(w->stage, &options, adapter, &error), &error);
        assert_int_equal(find(w, locations[i]).facts->rank, sp_adapter_rank_max(adapter));
        assert_non_null(strstr(find(w, locations[i]).facts->receipt, "\"verdict\": \"accepted\""));
        assert_int_equal(sp_stage_add(w->stage, &options, adapter, &error), SP_ERR_STATE);
        options.name = "pinned";
        options.pinned = true;
        if (i == 2) { /* no slot is EMPTY any more */
            assert_int_equal(sp_stage_add(w->stage, &options, adapter, &error), SP_POOL_FULL);
            assert_int_equal(sp_stage_find(w->stage, "pinned", NULL, &error), SP_ERR_NOT_FOUND);
        }
        sp_adapter_release(adapter);
    }
    assert_int_equal(find(w, "plain-r8").state, SP_STAGE_VERSION_READY);
    assert_int_equal(find(w, "attn-r4").state, SP_STAGE_VERSION_READY);
    assert_int_equal(find(w, "ffn").state, SP_STAGE_VERSION_HOST);
    assert_string_equal(sp_stage_version_state_name(find(w, "ffn").state), "host");
    assert_string_equal(sp_stage_version_state_name((sp_stage_version_state)9), "unknown");
    /* Rank 8 on all seven modules of 4 layers; hidden 64, FFN 160, 4 heads and 2 kv heads of 32:
     * 4 * 8 * ((64 + 128) + 2 * (64 + 64) + (128 + 64) + 3 * (64 + 160)) multiply-adds. */
    assert_int_equal(find(w, "plain-r8").facts->sites, 28);
    assert_true(find(w, "plain-r8").facts->row_macs >= 41984.0);
    assert_true(find(w, "plain-r8").facts->row_macs <= 41984.0);
    world_destroy(w);
}

static void test_ask_takes_nothing(void **state)
{
    world *w = world_create(1, 0, 0);
    sp_hold a, b;
    sp_error error;

    (void)state;
    must_load(w, "a", ADAPTERS "plain-r8");
    must_load(w, "b", ADAPTERS "attn-r4"); /* has the slot */
    a = hold(w, SP_HOLD_NAMED, "a");
    b = hold(w, SP_HOLD_NAMED, "b");
    assert_int_equal(sp_stage_ask(w->stage, &b, false, &error), SP_OK);
    assert_int_equal(b.slot, -1);
    assert_int_equal(sp_stage_ask(w->stage, &b, true, &error), SP_AGAIN);
    assert_int_equal(sp_stage_ask(w->stage, &a, false, &error), SP_PENDING);
    for (int32_t i = 0; i < 3; i++)
        sp_stage_poll(w->stage);
    /* Loaded for a, which has not had it: not even for b is it taken away again. */
    assert_int_equal(sp_stage_ask(w->stage, &a, true, &error), SP_OK);
    assert_int_equal(sp_stage_ask(w->stage, &b, false, &error), SP_POOL_FULL);
    assert_int_equal(sp_stage_request(w->stage, &a, true, &error), SP_OK);
    sp_stage_release(w->stage, &a);
    assert_int_equal(request(w, &b), SP_OK);
    sp_stage_release(w->stage, &b);
    world_destroy(w);
}

static void test_forgotten_loads_go_on(void **state)
{
    world *w = world_create(1, 0, 0);
    sp_stage_load_options options;
    int64_t ticket;
    sp_error error;

    (void)state;
    sp_stage_load_options_default(&options, sizeof options);
    options.name = "a";
    options.location = ADAPTERS "plain-r8";
    assert_int_equal(sp_stage_load(w->stage, &options, &ticket, &error), SP_PENDING);
    sp_stage_forget(w->stage, ticket);
    assert_int_equal(sp_stage_result(w->stage, ticket, NULL, &error), SP_ERR_NOT_FOUND);
    while (sp_stage_poll(w->stage) != SP_AGAIN)
        continue;
    assert_int_equal(find(w, "a").state, SP_STAGE_VERSION_READY);
    world_destroy(w);
}

/* Eight names through two slots with real threads, while requests come and go. */
static void test_threads(void **state)
{
    static const char *const locations[] = {"plain-r8",   "attn-r4",  "ffn",   "r1",
                                            "rslora-r16", "patterns", "regex", "layers-subset"};
    world *w = world_create(2, 2, 0);
    int64_t tickets[8];
    sp_error error;

    (void)state;
    for (int32_t i = 0; i < 8; i++) {
        sp_stage_load_options options;
        char path[512];

        sp_stage_load_options_default(&options, sizeof options);
        snprintf(path, sizeof path, ADAPTERS "%s", locations[i]);
        options.name = locations[i];
        options.location = path;
        assert_int_equal(sp_stage_load(w->stage, &options, &tickets[i], &error), SP_PENDING);
    }
    for (int32_t i = 0; i < 8; i++)
        assert_ok(settle(w, tickets[i], NULL, &error), &error);
    for (int32_t round = 0; round < 40; round++) {
        sp_hold a = hold(w, SP_HOLD_NAMED, locations[round % 8]);
        sp_hold b = hold(w, SP_HOLD_NAMED, locations[(round * 3 + 1) % 8]);

        assert_int_equal(request(w, &a), SP_OK);
        assert_int_equal(request(w, &b), SP_OK);
        sp_stage_use(w->stage, &a, 1);
        sp_stage_release(w->stage, &a);
        sp_stage_release(w->stage, &b);
    }
    for (int32_t i = 0; i < 8; i += 2)
        assert_int_equal(sp_stage_unload(w->stage, locations[i], NULL), SP_OK);
    for (int32_t i = 0; i < 4; i++) { /* destroyed with loads under way */
        sp_stage_load_options options;

        sp_stage_load_options_default(&options, sizeof options);
        options.name = locations[2 * i];
        options.location = ADAPTERS "plain-r8";
        assert_int_equal(sp_stage_load(w->stage, &options, &tickets[i], &error), SP_PENDING);
    }
    world_destroy(w);
}

static int leaks_nothing(void **state)
{
    (void)state;
    return sp_alloc_blocks() == 0 ? 0 : -1;
}

/* ---- copies that fail ---------------------------------------------------------------------- */

/* What the tables of one slot say of a site, and the bytes that they lead to. */
typedef struct slot_view {
    char *data; /* [slot_bytes] */
    int32_t rank;
    float scale;
} slot_view;

static slot_view view_slot(const world *w, int32_t slot)
{
    size_t bytes = sp_layout_slot_bytes(w->layout);
    slot_view view = {.data = sp_malloc(bytes)};
    const sp_pool_tables *tables = sp_pool_tables_at(w->pool, 0);

    assert_non_null(view.data);
    assert_non_null(tables);
    memcpy(view.data, tables->a[slot], bytes); /* the first site's A is the slot's first byte */
    view.rank = tables->rank[slot];
    view.scale = tables->scale[slot];
    return view;
}

static void expect_view(const world *w, int32_t slot, const slot_view *want)
{
    slot_view got = view_slot(w, slot);

    assert_int_equal(got.rank, want->rank);
    assert_true(got.scale == want->scale);
    assert_memory_equal(got.data, want->data, sp_layout_slot_bytes(w->layout));
    sp_free(got.data);
}

static int32_t count_slots(const world *w, sp_slot_state state)
{
    sp_slot_info info = {.struct_bytes = sizeof info};
    int32_t n = 0;

    for (int32_t i = 0; sp_pool_slot_info(w->pool, i, &info, NULL) == SP_OK; i++)
        n += info.state == state;
    return n;
}

/* Loads under a name, failing each device call in turn, until one load goes through untouched. */
static void load_with_every_fault(const world *w, const char *name, const char *location,
                                  void (*check)(const world *w, void *user), void *user)
{
    size_t device_bytes = sp_device_allocated_bytes(w->device);
    int64_t n = 0;

    for (;; n++) {
        size_t blocks = sp_alloc_blocks();
        sp_error error = {0};
        sp_status status;

        faulty_device_fail_after(n);
        status = load(w, name, location, true, NULL, &error);
        faulty_device_fail_after(-1);
        if (status == SP_OK)
            break;
        assert_int_equal(status, SP_ERR_DEVICE);
        assert_int_equal(error.status, SP_ERR_DEVICE);
        assert_true(strlen(error.text) > 10);
        assert_int_equal(sp_device_allocated_bytes(w->device), device_bytes);
        check(w, user);
        assert_int_equal(sp_alloc_blocks(), blocks);
    }
    assert_true(n > 2); /* copy, wait, tables: each has failed */
}

typedef struct old_state {
    sp_stage_version_info info;
    slot_view view;
    const sp_hold *held;
} old_state;

static void old_version_serves(const world *w, void *user)
{
    const old_state *old = user;
    sp_stage_version_info now = find(w, "a");

    assert_int_equal(now.generation, old->info.generation);
    assert_memory_equal(&now.digest, &old->info.digest, sizeof now.digest);
    assert_int_equal(now.state, SP_STAGE_VERSION_READY);
    assert_int_equal(now.slot, old->info.slot);
    assert_int_equal(count_slots(w, SP_SLOT_READY), 1);
    assert_int_equal(count_slots(w, SP_SLOT_EMPTY), 1);
    expect_view(w, old->held->slot, &old->view);
    assert_int_equal(sp_stage_n_versions(w->stage), 1);
}

/* A replacement whose copy fails at any call: the old version serves on, its requests too. */
static void test_failed_copies_of_a_replacement(void **state)
{
    (void)state;
    for (int32_t threads = 0; threads < 2; threads++) {
        size_t blocks = sp_alloc_blocks();
        world *w = world_create(2, threads, 0);
        old_state old;
        sp_hold held;

        faulty_device_wrap(w->device);
        must_load(w, "a", ADAPTERS "plain-r8");
        held = hold(w, SP_HOLD_NAMED, "a");
        assert_int_equal(request(w, &held), SP_OK);
        old = (old_state){find(w, "a"), view_slot(w, held.slot), &held};
        load_with_every_fault(w, "a", ADAPTERS "r1", old_version_serves, &old);
        assert_true(find(w, "a").generation > old.info.generation);
        assert_true(find(w, "a").slot != held.slot);
        expect_view(w, held.slot, &old.view); /* until its request lets go */
        sp_stage_release(w->stage, &held);
        sp_free(old.view.data);
        world_destroy(w);
        assert_int_equal(sp_alloc_blocks(), blocks);
    }
}

static void b_is_unknown_and_a_can_be_had(const world *w, void *user)
{
    const slot_view *a = user;
    sp_stage_version_info info = {.struct_bytes = sizeof info};
    sp_hold held = hold(w, SP_HOLD_NAMED, "a");

    assert_int_equal(sp_stage_find(w->stage, "b", &info, NULL), SP_ERR_NOT_FOUND);
    assert_int_equal(request(w, &held), SP_OK); /* back from the host, if it lost its slot */
    expect_view(w, held.slot, a);
    sp_stage_release(w->stage, &held);
}

/* A new adapter that takes the only slot from an idle one, and fails: the idle one comes back. */
static void test_failed_copies_over_a_victim(void **state)
{
    (void)state;
    for (int32_t threads = 0; threads < 2; threads++) {
        world *w = world_create(1, threads, 0);
        slot_view a;

        faulty_device_wrap(w->device);
        must_load(w, "a", ADAPTERS "plain-r8");
        a = view_slot(w, 0);
        load_with_every_fault(w, "b", ADAPTERS "r1", b_is_unknown_and_a_can_be_had, &a);
        assert_int_equal(find(w, "b").state, SP_STAGE_VERSION_READY);
        sp_free(a.data);
        world_destroy(w);
    }
}

/* Its threads are the parent's: joining them would take for ever. */
static void test_a_child_destroys_its_parents_stage(void **state)
{
    world *w = world_create(2, 2, 0);
    int status = -1;
    pid_t child;

    (void)state;
    must_load(w, "one", ADAPTERS "plain-r8");
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        alarm(20);
        world_destroy(w);
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    must_load(w, "two", ADAPTERS "regex");
    world_destroy(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_id_hash, leaks_nothing),
        cmocka_unit_test_teardown(test_names_of_one_content_share, leaks_nothing),
        cmocka_unit_test_teardown(test_replace_keeps_the_old_for_its_holders, leaks_nothing),
        cmocka_unit_test_teardown(test_expected_generation, leaks_nothing),
        cmocka_unit_test_teardown(test_full_pool, leaks_nothing),
        cmocka_unit_test_teardown(test_pins, leaks_nothing),
        cmocka_unit_test_teardown(test_active_is_default_only, leaks_nothing),
        cmocka_unit_test_teardown(test_the_bases_name, leaks_nothing),
        cmocka_unit_test_teardown(test_cut_files_leave_the_old_state, leaks_nothing),
        cmocka_unit_test_teardown(test_content_changed_on_disk, leaks_nothing),
        cmocka_unit_test_teardown(test_a_child_destroys_its_parents_stage, leaks_nothing),
        cmocka_unit_test_teardown(test_options, leaks_nothing),
        cmocka_unit_test_teardown(test_start_up, leaks_nothing),
        cmocka_unit_test_teardown(test_ask_takes_nothing, leaks_nothing),
        cmocka_unit_test_teardown(test_forgotten_loads_go_on, leaks_nothing),
        cmocka_unit_test_teardown(test_threads, leaks_nothing),
        cmocka_unit_test(test_failed_copies_of_a_replacement),
        cmocka_unit_test(test_failed_copies_over_a_victim),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
