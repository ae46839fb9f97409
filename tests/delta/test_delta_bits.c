/*
 * One row, one answer: the bytes of every row run alone, on one thread, are compared with the same
 * row in batches of any size and order, beside any neighbours, in any slot, in pools of other
 * ranks, on any number of threads, and with the single form. At every level and type.
 */
#include "support/delta_scene.h"

#include "kernels/cpu/kernels.h"

#include <stdlib.h>
#include <string.h>

enum { ROWS = 18, ADAPTERS = 7, RANK_MAX = 16, MANY = 1200 };

/* What every test compares with. */
typedef struct alone {
    delta_scene scene;
    const char *level;
    sp_exec *one_thread;
    void *y[ROWS][SCENE_SITES_MAX];
} alone;

static alone make_alone(sp_dtype dtype, const char *level)
{
    sp_test_random random = {77};
    alone base = {.level = level, .one_thread = hand_exec(1)};
    delta_rig rig;

    base.scene = (delta_scene){
        .dtype = dtype,
        .n_rows = ROWS,
        .n_adapters = ADAPTERS,
        .n_sites = 3,
        .dims = {{0, SP_MODULE_Q_PROJ, 333, 150},
                 {0, SP_MODULE_K_PROJ, 333, 40},
                 {0, SP_MODULE_V_PROJ, 333, 37}},
        .y_type = {dtype, dtype, SP_DTYPE_F32},
    };
    scene_fill(&base.scene, RANK_MAX, &random);
    rig = rig_create(&base.scene, level, base.one_thread, RANK_MAX, NULL, 1);
    for (int32_t row = 0; row < ROWS; row++)
        rig_apply(&rig, &row, 1, base.y[row]);
    rig_destroy(&rig);
    return base;
}

static void free_alone(alone *base)
{
    for (int32_t row = 0; row < ROWS; row++)
        for (int32_t i = 0; i < base->scene.n_sites; i++)
            free(base->y[row][i]);
    scene_free(&base->scene);
    sp_exec_destroy(base->one_thread);
}

/* Runs the rows as one batch; those that are not poisoned must have the bytes of their row alone.
 */
static void expect_same(const alone *base, delta_rig *rig, const int32_t *rows, int32_t n_rows)
{
    void *y[SCENE_SITES_MAX];

    rig_apply(rig, rows, n_rows, y);
    for (int32_t i = 0; i < base->scene.n_sites; i++) {
        size_t bytes = scene_y_row_bytes(&base->scene, i);

        for (int32_t at = 0; at < n_rows; at++)
            if (rows[at] >= 0)
                assert_memory_equal((char *)y[i] + (size_t)at * bytes, base->y[rows[at]][i], bytes);
        free(y[i]);
    }
}

static void shuffle(int32_t *values, int32_t n, sp_test_random *random)
{
    for (int32_t i = n - 1; i > 0; i--) {
        int32_t j = (int32_t)sp_test_below(random, (uint32_t)i + 1), other = values[j];

        values[j] = values[i];
        values[i] = other;
    }
}

static void count_up(int32_t *values, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        values[i] = i;
}

/* Every test body runs for every level and type. */
static void for_all(void (*body)(const alone *base))
{
    for (const char *const *level = sp_kernels_levels(); *level != NULL; level++)
        for (int dtype = SP_DTYPE_F32; dtype <= SP_DTYPE_F16; dtype++) {
            alone base = make_alone((sp_dtype)dtype, *level);

            body(&base);
            free_alone(&base);
        }
}

/* ---- the clauses --------------------------------------------------------------------------- */

static void check_order(const alone *base)
{
    sp_test_random random = {5};
    int32_t rows[ROWS];
    delta_rig rig = rig_create(&base->scene, base->level, base->one_thread, RANK_MAX, NULL, ROWS);

    count_up(rows, ROWS);
    for (int32_t round = 0; round < 8; round++) {
        expect_same(base, &rig, rows, ROWS - round);
        shuffle(rows, ROWS, &random);
    }
    rig_destroy(&rig);
}

static void batch_and_order_do_not_matter(void **state)
{
    (void)state;
    for_all(check_order);
}

static void check_slots(const alone *base)
{
    static const int32_t ranks[] = {16, 17, 64, 256};
    sp_test_random random = {6};
    int32_t rows[ROWS], slots[ADAPTERS];

    count_up(rows, ROWS);
    count_up(slots, ADAPTERS);
    for (size_t i = 0; i < sizeof ranks / sizeof ranks[0]; i++) {
        delta_rig rig;

        shuffle(slots, ADAPTERS, &random);
        rig = rig_create(&base->scene, base->level, base->one_thread, ranks[i], slots, 3 * ROWS);
        expect_same(base, &rig, rows, ROWS);
        rig_destroy(&rig);
    }
}

static void slot_and_pool_rank_do_not_matter(void **state)
{
    (void)state;
    for_all(check_slots);
}

