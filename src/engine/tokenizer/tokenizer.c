/*
 * Encoding. A text passes four stages, each of which splits it further: added tokens found in the
 * raw text; the normaliser; added tokens found in the normalised text; pieces of the pre-tokenizer,
 * whose bytes or characters are merged.
 */
#include "engine/tokenizer/tokenizer.h"

#include "base/alloc.h"
#include "base/error.h"
#include "engine/tokenizer/tokenizer_parts.h"
#include "engine/tokenizer/unicode_class.h"

#include <string.h>

int32_t sp_tokenizer_n_ids(const sp_tokenizer *tokenizer)
{
    return tokenizer->n_ids;
}

static int kind_of(const sp_tokenizer *tokenizer, int32_t id)
{
    return id >= 0 && id < tokenizer->n_ids ? tokenizer->kind[id] : SP_TOKEN_NONE;
}

const char *sp_tokenizer_token_bytes(const sp_tokenizer *tokenizer, int32_t id, size_t *out_bytes)
{
    *out_bytes = 0;
    if (kind_of(tokenizer, id) == SP_TOKEN_NONE)
        return NULL;
    *out_bytes = tokenizer->token_begin[id + 1] - tokenizer->token_begin[id];
    return tokenizer->token_data + tokenizer->token_begin[id];
}

int32_t sp_tokenizer_n_dropped(const sp_tokenizer *tokenizer)
{
    return tokenizer->n_dropped;
}

bool sp_tokenizer_is_special(const sp_tokenizer *tokenizer, int32_t id)
{
    return kind_of(tokenizer, id) == SP_TOKEN_SPECIAL;
}

int32_t sp_tokenizer_added_id(const sp_tokenizer *tokenizer, const char *content)
{
    for (size_t i = 0; i < tokenizer->n_added; i++)
        if (strcmp(tokenizer->added[i].content, content) == 0)
            return tokenizer->added[i].id;
    return -1;
}

/* --- Encoding ---------------------------------------------------------------------------- */

typedef struct {
    const sp_tokenizer *tokenizer;
    sp_merge_scratch scratch;
    sp_id_list list;
    size_t n_max; /* ids that the list may hold */
    sp_error *error;
} encoder;

static sp_status too_many(const encoder *encode)
{
    return sp_fail(encode->error, SP_ERR_TOO_LARGE, SP_TOKENIZER_TOO_MANY, NULL, -1,
                   "the text has more than %zu tokens", encode->n_max);
}

/* Narrows the sorted added[*first .. *end) to those whose byte at `depth` is `byte`. */
static void narrow(const sp_added *added, size_t *first, size_t *end, size_t depth,
                   unsigned char byte)
{
    size_t low = *first, high = *end;

    while (low < high) { /* first entry that is not below `byte`; the NUL after a text is 0 */
        size_t middle = low + (high - low) / 2;

        if ((unsigned char)added[middle].content[depth] < byte)
            low = middle + 1;
        else
            high = middle;
    }
    *first = low;
    high = *end;
    while (low < high) { /* first entry above it */
        size_t middle = low + (high - low) / 2;

        if ((unsigned char)added[middle].content[depth] <= byte)
            low = middle + 1;
        else
            high = middle;
    }
    *end = low;
}

/* The longest added token of one stage that `text` begins with, or NULL. */
static const sp_added *match_added(const sp_tokenizer *tokenizer, const char *text, size_t bytes,
                                   bool normalized)
{
    const sp_added *longest = NULL;
    size_t first = 0, end = tokenizer->n_added;

    for (size_t depth = 0; depth < bytes && text[depth] != '\0'; depth++) {
        narrow(tokenizer->added, &first, &end, depth, (unsigned char)text[depth]);
        if (first == end)
            break;
        /* Of those with a common prefix the shortest sorts first. */
        if (tokenizer->added[first].bytes == depth + 1 &&
            tokenizer->added[first].normalized == normalized)
            longest = &tokenizer->added[first];
    }
    return longest;
}

static sp_status add_id(encoder *encode, int32_t id)
{
    if (encode->list.n == encode->n_max)
        return too_many(encode);
    return sp_id_list_add(&encode->list, id, encode->error);
}

/* The ids of one piece, which may be the whole text. */
static sp_status encode_piece(encoder *encode, const char *piece, size_t bytes)
{
    const sp_tokenizer *tokenizer = encode->tokenizer;
    const size_t left = encode->n_max - encode->list.n;
    sp_status status;

    if (tokenizer->ignore_merges) {
        int32_t id = sp_piece_table_find(tokenizer, piece, bytes);

        if (id >= 0)
            return add_id(encode, id);
    }
    if (bytes > left && sp_bound_exceeds(tokenizer, piece, bytes, true, left))
        return too_many(encode);
    status =
        sp_merge_piece(tokenizer, piece, bytes, &encode->scratch, &encode->list, encode->error);
    if (status == SP_OK && encode->list.n > encode->n_max)
        status = too_many(encode);
    return status;
}

