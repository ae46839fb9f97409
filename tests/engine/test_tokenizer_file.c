/* tokenizer.json: every fault has a name and a place, and leaves nothing behind. */
#include "support/test.h"

#include "base/alloc.h"
#include "base/text.h"
#include "engine/tokenizer/tokenizer.h"

#include <stdio.h>
#include <string.h>

/* --- A small file, part by part ---------------------------------------------------------- */

#define SPLIT                                                                       \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}" \
    "| ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+"

typedef struct {
    const char *normalizer, *pre_tokenizer, *decoder;
    const char *model_head; /* fields before the vocabulary */
    const char *vocab_tail; /* entries behind the 256 bytes */
    const char *merges, *added;
    int byte_left_out; /* or -1 */
} parts;

static const char sequence[] =
    "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":\"" SPLIT
    "\"},\"behavior\":\"Isolated\",\"invert\":false},{\"type\":\"ByteLevel\","
    "\"add_prefix_space\":false,\"trim_offsets\":true,\"use_regex\":false}]}";

static parts good_parts(void)
{
    return (parts){
        .normalizer = "{\"type\":\"NFC\"}",
        .pre_tokenizer = sequence,
        .decoder = "{\"type\":\"ByteLevel\"}",
        .model_head = "\"type\":\"BPE\",\"dropout\":null,",
        .vocab_tail = ",\"ab\":256,\"abc\":257,\"bc\":258",
        .merges = "[\"a b\",[\"ab\",\"c\"],\"b c\"]",
        .added = "[{\"id\":259,\"content\":\"<|x|>\",\"special\":true,\"normalized\":false},"
                 "{\"id\":260,\"content\":\"<t>\",\"special\":false,\"normalized\":false}]",
        .byte_left_out = -1,
    };
}

/* The character that stands for a byte, from the rule: printable Latin-1 is itself, the others
 * follow one another from U+0100 on. The id of a byte is its value. */
static void add_byte_entry(sp_text *text, int byte, const char *separator)
{
    int n_before = 0;
    unsigned code = (unsigned)byte;

    for (int b = 0; b <= byte; b++) {
        bool printable = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;

        if (b == byte && !printable)
            code = 0x100 + (unsigned)n_before;
        n_before += !printable;
    }
    sp_text_format(text, "%s\"\\u%04x\":%d", separator, code, byte);
}

static sp_text build(const parts *p)
{
    sp_text text = {0};
    const char *separator = "";

    sp_text_format(&text, "{\"normalizer\":%s,\"pre_tokenizer\":%s,\"decoder\":%s,\"model\":{%s",
                   p->normalizer, p->pre_tokenizer, p->decoder, p->model_head);
    sp_text_add(&text, "\"vocab\":{");
    for (int byte = 0; byte < 256; byte++)
        if (byte != p->byte_left_out) {
            add_byte_entry(&text, byte, separator);
            separator = ",";
        }
    sp_text_format(&text, "%s},\"merges\":%s},\"added_tokens\":%s}", p->vocab_tail, p->merges,
                   p->added);
    assert_false(text.failed);
    return text;
}

static sp_tokenizer *parse_parts(const parts *p)
{
    sp_text text = build(p);
    sp_tokenizer *tokenizer = NULL;
    sp_error error;

    assert_ok(sp_tokenizer_parse(text.data, text.bytes, "small", &tokenizer, &error), &error);
    sp_text_free(&text);
    return tokenizer;
}

static void check_ids(const sp_tokenizer *tokenizer, const char *text, bool special,
                      const int32_t *want, size_t n_want)
{
    int32_t *ids = NULL;
    size_t n;
    sp_error error;

    assert_ok(sp_tokenizer_encode(tokenizer, text, strlen(text), special, &ids, &n, &error),
              &error);
    assert_int_equal(n, n_want);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(ids[i], want[i]);
    sp_free(ids);
}
#define CHECK_IDS(tokenizer, text, special, ...)                  \
    check_ids(tokenizer, text, special, (int32_t[]){__VA_ARGS__}, \
              sizeof((int32_t[]){__VA_ARGS__}) / sizeof(int32_t))

