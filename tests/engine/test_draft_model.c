/*
 * A draft model: which ones are taken; that one which is the model itself is always right for
 * requests of the base, greedy, sampled or penalised, alone or in a crowd; and that passes of it
 * that fail, and requests that leave, change nothing and leave none of its pages held, nor of its
 * states: a dense one, one with gated delta nets, and each for a base of the other kind.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "base/file.h"
#include "engine/draft_model.h"
#include "support/engine_run.h"
#include "support/long_memory.h"
#include "support/shell.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BASE      SP_TEST_FIXTURES "/qwen3-tied"
#define TOKENIZER SP_TEST_FIXTURES "/tokenizer512/tokenizer.json"
#define VOCAB     509
#define N         12
#define PROMPT    70
#define NEW       40

typedef struct target {
    const char *fixture, *dir, *adapter;
} target;

static const target dense = {BASE, BASE, "r64"};
static target hybrid = {SP_TEST_FIXTURES "/qwen35", NULL, "gdn-all-attn"};
static char *hybrid_dir; /* of the whole group */

static int make_hybrid(void **state)
{
    (void)state;
    hybrid.dir = hybrid_dir = long_memory_copy(hybrid.fixture);
    return 0;
}

static int remove_hybrid(void **state)
{
    (void)state;
    sp_test_remove_tree(hybrid_dir);
    sp_free(hybrid_dir);
    return 0;
}

static sp_engine_options options_of(const char *model, const char *drafter)
{
    sp_engine_options options;

    sp_engine_options_default(&options, sizeof options);
    options.model_dir = model;
    options.draft_model = drafter;
    options.threads = 1;
    options.max_loras = 2;
    options.max_running = 8;
    options.kv_tokens = 2048;
    options.step_rows = 64;
    options.prefill_chunk = 17;
    options.state_snapshot_tokens = 32;
    options.speculative = drafter != NULL;
    return options;
}

/* ---- opening ------------------------------------------------------------------------------- */

static void refused(const char *model, const char *drafter, sp_status want, const char *code,
                    const char *words)
{
    sp_engine_options options = options_of(model, drafter);
    sp_engine *engine = NULL;
    sp_error error = {0};

    assert_int_equal(sp_engine_open(&options, NULL, 0, &engine, &error), want);
    assert_null(engine);
    if (!strstr(error.text, words))
        print_message("%s\n", error.text);
    assert_non_null(strstr(error.text, words));
    if (code)
        assert_string_equal(error.code, code);
}

/* A copy of a fixture with a tokenizer.json, in which `from`, where given, is replaced once. */
static char *with_tokenizer(const char *fixture, const char *from, const char *to)
{
    char *directory = shell_copy_directory(fixture), *data, *at;
    size_t bytes;
    sp_error error;

    assert_ok(sp_file_read_all(TOKENIZER, 1 << 24, &data, &bytes, &error), &error);
    if (from) {
        assert_int_equal(strlen(from), strlen(to));
        at = memmem(data, bytes, from, strlen(from));
        assert_non_null(at);
        memcpy(at, to, strlen(to));
    }
    sp_test_write_file(directory, "tokenizer.json", data, bytes);
    sp_free(data);
    return directory;
}

static void remove_copy(char *directory)
{
    sp_test_remove_tree(directory);
    sp_free(directory);
}

