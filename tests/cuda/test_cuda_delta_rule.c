/*
 * test_cuda_delta_rule.c: the gated delta rule on a GPU, held against its recurrence in double; and
 * bit by bit against itself, for sequences that were cut into steps in other ways, that shared
 * steps with others, whose drafts were rejected or accepted, or that went on from a snapshot.
 * Skipped where there is no GPU.
 */
#include "cuda/gpu_main.h"
#include "cuda/rule_rig.h"

static sp_device *gpu;
static moe_rig rig;

/* k_heads, v_heads, k_dim, v_dim, conv_width, fused */
static const sp_cuda_rule_shape tiny = {2, 4, 16, 24, 4, 0}, tiny_fused = {2, 4, 16, 16, 4, 1};
static const sp_cuda_rule_shape odd = {3, 3, 40, 72, 8, 0}, wide_conv = {1, 2, 64, 8, 2, 1};
static const sp_cuda_rule_shape one = {1, 1, 128, 128, 4, 0};
static const sp_cuda_rule_shape real = {2, 6, 128, 128, 4, 0}, real_fused = {2, 4, 128, 128, 4, 1};

enum { SEQUENCES = 3, POSITIONS = 200 };

static rule_world make(sp_cuda_rule_shape shape)
{
    const rule_size size = {.shape = shape,
                            .sequences = SEQUENCES,
                            .positions = POSITIONS,
                            .slots = SEQUENCES + 2,
                            .snapshots = 3,
                            .rows_max = SEQUENCES * POSITIONS,
                            .spans_max = 16};

    return rule_make(&rig, &size);
}

static rule_span span_of(int32_t sequence, int32_t position, int32_t n_rows)
{
    return (rule_span){.sequence = sequence,
                       .other = -1,
                       .span = {.n_rows = n_rows,
                                .position = position,
                                .slot = sequence,
                                .folded = position / 32 * 32,
                                .load = -1,
                                .save = -1,
                                .n_final = n_rows}};
}

static void run(rule_world *w, const rule_span *spans, int32_t n, int32_t pads)
{
    assert_int_equal(rule_step(w, spans, n, pads), 0);
    assert_false(rig.failed);
}

static void run_one(rule_world *w, rule_span span)
{
    run(w, &span, 1, 0);
}

/* All rows of all sequences, each in one step; the result is to be freed. */
static uint16_t *run_whole(rule_world *w)
{
    size_t bytes = (size_t)SEQUENCES * POSITIONS * w->y_width * 2;
    uint16_t *y = malloc(bytes);

    assert_non_null(y);
    for (int32_t s = 0; s < SEQUENCES; s++)
        run_one(w, span_of(s, 0, POSITIONS));
    memcpy(y, w->y, bytes);
    memset(w->y, 0, bytes);
    return y;
}

/* Rows [first, end) of a sequence. */
static void expect_rows(const rule_world *w, const uint16_t *want, int32_t sequence, int32_t first,
                        int32_t end, const char *what)
{
    size_t start = (size_t)sequence * POSITIONS;

    for (size_t i = (start + (size_t)first) * w->y_width; i < (start + (size_t)end) * w->y_width;
         i++)
        if (w->y[i] != want[i])
            fail_msg("%s: sequence %d, row %zu, element %zu is %04x, not %04x", what, sequence,
                     i / w->y_width - start, i % w->y_width, w->y[i], want[i]);
}

/* ---- the recurrence ------------------------------------------------------------------------ */

/* Rounding q or k to the other neighbour moves a value by what the second term allows. */
static void expect_head(const rule_world *w, int32_t sequence, int32_t head)
{
    int32_t vd = w->size.shape.v_dim;
    double state[128 * 128] = {0}, y[128], worst = 0;

    for (int32_t position = 0; position < POSITIONS; position++) {
        size_t row = (size_t)(sequence * POSITIONS + position) * w->y_width;
        double square = 0;

        rule_advance(w, sequence, position, head, state, y);
        for (int32_t c = 0; c < vd; c++)
            square += y[c] * y[c];
        for (int32_t c = 0; c < vd; c++) {
            double got = moe_value(SP_DTYPE_BF16, w->y[row + (size_t)(head * vd + c)]);
            double off = fabs(got - y[c]) / (fabs(y[c]) * 0x1p-8 + sqrt(square / vd) * 0x1p-7);

            worst = off > worst ? off : worst;
            if (!(off <= 1))
                fail_msg("sequence %d, row %d, head %d, column %d is %.9g, not %.9g", sequence,
                         position, head, c, got, y[c]);
        }
    }
    print_message("head %d of k %d, v %d: %.3f of what may be off\n", head, w->size.shape.k_dim, vd,
                  worst);
}

