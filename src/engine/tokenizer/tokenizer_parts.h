/*
 * tokenizer_parts.h: the inside of a tokenizer, shared by the tokenizer_*.c files only.
 */
#ifndef SP_ENGINE_TOKENIZER_TOKENIZER_PARTS_H
#define SP_ENGINE_TOKENIZER_TOKENIZER_PARTS_H

#include "engine/tokenizer/tokenizer.h"
#include "engine/tokenizer/tokenizer_split.h"

/* What an id is. */
enum { SP_TOKEN_NONE = 0, SP_TOKEN_PLAIN, SP_TOKEN_ADDED, SP_TOKEN_SPECIAL };

typedef struct sp_merge {
    uint64_t pair; /* left id << 32 | right id; SP_MERGE_EMPTY in a free cell */
    uint32_t rank; /* the smallest rank of a text is merged first */
    int32_t id;    /* of the joined token */
} sp_merge;

#define SP_MERGE_EMPTY UINT64_MAX

/* Open addressing, a power of two cells, at most half of them taken. */
typedef struct sp_merge_table {
    sp_merge *cells;
    uint64_t mask; /* cells - 1 */
} sp_merge_table;

typedef struct sp_added {
    char *content; /* owned; after the normaliser where `normalized` */
    size_t bytes;
    int32_t id;
    bool special;
    bool normalized; /* looked for in the normalised text */
} sp_added;

struct sp_tokenizer {
    int32_t n_ids;
    uint8_t *kind;         /* [n_ids] SP_TOKEN_* */
    uint32_t *token_begin; /* [n_ids + 1] offsets into token_data */
    char *token_data;
    int32_t byte_id[256];
    sp_merge_table merges;
    sp_added *added; /* sorted by content, bytewise */
    size_t n_added;
    const sp_split *split;
    bool nfc;
    uint16_t *pair_share; /* [65536] by two bytes: the least that a byte of a token with this pair
                             counts, see tokenizer_bound.c */
    uint16_t least_share; /* of a byte of the longest token */
};

/* --- tokenizer_merge.c ------------------------------------------------------------------- */

sp_status sp_merge_table_create(size_t n_merges, sp_merge_table *out_table, sp_error *error);
void sp_merge_table_free(sp_merge_table *table);
/* Returns false when the pair is there already. */
bool sp_merge_table_add(sp_merge_table *table, int32_t left, int32_t right, uint32_t rank,
                        int32_t id);
const sp_merge *sp_merge_table_find(const sp_merge_table *table, int32_t left, int32_t right);

/* A growing list of ids. */
typedef struct sp_id_list {
    int32_t *ids;
    size_t n, capacity;
} sp_id_list;

sp_status sp_id_list_add(sp_id_list *list, int32_t id, sp_error *error);

/* Scratch of the merge loop, grown to the longest piece of a text. */
typedef struct sp_merge_scratch {
    int32_t *id, *next, *previous; /* [capacity] symbols, a linked list in text order */
    uint64_t *heap;                /* [2 * capacity] */
    size_t capacity;
} sp_merge_scratch;

void sp_merge_scratch_free(sp_merge_scratch *scratch);

/* Appends the ids of one piece. O(bytes * log bytes), whatever the piece. */
sp_status sp_merge_piece(const sp_tokenizer *tokenizer, const char *piece, size_t bytes,
                         sp_merge_scratch *scratch, sp_id_list *list, sp_error *error);

/* --- tokenizer_bound.c ------------------------------------------------------------------- */

/* Fills the shares of a tokenizer that has all of its tokens. */
sp_status sp_bound_prepare(sp_tokenizer *tokenizer, sp_error *error);
/*
 * True when the text surely has more than n_max tokens; false says nothing. Any bytes will do.
 * `normalized`: the text is in NFC already, if the tokenizer asks for that. O(bytes) at most.
 */
bool sp_bound_exceeds(const sp_tokenizer *tokenizer, const char *text, size_t bytes,
                      bool normalized, size_t n_max);

/* --- tokenizer_normal.c ------------------------------------------------------------------ */

/*
 * NFC of a UTF-8 text. *out_text is `text` itself when it is in NFC already, else owned by the
 * caller (sp_free). O(bytes), whatever the text.
 */
sp_status sp_nfc(const char *text, size_t bytes, const char **out_text, size_t *out_bytes,
                 sp_error *error);

#endif
