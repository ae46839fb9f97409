/*
 * test_sources.c: where adapters come from: several sources in order, verdicts before bytes,
 * sources that hang, lie or are late, images that are packed elsewhere, and adapters that exist in
 * memory only.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "base/file.h"
#include "base/hash.h"
#include "pool/image.h"
#include "support/test.h"
#include "support/views.h"

#include <sidepath/stage.h>

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#define BASE     SP_TEST_FIXTURES "/qwen3-tied"
#define ADAPTERS BASE "/adapters/"

/* ---- a source that serves a fixture's tensors from memory, or does worse ----------------------
 */

typedef enum manner {
    SERVES,
    LACKS,            /* describe: not here */
    IS_LATE,          /* describe: as a peer that does not answer */
    HANGS_DESCRIBING, /* until it is cancelled */
    HANGS_FETCHING,
    FAILS_HALF_WAY,
    FAILS_IN_SILENCE,
    SAYS_PENDING,
    PACKED /* an image */
} manner;

typedef struct test_source {
    _Atomic(manner) manner;
    char *config;
    size_t config_bytes;
    golden *file;
    sp_tensor_desc *descs;
    sp_packed_image packed;
    const char *image_bytes;
    const sp_digest *promised; /* NULL: says nothing of its content */
    sp_source_request seen;    /* the last request, its pointers gone */
    bool had_digest;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    atomic_int n_described, n_fetched, n_released, n_cancelled, n_hanging;
} test_source;

static sp_status hang(test_source *source, const sp_source_request *request, sp_error *error)
{
    atomic_fetch_add(&source->n_hanging, 1);
    pthread_mutex_lock(&source->mutex);
    while (!sp_source_is_cancelled(request))
        pthread_cond_wait(&source->wake, &source->mutex);
    pthread_mutex_unlock(&source->mutex);
    atomic_fetch_sub(&source->n_hanging, 1);
    return sp_fail(error, SP_ERR_IO, NULL, request->name, -1, "woken");
}

static sp_status describe(void *user, const sp_source_request *request,
                          sp_source_description *out_description, sp_error *error)
{
    test_source *source = user;

    atomic_fetch_add(&source->n_described, 1);
    pthread_mutex_lock(&source->mutex); /* two threads of the stage may be here */
    source->seen = *request;
    source->had_digest = request->digest != NULL;
    pthread_mutex_unlock(&source->mutex);
    if (source->manner == LACKS)
        return sp_fail(error, SP_ERR_NOT_FOUND, NULL, request->name, -1, "not in memory");
    if (source->manner == IS_LATE)
        return sp_fail(error, SP_ERR_PEER_TIMEOUT, "peer-timeout", request->name, -1, "too late");
    if (source->manner == HANGS_DESCRIBING)
        return hang(source, request, error);
    assert_int_equal(out_description->struct_bytes, sizeof *out_description);
    out_description->handle = source;
    out_description->digest = source->promised;
    if (source->manner == PACKED) {
        out_description->image = &source->packed;
        return SP_OK;
    }
    out_description->config = source->config;
    out_description->config_bytes = source->config_bytes;
    out_description->tensors = source->descs;
    out_description->n_tensors = source->file->n_tensors;
    return SP_OK;
}

static sp_status fetch(void *user, const sp_source_request *request, void *handle,
                       const sp_source_piece *piece, sp_error *error)
{
    test_source *source = user;
    const char *bytes =
        source->manner == PACKED ? source->image_bytes : source->file->tensors[piece->part].data;

    assert_ptr_equal(handle, source);
    atomic_fetch_add(&source->n_fetched, 1);
    switch (atomic_load(&source->manner)) {
    case HANGS_FETCHING:
        return hang(source, request, error);
    case FAILS_HALF_WAY:
        if (atomic_load(&source->n_fetched) > 20)
            return sp_fail(error, SP_ERR_IO, NULL, request->name, -1, "the cable is out");
        break;
    case FAILS_IN_SILENCE:
        return SP_ERR_IO;
    case SAYS_PENDING:
        return SP_PENDING;
    default:
        break;
    }
    memcpy(piece->memory, bytes + piece->offset, piece->bytes);
    return SP_OK;
}

static void cancel(void *user, uint64_t id)
{
    test_source *source = user;

    assert_true(id > 0);
    atomic_fetch_add(&source->n_cancelled, 1);
    pthread_mutex_lock(&source->mutex);
    pthread_cond_broadcast(&source->wake);
    pthread_mutex_unlock(&source->mutex);
}

static void release(void *user, const sp_source_request *request, void *handle)
{
    test_source *source = user;

    assert_ptr_equal(handle, source);
    assert_true(request->id > 0);
    atomic_fetch_add(&source->n_released, 1);
}

static sp_tensor_type type_of(const char *word)
{
    return strcmp(word, "F32") == 0 ? SP_TENSOR_F32 : SP_TENSOR_BF16;
}

static void open_content(test_source *source, const char *adapter)
{
    char path[512];
    sp_error error;

    snprintf(path, sizeof path, ADAPTERS "%s/adapter_config.json", adapter);
    assert_ok(sp_file_read_all(path, 1u << 20, &source->config, &source->config_bytes, &error),
              &error);
    snprintf(path, sizeof path, "qwen3-tied/adapters/%s/adapter_model.safetensors", adapter);
    source->file = golden_open(path);
    source->descs = sp_calloc(source->file->n_tensors, sizeof *source->descs);
    assert_non_null(source->descs);
    for (size_t i = 0; i < source->file->n_tensors; i++) {
        const golden_tensor *tensor = &source->file->tensors[i];

        source->descs[i] = (sp_tensor_desc){sizeof *source->descs, tensor->name,
                                            type_of(tensor->dtype), tensor->n_dims, tensor->shape};
    }
    pthread_mutex_init(&source->mutex, NULL);
    pthread_cond_init(&source->wake, NULL);
}

