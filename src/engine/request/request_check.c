/*
 * request_check.c: the engine's own checks of a request, whatever its source.
 */
#include "base/error.h"
#include "base/text.h"
#include "engine/request/request_table.h"
#include "engine/sampling/stop.h"

#include <string.h>

static sp_status check_pointers(const sp_request *request, sp_error *error)
{
    if (request->n_logit_bias > 0 && !request->logit_bias)
        return sp_fail_null(error, "logit_bias");
    if (request->n_stop > 0 && !request->stop)
        return sp_fail_null(error, "stop");
    if (request->n_stop_tokens > 0 && !request->stop_tokens)
        return sp_fail_null(error, "stop_tokens");
    return SP_OK;
}

static sp_status check_bias(const sp_logit_bias *list, int32_t n, int32_t vocab, sp_error *error)
{
    if (n < 0 || n > SP_LOGIT_BIAS_MAX)
        return sp_fail(error, SP_ERR_INPUT, NULL, "logit_bias", -1,
                       "logit_bias has %d ids; it may have at most %d", n, SP_LOGIT_BIAS_MAX);
    for (int32_t i = 0; i < n; i++) {
        if (list[i].token < 0 || list[i].token >= vocab)
            return sp_fail(error, SP_ERR_INPUT, NULL, "logit_bias", i,
                           "logit_bias names the id %d; the vocabulary has %d", list[i].token,
                           vocab);
        if (!(list[i].bias >= -SP_LOGIT_BIAS_ABS_MAX && list[i].bias <= SP_LOGIT_BIAS_ABS_MAX))
            return sp_fail(error, SP_ERR_INPUT, NULL, "logit_bias", i,
                           "logit_bias of the id %d is %g; it must be from -100 to 100",
                           list[i].token, (double)list[i].bias);
        for (int32_t j = 0; j < i; j++)
            if (list[j].token == list[i].token)
                return sp_fail(error, SP_ERR_INPUT, NULL, "logit_bias", i,
                               "logit_bias names the id %d twice", list[i].token);
    }
    return SP_OK;
}

static sp_status check_stop(const char *const *list, int32_t n, sp_error *error)
{
    if (n < 0 || n > SP_STOP_STRINGS_MAX)
        return sp_fail(error, SP_ERR_INPUT, NULL, "stop", -1,
                       "stop has %d strings; it may have at most %d", n, SP_STOP_STRINGS_MAX);
    for (int32_t i = 0; i < n; i++) {
        size_t bytes = list[i] ? strnlen(list[i], SP_STOP_TEXT_BYTES_MAX + 1) : 0;

        if (bytes < 1 || bytes > SP_STOP_TEXT_BYTES_MAX || !sp_utf8_valid(list[i], bytes))
            return sp_fail(error, SP_ERR_INPUT, NULL, "stop", i,
                           "stop must be strings of UTF-8, each of 1 to %d bytes",
                           SP_STOP_TEXT_BYTES_MAX);
    }
    return SP_OK;
}

static sp_status check_ends(const sp_request *request, int32_t vocab, sp_error *error)
{
    int32_t n = request->n_stop_tokens;

    if (n < 0 || n > SP_STOP_TOKENS_MAX)
        return sp_fail(error, SP_ERR_INPUT, NULL, "stop_token_ids", -1,
                       "stop_token_ids has %d ids; it may have at most %d", n, SP_STOP_TOKENS_MAX);
    for (int32_t i = 0; i < n; i++)
        if (request->stop_tokens[i] < 0 || request->stop_tokens[i] >= vocab)
            return sp_fail(error, SP_ERR_INPUT, NULL, "stop_token_ids", i,
                           "stop_token_ids names the id %d; the vocabulary has %d",
                           request->stop_tokens[i], vocab);
    if (request->min_tokens > request->max_tokens)
        return sp_fail(error, SP_ERR_INPUT, NULL, "min_tokens", -1,
                       "min_tokens is %d; it must be from 0 to max_tokens, which is %d",
                       request->min_tokens, request->max_tokens);
    return SP_OK;
}

static sp_status check_speculative(const sp_request *request, sp_error *error)
{
    if (request->speculative >= SP_SPECULATIVE_DEFAULT &&
        request->speculative <= SP_SPECULATIVE_OFF)
        return SP_OK;
    return sp_fail(error, SP_ERR_INPUT, NULL, "speculative", -1,
                   "speculative is %d, which is no sp_speculative", (int)request->speculative);
}

sp_status sp_request_check(const sp_request *request, int32_t vocab, sp_error *error)
{
    sp_field_part part = sp_request_part((sp_request *)(uintptr_t)request);
    sp_status status = check_pointers(request, error);

    if (status == SP_OK)
        status = sp_fields_check_ranges(&part, SP_ERR_INPUT, error);
    if (status == SP_OK)
        status = check_bias(request->logit_bias, request->n_logit_bias, vocab, error);
    if (status == SP_OK)
        status = check_stop(request->stop, request->n_stop, error);
    if (status == SP_OK)
        status = check_ends(request, vocab, error);
    if (status == SP_OK)
        status = check_speculative(request, error);
    return status;
}
