/*
 * peers.h: the peers that adapters come from: for each a client, a source of the stage, and the
 * names that it serves. The names are read every few seconds on a thread of each peer's own, so
 * that one that hangs delays no other; what is shown and looked up is the last list, and nobody
 * waits for a peer here. A peer that cannot be reached keeps the names that it had: a request for
 * one then fails with what is wrong with the peer.
 *
 * Any thread after the opening, but for the close. Pointers may not be NULL unless said so.
 */
#ifndef SP_SERVER_DRIVER_PEERS_H
#define SP_SERVER_DRIVER_PEERS_H

#include "peer/peer_client.h"
#include "server/metrics/log.h"
#include "server/metrics/metrics.h"

#include <sidepath/stage.h>

typedef struct sp_peers sp_peers;

typedef struct sp_peers_options {
    const char *const *addresses; /* [n_addresses] "host:port", in the order of being asked */
    size_t n_addresses;
    const char *const *trusted; /* [n_trusted] those of them whose images are taken */
    size_t n_trusted;
    const char *key_file; /* NULL or "": none */
    int32_t call_ms_max;
    const char *devices, *gid_index, *transports; /* for UCX; NULL or "": its choice */
    sp_log *log;                                  /* borrowed; NULL: nothing is logged */
    /* Makes the calls of one peer; NULL: sp_peer_client_create. */
    sp_status (*connect)(void *user, const sp_peer_client_options *options,
                         sp_peer_calls *out_calls, sp_error *error);
    void *connect_user;
} sp_peers_options;

/*
 * Starts the threads; no peer has to be there. SP_ERR_INPUT with the setting as subject: an address
 * of another form or given twice, a trusted peer that is none of the peers, trust without a key, a
 * key file that cannot be used. SP_ERR_UNSUPPORTED with `no-ucx`: this build has no transport.
 * SP_ERR_MEMORY, SP_ERR_THREAD. *out_peers is owned by the caller.
 */
sp_status sp_peers_open(const sp_peers_options *options, sp_peers **out_peers, sp_error *error);
void sp_peers_close(sp_peers *peers); /* after the stage that has its sources; NULL is allowed */

/* [*out_n], as long as the peers: for the stage, in the order of the addresses. */
const sp_stage_source *sp_peers_sources(const sp_peers *peers, int32_t *out_n);

/* Whether some peer had an adapter of this name when it was last asked. NULL peers have none. */
bool sp_peers_have(sp_peers *peers, const char *name);
/* Calls `visit` once for each name, in no order, without a lock held. NULL peers have none. */
void sp_peers_list(sp_peers *peers, void (*visit)(void *user, const char *name), void *user);

/* For metrics: [*out_n], owned by the caller (sp_free), their texts by the peers. NULL: none, or
 * out of memory. */
sp_listed_peer *sp_peers_snapshot(sp_peers *peers, size_t *out_n);

#endif
