/*
 * bench_cuda_step.c: what a host pays around the kernels on a GPU, on a layout of Qwen3-8B with all
 * linear modules at rank 16 (87 MB a slot): a swap, alone and beside steps; the host's time for one
 * fused linear without a graph; the plan node; the grouped GEMM. Prints one JSON object.
 */
#include "base/clock.h"
#include "device/device_cuda.h"
#include "pool/image.h"

#include <sidepath/delta.h>
#include <sidepath/grouped.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 36, RANK = 16, SLOTS = 8, ROWS_MAX = 8192, HIDDEN = 4096, INTER = 12288 };

#define CHECK(call)                                                                        \
    do {                                                                                   \
        sp_status check_status = (call);                                                   \
        if (check_status != SP_OK) {                                                       \
            fprintf(stderr, "%s: %s: %s\n", #call, sp_status_name(check_status),           \
                    bench.device ? sp_device_error_text(bench.device) : bench.error.text); \
            exit(1);                                                                       \
        }                                                                                  \
    } while (0)

static const struct {
    const char *name;
    int32_t k_in, n_out;
} modules[] = {
    {"self_attn.q_proj", HIDDEN, 4096}, {"self_attn.k_proj", HIDDEN, 1024},
    {"self_attn.v_proj", HIDDEN, 1024}, {"self_attn.o_proj", HIDDEN, HIDDEN},
    {"mlp.gate_proj", HIDDEN, INTER},   {"mlp.up_proj", HIDDEN, INTER},
    {"mlp.down_proj", INTER, HIDDEN},
};

enum { MODULES = sizeof modules / sizeof modules[0] };

static struct {
    sp_device *device;
    sp_stream *stream;
    sp_event *from, *to;
    sp_geometry *geometry;
    sp_layout *layout;
    sp_pool *pool;
    sp_slot_handle handles[SLOTS];
    sp_delta *delta;
    sp_plan *plan;
    sp_image image; /* random bytes that are finite numbers, of every site */
    void *x, *y;
    sp_error error;
} bench;

/* ---- the model ----------------------------------------------------------------------------- */

static void make_pool(void)
{
    static sp_site sites[LAYERS * MODULES];
    static char paths[LAYERS * MODULES][64];
    sp_layout_options layout_options;
    sp_pool_options pool_options;

    for (int32_t i = 0; i < LAYERS * MODULES; i++) {
        sp_site_default(&sites[i], sizeof sites[i]);
        snprintf(paths[i], sizeof paths[i], "model.layers.%d.%s", i / MODULES,
                 modules[i % MODULES].name);
        sites[i].path = paths[i];
        sites[i].layer = i / MODULES;
        sites[i].k_in = modules[i % MODULES].k_in;
        sites[i].n_out = modules[i % MODULES].n_out;
    }
    CHECK(sp_geometry_create(sites, LAYERS * MODULES, &bench.geometry, &bench.error));
    sp_layout_options_default(&layout_options, sizeof layout_options);
    layout_options.geometry = bench.geometry;
    layout_options.rank = RANK;
    CHECK(sp_layout_create(&layout_options, &bench.layout, &bench.error));
    sp_pool_options_default(&pool_options, sizeof pool_options);
    pool_options.layout = bench.layout;
    pool_options.device = bench.device;
    pool_options.slots = SLOTS;
    CHECK(sp_pool_create(&pool_options, &bench.pool, &bench.error));
}

static void make_image(void)
{
    size_t n_sites = (size_t)sp_layout_n_sites(bench.layout);
    size_t bytes = sp_layout_slot_bytes(bench.layout);
    uint16_t *data;

    CHECK(sp_device_alloc_pinned(bench.device, bytes, &bench.image.data, &bench.error));
    data = bench.image.data;
    for (size_t i = 0; i < bytes / 2; i++)
        data[i] = (uint16_t)(0x3c00 + (i * 2654435761u >> 20) % 0x100); /* bf16 near 0.01 */
    bench.image.ranks = calloc(n_sites, sizeof(int32_t));
    bench.image.scales = calloc(n_sites, sizeof(float));
    if (!bench.image.ranks || !bench.image.scales)
        exit(1);
    for (size_t i = 0; i < n_sites; i++) {
        bench.image.ranks[i] = RANK;
        bench.image.scales[i] = 0.5f;
    }
    /* What sp_layout_pack would say of it. */
    bench.image.bytes = sizeof bench.image + n_sites * 8 + bytes;
    bench.image.fingerprint = sp_layout_fingerprint(bench.layout);
}

