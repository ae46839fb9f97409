/*
 * test_cuda.c: the CUDA kernels on a GPU against a double reference, the host's plan and
 * themselves. Skipped where there is no GPU.
 */
#include "cuda/gpu_main.h"
#include "cuda/rig.h"
#include "route/plan_rows.h"

#include <math.h>
#include <stdio.h>

static sp_device *gpu;
static rig the_rig;

static uint16_t *step(rig *r, int site)
{
    size_t bytes = (size_t)r->shape.rows * (size_t)r->shape.n * 2;
    uint16_t *y = malloc(bytes);

    rig_enqueue(r);
    r->failed |= sp_device_read(r->device, y, r->group.sites[site].y, bytes, NULL) != SP_OK;
    assert_false(r->failed);
    return y;
}

/*
 * Every element of one row within the bound that its three roundings and the FP32 sums allow:
 * u of the result, of the scaled delta, and of each xa that the delta is made of.
 */
static void check_row(const rig *r, const uint16_t *y, int32_t row)
{
    size_t k = (size_t)r->shape.k, n = (size_t)r->shape.n, rs = (size_t)r->shape.rank_stride;
    int32_t slot = r->seq_slot[row];
    double u = r->shape.type == SP_DTYPE_F16 ? 0x1p-11 : 0x1p-8, xa[512] = {0}, size[512] = {0};
    double scale = (double)r->scales[slot] * (double)r->row_scale[row];

    for (size_t c = 0; c < (size_t)r->ranks[slot]; c++)
        for (size_t i = 0; i < k; i++) {
            double part = rig_value(r, r->x[(size_t)row * k + i]) *
                          rig_value(r, r->a[((size_t)slot * rs + c) * k + i]);

            xa[c] += part;
            size[c] += fabs(part);
        }
    for (size_t j = 0; j < n; j++) {
        double y0 = rig_value(r, r->y[(size_t)row * n + j]), delta = 0.0, loss = 0.0, got, bound;

        for (size_t c = 0; c < (size_t)r->ranks[slot]; c++) {
            double b = rig_value(r, r->b[((size_t)slot * n + j) * rs + c]);

            delta += xa[c] * b;
            loss += fabs(b) * (u * fabs(xa[c]) + 0x1p-16 * size[c] + 0x1p-24);
        }
        bound = scale * (loss + u * (fabs(delta) + loss) + 0x1p-24);
        bound += u * (fabs(y0 + scale * delta) + bound) + 0x1p-24;
        got = rig_value(r, y[(size_t)row * n + j]);
        if (!(fabs(got - (y0 + scale * delta)) <= bound))
            fail_msg("rows %d k %d n %d R %d row %d column %zu: %g, not %g +- %g", r->shape.rows,
                     r->shape.k, r->shape.n, r->shape.rank_stride, row, j, got, y0 + scale * delta,
                     bound);
    }
}

static void check_step(rig *r)
{
    size_t row_bytes = (size_t)r->shape.n * 2;
    uint16_t *y = step(r, r->shape.sites - 1);
    int32_t stride = r->shape.rows > 16 ? r->shape.rows / 16 : 1;

    for (int32_t row = 0; row < r->shape.rows; row++) {
        int32_t slot = r->seq_slot[row];

        if (slot < 0 || r->ranks[slot] == 0)
            assert_memory_equal((char *)y + (size_t)row * row_bytes,
                                (char *)r->y + (size_t)row * row_bytes, row_bytes);
        else if (row % stride == 0)
            check_row(r, y, row);
    }
    free(y);
}

