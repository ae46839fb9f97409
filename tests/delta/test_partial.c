/*
 * Slices at work, on one machine: two pools hold the halves of two adapters, as two ranks would.
 * Halves of rows have the whole's bits; halves of columns have those of the documented sum, which
 * is computed here anew; and a host whose rows are permuted gets the whole's bits, permuted.
 */
#include "base/alloc.h"
#include "base/half.h"
#include "kernels/cpu/kernels.h"
#include "support/hand.h"

#include <sidepath/partial.h>

#include <math.h>
#include <string.h>

enum { K = 66, N = 53, RANK_MAX = 13, ROWS = 9, X_STRIDE = K + 3, Y_STRIDE = N + 2, R = 16 };
enum { LANES = 8, MANY = 123 }; /* MANY times ROWS rows are more than one round of scratch takes */

static const site_dims whole_site = {0, SP_MODULE_O_PROJ, K, N};

/* Adapter 0 has rank 13, adapter 1 rank 4 and adapter 2 nothing at the site. */
static const int32_t ranks[] = {RANK_MAX, 4, 0};
static const float scales[] = {0.75f, 2.0f, 1.0f};
static const int32_t row_slot[ROWS] = {0, 1, -1, 1, 2, 0, 0, -1, 1};
static const float row_scale[ROWS] = {1, 1, 1, 0.5f, 1, 2, 0, 1, 1};

typedef struct rank_rig {
    hand_pool pool;
    sp_delta *delta;
    sp_plan *plan;
} rank_rig;

typedef struct world {
    sp_dtype dtype;
    const char *level;
    sp_exec *exec;
    hand_adapter *adapters[3];
    float x[ROWS * X_STRIDE], y0[ROWS * Y_STRIDE]; /* room for either type */
} world;

/* ---- making it ----------------------------------------------------------------------------- */

static void make_world(world *w, sp_dtype dtype, const char *level)
{
    sp_test_random random = {29};

    *w = (world){.dtype = dtype, .level = level, .exec = hand_exec(2)};
    for (int32_t i = 0; i < 3; i++) {
        w->adapters[i] = hand_adapter_create((uint64_t)i + 1);
        if (ranks[i] > 0)
            hand_adapter_add(w->adapters[i], &whole_site, ranks[i], scales[i], dtype, &random);
    }
    for (int32_t i = 0; i < ROWS * X_STRIDE; i++)
        hand_store(dtype, w->x, i, i % X_STRIDE < K ? (double)sp_test_float(&random) : NAN);
    for (int32_t i = 0; i < ROWS * Y_STRIDE; i++)
        hand_store(dtype, w->y0, i, (double)sp_test_float(&random));
}

static void free_world(world *w)
{
    for (int32_t i = 0; i < 3; i++)
        hand_adapter_destroy(w->adapters[i]);
    sp_exec_destroy(w->exec);
}

static sp_site_slice slice_of(int32_t row_begin, int32_t row_end, int32_t col_begin,
                              int32_t col_end, const int32_t *row_map)
{
    return (sp_site_slice){.struct_bytes = sizeof(sp_site_slice),
                           .row_begin = row_begin,
                           .row_end = row_end,
                           .col_begin = col_begin,
                           .col_end = col_end,
                           .row_map = row_map};
}

/* A rank's pool with all adapters, its delta and its plan. slice NULL: the whole. */
static rank_rig make_rank(const world *w, const sp_site_slice *slice)
{
    rank_rig rig = {
        .pool = hand_pool_create_sliced(&whole_site, 1, R, w->dtype, 3, slice, slice != NULL)};
    sp_delta_options options;
    sp_error error;

    for (int32_t i = 0; i < 3; i++)
        assert_int_equal(hand_load_adapter(&rig.pool, w->adapters[i]).slot, i);
    sp_delta_options_default(&options, sizeof options);
    options.pool = rig.pool.pool;
    options.exec = w->exec;
    options.rows_max = MANY * ROWS;
    options.cpu_isa = w->level;
    options.x_f32 = true;
    assert_ok(sp_delta_create(&options, &rig.delta, &error), &error);
    assert_ok(sp_plan_create(MANY * ROWS, 3, &rig.plan, &error), &error);
    hand_plan_rows(rig.plan, rig.pool.pool, row_slot, row_scale, ROWS);
    return rig;
}

