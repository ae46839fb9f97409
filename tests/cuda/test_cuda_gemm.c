/*
 * test_cuda_gemm.c: the base's GEMMs. Sums of small integers are exact in any order, so every
 * output of odd shapes has one right value; random numbers are held against double; and a row's
 * bytes are the same whatever rows and kernel it shares a launch with, as are those of a replaced
 * row of the head that equals the base's. Skipped where there is no GPU.
 */
#include "base/half.h"
#include "cuda/gpu_main.h"
#include "device/device_cuda.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/ops_cuda.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define POISON 0xa5
#define PADS   8 /* elements after each row of y */

enum { INVALID_VALUE = 1, NOT_SUPPORTED = 801 }; /* of cudaError_t */

static sp_device *gpu;
static sp_cuda_kernels tables;
static sp_cuda_ops_kernels kernels;
static void *state;
static bool has_wide; /* whether the GPU runs SP_CUDA_GEMM_WIDE */
static int has_library;

typedef struct shape {
    int32_t rows, k, n[SP_CUDA_OUTPUTS_MAX]; /* an n of 0 ends the outputs */
} shape;

/* A group of GEMMs with host copies; y of every output in one buffer of `y_bytes`. */
typedef struct problem {
    shape of;
    bool f32, bias;
    int32_t n_outputs;
    uint16_t *x, *w[SP_CUDA_OUTPUTS_MAX], *b[SP_CUDA_OUTPUTS_MAX];
    sp_cuda_gemm gemm;
    size_t y_bytes[SP_CUDA_OUTPUTS_MAX];
} problem;

static uint32_t hash(uint32_t v)
{
    v = (v ^ 61u) ^ (v >> 16);
    v *= 9u;
    v ^= v >> 4;
    v *= 0x27d4eb2du;
    return v ^ (v >> 15);
}

/* About -1 .. 1, or an integer of -4 .. 4. */
static uint16_t number(uint32_t seed, bool whole)
{
    uint32_t h = hash(seed);

    return sp_f32_to_bf16(whole ? (float)(int)(h % 9u) - 4.0f
                                : (float)(h & 0xffffu) / 32768.0f - 1.0f);
}

static uint16_t *numbers(size_t n, uint32_t seed, bool whole)
{
    uint16_t *out = malloc(n * sizeof *out);

    assert_non_null(out);
    for (size_t i = 0; i < n; i++)
        out[i] = number(seed * 7919u + (uint32_t)i, whole);
    return out;
}

static void *put(const void *data, size_t bytes)
{
    void *memory = NULL;
    sp_error error;

    assert_ok(sp_device_alloc(gpu, bytes, &memory, &error), &error);
    assert_ok(sp_device_write(gpu, memory, data, bytes, &error), &error);
    return memory;
}

static size_t element_of(const problem *p)
{
    return p->f32 ? 4 : 2;
}

/* A weight's numbers do not depend on the rows, so problems of one seed share them. */
static problem *make_problem(const shape *of, bool f32, bool bias, bool whole, uint32_t seed)
{
    problem *p = calloc(1, sizeof *p);
    size_t k = (size_t)of->k, rows = (size_t)of->rows;

    assert_non_null(p);
    *p = (problem){.of = *of, .f32 = f32, .bias = bias};
    p->x = numbers(rows * (k + PADS), seed, whole);
    p->gemm = (sp_cuda_gemm){.rows = of->rows, .k = of->k, .x_stride = of->k + PADS};
    p->gemm.x = put(p->x, rows * (k + PADS) * 2);
    for (int32_t i = 0; i < SP_CUDA_OUTPUTS_MAX && of->n[i] > 0; i++) {
        size_t n = (size_t)of->n[i];
        sp_cuda_gemm_output *out = &p->gemm.outputs[i];
        void *y = NULL;

        p->w[i] = numbers(n * k, seed + 1u + (uint32_t)i, whole);
        p->b[i] = numbers(n, seed + 11u + (uint32_t)i, whole);
        p->y_bytes[i] = rows * (n + PADS) * element_of(p);
        assert_ok(sp_device_alloc(gpu, p->y_bytes[i], &y, NULL), NULL);
        *out = (sp_cuda_gemm_output){.w = put(p->w[i], n * k * 2),
                                     .bias = bias ? put(p->b[i], n * 2) : NULL,
                                     .y = y,
                                     .y_stride = of->n[i] + PADS,
                                     .n = of->n[i],
                                     .y_is_f32 = f32};
        p->n_outputs = p->gemm.n_outputs = i + 1;
    }
    return p;
}

