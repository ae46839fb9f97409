#include "engine/sampling/ends.h"

#include "base/alloc.h"
#include "base/error.h"

#include <math.h>

sp_status sp_ends_check(const sp_request *request, int32_t vocab, sp_error *error)
{
    int32_t n = request->n_stop_tokens;

    if (n < 0 || n > SP_STOP_TOKENS_MAX || (n > 0 && !request->stop_tokens))
        return sp_fail(error, SP_ERR_INPUT, NULL, "stop_token_ids", -1,
                       "stop_token_ids has %d ids; it may have at most %d", n, SP_STOP_TOKENS_MAX);
    for (int32_t i = 0; i < n; i++)
        if (request->stop_tokens[i] < 0 || request->stop_tokens[i] >= vocab)
            return sp_fail(error, SP_ERR_INPUT, NULL, "stop_token_ids", i,
                           "stop_token_ids names the id %d; the vocabulary has %d",
                           request->stop_tokens[i], vocab);
    if (request->min_tokens < 0 || request->min_tokens > request->max_tokens)
        return sp_fail(error, SP_ERR_INPUT, NULL, "min_tokens", -1,
                       "min_tokens is %d; it must be from 0 to max_tokens, which is %d",
                       request->min_tokens, request->max_tokens);
    return SP_OK;
}

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
