/*
 * Reading tokenizer.json. The file's settings are checked against what this tokenizer supports
 * (tokenizer_settings.c) before a table is built; then vocabulary, merges and added tokens, each
 * entry checked.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "engine/tokenizer/tokenizer_parts.h"
#include "engine/tokenizer/tokenizer_settings.h"
#include "engine/tokenizer/unicode_class.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A file that is being read: the DOM, and the text of each id, borrowed from it. */
typedef struct {
    const json_t *model, *vocab, *merges, *added;
    const char **text;     /* [n_ids] as in the file, NULL for none */
    bool *prefixed;        /* [n_ids] added tokens that the normaliser puts a blank in front of */
    char *words;           /* scratch for the three words of a merge */
    size_t word_bytes_max; /* of the longest entry */
    sp_tokenizer *tokenizer;
} reader;

static sp_status malformed(sp_error *error, const char *subject, int64_t position, const char *why)
{
    return sp_tokenizer_malformed(error, subject, position, why);
}

static sp_status find_tables(const json_t *root, reader *read, sp_error *error)
{
    const json_t *model = json_object_get(root, "model");

    read->model = model;
    read->vocab = json_object_get(model, "vocab");
    read->merges = json_object_get(model, "merges");
    read->added = json_object_get(root, "added_tokens");
    if (!json_is_object(read->vocab))
        return malformed(error, "model.vocab", -1, "the field is missing or no object");
    if (!json_is_array(read->merges))
        return malformed(error, "model.merges", -1, "the field is missing or no array");
    if (!sp_tokenizer_absent(read->added) && !json_is_array(read->added))
        return malformed(error, "added_tokens", -1, "the field is no array");
    return SP_OK;
}

/* --- Ids --------------------------------------------------------------------------------- */

static sp_status check_id(const json_t *value, const char *token, int64_t position, sp_error *error)
{
    json_int_t id = json_integer_value(value);

    if (!json_is_integer(value))
        return malformed(error, token, position, "the id is no integer");
    if (id < 0 || id >= SP_TOKENIZER_IDS_MAX)
        return sp_fail(error, SP_ERR_INPUT, SP_TOKENIZER_MALFORMED, token, position,
                       "%s: id %lld is outside 0 .. %d", token, (long long)id,
                       SP_TOKENIZER_IDS_MAX - 1);
    return SP_OK;
}

static sp_status check_added(const json_t *entry, size_t index, sp_error *error)
{
    static const char *const refused[] = {"single_word", "lstrip", "rstrip"};
    const json_t *content = json_object_get(entry, "content");

    if (!json_is_string(content) || json_string_length(content) == 0)
        return malformed(error, "added_tokens", (int64_t)index, "an entry without content");
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        if (json_is_true(json_object_get(entry, refused[i])))
            return sp_fail(error, SP_ERR_INPUT, SP_TOKENIZER_UNSUPPORTED,
                           json_string_value(content), (int64_t)index, "%s: %s must be false",
                           json_string_value(content), refused[i]);
    return check_id(json_object_get(entry, "id"), json_string_value(content), (int64_t)index,
                    error);
}

/* Checks every id and finds the largest. */
static sp_status count_ids(reader *read, sp_error *error)
{
    json_int_t largest = -1;
    sp_status status = SP_OK;
    const char *token;
    json_t *value;
    size_t i;

    json_object_foreach((json_t *)read->vocab, token, value)
    {
        status = check_id(value, token, -1, error);
        if (status != SP_OK)
            return status;
        if (json_integer_value(value) > largest)
            largest = json_integer_value(value);
        if (strlen(token) > read->word_bytes_max)
            read->word_bytes_max = strlen(token);
    }
    json_array_foreach(read->added, i, value)
    {
        status = check_added(value, i, error);
        if (status != SP_OK)
            return status;
        if (json_integer_value(json_object_get(value, "id")) > largest)
            largest = json_integer_value(json_object_get(value, "id"));
    }
    read->tokenizer->n_ids = (int32_t)largest + 1;
    return SP_OK;
}

