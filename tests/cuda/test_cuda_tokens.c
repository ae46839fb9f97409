/*
 * test_cuda_tokens.c: embeddings and logits of many slots on a GPU against the reference in double,
 * eager and as a graph, rows alone, and after the slots have changed. Skipped where there is no
 * GPU.
 */
#include "cuda/gpu_batch.h"
#include "pool/image.h"
#include "support/delta_call.h"
#include "support/token_world.h"

static sp_device *gpu;

/* Enqueues at once, or by a graph. */
static void run(token_world *w, void (*enqueue)(token_world *w, const void *first, void *second),
                const void *first, void *second, bool captured)
{
    sp_stream *stream = sp_device_main_stream(gpu);
    sp_graph *graph = NULL;

    assert_ok(sp_delta_upload(w->delta, w->plan, NULL, NULL), NULL);
    if (!captured) {
        enqueue(w, first, second);
        return;
    }
    assert_ok(sp_graph_begin(stream, NULL), NULL);
    enqueue(w, first, second);
    assert_ok(sp_graph_end(stream, &graph, NULL), NULL);
    assert_ok(sp_graph_launch(graph, stream, NULL), NULL);
    assert_ok(sp_stream_wait(stream, NULL), NULL);
    sp_graph_destroy(graph);
}

static bool as_graph;

static void enqueue_embed(token_world *w, const void *tokens, void *y)
{
    assert_ok(sp_delta_start(w->delta, w->plan, NULL, NULL), NULL);
    assert_ok(hand_embed(w->delta, w->plan, tokens, y, w->hidden + w->pad), NULL);
}

static void embed(token_world *w, void *y, size_t y_bytes)
{
    gpu_buffer tokens = gpu_buffer_make(gpu, sizeof w->token);
    gpu_buffer out = gpu_buffer_make(gpu, y_bytes);

    gpu_buffer_write(gpu, &tokens, w->token, sizeof w->token);
    gpu_buffer_write(gpu, &out, y, y_bytes);
    run(w, enqueue_embed, tokens.device + GUARD_BYTES, out.device + GUARD_BYTES, as_graph);
    memcpy(y, gpu_buffer_read(gpu, &out, y_bytes), y_bytes);
    gpu_buffer_free(gpu, &tokens);
    gpu_buffer_free(gpu, &out);
}

static void enqueue_head(token_world *w, const void *x, void *logits)
{
    assert_ok(sp_delta_start(w->delta, w->plan, NULL, NULL), NULL);
    assert_ok(hand_head(w->delta, w->plan, w->dtype, x, w->hidden + w->pad, SP_DTYPE_F32, logits,
                        TOKEN_VOCAB + w->pad),
              NULL);
}

static void head(token_world *w, const void *x, float *logits, size_t logits_bytes)
{
    size_t x_bytes = (size_t)(TOKEN_ROWS * (w->hidden + w->pad)) * sp_dtype_bytes(w->dtype);
    gpu_buffer in = gpu_buffer_make(gpu, x_bytes), out = gpu_buffer_make(gpu, logits_bytes);

    gpu_buffer_write(gpu, &in, x, x_bytes);
    gpu_buffer_write(gpu, &out, logits, logits_bytes);
    run(w, enqueue_head, in.device + GUARD_BYTES, out.device + GUARD_BYTES, as_graph);
    memcpy(logits, gpu_buffer_read(gpu, &out, logits_bytes), logits_bytes);
    gpu_buffer_free(gpu, &in);
    gpu_buffer_free(gpu, &out);
}

static void check_world(int32_t hidden, int32_t pad, uint64_t seed)
{
    sp_test_random random = {seed};
    size_t before = sp_device_allocated_bytes(gpu);
    token_world *w = token_world_create(gpu, SP_DTYPE_BF16, hidden, pad, NULL, seed + 1);

    for (int graphs = 0; graphs < 2; graphs++) {
        as_graph = graphs == 1;
        token_world_check_embeddings(w, embed, &random);
        token_world_check_logits(w, head, &random);
    }
    token_world_destroy(w);
    assert_int_equal(sp_device_allocated_bytes(gpu), before);
}

static void a_small_world_is_right(void **state)
{
    (void)state;
    check_world(37, 3, 1);
}

