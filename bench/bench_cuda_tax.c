/*
 * bench_cuda_tax.c: what adapters cost a decode step on a GPU, taken apart: the captured step of a
 * Qwen3-8B shape (36 layers, random weights made on the device, all linear modules adapted) as the
 * engine's backend runs it, and the same with parts of the deltas left out or in another order.
 * Prints one JSON object.
 *     bench_cuda_tax [--library] [--prefill] [--replays N] [--only CELL] [--variant NAME]
 * --library lets cuBLASLt run the products that it is faster for, as the engine does. --prefill:
 * steps of prompts instead, one for each adapter, eagerly, all variants; the device's time alone.
 */
#include "base/clock.h"
#include "base/half.h"
#include "base/hash.h"
#include "device/device_cuda.h"
#include "engine/ops/cuda_ops.h"
#include "pool/image.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    LAYERS = 36,
    HIDDEN = 4096,
    INTER = 12288,
    HEADS = 32,
    KV_HEADS = 8,
    HEAD_DIM = 128,
    VOCAB = 151936,
    ROWS_MAX = 64,
    PREFILL_MAX = 8192,
    CONTEXT = 200,   /* keys of each sequence */
    POSITIONS = 256, /* at most, in decode */
    PAGES = POSITIONS / SP_CUDA_PAGE,
    PREFILL_PAGES = PREFILL_MAX / SP_CUDA_PAGE,
    REPLAYS_MAX = 64
};

#define SLAB ((size_t)64 << 20) /* bytes of random weights, repeated */

#define CHECK(call)                                                                        \
    do {                                                                                   \
        sp_status check_status = (call);                                                   \
        if (check_status != SP_OK) {                                                       \
            fprintf(stderr, "%s: %s: %s\n", #call, sp_status_name(check_status),           \
                    bench.device ? sp_device_error_text(bench.device) : bench.error.text); \
            exit(1);                                                                       \
        }                                                                                  \
    } while (0)

enum { RESIDUAL, NORMED, Q, K, V, ATTENDED, GATE, UP, OUTPUT, N_ACTIVATIONS };
static const int32_t widths[N_ACTIVATIONS] = {
    HIDDEN, HIDDEN, HEADS *HEAD_DIM, KV_HEADS *HEAD_DIM, KV_HEADS *HEAD_DIM, HEADS *HEAD_DIM,
    INTER,  INTER,  HIDDEN};

static const struct {
    const char *name;
    int32_t k_in, n_out;
} modules[] = {
    {"self_attn.q_proj", HIDDEN, HEADS *HEAD_DIM},
    {"self_attn.k_proj", HIDDEN, KV_HEADS *HEAD_DIM},
    {"self_attn.v_proj", HIDDEN, KV_HEADS *HEAD_DIM},
    {"self_attn.o_proj", HEADS *HEAD_DIM, HIDDEN},
    {"mlp.gate_proj", HIDDEN, INTER},
    {"mlp.up_proj", HIDDEN, INTER},
    {"mlp.down_proj", INTER, HIDDEN},
};

enum { MODULES = sizeof modules / sizeof modules[0] };

/* How a linear map runs its deltas. */
typedef enum variant {
    BASE,         /* no row has an adapter */
    ENGINE,       /* as the engine does */
    FOLDED,       /* deltas folded into the product, whatever the rows */
    APART,        /* as the engine does where they are not */
    CHAIN,        /* shrink, product and expand on one stream */
    CHAIN_SHRINK, /* of these, no expand */
    SIDE_SHRINK,  /* the shrink on another stream, no expand */
    AFTER,        /* product, shrink, expand */
    N_VARIANTS
} variant;

static const char *const variant_names[N_VARIANTS] = {
    "base", "engine", "folded", "apart", "chain", "chain, no expand", "side, no expand", "after"};

typedef struct cell {
    int32_t rows, adapters, rank;
} cell;

typedef struct layer {
    sp_norm input, post, q_norm, k_norm;
    sp_linear linear[MODULES];
} layer;

