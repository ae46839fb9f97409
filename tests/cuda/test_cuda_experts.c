/*
 * test_cuda_experts.c: the deltas of experts on the GPU: every row against a double reference, and
 * by bytes against the kernels of linear sites; then rows in any form, order, window and company,
 * eager or as a graph, have the bytes of their rows alone; and so have deltas by themselves that
 * the host folds. Skipped where there is no GPU.
 */
#include "cuda/gpu_main.h"
#include "cuda/moe_rig.h"
#include "kernels/effective_scale.h"

#include <sidepath/moe_rows.h>

#include <math.h>
#include <stdbool.h>

enum { SITES = 2, UNIT = 256 };

static sp_device *gpu;
static moe_rig rig;

typedef struct world_shape {
    sp_dtype type;
    int32_t tokens, top_k, experts, slots, k, n[SITES]; /* n[1] 0: one site */
    int32_t by_token, f32;                              /* f32: y of the first site */
    int32_t pad;                                        /* elements after rows of x and y */
    const int32_t *ranks; /* up to a negative one, which experts have in turn */
} world_shape;

/* Rows, factors and outputs. Slot 1 has none at the first site; with rank 0 an expert has none. */
typedef struct world {
    world_shape of;
    int32_t pairs, n_sites, x_rows, rank_max;
    int32_t *expert, *slot, *row_pair, *expert_begin;
    float *scale;
    uint16_t *x;
    char *y[SITES]; /* before */
    size_t y_bytes[SITES];
    char **factors; /* [slots] */
    void **device_factors;
    size_t factor_bytes;
    sp_cuda_expert_cell *cells[SITES]; /* [slots, experts] */
    sp_cuda_group_rows gather, sorted;
    sp_cuda_expert_delta delta;
} world;

static void expect_launch(int code)
{
    if (code != 0)
        fail_msg("a launch failed with error %d", code);
    assert_false(rig.failed);
}

static size_t element_of(const world *w, int32_t site)
{
    return site == 0 && w->of.f32 ? 4 : 2;
}

static int64_t y_stride(const world *w, int32_t site)
{
    return w->of.n[site] + w->of.pad;
}

/* ---- the world ----------------------------------------------------------------------------- */

static void make_rows(world *w)
{
    size_t pairs = (size_t)w->pairs, tokens = (size_t)w->of.tokens;
    sp_moe_rows rows = {.struct_bytes = sizeof rows,
                        .n_tokens = w->of.tokens,
                        .top_k = w->of.top_k,
                        .n_experts = w->of.experts};
    sp_error error;

    w->expert = calloc(pairs, 4);
    w->slot = calloc(tokens, 4);
    w->scale = calloc(tokens, 4);
    w->row_pair = calloc(pairs, 4);
    w->expert_begin = calloc((size_t)w->of.experts + 1, 4);
    for (size_t i = 0; i < pairs; i++) {
        uint32_t h = moe_hash(900u + (uint32_t)i);

        w->expert[i] = h % 31u == 0 ? -1 : (int32_t)(h >> 8) % w->of.experts;
    }
    for (size_t i = 0; i < tokens; i++) {
        uint32_t h = moe_hash(70u + (uint32_t)i * 5u);

        w->slot[i] = h % 9u == 0 ? -1 : (int32_t)(h >> 4) % w->of.slots;
        w->scale[i] = 0.5f + 0.25f * (float)(h % 5u);
    }
    rows.expert = w->expert;
    assert_ok(sp_moe_rows_sort(&rows, w->expert_begin, w->row_pair, &error), &error);
}

/* The rank that an expert has in a slot. */
static int32_t rank_of(const world *w, int32_t site, int32_t slot, int32_t expert)
{
    int32_t n = 0;

    while (w->of.ranks[n] >= 0)
        n++;
    return site == 0 && slot == 1 ? 0 : w->of.ranks[(slot * 3 + expert + site) % n];
}

static int32_t round_up(int32_t n, int32_t by)
{
    return (n + by - 1) / by * by;
}

/* Writes a matrix of [rows, columns] with zero pads to `stride` columns at *cursor; its unit. */
static uint32_t write_matrix(const world *w, char *to, size_t *cursor, int32_t rows, int32_t used,
                             int32_t columns, int32_t stride, uint32_t seed, float size)
{
    uint32_t at = (uint32_t)(*cursor / UNIT);
    uint16_t *matrix = (uint16_t *)(void *)(to == NULL ? NULL : to + *cursor);

    for (int32_t i = 0; to != NULL && i < used; i++)
        for (int32_t j = 0; j < columns; j++)
            matrix[i * stride + j] = moe_half(
                w->of.type, moe_number(seed + (uint32_t)i * 1009u + (uint32_t)j * 31u, size));
    *cursor += (size_t)round_up(rows * stride * 2, UNIT);
    return at;
}

