/*
 * test_cuda_partial.c: the halves of a delta with xa in device memory between them. With one rank
 * they have the bits of an apply, eager, as a graph and with rows from the device; and two pools
 * with halves of the columns give what the CPU gives, on numbers whose sums are exact in any order.
 * Skipped where there is no GPU.
 */
#include "cuda/gpu_batch.h"

#include <sidepath/partial.h>

#include <math.h>

static sp_device *gpu;

/* ---- one rank ------------------------------------------------------------------------------ */

enum { ROWS = 60, ROWS_MAX = 300, ADAPTERS = 6, POOL_RANK = 16, LARGE_RANK = 64, XA_STRIDE = 67 };

/* FP32 terms that one sum loses a last bit to, at most: 128 products of a quarter, the quarters,
 * and the partials. */
#define SUM_LOSS (256 * 0x1p-23)

static void make_scene(delta_scene *scene, sp_dtype dtype, int32_t k_in, bool x_f32)
{
    static const int32_t ranks[ADAPTERS] = {16, 1, 0, 7, 12, 8};
    sp_test_random random = {(uint64_t)k_in + 1};

    *scene = (delta_scene){
        .dtype = dtype,
        .n_rows = ROWS,
        .n_adapters = ADAPTERS,
        .n_sites = 2,
        .dims = {{0, SP_MODULE_Q_PROJ, k_in, 136}, {0, SP_MODULE_K_PROJ, k_in, 57}},
        .y_type = {dtype, SP_DTYPE_F32},
        .ranks = ranks,
        .pad = 8,
        .x_f32 = x_f32,
    };
    scene_fill(scene, 16, &random);
}

/* A batch and the sums of its sites between the halves. */
typedef struct halves {
    gpu_batch batch;
    int32_t pool_rank;
    gpu_buffer xa[SCENE_SITES_MAX];
    sp_delta_partial sites[SCENE_SITES_MAX];
} halves;

static void make_halves(halves *h, delta_rig *rig, int32_t pool_rank)
{
    h->batch = gpu_batch_make(rig, ROWS_MAX);
    h->pool_rank = pool_rank;
    for (int32_t i = 0; i < rig->scene->n_sites; i++) {
        const sp_delta_output *output = &h->batch.outputs[i];

        h->xa[i] = gpu_buffer_make(gpu, ROWS_MAX * XA_STRIDE * sizeof(float));
        gpu_buffer_write(gpu, &h->xa[i], "", 0); /* poison: a pad that is written shows */
        h->sites[i] = (sp_delta_partial){
            .struct_bytes = sizeof h->sites[i],
            .site = output->site,
            .xa = (float *)(void *)(h->xa[i].device + GUARD_BYTES),
            .xa_stride = XA_STRIDE,
            .y = output->y,
            .y_stride = output->y_stride,
            .y_type = output->y_type,
        };
    }
}

static void free_halves(halves *h)
{
    for (int32_t i = 0; i < h->batch.rig->scene->n_sites; i++)
        gpu_buffer_free(gpu, &h->xa[i]);
    gpu_batch_free(&h->batch);
}

static sp_delta_partial_call call_of(const halves *h)
{
    const delta_scene *scene = h->batch.rig->scene;

    return (sp_delta_partial_call){
        .struct_bytes = sizeof(sp_delta_partial_call),
        .plan = h->batch.plan,
        .x = gpu_batch_x(&h->batch),
        .x_stride = scene->x_stride,
        .x_type = scene_x_type(scene),
        .sites = h->sites,
        .n_sites = scene->n_sites,
        .stream = h->batch.stream,
    };
}

/* Both halves, of what has been started. */
static void enqueue_halves(halves *h, const sp_plan *plan)
{
    sp_delta_partial_call call = call_of(h);
    sp_error error;

    call.plan = plan;
    assert_ok(sp_delta_shrink_partial(h->batch.rig->delta, &call, &error), &error);
    assert_ok(sp_delta_expand_from(h->batch.rig->delta, &call, &error), &error);
}