static sp_status place_token(reader *read, const char *token, const json_t *id_value, int64_t index,
                             int kind, sp_error *error)
{
    int32_t id = (int32_t)json_integer_value(id_value);
    const char *before = read->text[id];

    if (before && (kind == SP_TOKEN_PLAIN || strcmp(before, token) != 0))
        return sp_fail(error, SP_ERR_INPUT, SP_TOKENIZER_MALFORMED, token, index,
                       "%s: id %d belongs to another token as well", token, id);
    read->text[id] = token;
    read->tokenizer->kind[id] = (uint8_t)kind;
    return SP_OK;
}

static sp_status place_added(reader *read, const json_t *entry, int64_t index, sp_error *error)
{
    const char *token = json_string_value(json_object_get(entry, "content"));
    const json_t *id = json_object_get(entry, "id"), *known = json_object_get(read->vocab, token);
    const sp_tokenizer *tokenizer = read->tokenizer;
    bool special, normalized = false;
    sp_status status;

    if (known && !json_equal(known, id))
        return malformed(error, token, index, "the vocabulary has another id for it");
    status = sp_json_bool(entry, "special", true, false, SP_TOKENIZER_MALFORMED, &special, error);
    if (status == SP_OK)
        status = sp_json_bool(entry, "normalized", true, false, SP_TOKENIZER_MALFORMED, &normalized,
                              error);
    if (status != SP_OK)
        return status;
    read->prefixed[json_integer_value(id)] = normalized &&
                                             tokenizer->metaspace == SP_METASPACE_NORMALIZER &&
                                             tokenizer->prepend == SP_PREPEND_ALWAYS;
    return place_token(read, token, id, index, special ? SP_TOKEN_SPECIAL : SP_TOKEN_ADDED, error);
}

/* Fills text and kind. An added token may be in the vocabulary too, under the same id. */
static sp_status place_tokens(reader *read, sp_error *error)
{
    sp_status status = SP_OK;
    const char *token;
    json_t *value;
    size_t i;

    json_object_foreach((json_t *)read->vocab, token, value)
    {
        status = place_token(read, token, value, -1, SP_TOKEN_PLAIN, error);
        if (status != SP_OK)
            return status;
    }
    json_array_foreach(read->added, i, value)
    {
        status = place_added(read, value, (int64_t)i, error);
        if (status != SP_OK)
            return status;
    }
    return status;
}

/* --- Bytes of tokens --------------------------------------------------------------------- */

/*
 * The vocabulary writes each byte as one printable character: itself where Latin-1 has a printable
 * one, else U+0100 and up, in the order of the bytes.
 */
static uint32_t byte_to_code(unsigned byte)
{
    if (byte <= 0x20)
        return 0x100 + byte;
    if (byte >= 0x7f && byte <= 0xa0)
        return 0x121 + (byte - 0x7f);
    return byte == 0xad ? 0x143 : byte;
}

/* The byte that a character represents, or -1. */
static int code_to_byte(uint32_t code)
{
    if (code >= 0x100 && code <= 0x120)
        return (int)(code - 0x100);
    if (code >= 0x121 && code <= 0x142)
        return (int)(code - 0x121 + 0x7f);
    if (code == 0x143)
        return 0xad;
    return code < 0x100 && byte_to_code(code) == code ? (int)code : -1;
}

/*
 * The bytes of a token of a byte-level vocabulary, at most strlen(text); returns their number, 0
 * where a character represents no byte.
 */
static size_t byte_level_bytes(const char *text, char *out)
{
    size_t n = 0, bytes = strlen(text);
    uint32_t code;

    for (size_t at = 0; at < bytes;) {
        int byte;

        at += sp_utf8_read((const unsigned char *)text + at, &code);
        byte = code_to_byte(code);
        if (byte < 0)
            return 0;
        out[n++] = (char)byte;
    }
    return n;
}

static int hex_digit(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                  : -1;
}

/* The byte that "<0xHH>" spells, or -1. */
static int spelled_byte(const char *text)
{
    int high, low;

    if (strlen(text) != 6 || strncmp(text, "<0x", 3) != 0 || text[5] != '>')
        return -1;
    high = hex_digit(text[3]);
    low = hex_digit(text[4]);
    return high < 0 || low < 0 ? -1 : high * 16 + low;
}

