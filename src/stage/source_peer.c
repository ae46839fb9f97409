#include "stage/source_peer.h"

#include "base/alloc.h"
#include "base/assert.h"
#include "base/clock.h"
#include "base/error.h"

#include <stdatomic.h>
#include <string.h>

#define NS_PER_MS    1000000u
#define PIECE_BYTES  ((size_t)16 << 20) /* of the stage's calls: many requests at a time */
#define RANGE_BYTES  ((uint64_t)2 << 20)
#define RANGES_MAX   (PIECE_BYTES / RANGE_BYTES)
#define WINDOW_BYTES ((uint64_t)8 << 20) /* read ahead for pieces below DIRECT_BYTES */
#define DIRECT_BYTES ((uint64_t)1 << 20)
#define QUIET_NS     ((uint64_t)1000 * NS_PER_MS) /* after a call that timed out */

struct sp_peer_source {
    char *address;
    sp_peer_calls calls;
    bool trust_images;
    uint64_t call_ns_max;
    int32_t threads;
    atomic_ullong late_ns; /* when a call timed out last; 0: never, or it has answered since */
    atomic_ullong described, images, images_passed, failures, bytes;
};

/* One adapter that is being fetched. */
typedef struct peer_fetch {
    sp_peer_offer *offer;
    sp_packed_image image;
    bool is_image;
    /* Of the tensors' part: bytes that have come before they were requested. */
    char *window; /* [WINDOW_BYTES], or all of the part; NULL: none yet */
    uint64_t window_at, window_bytes;
} peer_fetch;

/* ---- calls ----------------------------------------------------------------------------------- */

static bool is_cancelled(void *user)
{
    return sp_source_is_cancelled(user);
}

/* deadline_ns: the stage's, 0: none. */
static sp_peer_wait wait_for(const sp_peer_source *source, const sp_source_request *request,
                             uint64_t deadline_ns)
{
    sp_peer_wait wait = {deadline_ns, is_cancelled, (void *)request};
    uint64_t own_ns = source->call_ns_max != 0 ? sp_clock_ns() + source->call_ns_max : 0;

    if (own_ns != 0 && (deadline_ns == 0 || own_ns < deadline_ns))
        wait.deadline_ns = own_ns;
    return wait;
}

/* Whose fault it is decides the status: an answer that is too large is the peer's, no client's. */
static sp_status take_outcome(sp_peer_source *source, sp_status status, sp_error *error)
{
    if (status == SP_ERR_TOO_LARGE) {
        status = SP_ERR_PEER_PROTOCOL;
        error->status = status;
    }
    if (status == SP_ERR_PEER_TIMEOUT)
        atomic_store(&source->late_ns, sp_clock_ns());
    else if (status == SP_OK || status == SP_ERR_NOT_FOUND)
        atomic_store(&source->late_ns, 0);
    if (status != SP_OK && status != SP_ERR_NOT_FOUND)
        atomic_fetch_add(&source->failures, 1);
    return status;
}

static sp_status check_quiet(const sp_peer_source *source, sp_error *error)
{
    uint64_t late_ns = atomic_load(&source->late_ns);

    if (late_ns == 0 || sp_clock_ns() >= late_ns + QUIET_NS)
        return SP_OK;
    return sp_fail(error, SP_ERR_PEER_TIMEOUT, "peer-timeout", source->address, -1,
                   "the peer %s did not answer in time a moment ago", source->address);
}

/* ---- describing ------------------------------------------------------------------------------ */

static bool takes_image(const sp_peer_source *source, const sp_source_request *request,
                        const sp_peer_offer *offer)
{
    const sp_peer_image *image = offer->manifest.image;

    return source->trust_images && offer->proven &&
           memcmp(&image->fingerprint, &request->fingerprint, sizeof image->fingerprint) == 0;
}