static void test_models_that_cannot_draft(void **state)
{
    char *base = with_tokenizer(BASE, NULL, NULL);
    char *other =
        with_tokenizer(SP_TEST_FIXTURES "/qwen2", "\"special\": true", "\"special\":false");
    sp_engine_options options = options_of(BASE, BASE);
    sp_engine *engine = NULL;
    sp_error error;

    (void)state;
    refused(BASE, SP_TEST_DEMO "/base", SP_ERR_MISMATCH, SP_CODE_DRAFT_MISMATCH, "vocabulary");
    refused(base, BASE, SP_ERR_MISMATCH, SP_CODE_DRAFT_MISMATCH, "has no tokenizer.json");
    refused(BASE, base, SP_ERR_MISMATCH, SP_CODE_DRAFT_MISMATCH, "the base has none");
    refused(base, other, SP_ERR_MISMATCH, SP_CODE_DRAFT_MISMATCH, "has another text");
    refused(BASE, SP_TEST_FIXTURES "/qwen3moe", SP_ERR_UNSUPPORTED, "engine-unsupported",
            "has experts (Qwen3Moe");
    refused(BASE, SP_TEST_FIXTURES "/qwen3next", SP_ERR_UNSUPPORTED, "engine-unsupported",
            "has experts (Qwen3Next");
    refused(BASE, BASE "/nowhere", SP_ERR_NOT_FOUND, NULL, "the draft model: ");
    options.memory_bytes = 1 << 20; /* the fixture has a quarter of it */
    assert_int_equal(sp_engine_open(&options, NULL, 0, &engine, &error), SP_ERR_MEMORY);
    assert_string_equal(error.subject, "draft-model");
    assert_string_equal(error.code, SP_CODE_MEMORY_SHORT);
    remove_copy(base);
    remove_copy(other);
}

/* Every allocation of opening one, and of a request with drafts, fails once: nothing is left. */
static void check_no_memory(const char *drafter)
{
    sp_engine_options options = options_of(BASE, drafter);
    const size_t before = sp_alloc_blocks();
    int64_t n = 0;

    for (bool failed = true; failed; n += 1 + n / 16) {
        int32_t prompt[3] = {5, 6, 7};
        engine_run run = engine_run_init(NULL, prompt, 3, 6);
        sp_engine *engine = NULL;
        sp_error error;
        int64_t id;

        sp_alloc_fail_after(n);
        if (sp_engine_open(&options, NULL, 0, &engine, &error) == SP_OK &&
            sp_engine_submit(engine, &run.request, &id, &error) == SP_OK)
            while (sp_engine_step(engine, NULL, NULL, &error) == SP_OK)
                continue;
        failed = sp_alloc_failed();
        sp_alloc_fail_after(-1);
        sp_engine_close(engine);
        assert_int_equal(sp_alloc_blocks(), before);
    }
    assert_true(n > 100);
}

static void test_no_memory(void **state)
{
    (void)state;
    check_no_memory(BASE);
    check_no_memory(hybrid.dir);
}

/* A state and a snapshot of each model that has them is counted for each request. */
static void test_states_are_part_of_the_budget(void **state)
{
    static const char *const pairs[][2] = {
        {BASE, SP_TEST_FIXTURES "/qwen35"},
        {SP_TEST_FIXTURES "/qwen35", BASE},
        {SP_TEST_FIXTURES "/qwen35", SP_TEST_FIXTURES "/qwen35"}};
    sp_delta_rule_shape shape;
    size_t one, copy;

    (void)state;
    for (size_t i = 0; i < 3; i++) {
        sp_engine_options options = options_of(pairs[i][0], pairs[i][1]);
        sp_engine *engine = engine_run_open(&options, NULL, 0);
        const sp_sequence_memory *own = &engine->memory, *other = &engine->draft_model->memory;

        shape = sp_family_delta_rule(i == 1 ? &engine->model : &engine->draft_model->model, 1, 1);
        one = sp_ops_state_bytes(engine->op_table, &shape, options.precision);
        copy = sp_ops_snapshot_bytes(engine->op_table, &shape, options.precision);
        sp_engine_close(engine);
        assert_true(one > 0 && copy > 0);
        options.state_bytes = 6 * one;
        options.state_snapshot_bytes = 10 * copy;
        engine = engine_run_open(&options, NULL, 0);
        own = &engine->memory, other = &engine->draft_model->memory;
        assert_int_equal(own->options.n_states, i == 0 ? 0 : i == 1 ? 6 : 3);
        assert_int_equal(other->options.n_states, i == 0 ? 6 : i == 1 ? 0 : 3);
        assert_int_equal(own->options.n_snapshots, i == 0 ? 0 : i == 1 ? 10 : 5);
        assert_int_equal(other->options.n_snapshots, i == 0 ? 10 : i == 1 ? 0 : 5);
        sp_engine_close(engine);
    }
}

