/*
 * test_cuda_moe.c: the base's part of a mixture-of-experts layer: the choice of experts, the
 * grouping of rows, the experts' GEMMs and the sums. Held against plain host code, in double where
 * there is arithmetic; sums of small integers have one right value. A row's bytes are the same
 * whatever rows share its expert, whatever the items' size, and those of the base's GEMM. Skipped
 * where there is no GPU.
 */
#include "cuda/gpu_main.h"
#include "cuda/moe_rig.h"

#include <sidepath/moe_rows.h>

#include <math.h>
#include <stdbool.h>

#define POISON 0xa5

enum { INVALID_VALUE = 1 }; /* of cudaError_t */

static sp_device *gpu;
static moe_rig rig;
static void *gemm_state;

static void expect_launch(int code)
{
    if (code != 0)
        fail_msg("a launch failed with error %d", code);
    assert_false(rig.failed);
}

/* ---- the choice of experts ----------------------------------------------------------------- */

typedef struct route_case {
    int32_t rows, experts, top_k, normalised;
    float step; /* logits are multiples of it, so some are equal; 0: any */
} route_case;

static float *make_logits(const route_case *c, uint32_t seed)
{
    float *logits = malloc((size_t)c->rows * (size_t)(c->experts + 3) * sizeof *logits);

    assert_non_null(logits);
    for (int32_t i = 0; i < c->rows * (c->experts + 3); i++) {
        logits[i] = moe_number(seed + (uint32_t)i * 31u, 6.0f);
        if (c->step > 0.0f)
            logits[i] = roundf(logits[i] / c->step) * c->step;
    }
    return logits;
}

static bool is_above(float a, float b)
{
    return a > b || (isnan(a) && !isnan(b));
}

/* The k-th choice of a row: no expert before it is below, no equal one before it has a higher
 * number. */
static int32_t best_but(const float *logits, const route_case *c, const bool *taken)
{
    int32_t best = -1;

    for (int32_t e = 0; e < c->experts; e++)
        if (!taken[e] && (best < 0 || is_above(logits[e], logits[best])))
            best = e;
    return best;
}

static void check_route_row(const route_case *c, const float *logits, const int32_t *expert,
                            const float *weight, int32_t row)
{
    bool taken[SP_CUDA_EXPERTS_MAX] = {false};
    int32_t want[SP_CUDA_TOP_MAX];
    double total = 0.0;

    for (int32_t k = 0; k < c->top_k; k++) {
        want[k] = best_but(logits, c, taken);
        taken[want[k]] = true;
        if (expert[k] != want[k])
            fail_msg("row %d of %d, %d experts: choice %d is %d, not %d", (int)row, (int)c->rows,
                     (int)c->experts, (int)k, (int)expert[k], (int)want[k]);
    }
    for (int32_t e = 0; e < c->experts; e++)
        if (!c->normalised || taken[e])
            total += exp((double)logits[e] - (double)logits[want[0]]);
    for (int32_t k = 0; k < c->top_k; k++) {
        double exact = exp((double)logits[want[k]] - (double)logits[want[0]]) / total;

        if (!(fabs((double)weight[k] - exact) <= exact * 4e-6))
            fail_msg("row %d, %d experts: weight %d is %.9g, not %.9g", (int)row, (int)c->experts,
                     (int)k, (double)weight[k], exact);
    }
}

/* Every fifth row has no position. */
static void check_route(const route_case *c)
{
    int keep = rig.n_blocks;
    size_t rows = (size_t)c->rows, stride = (size_t)c->experts + 3;
    size_t bytes = rows * (size_t)c->top_k * 4;
    float *logits = make_logits(c, (uint32_t)(c->rows * 131 + c->experts));
    int32_t *position = calloc(rows, 4), *expert, *again;
    float *weight, *weight_again;
    sp_cuda_route call = {.rows = c->rows,
                          .experts = c->experts,
                          .top_k = c->top_k,
                          .normalised = c->normalised,
                          .stride = c->experts + 3};

    assert_non_null(position);
    for (size_t i = 0; i < rows; i++)
        position[i] = i % 5 == 4 ? -1 : (int32_t)i;
    call.logits = moe_put(&rig, logits, rows * stride * 4);
    call.position = moe_put(&rig, position, rows * 4);
    call.expert = moe_put(&rig, NULL, bytes);
    call.weight = moe_put(&rig, NULL, bytes);
    expect_launch(rig.ops.route_rows(rig.gpu, &call, rig.stream));
    expert = moe_get(&rig, call.expert, bytes);
    weight = moe_get(&rig, call.weight, bytes);
    for (int32_t i = 0; i < c->rows; i++) {
        int32_t first = i * c->top_k;

        if (position[i] >= 0)
            check_route_row(c, logits + (size_t)i * stride, expert + first, weight + first, i);
        else
            for (int32_t k = 0; k < c->top_k; k++)
                assert_true(expert[first + k] == -1 && weight[first + k] == 0.0f);
    }
    /* The last row alone has the same bytes. */
    call.rows = 1;
    call.position = NULL;
    call.logits += (rows - 1) * stride;
    expect_launch(rig.ops.route_rows(rig.gpu, &call, rig.stream));
    again = moe_get(&rig, call.expert, (size_t)c->top_k * 4);
    weight_again = moe_get(&rig, call.weight, (size_t)c->top_k * 4);
    if (position[c->rows - 1] >= 0) {
        assert_memory_equal(again, expert + (c->rows - 1) * c->top_k, (size_t)c->top_k * 4);
        assert_memory_equal(weight_again, weight + (c->rows - 1) * c->top_k, (size_t)c->top_k * 4);
    }
    free(logits), free(position), free(expert), free(weight), free(again), free(weight_again);
    moe_free(&rig, keep);
}

