/*
 * test_cuda_rows.c: the row-wise kernels of the base on a GPU: embeddings, picked rows, norms, SiLU
 * and the rotation into the cache, each against a reference in double that is rounded once, with
 * poison around and in all that must not be written; then the same rows in other batches, bit by
 * bit. Skipped where there is no GPU.
 */
#include "cuda/gpu_batch.h"
#include "cuda/rig.h"
#include "kernels/cuda/ops_cuda.h"

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

/* ---- values -------------------------------------------------------------------------------- */

static void random_rows(sp_test_random *random, uint16_t *to, size_t n, float size)
{
    for (size_t i = 0; i < n; i++)
        to[i] = sp_f32_to_bf16(sp_test_float(random) * size);
}

static uint16_t *make_rows(sp_test_random *random, size_t n, float size)
{
    uint16_t *rows = malloc(n * sizeof *rows + 2);

    assert_non_null(rows);
    random_rows(random, rows, n, size);
    return rows;
}

/* bf16 of `want`, which FP32 arithmetic may have missed by `slack` before the one rounding. */
static void expect_rounded(const char *what, size_t index, uint16_t got, double want, double slack)
{
    double value = (double)sp_bf16_to_f32(got);
    double low = (double)sp_bf16_to_f32(sp_f32_to_bf16((float)(want - slack)));
    double high = (double)sp_bf16_to_f32(sp_f32_to_bf16((float)(want + slack)));

    if (isnan(want) ? !isnan(value) : !(value >= low && value <= high))
        fail_msg("%s %zu: %.9g, not %.9g", what, index, value, want);
}

/* The first of n elements that differs; for a message that tells where. */
static void expect_same(const char *what, const void *got, const void *want, size_t n)
{
    const uint16_t *a = got, *b = want;

    for (size_t i = 0; i < n; i++)
        if (a[i] != b[i])
            fail_msg("%s: element %zu is %04x, not %04x", what, i, a[i], b[i]);
}

static gpu_buffer put(const void *data, size_t bytes)
{
    gpu_buffer buffer = gpu_buffer_make(gpu, bytes);

    gpu_buffer_write(gpu, &buffer, data, bytes);
    return buffer;
}

static void *at(const gpu_buffer *buffer)
{
    return buffer->device + GUARD_BYTES;
}

/* ---- embeddings, picked rows --------------------------------------------------------------- */

enum { VOCAB = 37, COPY_ROWS = 11 };

static const int32_t copy_tokens[COPY_ROWS] = {0, 36, 5, 5, 17, 1, 35, 2, 3, 4, 36};
static const int32_t copy_positions[COPY_ROWS] = {0, 1, 2, -1, 0, 7, 70000, 3, 4, -1, -1};

static void expect_gather(int32_t width)
{
    sp_test_random random = {(uint64_t)width};
    size_t n = (size_t)width, bytes = COPY_ROWS * n * 2;
    uint16_t *table = make_rows(&random, VOCAB * n, 1), *got;
    gpu_buffer in = put(table, VOCAB * n * 2), y = gpu_buffer_make(gpu, bytes);
    gpu_buffer tokens = put(copy_tokens, sizeof copy_tokens);
    gpu_buffer positions = put(copy_positions, sizeof copy_positions);
    sp_cuda_gather gather = {
        .step = {.token = at(&tokens), .position = at(&positions), .rows = COPY_ROWS},
        .table = at(&in),
        .width = width,
        .y = at(&y)};

    gpu_buffer_write(gpu, &y, table, 0);
    assert_int_equal(ops.gather_rows(r.gpu, &gather, r.stream), 0);
    got = (uint16_t *)(void *)gpu_buffer_read(gpu, &y, bytes);
    for (size_t i = 0; i < COPY_ROWS; i++)
        for (size_t j = 0; j < n; j++)
            assert_int_equal(got[i * n + j],
                             copy_positions[i] < 0 ? 0 : table[(size_t)copy_tokens[i] * n + j]);
    gpu_buffer_free(gpu, &in), gpu_buffer_free(gpu, &y);
    gpu_buffer_free(gpu, &tokens), gpu_buffer_free(gpu, &positions);
    free(table);
}

static void expect_pick(int32_t width, int32_t stride)
{
    static const int32_t index[] = {10, -1, 0, 3, 3, 9};
    enum { N = 6 };
    sp_test_random random = {(uint64_t)width};
    size_t n = (size_t)width, bytes = N * n * 2;
    uint16_t *x = make_rows(&random, COPY_ROWS * (size_t)stride, 1), *got;
    gpu_buffer in = put(x, COPY_ROWS * (size_t)stride * 2), to = gpu_buffer_make(gpu, bytes);
    gpu_buffer indices = put(index, sizeof index);
    sp_cuda_pick pick = {.rows = N,
                         .width = width,
                         .index = at(&indices),
                         .x = at(&in),
                         .x_stride = stride,
                         .to = at(&to)};

    gpu_buffer_write(gpu, &to, x, 0);
    assert_int_equal(ops.pick_rows(r.gpu, &pick, r.stream), 0);
    got = (uint16_t *)(void *)gpu_buffer_read(gpu, &to, bytes);
    for (size_t i = 0; i < N; i++)
        for (size_t j = 0; j < n; j++)
            assert_int_equal(got[i * n + j],
                             index[i] < 0 ? 0 : x[(size_t)index[i] * (size_t)stride + j]);
    gpu_buffer_free(gpu, &in), gpu_buffer_free(gpu, &to), gpu_buffer_free(gpu, &indices);
    free(x);
}