/* ---- backends that fail -------------------------------------------------------------------- */

typedef enum failure { FAIL_NOTHING, FAIL_PASSES, FAIL_LOGITS, FAIL_CHOICES, FAIL_ENGINE } failure;

static struct {
    const sp_op_table *real; /* of whichever device */
    sp_op_table table;
    int32_t n_calls;
} failing;

/* Every third one fails after it has run. */
static sp_status fail_step(sp_ops *ops, const sp_step *step, sp_pass_fn pass, void *user)
{
    sp_status status = failing.real->step(ops, step, pass, user);

    return ++failing.n_calls % 3 == 0 ? SP_ERR_DEVICE : status;
}

static sp_status fail_logits(sp_ops *ops, sp_rows x, const sp_weight *head, const int32_t *rows,
                             int32_t n_rows)
{
    sp_status status = failing.real->logits(ops, x, head, rows, n_rows);

    return ++failing.n_calls % 5 == 0 ? SP_ERR_MEMORY : status;
}

/* As for logits that are not finite. */
static void fail_choices(sp_ops *ops, sp_choice *choices, int32_t n)
{
    failing.real->choose(ops, choices, n);
    for (int32_t i = 0; i < n; i++)
        if (++failing.n_calls % 4 == 0)
            choices[i].status = SP_ERR_INPUT;
}

/* The draft model's backend, or the engine's own. */
static void make_failing(sp_engine *engine, failure what)
{
    sp_ops *ops = what == FAIL_ENGINE ? engine->ops : engine->draft_model->ops;

    failing.n_calls = 0;
    if (what == FAIL_NOTHING)
        return;
    failing.real = ops->table;
    failing.table = *ops->table;
    if (what == FAIL_LOGITS)
        failing.table.logits = fail_logits;
    else if (what == FAIL_CHOICES)
        failing.table.choose = fail_choices;
    else
        failing.table.step = fail_step;
    ops->table = &failing.table;
}

/* ---- drafts -------------------------------------------------------------------------------- */

typedef struct crowd {
    int32_t prompts[N][PROMPT];
    engine_run plain[N], now[N];
} crowd;

/* Prompts without a repetition, most of them longer than a chunk; two are equal. */
static crowd *make_crowd(uint64_t seed, const char *adapter)
{
    crowd *c = sp_calloc(1, sizeof *c);
    sp_test_random random = {seed};

    assert_non_null(c);
    for (int32_t i = 0; i < N; i++) {
        int32_t n = 1 + (int32_t)sp_test_below(&random, PROMPT);
        engine_run run;

        engine_run_fill_prompt(&random, c->prompts[i], PROMPT, VOCAB);
        if (i == N - 1)
            memcpy(c->prompts[i], c->prompts[0], sizeof c->prompts[0]);
        run = engine_run_init(i % 2 ? adapter : NULL, c->prompts[i], n, NEW);
        run.request.seed = sp_test_below(&random, 1000);
        run.request.temperature = i % 3;
        run.request.top_k = i % 4 == 1 ? 30 : 0;
        run.request.frequency_penalty = i % 5 == 2 ? 0.6 : 0;
        run.request.logprobs = true;
        c->plain[i] = c->now[i] = run;
    }
    return c;
}

static void free_crowd(crowd *c)
{
    for (int32_t i = 0; i < N; i++) {
        engine_run_free(&c->plain[i]);
        engine_run_free(&c->now[i]);
    }
    sp_free(c);
}

