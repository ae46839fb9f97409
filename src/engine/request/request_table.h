/*
 * request_table.h: every field of an sp_request that a client can set, one row each: its name,
 * type, range, its default for each kind of client, its flag and help, and the forms of a request
 * that have it. The server's bodies, the lines and flags of `generate`, generation_config.json,
 * sp_request_default and the engine's own checks read these rows; a test compares docs/HTTP.md and
 * docs/SAMPLING.md with them.
 */
#ifndef SP_ENGINE_REQUEST_REQUEST_TABLE_H
#define SP_ENGINE_REQUEST_REQUEST_TABLE_H

#include "engine/request/field.h"

#include <sidepath/engine.h>

/* Forms of a request. Bits from SP_FORM_OTHERS on are free for forms of other rooms. */
typedef enum sp_request_form {
    SP_FORM_COMPLETION = 1,
    SP_FORM_CHAT = 2,
    SP_FORM_LINE = 4,          /* a JSON line of `generate` */
    SP_FORM_FLAGS = 8,         /* the flags of `generate` */
    SP_FORM_LOGITS_FLAGS = 16, /* those of `logits` */
    SP_FORM_CONFIG = 32,       /* generation_config.json */
    SP_FORM_OTHERS = 256
} sp_request_form;

/* Whose default applies: the index in sp_field.defaults. */
typedef enum sp_left_out {
    SP_LEFT_OUT_LIBRARY, /* sp_request_default */
    SP_LEFT_OUT_GENERATE,
    SP_LEFT_OUT_API /* OpenAI's API */
} sp_left_out;

#define SP_STOP_TEXT_BYTES_MAX 1024
#define SP_STOP_IDS_MAX        64 /* as written: a chat template may add some of its own */
#define SP_LOGIT_BIAS_ABS_MAX  100

/* Offsets are those of sp_request. Defined in request_rows.c, with nothing else. */
extern const sp_field sp_request_rows[];
extern const size_t sp_n_request_rows;

/* The table over a request's members, borrowed as long as the part is used; NULL: for look-ups
 * alone. */
sp_field_part sp_request_part(sp_request *request);

/* A request with the defaults of `who`, without prompt. Owns no lists yet. */
sp_request sp_request_left_out(sp_left_out who);

/*
 * Reads the members of a JSON object that are fields of `form`, in this table or in one of the
 * others [n_others, at most 3], over what *request has. The request owns its lists from then on
 * (sp_request_free_lists), after a failure too. SP_ERR_INPUT with the field as subject.
 */
sp_status sp_request_read(const json_t *object, unsigned form, const sp_field_part *others,
                          size_t n_others, sp_request *request, sp_error *error);
/* Its lists may be NULL. */
void sp_request_free_lists(sp_request *request);

/*
 * Checks what needs no engine: ranges, lists, and that ids are below `vocab`. Any thread.
 * SP_ERR_INPUT with the field as subject, and its index where it is one of a list; SP_ERR_ARGUMENT:
 * a list that is NULL and has a length.
 */
sp_status sp_request_check(const sp_request *request, int32_t vocab, sp_error *error);

/* The readers of {"ID": BIAS}, of the completions' "logprobs": N, and of "speculative": true or
 * false, for the table. */
sp_status sp_request_read_bias(const sp_field *row, const json_t *value, void *values,
                               sp_error *error);
sp_status sp_request_read_logprobs(const sp_field *row, const json_t *value, void *values,
                                   sp_error *error);
sp_status sp_request_read_speculative(const sp_field *row, const json_t *value, void *values,
                                      sp_error *error);

#endif
