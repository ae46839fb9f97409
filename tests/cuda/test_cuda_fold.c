/*
 * test_cuda_fold.c: a product of the base that folds deltas in has the bytes of the product, the
 * shrink and the expand one after the other, whatever rows, slots, ranks and shapes; a row has the
 * same bytes whatever is beside it; and they are right by a reference in double. Skipped where
 * there is no GPU, or one without the kernels.
 */
#include "cuda/gpu_main.h"
#include "cuda/rig.h"
#include "kernels/cuda/ops_cuda.h"

#include <math.h>
#include <stdbool.h>

enum { SLOTS_MAX = 64, OUTPUTS_MAX = SP_CUDA_OUTPUTS_MAX };

static sp_device *gpu;
static sp_cuda_ops_kernels kernels;
static void *state;
static bool has_folds; /* the GPU runs products that fold */

/* How rows are spread over the slots: all in one, long runs of each, runs of odd lengths with rows
 * of the base between them, any slot in any row. */
typedef enum spread { ONE_SLOT, RUNS, RAGGED, MIXED, N_SPREADS } spread;

typedef struct fold_case {
    int32_t rows, slots, k, n, rank_stride, sites;
    spread spread;
    bool other;    /* an output more, without a delta but with a bias, before the others */
    int32_t first; /* of the rows, whose x and slots follow from their numbers */
} fold_case;

typedef struct world {
    fold_case of;
    rig rig;
    sp_cuda_gemm gemm;
    uint16_t *w[OUTPUTS_MAX], *bias; /* host copies */
    size_t y_bytes;                  /* of an output */
    char *poison;
} world;

static const int32_t some_ranks[] = {16, 8, 12, 0, 1, 64, 32, 4, 40, 24};

static int32_t slot_of(const fold_case *c, int32_t row)
{
    int32_t length = c->rows / c->slots + 1;

    if (c->spread == ONE_SLOT)
        return c->slots - 1;
    if (c->spread == RUNS)
        return row / length % c->slots;
    if (c->spread == RAGGED)
        return row % 101 < 13 ? -1 : row / 37 % c->slots;
    return (int32_t)(rig_hash((uint32_t)row * 31u + 7u) % (uint32_t)(c->slots + 1)) - 1;
}

/* Full ranks, or of every kind where rows are ragged or mixed. */
static int32_t rank_of(const fold_case *c, int32_t slot)
{
    int32_t rank = some_ranks[slot % 10];

    if (c->spread < RAGGED || rank > c->rank_stride)
        return c->rank_stride;
    return rank;
}

static uint16_t *random_numbers(const rig *r, size_t n, uint32_t seed)
{
    uint16_t *data = malloc(n * sizeof *data);

    assert_non_null(data);
    for (size_t i = 0; i < n; i++)
        data[i] = rig_number(r, seed + (uint32_t)i * 11u, 0.05f);
    return data;
}

static void add_output(world *w, void *y)
{
    const fold_case *c = &w->of;
    int32_t i = w->gemm.n_outputs++;
    size_t n = (size_t)c->n;

    w->w[i] = random_numbers(&w->rig, n * (size_t)c->k, 1000u * (uint32_t)i);
    w->gemm.outputs[i] = (sp_cuda_gemm_output){
        .w = rig_put(&w->rig, w->w[i], n * (size_t)c->k * 2),
        .bias = c->other && i == 0 ? rig_put(&w->rig, w->bias, n * 2) : NULL,
        .y = y,
        .y_stride = c->n,
        .n = c->n,
    };
}

