/*
 * The deltas of experts and routers on the CPU: every case of the kernel fixtures; against a double
 * reference with the tree's rounding points; and each row has the bits of the single form of its
 * own pair, whatever the form, the order, the window and the rows beside it.
 */
#include "base/alloc.h"
#include "base/half.h"
#include "delta/delta_state.h"
#include "pool/image.h"
#include "support/delta_call.h"
#include "support/golden.h"
#include "support/hand.h"

#include <sidepath/experts.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- a layer ------------------------------------------------------------------------------- */

enum { HIDDEN = 40, INTER = 24, SHARED = 20, EXPERTS = 7, ADAPTERS = 3, TOP_K = 3, PAD = 3 };

static const site_dims dims[] = {
    {0, SP_MODULE_Q_PROJ, HIDDEN, 16},
    {0, SP_MODULE_SHARED_GATE_PROJ, HIDDEN, SHARED},
    {0, SP_MODULE_SHARED_UP_PROJ, HIDDEN, SHARED},
    {0, SP_MODULE_SHARED_DOWN_PROJ, SHARED, HIDDEN},
    {0, SP_MODULE_SHARED_EXPERT_GATE, HIDDEN, 1},
    {0, SP_MODULE_ROUTER, HIDDEN, EXPERTS},
    {0, SP_MODULE_EXPERT_GATE_PROJ, HIDDEN, INTER},
    {0, SP_MODULE_EXPERT_UP_PROJ, HIDDEN, INTER},
    {0, SP_MODULE_EXPERT_DOWN_PROJ, INTER, HIDDEN},
};
enum { GATE = 6, UP = 7, DOWN = 8, N_DIMS = sizeof dims / sizeof *dims };

typedef struct layer {
    sp_dtype dtype;
    sp_geometry *geometry;
    sp_layout *layout;
    sp_device *device;
    sp_pool *pool;
    hand_adapter *adapters[ADAPTERS];
    char paths[ADAPTERS][EXPERTS * 3][KNOWN_PATH_BYTES];
    sp_factor own_a[EXPERTS]; /* of the up pairs that share their gate's */
    sp_slot_handle handles[ADAPTERS];
} layer;

/* Adapter 0 adapts every expert, 1 some by some modules, 2 one expert; ranks and scales vary. */
static bool is_adapted(int32_t adapter, int32_t module, int32_t expert)
{
    if (adapter == 1)
        return (expert + module) % 3 != 0;
    return adapter == 0 || expert == 4;
}

static void fill_adapter(layer *l, int32_t index, sp_test_random *random)
{
    hand_adapter *adapter = l->adapters[index] = hand_adapter_create((uint64_t)index + 1);
    int32_t n = 0;

    for (int32_t d = 0; d < GATE; d++)
        if (d != index)
            hand_adapter_add(adapter, &dims[d], 3 + 2 * index + d, 0.5f + (float)index, l->dtype,
                             random);
    for (int32_t d = GATE; d <= DOWN; d++) {
        for (int32_t e = 0; e < EXPERTS; e++) {
            sp_adapter_site *site;

            if (!is_adapted(index, d, e))
                continue;
            site = hand_adapter_add(adapter, &dims[d], 1 + (e * 5 + d + index) % 13,
                                    0.25f * (float)(e + 1), l->dtype, random);
            known_path(0, dims[d].module, e, l->paths[index][n]);
            site->path = l->paths[index][n++];
            site->expert = e;
        }
    }
}

/* The adapter's pair at dims[d], or NULL. */
static sp_adapter_site *pair_at(layer *l, int32_t adapter, int32_t d, int32_t expert)
{
    for (int32_t i = 0; adapter >= 0 && i < l->adapters[adapter]->n_sites; i++) {
        sp_adapter_site *site = &l->adapters[adapter]->sites[i];

        if (site->expert == expert && strcmp(site->module, sp_module_name(dims[d].module)) == 0)
            return site;
    }
    return NULL;
}

static const sp_adapter_site *pair_of(const layer *l, int32_t adapter, int32_t d, int32_t expert)
{
    return pair_at((layer *)(uintptr_t)l, adapter, d, expert);
}

/* Every other expert of adapter 0 has one A for gate and up, as a fused pair has. */
static void share_a(layer *l)
{
    for (int32_t e = 0; e < EXPERTS; e += 2) {
        sp_adapter_site *gate = pair_at(l, 0, GATE, e), *up = pair_at(l, 0, UP, e);

        assert_true(up->rank >= gate->rank); /* its B has as many columns */
        l->own_a[e] = up->a;
        up->a = gate->a;
        up->rank = up->b.cols = gate->rank;
        up->b.row_stride = up->b.cols;
    }
}

static void open_pool(layer *l)
{
    sp_layout_options layout_options;
    sp_pool_options options;
    hand_pool pool;
    size_t bytes = 0;
    sp_image *images[ADAPTERS];

    sp_layout_options_default(&layout_options, sizeof layout_options);
    layout_options.geometry = l->geometry;
    layout_options.rank = 16;
    layout_options.dtype = l->dtype;
    assert_ok(sp_layout_create(&layout_options, &l->layout, NULL), NULL);
    pool = (hand_pool){l->geometry, l->layout, l->device, NULL, true};
    for (int32_t i = 0; i < ADAPTERS; i++) {
        images[i] = hand_pack(&pool, l->adapters[i]);
        bytes += sp_image_expert_bytes(images[i]);
    }
    sp_pool_options_default(&options, sizeof options);
    options.layout = l->layout;
    options.device = l->device;
    options.slots = ADAPTERS;
    options.expert_bytes = bytes;
    assert_ok(sp_pool_create(&options, &l->pool, NULL), NULL);
    for (int32_t i = 0; i < ADAPTERS; i++) {
        assert_ok(sp_pool_load(l->pool, images[i], &l->handles[i], NULL), NULL);
        sp_image_destroy(images[i]);
    }
}

