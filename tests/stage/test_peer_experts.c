/*
 * test_peer_experts.c: packed images with routers and experts from a peer: what lands in the slot,
 * in the expert memory and in the tables is what packing the files gives; cells that would lead
 * kernels elsewhere are refused even where their seal is right.
 *
 *     test_peer_experts [cpu | cuda [PATTERN]]
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "pool/expert_image.h"
#include "pool/image.h"
#include "stage/source_peer.h"
#include "support/fake_peer.h"
#include "support/golden.h"
#include "support/test.h"

#include <sidepath/stage.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#define BASE "qwen3moe"

static const char *const names[] = {"all-linear",        "attn-r4",       "experts-down",
                                    "experts-ffn-names", "experts-fused", "experts-gateup",
                                    "patterns",          "plain-r8",      "router",
                                    "router-name",       "v4-per-expert", "v4-router",
                                    "v4-sparse-experts", "rslora-r16",    "save-head",
                                    "save-head-embed",   "tokens",        "experts-fused-attn"};
#define N_NAMES (sizeof names / sizeof *names)

static const char *device_name = "cpu";

typedef struct world {
    char base[512], adapters[600];
    sp_geometry *geometry;
    sp_layout *layout;
    sp_device *device;
    sp_pool *pool;
    sp_adapter_options audit;
    fake_peer peer;
    sp_peer_source *source;
    sp_stage_source table;
    sp_stage *stage;
    bool trusted;
    size_t host_bytes_max;
} world;

static world *world_create(int32_t slots, size_t expert_bytes)
{
    world *w = sp_calloc(1, sizeof *w);
    sp_layout_options layout_options;
    sp_pool_options options;
    sp_error error;

    assert_non_null(w);
    golden_path(BASE, w->base, sizeof w->base);
    snprintf(w->adapters, sizeof w->adapters, "%s/adapters", w->base);
    assert_ok(sp_geometry_open(w->base, &w->geometry, &error), &error);
    assert_ok(sp_device_open(device_name, NULL, &w->device, &error), &error);
    sp_adapter_options_default(&w->audit, sizeof w->audit);
    w->audit.geometry = w->geometry;
    w->audit.base_dir = w->base;
    sp_layout_options_default(&layout_options, sizeof layout_options);
    layout_options.geometry = w->geometry;
    layout_options.rank = 16;
    layout_options.expert_rank = 16;
    layout_options.images_for = w->device;
    assert_ok(sp_layout_create(&layout_options, &w->layout, &error), &error);
    sp_pool_options_default(&options, sizeof options);
    options.layout = w->layout;
    options.device = w->device;
    options.slots = slots;
    options.expert_bytes = expert_bytes;
    assert_ok(sp_pool_create(&options, &w->pool, &error), &error);
    w->peer = (fake_peer){.folder = w->adapters,
                          .names = names,
                          .n_names = N_NAMES,
                          .layout = w->layout,
                          .audit = &w->audit};
    return w;
}

static void start(world *w)
{
    sp_peer_source_options peer = {
        .address = "fake:1", .calls = fake_peer_calls(&w->peer), .trust_images = w->trusted};
    sp_stage_options options;
    sp_error error;

    w->peer.proven = w->trusted;
    assert_ok(sp_peer_source_create(&peer, &w->source, &error), &error);
    w->table = sp_peer_source_table(w->source);
    sp_stage_options_default(&options, sizeof options);
    options.pool = w->pool;
    options.audit = &w->audit;
    options.sources = &w->table;
    options.n_sources = 1;
    options.threads = 1;
    options.host_bytes_max = w->host_bytes_max;
    assert_ok(sp_stage_create(&options, &w->stage, &error), &error);
}

static void world_destroy(world *w)
{
    sp_stage_destroy(w->stage);
    sp_peer_source_destroy(w->source);
    assert_int_equal(w->peer.n_open, 0);
    sp_pool_destroy(w->pool);
    assert_int_equal(sp_device_allocated_bytes(w->device), 0);
    sp_device_close(w->device);
    sp_layout_release(w->layout);
    sp_geometry_release(w->geometry);
    sp_free(w);
    assert_int_equal(sp_alloc_blocks(), 0);
}

static sp_status load(const world *w, const char *name, sp_error *error)
{
    sp_stage_load_options options;
    int64_t ticket;
    sp_status status;

    sp_stage_load_options_default(&options, sizeof options);
    options.name = name;
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

/* ---- what is in the pool -----------------------------------------------------------------------
 */