static void free_rank(rank_rig *rig)
{
    sp_plan_destroy(rig->plan);
    sp_delta_destroy(rig->delta);
    hand_pool_destroy(&rig->pool);
}

static const void *x_from(const world *w, int32_t column)
{
    return (const char *)w->x + (size_t)column * sp_dtype_bytes(w->dtype);
}

static void apply(const world *w, rank_rig *rig, void *y)
{
    const sp_delta_output output = {sizeof output, 0, y, Y_STRIDE, w->dtype};
    const sp_delta_call call = {.struct_bytes = sizeof call,
                                .plan = rig->plan,
                                .x = w->x,
                                .x_stride = X_STRIDE,
                                .x_type = w->dtype,
                                .outputs = &output,
                                .n_outputs = 1};
    sp_error error;

    assert_ok(sp_delta_apply(rig->delta, &call, &error), &error);
}

/* For every type and level. */
static void for_each(void (*check)(const world *w))
{
    static const sp_dtype types[] = {SP_DTYPE_F32, SP_DTYPE_BF16, SP_DTYPE_F16};

    for (size_t t = 0; t < 3; t++)
        for (const char *const *level = sp_kernels_levels(); *level != NULL; level++) {
            const sp_kernels *kernels;
            static world w;

            if (sp_kernels_get(*level, &kernels, NULL) != SP_OK)
                continue;
            make_world(&w, types[t], *level);
            check(&w);
            free_world(&w);
        }
}

static bool is_routed(int32_t row)
{
    return row_slot[row] >= 0 && row_scale[row] != 0.0f && ranks[row_slot[row]] > 0;
}

/* ---- rows of B ----------------------------------------------------------------------------- */

/* The part's column i is the whole's column map(i), in y0 and in y. */
static void check_rows(const world *w, const sp_site_slice *slice, const int32_t *map, int32_t n)
{
    rank_rig whole = make_rank(w, NULL), part = make_rank(w, slice);
    size_t element = sp_dtype_bytes(w->dtype);
    static float y[ROWS * Y_STRIDE], y_part[ROWS * Y_STRIDE];

    memcpy(y, w->y0, sizeof y);
    memset(y_part, 0x5a, sizeof y_part);
    for (int32_t row = 0; row < ROWS; row++)
        for (int32_t i = 0; i < n; i++)
            memcpy((char *)y_part + (size_t)(row * Y_STRIDE + i) * element,
                   (const char *)w->y0 + (size_t)(row * Y_STRIDE + map[i]) * element, element);
    apply(w, &whole, y);
    apply(w, &part, y_part);
    for (int32_t row = 0; row < ROWS; row++)
        for (int32_t i = 0; i < n; i++)
            assert_memory_equal((char *)y_part + (size_t)(row * Y_STRIDE + i) * element,
                                (char *)y + (size_t)(row * Y_STRIDE + map[i]) * element, element);
    assert_memory_not_equal(y, w->y0, sizeof y);
    free_rank(&part);
    free_rank(&whole);
}

static void check_halves_of_rows(const world *w)
{
    static const int32_t cuts[] = {26, 1, 48};
    int32_t map[N];

    for (size_t c = 0; c < 3; c++) {
        sp_site_slice left = slice_of(0, cuts[c], 0, 0, NULL);
        sp_site_slice right = slice_of(cuts[c], N, 0, 0, NULL);

        for (int32_t i = 0; i < N; i++)
            map[i] = i;
        check_rows(w, &left, map, cuts[c]);
        check_rows(w, &right, map + cuts[c], N - cuts[c]);
    }
}