static struct {
    sp_device *device;
    sp_stream *stream;
    sp_event *from, *to;
    sp_exec *exec;
    const sp_kernels *kernels;
    char *weights;
    size_t used;
    layer layers[LAYERS];
    sp_weight embed;
    sp_norm final;
    sp_error error;
    int replays;
    bool library, prefill;
    const char *only, *only_variant;
    /* of a cell */
    sp_geometry *geometry;
    sp_layout *layout;
    sp_pool *pool;
    sp_delta *delta, *head_delta;
    sp_plan *plan;
    sp_ops *ops;
    variant variant;
    sp_slot_handle handles[ROWS_MAX];
} bench = {.replays = 15};

/* ---- weights ------------------------------------------------------------------------------- */

static const void *take(size_t bytes)
{
    void *taken = bench.weights + bench.used;

    bench.used += (bytes + 255) / 256 * 256;
    return taken;
}

static sp_weight matrix(int32_t rows, int32_t columns)
{
    size_t bytes = (size_t)rows * (size_t)(columns ? columns : 1) * sizeof(uint16_t);

    return (sp_weight){SP_DTYPE_BF16, rows, columns, NULL, take(bytes)};
}

static sp_norm norm_of(int32_t width)
{
    return (sp_norm){matrix(width, 0), 1e-6f, 0.0f};
}

static void name_weights(void)
{
    bench.used = 0;
    bench.embed = matrix(VOCAB, HIDDEN);
    bench.final = norm_of(HIDDEN);
    for (int32_t i = 0; i < LAYERS; i++) {
        layer *l = &bench.layers[i];

        l->input = norm_of(HIDDEN);
        l->post = norm_of(HIDDEN);
        l->q_norm = norm_of(HEAD_DIM);
        l->k_norm = norm_of(HEAD_DIM);
        for (int32_t m = 0; m < MODULES; m++)
            l->linear[m] = (sp_linear){.weight = matrix(modules[m].n_out, modules[m].k_in),
                                       .site = i * MODULES + m};
    }
}

/* Numbers near 0.01 of both signs. */
static void fill_random(uint16_t *data, size_t n)
{
    uint32_t state = 1;

    for (size_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        data[i] = (uint16_t)(0x3c00 | (state >> 16 & 0x80ff));
    }
}

static void make_weights(void)
{
    void *slab = NULL, *memory = NULL;
    size_t bytes;

    name_weights();
    bytes = bench.used;
    CHECK(sp_device_alloc(bench.device, bytes, &memory, &bench.error));
    bench.weights = memory;
    name_weights();
    CHECK(sp_device_alloc_pinned(bench.device, SLAB, &slab, &bench.error));
    fill_random(slab, SLAB / sizeof(uint16_t));
    for (size_t at = 0; at < bytes; at += SLAB)
        CHECK(sp_stream_copy(bench.stream, bench.weights + at, at ? memory : slab,
                             bytes - at < SLAB ? bytes - at : SLAB, NULL));
    CHECK(sp_stream_wait(bench.stream, NULL));
    sp_device_free_pinned(bench.device, slab);
}

/* ---- adapters ------------------------------------------------------------------------------ */

static void make_geometry(void)
{
    static sp_site sites[LAYERS * MODULES];
    static char paths[LAYERS * MODULES][64];

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
}

static void load_adapters(int32_t n, int32_t rank)
{
    size_t n_sites = (size_t)sp_layout_n_sites(bench.layout);
    size_t bytes = sp_layout_slot_bytes(bench.layout);
    sp_image image = {.fingerprint = sp_layout_fingerprint(bench.layout),
                      .bytes = sizeof image + n_sites * 8 + bytes};

    CHECK(sp_device_alloc_pinned(bench.device, bytes, &image.data, &bench.error));
    fill_random(image.data, bytes / sizeof(uint16_t));
    image.ranks = calloc(n_sites, sizeof(int32_t));
    image.scales = calloc(n_sites, sizeof(float));
    if (!image.ranks || !image.scales)
        exit(1);
    for (size_t i = 0; i < n_sites; i++) {
        image.ranks[i] = rank;
        image.scales[i] = 0.5f;
    }
    for (int32_t i = 0; i < n; i++)
        CHECK(sp_pool_load(bench.pool, &image, &bench.handles[i], &bench.error));
    CHECK(sp_stream_wait(bench.stream, NULL));
    free(image.ranks);
    free(image.scales);
    sp_device_free_pinned(bench.device, image.data);
}

