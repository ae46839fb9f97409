/*
 * bench_cuda_moe.c: times of a mixture-of-experts layer on a GPU, shaped as in Qwen3-30B-A3B (128
 * experts, 8 for each token, hidden 2048, intermediate 768), without and with adapters of rank 16
 * on all experts. By graph replay with cold weights: a graph holds several calls, each with memory
 * of its own, and 128 MiB are written before each replay. Prints one JSON object, a line for each
 * number of tokens and adapters; microseconds:
 *
 *     gate_up, down              the experts' GEMMs
 *     delta_gate_up, delta_down  the adapters' deltas of the same
 *     route, group, sum          choice of experts, grouping for the GEMMs, weighted sum
 *     group_delta                grouping for the deltas
 *     apart_gate_up, apart_down  the deltas by themselves, their scales cleared before
 *     layer, layer_adapted       all of the base from route to sum, and that with the deltas
 *     layer_apart                the same with the deltas on a second stream, beside the GEMMs
 *
 *     bench_cuda_moe [--tokens 16] [--replays 20] [--item-rows 16]
 *                    [--gemm-rows 64] [--commit NAME]
 *
 * --item-rows, --gemm-rows: rows of an item of the deltas and of the GEMMs, whatever the launchers
 * would choose.
 */
#include "cuda/moe_rig.h"

#include <math.h>
#include <stdio.h>

enum { EXPERTS = 128, TOP_K = 8, HIDDEN = 2048, INNER = 768, RANK = 16, CALLS = 4, SLOTS_MAX = 8 };

#define FLUSH_BYTES  ((size_t)128 << 20)
#define RANDOM_BYTES ((size_t)32 << 20)
#define REPLAYS_MAX  200
#define UNIT         256

static const int32_t token_counts[] = {1, 16, 64, 512, 2048};
static const int32_t adapter_counts[] = {1, 4, 8};

/* One call's memory, for the most tokens. */
typedef struct call {
    float *logits;
    void *x, *gate, *up, *down, *y;
    int32_t *slot;
    sp_cuda_route route;
    sp_cuda_group_rows group, group_delta;
    sp_cuda_expert_gemm gate_up_gemm, down_gemm;
    sp_cuda_expert_delta gate_up_delta, down_delta, gate_up_apart, down_apart;
    sp_cuda_clear gate_up_clear, down_clear;
    sp_cuda_silu silu, silu_apart;
    sp_cuda_expert_sum sum, sum_apart;
    void *delta[3]; /* by themselves */
    float *scale[3];
    const void *w[3];               /* [experts, n, k] */
    const void *table[3];           /* [experts] of them */
    const void *cells[3], *factors; /* of the deltas */
} call;

typedef struct bench {
    moe_rig rig;
    sp_stream *side;
    sp_event *fork, *join;
    call calls[CALLS];
    void *flush;
    int replays;
    int32_t item_rows, gemm_rows; /* 0: as chosen */
} bench;

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* ---- memory -------------------------------------------------------------------------------- */

/* Small bf16 numbers, from one block again and again. */
static void *put_random(bench *b, const void *block, size_t bytes)
{
    char *at = moe_put(&b->rig, NULL, bytes);

    for (size_t done = 0; done < bytes && !b->rig.failed; done += RANDOM_BYTES)
        moe_write(&b->rig, at + done, block,
                  bytes - done < RANDOM_BYTES ? bytes - done : RANDOM_BYTES);
    return at;
}

static const int32_t map_n[3] = {INNER, INNER, HIDDEN}, map_k[3] = {HIDDEN, HIDDEN, INNER};

static void make_weights(bench *b, call *c, const void *block)
{
    for (int i = 0; i < 3; i++) {
        size_t bytes = (size_t)map_n[i] * (size_t)map_k[i] * 2;
        const void *table[EXPERTS];

        c->w[i] = put_random(b, block, EXPERTS * bytes);
        for (size_t e = 0; e < EXPERTS; e++)
            table[e] = (const char *)c->w[i] + e * bytes;
        c->table[i] = moe_put(&b->rig, table, sizeof table);
    }
}

