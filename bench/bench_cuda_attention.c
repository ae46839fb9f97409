/*
 * bench_cuda_attention.c: times of paged attention on a GPU, by graph replay: several calls over
 * caches of their own, so that K and V come from memory where they exceed L2. One JSON line per
 * cell: microseconds of a call (median, least and most), the part of the bandwidth that K and V
 * read once would take at 4.55 TB/s (measured on an H200), TFLOP/s of the scores and P V that are
 * not masked, and microseconds of the plan, which a step makes once for all layers.
 *
 *     bench_cuda_attention [--heads 32/8/128] [--replays 25] [--cells decode,prefill]
 */
#include "cuda/attention_world.h"

#define CACHE_BYTES   ((size_t)10 << 30) /* K and V */
#define PATTERN_BYTES ((size_t)32 << 20)
#define REPLAYS_MAX   100
#define SETS_MAX      64
#define COLD_BYTES    6e8 /* that the calls of a replay read together */
#define BANDWIDTH     4.55e12
#define ROWS_MAX      8192

typedef struct cell {
    const char *name;
    int32_t batch, rows, context; /* context: with the rows */
} cell;

static const cell cells[] = {
    {"decode", 1, 1, 1024},   {"decode", 1, 1, 8192},     {"decode", 1, 1, 32768},
    {"decode", 16, 1, 1024},  {"decode", 16, 1, 8192},    {"decode", 16, 1, 32768},
    {"decode", 24, 1, 8192},  {"decode", 64, 1, 1024},    {"decode", 64, 1, 8192},
    {"decode", 64, 1, 32768}, {"verify", 4, 9, 2048},     {"verify", 1, 5, 8192},
    {"verify", 4, 17, 2048},  {"prefill", 1, 2048, 2048}, {"prefill", 1, 8192, 8192},
    {"chunk", 1, 512, 8192},
};

typedef struct bench {
    world w;
    int replays, failed;
    int32_t cache_pages;
    const char *cells;
} bench;

typedef struct timing {
    double median, least, most; /* microseconds of a call */
} timing;

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* ---- set up -------------------------------------------------------------------------------- */

static void fill(bench *b, void *memory, size_t bytes)
{
    uint16_t *pattern = world_numbers(&b->w, PATTERN_BYTES / 2, 1.0f);

    for (size_t at = 0; at < bytes; at += PATTERN_BYTES) {
        size_t part = bytes - at < PATTERN_BYTES ? bytes - at : PATTERN_BYTES;

        b->failed |=
            sp_device_write(b->w.device, (char *)memory + at, pattern, part, NULL) != SP_OK;
    }
    free(pattern);
}

/* One sequence for every cell's pages; world_make would keep a copy of the cache. */
static void set_up(bench *b, const sp_cuda_attention_shape *shape)
{
    world *w = &b->w;
    size_t page =
        (size_t)shape->kv_heads * SP_CUDA_PAGE * 2 * (size_t)sp_cuda_page_dim(shape->head_dim);
    void *cache[2];

    w->call.shape = *shape;
    w->n_pages = b->cache_pages = (int32_t)(CACHE_BYTES / 2 / page);
    w->pages = calloc((size_t)w->n_pages, sizeof *w->pages);
    for (int i = 0; i < 2; i++) {
        cache[i] = world_alloc(w, (size_t)w->n_pages * page);
        fill(b, cache[i], (size_t)w->n_pages * page);
    }
    w->call.keys = cache[0];
    w->call.values = cache[1];
    w->call.step.pages = world_alloc(w, (size_t)w->n_pages * sizeof(int32_t));
    world_make_step(w);
    world_shuffle(w);
    world_write_pages(w);
    w->n_sequences = 1;
    w->q[0] = world_numbers(w, (size_t)ROWS_MAX * world_row(w), 1.0f);
    b->failed |= w->failed;
}

/* Every sequence of the cell has pages of its own; all have the same queries. */
static void set_cell(bench *b, const cell *c)
{
    world *w = &b->w;
    world_span spans[64];
    int32_t pages = world_pages_of(c->context);

    w->call.step.rows = c->batch * c->rows;
    w->call.step.spans = c->batch;
    w->call.wide = c->rows > SP_CUDA_NARROW_ROWS;
    for (int32_t i = 0; i < c->batch; i++)
        spans[i] = (world_span){0, 0, c->rows};
    world_set_step(w, spans, c->batch);
    for (int32_t i = 0; i < c->batch; i++) {
        int32_t *position = w->tables + 2 + w->call.shape.rows_max;
        int32_t *span_page = w->tables + (w->call.step.span_page - w->call.step.counts);

        for (int32_t r = 0; r < c->rows; r++)
            position[i * c->rows + r] = c->context - c->rows + r;
        span_page[i] = i * pages;
    }
    b->failed |=
        sp_device_write(w->device, w->device_tables, w->tables, w->tables_bytes, NULL) != SP_OK;
}

/* ---- timing -------------------------------------------------------------------------------- */

static timing replay(bench *b, sp_graph *graph, int calls)
{
    sp_stream *stream = sp_device_main_stream(b->w.device);
    sp_event *from = NULL, *to = NULL;
    double seconds[REPLAYS_MAX] = {0};

    b->failed |= sp_event_create(b->w.device, &from, NULL) != SP_OK;
    b->failed |= sp_event_create(b->w.device, &to, NULL) != SP_OK;
    for (int i = -2; i < b->replays && !b->failed; i++) {
        b->failed |= sp_event_record(from, stream, NULL) != SP_OK;
        b->failed |= sp_graph_launch(graph, stream, NULL) != SP_OK;
        b->failed |= sp_event_record(to, stream, NULL) != SP_OK;
        b->failed |= sp_event_wait(to, NULL) != SP_OK;
        b->failed |= sp_event_seconds(from, to, &seconds[i < 0 ? 0 : i], NULL) != SP_OK;
    }
    sp_event_destroy(from);
    sp_event_destroy(to);
    qsort(seconds, (size_t)b->replays, sizeof seconds[0], ascending);
    return (timing){seconds[b->replays / 2] * 1e6 / calls, seconds[0] * 1e6 / calls,
                    seconds[b->replays - 1] * 1e6 / calls};
}

