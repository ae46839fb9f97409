/*
 * test_cuda_attention.c: paged attention on a GPU: against double precision, and then that a row's
 * bits depend on its own query and on the keys and values up to its position alone: in any step,
 * launch, pages and graph. Skipped where there is no GPU.
 */
#include "cuda/attention_world.h"
#include "cuda/gpu_main.h"

#define STEP_ROWS  2304
#define STEP_SPANS 96
#define GROUP      9 /* rows of a verified draft */

static sp_device *gpu;

typedef struct shape_case {
    int32_t q_heads, kv_heads, head_dim;
    float size; /* of the queries */
} shape_case;

/* The heads of Qwen3, Llama, Qwen2 and SmolLM models, other groups, and widths that are padded. */
static const shape_case cases[] = {
    {32, 8, 128, 1.0f}, {14, 2, 64, 1.0f}, {9, 3, 64, 4.0f}, {8, 8, 128, 1.0f}, {10, 2, 128, 4.0f},
    {16, 2, 256, 1.0f}, {16, 1, 64, 1.0f}, {4, 2, 16, 1.0f}, {3, 1, 24, 1.0f},  {4, 1, 32, 4.0f},
    {6, 3, 96, 1.0f},   {4, 4, 192, 1.0f}, {12, 2, 80, 1.0f}};
#define N_CASES (int)(sizeof cases / sizeof cases[0])

static const int32_t lengths[] = {1300, 641, 129, 63, 1};
#define N_LENGTHS 5

typedef struct scene {
    world w;
    uint16_t *base[WORLD_SEQUENCES_MAX]; /* y of each whole sequence, a step of its own */
} scene;

static sp_cuda_attention_shape shape_of(const shape_case *c, int32_t positions_max)
{
    return (sp_cuda_attention_shape){.q_heads = c->q_heads,
                                     .kv_heads = c->kv_heads,
                                     .head_dim = c->head_dim,
                                     .scale = 1.0f / sqrtf((float)c->head_dim),
                                     .rows_max = STEP_ROWS,
                                     .spans_max = STEP_SPANS,
                                     .positions_max = positions_max};
}

static void assert_done(const world *w)
{
    if (w->failed)
        print_message("device: %s\n", sp_device_error_text(w->device));
    assert_int_equal(w->failed, 0);
}

/* ---- in double ----------------------------------------------------------------------------- */

static double dot(const uint16_t *a, const uint16_t *b, int32_t n)
{
    double sum = 0;

    for (int32_t i = 0; i < n; i++)
        sum += (double)sp_bf16_to_f32(a[i]) * (double)sp_bf16_to_f32(b[i]);
    return sum;
}

/* y of one row and head, and the sum of P |v|, which is what the rounding of P is relative to. */
static void reference(const world *w, int32_t s, int32_t position, int32_t head, double *y,
                      double *size)
{
    const sp_cuda_attention_shape *c = &w->call.shape;
    int32_t dim = c->head_dim, kv = head / (c->q_heads / c->kv_heads);
    const uint16_t *q = w->q[s] + (size_t)position * world_row(w) + (size_t)(head * dim);
    double *p = calloc((size_t)position + 1, sizeof *p), most = -INFINITY, l = 0;

    for (int32_t d = 0; d < dim; d++)
        y[d] = size[d] = 0;
    for (int32_t i = 0; i <= position; i++) {
        p[i] = (double)c->scale *
               dot(q, w->k[s] + ((size_t)i * (size_t)c->kv_heads + (size_t)kv) * (size_t)dim, dim);
        most = fmax(most, p[i]);
    }
    for (int32_t i = 0; i <= position; i++) {
        const uint16_t *v = w->v[s] + ((size_t)i * (size_t)c->kv_heads + (size_t)kv) * (size_t)dim;

        p[i] = exp(p[i] - most);
        l += p[i];
        for (int32_t d = 0; d < dim; d++) {
            y[d] += p[i] * (double)sp_bf16_to_f32(v[d]);
            size[d] += p[i] * fabs((double)sp_bf16_to_f32(v[d]));
        }
    }
    for (int32_t d = 0; d < dim; d++) {
        y[d] /= l;
        size[d] /= l;
    }
    free(p);
}