/* Pieces that begin with blanks, one each, or the text as one. */
static sp_status encode_blank_pieces(encoder *encode, const char *text, size_t bytes)
{
    for (size_t at = 0; at < bytes;) {
        const char *next = encode->tokenizer->blank_begins_piece
                               ? memchr(text + at + 1, ' ', bytes - at - 1)
                               : NULL;
        size_t n = next ? (size_t)(next - text) - at : bytes - at;
        sp_status status = encode_piece(encode, text + at, n);

        if (status != SP_OK)
            return status;
        at += n;
    }
    return SP_OK;
}

/* The Metaspace pre-tokenizer: a text that does not begin with a blank may get one. `origin` is its
 * offset in the whole text. */
static sp_status encode_metaspace(encoder *encode, const char *text, size_t bytes, size_t origin)
{
    const sp_prepend prepend = encode->tokenizer->prepend;
    const bool has_blank =
        text[0] == ' ' || (bytes >= 3 && memcmp(text, "\xe2\x96\x81", 3) == 0); /* U+2581 */
    const char *made;
    size_t n;
    sp_status status = sp_metaspace_text(text, bytes,
                                         !has_blank && prepend != SP_PREPEND_NEVER &&
                                             (prepend == SP_PREPEND_ALWAYS || origin == 0),
                                         &made, &n, encode->error);

    if (status == SP_OK)
        status = encode_blank_pieces(encode, made, n);
    if (made != text)
        sp_free((char *)made);
    return status;
}

static sp_status encode_pieces(encoder *encode, const char *text, size_t bytes, size_t origin)
{
    const sp_tokenizer *tokenizer = encode->tokenizer;

    if (tokenizer->metaspace == SP_METASPACE_NORMALIZER)
        return encode_piece(encode, text, bytes);
    if (tokenizer->metaspace == SP_METASPACE_PIECES)
        return encode_metaspace(encode, text, bytes, origin);
    for (size_t at = 0; at < bytes;) {
        size_t n = sp_split_next(tokenizer->split, text + at, bytes - at);
        sp_status status = encode_piece(encode, text + at, n);

        if (status != SP_OK)
            return status;
        at += n;
    }
    return SP_OK;
}

/*
 * A stretch of text on its way through the stages, with the spans that it overlaps. `origin` is its
 * offset in the text that the spans refer to.
 */
typedef struct {
    const char *text;
    size_t bytes, origin;
    const sp_text_span *spans;
    size_t n_spans;
} stretch;

/* Advances to the first span that ends after `at`; true when `at` is in it. */
static bool in_span(stretch *part, size_t at)
{
    while (part->n_spans > 0 && part->spans->end <= part->origin + at) {
        part->spans++;
        part->n_spans--;
    }
    return part->n_spans > 0 && part->spans->begin <= part->origin + at;
}

/*
 * The added token at `at`, or NULL and how many bytes to skip. A special token outside the spans
 * still takes its text: no other added token is found inside it, as in the reference. But it takes
 * no text of a span: the template's text is read on its own.
 */
static const sp_added *find_added(const sp_tokenizer *tokenizer, stretch *part, size_t at,
                                  bool normalized, size_t *out_step)
{
    const char *text = part->text + at;
    size_t left = part->bytes - at, border;
    const sp_added *added;

    *out_step = 1;
    if (!tokenizer->added_begin[normalized][(unsigned char)*text])
        return NULL;
    added = match_added(tokenizer, text, left, normalized);
    if (!added || !added->special)
        return added;
    if (in_span(part, at)) {
        border = part->spans->end - part->origin - at;
        if (added->bytes > border)
            added = match_added(tokenizer, text, border, normalized);
        return added;
    }
    border = part->n_spans > 0 ? part->spans->begin - part->origin - at : left;
    *out_step = added->bytes < border ? added->bytes : border;
    return NULL;
}

static sp_status encode_stage(encoder *encode, stretch part, bool normalized);

/* The text between two added tokens of the first stage. Where the normaliser has changed it, the
 * spans do not apply to its bytes, unless one of them covers it all. */
static sp_status encode_raw(encoder *encode, stretch part)
{
    const sp_text_span all = {0, SIZE_MAX};
    const char *normal = part.text;
    size_t n = part.bytes;
    sp_status status = SP_OK;

    if (encode->tokenizer->nfc)
        status = sp_nfc(part.text, part.bytes, &normal, &n, encode->error);
    else if (encode->tokenizer->metaspace == SP_METASPACE_NORMALIZER)
        status = sp_metaspace_text(part.text, part.bytes,
                                   encode->tokenizer->prepend == SP_PREPEND_ALWAYS, &normal, &n,
                                   encode->error);
    if (status != SP_OK)
        return status;
    if (normal == part.text)
        return encode_stage(encode, part, true);
    if (in_span(&part, 0) && part.spans->end >= part.origin + part.bytes)
        status = encode_stage(encode, (stretch){normal, n, 0, &all, 1}, true);
    else
        status = encode_stage(encode, (stretch){normal, n, 0, NULL, 0}, true);
    sp_free((char *)normal);
    return status;
}

