/*
 * test_cuda_grouped.c: the grouped GEMM in FP16 on a GPU: the fixtures, random shapes against a
 * double reference, a row alone, other segments, graphs, and metadata that is wrong. All tensors
 * lie between guards, weights outside the ranks are NaN. Skipped where there is no GPU.
 */
#include "cuda/gpu_batch.h"
#include "support/golden.h"

#include <sidepath/grouped.h>

#include <math.h>

static sp_device *gpu;
static sp_grouped_lora *grouped;

/* ---- a call in host and device memory ------------------------------------------------------ */

enum { X, A, B, Y, OFFSETS, IDS, RANKS, SCALES, WORK, BUFFERS };

/* host: the tensors as given, with pointers of the host; device: the same call on the GPU. */
typedef struct call {
    sp_grouped_lora_params host, device;
    gpu_buffer buffers[BUFFERS];
} call;

static void *put(gpu_buffer *buffer, const void *data, size_t bytes)
{
    *buffer = gpu_buffer_make(gpu, bytes);
    gpu_buffer_write(gpu, buffer, data, bytes);
    return buffer->device + GUARD_BYTES;
}

static size_t y_bytes(const sp_grouped_lora_params *p)
{
    return (size_t)p->total_rows * (size_t)p->output_size * 2;
}

static call make_call(const sp_grouped_lora_params *host)
{
    call c = {.host = *host, .device = *host};
    size_t stride = (size_t)sp_grouped_lora_rank_stride(host->max_rank);
    size_t adapters = (size_t)host->n_adapters, in = (size_t)host->input_size;
    size_t work =
        sp_grouped_lora_workspace_bytes(host->total_rows, host->output_size, host->max_rank);
    void *garbage = malloc(work);

    assert_non_null(garbage);
    memset(garbage, 0xff, work); /* NaN: nothing may come from it */
    c.device.input = put(&c.buffers[X], host->input, (size_t)host->total_rows * in * 2);
    c.device.lora_a = put(&c.buffers[A], host->lora_a, adapters * in * stride * 2);
    c.device.lora_b =
        put(&c.buffers[B], host->lora_b, adapters * stride * (size_t)host->output_size * 2);
    c.device.output = put(&c.buffers[Y], host->output, y_bytes(host));
    c.device.segment_offsets =
        put(&c.buffers[OFFSETS], host->segment_offsets, ((size_t)host->n_segments + 1) * 4);
    c.device.segment_adapters =
        put(&c.buffers[IDS], host->segment_adapters, (size_t)host->n_segments * 4);
    c.device.ranks = put(&c.buffers[RANKS], host->ranks, adapters * 4);
    c.device.scales = put(&c.buffers[SCALES], host->scales, adapters * 4);
    c.device.workspace = put(&c.buffers[WORK], garbage, work);
    c.device.workspace_bytes = work;
    free(garbage);
    return c;
}

static void free_call(call *c)
{
    for (int i = 0; i < BUFFERS; i++)
        gpu_buffer_free(gpu, &c->buffers[i]);
}

/* The output, until the next read. */
static const uint16_t *run_call_on(call *c, sp_stream *stream)
{
    sp_error error;

    gpu_buffer_write(gpu, &c->buffers[Y], c->host.output, y_bytes(&c->host));
    assert_ok(sp_grouped_lora_launch(grouped, &c->device, stream, &error), &error);
    if (stream != NULL) /* reads follow the main one */
        assert_ok(sp_stream_wait(stream, &error), &error);
    return (const uint16_t *)(void *)gpu_buffer_read(gpu, &c->buffers[Y], y_bytes(&c->host));
}

static const uint16_t *run_call(call *c)
{
    return run_call_on(c, NULL);
}

/* ---- reference ----------------------------------------------------------------------------- */

static double f16(const void *data, int64_t index)
{
    return hand_load(SP_DTYPE_F16, data, index);
}

typedef struct exact_row {
    double xa[512], size[512];
} exact_row;

