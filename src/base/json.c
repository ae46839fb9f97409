#include "base/json.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/file.h"

#include <stdlib.h>
#include <string.h>

/*
 * When jansson's lexer has no memory to hold a string's bytes, it continues without them: the rest
 * is taken for the text, or fails one of its assertions. With our allocators the failure is
 * recorded, and a second attempt lets jansson finish in order before the parse fails.
 */
static _Thread_local bool memory_failed;

static void *allocate(size_t bytes)
{
    void *memory = sp_malloc(bytes);

    if (memory)
        return memory;
    memory_failed = true;
    return sp_malloc(bytes);
}

void sp_json_own_memory(bool own)
{
    if (own)
        json_set_alloc_funcs(allocate, sp_free);
    else
        json_set_alloc_funcs(malloc, free);
}

sp_status sp_json_parse(const char *bytes, size_t n_bytes, const char *subject, const char *code,
                        bool *out_duplicate, json_t **out_root, sp_error *error)
{
    json_error_t problem = {0}; /* jansson does not set the code when out of memory */
    enum json_error_code kind;
    json_t *root;

    if (out_duplicate)
        *out_duplicate = false;
    memory_failed = false;
    root = json_loadb(bytes, n_bytes, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &problem);
    if (memory_failed) {
        json_decref(root);
        return sp_fail_memory(error, n_bytes, subject);
    }
    if (root) {
        *out_root = root;
        return SP_OK;
    }
    kind = json_error_code(&problem);
    if (kind == json_error_out_of_memory || problem.text[0] == '\0')
        return sp_fail_memory(error, n_bytes, subject);
    if (out_duplicate)
        *out_duplicate = kind == json_error_duplicate_key;
    return sp_fail(error, SP_ERR_INPUT, code, subject, problem.position,
                   "%s: %s (line %d, byte %d)", subject, problem.text, problem.line,
                   problem.position);
}

sp_status sp_json_read_object(const char *path, size_t bytes_max, const char *code,
                              json_t **out_root, sp_error *error)
{
    char *bytes;
    size_t n_bytes;
    json_t *root;
    sp_status status = sp_file_read_all(path, bytes_max, &bytes, &n_bytes, error);

    if (status != SP_OK)
        return status;
    status = sp_json_parse(bytes, n_bytes, path, code, NULL, &root, error);
    sp_free(bytes);
    if (status != SP_OK)
        return status;
    if (!json_is_object(root)) {
        json_decref(root);
        return sp_fail(error, SP_ERR_INPUT, code, path, 0, "%s: the top level is not an object",
                       path);
    }
    *out_root = root;
    return SP_OK;
}

/*
 * Looks up a field. Returns SP_OK with *out_value NULL if it is absent or null and not required.
 */
static sp_status find_field(const json_t *object, const char *field, bool required,
                            const char *code, const json_t **out_value, sp_error *error)
{
    const json_t *value = json_object_get(object, field);

    if (json_is_null(value))
        value = NULL;
    *out_value = value;
    if (!value && required)
        return sp_fail(error, SP_ERR_INPUT, code, field, -1, "field \"%s\" is missing", field);
    return SP_OK;
}

static sp_status wrong_type(sp_error *error, const char *code, const char *field, const char *want)
{
    return sp_fail(error, SP_ERR_INPUT, code, field, -1, "field \"%s\" is not %s", field, want);
}

sp_status sp_json_int(const json_t *object, const char *field, bool required, int64_t minimum,
                      int64_t maximum, int64_t default_value, const char *code, int64_t *out_value,
                      sp_error *error)
{
    const json_t *value;
    int64_t number;
    sp_status status = find_field(object, field, required, code, &value, error);

    if (status != SP_OK)
        return status;
    if (!value) {
        *out_value = default_value;
        return SP_OK;
    }
    if (!json_is_integer(value))
        return wrong_type(error, code, field, "an integer");
    number = json_integer_value(value);
    if (number < minimum || number > maximum)
        return sp_fail(error, SP_ERR_INPUT, code, field, -1,
                       "field \"%s\" is %lld; it must be from %lld to %lld", field,
                       (long long)number, (long long)minimum, (long long)maximum);
    *out_value = number;
    return SP_OK;
}

sp_status sp_json_double(const json_t *object, const char *field, bool required,
                         double default_value, const char *code, double *out_value, sp_error *error)
{
    const json_t *value;
    sp_status status = find_field(object, field, required, code, &value, error);

    if (status != SP_OK)
        return status;
    if (value && !json_is_number(value))
        return wrong_type(error, code, field, "a number");
    *out_value = value ? json_number_value(value) : default_value;
    return SP_OK;
}

sp_status sp_json_bool(const json_t *object, const char *field, bool required, bool default_value,
                       const char *code, bool *out_value, sp_error *error)
{
    const json_t *value;
    sp_status status = find_field(object, field, required, code, &value, error);

    if (status != SP_OK)
        return status;
    if (value && !json_is_boolean(value))
        return wrong_type(error, code, field, "true or false");
    *out_value = value ? json_is_true(value) : default_value;
    return SP_OK;
}

sp_status sp_json_string(const json_t *object, const char *field, bool required, const char *code,
                         const char **out_value, sp_error *error)
{
    const json_t *value;
    sp_status status = find_field(object, field, required, code, &value, error);

    if (status != SP_OK)
        return status;
    if (value && !json_is_string(value))
        return wrong_type(error, code, field, "a string");
    *out_value = value ? json_string_value(value) : NULL;
    return SP_OK;
}
