/*
 * What ends a text, on the demo model, whose own end is <|endoftext|> alone: ids that the request
 * names, special tokens that its stop strings name, and none of them before min_tokens. A bias of
 * 100 makes the model want one id always.
 */
#include "support/engine_run.h"
#include "support/test.h"

#include "base/alloc.h"
#include "engine/sampling/ends.h"

#include <math.h>
#include <string.h>

/* The ids that the demo's tokenizer gives to its special tokens. */
enum { END_OF_TEXT = 2045, TURN_END = 2047 };

/* demo/golden/greedy.json: "The" is followed by these, which read "re are two ways". */
static const int32_t greedy[] = {263, 413, 781, 266, 707};

static const sp_logit_bias wants_turn_end = {TURN_END, 100}, wants_end = {END_OF_TEXT, 100};
static sp_engine *engine;
static int32_t *prompt;
static int32_t n_prompt;

static int open_engine(void **state)
{
    sp_engine_options options;
    sp_error error;

    (void)state;
    sp_engine_options_default(&options, sizeof options);
    options.model_dir = SP_TEST_DEMO "/base";
    options.precision = SP_DTYPE_F32;
    options.threads = 1;
    options.kv_tokens = 320;
    assert_ok(sp_engine_open(&options, NULL, 0, &engine, &error), &error);
    assert_ok(sp_engine_encode(engine, "The", 3, false, 0, &prompt, &n_prompt, &error), &error);
    return 0;
}

static int close_engine(void **state)
{
    (void)state;
    sp_engine_free(prompt);
    sp_engine_close(engine);
    return 0;
}

static engine_run start(const sp_logit_bias *bias)
{
    engine_run run = engine_run_init(NULL, prompt, n_prompt, 5);

    run.request.ignore_eos = true;
    run.request.logit_bias = bias;
    run.request.n_logit_bias = bias != NULL;
    return run;
}

/* Runs it to its end; frees all but what is asserted here. */
static void check(engine_run run, int32_t n_tokens, sp_finish finish, const char *text)
{
    engine_run *runs[] = {&run};

    engine_run_submit(engine, &run);
    engine_run_all(engine, runs, 1);
    assert_int_equal(run.n_tokens, n_tokens);
    assert_int_equal(run.finish, finish);
    assert_string_equal(run.text.data ? run.text.data : "", text);
    engine_run_free(&run);
}

static void test_named_ids(void **state)
{
    const int32_t ids[] = {TURN_END, 413};
    engine_run run = start(&wants_turn_end);

    (void)state;
    check(run, 5, SP_FINISH_LENGTH, "");
    run = start(&wants_turn_end);
    run.request.stop_tokens = ids;
    run.request.n_stop_tokens = 1;
    check(run, 1, SP_FINISH_STOP, "");
    /* An ordinary id ends it too, and its text is not shown. */
    run = start(NULL);
    run.request.stop_tokens = ids;
    run.request.n_stop_tokens = 2;
    check(run, 2, SP_FINISH_STOP, "re");
}

static void test_named_texts(void **state)
{
    const char *const texts[] = {"<|im_end|>", "never", "<|endoftext|>"};
    engine_run run = start(&wants_turn_end);

    (void)state;
    run.request.stop = texts;
    run.request.n_stop = 2;
    check(run, 1, SP_FINISH_STOP, "");
    /* The model's own end counts as named, though ignore_eos is on. */
    run = start(&wants_end);
    run.request.stop = texts + 1;
    run.request.n_stop = 2;
    check(run, 1, SP_FINISH_STOP, "");
    run = start(&wants_end);
    run.request.stop = texts;
    run.request.n_stop = 2;
    check(run, 5, SP_FINISH_LENGTH, "");
    run = start(&wants_end);
    run.request.ignore_eos = false;
    check(run, 1, SP_FINISH_STOP, "");
}

static void test_keep_special(void **state)
{
    const char *const texts[] = {"<|im_end|>"};
    engine_run run = start(&wants_turn_end);

    (void)state;
    run.request.keep_special = true;
    run.request.max_tokens = 2;
    check(run, 2, SP_FINISH_LENGTH, "<|im_end|><|im_end|>");
    run = start(&wants_turn_end);
    run.request.keep_special = true;
    run.request.stop = texts;
    run.request.n_stop = 1;
    check(run, 1, SP_FINISH_STOP, "");
}

