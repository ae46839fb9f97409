#include "support/token_world.h"

#include "base/alloc.h"
#include "pool/image.h"

#include <math.h>
#include <string.h>

/* ---- making it ----------------------------------------------------------------------------- */

static void create_pool(token_world *w, sp_test_random *random)
{
    sp_layout_options layout_options;
    sp_pool_options pool_options;
    sp_served_table embed = {sizeof embed, NULL, w->dtype, TOKEN_VOCAB, w->hidden, false}, head;
    size_t table_bytes = TOKEN_VOCAB * (size_t)w->hidden * sp_dtype_bytes(w->dtype);
    sp_error error;

    w->served = sp_calloc(2, table_bytes); /* the embedding, and a head of its own with its rows */
    assert_non_null(w->served);
    for (int64_t i = 0; i < TOKEN_VOCAB * w->hidden; i++)
        hand_store(w->dtype, w->served, i, (double)sp_test_float(random));
    w->geometry = known_geometry(0, w->sites, 3);
    sp_layout_options_default(&layout_options, sizeof layout_options);
    layout_options.geometry = w->geometry;
    layout_options.modules = sp_geometry_modules(w->geometry);
    layout_options.rank = TOKEN_RANK;
    layout_options.dtype = w->dtype;
    layout_options.images_for = w->device;
    memcpy((char *)w->served + table_bytes, w->served, table_bytes);
    head = embed;
    embed.data = w->served;
    head.data = (char *)w->served + table_bytes;
    layout_options.served_embed = &embed;
    layout_options.served_head = &head;
    assert_ok(sp_layout_create(&layout_options, &w->layout, &error), &error);
    if (w->device == NULL) {
        assert_ok(sp_device_open("cpu", NULL, &w->device, NULL), NULL);
        w->owns_device = true;
    }
    sp_pool_options_default(&pool_options, sizeof pool_options);
    pool_options.layout = w->layout;
    pool_options.device = w->device;
    pool_options.slots = TOKEN_SLOTS;
    pool_options.overlay_bytes = (size_t)1 << 25;
    assert_ok(sp_pool_create(&pool_options, &w->pool, &error), &error);
}

/* Random replaced rows for both tables, the same rows in both; their number is random too. */
static void add_overlay(token_world *w, int32_t slot, sp_image *image, sp_test_random *random)
{
    void *rows = sp_calloc(TOKEN_VOCAB * (size_t)w->hidden, sizeof(float));
    sp_adapter_table tables[2];
    int32_t ids[TOKEN_VOCAB], n = 0;
    sp_error error;

    assert_non_null(rows);
    for (int32_t id = 0; id < TOKEN_VOCAB; id++) {
        if (sp_test_below(random, 3) > (uint32_t)slot % 3)
            continue;
        w->is_replaced[slot][id] = true;
        for (int32_t c = 0; c < w->hidden; c++) {
            hand_store(w->dtype, rows, n * w->hidden + c, (double)sp_test_float(random));
            w->rows[slot][id][c] = hand_load(w->dtype, rows, n * w->hidden + c);
        }
        ids[n++] = id;
    }
    for (int t = 0; t < 2; t++)
        tables[t] = (sp_adapter_table){
            .struct_bytes = sizeof tables[t],
            .kind = t == 0 ? SP_SITE_EMBEDDING : SP_SITE_HEAD,
            .trainable = {rows, w->dtype, n, w->hidden, w->hidden, 1},
            .token_ids = ids,
            .n_ids = n,
        };
    assert_ok(sp_overlay_build_for(
                  w->device, tables, 2, sp_layout_served(w->layout, SP_SITE_EMBEDDING),
                  sp_layout_served(w->layout, SP_SITE_HEAD), w->dtype, &image->overlay, &error),
              &error);
    image->bytes += sizeof *image->overlay + image->overlay->bytes;
    sp_free(rows);
}

sp_image *token_world_image(token_world *w, int32_t slot, sp_test_random *random)
{
    hand_pool pool = {w->geometry, w->layout, w->device, w->pool, true};
    hand_adapter *adapter = hand_adapter_create((uint64_t)slot + 1);
    sp_image *image;

    hand_adapter_destroy(w->adapters[slot]);
    w->adapters[slot] = adapter;
    w->kinds[slot] = (token_kind){slot % 4 == 1 || slot % 4 == 3, slot % 4 >= 2};
    for (int32_t s = 0; s < 2 && w->kinds[slot].pairs; s++)
        hand_adapter_add(adapter, &w->sites[s], 1 + (int32_t)sp_test_below(random, TOKEN_RANK),
                         0.75f, w->dtype, random);
    hand_adapter_add(adapter, &w->sites[2], 2, 1.0f, w->dtype, random);
    image = hand_pack(&pool, adapter);
    memset(w->is_replaced[slot], 0, sizeof w->is_replaced[slot]);
    if (w->kinds[slot].rows)
        add_overlay(w, slot, image, random);
    return image;
}

