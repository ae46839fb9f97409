/* What a tokenizer.json requests apart from its tables: served, or refused by name. */
#include "support/test.h"

#include "base/alloc.h"
#include "base/file.h"
#include "base/json.h"
#include "engine/tokenizer/tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define UNSUPPORTED "tokenizer-unsupported"
#define MALFORMED   "tokenizer-malformed"
#define META        "\\u2581"

/* The file of a type with one field replaced ("model.type"); the caller frees it. */
static char *changed_file(const char *type, const char *path, const char *value)
{
    char file[512], outer[64];
    const char *dot = strchr(path, '.');
    json_t *root, *object;
    char *text;

    snprintf(file, sizeof file, SP_TEST_SOURCE "/tests/engine/data/tokenizers/%s/tokenizer.json",
             type);
    root = json_load_file(file, 0, NULL);
    assert_non_null(root);
    snprintf(outer, sizeof outer, "%.*s", dot ? (int)(dot - path) : 0, path);
    object = dot ? json_object_get(root, outer) : root;
    assert_int_equal(
        json_object_set_new(object, dot ? dot + 1 : path, json_loads(value, JSON_DECODE_ANY, NULL)),
        0);
    text = json_dumps(root, 0);
    json_decref(root);
    return text;
}

static sp_status parse(const char *type, const char *path, const char *value,
                       sp_tokenizer **out_tokenizer, sp_error *error)
{
    char *text = changed_file(type, path, value);
    sp_status status = sp_tokenizer_parse(text, strlen(text), "changed", out_tokenizer, error);

    free(text);
    return status;
}

static void refuse(const char *type, const char *path, const char *value, const char *code,
                   const char *subject)
{
    size_t blocks = sp_alloc_blocks();
    sp_tokenizer *tokenizer = NULL;
    sp_error error;

    if (parse(type, path, value, &tokenizer, &error) != SP_ERR_INPUT)
        fail_msg("%s: %s is taken as %s", type, path, value);
    assert_null(tokenizer);
    assert_string_equal(error.code, code);
    assert_string_equal(error.subject, subject);
    assert_true(strlen(error.text) > 10);
    assert_int_equal(sp_alloc_blocks(), blocks);
}

static sp_tokenizer *accept(const char *type, const char *path, const char *value)
{
    sp_tokenizer *tokenizer = NULL;
    sp_error error;

    assert_ok(parse(type, path, value, &tokenizer, &error), &error);
    return tokenizer;
}

static int32_t id_of(const sp_tokenizer *tokenizer, const char *text)
{
    for (int32_t id = sp_tokenizer_n_ids(tokenizer) - 1; id >= 0; id--) {
        size_t bytes;
        const char *data = sp_tokenizer_token_bytes(tokenizer, id, &bytes);

        if (bytes == strlen(text) && memcmp(data, text, bytes) == 0)
            return id;
    }
    fail_msg("no token \"%s\"", text);
    return -1;
}

/* The tokens of a text, as the reference's decoder would show each, with "|" between them. */
static void check_tokens(const sp_tokenizer *tokenizer, const char *text, bool add_special,
                         const char *want)
{
    sp_text shown = {0};
    int32_t *ids = NULL;
    size_t n;
    sp_error error;

    assert_ok(sp_tokenizer_encode_spans(tokenizer, text, strlen(text), NULL, 0, add_special,
                                        SIZE_MAX, &ids, &n, &error),
              &error);
    for (size_t i = 0; i < n; i++) {
        size_t bytes;
        const char *data = sp_tokenizer_token_bytes(tokenizer, ids[i], &bytes);

        sp_text_add(&shown, i ? "|" : "");
        sp_text_add_bytes(&shown, data, bytes);
    }
    assert_string_equal(shown.data ? shown.data : "", want);
    sp_text_free(&shown);
    sp_free(ids);
}

/* --- Normaliser and pre-tokenizer --------------------------------------------------------- */

#define REPLACE                                             \
    "{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"}," \
    "\"content\":\"" META "\"}"
#define PREPEND      "{\"type\":\"Prepend\",\"prepend\":\"" META "\"}"
#define STEPS(steps) "{\"type\":\"Sequence\",\"normalizers\":[" steps "]}"

