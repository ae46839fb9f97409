/*
 * test_cuda_pool.c: sp_pool on a GPU: images as they lie there, tables, swaps in the order of the
 * steps, loads on another thread beside them, and memory that comes back. Skipped where there is no
 * GPU.
 */
#include "cuda/gpu_batch.h"
#include "pool/image.h"

#include <pthread.h>

static sp_device *gpu;

static const site_dims dims[] = {
    {0, SP_MODULE_Q_PROJ, 2048, 2048},
    {0, SP_MODULE_DOWN_PROJ, 4096, 2048},
    {1, SP_MODULE_Q_PROJ, 2048, 2048},
};

enum { SITES = 3, SLOTS = 3 };

/* Every site but the last, at this rank. */
static hand_adapter *make_adapter_of(uint64_t identity, int32_t rank)
{
    hand_adapter *adapter = hand_adapter_create(identity);
    sp_test_random random = {identity};

    for (int32_t i = 0; i + 1 < SITES; i++)
        hand_adapter_add(adapter, &dims[i], rank, 0.25f * (float)(i + 1), SP_DTYPE_BF16, &random);
    return adapter;
}

static void read_device(const void *from, void *to, size_t bytes)
{
    assert_ok(sp_device_read(gpu, to, from, bytes, NULL), NULL);
}

static void expect_cells(const hand_pool *pool, int32_t site, int32_t slot, int32_t rank,
                         float scale)
{
    const sp_layout_site *place = sp_layout_site_at(pool->layout, site);
    const sp_pool_tables *tables = sp_pool_tables_at(pool->pool, site);
    const void *a[SLOTS], *b[SLOTS];
    int32_t ranks[SLOTS];
    float scales[SLOTS];
    size_t slot_bytes = sp_layout_slot_bytes(pool->layout);
    const char *memory;

    assert_non_null(tables);
    read_device(tables->a, a, sizeof a);
    read_device(tables->b, b, sizeof b);
    read_device(tables->rank, ranks, sizeof ranks);
    read_device(tables->scale, scales, sizeof scales);
    memory = (const char *)tables->first_a - place->a_offset_bytes + (size_t)slot * slot_bytes;
    assert_int_equal(ranks[slot], rank);
    assert_true(scales[slot] == scale);
    assert_ptr_equal(a[slot], rank > 0 ? memory + place->a_offset_bytes : NULL);
    assert_ptr_equal(b[slot], rank > 0 ? memory + place->b_offset_bytes : NULL);
}

static void an_image_arrives_as_it_is(void **state)
{
    size_t before = sp_device_allocated_bytes(gpu);
    hand_pool pool = hand_pool_create_on(gpu, dims, SITES, 16, SP_DTYPE_BF16, SLOTS);
    hand_adapter *adapter = make_adapter_of(3, 9);
    sp_image *image = hand_pack(&pool, adapter);
    size_t bytes = sp_layout_slot_bytes(pool.layout);
    char *copy = malloc(bytes);
    const sp_pool_tables *tables = sp_pool_tables_at(pool.pool, 0);
    sp_slot_handle handle;
    sp_error error;

    (void)state;
    assert_non_null(copy);
    assert_ptr_equal(image->pinned, gpu);
    assert_int_equal(sp_device_allocated_bytes(gpu) - before, sp_pool_device_bytes(pool.pool));
    assert_ok(sp_pool_load(pool.pool, image, &handle, &error), &error);
    assert_int_equal(handle.slot, 0);
    read_device((const char *)tables->first_a - sp_layout_site_at(pool.layout, 0)->a_offset_bytes,
                copy, bytes);
    assert_memory_equal(copy, image->data, bytes);
    expect_cells(&pool, 0, 0, 9, 0.25f);
    expect_cells(&pool, 1, 0, 9, 0.5f);
    expect_cells(&pool, 2, 0, 0, 0.0f);
    expect_cells(&pool, 0, 1, 0, 0.0f);
    hand_unload(pool.pool, handle);
    expect_cells(&pool, 0, 0, 0, 0.0f);
    sp_image_destroy(image);
    hand_adapter_destroy(adapter);
    hand_pool_destroy(&pool);
    assert_int_equal(sp_device_allocated_bytes(gpu), before);
    free(copy);
}

