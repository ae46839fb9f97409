/*
 * Embeddings and logits of many slots in one plan against a reference in double: rows that a slot
 * replaces, pairs of embed_tokens and lm_head, both, neither. What no adapter touches keeps its
 * bytes, pads included.
 */
#include "base/alloc.h"
#include "kernels/kernels.h"
#include "support/hand.h"

#include <sidepath/delta.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define VOCAB  83
#define HIDDEN 37
#define SLOTS  40 /* more than one round takes GEMMs */
#define ROWS   300
#define PAD    3
#define RANK   11

static const sp_site_dims sites[] = {
    {-1, SP_MODULE_EMBED_TOKENS, VOCAB, HIDDEN},
    {-1, SP_MODULE_LM_HEAD, HIDDEN, VOCAB},
    {0, SP_MODULE_Q_PROJ, HIDDEN, 8},
};

/* What the adapter of one slot does. */
typedef struct kind {
    bool rows, pairs;
} kind;

typedef struct world {
    sp_dtype dtype;
    sp_geometry *geometry;
    sp_layout *layout;
    sp_device *device;
    sp_pool *pool;
    sp_exec *exec;
    sp_delta *delta;
    sp_plan *plan;
    void *served; /* [VOCAB, HIDDEN] */
    kind kinds[SLOTS];
    hand_adapter *adapters[SLOTS]; /* site 0: embed_tokens, 1: lm_head, where it has pairs */
    double rows[SLOTS][VOCAB][HIDDEN];
    bool is_replaced[SLOTS][VOCAB];
    int32_t row_slot[ROWS], token[ROWS];
    float row_scale[ROWS];
} world;

/* ---- making it ----------------------------------------------------------------------------- */

static void create_pool(world *w, sp_test_random *random)
{
    sp_layout_options layout_options;
    sp_pool_options pool_options;
    sp_error error;

    w->served = sp_calloc(VOCAB * HIDDEN, sp_dtype_bytes(w->dtype));
    assert_non_null(w->served);
    for (int64_t i = 0; i < VOCAB * HIDDEN; i++)
        hand_store(w->dtype, w->served, i, (double)sp_test_float(random));
    assert_ok(sp_geometry_create(1, 0, sites, 3, &w->geometry, &error), &error);
    sp_layout_options_default(&layout_options);
    layout_options.geometry = w->geometry;
    layout_options.modules = sp_geometry_modules(w->geometry);
    layout_options.rank = RANK;
    layout_options.dtype = w->dtype;
    layout_options.served.embed = layout_options.served.head =
        (sp_served_table){w->served, w->dtype, VOCAB, HIDDEN, false};
    assert_ok(sp_layout_create(&layout_options, &w->layout, &error), &error);
    assert_ok(sp_device_open_cpu(&w->device), NULL);
    sp_pool_options_default(&pool_options);
    pool_options.layout = w->layout;
    pool_options.device = w->device;
    pool_options.slots = SLOTS;
    pool_options.overlay_bytes = (size_t)1 << 21;
    assert_ok(sp_pool_create(&pool_options, &w->pool, &error), &error);
}

/* Random replaced rows for both tables, the same rows in both; their number is random too. */
static void add_overlay(world *w, int32_t slot, sp_image *image, sp_test_random *random)
{
    void *rows = sp_calloc(VOCAB * HIDDEN, sizeof(float));
    sp_adapter_table tables[2];
    int32_t ids[VOCAB], n = 0;
    sp_error error;

    assert_non_null(rows);
    for (int32_t id = 0; id < VOCAB; id++) {
        if (sp_test_below(random, 3) > (uint32_t)slot % 3)
            continue;
        w->is_replaced[slot][id] = true;
        for (int32_t c = 0; c < HIDDEN; c++) {
            hand_store(w->dtype, rows, n * HIDDEN + c, (double)sp_test_float(random));
            w->rows[slot][id][c] = hand_load(w->dtype, rows, n * HIDDEN + c);
        }
        ids[n++] = id;
    }
    for (int t = 0; t < 2; t++)
        tables[t] = (sp_adapter_table){
            .module = t == 0 ? SP_MODULE_EMBED_TOKENS : SP_MODULE_LM_HEAD,
            .trainable = {rows, w->dtype, n, HIDDEN, HIDDEN, 1},
            .token_ids = ids,
            .n_ids = n,
        };
    assert_ok(
        sp_overlay_build(tables, 2, sp_layout_served(w->layout), w->dtype, &image->overlay, &error),
        &error);
    image->bytes += sizeof *image->overlay + image->overlay->bytes;
    sp_free(rows);
}

