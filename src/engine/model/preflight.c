#include "engine/model/preflight.h"

#include "base/assert.h"
#include "base/error.h"
#include "base/integer.h"

#include <sidepath/engine.h>

#define KV_TOKENS_MAX (INT32_MAX / 2)
/* What is left, divided by these, is the most that is taken without a budget. */
#define STATES_SHARE    4
#define SNAPSHOTS_SHARE 8

static size_t times(size_t a, size_t b)
{
    return b != 0 && a > SIZE_MAX / b ? SIZE_MAX : a * b;
}

/* Subtracts `bytes` from *left, or reports that they are missing and which setting to change. */
static sp_status take(size_t *left, size_t bytes, const char *what, const char *setting,
                      const char *advice, sp_error *error)
{
    if (*left == SIZE_MAX && bytes < SIZE_MAX)
        return SP_OK;
    if (bytes > *left || bytes == SIZE_MAX)
        return sp_fail(error, SP_ERR_MEMORY, SP_CODE_MEMORY_SHORT, setting, -1,
                       "%s: %zu MiB needed, %zu MiB free; %s", what,
                       (bytes >> 20) + (bytes % (1 << 20) != 0), *left >> 20, advice);
    *left -= bytes;
    return SP_OK;
}

static sp_status take_weights(size_t weights, size_t *left, sp_error *error)
{
    return take(left, weights, "the base weights", "model",
                "take a smaller model, or raise memory if there is more", error);
}

sp_status sp_memory_preflight_weights(size_t weights, size_t free_bytes, sp_error *error)
{
    return take_weights(weights, &free_bytes, error);
}

static sp_status take_pool(const sp_memory_needs *needs, size_t *left, sp_error *error)
{
    sp_status status =
        take(left, times(needs->slot, (size_t)needs->slots), "the slots of the adapters",
             "max-loras", "lower max-loras, max-lora-rank or lora-modules", error);

    if (status == SP_OK)
        status = take(left, needs->overlay, "the rows that adapters replace", "overlay-bytes",
                      "lower overlay-bytes", error);
    if (status == SP_OK)
        status = take(left, needs->experts, "the router and expert pairs of adapters",
                      "expert-bytes", "lower expert-bytes or max-loras", error);
    return status;
}

/* Half of what is left, or all but the reserve, in whole pages. */
static int64_t open_kv_tokens(const sp_memory_needs *needs, size_t left)
{
    size_t part = needs->kv_reserve == 0 ? left / 2 : left - needs->kv_reserve;
    int64_t context = round_up(needs->max_context, needs->page_tokens);
    int64_t wanted = min64(needs->max_running * context, KV_TOKENS_MAX);
    int64_t fit = KV_TOKENS_MAX;

    if (needs->kv_reserve > left)
        part = 0;
    if (left == SIZE_MAX)
        fit = SP_KV_TOKENS_UNKNOWN;
    else if (part / needs->kv_token < (size_t)KV_TOKENS_MAX)
        fit = (int64_t)(part / needs->kv_token);
    fit = min64(wanted, fit) / needs->page_tokens * needs->page_tokens;
    return max64(fit, needs->page_tokens);
}

static sp_status check_budget(size_t budget, size_t one, const char *what, const char *setting,
                              const char *advice, sp_error *error)
{
    if (budget == 0 || budget >= one)
        return SP_OK;
    return sp_fail(error, SP_ERR_ARGUMENT, NULL, setting, -1,
                   "%s is %zu bytes, and %s takes %zu; %s", setting, budget, what, one, advice);
}

/* How many fit in the budget, or in a share of what is left; n_max at most. */
static int64_t how_many(size_t budget, size_t left, size_t share, size_t one, int64_t n_max)
{
    size_t bytes = budget > 0 ? budget : left / share;

    if (budget == 0 && left == SIZE_MAX)
        return n_max;
    return bytes / one < (size_t)n_max ? (int64_t)(bytes / one) : n_max;
}