static void close_content(test_source *source)
{
    sp_free(source->descs);
    golden_close(source->file);
    sp_free(source->config);
    pthread_cond_destroy(&source->wake);
    pthread_mutex_destroy(&source->mutex);
}

static sp_stage_source table_of(test_source *source)
{
    return (sp_stage_source){.struct_bytes = sizeof(sp_stage_source),
                             .user = source,
                             .describe = describe,
                             .fetch = fetch,
                             .cancel = cancel,
                             .release = release,
                             .piece_bytes = 1000};
}

/* ---- a world --------------------------------------------------------------------------------- */

typedef struct world {
    sp_geometry *geometry;
    sp_layout *layout;
    sp_device *device;
    sp_pool *pool;
    sp_stage_source disk;
    test_source test; /* serves plain-r8 */
    sp_stage *stage;
    sp_stage_options options;
    sp_adapter_options audit;
} world;

/* Everything but the stage. Sources and threads are the test's to add. */
static world *world_of(int32_t slots, const char *modules)
{
    world *w = sp_calloc(1, sizeof *w);
    sp_layout_options layout_options;
    sp_pool_options pool_options;
    sp_error error;

    assert_non_null(w);
    assert_ok(sp_geometry_open(BASE, &w->geometry, &error), &error);
    sp_layout_options_default(&layout_options, sizeof layout_options);
    layout_options.geometry = w->geometry;
    layout_options.rank = 16;
    if (modules != NULL)
        assert_ok(sp_module_set_parse(w->geometry, modules, &layout_options.modules, &error),
                  &error);
    assert_ok(sp_layout_create(&layout_options, &w->layout, &error), &error);
    assert_ok(sp_device_open("cpu", NULL, &w->device, &error), &error);
    sp_pool_options_default(&pool_options, sizeof pool_options);
    pool_options.layout = w->layout;
    pool_options.device = w->device;
    pool_options.slots = slots;
    assert_ok(sp_pool_create(&pool_options, &w->pool, &error), &error);
    w->disk.struct_bytes = sizeof w->disk;
    assert_ok(sp_disk_source_create(&w->disk, &error), &error);
    open_content(&w->test, "plain-r8");
    sp_adapter_options_default(&w->audit, sizeof w->audit);
    w->audit.geometry = w->geometry;
    w->audit.base_dir = BASE;
    sp_stage_options_default(&w->options, sizeof w->options);
    w->options.pool = w->pool;
    w->options.audit = &w->audit;
    w->options.threads = 0;
    return w;
}

static world *world_create(int32_t slots)
{
    return world_of(slots, NULL);
}

static void start(world *w, const sp_stage_source *sources, int32_t n)
{
    sp_error error;

    w->options.sources = sources;
    w->options.n_sources = n;
    assert_ok(sp_stage_create(&w->options, &w->stage, &error), &error);
}

static void world_destroy(world *w)
{
    sp_stage_destroy(w->stage);
    sp_disk_source_destroy(&w->disk);
    sp_disk_source_destroy(&w->disk);
    close_content(&w->test);
    sp_pool_destroy(w->pool);
    sp_device_close(w->device);
    sp_layout_release(w->layout);
    sp_geometry_release(w->geometry);
    sp_free(w);
    assert_int_equal(sp_alloc_blocks(), 0);
}

static sp_status begin(const world *w, const char *name, const char *location, int32_t source,
                       int64_t *out_ticket, sp_error *error)
{
    sp_stage_load_options options;

    sp_stage_load_options_default(&options, sizeof options);
    assert_int_equal(options.source, SP_SOURCE_ANY);
    options.name = name;
    options.location = location;
    options.source = source;
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
                      sp_error *error)
{
    int64_t ticket;
    sp_status status = begin(w, name, location, source, &ticket, error);

    return status == SP_PENDING ? settle(w, ticket, error) : status;
}

static sp_stage_version_info find(const world *w, const char *name)
{
    sp_stage_version_info info = {.struct_bytes = sizeof info};
    sp_error error;

    assert_ok(sp_stage_find(w->stage, name, &info, &error), &error);
    return info;
}

/* Requests a slot for the name and gives it back; true if it came. */
static sp_status use(const world *w, const char *name, sp_error *error)
{
    sp_hold held = {.struct_bytes = sizeof held};
    sp_status status;

    assert_ok(sp_stage_hold(w->stage, SP_HOLD_NAMED, name, &held, error), error);
    do {
        sp_stage_wait(w->stage, 10);
        sp_stage_poll(w->stage);
        status = sp_stage_request(w->stage, &held, false, error);
    } while (status == SP_PENDING);
    sp_stage_release(w->stage, &held);
    return status;
}

static sp_adapter *open_folder(const world *w, const char *adapter)
{
    char path[512];
    sp_adapter *opened;
    sp_error error;

    snprintf(path, sizeof path, ADAPTERS "%s", adapter);
    assert_ok(sp_adapter_open(path, &w->audit, &opened, &error), &error);
    return opened;
}

static bool has_digest_of(const world *w, const char *name, const char *adapter)
{
    sp_adapter *opened = open_folder(w, adapter);
    sp_digest digest = sp_adapter_digest(opened);
    sp_stage_version_info info = find(w, name);

    sp_adapter_release(opened);
    return memcmp(&digest, &info.digest, sizeof digest) == 0;
}

/* ---- tensors --------------------------------------------------------------------------------- */