static void a_small_choice_is_the_largest_logits(void **unused)
{
    static const route_case cases[] = {
        {1, 8, 2, 1, 0.0f},     {3, 8, 8, 0, 0.5f},      {33, 128, 8, 1, 0.0f},
        {7, 60, 4, 0, 0.0f},    {257, 128, 8, 1, 0.5f},  {64, 256, 8, 1, 1.0f},
        {17, 512, 10, 1, 0.0f}, {11, 1000, 32, 0, 0.0f}, {5, 1, 1, 1, 0.0f},
    };

    (void)unused;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        check_route(&cases[i]);
}

static void a_small_nan_is_chosen_first(void **unused)
{
    float logits[3][8] = {{1, NAN, 3, NAN, 5, 2, 0, 4},
                          {-INFINITY, -INFINITY, -INFINITY, -1, -INFINITY, -2, -INFINITY, -3},
                          {0.0f, -0.0f, 0.0f, -1, -1, -1, -1, -1}};
    static const int32_t want[3][4] = {{1, 3, 4, 7}, {3, 5, 7, 0}, {0, 1, 2, 3}};
    int keep = rig.n_blocks;
    int32_t *expert;
    sp_cuda_route call = {.rows = 3, .experts = 8, .top_k = 4, .normalised = 1, .stride = 8};

    (void)unused;
    call.logits = moe_put(&rig, logits, sizeof logits);
    call.expert = moe_put(&rig, NULL, sizeof want);
    call.weight = moe_put(&rig, NULL, sizeof want);
    expect_launch(rig.ops.route_rows(rig.gpu, &call, rig.stream));
    expert = moe_get(&rig, call.expert, sizeof want);
    assert_memory_equal(expert, want, sizeof want);
    free(expert);
    call.top_k = 9;
    assert_int_equal(rig.ops.route_rows(rig.gpu, &call, rig.stream), INVALID_VALUE);
    moe_free(&rig, keep);
}

/* ---- grouping ------------------------------------------------------------------------------ */

typedef struct group_case {
    int32_t tokens, top_k, experts, slots, item_rows;
    int32_t spread; /* of the experts that are chosen; 1: all rows have expert 0 */
} group_case;

/* Rows on the host: experts and slots, some of them out of range. */
typedef struct group_world {
    group_case of;
    int32_t pairs;
    int32_t *expert, *slot;           /* [pairs], [tokens] */
    float *scale;                     /* [tokens] */
    int32_t *row_pair, *expert_begin; /* the sorted form */
    sp_cuda_group_rows gather, sorted;
} group_world;

static void make_world(group_world *w, const group_case *c, uint32_t seed)
{
    sp_moe_rows rows = {.struct_bytes = sizeof rows,
                        .n_tokens = c->tokens,
                        .top_k = c->top_k,
                        .n_experts = c->experts};
    size_t pairs = (size_t)(c->tokens * c->top_k), tokens = (size_t)c->tokens;
    sp_error error;

    *w = (group_world){.of = *c, .pairs = (int32_t)pairs};
    w->expert = calloc(pairs, 4);
    w->slot = calloc(tokens, 4);
    w->scale = calloc(tokens, 4);
    w->row_pair = calloc(pairs, 4);
    w->expert_begin = calloc((size_t)c->experts + 1, 4);
    for (size_t i = 0; i < pairs; i++) {
        uint32_t h = moe_hash(seed + (uint32_t)i);

        w->expert[i] = h % 41u == 0   ? -1
                       : h % 53u == 0 ? c->experts + 7
                                      : (int32_t)(h >> 8) % c->spread;
    }
    for (size_t i = 0; i < tokens; i++) {
        uint32_t h = moe_hash(seed * 3u + (uint32_t)i);

        w->slot[i] = h % 7u == 0 ? -1 : (int32_t)(h >> 4) % c->slots;
        w->scale[i] = 0.25f * (float)(h % 13u);
    }
    rows.expert = w->expert;
    assert_ok(sp_moe_rows_sort(&rows, w->expert_begin, w->row_pair, &error), &error);
    w->gather = (sp_cuda_group_rows){
        .n_tokens = c->tokens,
        .top_k = c->top_k,
        .n_experts = c->experts,
        .n_slots = c->slots,
        .all_rows = w->pairs,
        .n_rows = w->pairs,
        .expert = moe_put(&rig, w->expert, pairs * 4),
        .token_slot = moe_put(&rig, w->slot, tokens * 4),
        .token_scale = moe_put(&rig, w->scale, tokens * 4),
        .items = moe_items(&rig, w->pairs, c->experts, c->slots, c->item_rows),
    };
    w->sorted = w->gather;
    w->sorted.expert = NULL;
    w->sorted.row_pair = moe_put(&rig, w->row_pair, pairs * 4);
    w->sorted.expert_begin = moe_put(&rig, w->expert_begin, ((size_t)c->experts + 1) * 4);
}

