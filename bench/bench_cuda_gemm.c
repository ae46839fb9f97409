/*
 * bench_cuda_gemm.c: times of the base's GEMMs on a GPU, each form of ours beside cuBLAS. By graph
 * replay with cold weights: a graph holds several calls, each with memory of its own, and 128 MiB
 * are written before each replay. Prints one JSON object, a line for each shape and number of rows.
 * Bytes are w and x once, y written; peer is cublasGemmEx with the algorithm of its own choice, one
 * call for each output, or NaN where libcublas.so.13 is not found.
 *
 *     bench_cuda_gemm [--cells qkv,head/64] [--replays 20] [--commit NAME] [--peer 0]
 *                     [--forms 4]
 *
 * --forms: so many of sp_cuda_gemm_form, from the first.
 */
#include "base/half.h"
#include "device/device_cuda.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/ops_cuda.h"

#include <dlfcn.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FLUSH_BYTES  ((size_t)128 << 20)
#define ARENA_BYTES  ((size_t)12 << 30)
#define RANDOM_BYTES ((size_t)32 << 20)
#define REPLAYS_MAX  200
#define CALLS_MAX    8

typedef struct layer {
    const char *name;
    int32_t k, n_outputs, n[3], f32;
} layer;

static const layer layers[] = {
    {"qkv", 4096, 3, {4096, 1024, 1024}, 0}, {"o", 4096, 1, {4096}, 0},
    {"gu", 4096, 2, {12288, 12288}, 0},      {"down", 12288, 1, {4096}, 0},
    {"head", 4096, 1, {151936}, 1},          {"qkv06", 1024, 3, {2048, 1024, 1024}, 0},
    {"down06", 3072, 1, {1024}, 0}};

static const int32_t row_counts[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192};

/* Forms, by sp_cuda_gemm_form. */
static const char *const forms[SP_CUDA_GEMM_FORMS] = {
    "chosen",   "few",      "tiles",     "wide",     "w64x64c4",
    "w64x64c2", "w64x32c2", "w128x64c2", "w128x128", "w128x256"};

typedef int (*gemm_fn)(void *, int, int, int, int, int, const void *, const void *, int, int,
                       const void *, int, int, const void *, void *, int, int, int, int);

typedef struct bench {
    sp_device *device;
    sp_cuda_ops_kernels kernels;
    int gpu;
    void *state, *flush;
    char *arena;
    size_t used;
    int replays, n_forms, library;
    void *cublas; /* NULL: none */
    gemm_fn peer;
    int failed;
} bench;

typedef struct cell {
    bench *b;
    const layer *of;
    int32_t rows, calls;
    sp_cuda_gemm gemm[CALLS_MAX];
} cell;

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

typedef void (*enqueue_fn)(cell *c, int call);

/* Median microseconds of one of the calls that a replay makes. */
static double replay(cell *c, enqueue_fn enqueue)
{
    bench *b = c->b;
    sp_stream *stream = sp_device_main_stream(b->device);
    sp_event *from = NULL, *to = NULL;
    sp_graph *graph = NULL;
    double seconds[REPLAYS_MAX] = {0};

    enqueue(c, 0); /* the code is loaded */
    b->failed |= sp_graph_begin(stream, NULL) != SP_OK;
    for (int i = 0; i < c->calls; i++)
        enqueue(c, i);
    b->failed |= sp_graph_end(stream, &graph, NULL) != SP_OK;
    b->failed |= sp_event_create(b->device, &from, NULL) != SP_OK;
    b->failed |= sp_event_create(b->device, &to, NULL) != SP_OK;
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
    return b->failed ? (double)NAN : seconds[b->replays / 2] * 1e6 / c->calls;
}

static void enqueue_ours(cell *c, int call)
{
    bench *b = c->b;

    b->failed |= b->kernels.base_gemm(b->gpu, b->state, &c->gemm[call],
                                      sp_stream_native(sp_device_main_stream(b->device)));
}

static void enqueue_peer(cell *c, int call)
{
    enum { no, yes, f32 = 0, bf16 = 14, compute_f32 = 68, default_algorithm = -1 };
    const sp_cuda_gemm *g = &c->gemm[call];
    float one = 1.0f, zero = 0.0f;

    for (int32_t i = 0; i < g->n_outputs; i++) {
        const sp_cuda_gemm_output *out = &g->outputs[i];

        c->b->failed |=
            c->b->peer(c->b->cublas, yes, no, out->n, g->rows, g->k, &one, out->w, bf16, g->k, g->x,
                       bf16, (int)g->x_stride, &zero, out->y, out->y_is_f32 ? f32 : bf16,
                       (int)out->y_stride, compute_f32, default_algorithm) != 0;
    }
}

