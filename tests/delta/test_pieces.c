/*
 * test_pieces.c: the halves give the bits of the whole, at every level, for steps of one round and
 * of more; an x of FP32 gives the bits of the rounded x in all forms; what is refused and why. The
 * pieces themselves are in test_delta_bits.c.
 */
#include "support/delta_scene.h"

#include "kernels/cpu/kernels.h"

#include <sidepath/delta_pieces.h>

#include <stdlib.h>
#include <string.h>

enum { ROWS = 40, MANY_ROWS = 700 };

static const site_dims dims[] = {
    {0, SP_MODULE_Q_PROJ, 70, 33}, {0, SP_MODULE_K_PROJ, 70, 17}, {0, SP_MODULE_V_PROJ, 70, 48}};

static delta_scene make_scene(sp_dtype dtype, int32_t n_rows, bool x_f32, uint64_t seed)
{
    delta_scene scene = {.dtype = dtype,
                         .n_rows = n_rows,
                         .n_adapters = 6,
                         .n_sites = 3,
                         .dims = {dims[0], dims[1], dims[2]},
                         .y_type = {dtype, SP_DTYPE_F32, dtype},
                         .x_f32 = x_f32};
    sp_test_random random = {seed};

    scene_fill(&scene, 13, &random);
    return scene;
}

static int32_t *all_rows(int32_t n_rows)
{
    int32_t *rows = malloc((size_t)n_rows * sizeof *rows);

    assert_non_null(rows);
    for (int32_t i = 0; i < n_rows; i++)
        rows[i] = i;
    return rows;
}

static void expect_equal(const delta_scene *scene, void **got, void **want, int32_t n_rows)
{
    for (int32_t i = 0; i < scene->n_sites; i++) {
        assert_memory_equal(got[i], want[i], (size_t)n_rows * scene_y_row_bytes(scene, i));
        free(got[i]);
    }
}

static void free_y(const delta_scene *scene, void **y)
{
    for (int32_t i = 0; i < scene->n_sites; i++)
        free(y[i]);
}

/* ---- bits ---------------------------------------------------------------------------------- */

static void halves_have_the_bits_of_the_whole(void **state)
{
    static const int32_t counts[] = {1, ROWS, MANY_ROWS};
    static const sp_dtype types[] = {SP_DTYPE_BF16, SP_DTYPE_F16, SP_DTYPE_F32};
    sp_exec *exec = hand_exec(3);

    (void)state;
    for (int i = 0; i < 9; i++)
        for (const char *const *level = sp_kernels_levels(); *level != NULL; level++) {
            int32_t n_rows = counts[i / 3];
            delta_scene scene = make_scene(types[i % 3], n_rows, false, 5);
            delta_rig rig = rig_create(&scene, *level, exec, 16, NULL, n_rows);
            int32_t *rows = all_rows(n_rows);
            void *whole[SCENE_SITES_MAX], *halves[SCENE_SITES_MAX];

            rig_apply(&rig, rows, n_rows, whole);
            rig_apply_halves(&rig, rows, n_rows, halves);
            expect_equal(&scene, halves, whole, n_rows);
            free_y(&scene, whole);
            free(rows);
            rig_destroy(&rig);
            scene_free(&scene);
        }
    sp_exec_destroy(exec);
}

/* The FP32 rows are those of the other scene, each a little off: they round to its x. */
static void an_f32_x_has_the_bits_of_the_rounded_one(void **state)
{
    static const sp_dtype types[] = {SP_DTYPE_BF16, SP_DTYPE_F16};

    (void)state;
    for (int i = 0; i < 4; i++)
        for (const char *const *level = sp_kernels_levels(); *level != NULL; level++) {
            int32_t n_rows = i / 2 == 0 ? ROWS : MANY_ROWS;
            delta_scene rounded = make_scene(types[i % 2], n_rows, false, 6);
            delta_scene scene = make_scene(types[i % 2], n_rows, true, 6);
            delta_rig rig = rig_create(&rounded, *level, NULL, 16, NULL, n_rows);
            delta_rig f32_rig = rig_create(&scene, *level, NULL, 16, NULL, n_rows);
            int32_t *rows = all_rows(n_rows);
            void *want[SCENE_SITES_MAX], *got[SCENE_SITES_MAX];

            rig_apply(&rig, rows, n_rows, want);
            rig_apply(&f32_rig, rows, n_rows, got);
            expect_equal(&scene, got, want, n_rows);
            rig_apply_halves(&f32_rig, rows, n_rows, got);
            expect_equal(&scene, got, want, n_rows);
            if (n_rows == ROWS) {
                rig_apply_pieces(&f32_rig, rows, n_rows, got);
                assert_false(f32_rig.shares_x);
                expect_equal(&scene, got, want, n_rows);
            }
            free_y(&scene, want);
            free(rows);
            rig_destroy(&rig);
            rig_destroy(&f32_rig);
            scene_free(&rounded);
            scene_free(&scene);
        }
}

