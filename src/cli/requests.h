/*
 * requests.h: the requests of one `generate`, from --request flags or from JSON lines. Each is
 * checked for form here, and for sense by the engine, before the first token is made.
 */
#ifndef SP_CLI_REQUESTS_H
#define SP_CLI_REQUESTS_H

#include "base/text.h"
#include "cli/field_flags.h"
#include "engine/request/request_table.h"

/* One request and what became of it. Everything is owned (sp_cli_requests_free). */
typedef struct sp_cli_request {
    sp_request request; /* owns its lists; without adapter and prompt */
    char *adapter;      /* NULL: the base */
    char *prompt;       /* text, or NULL where ids were given */
    size_t prompt_bytes;
    int32_t *prompt_tokens; /* ids: given, or encoded from the text */
    int32_t n_prompt_tokens;

    int64_t id;
    int32_t *tokens; /* [max_tokens] */
    int32_t n_tokens;
    sp_text text;
    sp_text scores, prompt_scores; /* items of JSON lists, where logprobs were requested */
    sp_text routed;                /* likewise the experts of each token */
    sp_finish finish;
} sp_cli_request;

typedef struct sp_cli_requests {
    sp_cli_request *items;
    size_t n, capacity;
} sp_cli_requests;

/* What the flags say holds where a request says nothing.
 *
 * "[NAME=]PROMPT", split at the first '='; no name: the base. */
sp_status sp_cli_requests_add_flag(sp_cli_requests *requests, const char *text,
                                   const sp_field_flags *defaults, sp_error *error);

/* One JSON object. `line` counts from 1, for errors. */
sp_status sp_cli_requests_add_json(sp_cli_requests *requests, const char *bytes, size_t n_bytes,
                                   size_t line, const sp_field_flags *defaults, sp_error *error);

/* All lines of a stream; blank ones are skipped. */
sp_status sp_cli_requests_read(sp_cli_requests *requests, FILE *stream,
                               const sp_field_flags *defaults, sp_error *error);

/* The names of a line's fields, for the help. */
void sp_cli_requests_print_fields(FILE *stream);

/* The engine's view; borrows from the request. */
sp_request sp_cli_request_view(const sp_cli_request *request);

/* Zeros are allowed. */
void sp_cli_requests_free(sp_cli_requests *requests);

#endif