static void load_slot(world *w, int32_t slot, sp_test_random *random)
{
    hand_pool pool = {w->geometry, w->layout, w->device, w->pool};
    hand_adapter *adapter = hand_adapter_create((uint64_t)slot + 1);
    sp_image *image;
    int32_t got;
    sp_error error;

    w->adapters[slot] = adapter;
    w->kinds[slot] = (kind){slot % 4 == 1 || slot % 4 == 3, slot % 4 >= 2};
    for (int32_t s = 0; s < 2 && w->kinds[slot].pairs; s++)
        hand_adapter_add(adapter, &sites[s], 1 + (int32_t)sp_test_below(random, RANK), 0.75f,
                         w->dtype, random);
    hand_adapter_add(adapter, &sites[2], 2, 1.0f, w->dtype, random);
    image = hand_pack(&pool, adapter);
    if (w->kinds[slot].rows)
        add_overlay(w, slot, image, random);
    assert_ok(sp_pool_load(w->pool, image, &got, NULL, &error), &error);
    assert_int_equal(got, slot);
    sp_image_destroy(image);
}

static world *world_create(sp_dtype dtype, const char *level, uint64_t seed)
{
    static const float scales[] = {0.0f, 0.5f, 1.0f, 1.0f, 3.0f};
    world *w = sp_calloc(1, sizeof *w);
    sp_test_random random = {seed};
    sp_delta_options options;
    sp_error error;

    assert_non_null(w);
    w->dtype = dtype;
    create_pool(w, &random);
    for (int32_t slot = 0; slot < SLOTS; slot++)
        load_slot(w, slot, &random);
    w->exec = hand_exec(2);
    sp_delta_options_default(&options);
    options.pool = w->pool;
    options.exec = w->exec;
    options.rows_max = ROWS;
    options.cpu_isa = level;
    assert_ok(sp_delta_create(&options, &w->delta, &error), &error);
    for (int32_t i = 0; i < ROWS; i++) {
        /* Every third row is slot 3's: more than a round's rows. */
        w->row_slot[i] = i % 3 == 0 ? 3 : (int32_t)sp_test_below(&random, SLOTS + 1) - 1;
        w->token[i] = (int32_t)sp_test_below(&random, VOCAB);
        w->row_scale[i] = scales[sp_test_below(&random, 5)];
    }
    assert_ok(sp_plan_create(ROWS, SLOTS, &w->plan), NULL);
    assert_ok(sp_plan_build_rows(w->plan, w->row_slot, w->row_scale, ROWS, SLOTS, &error), &error);
    return w;
}

static void world_destroy(world *w)
{
    sp_plan_destroy(w->plan);
    sp_delta_destroy(w->delta);
    sp_exec_destroy(w->exec);
    sp_pool_destroy(w->pool);
    sp_device_close(w->device);
    sp_layout_release(w->layout);
    sp_geometry_release(w->geometry);
    for (int32_t slot = 0; slot < SLOTS; slot++)
        hand_adapter_destroy(w->adapters[slot]);
    sp_free(w->served);
    sp_free(w);
}

static bool is_replaced(const world *w, int32_t row, int32_t id)
{
    return w->row_slot[row] >= 0 && w->row_scale[row] != 0.0f &&
           w->is_replaced[w->row_slot[row]][id];
}

/* The row's pair at site 0 or 1, or NULL. */
static const sp_adapter_site *pair_of(const world *w, int32_t row, int32_t site)
{
    int32_t slot = w->row_slot[row];

    if (slot < 0 || w->row_scale[row] == 0.0f || !w->kinds[slot].pairs)
        return NULL;
    return &w->adapters[slot]->sites[site];
}

static double ulp(sp_dtype dtype)
{
    return dtype == SP_DTYPE_BF16 ? 0x1p-7 : 0x1p-20; /* with room for the order of sums in F32 */
}

