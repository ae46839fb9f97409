/*
 * body_fields.h: the fields of the server's bodies that are not the engine's (those are rows of
 * engine/request/request_table.h): a table of them, and the reader of both, which completions and
 * chat share. It takes a JSON object and gives a checked struct, or an error that names the field;
 * no I/O, so that it can be fuzzed.
 *
 * The rule for fields: one that changes the answer is served or refused by name. One that cannot
 * change it (user, metadata, ..) is taken and ignored. One that is known but not served is accepted
 * while it requests what happens anyway ("best_of": 1). null is the same as absent. Every other
 * field is `unknown-field`.
 */
#ifndef SP_SERVER_API_BODY_FIELDS_H
#define SP_SERVER_API_BODY_FIELDS_H

#include "base/json.h"
#include "engine/request/request_table.h"
#include "server/api/output_form.h"
#include "server/driver/generation.h"

#define SP_CODE_INVALID_VALUE "invalid-value"

#define SP_N_MAX 128

/* Bodies, each with fields of its own. Those of completions and chat are forms of a request. */
typedef enum sp_field_set {
    SP_FIELDS_NONE = 0,
    SP_FIELDS_COMPLETION = SP_FORM_COMPLETION,
    SP_FIELDS_CHAT = SP_FORM_CHAT,
    SP_FIELDS_TOKENIZE = SP_FORM_OTHERS,
    SP_FIELDS_DETOKENIZE = SP_FORM_OTHERS << 1,
    SP_FIELDS_LOAD = SP_FORM_OTHERS << 2,
    SP_FIELDS_NAME = SP_FORM_OTHERS << 3,      /* of an adapter, to unload or to make active */
    SP_FIELDS_RESPONSES = SP_FORM_OTHERS << 4, /* beside those of chat; responses_request.h */
    SP_FIELDS_PUBLISH = SP_FORM_OTHERS << 5,   /* of an adapter that the request brings */
    SP_FIELDS_SCORE = SP_FORM_OTHERS << 6,
    SP_FIELDS_MESSAGES = SP_FORM_OTHERS << 7 /* beside those of chat; messages_request.h */
} sp_field_set;

/* Every field of the object against the rule above. SP_ERR_INPUT with the field as subject. */
sp_status sp_body_fields_check(const json_t *object, sp_field_set set, sp_error *error);

/* Whether `path` ("messages[2].role") is a field of that body, or inside of one. */
bool sp_body_fields_know(sp_field_set set, const char *path);

/* What a body says, without its prompt. */
typedef struct sp_body_fields {
    sp_request request; /* for the engine, with lists that this owns; max_tokens is -1 where chat
                           leaves it out */
    const char *model;  /* NULL: absent. Borrowed from the body. */
    sp_version_wish version;
    int32_t n;
    int32_t best_of;          /* 0: absent */
    int32_t newer_max_tokens; /* "max_completion_tokens"; -1: absent */
    bool stream, include_usage, return_token_ids, echo, parse_special, add_special_tokens;
    bool usage_each; /* "continuous_usage_stats", which "include_usage" alone makes hold */
    bool one_call;   /* "parallel_tool_calls": false */
    sp_output_form output;
    /* As the body has them, before sp_body_fields_set_ends. */
    int32_t n_own_stop_tokens;
    bool ignore_eos;
} sp_body_fields;

/* Offsets count in an sp_body_fields. Defined in body_rows.c, with nothing else. */
extern const sp_field sp_body_rows[];
extern const size_t sp_n_body_rows;

/*
 * `defaults` are what a body means by the fields of the engine that it leaves out; the seed is
 * random where it has none. SP_ERR_INPUT with the field as subject, SP_ERR_MEMORY: everything is
 * released.
 */
sp_status sp_body_fields_read(const json_t *object, sp_field_set set, const sp_request *defaults,
                              sp_body_fields *out_fields, sp_error *error);
void sp_body_fields_free(sp_body_fields *fields);

/*
 * Which ids end the text beside the request's own stop_token_ids: those that the adapter says
 * (`lora` may be NULL) in place of the base's, and the template's turn_ends [n_turn_ends]. With
 * "ignore_eos" neither. May be called again, for another adapter. SP_ERR_MEMORY; what the adapter
 * says cannot be used: its error.
 */
sp_status sp_body_fields_set_ends(sp_body_fields *fields, const sp_lora_chat *lora,
                                  const int32_t *turn_ends, int32_t n_turn_ends, sp_error *error);

/* The readers of "stream_options", "adapter_digest" and "min_generation", for the table. */
sp_status sp_body_read_stream_options(const sp_field *row, const json_t *value, void *values,
                                      sp_error *error);
/* The digest in a field: SP_DIGEST_BYTES in lower-case hexadecimal. SP_ERR_INPUT with the field. */
sp_status sp_digest_field_read(const char *field, const json_t *value, sp_digest *out_digest,
                               sp_error *error);
sp_status sp_body_read_digest(const sp_field *row, const json_t *value, void *values,
                              sp_error *error);
sp_status sp_body_read_generation(const sp_field *row, const json_t *value, void *values,
                                  sp_error *error);

#endif