/* More adapters of one row each than are expanded together, and a few of two rows among them. */
static void lone_rows_in_pieces_have_the_bits_of_the_whole(void **state)
{
    enum { LONE_ADAPTERS = 45, LONE_ROWS = 48 };
    static const sp_dtype types[] = {SP_DTYPE_BF16, SP_DTYPE_F16, SP_DTYPE_F32};
    sp_exec *exec = hand_exec(3);

    (void)state;
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
        for (const char *const *level = sp_kernels_levels(); *level != NULL; level++) {
            delta_scene scene = make_scene(types[i], LONE_ROWS, false, 8);
            sp_test_random random = {9};
            int32_t *rows = all_rows(LONE_ROWS);
            void *whole[SCENE_SITES_MAX], *pieces[SCENE_SITES_MAX];
            delta_rig rig;

            scene_free(&scene);
            scene.n_adapters = LONE_ADAPTERS;
            scene_fill(&scene, 13, &random);
            for (int32_t row = 0; row < LONE_ROWS; row++)
                scene.row_adapter[row] = row == 17 ? -1 : row % LONE_ADAPTERS;
            rig = rig_create(&scene, *level, exec, 16, NULL, LONE_ROWS);
            rig_apply(&rig, rows, LONE_ROWS, whole);
            rig_apply_pieces(&rig, rows, LONE_ROWS, pieces);
            expect_equal(&scene, pieces, whole, LONE_ROWS);
            free_y(&scene, whole);
            free(rows);
            rig_destroy(&rig);
            scene_free(&scene);
        }
    sp_exec_destroy(exec);
}

/* exec NULL is the caller alone, with the same bits. */
static void no_executor_is_the_caller_alone(void **state)
{
    delta_scene scene = make_scene(SP_DTYPE_BF16, ROWS, false, 7);
    sp_exec *exec = hand_exec(4);
    delta_rig alone = rig_create(&scene, NULL, NULL, 16, NULL, ROWS);
    delta_rig helped = rig_create(&scene, NULL, exec, 16, NULL, ROWS);
    int32_t *rows = all_rows(ROWS);
    void *want[SCENE_SITES_MAX], *got[SCENE_SITES_MAX];

    (void)state;
    rig_apply(&helped, rows, ROWS, want);
    rig_apply(&alone, rows, ROWS, got);
    expect_equal(&scene, got, want, ROWS);
    free_y(&scene, want);
    free(rows);
    rig_destroy(&alone);
    rig_destroy(&helped);
    sp_exec_destroy(exec);
    scene_free(&scene);
}

/* ---- refusals ------------------------------------------------------------------------------ */

/* One batch of the scene, with its call. */
typedef struct half_test {
    delta_scene scene;
    delta_rig rig;
    rig_batch batch;
    sp_plan *plan;
    sp_delta_output outputs[SCENE_SITES_MAX + 2];
    sp_delta_call call;
} half_test;

static void begin_half_test(half_test *t)
{
    int32_t *rows = all_rows(ROWS);

    t->scene = make_scene(SP_DTYPE_BF16, ROWS, false, 8);
    t->rig = rig_create(&t->scene, NULL, NULL, 16, NULL, ROWS);
    t->batch = rig_gather(&t->rig, rows, ROWS);
    assert_ok(sp_plan_create(ROWS, t->rig.n_slots, &t->plan, NULL), NULL);
    hand_plan_rows(t->plan, t->rig.pool.pool, t->batch.seq_slot, t->batch.row_scale, ROWS);
    rig_outputs(&t->rig, t->batch.y, t->outputs);
    t->outputs[3] = t->outputs[4] = t->outputs[2];
    t->call = rig_call(&t->rig, t->plan, t->batch.x, t->outputs);
    free(rows);
}