/* A load that is given up leaves zeros, and the other slots as they were. */
static void an_aborted_load_leaves_nothing(void **state)
{
    hand_pool pool = hand_pool_create_on(gpu, dims, SITES, 16, SP_DTYPE_BF16, SLOTS);
    hand_adapter *adapter = make_adapter_of(4, 16);
    sp_image *image = hand_pack(&pool, adapter);
    size_t bytes = sp_layout_slot_bytes(pool.layout);
    char *copy = malloc(bytes);
    const sp_pool_tables *tables = sp_pool_tables_at(pool.pool, 0);
    sp_slot_handle handle, last;
    int32_t other = -1;

    (void)state;
    assert_non_null(copy);
    assert_ok(sp_pool_load(pool.pool, image, &handle, NULL), NULL);
    assert_ok(sp_pool_load_begin(pool.pool, &other, NULL), NULL);
    assert_int_equal(other, 1);
    assert_ok(sp_pool_load_write(pool.pool, other, image, NULL), NULL);
    assert_ok(sp_pool_load_abort(pool.pool, other, NULL), NULL);
    assert_ok(sp_stream_wait(sp_device_main_stream(gpu), NULL), NULL);
    /* A write to the third slot goes on the same stream, behind the zeros. */
    assert_ok(sp_pool_load_begin(pool.pool, &other, NULL), NULL);
    assert_ok(sp_pool_load_abort(pool.pool, other, NULL), NULL);
    assert_ok(sp_pool_load(pool.pool, image, &last, NULL), NULL);
    hand_unload(pool.pool, last);
    expect_cells(&pool, 0, 0, 16, 0.25f);
    expect_cells(&pool, 0, 1, 0, 0.0f);
    read_device((const char *)tables->first_a - sp_layout_site_at(pool.layout, 0)->a_offset_bytes +
                    2 * bytes,
                copy, bytes);
    for (size_t i = 0; i < bytes; i++)
        assert_int_equal(copy[i], 0);
    sp_image_destroy(image);
    hand_adapter_destroy(adapter);
    hand_pool_destroy(&pool);
    free(copy);
}

/* ---- swaps under load ---------------------------------------------------------------------- */

enum { STEPS = 400, STEP_ROWS = 64 };

/* Many applies of slot 0 on one y, each upon the last's result. */
typedef struct load_test {
    hand_pool pool;
    hand_adapter *adapters[2];
    sp_image *images[2];
    sp_delta *delta;
    sp_plan *plan;
    gpu_buffer x, y;
    uint16_t *start; /* x, then y */
    sp_delta_output output;
    sp_stream *stream; /* of the steps; NULL: the main one */
} load_test;

static void make_load_test(load_test *t)
{
    size_t bytes = STEP_ROWS * 2048 * 2;
    sp_test_random random = {8};
    sp_delta_options options;
    sp_error error;

    t->pool = hand_pool_create_on(gpu, dims, SITES, 16, SP_DTYPE_BF16, SLOTS);
    for (int i = 0; i < 2; i++) {
        t->adapters[i] = make_adapter_of(10 + (uint64_t)i, 16);
        t->images[i] = hand_pack(&t->pool, t->adapters[i]);
    }
    sp_delta_options_default(&options, sizeof options);
    options.pool = t->pool.pool;
    options.rows_max = STEP_ROWS;
    assert_ok(sp_delta_create(&options, &t->delta, &error), &error);
    assert_ok(sp_plan_create(STEP_ROWS, SLOTS, &t->plan, NULL), NULL);
    t->x = gpu_buffer_make(gpu, bytes);
    t->y = gpu_buffer_make(gpu, bytes);
    t->start = malloc(bytes);
    assert_non_null(t->start);
    for (int64_t i = 0; i < STEP_ROWS * 2048; i++)
        hand_store(SP_DTYPE_BF16, t->start, i, 0.01 * (double)sp_test_float(&random));
    gpu_buffer_write(gpu, &t->x, t->start, bytes);
    t->output = (sp_delta_output){sizeof(sp_delta_output), 0, t->y.device + GUARD_BYTES, 2048,
                                  SP_DTYPE_BF16};
}

static void free_load_test(load_test *t)
{
    for (int i = 0; i < 2; i++) {
        sp_image_destroy(t->images[i]);
        hand_adapter_destroy(t->adapters[i]);
    }
    sp_plan_destroy(t->plan);
    sp_delta_destroy(t->delta);
    gpu_buffer_free(gpu, &t->x);
    gpu_buffer_free(gpu, &t->y);
    hand_pool_destroy(&t->pool);
    free(t->start);
}

static void enqueue_steps(load_test *t, int steps)
{
    sp_delta_call call =
        hand_call(t->plan, SP_DTYPE_BF16, t->x.device + GUARD_BYTES, 2048, &t->output, 1);

    call.stream = t->stream;
    assert_ok(sp_delta_upload(t->delta, t->plan, t->stream, NULL), NULL);
    assert_ok(sp_delta_start(t->delta, t->plan, t->stream, NULL), NULL);
    for (int i = 0; i < steps; i++)
        assert_ok(sp_delta_apply(t->delta, &call, NULL), NULL);
}