static void a_small_copy_of_rows(void **state)
{
    (void)state;
    expect_gather(1);
    expect_gather(24);
    expect_pick(13, 13);
    expect_pick(24, 32);
}

static void rows_are_copied(void **state)
{
    static const int32_t widths[] = {8, 61, 2048, 4096, 5120, 12296};

    (void)state;
    for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++) {
        expect_gather(widths[i]);
        expect_pick(widths[i], widths[i]);
        expect_pick(widths[i], widths[i] + 3);
    }
}

/* ---- norm ---------------------------------------------------------------------------------- */

typedef struct norm_case {
    int32_t rows, width;
    float eps, offset;
    bool adds, in_place;
    size_t shift; /* elements that x is moved from a 16-byte boundary */
    uint16_t *x, *add, *weight;
    uint16_t *out_x, *out_y; /* after the launch */
} norm_case;

static norm_case make_norm(int32_t rows, int32_t width, bool adds)
{
    sp_test_random random = {(uint64_t)(rows * 31 + width)};
    size_t n = (size_t)rows * (size_t)width;
    norm_case c = {.rows = rows, .width = width, .eps = 1e-6f, .adds = adds};

    c.x = make_rows(&random, n, 3);
    c.add = make_rows(&random, n, 2);
    c.weight = make_rows(&random, (size_t)width, 2);
    c.out_x = malloc(n * 2);
    c.out_y = malloc(n * 2);
    assert_true(c.out_x && c.out_y);
    return c;
}

static void free_norm(norm_case *c)
{
    free(c->x), free(c->add), free(c->weight), free(c->out_x), free(c->out_y);
}

/* Rows [first, first + rows) of the case, of which the results go to the same rows. */
static void run_norm(norm_case *c, int32_t first, int32_t rows)
{
    size_t from = (size_t)first * (size_t)c->width, n = (size_t)rows * (size_t)c->width;
    size_t shift = c->shift * 2;
    gpu_buffer x = gpu_buffer_make(gpu, n * 2 + shift), y = gpu_buffer_make(gpu, n * 2);
    gpu_buffer add = put(c->add + from, n * 2), weight = put(c->weight, (size_t)c->width * 2);
    sp_cuda_norm norm = {.rows = rows,
                         .width = c->width,
                         .x = (char *)at(&x) + shift,
                         .add = c->adds ? at(&add) : NULL,
                         .weight = at(&weight),
                         .eps = c->eps,
                         .offset = c->offset};
    uint16_t *moved = calloc(n + c->shift, 2);

    assert_non_null(moved);
    memcpy(moved + c->shift, c->x + from, n * 2);
    gpu_buffer_write(gpu, &x, moved, n * 2 + shift);
    gpu_buffer_write(gpu, &y, moved, 0);
    norm.y = c->in_place ? norm.x : at(&y);
    assert_int_equal(ops.norm_rows(r.gpu, &norm, r.stream), 0);
    memcpy(c->out_x + from, gpu_buffer_read(gpu, &x, n * 2 + shift) + shift, n * 2);
    if (c->in_place)
        memcpy(c->out_y + from, c->out_x + from, n * 2);
    else
        memcpy(c->out_y + from, gpu_buffer_read(gpu, &y, n * 2), n * 2);
    expect_same("add", gpu_buffer_read(gpu, &add, n * 2), c->add + from, n);
    gpu_buffer_free(gpu, &x), gpu_buffer_free(gpu, &y);
    gpu_buffer_free(gpu, &add), gpu_buffer_free(gpu, &weight);
    free(moved);
}

static void check_norm_row(const norm_case *c, size_t row)
{
    size_t n = (size_t)c->width;
    uint16_t *x = malloc(n * 2);
    double sum = 0;

    assert_non_null(x);
    for (size_t i = 0; i < n; i++) {
        float value = sp_bf16_to_f32(c->x[row * n + i]);
        float more = c->adds ? sp_bf16_to_f32(c->add[row * n + i]) : 0.0f;

        x[i] = sp_f32_to_bf16(value + more);
        sum += (double)sp_bf16_to_f32(x[i]) * (double)sp_bf16_to_f32(x[i]);
    }
    if (!c->in_place)
        expect_same("x", c->out_x + row * n, x, n);
    for (size_t i = 0; i < n; i++) {
        double weight = (double)sp_bf16_to_f32(c->weight[i]) + (double)c->offset;
        double want =
            (double)sp_bf16_to_f32(x[i]) / sqrt(sum / (double)n + (double)c->eps) * weight;

        expect_rounded("norm", row * n + i, c->out_y[row * n + i], want, fabs(want) * 0x1p-20);
    }
    free(x);
}

static void expect_norm(int32_t rows, int32_t width, bool adds, bool in_place, float offset)
{
    norm_case c = make_norm(rows, width, adds);

    c.in_place = in_place;
    c.offset = offset;
    run_norm(&c, 0, rows);
    for (int32_t row = 0; row < rows; row++)
        check_norm_row(&c, (size_t)row);
    free_norm(&c);
}

static void a_small_norm_is_right(void **state)
{
    (void)state;
    expect_norm(1, 1, false, false, 0);
    expect_norm(3, 24, true, false, 1);
    expect_norm(2, 61, true, true, 0);
    expect_norm(2, 20000, true, false, 0);
}

static void norms_are_right(void **state)
{
    static const int32_t widths[] = {8,    64,   520,  1000,  2048,  2056,  4096,
                                     5120, 8192, 8200, 12288, 16384, 16392, 28672};

    (void)state;
    for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++) {
        expect_norm(5, widths[i], false, false, 0);
        expect_norm(3, widths[i], true, false, 1);
        expect_norm(2, widths[i], false, true, 0);
    }
    expect_norm(331, 4096, true, false, 0);
}

