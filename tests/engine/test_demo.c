/*
 * The demo model: greedy text in f32 against transformers and PEFT (demo/golden), for the base and
 * the three adapters, all in one batch; text, stop strings and end-of-text through the engine.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "support/engine_run.h"
#include "support/golden.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define N_MODELS       4
#define PROMPTS_MAX    8
#define GREEDY_TOKENS  80
#define LOGIT_ERROR    1e-3
#define MARGIN_ALLOWED (2 * LOGIT_ERROR)

static const char *const models[N_MODELS] = {"base", "scripture", "csource", "sqldoc"};

static sp_engine *open_demo(sp_dtype precision)
{
    static const sp_engine_adapter adapters[] = {
        {sizeof(sp_engine_adapter), "scripture", SP_TEST_DEMO "/adapters/scripture"},
        {sizeof(sp_engine_adapter), "csource", SP_TEST_DEMO "/adapters/csource"},
        {sizeof(sp_engine_adapter), "sqldoc", SP_TEST_DEMO "/adapters/sqldoc"},
    };
    sp_engine_options options;

    sp_engine_options_default(&options, sizeof options);
    options.model_dir = SP_TEST_DEMO "/base";
    options.precision = precision;
    options.threads = 2;
    options.kv_tokens = 16384;
    return engine_run_open(&options, adapters, 3);
}

/* ---- greedy text --------------------------------------------------------------------------- */

typedef struct demo_case {
    const json_t *golden;
    int32_t *prompt;
    engine_run run;
} demo_case;

static double margin_of(const float *logits, int32_t vocab)
{
    float best = -INFINITY, second = -INFINITY;

    for (int32_t v = 0; v < vocab; v++) {
        if (logits[v] > best) {
            second = best;
            best = logits[v];
        } else if (logits[v] > second) {
            second = logits[v];
        }
    }
    return (double)best - (double)second;
}

/* The number of new tokens before the first near tie. */
static int32_t comparable_tokens(const engine_run *run)
{
    for (int32_t i = 0; i < run->n_tokens; i++) {
        int32_t row = run->request.n_tokens - 1 + i;

        if (margin_of(run->logits + (size_t)row * (size_t)run->vocab, run->vocab) <= MARGIN_ALLOWED)
            return i;
    }
    return run->n_tokens;
}

static int32_t *read_ids(const json_t *array, int32_t *out_n)
{
    int32_t n = (int32_t)json_array_size(array);
    int32_t *ids = sp_calloc((size_t)n, sizeof *ids);

    for (int32_t i = 0; i < n; i++)
        ids[i] = (int32_t)json_integer_value(json_array_get(array, (size_t)i));
    *out_n = n;
    return ids;
}

static void check_prompt_logits(const demo_case *c, const golden *file, const char *model, size_t p)
{
    const golden_tensor *expected = golden_get(file, "%s.p%zu.last_logits", model, p);
    const float *last = c->run.logits + (int64_t)(c->run.request.n_tokens - 1) * c->run.vocab;
    char prefix[64];

    assert_int_equal(expected->n, c->run.vocab);
    for (int64_t i = 0; i < expected->n; i++) {
        double error = fabs((double)last[i] - golden_value(expected, i));

        if (!(error <= LOGIT_ERROR))
            fail_msg("%s, prompt %zu: a logit is off by %g", model, p, error);
    }
    snprintf(prefix, sizeof prefix, "%s.p%zu.", model, p);
    golden_check_sums(file, prefix, c->run.logits, c->run.request.n_tokens, c->run.vocab,
                      LOGIT_ERROR);
}

/* Checks the new ids, and the text where all of them could be compared. */
static int32_t check_greedy(const demo_case *c)
{
    const json_t *ids = json_object_get(c->golden, "new_ids");
    const char *text = json_string_value(json_object_get(c->golden, "text"));
    int32_t n = comparable_tokens(&c->run);

    assert_int_equal(json_array_size(ids), GREEDY_TOKENS);
    for (int32_t i = 0; i < n; i++)
        assert_int_equal(c->run.tokens[i], json_integer_value(json_array_get(ids, (size_t)i)));
    if (n == GREEDY_TOKENS) {
        assert_int_equal(c->run.text.bytes, strlen(text));
        assert_memory_equal(c->run.text.data, text, strlen(text));
    }
    return n;
}

