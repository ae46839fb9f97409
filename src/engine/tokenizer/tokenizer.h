/*
 * tokenizer.h: text to token ids and back, as the model directory's tokenizer.json says.
 *
 * Owns: the vocabulary, merges and added tokens; the split of a text into pieces; decoding with
 * partial characters held back. It must not know: models, adapters, requests, chat templates.
 *
 * BPE of two kinds. Byte-level, with the splits of Qwen, Llama 3, SmolLM2, SmolLM3, Mistral's
 * tekken and GPT-2, with NFC or no normaliser; and of characters, as files converted from
 * sentencepiece have it (Mistral's older ones): U+2581 is the blank, a character without a token is
 * spelled in bytes, and decoding drops the blank in front of a text. A file that requires anything
 * else is refused by the name of the field: a tokenizer that is nearly right would answer nearly
 * right prompts. Pieces of text are split by Unicode 16.0.0 (unicode_tables.c), as the reference
 * tokenizer does; NFC comes from utf8proc. "truncation" and "padding" are settings of the program
 * that saved the file and not applied; the tokens of "post_processor" around a text are added on
 * request.
 *
 * Known to differ from the reference (PyPI tokenizers), on purpose: the text of a special token
 * that is not parsed never becomes that token, neither by a merge nor as a whole piece; and in a
 * run of bytes that is partly UTF-8, of a tokenizer that spells in bytes, the characters that are
 * whole are kept, where the reference replaces every byte of the run: a stream could not wait for
 * the run's end.
 *
 * A tokenizer never changes after it was opened, so any number of threads may use one; a decoder is
 * used by one thread at a time.
 */
#ifndef SP_ENGINE_TOKENIZER_TOKENIZER_H
#define SP_ENGINE_TOKENIZER_TOKENIZER_H

#include "base/text.h"

#include <sidepath/engine.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Limits of a file: the largest known ones have 262,144 ids in 34 MB. */
#define SP_TOKENIZER_FILE_BYTES_MAX ((size_t)128 << 20)
#define SP_TOKENIZER_IDS_MAX        (1 << 22)
/* A text to encode: one piece of this length takes 28 bytes of scratch for each of its bytes. */
#define SP_TOKENIZER_TEXT_BYTES_MAX ((size_t)1 << 26)

/* Reason codes (sp_error.code). */
#define SP_TOKENIZER_MALFORMED    "tokenizer-malformed"   /* not the content of a tokenizer.json */
#define SP_TOKENIZER_UNSUPPORTED  "tokenizer-unsupported" /* valid, but another kind */
#define SP_TOKENIZER_INVALID_UTF8 "invalid-utf8"          /* the text to encode */
#define SP_TOKENIZER_TEXT_LARGE   "text-too-large"
#define SP_TOKENIZER_TOO_MANY     "too-many-tokens" /* more than the caller allows */

typedef struct sp_tokenizer sp_tokenizer;

/*
 * Reads MODEL_DIR/tokenizer.json. SP_ERR_NOT_FOUND, SP_ERR_IO, SP_ERR_TOO_LARGE: the file.
 * SP_ERR_INPUT with one of the codes above: its content; subject is the field, token or merge,
 * position the index of a merge or added token, or the byte of the JSON's error. *out_tokenizer is
 * owned by the caller.
 */
sp_status sp_tokenizer_open(const char *model_directory, sp_tokenizer **out_tokenizer,
                            sp_error *error);
/* The same from memory; `subject` names the bytes in errors. */
sp_status sp_tokenizer_parse(const char *bytes, size_t n_bytes, const char *subject,
                             sp_tokenizer **out_tokenizer, sp_error *error);
void sp_tokenizer_close(sp_tokenizer *tokenizer); /* NULL is allowed */

/* Largest id + 1, added tokens included. A model's vocabulary may be larger (padded rows) but not
 * smaller: the engine compares. */
int32_t sp_tokenizer_n_ids(const sp_tokenizer *tokenizer);

