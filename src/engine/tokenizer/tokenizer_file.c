/*
 * Reading tokenizer.json. What the file asks for is checked against what this tokenizer does,
 * before a table is built; then vocabulary, merges and added tokens, each entry checked.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "engine/tokenizer/tokenizer_parts.h"
#include "engine/tokenizer/unicode_class.h"

#include <stdlib.h>
#include <string.h>

/* A file that is being read: the DOM, and the text of each id, borrowed from it. */
typedef struct {
    const json_t *vocab, *merges, *added;
    const char **text;     /* [n_ids] as in the file, NULL for none */
    char *words;           /* scratch for the three words of a merge */
    size_t word_bytes_max; /* of the longest entry */
    sp_tokenizer *tokenizer;
} reader;

static sp_status unsupported(sp_error *error, const char *field, const char *why)
{
    return sp_fail(error, SP_ERR_INPUT, SP_TOKENIZER_UNSUPPORTED, field, -1, "%s: %s", field, why);
}

static sp_status malformed(sp_error *error, const char *subject, int64_t position, const char *why)
{
    return sp_fail(error, SP_ERR_INPUT, SP_TOKENIZER_MALFORMED, subject, position, "%s: %s",
                   subject, why);
}

/* --- What the file asks for -------------------------------------------------------------- */

static bool type_is(const json_t *object, const char *type)
{
    const char *found = json_string_value(json_object_get(object, "type"));

    return found && strcmp(found, type) == 0;
}

static bool is_null(const json_t *value)
{
    return !value || json_is_null(value);
}

static sp_status check_normalizer(const json_t *root, bool *out_nfc, sp_error *error)
{
    const json_t *normalizer = json_object_get(root, "normalizer");

    *out_nfc = type_is(normalizer, "NFC");
    if (*out_nfc || is_null(normalizer))
        return SP_OK;
    return unsupported(error, "normalizer", "only NFC or null");
}

static sp_status check_byte_level(const json_t *step, sp_error *error)
{
    const char *field = "pre_tokenizer";

    if (!type_is(step, "ByteLevel"))
        return unsupported(error, field, "the second step must be ByteLevel");
    if (!json_is_false(json_object_get(step, "add_prefix_space")))
        return unsupported(error, field, "add_prefix_space must be false");
    if (!json_is_false(json_object_get(step, "use_regex")))
        return unsupported(error, field, "use_regex must be false behind a Split");
    return SP_OK;
}

static sp_status check_pre_tokenizer(const json_t *root, const sp_split **out_split,
                                     sp_error *error)
{
    const char *field = "pre_tokenizer", *pattern, *behavior;
    const json_t *outer = json_object_get(root, field);
    const json_t *steps = json_object_get(outer, "pretokenizers");
    const json_t *first = json_array_get(steps, 0);

    if (!type_is(outer, "Sequence") || json_array_size(steps) != 2 || !type_is(first, "Split"))
        return unsupported(error, field, "only a Sequence of Split and ByteLevel");
    behavior = json_string_value(json_object_get(first, "behavior"));
    if (!behavior || strcmp(behavior, "Isolated") != 0 ||
        !json_is_false(json_object_get(first, "invert")))
        return unsupported(error, field, "only an Isolated Split that is not inverted");
    pattern = json_string_value(json_object_get(json_object_get(first, "pattern"), "Regex"));
    *out_split = pattern ? sp_split_find(pattern) : NULL;
    if (!*out_split)
        return unsupported(error, field,
                           "the Split has another pattern than those that this build knows");
    return check_byte_level(json_array_get(steps, 1), error);
}

/* An affix that is absent, null or empty. */
static bool is_no_affix(const json_t *model, const char *field)
{
    const json_t *value = json_object_get(model, field);

    return is_null(value) || (json_is_string(value) && json_string_length(value) == 0);
}

static sp_status check_model(const json_t *model, sp_error *error)
{
    const json_t *dropout = json_object_get(model, "dropout");

    if (!json_is_object(model))
        return malformed(error, "model", -1, "the field is missing or no object");
    if (!is_null(json_object_get(model, "type")) && !type_is(model, "BPE"))
        return unsupported(error, "model.type", "only BPE");
    if (!is_null(dropout) && !(json_is_number(dropout) && json_number_value(dropout) == 0.0))
        return unsupported(error, "model.dropout", "ids must not be random: only null or 0");
    if (!is_no_affix(model, "continuing_subword_prefix"))
        return unsupported(error, "model.continuing_subword_prefix", "only null or empty");
    if (!is_no_affix(model, "end_of_word_suffix"))
        return unsupported(error, "model.end_of_word_suffix", "only null or empty");
    if (json_is_true(json_object_get(model, "ignore_merges")))
        return unsupported(error, "model.ignore_merges", "only false");
    return SP_OK;
}