static void random_steps_are_near_the_double_reference(void **state)
{
    static const int32_t rows[] = {1,  2,  3,  7,   8,   9,   15,  16,  17,  31,
                                   48, 49, 64, 127, 128, 129, 256, 257, 2048};
    static const int32_t ranks[] = {1, 4, 8, 12, 16, 32, 64, 128, 256, 0, 512};
    static const int32_t shapes[][2] = {{4096, 1024}, {130, 90}, {1536, 264}, {40, 1}, {5120, 512}};
    int32_t seq_slot[2048], own[11];

    (void)state;
    for (size_t i = 0; i < 19; i++)
        for (size_t mix = 0; mix < 3; mix++) {
            const int32_t *kn = shapes[(i + mix) % 5];
            int32_t big = (i + mix) % 2 != 0, n_ranks = big ? 11 : 6;
            rig_shape shape = {
                rows[i], 11, kn[0], kn[1], big ? 512 : 32, (int32_t)(i % 3) + 1, 0, SP_DTYPE_BF16};

            if (mix == 2)
                shape.type = SP_DTYPE_F16;
            for (int32_t s = 0; s < 11; s++)
                own[s] = s < n_ranks ? ranks[s] : 0;
            for (int32_t row = 0; row < rows[i]; row++)
                seq_slot[row] =
                    mix == 0 ? (int32_t)i % n_ranks : (int32_t)(rig_hash((uint32_t)row) % 12u) - 1;
            rig_make(&the_rig, &shape, seq_slot, own, NULL);
            check_step(&the_rig);
            rig_free(&the_rig);
        }
}

/* Launches chosen for smaller and larger GPUs cut the work otherwise and give the same bytes. */
static void the_size_of_the_gpu_moves_no_bit(void **state)
{
    static const int32_t sizes[] = {16, 48, 84, 264};
    static const int32_t shapes[][5] = {/* rows, slots, k, n, R */
                                        {64, 16, 4096, 1024, 64},
                                        {256, 11, 12288, 512, 128},
                                        {300, 3, 4096, 2048, 16},
                                        {2048, 11, 5120, 1024, 64}};
    int32_t seq_slot[2048], own[16];

    (void)state;
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        const int32_t *s = shapes[i];
        rig_shape shape = {s[0], s[1], s[2], s[3], s[4], 2, 0, SP_DTYPE_BF16};
        size_t bytes = (size_t)s[0] * (size_t)s[3] * 2;
        uint16_t *want;

        for (int32_t slot = 0; slot < s[1]; slot++)
            own[slot] = slot % 3 == 0 ? s[4] : s[4] / 2;
        for (int32_t row = 0; row < s[0]; row++)
            seq_slot[row] = (int32_t)(rig_hash((uint32_t)row) % (uint32_t)(s[1] + 1)) - 1;
        rig_make(&the_rig, &shape, seq_slot, own, NULL);
        want = step(&the_rig, 1);
        rig_free(&the_rig);
        for (size_t size = 0; size < sizeof sizes / sizeof sizes[0]; size++) {
            uint16_t *got;

            the_rig.multiprocessors = sizes[size];
            rig_make(&the_rig, &shape, seq_slot, own, NULL);
            got = step(&the_rig, 1);
            assert_memory_equal(got, want, bytes);
            free(got);
            rig_free(&the_rig);
        }
        the_rig.multiprocessors = 0;
        free(want);
    }
}

/* The row of seed 5 and slot 2 of any batch: its bytes in the first run are kept. */
static void one_row_has_one_answer(void **state)
{
    static const int32_t rows[] = {1, 2, 8, 9, 33, 64, 200, 256, 300, 1024};
    static const int32_t strides[] = {16, 64, 256};
    static const int32_t ks[] = {4096, 12288, 200};
    uint32_t seeds[1024];
    int32_t seq_slot[1024], own[7];
    uint16_t first[264];

    (void)state;
    for (size_t kk = 0; kk < 3; kk++)
        for (size_t i = 0; i < 30; i++) {
            int32_t n_rows = rows[i % 10],
                    place = (int32_t)(rig_hash((uint32_t)i) % (uint32_t)n_rows);
            rig_shape shape = {
                n_rows, 7, ks[kk], 264, strides[i / 10], (int32_t)(i % 3) + 1, 0, SP_DTYPE_BF16};
            uint16_t *y;

            for (int32_t s = 0; s < 7; s++)
                own[s] = s == 2 || s == 5 ? 12 : shape.rank_stride;
            for (int32_t row = 0; row < n_rows; row++) {
                seq_slot[row] =
                    (int32_t)i % 2 ? 2 : (int32_t)(rig_hash((uint32_t)(row + 7)) % 8u) - 1;
                seeds[row] = (uint32_t)row + 100u;
            }
            if (n_rows >= 8 && i % 2) /* all eight columns of a tile, by turns */
                place = place / 8 * 8 + (int32_t)i / 2 % 8 < n_rows
                            ? place / 8 * 8 + (int32_t)i / 2 % 8
                            : place;
            seq_slot[place] = 2;
            seeds[place] = 5;
            rig_make(&the_rig, &shape, seq_slot, own, seeds);
            y = step(&the_rig, shape.sites - 1);
            if (i == 0)
                memcpy(first, y, sizeof first);
            assert_memory_equal(y + (size_t)place * 264, first, sizeof first);
            free(y);
            rig_free(&the_rig);
        }
}