static void check_threads(const alone *base)
{
    static const int32_t threads[] = {2, 3, 7};
    sp_test_random random = {7};
    int32_t rows[ROWS];

    count_up(rows, ROWS);
    for (size_t i = 0; i < sizeof threads / sizeof threads[0]; i++) {
        sp_exec *exec = hand_exec(threads[i]);
        delta_rig rig = rig_create(&base->scene, base->level, exec, RANK_MAX, NULL, ROWS);

        for (int32_t round = 0; round < 4; round++) {
            shuffle(rows, ROWS, &random);
            expect_same(base, &rig, rows, ROWS);
        }
        expect_same(base, &rig, rows, 1);
        rig_destroy(&rig);
        sp_exec_destroy(exec);
    }
}

static void threads_do_not_matter(void **state)
{
    (void)state;
    for_all(check_threads);
}

/* A host's executor that runs the last task first, and claims more threads than there are. */
static void run_backwards(void *user, sp_task_fn fn, void *fn_user, int32_t n_tasks)
{
    (void)user;
    for (int32_t task = n_tasks - 1; task >= 0; task--)
        fn(fn_user, task, task % 64);
}

static void check_host_executor(const alone *base)
{
    int32_t rows[ROWS];
    sp_exec *exec = NULL;
    delta_rig rig;

    assert_ok(sp_exec_create_host(64, run_backwards, NULL, &exec, NULL), NULL);
    count_up(rows, ROWS);
    rig = rig_create(&base->scene, base->level, exec, RANK_MAX, NULL, ROWS);
    expect_same(base, &rig, rows, ROWS);
    rig_destroy(&rig);
    sp_exec_destroy(exec);
}

static void task_order_does_not_matter(void **state)
{
    (void)state;
    for_all(check_host_executor);
}

static void check_nan_neighbours(const alone *base)
{
    int32_t rows[3 * ROWS];
    delta_rig rig =
        rig_create(&base->scene, base->level, base->one_thread, RANK_MAX, NULL, 3 * ROWS);

    for (int32_t row = 0; row < ROWS; row++) {
        rows[3 * row] = SCENE_NAN - row; /* the same adapter, on both sides */
        rows[3 * row + 1] = row;
        rows[3 * row + 2] = SCENE_NAN - row;
    }
    expect_same(base, &rig, rows, 3 * ROWS);
    rig_destroy(&rig);
}

static void nan_neighbours_do_not_matter(void **state)
{
    (void)state;
    for_all(check_nan_neighbours);
}

static void check_many(const alone *base)
{
    sp_test_random random = {8};
    int32_t *rows = malloc(MANY * sizeof *rows);
    sp_exec *exec = hand_exec(2);
    delta_rig rig = rig_create(&base->scene, base->level, exec, RANK_MAX, NULL, MANY);

    assert_non_null(rows);
    for (int32_t i = 0; i < MANY; i++)
        rows[i] = (int32_t)sp_test_below(&random, ROWS);
    expect_same(base, &rig, rows, MANY);
    for (int32_t i = 0; i < MANY; i++)
        rows[i] = 3; /* one adapter, more than two rounds of it */
    expect_same(base, &rig, rows, MANY);
    rig_destroy(&rig);
    sp_exec_destroy(exec);
    free(rows);
}

static void rounds_do_not_matter(void **state)
{
    (void)state;
    for_all(check_many);
}

static void compare_rows(const alone *base, const int32_t *rows, int32_t n_rows, void **y)
{
    for (int32_t i = 0; i < base->scene.n_sites; i++) {
        size_t bytes = scene_y_row_bytes(&base->scene, i);

        for (int32_t at = 0; at < n_rows; at++)
            assert_memory_equal((char *)y[i] + (size_t)at * bytes, base->y[rows[at]][i], bytes);
        free(y[i]);
    }
}

static void check_pieces(const alone *base)
{
    static const int32_t threads[] = {1, 5};
    sp_test_random random = {9};
    int32_t rows[MANY];
    void *y[SCENE_SITES_MAX];

    for (size_t i = 0; i < sizeof threads / sizeof threads[0]; i++) {
        sp_exec *exec = hand_exec(threads[i]); /* says how finely work is cut */
        delta_rig rig = rig_create(&base->scene, base->level, exec, RANK_MAX, NULL, MANY);

        count_up(rows, ROWS);
        for (int32_t n = ROWS; n > 0; n -= 4) {
            rig_apply_pieces(&rig, rows, n, y);
            compare_rows(base, rows, n, y);
            shuffle(rows, ROWS, &random);
        }
        for (int32_t at = 0; at < MANY; at++)
            rows[at] = at % ROWS;
        rig_apply_pieces(&rig, rows, 300, y);
        compare_rows(base, rows, 300, y);
        assert_false(rig.shares_x);
        rig_destroy(&rig);
        sp_exec_destroy(exec);
    }
}