static void expect_recurrence(sp_cuda_rule_shape shape)
{
    rule_world w = make(shape);
    uint16_t *y = run_whole(&w);

    memcpy(w.y, y, (size_t)SEQUENCES * POSITIONS * w.y_width * 2);
    for (int32_t head = 0; head < shape.v_heads; head++)
        expect_head(&w, head % SEQUENCES, head);
    free(y);
    rule_free(&w);
}

static void a_small_rule_is_its_recurrence(void **state)
{
    (void)state;
    expect_recurrence(tiny);
    expect_recurrence(tiny_fused);
    expect_recurrence(one);
}

static void the_rule_is_its_recurrence(void **state)
{
    (void)state;
    expect_recurrence(odd);
    expect_recurrence(wide_conv);
    expect_recurrence(real);
    expect_recurrence(real_fused);
}

/* ---- cuts ---------------------------------------------------------------------------------- */

/* A sequence in steps of `each` rows after a first one of `first`, alone. */
static void run_cut(rule_world *w, int32_t sequence, int32_t first, int32_t each)
{
    int32_t n = first;

    for (int32_t at = 0; at < POSITIONS; at += n, n = each)
        run_one(w, span_of(sequence, at, at + n > POSITIONS ? POSITIONS - at : n));
}

static void expect_cuts(sp_cuda_rule_shape shape)
{
    static const int32_t cuts[][2] = {{1, 1},  {7, 7},   {16, 16},  {31, 33}, {32, 32}, {33, 1},
                                      {64, 1}, {64, 64}, {100, 17}, {3, 61},  {5, 120}, {15, 48}};
    rule_world w = make(shape);
    uint16_t *y = run_whole(&w);

    for (size_t i = 0; i < sizeof cuts / sizeof cuts[0]; i++) {
        run_cut(&w, (int32_t)i % SEQUENCES, cuts[i][0], cuts[i][1]);
        expect_rows(&w, y, (int32_t)i % SEQUENCES, 0, POSITIONS, "cut");
    }
    free(y);
    rule_free(&w);
}

static void a_small_cut_changes_no_bit(void **state)
{
    rule_world w = make(tiny);
    uint16_t *y = run_whole(&w);

    (void)state;
    run_cut(&w, 0, 30, 5);
    expect_rows(&w, y, 0, 0, POSITIONS, "cut");
    free(y);
    rule_free(&w);
}

static void no_cut_changes_a_bit(void **state)
{
    (void)state;
    expect_cuts(tiny);
    expect_cuts(tiny_fused);
    expect_cuts(odd);
    expect_cuts(wide_conv);
    expect_cuts(real);
}

/* All sequences in shared steps, each at its own pace and in another order each time. */
static void expect_company(sp_cuda_rule_shape shape)
{
    rule_world w = make(shape);
    uint16_t *y = run_whole(&w);
    int32_t at[SEQUENCES] = {0};
    uint32_t seed = 1;

    for (int step = 0, left = 1; left > 0; step++) {
        rule_span spans[SEQUENCES];
        int32_t n = 0;

        left = 0;
        for (int32_t i = 0; i < SEQUENCES; i++) {
            int32_t s = (i + step) % SEQUENCES, rest = POSITIONS - at[s];
            uint32_t h = moe_hash(seed++);
            int32_t rows = h % 3 == 0 ? 1 : h % 3 == 1 ? 1 + (int32_t)(h / 8 % 16) : 90;

            rows = rows > rest ? rest : rows;
            if (rows > 0)
                spans[n++] = span_of(s, at[s], rows);
            at[s] += rows;
            left += POSITIONS - at[s];
        }
        if (n > 0)
            run(&w, spans, n, step % 5);
    }
    for (int32_t s = 0; s < SEQUENCES; s++)
        expect_rows(&w, y, s, 0, POSITIONS, "company");
    free(y);
    rule_free(&w);
}

