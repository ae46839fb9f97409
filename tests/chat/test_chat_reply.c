/* Generated text to messages: whole, byte by byte, and cut everywhere, with the same result. */
#include "support/test.h"

#include "base/alloc.h"
#include "base/json.h"
#include "base/text.h"
#include "chat/chat.h"

#include <string.h>
#include <time.h>

/* What came, written down: C"..", R"..", and for calls T0:name(arguments). */
typedef struct {
    sp_text text;
    sp_chat_delta_kind last;
    size_t n;
} notes;

static void take(void *user, const sp_chat_delta *delta)
{
    static const char *const open[] = {"C\"", "R\"", "T", "("};
    notes *note = user;

    assert_true(delta->bytes > 0);
    if (note->n++ == 0 || delta->kind != note->last || delta->kind == SP_CHAT_TOOL_CALL) {
        if (note->n > 1)
            sp_text_add(&note->text, note->last == SP_CHAT_TOOL_ARGUMENTS ? ")"
                                     : note->last == SP_CHAT_TOOL_CALL    ? ""
                                                                          : "\"");
        sp_text_add(&note->text, open[delta->kind]);
        if (delta->kind == SP_CHAT_TOOL_CALL)
            sp_text_format(&note->text, "%d:", delta->call);
    }
    note->last = delta->kind;
    sp_text_add_bytes(&note->text, delta->text, delta->bytes);
}

static const char schemas[] =
    "[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"properties\":{"
    "\"s\":{\"type\":\"string\"},\"i\":{\"type\":\"integer\"},\"b\":{\"type\":\"boolean\"},"
    "\"o\":{\"type\":\"object\"},\"n\":{\"type\":[\"string\",\"null\"]},\"a\":{}}}}}]";

/* Flags: t, the prompt ends in <think>; m, in the middle of a thought; r, the template knows it; c,
 * there are tools; x, calls are written as tags. */
static sp_chat_parser *start(const char *flags, notes *note)
{
    sp_chat_prompt prompt = {.thinking = strpbrk(flags, "tm") != NULL,
                             .fresh = strchr(flags, 't') != NULL,
                             .reasoning = strpbrk(flags, "tmr") != NULL,
                             .tools = strpbrk(flags, "cx") != NULL};
    sp_chat_parser *parser = NULL;
    sp_error error;

    if (strchr(flags, 'x'))
        prompt.tagged_tools = json_loads(schemas, 0, NULL);
    assert_ok(sp_chat_parser_create(&prompt, take, note, &parser, &error), &error);
    sp_chat_prompt_free(&prompt);
    return parser;
}

static void finish(sp_chat_parser *parser, notes *note)
{
    sp_error error;

    assert_ok(sp_chat_parser_finish(parser, &error), &error);
    sp_chat_parser_free(parser);
    if (note->n > 0)
        sp_text_add(&note->text, note->last == SP_CHAT_TOOL_ARGUMENTS ? ")" : "\"");
}

/* What comes of `text` in pieces of `step` bytes, the first one of `first`. Owned. */
static char *parse(const char *flags, const char *text, size_t first, size_t step)
{
    notes note = {0};
    sp_chat_parser *parser = start(flags, &note);
    size_t bytes = strlen(text);
    sp_error error;

    for (size_t at = 0, n = first; at < bytes; at += n, n = step) {
        n = n < bytes - at ? n : bytes - at;
        assert_ok(sp_chat_parser_push(parser, text + at, n, &error), &error);
    }
    finish(parser, &note);
    sp_text_add(&note.text, "");
    return note.text.data;
}

static void check_cut(const char *flags, const char *text, const char *want, size_t first,
                      size_t step)
{
    char *got = parse(flags, text, first, step);

    if (strcmp(got, want) != 0)
        fail_msg("%s by %zu, %zu:\n%s\nwanted\n%s", text, first, step, got, want);
    sp_free(got);
}

static void check(const char *flags, const char *text, const char *want)
{
    size_t bytes = strlen(text);

    check_cut(flags, text, want, 1, 1);
    check_cut(flags, text, want, 3, 2);
    for (size_t first = 1; first <= bytes; first++)
        check_cut(flags, text, want, first, bytes);
}