/* Rows here and there of long prefills, of few and of many ranks, and each of them alone. */
static void a_row_of_a_long_prefill_is_the_row_alone(void **state)
{
    static const int32_t shapes[][4] = {/* rows, k, rank, sites */
                                        {2048, 4096, 16, 3},  {2048, 2560, 64, 3},
                                        {8192, 4096, 16, 1},  {8192, 2056, 64, 2},
                                        {4096, 1104, 256, 3}, {515, 4096, 128, 1}};
    static int32_t seq_slot[8192], own[6] = {0, 1, 2, 3, 4, 5};
    int32_t row_bytes = 136 * 2;

    (void)state;
    for (size_t i = 0; i < 6; i++) {
        rig_shape shape = {shapes[i][0],
                           6,
                           shapes[i][1],
                           136,
                           shapes[i][2],
                           shapes[i][3],
                           0,
                           i % 2 ? SP_DTYPE_F16 : SP_DTYPE_BF16};
        rig_shape one_shape = shape;
        static rig one;
        uint16_t *y, *alone;

        for (int32_t s = 0; s < 6; s++)
            own[s] = s == 4 ? 0 : s == 5 ? shape.rank_stride / 2 + 4 : shape.rank_stride;
        for (int32_t row = 0; row < shape.rows; row++) /* segments, and a few rows in between */
            seq_slot[row] = row % 97 == 5 ? -1 : row % 61 == 7 ? row % 6 : row * 5 / shape.rows;
        rig_make(&the_rig, &shape, seq_slot, own, NULL);
        y = step(&the_rig, shape.sites - 1);
        one = the_rig;
        one_shape.rows = 1;
        for (int32_t row = 0; row < shape.rows; row += shape.rows / 23) {
            int32_t slot = seq_slot[row];
            uint32_t seed = (uint32_t)row;

            if (slot < 0)
                continue;
            rig_make(&one, &one_shape, &slot, own, &seed);
            alone = step(&one, shape.sites - 1);
            assert_memory_equal(y + (size_t)row * 136, alone, (size_t)row_bytes);
            if (row % 2)
                check_row(&the_rig, y, row);
            free(alone);
            rig_free(&one);
        }
        free(y);
        rig_free(&the_rig);
    }
}

/* As many adapters as rows, some without this module, and rows of the base between. */
static void every_row_has_a_slot_of_its_own(void **state)
{
    static const int32_t sizes[] = {64, 256, 300};
    int32_t seq_slot[300], own[300];

    (void)state;
    for (size_t i = 0; i < 3; i++) {
        int32_t n = sizes[i];
        rig_shape shape = {n, n, 1536, 264, 16, 2, 0, SP_DTYPE_BF16}, one_shape = shape;
        static rig one;
        uint16_t *y, *alone;

        for (int32_t s = 0; s < n; s++)
            own[s] = s % 5 == 0 ? 0 : s % 3 == 0 ? 7 : 16;
        for (int32_t row = 0; row < n; row++)
            seq_slot[row] = row % 11 == 5 ? -1 : (row * 7 + 3) % n;
        rig_make(&the_rig, &shape, seq_slot, own, NULL);
        check_step(&the_rig);
        assert_int_equal(sp_device_write(the_rig.device, the_rig.group.sites[1].y, the_rig.y,
                                         (size_t)n * 264 * 2, NULL),
                         SP_OK);
        y = step(&the_rig, 1);
        one = the_rig;
        one_shape.rows = 1;
        for (int32_t row = 1; row < n; row += n / 4) {
            uint32_t seed = (uint32_t)row;

            rig_make(&one, &one_shape, &seq_slot[row], own, &seed);
            alone = step(&one, 1);
            assert_memory_equal(y + (size_t)row * 264, alone, 264 * 2);
            free(alone);
            rig_free(&one);
        }
        free(y);
        rig_free(&the_rig);
    }
}

