/*
 * test_cuda_delta.c: sp_delta over a pool on a GPU. Every scene row alone is held against a double
 * reference; batches of any size, mix, order, slots and pool rank, eager or as a graph, must then
 * have the bytes of their rows alone. Skipped where there is no GPU.
 */
#include "cuda/gpu_batch.h"
#include "kernels/cuda/kernels_cuda.h"

#include <math.h>

enum { ROWS = 72, LARGEST = 8192, GRAPH_ROWS_MAX = 600 };

static sp_device *gpu;

/* ---- scenes -------------------------------------------------------------------------------- */

typedef struct alone {
    delta_scene scene;
    void *y[ROWS][SCENE_SITES_MAX];
} alone;

static const int32_t wide_ranks[] = {1, 4, 8, 12, 16, 32, 64, 128, 256, 0};
static const int32_t narrow_ranks[] = {16, 1, 8, 12, 16, 0, 4, 9};
static const int32_t large_ranks[] = {512, 24, 72, 128, 256, 64, 8, 100, 200, 0};
static const int32_t ranks_to_128[] = {128, 72, 24, 64, 16, 100, 0, 9};
static const int32_t ranks_to_64[] = {64, 9, 24, 56, 40, 0};
static const int32_t ranks_of_forty[] = {64, 9,  24, 56, 40, 0,  16, 64, 8,  33, 64, 9, 24, 56,
                                         40, 0,  16, 64, 8,  33, 64, 9,  24, 56, 40, 0, 16, 64,
                                         8,  33, 64, 9,  24, 56, 40, 0,  16, 64, 8,  33};
static const int32_t ranks_to_256[] = {256, 64, 200, 136, 72, 32};

/* q, k, v of one model, an odd one in f16, then down and gate, up of three; then large ranks, in
 * 16-byte vectors, with an end of k that is no whole chunk, and of odd sizes. pool_rank: for the
 * first rig; largest: batch that is tried. */
typedef struct scene_shape {
    sp_dtype dtype;
    int32_t largest, pool_rank, k_in, n_sites, n_out[SCENE_SITES_MAX], pad, n_adapters;
    const int32_t *ranks;
    sp_dtype y_type[SCENE_SITES_MAX];
} scene_shape;

/* The first shape of large ranks, small ones in f16 and bf16, and one of which the expand's windows
 * have two passes. */
enum {
    LARGE_RANKS = 7,
    SMALL_LARGE = LARGE_RANKS + 1,
    SMALL_LARGE_BF16 = LARGE_RANKS + 4,
    TWO_PASSES = LARGE_RANKS + 7
};

static const scene_shape shapes[] = {
    {SP_DTYPE_BF16,
     LARGEST,
     256,
     4096,
     3,
     {1024, 136, 512},
     8,
     10,
     wide_ranks,
     {SP_DTYPE_BF16, SP_DTYPE_F32, SP_DTYPE_BF16}},
    {SP_DTYPE_F16,
     2048,
     16,
     1101,
     3,
     {90, 1, 37},
     5,
     8,
     narrow_ranks,
     {SP_DTYPE_F16, SP_DTYPE_F16, SP_DTYPE_F32}},
    {SP_DTYPE_BF16, 2048, 16, 12288, 1, {4096}, 16, 8, narrow_ranks, {SP_DTYPE_BF16}},
    {SP_DTYPE_F16,
     2048,
     16,
     5120,
     2,
     {2560, 2560},
     8,
     8,
     narrow_ranks,
     {SP_DTYPE_F16, SP_DTYPE_F16}},
    {SP_DTYPE_BF16,
     257,
     16,
     4096,
     2,
     {12288, 12288},
     8,
     8,
     narrow_ranks,
     {SP_DTYPE_BF16, SP_DTYPE_BF16}},
    {SP_DTYPE_BF16, 257, 16, 25600, 1, {5120}, 8, 8, narrow_ranks, {SP_DTYPE_BF16}},
    {SP_DTYPE_BF16,
     2048,
     16,
     1024,
     3,
     {48, 1536, 56},
     8,
     8,
     narrow_ranks,
     {SP_DTYPE_F32, SP_DTYPE_BF16, SP_DTYPE_F32}},
    {SP_DTYPE_BF16,
     LARGEST,
     512,
     4096,
     3,
     {1024, 136, 512},
     8,
     10,
     large_ranks,
     {SP_DTYPE_BF16, SP_DTYPE_BF16, SP_DTYPE_BF16}},
    {SP_DTYPE_F16,
     2048,
     128,
     1160,
     2,
     {264, 512},
     8,
     8,
     ranks_to_128,
     {SP_DTYPE_F16, SP_DTYPE_F16}},
    {SP_DTYPE_BF16, 2048, 256, 12288, 1, {4096}, 8, 6, ranks_to_256, {SP_DTYPE_BF16}},
    {SP_DTYPE_BF16, 600, 64, 1101, 2, {90, 64}, 5, 8, narrow_ranks, {SP_DTYPE_BF16, SP_DTYPE_BF16}},
    {SP_DTYPE_BF16,
     2048,
     128,
     1160,
     2,
     {264, 512},
     8,
     8,
     ranks_to_128,
     {SP_DTYPE_BF16, SP_DTYPE_BF16}},
    {SP_DTYPE_BF16, 2048, 64, 3592, 1, {520}, 8, 6, ranks_to_64, {SP_DTYPE_BF16}},
    {SP_DTYPE_BF16, 2048, 64, 2056, 1, {264}, 8, 40, ranks_of_forty, {SP_DTYPE_BF16}},
    {SP_DTYPE_BF16, LARGEST, 64, 520, 1, {2184}, 8, 6, ranks_to_64, {SP_DTYPE_BF16}},
    {SP_DTYPE_BF16,
     2048,
     128,
     1024,
     3,
     {48, 1536, 56},
     8,
     8,
     ranks_to_128,
     {SP_DTYPE_F32, SP_DTYPE_BF16, SP_DTYPE_F32}},
};