static void halves_of_rows_have_the_bits_of_the_whole(void **state)
{
    (void)state;
    for_each(check_halves_of_rows);
}

static void check_permuted(const world *w)
{
    int32_t map[N];
    sp_site_slice all, some;

    for (int32_t i = 0; i < N; i++)
        map[i] = i * 7 % N; /* 53 is prime */
    all = slice_of(0, 0, 0, 0, map);
    check_rows(w, &all, map, N);
    some = slice_of(20, 41, 0, 0, map + 20);
    check_rows(w, &some, map + 20, 21);
}

static void a_host_with_permuted_rows_gets_the_whole_permuted(void **state)
{
    (void)state;
    for_each(check_permuted);
}

/* ---- columns of A -------------------------------------------------------------------------- */

static sp_delta_partial_call call_of(const rank_rig *rig, const void *x,
                                     const sp_delta_partial *site)
{
    return (sp_delta_partial_call){.struct_bytes = sizeof(sp_delta_partial_call),
                                   .plan = rig->plan,
                                   .x = x,
                                   .x_stride = X_STRIDE,
                                   .x_type = sp_layout_dtype(rig->pool.layout),
                                   .sites = site,
                                   .n_sites = 1};
}

static sp_delta_partial site_with(float *xa, void *y, sp_dtype y_type)
{
    return (sp_delta_partial){.struct_bytes = sizeof(sp_delta_partial),
                              .xa = xa,
                              .xa_stride = R,
                              .y = y,
                              .y_stride = Y_STRIDE,
                              .y_type = y_type};
}

static void shrink(rank_rig *rig, const void *x, float *xa)
{
    sp_delta_partial site = site_with(xa, NULL, SP_DTYPE_F32);
    sp_delta_partial_call call = call_of(rig, x, &site);
    sp_error error;

    memset(xa, 0xff, ROWS * R * sizeof *xa);
    assert_ok(sp_delta_shrink_partial(rig->delta, &call, &error), &error);
}

static void expand(rank_rig *rig, float *xa, void *y, sp_dtype y_type)
{
    sp_delta_partial site = site_with(xa, y, y_type);
    sp_delta_partial_call call = call_of(rig, NULL, &site);
    sp_error error;

    assert_ok(sp_delta_expand_from(rig->delta, &call, &error), &error);
}

/* With one rank the halves are the whole. */
static void check_one_rank(const world *w)
{
    rank_rig rig = make_rank(w, NULL);
    static float xa[ROWS * R], y[ROWS * Y_STRIDE], y_whole[ROWS * Y_STRIDE];

    memcpy(y, w->y0, sizeof y);
    memcpy(y_whole, w->y0, sizeof y_whole);
    apply(w, &rig, y_whole);
    shrink(&rig, w->x, xa);
    assert_memory_equal(y, w->y0, sizeof y);
    expand(&rig, xa, y, w->dtype);
    assert_memory_equal(y, y_whole, sizeof y);
    free_rank(&rig);
}

static void one_rank_has_the_bits_of_an_apply(void **state)
{
    (void)state;
    for_each(check_one_rank);
}

/*
 * The scalar level's order, written down again: lane l of 8 sums the products of k = l, l + 8, ...,
 * each product and each sum rounded to FP32; then ((0+1)+(2+3)) + ((4+5)+(6+7)).
 */
static float lane_sum(const float *a, const float *b, int32_t n)
{
    volatile float lanes[LANES] = {0}, product;

    for (int32_t i = 0; i < n; i++) {
        product = a[i] * b[i];
        lanes[i % LANES] = lanes[i % LANES] + product;
    }
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) +
           ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

static float round_to(sp_dtype dtype, float value)
{
    float stored[1];

    hand_store(dtype, stored, 0, (double)value);
    return (float)hand_load(dtype, stored, 0);
}

