/*
 * A field means the same wherever it is written. 10,000 generated objects, valid, at the borders
 * and hostile, go as a body of completions, as one of chat and as a line of `generate`; verdict,
 * subject, reason and the request that comes of it are the same. And the documents say what the
 * tables of fields say.
 */
#include "support/field_docs.h"
#include "support/test.h"

#include "base/alloc.h"
#include "base/file.h"
#include "base/text.h"
#include "cli/requests.h"
#include "server/api/chat_request.h"
#include "server/api/completion_request.h"

#include <stdio.h>
#include <string.h>

#define BODIES       10000
#define FIELDS_MAX   5
#define LONGEST      SP_STOP_TEXT_BYTES_MAX
#define DIRTY_VALUES 6 /* one value in so many may be of any kind */

/* ---- bodies -------------------------------------------------------------------------------- */

/* Anything, for any field. */
static const char *const any_value[] = {
    "null",
    "true",
    "false",
    "0",
    "1",
    "-1",
    "2",
    "-2",
    "0.5",
    "1.5",
    "-0.0",
    "1e300",
    "-1e300",
    "5e-324",
    "2147483647",
    "2147483648",
    "-2147483649",
    "9223372036854775807",
    "-9223372036854775808",
    "1000",
    "1000.0000001",
    "100",
    "100.5",
    "0.01",
    "0.009",
    "16",
    "16.0000001",
    "20",
    "21",
    "-3",
    "\"\"",
    "\"1\"",
    "\"true\"",
    "[]",
    "{}",
    "[1]",
    "[\"a\"]",
    "[[1]]",
    "[null]",
    "[true]",
    "{\"a\": 1}",
    "{\"7\": null}",
    "\"\\u00e9\\ud83d\\ude00\"",
};

static const char *const texts[] = {"\"x\"",          "\"yy\"",          "[]",
                                    "[\"a\", \"b\"]", "[\"a\", \"\"]",   "[\"a\", 7]",
                                    "\"\\n\\n\"",     "[\"<|im_end|>\"]"};
static const char *const ids[] = {"[]",           "[0]",     "[1, 2, 3]", "[2147483647]",
                                  "[2147483648]", "[1, -1]", "[1.0]",     "[\"1\"]"};
static const char *const biases[] = {"{}",
                                     "{\"7\": 1}",
                                     "{\"07\": 1}",
                                     "{\"0\": -100}",
                                     "{\"7\": 101}",
                                     "{\"+7\": 1}",
                                     "{\" 7\": 1}",
                                     "{\"7\": true}",
                                     "{\"\": 1}",
                                     "{\"-7\": 1}",
                                     "{\"999999999\": 2}",
                                     "{\"1000000000\": 2}",
                                     "{\"7x\": 1}",
                                     "{\"1\": 0.125, \"2\": -7}",
                                     "{\"7\": \"1\"}"};

#define PICK(random, list) list[sp_test_below(random, sizeof(list) / sizeof *(list))]

/* A list of n times `item`; one of the long ones that a border is at. */
static void add_repeated(sp_text *out, const char *item, size_t n)
{
    sp_text_add(out, "[");
    for (size_t i = 0; i < n; i++)
        sp_text_format(out, "%s%s", i ? ", " : "", item);
    sp_text_add(out, "]");
}

static void add_long_text(sp_text *out, size_t bytes)
{
    sp_text_add(out, "\"");
    for (size_t i = 0; i < bytes; i++)
        sp_text_add(out, "x");
    sp_text_add(out, "\"");
}

static void add_text_value(sp_test_random *random, sp_text *out)
{
    switch (sp_test_below(random, 6)) {
    case 0:
        add_long_text(out, LONGEST + sp_test_below(random, 2));
        break;
    case 1:
        add_repeated(out, "\"s\"", 64 + sp_test_below(random, 2));
        break;
    default:
        sp_text_add(out, PICK(random, texts));
    }
}

