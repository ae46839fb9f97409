#include "support/fake_peer.h"

#include "adapter/files.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "support/test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define WAIT_NS 1000000

/* ---- waiting --------------------------------------------------------------------------------- */

static void sleep_ns(long ns)
{
    const struct timespec time = {ns / 1000000000, ns % 1000000000};

    nanosleep(&time, NULL);
}

static sp_status hang(fake_peer *peer, const sp_peer_wait *wait, sp_error *error)
{
    bool cancelled = false;

    atomic_fetch_add(&peer->n_waiting, 1);
    while (!cancelled && (wait->deadline_ns == 0 || sp_clock_ns() < wait->deadline_ns)) {
        cancelled = wait->is_cancelled && wait->is_cancelled(wait->user);
        sleep_ns(WAIT_NS);
    }
    atomic_fetch_sub(&peer->n_waiting, 1);
    if (cancelled)
        return sp_fail(error, SP_ERR_STATE, "peer-cancelled", "fake:1", -1, "cancelled");
    return sp_fail(error, SP_ERR_PEER_TIMEOUT, "peer-timeout", "fake:1", -1,
                   "fake:1 did not answer in time");
}

/* ---- offers ---------------------------------------------------------------------------------- */

static void path_of(const fake_peer *peer, const char *name, char out_path[512])
{
    snprintf(out_path, 512, "%s/%s", peer->folder, peer->instead ? peer->instead : name);
}

sp_digest fake_peer_digest(const fake_peer *peer, const char *name)
{
    sp_adapter_options options;
    sp_digest digest = {{0}};
    sp_adapter *adapter;
    char path[512];

    path_of(peer, name, path);
    if (peer->audit && sp_adapter_open(path, peer->audit, &adapter, NULL) == SP_OK) {
        digest = sp_adapter_digest(adapter);
        sp_adapter_release(adapter);
        return digest;
    }
    sp_adapter_options_default(&options, sizeof options);
    options.allow_no_effect = options.allow_unknown_fields = options.allow_base_changing_init =
        true;
    if (sp_adapter_open(path, &options, &adapter, NULL) != SP_OK)
        return digest;
    digest = sp_adapter_digest(adapter);
    sp_adapter_release(adapter);
    return digest;
}

static const char *find(const fake_peer *peer, const sp_peer_query *query)
{
    for (size_t i = 0; i < peer->n_names; i++) {
        sp_digest digest;

        if (query->name && strcmp(query->name, peer->names[i]) != 0)
            continue;
        digest = fake_peer_digest(peer, peer->names[i]);
        if (!query->digest || memcmp(&digest, query->digest, sizeof digest) == 0)
            return peer->names[i];
    }
    return NULL;
}

static int by_place(const void *left, const void *right)
{
    const sp_tensor *a = *(const sp_tensor *const *)left;
    const sp_tensor *b = *(const sp_tensor *const *)right;

    if (a->file != b->file)
        return a->file < b->file ? -1 : 1;
    return (a->offset_bytes > b->offset_bytes) - (a->offset_bytes < b->offset_bytes);
}

static void read_tensors(fake_offer *offer)
{
    sp_peer_manifest *m = &offer->offer.manifest;
    size_t n = sp_checkpoint_n_tensors(offer->files->checkpoint);
    const sp_tensor **list = sp_calloc(n + 1, sizeof(sp_tensor *));

    assert_non_null(list);
    m->tensors = sp_calloc(n + 1, sizeof *m->tensors);
    m->offsets = sp_calloc(n + 1, sizeof *m->offsets);
    assert_true(m->tensors && m->offsets);
    m->n_tensors = n;
    for (size_t i = 0; i < n; i++)
        list[i] = sp_checkpoint_at(offer->files->checkpoint, i);
    qsort(list, n, sizeof(sp_tensor *), by_place);
    for (size_t i = 0; i < n; i++) {
        m->tensors[i] = (sp_tensor_desc){sizeof *m->tensors, list[i]->name, list[i]->type,
                                         list[i]->n_dims, list[i]->dims};
        m->offsets[i + 1] = m->offsets[i] + list[i]->bytes;
    }
    m->data_bytes = offer->tensors_bytes = m->offsets[n];
    offer->tensors = sp_malloc((size_t)m->data_bytes + 1);
    assert_non_null(offer->tensors);
    for (size_t i = 0; i < n; i++) {
        sp_file file;
        sp_error error;

        assert_ok(sp_adapter_file_open(offer->files->checkpoint, list[i]->file, &file, &error),
                  &error);
        assert_ok(sp_adapter_file_read(offer->files->checkpoint, &file, list[i], 0,
                                       offer->tensors + m->offsets[i], (size_t)list[i]->bytes,
                                       &error),
                  &error);
        sp_file_close(&file);
    }
    sp_free(list);
}