/* Writes the factors of a slot, after one unit that no offset may refer to, and returns their size
 * in bytes; with `to` NULL it writes nothing. */
static size_t write_slot(world *w, int32_t slot, char *to)
{
    size_t at = UNIT;

    for (int32_t site = 0; site < w->n_sites; site++)
        for (int32_t e = 0; e < w->of.experts; e++) {
            int32_t rank = rank_of(w, site, slot, e), stride = round_up(rank, 8);
            uint32_t seed = (uint32_t)(slot * 7001 + e * 911 + site * 31);
            sp_cuda_expert_cell cell = {.rank = rank, .scale = 0.5f + 0.125f * (float)(e % 4)};

            if (rank == 0)
                continue;
            cell.a = write_matrix(w, to, &at, stride, rank, w->of.k, w->of.k, seed, 0.1f);
            cell.b =
                write_matrix(w, to, &at, w->of.n[site], w->of.n[site], rank, stride, ~seed, 0.3f);
            if (to != NULL)
                w->cells[site][slot * w->of.experts + e] = cell;
            w->rank_max = rank > w->rank_max ? rank : w->rank_max;
        }
    return at;
}

static void make_factors(world *w)
{
    size_t slots = (size_t)w->of.slots, experts = (size_t)w->of.experts;

    w->factors = calloc(slots, sizeof *w->factors);
    w->device_factors = calloc(slots, sizeof *w->device_factors);
    assert_true(w->factors != NULL && w->device_factors != NULL);
    for (int32_t site = 0; site < w->n_sites; site++)
        w->cells[site] = calloc(slots * experts, sizeof *w->cells[site]);
    for (int32_t slot = 0; slot < w->of.slots; slot++) {
        size_t bytes = write_slot(w, slot, NULL);

        w->factors[slot] = calloc(1, bytes);
        assert_non_null(w->factors[slot]);
        write_slot(w, slot, w->factors[slot]);
        w->device_factors[slot] = moe_put(&rig, w->factors[slot], bytes);
    }
}

/* Tables of a site: a slot without any expert there has no cells. */
static sp_cuda_expert_site make_site(world *w, int32_t site, const void *factors)
{
    size_t experts = (size_t)w->of.experts, bytes = experts * sizeof(sp_cuda_expert_cell);
    const void **table = calloc((size_t)w->of.slots, sizeof *table);
    sp_cuda_expert_site out = {.factors = factors,
                               .y_stride = y_stride(w, site),
                               .n_out = w->of.n[site],
                               .y_is_f32 = element_of(w, site) == 4};

    assert_non_null(table);
    for (int32_t slot = 0; slot < w->of.slots; slot++) {
        bool any = false;

        for (int32_t e = 0; e < w->of.experts; e++)
            any = any || rank_of(w, site, slot, e) > 0;
        if (any)
            table[slot] = moe_put(&rig, w->cells[site] + (size_t)slot * experts, bytes);
    }
    out.cells = moe_put(&rig, table, (size_t)w->of.slots * sizeof *table);
    w->y_bytes[site] = (size_t)w->pairs * (size_t)out.y_stride * element_of(w, site);
    out.y = moe_put(&rig, NULL, w->y_bytes[site]);
    free(table);
    return out;
}

/* y as it was: by pair, so that both forms have the same row for it. */
static void make_y(world *w, int32_t site)
{
    size_t n = (size_t)w->pairs * (size_t)y_stride(w, site);

    w->y[site] = malloc(w->y_bytes[site]);
    assert_non_null(w->y[site]);
    for (size_t i = 0; i < n; i++) {
        float value = moe_number((uint32_t)i * 3u + (uint32_t)site, 1.0f);
        uint16_t half = moe_half(w->of.type, value);

        if (element_of(w, site) == 4)
            memcpy(w->y[site] + i * 4, &value, 4);
        else
            memcpy(w->y[site] + i * 2, &half, 2);
    }
}

