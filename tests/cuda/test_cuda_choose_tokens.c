/*
 * test_cuda_choose_tokens.c: tokens chosen on a GPU against the CPU's rules on the same logits.
 * Skipped where there is no GPU.
 */
#include "cuda/gpu_batch.h"
#include "cuda/rig.h"
#include "support/choose_twin.h"

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

/* ---- filters and draws --------------------------------------------------------------------- */

enum { CHANGES_MAX = 256 };

typedef struct sample_world {
    int32_t rows, vocab;
    int64_t stride;
    const float *logits; /* [rows, stride] */
    sp_cuda_sample_row *row;
    sp_cuda_sample_change changes[CHANGES_MAX];
    sp_cuda_sample_result *result; /* [rows], and the lists, as the device wrote them */
    int32_t *top_token;
    float *top_logit;
} sample_world;

static sample_world make_samples(int32_t rows, int32_t vocab, int64_t stride, const float *logits)
{
    sample_world w = {.rows = rows, .vocab = vocab, .stride = stride, .logits = logits};

    w.row = calloc((size_t)rows, sizeof *w.row);
    w.result = calloc((size_t)rows, sizeof *w.result);
    w.top_token = calloc((size_t)rows * SP_CUDA_SAMPLE_TOP_MAX, sizeof *w.top_token);
    w.top_logit = calloc((size_t)rows * SP_CUDA_SAMPLE_TOP_MAX, sizeof *w.top_logit);
    assert_true(w.row && w.result && w.top_token && w.top_logit);
    return w;
}

static void free_samples(sample_world *w)
{
    free(w->row), free(w->result), free(w->top_token), free(w->top_logit);
}

static void run_samples(sample_world *w)
{
    size_t rows = (uint32_t)w->rows, tops = rows * SP_CUDA_SAMPLE_TOP_MAX * 4;
    gpu_buffer logits = gpu_buffer_make(gpu, rows * (size_t)w->stride * 4);
    gpu_buffer row = gpu_buffer_make(gpu, rows * sizeof *w->row);
    gpu_buffer changes = gpu_buffer_make(gpu, sizeof w->changes);
    gpu_buffer result = gpu_buffer_make(gpu, rows * sizeof *w->result);
    gpu_buffer top_token = gpu_buffer_make(gpu, tops), top_logit = gpu_buffer_make(gpu, tops);
    sp_cuda_sample sample = {.rows = w->rows,
                             .vocab = w->vocab,
                             .logits = at(&logits),
                             .stride = w->stride,
                             .row = at(&row),
                             .changes = at(&changes),
                             .result = at(&result),
                             .top_token = at(&top_token),
                             .top_logit = at(&top_logit)};

    gpu_buffer_write(gpu, &logits, w->logits, rows * (size_t)w->stride * 4);
    gpu_buffer_write(gpu, &row, w->row, rows * sizeof *w->row);
    gpu_buffer_write(gpu, &changes, w->changes, sizeof w->changes);
    gpu_buffer_write(gpu, &result, w->row, 0);
    gpu_buffer_write(gpu, &top_token, w->row, 0);
    gpu_buffer_write(gpu, &top_logit, w->row, 0);
    assert_int_equal(ops.sample_rows(r.gpu, &sample, r.stream), 0);
    memcpy(w->result, gpu_buffer_read(gpu, &result, rows * sizeof *w->result),
           rows * sizeof *w->result);
    memcpy(w->top_token, gpu_buffer_read(gpu, &top_token, tops), tops);
    memcpy(w->top_logit, gpu_buffer_read(gpu, &top_logit, tops), tops);
    assert_memory_equal(gpu_buffer_read(gpu, &logits, rows * (size_t)w->stride * 4), w->logits,
                        rows * (size_t)w->stride * 4);
    gpu_buffer_free(gpu, &logits), gpu_buffer_free(gpu, &row), gpu_buffer_free(gpu, &changes);
    gpu_buffer_free(gpu, &result), gpu_buffer_free(gpu, &top_token);
    gpu_buffer_free(gpu, &top_logit);
}