/* More segments than a warp has lanes, most of them shorter than a window and empty slots between:
 * some rows against the double reference, and alone. */
static void many_segments_keep_to_their_rows(void **state)
{
    rig_shape shape = {1500, 90, 1096, 136, 24, 2, 0, SP_DTYPE_BF16}, one_shape = shape;
    int32_t seq_slot[1500], own[90];
    static rig one;
    uint16_t *y, *alone;

    (void)state;
    one_shape.rows = 1;
    for (int32_t s = 0; s < 90; s++)
        own[s] = s % 11 == 3 ? 0 : 1 + s * 7 % 24;
    for (int32_t row = 0; row < 1500; row++) /* three long segments, every fifth slot empty */
        seq_slot[row] = row < 900 ? row / 300 * 40 + 1 : (int32_t)(rig_hash((uint32_t)row) % 90u);
    for (int32_t row = 900; row < 1500; row++)
        seq_slot[row] -= seq_slot[row] % 5 == 0;
    rig_make(&the_rig, &shape, seq_slot, own, NULL);
    y = step(&the_rig, 1);
    one = the_rig;
    for (int32_t row = 0; row < 1500; row += 13) {
        uint32_t seed = (uint32_t)row;

        if (seq_slot[row] < 0)
            continue;
        check_row(&the_rig, y, row);
        rig_make(&one, &one_shape, &seq_slot[row], own, &seed);
        alone = step(&one, 1);
        assert_memory_equal(y + (size_t)row * 136, alone, 136 * 2);
        free(alone);
        rig_free(&one);
    }
    free(y);
    rig_free(&the_rig);
}

/* y of a site between and beside guards: a guard before row 0, one behind the last, and one of
 * eight elements behind each row. */
enum { GUARD = 64, PAD = 8, POISON = 0xa5a5 };

static void guard_y(rig *r, int site, uint16_t *host)
{
    size_t rows = (size_t)r->shape.rows, n = (size_t)r->shape.n, stride = n + PAD;

    for (size_t i = 0; i < 2 * GUARD + rows * stride; i++)
        host[i] = POISON;
    for (size_t row = 0; row < rows; row++)
        memcpy(host + GUARD + row * stride, r->y + row * n, n * 2);
    r->group.sites[site].y = (uint16_t *)rig_put(r, host, (2 * GUARD + rows * stride) * 2) + GUARD;
    r->group.sites[site].y_stride = (int64_t)stride;
}

static void read_guarded_y(rig *r, int site, uint16_t *host)
{
    size_t rows = (size_t)r->shape.rows, n = (size_t)r->shape.n, stride = n + PAD;
    uint16_t *from = (uint16_t *)r->group.sites[site].y - GUARD;

    assert_int_equal(sp_device_read(r->device, host, from, (2 * GUARD + rows * stride) * 2, NULL),
                     SP_OK);
    for (size_t i = 0; i < GUARD; i++) {
        assert_int_equal(host[i], POISON);
        assert_int_equal(host[GUARD + rows * stride + i], POISON);
    }
    for (size_t i = 0; i < rows * PAD; i++)
        assert_int_equal(host[GUARD + i / PAD * stride + n + i % PAD], POISON);
}

