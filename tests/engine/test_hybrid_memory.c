/*
 * Models with gated delta nets give the same logits, tokens and states byte for byte however their
 * rows come to be computed: in chunks of any size; preempted and resumed at every position of a
 * prompt; from any prefix that another request has left; in the turns of a conversation; verified
 * as drafts at every position; with steps that fail; and under a load that evicts snapshots, with a
 * prefix cache and without.
 *
 *     test_hybrid_memory [all]      with `all`, each model in each case and under each load
 */
#include "support/test.h"

#include "base/alloc.h"
#include "engine/draft_source.h"
#include "engine/engine_state.h"
#include "engine/ops/cpu_ops.h"
#include "support/engine_run.h"
#include "support/long_memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __SANITIZE_ADDRESS__ /* all of it takes minutes there */
#define STRIDE 7
#else
#define STRIDE 1
#endif
#define PROMPT   200
#define NEW      12
#define POSITION (PROMPT + NEW)
#define VOCAB    509 /* ids below the special ones */
#define SPACING  32  /* of snapshots */
#define PAGES    14  /* as many as one request needs */
#define FILLING  215 /* tokens that need them all */

typedef struct hybrid {
    const char *fixture, *adapter;
    char *dir; /* a copy in which states remember, of the whole group */
} hybrid;

static hybrid hybrids[] = {
    {SP_TEST_FIXTURES "/qwen3next", "all-linear", NULL},
    {SP_TEST_FIXTURES "/qwen35", "gdn-all-attn", NULL},
    {SP_TEST_FIXTURES "/qwen35moe-vl", "gdn-in", NULL},
};
#define N_HYBRIDS (sizeof hybrids / sizeof *hybrids)

static int32_t prompt[PROMPT], fillings[FILLING];
static bool everything; /* all models in the cases that take long */

static sp_engine_options options_of(const hybrid *model)
{
    sp_engine_options options;

    sp_engine_options_default(&options, sizeof options);
    options.model_dir = model->dir;
    options.threads = 1;
    options.max_loras = 4;
    options.max_running = 4;
    options.kv_tokens = 1024;
    options.step_rows = 256;
    options.state_snapshot_tokens = SPACING;
    return options;
}

static sp_engine *open_engine(const hybrid *model, const sp_engine_options *options)
{
    char path[256];
    sp_engine_adapter adapter = {sizeof adapter, model->adapter, path};

    snprintf(path, sizeof path, "%s/adapters/%s", model->fixture, model->adapter);
    return engine_run_open(options, &adapter, 1);
}

static sp_engine_stats stats_of(const sp_engine *engine)
{
    sp_engine_stats stats = {.struct_bytes = sizeof stats};

    assert_int_equal(sp_engine_get_stats(engine, &stats, NULL), SP_OK);
    return stats;
}

static engine_run make_run(const hybrid *model, int32_t n_prompt, int32_t n_new)
{
    engine_run run = engine_run_init(model->adapter, prompt, n_prompt, n_new);

    run.keep_logits = true;
    return run;
}

/* All of the prompt in one step, without anything that is known. */
static engine_run run_plainly(const hybrid *model)
{
    sp_engine_options options = options_of(model);
    engine_run run = make_run(model, PROMPT, NEW), *list[] = {&run};
    sp_engine *engine;

    options.prefix_cache = false;
    engine = open_engine(model, &options);
    engine_run_submit(engine, &run);
    engine_run_all(engine, list, 1);
    assert_int_equal(run.n_logits, POSITION - 1);
    sp_engine_close(engine);
    return run;
}

/* The logits of the positions of `run` from `first` on are those of the same positions. */
static void assert_logits(const engine_run *plain, const engine_run *run, int32_t first)
{
    size_t row_bytes = (size_t)plain->vocab * sizeof(float);

    assert_true(run->n_logits > 0 && first + run->n_logits <= plain->n_logits);
    assert_memory_equal(run->logits, (const char *)plain->logits + (size_t)first * row_bytes,
                        (size_t)run->n_logits * row_bytes);
}

/* ---- states -------------------------------------------------------------------------------- */

/* All that the next rows of a sequence read of its state; nothing on another device. */
typedef struct state_bytes {
    char *data;
    size_t n;
    int32_t folded, n_committed;
} state_bytes;

