/*
 * Speculative decoding changes how many steps a text takes, and nothing else: 1,000 random requests
 * over six adapters and the base, with rotation, preemption and prefix hits, give the same tokens,
 * texts, logprobs and logits byte for byte with drafts and without, whoever drafts and however much
 * of it is accepted; and the prefix table holds the same pages afterwards. With a draft model too,
 * be it the model itself or one that knows nothing. Some of them on models with gated delta nets,
 * in lengths that pass the borders of their states.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "base/file.h"
#include "engine/draft_source.h"
#include "engine/engine_state.h"
#include "support/engine_run.h"
#include "support/long_memory.h"
#include "support/shell.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __SANITIZE_ADDRESS__ /* a quarter of the requests is a quarter of a minute there */
#define N_REQUESTS 250
#else
#define N_REQUESTS 1000
#endif
#define N_ADAPTERS 6
#define N_STEMS    5 /* beginnings that prompts share */
#define PAGE       4
#define PROMPT_MAX 60
#define NEW_MAX    32
#define VOCAB      509
#define TOGETHER   20 /* requests that wait or run at a time */

/* What is tested. */
typedef struct subject {
    const char *fixture, *names[N_ADAPTERS];
    int32_t prompt_max; /* tokens of a random prompt */
    int64_t kv_tokens;  /* for a crowd of them */
    bool hybrid;
} subject;

static const subject dense = {SP_TEST_FIXTURES "/qwen3-tied",
                              {"all-linear", "attn-r4", "r1", "r64", "rslora-r16", "patterns"},
                              28,
                              240,
                              false};
static const subject hybrid = {
    SP_TEST_FIXTURES "/qwen35",
    {"all-linear", "gdn-in", "gdn-out", "gdn-all-attn", "rslora-r16", "patterns"},
    PROMPT_MAX,
    400,
    true};
static const subject hybrid_experts = {
    SP_TEST_FIXTURES "/qwen3next",
    {"all-linear", "gdn-in", "gdn-out", "router", "experts-fused-attn", "patterns"},
    PROMPT_MAX,
    400,
    true};
#define N_SUBJECTS 3
static const subject *const subjects[N_SUBJECTS] = {&dense, &hybrid, &hybrid_experts};

static const char *const stops[] = {"e", "th", "in", " a", "ing"};

/* Copies of the fixtures with the tokenizer that fits them, hybrids with states that remember; and
 * of one that is no subject. Of the whole group. */
static char *models[N_SUBJECTS], *stranger;

/* Of the test under way. */
static const subject *tested;
static const char *model;
static const char *const *names;

static int32_t place_of(const subject *used)
{
    int32_t i = 0;

    while (subjects[i] != used)
        i++;
    return i;
}

static void use_subject(const subject *used)
{
    tested = used;
    model = models[place_of(used)];
    names = used->names;
}

static int use_dense(void **state)
{
    (void)state;
    use_subject(&dense);
    return 0;
}

static char *make_model(const char *fixture, bool hybrid_one)
{
    char *directory = hybrid_one ? long_memory_copy(fixture) : shell_copy_directory(fixture);
    char *data;
    size_t bytes;
    sp_error error;

    assert_ok(sp_file_read_all(SP_TEST_FIXTURES "/tokenizer512/tokenizer.json", 1 << 24, &data,
                               &bytes, &error),
              &error);
    sp_test_write_file(directory, "tokenizer.json", data, bytes);
    sp_free(data);
    return directory;
}

static int make_models(void **state)
{
    (void)state;
    for (int32_t i = 0; i < N_SUBJECTS; i++)
        models[i] = make_model(subjects[i]->fixture, subjects[i]->hybrid);
    stranger = make_model(SP_TEST_FIXTURES "/llama3", false);
    return 0;
}

static int remove_models(void **state)
{
    (void)state;
    for (int32_t i = 0; i < N_SUBJECTS; i++) {
        sp_test_remove_tree(models[i]);
        sp_free(models[i]);
    }
    sp_test_remove_tree(stranger);
    sp_free(stranger);
    return 0;
}