static void test_plain(void **state)
{
    (void)state;
    check("", "", "");
    check("", "Hello", "C\"Hello\"");
    check("", "<think>a</think><tool_call>{}</tool_call>",
          "C\"<think>a</think><tool_call>{}</tool_call>\"");
    check("rc", "a < b <thin> \n", "C\"a < b <thin> \n\"");
    check("rc", "  x", "C\"  x\"");
    check("rc", " \n ", "C\" \n \"");
    check("rc", "say <think> aloud", "C\"say <think> aloud\"");
}

static void test_reasoning(void **state)
{
    (void)state;
    check("t", "so\n</think>\n\nyes", "R\"so\"C\"yes\"");
    check("t", "\nso\n\nthen\n</think>\n\n\nyes", "R\"so\n\nthen\"C\"\nyes\"");
    check("m", "\nso\n</think>\n\nyes", "R\"\nso\"C\"yes\"");
    check("t", "so</think>yes", "R\"so\"C\"yes\"");
    check("t", "</think>yes", "C\"yes\"");
    check("t", "so on", "R\"so on\"");
    check("t", "so on\n</thin", "R\"so on\n</thin\"");
    check("r", "<think>\nso\n</think>\n\nyes", "R\"so\"C\"yes\"");
    check("r", "\n<think>so</think>yes", "R\"so\"C\"yes\"");
    check("r", "<think>\n\n</think>\n\nyes", "C\"yes\"");
    check("r", "         <think>so</think>yes", "R\"so\"C\"yes\""); /* blanks: more than the tag */
    check("r", "\t\n\t\n\t\n\t\n\t\nyes", "C\"\t\n\t\n\t\n\t\n\t\nyes\"");
    check("r", "         ", "C\"         \"");
    check("r", "<thinking> yes", "C\"<thinking> yes\"");
    check("r", "<think>so</think>a</think>b", "R\"so\"C\"a</think>b\"");
    check("tc", "<tool_call>{}</tool_call></think>x", "R\"<tool_call>{}</tool_call>\"C\"x\"");
}

static void test_calls(void **state)
{
    (void)state;
    check("c", "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, \"}\"]}}\n</tool_call>",
          "T0:f({\"a\": [1, \"}\"]})");
    check("c",
          "ok\n<tool_call>{\"arguments\" : {} , \"name\":\"f\"}</tool_call>\n"
          "<tool_call>{\"name\":\"g\",\"arguments\":{\"b\":1.50}}</tool_call>",
          "C\"ok\"T0:f({})T1:g({\"b\":1.50})");
    check("c", "<tool_call>{\"name\":\"f\"}</tool_call> then", "T0:f({})C\" then\"");
    check("c", "<tool_call>{\"name\":\"f\",\"arguments\":{\"x\":\"\\\"<tool_call>\"}}", /* cut */
          "T0:f({\"x\":\"\\\"<tool_call>\"})");
    check("rc",
          "<think>\nhm\n</think>\n\n<tool_call>\n{\"name\":\"f\",\"arguments\":{}}\n"
          "</tool_call>",
          "R\"hm\"T0:f({})");
    check("c", "<tool_call>{\"name\":\"f\",\"arguments\":{\"arguments\":2}}</tool_call>",
          "T0:f({\"arguments\":2})");
}

/* What is no call comes as it was written. */
static void test_broken_calls(void **state)
{
    static const char *const inner[] = {
        "",
        "{",
        "{}",
        "[]",
        "null",
        "{\"name\":5}",
        "{\"name\":\"\"}",
        "{\"name\":\"f\",\"arguments\":[]}",
        "{\"name\":\"f\",\"arguments\":\"{}\"}",
        "{\"name\":\"f\",\"arguments\":{}",
        "{\"name\":\"f\",\"name\":\"g\"}",
        "{\"name\":\"f\"} {\"name\":\"g\"}",
        "{\"name\":\"f\",\"\\u0061rguments\":{}}",
        "{\"name\": \"get\", \"parameters\": {\"city\": \"A\"}}",
        "{\"name\":\"f\",\"arguments\":{},\"id\":\"1\"}",
        "{\"name\":\"f\",\"arguments\":null,\"input\":{}}",
        "{\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":{}}}",
        "<function=f>\n</function>",
    };

    (void)state;
    for (size_t i = 0; i < sizeof inner / sizeof *inner; i++) {
        sp_text text = {0}, want = {0};

        sp_text_format(&text, "a\n<tool_call>%s</tool_call>\nb", inner[i]);
        sp_text_format(&want, "C\"a\n<tool_call>%s</tool_call>\nb\"", inner[i]);
        check("c", text.data, want.data);
        sp_text_clear(&text);
        sp_text_clear(&want);
        sp_text_format(&text, "<tool_call>{\"name\":\"f\"}</tool_call>\n<tool_call>%s", inner[i]);
        sp_text_format(&want, "T0:f({})C\"\n<tool_call>%s\"", inner[i]);
        check("c", text.data, want.data);
        sp_text_free(&text);
        sp_text_free(&want);
    }
}

