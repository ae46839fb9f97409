/*
 * json.h: strict JSON reading (jansson): duplicate keys, NUL in strings, bad UTF-8, trailing bytes
 * and a byte order mark are errors with a byte position. Typed getters name the missing field.
 */
#ifndef SP_BASE_JSON_H
#define SP_BASE_JSON_H

#include "base/private.h"

#include <jansson.h>
#include <sidepath/status.h>

#include <stdbool.h>

/*
 * Lets jansson allocate through alloc.h (true), or by itself (false). With `true` a parse that runs
 * out of memory is always SP_ERR_MEMORY; by itself jansson may take a truncated string for the
 * whole one. For programs and tests: the setting is process-wide, and no JSON value may outlive a
 * change of it.
 */
void sp_json_own_memory(bool own);

/*
 * *out_root is owned by the caller (json_decref). `subject` names the file in errors. The
 * top-level value may be of any type. *out_duplicate (may be NULL) is set for a duplicate key.
 * SP_ERR_INPUT with error->code = `code` (may be NULL) and error->position at the byte after the
 * wrong token. SP_ERR_MEMORY (a shortage inside jansson may also look like a wrong token to it).
 */
SP_PRIVATE sp_status sp_json_parse(const char *bytes, size_t n_bytes, const char *subject,
                                   const char *code, bool *out_duplicate, json_t **out_root,
                                   sp_error *error);

/* Reads an object from a file of at most bytes_max bytes; any other top-level value is refused. */
SP_PRIVATE sp_status sp_json_read_object(const char *path, size_t bytes_max, const char *code,
                                         json_t **out_root, sp_error *error);

/*
 * Typed fields of an object. Absent or null: the default, when `required` is false; else
 * SP_ERR_INPUT that names the field. A wrong type or a number out of [min, max]: SP_ERR_INPUT.
 */
sp_status sp_json_int(const json_t *object, const char *field, bool required, int64_t minimum,
                      int64_t maximum, int64_t default_value, const char *code, int64_t *out_value,
                      sp_error *error);
sp_status sp_json_double(const json_t *object, const char *field, bool required,
                         double default_value, const char *code, double *out_value,
                         sp_error *error);
SP_PRIVATE sp_status sp_json_bool(const json_t *object, const char *field, bool required,
                                  bool default_value, const char *code, bool *out_value,
                                  sp_error *error);
/* *out_text is borrowed from the object; NULL when absent and not required. */
sp_status sp_json_string(const json_t *object, const char *field, bool required, const char *code,
                         const char **out_value, sp_error *error);

#endif
