/*
 * grammar_world.h: the vocabulary of fixtures/tokenizer512, grammars over it, and outputs that are
 * drawn from their masks.
 */
#ifndef SP_TEST_SUPPORT_GRAMMAR_WORLD_H
#define SP_TEST_SUPPORT_GRAMMAR_WORLD_H

#include "base/text.h"
#include "engine/tokenizer/tokenizer.h"
#include "grammar/compile.h"

#include "support/test.h"

enum { WORLD_WORDS = 16, WORLD_IDS = 512 };

typedef struct grammar_world {
    sp_tokenizer *tokenizer;
    sp_vocabulary *vocabulary; /* without special tokens */
} grammar_world;

void grammar_world_open(grammar_world *world);
void grammar_world_close(grammar_world *world);

sp_status grammar_world_try(const grammar_world *world, sp_grammar_kind kind, const char *text,
                            sp_grammar **out_grammar, sp_error *error);
/* Asserts that it compiles. */
sp_grammar *grammar_world_compile(const grammar_world *world, sp_grammar_kind kind,
                                  const char *text);

static inline bool world_allows(const uint32_t *mask, int32_t id)
{
    return mask[id / 32] >> (id % 32) & 1;
}

/*
 * Draws tokens [at most tokens_max] until the output is complete and nothing can follow, or it is
 * complete and a coin says so. Returns whether it was complete; its text is added to *out_text.
 */
bool grammar_world_draw(const grammar_world *world, sp_grammar *grammar, sp_test_random *random,
                        int32_t *tokens, int32_t tokens_max, int32_t *out_n, sp_text *out_text);

#endif