static void free_world(group_world *w)
{
    free(w->expert), free(w->slot), free(w->scale), free(w->row_pair), free(w->expert_begin);
}

/* Token and expert of a row; false: it has no item. */
static bool place_of_row(const group_world *w, bool sorted, int32_t row, int32_t *token,
                         int32_t *expert)
{
    int32_t pair = sorted ? w->row_pair[row] : row;

    if (sorted && row >= w->expert_begin[w->of.experts])
        return false;
    *token = pair / w->of.top_k;
    *expert = w->expert[pair];
    return *expert >= 0 && *expert < w->of.experts && w->slot[*token] >= 0;
}

/* Every row of the window that has a slot and an expert is in one item, ascending. */
static void check_items(const group_world *w, bool sorted, const sp_cuda_group_rows *g)
{
    size_t heads = (size_t)g->items.bound * sizeof(sp_cuda_item), each = (size_t)g->items.item_rows;
    int32_t *counts = moe_get(&rig, g->items.counts, 16);
    sp_cuda_item *item = moe_get(&rig, g->items.item, heads);
    int32_t *row = moe_get(&rig, g->items.row, (size_t)g->items.bound * each * 4);
    int32_t *of = moe_get(&rig, g->items.token, (size_t)g->items.bound * each * 4);
    float *scale = moe_get(&rig, g->items.scale, (size_t)g->items.bound * each * 4);
    bool *seen = calloc((size_t)w->pairs, sizeof *seen);
    int32_t token = 0, expert = 0;

    assert_non_null(seen);
    assert_true(counts[0] >= 0 && counts[0] <= g->items.bound);
    assert_true(counts[1] == 0 && counts[2] == 0);
    for (int32_t i = 0; i < counts[0]; i++) {
        assert_true(item[i].count > 0 && item[i].count <= g->items.item_rows);
        for (int32_t j = 0; j < item[i].count; j++) {
            size_t at = (size_t)i * each + (size_t)j;

            assert_true(row[at] >= g->row_begin && row[at] < g->row_begin + g->n_rows);
            assert_true(place_of_row(w, sorted, row[at], &token, &expert));
            assert_false(seen[row[at]]);
            seen[row[at]] = true;
            assert_true(expert == item[i].expert && w->slot[token] == item[i].slot);
            assert_true(of[at] == token && scale[at] == w->scale[token]);
            assert_true(j == 0 || row[at] > row[at - 1]);
        }
    }
    for (int32_t i = g->row_begin; i < g->row_begin + g->n_rows; i++)
        if (seen[i] != place_of_row(w, sorted, i, &token, &expert))
            fail_msg("%d pairs: row %d %s", (int)w->pairs, (int)i,
                     seen[i] ? "twice" : "is missing");
    free(counts), free(item), free(row), free(of), free(scale), free(seen);
}

static void check_grouping(const group_case *c)
{
    int keep = rig.n_blocks;
    group_world w;

    make_world(&w, c, (uint32_t)(c->tokens * 17 + c->experts));
    for (int form = 0; form < 2; form++) {
        sp_cuda_group_rows g = form ? w.sorted : w.gather;

        expect_launch(rig.kernels.group_experts(rig.gpu, &g, rig.stream));
        check_items(&w, form, &g);
        g.row_begin = w.pairs / 3;
        g.n_rows = w.pairs - w.pairs / 3 - w.pairs / 5;
        expect_launch(rig.kernels.group_experts(rig.gpu, &g, rig.stream));
        check_items(&w, form, &g);
    }
    free_world(&w);
    moe_free(&rig, keep);
}

static void small_rows_are_grouped_by_expert_and_slot(void **unused)
{
    static const group_case cases[] = {
        {1, 1, 1, 1, 8, 1},     {1, 8, 128, 4, 8, 128},   {16, 8, 128, 4, 8, 128},
        {37, 2, 8, 3, 32, 8},   {64, 8, 128, 1, 16, 128}, {61, 5, 7, 600, 8, 7},
        {100, 8, 16, 4, 32, 1},
    };

    (void)unused;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        check_grouping(&cases[i]);
}

static void many_rows_are_grouped_by_expert_and_slot(void **unused)
{
    static const group_case cases[] = {
        {512, 8, 128, 4, 8, 128},  {2048, 8, 128, 8, 32, 128},  {4097, 8, 256, 64, 32, 200},
        {2048, 8, 128, 4, 128, 1}, {8191, 8, 512, 1, 128, 512}, {300, 10, 1024, 4096, 8, 1000},
    };

    (void)unused;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        check_grouping(&cases[i]);
}

