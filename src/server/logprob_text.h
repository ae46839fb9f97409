/*
 * logprob_text.h: log probabilities in the two forms of the API. A token's text is its own bytes,
 * with U+FFFD for what is no UTF-8.
 */
#ifndef SP_SERVER_LOGPROB_TEXT_H
#define SP_SERVER_LOGPROB_TEXT_H

#include "server/generation.h"

/* The form of completions: four lists, kept as text and written at once. */
typedef struct sp_logprob_lists {
    sp_text tokens, values, tops, offsets;
    int64_t offset; /* characters of the answer's text so far */
    int32_t n;
} sp_logprob_lists;

/* A token with its logprob and alternatives; `unknown`: the first of a prompt, which has none. */
void sp_logprob_lists_add(sp_logprob_lists *lists, const sp_engine *engine,
                          const sp_produced *produced, bool unknown);
/* {"tokens": [..], ..}, or null when there are none; the lists are empty afterwards, the offset
 * goes on. */
void sp_logprob_lists_write(sp_logprob_lists *lists, sp_text *out);
void sp_logprob_lists_free(sp_logprob_lists *lists);

/* The form of chat: one element of "content". */
void sp_logprob_chat_add(sp_text *out, const sp_engine *engine, const sp_produced *produced);

#endif
