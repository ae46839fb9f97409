/*
 * test_tiles.c: the amx level's code over emulated tiles, compared by memcmp with its documented
 * order of summation written out once more, subnormals included; and where the machine has tiles,
 * the hardware's bits against the emulation's.
 */
#include "kernel_test.h"

#if defined(__AVX2__) && defined(__FMA__)

#define SP_TILES_EMULATED
#define EPILOGUE sp_gemm_epilogue_avx2
/* What is of AVX-512 is tested by test_gemm.c, where the machine has it. */
#define TRANSPOSED_EPILOGUE(...) false
#define PACK_TILES               plain_pack_tiles
#define FEW_SUMS(...)            0
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

void fill_amx_emulated(sp_kernels *kernels, const sp_kernels *below);
#include "kernels/cpu/gemm_amx.c"

#define COUNT(array) (sizeof(array) / sizeof *(array))

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
    for (int64_t k = 8; k <= 208; k += 8)
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
            assert_int_equal(done, k % 16 == 0 && k >= 64 ? 32 : 0);
            for (int64_t j = 0; j < done; j++) {
                float expected = ordered_sum(w + j * p.w_stride, x, k);

                assert_memory_equal(&expected, &p.sums[j], sizeof expected);
            }
            problem_free(&p);
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
