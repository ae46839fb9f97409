/*
 * The tokens that templates close an answer with, by hand: what stands behind text, behind calls,
 * and templates that close nothing, or cannot be asked.
 */
#include "support/engine_run.h"
#include "support/test.h"

#include "base/alloc.h"
#include "chat/chat.h"

#include <string.h>

/* The ids that the demo's tokenizer gives to its special tokens. */
enum { END_OF_TEXT = 2045, TURN_BEGIN = 2046, TURN_END = 2047 };

#define TURNS(text)                                                                          \
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" text "\n{% endfor %}" \
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

static sp_engine *engine;
static char *directory;

static int open_engine(void **state)
{
    sp_engine_options options;

    (void)state;
    sp_engine_options_default(&options, sizeof options);
    options.model_dir = SP_TEST_DEMO "/base";
    options.threads = 1;
    options.kv_tokens = 64;
    engine = engine_run_open(&options, NULL, 0);
    directory = sp_test_make_directory();
    return 0;
}

static int close_engine(void **state)
{
    (void)state;
    sp_test_remove_tree(directory);
    sp_free(directory);
    sp_engine_close(engine);
    return 0;
}

static sp_chat *open_chat(const char *template, const sp_engine *with)
{
    sp_chat *chat = NULL;
    sp_error error;

    sp_test_write_file(directory, "chat_template.jinja", template, strlen(template));
    assert_ok(sp_chat_open(directory, NULL, with, &chat, &error), &error);
    return chat;
}

/* `wanted`: one id, or -1 for none. */
static void check(const char *template, int32_t wanted)
{
    sp_chat *chat = open_chat(template, engine);
    int32_t n;
    const int32_t *ends = sp_chat_turn_ends(chat, &n);

    assert_int_equal(n, wanted >= 0);
    if (n > 0)
        assert_int_equal(ends[0], wanted);
    sp_chat_close(chat);
}

static void test_text(void **state)
{
    (void)state;
    check(TURNS("<|im_end|>"), TURN_END);
    check(TURNS(" \n<|im_end|>"), TURN_END);
    check(TURNS("<|im_end|><|endoftext|>"), TURN_END); /* the model writes the first */
    check(TURNS("{{ eos_token }}"), -1);               /* nothing names it */
    check(TURNS(""), -1);
    check(TURNS(" END <|im_end|>"), -1); /* a word is what ends it */
    check(TURNS("</s>"), -1);            /* no token of this tokenizer */
    check("{% for m in messages %}{{ m.content|trim }}<|endoftext|>{% endfor %}", END_OF_TEXT);
}

/* What is put in front of the next turn is not how this one ends. */
static void test_between_turns(void **state)
{
    (void)state;
    check("{% for m in messages %}{% if not loop.first %}<|im_end|>{% endif %}{{ m.content }}"
          "{% endfor %}",
          -1);
}

static void test_refusing(void **state)
{
    (void)state;
    check("{% for m in messages %}{% if m.role == 'assistant' %}{{ raise_exception('no') }}"
          "{% endif %}{{ m.content }}<|im_end|>{% endfor %}",
          -1);
    check("<|im_end|>", -1); /* shows no message */
}

static void test_calls(void **state)
{
    sp_chat *chat = open_chat(
        "{% for m in messages %}{% if m.tool_calls %}<tool_call>{{ m.tool_calls[0].function.name }}"
        "{}</tool_call><|im_start|><|endoftext|>\n{% else %}{{ m.content }}<|im_end|>\n"
        "{% endif %}{% endfor %}",
        engine);
    int32_t n;
    const int32_t *ends = sp_chat_turn_ends(chat, &n);

    (void)state;
    assert_int_equal(n, 2);
    assert_int_equal(ends[0], TURN_END);
    assert_int_equal(ends[1], END_OF_TEXT);
    sp_chat_close(chat);
}

static void test_built_in(void **state)
{
    sp_chat *chat = NULL;
    sp_error error;
    int32_t n;

    (void)state;
    assert_ok(sp_chat_open(SP_TEST_DEMO "/base", NULL, engine, &chat, &error), &error);
    assert_int_equal(sp_chat_turn_ends(chat, &n)[0], TURN_END);
    assert_int_equal(n, 1);
    sp_chat_close(chat);
    chat = open_chat(TURNS("<|im_end|>"), NULL);
    sp_chat_turn_ends(chat, &n);
    assert_int_equal(n, 0);
    sp_chat_close(chat);
}

static void test_no_memory(void **state)
{
    sp_status status = SP_ERR_MEMORY;

    (void)state;
    sp_chat_close(open_chat(TURNS("<|im_end|>"), engine));
    for (int64_t n = 0; status == SP_ERR_MEMORY; n++) {
        size_t blocks = sp_alloc_blocks();
        sp_chat *chat = NULL;
        sp_error error;
        int32_t n_ends = 0;

        sp_alloc_fail_after(n);
        status = sp_chat_open(directory, NULL, engine, &chat, &error);
        sp_alloc_fail_after(-1);
        assert_true(status == SP_OK || status == SP_ERR_MEMORY);
        if (status == SP_OK)
            sp_chat_turn_ends(chat, &n_ends);
        assert_int_equal(n_ends, status == SP_OK);
        sp_chat_close(chat);
        assert_int_equal(sp_alloc_blocks(), blocks);
        assert_true(n < 2000);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_text),     cmocka_unit_test(test_between_turns),
        cmocka_unit_test(test_refusing), cmocka_unit_test(test_calls),
        cmocka_unit_test(test_built_in), cmocka_unit_test(test_no_memory),
    };

    return cmocka_run_group_tests(tests, open_engine, close_engine);
}
