/* test_overlay.c: which rows an adapter replaces, where they come from, and their image. */
#include "base/alloc.h"
#include "base/half.h"
#include "pool/overlay.h"
#include "support/test.h"

#include <string.h>

#define VOCAB  8
#define ROWS   10 /* of the adapter's own table */
#define HIDDEN 5

/* Element (row, col) of the served table: a small number that BF16 holds exactly. */
static float served_value(int32_t row, int32_t col)
{
    return (float)(8 * row + col) * 0.25f;
}

typedef struct tables {
    uint16_t served[VOCAB * HIDDEN]; /* bf16 */
    float own[ROWS * HIDDEN];
    float delta[4 * HIDDEN];
    int32_t ids[4];
    sp_served_table table;
    sp_adapter_table adapter;
    int32_t source[VOCAB];
    sp_overlay_counts counts;
} tables;

/* The adapter's full table equals the served one; two rows more; no trainable tokens. */
static void start(tables *t)
{
    *t = (tables){.adapter.kind = SP_SITE_EMBEDDING};
    for (int32_t i = 0; i < ROWS * HIDDEN; i++) {
        t->own[i] = served_value(i / HIDDEN, i % HIDDEN);
        if (i < VOCAB * HIDDEN)
            t->served[i] = sp_f32_to_bf16(t->own[i]);
    }
    for (int32_t i = 0; i < 4 * HIDDEN; i++)
        t->delta[i] = -1.0f - (float)i;
    t->table = (sp_served_table){sizeof t->table, t->served, SP_DTYPE_BF16, VOCAB, HIDDEN, false};
    t->adapter.full = (sp_factor){t->own, SP_DTYPE_F32, ROWS, HIDDEN, HIDDEN, 1};
    t->adapter.rows = ROWS;
}

static void train(tables *t, int32_t n, const int32_t *ids)
{
    memcpy(t->ids, ids, (size_t)n * sizeof *ids);
    t->adapter.trainable = (sp_factor){t->delta, SP_DTYPE_F32, n, HIDDEN, HIDDEN, 1};
    t->adapter.token_ids = t->ids;
    t->adapter.n_ids = n;
}

static void expect_source(tables *t, const int32_t *expected)
{
    sp_error error;

    assert_ok(sp_overlay_select(&t->adapter, &t->table, t->source, &t->counts, &error), &error);
    assert_memory_equal(t->source, expected, VOCAB * sizeof *expected);
}

#define S SP_ROW_SERVED
#define O SP_ROW_OWN

static void an_equal_table_overrides_nothing(void **state)
{
    tables t;

    (void)state;
    start(&t);
    expect_source(&t, (int32_t[VOCAB]){S, S, S, S, S, S, S, S});
    assert_int_equal(t.counts.overridden, 0);
    assert_int_equal(t.counts.different, 0);
    assert_int_equal(t.counts.dropped_rows, ROWS - VOCAB);
}

/* What lies behind the table's last row is not read: the rows there are the served ones. */
static void a_shorter_table_replaces_the_rows_it_has(void **state)
{
    tables t;

    (void)state;
    start(&t);
    t.adapter.full.rows = t.adapter.rows = VOCAB - 2;
    t.own[3 * HIDDEN] += 1;
    t.own[(VOCAB - 3) * HIDDEN + 1] += 1;
    t.own[(VOCAB - 2) * HIDDEN] += 1;
    t.own[(VOCAB - 1) * HIDDEN] += 1;
    expect_source(&t, (int32_t[VOCAB]){S, S, S, O, S, O, S, S});
    assert_int_equal(t.counts.different, 2);
    assert_int_equal(t.counts.dropped_rows, 0);
}

static void any_bit_counts_after_conversion(void **state)
{
    tables t;

    (void)state;
    start(&t);
    t.own[2 * HIDDEN + 4] += 0x1p-20f;       /* 5.0 in BF16 still */
    t.own[3 * HIDDEN + 1] *= 1.0f + 0x1p-7f; /* one BF16 step */
    t.own[0] = -0.0f;                        /* served: +0 */
    t.own[7 * HIDDEN + 4] = 99.0f;
    expect_source(&t, (int32_t[VOCAB]){O, S, S, O, S, S, S, O});
    assert_int_equal(t.counts.overridden, 3);
    assert_int_equal(t.counts.different, 3);
    /* The same adapter's table stored as BF16. */
    for (int32_t i = 0; i < ROWS * HIDDEN; i++)
        ((uint16_t *)(void *)t.own)[i] = sp_f32_to_bf16(t.own[i]);
    t.adapter.full.dtype = SP_DTYPE_BF16;
    expect_source(&t, (int32_t[VOCAB]){O, S, S, O, S, S, S, O});
}