/* Σ over columns [begin, end) of x of one row and row j of its adapter's A. */
static float part_of(const world *w, int32_t row, int32_t j, int32_t begin, int32_t end,
                     double *out_exact)
{
    const sp_adapter_site *site = &w->adapters[row_slot[row]]->sites[0];
    float x[K], a[K];

    *out_exact = 0;
    for (int32_t k = begin; k < end; k++) {
        x[k - begin] = (float)hand_load(w->dtype, w->x, row * X_STRIDE + k);
        a[k - begin] = (float)hand_load(w->dtype, site->a.data, j * K + k);
        *out_exact += (double)x[k - begin] * (double)a[k - begin];
    }
    return lane_sum(x, a, end - begin);
}

static void check_part(const world *w, int32_t begin, int32_t end, const float *xa)
{
    bool scalar = strcmp(w->level, "scalar") == 0;

    for (int32_t row = 0; row < ROWS; row++) {
        int32_t rank = is_routed(row) ? ranks[row_slot[row]] : 0;

        for (int32_t j = 0; j < R; j++) {
            const float got = xa[row * R + j], zero = 0.0f;
            double exact;
            float want;

            if (j >= rank) {
                assert_memory_equal(&got, &zero, sizeof zero);
                continue;
            }
            want = part_of(w, row, j, begin, end, &exact);
            assert_true(fabs((double)got - exact) <= 2e-6 * (1 + fabs(exact)));
            if (scalar)
                assert_memory_equal(&got, &want, sizeof want);
        }
    }
}

/* One output from the summed xa: rounded once, B's product, fold. */
static float output_of(const world *w, int32_t row, int32_t n, const float *sums, double *out_exact)
{
    const sp_adapter_site *site = &w->adapters[row_slot[row]]->sites[0];
    float xa[RANK_MAX], b[RANK_MAX], y0 = (float)hand_load(w->dtype, w->y0, row * Y_STRIDE + n);
    float scale = scales[row_slot[row]] * row_scale[row]; /* exact: powers of two */
    double exact = 0;

    for (int32_t j = 0; j < site->rank; j++) {
        xa[j] = round_to(w->dtype, sums[row * R + j]);
        b[j] = (float)hand_load(w->dtype, site->b.data, n * site->rank + j);
        exact += (double)xa[j] * (double)b[j];
    }
    *out_exact = (double)y0 + (double)scale * exact;
    return round_to(w->dtype, fmaf(scale, round_to(w->dtype, lane_sum(xa, b, site->rank)), y0));
}

static void check_outputs(const world *w, const float *sums, const void *y)
{
    bool scalar = strcmp(w->level, "scalar") == 0;
    double unit = w->dtype == SP_DTYPE_F32 ? 1e-6 : w->dtype == SP_DTYPE_F16 ? 2e-3 : 1.6e-2;

    for (int32_t row = 0; row < ROWS; row++)
        for (int32_t n = 0; n < Y_STRIDE; n++) {
            double got = hand_load(w->dtype, y, row * Y_STRIDE + n), exact;
            float want;

            if (n >= N || !is_routed(row)) {
                assert_true(got == hand_load(w->dtype, w->y0, row * Y_STRIDE + n));
                continue;
            }
            want = output_of(w, row, n, sums, &exact);
            assert_true(fabs(got - exact) <= unit * (2 + fabs(exact)));
            if (scalar)
                assert_true(got == (double)want);
        }
}

/* A rank that keeps some rows of B besides goes on to the same outputs. */
static void check_part_of_outputs(const world *w, const sp_site_slice *columns, float *sums,
                                  const void *y)
{
    enum { FIRST = 20, END = 41 };
    sp_site_slice slice = *columns;
    size_t element = sp_dtype_bytes(w->dtype), bytes = (END - FIRST) * element;
    rank_rig rig;
    static float part[ROWS * Y_STRIDE];

    slice.row_begin = FIRST;
    slice.row_end = END;
    rig = make_rank(w, &slice);
    for (int32_t row = 0; row < ROWS; row++)
        memcpy((char *)part + (size_t)(row * Y_STRIDE) * element,
               (const char *)w->y0 + (size_t)(row * Y_STRIDE + FIRST) * element, bytes);
    expand(&rig, sums, part, w->dtype);
    for (int32_t row = 0; row < ROWS; row++)
        assert_memory_equal((char *)part + (size_t)(row * Y_STRIDE) * element,
                            (const char *)y + (size_t)(row * Y_STRIDE + FIRST) * element, bytes);
    free_rank(&rig);
}