static void check_top(const sample_world *w, int32_t index, const float *logits)
{
    const sp_cuda_sample_row *row = &w->row[index];
    uint64_t *keys = row->n_top > 0 ? twin_sort(logits, w->vocab) : NULL;

    for (int32_t i = 0; i < SP_CUDA_SAMPLE_TOP_MAX; i++) {
        int32_t token = w->top_token[index * SP_CUDA_SAMPLE_TOP_MAX + i];
        float logit = w->top_logit[index * SP_CUDA_SAMPLE_TOP_MAX + i];

        if (i >= row->n_top || i >= w->vocab)
            assert_int_equal(token, (int32_t)0xa5a5a5a5);
        else if (token != sp_choose_key_id(keys[i]) ||
                 sp_choose_key(logit, token) != sp_choose_key(logits[token], token))
            fail_msg("row %d of %d: place %d is %d with %g, not %d", index, w->vocab, i, token,
                     (double)logit, sp_choose_key_id(keys[i]));
    }
    free(keys);
}

/* What the device says of a row of numbers. */
static void check_sample(const sample_world *w, int32_t index)
{
    const sp_cuda_sample_row *row = &w->row[index];
    const sp_cuda_sample_result *got = &w->result[index];
    const float *logits = w->logits + index * w->stride;
    float *changed = malloc((size_t)w->vocab * sizeof *changed);
    int32_t best = -1, want = row->given;

    assert_non_null(changed);
    memcpy(changed, logits, (size_t)w->vocab * sizeof *changed);
    for (int32_t i = row->first_change; i < row->first_change + row->n_changes; i++) {
        float *logit = &changed[w->changes[i].token];

        *logit = sp_choose_change(row, &w->changes[i], *logit);
    }
    assert_ok(sp_sample_greedy(logits, w->vocab, &best, NULL), NULL);
    if (want < 0)
        want = twin_choose(row, changed, w->vocab);
    if (got->token != want || got->bad != -1)
        fail_msg("row %d of %d (k %d, p %g, min %g, inverse %g): token %d and %d, not %d", index,
                 w->vocab, row->top_k, row->top_p, (double)row->min_p, (double)row->inverse,
                 got->token, got->bad, want);
    assert_memory_equal(&got->best, &logits[best], 4);
    assert_memory_equal(&got->logit, &logits[want], 4);
    assert_true(got->mass == (row->n_top >= 0 ? twin_mass(logits, w->vocab) : 0));
    check_top(w, index, logits);
    free(changed);
}

static sp_cuda_sample_row random_row(sp_test_random *random, int32_t vocab)
{
    static const double temperatures[] = {0, 0.1, 0.6, 0.7, 1, 1.5, 20, 1000};
    static const int32_t tops[] = {0, 0, 1, 2, 20, 50, 1000, 100000};
    static const double masses[] = {1, 1, 0.95, 0.8, 0.5, 0.1, 0.999, 0};
    static const double shares[] = {0, 0, 0, 0.05, 0.2, 1, 1e-6, 0.01};
    sp_sample_params params = {.temperature = temperatures[sp_test_below(random, 8)],
                               .top_k = tops[sp_test_below(random, 8)],
                               .top_p = masses[sp_test_below(random, 8)],
                               .min_p = shares[sp_test_below(random, 8)],
                               .seed = sp_test_next(random)};
    sp_cuda_sample_row row = twin_row(&params, sp_test_below(random, 1000));

    row.n_top = (int32_t)sp_test_below(random, SP_CUDA_SAMPLE_TOP_MAX + 2) - 1;
    row.given = sp_test_below(random, 5) == 0 ? (int32_t)sp_test_below(random, (uint32_t)vocab)
                                              : SP_CUDA_SAMPLE_CHOOSES;
    return row;
}

