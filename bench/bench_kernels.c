/*
 * bench_kernels.c: gemm_nt against the machine's own limits, measured in the same run.
 *
 *     bench_kernels [--level L] [--threads N] [--rows 1,4,…] [--repeats N] [--commit TEXT]
 *                   [--peer onednn]
 *
 * Weights are cold: each repeat takes the next of several copies that together exceed every cache,
 * and right before it a plain loop reads another copy, so that the ratio is between neighbours in
 * time. Prints one JSON object; the medians count. With --peer onednn every run is followed by one
 * of oneDNN on cold weights of its own, which it has reordered as it likes; `over_peer` is its
 * median time over ours, null where it has no BF16. `of_amx_peak` is the share of what products of
 * tiles that stay in their registers reach with the same threads, right before each run: a
 * processor that is short of power may halve that from one second to the next.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "base/half.h"
#include "base/text.h"
#include "bench/bench_machine.h"
#include "bench/peer_onednn.h"
#include "kernels/cpu/gemm.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define WEIGHT_BYTES  ((size_t)1 << 30)  /* all copies of one shape together, at least */
#define FILL_BYTES    ((size_t)32 << 20) /* of distinct random weights, repeated */
#define REPEATS_MAX   101
#define ROWS_LIST     32
#define PEER_COPIES   16
#define PIECE_ROWS    1024 /* of the largest batch */
#define TILE_ROWS_MIN 64   /* from here on multiplying counts, not only reading */
#define MANY_ROWS     256  /* repeated less often */

typedef struct bench {
    const sp_kernels *kernels;
    sp_exec *exec;
    const char *level, *commit, *rows_text;
    int32_t threads;
    int repeats;
    bool with_peer;
    char *weights; /* contiguous copies */
    uint16_t *x;   /* bf16 [1024, k] */
    uint16_t *y;   /* bf16 [1024, n] */
    void *packed;
    sp_text out;
} bench;

typedef struct shape {
    int64_t n, k;
} shape;

static const shape shapes[] = {{4096, 4096}, {12288, 4096}};

#define N_MAX 12288
#define K_MAX 4096

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double median(double *values, int n)
{
    qsort(values, (size_t)n, sizeof *values, compare_doubles);
    return values[n / 2];
}

static double run_gemm(bench *b, shape s, int64_t rows, const void *w)
{
    sp_gemm_args args = {
        .packed_x = b->packed,
        .x_type = SP_DTYPE_BF16,
        .w_type = SP_DTYPE_BF16,
        .y_type = SP_DTYPE_BF16,
        .delta_type = SP_DTYPE_BF16,
        .rows = rows,
        .n = s.n,
        .k = s.k,
        .w = w,
        .w_stride = s.k,
        .y = b->y,
        .y_stride = s.n,
    };
    double begin = sp_clock_seconds();

    sp_gemm_pack(b->kernels, b->exec, b->packed, SP_DTYPE_BF16, SP_DTYPE_BF16, b->x, s.k, NULL,
                 rows, s.k);
    sp_gemm_run(b->kernels, b->exec, &args, 1);
    return sp_clock_seconds() - begin;
}

