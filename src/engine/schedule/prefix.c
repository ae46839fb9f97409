#include "engine/schedule/prefix.h"

#include "base/alloc.h"
#include "base/assert.h"
#include "base/hash.h"

#include <string.h>

sp_status sp_prefix_create(int32_t n_pages, int32_t page_tokens, sp_prefix *out_prefix)
{
    sp_prefix prefix = {.page_tokens = page_tokens, .n_pages = n_pages, .n_buckets = 16};
    size_t n = (size_t)n_pages;

    while (prefix.n_buckets < (uint32_t)n_pages)
        prefix.n_buckets *= 2;
    prefix.buckets = sp_calloc(prefix.n_buckets, sizeof *prefix.buckets);
    prefix.next = sp_calloc(n, sizeof *prefix.next);
    prefix.parents = sp_calloc(n, sizeof *prefix.parents);
    prefix.hashes = sp_calloc(n, sizeof *prefix.hashes);
    prefix.keys = sp_calloc(n, sizeof *prefix.keys);
    prefix.tokens = sp_calloc(n * (size_t)page_tokens, sizeof *prefix.tokens);
    if (!prefix.buckets || !prefix.next || !prefix.parents || !prefix.hashes || !prefix.keys ||
        !prefix.tokens) {
        sp_prefix_destroy(&prefix);
        return SP_ERR_MEMORY;
    }
    memset(prefix.buckets, 0xff, prefix.n_buckets * sizeof *prefix.buckets);
    *out_prefix = prefix;
    return SP_OK;
}

void sp_prefix_destroy(sp_prefix *prefix)
{
    sp_free(prefix->tokens);
    sp_free(prefix->keys);
    sp_free(prefix->hashes);
    sp_free(prefix->parents);
    sp_free(prefix->next);
    sp_free(prefix->buckets);
    *prefix = (sp_prefix){0};
}

/* Field by field: the struct may have padding. */
static bool same_key(const sp_prefix_key *a, const sp_prefix_key *b)
{
    return memcmp(&a->digest, &b->digest, sizeof a->digest) == 0 &&
           memcmp(&a->scale, &b->scale, sizeof a->scale) == 0;
}

static uint64_t mix(uint64_t hash, uint64_t more)
{
    uint64_t pair[2] = {hash, more};

    return sp_xxh3(pair, sizeof pair);
}

sp_prefix_place sp_prefix_begin(const sp_prefix_key *key)
{
    uint64_t scale = sp_xxh3(&key->scale, sizeof key->scale);

    return (sp_prefix_place){-1, mix(sp_xxh3(&key->digest, sizeof key->digest), scale)};
}

static uint64_t hash_after(const sp_prefix *prefix, uint64_t hash, const int32_t *tokens)
{
    return mix(hash, sp_xxh3(tokens, (size_t)prefix->page_tokens * sizeof *tokens));
}

sp_prefix_place sp_prefix_after(const sp_prefix *prefix, sp_prefix_place place, int32_t page,
                                const int32_t *tokens)
{
    return (sp_prefix_place){page, hash_after(prefix, place.hash, tokens)};
}

static int32_t *bucket_of(const sp_prefix *prefix, uint64_t hash)
{
    return &prefix->buckets[hash & (prefix->n_buckets - 1)];
}

static int32_t *tokens_of(const sp_prefix *prefix, int32_t page)
{
    return prefix->tokens + (size_t)page * (size_t)prefix->page_tokens;
}

int32_t sp_prefix_find(const sp_prefix *prefix, const sp_prefix_key *key, sp_prefix_place place,
                       const int32_t *tokens)
{
    uint64_t hash = hash_after(prefix, place.hash, tokens);
    size_t bytes = (size_t)prefix->page_tokens * sizeof *tokens;

    for (int32_t page = *bucket_of(prefix, hash); page >= 0; page = prefix->next[page])
        if (prefix->hashes[page] == hash && prefix->parents[page] == place.parent &&
            memcmp(tokens_of(prefix, page), tokens, bytes) == 0 &&
            (place.parent >= 0 || same_key(&prefix->keys[page], key)))
            return page;
    return -1;
}

void sp_prefix_insert(sp_prefix *prefix, const sp_prefix_key *key, sp_prefix_place place,
                      const int32_t *tokens, int32_t page)
{
    uint64_t hash = hash_after(prefix, place.hash, tokens);
    int32_t *bucket = bucket_of(prefix, hash);

    SP_ASSERT(page >= 0 && page < prefix->n_pages && page != place.parent);
    SP_ASSERT(sp_prefix_find(prefix, key, place, tokens) < 0);
    prefix->hashes[page] = hash;
    prefix->parents[page] = place.parent;
    prefix->keys[page] = *key;
    memcpy(tokens_of(prefix, page), tokens, (size_t)prefix->page_tokens * sizeof *tokens);
    prefix->next[page] = *bucket;
    *bucket = page;
}

void sp_prefix_remove(sp_prefix *prefix, int32_t page)
{
    int32_t *link = bucket_of(prefix, prefix->hashes[page]);

    SP_ASSERT(sp_prefix_has(prefix, page));
    while (*link != page)
        link = &prefix->next[*link];
    *link = prefix->next[page];
}

/* ---- what must hold ------------------------------------------------------------------------ */

bool sp_prefix_has(const sp_prefix *prefix, int32_t page)
{
    int32_t at = *bucket_of(prefix, prefix->hashes[page]);

    while (at >= 0 && at != page)
        at = prefix->next[at];
    return at >= 0;
}

int32_t sp_prefix_entries(const sp_prefix *prefix)
{
    int32_t n = 0;

    for (uint32_t bucket = 0; bucket < prefix->n_buckets; bucket++)
        for (int32_t page = prefix->buckets[bucket]; page >= 0; page = prefix->next[page])
            n++;
    return n;
}