/* What the folder gives, in pieces of 1,000 bytes; the receipt is the same but for the name. */
static void tensors_give_what_the_folder_gives(void **state)
{
    world *w = world_create(2);
    const sp_stage_source sources[] = {table_of(&w->test), w->disk};
    sp_digest fingerprint;
    char *receipt;
    sp_error error;

    (void)state;
    start(w, sources, 2);
    assert_ok(load(w, "x", NULL, 0, &error), &error);
    receipt = sp_strdup(find(w, "x").facts->receipt);
    assert_ok(load(w, "y", ADAPTERS "plain-r8", 1, &error), &error);
    assert_true(has_digest_of(w, "x", "plain-r8"));
    assert_int_equal(find(w, "x").slot, find(w, "y").slot); /* one content */
    assert_int_equal(w->test.n_described, 1);
    assert_true(w->test.n_fetched > (int)w->test.file->n_tensors);
    assert_int_equal(w->test.n_released, 1);
    fingerprint = sp_layout_fingerprint(w->layout);
    assert_memory_equal(&w->test.seen.fingerprint, &fingerprint, sizeof fingerprint);
    assert_false(w->test.had_digest);
    assert_ok(load(w, "x", ADAPTERS "plain-r8", 1, &error), &error);
    assert_string_equal(find(w, "x").facts->receipt, receipt);
    sp_free(receipt);
    world_destroy(w);
}

/* Every refusal that needs no data comes before a byte has moved. */
static void verdicts_come_before_bytes(void **state)
{
    world *w = world_create(1);
    const sp_stage_source sources[] = {table_of(&w->test)};
    static const int64_t wrong[] = {9, 9};
    sp_tensor_desc *desc = &w->test.descs[0], good = *desc;
    sp_error error;

    (void)state;
    w->audit.rank_max = 4;
    start(w, sources, 1);
    assert_int_equal(load(w, "x", NULL, 0, &error), SP_ERR_TOO_LARGE);
    assert_string_equal(error.code, "rank-exceeds-pool");
    sp_stage_destroy(w->stage);
    w->audit.rank_max = 0;
    w->options.supported = 0;
    start(w, sources, 1);
    assert_int_equal(load(w, "x", NULL, 0, &error), SP_ERR_UNSUPPORTED);
    assert_string_equal(error.code, "engine-unsupported");
    sp_stage_destroy(w->stage);
    w->options.supported = ~(sp_module_set)0;
    start(w, sources, 1);
    desc->shape = wrong;
    assert_int_equal(load(w, "x", NULL, 0, &error), SP_ERR_MISMATCH);
    assert_string_equal(error.code, "shape-mismatch");
    *desc = good;
    desc->name = "lm_head.strange";
    assert_true(load(w, "x", NULL, 0, &error) < 0);
    *desc = good;
    w->test.config[0] = '?';
    assert_int_equal(load(w, "x", NULL, 0, &error), SP_ERR_REFUSED);
    assert_string_equal(error.code, "config-malformed");
    w->test.config[0] = '{';
    assert_int_equal(w->test.n_fetched, 0);
    assert_int_equal(w->test.n_released, w->test.n_described);
    assert_ok(load(w, "x", NULL, 0, &error), &error);
    world_destroy(w);
}

static void so_does_a_pool_that_lacks_a_module(void **state)
{
    world *w = world_of(1, "q_proj,v_proj");
    const sp_stage_source sources[] = {table_of(&w->test)};
    sp_error error;

    (void)state;
    start(w, sources, 1);
    assert_int_equal(load(w, "x", NULL, 0, &error), SP_ERR_REFUSED);
    assert_string_equal(error.code, "module-not-in-pool");
    assert_int_equal(w->test.n_fetched, 0);
    world_destroy(w);
}

static void failures_leave_the_old_version(void **state)
{
    static const struct {
        manner manner;
        const char *word;
    } cases[] = {{FAILS_HALF_WAY, "cable"},
                 {FAILS_IN_SILENCE, "does not say why"},
                 {SAYS_PENDING, "no failure"},
                 {LACKS, "not in memory"}};
    world *w = world_create(2);
    const sp_stage_source sources[] = {table_of(&w->test), w->disk};
    uint64_t generation;
    sp_error error;

    (void)state;
    start(w, sources, 2);
    assert_ok(load(w, "x", ADAPTERS "attn-r4", 1, &error), &error);
    generation = find(w, "x").generation;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        w->test.manner = cases[i].manner;
        assert_true(load(w, "x", NULL, 0, &error) < 0);
        if (!strstr(error.text, cases[i].word))
            fail_msg("\"%s\" lacks \"%s\"", error.text, cases[i].word);
        assert_int_equal(find(w, "x").generation, generation);
        assert_int_equal(find(w, "x").state, SP_STAGE_VERSION_READY);
    }
    world_destroy(w);
}

/* ---- order ----------------------------------------------------------------------------------- */

static void the_first_that_has_it_gives_it(void **state)
{
    world *w = world_create(2);
    const sp_stage_source sources[] = {table_of(&w->test), w->disk};
    sp_error error;

    (void)state;
    start(w, sources, 2);
    assert_ok(load(w, "x", ADAPTERS "attn-r4", SP_SOURCE_ANY, &error), &error);
    assert_true(has_digest_of(w, "x", "plain-r8"));
    w->test.manner = LACKS;
    assert_ok(load(w, "y", ADAPTERS "attn-r4", SP_SOURCE_ANY, &error), &error);
    assert_true(has_digest_of(w, "y", "attn-r4"));
    /* Named, it is the only one that is asked. */
    assert_int_equal(load(w, "z", ADAPTERS "attn-r4", 0, &error), SP_ERR_NOT_FOUND);
    /* Nobody has it: the first one's reason. */
    assert_int_equal(load(w, "z", ADAPTERS "nowhere", SP_SOURCE_ANY, &error), SP_ERR_NOT_FOUND);
    assert_string_equal(error.text, "not in memory");
    /* A failure is no lack. */
    w->test.manner = FAILS_IN_SILENCE;
    assert_int_equal(load(w, "z", ADAPTERS "attn-r4", SP_SOURCE_ANY, &error), SP_ERR_IO);
    assert_int_equal(load(w, "z", ADAPTERS "attn-r4", 2, &error), SP_ERR_ARGUMENT);
    assert_int_equal(load(w, "z", ADAPTERS "attn-r4", -2, &error), SP_ERR_ARGUMENT);
    world_destroy(w);
}