static void add_bytes(state_bytes *out, const void *data, size_t n)
{
    out->data = sp_realloc(out->data, out->n + n);
    assert_non_null(out->data);
    memcpy(out->data + out->n, data, n);
    out->n += n;
}

static void add_ring(state_bytes *out, const sp_cpu_ops *cpu, int32_t slot, int32_t layer)
{
    const sp_delta_rule_shape *shape = &cpu->states.shape;
    size_t element = sp_dtype_bytes(cpu->type);

    for (int32_t p = out->folded; p < out->n_committed; p++) {
        int32_t place = p % SP_STATE_RING;

        for (int32_t h = 0; h < shape->v_heads; h++) {
            add_bytes(out, sp_cpu_state_u(cpu, slot, layer, h, place),
                      (size_t)shape->v_dim * sizeof(float));
            add_bytes(out, sp_cpu_state_g(cpu, slot, layer, h) + place, sizeof(float));
        }
        for (int32_t h = 0; h < shape->k_heads; h++)
            add_bytes(out, sp_cpu_state_k(cpu, slot, layer, h, place),
                      (size_t)shape->k_dim * element);
    }
    for (int32_t p = out->n_committed - shape->conv_width + 1; p < out->n_committed; p++)
        if (p >= 0)
            add_bytes(out, sp_cpu_state_inputs(cpu, slot, layer, p % SP_STATE_RING),
                      (size_t)cpu->states.channels * element);
}

static state_bytes read_state(const sp_engine *engine, int64_t id)
{
    const sp_cpu_ops *cpu = (const sp_cpu_ops *)engine->ops;
    const sp_delta_rule_shape *shape = &cpu->states.shape;
    const sp_held_memory *held = NULL;
    state_bytes out = {0};

    for (int32_t i = 0; i < engine->n_sequences; i++)
        if (engine->sequences[i]->id == id)
            held = &engine->sequences[i]->memory;
    assert_non_null(held);
    assert_true(held->state.taken);
    out.folded = held->state.folded;
    out.n_committed = held->n_committed;
    if (getenv("SP_TEST_DEVICE"))
        return out; /* the bytes of a CPU's backend alone are known here */
    for (int32_t layer = 0; layer < shape->layers; layer++) {
        for (int32_t h = 0; h < shape->v_heads; h++)
            add_bytes(&out, sp_cpu_state_s(cpu, held->state.slot, layer, h),
                      (size_t)shape->k_dim * (size_t)cpu->states.n * sizeof(float));
        add_ring(&out, cpu, held->state.slot, layer);
    }
    return out;
}

static void assert_same_state(const state_bytes *a, const state_bytes *b)
{
    assert_int_equal(a->n_committed, b->n_committed);
    assert_int_equal(a->folded, b->folded);
    assert_int_equal(a->n, b->n);
    assert_true(a->n == 0 || memcmp(a->data, b->data, a->n) == 0);
}

static int32_t committed_of(const sp_engine *engine, int64_t id)
{
    for (int32_t i = 0; i < engine->n_sequences; i++)
        if (engine->sequences[i]->id == id)
            return engine->sequences[i]->memory.n_committed;
    return -1;
}

static void free_state(state_bytes *state)
{
    sp_free(state->data);
    *state = (state_bytes){0};
}

/* ---- chunks -------------------------------------------------------------------------------- */

/* The state after the prompt and some of the output, and all logits. */
static engine_run run_in_chunks(const hybrid *model, int32_t chunk, bool prefix_cache,
                                state_bytes *out_state)
{
    sp_engine_options options = options_of(model);
    engine_run run = make_run(model, PROMPT, NEW), *list[] = {&run};
    sp_engine *engine;

    options.prefill_chunk = chunk;
    options.prefix_cache = prefix_cache;
    engine = open_engine(model, &options);
    engine_run_submit(engine, &run);
    while (committed_of(engine, run.id) < PROMPT + 5)
        assert_true(engine_run_step(engine, list, 1));
    *out_state = read_state(engine, run.id);
    engine_run_all(engine, list, 1);
    sp_engine_close(engine);
    return run;
}

