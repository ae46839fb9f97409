#include "server/api/score_request.h"

#include "base/alloc.h"
#include "base/error.h"

#include <string.h>

/* Fields of a completion that mean the same here, since its tokens are what is scored. */
static const char *const sampling_fields[] = {
    "model",
    "adapter_digest",
    "min_generation",
    "lora_scale",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "processed_logprobs",
    "routed_experts",
};

static bool is_sampling_field(const char *name)
{
    for (size_t i = 0; i < sizeof sampling_fields / sizeof *sampling_fields; i++)
        if (strcmp(sampling_fields[i], name) == 0)
            return true;
    return false;
}

/* Each field is one of a completion's, or one of this body's own. */
static sp_status split(const json_t *body, json_t *out_sampling, sp_error *error)
{
    json_t *own = json_object();
    const char *name;
    json_t *value;
    sp_status status = own ? SP_OK : sp_fail_memory(error, 1, "a request");

    json_object_foreach((json_t *)(uintptr_t)body, name, value)
    {
        if (status == SP_OK &&
            json_object_set(is_sampling_field(name) ? out_sampling : own, name, value) != 0)
            status = sp_fail_memory(error, 1, "a request");
    }
    if (status == SP_OK)
        status = sp_body_fields_check(own, SP_FIELDS_SCORE, error);
    json_decref(own);
    return status;
}

static sp_status read_encoding(const json_t *body, sp_score_request *request, sp_error *error)
{
    const char *encoding;
    sp_status status = sp_json_string(body, "encoding_format", false, NULL, &encoding, error);

    if (status != SP_OK)
        return status;
    request->base64 = encoding && strcmp(encoding, "base64") == 0;
    if (encoding && !request->base64 && strcmp(encoding, "float") != 0)
        return sp_fail(error, SP_ERR_INPUT, NULL, "encoding_format", -1,
                       "field \"encoding_format\" is \"float\" or \"base64\"");
    return SP_OK;
}

/* One number for all sequences, or one for each; without it all but the first token are scored. */
static sp_status read_from(const json_t *lengths, size_t i, sp_scored *sequence, sp_error *error)
{
    const json_t *value = json_is_array(lengths) ? json_array_get(lengths, i) : lengths;
    json_int_t from = json_integer_value(value);

    sequence->from = 1;
    if (!lengths || json_is_null(lengths))
        return SP_OK;
    if (!json_is_integer(value) || from < 1 || from > sequence->n_tokens)
        return sp_fail(error, SP_ERR_INPUT, NULL, "prompt_lengths", (int64_t)i,
                       "\"prompt_lengths\" of sequence %zu must be from 1 to its length, which is "
                       "%d",
                       i, sequence->n_tokens);
    sequence->from = (int32_t)from;
    return SP_OK;
}

static sp_status read_sequences(const json_t *body, sp_score_request *request, sp_error *error)
{
    const json_t *list = json_object_get(body, "sequences");
    const json_t *lengths = json_object_get(body, "prompt_lengths");
    size_t n = json_array_size(list);
    sp_status status = SP_OK;

    if (n < 1 || n > SP_SEQUENCES_MAX)
        return sp_fail(error, SP_ERR_INPUT, NULL, "sequences", -1,
                       "field \"sequences\" must be a list of 1 to %d lists of token ids",
                       SP_SEQUENCES_MAX);
    if (json_is_array(lengths) && json_array_size(lengths) != n)
        return sp_fail(error, SP_ERR_INPUT, NULL, "prompt_lengths", -1,
                       "\"prompt_lengths\" must be a number, or one for each sequence");
    request->sequences = sp_calloc(n, sizeof *request->sequences);
    if (!request->sequences)
        return sp_fail_memory(error, n * sizeof *request->sequences, "sequences");
    request->n_sequences = (int32_t)n;
    for (size_t i = 0; i < n && status == SP_OK; i++) {
        sp_scored *sequence = &request->sequences[i];

        status = sp_field_read_ids(json_array_get(list, i), "sequences", &sequence->tokens,
                                   &sequence->n_tokens, error);
        if (status == SP_OK)
            status = read_from(lengths, i, sequence, error);
    }
    return status;
}

sp_status sp_score_request_read(json_t *body, const sp_request *defaults,
                                sp_score_request *out_request, sp_error *error)
{
    sp_score_request request = {.body = json_incref(body), .sampling = json_object()};
    sp_status status =
        request.sampling ? SP_OK : sp_fail_memory(error, sizeof request, "a request");

    if (status == SP_OK)
        status = split(body, request.sampling, error);
    if (status == SP_OK)
        status = sp_body_fields_read(request.sampling, SP_FIELDS_COMPLETION, defaults,
                                     &request.fields, error);
    if (status == SP_OK)
        status = read_encoding(body, &request, error);
    if (status == SP_OK)
        status = read_sequences(body, &request, error);
    if (status == SP_OK)
        *out_request = request;
    else
        sp_score_request_free(&request);
    return status;
}

void sp_score_request_free(sp_score_request *request)
{
    for (int32_t i = 0; i < request->n_sequences; i++)
        sp_free(request->sequences[i].tokens);
    sp_free(request->sequences);
    sp_body_fields_free(&request->fields);
    json_decref(request->sampling);
    json_decref(request->body);
    *request = (sp_score_request){.body = NULL};
}