static void test_normalizer(void **state)
{
    static const char *const others[] = {
        "{\"type\":\"NFKC\"}",
        "{\"type\":\"Lowercase\"}",
        PREPEND,
        REPLACE,
        STEPS(""),
        STEPS(PREPEND),
        STEPS(REPLACE "," PREPEND),
        STEPS(PREPEND "," PREPEND),
        STEPS("{\"type\":\"NFC\"}," REPLACE),
        STEPS(PREPEND "," REPLACE "," REPLACE),
        STEPS("{\"type\":\"Prepend\",\"prepend\":\"_\"}," REPLACE),
        STEPS(PREPEND ",{\"type\":\"Replace\",\"pattern\":{\"Regex\":\" \"},\"content\":\"" META
                      "\"}"),
        STEPS(PREPEND ",{\"type\":\"Replace\",\"pattern\":{\"String\":\"x\"},\"content\":\"" META
                      "\"}"),
        STEPS(PREPEND ",{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":\"_\"}"),
    };
    sp_tokenizer *tokenizer;

    (void)state;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        refuse("mistral_prepend", "normalizer", others[i], UNSUPPORTED, "normalizer");
    tokenizer = accept("mistral_prepend", "normalizer", STEPS(PREPEND "," REPLACE));
    check_tokens(tokenizer, "a", false, " a");
    check_tokens(tokenizer, " a", false, " | a"); /* always one more */
    sp_tokenizer_close(tokenizer);
    tokenizer = accept("mistral_prepend", "normalizer", STEPS(REPLACE));
    check_tokens(tokenizer, "a", false, "a");
    check_tokens(tokenizer, " a", false, " a");
    sp_tokenizer_close(tokenizer);
    refuse("mistral_prepend", "pre_tokenizer", "{\"type\":\"ByteLevel\"}", UNSUPPORTED,
           "pre_tokenizer");
    refuse("mistral_prepend", "normalizer", "null", UNSUPPORTED, "pre_tokenizer");
    refuse("mistral_metaspace", "normalizer", "{\"type\":\"NFC\"}", UNSUPPORTED, "normalizer");
}

#define METASPACE(more) "{\"type\":\"Metaspace\",\"replacement\":\"" META "\"" more "}"

static void test_metaspace(void **state)
{
    static const char *const others[] = {
        "{\"type\":\"Metaspace\"}",
        "{\"type\":\"Metaspace\",\"replacement\":\"_\"}",
        METASPACE(",\"prepend_scheme\":\"last\""),
        METASPACE(",\"prepend_scheme\":\"first\",\"add_prefix_space\":false"),
    };
    const char *type = "metaspace_pieces", *field = "pre_tokenizer";
    sp_tokenizer *tokenizer;

    (void)state;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        refuse(type, field, others[i], UNSUPPORTED, field);
    /* A blank in front for every text between two tokens that has none. */
    tokenizer = accept(type, field, METASPACE(",\"add_prefix_space\":true"));
    check_tokens(tokenizer, "a<think>a<think> a", false, " a|<think>| a|<think>| a");
    check_tokens(tokenizer,
                 "\xe2\x96\x81"
                 "a",
                 false, " a");
    check_tokens(tokenizer, "a  a", false, " a| | a"); /* no merge joins two pieces */
    sp_tokenizer_close(tokenizer);
    tokenizer = accept(type, field, METASPACE(",\"prepend_scheme\":\"first\",\"split\":false"));
    check_tokens(tokenizer, "a<think>a<think> a", false, " a|<think>|a|<think>| a");
    check_tokens(tokenizer, "<think>a", false, "<think>|a");
    check_tokens(tokenizer, "    x", false, "    |x");
    sp_tokenizer_close(tokenizer);
    tokenizer =
        accept(type, field, METASPACE(",\"prepend_scheme\":\"never\",\"add_prefix_space\":false"));
    check_tokens(tokenizer, "a a", false, "a| a");
    sp_tokenizer_close(tokenizer);
}

#define BYTE_LEVEL(regex) \
    "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":" regex "}"
#define PAIR(a, b) "{\"type\":\"Sequence\",\"pretokenizers\":[" a "," b "]}"