static sp_engine *open_with(const target *of, const sp_engine_options *options)
{
    char path[256];
    sp_engine_adapter adapter = {sizeof adapter, of->adapter, path};

    snprintf(path, sizeof path, "%s/adapters/%s", of->fixture, of->adapter);
    return engine_run_open(options, &adapter, 1);
}

static void run_crowd(sp_engine *engine, engine_run *runs)
{
    engine_run *list[N];

    for (int32_t i = 0; i < N; i++) {
        engine_run_submit(engine, &runs[i]);
        list[i] = &runs[i];
    }
    engine_run_all(engine, list, N);
}

/* The engine's steps may fail. */
static void run_failing(sp_engine *engine, engine_run *runs)
{
    engine_run *list[N];
    sp_status status = SP_OK;
    sp_error error;

    for (int32_t i = 0; i < N; i++) {
        engine_run_submit(engine, &runs[i]);
        list[i] = &runs[i];
    }
    for (int32_t n = 0; status != SP_AGAIN; n++) {
        assert_true(n < 5000);
        status = engine_run_try_step(engine, list, N, &error);
        if (status != SP_AGAIN && engine->ops->table != &failing.table)
            assert_ok(status, &error);
    }
    for (int32_t i = 0; i < N; i++)
        assert_int_not_equal(runs[i].finish, SP_FINISH_NONE);
}

/* Its pages are as those of the engine: none is held when no request runs. */
static void check_left(const sp_engine *engine)
{
    const sp_sequence_memory *memory = &engine->draft_model->memory;

    assert_int_equal(memory->states.n_free_states, memory->states.n_states);
    assert_int_equal(sp_sequence_memory_available(memory), memory->options.n_pages);
    assert_true(sp_sequence_memory_is_consistent(memory));
}

static sp_engine_stats stats_of(const sp_engine *engine)
{
    sp_engine_stats stats = {.struct_bytes = sizeof stats};

    assert_int_equal(sp_engine_get_stats(engine, &stats, NULL), SP_OK);
    return stats;
}

/* Plain, and with a draft model, where something fails. */
static sp_engine_stats compare(const target *of, const char *drafter, const char *adapter,
                               int64_t kv_tokens, failure what)
{
    crowd *c = make_crowd(5, adapter);
    sp_engine_options options = options_of(of->dir, NULL);
    sp_engine *engine;
    sp_engine_stats stats;

    options.kv_tokens = kv_tokens;
    engine = open_with(of, &options);
    run_crowd(engine, c->plain);
    sp_engine_close(engine);
    options.draft_model = drafter;
    options.speculative = true;
    engine = open_with(of, &options);
    make_failing(engine, what);
    run_failing(engine, c->now);
    stats = stats_of(engine);
    check_left(engine);
    sp_engine_close(engine);
    for (int32_t i = 0; i < N; i++)
        engine_run_assert_same(&c->plain[i], &c->now[i]);
    free_crowd(c);
    return stats;
}

/* Also when its pages are short, so that it begins anew after preemptions. */
static void check_itself(const target *of)
{
    sp_engine_stats stats = compare(of, of->dir, NULL, 2048, FAIL_NOTHING), crowded;

    assert_true(stats.model_drafted_tokens > N * NEW / 4);
    assert_int_equal(stats.model_accepted_tokens, stats.model_drafted_tokens);
    assert_true(stats.draft_seconds > 0 && stats.draft_model_bytes > 0);
    crowded = compare(of, of->dir, NULL, 240, FAIL_NOTHING);
    assert_true(crowded.preemptions > 0 && crowded.model_drafted_tokens > N * NEW / 8);
    assert_int_equal(crowded.model_accepted_tokens, crowded.model_drafted_tokens);
}

static void test_the_model_itself_is_always_right(void **state)
{
    (void)state;
    check_itself(&dense);
    check_itself(&hybrid);
}

