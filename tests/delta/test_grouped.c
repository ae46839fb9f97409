/*
 * The grouped GEMM in FP16: every case of the fixtures at every level, against output_ref,
 * output_staged and the same sums in double with our rounding points; rows of rank 0; weights that
 * are NaN outside the ranks; the same bits for a segment alone, in other tiles and on other
 * threads; the queries; and every kind of bad metadata.
 */
#include "support/golden.h"
#include "support/hand.h"
#include "support/test.h"

#include "base/alloc.h"
#include "kernels/cpu/kernels.h"

#include <sidepath/grouped.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CASES = 8 };

static void *make_workspace(sp_grouped_lora_params *params)
{
    params->workspace_bytes =
        sp_grouped_lora_workspace_bytes(params->total_rows, params->output_size, params->max_rank);
    assert_true(params->workspace_bytes > 0);
    params->workspace = sp_aligned_calloc(params->workspace_bytes, 256);
    assert_non_null(params->workspace);
    memset(params->workspace, 0xff, params->workspace_bytes); /* NaN: nothing may come from it */
    return params->workspace;
}

/* The largest rank that the stride allows does as well as the case's own. */
static sp_grouped_lora_params open_case(const golden *file, int index, void *output)
{
    const golden_tensor *input = golden_get(file, "g%02d.input", index);
    const golden_tensor *a = golden_get(file, "g%02d.loraA", index);
    const golden_tensor *b = golden_get(file, "g%02d.loraB", index);
    const golden_tensor *ids = golden_get(file, "g%02d.segmentAdapterIds", index);

    return (sp_grouped_lora_params){
        .struct_bytes = sizeof(sp_grouped_lora_params),
        .input = input->data,
        .lora_a = a->data,
        .lora_b = b->data,
        .output = output,
        .segment_offsets = golden_i32(golden_get(file, "g%02d.segmentOffsets", index)),
        .segment_adapters = golden_i32(ids),
        .ranks = golden_i32(golden_get(file, "g%02d.adapterRanks", index)),
        .scales = golden_f32(golden_get(file, "g%02d.adapterScales", index)),
        .total_rows = (int32_t)input->shape[0],
        .input_size = (int32_t)input->shape[1],
        .output_size = (int32_t)b->shape[2],
        .max_rank = (int32_t)a->shape[2],
        .n_segments = (int32_t)ids->shape[0],
        .n_adapters = (int32_t)a->shape[0],
    };
}

static uint16_t *copy_output(const golden *file, int index)
{
    const golden_tensor *start = golden_get(file, "g%02d.output0", index);
    uint16_t *output = malloc(start->bytes);

    assert_non_null(output);
    memcpy(output, start->data, start->bytes);
    return output;
}

/* ---- the fixtures -------------------------------------------------------------------------- */

static double round_f16(double value)
{
    uint16_t half;

    hand_store(SP_DTYPE_F16, &half, 0, value);
    return hand_load(SP_DTYPE_F16, &half, 0);
}

/* xa [rank] of one row: each sum in double, rounded once. */
static void staged_xa(const golden *file, int index, const sp_grouped_lora_params *p,
                      int32_t adapter, int32_t row, double *xa)
{
    const golden_tensor *a = golden_get(file, "g%02d.loraA", index);
    int64_t stride = a->shape[2], in = p->input_size;

    for (int32_t j = 0; j < p->ranks[adapter]; j++) {
        xa[j] = 0;
        for (int64_t k = 0; k < in; k++)
            xa[j] += hand_load(SP_DTYPE_F16, p->input, row * in + k) *
                     golden_value(a, (adapter * in + k) * stride + j);
        xa[j] = round_f16(xa[j]);
    }
}

static double staged_delta(const golden *file, int index, const sp_grouped_lora_params *p,
                           int32_t adapter, int32_t n, const double *xa)
{
    const golden_tensor *b = golden_get(file, "g%02d.loraB", index);
    double delta = 0;

    for (int32_t j = 0; j < p->ranks[adapter]; j++)
        delta += xa[j] * golden_value(b, (adapter * b->shape[1] + j) * p->output_size + n);
    return round_f16(delta);
}

/* A row of one segment of a case, with its xa. */
typedef struct case_row {
    int index;
    int32_t adapter, row;
    double xa[SP_GROUPED_LORA_RANK_MAX];
} case_row;