/* P and y are each rounded to bf16 once, by at most 2^-8 of the value (8 bits); the FP32 sums are
 * allowed an eighth of that. Returns the largest error as a part of what is allowed. */
static double check_row(const world *w, int32_t s, int32_t position, const uint16_t *got)
{
    double y[256], size[256], worst = 0;
    int32_t dim = w->call.shape.head_dim;

    for (int32_t h = 0; h < w->call.shape.q_heads; h++) {
        reference(w, s, position, h, y, size);
        for (int32_t d = 0; d < dim; d++) {
            double found = (double)sp_bf16_to_f32(got[h * dim + d]);
            double allowed = ldexp(fabs(y[d]) + 1.125 * size[d], -8);

            if (!(fabs(found - y[d]) <= allowed)) {
                print_message("sequence %d position %d head %d dimension %d: %.9g, not %.9g\n", s,
                              position, h, d, found, y[d]);
                fail();
            }
            worst = fmax(worst, fabs(found - y[d]) / allowed);
        }
    }
    return worst;
}

static bool near_border(int32_t position)
{
    int32_t in_tile = position % 128;

    return in_tile <= 1 || in_tile == 127 || position % 101 == 0;
}

/* ---- scenes -------------------------------------------------------------------------------- */

static void make_scene(scene *c, const shape_case *shape)
{
    sp_cuda_attention_shape of = shape_of(shape, lengths[0]);

    assert_int_equal(world_start(&c->w, gpu, NULL), SP_OK);
    world_make(&c->w, &of, lengths, N_LENGTHS, shape->size);
    for (int32_t s = 0; s < N_LENGTHS; s++) {
        world_span whole = {s, 0, lengths[s]};
        size_t bytes = (size_t)lengths[s] * world_row(&c->w) * sizeof(uint16_t);

        world_run(&c->w, &whole, 1, lengths[s], 1);
        c->base[s] = malloc(bytes);
        memcpy(c->base[s], c->w.step_y, bytes);
    }
    assert_done(&c->w);
}

static void free_scene(scene *c)
{
    assert_done(&c->w);
    for (int32_t s = 0; s < N_LENGTHS; s++)
        free(c->base[s]);
    world_free(&c->w);
}

/* Every row of the step has the bits of its whole sequence, every other launched row is zeros. */
static void expect_base(const scene *c, const world_span *spans, int32_t n, const char *what)
{
    size_t each = world_row(&c->w), row = 0;

    for (int32_t i = 0; i < n; i++)
        for (int32_t r = 0; r < spans[i].rows; r++, row++) {
            const uint16_t *got = c->w.step_y + row * each;
            const uint16_t *want = c->base[spans[i].sequence] + (size_t)(spans[i].first + r) * each;

            if (memcmp(got, want, each * sizeof *got) == 0)
                continue;
            for (size_t j = 0; j < each; j++)
                if (got[j] != want[j]) {
                    print_message("%s: %d heads of %d, %d rows in %d spans, sequence %d position "
                                  "%d element %zu: %04x, not %04x\n",
                                  what, c->w.call.shape.q_heads, c->w.call.shape.head_dim,
                                  world_rows_of(spans, n), n, spans[i].sequence, spans[i].first + r,
                                  j, got[j], want[j]);
                    fail();
                }
        }
    for (; row < (size_t)c->w.call.step.rows; row++)
        for (size_t j = 0; j < each; j++)
            assert_int_equal(c->w.step_y[row * each + j], 0);
    for (size_t j = row * each; j < world_step_rows(&c->w) * each; j++)
        assert_int_equal(c->w.step_y[j], 0xa5a5);
}

static void step_as_base(scene *c, const world_span *spans, int32_t n, int32_t more_rows,
                         int32_t more_spans, const char *what)
{
    world_run(&c->w, spans, n, world_rows_of(spans, n) + more_rows, n + more_spans);
    assert_done(&c->w);
    expect_base(c, spans, n, what);
}

/* ---- tests --------------------------------------------------------------------------------- */

