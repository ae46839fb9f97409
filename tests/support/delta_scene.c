#include "support/delta_scene.h"

#include "kernels/cpu/kernels.h"

#include <sidepath/delta_pieces.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void *must_alloc(size_t count, size_t bytes)
{
    void *memory = calloc(count, bytes);

    assert_non_null(memory);
    return memory;
}

/* ---- scenes -------------------------------------------------------------------------------- */

int32_t scene_pad(const delta_scene *scene)
{
    return scene->pad != 0 ? scene->pad : SCENE_PAD;
}

static void *random_matrix(sp_dtype dtype, int32_t rows, int32_t cols, int32_t stride, double pad,
                           sp_test_random *random)
{
    void *matrix = must_alloc((size_t)rows * (size_t)stride, sp_dtype_bytes(dtype));

    for (int64_t i = 0; i < (int64_t)rows * stride; i++)
        hand_store(dtype, matrix, i, i % stride < cols ? (double)sp_test_float(random) : pad);
    return matrix;
}

static hand_adapter *random_adapter(const delta_scene *scene, int32_t index, int32_t rank_max,
                                    sp_test_random *random)
{
    hand_adapter *adapter = hand_adapter_create((uint64_t)index + 1);

    for (int32_t i = 0; i < scene->n_sites; i++) {
        int32_t rank = scene->ranks != NULL
                           ? scene->ranks[index]
                           : 1 + (int32_t)sp_test_below(random, (uint32_t)rank_max);
        float scale = 0.25f + 0.375f * (float)sp_test_below(random, 8);

        if (scene->ranks != NULL ? rank > 0 : sp_test_below(random, 5) != 0)
            hand_adapter_add(adapter, &scene->dims[i], rank, scale, scene->dtype, random);
    }
    return adapter;
}

void scene_fill(delta_scene *scene, int32_t rank_max, sp_test_random *random)
{
    int32_t pad = scene_pad(scene);

    scene->x_stride = scene->dims[0].k_in + pad;
    scene->x = random_matrix(scene->dtype, scene->n_rows, scene->dims[0].k_in, scene->x_stride, NAN,
                             random);
    for (int32_t i = 0; i < scene->n_sites; i++)
        scene->y0[i] = random_matrix(scene->y_type[i], scene->n_rows, scene->dims[i].n_out,
                                     scene->dims[i].n_out + pad, 7.0, random);
    for (int32_t i = 0; i < scene->n_adapters; i++)
        scene->adapters[i] = random_adapter(scene, i, rank_max, random);
    scene->row_adapter = must_alloc((size_t)scene->n_rows, sizeof *scene->row_adapter);
    scene->row_scale = must_alloc((size_t)scene->n_rows, sizeof *scene->row_scale);
    for (int32_t row = 0; row < scene->n_rows; row++) {
        scene->row_adapter[row] =
            (int32_t)sp_test_below(random, (uint32_t)scene->n_adapters + 1) - 1;
        scene->row_scale[row] = sp_test_below(random, 2) != 0 ? 1.0f : 0.5f;
    }
}

void scene_free(delta_scene *scene)
{
    for (int32_t i = 0; i < scene->n_adapters; i++)
        hand_adapter_destroy(scene->adapters[i]);
    for (int32_t i = 0; i < scene->n_sites; i++)
        free(scene->y0[i]);
    free(scene->row_scale);
    free(scene->row_adapter);
    free(scene->x);
}

const sp_adapter_site *scene_site(const delta_scene *scene, int32_t adapter, int32_t i)
{
    for (int32_t s = 0; adapter >= 0 && s < scene->adapters[adapter]->n_sites; s++)
        if (scene->adapters[adapter]->sites[s].module == sp_module_name(scene->dims[i].module))
            return &scene->adapters[adapter]->sites[s];
    return NULL;
}

size_t scene_y_row_bytes(const delta_scene *scene, int32_t i)
{
    return (size_t)(scene->dims[i].n_out + scene_pad(scene)) * sp_dtype_bytes(scene->y_type[i]);
}

/* ---- rigs ---------------------------------------------------------------------------------- */