static layer *layer_open(sp_dtype dtype)
{
    layer *l = sp_calloc(1, sizeof *l);
    sp_test_random random = {181};

    assert_non_null(l);
    l->dtype = dtype;
    l->geometry = known_geometry(EXPERTS, dims, N_DIMS);
    assert_ok(sp_device_open("cpu", NULL, &l->device, NULL), NULL);
    for (int32_t i = 0; i < ADAPTERS; i++)
        fill_adapter(l, i, &random);
    share_a(l);
    open_pool(l);
    return l;
}

static void layer_close(layer *l)
{
    for (int32_t e = 0; e < EXPERTS; e += 2)
        pair_at(l, 0, UP, e)->a = l->own_a[e];
    for (int32_t i = 0; i < ADAPTERS; i++) {
        assert_ok(sp_pool_release(l->pool, l->handles[i], NULL), NULL);
        hand_adapter_destroy(l->adapters[i]);
    }
    sp_pool_destroy(l->pool);
    sp_device_close(l->device);
    sp_layout_release(l->layout);
    sp_geometry_release(l->geometry);
    sp_free(l);
}

/* ---- rows ---------------------------------------------------------------------------------- */

/* What is computed: one step's tokens. */
typedef struct step {
    int32_t n;                 /* tokens */
    int32_t *adapter, *expert; /* [n], [n * TOP_K] */
    float *scale;              /* [n] request scales */
    char *x, *inner;           /* [n, HIDDEN + PAD], [n * TOP_K, INTER + PAD] of dtype */
    float *y[3];               /* [n * TOP_K, n_out + PAD] of gate, up, down, by pair */
    float *want[3];            /* what they become */
} step;

static int64_t width(int32_t m)
{
    return dims[GATE + m].n_out + PAD;
}

static void *values(sp_dtype dtype, int64_t n, sp_test_random *random)
{
    void *block = malloc((size_t)n * sp_dtype_bytes(dtype));

    assert_non_null(block);
    for (int64_t i = 0; i < n; i++)
        hand_store(dtype, block, i, (double)sp_test_float(random));
    return block;
}

/* How the router chose: any; all tokens the same expert; ids out of range among them. */
typedef enum choice { ANY, ALL_TO_ONE, WITH_NONE } choice;

static int32_t choose(choice how, int32_t token, int32_t k, sp_test_random *random)
{
    if (how == ALL_TO_ONE)
        return (4 + k) % EXPERTS;
    if (how == WITH_NONE && (token + k) % 4 == 0)
        return token % 2 ? -1 : EXPERTS;
    return (int32_t)sp_test_below(random, EXPERTS);
}

static step *step_make(const layer *l, int32_t n, choice how)
{
    step *s = sp_calloc(1, sizeof *s);
    sp_test_random random = {(uint64_t)n * 3 + (uint64_t)how};

    assert_non_null(s);
    s->n = n;
    s->adapter = malloc((size_t)n * sizeof *s->adapter);
    s->expert = malloc((size_t)n * TOP_K * sizeof *s->expert);
    s->scale = malloc((size_t)n * sizeof *s->scale);
    assert_true(s->adapter != NULL && s->expert != NULL && s->scale != NULL);
    for (int32_t i = 0; i < n; i++) {
        s->adapter[i] = (int32_t)sp_test_below(&random, ADAPTERS + 1) - 1;
        s->scale[i] = sp_test_below(&random, 8) == 0 ? 0.0f : sp_test_below(&random, 2) ? 1 : 0.5f;
        for (int32_t k = 0; k < TOP_K; k++)
            s->expert[i * TOP_K + k] = choose(how, i, k, &random);
    }
    s->x = values(l->dtype, (int64_t)n * (HIDDEN + PAD), &random);
    s->inner = values(l->dtype, (int64_t)n * TOP_K * (INTER + PAD), &random);
    for (int32_t m = 0; m < 3; m++) {
        size_t bytes = (size_t)n * TOP_K * (size_t)width(m) * sizeof(float);

        s->y[m] = values(SP_DTYPE_F32, (int64_t)n * TOP_K * width(m), &random);
        s->want[m] = malloc(bytes);
        assert_non_null(s->want[m]);
        memcpy(s->want[m], s->y[m], bytes);
    }
    return s;
}

static void step_free(step *s)
{
    for (int32_t m = 0; m < 3; m++) {
        free(s->y[m]);
        free(s->want[m]);
    }
    free(s->x);
    free(s->inner);
    free(s->scale);
    free(s->expert);
    free(s->adapter);
    sp_free(s);
}

static const char *row_at(sp_dtype dtype, const char *rows, int64_t row, int64_t stride)
{
    return rows + (size_t)(row * stride) * sp_dtype_bytes(dtype);
}

/* x of one pair at module m. */
static const char *x_of(const layer *l, const step *s, int32_t m, int32_t pair)
{
    if (GATE + m == DOWN)
        return row_at(l->dtype, s->inner, pair, INTER + PAD);
    return row_at(l->dtype, s->x, pair / TOP_K, HIDDEN + PAD);
}