static void make_world(world *w, const world_shape *of)
{
    size_t pairs = (size_t)(of->tokens * of->top_k), tokens = (size_t)of->tokens;
    const void *factors;

    *w = (world){.of = *of, .pairs = (int32_t)pairs, .n_sites = of->n[1] > 0 ? 2 : 1};
    w->x_rows = of->by_token ? of->tokens : w->pairs;
    make_rows(w);
    make_factors(w);
    w->x = moe_numbers(of->type, (size_t)w->x_rows * (size_t)(of->k + of->pad), 5u, 1.0f);
    factors = moe_put(&rig, w->device_factors, (size_t)of->slots * sizeof(void *));
    w->delta = (sp_cuda_expert_delta){
        .type = (int32_t)of->type,
        .k_in = of->k,
        .n_sites = w->n_sites,
        .rank_max = w->rank_max,
        .multiprocessors = sp_device_cuda_multiprocessors(gpu),
        .after_group = 1,
        .x_by_token = of->by_token,
        .x = moe_put(&rig, w->x, (size_t)w->x_rows * (size_t)(of->k + of->pad) * 2),
        .x_stride = of->k + of->pad,
    };
    for (int32_t site = 0; site < w->n_sites; site++) {
        w->delta.sites[site] = make_site(w, site, factors);
        make_y(w, site);
    }
    w->gather = (sp_cuda_group_rows){
        .n_tokens = of->tokens,
        .top_k = of->top_k,
        .n_experts = of->experts,
        .n_slots = of->slots,
        .all_rows = w->pairs,
        .n_rows = w->pairs,
        .expert = moe_put(&rig, w->expert, pairs * 4),
        .token_slot = moe_put(&rig, w->slot, tokens * 4),
        .token_scale = moe_put(&rig, w->scale, tokens * 4),
    };
    w->sorted = w->gather;
    w->sorted.expert = NULL;
    w->sorted.row_pair = moe_put(&rig, w->row_pair, pairs * 4);
    w->sorted.expert_begin =
        moe_put(&rig, w->expert_begin, ((size_t)of->experts + 1) * sizeof(int32_t));
}

static void free_world(world *w)
{
    free(w->expert), free(w->slot), free(w->row_pair), free(w->expert_begin), free(w->scale);
    free(w->x);
    for (int32_t slot = 0; slot < w->of.slots; slot++)
        free(w->factors[slot]);
    free(w->factors), free(w->device_factors);
    for (int32_t site = 0; site < w->n_sites; site++)
        free(w->y[site]), free(w->cells[site]);
}

/* ---- launches ------------------------------------------------------------------------------ */

static void launch(const sp_cuda_group_rows *rows, const sp_cuda_expert_delta *delta)
{
    expect_launch(rig.kernels.group_experts(rig.gpu, rows, rig.stream));
    expect_launch(rig.kernels.add_experts(rig.gpu, delta, rig.stream));
}

/* The pair of a row. */
static size_t pair_of(const world *w, bool sorted, int32_t row)
{
    return (size_t)(sorted ? w->row_pair[row] : row);
}

/* Poison where rows without a delta must not write. */
#define POISON 0xa5

/* Deltas by themselves, and where they go. */
typedef struct apart_outputs {
    char *delta[SITES];
    float *scale[SITES];
} apart_outputs;

/* Has `delta` write to memory of its own, and `clear` zero the scales. */
static apart_outputs set_apart(const world *w, sp_cuda_expert_delta *delta, sp_cuda_clear *clear)
{
    apart_outputs out = {.delta = {NULL}};

    *clear = (sp_cuda_clear){.n_arrays = w->n_sites, .n = w->pairs};
    for (int32_t site = 0; site < w->n_sites; site++) {
        char *poison = malloc(w->y_bytes[site]);

        assert_non_null(poison);
        memset(poison, POISON, w->y_bytes[site]);
        out.delta[site] = moe_put(&rig, poison, w->y_bytes[site]);
        out.scale[site] = moe_put(&rig, NULL, (size_t)w->pairs * sizeof(float));
        moe_write(&rig, out.scale[site], poison, (size_t)w->pairs * sizeof(float));
        delta->sites[site].y = out.delta[site];
        delta->sites[site].scales = clear->array[site] = out.scale[site];
        free(poison);
    }
    return out;
}

static uint16_t fold(sp_dtype type, uint16_t y, uint16_t delta, float scale)
{
    if (type == SP_DTYPE_F16)
        return sp_f32_to_f16(fmaf(scale, sp_f16_to_f32(delta), sp_f16_to_f32(y)));
    return sp_f32_to_bf16(fmaf(scale, sp_bf16_to_f32(delta), sp_bf16_to_f32(y)));
}

/* Folds the deltas of a site into its y, row by row; pads between rows, and rows of the scale 0,
 * must be poison still. */
static void fold_apart(const world *w, const apart_outputs *from, int32_t site)
{
    size_t n = (size_t)w->of.n[site], stride = (size_t)y_stride(w, site);
    uint16_t *y = moe_get(&rig, w->delta.sites[site].y, w->y_bytes[site]);
    uint16_t *delta = moe_get(&rig, from->delta[site], w->y_bytes[site]);
    float *scale = moe_get(&rig, from->scale[site], (size_t)w->pairs * sizeof(float));

    for (size_t row = 0; row < (size_t)w->pairs; row++)
        for (size_t i = 0; i < stride; i++) {
            uint16_t *at = &y[row * stride + i], own = delta[row * stride + i];

            if (i < n && scale[row] != 0.0f)
                *at = fold(w->of.type, *at, own, scale[row]);
            else if (own != (POISON << 8 | POISON))
                fail_msg("site %d, row %zu, scale %g: element %zu was written", (int)site, row,
                         (double)scale[row], i);
        }
    moe_write(&rig, w->delta.sites[site].y, y, w->y_bytes[site]);
    free(y), free(delta), free(scale);
}

