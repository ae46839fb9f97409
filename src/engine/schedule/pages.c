#include "engine/schedule/pages.h"

#include "base/alloc.h"
#include "base/assert.h"

sp_status sp_pages_create(int32_t n_pages, sp_pages *out_pages)
{
    size_t n = (size_t)n_pages;
    sp_pages pages = {.n_free = n_pages, .n_pages = n_pages, .oldest = -1, .youngest = -1};

    pages.free_pages = sp_calloc(n, sizeof *pages.free_pages);
    pages.holders = sp_calloc(n, sizeof *pages.holders);
    pages.known = sp_calloc(n, sizeof *pages.known);
    pages.older = sp_calloc(n, sizeof *pages.older);
    pages.younger = sp_calloc(n, sizeof *pages.younger);
    if (!pages.free_pages || !pages.holders || !pages.known || !pages.older || !pages.younger) {
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
    sp_free(pages->younger);
    sp_free(pages->older);
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
    SP_ASSERT(pages->holders[page] == 0 && !pages->known[page]);
    pages->holders[page] = 1;
    note_use(pages);
    return page;
}

/* ---- idle pages ---------------------------------------------------------------------------- */

static void append_idle(sp_pages *pages, int32_t page)
{
    pages->older[page] = pages->youngest;
    pages->younger[page] = -1;
    if (pages->youngest >= 0)
        pages->younger[pages->youngest] = page;
    else
        pages->oldest = page;
    pages->youngest = page;
    pages->n_idle++;
}

static void remove_idle(sp_pages *pages, int32_t page)
{
    int32_t older = pages->older[page], younger = pages->younger[page];

    if (older >= 0)
        pages->younger[older] = younger;
    else
        pages->oldest = younger;
    if (younger >= 0)
        pages->older[younger] = older;
    else
        pages->youngest = older;
    pages->n_idle--;
}

int32_t sp_pages_evict(sp_pages *pages)
{
    int32_t page = pages->oldest;

    if (page < 0)
        return -1;
    SP_ASSERT(pages->holders[page] == 0 && pages->known[page]);
    remove_idle(pages, page);
    pages->known[page] = false;
    pages->holders[page] = 1;
    note_use(pages);
    return page;
}

void sp_pages_share(sp_pages *pages, int32_t page)
{
    SP_ASSERT(pages->holders[page] > 0 || pages->known[page]);
    if (pages->holders[page]++ > 0)
        return;
    remove_idle(pages, page);
    note_use(pages);
}

void sp_pages_give(sp_pages *pages, int32_t page)
{
    SP_ASSERT(pages->holders[page] > 0);
    if (--pages->holders[page] > 0)
        return;
    if (pages->known[page])
        append_idle(pages, page);
    else
        pages->free_pages[pages->n_free++] = page;
    SP_ASSERT(sp_pages_available(pages) <= pages->n_pages);
}

void sp_pages_set_known(sp_pages *pages, int32_t page)
{
    SP_ASSERT(sp_pages_is_private(pages, page));
    pages->known[page] = true;
}

/* ---- what must hold ------------------------------------------------------------------------ */

static bool is_free(const sp_pages *pages, int32_t page)
{
    return pages->holders[page] == 0 && !pages->known[page];
}

static bool is_idle(const sp_pages *pages, int32_t page)
{
    return pages->holders[page] == 0 && pages->known[page];
}

bool sp_pages_is_consistent(const sp_pages *pages)
{
    int32_t n_free = 0, n_idle = 0, older = -1;

    for (int32_t page = 0; page < pages->n_pages; page++) {
        n_free += is_free(pages, page);
        n_idle += is_idle(pages, page);
        if (pages->holders[page] < 0)
            return false;
    }
    if (n_free != pages->n_free || n_idle != pages->n_idle)
        return false;
    for (int32_t i = 0; i < n_free; i++)
        if (!is_free(pages, pages->free_pages[i]))
            return false;
    for (int32_t page = pages->oldest; page >= 0; older = page, page = pages->younger[page])
        if (n_idle-- == 0 || !is_idle(pages, page) || pages->older[page] != older)
            return false;
    return n_idle == 0 && pages->youngest == older;
}
