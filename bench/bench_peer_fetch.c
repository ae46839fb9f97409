/*
 * bench_peer_fetch.c: fetches an adapter of a peer, once for each line on standard input.
 *
 *     bench_peer_fetch HOST:PORT NAME [TRANSPORTS]
 *
 * Prints a line for each: bytes, seconds and the processor's seconds of this process, of one fetch
 * of all tensors into memory that was written to before. bench_peer.py runs it.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "peer/peer_client.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

static double processor_seconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static sp_status fetch(const sp_peer_calls *calls, sp_peer_offer *offer, void *memory,
                       sp_error *error)
{
    const sp_peer_range range = {SP_PEER_PART_TENSORS, 0, offer->manifest.data_bytes, memory,
                                 false};
    double cpu = processor_seconds();
    uint64_t begin_ns = sp_clock_ns();
    sp_status status = calls->fetch(calls->user, offer, &range, 1, NULL, error);

    if (status == SP_OK) {
        printf("%llu %.6f %.6f\n", (unsigned long long)range.bytes,
               (double)(sp_clock_ns() - begin_ns) * 1e-9, processor_seconds() - cpu);
        fflush(stdout);
    }
    return status;
}

static sp_status run(const char *address, const char *name, const char *transports, sp_error *error)
{
    const sp_peer_client_options options = {.address = address, .transports = transports};
    const sp_peer_query query = {.name = name};
    sp_peer_calls calls;
    sp_peer_offer *offer = NULL;
    char line[16];
    void *memory;
    sp_status status = sp_peer_client_create(&options, &calls, error);

    if (status != SP_OK)
        return status;
    status = calls.describe(calls.user, &query, NULL, &offer, error);
    memory = status == SP_OK ? sp_malloc((size_t)offer->manifest.data_bytes) : NULL;
    if (memory)
        memset(memory, 1, (size_t)offer->manifest.data_bytes);
    while (memory && status == SP_OK && fgets(line, sizeof line, stdin))
        status = fetch(&calls, offer, memory, error);
    calls.close(calls.user, offer);
    calls.destroy(calls.user);
    sp_free(memory);
    return status;
}

int main(int argc, char **argv)
{
    sp_error error = {0};

    if (argc != 3 && argc != 4) {
        fprintf(stderr, "usage: %s HOST:PORT NAME [TRANSPORTS]\n", argv[0]);
        return 2;
    }
    if (run(argv[1], argv[2], argc == 4 ? argv[3] : NULL, &error) == SP_OK)
        return 0;
    fprintf(stderr, "%s\n", error.text);
    return 1;
}
