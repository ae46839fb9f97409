/*
 * completion_request.h: the body of POST /v1/completions as a checked struct. No I/O.
 */
#ifndef SP_SERVER_API_COMPLETION_REQUEST_H
#define SP_SERVER_API_COMPLETION_REQUEST_H

#include "server/api/body_fields.h"

#define SP_PROMPTS_MAX 1024

/* A prompt as text, or as ids. */
typedef struct sp_prompt {
    const char *text; /* borrowed from the body; NULL: ids */
    size_t text_bytes;
    int32_t *tokens; /* owned (sp_free); NULL until a text is tokenised */
    int32_t n_tokens;
} sp_prompt;

typedef struct sp_completion_request {
    json_t *body; /* a reference: strings are borrowed from it */
    sp_body_fields fields;
    sp_prompt *prompts; /* [n_prompts], owned */
    int32_t n_prompts;
    int32_t best_of; /* choices made of each prompt; the fields.n best of them are the answer */
} sp_completion_request;

/* SP_ERR_INPUT with the field as subject. Keeps a reference to `body`. */
sp_status sp_completion_request_read(json_t *body, const sp_request *defaults,
                                     sp_completion_request *out_request, sp_error *error);
/* Zeros are allowed. */
void sp_completion_request_free(sp_completion_request *request);

#endif