static void exact_xa(const sp_grouped_lora_params *p, int32_t adapter, int32_t row, exact_row *out)
{
    int64_t stride = sp_grouped_lora_rank_stride(p->max_rank), in = p->input_size;

    for (int32_t c = 0; c < p->ranks[adapter]; c++) {
        out->xa[c] = out->size[c] = 0.0;
        for (int64_t k = 0; k < in; k++) {
            double part =
                f16(p->input, row * in + k) * f16(p->lora_a, (adapter * in + k) * stride + c);

            out->xa[c] += part;
            out->size[c] += fabs(part);
        }
    }
}

/* Each of the three roundings, and the FP32 sums, may lose what they can at most. */
static void check_row(const sp_grouped_lora_params *p, int32_t adapter, int32_t row,
                      const uint16_t *y)
{
    int64_t stride = sp_grouped_lora_rank_stride(p->max_rank), out = p->output_size;
    double u = 0x1p-11, scale = (double)p->scales[adapter];
    static exact_row exact;

    exact_xa(p, adapter, row, &exact);
    for (int64_t n = 0; n < out; n++) {
        double start = f16(p->output, row * out + n), delta = 0.0, loss = 0.0, bound, got;

        for (int32_t c = 0; c < p->ranks[adapter]; c++) {
            double b = f16(p->lora_b, (adapter * stride + c) * out + n);

            delta += exact.xa[c] * b;
            loss += fabs(b) * (u * fabs(exact.xa[c]) + 0x1p-16 * exact.size[c] + 0x1p-24);
        }
        bound = fabs(scale) * (loss + u * (fabs(delta) + loss) + 0x1p-24);
        bound += u * (fabs(start + scale * delta) + bound) + 0x1p-24;
        got = f16(y, row * out + n);
        if (!(fabs(got - (start + scale * delta)) <= bound))
            fail_msg("rows %d in %d out %d row %d column %d: %g, not %g +- %g", (int)p->total_rows,
                     (int)p->input_size, (int)out, (int)row, (int)n, got, start + scale * delta,
                     bound);
    }
}

/* Rows in steps of `step`; those of rank or scale 0 all, by their bytes. */
static void check_rows(const sp_grouped_lora_params *p, const uint16_t *y, int32_t step)
{
    size_t width = (size_t)p->output_size;

    for (int32_t g = 0; g < p->n_segments; g++)
        for (int32_t row = p->segment_offsets[g]; row < p->segment_offsets[g + 1]; row++) {
            int32_t adapter = p->segment_adapters[g];

            if (p->ranks[adapter] == 0 || p->scales[adapter] == 0.0f)
                assert_memory_equal(y + (size_t)row * width,
                                    (const uint16_t *)p->output + (size_t)row * width, width * 2);
            else if (row % step == 0)
                check_row(p, adapter, row, y);
        }
}

/* ---- fixtures ------------------------------------------------------------------------------ */

static sp_grouped_lora_params open_case(const golden *file, int index)
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
        .output = golden_get(file, "g%02d.output0", index)->data,
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

static void every_case_matches(void **state)
{
    golden *file = golden_open("kernels/grouped.safetensors");
    int64_t elements = 0, differing = 0;

    (void)state;
    for (int index = 0; index < 8; index++) {
        sp_grouped_lora_params host = open_case(file, index);
        const golden_tensor *ref = golden_get(file, "g%02d.output_ref", index);
        const golden_tensor *staged = golden_get(file, "g%02d.output_staged", index);
        call c = make_call(&host);
        const uint16_t *y = run_call(&c);
        double error2 = 0.0, sum2 = 0.0;

        check_rows(&host, y, 1);
        for (int64_t i = 0; i < ref->n; i++) {
            error2 += pow(f16(y, i) - golden_value(ref, i), 2);
            sum2 += pow(golden_value(ref, i), 2);
            elements++;
            differing += f16(y, i) != golden_value(staged, i);
        }
        if (!(error2 <= sum2 * 6e-4 * 6e-4))
            fail_msg("g%02d: relative error %g", index, sqrt(error2 / sum2));
        free_call(&c);
    }
    print_message("%lld of %lld elements differ from output_staged\n", (long long)differing,
                  (long long)elements);
    golden_close(file);
}