/* A of 16 ranks, then B, of each map of each expert; the same offsets in every slot. */
static void make_factors(bench *b, call *c, const void *block)
{
    static sp_cuda_expert_cell cells[3][EXPERTS];
    const void *factors[SLOTS_MAX], *table[SLOTS_MAX];
    uint32_t at = 0;

    for (int i = 0; i < 3; i++)
        for (int e = 0; e < EXPERTS; e++) {
            cells[i][e] =
                (sp_cuda_expert_cell){at, at + (uint32_t)(RANK * map_k[i] * 2 / UNIT), RANK, 0.5f};
            at += (uint32_t)(RANK * (map_k[i] + map_n[i]) * 2 / UNIT);
        }
    for (int s = 0; s < SLOTS_MAX; s++)
        factors[s] = put_random(b, block, (size_t)at * UNIT);
    c->factors = moe_put(&b->rig, factors, sizeof factors);
    for (int i = 0; i < 3; i++) {
        for (int s = 0; s < SLOTS_MAX; s++)
            table[s] = moe_put(&b->rig, cells[i], sizeof cells[i]);
        c->cells[i] = moe_put(&b->rig, table, sizeof table);
    }
}

static void make_call(bench *b, call *c, const void *block, int32_t most)
{
    size_t rows = (size_t)most, pairs = rows * TOP_K;

    *c = (call){.logits = moe_put(&b->rig, NULL, rows * EXPERTS * 4),
                .x = put_random(b, block, rows * HIDDEN * 2),
                .gate = put_random(b, block, pairs * INNER * 2),
                .up = put_random(b, block, pairs * INNER * 2),
                .down = put_random(b, block, pairs * HIDDEN * 2),
                .y = put_random(b, block, rows * HIDDEN * 2),
                .slot = moe_put(&b->rig, NULL, rows * 4)};
    for (int i = 0; i < 3; i++) {
        c->delta[i] = moe_put(&b->rig, NULL, pairs * (size_t)map_n[i] * 2);
        c->scale[i] = moe_put(&b->rig, NULL, pairs * sizeof(float));
    }
    make_weights(b, c, block);
    make_factors(b, c, block);
}

/* ---- one cell ------------------------------------------------------------------------------ */

static sp_cuda_expert_site site_of(const call *c, int map, void *y)
{
    return (sp_cuda_expert_site){.cells = c->cells[map],
                                 .factors = c->factors,
                                 .y = y,
                                 .y_stride = map_n[map],
                                 .n_out = map_n[map]};
}

static void set_deltas(bench *b, call *c)
{
    sp_cuda_expert_delta delta = {.type = SP_DTYPE_BF16,
                                  .rank_max = RANK,
                                  .multiprocessors = sp_device_cuda_multiprocessors(b->rig.device),
                                  .items = c->group_delta.items};

    c->gate_up_delta = c->down_delta = delta;
    c->gate_up_delta.k_in = HIDDEN;
    c->gate_up_delta.n_sites = 2;
    c->gate_up_delta.x_by_token = 1;
    c->gate_up_delta.x = c->x;
    c->gate_up_delta.x_stride = HIDDEN;
    c->gate_up_delta.sites[0] = site_of(c, 0, c->gate);
    c->gate_up_delta.sites[1] = site_of(c, 1, c->up);
    c->down_delta.k_in = INNER;
    c->down_delta.n_sites = 1;
    c->down_delta.x = c->gate;
    c->down_delta.x_stride = INNER;
    c->down_delta.sites[0] = site_of(c, 2, c->down);
}

/* The same by themselves, and what folds them. */
static void set_apart(call *c, int32_t pairs)
{
    c->gate_up_clear = (sp_cuda_clear){2, pairs, {c->scale[0], c->scale[1]}};
    c->down_clear = (sp_cuda_clear){1, pairs, {c->scale[2]}};
    c->gate_up_apart = c->gate_up_delta;
    c->down_apart = c->down_delta;
    for (int i = 0; i < 2; i++) {
        c->gate_up_apart.sites[i].y = c->delta[i];
        c->gate_up_apart.sites[i].scales = c->scale[i];
    }
    c->down_apart.sites[0].y = c->delta[2];
    c->down_apart.sites[0].scales = c->scale[2];
    c->silu_apart = c->silu;
    c->silu_apart.width = INNER;
    c->silu_apart.gate_delta = (sp_cuda_apart){c->delta[0], c->scale[0]};
    c->silu_apart.up_delta = (sp_cuda_apart){c->delta[1], c->scale[1]};
    c->sum_apart = c->sum;
    c->sum_apart.delta = (sp_cuda_apart){c->delta[2], c->scale[2]};
}