static void open_peer(bench *b)
{
    void *library = dlopen("libcublas.so.13", RTLD_NOW);
    int (*create)(void **), (*set_stream)(void *, void *);

    if (!library)
        return;
    /* POSIX's way to make a function of dlsym's pointer. */
    *(void **)&create = dlsym(library, "cublasCreate_v2");
    *(void **)&set_stream = dlsym(library, "cublasSetStream_v2");
    *(void **)&b->peer = dlsym(library, "cublasGemmEx");
    if (!create || !set_stream || !b->peer || create(&b->cublas) != 0 ||
        set_stream(b->cublas, sp_stream_native(sp_device_main_stream(b->device))) != 0)
        b->cublas = NULL;
}

/* ---- cells --------------------------------------------------------------------------------- */

/* Outputs' weights are side by side, as the engine stores them. */
static void make_cell(cell *c)
{
    bench *b = c->b;
    size_t rows = (size_t)c->rows, k = (size_t)c->of->k;

    b->used = 0;
    for (int call = 0; call < c->calls; call++) {
        sp_cuda_gemm *g = &c->gemm[call];

        *g = (sp_cuda_gemm){.rows = c->rows,
                            .k = c->of->k,
                            .x = take(b, rows * k * 2),
                            .x_stride = c->of->k,
                            .n_outputs = c->of->n_outputs};
        for (int32_t i = 0; i < g->n_outputs; i++) {
            size_t n = (size_t)c->of->n[i];

            g->outputs[i] = (sp_cuda_gemm_output){.w = take(b, n * k * 2),
                                                  .y = take(b, rows * n * (c->of->f32 ? 4 : 2)),
                                                  .y_stride = c->of->n[i],
                                                  .n = c->of->n[i],
                                                  .y_is_f32 = c->of->f32};
        }
    }
}

/* NaN where the form does not take the rows, or failed. */
static double form_us(cell *c, int form)
{
    double us;

    c->b->failed = 0;
    if (form == SP_CUDA_GEMM_FEW && c->rows > SP_CUDA_GEMM_FEW_ROWS)
        return (double)NAN;
    for (int call = 0; call < c->calls; call++)
        c->gemm[call].form = form;
    us = replay(c, enqueue_ours);
    return c->b->failed ? (double)NAN : us;
}

static void print_us(const char *name, double us, double bytes, double flops)
{
    if (isnan(us))
        return;
    printf(", \"%s_us\": %.2f, \"%s_gb_s\": %.0f, \"%s_tflops\": %.1f", name, us, name,
           bytes / us * 1e-3, name, flops / us * 1e-6);
}

static void run_cell(bench *b, const layer *of, int32_t rows)
{
    static cell c;
    double n = 0.0, k = of->k, bytes, flops;

    for (int i = 0; i < of->n_outputs; i++)
        n += of->n[i];
    bytes = n * k * 2.0 + rows * (k * 2.0 + n * (of->f32 ? 4.0 : 2.0));
    flops = 2.0 * rows * n * k;
    c = (cell){.b = b, .of = of, .rows = rows, .calls = bytes > 4e8 ? 1 : bytes > 6e7 ? 3 : 6};
    make_cell(&c);
    if (b->failed)
        return;
    printf("  {\"cell\": \"%s/%d\", \"mb\": %.1f", of->name, (int)rows, bytes * 1e-6);
    for (int form = 0; form < b->n_forms; form++)
        print_us(forms[form], form_us(&c, form), bytes, flops);
    b->failed = 0;
    if (b->cublas)
        print_us("peer", replay(&c, enqueue_peer), bytes, flops);
    printf("},\n");
    fflush(stdout);
    b->failed = 0;
}

/* Tries cuBLASLt on a layer, where there is one: "chosen" may be it then. */
static void learn_layer(bench *b, const layer *of)
{
    cell c = {.b = b, .of = of, .rows = 1, .calls = 1};
    sp_cuda_gemm_report report = {0};
    int code;

    make_cell(&c);
    code = b->kernels.base_gemm_learn(b->gpu, b->state, &c.gemm[0], of->f32 ? 512 : 8192, &report);
    printf("  {\"learnt\": \"%s\", \"library\": %d, \"classes\": %d, \"by_library\": %d, "
           "\"differ\": %d, \"failed\": %d},\n",
           of->name, b->library, (int)report.n_classes, (int)report.n_library, (int)report.n_differ,
           code);
}