/* ---- random shapes ------------------------------------------------------------------------- */

typedef struct shape {
    int32_t rows, in, out, max_rank, segments, adapters;
} shape;

typedef struct random_call {
    uint16_t *x, *a, *b, *y;
    int32_t *offsets, *ids, *ranks;
    float *scales;
    sp_grouped_lora_params params;
} random_call;

static uint16_t *numbers(size_t n, double size, sp_test_random *random)
{
    uint16_t *data = malloc(n * 2);

    assert_non_null(data);
    for (size_t i = 0; i < n; i++)
        hand_store(SP_DTYPE_F16, data, (int64_t)i, size * (double)sp_test_float(random));
    return data;
}

/* NaN outside each adapter's rank. */
static void fill_weights(random_call *r, const shape *s, sp_test_random *random)
{
    int64_t stride = sp_grouped_lora_rank_stride(s->max_rank);

    r->a = numbers((size_t)(s->adapters * s->in * stride), 0.2, random);
    r->b = numbers((size_t)(s->adapters * stride * s->out), 0.2, random);
    for (int32_t adapter = 0; adapter < s->adapters; adapter++)
        for (int64_t c = r->ranks[adapter]; c < stride; c++) {
            for (int64_t k = 0; k < s->in; k++)
                r->a[(adapter * s->in + k) * stride + c] = 0x7e00;
            for (int64_t n = 0; n < s->out; n++)
                r->b[(adapter * stride + c) * s->out + n] = 0x7e00;
        }
}

/* Uneven segments: borders drawn without repeats. */
static void fill_segments(random_call *r, const shape *s, sp_test_random *random)
{
    for (int32_t g = 0; g < s->segments; g++) {
        int32_t left = s->segments - g, rows = s->rows - r->offsets[g];
        int32_t most = rows - (left - 1);

        r->offsets[g + 1] =
            left == 1 ? s->rows
                      : r->offsets[g] + 1 +
                            (int32_t)sp_test_below(random, (uint32_t)most) / (left > 2 ? 2 : 1);
        r->ids[g] = (int32_t)sp_test_below(random, (uint32_t)s->adapters);
    }
}

static random_call make_random(const shape *s, uint64_t seed)
{
    sp_test_random random = {seed};
    random_call r = {
        .x = numbers((size_t)s->rows * (size_t)s->in, 1.0, &random),
        .y = numbers((size_t)s->rows * (size_t)s->out, 1.0, &random),
        .offsets = calloc((size_t)s->segments + 1, 4),
        .ids = calloc((size_t)s->segments, 4),
        .ranks = calloc((size_t)s->adapters, 4),
        .scales = calloc((size_t)s->adapters, 4),
    };

    assert_true(r.offsets && r.ids && r.ranks && r.scales);
    for (int32_t a = 0; a < s->adapters; a++) {
        r.ranks[a] = a == 0   ? s->max_rank
                     : a == 1 ? 0
                              : (int32_t)sp_test_below(&random, (uint32_t)s->max_rank + 1);
        r.scales[a] = a == 2 ? 0.0f : -0.5f + 0.25f * (float)(a % 7 + 3);
    }
    fill_segments(&r, s, &random);
    fill_weights(&r, s, &random);
    r.params = (sp_grouped_lora_params){
        .struct_bytes = sizeof(sp_grouped_lora_params),
        .input = r.x,
        .lora_a = r.a,
        .lora_b = r.b,
        .output = r.y,
        .segment_offsets = r.offsets,
        .segment_adapters = r.ids,
        .ranks = r.ranks,
        .scales = r.scales,
        .total_rows = s->rows,
        .input_size = s->in,
        .output_size = s->out,
        .max_rank = s->max_rank,
        .n_segments = s->segments,
        .n_adapters = s->adapters,
    };
    return r;
}

