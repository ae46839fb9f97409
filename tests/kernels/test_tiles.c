/*
 * test_tiles.c: the amx level's code over emulated tiles, compared by memcmp with its documented
 * order of summation written out once more, subnormals included; and where the machine has tiles,
 * the hardware's bits against the emulation's.
 */
#include "kernel_test.h"

#include "kernels/cpu/levels.h"

#if defined(__AVX2__) && defined(__FMA__)

#define SP_TILES_EMULATED
#define EPILOGUE sp_gemm_epilogue_avx2
/* What is of AVX-512 is tested by test_gemm.c, where the machine has it, and below. */
#define TRANSPOSED_EPILOGUE(...) false
#define PACK_TILES               plain_pack_tiles
#define FEW_SUMS(...)            0
#define LONE_SUMS                plain_lone_sums
#define LONE_EPILOGUE            plain_lone_epilogue
#define sp_kernels_fill_amx      fill_amx_emulated
/* Panels so small that short lengths cross their borders. */
#define PANEL_N     64
#define PANEL_K     64
#define M_BLOCK     64
#define DIRECT_ROWS 64
static void plain_pack_tiles(void *to, const uint16_t *const *lines, int64_t c, int64_t tiles)
{
    uint16_t *out = to;

    for (int64_t pair = 0; pair < 16 * tiles; pair++)
        for (int r = 0; r < 16; r++)
            for (int half = 0; half < 2; half++)
                *out++ = lines[r][c + 2 * pair + half];
}

static bool lone_rows_are_wide; /* in AVX-512 */

static void plain_lone_sums(const sp_gemm_args *const *gemms, int32_t count, int64_t j, int64_t n,
                            float *sums, int64_t sums_stride);

static void plain_lone_epilogue(const sp_gemm_args *const *gemms, int32_t count, int64_t j,
                                int64_t n, const float *sums, int64_t sums_stride)
{
    if (lone_rows_are_wide)
        sp_gemm_lone_epilogue_avx512(gemms, count, j, n, sums, sums_stride);
    else
        for (int32_t i = 0; i < count; i++)
            sp_gemm_epilogue_avx2(gemms[i], 0, j, n, sums + i * sums_stride);
}

void fill_amx_emulated(sp_kernels *kernels, const sp_kernels *below);
#include "kernels/cpu/gemm_amx.c"

#define COUNT(array) (sizeof(array) / sizeof *(array))

static void plain_lone_sums(const sp_gemm_args *const *gemms, int32_t count, int64_t j, int64_t n,
                            float *sums, int64_t sums_stride)
{
    few_sums few;

    if (lone_rows_are_wide) {
        sp_lone_sums_avx512(gemms, count, j, n, sums, sums_stride);
        return;
    }
    for (int32_t i = 0; i < count; i++) {
        few_columns(gemms[i], 0, 1, j, j + n, j + n, few);
        memcpy(sums + i * sums_stride, few[0], (size_t)n * sizeof *sums);
    }
}

/* ---- the order, once more ------------------------------------------------------------------- */

static float flush(float value)
{
    return fabsf(value) < 0x1p-126f ? copysignf(0.0f, value) : value;
}

static float fused(uint16_t w, uint16_t x, float sum)
{
    return flush(fmaf(flush(sp_bf16_to_f32(w)), flush(sp_bf16_to_f32(x)), sum));
}

static float ordered_sum(const uint16_t *w, const uint16_t *x, int64_t length)
{
    float sum = 0.0f;

    for (int64_t begin = 0; begin < length; begin += 32) {
        float even = 0.0f, odd = 0.0f;

        for (int64_t c = begin; c < begin + 32; c += 2) {
            even = fused(c < length ? w[c] : 0, c < length ? x[c] : 0, even);
            odd = fused(c + 1 < length ? w[c + 1] : 0, c + 1 < length ? x[c + 1] : 0, odd);
        }
        sum = flush(sum + flush(even + odd));
    }
    return sum;
}

/* ---- problems ------------------------------------------------------------------------------ */

typedef struct problem {
    int64_t rows, n, k, x_stride, w_stride;
    guarded x, w; /* bf16 [rows, k], [n, k], NaN pads between rows */
    float *sums;  /* [rows, n] */
} problem;

