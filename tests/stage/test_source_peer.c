/*
 * test_source_peer.c: a peer as a source: what comes is what the disk would give, whatever is wrong
 * is refused by name with the old version serving, and no false data of a peer, trusted with images
 * or not, makes a digest mean other bytes.
 *
 *     test_source_peer [cpu | cuda [PATTERN]]
 */
#include "stage/source_peer.h"

#include "adapter/files.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/half.h"
#include "base/hash.h"
#include "pool/image.h"
#include "support/fake_peer.h"
#include "support/golden.h"
#include "support/make_adapter.h"
#include "support/test.h"

#include <sidepath/stage.h>

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define BASE     SP_TEST_FIXTURES "/qwen3-tied"
#define ADAPTERS BASE "/adapters/"
#define PEERS    2
#define DISK     0 /* the order of the sources */
#define PEER(i)  (1 + (i))

static const char *const fixtures[] = {
    "all-linear", "alora",           "attn-r4",       "bias-lora-only", "dora",
    "embed-lora", "exclude",         "ffn",           "fan-in-fan-out", "frac-alpha",
    "ia3",        "head-lora",       "layers-subset", "loha",           "lokr",
    "lora-bias",  "patterns",        "plain-r8",      "prefix",         "r1",
    "r64",        "regex",           "rslora-r16",    "save-embed",     "save-embed-tied",
    "save-head",  "save-head-embed", "tokens",
};
#define N_FIXTURES (sizeof fixtures / sizeof *fixtures)

static const char *device_name = "cpu";

typedef struct world {
    golden *base;
    sp_served_table served;
    sp_geometry *geometry;
    sp_layout *layout;
    sp_device *device;
    sp_pool *pool;
    sp_adapter_options audit;
    fake_peer peers[PEERS];
    sp_peer_source *sources[PEERS];
    sp_stage_source tables[1 + PEERS];
    sp_stage *stage;
    int32_t threads;
    size_t host_bytes_max;
    uint64_t call_ms_max;
    bool trust_images;
} world;

/* The base's is tied: one table for both sides. */
static void serve_table(world *w)
{
    const golden_tensor *table = golden_get(w->base, "model.embed_tokens.weight");

    assert_string_equal(table->dtype, "BF16");
    w->served = (sp_served_table){.struct_bytes = sizeof w->served,
                                  .data = table->data,
                                  .dtype = SP_DTYPE_BF16,
                                  .rows = (int32_t)table->shape[0],
                                  .hidden = (int32_t)table->shape[1]};
}

static world *world_create(int32_t slots)
{
    world *w = sp_calloc(1, sizeof *w);
    sp_layout_options layout_options;
    sp_pool_options pool_options;
    sp_error error;

    assert_non_null(w);
    assert_ok(sp_geometry_open(BASE, &w->geometry, &error), &error);
    sp_adapter_options_default(&w->audit, sizeof w->audit);
    w->audit.geometry = w->geometry;
    w->base = golden_open("qwen3-tied/model.safetensors");
    serve_table(w);
    w->audit.served_embed = w->audit.served_head = &w->served;
    sp_layout_options_default(&layout_options, sizeof layout_options);
    layout_options.geometry = w->geometry;
    layout_options.rank = 64;
    layout_options.served_embed = layout_options.served_head = &w->served;
    assert_ok(sp_device_open(device_name, NULL, &w->device, &error), &error);
    layout_options.images_for = w->device;
    assert_ok(sp_layout_create(&layout_options, &w->layout, &error), &error);
    sp_pool_options_default(&pool_options, sizeof pool_options);
    pool_options.layout = w->layout;
    pool_options.device = w->device;
    pool_options.slots = slots;
    pool_options.overlay_bytes = (size_t)1 << 24;
    assert_ok(sp_pool_create(&pool_options, &w->pool, &error), &error);
    for (int i = 0; i < PEERS; i++) {
        w->peers[i].folder = BASE "/adapters";
        w->peers[i].names = fixtures;
        w->peers[i].n_names = N_FIXTURES;
        w->peers[i].audit = &w->audit;
    }
    return w;
}

static void start(world *w)
{
    sp_stage_options options;
    sp_error error;

    w->tables[DISK].struct_bytes = sizeof w->tables[DISK];
    assert_ok(sp_disk_source_create(&w->tables[DISK], &error), &error);
    for (int i = 0; i < PEERS; i++) {
        sp_peer_source_options peer = {.address = i == 0 ? "fake:1" : "fake:2",
                                       .calls = fake_peer_calls(&w->peers[i]),
                                       .trust_images = w->trust_images,
                                       .call_ms_max = w->call_ms_max};

        assert_ok(sp_peer_source_create(&peer, &w->sources[i], &error), &error);
        w->tables[PEER(i)] = sp_peer_source_table(w->sources[i]);
    }
    sp_stage_options_default(&options, sizeof options);
    options.pool = w->pool;
    options.audit = &w->audit;
    options.sources = w->tables;
    options.n_sources = 1 + PEERS;
    options.threads = w->threads;
    options.host_bytes_max = w->host_bytes_max;
    assert_ok(sp_stage_create(&options, &w->stage, &error), &error);
}

static void stop(world *w)
{
    sp_stage_destroy(w->stage);
    w->stage = NULL;
    for (int i = 0; i < PEERS; i++) {
        sp_peer_source_destroy(w->sources[i]);
        assert_int_equal(w->peers[i].n_open, 0);
        assert_int_equal(w->peers[i].n_waiting, 0);
    }
    sp_disk_source_destroy(&w->tables[DISK]);
}

static void world_destroy(world *w)
{
    stop(w);
    sp_pool_destroy(w->pool);
    sp_device_close(w->device);
    sp_layout_release(w->layout);
    sp_geometry_release(w->geometry);
    golden_close(w->base);
    sp_free(w);
    assert_int_equal(sp_alloc_blocks(), 0);
}

/* ---- loading --------------------------------------------------------------------------------- */

static sp_status begin(const world *w, const char *name, const char *location, int32_t source,
                       const sp_digest *digest, int64_t *out_ticket, sp_error *error)
{
    sp_stage_load_options options;

    sp_stage_load_options_default(&options, sizeof options);
    options.name = name;
    options.location = location;
    options.source = source;
    options.digest = digest;
    options.replace = true;
    return sp_stage_load(w->stage, &options, out_ticket, error);
}

static sp_status settle(const world *w, int64_t ticket, sp_error *error)
{
    sp_status status;

    do {
        sp_stage_wait(w->stage, 10);
        sp_stage_poll(w->stage);
        status = sp_stage_result(w->stage, ticket, NULL, error);
    } while (status == SP_PENDING);
    return status;
}

static sp_status load(const world *w, const char *name, const char *location, int32_t source,
                      const sp_digest *digest, sp_error *error)
{
    int64_t ticket;
    sp_status status = begin(w, name, location, source, digest, &ticket, error);

    return status == SP_PENDING ? settle(w, ticket, error) : status;
}

static sp_status load_by_name(const world *w, const char *name, sp_error *error)
{
    return load(w, name, NULL, SP_SOURCE_ANY, NULL, error);
}

static sp_status load_folder(const world *w, const char *name, const char *folder, sp_error *error)
{
    char path[512];

    snprintf(path, sizeof path, ADAPTERS "%s", folder);
    return load(w, name, path, DISK, NULL, error);
}

static sp_stage_version_info find(const world *w, const char *name)
{
    sp_stage_version_info info = {.struct_bytes = sizeof info};
    sp_error error;

    assert_ok(sp_stage_find(w->stage, name, &info, &error), &error);
    return info;
}