/*
 * The bytes of a token, at most strlen(text); returns their number. In a byte-level vocabulary a
 * text with a character that represents no byte is taken literally: added tokens are plain text.
 */
static sp_status token_to_bytes(const sp_tokenizer *tokenizer, const char *text, char *out,
                                size_t *out_bytes, sp_error *error)
{
    const int byte = spelled_byte(text);
    const char *made = text;
    sp_status status;

    *out_bytes = tokenizer->metaspace ? 0 : byte_level_bytes(text, out);
    if (*out_bytes > 0)
        return SP_OK;
    *out_bytes = strlen(text);
    if (tokenizer->metaspace && byte >= 0) {
        *out = (char)byte;
        *out_bytes = 1;
        return SP_OK;
    }
    if (tokenizer->metaspace) {
        status = sp_metaspace_text(text, *out_bytes, false, &made, out_bytes, error);
        if (status != SP_OK)
            return status;
    }
    memcpy(out, made, *out_bytes);
    if (made != text)
        sp_free((char *)made);
    return SP_OK;
}

static sp_status fill_token_data(reader *read, sp_error *error)
{
    sp_tokenizer *tokenizer = read->tokenizer;
    size_t bytes = 1, n = 0;

    for (int32_t id = 0; id < tokenizer->n_ids; id++)
        bytes += read->text[id] ? strlen(read->text[id]) + read->prefixed[id] : 0;
    tokenizer->token_data = sp_malloc(bytes);
    if (!tokenizer->token_data)
        return sp_fail_memory(error, bytes, "the vocabulary");
    for (int32_t id = 0; id < tokenizer->n_ids; id++) {
        size_t added = 0;
        sp_status status = SP_OK;

        tokenizer->token_begin[id] = (uint32_t)n;
        if (read->prefixed[id])
            tokenizer->token_data[n++] = ' ';
        if (read->text[id])
            status =
                token_to_bytes(tokenizer, read->text[id], tokenizer->token_data + n, &added, error);
        if (status != SP_OK)
            return status;
        n += added;
    }
    tokenizer->token_begin[tokenizer->n_ids] = (uint32_t)n;
    return SP_OK;
}

static int32_t vocab_id(const reader *read, const char *word)
{
    const json_t *id = json_object_get(read->vocab, word);

    return id ? (int32_t)json_integer_value(id) : -1;
}

/* How the vocabulary writes the token of a single byte. `out` has room for 7 bytes. */
static void byte_word(const sp_tokenizer *tokenizer, unsigned byte, char *out)
{
    uint32_t code = byte_to_code(byte);

    if (tokenizer->metaspace) {
        snprintf(out, 7, "<0x%02X>", byte);
        return;
    }
    memset(out, 0, 3);
    out[0] = (char)code;
    if (code >= 0x80) {
        out[0] = (char)(0xc0 | code >> 6);
        out[1] = (char)(0x80 | (code & 0x3f));
    }
}

/*
 * The reference drops a byte that has no token, which the rarest of SmolLM2 have not; where the
 * file defines another treatment than to drop it, it is refused.
 */
static sp_status fill_byte_ids(reader *read, sp_error *error)
{
    sp_tokenizer *tokenizer = read->tokenizer;

    for (unsigned byte = 0; byte < 256; byte++) {
        char word[7];

        byte_word(tokenizer, byte, word);
        tokenizer->byte_id[byte] = vocab_id(read, word);
        if (tokenizer->byte_id[byte] >= 0)
            continue;
        if (tokenizer->metaspace || json_is_true(json_object_get(read->model, "byte_fallback")) ||
            !sp_tokenizer_absent(json_object_get(read->model, "unk_token")))
            return sp_fail(error, SP_ERR_INPUT, SP_TOKENIZER_MALFORMED, "model.vocab", byte,
                           "model.vocab: byte 0x%02x has no token", byte);
        tokenizer->n_dropped++;
    }
    return tokenizer->n_dropped < 256
               ? SP_OK
               : malformed(error, "model.vocab", -1, "no byte at all has a token");
}