/* An image that was dropped comes back from whoever still has that content. */
static void a_dropped_image_is_asked_for_by_its_digest(void **state)
{
    world *w = world_create(1);
    const sp_stage_source sources[] = {table_of(&w->test), w->disk};
    sp_error error;

    (void)state;
    w->options.host_bytes_max = sp_layout_image_bytes(w->layout);
    start(w, sources, 2);
    w->test.manner = LACKS;
    assert_ok(load(w, "x", ADAPTERS "attn-r4", SP_SOURCE_ANY, &error), &error);
    w->test.manner = SERVES; /* something else by any name */
    assert_ok(load(w, "y", ADAPTERS "ffn", 1, &error), &error);
    assert_ok(use(w, "y", &error), &error);
    assert_int_equal(find(w, "x").state, SP_STAGE_VERSION_DISK);
    assert_ok(use(w, "x", &error), &error);
    assert_true(w->test.had_digest);
    assert_true(has_digest_of(w, "x", "attn-r4"));
    world_destroy(w);
}

/* A peer that is late or gone says nothing of what others have; its failure is what is told. */
static void after_a_peers_failure_the_next_is_asked(void **state)
{
    world *w = world_create(2);
    const sp_stage_source sources[] = {w->disk, table_of(&w->test), w->disk};
    sp_error error;

    (void)state;
    w->test.manner = IS_LATE;
    start(w, sources + 1, 2);
    assert_ok(load(w, "x", ADAPTERS "attn-r4", SP_SOURCE_ANY, &error), &error);
    assert_true(has_digest_of(w, "x", "attn-r4"));
    assert_int_equal(load(w, "y", NULL, SP_SOURCE_ANY, &error), SP_ERR_PEER_TIMEOUT);
    assert_string_equal(error.code, "peer-timeout");
    sp_stage_destroy(w->stage);
    start(w, sources, 3);
    assert_int_equal(load(w, "y", NULL, SP_SOURCE_ANY, &error), SP_ERR_PEER_TIMEOUT);
    w->test.manner = LACKS;
    assert_int_equal(load(w, "y", NULL, SP_SOURCE_ANY, &error), SP_ERR_NOT_FOUND);
    world_destroy(w);
}

/* ---- by digest ------------------------------------------------------------------------------- */

static sp_digest digest_of(const world *w, const char *adapter)
{
    sp_adapter *opened = open_folder(w, adapter);
    sp_digest digest = sp_adapter_digest(opened);

    sp_adapter_release(opened);
    return digest;
}

static sp_status begin_content(const world *w, const char *name, const sp_digest *digest,
                               int64_t *out_ticket, sp_error *error)
{
    sp_stage_load_options options;

    sp_stage_load_options_default(&options, sizeof options);
    options.name = name;
    options.digest = digest;
    options.replace = true;
    return sp_stage_load(w->stage, &options, out_ticket, error);
}

static sp_status load_content(const world *w, const char *name, const sp_digest *digest,
                              sp_error *error)
{
    int64_t ticket;
    sp_status status = begin_content(w, name, digest, &ticket, error);

    return status == SP_PENDING ? settle(w, ticket, error) : status;
}

static void a_promise_is_held_against_the_bytes(void **state)
{
    world *w = world_create(2);
    const sp_stage_source sources[] = {table_of(&w->test)};
    sp_digest good = digest_of(w, "plain-r8"), other = digest_of(w, "attn-r4");
    uint64_t generation;
    sp_error error;

    (void)state;
    w->test.promised = &good;
    start(w, sources, 1);
    assert_ok(load(w, "x", NULL, 0, &error), &error);
    generation = find(w, "x").generation;
    w->test.promised = &other;
    assert_int_equal(load(w, "x", NULL, 0, &error), SP_ERR_PEER_CONTENT);
    assert_string_equal(error.code, "peer-content");
    assert_int_equal(load_content(w, "y", &other, &error), SP_ERR_PEER_CONTENT);
    assert_int_equal(sp_stage_n_versions(w->stage), 1);
    assert_int_equal(find(w, "x").generation, generation);
    /* What would not be taken is not moved. */
    w->test.promised = &good;
    atomic_store(&w->test.n_fetched, 0);
    assert_int_equal(load_content(w, "y", &other, &error), SP_ERR_MISMATCH);
    assert_string_equal(error.code, "content-changed");
    assert_int_equal(w->test.n_fetched, 0);
    assert_int_equal(w->test.n_released, w->test.n_described);
    world_destroy(w);
}