static sp_engine_options options_of(int64_t kv_tokens)
{
    sp_engine_options options;

    sp_engine_options_default(&options, sizeof options);
    options.model_dir = model;
    options.threads = 1;
    options.max_running = 12;
    options.page_tokens = PAGE;
    options.kv_tokens = kv_tokens;
    options.step_rows = 48;
    options.prefill_chunk = 17;
    options.state_snapshot_tokens = 32;
    return options;
}

static sp_engine *open_engine(const sp_engine_options *options)
{
    char paths[N_ADAPTERS][256];
    sp_engine_adapter adapters[N_ADAPTERS];

    for (size_t i = 0; i < N_ADAPTERS; i++) {
        snprintf(paths[i], sizeof paths[i], "%s/adapters/%s", tested->fixture, names[i]);
        adapters[i] = (sp_engine_adapter){sizeof(sp_engine_adapter), names[i], paths[i]};
    }
    return engine_run_open(options, adapters, N_ADAPTERS);
}

/* ---- a source that knows what comes --------------------------------------------------------- */

/* Drafts what the same request has given before, and another id in place of some of them. */
typedef struct oracle {
    const engine_run *plain, *now; /* [n] of the same requests, the second with their ids */
    size_t n;
    uint32_t percent; /* of its drafts that are right */
    sp_test_random random;
} oracle;

static int32_t foretell(void *user, const sp_sequence *sequence, int32_t n_max, int32_t *out_tokens)
{
    oracle *o = user;
    int32_t at = sequence->n_tokens - sequence->request.n_prompt;
    size_t i = 0;

    while (i < o->n && o->now[i].id != sequence->id)
        i++;
    assert_true(i < o->n && n_max > 0);
    for (int32_t d = 0; d < n_max; d++) {
        bool known = at + d < o->plain[i].n_tokens;
        bool right = sp_test_below(&o->random, 100) < o->percent;
        int32_t token = known ? o->plain[i].tokens[at + d] : 0;

        out_tokens[d] = right ? token : (token + 1) % VOCAB;
    }
    return n_max;
}

/* ---- random requests ------------------------------------------------------------------------ */

typedef struct scene {
    int32_t stems[N_STEMS][PROMPT_MAX], prompts[N_REQUESTS][PROMPT_MAX];
    sp_logit_bias bias[2];
    int32_t ends[1];
    engine_run plain[N_REQUESTS], drafted[N_REQUESTS];
} scene;

/* A beginning that others have too, a piece that repeats itself, or ids of its own. */
static int32_t make_prompt(scene *s, sp_test_random *random, int32_t *out_prompt)
{
    int32_t n = 1 + (int32_t)sp_test_below(random, (uint32_t)tested->prompt_max);
    uint32_t kind = sp_test_below(random, 3);

    memcpy(out_prompt, s->stems[sp_test_below(random, N_STEMS)], sizeof s->stems[0]);
    if (kind == 0)
        engine_run_fill_prompt(random, out_prompt, n, VOCAB);
    for (int32_t i = 5; kind == 1 && i < n; i++)
        out_prompt[i] = out_prompt[i - 5];
    return n;
}

static void make_sampling(scene *s, sp_test_random *random, sp_request *request)
{
    request->seed = sp_test_below(random, 1000);
    request->temperature = sp_test_below(random, 3) * 0.6;
    request->top_k = sp_test_below(random, 4) == 0 ? 20 : 0;
    request->top_p = sp_test_below(random, 3) == 0 ? 0.9 : 1;
    request->min_p = sp_test_below(random, 5) == 0 ? 0.05 : 0;
    request->presence_penalty = sp_test_below(random, 6) == 0 ? 0.7 : 0;
    request->frequency_penalty = sp_test_below(random, 6) == 0 ? 0.4 : 0;
    request->repetition_penalty = sp_test_below(random, 6) == 0 ? 1.2 : 1;
    request->logit_bias = s->bias;
    request->n_logit_bias = sp_test_below(random, 5) == 0 ? 2 : 0;
}