static void add_bias_value(sp_test_random *random, sp_text *out)
{
    size_t n = SP_LOGIT_BIAS_MAX + sp_test_below(random, 2);

    if (sp_test_below(random, 50) != 0) {
        sp_text_add(out, PICK(random, biases));
        return;
    }
    sp_text_add(out, "{");
    for (size_t i = 0; i < n; i++)
        sp_text_format(out, "%s\"%zu\": 1", i ? ", " : "", i);
    sp_text_add(out, "}");
}

/* In the range, on its border, or just beyond. */
static void add_number(sp_test_random *random, const sp_field *row, sp_text *out)
{
    double span = row->maximum - row->minimum;
    bool whole = row->type == SP_FIELD_INT;

    switch (sp_test_below(random, 8)) {
    case 0:
        sp_text_format(out, whole ? "%.0f" : "%.17g", row->minimum);
        break;
    case 1:
        sp_text_format(out, whole ? "%.0f" : "%.17g", row->maximum);
        break;
    case 2:
        sp_text_format(out, "%.17g", row->minimum - (whole ? 1 : 1e-9));
        break;
    case 3:
        sp_text_format(out, "%.17g", row->maximum + (whole ? 1 : 1e-9));
        break;
    case 4:
        sp_text_format(out, "%.0f", row->minimum + (span > 3 ? 3 : 1));
        break;
    default:
        sp_text_format(out, whole ? "%.0f" : "%.9g",
                       row->minimum + (span > 50 ? 50 : span) * sp_test_below(random, 1000) / 999);
    }
}

static void add_value(sp_test_random *random, const sp_field *row, sp_text *out)
{
    if (sp_test_below(random, DIRTY_VALUES) == 0) {
        sp_text_add(out, PICK(random, any_value));
        return;
    }
    switch (row->type) {
    case SP_FIELD_BOOL:
    case SP_FIELD_NOT:
        sp_text_add(out, sp_test_below(random, 2) ? "true" : "false");
        break;
    case SP_FIELD_SEED:
        sp_text_format(out, "%lld", (long long)sp_test_next(random));
        break;
    case SP_FIELD_TEXTS:
        add_text_value(random, out);
        break;
    case SP_FIELD_IDS:
        if (sp_test_below(random, 6) == 0)
            add_repeated(out, "5", 64 + sp_test_below(random, 2));
        else
            sp_text_add(out, PICK(random, ids));
        break;
    case SP_FIELD_OWN:
        add_bias_value(random, out);
        break;
    default:
        add_number(random, row, out);
    }
}

/* The rows that a body of the API and a line of `generate` both have; the completions' own
 * "logprobs" is another field of that name. */
static bool is_shared(const sp_field *row)
{
    return (row->forms & SP_FORM_LINE) != 0 && (row->forms & SP_FORM_CHAT) != 0;
}

static void add_fields(sp_test_random *random, sp_text *out)
{
    uint32_t n = sp_test_below(random, FIELDS_MAX + 1);
    uint64_t taken = 0;

    for (uint32_t i = 0; i < n; i++) {
        uint32_t index = sp_test_below(random, (uint32_t)sp_n_request_rows);
        const sp_field *row = &sp_request_rows[index];

        if (!is_shared(row) || (taken >> index & 1))
            continue;
        taken |= (uint64_t)1 << index;
        sp_text_format(out, ", \"%s\": ", row->name);
        add_value(random, row, out);
    }
    if (sp_test_below(random, 20) == 0)
        sp_text_add(out, sp_test_below(random, 2) ? ", \"Top_p\": 1" : ", \"top_p \": null");
}

/* ---- readers ------------------------------------------------------------------------------- */

/* What a reader made of an object; the request's lists are owned by `owner`. */
typedef struct verdict {
    sp_status status;
    sp_error error;
    sp_request request;
    sp_completion_request completion;
    sp_chat_completion_request chat;
    sp_cli_requests lines;
} verdict;

