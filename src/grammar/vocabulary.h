/*
 * vocabulary.h: the tokens of a tokenizer as a tree of their bytes, so that all tokens that begin
 * alike are judged by one walk. It owns the tree and the bytes in it. Never changes once made: any
 * thread.
 *
 * The tree is stored in the order of that walk: a node is followed by what is below it, up to
 * `end`. Nodes [0, n) have one byte each; the root is not stored.
 */
#ifndef SP_GRAMMAR_VOCABULARY_H
#define SP_GRAMMAR_VOCABULARY_H

#include <sidepath/status.h>

#include <stddef.h>
#include <stdint.h>

/* Longer tokens are never allowed: runs of blanks or signs, which no grammar needs. */
#define SP_VOCABULARY_TOKEN_BYTES_MAX 128

typedef struct sp_vocabulary_node {
    int32_t end;      /* the next node that is not below this one */
    int32_t first_id; /* tokens that end here: ids[first_id .. the next node's first_id - 1] */
    uint16_t depth;   /* bytes before this one */
    uint8_t byte;
} sp_vocabulary_node;

typedef struct sp_vocabulary {
    sp_vocabulary_node *nodes; /* [n_nodes + 1] owned; the last one only ends the list of ids */
    int32_t *ids;              /* [n_tokens] owned */
    uint32_t *offsets; /* [n_ids + 1] owned: the bytes of each id, none for what is left out */
    char *bytes;       /* owned */
    int32_t n_nodes, n_tokens, n_ids;
} sp_vocabulary;

/* The bytes of a token, borrowed until the call returns; 0 bytes leave it out. */
typedef const char *(*sp_token_bytes_fn)(void *user, int32_t id, size_t *out_bytes);

/* Ids [0, n_ids). SP_ERR_MEMORY. *out_vocabulary is owned by the caller. */
sp_status sp_vocabulary_create(int32_t n_ids, sp_token_bytes_fn bytes_of, void *user,
                               sp_vocabulary **out_vocabulary, sp_error *error);
void sp_vocabulary_destroy(sp_vocabulary *vocabulary); /* NULL is allowed */

/* Words of 32 bits that a mask over its ids takes. */
static inline size_t sp_vocabulary_words(const sp_vocabulary *vocabulary)
{
    return ((size_t)vocabulary->n_ids + 31) / 32;
}

#endif