/* Two ranks with the columns before and from the cut; each goes on from the sum in rank order. */
static void check_two_ranks(const world *w)
{
    static const int32_t cuts[] = {33, 32, 1, 50};

    for (size_t c = 0; c < 4; c++) {
        sp_site_slice slices[] = {slice_of(0, 0, 0, cuts[c], NULL),
                                  slice_of(0, 0, cuts[c], K, NULL)};
        rank_rig first = make_rank(w, &slices[0]), second = make_rank(w, &slices[1]);
        static float parts[2][ROWS * R], sums[ROWS * R], y[2][ROWS * Y_STRIDE];

        shrink(&first, w->x, parts[0]);
        shrink(&second, x_from(w, cuts[c]), parts[1]);
        check_part(w, 0, cuts[c], parts[0]);
        check_part(w, cuts[c], K, parts[1]);
        for (int32_t i = 0; i < ROWS * R; i++)
            sums[i] = parts[0][i] + parts[1][i];
        memcpy(y[0], w->y0, sizeof y[0]);
        memcpy(y[1], w->y0, sizeof y[1]);
        expand(&first, sums, y[0], w->dtype);
        expand(&second, sums, y[1], w->dtype);
        assert_memory_equal(y[0], y[1], sizeof y[0]); /* both hold all of B */
        check_outputs(w, sums, y[0]);
        check_part_of_outputs(w, &slices[1], sums, y[0]);
        free_rank(&second);
        free_rank(&first);
    }
}

static void two_ranks_give_the_documented_sum(void **state)
{
    (void)state;
    for_each(check_two_ranks);
}

/* A row's bits are its own: alone in the step it has those that it has among the others. */
static void check_rows_alone(const world *w)
{
    const sp_site_slice slice = slice_of(0, 0, 10, 50, NULL);
    rank_rig rig = make_rank(w, &slice);
    static float together[ROWS * R], alone[ROWS * R];

    shrink(&rig, x_from(w, 10), together);
    for (int32_t row = 0; row < ROWS; row++) {
        int32_t slots[ROWS];

        for (int32_t i = 0; i < ROWS; i++)
            slots[i] = i == row ? row_slot[i] : SP_SLOT_BASE;
        hand_plan_rows(rig.plan, rig.pool.pool, slots, row_scale, ROWS);
        shrink(&rig, x_from(w, 10), alone);
        assert_memory_equal(&alone[row * R], &together[row * R], R * sizeof(float));
    }
    free_rank(&rig);
}

static void a_part_depends_on_its_row_alone(void **state)
{
    (void)state;
    for_each(check_rows_alone);
}

/* More rows than a round takes, and more sites than a job: the same bits for each. */
static void check_many(const world *w)
{
    enum { N_SITES = 6 };
    rank_rig rig = make_rank(w, NULL);
    static float few[ROWS * R], xa[N_SITES][MANY * ROWS * R], x[MANY * ROWS * X_STRIDE];
    static int32_t slots[MANY * ROWS];
    static float row_scales[MANY * ROWS];
    size_t x_bytes = ROWS * X_STRIDE * sp_dtype_bytes(w->dtype);
    sp_delta_partial sites[N_SITES];
    sp_delta_partial_call call;
    sp_error error;

    shrink(&rig, w->x, few);
    for (int32_t i = 0; i < MANY; i++) {
        memcpy((char *)x + (size_t)i * x_bytes, w->x, x_bytes);
        memcpy(&slots[i * ROWS], row_slot, sizeof row_slot);
        memcpy(&row_scales[i * ROWS], row_scale, sizeof row_scale);
    }
    hand_plan_rows(rig.plan, rig.pool.pool, slots, row_scales, MANY * ROWS);
    memset(xa, 0xff, sizeof xa);
    for (int i = 0; i < N_SITES; i++)
        sites[i] = site_with(xa[i], NULL, SP_DTYPE_F32);
    call = call_of(&rig, x, sites);
    call.n_sites = N_SITES;
    assert_ok(sp_delta_shrink_partial(rig.delta, &call, &error), &error);
    for (int i = 0; i < N_SITES; i++)
        for (int32_t k = 0; k < MANY; k++)
            assert_memory_equal(&xa[i][k * ROWS * R], few, sizeof few);
    free_rank(&rig);
}

