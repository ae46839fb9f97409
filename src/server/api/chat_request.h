/*
 * chat_request.h: the body of POST /v1/chat/completions as a checked struct. No I/O. What messages
 * and tools may hold is the chat room's business.
 */
#ifndef SP_SERVER_API_CHAT_REQUEST_H
#define SP_SERVER_API_CHAT_REQUEST_H

#include "chat/chat.h"
#include "server/api/body_fields.h"

typedef struct sp_chat_completion_request {
    json_t *body; /* a reference: everything is borrowed from it */
    sp_body_fields fields;
    sp_chat_request chat;
} sp_chat_completion_request;

/* The fields that are about the conversation alone; borrows them from `body`. SP_ERR_INPUT. */
sp_status sp_chat_request_read(const json_t *body, sp_chat_request *out_chat, sp_error *error);

/* SP_ERR_INPUT with the field as subject. Keeps a reference to `body`. */
sp_status sp_chat_completion_request_read(json_t *body, const sp_request *defaults,
                                          sp_chat_completion_request *out_request, sp_error *error);
/* Zeros are allowed. */
void sp_chat_completion_request_free(sp_chat_completion_request *request);

#endif