static int32_t rows_max(void)
{
    return bench.prefill ? PREFILL_MAX : ROWS_MAX;
}

static void make_pool(const cell *c)
{
    sp_layout_options layout;
    sp_pool_options pool;
    sp_delta_options delta;

    sp_layout_options_default(&layout, sizeof layout);
    layout.geometry = bench.geometry;
    layout.rank = c->rank;
    CHECK(sp_layout_create(&layout, &bench.layout, &bench.error));
    sp_pool_options_default(&pool, sizeof pool);
    pool.layout = bench.layout;
    pool.device = bench.device;
    pool.slots = c->adapters;
    CHECK(sp_pool_create(&pool, &bench.pool, &bench.error));
    load_adapters(c->adapters, c->rank);
    sp_delta_options_default(&delta, sizeof delta);
    delta.pool = bench.pool;
    delta.rows_max = rows_max();
    CHECK(sp_delta_create(&delta, &bench.delta, &bench.error));
    delta.rows_max = SP_LOGIT_ROWS_MAX;
    CHECK(sp_delta_create(&delta, &bench.head_delta, &bench.error));
    CHECK(sp_plan_create(rows_max(), c->adapters, &bench.plan, &bench.error));
}

/* ---- the pass ------------------------------------------------------------------------------ */

static void run_layer(sp_ops *ops, int32_t i)
{
    const layer *l = &bench.layers[i];
    const sp_linear *w = l->linear;
    const sp_projection qkv[] = {{&w[0], Q}, {&w[1], K}, {&w[2], V}}, o[] = {{&w[3], OUTPUT}};
    const sp_projection gate_up[] = {{&w[4], GATE}, {&w[5], UP}}, down[] = {{&w[6], OUTPUT}};
    const sp_rope_call rope = {
        .q = Q, .k = K, .v = V, .q_norm = &l->q_norm, .k_norm = &l->k_norm, .layer = i};

    sp_op_linear(ops, NORMED, qkv, 3);
    sp_op_rope_and_cache(ops, &rope);
    sp_op_attention(ops, Q, i, ATTENDED);
    sp_op_linear(ops, ATTENDED, o, 1);
    sp_op_add_norm(ops, RESIDUAL, OUTPUT, &l->post, NORMED);
    sp_op_linear(ops, NORMED, gate_up, 2);
    sp_op_silu_mul(ops, GATE, UP);
    sp_op_linear(ops, GATE, down, 1);
    sp_op_add_norm(ops, RESIDUAL, OUTPUT, i + 1 < LAYERS ? &l[1].input : &bench.final, NORMED);
}

static void pass(void *user, sp_ops *ops)
{
    (void)user;
    sp_op_embed(ops, &bench.embed, RESIDUAL);
    sp_op_norm(ops, RESIDUAL, &bench.layers[0].input, NORMED);
    for (int32_t i = 0; i < LAYERS; i++)
        run_layer(ops, i);
}

/* ---- variants of a linear map -------------------------------------------------------------- */

static sp_status run_base(sp_ops *ops, sp_rows x, const sp_projection *projections, int32_t n)
{
    sp_cuda_ops *cuda = (sp_cuda_ops *)ops;
    bool adapted = cuda->adapted;
    sp_status status;

    cuda->adapted = false;
    status = sp_cuda_op_linear(ops, x, projections, n);
    cuda->adapted = adapted;
    return status;
}

static sp_status run_shrink(sp_cuda_ops *cuda, sp_delta_call *call)
{
    sp_status status;

    if (bench.variant != SIDE_SHRINK)
        return sp_delta_shrink(cuda->delta, call, NULL);
    status = sp_event_record(cuda->fork, cuda->stream, NULL);
    if (status == SP_OK)
        status = sp_stream_wait_event(cuda->side, cuda->fork, NULL);
    call->stream = cuda->side;
    if (status == SP_OK)
        status = sp_delta_shrink(cuda->delta, call, NULL);
    call->stream = cuda->stream;
    return status;
}

