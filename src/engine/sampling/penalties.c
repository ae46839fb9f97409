#include "engine/sampling/penalties.h"

#include "base/error.h"

/* ---- checks -------------------------------------------------------------------------------- */

static sp_status check_range(const char *field, double value, double minimum, double maximum,
                             sp_error *error)
{
    if (value >= minimum && value <= maximum) /* false for NaN */
        return SP_OK;
    return sp_fail(error, SP_ERR_INPUT, NULL, field, -1, "%s is %g; it must be %g to %g", field,
                   value, minimum, maximum);
}

static sp_status check_bias(const sp_penalties *penalties, int32_t vocab, sp_error *error)
{
    int32_t n = penalties->n_bias;

    if (n < 0 || n > SP_LOGIT_BIAS_MAX || (n > 0 && !penalties->bias))
        return sp_fail(error, SP_ERR_INPUT, NULL, "logit_bias", -1,
                       "logit_bias has %d ids; it may have at most %d", n, SP_LOGIT_BIAS_MAX);
    for (int32_t i = 0; i < n; i++) {
        const sp_logit_bias *bias = &penalties->bias[i];

        if (bias->token < 0 || bias->token >= vocab)
            return sp_fail(error, SP_ERR_INPUT, NULL, "logit_bias", i,
                           "logit_bias names the id %d; the vocabulary has %d", bias->token, vocab);
        if (!(bias->bias >= -100.0f && bias->bias <= 100.0f))
            return sp_fail(error, SP_ERR_INPUT, NULL, "logit_bias", i,
                           "logit_bias of the id %d is %g; it must be -100 to 100", bias->token,
                           (double)bias->bias);
        for (int32_t j = 0; j < i; j++)
            if (penalties->bias[j].token == bias->token)
                return sp_fail(error, SP_ERR_INPUT, NULL, "logit_bias", i,
                               "logit_bias names the id %d twice", bias->token);
    }
    return SP_OK;
}

sp_status sp_penalties_check(const sp_penalties *penalties, int32_t vocab, sp_error *error)
{
    sp_status status = check_range("presence_penalty", penalties->presence, -2, 2, error);

    if (status == SP_OK)
        status = check_range("frequency_penalty", penalties->frequency, -2, 2, error);
    if (status == SP_OK)
        status = check_range("repetition_penalty", penalties->repetition, 0.01, 100, error);
    return status == SP_OK ? check_bias(penalties, vocab, error) : status;
}

/* ---- arithmetic ---------------------------------------------------------------------------- */

static bool has_repetition(const sp_penalties *penalties)
{
    return penalties->repetition < 1 || penalties->repetition > 1;
}

static bool has_additive(const sp_penalties *penalties)
{
    return penalties->presence < 0 || penalties->presence > 0 || penalties->frequency < 0 ||
           penalties->frequency > 0;
}

bool sp_penalties_any(const sp_penalties *penalties)
{
    return penalties->n_bias > 0 || has_repetition(penalties) || has_additive(penalties);
}

/* A token that is in the output `count` times, or, with 0, in the prompt only. */
static float penalise(const sp_penalties *penalties, float logit, int32_t count)
{
    float repetition = (float)penalties->repetition;

    logit = logit > 0 ? logit / repetition : logit * repetition;
    if (count == 0)
        return logit;
    logit -= (float)penalties->frequency * (float)count;
    return logit - (float)penalties->presence;
}

#define DONE (-1) /* a count that says: this id's logit has been changed */

void sp_penalties_apply(const sp_penalties *penalties, const int32_t *tokens, int32_t n_prompt,
                        int32_t n_tokens, int32_t *counts, float *logits)
{
    /* The prompt concerns the repetition penalty alone. */
    int32_t first = has_repetition(penalties) ? 0 : n_prompt;

    for (int32_t i = 0; i < penalties->n_bias; i++)
        logits[penalties->bias[i].token] += penalties->bias[i].bias;
    if (!has_repetition(penalties) && !has_additive(penalties))
        return;
    for (int32_t i = first; i < n_tokens; i++)
        counts[tokens[i]] = 0;
    for (int32_t i = n_prompt; i < n_tokens; i++)
        counts[tokens[i]]++;
    for (int32_t i = first; i < n_tokens; i++) {
        int32_t token = tokens[i];

        if (counts[token] == DONE)
            continue;
        logits[token] = penalise(penalties, logits[token], counts[token]);
        counts[token] = DONE;
    }
}