/* --- What is accepted -------------------------------------------------------------------- */

static void test_small_file(void **state)
{
    parts p = good_parts();
    sp_tokenizer *tokenizer = parse_parts(&p);

    (void)state;
    assert_int_equal(sp_tokenizer_n_ids(tokenizer), 261);
    CHECK_IDS(tokenizer, "abc", false, 257);
    CHECK_IDS(tokenizer, "bcab", false, 258, 256);
    CHECK_IDS(tokenizer, "a<|x|>b", true, 'a', 259, 'b');
    CHECK_IDS(tokenizer, "a<|x|>", false, 'a', '<', '|', 'x', '|', '>');
    CHECK_IDS(tokenizer, "a<t>b", false, 'a', 260, 'b'); /* not special: found either way */
    CHECK_IDS(tokenizer, "e\xcc\x81", false, 0xc3, 0xa9);
    sp_tokenizer_close(tokenizer);
}

static void test_variants(void **state)
{
    parts p = good_parts();
    sp_tokenizer *tokenizer;

    (void)state;
    p.normalizer = "null";
    p.model_head = "\"dropout\":0.0,\"continuing_subword_prefix\":\"\","
                   "\"end_of_word_suffix\":\"\",\"unk_token\":null,\"ignore_merges\":false,";
    p.added = "null";
    tokenizer = parse_parts(&p);
    CHECK_IDS(tokenizer, "e\xcc\x81", false, 'e', 0xcc, 0x81); /* no normaliser, no NFC */
    sp_tokenizer_close(tokenizer);

    /* Ids with holes: the hole has no text. An added token that stands in the vocabulary too. */
    p = good_parts();
    p.vocab_tail = ",\"ab\":256,\"abc\":300,\"bc\":258";
    p.added = "[{\"id\":256,\"content\":\"ab\",\"special\":false,\"normalized\":true}]";
    tokenizer = parse_parts(&p);
    {
        size_t bytes = 1;

        assert_int_equal(sp_tokenizer_n_ids(tokenizer), 301);
        assert_null(sp_tokenizer_token_bytes(tokenizer, 299, &bytes));
        assert_int_equal(bytes, 0);
        assert_non_null(sp_tokenizer_token_bytes(tokenizer, 300, &bytes));
        assert_int_equal(bytes, 3);
    }
    CHECK_IDS(tokenizer, "xabc", false, 'x', 256, 'c'); /* the added token cuts the word */
    sp_tokenizer_close(tokenizer);
}

/* Added tokens: the longest at the leftmost place; raw ones before NFC, normalised ones after. */
static void test_added_tokens(void **state)
{
    parts p = good_parts();
    sp_tokenizer *tokenizer;

    (void)state;
    p.added = "[{\"id\":259,\"content\":\"<a\",\"special\":true,\"normalized\":false},"
              "{\"id\":260,\"content\":\"<ab>\",\"special\":true,\"normalized\":false},"
              "{\"id\":261,\"content\":\"a>\",\"special\":false,\"normalized\":false},"
              "{\"id\":262,\"content\":\"e\\u0301\",\"special\":false,\"normalized\":true},"
              "{\"id\":263,\"content\":\"o\\u0301\",\"special\":false,\"normalized\":false},"
              "{\"id\":264,\"content\":\"\\u4e2d\\u6587\",\"special\":false,\"normalized\":true}]";
    tokenizer = parse_parts(&p);
    CHECK_IDS(tokenizer, "<ab>", true, 260);
    CHECK_IDS(tokenizer, "<ab<a>", true, 259, 'b', 259, '>');
    /* "<a" is not parsed but takes its text, so "a>" is not found inside; it is behind a blank. */
    CHECK_IDS(tokenizer, "<a> a>", false, '<', 'a', '>', ' ', 261);
    CHECK_IDS(tokenizer, "xe\xcc\x81", false, 'x', 262); /* found after NFC */
    CHECK_IDS(tokenizer, "x\xc3\xa9", false, 'x', 262);  /* the same character */
    CHECK_IDS(tokenizer, "xo\xcc\x81", false, 'x', 263); /* found before NFC */
    CHECK_IDS(tokenizer, "x\xc3\xb3", false, 'x', 0xc3, 0xb3);
    CHECK_IDS(tokenizer, "\xe4\xb8\xad\xe6\x96\x87", false, 264);
    sp_tokenizer_close(tokenizer);
}