static void company_changes_no_bit(void **state)
{
    (void)state;
    expect_company(tiny);
    expect_company(odd);
    expect_company(real_fused);
}

/* ---- many sequences ------------------------------------------------------------------------ */

/* More pairs of a sequence and a head than a GPU takes at a time, so that S of one is copied while
 * another is computed. Sequence s has the rows of s % SEQUENCES. */
enum { MANY = 72, STEPS = 24, REPEATS = 1000 };

static rule_world make_many(sp_cuda_rule_shape shape)
{
    const rule_size size = {.shape = shape,
                            .sequences = SEQUENCES,
                            .positions = POSITIONS,
                            .slots = MANY,
                            .snapshots = 1,
                            .rows_max = MANY * SP_CUDA_NARROW_ROWS,
                            .spans_max = MANY + 4};

    return rule_make(&rig, &size);
}

/* A step of one to SP_CUDA_NARROW_ROWS rows of most of the sequences; returns its spans. */
static int32_t next_step(int32_t *at, int32_t step, rule_span *spans)
{
    int32_t n = 0;

    for (int32_t i = 0; i < MANY; i++) {
        int32_t s = (i + 5 * step) % MANY, rest = POSITIONS - at[s];
        uint32_t h = moe_hash((uint32_t)(step * MANY + s));
        int32_t rows = h % 4 < 2 ? 1 : 1 + (int32_t)(h / 8 % SP_CUDA_NARROW_ROWS);

        rows = rows > rest ? rest : rows;
        if (rows == 0 || (step > 0 && h % 16 == 15))
            continue;
        spans[n] = span_of(s % SEQUENCES, at[s], rows);
        spans[n++].span.slot = s;
        at[s] += rows;
    }
    return n;
}

static void expect_many(sp_cuda_rule_shape shape)
{
    rule_world w = make_many(shape);
    uint16_t *want = run_whole(&w);
    int32_t at[MANY] = {0};

    for (int32_t step = 0; step < STEPS; step++) {
        rule_span spans[MANY];
        int32_t n = next_step(at, step, spans);
        const uint16_t *row;
        uint16_t *y;

        rule_set(&w, spans, n, step % 5);
        rule_launch(&w);
        row = y = moe_get(&rig, w.call.y, (size_t)w.call.rows * w.y_width * 2);
        for (int32_t i = 0; i < n; i++) {
            size_t first = (size_t)spans[i].sequence * POSITIONS + (size_t)spans[i].span.position;
            size_t size = (size_t)spans[i].span.n_rows * w.y_width;

            assert_memory_equal(row, want + first * w.y_width, size * 2);
            row += size;
        }
        free(y);
    }
    assert_false(rig.failed);
    free(want);
    rule_free(&w);
}

static void many_sequences_change_no_bit(void **state)
{
    const sp_cuda_rule_shape shape = {4, 8, 128, 128, 4, 0}, narrow = {4, 8, 32, 48, 4, 1};

    (void)state;
    expect_many(shape);
    expect_many(narrow);
}