static void free_problem(problem *p)
{
    sp_device_free(gpu, (void *)(uintptr_t)p->gemm.x);
    free(p->x);
    for (int32_t i = 0; i < p->n_outputs; i++) {
        sp_device_free(gpu, (void *)(uintptr_t)p->gemm.outputs[i].w);
        sp_device_free(gpu, (void *)(uintptr_t)p->gemm.outputs[i].bias);
        sp_device_free(gpu, p->gemm.outputs[i].y);
        free(p->w[i]);
        free(p->b[i]);
    }
    free(p);
}

static void poison_outputs(problem *p)
{
    for (int32_t i = 0; i < p->n_outputs; i++) {
        char *poison = malloc(p->y_bytes[i]);

        assert_non_null(poison);
        memset(poison, POISON, p->y_bytes[i]);
        assert_ok(sp_device_write(gpu, p->gemm.outputs[i].y, poison, p->y_bytes[i], NULL), NULL);
        free(poison);
    }
}

static void enqueue(const sp_cuda_gemm *gemm)
{
    int code = kernels.base_gemm(sp_device_cuda_index(gpu), state, gemm,
                                 sp_stream_native(sp_device_main_stream(gpu)));

    if (code != 0)
        fail_msg("rows %d, k %d, form %d: error %d", (int)gemm->rows, (int)gemm->k, (int)gemm->form,
                 code);
}

/* Output i of the first `rows` rows, the others poison yet; to be freed. */
static char *read_output(problem *p, int32_t i, int32_t rows)
{
    size_t row_bytes = (size_t)p->gemm.outputs[i].y_stride * element_of(p);
    char *y = malloc(p->y_bytes[i]);

    assert_non_null(y);
    assert_ok(sp_device_read(gpu, y, p->gemm.outputs[i].y, p->y_bytes[i], NULL), NULL);
    for (size_t at = 0; at < p->y_bytes[i]; at++)
        if ((at / row_bytes >= (size_t)rows ||
             at % row_bytes >= (size_t)p->of.n[i] * element_of(p)) &&
            (unsigned char)y[at] != POISON)
            fail_msg("rows %d, k %d, output %d: byte %zu of row %zu was written", (int)rows,
                     (int)p->of.k, (int)i, at % row_bytes, at / row_bytes);
    return y;
}

static double output_at(const problem *p, const char *y, int32_t i, int32_t row, int32_t n)
{
    int64_t at = row * p->gemm.outputs[i].y_stride + n;
    float wide;
    uint16_t narrow;

    if (p->f32) {
        memcpy(&wide, y + at * 4, 4);
        return (double)wide;
    }
    memcpy(&narrow, y + at * 2, 2);
    return (double)sp_bf16_to_f32(narrow);
}

/* The sum in double, and that of the products' sizes. */
static double exact(const problem *p, int32_t i, int32_t row, int32_t n, double *out_size)
{
    const uint16_t *x = p->x + (size_t)row * (size_t)(p->of.k + PADS);
    const uint16_t *w = p->w[i] + (size_t)n * (size_t)p->of.k;
    double sum = 0.0, bias = p->bias ? (double)sp_bf16_to_f32(p->b[i][n]) : 0.0;

    *out_size = fabs(bias);
    for (int32_t k = 0; k < p->of.k; k++) {
        double part = (double)sp_bf16_to_f32(x[k]) * (double)sp_bf16_to_f32(w[k]);

        sum += part;
        *out_size += fabs(part);
    }
    return sum + bias;
}

