#include "engine/request/request_table.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/grow.h"

#include <string.h>

#define OTHERS_MAX 3

sp_field_part sp_request_part(sp_request *request)
{
    return (sp_field_part){sp_request_rows, sp_n_request_rows, request};
}

sp_request sp_request_left_out(sp_left_out who)
{
    sp_request request = {.struct_bytes = sizeof request};
    sp_field_part part = sp_request_part(&request);

    sp_fields_set_defaults(&part, who);
    return request;
}

void sp_request_default(sp_request *out_request, size_t struct_bytes)
{
    const sp_request defaults = sp_request_left_out(SP_LEFT_OUT_LIBRARY);

    sp_struct_default(out_request, struct_bytes, &defaults, sizeof defaults);
}

void sp_request_free_lists(sp_request *request)
{
    sp_field_part part = sp_request_part(request);

    sp_fields_free(&part);
}

sp_status sp_request_read(const json_t *object, unsigned form, const sp_field_part *others,
                          size_t n_others, sp_request *request, sp_error *error)
{
    sp_field_part parts[OTHERS_MAX + 1] = {sp_request_part(request)};
    json_int_t top = json_integer_value(json_object_get(object, "top_logprobs"));
    sp_status status;

    if (n_others > OTHERS_MAX)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "n_others", -1, "too many tables of fields");
    if (n_others > 0)
        memcpy(parts + 1, others, n_others * sizeof *others);
    status = sp_fields_read(object, form, parts, n_others + 1, error);
    if (status == SP_OK && top > 0 && !request->logprobs && !request->prompt_logprobs)
        return sp_fail(error, SP_ERR_INPUT, NULL, "top_logprobs", -1,
                       "\"top_logprobs\" needs \"logprobs\": true");
    return status;
}

/* ---- readers of single rows ------------------------------------------------------------------ */

/* One id has one spelling: digits alone, without a zero before others, so that one key cannot hide
 * another. */
static bool read_id(const char *text, int32_t *out_id)
{
    size_t digits = strspn(text, "0123456789");
    int32_t id = 0;

    if (digits == 0 || digits > 9 || text[digits] != '\0' || (text[0] == '0' && digits > 1))
        return false;
    for (; *text; text++)
        id = id * 10 + (*text - '0');
    *out_id = id;
    return true;
}

static sp_status bad_bias(const char *id, const char *why, sp_error *error)
{
    return sp_fail(error, SP_ERR_INPUT, NULL, "logit_bias", -1,
                   "field \"logit_bias\": \"%.40s\" %s", id, why);
}

static sp_status read_bias_item(const char *id, const json_t *value, sp_logit_bias *out_bias,
                                sp_error *error)
{
    double bias = json_number_value(value);

    if (!read_id(id, &out_bias->token))
        return bad_bias(id, "is not an id", error);
    if (!json_is_number(value))
        return bad_bias(id, "has no number for a value", error);
    if (!(bias >= -SP_LOGIT_BIAS_ABS_MAX && bias <= SP_LOGIT_BIAS_ABS_MAX))
        return bad_bias(id, "has a value that is not from -100 to 100", error);
    out_bias->bias = (float)bias;
    return SP_OK;
}

sp_status sp_request_read_bias(const sp_field *row, const json_t *value, void *values,
                               sp_error *error)
{
    size_t n = json_object_size(value);
    sp_logit_bias *list;
    sp_status status = SP_OK;
    int32_t i = 0;
    const char *id;
    json_t *bias;

    if (!json_is_object(value) || (double)n > row->maximum)
        return sp_fail(error, SP_ERR_INPUT, NULL, row->name, -1,
                       "field \"%s\" must be an object of at most %.0f members", row->name,
                       row->maximum);
    list = n > 0 ? sp_calloc(n, sizeof *list) : NULL;
    if (n > 0 && !list)
        return sp_fail_memory(error, n * sizeof *list, row->name);
    json_object_foreach((json_t *)(uintptr_t)value, id, bias)
    {
        status = read_bias_item(id, bias, &list[i++], error);
        if (status != SP_OK) {
            sp_free(list);
            return status;
        }
    }
    sp_field_take_list(row, list, (int32_t)n, values);
    return SP_OK;
}

/* In completions the number of alternatives also switches logprobs on. */
sp_status sp_request_read_logprobs(const sp_field *row, const json_t *value, void *values,
                                   sp_error *error)
{
    sp_request *request = values;
    json_int_t n = json_integer_value(value);

    if (!json_is_integer(value) || n < 0 || (double)n > row->maximum)
        return sp_fail(error, SP_ERR_INPUT, NULL, row->name, -1,
                       "field \"%s\" must be a whole number from 0 to %.0f", row->name,
                       row->maximum);
    request->logprobs = true;
    request->top_logprobs = (int32_t)n;
    return SP_OK;
}

sp_status sp_request_read_speculative(const sp_field *row, const json_t *value, void *values,
                                      sp_error *error)
{
    sp_request *request = values;

    if (!json_is_boolean(value))
        return sp_fail(error, SP_ERR_INPUT, NULL, row->name, -1,
                       "field \"%s\" is not true or false", row->name);
    request->speculative = json_is_true(value) ? SP_SPECULATIVE_ON : SP_SPECULATIVE_OFF;
    return SP_OK;
}