/* The same step again and again, of sequences that fold and of others, from the same states. */
static void a_step_of_many_sequences_repeats(void **state)
{
    rule_world w = make_many((sp_cuda_rule_shape){4, 8, 128, 128, 4, 0});
    size_t bytes = (size_t)MANY * (size_t)w.layout.state_bytes, y_bytes;
    void *before = moe_put(&rig, NULL, bytes), *after = NULL;
    sp_stream *stream = sp_device_main_stream(gpu);
    int32_t at[MANY] = {0}, n = 0;
    rule_span spans[MANY];
    uint16_t *y = NULL;

    (void)state;
    for (int32_t step = 0; step < 12; step++) {
        n = next_step(at, step, spans);
        rule_set(&w, spans, n, 0);
        rig.failed |= sp_stream_copy(stream, before, w.call.states, bytes, NULL) != SP_OK;
        rule_launch(&w);
    }
    y_bytes = (size_t)w.call.rows * w.y_width * 2;
    for (int i = 0; i < REPEATS; i++) {
        uint16_t *again = moe_get(&rig, w.call.y, y_bytes);

        if (i == 0)
            y = again, after = moe_get(&rig, w.call.states, bytes);
        if (memcmp(y, again, y_bytes) != 0)
            fail_msg("run %d has another y", i);
        if (i % 250 == 249) {
            void *states = moe_get(&rig, w.call.states, bytes);

            assert_memory_equal(states, after, bytes);
            free(states);
        }
        if (i > 0)
            free(again);
        rig.failed |= sp_stream_copy(stream, w.call.states, before, bytes, NULL) != SP_OK;
        rule_launch(&w);
    }
    assert_false(rig.failed);
    free(y), free(after);
    rule_free(&w);
}

/* ---- drafts -------------------------------------------------------------------------------- */

/* Decodes with `drafts` rows after each one, of which `taken` are accepted. */
static void run_drafts(rule_world *w, int32_t start, int32_t drafts, int32_t taken)
{
    int32_t folded = start / 32 * 32;

    run_one(w, span_of(0, 0, start));
    for (int32_t at = start; at < POSITIONS; at += 1 + taken) {
        int32_t rest = POSITIONS - at - 1, own = taken > rest ? rest : taken;
        rule_span span = span_of(0, at, 1 + (drafts > rest ? rest : drafts));

        span.other = 1 + own;
        span.span.n_final = 1;
        span.span.folded = folded;
        run_one(w, span);
        folded = (at + 1) / 32 * 32;
    }
}

static void expect_drafts(sp_cuda_rule_shape shape)
{
    static const int32_t drafts[][3] = {{40, 3, 0},  {1, 15, 0},  {33, 7, 7}, {5, 15, 15},
                                        {64, 10, 4}, {31, 15, 9}, {95, 1, 1}};
    rule_world w = make(shape);
    uint16_t *y = run_whole(&w);

    for (size_t i = 0; i < sizeof drafts / sizeof drafts[0]; i++) {
        run_drafts(&w, drafts[i][0], drafts[i][1], drafts[i][2]);
        expect_rows(&w, y, 0, 0, POSITIONS, "drafts");
    }
    free(y);
    rule_free(&w);
}

static void drafts_change_no_bit(void **state)
{
    (void)state;
    expect_drafts(tiny);
    expect_drafts(wide_conv);
    expect_drafts(real);
}

/* ---- snapshots ----------------------------------------------------------------------------- */

/* S, of a slot whose border is at the position, and as a snapshot has it; and the inputs before the
 * position that rows from `next` on read. */
static void expect_snapshot(rule_world *w, int32_t slot, int32_t snapshot, int32_t position,
                            int32_t next)
{
    const sp_cuda_rule_layout *l = &w->layout;
    int32_t kept = w->size.shape.conv_width - 1;
    size_t row = (size_t)l->channels * 2;
    char *state =
        moe_get(&rig, (const char *)w->call.states + slot * l->state_bytes, (size_t)l->state_bytes);
    char *other = moe_get(&rig, (const char *)w->call.snapshots + snapshot * l->snapshot_bytes,
                          (size_t)l->snapshot_bytes);

    assert_memory_equal(state, other,
                        (size_t)w->size.shape.v_heads * (size_t)(l->v_width * l->k_width) * 4);
    for (int32_t i = next - position; i < kept; i++)
        assert_memory_equal(state + l->ring_conv + (size_t)((position - kept + i) % 64) * row,
                            other + l->conv + (size_t)i * row, row);
    free(state), free(other);
}

