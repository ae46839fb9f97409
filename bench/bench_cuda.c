/*
 * bench_cuda.c: times of one fused linear (shrink and expand), of the plan's node, of the host's
 * part and of an adapter's copy on a GPU. A fused linear is timed by graph replay with cold
 * weights, x and y: a graph holds several calls, each with memory of its own, and 128 MiB are
 * written before each replay. Prints one JSON object. Bytes are x, each distinct A and B once, y
 * read and written; the floor is the time of a plain cold read of as many (decode; measured on an
 * H200) or bytes / 4.1 TB/s (prefill); base is the same layer's bf16 GEMM by cublasGemmEx, with the
 * algorithm of its own choice, where libcublas.so.13 is found. (cuBLASLt, where an engine would
 * choose one algorithm for all row counts, is not opened here.)
 *
 *     bench_cuda [--cells qkv/16,gu/64/m1,plan] [--replays 50] [--commit NAME] [--parts 1]
 *                [--base 0]
 *
 * --parts 1: also the shrink and the expand of each cell, each alone in a graph; together they take
 * less, for one begins while the other ends. --base 0: without cuBLAS, whose part takes longest.
 */
#include "cuda/rig.h"

#include <dlfcn.h>
#include <stdio.h>
#include <time.h>

#define FLUSH_BYTES  ((size_t)128 << 20)
#define ARENA_BYTES  ((size_t)6 << 30)
#define RANDOM_BYTES ((size_t)32 << 20)
#define REPLAYS_MAX  200
#define CALLS_MAX    16
#define SWAP_BYTES   ((size_t)87 << 20)

typedef struct layer {
    const char *name;
    int32_t k, n_sites, n[3];
} layer;

static const layer layers[] = {{"qkv", 4096, 3, {4096, 1024, 1024}},
                               {"o", 4096, 1, {4096}},
                               {"gu", 4096, 2, {12288, 12288}},
                               {"down", 12288, 1, {4096}}};
#define N_LAYERS 4

typedef struct step {
    int32_t rows, slots, rank;
    float target[N_LAYERS]; /* microseconds; 0: none was set */
} step;

static const step steps[] = {
    {1, 1, 16, {4.5f, 4, 4.5f, 5}},
    {8, 8, 16, {0}},
    {32, 1, 16, {0}},
    {32, 8, 16, {5.5f, 5, 7, 6}},
    {64, 16, 16, {0}},
    {64, 64, 16, {15.5f, 9, 25, 14.5f}},
    {256, 64, 16, {0}},
    {256, 256, 16, {50, 26, 90, 46}},
    {1, 1, 64, {0}},
    {32, 8, 64, {0}},
    {64, 16, 64, {15.5f, 9, 25, 14.5f}},
    {64, 64, 64, {46, 23, 80, 42}},
    {256, 256, 64, {170, 76, 290, 143}},
    {1, 1, 8, {0}},
    {64, 64, 8, {0}},
    {1, 1, 128, {0}},
    {32, 8, 128, {0}},
    {64, 64, 128, {0}},
    {512, 4, 16, {13, 0, 0, 0}},
    {512, 16, 16, {13, 0, 0, 0}},
    {2048, 1, 16, {0}},
    {2048, 4, 16, {25, 18, 70, 28}},
    {2048, 16, 16, {0}},
    {8192, 4, 16, {86, 62, 265, 100}},
    {2048, 4, 64, {0}},
    {8192, 16, 64, {105, 70, 300, 117}},
    {2048, 4, 8, {0}},
    {2048, 4, 128, {45, 28, 90, 40}},
    {8192, 4, 128, {0}},
    {2048, 4, 32, {0}},
    {2048, 4, 256, {0}},
    {2048, 4, 512, {0}},
    {512, 4, 64, {0}},
    {512, 16, 64, {0}},
    {512, 4, 128, {0}},
    {2048, 16, 64, {0}},
    {8192, 4, 64, {0}},
};