static sp_status encode_spans(const sp_tokenizer *tokenizer, const char *text,
                              const sp_text_span *spans, size_t n_spans, int32_t **out_ids,
                              size_t *out_n)
{
    sp_error error;

    return sp_tokenizer_encode_spans(tokenizer, text, strlen(text), spans, n_spans, false, SIZE_MAX,
                                     out_ids, out_n, &error);
}

/* `marked` is a text with [ ] around the spans, which are not part of it. */
static void check_span_ids(const sp_tokenizer *tokenizer, const char *marked, const int32_t *want,
                           size_t n_want)
{
    sp_text_span spans[8];
    sp_text text = {0};
    int32_t *ids = NULL;
    size_t n_spans = 0, n = 0;

    for (; *marked; marked++) {
        if (*marked == '[')
            spans[n_spans].begin = text.bytes;
        else if (*marked == ']')
            spans[n_spans++].end = text.bytes;
        else
            sp_text_add_bytes(&text, marked, 1);
    }
    assert_int_equal(encode_spans(tokenizer, text.data, spans, n_spans, &ids, &n), SP_OK);
    assert_int_equal(n, n_want);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(ids[i], want[i]);
    sp_free(ids);
    sp_text_free(&text);
}
#define CHECK_SPANS(tokenizer, text, ...)                     \
    check_span_ids(tokenizer, text, (int32_t[]){__VA_ARGS__}, \
                   sizeof((int32_t[]){__VA_ARGS__}) / sizeof(int32_t))

static void test_spans(void **state)
{
    parts p = good_parts();
    sp_tokenizer *tokenizer;

    (void)state;
    p.added = "[{\"id\":259,\"content\":\"<a>\",\"special\":true,\"normalized\":false},"
              "{\"id\":260,\"content\":\"<a><b>\",\"special\":true,\"normalized\":false},"
              "{\"id\":261,\"content\":\"<t>\",\"special\":false,\"normalized\":false},"
              "{\"id\":262,\"content\":\"<n>\",\"special\":true,\"normalized\":true}]";
    tokenizer = parse_parts(&p);
    CHECK_SPANS(tokenizer, "[<a>]x[<a>]", 259, 'x', 259);
    CHECK_SPANS(tokenizer, "[<a>]<a>[<a>]", 259, '<', 'a', '>', 259);
    CHECK_SPANS(tokenizer, "<[a>]", '<', 'a', '>'); /* half of it */
    CHECK_SPANS(tokenizer, "[<a]>", '<', 'a', '>');
    CHECK_SPANS(tokenizer, "[<a><b>]", 260);
    CHECK_SPANS(tokenizer, "[<a>]<b>", 259, '<', 'b', '>'); /* the longer one is not whole */
    CHECK_SPANS(tokenizer, "<a>[<b>]", '<', 'a', '>', '<', 'b', '>');
    CHECK_SPANS(tokenizer, "<a><[a>]", '<', 'a', '>', '<', 'a', '>');
    CHECK_SPANS(tokenizer, "<t>[<]t>", 261, 261); /* one that is not special is one anywhere */
    CHECK_SPANS(tokenizer, "[<n>]<n>", 262, '<', 'n', '>');
    CHECK_SPANS(tokenizer, "a[b]c[<a>a]bc", 257, 259, 257); /* merges see no border */
    /* NFC has changed the text between two tokens: its spans are lost, unless one holds it all. */
    CHECK_SPANS(tokenizer, "[<n>]e\xcc\x81", '<', 'n', '>', 0xc3, 0xa9);
    CHECK_SPANS(tokenizer, "[<n>e\xcc\x81]<t>", 262, 0xc3, 0xa9, 261);
    sp_tokenizer_close(tokenizer);
}

