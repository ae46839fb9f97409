/*
 * The JSON around the choices of an answer: events of a stream with and without usage, members that
 * come once, lists of ids, reasons to finish.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "server/api/reply.h"

#include <string.h>

static void add_seven(sp_reply *reply)
{
    sp_text_add(&reply->out, ", \"seven\": 7");
}

static const sp_reply_form plain_form;
static const sp_reply_form form_with_members = {.add_members = add_seven};

/* A stream whose objects begin with {"choices": [ and that has come so far. */
static sp_reply create(const sp_reply_form *form)
{
    sp_reply reply = {.form = form,
                      .stream = true,
                      .prompt_tokens = 5,
                      .generated_tokens = 3,
                      .cached_tokens = 4};

    sp_text_add(&reply.head, "{\"choices\": [");
    return reply;
}

/* One event with the choice 1; its JSON is valid. */
static void check_event(sp_reply *reply, const char *want)
{
    json_t *root;

    sp_text_clear(&reply->out);
    sp_reply_event_begin(reply);
    sp_text_add(&reply->out, "1");
    sp_reply_event_end(reply);
    assert_memory_equal(reply->out.data, "data: ", 6);
    assert_string_equal(reply->out.data + reply->out.bytes - 2, "\n\n");
    root = json_loadb(reply->out.data + 6, reply->out.bytes - 8, JSON_REJECT_DUPLICATES, NULL);
    assert_non_null(root);
    json_decref(root);
    assert_string_equal(reply->out.data + 6, want);
}

static void test_events(void **state)
{
    sp_reply reply = create(&plain_form);

    (void)state;
    check_event(&reply, "{\"choices\": [1]}\n\n");
    reply.include_usage = true; /* it comes in an event of its own, and is null until then */
    check_event(&reply, "{\"choices\": [1], \"usage\": null}\n\n");
    reply.usage_each = true;
    check_event(&reply, "{\"choices\": [1], \"usage\": {\"prompt_tokens\": 5, "
                        "\"completion_tokens\": 3, \"total_tokens\": 8, "
                        "\"prompt_tokens_details\": {\"cached_tokens\": 4}}}\n\n");
    reply.drafted_tokens = 9;
    reply.accepted_tokens = 7;
    reply.verify_steps = 3;
    check_event(&reply, "{\"choices\": [1], \"usage\": {\"prompt_tokens\": 5, "
                        "\"completion_tokens\": 3, \"total_tokens\": 8, "
                        "\"prompt_tokens_details\": {\"cached_tokens\": 4}, "
                        "\"completion_tokens_details\": {\"accepted_prediction_tokens\": 7, "
                        "\"rejected_prediction_tokens\": 2, \"verify_steps\": 3}}}\n\n");
    sp_reply_free_parts(&reply);
}

static void test_members_come_once(void **state)
{
    sp_reply reply = create(&form_with_members);

    (void)state;
    check_event(&reply, "{\"choices\": [1], \"seven\": 7}\n\n");
    check_event(&reply, "{\"choices\": [1]}\n\n");
    sp_reply_free_parts(&reply);
}

static void test_ids(void **state)
{
    static const int32_t tokens[] = {0, 7, INT32_MAX};
    sp_text out = {0};

    (void)state;
    sp_reply_add_ids(&out, "none", tokens, 0);
    sp_reply_add_ids(&out, "ids", tokens, 3);
    assert_string_equal(out.data, ", \"none\": [], \"ids\": [0, 7, 2147483647]");
    sp_text_free(&out);
}

static void test_finish(void **state)
{
    (void)state;
    assert_string_equal(sp_finish_json(SP_FINISH_STOP), "\"stop\"");
    assert_string_equal(sp_finish_json(SP_FINISH_LENGTH), "\"length\"");
    assert_string_equal(sp_finish_json(SP_FINISH_NONE), "null");
    assert_string_equal(sp_finish_json(SP_FINISH_FAILED), "null");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_events),
        cmocka_unit_test(test_members_come_once),
        cmocka_unit_test(test_ids),
        cmocka_unit_test(test_finish),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