/* Alone, in a smaller launch and from an unaligned address, which takes element by element. */
static void a_norm_has_one_answer(void **state)
{
    static const int32_t widths[] = {40, 2048, 4096, 12288, 20000};
    enum { ROWS = 9 };

    (void)state;
    for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++) {
        size_t n = ROWS * (size_t)widths[i];
        norm_case c = make_norm(ROWS, widths[i], true);
        uint16_t *want = malloc(n * 2);

        assert_non_null(want);
        run_norm(&c, 0, ROWS);
        memcpy(want, c.out_y, n * 2);
        for (int32_t row = 0; row < ROWS; row++)
            run_norm(&c, row, 1);
        expect_same("alone", c.out_y, want, n);
        run_norm(&c, 0, 4);
        run_norm(&c, 4, 5);
        expect_same("in two parts", c.out_y, want, n);
        c.shift = 1;
        run_norm(&c, 0, ROWS);
        expect_same("unaligned", c.out_y, want, n);
        free(want);
        free_norm(&c);
    }
}

/* A row that is not finite stays its own matter; a row of zeros is zeros. */
static void odd_rows_are_normed(void **state)
{
    enum { WIDTH = 4096 };
    norm_case c = make_norm(4, WIDTH, false);

    (void)state;
    c.x[WIDTH + 5] = 0x7fc0;
    c.x[2 * WIDTH + 4095] = 0x7f80;
    memset(c.x + 3 * WIDTH, 0, WIDTH * 2);
    run_norm(&c, 0, 4);
    check_norm_row(&c, 0);
    check_norm_row(&c, 3);
    for (size_t i = 0; i < WIDTH; i++) {
        assert_true(isnan(sp_bf16_to_f32(c.out_y[WIDTH + i])));
        assert_true(isnan(sp_bf16_to_f32(c.out_y[2 * WIDTH + i])) == (i == 4095));
    }
    free_norm(&c);
}

/* ---- SiLU ---------------------------------------------------------------------------------- */

static const uint16_t odd_gates[] = {0x0000, 0x8000, 0x7f80, 0xff80, 0x7fc0, 0x7f7f,
                                     0xff7f, 0x0001, 0x8001, 0x42b0, 0xc2b0, 0xc2ae,
                                     0xc2aa, 0xc2d0, 0x4000, 0xc000};
#define N_ODD_GATES (sizeof odd_gates / sizeof odd_gates[0])

/* An exponent's argument is rounded, so that its error grows with the gate. */
static void check_silu(const uint16_t *gate, const uint16_t *up, const uint16_t *got, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        double g = (double)sp_bf16_to_f32(gate[i]), u = (double)sp_bf16_to_f32(up[i]);
        double want = g / (1 + exp(-g)) * u;
        double slack = isfinite(g) ? fabs(want) * (fmin(fabs(g), 100) + 4) * 0x1p-22 : 0;

        expect_rounded("silu", i, got[i], want, slack + fabs(u) * 0x1p-126);
    }
}

static void expect_silu(size_t n)
{
    sp_test_random random = {n};
    uint16_t *gate = make_rows(&random, n, 12), *up = make_rows(&random, n, 3);
    gpu_buffer on_gate, on_up = put(up, n * 2);
    sp_cuda_silu silu = {.n = (int64_t)n};

    for (size_t i = 0; i < N_ODD_GATES && i < n; i++)
        gate[i] = odd_gates[i];
    on_gate = put(gate, n * 2);
    silu.gate = at(&on_gate), silu.up = at(&on_up);
    assert_int_equal(ops.silu_mul(r.gpu, &silu, r.stream), 0);
    check_silu(gate, up, (uint16_t *)(void *)gpu_buffer_read(gpu, &on_gate, n * 2), n);
    expect_same("up", gpu_buffer_read(gpu, &on_up, n * 2), up, n);
    gpu_buffer_free(gpu, &on_gate), gpu_buffer_free(gpu, &on_up);
    free(gate), free(up);
}

static void a_small_silu_is_right(void **state)
{
    (void)state;
    expect_silu(8);
    expect_silu(12288);
}

/* Both shapes of the launch, and what is not a whole block of them. */
static void silus_are_right(void **state)
{
    (void)state;
    expect_silu((1 << 20) - 8);
    expect_silu(1 << 20);
    expect_silu((1 << 20) + 8);
    expect_silu(3 * (1 << 20) + 1032);
}

/* ---- gates of heads ------------------------------------------------------------------------ */

static void expect_gated_heads(int32_t rows, int32_t heads, int32_t head_dim)
{
    sp_test_random random = {(uint64_t)(rows * head_dim)};
    size_t dim = (size_t)head_dim, n = (size_t)rows * (size_t)heads * dim;
    uint16_t *y = make_rows(&random, n, 3), *q_gate = make_rows(&random, 2 * n, 12), *got;
    gpu_buffer on_y = put(y, n * 2), on_gate;
    sp_cuda_gate_heads gate = {.rows = rows, .heads = heads, .head_dim = head_dim, .y = at(&on_y)};

    for (size_t i = 0; i < N_ODD_GATES && i < dim; i++)
        q_gate[dim + i] = odd_gates[i];
    on_gate = put(q_gate, 2 * n * 2);
    gate.q_gate = at(&on_gate);
    assert_int_equal(ops.gate_head_rows(r.gpu, &gate, r.stream), 0);
    got = (uint16_t *)(void *)gpu_buffer_read(gpu, &on_y, n * 2);
    for (size_t i = 0; i < n; i++) {
        double g = (double)sp_bf16_to_f32(q_gate[(i / dim * 2 + 1) * dim + i % dim]);
        double want = (double)sp_bf16_to_f32(y[i]) / (1 + exp(-g));

        expect_rounded("gate", i, got[i], want,
                       (isfinite(g) ? fabs(want) * (fmin(fabs(g), 100) + 4) * 0x1p-22 : 0) +
                           fabs((double)sp_bf16_to_f32(y[i])) * 0x1p-126);
    }
    expect_same("q and gates", gpu_buffer_read(gpu, &on_gate, 2 * n * 2), q_gate, 2 * n);
    gpu_buffer_free(gpu, &on_y), gpu_buffer_free(gpu, &on_gate);
    free(y), free(q_gate);
}