static void chunks_of_any_size(void **state)
{
    static const int32_t chunks[] = {1, 7, 64, 0};

    (void)state;
    for (size_t m = 0; m < N_HYBRIDS; m++) {
        engine_run plain = run_plainly(&hybrids[m]);
        state_bytes first = {0};

        for (size_t c = 0; c < 2 * sizeof chunks / sizeof *chunks; c++) {
            state_bytes bytes;
            engine_run run =
                run_in_chunks(&hybrids[m], chunks[c / 2], c % 2 == 1, c == 0 ? &first : &bytes);

            engine_run_assert_same(&plain, &run);
            engine_run_free(&run);
            if (c == 0)
                continue;
            assert_int_equal(bytes.n_committed, PROMPT + 5);
            assert_same_state(&first, &bytes);
            free_state(&bytes);
        }
        free_state(&first);
        engine_run_free(&plain);
    }
}

/* ---- preemption ---------------------------------------------------------------------------- */

/* Another request lacks memory that the paused one holds. */
static void preempt(sp_engine *engine, engine_run *run)
{
    engine_run other = engine_run_init(NULL, fillings, FILLING, 1);
    engine_run *list[] = {run, &other};
    uint64_t before = stats_of(engine).preemptions;
    sp_error error;

    assert_ok(sp_engine_set_paused(engine, run->id, true, &error), &error);
    engine_run_submit(engine, &other);
    for (int32_t i = 0; i < 2; i++)
        assert_true(engine_run_step(engine, list, 2));
    assert_int_equal((int64_t)stats_of(engine).preemptions, (int64_t)before + 1);
    assert_int_equal(committed_of(engine, run->id), 0);
    assert_ok(sp_engine_cancel(engine, other.id, &error), &error);
    assert_ok(sp_engine_set_paused(engine, run->id, false, &error), &error);
    engine_run_free(&other);
}

/* The states after each number of rows. */
static void read_states(const hybrid *model, state_bytes states[POSITION])
{
    sp_engine_options options = options_of(model);
    engine_run run = make_run(model, PROMPT, NEW), *list[] = {&run};
    sp_engine *engine;

    options.prefill_chunk = 1;
    options.prefix_cache = false;
    engine = open_engine(model, &options);
    engine_run_submit(engine, &run);
    for (int32_t position = 1; position < POSITION - 1; position++) {
        assert_true(engine_run_step(engine, list, 1));
        assert_int_equal(committed_of(engine, run.id), position);
        states[position] = read_state(engine, run.id);
    }
    engine_run_all(engine, list, 1);
    engine_run_free(&run);
    sp_engine_close(engine);
}

static void assert_state(const sp_engine *engine, int64_t id, const state_bytes *expected)
{
    state_bytes bytes = read_state(engine, id);

    assert_same_state(expected, &bytes);
    free_state(&bytes);
}

/* Computes up to a position and is preempted there, then up to the next one, and so on. Without
 * snapshots it begins from the first token each time. The last position is one of the output. */
static void preempt_everywhere(const hybrid *model, const engine_run *plain,
                               const state_bytes states[POSITION], bool snapshots, int32_t stride)
{
    sp_engine_options options = options_of(model);
    engine_run run = make_run(model, PROMPT, NEW), *list[] = {&run};
    sp_engine *engine;

    options.kv_tokens = PAGES * 16;
    options.prefill_chunk = 1;
    options.state_snapshot_tokens = snapshots ? SPACING : 0;
    run.request.logits_from = PROMPT - 1; /* what is before may be resumed */
    engine = open_engine(model, &options);
    engine_run_submit(engine, &run);
    for (int32_t position = 1; position < POSITION - 1; position += stride) {
        while (committed_of(engine, run.id) < position)
            assert_true(engine_run_step(engine, list, 1));
        assert_state(engine, run.id, &states[position]);
        preempt(engine, &run);
    }
    engine_run_all(engine, list, 1);
    assert_int_equal(run.n_logits, NEW);
    assert_logits(plain, &run, PROMPT - 1);
    assert_memory_equal(run.tokens, plain->tokens, NEW * sizeof(int32_t));
    assert_true(run.n_recomputed > 0);
    assert_true((stats_of(engine).prefix_tokens > PROMPT) == snapshots);
    engine_run_free(&run);
    sp_engine_close(engine);
}

static void preempted_and_resumed_at_every_position(void **state)
{
    (void)state;
    for (size_t m = 0; m < N_HYBRIDS; m++) {
        engine_run plain = run_plainly(&hybrids[m]);
        state_bytes states[POSITION] = {{0}};

        read_states(&hybrids[m], states);
        preempt_everywhere(&hybrids[m], &plain, states, true, STRIDE);
        preempt_everywhere(&hybrids[m], &plain, states, false, STRIDE > 1 ? 69 : 23);
        for (int32_t i = 0; i < POSITION; i++)
            free_state(&states[i]);
        engine_run_free(&plain);
    }
}