static void describe_image(peer_fetch *fetch)
{
    const sp_peer_manifest *manifest = &fetch->offer->manifest;
    const sp_peer_image *image = manifest->image;

    fetch->is_image = true;
    fetch->image = (sp_packed_image){
        .struct_bytes = sizeof fetch->image,
        .digest = manifest->digest,
        .fingerprint = image->fingerprint,
        .checksum = image->checksum,
        .ranks = image->ranks,
        .scales = image->scales,
        .n_sites = image->n_sites,
        .rank = image->rank,
        .pairs = image->pairs,
        .file_bytes = (size_t)image->file_bytes,
        .row_macs = image->row_macs,
        .receipt = image->receipt,
        .seal = &image->seal,
        .expert_bytes = (size_t)image->expert_bytes,
    };
}

static void describe_offer(sp_peer_source *source, const sp_source_request *request,
                           peer_fetch *fetch, sp_source_description *out_description)
{
    const sp_peer_manifest *manifest = &fetch->offer->manifest;

    atomic_fetch_add(&source->described, 1);
    out_description->handle = fetch;
    out_description->digest = &manifest->digest;
    out_description->config = manifest->config;
    out_description->config_bytes = manifest->config_bytes;
    out_description->tensors = manifest->tensors;
    out_description->n_tensors = manifest->n_tensors;
    if (manifest->image && takes_image(source, request, fetch->offer)) {
        atomic_fetch_add(&source->images, 1);
        describe_image(fetch);
        out_description->image = &fetch->image;
        return;
    }
    atomic_fetch_add(&source->images_passed, manifest->image != NULL);
}

static sp_status describe(void *user, const sp_source_request *request,
                          sp_source_description *out_description, sp_error *error)
{
    sp_peer_source *source = user;
    /* A content may have another name there. */
    const sp_peer_query query = {request->digest ? NULL : request->name, request->digest};
    const sp_peer_wait wait = wait_for(source, request, 0);
    peer_fetch *fetch;
    sp_status status = check_quiet(source, error);

    if (status != SP_OK)
        return status;
    fetch = sp_calloc(1, sizeof *fetch);
    if (!fetch)
        return sp_fail_memory(error, sizeof *fetch, "a fetch from a peer");
    status = source->calls.describe(source->calls.user, &query, &wait, &fetch->offer, error);
    status = take_outcome(source, status, error);
    if (status != SP_OK) {
        sp_free(fetch);
        return status;
    }
    describe_offer(source, request, fetch, out_description);
    return SP_OK;
}

/* ---- bytes ----------------------------------------------------------------------------------- */

/* All of [at, at + bytes) of a part, in ranges that are in flight together. bytes is at most
 * PIECE_BYTES. */
static sp_status fetch_run(sp_peer_source *source, const peer_fetch *fetch,
                           const sp_peer_wait *wait, uint64_t at, uint64_t bytes, char *memory,
                           sp_error *error)
{
    sp_peer_part part = fetch->is_image ? SP_PEER_PART_IMAGE : SP_PEER_PART_TENSORS;
    sp_peer_range ranges[RANGES_MAX];
    size_t n = 0;
    sp_status status;

    for (uint64_t done = 0; done < bytes; n++) {
        uint64_t length = bytes - done < RANGE_BYTES ? bytes - done : RANGE_BYTES;

        SP_ASSERT(n < RANGES_MAX);
        ranges[n] = (sp_peer_range){part, at + done, length, memory + done, false};
        done += length;
    }
    status = source->calls.fetch(source->calls.user, fetch->offer, ranges, n, wait, error);
    if (status == SP_OK)
        atomic_fetch_add(&source->bytes, bytes);
    return take_outcome(source, status, error);
}

/* Makes the window begin at `at`, with as much of the part as it holds. */
static sp_status move_window(sp_peer_source *source, peer_fetch *fetch, const sp_peer_wait *wait,
                             uint64_t at, sp_error *error)
{
    uint64_t data_bytes = fetch->offer->manifest.data_bytes, left = data_bytes - at;
    uint64_t bytes = left < WINDOW_BYTES ? left : WINDOW_BYTES;
    sp_status status;

    if (!fetch->window)
        fetch->window = sp_malloc((size_t)(data_bytes < WINDOW_BYTES ? data_bytes : WINDOW_BYTES));
    if (!fetch->window)
        return sp_fail_memory(error, (size_t)WINDOW_BYTES, "bytes of a peer");
    fetch->window_bytes = 0;
    status = fetch_run(source, fetch, wait, at, bytes, fetch->window, error);
    if (status == SP_OK) {
        fetch->window_at = at;
        fetch->window_bytes = bytes;
    }
    return status;
}