static void a_small_gate_of_heads_is_right(void **state)
{
    (void)state;
    expect_gated_heads(1, 1, 8);
    expect_gated_heads(3, 4, 32);
    expect_gated_heads(7, 24, 256);
}

/* ---- rotation and cache -------------------------------------------------------------------- */

enum { SPANS = 4, PAGES = 24, ROPE_ROWS = 40, POSITIONS = 64 };

/* Spans of consecutive positions: within a page, across two, at the start of one, and one row. */
static const int32_t span_rows[SPANS] = {5, 21, 3, 1}, span_position[SPANS] = {0, 14, 32, 47};

typedef struct rope_case {
    int32_t q_heads, kv_heads, head_dim, n_rot;
    bool norms, rotates, gated; /* q is read beside gates */
    uint16_t *q, *k, *v, *q_norm, *k_norm;
    float *cosine, *sine;
    uint16_t *out_q, *out_k, *out_v; /* by row, as q, k and v */
    int32_t fault[SPANS];
} rope_case;

typedef struct rope_shape {
    int32_t q_heads, kv_heads, head_dim, n_rot;
    bool norms;
} rope_shape;

static rope_case make_rope(rope_shape shape)
{
    sp_test_random random = {(uint64_t)(shape.head_dim * 1000 + shape.n_rot)};
    size_t q = ROPE_ROWS * (size_t)(shape.q_heads * shape.head_dim);
    size_t kv = ROPE_ROWS * (size_t)(shape.kv_heads * shape.head_dim);
    size_t angles = POSITIONS * (size_t)(shape.n_rot ? shape.n_rot : 1);
    rope_case c = {.q_heads = shape.q_heads,
                   .kv_heads = shape.kv_heads,
                   .head_dim = shape.head_dim,
                   .n_rot = shape.n_rot,
                   .norms = shape.norms,
                   .rotates = shape.n_rot > 0};

    c.q = make_rows(&random, q, 4), c.k = make_rows(&random, kv, 4);
    c.v = make_rows(&random, kv, 4);
    c.q_norm = make_rows(&random, (size_t)c.head_dim, 2);
    c.k_norm = make_rows(&random, (size_t)c.head_dim, 2);
    c.out_q = calloc(q, 2), c.out_k = calloc(kv, 2), c.out_v = calloc(kv, 2);
    c.cosine = calloc(angles, sizeof *c.cosine), c.sine = calloc(angles, sizeof *c.sine);
    assert_true(c.out_q && c.out_k && c.out_v && c.cosine && c.sine);
    for (size_t i = 0; i < angles; i++) {
        double angle = 10 * (double)sp_test_float(&random);

        c.cosine[i] = (float)cos(angle), c.sine[i] = (float)sin(angle);
    }
    return c;
}

static void free_rope(rope_case *c)
{
    free(c->q), free(c->k), free(c->v), free(c->q_norm), free(c->k_norm);
    free(c->cosine), free(c->sine), free(c->out_q), free(c->out_k), free(c->out_v);
}

/* The rows of a step, of those of the case: span by span, the first of them `first` rows in. */
typedef struct rope_step {
    int32_t rows, spans, launched;
    int32_t row[ROPE_ROWS]; /* of the case */
    int32_t position[ROPE_ROWS], row_span[ROPE_ROWS], span[SPANS], span_page[SPANS], pages[PAGES];
} rope_step;

static int32_t case_position(int32_t row)
{
    for (int32_t s = 0; s < SPANS; s++) {
        if (row < span_rows[s])
            return span_position[s] + row;
        row -= span_rows[s];
    }
    return -1;
}

/* The spans of `mask`, with pages that `turn` moves, and pads. */
static rope_step make_step(unsigned mask, int32_t turn, int32_t pads)
{
    rope_step step = {.rows = 0};
    int32_t first = 0, page = 0;

    for (int32_t s = 0; s < SPANS; first += span_rows[s++]) {
        if (!(mask >> s & 1))
            continue;
        step.span[step.spans] = s;
        step.span_page[step.spans] = page;
        for (int32_t i = 0; i <= (span_position[s] + span_rows[s]) / SP_CUDA_PAGE; i++, page++)
            step.pages[page] = (page * 7 + turn) % PAGES;
        for (int32_t i = 0; i < span_rows[s]; i++) {
            step.row[step.rows] = first + i;
            step.position[step.rows] = span_position[s] + i;
            step.row_span[step.rows++] = step.spans;
        }
        step.spans++;
    }
    assert_true(page <= PAGES && step.rows + pads <= ROPE_ROWS);
    step.launched = step.rows + pads;
    for (int32_t i = step.rows; i < step.launched; i++)
        step.position[i] = step.row_span[i] = -1;
    return step;
}