static void make_world(world *w, const fold_case *c)
{
    const rig_shape shape = {c->rows,        c->slots, c->k, c->n,
                             c->rank_stride, c->sites, 0,    SP_DTYPE_BF16};
    int32_t *seq_slot = malloc((size_t)c->rows * sizeof *seq_slot), ranks[SLOTS_MAX];
    uint32_t *seeds = malloc((size_t)c->rows * sizeof *seeds);

    *w = (world){.of = *c, .y_bytes = (size_t)c->rows * (size_t)c->n * 2};
    assert_non_null(seq_slot);
    assert_non_null(seeds);
    assert_int_equal(rig_start(&w->rig, gpu, NULL), SP_OK);
    for (int32_t i = 0; i < c->rows; i++) {
        seq_slot[i] = slot_of(c, c->first + i);
        seeds[i] = (uint32_t)(c->first + i);
    }
    for (int32_t s = 0; s < c->slots; s++)
        ranks[s] = rank_of(c, s);
    rig_make(&w->rig, &shape, seq_slot, ranks, seeds);
    free(seq_slot);
    free(seeds);
    w->gemm = (sp_cuda_gemm){
        .rows = c->rows, .k = c->k, .x = w->rig.group.x, .x_stride = w->rig.group.x_stride};
    w->poison = malloc(w->y_bytes);
    assert_non_null(w->poison);
    memset(w->poison, 0xa5, w->y_bytes);
    w->bias = random_numbers(&w->rig, (size_t)c->n, 77u);
    if (c->other)
        add_output(w, rig_put(&w->rig, w->poison, w->y_bytes));
    for (int32_t i = 0; i < c->sites; i++)
        add_output(w, w->rig.group.sites[i].y);
    assert_false(w->rig.failed);
    w->rig.group.after_plan = 1;
    w->rig.failed |=
        w->rig.kernels.plan_rows(w->rig.gpu, &w->rig.group.plan, c->rows, c->slots, w->rig.stream);
}

static void free_world(world *w)
{
    for (int32_t i = 0; i < w->gemm.n_outputs; i++)
        free(w->w[i]);
    free(w->bias);
    free(w->poison);
    rig_free(&w->rig);
}

static void poison_outputs(world *w)
{
    for (int32_t i = 0; i < w->gemm.n_outputs; i++)
        assert_int_equal(sp_device_write(gpu, w->gemm.outputs[i].y, w->poison, w->y_bytes, NULL),
                         SP_OK);
}

/* All outputs, one after the other; to be freed. */
static char *read_outputs(const world *w)
{
    char *all = malloc((size_t)w->gemm.n_outputs * w->y_bytes);

    assert_non_null(all);
    assert_int_equal(sp_stream_wait(sp_device_main_stream(gpu), NULL), SP_OK);
    for (int32_t i = 0; i < w->gemm.n_outputs; i++)
        assert_int_equal(sp_device_read(gpu, all + (size_t)i * w->y_bytes, w->gemm.outputs[i].y,
                                        w->y_bytes, NULL),
                         SP_OK);
    return all;
}

static void run_apart(world *w)
{
    rig *r = &w->rig;

    r->group.folds = 0;
    r->failed |= kernels.base_gemm(r->gpu, state, &w->gemm, r->stream);
    r->failed |= r->kernels.shrink(r->gpu, &r->group, r->stream);
    r->failed |= r->kernels.expand(r->gpu, &r->group, r->stream);
    assert_false(r->failed);
}

static void run_folded(world *w, int32_t form)
{
    rig *r = &w->rig;
    sp_cuda_gemm gemm = w->gemm;

    gemm.deltas = &r->group;
    gemm.form = form;
    r->group.folds = 1;
    r->failed |= r->kernels.shrink(r->gpu, &r->group, r->stream);
    r->failed |= kernels.base_gemm(r->gpu, state, &gemm, r->stream);
    assert_false(r->failed);
}