static void make_scene(const scene_shape *shape, delta_scene *out_scene)
{
    static const sp_module modules[] = {SP_MODULE_Q_PROJ, SP_MODULE_K_PROJ, SP_MODULE_V_PROJ};
    sp_test_random random = {(uint64_t)shape->k_in};

    *out_scene = (delta_scene){
        .dtype = shape->dtype,
        .n_rows = ROWS,
        .n_adapters = shape->n_adapters,
        .n_sites = shape->n_sites,
        .ranks = shape->ranks,
        .pad = shape->pad,
    };
    for (int32_t i = 0; i < shape->n_sites; i++) {
        out_scene->dims[i] = (site_dims){0, modules[i], shape->k_in, shape->n_out[i]};
        out_scene->y_type[i] = shape->y_type[i];
    }
    scene_fill(out_scene, shape->pool_rank, &random);
    for (int32_t row = 0; row < ROWS; row++) /* some of each, and of the base */
        out_scene->row_adapter[row] = (row * 5) % (shape->n_adapters + 1) - 1;
}

static void make_alone(const scene_shape *shape, alone *base)
{
    delta_rig rig;
    gpu_batch batch;

    make_scene(shape, &base->scene);
    rig = rig_create_on(gpu, &base->scene, shape->pool_rank, NULL, 1);
    batch = gpu_batch_make(&rig, 1);
    for (int32_t row = 0; row < ROWS; row++) {
        gpu_batch_set(&batch, &row, 1, 1);
        gpu_batch_run(&batch);
        for (int32_t i = 0; i < base->scene.n_sites; i++) {
            size_t bytes = scene_y_row_bytes(&base->scene, i);

            base->y[row][i] = malloc(bytes);
            assert_non_null(base->y[row][i]);
            memcpy(base->y[row][i], gpu_batch_read(&batch, i), bytes);
        }
    }
    gpu_batch_free(&batch);
    rig_destroy(&rig);
}

static void free_alone(alone *base)
{
    for (int32_t row = 0; row < ROWS; row++)
        for (int32_t i = 0; i < base->scene.n_sites; i++)
            free(base->y[row][i]);
    scene_free(&base->scene);
}

static void expect_same(const alone *base, gpu_batch *batch, const int32_t *rows, int32_t n_rows)
{
    for (int32_t i = 0; i < base->scene.n_sites; i++) {
        size_t bytes = scene_y_row_bytes(&base->scene, i);
        const char *y = gpu_batch_read(batch, i);

        for (int32_t at = 0; at < n_rows; at++)
            if (rows[at] >= 0)
                assert_memory_equal(y + (size_t)at * bytes, base->y[rows[at]][i], bytes);
    }
}

static void run_and_expect(const alone *base, gpu_batch *batch, const int32_t *rows, int32_t n_rows)
{
    gpu_batch_set(batch, rows, n_rows, n_rows);
    gpu_batch_run(batch);
    expect_same(base, batch, rows, n_rows);
}

/* ---- against double ------------------------------------------------------------------------ */

typedef struct exact_row {
    double xa[512], size[512]; /* the sum, and that of the absolute values */
} exact_row;

static void exact_xa(const delta_scene *scene, const sp_adapter_site *site, int32_t row,
                     exact_row *out)
{
    for (int32_t c = 0; c < site->rank; c++) {
        out->xa[c] = out->size[c] = 0.0;
        for (int32_t k = 0; k < site->a.cols; k++) {
            double part = hand_load(scene->dtype, scene->x, (int64_t)row * scene->x_stride + k) *
                          hand_load(scene->dtype, site->a.data, (int64_t)c * site->a.cols + k);

            out->xa[c] += part;
            out->size[c] += fabs(part);
        }
    }
}

/* Each of the three roundings, and the FP32 sums, may lose what they can at most. */
static void check_row(const alone *base, int32_t row, int32_t i)
{
    const delta_scene *scene = &base->scene;
    const sp_adapter_site *site = scene_site(scene, scene->row_adapter[row], i);
    size_t bytes = scene_y_row_bytes(scene, i), row_bytes;
    const char *y0 = (const char *)scene->y0[i] + (size_t)row * bytes;
    double u = scene->dtype == SP_DTYPE_F16 ? 0x1p-11 : 0x1p-8, scale;
    double u_y = scene->y_type[i] == SP_DTYPE_F32 ? 0x1p-24 : u;
    exact_row exact;

    if (site == NULL) {
        assert_memory_equal(base->y[row][i], y0, bytes);
        return;
    }
    scale = (double)site->scale * (double)scene->row_scale[row];
    exact_xa(scene, site, row, &exact);
    for (int32_t n = 0; n < site->b.rows; n++) {
        double start = hand_load(scene->y_type[i], y0, n), delta = 0.0, loss = 0.0, bound, got;

        for (int32_t c = 0; c < site->rank; c++) {
            double b = hand_load(scene->dtype, site->b.data, (int64_t)n * site->rank + c);

            delta += exact.xa[c] * b;
            loss += fabs(b) * (u * fabs(exact.xa[c]) + 0x1p-16 * exact.size[c] + 0x1p-24);
        }
        bound = scale * (loss + u * (fabs(delta) + loss) + 0x1p-24);
        bound += u_y * (fabs(start + scale * delta) + bound) + 0x1p-24;
        got = hand_load(scene->y_type[i], base->y[row][i], n);
        if (!(fabs(got - (start + scale * delta)) <= bound))
            fail_msg("k %d output %d row %d column %d: %g, not %g +- %g", (int)site->a.cols, (int)i,
                     (int)row, (int)n, got, start + scale * delta, bound);
    }
    row_bytes = (size_t)site->b.rows * sp_dtype_bytes(scene->y_type[i]);
    assert_memory_equal((const char *)base->y[row][i] + row_bytes, y0 + row_bytes,
                        bytes - row_bytes);
}