static void many_rows_and_sites_have_the_bits_of_few(void **state)
{
    (void)state;
    for_each(check_many);
}

/* An FP32 x is rounded to the pool's type first. */
static void check_f32_x(const world *w)
{
    rank_rig rig = make_rank(w, NULL);
    sp_test_random random = {31};
    static float x[ROWS * X_STRIDE], rounded[ROWS * X_STRIDE], xa[ROWS * R], of_f32[ROWS * R];
    sp_delta_partial site = site_with(of_f32, NULL, SP_DTYPE_F32);
    sp_delta_partial_call call = call_of(&rig, x, &site);
    sp_error error;

    for (int32_t i = 0; i < ROWS * X_STRIDE; i++) {
        x[i] = sp_test_float(&random) * 1.2345f;
        hand_store(w->dtype, rounded, i, (double)x[i]);
    }
    shrink(&rig, rounded, xa);
    memset(of_f32, 0xff, sizeof of_f32);
    call.x_type = SP_DTYPE_F32;
    assert_ok(sp_delta_shrink_partial(rig.delta, &call, &error), &error);
    assert_memory_equal(of_f32, xa, sizeof xa);
    free_rank(&rig);
}

static void an_fp32_x_is_rounded_first(void **state)
{
    (void)state;
    for_each(check_f32_x);
}

/* ---- refusals ------------------------------------------------------------------------------ */

typedef sp_status (*half_fn)(sp_delta *delta, const sp_delta_partial_call *call, sp_error *error);

static void expect(const rank_rig *rig, half_fn half, const sp_delta_partial_call *call,
                   sp_status status, const char *subject)
{
    sp_error error = {.status = SP_OK};

    assert_int_equal(half(rig->delta, call, &error), status);
    assert_int_equal(error.status, status);
    assert_string_equal(error.subject, subject);
}