static void take_outputs(gpu_batch *batch, void **out_y)
{
    for (int32_t i = 0; i < batch->rig->scene->n_sites; i++) {
        size_t bytes = (size_t)batch->n_set * scene_y_row_bytes(batch->rig->scene, i);

        out_y[i] = malloc(bytes);
        assert_non_null(out_y[i]);
        memcpy(out_y[i], gpu_batch_read(batch, i), bytes);
    }
}

static void expect_outputs(gpu_batch *batch, void **want)
{
    for (int32_t i = 0; i < batch->rig->scene->n_sites; i++)
        assert_memory_equal(gpu_batch_read(batch, i), want[i],
                            (size_t)batch->n_set * scene_y_row_bytes(batch->rig->scene, i));
}

/* The sum of one row and rank in double, and the size that its loss is held against. */
static double exact_sum(const delta_scene *scene, int32_t row, const sp_adapter_site *site,
                        int32_t c, double *out_size)
{
    double sum = 0.0;

    *out_size = 0.0;
    for (int32_t k = 0; k < site->a.cols; k++) {
        double part = hand_load(scene->dtype, scene->x, (int64_t)row * scene->x_stride + k) *
                      hand_load(scene->dtype, site->a.data, (int64_t)c * site->a.cols + k);

        sum += part;
        *out_size += fabs(part);
    }
    return sum;
}

/* A row's sums, then zeros; the pad is poison yet. */
static void check_xa_row(const delta_scene *scene, int32_t pool_rank, int32_t row, int32_t site,
                         const float *xa)
{
    const sp_adapter_site *of = scene_site(scene, scene->row_adapter[row], site);
    int32_t rank = of != NULL && scene->row_scale[row] != 0.0f ? of->rank : 0;
    unsigned char poison[XA_STRIDE * sizeof(float)];

    for (int32_t c = 0; c < pool_rank; c++) {
        double size = 0.0, want = c < rank ? exact_sum(scene, row, of, c, &size) : 0.0;

        assert_true(fabs((double)xa[c] - want) <= SUM_LOSS * size);
        assert_true(c < rank || !signbit(xa[c]));
    }
    memset(poison, POISON, sizeof poison);
    assert_memory_equal(xa + pool_rank, poison, (size_t)(XA_STRIDE - pool_rank) * sizeof *xa);
}

static void check_xa(halves *h, const int32_t *rows, int32_t n_rows)
{
    for (int32_t i = 0; i < h->batch.rig->scene->n_sites; i++) {
        const float *xa = (const float *)(const void *)gpu_buffer_read(
            gpu, &h->xa[i], (size_t)n_rows * XA_STRIDE * sizeof(float));

        for (int32_t row = 0; row < n_rows && row < ROWS; row++)
            check_xa_row(h->batch.rig->scene, h->pool_rank, rows[row], i, xa + row * XA_STRIDE);
    }
}

/* Eager, then as a graph of the stream. */
static void check_halves(halves *h, const int32_t *rows, int32_t n_rows, sp_stream *stream)
{
    gpu_batch *batch = &h->batch;
    void *want[SCENE_SITES_MAX];
    sp_error error;

    batch->stream = NULL;
    gpu_batch_set(batch, rows, n_rows, n_rows);
    gpu_batch_run(batch);
    take_outputs(batch, want);
    batch->stream = stream;
    for (int captured = 0; captured < 2; captured++) {
        sp_graph *graph = NULL;

        gpu_batch_set(batch, rows, n_rows, n_rows);
        for (int32_t i = 0; i < batch->rig->scene->n_sites; i++)
            gpu_buffer_write(gpu, &h->xa[i], "", 0);
        assert_ok(sp_delta_upload(batch->rig->delta, batch->plan, stream, &error), &error);
        if (captured)
            assert_ok(sp_graph_begin(stream, &error), &error);
        assert_ok(sp_delta_start(batch->rig->delta, batch->plan, stream, &error), &error);
        enqueue_halves(h, batch->plan);
        if (captured) {
            assert_ok(sp_graph_end(stream, &graph, &error), &error);
            assert_ok(sp_graph_launch(graph, stream, &error), &error);
        }
        assert_ok(sp_stream_wait(stream, &error), &error);
        expect_outputs(batch, want);
        check_xa(h, rows, n_rows);
        sp_graph_destroy(graph);
    }
    for (int32_t i = 0; i < batch->rig->scene->n_sites; i++)
        free(want[i]);
}