static void test_byte_level(void **state)
{
    static const char *const others[] = {
        BYTE_LEVEL("false"),
        "{\"type\":\"ByteLevel\",\"add_prefix_space\":true}",
        PAIR("{\"type\":\"Digits\",\"individual_digits\":false}", BYTE_LEVEL("true")),
        PAIR("{\"type\":\"Digits\",\"individual_digits\":true}", BYTE_LEVEL("false")),
        PAIR("{\"type\":\"Digits\",\"individual_digits\":true}", "{\"type\":\"Punctuation\"}"),
        PAIR("{\"type\":\"Punctuation\"}", BYTE_LEVEL("true")),
        "{\"type\":\"Sequence\",\"pretokenizers\":[" BYTE_LEVEL("true") "]}",
    };
    sp_tokenizer *tokenizer;

    (void)state;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        refuse("smollm2", "pre_tokenizer", others[i], UNSUPPORTED, "pre_tokenizer");
    tokenizer =
        accept("gpt2", "pre_tokenizer", "{\"type\":\"ByteLevel\",\"add_prefix_space\":false}");
    sp_tokenizer_close(tokenizer);
}

/* --- Decoder and model -------------------------------------------------------------------- */

#define UNDO  "{\"type\":\"Replace\",\"pattern\":{\"String\":\"" META "\"},\"content\":\" \"}"
#define BYTES "{\"type\":\"ByteFallback\"}"
#define FUSE  "{\"type\":\"Fuse\"}"
#define STRIP(start, stop) \
    "{\"type\":\"Strip\",\"content\":\" \",\"start\":" start ",\"stop\":" stop "}"
#define DECODER(steps) "{\"type\":\"Sequence\",\"decoders\":[" steps "]}"

static void test_decoder(void **state)
{
    static const char *const others[] = {
        "null",
        "{\"type\":\"ByteLevel\"}",
        "{\"type\":\"Metaspace\",\"replacement\":\"" META "\"}",
        DECODER(UNDO "," BYTES),
        DECODER(BYTES "," UNDO "," FUSE),
        DECODER(UNDO "," BYTES "," FUSE "," FUSE),
        DECODER(UNDO "," BYTES "," FUSE "," STRIP("2", "0")),
        DECODER(UNDO "," BYTES "," FUSE "," STRIP("1", "1")),
        DECODER(UNDO "," BYTES "," FUSE ",{\"type\":\"Strip\",\"content\":\"x\",\"start\":1,"
                     "\"stop\":0}"),
        DECODER(UNDO "," BYTES "," FUSE "," STRIP("1", "0") "," FUSE),
    };
    const int32_t *none = NULL;
    sp_tokenizer *tokenizer;

    (void)state;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        refuse("mistral_metaspace", "decoder", others[i], UNSUPPORTED, "decoder");
    refuse("llama3", "decoder", DECODER(UNDO "," BYTES "," FUSE), UNSUPPORTED, "decoder");
    for (int strips = 0; strips < 2; strips++) {
        sp_text text = {0};
        int32_t id;

        tokenizer = accept("mistral_metaspace", "decoder",
                           strips ? DECODER(UNDO "," BYTES "," FUSE "," STRIP("1", "0"))
                                  : DECODER(UNDO "," BYTES "," FUSE "," STRIP("0", "0")));
        id = id_of(tokenizer, " a");
        sp_tokenizer_decode(tokenizer, &id, 1, false, &text);
        assert_string_equal(text.data, strips ? "a" : " a");
        sp_text_clear(&text);
        sp_tokenizer_decode(tokenizer, none, 0, false, &text);
        assert_int_equal(text.bytes, 0);
        sp_text_free(&text);
        sp_tokenizer_close(tokenizer);
    }
}

static void test_model(void **state)
{
    (void)state;
    refuse("mistral_prepend", "model.ignore_merges", "true", UNSUPPORTED, "model.ignore_merges");
    refuse("mistral_prepend", "model.byte_fallback", "false", UNSUPPORTED, "model.byte_fallback");
    refuse("mistral_prepend", "model.merges", "[[\"<0x4\",\"1>\"]]", MALFORMED, "model.merges");
    refuse("mistral_prepend", "model.vocab", "{\"a\":900}", MALFORMED, "model.vocab");
    refuse("gpt2", "model.vocab", "{\"\\u4e2d\":0}", MALFORMED, "model.vocab");
}

/* --- Post-processor ----------------------------------------------------------------------- */