static void free_random(random_call *r)
{
    free(r->x);
    free(r->a);
    free(r->b);
    free(r->y);
    free(r->offsets);
    free(r->ids);
    free(r->ranks);
    free(r->scales);
}

/* Each row as a call of its own, of one segment, must give its bytes in the batch. */
static void check_alone(const random_call *r, const uint16_t *together, int32_t step)
{
    size_t width = (size_t)r->params.output_size, in = (size_t)r->params.input_size;

    for (int32_t g = 0; g < r->params.n_segments; g++)
        for (int32_t row = r->offsets[g]; row < r->offsets[g + 1]; row++) {
            sp_grouped_lora_params single = r->params;
            call c;

            if (row % step != 0)
                continue;
            single.input = r->x + (size_t)row * in;
            single.output = r->y + (size_t)row * width;
            single.segment_offsets = (int32_t[]){0, 1};
            single.segment_adapters = &r->ids[g];
            single.total_rows = single.n_segments = 1;
            c = make_call(&single);
            assert_memory_equal(run_call(&c), together + (size_t)row * width, width * 2);
            free_call(&c);
        }
}

static void check_shape(const shape *s, uint64_t seed)
{
    random_call r = make_random(s, seed);
    call c = make_call(&r.params);
    size_t bytes = y_bytes(&r.params);
    uint16_t *first = malloc(bytes);

    assert_non_null(first);
    memcpy(first, run_call(&c), bytes);
    check_rows(&r.params, first, s->rows > 24 ? s->rows / 24 : 1);
    for (int again = 0; again < 3; again++)
        assert_memory_equal(run_call(&c), first, bytes);
    check_alone(&r, first, s->rows > 12 ? s->rows / 12 : 1);
    free(first);
    free_call(&c);
    free_random(&r);
}

static void a_small_shape_is_right(void **state)
{
    (void)state;
    check_shape(&(shape){17, 100, 72, 12, 4, 4}, 1);
    check_shape(&(shape){9, 33, 21, 70, 3, 4}, 2);
}

/* A stream of the host's, eager and captured. */
static void a_small_shape_on_the_hosts_stream(void **state)
{
    static const shape s = {17, 100, 72, 12, 4, 4};
    random_call r = make_random(&s, 1);
    call c = make_call(&r.params);
    size_t bytes = y_bytes(&r.params);
    sp_stream *owner = NULL, *stream = NULL;
    uint16_t *want = malloc(bytes);
    sp_graph *graph = NULL;
    sp_error error;

    (void)state;
    assert_non_null(want);
    assert_ok(sp_stream_create(gpu, &owner, &error), &error);
    assert_ok(sp_stream_wrap(gpu, sp_stream_native(owner), &stream, &error), &error);
    memcpy(want, run_call(&c), bytes);
    check_rows(&r.params, want, 1);
    assert_memory_equal(run_call_on(&c, stream), want, bytes);
    gpu_buffer_write(gpu, &c.buffers[Y], c.host.output, bytes);
    assert_ok(sp_graph_begin(stream, &error), &error);
    assert_ok(sp_grouped_lora_launch(grouped, &c.device, stream, &error), &error);
    assert_ok(sp_graph_end(stream, &graph, &error), &error);
    assert_ok(sp_graph_launch(graph, stream, &error), &error);
    assert_ok(sp_stream_wait(stream, &error), &error);
    assert_memory_equal(gpu_buffer_read(gpu, &c.buffers[Y], bytes), want, bytes);
    assert_ok(sp_grouped_lora_check_device(grouped, &c.device, stream, &error), &error);
    sp_graph_destroy(graph);
    sp_stream_destroy(stream);
    sp_stream_destroy(owner);
    free(want);
    free_call(&c);
    free_random(&r);
}