/* `bytes` of the pool's memory are these. */
static void check_memory(const world *w, const void *memory, const void *wanted, size_t bytes)
{
    sp_stream *stream = sp_device_main_stream(w->device);
    char *copy = sp_malloc(bytes + 1);
    sp_error error;

    assert_non_null(copy);
    assert_ok(sp_stream_copy(stream, copy, memory, bytes, &error), &error);
    assert_ok(sp_stream_wait(stream, &error), &error);
    assert_memory_equal(copy, wanted, bytes);
    sp_free(copy);
}

static const void *pointer_at(const world *w, const void *table, int32_t slot)
{
    sp_stream *stream = sp_device_main_stream(w->device);
    const void *pointer = NULL;
    sp_error error;

    assert_ok(sp_stream_copy(stream, &pointer, (const char *)table + (size_t)slot * sizeof(void *),
                             sizeof pointer, &error),
              &error);
    assert_ok(sp_stream_wait(stream, &error), &error);
    return pointer;
}

static sp_status pack(const world *w, const char *name, sp_image **out_image, sp_adapter **out,
                      sp_error *error)
{
    char path[700];
    sp_status status;

    snprintf(path, sizeof path, "%s/%s", w->adapters, name);
    status = sp_adapter_open(path, &w->audit, out, error);
    if (status != SP_OK)
        return status;
    status = sp_layout_pack(w->layout, *out, NULL, out_image, error);
    if (status != SP_OK)
        sp_adapter_release(*out);
    return status;
}

static void check_sites(const world *w, int32_t slot, const sp_image *image)
{
    for (int32_t i = 0; i < sp_layout_n_sites(w->layout); i++) {
        const sp_pool_tables *tables = sp_pool_tables_at(w->pool, i);
        const sp_layout_site *site = sp_layout_site_at(w->layout, i);
        const sp_expert_cell *router;
        int32_t stride;

        check_memory(w, &tables->rank[slot], &image->ranks[i], sizeof(int32_t));
        if (image->ranks[i] == 0)
            continue;
        check_memory(w, &tables->scale[slot], &image->scales[i], sizeof(float));
        if (!site->apart)
            continue;
        router = &image->experts->routers[i - sp_layout_n_slot_sites(w->layout)];
        stride = sp_expert_rank_stride(router->rank);
        check_memory(w, pointer_at(w, tables->a, slot),
                     (const char *)image->experts->data + (size_t)router->a * 256,
                     (size_t)stride * (size_t)site->k_in * 2);
        check_memory(w, pointer_at(w, tables->b, slot),
                     (const char *)image->experts->data + (size_t)router->b * 256,
                     (size_t)stride * (size_t)site->n_out * 2);
    }
}

static void check_experts(const world *w, int32_t slot, const sp_image *image)
{
    const sp_expert_image *experts = image->experts;
    int32_t n = sp_layout_n_expert_places(w->layout);
    size_t row_bytes = (size_t)sp_geometry_experts(w->geometry) * sizeof(sp_expert_cell);

    for (int32_t place = 0; place < n; place++) {
        const sp_pool_experts *at = sp_pool_experts_at(w->pool, place);
        const void *cells = pointer_at(w, at->cells, slot);
        bool adapted = experts && experts->present[place];

        assert_int_equal(cells != NULL, adapted);
        if (!adapted)
            continue;
        check_memory(w, cells, (const char *)experts->cells + (size_t)place * row_bytes, row_bytes);
        check_memory(w, pointer_at(w, at->factors, slot), experts->data, experts->bytes);
    }
}

/* What came straight into its slot has an image on the host soon after. */
static sp_stage_version_info find_kept(const world *w, const char *name)
{
    sp_stage_version_info info = find(w, name);

    for (int i = 0; i < 1000 && info.image_bytes == 0; i++) {
        sp_stage_wait(w->stage, 100);
        sp_stage_poll(w->stage);
        info = find(w, name);
    }
    return info;
}