static void open_bench(void)
{
    sp_delta_options options;
    size_t width = (size_t)INTER * 2 * 2;

    CHECK(sp_device_open("cuda", NULL, &bench.device, &bench.error));
    bench.stream = sp_device_main_stream(bench.device);
    CHECK(sp_event_create(bench.device, &bench.from, NULL));
    CHECK(sp_event_create(bench.device, &bench.to, NULL));
    make_pool();
    make_image();
    sp_delta_options_default(&options, sizeof options);
    options.pool = bench.pool;
    options.rows_max = ROWS_MAX;
    CHECK(sp_delta_create(&options, &bench.delta, &bench.error));
    CHECK(sp_plan_create(ROWS_MAX, SLOTS, &bench.plan, &bench.error));
    CHECK(sp_device_alloc(bench.device, ROWS_MAX * (size_t)INTER * 2, &bench.x, &bench.error));
    CHECK(sp_device_alloc(bench.device, ROWS_MAX * width, &bench.y, &bench.error));
}

/* Rows round-robin over all slots. */
static void build_plan(int32_t n_rows)
{
    static sp_route_span spans[ROWS_MAX];

    for (int32_t i = 0; i < n_rows; i++) {
        int32_t slot = n_rows > 256 ? (int32_t)((int64_t)i * SLOTS / n_rows) : i % SLOTS;

        spans[i] = (sp_route_span){sizeof spans[i], bench.handles[slot], 1, 1.0f};
    }
    CHECK(sp_plan_build(bench.plan, bench.pool, spans, n_rows, n_rows, &bench.error));
    CHECK(sp_delta_upload(bench.delta, bench.plan, NULL, NULL));
}

/* The groups of one layer: q,k,v; o; gate,up; down. */
static void apply_group(int32_t layer, int first, int n)
{
    sp_delta_output outputs[3];
    const sp_delta_call call = {
        .struct_bytes = sizeof call,
        .plan = bench.plan,
        .x = bench.x,
        .x_stride = modules[first].k_in,
        .x_type = SP_DTYPE_BF16,
        .outputs = outputs,
        .n_outputs = n,
    };

    for (int i = 0; i < n; i++)
        outputs[i] = (sp_delta_output){sizeof *outputs, layer * MODULES + first + i,
                                       (char *)bench.y + (size_t)i * ROWS_MAX * 4096,
                                       modules[first + i].n_out, SP_DTYPE_BF16};
    CHECK(sp_delta_apply(bench.delta, &call, &bench.error));
}

static void enqueue_step(void)
{
    CHECK(sp_delta_start(bench.delta, bench.plan, NULL, NULL));
    for (int32_t layer = 0; layer < LAYERS; layer++) {
        apply_group(layer, 0, 3);
        apply_group(layer, 3, 1);
        apply_group(layer, 4, 2);
        apply_group(layer, 6, 1);
    }
}

/* ---- measuring ----------------------------------------------------------------------------- */

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double median(double *values, int n)
{
    qsort(values, (size_t)n, sizeof *values, ascending);
    return values[n / 2];
}

static double graph_seconds(sp_graph *graph)
{
    double seconds = 0.0;

    CHECK(sp_event_record(bench.from, bench.stream, NULL));
    CHECK(sp_graph_launch(graph, bench.stream, NULL));
    CHECK(sp_event_record(bench.to, bench.stream, NULL));
    CHECK(sp_event_wait(bench.to, NULL));
    CHECK(sp_event_seconds(bench.from, bench.to, &seconds, NULL));
    return seconds;
}

static sp_slot_handle load_one(void)
{
    sp_slot_handle handle;

    CHECK(sp_pool_load(bench.pool, &bench.image, &handle, &bench.error));
    return handle;
}

