/*
 * test_gemm.c: gemm_nt of every level against sums in double precision, with the bound that FP32
 * accumulation in 8 or more lanes has; its epilogues against their formula, exactly; and the
 * promise that a row's bits depend on nothing around it, by memcmp.
 */
#include "kernel_test.h"

#include "kernels/cpu/gemm.h"

#define ROWS_MAX 257
#define N_MAX    131

typedef struct types {
    sp_dtype x, w;
} types;

static const types type_pairs[] = {
    {SP_DTYPE_BF16, SP_DTYPE_BF16},
    {SP_DTYPE_F16, SP_DTYPE_F16},
    {SP_DTYPE_F32, SP_DTYPE_F32},
    {SP_DTYPE_F32, SP_DTYPE_BF16},
};
static const int64_t row_counts[] = {1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 48, 64, 65, 97, 257};
static const int64_t k_lengths[] = {1, 8, 15, 16, 17, 64, 97, 509, 1031, 1536};
static const int64_t n_widths[] = {1, 2, 3, 8, 13, 16, 33, 64, 131};

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* x, w and the exact products of the largest case of one (types, k); smaller ones are parts. */
typedef struct problem {
    types type;
    int64_t k, x_stride, w_stride;
    guarded x, w, bias;     /* x [ROWS_MAX, k], w [N_MAX, k], bias [N_MAX] */
    int64_t n_solved;       /* rows of the next two */
    double *sum, *absolute; /* [n_solved, N_MAX]: Σ xw and Σ |xw| */
} problem;

/* All pointers are one element off any vector's alignment, all strides have NaN pads. */
static problem problem_new(types type, int64_t k, sp_test_random *random)
{
    problem p = {.type = type, .k = k, .x_stride = k + 5, .w_stride = k + 3};
    size_t x_bytes = type_bytes(type.x), w_bytes = type_bytes(type.w);

    /* The last row ends with k: nothing may be read behind it. */
    p.x = guarded_new(x_bytes * (size_t)((ROWS_MAX - 1) * p.x_stride + k), x_bytes);
    p.w = guarded_new(w_bytes * (size_t)((N_MAX - 1) * p.w_stride + k), w_bytes);
    p.bias = guarded_new(w_bytes * N_MAX, w_bytes);
    fill_matrix(random, type.x, p.x.data, ROWS_MAX, k, p.x_stride, 1.0f);
    fill_matrix(random, type.w, p.w.data, N_MAX, k, p.w_stride, 1.0f);
    fill_matrix(random, type.w, p.bias.data, 1, N_MAX, N_MAX, 1.0f);
    return p;
}

/* Of long rows the first 65: a_row_depends_on_nothing_around_it holds the others to the bits that
 * they have in such small batches. */
static void problem_solve(problem *p)
{
    float *x = malloc((size_t)p->k * sizeof *x), *w = malloc((size_t)p->k * N_MAX * sizeof *w);

    p->n_solved = p->k > 512 ? 65 : ROWS_MAX;
    p->sum = malloc((size_t)p->n_solved * N_MAX * sizeof *p->sum);
    p->absolute = malloc((size_t)p->n_solved * N_MAX * sizeof *p->absolute);
    assert_true(x && w && p->sum && p->absolute);
    for (int64_t j = 0; j < N_MAX; j++)
        for (int64_t c = 0; c < p->k; c++)
            w[j * p->k + c] = sp_element_load(p->type.w, p->w.data, j * p->w_stride + c);
    for (int64_t i = 0; i < p->n_solved; i++) {
        for (int64_t c = 0; c < p->k; c++)
            x[c] = sp_element_load(p->type.x, p->x.data, i * p->x_stride + c);
        for (int64_t j = 0; j < N_MAX; j++) {
            double sum = 0.0, absolute = 0.0;

            for (int64_t c = 0; c < p->k; c++) {
                double product = (double)x[c] * (double)w[j * p->k + c];

                sum += product;
                absolute += fabs(product);
            }
            p->sum[i * N_MAX + j] = sum;
            p->absolute[i * N_MAX + j] = absolute;
        }
    }
    free(w);
    free(x);
}