static void check_is(const world *w, const char *name, const char *folder)
{
    size_t slot_bytes = sp_layout_slot_bytes(w->layout);
    const char *first = sp_pool_tables_at(w->pool, 0)->first_a;
    sp_stage_version_info info = find_kept(w, name);
    sp_adapter *adapter;
    sp_image *image;
    sp_error error;

    assert_ok(pack(w, folder, &image, &adapter, &error), &error);
    sp_adapter_release(adapter);
    assert_memory_equal(&info.digest, &image->digest, sizeof info.digest);
    assert_true(info.slot >= 0);
    check_memory(
        w, first - sp_layout_site_at(w->layout, 0)->a_offset_bytes + (size_t)info.slot * slot_bytes,
        image->data, slot_bytes);
    check_sites(w, info.slot, image);
    check_experts(w, info.slot, image);
    assert_int_equal(info.image_bytes, sp_image_bytes(image));
    sp_image_destroy(image);
}

/* ---- what lands --------------------------------------------------------------------------------
 */

/* Returns whether it has routers or experts. */
static bool check_one(world *w, const char *name)
{
    sp_adapter *adapter;
    sp_image *image = NULL;
    sp_error error, of_disk;
    sp_status wanted = pack(w, name, &image, &adapter, &of_disk);
    bool has_experts = wanted == SP_OK && image->experts;

    sp_image_destroy(image);
    assert_int_equal(load(w, name, &error), wanted);
    if (wanted != SP_OK) {
        assert_string_equal(error.code, of_disk.code);
        return false;
    }
    check_is(w, name, name);
    assert_int_equal(find(w, name).facts->sites, sp_adapter_n_sites(adapter));
    sp_adapter_release(adapter);
    assert_ok(sp_stage_unload(w->stage, name, &error), &error);
    return has_experts;
}

static void every_adapter_as_from_disk(void **state)
{
    (void)state;
    for (int trusted = 0; trusted < 2; trusted++) {
        world *w = world_create(2, (size_t)64 << 20);
        sp_peer_source_counts counts;
        int n_experts = 0;

        w->trusted = trusted;
        start(w);
        for (size_t i = 0; i < N_NAMES; i++)
            n_experts += check_one(w, names[i]);
        assert_true(n_experts >= 10);
        sp_peer_source_count(w->source, &counts);
        assert_int_equal(trusted ? counts.images_passed : counts.images, 0);
        assert_true((trusted ? counts.images : counts.images_passed) >= 10);
        world_destroy(w);
    }
}

/* An image that had to leave the host comes back by its digest, with both parts. */
static void both_parts_come_again(void **state)
{
    world *w = world_create(1, (size_t)64 << 20);
    sp_hold held = {.struct_bytes = sizeof held};
    sp_adapter *adapter;
    sp_image *image;
    sp_error error;
    sp_status status;

    (void)state;
    w->trusted = true;
    assert_ok(pack(w, "experts-fused", &image, &adapter, &error), &error);
    sp_adapter_release(adapter);
    w->host_bytes_max = sp_image_bytes(image) + sp_layout_image_bytes(w->layout) / 2;
    sp_image_destroy(image);
    start(w);
    assert_ok(load(w, "experts-fused", &error), &error);
    assert_ok(load(w, "plain-r8", &error), &error);
    for (int turn = 0; turn < 4; turn++) {
        const char *name = turn % 2 ? "experts-fused" : "plain-r8";

        assert_ok(sp_stage_hold(w->stage, SP_HOLD_NAMED, name, &held, &error), &error);
        while ((status = sp_stage_request(w->stage, &held, false, &error)) > 0) {
            sp_stage_wait(w->stage, 100);
            sp_stage_poll(w->stage);
        }
        assert_ok(status, &error);
        check_is(w, name, name);
        sp_stage_release(w->stage, &held);
    }
    world_destroy(w);
}

/* ---- what is refused ---------------------------------------------------------------------------
 */

static const world *forged; /* the world whose peer is wrong */

/* Where the parts of an offer's image are. */
static sp_expert_cell *cells_of(fake_offer *offer)
{
    return (sp_expert_cell *)(void *)(offer->image + sp_layout_slot_bytes(forged->layout) +
                                      offer->described.expert_bytes);
}

static sp_expert_cell *routers_of(fake_offer *offer)
{
    return cells_of(offer) + sp_expert_cells_bytes(forged->layout) / sizeof(sp_expert_cell);
}