/* One row's adapter, and a second one's behind it: x is packed for the host in the first case. */
static void check_shared_x(const alone *base)
{
    delta_rig rig = rig_create(&base->scene, base->level, base->one_thread, RANK_MAX, NULL, ROWS);
    int32_t rows[ROWS], first = 0, other;
    void *y[SCENE_SITES_MAX];

    while (base->scene.row_adapter[first] < 0)
        first++;
    other = first + 1;
    while (base->scene.row_adapter[other] == base->scene.row_adapter[first])
        other++;
    for (int32_t at = 0; at < ROWS; at++)
        rows[at] = first;
    for (int32_t n = 1; n <= ROWS; n += ROWS - 1) {
        rig_apply_pieces(&rig, rows, n, y);
        compare_rows(base, rows, n, y);
        assert_true(rig.shares_x);
    }
    rows[ROWS - 1] = other;
    rig_apply_pieces(&rig, rows, ROWS, y);
    compare_rows(base, rows, ROWS, y);
    assert_false(rig.shares_x);
    rig_destroy(&rig);
}

static void x_is_packed_once_for_one_adapter(void **state)
{
    (void)state;
    for_all(check_shared_x);
}

static void pieces_have_the_same_bits(void **state)
{
    (void)state;
    for_all(check_pieces);
}

static void expect_untouched(const alone *base, const int32_t *rows, int32_t n_rows, void **y)
{
    for (int32_t i = 0; i < base->scene.n_sites; i++) {
        size_t bytes = scene_y_row_bytes(&base->scene, i);

        for (int32_t at = 0; at < n_rows; at++)
            assert_memory_equal((char *)y[i] + (size_t)at * bytes,
                                (char *)base->scene.y0[i] + (size_t)rows[at] * bytes, bytes);
        free(y[i]);
    }
}

static void check_refused_pieces(const alone *base)
{
    int32_t rows[MANY];
    void *y[SCENE_SITES_MAX];
    delta_rig rig = rig_create(&base->scene, base->level, base->one_thread, RANK_MAX, NULL, MANY);

    for (int32_t at = 0; at < MANY; at++)
        rows[at] = at % ROWS;
    rig_apply_too_early(&rig, rows, ROWS, y);
    expect_untouched(base, rows, ROWS, y);
    rig_expect_too_large(&rig, rows, MANY, y);
    expect_untouched(base, rows, MANY, y);
    rig_destroy(&rig);
}

static void early_and_oversized_pieces_change_nothing(void **state)
{
    (void)state;
    for_all(check_refused_pieces);
}

/* The single form on the adapter's own tensors, whose stride is the rank and not the pool's. */
static void check_single(const alone *base)
{
    const delta_scene *scene = &base->scene;
    sp_error error;

    for (int32_t i = 0; i < ROWS * scene->n_sites; i++) {
        int32_t row = i / scene->n_sites, o = i % scene->n_sites;
        const sp_adapter_site *site = scene_site(scene, scene->row_adapter[row], o);
        size_t bytes = scene_y_row_bytes(scene, o);
        sp_delta_single_args args = {
            .struct_bytes = sizeof args,
            .rows = 1,
            .k_in = scene->dims[o].k_in,
            .n_out = scene->dims[o].n_out,
            .dtype = scene->dtype,
            .x_type = scene->dtype,
            .y_type = scene->y_type[o],
            .x_stride = scene->x_stride,
            .a_stride = scene->dims[o].k_in,
            .y_stride = scene->dims[o].n_out,
        };
        void *y = malloc(bytes);

        assert_non_null(y);
        memcpy(y, (char *)scene->y0[o] + (size_t)row * bytes, bytes);
        args.x = (char *)scene->x + (size_t)(row * scene->x_stride) * sp_dtype_bytes(scene->dtype);
        args.y = y;
        if (site != NULL) {
            args.rank = site->rank;
            args.a = site->a.data;
            args.b = site->b.data;
            args.b_stride = site->rank;
            args.scale = sp_effective_scale(site->scale, scene->row_scale[row]);
        }
        assert_ok(hand_single(&args, base->one_thread, base->level, &error), &error);
        assert_memory_equal(y, base->y[row][o], bytes);
        free(y);
    }
}

static void single_form_has_the_same_bits(void **state)
{
    (void)state;
    for_all(check_single);
}

/* The comparisons above are worth something only if rows differ and adapters act on them. */
static void check_alone(const alone *base)
{
    size_t bytes = scene_y_row_bytes(&base->scene, 0);
    int32_t n_changed = 0;

    for (int32_t row = 0; row < ROWS; row++)
        n_changed +=
            memcmp(base->y[row][0], (char *)base->scene.y0[0] + (size_t)row * bytes, bytes) != 0;
    assert_in_range(n_changed, ROWS / 3, ROWS - 1);
}

static void rows_differ_from_the_base(void **state)
{
    (void)state;
    for_all(check_alone);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_differ_from_the_base),
        cmocka_unit_test(batch_and_order_do_not_matter),
        cmocka_unit_test(slot_and_pool_rank_do_not_matter),
        cmocka_unit_test(threads_do_not_matter),
        cmocka_unit_test(task_order_does_not_matter),
        cmocka_unit_test(nan_neighbours_do_not_matter),
        cmocka_unit_test(rounds_do_not_matter),
        cmocka_unit_test(pieces_have_the_same_bits),
        cmocka_unit_test(x_is_packed_once_for_one_adapter),
        cmocka_unit_test(early_and_oversized_pieces_change_nothing),
        cmocka_unit_test(single_form_has_the_same_bits),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