/* `step`: of the outputs that are compared. */
static void check_output(problem *p, int32_t i, const char *y, int32_t step, bool whole)
{
    /* One last bit for each mma of the chain, and 16 for what one loses inside. */
    double loss = (p->of.k / 16 + 16) * 0x1p-23;
    int64_t outputs = (int64_t)p->of.rows * p->of.n[i];

    for (int64_t at = 0; at < outputs; at += step) {
        int32_t row = (int32_t)(at / p->of.n[i]), n = (int32_t)(at % p->of.n[i]);
        double size, want = exact(p, i, row, n, &size), got = output_at(p, y, i, row, n);
        double near = whole ? 0.0 : loss * size + (p->f32 ? 0.0 : fabs(want) * 0x1p-8);

        if (whole && !p->f32)
            want = (double)sp_bf16_to_f32(sp_f32_to_bf16((float)want));
        if (!(fabs(got - want) <= near))
            fail_msg("rows %d, k %d, output %d of %d columns, form %d: [%d, %d] is %.9g, not %.9g",
                     (int)p->of.rows, (int)p->of.k, (int)i, (int)p->of.n[i], (int)p->gemm.form,
                     (int)row, (int)n, got, want);
    }
}

static void check_problem(problem *p, int32_t form, int32_t step, bool whole)
{
    p->gemm.form = form;
    poison_outputs(p);
    enqueue(&p->gemm);
    for (int32_t i = 0; i < p->n_outputs; i++) {
        char *y = read_output(p, i, p->of.rows);

        check_output(p, i, y, step, whole);
        free(y);
    }
}

static bool runs(int32_t rows, int32_t form)
{
    if (form == SP_CUDA_GEMM_FEW)
        return rows <= SP_CUDA_GEMM_FEW_ROWS;
    return form < SP_CUDA_GEMM_WIDE || has_wide;
}

static void check_forms(const shape *of, bool f32, bool bias, int32_t step, bool whole)
{
    problem *p = make_problem(of, f32, bias, whole, 3u);

    for (int32_t form = SP_CUDA_GEMM_CHOSEN; form < SP_CUDA_GEMM_FORMS; form++)
        if (runs(of->rows, form))
            check_problem(p, form, step, whole);
    free_problem(p);
}

/* ---- against the reference ----------------------------------------------------------------- */

static const shape small[] = {
    {1, 8, {1}},        {1, 16, {16}},        {3, 24, {5, 17}},       {2, 64, {48, 16, 16}},
    {5, 64, {48}},      {8, 120, {33, 1, 2}}, {9, 128, {16, 15}},     {16, 136, {100}},
    {17, 256, {31, 7}}, {33, 264, {65}},      {64, 72, {129, 3, 64}}, {65, 64, {40, 24}},
    {130, 200, {131}},  {257, 88, {70, 9}},
};

static void a_small_gemm_is_exact(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < sizeof small / sizeof small[0]; i++)
        for (int bits = 0; bits < 4; bits++)
            check_forms(&small[i], bits & 1, bits & 2, 1, true);
}

static void larger_gemms_are_exact(void **unused)
{
    static const shape larger[] = {
        {1, 1024, {2048, 1024, 1024}}, {7, 4096, {4099}},          {13, 3072, {1024}},
        {40, 1536, {8960, 300}},       {64, 2048, {6144, 6144}},   {200, 1032, {1000, 500}},
        {700, 2048, {1536}},           {2048, 512, {640, 64, 64}}, {1, 12288, {4000}},
    };

    (void)unused;
    for (size_t i = 0; i < sizeof larger / sizeof larger[0]; i++)
        check_forms(&larger[i], i % 2, i % 3 == 0, larger[i].rows > 60 ? 37 : 3, true);
}

