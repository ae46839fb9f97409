/*
 * output_form.h: what a body says its output has to be: "response_format", vLLM's
 * "structured_outputs" and its older "guided_json", "guided_regex", "guided_choice" and
 * "guided_grammar". The readers of these rows, and the text that the engine compiles. No I/O.
 */
#ifndef SP_SERVER_API_OUTPUT_FORM_H
#define SP_SERVER_API_OUTPUT_FORM_H

#include "base/text.h"
#include "engine/request/field.h"
#include "server/driver/generation.h"

#include <sidepath/engine.h>

typedef struct sp_output_form {
    const char *field; /* that says so, static ("response_format"); NULL: none does */
    sp_constraint_kind kind;
    const json_t *value; /* borrowed from the body: the schema, the pattern, ...; or NULL */
} sp_output_form;

/* What it makes of a generation's outputs; nothing without a field. *out_wanted is the caller's.
 * SP_ERR_MEMORY. */
sp_status sp_output_form_want(const sp_output_form *form, sp_constraint_thought thought,
                              sp_wanted_output *out_wanted, sp_error *error);

/* For the table: `values` is an sp_body_fields. Two of these fields in one body exclude each other.
 * SP_ERR_INPUT. */
sp_status sp_body_read_response_format(const sp_field *row, const json_t *value, void *values,
                                       sp_error *error);
sp_status sp_body_read_structured_outputs(const sp_field *row, const json_t *value, void *values,
                                          sp_error *error);
sp_status sp_body_read_guided(const sp_field *row, const json_t *value, void *values,
                              sp_error *error);

#endif
