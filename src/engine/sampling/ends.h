/*
 * ends.h: which tokens end the text of one request: the model's end-of-text ids unless the request
 * ignores them, its stop ids, and the special tokens that its stop strings name, whose text is not
 * part of an answer and so cannot be found there. Owns the list, and the rule that none of them is
 * chosen before min_tokens.
 */
#ifndef SP_ENGINE_SAMPLING_ENDS_H
#define SP_ENGINE_SAMPLING_ENDS_H

#include "engine/tokenizer/tokenizer.h"

#include <sidepath/adapter.h>
#include <sidepath/engine.h>

typedef struct sp_ends {
    int32_t *tokens; /* [n], owned */
    int32_t n;
    int32_t min_tokens; /* new tokens before which none of them is chosen */
} sp_ends;

/* For a request that was checked; `tokenizer` may be NULL: stop strings name no tokens then.
 * *out_ends is owned by the caller. SP_ERR_MEMORY. */
sp_status sp_ends_create(const sp_request *request, const sp_model_shape *shape,
                         const sp_tokenizer *tokenizer, sp_ends *out_ends);
/* An all-zero struct is fine. */
void sp_ends_destroy(sp_ends *ends);

bool sp_ends_has(const sp_ends *ends, int32_t token);

/* Sets the logits of all of them to -inf in a row [vocab], in place. */
void sp_ends_forbid(const sp_ends *ends, float *logits);

#endif
