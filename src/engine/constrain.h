/*
 * constrain.h: output that is constrained by a grammar, between the engine and src/grammar: the
 * vocabulary, which is made when the first constraint is compiled; what a request keeps; and the
 * masks of the rows of a window. A sequence's place in its grammar is found from its tokens
 * when a mask is needed, so a preemption, or tokens that came several at once, need nothing here.
 */
#ifndef SP_ENGINE_CONSTRAIN_H
#define SP_ENGINE_CONSTRAIN_H

#include "engine/engine_state.h"

/* Allocates engine->constrain. SP_ERR_MEMORY. */
sp_status sp_constrain_open(sp_engine *engine);
/* After the last sequence was dropped; NULL is allowed in engine->constrain. */
void sp_constrain_close(sp_engine *engine);

/* Whether a request's constraint (may be NULL) can be taken. SP_ERR_INPUT, SP_ERR_ARGUMENT: it is
 * of another engine. */
sp_status sp_constrain_check(const sp_engine *engine, const sp_request *request, sp_error *error);
/* Takes a reference for the sequence, and makes room for masks. Engine thread. SP_ERR_MEMORY. */
sp_status sp_constrain_begin(const sp_engine *engine, const sp_request *request,
                             sp_sequence_constraint *constraint);
void sp_constrain_end(sp_sequence_constraint *constraint); /* zeros are allowed */

/*
 * The mask of the token after the sequence's first n_tokens, which may be more than it has: then
 * its drafts are taken at their word. For row `index` of the window: ids that its grammar allows,
 * and its ends where the output may end. NULL: it has no constraint, or *out_status is not SP_OK
 * and *out_error (NULL: nobody asks) says why it cannot go on. Engine thread.
 */
const uint32_t *sp_constrain_mask(sp_engine *engine, sp_sequence *sequence, int32_t n_tokens,
                                  int32_t index, sp_status *out_status, sp_error *out_error);
/*
 * Adds to the choices of the engine's window the masks of their rows. A row that cannot go on loses
 * its sampling, and its `constrained` says why; after a draft that the grammar does not have that
 * is so too, but there the row before it has another token, and this one does not count. Masks of
 * one grammar are made one after the other, those of several at once. Engine thread.
 */
void sp_constrain_window(sp_engine *engine);
/* Whether a constrained output is complete and nothing can follow it. Engine thread. */
bool sp_constrain_is_over(sp_sequence *sequence);

#endif