/* ---- prefixes ------------------------------------------------------------------------------ */

/* What the prefix cache has is the first so many tokens of the prompt, up to a snapshot. */
static void begun_from_every_prefix(void **state)
{
    (void)state;
    for (size_t m = 0; m < N_HYBRIDS; m++) {
        sp_engine_options options = options_of(&hybrids[m]);
        engine_run plain = run_plainly(&hybrids[m]), first = make_run(&hybrids[m], PROMPT, NEW);
        engine_run *list[] = {&first};
        sp_engine *engine = open_engine(&hybrids[m], &options);

        engine_run_submit(engine, &first);
        engine_run_all(engine, list, 1);
        assert_int_equal((int64_t)stats_of(engine).state_snapshots_written, POSITION / SPACING);
        for (int32_t n = (PROMPT - 1) % STRIDE + 1; n <= PROMPT; n += STRIDE) {
            engine_run run = make_run(&hybrids[m], n, n == PROMPT ? NEW : 1);
            uint64_t before = stats_of(engine).prefix_tokens;

            list[0] = &run;
            run.request.logits_from = n - 1;
            engine_run_submit(engine, &run);
            engine_run_all(engine, list, 1);
            assert_logits(&plain, &run, n - 1);
            assert_int_equal((int64_t)(stats_of(engine).prefix_tokens - before),
                             (n - 1) / SPACING * SPACING);
            if (n == PROMPT)
                assert_memory_equal(run.tokens, plain.tokens, NEW * sizeof(int32_t));
            engine_run_free(&run);
        }
        sp_engine_close(engine);
        engine_run_free(&first);
        engine_run_free(&plain);
    }
}

/* ---- conversations ------------------------------------------------------------------------- */

#define TURN_SPACING 128 /* a place is 32 or more after the one before */
#define ANSWER       45

/* A turn has the bits that it has without a prefix cache. */
static void take_turn(const hybrid *model, sp_engine *engine, const int32_t *tokens, int32_t n,
                      int32_t n_new, int32_t *out_new)
{
    sp_engine_options options = options_of(model);
    engine_run run = engine_run_init(model->adapter, tokens, n, n_new), plain, *list[] = {&run};

    run.keep_logits = true;
    run.request.logits_from = n - 1;
    plain = run;
    engine_run_submit(engine, &run);
    engine_run_all(engine, list, 1);
    options.prefix_cache = false;
    engine = open_engine(model, &options);
    list[0] = &plain;
    engine_run_submit(engine, &plain);
    engine_run_all(engine, list, 1);
    engine_run_assert_same(&plain, &run);
    memcpy(out_new, run.tokens, (size_t)n_new * sizeof *out_new);
    sp_engine_close(engine);
    engine_run_free(&plain);
    engine_run_free(&run);
}

/* The second turn begins where the first one's output was, and where its prompt ended if the answer
 * is written otherwise there; what parts from both, where it parts, the second time. */
static void turns_of_a_conversation(void **state)
{
    int32_t tokens[PROMPT], first[ANSWER], later[8];

    (void)state;
    for (size_t m = 0; m < N_HYBRIDS; m++) {
        sp_engine_options options = options_of(&hybrids[m]);
        sp_engine *engine;
        static const int32_t found[] = {0, 96, 64, 0, 32};

        options.state_snapshot_tokens = TURN_SPACING;
        engine = open_engine(&hybrids[m], &options);
        for (int32_t turn = 0; turn < 5; turn++) {
            uint64_t before = stats_of(engine).prefix_tokens;
            int32_t n = turn == 0 ? 80 : 170;

            memcpy(tokens, prompt, sizeof prompt);
            if (turn == 1 || turn == 2) /* the answer, or another one */
                memcpy(tokens + 80, turn == 1 ? first : fillings, sizeof first);
            if (turn > 2)
                memcpy(tokens + 50, fillings + 20 * turn, 120 * sizeof *tokens);
            take_turn(&hybrids[m], engine, tokens, n, turn == 0 ? ANSWER : 8,
                      turn == 0 ? first : later);
            assert_int_equal((int64_t)(stats_of(engine).prefix_tokens - before), found[turn]);
        }
        sp_engine_close(engine);
    }
}

/* ---- drafts -------------------------------------------------------------------------------- */