/* Its memory is free at once. */
static void unload(sp_slot_handle handle)
{
    CHECK(sp_pool_release(bench.pool, handle, &bench.error));
    CHECK(sp_pool_drain(bench.pool, handle, &bench.error));
}

/* All of a load by the host's clock, and the copy alone. */
static void time_swaps(void)
{
    enum { TIMES = 15 };
    size_t bytes = sp_layout_slot_bytes(bench.layout);
    double whole[TIMES], copy[TIMES], copied;

    for (int i = 0; i < TIMES; i++) {
        double began = sp_clock_seconds();
        sp_slot_handle handle = load_one();
        int32_t slot;

        CHECK(sp_stream_wait(bench.stream, NULL));
        whole[i] = sp_clock_seconds() - began;
        unload(handle);
        CHECK(sp_pool_load_begin(bench.pool, &slot, &bench.error));
        CHECK(sp_stream_wait(bench.stream, NULL));
        began = sp_clock_seconds();
        CHECK(sp_pool_load_write(bench.pool, slot, &bench.image, &bench.error));
        copy[i] = sp_clock_seconds() - began;
        CHECK(sp_pool_load_abort(bench.pool, slot, &bench.error));
    }
    copied = median(copy, TIMES);
    printf("  {\"case\": \"swap\", \"slot_bytes\": %zu, \"whole_ms\": %.3f, \"copy_ms\": %.3f, "
           "\"copy_gb_s\": %.1f},\n",
           bytes, median(whole, TIMES) * 1e3, copied * 1e3, (double)bytes / copied * 1e-9);
}

/* Host time of enqueuing, with room in the queue. */
static void time_eager(int32_t n_rows, const char *name, int first, int n)
{
    enum { TIMES = 21, CALLS = 100 };
    double seconds[TIMES], apply;

    build_plan(n_rows);
    CHECK(sp_delta_start(bench.delta, bench.plan, NULL, NULL));
    for (int t = 0; t < TIMES; t++) {
        double began = sp_clock_seconds();

        for (int i = 0; i < CALLS; i++)
            apply_group(i % LAYERS, first, n);
        seconds[t] = (sp_clock_seconds() - began) / CALLS;
        CHECK(sp_stream_wait(bench.stream, NULL));
    }
    apply = median(seconds, TIMES);
    printf("  {\"case\": \"eager host\", \"linear\": \"%s\", \"rows\": %d, \"us\": %.2f},\n", name,
           (int)n_rows, apply * 1e6);
}

static void time_upload(int32_t n_rows)
{
    enum { TIMES = 21, CALLS = 20 };
    double seconds[TIMES];

    for (int t = 0; t < TIMES; t++) {
        double began = sp_clock_seconds();

        for (int i = 0; i < CALLS; i++)
            CHECK(sp_delta_upload(bench.delta, bench.plan, NULL, NULL));
        seconds[t] = (sp_clock_seconds() - began) / CALLS;
        CHECK(sp_stream_wait(bench.stream, NULL));
    }
    printf("  {\"case\": \"upload host\", \"rows\": %d, \"us\": %.2f},\n", (int)n_rows,
           median(seconds, TIMES) * 1e6);
}

static void time_plan(int32_t n_rows)
{
    enum { TIMES = 25, NODES = 32 };
    double seconds[TIMES];
    sp_graph *graph = NULL;

    build_plan(n_rows);
    CHECK(sp_delta_start(bench.delta, bench.plan, NULL, NULL));
    CHECK(sp_graph_begin(bench.stream, NULL));
    for (int i = 0; i < NODES; i++)
        CHECK(sp_delta_start(bench.delta, bench.plan, NULL, NULL));
    CHECK(sp_graph_end(bench.stream, &graph, NULL));
    for (int t = 0; t < TIMES; t++)
        seconds[t] = graph_seconds(graph) / NODES;
    printf("  {\"case\": \"plan node\", \"rows\": %d, \"slots\": %d, \"us\": %.2f},\n", (int)n_rows,
           SLOTS, median(seconds, TIMES) * 1e6);
    sp_graph_destroy(graph);
}