/* Changes of a few ids, each once. */
static void change_rows(sample_world *w, sp_test_random *random)
{
    int32_t n = w->vocab < 20 ? w->vocab : 20, at_change = 0;

    for (int32_t i = 0; i < w->rows && at_change + n <= CHANGES_MAX; i += 3) {
        w->row[i].first_change = at_change;
        w->row[i].n_changes = n;
        w->row[i].repetition = 1.3f;
        w->row[i].frequency = 0.4f;
        w->row[i].presence = -0.7f;
        for (int32_t j = 0; j < n; j++)
            w->changes[at_change++] = (sp_cuda_sample_change){
                .token = (int32_t)((int64_t)w->vocab * j / n),
                .count = (int32_t)sp_test_below(random, 5) - (j > 0 ? 2 : 1),
                .bias = sp_test_float(random) * 20};
    }
}

static void expect_samples(int32_t rows, int32_t vocab, int64_t stride)
{
    sp_test_random random = {(uint64_t)vocab * 7 + (uint64_t)rows};
    float *logits = random_logits(rows, stride, (uint64_t)vocab + 1);
    sample_world w = make_samples(rows, vocab, stride, logits);

    for (int32_t i = 0; i < rows; i++)
        w.row[i] = random_row(&random, vocab);
    change_rows(&w, &random);
    run_samples(&w);
    for (int32_t i = 0; i < rows; i++)
        check_sample(&w, i);
    free_samples(&w);
    free(logits);
}

/* Code for a GPU without clusters, as PTX for sm_80 is, has no samples; such a test is skipped. */
static void need_samples(void)
{
    const sp_cuda_sample none = {0};

    if (ops.sample_rows(r.gpu, &none, r.stream) == SP_CUDA_NOT_SUPPORTED)
        skip();
}

static void a_small_sample_is_right(void **state)
{
    (void)state;
    need_samples();
    expect_samples(4, 1, 1);
    expect_samples(4, 70, 70);
    expect_samples(6, 5003, 5004);
}

static void samples_are_right(void **state)
{
    (void)state;
    need_samples();
    expect_samples(40, 3, 3);
    expect_samples(100, 1000, 1000);
    expect_samples(100, 32000, 32001);
    expect_samples(60, 151936, 151936);
    expect_samples(10, 262208, 262208);
    expect_samples(3, SP_CUDA_SAMPLE_VOCAB_MAX, SP_CUDA_SAMPLE_VOCAB_MAX);
}

/* Equal logits in one bin and everywhere, few finite ones, and a best one far above: the filters
 * fall back to what divides the tokens still. */
static void odd_rows_are_sampled(void **state)
{
    enum { ROWS = 24, VOCAB = 40000 };
    float *logits = random_logits(ROWS, VOCAB, 9);
    sample_world w = make_samples(ROWS, VOCAB, VOCAB, logits);
    sp_test_random random = {10};

    (void)state;
    need_samples();
    for (int32_t i = 0; i < ROWS; i++) {
        float *row = logits + (size_t)i * VOCAB;

        for (int32_t id = 0; id < VOCAB; id++)
            row[id] = i % 6 == 0   ? 1.0f
                      : i % 6 == 1 ? floorf(row[id])
                      : i % 6 == 2 ? (id % 1999 == 7 ? row[id] : -INFINITY)
                      : i % 6 == 3 ? (id == 333 ? 1e30f : row[id])
                      : i % 6 == 4 ? (id == 333 ? 12.0f : -1.0f - (float)(id % 2))
                                   : row[id] * 1e-6f;
        w.row[i] = random_row(&random, VOCAB);
        w.row[i].given = SP_CUDA_SAMPLE_CHOOSES;
        w.row[i].inverse = i < 12 ? 1.0f : 0.05f;
        w.row[i].top_k = i % 4 < 2 ? 3000 : 0;
        w.row[i].top_p = i % 3 == 0 ? 0.7 : 0.9;
    }
    run_samples(&w);
    for (int32_t i = 0; i < ROWS; i++)
        check_sample(&w, i);
    free_samples(&w);
    free(logits);
}