static sp_status check_settings(const json_t *root, reader *read, sp_error *error)
{
    const json_t *model = json_object_get(root, "model");
    sp_status status = check_model(model, error);

    if (status == SP_OK)
        status = check_normalizer(root, &read->tokenizer->nfc, error);
    if (status == SP_OK)
        status = check_pre_tokenizer(root, &read->tokenizer->split, error);
    if (status != SP_OK)
        return status;
    if (!type_is(json_object_get(root, "decoder"), "ByteLevel"))
        return unsupported(error, "decoder", "only ByteLevel");
    read->vocab = json_object_get(model, "vocab");
    read->merges = json_object_get(model, "merges");
    read->added = json_object_get(root, "added_tokens");
    if (!json_is_object(read->vocab))
        return malformed(error, "model.vocab", -1, "the field is missing or no object");
    if (!json_is_array(read->merges))
        return malformed(error, "model.merges", -1, "the field is missing or no array");
    if (!is_null(read->added) && !json_is_array(read->added))
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

/* Fills text and kind. An added token may stand in the vocabulary too, under the same id. */
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
        const json_t *known;
        bool special;

        token = json_string_value(json_object_get(value, "content"));
        known = json_object_get(read->vocab, token);
        if (known && !json_equal(known, json_object_get(value, "id")))
            return malformed(error, token, (int64_t)i, "the vocabulary has another id for it");
        status =
            sp_json_bool(value, "special", true, false, SP_TOKENIZER_MALFORMED, &special, error);
        if (status == SP_OK)
            status = place_token(read, token, json_object_get(value, "id"), (int64_t)i,
                                 special ? SP_TOKEN_SPECIAL : SP_TOKEN_ADDED, error);
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

/* The byte that a character stands for, or -1. */
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
 * The bytes of a token, at most strlen(text); returns their number. A text with a character that
 * stands for no byte is taken as it is: added tokens are plain text.
 */
static size_t token_to_bytes(const char *text, char *out)
{
    size_t n = 0, bytes = strlen(text);
    uint32_t code;

    for (size_t at = 0; at < bytes;) {
        int byte;

        at += sp_utf8_read((const unsigned char *)text + at, &code);
        byte = code_to_byte(code);
        if (byte < 0) {
            memcpy(out, text, bytes);
            return bytes;
        }
        out[n++] = (char)byte;
    }
    return n;
}

static sp_status fill_token_data(reader *read, sp_error *error)
{
    sp_tokenizer *tokenizer = read->tokenizer;
    size_t bytes = 1, n = 0;

    for (int32_t id = 0; id < tokenizer->n_ids; id++)
        bytes += read->text[id] ? strlen(read->text[id]) : 0;
    tokenizer->token_data = sp_malloc(bytes);
    if (!tokenizer->token_data)
        return sp_fail_memory(error, bytes, "the vocabulary");
    for (int32_t id = 0; id < tokenizer->n_ids; id++) {
        tokenizer->token_begin[id] = (uint32_t)n;
        if (read->text[id])
            n += token_to_bytes(read->text[id], tokenizer->token_data + n);
    }
    tokenizer->token_begin[tokenizer->n_ids] = (uint32_t)n;
    return SP_OK;
}

static sp_status fill_byte_ids(reader *read, sp_error *error)
{
    for (unsigned byte = 0; byte < 256; byte++) {
        uint32_t code = byte_to_code(byte);
        char word[3] = {(char)code, 0, 0};
        const json_t *id;

        if (code >= 0x80) {
            word[0] = (char)(0xc0 | code >> 6);
            word[1] = (char)(0x80 | (code & 0x3f));
        }
        id = json_object_get(read->vocab, word);
        if (!id)
            return sp_fail(error, SP_ERR_INPUT, SP_TOKENIZER_MALFORMED, "model.vocab", byte,
                           "model.vocab: byte 0x%02x has no token", byte);
        read->tokenizer->byte_id[byte] = (int32_t)json_integer_value(id);
    }
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

static int32_t vocab_id(const reader *read, const char *word)
{
    const json_t *id = json_object_get(read->vocab, word);

    return id ? (int32_t)json_integer_value(id) : -1;
}

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
    if (!sp_merge_table_add(&read->tokenizer->merges, left_id, right_id, (uint32_t)rank, id))
        return malformed(error, "model.merges", (int64_t)rank, "the same pair stands there twice");
    return SP_OK;
}

static sp_status read_merges(reader *read, sp_error *error)
{
    size_t n_merges = json_array_size(read->merges);
    size_t bytes = 2 * read->word_bytes_max + 1;
    sp_status status = sp_merge_table_create(n_merges, &read->tokenizer->merges, error);

    if (status != SP_OK)
        return status;
    read->words = sp_malloc(bytes);
    if (!read->words)
        return sp_fail_memory(error, bytes, "the merges");
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
    if (status != SP_OK)
        return status;
    *added = (sp_added){sp_strndup(text, bytes), bytes, id, tokenizer->kind[id] == SP_TOKEN_SPECIAL,
                        normalized};
    if (text != content)
        sp_free((char *)text);
    if (!added->content)
        return sp_fail_memory(error, bytes, "an added token");
    tokenizer->n_added++;
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
    if (!tokenizer->kind || !tokenizer->token_begin || !read->text)
        return sp_fail_memory(error, (n + 1) * sizeof *read->text, "the vocabulary");
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
        status = fill_byte_ids(read, error);
    if (status == SP_OK)
        status = fill_token_data(read, error);
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
        status = check_settings(root, &read, error);
    if (status == SP_OK)
        status = read_tables(&read, error);
    sp_free(read.words);
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