/* The logits that drafts are chosen from, by a model that drafts for itself: those of the base at
 * the same place, byte for byte, however its passes have advanced a state and gone back. */
static struct {
    const sp_op_table *real;
    const crowd *crowd;
    int32_t n_compared;
} logits_seen;

static bool is_prefix_of(const sp_choice *choice, const engine_run *run)
{
    int32_t n_prompt = run->request.n_tokens, n_new = choice->n_tokens - n_prompt;

    return n_new >= 0 && n_new < run->n_tokens &&
           memcmp(choice->tokens, run->request.tokens, (size_t)n_prompt * sizeof(int32_t)) == 0 &&
           memcmp(choice->tokens + n_prompt, run->tokens, (size_t)n_new * sizeof(int32_t)) == 0;
}

static void compare_logits(sp_ops *ops, sp_choice *choices, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        const engine_run *run = logits_seen.crowd->plain;
        const float *logits = sp_op_read_logits(ops, i);
        int32_t row;

        while (run < logits_seen.crowd->plain + N && !is_prefix_of(&choices[i], run))
            run++;
        if (run == logits_seen.crowd->plain + N)
            continue; /* after the last token of a text */
        row = choices[i].n_tokens - run->request.n_tokens;
        assert_memory_equal(logits, run->logits + (size_t)row * (size_t)run->vocab,
                            (size_t)run->vocab * sizeof *logits);
        logits_seen.n_compared++;
    }
    logits_seen.real->choose(ops, choices, n);
}

static void check_logits(const target *of, int64_t kv_tokens, int32_t draft_tokens,
                         int32_t snapshot_tokens, failure what)
{
    crowd *c = make_crowd(6, NULL);
    sp_engine_options options = options_of(of->dir, NULL);
    sp_engine *engine = open_with(of, &options);
    sp_op_table table;

    for (int32_t i = 0; i < N; i++) {
        c->plain[i].keep_logits = true;
        c->plain[i].request.logits_from = c->plain[i].request.n_tokens - 1;
    }
    run_crowd(engine, c->plain);
    sp_engine_close(engine);
    options = options_of(of->dir, of->dir);
    options.kv_tokens = kv_tokens;
    options.draft_tokens = draft_tokens;
    options.state_snapshot_tokens = snapshot_tokens;
    engine = open_with(of, &options);
    logits_seen.real = engine->draft_model->ops->table;
    logits_seen.crowd = c;
    logits_seen.n_compared = 0;
    table = *logits_seen.real;
    table.choose = compare_logits;
    engine->draft_model->ops->table = &table;
    make_failing(engine, what);
    run_failing(engine, c->now);
    assert_true((what != FAIL_NOTHING) == (failing.n_calls > 0));
    assert_true(logits_seen.n_compared > N * NEW / 8);
    assert_true((stats_of(engine).preemptions > 0) == (kv_tokens < 2048));
    check_left(engine);
    sp_engine_close(engine);
    free_crowd(c);
}

/* Snapshots end a drafting at their places; without them the border of a chunk alone does. */
static void test_logits_of_drafts(void **state)
{
    (void)state;
    for (int32_t i = 0; i < 4; i++) {
        int64_t kv_tokens = i % 2 ? 2048 : 240;
        int32_t longest = i < 2 ? 4 : 15;

        check_logits(&hybrid, kv_tokens, longest, 0, FAIL_NOTHING);
        check_logits(&hybrid, kv_tokens, longest, 64, FAIL_NOTHING);
        check_logits(&dense, kv_tokens, longest, 64, FAIL_NOTHING);
    }
}

/* The draft model has computed rows whose tokens come again. */
static void test_logits_after_steps_that_failed(void **state)
{
    (void)state;
    check_logits(&hybrid, 2048, 4, 0, FAIL_ENGINE);
    check_logits(&hybrid, 2048, 6, 64, FAIL_ENGINE);
    check_logits(&dense, 2048, 4, 0, FAIL_ENGINE);
}