static void other_widths_are_right(void **state)
{
    static const int32_t widths[][2] = {{64, 8}, {512, 16}, {520, 8}, {1032, 8}, {1031, 3}};

    (void)state;
    for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++)
        check_world(widths[i][0], widths[i][1], 10 + i);
}

/* Every row of a batch has the bytes that it has alone. */
static void one_row_has_one_answer(void **state)
{
    token_world *w = token_world_create(gpu, SP_DTYPE_BF16, 520, 8, NULL, 3);
    size_t row_bytes = (TOKEN_VOCAB + 8) * sizeof(float), x_row = 528 * 2;
    sp_test_random random = {4};
    uint16_t *x = malloc(TOKEN_ROWS * x_row);
    float *together = calloc(TOKEN_ROWS, row_bytes), *alone = calloc(TOKEN_ROWS, row_bytes);

    (void)state;
    assert_true(x != NULL && together != NULL && alone != NULL);
    for (int64_t i = 0; i < TOKEN_ROWS * 528; i++)
        hand_store(SP_DTYPE_BF16, x, i, (double)sp_test_float(&random));
    as_graph = false;
    head(w, x, together, TOKEN_ROWS * row_bytes);
    for (int32_t row = 0; row < TOKEN_ROWS; row += 7) {
        int32_t slots[TOKEN_ROWS];

        for (int32_t i = 0; i < TOKEN_ROWS; i++)
            slots[i] = i == row ? w->row_slot[i] : SP_SLOT_BASE;
        hand_plan_rows(w->plan, w->pool, slots, w->row_scale, TOKEN_ROWS);
        head(w, x, alone, TOKEN_ROWS * row_bytes);
        assert_memory_equal((char *)alone + (size_t)row * row_bytes,
                            (char *)together + (size_t)row * row_bytes, row_bytes);
    }
    free(x);
    free(together);
    free(alone);
    token_world_destroy(w);
}

/* A token outside the vocabulary leaves its row. */
static void odd_tokens_are_harmless(void **state)
{
    token_world *w = token_world_create(gpu, SP_DTYPE_BF16, 64, 8, NULL, 5);
    size_t bytes = TOKEN_ROWS * 72 * 2;
    uint16_t *y = calloc(1, bytes);

    (void)state;
    assert_non_null(y);
    for (int32_t i = 0; i < TOKEN_ROWS; i++)
        w->token[i] = i % 2 == 0 ? TOKEN_VOCAB + i : -1 - i;
    as_graph = false;
    embed(w, y, bytes);
    for (size_t i = 0; i < bytes / 2; i++)
        assert_int_equal(y[i], 0);
    assert_int_equal(hand_embed(w->delta, w->plan, w->token, y, 63), SP_ERR_STRIDE);
    free(y);
    token_world_destroy(w);
}

/* ---- types, and a stream of the host's ----------------------------------------------------- */

enum { TYPE_HIDDEN = 264, TYPE_STRIDE = TYPE_HIDDEN + 8, LOGITS_STRIDE = TOKEN_VOCAB + 8 };

/* The head of random rows, exact in bf16, on `stream`; logits begin as `start`, of which the type
 * is logits_type. With an FP32 x the rows are off by an eighth of a bf16's step. */
