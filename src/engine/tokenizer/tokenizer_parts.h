/*
 * tokenizer_parts.h: the internals of a tokenizer, shared by the tokenizer_*.c files only. Tables
 * are constant after the file was read, so any thread may look them up; lists and scratch belong to
 * one call.
 */
#ifndef SP_ENGINE_TOKENIZER_TOKENIZER_PARTS_H
#define SP_ENGINE_TOKENIZER_TOKENIZER_PARTS_H

#include "engine/tokenizer/tokenizer.h"
#include "engine/tokenizer/tokenizer_split.h"

/* What an id is. */
enum { SP_TOKEN_NONE = 0, SP_TOKEN_PLAIN, SP_TOKEN_ADDED, SP_TOKEN_SPECIAL };

typedef struct sp_merge {
    uint64_t pair; /* left id << 32 | right id; SP_MERGE_EMPTY in a free cell */
    uint32_t rank; /* the pair of the smallest rank is merged first */
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
    bool normalized; /* matched in the normalised text */
} sp_added;

/*
 * Which token has this text, where the text is a whole piece (ignore_merges) or one character
 * (metaspace). Open addressing over the texts in token_data; at most half of the cells are taken.
 */
typedef struct sp_piece_table {
    int32_t *cells; /* [mask + 1] ids, -1 in a free one; NULL: the tokenizer needs no table */
    uint64_t mask;
} sp_piece_table;

/*
 * Tokenizers that were converted from sentencepiece: U+2581 is the blank of the vocabulary, merges
 * begin with characters, and one without a token is spelled in bytes. Inside this tokenizer a blank
 * represents U+2581, in tokens and in text, where no other blank is left.
 */
typedef enum sp_metaspace {
    SP_METASPACE_NONE,       /* byte-level */
    SP_METASPACE_NORMALIZER, /* made by the normaliser: tokens are matched after it */
    SP_METASPACE_PIECES      /* made by the pre-tokenizer */
} sp_metaspace;

/* Which texts between two added tokens get a blank in front. */
typedef enum sp_prepend {
    SP_PREPEND_NEVER,
    SP_PREPEND_FIRST,  /* the text's own beginning, where it has none */
    SP_PREPEND_ALWAYS, /* by a pre-tokenizer: where it has none */
} sp_prepend;

#define SP_TEMPLATE_IDS_MAX 16 /* tokens around a text; the known files have one or two */

struct sp_tokenizer {
    int32_t n_ids;
    uint8_t *kind;         /* [n_ids] SP_TOKEN_* */
    uint32_t *token_begin; /* [n_ids + 1] offsets into token_data */
    char *token_data;
    int32_t byte_id[256]; /* -1: the byte has no token and is dropped */
    int32_t n_dropped;    /* bytes without a token */
    sp_merge_table merges;
    sp_piece_table pieces; /* ignore_merges: tokens; metaspace: those of one character */
    sp_added *added;       /* sorted by content, bytewise */
    size_t n_added;
    bool added_begin[2][256]; /* by `normalized`: some added token begins with this byte */
    const sp_split *split;    /* NULL: metaspace */
    bool nfc;
    sp_metaspace metaspace;
    sp_prepend prepend;
    bool blank_begins_piece;                   /* else a text between added tokens is one */
    bool ignore_merges;                        /* a piece that is a token is that token */
    bool strip_first;                          /* decoding drops a blank in front */
    int32_t template_ids[SP_TEMPLATE_IDS_MAX]; /* the post-processor's, around a text */
    int32_t n_before, n_after;                 /* n_before ids, then n_after */
    uint16_t *pair_share; /* [65536] by two bytes: the least share of a byte of a token with this
                             pair, see tokenizer_bound.c */
    uint16_t least_share; /* of a byte of the longest token */
};

/* --- tokenizer_merge.c ------------------------------------------------------------------- */

/* For at most n_merges (0 or more). *out_table is owned by the caller. SP_ERR_MEMORY. */
sp_status sp_merge_table_create(size_t n_merges, sp_merge_table *out_table, sp_error *error);
/* An all-zero struct is fine. */
void sp_merge_table_free(sp_merge_table *table);
/* False: the pair is in the table already, which is unchanged. */
bool sp_merge_table_add(sp_merge_table *table, int32_t left, int32_t right, uint32_t rank,
                        int32_t id);
/* The merge of the pair, borrowed from the table, or NULL. */
const sp_merge *sp_merge_table_find(const sp_merge_table *table, int32_t left, int32_t right);

/* A growing list of ids; all zero is empty. */
typedef struct sp_id_list {
    int32_t *ids;
    size_t n, capacity;
} sp_id_list;

/* SP_ERR_MEMORY: the list is unchanged. */
sp_status sp_id_list_add(sp_id_list *list, int32_t id, sp_error *error);

/* Scratch of the merge loop, grown to the longest piece of a text; all zero is empty. */
typedef struct sp_merge_scratch {
    int32_t *id, *next, *previous; /* [capacity] symbols, a linked list in text order */
    uint64_t *heap;                /* [2 * capacity] */
    size_t capacity;
} sp_merge_scratch;

/* An all-zero struct is fine. */
void sp_merge_scratch_free(sp_merge_scratch *scratch);

/* Appends the ids of one piece, none where all of its bytes are dropped. O(bytes * log bytes) for
 * any piece. SP_ERR_MEMORY. */
sp_status sp_merge_piece(const sp_tokenizer *tokenizer, const char *piece, size_t bytes,
                         sp_merge_scratch *scratch, sp_id_list *list, sp_error *error);

/* --- tokenizer_pieces.c ------------------------------------------------------------------ */

/* For at most n_pieces (0 or more). *out_table is owned by the caller. SP_ERR_MEMORY. */
sp_status sp_piece_table_create(size_t n_pieces, sp_piece_table *out_table, sp_error *error);
/* An all-zero struct is fine. */
void sp_piece_table_free(sp_piece_table *table);
/* Adds a token by its text, which must not be in the table yet. */
void sp_piece_table_add(const sp_tokenizer *tokenizer, sp_piece_table *table, int32_t id);
/* The id, or -1. */
int32_t sp_piece_table_find(const sp_tokenizer *tokenizer, const char *text, size_t bytes);

/*
 * Every U+2581 of a UTF-8 text becomes a blank, and with `prepend` a blank comes in front.
 * *out_text is `text` itself where nothing changes, else owned by the caller (sp_free).
 */
sp_status sp_metaspace_text(const char *text, size_t bytes, bool prepend, const char **out_text,
                            size_t *out_bytes, sp_error *error);

/* --- tokenizer_bound.c ------------------------------------------------------------------- */

/* Computes the shares of a tokenizer that has all of its tokens. SP_ERR_MEMORY. */
sp_status sp_bound_prepare(sp_tokenizer *tokenizer, sp_error *error);
/*
 * True when the text certainly has more than n_max tokens; false tells nothing. The text may be any
 * bytes. `normalized`: it is in NFC already, if the tokenizer requires that. O(bytes) at most.
 */
bool sp_bound_exceeds(const sp_tokenizer *tokenizer, const char *text, size_t bytes,
                      bool normalized, size_t n_max);

/* --- tokenizer_normal.c ------------------------------------------------------------------ */

/*
 * NFC of a UTF-8 text. *out_text is `text` itself when it is in NFC already, else owned by the
 * caller (sp_free). O(bytes) for any text. SP_ERR_MEMORY.
 */
sp_status sp_nfc(const char *text, size_t bytes, const char **out_text, size_t *out_bytes,
                 sp_error *error);

#endif
