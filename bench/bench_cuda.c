/*
 * bench_cuda.c: times of one fused linear (shrink and expand) on a GPU, by graph replay with cold
 * weights, x and y: a graph holds CALLS sets, and 128 MiB are written before each replay. Prints
 * one JSON object; bytes are x, each distinct A and B once, y read and written.
 *
 *     bench_cuda [CELLS]       CELLS: only cells whose name begins so ("qkv", "gu/64")
 */
#include "cuda/rig.h"

#include <stdio.h>

#define FLUSH_BYTES ((size_t)128 << 20)
#define REPLAYS     25
#define CALLS_MAX   8

typedef struct cell {
    const char *layer;
    int32_t k, n, sites;
} cell;

static const cell layers[] = {
    {"qkv", 4096, 2048, 3}, {"o", 4096, 4096, 1}, {"gu", 4096, 12288, 2}, {"down", 12288, 4096, 1}};
static const int32_t steps[][3] = {{1, 1, 16},   {8, 8, 16},     {32, 1, 16},   {32, 8, 16},
                                   {64, 16, 16}, {64, 64, 16},   {64, 16, 64},  {64, 64, 64},
                                   {1, 1, 64},   {256, 256, 16}, {1, 1, 8},     {1, 1, 128},
                                   {512, 4, 16}, {2048, 4, 16},  {8192, 4, 16}, {8192, 16, 64}};

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* Median seconds of one replay. */
static double replay(rig *sets, sp_graph *graph, void *flush)
{
    sp_stream *stream = sp_device_main_stream(sets->device);
    sp_event *from = NULL, *to = NULL;
    double seconds[REPLAYS] = {0};

    sets->failed |= sp_event_create(sets->device, &from) != SP_OK;
    sets->failed |= sp_event_create(sets->device, &to) != SP_OK;
    for (int i = 0; i < REPLAYS && !sets->failed; i++) {
        sets->failed |= sp_stream_zero(stream, flush, FLUSH_BYTES) != SP_OK;
        sets->failed |= sp_event_record(from, stream) != SP_OK;
        sets->failed |= sp_graph_launch(graph, stream) != SP_OK;
        sets->failed |= sp_event_record(to, stream) != SP_OK;
        sets->failed |= sp_event_wait(to) != SP_OK;
        sets->failed |= sp_event_seconds(from, to, &seconds[i]) != SP_OK;
    }
    sp_event_destroy(from);
    sp_event_destroy(to);
    qsort(seconds, REPLAYS, sizeof seconds[0], ascending);
    return seconds[REPLAYS / 2];
}

static double time_cell(rig *sets, int calls, void *flush)
{
    sp_stream *stream = sp_device_main_stream(sets->device);
    sp_graph *graph = NULL;
    double seconds;

    for (int i = 0; i < calls; i++)
        rig_enqueue(&sets[i]); /* the plans; and the code is loaded */
    sets->failed |= sp_graph_begin(stream) != SP_OK;
    for (int i = 0; i < calls; i++) {
        sets[i].group.after_plan = 0;
        sets->failed |= sets[i].kernels.shrink(sets[i].gpu, &sets[i].group, sets[i].stream);
        sets->failed |= sets[i].kernels.expand(sets[i].gpu, &sets[i].group, sets[i].stream);
    }
    sets->failed |= sp_graph_end(stream, &graph) != SP_OK;
    seconds = sets->failed ? 0.0 : replay(sets, graph, flush);
    sp_graph_destroy(graph);
    return seconds / calls;
}

static void run_cell(const rig *open, const cell *layer, const int32_t *step, void *flush)
{
    int32_t rows = step[0], slots = step[1], rank = step[2], *seq_slot = calloc((size_t)rows, 4);
    int32_t own[256];
    rig sets[CALLS_MAX];
    rig_shape shape = {rows, slots, layer->k, layer->n, rank, layer->sites, 0, SP_DTYPE_BF16};
    double pair = (double)rank * (layer->k + layer->n) * layer->sites * 2.0;
    double bytes = slots * pair + (double)rows * (layer->k * 2.0 + layer->n * layer->sites * 4.0);
    int calls = bytes > 30e6 ? 2 : CALLS_MAX;
    double seconds;

    for (int32_t s = 0; s < slots; s++)
        own[s] = rank;
    for (int32_t row = 0; row < rows; row++) /* a bijection, so that every slot has its share */
        seq_slot[row] = rows > 256 ? row * slots / rows : (row * 7) % rows % slots;
    for (int i = 0; i < calls; i++) {
        sets[i] = *open;
        rig_make(&sets[i], &shape, seq_slot, own, NULL);
        /* The same host bytes, but each site has memory of its own, as in a pool. */
        for (int site = 1; site < layer->sites; site++) {
            size_t rk = (size_t)slots * (size_t)rank * 2;

            sets[i].group.sites[site].a = rig_put(&sets[i], sets[i].a, rk * (size_t)layer->k);
            sets[i].group.sites[site].b = rig_put(&sets[i], sets[i].b, rk * (size_t)layer->n);
        }
        if (i > 0)
            sets[0].failed |= sets[i].failed;
    }
    seconds = time_cell(sets, calls, flush);
    printf("  {\"cell\": \"%s/%d/m%d/d%d\", \"us\": %.2f, \"mb\": %.2f, \"gb_s\": %.0f, "
           "\"failed\": %d},\n",
           layer->layer, (int)rank, (int)rows, (int)slots, seconds * 1e6, bytes * 1e-6,
           bytes / (seconds > 0 ? seconds : 1.0) * 1e-9, sets[0].failed);
    fflush(stdout);
    for (int i = 0; i < calls; i++)
        rig_free(&sets[i]);
    free(seq_slot);
}

int main(int argc, char **argv)
{
    static rig open;
    sp_error error = {0};
    void *flush = NULL;

    if (rig_open(&open, &error) != 0 ||
        sp_device_alloc(open.device, FLUSH_BYTES, &flush, &error) != SP_OK) {
        fprintf(stderr, "bench_cuda: %s\n", error.text);
        return 1;
    }
    printf("{\"bench\": \"cuda\", \"cases\": [\n");
    for (size_t s = 0; s < sizeof steps / sizeof steps[0]; s++)
        for (size_t l = 0; l < sizeof layers / sizeof layers[0]; l++) {
            char name[64];

            (void)snprintf(name, sizeof name, "%s/%d", layers[l].layer, (int)steps[s][2]);
            if (argc < 2 || strncmp(name, argv[1], strlen(argv[1])) == 0)
                run_cell(&open, &layers[l], steps[s], flush);
        }
    printf("  {}]}\n");
    sp_device_free(open.device, flush);
    sp_device_close(open.device);
    return 0;
}