static void random_shapes_are_right(void **state)
{
    static const shape shapes[] = {
        {1, 4096, 4096, 16, 1, 1},    {7, 4096, 1024, 64, 3, 5},    {8, 512, 520, 128, 8, 9},
        {64, 4096, 2048, 16, 64, 64}, {257, 1536, 264, 8, 5, 6},    {31, 37, 5, 3, 9, 4},
        {300, 130, 90, 512, 4, 4},    {2048, 1024, 1032, 16, 7, 8}, {129, 12288, 256, 32, 2, 3},
        {48, 8, 1, 1, 48, 3},         {8192, 256, 264, 16, 16, 16},
    };

    (void)state;
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        check_shape(&shapes[i], 100 + i);
}

/* Captured once, replayed after segments, adapters, ranks and scales have changed. */
static void a_graph_replays_other_metadata(void **state)
{
    static const shape s = {70, 520, 200, 40, 6, 5};
    sp_stream *stream = sp_device_main_stream(gpu);
    sp_graph *graph = NULL;
    random_call r = make_random(&s, 7);
    call c = make_call(&r.params);
    size_t bytes = y_bytes(&r.params);
    uint16_t *eager = malloc(bytes);
    sp_error error;

    (void)state;
    assert_non_null(eager);
    (void)run_call(&c);
    assert_ok(sp_graph_begin(stream, NULL), NULL);
    assert_ok(sp_grouped_lora_launch(grouped, &c.device, NULL, &error), &error);
    assert_ok(sp_graph_end(stream, &graph, NULL), NULL);
    for (int32_t turn = 0; turn < 6; turn++) {
        for (int32_t g = 0; g < s.segments; g++) {
            r.ids[g] = (g * turn + 1) % s.adapters;
            r.offsets[g + 1] = g + 1 == s.segments ? s.rows : r.offsets[g] + 3 + (g + turn) % 5;
        }
        gpu_buffer_write(gpu, &c.buffers[IDS], r.ids, (size_t)s.segments * 4);
        gpu_buffer_write(gpu, &c.buffers[OFFSETS], r.offsets, ((size_t)s.segments + 1) * 4);
        memcpy(eager, run_call(&c), bytes);
        check_rows(&r.params, eager, 5);
        gpu_buffer_write(gpu, &c.buffers[Y], r.y, bytes);
        assert_ok(sp_graph_launch(graph, stream, NULL), NULL);
        assert_memory_equal(gpu_buffer_read(gpu, &c.buffers[Y], bytes), eager, bytes);
    }
    sp_graph_destroy(graph);
    free(eager);
    free_call(&c);
    free_random(&r);
}

/* ---- metadata ------------------------------------------------------------------------------ */

static void refuse(const random_call *r, const char *subject, int64_t position)
{
    call c = make_call(&r->params);
    sp_error on_host = {0}, on_device = {0};

    assert_int_equal(sp_grouped_lora_check_device(grouped, &c.device, NULL, &on_device),
                     SP_ERR_INPUT);
    assert_string_equal(on_device.subject, subject);
    assert_int_equal(on_device.position, position);
    /* The host's check, on the host's copies, says the same. */
    c.host.workspace = c.device.workspace;
    c.host.workspace_bytes = c.device.workspace_bytes;
    assert_int_equal(sp_grouped_lora_check(&c.host, &on_host), SP_ERR_INPUT);
    assert_string_equal(on_host.subject, subject);
    assert_int_equal(on_host.position, position);
    /* And a launch all the same writes nothing outside the rows: the guards are read here. */
    (void)run_call(&c);
    free_call(&c);
}