static void end_half_test(half_test *t)
{
    free_y(&t->scene, t->batch.y);
    rig_batch_free(&t->batch);
    sp_plan_destroy(t->plan);
    rig_destroy(&t->rig);
    scene_free(&t->scene);
}

static void an_expand_needs_its_shrink(void **state)
{
    sp_delta_call other;
    sp_error error;
    half_test t;

    (void)state;
    begin_half_test(&t);
    other = t.call;
    other.n_outputs = 2;
    assert_int_equal(sp_delta_expand(t.rig.delta, &t.call, &error), SP_ERR_STATE);
    assert_non_null(strstr(error.text, "sp_delta_shrink"));
    assert_ok(sp_delta_shrink(t.rig.delta, &t.call, &error), &error);
    assert_int_equal(sp_delta_expand(t.rig.delta, &other, &error), SP_ERR_STATE);
    assert_string_equal(error.subject, "outputs");
    assert_ok(sp_delta_expand(t.rig.delta, &t.call, &error), &error);
    assert_int_equal(sp_delta_expand(t.rig.delta, &t.call, &error), SP_ERR_STATE);
    /* Any other call ends it. */
    assert_ok(sp_delta_shrink(t.rig.delta, &t.call, &error), &error);
    assert_ok(sp_delta_apply(t.rig.delta, &t.call, &error), &error);
    assert_int_equal(sp_delta_expand(t.rig.delta, &t.call, &error), SP_ERR_STATE);
    end_half_test(&t);
}

/* Under the same plan, built anew, the shrink's rows are not those of the expand any more. */
static void an_expand_refuses_a_plan_that_was_built_anew(void **state)
{
    int32_t *rows = all_rows(ROWS);
    rig_batch before;
    sp_error error;
    half_test t;

    (void)state;
    begin_half_test(&t);
    before = rig_gather(&t.rig, rows, ROWS);
    assert_ok(sp_delta_shrink(t.rig.delta, &t.call, &error), &error);
    hand_plan_rows(t.plan, t.rig.pool.pool, t.batch.seq_slot, t.batch.row_scale, 1);
    assert_int_equal(sp_delta_expand(t.rig.delta, &t.call, &error), SP_ERR_STATE);
    assert_non_null(strstr(error.text, "shrink again"));
    for (int32_t i = 0; i < 3; i++)
        assert_memory_equal(t.batch.y[i], before.y[i], ROWS * scene_y_row_bytes(&t.scene, i));
    assert_ok(sp_delta_shrink(t.rig.delta, &t.call, &error), &error);
    assert_ok(sp_delta_expand(t.rig.delta, &t.call, &error), &error);
    free_y(&t.scene, before.y);
    rig_batch_free(&before);
    free(rows);
    end_half_test(&t);
}