/* Partials of one chunk and of four, more groups of them than one, odd sizes, windows, and a pool
 * of so large a rank that the expand of many rows reads rounded sums. */
static void a_small_rank_alone_has_the_bits_of_an_apply(void **state)
{
    static const int32_t counts[] = {1, 17, ROWS_MAX}, ks[] = {200, 1101, 5128};
    static const sp_dtype types[] = {SP_DTYPE_BF16, SP_DTYPE_F16};
    static int32_t rows[ROWS_MAX];
    sp_stream *stream = NULL;

    (void)state;
    assert_ok(sp_stream_create(gpu, &stream, NULL), NULL);
    for (int32_t i = 0; i < ROWS_MAX; i++)
        rows[i] = (i * 7 + 3) % ROWS;
    for (int i = 0; i < 6; i++) {
        delta_scene scene;
        delta_rig rig;
        halves h;

        int32_t pool_rank = (i + i / 2) % 2 != 0 ? LARGE_RANK : POOL_RANK;

        make_scene(&scene, types[i % 2], ks[i / 2], i == 1);
        rig = rig_create_on(gpu, &scene, pool_rank, NULL, ROWS_MAX);
        make_halves(&h, &rig, pool_rank);
        for (int c = 0; c < 3; c++)
            check_halves(&h, rows, counts[c], stream);
        free_halves(&h);
        rig_destroy(&rig);
        scene_free(&scene);
    }
    sp_stream_destroy(stream);
}

/* Rows that the device chose, the last of them of no version that its slot shows. */
static void a_small_step_from_the_device_has_parts(void **state)
{
    enum { N = 33 };
    int32_t rows[N], slots[N];
    uint64_t generations[N];
    gpu_buffer slot_buffer = gpu_buffer_make(gpu, sizeof slots);
    gpu_buffer generation_buffer = gpu_buffer_make(gpu, sizeof generations);
    sp_device_rows on_device = {.struct_bytes = sizeof on_device, .n_rows = N};
    sp_row_report report = {.struct_bytes = sizeof report};
    void *want[SCENE_SITES_MAX];
    delta_scene scene;
    delta_rig rig;
    sp_error error;
    halves h;

    (void)state;
    make_scene(&scene, SP_DTYPE_BF16, 200, false);
    for (int32_t i = 0; i < N; i++) {
        rows[i] = i % ROWS;
        scene.row_scale[rows[i]] = 1.0f;
        scene.row_adapter[rows[i]] = i % 5 == 4 ? -1 : i % 2; /* those of a delta at both sites */
    }
    rig = rig_create_on(gpu, &scene, POOL_RANK, NULL, ROWS_MAX);
    make_halves(&h, &rig, POOL_RANK);
    for (int32_t i = 0; i < N; i++) {
        slots[i] =
            scene.row_adapter[rows[i]] < 0 ? SP_SLOT_BASE : rig.slot_of[scene.row_adapter[rows[i]]];
        generations[i] = slots[i] < 0 ? 0 : hand_slot_info(rig.pool.pool, slots[i]).generation;
    }
    generations[N - 1] += 100; /* the base's from here on */
    scene.row_adapter[rows[N - 1]] = -1;
    gpu_buffer_write(gpu, &slot_buffer, slots, sizeof slots);
    gpu_buffer_write(gpu, &generation_buffer, generations, sizeof generations);
    on_device.slot = (const int32_t *)(const void *)(slot_buffer.device + GUARD_BYTES);
    on_device.generation = (const uint64_t *)(const void *)(generation_buffer.device + GUARD_BYTES);
    gpu_batch_set(&h.batch, rows, N, N);
    gpu_batch_run(&h.batch);
    take_outputs(&h.batch, want);
    gpu_batch_set(&h.batch, rows, N, N);
    assert_ok(sp_plan_from_device(rig.delta, &on_device, NULL, &error), &error);
    enqueue_halves(&h, NULL);
    expect_outputs(&h.batch, want);
    check_xa(&h, rows, N);
    assert_ok(sp_delta_row_report(rig.delta, &report, &error), &error);
    assert_int_equal(report.n_refused, 1);
    assert_int_equal(report.first_row, N - 1);
    assert_int_equal(report.reason, SP_ROW_STALE);
    for (int32_t i = 0; i < scene.n_sites; i++)
        free(want[i]);
    free_halves(&h);
    rig_destroy(&rig);
    scene_free(&scene);
    gpu_buffer_free(gpu, &slot_buffer);
    gpu_buffer_free(gpu, &generation_buffer);
}

