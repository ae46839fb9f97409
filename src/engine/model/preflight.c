#include "engine/model/preflight.h"

#include "base/assert.h"
#include "base/error.h"
#include "base/integer.h"

#include <sidepath/engine.h>

#define KV_TOKENS_MAX (INT32_MAX / 2)

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

sp_status sp_memory_preflight(const sp_memory_needs *needs, size_t free_bytes,
                              sp_memory_shares *out_shares, sp_error *error)
{
    sp_memory_shares shares = {needs->kv_tokens, needs->slots > 0 ? needs->host_cache : 0};
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