static void bad_calls_write_nothing(void **state)
{
    static world w;
    static float xa[ROWS * R], xa_before[ROWS * R], y[ROWS * Y_STRIDE];
    sp_delta_partial good = site_with(xa, y, SP_DTYPE_F32), site = good;
    sp_delta_partial_call fine, call;
    rank_rig rig;

    (void)state;
    make_world(&w, SP_DTYPE_F32, "scalar");
    rig = make_rank(&w, NULL);
    fine = call = call_of(&rig, w.x, &site);
    memset(xa, 0x11, sizeof xa);
    memcpy(xa_before, xa, sizeof xa);
    memcpy(y, w.y0, sizeof y);
    expect(&rig, sp_delta_shrink_partial, NULL, SP_ERR_ARGUMENT, "sp_delta_partial_call");
    call.struct_bytes = 0;
    expect(&rig, sp_delta_expand_from, &call, SP_ERR_ARGUMENT, "sp_delta_partial_call");
    call = fine;
    call.x = NULL;
    expect(&rig, sp_delta_shrink_partial, &call, SP_ERR_ARGUMENT, "x");
    call = fine;
    call.x_stride = K - 1;
    expect(&rig, sp_delta_shrink_partial, &call, SP_ERR_STRIDE, "x_stride");
    call = fine;
    call.sites = NULL;
    expect(&rig, sp_delta_shrink_partial, &call, SP_ERR_ARGUMENT, "sites");
    call = fine;
    call.n_sites = -1;
    expect(&rig, sp_delta_expand_from, &call, SP_ERR_ARGUMENT, "n_sites");
    call = fine;
    call.x_type = SP_DTYPE_BF16;
    expect(&rig, sp_delta_shrink_partial, &call, SP_ERR_ARGUMENT, "x_type");
    call = fine;
    call.plan = NULL;
    expect(&rig, sp_delta_shrink_partial, &call, SP_ERR_ARGUMENT, "plan");
    site.site = 1;
    expect(&rig, sp_delta_shrink_partial, &fine, SP_ERR_ARGUMENT, "sites");
    site = good;
    site.xa = NULL;
    expect(&rig, sp_delta_expand_from, &fine, SP_ERR_ARGUMENT, "sites");
    site = good;
    site.xa_stride = R - 1;
    expect(&rig, sp_delta_shrink_partial, &fine, SP_ERR_STRIDE, "xa_stride");
    site = good;
    site.y = NULL;
    expect(&rig, sp_delta_expand_from, &fine, SP_ERR_ARGUMENT, "sites");
    site = good;
    site.y_stride = N - 1;
    expect(&rig, sp_delta_expand_from, &fine, SP_ERR_STRIDE, "y_stride");
    site = good;
    site.y_type = SP_DTYPE_BF16;
    expect(&rig, sp_delta_expand_from, &fine, SP_ERR_ARGUMENT, "sites");
    site = good;
    assert_ok(sp_pool_release(rig.pool.pool, hand_handle(rig.pool.pool, 0), NULL), NULL);
    assert_int_equal(sp_delta_shrink_partial(rig.delta, &fine, NULL), SP_ERR_STATE);
    assert_int_equal(sp_delta_expand_from(rig.delta, &fine, NULL), SP_ERR_STATE);
    assert_memory_equal(xa, xa_before, sizeof xa);
    assert_memory_equal(y, w.y0, sizeof y);
    free_rank(&rig);
    free_world(&w);
}

static const site_dims two_widths[] = {{0, SP_MODULE_O_PROJ, K, N},
                                       {0, SP_MODULE_DOWN_PROJ, K + 1, N}};

static void sites_that_do_not_share_x_are_refused(void **state)
{
    static float x[ROWS * X_STRIDE], xa[2][ROWS * R];
    static const int32_t base_rows[ROWS] = {-1, -1, -1, -1, -1, -1, -1, -1, -1};
    sp_delta_partial sites[] = {site_with(xa[0], NULL, SP_DTYPE_F32),
                                site_with(xa[1], NULL, SP_DTYPE_F32)};
    rank_rig rig = {.pool = hand_pool_create(two_widths, 2, R, SP_DTYPE_F32, 1)};
    sp_delta_options options;
    sp_delta_partial_call call;

    (void)state;
    sp_delta_options_default(&options, sizeof options);
    options.pool = rig.pool.pool;
    assert_ok(sp_delta_create(&options, &rig.delta, NULL), NULL);
    assert_ok(sp_plan_create(ROWS, 1, &rig.plan, NULL), NULL);
    hand_plan_rows(rig.plan, rig.pool.pool, base_rows, row_scale, ROWS);
    sites[1].site = 1;
    call = call_of(&rig, x, sites);
    call.n_sites = 2;
    expect(&rig, sp_delta_shrink_partial, &call, SP_ERR_ARGUMENT, "sites");
    call.n_sites = 1;
    assert_ok(sp_delta_shrink_partial(rig.delta, &call, NULL), NULL);
    free_rank(&rig);
}