/* ---- two ranks ----------------------------------------------------------------------------- */

enum { K = 1100, N_OUT = 53, R = 16, X_STRIDE = K + 4, Y_STRIDE = N_OUT + 3, PAIR_ROWS = 21 };

static const site_dims whole_site = {0, SP_MODULE_O_PROJ, K, N_OUT};
static const int32_t pair_ranks[] = {13, 4, 0};
static const float pair_scales[] = {0.5f, 2.0f, 1.0f};

/* One rank: a pool with the columns of a slice, on the CPU (device NULL) or the GPU. */
typedef struct rank_rig {
    sp_device *device; /* NULL: the CPU */
    hand_pool pool;
    sp_delta *delta;
    sp_plan *plan;
    gpu_buffer x, xa, y; /* on the GPU */
} rank_rig;

typedef struct pair_world {
    sp_dtype dtype;
    hand_adapter *adapters[3];
    uint16_t x[PAIR_ROWS * X_STRIDE];
    uint16_t y0[PAIR_ROWS * Y_STRIDE];
    int32_t slot[PAIR_ROWS];
    float scale[PAIR_ROWS];
} pair_world;

/* Sixteenths of at most 1 as products; thousands of them add up exactly. */
static double small(sp_test_random *random)
{
    return ((double)sp_test_below(random, 9) - 4.0) / 4.0;
}

static void add_factors(pair_world *w, int32_t index, sp_test_random *random)
{
    uint16_t *a = malloc((size_t)pair_ranks[index] * K * sizeof *a);
    uint16_t *b = malloc((size_t)pair_ranks[index] * N_OUT * sizeof *b);

    assert_true(a != NULL && b != NULL);
    for (int32_t i = 0; i < pair_ranks[index] * K; i++)
        hand_store(w->dtype, a, i, small(random));
    for (int32_t i = 0; i < pair_ranks[index] * N_OUT; i++)
        hand_store(w->dtype, b, i, small(random));
    hand_adapter_add_copy(w->adapters[index], &whole_site, pair_ranks[index], pair_scales[index],
                          w->dtype, a, b);
    free(a);
    free(b);
}

static void make_pair_world(pair_world *w, sp_dtype dtype)
{
    sp_test_random random = {77};

    w->dtype = dtype;
    for (int32_t i = 0; i < 3; i++) {
        w->adapters[i] = hand_adapter_create((uint64_t)i + 1);
        if (pair_ranks[i] > 0)
            add_factors(w, i, &random);
    }
    for (int32_t i = 0; i < PAIR_ROWS * X_STRIDE; i++)
        hand_store(dtype, w->x, i, small(&random));
    for (int32_t i = 0; i < PAIR_ROWS * Y_STRIDE; i++)
        hand_store(dtype, w->y0, i, small(&random));
    for (int32_t row = 0; row < PAIR_ROWS; row++) {
        w->slot[row] = (int32_t)sp_test_below(&random, 4) - 1;
        w->scale[row] = row % 7 == 6 ? 0.0f : row % 2 != 0 ? 0.5f : 1.0f;
    }
}