/* Element d of a token, by the words of ops_cuda.h: atoms of 1 KiB, rows of 128 bytes, swizzled. */
static size_t cache_element(const rope_case *c, const rope_step *step, int32_t row, int32_t head,
                            int32_t d)
{
    size_t dim = (size_t)sp_cuda_page_dim(c->head_dim), position = (size_t)step->position[row];
    size_t page = (size_t)step->pages[(size_t)step->span_page[step->row_span[row]] + position / 16];
    size_t token = position % 16, atoms = dim / 64;
    size_t atom = token / 8 * atoms + (size_t)d / 64, line = token % 8;
    size_t piece = ((size_t)d % 64 / 8) ^ line;
    size_t byte = (page * (size_t)c->kv_heads + (size_t)head) * 16 * dim * 2 + atom * 1024 +
                  line * 128 + piece * 16 + (size_t)d % 8 * 2;

    return byte / 2;
}

static size_t cache_bytes(const rope_case *c)
{
    return PAGES * (size_t)c->kv_heads * 16 * (size_t)sp_cuda_page_dim(c->head_dim) * 2;
}

/* Takes the rows' elements out of a cache, of which all else must be poison or, beyond head_dim,
 * zeros. */
static void take_cache(const rope_case *c, const rope_step *step, gpu_buffer *cache, uint16_t *out)
{
    size_t bytes = cache_bytes(c), dim = (size_t)c->head_dim;
    uint16_t *all = (uint16_t *)(void *)gpu_buffer_read(gpu, cache, bytes);
    bool *taken = calloc(bytes / 2, sizeof *taken);

    assert_non_null(taken);
    for (int32_t i = 0; i < step->rows; i++)
        for (int32_t h = 0; h < c->kv_heads; h++)
            for (int32_t d = 0; d < sp_cuda_page_dim(c->head_dim); d++) {
                size_t from = cache_element(c, step, i, h, d);
                size_t to = ((size_t)step->row[i] * (size_t)c->kv_heads + (size_t)h) * dim;

                taken[from] = true;
                if (d < c->head_dim)
                    out[to + (size_t)d] = all[from];
                else
                    assert_int_equal(all[from], 0);
            }
    for (size_t i = 0; i < bytes / 2; i++)
        if (!taken[i] && all[i] != 0xa5a5)
            fail_msg("element %zu of the cache was written", i);
    free(taken);
}

/* Rows of the case as the step has them, pads as rows of poison. */
static gpu_buffer put_rows(const rope_step *step, const uint16_t *rows, size_t width)
{
    gpu_buffer buffer = gpu_buffer_make(gpu, (size_t)step->launched * width * 2);
    uint16_t *own = malloc((size_t)step->launched * width * 2);

    assert_non_null(own);
    memset(own, POISON, (size_t)step->launched * width * 2);
    for (size_t i = 0; i < (size_t)step->rows; i++)
        memcpy(own + i * width, rows + (size_t)step->row[i] * width, width * 2);
    gpu_buffer_write(gpu, &buffer, own, (size_t)step->launched * width * 2);
    free(own);
    return buffer;
}

enum {
    Q,
    Q_GATE,
    K,
    V,
    Q_NORM,
    K_NORM,
    COSINE,
    SINE,
    KEYS,
    VALUES,
    FAULT,
    POSITION,
    ROW_SPAN,
    SPAN_PAGE,
    PAGE_LIST,
    N_BUFFERS
};

/* Each head of q and a gate of poison after it. */
static gpu_buffer put_gated(const rope_case *c, const rope_step *step)
{
    size_t dim = (size_t)c->head_dim, heads = ROPE_ROWS * (size_t)c->q_heads;
    uint16_t *all = malloc(2 * heads * dim * 2);
    gpu_buffer buffer;

    assert_non_null(all);
    memset(all, POISON, 2 * heads * dim * 2);
    for (size_t i = 0; i < heads; i++)
        memcpy(all + 2 * i * dim, c->q + i * dim, dim * 2);
    buffer = put_rows(step, all, 2 * (size_t)c->q_heads * dim);
    free(all);
    return buffer;
}

static void put_rope(const rope_case *c, const rope_step *step, gpu_buffer *b)
{
    size_t rows = (size_t)step->launched, angles = POSITIONS * (size_t)c->n_rot * 4;
    static const int32_t faults[SPANS] = {0};

    b[Q] = put_rows(step, c->q, (size_t)(c->q_heads * c->head_dim));
    b[Q_GATE] = put_gated(c, step);
    if (c->gated)
        gpu_buffer_write(gpu, &b[Q], faults, 0);
    b[K] = put_rows(step, c->k, (size_t)(c->kv_heads * c->head_dim));
    b[V] = put_rows(step, c->v, (size_t)(c->kv_heads * c->head_dim));
    b[Q_NORM] = put(c->q_norm, (size_t)c->head_dim * 2);
    b[K_NORM] = put(c->k_norm, (size_t)c->head_dim * 2);
    b[COSINE] = put(c->cosine, angles);
    b[SINE] = put(c->sine, angles);
    b[KEYS] = gpu_buffer_make(gpu, cache_bytes(c));
    b[VALUES] = gpu_buffer_make(gpu, cache_bytes(c));
    gpu_buffer_write(gpu, &b[KEYS], faults, 0);
    gpu_buffer_write(gpu, &b[VALUES], faults, 0);
    b[FAULT] = put(faults, sizeof faults);
    b[POSITION] = put(step->position, rows * 4);
    b[ROW_SPAN] = put(step->row_span, rows * 4);
    b[SPAN_PAGE] = put(step->span_page, sizeof step->span_page);
    b[PAGE_LIST] = put(step->pages, sizeof step->pages);
}