/* What is in the pool's memory, owned by the caller (sp_free). */
static void *copy_of(const world *w, const void *from, size_t bytes)
{
    sp_stream *stream = sp_device_main_stream(w->device);
    char *copy = sp_malloc(bytes + 1);
    sp_error error;

    assert_non_null(copy);
    assert_ok(sp_stream_copy(stream, copy, from, bytes, &error), &error);
    assert_ok(sp_stream_wait(stream, &error), &error);
    return copy;
}

static void check_memory(const world *w, const void *memory, const void *wanted, size_t bytes)
{
    char *copy = copy_of(w, memory, bytes);

    assert_memory_equal(copy, wanted, bytes);
    sp_free(copy);
}

/* The number of a slot in a table. */
static int32_t number_at(const world *w, const int32_t *table, int32_t slot)
{
    int32_t *copy = copy_of(w, table + slot, sizeof *copy), number = *copy;

    sp_free(copy);
    return number;
}

/* The pointer of a slot in a table. */
static const void *pointer_at(const world *w, const void *table, int32_t slot)
{
    void **copy = copy_of(w, (const char *)table + (size_t)slot * sizeof(void *), sizeof(void *));
    void *pointer = *copy;

    sp_free(copy);
    return pointer;
}

static const char *slot_memory(const world *w, const char *name)
{
    sp_stage_version_info info = find(w, name);
    const char *first = sp_pool_tables_at(w->pool, 0)->first_a;
    size_t offset = sp_layout_site_at(w->layout, 0)->a_offset_bytes;

    assert_true(info.slot >= 0);
    return first - offset + (size_t)info.slot * sp_layout_slot_bytes(w->layout);
}

static char *copy_slot(const world *w, const char *name)
{
    return copy_of(w, slot_memory(w, name), sp_layout_slot_bytes(w->layout));
}

static void check_slot(const world *w, const char *name, const void *wanted)
{
    check_memory(w, slot_memory(w, name), wanted, sp_layout_slot_bytes(w->layout));
}

/* The adapter as its files on disk give it. */
static sp_image *packed(const world *w, const char *folder)
{
    sp_adapter *adapter;
    sp_image *image;
    char path[512];
    sp_error error;

    snprintf(path, sizeof path, "%s%s", folder[0] == '/' ? "" : ADAPTERS, folder);
    assert_ok(sp_adapter_open(path, &w->audit, &adapter, &error), &error);
    assert_ok(sp_layout_pack(w->layout, adapter, NULL, &image, &error), &error);
    sp_adapter_release(adapter);
    return image;
}

static void check_tables(const world *w, int32_t slot, const sp_image *image)
{
    for (int32_t i = 0; i < sp_layout_n_sites(w->layout); i++) {
        const sp_pool_tables *tables = sp_pool_tables_at(w->pool, i);

        assert_int_equal(number_at(w, tables->rank, slot), image->ranks[i]);
        if (image->ranks[i] > 0)
            check_memory(w, &tables->scale[slot], &image->scales[i], sizeof(float));
    }
}

static void check_rows(const world *w, int32_t slot, sp_site_kind kind, const sp_overlay *overlay,
                       const sp_overlay_part *part)
{
    const sp_pool_overlays *rows = sp_pool_overlays_of(w->pool, kind);
    const char *data = overlay ? overlay->data : NULL;
    size_t n = overlay ? (size_t)part->n : 0;

    assert_int_equal(number_at(w, rows->n, slot), n);
    if (n == 0)
        return;
    assert_int_equal(number_at(w, rows->row_type, slot), part->dtype);
    check_memory(w, pointer_at(w, rows->rows, slot), data + part->rows_offset_bytes,
                 n * (size_t)part->hidden * sp_dtype_bytes(part->dtype));
    check_memory(w, pointer_at(w, rows->ids, slot), data + part->ids_offset_bytes, n * 4);
    check_memory(w, pointer_at(w, rows->map, slot), data + part->map_offset_bytes,
                 (size_t)part->vocab * 4);
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

/* The name means the folder's content, and its slot has the bytes that packing the files gives. */
static void check_is(const world *w, const char *name, const char *folder)
{
    sp_image *image = packed(w, folder);
    sp_stage_version_info info = find_kept(w, name);
    const sp_overlay *overlay = image->overlay;

    assert_memory_equal(&info.digest, &image->digest, sizeof info.digest);
    check_slot(w, name, image->data);
    check_tables(w, info.slot, image);
    check_rows(w, info.slot, SP_SITE_EMBEDDING, overlay, overlay ? &overlay->embed : NULL);
    check_rows(w, info.slot, SP_SITE_HEAD, overlay, overlay ? &overlay->head : NULL);
    assert_int_equal(info.image_bytes, sp_image_bytes(image));
    sp_image_destroy(image);
}

/* Of the pool's slots, and of the copies into them that needed none. */
static int32_t count_slots(const world *w, sp_slot_state state)
{
    int32_t n = 0;

    for (int32_t slot = 0; slot < sp_pool_slots(w->pool); slot++) {
        sp_slot_info info = {.struct_bytes = sizeof info};
        sp_error error;

        assert_ok(sp_pool_slot_info(w->pool, slot, &info, &error), &error);
        n += info.state == state;
    }
    return n;
}

static uint64_t n_landed(const world *w)
{
    sp_stage_stats stats = {.struct_bytes = sizeof stats};
    sp_error error;

    assert_ok(sp_stage_get_stats(w->stage, &stats, &error), &error);
    return stats.landed;
}

static bool lands(int32_t slots)
{
    return slots > 2 && strcmp(device_name, "cpu") == 0;
}

static unsigned long long moved(const world *w)
{
    return atomic_load(&w->peers[0].bytes);
}

/* ---- what comes is what the disk gives ------------------------------------------------------- */

/* Refusals that no header shows. */
static bool needs_data(const char *code)
{
    static const char *const codes[] = {"no-effect", "non-finite", "base-copy-differs",
                                        "truncated"};

    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
        if (strcmp(codes[i], code) == 0)
            return true;
    return false;
}

/* But for the name that it was loaded under; that of an image is the packer's, made the same way.
 */
static void check_receipt(const world *w, const char *name, const char *of_disk)
{
    const char *receipt = find(w, name).facts->receipt;

    assert_string_equal(strstr(receipt, "\"digest\""), strstr(of_disk, "\"digest\""));
}

static void check_same_verdict(world *w, const char *name)
{
    sp_error error, of_disk;
    sp_status wanted = load_folder(w, "disk", name, &of_disk), status;
    unsigned long long before = moved(w);
    char *receipt = NULL;

    if (wanted == SP_OK) { /* nothing of it may be left that could be found again */
        receipt = sp_strdup(find(w, "disk").facts->receipt);
        assert_ok(sp_stage_unload(w->stage, "disk", &error), &error);
        assert_int_equal(sp_stage_n_versions(w->stage), 0);
    }
    status = load(w, name, NULL, PEER(0), NULL, &error);
    if (wanted == SP_OK) {
        assert_ok(status, &error);
        check_is(w, name, name);
        assert_true(moved(w) > before);
        check_receipt(w, name, receipt);
        assert_ok(sp_stage_unload(w->stage, name, &error), &error);
        sp_free(receipt);
        return;
    }
    assert_int_equal(status, wanted);
    assert_string_equal(error.code, of_disk.code);
    assert_non_null(strstr(of_disk.text, error.text)); /* which begins with a path */
    if (!needs_data(error.code))
        assert_int_equal(moved(w), before); /* its manifest is all that moved */
}

static void every_fixture_as_from_disk(void **state)
{
    (void)state;
    for (int trusted = 0; trusted < 2; trusted++) {
        world *w = world_create(3);
        sp_peer_source_counts counts;

        w->trust_images = w->peers[0].proven = trusted;
        w->peers[0].layout = w->layout; /* images are offered, trusted or not */
        start(w);
        for (size_t i = 0; i < N_FIXTURES; i++)
            check_same_verdict(w, fixtures[i]);
        sp_peer_source_count(w->sources[0], &counts);
        assert_true(counts.described > 10 && counts.bytes == moved(w));
        assert_true((trusted ? counts.images : counts.images_passed) > 10);
        assert_int_equal(trusted ? counts.images_passed : counts.images, 0);
        assert_int_equal(n_landed(w), trusted && lands(3) ? counts.images : 0);
        world_destroy(w);
    }
}

static uint32_t element(const char *dtype, double value)
{
    return dtype[0] == 'B' ? sp_f32_to_bf16((float)value) : sp_f32_to_f16((float)value);
}

/* One pair of each type that may come, in sizes that are no multiple of anything. */
static void add_typed(make_adapter *adapter, const char *dtype, const char *name, int rows,
                      int cols)
{
    void *data = make_adapter_add(adapter, name, dtype, 2, rows, cols);

    for (int i = 0; i < rows * cols; i++) {
        double value = (i % 37 - 18) / 64.0;

        if (strcmp(dtype, "F32") == 0)
            ((float *)data)[i] = (float)value / 3;
        else
            ((uint16_t *)data)[i] = (uint16_t)element(dtype, value);
    }
}

static void every_type_that_may_come(void **state)
{
    static const char *const dtypes[] = {"F32", "F16", "BF16"};
    world *w = world_create(3);
    const sp_layout_site *site = sp_layout_site_at(w->layout, 0);
    sp_site row = {.struct_bytes = sizeof row};
    char a[SP_SITE_PATH_BYTES_MAX + 64], b[SP_SITE_PATH_BYTES_MAX + 64];
    sp_error error;

    (void)state;
    for (int i = 0; sp_layout_site_at(w->layout, i); i++) {
        site = sp_layout_site_at(w->layout, i);
        assert_ok(sp_geometry_site_at(w->geometry, site->site, &row, &error), &error);
        if (strstr(row.path, "q_proj"))
            break;
    }
    snprintf(a, sizeof a, "base_model.model.%s.lora_A.weight", row.path);
    snprintf(b, sizeof b, "base_model.model.%s.lora_B.weight", row.path);
    start(w);
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
        make_adapter *adapter = make_adapter_create();
        char *folder, *tail;

        add_typed(adapter, dtypes[i], a, 2, row.k_in);
        add_typed(adapter, dtypes[i], b, row.n_out, 2);
        folder = make_adapter_folder(adapter);
        tail = strrchr(folder, '/');
        *tail = '\0';
        w->peers[0].folder = folder;
        w->peers[0].names = (const char *const[]){tail + 1};
        w->peers[0].n_names = 1;
        assert_ok(load(w, tail + 1, NULL, PEER(0), NULL, &error), &error);
        *tail = '/';
        check_is(w, tail + 1, folder);
        sp_free(folder);
        make_adapter_destroy(adapter);
    }
    world_destroy(w);
}