/* However many names want it, and from whichever of the sources it comes. */
static void one_content_is_fetched_once(void **state)
{
    (void)state;
    for (int32_t threads = 0; threads < 3; threads++) {
        world *w = world_create(2);
        const sp_stage_source sources[] = {w->disk, table_of(&w->test)};
        sp_digest digest = digest_of(w, "plain-r8");
        static const char *const names[] = {"a", "b", "c", "d"};
        int64_t tickets[4];
        sp_error error;

        w->options.threads = threads;
        w->options.host_bytes_max = sp_layout_image_bytes(w->layout); /* for one, and no more */
        start(w, sources, 2);
        for (int i = 0; i < 4; i++)
            assert_int_equal(begin_content(w, names[i], &digest, &tickets[i], &error), SP_PENDING);
        for (int i = 0; i < 4; i++)
            assert_ok(settle(w, tickets[i], &error), &error);
        assert_ok(load_content(w, "e", &digest, &error), &error);
        assert_int_equal(w->test.n_described, 1);
        for (int i = 0; i < 4; i++) {
            assert_true(has_digest_of(w, names[i], "plain-r8"));
            assert_int_equal(find(w, names[i]).slot, find(w, "e").slot);
            assert_int_equal(sp_stage_unload(w->stage, names[i], &error), SP_OK);
        }
        assert_true(has_digest_of(w, "e", "plain-r8"));
        world_destroy(w);
    }
}

static void followers_of_a_fetch(void **state)
{
    world *w = world_create(2);
    const sp_stage_source sources[] = {table_of(&w->test)};
    sp_digest digest = digest_of(w, "plain-r8");
    sp_stage_stats stats = {.struct_bytes = sizeof stats};
    int64_t tickets[3];
    sp_error error;

    (void)state;
    w->options.threads = 1;
    start(w, sources, 1);
    /* They fail with it. */
    w->test.manner = HANGS_DESCRIBING;
    for (int i = 0; i < 3; i++)
        assert_int_equal(
            begin_content(w, (const char *[]){"a", "b", "c"}[i], &digest, &tickets[i], &error),
            SP_PENDING);
    while (atomic_load(&w->test.n_hanging) < 1)
        sched_yield();
    assert_ok(sp_stage_unload(w->stage, "c", &error), &error);
    assert_int_equal(settle(w, tickets[2], &error), SP_ERR_STATE);
    assert_int_equal(sp_stage_result(w->stage, tickets[1], NULL, &error), SP_PENDING);
    /* One whose leader was unloaded goes on alone. */
    w->test.manner = IS_LATE;
    assert_ok(sp_stage_unload(w->stage, "a", &error), &error);
    assert_int_equal(settle(w, tickets[0], &error), SP_ERR_STATE);
    assert_int_equal(settle(w, tickets[1], &error), SP_ERR_PEER_TIMEOUT);
    assert_int_equal(w->test.n_described, 2);
    sp_stage_destroy(w->stage);
    w->options.threads = 0;
    start(w, sources, 1);
    for (int i = 0; i < 3; i++)
        assert_int_equal(
            begin_content(w, (const char *[]){"a", "b", "c"}[i], &digest, &tickets[i], &error),
            SP_PENDING);
    for (int i = 0; i < 3; i++)
        assert_int_equal(settle(w, tickets[i], &error), SP_ERR_PEER_TIMEOUT);
    assert_int_equal(w->test.n_described, 3);
    assert_ok(sp_stage_get_stats(w->stage, &stats, &error), &error);
    assert_int_equal(stats.host_bytes, 0);
    assert_int_equal(sp_stage_n_versions(w->stage), 0);
    world_destroy(w);
}

/* ---- sources that hang ----------------------------------------------------------------------- */

static void wait_for_hanging(const test_source *source, int n)
{
    while (atomic_load(&source->n_hanging) < n)
        sched_yield();
}

/* All threads of one source wait for ever; the other one's loads go on; unloading wakes one. */
static void a_source_that_hangs_holds_nobody_elses_loads(void **state)
{
    (void)state;
    for (int round = 0; round < 2; round++) {
        world *w = world_create(2);
        const sp_stage_source sources[] = {table_of(&w->test), w->disk};
        int64_t hung[3];
        sp_error error;

        w->test.manner = round == 0 ? HANGS_DESCRIBING : HANGS_FETCHING;
        w->options.threads = 2;
        start(w, sources, 2);
        assert_int_equal(begin(w, "a", NULL, 0, &hung[0], &error), SP_PENDING);
        assert_int_equal(begin(w, "b", NULL, 0, &hung[1], &error), SP_PENDING);
        assert_int_equal(begin(w, "c", NULL, 0, &hung[2], &error), SP_PENDING); /* queued */
        wait_for_hanging(&w->test, 2);
        assert_ok(load(w, "x", ADAPTERS "attn-r4", 1, &error), &error);
        assert_ok(load(w, "y", ADAPTERS "plain-r8", 1, &error), &error);
        assert_ok(use(w, "x", &error), &error);
        assert_int_equal(sp_stage_result(w->stage, hung[0], NULL, &error), SP_PENDING);
        assert_ok(sp_stage_unload(w->stage, "a", &error), &error);
        assert_int_equal(settle(w, hung[0], &error), SP_ERR_STATE);
        assert_string_equal(error.code, "load-cancelled");
        assert_true(w->test.n_cancelled > 0);
        wait_for_hanging(&w->test, 2); /* b, and now c */
        world_destroy(w);              /* returns, with both in hand */
    }
}

static void a_call_that_takes_too_long_is_cancelled(void **state)
{
    (void)state;
    for (int round = 0; round < 2; round++) {
        world *w = world_create(1);
        const sp_stage_source sources[] = {table_of(&w->test)};
        sp_error error;

        w->test.manner = round == 0 ? HANGS_DESCRIBING : HANGS_FETCHING;
        w->options.threads = 1;
        w->options.call_ms_max = 20;
        start(w, sources, 1);
        assert_int_equal(load(w, "x", NULL, 0, &error), SP_ERR_IO);
        assert_string_equal(error.code, "source-timeout");
        assert_non_null(strstr(error.text, "20 ms"));
        w->test.manner = SERVES;
        assert_ok(load(w, "x", NULL, 0, &error), &error);
        world_destroy(w);
    }
}