static void rows_have_the_values_of_double_precision(void **state)
{
    (void)state;
    for (int i = 0; i < N_CASES; i++) {
        scene c;
        double worst = 0;

        make_scene(&c, &cases[i]);
        for (int32_t s = 0; s < N_LENGTHS; s++)
            for (int32_t p = 0; p < lengths[s]; p++)
                if (near_border(p) || p + 1 == lengths[s])
                    worst =
                        fmax(worst, check_row(&c.w, s, p, c.base[s] + (size_t)p * world_row(&c.w)));
        print_message("%d/%d heads of %d: %.2f of what is allowed\n", cases[i].q_heads,
                      cases[i].kv_heads, cases[i].head_dim, worst);
        free_scene(&c);
    }
}

static void a_row_alone_has_the_bits_of_the_whole(void **state)
{
    (void)state;
    for (int i = 0; i < N_CASES; i++) {
        scene c;

        make_scene(&c, &cases[i]);
        for (int32_t p = 0; p < lengths[0]; p += i == 0 || near_border(p) ? 1 : 3) {
            world_span one = {0, p, 1};

            step_as_base(&c, &one, 1, p % 3 == 0 ? 5 : 0, p % 2, "alone");
        }
        free_scene(&c);
    }
}

static void chunks_have_the_bits_of_the_whole(void **state)
{
    static const int32_t each[] = {7, 16, 17, 64, 512};

    (void)state;
    for (int i = 0; i < N_CASES; i++) {
        scene c;

        make_scene(&c, &cases[i]);
        for (int e = 0; e < 5; e++)
            for (int32_t p = 0; p < lengths[0]; p += each[e]) {
                int32_t left = lengths[0] - p;
                world_span chunk = {0, p, left < each[e] ? left : each[e]};

                step_as_base(&c, &chunk, 1, 0, 0, "chunk");
            }
        free_scene(&c);
    }
}

static world_span random_span(world *w, int32_t rows)
{
    world_span span = {(int32_t)(world_next(w) % N_LENGTHS), 0, 0};
    int32_t length = lengths[span.sequence];

    span.rows = rows < length ? rows : length;
    span.first = (int32_t)(world_next(w) % (uint32_t)(length - span.rows + 1));
    return span;
}

/* Spans of about `rows` rows each (0: of any length, some of them long); returns their number. */
static int32_t random_step(world *w, world_span *spans, int32_t n, int32_t rows)
{
    static const int32_t any[] = {1, 1, 1, 2, 9, 16, 17, 33, 64, 130, 257};
    int32_t all = 0;

    for (int32_t i = 0; i < n; i++) {
        spans[i] = random_span(w, rows > 0 ? rows : any[world_next(w) % 11]);
        all += spans[i].rows;
        if (all > STEP_ROWS - 16)
            return i;
    }
    return n;
}

static void mixed_steps_have_the_bits_of_the_whole(void **state)
{
    static const int32_t kinds[] = {1, GROUP, 0};

    (void)state;
    for (int i = 0; i < N_CASES; i++) {
        scene c;
        world_span spans[STEP_SPANS];

        make_scene(&c, &cases[i]);
        for (int round = 0; round < 24; round++) {
            int32_t n = 1 + (int32_t)(world_next(&c.w) % (STEP_SPANS - 1));

            n = random_step(&c.w, spans, n, kinds[round % 3]);
            c.w.say_wide = round % 4 == 3;
            step_as_base(&c, spans, n, round % 2 * 11, round % 2, "mixed");
        }
        free_scene(&c);
    }
}

static void pages_and_later_tokens_change_nothing(void **state)
{
    (void)state;
    for (int i = 0; i < N_CASES; i++) {
        scene c;

        make_scene(&c, &cases[i]);
        for (int round = 0; round < 8; round++) {
            int32_t positions[N_LENGTHS];
            world_span spans[N_LENGTHS];

            for (int32_t s = 0; s < N_LENGTHS; s++) {
                int32_t rows = 1 + (int32_t)(world_next(&c.w) % (round % 2 ? 40 : GROUP));

                positions[s] = 1 + (int32_t)(world_next(&c.w) % (uint32_t)lengths[s]);
                rows = rows < positions[s] ? rows : positions[s];
                spans[s] = (world_span){s, positions[s] - rows, rows};
            }
            world_shuffle(&c.w);
            world_write_pages(&c.w);
            world_write_cache(&c.w, positions);
            step_as_base(&c, spans, N_LENGTHS, 3, 2, "other pages");
        }
        free_scene(&c);
    }
}