static void expect_snapshots(sp_cuda_rule_shape shape)
{
    rule_world w = make(shape);
    uint16_t *y = run_whole(&w);
    rule_span span = span_of(0, 0, 64);

    run_one(&w, span);
    span = span_of(0, 64, 70); /* the state at 64 is kept, then its rows move the slot on */
    span.span.save = 1;
    run_one(&w, span);
    for (int32_t n = 1; n <= POSITIONS - 64; n += n < 4 ? 1 : 33) { /* resumed by another slot */
        span = span_of(0, 64, n);
        span.span.slot = SEQUENCES;
        span.span.load = 1;
        span.span.folded = 0;
        span.span.save = 2;
        memset(w.y, 0, (size_t)POSITIONS * w.y_width * 2);
        run_one(&w, span);
        if (64 + n < 96)
            expect_snapshot(&w, SEQUENCES, 1, 64, 64 + n);
        if (64 + n < POSITIONS) {
            span = span_of(0, 64 + n, POSITIONS - 64 - n);
            span.span.slot = SEQUENCES;
            run_one(&w, span);
        }
        expect_rows(&w, y, 0, 64, POSITIONS, "resumed");
    }
    span = span_of(0, 134, POSITIONS - 134);
    run_one(&w, span);
    expect_rows(&w, y, 0, 134, POSITIONS, "saved");
    free(y);
    rule_free(&w);
}

static void a_small_snapshot_resumes(void **state)
{
    (void)state;
    expect_snapshots(tiny);
}

static void snapshots_resume(void **state)
{
    (void)state;
    expect_snapshots(odd);
    expect_snapshots(real);
}

/* A snapshot of drafts' chunks: after their acceptance the state is saved at the next border. */
static void accepted_drafts_reach_a_snapshot(void **state)
{
    rule_world w = make(real);
    uint16_t *y = run_whole(&w);
    rule_span span;

    (void)state;
    run_one(&w, span_of(0, 0, 60));
    span = span_of(0, 60, 4); /* rows 60 .. 63, of which one is certain: nothing is folded */
    span.span.n_final = 1;
    run_one(&w, span);
    span = span_of(0, 64, 1);
    span.span.folded = 32;
    span.span.save = 0;
    run_one(&w, span);
    expect_rows(&w, y, 0, 0, 65, "drafts");
    expect_snapshot(&w, 0, 0, 64, 65);
    free(y);
    rule_free(&w);
}

/* ---- repeats ------------------------------------------------------------------------------- */

/* The ring of copies and the blocks that exchange sums, on as many multiprocessors as in a model.
 */
static void a_thousand_repeats_change_no_bit(void **state)
{
    enum { ROWS = 333 };
    const rule_size size = {.shape = {8, 24, 128, 128, 4, 0},
                            .sequences = 2,
                            .positions = ROWS,
                            .slots = 2,
                            .snapshots = 1,
                            .rows_max = 2 * ROWS,
                            .spans_max = 2};
    rule_world w = rule_make(&rig, &size);
    rule_span spans[2] = {span_of(0, 0, ROWS), span_of(1, 0, ROWS)};
    size_t bytes = 2 * ROWS * w.y_width * 2, state_bytes = 2 * (size_t)w.layout.state_bytes;
    char *y, *states;

    (void)state;
    run(&w, spans, 2, 0);
    y = moe_get(&rig, w.call.y, bytes);
    states = moe_get(&rig, w.call.states, state_bytes);
    for (int i = 0; i < REPEATS; i++) {
        char *again;

        rule_launch(&w);
        again = moe_get(&rig, w.call.y, bytes);
        assert_false(rig.failed);
        assert_int_equal(memcmp(y, again, bytes), 0);
        free(again);
    }
    free(y);
    y = moe_get(&rig, w.call.states, state_bytes);
    assert_memory_equal(y, states, state_bytes);
    free(y), free(states);
    rule_free(&w);
}

/* y and the states of two sequences of a call, which are to be freed. */
static char *result_of(const rule_world *w, size_t y_bytes, size_t bytes)
{
    char *y = moe_get(&rig, w->call.y, y_bytes), *states = moe_get(&rig, w->call.states, bytes);
    char *all = malloc(y_bytes + bytes);

    assert_non_null(all);
    assert_false(rig.failed);
    memcpy(all, y, y_bytes);
    memcpy(all + y_bytes, states, bytes);
    free(y), free(states);
    return all;
}