/* The pool is made; loads it and makes the delta. */
static void fill_rig(delta_rig *rig, const int32_t *slot_order, sp_delta_options *options)
{
    const delta_scene *scene = rig->scene;
    sp_error error;

    for (int32_t slot = 0; slot < rig->n_slots; slot++) {
        int32_t adapter = slot_order != NULL ? slot_order[slot] : slot;

        assert_int_equal(hand_load_adapter(&rig->pool, scene->adapters[adapter]).slot, slot);
        rig->slot_of[adapter] = slot;
    }
    options->pool = rig->pool.pool;
    assert_ok(sp_delta_create(options, &rig->delta, &error), &error);
}

delta_rig rig_create(const delta_scene *scene, const char *level, sp_exec *exec, int32_t pool_rank,
                     const int32_t *slot_order, int32_t rows_max)
{
    delta_rig rig = {.scene = scene, .level = level, .n_slots = scene->n_adapters};
    sp_delta_options options;

    rig.pool =
        hand_pool_create(scene->dims, (size_t)scene->n_sites, pool_rank, scene->dtype, rig.n_slots);
    sp_delta_options_default(&options, sizeof options);
    options.exec = exec;
    options.rows_max = rows_max;
    options.cpu_isa = level;
    options.x_f32 = scene->x_f32;
    fill_rig(&rig, slot_order, &options);
    return rig;
}

delta_rig rig_create_on(sp_device *device, const delta_scene *scene, int32_t pool_rank,
                        const int32_t *slot_order, int32_t rows_max)
{
    delta_rig rig = {.scene = scene, .n_slots = scene->n_adapters};
    sp_delta_options options;

    rig.pool = hand_pool_create_on(device, scene->dims, (size_t)scene->n_sites, pool_rank,
                                   scene->dtype, rig.n_slots);
    sp_delta_options_default(&options, sizeof options);
    options.rows_max = rows_max;
    options.x_f32 = scene->x_f32;
    fill_rig(&rig, slot_order, &options);
    return rig;
}

void rig_destroy(delta_rig *rig)
{
    sp_delta_destroy(rig->delta);
    hand_pool_destroy(&rig->pool);
}

sp_dtype scene_x_type(const delta_scene *scene)
{
    return scene->x_f32 ? SP_DTYPE_F32 : scene->dtype;
}

/* Off by a quarter, at most, of what lies between two numbers of the type. */
static void widen_row(const delta_scene *scene, int32_t row, float *x)
{
    double off = scene->dtype == SP_DTYPE_F16 ? 0x1p-13 : 0x1p-10;

    for (int32_t k = 0; k < scene->x_stride; k++) {
        double value = hand_load(scene->dtype, scene->x, (int64_t)row * scene->x_stride + k);

        x[k] = (float)(value + (k % 2 == 0 ? off : -off) * value);
    }
}

static void gather_row(const delta_rig *rig, int32_t which, int32_t at, rig_batch *batch)
{
    const delta_scene *scene = rig->scene;
    int32_t row = which >= 0 ? which : SCENE_NAN - which;
    int32_t adapter = scene->row_adapter[row];
    size_t x_bytes = (size_t)scene->x_stride * sp_dtype_bytes(scene_x_type(scene));
    char *x = batch->x + (size_t)at * x_bytes;

    batch->seq_slot[at] = adapter >= 0 ? rig->slot_of[adapter] : SP_SLOT_BASE;
    batch->row_scale[at] = scene->row_scale[row];
    if (scene->x_f32)
        widen_row(scene, row, (float *)(void *)x);
    else
        memcpy(x, (const char *)scene->x + (size_t)row * x_bytes, x_bytes);
    for (int32_t k = 0; which < 0 && k < scene->x_stride; k++)
        hand_store(scene_x_type(scene), x, k, NAN);
    for (int32_t i = 0; i < scene->n_sites; i++) {
        size_t bytes = scene_y_row_bytes(scene, i);

        memcpy((char *)batch->y[i] + (size_t)at * bytes,
               (const char *)scene->y0[i] + (size_t)row * bytes, bytes);
    }
}