/* The outputs of all rows, by pair: from y as it was, in windows of so many rows. Rows that the
 * sorted form leaves out stay as they were. `apart`: deltas by themselves, folded by the host. */
static void run_form(world *w, bool sorted, int32_t item_rows, int32_t window, bool apart,
                     char *out[SITES])
{
    int keep = rig.n_blocks;
    sp_cuda_group_rows rows = sorted ? w->sorted : w->gather;
    sp_cuda_expert_delta delta = w->delta;
    int32_t n_rows = sorted ? w->expert_begin[w->of.experts] : w->pairs;
    apart_outputs deltas = {.delta = {NULL}};
    sp_cuda_clear clear;

    rows.items = moe_items(&rig, window, w->of.experts, w->of.slots, item_rows);
    delta.items = rows.items;
    for (int32_t site = 0; site < w->n_sites; site++) {
        size_t stride = w->y_bytes[site] / (size_t)w->pairs;
        char *y = calloc(1, w->y_bytes[site]);

        assert_non_null(y);
        for (int32_t row = 0; row < n_rows; row++)
            memcpy(y + (size_t)row * stride, w->y[site] + pair_of(w, sorted, row) * stride, stride);
        moe_write(&rig, delta.sites[site].y, y, w->y_bytes[site]);
        free(y);
    }
    if (sorted && !w->of.by_token) { /* x goes by row */
        size_t stride = (size_t)(w->of.k + w->of.pad);
        uint16_t *x = calloc((size_t)w->pairs * stride, 2);

        assert_non_null(x);
        for (int32_t row = 0; row < n_rows; row++)
            memcpy(x + (size_t)row * stride, w->x + pair_of(w, true, row) * stride, stride * 2);
        delta.x = moe_put(&rig, x, (size_t)w->pairs * stride * 2);
        free(x);
    }
    if (apart) {
        deltas = set_apart(w, &delta, &clear);
        expect_launch(rig.kernels.clear_scales(rig.gpu, &clear, rig.stream));
    }
    for (int32_t at = 0; at < n_rows; at += window) {
        rows.row_begin = at;
        rows.n_rows = n_rows - at < window ? n_rows - at : window;
        launch(&rows, &delta);
    }
    for (int32_t site = 0; apart && site < w->n_sites; site++)
        fold_apart(w, &deltas, site);
    for (int32_t site = 0; site < w->n_sites; site++) {
        size_t stride = w->y_bytes[site] / (size_t)w->pairs;
        char *y = moe_get(&rig, w->delta.sites[site].y, w->y_bytes[site]);

        out[site] = malloc(w->y_bytes[site]);
        assert_non_null(out[site]);
        memcpy(out[site], w->y[site], w->y_bytes[site]);
        for (int32_t row = 0; row < n_rows; row++)
            memcpy(out[site] + pair_of(w, sorted, row) * stride, y + (size_t)row * stride, stride);
        free(y);
    }
    assert_false(rig.failed);
    moe_free(&rig, keep);
}

static void run(world *w, bool sorted, int32_t item_rows, int32_t window, char *out[SITES])
{
    run_form(w, sorted, item_rows, window, false, out);
}

static void free_outputs(char *out[SITES])
{
    for (int i = 0; i < SITES; i++) {
        free(out[i]);
        out[i] = NULL;
    }
}

/* ---- the reference ------------------------------------------------------------------------- */

static double y_at(const world *w, int32_t site, const char *y, int32_t pair, int32_t n)
{
    size_t at = (size_t)pair * (size_t)y_stride(w, site) + (size_t)n;
    float wide;
    uint16_t half;

    if (element_of(w, site) == 4) {
        memcpy(&wide, y + at * 4, 4);
        return (double)wide;
    }
    memcpy(&half, y + at * 2, 2);
    return moe_value(w->of.type, half);
}

/* The cell of a row's pair, or NULL: nothing is added. */
static const sp_cuda_expert_cell *cell_of(const world *w, int32_t site, int32_t pair)
{
    int32_t slot = w->slot[pair / w->of.top_k], expert = w->expert[pair];
    const sp_cuda_expert_cell *cell;

    if (slot < 0 || expert < 0)
        return NULL;
    cell = &w->cells[site][slot * w->of.experts + expert];
    return cell->rank > 0 ? cell : NULL;
}

/* xa of a pair, in double. */
static void exact_xa(const world *w, const sp_cuda_expert_cell *cell, int32_t pair, double *xa)
{
    size_t k = (size_t)w->of.k;
    int32_t token = pair / w->of.top_k;
    const uint16_t *x = w->x + (size_t)(w->of.by_token ? token : pair) * (k + (size_t)w->of.pad);
    const uint16_t *a =
        (const uint16_t *)(const void *)(w->factors[w->slot[token]] + (size_t)cell->a * UNIT);

    for (int32_t c = 0; c < cell->rank; c++) {
        xa[c] = 0.0;
        for (size_t i = 0; i < k; i++)
            xa[c] += moe_value(w->of.type, x[i]) * moe_value(w->of.type, a[(size_t)c * k + i]);
    }
}