/* As a peer that knows the layout packs it; none where it cannot. */
static void pack(const fake_peer *peer, const char *path, fake_offer *offer)
{
    const void *bytes;
    sp_adapter *adapter;

    if (!peer->layout || sp_adapter_open(path, peer->audit, &adapter, NULL) != SP_OK)
        return;
    offer->packer = sp_peer_packer_for(peer->layout);
    if (offer->packer.pack(offer->packer.user, adapter, &offer->described, &bytes, &offer->packed,
                           NULL) == SP_OK) {
        offer->image = (char *)(uintptr_t)bytes; /* which offer.forgery may change */
        offer->image_bytes = offer->described.bytes;
        offer->offer.manifest.image = &offer->described;
    }
    sp_adapter_release(adapter);
}

static void close_offer(void *user, sp_peer_offer *offer)
{
    fake_peer *peer = user;
    fake_offer *fake = (fake_offer *)(void *)offer;

    if (!offer || fake == peer->prepared)
        return;
    if (fake->packed)
        fake->packer.done(fake->packer.user, fake->packed);
    sp_free(fake->tensors);
    sp_free(offer->manifest.tensors);
    sp_free(offer->manifest.offsets);
    sp_adapter_files_close(fake->files);
    sp_free(fake->files);
    sp_free(fake);
    atomic_fetch_sub(&peer->n_open, 1);
}

static sp_status describe(void *user, const sp_peer_query *query, const sp_peer_wait *wait,
                          sp_peer_offer **out_offer, sp_error *error)
{
    fake_peer *peer = user;
    fake_offer *offer;
    const char *name;
    char path[512];

    atomic_fetch_add(&peer->n_described, 1);
    if (peer->manner == FAKE_HANGS_DESCRIBING)
        return hang(peer, wait, error);
    if (peer->manner == FAKE_ANSWERS) {
        *error = peer->answer;
        return peer->answer.status;
    }
    if (peer->prepared) {
        *out_offer = &peer->prepared->offer;
        return SP_OK;
    }
    name = find(peer, query);
    if (!name)
        return sp_fail(error, SP_ERR_NOT_FOUND, "peer-not-found", "fake:1", -1,
                       "fake:1 has no such adapter");
    path_of(peer, name, path);
    offer = sp_calloc(1, sizeof *offer);
    if (offer)
        offer->files = sp_calloc(1, sizeof *offer->files);
    if (!offer || !offer->files) {
        sp_free(offer);
        return sp_fail_memory(error, sizeof *offer, "an offer");
    }
    if (sp_adapter_files_open(path, offer->files, error) != SP_OK) {
        sp_free(offer->files);
        sp_free(offer);
        return sp_fail(error, SP_ERR_PEER_REFUSED, "peer-failed", "fake:1", -1, "cannot be read");
    }
    atomic_fetch_add(&peer->n_open, 1);
    offer->offer.proven = peer->proven;
    offer->offer.manifest.name = (char *)name;
    offer->offer.manifest.digest = fake_peer_digest(peer, name);
    offer->offer.manifest.config = offer->files->config;
    offer->offer.manifest.config_bytes = offer->files->config_bytes;
    read_tensors(offer);
    pack(peer, path, offer);
    if (peer->forgery)
        peer->forgery(offer);
    *out_offer = &offer->offer;
    return SP_OK;
}

/* ---- bytes ----------------------------------------------------------------------------------- */

