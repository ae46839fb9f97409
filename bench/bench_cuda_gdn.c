/*
 * bench_cuda_gdn.c: times of a layer's gated delta rule on a GPU, 16 key and 48 value heads of 128
 * (and of 32 value heads): decode steps of 1 to 64 sequences, verification of 8 rows of each,
 * and prefill. By graph replay: a graph holds several calls, each with states of its own, so that
 * S is not in L2. Prints one JSON object with a line for each cell; microseconds a layer:
 *
 *     us           the whole op: convolution, rule and norm
 *     bytes        of S, read once and written once: what a recurrent form moves
 *     gb_per_s     those over the time, so more than the memory's where S is only read
 *
 *     bench_cuda_gdn [--replays 20] [--cell INDEX] [--commit NAME]
 */
#include "cuda/rule_rig.h"

#include <stdio.h>

enum { CALLS_MAX = 32 };

#define FLUSH_BYTES ((size_t)128 << 20)
#define REPLAYS_MAX 200

/* Spans of n_rows rows at a position. */
typedef struct cell {
    const char *name;
    int32_t v_heads, sequences, n_rows, position, n_final;
} cell;

static const cell cells[] = {
    {"decode", 48, 1, 1, 80, 1},       {"decode", 48, 4, 1, 80, 1},
    {"decode", 48, 8, 1, 80, 1},       {"decode", 48, 16, 1, 80, 1},
    {"decode", 48, 64, 1, 80, 1},      {"decode", 32, 64, 1, 80, 1},
    {"fold", 48, 64, 1, 95, 1},        {"verify", 48, 8, 8, 80, 1},
    {"prefill", 48, 1, 512, 0, 512},   {"prefill", 48, 1, 2048, 0, 2048},
    {"prefill", 48, 1, 8192, 0, 8192}, {"prefill", 32, 1, 8192, 0, 8192},
    {"prefill", 16, 1, 8192, 0, 8192}, {"prefill", 48, 4, 2048, 0, 2048},
};

typedef struct bench {
    moe_rig rig;
    void *flush;
    int replays;
} bench;

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* Median microseconds of a call; call i has the slots from i * sequences on. */
static double replay(bench *b, rule_world *w, int calls)
{
    sp_stream *stream = sp_device_main_stream(b->rig.device);
    const sp_cuda_delta_rule call = w->call;
    sp_event *from = NULL, *to = NULL;
    sp_graph *graph = NULL;
    double seconds[REPLAYS_MAX] = {0};
    int *failed = &b->rig.failed;

    rule_launch(w); /* the code is loaded */
    *failed |= sp_graph_begin(stream, NULL) != SP_OK;
    for (int i = 0; i < calls; i++) {
        w->call.states = (char *)call.states + (int64_t)i * call.spans * call.state_stride;
        rule_launch(w);
    }
    w->call = call;
    *failed |= sp_graph_end(stream, &graph, NULL) != SP_OK;
    *failed |= sp_event_create(b->rig.device, &from, NULL) != SP_OK;
    *failed |= sp_event_create(b->rig.device, &to, NULL) != SP_OK;
    for (int i = 0; i < b->replays && !*failed; i++) {
        *failed |= sp_stream_zero(stream, b->flush, FLUSH_BYTES, NULL) != SP_OK;
        *failed |= sp_event_record(from, stream, NULL) != SP_OK;
        *failed |= sp_graph_launch(graph, stream, NULL) != SP_OK;
        *failed |= sp_event_record(to, stream, NULL) != SP_OK;
        *failed |= sp_event_wait(to, NULL) != SP_OK;
        *failed |= sp_event_seconds(from, to, &seconds[i], NULL) != SP_OK;
    }
    sp_event_destroy(from);
    sp_event_destroy(to);
    sp_graph_destroy(graph);
    qsort(seconds, (size_t)b->replays, sizeof seconds[0], ascending);
    return *failed ? (double)NAN : seconds[b->replays / 2] * 1e6 / calls;
}

static void print_cell(bench *b, const cell *c, bool first)
{
    int calls = c->n_rows > 64 ? 2 : c->sequences >= 64 ? 4 : CALLS_MAX / c->sequences;
    const rule_size size = {.shape = {16, c->v_heads, 128, 128, 4, 0},
                            .sequences = 1,
                            .positions = c->position + c->n_rows,
                            .slots = c->sequences * calls,
                            .snapshots = 1,
                            .rows_max = c->sequences * c->n_rows,
                            .spans_max = c->sequences,
                            .zeroed = true};
    rule_world w = rule_make(&b->rig, &size);
    rule_span spans[64];
    double us, bytes = 2.0 * c->sequences * c->v_heads * 128 * 128 * 4;

    for (int32_t i = 0; i < c->sequences; i++)
        spans[i] = (rule_span){.other = -1,
                               .span = {.n_rows = c->n_rows,
                                        .position = c->position,
                                        .slot = i,
                                        .folded = c->position / 32 * 32,
                                        .load = -1,
                                        .save = -1,
                                        .n_final = c->n_final}};
    rule_set(&w, spans, c->sequences, 0);
    us = replay(b, &w, calls);
    printf("%s\n  {\"cell\": \"%s\", \"k_heads\": 16, \"v_heads\": %d, \"sequences\": %d, "
           "\"rows\": %d, \"us\": %.2f, \"bytes\": %.0f, \"gb_per_s\": %.0f}",
           first ? "" : ",", c->name, (int)c->v_heads, (int)c->sequences, (int)c->n_rows, us, bytes,
           bytes / us / 1e3);
    fflush(stdout);
    (void)sp_stream_wait(sp_device_main_stream(b->rig.device), NULL);
    rule_free(&w);
}

int main(int argc, char **argv)
{
    static bench b = {.replays = 20};
    const char *commit = "";
    sp_device *device = NULL;
    sp_error error = {0};
    int only = -1;

    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--cell") == 0)
            only = (int)strtol(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--replays") == 0)
            b.replays = (int)strtol(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--commit") == 0)
            commit = argv[i + 1];
    }
    if (b.replays < 1 || b.replays > REPLAYS_MAX ||
        sp_device_open("cuda", NULL, &device, &error) != SP_OK ||
        moe_start(&b.rig, device, &error) != SP_OK) {
        fprintf(stderr, "%s\n", error.text);
        return 1;
    }
    b.flush = moe_put(&b.rig, NULL, FLUSH_BYTES);
    printf("{\"bench\": \"bench_cuda_gdn\", \"commit\": \"%s\", \"device\": \"%s\", "
           "\"replays\": %d, \"cells\": [",
           commit, sp_device_name(device), b.replays);
    for (size_t i = 0; i < sizeof cells / sizeof cells[0]; i++)
        if (only < 0 || only == (int)i)
            print_cell(&b, &cells[i], only >= 0 || i == 0);
    printf("\n]}\n");
    if (b.rig.failed)
        fprintf(stderr, "a call failed\n");
    moe_free(&b.rig, 0);
    sp_device_close(device);
    return b.rig.failed;
}
