/*
 * own_head.h: a checkpoint that says it is tied, and has a head of its own all the same.
 */
#ifndef SP_CHECKPOINT_OWN_HEAD_H
#define SP_CHECKPOINT_OWN_HEAD_H

#include <sidepath/status.h>

#include <stdbool.h>

/*
 * Whether the checkpoint in `directory` holds a head that is not the same as its embedding: other
 * bytes, another type or shape. False where there is no such head, or no checkpoint that can be
 * read: whoever wants its weights is told then. Blocks on file reads. SP_ERR_MEMORY.
 */
sp_status sp_has_own_head(const char *directory, bool *out_own, sp_error *error);

#endif
