/*
 * grammar.h: a compiled grammar over a vocabulary: what the engine asks at each token. How texts
 * become a network is compile.h's.
 *
 * A place is how far one output is. It is no more than a number of a state and how many tokens
 * led there: the states are the grammar's, shared by all outputs, bounded in memory, and forgotten
 * when that is full. A place of before is found again from the output's tokens, so a caller always
 * passes them all. What is answered depends on the grammar and these tokens alone.
 *
 * Any thread; a lock of the grammar's own guards its states.
 */
#ifndef SP_GRAMMAR_GRAMMAR_H
#define SP_GRAMMAR_GRAMMAR_H

#include "grammar/network.h"
#include "grammar/vocabulary.h"

/* Memory of a grammar's states and masks, beside what one token adds. */
#define SP_GRAMMAR_STATES_BYTES_MAX ((size_t)32 << 20)

#define SP_GRAMMAR_LEFT  "grammar-left"  /* the tokens are not in the grammar */
#define SP_GRAMMAR_STUCK "grammar-stuck" /* no token of the vocabulary can come next */

typedef struct sp_grammar sp_grammar;

typedef struct sp_grammar_place {
    uint64_t epoch; /* of the states; 0: the beginning */
    int32_t state, n_tokens;
} sp_grammar_place;

/* What may come next. */
typedef struct sp_grammar_next {
    bool complete; /* the output may end here */
    bool goes_on;  /* and some token may follow */
} sp_grammar_next;

/*
 * Takes the network (also after a failure); `vocabulary` is borrowed for its life. One reference,
 * the caller's. SP_ERR_MEMORY; SP_ERR_INPUT (SP_GRAMMAR_UNSATISFIABLE): no token can be the first.
 */
sp_status sp_grammar_create(sp_net *net, const sp_vocabulary *vocabulary, sp_grammar **out_grammar,
                            sp_error *error);
void sp_grammar_retain(sp_grammar *grammar);
void sp_grammar_release(sp_grammar *grammar); /* NULL is allowed */
size_t sp_grammar_memory(sp_grammar *grammar);

/*
 * Moves the place of an output past its tokens [n_tokens], and says what may come next; in
 * `mask` (may be NULL) [sp_vocabulary_words] a bit for each token that may. The tokens that the
 * place has passed must be the same as before; fewer are allowed. SP_ERR_STATE
 * (SP_GRAMMAR_LEFT, position: the token's index), SP_ERR_MEMORY: the place is at the beginning.
 */
sp_status sp_grammar_follow(sp_grammar *grammar, sp_grammar_place *place, const int32_t *tokens,
                            int32_t n_tokens, uint32_t *mask, sp_grammar_next *out_next,
                            sp_error *error);

/* Whether a whole text is in the grammar, read byte by byte. */
bool sp_grammar_has(sp_grammar *grammar, const char *text, size_t bytes);
/* Whether some state had too many alternatives (SP_STATE_STACKS_MAX of states.h), of which the last
 * were left out. */
bool sp_grammar_left_out(sp_grammar *grammar);

#endif