static void test_models_that_are_others(void **state)
{
    static const char *const drafters[] = {"/qwen2", "/llama3", "/smollm", "/qwen3-untied"};

    (void)state;
    for (size_t i = 0; i < sizeof drafters / sizeof *drafters; i++) {
        char path[256];
        sp_engine_stats stats;

        snprintf(path, sizeof path, SP_TEST_FIXTURES "%s", drafters[i]);
        stats = compare(&dense, path, "r64", 512, FAIL_NOTHING);
        assert_true(stats.model_drafted_tokens > 0);
        assert_true(stats.model_accepted_tokens < stats.model_drafted_tokens);
    }
}

/* Of another kind than the base: one of the two has a state for each request. */
static void test_models_of_the_other_kind(void **state)
{
    sp_engine_stats stats = compare(&dense, hybrid.dir, dense.adapter, 512, FAIL_NOTHING);

    (void)state;
    assert_true(stats.model_drafted_tokens > stats.model_accepted_tokens);
    stats = compare(&hybrid, dense.dir, hybrid.adapter, 512, FAIL_NOTHING);
    assert_true(stats.model_drafted_tokens > stats.model_accepted_tokens);
}

/* Drafts for an adapter are the base's, so some are wrong. */
static void test_an_adapter_in_the_crowd(void **state)
{
    const target *const targets[] = {&dense, &hybrid};

    (void)state;
    for (size_t i = 0; i < 2; i++) {
        sp_engine_stats stats =
            compare(targets[i], targets[i]->dir, targets[i]->adapter, 2048, FAIL_NOTHING);

        assert_true(stats.model_accepted_tokens > 0);
        assert_true(stats.model_accepted_tokens < stats.model_drafted_tokens);
    }
}

/* One request of the base: five tokens a step once it has caught up, but where prompt lookup has
 * something. */
static void test_steps_of_one_request(void **state)
{
    sp_engine_options options = options_of(BASE, BASE);
    int32_t prompt[PROMPT];
    sp_test_random random = {9};
    engine_run run, *list[] = {&run};
    sp_engine *engine;

    (void)state;
    engine_run_fill_prompt(&random, prompt, PROMPT, VOCAB);
    run = engine_run_init(NULL, prompt, PROMPT, NEW);
    run.request.temperature = 1;
    engine = open_with(&dense, &options);
    engine_run_submit(engine, &run);
    engine_run_all(engine, list, 1);
    /* the prompt's chunks; as many tokens while the draft model reads as many chunks; the rest */
    assert_true(stats_of(engine).steps <= 5 + 5 + (NEW - 5 + 4) / 5 + 3);
    engine_run_free(&run);
    sp_engine_close(engine);
}

/* ---- grammars ------------------------------------------------------------------------------ */

/* Texts in a grammar, of which some repeat themselves, by prompt lookup and by the model itself. */
static sp_engine_stats run_constrained(const char *model, const char *drafter, engine_run *runs)
{
    static const char *const patterns[] = {"(the cat and the dog, )+end", "[a-z]{3,30}", "(ab|ba)*",
                                           "[0-9]+(, [0-9]+){4,12}"};
    sp_engine_options options = options_of(model, drafter);
    sp_engine *engine = open_with(&dense, &options);
    int32_t prompt[2] = {5, 6};
    sp_engine_stats stats;

    for (int32_t i = 0; i < N; i++) {
        sp_constraint_options text;
        sp_error error;

        sp_constraint_options_default(&text, sizeof text);
        text.kind = SP_CONSTRAINT_REGEX;
        text.text = patterns[i % 4];
        text.text_bytes = strlen(text.text);
        runs[i] = engine_run_init(NULL, prompt, 2, NEW);
        runs[i].request.temperature = i % 3 * 0.7;
        runs[i].request.seed = (uint64_t)i;
        runs[i].request.logprobs = true;
        assert_ok(sp_engine_compile(engine, &text, &runs[i].request.constraint, &error), &error);
    }
    run_crowd(engine, runs);
    for (int32_t i = 0; i < N; i++)
        sp_constraint_release(runs[i].request.constraint);
    stats = stats_of(engine);
    sp_engine_close(engine);
    return stats;
}