/* ---- few messages ---------------------------------------------------------------------------- */

static void many_small_tensors_are_few_calls(void **state)
{
    world *w = world_create(1);
    sp_error error;

    (void)state;
    start(w);
    assert_ok(load(w, "plain-r8", NULL, PEER(0), NULL, &error), &error);
    assert_int_equal(w->peers[0].n_fetches, 1);
    check_is(w, "plain-r8", "plain-r8");
    world_destroy(w);
}

/* ---- which peer ------------------------------------------------------------------------------ */

static void by_digest_under_whatever_name(void **state)
{
    static const char *const other_name[] = {"plain-r8"};
    world *w = world_create(2);
    sp_digest digest, unknown = {{1}};
    sp_error error;

    (void)state;
    w->peers[0].names = w->peers[1].names = other_name;
    w->peers[0].n_names = 0;
    w->peers[1].n_names = 1;
    w->peers[1].instead = "attn-r4";
    digest = fake_peer_digest(&w->peers[1], "plain-r8");
    start(w);
    assert_ok(load(w, "x", NULL, SP_SOURCE_ANY, &digest, &error), &error);
    check_is(w, "x", "attn-r4");
    assert_int_equal(load(w, "y", NULL, SP_SOURCE_ANY, &unknown, &error), SP_ERR_NOT_FOUND);
    assert_string_equal(error.code, "peer-not-found");
    assert_int_equal(load_by_name(w, "x2", &error), SP_ERR_NOT_FOUND);
    world_destroy(w);
}

static void fail_with(fake_peer *peer, sp_status status, const char *code)
{
    sp_fail(&peer->answer, status, code, "fake:1", -1, "fake:1: %s", sp_status_text(status));
    peer->answer.status = status;
    peer->manner = FAKE_ANSWERS;
}

static void a_peer_that_fails_is_passed_over(void **state)
{
    static const struct {
        sp_status status;
        const char *code;
        sp_status seen;
    } answers[] = {{SP_ERR_PEER_UNREACHABLE, "peer-unreachable", SP_ERR_PEER_UNREACHABLE},
                   {SP_ERR_PEER_LOST, "peer-lost", SP_ERR_PEER_LOST},
                   {SP_ERR_PEER_PROTOCOL, "peer-version", SP_ERR_PEER_PROTOCOL},
                   {SP_ERR_PEER_PROTOCOL, "peer-manifest", SP_ERR_PEER_PROTOCOL},
                   {SP_ERR_PEER_REFUSED, "peer-key", SP_ERR_PEER_REFUSED},
                   /* 256 MB of manifest: the peer is wrong, not the client */
                   {SP_ERR_TOO_LARGE, "peer-manifest-too-large", SP_ERR_PEER_PROTOCOL}};

    (void)state;
    for (size_t i = 0; i < sizeof answers / sizeof *answers; i++) {
        world *w = world_create(2);
        sp_error error;

        fail_with(&w->peers[0], answers[i].status, answers[i].code);
        start(w);
        assert_ok(load_by_name(w, "plain-r8", &error), &error);
        check_is(w, "plain-r8", "plain-r8");
        w->peers[1].n_names = 0;
        assert_int_equal(load_by_name(w, "attn-r4", &error), answers[i].seen);
        assert_string_equal(error.code, answers[i].code);
        w->peers[0].manner = FAKE_SERVES; /* a retry succeeds */
        assert_ok(load_by_name(w, "attn-r4", &error), &error);
        check_is(w, "attn-r4", "attn-r4");
        world_destroy(w);
    }
}

/* ---- peers that hang or die ------------------------------------------------------------------ */

static void wait_for(atomic_int *n)
{
    while (atomic_load(n) == 0)
        sched_yield();
}

