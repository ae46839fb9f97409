/*
 * peer_onednn.h: oneDNN's BF16 matmul on the same operands, for bench_kernels. Its weights are
 * reordered once into the layout that it requires; that is not timed.
 */
#ifndef SP_BENCH_PEER_ONEDNN_H
#define SP_BENCH_PEER_ONEDNN_H

#include <stdbool.h>
#include <stdint.h>

typedef struct sp_bench_peer sp_bench_peer;

/* Whether this build has oneDNN. */
bool sp_bench_peer_exists(void);

/*
 * y [rows, n] = x [rows, k] · wᵀ, all BF16, with `threads` threads; `weights` is [n, k], and
 * n_copies reordered copies of it are kept, so that runs can take cold ones in turn. NULL: oneDNN
 * refuses, or there is no memory. Owned by the caller (sp_bench_peer_destroy).
 */
sp_bench_peer *sp_bench_peer_create(int32_t threads, int64_t rows, int64_t n, int64_t k,
                                    const uint16_t *weights, int32_t n_copies);
void sp_bench_peer_destroy(sp_bench_peer *peer);

/* Seconds of one run with copy number `copy`; negative: it failed. */
double sp_bench_peer_run(sp_bench_peer *peer, const uint16_t *x, uint16_t *y, int32_t copy);

#endif