static void random_numbers_are_near_their_sums(void **unused)
{
    static const shape some[] = {{1, 4096, {512, 64}}, {19, 3072, {200}}, {300, 1024, {260, 36}}};

    (void)unused;
    for (size_t i = 0; i < sizeof some / sizeof some[0]; i++)
        for (int bits = 0; bits < 4; bits++)
            check_forms(&some[i], bits & 1, bits & 2, 1, false);
}

/* ---- one row, one answer ------------------------------------------------------------------- */

/* The same x, weights and outputs for the first `rows` rows alone. */
static void expect_rows(problem *p, char **want, int32_t rows, int32_t form)
{
    sp_cuda_gemm gemm = p->gemm;

    gemm.rows = rows;
    gemm.form = form;
    poison_outputs(p);
    enqueue(&gemm);
    for (int32_t i = 0; i < p->n_outputs; i++) {
        char *y = read_output(p, i, rows);
        size_t bytes = (size_t)rows * (size_t)gemm.outputs[i].y_stride * element_of(p), at = 0;

        while (at < bytes && y[at] == want[i][at])
            at++;
        if (at < bytes)
            fail_msg("k %d, output %d: %d rows in form %d differ first at byte %zu of %zu",
                     (int)gemm.k, (int)i, (int)rows, (int)form, at, bytes);
        free(y);
    }
}

static void check_row_counts(const shape *of, bool f32, bool bias, int32_t every)
{
    problem *p = make_problem(of, f32, bias, false, 5u);
    char *want[SP_CUDA_OUTPUTS_MAX];

    p->gemm.form = SP_CUDA_GEMM_TILES;
    poison_outputs(p);
    enqueue(&p->gemm);
    for (int32_t i = 0; i < p->n_outputs; i++)
        want[i] = read_output(p, i, of->rows);
    for (int32_t rows = 1; rows <= of->rows; rows += rows < 130 ? every : 447)
        for (int32_t form = SP_CUDA_GEMM_CHOSEN; form < SP_CUDA_GEMM_FORMS; form++)
            if (runs(rows, form))
                expect_rows(p, want, rows, form);
    for (int32_t i = 0; i < p->n_outputs; i++)
        free(want[i]);
    free_problem(p);
}

static void a_row_has_one_answer_in_any_number_of_rows(void **unused)
{
    static const shape all = {2048, 1024, {256, 128, 72}}, odd = {512, 3000, {130}};

    (void)unused;
    check_row_counts(&all, false, true, 3);
    check_row_counts(&odd, true, false, 16);
}

/* The weights of Qwen3-8B, 1.7B and 0.6B. */
static void real_shapes_have_one_answer(void **unused)
{
    static const shape real[] = {
        {129, 4096, {4096, 1024, 1024}},
        {129, 4096, {4096}},
        {129, 4096, {12288, 12288}},
        {129, 12288, {4096}},
        {129, 2048, {2048, 1024, 1024}},
        {129, 2048, {6144, 6144}},
        {129, 6144, {2048}},
        {129, 1024, {2048, 1024, 1024}},
        {129, 1024, {3072, 3072}},
        {129, 3072, {1024}},
        {129, 2048, {1024}},
    };

    (void)unused;
    for (size_t i = 0; i < sizeof real / sizeof real[0]; i++)
        check_row_counts(&real[i], i % 2 == 0, false, 31);
}

/* ---- cuBLASLt ------------------------------------------------------------------------------ */

static sp_cuda_gemm_report learn(const problem *p, int32_t rows_max)
{
    sp_cuda_gemm_report report = {-1, -1, -1};
    int code =
        kernels.base_gemm_learn(sp_device_cuda_index(gpu), state, &p->gemm, rows_max, &report);

    if (code != 0)
        fail_msg("k %d: learning failed with error %d", (int)p->of.k, code);
    return report;
}

static void learning_counts_classes_of_rows(void **unused)
{
    static const shape of = {2, 64, {48}};
    problem *p = make_problem(&of, false, false, true, 15u);

    (void)unused;
    assert_int_equal(learn(p, 1).n_classes, has_library ? 1 : 0);
    assert_int_equal(learn(p, 64).n_classes, has_library ? 7 : 0);
    assert_int_equal(learn(p, 65).n_classes, has_library ? 8 : 0);
    assert_int_equal(learn(p, 1000).n_classes, has_library ? 11 : 0);
    free_problem(p);
}

