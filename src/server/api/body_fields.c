#include "server/api/body_fields.h"

#include "base/alloc.h"
#include "base/error.h"

#include <string.h>
#include <sys/random.h>

/* The server's own table over `fields` (may be NULL, to look fields up). */
static sp_field_part own_part(sp_body_fields *fields)
{
    return (sp_field_part){sp_body_rows, sp_n_body_rows, fields};
}

/* ---- the rule for fields ------------------------------------------------------------------- */

bool sp_body_fields_know(sp_field_set set, const char *path)
{
    size_t bytes = strcspn(path, ".[");
    sp_field_part own = own_part(NULL), engine = sp_request_part(NULL);

    return sp_field_find(&own, path, bytes, set) || sp_field_find(&engine, path, bytes, set);
}

sp_status sp_body_fields_check(const json_t *object, sp_field_set set, sp_error *error)
{
    const sp_field_part parts[] = {own_part(NULL), sp_request_part(NULL)};

    return sp_fields_admit(object, set, parts, 2, error);
}

/* ---- readers of single rows ------------------------------------------------------------------ */

sp_status sp_body_read_stream_options(const sp_field *row, const json_t *value, void *values,
                                      sp_error *error)
{
    sp_body_fields *fields = values;
    const char *name;
    json_t *option;

    if (!json_is_object(value))
        return sp_fail(error, SP_ERR_INPUT, NULL, row->name, -1, "field \"%s\" is not an object",
                       row->name);
    if (!fields->stream)
        return sp_fail(error, SP_ERR_INPUT, NULL, row->name, -1, "\"%s\" needs \"stream\": true",
                       row->name);
    json_object_foreach((json_t *)(uintptr_t)value, name, option)
    {
        bool *known = strcmp(name, "include_usage") == 0            ? &fields->include_usage
                      : strcmp(name, "continuous_usage_stats") == 0 ? &fields->usage_each
                                                                    : NULL;

        if (known && json_is_boolean(option))
            *known = json_is_true(option);
        else if (known || (!json_is_null(option) && !json_is_false(option)))
            return sp_fail(error, SP_ERR_INPUT, SP_CODE_UNSUPPORTED_FIELD, row->name, -1,
                           "\"stream_options\" takes \"include_usage\" and "
                           "\"continuous_usage_stats\": true or false, not \"%.100s\"",
                           name);
    }
    fields->usage_each &= fields->include_usage;
    return SP_OK;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

sp_status sp_digest_field_read(const char *field, const json_t *value, sp_digest *out_digest,
                               sp_error *error)
{
    const char *text = json_string_value(value);
    sp_digest digest;

    for (size_t i = 0; text && i < SP_DIGEST_BYTES; i++) {
        int high = hex_digit(text[2 * i]), low = high < 0 ? -1 : hex_digit(text[2 * i + 1]);

        if (low < 0)
            text = NULL;
        else
            digest.bytes[i] = (uint8_t)(high * 16 + low);
    }
    if (!text || text[2 * SP_DIGEST_BYTES])
        return sp_fail(error, SP_ERR_INPUT, NULL, field, -1,
                       "field \"%s\" is not a digest as answers give it: %d hexadecimal digits "
                       "in lower case",
                       field, 2 * SP_DIGEST_BYTES);
    *out_digest = digest;
    return SP_OK;
}

sp_status sp_body_read_digest(const sp_field *row, const json_t *value, void *values,
                              sp_error *error)
{
    sp_version_wish *version = &((sp_body_fields *)values)->version;
    sp_status status = sp_digest_field_read(row->name, value, &version->digest, error);

    version->has_digest |= status == SP_OK;
    return status;
}

sp_status sp_body_read_generation(const sp_field *row, const json_t *value, void *values,
                                  sp_error *error)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0)
        return sp_fail(error, SP_ERR_INPUT, NULL, row->name, -1,
                       "field \"%s\" must be a whole number, at least 0", row->name);
    ((sp_body_fields *)values)->version.min_generation = (uint64_t)json_integer_value(value);
    return SP_OK;
}

/* ---- reading ------------------------------------------------------------------------------- */

static uint64_t random_seed(void)
{
    uint64_t seed;

    /* A seed that could be guessed is no harm: it only must not repeat. */
    if (getrandom(&seed, sizeof seed, GRND_NONBLOCK) < 0)
        seed = (uint64_t)(uintptr_t)&seed;
    return seed;
}

/* max_completion_tokens is the newer name of max_tokens; both must not disagree. */
static sp_status join_max_tokens(const json_t *object, sp_body_fields *fields, sp_error *error)
{
    if (fields->newer_max_tokens < 0)
        return SP_OK;
    if (json_is_integer(json_object_get(object, "max_tokens")) &&
        fields->request.max_tokens != fields->newer_max_tokens)
        return sp_fail(error, SP_ERR_INPUT, NULL, "max_tokens", -1,
                       "\"max_tokens\" and \"max_completion_tokens\" differ");
    fields->request.max_tokens = fields->newer_max_tokens;
    return SP_OK;
}

sp_status sp_body_fields_read(const json_t *object, sp_field_set set, const sp_request *defaults,
                              sp_body_fields *out_fields, sp_error *error)
{
    sp_body_fields *fields = out_fields;
    sp_field_part own = own_part(fields);
    sp_status status;

    *fields = (sp_body_fields){.request = *defaults, .newer_max_tokens = -1};
    sp_fields_set_defaults(&own, SP_LEFT_OUT_API);
    fields->newer_max_tokens = -1;
    fields->request.seed = random_seed();
    if (set == SP_FIELDS_CHAT)
        fields->request.max_tokens = -1;
    status = sp_request_read(object, set, &own, 1, &fields->request, error);
    if (status == SP_OK)
        status = join_max_tokens(object, fields, error);
    fields->n_own_stop_tokens = fields->request.n_stop_tokens;
    fields->ignore_eos = fields->request.ignore_eos;
    if (status != SP_OK)
        sp_body_fields_free(fields);
    return status;
}

void sp_body_fields_free(sp_body_fields *fields)
{
    sp_request_free_lists(&fields->request);
}

static sp_status add_stop_tokens(sp_body_fields *fields, const int32_t *tokens, int32_t n,
                                 sp_error *error)
{
    sp_request *request = &fields->request;
    size_t bytes = ((size_t)request->n_stop_tokens + (size_t)n) * sizeof *tokens;
    int32_t *grown;

    if (n == 0)
        return SP_OK;
    grown = sp_realloc((void *)(uintptr_t)request->stop_tokens, bytes);
    if (!grown)
        return sp_fail_memory(error, bytes, "stop_token_ids");
    memcpy(grown + request->n_stop_tokens, tokens, (size_t)n * sizeof *tokens);
    request->stop_tokens = grown;
    request->n_stop_tokens += n;
    return SP_OK;
}

sp_status sp_body_fields_set_ends(sp_body_fields *fields, const sp_lora_chat *lora,
                                  const int32_t *turn_ends, int32_t n_turn_ends, sp_error *error)
{
    sp_status status = SP_OK;

    fields->request.n_stop_tokens = fields->n_own_stop_tokens;
    fields->request.ignore_eos = fields->ignore_eos;
    if (fields->ignore_eos)
        return SP_OK;
    if (lora && lora->ends_error.status != SP_OK) {
        *error = lora->ends_error;
        return error->status;
    }
    if (lora && lora->has_ends) {
        fields->request.ignore_eos = true;
        status = add_stop_tokens(fields, lora->ends, lora->n_ends, error);
    }
    if (status == SP_OK)
        status = add_stop_tokens(fields, turn_ends, n_turn_ends, error);
    return status;
}
