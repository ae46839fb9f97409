/*
 * peer_server.h: serves a directory of adapters to other hosts: it answers messages from a
 * catalogue, to clients that have shown that they have the shared key where there is one.
 *
 * One thread runs it, and the catalogue has another. Clients are not trusted: a request is checked
 * against what its client was offered, and a client that is silent, stopped or slow is closed after
 * a time, so that it holds no memory for ever. Pointers may not be NULL unless said so.
 */
#ifndef SP_PEER_PEER_SERVER_H
#define SP_PEER_PEER_SERVER_H

#include "peer/peer_content.h"

typedef struct sp_peer_server sp_peer_server;

typedef struct sp_peer_server_options {
    const char *directory;
    const sp_adapter_options *audit; /* how its adapters are judged; NULL: the files alone */
    const sp_peer_packer *packer;    /* NULL: tensors alone */
    struct sp_peer_digests *digests; /* as of peer_catalog.h; outlives the server; NULL: none */
    const char *host;                /* address to listen on; NULL: 127.0.0.1 */
    int port;                        /* 0: any */
    const sp_peer_key *key;          /* copied; NULL: every client is served */
    const char *devices, *gid_index, *transports; /* as UCX has them; NULL: its choice */
    uint64_t memory_bytes;                        /* for adapters; 0: 4 GiB */
    uint64_t rescan_ms;                           /* of the directory; 0: 1000 */
    uint64_t stall_ms;   /* a client that takes no bytes for so long is closed; 0: 10000 */
    uint64_t idle_ms;    /* so is one that requests nothing; 0: 60000 */
    int32_t clients_max; /* 0: 64 */
    /* A line for an operator, without an end of line; on the server's threads. NULL: none. */
    void (*log)(void *user, const char *line);
    void *user;
} sp_peer_server_options;

/* Listens. *out_server is owned by the caller. SP_ERR_UNSUPPORTED with `no-ucx`; SP_ERR_NOT_FOUND,
 * SP_ERR_INPUT: no such directory; SP_ERR_PEER_UNREACHABLE: no such host; SP_ERR_INPUT with
 * `peer-device`; SP_ERR_IO with `peer-port`; SP_ERR_MEMORY, SP_ERR_THREAD. */
sp_status sp_peer_server_create(const sp_peer_server_options *options, sp_peer_server **out_server,
                                sp_error *error);
void sp_peer_server_destroy(sp_peer_server *server); /* not while it runs; NULL is allowed */

/* Where it listens, as "host:port". Lives as long as the server. */
const char *sp_peer_server_address(const sp_peer_server *server);

/* Serves until sp_peer_server_stop. */
void sp_peer_server_run(sp_peer_server *server);
/* Any thread, and a signal handler. */
void sp_peer_server_stop(sp_peer_server *server);

typedef struct sp_peer_server_counts {
    uint64_t clients;                  /* now */
    uint64_t connections, turned_away; /* so far */
    uint64_t wrong_keys, protocol_errors, stalled, idle;
    uint64_t manifests, pieces, sent_bytes, refusals;
    uint64_t offered, refused, reading;  /* adapters */
    uint64_t memory_bytes, pinned_bytes; /* of adapters */
    uint64_t reads, read_bytes, evictions, known_digests;
} sp_peer_server_counts;
/* Any thread. */
void sp_peer_server_count(sp_peer_server *server, sp_peer_server_counts *out_counts);
/* The same as Prometheus' text format. */
void sp_peer_server_metrics(sp_peer_server *server, sp_text *out_text);

#endif
