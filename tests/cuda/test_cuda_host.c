/*
 * test_cuda_host.c: a host's own things on a GPU: its streams, its memory, its current context, its
 * FP32 rows, and rows whose slots it chose in device memory. Skipped where there is no GPU.
 */
#include "cuda/gpu_batch.h"

#include <dlfcn.h>
#include <math.h>
#include <pthread.h>

enum { ROWS = 60, ROWS_MAX = 3000, ADAPTERS = 6 };

static sp_device *gpu;

/* ---- a scene ------------------------------------------------------------------------------- */

static void make_scene(delta_scene *scene, sp_dtype dtype, int32_t k_in, bool x_f32)
{
    static const int32_t ranks[ADAPTERS] = {16, 1, 0, 7, 12, 8};
    sp_test_random random = {(uint64_t)k_in};

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

static void all_rows(int32_t *rows, int32_t n_rows)
{
    for (int32_t i = 0; i < n_rows; i++)
        rows[i] = (i * 7 + 3) % ROWS;
}

/* What the batch's outputs are now, owned by the caller. */
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

static void free_outputs(const delta_scene *scene, void **y)
{
    for (int32_t i = 0; i < scene->n_sites; i++)
        free(y[i]);
}

/* ---- streams ------------------------------------------------------------------------------- */

/* A stream of the host's, as far as the library knows, and one beside it. */
typedef struct host_streams {
    sp_stream *owner, *side_owner; /* whose handles are wrapped */
    sp_stream *stream, *side;
    sp_event *ready, *shrunk;
} host_streams;

static void make_streams(host_streams *s)
{
    sp_error error;

    assert_ok(sp_stream_create(gpu, &s->owner, &error), &error);
    assert_ok(sp_stream_create(gpu, &s->side_owner, &error), &error);
    assert_ok(sp_stream_wrap(gpu, sp_stream_native(s->owner), &s->stream, &error), &error);
    assert_ok(sp_stream_wrap(gpu, sp_stream_native(s->side_owner), &s->side, &error), &error);
    assert_ok(sp_event_create(gpu, &s->ready, &error), &error);
    assert_ok(sp_event_create(gpu, &s->shrunk, &error), &error);
}

static void free_streams(host_streams *s)
{
    sp_event_destroy(s->ready);
    sp_event_destroy(s->shrunk);
    sp_stream_destroy(s->stream);
    sp_stream_destroy(s->side);
    sp_stream_destroy(s->owner);
    sp_stream_destroy(s->side_owner);
}

/* The shrink on the side stream, the rest on the other. */
static void enqueue_halves(gpu_batch *batch, const host_streams *s)
{
    sp_delta_call call = gpu_batch_call(batch);
    sp_error error;

    assert_ok(sp_delta_start(batch->rig->delta, batch->plan, s->stream, &error), &error);
    assert_ok(sp_event_record(s->ready, s->stream, &error), &error);
    assert_ok(sp_stream_wait_event(s->side, s->ready, &error), &error);
    call.stream = s->side;
    assert_ok(sp_delta_shrink(batch->rig->delta, &call, &error), &error);
    assert_ok(sp_event_record(s->shrunk, s->side, &error), &error);
    assert_ok(sp_stream_wait_event(s->stream, s->shrunk, &error), &error);
    call.stream = s->stream;
    assert_ok(sp_delta_expand(batch->rig->delta, &call, &error), &error);
}

/* Eager, halves, and both as graphs that the host's stream captured. */
static void check_streams(gpu_batch *batch, const host_streams *s, const int32_t *rows, int32_t n)
{
    void *want[SCENE_SITES_MAX];
    sp_error error;

    batch->stream = NULL;
    gpu_batch_set(batch, rows, n, n);
    gpu_batch_run(batch);
    take_outputs(batch, want);
    batch->stream = s->stream;
    for (int way = 0; way < 4; way++) {
        sp_graph *graph = NULL;

        gpu_batch_set(batch, rows, n, n);
        assert_ok(sp_delta_upload(batch->rig->delta, batch->plan, s->stream, &error), &error);
        if (way >= 2)
            assert_ok(sp_graph_begin(s->stream, &error), &error);
        if (way % 2 == 0)
            gpu_batch_enqueue(batch);
        else
            enqueue_halves(batch, s);
        if (way >= 2) {
            assert_ok(sp_graph_end(s->stream, &graph, &error), &error);
            assert_ok(sp_graph_launch(graph, s->stream, &error), &error);
        }
        assert_ok(sp_stream_wait(s->stream, &error), &error);
        expect_outputs(batch, want);
        sp_graph_destroy(graph);
    }
    free_outputs(batch->rig->scene, want);
}

static void a_small_step_on_the_hosts_streams(void **state)
{
    static const int32_t counts[] = {1, 17, 300};
    static int32_t rows[ROWS_MAX];
    host_streams streams;

    (void)state;
    all_rows(rows, ROWS_MAX);
    make_streams(&streams);
    for (int i = 0; i < 2; i++) {
        delta_scene scene;
        delta_rig rig;
        gpu_batch batch;

        make_scene(&scene, SP_DTYPE_BF16, 1104, i == 1);
        rig = rig_create_on(gpu, &scene, 16, NULL, 300);
        batch = gpu_batch_make(&rig, 300);
        for (int c = 0; c < 3; c++)
            check_streams(&batch, &streams, rows, counts[c]);
        gpu_batch_free(&batch);
        rig_destroy(&rig);
        scene_free(&scene);
    }
    free_streams(&streams);
}

/* The legacy default stream, which is what a host without streams of its own has. */
static void the_default_stream_can_be_wrapped(void **state)
{
    static int32_t rows[ROWS];
    void *want[SCENE_SITES_MAX];
    delta_scene scene;
    sp_stream *stream = NULL;
    sp_error error;
    delta_rig rig;
    gpu_batch batch;

    (void)state;
    all_rows(rows, ROWS);
    make_scene(&scene, SP_DTYPE_BF16, 520, false);
    rig = rig_create_on(gpu, &scene, 16, NULL, ROWS);
    batch = gpu_batch_make(&rig, ROWS);
    assert_ok(sp_stream_wrap(gpu, NULL, &stream, &error), &error);
    gpu_batch_set(&batch, rows, ROWS, ROWS);
    gpu_batch_run(&batch);
    take_outputs(&batch, want);
    batch.stream = stream;
    gpu_batch_set(&batch, rows, ROWS, ROWS);
    gpu_batch_run(&batch);
    expect_outputs(&batch, want);
    free_outputs(&scene, want);
    gpu_batch_free(&batch);
    rig_destroy(&rig);
    sp_stream_destroy(stream);
    scene_free(&scene);
}

/* ---- FP32 rows ----------------------------------------------------------------------------- */

/* Off by less than rounding takes away: the bits of the rounded rows. Odd sizes, too. */
static void a_small_f32_x_is_rounded_first(void **state)
{
    static const int32_t counts[] = {1, 9, 300}, ks[] = {1104, 1101};
    static const sp_dtype types[] = {SP_DTYPE_BF16, SP_DTYPE_F16};
    static int32_t rows[ROWS_MAX];

    (void)state;
    all_rows(rows, ROWS_MAX);
    for (int i = 0; i < 4; i++) {
        delta_scene rounded, scene;
        delta_rig rig, f32_rig;
        gpu_batch batch, f32_batch;

        make_scene(&rounded, types[i % 2], ks[i / 2], false);
        make_scene(&scene, types[i % 2], ks[i / 2], true);
        rig = rig_create_on(gpu, &rounded, 16, NULL, 300);
        f32_rig = rig_create_on(gpu, &scene, 16, NULL, 300);
        batch = gpu_batch_make(&rig, 300);
        f32_batch = gpu_batch_make(&f32_rig, 300);
        for (int c = 0; c < 3; c++) {
            void *want[SCENE_SITES_MAX];

            gpu_batch_set(&batch, rows, counts[c], counts[c]);
            gpu_batch_run(&batch);
            take_outputs(&batch, want);
            gpu_batch_set(&f32_batch, rows, counts[c], counts[c]);
            gpu_batch_run(&f32_batch);
            expect_outputs(&f32_batch, want);
            free_outputs(&scene, want);
        }
        gpu_batch_free(&batch);
        gpu_batch_free(&f32_batch);
        rig_destroy(&rig);
        rig_destroy(&f32_rig);
        scene_free(&rounded);
        scene_free(&scene);
    }
}

/* One row by the single form, on the host's stream, against what the routed one gave. */
static void check_single(sp_delta_single *single, gpu_batch *batch, const host_streams *streams,
                         int32_t row)
{
    const delta_scene *scene = batch->rig->scene;
    const sp_adapter_site *site = scene_site(scene, scene->row_adapter[row], 0);
    gpu_buffer a = gpu_buffer_make(gpu, (size_t)(site->rank * site->a.cols) * 2);
    gpu_buffer b = gpu_buffer_make(gpu, (size_t)(site->rank * site->b.rows) * 2);
    sp_delta_single_args args = {
        .struct_bytes = sizeof args,
        .rows = 1,
        .k_in = site->a.cols,
        .n_out = site->b.rows,
        .rank = site->rank,
        .dtype = SP_DTYPE_BF16,
        .x_type = SP_DTYPE_F32,
        .y_type = SP_DTYPE_BF16,
        .x = gpu_batch_x(batch),
        .a = a.device + GUARD_BYTES,
        .b = b.device + GUARD_BYTES,
        .y = batch->outputs[0].y,
        .x_stride = scene->x_stride,
        .a_stride = site->a.cols,
        .b_stride = site->rank,
        .y_stride = batch->outputs[0].y_stride,
        .scale = sp_effective_scale(site->scale, scene->row_scale[row]),
        .stream = streams->stream,
    };
    void *want[SCENE_SITES_MAX];
    sp_error error;

    gpu_batch_set(batch, &row, 1, 1);
    gpu_batch_run(batch);
    take_outputs(batch, want);
    gpu_buffer_write(gpu, &a, site->a.data, a.bytes);
    gpu_buffer_write(gpu, &b, site->b.data, b.bytes);
    gpu_batch_set(batch, &row, 1, 1);
    assert_ok(sp_delta_single_apply(single, &args, &error), &error);
    assert_ok(sp_stream_wait(streams->stream, &error), &error);
    assert_memory_equal(gpu_batch_read(batch, 0), want[0], scene_y_row_bytes(scene, 0));
    free_outputs(scene, want);
    gpu_buffer_free(gpu, &a);
    gpu_buffer_free(gpu, &b);
}

static void a_small_single_call_takes_an_f32_x(void **state)
{
    sp_delta_single_options options;
    sp_delta_single *single = NULL;
    host_streams streams;
    delta_scene scene;
    sp_error error;
    delta_rig rig;
    gpu_batch batch;

    (void)state;
    make_scene(&scene, SP_DTYPE_BF16, 1104, true);
    make_streams(&streams);
    rig = rig_create_on(gpu, &scene, 16, NULL, 1);
    batch = gpu_batch_make(&rig, 1);
    sp_delta_single_options_default(&options, sizeof options);
    options.device = gpu;
    options.rows_max = 1;
    options.k_in_max = 1104;
    options.rank_max = 16;
    options.x_f32 = true;
    assert_ok(sp_delta_single_create(&options, &single, &error), &error);
    for (int32_t row = 0; row < 12; row++)
        if (scene_site(&scene, scene.row_adapter[row], 0) != NULL)
            check_single(single, &batch, &streams, row);
    sp_delta_single_destroy(single);
    gpu_batch_free(&batch);
    rig_destroy(&rig);
    free_streams(&streams);
    scene_free(&scene);
}

/* ---- rows that the device chose ------------------------------------------------------------ */

/* The host's arrays, in device memory as well. */
typedef struct device_rows {
    int32_t n_rows;
    int32_t slot[ROWS_MAX];
    uint64_t generation[ROWS_MAX];
    float scale[ROWS_MAX];
    gpu_buffer slots, generations, scales;
} device_rows;

static void make_device_rows(device_rows *rows)
{
    rows->slots = gpu_buffer_make(gpu, sizeof rows->slot);
    rows->generations = gpu_buffer_make(gpu, sizeof rows->generation);
    rows->scales = gpu_buffer_make(gpu, sizeof rows->scale);
}

static void free_device_rows(device_rows *rows)
{
    gpu_buffer_free(gpu, &rows->slots);
    gpu_buffer_free(gpu, &rows->generations);
    gpu_buffer_free(gpu, &rows->scales);
}

static void send_device_rows(device_rows *rows)
{
    gpu_buffer_write(gpu, &rows->slots, rows->slot, sizeof rows->slot);
    gpu_buffer_write(gpu, &rows->generations, rows->generation, sizeof rows->generation);
    gpu_buffer_write(gpu, &rows->scales, rows->scale, sizeof rows->scale);
}

static sp_device_rows rows_of(const device_rows *rows)
{
    return (sp_device_rows){
        .struct_bytes = sizeof(sp_device_rows),
        .n_rows = rows->n_rows,
        .slot = (const int32_t *)(const void *)(rows->slots.device + GUARD_BYTES),
        .generation = (const uint64_t *)(const void *)(rows->generations.device + GUARD_BYTES),
        .row_scale = (const float *)(const void *)(rows->scales.device + GUARD_BYTES),
    };
}

/* The rule of sp_plan_from_device, on the host: what the slot shows is `shown`, 0 for none. */
static sp_row_refusal judge(int32_t n_slots, const uint64_t *shown, int32_t slot,
                            uint64_t generation, float scale)
{
    if (slot != SP_SLOT_BASE && (slot < 0 || slot >= n_slots))
        return SP_ROW_NO_SLOT;
    if (isnan(scale) || scale < 0.0f || scale > 16.0f)
        return SP_ROW_SCALE;
    if (slot == SP_SLOT_BASE)
        return SP_ROW_FINE;
    if (shown[slot] == 0)
        return SP_ROW_EMPTY;
    return shown[slot] == generation ? SP_ROW_FINE : SP_ROW_STALE;
}

/* The report that the rows must give; refused rows become the base's in slot and scale. */
static sp_row_report judge_all(const delta_rig *rig, const device_rows *rows, int32_t *out_slot,
                               float *out_scale)
{
    sp_row_report report = {sizeof report, 0, rows->n_rows, 0, -1, SP_ROW_FINE};
    uint64_t shown[ADAPTERS] = {0};

    for (int32_t s = 0; s < ADAPTERS; s++) {
        sp_slot_info info = hand_slot_info(rig->pool.pool, s);

        if (info.state == SP_SLOT_READY || info.state == SP_SLOT_DRAINING)
            shown[s] = info.generation;
    }
    for (int32_t i = 0; i < rows->n_rows; i++) {
        sp_row_refusal why =
            judge(ADAPTERS, shown, rows->slot[i], rows->generation[i], rows->scale[i]);

        out_slot[i] = why == SP_ROW_FINE ? rows->slot[i] : SP_SLOT_BASE;
        out_scale[i] = why == SP_ROW_FINE ? rows->scale[i] : 1.0f;
        if (why == SP_ROW_FINE)
            continue;
        if (report.n_refused++ == 0) {
            report.first_row = i;
            report.reason = why;
        }
    }
    return report;
}

/* The batch's rows by handle, of which about one in `every` is spoilt in some way (0: none). */
static void spoil_rows(const gpu_batch *batch, device_rows *rows, int32_t every, uint64_t seed)
{
    const sp_plan_view *view = sp_plan_get(batch->plan);
    sp_test_random random = {seed};

    rows->n_rows = view->n_rows;
    for (int32_t i = 0; i < view->n_rows; i++) {
        int32_t slot = view->seq_slot[i];

        rows->slot[i] = slot;
        rows->scale[i] = view->row_scale[i];
        rows->generation[i] =
            slot >= 0 ? hand_slot_info(batch->rig->pool.pool, slot).generation : 12345;
        if (every == 0 || sp_test_below(&random, (uint32_t)every) != 0)
            continue;
        switch (sp_test_below(&random, 7)) {
        case 0:
            rows->slot[i] = -2;
            break;
        case 1:
            rows->slot[i] = ADAPTERS;
            break;
        case 2:
            rows->slot[i] = INT32_MIN;
            break;
        case 3:
            rows->generation[i]++;
            break;
        case 4:
            rows->generation[i] = 0;
            break;
        case 5:
            rows->scale[i] = NAN;
            break;
        default:
            rows->scale[i] = i % 2 != 0 ? -1.0f : 16.5f;
            break;
        }
    }
    send_device_rows(rows);
}

static void expect_report(const delta_rig *rig, const sp_row_report *want, uint64_t step)
{
    sp_row_report got = {.struct_bytes = sizeof got};
    sp_error error;

    assert_ok(sp_delta_row_report(rig->delta, &got, &error), &error);
    assert_int_equal(got.step, step);
    assert_int_equal(got.n_rows, want->n_rows);
    assert_int_equal(got.n_refused, want->n_refused);
    assert_int_equal(got.first_row, want->first_row);
    assert_int_equal(got.reason, want->reason);
}

static void enqueue_from_device(gpu_batch *batch, const device_rows *rows)
{
    sp_device_rows on_device = rows_of(rows);
    sp_delta_call call = gpu_batch_call(batch);
    sp_error error;

    call.plan = NULL;
    assert_ok(sp_plan_from_device(batch->rig->delta, &on_device, batch->stream, &error), &error);
    assert_ok(sp_delta_apply(batch->rig->delta, &call, &error), &error);
}

/* What the host's plan of the fine rows gives; the batch is then as it was before. */
static void run_on_host_plan(gpu_batch *batch, const int32_t *rows, int32_t n, const int32_t *slots,
                             const float *scales, void **out_y)
{
    rig_batch first = rig_gather(batch->rig, rows, n), again = rig_gather(batch->rig, rows, n);

    hand_plan_rows(batch->plan, batch->rig->pool.pool, slots, scales, n);
    gpu_batch_fill(batch, &first, n);
    gpu_batch_run(batch);
    take_outputs(batch, out_y);
    gpu_batch_fill(batch, &again, n);
}

/* One check: the oracle's plan on the host, then the rows from the device, eager or by `graph`. */
static void check_device_rows(gpu_batch *batch, device_rows *rows, const int32_t *scene_rows,
                              sp_graph *graph, uint64_t step)
{
    static int32_t slots[ROWS_MAX];
    static float scales[ROWS_MAX];
    sp_stream *stream = batch->stream != NULL ? batch->stream : sp_device_main_stream(gpu);
    sp_row_report want = judge_all(batch->rig, rows, slots, scales);
    void *y[SCENE_SITES_MAX];
    sp_error error;

    run_on_host_plan(batch, scene_rows, rows->n_rows, slots, scales, y);
    if (graph != NULL)
        assert_ok(sp_graph_launch(graph, stream, &error), &error);
    else
        enqueue_from_device(batch, rows);
    assert_ok(sp_stream_wait(stream, &error), &error);
    expect_outputs(batch, y);
    expect_report(batch->rig, &want, step);
    free_outputs(batch->rig->scene, y);
}

static void a_small_plan_from_the_device_is_the_oracles(void **state)
{
    static const int32_t counts[] = {1, 33, 600, 1025, ROWS_MAX};
    static int32_t scene_rows[ROWS_MAX];
    static device_rows rows;
    const sp_row_report none = {sizeof none, 0, 0, 0, -1, SP_ROW_FINE};
    uint64_t step = 0;
    delta_scene scene;
    delta_rig rig;
    gpu_batch batch;

    (void)state;
    all_rows(scene_rows, ROWS_MAX);
    make_device_rows(&rows);
    make_scene(&scene, SP_DTYPE_BF16, 200, false);
    rig = rig_create_on(gpu, &scene, 16, NULL, ROWS_MAX);
    batch = gpu_batch_make(&rig, ROWS_MAX);
    expect_report(&rig, &none, 0);
    for (int i = 0; i < 15; i++) {
        gpu_batch_set(&batch, scene_rows, counts[i % 5], counts[i % 5]);
        spoil_rows(&batch, &rows, i / 5 == 0 ? 0 : i / 5 == 1 ? 40 : 2, (uint64_t)i);
        check_device_rows(&batch, &rows, scene_rows, NULL, ++step);
    }
    gpu_batch_free(&batch);
    rig_destroy(&rig);
    scene_free(&scene);
    free_device_rows(&rows);
}

/* A graph goes by what arrays and slots hold when it runs: versions that left are refused. */
static void a_graph_of_device_rows_refuses_what_has_left(void **state)
{
    static int32_t scene_rows[ROWS_MAX];
    static device_rows rows;
    sp_graph *graph = NULL;
    host_streams streams;
    uint64_t step = 0;
    delta_scene scene;
    sp_error error;
    delta_rig rig;
    gpu_batch batch;

    (void)state;
    all_rows(scene_rows, ROWS_MAX);
    make_device_rows(&rows);
    make_streams(&streams);
    make_scene(&scene, SP_DTYPE_BF16, 200, false);
    rig = rig_create_on(gpu, &scene, 16, NULL, 300);
    batch = gpu_batch_make(&rig, 300);
    batch.stream = streams.stream;
    gpu_batch_set(&batch, scene_rows, 300, 300);
    spoil_rows(&batch, &rows, 0, 1);
    check_device_rows(&batch, &rows, scene_rows, NULL, ++step);
    assert_ok(sp_graph_begin(streams.stream, &error), &error);
    enqueue_from_device(&batch, &rows);
    assert_ok(sp_graph_end(streams.stream, &graph, &error), &error);
    for (int32_t slot = 0; slot < 4; slot++) {
        spoil_rows(&batch, &rows, slot % 2 == 0 ? 0 : 9, (uint64_t)slot);
        check_device_rows(&batch, &rows, scene_rows, graph, ++step);
        /* The arrays still name what is gone. */
        hand_unload(rig.pool.pool, hand_handle(rig.pool.pool, slot));
        check_device_rows(&batch, &rows, scene_rows, graph, ++step);
        assert_int_equal(hand_load_adapter(&rig.pool, scene.adapters[slot]).slot, slot);
        check_device_rows(&batch, &rows, scene_rows, graph, ++step);
        gpu_batch_set(&batch, scene_rows, 300, 300);
    }
    sp_graph_destroy(graph);
    gpu_batch_free(&batch);
    rig_destroy(&rig);
    scene_free(&scene);
    free_streams(&streams);
    free_device_rows(&rows);
}

static void bad_device_rows_are_refused(void **state)
{
    static device_rows rows;
    sp_device_rows call;
    delta_scene scene;
    sp_delta_call apply;
    sp_error error;
    delta_rig rig;
    gpu_batch batch;

    (void)state;
    make_device_rows(&rows);
    make_scene(&scene, SP_DTYPE_BF16, 200, false);
    rig = rig_create_on(gpu, &scene, 16, NULL, 20);
    batch = gpu_batch_make(&rig, 20);
    rows.n_rows = 21;
    call = rows_of(&rows);
    assert_int_equal(sp_plan_from_device(rig.delta, &call, NULL, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "n_rows");
    call.n_rows = 4;
    call.generation = NULL;
    assert_int_equal(sp_plan_from_device(rig.delta, &call, NULL, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "generation");
    apply = gpu_batch_call(&batch);
    apply.plan = NULL; /* no such step has begun */
    assert_int_equal(sp_delta_apply(rig.delta, &apply, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "plan");
    gpu_batch_free(&batch);
    rig_destroy(&rig);
    scene_free(&scene);
    free_device_rows(&rows);
}

/* ---- memory -------------------------------------------------------------------------------- */

/* Gives out memory of another sp_device of the same GPU, and counts it. */
typedef struct host_memory {
    sp_device *device;
    size_t blocks, bytes, pinned_blocks, pinned_bytes, most;
} host_memory;

static void *give(void *user, size_t bytes)
{
    host_memory *host = user;
    void *memory = NULL;

    assert_ok(sp_device_alloc(host->device, bytes, &memory, NULL), NULL);
    host->blocks++;
    host->bytes += bytes;
    host->most = host->bytes > host->most ? host->bytes : host->most;
    return memory;
}

static void take_back(void *user, void *memory, size_t bytes)
{
    host_memory *host = user;

    host->blocks--;
    host->bytes -= bytes;
    sp_device_free(host->device, memory);
}

static void *give_pinned(void *user, size_t bytes)
{
    host_memory *host = user;
    void *memory = NULL;

    assert_ok(sp_device_alloc_pinned(host->device, bytes, &memory, NULL), NULL);
    host->pinned_blocks++;
    host->pinned_bytes += bytes;
    return memory;
}

static void take_pinned(void *user, void *memory, size_t bytes)
{
    host_memory *host = user;

    host->pinned_blocks--;
    host->pinned_bytes -= bytes;
    sp_device_free_pinned(host->device, memory);
}

static void a_small_step_in_the_hosts_memory(void **state)
{
    static int32_t rows[ROWS];
    host_memory host = {.device = gpu};
    size_t before = sp_device_allocated_bytes(gpu);
    void *want[SCENE_SITES_MAX];
    sp_device_options options;
    sp_device *device = NULL;
    delta_scene scene;
    sp_error error;

    (void)state;
    all_rows(rows, ROWS);
    make_scene(&scene, SP_DTYPE_BF16, 520, true);
    sp_device_options_default(&options, sizeof options);
    options.user = &host;
    options.alloc = give;
    options.free = take_back;
    options.alloc_pinned = give_pinned;
    options.free_pinned = take_pinned;
    assert_ok(sp_device_open("cuda", &options, &device, &error), &error);
    for (int own = 0; own < 2; own++) {
        delta_rig rig = rig_create_on(own == 0 ? gpu : device, &scene, 16, NULL, ROWS);
        gpu_batch batch = gpu_batch_make(&rig, ROWS);

        gpu_batch_set(&batch, rows, ROWS, ROWS);
        gpu_batch_run(&batch);
        if (own == 0) {
            take_outputs(&batch, want);
            assert_int_equal(host.most, 0);
        } else {
            expect_outputs(&batch, want);
            assert_int_equal(host.bytes, sp_device_allocated_bytes(device));
            assert_true(host.pinned_blocks > 0);
        }
        gpu_batch_free(&batch);
        rig_destroy(&rig);
    }
    assert_true(host.most > 0);
    sp_device_close(device);
    assert_int_equal(host.blocks + host.bytes, 0);
    assert_int_equal(host.pinned_blocks + host.pinned_bytes, 0);
    assert_int_equal(sp_device_allocated_bytes(gpu), before);
    free_outputs(&scene, want);
    scene_free(&scene);
}

/* ---- the current context ------------------------------------------------------------------- */

/* Of the driver, which the library does not link to either. */
typedef struct driver {
    int (*get_current)(void **context);
    int (*set_current)(void *context);
    int (*retain)(void **context, int gpu);
    int (*release)(int gpu);
    int (*create)(void **context, unsigned flags, int gpu);
    int (*destroy)(void *context);
} driver;

/* A function's address comes as an object's. */
static void find(void *library, const char *name, void *out_fn)
{
    void *symbol = dlsym(library, name);

    memcpy(out_fn, &symbol, sizeof symbol);
}

static driver open_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    driver d;

    assert_non_null(library);
    find(library, "cuCtxGetCurrent", &d.get_current);
    find(library, "cuCtxSetCurrent", &d.set_current);
    find(library, "cuDevicePrimaryCtxRetain", &d.retain);
    find(library, "cuDevicePrimaryCtxRelease_v2", &d.release);
    find(library, "cuCtxCreate_v2", &d.create);
    find(library, "cuCtxDestroy_v2", &d.destroy);
    assert_true(d.get_current != NULL && d.set_current != NULL && d.retain != NULL);
    assert_non_null(d.release);
    return d;
}

static void *current(const driver *d)
{
    void *context = NULL;

    assert_int_equal(d->get_current(&context), 0);
    return context;
}

/* Every kind of call, with this context current before and after each. */
static void check_context(const driver *d, void *context)
{
    static int32_t rows[ROWS];
    host_streams streams;
    delta_scene scene;
    sp_device *device = NULL;
    sp_error error;
    delta_rig rig;
    gpu_batch batch;

    all_rows(rows, ROWS);
    assert_int_equal(d->set_current(context), 0);
#define STAYS(call) \
    call;           \
    assert_ptr_equal(current(d), context)
    STAYS(make_scene(&scene, SP_DTYPE_BF16, 264, true));
    STAYS(make_streams(&streams));
    STAYS(rig = rig_create_on(gpu, &scene, 16, NULL, ROWS));
    STAYS(batch = gpu_batch_make(&rig, ROWS));
    STAYS(gpu_batch_set(&batch, rows, ROWS, ROWS));
    STAYS(gpu_batch_run(&batch));
    batch.stream = streams.stream;
    STAYS(gpu_batch_set(&batch, rows, ROWS, ROWS));
    STAYS(gpu_batch_run(&batch));
    STAYS(gpu_batch_read(&batch, 0));
    STAYS(gpu_batch_free(&batch));
    STAYS(rig_destroy(&rig));
    STAYS(free_streams(&streams));
    STAYS(assert_ok(sp_device_open("cuda", NULL, &device, &error), &error));
    STAYS(sp_device_close(device));
#undef STAYS
    scene_free(&scene);
}

static void *check_without_context(void *user)
{
    const driver *d = user;

    assert_null(current(d)); /* as every new thread */
    check_context(d, NULL);
    return NULL;
}

static void the_current_context_is_left_as_it_was(void **state)
{
    driver d = open_driver();
    void *own = NULL, *primary = NULL, *before = current(&d);
    pthread_t thread;

    (void)state;
    assert_int_equal(pthread_create(&thread, NULL, check_without_context, &d), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    if (d.create != NULL && d.destroy != NULL) { /* newer drivers may be without this form */
        assert_int_equal(d.create(&own, 0, 0), 0);
        check_context(&d, own);
        assert_int_equal(d.set_current(before), 0);
        assert_int_equal(d.destroy(own), 0);
    }
    if (d.retain(&primary, 1) == 0) { /* where there is a second GPU */
        check_context(&d, primary);
        assert_int_equal(d.set_current(before), 0);
        assert_int_equal(d.release(1), 0);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_small_step_on_the_hosts_streams),
        cmocka_unit_test(the_default_stream_can_be_wrapped),
        cmocka_unit_test(a_small_f32_x_is_rounded_first),
        cmocka_unit_test(a_small_single_call_takes_an_f32_x),
        cmocka_unit_test(a_small_plan_from_the_device_is_the_oracles),
        cmocka_unit_test(a_graph_of_device_rows_refuses_what_has_left),
        cmocka_unit_test(bad_device_rows_are_refused),
        cmocka_unit_test(a_small_step_in_the_hosts_memory),
        cmocka_unit_test(the_current_context_is_left_as_it_was),
    };

    return gpu_main(&gpu, tests, sizeof tests / sizeof tests[0], NULL, NULL, argc, argv);
}