static void test_min_tokens(void **state)
{
    const int32_t ids[] = {TURN_END};
    const char *const texts[] = {"re"};
    engine_run run = start(&wants_turn_end);
    engine_run *runs[] = {&run};

    (void)state;
    run.request.stop_tokens = ids;
    run.request.n_stop_tokens = 1;
    run.request.min_tokens = 3;
    engine_run_submit(engine, &run);
    engine_run_all(engine, runs, 1);
    assert_int_equal(run.n_tokens, 4);
    assert_memory_equal(run.tokens, greedy, 3 * sizeof *greedy);
    assert_int_equal(run.tokens[3], TURN_END);
    assert_int_equal(run.finish, SP_FINISH_STOP);
    engine_run_free(&run);
    /* Nor is a stop string found in the first ones. */
    run = start(NULL);
    run.request.stop = texts;
    run.request.n_stop = 1;
    check(run, 1, SP_FINISH_STOP, "");
    run = start(NULL);
    run.request.stop = texts;
    run.request.n_stop = 1;
    run.request.min_tokens = 2;
    check(run, 5, SP_FINISH_LENGTH, "re are two ways");
    /* An end that is as improbable as can be is no end when others are there. */
    run = start(&wants_end);
    run.request.ignore_eos = false;
    run.request.min_tokens = 5;
    check(run, 5, SP_FINISH_LENGTH, "re are two ways");
}

static void check_refused(engine_run run, const char *subject)
{
    sp_error error;
    int64_t id = 0;

    assert_int_equal(sp_engine_submit(engine, &run.request, &id, &error), SP_ERR_INPUT);
    assert_string_equal(error.subject, subject);
    assert_int_equal(id, 0);
    engine_run_free(&run);
}

static void test_refused(void **state)
{
    const int32_t foreign[] = {5, 2048}, negative[] = {-1};
    engine_run run = start(NULL);

    (void)state;
    run.request.stop_tokens = foreign;
    run.request.n_stop_tokens = 2;
    check_refused(run, "stop_token_ids");
    run = start(NULL);
    run.request.stop_tokens = negative;
    run.request.n_stop_tokens = 1;
    check_refused(run, "stop_token_ids");
    run = start(NULL);
    run.request.n_stop_tokens = SP_STOP_TOKENS_MAX + 1;
    run.request.stop_tokens = foreign;
    check_refused(run, "stop_token_ids");
    run = start(NULL);
    run.request.min_tokens = 6;
    check_refused(run, "min_tokens");
    run = start(NULL);
    run.request.min_tokens = -1;
    check_refused(run, "min_tokens");
}

static void test_list(void **state)
{
    const sp_model_shape shape = {.eos_token_ids = {3, 1}, .n_eos_token_ids = 2};
    const int32_t ids[] = {2};
    const sp_request request = {.stop_tokens = ids, .n_stop_tokens = 1};
    float logits[] = {0.5f, 1.5f, 2.5f, 3.5f, 4.5f};
    size_t bytes = sp_alloc_bytes();
    sp_ends ends;

    (void)state;
    sp_alloc_fail_after(0);
    assert_int_equal(sp_ends_create(&request, &shape, NULL, &ends), SP_ERR_MEMORY);
    sp_alloc_fail_after(-1);
    assert_int_equal(sp_ends_create(&request, &shape, NULL, &ends), SP_OK);
    assert_true(sp_ends_has(&ends, 1) && sp_ends_has(&ends, 2) && sp_ends_has(&ends, 3));
    assert_false(sp_ends_has(&ends, 0) || sp_ends_has(&ends, 4));
    sp_ends_forbid(&ends, logits);
    for (int32_t i = 1; i <= 3; i++)
        assert_true(isinf(logits[i]) && logits[i] < 0);
    assert_true(logits[0] > 0.4f && logits[4] > 4.4f);
    sp_ends_destroy(&ends);
    assert_int_equal(sp_alloc_bytes(), bytes);
}

static void test_special(void **state)
{
    (void)state;
    assert_true(sp_engine_token_is_special(engine, TURN_END));
    assert_true(sp_engine_token_is_special(engine, END_OF_TEXT));
    assert_false(sp_engine_token_is_special(engine, greedy[0]));
    assert_false(sp_engine_token_is_special(engine, -1));
    assert_false(sp_engine_token_is_special(engine, 1 << 30));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_named_ids),    cmocka_unit_test(test_named_texts),
        cmocka_unit_test(test_keep_special), cmocka_unit_test(test_min_tokens),
        cmocka_unit_test(test_refused),      cmocka_unit_test(test_list),
        cmocka_unit_test(test_special),
    };

    return cmocka_run_group_tests(tests, open_engine, close_engine);
}