static sp_status run_expand(sp_cuda_ops *cuda, sp_delta_call *call)
{
    sp_status status = SP_OK;

    if (bench.variant == SIDE_SHRINK) {
        status = sp_event_record(cuda->join, cuda->side, NULL);
        if (status == SP_OK)
            status = sp_stream_wait_event(cuda->stream, cuda->join, NULL);
    }
    if (status != SP_OK || bench.variant == SIDE_SHRINK || bench.variant == CHAIN_SHRINK)
        return status;
    return sp_delta_expand(cuda->delta, call, NULL);
}

static sp_status linear(sp_ops *ops, sp_rows x, const sp_projection *projections, int32_t n)
{
    sp_cuda_ops *cuda = (sp_cuda_ops *)ops;
    sp_delta_output outputs[SP_LINEAR_MAX];
    sp_delta_call call = {.struct_bytes = sizeof call,
                          .plan = cuda->plan,
                          .x = cuda->rows[x],
                          .x_stride = cuda->widths[x],
                          .x_type = SP_DTYPE_BF16,
                          .outputs = outputs,
                          .n_outputs = n,
                          .stream = cuda->stream};
    bool after = bench.variant == AFTER;
    sp_status status = SP_OK;

    if (bench.variant != ENGINE)
        cuda->folds = bench.variant == FOLDED;
    if (bench.variant <= APART)
        return sp_cuda_op_linear(ops, x, projections, n);
    for (int32_t i = 0; i < n; i++)
        outputs[i] = (sp_delta_output){sizeof outputs[i], projections[i].linear->site,
                                       cuda->rows[projections[i].y], cuda->widths[projections[i].y],
                                       SP_DTYPE_BF16};
    if (!after)
        status = run_shrink(cuda, &call);
    if (status == SP_OK)
        status = run_base(ops, x, projections, n);
    if (status == SP_OK && after)
        status = run_shrink(cuda, &call);
    return status == SP_OK ? run_expand(cuda, &call) : status;
}

/* ---- a step -------------------------------------------------------------------------------- */

static void make_ops(const cell *c)
{
    static sp_op_table table;
    const sp_ops_options options = {
        .device = bench.device,
        .kernels = bench.kernels,
        .exec = bench.exec,
        .delta = bench.delta,
        .head_delta = bench.head_delta,
        .slots = c->adapters,
        .type = SP_DTYPE_BF16,
        .rows_max = rows_max(),
        .spans_max = ROWS_MAX,
        .hidden = HIDDEN,
        .vocab = VOCAB,
        .widths = widths,
        .n_widths = N_ACTIVATIONS,
        .attention = {LAYERS, HEADS, KV_HEADS, HEAD_DIM, 0.088f},
        .rope = {.theta = 1e6,
                 .n_rot = HEAD_DIM / 2,
                 .positions = bench.prefill ? PREFILL_MAX : POSITIONS},
        .kv_pages = bench.prefill ? PREFILL_PAGES : ROWS_MAX * PAGES,
        .page_tokens = SP_CUDA_PAGE,
    };

    CHECK(sp_ops_create(&sp_cuda_op_table, &options, &bench.ops, &bench.error));
    if (bench.library)
        CHECK(sp_op_prepare(bench.ops, pass, NULL, &bench.embed));
    table = sp_cuda_op_table;
    table.linear = linear;
    bench.ops->table = &table;
}

/* Of an adapter, or of the base. */
static sp_route_span route_of(int32_t adapter, int32_t rows, bool adapted)
{
    const sp_slot_handle base = {SP_SLOT_BASE, 0};

    return (sp_route_span){sizeof(sp_route_span), adapted ? bench.handles[adapter] : base, rows,
                           1.0f};
}