/* Each pair alone, by the single form of its own factors. */
static void expect_alone(const layer *l, step *s, const char *level)
{
    for (int32_t pair = 0; pair < s->n * TOP_K; pair++) {
        int32_t token = pair / TOP_K;

        for (int32_t m = 0; m < 3; m++) {
            const sp_adapter_site *site = pair_of(l, s->adapter[token], GATE + m, s->expert[pair]);
            sp_delta_single_args args = {
                .struct_bytes = sizeof args,
                .rows = 1,
                .k_in = dims[GATE + m].k_in,
                .n_out = dims[GATE + m].n_out,
                .dtype = l->dtype,
                .x_type = l->dtype,
                .y_type = SP_DTYPE_F32,
                .x = x_of(l, s, m, pair),
                .y = s->want[m] + pair * width(m),
                .x_stride = HIDDEN + PAD,
                .y_stride = width(m),
            };
            sp_error error;

            if (site == NULL)
                continue;
            args.rank = site->rank;
            args.a = site->a.data;
            args.b = site->b.data;
            args.a_stride = args.k_in;
            args.b_stride = site->rank;
            args.scale = sp_effective_scale(site->scale, s->scale[token]);
            assert_ok(hand_single(&args, NULL, level, &error), &error);
        }
    }
}

/* ---- running ------------------------------------------------------------------------------- */

/* How rows are presented. */
typedef struct form {
    const char *level;
    bool sorted, reversed; /* reversed: within each expert, the last pair comes first */
    int32_t rows_max;      /* of a window */
    bool x_f32;            /* x as FP32, of the same numbers */
} form;

static sp_delta *delta_make(const layer *l, const form *f, int32_t n, sp_exec *exec)
{
    sp_delta_options options;
    sp_delta *delta = NULL;
    sp_error error;

    sp_delta_options_default(&options, sizeof options);
    options.pool = l->pool;
    options.exec = exec;
    options.rows_max = n;
    options.cpu_isa = f->level;
    options.expert_rows_max = f->rows_max;
    options.x_f32 = f->x_f32;
    assert_ok(sp_delta_create(&options, &delta, &error), &error);
    return delta;
}

/* Numbers of a dtype as FP32. */
static float *widened(sp_dtype dtype, const char *from, int64_t n)
{
    float *to = malloc((size_t)n * sizeof *to);

    assert_non_null(to);
    for (int64_t i = 0; i < n; i++)
        to[i] = (float)hand_load(dtype, from, i);
    return to;
}

static sp_plan *plan_make(const layer *l, const step *s)
{
    sp_plan *plan = NULL;
    sp_route_span *spans = calloc((size_t)s->n, sizeof *spans);

    assert_non_null(spans);
    for (int32_t i = 0; i < s->n; i++) {
        sp_route_span_default(&spans[i], sizeof *spans);
        spans[i].scale = s->scale[i];
        if (s->adapter[i] >= 0)
            spans[i].handle = l->handles[s->adapter[i]];
    }
    assert_ok(sp_plan_create(s->n, ADAPTERS, &plan, NULL), NULL);
    assert_ok(sp_plan_build(plan, l->pool, spans, s->n, s->n, NULL), NULL);
    free(spans);
    return plan;
}

/* The rows of a form, and the pair of each row. */
static int32_t rows_make(const step *s, const form *f, sp_moe_rows *rows, int32_t *begin,
                         int32_t *pairs)
{
    *rows = (sp_moe_rows){.struct_bytes = sizeof *rows,
                          .n_tokens = s->n,
                          .top_k = TOP_K,
                          .n_experts = EXPERTS,
                          .expert = s->expert};
    for (int32_t i = 0; i < s->n * TOP_K; i++)
        pairs[i] = i;
    if (!f->sorted)
        return s->n * TOP_K;
    assert_ok(sp_moe_rows_sort(rows, begin, pairs, NULL), NULL);
    for (int32_t e = 0; f->reversed && e < EXPERTS; e++) {
        for (int32_t i = begin[e], j = begin[e + 1] - 1; i < j; i++, j--) {
            int32_t kept = pairs[i];

            pairs[i] = pairs[j];
            pairs[j] = kept;
        }
    }
    rows->expert = NULL;
    rows->row_pair = pairs;
    rows->expert_begin = begin;
    rows->n_rows = begin[EXPERTS];
    return begin[EXPERTS];
}

/* y and x of module m in the form's order. */
static float *gather_y(const step *s, int32_t m, const int32_t *pairs, int32_t n)
{
    float *y = malloc(((size_t)n + 1) * (size_t)width(m) * sizeof *y);

    assert_non_null(y);
    for (int32_t i = 0; i < n; i++)
        memcpy(y + i * width(m), s->y[m] + pairs[i] * width(m), (size_t)width(m) * sizeof *y);
    return y;
}

static char *gather_inner(const layer *l, const step *s, const int32_t *pairs, int32_t n)
{
    size_t row = (INTER + PAD) * sp_dtype_bytes(l->dtype);
    char *x = malloc(((size_t)n + 1) * row);

    assert_non_null(x);
    for (int32_t i = 0; i < n; i++)
        memcpy(x + (size_t)i * row, row_at(l->dtype, s->inner, pairs[i], INTER + PAD), row);
    return x;
}

static void expect_rows(const step *s, int32_t m, const float *y, const int32_t *pairs, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        if (memcmp(y + i * width(m), s->want[m] + pairs[i] * width(m),
                   (size_t)width(m) * sizeof *y) != 0)
            fail_msg("module %d, row %d (pair %d, expert %d, adapter %d) has other bits", (int)m,
                     (int)i, (int)pairs[i], (int)s->expert[pairs[i]],
                     (int)s->adapter[pairs[i] / TOP_K]);
}

