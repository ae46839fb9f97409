/*
 * tokenizer.json: any bytes give a tokenizer or an error with a code. A tokenizer that was read
 * encodes any text to ids that it has, and decodes them to whole characters.
 */
#include "fuzz/target.h"

#include "base/alloc.h"
#include "engine/tokenizer/tokenizer.h"

#include <string.h>

static const char text[] =
    "abc <|x|> it's  1 + 23\r\n\xc3\xa9 e\xcc\x81 \xe4\xb8\xad\xf0\x9f\x98\x80 aB/xb \xe2\x96\x81"
    "b";

static void use(const sp_tokenizer *tokenizer, int parse_special)
{
    const sp_text_span all = {0, sizeof text - 1};
    int32_t n_ids = sp_tokenizer_n_ids(tokenizer);
    int32_t *ids = NULL;
    size_t n, bytes;
    sp_text decoded = {0};
    sp_error error;

    FUZZ_CHECK(sp_tokenizer_encode_spans(tokenizer, text, sizeof text - 1, &all, parse_special != 0,
                                         parse_special != 0, SIZE_MAX, &ids, &n, &error) == SP_OK);
    for (size_t i = 0; i < n; i++)
        FUZZ_CHECK(sp_tokenizer_token_bytes(tokenizer, ids[i], &bytes) != NULL);
    sp_tokenizer_decode(tokenizer, ids, n, parse_special, &decoded);
    sp_text_clear(&decoded);
    for (int32_t id = -1; id <= n_ids && id < 400; id++)
        sp_tokenizer_decode(tokenizer, &id, 1, true, &decoded);
    FUZZ_CHECK(sp_utf8_valid(decoded.data, decoded.bytes));
    sp_text_free(&decoded);
    sp_free(ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    sp_tokenizer *tokenizer = NULL;
    sp_error error;
    sp_status status = sp_tokenizer_parse((const char *)data, bytes, "input", &tokenizer, &error);

    if (status != SP_OK) {
        FUZZ_CHECK(status == SP_ERR_INPUT && tokenizer == NULL);
        FUZZ_CHECK(strncmp(error.code, "tokenizer-", 10) == 0);
        return 0;
    }
    use(tokenizer, 0);
    use(tokenizer, 1);
    sp_tokenizer_close(tokenizer);
    return 0;
}