static void make_ends(scene *s, sp_test_random *random, sp_request *request)
{
    request->ignore_eos = sp_test_below(random, 2) == 0;
    request->stop = &stops[sp_test_below(random, 4)];
    request->n_stop = sp_test_below(random, 4) == 0 ? 2 : 0;
    request->stop_tokens = s->ends;
    request->n_stop_tokens = sp_test_below(random, 5) == 0;
    request->min_tokens = sp_test_below(random, 5) == 0 ? request->max_tokens / 2 : 0;
}

static engine_run make_run(scene *s, sp_test_random *random, int32_t i)
{
    uint32_t adapter = sp_test_below(random, N_ADAPTERS + 1);
    int32_t n_prompt = make_prompt(s, random, s->prompts[i]);
    int32_t n_new = 1 + (int32_t)sp_test_below(random, NEW_MAX);
    engine_run run = engine_run_init(adapter < N_ADAPTERS ? names[adapter] : NULL, s->prompts[i],
                                     n_prompt, n_new);

    run.request.lora_scale = sp_test_below(random, 8) == 0 ? 0.5f : 1;
    make_sampling(s, random, &run.request);
    make_ends(s, random, &run.request);
    run.request.logprobs = sp_test_below(random, 2) == 0;
    run.request.prompt_logprobs = sp_test_below(random, 6) == 0;
    run.request.top_logprobs =
        run.request.logprobs || run.request.prompt_logprobs ? (int32_t)sp_test_below(random, 4) : 0;
    run.keep_logits = sp_test_below(random, 8) == 0;
    run.request.logits_from = n_prompt - 1;
    return run;
}

static scene *make_scene(uint64_t seed, int32_t n)
{
    scene *s = sp_calloc(1, sizeof *s);
    sp_test_random random = {seed};

    assert_non_null(s);
    for (int32_t i = 0; i < N_STEMS; i++)
        engine_run_fill_prompt(&random, s->stems[i], tested->prompt_max, VOCAB);
    s->bias[0] = (sp_logit_bias){.token = 11, .bias = 4};
    s->bias[1] = (sp_logit_bias){.token = 300, .bias = -100};
    s->ends[0] = 42;
    for (int32_t i = 0; i < n; i++)
        s->plain[i] = s->drafted[i] = make_run(s, &random, i);
    return s;
}

static void free_scene(scene *s)
{
    for (int32_t i = 0; i < N_REQUESTS; i++) {
        engine_run_free(&s->plain[i]);
        engine_run_free(&s->drafted[i]);
    }
    sp_free(s);
}

/* All of them, TOGETHER at a time, as fast as they leave. */
static sp_engine_stats run_all(sp_engine *engine, engine_run *runs, int32_t n)
{
    sp_engine_stats stats = {.struct_bytes = sizeof stats};
    engine_run *list[TOGETHER];
    int32_t next = 0, n_list = 0;

    do {
        int32_t kept = 0;

        for (int32_t i = 0; i < n_list; i++)
            if (list[i]->finish == SP_FINISH_NONE)
                list[kept++] = list[i];
        n_list = kept;
        while (n_list < TOGETHER && next < n) {
            engine_run_submit(engine, &runs[next]);
            list[n_list++] = &runs[next++];
        }
    } while (engine_run_step(engine, list, (size_t)n_list));
    assert_int_equal(next, n);
    sp_engine_get_stats(engine, &stats, NULL);
    assert_int_equal(stats.kv_pages_used, 0);
    assert_true(sp_sequence_memory_is_consistent(&engine->memory));
    return stats;
}