/* ---- embeddings ---------------------------------------------------------------------------- */

static void check_embedding(const world *w, int32_t row, const void *y, const void *y0)
{
    const sp_adapter_site *pair = pair_of(w, row, 0);
    int64_t first = (int64_t)row * (HIDDEN + PAD);

    for (int32_t c = 0; c < HIDDEN; c++) {
        double start = is_replaced(w, row, w->token[row])
                           ? w->rows[w->row_slot[row]][w->token[row]][c]
                           : hand_load(w->dtype, y0, first + c);
        double sum = 0, got = hand_load(w->dtype, y, first + c), bound;

        for (int32_t j = 0; pair && j < pair->rank; j++)
            sum += hand_load(w->dtype, pair->a.data, (int64_t)j * VOCAB + w->token[row]) *
                   hand_load(w->dtype, pair->b.data, (int64_t)c * pair->rank + j);
        sum *= pair ? (double)sp_effective_scale(pair->scale, w->row_scale[row]) : 0;
        bound = pair ? ulp(w->dtype) * (fabs(start + sum) + fabs(sum)) + 1e-6 : 0;
        if (!(fabs(got - (start + sum)) <= bound))
            fail_msg("row %d, column %d: %g, not %g", row, c, got, start + sum);
    }
    for (int32_t c = HIDDEN; c < HIDDEN + PAD; c++)
        assert_true(hand_load(w->dtype, y, first + c) == hand_load(w->dtype, y0, first + c));
}

static void check_embeddings(world *w, sp_test_random *random)
{
    size_t bytes = ROWS * (HIDDEN + PAD) * sp_dtype_bytes(w->dtype);
    void *y0 = sp_malloc(bytes), *y = sp_malloc(bytes);
    int32_t n_replaced = 0, n_pairs = 0;

    assert_true(y0 && y);
    for (int64_t i = 0; i < ROWS * (HIDDEN + PAD); i++)
        hand_store(w->dtype, y0, i, (double)sp_test_float(random));
    memcpy(y, y0, bytes);
    assert_ok(sp_delta_embed(w->delta, w->plan, w->token, y, HIDDEN + PAD), NULL);
    for (int32_t row = 0; row < ROWS; row++) {
        check_embedding(w, row, y, y0);
        n_replaced += is_replaced(w, row, w->token[row]);
        n_pairs += pair_of(w, row, 0) != NULL;
    }
    assert_true(n_replaced > 30 && n_pairs > 30);
    sp_free(y);
    sp_free(y0);
}

/* ---- logits -------------------------------------------------------------------------------- */

static void check_logits_row(const world *w, int32_t row, const void *x, const float *y,
                             const float *y0)
{
    const sp_adapter_site *pair = pair_of(w, row, 1);
    double xa[RANK] = {0};

    for (int32_t j = 0; pair && j < pair->rank; j++)
        for (int32_t c = 0; c < HIDDEN; c++)
            xa[j] += hand_load(w->dtype, x, row * (HIDDEN + PAD) + c) *
                     hand_load(w->dtype, pair->a.data, (int64_t)j * HIDDEN + c);
    for (int32_t id = 0; id < VOCAB; id++) {
        double start = (double)y0[id], size = 0, sum = 0, bound = 0;

        if (is_replaced(w, row, id)) {
            start = 0;
            for (int32_t c = 0; c < HIDDEN; c++) {
                double product = hand_load(w->dtype, x, row * (HIDDEN + PAD) + c) *
                                 w->rows[w->row_slot[row]][id][c];

                start += product;
                size += fabs(product);
            }
            bound = 1e-6 * size;
        }
        size = 0;
        for (int32_t j = 0; pair && j < pair->rank; j++) {
            double product =
                xa[j] * hand_load(w->dtype, pair->b.data, (int64_t)id * pair->rank + j);

            sum += product;
            size += fabs(product);
        }
        if (pair) {
            double scale = (double)sp_effective_scale(pair->scale, w->row_scale[row]);

            sum *= scale;
            bound += ulp(w->dtype) * scale * 2 * size + 1e-6 * (fabs(start) + 1);
        }
        if (!(fabs((double)y[id] - (start + sum)) <= bound))
            fail_msg("row %d, token %d: %g, not %g", row, id, (double)y[id], start + sum);
    }
    assert_memory_equal(y + VOCAB, y0 + VOCAB, PAD * sizeof *y);
}