rig_batch rig_gather(const delta_rig *rig, const int32_t *rows, int32_t n_rows)
{
    const delta_scene *scene = rig->scene;
    size_t n = (size_t)n_rows;
    rig_batch batch = {
        .seq_slot = must_alloc(n, sizeof(int32_t)),
        .row_scale = must_alloc(n, sizeof(float)),
        .x = must_alloc(n * (size_t)scene->x_stride, sp_dtype_bytes(scene_x_type(scene))),
    };

    for (int32_t i = 0; i < scene->n_sites; i++)
        batch.y[i] = must_alloc(n, scene_y_row_bytes(scene, i));
    for (int32_t at = 0; at < n_rows; at++)
        gather_row(rig, rows[at], at, &batch);
    return batch;
}

void rig_batch_free(rig_batch *batch)
{
    free(batch->x);
    free(batch->row_scale);
    free(batch->seq_slot);
}

void rig_outputs(const delta_rig *rig, void *const *y, sp_delta_output *out_outputs)
{
    const delta_scene *scene = rig->scene;

    for (int32_t i = 0; i < scene->n_sites; i++)
        out_outputs[i] = (sp_delta_output){
            .struct_bytes = sizeof *out_outputs,
            .site = known_site(rig->pool.geometry, scene->dims[i].layer, scene->dims[i].module),
            .y = y[i],
            .y_stride = scene->dims[i].n_out + scene_pad(scene),
            .y_type = scene->y_type[i],
        };
}

sp_delta_call rig_call(const delta_rig *rig, const sp_plan *plan, const void *x,
                       const sp_delta_output *outputs)
{
    return hand_call(plan, scene_x_type(rig->scene), x, rig->scene->x_stride, outputs,
                     rig->scene->n_sites);
}

/* The whole of sp_delta_apply, or another way to the same. */
typedef void (*apply_fn)(delta_rig *rig, const sp_plan *plan, const void *x,
                         const sp_delta_output *outputs);

static void run_rows(delta_rig *rig, const int32_t *rows, int32_t n_rows, void **out_y,
                     apply_fn apply)
{
    const delta_scene *scene = rig->scene;
    rig_batch batch = rig_gather(rig, rows, n_rows);
    sp_delta_output outputs[SCENE_SITES_MAX];
    sp_plan *plan = NULL;

    for (int32_t i = 0; i < scene->n_sites; i++)
        out_y[i] = batch.y[i];
    rig_outputs(rig, out_y, outputs);
    assert_ok(sp_plan_create(n_rows, rig->n_slots, &plan, NULL), NULL);
    hand_plan_rows(plan, rig->pool.pool, batch.seq_slot, batch.row_scale, n_rows);
    apply(rig, plan, batch.x, outputs);
    sp_plan_destroy(plan);
    rig_batch_free(&batch);
}

static void apply_whole(delta_rig *rig, const sp_plan *plan, const void *x,
                        const sp_delta_output *outputs)
{
    sp_delta_call call = rig_call(rig, plan, x, outputs);
    sp_error error;

    assert_ok(sp_delta_apply(rig->delta, &call, &error), &error);
}

void rig_apply(delta_rig *rig, const int32_t *rows, int32_t n_rows, void **out_y)
{
    run_rows(rig, rows, n_rows, out_y, apply_whole);
}

static void apply_halves(delta_rig *rig, const sp_plan *plan, const void *x,
                         const sp_delta_output *outputs)
{
    sp_delta_call call = rig_call(rig, plan, x, outputs);
    sp_error error;

    assert_ok(sp_delta_shrink(rig->delta, &call, &error), &error);
    call.x = NULL; /* an expand does not read it */
    assert_ok(sp_delta_expand(rig->delta, &call, &error), &error);
}

void rig_apply_halves(delta_rig *rig, const int32_t *rows, int32_t n_rows, void **out_y)
{
    run_rows(rig, rows, n_rows, out_y, apply_halves);
}