/* Roundings: xa, delta and y, at 2^-9 of each. */
static void check_pair(const world *w, int32_t site, const char *y, int32_t pair)
{
    const sp_cuda_expert_cell *cell = cell_of(w, site, pair);
    int32_t token = pair / w->of.top_k;
    double xa[SP_CUDA_RANK_MAX], scale;
    const uint16_t *b;

    if (cell == NULL) {
        size_t stride = w->y_bytes[site] / (size_t)w->pairs;

        if (memcmp(y + (size_t)pair * stride, w->y[site] + (size_t)pair * stride, stride) != 0)
            fail_msg("site %d, pair %d has no delta and was changed", (int)site, (int)pair);
        return;
    }
    exact_xa(w, cell, pair, xa);
    scale = (double)sp_scale_of_row(cell->scale, w->scale[token]);
    b = (const uint16_t *)(const void *)(w->factors[w->slot[token]] + (size_t)cell->b * UNIT);
    for (int32_t n = pair % 3; n<w->of.n[site]; n += w->of.n[site]> 300 ? 7 : 1) {
        double delta = 0.0, size = 0.0, before = y_at(w, site, w->y[site], pair, n), want, got;

        for (int32_t c = 0; c < cell->rank; c++) {
            double part = xa[c] * moe_value(w->of.type, b[n * round_up(cell->rank, 8) + c]);

            delta += part;
            size += fabs(part);
        }
        want = before + scale * delta;
        got = y_at(w, site, y, pair, n);
        if (!(fabs(got - want) <= scale * (size + fabs(delta)) / 256.0 + fabs(want) / 256.0 + 1e-5))
            fail_msg("k %d, site %d, pair %d (slot %d, expert %d, rank %d), column %d: %.9g, not "
                     "%.9g; before %.9g",
                     (int)w->of.k, (int)site, (int)pair, (int)w->slot[token], (int)w->expert[pair],
                     (int)cell->rank, (int)n, got, want, before);
    }
}

/* Bytes between rows and pads are as they were. */
static void check_pads(const world *w, int32_t site, const char *y)
{
    size_t element = element_of(w, site), used = (size_t)w->of.n[site] * element;
    size_t stride = (size_t)y_stride(w, site) * element;

    for (size_t pair = 0; pair < (size_t)w->pairs; pair++)
        assert_memory_equal(y + pair * stride + used, w->y[site] + pair * stride + used,
                            stride - used);
}

/* ---- by bytes, the kernels of linear sites ------------------------------------------------- */

static sp_cuda_plan make_plan(void)
{
    static const int32_t slot = 0;
    sp_cuda_plan p = {.seq_slot_in = moe_put(&rig, &slot, 4)};

    p.head = moe_put(&rig, NULL, sizeof *p.head);
    p.seq_slot = moe_put(&rig, NULL, 64);
    p.row_order = moe_put(&rig, NULL, 64);
    p.segment_begin = moe_put(&rig, NULL, 64);
    p.segment_slot = moe_put(&rig, NULL, 64);
    p.row_scale = moe_put(&rig, NULL, 64);
    p.tile_begin = moe_put(&rig, NULL, 64);
    p.tile_rows = moe_put(&rig, NULL, 64);
    p.tile_slot = moe_put(&rig, NULL, 64);
    p.tiles = moe_put(&rig, NULL, sizeof(sp_cuda_tile));
    return p;
}

/* The row alone through plan, shrink and expand, as a pool of one slot with the expert's factors.
 */