static void problem_free(problem *p)
{
    guarded_free(&p->x);
    guarded_free(&p->w);
    guarded_free(&p->bias);
    free(p->sum);
    free(p->absolute);
}

static void *pack(const sp_kernels *kernels, const problem *p, const void *x,
                  const int32_t *row_index, int64_t rows)
{
    size_t bytes = kernels->x_pack_bytes(p->type.x, p->type.w, rows, p->k);
    void *packed;

    assert_int_equal(bytes % 64, 0);
    packed = aligned_alloc(64, bytes);
    assert_non_null(packed);
    memset(packed, GUARD_BYTE, bytes);
    kernels->x_pack(packed, p->type.x, p->type.w, x, p->x_stride, row_index, rows, p->k, 0, rows);
    return packed;
}

static sp_gemm_args arguments(const problem *p, void *packed, int64_t rows, int64_t n, float *y)
{
    return (sp_gemm_args){
        .packed_x = packed,
        .x_type = p->type.x,
        .w_type = p->type.w,
        .y_type = SP_DTYPE_F32,
        .delta_type = p->type.x,
        .epilogue = SP_EPILOGUE_STORE,
        .rows = rows,
        .n = n,
        .k = p->k,
        .w = p->w.data,
        .w_stride = p->w_stride,
        .y = y,
        .y_stride = n,
    };
}

/* ---- against double precision -------------------------------------------------------------- */

/* k / 8 steps in a lane, a tree and the packing's slack, each with half an FP32 unit. */
static double sum_bound(const problem *p, int64_t i, int64_t j)
{
    return ((double)p->k / 8.0 + 8.0) * 0x1p-24 * p->absolute[i * N_MAX + j] + 0x1p-126;
}

static void check_sums(const sp_kernels *kernels, const problem *p, int64_t rows, int64_t n)
{
    guarded y = guarded_new((size_t)(rows * n) * 4, 4);
    void *packed = pack(kernels, p, p->x.data, NULL, rows);
    sp_gemm_args args = arguments(p, packed, rows, n, (float *)(void *)y.data);

    kernels->gemm_nt(&args, 0, rows, 0, n);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < n; j++)
            check_close(sp_element_load(SP_DTYPE_F32, y.data, i * n + j), p->sum[i * N_MAX + j],
                        sum_bound(p, i, j), "sum", i, j);
    guarded_free(&y);
    free(packed);
}

static void sums_match_double(void **state)
{
    const sp_kernels *kernels = kernels_or_skip(state);
    sp_test_random random = {1};

    for (size_t t = 0; t < COUNT(type_pairs); t++)
        for (size_t c = 0; c < COUNT(k_lengths); c++) {
            problem p = problem_new(type_pairs[t], k_lengths[c], &random);

            problem_solve(&p);
            for (size_t r = 0; r < COUNT(row_counts); r++)
                for (size_t w = 0; w < COUNT(n_widths); w++)
                    if (row_counts[r] <= p.n_solved && (row_counts[r] < 64 || n_widths[w] > 30))
                        check_sums(kernels, &p, row_counts[r], n_widths[w]);
            problem_free(&p);
        }
}

/* ---- epilogues ----------------------------------------------------------------------------- */

typedef struct epilogue_case {
    sp_epilogue epilogue;
    sp_dtype y_type, delta_type;
    int bias, indexed;
} epilogue_case;

static float expected_value(const problem *p, const epilogue_case *e, float sum, float scale,
                            float old, int64_t j)
{
    if (e->epilogue == SP_EPILOGUE_STORE) {
        float bias = e->bias ? sp_element_load(p->type.w, p->bias.data, j) : 0.0f;

        return sp_element_round(e->y_type, e->bias ? sum + bias : sum);
    }
    if (scale == 0.0f)
        return old;
    return sp_element_round(e->y_type, fmaf(scale, sp_element_round(e->delta_type, sum), old));
}