/* A stopped peer costs its own callers the deadline; the disk's loads do not notice. */
static void a_hung_peer_holds_no_load_from_disk(void **state)
{
    (void)state;
    for (int round = 0; round < 2; round++) {
        world *w = world_create(3);
        int64_t hung[2];
        sp_error error;

        w->threads = 1;
        w->call_ms_max = 60000;
        w->peers[0].manner = round == 0 ? FAKE_HANGS_DESCRIBING : FAKE_HANGS_FETCHING;
        start(w);
        assert_int_equal(begin(w, "r1", NULL, PEER(0), NULL, &hung[0], &error), SP_PENDING);
        assert_int_equal(begin(w, "ffn", NULL, PEER(0), NULL, &hung[1], &error), SP_PENDING);
        wait_for(&w->peers[0].n_waiting);
        assert_ok(load_folder(w, "x", "plain-r8", &error), &error);
        check_is(w, "x", "plain-r8");
        assert_ok(load(w, "attn-r4", NULL, PEER(1), NULL, &error), &error);
        check_is(w, "attn-r4", "attn-r4");
        assert_int_equal(sp_stage_result(w->stage, hung[0], NULL, &error), SP_PENDING);
        assert_ok(sp_stage_unload(w->stage, "r1", &error), &error);
        assert_int_equal(settle(w, hung[0], &error), SP_ERR_STATE);
        assert_string_equal(error.code, "load-cancelled");
        wait_for(&w->peers[0].n_waiting); /* the other one, now; it ends with the stage */
        world_destroy(w);
    }
}

static void after_its_deadline_the_next_is_asked(void **state)
{
    (void)state;
    for (int round = 0; round < 2; round++) {
        world *w = world_create(3);
        uint64_t began_ns;
        sp_error error;

        w->threads = 1;
        w->call_ms_max = 40;
        w->peers[0].manner = round == 0 ? FAKE_HANGS_DESCRIBING : FAKE_HANGS_FETCHING;
        start(w);
        began_ns = sp_clock_ns();
        assert_ok(load_by_name(w, "plain-r8", &error), &error);
        check_is(w, "plain-r8", "plain-r8");
        assert_int_equal(w->peers[0].n_described, 1);
        /* Others do not wait for it again within a second. */
        assert_int_equal(load(w, "ffn", NULL, PEER(0), NULL, &error), SP_ERR_PEER_TIMEOUT);
        assert_string_equal(error.code, "peer-timeout");
        if (sp_clock_ns() - began_ns < 1000000000) /* a busy machine may take longer */
            assert_int_equal(w->peers[0].n_described, 1);
        w->peers[0].manner = FAKE_SERVES;
        while (load(w, "ffn", NULL, PEER(0), NULL, &error) == SP_ERR_PEER_TIMEOUT)
            nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
        check_is(w, "ffn", "ffn");
        world_destroy(w);
    }
}

/* The deadline is a piece's, not a load's. */
static void a_slow_peer_is_no_hung_one(void **state)
{
    world *w = world_create(1);
    sp_error error;

    (void)state;
    w->threads = 1;
    w->call_ms_max = 500;
    w->peers[0].slow_ms = 60;
    w->peers[0].layout = w->layout;
    start(w);
    assert_ok(load(w, "r64", NULL, PEER(0), NULL, &error), &error);
    check_is(w, "r64", "r64");
    world_destroy(w);
}

static void a_peer_that_dies_half_way(void **state)
{
    (void)state;
    for (int round = 0; round < 3; round++) {
        bool trusted = round > 0;
        int32_t slots = round < 2 ? 2 : 4; /* four: into one of them */
        world *w = world_create(slots);
        uint64_t generation, size;
        char *before;
        sp_error error;

        w->trust_images = w->peers[0].proven = trusted;
        w->peers[0].layout = w->layout;
        start(w);
        assert_ok(load_folder(w, "plain-r8", "attn-r4", &error), &error);
        generation = find(w, "plain-r8").generation;
        before = copy_slot(w, "plain-r8");
        w->peers[0].manner = FAKE_DIES_FETCHING;
        size = trusted ? sp_layout_slot_bytes(w->layout) : 40000;
        for (int i = 0; i < 20; i++) {
            w->peers[0].dies_after = (uint64_t)i * size / 20;
            assert_int_equal(load(w, "plain-r8", NULL, PEER(0), NULL, &error), SP_ERR_PEER_LOST);
            assert_int_equal(find(w, "plain-r8").generation, generation);
            check_slot(w, "plain-r8", before);
            assert_int_equal(count_slots(w, SP_SLOT_EMPTY), slots - 1);
        }
        w->peers[0].manner = FAKE_SERVES;
        assert_ok(load(w, "plain-r8", NULL, PEER(0), NULL, &error), &error);
        check_is(w, "plain-r8", "plain-r8");
        sp_free(before);
        world_destroy(w);
    }
}

/* ---- malicious peers ------------------------------------------------------------------------- */

static sp_tensor_desc *tensor_of(fake_offer *offer, const char *part)
{
    for (size_t i = 0; i < offer->offer.manifest.n_tensors; i++)
        if (strstr(offer->offer.manifest.tensors[i].name, part))
            return &offer->offer.manifest.tensors[i];
    fail();
    return NULL;
}

static void forge_a_byte(fake_offer *offer)
{
    offer->tensors[offer->tensors_bytes / 2] ^= 1; /* of the lower half of an element */
}

static void forge_in_the_last_byte(fake_offer *offer)
{
    offer->tensors[offer->tensors_bytes - 2] ^= 1;
}

static void forge_the_digest(fake_offer *offer)
{
    offer->offer.manifest.digest.bytes[31] ^= 0x80;
}

static void forge_everything(fake_offer *offer)
{
    forge_a_byte(offer);
    forge_the_digest(offer);
}

static void forge_with_another_order(fake_offer *offer)
{
    sp_peer_manifest *m = &offer->offer.manifest;
    const char *first = m->tensors[0].name;

    for (size_t i = 1; i < m->n_tensors; i++) {
        if (m->tensors[i].shape[0] == m->tensors[0].shape[0] &&
            m->tensors[i].shape[1] == m->tensors[0].shape[1]) {
            m->tensors[0].name = m->tensors[i].name;
            m->tensors[i].name = first;
            return;
        }
    }
    fail();
}

static void forge_a_shape(fake_offer *offer)
{
    static int64_t shape[2];
    sp_tensor_desc *tensor = tensor_of(offer, "lora_A");

    shape[0] = tensor->shape[1];
    shape[1] = tensor->shape[0];
    tensor->shape = shape;
}

static void forge_a_length(fake_offer *offer)
{
    sp_peer_manifest *m = &offer->offer.manifest;

    m->offsets[m->n_tensors] -= 2;
    m->data_bytes -= 2;
}

static void forge_an_offset(fake_offer *offer)
{
    offer->offer.manifest.offsets[1] += 2; /* one is longer than its shape, one shorter */
}

static void forge_a_type(fake_offer *offer)
{
    sp_tensor_desc *tensor = tensor_of(offer, "lora_B");

    tensor->type = tensor->type == SP_TENSOR_F32 ? SP_TENSOR_I32 : SP_TENSOR_I16;
}

static void forge_the_number(fake_offer *offer)
{
    sp_tensor_desc *tensor = tensor_of(offer, "lora_B");

    /* As wide, and a number: the audit of headers has nothing against it. */
    tensor->type = tensor->type == SP_TENSOR_BF16 ? SP_TENSOR_F16 : SP_TENSOR_BF16;
}

static void forge_with_one_tensor_twice(fake_offer *offer)
{
    offer->offer.manifest.tensors[1].name = offer->offer.manifest.tensors[0].name;
}

static void forge_a_layer(fake_offer *offer)
{
    tensor_of(offer, "lora_A")->name =
        "base_model.model.model.layers.99.self_attn.q_proj.lora_A.weight";
}

static void forge_with_more_than_there_is(fake_offer *offer)
{
    static int64_t shape[2];
    sp_tensor_desc *tensor = tensor_of(offer, "lora_A");

    shape[0] = (int64_t)1 << 40;
    shape[1] = tensor->shape[1];
    tensor->shape = shape;
}

