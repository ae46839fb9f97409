/*
 * Any text, by each type of tokenizer: invalid UTF-8 is refused with a position inside it, anything
 * else is encoded, with and without special tokens parsed, and what it decodes to at once is what a
 * stream gives. Where every byte has a token and blanks stay as they are, the decoded text is
 * encoded to the same ids again (NFC is idempotent).
 */
#include "fuzz/target.h"

#include "base/alloc.h"
#include "engine/tokenizer/tokenizer.h"

#include <string.h>

#define TYPES SP_TEST_SOURCE "/tests/engine/data/tokenizers"

typedef struct {
    const char *directory;
    bool keeps; /* decoding gives the normalised text */
    sp_tokenizer *tokenizer;
} type;

/* They stay open for the life of the program. */
static type types[] = {
    {SP_TEST_FIXTURES "/tokenizer512", true, NULL},
    {TYPES "/llama3", true, NULL},
    {TYPES "/smollm2", false, NULL},
    {TYPES "/tekken", true, NULL},
    {TYPES "/gpt2", true, NULL},
    {TYPES "/mistral_prepend", false, NULL},
    {TYPES "/mistral_metaspace", false, NULL},
    {TYPES "/metaspace_pieces", false, NULL},
};

static void check_stream(const sp_tokenizer *tokenizer, const int32_t *ids, size_t n,
                         const sp_text *whole)
{
    sp_decoder decoder = sp_decoder_start(tokenizer, false);
    sp_text stream = {0};

    for (size_t i = 0; i < n; i++) {
        size_t before = stream.bytes;

        sp_decoder_push(&decoder, ids[i], &stream);
        FUZZ_CHECK(before == stream.bytes ||
                   sp_utf8_valid(stream.data + before, stream.bytes - before));
    }
    sp_decoder_flush(&decoder, &stream);
    FUZZ_CHECK(stream.bytes == whole->bytes &&
               (stream.bytes == 0 || memcmp(stream.data, whole->data, stream.bytes) == 0));
    sp_text_free(&stream);
}

static void check_again(const type *kind, const int32_t *ids, size_t n)
{
    sp_text decoded = {0};
    int32_t *again = NULL;
    size_t n_again;
    sp_error error;

    sp_tokenizer_decode(kind->tokenizer, ids, n, false, &decoded);
    check_stream(kind->tokenizer, ids, n, &decoded);
    FUZZ_CHECK(sp_tokenizer_encode(kind->tokenizer, decoded.data ? decoded.data : "", decoded.bytes,
                                   true, &again, &n_again, &error) == SP_OK);
    FUZZ_CHECK(!kind->keeps ||
               (n_again == n && (n == 0 || memcmp(again, ids, n * sizeof *ids) == 0)));
    sp_free(again);
    sp_text_free(&decoded);
}

/* Neither a special token nor one of the ids around a text comes from plain text. */
static void check_plain(const type *kind, const char *text, size_t bytes)
{
    int32_t *ids = NULL;
    size_t n;
    sp_error error;

    FUZZ_CHECK(sp_tokenizer_encode(kind->tokenizer, text, bytes, false, &ids, &n, &error) == SP_OK);
    for (size_t i = 0; i < n; i++)
        FUZZ_CHECK(!sp_tokenizer_is_special(kind->tokenizer, ids[i]));
    sp_free(ids);
}

static void check_type(type *kind, const char *text, size_t bytes)
{
    int32_t *ids = NULL;
    size_t n;
    sp_error error;
    sp_status status;

    if (!kind->tokenizer)
        FUZZ_CHECK(sp_tokenizer_open(kind->directory, &kind->tokenizer, &error) == SP_OK);
    status = sp_tokenizer_encode(kind->tokenizer, text, bytes, true, &ids, &n, &error);
    FUZZ_CHECK((status == SP_OK) == sp_utf8_valid(text, bytes));
    if (status == SP_OK) {
        check_again(kind, ids, n);
        check_plain(kind, text, bytes);
    } else {
        FUZZ_CHECK(status == SP_ERR_INPUT && (uint64_t)error.position < bytes);
    }
    sp_free(ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        check_type(&types[i], (const char *)data, bytes);
    return 0;
}
