/*
 * token_world.h: many slots whose adapters replace rows of the embeddings and of the head, have
 * pairs there, both or neither; one plan over rows of all of them; and the reference in double that
 * embeddings and logits are held against.
 */
#ifndef SP_TEST_SUPPORT_TOKEN_WORLD_H
#define SP_TEST_SUPPORT_TOKEN_WORLD_H

#include "support/hand.h"

#include <sidepath/delta.h>

enum {
    TOKEN_VOCAB = 83,
    TOKEN_HIDDEN_MAX = 1032,
    TOKEN_SLOTS = 40, /* more than one round takes GEMMs */
    TOKEN_ROWS = 300,
    TOKEN_RANK = 11
};

/* What the adapter of one slot does. */
typedef struct token_kind {
    bool rows, pairs;
} token_kind;

typedef struct token_world {
    sp_dtype dtype;
    int32_t hidden, pad; /* columns behind each row of x, y and logits */
    site_dims sites[3];  /* embed_tokens, lm_head, q_proj */
    sp_geometry *geometry;
    sp_layout *layout;
    sp_device *device;
    bool owns_device;
    sp_pool *pool;
    sp_exec *exec;
    sp_delta *delta;
    sp_plan *plan;
    void *served; /* [TOKEN_VOCAB, hidden] */
    token_kind kinds[TOKEN_SLOTS];
    hand_adapter *adapters[TOKEN_SLOTS]; /* site 0: embed_tokens, 1: lm_head, where it has pairs */
    double rows[TOKEN_SLOTS][TOKEN_VOCAB][TOKEN_HIDDEN_MAX];
    bool is_replaced[TOKEN_SLOTS][TOKEN_VOCAB];
    int32_t row_slot[TOKEN_ROWS], token[TOKEN_ROWS];
    float row_scale[TOKEN_ROWS];
} token_world;

/* device NULL: the CPU, at this level. */
token_world *token_world_create(sp_device *device, sp_dtype dtype, int32_t hidden, int32_t pad,
                                const char *level, uint64_t seed);
void token_world_destroy(token_world *w);

/* Another adapter for the slot, of its kind; the reference goes by it from here on. Owned by the
 * caller. */
sp_image *token_world_image(token_world *w, int32_t slot, sp_test_random *random);

/* sp_delta_embed and sp_delta_head on host memory: y is [TOKEN_ROWS, hidden + pad], x as well,
 * logits [TOKEN_ROWS, TOKEN_VOCAB + pad]. */
typedef void (*token_embed_fn)(token_world *w, void *y, size_t y_bytes);
typedef void (*token_head_fn)(token_world *w, const void *x, float *logits, size_t logits_bytes);

/* Random values in, what the call makes of them against the reference; pads must stay. */
void token_world_check_embeddings(token_world *w, token_embed_fn embed, sp_test_random *random);
void token_world_check_logits(token_world *w, token_head_fn head, sp_test_random *random);

#endif