static void check_linear(world *w, int32_t site, const char *y, int32_t pair)
{
    const sp_cuda_expert_cell *cell = cell_of(w, site, pair);
    int keep = rig.n_blocks;
    int32_t token = pair / w->of.top_k, stride;
    size_t y_row = w->y_bytes[site] / (size_t)w->pairs;
    sp_cuda_group g = {.type = (int32_t)w->of.type,
                       .n_rows = 1,
                       .n_slots = 1,
                       .n_sites = 1,
                       .k_in = w->of.k,
                       .multiprocessors = w->delta.multiprocessors,
                       .after_plan = 1,
                       .x_stride = w->delta.x_stride};
    char *got;

    if (cell == NULL)
        return;
    stride = round_up(cell->rank, 8);
    g.rank_stride = stride;
    g.x =
        (const char *)w->delta.x + (size_t)(w->of.by_token ? token : pair) * (size_t)g.x_stride * 2;
    g.plan = make_plan();
    g.plan.row_scale_in = moe_put(&rig, &w->scale[token], 4);
    g.partials = moe_put(&rig, NULL,
                         sp_cuda_partials_bytes(g.multiprocessors, 1, 1, g.k_in, g.rank_stride, 1));
    g.sites[0] = (sp_cuda_site){
        .a = (const char *)w->device_factors[w->slot[token]] + (size_t)cell->a * UNIT,
        .b = (const char *)w->device_factors[w->slot[token]] + (size_t)cell->b * UNIT,
        .a_slot_stride = stride,
        .b_slot_stride = stride,
        .a_stride = w->of.k,
        .b_stride = stride,
        .one_rank = cell->rank,
        .one_scale = cell->scale,
        .y = moe_put(&rig, w->y[site] + (size_t)pair * y_row, y_row),
        .y_stride = y_stride(w, site),
        .n_out = w->of.n[site],
        .y_is_f32 = element_of(w, site) == 4,
    };
    expect_launch(rig.kernels.plan_rows(rig.gpu, &g.plan, 1, 1, rig.stream));
    expect_launch(rig.kernels.shrink(rig.gpu, &g, rig.stream));
    expect_launch(rig.kernels.expand(rig.gpu, &g, rig.stream));
    got = moe_get(&rig, g.sites[0].y, y_row);
    if (memcmp(got, y + (size_t)pair * y_row, y_row) != 0)
        fail_msg("k %d, site %d, pair %d, rank %d: the bytes are not those of a linear site",
                 (int)w->of.k, (int)site, (int)pair, (int)cell->rank);
    free(got);
    moe_free(&rig, keep);
}

/* ---- tests --------------------------------------------------------------------------------- */

static void expect_same(const world *w, char *want[SITES], char *got[SITES], const char *what)
{
    for (int32_t site = 0; site < w->n_sites; site++) {
        size_t at = 0, stride = w->y_bytes[site] / (size_t)w->pairs;

        while (at < w->y_bytes[site] && want[site][at] == got[site][at])
            at++;
        if (at < w->y_bytes[site])
            fail_msg("k %d, site %d, pair %zu: %s have other bytes, from byte %zu on", (int)w->of.k,
                     (int)site, at / stride, what, at % stride);
    }
}

/* Deltas by themselves have the bytes of `want` when they are folded. */
static void check_apart(world *w, int32_t item_rows, char *want[SITES])
{
    char *got[SITES] = {NULL};

    if (w->of.f32)
        return;
    for (int form = 0; form < 2; form++)
        for (int32_t parts = 1; parts <= 3; parts += 2) {
            run_form(w, form, item_rows, 1 + w->pairs / parts, true, got);
            expect_same(w, want, got,
                        form ? "sorted deltas by themselves" : "deltas by themselves");
            free_outputs(got);
        }
}

static const int32_t item_sizes[] = {SP_CUDA_ITEM_FEW, SP_CUDA_ITEM_SOME, SP_CUDA_ITEM_MANY};

/* All forms against the double reference and each other. */
static void check_world(const world_shape *of)
{
    int keep = rig.n_blocks;
    world w;
    char *want[SITES] = {NULL}, *got[SITES] = {NULL};
    int32_t every = 1 + of->tokens * of->top_k / 40;

    make_world(&w, of);
    run(&w, false, 8, w.pairs, want);
    for (int32_t site = 0; site < w.n_sites; site++) {
        check_pads(&w, site, want[site]);
        for (int32_t pair = 0; pair < w.pairs; pair += every)
            check_pair(&w, site, want[site], pair);
        for (int32_t pair = 0; pair < w.pairs; pair += 1 + w.pairs / 9)
            check_linear(&w, site, want[site], pair);
    }
    for (int form = 0; form < 2; form++)
        for (size_t i = 0; i < sizeof item_sizes / sizeof item_sizes[0]; i++) {
            run(&w, form, item_sizes[i], w.pairs, got);
            expect_same(&w, want, got, form ? "sorted rows" : "gathered rows");
            free_outputs(got);
            run(&w, form, item_sizes[i], 1 + w.pairs / 3, got);
            expect_same(&w, want, got, "windows");
            free_outputs(got);
        }
    for (size_t i = 0; i < sizeof item_sizes / sizeof item_sizes[0]; i++)
        check_apart(&w, item_sizes[i], want);
    free_outputs(want);
    free_world(&w);
    moe_free(&rig, keep);
}

static const int32_t few_ranks[] = {16, 8, 0, 1, 12, 24, -1}, one_rank[] = {16, -1},
                     many_ranks[] = {64, 33, 32, 40, 5, -1}, most_ranks[] = {512, 130, 16, -1};

static void a_small_expert_delta_is_exact(void **unused)
{
    static const world_shape shapes[] = {
        {SP_DTYPE_BF16, 1, 2, 4, 2, 64, {32, 32}, 1, 0, 8, few_ranks},
        {SP_DTYPE_BF16, 9, 2, 8, 3, 72, {40, 24}, 1, 0, 0, few_ranks},
        {SP_DTYPE_F16, 7, 3, 4, 3, 131, {37, 5}, 1, 0, 3, few_ranks},
        {SP_DTYPE_BF16, 6, 2, 4, 3, 520, {48}, 0, 1, 0, few_ranks},
    };

    (void)unused;
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        check_world(&shapes[i]);
}