/* A cold read of so many KB by one kernel, microseconds (H200). */
static const double cold_read[][2] = {{32, 1.51},    {128, 1.66},   {512, 1.83},    {1024, 1.89},
                                      {2048, 2.17},  {4096, 2.71},  {8192, 3.74},   {16384, 6.67},
                                      {32768, 10.8}, {65536, 19.3}, {131072, 35.8}, {262144, 67.4}};

typedef int (*gemm_fn)(void *, int, int, int, int, int, const void *, const void *, int, int,
                       const void *, int, int, const void *, void *, int, int, int, int);

typedef struct bench {
    rig open; /* the device and its launchers */
    void *flush;
    char *arena;
    size_t used; /* of the arena, by the cell at hand */
    int replays;
    const char *cells;
    bool parts;
    void *cublas; /* NULL: none */
    gemm_fn gemm;
    int failed;
} bench;

static double floor_us(double bytes, int32_t rows)
{
    double kb = bytes / 1024.0;
    size_t i = 1, n = sizeof cold_read / sizeof cold_read[0];

    if (rows > SP_CUDA_DECODE_ROWS || kb > cold_read[n - 1][0])
        return bytes / 4.1e6;
    while (i < n - 1 && kb > cold_read[i][0])
        i++;
    return cold_read[i - 1][1] + (cold_read[i][1] - cold_read[i - 1][1]) *
                                     (kb - cold_read[i - 1][0]) /
                                     (cold_read[i][0] - cold_read[i - 1][0]);
}

