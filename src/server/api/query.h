/*
 * query.h: the query of a request's path ("a=1&b=two") as a JSON object, for routes whose body is
 * no JSON. No I/O.
 */
#ifndef SP_SERVER_API_QUERY_H
#define SP_SERVER_API_QUERY_H

#include "base/json.h"

/*
 * Each value is a text, or true, false or a whole number where it is written as one; that of
 * `text_field` is always a text. SP_ERR_INPUT with `invalid-query`: escapes that do not decode, a
 * name without a value, a name twice. SP_ERR_MEMORY. *out_fields is owned by the caller
 * (json_decref).
 */
sp_status sp_query_read(const char *query, const char *text_field, json_t **out_fields,
                        sp_error *error);

#endif