static void run_head(token_world *w, sp_dtype x_type, sp_dtype logits_type, sp_stream *stream,
                     const void *start, void *out_logits)
{
    size_t x_bytes = TOKEN_ROWS * TYPE_STRIDE * sp_dtype_bytes(x_type);
    size_t bytes = TOKEN_ROWS * LOGITS_STRIDE * sp_dtype_bytes(logits_type);
    gpu_buffer in = gpu_buffer_make(gpu, x_bytes), out = gpu_buffer_make(gpu, bytes);
    static float x[TOKEN_ROWS * TYPE_STRIDE];
    sp_test_random random = {77};
    sp_delta_head_call call = {.struct_bytes = sizeof call,
                               .plan = w->plan,
                               .x = in.device + GUARD_BYTES,
                               .x_stride = TYPE_STRIDE,
                               .x_type = x_type,
                               .logits = out.device + GUARD_BYTES,
                               .logits_stride = LOGITS_STRIDE,
                               .logits_type = logits_type,
                               .stream = stream};
    sp_error error;

    for (int64_t i = 0; i < TOKEN_ROWS * TYPE_STRIDE; i++) {
        uint16_t exact;
        double value;

        hand_store(SP_DTYPE_BF16, &exact, 0, (double)sp_test_float(&random));
        value = hand_load(SP_DTYPE_BF16, &exact, 0);
        hand_store(x_type, x, i, x_type == SP_DTYPE_F32 ? value * (1 + 0x1p-10) : value);
    }
    gpu_buffer_write(gpu, &in, x, x_bytes);
    gpu_buffer_write(gpu, &out, start, bytes);
    assert_ok(sp_delta_upload(w->delta, w->plan, stream, &error), &error);
    assert_ok(sp_delta_start(w->delta, w->plan, stream, &error), &error);
    assert_ok(sp_delta_head(w->delta, &call, &error), &error);
    assert_ok(sp_stream_wait(stream != NULL ? stream : sp_device_main_stream(gpu), &error), &error);
    memcpy(out_logits, gpu_buffer_read(gpu, &out, bytes), bytes);
    gpu_buffer_free(gpu, &in);
    gpu_buffer_free(gpu, &out);
}

/* A bf16 logit is the FP32 one, rounded once; but a replaced one is rounded before its pair, too.
 */
static void a_small_head_in_other_types(void **state)
{
    token_world *w = token_world_create(gpu, SP_DTYPE_BF16, TYPE_HIDDEN, 8, NULL, 41);
    static uint16_t narrow_start[TOKEN_ROWS * LOGITS_STRIDE], narrow[TOKEN_ROWS * LOGITS_STRIDE];
    static float start[TOKEN_ROWS * LOGITS_STRIDE], wide[TOKEN_ROWS * LOGITS_STRIDE],
        again[TOKEN_ROWS * LOGITS_STRIDE];
    sp_test_random random = {8};
    sp_stream *owner = NULL, *stream = NULL;

    (void)state;
    assert_ok(sp_stream_create(gpu, &owner, NULL), NULL);
    assert_ok(sp_stream_wrap(gpu, sp_stream_native(owner), &stream, NULL), NULL);
    for (int64_t i = 0; i < TOKEN_ROWS * LOGITS_STRIDE; i++) {
        hand_store(SP_DTYPE_BF16, narrow_start, i, (double)sp_test_float(&random));
        start[i] = (float)hand_load(SP_DTYPE_BF16, narrow_start, i);
    }
    run_head(w, SP_DTYPE_BF16, SP_DTYPE_F32, NULL, start, wide);
    assert_memory_not_equal(wide, start, sizeof wide);
    run_head(w, SP_DTYPE_F32, SP_DTYPE_F32, stream, start, again);
    assert_memory_equal(again, wide, sizeof wide);
    run_head(w, SP_DTYPE_F32, SP_DTYPE_BF16, stream, narrow_start, narrow);
    for (int32_t i = 0; i < TOKEN_ROWS * LOGITS_STRIDE; i++) {
        int32_t slot = w->row_slot[i / LOGITS_STRIDE], token = i % LOGITS_STRIDE;
        uint16_t want;

        if (slot >= 0 && token < TOKEN_VOCAB && w->kinds[slot].pairs && w->is_replaced[slot][token])
            continue;
        hand_store(SP_DTYPE_BF16, &want, 0, (double)wide[i]);
        assert_int_equal(narrow[i], want);
    }
    sp_stream_destroy(stream);
    sp_stream_destroy(owner);
    token_world_destroy(w);
}