/* ---- mixes --------------------------------------------------------------------------------- */

/* A scene row of this adapter, or of the base for -1. */
static int32_t row_of(const delta_scene *scene, int32_t adapter, sp_test_random *random)
{
    for (;;) {
        int32_t row = (int32_t)sp_test_below(random, ROWS);

        if (scene->row_adapter[row] == adapter)
            return row;
    }
}

enum { MIX_ONE, MIX_ANY, MIX_ZIPF, MIX_TURNS, MIXES };

static void mix_rows(const delta_scene *scene, int mix, int32_t *rows, int32_t n,
                     sp_test_random *random)
{
    int32_t one = (int32_t)sp_test_below(random, (uint32_t)scene->n_adapters);

    for (int32_t i = 0; i < n; i++) {
        int32_t adapter = one;

        if (mix == MIX_ZIPF) /* each half as often as the one before */
            for (adapter = 0; adapter + 1 < scene->n_adapters && sp_test_below(random, 2) != 0;)
                adapter++;
        if (mix == MIX_TURNS)
            adapter = i % (scene->n_adapters + 1) - 1;
        rows[i] =
            mix == MIX_ANY ? (int32_t)sp_test_below(random, ROWS) : row_of(scene, adapter, random);
    }
}

/* ---- the tests ----------------------------------------------------------------------------- */

static void check_shapes(size_t first, size_t end)
{
    static const int32_t sizes[] = {1,  2,  3,  7,   8,   9,   15,  16,  17,   31,
                                    48, 49, 64, 127, 128, 129, 256, 257, 2048, LARGEST};
    static int32_t rows[LARGEST];
    sp_test_random random = {1};

    for (size_t s = first; s < end; s++) {
        static alone base;
        delta_rig rig;
        gpu_batch batch;
        int32_t largest = shapes[s].largest;

        make_alone(&shapes[s], &base);
        for (int32_t row = 0; row < ROWS; row++)
            for (int32_t i = 0; i < base.scene.n_sites; i++)
                check_row(&base, row, i);
        rig = rig_create_on(gpu, &base.scene, shapes[s].pool_rank, NULL, largest);
        batch = gpu_batch_make(&rig, largest);
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0] && sizes[i] <= largest; i++)
            for (int mix = 0; mix < MIXES; mix++) {
                if (sizes[i] >= 2048 && (mix == MIX_ONE || mix == MIX_TURNS) && s != first)
                    continue;
                mix_rows(&base.scene, mix, rows, sizes[i], &random);
                run_and_expect(&base, &batch, rows, sizes[i]);
            }
        gpu_batch_free(&batch);
        rig_destroy(&rig);
        free_alone(&base);
    }
}

static void rows_match_double_and_batches_match_rows(void **state)
{
    (void)state;
    check_shapes(0, LARGE_RANKS);
}

static void large_ranks_match_double_and_rows(void **state)
{
    (void)state;
    check_shapes(LARGE_RANKS, sizeof shapes / sizeof shapes[0]);
}

/* Every run of n rows gives each row's bytes. */
static void repeat(const scene_shape *shape, int32_t pool_rank, int32_t n)
{
    enum { TIMES = 1000 };
    static int32_t rows[LARGEST];
    static alone base;
    sp_test_random random = {6};
    delta_rig rig;
    gpu_batch batch;

    make_alone(shape, &base);
    rig = rig_create_on(gpu, &base.scene, pool_rank, NULL, n);
    batch = gpu_batch_make(&rig, n);
    mix_rows(&base.scene, MIX_ANY, rows, n, &random);
    for (int i = 0; i < TIMES; i++)
        run_and_expect(&base, &batch, rows, n);
    gpu_batch_free(&batch);
    rig_destroy(&rig);
    free_alone(&base);
}

/* Pools of three ranks: the rings' stages and buffers depend on it. */
static void rank_512_repeats(void **state)
{
    (void)state;
    repeat(&shapes[LARGE_RANKS], 512, 2048);
}

static void rank_256_repeats(void **state)
{
    (void)state;
    repeat(&shapes[SMALL_LARGE_BF16], 256, 2048);
}

static void rank_128_repeats(void **state)
{
    (void)state;
    repeat(&shapes[SMALL_LARGE_BF16], 128, 2048);
}

static void windows_of_two_passes_repeat(void **state)
{
    (void)state;
    repeat(&shapes[TWO_PASSES], 64, LARGEST);
}

static void shuffle(int32_t *values, int32_t n, sp_test_random *random)
{
    for (int32_t i = n - 1; i > 0; i--) {
        int32_t j = (int32_t)sp_test_below(random, (uint32_t)i + 1), other = values[j];

        values[j] = values[i];
        values[i] = other;
    }
}