/* Some rows and some stored scales become 0. */
static void silence(rig *r)
{
    for (int32_t row = 3; row < r->shape.rows; row += 7)
        r->row_scale[row] = 0.0f;
    for (int32_t slot = 2; slot < r->shape.slots; slot += 9)
        r->scales[slot] = 0.0f;
    assert_int_equal(sp_device_write(r->device, (void *)r->group.plan.row_scale_in, r->row_scale,
                                     (size_t)r->shape.rows * 4, NULL),
                     SP_OK);
    assert_int_equal(sp_device_write(r->device, (void *)r->group.sites[0].scale, r->scales,
                                     (size_t)r->shape.slots * 4, NULL),
                     SP_OK);
}

/* The bytes of row `row` alone, whose slot is not silent. */
static void check_alone(const rig *r, int32_t row, const uint16_t *y)
{
    rig_shape shape = r->shape;
    uint32_t seed = (uint32_t)row;
    uint16_t *alone;
    static rig one;

    one = *r;
    shape.rows = shape.sites = 1;
    rig_make(&one, &shape, &r->seq_slot[row], r->ranks, &seed);
    alone = step(&one, 0);
    assert_memory_equal(y, alone, (size_t)shape.n * 2);
    free(alone);
    rig_free(&one);
}

/* Many adapters and columns, in decode and in windows where runs of several adapters meet; empty
 * cells, ranks of all sizes, silent rows. */
static void rows_of_a_heavy_step_are_the_rows_alone(void **state)
{
    static const int32_t shapes[][5] = {/* rows, slots, n, pool's rank, sites */
                                        {256, 96, 1032, 16, 3},  {200, 200, 1032, 64, 1},
                                        {256, 40, 1288, 128, 2}, {700, 90, 264, 8, 4},
                                        {300, 7, 1032, 512, 1},  {1100, 3, 2088, 48, 2},
                                        {640, 640, 136, 24, 3},  {256, 64, 520, 256, 1}};
    static int32_t seq_slot[1100], own[640];

    (void)state;
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        rig_shape shape = {shapes[i][0], shapes[i][1], 520, shapes[i][2],
                           shapes[i][3], shapes[i][4], 0,   i % 2 ? SP_DTYPE_F16 : SP_DTYPE_BF16};
        size_t n = (size_t)shape.n;
        uint16_t *y = malloc((2 * GUARD + (size_t)shape.rows * (n + PAD)) * 2);

        for (int32_t s = 0; s < shape.slots; s++)
            own[s] = s % 5 == 4 ? 0
                     : s % 2    ? shape.rank_stride
                             : (int32_t)(rig_hash((uint32_t)s) % (uint32_t)shape.rank_stride) + 1;
        for (int32_t row = 0; row < shape.rows; row++)
            seq_slot[row] = (int32_t)(rig_hash((uint32_t)row) % (uint32_t)(shape.slots + 1)) - 1;
        rig_make(&the_rig, &shape, seq_slot, own, NULL);
        silence(&the_rig);
        for (int site = 0; site < shape.sites; site++)
            guard_y(&the_rig, site, y);
        rig_enqueue(&the_rig);
        assert_false(the_rig.failed);
        for (int site = 0; site < shape.sites; site++) {
            read_guarded_y(&the_rig, site, y);
            for (int32_t row = 0; row < shape.rows; row++) {
                const uint16_t *got = y + GUARD + (size_t)row * (n + PAD);
                int32_t slot = seq_slot[row];

                if (slot < 0 || own[slot] == 0 || the_rig.scales[slot] == 0.0f ||
                    the_rig.row_scale[row] == 0.0f)
                    assert_memory_equal(got, the_rig.y + (size_t)row * n, n * 2);
                else if (row % 29 == site)
                    check_alone(&the_rig, row, got);
            }
        }
        free(y);
        rig_free(&the_rig);
    }
}

