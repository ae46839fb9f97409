/*
 * NFC by utf8proc (Unicode 15 in Debian 12). The reference tokenizer's NFC is of Unicode 9: about a
 * hundred combining marks and one composition came later, and only a text that has such a mark out
 * of its canonical order, or decomposed, is encoded differently there.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "engine/tokenizer_parts.h"
#include "engine/unicode_class.h"

#include <utf8proc.h>

/* True when a look at each character alone shows that the text is in NFC. */
static bool is_surely_nfc(const unsigned char *text, size_t bytes)
{
    uint32_t code;

    for (size_t at = 0; at < bytes;) {
        if (text[at] < 0xcc) { /* below U+0300 nothing is unsafe */
            at++;
            continue;
        }
        at += sp_utf8_read(text + at, &code);
        if (sp_unicode_class(code) & SP_UNICODE_NFC_UNSAFE)
            return false;
    }
    return true;
}

sp_status sp_nfc(const char *text, size_t bytes, const char **out_text, size_t *out_bytes,
                 sp_error *error)
{
    const utf8proc_option_t options = UTF8PROC_STABLE | UTF8PROC_COMPOSE;
    const utf8proc_uint8_t *source = (const utf8proc_uint8_t *)text;
    utf8proc_ssize_t n_codes, n;
    utf8proc_int32_t *codes;

    if (is_surely_nfc(source, bytes)) {
        *out_text = text;
        *out_bytes = bytes;
        return SP_OK;
    }
    /* Decomposed once to count, once to keep; then composed and written as UTF-8 in place, with
     * room for the NUL that utf8proc puts behind. */
    n_codes = utf8proc_decompose(source, (utf8proc_ssize_t)bytes, NULL, 0, options);
    if (n_codes < 0)
        return sp_fail(error, SP_ERR_INPUT, SP_TOKENIZER_INVALID_UTF8, NULL, -1,
                       "the text cannot be normalised: %s", utf8proc_errmsg(n_codes));
    codes = sp_malloc(((size_t)n_codes + 1) * sizeof *codes);
    if (!codes)
        return sp_fail_memory(error, ((size_t)n_codes + 1) * sizeof *codes, "normalising a text");
    utf8proc_decompose(source, (utf8proc_ssize_t)bytes, codes, n_codes, options);
    n = utf8proc_reencode(codes, n_codes, options);
    if (n < 0) {
        sp_free(codes);
        return sp_fail(error, SP_ERR_INPUT, SP_TOKENIZER_INVALID_UTF8, NULL, -1,
                       "the text cannot be normalised: %s", utf8proc_errmsg(n));
    }
    *out_text = (const char *)codes;
    *out_bytes = (size_t)n;
    return SP_OK;
}