/* Whether a word of the vocabulary can be a piece: see sp_piece_table. A special token cannot, so
 * that plain text does not become one. */
static bool is_piece(const reader *read, const char *word, int32_t id)
{
    const sp_tokenizer *tokenizer = read->tokenizer;
    const size_t bytes = tokenizer->token_begin[id + 1] - tokenizer->token_begin[id];
    uint32_t code;

    if (tokenizer->kind[id] == SP_TOKEN_SPECIAL || bytes == 0)
        return false;
    if (!tokenizer->metaspace)
        return byte_level_bytes(word, read->words) > 0;
    return strcmp(word, " ") != 0 && spelled_byte(word) < 0 &&
           sp_utf8_read((const unsigned char *)word, &code) == strlen(word);
}

static sp_status fill_pieces(reader *read, sp_error *error)
{
    sp_tokenizer *tokenizer = read->tokenizer;
    const char *word;
    json_t *value;
    sp_status status;

    if (!tokenizer->metaspace && !tokenizer->ignore_merges)
        return SP_OK;
    status = sp_piece_table_create(json_object_size(read->vocab), &tokenizer->pieces, error);
    if (status != SP_OK)
        return status;
    json_object_foreach((json_t *)read->vocab, word, value)
    {
        if (is_piece(read, word, (int32_t)json_integer_value(value)))
            sp_piece_table_add(tokenizer, &tokenizer->pieces, (int32_t)json_integer_value(value));
    }
    if (tokenizer->metaspace && sp_piece_table_find(tokenizer, " ", 1) < 0)
        return malformed(error, "model.vocab", -1, "U+2581 has no token");
    return SP_OK;
}

/* --- Merges ------------------------------------------------------------------------------ */

/* Splits a merge, "a b" or ["a", "b"], into its two words. */
static bool merge_words(const json_t *merge, const char **out_left, size_t *out_left_bytes,
                        const char **out_right)
{
    const char *text = json_string_value(merge), *blank;

    if (json_array_size(merge) == 2) {
        *out_left = json_string_value(json_array_get(merge, 0));
        *out_right = json_string_value(json_array_get(merge, 1));
        *out_left_bytes = *out_left ? strlen(*out_left) : 0;
        return *out_left && *out_right;
    }
    blank = text ? strchr(text, ' ') : NULL;
    if (!blank || strchr(blank + 1, ' '))
        return false;
    *out_left = text;
    *out_left_bytes = (size_t)(blank - text);
    *out_right = blank + 1;
    return true;
}

/* Merges that make a special token, which sentencepiece's conversions had for a while, are skipped:
 * plain text must not become one. */
static sp_status read_merge(reader *read, size_t rank, sp_error *error)
{
    const char *left, *right;
    size_t left_bytes, right_bytes;
    int32_t left_id, right_id, id;

    if (!merge_words(json_array_get(read->merges, rank), &left, &left_bytes, &right))
        return malformed(error, "model.merges", (int64_t)rank, "an entry is no pair of tokens");
    right_bytes = strlen(right);
    if (left_bytes > read->word_bytes_max || right_bytes > read->word_bytes_max)
        return malformed(error, "model.merges", (int64_t)rank,
                         "an entry is longer than any token of the vocabulary");
    memcpy(read->words, left, left_bytes);
    read->words[left_bytes] = '\0';
    left_id = vocab_id(read, read->words);
    right_id = vocab_id(read, right);
    memcpy(read->words + left_bytes, right, right_bytes + 1);
    id = vocab_id(read, read->words);
    if (left_id < 0 || right_id < 0 || id < 0 || left_bytes == 0 || right_bytes == 0)
        return sp_fail(error, SP_ERR_INPUT, SP_TOKENIZER_MALFORMED, "model.merges", (int64_t)rank,
                       "merge %zu joins %.*s and %s to %s: not all three are in the vocabulary",
                       rank, (int)left_bytes, left, right, read->words);
    if (read->tokenizer->metaspace && spelled_byte(read->words) >= 0)
        return malformed(error, "model.merges", (int64_t)rank, "an entry makes a byte's token");
    if (read->tokenizer->kind[id] == SP_TOKEN_SPECIAL)
        return SP_OK;
    if (!sp_merge_table_add(&read->tokenizer->merges, left_id, right_id, (uint32_t)rank, id))
        return malformed(error, "model.merges", (int64_t)rank, "the same pair stands there twice");
    return SP_OK;
}

