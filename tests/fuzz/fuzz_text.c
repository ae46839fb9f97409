/*
 * The JSON string writer: whatever the bytes, a JSON reader takes the output, and gets the same
 * bytes back when they were UTF-8. The UTF-8 helpers agree with each other on every prefix.
 */
#include "fuzz/target.h"

#include "base/json.h"
#include "base/text.h"

#include <string.h>

static void check_prefix(const char *data, size_t bytes)
{
    size_t complete = sp_utf8_complete_bytes(data, bytes);

    FUZZ_CHECK(complete <= bytes && bytes - complete <= 3);
    if (sp_utf8_valid(data, bytes))
        FUZZ_CHECK(complete == bytes);
    /* What is held back is no text of its own. */
    if (complete < bytes)
        FUZZ_CHECK(!sp_utf8_valid(data + complete, bytes - complete));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    const char *string = (const char *)data;
    sp_text text = {0};
    json_t *value;

    for (size_t i = 0; i <= bytes && i <= 64; i++)
        check_prefix(string, i);
    sp_text_json_string(&text, string, bytes);
    FUZZ_CHECK(!text.failed && strlen(text.data) == text.bytes);
    FUZZ_CHECK(sp_utf8_valid(text.data, text.bytes));
    value = json_loadb(text.data, text.bytes, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
    FUZZ_CHECK(json_is_string(value));
    if (sp_utf8_valid(string, bytes)) {
        FUZZ_CHECK(json_string_length(value) == bytes);
        FUZZ_CHECK(memcmp(json_string_value(value), data, bytes) == 0);
    }
    json_decref(value);
    sp_text_free(&text);
    return 0;
}