static void run_and_compare(const layer *l, const step *s, const form *f, sp_exec *exec)
{
    sp_delta *delta = delta_make(l, f, s->n, exec);
    sp_plan *plan = plan_make(l, s);
    int32_t *begin = malloc((EXPERTS + 1) * sizeof *begin);
    int32_t *pairs = malloc((size_t)s->n * TOP_K * sizeof *pairs), n;
    sp_moe_rows rows;
    float *y[3], *wide[2] = {NULL};
    char *inner;
    sp_delta_output outputs[3];
    sp_delta_experts_call call = {.struct_bytes = sizeof call,
                                  .x = s->x,
                                  .x_stride = HIDDEN + PAD,
                                  .x_type = f->x_f32 ? SP_DTYPE_F32 : l->dtype,
                                  .outputs = outputs,
                                  .n_outputs = 2};
    sp_error error;

    assert_true(begin != NULL && pairs != NULL);
    n = rows_make(s, f, &rows, begin, pairs);
    inner = gather_inner(l, s, pairs, n);
    for (int32_t m = 0; m < 3; m++) {
        y[m] = gather_y(s, m, pairs, n);
        outputs[m] = (sp_delta_output){
            sizeof *outputs, known_site(l->geometry, 0, dims[GATE + m].module) + (m + 3) % EXPERTS,
            y[m], width(m), SP_DTYPE_F32};
    }
    if (f->x_f32) {
        wide[0] = widened(l->dtype, s->x, (int64_t)s->n * (HIDDEN + PAD));
        wide[1] = widened(l->dtype, inner, (int64_t)n * (INTER + PAD));
        call.x = wide[0];
    }
    assert_ok(sp_delta_experts_begin(delta, plan, &rows, NULL, &error), &error);
    assert_ok(sp_delta_experts_apply(delta, &call, &error), &error);
    call.x = f->x_f32 ? (const void *)wide[1] : inner;
    call.x_stride = INTER + PAD;
    call.x_rows = SP_EXPERT_X_ROW;
    call.outputs = &outputs[2];
    call.n_outputs = 1;
    assert_ok(sp_delta_experts_apply(delta, &call, &error), &error);
    for (int32_t m = 0; m < 3; m++) {
        expect_rows(s, m, y[m], pairs, n);
        free(y[m]);
    }
    free(wide[0]);
    free(wide[1]);
    free(inner);
    free(begin);
    free(pairs);
    sp_plan_destroy(plan);
    sp_delta_destroy(delta);
}

static void every_form(const layer *l, const step *s, const char *level, sp_exec *exec)
{
    static const int32_t windows[] = {1, 17, 4096};

    for (size_t i = 0; i < sizeof windows / sizeof *windows; i++) {
        run_and_compare(l, s, &(form){level, false, false, windows[i], false}, exec);
        run_and_compare(l, s, &(form){level, true, false, windows[i], false}, exec);
        run_and_compare(l, s, &(form){level, true, true, windows[i], true}, exec);
    }
}

static void rows_have_the_bits_of_their_pair_alone(void **state)
{
    static const int32_t counts[] = {1, 2, 13, 70};
    static const sp_dtype dtypes[] = {SP_DTYPE_BF16, SP_DTYPE_F32};
    sp_exec *exec = hand_exec(2);

    (void)state;
    for (int t = 0; t < 2; t++) {
        layer *l = layer_open(dtypes[t]);

        for (const char *const *level = sp_kernels_levels(); *level != NULL; level++) {
            for (int i = 0; i < 4; i++) {
                for (choice how = ANY; how <= WITH_NONE; how++) {
                    step *s = step_make(l, counts[i], how);

                    expect_alone(l, s, *level);
                    every_form(l, s, *level, i % 2 ? exec : NULL);
                    step_free(s);
                }
            }
        }
        layer_close(l);
    }
    sp_exec_destroy(exec);
}

/* Few items are cut over all threads, many are a thread's each. */
static void threads_change_no_bit(void **state)
{
    layer *l = layer_open(SP_DTYPE_BF16);
    step *s = step_make(l, 40, ANY); /* up to 21 items */

    (void)state;
    expect_alone(l, s, NULL);
    for (int32_t threads = 1; threads <= 8; threads++) {
        sp_exec *exec = hand_exec(threads);

        run_and_compare(l, s, &(form){NULL, true, false, 4096, threads % 2 == 0}, exec);
        run_and_compare(l, s, &(form){NULL, false, false, 60, false}, exec);
        sp_exec_destroy(exec);
    }
    step_free(s);
    layer_close(l);
}

/* 4,097 rows and more, over the border of a window. */
static void many_rows_have_the_bits_of_few(void **state)
{
    layer *l = layer_open(SP_DTYPE_BF16);
    step *s = step_make(l, 1366, ANY); /* 4,098 rows */
    sp_exec *exec = hand_exec(2);

    (void)state;
    expect_alone(l, s, NULL);
    run_and_compare(l, s, &(form){NULL, true, false, 4096, false}, exec);
    run_and_compare(l, s, &(form){NULL, false, false, 4096, true}, exec);
    run_and_compare(l, s, &(form){NULL, true, true, 1000, false}, exec);
    step_free(s);
    s = step_make(l, 1366, ALL_TO_ONE);
    expect_alone(l, s, NULL);
    run_and_compare(l, s, &(form){NULL, true, false, 4096, false}, exec);
    sp_exec_destroy(exec);
    step_free(s);
    layer_close(l);
}

/* ---- a reference in double ------------------------------------------------------------------ */

static double rounded(sp_dtype dtype, double value)
{
    return dtype == SP_DTYPE_BF16 ? (double)sp_bf16_to_f32(sp_f32_to_bf16((float)value)) : value;
}

/* y of one row with the tree's rounding points, sums in double. */
static void reference(const layer *l, const sp_adapter_site *site, const char *x, float scale,
                      double *y)
{
    double xa[64];

    for (int32_t j = 0; j < site->rank; j++) {
        double sum = 0;

        for (int32_t k = 0; k < site->a.cols; k++)
            sum += hand_load(l->dtype, x, k) *
                   hand_load(l->dtype, site->a.data, (int64_t)j * site->a.cols + k);
        xa[j] = rounded(l->dtype, sum);
    }
    for (int32_t i = 0; i < site->b.rows; i++) {
        double sum = 0;

        for (int32_t j = 0; j < site->rank; j++)
            sum += xa[j] * hand_load(l->dtype, site->b.data, (int64_t)i * site->rank + j);
        y[i] += (double)scale * rounded(l->dtype, sum);
    }
}