static sp_status read_merges(reader *read, sp_error *error)
{
    size_t n_merges = json_array_size(read->merges);
    sp_status status = sp_merge_table_create(n_merges, &read->tokenizer->merges, error);

    for (size_t rank = 0; rank < n_merges && status == SP_OK; rank++)
        status = read_merge(read, rank, error);
    return status;
}

/* --- Added tokens ------------------------------------------------------------------------ */

static int compare_added(const void *left, const void *right)
{
    return strcmp(((const sp_added *)left)->content, ((const sp_added *)right)->content);
}

static sp_status read_added_token(sp_tokenizer *tokenizer, const json_t *entry, sp_error *error)
{
    const char *content = json_string_value(json_object_get(entry, "content"));
    int32_t id = (int32_t)json_integer_value(json_object_get(entry, "id"));
    sp_added *added = &tokenizer->added[tokenizer->n_added];
    const char *text = content;
    size_t bytes = strlen(content);
    bool normalized;
    sp_status status =
        sp_json_bool(entry, "normalized", true, false, SP_TOKENIZER_MALFORMED, &normalized, error);

    if (status == SP_OK && normalized && tokenizer->nfc)
        status = sp_nfc(content, bytes, &text, &bytes, error);
    if (status == SP_OK && normalized && tokenizer->metaspace == SP_METASPACE_NORMALIZER)
        status = sp_metaspace_text(content, bytes, tokenizer->prepend == SP_PREPEND_ALWAYS, &text,
                                   &bytes, error);
    if (status != SP_OK)
        return status;
    *added = (sp_added){sp_strndup(text, bytes), bytes, id, tokenizer->kind[id] == SP_TOKEN_SPECIAL,
                        normalized};
    if (text != content)
        sp_free((char *)text);
    if (!added->content)
        return sp_fail_memory(error, bytes, "an added token");
    tokenizer->n_added++;
    tokenizer->added_begin[normalized][(unsigned char)*added->content] = true;
    return SP_OK;
}

static sp_status read_added(reader *read, sp_error *error)
{
    sp_tokenizer *tokenizer = read->tokenizer;
    size_t n = json_array_size(read->added);
    sp_status status = SP_OK;

    if (n == 0)
        return SP_OK;
    tokenizer->added = sp_calloc(n, sizeof *tokenizer->added);
    if (!tokenizer->added)
        return sp_fail_memory(error, n * sizeof *tokenizer->added, "the added tokens");
    for (size_t i = 0; i < n && status == SP_OK; i++)
        status = read_added_token(tokenizer, json_array_get(read->added, i), error);
    if (status != SP_OK)
        return status;
    qsort(tokenizer->added, n, sizeof *tokenizer->added, compare_added);
    for (size_t i = 1; i < n; i++)
        if (compare_added(&tokenizer->added[i - 1], &tokenizer->added[i]) == 0)
            return malformed(error, tokenizer->added[i].content, -1,
                             "the same text is added twice");
    return SP_OK;
}

/* --- All of it --------------------------------------------------------------------------- */

static sp_status allocate_ids(reader *read, sp_error *error)
{
    sp_tokenizer *tokenizer = read->tokenizer;
    size_t n = (size_t)tokenizer->n_ids;

    tokenizer->kind = sp_calloc(n + 1, sizeof *tokenizer->kind);
    tokenizer->token_begin = sp_calloc(n + 1, sizeof *tokenizer->token_begin);
    read->text = sp_calloc(n + 1, sizeof *read->text);
    read->prefixed = sp_calloc(n + 1, sizeof *read->prefixed);
    read->words = sp_malloc(2 * read->word_bytes_max + 1);
    if (!tokenizer->kind || !tokenizer->token_begin || !read->text || !read->prefixed ||
        !read->words)
        return sp_fail_memory(error, (n + 1) * sizeof *read->text, "the vocabulary");
    return SP_OK;
}