static uint64_t declared_bytes(const sp_peer_manifest *manifest, sp_peer_part part)
{
    if (part == SP_PEER_PART_TENSORS)
        return manifest->data_bytes;
    return manifest->image ? manifest->image->bytes : 0;
}

/* What it has not got, although it said so, are zeros. */
static void copy_range(const fake_offer *offer, const sp_peer_range *range)
{
    bool is_image = range->part == SP_PEER_PART_IMAGE;
    uint64_t have = is_image ? offer->image_bytes : offer->tensors_bytes;
    const char *from = is_image ? offer->image : offer->tensors;

    memset(range->memory, 0, (size_t)range->bytes);
    if (range->offset < have)
        memcpy(range->memory, from + range->offset,
               (size_t)(range->bytes < have - range->offset ? range->bytes : have - range->offset));
}

static sp_status fetch(void *user, sp_peer_offer *offer, const sp_peer_range *ranges,
                       size_t n_ranges, const sp_peer_wait *wait, sp_error *error)
{
    fake_peer *peer = user;
    fake_offer *fake = (fake_offer *)(void *)offer;

    atomic_fetch_add(&peer->n_fetches, 1);
    if (peer->manner == FAKE_HANGS_FETCHING)
        return hang(peer, wait, error);
    if (peer->slow_ms > 0)
        sleep_ns((long)peer->slow_ms * 1000000);
    for (size_t i = 0; i < n_ranges; i++) {
        const sp_peer_range *range = &ranges[i];
        uint64_t end = declared_bytes(&offer->manifest, range->part);

        assert_true(range->bytes > 0 && range->bytes <= SP_PEER_PIECE_BYTES_MAX);
        assert_true(range->offset <= end && range->bytes <= end - range->offset);
        fake->fetched += range->bytes;
        if (peer->manner == FAKE_DIES_FETCHING && fake->fetched > peer->dies_after)
            return sp_fail(error, SP_ERR_PEER_LOST, "peer-lost", "fake:1", -1, "fake:1 is gone");
        copy_range(fake, range);
        atomic_fetch_add(&peer->n_ranges, 1);
        atomic_fetch_add(&peer->bytes, range->bytes);
    }
    return SP_OK;
}

static int by_name(const void *left, const void *right)
{
    return strcmp(((const sp_peer_listed *)left)->name, ((const sp_peer_listed *)right)->name);
}

static sp_status list(void *user, const sp_peer_wait *wait, sp_peer_listing *out_listing,
                      sp_error *error)
{
    fake_peer *peer = user;
    sp_peer_listed *listed;

    if (peer->manner == FAKE_HANGS_DESCRIBING)
        return hang(peer, wait, error);
    if (peer->manner == FAKE_ANSWERS) {
        *error = peer->answer;
        return peer->answer.status;
    }
    listed = sp_calloc(peer->n_names + 1, sizeof *listed);
    if (!listed)
        return sp_fail_memory(error, sizeof *listed, "a listing");
    for (size_t i = 0; i < peer->n_names; i++)
        listed[i] = (sp_peer_listed){peer->names[i], fake_peer_digest(peer, peer->names[i]), 1,
                                     peer->layout != NULL};
    qsort(listed, peer->n_names, sizeof *listed, by_name);
    *out_listing = (sp_peer_listing){listed, peer->n_names, listed};
    return SP_OK;
}

static void destroy(void *user)
{
    (void)user;
}

sp_peer_calls fake_peer_calls(fake_peer *peer)
{
    return (sp_peer_calls){peer, list, describe, fetch, close_offer, destroy};
}

void fake_peer_prepare(fake_peer *peer, const char *name)
{
    const sp_peer_query query = {name, NULL};
    const sp_peer_wait wait = {0};
    fake_offer *prepared = peer->prepared;
    sp_peer_offer *offer;
    sp_error error;

    peer->prepared = NULL;
    if (prepared)
        close_offer(peer, &prepared->offer);
    if (!name)
        return;
    assert_ok(describe(peer, &query, &wait, &offer, &error), &error);
    peer->prepared = (fake_offer *)(void *)offer;
}