/* Rows go to the rows of y in reverse when indexed. The sums come from a plain FP32 store. */
static void check_epilogue(const sp_kernels *kernels, const problem *p, const epilogue_case *e,
                           int64_t rows, int64_t n)
{
    size_t bytes = type_bytes(e->y_type);
    int64_t y_stride = n + 7;
    guarded y = guarded_new(bytes * (size_t)((rows - 1) * y_stride + n), bytes);
    guarded before = guarded_new(y.bytes, bytes);
    float *sums = malloc((size_t)(rows * n) * sizeof *sums), *scale = malloc((size_t)rows * 4);
    int32_t *index = malloc((size_t)rows * sizeof *index);
    void *packed = pack(kernels, p, p->x.data, NULL, rows);
    sp_gemm_args args = arguments(p, packed, rows, n, sums);
    sp_test_random random = {7};

    assert_true(sums && scale && index);
    kernels->gemm_nt(&args, 0, rows, 0, n);
    if (e->epilogue == SP_EPILOGUE_FOLD)
        fill_matrix(&random, e->y_type, y.data, rows, n, y_stride, 4.0f);
    memcpy(before.data, y.data, y.bytes);
    for (int64_t i = 0; i < rows; i++) {
        index[i] = (int32_t)(rows - 1 - i);
        scale[i] = i % 3 == 1 ? 0.0f : sp_test_float(&random) * 3.0f;
    }
    args.epilogue = e->epilogue;
    args.y_type = e->y_type;
    args.delta_type = e->delta_type;
    args.bias = e->bias ? p->bias.data : NULL;
    args.y = y.data;
    args.y_stride = y_stride;
    args.row_index = e->indexed ? index : NULL;
    args.scale = e->epilogue == SP_EPILOGUE_FOLD ? scale : NULL;
    kernels->gemm_nt(&args, 0, rows, 0, n);
    for (int64_t i = 0; i < rows; i++) {
        int64_t at = (e->indexed ? index[i] : i) * y_stride;

        for (int64_t j = 0; j < n; j++) {
            float old = sp_element_load(e->y_type, before.data, at + j);
            float new = expected_value(p, e, sums[i * n + j], scale[i], old, j);

            sp_element_store(e->y_type, before.data, at + j, new);
        }
    }
    assert_memory_equal(y.data, before.data, y.bytes); /* pads included */
    guarded_free(&y);
    guarded_free(&before);
    free(packed);
    free(index);
    free(scale);
    free(sums);
}

static void epilogues_round_where_they_should(void **state)
{
    const sp_kernels *kernels = kernels_or_skip(state);
    static const sp_dtype dtypes[] = {SP_DTYPE_F32, SP_DTYPE_BF16, SP_DTYPE_F16};
    static const int64_t sizes[][3] = {{1, 17, 33},  {2, 64, 131}, {3, 64, 13},
                                       {17, 97, 29}, {97, 16, 70}, {1, 509, 131}};
    sp_test_random random = {2};

    for (size_t t = 0; t < COUNT(type_pairs); t++)
        for (size_t s = 0; s < COUNT(sizes); s++) {
            problem p = problem_new(type_pairs[t], sizes[s][1], &random);

            for (int variant = 0; variant < 72; variant++) {
                epilogue_case e = {
                    .epilogue = variant % 2 ? SP_EPILOGUE_FOLD : SP_EPILOGUE_STORE,
                    .y_type = dtypes[variant / 2 % 3],
                    .delta_type = dtypes[variant / 6 % 3],
                    .indexed = variant / 18 % 2,
                    .bias = variant / 36,
                };

                if (!(e.epilogue == SP_EPILOGUE_FOLD && e.bias))
                    check_epilogue(kernels, &p, &e, sizes[s][0], sizes[s][2]);
            }
            problem_free(&p);
        }
}

/* ---- the promise --------------------------------------------------------------------------- */