/* Two sequences leave multiprocessors on which the first kernel goes on beside the second one,
 * which waits for each chunk; sixteen leave none. With other inputs each time, so that what the
 * scratch has from the call before is wrong. */
static void chunks_are_waited_for(void **state)
{
    enum { ROWS = 700, PADS = 14, TIMES = 150 };
    const rule_size size = {.shape = {16, 16, 128, 128, 4, 0},
                            .sequences = 2,
                            .positions = ROWS + 1,
                            .slots = 2,
                            .snapshots = 1,
                            .rows_max = 2 * ROWS + 1 + PADS,
                            .spans_max = 2 + PADS};
    rule_world w = rule_make(&rig, &size);
    rule_span spans[2] = {span_of(0, 0, ROWS + 1), span_of(1, 0, ROWS)};
    size_t y_bytes = (2 * ROWS + 1) * w.y_width * 2, bytes = 2 * (size_t)w.layout.state_bytes;
    size_t row = (size_t)w.layout.qkv_width * 2;
    const char *inputs = w.call.qkv;
    char *want[2];

    (void)state;
    run(&w, spans, 2, PADS);
    for (size_t of = 0; of < 2; of++) {
        w.call.qkv = inputs + of * row;
        rule_launch(&w);
        want[of] = result_of(&w, y_bytes, bytes);
    }
    assert_int_not_equal(memcmp(want[0], want[1], y_bytes), 0);
    w.call.spans = 2;
    for (int i = 0; i < TIMES; i++)
        for (size_t of = 0; of < 2; of++) {
            char *got;

            w.call.qkv = inputs + of * row;
            rule_launch(&w);
            got = result_of(&w, y_bytes, bytes);
            assert_int_equal(memcmp(want[of], got, y_bytes + bytes), 0);
            free(got);
        }
    free(want[0]), free(want[1]);
    w.call.qkv = inputs;
    rule_free(&w);
}

/* ---- faults -------------------------------------------------------------------------------- */

static void a_small_nan_stays_in_its_sequence(void **state)
{
    rule_world w = make(tiny);
    uint16_t *y = run_whole(&w);
    rule_span spans[2] = {span_of(0, 0, 50), span_of(1, 0, 50)};
    size_t at = 20 * (size_t)w.layout.qkv_width + (size_t)w.layout.channels - 1, value = w.qkv[at];
    int32_t *fault;

    (void)state;
    w.qkv[at] = 0x7fc0;
    run(&w, spans, 2, 1);
    fault = moe_get(&rig, w.call.fault, 3 * sizeof *fault);
    assert_int_equal(fault[0], 1);
    assert_int_equal(fault[1], 0);
    free(fault);
    w.qkv[at] = (uint16_t)value;
    expect_rows(&w, y, 1, 0, 50, "beside a NaN");
    run(&w, spans, 2, 1); /* the slot begins anew */
    expect_rows(&w, y, 0, 0, 50, "after a NaN");
    free(y);
    rule_free(&w);
}

static int begin(void **unused)
{
    sp_error error;

    (void)unused;
    assert_ok(moe_start(&rig, gpu, &error), &error);
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_small_rule_is_its_recurrence),
        cmocka_unit_test(a_small_cut_changes_no_bit),
        cmocka_unit_test(a_small_snapshot_resumes),
        cmocka_unit_test(a_small_nan_stays_in_its_sequence),
        cmocka_unit_test(the_rule_is_its_recurrence),
        cmocka_unit_test(no_cut_changes_a_bit),
        cmocka_unit_test(company_changes_no_bit),
        cmocka_unit_test(many_sequences_change_no_bit),
        cmocka_unit_test(a_step_of_many_sequences_repeats),
        cmocka_unit_test(drafts_change_no_bit),
        cmocka_unit_test(snapshots_resume),
        cmocka_unit_test(accepted_drafts_reach_a_snapshot),
        cmocka_unit_test(a_thousand_repeats_change_no_bit),
        cmocka_unit_test(chunks_are_waited_for),
    };

    return gpu_main(&gpu, tests, sizeof tests / sizeof tests[0], begin, NULL, argc, argv);
}
