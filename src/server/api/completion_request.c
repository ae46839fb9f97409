#include "server/api/completion_request.h"

#include "base/alloc.h"
#include "base/error.h"

#include <string.h>

static sp_status read_prompt(const json_t *value, sp_prompt *prompt, sp_error *error)
{
    if (json_is_string(value)) {
        prompt->text = json_string_value(value);
        prompt->text_bytes = json_string_length(value);
        return SP_OK;
    }
    if (json_is_array(value))
        return sp_field_read_ids(value, "prompt", &prompt->tokens, &prompt->n_tokens, error);
    return sp_fail(error, SP_ERR_INPUT, NULL, "prompt", -1,
                   "field \"prompt\" must be a text, a list of texts, a list of token ids, or a "
                   "list of such lists");
}

/* A list whose first element is a number is one prompt; any other list is one of prompts. */
static sp_status read_prompts(const json_t *body, sp_completion_request *request, sp_error *error)
{
    const json_t *value = json_object_get(body, "prompt");
    bool many = json_is_array(value) && !json_is_number(json_array_get(value, 0));
    size_t n = many ? json_array_size(value) : 1;
    sp_status status = SP_OK;

    if (!value || json_is_null(value))
        return sp_fail(error, SP_ERR_INPUT, NULL, "prompt", -1, "field \"prompt\" is missing");
    if (n < 1 || n > SP_PROMPTS_MAX)
        return sp_fail(error, SP_ERR_INPUT, NULL, "prompt", -1,
                       "field \"prompt\" holds %zu prompts; from 1 to %d are taken", n,
                       SP_PROMPTS_MAX);
    request->prompts = sp_calloc(n, sizeof *request->prompts);
    if (!request->prompts)
        return sp_fail_memory(error, n * sizeof *request->prompts, "prompts");
    request->n_prompts = (int32_t)n;
    for (size_t i = 0; i < n && status == SP_OK; i++)
        status = read_prompt(many ? json_array_get(value, i) : value, &request->prompts[i], error);
    return status;
}

/* The best can only be told when all are there, which is no stream. */
static sp_status settle_best_of(sp_completion_request *request, sp_error *error)
{
    const sp_body_fields *fields = &request->fields;

    request->best_of = fields->best_of > 0 ? fields->best_of : fields->n;
    if (request->best_of < fields->n)
        return sp_fail(error, SP_ERR_INPUT, NULL, "best_of", -1,
                       "best_of is %d; it must be from n, which is %d, to %d", request->best_of,
                       fields->n, SP_N_MAX);
    if (fields->stream && request->best_of > fields->n)
        return sp_fail(error, SP_ERR_INPUT, SP_CODE_UNSUPPORTED_FIELD, "best_of", -1,
                       "\"best_of\" above \"n\" and \"stream\" exclude each other");
    return SP_OK;
}

sp_status sp_completion_request_read(json_t *body, const sp_request *defaults,
                                     sp_completion_request *out_request, sp_error *error)
{
    sp_completion_request request = {.body = json_incref(body)};
    sp_status status =
        sp_body_fields_read(body, SP_FIELDS_COMPLETION, defaults, &request.fields, error);

    if (status == SP_OK)
        status = settle_best_of(&request, error);
    if (status == SP_OK)
        status = read_prompts(body, &request, error);
    if (status != SP_OK) {
        sp_completion_request_free(&request);
        return status;
    }
    *out_request = request;
    return SP_OK;
}

void sp_completion_request_free(sp_completion_request *request)
{
    for (int32_t i = 0; i < request->n_prompts; i++)
        sp_free(request->prompts[i].tokens);
    sp_free(request->prompts);
    sp_body_fields_free(&request->fields);
    json_decref(request->body);
    *request = (sp_completion_request){.body = NULL};
}
