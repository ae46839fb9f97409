/*
 * bench_cuda_rows.c: times of the row-wise kernels of a step on a GPU, at the sizes of Qwen3-8B.
 * By graph replay: a graph holds several calls, each with memory of its own, and 128 MiB are
 * written before each replay. Prints one line of JSON per cell: microseconds of a call, the median
 * of the replays, and their ratio to the bytes at 4.1 TB/s, the rate of a plain copy on an H200;
 * few rows are bound by latency, so their ratio says little.
 *
 *     bench_cuda_rows [REPLAYS [CELL]]
 */
#include "cuda/rig.h"
#include "kernels/cuda/ops_cuda.h"

#include <stdio.h>

#define FLUSH_BYTES  ((size_t)128 << 20)
#define ARENA_BYTES  ((size_t)4 << 30)
#define REPLAYS_MAX  200
#define CALLS_MAX    16
#define BYTES_PER_US 4.1e6

enum { HIDDEN = 4096, INNER = 12288, Q_HEADS = 32, KV_HEADS = 8, HEAD_DIM = 128, VOCAB = 151936 };

typedef struct bench {
    rig open;
    sp_cuda_ops_kernels ops;
    void *flush;
    char *arena;
    size_t used;
    int replays, failed;
    int32_t rows;
    sp_cuda_step step;
    const void *table; /* bf16 [VOCAB, HIDDEN] */
} bench;

/* ---- memory -------------------------------------------------------------------------------- */

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

static void *take_rows(bench *b, size_t width)
{
    return take(b, (size_t)b->rows * width * 2);
}

static void *put_numbers(bench *b, const int32_t *numbers, size_t n)
{
    void *to = take(b, n * sizeof *numbers);

    b->failed |= sp_device_write(b->open.device, to, numbers, n * sizeof *numbers, NULL) != SP_OK;
    return to;
}

/* A step of one span from position 0: the bytes of a decode are the same. */
static void make_step(bench *b)
{
    size_t rows = (size_t)b->rows;
    int32_t *token = calloc(rows, 4), *position = calloc(rows, 4), *span = calloc(rows, 4);

    for (size_t i = 0; i < rows; i++) {
        token[i] = (int32_t)(rig_hash((uint32_t)i) % VOCAB);
        position[i] = (int32_t)i;
    }
    b->step = (sp_cuda_step){.token = put_numbers(b, token, rows),
                             .position = put_numbers(b, position, rows),
                             .row_span = put_numbers(b, span, rows),
                             .span_page = put_numbers(b, span, 1),
                             .pages = put_numbers(b, position, rows),
                             .rows = b->rows,
                             .spans = 1};
    free(token), free(position), free(span);
}

/* ---- timing -------------------------------------------------------------------------------- */