/* Prefix sums that are none give no items; a row that is no pair has none. */
static void small_malformed_rows_have_no_items(void **unused)
{
    static const group_case c = {20, 2, 4, 2, 8, 4};
    static const int32_t wrong[][5] = {
        {1, 10, 20, 30, 40}, {0, 10, 5, 30, 40}, {0, 10, 20, 30, 41}, {-3, 0, 0, 0, 10}};
    int keep = rig.n_blocks;
    group_world w;
    int32_t *counts;

    (void)unused;
    make_world(&w, &c, 5u);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        moe_write(&rig, w.sorted.expert_begin, wrong[i], sizeof wrong[i]);
        expect_launch(rig.kernels.group_experts(rig.gpu, &w.sorted, rig.stream));
        counts = moe_get(&rig, w.sorted.items.counts, 16);
        assert_int_equal(counts[0], 0);
        free(counts);
    }
    moe_write(&rig, w.sorted.expert_begin, w.expert_begin, sizeof wrong[0]);
    for (int32_t i = 0; i < w.pairs; i++)
        w.row_pair[i] = i % 2 ? -1 - i : w.pairs + i;
    moe_write(&rig, w.sorted.row_pair, w.row_pair, (size_t)w.pairs * 4);
    expect_launch(rig.kernels.group_experts(rig.gpu, &w.sorted, rig.stream));
    counts = moe_get(&rig, w.sorted.items.counts, 16);
    assert_int_equal(counts[0], 0);
    free(counts);
    w.gather.n_slots = SP_CUDA_SLOTS_MAX + 1;
    assert_int_equal(rig.kernels.group_experts(rig.gpu, &w.gather, rig.stream), INVALID_VALUE);
    free_world(&w);
    moe_free(&rig, keep);
}

/* ---- GEMMs --------------------------------------------------------------------------------- */

typedef struct gemm_case {
    int32_t tokens, top_k, experts, k, n[2];
    int32_t spread;
    int32_t by_token;
    bool whole; /* small integers: every sum is exact */
} gemm_case;

#define GEMM_PAD 8 /* elements after each row of y */

typedef struct gemm_world {
    gemm_case of;
    int32_t pairs, outputs;
    int32_t *expert;
    uint16_t *x, *w[2]; /* w: [experts, n, k] */
    sp_cuda_group_rows rows;
    sp_cuda_expert_gemm gemm;
    const void *device_w[2];
    size_t y_bytes[2];
} gemm_world;

static void make_gemm_output(gemm_world *w, int32_t i)
{
    const gemm_case *c = &w->of;
    size_t matrix = (size_t)c->n[i] * (size_t)c->k;
    const void **table = calloc((size_t)c->experts, sizeof *table);

    assert_non_null(table);
    w->w[i] = moe_numbers(SP_DTYPE_BF16, (size_t)c->experts * matrix, 77u + (uint32_t)i,
                          c->whole ? 0.0f : 0.3f);
    w->device_w[i] = moe_put(&rig, w->w[i], (size_t)c->experts * matrix * 2);
    for (int32_t e = 0; e < c->experts; e++)
        table[e] = (const char *)w->device_w[i] + (size_t)e * matrix * 2;
    w->y_bytes[i] = (size_t)w->pairs * (size_t)(c->n[i] + GEMM_PAD) * 2;
    w->gemm.outputs[i] =
        (sp_cuda_expert_output){.w = moe_put(&rig, table, (size_t)c->experts * sizeof *table),
                                .y = moe_put(&rig, NULL, w->y_bytes[i]),
                                .y_stride = c->n[i] + GEMM_PAD,
                                .n = c->n[i]};
    free(table);
}

static void make_gemm(gemm_world *w, const gemm_case *c)
{
    size_t pairs = (size_t)(c->tokens * c->top_k);
    size_t x_rows = c->by_token ? (size_t)c->tokens : pairs;

    *w = (gemm_world){.of = *c, .pairs = (int32_t)pairs, .outputs = c->n[1] > 0 ? 2 : 1};
    w->expert = calloc(pairs, 4);
    assert_non_null(w->expert);
    for (size_t i = 0; i < pairs; i++) {
        uint32_t h = moe_hash(11u + (uint32_t)i);

        w->expert[i] = h % 29u == 0 ? -1 : (int32_t)(h >> 8) % c->spread;
    }
    w->x = moe_numbers(SP_DTYPE_BF16, x_rows * (size_t)c->k, 3u, c->whole ? 0.0f : 1.0f);
    w->rows = (sp_cuda_group_rows){.n_tokens = c->tokens,
                                   .top_k = c->top_k,
                                   .n_experts = c->experts,
                                   .n_slots = 1,
                                   .all_rows = w->pairs,
                                   .n_rows = w->pairs,
                                   .expert = moe_put(&rig, w->expert, pairs * 4)};
    w->gemm = (sp_cuda_expert_gemm){.k = c->k,
                                    .x_by_token = c->by_token,
                                    .x = moe_put(&rig, w->x, x_rows * (size_t)c->k * 2),
                                    .x_stride = c->k,
                                    .n_outputs = w->outputs};
    for (int32_t i = 0; i < w->outputs; i++)
        make_gemm_output(w, i);
}

static void free_gemm(gemm_world *w)
{
    free(w->expert), free(w->x), free(w->w[0]), free(w->w[1]);
}