/* Expands one output in the shortest pieces there are, last one first. */
static void expand_backwards(delta_rig *rig, int32_t output, int32_t n_out, bool expected)
{
    int32_t begin = (n_out - 1) / SP_DELTA_COLUMN_STEP * SP_DELTA_COLUMN_STEP;

    for (int32_t end = n_out; begin >= 0; end = begin, begin -= SP_DELTA_COLUMN_STEP)
        assert_int_equal(sp_delta_pieces_expand(rig->delta, output, begin, end), expected);
}

/* What the pieces packed, against the kernels' own form of all rows. */
static void check_packed_x(const delta_rig *rig, int32_t n_rows, const void *x,
                           const void *packed_x)
{
    const delta_scene *scene = rig->scene;
    int32_t k = scene->dims[0].k_in;
    const sp_kernels *kernels;
    size_t bytes;
    void *expected;

    assert_ok(sp_kernels_get(rig->level, &kernels, NULL), NULL);
    bytes = kernels->x_pack_bytes(scene->dtype, scene->dtype, n_rows, k);
    assert_int_equal(posix_memalign(&expected, 64, bytes), 0);
    kernels->x_pack(expected, scene->dtype, scene->dtype, x, scene->x_stride, NULL, n_rows, k, 0,
                    n_rows);
    assert_memory_equal(packed_x, expected, bytes);
    free(expected);
}

static void apply_pieces(delta_rig *rig, const sp_plan *plan, const void *x,
                         const sp_delta_output *outputs)
{
    const delta_scene *scene = rig->scene;
    sp_delta_pieces pieces = {.struct_bytes = sizeof pieces};
    sp_delta_call call = rig_call(rig, plan, x, outputs);

    assert_ok(sp_delta_pieces_begin(rig->delta, &call, &pieces, NULL), NULL);
    assert_true(pieces.fits);
    for (int32_t piece = pieces.pack; piece-- > 0;)
        sp_delta_pieces_pack(rig->delta, piece);
    rig->shares_x = pieces.packed_x != NULL;
    if (rig->shares_x)
        check_packed_x(rig, sp_plan_get(plan)->n_rows, x, pieces.packed_x);
    for (int32_t piece = pieces.shrink; piece-- > 0;)
        sp_delta_pieces_shrink(rig->delta, piece);
    for (int32_t i = 0; i < scene->n_sites; i++)
        expand_backwards(rig, i, scene->dims[i].n_out, true);
}

void rig_apply_pieces(delta_rig *rig, const int32_t *rows, int32_t n_rows, void **out_y)
{
    run_rows(rig, rows, n_rows, out_y, apply_pieces);
}

/* An output all of whose shrinks are still to come must be told so, and stay as it is. */
static void apply_too_early(delta_rig *rig, const sp_plan *plan, const void *x,
                            const sp_delta_output *outputs)
{
    const delta_scene *scene = rig->scene;
    sp_delta_pieces pieces = {.struct_bytes = sizeof pieces};
    sp_delta_call call = rig_call(rig, plan, x, outputs);

    assert_ok(sp_delta_pieces_begin(rig->delta, &call, &pieces, NULL), NULL);
    assert_true(pieces.fits && pieces.shrink > 0);
    for (int32_t piece = pieces.pack; piece-- > 0;)
        sp_delta_pieces_pack(rig->delta, piece);
    expand_backwards(rig, 0, scene->dims[0].n_out, false);
}

void rig_apply_too_early(delta_rig *rig, const int32_t *rows, int32_t n_rows, void **out_y)
{
    run_rows(rig, rows, n_rows, out_y, apply_too_early);
}

static void ask_fits(delta_rig *rig, const sp_plan *plan, const void *x,
                     const sp_delta_output *outputs)
{
    sp_delta_pieces pieces = {sizeof pieces, true, 1, 1, NULL};
    sp_delta_call call = rig_call(rig, plan, x, outputs);

    assert_ok(sp_delta_pieces_begin(rig->delta, &call, &pieces, NULL), NULL);
    assert_true(!pieces.fits && pieces.pack == 0 && pieces.shrink == 0);
}

void rig_expect_too_large(delta_rig *rig, const int32_t *rows, int32_t n_rows, void **out_y)
{
    run_rows(rig, rows, n_rows, out_y, ask_fits);
}