static void replay(scene *c, sp_graph *graph, const world_span *spans, int32_t n)
{
    world_set_step(&c->w, spans, n);
    assert_ok(sp_graph_launch(graph, sp_device_main_stream(gpu), NULL), NULL);
    world_read(&c->w);
    assert_done(&c->w);
    expect_base(c, spans, n, "replayed");
}

/* Captured for so many rows and spans, replayed for other steps of at most those, down to none. */
static void check_graph(scene *c, int32_t rows, int32_t n_spans, bool wide)
{
    sp_stream *stream = sp_device_main_stream(gpu);
    world_span spans[STEP_SPANS];
    sp_graph *graph = NULL;

    c->w.call.step.rows = rows;
    c->w.call.step.spans = n_spans;
    c->w.call.wide = wide;
    assert_ok(sp_graph_begin(stream, NULL), NULL);
    world_enqueue(&c->w);
    assert_ok(sp_graph_end(stream, &graph, NULL), NULL);
    for (int round = 0; round < 16; round++) {
        int32_t n = (int32_t)(world_next(&c->w) % (uint32_t)(n_spans + 1));

        n = random_step(&c->w, spans, n, wide ? 0 : 1 + round);
        while (world_rows_of(spans, n) > rows)
            n--;
        replay(c, graph, spans, n);
    }
    replay(c, graph, spans, 0);
    sp_graph_destroy(graph);
}

static void a_graph_replays_for_other_steps(void **state)
{
    (void)state;
    for (int i = 0; i < N_CASES; i++) {
        scene c;

        make_scene(&c, &cases[i]);
        check_graph(&c, 64, 64, false);
        check_graph(&c, 16, 1, false);
        check_graph(&c, 700, 40, true);
        free_scene(&c);
    }
}

/* More chunks than one scan of the merge takes, and pieces of every length. */
static void long_contexts_are_folded_in_one_order(void **state)
{
    const shape_case shape = {4, 1, 64, 2.0f};
    const int32_t length = 140000, at[] = {139999, 131072, 70001, 16383, 5000};
    sp_cuda_attention_shape of = shape_of(&shape, length);
    world_span spans[STEP_SPANS];
    uint16_t *alone;
    size_t each;
    world w;

    (void)state;
    assert_int_equal(world_start(&w, gpu, NULL), SP_OK);
    world_make(&w, &of, &length, 1, shape.size);
    each = world_row(&w);
    alone = calloc(5 * each, sizeof *alone);
    for (int i = 0; i < 5; i++) {
        world_span one = {0, at[i], 1};

        world_run(&w, &one, 1, 1, 1);
        assert_done(&w);
        memcpy(alone + (size_t)i * each, w.step_y, each * sizeof *alone);
        print_message("position %d: %.2f of what is allowed\n", at[i],
                      check_row(&w, 0, at[i], w.step_y));
    }
    for (int32_t n = 2; n <= STEP_SPANS; n += n < 8 ? 1 : 11) {
        for (int32_t i = 0; i < n; i++)
            spans[i] = (world_span){0, at[i % 5], 1};
        world_run(&w, spans, n, n, n);
        assert_done(&w);
        for (int32_t i = 0; i < n; i++)
            assert_memory_equal(w.step_y + (size_t)i * each, alone + (size_t)(i % 5) * each,
                                each * sizeof *alone);
    }
    free(alone);
    world_free(&w);
}