static void check_logits(world *w, sp_test_random *random)
{
    size_t y_bytes = ROWS * (VOCAB + PAD) * sizeof(float);
    void *x = sp_malloc(ROWS * (HIDDEN + PAD) * sp_dtype_bytes(w->dtype));
    float *y0 = sp_malloc(y_bytes), *y = sp_malloc(y_bytes);

    assert_true(x && y0 && y);
    for (int64_t i = 0; i < ROWS * (HIDDEN + PAD); i++)
        hand_store(w->dtype, x, i, (double)sp_test_float(random));
    for (int64_t i = 0; i < ROWS * (VOCAB + PAD); i++)
        y0[i] = sp_test_float(random);
    memcpy(y, y0, y_bytes);
    assert_ok(sp_delta_head(w->delta, w->plan, x, HIDDEN + PAD, y, VOCAB + PAD), NULL);
    for (int32_t row = 0; row < ROWS; row++)
        check_logits_row(w, row, x, y + (int64_t)row * (VOCAB + PAD),
                         y0 + (int64_t)row * (VOCAB + PAD));
    sp_free(y);
    sp_free(y0);
    sp_free(x);
}

static void random_slots_match_the_reference(void **state)
{
    static const sp_dtype dtypes[] = {SP_DTYPE_F32, SP_DTYPE_BF16};
    uint64_t seed = 11;

    (void)state;
    for (const char *const *level = sp_kernels_levels(); *level; level++)
        for (int t = 0; t < 2; t++) {
            sp_test_random random = {seed++};
            size_t blocks = sp_alloc_blocks();
            world *w = world_create(dtypes[t], *level, seed++);

            check_embeddings(w, &random);
            check_logits(w, &random);
            world_destroy(w);
            assert_int_equal(sp_alloc_blocks(), blocks);
        }
}

/* ---- refusals ------------------------------------------------------------------------------ */

static void bad_calls_write_nothing(void **state)
{
    world *w = world_create(SP_DTYPE_F32, "scalar", 5);
    float *y = sp_calloc(ROWS * VOCAB, sizeof *y);
    float *zero = sp_calloc(ROWS * VOCAB, sizeof *zero);
    int32_t token = w->token[3];
    sp_delta_output output = {SP_MODULE_EMBED_TOKENS, y, VOCAB, SP_DTYPE_F32};

    (void)state;
    assert_true(y && zero);
    assert_true(sp_delta_has_tokens(w->delta, SP_MODULE_EMBED_TOKENS));
    assert_int_equal(sp_delta_embed(w->delta, w->plan, w->token, y, HIDDEN - 1), SP_ERR_STRIDE);
    assert_int_equal(sp_delta_head(w->delta, w->plan, y, HIDDEN - 1, y, VOCAB), SP_ERR_STRIDE);
    assert_int_equal(sp_delta_head(w->delta, w->plan, y, HIDDEN, y, VOCAB - 1), SP_ERR_STRIDE);
    w->token[3] = VOCAB; /* slot 3's row, whatever its scale: see below */
    w->row_scale[3] = 1.0f;
    assert_ok(sp_plan_build_rows(w->plan, w->row_slot, w->row_scale, ROWS, SLOTS, NULL), NULL);
    assert_int_equal(sp_delta_embed(w->delta, w->plan, w->token, y, HIDDEN), SP_ERR_ARGUMENT);
    w->token[3] = -1;
    assert_int_equal(sp_delta_embed(w->delta, w->plan, w->token, y, HIDDEN), SP_ERR_ARGUMENT);
    w->token[3] = token;
    /* A token is no row of x: embed_tokens is no linear site. */
    assert_int_equal(sp_delta_apply(w->delta, w->plan, -1, y, VOCAB, &output, 1), SP_ERR_ARGUMENT);
    assert_memory_equal(y, zero, ROWS * VOCAB * sizeof *y);
    sp_free(zero);
    sp_free(y);
    world_destroy(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_slots_match_the_reference),
        cmocka_unit_test(bad_calls_write_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