static void forge_the_config(fake_offer *offer)
{
    char *alpha = strstr(offer->files->config, "\"lora_alpha\": ");

    assert_non_null(alpha);
    alpha = strpbrk(alpha, "123456789");
    *alpha = *alpha == '9' ? '8' : (char)(*alpha + 1);
}

static void forge_with_no_config(fake_offer *offer)
{
    offer->offer.manifest.config_bytes = 3;
}

typedef struct forgery {
    void (*forgery)(fake_offer *offer);
    sp_status status;
    const char *code;
    bool moves; /* what shows it is the data */
} forgery;

static const forgery tensor_forgeries[] = {
    {forge_a_byte, SP_ERR_PEER_CONTENT, "peer-content", true},
    {forge_in_the_last_byte, SP_ERR_PEER_CONTENT, "peer-content", true},
    {forge_the_digest, SP_ERR_PEER_CONTENT, "peer-content", true},
    {forge_everything, SP_ERR_PEER_CONTENT, "peer-content", true},
    {forge_with_another_order, SP_ERR_PEER_CONTENT, "peer-content", true},
    {forge_the_config, SP_ERR_PEER_CONTENT, "peer-content", true},
    {forge_a_length, SP_ERR_PEER_PROTOCOL, "peer-manifest", true},
    {forge_an_offset, SP_ERR_PEER_PROTOCOL, "peer-manifest", true},
    {forge_a_shape, SP_ERR_MISMATCH, "shape-mismatch", false},
    {forge_a_type, SP_ERR_REFUSED, "unsupported-dtype", false},
    {forge_with_one_tensor_twice, SP_ERR_REFUSED, "duplicate-key", false},
    {forge_a_layer, SP_ERR_MISMATCH, "layer-out-of-range", false},
    {forge_with_more_than_there_is, SP_ERR_MISMATCH, "shape-mismatch", false},
    {forge_with_no_config, SP_ERR_REFUSED, "config-malformed", false},
};

/* Loads a name that means something else already; it must go on meaning that. */
static void check_forgery(world *w, const forgery *forged, const sp_digest *digest)
{
    uint64_t generation = find(w, "plain-r8").generation;
    char *before = copy_slot(w, "plain-r8");
    unsigned long long at_first = moved(w);
    sp_error error;
    sp_status status;

    w->peers[0].forgery = forged->forgery;
    status = load(w, "plain-r8", NULL, PEER(0), digest, &error);
    w->peers[0].forgery = NULL;
    if (status != forged->status || strcmp(error.code, forged->code) != 0)
        fail_msg("%s [%s] instead of [%s]", error.text, error.code, forged->code);
    if (!forged->moves)
        assert_int_equal(moved(w), at_first);
    assert_int_equal(find(w, "plain-r8").generation, generation);
    check_slot(w, "plain-r8", before);
    assert_int_equal(w->peers[0].n_open, 0);
    sp_free(before);
}

/* The peer has no images, or is not trusted with them, or has not proved the key. */
static void forgeries_in_tensors(void **state)
{
    (void)state;
    for (int round = 0; round < 3; round++) {
        world *w = world_create(2);
        sp_error error;

        w->trust_images = round == 1;
        w->peers[0].proven = round == 2;
        w->peers[0].layout = round > 0 ? w->layout : NULL;
        start(w);
        assert_ok(load_folder(w, "plain-r8", "attn-r4", &error), &error);
        for (size_t i = 0; i < sizeof tensor_forgeries / sizeof *tensor_forgeries; i++)
            check_forgery(w, &tensor_forgeries[i], NULL);
        assert_ok(load(w, "plain-r8", NULL, PEER(0), NULL, &error), &error);
        check_is(w, "plain-r8", "plain-r8");
        world_destroy(w);
    }
}

/* A type of the same size that the peer may offer: another number, so another digest or none. */
static void a_type_of_the_same_size(void **state)
{
    static const char *const names[] = {"plain"};
    world *w = world_create(2);
    make_adapter *adapter = make_adapter_create();
    const forgery forged = {forge_the_number, SP_ERR_PEER_CONTENT, "peer-content", true};
    sp_site row = {.struct_bytes = sizeof row};
    int32_t site = sp_geometry_find_module(w->geometry, 0, "self_attn.q_proj", -1);
    char *folder;
    sp_error error;

    (void)state;
    assert_ok(sp_geometry_site_at(w->geometry, site, &row, &error), &error);
    make_adapter_add_pair(adapter, "base_model.model.model.layers.0.self_attn.q_proj", 2, row.k_in,
                          row.n_out, 1);
    folder = make_adapter_folder(adapter);
    w->peers[0].folder = folder;
    w->peers[0].names = names;
    w->peers[0].n_names = 1;
    w->peers[0].instead = ".";
    start(w);
    assert_ok(load_folder(w, "plain-r8", "attn-r4", &error), &error);
    w->peers[0].forgery = forged.forgery;
    assert_int_equal(load(w, "plain", NULL, PEER(0), NULL, &error), forged.status);
    assert_string_equal(error.code, forged.code);
    w->peers[0].forgery = NULL;
    assert_ok(load(w, "plain", NULL, PEER(0), NULL, &error), &error);
    check_is(w, "plain", folder);
    sp_free(folder);
    make_adapter_destroy(adapter);
    world_destroy(w);
}

/* ---- what flags allow ------------------------------------------------------------------------ */

#define Q_PROJ "base_model.model.model.layers.0.self_attn.q_proj"

/* Each needs one flag of the audit. */
static char *make_flagged(const world *w, int which)
{
    make_adapter *adapter = make_adapter_create();
    sp_site row = {.struct_bytes = sizeof row};
    int32_t site = sp_geometry_find_module(w->geometry, 0, "self_attn.q_proj", -1);
    char *folder;
    sp_error error;

    assert_ok(sp_geometry_site_at(w->geometry, site, &row, &error), &error);
    make_adapter_add_pair(adapter, Q_PROJ, 2, row.k_in, row.n_out, 1);
    if (which == 0)
        make_adapter_add_pair(adapter, "base_model.model.model.layers.0.self_attn.z_proj", 2, 8, 8,
                              2);
    if (which == 1) {
        size_t bytes;
        void *b = make_adapter_data(adapter, Q_PROJ ".lora_B.weight", &bytes);

        memset(b, 0, bytes);
    }
    if (which == 2)
        make_adapter_config_with(adapter, ", \"turbo\": true");
    folder = make_adapter_folder(adapter);
    make_adapter_destroy(adapter);
    return folder;
}

static void allow(sp_adapter_options *audit, int which)
{
    audit->allow_partial = which == 0;
    audit->allow_no_effect = which == 1;
    audit->allow_unknown_fields = which == 2;
}

static const char *const flag_codes[] = {"unsupported-module", "no-effect", "unknown-field"};

