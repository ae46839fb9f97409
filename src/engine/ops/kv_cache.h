/*
 * kv_cache.h: the memory of keys and values. Per layer one block of K pages and one of V pages:
 * element (token t, kv head h) of page p starts at ((p * kv_heads + h) * page_tokens + t) *
 * head_dim. Owns the bytes; sequence memory owns the assignment of pages to sequences.
 */
#ifndef SP_ENGINE_OPS_KV_CACHE_H
#define SP_ENGINE_OPS_KV_CACHE_H

#include "engine/ops/ops.h"

#include <sidepath/device.h>

#include <stdbool.h>

typedef struct sp_kv_cache {
    sp_device *device; /* borrowed */
    void *memory;      /* [layers][2][n_pages][kv_heads][page_tokens][head_dim] of dtype */
    sp_dtype dtype;
    int32_t layers, n_pages, kv_heads, page_tokens, head_dim;
    size_t bytes, half_layer_bytes;
} sp_kv_cache;

/* Bytes of one token's keys and values in all layers that have them. */
size_t sp_kv_token_bytes(const sp_attention_shape *shape, sp_dtype dtype);

/* With `resident` every page is touched now, else a large cache becomes resident as it is used.
 * *out_cache is owned by the caller. SP_ERR_MEMORY gives the bytes needed and names kv-tokens. */
sp_status sp_kv_cache_create(sp_device *device, const sp_attention_shape *shape, sp_dtype dtype,
                             int32_t n_pages, int32_t page_tokens, bool resident,
                             sp_kv_cache *out_cache, sp_error *error);
/* An all-zero struct is fine. The device must still exist. */
void sp_kv_cache_destroy(sp_kv_cache *cache);

/* The block of K pages, or of V pages, of a layer: borrowed until destruction. */
static inline void *sp_kv_cache_keys(const sp_kv_cache *cache, int32_t layer)
{
    return (char *)cache->memory + (size_t)layer * 2 * cache->half_layer_bytes;
}

static inline void *sp_kv_cache_values(const sp_kv_cache *cache, int32_t layer)
{
    return (char *)cache->memory + ((size_t)layer * 2 + 1) * cache->half_layer_bytes;
}

/* Byte offset of one head vector inside a layer's K or V block. */
static inline size_t sp_kv_cache_offset(const sp_kv_cache *cache, int32_t page, int32_t kv_head,
                                        int32_t token_in_page)
{
    size_t vector =
        ((size_t)page * (size_t)cache->kv_heads + (size_t)kv_head) * (size_t)cache->page_tokens +
        (size_t)token_in_page;

    return vector * (size_t)cache->head_dim * sp_dtype_bytes(cache->dtype);
}

#endif