static void set_base(call *c)
{
    c->gate_up_gemm = (sp_cuda_expert_gemm){.k = HIDDEN,
                                            .x_by_token = 1,
                                            .x = c->x,
                                            .x_stride = HIDDEN,
                                            .items = c->group.items,
                                            .n_outputs = 2};
    c->gate_up_gemm.outputs[0] = (sp_cuda_expert_output){c->table[0], c->gate, INNER, INNER};
    c->gate_up_gemm.outputs[1] = (sp_cuda_expert_output){c->table[1], c->up, INNER, INNER};
    c->down_gemm = (sp_cuda_expert_gemm){
        .k = INNER, .x = c->gate, .x_stride = INNER, .items = c->group.items, .n_outputs = 1};
    c->down_gemm.outputs[0] = (sp_cuda_expert_output){c->table[2], c->down, HIDDEN, HIDDEN};
}

/* Random logits, and the adapters in turn. Grouping is done once here, eagerly. */
static void set_call(bench *b, call *c, int number, int32_t tokens, int32_t adapters)
{
    size_t n = (size_t)tokens * EXPERTS;
    float *logits = malloc(n * 4), *scale = malloc((size_t)tokens * 4);
    int32_t *slot = malloc((size_t)tokens * 4), pairs = tokens * TOP_K;

    if (logits == NULL || scale == NULL || slot == NULL)
        abort();
    for (size_t i = 0; i < n; i++)
        logits[i] = moe_number((uint32_t)i * 13u + (uint32_t)number * 977u, 3.0f);
    for (int32_t i = 0; i < tokens; i++) {
        slot[i] = i % adapters;
        scale[i] = 1.0f;
    }
    moe_write(&b->rig, c->logits, logits, n * 4);
    moe_write(&b->rig, c->slot, slot, (size_t)tokens * 4);
    c->route = (sp_cuda_route){.rows = tokens,
                               .experts = EXPERTS,
                               .top_k = TOP_K,
                               .normalised = 1,
                               .logits = c->logits,
                               .stride = EXPERTS,
                               .expert = moe_put(&b->rig, NULL, (size_t)pairs * 4),
                               .weight = moe_put(&b->rig, NULL, (size_t)pairs * 4)};
    c->group = (sp_cuda_group_rows){
        .n_tokens = tokens,
        .top_k = TOP_K,
        .n_experts = EXPERTS,
        .n_slots = 1,
        .expert = c->route.expert,
        .all_rows = pairs,
        .n_rows = pairs,
        .items = moe_items(&b->rig, pairs, EXPERTS, 1,
                           b->gemm_rows > 0 ? b->gemm_rows : sp_cuda_expert_rows(pairs, EXPERTS))};
    c->group.items.scale = NULL;
    c->group_delta = c->group;
    c->group_delta.n_slots = SLOTS_MAX;
    c->group_delta.token_slot = c->slot;
    c->group_delta.items = moe_items(&b->rig, pairs, EXPERTS, SLOTS_MAX,
                                     b->item_rows > 0 ? b->item_rows : sp_cuda_item_rows(pairs));
    c->group_delta.token_scale = moe_put(&b->rig, scale, (size_t)tokens * 4);
    free(logits), free(slot), free(scale);
    set_base(c);
    set_deltas(b, c);
    c->silu = (sp_cuda_silu){.n = (int64_t)pairs * INNER, .gate = c->gate, .up = c->up};
    c->sum = (sp_cuda_expert_sum){.rows = tokens,
                                  .top_k = TOP_K,
                                  .width = HIDDEN,
                                  .expert = c->route.expert,
                                  .weight = c->route.weight,
                                  .x = c->down,
                                  .y = c->y};
    set_apart(c, pairs);
    b->rig.failed |= b->rig.ops.route_rows(b->rig.gpu, &c->route, b->rig.stream);
    b->rig.failed |= b->rig.kernels.group_experts(b->rig.gpu, &c->group, b->rig.stream);
    b->rig.failed |= b->rig.kernels.group_experts(b->rig.gpu, &c->group_delta, b->rig.stream);
}

