#include "engine/sampling/ends.h"

#include "base/alloc.h"

#include <math.h>

sp_status sp_ends_create(const sp_request *request, const sp_model_shape *shape,
                         const sp_tokenizer *tokenizer, sp_ends *out_ends)
{
    sp_ends ends = {.min_tokens = request->min_tokens};
    size_t most =
        (size_t)shape->n_eos_token_ids + (size_t)request->n_stop_tokens + (size_t)request->n_stop;

    ends.tokens = sp_calloc(most + 1, sizeof *ends.tokens); /* never an empty block */
    if (!ends.tokens)
        return SP_ERR_MEMORY;
    for (int32_t i = 0; i < shape->n_eos_token_ids && !request->ignore_eos; i++)
        ends.tokens[ends.n++] = shape->eos_token_ids[i];
    for (int32_t i = 0; i < request->n_stop_tokens; i++)
        ends.tokens[ends.n++] = request->stop_tokens[i];
    for (int32_t i = 0; i < request->n_stop && tokenizer; i++) {
        int32_t id = sp_tokenizer_added_id(tokenizer, request->stop[i]);

        if (id >= 0 && sp_tokenizer_is_special(tokenizer, id))
            ends.tokens[ends.n++] = id;
    }
    *out_ends = ends;
    return SP_OK;
}

void sp_ends_destroy(sp_ends *ends)
{
    sp_free(ends->tokens);
    *ends = (sp_ends){.tokens = NULL};
}

bool sp_ends_has(const sp_ends *ends, int32_t token)
{
    for (int32_t i = 0; i < ends->n; i++)
        if (ends->tokens[i] == token)
            return true;
    return false;
}

void sp_ends_forbid(const sp_ends *ends, float *logits)
{
    for (int32_t i = 0; i < ends->n; i++)
        logits[ends->tokens[i]] = -INFINITY;
}
