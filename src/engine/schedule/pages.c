#include "engine/schedule/pages.h"

#include "base/alloc.h"

sp_status sp_pages_create(int32_t n_pages, sp_pages *out_pages)
{
    size_t n = (size_t)n_pages;
    sp_pages pages = {.n_free = n_pages, .n_pages = n_pages, .oldest = -1, .youngest = -1};

    pages.free_pages = sp_calloc(n, sizeof *pages.free_pages);
    pages.holders = sp_calloc(n, sizeof *pages.holders);
    pages.known = sp_calloc(n, sizeof *pages.known);
    pages.before = sp_calloc(n, sizeof *pages.before);
    pages.behind = sp_calloc(n, sizeof *pages.behind);
    if (!pages.free_pages || !pages.holders || !pages.known || !pages.before || !pages.behind) {
        sp_pages_destroy(&pages);
        return SP_ERR_MEMORY;
    }
    for (int32_t i = 0; i < n_pages; i++)
        pages.free_pages[i] = n_pages - 1 - i;
    *out_pages = pages;
    return SP_OK;
}

void sp_pages_destroy(sp_pages *pages)
{
    sp_free(pages->behind);
    sp_free(pages->before);
    sp_free(pages->known);
    sp_free(pages->holders);
    sp_free(pages->free_pages);
    *pages = (sp_pages){0};
}

static void note_use(sp_pages *pages)
{
    int32_t used = pages->n_pages - sp_pages_available(pages);

    if (used > pages->used_max)
        pages->used_max = used;
}

int32_t sp_pages_take(sp_pages *pages)
{
    int32_t page;

    if (pages->n_free == 0)
        return -1;
    page = pages->free_pages[--pages->n_free];
    pages->holders[page] = 1;
    note_use(pages);
    return page;
}

/* ---- idle pages ---------------------------------------------------------------------------- */

static void append_idle(sp_pages *pages, int32_t page)
{
    pages->before[page] = pages->youngest;
    pages->behind[page] = -1;
    if (pages->youngest >= 0)
        pages->behind[pages->youngest] = page;
    else
        pages->oldest = page;
    pages->youngest = page;
    pages->n_idle++;
}

static void remove_idle(sp_pages *pages, int32_t page)
{
    int32_t before = pages->before[page], behind = pages->behind[page];

    if (before >= 0)
        pages->behind[before] = behind;
    else
        pages->oldest = behind;
    if (behind >= 0)
        pages->before[behind] = before;
    else
        pages->youngest = before;
    pages->n_idle--;
}

int32_t sp_pages_evict(sp_pages *pages)
{
    int32_t page = pages->oldest;

    if (page < 0)
        return -1;
    remove_idle(pages, page);
    pages->known[page] = false;
    pages->holders[page] = 1;
    note_use(pages);
    return page;
}

void sp_pages_share(sp_pages *pages, int32_t page)
{
    if (pages->holders[page]++ > 0)
        return;
    remove_idle(pages, page);
    note_use(pages);
}

void sp_pages_give(sp_pages *pages, int32_t page)
{
    if (--pages->holders[page] > 0)
        return;
    if (pages->known[page])
        append_idle(pages, page);
    else
        pages->free_pages[pages->n_free++] = page;
}

void sp_pages_set_known(sp_pages *pages, int32_t page)
{
    pages->known[page] = true;
}