/* What it is used for has the bytes of our kernels, for any rows. */
static void what_is_learnt_changes_no_bit(void **unused)
{
    static const shape some[] = {{1100, 1024, {2048, 1024, 1024}},
                                 {1100, 3072, {1024}},
                                 {1100, 4096, {4096, 1024}},
                                 {600, 2048, {1032, 72}},
                                 {300, 12288, {4096}}};

    (void)unused;
    if (!has_library)
        skip();
    for (size_t i = 0; i < sizeof some / sizeof some[0]; i++) {
        problem *p = make_problem(&some[i], i % 2 == 1, false, false, 5u);
        sp_cuda_gemm_report report = learn(p, some[i].rows);

        printf("k %d, n %d: cuBLASLt for %d of %d classes, %d algorithms differ\n", (int)some[i].k,
               (int)some[i].n[0], (int)report.n_library, (int)report.n_classes,
               (int)report.n_differ);
        free_problem(p);
        check_row_counts(&some[i], i % 2 == 1, false, 43);
    }
}

/* With any algorithm the sums are right yet; its own state, as the bits may be others. */
static void free_algorithms_are_near_the_sums(void **unused)
{
    static const shape of = {40, 4096, {512, 256}};
    problem *p = make_problem(&of, true, false, false, 17u);
    void *bound = state;
    int index = sp_device_cuda_index(gpu), found;

    (void)unused;
    assert_int_equal(kernels.base_gemm_open(index, &state), 0);
    assert_int_equal(kernels.base_gemm_library(index, state, NULL, &found), 0);
    assert_int_equal(kernels.base_gemm_free(index, state), 0);
    (void)learn(p, of.rows);
    check_problem(p, SP_CUDA_GEMM_CHOSEN, 1, false);
    assert_int_equal(kernels.base_gemm_close(index, state), 0);
    state = bound;
    free_problem(p);
}

/* ---- replaced rows of the head ------------------------------------------------------------- */

enum { REPLACED = 45 };

/* What a head launch reads, in device memory. */
typedef struct replaced_rows {
    void *tiles, *rows, *ids, *rows_table, *ids_table, *n;
    int32_t n_rows;
} replaced_rows;

/* Every third row of the weight, as slot 0's own; all rows of x, out of order, in tiles of it. */
static replaced_rows replace_rows(const problem *p)
{
    size_t k = (size_t)p->of.k;
    int32_t ids[REPLACED], n = REPLACED, rows = p->of.rows, tiles = (rows + 7) / 8;
    uint16_t *own = malloc(REPLACED * k * 2);
    sp_cuda_tile *tile = calloc((size_t)tiles, sizeof *tile);
    replaced_rows r = {.n_rows = rows};

    assert_true(own != NULL && tile != NULL);
    for (int32_t i = 0; i < REPLACED; i++) {
        ids[i] = (REPLACED - 1 - i) * 3;
        memcpy(own + (size_t)i * k, p->w[0] + (size_t)ids[i] * k, k * 2);
    }
    for (int32_t i = 0; i < rows; i++) {
        sp_cuda_tile *of = &tile[i / 8];

        of->row[of->count] = rows - 1 - i;
        of->scale[of->count++] = 1.0f;
    }
    r.tiles = put(tile, (size_t)tiles * sizeof *tile);
    r.rows = put(own, REPLACED * k * 2);
    r.ids = put(ids, sizeof ids);
    r.rows_table = put(&r.rows, sizeof r.rows);
    r.ids_table = put(&r.ids, sizeof r.ids);
    r.n = put(&n, sizeof n);
    free(own);
    free(tile);
    return r;
}