static void test_bad_spans(void **state)
{
    static const sp_text_span bad[][2] = {
        {{0, 0}, {1, 2}}, {{1, 2}, {0, 1}}, {{0, 1}, {1, 2}}, {{0, 1}, {2, 4}}, {{2, 1}, {2, 3}}};
    parts p = good_parts();
    sp_tokenizer *tokenizer = parse_parts(&p);
    int32_t *ids = NULL;
    size_t n;

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(encode_spans(tokenizer, "abc", bad[i], 2, &ids, &n), SP_ERR_ARGUMENT);
    assert_null(ids);
    sp_tokenizer_close(tokenizer);
}

/* The character that NFC shrinks the most, in a vocabulary whose longest token is four of it: the
 * limit is met exactly, although there are 28 bytes for each token of 8. */
static void test_limit_where_nfc_shrinks(void **state)
{
    enum { N_TOKENS = 500 };
    parts p = good_parts();
    sp_tokenizer *tokenizer;
    sp_text text = {0};
    int32_t *ids = NULL;
    size_t n = 0;
    sp_error error;

    (void)state;
    p.vocab_tail = ",\"\\u00ce\\u0132\":256,\"\\u00ce\\u0132\\u00ce\\u0132\":257,"
                   "\"\\u00ce\\u0132\\u00ce\\u0132\\u00ce\\u0132\\u00ce\\u0132\":258";
    p.merges = "[[\"\\u00ce\",\"\\u0132\"],[\"\\u00ce\\u0132\",\"\\u00ce\\u0132\"],["
               "\"\\u00ce\\u0132\\u00ce\\u0132\",\"\\u00ce\\u0132\\u00ce\\u0132\"]]";
    tokenizer = parse_parts(&p);
    for (int i = 0; i < 4 * N_TOKENS; i++)
        sp_text_add(&text, "\xe1\xbe\xbe\xcc\x88\xcc\x81");
    assert_ok(sp_tokenizer_encode_spans(tokenizer, text.data, text.bytes, NULL, 0, false, N_TOKENS,
                                        &ids, &n, &error),
              &error);
    assert_int_equal(n, N_TOKENS);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(ids[i], 258);
    sp_free(ids);
    assert_int_equal(sp_tokenizer_encode_spans(tokenizer, text.data, text.bytes, NULL, 0, false,
                                               N_TOKENS - 1, &ids, &n, &error),
                     SP_ERR_TOO_LARGE);
    sp_text_free(&text);
    sp_tokenizer_close(tokenizer);
}

/* --- What is refused --------------------------------------------------------------------- */

static void expect_refusal(const char *bytes, size_t n, const char *code, const char *subject,
                           int64_t position)
{
    size_t blocks = sp_alloc_blocks();
    sp_tokenizer *tokenizer = NULL;
    sp_error error;

    assert_int_equal(sp_tokenizer_parse(bytes, n, "small", &tokenizer, &error), SP_ERR_INPUT);
    assert_null(tokenizer);
    assert_string_equal(error.code, code);
    assert_string_equal(error.subject, subject);
    if (position >= -1)
        assert_int_equal(error.position, position);
    assert_true(strlen(error.text) > 10);
    assert_int_equal(sp_alloc_blocks(), blocks);
}