/* Outputs over poison, in items of so many rows; to be freed. */
static void run_gemm(gemm_world *w, int32_t item_rows, uint16_t *y[2])
{
    int keep = rig.n_blocks;
    sp_cuda_group_rows rows = w->rows;
    sp_cuda_expert_gemm gemm = w->gemm;

    rows.items = moe_items(&rig, w->pairs, w->of.experts, 1, item_rows);
    rows.items.scale = NULL;
    gemm.items = rows.items;
    for (int32_t i = 0; i < w->outputs; i++) {
        char *poison = malloc(w->y_bytes[i]);

        assert_non_null(poison);
        memset(poison, POISON, w->y_bytes[i]);
        moe_write(&rig, gemm.outputs[i].y, poison, w->y_bytes[i]);
        free(poison);
    }
    expect_launch(rig.kernels.group_experts(rig.gpu, &rows, rig.stream));
    expect_launch(rig.ops.multiply_experts(rig.gpu, &gemm, rig.stream));
    for (int32_t i = 0; i < w->outputs; i++)
        y[i] = moe_get(&rig, gemm.outputs[i].y, w->y_bytes[i]);
    assert_false(rig.failed);
    moe_free(&rig, keep);
}

static double exact_sum(const gemm_world *w, int32_t i, int32_t pair, int32_t n, double *out_size)
{
    size_t k = (size_t)w->of.k;
    const uint16_t *x = w->x + (size_t)(w->of.by_token ? pair / w->of.top_k : pair) * k;
    const uint16_t *v = w->w[i] + ((size_t)w->expert[pair] * (size_t)w->of.n[i] + (size_t)n) * k;
    double sum = 0.0;

    *out_size = 0.0;
    for (size_t at = 0; at < k; at++) {
        double part = moe_value(SP_DTYPE_BF16, x[at]) * moe_value(SP_DTYPE_BF16, v[at]);

        sum += part;
        *out_size += fabs(part);
    }
    return sum;
}

static void check_element(const gemm_world *w, int32_t i, int32_t pair, int32_t n, uint16_t got)
{
    double size, want = exact_sum(w, i, pair, n, &size);
    double value = moe_value(SP_DTYPE_BF16, got);

    if (w->of.whole ? got != sp_f32_to_bf16((float)want)
                    : fabs(value - want) > fabs(want) / 250.0 + size * 1e-5)
        fail_msg("k %d, output %d, pair %d (expert %d), column %d: %.9g, not %.9g", (int)w->of.k,
                 (int)i, (int)pair, (int)w->expert[pair], (int)n, value, want);
}

/* Some columns of every row; pads and rows without an expert are poison yet. */
static void check_gemm(const gemm_world *w, int32_t i, const uint16_t *y)
{
    int32_t n = w->of.n[i], every = w->pairs * n > 20000 ? 1 + w->pairs * n / 20000 : 1;

    for (int32_t pair = 0; pair < w->pairs; pair++) {
        const uint16_t *row = y + (size_t)pair * (size_t)(n + GEMM_PAD);

        for (int32_t at = w->expert[pair] < 0 ? 0 : n; at < n + GEMM_PAD; at++)
            if (row[at] != POISON * 257u)
                fail_msg("pair %d: column %d of %d was written", (int)pair, (int)at, (int)n);
        if (w->expert[pair] < 0)
            continue;
        for (int32_t at = pair % every; at < n; at += every)
            check_element(w, i, pair, at, row[at]);
    }
}

/* The bytes of a base GEMM by each row's expert. */
static void check_base(gemm_world *w, int32_t i, const uint16_t *y)
{
    size_t k = (size_t)w->of.k, n = (size_t)w->of.n[i];
    void *to = moe_put(&rig, NULL, n * 2);

    for (int32_t pair = 0; pair < w->pairs; pair += 1 + w->pairs / 7) {
        size_t row = (size_t)(w->of.by_token ? pair / w->of.top_k : pair);
        sp_cuda_gemm gemm = {.rows = 1,
                             .k = w->of.k,
                             .x = (const char *)w->gemm.x + row * k * 2,
                             .x_stride = w->of.k,
                             .n_outputs = 1};
        uint16_t *want;

        if (w->expert[pair] < 0)
            continue;
        gemm.outputs[0] = (sp_cuda_gemm_output){.w = (const char *)w->device_w[i] +
                                                     (size_t)w->expert[pair] * n * k * 2,
                                                .y = to,
                                                .y_stride = w->of.n[i],
                                                .n = w->of.n[i]};
        expect_launch(rig.ops.base_gemm(rig.gpu, gemm_state, &gemm, rig.stream));
        want = moe_get(&rig, to, n * 2);
        if (memcmp(want, y + (size_t)pair * (n + GEMM_PAD), n * 2) != 0)
            fail_msg("k %d, pair %d: the bytes are not the base GEMM's", (int)k, (int)pair);
        free(want);
    }
}

static const int32_t item_sizes[] = {16, 32, 64, SP_CUDA_EXPERT_ROWS_MAX};

/* All sizes of items give the same bytes. */
static void check_gemms(const gemm_case *c)
{
    int keep = rig.n_blocks;
    gemm_world w;
    uint16_t *first[2] = {NULL, NULL};

    make_gemm(&w, c);
    for (size_t size = 0; size < sizeof item_sizes / sizeof item_sizes[0]; size++) {
        int32_t item_rows = item_sizes[size];
        uint16_t *y[2] = {NULL, NULL};

        run_gemm(&w, item_rows, y);
        for (int32_t i = 0; i < w.outputs; i++) {
            if (first[i] == NULL) {
                check_gemm(&w, i, y[i]);
                check_base(&w, i, y[i]);
                first[i] = y[i];
                continue;
            }
            if (memcmp(first[i], y[i], w.y_bytes[i]) != 0) {
                check_gemm(&w, i, y[i]);
                fail_msg("k %d, output %d: items of %d rows have other bytes", (int)c->k, (int)i,
                         (int)item_rows);
            }
            free(y[i]);
        }
    }
    free(first[0]), free(first[1]);
    free_gemm(&w);
    moe_free(&rig, keep);
}