/* ---- timing -------------------------------------------------------------------------------- */

typedef void (*enqueue_fn)(bench *b, call *c);

#define ENQUEUE(name, table, launcher, argument)                                         \
    static void name(bench *b, call *c)                                                  \
    {                                                                                    \
        b->rig.failed |= b->rig.table.launcher(b->rig.gpu, &c->argument, b->rig.stream); \
    }

ENQUEUE(route, ops, route_rows, route)
ENQUEUE(group, kernels, group_experts, group)
ENQUEUE(group_delta, kernels, group_experts, group_delta)
ENQUEUE(gate_up, ops, multiply_experts, gate_up_gemm)
ENQUEUE(down, ops, multiply_experts, down_gemm)
ENQUEUE(delta_gate_up, kernels, add_experts, gate_up_delta)
ENQUEUE(delta_down, kernels, add_experts, down_delta)
ENQUEUE(silu, ops, silu_mul, silu)
ENQUEUE(sum, ops, sum_experts, sum)

ENQUEUE(silu_apart, ops, silu_mul, silu_apart)
ENQUEUE(sum_apart, ops, sum_experts, sum_apart)

static void clear_and_add(bench *b, const sp_cuda_clear *clear, const sp_cuda_expert_delta *delta,
                          void *stream)
{
    b->rig.failed |= b->rig.kernels.clear_scales(b->rig.gpu, clear, stream);
    b->rig.failed |= b->rig.kernels.add_experts(b->rig.gpu, delta, stream);
}

static void apart_gate_up(bench *b, call *c)
{
    clear_and_add(b, &c->gate_up_clear, &c->gate_up_apart, b->rig.stream);
}

static void apart_down(bench *b, call *c)
{
    clear_and_add(b, &c->down_clear, &c->down_apart, b->rig.stream);
}

static void fork_side(bench *b)
{
    b->rig.failed |= sp_event_record(b->fork, sp_device_main_stream(b->rig.device), NULL) != SP_OK;
    b->rig.failed |= sp_stream_wait_event(b->side, b->fork, NULL) != SP_OK;
}

static void join_side(bench *b)
{
    b->rig.failed |= sp_event_record(b->join, b->side, NULL) != SP_OK;
    b->rig.failed |=
        sp_stream_wait_event(sp_device_main_stream(b->rig.device), b->join, NULL) != SP_OK;
}

static void layer_apart(bench *b, call *c)
{
    void *side = sp_stream_native(b->side);

    route(b, c);
    fork_side(b);
    b->rig.failed |= b->rig.kernels.group_experts(b->rig.gpu, &c->group_delta, side);
    clear_and_add(b, &c->gate_up_clear, &c->gate_up_apart, side);
    group(b, c);
    gate_up(b, c);
    join_side(b);
    silu_apart(b, c);
    fork_side(b);
    clear_and_add(b, &c->down_clear, &c->down_apart, side);
    down(b, c);
    join_side(b);
    sum_apart(b, c);
}

static void layer(bench *b, call *c)
{
    route(b, c);
    group(b, c);
    gate_up(b, c);
    silu(b, c);
    down(b, c);
    sum(b, c);
}

static void layer_adapted(bench *b, call *c)
{
    route(b, c);
    group_delta(b, c);
    group(b, c);
    gate_up(b, c);
    delta_gate_up(b, c);
    silu(b, c);
    down(b, c);
    delta_down(b, c);
    sum(b, c);
}