/* Calls over `sets` parts of the cache. */
static timing time_attention(bench *b, int32_t pages, int sets, int calls)
{
    sp_stream *stream = sp_device_main_stream(b->w.device);
    const int32_t *all = b->w.call.step.pages;
    sp_graph *graph = NULL;
    timing t;

    b->failed |= sp_graph_begin(stream, NULL) != SP_OK;
    for (int i = 0; i < calls; i++) {
        b->w.call.step.pages = all + (size_t)(i % sets) * (size_t)pages;
        b->failed |= b->w.ops.attend_rows(b->w.gpu, &b->w.call, b->w.stream);
    }
    b->w.call.step.pages = all;
    b->failed |= sp_graph_end(stream, &graph, NULL) != SP_OK;
    t = replay(b, graph, calls);
    sp_graph_destroy(graph);
    return t;
}

static timing time_plan(bench *b)
{
    enum { CALLS = 8 };
    sp_stream *stream = sp_device_main_stream(b->w.device);
    sp_graph *graph = NULL;
    timing t;

    b->failed |= sp_graph_begin(stream, NULL) != SP_OK;
    for (int i = 0; i < CALLS; i++)
        b->failed |= b->w.ops.attention_plan(b->w.gpu, &b->w.call, b->w.stream);
    b->failed |= sp_graph_end(stream, &graph, NULL) != SP_OK;
    t = replay(b, graph, CALLS);
    sp_graph_destroy(graph);
    return t;
}

static double flops_of(const bench *b, const cell *c)
{
    double keys = 0;

    for (int32_t r = 0; r < c->rows; r++)
        keys += c->context - c->rows + r + 1;
    return 4.0 * keys * c->batch * b->w.call.shape.q_heads * b->w.call.shape.head_dim;
}

static void run_cell(bench *b, const cell *c)
{
    const sp_cuda_attention_shape *s = &b->w.call.shape;
    int32_t pages = c->batch * world_pages_of(c->context);
    double bytes = 4.0 * c->batch * c->context * s->kv_heads * sp_cuda_page_dim(s->head_dim);
    int sets = (int)ceil(COLD_BYTES / bytes), calls;
    timing plan, t;

    sets = sets > SETS_MAX ? SETS_MAX : sets;
    while (sets > 1 && sets * pages > b->cache_pages)
        sets--;
    calls = sets > 4 ? sets : c->rows >= 512 ? 2 : 4;
    set_cell(b, c);
    plan = time_plan(b);
    t = time_attention(b, pages, sets, calls);
    printf("{\"bench\": \"attention\", \"cell\": \"%s\", \"heads\": \"%d/%d/%d\", \"batch\": %d, "
           "\"rows\": %d, \"context\": %d, \"us\": %.2f, \"least\": %.2f, \"most\": %.2f, "
           "\"of_bandwidth\": %.3f, \"tflops\": %.1f, \"plan_us\": %.2f, \"failed\": %d}\n",
           c->name, s->q_heads, s->kv_heads, s->head_dim, c->batch, c->rows, c->context, t.median,
           t.least, t.most, bytes / BANDWIDTH * 1e6 / t.median, flops_of(b, c) / t.median * 1e-6,
           plan.median, b->failed);
    fflush(stdout);
}

static int read_options(bench *b, sp_cuda_attention_shape *shape, int argc, char **argv)
{
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--heads") == 0) {
            if (sscanf(argv[i + 1], "%d/%d/%d", &shape->q_heads, &shape->kv_heads,
                       &shape->head_dim) != 3)
                return 1;
        } else if (strcmp(argv[i], "--replays") == 0)
            b->replays = (int)strtol(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--cells") == 0)
            b->cells = argv[i + 1];
        else
            return 1;
    }
    return b->replays < 1 || b->replays > REPLAYS_MAX || argc % 2 == 0;
}

int main(int argc, char **argv)
{
    bench b = {.replays = 25};
    sp_cuda_attention_shape shape = {.q_heads = 32,
                                     .kv_heads = 8,
                                     .head_dim = 128,
                                     .rows_max = ROWS_MAX,
                                     .spans_max = 64,
                                     .positions_max = 32768};
    sp_device *device = NULL;
    sp_error error;

    if (read_options(&b, &shape, argc, argv) != 0) {
        fprintf(stderr, "usage: bench_cuda_attention [--heads Q/KV/DIM] [--replays N] "
                        "[--cells NAME,NAME]\n");
        return 2;
    }
    shape.scale = 1.0f / sqrtf((float)shape.head_dim);
    if (sp_device_open("cuda", NULL, &device, &error) != SP_OK ||
        world_start(&b.w, device, &error) != SP_OK) {
        fprintf(stderr, "%s\n", error.text);
        return 1;
    }
    set_up(&b, &shape);
    for (size_t i = 0; i < sizeof cells / sizeof cells[0] && !b.failed; i++)
        if (b.cells == NULL || strstr(b.cells, cells[i].name) != NULL)
            run_cell(&b, &cells[i]);
    if (b.failed)
        fprintf(stderr, "failed: %s\n", sp_device_error_text(device));
    world_free(&b.w);
    sp_device_close(device);
    return b.failed != 0;
}