static void a_small_expert_gemm_is_exact(void **unused)
{
    static const gemm_case cases[] = {
        {1, 2, 8, 64, {32, 32}, 8, 1, true},     {5, 2, 8, 72, {40, 7}, 8, 1, true},
        {9, 3, 4, 200, {130}, 4, 0, true},       {40, 2, 8, 64, {64}, 1, 0, true},
        {70, 4, 16, 136, {72, 72}, 16, 1, true},
    };

    (void)unused;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        check_gemms(&cases[i]);
}

static void larger_expert_gemms_have_one_answer(void **unused)
{
    static const gemm_case cases[] = {
        {1, 8, 16, 2048, {768, 768}, 16, 1, false}, {16, 8, 16, 2048, {768, 768}, 16, 1, false},
        {64, 8, 16, 768, {2048}, 16, 0, false},     {301, 8, 8, 2048, {768, 768}, 8, 1, false},
        {300, 8, 8, 768, {2048}, 8, 0, false},      {130, 8, 8, 768, {2048}, 1, 0, false},
        {1000, 4, 4, 512, {131}, 4, 1, true},
    };

    (void)unused;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        check_gemms(&cases[i]);
}

/* A row alone has its bytes among 4,097 others, all with its expert. */
static void a_row_alone_has_its_bytes_among_many(void **unused)
{
    static const gemm_case many = {4097, 1, 2, 256, {64, 64}, 1, 1, false};
    static const gemm_case one = {1, 1, 2, 256, {64, 64}, 1, 1, false};
    int keep = rig.n_blocks;
    uint16_t *all[2], *alone[2];
    gemm_world w, single;
    int compared = 0;

    (void)unused;
    make_gemm(&w, &many);
    run_gemm(&w, SP_CUDA_EXPERT_ROWS_MAX, all);
    for (int32_t pair = 0; pair < w.pairs; pair += 512) {
        int inner = rig.n_blocks;

        make_gemm(&single, &one);
        single.gemm.x = (const char *)w.gemm.x + (size_t)pair * (size_t)many.k * 2;
        run_gemm(&single, 16, alone);
        for (int i = 0; i < 2 && w.expert[pair] >= 0 && single.expert[0] >= 0; i++, compared++)
            assert_memory_equal(alone[i], all[i] + (size_t)pair * (size_t)(many.n[i] + GEMM_PAD),
                                (size_t)many.n[i] * 2);
        free(alone[0]), free(alone[1]);
        free_gemm(&single);
        moe_free(&rig, inner);
    }
    assert_true(compared > 8);
    free(all[0]), free(all[1]);
    free_gemm(&w);
    moe_free(&rig, keep);
}

/* ---- sums ---------------------------------------------------------------------------------- */

static void check_sum(int32_t rows, int32_t top_k, int32_t width)
{
    int keep = rig.n_blocks;
    size_t pairs = (size_t)(rows * top_k), n = (size_t)width;
    uint16_t *x = moe_numbers(SP_DTYPE_BF16, pairs * n, 5u, 1.0f), *y;
    int32_t *expert = calloc(pairs, 4);
    float *weight = calloc(pairs, 4);
    sp_cuda_expert_sum call = {.rows = rows, .top_k = top_k, .width = width};

    assert_true(expert != NULL && weight != NULL);
    for (size_t i = 0; i < pairs; i++) {
        expert[i] = i % 11 == 10 ? -1 : (int32_t)(i % 8);
        weight[i] = moe_number((uint32_t)i, 1.0f);
    }
    call.expert = moe_put(&rig, expert, pairs * 4);
    call.weight = moe_put(&rig, weight, pairs * 4);
    call.x = moe_put(&rig, x, pairs * n * 2);
    call.y = moe_put(&rig, NULL, (size_t)rows * n * 2);
    expect_launch(rig.ops.sum_experts(rig.gpu, &call, rig.stream));
    y = moe_get(&rig, call.y, (size_t)rows * n * 2);
    for (size_t row = 0; row < (size_t)rows; row++)
        for (size_t j = 0; j < n; j++) {
            float sum = 0.0f;

            for (size_t k = row * (size_t)top_k; k < (row + 1) * (size_t)top_k; k++)
                if (expert[k] >= 0)
                    sum = fmaf(weight[k], sp_bf16_to_f32(x[k * n + j]), sum);
            if (y[row * n + j] != sp_f32_to_bf16(sum))
                fail_msg("row %zu, column %zu: %g, not %g", row, j,
                         (double)sp_bf16_to_f32(y[row * n + j]), (double)sum);
        }
    free(x), free(y), free(expert), free(weight);
    moe_free(&rig, keep);
}

static void a_small_sum_is_in_the_order_of_choice(void **unused)
{
    (void)unused;
    check_sum(1, 1, 8);
    check_sum(3, 8, 2048);
    check_sum(7, 2, 101);
    check_sum(65, 8, 2056);
}