/* Median microseconds of one of the calls that a replay makes. */
static double replay(bench *b, enqueue_fn enqueue)
{
    sp_stream *stream = sp_device_main_stream(b->rig.device);
    sp_event *from = NULL, *to = NULL;
    sp_graph *graph = NULL;
    double seconds[REPLAYS_MAX] = {0};
    int *failed = &b->rig.failed;

    enqueue(b, &b->calls[0]); /* the code is loaded */
    *failed |= sp_graph_begin(stream, NULL) != SP_OK;
    for (int i = 0; i < CALLS; i++)
        enqueue(b, &b->calls[i]);
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
    return *failed ? (double)NAN : seconds[b->replays / 2] * 1e6 / CALLS;
}

static void print_cell(bench *b, int32_t tokens, int32_t adapters, bool first)
{
    static const struct {
        const char *name;
        enqueue_fn enqueue;
    } all[] = {{"gate_up", gate_up},         {"down", down},   {"delta_gate_up", delta_gate_up},
               {"delta_down", delta_down},   {"route", route}, {"group", group},
               {"group_delta", group_delta}, {"sum", sum},     {"apart_gate_up", apart_gate_up},
               {"apart_down", apart_down},   {"layer", layer}, {"layer_adapted", layer_adapted},
               {"layer_apart", layer_apart}};
    int keep = b->rig.n_blocks;

    for (int i = 0; i < CALLS; i++)
        set_call(b, &b->calls[i], i, tokens, adapters);
    printf("%s\n  {\"tokens\": %d, \"adapters\": %d", first ? "" : ",", (int)tokens, (int)adapters);
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        printf(", \"%s\": %.1f", all[i].name, replay(b, all[i].enqueue));
    printf("}");
    fflush(stdout);
    (void)sp_stream_wait(sp_device_main_stream(b->rig.device), NULL);
    moe_free(&b->rig, keep);
}

static void run(bench *b, int32_t only, const char *commit)
{
    uint16_t *block = moe_numbers(SP_DTYPE_BF16, RANDOM_BYTES / 2, 1u, 0.05f);
    bool first = true;

    b->rig.failed |= sp_stream_create(b->rig.device, &b->side, NULL) != SP_OK;
    b->rig.failed |= sp_event_create(b->rig.device, &b->fork, NULL) != SP_OK;
    b->rig.failed |= sp_event_create(b->rig.device, &b->join, NULL) != SP_OK;
    b->flush = moe_put(&b->rig, NULL, FLUSH_BYTES);
    for (int i = 0; i < CALLS; i++)
        make_call(b, &b->calls[i], block, 2048);
    free(block);
    printf("{\"bench\": \"bench_cuda_moe\", \"commit\": \"%s\", \"device\": \"%s\", "
           "\"replays\": %d, \"unit\": \"us\", \"cells\": [",
           commit, sp_device_name(b->rig.device), b->replays);
    for (size_t t = 0; t < sizeof token_counts / sizeof token_counts[0]; t++)
        for (size_t a = 0; a < sizeof adapter_counts / sizeof adapter_counts[0]; a++)
            if (only == 0 || only == token_counts[t]) {
                print_cell(b, token_counts[t], adapter_counts[a], first);
                first = false;
            }
    printf("\n]}\n");
}

int main(int argc, char **argv)
{
    static bench b = {.replays = 20};
    const char *commit = "";
    sp_device *device = NULL;
    sp_error error = {0};
    int32_t only = 0;

    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--tokens") == 0)
            only = (int32_t)strtol(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--replays") == 0)
            b.replays = (int)strtol(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--item-rows") == 0)
            b.item_rows = (int32_t)strtol(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--gemm-rows") == 0)
            b.gemm_rows = (int32_t)strtol(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--commit") == 0)
            commit = argv[i + 1];
    }
    if (b.replays < 1 || b.replays > REPLAYS_MAX ||
        sp_device_open("cuda", NULL, &device, &error) != SP_OK ||
        moe_start(&b.rig, device, &error) != SP_OK) {
        fprintf(stderr, "%s\n", error.text);
        return 1;
    }
    run(&b, only, commit);
    sp_event_destroy(b.fork);
    sp_event_destroy(b.join);
    sp_stream_destroy(b.side);
    if (b.rig.failed)
        fprintf(stderr, "a call failed\n");
    moe_free(&b.rig, 0);
    sp_device_close(device);
    return b.rig.failed;
}