/* A race shows as a few words of many repeats of one large step. */
static void repeats_have_the_same_bits(void **state)
{
    const int32_t length = 4096;
    sp_cuda_attention_shape of = shape_of(&cases[0], length);
    world_span chunk = {0, length - 2048, 2048}, spans[STEP_SPANS];
    size_t bytes;
    uint16_t *first;
    world w;

    (void)state;
    assert_int_equal(world_start(&w, gpu, NULL), SP_OK);
    world_make(&w, &of, &length, 1, 1.0f);
    bytes = 2048 * world_row(&w) * sizeof *first;
    first = malloc(bytes);
    for (int i = 0; i < STEP_SPANS; i++)
        spans[i] = (world_span){0, length - 1 - 31 * i, 1};
    for (int i = 0; i < 40; i++) {
        bool narrow = i >= 20;

        if (narrow)
            world_run(&w, spans, STEP_SPANS, STEP_SPANS, STEP_SPANS);
        else
            world_run(&w, &chunk, 1, chunk.rows, 1);
        bytes = (size_t)w.call.step.rows * world_row(&w) * sizeof *first;
        if (i % 20 == 0)
            memcpy(first, w.step_y, bytes);
        assert_memory_equal(w.step_y, first, bytes);
    }
    assert_done(&w);
    free(first);
    world_free(&w);
}

/* Of a size for a sanitizer. */
static void a_small_step_of_every_width(void **state)
{
    static const int32_t two[] = {150, 37};

    (void)state;
    for (int i = 0; i < N_CASES; i++) {
        sp_cuda_attention_shape of = shape_of(&cases[i], two[0]);
        world_span spans[] = {{1, 0, 37}, {0, 149, 1}, {0, 120, 9}};
        size_t row = 0;
        world w;

        of.rows_max = 64;
        of.spans_max = 4;
        assert_int_equal(world_start(&w, gpu, NULL), SP_OK);
        world_make(&w, &of, two, 2, cases[i].size);
        world_run(&w, spans, 3, 50, 4);
        assert_done(&w);
        for (int s = 0; s < 3; s++)
            for (int32_t r = 0; r < spans[s].rows; r++, row++)
                (void)check_row(&w, spans[s].sequence, spans[s].first + r,
                                w.step_y + row * world_row(&w));
        world_free(&w);
    }
}

static void bad_shapes_are_refused(void **state)
{
    const sp_cuda_attention_shape good = shape_of(&cases[0], 1024);
    sp_cuda_attention_shape bad[6] = {good, good, good, good, good, good};
    size_t bytes = 0;
    world w;

    (void)state;
    assert_int_equal(world_start(&w, gpu, NULL), SP_OK);
    assert_int_equal(w.ops.attention_bytes(w.gpu, &good, &bytes), 0);
    assert_true(bytes > 0);
    bad[0].head_dim = 264;
    bad[1].head_dim = 12;
    bad[2].q_heads = 33;
    bad[3].kv_heads = 0;
    bad[4].q_heads = 17, bad[4].kv_heads = 1;
    bad[5].positions_max = 1 << 22;
    for (int i = 0; i < 6; i++)
        assert_int_not_equal(w.ops.attention_bytes(w.gpu, &bad[i], &bytes), 0);
    w.call.shape = good;
    w.call.step.rows = STEP_ROWS + 1;
    assert_int_not_equal(w.ops.attention_plan(w.gpu, &w.call, w.stream), 0);
    assert_int_not_equal(w.ops.attend_rows(w.gpu, &w.call, w.stream), 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_have_the_values_of_double_precision),
        cmocka_unit_test(a_row_alone_has_the_bits_of_the_whole),
        cmocka_unit_test(chunks_have_the_bits_of_the_whole),
        cmocka_unit_test(mixed_steps_have_the_bits_of_the_whole),
        cmocka_unit_test(pages_and_later_tokens_change_nothing),
        cmocka_unit_test(a_graph_replays_for_other_steps),
        cmocka_unit_test(long_contexts_are_folded_in_one_order),
        cmocka_unit_test(repeats_have_the_same_bits),
        cmocka_unit_test(a_small_step_of_every_width),
        cmocka_unit_test(bad_shapes_are_refused),
    };

    return gpu_main(&gpu, tests, sizeof tests / sizeof tests[0], NULL, NULL, argc, argv);
}