static void load_slot(token_world *w, int32_t slot, sp_test_random *random)
{
    sp_image *image = token_world_image(w, slot, random);
    sp_slot_handle handle;
    sp_error error;

    assert_ok(sp_pool_load(w->pool, image, &handle, &error), &error);
    assert_int_equal(handle.slot, slot);
    sp_image_destroy(image);
}

token_world *token_world_create(sp_device *device, sp_dtype dtype, int32_t hidden, int32_t pad,
                                const char *level, uint64_t seed)
{
    static const float scales[] = {0.0f, 0.5f, 1.0f, 1.0f, 3.0f};
    token_world *w = sp_calloc(1, sizeof *w);
    sp_test_random random = {seed};
    sp_delta_options options;
    sp_error error;

    assert_non_null(w);
    w->dtype = dtype;
    w->hidden = hidden;
    w->pad = pad;
    w->device = device;
    w->sites[0] = (site_dims){-1, SP_MODULE_EMBED_TOKENS, TOKEN_VOCAB, hidden};
    w->sites[1] = (site_dims){-1, SP_MODULE_LM_HEAD, hidden, TOKEN_VOCAB};
    w->sites[2] = (site_dims){0, SP_MODULE_Q_PROJ, hidden, 8};
    create_pool(w, &random);
    for (int32_t slot = 0; slot < TOKEN_SLOTS; slot++)
        load_slot(w, slot, &random);
    w->exec = hand_exec(2);
    sp_delta_options_default(&options, sizeof options);
    options.x_f32 = true;
    options.pool = w->pool;
    options.exec = w->exec;
    options.rows_max = TOKEN_ROWS;
    options.cpu_isa = level;
    assert_ok(sp_delta_create(&options, &w->delta, &error), &error);
    for (int32_t i = 0; i < TOKEN_ROWS; i++) {
        /* Every third row is slot 3's: more than a round's rows. */
        w->row_slot[i] = i % 3 == 0 ? 3 : (int32_t)sp_test_below(&random, TOKEN_SLOTS + 1) - 1;
        w->token[i] = (int32_t)sp_test_below(&random, TOKEN_VOCAB);
        w->row_scale[i] = scales[sp_test_below(&random, 5)];
    }
    assert_ok(sp_plan_create(TOKEN_ROWS, TOKEN_SLOTS, &w->plan, NULL), NULL);
    hand_plan_rows(w->plan, w->pool, w->row_slot, w->row_scale, TOKEN_ROWS);
    return w;
}

void token_world_destroy(token_world *w)
{
    sp_plan_destroy(w->plan);
    sp_delta_destroy(w->delta);
    sp_exec_destroy(w->exec);
    sp_pool_destroy(w->pool);
    if (w->owns_device)
        sp_device_close(w->device);
    sp_layout_release(w->layout);
    sp_geometry_release(w->geometry);
    for (int32_t slot = 0; slot < TOKEN_SLOTS; slot++)
        hand_adapter_destroy(w->adapters[slot]);
    sp_free(w->served);
    sp_free(w);
}

static bool is_replaced(const token_world *w, int32_t row, int32_t id)
{
    return w->row_slot[row] >= 0 && w->row_scale[row] != 0.0f &&
           w->is_replaced[w->row_slot[row]][id];
}

/* The row's pair at site 0 or 1, or NULL. */
static const sp_adapter_site *pair_of(const token_world *w, int32_t row, int32_t site)
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