static void refuse(const parts *p, const char *code, const char *subject, int64_t position)
{
    sp_text text = build(p);

    expect_refusal(text.data, text.bytes, code, subject, position);
    sp_text_free(&text);
}

/* good_parts() with one part replaced. */
#define REFUSE(field, value, code, subject, position) \
    do {                                              \
        parts p = good_parts();                       \
        p.field = (value);                            \
        refuse(&p, code, subject, position);          \
    } while (0)

#define UNSUPPORTED "tokenizer-unsupported"
#define MALFORMED   "tokenizer-malformed"

static void test_other_kinds_are_named(void **state)
{
    (void)state;
    REFUSE(normalizer, "{\"type\":\"NFKC\"}", UNSUPPORTED, "normalizer", -1);
    REFUSE(normalizer, "17", UNSUPPORTED, "normalizer", -1);
    REFUSE(decoder, "null", UNSUPPORTED, "decoder", -1);
    REFUSE(decoder, "{\"type\":\"Metaspace\"}", UNSUPPORTED, "decoder", -1);
    REFUSE(pre_tokenizer, "null", UNSUPPORTED, "pre_tokenizer", -1);
    REFUSE(pre_tokenizer, "{\"type\":\"ByteLevel\"}", UNSUPPORTED, "pre_tokenizer", -1);
    REFUSE(pre_tokenizer, "{\"type\":\"Sequence\",\"pretokenizers\":[]}", UNSUPPORTED,
           "pre_tokenizer", -1);
    REFUSE(model_head, "\"type\":\"Unigram\",", UNSUPPORTED, "model.type", -1);
    REFUSE(model_head, "\"dropout\":0.1,", UNSUPPORTED, "model.dropout", -1);
    REFUSE(model_head, "\"dropout\":\"x\",", UNSUPPORTED, "model.dropout", -1);
    REFUSE(model_head, "\"continuing_subword_prefix\":\"##\",", UNSUPPORTED,
           "model.continuing_subword_prefix", -1);
    REFUSE(model_head, "\"end_of_word_suffix\":\"</w>\",", UNSUPPORTED, "model.end_of_word_suffix",
           -1);
    REFUSE(added, "[{\"id\":259,\"content\":\"x\",\"special\":true,\"lstrip\":true}]", UNSUPPORTED,
           "x", 0);
}

/* One replacement inside the pre-tokenizer each. */
static void test_other_splits_are_named(void **state)
{
    static const struct {
        const char *from, *to;
    } changes[] = {
        {"\\\\p{N}|", "\\\\p{N}{1,2}|"},
        {"(?i:", "(?:"},
        {"Isolated", "Removed"},
        {"\"invert\":false", "\"invert\":true"},
        {"add_prefix_space\":false", "add_prefix_space\":true"},
        {"use_regex\":false", "use_regex\":true"},
        {"\"Regex\"", "\"String\""},
        {"\"Split\"", "\"Punctuation\""},
        {"{\"type\":\"ByteLevel\"", "{\"type\":\"Digits\""},
    };

    (void)state;
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        char changed[2 * sizeof sequence];
        const char *at = strstr(sequence, changes[i].from);

        assert_non_null(at);
        snprintf(changed, sizeof changed, "%.*s%s%s", (int)(at - sequence), sequence, changes[i].to,
                 at + strlen(changes[i].from));
        REFUSE(pre_tokenizer, changed, UNSUPPORTED, "pre_tokenizer", -1);
    }
}