/* Also moves each row through all columns of a tile: rotations of eight rows of one adapter. */
static void order_slots_and_pool_rank_do_not_matter(void **state)
{
    static const int32_t pool_ranks[] = {16, 64, 256};
    sp_test_random random = {2};
    int32_t rows[ROWS], order[8] = {0, 1, 2, 3, 4, 5, 6, 7}, eight[8];
    static alone base;

    (void)state;
    make_alone(&shapes[3], &base);
    for (int32_t i = 0; i < ROWS; i++)
        rows[i] = i;
    for (size_t p = 0; p < 3; p++) {
        delta_rig rig = rig_create_on(gpu, &base.scene, pool_ranks[p], order, ROWS);
        gpu_batch batch = gpu_batch_make(&rig, ROWS);

        for (int round = 0; round < 6; round++) {
            run_and_expect(&base, &batch, rows, ROWS - round);
            shuffle(rows, ROWS, &random);
        }
        for (int32_t i = 0; i < 8; i++)
            eight[i] = row_of(&base.scene, 0, &random);
        for (int32_t turn = 0; turn < 8; turn++) {
            int32_t first = eight[0];

            run_and_expect(&base, &batch, eight, 8);
            memmove(eight, eight + 1, 7 * sizeof *eight);
            eight[7] = first;
        }
        gpu_batch_free(&batch);
        rig_destroy(&rig);
        shuffle(order, 8, &random);
    }
    free_alone(&base);
}

/* A row of NaN stays in its row. */
static void nan_neighbours_do_not_matter(void **state)
{
    sp_test_random random = {3};
    int32_t rows[ROWS];
    static alone base;
    delta_rig rig;
    gpu_batch batch;

    (void)state;
    make_alone(&shapes[0], &base);
    rig = rig_create_on(gpu, &base.scene, 256, NULL, ROWS);
    batch = gpu_batch_make(&rig, ROWS);
    for (int32_t i = 0; i < ROWS; i++)
        rows[i] = i % 3 == 1 ? SCENE_NAN - i : i;
    shuffle(rows, ROWS, &random);
    run_and_expect(&base, &batch, rows, ROWS);
    gpu_batch_free(&batch);
    rig_destroy(&rig);
    free_alone(&base);
}

/* Shrink on a stream of its own and the expand on the main one, eager and captured. */
static void enqueue_halves(gpu_batch *batch, sp_stream *side, sp_event *ready, sp_event *shrunk)
{
    sp_delta *delta = batch->rig->delta;
    sp_stream *main_stream = sp_device_main_stream(gpu);
    sp_delta_call call = gpu_batch_call(batch);
    sp_error error;

    assert_ok(sp_delta_start(delta, batch->plan, NULL, NULL), NULL);
    assert_ok(sp_event_record(ready, main_stream, NULL), NULL);
    assert_ok(sp_stream_wait_event(side, ready, NULL), NULL);
    call.stream = side;
    assert_ok(sp_delta_shrink(delta, &call, &error), &error);
    assert_ok(sp_event_record(shrunk, side, NULL), NULL);
    assert_ok(sp_stream_wait_event(main_stream, shrunk, NULL), NULL);
    call.stream = NULL;
    call.x = NULL;
    assert_ok(sp_delta_expand(delta, &call, &error), &error);
}

static void halves_have_the_bits_of_the_whole(void **state)
{
    static const int32_t sizes[] = {1, 9, ROWS};
    sp_stream *side = NULL, *main_stream = sp_device_main_stream(gpu);
    sp_event *ready = NULL, *shrunk = NULL;
    int32_t rows[ROWS];
    static alone base;
    delta_rig rig;
    gpu_batch batch;

    (void)state;
    make_alone(&shapes[0], &base);
    rig = rig_create_on(gpu, &base.scene, 256, NULL, ROWS);
    batch = gpu_batch_make(&rig, ROWS);
    assert_ok(sp_stream_create(gpu, &side, NULL), NULL);
    assert_ok(sp_event_create(gpu, &ready, NULL), NULL);
    assert_ok(sp_event_create(gpu, &shrunk, NULL), NULL);
    for (int32_t i = 0; i < ROWS; i++)
        rows[i] = ROWS - 1 - i;
    for (size_t s = 0; s < 3; s++) {
        sp_graph *graph = NULL;

        gpu_batch_set(&batch, rows, sizes[s], sizes[s]);
        assert_ok(sp_delta_upload(rig.delta, batch.plan, NULL, NULL), NULL);
        enqueue_halves(&batch, side, ready, shrunk);
        expect_same(&base, &batch, rows, sizes[s]);
        gpu_batch_set(&batch, rows, sizes[s], sizes[s]);
        assert_ok(sp_graph_begin(main_stream, NULL), NULL);
        enqueue_halves(&batch, side, ready, shrunk);
        assert_ok(sp_graph_end(main_stream, &graph, NULL), NULL);
        assert_ok(sp_graph_launch(graph, main_stream, NULL), NULL);
        expect_same(&base, &batch, rows, sizes[s]);
        sp_graph_destroy(graph);
    }
    sp_event_destroy(shrunk);
    sp_event_destroy(ready);
    sp_stream_destroy(side);
    gpu_batch_free(&batch);
    rig_destroy(&rig);
    free_alone(&base);
}

static void replay(gpu_batch *batch, sp_graph *graph)
{
    assert_ok(sp_delta_upload(batch->rig->delta, batch->plan, NULL, NULL), NULL);
    assert_ok(sp_graph_launch(graph, sp_device_main_stream(gpu), NULL), NULL);
}

/* Takes adapter 1 out of its slot and puts it back through another load, with a swap of neighbours.
 */