static void free_pair_world(pair_world *w)
{
    for (int32_t i = 0; i < 3; i++)
        hand_adapter_destroy(w->adapters[i]);
}

static rank_rig make_rank(const pair_world *w, sp_device *device, int32_t begin, int32_t end)
{
    const sp_site_slice slice = {.struct_bytes = sizeof slice, .col_begin = begin, .col_end = end};
    rank_rig rig = {.device = device};
    sp_delta_options options;
    sp_error error;

    rig.pool = device != NULL
                   ? hand_pool_create_sliced_on(device, &whole_site, 1, R, w->dtype, 3, &slice, 1)
                   : hand_pool_create_sliced(&whole_site, 1, R, w->dtype, 3, &slice, 1);
    for (int32_t i = 0; i < 3; i++)
        assert_int_equal(hand_load_adapter(&rig.pool, w->adapters[i]).slot, i);
    sp_delta_options_default(&options, sizeof options);
    options.pool = rig.pool.pool;
    options.rows_max = PAIR_ROWS;
    assert_ok(sp_delta_create(&options, &rig.delta, &error), &error);
    assert_ok(sp_plan_create(PAIR_ROWS, 3, &rig.plan, &error), &error);
    hand_plan_rows(rig.plan, rig.pool.pool, w->slot, w->scale, PAIR_ROWS);
    if (device == NULL)
        return rig;
    rig.x = gpu_buffer_make(device, sizeof w->x);
    rig.xa = gpu_buffer_make(device, PAIR_ROWS * R * sizeof(float));
    rig.y = gpu_buffer_make(device, PAIR_ROWS * Y_STRIDE * sizeof(float));
    gpu_buffer_write(device, &rig.x, w->x, sizeof w->x);
    assert_ok(sp_delta_upload(rig.delta, rig.plan, NULL, &error), &error);
    assert_ok(sp_delta_start(rig.delta, rig.plan, NULL, &error), &error);
    return rig;
}

static void free_rank(rank_rig *rig)
{
    sp_plan_destroy(rig->plan);
    sp_delta_destroy(rig->delta);
    hand_pool_destroy(&rig->pool);
    if (rig->device == NULL)
        return;
    gpu_buffer_free(rig->device, &rig->x);
    gpu_buffer_free(rig->device, &rig->xa);
    gpu_buffer_free(rig->device, &rig->y);
}

/* The part of the rank's columns, which begin at `begin`. */
static void shrink_rank(rank_rig *rig, const pair_world *w, int32_t begin, float *out_xa)
{
    const uint16_t *x =
        rig->device == NULL ? w->x : (const uint16_t *)(const void *)(rig->x.device + GUARD_BYTES);
    sp_delta_partial site = {.struct_bytes = sizeof site, .xa = out_xa, .xa_stride = R};
    const sp_delta_partial_call call = {.struct_bytes = sizeof call,
                                        .plan = rig->plan,
                                        .x = x + begin,
                                        .x_stride = X_STRIDE,
                                        .x_type = w->dtype,
                                        .sites = &site,
                                        .n_sites = 1};
    size_t bytes = PAIR_ROWS * R * sizeof(float);
    sp_error error;

    if (rig->device != NULL) {
        gpu_buffer_write(rig->device, &rig->xa, "", 0);
        site.xa = (float *)(void *)(rig->xa.device + GUARD_BYTES);
    }
    assert_ok(sp_delta_shrink_partial(rig->delta, &call, &error), &error);
    if (rig->device != NULL)
        memcpy(out_xa, gpu_buffer_read(rig->device, &rig->xa, bytes), bytes);
}