/* ---- deltas by themselves ------------------------------------------------------------------ */

/* bf16 rows, their deltas, the scales of these, of which some are 0, and the folded rows. */
typedef struct folded {
    uint16_t *y, *delta, *want;
    float *scale;
    size_t bytes;
} folded;

static folded make_folded(size_t rows, size_t width, uint32_t seed)
{
    folded f = {.y = moe_numbers(SP_DTYPE_BF16, rows * width, seed, 2.0f),
                .delta = moe_numbers(SP_DTYPE_BF16, rows * width, seed + 1, 1.0f),
                .want = moe_numbers(SP_DTYPE_BF16, rows * width, seed, 2.0f),
                .scale = calloc(rows, sizeof(float)),
                .bytes = rows * width * 2};

    assert_non_null(f.scale);
    for (size_t row = 0; row < rows; row++) {
        f.scale[row] = row % 3 == 1 ? 0.0f : moe_number(seed + 2 + (uint32_t)row, 1.0f);
        for (size_t i = row * width; i < (row + 1) * width; i++)
            if (f.scale[row] != 0.0f)
                f.want[i] = sp_f32_to_bf16(
                    fmaf(f.scale[row], sp_bf16_to_f32(f.delta[i]), sp_bf16_to_f32(f.y[i])));
            else
                f.delta[i] = 0x7fc0; /* a NaN, which no sum may contain */
    }
    return f;
}

static void free_folded(folded *f)
{
    free(f->y), free(f->delta), free(f->want), free(f->scale);
}

static sp_cuda_apart put_apart(const folded *f, size_t rows)
{
    return (sp_cuda_apart){moe_put(&rig, f->delta, f->bytes),
                           moe_put(&rig, f->scale, rows * sizeof(float))};
}

/* The activation with deltas has the bytes of that of the folded rows, of which none has a
 * delta. */
static void check_silu(size_t rows, size_t width)
{
    int keep = rig.n_blocks;
    folded gate = make_folded(rows, width, 11u), up = make_folded(rows, width, 2011u);
    sp_cuda_silu whole = {.n = (int64_t)(rows * width)}, apart;
    char *want, *got;

    whole.gate = moe_put(&rig, gate.want, gate.bytes);
    whole.up = moe_put(&rig, up.want, up.bytes);
    apart = whole;
    apart.width = (int32_t)width;
    apart.gate = moe_put(&rig, gate.y, gate.bytes);
    apart.up = moe_put(&rig, up.y, up.bytes);
    apart.gate_delta = put_apart(&gate, rows);
    apart.up_delta = put_apart(&up, rows);
    expect_launch(rig.ops.silu_mul(rig.gpu, &whole, rig.stream));
    expect_launch(rig.ops.silu_mul(rig.gpu, &apart, rig.stream));
    want = moe_get(&rig, whole.gate, gate.bytes);
    got = moe_get(&rig, apart.gate, gate.bytes);
    assert_memory_equal(got, want, gate.bytes);
    assert_memory_not_equal(gate.want, gate.y, gate.bytes);
    free(want), free(got);
    free_folded(&gate), free_folded(&up);
    moe_free(&rig, keep);
}

static void check_apart_sum(int32_t rows, int32_t top_k, int32_t width)
{
    int keep = rig.n_blocks;
    size_t pairs = (size_t)(rows * top_k), bytes = (size_t)rows * (size_t)width * 2;
    folded x = make_folded(pairs, (size_t)width, 31u);
    int32_t *expert = calloc(pairs, 4);
    float *weight = calloc(pairs, 4);
    sp_cuda_expert_sum whole = {.rows = rows, .top_k = top_k, .width = width}, apart;
    char *want, *got;

    assert_true(expert != NULL && weight != NULL);
    for (size_t i = 0; i < pairs; i++) {
        expert[i] = i % 11 == 10 ? -1 : (int32_t)(i % 8);
        weight[i] = moe_number((uint32_t)i, 1.0f);
    }
    whole.expert = moe_put(&rig, expert, pairs * 4);
    whole.weight = moe_put(&rig, weight, pairs * 4);
    whole.x = moe_put(&rig, x.want, x.bytes);
    whole.y = moe_put(&rig, NULL, bytes);
    apart = whole;
    apart.x = moe_put(&rig, x.y, x.bytes);
    apart.y = moe_put(&rig, NULL, bytes);
    apart.delta = put_apart(&x, pairs);
    expect_launch(rig.ops.sum_experts(rig.gpu, &whole, rig.stream));
    expect_launch(rig.ops.sum_experts(rig.gpu, &apart, rig.stream));
    want = moe_get(&rig, whole.y, bytes);
    got = moe_get(&rig, apart.y, bytes);
    assert_memory_equal(got, want, bytes);
    free(want), free(got), free(expert), free(weight);
    free_folded(&x);
    moe_free(&rig, keep);
}

static void a_small_delta_by_itself_is_folded(void **unused)
{
    (void)unused;
    check_silu(1, 8);
    check_silu(16, 768);
    check_silu(67, 40);
    check_apart_sum(1, 1, 8);
    check_apart_sum(5, 8, 2048);
    check_apart_sum(33, 3, 72);
}

