#include "engine/ops/kv_cache.h"

#include "base/error.h"

#include <string.h>

size_t sp_kv_token_bytes(const sp_attention_shape *shape, sp_dtype dtype)
{
    return (size_t)shape->layers * 2 * (size_t)shape->kv_heads * (size_t)shape->head_dim *
           sp_dtype_bytes(dtype);
}

sp_status sp_kv_cache_create(sp_device *device, const sp_attention_shape *shape, sp_dtype dtype,
                             int32_t n_pages, int32_t page_tokens, bool resident,
                             sp_kv_cache *out_cache, sp_error *error)
{
    sp_kv_cache cache = {
        .device = device,
        .dtype = dtype,
        .layers = shape->layers,
        .n_pages = n_pages,
        .kv_heads = shape->kv_heads,
        .page_tokens = page_tokens,
        .head_dim = shape->head_dim,
    };
    size_t half_token = sp_kv_token_bytes(shape, dtype) / 2 / (size_t)shape->layers;

    cache.half_layer_bytes = (size_t)n_pages * (size_t)page_tokens * half_token;
    cache.bytes = cache.half_layer_bytes * 2 * (size_t)shape->layers;
    if (sp_device_alloc(device, cache.bytes, &cache.memory, error) != SP_OK)
        return sp_fail(error, SP_ERR_MEMORY, NULL, "kv-tokens", -1,
                       "the KV cache of %lld tokens needs %zu MiB; lower kv-tokens",
                       (long long)n_pages * page_tokens, cache.bytes >> 20);
    if (resident)
        memset(cache.memory, 0, cache.bytes);
    *out_cache = cache;
    return SP_OK;
}

void sp_kv_cache_destroy(sp_kv_cache *cache)
{
    if (cache->memory)
        sp_device_free(cache->device, cache->memory);
    *cache = (sp_kv_cache){0};
}
