/*
 * The catalogue of a directory without a network: pins keep bytes, the budget evicts the oldest, a
 * new version retires the old one, a packer's image comes after the tensors.
 */
#include "peer/peer_catalog.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "support/peer_world.h"
#include "support/test.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define RANK    8
#define LAYERS  16 /* 32 KiB: two in 64 KiB */
#define BYTES   (2 * LAYERS * RANK * 64 * 2)
#define WAIT_NS ((uint64_t)20 * 1000000000)

typedef struct scene {
    peer_world world; /* its directory alone */
    sp_peer_catalog *catalog;
    atomic_int registered;
    size_t blocks;
} scene;

static void *count_registered(void *user, void *memory, size_t bytes)
{
    (void)bytes;
    atomic_fetch_add(&((scene *)user)->registered, 1);
    return memory;
}

static void count_unregistered(void *user, void *handle)
{
    (void)handle;
    atomic_fetch_sub(&((scene *)user)->registered, 1);
}

static void begin(scene *s, uint64_t memory_bytes, const sp_peer_packer *packer)
{
    sp_adapter_options audit;
    sp_peer_catalog_options options = {
        .directory = NULL,
        .audit = &audit,
        .packer = packer,
        .memory_bytes = memory_bytes,
        .rescan_ms = 20,
        .events = {.user = s,
                   .register_memory = count_registered,
                   .unregister_memory = count_unregistered},
    };
    sp_error error;

    s->blocks = sp_alloc_blocks();
    s->registered = 0;
    peer_world_create(&s->world);
    peer_world_adapter(&s->world, "a", LAYERS, RANK, 1);
    peer_world_adapter(&s->world, "b", LAYERS, RANK, 2);
    peer_world_adapter(&s->world, "c", LAYERS, RANK, 3);
    sp_adapter_options_default(&audit, sizeof audit);
    options.directory = s->world.directory;
    assert_ok(sp_peer_catalog_create(&options, &s->catalog, &error), &error);
}

static void end(scene *s)
{
    sp_peer_catalog_destroy(s->catalog);
    assert_int_equal(s->registered, 0);
    peer_world_destroy(&s->world);
    assert_int_equal(sp_alloc_blocks(), s->blocks);
}

static sp_peer_entry *find(const scene *s, const char *name)
{
    uint64_t end_ns = sp_clock_ns() + WAIT_NS;
    sp_peer_entry *entry = NULL;
    sp_error error;
    sp_status status;

    while ((status = sp_peer_catalog_find(s->catalog, name, NULL, &entry, &error)) == SP_PENDING &&
           sp_clock_ns() < end_ns)
        usleep(2000);
    assert_ok(status, &error);
    return entry;
}

static sp_status pin(const scene *s, sp_peer_entry *entry, const char **out_block)
{
    uint64_t end_ns = sp_clock_ns() + WAIT_NS;
    void *registered;
    sp_status status;

    while ((status = sp_peer_entry_pin(s->catalog, entry, out_block, &registered)) == SP_PENDING &&
           sp_clock_ns() < end_ns)
        usleep(2000);
    return status;
}

static void check_bytes(const char *block, uint64_t seed)
{
    size_t n;
    void *want = peer_world_bytes(LAYERS, RANK, seed, &n);

    assert_int_equal(n, BYTES);
    assert_memory_equal(block, want, n);
    sp_free(want);
}

static void the_oldest_gives_way_and_the_pinned_stays(void **state)
{
    sp_peer_entry *entries[3];
    sp_peer_catalog_counts counts = {0};
    const char *block;
    void *registered;
    scene s;

    (void)state;
    begin(&s, 2 * BYTES, NULL);
    for (int i = 0; i < 3; i++)
        entries[i] = find(&s, (const char *[]){"a", "b", "c"}[i]);
    assert_int_equal(pin(&s, entries[0], &block), SP_OK);
    check_bytes(block, 1);
    for (int i = 0; i < 6; i++) {
        const char *other;

        assert_int_equal(pin(&s, entries[1 + i % 2], &other), SP_OK);
        check_bytes(other, (uint64_t)(2 + i % 2));
        sp_peer_entry_unpin(s.catalog, entries[1 + i % 2]);
    }
    check_bytes(block, 1); /* it was not moved */
    sp_peer_catalog_count(s.catalog, &counts);
    assert_int_equal(counts.offered, 3);
    assert_int_equal(counts.memory_bytes, 2 * BYTES);
    assert_int_equal(counts.pinned_bytes, BYTES);
    assert_true(counts.evictions >= 5);
    assert_int_equal(s.registered, 2);
    /* With both pinned the third waits, and has its turn when one is unpinned. */
    assert_int_equal(pin(&s, entries[1], &block), SP_OK);
    assert_int_equal(sp_peer_entry_pin(s.catalog, entries[2], &block, &registered), SP_PENDING);
    usleep(100000);
    assert_int_equal(sp_peer_entry_pin(s.catalog, entries[2], &block, &registered), SP_PENDING);
    sp_peer_entry_unpin(s.catalog, entries[0]);
    assert_int_equal(pin(&s, entries[2], &block), SP_OK);
    check_bytes(block, 3);
    sp_peer_entry_unpin(s.catalog, entries[1]);
    sp_peer_entry_unpin(s.catalog, entries[2]);
    for (int i = 0; i < 3; i++)
        sp_peer_entry_release(s.catalog, entries[i]);
    end(&s);
}