/* The bits of the single form are what rows are compared with above; here the single form's are
 * compared with the reference: equal but where a sum fell on the other side of a border. */
static void pairs_match_the_reference(void **state)
{
    layer *l = layer_open(SP_DTYPE_BF16);
    step *s = step_make(l, 40, ANY);
    double worst = 0;
    int n = 0;

    (void)state;
    expect_alone(l, s, NULL);
    for (int32_t pair = 0; pair < s->n * TOP_K; pair++) {
        int32_t token = pair / TOP_K;

        for (int32_t m = 0; m < 3; m++) {
            const sp_adapter_site *site = pair_of(l, s->adapter[token], GATE + m, s->expert[pair]);
            double y[HIDDEN], norm = 0, off = 0;

            for (int32_t i = 0; i < dims[GATE + m].n_out; i++)
                y[i] = (double)s->y[m][pair * width(m) + i];
            if (site != NULL && s->scale[token] != 0)
                reference(l, site, x_of(l, s, m, pair), site->scale * s->scale[token], y);
            for (int32_t i = 0; i < dims[GATE + m].n_out; i++) {
                double got = (double)s->want[m][pair * width(m) + i];

                off += (got - y[i]) * (got - y[i]);
                norm += y[i] * y[i];
            }
            n += site != NULL;
            worst = sqrt(off / norm) > worst ? sqrt(off / norm) : worst;
        }
    }
    printf("%d pairs, relative error at most %.2g\n", n, worst);
    assert_true(n > 100);
    assert_true(worst < 4e-3);
    step_free(s);
    layer_close(l);
}

/* ---- the kernel fixtures -------------------------------------------------------------------- */

typedef struct fixture_case {
    const char *name;
    int32_t tokens, top_k, experts, slots, rank, k_in, n_out;
    const golden_tensor *x, *expert, *slot, *have, *scales, *a, *b, *y0, *y_ref;
} fixture_case;

static fixture_case read_case(const golden *file, const char *name)
{
    fixture_case c = {.name = name,
                      .x = golden_get(file, "%s.x", name),
                      .expert = golden_get(file, "%s.expert_idx", name),
                      .slot = golden_get(file, "%s.row_slot", name),
                      .have = golden_get(file, "%s.have", name),
                      .scales = golden_get(file, "%s.scales", name),
                      .a = golden_get(file, "%s.A", name),
                      .b = golden_get(file, "%s.B", name),
                      .y0 = golden_get(file, "%s.y0", name),
                      .y_ref = golden_get(file, "%s.y_ref", name)};

    c.tokens = (int32_t)c.x->shape[0];
    c.k_in = (int32_t)c.x->shape[1];
    c.top_k = (int32_t)c.expert->shape[1];
    c.slots = (int32_t)c.a->shape[0];
    c.experts = (int32_t)c.a->shape[1];
    c.rank = (int32_t)c.a->shape[2];
    c.n_out = (int32_t)c.b->shape[2];
    return c;
}

static void *cast(const golden_tensor *tensor, int64_t first, int64_t n, sp_dtype dtype)
{
    void *block = malloc(((size_t)n + 1) * sp_dtype_bytes(dtype));

    assert_non_null(block);
    for (int64_t i = 0; i < n; i++)
        hand_store(dtype, block, i, golden_value(tensor, first + i));
    return block;
}

/* One slot's adapter, loaded; returns the version. */
static sp_slot_handle load_case(const fixture_case *c, const hand_pool *pool, int32_t slot,
                                sp_dtype dtype)
{
    static char paths[64][KNOWN_PATH_BYTES];
    const site_dims expert = {0, SP_MODULE_EXPERT_DOWN_PROJ, c->k_in, c->n_out};
    int64_t a_size = (int64_t)c->rank * c->k_in, b_size = (int64_t)c->n_out * c->rank;
    hand_adapter *adapter = hand_adapter_create((uint64_t)slot + 1);
    sp_slot_handle handle;

    for (int32_t e = 0; e < c->experts; e++) {
        int64_t at = (int64_t)slot * c->experts + e;
        void *a = cast(c->a, at * a_size, a_size, dtype),
             *b = cast(c->b, at * b_size, b_size, dtype);
        sp_adapter_site *site;

        if (golden_i32(c->have)[at] != 0) {
            site = hand_adapter_add_copy(adapter, &expert, c->rank, golden_f32(c->scales)[slot],
                                         dtype, a, b);
            known_path(0, expert.module, e, paths[e]);
            site->path = paths[e];
            site->expert = e;
        }
        free(a);
        free(b);
    }
    handle = hand_load_adapter(pool, adapter);
    assert_int_equal(handle.slot, slot);
    hand_adapter_destroy(adapter);
    return handle;
}

static double relative_error(const fixture_case *c, sp_dtype y_type, const void *y,
                             const int32_t *pairs, int32_t n)
{
    double off = 0, norm = 0;

    for (int32_t i = 0; i < n; i++) {
        for (int32_t j = 0; j < c->n_out; j++) {
            double want = golden_value(c->y_ref, (int64_t)pairs[i] * c->n_out + j);
            double got = hand_load(y_type, y, (int64_t)i * c->n_out + j);

            off += (got - want) * (got - want);
            norm += want * want;
        }
    }
    return sqrt(off / norm);
}

