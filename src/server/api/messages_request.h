/*
 * messages_request.h: the body of Anthropic's POST /v1/messages as one of /v1/chat/completions,
 * which it is another spelling of. No I/O.
 *
 * What has a field there becomes that field; what cannot change an answer is left out; what is not
 * served (images, documents, tools of the service's own) is refused by name. Every other field is
 * copied: chat says what it thinks of it.
 */
#ifndef SP_SERVER_API_MESSAGES_REQUEST_H
#define SP_SERVER_API_MESSAGES_REQUEST_H

#include <jansson.h>
#include <sidepath/status.h>

#include <stdbool.h>

/*
 * `counts`: the body is one of count_tokens, which has no max_tokens and keeps only what is about
 * the prompt. *out_chat is a new reference. SP_ERR_INPUT with the field as subject; SP_ERR_MEMORY.
 */
sp_status sp_messages_to_chat(const json_t *body, bool counts, json_t **out_chat, sp_error *error);

#endif