/* ---- swaps beside steps -------------------------------------------------------------------- */

typedef struct loader {
    int32_t slot;
    volatile bool stop;
    int loads;
} loader;

static void *load_on(void *user)
{
    loader *l = user;

    while (!l->stop) {
        CHECK(sp_pool_load_write(bench.pool, l->slot, &bench.image, &bench.error));
        l->loads++;
    }
    return NULL;
}

/* Steps of all 36 layers' deltas, warm, with a loader that never rests and without one. */
static void time_steps(int32_t n_rows)
{
    enum { TIMES = 60 };
    double alone[TIMES], beside[TIMES], began, elapsed;
    sp_graph *graph = NULL;
    loader l = {.stop = false};
    pthread_t thread;

    build_plan(n_rows);
    enqueue_step();
    CHECK(sp_graph_begin(bench.stream, NULL));
    enqueue_step();
    CHECK(sp_graph_end(bench.stream, &graph, NULL));
    for (int t = 0; t < TIMES; t++)
        alone[t] = graph_seconds(graph);
    unload(bench.handles[SLOTS - 1]);
    CHECK(sp_pool_load_begin(bench.pool, &l.slot, &bench.error));
    CHECK(sp_stream_wait(bench.stream, NULL));
    if (pthread_create(&thread, NULL, load_on, &l) != 0)
        exit(1);
    began = sp_clock_seconds();
    for (int t = 0; t < TIMES; t++)
        beside[t] = graph_seconds(graph);
    elapsed = sp_clock_seconds() - began;
    l.stop = true;
    (void)pthread_join(thread, NULL);
    CHECK(sp_pool_load_commit(bench.pool, l.slot, &bench.image, &bench.handles[SLOTS - 1],
                              &bench.error));
    printf("  {\"case\": \"step of %d layers\", \"rows\": %d, \"alone_us\": %.1f, \"beside_us\": "
           "%.1f, \"loads\": %d, \"load_gb_s\": %.1f},\n",
           LAYERS, (int)n_rows, median(alone, TIMES) * 1e6, median(beside, TIMES) * 1e6, l.loads,
           l.loads * (double)sp_layout_slot_bytes(bench.layout) / elapsed * 1e-9);
    sp_graph_destroy(graph);
}

/* ---- the grouped GEMM ---------------------------------------------------------------------- */

typedef struct grouped_shape {
    int32_t rows, in, out, rank, segments;
} grouped_shape;

static void *device_bytes(size_t bytes)
{
    void *memory = NULL;

    CHECK(sp_device_alloc(bench.device, bytes, &memory, &bench.error));
    return memory;
}

static void *device_copy(const void *data, size_t bytes)
{
    void *memory = device_bytes(bytes);

    CHECK(sp_device_write(bench.device, memory, data, bytes, NULL));
    return memory;
}

/* Random finite f16. */
static void *device_numbers(size_t n)
{
    uint16_t *data = malloc(n * 2);
    void *memory;

    if (!data)
        exit(1);
    for (size_t i = 0; i < n; i++)
        data[i] = (uint16_t)(0x2800 + (i * 2654435761u >> 16) % 0x400);
    memory = device_copy(data, n * 2);
    free(data);
    return memory;
}