static void real_expert_deltas_are_exact(void **unused)
{
    static const world_shape shapes[] = {
        {SP_DTYPE_BF16, 16, 8, 128, 4, 2048, {768, 768}, 1, 0, 0, one_rank},
        {SP_DTYPE_BF16, 16, 8, 128, 4, 768, {2048}, 0, 0, 0, one_rank},
        {SP_DTYPE_BF16, 40, 4, 6, 4, 2560, {1030, 512}, 1, 0, 2, few_ranks},
        {SP_DTYPE_F16, 31, 2, 5, 2, 2048, {768, 768}, 1, 1, 0, many_ranks},
        {SP_DTYPE_BF16, 12, 2, 3, 3, 5000, {600}, 0, 0, 0, most_ranks},
        {SP_DTYPE_BF16, 512, 8, 16, 4, 256, {96, 96}, 1, 0, 0, few_ranks},
        {SP_DTYPE_BF16, 4097, 1, 2, 2, 128, {64}, 1, 0, 0, many_ranks},
    };

    (void)unused;
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        check_world(&shapes[i]);
}

/* Each of some tokens alone, in a launch of its own, has the bytes that it has among all. */
static void a_token_alone_has_its_bytes(void **unused)
{
    static const world_shape of = {SP_DTYPE_BF16, 200, 8, 16, 4,        2048,
                                   {768, 768},    1,   0, 0,  few_ranks};
    int keep = rig.n_blocks;
    world w;
    char *want[SITES] = {NULL}, *got[SITES] = {NULL};

    (void)unused;
    make_world(&w, &of);
    run(&w, false, SP_CUDA_ITEM_MANY, w.pairs, want);
    for (int32_t token = 0; token < of.tokens; token += 23) {
        int32_t pairs = w.pairs, *expert = w.expert;

        /* The others go to no expert. */
        w.expert = malloc((size_t)pairs * 4);
        assert_non_null(w.expert);
        for (int32_t i = 0; i < pairs; i++)
            w.expert[i] = i / of.top_k == token ? expert[i] : -1;
        moe_write(&rig, w.gather.expert, w.expert, (size_t)pairs * 4);
        run(&w, false, 8, pairs, got);
        for (int32_t site = 0; site < w.n_sites; site++) {
            size_t row = w.y_bytes[site] / (size_t)pairs, first = (size_t)(token * of.top_k) * row;

            assert_memory_equal(got[site] + first, want[site] + first, row * (size_t)of.top_k);
            assert_memory_equal(got[site], w.y[site], first);
        }
        free_outputs(got);
        free(w.expert);
        w.expert = expert;
    }
    free_outputs(want);
    free_world(&w);
    moe_free(&rig, keep);
}

/* A graph replays with other slots, scales and experts. */
static void a_small_graph_follows_the_rows(void **unused)
{
    static const world_shape of = {SP_DTYPE_BF16, 12, 2, 4, 3, 136, {40, 24}, 1, 0, 0, few_ranks};
    int keep = rig.n_blocks;
    world w;
    sp_stream *stream = sp_device_main_stream(gpu);
    sp_graph *graph = NULL;

    (void)unused;
    make_world(&w, &of);
    w.gather.items = moe_items(&rig, w.pairs, of.experts, of.slots, 8);
    w.delta.items = w.gather.items;
    assert_ok(sp_graph_begin(stream, NULL), NULL);
    launch(&w.gather, &w.delta);
    assert_ok(sp_graph_end(stream, &graph, NULL), NULL);
    for (int32_t again = 0; again < 4; again++) {
        for (int32_t i = 0; i < w.pairs; i++)
            w.expert[i] = again == 2 ? -1 : (i * 7 + again) % of.experts;
        for (int32_t i = 0; i < of.tokens; i++) {
            w.slot[i] = (i + again) % 4 - 1;
            w.scale[i] = 0.25f * (float)(i % 4 + 1);
        }
        moe_write(&rig, w.gather.expert, w.expert, (size_t)w.pairs * 4);
        moe_write(&rig, w.gather.token_slot, w.slot, (size_t)of.tokens * 4);
        moe_write(&rig, w.gather.token_scale, w.scale, (size_t)of.tokens * 4);
        for (int32_t site = 0; site < w.n_sites; site++)
            moe_write(&rig, w.delta.sites[site].y, w.y[site], w.y_bytes[site]);
        assert_ok(sp_graph_launch(graph, stream, NULL), NULL);
        for (int32_t site = 0; site < w.n_sites; site++) {
            char *y = moe_get(&rig, w.delta.sites[site].y, w.y_bytes[site]);

            for (int32_t pair = 0; pair < w.pairs; pair++)
                check_pair(&w, site, y, pair);
            free(y);
        }
    }
    sp_graph_destroy(graph);
    free_world(&w);
    moe_free(&rig, keep);
}

