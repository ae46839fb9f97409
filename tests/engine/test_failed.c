/*
 * Requests that cannot go on: each is told so by an event of its own, also where several are
 * dropped in one step, and the others do not notice.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "support/engine_run.h"
#include "support/make_adapter.h"

#include <stdio.h>
#include <string.h>

enum { PROMPT = 5, NEW = 6, BAD = 3 };

typedef struct seen {
    int64_t bad[BAD];
    int32_t n_failed[BAD], n_other_events[BAD];
    int64_t good;
    int32_t tokens[NEW], n_tokens;
    sp_finish good_finish;
} seen;

static void on_event(void *user, const sp_request_event *event)
{
    seen *s = user;

    if (event->request == s->good) {
        assert_int_equal(s->good_finish, SP_FINISH_NONE);
        s->tokens[s->n_tokens++] = event->token;
        s->good_finish = event->finish;
        assert_null(event->error);
        return;
    }
    for (int i = 0; i < BAD; i++) {
        if (event->request != s->bad[i])
            continue;
        if (event->finish != SP_FINISH_FAILED) {
            s->n_other_events[i]++;
            continue;
        }
        s->n_failed[i]++;
        assert_int_equal(event->token, -1);
        assert_true(event->failure < 0);
        assert_non_null(event->error);
        assert_int_equal(event->error->position, s->bad[i]);
        assert_non_null(strstr(event->error->text, "dropped"));
        assert_string_equal(event->error->code, "adapter-non-finite");
        assert_string_equal(event->error->subject, "overflows");
    }
}

/* Its products are beyond FP32 for any x that is not zero. */
static char *make_overflowing_adapter(void)
{
    static const char path[] = "base_model.model.model.layers.0.self_attn.o_proj";
    make_adapter *adapter = make_adapter_create();
    char name[128];
    size_t bytes;
    uint16_t *b;
    char *folder;

    make_adapter_add_pair(adapter, path, 2, 128, 64, 7);
    (void)snprintf(name, sizeof name, "%s.lora_B.weight", path);
    b = make_adapter_data(adapter, name, &bytes);
    for (size_t i = 0; i < bytes / sizeof *b; i++)
        b[i] = 0x7f7f; /* the largest number of BF16 */
    folder = make_adapter_folder(adapter);
    make_adapter_destroy(adapter);
    return folder;
}

static int64_t submit(sp_engine *engine, const char *adapter, const int32_t *prompt)
{
    sp_request request;
    sp_error error;
    int64_t id = 0;

    sp_request_default(&request, sizeof request);
    request.adapter = adapter;
    request.lora_scale = adapter ? 16 : 1;
    request.tokens = prompt;
    request.n_tokens = PROMPT;
    request.max_tokens = NEW;
    request.ignore_eos = true;
    assert_ok(sp_engine_submit(engine, &request, &id, &error), &error);
    return id;
}

static sp_engine *open_engine(const char *folder)
{
    const sp_engine_adapter adapter = {sizeof(sp_engine_adapter), "overflows", folder};
    sp_engine_options options;

    sp_engine_options_default(&options, sizeof options);
    options.model_dir = SP_TEST_FIXTURES "/qwen3-tied";
    options.threads = 2;
    return engine_run_open(&options, &adapter, 1);
}

static void each_is_told_and_others_go_on(void **state)
{
    static const int32_t prompt[PROMPT] = {5, 6, 7, 8, 9};
    char *folder = make_overflowing_adapter();
    sp_engine *engine = open_engine(folder);
    engine_run alone;
    seen s = {.good = 0};
    sp_error error;
    sp_status status = SP_OK;

    (void)state;
    for (int i = 0; i < BAD; i++) {
        s.bad[i] = submit(engine, "overflows", prompt);
        if (i == 0)
            s.good = submit(engine, NULL, prompt);
    }
    while ((status = sp_engine_step(engine, on_event, &s, &error)) != SP_AGAIN)
        assert_ok(status, &error); /* the events told of them, so no step has failed */
    for (int i = 0; i < BAD; i++) {
        sp_digest digest;

        assert_int_equal(s.n_failed[i], 1);
        assert_int_equal(s.n_other_events[i], 0);
        assert_int_equal(sp_engine_request_adapter(engine, s.bad[i], NULL, &digest, NULL),
                         SP_ERR_NOT_FOUND);
    }
    assert_int_equal(s.n_tokens, NEW);
    assert_int_equal(s.good_finish, SP_FINISH_LENGTH);
    sp_engine_close(engine);

    alone = engine_run_alone(open_engine(folder), NULL, prompt, PROMPT, NEW, true);
    assert_memory_equal(alone.tokens, s.tokens, sizeof s.tokens);
    engine_run_free(&alone);
    sp_free(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(each_is_told_and_others_go_on)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
