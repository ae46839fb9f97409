/*
 * What crosses between the threads: tasks and their queue, and the outbox, which is bounded, keeps
 * the order, and loses nothing between a writer and a reader.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "server/driver/generation.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

static sp_generation *create(int32_t n_choices)
{
    sp_generation *generation = sp_generation_create(n_choices, "name");

    assert_non_null(generation);
    return generation;
}

static void test_records(void **state)
{
    sp_generation *generation = create(2);
    const sp_logprob top[2] = {{7, -0.5f}, {8, -1.5f}};
    const uint16_t routed[6] = {3, 65535, 0, 9, 1, 2};
    const char *text = "0123456789012345678901234567890123456789";
    const sp_produced *produced;
    sp_text taken = {0};
    size_t cursor = 0;

    (void)state;
    for (int32_t i = 0; i < 40; i++) {
        /* Texts of 0 to 39 bytes: no length may move the next record out of step. */
        const sp_produced added = {.choice = i % 2,
                                   .token = i,
                                   .text_bytes = (uint32_t)i,
                                   .routed_bytes = (uint32_t)(i % 7 * 2),
                                   .n_top = i % 3,
                                   .logprob = -1};

        assert_true(sp_generation_add(generation, &added, top, routed, text));
    }
    assert_false(sp_generation_take(generation, &taken));
    for (int32_t i = 0; i < 40; i++) {
        produced = sp_produced_next(&taken, &cursor);
        assert_non_null(produced);
        assert_int_equal(produced->token, i);
        assert_int_equal(produced->choice, i % 2);
        assert_int_equal(produced->n_top, i % 3);
        if (produced->n_top == 2)
            assert_int_equal(sp_produced_top(produced)[1].token, 8);
        assert_memory_equal(sp_produced_routed(produced), routed, (size_t)(i % 7 * 2));
        assert_memory_equal(sp_produced_text(produced), text, (size_t)i);
    }
    assert_null(sp_produced_next(&taken, &cursor));
    assert_false(sp_generation_take(generation, &taken));
    assert_int_equal(taken.bytes, 0);
    sp_task_finish(&generation->task, SP_OK, NULL);
    assert_true(sp_generation_take(generation, &taken));
    sp_text_free(&taken);
    sp_task_release(&generation->task);
}

static void test_bound(void **state)
{
    sp_generation *generation = create(1);
    const sp_produced added = {.token = 1, .text_bytes = 100};
    char text[100] = "";
    sp_text taken = {0};
    size_t n = 0, cursor = 0;

    (void)state;
    while (sp_generation_add(generation, &added, NULL, NULL, text)) {
        n++;
        assert_true(n < SP_OUTBOX_BYTES_MAX);
    }
    assert_true(generation->outbox.bytes <= SP_OUTBOX_BYTES_MAX);
    assert_true(n > SP_OUTBOX_BYTES_MAX / 200);
    sp_generation_take(generation, &taken);
    while (sp_produced_next(&taken, &cursor))
        n--;
    assert_int_equal(n, 0);
    assert_true(sp_generation_add(generation, &added, NULL, NULL, text));
    sp_text_free(&taken);
    sp_task_release(&generation->task);
}

/* The experts of a long answer come at once: they are no sign of a client that does not read, and
 * leave the bound of all else where it is. */
static void test_experts_are_not_bounded(void **state)
{
    sp_generation *generation = create(1);
    const sp_produced last = {.token = 2, .routed_bytes = 2 * SP_OUTBOX_BYTES_MAX};
    const sp_produced added = {.token = 1, .text_bytes = 100};
    uint16_t *routed = sp_calloc(1, last.routed_bytes);
    char text[100] = "";
    sp_text taken = {0};
    size_t alone = 0, beside = 0;

    (void)state;
    assert_non_null(routed);
    while (sp_generation_add(generation, &added, NULL, NULL, text))
        alone++;
    sp_generation_take(generation, &taken);
    assert_true(sp_generation_add(generation, &last, NULL, routed, NULL));
    while (sp_generation_add(generation, &added, NULL, NULL, text))
        beside++;
    assert_true(beside == alone || beside == alone - 1); /* its own record is in there */
    sp_generation_take(generation, &taken);
    beside = 0;
    while (sp_generation_add(generation, &added, NULL, NULL, text))
        beside++;
    assert_int_equal(beside, alone);
    sp_free(routed);
    sp_text_free(&taken);
    sp_task_release(&generation->task);
}