/*
 * Bytes of a token, borrowed until close. NULL and 0 for an id that the file does not have: such a
 * row of the model has no text. They need not be whole characters.
 */
const char *sp_tokenizer_token_bytes(const sp_tokenizer *tokenizer, int32_t id, size_t *out_bytes);
/* Bytes without a token, which are dropped as the reference does: 0 for most files. */
int32_t sp_tokenizer_n_dropped(const sp_tokenizer *tokenizer);
/* False for an id that the file does not have. */
bool sp_tokenizer_is_special(const sp_tokenizer *tokenizer, int32_t id);
/* The id of an added token by its text ("<|im_end|>"), or -1. */
int32_t sp_tokenizer_added_id(const sp_tokenizer *tokenizer, const char *content);

/*
 * Text to ids. *out_ids is owned by the caller (sp_free) and NULL when *out_n is 0.
 * Without parse_special the text of a special token is plain text, so that a user's prompt cannot
 * forge a turn; added tokens that are not special ("<think>") are found either way.
 * SP_ERR_INPUT: `text` is not UTF-8, position is the first wrong byte. SP_ERR_TOO_LARGE.
 */
sp_status sp_tokenizer_encode(const sp_tokenizer *tokenizer, const char *text, size_t bytes,
                              bool parse_special, int32_t **out_ids, size_t *out_n,
                              sp_error *error);

/*
 * The same, with add_special with the tokens of the file's post-processor around the text (usually
 * the one that begins it), and with parse_special inside `spans` only: they ascend, do not touch
 * and are within the text, else SP_ERR_ARGUMENT. A special token that crosses a span's border is
 * plain text. (A special token that is matched after the normaliser, where that has changed the
 * text around it, is one only if all the text from the previous token to the next is in its span.)
 * `spans` may be NULL with n_spans 0.
 *
 * A text of more than n_max tokens is SP_ERR_TOO_LARGE with SP_TOKENIZER_TOO_MANY; SIZE_MAX is no
 * limit. A much longer one is refused without being encoded, whatever else is wrong with it, and
 * any other as soon as its tokens are too many.
 */
sp_status sp_tokenizer_encode_spans(const sp_tokenizer *tokenizer, const char *text, size_t bytes,
                                    const sp_text_span *spans, size_t n_spans, bool add_special,
                                    size_t n_max, int32_t **out_ids, size_t *out_n,
                                    sp_error *error);

/*
 * Ids to text, appended to *text: the tokens' bytes, with U+FFFD for each maximal sequence that is
 * not UTF-8, or for each byte of it where the tokenizer spells in bytes. Ids that the file does not
 * have add nothing; ids may be NULL with n 0.
 */
void sp_tokenizer_decode(const sp_tokenizer *tokenizer, const int32_t *ids, size_t n,
                         bool skip_special, sp_text *text);

/*
 * The same, one id at a time: the texts of all pushes and of the flush, in order, are what
 * sp_tokenizer_decode gives for all ids, and every one of them is whole characters. Holds back at
 * most 3 bytes. Needs no release; a copy is an independent decoder.
 */
typedef struct sp_decoder {
    const sp_tokenizer *tokenizer; /* borrowed */
    bool skip_special;
    bool strip;            /* a blank that comes next is dropped: there was no text yet */
    bool bytewise;         /* U+FFFD for each byte */
    unsigned char held[4]; /* the beginning of a character */
    size_t n_held;
} sp_decoder;

sp_decoder sp_decoder_start(const sp_tokenizer *tokenizer, bool skip_special);
/* For ids that continue others: a blank in front is dropped only where those n have no text. An
 * incomplete character at their end is not continued. */
sp_decoder sp_decoder_continue(const sp_tokenizer *tokenizer, bool skip_special, const int32_t *ids,
                               size_t n);
void sp_decoder_push(sp_decoder *decoder, int32_t id, sp_text *text);
/* A beginning that was never finished becomes one U+FFFD. */
void sp_decoder_flush(sp_decoder *decoder, sp_text *text);

#endif