static void bad_metadata_is_named_and_harmless(void **state)
{
    static const shape s = {20, 64, 40, 8, 4, 3};
    random_call r = make_random(&s, 9);
    int32_t good_offset = r.offsets[2], good_id = r.ids[1], good_rank = r.ranks[2];
    call c = make_call(&r.params);
    sp_error error;

    (void)state;
    assert_ok(sp_grouped_lora_check_device(grouped, &c.device, NULL, &error), &error);
    free_call(&c);
    r.offsets[2] = r.offsets[1];
    refuse(&r, "segment_offsets", 2);
    r.offsets[2] = -5;
    refuse(&r, "segment_offsets", 2);
    r.offsets[2] = good_offset;
    r.offsets[4] = 21;
    refuse(&r, "segment_offsets", 4);
    r.offsets[4] = 20;
    r.offsets[0] = 1;
    refuse(&r, "segment_offsets", 0);
    r.offsets[0] = 0;
    r.ids[1] = 3;
    refuse(&r, "segment_adapters", 1);
    r.ids[1] = -1;
    refuse(&r, "segment_adapters", 1);
    r.ids[1] = good_id;
    r.ranks[2] = 9;
    refuse(&r, "ranks", 2);
    r.ranks[2] = -1;
    refuse(&r, "ranks", 2);
    r.ranks[2] = good_rank;
    r.scales[1] = INFINITY;
    refuse(&r, "scales", 1);
    free_random(&r);
}

static void bad_sizes_are_refused(void **state)
{
    static const shape s = {4, 16, 8, 8, 2, 2};
    random_call r = make_random(&s, 11);
    call c = make_call(&r.params);
    sp_grouped_lora_params good = c.device;
    sp_device *cpu = NULL;
    sp_grouped_lora *none = NULL;
    sp_error error;

    (void)state;
#define REFUSED(field, value) \
    c.device = good;          \
    c.device.field = value;   \
    assert_int_equal(sp_grouped_lora_launch(grouped, &c.device, NULL, &error), SP_ERR_ARGUMENT)
    REFUSED(total_rows, 0);
    REFUSED(input_size, 0);
    REFUSED(max_rank, -1);
    REFUSED(n_segments, 5);
    REFUSED(lora_a, NULL);
    REFUSED(workspace_bytes, good.workspace_bytes - 1);
#undef REFUSED
    c.device = good;
    c.device.output_size = SP_GROUPED_LORA_WIDTH_MAX + 1;
    assert_int_equal(sp_grouped_lora_launch(grouped, &c.device, NULL, &error), SP_ERR_UNSUPPORTED);
    assert_string_equal(error.subject, "output_size");
    c.device = good;
    c.device.max_rank = SP_GROUPED_LORA_RANK_MAX + 1;
    assert_int_equal(sp_grouped_lora_launch(grouped, &c.device, NULL, &error), SP_ERR_UNSUPPORTED);
    assert_int_equal(sp_grouped_lora_launch(NULL, &good, NULL, &error), SP_ERR_ARGUMENT);
    assert_ok(sp_device_open("cpu", NULL, &cpu, NULL), NULL);
    assert_int_equal(sp_grouped_lora_create(cpu, &none, &error), SP_ERR_UNSUPPORTED);
    sp_device_close(cpu);
    free_call(&c);
    free_random(&r);
}

static int create_grouped(void **state)
{
    sp_error error;

    (void)state;
    assert_ok(sp_grouped_lora_create(gpu, &grouped, &error), &error);
    return 0;
}

static int destroy_grouped(void **state)
{
    (void)state;
    sp_grouped_lora_destroy(grouped);
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_small_shape_is_right),
        cmocka_unit_test(a_small_shape_on_the_hosts_stream),
        cmocka_unit_test(every_case_matches),
        cmocka_unit_test(random_shapes_are_right),
        cmocka_unit_test(a_graph_replays_other_metadata),
        cmocka_unit_test(bad_metadata_is_named_and_harmless),
        cmocka_unit_test(bad_sizes_are_refused),
    };

    return gpu_main(&gpu, tests, sizeof tests / sizeof tests[0], create_grouped, destroy_grouped,
                    argc, argv);
}
