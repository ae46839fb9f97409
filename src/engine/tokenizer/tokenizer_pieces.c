/*
 * Texts of whole pieces and of single characters, and the blanks of a sentencepiece vocabulary.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "engine/tokenizer/tokenizer_parts.h"

#include <string.h>

static uint64_t hash_of(const char *text, size_t bytes)
{
    uint64_t hash = bytes;

    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ (unsigned char)text[i]) * UINT64_C(0x100000001b3);
    hash *= UINT64_C(0x9e3779b97f4a7c15);
    return hash ^ hash >> 32;
}

sp_status sp_piece_table_create(size_t n_pieces, sp_piece_table *out_table, sp_error *error)
{
    size_t n_cells = 16;

    while (n_cells / 2 < n_pieces)
        n_cells *= 2;
    out_table->cells = sp_malloc(n_cells * sizeof *out_table->cells);
    if (!out_table->cells)
        return sp_fail_memory(error, n_cells * sizeof *out_table->cells, "the pieces");
    out_table->mask = n_cells - 1;
    memset(out_table->cells, 0xff, n_cells * sizeof *out_table->cells);
    return SP_OK;
}

void sp_piece_table_free(sp_piece_table *table)
{
    sp_free(table->cells);
    table->cells = NULL;
}

void sp_piece_table_add(const sp_tokenizer *tokenizer, sp_piece_table *table, int32_t id)
{
    const char *text = tokenizer->token_data + tokenizer->token_begin[id];
    uint64_t i =
        hash_of(text, tokenizer->token_begin[id + 1] - tokenizer->token_begin[id]) & table->mask;

    while (table->cells[i] >= 0)
        i = (i + 1) & table->mask;
    table->cells[i] = id;
}

static bool has_text(const sp_tokenizer *tokenizer, int32_t id, const char *text, size_t bytes)
{
    const uint32_t begin = tokenizer->token_begin[id];

    return tokenizer->token_begin[id + 1] - begin == bytes &&
           memcmp(tokenizer->token_data + begin, text, bytes) == 0;
}

int32_t sp_piece_table_find(const sp_tokenizer *tokenizer, const char *text, size_t bytes)
{
    const sp_piece_table *table = &tokenizer->pieces;
    uint64_t i = hash_of(text, bytes) & table->mask;

    while (table->cells[i] >= 0 && !has_text(tokenizer, table->cells[i], text, bytes))
        i = (i + 1) & table->mask;
    return table->cells[i];
}

/* --- Blanks ------------------------------------------------------------------------------ */

#define META       "\xe2\x96\x81" /* U+2581 */
#define META_BYTES 3

static const char *find_meta(const char *text, size_t bytes)
{
    return bytes < META_BYTES ? NULL : memmem(text, bytes, META, META_BYTES);
}

sp_status sp_metaspace_text(const char *text, size_t bytes, bool prepend, const char **out_text,
                            size_t *out_bytes, sp_error *error)
{
    const char *meta = find_meta(text, bytes), *end = text + bytes;
    char *made, *to;

    *out_text = text;
    *out_bytes = bytes;
    if (!meta && !prepend)
        return SP_OK;
    made = to = sp_malloc(bytes + 1);
    if (!made)
        return sp_fail_memory(error, bytes + 1, "the blanks of a text");
    if (prepend)
        *to++ = ' ';
    for (; meta; meta = find_meta(text, (size_t)(end - text))) {
        memcpy(to, text, (size_t)(meta - text));
        to += meta - text;
        *to++ = ' ';
        text = meta + META_BYTES;
    }
    memcpy(to, text, (size_t)(end - text));
    to += end - text;
    *out_text = made;
    *out_bytes = (size_t)(to - made);
    return SP_OK;
}