/* y in FP32 that starts as the bf16 y ends, once rounded, as that one. */
static void a_float_y_rounds_to_the_bf16_one(void **state)
{
    static const int32_t rows[] = {1, 40, 700}, columns[] = {264, 131};
    int32_t seq_slot[700], own[3] = {16, 32, 5};

    (void)state;
    for (size_t i = 0; i < 6; i++) {
        rig_shape shape = {rows[i / 2], 3, 1000, columns[i % 2], 32, 1, 0, SP_DTYPE_BF16};
        size_t n = (size_t)shape.rows * (size_t)shape.n;
        float *floats = calloc(n, 4);
        uint16_t *y;

        for (int32_t row = 0; row < shape.rows; row++)
            seq_slot[row] = row % 4 - 1 + (shape.rows == 1);
        rig_make(&the_rig, &shape, seq_slot, own, NULL);
        y = step(&the_rig, 0);
        for (size_t j = 0; j < n; j++)
            floats[j] = sp_bf16_to_f32(the_rig.y[j]);
        the_rig.group.sites[0].y = rig_put(&the_rig, floats, n * 4);
        the_rig.group.sites[0].y_is_f32 = 1;
        rig_enqueue(&the_rig);
        assert_int_equal(
            sp_device_read(the_rig.device, floats, the_rig.group.sites[0].y, n * 4, NULL), SP_OK);
        for (size_t j = 0; j < n; j++)
            assert_int_equal(sp_f32_to_bf16(floats[j]), y[j]);
        assert_false(the_rig.failed);
        free(floats);
        free(y);
        rig_free(&the_rig);
    }
}

static void check_array(const void *device, const void *host, int32_t n)
{
    int32_t *got = malloc((size_t)n * 4 + 4);

    assert_int_equal(sp_device_read(the_rig.device, got, device, (size_t)n * 4, NULL), SP_OK);
    if (n > 0)
        assert_memory_equal(got, host, (size_t)n * 4);
    free(got);
}

/* The kernels' form of the plan's tiles, up to the bound; what is no row is zeros. */
static void check_tiles(const sp_plan_view *v, int32_t slots)
{
    int32_t n = sp_cuda_tiles_bound(v->n_rows, slots);
    size_t bytes = (size_t)n * sizeof(sp_cuda_tile);
    sp_cuda_tile *want = calloc((size_t)n, sizeof *want), *got = malloc(bytes);

    assert_true(want != NULL && got != NULL && v->n_tiles <= n);
    for (int32_t i = 0; i < v->n_tiles; i++) {
        want[i].slot = v->tile_slot[i];
        want[i].count = v->tile_rows[i];
        for (int32_t j = 0; j < v->tile_rows[i]; j++) {
            want[i].row[j] = v->row_order[v->tile_begin[i] + j];
            want[i].scale[j] = v->row_scale[want[i].row[j]];
        }
    }
    assert_int_equal(sp_device_read(the_rig.device, got, the_rig.group.plan.tiles, bytes, NULL),
                     SP_OK);
    assert_memory_equal(got, want, bytes);
    free(want);
    free(got);
}

static void check_plan(const sp_plan_view *v, int32_t slots)
{
    const sp_cuda_plan *plan = &the_rig.group.plan;
    sp_cuda_plan_head head;

    assert_int_equal(sp_device_read(the_rig.device, &head, plan->head, sizeof head, NULL), SP_OK);
    assert_int_equal(head.n_rows, v->n_rows);
    assert_int_equal(head.n_routed, v->n_routed);
    assert_int_equal(head.n_segments, v->n_segments);
    assert_int_equal(head.n_tiles, v->n_tiles);
    assert_int_equal(head.refused_row, -1);
    check_array(plan->seq_slot, v->seq_slot, v->n_rows);
    check_array(plan->row_scale, v->row_scale, v->n_rows);
    check_array(plan->row_order, v->row_order, v->n_routed);
    check_array(plan->segment_begin, v->segment_begin, v->n_segments + 1);
    check_array(plan->segment_slot, v->segment_slot, v->n_segments);
    check_array(plan->tile_begin, v->tile_begin, v->n_tiles);
    check_array(plan->tile_rows, v->tile_rows, v->n_tiles);
    check_array(plan->tile_slot, v->tile_slot, v->n_tiles);
    check_tiles(v, slots);
}

