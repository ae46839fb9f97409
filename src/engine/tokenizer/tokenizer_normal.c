/*
 * NFC by utf8proc (Unicode 15 in Debian 12). The reference tokenizer's NFC is of Unicode 9: about a
 * hundred combining marks and one composition came later, and only a text that has such a mark out
 * of its canonical order, or decomposed, is encoded differently there. The canonical order is made
 * here, since utf8proc swaps neighbours until a run is sorted: quadratic in its length.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "engine/tokenizer/tokenizer_parts.h"
#include "engine/tokenizer/unicode_class.h"

#include <string.h>
#include <utf8proc.h>

/* True when the characters alone show that the text is in NFC. */
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

/* --- The canonical order ----------------------------------------------------------------- */

/* Runs of marks up to this long are sorted in place; utf8proc's own sort is quadratic for any. */
#define SHORT_RUN 32

static unsigned class_of(utf8proc_int32_t code)
{
    return (unsigned)utf8proc_get_property(code)->combining_class;
}

static void sort_short(utf8proc_int32_t *run, size_t n)
{
    for (size_t i = 1; i < n; i++) {
        utf8proc_int32_t code = run[i];
        unsigned class = class_of(code);
        size_t at = i;

        for (; at > 0 && class_of(run[at - 1]) > class; at--)
            run[at] = run[at - 1];
        run[at] = code;
    }
}

/* By counting: there are 255 classes. */
static sp_status sort_long(utf8proc_int32_t *run, size_t n, sp_error *error)
{
    size_t begin[257] = {0}; /* where the next mark of a class goes */
    utf8proc_int32_t *copy = sp_malloc(n * sizeof *copy);

    if (!copy)
        return sp_fail_memory(error, n * sizeof *copy, "normalising a text");
    memcpy(copy, run, n * sizeof *copy);
    for (size_t i = 0; i < n; i++)
        begin[class_of(copy[i]) + 1]++;
    for (size_t class = 1; class < 257; class ++)
        begin[class] += begin[class - 1];
    for (size_t i = 0; i < n; i++)
        run[begin[class_of(copy[i])]++] = copy[i];
    sp_free(copy);
    return SP_OK;
}

/* Sorts every run of non-starters by class; those of one class keep their order. */
static sp_status order_marks(utf8proc_int32_t *codes, size_t n, sp_error *error)
{
    for (size_t at = 0; at < n;) {
        size_t begin = at;

        while (at < n && class_of(codes[at]) != 0)
            at++;
        if (at - begin > SHORT_RUN) {
            sp_status status = sort_long(codes + begin, at - begin, error);

            if (status != SP_OK)
                return status;
        } else {
            sort_short(codes + begin, at - begin);
        }
        at += at == begin;
    }
    return SP_OK;
}

/* --- The form ---------------------------------------------------------------------------- */

static const utf8proc_option_t options = UTF8PROC_STABLE | UTF8PROC_COMPOSE;

/* Decomposes every character; counts only while `codes` is NULL. */
static size_t decompose(const unsigned char *text, size_t bytes, utf8proc_int32_t *codes,
                        size_t capacity)
{
    size_t n = 0;
    uint32_t code;

    for (size_t at = 0; at < bytes;) {
        at += sp_utf8_read(text + at, &code);
        n += (size_t)utf8proc_decompose_char((utf8proc_int32_t)code, codes ? codes + n : NULL,
                                             (utf8proc_ssize_t)(capacity - n), options, NULL);
    }
    return n;
}

sp_status sp_nfc(const char *text, size_t bytes, const char **out_text, size_t *out_bytes,
                 sp_error *error)
{
    const unsigned char *source = (const unsigned char *)text;
    utf8proc_ssize_t n_written;
    utf8proc_int32_t *codes;
    sp_status status;
    size_t n;

    if (is_surely_nfc(source, bytes)) {
        *out_text = text;
        *out_bytes = bytes;
        return SP_OK;
    }
    /* Decomposed once to count, once to keep; then put in order, composed and written as UTF-8 in
     * place, with room for the NUL that utf8proc appends. */
    n = decompose(source, bytes, NULL, 0);
    codes = sp_malloc((n + 1) * sizeof *codes);
    if (!codes)
        return sp_fail_memory(error, (n + 1) * sizeof *codes, "normalising a text");
    decompose(source, bytes, codes, n);
    status = order_marks(codes, n, error);
    if (status != SP_OK)
        goto free_codes;
    n_written = utf8proc_reencode(codes, (utf8proc_ssize_t)n, options);
    if (n_written < 0) {
        status = sp_fail(error, SP_ERR_INPUT, SP_TOKENIZER_INVALID_UTF8, NULL, -1,
                         "the text cannot be normalised: %s", utf8proc_errmsg(n_written));
        goto free_codes;
    }
    *out_text = (const char *)codes;
    *out_bytes = (size_t)n_written;
    return SP_OK;
free_codes:
    sp_free(codes);
    return status;
}