#define TOKEN(text)  "{\"SpecialToken\":{\"id\":\"" text "\",\"type_id\":0}}"
#define SEQUENCE(id) "{\"Sequence\":{\"id\":\"" id "\",\"type_id\":0}}"
#define TEMPLATE(single)                                                             \
    "{\"type\":\"TemplateProcessing\",\"single\":[" single "],\"pair\":[],"          \
    "\"special_tokens\":{\"<s>\":{\"id\":\"<s>\",\"ids\":[1],\"tokens\":[\"<s>\"]}," \
    "\"both\":{\"id\":\"both\",\"ids\":[1,2],\"tokens\":[\"<s>\",\"</s>\"]},"        \
    "\"none\":{\"id\":\"none\",\"ids\":[],\"tokens\":[]},"                           \
    "\"hole\":{\"id\":\"hole\",\"ids\":[4000],\"tokens\":[\"x\"]},"                  \
    "\"minus\":{\"id\":\"minus\",\"ids\":[-1],\"tokens\":[\"x\"]},"                  \
    "\"many\":{\"id\":\"many\",\"ids\":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],\"tokens\":[]}}}"
#define LEVEL             "{\"type\":\"ByteLevel\",\"trim_offsets\":false}"
#define PROCESSORS(steps) "{\"type\":\"Sequence\",\"processors\":[" steps "]}"

static void test_post_processor(void **state)
{
    static const struct {
        const char *value, *want;
    } served[] = {
        {"null", " a"},
        {LEVEL, " a"},
        {PROCESSORS(""), " a"},
        {TEMPLATE(SEQUENCE("A")), " a"},
        {TEMPLATE(TOKEN("<s>") "," SEQUENCE("A")), "<s>| a"},
        {PROCESSORS(LEVEL "," TEMPLATE(TOKEN("<s>") "," SEQUENCE("A"))), "<s>| a"},
        {TEMPLATE(TOKEN("<s>") "," TOKEN("both") "," SEQUENCE("A") "," TOKEN("both")),
         "<s>|<s>|</s>| a|<s>|</s>"},
    };
    static const struct {
        const char *value, *code;
    } others[] = {
        {"{\"type\":\"RobertaProcessing\"}", UNSUPPORTED},
        {"17", UNSUPPORTED},
        {PROCESSORS(TEMPLATE(SEQUENCE("A")) "," TEMPLATE(SEQUENCE("A"))), UNSUPPORTED},
        {PROCESSORS("{\"type\":\"BertProcessing\"}"), UNSUPPORTED},
        {TEMPLATE(""), UNSUPPORTED},
        {TEMPLATE(TOKEN("<s>")), UNSUPPORTED},
        {TEMPLATE(SEQUENCE("B")), UNSUPPORTED},
        {TEMPLATE(SEQUENCE("A") "," SEQUENCE("A")), UNSUPPORTED},
        {TEMPLATE("17," SEQUENCE("A")), UNSUPPORTED},
        {TEMPLATE(TOKEN("many") "," SEQUENCE("A")), UNSUPPORTED},
        {TEMPLATE(TOKEN("unknown") "," SEQUENCE("A")), MALFORMED},
        {TEMPLATE(TOKEN("none") "," SEQUENCE("A")), MALFORMED},
        {TEMPLATE(TOKEN("hole") "," SEQUENCE("A")), MALFORMED},
        {TEMPLATE(TOKEN("minus") "," SEQUENCE("A")), MALFORMED},
    };

    (void)state;
    for (size_t i = 0; i < sizeof served / sizeof *served; i++) {
        sp_tokenizer *tokenizer = accept("mistral_prepend", "post_processor", served[i].value);

        check_tokens(tokenizer, "a", true, served[i].want);
        check_tokens(tokenizer, "a", false, " a");
        sp_tokenizer_close(tokenizer);
    }
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        refuse("mistral_prepend", "post_processor", others[i].value, others[i].code,
               "post_processor");
}

/* --- Decoding ------------------------------------------------------------------------------ */

/* Pushes tokens by their texts and checks what comes out after each one and at the end. */
static void check_stream(sp_decoder decoder, const char *const *tokens, const char *const *want,
                         const char *rest)
{
    sp_text text = {0};

    for (size_t i = 0; tokens[i]; i++) {
        sp_text_clear(&text);
        sp_decoder_push(&decoder, id_of(decoder.tokenizer, tokens[i]), &text);
        assert_string_equal(text.data ? text.data : "", want[i]);
    }
    sp_text_clear(&text);
    sp_decoder_flush(&decoder, &text);
    assert_string_equal(text.data ? text.data : "", rest);
    sp_text_free(&text);
}

