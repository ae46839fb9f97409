/*
 * pages.h: which KV pages are free. Owns page numbers only; the memory behind them is kv_cache's.
 * Pure and allocation-free after creation.
 */
#ifndef SP_ENGINE_PAGES_H
#define SP_ENGINE_PAGES_H

#include <sidepath/status.h>

typedef struct sp_pages {
    int32_t *free_pages; /* [n_pages], a stack: the last freed is taken first */
    int32_t n_free, n_pages;
    int32_t used_max; /* most pages that were ever in use at a time */
} sp_pages;

sp_status sp_pages_create(int32_t n_pages, sp_pages *out_pages);
void sp_pages_destroy(sp_pages *pages);

/* A free page, or -1. */
int32_t sp_pages_take(sp_pages *pages);
void sp_pages_give(sp_pages *pages, int32_t page);

/* Pages that hold n_tokens tokens. */
static inline int32_t sp_pages_for(int32_t n_tokens, int32_t page_tokens)
{
    return (n_tokens + page_tokens - 1) / page_tokens;
}

#endif