static void run_case(const fixture_case *c, const hand_pool *pool, const sp_slot_handle *handles,
                     sp_dtype y_type, const char *level, bool sorted, double limit)
{
    sp_dtype dtype = sp_layout_dtype(pool->layout);
    int32_t n = c->tokens * c->top_k, begin[64], *pairs = malloc((size_t)n * sizeof *pairs);
    sp_moe_rows rows = {.struct_bytes = sizeof rows,
                        .n_tokens = c->tokens,
                        .top_k = c->top_k,
                        .n_experts = c->experts,
                        .expert = golden_i32(c->expert)};
    sp_route_span *spans = calloc((size_t)c->tokens, sizeof *spans);
    void *x = cast(c->x, 0, (int64_t)c->tokens * c->k_in, dtype), *y;
    sp_delta_output output = {sizeof output,
                              known_site(pool->geometry, 0, SP_MODULE_EXPERT_DOWN_PROJ), NULL,
                              c->n_out, y_type};
    sp_delta_experts_call call = {.struct_bytes = sizeof call,
                                  .x = x,
                                  .x_stride = c->k_in,
                                  .x_type = dtype,
                                  .outputs = &output,
                                  .n_outputs = 1};
    sp_delta_options options;
    sp_delta *delta;
    sp_plan *plan;
    sp_error error;
    double off;

    assert_true(pairs != NULL && spans != NULL);
    for (int32_t i = 0; i < c->tokens; i++) {
        sp_route_span_default(&spans[i], sizeof *spans);
        if (golden_i32(c->slot)[i] >= 0)
            spans[i].handle = handles[golden_i32(c->slot)[i]];
    }
    for (int32_t i = 0; i < n; i++)
        pairs[i] = i;
    if (sorted) {
        assert_ok(sp_moe_rows_sort(&rows, begin, pairs, NULL), NULL);
        rows.expert = NULL;
        rows.row_pair = pairs;
        rows.expert_begin = begin;
        rows.n_rows = n;
    }
    output.y = y = malloc((size_t)n * (size_t)c->n_out * sp_dtype_bytes(y_type));
    assert_non_null(y);
    for (int32_t i = 0; i < n * c->n_out; i++)
        hand_store(y_type, y, i,
                   golden_value(c->y0, (int64_t)pairs[i / c->n_out] * c->n_out + i % c->n_out));
    sp_delta_options_default(&options, sizeof options);
    options.pool = pool->pool;
    options.rows_max = c->tokens;
    options.cpu_isa = level;
    assert_ok(sp_delta_create(&options, &delta, &error), &error);
    assert_ok(sp_plan_create(c->tokens, c->slots, &plan, NULL), NULL);
    assert_ok(sp_plan_build(plan, pool->pool, spans, c->tokens, 0, &error), &error);
    assert_ok(sp_delta_experts_begin(delta, plan, &rows, NULL, &error), &error);
    assert_ok(sp_delta_experts_apply(delta, &call, &error), &error);
    off = relative_error(c, y_type, y, pairs, n);
    if (off > limit)
        fail_msg("%s, %s, %s: relative error %g", c->name, level, sorted ? "sorted" : "gather",
                 off);
    sp_plan_destroy(plan);
    sp_delta_destroy(delta);
    free(y);
    free(x);
    free(spans);
    free(pairs);
}

static hand_pool case_pool(const fixture_case *c, sp_dtype dtype)
{
    const site_dims sites[] = {{0, SP_MODULE_Q_PROJ, c->k_in, 8},
                               {0, SP_MODULE_EXPERT_DOWN_PROJ, c->k_in, c->n_out}};
    hand_pool pool = {.geometry = known_geometry(c->experts, sites, 2)};
    sp_layout_options layout_options;
    sp_pool_options options;

    sp_layout_options_default(&layout_options, sizeof layout_options);
    layout_options.geometry = pool.geometry;
    layout_options.rank = 8;
    layout_options.dtype = dtype;
    assert_ok(sp_layout_create(&layout_options, &pool.layout, NULL), NULL);
    assert_ok(sp_device_open("cpu", NULL, &pool.device, NULL), NULL);
    sp_pool_options_default(&options, sizeof options);
    options.layout = pool.layout;
    options.device = pool.device;
    options.slots = c->slots;
    options.expert_bytes = 1 << 20;
    assert_ok(sp_pool_create(&options, &pool.pool, NULL), NULL);
    return pool;
}

static void the_kernel_fixtures(void **state)
{
    static const char *const names[] = {"e00", "e01", "e02"};
    golden *file = golden_open("kernels/experts.safetensors");

    (void)state;
    for (int i = 0; i < 3; i++) {
        fixture_case c = read_case(file, names[i]);

        for (int f32 = 0; f32 < 2; f32++) {
            hand_pool pool = case_pool(&c, f32 ? SP_DTYPE_F32 : SP_DTYPE_BF16);
            sp_slot_handle handles[8];

            for (int32_t slot = 0; slot < c.slots; slot++)
                handles[slot] = load_case(&c, &pool, slot, f32 ? SP_DTYPE_F32 : SP_DTYPE_BF16);
            for (const char *const *level = sp_kernels_levels(); *level != NULL; level++) {
                for (int sorted = 0; sorted < 2; sorted++) {
                    run_case(&c, &pool, handles, SP_DTYPE_F32, *level, sorted, f32 ? 1e-5 : 4e-3);
                    if (!f32)
                        run_case(&c, &pool, handles, SP_DTYPE_BF16, *level, sorted, 4e-3);
                }
            }
            for (int32_t slot = 0; slot < c.slots; slot++)
                assert_ok(sp_pool_release(pool.pool, handles[slot], NULL), NULL);
            hand_pool_destroy(&pool);
        }
    }
    golden_close(file);
}

/* ---- the router and what shares its x -------------------------------------------------------- */