static void test_bad_vocabulary(void **state)
{
    (void)state;
    REFUSE(vocab_tail, ",\"ab\":-1", MALFORMED, "ab", -1);
    REFUSE(vocab_tail, ",\"ab\":4194304", MALFORMED, "ab", -1);
    REFUSE(vocab_tail, ",\"ab\":9223372036854775807", MALFORMED, "ab", -1);
    REFUSE(vocab_tail, ",\"ab\":1.5", MALFORMED, "ab", -1);
    REFUSE(vocab_tail, ",\"ab\":256.0", MALFORMED, "ab", -1);
    REFUSE(vocab_tail, ",\"ab\":\"256\"", MALFORMED, "ab", -1);
    REFUSE(vocab_tail, ",\"ab\":null", MALFORMED, "ab", -1);
    REFUSE(vocab_tail, ",\"ab\":256,\"abc\":256", MALFORMED, "abc", -1);  /* one id, two tokens */
    REFUSE(vocab_tail, ",\"ab\":256,\"ab\":257", MALFORMED, "small", -2); /* one key twice */
    for (int byte = 0; byte < 256; byte += 51) {
        parts p = good_parts();

        p.byte_left_out = byte;
        p.model_head = "\"unk_token\":\"ab\",";
        refuse(&p, MALFORMED, "model.vocab", byte);
        p.model_head = "\"byte_fallback\":true,";
        refuse(&p, MALFORMED, "model.vocab", byte);
    }
}

/* A byte without a token is dropped, and what is left of it and right of it may merge. */
static void test_dropped_byte(void **state)
{
    parts p = good_parts();
    sp_tokenizer *tokenizer;

    (void)state;
    p.byte_left_out = 0xc3;
    p.normalizer = "null";
    tokenizer = parse_parts(&p);
    assert_int_equal(sp_tokenizer_n_dropped(tokenizer), 1);
    CHECK_IDS(tokenizer, "x\xc3\xa9y", false, 'x', 0xa9, 'y');
    sp_tokenizer_close(tokenizer);
    p.byte_left_out = '!';
    tokenizer = parse_parts(&p);
    CHECK_IDS(tokenizer, ".!.", false, '.', '.');
    {
        int32_t *ids = NULL;
        size_t n = 9;

        assert_int_equal(
            sp_tokenizer_encode_spans(tokenizer, "!", 1, NULL, 0, false, 0, &ids, &n, NULL), SP_OK);
        assert_int_equal(n, 0);
        assert_null(ids);
    }
    sp_tokenizer_close(tokenizer);
    p.vocab_tail = ",\"..\":256";
    p.merges = "[\". .\"]";
    tokenizer = parse_parts(&p);
    CHECK_IDS(tokenizer, ".!.", false, 256);
    sp_tokenizer_close(tokenizer);
}

/* Plain text becomes no special token, neither by a merge nor as a whole piece. */
static void test_special_merge(void **state)
{
    parts p = good_parts();
    sp_tokenizer *tokenizer;

    (void)state;
    p.added = "[{\"id\":256,\"content\":\"ab\",\"special\":true,\"normalized\":false}]";
    tokenizer = parse_parts(&p);
    CHECK_IDS(tokenizer, "ab", true, 256);
    CHECK_IDS(tokenizer, "ab", false, 'a', 'b');
    CHECK_IDS(tokenizer, "abc", false, 'a', 258);
    sp_tokenizer_close(tokenizer);
    p.model_head = "\"ignore_merges\":true,";
    tokenizer = parse_parts(&p);
    CHECK_IDS(tokenizer, "ab", false, 'a', 'b');
    CHECK_IDS(tokenizer, "abc", false, 257); /* a whole piece, which no merge makes */
    CHECK_IDS(tokenizer, "abcb", false, 'a', 258, 'b');
    sp_tokenizer_close(tokenizer);
}