#define WRITTEN 200 /* tokens of an output that is verified */

/* Drafts what the same request gives without drafts, with some of it wrong. */
typedef struct oracle {
    const engine_run *plain, *now; /* [n] of the same requests, the second with their ids */
    size_t n;
    uint32_t percent; /* of its drafts that are right */
    sp_test_random random;
    bool begun[SP_STATE_CHUNK]; /* places in a chunk where a step with drafts has begun */
} oracle;

static int32_t foretell(void *user, const sp_sequence *sequence, int32_t n_max, int32_t *out_tokens)
{
    oracle *o = user;
    int32_t at = sequence->n_tokens - sequence->request.n_prompt;
    int32_t n = 1 + (int32_t)sp_test_below(&o->random, (uint32_t)n_max);
    size_t i = 0;

    while (i < o->n && o->now[i].id != sequence->id)
        i++;
    assert_true(i < o->n);
    o->begun[(sequence->n_tokens - 1) % SP_STATE_CHUNK] = true;
    for (int32_t d = 0; d < n; d++) {
        int32_t token = at + d < o->plain[i].n_tokens ? o->plain[i].tokens[at + d] : 0;
        bool right = sp_test_below(&o->random, 100) < o->percent;

        out_tokens[d] = right ? token : (token + 1) % VOCAB;
    }
    return n;
}

#define WRITTEN_FROM 9

/* After accepted drafts a full chunk may not be folded yet: its rows are in the ring. */
static bool is_same_state(const sp_engine *engine, int64_t id, const state_bytes *expected)
{
    state_bytes bytes = read_state(engine, id);
    bool comparable = bytes.folded == expected->folded;

    assert_int_equal(bytes.n_committed, expected->n_committed);
    assert_true(comparable || bytes.folded == expected->folded - SP_STATE_CHUNK);
    if (comparable)
        assert_same_state(expected, &bytes);
    free_state(&bytes);
    return comparable;
}

/* The states where nothing is drafted, or the number of states that were compared with these. */
static engine_run write_tokens(const hybrid *model, const engine_run *plain, int32_t longest,
                               uint32_t percent, bool snapshots, bool *begun, state_bytes *states,
                               int32_t *n_compared)
{
    sp_engine_options options = options_of(model);
    engine_run run = make_run(model, WRITTEN_FROM, WRITTEN), *list[] = {&run};
    oracle o = {plain, &run, 1, percent, {percent + (uint32_t)longest}, {false}};
    sp_engine *engine;

    options.speculative = plain != NULL;
    options.draft_tokens = longest;
    options.state_snapshot_tokens = snapshots ? SPACING : 0;
    engine = open_engine(model, &options);
    if (plain)
        sp_engine_set_draft_source(engine, (sp_draft_source){&o, foretell});
    engine_run_submit(engine, &run);
    while (engine_run_step(engine, list, 1)) {
        int32_t n = committed_of(engine, run.id);

        if (n >= 0 && !plain)
            states[n] = read_state(engine, run.id);
        else if (n >= 0)
            *n_compared += is_same_state(engine, run.id, &states[n]);
    }
    for (int32_t i = 0; plain && i < SP_STATE_CHUNK; i++)
        begun[i] |= o.begun[i];
    if (plain)
        assert_true(stats_of(engine).drafted_tokens > stats_of(engine).accepted_tokens);
    sp_engine_close(engine);
    return run;
}

static void verified_at_every_position(void **state)
{
    static const int32_t longest[] = {1, 4, 32};
    bool begun[SP_STATE_CHUNK] = {false}; /* by the place in a chunk */

    (void)state;
    for (size_t m = 0; m < N_HYBRIDS; m++) {
        state_bytes states[WRITTEN_FROM + WRITTEN] = {{0}};
        engine_run plain = write_tokens(&hybrids[m], NULL, 1, 0, true, NULL, states, NULL);
        int32_t n_compared = 0;

        for (uint32_t i = 0; i < 12; i += STRIDE) {
            engine_run run = write_tokens(&hybrids[m], &plain, longest[i % 3], 30 + 20 * (i / 3),
                                          i % 2 == 0, begun, states, &n_compared);

            engine_run_assert_same(&plain, &run);
            engine_run_free(&run);
        }
        assert_true(n_compared > WRITTEN / STRIDE);
        for (int32_t i = 0; i < WRITTEN_FROM + WRITTEN; i++)
            free_state(&states[i]);
        engine_run_free(&plain);
    }
    for (int32_t i = 0; i < SP_STATE_CHUNK; i++)
        assert_true(begun[i] || STRIDE > 1);
}