enum { PLAN_ANY, PLAN_LAST, PLAN_RUNS, PLAN_MIXES };

/* Any slot or none, all rows in the last slot, or runs of rows in slots that descend. */
static int32_t plan_slot(int mix, int32_t row, const rig_shape *shape)
{
    if (mix == PLAN_ANY)
        return (int32_t)(rig_hash((uint32_t)row) % (uint32_t)(shape->slots + 1)) - 1;
    if (mix == PLAN_LAST)
        return shape->slots - 1;
    return (int32_t)((int64_t)(shape->rows - 1 - row) * shape->slots / shape->rows);
}

static void the_devices_plan_is_the_hosts(void **state)
{
    static const int32_t rows[] = {1,   7,    8,    9,    32,   64,   257,  511,   512,
                                   513, 1000, 1025, 2048, 4096, 8192, 9001, 33000, 65536};
    static const int32_t slots[] = {1, 5, 300, 1025, 4096};
    static int32_t seq_slot[65536], own[4096];
    sp_plan *plan = NULL;
    sp_plan_view view;

    (void)state;
    assert_int_equal(sp_plan_create(65536, 4096, &plan, NULL), SP_OK);
    for (int i = 0; i < 18 * 5 * PLAN_MIXES; i++) {
        rig_shape shape = {rows[i % 18], slots[i / 18 % 5], 8, 8, 8, 1, 0, SP_DTYPE_BF16};

        for (int32_t row = 0; row < shape.rows; row++)
            seq_slot[row] = plan_slot(i / 90, row, &shape);
        rig_make(&the_rig, &shape, seq_slot, own, NULL);
        for (int32_t row = 3; row < shape.rows; row += 11) /* these are the base's */
            the_rig.row_scale[row] = 0.0f;
        the_rig.group.plan.row_scale_in =
            rig_put(&the_rig, the_rig.row_scale, (size_t)shape.rows * 4);
        assert_int_equal(
            sp_plan_build_rows(plan, seq_slot, the_rig.row_scale, shape.rows, shape.slots, NULL),
            SP_OK);
        view = *sp_plan_get(plan);
        rig_enqueue(&the_rig);
        assert_false(the_rig.failed);
        check_plan(&view, shape.slots);
        rig_free(&the_rig);
    }
    sp_plan_destroy(plan);
}

static void a_graph_replays_with_other_adapters(void **state)
{
    rig_shape shape = {64, 9, 4096, 264, 64, 3, 0, SP_DTYPE_BF16};
    int32_t one[64], own[9] = {64, 16, 8, 12, 1, 0, 64, 33, 48};
    sp_stream *stream = sp_device_main_stream(the_rig.device);
    size_t bytes = (size_t)64 * 264 * 2;
    sp_graph *graph = NULL;

    (void)state;
    for (int row = 0; row < 64; row++)
        one[row] = 0;
    rig_make(&the_rig, &shape, one, own, NULL);
    assert_int_equal(sp_graph_begin(stream, NULL), SP_OK);
    rig_enqueue(&the_rig);
    assert_int_equal(sp_graph_end(stream, &graph, NULL), SP_OK);
    for (int32_t adapters = 0; adapters <= 9; adapters++) {
        void *y0 = the_rig.group.sites[2].y;
        uint16_t *eager, *replayed = malloc(bytes);

        for (int row = 0; row < 64; row++)
            the_rig.seq_slot[row] = adapters == 0 ? -1 : row % adapters;
        assert_int_equal(sp_device_write(the_rig.device, (void *)the_rig.group.plan.seq_slot_in,
                                         the_rig.seq_slot, 256, NULL),
                         SP_OK);
        for (int again = 0; again < 10; again++) {
            assert_int_equal(sp_device_write(the_rig.device, y0, the_rig.y, bytes, NULL), SP_OK);
            eager = step(&the_rig, 2);
            assert_int_equal(sp_device_write(the_rig.device, y0, the_rig.y, bytes, NULL), SP_OK);
            assert_int_equal(sp_graph_launch(graph, stream, NULL), SP_OK);
            assert_int_equal(sp_device_read(the_rig.device, replayed, y0, bytes, NULL), SP_OK);
            assert_memory_equal(replayed, eager, bytes);
            free(eager);
        }
        free(replayed);
    }
    sp_graph_destroy(graph);
    rig_free(&the_rig);
}