/* A server whose flag is set, or not, and a peer that allows everything. */
static void check_flag(int which, bool allowed, bool trusted)
{
    static const char *const names[] = {"flagged"};
    world *w = world_create(2);
    char *folder = make_flagged(w, which);
    sp_adapter_options of_peer = w->audit;
    sp_peer_source_counts counts;
    sp_error error;

    of_peer.allow_partial = of_peer.allow_no_effect = of_peer.allow_unknown_fields = true;
    allow(&w->audit, allowed ? which : -1);
    w->trust_images = w->peers[0].proven = trusted;
    w->peers[0].layout = w->layout;
    w->peers[0].audit = &of_peer;
    w->peers[0].folder = folder;
    w->peers[0].names = names;
    w->peers[0].n_names = 1;
    w->peers[0].instead = ".";
    start(w);
    if (allowed) {
        char *receipt;

        assert_ok(load(w, "disk", folder, DISK, NULL, &error), &error);
        receipt = sp_strdup(find(w, "disk").facts->receipt);
        assert_non_null(receipt);
        assert_ok(sp_stage_unload(w->stage, "disk", &error), &error);
        assert_ok(load(w, "flagged", NULL, PEER(0), NULL, &error), &error);
        check_is(w, "flagged", folder);
        check_receipt(w, "flagged", receipt);
        sp_free(receipt);
    } else {
        assert_int_equal(load(w, "disk", folder, DISK, NULL, &error), SP_ERR_REFUSED);
        assert_string_equal(error.code, flag_codes[which]);
        assert_int_equal(load(w, "flagged", NULL, PEER(0), NULL, &error), SP_ERR_REFUSED);
        assert_string_equal(error.code, flag_codes[which]);
        assert_true(needs_data(error.code) || moved(w) == 0);
        assert_int_equal(sp_stage_n_versions(w->stage), 0);
    }
    sp_peer_source_count(w->sources[0], &counts);
    /* Only values show that one has no effect, so that one has no image. */
    assert_int_equal(counts.images, trusted && which != 1);
    sp_free(folder);
    world_destroy(w);
}

/* Without a base nobody knows which tensors are left out: the digest is of all of them. */
static void a_partial_one_of_a_peer_without_a_base(void **state)
{
    static const char *const names[] = {"flagged"};
    world *w = world_create(2);
    char *folder = make_flagged(w, 0);
    sp_error error;

    (void)state;
    w->audit.allow_partial = true;
    w->peers[0].audit = NULL;
    w->peers[0].folder = folder;
    w->peers[0].names = names;
    w->peers[0].n_names = 1;
    w->peers[0].instead = ".";
    start(w);
    assert_int_equal(load(w, "flagged", NULL, PEER(0), NULL, &error), SP_ERR_PEER_CONTENT);
    assert_string_equal(error.code, "peer-content");
    assert_non_null(strstr(error.text, "allow-partial"));
    sp_free(folder);
    world_destroy(w);
}

static void flags_mean_what_they_mean_on_disk(void **state)
{
    (void)state;
    for (int which = 0; which < 3; which++)
        for (int round = 0; round < 4; round++)
            check_flag(which, round % 2, round / 2);
}

/* ---- images ---------------------------------------------------------------------------------- */

static void forge_in_an_image(fake_offer *offer)
{
    offer->image[1000] ^= 1;
}

static void forge_in_an_image_with_its_checksum(fake_offer *offer)
{
    offer->image[1000] ^= 1;
    offer->described.checksum = sp_xxh3(offer->image, (size_t)offer->image_bytes);
}

static void forge_a_rank(fake_offer *offer)
{
    offer->described.ranks[0]++;
}

static void forge_a_scale(fake_offer *offer)
{
    offer->described.scales[0] *= 2;
}

static void forge_a_huge_rank(fake_offer *offer)
{
    offer->described.ranks[0] = 1 << 20;
}

static void forge_the_sites(fake_offer *offer)
{
    offer->described.n_sites--;
}

static void forge_the_bytes(fake_offer *offer)
{
    offer->described.bytes -= 256;
}

static void forge_the_seal(fake_offer *offer)
{
    offer->described.seal.bytes[0] ^= 1;
}

static const forgery image_forgeries[] = {
    {forge_in_an_image, SP_ERR_REFUSED, "bad-image", true},
    {forge_in_an_image_with_its_checksum, SP_ERR_PEER_CONTENT, "peer-content", true},
    {forge_a_rank, SP_ERR_PEER_CONTENT, "peer-content", true},
    {forge_a_scale, SP_ERR_PEER_CONTENT, "peer-content", true},
    {forge_a_huge_rank, SP_ERR_REFUSED, "bad-image", true},
    {forge_the_seal, SP_ERR_PEER_CONTENT, "peer-content", true},
    /* The seal is of the true digest. */
    {forge_the_digest, SP_ERR_PEER_CONTENT, "peer-content", true},
    {forge_the_sites, SP_ERR_REFUSED, "other-layout", false},
    {forge_the_bytes, SP_ERR_PEER_PROTOCOL, "peer-manifest", true},
};

/* With two slots an image comes into memory of its own, with four into one of them. */
static void forgeries_in_images(void **state)
{
    (void)state;
    for (int32_t slots = 2; slots <= 4; slots += 2) {
        world *w = world_create(slots);
        sp_peer_source_counts counts;
        sp_error error;

        w->trust_images = w->peers[0].proven = true;
        w->peers[0].layout = w->layout;
        start(w);
        assert_ok(load_folder(w, "plain-r8", "attn-r4", &error), &error);
        for (size_t i = 0; i < sizeof image_forgeries / sizeof *image_forgeries; i++) {
            check_forgery(w, &image_forgeries[i], NULL);
            assert_int_equal(count_slots(w, SP_SLOT_EMPTY), slots - 1);
        }
        assert_int_equal(n_landed(w), 0);
        /* What the tensors are does not matter then. */
        w->peers[0].forgery = forge_a_byte;
        assert_ok(load(w, "plain-r8", NULL, PEER(0), NULL, &error), &error);
        check_is(w, "plain-r8", "plain-r8");
        assert_int_equal(n_landed(w), lands(slots));
        sp_peer_source_count(w->sources[0], &counts);
        assert_int_equal(counts.images_passed, 0);
        world_destroy(w);
    }
}

/* Without trust the same false images are not even read. */
static void images_that_are_not_trusted(void **state)
{
    (void)state;
    for (int round = 0; round < 2; round++) {
        world *w = world_create(2);
        sp_error error;

        w->trust_images = round == 0;
        w->peers[0].proven = round == 1;
        w->peers[0].layout = w->layout;
        start(w);
        for (size_t i = 0; i < sizeof image_forgeries / sizeof *image_forgeries; i++) {
            if (image_forgeries[i].forgery == forge_the_digest)
                continue;
            w->peers[0].forgery = image_forgeries[i].forgery;
            assert_ok(load(w, "plain-r8", NULL, PEER(0), NULL, &error), &error);
            check_is(w, "plain-r8", "plain-r8");
        }
        world_destroy(w);
    }
}

static void forge_the_layout(fake_offer *offer)
{
    offer->described.fingerprint.bytes[3] ^= 1;
}

static void an_image_for_another_layout(void **state)
{
    world *w = world_create(2);
    sp_peer_source_counts counts;
    sp_error error;

    (void)state;
    w->trust_images = w->peers[0].proven = true;
    w->peers[0].layout = w->layout;
    w->peers[0].forgery = forge_the_layout;
    start(w);
    assert_ok(load(w, "plain-r8", NULL, PEER(0), NULL, &error), &error);
    check_is(w, "plain-r8", "plain-r8");
    sp_peer_source_count(w->sources[0], &counts);
    assert_int_equal(counts.images, 0);
    assert_int_equal(counts.images_passed, 1);
    world_destroy(w);
}

/* ---- a digest means its bytes ---------------------------------------------------------------- */

/* Content A is wanted; the peer says that it has it and sends B's bytes, or A's with a flaw. */
static sp_digest claimed;

static void forge_the_wanted_digest(fake_offer *offer)
{
    offer->offer.manifest.digest = claimed;
}