/* All ROWS_MAX rows and n outputs in one call: what every other way must reproduce. */
static float *whole_result(const sp_kernels *kernels, const problem *p, int64_t n)
{
    float *y = malloc((size_t)(ROWS_MAX * n) * sizeof *y);
    void *packed = pack(kernels, p, p->x.data, NULL, ROWS_MAX);
    sp_gemm_args args = arguments(p, packed, ROWS_MAX, n, y);

    assert_non_null(y);
    kernels->gemm_nt(&args, 0, ROWS_MAX, 0, n);
    free(packed);
    return y;
}

/* `rows` rows chosen at random, in random order, repeated ones included. */
static void check_selection(const sp_kernels *kernels, const problem *p, const float *whole,
                            int64_t n, int64_t rows, sp_test_random *random)
{
    int32_t *index = malloc((size_t)rows * sizeof *index);
    float *y = malloc((size_t)(rows * n) * sizeof *y);
    sp_gemm_args args;
    void *packed;

    assert_true(index && y);
    for (int64_t i = 0; i < rows; i++)
        index[i] = (int32_t)sp_test_below(random, ROWS_MAX);
    packed = pack(kernels, p, p->x.data, index, rows);
    args = arguments(p, packed, rows, n, y);
    kernels->gemm_nt(&args, 0, rows, 0, n);
    for (int64_t i = 0; i < rows; i++)
        if (memcmp(y + i * n, whole + index[i] * n, (size_t)n * sizeof *y) != 0)
            fail_msg("row %d among %lld differs, k %lld", index[i], (long long)rows,
                     (long long)p->k);
    free(packed);
    free(y);
    free(index);
}

/* The same outputs from pieces of rows × columns, packed in pieces as well. */
static void check_pieces(const sp_kernels *kernels, const problem *p, const float *whole, int64_t n,
                         int64_t rows, int64_t columns)
{
    float *y = malloc((size_t)(ROWS_MAX * n) * sizeof *y);
    size_t bytes = kernels->x_pack_bytes(p->type.x, p->type.w, ROWS_MAX, p->k);
    void *packed = aligned_alloc(64, bytes);
    sp_gemm_args args = arguments(p, packed, ROWS_MAX, n, y);
    int64_t pack_rows = (rows + kernels->x_pack_rows - 1) / kernels->x_pack_rows;

    assert_true(y && packed);
    rows = (rows + kernels->gemm_rows - 1) / kernels->gemm_rows * kernels->gemm_rows;
    columns = (columns + kernels->gemm_columns - 1) / kernels->gemm_columns * kernels->gemm_columns;
    pack_rows *= kernels->x_pack_rows;
    for (int64_t i = 0; i < ROWS_MAX; i += pack_rows)
        kernels->x_pack(packed, p->type.x, p->type.w, p->x.data, p->x_stride, NULL, ROWS_MAX, p->k,
                        i, i + pack_rows < ROWS_MAX ? i + pack_rows : ROWS_MAX);
    for (int64_t i = 0; i < ROWS_MAX; i += rows)
        for (int64_t j = 0; j < n; j += columns)
            kernels->gemm_nt(&args, i, i + rows < ROWS_MAX ? i + rows : ROWS_MAX, j,
                             j + columns < n ? j + columns : n);
    assert_memory_equal(y, whole, (size_t)(ROWS_MAX * n) * sizeof *y);
    free(packed);
    free(y);
}

/* Output j alone: a GEMM of n = 1 whose only weight row is j. */
static void check_one_output(const sp_kernels *kernels, const problem *p, const float *whole,
                             int64_t n, int64_t j)
{
    float y[ROWS_MAX];
    void *packed = pack(kernels, p, p->x.data, NULL, ROWS_MAX);
    sp_gemm_args args = arguments(p, packed, ROWS_MAX, 1, y);

    args.w = sp_element_at(p->type.w, p->w.data, j * p->w_stride);
    kernels->gemm_nt(&args, 0, ROWS_MAX, 0, 1);
    for (int64_t i = 0; i < ROWS_MAX; i++)
        assert_memory_equal(&y[i], &whole[i * n + j], sizeof y[i]);
    free(packed);
}