/* kind 0: numbers near 1; 1: of all sizes; 2: so small that products and sums are subnormal. */
static float sample(sp_test_random *random, int kind)
{
    float value = sp_test_float(random);

    if (kind == 1)
        return ldexpf(value, (int)sp_test_below(random, 60) - 30);
    if (kind == 2)
        return ldexpf(value, -50 - (int)sp_test_below(random, 30));
    return value;
}

static problem problem_new(sp_test_random *random, int64_t rows, int64_t n, int64_t k, int kind)
{
    problem p = {.rows = rows, .n = n, .k = k, .x_stride = k + 3, .w_stride = k + 5};

    p.x = guarded_new((size_t)((rows - 1) * p.x_stride + k) * 2, 2);
    p.w = guarded_new((size_t)((n - 1) * p.w_stride + k) * 2, 2);
    p.sums = malloc((size_t)(rows * n) * sizeof *p.sums);
    assert_non_null(p.sums);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < k; c++)
            sp_element_store(SP_DTYPE_BF16, p.x.data, i * p.x_stride + c, sample(random, kind));
    for (int64_t j = 0; j < n; j++)
        for (int64_t c = 0; c < k; c++)
            sp_element_store(SP_DTYPE_BF16, p.w.data, j * p.w_stride + c, sample(random, kind));
    if (kind == 2) /* subnormal inputs as well */
        for (int64_t c = 0; c < k; c += 3)
            ((uint16_t *)(void *)p.x.data)[c] = (uint16_t)(0x8000u * (c & 1) + 1 + c % 0x7f);
    return p;
}

static void problem_free(problem *p)
{
    guarded_free(&p->x);
    guarded_free(&p->w);
    free(p->sums);
}

/* y [rows, n] FP32; the first row_split rows in a call of their own. */
static void run(const sp_kernels *kernels, const problem *p, int64_t row_split, int64_t n_split,
                float *y)
{
    size_t bytes = kernels->x_pack_bytes(SP_DTYPE_BF16, SP_DTYPE_BF16, p->rows, p->k);
    void *packed = aligned_alloc(64, bytes);
    sp_gemm_args args = {
        .packed_x = packed,
        .x_type = SP_DTYPE_BF16,
        .w_type = SP_DTYPE_BF16,
        .y_type = SP_DTYPE_F32,
        .rows = p->rows,
        .n = p->n,
        .k = p->k,
        .w = p->w.data,
        .w_stride = p->w_stride,
        .y = y,
        .y_stride = p->n,
    };

    assert_non_null(packed);
    memset(packed, GUARD_BYTE, bytes);
    memset(y, GUARD_BYTE, (size_t)(p->rows * p->n) * sizeof *y);
    kernels->x_pack(packed, SP_DTYPE_BF16, SP_DTYPE_BF16, p->x.data, p->x_stride, NULL, p->rows,
                    p->k, 0, p->rows);
    row_split = row_split < p->rows ? row_split : p->rows;
    n_split = n_split < p->n ? n_split : p->n;
    if (row_split > 0)
        kernels->gemm_nt(&args, 0, row_split, 0, p->n);
    if (n_split > 0 && row_split < p->rows)
        kernels->gemm_nt(&args, row_split, p->rows, 0, n_split);
    if (n_split < p->n && row_split < p->rows)
        kernels->gemm_nt(&args, row_split, p->rows, n_split, p->n);
    free(packed);
}

/* ---- tests --------------------------------------------------------------------------------- */

static sp_kernels emulated_table;

static const sp_kernels *emulated_or_skip(void)
{
    const sp_kernels *base = NULL;

    if (sp_kernels_get("avx2", &base, NULL) != SP_OK) {
        print_message("skipped: this machine lacks avx2, which surrounds the emulated tiles\n");
        skip();
    }
    emulated_table = *base;
    fill_amx_emulated(&emulated_table, base);
    emulated_table.level = "amx over emulated tiles";
    return &emulated_table;
}

static const int64_t shapes[][3] = {/* rows, n, k */
                                    {1, 1, 1},    {1, 16, 32},   {2, 17, 33},   {3, 8, 64},
                                    {7, 33, 97},  {15, 48, 31},  {16, 32, 128}, {17, 64, 65},
                                    {31, 13, 96}, {32, 80, 40},  {33, 96, 200}, {48, 65, 129},
                                    {49, 17, 64}, {50, 40, 97},  {64, 48, 130}, {65, 40, 63},
                                    {97, 47, 64}, {130, 130, 70}};