static void noise_does_not_count_where_the_base_is_approximate(void **state)
{
    tables t;

    (void)state;
    start(&t);
    t.table.approximate = true;
    t.own[1 * HIDDEN] = served_value(1, 0) + 0.0625f;
    t.own[2 * HIDDEN] = served_value(2, 0) - 0.09375f;
    t.own[4 * HIDDEN + 4] = served_value(4, 4) - 0.109375f;
    t.own[6 * HIDDEN + 4] = served_value(6, 4) + 1.0f;
    expect_source(&t, (int32_t[VOCAB]){S, S, S, S, O, S, O, S});
}

static void a_trainable_token_takes_its_own_row(void **state)
{
    tables t;

    (void)state;
    start(&t);
    t.own[3 * HIDDEN] = 77.0f;
    t.own[5 * HIDDEN] = 77.0f;
    train(&t, 4, (int32_t[]){6, 3, 9, 0}); /* 9: in the adapter's rows, beyond the vocabulary */
    expect_source(&t, (int32_t[VOCAB]){3, S, S, 1, S, O, 0, S});
    assert_int_equal(t.counts.overridden, 4);
    assert_int_equal(t.counts.different, 2);
    assert_int_equal(t.counts.dropped_ids, 1);
}

static void refuse(tables *t, const char *code, int64_t position)
{
    sp_error error = {0};

    assert_true(sp_overlay_select(&t->adapter, &t->table, t->source, &t->counts, &error) < 0);
    assert_string_equal(error.code, code);
    assert_int_equal(error.position, position);
}

static void bad_tokens_and_shapes_are_refused(void **state)
{
    tables t;

    (void)state;
    start(&t);
    train(&t, 3, (int32_t[]){1, ROWS, 2});
    refuse(&t, "bad-token-index", 1);
    train(&t, 3, (int32_t[]){1, 2, -1});
    refuse(&t, "bad-token-index", 2);
    train(&t, 3, (int32_t[]){1, 2, 1});
    refuse(&t, "bad-token-index", 2);
    t.adapter.n_ids = 2;
    refuse(&t, "bad-token-index", -1);
    t.adapter.full.data = NULL; /* a tied head, with the tokens of embed_tokens */
    train(&t, 3, (int32_t[]){1, ROWS - 1, ROWS});
    refuse(&t, "bad-token-index", 2);
    train(&t, 2, (int32_t[]){1, ROWS - 1});
    expect_source(&t, (int32_t[VOCAB]){S, 0, S, S, S, S, S, S});
    assert_int_equal(t.counts.dropped_ids, 1);
    t.adapter.rows = 0; /* the served vocabulary is the adapter's */
    train(&t, 1, (int32_t[]){VOCAB});
    refuse(&t, "bad-token-index", 0);
    train(&t, 1, (int32_t[]){VOCAB - 1});
    expect_source(&t, (int32_t[VOCAB]){S, S, S, S, S, S, S, 0});
    start(&t);
    t.adapter.full.rows = 0;
    refuse(&t, "shape-mismatch", -1);
    start(&t);
    t.adapter.full.cols = HIDDEN - 1;
    refuse(&t, "shape-mismatch", -1);
    start(&t);
    t.table.data = NULL;
    refuse(&t, "engine-unsupported", -1);
}

/* ---- the image ----------------------------------------------------------------------------- */

static const int32_t *ids_of(const sp_overlay *overlay, const sp_overlay_part *part)
{
    return (const int32_t *)(const void *)((const char *)overlay->data + part->ids_offset_bytes);
}

static const int32_t *map_of(const sp_overlay *overlay, const sp_overlay_part *part)
{
    return (const int32_t *)(const void *)((const char *)overlay->data + part->map_offset_bytes);
}

static float row_value(const sp_overlay *overlay, const sp_overlay_part *part, int32_t row,
                       int32_t col)
{
    const char *rows = (const char *)overlay->data + part->rows_offset_bytes;
    int32_t i = row * part->hidden + col;

    return part->dtype == SP_DTYPE_F32 ? ((const float *)(const void *)rows)[i]
                                       : sp_bf16_to_f32(((const uint16_t *)(const void *)rows)[i]);
}

static sp_overlay *build(const tables *t, sp_dtype dtype)
{
    sp_overlay other, *overlay = &other; /* must be replaced */
    size_t bytes = 1;
    sp_error error;

    assert_ok(sp_overlay_build(&t->adapter, 1, &t->table, &t->table, dtype, &overlay, &error),
              &error);
    assert_ok(sp_overlay_measure(&t->adapter, 1, &t->table, &t->table, dtype, &bytes, &error),
              &error);
    assert_int_equal(bytes, overlay ? overlay->bytes : 0);
    return overlay;
}