#define PARAMETER(key, value) "<parameter=" key ">\n" value "\n</parameter>\n"

static void test_tagged_calls(void **state)
{
    (void)state;
    check("x",
          "ok\n<tool_call>\n<function=f>\n" PARAMETER("s", "5") PARAMETER("i", "5")
              PARAMETER("b", "True") "</function>\n</tool_call>",
          "C\"ok\"T0:f({\"s\": \"5\", \"i\": 5, \"b\": true})");
    check("x",
          "<tool_call>\n<function=f>\n" PARAMETER("o", "{\"x\": [1]}") PARAMETER("n", "null")
              PARAMETER("a", "[1,\n2]") PARAMETER(
                  "new",
                  "7") "</function>\n</tool_call>\n<tool_call><function=g></function></tool_call>",
          "T0:f({\"o\": {\"x\": [1]}, \"n\": null, \"a\": [1,\n2], \"new\": \"7\"})T1:g({})");
    check("x",
          "<tool_call><function=f>" PARAMETER("i", "five")
              PARAMETER("s", "\na \"b\"\n") "</function></tool_call>",
          "T0:f({\"i\": \"five\", \"s\": \"\\na \\\"b\\\"\\n\"})");
    check("x", "<tool_call>{\"name\":\"f\"}</tool_call>", "T0:f({})");
}

static void test_broken_tagged_calls(void **state)
{
    static const char *const inner[] = {
        "<function=>\n</function>",
        "<function=f>",
        "<function=f",
        "<function=f></function> more",
        "<function=f><parameter=s>x</function>",
        "<function=f><parameter=>x</parameter></function>",
        "<function=f strict=\"true\"></function>",
        "<function=\"f\"></function>",
        "<function=f><parameter=s type=\"string\">x</parameter></function>",
        "<function=f><param=s>x</param></function>",
        "<function=f>" PARAMETER("s", "1") PARAMETER("s", "2") "</function>",
        "f()",
    };

    (void)state;
    for (size_t i = 0; i < sizeof inner / sizeof *inner; i++) {
        sp_text text = {0}, want = {0};

        sp_text_format(&text, "<tool_call>%s</tool_call>", inner[i]);
        sp_text_format(&want, "C\"%s\"", text.data);
        check("x", text.data, want.data);
        sp_text_free(&text);
        sp_text_free(&want);
    }
}

/* How a text was cut does not show: every text of up to four of these pieces. */
static void test_every_cut(void **state)
{
    static const char *const flags[] = {"rc", "tc", "mc"};
    static const char *const pieces[] = {
        "",
        "\n",
        "         ",
        "x",
        "<t",
        "</t",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "{\"name\":\"f\"}",
    };
    const size_t n = sizeof pieces / sizeof *pieces;

    (void)state;
    for (size_t i = 0; i < 3 * n * n * n * n; i++) {
        size_t rest = i / 3;
        sp_text text = {0};
        char *whole;

        for (int k = 0; k < 4; k++, rest /= n)
            sp_text_add(&text, pieces[rest % n]);
        whole = parse(flags[i % 3], text.data, SIZE_MAX, SIZE_MAX);
        check_cut(flags[i % 3], text.data, whole, 1, 1);
        for (size_t first = 1; first < text.bytes; first++)
            check_cut(flags[i % 3], text.data, whole, first, SIZE_MAX);
        sp_free(whole);
        sp_text_free(&text);
    }
}