static void expect_same(const world *w, int32_t form, const char *got, const char *want)
{
    const fold_case *c = &w->of;
    size_t bytes = (size_t)w->gemm.n_outputs * w->y_bytes, at = 0;
    uint16_t is, was;

    while (at < bytes && got[at] == want[at])
        at++;
    if (at == bytes)
        return;
    at -= at % 2;
    memcpy(&is, got + at, 2);
    memcpy(&was, want + at, 2);
    fail_msg("rows %d, slots %d, k %d, n %d, rank %d, sites %d, spread %d, other %d, form "
             "%d: output %zu, row %zu, column %zu is %g, not %g",
             (int)c->rows, (int)c->slots, (int)c->k, (int)c->n, (int)c->rank_stride, (int)c->sites,
             (int)c->spread, c->other, (int)form, at / w->y_bytes,
             at % w->y_bytes / ((size_t)c->n * 2), at % ((size_t)c->n * 2) / 2,
             (double)sp_bf16_to_f32(is), (double)sp_bf16_to_f32(was));
}

/* Chosen by the launcher, then each tile. */
static const int32_t forms[] = {SP_CUDA_GEMM_CHOSEN, SP_CUDA_GEMM_FORMS - 2,
                                SP_CUDA_GEMM_FORMS - 1};

enum { N_FORMS = sizeof forms / sizeof forms[0] };

static void check_case(const fold_case *c)
{
    world w;
    char *want, *got;

    make_world(&w, c);
    poison_outputs(&w);
    run_apart(&w);
    want = read_outputs(&w);
    for (int32_t i = 0; i < N_FORMS; i++) {
        poison_outputs(&w);
        run_folded(&w, forms[i]);
        got = read_outputs(&w);
        expect_same(&w, forms[i], got, want);
        free(got);
    }
    free(want);
    free_world(&w);
}

/* ---- the same bytes ------------------------------------------------------------------------ */

static void a_small_fold_has_the_bytes_of_three_launches(void **unused)
{
    static const int32_t rows[] = {257, 263, 384};

    (void)unused;
    if (!has_folds)
        skip();
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        for (int s = 0; s < N_SPREADS; s++)
            check_case(
                &(fold_case){rows[i], s == ONE_SLOT ? 1 : 5, 136, 72, 16, 2, (spread)s, i == 2, 0});
}

static void rows_slots_and_ranks_do_not_matter(void **unused)
{
    static const int32_t ranks[] = {8, 16, 24, 32, 40, 64}, slots[] = {1, 2, 5, 64};
    static const int32_t rows[] = {257, 509, 1021};

    (void)unused;
    if (!has_folds)
        skip();
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        for (size_t r = 0; r < sizeof ranks / sizeof ranks[0]; r++)
            for (size_t s = 0; s < sizeof slots / sizeof slots[0]; s++)
                check_case(&(fold_case){rows[i], slots[s], 520, 328, ranks[r], 1 + (int32_t)s % 3,
                                        (spread)((r + s + i) % N_SPREADS), r == 1, 0});
}

static void real_shapes_fold(void **unused)
{
    static const fold_case real[] = {
        {2048, 1, 4096, 1024, 16, 3, ONE_SLOT, false, 0},
        {2099, 4, 1024, 4096, 16, 1, RUNS, false, 0},
        {1030, 5, 4096, 1000, 64, 2, RAGGED, false, 0},
        {700, 8, 2048, 1536, 32, 2, RUNS, false, 0},
        {513, 16, 1024, 1032, 16, 2, MIXED, true, 0},
        {512, 2, 9728, 1024, 16, 1, RUNS, false, 0},
    };

    (void)unused;
    if (!has_folds)
        skip();
    for (size_t i = 0; i < sizeof real / sizeof real[0]; i++)
        check_case(&real[i]);
}

/* The last rows of a step, alone with fewer others: other tiles, windows and places. */
static void a_row_has_the_same_bytes_beside_others(void **unused)
{
    static const fold_case large = {1400, 5, 1024, 520, 16, 1, RAGGED, false, 0};
    static const int32_t firsts[] = {1, 77, 640, 1100};
    size_t row_bytes = (size_t)large.n * 2;
    world w, few;
    char *all, *some;

    (void)unused;
    if (!has_folds)
        skip();
    make_world(&w, &large);
    run_folded(&w, SP_CUDA_GEMM_CHOSEN);
    all = read_outputs(&w);
    for (size_t i = 0; i < sizeof firsts / sizeof firsts[0]; i++) {
        fold_case c = large;

        c.first = firsts[i];
        c.rows = large.rows - c.first;
        make_world(&few, &c);
        run_folded(&few, forms[i % N_FORMS]);
        some = read_outputs(&few);
        assert_memory_equal(some, all + (size_t)c.first * row_bytes, (size_t)c.rows * row_bytes);
        free(some);
        free_world(&few);
    }
    free(all);
    free_world(&w);
}