static json_t *parse(const char *begin, const sp_text *fields)
{
    sp_text text = {0};
    json_t *body;

    sp_text_format(&text, "{%s%s}", begin, fields->data ? fields->data : "");
    body = json_loads(text.data, JSON_REJECT_DUPLICATES, NULL);
    assert_non_null(body);
    sp_text_free(&text);
    return body;
}

static void read_completion(const sp_text *fields, verdict *out)
{
    const sp_request defaults = sp_request_left_out(SP_LEFT_OUT_API);
    json_t *body = parse("\"prompt\": \"a\"", fields);

    *out = (verdict){.error = {.text = ""}};
    out->status = sp_completion_request_read(body, &defaults, &out->completion, &out->error);
    out->request = out->completion.fields.request;
    json_decref(body);
}

static void read_chat(const sp_text *fields, verdict *out)
{
    const sp_request defaults = sp_request_left_out(SP_LEFT_OUT_API);
    json_t *body = parse("\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]", fields);

    *out = (verdict){.error = {.text = ""}};
    out->status = sp_chat_completion_request_read(body, &defaults, &out->chat, &out->error);
    out->request = out->chat.fields.request;
    json_decref(body);
}

/* With flags that say what the API means by what is left out. */
static void read_line(const sp_text *fields, const sp_field_flags *flags, verdict *out)
{
    sp_text line = {0};

    *out = (verdict){.error = {.text = ""}};
    sp_text_format(&line, "{\"prompt\": \"a\"%s}", fields->data ? fields->data : "");
    out->status =
        sp_cli_requests_add_json(&out->lines, line.data, line.bytes, 1, flags, &out->error);
    if (out->status == SP_OK)
        out->request = out->lines.items[0].request;
    sp_text_free(&line);
}

static void release(verdict *v)
{
    sp_completion_request_free(&v->completion);
    sp_chat_completion_request_free(&v->chat);
    sp_cli_requests_free(&v->lines);
}

/* ---- comparing ----------------------------------------------------------------------------- */

static bool same_lists(const sp_field *row, const sp_request *a, const sp_request *b)
{
    int32_t n = *(const int32_t *)(const void *)((const char *)a + row->count_offset);
    int32_t other = *(const int32_t *)(const void *)((const char *)b + row->count_offset);

    if (n != other)
        return false;
    if (row->type == SP_FIELD_TEXTS) {
        for (int32_t i = 0; i < n; i++)
            if (strcmp(a->stop[i], b->stop[i]) != 0)
                return false;
        return true;
    }
    if (row->type == SP_FIELD_IDS)
        return n == 0 || memcmp(a->stop_tokens, b->stop_tokens, (size_t)n * sizeof(int32_t)) == 0;
    return n == 0 || memcmp(a->logit_bias, b->logit_bias, (size_t)n * sizeof *a->logit_bias) == 0;
}

static size_t bytes_of(sp_field_type type)
{
    switch (type) {
    case SP_FIELD_BOOL:
    case SP_FIELD_NOT:
        return sizeof(bool);
    case SP_FIELD_INT:
        return sizeof(int32_t);
    case SP_FIELD_FLOAT:
        return sizeof(float);
    case SP_FIELD_SEED:
        return sizeof(uint64_t);
    case SP_FIELD_DOUBLE:
        return sizeof(double);
    default:
        return 0;
    }
}

static bool was_given(const sp_text *fields, const char *name)
{
    char key[64];
    const char *at;

    snprintf(key, sizeof key, "\"%s\": ", name);
    at = fields->data ? strstr(fields->data, key) : NULL;
    return at && strncmp(at + strlen(key), "null", 4) != 0;
}

/* Member by member, bit by bit. A seed that is left out is random in the API, the length of a chat
 * the room that there is. */