static sp_status take_states(const sp_memory_needs *needs, size_t *left, int32_t *out_states,
                             sp_error *error)
{
    sp_status status = check_budget(needs->state_budget, needs->state, "the state of one request",
                                    "state-bytes", "raise it, or leave it open", error);
    int64_t n;

    if (status != SP_OK)
        return status;
    n = how_many(needs->state_budget, *left, STATES_SHARE, needs->state, needs->max_running);
    *out_states = (int32_t)max64(n, 1);
    return take(left, times(needs->state, (size_t)*out_states), "the recurrent states of requests",
                "state-bytes", "lower state-bytes or max-running, or what else takes memory",
                error);
}

/* One for each place in the cache where there may be one, at most. */
static sp_status take_snapshots(const sp_memory_needs *needs, size_t *left, int32_t *out_snapshots,
                                sp_error *error)
{
    int64_t context = round_up(needs->max_context, needs->page_tokens);
    int64_t tokens = needs->kv_tokens > 0 ? round_up(needs->kv_tokens, needs->page_tokens)
                                          : min64(needs->max_running * context, KV_TOKENS_MAX);
    sp_status status =
        check_budget(needs->snapshot_budget, needs->snapshot, "one snapshot",
                     "state-snapshot-bytes", "raise it, or set state-snapshot-tokens to 0", error);

    if (status != SP_OK)
        return status;
    *out_snapshots = (int32_t)how_many(needs->snapshot_budget, *left, SNAPSHOTS_SHARE,
                                       needs->snapshot, tokens / needs->snapshot_tokens);
    return take(left, times(needs->snapshot, (size_t)*out_snapshots),
                "the snapshots of recurrent states", "state-snapshot-bytes",
                "lower state-snapshot-bytes", error);
}

static sp_status take_recurrent(const sp_memory_needs *needs, size_t *left,
                                sp_memory_shares *shares, sp_error *error)
{
    sp_status status = SP_OK;

    if (needs->state > 0)
        status = take_states(needs, left, &shares->states, error);
    if (status == SP_OK && needs->state > 0 && needs->snapshot_tokens > 0)
        status = take_snapshots(needs, left, &shares->snapshots, error);
    return status;
}

sp_status sp_memory_preflight(const sp_memory_needs *needs, size_t free_bytes,
                              sp_memory_shares *out_shares, sp_error *error)
{
    sp_memory_shares shares = {.kv_tokens = needs->kv_tokens,
                               .host_cache = needs->slots > 0 ? needs->host_cache : 0};
    size_t left = free_bytes;
    sp_status status = take_weights(needs->weights, &left, error);

    SP_ASSERT(needs->kv_token > 0 && needs->page_tokens > 0);
    SP_ASSERT(needs->max_running > 0 && needs->max_context > 0);
    if (status == SP_OK && needs->draft > 0)
        status = take(&left, needs->draft, "the draft model", "draft-model",
                      "take a smaller one, or none", error);
    if (status == SP_OK && needs->slots > 0)
        status = take_pool(needs, &left, error);
    if (status == SP_OK)
        status = take(&left, needs->scratch, "the activations of a step", "step-rows",
                      "lower step-rows", error);
    if (status == SP_OK)
        status = take(&left, shares.host_cache, "the packed adapters beside the slots",
                      "host-cache-mib", "lower host-cache-mib", error);
    if (status == SP_OK)
        status = take_recurrent(needs, &left, &shares, error);
    if (status != SP_OK)
        return status;
    if (shares.kv_tokens == 0)
        shares.kv_tokens = open_kv_tokens(needs, left);
    status = take(&left, times(needs->kv_token, (size_t)shares.kv_tokens), "the KV cache",
                  "kv-tokens", "lower kv-tokens, or what else takes memory", error);
    if (status != SP_OK)
        return status;
    if (needs->slots > 0 && shares.host_cache == 0 && left < SIZE_MAX)
        shares.host_cache = needs->slot + left / 2;
    *out_shares = shares;
    return SP_OK;
}