/* ---- images that are packed already ---------------------------------------------------------- */

static void expect_other_bytes(const world *w)
{
    sp_error error;

    assert_int_equal(load(w, "x", NULL, 1, &error), SP_ERR_PEER_CONTENT);
    assert_string_equal(error.code, "peer-content");
    assert_int_equal(sp_stage_n_versions(w->stage), 0);
}

/* A seal covers what a checksum that was made anew would hide. */
static void check_seals(world *w, const sp_image *image)
{
    const sp_packed_image good = w->test.packed;
    size_t n = (size_t)good.n_sites, bytes = sp_layout_slot_bytes(w->layout);
    int32_t *ranks = sp_calloc(n, sizeof *ranks);
    float *scales = sp_calloc(n, sizeof *scales);
    char *data = sp_malloc(bytes);
    sp_image_label label = {image->ranks, image->scales, good.digest, good.checksum};
    sp_digest seal;
    sp_error error;

    assert_true(ranks && scales && data);
    memcpy(ranks, image->ranks, n * sizeof *ranks);
    memcpy(scales, image->scales, n * sizeof *scales);
    memcpy(data, image->data, bytes);
    assert_ok(sp_image_bind(w->layout, &label, data, NULL, &seal, &error), &error);
    w->test.packed.seal = &seal;
    w->test.packed.ranks = ranks;
    w->test.packed.scales = scales;
    w->test.image_bytes = data;
    scales[2] *= 2;
    expect_other_bytes(w);
    scales[2] /= 2;
    ranks[1] ^= 1;
    expect_other_bytes(w);
    ranks[1] ^= 1;
    w->test.packed.digest.bytes[7] ^= 1;
    expect_other_bytes(w);
    w->test.packed.digest.bytes[7] ^= 1;
    data[bytes / 2] ^= 1;
    w->test.packed.checksum = sp_xxh3(data, bytes);
    expect_other_bytes(w);
    data[bytes / 2] ^= 1;
    w->test.packed.checksum = good.checksum;
    assert_ok(load(w, "x", NULL, 1, &error), &error);
    assert_ok(sp_stage_unload(w->stage, "x", &error), &error);
    w->test.packed = good;
    w->test.image_bytes = image->data;
    sp_free(ranks);
    sp_free(scales);
    sp_free(data);
}

/* One of an expert, that images do not have. */
static void check_missing_pairs(world *w)
{
    sp_error error;

    w->test.packed.pairs++;
    assert_int_equal(load(w, "x", NULL, 1, &error), SP_ERR_REFUSED);
    assert_string_equal(error.code, "bad-image");
    assert_non_null(strstr(error.text, "28 of its 29 pairs"));
    w->test.packed.pairs--;
}

static void packed_images(void **state)
{
    world *w = world_create(2);
    sp_stage_source sources[] = {table_of(&w->test), table_of(&w->test)};
    sp_adapter *adapter = open_folder(w, "plain-r8");
    int32_t n = sp_layout_n_sites(w->layout);
    sp_image *image;
    sp_packed_image good;
    int32_t *ranks = sp_calloc((size_t)n, sizeof *ranks);
    float *scales = sp_calloc((size_t)n, sizeof *scales);
    sp_error error;

    (void)state;
    assert_true(ranks && scales);
    assert_ok(sp_layout_pack(w->layout, adapter, NULL, &image, &error), &error);
    good = (sp_packed_image){.struct_bytes = sizeof good,
                             .digest = sp_image_digest(image),
                             .fingerprint = sp_image_fingerprint(image),
                             .checksum = sp_image_checksum(image),
                             .ranks = image->ranks,
                             .scales = image->scales,
                             .n_sites = n,
                             .rank = 8,
                             .pairs = 28,
                             .receipt = "{}"};
    w->test.manner = PACKED;
    w->test.image_bytes = image->data;
    sources[1].images_trusted = true;
    start(w, sources, 2);
    w->test.packed = good;
    assert_int_equal(load(w, "x", NULL, 0, &error), SP_ERR_REFUSED);
    assert_string_equal(error.code, "image-not-trusted");
    w->test.packed.fingerprint.bytes[5] ^= 1;
    assert_int_equal(load(w, "x", NULL, 1, &error), SP_ERR_REFUSED);
    assert_string_equal(error.code, "other-layout");
    w->test.packed = good;
    w->test.packed.checksum ^= 1;
    assert_int_equal(load(w, "x", NULL, 1, &error), SP_ERR_REFUSED);
    assert_string_equal(error.code, "bad-image");
    memcpy(ranks, image->ranks, (size_t)n * sizeof *ranks);
    memcpy(scales, image->scales, (size_t)n * sizeof *scales);
    w->test.packed = good;
    w->test.packed.ranks = ranks;
    w->test.packed.scales = scales;
    ranks[3] = 5000;
    assert_int_equal(load(w, "x", NULL, 1, &error), SP_ERR_REFUSED);
    assert_string_equal(error.code, "bad-image");
    assert_int_equal(error.position, 3);
    ranks[3] = image->ranks[3];
    scales[4] = NAN;
    assert_int_equal(load(w, "x", NULL, 1, &error), SP_ERR_REFUSED);
    assert_string_equal(error.code, "bad-image");
    assert_int_equal(error.position, 4);
    w->test.packed = good;
    check_missing_pairs(w);
    check_seals(w, image);
    assert_ok(load(w, "x", NULL, 1, &error), &error);
    assert_true(has_digest_of(w, "x", "plain-r8"));
    assert_string_equal(find(w, "x").facts->receipt, "{}");
    assert_memory_equal(sp_pool_tables_at(w->pool, 0)->a[find(w, "x").slot], image->data,
                        sp_layout_slot_bytes(w->layout));
    sp_image_destroy(image);
    sp_adapter_release(adapter);
    sp_free(ranks);
    sp_free(scales);
    world_destroy(w);
}