static void a_half_takes_four_outputs(void **state)
{
    sp_error error;
    half_test t;

    (void)state;
    begin_half_test(&t);
    t.call.n_outputs = 5;
    assert_int_equal(sp_delta_shrink(t.rig.delta, &t.call, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "n_outputs");
    assert_non_null(strstr(error.text, "5"));
    t.call.n_outputs = 4;
    assert_ok(sp_delta_shrink(t.rig.delta, &t.call, &error), &error);
    end_half_test(&t);
}

/* An expand's y is the expand's: the shrink's is neither read nor written. */
static void an_expand_has_a_y_of_its_own(void **state)
{
    void *want[SCENE_SITES_MAX], *poisoned[SCENE_SITES_MAX];
    int32_t *rows = all_rows(ROWS);
    sp_error error;
    half_test t;

    (void)state;
    begin_half_test(&t);
    rig_apply(&t.rig, rows, ROWS, want);
    for (int32_t i = 0; i < 3; i++) {
        size_t bytes = ROWS * scene_y_row_bytes(&t.scene, i);

        poisoned[i] = malloc(bytes);
        assert_non_null(poisoned[i]);
        memset(poisoned[i], 0xa5, bytes);
        t.outputs[i].y = poisoned[i];
    }
    assert_ok(sp_delta_shrink(t.rig.delta, &t.call, &error), &error);
    rig_outputs(&t.rig, t.batch.y, t.outputs);
    assert_ok(sp_delta_expand(t.rig.delta, &t.call, &error), &error);
    for (int32_t i = 0; i < 3; i++) {
        size_t bytes = ROWS * scene_y_row_bytes(&t.scene, i);

        assert_memory_equal(t.batch.y[i], want[i], bytes);
        for (size_t b = 0; b < bytes; b++)
            assert_int_equal(((unsigned char *)poisoned[i])[b], 0xa5);
        free(poisoned[i]);
    }
    free_y(&t.scene, want);
    free(rows);
    end_half_test(&t);
}

/* ---- around a product ---------------------------------------------------------------------- */

/* A product that leaves y as the batch has it. */
typedef struct counted_product {
    int calls;
    sp_status status;
} counted_product;

static sp_status count_product(void *user, const struct sp_cuda_group *group, bool *out_folded)
{
    counted_product *product = user;

    assert_null(group);
    assert_false(*out_folded);
    product->calls++;
    return product->status;
}

static void an_apply_around_a_product_has_its_bits(void **state)
{
    counted_product product = {0, SP_OK}, broken = {0, SP_ERR_DEVICE};
    void *want[SCENE_SITES_MAX];
    int32_t *rows = all_rows(ROWS);
    rig_batch before;
    sp_error error;
    half_test t;

    (void)state;
    begin_half_test(&t);
    before = rig_gather(&t.rig, rows, ROWS);
    rig_apply(&t.rig, rows, ROWS, want);
    assert_int_equal(sp_delta_apply_around(t.rig.delta, &t.call, count_product, &broken, &error),
                     SP_ERR_DEVICE);
    for (int32_t i = 0; i < 3; i++)
        assert_memory_equal(t.batch.y[i], before.y[i], ROWS * scene_y_row_bytes(&t.scene, i));
    assert_ok(sp_delta_apply_around(t.rig.delta, &t.call, count_product, &product, &error), &error);
    assert_int_equal(product.calls, 1);
    t.call.n_outputs = SP_DELTA_GROUP_MAX + 1;
    assert_int_equal(sp_delta_apply_around(t.rig.delta, &t.call, count_product, &product, &error),
                     SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "n_outputs");
    assert_int_equal(product.calls, 1);
    for (int32_t i = 0; i < 3; i++)
        assert_memory_equal(t.batch.y[i], want[i], ROWS * scene_y_row_bytes(&t.scene, i));
    free_y(&t.scene, want);
    free_y(&t.scene, before.y);
    rig_batch_free(&before);
    free(rows);
    end_half_test(&t);
}

static void an_f32_x_without_the_option_is_unsupported(void **state)
{
    sp_error error;
    half_test t;

    (void)state;
    begin_half_test(&t);
    t.call.x_type = SP_DTYPE_F32;
    assert_int_equal(sp_delta_apply(t.rig.delta, &t.call, &error), SP_ERR_UNSUPPORTED);
    assert_string_equal(error.subject, "x_type");
    assert_non_null(strstr(error.text, "x_f32"));
    t.call.x_type = SP_DTYPE_F16;
    assert_int_equal(sp_delta_apply(t.rig.delta, &t.call, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "x_type");
    end_half_test(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(halves_have_the_bits_of_the_whole),
        cmocka_unit_test(an_f32_x_has_the_bits_of_the_rounded_one),
        cmocka_unit_test(lone_rows_in_pieces_have_the_bits_of_the_whole),
        cmocka_unit_test(no_executor_is_the_caller_alone),
        cmocka_unit_test(an_expand_needs_its_shrink),
        cmocka_unit_test(an_expand_refuses_a_plan_that_was_built_anew),
        cmocka_unit_test(a_half_takes_four_outputs),
        cmocka_unit_test(an_expand_has_a_y_of_its_own),
        cmocka_unit_test(an_apply_around_a_product_has_its_bits),
        cmocka_unit_test(an_f32_x_without_the_option_is_unsupported),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