static void the_router_is_one_of_four_sites(void **state)
{
    enum { ROWS = 30, OUT = 64 };
    static const int32_t group[] = {5, 1, 2, 4}; /* router, shared gate, up, and its gate */
    layer *l = layer_open(SP_DTYPE_BF16);
    step *s = step_make(l, ROWS, ANY);
    sp_plan *plan = plan_make(l, s);
    sp_delta *delta = delta_make(l, &(form){NULL, false, false, 16, false}, ROWS, NULL);
    float y[4][ROWS * OUT], want[4][ROWS * OUT];
    sp_delta_output outputs[4];
    sp_delta_call call = hand_call(plan, l->dtype, s->x, HIDDEN + PAD, outputs, 4);
    sp_test_random random = {5};
    int n_changed = 0;
    sp_error error;

    (void)state;
    for (int t = 0; t < 4; t++) {
        for (int i = 0; i < ROWS * OUT; i++)
            y[t][i] = want[t][i] = sp_test_float(&random);
        outputs[t] =
            (sp_delta_output){sizeof *outputs, known_site(l->geometry, 0, dims[group[t]].module),
                              y[t], OUT, SP_DTYPE_F32};
        for (int32_t row = 0; row < ROWS; row++) {
            const sp_adapter_site *site = pair_of(l, s->adapter[row], group[t], -1);
            sp_delta_single_args args = {.struct_bytes = sizeof args,
                                         .rows = 1,
                                         .k_in = HIDDEN,
                                         .n_out = dims[group[t]].n_out,
                                         .dtype = l->dtype,
                                         .x_type = l->dtype,
                                         .y_type = SP_DTYPE_F32,
                                         .x = row_at(l->dtype, s->x, row, HIDDEN + PAD),
                                         .y = want[t] + row * OUT,
                                         .x_stride = HIDDEN,
                                         .y_stride = OUT};

            if (site == NULL)
                continue;
            args.rank = site->rank;
            args.a = site->a.data;
            args.b = site->b.data;
            args.a_stride = HIDDEN;
            args.b_stride = site->rank;
            args.scale = sp_effective_scale(site->scale, s->scale[row]);
            assert_ok(hand_single(&args, NULL, NULL, &error), &error);
            n_changed += t == 0 && s->scale[row] != 0;
        }
    }
    assert_ok(sp_delta_apply(delta, &call, &error), &error);
    assert_memory_equal(y, want, sizeof y);
    assert_true(n_changed > 5);
    sp_delta_destroy(delta);
    sp_plan_destroy(plan);
    step_free(s);
    layer_close(l);
}

/* ---- refusals and levers --------------------------------------------------------------------- */

static void refuse(sp_delta *delta, sp_delta_experts_call call, sp_status status,
                   const char *subject)
{
    sp_error error = {.status = SP_OK};

    assert_int_equal(sp_delta_experts_apply(delta, &call, &error), status);
    assert_string_equal(error.subject, subject);
}

static sp_delta_output gate_output(const layer *l, const step *s)
{
    return (sp_delta_output){sizeof(sp_delta_output),
                             known_site(l->geometry, 0, SP_MODULE_EXPERT_GATE_PROJ), s->y[0],
                             width(0), SP_DTYPE_F32};
}

static sp_delta_experts_call call_of(const step *s, const sp_delta_output *outputs, int32_t n)
{
    return (sp_delta_experts_call){.struct_bytes = sizeof(sp_delta_experts_call),
                                   .x = s->x,
                                   .x_stride = HIDDEN + PAD,
                                   .x_type = SP_DTYPE_BF16,
                                   .outputs = outputs,
                                   .n_outputs = n};
}

static void refuse_rows(sp_delta *delta, const sp_plan *plan, const sp_moe_rows *rows,
                        sp_status status, const char *subject)
{
    sp_error error = {.status = SP_OK};

    assert_int_equal(sp_delta_experts_begin(delta, plan, rows, NULL, &error), status);
    assert_string_equal(error.subject, subject);
}

static void rows_that_are_wrong_are_named(void **state)
{
    layer *l = layer_open(SP_DTYPE_BF16);
    step *s = step_make(l, 5, ANY);
    sp_plan *plan = plan_make(l, s);
    form f = {NULL, false, false, 4, false};
    sp_delta *delta = delta_make(l, &f, 5, NULL);
    sp_delta_output output = gate_output(l, s);
    int32_t begin[EXPERTS + 1], pairs[15];
    sp_moe_rows rows;

    (void)state;
    rows_make(s, &f, &rows, begin, pairs);
    refuse(delta, call_of(s, &output, 1), SP_ERR_STATE, "rows");
    rows.n_tokens = 4;
    refuse_rows(delta, plan, &rows, SP_ERR_ARGUMENT, "n_tokens");
    rows.n_tokens = 5;
    rows.top_k = 8;
    refuse_rows(delta, plan, &rows, SP_ERR_ARGUMENT, "top_k");
    f.sorted = true;
    rows_make(s, &f, &rows, begin, pairs);
    begin[3] = begin[2] - 1;
    refuse_rows(delta, plan, &rows, SP_ERR_INPUT, "expert_begin");
    rows_make(s, &f, &rows, begin, pairs);
    pairs[14] = 15; /* in the last of four windows */
    refuse_rows(delta, plan, &rows, SP_ERR_INPUT, "row_pair");
    refuse(delta, call_of(s, &output, 1), SP_ERR_STATE, "rows");
    pairs[14] = 14;
    assert_ok(sp_delta_experts_begin(delta, plan, &rows, NULL, NULL), NULL);
    hand_plan_rows(plan, l->pool, (int32_t[]){0, 0, 0, 0, 0}, NULL, 5);
    refuse(delta, call_of(s, &output, 1), SP_ERR_STATE, "plan");
    sp_plan_destroy(plan);
    sp_delta_destroy(delta);
    step_free(s);
    layer_close(l);
}

