/*
 * responses_request.h: the body of POST /v1/responses as one of /v1/chat/completions, which it is
 * another spelling of. No I/O.
 *
 * What has a field there becomes that field; what cannot change an answer is left out; what is not
 * served (previous_response_id, conversation, background, tools that are no functions) is refused
 * by name. Every other field is copied: chat says what it thinks of it.
 */
#ifndef SP_SERVER_API_RESPONSES_REQUEST_H
#define SP_SERVER_API_RESPONSES_REQUEST_H

#include <jansson.h>
#include <sidepath/status.h>

/* *out_chat is a new reference. SP_ERR_INPUT with the field as subject; SP_ERR_MEMORY. */
sp_status sp_responses_to_chat(const json_t *body, json_t **out_chat, sp_error *error);

#endif