static void check_against_order(const sp_kernels *kernels, const problem *p, float *y)
{
    const uint16_t *x = (const uint16_t *)(const void *)p->x.data;
    const uint16_t *w = (const uint16_t *)(const void *)p->w.data;

    run(kernels, p, 0, 0, y);
    for (int64_t i = 0; i < p->rows; i++)
        for (int64_t j = 0; j < p->n; j++) {
            float expected = ordered_sum(w + j * p->w_stride, x + i * p->x_stride, p->k);

            if (memcmp(&expected, &y[i * p->n + j], sizeof expected) != 0)
                fail_msg("%lld x %lld x %lld at %lld, %lld: got %a, expected %a",
                         (long long)p->rows, (long long)p->n, (long long)p->k, (long long)i,
                         (long long)j, (double)y[i * p->n + j], (double)expected);
        }
}

/* Few rows take another way through the code than many: the bits of `y`, what they are together. */
static void check_rows_alone(const sp_kernels *kernels, const problem *p, const float *y)
{
    float *alone = malloc((size_t)(p->rows * p->n) * sizeof *alone);

    assert_non_null(alone);
    for (int64_t at_once = 1; at_once <= 5; at_once++)
        for (int64_t i = 0; i + at_once <= p->rows; i += at_once) {
            problem few = *p;

            few.rows = at_once;
            few.x.data = (void *)((uint16_t *)(void *)p->x.data + i * p->x_stride);
            run(kernels, &few, 0, 0, alone);
            assert_memory_equal(alone, y + i * p->n, (size_t)(at_once * p->n) * sizeof *y);
        }
    free(alone);
}

static void sums_follow_the_documented_order(void **state)
{
    const sp_kernels *kernels = emulated_or_skip();
    sp_test_random random = {31};

    (void)state;
    for (size_t s = 0; s < COUNT(shapes); s++)
        for (int kind = 0; kind < 3; kind++) {
            problem p = problem_new(&random, shapes[s][0], shapes[s][1], shapes[s][2], kind);

            check_against_order(kernels, &p, p.sums);
            check_rows_alone(kernels, &p, p.sums);
            problem_free(&p);
        }
}

static void splits_change_nothing(void **state)
{
    const sp_kernels *kernels = emulated_or_skip();
    sp_test_random random = {32};

    (void)state;
    for (size_t s = 0; s < COUNT(shapes); s++) {
        problem p = problem_new(&random, shapes[s][0], shapes[s][1], shapes[s][2], 0);
        float *y = malloc((size_t)(p.rows * p.n) * sizeof *y);

        assert_non_null(y);
        run(kernels, &p, 0, 0, p.sums);
        run(kernels, &p, 16, 16, y);
        assert_memory_equal(y, p.sums, (size_t)(p.rows * p.n) * sizeof *y);
        run(kernels, &p, 48, 64, y);
        assert_memory_equal(y, p.sums, (size_t)(p.rows * p.n) * sizeof *y);
        free(y);
        problem_free(&p);
    }
}

/* The form of AVX-512 for one row, which the emulation does without. */
static void wide_sums_follow_the_documented_order(void **state)
{
    const sp_kernels *wide = NULL;
    sp_test_random random = {34};
    unsigned mode = _mm_getcsr();

    (void)state;
    if (sp_kernels_get("avx512", &wide, NULL) != SP_OK) {
        print_message("skipped: this machine lacks avx512\n");
        skip();
    }
    for (int64_t k = 1; k <= 208; k += k < 64 ? 1 : 8)
        for (int kind = 0; kind < 3; kind++) {
            problem p = problem_new(&random, 1, 40, k, kind);
            const uint16_t *x = (const uint16_t *)(const void *)p.x.data;
            const uint16_t *w = (const uint16_t *)(const void *)p.w.data;
            float plain[256];
            int64_t done;

            pack_plain(plain, x, k);
            _mm_setcsr(mode | FLUSH_SUBNORMALS);
            done = sp_few_sums_avx512(w, p.w_stride, plain, k, p.n, 0, p.sums);
            _mm_setcsr(mode);
            assert_int_equal(done, k % 16 == 0 || k < 64 ? 32 : 0);
            for (int64_t j = 0; j < done; j++) {
                float expected = ordered_sum(w + j * p.w_stride, x, k);

                assert_memory_equal(&expected, &p.sums[j], sizeof expected);
            }
            problem_free(&p);
        }
}