static double unit_of(double value)
{
    int exponent;

    (void)frexp(value, &exponent);
    return ldexp(1, exponent - 11);
}

typedef struct case_sums {
    int64_t elements, differing; /* from staged_output */
    double error, norm;          /* against output_ref */
} case_sums;

/*
 * Our rounding points are three. The fixtures' output_staged has two, its delta is not rounded
 * before the scale: what that half unit of the delta, and one more where an xa rounds the other
 * way, can do to y is the distance allowed there.
 */
static void check_element(const golden *file, const sp_grouped_lora_params *p, const case_row *r,
                          int32_t n, case_sums *sums)
{
    int64_t at = (int64_t)r->row * p->output_size + n;
    double scale = (double)p->scales[r->adapter];
    double got = hand_load(SP_DTYPE_F16, p->output, at);
    double delta = staged_delta(file, r->index, p, r->adapter, n, r->xa);
    double start = golden_value(golden_get(file, "g%02d.output0", r->index), at);
    double want = golden_value(golden_get(file, "g%02d.output_ref", r->index), at);
    double staged = golden_value(golden_get(file, "g%02d.output_staged", r->index), at);

    sums->elements++;
    sums->differing += got != round_f16(start + scale * delta);
    sums->error += (got - want) * (got - want);
    sums->norm += want * want;
    if (fabs(got - staged) >
        1.5 * fabs(scale) * unit_of(delta) + unit_of(fmax(fabs(got), fabs(staged))))
        fail_msg("g%02d [%d, %d]: %g, output_staged %g", r->index, (int)r->row, (int)n, got,
                 staged);
}

static void check_output(const golden *file, int index, const sp_grouped_lora_params *p,
                         case_sums *total)
{
    const uint16_t *start = golden_get(file, "g%02d.output0", index)->data;
    size_t width = (size_t)p->output_size;
    case_sums sums = {0, 0, 0, 0};

    for (int32_t g = 0; g < p->n_segments; g++)
        for (int32_t row = p->segment_offsets[g]; row < p->segment_offsets[g + 1]; row++) {
            case_row r = {.index = index, .adapter = p->segment_adapters[g], .row = row};
            size_t at = (size_t)row * width;

            if (p->ranks[r.adapter] == 0) {
                assert_memory_equal((uint16_t *)p->output + at, start + at, width * 2);
                continue;
            }
            staged_xa(file, index, p, r.adapter, row, r.xa);
            for (int32_t n = 0; n < p->output_size; n++)
                check_element(file, p, &r, n, &sums);
        }
    if (!(sqrt(sums.error / sums.norm) <= 6e-4))
        fail_msg("g%02d: relative error %g", index, sqrt(sums.error / sums.norm));
    total->elements += sums.elements;
    total->differing += sums.differing;
}

static void every_case_matches(void **state)
{
    golden *file = golden_open("kernels/grouped.safetensors");
    sp_exec *exec = hand_exec(2);

    (void)state;
    for (const char *const *level = sp_kernels_levels(); *level != NULL; level++) {
        case_sums total = {0, 0, 0, 0};

        for (int index = 0; index < CASES; index++) {
            uint16_t *output = copy_output(file, index);
            sp_grouped_lora_params params = open_case(file, index, output);
            sp_error error;

            make_workspace(&params);
            assert_ok(sp_grouped_lora_gemm(&params, exec, *level, &error), &error);
            check_output(file, index, &params, &total);
            sp_aligned_free(params.workspace);
            free(output);
        }
        /* Measured: 8 of 10,048 at levels scalar and avx2. */
        print_message("%s: %lld of %lld elements differ from the staged ones\n", *level,
                      (long long)total.differing, (long long)total.elements);
        assert_true((double)total.differing <= 0.002 * (double)total.elements);
    }
    sp_exec_destroy(exec);
    golden_close(file);
}

/* ---- one row, one answer ------------------------------------------------------------------- */