/* Rows round-robin over the adapters. */
static sp_step make_step(const cell *c, bool adapted)
{
    static int32_t tokens[ROWS_MAX], pages[ROWS_MAX][PAGES];
    static sp_step_span spans[ROWS_MAX];
    sp_route_span routes[ROWS_MAX];

    for (int32_t i = 0; i < c->rows; i++) {
        tokens[i] = i * 1009 % VOCAB;
        for (int32_t p = 0; p < PAGES; p++)
            pages[i][p] = i * PAGES + p;
        spans[i] = (sp_step_span){
            .tokens = &tokens[i], .pages = pages[i], .position = CONTEXT - 1, .n_rows = 1};
        routes[i] = route_of(i % c->adapters, 1, adapted);
    }
    CHECK(sp_plan_build(bench.plan, bench.pool, routes, c->rows, c->rows, &bench.error));
    return (sp_step){.spans = spans, .n_spans = c->rows, .n_rows = c->rows, .plan = bench.plan};
}

/* A prompt for each adapter, of as many rows; whole pages. */
static sp_step make_prefill(const cell *c, bool adapted)
{
    static int32_t tokens[PREFILL_MAX], pages[PREFILL_PAGES];
    static sp_step_span spans[ROWS_MAX];
    int32_t n = c->adapters, rows = c->rows / n;
    sp_route_span routes[ROWS_MAX];

    for (int32_t i = 0; i < c->rows; i++)
        tokens[i] = i * 1009 % VOCAB;
    for (int32_t p = 0; p < PREFILL_PAGES; p++)
        pages[p] = p;
    for (int32_t i = 0; i < n; i++) {
        spans[i] = (sp_step_span){
            .tokens = tokens + i * rows, .pages = pages + i * rows / SP_CUDA_PAGE, .n_rows = rows};
        routes[i] = route_of(i, rows, adapted);
    }
    CHECK(sp_plan_build(bench.plan, bench.pool, routes, n, c->rows, &bench.error));
    return (sp_step){.spans = spans, .n_spans = n, .n_rows = c->rows, .plan = bench.plan};
}

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

static void forget_graphs(sp_cuda_ops *cuda)
{
    for (int32_t i = 0; i < cuda->n_graphs; i++)
        sp_graph_destroy(cuda->graphs[i].graph);
    cuda->n_graphs = 0;
}

/* Of the residual stream after the step: all variants but the base's have the same. */
static uint64_t hash_residual(const cell *c, float *out_first)
{
    static uint16_t rows[PREFILL_MAX * HIDDEN];
    size_t bytes = (size_t)c->rows * HIDDEN * sizeof *rows;

    CHECK(sp_device_read(bench.device, rows, ((sp_cuda_ops *)bench.ops)->rows[RESIDUAL], bytes,
                         NULL));
    *out_first = sp_bf16_to_f32(rows[0]);
    return sp_xxh3(rows, bytes);
}

/* Seconds of the device for one replay, and of the host for a whole call and its wait. */
static void time_step(const cell *c, variant v, double *out_device, double *out_host)
{
    sp_cuda_ops *cuda = (sp_cuda_ops *)bench.ops;
    sp_step step = make_step(c, v != BASE);
    double device[REPLAYS_MAX], host[REPLAYS_MAX];
    bool faults[ROWS_MAX];

    bench.variant = v;
    forget_graphs(cuda);
    for (int i = 0; i < 3; i++)
        CHECK(sp_op_step(bench.ops, &step, pass, NULL));
    CHECK(sp_op_faults(bench.ops, faults, c->rows));
    for (int i = 0; i < bench.replays; i++) {
        CHECK(sp_event_record(bench.from, bench.stream, NULL));
        CHECK(sp_graph_launch(cuda->graphs[0].graph, bench.stream, NULL));
        CHECK(sp_event_record(bench.to, bench.stream, NULL));
        CHECK(sp_event_wait(bench.to, NULL));
        CHECK(sp_event_seconds(bench.from, bench.to, &device[i], NULL));
    }
    for (int i = 0; i < bench.replays; i++) {
        double began = sp_clock_seconds();

        CHECK(sp_op_step(bench.ops, &step, pass, NULL));
        CHECK(sp_op_faults(bench.ops, faults, c->rows));
        host[i] = sp_clock_seconds() - began;
    }
    *out_device = median(device, bench.replays);
    *out_host = median(host, bench.replays);
}