static void test_outputs_in_a_grammar(void **state)
{
    char *model = with_tokenizer(BASE, NULL, NULL);
    crowd *c = sp_calloc(1, sizeof *c);
    sp_engine_stats plain = run_constrained(model, NULL, c->plain);
    sp_engine_stats drafted = run_constrained(model, model, c->now);
    uint64_t looked_up = drafted.drafted_tokens - drafted.model_drafted_tokens;

    (void)state;
    for (int32_t i = 0; i < N; i++)
        engine_run_assert_same(&c->plain[i], &c->now[i]);
    assert_true(looked_up > 0 && drafted.model_drafted_tokens > 0);
    assert_true(drafted.accepted_tokens > drafted.model_accepted_tokens);
    assert_true(drafted.steps < plain.steps);
    /* but for what comes after a text that has ended */
    assert_true(drafted.model_accepted_tokens + 4 * N > drafted.model_drafted_tokens);
    free_crowd(c);
    remove_copy(model);
}

/* ---- failures ------------------------------------------------------------------------------ */

static void test_passes_that_fail(void **state)
{
    static const failure failures[] = {FAIL_PASSES, FAIL_LOGITS, FAIL_CHOICES, FAIL_ENGINE};

    (void)state;
    for (size_t i = 0; i < sizeof failures / sizeof *failures; i++) {
        for (int32_t t = 0; t < 2; t++) {
            const target *of = t == 0 ? &dense : &hybrid;
            sp_engine_stats stats = compare(of, of->dir, NULL, 1024, failures[i]);

            assert_true(stats.model_drafted_tokens > 0 && failing.n_calls > 10);
            assert_int_equal(stats.model_accepted_tokens, stats.model_drafted_tokens);
        }
    }
}

static void check_leaving(const target *of)
{
    crowd *c = make_crowd(5, of->adapter);
    sp_engine_options options = options_of(of->dir, of->dir);
    sp_engine *engine = open_with(of, &options);
    engine_run *list[N];

    for (int32_t i = 0; i < N; i++) {
        engine_run_submit(engine, &c->now[i]);
        list[i] = &c->now[i];
    }
    for (int32_t i = 0; i < N; i += 2) {
        engine_run_step(engine, list, N);
        engine_run_step(engine, list, N);
        if (c->now[i].finish == SP_FINISH_NONE)
            assert_int_equal(sp_engine_cancel(engine, c->now[i].id, NULL), SP_OK);
    }
    while (engine_run_step(engine, list, N))
        continue;
    check_left(engine);
    sp_engine_close(engine);
    free_crowd(c);
}

static void test_requests_that_leave(void **state)
{
    (void)state;
    check_leaving(&dense);
    check_leaving(&hybrid);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_models_that_cannot_draft),
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_states_are_part_of_the_budget),
        cmocka_unit_test(test_the_model_itself_is_always_right),
        cmocka_unit_test(test_logits_of_drafts),
        cmocka_unit_test(test_logits_after_steps_that_failed),
        cmocka_unit_test(test_models_that_are_others),
        cmocka_unit_test(test_models_of_the_other_kind),
        cmocka_unit_test(test_an_adapter_in_the_crowd),
        cmocka_unit_test(test_steps_of_one_request),
        cmocka_unit_test(test_outputs_in_a_grammar),
        cmocka_unit_test(test_passes_that_fail),
        cmocka_unit_test(test_requests_that_leave),
    };

    return cmocka_run_group_tests(tests, make_hybrid, remove_hybrid);
}
