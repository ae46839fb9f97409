/*
 * Any text: invalid UTF-8 is refused with a position inside it, anything else is encoded, and what
 * it decodes to is encoded to the same ids again (NFC is idempotent).
 */
#include "fuzz/target.h"

#include "base/alloc.h"
#include "engine/tokenizer/tokenizer.h"

#include <string.h>

/* Stays open for the life of the program. */
static sp_tokenizer *tokenizer;

static void check_again(const int32_t *ids, size_t n)
{
    sp_text decoded = {0};
    int32_t *again = NULL;
    size_t n_again;
    sp_error error;

    sp_tokenizer_decode(tokenizer, ids, n, false, &decoded);
    FUZZ_CHECK(sp_tokenizer_encode(tokenizer, decoded.data ? decoded.data : "", decoded.bytes, true,
                                   &again, &n_again, &error) == SP_OK);
    FUZZ_CHECK(n_again == n && (n == 0 || memcmp(again, ids, n * sizeof *ids) == 0));
    sp_free(again);
    sp_text_free(&decoded);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    int32_t *ids = NULL;
    size_t n;
    sp_error error;
    sp_status status;

    if (!tokenizer)
        FUZZ_CHECK(sp_tokenizer_open(SP_TEST_FIXTURES "/tokenizer512", &tokenizer, &error) ==
                   SP_OK);
    status = sp_tokenizer_encode(tokenizer, (const char *)data, bytes, true, &ids, &n, &error);
    FUZZ_CHECK((status == SP_OK) == sp_utf8_valid((const char *)data, bytes));
    if (status == SP_OK)
        check_again(ids, n);
    else
        FUZZ_CHECK(status == SP_ERR_INPUT && (uint64_t)error.position < bytes);
    sp_free(ids);
    return 0;
}