/* Bad logits are told, before and after the changes; what is no row is left alone. */
static void bad_rows_have_no_token(void **state)
{
    enum { ROWS = 6, VOCAB = 9000 };
    float *logits = random_logits(ROWS, VOCAB, 3);
    sample_world w = make_samples(ROWS, VOCAB, VOCAB, logits);
    sp_sample_params params = sp_sample_params_default();

    (void)state;
    need_samples();
    for (int32_t i = 0; i < ROWS; i++) {
        w.row[i] = twin_row(&params, 0);
        w.row[i].n_top = 2;
    }
    logits[8999] = NAN;
    logits[VOCAB + 5000] = INFINITY, logits[VOCAB + 4000] = NAN;
    for (int32_t id = 0; id < VOCAB; id++)
        logits[2 * VOCAB + id] = -INFINITY;
    for (int32_t id = 0; id < VOCAB; id++)
        logits[3 * VOCAB + id] = id == 17 ? 1 : -INFINITY;
    w.row[3].n_changes = 1;
    w.changes[0] = (sp_cuda_sample_change){.token = 17, .count = SP_CUDA_CHANGE_FORBIDS};
    w.row[4].given = SP_CUDA_SAMPLE_NO_ROW;
    run_samples(&w);
    assert_int_equal(w.result[0].bad, 8999);
    assert_int_equal(w.result[1].bad, 4000);
    assert_int_equal(w.result[2].bad, -2);
    assert_int_equal(w.result[3].bad, -2);
    for (int i = 0; i < 4; i++)
        assert_int_equal(w.result[i].token, -1);
    assert_int_equal(w.result[4].bad, (int32_t)0xa5a5a5a5);
    check_sample(&w, 5);
    free_samples(&w);
    free(logits);
}

/* A row alone, in another place and from an unaligned row; a token's logprob when it is scored. */
static void a_sample_has_one_answer(void **state)
{
    enum { ROWS = 7, VOCAB = 30001, STRIDE = 30004 };
    float *logits = random_logits(ROWS, STRIDE, 6);
    sample_world all = make_samples(ROWS, VOCAB, STRIDE, logits);
    sp_test_random random = {44};

    (void)state;
    need_samples();
    for (int32_t i = 0; i < ROWS; i++) {
        all.row[i] = random_row(&random, VOCAB);
        all.row[i].n_top = 5;
        all.row[i].given = SP_CUDA_SAMPLE_CHOOSES;
    }
    run_samples(&all);
    for (int32_t i = 0; i < ROWS; i++) {
        sample_world one = make_samples(1, VOCAB, VOCAB, logits + (size_t)i * STRIDE);
        size_t tops = SP_CUDA_SAMPLE_TOP_MAX;

        one.row[0] = all.row[i];
        run_samples(&one);
        assert_memory_equal(one.result, &all.result[i], sizeof *one.result);
        assert_memory_equal(one.top_token, all.top_token + (size_t)i * tops, tops * 4);
        assert_memory_equal(one.top_logit, all.top_logit + (size_t)i * tops, tops * 4);
        one.row[0] = (sp_cuda_sample_row){.given = all.result[i].token, .n_top = 0};
        run_samples(&one);
        assert_memory_equal(one.result, &all.result[i], sizeof *one.result);
        free_samples(&one);
    }
    free_samples(&all);
    free(logits);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_small_greedy_choice),
        cmocka_unit_test(greedy_choices_are_right),
        cmocka_unit_test(odd_logits_are_chosen_as_on_the_cpu),
        cmocka_unit_test(a_small_sample_is_right),
        cmocka_unit_test(samples_are_right),
        cmocka_unit_test(odd_rows_are_sampled),
        cmocka_unit_test(bad_rows_have_no_token),
        cmocka_unit_test(a_sample_has_one_answer),
    };

    return gpu_main(&gpu, tests, sizeof tests / sizeof tests[0], open_launchers, NULL, argc, argv);
}