static sp_engine_options crowded(void)
{
    sp_engine_options options = options_of(tested->kv_tokens);

    options.max_loras = 3;
    options.loader_threads = 0; /* loads take no steps, so every run has the same */
    options.adapter_wait_steps = 4;
    options.adapter_preempt_steps = 8;
    return options;
}

static void print_figures(const sp_engine_stats *plain, const sp_engine_stats *drafted)
{
    print_message(
        "%llu tokens in %llu steps, %llu with drafts: %llu of %llu accepted (%llu of %llu "
        "of a model's), %llu preemptions, %llu rotations, %llu tokens from the prefix "
        "cache\n",
        (unsigned long long)plain->tokens, (unsigned long long)plain->steps,
        (unsigned long long)drafted->steps, (unsigned long long)drafted->accepted_tokens,
        (unsigned long long)drafted->drafted_tokens,
        (unsigned long long)drafted->model_accepted_tokens,
        (unsigned long long)drafted->model_drafted_tokens, (unsigned long long)drafted->preemptions,
        (unsigned long long)drafted->rotations, (unsigned long long)drafted->prefix_tokens);
}

/* Every request plain and with drafts: percent of the oracle's are right; -1: prompt lookup, and
 * the draft model, if there is one. */
static void check_random(uint64_t seed, int32_t n, int32_t percent, bool alone, const char *drafter)
{
    scene *s = make_scene(seed, n);
    oracle o = {s->plain, s->drafted, (size_t)n, (uint32_t)percent, {seed}};
    sp_engine_options options = crowded();
    sp_engine_stats plain, drafted;
    sp_engine *engine = open_engine(&options);

    plain = run_all(engine, s->plain, n);
    sp_engine_close(engine);
    assert_int_equal(plain.drafted_tokens, 0);
    options.speculative = true;
    options.draft_tokens = 1 + (int32_t)(seed % 9);
    options.no_batch_verify = alone;
    options.draft_model = drafter;
    engine = open_engine(&options);
    if (percent >= 0)
        sp_engine_set_draft_source(engine, (sp_draft_source){&o, foretell});
    drafted = run_all(engine, s->drafted, n);
    sp_engine_close(engine);
    for (int32_t i = 0; i < n; i++)
        engine_run_assert_same(&s->plain[i], &s->drafted[i]);
    print_figures(&plain, &drafted);
    assert_int_equal(drafted.model_drafted_tokens > 0, drafter && percent < 0);
    assert_int_equal(drafted.tokens, plain.tokens);
    assert_true(drafted.preemptions > 0);
    if (n == N_REQUESTS && drafted.page_tokens == PAGE) /* a GPU's pages are larger */
        assert_true(drafted.preemptions > drafted.rotations && drafted.rotations > 0);
    if (n == N_REQUESTS || (drafted.page_tokens == PAGE && tested == &dense))
        assert_true(drafted.prefix_tokens > 0); /* else by chance: a snapshot is rare */
    assert_true(drafted.drafted_tokens > 0);
    assert_true(percent == 0 ? drafted.accepted_tokens == 0 : drafted.accepted_tokens > 0);
    free_scene(s);
}

static void test_a_thousand_requests_by_prompt_lookup(void **state)
{
    (void)state;
    check_random(3, N_REQUESTS, -1, false, NULL);
}

static void test_drafts_that_are_right_by_chance(void **state)
{
    (void)state;
    check_random(11, 150, 60, false, NULL);
    check_random(7, 100, 0, false, NULL);
    check_random(8, 100, 100, false, NULL);
}

static void test_a_pass_for_each_verifying_request(void **state)
{
    (void)state;
    check_random(5, 100, 70, true, NULL);
}

/* Drafts that are right, wrong and both, across the borders of chunks: what is rejected after one
 * is no part of the state. */
static void check_hybrid(const subject *used, const subject *drafter, uint64_t seed, int32_t n)
{
    use_subject(used);
    check_random(seed, n, -1, false, NULL);
    check_random(seed + 1, n, 60, false, NULL);
    check_random(seed + 2, n, 0, false, NULL);
    check_random(seed + 3, n, 100, false, NULL);
    check_random(seed + 4, n, 70, true, NULL);
    check_random(seed + 5, n, -1, false, models[place_of(drafter)]);
}

