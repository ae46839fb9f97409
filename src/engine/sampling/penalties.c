#include "engine/sampling/penalties.h"

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

int32_t sp_penalties_first(const sp_penalties *penalties, int32_t n_prompt, int32_t n_tokens)
{
    if (has_repetition(penalties))
        return 0;
    return has_additive(penalties) ? n_prompt : n_tokens;
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

#define DONE (-1) /* a count that marks an id whose logit was changed */

void sp_penalties_apply(const sp_penalties *penalties, const int32_t *tokens, int32_t n_prompt,
                        int32_t n_tokens, int32_t *counts, float *logits)
{
    int32_t first = sp_penalties_first(penalties, n_prompt, n_tokens);

    for (int32_t i = 0; i < penalties->n_bias; i++)
        logits[penalties->bias[i].token] += penalties->bias[i].bias;
    if (first == n_tokens)
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
