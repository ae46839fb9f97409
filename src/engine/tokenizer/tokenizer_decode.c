/*
 * Decoding, one id at a time. Tokens are bytes already (tokenizer_file.c): what is left is to hold
 * back the beginning of a character, to replace invalid bytes, and to drop the blank that a
 * sentencepiece vocabulary puts in front of a text.
 */
#include "engine/tokenizer/tokenizer.h"
#include "engine/tokenizer/tokenizer_parts.h"
#include "engine/tokenizer/unicode_class.h"

sp_decoder sp_decoder_start(const sp_tokenizer *tokenizer, bool skip_special)
{
    return (sp_decoder){.tokenizer = tokenizer,
                        .skip_special = skip_special,
                        .strip = tokenizer->strip_first,
                        .bytewise = tokenizer->metaspace != SP_METASPACE_NONE};
}

sp_decoder sp_decoder_continue(const sp_tokenizer *tokenizer, bool skip_special, const int32_t *ids,
                               size_t n)
{
    sp_decoder decoder = sp_decoder_start(tokenizer, skip_special);

    for (size_t i = 0; i < n && decoder.strip; i++) {
        size_t bytes;

        sp_tokenizer_token_bytes(tokenizer, ids[i], &bytes);
        decoder.strip = bytes == 0 || (skip_special && sp_tokenizer_is_special(tokenizer, ids[i]));
    }
    return decoder;
}

static void add_character(sp_decoder *decoder, const void *character, size_t bytes, sp_text *text)
{
    const bool stripped = decoder->strip && *(const char *)character == ' ';

    decoder->strip = false;
    if (!stripped)
        sp_text_add_bytes(text, character, bytes);
}

/* U+FFFD for n invalid bytes: one for all, or one for each where bytes have tokens. */
static void add_replacements(sp_decoder *decoder, size_t n, sp_text *text)
{
    for (size_t i = 0; i < (decoder->bytewise ? n : 1); i++)
        add_character(decoder, "\xef\xbf\xbd", 3, text);
}

/* Takes one byte; what is held is always a proper beginning of a character. */
static void push_byte(sp_decoder *decoder, unsigned char byte, sp_text *text)
{
    size_t n;

    if (decoder->n_held == 0 && byte < 0x80) {
        add_character(decoder, &byte, 1, text);
        return;
    }
    decoder->held[decoder->n_held++] = byte;
    switch (sp_utf8_classify(decoder->held, decoder->n_held, &n)) {
    case SP_UTF8_INCOMPLETE:
        return;
    case SP_UTF8_VALID:
        add_character(decoder, decoder->held, n, text);
        decoder->n_held = 0;
        return;
    case SP_UTF8_INVALID:
        add_replacements(decoder, n, text);
        if (n == decoder->n_held) {
            decoder->n_held = 0;
            return;
        }
        /* All but the last byte were a valid beginning; the last one starts again. */
        decoder->n_held = 0;
        push_byte(decoder, byte, text);
    }
}

void sp_decoder_push(sp_decoder *decoder, int32_t id, sp_text *text)
{
    size_t bytes;
    const char *data = sp_tokenizer_token_bytes(decoder->tokenizer, id, &bytes);

    if (decoder->skip_special && sp_tokenizer_is_special(decoder->tokenizer, id))
        return;
    for (size_t i = 0; i < bytes; i++)
        push_byte(decoder, (unsigned char)data[i], text);
}

void sp_decoder_flush(sp_decoder *decoder, sp_text *text)
{
    if (decoder->n_held > 0)
        add_replacements(decoder, decoder->n_held, text);
    decoder->n_held = 0;
}

void sp_tokenizer_decode(const sp_tokenizer *tokenizer, const int32_t *ids, size_t n,
                         bool skip_special, sp_text *text)
{
    sp_decoder decoder = sp_decoder_start(tokenizer, skip_special);

    for (size_t i = 0; i < n; i++)
        sp_decoder_push(&decoder, ids[i], text);
    sp_decoder_flush(&decoder, text);
}