/* ---- one row of each of several GEMMs -------------------------------------------------------- */

enum { LONE_MAX = 40, LONE_N = 150 };

typedef struct lone_rows {
    problem problems[LONE_MAX];
    void *packed[LONE_MAX];
    sp_gemm_args args[LONE_MAX];
    const sp_gemm_args *gemms[LONE_MAX];
    int32_t row[LONE_MAX]; /* of y */
    float scale[LONE_MAX];
    int32_t count;
} lone_rows;

/* Ranks with a form of their own, others, and rows whose scale is 0. */
static void lone_rows_fill(lone_rows *lone, const sp_kernels *kernels, sp_test_random *random,
                           int32_t count, sp_dtype y_type)
{
    static const int64_t ks[] = {16, 8, 16, 64, 16, 5, 72, 48, 16, 32, 128, 20, 1};

    *lone = (lone_rows){.count = count};
    for (int32_t i = 0; i < count; i++) {
        problem *p = &lone->problems[i];
        int64_t k = ks[i % (int32_t)COUNT(ks)];

        *p = problem_new(random, 1, LONE_N, k, i % 3);
        lone->packed[i] =
            aligned_alloc(64, kernels->x_pack_bytes(SP_DTYPE_BF16, SP_DTYPE_BF16, 1, k));
        assert_non_null(lone->packed[i]);
        kernels->x_pack(lone->packed[i], SP_DTYPE_BF16, SP_DTYPE_BF16, p->x.data, p->x_stride, NULL,
                        1, k, 0, 1);
        lone->row[i] = count - 1 - i;
        lone->scale[i] = i % 7 == 6 ? 0.0f : 0.75f + (float)i;
        lone->args[i] = (sp_gemm_args){
            .packed_x = lone->packed[i],
            .x_type = SP_DTYPE_BF16,
            .w_type = SP_DTYPE_BF16,
            .y_type = y_type,
            .delta_type = SP_DTYPE_BF16,
            .epilogue = SP_EPILOGUE_FOLD,
            .rows = 1,
            .n = LONE_N,
            .k = k,
            .w = p->w.data,
            .w_stride = p->w_stride,
            .y_stride = LONE_N,
            .row_index = &lone->row[i],
            .scale = &lone->scale[i],
        };
        lone->gemms[i] = &lone->args[i];
    }
}

static void lone_rows_free(lone_rows *lone)
{
    for (int32_t i = 0; i < lone->count; i++) {
        problem_free(&lone->problems[i]);
        free(lone->packed[i]);
    }
}

static void *y_of_lone_rows(lone_rows *lone, sp_dtype y_type)
{
    size_t n = (size_t)lone->count * LONE_N;
    void *y = malloc(n * sp_dtype_bytes(y_type));
    sp_test_random random = {36};

    assert_non_null(y);
    for (size_t i = 0; i < n; i++)
        sp_element_store(y_type, y, (int64_t)i, sp_test_float(&random));
    for (int32_t i = 0; i < lone->count; i++)
        lone->args[i].y = y;
    return y;
}

/* Columns [begin, end) of all of them together and one by one. */
static void check_lone_rows(const sp_kernels *kernels, int32_t count, sp_dtype y_type,
                            int64_t begin, int64_t end)
{
    sp_test_random random = {35};
    lone_rows lone;
    void *want, *got;

    lone_rows_fill(&lone, kernels, &random, count, y_type);
    want = y_of_lone_rows(&lone, y_type);
    for (int32_t i = 0; i < count; i++)
        kernels->gemm_nt(&lone.args[i], 0, 1, begin, end);
    got = y_of_lone_rows(&lone, y_type);
    kernels->gemm_nt_lone(lone.gemms, count, begin, end);
    assert_memory_equal(got, want, (size_t)count * LONE_N * sp_dtype_bytes(y_type));
    free(got);
    free(want);
    lone_rows_free(&lone);
}