static sp_status fetch_ahead(sp_peer_source *source, peer_fetch *fetch, const sp_peer_wait *wait,
                             uint64_t at, uint64_t bytes, char *memory, sp_error *error)
{
    sp_status status = SP_OK;

    if (at < fetch->window_at || at + bytes > fetch->window_at + fetch->window_bytes)
        status = move_window(source, fetch, wait, at, error);
    if (status == SP_OK)
        memcpy(memory, fetch->window + (at - fetch->window_at), (size_t)bytes);
    return status;
}

/* Where a piece is in its part; false: the manifest has no such bytes. */
static bool place_piece(const peer_fetch *fetch, const sp_source_piece *piece, uint64_t *out_at)
{
    const sp_peer_manifest *manifest = &fetch->offer->manifest;
    uint64_t begin = 0, end = 0;

    if (fetch->is_image) {
        end = manifest->image->bytes;
    } else if (piece->part < manifest->n_tensors) {
        begin = manifest->offsets[piece->part];
        end = manifest->offsets[piece->part + 1];
    }
    *out_at = begin + piece->offset;
    return piece->offset <= end - begin && piece->bytes <= end - begin - piece->offset;
}

static sp_status fetch_piece(void *user, const sp_source_request *request, void *handle,
                             const sp_source_piece *piece, sp_error *error)
{
    sp_peer_source *source = user;
    peer_fetch *fetch = handle;
    const sp_peer_wait wait = wait_for(source, request, piece->deadline_ns);
    uint64_t at;

    if (!place_piece(fetch, piece, &at))
        return sp_fail(error, SP_ERR_PEER_PROTOCOL, "peer-manifest", source->address,
                       (int64_t)piece->offset,
                       "the peer %s describes \"%s\" with fewer bytes than it must have",
                       source->address, request->name);
    if (fetch->is_image || piece->bytes >= DIRECT_BYTES)
        return fetch_run(source, fetch, &wait, at, piece->bytes, piece->memory, error);
    return fetch_ahead(source, fetch, &wait, at, piece->bytes, piece->memory, error);
}

static void release(void *user, const sp_source_request *request, void *handle)
{
    sp_peer_source *source = user;
    peer_fetch *fetch = handle;

    (void)request;
    source->calls.close(source->calls.user, fetch->offer);
    sp_free(fetch->window);
    sp_free(fetch);
}

/* ---- the source ------------------------------------------------------------------------------ */

sp_status sp_peer_source_create(const sp_peer_source_options *options, sp_peer_source **out_source,
                                sp_error *error)
{
    sp_peer_source *source = sp_calloc(1, sizeof *source);

    if (source)
        source->address = sp_strdup(options->address);
    if (!source || !source->address) {
        sp_free(source);
        return sp_fail_memory(error, sizeof *source, "a peer");
    }
    source->calls = options->calls;
    source->trust_images = options->trust_images;
    source->call_ns_max = options->call_ms_max * NS_PER_MS;
    source->threads = options->threads;
    *out_source = source;
    return SP_OK;
}

void sp_peer_source_destroy(sp_peer_source *source)
{
    if (!source)
        return;
    sp_free(source->address);
    sp_free(source);
}

sp_stage_source sp_peer_source_table(sp_peer_source *source)
{
    return (sp_stage_source){
        .struct_bytes = sizeof(sp_stage_source),
        .user = source,
        .describe = describe,
        .fetch = fetch_piece,
        .release = release,
        .threads = source->threads,
        .piece_bytes = PIECE_BYTES,
        .images_trusted = source->trust_images,
    };
}

void sp_peer_source_count(const sp_peer_source *source, sp_peer_source_counts *out_counts)
{
    *out_counts = (sp_peer_source_counts){
        .described = atomic_load(&source->described),
        .images = atomic_load(&source->images),
        .images_passed = atomic_load(&source->images_passed),
        .failures = atomic_load(&source->failures),
        .bytes = atomic_load(&source->bytes),
    };
}