/* Embeddings on a stream of the host's have the bytes of those on the main one. */
static void a_small_embedding_on_the_hosts_stream(void **state)
{
    token_world *w = token_world_create(gpu, SP_DTYPE_BF16, 64, 8, NULL, 42);
    enum { BYTES = TOKEN_ROWS * 72 * 2 };
    static uint16_t start[TOKEN_ROWS * 72], want[TOKEN_ROWS * 72];
    gpu_buffer tokens = gpu_buffer_make(gpu, sizeof w->token), y = gpu_buffer_make(gpu, BYTES);
    sp_delta_embed_call call = {.struct_bytes = sizeof call,
                                .plan = w->plan,
                                .tokens = (const int32_t *)(void *)(tokens.device + GUARD_BYTES),
                                .y = y.device + GUARD_BYTES,
                                .y_stride = 72};
    sp_stream *owner = NULL, *stream = NULL;
    sp_test_random random = {43};
    sp_error error;

    (void)state;
    for (int64_t i = 0; i < TOKEN_ROWS * 72; i++)
        hand_store(SP_DTYPE_BF16, start, i, (double)sp_test_float(&random));
    memcpy(want, start, BYTES);
    as_graph = false;
    embed(w, want, BYTES);
    assert_memory_not_equal(want, start, BYTES);
    assert_ok(sp_stream_create(gpu, &owner, &error), &error);
    assert_ok(sp_stream_wrap(gpu, sp_stream_native(owner), &stream, &error), &error);
    call.stream = stream;
    gpu_buffer_write(gpu, &tokens, w->token, sizeof w->token);
    gpu_buffer_write(gpu, &y, start, BYTES);
    assert_ok(sp_delta_upload(w->delta, w->plan, stream, &error), &error);
    assert_ok(sp_delta_start(w->delta, w->plan, stream, &error), &error);
    assert_ok(sp_delta_embed(w->delta, &call, &error), &error);
    assert_ok(sp_stream_wait(stream, &error), &error);
    assert_memory_equal(gpu_buffer_read(gpu, &y, BYTES), want, BYTES);
    sp_stream_destroy(stream);
    sp_stream_destroy(owner);
    gpu_buffer_free(gpu, &tokens);
    gpu_buffer_free(gpu, &y);
    token_world_destroy(w);
}

/* ---- switches under load ------------------------------------------------------------------- */

enum { BUSY_HEADS = 200, BUSY_LAUNCHES = 20, SWITCHED = 3, ROW_STRIDE = TOKEN_VOCAB + 8 };

/* Logits of one x, and a graph of many heads that write them again and again. The graphs route rows
 * to a slot whose version comes and goes: what they find there is up to the tables. */
typedef struct busy_world {
    token_world *w;
    gpu_buffer x, first, second;
    sp_graph *heads;    /* into first */
    sp_graph *one_head; /* into second */
    sp_event *behind;
} busy_world;

/* Zeros first: pairs add to what is there. */
static void enqueue_logits(busy_world *b, gpu_buffer *logits)
{
    assert_ok(sp_stream_zero(sp_device_main_stream(gpu), logits->device + GUARD_BYTES,
                             logits->bytes, NULL),
              NULL);
    enqueue_head(b->w, b->x.device + GUARD_BYTES, logits->device + GUARD_BYTES);
}

static void make_busy_world(busy_world *b)
{
    size_t bytes = TOKEN_ROWS * ROW_STRIDE * sizeof(float);
    sp_stream *stream = sp_device_main_stream(gpu);
    sp_test_random random = {6};
    static uint16_t x[TOKEN_ROWS * 528];

    b->w = token_world_create(gpu, SP_DTYPE_BF16, 520, 8, NULL, 7);
    for (int64_t i = 0; i < TOKEN_ROWS * 528; i++)
        hand_store(SP_DTYPE_BF16, x, i, (double)sp_test_float(&random));
    b->x = gpu_buffer_make(gpu, sizeof x);
    b->first = gpu_buffer_make(gpu, bytes);
    b->second = gpu_buffer_make(gpu, bytes);
    gpu_buffer_write(gpu, &b->x, x, sizeof x);
    gpu_buffer_write(gpu, &b->first, x, 0); /* guards */
    gpu_buffer_write(gpu, &b->second, x, 0);
    assert_ok(sp_event_create(gpu, &b->behind, NULL), NULL);
    assert_ok(sp_delta_upload(b->w->delta, b->w->plan, NULL, NULL), NULL);
    enqueue_logits(b, &b->first);
    assert_ok(sp_graph_begin(stream, NULL), NULL);
    for (int i = 0; i < BUSY_HEADS; i++)
        enqueue_logits(b, &b->first);
    assert_ok(sp_graph_end(stream, &b->heads, NULL), NULL);
    assert_ok(sp_graph_begin(stream, NULL), NULL);
    enqueue_logits(b, &b->second);
    assert_ok(sp_graph_end(stream, &b->one_head, NULL), NULL);
}