static void launch_rope(const rope_case *c, const rope_step *step, gpu_buffer *b)
{
    sp_cuda_rope rope = {.step = {.position = at(&b[POSITION]),
                                  .row_span = at(&b[ROW_SPAN]),
                                  .span_page = at(&b[SPAN_PAGE]),
                                  .pages = at(&b[PAGE_LIST]),
                                  .rows = step->launched,
                                  .spans = step->spans},
                         .q_heads = c->q_heads,
                         .kv_heads = c->kv_heads,
                         .head_dim = c->head_dim,
                         .n_rot = c->n_rot,
                         .q_gate = c->gated ? at(&b[Q_GATE]) : NULL,
                         .q = at(&b[Q]),
                         .k = at(&b[K]),
                         .v = at(&b[V]),
                         .q_norm = c->norms ? at(&b[Q_NORM]) : NULL,
                         .k_norm = c->norms ? at(&b[K_NORM]) : NULL,
                         .q_eps = 1e-6f,
                         .k_eps = 1e-5f,
                         .q_offset = 1,
                         .k_offset = 0,
                         .cosine = c->rotates ? at(&b[COSINE]) : NULL,
                         .sine = c->rotates ? at(&b[SINE]) : NULL,
                         .keys = at(&b[KEYS]),
                         .values = at(&b[VALUES]),
                         .fault = at(&b[FAULT])};

    assert_int_equal(ops.rope_rows(r.gpu, &rope, r.stream), 0);
}

/* The step's rows, into the case's results; its faults by the case's spans. */
static void run_rope(rope_case *c, const rope_step *step)
{
    size_t width = (size_t)(c->q_heads * c->head_dim), bytes = (size_t)step->launched * width * 2;
    gpu_buffer b[N_BUFFERS];
    uint16_t *q;
    int32_t *fault;

    put_rope(c, step, b);
    launch_rope(c, step, b);
    q = (uint16_t *)(void *)gpu_buffer_read(gpu, &b[Q], bytes);
    for (size_t i = 0; i < (size_t)step->rows; i++)
        memcpy(c->out_q + (size_t)step->row[i] * width, q + i * width, width * 2);
    for (size_t i = (size_t)step->rows * width; i < (size_t)step->launched * width; i++)
        assert_int_equal(q[i], 0xa5a5);
    take_cache(c, step, &b[KEYS], c->out_k);
    take_cache(c, step, &b[VALUES], c->out_v);
    fault = (int32_t *)(void *)gpu_buffer_read(gpu, &b[FAULT], sizeof c->fault);
    for (int32_t s = 0; s < step->spans; s++)
        c->fault[step->span[s]] = fault[s];
    for (int i = 0; i < N_BUFFERS; i++)
        gpu_buffer_free(gpu, &b[i]);
}

static double normed(const rope_case *c, const uint16_t *x, const uint16_t *weight, double eps,
                     double offset, int32_t d)
{
    double sum = 0;

    if (!c->norms)
        return (double)sp_bf16_to_f32(x[d]);
    for (int32_t i = 0; i < c->head_dim; i++)
        sum += (double)sp_bf16_to_f32(x[i]) * (double)sp_bf16_to_f32(x[i]);
    return (double)sp_bf16_to_f32(x[d]) / sqrt(sum / c->head_dim + eps) *
           ((double)sp_bf16_to_f32(weight[d]) + offset);
}

static void check_head(const rope_case *c, const char *what, int32_t row, const uint16_t *x,
                       const uint16_t *got, const uint16_t *weight, double eps, double offset)
{
    size_t at_angle = (size_t)case_position(row) * (size_t)c->n_rot;

    for (int32_t d = 0; d < c->head_dim; d++) {
        double a = normed(c, x, weight, eps, offset, d), want = a, size = fabs(a);

        if (c->rotates && d < 2 * c->n_rot) {
            int32_t i = d % c->n_rot, other = d < c->n_rot ? d + c->n_rot : d - c->n_rot;
            double cosine = (double)c->cosine[at_angle + (size_t)i];
            double sine = (double)c->sine[at_angle + (size_t)i];
            double b = normed(c, x, weight, eps, offset, other);

            want = d < c->n_rot ? a * cosine - b * sine : a * cosine + b * sine;
            size = fabs(a * cosine) + fabs(b * sine);
        }
        expect_rounded(what, (size_t)(row * 1000 + d), got[d], want, size * 0x1p-20);
    }
}

static int32_t case_rows(void)
{
    int32_t rows = 0;

    for (int32_t s = 0; s < SPANS; s++)
        rows += span_rows[s];
    return rows;
}

static void check_rope(const rope_case *c)
{
    size_t dim = (size_t)c->head_dim, rows = (size_t)case_rows();

    for (size_t i = 0; i < rows * (size_t)c->q_heads; i++)
        check_head(c, "q", (int32_t)(i / (size_t)c->q_heads), c->q + i * dim, c->out_q + i * dim,
                   c->q_norm, (double)1e-6f, 1);
    for (size_t i = 0; i < rows * (size_t)c->kv_heads; i++)
        check_head(c, "k", (int32_t)(i / (size_t)c->kv_heads), c->k + i * dim, c->out_k + i * dim,
                   c->k_norm, (double)1e-5f, 0);
    expect_same("v", c->out_v, c->v, rows * (size_t)c->kv_heads * dim);
}