/* ---- steps that fail ----------------------------------------------------------------------- */

/* A backend that fails now and then, before a step or after it, or reports that the drafts of a
 * span were not finite. */
typedef struct spy_backend {
    const sp_op_table *real;
    sp_op_table table;
    sp_test_random random;
    uint32_t fails, spoils; /* of 100 */
    bool drafted[4];        /* of the spans of the last step */
    int32_t n_failed, n_spoiled;
} spy_backend;

static spy_backend spy;

static sp_status failing_step(sp_ops *ops, const sp_step *step, sp_pass_fn pass, void *user)
{
    bool fails = sp_test_below(&spy.random, 100) < spy.fails;
    sp_status status = SP_OK;

    spy.n_failed += fails;
    for (int32_t i = 0; i < step->n_spans; i++)
        spy.drafted[i] = step->spans[i].n_rows > step->spans[i].state.n_final;
    if (!fails || sp_test_below(&spy.random, 2) == 0)
        status = spy.real->step(ops, step, pass, user);
    return fails ? SP_ERR_DEVICE : status;
}

static sp_status spoiling_faults(sp_ops *ops, bool *out_faults, int32_t n_spans)
{
    sp_status status = spy.real->faults(ops, out_faults, n_spans);

    for (int32_t i = 0; i < n_spans; i++) {
        assert_false(out_faults[i]);
        out_faults[i] = spy.spoils > 0 && spy.drafted[i] && sp_test_below(&spy.random, 2) == 0;
        spy.n_spoiled += out_faults[i];
    }
    return status;
}

static void use_spy(sp_engine *engine, uint32_t fails, uint32_t spoils)
{
    spy = (spy_backend){.real = engine->ops->table,
                        .table = *engine->ops->table,
                        .random = {77},
                        .fails = fails,
                        .spoils = spoils};
    spy.table.step = failing_step;
    spy.table.faults = spoiling_faults;
    engine->ops->table = &spy.table;
}

static void check_with_spy(const hybrid *model, uint32_t fails, uint32_t spoils, bool snapshots)
{
    sp_engine_options options = options_of(model);
    engine_run plain = make_run(model, PROMPT / 2, 3 * SPACING), run = plain;
    engine_run *list[] = {&plain};
    oracle o = {&plain, &run, 1, 80, {5}, {false}};
    sp_engine *engine = open_engine(model, &options);
    sp_error error;

    engine_run_submit(engine, &plain);
    engine_run_all(engine, list, 1);
    sp_engine_close(engine);
    options.speculative = true;
    options.prefill_chunk = 50;
    options.state_snapshot_tokens = snapshots ? SPACING : 0;
    engine = open_engine(model, &options);
    sp_engine_set_draft_source(engine, (sp_draft_source){&o, foretell});
    use_spy(engine, fails, spoils);
    list[0] = &run;
    engine_run_submit(engine, &run);
    for (int32_t i = 0; run.finish == SP_FINISH_NONE; i++) {
        assert_true(i < 5000);
        if (engine_run_try_step(engine, list, 1, &error) != SP_OK)
            assert_int_equal(error.status, SP_ERR_DEVICE);
    }
    engine_run_assert_same(&plain, &run);
    assert_true((fails > 0) == (spy.n_failed > 3) && (spoils > 0) == (spy.n_spoiled > 0));
    sp_engine_close(engine);
    engine_run_free(&plain);
    engine_run_free(&run);
}

static void after_steps_that_failed(void **state)
{
    (void)state;
    for (size_t m = 0; m < N_HYBRIDS; m++)
        for (int32_t snapshots = 0; snapshots < 2; snapshots++) {
            if (!everything && (snapshots == (int32_t)(m % 2) || m * STRIDE > 2))
                continue;
            check_with_spy(&hybrids[m], 20, 0, snapshots > 0);
            check_with_spy(&hybrids[m], 0, 50, snapshots > 0);
            check_with_spy(&hybrids[m], 10, 50, snapshots > 0);
        }
}

/* ---- load ---------------------------------------------------------------------------------- */

#define REQUESTS   24
#define STEMS      3
#define STEM       120
#define LOAD_NEW   16
#define N_ADAPTERS 3