static void calls_that_are_wrong_are_named_and_change_nothing(void **state)
{
    layer *l = layer_open(SP_DTYPE_BF16);
    step *s = step_make(l, 5, ANY);
    sp_plan *plan = plan_make(l, s);
    form f = {NULL, false, false, 4, false};
    sp_delta *delta = delta_make(l, &f, 5, NULL);
    int32_t begin[EXPERTS + 1], pairs[15];
    sp_moe_rows rows;
    sp_delta_output output = gate_output(l, s), two[2] = {output, output};
    sp_delta_experts_call good = call_of(s, &output, 1), call = good;
    sp_delta_call plain = hand_call(plan, SP_DTYPE_BF16, s->x, HIDDEN + PAD, &output, 1);
    sp_error error;

    (void)state;
    rows_make(s, &f, &rows, begin, pairs);
    assert_ok(sp_delta_experts_begin(delta, plan, &rows, NULL, &error), &error);
    call.x_stride = HIDDEN - 1;
    refuse(delta, call, SP_ERR_STRIDE, "x_stride");
    call = good;
    call.x_type = SP_DTYPE_F32;
    refuse(delta, call, SP_ERR_UNSUPPORTED, "x_type");
    call = good;
    call.x_rows = (sp_expert_x)7;
    refuse(delta, call, SP_ERR_ARGUMENT, "x_rows");
    refuse(delta, call_of(s, &output, 5), SP_ERR_ARGUMENT, "n_outputs");
    output.y_stride = INTER - 1;
    refuse(delta, good, SP_ERR_STRIDE, "y_stride");
    output = two[0];
    output.site = known_site(l->geometry, 0, SP_MODULE_ROUTER);
    refuse(delta, good, SP_ERR_ARGUMENT, "site");
    output = two[0];
    two[1].site = known_site(l->geometry, 0, SP_MODULE_EXPERT_DOWN_PROJ);
    refuse(delta, call_of(s, two, 2), SP_ERR_ARGUMENT, "site");
    call = good;
    call.scales = (float *const[]){s->y[0]};
    refuse(delta, call, SP_ERR_UNSUPPORTED, "scales");
    /* An expert is no matter of sp_delta_apply: it says so instead of doing nothing. */
    assert_int_equal(sp_delta_apply(delta, &plain, &error), SP_ERR_ARGUMENT);
    assert_non_null(strstr(error.text, "sp_delta_experts_apply"));
    assert_memory_equal(s->y[0], s->want[0], (size_t)(15 * width(0)) * sizeof *s->want[0]);
    assert_ok(sp_delta_experts_apply(delta, &good, &error), &error);
    assert_memory_not_equal(s->y[0], s->want[0], (size_t)(15 * width(0)) * sizeof *s->want[0]);
    sp_plan_destroy(plan);
    sp_delta_destroy(delta);
    step_free(s);
    layer_close(l);
}

/* Each lever leaves y alone: no_apply, skipped modules. */
static void levers_skip_experts(void **state)
{
    layer *l = layer_open(SP_DTYPE_BF16);
    step *s = step_make(l, 20, ANY);
    sp_plan *plan = plan_make(l, s);
    form f = {NULL, false, false, 64, false};
    int32_t begin[EXPERTS + 1], pairs[60];
    sp_moe_rows rows;
    sp_delta_output output = {sizeof output, known_site(l->geometry, 0, SP_MODULE_EXPERT_GATE_PROJ),
                              s->y[0], width(0), SP_DTYPE_F32};
    sp_delta_experts_call call = {.struct_bytes = sizeof call,
                                  .x = s->x,
                                  .x_stride = HIDDEN + PAD,
                                  .x_type = SP_DTYPE_BF16,
                                  .outputs = &output,
                                  .n_outputs = 1};

    (void)state;
    rows_make(s, &f, &rows, begin, pairs);
    for (int lever = 0; lever < 3; lever++) {
        sp_delta_options options;
        sp_delta *delta;

        sp_delta_options_default(&options, sizeof options);
        options.pool = l->pool;
        options.rows_max = 20;
        options.no_apply = lever == 0;
        if (lever == 1)
            options.skip_modules = known_bit(l->geometry, SP_MODULE_EXPERT_GATE_PROJ);
        assert_ok(sp_delta_create(&options, &delta, NULL), NULL);
        assert_ok(sp_delta_experts_begin(delta, plan, &rows, NULL, NULL), NULL);
        assert_ok(sp_delta_experts_apply(delta, &call, NULL), NULL);
        assert_int_equal(memcmp(s->y[0], s->want[0], (size_t)(60 * width(0)) * sizeof(float)) == 0,
                         lever < 2);
        sp_delta_destroy(delta);
    }
    assert_true(sp_delta_experts_workspace_bytes(l->layout, ADAPTERS, 4096, false) > 4096 * 24);
    assert_int_equal(sp_delta_experts_workspace_bytes(l->layout, ADAPTERS, 0, false), 0);
    assert_int_equal(sp_delta_experts_device_bytes(NULL, 1, 1, false), 0);
    sp_plan_destroy(plan);
    step_free(s);
    layer_close(l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_have_the_bits_of_their_pair_alone),
        cmocka_unit_test(threads_change_no_bit),
        cmocka_unit_test(many_rows_have_the_bits_of_few),
        cmocka_unit_test(pairs_match_the_reference),
        cmocka_unit_test(the_kernel_fixtures),
        cmocka_unit_test(the_router_is_one_of_four_sites),
        cmocka_unit_test(rows_that_are_wrong_are_named),
        cmocka_unit_test(calls_that_are_wrong_are_named_and_change_nothing),
        cmocka_unit_test(levers_skip_experts),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