static void expect_rope(rope_shape shape)
{
    static const int32_t none[SPANS] = {0};
    rope_case c = make_rope(shape);
    rope_step step = make_step(0xf, 3, 6);

    run_rope(&c, &step);
    check_rope(&c);
    assert_memory_equal(c.fault, none, sizeof none);
    free_rope(&c);
}

static void a_small_rotation_is_right(void **state)
{
    (void)state;
    expect_rope((rope_shape){2, 1, 64, 32, true});
    expect_rope((rope_shape){2, 1, 24, 12, true});
}

static void rotations_are_right(void **state)
{
    static const rope_shape shapes[] = {
        {32, 8, 128, 64, true}, {14, 2, 64, 32, false}, {8, 1, 256, 128, true},
        {8, 2, 256, 32, true},  {4, 4, 80, 40, false},  {4, 2, 80, 16, true},
        {3, 3, 96, 48, false},  {2, 2, 16, 8, true},    {5, 1, 72, 36, true},
        {2, 1, 128, 0, true},   {7, 1, 112, 20, false}, {2, 1, 248, 124, true},
        {1, 1, 8, 4, false},    {6, 2, 192, 96, true}};

    (void)state;
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        expect_rope(shapes[i]);
}

/* A span alone, with other pages and pads, beside others: the same bits. The last shape has so many
 * heads that all spans together are launched in another form than one. */
static void a_rotation_has_one_answer(void **state)
{
    static const rope_shape shapes[] = {
        {32, 8, 128, 64, true}, {5, 1, 72, 36, true}, {453, 5, 256, 128, true}};
    size_t rows = (size_t)case_rows();

    (void)state;
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        rope_case c = make_rope(shapes[i]), other = make_rope(shapes[i]);
        size_t q = rows * (size_t)(c.q_heads * c.head_dim);
        size_t kv = rows * (size_t)(c.kv_heads * c.head_dim);
        rope_step all = make_step(0xf, 3, 6);

        run_rope(&c, &all);
        if (c.q_heads < 100) /* the same code as for other numbers of heads */
            check_rope(&c);
        for (unsigned s = 0; s < SPANS; s++) {
            rope_step alone = make_step(1u << s, (int32_t)s + 9, (int32_t)(s % 2) * 3);

            run_rope(&other, &alone);
        }
        expect_same("q", other.out_q, c.out_q, q);
        expect_same("k", other.out_k, c.out_k, kv);
        expect_same("v", other.out_v, c.out_v, kv);
        free_rope(&c), free_rope(&other);
    }
}

/* The same q from between gates. */
static void a_small_gated_rotation_is_that_of_q(void **state)
{
    static const rope_shape shapes[] = {
        {4, 2, 32, 4, true}, {24, 4, 256, 32, true}, {5, 1, 72, 36, true}, {453, 5, 256, 32, true}};

    (void)state;
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        rope_case c = make_rope(shapes[i]), other = make_rope(shapes[i]);
        size_t q = (size_t)case_rows() * (size_t)(c.q_heads * c.head_dim);
        rope_step step = make_step(0xf, 3, 6);

        other.gated = true;
        run_rope(&c, &step);
        run_rope(&other, &step);
        expect_same("q", other.out_q, c.out_q, q);
        free_rope(&c), free_rope(&other);
    }
}

/* What is not finite is told by its span, and stored; q tells nothing. */
static void faults_are_told_by_span(void **state)
{
    rope_case c = make_rope((rope_shape){4, 2, 128, 64, true});
    rope_step step = make_step(0xf, 5, 2);
    size_t width = 2 * 128;

    (void)state;
    c.q[2 * 512 + 7] = 0x7fc0;              /* span 0 */
    c.v[(5 + 20) * width + 255] = 0xff80;   /* the last row of span 1 */
    c.k[(5 + 21 + 1) * width + 3] = 0x7fc0; /* span 2 */
    run_rope(&c, &step);
    assert_int_equal(c.fault[0], 0);
    assert_int_equal(c.fault[1], 1);
    assert_int_equal(c.fault[2], 1);
    assert_int_equal(c.fault[3], 0);
    assert_int_equal(c.out_v[(5 + 20) * width + 255], 0xff80);
    assert_true(isnan(sp_bf16_to_f32(c.out_k[(5 + 21 + 1) * width + 3])));
    free_rope(&c);
}

/* ---- launches that overlap ----------------------------------------------------------------- */

enum { CHAIN = 60, CHAIN_ROWS = 7, CHAIN_WIDTH = 4096 };

typedef struct chain {
    gpu_buffer x, y, add, weight, tokens, positions;
} chain;

static chain make_chain(void)
{
    sp_test_random random = {77};
    size_t n = (size_t)CHAIN_ROWS * CHAIN_WIDTH;
    uint16_t *rows = make_rows(&random, n, 2);
    chain c = {.x = put(rows, n * 2), .y = put(rows, n * 2), .add = put(rows, n * 2)};

    random_rows(&random, rows, CHAIN_WIDTH, 1);
    c.weight = put(rows, CHAIN_WIDTH * 2);
    c.tokens = put(copy_tokens, CHAIN_ROWS * 4);
    c.positions = put(copy_positions, CHAIN_ROWS * 4);
    free(rows);
    return c;
}

static void free_chain(chain *c)
{
    gpu_buffer_free(gpu, &c->x), gpu_buffer_free(gpu, &c->y), gpu_buffer_free(gpu, &c->add);
    gpu_buffer_free(gpu, &c->weight), gpu_buffer_free(gpu, &c->tokens);
    gpu_buffer_free(gpu, &c->positions);
}

