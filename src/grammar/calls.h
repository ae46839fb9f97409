/*
 * calls.h: outputs that call tools, as JSON or as tags: calls alone, or text of any kind with calls
 * in it. What a call's form is comes with the description; what reads it again is not known here.
 *
 * Among tags a value has no quotes: of a parameter of the type string it is the text itself, which
 * never holds the tag that ends it, of any other type it is JSON.
 */
#ifndef SP_GRAMMAR_CALLS_H
#define SP_GRAMMAR_CALLS_H

#include "grammar/schema.h"

/* Of the text that begins a call among other text, and of that which ends one. */
#define SP_CALLS_OPEN_BYTES_MAX 64

/*
 * Adds the outputs that `calls` describes (SP_GRAMMAR_CALLS of compile.h) from a node to another.
 * Failures are those of a schema: a place in a tool's "parameters" is its path. `error` is the
 * maker's.
 */
sp_status sp_calls_make(sp_schema_maker *maker, const json_t *calls, int32_t from, int32_t to,
                        sp_error *error);

#endif