/* y is of y_type, in place. */
static void expand_rank(rank_rig *rig, float *sums, void *y, sp_dtype y_type)
{
    sp_delta_partial site = {.struct_bytes = sizeof site,
                             .xa = sums,
                             .xa_stride = R,
                             .y = y,
                             .y_stride = Y_STRIDE,
                             .y_type = y_type};
    const sp_delta_partial_call call = {
        .struct_bytes = sizeof call, .plan = rig->plan, .sites = &site, .n_sites = 1};
    size_t bytes = PAIR_ROWS * Y_STRIDE * sp_dtype_bytes(y_type);
    sp_error error;

    if (rig->device != NULL) {
        gpu_buffer_write(rig->device, &rig->xa, sums, PAIR_ROWS * R * sizeof(float));
        gpu_buffer_write(rig->device, &rig->y, y, bytes);
        site.xa = (float *)(void *)(rig->xa.device + GUARD_BYTES);
        site.y = rig->y.device + GUARD_BYTES;
    }
    assert_ok(sp_delta_expand_from(rig->delta, &call, &error), &error);
    if (rig->device != NULL)
        memcpy(y, gpu_buffer_read(rig->device, &rig->y, bytes), bytes);
}

/* The sum of both parts through every rank: each holds all of B. */
static void check_expands(const pair_world *w, rank_rig *on_gpu, rank_rig *on_cpu, float *sums)
{
    for (int wide = 0; wide < 2; wide++) {
        sp_dtype y_type = wide != 0 ? SP_DTYPE_F32 : w->dtype;
        size_t bytes = PAIR_ROWS * Y_STRIDE * sp_dtype_bytes(y_type);
        static float start[PAIR_ROWS * Y_STRIDE], want[PAIR_ROWS * Y_STRIDE],
            got[PAIR_ROWS * Y_STRIDE];

        for (int32_t i = 0; i < PAIR_ROWS * Y_STRIDE; i++)
            hand_store(y_type, start, i, hand_load(w->dtype, w->y0, i));
        memcpy(want, start, bytes);
        expand_rank(&on_cpu[0], sums, want, y_type);
        assert_memory_not_equal(want, start, bytes);
        for (int p = 0; p < 2; p++) {
            memcpy(got, start, bytes);
            expand_rank(&on_gpu[p], sums, got, y_type);
            assert_memory_equal(got, want, bytes);
        }
    }
}

static void check_pair(const pair_world *w, int32_t cut)
{
    rank_rig on_gpu[] = {make_rank(w, gpu, 0, cut), make_rank(w, gpu, cut, K)};
    rank_rig on_cpu[] = {make_rank(w, NULL, 0, cut), make_rank(w, NULL, cut, K)};
    static float parts[2][PAIR_ROWS * R], want[PAIR_ROWS * R], sums[PAIR_ROWS * R];

    for (int p = 0; p < 2; p++) {
        shrink_rank(&on_cpu[p], w, p == 0 ? 0 : cut, want);
        shrink_rank(&on_gpu[p], w, p == 0 ? 0 : cut, parts[p]);
        for (int32_t i = 0; i < PAIR_ROWS * R; i++)
            assert_true(parts[p][i] == want[i]);
    }
    for (int32_t i = 0; i < PAIR_ROWS * R; i++)
        sums[i] = parts[0][i] + parts[1][i];
    check_expands(w, on_gpu, on_cpu, sums);
    for (int p = 0; p < 2; p++) {
        free_rank(&on_gpu[p]);
        free_rank(&on_cpu[p]);
    }
}

static void a_small_pair_gives_the_bits_of_the_cpu(void **state)
{
    static const sp_dtype types[] = {SP_DTYPE_BF16, SP_DTYPE_F16};
    static const int32_t cuts[] = {552, 9, 1091};
    static pair_world w;

    (void)state;
    for (int i = 0; i < 6; i++) {
        make_pair_world(&w, types[i % 2]);
        check_pair(&w, cuts[i / 2]);
        free_pair_world(&w);
    }
}