static void check_same(const verdict *a, const verdict *b, const sp_text *fields)
{
    assert_int_equal(a->status, b->status);
    if (a->status != SP_OK) {
        const char *text = strncmp(b->error.text, "line 1: ", 8) == 0 ? b->error.text + 8 : "";

        assert_string_equal(a->error.subject, b->error.subject);
        assert_string_equal(a->error.code ? a->error.code : "", b->error.code ? b->error.code : "");
        assert_string_equal(a->error.text, text);
        return;
    }
    for (size_t i = 0; i < sp_n_request_rows; i++) {
        const sp_field *row = &sp_request_rows[i];
        const char *x = (const char *)&a->request + row->offset;
        const char *y = (const char *)&b->request + row->offset;
        bool open = row->type == SP_FIELD_SEED || strcmp(row->name, "max_tokens") == 0;
        bool same = row->count_offset != 0 ? same_lists(row, &a->request, &b->request)
                                           : memcmp(x, y, bytes_of(row->type)) == 0;

        if (!same && (!open || was_given(fields, row->name)))
            fail_msg("%s differs for {%s}", row->name, fields->data);
    }
}

static bool asks_for_none(const sp_text *fields)
{
    return fields->data &&
           (strstr(fields->data, "\"max_tokens\": 0,") ||
            strstr(fields->data, "\"max_tokens\": -0,") ||
            strcmp(fields->data + fields->bytes - 1, "0") == 0) &&
           was_given(fields, "max_tokens");
}

/* The flags as a user gives them, through the settings. */
static void parse_flags(sp_field_flags *flags)
{
    char *argv[] = {(char[]){"generate"}, (char[]){"--max-tokens"},
                    (char[]){"16"},       (char[]){"--temperature"},
                    (char[]){"1"},        NULL};
    const sp_field_flag_set set = sp_request_flag_set(SP_FORM_FLAGS);
    sp_setting rows[SP_FIELD_FLAGS_MAX];
    size_t n = sp_field_flags_rows(flags, &set, 0, rows);
    sp_error error;

    assert_ok(sp_settings_parse(rows, n, 5, argv, flags, NULL, &error), &error);
}

static void test_same_verdict(void **state)
{
    sp_test_random random = {14};
    sp_field_flags flags;
    size_t n_taken = 0, n_refused = 0, before = sp_alloc_bytes();

    (void)state;
    parse_flags(&flags);
    for (int round = 0; round < BODIES; round++) {
        sp_text fields = {0};
        verdict completion, chat, line;
        bool scores;

        add_fields(&random, &fields);
        scores = fields.data && strstr(fields.data, "logprobs\"");
        read_line(&fields, &flags, &line);
        read_chat(&fields, &chat);
        read_completion(&fields, &completion);
        if (!(line.status == SP_OK && chat.status != SP_OK && asks_for_none(&fields)))
            check_same(&chat, &line, &fields);
        if (!scores)
            check_same(&completion, &line, &fields);
        n_taken += line.status == SP_OK;
        n_refused += line.status != SP_OK;
        assert_true(line.status == SP_OK || line.status == SP_ERR_INPUT);
        release(&line);
        release(&chat);
        release(&completion);
        sp_text_free(&fields);
    }
    assert_int_equal(sp_alloc_bytes(), before);
    if (n_taken < BODIES / 4 || n_refused < BODIES / 4)
        fail_msg("%zu taken, %zu refused", n_taken, n_refused);
}

/* ---- by name ------------------------------------------------------------------------------- */

typedef struct one_field {
    const char *text;
    bool taken;
} one_field;