static void the_image_holds_rows_map_and_ids(void **state)
{
    sp_overlay *overlay;
    sp_overlay_part part;
    tables t;

    (void)state;
    start(&t);
    t.own[5 * HIDDEN + 2] = 300.5f; /* 300 in BF16, ties to even */
    train(&t, 2, (int32_t[]){6, 1});
    overlay = build(&t, SP_DTYPE_BF16);
    part = overlay->embed;
    assert_int_equal(overlay->head.n, 0);
    assert_int_equal(part.n, 3);
    assert_int_equal(part.dtype, SP_DTYPE_BF16);
    assert_int_equal(overlay->bytes, 3 * 256);
    assert_int_equal((uintptr_t)overlay->data % 256, 0);
    assert_memory_equal(ids_of(overlay, &part), ((int32_t[]){1, 5, 6}), 3 * sizeof(int32_t));
    assert_memory_equal(map_of(overlay, &part), ((int32_t[VOCAB]){-1, 0, -1, -1, -1, 1, 2, -1}),
                        VOCAB * sizeof(int32_t));
    for (int32_t c = 0; c < HIDDEN; c++) {
        assert_true(row_value(overlay, &part, 0, c) == t.delta[HIDDEN + c]);
        assert_true(row_value(overlay, &part, 1, c) == (c == 2 ? 300.0f : served_value(5, c)));
        assert_true(row_value(overlay, &part, 2, c) == t.delta[c]);
    }
    sp_overlay_destroy(overlay);
    /* An F32 pool keeps what BF16 cannot hold, and BF16 where it can. */
    overlay = build(&t, SP_DTYPE_F32);
    assert_int_equal(overlay->embed.dtype, SP_DTYPE_F32);
    assert_true(row_value(overlay, &overlay->embed, 1, 2) == 300.5f);
    sp_overlay_destroy(overlay);
    t.own[5 * HIDDEN + 2] = 300.0f;
    overlay = build(&t, SP_DTYPE_F32);
    assert_int_equal(overlay->embed.dtype, SP_DTYPE_BF16);
    assert_true(row_value(overlay, &overlay->embed, 1, 2) == 300.0f);
    sp_overlay_destroy(overlay);
}

static void nothing_replaced_is_no_image(void **state)
{
    tables t;

    (void)state;
    start(&t);
    assert_null(build(&t, SP_DTYPE_BF16));
}

static void two_tables_stand_apart(void **state)
{
    sp_adapter_table list[2];
    sp_overlay *overlay;
    sp_error error = {0};
    tables t;

    (void)state;
    start(&t);
    t.own[4 * HIDDEN] = 9.0f;
    list[0] = list[1] = t.adapter;
    list[1].kind = SP_SITE_HEAD;
    list[1].full.data = NULL;
    train(&t, 2, (int32_t[]){7, 2});
    list[1].trainable = t.adapter.trainable;
    list[1].token_ids = t.ids;
    list[1].n_ids = 2;
    assert_ok(sp_overlay_build(list, 2, &t.table, &t.table, SP_DTYPE_BF16, &overlay, &error),
              &error);
    assert_int_equal(overlay->embed.n, 1);
    assert_int_equal(overlay->head.n, 2);
    assert_int_equal(ids_of(overlay, &overlay->embed)[0], 4);
    assert_memory_equal(ids_of(overlay, &overlay->head), ((int32_t[]){2, 7}), 2 * sizeof(int32_t));
    assert_true(row_value(overlay, &overlay->head, 0, 0) == t.delta[HIDDEN]);
    assert_int_equal(overlay->bytes, 6 * 256);
    sp_overlay_destroy(overlay);
    list[1].kind = SP_SITE_EMBEDDING;
    assert_int_equal(sp_overlay_build(list, 2, &t.table, &t.table, SP_DTYPE_BF16, &overlay, &error),
                     SP_ERR_REFUSED);
    assert_string_equal(error.code, "duplicate-tensor");
}

static void every_failed_allocation_is_an_error(void **state)
{
    size_t blocks = sp_alloc_blocks();
    sp_overlay *overlay = NULL;
    int n = 0;
    tables t;

    (void)state;
    start(&t);
    train(&t, 1, (int32_t[]){3});
    for (;; n++) {
        sp_status status;

        sp_alloc_fail_after(n);
        status = sp_overlay_build(&t.adapter, 1, &t.table, NULL, SP_DTYPE_BF16, &overlay, NULL);
        if (!sp_alloc_failed()) {
            sp_alloc_fail_after(-1);
            assert_int_equal(status, SP_OK);
            break;
        }
        assert_int_equal(status, SP_ERR_MEMORY);
        assert_int_equal(sp_alloc_blocks(), blocks);
    }
    assert_int_equal(n, 3);
    sp_overlay_destroy(overlay);
    assert_int_equal(sp_alloc_blocks(), blocks);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_equal_table_overrides_nothing),
        cmocka_unit_test(a_shorter_table_replaces_the_rows_it_has),
        cmocka_unit_test(any_bit_counts_after_conversion),
        cmocka_unit_test(noise_does_not_count_where_the_base_is_approximate),
        cmocka_unit_test(a_trainable_token_takes_its_own_row),
        cmocka_unit_test(bad_tokens_and_shapes_are_refused),
        cmocka_unit_test(the_image_holds_rows_map_and_ids),
        cmocka_unit_test(nothing_replaced_is_no_image),
        cmocka_unit_test(two_tables_stand_apart),
        cmocka_unit_test(every_failed_allocation_is_an_error),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