/* Seconds of the device for one prefill. */
static double time_prefill(const cell *c, variant v)
{
    sp_step step = make_prefill(c, v != BASE);
    bool faults[ROWS_MAX];
    double device;

    bench.variant = v;
    CHECK(sp_event_record(bench.from, bench.stream, NULL));
    CHECK(sp_op_step(bench.ops, &step, pass, NULL));
    CHECK(sp_event_record(bench.to, bench.stream, NULL));
    CHECK(sp_op_faults(bench.ops, faults, c->adapters));
    CHECK(sp_event_seconds(bench.from, bench.to, &device, NULL));
    return device;
}

/* Of the host, for the logits of a step's rows and their best tokens. */
static double time_tokens(const cell *c)
{
    const sp_sample_params greedy = sp_sample_params_default();
    const sp_penalties penalties = {.repetition = 1.0};
    const sp_ends ends = {.n = 0};
    int32_t rows[ROWS_MAX], token = 0;
    sp_choice choices[ROWS_MAX];
    double seconds[REPLAYS_MAX];

    for (int t = 0; t < bench.replays; t++) {
        double began = sp_clock_seconds();

        for (int32_t i = 0; i < c->rows; i++) {
            rows[i] = i;
            choices[i] = (sp_choice){.sampling = &greedy,
                                     .penalties = &penalties,
                                     .ends = &ends,
                                     .tokens = &token,
                                     .n_tokens = 1,
                                     .given = -1,
                                     .n_top = -1};
        }
        CHECK(sp_op_logits(bench.ops, NORMED, &bench.embed, rows, c->rows));
        sp_op_choose(bench.ops, choices, c->rows);
        seconds[t] = sp_clock_seconds() - began;
    }
    return median(seconds, bench.replays);
}

/* Bytes of the adapters' pairs over those that a step of the base reads. */
static double byte_ratio(const cell *c)
{
    double base = 0.0;

    for (int32_t m = 0; m < MODULES; m++)
        base += 2.0 * LAYERS * modules[m].k_in * modules[m].n_out;
    base += 2.0 * VOCAB * HIDDEN;
    return 1.0 + c->adapters * (double)sp_layout_slot_bytes(bench.layout) / base;
}

static void close_cell(void)
{
    fflush(stdout);
    sp_ops_destroy(bench.ops);
    sp_plan_destroy(bench.plan);
    sp_delta_destroy(bench.head_delta);
    sp_delta_destroy(bench.delta);
    sp_pool_destroy(bench.pool);
    sp_layout_release(bench.layout);
}

static bool is_left_out(variant v)
{
    return v != BASE && bench.only_variant && strcmp(bench.only_variant, variant_names[v]) != 0;
}

static void run_cell(const cell *c)
{
    double base = 0.0, device, host;
    uint64_t hash;
    float first;

    make_pool(c);
    make_ops(c);
    for (int v = 0; v < N_VARIANTS; v++) {
        if (is_left_out((variant)v) || v == FOLDED || v == APART)
            continue;
        time_step(c, (variant)v, &device, &host);
        base = v == BASE ? device : base;
        hash = hash_residual(c, &first);
        printf("  {\"rows\": %d, \"adapters\": %d, \"rank\": %d, \"library\": %s, \"variant\": "
               "\"%s\", \"device_us\": %.1f, \"host_us\": %.1f, \"over_base\": %.3f, \"hash\": "
               "\"%016llx\", \"first\": %g},\n",
               (int)c->rows, (int)c->adapters, (int)c->rank, bench.library ? "true" : "false",
               variant_names[v], device * 1e6, host * 1e6, device / base, (unsigned long long)hash,
               (double)first);
    }
    printf("  {\"rows\": %d, \"adapters\": %d, \"rank\": %d, \"tokens_us\": %.1f, \"byte_ratio\": "
           "%.3f},\n",
           (int)c->rows, (int)c->adapters, (int)c->rank, time_tokens(c) * 1e6, byte_ratio(c));
    close_cell();
}

