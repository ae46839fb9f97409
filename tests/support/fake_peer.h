/*
 * fake_peer.h: the calls of a peer's client that serve folders of this host, with every way to
 * be wrong: false manifests and bytes, late answers, a peer that is gone or dies half-way.
 */
#ifndef SP_TEST_SUPPORT_FAKE_PEER_H
#define SP_TEST_SUPPORT_FAKE_PEER_H

#include "peer/peer_client.h"
#include "stage/peer_packer.h"

#include <sidepath/pool.h>

#include <stdatomic.h>

typedef enum fake_manner {
    FAKE_SERVES,
    FAKE_HANGS_DESCRIBING, /* until the deadline, or the cancellation */
    FAKE_HANGS_FETCHING,
    FAKE_DIES_FETCHING, /* after `dies_after` bytes of each offer */
    FAKE_ANSWERS        /* describe: with `answer` */
} fake_manner;

/* One open offer. The manifest may be changed by a forgery; the bytes are those of the files. */
typedef struct fake_offer {
    sp_peer_offer offer; /* first */
    char *tensors;       /* [tensors_bytes] */
    uint64_t tensors_bytes;
    char *image; /* [image_bytes]; NULL: none */
    uint64_t image_bytes;
    sp_peer_packer packer;
    void *packed; /* its handle; NULL: none */
    sp_peer_image described;
    struct sp_adapter_files *files;
    uint64_t fetched;
} fake_offer;

typedef struct fake_peer {
    const char *folder;       /* of folders */
    const char *const *names; /* [n_names] what it has */
    size_t n_names;
    const char *instead; /* not NULL: under each name this folder's content */
    bool proven;
    const sp_layout *layout;            /* not NULL: it packs for it, */
    const sp_adapter_options *audit;    /* NULL: of an adapter's base it knows nothing */
    void (*forgery)(fake_offer *offer); /* NULL: none; before the offer is given */
    _Atomic(fake_manner) manner;
    sp_error answer; /* with its status */
    uint64_t dies_after;
    uint32_t slow_ms;     /* of each fetch */
    fake_offer *prepared; /* not NULL: what every describe gives */
    atomic_int n_described, n_fetches, n_ranges, n_open, n_waiting;
    atomic_ullong bytes;
} fake_peer;

/* Borrows `peer`. */
sp_peer_calls fake_peer_calls(fake_peer *peer);

/* Makes an offer now, so that describing allocates nothing any more; NULL ends that. */
void fake_peer_prepare(fake_peer *peer, const char *name);

/* The digest that such a peer states of a folder. */
sp_digest fake_peer_digest(const fake_peer *peer, const char *name);

#endif