/* ---- gates --------------------------------------------------------------------------------- */

static void a_small_gate_weighs_a_row(void **unused)
{
    enum { ROWS = 5, WIDTH = 136 };
    int keep = rig.n_blocks;
    uint16_t *x = moe_numbers(SP_DTYPE_BF16, (size_t)ROWS * WIDTH, 5u, 1.0f);
    uint16_t *y = moe_numbers(SP_DTYPE_BF16, (size_t)ROWS * WIDTH, 6u, 1.0f), *got;
    float gate[ROWS] = {-3.0f, 0.0f, 0.7f, 40.0f, -100.0f};
    sp_cuda_add_gated call = {.rows = ROWS, .width = WIDTH, .gate_stride = 1};

    (void)unused;
    call.gate = moe_put(&rig, gate, sizeof gate);
    call.x = moe_put(&rig, x, (size_t)ROWS * WIDTH * 2);
    call.y = moe_put(&rig, y, (size_t)ROWS * WIDTH * 2);
    expect_launch(rig.ops.add_gated_rows(rig.gpu, &call, rig.stream));
    got = moe_get(&rig, call.y, (size_t)ROWS * WIDTH * 2);
    for (int i = 0; i < ROWS * WIDTH; i++) {
        double want = moe_value(SP_DTYPE_BF16, y[i]) +
                      moe_value(SP_DTYPE_BF16, x[i]) / (1.0 + exp(-(double)gate[i / WIDTH]));

        if (!(fabs(moe_value(SP_DTYPE_BF16, got[i]) - want) <= fabs(want) / 255.0 + 1e-6))
            fail_msg("element %d: %g, not %g", i, moe_value(SP_DTYPE_BF16, got[i]), want);
    }
    free(x), free(y), free(got);
    moe_free(&rig, keep);
}

/* ---- graph --------------------------------------------------------------------------------- */

/* Grouping and GEMM as nodes: other experts at the next replay give what they give eagerly. */
static void a_small_graph_follows_the_experts(void **unused)
{
    static const gemm_case c = {24, 2, 8, 64, {48}, 8, 1, true};
    int keep = rig.n_blocks;
    gemm_world w;
    sp_cuda_group_rows rows;
    sp_stream *stream = sp_device_main_stream(gpu);
    sp_graph *graph = NULL;

    (void)unused;
    make_gemm(&w, &c);
    rows = w.rows;
    rows.items = moe_items(&rig, w.pairs, c.experts, 1, 16);
    rows.items.scale = NULL;
    w.gemm.items = rows.items;
    assert_ok(sp_graph_begin(stream, NULL), NULL);
    expect_launch(rig.kernels.group_experts(rig.gpu, &rows, rig.stream));
    expect_launch(rig.ops.multiply_experts(rig.gpu, &w.gemm, rig.stream));
    assert_ok(sp_graph_end(stream, &graph, NULL), NULL);
    for (uint32_t again = 0; again < 4; again++) {
        char *poison = malloc(w.y_bytes[0]);
        uint16_t *y;

        assert_non_null(poison);
        memset(poison, POISON, w.y_bytes[0]);
        moe_write(&rig, w.gemm.outputs[0].y, poison, w.y_bytes[0]);
        free(poison);
        for (int32_t i = 0; i < w.pairs; i++)
            w.expert[i] = again == 2 ? -1 : (int32_t)(moe_hash(again * 99u + (uint32_t)i) % 8u);
        moe_write(&rig, w.rows.expert, w.expert, (size_t)w.pairs * 4);
        assert_ok(sp_graph_launch(graph, stream, NULL), NULL);
        y = moe_get(&rig, w.gemm.outputs[0].y, w.y_bytes[0]);
        check_gemm(&w, 0, y);
        free(y);
    }
    sp_graph_destroy(graph);
    free_gemm(&w);
    moe_free(&rig, keep);
}

static int begin(void **unused)
{
    sp_error error;

    (void)unused;
    assert_ok(moe_start(&rig, gpu, &error), &error);
    assert_int_equal(rig.ops.base_gemm_open(rig.gpu, &gemm_state), 0);
    return 0;
}

static int end(void **unused)
{
    (void)unused;
    moe_free(&rig, 0);
    return rig.ops.base_gemm_close(rig.gpu, gemm_state);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_small_choice_is_the_largest_logits),
        cmocka_unit_test(a_small_nan_is_chosen_first),
        cmocka_unit_test(small_rows_are_grouped_by_expert_and_slot),
        cmocka_unit_test(many_rows_are_grouped_by_expert_and_slot),
        cmocka_unit_test(small_malformed_rows_have_no_items),
        cmocka_unit_test(a_small_expert_gemm_is_exact),
        cmocka_unit_test(a_small_sum_is_in_the_order_of_choice),
        cmocka_unit_test(a_small_delta_by_itself_is_folded),
        cmocka_unit_test(a_small_gate_weighs_a_row),
        cmocka_unit_test(a_small_graph_follows_the_experts),
        cmocka_unit_test(larger_expert_gemms_have_one_answer),
        cmocka_unit_test(a_row_alone_has_its_bytes_among_many),
    };

    return gpu_main(&gpu, tests, sizeof tests / sizeof tests[0], begin, end, argc, argv);
}