static void a_small_delta_by_itself_has_the_type(void **unused)
{
    static const world_shape of = {SP_DTYPE_BF16, 5, 2, 4, 2, 64, {32}, 1, 1, 0, few_ranks};
    int keep = rig.n_blocks, code = 0;
    sp_cuda_clear clear;
    world w;

    (void)unused;
    make_world(&w, &of);
    w.gather.items = w.delta.items = moe_items(&rig, w.pairs, of.experts, of.slots, 8);
    (void)set_apart(&w, &w.delta, &clear);
    expect_launch(rig.kernels.group_experts(rig.gpu, &w.gather, rig.stream));
    code = rig.kernels.add_experts(rig.gpu, &w.delta, rig.stream);
    assert_int_equal(code, 1); /* cudaErrorInvalidValue: y is FP32 */
    free_world(&w);
    moe_free(&rig, keep);
}

/* The plan's tiles instead of items: a router, whose factors go by slot alone. */
static void a_small_router_has_the_deltas_of_its_slots(void **unused)
{
    static const world_shape of = {SP_DTYPE_BF16, 21, 1, 1, 3, 200, {60}, 1, 1, 0, many_ranks};
    int keep = rig.n_blocks;
    const void *a[3], *b[3];
    int32_t rank[3];
    float scale[3];
    char *want[SITES] = {NULL}, *got;
    world w;
    sp_cuda_plan plan;

    (void)unused;
    make_world(&w, &of);
    for (int32_t i = 0; i < w.pairs; i++)
        w.expert[i] = 0;
    moe_write(&rig, w.gather.expert, w.expert, (size_t)w.pairs * 4);
    run(&w, false, 8, w.pairs, want);
    for (int32_t slot = 0; slot < 3; slot++) {
        const sp_cuda_expert_cell *cell = &w.cells[0][slot];

        a[slot] = (const char *)w.device_factors[slot] + (size_t)cell->a * UNIT;
        b[slot] = (const char *)w.device_factors[slot] + (size_t)cell->b * UNIT;
        rank[slot] = cell->rank;
        scale[slot] = cell->scale;
    }
    plan = make_plan();
    plan.seq_slot_in = w.gather.token_slot;
    plan.row_scale_in = w.gather.token_scale;
    plan.seq_slot = moe_put(&rig, NULL, 256);
    plan.row_order = moe_put(&rig, NULL, 256);
    plan.row_scale = moe_put(&rig, NULL, 256);
    plan.tile_begin = moe_put(&rig, NULL, 256);
    plan.tile_rows = moe_put(&rig, NULL, 256);
    plan.tile_slot = moe_put(&rig, NULL, 256);
    plan.tiles = moe_put(&rig, NULL, 32 * sizeof(sp_cuda_tile));
    w.delta.tiles = plan.tiles;
    w.delta.head = plan.head;
    w.delta.items = (sp_cuda_items){.bound = sp_cuda_tiles_bound(of.tokens, of.slots)};
    w.delta.sites[0].cells = NULL;
    w.delta.sites[0].a = moe_put(&rig, a, sizeof a);
    w.delta.sites[0].b = moe_put(&rig, b, sizeof b);
    w.delta.sites[0].rank = moe_put(&rig, rank, sizeof rank);
    w.delta.sites[0].scale = moe_put(&rig, scale, sizeof scale);
    moe_write(&rig, w.delta.sites[0].y, w.y[0], w.y_bytes[0]);
    expect_launch(rig.kernels.plan_rows(rig.gpu, &plan, of.tokens, of.slots, rig.stream));
    expect_launch(rig.kernels.add_experts(rig.gpu, &w.delta, rig.stream));
    got = moe_get(&rig, w.delta.sites[0].y, w.y_bytes[0]);
    assert_memory_equal(got, want[0], w.y_bytes[0]);
    assert_memory_not_equal(got, w.y[0], w.y_bytes[0]);
    free(got);
    free_outputs(want);
    free_world(&w);
    moe_free(&rig, keep);
}

static int begin(void **unused)
{
    sp_error error;

    (void)unused;
    assert_ok(moe_start(&rig, gpu, &error), &error);
    return 0;
}

static int end(void **unused)
{
    (void)unused;
    moe_free(&rig, 0);
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_small_expert_delta_is_exact),
        cmocka_unit_test(a_small_graph_follows_the_rows),
        cmocka_unit_test(a_small_router_has_the_deltas_of_its_slots),
        cmocka_unit_test(a_small_delta_by_itself_has_the_type),
        cmocka_unit_test(real_expert_deltas_are_exact),
        cmocka_unit_test(a_token_alone_has_its_bytes),
    };

    return gpu_main(&gpu, tests, sizeof tests / sizeof tests[0], begin, end, argc, argv);
}
