#include "engine/request/field.h"

#include "base/alloc.h"
#include "base/error.h"

#include <string.h>

static void *member(const sp_field *row, void *values)
{
    return (char *)values + row->offset;
}

static bool is_number(sp_field_type type)
{
    return type == SP_FIELD_INT || type == SP_FIELD_INT64 || type == SP_FIELD_SIZE ||
           type == SP_FIELD_FLOAT || type == SP_FIELD_DOUBLE;
}

/* ---- look-up ------------------------------------------------------------------------------- */

const sp_field *sp_field_find(const sp_field_part *part, const char *name, size_t bytes,
                              unsigned forms)
{
    for (size_t i = 0; i < part->n; i++) {
        const sp_field *row = &part->rows[i];

        if ((row->forms & forms) != 0 && strncmp(row->name, name, bytes) == 0 &&
            row->name[bytes] == '\0')
            return row;
    }
    return NULL;
}

static bool is_one(const json_t *value)
{
    double number = json_number_value(value);

    return json_is_number(value) && number >= 1 && number <= 1;
}

static bool is_empty(const json_t *value)
{
    if (json_is_string(value))
        return json_string_length(value) == 0;
    return (json_is_array(value) && json_array_size(value) == 0) ||
           (json_is_object(value) && json_object_size(value) == 0);
}

static bool is_served(const sp_field *row, const json_t *value)
{
    switch (row->type) {
    case SP_FIELD_ONLY_FALSE:
        return json_is_false(value);
    case SP_FIELD_ONLY_TRUE:
        return json_is_true(value);
    case SP_FIELD_ONLY_ONE:
        return is_one(value);
    case SP_FIELD_ONLY_EMPTY:
        return is_empty(value);
    default:
        return true;
    }
}

sp_status sp_fields_admit(const json_t *object, unsigned form, const sp_field_part *parts,
                          size_t n_parts, sp_error *error)
{
    const char *name;
    json_t *value;

    json_object_foreach((json_t *)(uintptr_t)object, name, value)
    {
        const sp_field *row = NULL;

        if (json_is_null(value))
            continue;
        for (size_t i = 0; i < n_parts && !row; i++)
            row = sp_field_find(&parts[i], name, strlen(name), form);
        if (!row)
            return sp_fail(error, SP_ERR_INPUT, SP_CODE_UNKNOWN_FIELD, name, -1,
                           "the field \"%.100s\" is not known", name);
        if (!is_served(row, value))
            return sp_fail(error, SP_ERR_INPUT, SP_CODE_UNSUPPORTED_FIELD, name, -1,
                           "the field \"%.100s\" is not supported with this value", name);
    }
    return SP_OK;
}

/* ---- numbers ------------------------------------------------------------------------------- */

static sp_status wrong_type(const sp_field *row, const char *want, sp_error *error)
{
    return sp_fail(error, SP_ERR_INPUT, NULL, row->name, -1, "field \"%s\" is not %s", row->name,
                   want);
}

static sp_status check_range(const sp_field *row, double number, sp_status failure, sp_error *error)
{
    if (number >= row->minimum && number <= row->maximum) /* false for NaN */
        return SP_OK;
    return sp_fail(error, failure, NULL, row->name, -1,
                   "%s is %.10g; it must be from %.10g to %.10g", row->name, number, row->minimum,
                   row->maximum);
}

static void store_number(const sp_field *row, double number, void *values)
{
    switch (row->type) {
    case SP_FIELD_BOOL:
        *(bool *)member(row, values) = number > 0;
        break;
    case SP_FIELD_NOT:
        *(bool *)member(row, values) = !(number > 0);
        break;
    case SP_FIELD_INT:
        *(int32_t *)member(row, values) = (int32_t)number;
        break;
    case SP_FIELD_INT64:
        *(int64_t *)member(row, values) = (int64_t)number;
        break;
    case SP_FIELD_SIZE:
        *(size_t *)member(row, values) = (size_t)number;
        break;
    case SP_FIELD_SEED:
        *(uint64_t *)member(row, values) = (uint64_t)(int64_t)number;
        break;
    case SP_FIELD_FLOAT:
        *(float *)member(row, values) = (float)number;
        break;
    case SP_FIELD_DOUBLE:
        *(double *)member(row, values) = number;
        break;
    default:
        break;
    }
}