/* ---- adapters in memory only ----------------------------------------------------------------- */

static sp_status put(const world *w, const char *name, sp_adapter *adapter, sp_error *error)
{
    sp_stage_load_options options;
    int64_t ticket;
    sp_status status;

    sp_stage_load_options_default(&options, sizeof options);
    options.name = name;
    options.replace = true;
    status = sp_stage_put(w->stage, &options, adapter, &ticket, error);
    return status == SP_PENDING ? settle(w, ticket, error) : status;
}

static sp_adapter *from_memory(const world *w, const char *adapter)
{
    char path[512];
    view_list *list;
    sp_adapter *opened;
    golden *file;
    char *config;
    size_t config_bytes;
    sp_error error;

    snprintf(path, sizeof path, ADAPTERS "%s/adapter_config.json", adapter);
    assert_ok(sp_file_read_all(path, 1u << 20, &config, &config_bytes, &error), &error);
    snprintf(path, sizeof path, "qwen3-tied/adapters/%s/adapter_model.safetensors", adapter);
    file = golden_open(path);
    list = view_list_create(file, VIEW_TRANSPOSED);
    assert_ok(sp_adapter_from_tensors(config, config_bytes, list->views, list->n, &w->audit,
                                      &opened, &error),
              &error);
    view_list_destroy(list);
    golden_close(file);
    sp_free(config);
    return opened;
}

/* Two slots' worth of pressure on one slot and a cache of two images: it is never lost. */
static void what_is_in_memory_only_is_never_evicted(void **state)
{
    static const char *const others[] = {"attn-r4", "ffn", "r1"};

    (void)state;
    for (int32_t threads = 0; threads < 2; threads++) {
        world *w = world_create(1);
        const sp_stage_source sources[] = {w->disk};
        sp_adapter *adapter = from_memory(w, "plain-r8");
        sp_error error;

        w->options.host_bytes_max = 2 * sp_layout_image_bytes(w->layout);
        w->options.threads = threads;
        start(w, sources, 1);
        assert_ok(put(w, "m", adapter, &error), &error);
        sp_adapter_release(adapter);
        assert_true(has_digest_of(w, "m", "plain-r8"));
        assert_string_equal(find(w, "m").location, "");
        for (size_t i = 0; i < 6; i++) {
            char path[512];

            snprintf(path, sizeof path, ADAPTERS "%s", others[i % 3]);
            assert_ok(load(w, others[i % 3], path, SP_SOURCE_ANY, &error), &error);
            assert_ok(use(w, others[i % 3], &error), &error);
            assert_true(find(w, "m").image_bytes > 0);
            assert_ok(use(w, "m", &error), &error);
            assert_int_equal(find(w, "m").state, SP_STAGE_VERSION_READY);
        }
        world_destroy(w);
    }
}

/* What cannot be kept is refused at once; room comes when such a version goes. */
static void what_cannot_be_kept_is_refused(void **state)
{
    world *w = world_create(1);
    sp_adapter *one = from_memory(w, "plain-r8"), *two = from_memory(w, "attn-r4");
    sp_stage_stats stats = {.struct_bytes = sizeof stats};
    sp_error error;

    (void)state;
    w->options.host_bytes_max = sp_layout_image_bytes(w->layout);
    start(w, NULL, 0);
    assert_int_equal(load(w, "x", ADAPTERS "plain-r8", SP_SOURCE_ANY, &error), SP_ERR_ARGUMENT);
    assert_ok(put(w, "one", one, &error), &error);
    assert_int_equal(put(w, "two", two, &error), SP_POOL_FULL);
    assert_string_equal(error.code, "host-cache-full");
    assert_ok(use(w, "one", &error), &error);
    assert_ok(sp_stage_unload(w->stage, "one", &error), &error);
    assert_ok(put(w, "two", two, &error), &error);
    assert_ok(sp_stage_unload(w->stage, "two", &error), &error);
    assert_ok(sp_stage_get_stats(w->stage, &stats, &error), &error);
    assert_int_equal(stats.host_bytes, 0);
    sp_stage_destroy(w->stage);
    w->options.supported = 0;
    start(w, NULL, 0);
    assert_int_equal(put(w, "one", one, &error), SP_ERR_UNSUPPORTED);
    assert_string_equal(error.code, "engine-unsupported");
    sp_adapter_release(one);
    sp_adapter_release(two);
    world_destroy(w);
}

/* One content under a name from memory and one from disk: it may be dropped once the first goes. */
static void a_content_that_the_disk_has_too(void **state)
{
    world *w = world_create(1);
    const sp_stage_source sources[] = {w->disk};
    sp_adapter *adapter = from_memory(w, "plain-r8");
    sp_error error;

    (void)state;
    w->options.host_bytes_max = sp_layout_image_bytes(w->layout);
    start(w, sources, 1);
    assert_ok(put(w, "m", adapter, &error), &error);
    sp_adapter_release(adapter);
    assert_int_equal(load(w, "d", ADAPTERS "plain-r8", 0, &error), SP_POOL_FULL);
    assert_ok(sp_stage_unload(w->stage, "m", &error), &error);
    assert_ok(load(w, "d", ADAPTERS "plain-r8", 0, &error), &error);
    assert_ok(load(w, "e", ADAPTERS "ffn", 0, &error), &error); /* drives its image out */
    assert_ok(use(w, "e", &error), &error);
    assert_ok(use(w, "d", &error), &error);
    world_destroy(w);
}