static void free_busy_world(busy_world *b)
{
    sp_graph_destroy(b->one_head);
    sp_graph_destroy(b->heads);
    sp_event_destroy(b->behind);
    gpu_buffer_free(gpu, &b->x);
    gpu_buffer_free(gpu, &b->first);
    gpu_buffer_free(gpu, &b->second);
    token_world_destroy(b->w);
}

/* Milliseconds of heads into `first`, and an event behind them. */
static void enqueue_busy(busy_world *b)
{
    for (int i = 0; i < BUSY_LAUNCHES; i++)
        assert_ok(sp_graph_launch(b->heads, sp_device_main_stream(gpu), NULL), NULL);
    assert_ok(sp_event_record(b->behind, sp_device_main_stream(gpu), NULL), NULL);
}

/* One head behind the switch, into `second`; then what both halves saw. */
static void expect_before_and_after(busy_world *b, const char *before, const char *after)
{
    assert_ok(sp_graph_launch(b->one_head, sp_device_main_stream(gpu), NULL), NULL);
    assert_memory_equal(gpu_buffer_read(gpu, &b->first, b->first.bytes), before, b->first.bytes);
    assert_memory_equal(gpu_buffer_read(gpu, &b->second, b->second.bytes), after, b->second.bytes);
}

static char *quiet_logits(busy_world *b)
{
    char *logits = malloc(b->first.bytes);

    assert_non_null(logits);
    assert_ok(sp_graph_launch(b->one_head, sp_device_main_stream(gpu), NULL), NULL);
    memcpy(logits, gpu_buffer_read(gpu, &b->second, b->second.bytes), b->second.bytes);
    return logits;
}

/* The cells of replaced rows are switched between the steps before and after, and the host waits
 * for neither. */
static void rows_change_between_steps_and_none_is_waited_for(void **state)
{
    busy_world b;
    sp_test_random random = {9};
    sp_image *image;
    sp_slot_handle handle;
    char *with, *without;
    int32_t slot = -1;

    (void)state;
    make_busy_world(&b);
    image = token_world_image(b.w, SWITCHED, &random);
    assert_ptr_equal(image->overlay->pinned, gpu);
    hand_unload(b.w->pool, hand_handle(b.w->pool, SWITCHED));
    without = quiet_logits(&b);
    assert_ok(sp_pool_load(b.w->pool, image, &handle, NULL), NULL);
    assert_int_equal(handle.slot, SWITCHED);
    with = quiet_logits(&b);
    assert_memory_not_equal(with, without, b.first.bytes);
    for (int again = 0; again < 5; again++) {
        enqueue_busy(&b);
        hand_unload(b.w->pool, handle);
        assert_int_equal(sp_event_query(b.behind, NULL), SP_PENDING);
        expect_before_and_after(&b, with, without);
        assert_ok(sp_pool_load_begin(b.w->pool, &slot, NULL), NULL);
        assert_ok(sp_pool_load_write(b.w->pool, slot, image, NULL), NULL);
        enqueue_busy(&b);
        assert_ok(sp_pool_load_commit(b.w->pool, slot, image, &handle, NULL), NULL);
        assert_int_equal(sp_event_query(b.behind, NULL), SP_PENDING);
        expect_before_and_after(&b, without, with);
    }
    as_graph = false;
    hand_plan_rows(b.w->plan, b.w->pool, b.w->row_slot, b.w->row_scale, TOKEN_ROWS);
    token_world_check_logits(b.w, head, &random);
    sp_image_destroy(image);
    free(with);
    free(without);
    free_busy_world(&b);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_small_world_is_right),
        cmocka_unit_test(other_widths_are_right),
        cmocka_unit_test(one_row_has_one_answer),
        cmocka_unit_test(odd_tokens_are_harmless),
        cmocka_unit_test(a_small_head_in_other_types),
        cmocka_unit_test(a_small_embedding_on_the_hosts_stream),
        cmocka_unit_test(rows_change_between_steps_and_none_is_waited_for),
    };

    return gpu_main(&gpu, tests, sizeof tests / sizeof tests[0], NULL, NULL, argc, argv);
}
