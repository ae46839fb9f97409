/*
 * score_request.h: the body of POST /v1/score as a checked struct. No I/O.
 */
#ifndef SP_SERVER_API_SCORE_REQUEST_H
#define SP_SERVER_API_SCORE_REQUEST_H

#include "server/api/body_fields.h"

#define SP_SEQUENCES_MAX 1024

/* Tokens, of which those before `from` are given, and those from it on are scored. */
typedef struct sp_scored {
    int32_t *tokens; /* [n_tokens], owned (sp_free) */
    int32_t n_tokens;
    int32_t from; /* 1 .. n_tokens */
} sp_scored;

typedef struct sp_score_request {
    json_t *body, *sampling; /* references: strings are borrowed from them */
    sp_body_fields fields;   /* what a completion would be sampled by */
    sp_scored *sequences;    /* [n_sequences], owned */
    int32_t n_sequences;
    bool base64;
} sp_score_request;

/* SP_ERR_INPUT with the field as subject, SP_ERR_MEMORY. Keeps a reference to `body`. */
sp_status sp_score_request_read(json_t *body, const sp_request *defaults,
                                sp_score_request *out_request, sp_error *error);
void sp_score_request_free(sp_score_request *request); /* zeros are allowed */

#endif