static void free_rows(replaced_rows *r)
{
    void *all[] = {r->tiles, r->rows, r->ids, r->rows_table, r->ids_table, r->n};

    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        sp_device_free(gpu, all[i]);
}

static void enqueue_head(const problem *p, const replaced_rows *r)
{
    sp_cuda_head call = {.type = SP_DTYPE_BF16,
                         .n_rows = r->n_rows,
                         .n_slots = 1,
                         .vocab = p->of.n[0],
                         .hidden = p->of.k,
                         .x = p->gemm.x,
                         .x_stride = p->gemm.x_stride,
                         .tiles = r->tiles,
                         .rows = r->rows_table,
                         .ids = r->ids_table,
                         .n = r->n,
                         .logits = p->gemm.outputs[0].y,
                         .logits_stride = p->gemm.outputs[0].y_stride,
                         .logits_is_f32 = p->f32};

    assert_int_equal(tables.head_rows(sp_device_cuda_index(gpu), &call,
                                      sp_stream_native(sp_device_main_stream(gpu))),
                     0);
}

/* Whether column n of an output was replaced. */
static bool is_replaced(int32_t n)
{
    return n % 3 == 0 && n < REPLACED * 3;
}

/* The head over poison writes the replaced columns alone, with the bytes of the GEMM. */
static void check_replaced(const shape *of, bool f32)
{
    problem *p = make_problem(of, f32, false, false, 13u);
    replaced_rows r = replace_rows(p);
    size_t element = element_of(p), stride = (size_t)p->gemm.outputs[0].y_stride * element;
    char *want, *got;

    poison_outputs(p);
    enqueue(&p->gemm);
    want = read_output(p, 0, of->rows);
    poison_outputs(p);
    enqueue_head(p, &r);
    got = read_output(p, 0, of->rows);
    for (int32_t row = 0; row < of->rows; row++)
        for (int32_t n = 0; n < of->n[0]; n++) {
            size_t at = (size_t)row * stride + (size_t)n * element;

            if (!is_replaced(n))
                memset(want + at, POISON, element);
            if (memcmp(got + at, want + at, element) != 0)
                fail_msg("%d rows, k %d: logit [%d, %d] differs", (int)of->rows, (int)of->k,
                         (int)row, (int)n);
        }
    free(want);
    free(got);
    free_rows(&r);
    free_problem(p);
}

static void a_small_replaced_row_has_the_bits_of_the_served_one(void **unused)
{
    static const shape of[] = {{1, 64, {140}}, {11, 1032, {200}}, {8, 4096, {136}}};

    (void)unused;
    for (size_t i = 0; i < sizeof of / sizeof of[0]; i++) {
        check_replaced(&of[i], false);
        check_replaced(&of[i], true);
    }
}

/* ---- as a node of a graph ------------------------------------------------------------------ */

static void a_small_graph_reads_what_is_there(void **unused)
{
    static const shape of = {4, 64, {48, 16}};
    problem *p = make_problem(&of, false, false, true, 7u);
    sp_stream *stream = sp_device_main_stream(gpu);
    sp_graph *graph = NULL;
    size_t bytes = (size_t)of.rows * (size_t)(of.k + PADS) * 2;

    (void)unused;
    poison_outputs(p);
    assert_ok(sp_graph_begin(stream, NULL), NULL);
    enqueue(&p->gemm);
    enqueue(&p->gemm);
    assert_ok(sp_graph_end(stream, &graph, NULL), NULL);
    for (int again = 0; again < 3; again++) {
        free(p->x);
        p->x = numbers(bytes / 2, 90u + (uint32_t)again, true);
        assert_ok(sp_device_write(gpu, (void *)(uintptr_t)p->gemm.x, p->x, bytes, NULL), NULL);
        assert_ok(sp_graph_launch(graph, stream, NULL), NULL);
        for (int32_t i = 0; i < p->n_outputs; i++) {
            char *y = read_output(p, i, of.rows);

            check_output(p, i, y, 1, true);
            free(y);
        }
    }
    sp_graph_destroy(graph);
    free_problem(p);
}