static void a_new_version_retires_the_old_one(void **state)
{
    sp_peer_entry *old, *new;
    const char *block, *other;
    sp_digest digest;
    scene s;

    (void)state;
    begin(&s, 8 * BYTES, NULL);
    old = find(&s, "a");
    digest = sp_peer_entry_content(old)->digest;
    assert_int_equal(pin(&s, old, &block), SP_OK);
    peer_world_adapter(&s.world, "a", LAYERS, RANK, 9);
    for (;;) {
        new = find(&s, "a");
        if (new != old)
            break;
        sp_peer_entry_release(s.catalog, new);
        usleep(2000);
    }
    assert_memory_not_equal(sp_peer_entry_content(new)->digest.bytes, digest.bytes,
                            SP_DIGEST_BYTES);
    assert_int_equal(pin(&s, new, &other), SP_OK);
    check_bytes(other, 9);
    check_bytes(block, 1); /* pinned: its bytes are still those of its manifest */
    sp_peer_entry_unpin(s.catalog, old);
    sp_peer_entry_unpin(s.catalog, new);
    sp_peer_entry_release(s.catalog, new);
    sp_peer_entry_release(s.catalog, old);
    end(&s);
}

/* The old version's bytes are gone once memory was needed, and are never read again. */
static void an_evicted_old_version_is_lost(void **state)
{
    sp_peer_entry *old, *other;
    const char *block;
    scene s;

    (void)state;
    begin(&s, BYTES, NULL);
    old = find(&s, "a");
    peer_world_adapter(&s.world, "a", LAYERS, RANK, 9);
    other = find(&s, "b");
    assert_int_equal(pin(&s, other, &block), SP_OK);
    sp_peer_entry_unpin(s.catalog, other);
    for (int i = 0; i < 2000 && pin(&s, old, &block) == SP_OK; i++) {
        sp_peer_entry_unpin(s.catalog, old);
        usleep(2000);
    }
    assert_int_equal(pin(&s, old, &block), SP_ERR_PEER_LOST);
    sp_peer_entry_release(s.catalog, old);
    sp_peer_entry_release(s.catalog, other);
    end(&s);
}

/* ---- images ---------------------------------------------------------------------------------- */

static const char image_bytes[300] = "an image";

static sp_status pack(void *user, const sp_adapter *adapter, sp_peer_image *out_image,
                      const void **out_bytes, void **out_handle, sp_error *error)
{
    static int32_t rank = RANK;
    static float scale = 2;

    (void)error;
    assert_int_equal(sp_adapter_rank_max(adapter), RANK);
    *out_image = (sp_peer_image){.bytes = sizeof image_bytes,
                                 .n_sites = 1,
                                 .ranks = &rank,
                                 .scales = &scale,
                                 .rank = RANK,
                                 .pairs = 1};
    *out_bytes = image_bytes;
    *out_handle = user;
    return SP_OK;
}

static void packed(void *user, void *handle)
{
    assert_ptr_equal(user, handle);
    atomic_fetch_add((atomic_int *)user, 1);
}

static void an_image_is_offered_beside_the_tensors(void **state)
{
    atomic_int n_done = 0;
    const sp_peer_packer packer = {&n_done, pack, packed};
    const sp_peer_content *content;
    sp_peer_manifest manifest;
    sp_peer_entry *entry;
    const char *block;
    uint64_t at;
    sp_error error;
    scene s;

    (void)state;
    begin(&s, 8 * BYTES, &packer);
    entry = find(&s, "a");
    content = sp_peer_entry_content(entry);
    assert_int_equal(content->image_bytes, sizeof image_bytes);
    assert_ok(
        sp_peer_manifest_decode(content->manifest.data, content->manifest.bytes, &manifest, &error),
        &error);
    assert_non_null(manifest.image);
    assert_int_equal(manifest.image->bytes, sizeof image_bytes);
    assert_int_equal(manifest.image->ranks[0], RANK);
    sp_peer_manifest_free(&manifest);
    assert_int_equal(pin(&s, entry, &block), SP_OK);
    check_bytes(block, 1);
    assert_true(sp_peer_content_find(content, SP_PEER_PART_IMAGE, 0, sizeof image_bytes, &at));
    assert_memory_equal(block + at, image_bytes, sizeof image_bytes);
    assert_false(sp_peer_content_find(content, SP_PEER_PART_IMAGE, 1, sizeof image_bytes, &at));
    assert_false(sp_peer_content_find(content, SP_PEER_PART_TENSORS, BYTES, 1, &at));
    assert_false(sp_peer_content_find(content, SP_PEER_PART_TENSORS, UINT64_MAX, 2, &at));
    sp_peer_entry_unpin(s.catalog, entry);
    sp_peer_entry_release(s.catalog, entry);
    end(&s);
    assert_true(n_done >= 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_oldest_gives_way_and_the_pinned_stays),
        cmocka_unit_test(a_new_version_retires_the_old_one),
        cmocka_unit_test(an_evicted_old_version_is_lost),
        cmocka_unit_test(an_image_is_offered_beside_the_tensors),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