/* ---- what has no part ---------------------------------------------------------------------- */

static void a_small_site_that_is_left_out_has_zeros(void **state)
{
    static pair_world w;
    static float xa[PAIR_ROWS * R], zeros[PAIR_ROWS * R];
    sp_delta_options options;
    sp_error error;
    rank_rig rig;

    (void)state;
    make_pair_world(&w, SP_DTYPE_BF16);
    rig = make_rank(&w, gpu, 0, 100);
    sp_delta_destroy(rig.delta);
    sp_delta_options_default(&options, sizeof options);
    options.pool = rig.pool.pool;
    options.rows_max = PAIR_ROWS;
    options.no_apply = true;
    assert_ok(sp_delta_create(&options, &rig.delta, &error), &error);
    assert_ok(sp_delta_upload(rig.delta, rig.plan, NULL, &error), &error);
    assert_ok(sp_delta_start(rig.delta, rig.plan, NULL, &error), &error);
    shrink_rank(&rig, &w, 0, xa);
    assert_memory_equal(xa, zeros, sizeof xa);
    free_rank(&rig);
    free_pair_world(&w);
}

static void bad_calls_are_refused(void **state)
{
    static pair_world w;
    sp_delta_partial site = {.struct_bytes = sizeof site, .xa_stride = R};
    sp_delta_partial_call call = {.struct_bytes = sizeof call,
                                  .x_stride = X_STRIDE,
                                  .x_type = SP_DTYPE_BF16,
                                  .sites = &site,
                                  .n_sites = 1};
    sp_error error;
    rank_rig rig;

    (void)state;
    make_pair_world(&w, SP_DTYPE_BF16);
    rig = make_rank(&w, gpu, 0, 100);
    call.x = rig.x.device + GUARD_BYTES;
    site.xa = (float *)(void *)(rig.xa.device + GUARD_BYTES);
    assert_int_equal(sp_delta_shrink_partial(rig.delta, &call, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "plan"); /* no step of sp_plan_from_device has begun */
    call.plan = rig.plan;
    hand_plan_rows(rig.plan, rig.pool.pool, w.slot, w.scale, PAIR_ROWS - 1);
    assert_int_equal(sp_delta_shrink_partial(rig.delta, &call, &error), SP_ERR_STATE);
    assert_string_equal(error.subject, "plan"); /* the step was started with more rows */
    hand_plan_rows(rig.plan, rig.pool.pool, w.slot, w.scale, PAIR_ROWS);
    assert_int_equal(sp_delta_shrink_partial(rig.delta, &call, &error), SP_ERR_STATE);
    assert_string_equal(error.subject, "plan"); /* built anew, it may have other rows */
    assert_ok(sp_delta_upload(rig.delta, rig.plan, NULL, NULL), NULL);
    assert_ok(sp_delta_start(rig.delta, rig.plan, NULL, NULL), NULL);
    call.x_type = SP_DTYPE_F32;
    assert_int_equal(sp_delta_shrink_partial(rig.delta, &call, &error), SP_ERR_UNSUPPORTED);
    assert_string_equal(error.subject, "x_type");
    assert_int_equal(sp_delta_expand_from(rig.delta, &call, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "sites"); /* without y */
    free_rank(&rig);
    free_pair_world(&w);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_small_rank_alone_has_the_bits_of_an_apply),
        cmocka_unit_test(a_small_step_from_the_device_has_parts),
        cmocka_unit_test(a_small_pair_gives_the_bits_of_the_cpu),
        cmocka_unit_test(a_small_site_that_is_left_out_has_zeros),
        cmocka_unit_test(bad_calls_are_refused),
    };

    return gpu_main(&gpu, tests, sizeof tests / sizeof tests[0], NULL, NULL, argc, argv);
}