/* Each segment as a call of its own, and each row as a segment of its own, give the same bytes. */
static void bits_do_not_depend_on_segments_or_threads(void **state)
{
    golden *file = golden_open("kernels/grouped.safetensors");
    sp_exec *three = hand_exec(3);
    sp_error error;

    (void)state;
    for (int index = 0; index < CASES; index++) {
        uint16_t *together = copy_output(file, index), *apart = copy_output(file, index);
        sp_grouped_lora_params params = open_case(file, index, together), single;
        void *workspace = make_workspace(&params);
        size_t width = (size_t)params.output_size, in = (size_t)params.input_size;

        assert_ok(sp_grouped_lora_gemm(&params, three, NULL, &error), &error);
        single = params;
        for (int32_t g = 0; g < params.n_segments; g++)
            for (int32_t row = params.segment_offsets[g]; row < params.segment_offsets[g + 1];
                 row++) {
                single.input = (const uint16_t *)params.input + (size_t)row * in;
                single.output = apart + (size_t)row * width;
                single.segment_offsets = (int32_t[]){0, 1};
                single.segment_adapters = &params.segment_adapters[g];
                single.total_rows = single.n_segments = 1;
                assert_ok(sp_grouped_lora_gemm(&single, NULL, NULL, &error), &error);
            }
        assert_memory_equal(apart, together, (size_t)params.total_rows * width * 2);
        sp_aligned_free(workspace);
        free(together);
        free(apart);
    }
    sp_exec_destroy(three);
    golden_close(file);
}

/* Sizes beyond one block of k (8192 / S rows of A) and one of the output (512). */
static void large_sizes_match_double(void **state)
{
    enum { ROWS = 11, IN = 1100, OUT = 1300, RANK = 9, STRIDE = 16 };
    uint16_t *x = malloc(2 * ROWS * IN), *a = malloc(2 * IN * STRIDE);
    uint16_t *b = malloc(2 * STRIDE * OUT), *y = calloc(ROWS * OUT, 2);
    sp_test_random random = {11};
    const float scale = 0.5f;
    sp_grouped_lora_params params = {
        .struct_bytes = sizeof(sp_grouped_lora_params),
        .input = x,
        .lora_a = a,
        .lora_b = b,
        .output = y,
        .segment_offsets = (int32_t[]){0, ROWS},
        .segment_adapters = (int32_t[]){0},
        .ranks = (int32_t[]){RANK},
        .scales = &scale,
        .total_rows = ROWS,
        .input_size = IN,
        .output_size = OUT,
        .max_rank = RANK,
        .n_segments = 1,
        .n_adapters = 1,
    };
    sp_exec *exec = hand_exec(2);
    double error = 0, norm = 0;

    (void)state;
    for (int i = 0; i < ROWS * IN; i++)
        hand_store(SP_DTYPE_F16, x, i, (double)sp_test_float(&random));
    for (int i = 0; i < IN * STRIDE; i++)
        hand_store(SP_DTYPE_F16, a, i, i % STRIDE < RANK ? (double)sp_test_float(&random) : NAN);
    for (int i = 0; i < STRIDE * OUT; i++)
        hand_store(SP_DTYPE_F16, b, i, i / OUT < RANK ? (double)sp_test_float(&random) : NAN);
    make_workspace(&params);
    assert_ok(sp_grouped_lora_gemm(&params, exec, NULL, NULL), NULL);
    for (int row = 0; row < ROWS; row++) {
        double xa[RANK] = {0};

        for (int i = 0; i < IN * RANK; i++)
            xa[i % RANK] += hand_load(SP_DTYPE_F16, x, row * IN + i / RANK) *
                            hand_load(SP_DTYPE_F16, a, i / RANK * STRIDE + i % RANK);
        for (int n = 0; n < OUT; n++) {
            double want = 0;

            for (int j = 0; j < RANK; j++)
                want += (double)scale * xa[j] * hand_load(SP_DTYPE_F16, b, j * OUT + n);
            error += pow(hand_load(SP_DTYPE_F16, y, row * OUT + n) - want, 2);
            norm += want * want;
        }
    }
    assert_true(sqrt(error / norm) <= 6e-4);
    sp_aligned_free(params.workspace);
    sp_exec_destroy(exec);
    free(x);
    free(a);
    free(b);
    free(y);
}

/* ---- queries and refusals ------------------------------------------------------------------ */

