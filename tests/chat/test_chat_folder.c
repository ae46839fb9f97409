/* The template of an adapter's folder: where it is found, whose tokens it writes, and which tokens
 * it may not write, because only the adapter's tokenizer has them. */
#include "support/engine_run.h"
#include "support/test.h"

#include "base/alloc.h"
#include "base/json.h"
#include "chat/chat.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

static sp_engine *engine; /* the demo's: <|endoftext|> 2045, <|im_start|> 2046, <|im_end|> 2047 */
static char *directory;

static int set_up(void **state)
{
    (void)state;
    directory = sp_test_make_directory();
    return directory ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    sp_test_remove_tree(directory);
    sp_free(directory);
    return 0;
}

static void write_text(const char *name, const char *text)
{
    sp_test_write_file(directory, name, text, strlen(text));
}

static sp_status open_folder(const json_t *base, sp_chat **out_chat, sp_error *error)
{
    sp_chat_folder folder;
    sp_status status = sp_chat_folder_read(directory, &folder, error);

    *out_chat = NULL;
    if (status == SP_OK)
        status = sp_chat_open_folder(&folder, base, engine, out_chat, error);
    sp_chat_folder_free(&folder);
    return status;
}

/* What it renders of one message "x", with a base whose bos_token is <|im_start|>. */
static void check_text(const char *want, bool with_tools)
{
    json_t *base = json_loads("{\"bos_token\":\"<|im_start|>\",\"eos_token\":\"E\"}", 0, NULL);
    json_t *messages = json_loads("[{\"role\":\"user\",\"content\":\"x\"}]", 0, NULL);
    json_t *tools = json_loads("[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}]", 0, NULL);
    sp_chat_request request;
    sp_chat_prompt prompt = {0};
    sp_chat *chat;
    sp_error error;

    sp_chat_request_default(&request);
    request.messages = messages;
    request.tools = with_tools ? tools : NULL;
    assert_ok(open_folder(base, &chat, &error), &error);
    assert_non_null(chat);
    assert_ok(sp_chat_render(chat, &request, &prompt, &error), &error);
    assert_string_equal(prompt.text.data, want);
    sp_chat_prompt_free(&prompt);
    sp_chat_close(chat);
    json_decref(tools);
    json_decref(messages);
    json_decref(base);
}

static void check_refused(const char *code, const char *part)
{
    sp_chat *chat;
    sp_error error = {.code = ""};

    assert_true(open_folder(NULL, &chat, &error) < 0);
    assert_null(chat);
    assert_string_equal(error.code, code);
    assert_non_null(strstr(error.text, part));
}

static void test_nothing(void **state)
{
    sp_chat *chat;
    sp_error error;

    (void)state;
    assert_ok(open_folder(NULL, &chat, &error), &error);
    assert_null(chat); /* unlike a base, which may have the built-in form */
    write_text("tokenizer_config.json", "{\"eos_token\":\"E\",\"chat_template\":null}");
    assert_ok(open_folder(NULL, &chat, &error), &error);
    assert_null(chat);
}

static void test_places(void **state)
{
    char tools[4096];

    (void)state;
    write_text("tokenizer_config.json",
               "{\"chat_template\":[{\"name\":\"tool_use\",\"template\":\"two\"},"
               "{\"name\":\"default\",\"template\":\"one\"}]}");
    check_text("one", false);
    check_text("two", true);
    write_text("chat_template.jinja", "three");
    check_text("three", false);
    check_text("three", true);
    snprintf(tools, sizeof tools, "%s/additional_chat_templates", directory);
    assert_int_equal(mkdir(tools, 0755), 0);
    sp_test_write_file(tools, "tool_use.jinja", "four", 4);
    check_text("three", false);
    check_text("four", true);
}

/* The adapter's tokens where its configuration names them, also as none; the base's else. */
static void test_whose_tokens(void **state)
{
    (void)state;
    write_text("chat_template.jinja", "{{ bos_token }} {{ eos_token }}");
    check_text("<|im_start|> E", false);
    write_text("tokenizer_config.json", "{\"eos_token\":{\"content\":\"<|im_end|>\"}}");
    check_text("<|im_start|> <|im_end|>", false);
    write_text("tokenizer_config.json", "{\"eos_token\":\"<|im_end|>\",\"bos_token\":null}");
    check_text(" <|im_end|>", false);
}