static sp_expert_cell *used_cell(fake_offer *offer)
{
    sp_expert_cell *cell = cells_of(offer);

    while (cell->rank == 0)
        cell++;
    assert_true(cell < routers_of(offer));
    return cell;
}

static int32_t router_site(const fake_offer *offer)
{
    int32_t site = sp_layout_n_slot_sites(forged->layout);

    while (offer->described.ranks[site] == 0)
        site++;
    assert_true(site < offer->described.n_sites);
    return site;
}

/* Makes the seal anew: the packer itself is wrong. */
static void seal_again(fake_offer *offer)
{
    const sp_peer_image *of = &offer->described;
    const sp_image_label label = {of->ranks, of->scales, offer->offer.manifest.digest,
                                  of->checksum};
    const sp_expert_image experts = {.data = offer->image + sp_layout_slot_bytes(forged->layout),
                                     .bytes = (size_t)of->expert_bytes,
                                     .block_bytes =
                                         (size_t)of->bytes - sp_layout_slot_bytes(forged->layout)};
    sp_error error;

    assert_ok(sp_image_bind(forged->layout, &label, offer->image, &experts, &offer->described.seal,
                            &error),
              &error);
}

static void wrong_factor(fake_offer *offer)
{
    offer->image[sp_layout_slot_bytes(forged->layout) + 1000] ^= 1;
}

static void wrong_cell(fake_offer *offer)
{
    used_cell(offer)->scale *= 2;
}

static void a_beyond(fake_offer *offer)
{
    used_cell(offer)->a = (uint32_t)(offer->described.expert_bytes / 256);
    seal_again(offer);
}

static void b_beyond(fake_offer *offer)
{
    used_cell(offer)->b = UINT32_MAX;
    seal_again(offer);
}

static void b_ends_beyond(fake_offer *offer)
{
    used_cell(offer)->b = (uint32_t)(offer->described.expert_bytes / 256 - 1);
    used_cell(offer)->rank = 16;
    seal_again(offer);
}

static void rank_beyond(fake_offer *offer)
{
    used_cell(offer)->rank = 17;
    seal_again(offer);
}

static void rank_below(fake_offer *offer)
{
    used_cell(offer)->rank = -1;
    seal_again(offer);
}

static void rank_without(fake_offer *offer)
{
    used_cell(offer)->rank = 0;
    seal_again(offer);
}

static void scale_not_finite(fake_offer *offer)
{
    used_cell(offer)->scale = NAN;
    seal_again(offer);
}

static void pair_missing(fake_offer *offer)
{
    memset(used_cell(offer), 0, sizeof(sp_expert_cell));
    seal_again(offer);
}

static void router_unlike_label(fake_offer *offer)
{
    offer->described.ranks[router_site(offer)]--;
    seal_again(offer);
}

static void router_scale_unlike_label(fake_offer *offer)
{
    offer->described.scales[router_site(offer)] *= 2;
    seal_again(offer);
}

static void router_beyond(fake_offer *offer)
{
    int32_t router = router_site(offer) - sp_layout_n_slot_sites(forged->layout);

    routers_of(offer)[router].b = UINT32_MAX - 1;
    seal_again(offer);
}

static void no_experts(fake_offer *offer)
{
    offer->described.expert_bytes = 0;
}

static void odd_size(fake_offer *offer)
{
    offer->described.expert_bytes -= 2;
}

static void smaller_than_said(fake_offer *offer)
{
    offer->described.expert_bytes += 256;
}

static void larger_than_said(fake_offer *offer)
{
    offer->described.expert_bytes -= 256; /* the cells are read 256 bytes early */
}