static void check_lone_rows_of(const sp_kernels *kernels)
{
    static const int32_t counts[] = {0, 1, 2, 16, 17, LONE_MAX};
    static const sp_dtype types[] = {SP_DTYPE_BF16, SP_DTYPE_F32, SP_DTYPE_F16};

    for (size_t c = 0; c < COUNT(counts); c++)
        for (size_t t = 0; t < COUNT(types); t++) {
            check_lone_rows(kernels, counts[c], types[t], 0, LONE_N);
            check_lone_rows(kernels, counts[c], types[t], 16, 48);
            check_lone_rows(kernels, counts[c], types[t], 144, LONE_N);
        }
}

static void lone_rows_have_the_bits_of_gemm_nt(void **state)
{
    const sp_kernels *emulation = emulated_or_skip();

    (void)state;
    check_lone_rows_of(emulation);
    for (const char *const *level = sp_kernels_levels(); *level != NULL; level++) {
        const sp_kernels *kernels = NULL;

        assert_int_equal(sp_kernels_get(*level, &kernels, NULL), SP_OK);
        check_lone_rows_of(kernels);
        if (strcmp(*level, "avx512") != 0)
            continue;
        lone_rows_are_wide = true; /* against the emulation's gemm_nt */
        check_lone_rows_of(emulation);
        lone_rows_are_wide = false;
    }
}

static void other_types_use_the_level_below(void **state)
{
    const sp_kernels *kernels = emulated_or_skip(), *base = NULL;
    uint16_t x[40] = {0x3c00, 0x3800}, w[40] = {0x4000, 0x4200};
    float y = 0.0f;
    alignas(64) char packed[4096];
    sp_gemm_args args = {.packed_x = packed,
                         .x_type = SP_DTYPE_F16,
                         .w_type = SP_DTYPE_F16,
                         .y_type = SP_DTYPE_F32,
                         .rows = 1,
                         .n = 1,
                         .k = 40,
                         .w = w,
                         .w_stride = 40,
                         .y = &y,
                         .y_stride = 1};

    (void)state;
    assert_int_equal(sp_kernels_get("avx2", &base, NULL), SP_OK);
    assert_int_equal(kernels->x_pack_bytes(SP_DTYPE_F16, SP_DTYPE_F16, 3, 40),
                     base->x_pack_bytes(SP_DTYPE_F16, SP_DTYPE_F16, 3, 40));
    kernels->x_pack(packed, SP_DTYPE_F16, SP_DTYPE_F16, x, 40, NULL, 1, 40, 0, 1);
    kernels->gemm_nt(&args, 0, 1, 0, 1);
    assert_true(y == 1.0f * 2.0f + 0.5f * 3.0f);
}

/* The instruction itself against the emulation, where there is one. */
static void hardware_has_the_same_bits(void **state)
{
    const sp_kernels *emulation, *hardware = NULL;
    sp_test_random random = {33};

    (void)state;
    if (sp_kernels_get("amx", &hardware, NULL) != SP_OK) {
        print_message("skipped: this machine or build lacks level amx\n");
        skip();
    }
    emulation = emulated_or_skip();
    for (size_t s = 0; s < COUNT(shapes); s++)
        for (int kind = 0; kind < 3; kind++) {
            problem p = problem_new(&random, shapes[s][0], shapes[s][1], 4 * shapes[s][2], kind);
            float *y = malloc((size_t)(p.rows * p.n) * sizeof *y);

            assert_non_null(y);
            run(emulation, &p, 0, 0, p.sums);
            run(hardware, &p, 0, 0, y);
            assert_memory_equal(y, p.sums, (size_t)(p.rows * p.n) * sizeof *y);
            check_rows_alone(hardware, &p, y);
            free(y);
            problem_free(&p);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_follow_the_documented_order),
        cmocka_unit_test(splits_change_nothing),
        cmocka_unit_test(wide_sums_follow_the_documented_order),
        cmocka_unit_test(lone_rows_have_the_bits_of_gemm_nt),
        cmocka_unit_test(other_types_use_the_level_below),
        cmocka_unit_test(hardware_has_the_same_bits),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

#else

int main(void)
{
    print_message("skipped: test_tiles needs AVX2, which surrounds the emulated tiles\n");
    return 77;
}

#endif