#define N_PICKED 13

/*
 * Weight rows picked out of the matrix, written to the columns that they had: the same bits there,
 * and not a byte elsewhere. Through both epilogues.
 */
static void check_columns(const sp_kernels *kernels, const problem *p, const float *whole,
                          int64_t n, int64_t rows, sp_epilogue epilogue, sp_test_random *random)
{
    size_t row_bytes = (size_t)p->w_stride * sp_dtype_bytes(p->type.w);
    char *picked = malloc(N_PICKED * row_bytes);
    guarded y = guarded_new((size_t)(rows * n) * sizeof(float), 0);
    float *values = (float *)y.data, scale[ROWS_MAX];
    void *packed = pack(kernels, p, p->x.data, NULL, rows);
    sp_gemm_args args = arguments(p, packed, rows, N_PICKED, values);
    int32_t index[N_PICKED];
    bool is_picked[N_MAX] = {false};

    assert_non_null(picked);
    for (int32_t j = 0; j < N_PICKED; j++) {
        index[j] = 5 * j + (int32_t)sp_test_below(random, 5);
        is_picked[index[j]] = true;
        memcpy(picked + (size_t)j * row_bytes, p->w.data + (size_t)index[j] * row_bytes,
               (size_t)p->k * sp_dtype_bytes(p->type.w));
    }
    for (int64_t i = 0; i < ROWS_MAX; i++)
        scale[i] = 1.0f;
    for (int64_t i = 0; i < rows * n; i++)
        values[i] = 0.25f;
    args.w = picked;
    args.y_stride = n;
    args.column_index = index;
    args.epilogue = epilogue;
    args.delta_type = SP_DTYPE_F32;
    args.scale = scale;
    kernels->gemm_nt(&args, 0, rows, 0, N_PICKED);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < n; j++) {
            float product = whole[i * n + j];
            float expected = epilogue == SP_EPILOGUE_FOLD ? 0.25f + product : product;

            expected = is_picked[j] ? expected : 0.25f;
            assert_memory_equal(&values[i * n + j], &expected, sizeof expected);
        }
    free(packed);
    guarded_free(&y);
    free(picked);
}

static void picked_columns_have_the_bits_of_the_whole(void **state)
{
    const sp_kernels *kernels = kernels_or_skip(state);
    static const int64_t rows[] = {1, 2, 3, 4, 17, 64, 97};
    sp_test_random random = {17};

    for (size_t t = 0; t < COUNT(type_pairs); t++)
        for (size_t c = 0; c < COUNT(k_lengths); c++) {
            problem p = problem_new(type_pairs[t], k_lengths[c], &random);
            int64_t n = 67;
            float *whole = whole_result(kernels, &p, n);

            for (size_t r = 0; r < COUNT(rows); r++) {
                check_columns(kernels, &p, whole, n, rows[r], SP_EPILOGUE_STORE, &random);
                check_columns(kernels, &p, whole, n, rows[r], SP_EPILOGUE_FOLD, &random);
            }
            free(whole);
            problem_free(&p);
        }
}

static void a_row_depends_on_nothing_around_it(void **state)
{
    const sp_kernels *kernels = kernels_or_skip(state);
    sp_test_random random = {3};

    for (size_t t = 0; t < COUNT(type_pairs); t++)
        for (size_t c = 0; c < COUNT(k_lengths); c++) {
            problem p = problem_new(type_pairs[t], k_lengths[c], &random);
            int64_t n = 67;
            float *whole = whole_result(kernels, &p, n);

            for (size_t r = 0; r < COUNT(row_counts); r++)
                check_selection(kernels, &p, whole, n, row_counts[r], &random);
            check_pieces(kernels, &p, whole, n, 1, 1);
            check_pieces(kernels, &p, whole, n, 2, 5);
            check_pieces(kernels, &p, whole, n, 40, 23);
            check_one_output(kernels, &p, whole, n, 0);
            check_one_output(kernels, &p, whole, n, 61);
            free(whole);
            problem_free(&p);
        }
}

