/*
 * own_head.h: detects a checkpoint that claims to be tied but has a head of its own.
 */
#ifndef SP_CHECKPOINT_OWN_HEAD_H
#define SP_CHECKPOINT_OWN_HEAD_H

#include <sidepath/status.h>

#include <stdbool.h>

/*
 * Whether the checkpoint in `directory` holds a head that is not the same as its embedding: other
 * bytes, another type or shape. False where there is no such head, or no readable checkpoint:
 * loading its weights reports that. Blocks on file reads. SP_ERR_MEMORY.
 */
sp_status sp_has_own_head(const char *directory, bool *out_own, sp_error *error);

#endif