static void swap_slots(delta_rig *rig, int32_t first, int32_t second)
{
    int32_t slot_of_first = rig->slot_of[first], slot_of_second = rig->slot_of[second];

    hand_unload(rig->pool.pool, hand_handle(rig->pool.pool, slot_of_first));
    hand_unload(rig->pool.pool, hand_handle(rig->pool.pool, slot_of_second));
    /* The first EMPTY slot is the victim: load the one that shall be lower first. */
    if (slot_of_second < slot_of_first) {
        int32_t other = first;

        first = second;
        second = other;
        other = slot_of_first;
        slot_of_first = slot_of_second;
        slot_of_second = other;
    }
    assert_int_equal(hand_load_adapter(&rig->pool, rig->scene->adapters[second]).slot,
                     slot_of_first);
    assert_int_equal(hand_load_adapter(&rig->pool, rig->scene->adapters[first]).slot,
                     slot_of_second);
    rig->slot_of[first] = slot_of_second;
    rig->slot_of[second] = slot_of_first;
}

/* Captured with one adapter; replayed with 0 to all others, after swaps and other allocations, and
 * then 100 times the same. */
static void check_graph(int32_t captured)
{
    static const int32_t all = 10;
    sp_stream *main_stream = sp_device_main_stream(gpu);
    sp_test_random random = {4};
    sp_graph *graph = NULL;
    int32_t rows[GRAPH_ROWS_MAX];
    static alone base;
    delta_rig rig;
    gpu_batch batch;

    make_alone(&shapes[0], &base);
    rig = rig_create_on(gpu, &base.scene, 256, NULL, GRAPH_ROWS_MAX);
    batch = gpu_batch_make(&rig, GRAPH_ROWS_MAX);
    for (int32_t i = 0; i < captured; i++)
        rows[i] = row_of(&base.scene, 4, &random);
    run_and_expect(&base, &batch, rows, captured);
    assert_ok(sp_graph_begin(main_stream, NULL), NULL);
    gpu_batch_enqueue(&batch);
    assert_ok(sp_graph_end(main_stream, &graph, NULL), NULL);
    for (int32_t adapters = 0; adapters <= all; adapters++) {
        void *other = NULL;

        for (int32_t i = 0; i < captured; i++)
            rows[i] = row_of(&base.scene, adapters == 0 ? -1 : i % adapters, &random);
        gpu_batch_set(&batch, rows, captured - adapters, captured);
        replay(&batch, graph);
        expect_same(&base, &batch, rows, captured - adapters);
        assert_ok(sp_device_alloc(gpu, (size_t)(adapters + 1) << 20, &other, NULL), NULL);
        swap_slots(&rig, adapters % all, (adapters + 3) % all);
        gpu_batch_set(&batch, rows, captured, captured);
        replay(&batch, graph);
        expect_same(&base, &batch, rows, captured);
        /* Fewer rows than were captured, in a plan of that size: the others stay as they are. */
        gpu_batch_set(&batch, rows, 5, 5);
        replay(&batch, graph);
        expect_same(&base, &batch, rows, 5);
        sp_device_free(gpu, other);
    }
    for (int again = 0; again < 100; again++) {
        gpu_batch_set(&batch, rows, captured, captured);
        replay(&batch, graph);
        expect_same(&base, &batch, rows, captured);
    }
    sp_graph_destroy(graph);
    gpu_batch_free(&batch);
    rig_destroy(&rig);
    free_alone(&base);
}

static void a_graph_of_few_rows_replays_whatever_the_slots_hold(void **state)
{
    (void)state;
    check_graph(64);
}

static void a_graph_of_many_rows_replays_whatever_the_slots_hold(void **state)
{
    (void)state;
    check_graph(GRAPH_ROWS_MAX);
}

/* ---- groups -------------------------------------------------------------------------------- */

/* Four sites that share x, other widths behind them, and the head at layer -1. */
static const site_dims group_dims[] = {
    {0, SP_MODULE_GDN_IN_QKV, 256, 96}, {0, SP_MODULE_GDN_IN_Z, 256, 64},
    {0, SP_MODULE_GDN_IN_B, 256, 4},    {0, SP_MODULE_GDN_IN_A, 256, 4},
    {0, SP_MODULE_GDN_OUT, 64, 256},    {1, SP_MODULE_GATE_PROJ, 256, 512},
    {1, SP_MODULE_UP_PROJ, 256, 512},   {1, SP_MODULE_DOWN_PROJ, 512, 256},
    {-1, SP_MODULE_LM_HEAD, 256, 1000},
};

enum {
    GROUP_SITES = sizeof group_dims / sizeof group_dims[0],
    GROUP_ROWS = 11,
    GROUP_STRIDE = 512
};

typedef struct group_test {
    hand_pool pool;
    hand_adapter *adapter; /* in slot 0; slot 1 is empty */
    uint16_t x[GROUP_ROWS * GROUP_STRIDE];
    gpu_buffer x_buffer;
    int32_t slots[GROUP_ROWS];
    sp_delta *delta;
    sp_plan *plan;
} group_test;

static sp_delta *make_delta(sp_pool *pool, bool no_apply, sp_module_set skipped)
{
    sp_delta_options options;
    sp_delta *delta = NULL;
    sp_error error;

    sp_delta_options_default(&options, sizeof options);
    options.pool = pool;
    options.rows_max = GROUP_ROWS;
    options.no_apply = no_apply;
    options.skip_modules = skipped;
    assert_ok(sp_delta_create(&options, &delta, &error), &error);
    return delta;
}

