/*
 * The thread that compiles what outputs have to be: a schema is compiled once for all that want it,
 * what does not compile ends its generation with the field's name, and one that was cancelled does
 * not run without its constraint.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "server/driver/compiler.h"
#include "support/engine_run.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

static sp_engine *engine;
static sp_lora_chats *chats;
static sp_driver *driver;
static sp_compiler *compiler;

static int open_all(void **state)
{
    sp_engine_options options;
    sp_driver_options with = {.in_flight_max = 8};
    sp_error error;

    (void)state;
    sp_engine_options_default(&options, sizeof options);
    options.model_dir = SP_TEST_DEMO "/base";
    options.threads = 1;
    options.kv_tokens = 1024;
    engine = engine_run_open(&options, NULL, 0);
    chats = sp_lora_chats_create("base");
    with.engine = engine;
    with.chats = chats;
    assert_ok(sp_driver_start(&with, &driver, &error), &error);
    assert_ok(sp_compiler_start(engine, driver, &compiler, &error), &error);
    return 0;
}

static int close_all(void **state)
{
    (void)state;
    sp_driver_stop(driver);
    sp_compiler_stop(compiler);
    sp_driver_destroy(driver);
    sp_lora_chats_destroy(chats);
    sp_engine_close(engine);
    sp_compiler_stop(NULL);
    return 0;
}

static sp_generation *create(const char *field, sp_constraint_kind kind, const char *text)
{
    static const int32_t prompt[] = {413, 781};
    engine_run run = engine_run_init(NULL, prompt, 2, 30);
    sp_generation *generation = sp_generation_create(2, NULL);

    assert_non_null(generation);
    generation->received_ns = sp_clock_ns();
    for (int i = 0; i < 2; i++) {
        generation->choices[i].request = run.request;
        generation->choices[i].request.temperature = 1;
        generation->choices[i].request.seed = (uint64_t)i;
    }
    generation->wanted = (sp_wanted_output){
        .field = field, .kind = kind, .text = sp_strdup(text), .bytes = strlen(text)};
    engine_run_free(&run);
    return generation;
}

static void wait_for(sp_generation *generation)
{
    const struct timespec pause = {0, 1000000};
    double until = sp_clock_seconds() + 120;

    while (!sp_task_is_done(&generation->task) && sp_clock_seconds() < until)
        nanosleep(&pause, NULL);
    assert_true(sp_task_is_done(&generation->task));
}

/* Runs it and asserts that both of its outputs are two of the digits 1 to 3. */
static sp_constraint *run_digits(void)
{
    sp_generation *generation = create("guided_regex", SP_CONSTRAINT_REGEX, "[1-3]{2}");
    sp_constraint *constraint;
    sp_text taken = {0}, texts[2] = {{0}};
    const sp_produced *produced;
    size_t cursor = 0;
    sp_error error;

    assert_ok(sp_compiler_generate(compiler, generation, &error), &error);
    wait_for(generation);
    assert_int_equal(generation->task.status, SP_OK);
    sp_generation_take(generation, &taken);
    while ((produced = sp_produced_next(&taken, &cursor)) != NULL)
        sp_text_add_bytes(&texts[produced->choice], sp_produced_text(produced),
                          produced->text_bytes);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(texts[i].bytes, 2);
        assert_int_equal(strspn(texts[i].data, "123"), 2);
        sp_text_free(&texts[i]);
    }
    sp_text_free(&taken);
    constraint = generation->constraint;
    assert_non_null(constraint);
    sp_task_release(&generation->task);
    return constraint;
}

static void test_cache(void **state)
{
    sp_constraint *first = run_digits();

    (void)state;
    for (int i = 0; i < 80; i++) { /* others push it out of the cache, which stays bounded */
        char pattern[32];
        sp_generation *other;
        sp_error error;

        if (i < 3)
            assert_ptr_equal(run_digits(), first); /* the same one */
        snprintf(pattern, sizeof pattern, "[a-c]{1}x{%d}", i + 1);
        other = create("guided_regex", SP_CONSTRAINT_REGEX, pattern);
        for (int c = 0; c < 2; c++)
            other->choices[c].request.max_tokens = 2;
        assert_ok(sp_compiler_generate(compiler, other, &error), &error);
        wait_for(other);
        assert_int_equal(other->task.status, SP_OK);
        sp_task_release(&other->task);
    }
    run_digits();
}

static void test_refused(void **state)
{
    sp_generation *generation =
        create("response_format", SP_CONSTRAINT_JSON_SCHEMA, "{\"items\": {\"not\": true}}");
    sp_error error;

    (void)state;
    assert_ok(sp_compiler_generate(compiler, generation, &error), &error);
    wait_for(generation);
    assert_int_equal(generation->task.status, SP_ERR_INPUT);
    assert_string_equal(generation->task.error.code, "grammar-unsupported");
    assert_string_equal(generation->task.error.subject, "response_format");
    assert_non_null(strstr(generation->task.error.text, "#/items/not"));
    sp_task_release(&generation->task);
}

static void test_cancelled(void **state)
{
    sp_generation *generation = create("guided_regex", SP_CONSTRAINT_REGEX, "[4-6]{2}");
    sp_error error;

    (void)state;
    sp_task_detach(&generation->task, true);
    assert_ok(sp_compiler_generate(compiler, generation, &error), &error);
    wait_for(generation);
    assert_int_not_equal(generation->task.status, SP_OK);
    assert_int_equal(generation->outbox.bytes, 0);
    sp_task_release(&generation->task);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cache),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_cancelled),
    };

    return cmocka_run_group_tests(tests, open_all, close_all);
}
