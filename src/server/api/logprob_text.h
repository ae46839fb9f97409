/*
 * logprob_text.h: log probabilities in the two forms of the API. A token's text is its own bytes,
 * with U+FFFD for what is no UTF-8.
 */
#ifndef SP_SERVER_API_LOGPROB_TEXT_H
#define SP_SERVER_API_LOGPROB_TEXT_H

#include "server/driver/generation.h"

/* The form of completions: four lists, kept as text (but for the offsets) and written at once. */
typedef struct sp_logprob_lists {
    sp_text tokens, values, tops;
    sp_text processed; /* written where it is wanted: */
    bool with_processed;
    sp_text offsets; /* an int64_t for each token */
    int64_t offset;  /* of the next token: characters of the answer's text before it */
    int32_t n;
} sp_logprob_lists;

/*
 * A token with its logprob and alternatives; `unknown`: the first of a prompt, which has none. Each
 * alternative is one member of "top_logprobs", by its text, or as "token_id:ID" where the token
 * itself or a better one has that text already. `hidden`: the token's own text is not part of the
 * answer's.
 */
void sp_logprob_lists_add(sp_logprob_lists *lists, const sp_engine *engine,
                          const sp_produced *produced, bool unknown, bool hidden);
/*
 * {"tokens": [..], ..}, or null when there are none; the lists are empty afterwards, the offset
 * goes on. `characters`: of the answer's text as far as it is written, which no offset exceeds (a
 * stop text is cut off, with tokens that had begun it).
 */
void sp_logprob_lists_write(sp_logprob_lists *lists, int64_t characters, sp_text *out);
size_t sp_logprob_lists_bytes(const sp_logprob_lists *lists); /* the memory that they take */
void sp_logprob_lists_free(sp_logprob_lists *lists);

/* Characters that begin in these bytes. */
int64_t sp_count_characters(const char *text, size_t bytes);

/* The form of chat: one element of "content", with "processed_logprob" where it is wanted. */
void sp_logprob_chat_add(sp_text *out, const sp_engine *engine, const sp_produced *produced,
                         bool with_processed);

#endif