static void make_group_test(group_test *t)
{
    sp_test_random random = {5};
    hand_adapter *without;

    t->pool = hand_pool_create_on(gpu, group_dims, GROUP_SITES, 16, SP_DTYPE_BF16, 2);
    t->adapter = hand_adapter_create(1);
    for (int32_t i = 0; i < GROUP_SITES; i++)
        hand_adapter_add(t->adapter, &group_dims[i], 3 + i, 0.5f, SP_DTYPE_BF16, &random);
    assert_int_equal(hand_load_adapter(&t->pool, t->adapter).slot, 0);
    without = hand_adapter_create(2);
    assert_int_equal(hand_load_adapter(&t->pool, without).slot, 1);
    hand_adapter_destroy(without);
    for (int64_t i = 0; i < GROUP_ROWS * GROUP_STRIDE; i++)
        hand_store(SP_DTYPE_BF16, t->x, i, (double)sp_test_float(&random));
    for (int32_t i = 0; i < GROUP_ROWS; i++)
        t->slots[i] = i % 3 == 2 ? SP_SLOT_BASE : i % 4 == 3;
    t->x_buffer = gpu_buffer_make(gpu, sizeof t->x);
    gpu_buffer_write(gpu, &t->x_buffer, t->x, sizeof t->x);
    t->delta = make_delta(t->pool.pool, false, 0);
    assert_ok(sp_plan_create(GROUP_ROWS, 2, &t->plan, NULL), NULL);
    hand_plan_rows(t->plan, t->pool.pool, t->slots, NULL, GROUP_ROWS);
}

static void free_group_test(group_test *t)
{
    sp_plan_destroy(t->plan);
    sp_delta_destroy(t->delta);
    gpu_buffer_free(gpu, &t->x_buffer);
    hand_adapter_destroy(t->adapter);
    hand_pool_destroy(&t->pool);
}

static sp_dtype group_type(int32_t site)
{
    return group_dims[site].module == SP_MODULE_LM_HEAD ? SP_DTYPE_F32 : SP_DTYPE_BF16;
}

/* A y of zeros for this site. */
static gpu_buffer group_y(const group_test *t, int32_t site, sp_delta_output *out_output)
{
    size_t bytes = (size_t)(GROUP_ROWS * group_dims[site].n_out) * sp_dtype_bytes(group_type(site));
    gpu_buffer y = gpu_buffer_make(gpu, bytes);
    void *zeros = calloc(1, bytes);

    assert_non_null(zeros);
    gpu_buffer_write(gpu, &y, zeros, bytes);
    free(zeros);
    *out_output = (sp_delta_output){
        sizeof(sp_delta_output),
        known_site(t->pool.geometry, group_dims[site].layer, group_dims[site].module),
        y.device + GUARD_BYTES, group_dims[site].n_out, group_type(site)};
    return y;
}

static double group_value(const group_test *t, int32_t index, int32_t row, int32_t n)
{
    const sp_adapter_site *site = &t->adapter->sites[index];
    double want = 0.0;

    for (int32_t c = 0; t->slots[row] == 0 && c < site->rank; c++) {
        double xa = 0.0;

        for (int32_t k = 0; k < site->a.cols; k++)
            xa += hand_load(SP_DTYPE_BF16, t->x, row * GROUP_STRIDE + k) *
                  hand_load(SP_DTYPE_BF16, site->a.data, (int64_t)c * site->a.cols + k);
        want += 0.5 * xa * hand_load(SP_DTYPE_BF16, site->b.data, (int64_t)n * site->rank + c);
    }
    return want;
}

static void expect_site(const group_test *t, int32_t site, gpu_buffer *y)
{
    const char *got = gpu_buffer_read(gpu, y, y->bytes);
    double error2 = 0.0, sum2 = 0.0;

    for (int32_t row = 0; row < GROUP_ROWS; row++)
        for (int32_t n = 0; n < group_dims[site].n_out; n++) {
            double want = group_value(t, site, row, n);
            double value =
                hand_load(group_type(site), got, (int64_t)row * group_dims[site].n_out + n);

            error2 += (value - want) * (value - want);
            sum2 += want * want;
            if (t->slots[row] != 0)
                assert_true(value == 0.0);
        }
    if (!(error2 <= 5e-3 * 5e-3 * sum2))
        fail_msg("%s: relative error %g", sp_module_name(group_dims[site].module),
                 sqrt(error2 / sum2));
}

/* Applies sites [first, last) in one call. */
static void check_group(group_test *t, int32_t first, int32_t last)
{
    sp_delta_output outputs[SP_CUDA_SITES_MAX] = {{0}};
    gpu_buffer y[SP_CUDA_SITES_MAX];

    for (int32_t i = first; i < last; i++)
        y[i - first] = group_y(t, i, &outputs[i - first]);
    assert_ok(hand_apply(t->delta, t->plan, SP_DTYPE_BF16, t->x_buffer.device + GUARD_BYTES,
                         GROUP_STRIDE, outputs, last - first),
              NULL);
    for (int32_t i = first; i < last; i++) {
        expect_site(t, i, &y[i - first]);
        gpu_buffer_free(gpu, &y[i - first]);
    }
}

static void all_groups_of_a_model_are_right(void **state)
{
    static group_test t;

    (void)state;
    make_group_test(&t);
    assert_ok(sp_delta_upload(t.delta, t.plan, NULL, NULL), NULL);
    assert_ok(sp_delta_start(t.delta, t.plan, NULL, NULL), NULL);
    check_group(&t, 0, 4);
    check_group(&t, 4, 5);
    check_group(&t, 5, 7);
    check_group(&t, 7, 8);
    check_group(&t, 8, 9);
    free_group_test(&t);
}

/* ---- calls --------------------------------------------------------------------------------- */

/* Nothing may be written: y stays zeros. */
static void expect_untouched(gpu_buffer *y)
{
    const char *got = gpu_buffer_read(gpu, y, y->bytes);

    for (size_t i = 0; i < y->bytes; i++)
        assert_int_equal(got[i], 0);
}