#define BAD       "\xef\xbf\xbd"
#define LIST(...) ((const char *const[]){__VA_ARGS__, NULL})

static void test_stream(void **state)
{
    sp_tokenizer *tokenizer = accept("mistral_metaspace", "truncation", "null");
    sp_decoder start = sp_decoder_start(tokenizer, true), next;
    int32_t before[2];

    (void)state;
    /* The first blank of a text goes, once; a special token is no text. */
    check_stream(start, LIST(" a", " a"), LIST("a", " a"), "");
    check_stream(start, LIST("<s>", " ", " a"), LIST("", "", " a"), "");
    check_stream(sp_decoder_start(tokenizer, false), LIST("<s>", " a"), LIST("<s>", " a"), "");
    /* U+1F600 in four bytes; a beginning that another token cuts off is wrong byte by byte. */
    check_stream(start, LIST("\xf0", "\x9f", "\x98", "\x80"), LIST("", "", "", "\xf0\x9f\x98\x80"),
                 "");
    check_stream(start, LIST("\xf0", "\x9f", " a"), LIST("", "", BAD BAD " a"), "");
    check_stream(start, LIST("\xf0", "\x9f", "\xff"), LIST("", "", BAD BAD BAD), "");
    check_stream(start, LIST("\xf0", "\x9f", "\x98"), LIST("", "", ""), BAD BAD BAD);
    /* An answer goes on with its prompt's text, which a token of no text alone is not. */
    before[0] = id_of(tokenizer, "<s>");
    before[1] = id_of(tokenizer, " a");
    next = sp_decoder_continue(tokenizer, true, before, 1);
    check_stream(next, LIST(" a"), LIST("a"), "");
    next = sp_decoder_continue(tokenizer, false, before, 1);
    check_stream(next, LIST(" a"), LIST(" a"), "");
    next = sp_decoder_continue(tokenizer, true, before, 2);
    check_stream(next, LIST(" a"), LIST(" a"), "");
    next = sp_decoder_continue(tokenizer, true, NULL, 0);
    check_stream(next, LIST(" a"), LIST("a"), "");
    sp_tokenizer_close(tokenizer);
}

/* --- Every failed allocation --------------------------------------------------------------- */

static sp_status parse_and_encode(const char *file, sp_error *error)
{
    static const char text[] = "a<think>\xe2\x96\x81 \xe4\xb8\xad 123<tool> b";
    sp_tokenizer *tokenizer = NULL;
    int32_t *ids = NULL;
    size_t n;
    sp_status status = sp_tokenizer_parse(file, strlen(file), "changed", &tokenizer, error);

    if (status != SP_OK)
        return status;
    status = sp_tokenizer_encode_spans(tokenizer, text, sizeof text - 1, NULL, 0, true, SIZE_MAX,
                                       &ids, &n, error);
    sp_free(ids);
    sp_tokenizer_close(tokenizer);
    return status;
}

static void test_every_failed_allocation(void **state)
{
    static const char *const types[] = {"llama3", "mistral_prepend", "mistral_metaspace"};

    (void)state;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        char *file = changed_file(types[i], "truncation", "null");

        for (int64_t n = 0;; n++) {
            size_t blocks = sp_alloc_blocks();
            sp_error error;
            sp_status status;

            sp_alloc_fail_after(n);
            status = parse_and_encode(file, &error);
            assert_int_equal(sp_alloc_blocks(), blocks);
            if (!sp_alloc_failed()) {
                assert_int_equal(status, SP_OK);
                assert_true(n >= 14);
                break;
            }
            assert_int_equal(status, SP_ERR_MEMORY);
        }
        sp_alloc_fail_after(-1);
        free(file);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_normalizer), cmocka_unit_test(test_metaspace),
        cmocka_unit_test(test_byte_level), cmocka_unit_test(test_decoder),
        cmocka_unit_test(test_model),      cmocka_unit_test(test_post_processor),
        cmocka_unit_test(test_stream),     cmocka_unit_test(test_every_failed_allocation),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