/* The variants take turns, since the clock falls while they run. */
static void run_prefill(const cell *c)
{
    static const variant variants[] = {BASE, ENGINE, FOLDED, APART, CHAIN_SHRINK};
    enum { N = sizeof variants / sizeof variants[0] };
    double seconds[N][REPLAYS_MAX], medians[N];
    uint64_t hashes[N];
    float first;

    make_pool(c);
    make_ops(c);
    for (int t = -1; t < bench.replays; t++)
        for (int i = 0; i < N; i++) {
            seconds[i][t < 0 ? 0 : t] = time_prefill(c, variants[i]);
            if (t < 0)
                hashes[i] = hash_residual(c, &first);
        }
    for (int i = 0; i < N; i++) {
        medians[i] = median(seconds[i], bench.replays);
        printf("  {\"prefill\": %d, \"adapters\": %d, \"rank\": %d, \"library\": %s, "
               "\"variant\": \"%s\", \"device_us\": %.1f, \"over_base\": %.3f, \"hash\": "
               "\"%016llx\"},\n",
               (int)c->rows, (int)c->adapters, (int)c->rank, bench.library ? "true" : "false",
               variant_names[variants[i]], medians[i] * 1e6, medians[i] / medians[0],
               (unsigned long long)hashes[i]);
    }
    close_cell();
}

static void run_cells(const cell *cells, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        char name[32];

        snprintf(name, sizeof name, "%d/%d", (int)cells[i].rows, (int)cells[i].adapters);
        if (bench.only && !strstr(bench.only, name))
            continue;
        if (bench.prefill)
            run_prefill(&cells[i]);
        else
            run_cell(&cells[i]);
    }
}

/* ---- main ---------------------------------------------------------------------------------- */

static void open_bench(void)
{
    sp_exec_options exec;

    sp_exec_options_default(&exec, sizeof exec);
    CHECK(sp_exec_create(&exec, &bench.exec, &bench.error));
    CHECK(sp_kernels_get(NULL, &bench.kernels, &bench.error));
    CHECK(sp_device_open("cuda", NULL, &bench.device, &bench.error));
    bench.stream = sp_device_main_stream(bench.device);
    CHECK(sp_event_create(bench.device, &bench.from, NULL));
    CHECK(sp_event_create(bench.device, &bench.to, NULL));
    make_weights();
    make_geometry();
}

int main(int n_args, char **args)
{
    static const cell cells[] = {{1, 1, 16},  {2, 2, 64},  {32, 8, 16}, {32, 32, 16},
                                 {64, 1, 16}, {64, 8, 16}, {64, 64, 16}};
    static const cell prefills[] = {{512, 1, 16},  {2048, 1, 16}, {2048, 4, 16}, {2048, 4, 64},
                                    {4096, 1, 16}, {8192, 1, 16}, {8192, 4, 16}};

    for (int i = 1; i < n_args; i++) {
        if (strcmp(args[i], "--library") == 0)
            bench.library = true;
        else if (strcmp(args[i], "--prefill") == 0)
            bench.prefill = true;
        else if (i + 1 < n_args && strcmp(args[i], "--replays") == 0)
            bench.replays = (int)strtol(args[++i], NULL, 10);
        else if (i + 1 < n_args && strcmp(args[i], "--only") == 0)
            bench.only = args[++i];
        else if (i + 1 < n_args && strcmp(args[i], "--variant") == 0)
            bench.only_variant = args[++i];
    }
    if (bench.replays < 1 || bench.replays > REPLAYS_MAX)
        bench.replays = REPLAYS_MAX;
    open_bench();
    printf("{\"bench\": \"cuda tax\", \"cells\": [\n");
    if (bench.prefill)
        run_cells(prefills, sizeof prefills / sizeof prefills[0]);
    else
        run_cells(cells, sizeof cells / sizeof cells[0]);
    printf("  {}]}\n");
    return 0;
}