sp_status sp_field_set_number(const sp_field *row, double number, void *values, sp_error *error)
{
    sp_status status = is_number(row->type) ? check_range(row, number, SP_ERR_INPUT, error) : SP_OK;

    if (status == SP_OK)
        store_number(row, number, values);
    return status;
}

void sp_fields_set_defaults(const sp_field_part *part, size_t which)
{
    for (size_t i = 0; i < part->n; i++)
        store_number(&part->rows[i], part->rows[i].defaults[which], part->values);
}

static double load_number(const sp_field *row, void *values)
{
    switch (row->type) {
    case SP_FIELD_INT:
        return *(const int32_t *)member(row, values);
    case SP_FIELD_INT64:
        return (double)*(const int64_t *)member(row, values);
    case SP_FIELD_SIZE:
        return (double)*(const size_t *)member(row, values);
    case SP_FIELD_FLOAT:
        return (double)*(const float *)member(row, values);
    default:
        return *(const double *)member(row, values);
    }
}

sp_status sp_fields_check_ranges(const sp_field_part *part, sp_status failure, sp_error *error)
{
    for (size_t i = 0; i < part->n; i++) {
        const sp_field *row = &part->rows[i];
        sp_status status = SP_OK;

        if (is_number(row->type))
            status = check_range(row, load_number(row, part->values), failure, error);
        if (status != SP_OK)
            return status;
    }
    return SP_OK;
}

/* ---- lists --------------------------------------------------------------------------------- */

void sp_field_take_list(const sp_field *row, void *block, int32_t n, void *values)
{
    void **list = member(row, values);

    sp_free(*list);
    *list = block;
    *(int32_t *)(void *)((char *)values + row->count_offset) = n;
}

void sp_fields_free(const sp_field_part *part)
{
    for (size_t i = 0; i < part->n; i++)
        if (part->rows[i].count_offset != 0)
            sp_field_take_list(&part->rows[i], NULL, 0, part->values);
}

static sp_status bad_texts(const sp_field *row, sp_error *error)
{
    return sp_fail(error, SP_ERR_INPUT, NULL, row->name, -1,
                   "field \"%s\" must be a text or a list of at most %.0f, each of 1 to %zu bytes",
                   row->name, row->maximum, row->item_bytes_max);
}

/* One block: the pointers, followed by the texts. */
sp_status sp_field_set_texts(const sp_field *row, const char *const *texts, size_t n, void *values,
                             sp_error *error)
{
    size_t bytes = n * sizeof(char *);
    char **block;
    char *cursor;

    if ((double)n > row->maximum)
        return bad_texts(row, error);
    for (size_t i = 0; i < n; i++) {
        size_t length = texts[i] ? strlen(texts[i]) : 0;

        if (length < 1 || length > row->item_bytes_max)
            return bad_texts(row, error);
        bytes += length + 1;
    }
    if (n == 0) {
        sp_field_take_list(row, NULL, 0, values);
        return SP_OK;
    }
    block = sp_malloc(bytes);
    if (!block)
        return sp_fail_memory(error, bytes, row->name);
    cursor = (char *)(block + n);
    for (size_t i = 0; i < n; i++) {
        size_t length = strlen(texts[i]) + 1;

        block[i] = memcpy(cursor, texts[i], length);
        cursor += length;
    }
    sp_field_take_list(row, block, (int32_t)n, values);
    return SP_OK;
}

static sp_status read_texts(const sp_field *row, const json_t *value, void *values, sp_error *error)
{
    size_t n = json_is_array(value) ? json_array_size(value) : 1;
    const char **texts;
    sp_status status;

    if ((double)n > row->maximum)
        return bad_texts(row, error);
    texts = sp_calloc(n + 1, sizeof *texts);
    if (!texts)
        return sp_fail_memory(error, n * sizeof *texts, row->name);
    for (size_t i = 0; i < n; i++)
        texts[i] = json_string_value(json_is_array(value) ? json_array_get(value, i) : value);
    status = sp_field_set_texts(row, texts, n, values, error);
    sp_free(texts);
    return status;
}

