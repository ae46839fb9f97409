/*
 * The delta on random groups, shapes, ranks and slot mixes against a reference in double; rows
 * that no adapter touches, and the pads of all others, must keep their bytes.
 */
#include "support/delta_scene.h"

#include "kernels/cpu/kernels.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* fixtures/README.md: relative L2. */
static const double limits[] = {
    [SP_DTYPE_F32] = 1e-5,
    [SP_DTYPE_BF16] = 4e-3,
    [SP_DTYPE_F16] = 6e-4,
};

/* want [n_out] += scale * (x Aᵀ) Bᵀ of one row, in double throughout. */
static void add_reference(const delta_scene *scene, const sp_adapter_site *site, int32_t row,
                          double *want)
{
    double scale = (double)site->scale * (double)scene->row_scale[row];
    int32_t k_in = site->a.cols, rank = site->rank;

    for (int32_t j = 0; j < rank; j++) {
        double xa = 0;

        for (int32_t k = 0; k < k_in; k++)
            xa += hand_load(scene->dtype, scene->x, (int64_t)row * scene->x_stride + k) *
                  hand_load(scene->dtype, site->a.data, (int64_t)j * k_in + k);
        for (int32_t n = 0; n < site->b.rows; n++)
            want[n] += scale * xa * hand_load(scene->dtype, site->b.data, (int64_t)n * rank + j);
    }
}

typedef struct error_sum {
    double error, norm;
} error_sum;

static void check_row(const delta_scene *scene, int32_t i, int32_t row, const char *y,
                      error_sum *sum)
{
    const sp_adapter_site *site = scene_site(scene, scene->row_adapter[row], i);
    size_t bytes = scene_y_row_bytes(scene, i), element = sp_dtype_bytes(scene->y_type[i]);
    const char *y0 = (const char *)scene->y0[i] + (size_t)row * bytes;
    int32_t n_out = scene->dims[i].n_out;
    double *want;

    y += (size_t)row * bytes;
    assert_memory_equal(y + (size_t)n_out * element, y0 + (size_t)n_out * element,
                        SCENE_PAD * element);
    if (site == NULL) {
        assert_memory_equal(y, y0, bytes);
        return;
    }
    want = malloc((size_t)n_out * sizeof *want);
    assert_non_null(want);
    for (int32_t n = 0; n < n_out; n++)
        want[n] = hand_load(scene->y_type[i], y0, n);
    add_reference(scene, site, row, want);
    for (int32_t n = 0; n < n_out; n++) {
        double difference = hand_load(scene->y_type[i], y, n) - want[n];
        double start = hand_load(scene->y_type[i], y0, n);

        /* What rounds is what enters: a y that cancels is not held to its own size. */
        sum->error += difference * difference;
        sum->norm += fmax(want[n] * want[n], start * start);
    }
    free(want);
}

static void check_scene(const delta_scene *scene, int32_t rank_max, const char *level,
                        sp_exec *exec)
{
    delta_rig rig = rig_create(scene, level, exec, rank_max, NULL, scene->n_rows);
    int32_t *rows = malloc((size_t)scene->n_rows * sizeof *rows);
    void *y[SCENE_SITES_MAX];

    assert_non_null(rows);
    for (int32_t row = 0; row < scene->n_rows; row++)
        rows[row] = row;
    rig_apply(&rig, rows, scene->n_rows, y);
    for (int32_t i = 0; i < scene->n_sites; i++) {
        error_sum sum = {0, 1e-300};

        for (int32_t row = 0; row < scene->n_rows; row++)
            check_row(scene, i, row, y[i], &sum);
        if (!(sqrt(sum.error / sum.norm) <= limits[scene->dtype]))
            fail_msg("%s %s, %d rows, k %d, n %d: relative error %g", level,
                     sp_dtype_name(scene->dtype), (int)scene->n_rows, (int)scene->dims[0].k_in,
                     (int)scene->dims[i].n_out, sqrt(sum.error / sum.norm));
        free(y[i]);
    }
    free(rows);
    rig_destroy(&rig);
}

/* ---- shapes -------------------------------------------------------------------------------- */

typedef struct shape {
    int32_t rows, adapters, rank_max, k_in, n_sites, n_out[SCENE_SITES_MAX];
} shape;

static const shape shapes[] = {
    {1, 1, 1, 1, 1, {1}},
    {5, 3, 8, 3, 2, {1, 7}},
    {16, 16, 16, 257, 3, {131, 64, 1}},
    {33, 5, 256, 96, 1, {61}},
    {9, 2, 100, 640, 2, {97, 33}},
    {300, 40, 12, 64, 3, {24, 8, 40}},        /* more rows than one round */
    {17, 4, 33, 1024, 3, {2048, 1024, 1024}}, /* q, k, v of Qwen3-0.6B */
    {3, 2, 64, 3072, 1, {1024}},              /* its down_proj */
};

static void run_shape(const shape *s, sp_dtype dtype, sp_test_random *random, sp_exec *exec)
{
    static const sp_module modules[] = {SP_MODULE_Q_PROJ, SP_MODULE_K_PROJ, SP_MODULE_V_PROJ};
    delta_scene scene = {
        .dtype = dtype,
        .n_rows = s->rows,
        .n_adapters = s->adapters,
        .n_sites = s->n_sites,
    };

    for (int32_t i = 0; i < s->n_sites; i++) {
        scene.dims[i] = (site_dims){0, modules[i], s->k_in, s->n_out[i]};
        scene.y_type[i] = sp_test_below(random, 2) != 0 ? dtype : SP_DTYPE_F32;
    }
    scene_fill(&scene, s->rank_max, random);
    for (const char *const *level = sp_kernels_levels(); *level != NULL; level++)
        check_scene(&scene, s->rank_max, *level, exec);
    scene_free(&scene);
}

static void random_groups_match_double(void **state)
{
    sp_test_random random = {2024};
    sp_exec *exec = hand_exec(2);

    (void)state;
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (int dtype = SP_DTYPE_F32; dtype <= SP_DTYPE_F16; dtype++)
            run_shape(&shapes[i], (sp_dtype)dtype, &random, exec);
    sp_exec_destroy(exec);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_groups_match_double),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