/* ---- two threads --------------------------------------------------------------------------- */

#define TOKENS 20000

static void *write_tokens(void *user)
{
    sp_generation *generation = user;

    for (int32_t i = 0; i < TOKENS;) {
        const sp_produced added = {.token = i, .text_bytes = (uint32_t)(i % 7)};

        i += sp_generation_add(generation, &added, NULL, NULL, "1234567");
    }
    sp_task_finish(&generation->task, SP_OK, NULL);
    return NULL;
}

static void test_nothing_is_lost(void **state)
{
    sp_generation *generation = create(1);
    sp_text taken = {0};
    int32_t expected = 0;
    bool done = false;
    pthread_t writer;

    (void)state;
    assert_int_equal(pthread_create(&writer, NULL, write_tokens, generation), 0);
    while (!done) {
        const sp_produced *produced;
        size_t cursor = 0;

        done = sp_generation_take(generation, &taken);
        while ((produced = sp_produced_next(&taken, &cursor)) != NULL)
            assert_int_equal(produced->token, expected++);
    }
    assert_int_equal(expected, TOKENS);
    pthread_join(writer, NULL);
    sp_text_free(&taken);
    sp_task_release(&generation->task);
}

/* ---- tasks --------------------------------------------------------------------------------- */

static void count_wake(void *user)
{
    (*(int *)user)++;
}

static void test_wakes(void **state)
{
    sp_generation *generation = create(1);
    int wakes = 0;
    sp_error error = {.status = SP_ERR_INPUT, .code = "x"};

    (void)state;
    sp_task_wake(&generation->task); /* nobody listens */
    sp_task_listen(&generation->task, count_wake, &wakes);
    sp_task_wake(&generation->task);
    assert_int_equal(wakes, 1);
    assert_false(sp_task_is_done(&generation->task));
    sp_task_finish(&generation->task, SP_ERR_INPUT, &error);
    assert_int_equal(wakes, 2);
    assert_true(sp_task_is_done(&generation->task));
    assert_string_equal(generation->task.error.code, "x");
    sp_task_detach(&generation->task, true);
    sp_task_wake(&generation->task);
    assert_int_equal(wakes, 2);
    assert_true(atomic_load(&generation->task.cancelled));
    sp_task_release(&generation->task);
}

static void test_queue(void **state)
{
    size_t bytes = sp_alloc_bytes();
    sp_generation *made[3] = {create(1), create(1), create(1)};
    sp_task_queue queue;
    sp_task *all;
    bool closed;

    (void)state;
    sp_task_queue_open(&queue);
    assert_null(sp_task_queue_take(&queue, 0, &closed));
    assert_false(closed);
    sp_task_queue_knock(&queue);
    assert_null(sp_task_queue_take(&queue, -1, &closed)); /* does not wait */
    for (int i = 0; i < 3; i++)
        assert_true(sp_task_queue_push(&queue, &made[i]->task));
    all = sp_task_queue_take(&queue, -1, &closed);
    for (int i = 0; i < 3; i++, all = all->next) {
        assert_ptr_equal(all, &made[i]->task);
        assert_int_equal(atomic_load(&all->references), 2);
    }
    assert_null(all);
    assert_true(sp_task_queue_push(&queue, &made[0]->task));
    sp_task_queue_close(&queue);
    assert_false(sp_task_queue_push(&queue, &made[1]->task));
    sp_task_queue_destroy(&queue); /* lets go of the one that nobody took */
    assert_int_equal(atomic_load(&made[0]->task.references), 2);
    for (int i = 0; i < 3; i++) {
        sp_task_release(&made[i]->task);
        sp_task_release(&made[i]->task);
    }
    assert_int_equal(sp_alloc_bytes(), bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_records),
        cmocka_unit_test(test_bound),
        cmocka_unit_test(test_experts_are_not_bounded),
        cmocka_unit_test(test_nothing_is_lost),
        cmocka_unit_test(test_wakes),
        cmocka_unit_test(test_queue),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