static void queries(void **state)
{
    (void)state;
    assert_int_equal(sp_grouped_lora_rank_stride(1), 8);
    assert_int_equal(sp_grouped_lora_rank_stride(8), 8);
    assert_int_equal(sp_grouped_lora_rank_stride(9), 16);
    assert_int_equal(sp_grouped_lora_rank_stride(SP_GROUPED_LORA_RANK_MAX),
                     SP_GROUPED_LORA_RANK_MAX);
    assert_int_equal(sp_grouped_lora_rank_stride(0), 0);
    assert_int_equal(sp_grouped_lora_rank_stride(-8), 0);
    assert_int_equal(sp_grouped_lora_rank_stride(SP_GROUPED_LORA_RANK_MAX + 1), 0);
    assert_int_equal(sp_grouped_lora_workspace_bytes(0, 8, 8), 0);
    assert_int_equal(sp_grouped_lora_workspace_bytes(SP_GROUPED_LORA_ROWS_MAX + 1, 8, 8), 0);
    assert_int_equal(sp_grouped_lora_workspace_bytes(8, 0, 8), 0);
    assert_int_equal(sp_grouped_lora_workspace_bytes(8, SP_GROUPED_LORA_WIDTH_MAX + 1, 8), 0);
    assert_int_equal(sp_grouped_lora_workspace_bytes(8, 8, 0), 0);
    assert_int_equal(sp_grouped_lora_workspace_bytes(8, 8, SP_GROUPED_LORA_RANK_MAX + 1), 0);
    assert_true(sp_grouped_lora_workspace_bytes(SP_GROUPED_LORA_ROWS_MAX, SP_GROUPED_LORA_WIDTH_MAX,
                                                SP_GROUPED_LORA_RANK_MAX) > 0);
}

/* Four rows in two segments, two adapters of rank 2 and 0, everything in order. */
typedef struct small_call {
    uint16_t x[4 * 3], a[2 * 3 * 8], b[2 * 8 * 5], y[4 * 5];
    int32_t offsets[3], ids[2], ranks[2];
    float scales[2];
    sp_grouped_lora_params params;
} small_call;

static void reset_call(small_call *c, void *workspace)
{
    *c = (small_call){.offsets = {0, 1, 4}, .ids = {1, 0}, .ranks = {2, 0}, .scales = {1, 1}};
    c->params = (sp_grouped_lora_params){
        .struct_bytes = sizeof(sp_grouped_lora_params),
        .input = c->x,
        .lora_a = c->a,
        .lora_b = c->b,
        .output = c->y,
        .workspace = workspace,
        .workspace_bytes = sp_grouped_lora_workspace_bytes(4, 5, 2),
        .segment_offsets = c->offsets,
        .segment_adapters = c->ids,
        .ranks = c->ranks,
        .scales = c->scales,
        .total_rows = 4,
        .input_size = 3,
        .output_size = 5,
        .max_rank = 2,
        .n_segments = 2,
        .n_adapters = 2,
    };
}

static void refuse(small_call *c, sp_exec *exec, void *workspace, sp_status status,
                   const char *subject, int64_t position)
{
    sp_error error = {.status = SP_OK};

    assert_int_equal(sp_grouped_lora_gemm(&c->params, exec, NULL, &error), status);
    assert_int_equal(error.status, status);
    assert_string_equal(error.subject, subject);
    assert_int_equal(error.position, position);
    assert_int_equal(sp_grouped_lora_check(&c->params, NULL), status);
    for (size_t i = 0; i < 4 * 5; i++)
        assert_int_equal(c->y[i], 0);
    reset_call(c, workspace);
}

static void bad_metadata_is_named(void **state)
{
    static const int32_t bad_offsets[][4] = {/* the offsets, then the position */
                                             {1, 2, 4, 0},  {0, 0, 4, 1}, {0, 4, 4, 2},
                                             {0, -1, 4, 1}, {0, 1, 3, 2}, {0, 1, 5, 2}};
    void *workspace = sp_aligned_calloc(4096, 256);
    sp_exec *exec = hand_exec(1);
    small_call c;

    (void)state;
    reset_call(&c, workspace);
    assert_ok(sp_grouped_lora_check(&c.params, NULL), NULL);
    assert_ok(sp_grouped_lora_gemm(&c.params, exec, NULL, NULL), NULL);
    for (size_t i = 0; i < sizeof bad_offsets / sizeof bad_offsets[0]; i++) {
        memcpy(c.offsets, bad_offsets[i], sizeof c.offsets);
        refuse(&c, exec, workspace, SP_ERR_INPUT, "segment_offsets", bad_offsets[i][3]);
    }
    c.ids[1] = 2;
    refuse(&c, exec, workspace, SP_ERR_INPUT, "segment_adapters", 1);
    c.ids[0] = -1;
    refuse(&c, exec, workspace, SP_ERR_INPUT, "segment_adapters", 0);
    c.ranks[0] = 3;
    refuse(&c, exec, workspace, SP_ERR_INPUT, "ranks", 0);
    c.ranks[1] = -1;
    refuse(&c, exec, workspace, SP_ERR_INPUT, "ranks", 1);
    c.scales[1] = NAN;
    refuse(&c, exec, workspace, SP_ERR_INPUT, "scales", 1);
    c.scales[0] = INFINITY;
    refuse(&c, exec, workspace, SP_ERR_INPUT, "scales", 0);
    sp_exec_destroy(exec);
    sp_aligned_free(workspace);
}