static void check_embedding(const token_world *w, int32_t row, const void *y, const void *y0)
{
    const sp_adapter_site *pair = pair_of(w, row, 0);
    int64_t first = (int64_t)row * (w->hidden + w->pad);

    for (int32_t c = 0; c < w->hidden; c++) {
        double start = is_replaced(w, row, w->token[row])
                           ? w->rows[w->row_slot[row]][w->token[row]][c]
                           : hand_load(w->dtype, y0, first + c);
        double sum = 0, got = hand_load(w->dtype, y, first + c), bound;

        for (int32_t j = 0; pair && j < pair->rank; j++)
            sum += hand_load(w->dtype, pair->a.data, (int64_t)j * TOKEN_VOCAB + w->token[row]) *
                   hand_load(w->dtype, pair->b.data, (int64_t)c * pair->rank + j);
        sum *= pair ? (double)sp_effective_scale(pair->scale, w->row_scale[row]) : 0;
        bound = pair ? ulp(w->dtype) * (fabs(start + sum) + fabs(sum)) + 1e-6 : 0;
        if (!(fabs(got - (start + sum)) <= bound))
            fail_msg("row %d, column %d: %g, not %g", row, c, got, start + sum);
    }
    for (int32_t c = w->hidden; c < w->hidden + w->pad; c++)
        assert_true(hand_load(w->dtype, y, first + c) == hand_load(w->dtype, y0, first + c));
}

void token_world_check_embeddings(token_world *w, token_embed_fn embed, sp_test_random *random)
{
    size_t bytes = TOKEN_ROWS * (size_t)(w->hidden + w->pad) * sp_dtype_bytes(w->dtype);
    void *y0 = sp_malloc(bytes), *y = sp_malloc(bytes);
    int32_t n_replaced = 0, n_pairs = 0;

    assert_true(y0 && y);
    for (int64_t i = 0; i < TOKEN_ROWS * (w->hidden + w->pad); i++)
        hand_store(w->dtype, y0, i, (double)sp_test_float(random));
    memcpy(y, y0, bytes);
    embed(w, y, bytes);
    for (int32_t row = 0; row < TOKEN_ROWS; row++) {
        check_embedding(w, row, y, y0);
        n_replaced += is_replaced(w, row, w->token[row]);
        n_pairs += pair_of(w, row, 0) != NULL;
    }
    assert_true(n_replaced > 30 && n_pairs > 30);
    sp_free(y);
    sp_free(y0);
}

/* ---- logits -------------------------------------------------------------------------------- */

static void check_logits_row(const token_world *w, int32_t row, const void *x, const float *y,
                             const float *y0)
{
    const sp_adapter_site *pair = pair_of(w, row, 1);
    double xa[TOKEN_RANK] = {0};

    for (int32_t j = 0; pair && j < pair->rank; j++)
        for (int32_t c = 0; c < w->hidden; c++)
            xa[j] += hand_load(w->dtype, x, row * (w->hidden + w->pad) + c) *
                     hand_load(w->dtype, pair->a.data, (int64_t)j * w->hidden + c);
    for (int32_t id = 0; id < TOKEN_VOCAB; id++) {
        double start = (double)y0[id], size = 0, sum = 0, bound = 0;

        if (is_replaced(w, row, id)) {
            start = 0;
            for (int32_t c = 0; c < w->hidden; c++) {
                double product = hand_load(w->dtype, x, row * (w->hidden + w->pad) + c) *
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
    assert_memory_equal(y + TOKEN_VOCAB, y0 + TOKEN_VOCAB, (size_t)w->pad * sizeof *y);
}

void token_world_check_logits(token_world *w, token_head_fn head, sp_test_random *random)
{
    size_t y_bytes = TOKEN_ROWS * (size_t)(TOKEN_VOCAB + w->pad) * sizeof(float);
    void *x = sp_malloc(TOKEN_ROWS * (size_t)(w->hidden + w->pad) * sp_dtype_bytes(w->dtype));
    float *y0 = sp_malloc(y_bytes), *y = sp_malloc(y_bytes);

    assert_true(x && y0 && y);
    for (int64_t i = 0; i < TOKEN_ROWS * (w->hidden + w->pad); i++)
        hand_store(w->dtype, x, i, (double)sp_test_float(random));
    for (int64_t i = 0; i < TOKEN_ROWS * (TOKEN_VOCAB + w->pad); i++)
        y0[i] = sp_test_float(random);
    memcpy(y, y0, y_bytes);
    head(w, x, y, y_bytes);
    for (int32_t row = 0; row < TOKEN_ROWS; row++)
        check_logits_row(w, row, x, y + (int64_t)row * (TOKEN_VOCAB + w->pad),
                         y0 + (int64_t)row * (TOKEN_VOCAB + w->pad));
    sp_free(y);
    sp_free(y0);
    sp_free(x);
}