/* A ring of bulk copies: many runs, so that a race has its chance. */
static void many_runs_have_the_same_bytes(void **unused)
{
    static const fold_case large = {2048, 5, 512, 4096, 32, 2, RAGGED, false, 0};
    world w;
    char *want, *got;

    (void)unused;
    if (!has_folds)
        skip();
    make_world(&w, &large);
    run_apart(&w);
    want = read_outputs(&w);
    for (int32_t i = 0; i < 50; i++) {
        poison_outputs(&w);
        for (int n = 0; n < 20; n++)
            run_folded(&w, forms[i % N_FORMS]);
        if (i % 5 != 0)
            continue;
        got = read_outputs(&w);
        expect_same(&w, forms[i % N_FORMS], got, want);
        free(got);
    }
    free(want);
    free_world(&w);
}

/* ---- the right bytes ----------------------------------------------------------------------- */

static float round_bf16(double value)
{
    return sp_bf16_to_f32(sp_f32_to_bf16((float)value));
}

static double reference(const world *w, int32_t output, int32_t row, int32_t column)
{
    const rig *r = &w->rig;
    size_t k = (size_t)w->of.k, n = (size_t)w->of.n, rs = (size_t)w->of.rank_stride;
    const uint16_t *x = r->x + (size_t)row * k, *weight = w->w[output] + (size_t)column * k;
    int32_t slot = r->seq_slot[row];
    bool other = w->of.other && output == 0;
    double base = other ? rig_value(r, w->bias[column]) : 0.0, delta = 0.0;

    for (size_t i = 0; i < k; i++)
        base += rig_value(r, x[i]) * rig_value(r, weight[i]);
    if (slot < 0 || other)
        return base;
    for (size_t c = 0; c < (size_t)r->ranks[slot]; c++) {
        double xa = 0.0;

        for (size_t i = 0; i < k; i++)
            xa += rig_value(r, x[i]) * rig_value(r, r->a[((size_t)slot * rs + c) * k + i]);
        delta += (double)round_bf16(xa) *
                 rig_value(r, r->b[((size_t)slot * n + (size_t)column) * rs + c]);
    }
    return round_bf16(base) +
           (double)r->scales[slot] * (double)r->row_scale[row] * (double)round_bf16(delta);
}

/* Roundings of base, xa, delta and y, 2^-9 each, of numbers that may be larger than y. */
static void outputs_are_those_of_a_reference(void **unused)
{
    static const fold_case c = {300, 5, 712, 136, 64, 2, RAGGED, true, 0};
    world w;
    char *got;

    (void)unused;
    if (!has_folds)
        skip();
    make_world(&w, &c);
    poison_outputs(&w);
    run_folded(&w, SP_CUDA_GEMM_CHOSEN);
    got = read_outputs(&w);
    for (int32_t i = 0; i < 3000; i++) {
        int32_t output = i % 3, row = (int32_t)(rig_hash((uint32_t)i) % (uint32_t)c.rows);
        int32_t column = (int32_t)(rig_hash((uint32_t)i + 99u) % (uint32_t)c.n);
        size_t at = (size_t)output * w.y_bytes + ((size_t)row * (size_t)c.n + (size_t)column) * 2;
        double want = reference(&w, output, row, column), is;
        uint16_t bits;

        memcpy(&bits, got + at, 2);
        is = (double)sp_bf16_to_f32(bits);
        if (!(fabs(is - want) <= 0.02 + fabs(want) / 64.0))
            fail_msg("output %d, row %d, column %d is %g, not %g", (int)output, (int)row,
                     (int)column, is, want);
    }
    free(got);
    free_world(&w);
}