static void test_gated_delta_nets(void **state)
{
    (void)state;
    check_hybrid(&hybrid, &hybrid, 41, 60);
}

static void test_gated_delta_nets_with_experts(void **state)
{
    (void)state;
    check_hybrid(&hybrid_experts, &dense, 51, 40);
}

static void test_a_draft_model(void **state)
{
    (void)state;
    check_random(21, 150, -1, false, model);
    check_random(22, 100, -1, false, stranger);
    check_random(23, 60, -1, true, model);
}

/* ---- one request ---------------------------------------------------------------------------- */

/* How many positions of the run's text the prefix table knows. */
static int32_t known_of(sp_engine *engine, const engine_run *run)
{
    int32_t tokens[PROMPT_MAX + NEW_MAX * 4], n = run->request.n_tokens + run->n_tokens, known;
    sp_held_memory held;

    memcpy(tokens, run->request.tokens, (size_t)run->request.n_tokens * sizeof *tokens);
    memcpy(tokens + run->request.n_tokens, run->tokens, (size_t)run->n_tokens * sizeof *tokens);
    assert_int_equal(sp_held_memory_create(&engine->memory, n, &held), SP_OK);
    known = sp_sequence_memory_resume(&engine->memory, &held, tokens, n);
    sp_sequence_memory_release(&engine->memory, &held);
    sp_held_memory_destroy(&held);
    return known;
}

/* The base's own text of one prompt in an engine alone, with drafts of which `percent` are right;
 * -1: none. `now` is one request, given when it has begun. */
static sp_engine_stats run_one(const engine_run *plain, engine_run *now, int32_t percent,
                               int32_t *out_known, int32_t *out_entries)
{
    sp_engine_options options = options_of(512);
    oracle o = {plain, now, 1, (uint32_t)percent, {1}};
    sp_engine_stats stats;
    sp_engine *engine;

    options.speculative = percent >= 0;
    options.prefill_chunk = 0;
    engine = open_engine(&options);
    if (percent >= 0)
        sp_engine_set_draft_source(engine, (sp_draft_source){&o, foretell});
    stats = run_all(engine, now, 1);
    *out_known = known_of(engine, now);
    *out_entries = sp_prefix_entries(&engine->memory.prefix);
    sp_engine_close(engine);
    return stats;
}

/* With acceptance 0 and 1, and every end of a text at every place within the drafts. */
static void test_one_request_and_what_it_leaves(void **state)
{
    int32_t prompt[6] = {5, 6, 7, 8, 9, 10};

    (void)state;
    for (int32_t n_new = 1; n_new <= 24; n_new++) {
        for (int32_t percent = 0; percent <= 100; percent += 50) {
            engine_run plain = engine_run_init(NULL, prompt, 6, n_new), now;
            int32_t known[2], entries[2], want;
            sp_engine_stats stats;

            plain.request.temperature = n_new % 2;
            plain.request.logprobs = true;
            plain.keep_logits = n_new % 3 == 0;
            plain.request.logits_from = 2;
            plain.request.ignore_eos = n_new % 4 != 0;
            now = plain;
            run_one(NULL, &plain, -1, &known[0], &entries[0]);
            stats = run_one(&plain, &now, percent, &known[1], &entries[1]);
            engine_run_assert_same(&plain, &now);
            want = (6 + plain.n_tokens - 1) / stats.page_tokens * stats.page_tokens;
            assert_int_equal(known[0], want);
            assert_int_equal(known[1], want);
            assert_int_equal(entries[0], entries[1]);
            if (percent == 100)
                assert_true((int32_t)stats.steps <= plain.n_tokens / 5 + 1);
            if (percent == 0)
                assert_int_equal(stats.steps, plain.n_tokens);
            engine_run_free(&plain);
            engine_run_free(&now);
        }
    }
}