static sp_grouped_lora_params make_grouped(const grouped_shape *s)
{
    int32_t offsets[257], ids[256], ranks[256];
    float scales[256];
    sp_grouped_lora_params p = {.struct_bytes = sizeof(sp_grouped_lora_params),
                                .total_rows = s->rows,
                                .input_size = s->in,
                                .output_size = s->out,
                                .max_rank = s->rank,
                                .n_segments = s->segments,
                                .n_adapters = s->segments};
    size_t in = (size_t)s->in, out = (size_t)s->out, n = (size_t)s->segments;

    for (int32_t g = 0; g <= s->segments; g++)
        offsets[g] = (int32_t)((int64_t)s->rows * g / s->segments);
    for (int32_t g = 0; g < s->segments; g++) {
        ids[g] = g;
        ranks[g] = s->rank;
        scales[g] = 0.5f;
    }
    p.input = device_numbers((size_t)s->rows * in);
    p.lora_a = device_numbers(n * in * (size_t)s->rank);
    p.lora_b = device_numbers(n * out * (size_t)s->rank);
    p.output = device_numbers((size_t)s->rows * out);
    p.workspace_bytes = sp_grouped_lora_workspace_bytes(s->rows, s->out, s->rank);
    p.workspace = device_bytes(p.workspace_bytes);
    p.segment_offsets = device_copy(offsets, (n + 1) * 4);
    p.segment_adapters = device_copy(ids, n * 4);
    p.ranks = device_copy(ranks, n * 4);
    p.scales = device_copy(scales, n * 4);
    return p;
}

static void free_grouped(sp_grouped_lora_params *p)
{
    const void *memory[] = {p->input,     p->lora_a,          p->lora_b,           p->output,
                            p->workspace, p->segment_offsets, p->segment_adapters, p->ranks,
                            p->scales};

    for (size_t i = 0; i < sizeof memory / sizeof memory[0]; i++)
        sp_device_free(bench.device, (void *)(uintptr_t)memory[i]);
}

/* Cold: 128 MiB are written before each replay of one call. */
static void time_grouped(sp_grouped_lora *grouped, const grouped_shape *s, void *flush)
{
    enum { TIMES = 15 };
    sp_grouped_lora_params p = make_grouped(s);
    double seconds[TIMES];
    sp_graph *graph = NULL;

    CHECK(sp_grouped_lora_launch(grouped, &p, NULL, &bench.error));
    CHECK(sp_graph_begin(bench.stream, NULL));
    CHECK(sp_grouped_lora_launch(grouped, &p, NULL, &bench.error));
    CHECK(sp_graph_end(bench.stream, &graph, NULL));
    for (int t = 0; t < TIMES; t++) {
        CHECK(sp_stream_zero(bench.stream, flush, (size_t)128 << 20, NULL));
        seconds[t] = graph_seconds(graph);
    }
    printf("  {\"case\": \"grouped f16\", \"rows\": %d, \"in\": %d, \"out\": %d, \"rank\": %d, "
           "\"segments\": %d, \"us\": %.2f},\n",
           (int)s->rows, (int)s->in, (int)s->out, (int)s->rank, (int)s->segments,
           median(seconds, TIMES) * 1e6);
    sp_graph_destroy(graph);
    free_grouped(&p);
}

static void time_all_grouped(void)
{
    static const grouped_shape shapes[] = {
        {1, 4096, 4096, 16, 1},   {32, 4096, 4096, 16, 8},   {64, 4096, 4096, 64, 16},
        {512, 4096, 4096, 16, 4}, {2048, 4096, 4096, 16, 4}, {8192, 4096, 4096, 16, 4},
        {1, 12288, 4096, 16, 1},
    };
    sp_grouped_lora *grouped = NULL;
    void *flush = device_bytes((size_t)128 << 20);

    CHECK(sp_grouped_lora_create(bench.device, &grouped, &bench.error));
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        time_grouped(grouped, &shapes[i], flush);
    sp_grouped_lora_destroy(grouped);
    sp_device_free(bench.device, flush);
}

int main(void)
{
    static const int32_t plan_rows[] = {1, 64, 256, 1024, 8192};

    open_bench();
    printf("{\"bench\": \"cuda step\", \"cases\": [\n");
    time_swaps();
    for (int i = 0; i < SLOTS; i++)
        bench.handles[i] = load_one();
    time_eager(1, "qkv", 0, 3);
    time_eager(32, "qkv", 0, 3);
    time_eager(32, "o", 3, 1);
    time_eager(32, "gate-up", 4, 2);
    for (size_t i = 0; i < sizeof plan_rows / sizeof plan_rows[0]; i++) {
        time_plan(plan_rows[i]);
        time_upload(plan_rows[i]);
    }
    time_steps(1);
    time_steps(64);
    time_all_grouped();
    printf("  {}]}\n");
    return 0;
}