static void test_foreign_tokens(void **state)
{
    (void)state;
    write_text("chat_template.jinja", "<|new|>{{ pad_token }}");
    write_text("tokenizer_config.json", "{\"eos_token\":\"<|other|>\"}");
    check_text("<|new|>", false); /* plain text: nobody says that it is a token */
    write_text("added_tokens.json", "{\"<|new|>\": 2048, \"<|other|>\": 2049}");
    check_refused(SP_CHAT_UNSUPPORTED, "<|new|>");
    write_text("added_tokens.json", "{\"<|im_end|>\": 5, \"<|other|>\": 2049}");
    check_text("<|new|>", false); /* not written */
    write_text("chat_template.jinja", "<|im_end|>");
    check_refused(SP_CHAT_UNSUPPORTED, "<|im_end|>"); /* here with another id */
    write_text("added_tokens.json", "{\"<|im_end|>\": 2047}");
    check_text("<|im_end|>", false);
    write_text("tokenizer_config.json",
               "{\"added_tokens_decoder\":{\"2046\":{\"content\":\"<|im_end|>\"}}}");
    check_refused(SP_CHAT_UNSUPPORTED, "<|im_end|>");
    write_text("tokenizer_config.json", "{\"pad_token\":\"<|pad|>\"}");
    check_text("<|im_end|>", false);
    write_text("chat_template.jinja", "{{ pad_token }}");
    check_refused(SP_CHAT_UNSUPPORTED, "<|pad|>");
}

static void test_broken(void **state)
{
    (void)state;
    write_text("chat_template.jinja", "a\n{% for %}");
    check_refused(SP_CHAT_MALFORMED, "line 2");
    write_text("chat_template.jinja", "{{ x|wordwrap }}");
    check_refused(SP_CHAT_UNSUPPORTED, "wordwrap");
    write_text("chat_template.jinja", "good");
    write_text("tokenizer_config.json", "{");
    check_refused(SP_CHAT_MALFORMED, "tokenizer_config.json");
    write_text("tokenizer_config.json", "[]");
    check_refused(SP_CHAT_MALFORMED, "tokenizer_config.json");
    write_text("tokenizer_config.json", "{}");
    write_text("added_tokens.json", "{\"a\": ");
    check_refused(SP_CHAT_MALFORMED, "added_tokens.json");
}

static void test_no_memory(void **state)
{
    sp_status status = SP_ERR_MEMORY;

    (void)state;
    write_text("chat_template.jinja", "{{ eos_token }}<|im_end|>");
    write_text("tokenizer_config.json", "{\"eos_token\":\"<|im_end|>\"}");
    write_text("added_tokens.json", "{\"<|im_end|>\": 2047}");
    sp_json_own_memory(true);
    for (int64_t n = 0; status == SP_ERR_MEMORY; n++) {
        size_t blocks = sp_alloc_blocks();
        sp_chat *chat;
        sp_error error;

        sp_alloc_fail_after(n);
        status = open_folder(NULL, &chat, &error);
        sp_alloc_fail_after(-1);
        assert_true(status == SP_OK || status == SP_ERR_MEMORY);
        sp_chat_close(chat);
        assert_int_equal(sp_alloc_blocks(), blocks);
        assert_true(n < 2000);
    }
    sp_json_own_memory(false);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_nothing, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_places, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_whose_tokens, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_foreign_tokens, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_broken, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_no_memory, set_up, tear_down),
    };
    sp_engine_options options;
    int failed;

    sp_engine_options_default(&options, sizeof options);
    options.model_dir = SP_TEST_DEMO "/base";
    options.threads = 1;
    options.kv_tokens = 1024;
    engine = engine_run_open(&options, NULL, 0);
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    sp_engine_close(engine);
    return failed;
}
