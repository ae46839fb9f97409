/*
 * prefix.h: which KV pages contain which tokens, so that a sequence can begin with pages that
 * another one has computed. A part of sequence memory, its only caller. Owns the table only;
 * pages.h owns the holders of a page.
 *
 * A full page is identified by the page before it, its own tokens, and, if it is the first, by what
 * keys and values depend on beside tokens: the adapter's content digest and the request's scale.
 * (Precision and the measuring levers are the same for an engine's whole life.) All of these are
 * compared in full; the hash only finds the bucket. The page before is in the table as long as this
 * one is: a holder of a page holds all before it, and pages become idle, and are evicted, from the
 * last to the first.
 *
 * All memory is taken at creation. Pure: the same calls give the same answers.
 */
#ifndef SP_ENGINE_SCHEDULE_PREFIX_H
#define SP_ENGINE_SCHEDULE_PREFIX_H

#include <sidepath/adapter.h>

#include <stdbool.h>

/* What the keys and values of a token depend on beside the tokens up to it. */
typedef struct sp_prefix_key {
    sp_digest digest; /* all zero: the base */
    float scale;      /* 0 for the base */
} sp_prefix_key;

typedef struct sp_prefix {
    int32_t page_tokens, n_pages;
    uint32_t n_buckets;  /* a power of two */
    int32_t *buckets;    /* [n_buckets] first page, or -1 */
    int32_t *next;       /* [n_pages] in the bucket, or -1 */
    int32_t *parents;    /* [n_pages] the page before, or -1 */
    uint64_t *hashes;    /* [n_pages] of the whole prefix */
    sp_prefix_key *keys; /* [n_pages] of first pages */
    int32_t *tokens;     /* [n_pages, page_tokens] */
} sp_prefix;

/* A position in a prefix: the page before it, and the hash up to there. */
typedef struct sp_prefix_place {
    int32_t parent; /* -1: at the beginning */
    uint64_t hash;
} sp_prefix_place;

/* Both 1 or more. *out_prefix is owned by the caller. SP_ERR_MEMORY. */
sp_status sp_prefix_create(int32_t n_pages, int32_t page_tokens, sp_prefix *out_prefix);
/* An all-zero struct is fine. */
void sp_prefix_destroy(sp_prefix *prefix);

/* The place of a first page under this key. */
sp_prefix_place sp_prefix_begin(const sp_prefix_key *key);
/* The place after `page`, which contains these page_tokens tokens at `place`. */
sp_prefix_place sp_prefix_after(const sp_prefix *prefix, sp_prefix_place place, int32_t page,
                                const int32_t *tokens);

/* The page with these page_tokens tokens at this place, or -1. */
int32_t sp_prefix_find(const sp_prefix *prefix, const sp_prefix_key *key, sp_prefix_place place,
                       const int32_t *tokens);
/* Adds `page`, which contains these tokens at this place; no other page does. */
void sp_prefix_insert(sp_prefix *prefix, const sp_prefix_key *key, sp_prefix_place place,
                      const int32_t *tokens, int32_t page);
/* Removes `page`, which is in the table, and which no other entry follows. */
void sp_prefix_remove(sp_prefix *prefix, int32_t page);

/* Whether the table has `page`, in the bucket of its hash. */
bool sp_prefix_has(const sp_prefix *prefix, int32_t page);
/* Pages in the table. Time grows with n_pages. */
int32_t sp_prefix_entries(const sp_prefix *prefix);

#endif
