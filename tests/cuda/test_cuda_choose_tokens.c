/*
 * test_cuda_choose_tokens.c: tokens chosen on a GPU against the CPU's rules on the same logits.
 * Skipped where there is no GPU.
 */
#include "cuda/gpu_batch.h"
#include "cuda/rig.h"
#include "engine/sampling/sampler.h"
#include "kernels/cuda/ops_cuda.h"

#include <float.h>
#include <math.h>

static sp_device *gpu;
static rig r;
static sp_cuda_ops_kernels ops;

static int open_launchers(void **state)
{
    sp_error error;

    (void)state;
    assert_ok(rig_start(&r, gpu, &error), &error);
    assert_ok(sp_ops_cuda_get(gpu, &ops, &error), &error);
    return 0;
}

static void *at(const gpu_buffer *buffer)
{
    return buffer->device + GUARD_BYTES;
}

static float *random_logits(int32_t rows, int64_t stride, uint64_t seed)
{
    sp_test_random random = {seed};
    float *logits = malloc((size_t)rows * (size_t)stride * sizeof *logits);

    assert_non_null(logits);
    for (size_t i = 0; i < (size_t)rows * (size_t)stride; i++)
        logits[i] = sp_test_float(&random) * 9 + sp_test_float(&random) * 9;
    return logits;
}

/* ---- the best token ------------------------------------------------------------------------ */

typedef struct greedy_world {
    int32_t rows, vocab;
    int64_t stride;
    gpu_buffer logits, token, bad, scratch;
} greedy_world;

static greedy_world make_greedy(int32_t rows, int32_t vocab, int64_t stride)
{
    greedy_world w = {rows, vocab, stride, {0}, {0}, {0}, {0}};
    void *zeros = calloc(1, sp_cuda_greedy_bytes(rows));

    assert_non_null(zeros);
    w.logits = gpu_buffer_make(gpu, (size_t)rows * (size_t)stride * 4);
    w.token = gpu_buffer_make(gpu, (size_t)rows * 4);
    w.bad = gpu_buffer_make(gpu, (size_t)rows * 4);
    w.scratch = gpu_buffer_make(gpu, sp_cuda_greedy_bytes(rows));
    gpu_buffer_write(gpu, &w.scratch, zeros, sp_cuda_greedy_bytes(rows));
    free(zeros);
    return w;
}

static void free_greedy(greedy_world *w)
{
    gpu_buffer_free(gpu, &w->logits), gpu_buffer_free(gpu, &w->token);
    gpu_buffer_free(gpu, &w->bad), gpu_buffer_free(gpu, &w->scratch);
}

/* What the device says of rows of logits: the CPU's token, or its refusal. */
static void expect_greedy(greedy_world *w, const float *logits)
{
    sp_cuda_greedy greedy = {.rows = w->rows,
                             .vocab = w->vocab,
                             .logits = at(&w->logits),
                             .stride = w->stride,
                             .token = at(&w->token),
                             .bad = at(&w->bad),
                             .scratch = at(&w->scratch)};
    size_t bytes = (size_t)w->rows * 4;
    const int32_t *token, *bad;

    gpu_buffer_write(gpu, &w->logits, logits, (size_t)w->rows * (size_t)w->stride * 4);
    gpu_buffer_write(gpu, &w->token, logits, 0);
    gpu_buffer_write(gpu, &w->bad, logits, 0);
    assert_int_equal(ops.greedy_rows(r.gpu, &greedy, r.stream), 0);
    token = (const int32_t *)(const void *)gpu_buffer_read(gpu, &w->token, bytes);
    bad = (const int32_t *)(const void *)gpu_buffer_read(gpu, &w->bad, bytes);
    for (int32_t row = 0; row < w->rows; row++) {
        int32_t want = -1;
        sp_error error = {0};
        sp_status status = sp_sample_greedy(logits + row * w->stride, w->vocab, &want, &error);
        int32_t why = status == SP_OK                       ? -1
                      : strcmp(error.code, "no-token") == 0 ? -2
                                                            : (int32_t)error.position;

        if (token[row] != want || bad[row] != why)
            fail_msg("row %d of %d: token %d and %d, not %d and %d", row, w->vocab, token[row],
                     bad[row], want, why);
    }
}

static void expect_random_greedy(int32_t rows, int32_t vocab, int64_t stride)
{
    greedy_world w = make_greedy(rows, vocab, stride);
    float *logits = random_logits(rows, stride, (uint64_t)vocab);

    expect_greedy(&w, logits);
    free_greedy(&w);
    free(logits);
}

static void a_small_greedy_choice(void **state)
{
    (void)state;
    expect_random_greedy(3, 1, 1);
    expect_random_greedy(2, 13, 13);
    expect_random_greedy(2, 4099, 4100);
}

static void greedy_choices_are_right(void **state)
{
    static const int32_t vocabs[] = {2, 3, 4, 7, 127, 1024, 2049, 32000, 151936, 262208};

    (void)state;
    for (size_t i = 0; i < sizeof vocabs / sizeof vocabs[0]; i++) {
        expect_random_greedy(1, vocabs[i], vocabs[i]);
        expect_random_greedy(5, vocabs[i], vocabs[i] + 3);
    }
    expect_random_greedy(70, 32000, 32000);
    expect_random_greedy(1500, 1000, 1000);
}

/* Equal logits anywhere, both zeros, and those that are no numbers; the scratch is used again. */
static void odd_logits_are_chosen_as_on_the_cpu(void **state)
{
    enum { ROWS = 12, VOCAB = 151936 };
    greedy_world w = make_greedy(ROWS, VOCAB, VOCAB);
    float *logits = random_logits(ROWS, VOCAB, 5);
    float *row[ROWS];

    (void)state;
    for (int i = 0; i < ROWS; i++)
        row[i] = logits + (size_t)i * VOCAB;
    row[0][151935] = row[0][77777] = row[0][90001] = 50;
    row[1][0] = row[1][151935] = 50;
    for (int i = 0; i < VOCAB; i++) {
        row[2][i] = -INFINITY;
        row[3][i] = i == 151000 ? -FLT_MAX : -INFINITY;
        row[4][i] = i == 9999 ? -0.0f : i == 10001 ? 0.0f : -1.0f;
        row[5][i] = i == 9999 ? 0.0f : i == 10001 ? -0.0f : -1.0f;
        row[6][i] = 2.5f;
        row[7][i] = NAN;
    }
    row[8][151935] = NAN;
    row[9][60000] = INFINITY, row[9][50000] = NAN, row[9][70000] = -NAN;
    row[10][5] = -INFINITY, row[10][6] = FLT_MAX;
    row[11][8] = -1e-40f;
    for (int again = 0; again < 3; again++)
        expect_greedy(&w, logits);
    free_greedy(&w);
    free(logits);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_small_greedy_choice),
        cmocka_unit_test(greedy_choices_are_right),
        cmocka_unit_test(odd_logits_are_chosen_as_on_the_cpu),
    };

    return gpu_main(&gpu, tests, sizeof tests / sizeof tests[0], open_launchers, NULL, argc, argv);
}