static void a_digest_never_means_other_bytes(void **state)
{
    static const char *const names[] = {"any"};
    world *w = world_create(3);
    sp_error error;

    (void)state;
    w->peers[1] = w->peers[0];
    claimed = fake_peer_digest(&w->peers[0], "attn-r4");
    w->peers[0].names = names;
    w->peers[0].n_names = 1;
    w->peers[0].instead = "plain-r8";
    w->peers[0].forgery = forge_the_wanted_digest;
    start(w);
    /* By name its identity is that of its bytes. */
    assert_int_equal(load(w, "any", NULL, PEER(0), NULL, &error), SP_ERR_PEER_CONTENT);
    assert_int_equal(sp_stage_n_versions(w->stage), 0);
    /* The other peer has it, and is requested. */
    assert_ok(load(w, "x", NULL, SP_SOURCE_ANY, &claimed, &error), &error);
    check_is(w, "x", "attn-r4");
    world_destroy(w);
}

/* A peer that restarts with other bytes under a name that is held here. */
static void other_bytes_under_the_same_name(void **state)
{
    static const char *const names[] = {"x"};
    world *w = world_create(1);
    sp_hold held = {.struct_bytes = sizeof held};
    sp_error error;
    sp_status status;

    (void)state;
    w->host_bytes_max = sp_layout_image_bytes(w->layout);
    w->peers[0].names = names;
    w->peers[0].n_names = 1;
    w->peers[0].instead = "plain-r8";
    w->peers[1].n_names = 0;
    start(w);
    assert_ok(load_by_name(w, "x", &error), &error);
    check_is(w, "x", "plain-r8");
    assert_ok(load_folder(w, "y", "ffn", &error), &error); /* its image is dropped */
    w->peers[0].instead = "attn-r4";
    assert_ok(sp_stage_hold(w->stage, SP_HOLD_NAMED, "y", &held, &error), &error);
    while ((status = sp_stage_request(w->stage, &held, false, &error)) > 0)
        sp_stage_poll(w->stage);
    assert_ok(status, &error);
    sp_stage_release(w->stage, &held);
    assert_int_equal(find(w, "x").state, SP_STAGE_VERSION_DISK);
    /* What the name meant is gone: an error by name, never the other bytes. */
    assert_ok(sp_stage_hold(w->stage, SP_HOLD_NAMED, "x", &held, &error), &error);
    while ((status = sp_stage_request(w->stage, &held, false, &error)) > 0)
        sp_stage_poll(w->stage);
    assert_int_equal(status, SP_ERR_NOT_FOUND);
    sp_stage_release(w->stage, &held);
    assert_ok(load_by_name(w, "x", &error), &error);
    assert_ok(sp_stage_hold(w->stage, SP_HOLD_NAMED, "x", &held, &error), &error);
    while ((status = sp_stage_request(w->stage, &held, false, &error)) > 0)
        sp_stage_poll(w->stage);
    assert_ok(status, &error);
    check_is(w, "x", "attn-r4");
    sp_stage_release(w->stage, &held);
    world_destroy(w);
}

/* ---- straight into a slot -------------------------------------------------------------------- */

static world *landing_world(void)
{
    world *w = world_create(4);

    w->threads = 1;
    w->trust_images = w->peers[0].proven = w->peers[1].proven = true;
    w->peers[0].layout = w->peers[1].layout = w->layout;
    start(w);
    return w;
}

static void hold_and_release(const world *w, const char *name)
{
    sp_hold held = {.struct_bytes = sizeof held};
    sp_error error;
    sp_status status;

    assert_ok(sp_stage_hold(w->stage, SP_HOLD_NAMED, name, &held, &error), &error);
    while ((status = sp_stage_request(w->stage, &held, false, &error)) > 0) {
        sp_stage_wait(w->stage, 100);
        sp_stage_poll(w->stage);
    }
    assert_ok(status, &error);
    sp_stage_release(w->stage, &held);
}

/* Others need its slot: the image that was kept brings it back, without the peer. */
static void what_landed_is_kept_on_the_host(void **state)
{
    static const char *const others[] = {"attn-r4", "ffn", "r1", "patterns"};
    world *w = landing_world();
    int described;
    sp_error error;

    (void)state;
    if (!lands(4)) {
        world_destroy(w);
        skip();
    }
    assert_ok(load(w, "plain-r8", NULL, PEER(0), NULL, &error), &error);
    assert_int_equal(n_landed(w), 1);
    assert_int_equal(find(w, "plain-r8").image_bytes, 0); /* the slot is all there is so far */
    check_is(w, "plain-r8", "plain-r8");
    described = w->peers[0].n_described;
    for (size_t i = 0; i < 4; i++) {
        assert_ok(load_folder(w, others[i], others[i], &error), &error);
        hold_and_release(w, others[i]);
    }
    assert_int_equal(find(w, "plain-r8").slot, -1);
    fail_with(&w->peers[0], SP_ERR_PEER_UNREACHABLE, "peer-unreachable");
    fail_with(&w->peers[1], SP_ERR_PEER_UNREACHABLE, "peer-unreachable");
    hold_and_release(w, "plain-r8");
    check_is(w, "plain-r8", "plain-r8");
    assert_int_equal(w->peers[0].n_described, described);
    assert_int_equal(n_landed(w), 1);
    world_destroy(w);
}

/* A slot that an image comes into is not an empty one: what is added takes no other's. */
static void what_is_added_beside_a_landing_evicts_nothing(void **state)
{
    static const char *const others[] = {"attn-r4", "ffn", "r1"};
    world *w = landing_world();
    sp_stage_load_options options;
    sp_adapter *adapter;
    int64_t ticket;
    sp_error error;

    (void)state;
    if (!lands(4)) {
        world_destroy(w);
        skip();
    }
    w->peers[0].slow_ms = 500;
    assert_int_equal(begin(w, "plain-r8", NULL, PEER(0), NULL, &ticket, &error), SP_PENDING);
    while (count_slots(w, SP_SLOT_LOADING) < 1)
        sp_stage_poll(w->stage);
    for (int i = 0; i < 3; i++) {
        assert_ok(load_folder(w, others[i], others[i], &error), &error);
        hold_and_release(w, others[i]);
    }
    assert_int_equal(count_slots(w, SP_SLOT_LOADING), 1);
    assert_ok(sp_adapter_open(ADAPTERS "patterns", &w->audit, &adapter, &error), &error);
    sp_stage_load_options_default(&options, sizeof options);
    options.name = "patterns";
    assert_ok(sp_stage_add(w->stage, &options, adapter, &error), &error);
    sp_adapter_release(adapter);
    assert_int_equal(find(w, "patterns").slot, -1);
    assert_ok(settle(w, ticket, &error), &error);
    for (int i = 0; i < 3; i++) {
        assert_true(find(w, others[i]).slot >= 0);
        hold_and_release(w, others[i]);
        check_is(w, others[i], others[i]);
    }
    hold_and_release(w, "patterns");
    check_is(w, "patterns", "patterns");
    world_destroy(w);
}

/* Unloaded, and the stage destroyed, at each point of keeping it. */
static void what_is_being_kept_may_go(void **state)
{
    (void)state;
    for (int round = 0; round < 2; round++) {
        world *w = landing_world();
        sp_error error;

        assert_ok(load(w, "plain-r8", NULL, PEER(0), NULL, &error), &error);
        if (round == 0)
            assert_ok(sp_stage_unload(w->stage, "plain-r8", &error), &error);
        while (round == 0 && sp_stage_poll(w->stage) != SP_AGAIN)
            sp_stage_wait(w->stage, 10);
        if (round == 0) {
            sp_stage_stats stats = {.struct_bytes = sizeof stats};

            assert_ok(sp_stage_get_stats(w->stage, &stats, &error), &error);
            assert_int_equal(stats.host_bytes, 0);
            assert_int_equal(count_slots(w, SP_SLOT_EMPTY), 4);
        }
        world_destroy(w);
    }
}