typedef enum load_lever {
    LOAD_TOGETHER = 1 << 0, /* all at once, in little memory; else one after the other */
    LOAD_PREFIX = 1 << 1,
    LOAD_FEW_SNAPSHOTS = 1 << 2,
    LOAD_FEW_STATES = 1 << 3,
    LOAD_DRAFTS = 1 << 4,
    LOAD_ALONE = 1 << 5, /* each verifying request has a pass of its own */
    LOAD_ENDS = 1 << 6   /* most snapshots are at the ends of prompts and outputs */
} load_lever;

static int32_t load_prompts[REQUESTS][STEM + 40];

static void make_load(void)
{
    sp_test_random random = {31};

    for (int32_t i = 0; i < REQUESTS; i++) {
        engine_run_fill_prompt(&random, load_prompts[i], STEM + 40, VOCAB);
        if (i >= STEMS)
            memcpy(load_prompts[i], load_prompts[i % STEMS], STEM * sizeof(int32_t));
    }
}

static sp_engine *open_load(const hybrid *model, unsigned levers)
{
    static const char *const names[N_ADAPTERS] = {"gdn-in", "attn-r4", "gdn-out"};
    sp_engine_options options = options_of(model);
    sp_engine_adapter adapters[N_ADAPTERS];
    char paths[N_ADAPTERS][256];
    size_t state, snapshot;
    sp_engine *engine;

    for (int32_t i = 0; i < N_ADAPTERS; i++) {
        snprintf(paths[i], sizeof paths[i], "%s/adapters/%s", model->fixture, names[i]);
        adapters[i] = (sp_engine_adapter){sizeof adapters[i], names[i], paths[i]};
    }
    engine = engine_run_open(&options, adapters, N_ADAPTERS);
    {
        sp_delta_rule_shape shape = sp_family_delta_rule(&engine->model, 1, 1);

        state = sp_ops_state_bytes(engine->op_table, &shape, options.precision);
        snapshot = sp_ops_snapshot_bytes(engine->op_table, &shape, options.precision);
    }
    sp_engine_close(engine);
    options.prefix_cache = (levers & LOAD_PREFIX) != 0;
    options.max_running = 6;
    options.max_loras = levers & LOAD_TOGETHER ? 2 : N_ADAPTERS;
    options.adapter_wait_steps = 4;
    options.adapter_preempt_steps = 8;
    options.kv_tokens = levers & LOAD_TOGETHER ? 640 : 4096;
    options.prefill_chunk = levers & LOAD_TOGETHER ? 17 : 0;
    options.speculative = (levers & LOAD_DRAFTS) != 0;
    options.no_batch_verify = (levers & LOAD_ALONE) != 0;
    options.state_snapshot_tokens = levers & LOAD_ENDS ? 128 : SPACING;
    options.state_snapshot_bytes = levers & LOAD_FEW_SNAPSHOTS ? 3 * snapshot : 0;
    options.state_bytes = levers & LOAD_FEW_STATES ? 3 * state : 0;
    engine = engine_run_open(&options, adapters, N_ADAPTERS);
    assert_int_equal(stats_of(engine).states, levers & LOAD_FEW_STATES ? 3 : 6);
    if (levers & LOAD_FEW_SNAPSHOTS)
        assert_int_equal(stats_of(engine).state_snapshots, 3);
    return engine;
}

static sp_engine_stats run_load(const hybrid *model, unsigned levers, const engine_run *plain,
                                engine_run *runs)
{
    static const char *const names[] = {"gdn-in", "attn-r4", NULL, "gdn-out"};
    sp_engine *engine = open_load(model, levers);
    engine_run *list[REQUESTS];
    oracle o = {plain, runs, REQUESTS, 75, {9}, {false}};
    sp_engine_stats stats;

    if (levers & LOAD_DRAFTS)
        sp_engine_set_draft_source(engine, (sp_draft_source){&o, foretell});
    for (int32_t i = 0; i < REQUESTS; i++) {
        runs[i] = engine_run_init(names[i / STEMS % 4], load_prompts[i],
                                  i < STEMS ? STEM : STEM + 40 - i % 11, LOAD_NEW);
        runs[i].request.logprobs = true;
        runs[i].request.temperature = i % 3 == 1 ? 0.8 : 0;
        runs[i].request.seed = (uint64_t)i;
        list[i] = &runs[i];
        engine_run_submit(engine, &runs[i]);
        if (!(levers & LOAD_TOGETHER))
            engine_run_all(engine, &list[i], 1);
    }
    if (levers & LOAD_TOGETHER)
        engine_run_all(engine, list, REQUESTS);
    stats = stats_of(engine);
    assert_int_equal(stats.states_used, 0);
    assert_true(sp_sequence_memory_is_consistent(&engine->memory));
    sp_engine_close(engine);
    return stats;
}