/* Nothing is held back that cannot be the beginning of a tag. */
static void test_prompt(void **state)
{
    static const char text[] = "a b\nc <d <tool";
    static const size_t passed[] = {1, 2, 3, 3, 5, 6, 6, 8, 9, 9, 9, 9, 9, 9};
    notes note = {0};
    sp_chat_parser *parser = start("c", &note);
    sp_error error;

    (void)state;
    for (size_t i = 0; i < sizeof text - 1; i++) {
        assert_ok(sp_chat_parser_push(parser, text + i, 1, &error), &error);
        assert_int_equal(note.text.bytes - 2, passed[i]);
    }
    assert_int_equal(sp_chat_parser_n_calls(parser), 0);
    finish(parser, &note);
    assert_string_equal(note.text.data, "C\"a b\nc <d <tool\"");
    sp_text_free(&note.text);
}

static void ignore(void *user, const sp_chat_delta *delta)
{
    (void)user;
    (void)delta;
}

static void test_out_of_memory(void **state)
{
    static const char text[] =
        "x<tool_call>{\"name\":\"f\",\"arguments\":{\"a\":1}}</tool_call>"
        "<tool_call><function=f>" PARAMETER("o", "[1]") "</function></tool_call>y";
    sp_chat_prompt prompt = {.tools = true};
    int64_t n = 0;

    (void)state;
    sp_json_own_memory(true);
    prompt.tagged_tools = json_loads(schemas, 0, NULL);
    for (;; n++) {
        size_t blocks = sp_alloc_blocks();
        sp_chat_parser *parser = NULL;
        sp_error error;
        sp_status status;

        sp_alloc_fail_after(n);
        status = sp_chat_parser_create(&prompt, ignore, NULL, &parser, &error);
        if (status == SP_OK)
            status = sp_chat_parser_push(parser, text, sizeof text - 1, &error);
        if (status == SP_OK)
            status = sp_chat_parser_finish(parser, &error);
        sp_chat_parser_free(parser);
        assert_int_equal(sp_alloc_blocks(), blocks);
        if (!sp_alloc_failed()) {
            assert_int_equal(status, SP_OK);
            break;
        }
        assert_int_equal(status, SP_ERR_MEMORY);
    }
    sp_alloc_fail_after(-1);
    assert_true(n >= 10); /* the parser, its text, a copy of each call, its JSON */
    sp_chat_prompt_free(&prompt);
    sp_json_own_memory(false);
}

/* A call costs its length, not the square of it: 400,000 pieces of one byte, each of which may be
 * the beginning of its end. By squares this takes minutes. */
static void test_long_call(void **state)
{
    static const char before[] = "<tool_call>{\"name\":\"f\",\"arguments\":{\"s\":\"";
    static const char after[] = "\"}}</tool_call>rest";
    const size_t n = 400000, seconds_max = 10;
    clock_t began = clock();
    sp_text text = {0};
    char *got;

    (void)state;
    sp_text_add(&text, before);
    for (size_t i = 0; i < n; i++)
        sp_text_add(&text, "<");
    sp_text_add(&text, after);
    assert_false(text.failed);
    got = parse("c", text.data, 1, 1);
    assert_true((clock() - began) / CLOCKS_PER_SEC < (clock_t)seconds_max);
    assert_memory_equal(got, "T0:f({\"s\":\"<<", 13);
    assert_int_equal(strlen(got), strlen("T0:f({\"s\":\"\"})C\"rest\"") + n);
    assert_string_equal(got + strlen(got) - strlen("<\"})C\"rest\""), "<\"})C\"rest\"");
    sp_free(got);
    sp_text_free(&text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plain),         cmocka_unit_test(test_reasoning),
        cmocka_unit_test(test_calls),         cmocka_unit_test(test_broken_calls),
        cmocka_unit_test(test_tagged_calls),  cmocka_unit_test(test_broken_tagged_calls),
        cmocka_unit_test(test_every_cut),     cmocka_unit_test(test_prompt),
        cmocka_unit_test(test_out_of_memory), cmocka_unit_test(test_long_call),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