static void threads_change_nothing(void **state)
{
    const sp_kernels *kernels = kernels_or_skip(state);
    static const int32_t threads[] = {1, 2, 3, 7};
    sp_test_random random = {4};
    problem p = problem_new(type_pairs[0], 1031, &random);
    int64_t widths[3] = {N_MAX, 9, 1};
    float *whole[3], *y[3];
    void *packed = malloc(kernels->x_pack_bytes(p.type.x, p.type.w, ROWS_MAX, p.k) + 64);
    void *aligned = (void *)(((uintptr_t)packed + 63) / 64 * 64);

    for (int g = 0; g < 3; g++) {
        whole[g] = whole_result(kernels, &p, widths[g]);
        y[g] = malloc((size_t)(ROWS_MAX * widths[g]) * 4);
    }
    for (size_t t = 0; t < COUNT(threads); t++) {
        sp_exec_options options;
        sp_gemm_args args[4];
        sp_exec *exec = NULL;

        sp_exec_options_default(&options, sizeof options);
        options.threads = threads[t];
        assert_int_equal(sp_exec_create(&options, &exec, NULL), SP_OK);
        sp_gemm_pack(kernels, exec, aligned, p.type.x, p.type.w, p.x.data, p.x_stride, NULL,
                     ROWS_MAX, p.k);
        for (int g = 0; g < 3; g++) {
            args[g] = arguments(&p, aligned, ROWS_MAX, widths[g], y[g]);
            memset(y[g], GUARD_BYTE, (size_t)(ROWS_MAX * widths[g]) * 4);
        }
        args[3] = args[0];
        args[3].rows = 0; /* an empty one among them */
        sp_gemm_run(kernels, exec, args, 4);
        for (int g = 0; g < 3; g++)
            assert_memory_equal(y[g], whole[g], (size_t)(ROWS_MAX * widths[g]) * 4);
        sp_exec_destroy(exec);
    }
    for (int g = 0; g < 3; g++) {
        free(whole[g]);
        free(y[g]);
    }
    free(packed);
    problem_free(&p);
}

/* A non-finite value in one row of x, or of w, stays in that row or column of y. */
static void non_finite_stays_in_its_row(void **state)
{
    const sp_kernels *kernels = kernels_or_skip(state);
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    sp_test_random random = {5};

    for (size_t t = 0; t < COUNT(type_pairs); t++) {
        problem p = problem_new(type_pairs[t], 97, &random);
        int64_t n = 29;
        float *clean = whole_result(kernels, &p, n), *dirty;

        for (size_t b = 0; b < COUNT(bad); b++)
            sp_element_store(p.type.x, p.x.data, (41 + (int64_t)b) * p.x_stride + 90, bad[b]);
        sp_element_store(p.type.w, p.w.data, 11 * p.w_stride + 96, NAN);
        dirty = whole_result(kernels, &p, n);
        for (int64_t i = 0; i < ROWS_MAX; i++)
            for (int64_t j = 0; j < n; j++) {
                float value = dirty[i * n + j];

                if ((i >= 41 && i < 44) || j == 11)
                    assert_int_equal(isfinite(value) ? 1 : 0, 0);
                else
                    assert_memory_equal(&value, &clean[i * n + j], sizeof value);
            }
        free(dirty);
        free(clean);
        problem_free(&p);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FOR_EACH_LEVEL(sums_match_double),
        FOR_EACH_LEVEL(epilogues_round_where_they_should),
        FOR_EACH_LEVEL(a_row_depends_on_nothing_around_it),
        FOR_EACH_LEVEL(picked_columns_have_the_bits_of_the_whole),
        FOR_EACH_LEVEL(threads_change_nothing),
        FOR_EACH_LEVEL(non_finite_stays_in_its_row),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