static void bad_calls_are_refused_as_on_the_cpu(void **state)
{
    static group_test t;
    sp_delta_output output, bad;
    sp_delta_call call;
    gpu_buffer y;
    const void *x;

    (void)state;
    make_group_test(&t);
    y = group_y(&t, 5, &output);
    x = t.x_buffer.device + GUARD_BYTES;
    assert_int_equal(hand_apply(t.delta, t.plan, SP_DTYPE_BF16, x, 512, &output, 1), SP_ERR_STATE);
    assert_ok(sp_delta_upload(t.delta, t.plan, NULL, NULL), NULL);
    assert_ok(sp_delta_start(t.delta, t.plan, NULL, NULL), NULL);
    assert_int_equal(hand_apply(t.delta, t.plan, SP_DTYPE_BF16, x, 255, &output, 1), SP_ERR_STRIDE);
    call = hand_call(t.plan, SP_DTYPE_BF16, x, 255, &output, 1);
    assert_int_equal(sp_delta_shrink(t.delta, &call, NULL), SP_ERR_STRIDE);
    call = hand_call(t.plan, SP_DTYPE_BF16, NULL, 512, &output, 1);
    assert_int_equal(sp_delta_shrink(t.delta, &call, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_delta_expand(t.delta, &call, NULL), SP_ERR_STATE); /* no shrink */
    call.outputs = NULL;
    assert_int_equal(sp_delta_expand(t.delta, &call, NULL), SP_ERR_ARGUMENT);
    bad = output;
    bad.site = GROUP_SITES;
    assert_int_equal(hand_apply(t.delta, t.plan, SP_DTYPE_BF16, x, 512, &bad, 1), SP_ERR_ARGUMENT);
    assert_int_equal(hand_apply(t.delta, t.plan, SP_DTYPE_BF16, NULL, 512, &output, 1),
                     SP_ERR_ARGUMENT);
    bad = output;
    bad.y_stride = 511;
    assert_int_equal(hand_apply(t.delta, t.plan, SP_DTYPE_BF16, x, 512, &bad, 1), SP_ERR_STRIDE);
    call.outputs = &bad;
    assert_int_equal(sp_delta_expand(t.delta, &call, NULL), SP_ERR_STRIDE);
    bad = output;
    bad.y_type = SP_DTYPE_F16;
    assert_int_equal(hand_apply(t.delta, t.plan, SP_DTYPE_BF16, x, 512, &bad, 1), SP_ERR_ARGUMENT);
    hand_plan_rows(t.plan, t.pool.pool, t.slots, NULL, GROUP_ROWS - 1);
    assert_int_equal(hand_apply(t.delta, t.plan, SP_DTYPE_BF16, x, 512, &output, 1), SP_ERR_STATE);
    /* Built anew with as many rows: the device still has those of the build before. */
    hand_plan_rows(t.plan, t.pool.pool, t.slots, NULL, GROUP_ROWS);
    assert_int_equal(hand_apply(t.delta, t.plan, SP_DTYPE_BF16, x, 512, &output, 1), SP_ERR_STATE);
    expect_untouched(&y);
    gpu_buffer_free(gpu, &y);
    free_group_test(&t);
}

static void levers_skip_what_they_say(void **state)
{
    static group_test t;
    sp_delta *none, *no_gate;
    sp_delta_output gate, out;
    gpu_buffer y, z;

    (void)state;
    make_group_test(&t);
    none = make_delta(t.pool.pool, true, 0);
    no_gate = make_delta(t.pool.pool, false, known_bit(t.pool.geometry, SP_MODULE_GATE_PROJ));
    y = group_y(&t, 5, &gate);
    z = group_y(&t, 0, &out);
    assert_ok(sp_delta_upload(none, t.plan, NULL, NULL), NULL);
    assert_ok(sp_delta_start(none, t.plan, NULL, NULL), NULL);
    assert_ok(sp_delta_upload(no_gate, t.plan, NULL, NULL), NULL);
    assert_ok(sp_delta_start(no_gate, t.plan, NULL, NULL), NULL);
    assert_ok(
        hand_apply(none, t.plan, SP_DTYPE_BF16, t.x_buffer.device + GUARD_BYTES, 512, &gate, 1),
        NULL);
    assert_ok(
        hand_apply(no_gate, t.plan, SP_DTYPE_BF16, t.x_buffer.device + GUARD_BYTES, 512, &gate, 1),
        NULL);
    expect_untouched(&y);
    assert_ok(
        hand_apply(no_gate, t.plan, SP_DTYPE_BF16, t.x_buffer.device + GUARD_BYTES, 512, &out, 1),
        NULL);
    expect_site(&t, 0, &z);
    gpu_buffer_free(gpu, &y);
    gpu_buffer_free(gpu, &z);
    sp_delta_destroy(none);
    sp_delta_destroy(no_gate);
    free_group_test(&t);
}

/* A layout of one site; the status and subject of a delta over it. */
static void expect_unsupported(const site_dims *site, int32_t rank, sp_dtype dtype,
                               int32_t rows_max, const char *subject)
{
    hand_pool pool = hand_pool_create_on(gpu, site, 1, rank, dtype, 1);
    sp_delta_options options;
    sp_delta *delta = NULL;
    sp_error error = {0};

    sp_delta_options_default(&options, sizeof options);
    options.pool = pool.pool;
    options.rows_max = rows_max;
    assert_int_equal(sp_delta_create(&options, &delta, &error), SP_ERR_UNSUPPORTED);
    assert_string_equal(error.code, "engine-unsupported");
    assert_string_equal(error.subject, subject);
    assert_null(delta);
    hand_pool_destroy(&pool);
}

static void what_has_no_kernels_is_named(void **state)
{
    static const site_dims q = {0, SP_MODULE_Q_PROJ, 16, 16};
    size_t before = sp_device_allocated_bytes(gpu);

    (void)state;
    expect_unsupported(&q, 8, SP_DTYPE_F32, 8, "f32");
    expect_unsupported(&q, 520, SP_DTYPE_BF16, 8, "max-lora-rank");
    expect_unsupported(&q, 8, SP_DTYPE_BF16, 65537, "rows_max");
    assert_int_equal(sp_device_allocated_bytes(gpu), before);
}

static void create_takes_the_bytes_it_says(void **state)
{
    static const site_dims q = {0, SP_MODULE_Q_PROJ, 4096, 4096};
    hand_pool pool = hand_pool_create_on(gpu, &q, 1, 16, SP_DTYPE_BF16, 3);
    size_t before = sp_device_allocated_bytes(gpu), bytes;
    sp_delta *delta = make_delta(pool.pool, false, false);

    (void)state;
    bytes = sp_delta_device_bytes(pool.pool, GROUP_ROWS, false);
    assert_true(bytes > 0);
    assert_int_equal(sp_device_allocated_bytes(gpu) - before, bytes);
    assert_int_equal(sp_delta_device_bytes(pool.pool, 0, false), 0);
    sp_delta_destroy(delta);
    assert_int_equal(sp_device_allocated_bytes(gpu), before);
    hand_pool_destroy(&pool);
}

/* One batch against double, in a plan of `padded` rows. */
static void check_small(const scene_shape *shape, const int32_t *rows, int32_t n, int32_t padded)
{
    static alone base;
    delta_rig rig;
    gpu_batch batch;

    make_scene(shape, &base.scene);
    rig = rig_create_on(gpu, &base.scene, shape->pool_rank, NULL, padded);
    batch = gpu_batch_make(&rig, padded);
    gpu_batch_set(&batch, rows, n, padded);
    gpu_batch_run(&batch);
    for (int32_t i = 0; i < base.scene.n_sites; i++) {
        size_t bytes = scene_y_row_bytes(&base.scene, i);
        const char *y = gpu_batch_read(&batch, i);

        for (int32_t at = 0; at < n; at++) {
            base.y[rows[at]][i] = malloc(bytes);
            memcpy(base.y[rows[at]][i], y + (size_t)at * bytes, bytes);
            check_row(&base, rows[at], i);
            free(base.y[rows[at]][i]);
        }
    }
    gpu_batch_free(&batch);
    rig_destroy(&rig);
    scene_free(&base.scene);
}

/* Few launches, for the sanitizers. */
static void a_small_batch_is_right(void **state)
{
    static const int32_t rows[] = {5, 0, 17, 3, 44, 44, 9, 61, 2, 30, 12, 21, 70, 71, 8, 1, 33};

    (void)state;
    check_small(&shapes[1], rows, 17, 24);
}

/* The forms for many rows, of which most are the plan's padding. */
static void a_small_batch_of_large_ranks_is_right(void **state)
{
    int32_t rows[ROWS];

    (void)state;
    for (int32_t i = 0; i < ROWS; i++)
        rows[i] = (i * 7) % ROWS;
    check_small(&shapes[SMALL_LARGE], rows, ROWS, 300);
    check_small(&shapes[SMALL_LARGE_BF16], rows, ROWS, 300);
    check_small(&shapes[TWO_PASSES], rows, ROWS, 300); /* the expand through wgmma */
}

/* The last device, where there are several: another than the other tests'. */
static void another_gpu_gives_the_same_bits(void **state)
{
    static alone base;
    sp_device *first = gpu, *second = NULL;
    int32_t rows[ROWS];
    delta_rig rig;
    gpu_batch batch;

    (void)state;
    if (sp_device_open("cuda:1", NULL, &second, NULL) != SP_OK) {
        print_message("one GPU only\n");
        return;
    }
    make_alone(&shapes[3], &base);
    gpu = second;
    rig = rig_create_on(gpu, &base.scene, 16, NULL, ROWS);
    batch = gpu_batch_make(&rig, ROWS);
    for (int32_t i = 0; i < ROWS; i++)
        rows[i] = i;
    run_and_expect(&base, &batch, rows, ROWS);
    gpu_batch_free(&batch);
    rig_destroy(&rig);
    free_alone(&base);
    gpu = first;
    sp_device_close(second);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_small_batch_is_right),
        cmocka_unit_test(a_small_batch_of_large_ranks_is_right),
        cmocka_unit_test(all_groups_of_a_model_are_right),
        cmocka_unit_test(bad_calls_are_refused_as_on_the_cpu),
        cmocka_unit_test(levers_skip_what_they_say),
        cmocka_unit_test(what_has_no_kernels_is_named),
        cmocka_unit_test(create_takes_the_bytes_it_says),
        cmocka_unit_test(order_slots_and_pool_rank_do_not_matter),
        cmocka_unit_test(nan_neighbours_do_not_matter),
        cmocka_unit_test(halves_have_the_bits_of_the_whole),
        cmocka_unit_test(a_graph_of_few_rows_replays_whatever_the_slots_hold),
        cmocka_unit_test(a_graph_of_many_rows_replays_whatever_the_slots_hold),
        cmocka_unit_test(another_gpu_gives_the_same_bits),
        cmocka_unit_test(rows_match_double_and_batches_match_rows),
        cmocka_unit_test(large_ranks_match_double_and_rows),
        cmocka_unit_test(rank_512_repeats),
        cmocka_unit_test(rank_256_repeats),
        cmocka_unit_test(rank_128_repeats),
        cmocka_unit_test(windows_of_two_passes_repeat),
    };

    return gpu_main(&gpu, tests, sizeof tests / sizeof tests[0], NULL, NULL, argc, argv);
}