/* Bytes [begin, end) of `part`, whose spans are those from `begin` on. */
static sp_status encode_between(encoder *encode, stretch part, size_t begin, size_t end,
                                bool normalized)
{
    if (begin == end)
        return SP_OK;
    part.text += begin;
    part.origin += begin;
    part.bytes = end - begin;
    return normalized ? encode_pieces(encode, part.text, part.bytes, part.origin)
                      : encode_raw(encode, part);
}

/* Splits the text at the added tokens of one stage. */
static sp_status encode_stage(encoder *encode, stretch part, bool normalized)
{
    size_t begin = 0, at = 0, step;
    stretch rest = part; /* as it was at `begin` */

    while (at < part.bytes) {
        const sp_added *added = find_added(encode->tokenizer, &part, at, normalized, &step);
        sp_status status;

        if (!added) {
            at += step;
            continue;
        }
        status = encode_between(encode, rest, begin, at, normalized);
        if (status == SP_OK)
            status = add_id(encode, added->id);
        if (status != SP_OK)
            return status;
        at += added->bytes;
        begin = at;
        rest = part;
    }
    return encode_between(encode, rest, begin, part.bytes, normalized);
}

static sp_status check_size(const encoder *encode, const char *text, size_t bytes)
{
    if (bytes > SP_TOKENIZER_TEXT_BYTES_MAX)
        return sp_fail(encode->error, SP_ERR_TOO_LARGE, SP_TOKENIZER_TEXT_LARGE, NULL, -1,
                       "the text has %zu bytes; at most %zu can be encoded", bytes,
                       SP_TOKENIZER_TEXT_BYTES_MAX);
    if (sp_bound_exceeds(encode->tokenizer, text, bytes, false, encode->n_max))
        return too_many(encode);
    return SP_OK;
}

static sp_status check_text(const char *text, size_t bytes, sp_error *error)
{
    for (size_t at = 0; at < bytes;) {
        size_t n = 1;

        if ((unsigned char)text[at] >= 0x80 &&
            sp_utf8_classify((const unsigned char *)text + at, bytes - at, &n) != SP_UTF8_VALID)
            return sp_fail(error, SP_ERR_INPUT, SP_TOKENIZER_INVALID_UTF8, NULL, (int64_t)at,
                           "the text is not UTF-8 at byte %zu", at);
        at += n;
    }
    return SP_OK;
}

static sp_status check_spans(const sp_text_span *spans, size_t n_spans, size_t bytes,
                             sp_error *error)
{
    for (size_t i = 0; i < n_spans; i++)
        if (spans[i].begin >= spans[i].end || spans[i].end > bytes ||
            (i > 0 && spans[i].begin <= spans[i - 1].end))
            return sp_fail(error, SP_ERR_ARGUMENT, NULL, "spans", (int64_t)i,
                           "span %zu is empty, out of order, or leaves the text", i);
    return SP_OK;
}

/* Appends n of the post-processor's tokens around a text, from `first` on. */
static sp_status add_template(encoder *encode, int32_t first, int32_t n)
{
    sp_status status = SP_OK;

    for (int32_t i = 0; i < n && status == SP_OK; i++)
        status = add_id(encode, encode->tokenizer->template_ids[first + i]);
    return status;
}

sp_status sp_tokenizer_encode_spans(const sp_tokenizer *tokenizer, const char *text, size_t bytes,
                                    const sp_text_span *spans, size_t n_spans, bool add_special,
                                    size_t n_max, int32_t **out_ids, size_t *out_n, sp_error *error)
{
    encoder encode = {.tokenizer = tokenizer, .n_max = n_max, .error = error};
    sp_status status = check_size(&encode, text, bytes);

    if (status == SP_OK)
        status = check_text(text, bytes, error);
    if (status == SP_OK)
        status = check_spans(spans, n_spans, bytes, error);
    if (status == SP_OK && add_special)
        status = add_template(&encode, 0, tokenizer->n_before);
    if (status == SP_OK)
        status = encode_stage(&encode, (stretch){text, bytes, 0, spans, n_spans}, false);
    if (status == SP_OK && add_special)
        status = add_template(&encode, tokenizer->n_before, tokenizer->n_after);
    sp_merge_scratch_free(&encode.scratch);
    if (status != SP_OK) {
        sp_free(encode.list.ids);
        return status;
    }
    *out_ids = encode.list.ids;
    *out_n = encode.list.n;
    return SP_OK;
}

sp_status sp_tokenizer_encode(const sp_tokenizer *tokenizer, const char *text, size_t bytes,
                              bool parse_special, int32_t **out_ids, size_t *out_n, sp_error *error)
{
    const sp_text_span all = {0, bytes};

    return sp_tokenizer_encode_spans(tokenizer, text, bytes, &all, parse_special && bytes > 0,
                                     false, SIZE_MAX, out_ids, out_n, error);
}