/* Tokens around a text must be tokens of the file. */
static sp_status check_template(const sp_tokenizer *tokenizer, sp_error *error)
{
    for (int32_t i = 0; i < tokenizer->n_before + tokenizer->n_after; i++)
        if (tokenizer->template_ids[i] >= tokenizer->n_ids ||
            tokenizer->kind[tokenizer->template_ids[i]] == SP_TOKEN_NONE)
            return sp_fail(error, SP_ERR_INPUT, SP_TOKENIZER_MALFORMED, "post_processor", -1,
                           "post_processor: id %d of the template is no token",
                           tokenizer->template_ids[i]);
    return SP_OK;
}

static sp_status read_tables(reader *read, sp_error *error)
{
    sp_status status = count_ids(read, error);

    if (status == SP_OK)
        status = allocate_ids(read, error);
    if (status == SP_OK)
        status = place_tokens(read, error);
    if (status == SP_OK)
        status = check_template(read->tokenizer, error);
    if (status == SP_OK)
        status = fill_byte_ids(read, error);
    if (status == SP_OK)
        status = fill_token_data(read, error);
    if (status == SP_OK)
        status = fill_pieces(read, error);
    if (status == SP_OK)
        status = read_merges(read, error);
    if (status == SP_OK)
        status = read_added(read, error);
    if (status == SP_OK)
        status = sp_bound_prepare(read->tokenizer, error);
    return status;
}

void sp_tokenizer_close(sp_tokenizer *tokenizer)
{
    if (!tokenizer)
        return;
    for (size_t i = 0; i < tokenizer->n_added; i++)
        sp_free(tokenizer->added[i].content);
    sp_free(tokenizer->added);
    sp_merge_table_free(&tokenizer->merges);
    sp_piece_table_free(&tokenizer->pieces);
    sp_free(tokenizer->pair_share);
    sp_free(tokenizer->token_data);
    sp_free(tokenizer->token_begin);
    sp_free(tokenizer->kind);
    sp_free(tokenizer);
}

sp_status sp_tokenizer_parse(const char *bytes, size_t n_bytes, const char *subject,
                             sp_tokenizer **out_tokenizer, sp_error *error)
{
    reader read = {0};
    json_t *root;
    sp_status status =
        sp_json_parse(bytes, n_bytes, subject, SP_TOKENIZER_MALFORMED, NULL, &root, error);

    if (status != SP_OK)
        return status;
    read.tokenizer = sp_calloc(1, sizeof *read.tokenizer);
    if (!read.tokenizer)
        status = sp_fail_memory(error, sizeof *read.tokenizer, "a tokenizer");
    if (status == SP_OK)
        status = sp_tokenizer_read_settings(root, read.tokenizer, error);
    if (status == SP_OK)
        status = find_tables(root, &read, error);
    if (status == SP_OK)
        status = read_tables(&read, error);
    sp_free(read.words);
    sp_free(read.prefixed);
    sp_free((void *)read.text);
    json_decref(root);
    if (status != SP_OK) {
        sp_tokenizer_close(read.tokenizer);
        return status;
    }
    *out_tokenizer = read.tokenizer;
    return SP_OK;
}

sp_status sp_tokenizer_open(const char *model_directory, sp_tokenizer **out_tokenizer,
                            sp_error *error)
{
    char *path = sp_path_join(model_directory, "tokenizer.json");
    char *bytes;
    size_t n_bytes;
    sp_status status;

    if (!path)
        return sp_fail_memory(error, strlen(model_directory), "a file name");
    status = sp_file_read_all(path, SP_TOKENIZER_FILE_BYTES_MAX, &bytes, &n_bytes, error);
    if (status == SP_OK) {
        status = sp_tokenizer_parse(bytes, n_bytes, path, out_tokenizer, error);
        sp_free(bytes);
    }
    sp_free(path);
    return status;
}