static void bad_arguments_are_refused(void **state)
{
    void *workspace = sp_aligned_calloc(4096, 256);
    sp_exec *exec = hand_exec(1);
    small_call c;

    (void)state;
    reset_call(&c, workspace);
#define REFUSED(field, value, subject) \
    c.params.field = value;            \
    refuse(&c, exec, workspace, SP_ERR_ARGUMENT, subject, -1)
#define UNSUPPORTED(field, value) \
    c.params.field = value;       \
    refuse(&c, exec, workspace, SP_ERR_UNSUPPORTED, #field, -1)
    REFUSED(input, NULL, "input");
    REFUSED(lora_a, NULL, "lora_a");
    REFUSED(lora_b, NULL, "lora_b");
    REFUSED(output, NULL, "output");
    REFUSED(segment_offsets, NULL, "segment_offsets");
    REFUSED(segment_adapters, NULL, "segment_adapters");
    REFUSED(ranks, NULL, "ranks");
    REFUSED(scales, NULL, "scales");
    REFUSED(workspace, NULL, "workspace");
    REFUSED(workspace, (char *)workspace + 64, "workspace");
    REFUSED(workspace_bytes, c.params.workspace_bytes - 1, "workspace");
    REFUSED(total_rows, 0, "total_rows");
    REFUSED(input_size, 0, "input_size");
    REFUSED(output_size, 0, "output_size");
    REFUSED(max_rank, 0, "max_rank");
    REFUSED(n_segments, 0, "n_segments");
    REFUSED(n_segments, 5, "n_segments");
    REFUSED(n_adapters, 0, "n_adapters");
    c.params.struct_bytes = 0;
    refuse(&c, exec, workspace, SP_ERR_ARGUMENT, "sp_grouped_lora_params", 0);
    UNSUPPORTED(total_rows, SP_GROUPED_LORA_ROWS_MAX + 1);
    UNSUPPORTED(input_size, SP_GROUPED_LORA_WIDTH_MAX + 1);
    UNSUPPORTED(output_size, SP_GROUPED_LORA_WIDTH_MAX + 1);
    UNSUPPORTED(max_rank, SP_GROUPED_LORA_RANK_MAX + 1);
#undef UNSUPPORTED
#undef REFUSED
    assert_int_equal(sp_grouped_lora_gemm(NULL, exec, NULL, NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_grouped_lora_gemm(&c.params, exec, "mmx", NULL), SP_ERR_ARGUMENT);
    sp_exec_destroy(exec);
    sp_aligned_free(workspace);
}

/* The calls for a GPU, where there is none. */
static void calls_for_a_gpu_say_so(void **state)
{
    sp_device *device = NULL;
    sp_grouped_lora *grouped = NULL;
    sp_error error;

    (void)state;
    assert_ok(sp_device_open("cpu", NULL, &device, NULL), NULL);
    assert_int_equal(sp_grouped_lora_create(device, &grouped, &error), SP_ERR_UNSUPPORTED);
    assert_string_equal(error.subject, "cpu");
    assert_int_equal(sp_grouped_lora_create(NULL, &grouped, &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_grouped_lora_launch(NULL, NULL, NULL, &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_grouped_lora_check_device(NULL, NULL, NULL, &error), SP_ERR_ARGUMENT);
    sp_grouped_lora_destroy(NULL);
    sp_device_close(device);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_case_matches),
        cmocka_unit_test(bits_do_not_depend_on_segments_or_threads),
        cmocka_unit_test(large_sizes_match_double),
        cmocka_unit_test(queries),
        cmocka_unit_test(bad_metadata_is_named),
        cmocka_unit_test(bad_arguments_are_refused),
        cmocka_unit_test(calls_for_a_gpu_say_so),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