/* With a put in its queue, and with one that was packed and not taken. */
static void destroyed_with_puts_in_hand(void **state)
{
    (void)state;
    for (int round = 0; round < 2; round++) {
        world *w = world_create(1);
        sp_adapter *adapter = from_memory(w, "plain-r8");
        sp_stage_load_options options;
        int64_t ticket;
        sp_error error;

        w->options.threads = round;
        start(w, NULL, 0);
        sp_stage_load_options_default(&options, sizeof options);
        options.name = "m";
        assert_int_equal(sp_stage_put(w->stage, &options, adapter, &ticket, &error), SP_PENDING);
        assert_int_equal(sp_stage_put(w->stage, &options, adapter, &ticket, &error), SP_BUSY);
        sp_adapter_release(adapter);
        sp_stage_wait(w->stage, 1000);
        world_destroy(w);
    }
}

/* ---- calls that are wrong -------------------------------------------------------------------- */

static void wrong_options(void **state)
{
    world *w = world_create(1);
    sp_stage_source sources[] = {w->disk};
    sp_stage_load_options options;
    sp_stage_version_info info = {.struct_bytes = sizeof info};
    int64_t ticket;
    sp_error error;

    (void)state;
    sources[0].fetch = NULL;
    w->options.sources = sources;
    w->options.n_sources = 1;
    assert_int_equal(sp_stage_create(&w->options, &w->stage, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "sources");
    sources[0] = w->disk;
    sources[0].struct_bytes = 0;
    assert_int_equal(sp_stage_create(&w->options, &w->stage, &error), SP_ERR_ARGUMENT);
    sources[0] = w->disk;
    sources[0].threads = 65;
    assert_int_equal(sp_stage_create(&w->options, &w->stage, &error), SP_ERR_ARGUMENT);
    sources[0] = w->disk;
    w->options.n_sources = 65;
    assert_int_equal(sp_stage_create(&w->options, &w->stage, &error), SP_ERR_ARGUMENT);
    w->options.n_sources = 1;
    w->options.call_ms_max = -1;
    assert_int_equal(sp_stage_create(&w->options, &w->stage, &error), SP_ERR_ARGUMENT);
    w->options.call_ms_max = 0;
    assert_int_equal(sp_stage_create(&w->options, NULL, &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_stage_create(NULL, &w->stage, &error), SP_ERR_ARGUMENT);
    start(w, sources, 1);
    sp_stage_load_options_default(&options, sizeof options);
    assert_int_equal(sp_stage_load(w->stage, &options, &ticket, &error), SP_ERR_ARGUMENT);
    options.name = "x";
    assert_int_equal(sp_stage_load(w->stage, &options, NULL, &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_stage_put(w->stage, &options, NULL, &ticket, &error), SP_ERR_ARGUMENT);
    assert_int_equal(load(w, "x", NULL, SP_SOURCE_ANY, &error), SP_ERR_NOT_FOUND); /* no folder */
    assert_int_equal(sp_stage_version_at(w->stage, 0, &info, &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_stage_get_stats(w->stage, NULL, &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_stage_hold(w->stage, SP_HOLD_BASE, NULL, NULL, &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_disk_source_create(NULL, &error), SP_ERR_ARGUMENT);
    world_destroy(w);
}

/* Module sets of another geometry have other bits. */
static void an_adapter_of_another_geometry_is_refused(void **state)
{
    world *w = world_create(1);
    sp_geometry *own = w->geometry;
    sp_stage_load_options options;
    sp_adapter *adapter;
    int64_t ticket = -1;
    sp_error error;

    (void)state;
    start(w, NULL, 0);
    assert_ok(sp_geometry_open(BASE, &w->audit.geometry, &error), &error);
    adapter = from_memory(w, "plain-r8");
    assert_ptr_not_equal(w->audit.geometry, own);
    sp_geometry_release(w->audit.geometry);
    w->audit.geometry = own;
    sp_stage_load_options_default(&options, sizeof options);
    options.name = "other";
    assert_int_equal(sp_stage_put(w->stage, &options, adapter, &ticket, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.code, "other-geometry");
    assert_int_equal(ticket, -1);
    assert_int_equal(sp_stage_add(w->stage, &options, adapter, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.code, "other-geometry");
    assert_int_equal(sp_stage_n_versions(w->stage), 0);
    sp_adapter_release(adapter);
    world_destroy(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_adapter_of_another_geometry_is_refused),
        cmocka_unit_test(tensors_give_what_the_folder_gives),
        cmocka_unit_test(verdicts_come_before_bytes),
        cmocka_unit_test(so_does_a_pool_that_lacks_a_module),
        cmocka_unit_test(failures_leave_the_old_version),
        cmocka_unit_test(the_first_that_has_it_gives_it),
        cmocka_unit_test(a_dropped_image_is_asked_for_by_its_digest),
        cmocka_unit_test(after_a_peers_failure_the_next_is_asked),
        cmocka_unit_test(a_promise_is_held_against_the_bytes),
        cmocka_unit_test(one_content_is_fetched_once),
        cmocka_unit_test(followers_of_a_fetch),
        cmocka_unit_test(a_source_that_hangs_holds_nobody_elses_loads),
        cmocka_unit_test(a_call_that_takes_too_long_is_cancelled),
        cmocka_unit_test(packed_images),
        cmocka_unit_test(what_is_in_memory_only_is_never_evicted),
        cmocka_unit_test(what_cannot_be_kept_is_refused),
        cmocka_unit_test(a_content_that_the_disk_has_too),
        cmocka_unit_test(destroyed_with_puts_in_hand),
        cmocka_unit_test(wrong_options),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