/* Few launches, for the sanitizers: several sites, adapters, chunks, a tail of k, absent rows. */
static void a_small_step_is_right(void **state)
{
    static const int32_t own[4] = {16, 12, 0, 64};
    rig_shape shape = {17, 4, 1100, 136, 64, 3, 0, SP_DTYPE_BF16};
    int32_t seq_slot[600];

    (void)state;
    for (int pass = 0; pass < 3; pass++) {
        shape.rows = pass == 2 ? 600 : 17;
        shape.k = pass == 1 ? 1101 : 1104;
        for (int row = 0; row < shape.rows; row++)
            seq_slot[row] = row % 5 - 1;
        rig_make(&the_rig, &shape, seq_slot, own, NULL);
        check_step(&the_rig);
        rig_free(&the_rig);
    }
}

/* Bad rows one by one, wherever they lie, and two at once, of which the first is named. */
static void a_bad_row_refuses_the_devices_plan(void **state)
{
    static const int32_t rows[] = {3, 512, 700, 8192}, own[2] = {8, 8};
    static int32_t seq_slot[8192];

    (void)state;
    for (int i = 0; i < 4 * 4; i++) {
        rig_shape shape = {rows[i / 4], 2, 64, 64, 8, 1, 0, SP_DTYPE_BF16};
        int32_t bad = (int32_t)((int64_t)(shape.rows - 1) * (i % 4) / 3);
        sp_cuda_plan_head head;
        uint16_t *y;

        for (int32_t row = 0; row < shape.rows; row++)
            seq_slot[row] = row % 3 - 1;
        seq_slot[bad] = i % 2 ? -2 : 2;
        seq_slot[shape.rows - 1] = 77;
        rig_make(&the_rig, &shape, seq_slot, own, NULL);
        y = step(&the_rig, 0);
        assert_memory_equal(y, the_rig.y, (size_t)shape.rows * 64 * 2);
        assert_int_equal(
            sp_device_read(the_rig.device, &head, the_rig.group.plan.head, sizeof head, NULL),
            SP_OK);
        assert_int_equal(head.refused_row, bad);
        assert_int_equal(head.n_tiles, 0);
        for (int32_t row = 0; row < shape.rows; row++)
            seq_slot[row] = -1;
        check_array(the_rig.group.plan.seq_slot, seq_slot, shape.rows);
        free(y);
        rig_free(&the_rig);
    }
}

static int start_rig(void **state)
{
    sp_error error;

    (void)state;
    assert_ok(rig_start(&the_rig, gpu, &error), &error);
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_devices_plan_is_the_hosts),
        cmocka_unit_test(random_steps_are_near_the_double_reference),
        cmocka_unit_test(the_size_of_the_gpu_moves_no_bit),
        cmocka_unit_test(one_row_has_one_answer),
        cmocka_unit_test(a_row_of_a_long_prefill_is_the_row_alone),
        cmocka_unit_test(rows_of_a_heavy_step_are_the_rows_alone),
        cmocka_unit_test(every_row_has_a_slot_of_its_own),
        cmocka_unit_test(many_segments_keep_to_their_rows),
        cmocka_unit_test(a_float_y_rounds_to_the_bf16_one),
        cmocka_unit_test(a_graph_replays_with_other_adapters),
        cmocka_unit_test(a_small_step_is_right),
        cmocka_unit_test(a_bad_row_refuses_the_devices_plan),
    };

    return gpu_main(&gpu, tests, sizeof tests / sizeof tests[0], start_rig, NULL, argc, argv);
}