static void test_bad_merges(void **state)
{
    (void)state;
    REFUSE(merges, "{}", MALFORMED, "model.merges", -1);
    REFUSE(merges, "[\"a b\",17]", MALFORMED, "model.merges", 1);
    REFUSE(merges, "[\"a b\",null]", MALFORMED, "model.merges", 1);
    REFUSE(merges, "[\"ab\"]", MALFORMED, "model.merges", 0);
    REFUSE(merges, "[\"a b c\"]", MALFORMED, "model.merges", 0);
    REFUSE(merges, "[\" \"]", MALFORMED, "model.merges", 0);
    REFUSE(merges, "[\"a \"]", MALFORMED, "model.merges", 0);
    REFUSE(merges, "[[\"a\"]]", MALFORMED, "model.merges", 0);
    REFUSE(merges, "[[\"a\",\"b\",\"c\"]]", MALFORMED, "model.merges", 0);
    REFUSE(merges, "[[\"a\",2]]", MALFORMED, "model.merges", 0);
    REFUSE(merges, "[\"a b\",\"ab c\",\"a x\"]", MALFORMED, "model.merges", 2); /* no "ax" */
    REFUSE(merges, "[\"xy b\"]", MALFORMED, "model.merges", 0);
    REFUSE(merges, "[\"a b\",\"b c\",\"a b\"]", MALFORMED, "model.merges", 2);
    REFUSE(merges, "[[\"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\",\"b\"]]", MALFORMED,
           "model.merges", 0);
}

static void test_bad_added_tokens(void **state)
{
    (void)state;
    REFUSE(added, "{}", MALFORMED, "added_tokens", -1);
    REFUSE(added, "[5]", MALFORMED, "added_tokens", 0);
    REFUSE(added, "[{\"id\":259,\"special\":true,\"normalized\":false}]", MALFORMED, "added_tokens",
           0);
    REFUSE(added, "[{\"id\":259,\"content\":\"\",\"special\":true,\"normalized\":false}]",
           MALFORMED, "added_tokens", 0);
    REFUSE(added, "[{\"content\":\"y\",\"special\":true,\"normalized\":false}]", MALFORMED, "y", 0);
    REFUSE(added, "[{\"id\":-4,\"content\":\"y\",\"special\":true,\"normalized\":false}]",
           MALFORMED, "y", 0);
    REFUSE(added, "[{\"id\":259,\"content\":\"<y>\",\"normalized\":false}]", MALFORMED, "special",
           -1);
    REFUSE(added, "[{\"id\":259,\"content\":\"<y>\",\"special\":1,\"normalized\":false}]",
           MALFORMED, "special", -1);
    /* The id of "b" is 98; 97 belongs to "a". */
    REFUSE(added, "[{\"id\":97,\"content\":\"b\",\"special\":true,\"normalized\":false}]",
           MALFORMED, "b", 0);
    REFUSE(added, "[{\"id\":97,\"content\":\"<y>\",\"special\":true,\"normalized\":false}]",
           MALFORMED, "<y>", 0);
    REFUSE(added,
           "[{\"id\":259,\"content\":\"<y>\",\"special\":true,\"normalized\":false},"
           "{\"id\":260,\"content\":\"<y>\",\"special\":true,\"normalized\":false}]",
           MALFORMED, "<y>", -1);
}

static void test_not_a_tokenizer(void **state)
{
    (void)state;
    expect_refusal("", 0, MALFORMED, "small", -2);
    expect_refusal("[]", 2, MALFORMED, "model", -1);
    expect_refusal("{}", 2, MALFORMED, "model", -1);
    expect_refusal("{\"model\":[]}", 12, MALFORMED, "model", -1);
    expect_refusal("\xef\xbb\xbf{}", 5, MALFORMED, "small", -2);
    expect_refusal("{\"model\":{\"type\":\"\xff\"}}", 21, MALFORMED, "small", -2);
}

static void test_missing_file(void **state)
{
    char *directory = sp_test_make_directory();
    sp_tokenizer *tokenizer = NULL;
    sp_error error;

    (void)state;
    assert_int_equal(sp_tokenizer_open(directory, &tokenizer, &error), SP_ERR_NOT_FOUND);
    assert_non_null(strstr(error.text, "tokenizer.json"));
    sp_test_write_file(directory, "tokenizer.json", "{}", 2);
    assert_int_equal(sp_tokenizer_open(directory, &tokenizer, &error), SP_ERR_INPUT);
    assert_null(tokenizer);
    sp_test_remove_tree(directory);
    sp_free(directory);
}