static void test_a_text_that_ends_inside_the_drafts(void **state)
{
    int32_t prompt[6] = {5, 6, 7, 8, 9, 10}, first[20], known[2], entries[2];
    engine_run all = engine_run_init("r64", prompt, 6, 20);

    (void)state;
    all.request.temperature = 1;
    run_one(NULL, &all, -1, &known[0], &entries[0]);
    memcpy(first, all.tokens, sizeof first);
    for (int32_t end = 0; end < 20; end++) {
        engine_run plain = engine_run_init("r64", prompt, 6, 20), now;

        plain.request.temperature = 1;
        plain.request.stop_tokens = &first[end];
        plain.request.n_stop_tokens = 1;
        now = plain;
        run_one(NULL, &plain, -1, &known[0], &entries[0]);
        run_one(&all, &now, 100, &known[1], &entries[1]);
        engine_run_assert_same(&plain, &now);
        assert_int_equal(now.finish, SP_FINISH_STOP);
        assert_int_equal(known[0], known[1]);
        assert_int_equal(entries[0], entries[1]);
        engine_run_free(&plain);
        engine_run_free(&now);
    }
    engine_run_free(&all);
}

#define LONG 400

/* Prompts about the borders of attention's blocks, base and adapters in turn, and more rows with
 * drafts than fit into one window of logits. */
static void test_long_prompts_side_by_side(void **state)
{
    static const int32_t lengths[] = {1, 127, 128, 129, LONG, 31, 32, 33};
    enum { N = sizeof lengths / sizeof *lengths };
    int32_t prompts[N][LONG];
    engine_run plain[N], now[N];
    oracle o = {plain, now, N, 95, {4}};
    sp_engine_options options = options_of(2048);
    sp_test_random random = {5};
    sp_engine_stats stats;
    sp_engine *engine;

    (void)state;
    options.step_rows = 256;
    options.prefill_chunk = 64;
    options.draft_tokens = 8;
    for (int32_t i = 0; i < N; i++) {
        engine_run_fill_prompt(&random, prompts[i], lengths[i], VOCAB);
        plain[i] = engine_run_init(i % 2 ? names[i / 2] : NULL, prompts[i], lengths[i], 40);
        plain[i].request.logprobs = true;
        plain[i].request.top_logprobs = 2;
        plain[i].keep_logits = true;
        plain[i].request.logits_from = lengths[i] - 1;
        now[i] = plain[i];
    }
    engine = open_engine(&options);
    run_all(engine, plain, N);
    sp_engine_close(engine);
    options.speculative = true;
    engine = open_engine(&options);
    sp_engine_set_draft_source(engine, (sp_draft_source){&o, foretell});
    stats = run_all(engine, now, N);
    sp_engine_close(engine);
    assert_true(stats.verify_steps > 2 * stats.steps && stats.accepted_tokens > 100);
    for (int32_t i = 0; i < N; i++) {
        engine_run_assert_same(&plain[i], &now[i]);
        engine_run_free(&plain[i]);
        engine_run_free(&now[i]);
    }
}

/* How many tokens are drafted depends on what steps take; which come out does not. */
static void test_steps_that_are_timed(void **state)
{
    int32_t prompt[8] = {5, 6, 7, 5, 6, 7, 5, 6};
    engine_run plain = engine_run_init("r1", prompt, 8, 100), now[3];
    sp_engine_options options = options_of(1024);
    sp_engine_stats stats;
    sp_engine *engine = open_engine(&options);

    (void)state;
    for (int32_t i = 0; i < 3; i++) {
        now[i] = plain;
        now[i].request.speculative = SP_SPECULATIVE_ON;
    }
    run_all(engine, &plain, 1);
    assert_false(engine->step_cost.steps > 0);
    engine->untimed = false;
    stats = run_all(engine, now, 3);
    assert_true(stats.drafted_tokens > 0 && engine->step_cost.steps > 1);
    for (int32_t i = 0; i < 3; i++) {
        engine_run_assert_same(&plain, &now[i]);
        engine_run_free(&now[i]);
    }
    sp_engine_close(engine);
    engine_run_free(&plain);
}