sp_status sp_field_read_ids(const json_t *list, const char *field, int32_t **out_tokens,
                            int32_t *out_n, sp_error *error)
{
    size_t n = json_array_size(list);
    int32_t *tokens;

    if (n == 0 || n > INT32_MAX)
        return sp_fail(error, SP_ERR_INPUT, NULL, field, -1,
                       "field \"%s\" is not a list of at least one token id", field);
    tokens = sp_calloc(n, sizeof *tokens);
    if (!tokens)
        return sp_fail_memory(error, n * sizeof *tokens, field);
    for (size_t i = 0; i < n; i++) {
        const json_t *id = json_array_get(list, i);
        json_int_t value = json_integer_value(id);

        if (!json_is_integer(id) || value < 0 || value > INT32_MAX) {
            sp_free(tokens);
            return sp_fail(error, SP_ERR_INPUT, NULL, field, (int64_t)i,
                           "field \"%s\": element %zu is not a token id", field, i);
        }
        tokens[i] = (int32_t)value;
    }
    *out_tokens = tokens;
    *out_n = (int32_t)n;
    return SP_OK;
}

static sp_status read_ids(const sp_field *row, const json_t *value, void *values, sp_error *error)
{
    int32_t *tokens = NULL;
    int32_t n = 0;
    sp_status status = SP_OK;

    if (!json_is_array(value) || (double)json_array_size(value) > row->maximum)
        return sp_fail(error, SP_ERR_INPUT, NULL, row->name, -1,
                       "field \"%s\" must be a list of at most %.0f token ids", row->name,
                       row->maximum);
    if (json_array_size(value) > 0)
        status = sp_field_read_ids(value, row->name, &tokens, &n, error);
    if (status == SP_OK)
        sp_field_take_list(row, tokens, n, values);
    return status;
}

/* ---- reading ------------------------------------------------------------------------------- */

static sp_status read_row(const sp_field *row, const json_t *value, void *values, sp_error *error)
{
    switch (row->type) {
    case SP_FIELD_BOOL:
    case SP_FIELD_NOT:
        if (!json_is_boolean(value))
            return wrong_type(row, "true or false", error);
        store_number(row, json_is_true(value), values);
        return SP_OK;
    case SP_FIELD_INT:
        if (!json_is_integer(value))
            return wrong_type(row, "an integer", error);
        return sp_field_set_number(row, (double)json_integer_value(value), values, error);
    case SP_FIELD_SEED:
        if (!json_is_integer(value))
            return wrong_type(row, "an integer", error);
        *(uint64_t *)member(row, values) = (uint64_t)json_integer_value(value);
        return SP_OK;
    case SP_FIELD_FLOAT:
    case SP_FIELD_DOUBLE:
        if (!json_is_number(value))
            return wrong_type(row, "a number", error);
        return sp_field_set_number(row, json_number_value(value), values, error);
    case SP_FIELD_STRING:
        if (!json_is_string(value))
            return wrong_type(row, "a string", error);
        *(const char **)member(row, values) = json_string_value(value);
        return SP_OK;
    case SP_FIELD_TEXTS:
        return read_texts(row, value, values, error);
    case SP_FIELD_IDS:
        return read_ids(row, value, values, error);
    case SP_FIELD_OWN:
        return row->read(row, value, values, error);
    default:
        return SP_OK;
    }
}

static sp_status read_part(const json_t *object, unsigned form, const sp_field_part *part,
                           sp_error *error)
{
    sp_status status = SP_OK;

    for (size_t i = 0; i < part->n && status == SP_OK; i++) {
        const sp_field *row = &part->rows[i];
        const json_t *value = (row->forms & form) ? json_object_get(object, row->name) : NULL;

        if (value && !json_is_null(value))
            status = read_row(row, value, part->values, error);
    }
    return status;
}

sp_status sp_fields_read(const json_t *object, unsigned form, const sp_field_part *parts,
                         size_t n_parts, sp_error *error)
{
    sp_status status = sp_fields_admit(object, form, parts, n_parts, error);

    for (size_t i = 0; i < n_parts && status == SP_OK; i++)
        status = read_part(object, form, &parts[i], error);
    return status;
}
