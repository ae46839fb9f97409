/*
 * Constrained requests on the demo model: what they say is in their grammar, and is what a search
 * through the unmasked logits says it must be; their neighbours keep their bits, and they keep
 * theirs in any batch and over a preemption.
 */
#include "support/engine_run.h"
#include "support/test.h"

#include "base/alloc.h"

#include <jansson.h>
#include <math.h>
#include <string.h>

enum { TURN_END = 2047, MAX_TOKENS = 60 };

static const char schema[] =
    "{\"type\": \"object\", \"properties\": {\"name\": {\"type\": \"string\", "
    "\"maxLength\": 12}, \"n\": {\"type\": \"integer\", \"minimum\": 0, "
    "\"maximum\": 99}, \"on\": {\"type\": \"boolean\"}}, \"required\": "
    "[\"name\", \"n\", \"on\"]}";

static sp_engine *engine;
static int32_t *prompt;
static int32_t n_prompt;

static sp_engine *open_with(int64_t kv_tokens)
{
    sp_engine_options options;

    sp_engine_options_default(&options, sizeof options);
    options.model_dir = SP_TEST_DEMO "/base";
    options.threads = 2;
    options.kv_tokens = kv_tokens;
    return engine_run_open(&options, NULL, 0);
}

static int open_engine(void **state)
{
    sp_error error;

    (void)state;
    engine = open_with(4096);
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

static sp_constraint *compile_for(const sp_engine *of, sp_constraint_kind kind, const char *text)
{
    sp_constraint_options options;
    sp_constraint *constraint = NULL;
    sp_error error;

    sp_constraint_options_default(&options, sizeof options);
    options.kind = kind;
    options.text = text;
    options.text_bytes = text ? strlen(text) : 0;
    assert_ok(sp_engine_compile(of, &options, &constraint, &error), &error);
    return constraint;
}

static sp_constraint *compile(sp_constraint_kind kind, const char *text)
{
    return compile_for(engine, kind, text);
}

static engine_run start(sp_constraint *constraint, double temperature, uint64_t seed)
{
    engine_run run = engine_run_init(NULL, prompt, n_prompt, MAX_TOKENS);

    run.request.constraint = constraint;
    run.request.temperature = temperature;
    run.request.seed = seed;
    return run;
}

static void run_one(engine_run *run)
{
    engine_run *runs[] = {run};

    engine_run_submit(engine, run);
    engine_run_all(engine, runs, 1);
}

/* ---- what they say ------------------------------------------------------------------------- */

static void check_object(const engine_run *run)
{
    json_error_t why;
    json_t *root = json_loadb(run->text.data, run->text.bytes, JSON_REJECT_DUPLICATES, &why), *n;

    if (!root)
        fail_msg("%s: %s", run->text.data, why.text);
    n = json_object_get(root, "n");
    assert_int_equal(json_object_size(root), 3);
    assert_true(json_is_string(json_object_get(root, "name")));
    assert_true(json_is_integer(n) && json_integer_value(n) >= 0 && json_integer_value(n) <= 99);
    assert_true(json_is_boolean(json_object_get(root, "on")));
    json_decref(root);
}

static void test_temperatures(void **state)
{
    static const double temperatures[] = {0, 0.5, 1, 2};
    sp_constraint *constraint = compile(SP_CONSTRAINT_JSON_SCHEMA, schema);

    (void)state;
    for (uint64_t i = 0; i < 24; i++) {
        engine_run run = start(constraint, temperatures[i % 4], i);

        /* The model's own end counts in every second one: it is chosen where the text is complete.
         */
        run.request.ignore_eos = i % 2;
        run_one(&run);
        assert_int_equal(run.finish, SP_FINISH_STOP);
        check_object(&run);
        engine_run_free(&run);
    }
    sp_constraint_release(constraint);
}

static void test_other_kinds(void **state)
{
    sp_constraint *choice = compile(SP_CONSTRAINT_CHOICE, "[\"yes\", \"no\", \"not yet\"]");
    sp_constraint *regex = compile(SP_CONSTRAINT_REGEX, "[0-9]{3}-[a-c]{2}");
    sp_constraint *object = compile(SP_CONSTRAINT_JSON_OBJECT, NULL);
    sp_constraint *rules = compile(SP_CONSTRAINT_GRAMMAR, "root ::= d{3} root?\nd ::= [0-9]");

    (void)state;
    for (uint64_t i = 0; i < 6; i++) {
        engine_run run = start(choice, 1.5, i);

        run_one(&run);
        assert_int_equal(run.finish, SP_FINISH_STOP);
        assert_true(strcmp(run.text.data, "yes") == 0 || strcmp(run.text.data, "no") == 0 ||
                    strcmp(run.text.data, "not yet") == 0);
        engine_run_free(&run);
        run = start(regex, 1.5, i);
        run_one(&run);
        assert_int_equal(run.text.bytes, 6);
        assert_int_equal(strspn(run.text.data, "0123456789"), 3);
        assert_int_equal(strspn(run.text.data + 4, "abc"), 2);
        engine_run_free(&run);
        run = start(rules, 1.5, i);
        run_one(&run);
        assert_int_equal(strspn(run.text.data, "0123456789"), run.text.bytes);
        assert_true(run.finish != SP_FINISH_STOP || run.text.bytes % 3 == 0);
        engine_run_free(&run);
        run = start(object, 0.7, i);
        run_one(&run);
        assert_int_equal(run.text.data[0], '{');
        if (run.finish == SP_FINISH_STOP)
            json_decref(json_loadb(run.text.data, run.text.bytes, 0, NULL));
        engine_run_free(&run);
    }
    sp_constraint_release(choice);
    sp_constraint_release(regex);
    sp_constraint_release(object);
    sp_constraint_release(rules);
}

/* Whether "yes", "no" or "not yet" begins with the bytes. */
static bool begins(const char *bytes, size_t n)
{
    return (n <= 3 && memcmp("yes", bytes, n) == 0) || (n <= 2 && memcmp("no", bytes, n) == 0) ||
           (n <= 7 && memcmp("not yet", bytes, n) == 0);
}

/* The best id among those whose bytes go on: found in the raw logits, token by token. */
static void test_best_of_the_allowed(void **state)
{
    sp_constraint *constraint = compile(SP_CONSTRAINT_CHOICE, "[\"yes\", \"no\", \"not yet\"]");
    engine_run run = start(constraint, 0, 0);
    char text[64];
    size_t n_text = 0;

    (void)state;
    run.keep_logits = true;
    run.request.logits_from = n_prompt - 1;
    run.request.logprobs = true;
    run.request.top_logprobs = 3;
    run_one(&run);
    for (int32_t i = 0; i < run.n_tokens; i++) {
        const float *row = run.logits + (size_t)i * (size_t)run.vocab;
        double sum = 0, most = -INFINITY;
        int32_t best = -1;

        for (int32_t id = 0; id < run.vocab; id++) {
            size_t bytes;
            const char *data = sp_engine_token_bytes(engine, id, &bytes);

            most = (double)row[id] > most ? (double)row[id] : most;
            if (bytes == 0 || n_text + bytes > 7 || sp_engine_token_is_special(engine, id))
                continue;
            memcpy(text + n_text, data, bytes);
            if (begins(text, n_text + bytes) && (best < 0 || row[id] > row[best]))
                best = id;
        }
        assert_int_equal(run.tokens[i], best);
        {
            size_t bytes;
            const char *data = sp_engine_token_bytes(engine, best, &bytes);

            memcpy(text + n_text, data, bytes);
            n_text += bytes;
        }
        /* Logprobs are those of the row without its mask. */
        for (int32_t id = 0; id < run.vocab; id++)
            sum += exp((double)row[id] - most);
        assert_true(fabs((double)run.scores[i].logprob - ((double)row[best] - most - log(sum))) <
                    1e-4);
        assert_true(run.scores[i].top[0].logprob >= run.scores[i].logprob);
    }
    engine_run_free(&run);
    sp_constraint_release(constraint);
}

/* ---- with the other fields ------------------------------------------------------------------- */

static void test_other_fields(void **state)
{
    static const char *const stops[] = {"\"n\"", "<|im_end|>"};
    const int32_t ends[] = {TURN_END};
    const sp_logit_bias bias = {TURN_END, 100};
    sp_constraint *constraint = compile(SP_CONSTRAINT_JSON_SCHEMA, schema);
    sp_constraint *digits = compile(SP_CONSTRAINT_REGEX, "[0-9]+");
    engine_run run = start(constraint, 1, 3);

    (void)state;
    run.request.repetition_penalty = 1.7;
    run.request.presence_penalty = 2;
    run.request.min_tokens = 50; /* an output that is over ends before them */
    run.request.stop_tokens = ends;
    run.request.n_stop_tokens = 1;
    run.request.logit_bias = &bias; /* the end is wanted always, and taken where it may be */
    run.request.n_logit_bias = 1;
    run_one(&run);
    assert_int_equal(run.finish, SP_FINISH_STOP);
    check_object(&run);
    engine_run_free(&run);

    run = start(constraint, 1, 3); /* a stop text cuts it short */
    run.request.stop = stops;
    run.request.n_stop = 2;
    run_one(&run);
    assert_int_equal(run.finish, SP_FINISH_STOP);
    assert_null(strstr(run.text.data, "\"n\""));
    assert_non_null(strstr(run.text.data, "\"name\""));
    engine_run_free(&run);

    run = start(digits, 1, 4); /* complete after each digit; the end is wanted from the first on */
    run.request.stop_tokens = ends;
    run.request.n_stop_tokens = 1;
    run.request.logit_bias = &bias;
    run.request.n_logit_bias = 1;
    run.request.min_tokens = 3;
    run_one(&run);
    assert_int_equal(run.n_tokens, 4);
    assert_int_equal(run.tokens[3], TURN_END);
    assert_int_equal(strspn(run.text.data, "0123456789"), run.text.bytes);
    engine_run_free(&run);

    run = start(digits, 1, 4);
    run_one(&run); /* ignore_eos: it goes on to max_tokens */
    assert_int_equal(run.finish, SP_FINISH_LENGTH);
    assert_int_equal(strspn(run.text.data, "0123456789"), run.text.bytes);
    engine_run_free(&run);
    sp_constraint_release(digits);
    sp_constraint_release(constraint);
}

/* ---- batches ------------------------------------------------------------------------------- */

/* Constrained and plain rows together, and each alone: the same tokens, text and logits. */
static void test_bits(void **state)
{
    sp_constraint *constraint = compile(SP_CONSTRAINT_JSON_SCHEMA, schema);
    sp_engine *tight = open_with(160); /* where they preempt each other */
    sp_constraint *other = compile_for(tight, SP_CONSTRAINT_JSON_SCHEMA, schema);
    engine_run alone[6], together[6], preempted[6], *list[6], *tight_list[6];
    sp_engine_stats stats = {.struct_bytes = sizeof stats};

    (void)state;
    for (uint64_t i = 0; i < 6; i++) {
        alone[i] = start(i % 2 ? constraint : NULL, i < 3 ? 0 : 1, i);
        together[i] = start(i % 2 ? constraint : NULL, i < 3 ? 0 : 1, i);
        preempted[i] = start(i % 2 ? other : NULL, i < 3 ? 0 : 1, i);
        alone[i].keep_logits = together[i].keep_logits = preempted[i].keep_logits = true;
        run_one(&alone[i]);
        list[i] = &together[i];
        tight_list[i] = &preempted[i];
    }
    for (int i = 0; i < 6; i++) {
        engine_run_submit(engine, list[i]);
        engine_run_submit(tight, tight_list[i]);
    }
    engine_run_all(engine, list, 6);
    engine_run_all(tight, tight_list, 6);
    assert_ok(sp_engine_get_stats(tight, &stats, NULL), NULL);
    assert_true(stats.preemptions > 0);
    for (int i = 0; i < 6; i++) {
        engine_run_assert_same(&alone[i], &together[i]);
        engine_run_assert_same(&alone[i], &preempted[i]);
        if (i % 2)
            check_object(&alone[i]);
        engine_run_free(&alone[i]);
        engine_run_free(&together[i]);
        engine_run_free(&preempted[i]);
    }
    sp_constraint_release(other);
    sp_constraint_release(constraint);
    sp_engine_close(tight);
}

/* ---- refusals ------------------------------------------------------------------------------ */

static void test_refused(void **state)
{
    sp_engine *second = open_with(320);
    sp_constraint *foreign = compile_for(second, SP_CONSTRAINT_JSON_OBJECT, NULL), *none = NULL;
    engine_run run = start(foreign, 0, 0);
    sp_constraint_options options;
    sp_error error;
    int64_t id;

    (void)state;
    assert_int_equal(sp_engine_submit(engine, &run.request, &id, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "constraint");
    sp_constraint_release(foreign);
    sp_engine_close(second);
    sp_constraint_options_default(&options, sizeof options);
    options.kind = SP_CONSTRAINT_JSON_SCHEMA;
    options.text = "{\"type\": \"array\", \"contains\": {}}";
    options.text_bytes = strlen(options.text);
    assert_int_equal(sp_engine_compile(engine, &options, &none, &error), SP_ERR_INPUT);
    assert_string_equal(error.code, "grammar-unsupported");
    assert_string_equal(error.subject, "#/contains");
    options.kind = (sp_constraint_kind)6;
    assert_int_equal(sp_engine_compile(engine, &options, &none, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "kind");
    options.kind = SP_CONSTRAINT_REGEX;
    options.thought = (sp_constraint_thought)3;
    assert_int_equal(sp_engine_compile(engine, &options, &none, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "thought");
    options.thought = SP_CONSTRAINT_NO_THOUGHT;
    options.text = NULL;
    assert_int_equal(sp_engine_compile(engine, &options, &none, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "text");
    assert_null(none);
    assert_int_equal(sp_constraint_bytes(NULL), 0);
    engine_run_free(&run);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_temperatures),
        cmocka_unit_test(test_other_kinds),
        cmocka_unit_test(test_best_of_the_allowed),
        cmocka_unit_test(test_other_fields),
        cmocka_unit_test(test_bits),
        cmocka_unit_test(test_refused),
    };

    return cmocka_run_group_tests(tests, open_engine, close_engine);
}