/* The field wins over the option, both ways. */
static void test_the_request_decides(void **state)
{
    int32_t prompt[8] = {5, 6, 7, 5, 6, 7, 5, 6};

    (void)state;
    for (int32_t option = 0; option < 2; option++) {
        for (int32_t field = SP_SPECULATIVE_DEFAULT; field <= SP_SPECULATIVE_OFF; field++) {
            engine_run run = engine_run_init(NULL, prompt, 8, 8);
            sp_engine_options options = options_of(128);
            bool on = field == SP_SPECULATIVE_ON || (field == SP_SPECULATIVE_DEFAULT && option);
            sp_engine_stats stats;
            sp_engine *engine;

            options.speculative = option;
            run.request.speculative = (sp_speculative)field;
            engine = open_engine(&options);
            stats = run_all(engine, &run, 1);
            assert_int_equal(stats.drafted_tokens > 0, on);
            assert_int_equal(stats.verify_steps > 0, on);
            sp_engine_close(engine);
            engine_run_free(&run);
        }
    }
}

/* ---- a backend in which a draft spoils its whole span ---------------------------------------- */

typedef struct fault_spy {
    const sp_op_table *real;
    sp_op_table table;
    int32_t span_rows[TOGETHER], n_spans, n_faults;
} fault_spy;

static fault_spy spy;

static sp_status note_spans(sp_ops *ops, const sp_step *step, sp_pass_fn pass, void *user)
{
    spy.n_spans = step->n_spans;
    for (int32_t i = 0; i < step->n_spans; i++)
        spy.span_rows[i] = step->spans[i].n_rows;
    return spy.real->step(ops, step, pass, user);
}

/* With prompts of one token every longer span has drafts. */
static sp_status find_faults(sp_ops *ops, bool *out_faults, int32_t n_spans)
{
    sp_status status = spy.real->faults(ops, out_faults, n_spans);

    assert_int_equal(n_spans, spy.n_spans);
    for (int32_t i = 0; i < n_spans; i++) {
        out_faults[i] = spy.span_rows[i] > 1;
        spy.n_faults += out_faults[i];
    }
    return status;
}

static void test_keys_of_a_draft_that_are_not_finite(void **state)
{
    int32_t prompts[3] = {5, 60, 7};
    engine_run plain[3], now[3];
    oracle o = {plain, now, 3, 100, {1}};
    sp_engine_options options = options_of(256);
    sp_engine_stats stats;
    sp_engine *engine;

    (void)state;
    for (int32_t i = 0; i < 3; i++) {
        plain[i] = now[i] = engine_run_init(names[i], &prompts[i], 1, 12);
        plain[i].keep_logits = now[i].keep_logits = true;
    }
    engine = open_engine(&options);
    run_all(engine, plain, 3);
    sp_engine_close(engine);
    options.speculative = true;
    engine = open_engine(&options);
    sp_engine_set_draft_source(engine, (sp_draft_source){&o, foretell});
    spy.real = engine->ops->table;
    spy.table = *spy.real;
    spy.table.step = note_spans;
    spy.table.faults = find_faults;
    engine->ops->table = &spy.table;
    stats = run_all(engine, now, 3);
    sp_engine_close(engine);
    assert_true(spy.n_faults >= 3 && stats.drafted_tokens > 0);
    assert_int_equal(stats.verify_steps, 3); /* each tried once, right as the drafts were */
    assert_int_equal(stats.accepted_tokens, 0);
    for (int32_t i = 0; i < 3; i++) {
        engine_run_assert_same(&plain[i], &now[i]);
        engine_run_free(&plain[i]);
        engine_run_free(&now[i]);
    }
}