/* An apply's shrink that is under way is no more: its scratch has other rows now. */
static void a_part_ends_a_half_of_an_apply(void **state)
{
    static world w;
    static float xa[ROWS * R], y[ROWS * Y_STRIDE];
    const sp_delta_output output = {sizeof output, 0, y, Y_STRIDE, SP_DTYPE_F32};
    sp_delta_call call = {.struct_bytes = sizeof call,
                          .x = w.x,
                          .x_stride = X_STRIDE,
                          .x_type = SP_DTYPE_F32,
                          .outputs = &output,
                          .n_outputs = 1};
    rank_rig rig;

    (void)state;
    make_world(&w, SP_DTYPE_F32, "scalar");
    rig = make_rank(&w, NULL);
    call.plan = rig.plan;
    assert_ok(sp_delta_shrink(rig.delta, &call, NULL), NULL);
    shrink(&rig, w.x, xa);
    assert_int_equal(sp_delta_expand(rig.delta, &call, NULL), SP_ERR_STATE);
    assert_ok(sp_delta_shrink(rig.delta, &call, NULL), NULL);
    expand(&rig, xa, y, SP_DTYPE_F32);
    assert_int_equal(sp_delta_expand(rig.delta, &call, NULL), SP_ERR_STATE);
    free_rank(&rig);
    free_world(&w);
}

/* The levers of the options: xa is zero and y as it was. */
static void check_lever(const world *w, bool no_apply, sp_module_set skip_modules)
{
    static float xa[ROWS * R], y[ROWS * Y_STRIDE];
    static const float zeros[ROWS * R];
    rank_rig rig = make_rank(w, NULL);
    sp_delta_options options;

    sp_delta_destroy(rig.delta);
    sp_delta_options_default(&options, sizeof options);
    options.pool = rig.pool.pool;
    options.no_apply = no_apply;
    options.skip_modules = skip_modules;
    assert_ok(sp_delta_create(&options, &rig.delta, NULL), NULL);
    shrink(&rig, w->x, xa);
    assert_memory_equal(xa, zeros, sizeof xa);
    for (int32_t i = 0; i < ROWS * R; i++)
        xa[i] = 1;
    memcpy(y, w->y0, sizeof y);
    expand(&rig, xa, y, SP_DTYPE_F32);
    assert_memory_equal(y, w->y0, sizeof y);
    free_rank(&rig);
}

static void levers_skip_parts(void **state)
{
    static world w;

    (void)state;
    make_world(&w, SP_DTYPE_F32, "scalar");
    check_lever(&w, true, 0);
    check_lever(&w, false, SP_MODULE_BIT(SP_MODULE_O_PROJ));
    free_world(&w);
}

static void halves_do_not_allocate(void **state)
{
    static world w;
    static float xa[ROWS * R], y[ROWS * Y_STRIDE];
    rank_rig rig;

    (void)state;
    make_world(&w, SP_DTYPE_BF16, NULL);
    w.level = "scalar";
    rig = make_rank(&w, NULL);
    sp_alloc_fail_after(0);
    shrink(&rig, w.x, xa);
    expand(&rig, xa, y, SP_DTYPE_F32);
    assert_false(sp_alloc_failed());
    sp_alloc_fail_after(-1);
    free_rank(&rig);
    free_world(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(halves_of_rows_have_the_bits_of_the_whole),
        cmocka_unit_test(a_host_with_permuted_rows_gets_the_whole_permuted),
        cmocka_unit_test(one_rank_has_the_bits_of_an_apply),
        cmocka_unit_test(two_ranks_give_the_documented_sum),
        cmocka_unit_test(a_part_depends_on_its_row_alone),
        cmocka_unit_test(many_rows_and_sites_have_the_bits_of_few),
        cmocka_unit_test(an_fp32_x_is_rounded_first),
        cmocka_unit_test(bad_calls_write_nothing),
        cmocka_unit_test(sites_that_do_not_share_x_are_refused),
        cmocka_unit_test(a_part_ends_a_half_of_an_apply),
        cmocka_unit_test(levers_skip_parts),
        cmocka_unit_test(halves_do_not_allocate),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
