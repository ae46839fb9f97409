#include "engine/tokenizer/unicode_class.h"

sp_utf8_kind sp_utf8_classify(const unsigned char *text, size_t bytes, size_t *out_bytes)
{
    unsigned char lead = text[0];
    /* Only the second byte's range depends on the lead: it keeps out long forms, surrogates and
     * code points above 0x10ffff. */
    unsigned char low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    unsigned char high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    size_t length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;

    *out_bytes = 1;
    if (lead < 0x80)
        return SP_UTF8_VALID;
    if (lead < 0xc2 || lead > 0xf4)
        return SP_UTF8_INVALID;
    for (size_t i = 1; i < length; i++) {
        *out_bytes = i;
        if (i == bytes)
            return SP_UTF8_INCOMPLETE;
        if (text[i] < low || text[i] > high)
            return SP_UTF8_INVALID;
        low = 0x80;
        high = 0xbf;
    }
    *out_bytes = length;
    return SP_UTF8_VALID;
}