/* One that leaves while its drafts are being accepted: the others do not notice. */
static void test_a_request_that_leaves(void **state)
{
    int32_t prompt[6] = {5, 6, 7, 8, 9, 10};
    engine_run plain[2], now[2];
    oracle o = {plain, now, 2, 100, {1}};
    sp_engine_options options = options_of(256);
    sp_engine_stats stats = {.struct_bytes = sizeof stats};
    engine_run *list[2] = {&now[0], &now[1]};
    sp_engine *engine;

    (void)state;
    for (int32_t i = 0; i < 2; i++)
        plain[i] = now[i] = engine_run_init(names[i], prompt, 6, 32);
    engine = open_engine(&options);
    run_all(engine, plain, 2);
    sp_engine_close(engine);
    options.speculative = true;
    engine = open_engine(&options);
    sp_engine_set_draft_source(engine, (sp_draft_source){&o, foretell});
    for (int32_t i = 0; i < 2; i++)
        engine_run_submit(engine, &now[i]);
    for (int32_t i = 0; i < 3; i++)
        engine_run_step(engine, list, 2);
    assert_true(now[0].n_tokens > 10 && now[0].finish == SP_FINISH_NONE);
    assert_int_equal(sp_engine_cancel(engine, now[0].id, NULL), SP_OK);
    while (engine_run_step(engine, list, 2))
        continue;
    engine_run_assert_same(&plain[1], &now[1]);
    assert_memory_equal(plain[0].tokens, now[0].tokens, (size_t)now[0].n_tokens * sizeof(int32_t));
    sp_engine_get_stats(engine, &stats, NULL);
    assert_int_equal(stats.kv_pages_used, 0);
    assert_true(sp_sequence_memory_is_consistent(&engine->memory));
    sp_engine_close(engine);
    for (int32_t i = 0; i < 2; i++) {
        engine_run_free(&plain[i]);
        engine_run_free(&now[i]);
    }
}

/* ---- the soak ------------------------------------------------------------------------------- */

static uint64_t soak_seeds; /* 0 when the program is run as a quick test */

static void test_many_seeds(void **state)
{
    (void)state;
    for (uint64_t seed = 100; seed < 100 + soak_seeds; seed++) {
        const subject *used = subjects[seed / 3 % N_SUBJECTS];
        const subject *own = used == &hybrid_experts ? &dense : used; /* drafts have no experts */
        const char *drafters[] = {NULL, models[place_of(own)], stranger};
        const char *drafter = drafters[seed % 3];

        use_subject(used);
        check_random(seed, N_REQUESTS, drafter || seed % 7 == 0 ? -1 : (int32_t)(seed / 3 % 5) * 25,
                     seed % 4 == 0, drafter);
    }
}

#define TEST(name) cmocka_unit_test_setup(name, use_dense)

int main(int argc, char **argv)
{
    const struct CMUnitTest soak[] = {TEST(test_many_seeds)};
    const struct CMUnitTest tests[] = {
        TEST(test_a_thousand_requests_by_prompt_lookup),
        TEST(test_drafts_that_are_right_by_chance),
        TEST(test_a_pass_for_each_verifying_request),
        TEST(test_gated_delta_nets),
        TEST(test_gated_delta_nets_with_experts),
        TEST(test_a_draft_model),
        TEST(test_one_request_and_what_it_leaves),
        TEST(test_a_text_that_ends_inside_the_drafts),
        TEST(test_long_prompts_side_by_side),
        TEST(test_steps_that_are_timed),
        TEST(test_the_request_decides),
        TEST(test_keys_of_a_draft_that_are_not_finite),
        TEST(test_a_request_that_leaves),
    };

    if (argc > 1) {
        soak_seeds = strtoull(argv[1], NULL, 10);
        return cmocka_run_group_tests(soak, make_models, remove_models);
    }
    return cmocka_run_group_tests(tests, make_models, remove_models);
}