/* --- Every cut and every failed allocation ----------------------------------------------- */

static void test_every_truncation(void **state)
{
    parts p = good_parts();
    sp_text text = build(&p);

    (void)state;
    assert_true(text.bytes > 3000);
    for (size_t n = 0; n < text.bytes; n++) {
        /* A block of its own, so that a sanitizer sees a read behind the end. */
        char *cut = sp_malloc(n + 1);
        size_t blocks = sp_alloc_blocks();
        sp_tokenizer *tokenizer = NULL;
        sp_error error;

        cut = sp_realloc(cut, n ? n : 1);
        memcpy(cut, text.data, n);
        assert_int_equal(sp_tokenizer_parse(cut, n, "small", &tokenizer, &error), SP_ERR_INPUT);
        assert_string_equal(error.code, MALFORMED);
        assert_null(tokenizer);
        assert_int_equal(sp_alloc_blocks(), blocks);
        sp_free(cut);
    }
    sp_text_free(&text);
}

static sp_status parse_and_encode(const sp_text *file, sp_error *error)
{
    static const char text[] =
        "abc e\xcc\x81<t>bcab<|x|> and a piece of more than sixty-four "
        "bytes: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    sp_tokenizer *tokenizer;
    int32_t *ids;
    size_t n;
    sp_status status = sp_tokenizer_parse(file->data, file->bytes, "small", &tokenizer, error);

    if (status != SP_OK)
        return status;
    status = sp_tokenizer_encode(tokenizer, text, sizeof text - 1, true, &ids, &n, error);
    if (status == SP_OK)
        sp_free(ids);
    sp_tokenizer_close(tokenizer);
    return status;
}

static void test_every_failed_allocation(void **state)
{
    parts p = good_parts();
    sp_text text;
    int64_t n = 0;

    (void)state;
    p.added = "[{\"id\":259,\"content\":\"<|x|>\",\"special\":true,\"normalized\":false},"
              "{\"id\":260,\"content\":\"<t>e\\u0301\",\"special\":false,\"normalized\":true}]";
    text = build(&p);
    for (;; n++) {
        size_t blocks = sp_alloc_blocks(), bytes = sp_alloc_bytes();
        sp_error error;
        sp_status status;

        sp_alloc_fail_after(n);
        status = parse_and_encode(&text, &error);
        assert_int_equal(sp_alloc_blocks(), blocks);
        assert_int_equal(sp_alloc_bytes(), bytes);
        if (!sp_alloc_failed()) {
            assert_int_equal(status, SP_OK);
            break;
        }
        assert_int_equal(status, SP_ERR_MEMORY);
    }
    sp_alloc_fail_after(-1);
    assert_true(n >= 12); /* tables and tokens of the file, normalising, ids, scratch */
    sp_text_free(&text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_small_file),
        cmocka_unit_test(test_variants),
        cmocka_unit_test(test_added_tokens),
        cmocka_unit_test(test_spans),
        cmocka_unit_test(test_bad_spans),
        cmocka_unit_test(test_limit_where_nfc_shrinks),
        cmocka_unit_test(test_other_kinds_are_named),
        cmocka_unit_test(test_other_splits_are_named),
        cmocka_unit_test(test_bad_vocabulary),
        cmocka_unit_test(test_dropped_byte),
        cmocka_unit_test(test_special_merge),
        cmocka_unit_test(test_bad_merges),
        cmocka_unit_test(test_bad_added_tokens),
        cmocka_unit_test(test_not_a_tokenizer),
        cmocka_unit_test(test_missing_file),
        cmocka_unit_test(test_every_truncation),
        cmocka_unit_test(test_every_failed_allocation),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