/* Each launch reads what the one before wrote, and writes what that one read. */
static void run_chain(chain *c, bool waits)
{
    sp_cuda_norm norm = {.rows = CHAIN_ROWS,
                         .width = CHAIN_WIDTH,
                         .x = at(&c->x),
                         .add = at(&c->add),
                         .weight = at(&c->weight),
                         .eps = 1e-6f,
                         .y = at(&c->y)};
    sp_cuda_silu silu = {.n = CHAIN_ROWS * CHAIN_WIDTH, .gate = at(&c->y), .up = at(&c->x)};
    sp_cuda_pick pick = {.rows = CHAIN_ROWS,
                         .width = CHAIN_WIDTH,
                         .index = at(&c->positions),
                         .x = at(&c->y),
                         .x_stride = CHAIN_WIDTH,
                         .to = at(&c->add)};

    for (int i = 0; i < CHAIN; i++) {
        assert_int_equal(ops.norm_rows(r.gpu, &norm, r.stream), 0);
        if (waits)
            assert_ok(sp_stream_wait(sp_device_main_stream(gpu), NULL), NULL);
        assert_int_equal(ops.silu_mul(r.gpu, &silu, r.stream), 0);
        if (waits)
            assert_ok(sp_stream_wait(sp_device_main_stream(gpu), NULL), NULL);
        assert_int_equal(ops.pick_rows(r.gpu, &pick, r.stream), 0);
        if (waits)
            assert_ok(sp_stream_wait(sp_device_main_stream(gpu), NULL), NULL);
    }
}

static void launches_that_overlap_keep_their_order(void **state)
{
    static const int32_t index[CHAIN_ROWS] = {3, 6, 1, 0, 5, 2, 4};
    size_t n = (size_t)CHAIN_ROWS * CHAIN_WIDTH;
    uint16_t *want = malloc(n * 2);

    (void)state;
    assert_non_null(want);
    for (int again = 0; again < 6; again++) {
        chain c = make_chain();
        sp_graph *graph = NULL;

        gpu_buffer_write(gpu, &c.positions, index, sizeof index);
        if (again < 2)
            run_chain(&c, again == 0);
        else {
            assert_ok(sp_graph_begin(sp_device_main_stream(gpu), NULL), NULL);
            run_chain(&c, false);
            assert_ok(sp_graph_end(sp_device_main_stream(gpu), &graph, NULL), NULL);
            assert_ok(sp_graph_launch(graph, sp_device_main_stream(gpu), NULL), NULL);
            assert_ok(sp_stream_wait(sp_device_main_stream(gpu), NULL), NULL);
            sp_graph_destroy(graph);
        }
        if (again == 0)
            memcpy(want, gpu_buffer_read(gpu, &c.x, n * 2), n * 2);
        expect_same("x", gpu_buffer_read(gpu, &c.x, n * 2), want, n);
        free_chain(&c);
    }
    free(want);
}

/* A captured launch takes the tokens that are there when it runs. */
static void a_replay_reads_the_next_step(void **state)
{
    static const int32_t next[CHAIN_ROWS] = {6, 5, 4, 3, 2, 1, 0};
    size_t n = (size_t)CHAIN_ROWS * CHAIN_WIDTH;
    chain c = make_chain();
    uint16_t *table = malloc(n * 2), *y;
    sp_stream *stream = sp_device_main_stream(gpu);
    sp_graph *graph = NULL;
    sp_cuda_gather gather = {
        .step = {.token = at(&c.tokens), .position = at(&c.positions), .rows = CHAIN_ROWS},
        .table = at(&c.x),
        .width = CHAIN_WIDTH,
        .y = at(&c.y)};

    (void)state;
    assert_non_null(table);
    memcpy(table, gpu_buffer_read(gpu, &c.x, n * 2), n * 2);
    assert_ok(sp_graph_begin(stream, NULL), NULL);
    assert_int_equal(ops.gather_rows(r.gpu, &gather, r.stream), 0);
    assert_ok(sp_graph_end(stream, &graph, NULL), NULL);
    gpu_buffer_write(gpu, &c.tokens, next, sizeof next);
    gpu_buffer_write(gpu, &c.positions, next, sizeof next);
    assert_ok(sp_graph_launch(graph, stream, NULL), NULL);
    y = (uint16_t *)(void *)gpu_buffer_read(gpu, &c.y, n * 2);
    for (size_t i = 0; i < CHAIN_ROWS; i++)
        expect_same("y", y + i * CHAIN_WIDTH, table + (size_t)next[i] * CHAIN_WIDTH, CHAIN_WIDTH);
    sp_graph_destroy(graph);
    free_chain(&c);
    free(table);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_small_copy_of_rows),
        cmocka_unit_test(rows_are_copied),
        cmocka_unit_test(a_small_norm_is_right),
        cmocka_unit_test(norms_are_right),
        cmocka_unit_test(a_norm_has_one_answer),
        cmocka_unit_test(odd_rows_are_normed),
        cmocka_unit_test(a_small_silu_is_right),
        cmocka_unit_test(silus_are_right),
        cmocka_unit_test(a_small_gate_of_heads_is_right),
        cmocka_unit_test(a_small_rotation_is_right),
        cmocka_unit_test(a_small_gated_rotation_is_that_of_q),
        cmocka_unit_test(rotations_are_right),
        cmocka_unit_test(a_rotation_has_one_answer),
        cmocka_unit_test(faults_are_told_by_span),
        cmocka_unit_test(launches_that_overlap_keep_their_order),
        cmocka_unit_test(a_replay_reads_the_next_step),
    };

    return gpu_main(&gpu, tests, sizeof tests / sizeof tests[0], open_launchers, NULL, argc, argv);
}