typedef void (*make_fn)(bench *b, int call);
typedef void (*enqueue_fn)(bench *b, int call);

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double replay(bench *b, enqueue_fn enqueue, int calls)
{
    sp_stream *stream = sp_device_main_stream(b->open.device);
    sp_event *from = NULL, *to = NULL;
    sp_graph *graph = NULL;
    double seconds[REPLAYS_MAX] = {0};

    for (int i = 0; i < calls; i++)
        enqueue(b, i); /* the code is loaded */
    b->failed |= sp_graph_begin(stream, NULL) != SP_OK;
    for (int i = 0; i < calls; i++)
        enqueue(b, i);
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

/* ---- cells --------------------------------------------------------------------------------- */

static sp_cuda_gather gathers[CALLS_MAX];
static sp_cuda_norm norms[CALLS_MAX];
static sp_cuda_silu silus[CALLS_MAX];
static sp_cuda_rope ropes[CALLS_MAX];
static sp_cuda_pick picks[CALLS_MAX];
static sp_cuda_greedy greedies[CALLS_MAX];
static sp_cuda_sample samples[CALLS_MAX];

static void make_gather(bench *b, int call)
{
    gathers[call] = (sp_cuda_gather){b->step, b->table, HIDDEN, take_rows(b, HIDDEN)};
}

static void enqueue_gather(bench *b, int call)
{
    b->failed |= b->ops.gather_rows(b->open.gpu, &gathers[call], b->open.stream);
}

static void make_norm(bench *b, int call)
{
    norms[call] = (sp_cuda_norm){.rows = b->rows,
                                 .width = HIDDEN,
                                 .x = take_rows(b, HIDDEN),
                                 .weight = take(b, HIDDEN * 2),
                                 .eps = 1e-6f,
                                 .y = take_rows(b, HIDDEN)};
}

static void make_norm_add(bench *b, int call)
{
    make_norm(b, call);
    norms[call].add = take_rows(b, HIDDEN);
}

static void enqueue_norm(bench *b, int call)
{
    b->failed |= b->ops.norm_rows(b->open.gpu, &norms[call], b->open.stream);
}

static void make_silu(bench *b, int call)
{
    silus[call] = (sp_cuda_silu){
        .n = (int64_t)b->rows * INNER, .gate = take_rows(b, INNER), .up = take_rows(b, INNER)};
}

static void enqueue_silu(bench *b, int call)
{
    b->failed |= b->ops.silu_mul(b->open.gpu, &silus[call], b->open.stream);
}

static void make_rope(bench *b, int call)
{
    size_t kv = KV_HEADS * HEAD_DIM, angles = (size_t)b->rows * HEAD_DIM / 2 * sizeof(float);
    size_t cache = ((size_t)b->rows + SP_CUDA_PAGE) * kv * 2; /* whole pages */

    ropes[call] = (sp_cuda_rope){.step = b->step,
                                 .q_heads = Q_HEADS,
                                 .kv_heads = KV_HEADS,
                                 .head_dim = HEAD_DIM,
                                 .n_rot = HEAD_DIM / 2,
                                 .q = take_rows(b, Q_HEADS * HEAD_DIM),
                                 .k = take_rows(b, kv),
                                 .v = take_rows(b, kv),
                                 .q_norm = take(b, HEAD_DIM * 2),
                                 .k_norm = take(b, HEAD_DIM * 2),
                                 .q_eps = 1e-6f,
                                 .k_eps = 1e-6f,
                                 .cosine = take(b, angles),
                                 .sine = take(b, angles),
                                 .keys = take(b, cache),
                                 .values = take(b, cache),
                                 .fault = take(b, 4)};
}

static void enqueue_rope(bench *b, int call)
{
    b->failed |= b->ops.rope_rows(b->open.gpu, &ropes[call], b->open.stream);
}

static void make_pick(bench *b, int call)
{
    picks[call] = (sp_cuda_pick){
        b->rows, HIDDEN, b->step.position, take_rows(b, HIDDEN), HIDDEN, take_rows(b, HIDDEN)};
}

static void enqueue_pick(bench *b, int call)
{
    b->failed |= b->ops.pick_rows(b->open.gpu, &picks[call], b->open.stream);
}

/* Logits about normal, of which a few are far above the others. */
static void fill_logits(bench *b, char *to)
{
    static float row[VOCAB];
    size_t bytes = sizeof row;

    for (uint32_t i = 0; i < VOCAB; i++) {
        float sum = 0;

        for (uint32_t j = 0; j < 6; j++)
            sum += (float)(rig_hash(6 * i + j) & 0xffffu) / 65536.0f - 0.5f;
        row[i] = sum * 4 + (i % 30000 == 77 ? 9.0f + (float)(i / 30000) : 0.0f);
    }
    for (int32_t i = 0; i < b->rows; i++)
        b->failed |=
            sp_device_write(b->open.device, to + (size_t)i * bytes, row, bytes, NULL) != SP_OK;
}

static void make_greedy(bench *b, int call)
{
    greedies[call] = (sp_cuda_greedy){.rows = b->rows,
                                      .vocab = VOCAB,
                                      .logits = take(b, (size_t)b->rows * VOCAB * 4),
                                      .stride = VOCAB,
                                      .token = take(b, (size_t)b->rows * 4),
                                      .bad = take(b, (size_t)b->rows * 4),
                                      .scratch = take(b, sp_cuda_greedy_bytes(b->rows))};
}

static void enqueue_greedy(bench *b, int call)
{
    b->failed |= b->ops.greedy_rows(b->open.gpu, &greedies[call], b->open.stream);
}

/* The recommended settings of Qwen3: temperature 0.6, top_k 20, top_p 0.95. */
static void make_sample_as(bench *b, int call, sp_cuda_sample_row row)
{
    size_t rows = (size_t)b->rows, tops = rows * SP_CUDA_SAMPLE_TOP_MAX * 4;
    sp_cuda_sample_row *all = calloc(rows, sizeof *all);
    void *on_device = take(b, rows * sizeof *all);

    for (size_t i = 0; all && i < rows; i++) {
        all[i] = row;
        all[i].random = (uint64_t)rig_hash((uint32_t)i) << 32;
    }
    b->failed |=
        !all || sp_device_write(b->open.device, on_device, all, rows * sizeof *all, NULL) != SP_OK;
    free(all);
    samples[call] = (sp_cuda_sample){.rows = b->rows,
                                     .vocab = VOCAB,
                                     .logits = take(b, rows * VOCAB * 4),
                                     .stride = VOCAB,
                                     .row = on_device,
                                     .result = take(b, rows * sizeof(sp_cuda_sample_result)),
                                     .top_token = take(b, tops),
                                     .top_logit = take(b, tops)};
    fill_logits(b, (char *)samples[call].logits);
}

static void make_sample(bench *b, int call)
{
    make_sample_as(b, call,
                   (sp_cuda_sample_row){.top_p = 0.95,
                                        .inverse = 1 / 0.6f,
                                        .top_k = 20,
                                        .repetition = 1,
                                        .given = -1,
                                        .n_top = -1});
}

/* Without a cut. */
static void make_sample_all(bench *b, int call)
{
    make_sample_as(
        b, call,
        (sp_cuda_sample_row){.top_p = 1, .inverse = 1, .repetition = 1, .given = -1, .n_top = -1});
}

static void make_sample_p(bench *b, int call)
{
    make_sample_as(b, call,
                   (sp_cuda_sample_row){
                       .top_p = 0.9, .inverse = 1, .repetition = 1, .given = -1, .n_top = -1});
}

/* The best token, with logprobs of five. */
static void make_logprobs(bench *b, int call)
{
    make_sample_as(b, call, (sp_cuda_sample_row){.top_p = 1, .given = -1, .n_top = 5});
}

static void enqueue_sample(bench *b, int call)
{
    b->failed |= b->ops.sample_rows(b->open.gpu, &samples[call], b->open.stream);
}

static const struct cell {
    const char *name;
    make_fn make;
    enqueue_fn enqueue;
    double row_bytes;
    int32_t rows_max;
} cells[] = {
    {"gather", make_gather, enqueue_gather, HIDDEN * 4.0, 8192},
    {"norm", make_norm, enqueue_norm, HIDDEN * 4.0, 8192},
    {"norm_add", make_norm_add, enqueue_norm, HIDDEN * 8.0, 8192},
    {"silu", make_silu, enqueue_silu, INNER * 6.0, 8192},
    {"rope", make_rope, enqueue_rope, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM * 4.0, 8192},
    {"pick", make_pick, enqueue_pick, HIDDEN * 4.0, 8192},
    {"greedy", make_greedy, enqueue_greedy, VOCAB * 4.0, 256},
    {"sample", make_sample, enqueue_sample, VOCAB * 4.0, 256},
    {"sample_all", make_sample_all, enqueue_sample, VOCAB * 4.0, 64},
    {"sample_p", make_sample_p, enqueue_sample, VOCAB * 4.0, 64},
    {"logprobs", make_logprobs, enqueue_sample, VOCAB * 4.0, 64},
};

static void run_cell(bench *b, const struct cell *cell, int32_t rows)
{
    double bytes = cell->row_bytes * rows, us;
    int calls = bytes > 3e8 ? 2 : bytes > 3e7 ? 4 : bytes > 3e6 ? 8 : CALLS_MAX;

    b->rows = rows;
    b->used = (size_t)VOCAB * HIDDEN * 2;
    make_step(b);
    for (int i = 0; i < calls; i++)
        cell->make(b, i);
    us = replay(b, cell->enqueue, calls) * 1e6;
    printf("{\"cell\": \"%s/%d\", \"us\": %.2f, \"mb\": %.3f, \"x_copy\": %.2f, \"failed\": %d}\n",
           cell->name, rows, us, bytes * 1e-6, us / (bytes / BYTES_PER_US), b->failed);
    b->failed = 0;
}

int main(int argc, char **argv)
{
    static const int32_t rows[] = {1, 8, 64, 256, 2048, 8192};
    static bench b;
    sp_error error = {0};
    sp_device *gpu = NULL;
    void *arena = NULL;

    b.replays = argc > 1 ? (int)strtol(argv[1], NULL, 10) : 50;
    if (b.replays < 1 || b.replays > REPLAYS_MAX ||
        sp_device_open("cuda", NULL, &gpu, &error) != SP_OK ||
        rig_start(&b.open, gpu, &error) != SP_OK || sp_ops_cuda_get(gpu, &b.ops, &error) != SP_OK ||
        sp_device_alloc(gpu, FLUSH_BYTES, &b.flush, &error) != SP_OK ||
        sp_device_alloc(gpu, ARENA_BYTES, &arena, &error) != SP_OK) {
        fprintf(stderr, "bench_cuda_rows: %s\n", error.text);
        return 1;
    }
    b.arena = arena;
    b.table = arena;
    if (sp_stream_zero(sp_device_main_stream(gpu), arena, ARENA_BYTES, NULL) != SP_OK)
        return 1;
    for (size_t c = 0; c < sizeof cells / sizeof cells[0]; c++)
        for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
            if (rows[i] <= cells[c].rows_max && (argc < 3 || strcmp(argv[2], cells[c].name) == 0))
                run_cell(&b, &cells[c], rows[i]);
    sp_device_free(gpu, arena);
    sp_device_free(gpu, b.flush);
    sp_device_close(gpu);
    return 0;
}