/* Into slot 0, which all rows of the plan are of. */
static void load(load_test *t, int which)
{
    const int32_t slots[STEP_ROWS] = {0};
    sp_slot_handle handle;
    sp_error error;

    assert_ok(sp_pool_load(t->pool.pool, t->images[which], &handle, &error), &error);
    assert_int_equal(handle.slot, 0);
    hand_plan_rows(t->plan, t->pool.pool, slots, NULL, STEP_ROWS);
}

static void wait_for_steps(load_test *t)
{
    sp_stream *stream = t->stream != NULL ? t->stream : sp_device_main_stream(gpu);

    assert_ok(sp_stream_wait(stream, NULL), NULL);
}

/* STEPS of adapter 0, a swap, one step of adapter 1; with a wait before the swap or without. */
static void run_swap(load_test *t, bool wait, uint16_t *out_y)
{
    gpu_buffer_write(gpu, &t->y, t->start, t->y.bytes);
    load(t, 0);
    enqueue_steps(t, STEPS);
    if (wait)
        wait_for_steps(t);
    hand_unload(t->pool.pool, hand_handle(t->pool.pool, 0));
    load(t, 1);
    enqueue_steps(t, 1);
    wait_for_steps(t);
    memcpy(out_y, gpu_buffer_read(gpu, &t->y, t->y.bytes), t->y.bytes);
    hand_unload(t->pool.pool, hand_handle(t->pool.pool, 0));
}

static void check_swaps(sp_stream *stream)
{
    static load_test t;
    uint16_t *waited, *busy;

    make_load_test(&t);
    t.stream = stream;
    waited = malloc(t.y.bytes);
    busy = malloc(t.y.bytes);
    assert_true(waited != NULL && busy != NULL);
    run_swap(&t, true, waited);
    assert_memory_not_equal(waited, t.start, t.y.bytes);
    for (int again = 0; again < 5; again++) {
        run_swap(&t, false, busy);
        assert_memory_equal(busy, waited, t.y.bytes);
    }
    free(waited);
    free(busy);
    free_load_test(&t);
}

static void steps_before_a_swap_see_the_old_adapter(void **state)
{
    (void)state;
    check_swaps(NULL);
}

/* A rewritten slot waits for steps on the host's streams, too, and they see the new tables. */
static void so_do_steps_on_a_stream_of_the_hosts(void **state)
{
    sp_stream *owner = NULL, *stream = NULL;

    (void)state;
    assert_ok(sp_stream_create(gpu, &owner, NULL), NULL);
    assert_ok(sp_stream_wrap(gpu, sp_stream_native(owner), &stream, NULL), NULL);
    check_swaps(stream);
    sp_stream_destroy(stream);
    sp_stream_destroy(owner);
}

typedef struct writer {
    load_test *t;
    int32_t slot;
    int rounds;
    sp_status status;
} writer;

/* What a loader thread does: images into a slot that no one reads. */
static void *write_images(void *user)
{
    writer *w = user;

    for (int i = 0; i < w->rounds && w->status == SP_OK; i++)
        w->status = sp_pool_load_write(w->t->pool.pool, w->slot, w->t->images[1], NULL);
    return NULL;
}

static void loads_beside_the_steps_change_nothing(void **state)
{
    static load_test t;
    writer w = {.t = &t, .rounds = 50, .status = SP_OK};
    sp_slot_handle handle;
    uint16_t *alone;
    pthread_t thread;

    (void)state;
    make_load_test(&t);
    alone = malloc(t.y.bytes);
    assert_non_null(alone);
    load(&t, 0);
    gpu_buffer_write(gpu, &t.y, t.start, t.y.bytes);
    enqueue_steps(&t, STEPS);
    memcpy(alone, gpu_buffer_read(gpu, &t.y, t.y.bytes), t.y.bytes);
    assert_ok(sp_pool_load_begin(t.pool.pool, &w.slot, NULL), NULL);
    assert_int_equal(w.slot, 1);
    gpu_buffer_write(gpu, &t.y, t.start, t.y.bytes);
    assert_int_equal(pthread_create(&thread, NULL, write_images, &w), 0);
    enqueue_steps(&t, STEPS);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_ok(w.status, NULL);
    assert_memory_equal(gpu_buffer_read(gpu, &t.y, t.y.bytes), alone, t.y.bytes);
    assert_ok(sp_pool_load_commit(t.pool.pool, w.slot, t.images[1], &handle, NULL), NULL);
    expect_cells(&t.pool, 0, 1, 16, 0.25f);
    free(alone);
    free_load_test(&t);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_image_arrives_as_it_is),
        cmocka_unit_test(an_aborted_load_leaves_nothing),
        cmocka_unit_test(steps_before_a_swap_see_the_old_adapter),
        cmocka_unit_test(so_do_steps_on_a_stream_of_the_hosts),
        cmocka_unit_test(loads_beside_the_steps_change_nothing),
    };

    return gpu_main(&gpu, tests, sizeof tests / sizeof tests[0], NULL, NULL, argc, argv);
}