static void what_no_kernel_takes_is_refused(void **unused)
{
    static const shape of = {65, 64, {16}};
    problem *p = make_problem(&of, false, false, true, 9u);
    int index = sp_device_cuda_index(gpu);
    sp_cuda_gemm gemm;

    (void)unused;
    poison_outputs(p);
    gemm = p->gemm;
    gemm.form = SP_CUDA_GEMM_FEW;
    assert_int_equal(kernels.base_gemm(index, state, &gemm, NULL), INVALID_VALUE);
    gemm.form = SP_CUDA_GEMM_FORMS;
    assert_int_equal(kernels.base_gemm(index, state, &gemm, NULL), INVALID_VALUE);
    gemm = p->gemm;
    gemm.k = 60;
    assert_int_equal(kernels.base_gemm(index, state, &gemm, NULL), INVALID_VALUE);
    gemm = p->gemm;
    gemm.x_stride = 71;
    assert_int_equal(kernels.base_gemm(index, state, &gemm, NULL), INVALID_VALUE);
    gemm = p->gemm;
    gemm.x = (const char *)gemm.x + 8;
    assert_int_equal(kernels.base_gemm(index, state, &gemm, NULL), INVALID_VALUE);
    gemm = p->gemm;
    gemm.outputs[0].w = (const char *)gemm.outputs[0].w + 2;
    assert_int_equal(kernels.base_gemm(index, state, &gemm, NULL), INVALID_VALUE);
    gemm = p->gemm;
    gemm.rows = 0;
    assert_int_equal(kernels.base_gemm(index, state, &gemm, NULL), 0);
    free(read_output(p, 0, 0));
    free_problem(p);
}

static void find_wide(void)
{
    static const shape of = {1, 8, {8}};
    problem *p = make_problem(&of, false, false, true, 1u);
    int code;

    p->gemm.form = SP_CUDA_GEMM_WIDE;
    code = kernels.base_gemm(sp_device_cuda_index(gpu), state, &p->gemm, NULL);
    assert_true(code == 0 || code == NOT_SUPPORTED);
    has_wide = code == 0;
    printf("wgmma: %s, cuBLASLt: %s\n", has_wide ? "yes" : "no", has_library ? "yes" : "no");
    free_problem(p);
}

static int begin(void **unused)
{
    sp_error error;

    (void)unused;
    assert_ok(sp_kernels_cuda_get(gpu, &tables, &error), &error);
    assert_ok(sp_ops_cuda_get(gpu, &kernels, &error), &error);
    assert_int_equal(kernels.base_gemm_open(sp_device_cuda_index(gpu), &state), 0);
    assert_int_equal(kernels.base_gemm_library(sp_device_cuda_index(gpu), state,
                                               "/nowhere/libcublasLt.so", &has_library),
                     0);
    assert_false(has_library);
    assert_int_equal(
        kernels.base_gemm_library(sp_device_cuda_index(gpu), state, NULL, &has_library), 0);
    find_wide();
    return 0;
}

static int end(void **unused)
{
    (void)unused;
    return kernels.base_gemm_close(sp_device_cuda_index(gpu), state);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_small_gemm_is_exact),
        cmocka_unit_test(a_small_graph_reads_what_is_there),
        cmocka_unit_test(a_small_replaced_row_has_the_bits_of_the_served_one),
        cmocka_unit_test(what_no_kernel_takes_is_refused),
        cmocka_unit_test(larger_gemms_are_exact),
        cmocka_unit_test(random_numbers_are_near_their_sums),
        cmocka_unit_test(a_row_has_one_answer_in_any_number_of_rows),
        cmocka_unit_test(real_shapes_have_one_answer),
        cmocka_unit_test(learning_counts_classes_of_rows),
        cmocka_unit_test(what_is_learnt_changes_no_bit),
        cmocka_unit_test(free_algorithms_are_near_the_sums),
    };

    return gpu_main(&gpu, tests, sizeof tests / sizeof tests[0], begin, end, argc, argv);
}
