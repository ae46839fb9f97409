/*
 * pages.h: which KV pages are free, held or idle. A part of sequence memory, its only caller. Owns
 * page numbers only; kv_cache owns the bytes. Pure and allocation-free after creation.
 *
 * A page is free, held by one or more sequences, or idle: no sequence holds it, but its content is
 * known (prefix.h) and may be reused. Idle pages are evicted when no page is free, in the order in
 * which they became idle.
 */
#ifndef SP_ENGINE_SCHEDULE_PAGES_H
#define SP_ENGINE_SCHEDULE_PAGES_H

#include <sidepath/status.h>

#include <stdbool.h>

typedef struct sp_pages {
    int32_t *free_pages; /* [n_pages], a stack: the last freed is taken first */
    int32_t n_free, n_pages;
    int32_t *holders;         /* [n_pages] sequences that hold the page */
    bool *known;              /* [n_pages] its content is in the prefix table */
    int32_t *older, *younger; /* [n_pages] neighbours in the list of idle pages, or -1 */
    int32_t oldest, youngest; /* ends of that list, or -1 */
    int32_t n_idle;
    int32_t used_max; /* the most pages that were held at a time */
} sp_pages;

/* n_pages: 1 or more. *out_pages is owned by the caller. SP_ERR_MEMORY. */
sp_status sp_pages_create(int32_t n_pages, sp_pages *out_pages);
/* An all-zero struct is fine. */
void sp_pages_destroy(sp_pages *pages);

/* A free page, held once, or -1. */
int32_t sp_pages_take(sp_pages *pages);
/* The oldest idle page, now held once and no longer known, or -1. */
int32_t sp_pages_evict(sp_pages *pages);
/* One more holder of a page that is held or idle. */
void sp_pages_share(sp_pages *pages, int32_t page);
/* One holder less; without holders the page becomes idle if it is known, else free. */
void sp_pages_give(sp_pages *pages, int32_t page);
/* The content of a page with one holder is in the prefix table from now on. */
void sp_pages_set_known(sp_pages *pages, int32_t page);

/* Each page is free, held or idle, and the counts say so. Time grows with n_pages. */
bool sp_pages_is_consistent(const sp_pages *pages);

static inline bool sp_pages_is_known(const sp_pages *pages, int32_t page)
{
    return pages->known[page];
}

/* One sequence holds it, and no other can get it: it may be written. */
static inline bool sp_pages_is_private(const sp_pages *pages, int32_t page)
{
    return pages->holders[page] == 1 && !pages->known[page];
}

/* Pages that sp_pages_take and sp_pages_evict can return. */
static inline int32_t sp_pages_available(const sp_pages *pages)
{
    return pages->n_free + pages->n_idle;
}

/* Pages that hold n_tokens (0 or more) tokens. */
static inline int32_t sp_pages_for(int32_t n_tokens, int32_t page_tokens)
{
    return (n_tokens + page_tokens - 1) / page_tokens;
}

#endif