/* ---- refusals ------------------------------------------------------------------------------ */

static void refuse(world *w)
{
    sp_cuda_gemm gemm = w->gemm;
    char *got;

    gemm.deltas = &w->rig.group;
    poison_outputs(w);
    assert_int_equal(kernels.base_gemm(w->rig.gpu, state, &gemm, w->rig.stream),
                     SP_CUDA_NOT_SUPPORTED);
    got = read_outputs(w);
    for (int32_t i = 0; i < gemm.n_outputs; i++)
        assert_memory_equal(got + (size_t)i * w->y_bytes, w->poison, w->y_bytes);
    free(got);
}

static void refuse_case(const fold_case *c)
{
    world w;

    make_world(&w, c);
    w.rig.group.folds = 1;
    refuse(&w);
    free_world(&w);
}

static void what_cannot_be_folded_is_refused(void **unused)
{
    static const fold_case fine = {300, 2, 64, 64, 16, 2, RUNS, false, 0};
    world w;

    (void)unused;
    refuse_case(&(fold_case){300, 2, 64, 64, 72, 1, RUNS, false, 0});
    refuse_case(&(fold_case){256, 2, 64, 64, 16, 1, RUNS, false, 0});
    make_world(&w, &fine);
    refuse(&w); /* the shrink has not been for it */
    if (has_folds)
        run_folded(&w, SP_CUDA_GEMM_CHOSEN);
    w.rig.group.folds = 1;
    w.rig.group.type = SP_DTYPE_F16;
    refuse(&w);
    w.rig.group.type = SP_DTYPE_BF16;
    w.rig.group.n_rows = 299;
    refuse(&w);
    w.rig.group.n_rows = 300;
    w.gemm.n_outputs = 1; /* the second site has no output */
    refuse(&w);
    w.gemm.n_outputs = 2;
    w.gemm.outputs[1].bias = w.gemm.outputs[1].w;
    refuse(&w);
    w.gemm.outputs[1].bias = NULL;
    w.rig.group.sites[1].y_is_f32 = 1;
    refuse(&w);
    free_world(&w);
}

/* ---- main ---------------------------------------------------------------------------------- */

/* Where the GPU has the product through wgmma it has the one that folds too. */
static bool has_wide_products(void)
{
    static const fold_case smallest = {257, 1, 64, 64, 8, 1, ONE_SLOT, false, 0};
    sp_cuda_gemm gemm;
    world w;
    int code;

    make_world(&w, &smallest);
    gemm = w.gemm;
    gemm.form = SP_CUDA_GEMM_WIDE;
    code = kernels.base_gemm(w.rig.gpu, state, &gemm, w.rig.stream);
    free_world(&w);
    return code != SP_CUDA_NOT_SUPPORTED;
}

static int begin(void **unused)
{
    sp_cuda_kernels prepared;

    (void)unused;
    if (sp_kernels_cuda_get(gpu, &prepared, NULL) != SP_OK ||
        sp_ops_cuda_get(gpu, &kernels, NULL) != SP_OK)
        return 1;
    if (kernels.base_gemm_open(sp_device_cuda_index(gpu), &state) != 0)
        return 1;
    has_folds = has_wide_products();
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
        cmocka_unit_test(a_small_fold_has_the_bytes_of_three_launches),
        cmocka_unit_test(rows_slots_and_ranks_do_not_matter),
        cmocka_unit_test(real_shapes_fold),
        cmocka_unit_test(a_row_has_the_same_bytes_beside_others),
        cmocka_unit_test(many_runs_have_the_same_bytes),
        cmocka_unit_test(outputs_are_those_of_a_reference),
        cmocka_unit_test(what_cannot_be_folded_is_refused),
    };

    return gpu_main(&gpu, tests, sizeof tests / sizeof tests[0], begin, end, argc, argv);
}
