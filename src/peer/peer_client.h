/*
 * peer_client.h: what a loader requests of a peer: what it has, what one adapter is, and bytes of
 * it. The calls are a table, so that tests can take the place of a peer; sp_peer_client_create
 * fills one for a peer that is reached through UCX.
 *
 * Of what a peer sends only the form is checked here (peer_wire.h): the manifest is to be audited,
 * and the bytes are to be checked against a digest, by the caller.
 *
 * Every call blocks until it is done, its deadline passes or it is cancelled, whatever the peer
 * does: a peer that is stopped, gone or malicious costs its caller the deadline and no more. Memory
 * that bytes were to land in is no longer written to once the call has returned. Any thread may
 * call, several at a time; calls on one offer come one after the other. Pointers may not be NULL
 * unless said so.
 *
 * Statuses of all calls, beside those named there; error->subject is the peer as "host:port":
 *
 *   SP_ERR_PEER_UNREACHABLE  `peer-unreachable`: nobody listens there, or no route or name
 *   SP_ERR_PEER_TIMEOUT      `peer-timeout`: the deadline passed
 *   SP_ERR_PEER_LOST         `peer-lost`: the connection broke while it was in use;
 *                            `peer-offer-gone`: the files have changed, describe is to be repeated
 *   SP_ERR_PEER_PROTOCOL     `peer-protocol`: not a message, not an answer to this request, a
 *                            wrong length or tag; `peer-manifest`, `peer-listing`, `peer-version`
 *   SP_ERR_PEER_REFUSED      `peer-key`: it needs a key, has another one, or has none;
 *                            `peer-busy`, `peer-out-of-range`, `peer-malformed`, `peer-failed`,
 *                            `peer-version`
 *   SP_ERR_NOT_FOUND         `peer-not-found`: it has no such adapter
 *   SP_ERR_TOO_LARGE         `peer-manifest-too-large`, `peer-listing-too-large`
 *   SP_ERR_STATE             `peer-cancelled`: wait->is_cancelled has returned true
 *   SP_ERR_MEMORY            on this host
 *
 * After a failure the client can be called again; the next call connects anew where the connection
 * is lost.
 */
#ifndef SP_PEER_PEER_CLIENT_H
#define SP_PEER_PEER_CLIENT_H

#include "peer/peer_wire.h"

/* ---- the calls ------------------------------------------------------------------------------- */

/* For how long a call may take. */
typedef struct sp_peer_wait {
    uint64_t deadline_ns; /* on CLOCK_MONOTONIC, as sp_clock_ns; 0: the client's own limit */
    /* Called on the calling thread about every 20 ms while it waits; NULL: never cancelled. */
    bool (*is_cancelled)(void *user);
    void *user;
} sp_peer_wait;

/* Which adapter. Both may be given: then it is this name, and it must have this content. */
typedef struct sp_peer_query {
    const char *name;        /* NULL: by digest alone */
    const sp_digest *digest; /* NULL: by name alone */
} sp_peer_query;

/*
 * One adapter of one peer, with the connection over which its bytes come. The peer keeps exactly
 * this content for it until close: bytes of another version are never sent for an offer.
 */
typedef struct sp_peer_offer {
    sp_peer_manifest manifest; /* as the peer states it: its form is checked, nothing else */
    bool proven; /* the peer has proved that it has the shared key, and the manifest is tagged with
                    it */
} sp_peer_offer;

/* Bytes of one part of an offer and where they go. */
typedef struct sp_peer_range {
    sp_peer_part part;
    uint64_t offset; /* from the part's first byte; tensor i of the manifest begins at offsets[i] */
    uint64_t bytes;  /* above 0; ranges longer than SP_PEER_PIECE_BYTES_MAX are split */
    void *memory;    /* [bytes] */
    bool on_device;  /* memory is a GPU's: only where sp_peer_client_sees_device has said so */
} sp_peer_range;

typedef struct sp_peer_calls {
    void *user;
    /* What the peer has. Freed by sp_peer_listing_free. */
    sp_status (*list)(void *user, const sp_peer_wait *wait, sp_peer_listing *out_listing,
                      sp_error *error);
    /* The manifest of an adapter. *out_offer is owned by the caller until close. With a query that
     * has a digest, a peer whose manifest has another one is SP_ERR_NOT_FOUND. */
    sp_status (*describe)(void *user, const sp_peer_query *query, const sp_peer_wait *wait,
                          sp_peer_offer **out_offer, sp_error *error);
    /*
     * All bytes of all ranges [n_ranges], or a failure, after which the offer can only be closed
     * and the ranges' memory is undefined. Several requests are under way at a time, so few calls
     * with many ranges are faster than many calls. SP_ERR_ARGUMENT: a range beyond the manifest's
     * part; nothing was sent.
     */
    sp_status (*fetch)(void *user, sp_peer_offer *offer, const sp_peer_range *ranges,
                       size_t n_ranges, const sp_peer_wait *wait, sp_error *error);
    /* Frees the offer and its manifest; NULL is allowed. Does not wait for the peer. */
    void (*close)(void *user, sp_peer_offer *offer);
    /* After the last call; open offers must have been closed. */
    void (*destroy)(void *user);
} sp_peer_calls;

/* ---- a peer through UCX ---------------------------------------------------------------------- */

typedef struct sp_peer_client_options {
    const char *address; /* "host:port", "[v6]:port"; borrowed until return */
    const sp_peer_key
        *key; /* copied; NULL: none. With one, a peer that cannot prove it is refused */
    uint64_t connect_ms_max; /* for connecting and both proofs; 0: 5000 */
    uint64_t call_ms_max;    /* of a call without a deadline; 0: 30000 */
    const char *devices;     /* network devices for UCX, as UCX_NET_DEVICES; NULL: its choice */
    const char *gid_index;   /* as UCX_IB_GID_INDEX; NULL: its choice */
    const char *transports;  /* as UCX_TLS; NULL: its choice */
} sp_peer_client_options;

/* Whether this build can speak to peers at all; *out_why (may be NULL) is a constant text. */
bool sp_peer_is_built(const char **out_why);

/*
 * Fills *out_calls; nothing connects yet. Owned by the caller (out_calls->destroy). Starts no
 * thread. SP_ERR_UNSUPPORTED with `no-ucx`: this build has no UCX, or libucp cannot be loaded here.
 * SP_ERR_INPUT with `peer-address`: no such form. SP_ERR_MEMORY.
 */
sp_status sp_peer_client_create(const sp_peer_client_options *options, sp_peer_calls *out_calls,
                                sp_error *error);

/* Whether ranges may be on a GPU: the UCX here moves device memory by itself. */
bool sp_peer_client_sees_device(const sp_peer_calls *calls);

/* What a client has done so far. Any thread. */
typedef struct sp_peer_client_counts {
    uint64_t connects, failures, timeouts, manifests, pieces, bytes;
} sp_peer_client_counts;
void sp_peer_client_count(const sp_peer_calls *calls, sp_peer_client_counts *out_counts);

#endif