static void check_load(const hybrid *model, unsigned levers, const engine_run *plain)
{
    static engine_run runs[REQUESTS];
    sp_engine_stats stats = run_load(model, levers, plain, runs);

    for (int32_t i = 0; i < REQUESTS; i++) {
        engine_run_assert_same(&plain[i], &runs[i]);
        engine_run_free(&runs[i]);
    }
    assert_true((stats.state_snapshots_written > 0) == ((levers & LOAD_PREFIX) != 0));
    if (!(levers & LOAD_PREFIX) || !(levers & LOAD_FEW_SNAPSHOTS))
        assert_true((stats.prefix_tokens > 0) == ((levers & LOAD_PREFIX) != 0));
    assert_true((stats.preemptions > 0) == ((levers & LOAD_TOGETHER) != 0));
    if (levers & LOAD_FEW_SNAPSHOTS) /* evicted and taken again */
        assert_true(stats.state_snapshots_written > 9);
    if (levers & LOAD_FEW_STATES)
        assert_int_equal(stats.states_used_max, 3);
    if (levers & LOAD_DRAFTS)
        assert_true(stats.accepted_tokens > 0 && stats.drafted_tokens > stats.accepted_tokens);
}

static void under_load(void **state)
{
    static const unsigned levers[] = {
        LOAD_PREFIX,
        LOAD_TOGETHER,
        LOAD_TOGETHER | LOAD_PREFIX,
        LOAD_TOGETHER | LOAD_PREFIX | LOAD_FEW_SNAPSHOTS,
        LOAD_TOGETHER | LOAD_PREFIX | LOAD_FEW_STATES,
        LOAD_TOGETHER | LOAD_PREFIX | LOAD_FEW_SNAPSHOTS | LOAD_FEW_STATES | LOAD_DRAFTS,
        LOAD_TOGETHER | LOAD_PREFIX | LOAD_DRAFTS | LOAD_ALONE,
        LOAD_TOGETHER | LOAD_DRAFTS,
        LOAD_PREFIX | LOAD_ENDS,
        LOAD_TOGETHER | LOAD_PREFIX | LOAD_FEW_SNAPSHOTS | LOAD_DRAFTS | LOAD_ENDS,
    };
    static engine_run plain[REQUESTS];

    (void)state;
    make_load();
    for (size_t m = 0; m < (everything ? N_HYBRIDS : 2); m++) {
        run_load(&hybrids[m], 0, NULL, plain);
        for (size_t i = 0; i < sizeof levers / sizeof *levers; i++)
            if (everything || (i % 2 != m && (i * STRIDE < 42 || i > 7)))
                check_load(&hybrids[m], levers[i], plain);
        for (int32_t i = 0; i < REQUESTS; i++)
            engine_run_free(&plain[i]);
    }
}

static int make_copies(void **state)
{
    (void)state;
    for (size_t m = 0; m < N_HYBRIDS; m++)
        hybrids[m].dir = long_memory_copy(hybrids[m].fixture);
    return 0;
}

static int remove_copies(void **state)
{
    (void)state;
    for (size_t m = 0; m < N_HYBRIDS; m++) {
        sp_test_remove_tree(hybrids[m].dir);
        sp_free(hybrids[m].dir);
    }
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chunks_of_any_size),
        cmocka_unit_test(preempted_and_resumed_at_every_position),
        cmocka_unit_test(begun_from_every_prefix),
        cmocka_unit_test(turns_of_a_conversation),
        cmocka_unit_test(verified_at_every_position),
        cmocka_unit_test(after_steps_that_failed),
        cmocka_unit_test(under_load),
    };
    sp_test_random random = {1907};

    everything = argc > 1 && strcmp(argv[1], "all") == 0;
    engine_run_fill_prompt(&random, prompt, PROMPT, VOCAB);
    engine_run_fill_prompt(&random, fillings, FILLING, VOCAB);
    return cmocka_run_group_tests(tests, make_copies, remove_copies);
}