static void measure(bench *b, shape s, int64_t rows, double fma_rate, bool first)
{
    size_t bytes = (size_t)(s.n * s.k) * 2, copies = (WEIGHT_BYTES + bytes - 1) / bytes;
    double seconds[REPEATS_MAX], reads[REPEATS_MAX], tiles[REPEATS_MAX], peers[REPEATS_MAX];
    double operations, time_s, best_s, read_rate, tile_rate;
    int repeats = rows >= MANY_ROWS && b->repeats > 7 ? 7 : b->repeats;
    sp_bench_peer *peer = NULL;

    if (b->with_peer)
        peer =
            sp_bench_peer_create(b->threads, rows, s.n, s.k, (const void *)b->weights, PEER_COPIES);

    for (int i = -1; i < repeats; i++) { /* the first one warms up */
        size_t turn = (size_t)(i + 1) * 2;
        double rate = sp_bench_read_rate(b->exec, b->weights + turn % copies * bytes, bytes);
        double tile = rows >= TILE_ROWS_MIN ? sp_bench_tile_rate(b->exec) : 0;
        double took = run_gemm(b, s, rows, b->weights + (turn + 1) % copies * bytes);
        double peer_took = peer ? sp_bench_peer_run(peer, b->x, b->y, i + 1) : 0;

        if (i >= 0) {
            reads[i] = rate;
            tiles[i] = tile;
            seconds[i] = took;
            peers[i] = peer_took;
        }
    }
    time_s = median(seconds, repeats); /* leaves them sorted */
    best_s = seconds[0];
    read_rate = median(reads, repeats);
    tile_rate = median(tiles, repeats);
    operations = 2.0 * (double)(s.n * s.k * rows);
    sp_text_format(&b->out,
                   "%s\n    {\"n\": %lld, \"k\": %lld, \"rows\": %lld, \"milliseconds\": %.4f, "
                   "\"best_milliseconds\": %.4f, "
                   "\"weights_gb_per_s\": %.2f, \"read_gb_per_s\": %.2f, \"of_read\": %.3f, "
                   "\"gflop_per_s\": %.1f, \"of_fma\": %.3f",
                   first ? "" : ",", (long long)s.n, (long long)s.k, (long long)rows, time_s * 1e3,
                   best_s * 1e3, (double)bytes / time_s * 1e-9, read_rate * 1e-9,
                   (double)bytes / time_s / read_rate, operations / time_s * 1e-9,
                   operations / time_s / fma_rate);
    if (tile_rate > 0)
        sp_text_format(&b->out, ", \"amx_gflop_per_s\": %.1f, \"of_amx_peak\": %.3f",
                       tile_rate * 1e-9, operations / time_s / tile_rate);
    if (peer)
        sp_text_format(&b->out, ", \"peer_milliseconds\": %.4f, \"over_peer\": %.3f",
                       median(peers, repeats) * 1e3, median(peers, repeats) / time_s);
    else if (b->with_peer)
        sp_text_add(&b->out, ", \"over_peer\": null");
    sp_text_add(&b->out, "}");
    sp_bench_peer_destroy(peer);
}

static void print_header(bench *b, double fma_rate)
{
    char name[256];

    sp_bench_processor_name(name, sizeof name);
    sp_text_add(&b->out, "{\n  \"bench\": \"kernels\", \"machine\": {\"processor\": ");
    sp_text_json_string(&b->out, name, strlen(name));
    sp_text_format(&b->out, ", \"processors\": %ld, \"threads\": %d}, \"commit\": ",
                   sysconf(_SC_NPROCESSORS_ONLN), (int)b->threads);
    sp_text_json_string(&b->out, b->commit, strlen(b->commit));
    sp_text_format(&b->out, ", \"level\": \"%s\", \"repeats\": %d,\n  ", b->kernels->level,
                   b->repeats);
    sp_text_format(&b->out, "\"fma_gflop_per_s\": %.1f,\n  \"cases\": [", fma_rate * 1e-9);
}

static void fill(uint16_t *values, size_t n, float size)
{
    uint32_t state = 12345;

    for (size_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        values[i] = sp_f32_to_bf16(((float)(state >> 8) / 8388608.0f - 1.0f) * size);
    }
}