/* Where the readers once differed. */
static void test_old_differences(void **state)
{
    static const one_field cases[] = {
        {", \"top_k\": -1", true},
        {", \"top_k\": -2", false},
        {", \"logit_bias\": {\"07\": 1}", false},
        {", \"logit_bias\": {\"7\": 1}", true},
        {", \"min_tokens\": 2", true},
        {", \"stop_token_ids\": [1]", true},
        {", \"skip_special_tokens\": false", true},
        {", \"stop\": [\"\"]", false},
        {", \"lora_scale\": 16.0000001", false},
        {", \"unheard\": null", true},
        {", \"unheard\": 0", false},
        {", \"temperature\": null", true},
    };
    sp_field_flags flags;

    (void)state;
    parse_flags(&flags);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sp_text fields = {0};
        verdict completion, line;

        sp_text_add(&fields, cases[i].text);
        read_line(&fields, &flags, &line);
        read_completion(&fields, &completion);
        assert_int_equal(line.status, cases[i].taken ? SP_OK : SP_ERR_INPUT);
        check_same(&completion, &line, &fields);
        release(&line);
        release(&completion);
        sp_text_free(&fields);
    }
}

/* The completions' number is a line's yes and number. */
static void test_logprobs(void **state)
{
    sp_text number = {0}, pair = {0};
    sp_field_flags flags;
    verdict completion, line;

    (void)state;
    parse_flags(&flags);
    sp_text_add(&number, ", \"logprobs\": 3");
    sp_text_add(&pair, ", \"logprobs\": true, \"top_logprobs\": 3");
    read_completion(&number, &completion);
    read_line(&pair, &flags, &line);
    assert_int_equal(completion.status, SP_OK);
    check_same(&completion, &line, &pair);
    assert_true(line.request.logprobs && line.request.top_logprobs == 3);
    release(&line);
    release(&completion);
    sp_text_free(&number);
    sp_text_free(&pair);
}

/* A list of a line replaces that of the flags, an empty one too; null leaves it alone. */
static void test_lists_replace(void **state)
{
    static const struct {
        const char *text;
        int32_t n;
    } cases[] = {
        {"", 1}, {", \"stop\": null", 1}, {", \"stop\": []", 0}, {", \"stop\": [\"a\", \"b\"]", 2}};
    char *argv[] = {(char[]){"generate"}, (char[]){"--stop"}, (char[]){"END"}, NULL};
    sp_field_flags flags;
    const sp_field_flag_set set = sp_request_flag_set(SP_FORM_FLAGS);
    sp_setting rows[SP_FIELD_FLAGS_MAX];
    size_t n = sp_field_flags_rows(&flags, &set, 0, rows);
    sp_error error;

    (void)state;
    assert_ok(sp_settings_parse(rows, n, 3, argv, &flags, NULL, &error), &error);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sp_text fields = {0};
        verdict line;

        sp_text_add(&fields, cases[i].text);
        read_line(&fields, &flags, &line);
        assert_ok(line.status, &line.error);
        assert_int_equal(line.request.n_stop, cases[i].n);
        release(&line);
        sp_text_free(&fields);
    }
    sp_settings_free_lists(rows, n, &flags, NULL);
}

/* ---- documents ----------------------------------------------------------------------------- */

static void check_document(const char *path, void (*check)(const char *text, sp_text *problems))
{
    sp_text problems = {0};
    char *text;
    size_t bytes;
    sp_error error;

    assert_ok(sp_file_read_all(path, 1 << 20, &text, &bytes, &error), &error);
    check(text, &problems);
    if (problems.bytes > 0)
        fail_msg("%s does not follow the tables:\n%s", path, problems.data);
    /* It notices: the document's beginning alone lacks something. */
    text[bytes / 16] = '\0';
    check(text, &problems);
    assert_true(problems.bytes > 0);
    sp_text_free(&problems);
    sp_free(text);
}

static void test_documents(void **state)
{
    (void)state;
    check_document(SP_TEST_SOURCE "/docs/HTTP.md", sp_field_docs_http);
    check_document(SP_TEST_SOURCE "/docs/SAMPLING.md", sp_field_docs_sampling);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_verdict), cmocka_unit_test(test_old_differences),
        cmocka_unit_test(test_logprobs),     cmocka_unit_test(test_lists_replace),
        cmocka_unit_test(test_documents),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