/* A peer hangs with the slot open: the others serve, and whatever ends it frees the slot. */
static void a_hung_peer_gives_its_slot_back(void **state)
{
    (void)state;
    for (int round = 0; round < 2; round++) {
        world *w = landing_world();
        int64_t ticket;
        sp_error error;

        w->peers[0].manner = FAKE_HANGS_FETCHING;
        assert_int_equal(begin(w, "plain-r8", NULL, PEER(0), NULL, &ticket, &error), SP_PENDING);
        while (atomic_load(&w->peers[0].n_waiting) == 0) {
            sp_stage_wait(w->stage, 10);
            sp_stage_poll(w->stage);
        }
        assert_int_equal(count_slots(w, SP_SLOT_LOADING), lands(4));
        assert_ok(load_folder(w, "ffn", "ffn", &error), &error);
        hold_and_release(w, "ffn");
        check_is(w, "ffn", "ffn");
        if (round == 0) {
            assert_ok(sp_stage_unload(w->stage, "plain-r8", &error), &error);
            assert_int_equal(settle(w, ticket, &error), SP_ERR_STATE);
            assert_string_equal(error.code, "load-cancelled");
            while (sp_stage_poll(w->stage) != SP_AGAIN)
                sp_stage_wait(w->stage, 10);
        } else {
            stop(w);
            assert_int_equal(count_slots(w, SP_SLOT_EMPTY), 4);
            start(w);
        }
        assert_int_equal(count_slots(w, SP_SLOT_LOADING), 0);
        w->peers[0].manner = FAKE_SERVES;
        assert_ok(load(w, "plain-r8", NULL, PEER(0), NULL, &error), &error);
        check_is(w, "plain-r8", "plain-r8");
        world_destroy(w);
    }
}

/* The first peer dies half-way into the slot, the second one's image, or tensors, come. */
static void the_next_peer_goes_on(void **state)
{
    (void)state;
    for (int tensors = 0; tensors < 2; tensors++) {
        world *w = landing_world();
        sp_error error;

        w->peers[0].manner = FAKE_DIES_FETCHING;
        w->peers[0].dies_after = sp_layout_slot_bytes(w->layout) / 2;
        if (tensors)
            w->peers[1].layout = NULL;
        assert_ok(load_by_name(w, "plain-r8", &error), &error);
        check_is(w, "plain-r8", "plain-r8");
        assert_int_equal(n_landed(w), lands(4) && !tensors);
        assert_int_equal(count_slots(w, SP_SLOT_EMPTY), 3);
        world_destroy(w);
    }
}

/* Two names of one content, at the same time: it has one slot. */
static void one_content_lands_once(void **state)
{
    static const char *const names[] = {"x", "y"};
    world *w = landing_world();
    int64_t tickets[2];
    sp_error error;

    (void)state;
    for (int i = 0; i < 2; i++) {
        w->peers[i].names = names;
        w->peers[i].n_names = 2;
        w->peers[i].instead = "plain-r8";
        w->peers[i].slow_ms = 100;
        assert_int_equal(begin(w, names[i], NULL, PEER(i), NULL, &tickets[i], &error), SP_PENDING);
    }
    while (lands(4) && count_slots(w, SP_SLOT_LOADING) < 2)
        sp_stage_poll(w->stage);
    for (int i = 0; i < 2; i++)
        assert_ok(settle(w, tickets[i], &error), &error);
    assert_int_equal(find(w, "x").slot, find(w, "y").slot);
    assert_int_equal(n_landed(w), lands(4));
    assert_int_equal(count_slots(w, SP_SLOT_EMPTY), 3);
    check_is(w, "x", "plain-r8");
    world_destroy(w);
}

/* ---- DEFAULT --------------------------------------------------------------------------------- */

static void what_comes_in_moves_no_default(void **state)
{
    world *w = world_create(3);
    sp_hold held = {.struct_bytes = sizeof held};
    sp_error error;

    (void)state;
    start(w);
    assert_ok(load_by_name(w, "plain-r8", &error), &error);
    assert_ok(sp_stage_hold(w->stage, SP_HOLD_DEFAULT, NULL, &held, &error), &error);
    assert_null(held.version); /* still the base */
    assert_ok(sp_stage_set_active(w->stage, "plain-r8", &error), &error);
    assert_ok(load_by_name(w, "attn-r4", &error), &error);
    assert_true(find(w, "plain-r8").active);
    assert_false(find(w, "attn-r4").active);
    assert_ok(sp_stage_hold(w->stage, SP_HOLD_DEFAULT, NULL, &held, &error), &error);
    assert_string_equal(sp_stage_version_name(held.version), "plain-r8");
    sp_stage_release(w->stage, &held);
    world_destroy(w);
}

/* ---- out of memory --------------------------------------------------------------------------- */

/* Whichever allocation of a load fails, it says so, leaves nothing, and the next one succeeds. */
static void every_allocation_may_fail(void **state)
{
    (void)state;
    for (int trusted = 0; trusted < 2; trusted++) {
        world *w = world_create(2);
        int64_t failing = 0;
        size_t blocks;
        sp_error error;
        sp_status status;

        w->trust_images = w->peers[0].proven = trusted;
        w->peers[0].layout = w->layout;
        fake_peer_prepare(&w->peers[0], "plain-r8");
        start(w);
        blocks = sp_alloc_blocks();
        do {
            sp_alloc_fail_after(failing++);
            status = load(w, "plain-r8", NULL, PEER(0), NULL, &error);
            sp_alloc_fail_after(-1);
            if (status != SP_OK) {
                assert_int_equal(status, SP_ERR_MEMORY);
                assert_int_equal(sp_alloc_blocks(), blocks);
            }
        } while (status != SP_OK);
        assert_true(failing > (trusted ? 8 : 40));
        check_is(w, "plain-r8", "plain-r8");
        fake_peer_prepare(&w->peers[0], NULL);
        world_destroy(w);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_fixture_as_from_disk),
        cmocka_unit_test(every_type_that_may_come),
        cmocka_unit_test(many_small_tensors_are_few_calls),
        cmocka_unit_test(by_digest_under_whatever_name),
        cmocka_unit_test(a_peer_that_fails_is_passed_over),
        cmocka_unit_test(a_hung_peer_holds_no_load_from_disk),
        cmocka_unit_test(after_its_deadline_the_next_is_asked),
        cmocka_unit_test(a_slow_peer_is_no_hung_one),
        cmocka_unit_test(a_peer_that_dies_half_way),
        cmocka_unit_test(forgeries_in_tensors),
        cmocka_unit_test(a_type_of_the_same_size),
        cmocka_unit_test(flags_mean_what_they_mean_on_disk),
        cmocka_unit_test(a_partial_one_of_a_peer_without_a_base),
        cmocka_unit_test(forgeries_in_images),
        cmocka_unit_test(images_that_are_not_trusted),
        cmocka_unit_test(an_image_for_another_layout),
        cmocka_unit_test(a_digest_never_means_other_bytes),
        cmocka_unit_test(other_bytes_under_the_same_name),
        cmocka_unit_test(what_landed_is_kept_on_the_host),
        cmocka_unit_test(what_is_added_beside_a_landing_evicts_nothing),
        cmocka_unit_test(what_is_being_kept_may_go),
        cmocka_unit_test(a_hung_peer_gives_its_slot_back),
        cmocka_unit_test(the_next_peer_goes_on),
        cmocka_unit_test(one_content_lands_once),
        cmocka_unit_test(what_comes_in_moves_no_default),
        cmocka_unit_test(every_allocation_may_fail),
    };

    if (argc > 1)
        device_name = argv[1];
    if (argc > 2)
        cmocka_set_test_filter(argv[2]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