static void *take(bench *b, size_t bytes)
{
    void *at = b->arena + b->used;

    b->used += (bytes + 255) / 256 * 256;
    if (b->used > ARENA_BYTES) {
        b->failed = 1;
        b->used = 0;
        return b->arena;
    }
    return at;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* ---- timing -------------------------------------------------------------------------------- */

typedef void (*enqueue_fn)(void *user, int call);

/* Median seconds of one of the calls that a replay makes. */
static double replay(bench *b, enqueue_fn enqueue, void *user, int calls)
{
    sp_stream *stream = sp_device_main_stream(b->open.device);
    sp_event *from = NULL, *to = NULL;
    sp_graph *graph = NULL;
    double seconds[REPLAYS_MAX] = {0};

    for (int i = 0; i < calls; i++)
        enqueue(user, i); /* the code is loaded */
    b->failed |= sp_graph_begin(stream, NULL) != SP_OK;
    for (int i = 0; i < calls; i++)
        enqueue(user, i);
    b->failed |= sp_graph_end(stream, &graph, NULL) != SP_OK;
    b->failed |= sp_event_create(b->open.device, &from, NULL) != SP_OK;
    b->failed |= sp_event_create(b->open.device, &to, NULL) != SP_OK;
    for (int i = 0; i < b->replays && !b->failed; i++) {
        b->failed |= sp_stream_zero(stream, b->flush, FLUSH_BYTES, NULL) != SP_OK;
        b->failed |= sp_event_record(from, stream, NULL) != SP_OK;
        b->failed |= sp_graph_launch(graph, stream, NULL) != SP_OK;
        b->failed |= sp_event_record(to, stream, NULL) != SP_OK;
        b->failed |= sp_event_wait(to, NULL) != SP_OK;
        b->failed |= sp_event_seconds(from, to, &seconds[i], NULL) != SP_OK;
    }
    sp_event_destroy(from);
    sp_event_destroy(to);
    sp_graph_destroy(graph);
    qsort(seconds, (size_t)b->replays, sizeof seconds[0], ascending);
    return seconds[b->replays / 2] / calls;
}

static double wall(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* ---- the base's GEMM ----------------------------------------------------------------------- */

static void open_cublas(bench *b)
{
    void *library = dlopen("libcublas.so.13", RTLD_NOW);
    int (*create)(void **), (*set_stream)(void *, void *);

    if (!library)
        return;
    /* POSIX's way to make a function of dlsym's pointer. */
    *(void **)&create = dlsym(library, "cublasCreate_v2");
    *(void **)&set_stream = dlsym(library, "cublasSetStream_v2");
    *(void **)&b->gemm = dlsym(library, "cublasGemmEx");
    if (!create || !set_stream || !b->gemm || create(&b->cublas) != 0 ||
        set_stream(b->cublas, b->open.stream) != 0)
        b->cublas = NULL;
}

typedef struct base_call {
    bench *b;
    int32_t rows, k, n;
    void *weights[CALLS_MAX], *x[CALLS_MAX], *y[CALLS_MAX];
} base_call;

static void enqueue_base(void *user, int call)
{
    enum { no, yes, bf16 = 14, compute_f32 = 68, default_algorithm = -1 };
    const base_call *g = user;
    float one = 1.0f, zero = 0.0f;

    g->b->failed |= g->b->gemm(g->b->cublas, yes, no, g->n, g->rows, g->k, &one, g->weights[call],
                               bf16, g->k, g->x[call], bf16, g->k, &zero, g->y[call], bf16, g->n,
                               compute_f32, default_algorithm) != 0;
}

/* Kept for each layer and number of rows. */
static double base_us(bench *b, int l, int32_t rows)
{
    static double known[N_LAYERS][64];
    base_call g = {b, rows, layers[l].k, 0, {0}, {0}, {0}};
    int place = 0, calls = rows > SP_CUDA_DECODE_ROWS ? 2 : 4;

    while (1 << place < rows)
        place++;
    if (!b->cublas || known[l][place] > 0.0)
        return known[l][place];
    b->used = 0;
    for (int i = 0; i < layers[l].n_sites; i++)
        g.n += layers[l].n[i];
    for (int i = 0; i < calls; i++) {
        g.weights[i] = take(b, (size_t)g.n * (size_t)g.k * 2);
        g.x[i] = take(b, (size_t)rows * (size_t)g.k * 2);
        g.y[i] = take(b, (size_t)rows * (size_t)g.n * 2);
    }
    known[l][place] = replay(b, enqueue_base, &g, calls) * 1e6;
    return known[l][place];
}

/* ---- fused linears ------------------------------------------------------------------------- */

static void enqueue_pair(void *user, int call)
{
    rig *r = (rig *)user + call;

    r->failed |= r->kernels.shrink(r->gpu, &r->group, r->stream);
    r->failed |= r->kernels.expand(r->gpu, &r->group, r->stream);
}

static void enqueue_shrink(void *user, int call)
{
    rig *r = (rig *)user + call;

    r->failed |= r->kernels.shrink(r->gpu, &r->group, r->stream);
}

static void enqueue_expand(void *user, int call)
{
    rig *r = (rig *)user + call;

    r->failed |= r->kernels.expand(r->gpu, &r->group, r->stream);
}

static void enqueue_plan(void *user, int call)
{
    rig *r = (rig *)user + call;

    r->failed |=
        r->kernels.plan_rows(r->gpu, &r->group.plan, r->shape.rows, r->shape.slots, r->stream);
}

/* Rows and their slots: decode shuffled, prefill in uneven segments. */
static void make_rows(bench *b, rig *r, int32_t rows, int32_t slots)
{
    *r = b->open;
    r->shape.rows = rows;
    r->shape.slots = slots;
    r->seq_slot = calloc((size_t)rows, 4);
    r->row_scale = calloc((size_t)rows, 4);
    for (int32_t row = 0; row < rows; row++) {
        int64_t uneven = ((int64_t)row + row / 3) % rows, linear = (int64_t)row * slots / rows;

        r->seq_slot[row] = rows > SP_CUDA_DECODE_ROWS
                               ? (int32_t)(linear > 0 && uneven < 5 ? linear - 1 : linear)
                               : (row * 7) % rows % slots;
        r->row_scale[row] = 1.0f;
    }
    rig_plan(r);
    enqueue_plan(r, 0);
}

static void free_rows(rig *r)
{
    while (r->n_blocks > 0)
        sp_device_free(r->device, r->blocks[--r->n_blocks]);
    free(r->seq_slot), free(r->row_scale);
}

static void make_call(bench *b, rig *r, const layer *of, const step *s)
{
    size_t rank = (size_t)s->rank, slots = (size_t)s->slots, rows = (size_t)s->rows;
    int32_t *ranks = calloc(slots, 4);
    float *scales = calloc(slots, 4);

    make_rows(b, r, s->rows, s->slots);
    for (size_t i = 0; i < slots; i++) {
        ranks[i] = s->rank;
        scales[i] = 0.5f;
    }
    r->group.type = SP_DTYPE_BF16;
    r->group.n_rows = s->rows;
    r->group.n_slots = s->slots;
    r->group.n_sites = of->n_sites;
    r->group.k_in = of->k;
    r->group.rank_stride = s->rank;
    r->group.multiprocessors = sp_device_cuda_multiprocessors(r->device);
    r->group.x_stride = of->k;
    r->group.x = take(b, rows * (size_t)of->k * 2);
    r->group.partials = take(b, sp_cuda_partials_bytes(r->group.multiprocessors, s->rows, s->slots,
                                                       of->k, s->rank, of->n_sites));
    for (int i = 0; i < of->n_sites; i++) {
        size_t n = (size_t)of->n[i];

        r->group.sites[i] = (sp_cuda_site){.a = take(b, slots * rank * (size_t)of->k * 2),
                                           .b = take(b, slots * rank * n * 2),
                                           .a_slot_stride = (int64_t)s->rank * of->k,
                                           .b_slot_stride = (int64_t)s->rank * of->n[i],
                                           .a_stride = of->k,
                                           .b_stride = s->rank,
                                           .rank = rig_put(r, ranks, slots * 4),
                                           .scale = rig_put(r, scales, slots * 4),
                                           .y = take(b, rows * n * 2),
                                           .y_stride = of->n[i],
                                           .n_out = of->n[i]};
    }
    free(ranks), free(scales);
}

static void run_cell(bench *b, int l, const step *s, const char *name)
{
    const layer *of = &layers[l];
    static rig calls[CALLS_MAX];
    double n = 0.0, bytes, us, least, base;
    char parts[64] = "";
    int n_calls;

    for (int i = 0; i < of->n_sites; i++)
        n += of->n[i];
    bytes = 2.0 * s->slots * s->rank * ((double)of->k * of->n_sites + n) +
            s->rows * (of->k * 2.0 + n * 4.0);
    n_calls = bytes > 3e8 ? 2 : bytes > 3e7 ? 4 : bytes > 1e7 ? 8 : CALLS_MAX;
    base = base_us(b, l, s->rows);
    b->used = 0;
    for (int i = 0; i < n_calls; i++)
        make_call(b, &calls[i], of, s);
    us = replay(b, enqueue_pair, calls, n_calls) * 1e6;
    if (b->parts) {
        double shrink = replay(b, enqueue_shrink, calls, n_calls) * 1e6;
        double expand = replay(b, enqueue_expand, calls, n_calls) * 1e6;

        (void)snprintf(parts, sizeof parts, "\"shrink_us\": %.2f, \"expand_us\": %.2f, ", shrink,
                       expand);
    }
    for (int i = 0; i < n_calls; i++) {
        b->failed |= calls[i].failed;
        free_rows(&calls[i]);
    }
    least = floor_us(bytes, s->rows);
    printf("  {\"cell\": \"%s\", \"us\": %.2f, %s\"mb\": %.2f, \"gb_s\": %.0f, \"floor_us\": %.2f, "
           "\"x_floor\": %.2f, \"target_us\": %.1f, \"x_target\": %.2f, \"base_us\": %.1f, "
           "\"base_share\": %.2f, \"failed\": %d},\n",
           name, us, parts, bytes * 1e-6, bytes / us * 1e-3, least, us / least,
           (double)s->target[l], s->target[l] > 0.0f ? us / (double)s->target[l] : 0.0, base,
           base > 0.0 ? us / base : 0.0, b->failed);
    fflush(stdout);
    b->failed = 0;
}

/* ---- the rest ------------------------------------------------------------------------------ */

static void run_plan(bench *b, int32_t rows, int32_t slots)
{
    static rig calls[8];

    for (int i = 0; i < 8; i++)
        make_rows(b, &calls[i], rows, slots);
    printf("  {\"cell\": \"plan/m%d/d%d\", \"us\": %.2f, \"target_us\": 5.0, \"failed\": %d},\n",
           (int)rows, (int)slots, replay(b, enqueue_plan, calls, 8) * 1e6, b->failed);
    for (int i = 0; i < 8; i++)
        free_rows(&calls[i]);
    b->failed = 0;
}

/* Host time of the two launches of a fused linear. */
static void run_eager(bench *b)
{
    static const step one = {1, 1, 16, {0}};
    static rig call;
    double best = 1.0;

    b->used = 0;
    make_call(b, &call, &layers[0], &one);
    for (int i = 0; i < 7; i++) {
        double from = wall(), took;

        for (int j = 0; j < 60; j++)
            enqueue_pair(&call, 0);
        took = (wall() - from) / 60.0;
        best = took < best ? took : best;
        b->failed |= sp_stream_wait(sp_device_main_stream(b->open.device), NULL) != SP_OK;
    }
    free_rows(&call);
    printf("  {\"cell\": \"eager\", \"us\": %.2f, \"target_us\": 10.0, \"failed\": %d},\n",
           best * 1e6, b->failed | call.failed);
}

/* An adapter's image from pinned memory to a slot. */
static void run_swap(bench *b)
{
    sp_stream *stream = sp_device_main_stream(b->open.device);
    sp_event *from = NULL, *to = NULL;
    void *image = NULL;
    double seconds = 0.0, best = 1.0;

    b->failed |= sp_device_alloc_pinned(b->open.device, SWAP_BYTES, &image, NULL) != SP_OK;
    b->failed |= sp_event_create(b->open.device, &from, NULL) != SP_OK;
    b->failed |= sp_event_create(b->open.device, &to, NULL) != SP_OK;
    if (!b->failed)
        memset(image, 3, SWAP_BYTES);
    for (int i = 0; i < 7 && !b->failed; i++) {
        b->failed |= sp_event_record(from, stream, NULL) != SP_OK;
        b->failed |= sp_stream_copy(stream, b->arena, image, SWAP_BYTES, NULL) != SP_OK;
        b->failed |= sp_event_record(to, stream, NULL) != SP_OK;
        b->failed |= sp_event_wait(to, NULL) != SP_OK;
        b->failed |= sp_event_seconds(from, to, &seconds, NULL) != SP_OK;
        best = seconds < best ? seconds : best;
    }
    printf("  {\"cell\": \"swap/87MiB\", \"us\": %.1f, \"target_us\": 1700.0, \"failed\": %d},\n",
           best * 1e6, b->failed);
    sp_event_destroy(from);
    sp_event_destroy(to);
    sp_device_free_pinned(b->open.device, image);
}

/* One of the comma-separated beginnings, or all. */
static int wanted(const bench *b, const char *name)
{
    const char *at = b->cells;

    while (at && *at) {
        size_t n = strcspn(at, ",");

        if (strncmp(name, at, n) == 0)
            return 1;
        at += n + (at[n] == ',');
    }
    return b->cells == NULL;
}

static void run_cells(bench *b)
{
    static const int32_t plan_rows[][2] = {{1, 8},     {64, 64},   {256, 256},
                                           {2048, 64}, {8192, 64}, {8192, 512}};

    for (size_t s = 0; s < sizeof steps / sizeof steps[0]; s++)
        for (int l = 0; l < N_LAYERS; l++) {
            char name[64];

            (void)snprintf(name, sizeof name, "%s/%d/m%d/d%d", layers[l].name, (int)steps[s].rank,
                           (int)steps[s].rows, (int)steps[s].slots);
            if (wanted(b, name))
                run_cell(b, l, &steps[s], name);
        }
    for (size_t i = 0; wanted(b, "plan") && i < sizeof plan_rows / sizeof plan_rows[0]; i++)
        run_plan(b, plan_rows[i][0], plan_rows[i][1]);
    if (wanted(b, "eager"))
        run_eager(b);
    if (wanted(b, "swap"))
        run_swap(b);
}

/* Numbers of bf16 about 0.03, all over the arena. */
static int fill_arena(bench *b)
{
    sp_stream *stream = sp_device_main_stream(b->open.device);
    uint16_t *numbers = malloc(RANDOM_BYTES);
    int bad = !numbers;

    for (size_t i = 0; !bad && i < RANDOM_BYTES / 2; i++)
        numbers[i] =
            sp_f32_to_bf16(((float)(rig_hash((uint32_t)i) & 0xffffu) / 32768.0f - 1.0f) * 0.06f);
    bad = bad || sp_device_write(b->open.device, b->arena, numbers, RANDOM_BYTES, NULL) != SP_OK;
    for (size_t have = RANDOM_BYTES; !bad && have < ARENA_BYTES;) {
        size_t more = have < ARENA_BYTES - have ? have : ARENA_BYTES - have;

        bad = sp_stream_copy(stream, b->arena + have, b->arena, more, NULL) != SP_OK;
        have += more;
    }
    free(numbers);
    return bad || sp_stream_wait(stream, NULL) != SP_OK;
}

static const char *option(int argc, char **argv, const char *name, const char *otherwise)
{
    for (int i = 1; i + 1 < argc; i++)
        if (strcmp(argv[i], name) == 0)
            return argv[i + 1];
    return otherwise;
}

int main(int argc, char **argv)
{
    static bench b;
    sp_error error = {0};
    sp_device *gpu = NULL;
    void *arena = NULL;

    b.cells = option(argc, argv, "--cells", NULL);
    b.replays = (int)strtol(option(argc, argv, "--replays", "50"), NULL, 10);
    if (b.replays < 1 || b.replays > REPLAYS_MAX ||
        sp_device_open("cuda", NULL, &gpu, &error) != SP_OK ||
        rig_start(&b.open, gpu, &error) != SP_OK ||
        sp_device_alloc(b.open.device, FLUSH_BYTES, &b.flush, &error) != SP_OK ||
        sp_device_alloc(b.open.device, ARENA_BYTES, &arena, &error) != SP_OK) {
        fprintf(stderr, "bench_cuda: %s\n", error.text);
        return 1;
    }
    b.arena = arena;
    if (fill_arena(&b))
        return 1;
    b.parts = strcmp(option(argc, argv, "--parts", "0"), "0") != 0;
    if (strcmp(option(argc, argv, "--base", "1"), "0") != 0)
        open_cublas(&b);
    printf("{\"bench\": \"cuda\", \"commit\": \"%s\", \"device\": \"%s\", \"replays\": %d, "
           "\"cases\": [\n",
           option(argc, argv, "--commit", "unknown"), sp_device_name(b.open.device), b.replays);
    run_cells(&b);
    printf("  {}]}\n");
    sp_device_free(b.open.device, arena);
    sp_device_free(b.open.device, b.flush);
    sp_device_close(b.open.device);
    return 0;
}