/* One of the comma-separated beginnings, or all. */
static bool wanted(const char *list, const char *name)
{
    const char *at = list;

    while (at && *at) {
        size_t n = strcspn(at, ",");

        if (strncmp(name, at, n) == 0)
            return true;
        at += n + (at[n] == ',');
    }
    return list == NULL;
}

/* Whether some cell of the layer is wanted. */
static bool wanted_layer(const char *list, const char *name)
{
    bool found = list == NULL;

    for (size_t r = 0; r < sizeof row_counts / sizeof row_counts[0]; r++) {
        char cell_name[64];

        (void)snprintf(cell_name, sizeof cell_name, "%s/%d", name, (int)row_counts[r]);
        found = found || wanted(list, cell_name);
    }
    return found;
}

/* Numbers of bf16 about 0.03, all over the arena. */
static int fill_arena(bench *b)
{
    sp_stream *stream = sp_device_main_stream(b->device);
    uint16_t *numbers = malloc(RANDOM_BYTES);
    uint32_t seed = 1;
    int bad = !numbers;

    for (size_t i = 0; !bad && i < RANDOM_BYTES / 2; i++) {
        seed = seed * 1664525u + 1013904223u;
        numbers[i] = sp_f32_to_bf16(((float)(seed >> 16) / 32768.0f - 1.0f) * 0.06f);
    }
    bad = bad || sp_device_write(b->device, b->arena, numbers, RANDOM_BYTES, NULL) != SP_OK;
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

static int open_bench(bench *b, sp_error *error)
{
    sp_cuda_kernels prepared;
    void *arena = NULL;

    if (sp_device_open("cuda", NULL, &b->device, error) != SP_OK ||
        sp_kernels_cuda_get(b->device, &prepared, error) != SP_OK ||
        sp_ops_cuda_get(b->device, &b->kernels, error) != SP_OK ||
        sp_device_alloc(b->device, FLUSH_BYTES, &b->flush, error) != SP_OK ||
        sp_device_alloc(b->device, ARENA_BYTES, &arena, error) != SP_OK)
        return 1;
    b->arena = arena;
    b->gpu = sp_device_cuda_index(b->device);
    return b->kernels.base_gemm_open(b->gpu, &b->state) != 0 ||
           b->kernels.base_gemm_library(b->gpu, b->state, NULL, &b->library) != 0 || fill_arena(b);
}

int main(int argc, char **argv)
{
    static bench b;
    sp_error error = {0};
    const char *cells = option(argc, argv, "--cells", NULL);

    b.replays = (int)strtol(option(argc, argv, "--replays", "20"), NULL, 10);
    b.n_forms = (int)strtol(option(argc, argv, "--forms", "4"), NULL, 10);
    if (b.n_forms < 0 || b.n_forms > SP_CUDA_GEMM_FORMS || b.replays < 1 ||
        b.replays > REPLAYS_MAX || open_bench(&b, &error)) {
        fprintf(stderr, "bench_cuda_gemm: %s\n", error.text);
        return 1;
    }
    if (strcmp(option(argc, argv, "--peer", "1"), "0") != 0)
        open_peer(&b);
    printf("{\"bench\": \"cuda_gemm\", \"commit\": \"%s\", \"device\": \"%s\", \"replays\": %d, "
           "\"cases\": [\n",
           option(argc, argv, "--commit", "unknown"), sp_device_name(b.device), b.replays);
    for (size_t l = 0; l < sizeof layers / sizeof layers[0]; l++) {
        if (wanted_layer(cells, layers[l].name))
            learn_layer(&b, &layers[l]);
        for (size_t r = 0; r < sizeof row_counts / sizeof row_counts[0]; r++) {
            char name[64];

            (void)snprintf(name, sizeof name, "%s/%d", layers[l].name, (int)row_counts[r]);
            if (wanted(cells, name))
                run_cell(&b, &layers[l], row_counts[r]);
        }
    }
    printf("  {}]}\n");
    (void)b.kernels.base_gemm_close(b.gpu, b.state);
    sp_device_free(b.device, b.arena);
    sp_device_free(b.device, b.flush);
    sp_device_close(b.device);
    return 0;
}