static bool allocate(bench *b)
{
    size_t packed = b->kernels->x_pack_bytes(SP_DTYPE_BF16, SP_DTYPE_BF16, PIECE_ROWS, K_MAX);
    size_t weights = WEIGHT_BYTES + (size_t)N_MAX * K_MAX * 2;

    b->weights = sp_aligned_calloc(weights, 4096);
    b->x = sp_aligned_calloc((size_t)PIECE_ROWS * K_MAX * 2, 64);
    b->y = sp_aligned_calloc((size_t)PIECE_ROWS * N_MAX * 2, 64);
    b->packed = sp_aligned_calloc(packed, 64);
    if (!b->weights || !b->x || !b->y || !b->packed)
        return false;
    fill((uint16_t *)(void *)b->weights, FILL_BYTES / 2, 0.05f);
    for (size_t at = FILL_BYTES; at < weights; at += FILL_BYTES)
        memcpy(b->weights + at, b->weights, weights - at < FILL_BYTES ? weights - at : FILL_BYTES);
    fill(b->x, (size_t)PIECE_ROWS * K_MAX, 1.0f);
    return true;
}

static void run_all(bench *b)
{
    double rates[5], fma_rate;
    bool first = true;

    for (int i = 0; i < 5; i++)
        rates[i] = sp_bench_fma_rate(b->exec);
    fma_rate = median(rates, 5);
    print_header(b, fma_rate);
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        const char *text = b->rows_text;

        while (*text) {
            char *end;
            long rows = strtol(text, &end, 10);

            if (end == text)
                break;
            if (rows >= 1 && rows <= PIECE_ROWS) {
                measure(b, shapes[s], rows, fma_rate, first);
                first = false;
            }
            text = *end == ',' ? end + 1 : end;
        }
    }
    sp_text_add(&b->out, "\n  ]\n}\n");
}

static bool parse(bench *b, int argc, char **argv)
{
    for (int i = 1; i < argc; i += 2) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;

        if (!value)
            return false;
        if (strcmp(argv[i], "--level") == 0)
            b->level = value;
        else if (strcmp(argv[i], "--threads") == 0)
            b->threads = (int32_t)strtol(value, NULL, 10);
        else if (strcmp(argv[i], "--rows") == 0)
            b->rows_text = value;
        else if (strcmp(argv[i], "--repeats") == 0)
            b->repeats = (int)strtol(value, NULL, 10);
        else if (strcmp(argv[i], "--commit") == 0)
            b->commit = value;
        else if (strcmp(argv[i], "--peer") == 0 && strcmp(value, "onednn") == 0)
            b->with_peer = true;
        else
            return false;
    }
    return b->repeats >= 1 && b->repeats <= REPEATS_MAX;
}

int main(int argc, char **argv)
{
    bench b = {.commit = "unknown", .rows_text = "1,2,4,8,16,32,64,256,1024", .repeats = 21};
    sp_exec_options options;
    sp_error error;

    if (!parse(&b, argc, argv)) {
        (void)fprintf(stderr, "usage: bench_kernels [--level L] [--threads N] [--rows 1,4,...] "
                              "[--repeats N] [--commit TEXT] [--peer onednn]\n");
        return 2;
    }
    if (b.with_peer && !sp_bench_peer_exists()) {
        (void)fprintf(stderr, "bench_kernels: built without oneDNN; install libdnnl-dev and "
                              "configure again\n");
        return 1;
    }
    if (sp_kernels_get(b.level, &b.kernels, &error) != SP_OK) {
        (void)fprintf(stderr, "bench_kernels: %s: %s\n", error.subject, error.text);
        return 1;
    }
    sp_exec_options_default(&options, sizeof options);
    options.threads = b.threads;
    options.spin_us = 1000;
    if (sp_exec_create(&options, &b.exec, NULL) != SP_OK || !allocate(&b)) {
        (void)fprintf(stderr, "bench_kernels: no threads or no memory\n");
        return 1;
    }
    b.threads = sp_exec_threads(b.exec);
    run_all(&b);
    if (b.out.failed)
        return 1;
    (void)fputs(b.out.data, stdout);
    sp_text_free(&b.out);
    sp_aligned_free(b.packed);
    sp_aligned_free(b.y);
    sp_aligned_free(b.x);
    sp_aligned_free(b.weights);
    sp_exec_destroy(b.exec);
    return 0;
}