static void test_greedy_text(void **state)
{
    json_t *root = json_load_file(SP_TEST_DEMO "/golden/greedy.json", 0, NULL);
    golden *file = golden_open(SP_TEST_DEMO "/golden/prompt_logits.safetensors");
    sp_engine *engine = open_demo(SP_DTYPE_F32);
    demo_case demo_cases[N_MODELS][PROMPTS_MAX];
    engine_run *list[N_MODELS * PROMPTS_MAX];
    size_t n = 0, n_prompts = 0;
    int32_t compared = 0;

    (void)state;
    assert_non_null(root);
    for (size_t m = 0; m < N_MODELS; m++) {
        const json_t *prompts = json_object_get(json_object_get(root, "models"), models[m]);

        n_prompts = json_array_size(prompts);
        assert_in_range(n_prompts, 1, PROMPTS_MAX);
        for (size_t p = 0; p < n_prompts; p++) {
            demo_case *c = &demo_cases[m][p];
            int32_t n_ids;

            c->golden = json_array_get(prompts, p);
            c->prompt = read_ids(json_object_get(c->golden, "prompt_ids"), &n_ids);
            c->run = engine_run_init(m ? models[m] : NULL, c->prompt, n_ids, GREEDY_TOKENS);
            c->run.keep_logits = true;
            engine_run_submit(engine, &c->run);
            list[n++] = &c->run;
        }
    }
    engine_run_all(engine, list, n);
    for (size_t m = 0; m < N_MODELS; m++) {
        for (size_t p = 0; p < n_prompts; p++) {
            check_prompt_logits(&demo_cases[m][p], file, models[m], p);
            compared += check_greedy(&demo_cases[m][p]);
            engine_run_free(&demo_cases[m][p].run);
            sp_free(demo_cases[m][p].prompt);
        }
    }
    print_message("%d of %zu greedy tokens compared\n", compared, n * GREEDY_TOKENS);
    assert_true(compared > (int32_t)n * GREEDY_TOKENS * 9 / 10);
    sp_engine_close(engine);
    golden_close(file);
    json_decref(root);
}

/* ---- ends ---------------------------------------------------------------------------------- */

static engine_run run_text(const char *adapter, const char *prompt, int32_t max_tokens,
                           const char *const *stop, int32_t n_stop, bool ignore_eos)
{
    sp_engine *engine = open_demo(SP_DTYPE_F32);
    int32_t *tokens = NULL, n_tokens = 0;
    engine_run run;
    engine_run *list[1] = {&run};
    sp_error error;

    assert_ok(
        sp_engine_encode(engine, prompt, strlen(prompt), false, 0, &tokens, &n_tokens, &error),
        &error);
    run = engine_run_init(adapter, tokens, n_tokens, max_tokens);
    run.request.stop = stop;
    run.request.n_stop = n_stop;
    run.request.ignore_eos = ignore_eos;
    engine_run_submit(engine, &run);
    engine_run_all(engine, list, 1);
    sp_engine_free(tokens);
    sp_engine_close(engine);
    return run;
}

/* The golden greedy text of "The" begins "re are two ways to do this, and". */
static void test_stop_strings(void **state)
{
    static const char *const stop[] = {"ways to", "never there"};
    engine_run run = run_text(NULL, "The", 40, stop, 2, true);
    engine_run plain = run_text(NULL, "The", 40, NULL, 0, true);

    (void)state;
    assert_int_equal(run.finish, SP_FINISH_STOP);
    assert_int_equal(run.text.bytes, strlen("re are two "));
    assert_memory_equal(run.text.data, "re are two ", run.text.bytes);
    assert_true(run.n_tokens < plain.n_tokens);
    assert_memory_equal(run.tokens, plain.tokens, (size_t)run.n_tokens * sizeof(int32_t));
    assert_int_equal(plain.finish, SP_FINISH_LENGTH);
    engine_run_free(&run);
    engine_run_free(&plain);
}

/* What was held back because it could begin a stop string is let go at the end. */
static void test_held_back_text_is_let_go(void **state)
{
    static const char *const stop[] = {"are two cats"};
    engine_run run = run_text(NULL, "The", 3, stop, 1, true);
    engine_run plain = run_text(NULL, "The", 3, NULL, 0, true);

    (void)state;
    assert_int_equal(run.finish, SP_FINISH_LENGTH);
    assert_int_equal(run.text.bytes, plain.text.bytes);
    assert_memory_equal(run.text.data, plain.text.data, plain.text.bytes);
    engine_run_free(&run);
    engine_run_free(&plain);
}

/* "all-linear" names modules of every family; the pool holds those that this base has. */
static void test_modules_that_the_base_has(void **state)
{
    const sp_engine_adapter adapter = {sizeof(sp_engine_adapter), "csource",
                                       SP_TEST_DEMO "/adapters/csource"};
    sp_engine_options options;
    sp_engine *engine = NULL;
    sp_error error;

    (void)state;
    sp_engine_options_default(&options, sizeof options);
    options.model_dir = SP_TEST_DEMO "/base";
    options.lora_modules = "all-linear";
    assert_ok(sp_engine_open(&options, &adapter, 1, &engine, &error), &error);
    sp_engine_close(engine);
    options.lora_modules = "mlp.gate";
    assert_int_equal(sp_engine_open(&options, &adapter, 1, &engine, &error), SP_ERR_ARGUMENT);
    assert_non_null(strstr(error.text, "lora-modules"));
    options.lora_modules = "no_such_module";
    assert_int_equal(sp_engine_open(&options, &adapter, 1, &engine, &error), SP_ERR_INPUT);
    assert_non_null(strstr(error.text, "no_such_module"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_greedy_text),
        cmocka_unit_test(test_stop_strings),
        cmocka_unit_test(test_held_back_text_is_let_go),
        cmocka_unit_test(test_modules_that_the_base_has),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