static const struct {
    void (*forgery)(fake_offer *offer);
    const char *name; /* of the adapter */
    sp_status status;
    const char *code, *text;
} forgeries[] = {
    {wrong_factor, "experts-fused", SP_ERR_PEER_CONTENT, "peer-content", "packed bytes"},
    {wrong_cell, "experts-fused", SP_ERR_PEER_CONTENT, "peer-content", "packed bytes"},
    {a_beyond, "experts-fused", SP_ERR_REFUSED, "bad-image", "beyond its end"},
    {b_beyond, "experts-fused", SP_ERR_REFUSED, "bad-image", "beyond its end"},
    {b_ends_beyond, "experts-fused", SP_ERR_REFUSED, "bad-image", "beyond its end"},
    {rank_beyond, "experts-fused", SP_ERR_REFUSED, "bad-image", "beyond the pool's"},
    {rank_below, "experts-fused", SP_ERR_REFUSED, "bad-image", "beyond the pool's"},
    {rank_without, "experts-fused", SP_ERR_REFUSED, "bad-image", "beyond the pool's"},
    {scale_not_finite, "experts-fused", SP_ERR_REFUSED, "bad-image", "not finite"},
    {pair_missing, "experts-fused", SP_ERR_REFUSED, "bad-image", "pairs"},
    {router_unlike_label, "router", SP_ERR_REFUSED, "bad-image", "than it says"},
    {router_scale_unlike_label, "router", SP_ERR_REFUSED, "bad-image", "than it says"},
    {router_beyond, "router", SP_ERR_REFUSED, "bad-image", "beyond its end"},
    {no_experts, "experts-fused", SP_ERR_REFUSED, "bad-image", "pairs"},
    {no_experts, "router", SP_ERR_REFUSED, "bad-image", "than it says"},
    {odd_size, "experts-fused", SP_ERR_REFUSED, "bad-image", "size"},
    {smaller_than_said, "experts-fused", SP_ERR_PEER_PROTOCOL, "peer-manifest", "fewer bytes"},
    {larger_than_said, "experts-fused", SP_ERR_REFUSED, "bad-image", ""},
};

static void what_is_wrong_is_refused(void **state)
{
    world *w = world_create(2, (size_t)64 << 20);
    sp_error error;

    (void)state;
    w->trusted = true;
    forged = w;
    start(w);
    for (size_t i = 0; i < sizeof forgeries / sizeof *forgeries; i++) {
        const char *name = forgeries[i].name;
        uint64_t generation;
        sp_status status;

        assert_ok(load(w, name, &error), &error);
        generation = find(w, name).generation;
        w->peer.forgery = forgeries[i].forgery;
        status = load(w, name, &error);
        w->peer.forgery = NULL;
        if (status != forgeries[i].status || strcmp(error.code, forgeries[i].code) != 0 ||
            !strstr(error.text, forgeries[i].text))
            fail_msg("forgery %zu: %s [%s]", i, error.text, error.code);
        assert_int_equal(find(w, name).generation, generation);
        check_is(w, name, name);
    }
    world_destroy(w);
}

/* Named before a byte of it moves, and before memory is taken. */
static void more_than_the_budget(void **state)
{
    world *w = world_create(2, 256);
    sp_error error;

    (void)state;
    w->trusted = true;
    start(w);
    assert_int_equal(load(w, "experts-fused", &error), SP_ERR_TOO_LARGE);
    assert_string_equal(error.code, "experts-too-large");
    assert_int_equal(w->peer.bytes, 0);
    assert_ok(load(w, "plain-r8", &error), &error);
    check_is(w, "plain-r8", "plain-r8");
    world_destroy(w);
}

static void every_allocation_may_fail(void **state)
{
    world *w = world_create(2, (size_t)64 << 20);
    int64_t failing = 0;
    size_t blocks;
    sp_error error;
    sp_status status;

    (void)state;
    w->trusted = true;
    fake_peer_prepare(&w->peer, "experts-fused");
    w->peer.prepared->offer.proven = true;
    start(w);
    blocks = sp_alloc_blocks();
    do {
        sp_alloc_fail_after(failing++);
        status = load(w, "experts-fused", &error);
        sp_alloc_fail_after(-1);
        if (status != SP_OK) {
            assert_int_equal(status, SP_ERR_MEMORY);
            assert_int_equal(sp_alloc_blocks(), blocks);
        }
    } while (status != SP_OK);
    assert_true(failing > 11); /* the audit's and three of the experts' */
    check_is(w, "experts-fused", "experts-fused");
    fake_peer_prepare(&w->peer, NULL);
    world_destroy(w);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_adapter_as_from_disk), cmocka_unit_test(both_parts_come_again),
        cmocka_unit_test(what_is_wrong_is_refused),   cmocka_unit_test(more_than_the_budget),
        cmocka_unit_test(every_allocation_may_fail),
    };

    if (argc > 1)
        device_name = argv[1];
    if (argc > 2)
        cmocka_set_test_filter(argv[2]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
