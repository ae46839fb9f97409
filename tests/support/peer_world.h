/*
 * peer_world.h: a peer in a process of its own, over a directory of adapters whose bytes the test
 * knows. It is the program itself, as a user starts it.
 */
#ifndef SP_TEST_SUPPORT_PEER_WORLD_H
#define SP_TEST_SUPPORT_PEER_WORLD_H

#include "peer/peer_client.h"

#include <sys/types.h>

typedef struct peer_world {
    char *directory; /* fresh, and removed at the end */
    pid_t pid;       /* 0: it does not run */
    int err;         /* its standard error, to read */
    int port;        /* the same after a restart */
    char address[64];
} peer_world;

/* Skips the test program where there is no UCX. */
void peer_world_need_ucx(void);

void peer_world_create(peer_world *world);
void peer_world_destroy(peer_world *world);

/* Starts it with more flags ("" for none), and waits until it listens. */
void peer_world_start(peer_world *world, const char *flags);
/* SIGTERM; it must end by itself, without a complaint of a sanitizer. */
void peer_world_stop(peer_world *world);
/* Any other signal; SIGKILL ends it. */
void peer_world_signal(peer_world *world, int number);

/*
 * Writes the adapter NAME of the world's directory: q_proj of so many layers, 64 inputs and
 * outputs, in BF16, its values made from the seed. Replaces what was there.
 */
void peer_world_adapter(const peer_world *world, const char *name, int layers, int rank,
                        uint64_t seed);
/* The bytes of its tensors, one after the other in the file's order. Freed by the caller
 * (sp_free). */
void *peer_world_bytes(int layers, int rank, uint64_t seed, size_t *out_bytes);

/* A client of the world; key may be NULL. */
sp_peer_calls peer_world_client(const peer_world *world, const sp_peer_key *key,
                                const char *transports);
/* describe, and all tensors in one fetch; *out_bytes is freed by the caller (sp_free). */
sp_status peer_world_fetch(const sp_peer_calls *calls, const char *name, uint64_t ms_max,
                           void **out_bytes, size_t *out_n_bytes, sp_error *error);

/*
 * Kills the peer at random moments of so many transfers and starts it again. Each transfer has all
 * bytes, or a named failure in time; a retry succeeds; nothing stays allocated.
 */
void peer_world_kill_often(int rounds, uint64_t seed);

#endif
