/*
 * unicode_class.h: the properties of a code point that the tokenizer needs, by one table look-up,
 * and reading UTF-8. The tables are generated (tools/make_unicode_tables.py) and name their Unicode
 * version.
 */
#ifndef SP_ENGINE_TOKENIZER_UNICODE_CLASS_H
#define SP_ENGINE_TOKENIZER_UNICODE_CLASS_H

#include <stddef.h>
#include <stdint.h>

enum {
    SP_UNICODE_LETTER = 1,      /* general category L* */
    SP_UNICODE_NUMBER = 2,      /* N* */
    SP_UNICODE_MARK = 4,        /* M* */
    SP_UNICODE_SPACE = 8,       /* White_Space: U+180E is not in it */
    SP_UNICODE_NFC_UNSAFE = 16, /* text without any of these is in NFC already */
    SP_UNICODE_UPPER = 32,      /* Lu and Lt */
    SP_UNICODE_LOWER = 64,      /* Ll; letters without case are Lm and Lo */
};

#define SP_UNICODE_BLOCK 128 /* code points per block of the table */

extern const char sp_unicode_version[];
extern const uint16_t sp_unicode_block[]; /* [0x110000 / SP_UNICODE_BLOCK] */
extern const uint8_t sp_unicode_flags[];  /* [blocks * SP_UNICODE_BLOCK] */

/* Flags of a code point below 0x110000. */
static inline unsigned sp_unicode_class(uint32_t code)
{
    return sp_unicode_flags[(size_t)sp_unicode_block[code / SP_UNICODE_BLOCK] * SP_UNICODE_BLOCK +
                            code % SP_UNICODE_BLOCK];
}

/*
 * Reads one character of text that is known to be UTF-8; returns its bytes (1 to 4).
 */
static inline size_t sp_utf8_read(const unsigned char *text, uint32_t *out_code)
{
    unsigned lead = text[0];

    if (lead < 0x80) {
        *out_code = lead;
        return 1;
    }
    if (lead < 0xe0) {
        *out_code = (lead & 0x1fu) << 6 | (text[1] & 0x3fu);
        return 2;
    }
    if (lead < 0xf0) {
        *out_code = (lead & 0x0fu) << 12 | (text[1] & 0x3fu) << 6 | (text[2] & 0x3fu);
        return 3;
    }
    *out_code =
        (lead & 0x07u) << 18 | (text[1] & 0x3fu) << 12 | (text[2] & 0x3fu) << 6 | (text[3] & 0x3fu);
    return 4;
}

typedef enum sp_utf8_kind {
    SP_UTF8_VALID,      /* a whole character */
    SP_UTF8_INCOMPLETE, /* the beginning of one, cut off by the end of the text */
    SP_UTF8_INVALID     /* bytes that no continuation makes valid */
} sp_utf8_kind;

/*
 * Classifies the sequence at the start of text of bytes >= 1. *out_bytes is its length: of the
 * character, of the rest, or of the longest beginning of a character ("maximal subpart"), which is
 * what one U+FFFD replaces.
 */
sp_utf8_kind sp_utf8_classify(const unsigned char *text, size_t bytes, size_t *out_bytes);

#endif
