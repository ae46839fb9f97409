/*
 * test_cuda_tokens.c: embeddings and logits of many slots on a GPU against the reference in double,
 * eager and as a graph, rows alone, and after the slots have changed. Skipped where there is no
 * GPU.
 */
#include "cuda/gpu_batch.h"
#include "support/token_world.h"

static sp_device *gpu;

/* Enqueues at once, or by a graph. */
static void run(token_world *w, void (*enqueue)(token_world *w, const void *first, void *second),
                const void *first, void *second, bool captured)
{
    sp_stream *stream = sp_device_main_stream(gpu);
    sp_graph *graph = NULL;

    assert_ok(sp_delta_upload(w->delta, w->plan), NULL);
    if (!captured) {
        enqueue(w, first, second);
        return;
    }
    assert_ok(sp_graph_begin(stream), NULL);
    enqueue(w, first, second);
    assert_ok(sp_graph_end(stream, &graph), NULL);
    assert_ok(sp_graph_launch(graph, stream), NULL);
    assert_ok(sp_stream_wait(stream), NULL);
    sp_graph_destroy(graph);
}

static bool as_graph;

static void enqueue_embed(token_world *w, const void *tokens, void *y)
{
    assert_ok(sp_delta_start(w->delta, w->plan), NULL);
    assert_ok(sp_delta_embed(w->delta, w->plan, tokens, y, w->hidden + w->pad), NULL);
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
    assert_ok(sp_delta_start(w->delta, w->plan), NULL);
    assert_ok(sp_delta_head(w->delta, w->plan, x, w->hidden + w->pad, logits, TOKEN_VOCAB + w->pad),
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
        assert_ok(sp_plan_build_rows(w->plan, slots, w->row_scale, TOKEN_ROWS, TOKEN_SLOTS, NULL),
                  NULL);
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
    assert_int_equal(sp_delta_embed(w->delta, w->plan, w->token, y, 63), SP_ERR_STRIDE);
    free(y);
    token_world_destroy(w);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_small_world_is_right),
        cmocka_unit_test(other_widths_are_right),
        cmocka_unit_test(one_row_has_one_answer),
        cmocka_unit_test(odd_tokens_are_harmless),
    };
    int code, failed;

    gpu = gpu_open(&code);
    if (gpu == NULL)
        return code;
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    sp_device_close(gpu);
    return failed;
}
